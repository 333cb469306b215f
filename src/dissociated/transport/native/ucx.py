"""ucx://HOST:PORT[?err_mode=none]: UCX, which picks what two hosts have in common: TCP, shared memory, RDMA.

Untagged messages are active messages of id 0, without a header; tagged messages carry the protocol's own tags. Nothing
else is on the wire, so that any UCX peer can take part, but for a reason to give up (active message 1), which goes
only to peers that say by their client id that they know it.

Tags carry no sender: each connection has a worker of its own.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import select
import socket
import struct
import sys
import threading
import time
import weakref
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
    UriError,
)
from dissociated.memory.region import Region
from dissociated.memory.remote import RemoteSpace, Span, spans_of
from dissociated.once import once
from dissociated.protocol.message import Incoming, Message
from dissociated.transport.base import Allocate, Connection, Listener, Transport
from dissociated.transport.native import _ucp as c
from dissociated.transport.native._ucp import Ucp, ucp
from dissociated.transport.native.connection import OVERHEAD, NativeConnection, Waker
from dissociated.uri import Uri

_log = logging.getLogger(__name__)

_METADATA, _ABORT = 0, 1  # ids of active messages
_NAME, _VERSION = int.from_bytes(b"DISSOC"), 1  # of our clients, see _client_id
#: The largest TCP segment that our contexts receive, and send to peers who have said that they receive it. UCX compares
#: nothing: what is larger than the peer's buffer is written beyond that.
_SEGMENT = 1 << 18
_SEGMENT_PARAMETER = "tcp_segment"

_JOIN = 1 << 12  # bytes up to which parts are copied together
_SMALL = 1 << 13  # bytes up to which UCX sends a message at once, and does not have it fetched
_GATHER = 1 << 16  # bytes up to which a body is sent in one piece in any case
_MAX_WAITING = 128  # connections that wait to be accepted
_SETTLE = 0.1  # seconds for an endpoint to close
_LOOK_AGAIN = 1.0  # seconds, should UCX ever forget to wake us

_MODES = {"peer": c.ERR_MODE_PEER, "none": c.ERR_MODE_NONE}


class _Outgoing(NamedTuple):
    """A message as UCX takes it: `length` bytes at `pointer`, or so many pieces. `keep` is what lies there."""

    tag: int | None
    size: int
    pointer: Any
    length: int
    pieces: bool
    keep: Any


class Prepared(list[_Outgoing]):
    """Messages that are encoded already."""


class _Found(NamedTuple):
    """A message that UCX holds, and that is ours to receive. `tag` is None for metadata."""

    handle: Any
    tag: int | None
    length: int


class _Receiving(NamedTuple):
    """A message on its way into `data`. `tag` is None for metadata."""

    request: Any
    tag: int | None
    data: Buffer


# Contexts and workers


class _Place(NamedTuple):
    """What a context depends on."""

    inet6: bool
    #: Whether the peer can only be on this host: looking at no other devices makes workers ten times as cheap.
    loopback: bool
    rma: bool
    #: Whether the peer has said that it receives segments as large as ours.
    large: bool
    pid: int


def place(address: str, rma: bool, large: bool) -> _Place:
    """The kind of place that a connection with this address is in, with or without one-sided access to memory."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    return _Place(ip.version == 6, ip.is_loopback, rma, large, os.getpid())


class _Context(NamedTuple):
    """A context, and the bytes of the largest TCP segment that it receives; 0 where the user has chosen that."""

    handle: Any
    segment: int


