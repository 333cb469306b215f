"""Socket addresses in the layout of the kernel, UCX and libfabric: family, port, address, scope or padding."""

from __future__ import annotations

import socket
import struct
import sys

from dissociated.errors import TransportError

_layouts = {socket.AF_INET: struct.Struct("=H2s4s8s"), socket.AF_INET6: struct.Struct("=H2s4x16s4s")}


def sockaddr(address: str, port: int) -> bytes:
    """Encode an IP address, which may have a scope, and a port as a socket address."""
    name, _, scope = address.partition("%")
    family, scope_id = socket.AF_INET6 if ":" in name else socket.AF_INET, b""
    if family == socket.AF_INET6 and scope:
        scope_id = (int(scope) if scope.isdigit() else socket.if_nametoindex(scope)).to_bytes(4, sys.byteorder)
    return _layouts[family].pack(family, port.to_bytes(2, "big"), socket.inet_pton(family, name), scope_id)


def host_and_port(name: bytes) -> tuple[str, int]:
    """Decode the host and the port of a socket address, such as the name of an endpoint.

    Raises:
        ValueError: if the address has another family than IPv4 or IPv6.
        struct.error: if the address is too short.
    """
    family = socket.AddressFamily(int.from_bytes(name[:2], sys.byteorder))
    _, port, host, _ = _layout(family).unpack_from(name)
    return socket.inet_ntop(family, host), int.from_bytes(port, "big")


def advertised_names(names: bytes, host: str) -> bytes:
    """Replace the any-interface address in names of endpoints by the address at which a client reaches them.

    Args:
        names: the names of one or more endpoints of the server, one after the other.
        host: the IP address of the server, which may have a scope.

    Returns:
        The names, with `host` in each name that has no address of one interface.

    Raises:
        ValueError: if a name has another family than IPv4 or IPv6.
        OSError: if `host` is no address of that family.
        struct.error: if the names have another length.
    """
    family = socket.AddressFamily(int.from_bytes(names[:2], sys.byteorder))
    layout, here = _layout(family), socket.inet_pton(family, host.partition("%")[0])
    return b"".join(
        layout.pack(number, port, named if any(named) else here, scope_id)
        for number, port, named, scope_id in layout.iter_unpack(names)
    )


def _layout(family: socket.AddressFamily) -> struct.Struct:
    if family not in _layouts:
        raise ValueError(f"{family.name} is not a family of internet addresses")
    return _layouts[family]


def resolve(host: str, action: str) -> str:
    """Return the first IP address of `host`.

    Raises:
        TransportError: if `host` cannot be resolved. The message starts with `action`.
    """
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise TransportError(f"{action}: {host!r} cannot be found: {error}") from None
    return str(addresses[0][4][0])
