"""ucx://HOST:PORT[?err_mode=none]: UCX, which chooses a medium that both hosts have: TCP, shared memory or RDMA.

Untagged messages are active messages of id 0, without a header. Tagged messages carry the protocol's own tags. Any UCX
peer can take part, because the only other messages are the reason of an abort (active message 1) and runs (a tag of
their own), which are sent only to peers that declare by their client id that they understand them.

UCX tags do not name the sender, so each connection has a worker of its own.
"""

from __future__ import annotations

import logging
from collections import deque
from contextlib import ExitStack
from typing import Any

from dissociated.errors import TransportError, UriError
from dissociated.memory.region import Region
from dissociated.memory.remote import Span, parse_spans
from dissociated.transport.base import Connection, Listener, Transport
from dissociated.transport.native.addresses import host_and_port, resolve, sockaddr
from dissociated.transport.native.connection import NativeConnection
from dissociated.transport.native.listener import NativeListener, Withdraw, withdraw_with
from dissociated.transport.native.threads import MAX_SLEEP
from dissociated.transport.native.ucx import libucp as c
from dissociated.transport.native.ucx.channel import UcxChannel
from dissociated.transport.native.ucx.closing import closing_connections
from dissociated.transport.native.ucx.endpoint import callbacks
from dissociated.transport.native.ucx.handshake import (
    MODES,
    SEGMENT_PARAMETER,
    check_version,
    client_says,
    error_mode,
    segment_of,
)
from dissociated.transport.native.ucx.libucp import Ucp, ucp
from dissociated.transport.native.ucx.worker import SEGMENT, Worker, context_key
from dissociated.transport.runs import OFFER, offers_runs
from dissociated.uri import Uri

_log = logging.getLogger(__name__)

_MAX_WAITING = 128  # connection requests that wait to be accepted; further ones are rejected


class UcxTransport(Transport):
    """The transport for ucx: URIs."""

    connection_type = NativeConnection

    def connect(self, uri: Uri, timeout: float) -> Connection:
        if not uri.host or not uri.port:
            raise UriError(f"{uri} needs a host and a port: ucx://HOST:PORT")
        mode = error_mode(uri)
        where = f"the ucx server {uri.host}:{uri.port}"
        u = ucp()
        check_version(u, uri, where)
        address = resolve(uri.host, f"connecting to {where}")
        endpoint = u.ffi.new("ucp_ep_params_t *")
        endpoint.field_mask = c.EP_PARAM_SOCK_ADDR | c.EP_PARAM_FLAGS | c.EP_PARAM_ERR_MODE
        endpoint.flags = c.EP_CLIENT_SERVER | c.EP_SEND_CLIENT_ID
        endpoint.err_mode = MODES[mode]
        address_memory = u.point(endpoint.sockaddr, sockaddr(address, uri.port))
        spans = parse_spans(uri)
        takes_runs = offers_runs(uri)
        closing_connections().check_room()
        place = context_key(address, bool(spans), large=segment_of(uri) >= SEGMENT, shared=mode == "none")
        worker = Worker(place, takes_runs)
        channel = UcxChannel(worker, endpoint, where, mode == "none", accepted=False, takes_runs=takes_runs)
        connection = NativeConnection(channel, spans)
        connection.connect(timeout)
        del address_memory
        return connection

    def listen(self, uri: Uri) -> Listener:
        host = uri.host or "127.0.0.1"
        address = resolve(host, f"listening on {host}")
        return UcxListener(host, address, uri.port or 0, error_mode(uri), uri.parameters.get("rma") == "allow")


