"""A connection over UCX.

Tags carry no sender: each has a worker of its own.
"""

from __future__ import annotations

import os
import time
from array import array
from collections import deque
from typing import Any, NamedTuple

import pyarrow as pa

from dissociated.base.buffers import Buffer
from dissociated.errors import (
    ConnectionClosed,
    DeadlineExceeded,
    DissociatedError,
    RemoteProtocolError,
    TransportError,
)
from dissociated.memory.device.base import Device, DeviceBuffer
from dissociated.memory.remote import Span
from dissociated.protocol.close_reason import encode_reason
from dissociated.protocol.message import Incoming, Message
from dissociated.transport.base import Allocate
from dissociated.transport.native.connection import OVERHEAD, NativeConnection
from dissociated.transport.native.library import view_of
from dissociated.transport.native.ucx import _ucp as c
from dissociated.transport.native.ucx._ucp import Ucp
from dissociated.transport.native.ucx.closing import ClosingConnection, closing_connections
from dissociated.transport.native.ucx.endpoint import ABORT, METADATA, UcxEndpoint, params
from dissociated.transport.native.ucx.worker import Worker

_MAX_REASON = 1 << 12  # bytes of a reason for giving up
#: Bytes up to which a message is received although this side does something else. Larger ones wait: UCX does not say
#: which it has to fetch. It sends up to about 300 kB unasked over tcp lanes, and 5 kB over shared memory.
_SMALL = 1 << 13
#: Bytes up to which a body is sent in one piece in any case: UCX writes no pieces into the receiver's own memory. To
#: copy more at the server takes as long as the receiver's copying.
_GATHER = 1 << 22
_DEVICE_MEMORY = "DISSOCIATED_UCX_DEVICE_MEMORY"
_ENDPOINT_CLOSE_TIMEOUT = 0.1  # seconds for an endpoint to close
_COPY_LIMIT = 1 << 12  # bytes up to which parts are copied together


class _ProbedMessage(NamedTuple):
    """A message that UCX holds, and that is ours to receive. `tag` is None for metadata."""

    handle: Any
    tag: int | None
    length: int


class _Receiving(NamedTuple):
    """A message on its way into `data`, or that waits for others, without a request. `tag` is None for metadata."""

    request: Any
    tag: int | None
    data: Buffer


class Outgoing(NamedTuple):
    """A message as UCX takes it: `length` bytes at `pointer`, or so many pieces. `keep` is what lies there."""

    tag: int | None
    size: int
    pointer: Any
    length: int
    pieces: bool
    keep: Any


def encode(u: Ucp, message: Message) -> Outgoing:
    """A message as UCX takes it: in its parts, unless they are small."""
    parts: list[Buffer] = [part for part in message.parts if len(part)]
    size = sum(map(len, parts))
    if len(parts) > 1 and size > _COPY_LIMIT:
        pieces = array("Q")
        keep = []
        for part in parts:
            view = view_of(u.ffi, part)
            keep.append(view)
            pieces.extend((u.address(view), len(view)))
        return Outgoing(message.tag, size, u.ffi.from_buffer(pieces), len(parts), True, keep)
    data = parts[0] if len(parts) == 1 else b"".join(parts)
    return Outgoing(message.tag, size, view_of(u.ffi, data), size, False, None)


def gather(u: Ucp, message: Outgoing) -> Outgoing:
    """The same message in one piece, which goes straight into the receiver's memory, and pieces do not."""
    pointer, at = u.ffi.from_buffer(pa.allocate_buffer(message.size)), 0
    for piece in message.keep:
        u.ffi.memmove(pointer + at, piece, len(piece))
        at += len(piece)
    return Outgoing(message.tag, message.size, pointer, message.size, False, None)


