"""The interface between a connection and its medium: a channel, and the traffic that both sides of it share.

UCX and libfabric have a channel each. `connection.py` has the connection.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeAlias

import pyarrow as pa

from dissociated.base.buffers import Buffer
from dissociated.errors import ConnectionClosed, DissociatedError, RemoteProtocolError
from dissociated.memory.device.base import Device
from dissociated.memory.region import Region
from dissociated.memory.remote import Span
from dissociated.protocol.message import Incoming, Message
from dissociated.transport.base import OVERHEAD, Allocate, max_kept
from dissociated.transport.framed.framing import MAX_CONTROL, MAX_UNTAGGED
from dissociated.transport.native.threads import Monitor
from dissociated.transport.runs import MAX_RUN, RUN

#: Limit of bytes in flight in one direction. It bounds the memory that a peer which receives nothing can tie up, except
#: that a single message may be larger.
MAX_IN_FLIGHT = 1 << 26
#: Limit of bytes that arrived from a server and are kept until this side receives. It exceeds `max_kept` because UCX
#: does not report that small messages were received: while a client fetches one body, its server may send the addresses
#: of all that follow.
MAX_FROM_SERVER = 1 << 29


class UnderWay(NamedTuple):
    """A message that is being sent: the medium's request, its size in bytes, and the memory that must stay alive."""

    request: Any
    size: int
    owner: Any


class Traffic:
    """The messages of a connection that are being sent or have arrived, and the state of the peer.

    A connection shares it with its channel. Both use it with the lock of `monitor` held.

    Args:
        peer: The name of the peer, for messages.
        accepted: Whether this is the server's side.
        takes_runs: Whether the client takes runs.

    Raises:
        TransportError: No descriptor can be opened.
    """

    def __init__(self, peer: str, accepted: bool, takes_runs: bool = False) -> None:
        self.peer, self.accepted, self.takes_runs = peer, accepted, takes_runs
        self.monitor = Monitor()
        self.connected = False  #: whether the peer has accepted the connection, or has joined
        self.under_way: deque[UnderWay] = deque()  #: messages that are being sent, oldest first
        self.in_flight = 0  #: the bytes of these messages
        self.written = 0  #: the bytes of all messages that were sent
        self.arrivals: deque[Incoming] = deque()
        self.arrived_bytes = 0
        self.deferred_bytes = 0  #: bytes of messages that were announced and are not fetched yet
        self.max_untagged = MAX_CONTROL if accepted else MAX_UNTAGGED
        self.max_unread = max_kept() if accepted else MAX_FROM_SERVER
        self.retained: list[Region] = []  #: regions from which the peer may fetch
        self.failure: DissociatedError | None = None  #: an error of the peer, to be raised by the next call
        self.reason: str | None = None  #: the reason of the peer's abort
        self.peer_gone = False  #: whether the peer, or the path to it, is lost
        self.ended_time = 0.0  #: the time at which the loss was noticed, or the reason arrived

    def track(self, request: Any, size: int, owner: Any) -> None:
        """Record a message that is being sent. `owner` is kept alive, and must not change, until it has been sent."""
        self.under_way.append(UnderWay(request, size, owner))
        self.in_flight += size

    # Messages of the peer

    def arrive(self, incoming: Incoming) -> None:
        """Add a message that has arrived."""
        self.arrivals.append(incoming)
        self.arrived_bytes += OVERHEAD + len(incoming.data)
        self.monitor.wake()  # the sleeping thread may be waiting for this message, which another thread received

    def pop(self) -> Incoming:
        """Return the oldest message that has arrived, and remove it."""
        incoming = self.arrivals.popleft()
        self.arrived_bytes -= OVERHEAD + len(incoming.data)
        return incoming

    def is_run(self, tag: int | None) -> bool:
        """Return whether a message of the peer with this tag is a run. Only servers send runs."""
        return tag == RUN and self.takes_runs and not self.accepted

    def allocate(self, tag: int | None, length: int, allocate: Allocate) -> Buffer:
        """Allocate memory for a tagged message.

        Raises:
            RemoteProtocolError: The message is a run that is too long. Errors of `allocate` are passed on.
        """
        if not self.is_run(tag):
            return allocate(tag, length)
        if length > MAX_RUN:
            raise RemoteProtocolError(f"the peer sent a run of {length} bytes; it has at most {MAX_RUN} bytes")
        return allocate(None, length)

    def keep(self, tag: int | None, length: int) -> Buffer:
        """Allocate memory for a message that arrives while this side is not receiving."""
        if length > self.max_unread:
            raise RemoteProtocolError(f"the peer sent a message of {length} bytes while it should be receiving")
        return bytearray(length) if self.accepted else pa.allocate_buffer(length)

    def takes_only_small(self, allocate: Allocate) -> bool:
        """Return whether to receive only messages that have arrived as a whole.

        A client that is not receiving keeps such messages itself, because the medium would keep them without limit. It
        fetches no larger ones, because it might have to cancel that.
        """
        return not self.accepted and allocate == self.keep

    def check_kept(self) -> None:
        """Raise `RemoteProtocolError` if the peer sent more than this side keeps while it does not receive."""
        if self.arrived_bytes + self.deferred_bytes > self.max_unread:
            raise RemoteProtocolError(
                f"{self.peer} sends data, but receives none"
                if self.accepted
                else f"{self.peer} sent more than {self.max_unread} bytes before this side received any"
            )

    # The peer

    @property
    def peer_ended(self) -> bool:
        """Whether the peer is gone, or has given a reason for its end."""
        return self.peer_gone or self.reason is not None

    def lose(self) -> None:
        """Record that the peer is gone."""
        self.peer_gone, self.ended_time = True, time.monotonic()

    def give_up(self, reason: str) -> None:
        """Record the reason of the peer's abort."""
        self.reason, self.ended_time = reason, time.monotonic()

    def fail(self, error: DissociatedError) -> None:
        """Record an error of the peer, unless there was one before."""
        if self.failure is None:
            self.failure = error

    def check(self) -> None:
        """Raise the error of the peer, or `ConnectionClosed` if the peer is gone."""
        if self.failure is not None:
            raise self.failure
        if self.peer_gone:
            raise ConnectionClosed(f"sending to {self.peer}: the peer closed the connection")