class UcxListener(NativeListener):
    """A listener with a worker that only receives connection requests. Each connection gets a worker of its own."""

    def __init__(self, host: str, address: str, port: int, mode: str, rma: bool) -> None:
        self._place = context_key(address, rma, large=False, shared=mode == "none")
        self._worker = Worker(self._place)
        self._mode = mode
        self._ucp = u = self._worker.ucp
        self._handle = u.ffi.new_handle(self)
        self._requests: deque[Any] = deque()
        params = u.ffi.new("ucp_listener_params_t *")
        params.field_mask = c.LISTENER_PARAM_SOCK_ADDR | c.LISTENER_PARAM_CONN_HANDLER
        address_memory = u.point(params.sockaddr, sockaddr(address, port))
        params.conn_handler.cb, params.conn_handler.arg = callbacks().on_requested, self._handle
        listener = u.ffi.new("ucp_listener_h *")
        with ExitStack() as undo:
            undo.callback(self._worker.destroy)
            super().__init__(exposes_memory=rma)
            undo.callback(self._monitor.waker.close)
            status = u.lib.ucp_listener_create(self._worker.handle, params, listener)
            u.check(status, f"listening on {host}:{port}")
            undo.pop_all()
        del address_memory
        self._listener = listener[0]
        attributes = u.ffi.new("ucp_listener_attr_t *")
        attributes.field_mask = c.LISTENER_ATTR_SOCKADDR
        u.check(u.lib.ucp_listener_query(self._listener, attributes), "listening")
        parameters = {"ucx": u.version, **({"err_mode": mode} if mode != "peer" else {}), **OFFER}
        if self._worker.context.segment:
            parameters[SEGMENT_PARAMETER] = str(self._worker.context.segment)
        self.uri = Uri("ucx", host=host, port=host_and_port(u.raw(attributes.sockaddr))[1], parameters=parameters)

    def _progress(self) -> None:
        while not self._closed and not self._requests and self._worker.progress():
            pass

    def _next(self) -> Connection | None:
        while self._requests and not self._closed:
            try:
                return self._welcome(self._requests.popleft())
            except TransportError as error:
                _log.info("client refused: uri=%s error=%s", self.uri, error)
        return None

    def _arm(self) -> bool:
        return self._worker.arm()

    def _sleep(self) -> None:
        self._monitor.waker.sleep((self._worker.descriptor,), MAX_SLEEP)

    def _welcome(self, request: Any) -> Connection:
        u = self._ucp
        attributes = u.ffi.new("ucp_conn_request_attr_t *")
        attributes.field_mask = c.CONN_REQUEST_CLIENT_ADDR | c.CONN_REQUEST_CLIENT_ID
        is_known = u.lib.ucp_conn_request_query(request, attributes) == c.OK
        peer = "ucx client {}:{}".format(*host_and_port(u.raw(attributes.client_address))) if is_known else "ucx client"
        client = client_says(attributes.client_id if is_known else 0)
        endpoint = u.ffi.new("ucp_ep_params_t *")
        endpoint.field_mask, endpoint.conn_request = c.EP_PARAM_CONN_REQUEST, request
        if self._mode == "peer":  # otherwise the client chooses the error mode
            endpoint.field_mask |= c.EP_PARAM_ERR_MODE
            endpoint.err_mode = c.ERR_MODE_PEER
        none = self._mode == "none"
        try:
            closing_connections().check_room()
            # Memory is registered with the listener's context, so connections that may fetch from it use that context.
            worker = Worker(self._place._replace(large=client.segment >= SEGMENT and not self.exposes_memory))
            channel = UcxChannel(worker, endpoint, peer, none, True, client.takes_runs, client.knows_abort)
        except TransportError:
            u.lib.ucp_listener_reject(self._listener, request)
            raise
        connection = NativeConnection(channel)
        connection.open()
        return connection

    def _register(self, region: Region) -> tuple[Span, Withdraw]:
        u, context = self._ucp, self._worker.context.handle
        address = int(region.memory.address)
        params = u.ffi.new("ucp_mem_map_params_t *")
        params.field_mask = c.MEM_ADDRESS | c.MEM_LENGTH | c.MEM_PROT
        params.address, params.length = u.ffi.cast("void *", address), region.size
        params.prot = c.MEM_LOCAL_READ | c.MEM_REMOTE_READ
        memory = u.ffi.new("ucp_mem_h *")
        u.check(u.lib.ucp_mem_map(context, params, memory), f"registering {region.size} bytes of memory")
        withdraw = withdraw_with(region, _withdraw, u, context, memory[0], region.memory)
        packed, size = u.ffi.new("void **"), u.ffi.new("size_t *")
        try:
            u.check(u.lib.ucp_rkey_pack(context, memory[0], packed, size), "making a key for memory")
        except BaseException:
            withdraw()
            raise
        key = bytes(u.ffi.buffer(packed[0], size[0]))
        u.lib.ucp_rkey_buffer_release(packed[0])
        return Span(address, region.size, key), withdraw

    def request_arrived(self, request: Any) -> None:
        """Queue the connection request of a client, or reject it if too many wait. UCX calls this."""
        if len(self._requests) >= _MAX_WAITING:
            self._ucp.lib.ucp_listener_reject(self._listener, request)
        else:
            self._requests.append(request)

    def callback_failed(self, error: BaseException) -> None:
        """Record an exception in a callback from UCX. The request may be lost, but the listener continues."""
        self._worker.failure = TransportError(f"accepting: {error!r}") if isinstance(error, Exception) else error

    def _turn_away(self) -> None:
        while self._requests:
            self._ucp.lib.ucp_listener_reject(self._listener, self._requests.popleft())

    def _release(self) -> None:
        self._ucp.lib.ucp_listener_destroy(self._listener)
        self._worker.destroy()
        self._handle = None


def _withdraw(u: Ucp, context: Any, handle: Any, memory: Any) -> None:
    u.lib.ucp_mem_unmap(context, handle)
