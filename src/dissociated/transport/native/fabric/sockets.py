"""The TCP connections that libfabric has made, found among the descriptors of this process: it gives no way to them."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import suppress

from dissociated.transport.native.addresses import FAMILIES, host_and_port
from dissociated.uri import ANY_INTERFACE


def shut_down(name: bytes, other: bytes) -> None:
    """End all connections of the endpoint of this name, and all with the other. Raises ValueError, struct.error."""
    (host, port), peer = host_and_port(name), host_and_port(other)
    for connection in _connections():
        with connection, suppress(OSError):
            here = connection.getsockname()
            ours = here[1] == port and (here[0] == host or host in ANY_INTERFACE)
            if ours or connection.getpeername()[:2] == peer:
                connection.shutdown(socket.SHUT_RDWR)


def _connections() -> Iterator[socket.socket]:
    """The TCP connections of this process, whoever has made them; each is a duplicate."""
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile
            if stat.S_ISSOCK(os.fstat(int(descriptor)).st_mode):
                found = socket.socket(fileno=os.dup(int(descriptor)))
                if found.family in FAMILIES and found.type == socket.SOCK_STREAM:
                    yield found
                else:
                    found.close()