#: Lets the medium work until its argument returns true, or the peer is gone.
WaitFor: TypeAlias = Callable[[Callable[[], bool]], None]


class Channel(ABC):
    """The end of a connection in a medium that works only when it is called. It moves messages and memory.

    It reports to `traffic`: messages that were sent or have arrived, and the end of the peer. The connection calls its
    methods with the lock of the traffic's monitor held, except `sleep`.
    """

    ffi: Any  #: the cffi interface of the medium's library
    #: Seconds between two calls of `beat`; None if the medium itself notices that a peer is dead.
    heartbeat: float | None = None
    #: The ports that must be open for connections, and how to choose them.
    ports_advice: str

    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic

    # Connecting and closing

    @abstractmethod
    def open(self) -> None:
        """Begin to connect. If this raises, the caller closes the channel."""

    @abstractmethod
    def connect(self, wait_for: WaitFor) -> None:
        """Wait until the server has accepted this client.

        Args:
            wait_for: Waits. It raises DeadlineExceeded if the server does not answer in time.

        Raises:
            TransportError: The connection fails.
        """

    @abstractmethod
    def send_abort(self, reason: str) -> bool:
        """Send the reason for an abort. Return False if the peer does not understand that message."""

    @abstractmethod
    def close(self) -> None:
        """Give all resources back to the medium, without waiting for long.

        Operations that are in progress may be dropped after that. The caller holds Ctrl-C back.
        """

    # Progress

    @abstractmethod
    def progress(self) -> bool:
        """Let the medium work for a moment. Return whether anything happened."""

    @abstractmethod
    def arm(self) -> bool:
        """Prepare to sleep. Return False if the medium has work to do first."""

    @abstractmethod
    def sleep(self, seconds: float) -> None:
        """Sleep until the medium has work to do or the waker is set, for `seconds` at most."""

    def beat(self, keep_arrived: Callable[[], None]) -> None:
        """Send a heartbeat, and check that the peer has sent one.

        Args:
            keep_arrived: Receives and keeps messages that have arrived. It raises RemoteProtocolError if there are too
                many.
        """

    # Sending

    @property
    @abstractmethod
    def encoding(self) -> Hashable:
        """A key of the result of `encode`, which suits every channel with an equal key."""

    @abstractmethod
    def encode(self, message: Message) -> Any:
        """Encode `message` for the medium. The result has a `size` in bytes."""

    @abstractmethod
    def has_room(self, size: int) -> bool:
        """Return whether `size` more bytes may be in flight."""

    @abstractmethod
    def send(self, message: Any) -> None:
        """Begin to send an encoded message."""

    @abstractmethod
    def complete(self, request: Any) -> bool | None:
        """Return whether the message of `request` was sent, and release `request`; None if it is still in progress."""

    def peer_has_all(self, all_sent: bool) -> bool:
        """Return whether the peer has received all messages, as far as the medium reports.

        Args:
            all_sent: Whether all messages were sent.
        """
        return all_sent

    # Receiving

    @abstractmethod
    def holds_message(self) -> bool:
        """Return whether the medium holds a message for this side."""

    @abstractmethod
    def receive(self, allocate: Allocate, most: int) -> bool:
        """Receive messages from the medium, and pass each to the traffic.

        Args:
            allocate: Returns the memory for a message.
            most: The number of bytes after which no further message is received.

        Returns:
            Whether some messages are still being received.
        """

    def receive_onto(self, device: Device) -> bool:
        """Return whether messages can also be received into memory of `device`. See `Connection.receive_onto`."""
        return False

    def consume(self, size: int) -> None:
        """Count a message of `size` bytes that the user of the connection has received."""

    # Memory

    @abstractmethod
    def read(self, span: Span, address: int, length: int, into: Any, at: int) -> bool:
        """Begin to read `length` bytes at `address` of the peer's memory, in `span`, into `into` at offset `at`.

        Returns:
            False if the medium does not accept the read now, so that it must be tried again later.
        """
