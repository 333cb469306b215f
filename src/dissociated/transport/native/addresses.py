"""Socket addresses in the layout of the kernel, UCX and libfabric: family, port, address, scope or padding.

Some libraries hide their sockets: `shut_down_between` finds these by their addresses.
"""

from __future__ import annotations

import ctypes
import os
import resource
import socket
import struct
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress

from dissociated.errors import TransportError
from dissociated.uri import ANY_INTERFACE

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
        ValueError: The address has another family than IPv4 or IPv6.
        struct.error: The address is too short.
    """
    family = socket.AddressFamily(int.from_bytes(name[:2], sys.byteorder))
    _, port, host, _ = _layout(family).unpack_from(name)
    return socket.inet_ntop(family, host), int.from_bytes(port, "big")


def advertised_names(names: bytes, host: str) -> bytes:
    """Replace the any-interface address in names of endpoints by the address at which a client reaches them.

    Args:
        names: The names of one or more endpoints of the server, one after the other.
        host: The IP address of the server, which may have a scope.

    Returns:
        The names, with `host` in each name that has no address of one interface.

    Raises:
        ValueError: A name has another family than IPv4 or IPv6.
        OSError: `host` is no address of that family.
        struct.error: The names have another length.
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
        TransportError: `host` cannot be resolved. The message starts with `action`.
    """
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise TransportError(f"{action}: {host!r} cannot be found: {error}") from None
    return str(addresses[0][4][0])


def shut_down_between(name: bytes, peer_name: bytes) -> None:
    """Shut down the TCP connections of the endpoint called `name`, and those with the endpoint called `peer_name`.

    Libfabric does not expose its connections, so they are looked for among the descriptors of this process. The C
    library is called directly, because Python's `socket` would have to duplicate each descriptor, and none may be free.

    No other thread may use the endpoint meanwhile. Libfabric closes its connections only while it works, so their
    descriptors are not reused during this call. Duplicates would not be safer: closing the duplicate of a file would
    release the locks of this process on that file, such as those of SQLite.

    Raises:
        ValueError: A name is no internet address.
        struct.error: A name is too short.
    """
    (host, port), peer = host_and_port(name), host_and_port(peer_name)
    libc, stream = ctypes.CDLL(None), struct.pack("i", socket.SOCK_STREAM)
    for descriptor in _descriptors():
        with suppress(OSError, ValueError, struct.error):  # closed meanwhile, or no internet socket
            here = host_and_port(_query(libc.getsockname, descriptor))
            is_stream = _query(libc.getsockopt, descriptor, socket.SOL_SOCKET, socket.SO_TYPE) == stream
            is_own = here[1] == port and (here[0] == host or host in ANY_INTERFACE)
            if is_stream and (is_own or host_and_port(_query(libc.getpeername, descriptor)) == peer):
                libc.shutdown(descriptor, socket.SHUT_RDWR)


def _query(call: Callable[..., int], descriptor: int, *about: int) -> bytes:
    """Return the result of a C function that describes a socket. Raise OSError if it fails."""
    memory, length = ctypes.create_string_buffer(256), ctypes.c_uint32(256)
    if call(descriptor, *about, memory, ctypes.byref(length)):
        raise OSError(f"descriptor {descriptor} is not a connected socket")
    return memory.raw[: length.value]


def _descriptors() -> Iterable[int]:
    """List the open descriptors of this process; if no descriptor is free for that, all possible ones.

    In the latter case almost all are open, so there are hardly more to check. Each check takes a few microseconds.
    """
    try:
        return map(int, os.listdir("/proc/self/fd"))
    except OSError:
        return range(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
