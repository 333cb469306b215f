"""Regions of memory that are shared between processes, and the addresses within them.

A server gives each region a base, so that one connection can speak of several: the addresses of a region are
`base <= address < base + size`. Both sides map the region where they like.
"""

from __future__ import annotations

import mmap
import threading
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import pyarrow as pa

from dissociated.errors import RemoteProtocolError
from dissociated.memory.device.base import Device
from dissociated.memory.private import SharedFile

_PAGE = mmap.PAGESIZE
_ALIGNMENT = 8  # that libarrow asks of offsets in a body
_next_base = _PAGE  # so that no buffer ever has the address 0, which means absent
_lock = threading.Lock()


def pages(size: int) -> int:
    """The bytes of the whole pages that so many bytes take."""
    return -(-size // _PAGE) * _PAGE


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

    def __init__(
        self,
        base: int,
        memory: pa.Buffer,
        static: bool = True,
        device: Device | None = None,
        file: SharedFile | None = None,
        handle: bytes = b"",
    ) -> None:
        self.base = base
        #: what it was mapped from, where that was to be kept open
        self.file = file
        #: whose memory it is: None for that of the host, which alone may be looked into here
        self.device = device
        #: by which that device knows it
        self.handle = handle
        #: whether what lies in it stays as it is
        self.static = static
        self.size: int = memory.size
        self.memory = memory

    def __repr__(self) -> str:
        return f"<Region {self.base:#x} to {self.base + self.size:#x}>"


class Located(NamedTuple):
    """Where the buffers of a message lie: at these offsets in `memory`, 0 for empty ones.

    `memory` keeps mapped what they lie in. Where they lie in several regions it reaches from the first to the last of
    them, over whatever this process has between: only the extents that were located may be touched in it.
    """

    memory: pa.Buffer
    offsets: Sequence[int]
    device: Device | None = None

    def gather(self, lengths: Sequence[int], wanted: Sequence[int], packed: pa.Buffer) -> pa.Buffer:
        """Copy the extents to the offsets `wanted` in `packed`, which is returned.

        Raises RemoteProtocolError if one of them leaves `packed`.
        """
        source, target = memoryview(self.memory), memoryview(packed)
        for offset, length, at in zip(self.offsets, lengths, wanted, strict=True):
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
    def regions(self) -> Sequence[Region]:
        """What there is, in the order of addresses. It is not changed when more comes, but replaced."""
        return self._sorted[1]

    @property
    def static(self) -> bool:
        """Whether there are regions, all of them in host memory, and none of them changes."""
        _, regions = self._sorted
        return bool(regions) and all(region.static and region.device is None for region in regions)

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

    def close_devices(self) -> bool:
        """Let go of the regions on devices: no address in them is looked for any more.

        Whether none is open any more, or it is others who have it open. If not, nobody could tell what still reads it:
        ask again.
        """
        regions = [(region, region.device) for region in self._sorted[1] if region.device is not None]
        for region, _ in regions:
            region.memory = pa.py_buffer(b"")
        for device in {device for _, device in regions}:
            device.retry()
        return not any(device.is_left_open(region.handle) for region, device in regions)

    def find(self, address: int) -> Region:
        """The region that `address` lies in. Raises RemoteProtocolError if there is none."""
        bases, regions = self._sorted
        at = bisect_right(bases, address) - 1
        if at >= 0:
            region = regions[at]
            if address < region.base + region.size:
                return region
        raise RemoteProtocolError(f"the peer sent the address {address:#x}, which lies in no region it shared")

    def locate(self, addresses: Sequence[int], lengths: Sequence[int]) -> Located:
        """Where these extents lie, at least one of which has bytes. Each lies in one region; they may lie in several.

        Raises RemoteProtocolError where one of them leaves its region, or lies in none.
        """
        regions: list[Region] = []
        base = end = shift = 0  # of the region that was found last; `shift` leads from its addresses to ours
        places = []
        for address, length in zip(addresses, lengths, strict=True):
            if not length:
                places.append(0)
                continue
            if not base <= address < end:
                region = self.find(address)
                regions.append(region)
                base, end, shift = region.base, region.base + region.size, region.memory.address - region.base
            if address + length > end:
                raise RemoteProtocolError(
                    f"the peer sent the address {address:#x} with {length} bytes, which leaves {self.find(address)!r}"
                )
            places.append(address + shift)
        device = regions[0].device
        if any(region.device is not device for region in regions):
            raise RemoteProtocolError("the peer sent a message that lies partly on a device, and partly elsewhere")
        memory = regions[0].memory if len(regions) == 1 else _spanning(regions)
        start = memory.address
        offsets = [place - start if length else 0 for place, length in zip(places, lengths, strict=True)]
        return Located(memory, offsets, device)


def _spanning(regions: Sequence[Region]) -> pa.Buffer:
    """A buffer from where the first of these begins in this process to where the last ends, which keeps them mapped.

    So libarrow, which reads one body and slices it, needs no copy of buffers that lie far apart.
    """
    memories = [region.memory for region in regions]
    start = min(memory.address for memory in memories) & -_ALIGNMENT
    return pa.foreign_buffer(start, max(memory.address + memory.size for memory in memories) - start, memories)