@once
def context(where: _Place) -> _Context:
    """A context, which lives as long as the process."""
    u = ucp()
    config = u.ffi.new("ucp_config_t **")
    u.check(u.lib.ucp_config_read(u.ffi.NULL, u.ffi.NULL, config), "reading the configuration of UCX")
    segment = 0 if "UCX_TCP_RX_SEG_SIZE" in os.environ else _SEGMENT
    settings = {}
    if segment:
        settings["TCP_RX_SEG_SIZE"] = str(segment)
    if segment and where.large:
        settings["TCP_TX_SEG_SIZE"] = str(segment)  # of 8k, UCX's default, bodies in many pieces go at half speed
    if where.inet6:
        settings["TCP_AF_PRIO"] = "inet6"
    if where.loopback:
        settings["NET_DEVICES"] = "lo"
    for name, value in settings.items():
        if f"UCX_{name}" not in os.environ:
            status = u.lib.ucp_config_modify(config[0], name.encode(), value.encode())
            u.check(status, f"setting UCX_{name}={value}")
    params = u.ffi.new("ucp_params_t *")
    params.field_mask = c.PARAM_FEATURES | c.PARAM_MT_WORKERS_SHARED
    params.features = c.FEATURE_TAG | c.FEATURE_AM | c.FEATURE_WAKEUP | (c.FEATURE_RMA if where.rma else 0)
    params.mt_workers_shared = 1
    made = u.ffi.new("ucp_context_h *")
    status = u.lib.ucp_init_version(1, 12, params, config[0], made)
    u.lib.ucp_config_release(config[0])
    u.check(status, "starting UCX")
    return _Context(made[0], segment)


def _client_id(segment: int) -> int:
    """What a client says before anything else: that it knows what an abort is, and which segments it receives.

    As eight bytes: DISSOC, the logarithm to base 2 of the segment in bytes, or 0 where that is not said, and 1.
    """
    return _NAME << 16 | max(segment.bit_length() - 1, 0) << 8 | _VERSION


def _client_says(client_id: int) -> tuple[bool, int]:
    """Whether a client with this id is one of ours, and the segment that it receives, or 0."""
    ours = client_id >> 16 == _NAME and client_id & 0xFF == _VERSION
    exponent = client_id >> 8 & 0xFF
    return ours, 1 << exponent if ours and exponent else 0


#: Those that can connect two processes, as UCX_TLS names them.
_NETWORKS = {"all", "tcp", "ib", "rc", "rc_v", "rc_x", "ud", "ud_v", "ud_x", "dc", "dc_x", "srd"}


def _check_choice() -> None:
    """Raise TransportError where the environment leaves nothing to connect by: UCX would only say "unreachable"."""
    chosen = os.environ.get("UCX_TLS", "all").split(",")
    excluded = {chosen[0][1:], *chosen[1:]} if chosen[0].startswith("^") else set()
    if "tcp" in excluded or not (excluded or _NETWORKS.intersection(chosen)):
        raise TransportError(f"UCX_TLS={os.environ['UCX_TLS']} leaves out tcp, which connections over UCX need: add it")


class _Worker:
    """What makes progress, and the descriptor that tells when there is some to make."""

    def __init__(self, where: _Place) -> None:
        self.ucp = u = ucp()
        _check_choice()
        self.context = context(where)
        params = u.ffi.new("ucp_worker_params_t *")
        params.field_mask = c.WORKER_PARAM_THREAD_MODE | c.WORKER_PARAM_FLAGS | c.WORKER_PARAM_CLIENT_ID
        params.thread_mode = c.THREAD_MODE_SERIALIZED
        params.flags = c.WORKER_IGNORE_REQUEST_LEAK  # what a dead peer leaves behind in error mode none
        params.client_id = _client_id(self.context.segment)
        worker = u.ffi.new("ucp_worker_h *")
        u.check(u.lib.ucp_worker_create(self.context.handle, params, worker), "creating a worker")
        self.handle = worker[0]
        descriptor = u.ffi.new("int *")
        u.check(u.lib.ucp_worker_get_efd(self.handle, descriptor), "creating a worker")
        self.descriptor: int = descriptor[0]

    def progress(self) -> bool:
        return bool(self.ucp.lib.ucp_worker_progress(self.handle))

    def arm(self) -> bool:
        status = self.ucp.lib.ucp_worker_arm(self.handle)
        if status != c.BUSY:
            self.ucp.check(status, "waiting")
        return bool(status == c.OK)

    def sleep(self, waker: Waker, seconds: float) -> None:
        """Sleep until there is progress to be made, or `waker` is set, which it then is no more."""
        poll = select.poll()
        poll.register(self.descriptor, select.POLLIN)
        poll.register(waker.descriptor, select.POLLIN)
        if any(ready == waker.descriptor for ready, _ in poll.poll(seconds * 1000)):
            waker.clear()

    def destroy(self) -> None:
        self.ucp.lib.ucp_worker_destroy(self.handle)


