"""Regions of memory that processes share, and the addresses within them.

A server gives each region a base, so that one connection can refer to several: the addresses of a region are `base <=
address < base + size`. Each side maps the region at an address of its own.
"""

from __future__ import annotations

import mmap
import threading
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import pyarrow as pa

from dissociated.base.fork import hold_over_forks
from dissociated.errors import RemoteProtocolError
from dissociated.memory.device.base import Device
from dissociated.memory.private import SharedFile

_PAGE = mmap.PAGESIZE
_ALIGNMENT = 8  # libarrow requires it of offsets in a body
_next_base = _PAGE  # not 0, because the address 0 means an absent buffer
_lock = threading.Lock()
hold_over_forks(_lock)


def pages(size: int) -> int:
    """Return `size` rounded up to whole pages, in bytes."""
    return -(-size // _PAGE) * _PAGE


def reserve_base(size: int) -> int:
    """Return the base for a new region of `size` bytes. No other region of this process gets the same addresses."""
    global _next_base
    with _lock:
        base = _next_base
        _next_base += pages(size) + _PAGE  # a gap, so that no extent can run into the next region
    return base


class Region:
    """A span of addresses, `base` to `base + size`, and the memory that is mapped for it in this process.

    `memory` is a pyarrow.Buffer of `size` bytes which owns the mapping. It is unmapped when the last array in it is
    collected.
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
        #: file or memfd that it was mapped from, if that is kept open
        self.file = file
        #: device whose memory it is; None for host memory, the only memory that may be read here
        self.device = device
        #: handle by which the device opened it
        self.handle = handle
        #: whether its content never changes
        self.static = static
        self.size: int = memory.size
        self.memory = memory

    def __repr__(self) -> str:
        return f"<Region {self.base:#x} to {self.base + self.size:#x}>"


class Located(NamedTuple):
    """The position of a message's buffers in this process: `offsets` into `memory`, 0 for empty buffers.

    `memory` keeps the regions of the buffers mapped. If they lie in several regions, it reaches from the first region
    to the last, across unrelated memory. Only the located buffers may be read in it.
    """

    memory: pa.Buffer
    offsets: Sequence[int]
    device: Device | None = None

    def gather(self, lengths: Sequence[int], positions: Sequence[int], packed: pa.Buffer) -> pa.Buffer:
        """Copy the buffers into a packed body.

        Args:
            lengths: Length of each buffer, in bytes.
            positions: Offset of each buffer in `packed`.
            packed: The memory to copy to.

        Returns:
            `packed`.

        Raises:
            RemoteProtocolError: A buffer does not fit into `packed`.
        """
        source, target = memoryview(self.memory), memoryview(packed)
        for offset, length, at in zip(self.offsets, lengths, positions, strict=True):
            if length and not 0 <= at <= len(target) - length:
                raise RemoteProtocolError(
                    f"a buffer at {at} of {length} bytes extends beyond its body of {len(target)} bytes",
                    rule="metadata-message",
                )
            target[at : at + length] = source[offset : offset + length]
        return packed


#: Most regions that a connection may share, and so most segments of a dataset.
MAX_REGIONS = 4096


class AddressSpace:
    """The regions that a peer has shared on one connection. Regions are never removed."""

    def __init__(self, max_regions: int = MAX_REGIONS) -> None:
        #: Bases and regions, in order. Both are replaced, never changed, so that other threads may read them.
        self._sorted: tuple[list[int], list[Region]] = [], []
        self._max_regions = max_regions
        #: Whether regions that are added from now on keep their files open, so that they can be mapped again. If this
        #: process has too many descriptors, the files are closed all the same.
        self.keeps_files = False

    @property
    def regions(self) -> Sequence[Region]:
        """Return the regions in order of address. Adding a region replaces this sequence and never changes it."""
        return self._sorted[1]

    @property
    def static(self) -> bool:
        """Return whether there are regions, and all of them are static and in host memory."""
        _, regions = self._sorted
        return bool(regions) and all(region.static and region.device is None for region in regions)

    @property
    def has_live_memory(self) -> bool:
        """Return whether there are regions whose memory is used again after it was freed."""
        return any(not region.static for region in self._sorted[1])

    def add(self, region: Region) -> None:
        """Add a region.

        Raises:
            RemoteProtocolError: The region overlaps another, or there are too many.
        """
        bases, regions = self._sorted
        if len(regions) == self._max_regions:
            raise RemoteProtocolError(
                f"the peer shared more than {self._max_regions} regions on one connection", rule="region-count"
            )
        at = bisect_right(bases, region.base)
        for neighbour in regions[max(at - 1, 0) : at + 1]:
            if region.base < neighbour.base + neighbour.size and neighbour.base < region.base + region.size:
                raise RemoteProtocolError(
                    f"the peer shared {region!r}, which overlaps {neighbour!r}", rule="region-overlap"
                )
        self._sorted = [*bases[:at], region.base, *bases[at:]], [*regions[:at], region, *regions[at:]]

    def close_devices(self) -> bool:
        """Release the regions on devices. Their addresses are not looked up any more.

        Returns:
            Whether this process has closed all of them, apart from regions that something else in it still uses. If
                False, a device cannot tell yet whether it still reads a region: call this again.
        """
        regions = [(region, region.device) for region in self._sorted[1] if region.device is not None]
        for region, _ in regions:
            region.memory = pa.py_buffer(b"")
        for device in {device for _, device in regions}:
            device.retry()
        return not any(device.is_left_open(region.handle) for region, device in regions)

    def find(self, address: int) -> Region:
        """Return the region that contains `address`.

        Raises:
            RemoteProtocolError: No region contains it.
        """
        bases, regions = self._sorted
        at = bisect_right(bases, address) - 1
        if at >= 0:
            region = regions[at]
            if address < region.base + region.size:
                return region
        raise RemoteProtocolError(
            f"the peer sent the address {address:#x}, which is in no region that it shared", rule="address-region"
        )

    def locate(self, addresses: Sequence[int], lengths: Sequence[int]) -> Located:
        """Locate the buffers of a message in this process.

        Args:
            addresses: Address of each buffer. Each buffer lies in one region; a message may use several regions.
            lengths: Length of each buffer in bytes. At least one must not be 0.

        Raises:
            RemoteProtocolError: A buffer lies in no region, leaves its region, or lies on another device than the
                others.
        """
        regions: list[Region] = []
        base = end = shift = 0  # of the last region; `shift` is the difference of local and shared addresses
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
                    f"the peer sent the address {address:#x} with {length} bytes, which extends beyond "
                    f"{self.find(address)!r}",
                    rule="address-region",
                )
            places.append(address + shift)
        device = regions[0].device
        if any(region.device is not device for region in regions):
            raise RemoteProtocolError("the peer sent a message that is partly on a device and partly on the host")
        memory = regions[0].memory if len(regions) == 1 else _spanning(regions)
        start = memory.address
        offsets = [place - start if length else 0 for place, length in zip(places, lengths, strict=True)]
        return Located(memory, offsets, device)


def _spanning(regions: Sequence[Region]) -> pa.Buffer:
    """Return a buffer from the first byte of these regions in this process to the last, which keeps them mapped.

    libarrow reads one body and slices it. With such a body, buffers in regions that lie far apart need no copy.
    """
    memories = [region.memory for region in regions]
    start = min(memory.address for memory in memories) & -_ALIGNMENT
    return pa.foreign_buffer(start, max(memory.address + memory.size for memory in memories) - start, memories)
