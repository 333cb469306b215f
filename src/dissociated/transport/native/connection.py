"""Connections over a medium that delimits and tags messages by itself, so that they need no framing."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, cast

from dissociated.base.buffers import Buffer
from dissociated.errors import (
    ConnectionClosed,
    DeadlineExceeded,
    DissociatedError,
    RemoteProtocolError,
    TransportError,
)
from dissociated.memory.device.base import Device
from dissociated.memory.region import Region
from dissociated.memory.remote import RemoteAddressSpace, Span
from dissociated.protocol.message import Incoming, Message, Run
from dissociated.transport.base import Allocate, Connection, RemoteMemory, max_kept
from dissociated.transport.native.channel import Channel
from dissociated.transport.native.threads import MAX_SLEEP, heartbeat_of, start_thread
from dissociated.transport.runs import MIN_RUN, parse_run, with_runs
from dissociated.transport.states import Call, ConnectionState

_ABORT_TIMEOUT = 1.0  # seconds to send the reason for an abort, and again for the peer to close
_CLOSE_TIMEOUT = 0.25  # seconds for the last messages to be sent
_DRAIN_TIMEOUT = 0.25  # seconds for messages to arrive that were in flight when the peer ended
_NO_WAKE = 0.005  # seconds between two polls once the peer is gone, since the medium may wake no thread any more
_TURN = 0.05  # seconds for which the background thread may hold the connection at a time
_YIELD_TIME = 0.001  # seconds for which the background thread then lets other threads use the connection
_LOCK_TIMEOUT = 0.05  # seconds for which a heartbeat waits for the thread that uses the connection
#: Bytes that are received ahead, plus one message: about as many as a TCP connection has in flight. A larger value
#: exceeds the processor's caches: 32 MB cost clients a fifth of their time.
_READAHEAD = 1 << 22


class EncodedMessages(list[Any]):
    """Messages that `prepare` has encoded for a medium."""


class NativeConnection(Connection, RemoteMemory):
    """A connection over a channel, which works only when it is called. It owns the channel.

    Sending is asynchronous, and there is one descriptor to wait on. Two threads may use a connection, a sender and a
    receiver. The thread that has to wait lets the channel work for both. A client calls `connect` first, and a listener
    `open`.

    Args:
        channel: The channel.
        spans: The memory of the peer from which this side may fetch.
    """

    min_run = MIN_RUN
    discards_unread = True

    def __init__(self, channel: Channel, spans: Sequence[Span] = ()) -> None:
        self._channel, self._traffic = channel, channel.traffic
        super().__init__(channel.traffic.peer)
        self._accepted = channel.traffic.accepted
        self._monitor = channel.traffic.monitor
        self._lock = self._monitor.lock
        self._has_mover = False  # whether a background thread drives sends that no other thread waits for
        self._bytes_accepted = 0  # bytes of all messages passed to `send` so far
        self._closed = False  # whether the channel is closed, or about to be
        self._released = False
        self._remote = RemoteAddressSpace(spans)
        self.supports_rma = bool(spans)

    def open(self) -> None:
        """Begin to connect, or to answer a client. If this raises, the connection is closed.

        Raises:
            TransportError: The medium refuses.
        """
        try:
            with self._lock:
                self._channel.open()
            if self._channel.heartbeat is not None:
                heartbeat_of(os.getpid()).add(self._beat, self._channel.heartbeat)
        except BaseException:
            self.close()
            raise

    def connect(self, timeout: float) -> None:
        """Connect to the server. If this raises, the connection is closed.

        Args:
            timeout: The seconds to wait for the server in total.

        Raises:
            TransportError: The server rejects the client or cannot be reached.
            DeadlineExceeded: The server does not answer in time.
            RemoteProtocolError: The server violates the protocol.
        """
        self.open()
        end = time.monotonic() + timeout  # not extended by progress
        traffic = self._traffic

        def wait_for(is_done: Callable[[], bool]) -> None:
            def is_finished() -> bool:
                return is_done() or traffic.peer_gone or time.monotonic() >= end

            # `_has` enforces the limit for a server that keeps sending meanwhile.
            self._drive(lambda: self._has(is_finished), timeout)
            if traffic.failure is not None:
                raise traffic.failure
            if not (is_done() or traffic.peer_gone):
                raise DeadlineExceeded(
                    f"connecting to {self.peer}: no answer for {timeout:g} s; {self._channel.ports_advice}"
                )

        try:
            with self._lock:
                self._channel.connect(wait_for)
                traffic.connected = True
        except BaseException:
            self.close()
            raise

    @property
    def is_joining(self) -> bool:
        """Whether the client for which this connection was made has not joined yet."""
        return not (self._traffic.connected or self._closed)

    @property
    def takes_runs(self) -> bool:
        return self._traffic.takes_runs

    @property
    def written(self) -> int:
        return self._traffic.written

    @property
    def backlog(self) -> int:
        return max(0, self._bytes_accepted - self._traffic.written)

    def limit_untagged(self, length: int) -> None:
        self._traffic.max_untagged = length

    def limit_tagged(self, length: int) -> None:
        if self._accepted:
            self._traffic.max_unread = max_kept(length)

    def receive_onto(self, device: Device) -> bool:
        return self._channel.receive_onto(device)

    @property
    def encoding(self) -> Hashable:
        return self._channel.encoding, self.takes_runs

    def prepare(self, messages: Sequence[Message | Run]) -> EncodedMessages:
        single = with_runs(messages) if self.takes_runs else cast("Sequence[Message]", messages)
        return EncodedMessages(map(self._channel.encode, single))

    def send(self, messages: Sequence[Message] | Any, timeout: float) -> None:
        self._lifecycle.take(Call.SEND)
        channel, under_way = self._channel, self._traffic.under_way
        encoded = messages if isinstance(messages, EncodedMessages) else [*map(channel.encode, messages)]
        with self._lock:
            for message in encoded:
                size = message.size
                if not channel.has_room(size):
                    self._settle_until(lambda size=size: channel.has_room(size), timeout)  # type: ignore[misc]
                self._check_open()
                self._bytes_accepted += size
                channel.send(message)
            if not self._accepted:
                # A client sends little, so it waits for all of it. The deadline also holds if the server keeps sending.
                end = time.monotonic() + timeout
                self._settle_until(lambda: not under_way or time.monotonic() >= end, timeout)
                if under_way:
                    raise DeadlineExceeded(f"{self.peer} took nothing for {timeout:g} s")
            elif under_way:
                self._advance()
                self._keep_moving()

    def receive(self, timeout: float, allocate: Allocate) -> Incoming | Run | None:
        self._lifecycle.take(Call.RECEIVE)
        traffic = self._traffic
        with self._lock:
            on_its_way = False

            def ready() -> bool:
                nonlocal on_its_way
                if not traffic.arrivals:
                    on_its_way = self._channel.receive(allocate, _READAHEAD)
                if traffic.arrivals or traffic.failure or self._stops_receiving:
                    return True
                return traffic.peer_ended and not (
                    on_its_way and time.monotonic() < traffic.ended_time + _DRAIN_TIMEOUT
                )

            if not self._drive(ready, timeout):
                raise DeadlineExceeded(f"{self.peer} was silent for {timeout:g} s")
            self._lifecycle.take(Call.RECEIVE)
            if self._stops_receiving:
                return None
            if traffic.arrivals:
                incoming = traffic.pop()
                self._channel.consume(len(incoming.data))
                return parse_run(incoming.data) if traffic.is_run(incoming.tag) else incoming
            if traffic.failure is not None:
                raise traffic.failure
            if traffic.reason is not None:
                raise self._given_up(traffic.reason)
            if on_its_way:
                raise ConnectionClosed(f"{self.peer} closed the connection in the middle of a message")
            return None

    @property
    def memory(self) -> RemoteMemory:
        return self

    def retain(self, region: Region) -> None:
        self._traffic.retained.append(region)

    def fetch(self, ranges: Sequence[tuple[int, int, int]], memory: Buffer, timeout: float) -> None:
        if not self.supports_rma:
            raise RemoteProtocolError(f"{self.peer} sent addresses, and its URI had no remote_handle")
        spans = [self._remote.find(address, length) for address, length, _ in ranges]
        view = self._channel.ffi.from_buffer(memory, require_writable=True)
        with self._lock:
            for (address, length, at), span in zip(ranges, spans, strict=True):
                self._check_open()
                read = partial(self._channel.read, span, address, length, view, at)
                self._settle_until(read, timeout)
            self._settle_until(lambda: not self._traffic.under_way, timeout)

    def arrived(self) -> bool:
        with self._lock:
            if self._closed:
                return True
            traffic = self._traffic
            if not traffic.arrivals:
                self._channel.progress()
            return (
                bool(traffic.arrivals)
                or traffic.peer_ended
                or self._is_over
                or self._stops_receiving
                or self._channel.holds_message()
            )

    # Closing

    def _wait_peer(self, seconds: float) -> bool:
        with self._lock, suppress(DissociatedError):
            self._drive(lambda: self._has(lambda: self._is_over), seconds)
        with self._lock:
            return self._channel.peer_has_all(not self.backlog)

    def _tell(self, reason: str, later: bool) -> None:
        with self._lock:
            if self._closed:
                return
            self._end(lambda: not self._traffic.under_way or self._is_cut, _ABORT_TIMEOUT)
            if self._is_cut or not self._channel.send_abort(reason):
                return
            if not later:
                self._end(lambda: self._is_cut, _ABORT_TIMEOUT)
            elif self._traffic.under_way:
                with suppress(DissociatedError):
                    self._keep_moving()  # Until the caller waits for the peer, no other thread sends the reason.

    def _interrupt(self, sending: bool) -> None:
        self._monitor.waker.set()

    def _release(self, state: ConnectionState) -> None:
        if self._channel.heartbeat is not None:
            heartbeat_of(os.getpid()).remove(self._beat)
        traffic = self._traffic
        with self._lock:
            try:
                # A client that is not connected has no peer to wait for. A client of ours may be about to join.
                if state is not ConnectionState.INTERRUPTED and (traffic.connected or self._accepted):
                    self._end(lambda: not traffic.under_way or traffic.peer_gone, _CLOSE_TIMEOUT)
            finally:  # also if a callback from the medium has failed
                self._release_once()

    def _release_once(self) -> None:
        """Release all resources after the last thread has left the channel. Later calls do nothing."""
        self._closed = True
        while self._monitor.asleep or self._has_mover:
            self._monitor.waker.set()
            self._lock.notify_all()
            self._lock.wait()
        if self._released:
            return
        self._released = True
        try:
            self._channel.close()
        finally:
            self._traffic.under_way.clear()
            self._traffic.retained.clear()
            self._traffic.arrivals.clear()
            self._monitor.waker.close()

    def _end(self, is_done: Callable[[], bool], seconds: float) -> None:
        """Let the channel work until `is_done` returns true, for `seconds` at most.

        Errors of this library are ignored: there is no reason to wait for a peer that violates the protocol now.
        """
        end = time.monotonic() + seconds
        with suppress(DissociatedError):
            self._drive(lambda: self._has(is_done) or time.monotonic() >= end, seconds)

    # State

    @property
    def _is_cut(self) -> bool:
        """Whether no message can reach the peer: the peer is gone, or this side is interrupted."""
        return self._traffic.peer_gone or self._lifecycle.is_over

    @property
    def _is_over(self) -> bool:
        """Whether further sends are pointless: nothing reaches the peer, or the peer has failed."""
        return self._is_cut or self._traffic.failure is not None

    @property
    def _stops_receiving(self) -> bool:
        """Whether `receive` must return at once, because of a call of this side."""
        return self._lifecycle.state is ConnectionState.SEND_ONLY or self._lifecycle.is_over

    def _check_open(self) -> None:
        if self._lifecycle.is_over:
            raise ConnectionClosed("this side closed the connection")
        self._traffic.check()

    # Waiting

    def _settle_until(self, enough: Callable[[], bool], timeout: float) -> None:
        """Wait until `enough` returns true, and keep the messages that arrive from the peer meanwhile.

        Raises:
            DeadlineExceeded: Nothing happened for `timeout` seconds.
        """
        if not self._drive(lambda: self._has(enough) or self._is_over, timeout):
            raise DeadlineExceeded(f"{self.peer} took nothing for {timeout:g} s")
        self._check_open()

    def _has(self, enough: Callable[[], bool]) -> bool:
        """Return the result of `enough`; if it is false, also receive and keep what has arrived."""
        if enough():
            return True
        self._keep_arrived()
        return False

    def _keep_arrived(self) -> None:
        """Receive what has arrived, and keep it until `receive` is called.

        A medium accepts messages without limit, so the limit is enforced here.

        Raises:
            RemoteProtocolError: The peer sent more than this side keeps while it does not receive.
        """
        traffic = self._traffic
        if traffic.failure is not None:
            raise traffic.failure
        self._channel.receive(traffic.keep, traffic.max_unread)
        traffic.check_kept()

    def _drive(self, is_done: Callable[[], bool], timeout: float) -> bool:
        """Let the channel work until `is_done` returns true. Return False if nothing happened for `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while True:
            if self._closed:  # checked first, because `is_done` may use the channel, which is closed by now
                raise ConnectionClosed("this side closed the connection")
            if is_done():
                return True
            if self._advance():
                deadline = time.monotonic() + self._time_left(timeout)
                continue
            remaining = self._time_left(deadline - time.monotonic())
            if remaining <= 0:
                return False
            self._wait(min(remaining, _NO_WAKE if self._traffic.peer_ended else MAX_SLEEP))

    def _wait(self, seconds: float) -> None:
        if self._monitor.asleep:
            self._lock.wait(seconds)
        elif self._channel.arm():
            self._monitor.sleep(partial(self._channel.sleep, seconds))

    def _advance(self) -> bool:
        """Let the channel work, and remove messages that have been sent. Return whether anything happened.

        Only the oldest message is checked, since nearly all messages complete in order. It may turn out to be complete
        although the channel did nothing in this call.
        """
        channel, traffic = self._channel, self._traffic
        moved = channel.progress()
        while traffic.under_way and (was_sent := channel.complete(traffic.under_way[0].request)) is not None:
            size = traffic.under_way.popleft().size
            traffic.in_flight -= size
            traffic.written += size if was_sent else 0
            moved = True
        if moved:
            self._monitor.wake()
        return moved

    # The background

    def _keep_moving(self) -> None:
        """Let a background thread drive the sends in progress, since the source may take long for its next batch."""
        if not self._has_mover:
            start_thread(self._move, "move")
            self._has_mover = True
        elif self._monitor.asleep:
            self._monitor.waker.set()
        else:
            self._lock.notify_all()

    def _move(self) -> None:
        with self._lock:
            try:
                while not self._is_over:
                    if not self._traffic.under_way:
                        self._lock.wait(MAX_SLEEP)
                    else:
                        end = time.monotonic() + _TURN
                        self._drive(lambda end=end: self._has_moved() or time.monotonic() >= end, MAX_SLEEP)  # type: ignore[misc]
                        self._lock.wait(_YIELD_TIME)  # lets other threads have the lock, even if the peer keeps sending
            except TransportError:
                pass  # the next call of a user of the connection raises it
            except RemoteProtocolError as error:
                self._traffic.fail(error)
            finally:
                self._has_mover = False
                self._lock.notify_all()

    def _has_moved(self) -> bool:
        return self._has(lambda: not self._traffic.under_way) or self._is_over

    def _beat(self) -> None:
        """Let the channel send its heartbeat, unless another thread uses the connection."""
        if not self._lock.acquire(timeout=_LOCK_TIMEOUT):
            return  # the heartbeats of other connections must not be delayed
        try:
            if not (self._closed or self._is_over):
                self._channel.beat(self._keep_arrived)
        except RemoteProtocolError as error:
            self._traffic.fail(error)
        finally:
            if self._is_over:
                self._monitor.wake()
            self._lock.release()
