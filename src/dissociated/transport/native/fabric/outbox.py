"""What is sent to one peer over libfabric, which may ask to be given it again later."""

from __future__ import annotations

import logging
from collections import deque
from typing import Protocol

from dissociated.errors import TransportError
from dissociated.protocol.message import Message
from dissociated.transport.native.fabric.operations import Completion
from dissociated.transport.native.fabric.outgoing import Joiner, Outgoing, PendingSend, encode
from dissociated.transport.native.fabric.provider import ConnectionEndpoint

_log = logging.getLogger(__name__)


class SendHandler(Protocol):
    """Whoever is told. It owns the outbox, which does not keep it."""

    def sent(self, sending: PendingSend) -> None:
        """It has been sent."""

    def lose_by(self, error: int) -> None:
        """Sending has failed."""


class Outbox:
    """Gives messages to libfabric in order. They wait here until it takes them, and until the peer is known."""

    def __init__(self, endpoint: ConnectionEndpoint) -> None:
        self._endpoint = endpoint
        self._ffi = endpoint.ofi.ffi
        self._joiner = Joiner(self._ffi, endpoint.iov_limit)
        self._waiting: deque[PendingSend] = deque()
        self.peer: int | None = None  #: its number, once it may be sent to

    @property
    def first(self) -> PendingSend | None:
        """What waits for longest; None if nothing waits."""
        return self._waiting[0] if self._waiting else None

    def encode(self, message: Message) -> Outgoing:
        """A message as libfabric takes it. Raises LocalProtocolError for what it cannot take."""
        return encode(self._ffi, self._endpoint.max_message, self._endpoint.max_untagged, message)

    def send_message(self, message: Outgoing, handler: SendHandler) -> PendingSend:
        """Send it after what waits, in as many pieces as libfabric takes."""
        sending = self._joiner.fitted(message)
        sending.size = message.size
        return self.send(sending, handler)

    def send(self, sending: PendingSend, handler: SendHandler) -> PendingSend:
        """Send it after what waits."""
        if self._waiting or self.peer is None or not self._begin(sending, self.peer, handler):
            self._waiting.append(sending)
        return sending

    def advance(self, handler: SendHandler) -> None:
        """Give libfabric what waits, as far as it takes that now."""
        while self._waiting and self.peer is not None and self._begin(self._waiting[0], self.peer, handler):
            if self._waiting:  # otherwise sending failed, and the handler has cleared it
                self._waiting.popleft()

    def clear(self) -> None:
        """Drop the messages that wait, and the memory that is kept to join messages in."""
        self._waiting.clear()
        self._joiner.clear()

    def _begin(self, sending: PendingSend, peer: int, handler: SendHandler) -> bool:
        def done(completion: Completion) -> None:
            sending.ended = True
            if completion.error:
                handler.lose_by(completion.error)
            else:
                handler.sent(sending)
            self._joiner.release(sending)

        try:
            return self._endpoint.send(peer, sending.tag, sending.pieces, done)
        except TransportError as error:
            _log.debug("%r: %s", handler, error)
            sending.ended = True
            handler.lose_by(0)
            return True
