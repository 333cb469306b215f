"""Connections over a medium that delimits and tags messages by itself, so that they need no framing."""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, cast

import pyarrow as pa

from dissociated.base.buffers import Buffer
from dissociated.base.interrupts import interrupts_held
from dissociated.errors import (
    ConnectionClosed,
    DeadlineExceeded,
    DissociatedError,
    RemoteProtocolError,
    TransportError,
)
from dissociated.memory.region import Region
from dissociated.memory.remote import RemoteAddressSpace, Span
from dissociated.protocol.message import Incoming, Message, Run
from dissociated.transport.base import Allocate, Connection, RemoteMemory
from dissociated.transport.framed.framing import MAX_CONTROL, MAX_UNTAGGED
from dissociated.transport.native.threads import MAX_SLEEP, Waker, start_thread
from dissociated.transport.runs import MAX_RUN, MIN_RUN, RUN, parse_run, with_runs
from dissociated.transport.states import Call, ConnectionState

#: Limit of bytes in flight in one direction. It bounds the memory that a peer which receives nothing can tie up, except
#: that a single message may be larger.
MAX_IN_FLIGHT = 1 << 26
#: Limits of bytes that arrived and are kept until this side receives, from a client and from a server. Clients send
#: little. Servers need the larger limit because UCX does not report that small messages were received: while a client
#: fetches one body, its server may send the addresses of all that follow.
MAX_FROM_CLIENT, MAX_FROM_SERVER = 1 << 20, 1 << 29
#: Bytes of memory that each kept message takes in addition to its data.
OVERHEAD = 256
_ABORT_TIMEOUT = 1.0  # seconds to send the reason for an abort, and again for the peer to close
_CLOSE_TIMEOUT = 0.25  # seconds for the last messages to be sent
_DRAIN_TIMEOUT = 0.25  # seconds for messages to arrive that were in flight when the peer ended
_NO_WAKE = 0.005  # seconds between two polls once the peer is gone, since the medium may wake no thread any more
_TURN = 0.05  # seconds for which the background thread may hold the connection at a time
_YIELD_TIME = 0.001  # seconds for which the background thread then lets other threads use the connection
#: Bytes that are received ahead, plus one message: about as many as a TCP connection has in flight. A larger value
#: exceeds the processor's caches: 32 MB cost clients a fifth of their time.
_AHEAD = 1 << 22


class EncodedMessages(list[Any]):
    """Messages that `prepare` has encoded for a medium."""


class UnderWay(NamedTuple):
    """A message that is being sent: the medium's request, its size in bytes, and the memory that must stay alive."""

    request: Any
    size: int
    owner: Any


