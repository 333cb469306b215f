"""Memory shared by descriptor: memfds and read-only mapped files.

A static memfd is sealed, so that nobody can change or shrink it under a reader. A live one cannot be sealed
against writing, since the kernel then also refuses to punch holes; it is sealed against shrinking, which is what
would crash a reader. Files cannot be sealed. Peers get read-only descriptors in each case.
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
from dissociated.base.exit import keep_at_exit
from dissociated.base.oserrors import store_errors
from dissociated.errors import RemoteProtocolError

_IOV_MAX = os.sysconf("SC_IOV_MAX")
_SEALS_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_SEALS_STATIC = _SEALS_SIZE | fcntl.F_SEAL_WRITE  # none of which can be taken back


class Backing(IntEnum):
    """What a shared descriptor refers to, and so what its receiver may rely on."""

    #: a read-only file: whoever owns it promises not to shrink it
    FILE = 0
    #: a memfd sealed against every change
    SEALED = 1
    #: a memfd whose size is sealed and whose content its owner goes on writing and punching
    LIVE = 2


_REQUIRED_SEALS = {Backing.FILE: 0, Backing.SEALED: _SEALS_STATIC, Backing.LIVE: _SEALS_SIZE}


def create_memfd(name: str) -> int:
    """A new, empty, sealable memfd. The caller owns the descriptor."""
    descriptor = os.memfd_create(f"dissociated:{name}"[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.fchmod(descriptor, 0o400)  # else other users could open what they get read-only once more, for writing
    return descriptor


def sealed_memfd(name: str, write: Callable[[int], object]) -> int:
    """A read-only descriptor, which the caller owns, of a sealed memfd with what `write` wrote to the one it got.

    Raises StoreError where there is no memory for it.
    """
    with store_errors(f"shared memory for {name}"):
        writable = create_memfd(name)
    try:
        with store_errors(f"shared memory for {name}"):
            write(writable)
            seal(writable, Backing.SEALED)
            return reopen_read_only(writable)
    finally:
        os.close(writable)


def seal(descriptor: int, backing: Backing) -> None:
    """Seal a memfd as `backing` demands."""
    last = fcntl.F_SEAL_SEAL if backing is Backing.SEALED else 0
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _REQUIRED_SEALS[backing] | last)


def reopen_read_only(descriptor: int) -> int:
    """A read-only descriptor of the same memory, to hand out. The caller owns it."""
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)


def map_read_only(descriptor: int, size: int) -> pa.Buffer:
    """Map `size` bytes. The buffer owns the mapping; the descriptor stays the caller's. 0 bytes need no mapping."""
    if not size:
        return pa.py_buffer(b"")
    mapping = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    keep_at_exit(mapping)
    return pa.py_buffer(mapping)


def map_received(descriptor: int, size: int, backing: int) -> pa.Buffer:
    """Map what a peer sent, after checking that touching it cannot go wrong. The descriptor stays the caller's.

    Raises RemoteProtocolError where the descriptor is no file, is smaller than announced, or lacks the seals that
    its backing promises.
    """
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise RemoteProtocolError("the peer shared a descriptor that is neither a file nor a memfd")
    if status.st_size < size:
        raise RemoteProtocolError(f"the peer announced a region of {size} bytes and shared one of {status.st_size}")
    if backing not in tuple(Backing):
        raise RemoteProtocolError(f"the peer shared a region of unknown backing {backing}")
    required = _REQUIRED_SEALS[Backing(backing)]
    if required and _seals(descriptor) & required != required:
        raise RemoteProtocolError("the peer shared a memfd without the seals that make it safe to map")
    return map_read_only(descriptor, size)


def is_unused(descriptor: int) -> bool:
    """Whether nobody has opened the same file or memory once more, or mapped that: then the kernel grants a lease.

    It knows of all processes, and asking disturbs none of them. What was duplicated or mapped from this descriptor
    itself, here or by who received it, does not show. False too where a file system grants no leases.
    """
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)  # SIGIO, should somebody open it now, would kill
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        return False
    return True


def can_tell_unused() -> bool:
    """Whether `is_unused` can tell that of memfds: not every kernel and sandbox grants leases. Raises OSError."""
    probe = create_memfd("probe")
    try:
        readable = reopen_read_only(probe)
    finally:
        os.close(probe)
    try:
        return is_unused(readable)
    finally:
        os.close(readable)


def is_sealed(descriptor: int) -> bool:
    """Whether a descriptor refers to memory that nobody can change or shrink any more."""
    return _seals(descriptor) & _SEALS_STATIC == _SEALS_STATIC


def _seals(descriptor: int) -> int:
    try:
        return fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        return 0  # a file system without seals


def write_parts(descriptor: int, parts: Sequence[Buffer], offset: int | None = None) -> int:
    """Write `parts` one after the other at `offset`, or where the descriptor stands, in as few calls as can be.

    Returns the number of bytes.
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
