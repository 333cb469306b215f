"""A connection over a stream socket, the common part of tcp, tls and shm."""

from __future__ import annotations

import errno
import fcntl
import os
import select
import socket
import struct
import termios
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from dissociated.base.buffers import Buffer
from dissociated.base.oserrors import socket_error
from dissociated.errors import (
    ConnectionClosed,
    DeadlineExceeded,
    DissociatedError,
    RemoteProtocolError,
    TransportError,
)
from dissociated.protocol.close_reason import decode_reason, encode_reason
from dissociated.protocol.message import Incoming, Message, Run
from dissociated.transport.base import OVERHEAD, Allocate, Connection, Listener, max_kept
from dissociated.transport.framed.framing import (
    MAX_CONTROL,
    MAX_UNTAGGED,
    PREAMBLE,
    Frame,
    FrameKind,
    FrameReader,
    encode_frame,
    encode_frames,
    encode_frames_with_runs,
)
from dissociated.transport.runs import MIN_RUN, parse_run
from dissociated.transport.states import Call, ConnectionState
from dissociated.uri import Uri

_IOV_MAX = os.sysconf("SC_IOV_MAX")
_SEND_FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
_CHECK_INTERVAL = 1.0  # seconds
_NO_WAIT = 0.001  # seconds for which a read waits for the rest of a message that has begun to arrive
_MAX_SILENCE = 15.0  # seconds without an acknowledgement
#: Three fields of the kernel's `struct tcp_info`: the number of unanswered probes, the number of unacknowledged
#: segments, and the milliseconds since the last acknowledgement.
_tcp_info = struct.Struct("=3xB4x16xI28xI")
_TCP_RTO_MAX_MS = 44  # an option of Linux 6.15, for which the module `socket` has no name
_PROBE_INTERVAL = 4000  # milliseconds
_MAX_PROBES = 3  # unanswered probes after which a peer that takes nothing counts as gone
_ABORT_TIMEOUT = 1.0  # seconds; the peer may not be reading any more
_timeval = struct.Struct("ll")
_ZEROS = memoryview(bytes(1 << 20))
_MAX_ZEROS = 1 << 26  # bytes that are sent in place of memory that could not be read


class EncodedFrames(list[Buffer]):
    """The frames of messages, in parts to be sent one after the other. `prepare` returns it."""