class NativeConnection(Connection, RemoteMemory):
    """A connection over a medium with messages of its own, which works only when it is called.

    Sending is asynchronous, and there is one descriptor to wait on. Two threads may use a connection, a sender and a
    receiver. The thread that has to wait lets the medium work for both. The methods of a subclass are called with the
    lock held, except `_sleep`. The creator of a connection sets `takes_runs` before anything is sent.
    """

    min_run = MIN_RUN
    discards_unread = True
    _ffi: Any  #: the cffi interface of the medium's library

    def __init__(self, peer: str, accepted: bool) -> None:
        super().__init__(peer)
        self._lock = threading.Condition()  # held while a thread uses the medium, and never twice
        self._asleep = False  # whether a thread sleeps on the medium; it wakes the other thread afterwards
        self._waker = Waker()
        self._under_way: deque[UnderWay] = deque()
        self._in_flight = 0  # bytes
        self._failure: DissociatedError | None = None  # an error of the peer, to be raised by the next call
        self._reason: str | None = None  # the reason of the peer's abort
        self._peer_gone = False  # whether the peer, or the path to it, is lost
        self._ended_time = 0.0  # the time at which the loss was noticed, or the reason arrived
        self._accepted = accepted
        self._max_untagged = MAX_CONTROL if accepted else MAX_UNTAGGED
        self._has_mover = False  # whether a background thread drives sends that no other thread waits for
        self._bytes_accepted = 0  # bytes of all messages passed to `send` so far
        self._arrivals: deque[Incoming] = deque()
        self._arrived_bytes = 0
        self._deferred_bytes = 0  # bytes of messages that were announced and are not fetched yet
        self._max_unread = MAX_FROM_CLIENT if accepted else MAX_FROM_SERVER
        self._closed = False  # whether the medium is released, or about to be
        self._released = False
        self._remote: RemoteAddressSpace | None = None
        self._retained: list[Region] = []  # regions from which the peer may fetch

    def limit_untagged(self, length: int) -> None:
        self._max_untagged = length

    def limit_tagged(self, length: int) -> None:
        if self._accepted:
            self._max_unread = MAX_FROM_CLIENT + length

    # Implemented by each medium

    @abstractmethod
    def _progress(self) -> bool:
        """Let the medium work for a moment. Return whether anything happened."""

    @abstractmethod
    def _arm(self) -> bool:
        """Prepare to sleep. Return False if the medium has work to do first."""

    @abstractmethod
    def _sleep(self, seconds: float) -> None:
        """Sleep until the medium has work to do or `_waker` is set, for `seconds` at most."""

    @abstractmethod
    def _complete(self, request: Any) -> bool | None:
        """Return whether the message of `request` was sent, and release `request`; None if it is still in progress."""

    @abstractmethod
    def _encode(self, message: Message) -> Any:
        """Encode `message` for the medium. The result has a `size` in bytes."""

    @abstractmethod
    def _start(self, message: Any) -> None:
        """Begin to send an encoded message."""

    @abstractmethod
    def _waiting(self) -> bool:
        """Return whether the medium holds a message for this side."""

    @abstractmethod
    def _take(self, allocate: Allocate, most: int) -> bool:
        """Receive messages from the medium, and pass each to `_arrive`.

        Args:
            allocate: returns the memory for a message.
            most: the number of bytes after which no further message is received.

        Returns:
            Whether some messages are still being received.
        """

    @abstractmethod
    def _send_abort(self, reason: str) -> bool:
        """Send the reason for an abort. Return False if the peer does not understand that message."""

    @abstractmethod
    def _read(self, span: Span, address: int, length: int, into: Any, at: int, timeout: float) -> None:
        """Begin to read `length` bytes at `address` of the peer's memory, in `span`, into `into` at offset `at`."""

    @abstractmethod
    def _release_medium(self) -> None:
        """Give all resources back to the medium, without waiting for long.

        Operations that are in progress may be dropped after that. The caller holds Ctrl-C back.
        """

    # Implemented here for all media

    def prepare(self, messages: Sequence[Message | Run]) -> EncodedMessages:
        single = with_runs(messages) if self.takes_runs else cast("Sequence[Message]", messages)
        return EncodedMessages(map(self._encode, single))

    def send(self, messages: Sequence[Message] | Any, timeout: float) -> None:
        self._lifecycle.take(Call.SEND)
        encoded = messages if isinstance(messages, EncodedMessages) else [*map(self._encode, messages)]
        with self._lock:
            for message in encoded:
                size = message.size
                if not self._has_room(size):
                    self._settle_until(lambda size=size: self._has_room(size), timeout)  # type: ignore[misc]
                self._check_open()
                self._bytes_accepted += size
                self._start(message)
            if not self._accepted:
                # A client sends little, so it waits for all of it. The deadline also holds if the server keeps sending.
                end = time.monotonic() + timeout
                self._settle_until(lambda: not self._under_way or time.monotonic() >= end, timeout)
                if self._under_way:
                    raise DeadlineExceeded(f"{self.peer} took nothing for {timeout:g} s")
            elif self._under_way:
                self._advance()
                self._keep_moving()

    def receive(self, timeout: float, allocate: Allocate) -> Incoming | Run | None:
        self._lifecycle.take(Call.RECEIVE)
        with self._lock:
            on_its_way = False

            def ready() -> bool:
                nonlocal on_its_way
                if not self._arrivals:
                    on_its_way = self._take(allocate, _AHEAD)
                if self._arrivals or self._failure or self._stops_receiving:
                    return True
                return self._peer_ended and not (on_its_way and time.monotonic() < self._ended_time + _DRAIN_TIMEOUT)

            if not self._drive(ready, timeout):
                raise DeadlineExceeded(f"{self.peer} was silent for {timeout:g} s")
            self._lifecycle.take(Call.RECEIVE)
            if self._stops_receiving:
                return None
            if self._arrivals:
                incoming = self._arrivals.popleft()
                self._arrived_bytes -= OVERHEAD + len(incoming.data)
                self._consumed(len(incoming.data))
                return parse_run(incoming.data) if self._is_run(incoming.tag) else incoming
            if self._failure is not None:
                raise self._failure
            if self._reason is not None:
                raise self._given_up(self._reason)
            if on_its_way:
                raise ConnectionClosed(f"{self.peer} closed the connection in the middle of a message")
            return None

    def reach(self, spans: Sequence[Span]) -> None:
        """Allow `fetch` to read from `spans` of the peer's memory."""
        self._remote, self.supports_rma = RemoteAddressSpace(spans), True

    @property
    def memory(self) -> RemoteMemory:
        return self

    def retain(self, region: Region) -> None:
        self._retained.append(region)

    def fetch(self, ranges: Sequence[tuple[int, int, int]], memory: Buffer, timeout: float) -> None:
        if self._remote is None:
            raise RemoteProtocolError(f"{self.peer} sent addresses, and its URI had no remote_handle")
        spans = [self._remote.find(address, length) for address, length, _ in ranges]
        view = self._ffi.from_buffer(memory, require_writable=True)
        with self._lock:
            for (address, length, at), span in zip(ranges, spans, strict=True):
                self._read(span, address, length, view, at, timeout)
            self._settle_until(lambda: not self._under_way, timeout)

    def arrived(self) -> bool:
        with self._lock:
            if self._closed:
                return True
            if not self._arrivals:
                self._progress()
            return bool(self._arrivals) or self._peer_ended or self._is_over or self._stops_receiving or self._waiting()

    def _wait_peer(self, seconds: float) -> bool:
        with self._lock, suppress(DissociatedError):
            self._drive(lambda: self._has(lambda: self._is_over), seconds)
        with self._lock:
            return self._taken_all()

    def _taken_all(self) -> bool:
        """Return whether the peer has received all messages, as far as the medium reports."""
        return not self.backlog

    def _tell(self, reason: str, later: bool) -> None:
        with self._lock:
            if self._closed:
                return
            self._end(lambda: not self._under_way or self._peer_gone or self._lifecycle.is_over, _ABORT_TIMEOUT)
            if not (self._peer_gone or self._lifecycle.is_over) and self._send_abort(reason) and not later:
                self._end(lambda: self._peer_gone or self._lifecycle.is_over, _ABORT_TIMEOUT)

    def _interrupt(self, sending: bool) -> None:
        self._waker.set()

    def _release(self, state: ConnectionState) -> None:
        with self._lock:
            try:
                if state is not ConnectionState.INTERRUPTED:
                    self._end(lambda: not self._under_way or self._peer_gone, _CLOSE_TIMEOUT)
            finally:  # also if a callback from the medium has failed
                self._release_once()

    def _release_once(self) -> None:
        """Release all resources after the last thread has left the medium. Later calls do nothing."""
        self._closed = True
        while self._asleep or self._has_mover:
            self._waker.set()
            self._lock.notify_all()
            self._lock.wait()
        if self._released:
            return
        self._released = True
        try:
            self._release_medium()
        finally:
            self._under_way.clear()
            self._retained.clear()
            self._arrivals.clear()
            self._waker.close()

    @property
    def backlog(self) -> int:
        return max(0, self._bytes_accepted - self.written)

    def _has_room(self, size: int) -> bool:
        """Return whether `size` more bytes may be in flight."""
        return not self._under_way or self._in_flight + size <= MAX_IN_FLIGHT

    def _settle_until(self, enough: Callable[[], bool], timeout: float) -> None:
        """Wait until `enough` returns true, and keep the messages that arrive from the peer meanwhile.

        Raises:
            DeadlineExceeded: if nothing happened for `timeout` seconds.
        """
        if not self._drive(lambda: self._has(enough) or self._is_over, timeout):
            raise DeadlineExceeded(f"{self.peer} took nothing for {timeout:g} s")
        self._check_open()

    def _has(self, enough: Callable[[], bool]) -> bool:
        """Return the result of `enough`; if it is false, also receive what has arrived.

        A medium accepts messages without limit, so the limit is enforced here.

        Raises:
            RemoteProtocolError: if the peer sent more than this side keeps while it does not receive.
        """
        if enough():
            return True
        if self._failure is not None:
            raise self._failure
        self._take(self._keep, self._max_unread)
        if self._arrived_bytes + self._deferred_bytes > self._max_unread:
            raise RemoteProtocolError(
                f"{self.peer} sends data, but receives none"
                if self._accepted
                else f"{self.peer} sent more than {self._max_unread} bytes before this side received any"
            )
        return False

    def _is_run(self, tag: int | None) -> bool:
        """Return whether a message of the peer with this tag is a run. Only servers send runs."""
        return tag == RUN and self.takes_runs and not self._accepted

    def _allocate(self, tag: int | None, length: int, allocate: Allocate) -> Buffer:
        """Allocate memory for a tagged message.

        Raises:
            RemoteProtocolError: if the message is a run that is too long. Errors of `allocate` are passed on.
        """
        if not self._is_run(tag):
            return allocate(tag, length)
        if length > MAX_RUN:
            raise RemoteProtocolError(f"the peer sent a run of {length} bytes; it has at most {MAX_RUN} bytes")
        return allocate(None, length)

    def _consumed(self, size: int) -> None:
        """Count a message of `size` bytes that was returned by `receive`."""

    def _only_small(self, allocate: Allocate) -> bool:
        """Return whether to receive only messages that have arrived as a whole.

        A client that is not receiving keeps such messages itself, because the medium would keep them without limit. It
        fetches no larger ones, because it might have to cancel that.
        """
        return not self._accepted and allocate == self._keep

    def _keep(self, tag: int | None, length: int) -> Buffer:
        """Allocate memory for a message that arrives while this side is not receiving."""
        if length > self._max_unread:
            raise RemoteProtocolError(f"the peer sent a message of {length} bytes while it should be receiving")
        return bytearray(length) if self._accepted else pa.allocate_buffer(length)

    def _end(self, is_done: Callable[[], bool], seconds: float) -> None:
        """Let the medium work until `is_done` returns true, for `seconds` at most.

        Errors of this library are ignored: there is no reason to wait for a peer that violates the protocol now.
        """
        end = time.monotonic() + seconds
        with suppress(DissociatedError):
            self._drive(lambda: self._has(is_done) or time.monotonic() >= end, seconds)

    def _keep_moving(self) -> None:
        """Let a background thread drive the sends in progress, since the source may take long for its next batch."""
        if not self._has_mover:
            start_thread(self._move, "move")
            self._has_mover = True
        elif self._asleep:
            self._waker.set()
        else:
            self._lock.notify_all()

    def _move(self) -> None:
        with self._lock:
            try:
                while not self._is_over:
                    if not self._under_way:
                        self._lock.wait(MAX_SLEEP)
                    else:
                        end = time.monotonic() + _TURN
                        self._drive(lambda end=end: self._moved() or time.monotonic() >= end, MAX_SLEEP)  # type: ignore[misc]
                        self._lock.wait(_YIELD_TIME)  # lets other threads have the lock, even if the peer keeps sending
            except TransportError:
                pass  # the next call of a user of the connection raises it
            except RemoteProtocolError as error:
                self._failure = error
            finally:
                self._has_mover = False
                self._lock.notify_all()

    def _moved(self) -> bool:
        return self._has(lambda: not self._under_way) or self._is_over

    def _arrive(self, incoming: Incoming) -> None:
        self._arrivals.append(incoming)
        self._arrived_bytes += OVERHEAD + len(incoming.data)
        if self._asleep:
            self._waker.set()  # the sleeping thread may be waiting for this message, which another thread received

    @property
    def _peer_ended(self) -> bool:
        return self._peer_gone or self._reason is not None

    @property
    def _is_over(self) -> bool:
        """Whether further sends are pointless: the peer is gone, or this side is interrupted or has failed."""
        return self._peer_gone or self._lifecycle.is_over or self._failure is not None

    @property
    def _stops_receiving(self) -> bool:
        """Whether `receive` must return at once, because of a call of this side."""
        return self._lifecycle.state is ConnectionState.SEND_ONLY or self._lifecycle.is_over

    def _check_open(self) -> None:
        if self._lifecycle.is_over:
            raise ConnectionClosed("this side closed the connection")
        if self._failure is not None:
            raise self._failure
        if self._peer_gone:
            raise ConnectionClosed(f"sending to {self.peer}: the peer closed the connection")

    def _drive(self, is_done: Callable[[], bool], timeout: float) -> bool:
        """Let the medium work until `is_done` returns true. Return False if nothing happened for `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while True:
            if self._closed:  # checked first, because `done` may use the medium, which is released by now
                raise ConnectionClosed("this side closed the connection")
            if is_done():
                return True
            if self._advance():
                deadline = time.monotonic() + self._time_left(timeout)
                continue
            remaining = self._time_left(deadline - time.monotonic())
            if remaining <= 0:
                return False
            self._wait(min(remaining, _NO_WAKE if self._peer_ended else MAX_SLEEP))

    def _wait(self, seconds: float) -> None:
        if self._asleep:
            self._lock.wait(seconds)
            return
        if not self._arm():
            return
        with interrupts_held(self._waker.set):
            self._asleep = True
            self._lock.release()
            try:
                self._sleep(seconds)
            finally:
                self._lock.acquire()
                self._asleep = False
                self._lock.notify_all()

    def _advance(self) -> bool:
        """Let the medium work, and remove messages that have been sent. Return whether anything happened.

        Only the oldest message is checked, since nearly all messages complete in order. It may turn out to be complete
        although the medium did nothing in this call.
        """
        moved = self._progress()
        while self._under_way and (was_sent := self._complete(self._under_way[0].request)) is not None:
            size = self._under_way.popleft().size
            self._in_flight -= size
            self.written += size if was_sent else 0
            moved = True
        if moved and self._asleep:
            self._waker.set()
        return moved

    def _track(self, request: Any, size: int, owner: Any) -> None:
        """Record a message that is being sent. `owner` is kept alive, and must not change, until it has been sent."""
        self._under_way.append(UnderWay(request, size, owner))
        self._in_flight += size

    def _lose(self) -> None:
        """Record that the peer is gone."""
        self._peer_gone, self._ended_time = True, time.monotonic()

    def _give_up(self, reason: str) -> None:
        """Record the reason of the peer's abort."""
        self._reason, self._ended_time = reason, time.monotonic()
