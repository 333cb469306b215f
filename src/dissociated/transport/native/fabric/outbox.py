"""Messages on their way out over libfabric, in as many pieces as that takes, and until it takes them."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from dissociated.errors import LocalProtocolError, TransportError
from dissociated.protocol.message import Message
from dissociated.transport.native.fabric.control import CONTROL, KIND_MASK, LARGE, Handshake
from dissociated.transport.native.fabric.endpoint import ConnectionEndpoint
from dissociated.transport.native.fabric.operations import Completion
from dissociated.transport.native.library import view_of

_log = logging.getLogger(__name__)

_JOIN_LIMIT = 1 << 13  # bytes up to which parts are copied together at once
_SINGLY = 1 << 22  # bytes from which copying costs more than fetching in pieces
_STAGING = 4  # pieces of memory that are kept to join messages in


class Outgoing(NamedTuple):
    """A message to be sent: at most as many pieces as libfabric takes, or more, which are joined on the way."""

    tag: int | None
    size: int
    pieces: Sequence[Any]


def encode(ffi: Any, max_message: int, max_untagged: int, message: Message) -> Outgoing:
    """A message as libfabric takes it: untagged beyond `max_untagged` bytes, it is tagged LARGE.

    Raises LocalProtocolError for what it cannot take.
    """
    tag, parts = message.tag, [part for part in message.parts if len(part)]
    size = sum(map(len, parts))
    if tag is not None and tag & ~(KIND_MASK | 0x100) == CONTROL:
        raise LocalProtocolError(f"the tag {tag:#x} is one of those that fabric keeps for itself")
    if size > max_message:
        raise LocalProtocolError(f"a message of {size} bytes is too long for libfabric")
    if tag is None and size > max_untagged:
        tag = LARGE
    if not parts or (len(parts) > 1 and size <= _JOIN_LIMIT):
        parts = [b"".join(parts)]
    return Outgoing(tag, size, [view_of(ffi, part) for part in parts])


class PendingSend:
    """A message that was given to libfabric, or waits until that takes it."""

    __slots__ = ("ended", "memory", "pieces", "size", "tag")

    def __init__(self, tag: int | None, pieces: Sequence[Any], memory: bytearray | None = None) -> None:
        self.tag, self.pieces, self.memory = tag, pieces, memory
        self.size = 0  # bytes, of a message that was asked for
        self.ended = False


class Joiner:
    """Joins the pieces of messages that have more than `most`."""

    def __init__(self, ffi: Any, most: int) -> None:
        self._ffi, self._most = ffi, most
        self._staging: list[bytearray] = []  # in which messages were joined, for the next ones

    def fitted(self, message: Outgoing) -> PendingSend:
        """The message in as many pieces as libfabric takes."""
        tag, size, pieces = message
        return PendingSend(tag, pieces) if len(pieces) <= self._most else self._joined(tag, size, pieces)

    def _joined(self, tag: int | None, size: int, pieces: Sequence[Any]) -> PendingSend:
        """A message in as many pieces as libfabric takes: those in a row are copied together that are the fewest bytes.

        In memory that was used before if there is some: fresh memory costs as much again.
        """
        single = self._most - 1 if size > _SINGLY else 0  # each piece is fetched by itself
        row = len(pieces) - single
        sizes = [sum(map(len, pieces[at : at + row])) for at in range(single + 1)]
        least = min(sizes)
        first = sizes.index(least)
        staged = next((at for at, memory in enumerate(self._staging) if least <= len(memory)), None)
        memory = bytearray(least) if staged is None else self._staging.pop(staged)
        whole = view_of(self._ffi, memoryview(memory)[:least])
        end = 0
        for piece in pieces[first : first + row]:
            self._ffi.memmove(whole + end, piece, len(piece))
            end += len(piece)
        return PendingSend(tag, [*pieces[:first], whole, *pieces[first + row :]], memory)

    def release(self, sending: PendingSend) -> None:
        """The message has been sent, or never will be: nothing that it consists of has to stay."""
        memory, sending.memory, sending.pieces = sending.memory, None, ()
        if memory is not None and len(self._staging) < _STAGING:
            self._staging.append(memory)

    def clear(self) -> None:
        """Keep no memory for messages to come."""
        self._staging.clear()


#: Told of a message that has been sent, with None; or why it was not, with libfabric's error, or 0 if there is none. It
#: belongs to the owner of the outbox, which does not keep it.
Settled: TypeAlias = Callable[[PendingSend, int | None], None]


class Outbox:
    """Gives messages to libfabric in order. They wait here until it takes them, and until the peer is known."""

    def __init__(self, endpoint: ConnectionEndpoint, handshake: Handshake) -> None:
        self._endpoint, self._handshake = endpoint, handshake
        self._ffi = endpoint.ofi.ffi
        self._joiner = Joiner(self._ffi, endpoint.iov_limit)
        self._waiting: deque[PendingSend] = deque()

    @property
    def first(self) -> PendingSend | None:
        """The message that waits for longest; None if none waits."""
        return self._waiting[0] if self._waiting else None

    def encode(self, message: Message) -> Outgoing:
        """A message as libfabric takes it. Raises LocalProtocolError for what it cannot take."""
        return encode(self._ffi, self._endpoint.max_message, self._endpoint.max_untagged, message)

    def send_message(self, message: Outgoing, settled: Settled) -> PendingSend:
        """Send it after what waits, in as many pieces as libfabric takes."""
        sending = self._joiner.fitted(message)
        sending.size = message.size
        return self.send(sending, settled)

    def send(self, sending: PendingSend, settled: Settled) -> PendingSend:
        """Send it after what waits."""
        if self._waiting or not self._begin(sending, settled):
            self._waiting.append(sending)
        return sending

    def advance(self, settled: Settled) -> None:
        """Give libfabric what waits, as far as it takes that now."""
        while self._waiting and self._begin(self._waiting[0], settled):
            if self._waiting:  # otherwise sending failed, and the owner has cleared it
                self._waiting.popleft()

    def clear(self) -> None:
        """Drop the messages that wait, and the memory that is kept to join messages in."""
        self._waiting.clear()
        self._joiner.clear()

    def _begin(self, sending: PendingSend, settled: Settled) -> bool:
        """Give it to libfabric. False if that has to be tried again later."""
        if self._handshake.address is None:
            return False

        def done(completion: Completion) -> None:
            sending.ended = True
            settled(sending, completion.error or None)
            self._joiner.release(sending)

        try:
            return self._endpoint.send(self._handshake.address, sending.tag, sending.pieces, done)
        except TransportError as error:
            _log.debug("%r: %s", settled, error)
            sending.ended = True
            settled(sending, 0)
            return True
