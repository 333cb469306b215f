"""tcp://HOST:PORT: frames over TCP, between any two hosts. IPv4 and IPv6."""

from __future__ import annotations

import socket
from typing import Any

from dissociated.base.oserrors import socket_error
from dissociated.errors import DeadlineExceeded, UriError
from dissociated.transport.base import Connection, Listener, Transport
from dissociated.transport.framed.connection import SocketConnection, SocketListener
from dissociated.uri import Uri

_KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 2))  # seconds, probes


def configure_socket(sock: socket.socket) -> socket.socket:
    """Set options on a socket, which is returned: send at once, and notice a peer that has vanished."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A host that vanished is noticed within 15 seconds, also while a server waits for leases. The kernel sends no
    # keepalive while data waits for an acknowledgement: `SocketConnection` then asks for the last acknowledgement.
    # TCP_USER_TIMEOUT and TCP_RTO_MAX_MS would also end connections to a live peer that reads nothing for a while.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    return sock


def connect_socket(uri: Uri, timeout: float) -> tuple[socket.socket, str]:
    """Connect to `uri`.

    Returns:
        The socket, which the caller owns, and a description of its peer.

    Raises:
        UriError: The URI has no host or no port. Errors of the system are converted by `socket_error`.
    """
    if not uri.host or not uri.port:
        raise UriError(f"{uri} needs a host and a port: {uri.scheme}://HOST:PORT")
    check_host_name(uri.host)
    where = f"{uri.scheme} server {uri.host}:{uri.port}"
    try:
        sock = socket.create_connection((uri.host, uri.port), timeout)
    except TimeoutError as error:
        raise DeadlineExceeded(
            f"connecting to the {where}: no answer in time; open that port in the firewall of its host"
        ) from error
    except OSError as error:
        raise socket_error(error, f"connecting to the {where}") from error
    return configure_socket(sock), where


def listen_socket(uri: Uri) -> tuple[socket.socket, Uri]:
    """Listen at `uri`. Errors are those of `connect_socket`.

    Returns:
        The socket, which the caller owns, and its URI with the actual port.
    """
    host, port = uri.host or "127.0.0.1", uri.port or 0
    check_host_name(host)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        sock = socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise socket_error(error, f"listening on {host}:{port}") from error
    return sock, Uri(uri.scheme, host=host, port=sock.getsockname()[1])


def check_host_name(host: str) -> None:
    """Raise UriError if `host` cannot be the name of a host."""
    try:
        host.encode("idna")
    except UnicodeError as error:
        raise UriError(f"{host!r} is not the name of a host: {error}") from None


class _TcpListener(SocketListener):
    def _welcome(self, accepted: socket.socket, address: Any) -> Connection:
        return SocketConnection(configure_socket(accepted), f"tcp client {address[0]}:{address[1]}", accepted=True)


class TcpTransport(Transport):
    """The transport `tcp`. See the module."""

    connection_type = SocketConnection

    def connect(self, uri: Uri, timeout: float) -> Connection:
        return SocketConnection(*connect_socket(uri, timeout), accepted=False)

    def listen(self, uri: Uri) -> Listener:
        return _TcpListener(*listen_socket(uri))
