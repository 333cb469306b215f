"""Shared memory, mapped once more for this process alone.

Whoever writes there changes neither what the server has, nor what others see: the kernel copies a page when it is
written to first.
"""

from __future__ import annotations

import mmap
import os
import resource
import weakref
from bisect import bisect_right

from dissociated.base.exit import keep_at_exit

_MAX_MAPPINGS = 64  # that are there at once: each takes a descriptor
_KEPT_PART = 4  # files are kept open among the first of so many parts of what descriptors there may be
_MAX_CLAIMED = 1 << 25  # bytes of one mapping, which are memory of this process's own if all of them are written to
_mappings: weakref.WeakSet[PrivateMapping] = weakref.WeakSet()


class SharedFile:
    """What a region was mapped from, kept open to map it once more. Closed when it is collected."""

    def __init__(self, descriptor: int) -> None:
        """The descriptor is its own from now on."""
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)

    @property
    def path(self) -> str:
        """Where other processes of this user find the file, while this is kept."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def map_private(self, size: int, source: object) -> PrivateMapping | None:
        """The first `size` bytes; None where there are as many mappings as there may be.

        `source`, which holds the lease of what lies there, is kept for as long as the mapping is used.
        """
        if len(_mappings) >= _MAX_MAPPINGS:
            return None
        try:
            mapping = PrivateMapping(self._descriptor, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError:  # there are too many descriptors, or there is no memory to promise
            return None
        mapping.source, mapping.claims = source, Claims()
        _mappings.add(mapping)
        keep_at_exit(mapping)
        return mapping


def keep_open(descriptor: int) -> SharedFile | None:
    """The descriptor stays the caller's. None where this process has many: what is still to be mapped needs them."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        own = os.dup(descriptor)
    except OSError:
        return None
    if own >= most // _KEPT_PART:  # the kernel gives the lowest number that is free
        os.close(own)
        return None
    return SharedFile(own)


class PrivateMapping(mmap.mmap):
    """Unmapped when the last array that lies in it is collected."""

    source: object
    #: what of it was given away, so that nobody sees what another has written
    claims: Claims


class Claims:
    """Extents, none of which overlap."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._claimed = 0

    @property
    def full(self) -> bool:
        """Whether there are enough: others shall be claimed in another mapping."""
        return self._claimed >= _MAX_CLAIMED

    def add(self, start: int, stop: int) -> bool:
        """Claim the bytes from `start` up to `stop`. False where one of them was claimed before."""
        place = bisect_right(self._starts, start)
        before = self._stops[place - 1] if place else 0
        if before > start or (place < len(self._starts) and self._starts[place] < stop):
            return False
        self._claimed += stop - start
        if place and before == start:
            self._stops[place - 1] = stop
        else:
            self._starts.insert(place, start)
            self._stops.insert(place, stop)
        return True