class SocketConnection(Connection):
    """A connection that sends framed messages over a connected stream socket, which this object owns.

    On an `accepted` connection, one thread both sends and receives. A client receives in one thread and frees leases in
    another.
    """

    #: Messages are copied, never sent by reference (sendfile, MSG_ZEROCOPY): the kernel would not tell when the peer
    #: has received them.
    copies = True
    reads_in_kernel = True
    carries_streams = True
    sends_at_once = True
    takes_runs = True
    written = 0
    min_run = MIN_RUN

    def __init__(self, sock: socket.socket, peer: str, accepted: bool) -> None:
        super().__init__(peer)
        sock.setblocking(True)
        self._socket = sock
        # Clients send no metadata. A server accepts just enough untagged bytes to refuse them with a proper error.
        self._reader = FrameReader(self._read_into, MAX_CONTROL if accepted else MAX_UNTAGGED)
        self._preamble_sent = False
        self._cut_short = False  # whether a send broke off, after which `_unsent_parts` must be sent next
        self._unsent_parts: list[Any] = []
        self._unreadable: list[Any] = []  # the rest of a send, from memory on that could not be read
        self._arrived: deque[Frame] = deque()  # messages that arrived while this side sent, kept for `receive`
        self._arrived_bytes = 0
        self._max_tagged = 0  # bytes of a tagged message that may arrive while this side sends
        self._take_while_sending: Callable[[], object] | None = None
        self._peer_stopped = False  # whether the peer will send no more
        self._end_received = False  # whether `receive` has returned None because of that
        self._wake_descriptor: int | None = None  # an eventfd, made by the first `wait`
        self._waking = threading.Lock()  # held while another thread writes to the eventfd, and while it is closed
        self._accepted = accepted
        self._socket_timeout = 0.0  # seconds, as set in the kernel

    @property
    def unread(self) -> bool:
        # For Unix sockets, these are the bytes that the peer has not received; for TCP, those that its host has not
        # acknowledged.
        count = bytearray(4)
        try:
            fcntl.ioctl(self._socket, termios.TIOCOUTQ, count)
        except (OSError, ValueError):
            return False  # closed
        return any(count)

    @property
    def backlog(self) -> int:
        return sum(map(len, self._unsent_parts)) if self._unsent_parts else 0

    def limit_untagged(self, length: int) -> None:
        self._reader.limit_untagged(length)

    def limit_tagged(self, length: int) -> None:
        self._max_tagged = length

    def take_while_sending(self, take: Callable[[], object] | None) -> None:
        self._take_while_sending = take

    def prepare(self, messages: Sequence[Message | Run]) -> EncodedFrames:
        return EncodedFrames(encode_frames_with_runs(messages))

    def send(self, messages: Sequence[Message] | Any, timeout: float) -> None:
        self._lifecycle.take(Call.SEND)
        parts = messages if isinstance(messages, EncodedFrames) else encode_frames(messages)
        try:
            self._write(parts, timeout)
        except OSError as error:
            raise socket_error(error, f"sending to {self.peer}") from None

    def send_at_once(self, messages: EncodedFrames) -> None:
        self._lifecycle.take(Call.SEND)
        parts = self._next_parts(messages)
        try:
            at, offset = self._write_some(parts, 0, 0)
            if at < len(parts):
                self._unsent_parts = [*map(bytes, _after_all(parts, at, offset))]  # copied: this connection `copies`
        except OSError as error:
            raise socket_error(error, f"sending to {self.peer}") from None

    def send_zeros(self, timeout: float) -> None:
        parts, self._unreadable = self._unreadable, []
        is_complete = not parts
        try:
            if sum(map(len, parts)) <= _MAX_ZEROS:
                for part in parts:
                    self._write_or_zeros(part, timeout)
                is_complete = True
        except (OSError, DissociatedError):
            pass
        finally:
            self._cut_short = self._cut_short or not is_complete

    def _write_or_zeros(self, part: Buffer, timeout: float) -> None:
        """Send a part, or as much of it as can be read and then zero bytes."""
        try:
            self._write([part], timeout)
        except OSError as error:
            if error.errno != errno.EFAULT:
                raise
            size, self._unreadable = sum(map(len, self._unreadable)), []
            self._write([_ZEROS[: size - at] for at in range(0, size, len(_ZEROS))], timeout)

    def receive(self, timeout: float, allocate: Allocate) -> Incoming | Run | None:
        while True:
            self._lifecycle.take(Call.RECEIVE)
            if self._arrived:
                frame: Frame | None = self._arrived.popleft()
                assert frame is not None
                self._arrived_bytes -= OVERHEAD + len(frame.payload)
            else:
                try:
                    frame = self._reader.read(timeout, allocate)
                except OSError as error:
                    raise socket_error(error, f"receiving from {self.peer}") from None
            if frame is None:
                self._lifecycle.take(Call.RECEIVE)  # raises if this side was interrupted meanwhile
                self._peer_stopped = self._end_received = True
                return None
            if frame.kind == FrameKind.TAGGED:
                return Incoming(frame.tag, frame.payload)
            if frame.kind == FrameKind.UNTAGGED:
                return Incoming(None, frame.payload)
            if frame.kind == FrameKind.RUN:
                return parse_run(frame.payload)
            if frame.kind == FrameKind.ABORT:
                raise self._given_up(decode_reason(bytes(frame.payload)))
            self._region_shared(frame.payload)

    def arrived(self) -> bool:
        if self._end_received:
            return self._hung_up(0, 0)
        if self._arrived or self._reader.buffered:
            return True
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    def wait(self, timeout: float) -> None:
        if self._wake_descriptor is None:
            self._wake_descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        is_woken = self._woken.is_set()  # `wake` may have been called before
        if not is_woken and not self._arrived and not self._reader.buffered:
            poll = select.poll()
            poll.register(self._socket, 0 if self._end_received else select.POLLIN)
            poll.register(self._wake_descriptor, select.POLLIN)
            is_woken = self._wake_descriptor in dict(poll.poll(timeout * 1000))
        self._woken.clear()
        if is_woken:
            with suppress(BlockingIOError):
                os.eventfd_read(self._wake_descriptor)

    def wake(self) -> None:
        super().wake()
        with self._waking:
            if self._wake_descriptor is not None:
                with suppress(BlockingIOError):
                    os.eventfd_write(self._wake_descriptor, 1)

    def _tell(self, reason: str, later: bool) -> None:
        if self._cut_short:
            return  # the peer would read it as the rest of the interrupted message
        try:
            self._write([abort_frame(reason)], _ABORT_TIMEOUT)
        except (OSError, TransportError, DeadlineExceeded, RemoteProtocolError):
            pass  # the peer does not listen any more

    def _wait_peer(self, seconds: float) -> bool:
        return self._hung_up(select.POLLRDHUP, seconds)

    def _hung_up(self, events: int, seconds: float) -> bool:
        """Wait until both directions have ended, or an event of `select.poll` occurs. Return False if time runs out."""
        poll = select.poll()
        try:
            poll.register(self._socket, events)  # poll always reports the end of both directions
        except ValueError:
            return True  # closed
        return bool(poll.poll(seconds * 1000))

    def _interrupt(self, sending: bool) -> None:
        try:
            self._socket.shutdown(socket.SHUT_RDWR if sending else socket.SHUT_RD)
        except OSError:
            pass  # not connected any more

    def _release(self, state: ConnectionState) -> None:
        if not self.held_by_fork:
            self._interrupt(sending=True)
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        self._unreadable = []
        self._socket.close()
        with self._waking:
            descriptor, self._wake_descriptor = self._wake_descriptor, None
            if descriptor is not None:
                os.close(descriptor)
        self._reader.detach()  # breaks a reference cycle, so that regions are released without the garbage collector

    def after_fork_in_child(self) -> None:
        self._waking = threading.Lock()  # a thread of the parent may hold the other
        self._close_descriptors()
        super().after_fork_in_child()

    def _region_shared(self, payload: bytes) -> None:
        raise RemoteProtocolError("the peer shared memory on a connection that cannot", rule="region-medium")

    def _write(self, parts: Sequence[Buffer], timeout: float) -> None:
        parts = self._next_parts(parts)
        at = offset = 0  # index of the next part, and position in it
        while True:
            at, offset = self._write_some(parts, at, offset)
            if at == len(parts):
                return
            try:
                self._wait_writable(timeout)
            except DeadlineExceeded:
                if self._cut_short:
                    self._unsent_parts = _after_all(parts, at, offset)
                elif parts[0] == PREAMBLE:
                    self._preamble_sent = False  # no message has begun, and none of these is sent later
                raise

    def _next_parts(self, parts: Sequence[Buffer]) -> Sequence[Buffer]:
        """Return `parts` after everything that must be sent before."""
        if not self._preamble_sent:
            self._preamble_sent = True
            parts = [PREAMBLE, *parts]
        if self._unsent_parts:
            parts = [*self._unsent_parts, *parts]
            self._unsent_parts = []
        return parts

    def _write_some(self, parts: Sequence[Buffer], at: int, offset: int) -> tuple[int, int]:
        """Send as many of these parts as the socket takes now, from position `offset` of part number `at` on.

        Returns:
            The place from which on nothing was sent.
        """
        while at < len(parts):
            window = parts[at : at + _IOV_MAX]
            try:
                count = self._send_buffers(window, offset)
            except BlockingIOError:
                return at, offset
            except OSError as error:
                if error.errno == errno.EFAULT:
                    self._unreadable = _after_all(parts, at, offset)
                raise
            self._cut_short = True
            self.written += count
            count += offset
            offset = 0
            for part in window:
                if count < len(part):
                    offset = count
                    break
                count -= len(part)
                at += 1
        if parts:
            self._cut_short = False
        return at, offset

    def _send_buffers(self, window: Sequence[Buffer], offset: int) -> int:
        """Send as much of these parts as the socket takes, from `offset` in the first on. Return the bytes sent."""
        if offset:
            window = [_after(window[0], offset), *window[1:]]
        return self._socket.sendmsg(window, (), _SEND_FLAGS)

    def _wait_writable(self, timeout: float) -> None:
        """Wait for room. On an accepted connection, read messages meanwhile: no other thread does.

        Over a medium that shares memory, also return after a message: a client that frees memory has not stalled.
        """
        poll = select.poll()
        takes_in = select.POLLIN if self._accepted and not self._peer_stopped else 0
        poll.register(self._socket, select.POLLOUT | takes_in)
        began = time.monotonic()
        waited, is_probing = 0.0, False
        with ExitStack() as while_waiting:
            while True:
                events = poll.poll(min(timeout - waited, _CHECK_INTERVAL) * 1000)
                event = events[0][1] if events else 0
                if event and (event & select.POLLOUT or not event & select.POLLIN):
                    return
                if event and self._keep_next() and (self.shares_memory or self._peer_stopped):
                    return
                waited = time.monotonic() - began
                if waited >= timeout:
                    raise DeadlineExceeded(f"{self.peer} took nothing for {timeout:g} s")
                if event:
                    continue
                if not is_probing:
                    is_probing = True
                    while_waiting.enter_context(self._frequent_probes())
                if waited >= _MAX_SILENCE:
                    self._check_acknowledged()
                # Raises if a Unix peer has stopped receiving, which poll does not show.
                self._socket.send(b"", _SEND_FLAGS)

    def _keep_next(self) -> bool:
        """Read a message that arrives while this side sends, and keep it. Return False if only a part has arrived."""
        try:
            frame = self._reader.read(_NO_WAIT, self._keep)
        except DeadlineExceeded:
            return False  # `_reader` has the part
        if frame is None:
            self._peer_stopped = True  # the peer may still receive, which only a send shows
            return True
        self._arrived.append(frame)
        self._arrived_bytes += OVERHEAD + len(frame.payload)
        if self._arrived_bytes > max_kept(self._max_tagged):
            raise RemoteProtocolError(f"{self.peer} sends data, but receives none", rule="credit")
        if self._take_while_sending is not None:
            self._take_while_sending()
        return True

    @contextmanager
    def _frequent_probes(self) -> Iterator[None]:
        """Have the kernel probe a peer that takes nothing every few seconds, instead of after up to two minutes.

        The interval of the kernel is restored at the end: with a short one, it would soon give up on a closed socket
        whose data the peer has not read yet. Linux before 6.15 has no such option.
        """
        tcp, before = socket.IPPROTO_TCP, None
        if self._socket.family != socket.AF_UNIX:
            with suppress(OSError):
                before = self._socket.getsockopt(tcp, _TCP_RTO_MAX_MS)
                self._socket.setsockopt(tcp, _TCP_RTO_MAX_MS, _PROBE_INTERVAL)
        try:
            yield
        finally:
            if before is not None:
                with suppress(OSError):  # the socket may have been closed meanwhile
                    self._socket.setsockopt(tcp, _TCP_RTO_MAX_MS, before)

    def _check_acknowledged(self) -> None:
        """Raise ConnectionClosed if data is on its way, and the peer's host has been silent for `_MAX_SILENCE`.

        If the peer just takes nothing, its host still acknowledges the kernel's probes. If the host is gone, the kernel
        alone would try for minutes.
        """
        if self._socket.family == socket.AF_UNIX:
            return
        info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _tcp_info.size)
        probes, unacknowledged, last = _tcp_info.unpack(info)
        if last > _MAX_SILENCE * 1000 and (unacknowledged or probes >= _MAX_PROBES):
            raise ConnectionClosed(f"{self.peer} is gone: its host has acknowledged nothing for {_MAX_SILENCE:g} s")

    def _keep(self, tag: int | None, length: int) -> Buffer:
        """Allocate memory for a message that arrives while this side sends."""
        if length > self._max_tagged:
            raise RemoteProtocolError(
                f"the peer sent a message of {length} bytes while it should be receiving", rule="credit"
            )
        return bytearray(length)

    def _read_into(self, memory: memoryview, timeout: float) -> int:
        self._set_receive_timeout(self._time_left(timeout))
        try:
            return self._receive_into(memory)
        except BlockingIOError:
            raise DeadlineExceeded(f"{self.peer} was silent for {timeout:g} s") from None

    def _receive_into(self, memory: memoryview) -> int:
        return self._socket.recv_into(memory)

    def _set_receive_timeout(self, timeout: float) -> None:
        """Let the kernel end reads after `timeout` seconds. A read then takes one system call; polling takes 2 or 3."""
        if timeout != self._socket_timeout:
            seconds, fraction = divmod(max(timeout, 0.001), 1)  # 0 would mean no limit
            value = _timeval.pack(int(seconds), int(fraction * 1_000_000))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
            self._socket_timeout = timeout