class _Callbacks:
    """What UCX calls. Each gets the handle of the object that it concerns."""

    def __init__(self, u: Ucp) -> None:
        ffi = u.ffi

        @ffi.callback("ucp_am_recv_callback_t")  # type: ignore[untyped-decorator]
        def metadata(arg: Any, header: Any, header_length: int, data: Any, length: int, param: Any) -> int:
            return int(ffi.from_handle(arg)._metadata(data, length, param.recv_attr))

        @ffi.callback("ucp_am_recv_callback_t")  # type: ignore[untyped-decorator]
        def abort(arg: Any, header: Any, header_length: int, data: Any, length: int, param: Any) -> int:
            if not param.recv_attr & c.AM_RECV_RNDV:
                ffi.from_handle(arg)._give_up(bytes(ffi.buffer(data, length)).decode(errors="replace"))
            return 0

        @ffi.callback("ucp_err_handler_cb_t")  # type: ignore[untyped-decorator]
        def lost(arg: Any, endpoint: Any, status: int) -> None:
            ffi.from_handle(arg)._lose_by(status)

        @ffi.callback("ucp_listener_conn_callback_t")  # type: ignore[untyped-decorator]
        def requested(request: Any, arg: Any) -> None:
            ffi.from_handle(arg)._requested(request)

        self.metadata, self.abort, self.lost, self.requested = metadata, abort, lost, requested


@once
def _callbacks() -> _Callbacks:
    return _Callbacks(ucp())


@once
def _params() -> tuple[Any, ...]:
    """The parameters that calls have: contiguous, in pieces, with FORCE; the same for active messages."""
    new = ucp().ffi.new
    plain, pieces, force, am, am_pieces = (new("ucp_request_param_t *") for _ in range(5))
    pieces.op_attr_mask, pieces.datatype = c.OP_DATATYPE, c.DATATYPE_IOV
    force.op_attr_mask, force.flags = c.OP_FLAGS, c.EP_CLOSE_FORCE
    am.op_attr_mask, am.flags = c.OP_FLAGS, c.AM_SEND_REPLY
    am_pieces.op_attr_mask, am_pieces.flags = c.OP_FLAGS | c.OP_DATATYPE, c.AM_SEND_REPLY
    am_pieces.datatype = c.DATATYPE_IOV
    return plain, pieces, force, am, am_pieces


# Connections


