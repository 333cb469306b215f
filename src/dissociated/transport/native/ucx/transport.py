"""ucx://HOST:PORT[?err_mode=none]: UCX, which chooses a medium that both hosts have: TCP, shared memory or RDMA.

Untagged messages are active messages of id 0, without a header. Tagged messages carry the protocol's own tags. Any UCX
peer can take part, because the only other messages are the reason of an abort (active message 1) and runs (a tag of
their own), which are sent only to peers that declare by their client id that they understand them.

UCX tags do not name the sender, so each connection has a worker of its own.
"""

from __future__ import annotations

from dissociated.errors import UriError
from dissociated.memory.remote import parse_spans
from dissociated.transport.base import Connection, Listener, Transport
from dissociated.transport.native.addresses import resolve, sockaddr
from dissociated.transport.native.ucx import libucp as c
from dissociated.transport.native.ucx.closing import closing_connections
from dissociated.transport.native.ucx.connection import UcxConnection
from dissociated.transport.native.ucx.handshake import MODES, check_version, error_mode, segment_of
from dissociated.transport.native.ucx.libucp import ucp
from dissociated.transport.native.ucx.listener import UcxListener
from dissociated.transport.native.ucx.worker import SEGMENT, Worker, context_key
from dissociated.transport.runs import offers_runs
from dissociated.uri import Uri


class UcxTransport(Transport):
    """The transport for ucx: URIs."""

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
        connection = UcxConnection(worker, where, mode == "none", accepted=False, knows_abort=False)
        connection.takes_runs = takes_runs
        connection.open(endpoint)
        del address_memory
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
        address = resolve(host, f"listening on {host}")
        return UcxListener(host, address, uri.port or 0, error_mode(uri), uri.parameters.get("rma") == "allow")