def abort_frame(reason: str) -> bytes:
    """Return the ABORT frame, with the reason why this side gives up."""
    return encode_frame(FrameKind.ABORT, 0, encode_reason(reason, MAX_CONTROL))


def _after(part: Buffer, offset: int) -> Buffer:
    return memoryview(part).cast("B")[offset:] if offset else part


def _after_all(parts: Sequence[Buffer], at: int, offset: int) -> list[Buffer]:
    """Return the rest of `parts`, from position `offset` of part number `at` on."""
    return [_after(parts[at], offset), *parts[at + 1 :]] if at < len(parts) else []


class SocketListener(Listener):
    """A listener on a listening stream socket, which this object owns."""

    def __init__(self, sock: socket.socket, uri: Uri) -> None:
        super().__init__()
        self.uri = uri
        self._socket = sock

    def accept(self) -> Connection | None:
        while True:
            try:
                accepted, address = self._socket.accept()
            except ConnectionAbortedError:
                continue
            except OSError as error:
                if error.errno in (errno.EBADF, errno.EINVAL):
                    return None  # closed
                raise TransportError(f"cannot accept connections: {error.strerror}") from error
            try:
                connection = self._welcome(accepted, address)
            except OSError:
                accepted.close()  # the peer is gone already
                continue
            if connection is not None:
                return connection

    @abstractmethod
    def _welcome(self, accepted: socket.socket, address: Any) -> Connection | None:
        """Return the connection for an accepted socket, or None to refuse it."""

    def close(self) -> None:
        try:
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes accept
        except OSError:
            pass
        self._socket.close()

    def after_fork_in_child(self) -> None:
        self._socket.close()
        super().after_fork_in_child()