class UcxConnection(NativeConnection):
    """One endpoint, and the worker that it has for itself and owns."""

    def __init__(self, worker: _Worker, peer: str, endpoint: Any, accepted: bool, ours: bool) -> None:
        """`endpoint` are parameters for an endpoint; what concerns errors is added here."""
        super().__init__(peer, accepted)
        self._worker = worker
        self._ucp = u = worker.ucp
        self._lib = u.lib
        self._ours = ours
        self._lax = endpoint.err_mode == c.ERR_MODE_NONE
        self._connected = accepted
        self._handle = u.ffi.new_handle(self)
        self._plain, self._pieces, self._force, self._am, self._am_pieces = _params()
        self._receiving: deque[_Receiving] = deque()
        self._receiving_bytes = 0
        self._put_off: deque[_Found] = deque()  # until they are fetched: they would hide those behind them
        self._info = u.ffi.new("ucp_tag_recv_info_t *")
        self._status = c.OK
        self._remote: RemoteSpace | None = None
        self._keys: dict[Span, Any] = {}
        self._endpoint: Any = None
        try:
            self._open(endpoint)
        except BaseException:
            self.close()
            raise

    def _open(self, endpoint: Any) -> None:
        u = self._ucp
        callbacks = _callbacks()
        handler = u.ffi.new("ucp_am_handler_param_t *")
        handler.field_mask = c.AM_HANDLER_ID | c.AM_HANDLER_FLAGS | c.AM_HANDLER_CB | c.AM_HANDLER_ARG
        handler.flags, handler.arg = c.AM_WHOLE_MESSAGE, self._handle
        for handler.id, handler.cb in ((_METADATA, callbacks.metadata), (_ABORT, callbacks.abort)):
            u.check(self._lib.ucp_worker_set_am_recv_handler(self._worker.handle, handler), "creating a worker")
        endpoint.field_mask |= c.EP_PARAM_ERR_HANDLER
        endpoint.err_handler.cb, endpoint.err_handler.arg = callbacks.lost, self._handle
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
            self._drive(lambda: not self._under_way or self._gone or time.monotonic() >= end, timeout)
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

    def prepare(self, messages: Sequence[Message] | Any) -> Prepared:
        return messages if isinstance(messages, Prepared) else Prepared(map(self._encode, messages))

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
            request = self._lib.ucp_am_send_nbx(
                self._endpoint, _METADATA, self._ucp.ffi.NULL, 0, pointer, length, param
            )
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
                self._lib.ucp_am_send_nbx(self._endpoint, _ABORT, self._ucp.ffi.NULL, 0, pointer, len(data), self._am),
                len(data),
                pointer,
            )
        except DissociatedError:
            return False
        return True

    # Receiving

    def _metadata(self, data: Any, length: int, attributes: int) -> int:
        """Called by UCX: metadata has arrived, whole, or its announcement."""
        if length > self._max_untagged:
            self._broken = RemoteProtocolError(
                f"the peer sent an untagged message of {length} bytes; at most {self._max_untagged} are taken"
            )
            return c.OK
        if attributes & c.AM_RECV_RNDV:
            self._put(_Found(data, None, length))
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

    def _find(self, fetching: bool) -> _Found | None:
        """The next message that UCX holds. Those that have to be fetched are put off, unless `fetching`."""
        if fetching and self._put_off:
            found = self._put_off.popleft()
            self._put_off_bytes -= OVERHEAD + found.length
            return found
        while handle := self._lib.ucp_tag_probe_nb(self._worker.handle, 0, 0, 1, self._info):
            found = _Found(handle, self._info.sender_tag, self._info.length)
            if fetching or found.length <= _SMALL:
                return found
            self._put(found)
        return None

    def _put(self, found: _Found) -> None:
        self._put_off.append(found)
        self._put_off_bytes += OVERHEAD + found.length

    def _claim(self, found: _Found, allocate: Allocate) -> None:
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
            self._received(status, tag, memory)
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

    def reach(self, spans: Sequence[Span]) -> None:
        """Let `fetch` take from these spans of the peer's memory."""
        self._remote, self.fetches = RemoteSpace(spans), True

    def fetch(self, wanted: Sequence[tuple[int, int, int]], memory: Buffer, timeout: float) -> None:
        if self._remote is None:
            raise RemoteProtocolError(f"{self._peer} sent addresses, and its URI had no remote_handle")
        spans = [self._remote.find(address, length) for address, length, _ in wanted]
        view = self._ucp.ffi.from_buffer(memory, require_writable=True)
        with self._lock:
            for (address, length, at), span in zip(wanted, spans, strict=True):
                self._check_open()
                key, into = self._key(span), view + at
                request = self._lib.ucp_get_nbx(self._endpoint, into, length, address, key, self._plain)
                self._begun(request, length, view)
            self._settle_until(lambda: not self._under_way, timeout)

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

    def _release(self) -> None:
        for key in self._keys.values():
            self._lib.ucp_rkey_destroy(key)
        # One whose flush has not ended goes with the worker: once closed, UCX 1.22 would go on with that, and crash.
        if self._endpoint is not None and self._connected and not (self._gone and self._lax):
            self._close_endpoint()
        self._worker.destroy()
        self._receiving.clear()
        self._endpoint = self._handle = None

    def _close_endpoint(self) -> None:
        # By force where UCX knows that: a silent peer must not keep us. What counts was waited for before.
        request = self._lib.ucp_ep_close_nbx(self._endpoint, self._plain if self._lax else self._force)
        if self._ucp.status(request) == c.INPROGRESS:
            self._posted(request, 0, None)
        end = time.monotonic() + _SETTLE
        while time.monotonic() < end:
            if not self._advance():
                if not self._taken() and not self._under_way:
                    return
                self._sleep(_SETTLE / 20)


