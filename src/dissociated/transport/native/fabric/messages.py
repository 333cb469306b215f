"""Messages over libfabric: the messages of the protocol, and control messages, which the two ends exchange, too.

Control messages carry the names of the endpoints, the number of consumed bytes (also as the heartbeat), the reason of
an abort, and the notice of a close: see docs/fabric-peers.md.
"""

from __future__ import annotations

import logging
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, TypeAlias

from dissociated.errors import LocalProtocolError, RemoteProtocolError, TransportError
from dissociated.protocol.message import Message
from dissociated.transport.native.addresses import advertised_names
from dissociated.transport.native.channel import MAX_IN_FLIGHT
from dissociated.transport.native.fabric.endpoint import ConnectionEndpoint
from dissociated.transport.native.fabric.memory import Completion
from dissociated.transport.native.library import view_of

_log = logging.getLogger(__name__)

VERSION = b"\2"  # of the control messages

CONTROL = 0xFE44_4953_534F_0000  # the tags of control messages, whose lowest byte is the kind
KIND_MASK = 0xFF
#: The tag of an untagged message that is too large for a buffer of many messages, or has to be fetched.
LARGE = CONTROL | 0x100
CONTROL_SIZE = 4096  # limit of bytes of a control message
CONTROL_BUFFERS = 8
#: The payload of the JOIN of a client that takes runs. The JOIN of other clients is empty.
TAKES_RUNS = b"\x01"
#: The payload of CREDIT: the number of consumed bytes.
CONSUMED = struct.Struct("<Q")


def is_control(tag: int | None) -> bool:
    """Return whether a message with this tag is a control message."""
    return tag is not None and tag & ~KIND_MASK == CONTROL


class Kind(IntEnum):
    """The kind of a control message: the lowest byte of its tag."""

    #: From the client to the listener: the version, and the name of the client's endpoint.
    HELLO = 1
    #: From the listener to the client: the version, and the name of the server's endpoint for this client.
    WELCOME = 2
    #: From the client to that endpoint: empty, or TAKES_RUNS. The server sends nothing before it.
    JOIN = 3
    #: The number of consumed bytes, uint64. It is also sent as the heartbeat.
    CREDIT = 4
    #: The reason of an abort, UTF-8.
    ABORT = 5
    #: Empty: this end closes. The other end answers with a BYE.
    BYE = 6
    #: JOIN and BYE for bodies, if bodies have endpoints of their own.
    BODIES_JOIN = 7
    BODIES_BYE = 8


#: The kinds of the first and of the last message at each endpoint of a connection.
JOINS, BYES = (Kind.JOIN, Kind.BODIES_JOIN), (Kind.BYE, Kind.BODIES_BYE)


def held_up(tag: int) -> bool:
    """Return whether a message with this tag waits until it is claimed, or until messages before it are claimed."""
    return not is_control(tag) or tag & KIND_MASK in (Kind.BODIES_JOIN, Kind.BODIES_BYE)


class Handshake:
    """The exchange of endpoint names between the two ends of a connection, as seen by this end.

    Args:
        endpoint: The endpoint of this end.
        peer: The name of the peer, for messages.
        client: On the server's side, the name of the endpoint of the client that will join.
    """

    def __init__(self, endpoint: ConnectionEndpoint, peer: str, client: bytes | None = None) -> None:
        self._endpoint = endpoint
        self._peer = peer
        #: Libfabric's number of the peer's endpoint; None until it is known.
        self.address: int | None = None
        self._accepted = client is not None
        self._client = client
        #: The server's answer to it; None before it arrives.
        self.welcome: bytes | None = None
        self._bodies_joined = False
        #: Whether the client that has joined takes runs.
        self.takes_runs = False

    @property
    def hello(self) -> bytes:
        """Return the first message of a client."""
        return VERSION + self._endpoint.name

    def receive(self, kind: int, data: bytes) -> bool:
        """Handle a control message of the peer. Return False if it is not part of the handshake, or is a repetition."""
        if kind == Kind.WELCOME and not self._accepted and self.welcome is None:
            self.welcome = data
        elif kind == Kind.JOIN and self._client is not None:
            self.address, self._client = self._endpoint.insert(self._client), None
        elif kind == Kind.BODIES_JOIN and self._accepted and not self._bodies_joined:
            self._bodies_joined = True  # nothing else to do, as its arrival shows that there is a connection
        else:
            return False
        if kind == JOINS[self._endpoint.lanes - 1]:  # at the endpoint of requests, so it arrives before them
            self.takes_runs = data == TAKES_RUNS
        return True

    def take_name(self, host: str) -> None:
        """Use the endpoint name in the server's answer as the address of the peer.

        Args:
            host: The IP address of the server.

        Raises:
            TransportError: The server uses another version of the exchange.
            RemoteProtocolError: The answer is not a valid name.
        """
        welcome = self.welcome or b""
        if not welcome.startswith(VERSION):
            raise TransportError(f"{self._peer} exchanges names in another way than version {VERSION[0]}")
        try:
            if len(welcome) != len(self.hello):
                raise ValueError
            self.address = self._endpoint.insert(advertised_names(welcome[1:], host))
        except (ValueError, OSError, struct.error):
            raise RemoteProtocolError(f"{self._peer} sent an invalid name of an endpoint") from None


_JOIN_LIMIT = 1 << 13  # size in bytes of a message up to which its parts are joined when it is encoded
_SINGLY = 1 << 22  # size in bytes from which copying a message costs more than fetching it in pieces
_STAGING = 4  # buffers that are kept for joining further messages


