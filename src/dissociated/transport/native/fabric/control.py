"""Control messages, which the two ends of a connection over libfabric exchange beside the protocol.

They hold the names of the ends, how many bytes have been consumed, and why an end gives up, or that it closes: see
docs/fabric-peers.md.
"""

from __future__ import annotations

import struct
from enum import IntEnum

from dissociated.errors import RemoteProtocolError, TransportError
from dissociated.transport.native.addresses import advertised_names
from dissociated.transport.native.connection import MAX_IN_FLIGHT
from dissociated.transport.native.fabric.endpoint import ConnectionEndpoint

VERSION = b"\2"  # of what the two ends say to each other beside the protocol

CONTROL = 0xFE44_4953_534F_0000  # the tags of that, but for the lowest byte
KIND_MASK = 0xFF
#: The tag of an untagged message that is too large for those who receive many into one buffer, or does not come whole.
LARGE = CONTROL | 0x100
CONTROL_SIZE = 4096  # bytes of a control message, at most
CONTROL_BUFFERS = 8
#: The content of the JOIN of a client that takes runs; that of others is empty.
TAKES_RUNS = b"\x01"
#: How many bytes have been consumed.
CONSUMED = struct.Struct("<Q")


def is_control(tag: int | None) -> bool:
    """Whether a message with this tag is beside the protocol."""
    return tag is not None and tag & ~KIND_MASK == CONTROL


class Kind(IntEnum):
    """The kind of a control message: the lowest byte of its tag."""

    #: client to listener: the version, and the name of the client's endpoint
    HELLO = 1
    #: listener to client: the version, and the name of the endpoint to talk to
    WELCOME = 2
    #: client to that endpoint: nothing, or TAKES_RUNS; before it, the server sends nothing
    JOIN = 3
    #: now and then: how many bytes have been consumed, uint64. The heartbeat
    CREDIT = 4
    #: the reason for giving up, UTF-8
    ABORT = 5
    #: nothing: this end closes. It is answered by another
    BYE = 6
    #: JOIN and BYE for bodies, where those have endpoints of their own
    BODIES_JOIN = 7
    BODIES_BYE = 8


#: The first and the last message at each endpoint of a connection.
JOINS, BYES = (Kind.JOIN, Kind.BODIES_JOIN), (Kind.BYE, Kind.BODIES_BYE)


def held_up(tag: int) -> bool:
    """Whether a message with this tag has to wait until somebody claims it, or until others before it are claimed."""
    return not is_control(tag) or tag & KIND_MASK in (Kind.BODIES_JOIN, Kind.BODIES_BYE)


class Handshake:
    """The names that the two ends of a connection tell each other, as one end knows them.

    On the server's side `client` is the name of the client that will join.
    """

    def __init__(self, endpoint: ConnectionEndpoint, peer: str, client: bytes | None = None) -> None:
        self._endpoint = endpoint
        self._peer = peer
        #: The endpoint to send to, as libfabric numbers it; None until it is known.
        self.address: int | None = None
        self._accepted = client is not None
        self._client = client
        self._welcome: bytes | None = None
        self._bodies_joined = False
        #: Whether the client that has joined takes runs.
        self.takes_runs = False

    @property
    def joining(self) -> bool:
        """Whether the client is still to come."""
        return self._client is not None

    @property
    def hello(self) -> bytes:
        """The first message of a client."""
        return VERSION + self._endpoint.name

    @property
    def welcomed(self) -> bool:
        """Whether the server has answered that."""
        return self._welcome is not None

    def receive(self, kind: int, data: bytes) -> bool:
        """Take a message of the peer. Return False if it is no part of a handshake, or has come before."""
        if kind == Kind.WELCOME and not self._accepted and self._welcome is None:
            self._welcome = data
        elif kind == Kind.JOIN and self._client is not None:
            self.address, self._client = self._endpoint.insert(self._client), None
        elif kind == Kind.BODIES_JOIN and self._accepted and not self._bodies_joined:
            self._bodies_joined = True  # it has done its work: there is a connection
        else:
            return False
        if kind == JOINS[self._endpoint.lanes - 1]:  # what is said where requests come, too, and so before them
            self.takes_runs = data == TAKES_RUNS
        return True

    def take_name(self, host: str) -> None:
        """Send to the endpoint that the server, on `host`, answered with. Raises TransportError for what is none."""
        welcome = self._welcome or b""
        if not welcome.startswith(VERSION):
            raise TransportError(f"{self._peer} exchanges names in another way than version {VERSION[0]}")
        try:
            if len(welcome) != len(self.hello):
                raise ValueError
            self.address = self._endpoint.insert(advertised_names(welcome[1:], host))
        except (ValueError, OSError, struct.error):
            raise RemoteProtocolError(f"{self._peer} said what is no name of an endpoint") from None