class _UcxListener(Listener):
    """A worker that only hears of connections; each then gets its own."""

    def __init__(self, host: str, address: str, port: int, mode: str, rma: bool) -> None:
        super().__init__()
        self._place = place(address, rma, large=False)
        self.exposes_memory = rma
        self._exposed: weakref.WeakKeyDictionary[Region, tuple[Span, weakref.finalize[..., Region]]]
        self._exposed = weakref.WeakKeyDictionary()
        self._mode = mode
        self._worker = _Worker(self._place)
        self._ucp = u = self._worker.ucp
        self._handle = u.ffi.new_handle(self)
        self._requests: deque[Any] = deque()
        self._closed = False
        self._waker = Waker()
        self._lock = threading.Condition(threading.Lock())  # held by whoever uses the worker
        self._asleep = False
        params = u.ffi.new("ucp_listener_params_t *")
        params.field_mask = c.LISTENER_PARAM_SOCK_ADDR | c.LISTENER_PARAM_CONN_HANDLER
        keep = _point(u, params.sockaddr, address, port)
        params.conn_handler.cb, params.conn_handler.arg = _callbacks().requested, self._handle
        made = u.ffi.new("ucp_listener_h *")
        try:
            status = u.lib.ucp_listener_create(self._worker.handle, params, made)
            u.check(status, f"listening on {host}:{port}")
        except BaseException:
            self._worker.destroy()
            self._waker.close()
            raise
        del keep
        self._listener = made[0]
        attributes = u.ffi.new("ucp_listener_attr_t *")
        attributes.field_mask = c.LISTENER_ATTR_SOCKADDR
        u.check(u.lib.ucp_listener_query(self._listener, attributes), "listening")
        parameters = {"ucx": u.version, **({"err_mode": mode} if mode != "peer" else {})}
        if self._worker.context.segment:
            parameters[_SEGMENT_PARAMETER] = str(self._worker.context.segment)
        self.uri = Uri("ucx", host=host, port=_parse(u, attributes.sockaddr)[1], parameters=parameters)

    def accept(self) -> Connection | None:
        while True:
            with self._lock:
                while not self._closed and not self._requests and self._worker.progress():
                    pass
                if self._closed:
                    return None
                if self._requests:
                    try:
                        return self._welcome(self._requests.popleft())
                    except TransportError as error:
                        _log.info("%s: %s", self.uri, error)
                        continue
                self._asleep = self._worker.arm()
            if self._asleep:
                self._worker.sleep(self._waker, _LOOK_AGAIN)
            with self._lock:
                self._asleep = False
                self._lock.notify_all()

    def _welcome(self, request: Any) -> Connection:
        u = self._ucp
        asked = u.ffi.new("ucp_conn_request_attr_t *")
        asked.field_mask = c.CONN_REQUEST_CLIENT_ADDR | c.CONN_REQUEST_CLIENT_ID
        known = u.lib.ucp_conn_request_query(request, asked) == c.OK
        peer = "ucx client {}:{}".format(*_parse(u, asked.client_address)) if known else "ucx client"
        ours, segment = _client_says(asked.client_id if known else 0)
        try:
            # Memory is registered with the listener's own context, so whoever may fetch from it is served there.
            worker = _Worker(self._place._replace(large=segment >= _SEGMENT and not self.exposes_memory))
        except TransportError:
            u.lib.ucp_listener_reject(self._listener, request)
            raise
        endpoint = u.ffi.new("ucp_ep_params_t *")
        endpoint.field_mask, endpoint.conn_request = c.EP_PARAM_CONN_REQUEST, request
        if self._mode == "peer":  # otherwise it is the client's choice
            endpoint.field_mask |= c.EP_PARAM_ERR_MODE
            endpoint.err_mode = c.ERR_MODE_PEER
        made = UcxConnection(worker, peer, endpoint, accepted=True, ours=ours)
        made.exposes_memory = self.exposes_memory
        return made

    def expose(self, region: Region) -> Span:
        if not self.exposes_memory:
            raise TransportError(f"{self.uri} lets nobody fetch from memory: make the server with allow_rma=True")
        with self._lock:
            if self._closed:
                raise ConnectionClosed("the listener is closed")
            if region not in self._exposed:
                self._exposed[region] = self._register(region)
            return self._exposed[region][0]

    def _register(self, region: Region) -> tuple[Span, weakref.finalize[..., Region]]:
        u, context = self._ucp, self._worker.context.handle
        address = int(region.memory.address)
        params = u.ffi.new("ucp_mem_map_params_t *")
        params.field_mask = c.MEM_ADDRESS | c.MEM_LENGTH | c.MEM_PROT
        params.address, params.length = u.ffi.cast("void *", address), region.size
        params.prot = c.MEM_LOCAL_READ | c.MEM_REMOTE_READ
        memory = u.ffi.new("ucp_mem_h *")
        u.check(u.lib.ucp_mem_map(context, params, memory), f"registering {region.size} bytes of memory")
        # What is registered must not be unmapped before: the finalizer holds on to it.
        withdraw = weakref.finalize(region, _withdraw, u, context, memory[0], region.memory)
        withdraw.atexit = False
        packed, size = u.ffi.new("void **"), u.ffi.new("size_t *")
        try:
            u.check(u.lib.ucp_rkey_pack(context, memory[0], packed, size), "making a key for memory")
        except BaseException:
            withdraw()
            raise
        key = bytes(u.ffi.buffer(packed[0], size[0]))
        u.lib.ucp_rkey_buffer_release(packed[0])
        return Span(address, region.size, key), withdraw

    def _requested(self, request: Any) -> None:
        """Called by UCX: somebody wants to connect."""
        if len(self._requests) >= _MAX_WAITING:
            self._ucp.lib.ucp_listener_reject(self._listener, request)
        else:
            self._requests.append(request)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._waker.set()
        with self._lock:
            while self._asleep:
                self._lock.wait()
            for request in self._requests:
                self._ucp.lib.ucp_listener_reject(self._listener, request)
            self._requests.clear()
            for _, withdraw in self._exposed.values():
                withdraw()
            self._ucp.lib.ucp_listener_destroy(self._listener)
            self._worker.destroy()
            self._handle = None
            self._waker.close()

    def forked(self) -> None:
        for _, withdraw in self._exposed.values():
            withdraw.detach()
        super().forked()


