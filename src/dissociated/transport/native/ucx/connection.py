"""A connection over UCX.

Tags carry no sender: each has a worker of its own.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from dissociated.buffers import Buffer
from dissociated.errors import (
    ConnectionClosed,
    DeadlineExceeded,
    DissociatedError,
    RemoteProtocolError,
    TransportError,
)
from dissociated.memory.region import Region
from dissociated.memory.remote import Span
from dissociated.protocol.message import Incoming, Message
from dissociated.transport.base import Allocate
from dissociated.transport.native.connection import OVERHEAD, NativeConnection, UnderWay
from dissociated.transport.native.ucx import _ucp as c
from dissociated.transport.native.ucx.callbacks import callbacks, params
from dissociated.transport.native.ucx.closing import closing_connections
from dissociated.transport.native.ucx.worker import Worker

METADATA, ABORT = 0, 1  # ids of active messages

_JOIN = 1 << 12  # bytes up to which parts are copied together
_SMALL = 1 << 13  # bytes up to which UCX sends a message at once, and does not have it fetched
_GATHER = 1 << 16  # bytes up to which a body is sent in one piece in any case
_SETTLE = 0.1  # seconds for an endpoint to close
_MAX_STEPS = 1000  # that UCX may make for a connection that is closed, before it is another's turn


class _Outgoing(NamedTuple):
    """A message as UCX takes it: `length` bytes at `pointer`, or so many pieces. `keep` is what lies there."""

    tag: int | None
    size: int
    pointer: Any
    length: int
    pieces: bool
    keep: Any


class UcxMessages(list[_Outgoing]):
    """Messages that are encoded already."""


class _ProbedMessage(NamedTuple):
    """A message that UCX holds, and that is ours to receive. `tag` is None for metadata."""

    handle: Any
    tag: int | None
    length: int


class _Receiving(NamedTuple):
    """A message on its way into `data`. `tag` is None for metadata."""

    request: Any
    tag: int | None
    data: Buffer


class UcxConnection(NativeConnection):
    """One endpoint, and the worker that it has for itself and owns."""

    def __init__(self, worker: Worker, peer: str, endpoint: Any, accepted: bool, ours: bool) -> None:
        """`endpoint` are parameters for an endpoint; what concerns errors is added here."""
        super().__init__(peer, accepted)
        self._worker = worker
        self._ucp = u = worker.ucp
        self._ffi, self._lib = u.ffi, u.lib
        self._ours = ours
        self._lax = endpoint.err_mode == c.ERR_MODE_NONE
        self._connected = accepted
        self._handle = u.ffi.new_handle(self)
        self._plain, self._pieces, self._force, self._am, self._am_pieces = params()
        self._receiving: deque[_Receiving] = deque()
        self._receiving_bytes = 0
        self._put_off: deque[_ProbedMessage] = deque()  # until they are fetched: they would hide those behind them
        self._info = u.ffi.new("ucp_tag_recv_info_t *")
        self._status = c.OK
        self._keys: dict[Span, Any] = {}
        self._endpoint: Any = None
        self._close_request: Any = None
        self._kept: list[UnderWay | Region] = []  # what the peer may still read when this is closed
        try:
            if self._lax:
                closing_connections().check_room()
            self._open(endpoint)
        except BaseException:
            self.close()
            raise

    def _open(self, endpoint: Any) -> None:
        u = self._ucp
        called = callbacks()
        handler = u.ffi.new("ucp_am_handler_param_t *")
        handler.field_mask = c.AM_HANDLER_ID | c.AM_HANDLER_FLAGS | c.AM_HANDLER_CB | c.AM_HANDLER_ARG
        handler.flags, handler.arg = c.AM_WHOLE_MESSAGE, self._handle
        for handler.id, handler.cb in ((METADATA, called.metadata), (ABORT, called.abort)):
            u.check(self._lib.ucp_worker_set_am_recv_handler(self._worker.handle, handler), "creating a worker")
        endpoint.field_mask |= c.EP_PARAM_ERR_HANDLER
        endpoint.err_handler.cb, endpoint.err_handler.arg = called.lost, self._handle
        made = u.ffi.new("ucp_ep_h *")
        u.check(self._lib.ucp_ep_create(self._worker.handle, endpoint, made), f"connecting to {self._peer}")
        self._endpoint = made[0]

    def wait_connected(self, timeout: float) -> None:
        """Wait until the peer accepts, `timeout` in all. Raises TransportError if it does not, DeadlineExceeded."""
        with self._lock:
            request = self._lib.ucp_ep_flush_nbx(self._endpoint, self._plain)
            if request and self._ucp.status(request) == c.INPROGRESS:
                self._posted(request, 0, None)
            end = time.monotonic() + timeout  # whatever happens meanwhile

            def over() -> bool:
                return not self._under_way or self._gone or time.monotonic() >= end

            self._drive(lambda: self._has(over), timeout)  # it may send without end before we know that it is there
            self._connected = not self._under_way
            if self._under_way and not self._gone:
                raise DeadlineExceeded(f"connecting to {self._peer}: no answer for {timeout:g} s")
            if self._gone:
                mode = "none" if self._lax else "peer"
                raise TransportError(
                    f"connecting to {self._peer}: {self._ucp.explain(self._status)}: is it there, has it UCX "
                    f"{self._ucp.version} as well, and does it take err_mode={mode}?"
                )

    # Sending

    def prepare(self, messages: Sequence[Message] | Any) -> UcxMessages:
        return messages if isinstance(messages, UcxMessages) else UcxMessages(map(self._encode, messages))

    def _encode(self, message: Message) -> _Outgoing:
        u = self._ucp
        parts: list[Buffer] = [part for part in message.parts if len(part)]
        size = sum(map(len, parts))
        if len(parts) > 1 and size > _JOIN:
            pieces = array("Q")
            keep = []
            for part in parts:
                view = u.ffi.from_buffer(part)
                keep.append(view)
                pieces.extend((u.address(view), len(view)))
            return _Outgoing(message.tag, size, u.ffi.from_buffer(pieces), len(parts), True, keep)
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        return _Outgoing(message.tag, size, u.ffi.from_buffer(data), size, False, None)

    def _start(self, message: _Outgoing) -> None:
        if message.pieces and (self._lax or message.size <= _GATHER):
            message = self._gathered(message)
        tag, size, pointer, length, pieces, _ = message
        if tag is None:
            param = self._am_pieces if pieces else self._am
            request = self._lib.ucp_am_send_nbx(self._endpoint, METADATA, self._ucp.ffi.NULL, 0, pointer, length, param)
        else:
            param = self._pieces if pieces else self._plain
            request = self._lib.ucp_tag_send_nbx(self._endpoint, pointer, length, tag, param)
        self._begun(request, size, message)

    def _gathered(self, message: _Outgoing) -> _Outgoing:
        """The same message in one piece: over shared memory UCX sends that several times as fast as many."""
        ffi = self._ucp.ffi
        pointer, at = ffi.from_buffer(pa.allocate_buffer(message.size)), 0
        for piece in message.keep:
            ffi.memmove(pointer + at, piece, len(piece))
            at += len(piece)
        return _Outgoing(message.tag, message.size, pointer, message.size, False, None)

    def _begun(self, request: Any, size: int, keep: Any) -> None:
        if request:
            status = self._ucp.status(request)
            if status < 0:
                self._lose_by(status)
                self._check_open()
            self._posted(request, size, keep)
        else:
            self.written += size

    def _complete(self, request: Any) -> bool | None:
        status = self._lib.ucp_request_check_status(request)
        if status == c.INPROGRESS:
            return None
        self._lib.ucp_request_free(request)
        if status < 0:
            self._lose_by(status)
        return bool(status == c.OK)

    def _tell(self, reason: str) -> bool:
        if not self._ours:
            return False
        data = reason.encode(errors="backslashreplace")[:_JOIN]
        pointer = self._ucp.ffi.from_buffer(data)
        try:
            self._begun(
                self._lib.ucp_am_send_nbx(self._endpoint, ABORT, self._ucp.ffi.NULL, 0, pointer, len(data), self._am),
                len(data),
                pointer,
            )
        except DissociatedError:
            return False
        return True

    # Receiving

    def _metadata(self, data: Any, length: int, attributes: int) -> int:
        """Called by UCX: metadata has arrived, whole, or its announcement."""
        if self._closed:
            return c.OK
        if length > self._max_untagged:
            self._broken = RemoteProtocolError(
                f"the peer sent an untagged message of {length} bytes; at most {self._max_untagged} are taken"
            )
            return c.OK
        if attributes & c.AM_RECV_RNDV:
            self._put(_ProbedMessage(data, None, length))
            return c.INPROGRESS
        # It may be kept beyond this call, or not, depending on how it came: copying is the same for both.
        self._arrive(Incoming(None, bytes(self._ucp.ffi.buffer(data, length))))
        return c.OK

    def _waiting(self) -> bool:
        return bool(self._put_off or self._receiving) or bool(
            self._lib.ucp_tag_probe_nb(self._worker.handle, 0, 0, 0, self._info)
        )

    def _take(self, allocate: Allocate, most: int) -> bool:
        only_small = self._only_small(allocate)
        while self._arrived_bytes <= most:
            found = self._find(not only_small and self._receiving_bytes + self._arrived_bytes <= most)
            if found is None:
                break
            self._claim(found, allocate)
        return self._taken()

    def _find(self, fetching: bool) -> _ProbedMessage | None:
        """The next message that UCX holds. Those that have to be fetched are put off, unless `fetching`."""
        if fetching and self._put_off:
            found = self._put_off.popleft()
            self._put_off_bytes -= OVERHEAD + found.length
            return found
        while handle := self._lib.ucp_tag_probe_nb(self._worker.handle, 0, 0, 1, self._info):
            found = _ProbedMessage(handle, self._info.sender_tag, self._info.length)
            if fetching or found.length <= _SMALL:
                return found
            self._put(found)
        return None

    def _put(self, found: _ProbedMessage) -> None:
        self._put_off.append(found)
        self._put_off_bytes += OVERHEAD + found.length

    def _claim(self, found: _ProbedMessage, allocate: Allocate) -> None:
        u, worker = self._ucp, self._worker.handle
        handle, tag, length = found
        if tag is None:
            memory: Buffer = bytearray(length)
            view = u.ffi.from_buffer(memory)
            request = self._lib.ucp_am_recv_data_nbx(worker, handle, view, length, self._plain)
        else:
            try:
                memory = allocate(tag, length)
            except BaseException:
                # It is ours now and must be received, even if into nothing.
                refused = self._lib.ucp_tag_msg_recv_nbx(worker, u.ffi.NULL, 0, handle, self._plain)
                if u.status(refused) == c.INPROGRESS:
                    self._posted(refused, 0, None)
                raise
            view = u.ffi.from_buffer(memory, require_writable=True) if length else u.ffi.NULL
            request = self._lib.ucp_tag_msg_recv_nbx(worker, view, length, handle, self._plain)
        self._receive_into(request, tag, memory)

    def _taken(self) -> bool:
        """Hand over what has been received. Whether some is still on its way."""
        while self._receiving:
            request, tag, memory = self._receiving[0]
            status = self._lib.ucp_request_check_status(request)
            if status == c.INPROGRESS:
                return True
            self._lib.ucp_request_free(request)
            self._receiving.popleft()
            self._receiving_bytes -= len(memory)
            # What was read from the memory of a peer that has closed meanwhile may be something else by then.
            self._received(c.CONNECTION_RESET if self._lax and self._gone else status, tag, memory)
        return False

    def _receive_into(self, request: Any, tag: int | None, memory: Buffer) -> None:
        status = self._ucp.status(request)
        if status == c.INPROGRESS:
            self._receiving.append(_Receiving(request, tag, memory))
            self._receiving_bytes += len(memory)
        else:
            self._received(status, tag, memory)

    def _received(self, status: int, tag: int | None, memory: Buffer) -> None:
        if status == c.OK:
            self._arrive(Incoming(tag, bytes(memory) if tag is None else memory))
        else:
            self._broken = ConnectionClosed(f"{self._peer}: the peer closed the connection in the middle of a message")
            self._lose_by(status)

    # One-sided

    def _read(self, span: Span, address: int, length: int, into: Any, at: int, timeout: float) -> None:
        self._check_open()
        key = self._key(span)
        request = self._lib.ucp_get_nbx(self._endpoint, into + at, length, address, key, self._plain)
        self._begun(request, length, into)

    def _key(self, span: Span) -> Any:
        if span not in self._keys:
            made = self._ucp.ffi.new("ucp_rkey_h *")
            status = self._lib.ucp_ep_rkey_unpack(self._endpoint, self._ucp.ffi.from_buffer(span.key), made)
            self._ucp.check(status, f"{self._peer}: its remote_handle cannot be used")
            self._keys[span] = made[0]
        return self._keys[span]

    # The worker

    def _progress(self) -> bool:
        return self._worker.progress()

    def _arm(self) -> bool:
        return self._worker.arm()

    def _sleep(self, seconds: float) -> None:
        self._worker.sleep(self._waker, seconds)

    def _lose_by(self, status: int) -> None:
        """Called by UCX, and by us: the endpoint has failed."""
        if not self._gone:
            self._status = status
            self._lose()

    def close(self) -> None:
        if not self._connected:
            self._interrupted = True  # there is nobody to wait for, and UCX would go on with connecting
        super().close()

    def _release(self) -> None:
        if self._endpoint is None or not self._connected:
            self._destroy()  # at once: UCX 1.22 would go on with connecting, and crash
            return
        self._close_endpoint()
        end = time.monotonic() + _SETTLE
        while not (over := self._advance_closing()) and time.monotonic() < end:
            self._sleep(_SETTLE / 20)
        if not over and self._is_shared():
            self._kept = [*self._under_way, *self._retained]
            closing_connections().add(self)
        else:
            self._destroy()

    def _close_endpoint(self) -> None:
        if not (self._gone and self._lax):
            # By force where UCX knows that: a silent peer must not keep us. What counts was waited for before.
            request = self._lib.ucp_ep_close_nbx(self._endpoint, self._plain if self._lax else self._force)
            if self._ucp.status(request) == c.INPROGRESS:
                self._close_request = request

    def _is_shared(self) -> bool:
        """Whether the peer may read memory of this process, or this process reads its memory, as long as it wants."""
        own = bool(self._receiving or self._retained) or any(message.size for message in self._under_way)
        return self._lax and (self._gone or own)

    def advance_closing(self) -> bool:
        """Let UCX work. Whether all is given back: the peer knows that this is closed, and nothing is copied."""
        over = self._advance_closing()
        if over:
            self._destroy()
        return over

    def _advance_closing(self) -> bool:
        worker = self._worker
        for _ in range(_MAX_STEPS):
            moved = worker.progress()
            while handle := self._lib.ucp_tag_probe_nb(worker.handle, 0, 0, 1, self._info):
                refused = self._lib.ucp_tag_msg_recv_nbx(worker.handle, self._ffi.NULL, 0, handle, self._plain)
                if self._ucp.status(refused) == c.INPROGRESS:
                    self._lib.ucp_request_free(refused)
            if not moved and worker.arm():  # UCX does not let us sleep while it copies
                break
        else:
            return False
        if self._close_request is not None:
            if self._lib.ucp_request_check_status(self._close_request) == c.INPROGRESS:
                return False
            self._lib.ucp_request_free(self._close_request)
            self._close_request = None
        return True

    def _destroy(self) -> None:
        for key in self._keys.values():
            self._lib.ucp_rkey_destroy(key)
        self._worker.destroy()
        self._receiving.clear()
        self._kept.clear()
        self._endpoint = self._handle = None