class UcxConnection(NativeConnection):
    """One endpoint, which has a worker for itself. `open` it before anything else."""

    def __init__(self, worker: Worker, peer: str, err_mode_none: bool, accepted: bool, knows_abort: bool) -> None:
        """Owns the worker, also where this raises TransportError."""
        try:
            super().__init__(peer, accepted)
        except BaseException:
            worker.destroy()
            raise
        self._worker = worker
        self._ucp = u = worker.ucp
        self._ffi, self._lib = u.ffi, u.lib
        self._knows_abort = knows_abort
        self._connected = accepted
        self._plain, self._pieces, _, self._am, self._am_pieces = params()
        self._receiving: deque[_Receiving] = deque()
        self._receiving_bytes = 0
        self._incomplete: list[Buffer] = []  # messages that broke off: UCX may write to them until it is done
        self._onto: Any = None  # parameters for receiving into memory of a device
        self._put_off: deque[_ProbedMessage] = deque()  # until they are fetched: they would hide those behind them
        self._info = u.ffi.new("ucp_tag_recv_info_t *")
        self._status = c.OK
        self._endpoint = UcxEndpoint(worker, err_mode_none)

    def open(self, description: Any) -> None:
        """Begin to connect, as UCX's parameters for an endpoint say. Raises TransportError; this is closed then."""
        try:
            self._endpoint.open(description, self, self._peer)
        except BaseException:
            self.close()
            raise

    def wait_connected(self, timeout: float) -> None:
        """Wait until the peer accepts, `timeout` in all. Raises TransportError if it does not, DeadlineExceeded."""
        with self._lock:
            request = self._lib.ucp_ep_flush_nbx(self._endpoint.handle, self._plain)
            if request and self._ucp.status(request) == c.INPROGRESS:
                self._posted(request, 0, None)
            end = time.monotonic() + timeout  # whatever happens meanwhile

            def over() -> bool:
                return not self._under_way or self._gone or time.monotonic() >= end

            self._drive(lambda: self._has(over), timeout)  # it may send without end before we know that it is there
            self._connected = not (self._under_way or self._gone)
            if self._under_way and not self._gone:
                raise DeadlineExceeded(f"connecting to {self._peer}: no answer for {timeout:g} s")
            if self._gone:
                mode = "none" if self._endpoint.err_mode_none else "peer"
                raise TransportError(
                    f"connecting to {self._peer}: {self._ucp.explain(self._status)}: is it there, has it UCX "
                    f"{self._ucp.version} as well, and does it take err_mode={mode}?"
                )

    # Sending

    def _encode(self, message: Message) -> Outgoing:
        return encode(self._ucp, message)

    def _start(self, message: Outgoing) -> None:
        if message.pieces and (self._endpoint.err_mode_none or message.size <= _GATHER):
            message = gather(self._ucp, message)
        tag, size, pointer, length, pieces, _ = message
        if tag is None:
            request = self._endpoint.send_active(METADATA, pointer, length, self._am_pieces if pieces else self._am)
        else:
            param = self._pieces if pieces else self._plain
            request = self._lib.ucp_tag_send_nbx(self._endpoint.handle, pointer, length, tag, param)
        self._begun(request, size, message)

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

    def _send_abort(self, reason: str) -> bool:
        if not self._knows_abort:
            return False
        data = encode_reason(reason, _MAX_REASON)
        pointer = self._ucp.ffi.from_buffer(data)
        try:
            self._begun(self._endpoint.send_active(ABORT, pointer, len(data), self._am), len(data), pointer)
        except DissociatedError:
            return False
        return True

    # Receiving

    def receive_onto(self, device: Device) -> bool:
        number = self._worker.context.memory_types.get(device.type)
        # In mode none UCX copies on one host in pieces of 8 KB, and waits for each. And in any mode it ends the process
        # where one of its copies to a device fails, as on a lost context: so that is for users to say.
        if number is None or self._endpoint.err_mode_none or os.environ.get(_DEVICE_MEMORY) != "y":
            return False
        self._onto = self._ffi.new("ucp_request_param_t *")
        self._onto.op_attr_mask, self._onto.memory_type = c.OP_MEMORY_TYPE, number
        return True

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
                memory = self._allocate(tag, length, allocate)
            except BaseException:
                # It is ours now and must be received, even if into nothing.
                refused = self._lib.ucp_tag_msg_recv_nbx(worker, u.ffi.NULL, 0, handle, self._plain)
                if u.status(refused) == c.INPROGRESS:
                    self._posted(refused, 0, None)
                raise
            param = self._plain
            if isinstance(memory, DeviceBuffer):
                view, param = u.ffi.cast("void *", memory.address), self._onto
            else:
                view = u.ffi.from_buffer(memory, require_writable=True) if length else u.ffi.NULL
            request = self._lib.ucp_tag_msg_recv_nbx(worker, view, length, handle, param)
        self._receive_into(request, tag, memory)

    def _taken(self) -> bool:
        """Hand over what has been received. Whether some is still on its way."""
        while self._receiving:
            request, tag, memory = self._receiving[0]
            status = self._lib.ucp_request_check_status(request) if request else c.OK
            if status == c.INPROGRESS:
                return True
            if request:
                self._lib.ucp_request_free(request)
            self._receiving.popleft()
            self._receiving_bytes -= len(memory)
            # What was read from the memory of a peer that has closed meanwhile may be something else by then.
            self._received(c.CONNECTION_RESET if self._endpoint.err_mode_none and self._gone else status, tag, memory)
        return False

    def _receive_into(self, request: Any, tag: int | None, memory: Buffer) -> None:
        status = self._ucp.status(request)
        # A run that is there at once waits for those before it: who takes it first has to take it apart.
        if status == c.INPROGRESS or (status == c.OK and self._receiving and self._is_run(tag)):
            self._receiving.append(_Receiving(request, tag, memory))
            self._receiving_bytes += len(memory)
        else:
            self._received(status, tag, memory)

    def _received(self, status: int, tag: int | None, memory: Buffer) -> None:
        if status == c.OK:
            self._arrive(Incoming(tag, bytes(memory) if tag is None else memory))
        else:
            self._incomplete.append(memory)
            self._broken = ConnectionClosed(f"{self._peer}: the peer closed the connection in the middle of a message")
            self._lose_by(status)

    # One-sided

    def _read(self, span: Span, address: int, length: int, into: Any, at: int, timeout: float) -> None:
        self._check_open()
        key = self._endpoint.key(span, self._peer)
        request = self._lib.ucp_get_nbx(self._endpoint.handle, into + at, length, address, key, self._plain)
        self._begun(request, length, into)

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

    def _failed(self, error: BaseException) -> None:
        """A call by UCX has failed, and what it told is lost."""
        self._worker.failure = error
        if self._broken is None:
            self._broken = ConnectionClosed(f"this side lost what {self._peer} sent: {type(error).__name__}")

    def close(self) -> None:
        if not self._connected:
            self._interrupted = True  # there is nobody to wait for, and UCX would go on with connecting
        super().close()

    def _release(self) -> None:
        endpoint = self._endpoint
        if endpoint.handle is None or not self._connected:
            endpoint.destroy()  # at once: UCX 1.22 would go on with connecting, or with its end, and crash
            return
        over = False
        try:  # an error in a call by UCX shall not leave to nobody what UCX, or the peer, still reads
            try:
                if not endpoint.err_mode_none:
                    self._let_arrive()
            finally:
                if not (self._gone and endpoint.err_mode_none):
                    endpoint.begin_close(one.request for one in self._under_way)
            end = time.monotonic() + _ENDPOINT_CLOSE_TIMEOUT
            while not (over := endpoint.advance_closing() and not self._devices()) and time.monotonic() < end:
                self._sleep(_ENDPOINT_CLOSE_TIMEOUT / 20)
        finally:
            self._give_back(over)

    def _give_back(self, over: bool) -> None:
        """Give all to UCX, or to the thread that looks after it until it may be. `over`: whether it is known to be."""
        endpoint, devices = self._endpoint, self._devices()
        if over or not (endpoint.is_busy or self._is_shared() or devices):
            endpoint.destroy()
        else:
            memory = [*self._under_way, *self._retained, *self._receiving, *self._incomplete]
            closing_connections().add(ClosingConnection(self._peer, endpoint, memory, devices))
        self._receiving.clear()
        self._incomplete.clear()

    def _let_arrive(self) -> None:
        """Give what is being received a moment. Nothing ends it later: it may come in fragments, which UCX gives up
        without a word, or as a rendezvous, which `UcxEndpoint.begin_close` would have to wait for."""
        check, end = self._lib.ucp_request_check_status, time.monotonic() + _ENDPOINT_CLOSE_TIMEOUT
        requests = [one.request for one in self._receiving if one.request]
        while not self._gone and any(check(one) == c.INPROGRESS for one in requests) and time.monotonic() < end:
            if not self._worker.progress() and self._worker.arm():
                self._sleep(_ENDPOINT_CLOSE_TIMEOUT / 20)

    def _devices(self) -> set[Device]:
        """Those that UCX may have begun to copy to, and has not said that it is done."""
        check = self._lib.ucp_request_check_status
        there = [one for one in self._receiving if isinstance(one.data, DeviceBuffer)]
        return {one.data.device for one in there if check(one.request) == c.INPROGRESS}

    def _is_shared(self) -> bool:
        """Whether the peer may read memory of this process, or this process reads its memory, as long as it wants."""
        own = bool(self._receiving or self._retained) or any(message.size for message in self._under_way)
        return self._endpoint.err_mode_none and (self._gone or own)