#: Bytes that a message counts beside its own: libfabric may keep as many for one that nobody waits for.
_UNCLAIMED_OVERHEAD = 1 << 14
#: Bytes that a client has under way: libfabric takes in 32 messages whenever one is looked for, so a server notices one
#: who sends without end only when it has 32 times as much.
_CLIENT_WINDOW = 1 << 20
_REPORTS_PER_WINDOW = 8  # parts of what may be under way that are worth telling once they are consumed


class Credit:
    """The bytes that each side has sent and consumed, each message with its overhead."""

    def __init__(self, accepted: bool) -> None:
        self._sent = self._peer_consumed = 0
        self._consumed = self._reported = 0
        self._window = MAX_IN_FLIGHT if accepted else _CLIENT_WINDOW  # of ours
        self._peer_window = _CLIENT_WINDOW if accepted else MAX_IN_FLIGHT
        self._taken = self._largest = 0  # bytes that arrived, and the largest message of them, without its overhead

    # Ours

    @property
    def used(self) -> bool:
        """Whether anything was sent, or consumed."""
        return bool(self._sent or self._consumed)

    @property
    def spent(self) -> bool:
        """Whether the peer has consumed all that was sent."""
        return self._peer_consumed == self._sent

    def send(self, size: int) -> None:
        """A message of this size is under way."""
        self._sent += size + _UNCLAIMED_OVERHEAD

    def has_room(self, size: int) -> bool:
        """Whether a message of this size may be under way, too.

        Bytes are in flight until the peer has told that it consumed them.
        """
        in_flight = self._sent - self._peer_consumed
        return in_flight < self._window // 2 or in_flight + size <= self._window

    def receive_report(self, payload: bytes) -> bool | None:
        """The peer says how much it consumed. Whether that is more than before; None if it is more than it was sent."""
        (consumed,) = CONSUMED.unpack(payload)
        if consumed > self._sent:
            return None
        if consumed <= self._peer_consumed:
            return False  # one that was looked for may come after the next
        self._peer_consumed = consumed
        return True

    # The peer's

    @property
    def begun(self) -> bool:
        """Whether a message has arrived."""
        return bool(self._taken)

    def arrive(self, size: int) -> bool:
        """A message of this size arrived. Whether the peer waits until what it sends is consumed, as it has to."""
        self._largest = max(self._largest, size)
        self._taken += size + _UNCLAIMED_OVERHEAD
        return self._taken - self._reported - self._largest <= self._peer_window * 5 // 4

    def consume(self, size: int) -> None:
        """A message of this size was consumed."""
        self._consumed += size + _UNCLAIMED_OVERHEAD

    def consume_all(self) -> None:
        """All that arrived was consumed."""
        self._consumed = self._taken

    @property
    def should_report(self) -> bool:
        """Whether so much was consumed that the peer should know."""
        return self._consumed - self._reported >= self._peer_window // _REPORTS_PER_WINDOW

    def report(self) -> bytes:
        """Return the message that tells the peer how much was consumed."""
        self._reported = self._consumed
        return self.last_report()

    def last_report(self) -> bytes:
        """Return the last such message once more."""
        return CONSUMED.pack(self._reported)
