"""Socket addresses as the kernel, UCX and libfabric lay them out: family, port, address, and what else there is."""

from __future__ import annotations

import socket
import struct
import sys

from dissociated.errors import TransportError

_layouts = {socket.AF_INET: struct.Struct("=H2s4s8s"), socket.AF_INET6: struct.Struct("=H2s4x16s4s")}


def sockaddr(address: str, port: int) -> bytes:
    """The socket address of an IP address, which may have a scope, and a port."""
    name, _, scope = address.partition("%")
    family, rest = socket.AF_INET6 if ":" in name else socket.AF_INET, b""
    if family == socket.AF_INET6 and scope:
        rest = (int(scope) if scope.isdigit() else socket.if_nametoindex(scope)).to_bytes(4, sys.byteorder)
    return _layouts[family].pack(family, port.to_bytes(2, "big"), socket.inet_pton(family, name), rest)


def host_and_port(name: bytes) -> tuple[str, int]:
    """The host and port in a socket address, such as the name of an endpoint. Raises ValueError, struct.error."""
    family = socket.AddressFamily(int.from_bytes(name[:2], sys.byteorder))
    _, port, host, _ = _layout(family).unpack_from(name)
    return socket.inet_ntop(family, host), int.from_bytes(port, "big")


def advertised_names(names: bytes, host: str) -> bytes:
    """The names of endpoints that listen on all interfaces, or on one, as others reach them at `host`.

    Raises ValueError, OSError, struct.error.
    """
    family = socket.AddressFamily(int.from_bytes(names[:2], sys.byteorder))
    layout, here = _layout(family), socket.inet_pton(family, host.partition("%")[0])
    return b"".join(
        layout.pack(number, port, named if any(named) else here, rest)
        for number, port, named, rest in layout.iter_unpack(names)
    )


def _layout(family: socket.AddressFamily) -> struct.Struct:
    if family not in _layouts:
        raise ValueError(f"{family.name} is no family of internet addresses")
    return _layouts[family]


def resolve(host: str, action: str) -> str:
    """An address of this host. Raises TransportError where it has none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise TransportError(f"{action}: {host!r} cannot be found: {error}") from None
    return str(found[0][4][0])