def _withdraw(u: Ucp, context: Any, handle: Any, memory: Any) -> None:
    u.lib.ucp_mem_unmap(context, handle)


class UcxTransport(Transport):
    """See the module."""

    def connect(self, uri: Uri, timeout: float) -> Connection:
        if not uri.host or not uri.port:
            raise UriError(f"{uri} needs a host and a port: ucx://HOST:PORT")
        mode = _mode(uri)
        where = f"the ucx server {uri.host}:{uri.port}"
        u = ucp()
        _check_version(u, uri, where)
        address = _resolve(uri.host, f"connecting to {where}")
        endpoint = u.ffi.new("ucp_ep_params_t *")
        endpoint.field_mask = c.EP_PARAM_SOCK_ADDR | c.EP_PARAM_FLAGS | c.EP_PARAM_ERR_MODE
        endpoint.flags = c.EP_CLIENT_SERVER | c.EP_SEND_CLIENT_ID
        endpoint.err_mode = _MODES[mode]
        keep = _point(u, endpoint.sockaddr, address, uri.port)
        spans = spans_of(uri)
        worker = _Worker(place(address, rma=bool(spans), large=_segment(uri) >= _SEGMENT))
        connection = UcxConnection(worker, where, endpoint, accepted=False, ours=False)
        del keep
        try:
            connection.wait_connected(timeout)
            if spans:
                connection.reach(spans)
        except BaseException:
            connection.close()
            raise
        return connection

    def listen(self, uri: Uri) -> Listener:
        host = uri.host or "127.0.0.1"
        address = _resolve(host, f"listening on {host}")
        return _UcxListener(host, address, uri.port or 0, _mode(uri), uri.parameters.get("rma") == "allow")


