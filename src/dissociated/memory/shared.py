"""Memory shared by descriptor: memfds and read-only mapped files.

A static memfd is sealed, so that no process can change or shrink it under a reader. A live memfd cannot be sealed
against writing, because the kernel would then also refuse to punch holes. It is sealed against shrinking, which would
crash a reader. Files cannot be sealed. Peers get read-only descriptors in each case.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import signal
import stat
from collections.abc import Callable, Sequence
from enum import IntEnum

import pyarrow as pa

from dissociated.base.buffers import Buffer
from dissociated.base.descriptors import owned
from dissociated.base.exit import keep_at_exit
from dissociated.base.oserrors import store_errors
from dissociated.errors import RemoteProtocolError

_IOV_MAX = os.sysconf("SC_IOV_MAX")
_MAX_NAME = 249  # bytes in the name of a memfd
_SEALS_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_SEALS_STATIC = _SEALS_SIZE | fcntl.F_SEAL_WRITE  # seals cannot be removed


class Backing(IntEnum):
    """The kind of file behind a shared descriptor, and so the guarantees that its receiver has."""

    #: a read-only file, whose owner promises not to shrink it
    FILE = 0
    #: a memfd sealed against every change
    SEALED = 1
    #: live memory: a memfd whose size is sealed; its owner continues to write to it and to punch holes
    LIVE = 2


_REQUIRED_SEALS = {Backing.FILE: 0, Backing.SEALED: _SEALS_STATIC, Backing.LIVE: _SEALS_SIZE}


def create_memfd(name: str) -> int:
    """Create an empty, sealable memfd. The caller owns the descriptor. Processes show the first part of its name."""
    whole = f"dissociated:{name}".encode(errors="replace")
    shown_name = whole[:_MAX_NAME].decode(errors="ignore")  # without a part of a character
    descriptor = os.memfd_create(shown_name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.fchmod(descriptor, 0o400)  # other users could otherwise reopen their read-only descriptor for writing
    return descriptor


def sealed_memfd(name: str, write: Callable[[int], object]) -> int:
    """Create a sealed memfd.

    Args:
        name: Name of the memfd, for people.
        write: Writes the content to the descriptor that it gets.

    Returns:
        A read-only descriptor, which the caller owns.

    Raises:
        StoreError: There is not enough memory.
    """
    with store_errors(f"shared memory for {name}"):
        writable = create_memfd(name)
    with owned(writable), store_errors(f"shared memory for {name}"):
        write(writable)
        seal(writable, Backing.SEALED)
        return reopen_read_only(writable)


def seal(descriptor: int, backing: Backing) -> None:
    """Seal a memfd as `backing` requires."""
    last = fcntl.F_SEAL_SEAL if backing is Backing.SEALED else 0
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _REQUIRED_SEALS[backing] | last)


def reopen_read_only(descriptor: int) -> int:
    """Return a read-only descriptor of the same memory, to share with peers. The caller owns it."""
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)


def map_read_only(descriptor: int, size: int) -> pa.Buffer:
    """Map `size` bytes. The buffer owns the mapping; the descriptor stays the caller's. 0 bytes need no mapping."""
    if not size:
        return pa.py_buffer(b"")
    mapping = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    keep_at_exit(mapping)
    return pa.py_buffer(mapping)


def map_received(descriptor: int, size: int, backing: int) -> pa.Buffer:
    """Map a file or memfd that a peer shared, after checking that reading it cannot crash this process.

    Args:
        descriptor: The descriptor, which stays the caller's.
        size: Size that the peer announced, in bytes.
        backing: Backing that the peer announced.

    Raises:
        RemoteProtocolError: The descriptor is no file, is smaller than announced, or lacks the seals of its backing.
    """
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise RemoteProtocolError("the peer shared a descriptor that is neither a file nor a memfd", rule="region-file")
    if status.st_size < size:
        raise RemoteProtocolError(
            f"the peer announced a region of {size} bytes and shared one of {status.st_size}", rule="region-file"
        )
    if backing not in tuple(Backing):
        raise RemoteProtocolError(f"the peer shared a region of unknown backing {backing}", rule="region-backing")
    required = _REQUIRED_SEALS[Backing(backing)]
    if required and _seals(descriptor) & required != required:
        raise RemoteProtocolError(
            "the peer shared a memfd without the seals that make it safe to map", rule="region-seals"
        )
    return map_read_only(descriptor, size)


def is_unused(descriptor: int) -> bool:
    """Return whether no process has opened or mapped the same file or memfd again, by trying a kernel lease on it.

    The kernel knows all processes, and asking disturbs none of them. Duplicates and mappings of this descriptor itself,
    also those of a process that received it, do not count. The result is False on file systems without kernel leases.
    """
    try:
        # The kernel signals an open during its lease. SIGIO, its default, would kill the process; SIGURG does not.
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        return False
    return True


def can_tell_unused() -> bool:
    """Return whether `is_unused` works for memfds. Some kernels and sandboxes have no kernel leases.

    Raises:
        OSError: No memfd can be made.
    """
    with owned(create_memfd("probe")) as probe:
        readable = reopen_read_only(probe)
    with owned(readable):
        return is_unused(readable)


def is_sealed(descriptor: int) -> bool:
    """Return whether a descriptor refers to memory that no process can change or shrink any more."""
    return _seals(descriptor) & _SEALS_STATIC == _SEALS_STATIC


def _seals(descriptor: int) -> int:
    try:
        return fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        return 0  # a file system without seals


def write_parts(descriptor: int, parts: Sequence[Buffer], offset: int | None = None) -> int:
    """Write `parts` one after the other, in as few system calls as possible.

    Args:
        descriptor: The descriptor.
        parts: The parts.
        offset: Position to write at; None for the descriptor's current position.

    Returns:
        The number of bytes written.
    """
    written = 0
    for first in range(0, len(parts), _IOV_MAX):
        views = [memoryview(part).cast("B") for part in parts[first : first + _IOV_MAX] if len(part)]
        while views:
            count = os.writev(descriptor, views) if offset is None else os.pwritev(descriptor, views, offset + written)
            written += count
            while views and count >= len(views[0]):
                count -= len(views.pop(0))
            if count:
                views[0] = views[0][count:]
    return written
