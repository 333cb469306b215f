"""What every transport offers ("Requirements"): delimited messages, with a 64-bit tag or without.

Everything blocks. A `timeout` is how many seconds the peer may be silent, not how long a transfer may take.

Every method may raise

    ConnectionClosed      the peer is gone, or this side closed the connection
    DeadlineExceeded      the peer was silent for `timeout` seconds
    RemoteProtocolError   the peer broke the framing
    TransportError        the medium failed in another way
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from types import TracebackType
from typing import Any, TypeAlias

from dissociated.base.buffers import Buffer
from dissociated.base.fork import ProcessBound
from dissociated.errors import DeadlineExceeded, LocalProtocolError, TransportError
from dissociated.memory.device.base import Device
from dissociated.memory.region import AddressSpace, Region
from dissociated.memory.remote import Span
from dissociated.protocol.message import Incoming, Message, Run
from dissociated.uri import Uri

#: Supplies the memory for a tagged message, given its tag and length in bytes, or for a run of messages, which has
#: no tag; raises to refuse it. After `receive_onto` that may be a DeviceBuffer.
Allocate: TypeAlias = Callable[[int | None, int], Buffer]


#: Longer than anybody waits, and short enough for every clock in the kernel and in Python.
_MAX_SECONDS = 1e6
#: Seconds between two looks at a connection that cannot tell by itself when something arrives.
_POLL_INTERVAL = 0.005


def check_timeout(timeout: float) -> float:
    """A timeout that every clock can count. Raises LocalProtocolError for what is no positive number."""
    if not timeout > 0:
        raise LocalProtocolError(f"a timeout is a positive number of seconds, not {timeout}")
    return min(timeout, _MAX_SECONDS)


class Connection(ProcessBound, ABC):
    """A connection to one peer. One thread may send while another receives; neither may be shared."""

    #: Whether regions of memory can be shared over this connection.
    shares_memory: bool = False
    #: Whether the memory of messages may change as soon as `send` has returned: they have been copied by then.
    copies: bool = False
    #: Whether `prepare` takes runs of messages, too.
    takes_runs: bool = False
    #: How many messages a run must have to cost less than these messages one by one.
    min_run: int = 1
    #: Whether the peer can fetch from memory that the listener has exposed.
    exposes_memory: bool = False
    #: Whether this side can fetch from memory of the peer's that its URI names.
    supports_rma: bool = False

    def __init__(self) -> None:
        #: The regions that the peer has shared.
        self.address_space = AddressSpace()
        #: When, by time.monotonic, the peer must have said what is waited for, however it does so; None: whenever.
        self.request_deadline: float | None = None
        #: Bytes that the medium has taken so far, with whatever they are wrapped in, where it tells while it sends.
        self.written = 0
        self._woken = threading.Event()
        self.bind_to_process()

    @property
    def backlog(self) -> int:
        """Bytes that were given to `send` and are not `written` yet; none where `send` waits for that."""
        return 0

    @property
    def peer(self) -> str:
        """Who is at the other end, for people."""
        return type(self).__name__

    def handshake(self, timeout: float) -> None:
        """Agree with the peer on what comes before any message, within `timeout` seconds in all.

        Most media need nothing. `connect` does it for the client; on a connection that was accepted, its own thread
        does it first. May also raise AccessDenied.
        """

    def limit_untagged(self, length: int) -> None:
        """Take untagged messages of up to so many bytes: one that is announced to be longer ends the connection.

        Media that allocate nothing for what is announced may ignore this.
        """

    def limit_tagged(self, length: int) -> None:
        """Keep tagged messages of up to so many bytes that arrive while this side sends, beside what it always keeps.

        Media that allocate nothing then may ignore this.
        """

    def keep_files(self) -> None:
        """From now on, keep open what regions are mapped from, on media that share files.

        Not where this process has too many descriptors.
        """

    def receive_onto(self, device: Device) -> bool:
        """Whether this connection receives into memory of that device, too, if that is allocated for a message.

        When `receive` gives such a message, its bytes are there, for whichever stream. Nothing writes to the memory any
        more once nothing here refers to it.
        """
        return False

    def _time_left(self, timeout: float) -> float:
        """How long a wait may take. Raises DeadlineExceeded where what the peer had to say is overdue."""
        if self.request_deadline is None:
            return timeout
        left = self.request_deadline - time.monotonic()
        if left <= 0:
            self.request_deadline = None  # it is still to be told
            raise DeadlineExceeded(f"{self.peer} took too long to say what it wants")
        return min(left, timeout)

    @abstractmethod
    def send(self, messages: Sequence[Message] | Any, timeout: float) -> None:
        """Send messages, or what `prepare` made of them, in order.

        The connection may keep references to the parts until they have been sent, unless it `copies`: what lies
        there must not change.
        On a connection that a listener accepted, what the peer sends meanwhile is kept for `receive`, so that two
        sides which both send cannot block each other for ever.
        """

    @property
    def encoding(self) -> Hashable:
        """How `prepare` encodes: what it made for one connection suits every other whose `encoding` is equal."""
        return type(self), self.takes_runs

    def prepare(self, messages: Sequence[Message | Run]) -> Any:
        """Encode messages once, to send them any number of times on connections whose `encoding` is the same."""
        return messages

    @abstractmethod
    def receive(self, timeout: float, allocate: Allocate) -> Incoming | Run | None:
        """The next message or run of messages, or None if the peer closed the connection between two messages.

        Small tagged messages may come in memory of the transport's own; for all others `allocate` supplies it.
        Raises RemoteError if the peer aborted, with its reason.
        """

    @abstractmethod
    def arrived(self) -> bool:
        """Whether a message, or at least its beginning, or the end of the connection is there to be received."""

    def peer_closed(self) -> bool | None:
        """Once `receive` has returned None: whether the peer is gone, and has not only ended what it sends.

        None where the medium cannot tell before something is sent. From then on `arrived` tells that it is gone.
        """
        return True

    def wait(self, timeout: float) -> None:
        """Wait until something has `arrived`, or `wake` was called since the last wait, but for `timeout` at most."""
        end = time.monotonic() + timeout
        while not self.arrived() and not self._woken.wait(_POLL_INTERVAL) and time.monotonic() < end:
            pass
        self._woken.clear()

    def wake(self) -> None:
        """Make `wait` return, also from another thread. Never raises."""
        self._woken.set()

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Tell the peer why this side gives up, as far as it still listens. `close` is still due. Never raises."""

    def send_close_reason(self, reason: str) -> None:
        """`abort` for a peer that may not listen now: it learns why when it comes to that, while this side receives."""
        self.abort(reason)

    def flush_close_reason(self, timeout: float) -> None:
        """Wait until the peer has taken what `send_close_reason` sent, or took nothing for `timeout`. Never raises."""

    def linger(self) -> bool:
        """Wait, without a limit, until the peer has closed the connection: so it gives back all that it has mapped.

        False where this side was interrupted before that. Media that share no memory do not wait.
        """
        return True

    @abstractmethod
    def interrupt(self) -> None:
        """Make whoever uses the connection in another thread return with ConnectionClosed. Never raises."""

    @abstractmethod
    def stop_receiving(self) -> None:
        """Make `receive` return None from now on, also in another thread, while this side may go on sending.

        Where the medium can tell, the peer's sends fail with ConnectionClosed. Never raises.
        """

    def finish(self, timeout: float) -> bool:
        """Wait until the peer has taken what was sent, and closed the connection, where closing earlier loses some.

        After `timeout` seconds of silence it returns all the same. Media whose `close` lets everything arrive do
        not wait. False where the medium knows of something that the peer has not taken. Never raises.
        """
        return True

    @abstractmethod
    def close(self) -> None:
        """Give the connection back. Messages already sent still arrive. Never raises."""

    def leave(self) -> None:
        """`close` it in this process alone: to the peer it stays open while a forked process has it. Never raises."""
        self.close()

    def share(self, descriptor: int, base: int, size: int, backing: int) -> None:
        """Let the peer map this memory, as the addresses `base` to `base + size`. The descriptor stays the caller's."""
        raise TransportError(f"{type(self).__name__} cannot share memory")

    def retain(self, region: Region) -> None:
        """Keep memory that the peer may fetch from until it can do so no more, also beyond `close`.

        Media whose peers cannot fetch do nothing.
        """

    def fetch(self, wanted: Sequence[tuple[int, int, int]], memory: Buffer, timeout: float) -> None:
        """Fetch (address, length, where in `memory`) from the peer, one-sided. Within `memory` they must stay.

        Raises RemoteProtocolError for an address outside of what the peer's URI names, before anything is fetched.
        """
        raise TransportError(f"{type(self).__name__} cannot fetch")

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Listener(ProcessBound, ABC):
    """Accepts connections at `uri`, which names the real port or path and has no protocol parameters."""

    uri: Uri
    #: Whether peers can fetch from memory that is exposed here.
    exposes_memory: bool = False

    def __init__(self) -> None:
        self.bind_to_process()

    def expose(self, region: Region) -> Span:
        """Let peers fetch from this memory, at its own addresses, until `region` is collected or this is closed."""
        raise TransportError(f"{type(self).__name__} cannot expose memory")

    @abstractmethod
    def accept(self) -> Connection | None:
        """The next connection; None once `close` was called. Blocks without a limit."""

    @abstractmethod
    def close(self) -> None:
        """Stop accepting, also from another thread; leave nothing behind. Never raises."""


class Transport(ABC):
    """A medium, chosen by the scheme of a URI."""

    #: The nearest transport that reaches a peer is the best: 0 any host, 1 this host, 2 this process.
    locality: int = 0
    #: Whether what it carries is encrypted. Of two that are equally near, the one that is goes first.
    encrypted: bool = False
    #: Whether its connections can share regions of memory.
    shares_memory: bool = False

    @abstractmethod
    def connect(self, uri: Uri, timeout: float) -> Connection:
        """Connect to a listener. Raises UriError where the URI lacks what this transport needs."""

    def reachable(self, uri: Uri) -> bool:
        """Whether it makes sense to try to connect from here."""
        return True

    @abstractmethod
    def listen(self, uri: Uri) -> Listener:
        """Listen at `uri`, whose missing parts this transport chooses. Raises TransportError if it cannot."""
