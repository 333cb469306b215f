"""Regions of memory that are shared between processes, and the addresses within them.

A server gives each region a base, so that one connection can speak of several: the addresses of a region are
`base <= address < base + size`. Both sides map the region where they like.
"""

from __future__ import annotations

import mmap
import os
import threading
from bisect import bisect_right
from collections.abc import Sequence

import pyarrow as pa

from dissociated.errors import RemoteProtocolError

_PAGE = mmap.PAGESIZE
_next_base = _PAGE  # so that no buffer ever has the address 0, which means absent
_lock = threading.Lock()


def pages(size: int) -> int:
    """The bytes of the whole pages that so many bytes take."""
    return -(-size // _PAGE) * _PAGE


def machine_memory() -> int:
    """The bytes of memory that this machine has."""
    return _PAGE * os.sysconf("SC_PHYS_PAGES")


def reserve_base(size: int) -> int:
    """The base for a new region of `size` bytes, never given to another region of this process."""
    global _next_base
    with _lock:
        base = _next_base
        _next_base += pages(size) + _PAGE  # a gap, so that no extent can run into the next region
    return base


class Region:
    """A span of addresses, `base` to `base + size`, and the memory mapped for it in this process.

    `memory` is a pyarrow.Buffer of `size` bytes which owns the mapping: it is unmapped when the last array that
    lies in it is collected.
    """

    def __init__(self, base: int, memory: pa.Buffer, static: bool = True) -> None:
        self.base = base
        #: whether what lies in it stays as it is
        self.static = static
        self.size: int = memory.size
        self.memory = memory

    def __repr__(self) -> str:
        return f"<Region {self.base:#x} to {self.base + self.size:#x}>"

    def offsets(self, addresses: Sequence[int], lengths: Sequence[int]) -> list[int]:
        """Where these extents begin within `memory`; 0 for empty ones.

        Raises RemoteProtocolError if one of them leaves the region.
        """
        base, end = self.base, self.base + self.size
        offsets = []
        for address, length in zip(addresses, lengths, strict=True):
            if not length:
                offsets.append(0)
            elif base <= address and address + length <= end:
                offsets.append(address - base)
            else:
                raise RemoteProtocolError(
                    f"the peer sent the address {address:#x} with {length} bytes, which leaves {self!r}"
                )
        return offsets

    def gather(
        self, offsets: Sequence[int], lengths: Sequence[int], wanted: Sequence[int], packed: pa.Buffer
    ) -> pa.Buffer:
        """Copy the extents at `offsets` to the offsets `wanted` in `packed`, which is returned.

        Raises RemoteProtocolError if one of them leaves `packed`.
        """
        source, target = memoryview(self.memory), memoryview(packed)
        for offset, length, at in zip(offsets, lengths, wanted, strict=True):
            if length and not 0 <= at <= len(target) - length:
                raise RemoteProtocolError(f"a buffer at {at} of {length} bytes leaves its body of {len(target)} bytes")
            target[at : at + length] = source[offset : offset + length]
        return packed


#: How many regions one connection may share, and so how many segments a dataset may have.
MAX_REGIONS = 4096


class AddressSpace:
    """The regions that a peer has shared on one connection. A region once added stays."""

    def __init__(self, max_regions: int = MAX_REGIONS) -> None:
        #: Bases and regions, in order. Replaced, never changed, so that another thread may look.
        self._sorted: tuple[list[int], list[Region]] = [], []
        self._max_regions = max_regions

    @property
    def static(self) -> bool:
        """Whether there are regions, and what lies in them stays as it is."""
        _, regions = self._sorted
        return bool(regions) and all(region.static for region in regions)

    @property
    def live(self) -> bool:
        """Whether there are regions whose memory is used again when it is freed."""
        return any(not region.static for region in self._sorted[1])

    def add(self, region: Region) -> None:
        """Make `region` known. Raises RemoteProtocolError if it overlaps another, or there are too many."""
        bases, regions = self._sorted
        if len(regions) == self._max_regions:
            raise RemoteProtocolError(f"the peer shared more than {self._max_regions} regions on one connection")
        at = bisect_right(bases, region.base)
        for other in regions[max(at - 1, 0) : at + 1]:
            if region.base < other.base + other.size and other.base < region.base + region.size:
                raise RemoteProtocolError(f"the peer shared {region!r}, which overlaps {other!r}")
        self._sorted = [*bases[:at], region.base, *bases[at:]], [*regions[:at], region, *regions[at:]]

    def find(self, address: int) -> Region:
        """The region that `address` lies in. Raises RemoteProtocolError if there is none."""
        bases, regions = self._sorted
        at = bisect_right(bases, address) - 1
        if at >= 0:
            region = regions[at]
            if address < region.base + region.size:
                return region
        raise RemoteProtocolError(f"the peer sent the address {address:#x}, which lies in no region it shared")
