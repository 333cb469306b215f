"""The TCP connections that libfabric has made, found among the descriptors of this process: it gives no way to them.

The C library is asked, which takes no descriptor: a `socket` would have to be a duplicate, and there may be no more.
"""

from __future__ import annotations

import ctypes
import os
import resource
import socket
import struct
from collections.abc import Callable, Iterable
from contextlib import suppress

from dissociated.transport.native.addresses import host_and_port
from dissociated.uri import ANY_INTERFACE

_STREAM = struct.pack("i", socket.SOCK_STREAM)


def shut_down(name: bytes, other: bytes) -> None:
    """End all connections of the endpoint of this name, and all with the other. Raises ValueError, struct.error.

    Whoever calls this has the endpoint for itself: libfabric closes those connections only while it is let work, so a
    number cannot become another's here. A duplicate would not be safer: closing one of a file gives up the locks of
    this process on it, such as those of SQLite.
    """
    (host, port), peer = host_and_port(name), host_and_port(other)
    libc = ctypes.CDLL(None)
    for descriptor in _descriptors():
        with suppress(OSError, ValueError, struct.error):  # closed meanwhile, or none of those
            here = host_and_port(_told(libc.getsockname, descriptor))
            is_stream = _told(libc.getsockopt, descriptor, socket.SOL_SOCKET, socket.SO_TYPE) == _STREAM
            ours = here[1] == port and (here[0] == host or host in ANY_INTERFACE)
            if is_stream and (ours or host_and_port(_told(libc.getpeername, descriptor)) == peer):
                libc.shutdown(descriptor, socket.SHUT_RDWR)


def _told(call: Callable[..., int], descriptor: int, *about: int) -> bytes:
    """What the C library tells about a socket. Raises OSError."""
    memory, length = ctypes.create_string_buffer(256), ctypes.c_uint32(256)
    if call(descriptor, *about, memory, ctypes.byref(length)):
        raise OSError(f"the descriptor {descriptor} is none of a socket of that kind")
    return memory.raw[: length.value]


def _descriptors() -> Iterable[int]:
    """Those of this process, or all that it can have, where there is none left to list them with.

    These are hardly more: where none is left, almost all are open. Each takes a few microseconds.
    """
    try:
        return map(int, os.listdir("/proc/self/fd"))
    except OSError:
        return range(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
