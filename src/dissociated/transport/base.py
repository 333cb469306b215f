"""The interface of transports: delimited messages, with or without a 64-bit tag.

The section "Requirements" of the specification says what transports must do. All calls block. A `timeout` limits the
seconds of the peer's silence, not the duration of a transfer.

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
from typing import Any, TypeAlias

from dissociated.base.buffers import Buffer
from dissociated.base.fork import ProcessBound
from dissociated.base.interrupts import interrupts_held
from dissociated.errors import DeadlineExceeded, DissociatedError, LocalProtocolError, TransportError
from dissociated.memory.device.base import Device
from dissociated.memory.region import AddressSpace, Region
from dissociated.memory.remote import Span
from dissociated.protocol.close_reason import reason_error
from dissociated.protocol.message import Incoming, Message, Run
from dissociated.protocol.wire import ADDRESS_SIZE
from dissociated.transport.states import Call, ConnectionState, Lifecycle
from dissociated.uri import Uri

#: Supplies the memory for a tagged message or a run of messages, given the tag, which is None for a run, and the length
#: in bytes. It raises an error to refuse the message. After `receive_onto`, the memory may be a DeviceBuffer.
Allocate: TypeAlias = Callable[[int | None, int], Buffer]


#: Parts of messages of up to this many bytes may be joined by copying. Larger parts are sent without a copy.
MAX_JOINED = 512
#: Bytes of memory that each message that is kept until it is received takes in addition to its data.
OVERHEAD = 256
#: Seconds: longer than any sensible wait, and short enough for every clock in the kernel and in Python.
_MAX_SECONDS = 1e6
#: Seconds between two polls of a connection that cannot signal the arrival of a message.
_POLL_INTERVAL = 0.005
_MAX_KEPT = 1 << 20  # bytes


def max_kept(max_tagged: int = 0) -> int:
    """Return the bytes of messages of a client that a server keeps while it sends.

    Args:
        max_tagged: The length of a message that frees all that the client holds. The client may instead free each
            address in a message of its own, as its batches end one by one.
    """
    return _MAX_KEPT + max_tagged // ADDRESS_SIZE * (ADDRESS_SIZE + OVERHEAD)


def check_timeout(timeout: float) -> float:
    """Return `timeout`, in seconds, limited to a value that every clock can represent.

    Raises:
        LocalProtocolError: The timeout is not a positive number.
    """
    if not timeout > 0:
        raise LocalProtocolError(f"a timeout is a positive number of seconds, not {timeout}")
    return min(timeout, _MAX_SECONDS)


class RemoteMemory:
    """The memory that the two sides of a connection let each other use. Media support a part of this interface."""

    def share(self, descriptor: int, base: int, size: int, backing: int, timeout: float) -> None:
        """Let the peer map a file or memfd, as the addresses `base` to `base + size`. The caller keeps the descriptor.

        Args:
            descriptor: A read-only descriptor.
            base: First address.
            size: Number of bytes.
            backing: A `Backing`.
            timeout: Seconds for which the peer may take nothing.
        """
        raise TransportError("the peer cannot map memory over this connection")

    def retain(self, region: Region) -> None:
        """Keep the memory of `region` alive until the peer can no longer fetch from it, even after `close`."""

    def fetch(self, ranges: Sequence[tuple[int, int, int]], memory: Buffer, timeout: float) -> None:
        """Fetch ranges of the peer's memory, one-sided: the peer need not act.

        Args:
            ranges: Address, length in bytes, and position in `memory` of each range. Positions must lie within
                `memory`.
            memory: The memory to write to.
            timeout: Seconds for which the peer may be silent.

        Raises:
            RemoteProtocolError: An address lies outside the memory that the peer's URI names. Nothing was fetched.
        """
        raise TransportError("the peer's memory cannot be fetched over this connection")


class Connection(ProcessBound, ABC):
    """A connection to one peer. At most two threads use it at a time: a sender and a receiver.

    `transport/states.py` has the table of its states: the calls that are allowed in each, and what each side sees.
    """

    #: Whether one stream after another may travel over this connection.
    carries_streams: bool = False
    #: Whether regions of memory can be shared over this connection.
    shares_memory: bool = False
    #: Whether `send` copies messages, so that their memory may change as soon as it has returned.
    copies: bool = False
    #: Whether only the kernel reads parts of messages of more than `MAX_JOINED` bytes. If such a part lies in a mapped
    #: file that has become shorter, `send` raises SourceError. Over other media, reading it ends this process.
    reads_in_kernel: bool = False
    #: Whether `send_at_once` is supported.
    sends_at_once: bool = False
    #: Least number of messages for which a run costs less than single messages.
    min_run: int = 1
    #: Whether closing discards messages that the peer has not received yet, unless `close` lingers.
    discards_unread: bool = False
    #: Whether the peer can fetch from memory that the listener has exposed.
    exposes_memory: bool = False
    #: Whether this side can fetch from the memory that the peer's URI names.
    supports_rma: bool = False

    def __init__(self, peer: str) -> None:
        #: A description of the peer, for people.
        self.peer = peer
        #: The regions that the peer has shared.
        self.address_space = AddressSpace()
        #: Time, by time.monotonic, by which the peer's request must be complete; None for no limit.
        self.request_deadline: float | None = None
        #: Whether forked processes hold memory of this connection. It then stays open in them after `close`.
        self.held_by_fork = False
        self._lifecycle = Lifecycle()
        self._linger = 0.0  # seconds
        self._peer_closed = False  # the result of `close`
        #: Whether `receive` has raised the reason for which the peer gave up.
        self.peer_gave_up = False
        self._woken = threading.Event()
        self.bind_to_process()

    @property
    def memory(self) -> RemoteMemory:
        """Return the interface for memory that the two sides use together.

        Raises:
            TransportError: The medium has none.
        """
        raise TransportError(f"memory can neither be mapped nor fetched over a connection to {self.peer}")

    @property
    def takes_runs(self) -> bool:
        """Return whether `prepare` takes runs of messages, too."""
        return False

    @property
    def written(self) -> int:
        """Return the number of bytes that the medium has taken, framing included, if it reports them while it sends."""
        return 0

    @property
    def backlog(self) -> int:
        """Return the number of bytes that were passed on to be sent and are not `written` yet."""
        return 0

    @property
    def unread(self) -> bool:
        """Return whether the peer still has to read something that this side has sent, as far as the medium tells."""
        return False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} with {self.peer}>"

    def handshake(self, timeout: float) -> None:
        """Agree with the peer on everything that must precede the first message, within `timeout` seconds in all.

        Most media need no handshake. `connect` calls this for the client. On an accepted connection, the connection's
        own thread calls it first.

        Raises:
            AccessDenied: This side does not trust the peer.
        """

    @property
    def is_reusable(self) -> bool:
        """Return whether another stream may follow the one that has ended. If its memory is still in use, none may."""
        return (
            self.carries_streams
            and self._lifecycle.state is ConnectionState.OPEN
            and not self.held_by_fork
            and not self.address_space.has_live_memory
        )

    def end_stream(self) -> None:
        """Drop the regions that the peer has shared for a stream, so that another may follow. Arrays stay valid."""
        self.address_space = AddressSpace()

    def limit_untagged(self, length: int) -> None:
        """Accept untagged messages of up to `length` bytes. A longer announcement ends the connection.

        Media that do not allocate memory for an announcement may ignore this.
        """

    def limit_tagged(self, length: int) -> None:
        """Accept tagged messages of up to `length` bytes that arrive while this side sends.

        `max_kept` is the limit of those that are kept.

        Media that do not allocate memory for them may ignore this.
        """

    def take_while_sending(self, take: Callable[[], object] | None) -> None:
        """Have `take` called while `send` waits, whenever a message of the peer has arrived. It may receive messages.

        Media that share no memory may ignore this. None ends it.
        """

    def receive_onto(self, device: Device) -> bool:
        """Return whether this connection can also receive into memory of `device`, if `allocate` supplies it.

        When `receive` returns such a message, every stream of the device sees its bytes. Once the connection has
        dropped its reference to the memory, it does not write there any more.
        """
        return False

    def _time_left(self, timeout: float) -> float:
        """Return the number of seconds for which a wait may last.

        Raises:
            DeadlineExceeded: `request_deadline` has passed.
        """
        if self.request_deadline is None:
            return timeout
        remaining = self.request_deadline - time.monotonic()
        if remaining <= 0:
            self.request_deadline = None  # the peer must still get the reason
            raise DeadlineExceeded(f"{self.peer} sent no complete request in time")
        return min(remaining, timeout)

    @abstractmethod
    def send(self, messages: Sequence[Message] | Any, timeout: float) -> None:
        """Send messages in order.

        On a connection that a listener accepted, messages that the peer sends meanwhile are kept for `receive`, so that
        two sides that both send cannot block each other forever.

        Args:
            messages: The messages, or the result of `prepare`. Unless the connection `copies`, it may refer to their
                parts until they are sent, and the content of the parts must not change.
            timeout: Seconds for which the peer may take nothing. If the connection `shares_memory`, they begin anew
                with each message of the peer.
        """

    def send_zeros(self, timeout: float) -> None:
        """Send zero bytes in place of the memory for which `send` has just raised SourceError. Never raises.

        The message is then complete, and its peer can be told a reason. So the peer must not use the message: nothing
        that it needs for this may have been sent. If more than 64 MiB of the message remain, nothing is sent, and the
        peer finds that the connection ends within the message.

        Args:
            timeout: Seconds for which the peer may take nothing.
        """

    def send_at_once(self, messages: Any) -> None:
        """Send a result of `prepare` without waiting.

        If the medium does not take everything now, the rest is the `backlog`. The next `send`, also of no messages,
        sends it first. If the connection `copies`, the rest is a copy, too.

        Any thread may call this while no other thread sends or receives. Another thread may `wait`.
        """
        raise TransportError(f"sending to {self.peer} may have to wait")

    @property
    def encoding(self) -> Hashable:
        """Return a key of this connection's encoding. Results of `prepare` suit every connection with an equal key."""
        return type(self), self.takes_runs

    def prepare(self, messages: Sequence[Message | Run]) -> Any:
        """Encode messages once, to send them any number of times on connections with the same `encoding`."""
        return messages

    @abstractmethod
    def receive(self, timeout: float, allocate: Allocate) -> Incoming | Run | None:
        """Receive the next message or run of messages.

        Args:
            timeout: Seconds for which the peer may be silent.
            allocate: Supplies the memory of tagged messages. Small messages may come in the transport's own memory.

        Returns:
            The message or run, or None if the peer sends no more. The peer may still receive; from then on, `arrived`
                returns whether the peer is known to be gone.

        Raises:
            RemoteError: The peer closed the connection for a reason, which the error has.
        """

    @abstractmethod
    def arrived(self) -> bool:
        """Return whether `receive` would find the beginning of a message, or the end of the connection.

        After `receive` has returned None, return whether the peer is known to be gone.
        """

    def wait(self, timeout: float) -> None:
        """Wait until a message has `arrived`, `wake` is called, or `timeout` seconds have passed.

        A `wake` since the last wait counts, too.
        """
        end = time.monotonic() + timeout
        while not self.arrived() and not self._woken.wait(_POLL_INTERVAL) and time.monotonic() < end:
            pass
        self._woken.clear()

    def pause(self, timeout: float) -> None:
        """Wait until `wake` is called, or `timeout` seconds have passed. The next `wait` notices such a `wake`, too."""
        self._woken.wait(timeout)

    def wake(self) -> None:
        """Make `wait` and `pause` return, also from another thread. Never raises."""
        self._woken.set()

    def close(self, reason: str | None = None, linger: float = 0) -> bool:
        """Close the connection, from any state. Never raises.

        Messages that were sent still arrive, unless the connection `discards_unread`.

        With `linger`, this only begins to close: this side sends nothing more, but still receives. The next call, or
        the end of the `with` block, waits until the peer has closed its end, too, and then closes.

        Args:
            reason: Tells the peer why, if the peer still listens. Of several reasons, only the first is told. A peer
                that has given a reason itself, which `receive` has raised, is told none.
            linger: Seconds for which to wait for the peer.

        Returns:
            Whether this call has waited until the peer had received everything, as far as the medium reports. If the
                connection `shares_memory`, True also means that the peer has closed its end: only then is the memory
                that the peer had mapped free again.
        """
        state = self._lifecycle.state
        is_open = state in (ConnectionState.OPEN, ConnectionState.SEND_ONLY)
        if reason is not None and is_open and not self.peer_gave_up:
            self._tell(reason, linger > 0)
        if linger > 0:
            self._linger = min(linger, _MAX_SECONDS)
            self._lifecycle.take(Call.LINGER)
            return self._peer_closed
        if self._lifecycle.state is ConnectionState.CLOSING:
            closed = self._wait_peer(self._linger)
            self._peer_closed = closed and self._lifecycle.state is ConnectionState.CLOSING
        with interrupts_held():
            self._release(self._lifecycle.take(Call.CLOSE))
        return self._peer_closed

    def interrupt(self, sending: bool = True) -> None:
        """Make calls in other threads return with ConnectionClosed. Never raises.

        Args:
            sending: Whether to end `send`, too. If not, this side may continue to send; `receive` returns None from now
                on, and, if the medium supports it, the peer's sends fail with ConnectionClosed.
        """
        self._lifecycle.take(Call.INTERRUPT if sending else Call.STOP_RECEIVING)
        self._interrupt(sending)

    def _given_up(self, reason: str) -> DissociatedError:
        """Return the error that `receive` raises for the reason of the peer."""
        self.peer_gave_up = True
        return reason_error(reason, self.peer)

    # Implemented by each medium

    @abstractmethod
    def _tell(self, reason: str, later: bool) -> None:
        """Send the peer the reason why this side closes. Never raises.

        Args:
            reason: The reason.
            later: Whether this side still receives after this call. A reason that the peer does not take now may then
                be sent later.
        """

    @abstractmethod
    def _wait_peer(self, seconds: float) -> bool:
        """Wait until the peer has closed its end, for `seconds` at most. Never raises.

        Returns:
            Whether the peer has closed its end, and had received everything.
        """

    @abstractmethod
    def _interrupt(self, sending: bool) -> None:
        """Wake other threads after the state was changed. Never raises."""

    @abstractmethod
    def _release(self, state: ConnectionState) -> None:
        """Release all resources that are not yet released. Never raises. Ctrl-C is delayed until this returns.

        Args:
            state: The state before the connection was closed.
        """

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Listener(ProcessBound, ABC):
    """A listener at `uri`, which has the actual port or path and no protocol parameters."""

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
        """Wait without a limit for the next connection, and return it. Return None once `close` was called."""

    @abstractmethod
    def close(self) -> None:
        """Stop accepting, also from another thread, and release everything, such as a socket's path. Never raises."""


class Transport(ABC):
    """A medium, selected by the scheme of a URI."""

    #: The class of its connections, which says what they can do.
    connection_type: type[Connection]
    #: Reach: 0 any host, 1 this host, 2 this process. The nearest transport that reaches a peer is preferred.
    locality: int = 0
    #: Whether messages are encrypted. Among equally near transports, encrypted ones are preferred.
    encrypted: bool = False

    @property
    def carries_streams(self) -> bool:
        """Whether one stream after another may travel over its connections."""
        return self.connection_type.carries_streams

    @property
    def shares_memory(self) -> bool:
        """Whether its connections can share regions of memory."""
        return self.connection_type.shares_memory

    @abstractmethod
    def connect(self, uri: Uri, timeout: float) -> Connection:
        """Connect to a listener.

        Raises:
            UriError: The URI lacks a part that this transport needs.
        """

    def reachable(self, uri: Uri) -> bool:
        """Return whether a connection from here can possibly succeed."""
        return True

    @abstractmethod
    def listen(self, uri: Uri) -> Listener:
        """Listen at `uri`. This transport chooses missing parts of it.

        Raises:
            TransportError: This process cannot listen there.
        """