def _mode(uri: Uri) -> str:
    mode = uri.parameters.get("err_mode", "peer")
    if mode not in _MODES:
        raise UriError(f"err_mode={mode} in {uri}: there are {' and '.join(_MODES)}")
    return mode


def _segment(uri: Uri) -> int:
    """The bytes of the largest TCP segment that the server says it receives; 0 where it does not say."""
    text = uri.parameters.get(_SEGMENT_PARAMETER, "0")
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise UriError(f"{_SEGMENT_PARAMETER}={text} in {uri} is not a number of bytes")
    return int(text)


def _check_version(u: Ucp, uri: Uri, where: str) -> None:
    """Raise TransportError where the server says that it has another UCX: the two would fail, or even crash."""
    theirs = uri.parameters.get("ucx", u.version)
    if theirs.split(".")[:2] != u.version.split(".")[:2]:
        raise TransportError(
            f"{where} has UCX {theirs} and this process {u.version}, which do not work together: install the same "
            "on both sides, or let DISSOCIATED_UCX_LIBRARY name the same libucp.so.0"
        )


def _resolve(host: str, doing: str) -> str:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise TransportError(f"{doing}: {host!r} cannot be found: {error}") from None
    return str(found[0][4][0])


_sockaddr = {socket.AF_INET: struct.Struct("=H2s4s8x"), socket.AF_INET6: struct.Struct("=H2s4x16sI")}


def _point(u: Ucp, where: Any, address: str, port: int) -> Any:
    """Let `where` point to a socket address, which is returned: it must be kept for as long as that is used."""
    name, _, scope = address.partition("%")
    family = socket.AF_INET6 if ":" in name else socket.AF_INET
    fields = [family, port.to_bytes(2, "big"), socket.inet_pton(family, name)]
    if family == socket.AF_INET6:
        fields.append((int(scope) if scope.isdigit() else socket.if_nametoindex(scope)) if scope else 0)
    raw = u.ffi.from_buffer(_sockaddr[family].pack(*fields))
    where.addr, where.addrlen = raw, len(raw)
    return raw


def _parse(u: Ucp, storage: Any) -> tuple[str, int]:
    """The host and port in a socket address."""
    raw = bytes(u.ffi.buffer(storage.bytes))
    family = socket.AddressFamily(int.from_bytes(raw[:2], sys.byteorder))
    _, port, address, *_ = _sockaddr[family].unpack_from(raw)
    return socket.inet_ntop(family, address), int.from_bytes(port, "big")
