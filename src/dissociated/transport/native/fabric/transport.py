"""fabric://HOST:PORT[?provider=…]: libfabric, over TCP unless another provider is named.

Untagged and tagged messages of the protocol are untagged and tagged messages of libfabric. Tags do not name the sender,
so each connection has one or two endpoints of its own. Control messages, from the exchange of names to heartbeats, are
tagged messages too: see docs/fabric-peers.md.
"""

from __future__ import annotations

import socket

from dissociated.errors import UriError
from dissociated.memory.remote import parse_spans
from dissociated.transport.base import Connection, Listener, Transport
from dissociated.transport.framed.connection import socket_error
from dissociated.transport.framed.tcp import check_host_name
from dissociated.transport.native.fabric.connection import FabricConnection
from dissociated.transport.native.fabric.listener import FabricListener
from dissociated.transport.native.fabric.provider import check_same, heartbeat_interval, open_endpoint, provider_of
from dissociated.transport.runs import offers_runs
from dissociated.uri import Uri


class FabricTransport(Transport):
    """The transport for fabric: URIs."""

    def connect(self, uri: Uri, timeout: float) -> Connection:
        if not uri.host or not uri.port:
            raise UriError(f"{uri} needs a host and a port: fabric://HOST:PORT")
        provider, heartbeat = provider_of(uri), heartbeat_interval(uri)
        where = f"the fabric server {uri.host}:{uri.port}"
        here, there = _probe(uri.host, uri.port, timeout, where)
        spans = parse_spans(uri)
        endpoint = open_endpoint(provider, here, bool(spans))
        try:
            check_same(uri, endpoint)
            listener = endpoint.find(there, str(uri.port))
            connection = FabricConnection(endpoint, where, heartbeat)
        except BaseException:
            endpoint.close()
            raise
        connection.takes_runs = offers_runs(uri)
        try:
            connection.introduce(listener, there, timeout)
            if spans:
                connection.reach(spans)
        except BaseException:
            connection.close()
            raise
        return connection

    def listen(self, uri: Uri) -> Listener:
        return FabricListener(uri)


def _probe(host: str, port: int, timeout: float, where: str) -> tuple[str, str]:
    """Connect to the server once by TCP, because libfabric would try to connect to a closed port for ever.

    Returns:
        The IP addresses of this host and of the server.

    Raises:
        TransportError: if the server cannot be reached.
    """
    check_host_name(host)
    try:
        with socket.create_connection((host, port), timeout) as probe:
            return probe.getsockname()[0], probe.getpeername()[0]
    except OSError as error:
        raise socket_error(error, f"connecting to {where}") from None