class FabricMessage(NamedTuple):
    """An encoded message. If it has more pieces than libfabric accepts, some are joined when it is sent."""

    tag: int | None
    size: int
    pieces: Sequence[Any]


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
        """Encode `message` for libfabric. An untagged message that is too long for that is tagged LARGE.

        Raises:
            LocalProtocolError: The tag is reserved, or libfabric sends no message of that length.
        """
        tag, parts = message.tag, [part for part in message.parts if len(part)]
        size = sum(map(len, parts))
        if tag is not None and tag & ~(KIND_MASK | 0x100) == CONTROL:
            raise LocalProtocolError(f"the tag {tag:#x} is one of those that fabric keeps for itself")
        if size > self._endpoint.max_message:
            raise LocalProtocolError(f"a message of {size} bytes is too long for libfabric")
        if tag is None and size > self._endpoint.max_untagged:
            tag = LARGE
        if not parts or (len(parts) > 1 and size <= _JOIN_LIMIT):
            parts = [b"".join(parts)]
        return FabricMessage(tag, size, [view_of(self._ffi, part) for part in parts])

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


#: Bytes that count for each message in addition to its data: libfabric may keep as many for an unclaimed message.
_UNCLAIMED_OVERHEAD = 1 << 14
#: Limit of bytes in flight from a client. Libfabric receives up to 32 messages at each peek, so a server may hold 32
#: times as many bytes before it notices that a client exceeds the limit.
_CLIENT_WINDOW = 1 << 20
_REPORTS_PER_WINDOW = 8  # consumption is reported after this fraction of the window


class Credit:
    """Flow control: the bytes that each side has sent and consumed, including the overhead of each message."""

    def __init__(self, accepted: bool) -> None:
        self._bytes_sent = self._peer_consumed = 0
        self._consumed = self._reported = 0
        self._window = MAX_IN_FLIGHT if accepted else _CLIENT_WINDOW  # limit of bytes in flight from this side
        self._peer_window = _CLIENT_WINDOW if accepted else MAX_IN_FLIGHT
        self._bytes_arrived = self._largest = (
            0  # bytes that arrived, and the size of the largest message without overhead
        )

    # Messages of this side

    @property
    def is_used(self) -> bool:
        """Whether anything was sent or consumed."""
        return bool(self._bytes_sent or self._consumed)

    @property
    def all_consumed(self) -> bool:
        """Whether the peer has consumed all that was sent."""
        return self._peer_consumed == self._bytes_sent

    def send(self, size: int) -> None:
        """Count a message of `size` bytes as sent."""
        self._bytes_sent += size + _UNCLAIMED_OVERHEAD

    def has_room(self, size: int) -> bool:
        """Return whether a message of `size` bytes may be sent now.

        Bytes are in flight until the peer has reported that it consumed them.
        """
        in_flight = self._bytes_sent - self._peer_consumed
        return in_flight < self._window // 2 or in_flight + size <= self._window

    def receive_report(self, payload: bytes) -> bool | None:
        """Handle the peer's report of consumed bytes.

        Returns:
            Whether the number has grown; None if it exceeds the number of bytes that were sent.
        """
        (consumed,) = CONSUMED.unpack(payload)
        if consumed > self._bytes_sent:
            return None
        if consumed <= self._peer_consumed:
            return False  # a report that was found by a peek may be handled after a later one
        self._peer_consumed = consumed
        return True

    # Messages of the peer

    @property
    def has_arrived(self) -> bool:
        """Whether a message has arrived."""
        return bool(self._bytes_arrived)

    def arrive(self, size: int) -> bool:
        """Count a message of `size` bytes as arrived. Return whether the peer has respected its window."""
        self._largest = max(self._largest, size)
        self._bytes_arrived += size + _UNCLAIMED_OVERHEAD
        return self._bytes_arrived - self._reported - self._largest <= self._peer_window * 5 // 4

    def consume(self, size: int) -> None:
        """Count a message of `size` bytes as consumed."""
        self._consumed += size + _UNCLAIMED_OVERHEAD

    def consume_all(self) -> None:
        """Count all messages that have arrived as consumed."""
        self._consumed = self._bytes_arrived

    @property
    def should_report(self) -> bool:
        """Whether enough was consumed since the last report to send another one."""
        return self._consumed - self._reported >= self._peer_window // _REPORTS_PER_WINDOW

    def report(self) -> bytes:
        """Return the payload of a new report of consumed bytes."""
        self._reported = self._consumed
        return self.last_report()

    def last_report(self) -> bytes:
        """Return the payload of the last report again."""
        return CONSUMED.pack(self._reported)


_MAX_MISSED = 10  # missing heartbeats after which a peer is considered dead
_REFUSED = 1.0  # seconds for which libfabric may refuse a message although it is idle


class Liveness:
    """The number of heartbeats that a peer has missed, and the time for which libfabric has refused a message to it."""

    def __init__(self) -> None:
        self.heard = True  #: whether the peer has sent anything since the last heartbeat
        self._missed = 0
        self._refused: object = None  # the message that libfabric refused at the last heartbeat, or None
        self._refused_at = 0.0  # the time since which it has refused it

    def miss(self) -> bool:
        """Count this interval as missed unless the peer was heard. Return whether it has missed too many."""
        self._missed = 0 if self.heard else self._missed + 1
        self.heard = False
        return self._missed >= _MAX_MISSED

    def refuses(self, waiting: object) -> bool:
        """Return whether libfabric has refused a message for so long that there is no connection any more.

        Args:
            waiting: The message that libfabric refuses although it is idle and accepted earlier ones, or None.
        """
        now = time.monotonic()
        if waiting is not self._refused:
            self._refused, self._refused_at = waiting, now
        return waiting is not None and now >= self._refused_at + _REFUSED
