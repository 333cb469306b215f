"""A connection over a medium that delimits and tags messages by itself, so that nothing is framed here."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, cast

import pyarrow as pa

from dissociated.base.buffers import Buffer
from dissociated.errors import (
    ConnectionClosed,
    DeadlineExceeded,
    DissociatedError,
    RemoteProtocolError,
    TransportError,
)
from dissociated.memory.region import Region
from dissociated.memory.remote import RemoteAddressSpace, Span
from dissociated.protocol.close_reason import reason_error
from dissociated.protocol.message import Incoming, Message, Run
from dissociated.transport.base import Allocate
from dissociated.transport.framed.framing import MAX_CONTROL, MAX_UNTAGGED
from dissociated.transport.native.interrupts import interrupts_held
from dissociated.transport.native.progress import ProgressConnection
from dissociated.transport.native.runs import RUN, with_runs
from dissociated.transport.native.threads import MAX_SLEEP, start_thread
from dissociated.transport.runs import MAX_RUN, MIN_RUN, parse_run

#: Bytes that are under way in one direction: a peer that takes nothing costs no more memory than this, or one message.
MAX_IN_FLIGHT = 1 << 26
#: Bytes of messages kept that arrived while this side does something else than receiving them: of clients, who have
#: little to say, and of servers. UCX tells nobody that small messages have been taken: while a client fetches one body
#: its server may send the addresses of all that follow.
_MAX_FROM_CLIENT, _MAX_FROM_SERVER = 1 << 20, 1 << 29
#: Bytes that keeping a message takes beside its own.
OVERHEAD = 256
_ABORT_TIMEOUT = 1.0  # seconds for the peer to hear why
_CLOSE_TIMEOUT = 0.25  # seconds for what was sent last
_DRAIN_TIMEOUT = 0.25  # seconds for what was under way when the peer went
_TURN = 0.05  # seconds that the thread which keeps things moving may have the connection for itself
_YIELD_TIME = 0.001  # seconds in which others can take it
#: Bytes that are received at once, and one message more: about what a TCP connection has under way. More leaves the
#: processor's caches: 32 MB cost clients a fifth of their time.
_AHEAD = 1 << 22


class EncodedMessages(list[Any]):
    """Messages as a medium takes them: what `prepare` returns."""


class NativeConnection(ProgressConnection):
    """See the module. `takes_runs` is for whoever makes the connection to say, before anything is sent."""

    min_run = MIN_RUN
    _ffi: Any  #: cffi's, of the medium's library

    def __init__(self, peer: str, accepted: bool) -> None:
        super().__init__(peer)
        self._accepted = accepted
        self._max_untagged = MAX_CONTROL if accepted else MAX_UNTAGGED
        self._moving = False  # whether there is a thread for what is under way while nobody waits for it
        self._bytes_given = 0  # bytes, of all messages so far
        self._arrived: deque[Incoming] = deque()
        self._arrived_bytes = 0
        self._put_off_bytes = 0  # of messages that are known, and that are not fetched yet
        self._max_unread = _MAX_FROM_CLIENT if accepted else _MAX_FROM_SERVER
        self._stopped = False
        self._released = False
        self._remote: RemoteAddressSpace | None = None
        self._retained: list[Region] = []  # which the peer may fetch from

    def limit_untagged(self, length: int) -> None:
        self._max_untagged = length

    def limit_tagged(self, length: int) -> None:
        if self._accepted:
            self._max_unread = _MAX_FROM_CLIENT + length

    # What a medium does

    @abstractmethod
    def _encode(self, message: Message) -> Any:
        """A message as the medium takes it, with its `size` in bytes."""

    @abstractmethod
    def _start(self, message: Any) -> None:
        """Begin to send an encoded message."""

    @abstractmethod
    def _waiting(self) -> bool:
        """Whether the medium holds a message for us."""

    @abstractmethod
    def _take(self, allocate: Allocate, most: int) -> bool:
        """Take in messages that the medium holds, by `_arrive`, until there are more bytes of them than `most`.

        Whether some are still on their way.
        """

    @abstractmethod
    def _send_abort(self, reason: str) -> bool:
        """Send the reason for giving up. False if the peer does not know what that is."""

    @abstractmethod
    def _read(self, span: Span, address: int, length: int, into: Any, at: int, timeout: float) -> None:
        """Begin to read memory of the peer's, in this span, into the buffer `into`, from `at` on."""

    @abstractmethod
    def _release(self) -> None:
        """Give everything back to the medium, within moments. What was under way may be dropped after that.

        Ctrl-C is held back meanwhile.
        """

    # What that makes

    def prepare(self, messages: Sequence[Message | Run]) -> EncodedMessages:
        single = with_runs(messages) if self.takes_runs else cast("Sequence[Message]", messages)
        return EncodedMessages(map(self._encode, single))

    def send(self, messages: Sequence[Message] | Any, timeout: float) -> None:
        encoded = messages if isinstance(messages, EncodedMessages) else [*map(self._encode, messages)]
        with self._lock:
            for message in encoded:
                size = message.size
                if not self._has_room(size):
                    self._settle_until(lambda size=size: self._has_room(size), timeout)  # type: ignore[misc]
                self._check_open()
                self._bytes_given += size
                self._start(message)
            if not self._accepted:
                # What a client has to say is little. A server that sends without end shall not keep it here.
                end = time.monotonic() + timeout
                self._settle_until(lambda: not self._under_way or time.monotonic() >= end, timeout)
                if self._under_way:
                    raise DeadlineExceeded(f"{self._peer} took nothing for {timeout:g} s")
            elif self._under_way:
                self._advance()
                self._keep_moving()

    def receive(self, timeout: float, allocate: Allocate) -> Incoming | Run | None:
        with self._lock:
            on_its_way = False

            def ready() -> bool:
                nonlocal on_its_way
                if not self._arrived:
                    on_its_way = self._take(allocate, _AHEAD)
                if self._arrived or self._stopped or self._interrupted or self._broken:
                    return True
                return self._ended and not (on_its_way and time.monotonic() < self._ended_at + _DRAIN_TIMEOUT)

            if not self._drive(ready, timeout):
                raise DeadlineExceeded(f"{self._peer} was silent for {timeout:g} s")
            if self._stopped:
                return None
            if self._interrupted:
                raise ConnectionClosed("this side closed the connection")
            if self._arrived:
                incoming = self._arrived.popleft()
                self._arrived_bytes -= OVERHEAD + len(incoming.data)
                self._consumed(len(incoming.data))
                return parse_run(incoming.data) if self._is_run(incoming.tag) else incoming
            if self._broken is not None:
                raise self._broken
            if self._reason is not None:
                raise reason_error(self._reason, self._peer)
            if on_its_way:
                raise ConnectionClosed(f"{self._peer} closed the connection in the middle of a message")
            return None

    def reach(self, spans: Sequence[Span]) -> None:
        """Let `fetch` take from these spans of the peer's memory."""
        self._remote, self.supports_rma = RemoteAddressSpace(spans), True

    def fetch(self, wanted: Sequence[tuple[int, int, int]], memory: Buffer, timeout: float) -> None:
        if self._remote is None:
            raise RemoteProtocolError(f"{self._peer} sent addresses, and its URI had no remote_handle")
        spans = [self._remote.find(address, length) for address, length, _ in wanted]
        view = self._ffi.from_buffer(memory, require_writable=True)
        with self._lock:
            for (address, length, at), span in zip(wanted, spans, strict=True):
                self._read(span, address, length, view, at, timeout)
            self._settle_until(lambda: not self._under_way, timeout)

    def retain(self, region: Region) -> None:
        self._retained.append(region)

    def arrived(self) -> bool:
        with self._lock:
            if self._closed:
                return True
            if not self._arrived:
                self._progress()
            return bool(self._arrived) or self._ended or self._over or self._stopped or self._waiting()

    def finish(self, timeout: float) -> bool:
        # Closing while the last messages are in the network, or in the peer's queue, would lose them.
        with self._lock, suppress(DissociatedError):
            self._drive(lambda: self._has(lambda: self._over), timeout)
        with self._lock:
            return self._taken_all()

    def _taken_all(self) -> bool:
        """Whether, as far as the medium tells, the peer has taken all that was sent."""
        return not self.backlog

    def abort(self, reason: str) -> None:
        with self._lock:
            if self._closed:
                return
            self._end(lambda: not self._under_way or self._gone or self._interrupted, _ABORT_TIMEOUT)
            if not (self._gone or self._interrupted) and self._send_abort(reason):
                self._end(lambda: self._gone or self._interrupted, _ABORT_TIMEOUT)

    def interrupt(self) -> None:
        self._interrupted = True
        self._waker.set()

    def stop_receiving(self) -> None:
        self._stopped = True
        self._waker.set()

    def close(self) -> None:
        with interrupts_held(), self._lock:
            try:
                if not self._interrupted:
                    self._end(lambda: not self._under_way or self._gone, _CLOSE_TIMEOUT)
            finally:
                self._release_once()

    def _release_once(self) -> None:
        """Give everything back, once no thread uses the medium any more. Only the first call does."""
        self._closed = self._interrupted = True
        while self._asleep or self._moving:
            self._waker.set()
            self._lock.notify_all()
            self._lock.wait()
        if self._released:
            return
        self._released = True
        try:
            self._release()
        finally:
            self._under_way.clear()
            self._retained.clear()
            self._arrived.clear()
            self._waker.close()

    @property
    def backlog(self) -> int:
        return max(0, self._bytes_given - self.written)

    def _has_room(self, size: int) -> bool:
        """Whether so many bytes more may be under way."""
        return not self._under_way or self._in_flight + size <= MAX_IN_FLIGHT

    def _settle_until(self, enough: Callable[[], bool], timeout: float) -> None:
        """Wait until enough has been sent, taking in meanwhile what the peer sends."""
        if not self._drive(lambda: self._has(enough) or self._over, timeout):
            raise DeadlineExceeded(f"{self._peer} took nothing for {timeout:g} s")
        self._check_open()

    def _has(self, enough: Callable[[], bool]) -> bool:
        """Whether it has been enough; if not, what the peer sent is taken from the medium.

        Media take whatever comes, and they know no end of it.
        """
        if enough():
            return True
        if self._broken is not None:
            raise self._broken
        self._take(self._keep, self._max_unread)
        if self._arrived_bytes + self._put_off_bytes > self._max_unread:
            raise RemoteProtocolError(
                f"{self._peer} sends and does not receive"
                if self._accepted
                else f"{self._peer} sent more than {self._max_unread} bytes that nobody had asked for yet"
            )
        return False

    def _is_run(self, tag: int | None) -> bool:
        """Whether a message of the peer's with this tag is a run, which servers alone send."""
        return tag == RUN and self.takes_runs and not self._accepted

    def _allocate(self, tag: int | None, length: int, allocate: Allocate) -> Buffer:
        """Memory for a tagged message. Raises what `allocate` raises, and RemoteProtocolError for too long a run."""
        if not self._is_run(tag):
            return allocate(tag, length)
        if length > MAX_RUN:
            raise RemoteProtocolError(f"the peer sent a run of {length} bytes; it has at most {MAX_RUN} bytes")
        return allocate(None, length)

    def _consumed(self, size: int) -> None:
        """A message of this size was handed to whoever receives."""

    def _only_small(self, allocate: Allocate) -> bool:
        """Whether to take only what has arrived whole.

        A client that does not receive keeps what the medium would keep for it, so that there is a cap. But it begins to
        fetch nothing, which it might have to give up.
        """
        return not self._accepted and allocate == self._keep

    def _keep(self, tag: int | None, length: int) -> Buffer:
        """Allocate for what arrives while this side does not receive."""
        if length > self._max_unread:
            raise RemoteProtocolError(f"the peer sent a message of {length} bytes while it should be receiving")
        return bytearray(length) if self._accepted else pa.allocate_buffer(length)

    def _end(self, done: Callable[[], bool], seconds: float) -> None:
        """Let the medium work until `done`, but no longer than this, whatever the peer does. Never raises.

        One who breaks the rules now is not worth waiting for.
        """
        end = time.monotonic() + seconds
        with suppress(DissociatedError):
            self._drive(lambda: self._has(done) or time.monotonic() >= end, seconds)

    def _keep_moving(self) -> None:
        """See to it that what is under way moves, although nobody waits for it: a source may take its time."""
        if not self._moving:
            start_thread(self._move, "move", f"sending to {self._peer} takes a thread")
            self._moving = True
        elif self._asleep:
            self._waker.set()
        else:
            self._lock.notify_all()

    def _move(self) -> None:
        with self._lock:
            try:
                while not self._over:
                    if not self._under_way:
                        self._lock.wait(MAX_SLEEP)
                    else:
                        end = time.monotonic() + _TURN
                        self._drive(lambda end=end: self._moved() or time.monotonic() >= end, MAX_SLEEP)  # type: ignore[misc]
                        self._lock.wait(_YIELD_TIME)  # somebody else's turn, whatever the peer goes on to do
            except TransportError:
                pass  # whoever uses the connection next hears of it
            except RemoteProtocolError as error:
                self._broken = error
            finally:
                self._moving = False
                self._lock.notify_all()

    def _moved(self) -> bool:
        return self._has(lambda: not self._under_way) or self._over

    def _arrive(self, incoming: Incoming) -> None:
        self._arrived.append(incoming)
        self._arrived_bytes += OVERHEAD + len(incoming.data)
        if self._asleep:
            self._waker.set()  # it may wait for this, which another thread has found
