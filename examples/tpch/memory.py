"""Measurement of memory: whether arrays lie in shared mappings, and how much private memory a process has."""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path

import pyarrow as pa


class Mapped:
    """The shared mappings of this process at the time of the call, from `/proc/self/maps`."""

    def __init__(self) -> None:
        ranges = []
        for line in Path("/proc/self/maps").read_text().splitlines():
            addresses, permissions, *_ = line.split()
            if permissions.endswith("s"):
                begin, end = addresses.split("-")
                ranges.append((int(begin, 16), int(end, 16)))
        self._ranges = sorted(ranges)

    def holds(self, address: int, size: int) -> bool:
        """Return whether all of these bytes lie in a single shared mapping."""
        at = bisect_right(self._ranges, (address, 1 << 64)) - 1
        return at >= 0 and address + size <= self._ranges[at][1]

    def share(self, table: pa.Table) -> float:
        """Return the fraction of a table's memory, from 0 to 1, that lies in shared mappings."""
        buffers = {
            (buffer.address, buffer.size)
            for column in table.columns
            for chunk in column.chunks
            for buffer in chunk.buffers()
            if buffer is not None
        }
        total = sum(size for _, size in buffers)
        return sum(size for address, size in buffers if self.holds(address, size)) / total if total else 1.0


def own_memory() -> int:
    """Return the anonymous resident memory of this process, in bytes."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024
