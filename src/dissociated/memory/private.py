"""Private mappings of shared memory, which this process may write to.

A write changes neither the server's memory nor another reader's: the kernel copies a page on its first write.
"""

from __future__ import annotations

import mmap
import os
import resource
import weakref
from bisect import bisect_right

from dissociated.base.exit import keep_at_exit

_MAX_MAPPINGS = 64  # mappings at once, because each takes a descriptor
_KEPT_PART = 4  # files are kept open only on the first quarter of the descriptors that the process may have
#: Claimed bytes of one mapping, all of which this process may write to, and so copy.
MAX_CLAIMED = 1 << 25
_mappings: weakref.WeakSet[PrivateMapping] = weakref.WeakSet()


class SharedFile:
    """The file or memfd of a region, kept open so that it can be mapped again. It is closed when collected."""

    def __init__(self, descriptor: int) -> None:
        """Take over the descriptor."""
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)

    @property
    def path(self) -> str:
        """Return the path by which other processes of this user can open the file, while this object exists."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def map_private(self, size: int, source: object) -> PrivateMapping | None:
        """Map the first `size` bytes privately.

        Args:
            size: Number of bytes.
            source: The owner of the lease of this memory, kept for as long as the mapping is used.

        Returns:
            The mapping, or None if there are too many mappings or the system refuses another.
        """
        if len(_mappings) >= _MAX_MAPPINGS:
            return None
        try:
            mapping = PrivateMapping(self._descriptor, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError:  # too many descriptors, or no memory to commit
            return None
        mapping.source, mapping.claims = source, Claims()
        _mappings.add(mapping)
        keep_at_exit(mapping)
        return mapping


def keep_open(descriptor: int) -> SharedFile | None:
    """Return a SharedFile with a duplicate of `descriptor`, which stays the caller's.

    Returns:
        The file, or None if this process has many descriptors open: regions that are still to be mapped need the rest.
    """
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        own = os.dup(descriptor)
    except OSError:
        return None
    if own >= most // _KEPT_PART:  # the kernel gives the lowest free number, so this many are open
        os.close(own)
        return None
    return SharedFile(own)


class PrivateMapping(mmap.mmap):
    """A private mapping, unmapped when the last array in it is collected."""

    source: object
    #: extents that were handed out, so that no writer sees the changes of another
    claims: Claims


class Claims:
    """A set of extents that do not overlap."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._claimed = 0

    @property
    def full(self) -> bool:
        """Return whether enough bytes are claimed, so that further claims should go to another mapping."""
        return self._claimed >= MAX_CLAIMED

    def add(self, start: int, stop: int) -> bool:
        """Claim the bytes from `start` up to `stop`. Return False if any of them was claimed before."""
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
