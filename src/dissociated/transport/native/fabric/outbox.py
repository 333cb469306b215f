"""Outgoing messages over libfabric: their pieces, and the queue in which they wait until libfabric accepts them."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from dissociated.errors import LocalProtocolError, TransportError
from dissociated.protocol.message import Message
from dissociated.transport.native.fabric.control import CONTROL, KIND_MASK, LARGE, Handshake
from dissociated.transport.native.fabric.dual_endpoint import ConnectionEndpoint
from dissociated.transport.native.fabric.memory import Completion
from dissociated.transport.native.library import view_of

_log = logging.getLogger(__name__)

_JOIN_LIMIT = 1 << 13  # size in bytes of a message up to which its parts are joined when it is encoded
_SINGLY = 1 << 22  # size in bytes from which copying a message costs more than fetching it in pieces
_STAGING = 4  # buffers that are kept for joining further messages


class FabricMessage(NamedTuple):
    """An encoded message. If it has more pieces than libfabric accepts, some are joined when it is sent."""

    tag: int | None
    size: int
    pieces: Sequence[Any]


def encode(ffi: Any, max_message: int, max_untagged: int, message: Message) -> FabricMessage:
    """Encode `message` for libfabric. An untagged message of more than `max_untagged` bytes is tagged LARGE.

    Raises:
        LocalProtocolError: if the tag is reserved, or the message is longer than `max_message` bytes.
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
    return FabricMessage(tag, size, [view_of(ffi, part) for part in parts])


class PendingSend:
    """A message that libfabric is sending, or that waits until libfabric accepts it."""

    __slots__ = ("has_ended", "memory", "pieces", "size", "tag")

    def __init__(self, tag: int | None, pieces: Sequence[Any], memory: bytearray | None = None) -> None:
        self.tag, self.pieces, self.memory = tag, pieces, memory
        self.size = 0  # bytes of a message of the protocol; 0 for a control message
        self.has_ended = False


class Joiner:
    """Joins pieces of messages that have more than `most` pieces."""

    def __init__(self, ffi: Any, most: int) -> None:
        self._ffi, self._most = ffi, most
        self._staging: list[bytearray] = []  # buffers that were used for joining, to be used again

    def fitted(self, message: FabricMessage) -> PendingSend:
        """Return `message` with at most as many pieces as libfabric accepts."""
        tag, size, pieces = message
        return PendingSend(tag, pieces) if len(pieces) <= self._most else self._joined(tag, size, pieces)

    def _joined(self, tag: int | None, size: int, pieces: Sequence[Any]) -> PendingSend:
        """Join the consecutive pieces with the fewest bytes, so that libfabric accepts the number of pieces.

        A buffer of an earlier message is used again if one is large enough: fresh memory doubles the cost.
        """
        single = self._most - 1 if size > _SINGLY else 0  # the number of pieces that are not joined
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
        """Release the memory of a message that has been sent, or never will be."""
        memory, sending.memory, sending.pieces = sending.memory, None, ()
        if memory is not None and len(self._staging) < _STAGING:
            self._staging.append(memory)

    def clear(self) -> None:
        """Release the buffers that are kept for further messages."""
        self._staging.clear()


#: Called with None for a message that was sent; otherwise with libfabric's error, or 0 if there is no error number. The
#: outbox does not keep it, because it refers to the outbox's owner.
Settled: TypeAlias = Callable[[PendingSend, int | None], None]


class Outbox:
    """A queue of messages for libfabric, which wait until it accepts them and the peer's address is known."""

    def __init__(self, endpoint: ConnectionEndpoint, handshake: Handshake) -> None:
        self._endpoint, self._handshake = endpoint, handshake
        self._ffi = endpoint.ofi.ffi
        self._joiner = Joiner(self._ffi, endpoint.iov_limit)
        self._waiting: deque[PendingSend] = deque()

    @property
    def first(self) -> PendingSend | None:
        """The oldest waiting message; None if none waits."""
        return self._waiting[0] if self._waiting else None

    def encode(self, message: Message) -> FabricMessage:
        """Encode `message` for libfabric. Raise LocalProtocolError if its tag is reserved, or it is too long."""
        return encode(self._ffi, self._endpoint.max_message, self._endpoint.max_untagged, message)

    def send_message(self, message: FabricMessage, settled: Settled) -> PendingSend:
        """Send `message` after the waiting ones, in at most as many pieces as libfabric accepts."""
        sending = self._joiner.fitted(message)
        sending.size = message.size
        return self.send(sending, settled)

    def send(self, sending: PendingSend, settled: Settled) -> PendingSend:
        """Send a message after the waiting ones."""
        if self._waiting or not self._begin(sending, settled):
            self._waiting.append(sending)
        return sending

    def advance(self, settled: Settled) -> None:
        """Pass waiting messages to libfabric until it accepts no more."""
        while self._waiting and self._begin(self._waiting[0], settled):
            if self._waiting:  # empty if the send failed, because the owner then clears the outbox
                self._waiting.popleft()

    def clear(self) -> None:
        """Drop the waiting messages, and the buffers that are kept for joining."""
        self._waiting.clear()
        self._joiner.clear()

    def _begin(self, sending: PendingSend, settled: Settled) -> bool:
        """Pass a message to libfabric. Return False if that must be tried again later."""
        if self._handshake.address is None:
            return False

        def on_done(completion: Completion) -> None:
            sending.has_ended = True
            settled(sending, completion.error or None)
            self._joiner.release(sending)

        try:
            return self._endpoint.send(self._handshake.address, sending.tag, sending.pieces, on_done)
        except TransportError as error:
            _log.debug("send failed: target=%r error=%s", settled, error)
            sending.has_ended = True
            settled(sending, 0)
            return True
