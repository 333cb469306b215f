"""The origin of memory according to the operating system."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from support.helpers import descriptors


class Mapping(NamedTuple):
    """A line of /proc/self/maps."""

    start: int
    end: int
    permissions: str
    path: str


def mappings() -> list[Mapping]:
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, permissions, _, _, _, *path = line.split(maxsplit=5)
        start, end = (int(number, 16) for number in span.split("-"))
        found.append(Mapping(start, end, permissions, path[0] if path else ""))
    return found


def buffers(array: pa.Array) -> Iterator[pa.Buffer]:
    """Yield all nonempty buffers of an array, including its dictionary's."""
    yield from (buffer for buffer in array.buffers() if buffer is not None and buffer.size)
    if pa.types.is_dictionary(array.type):
        yield from buffers(array.dictionary)


def origins(batches: list[pa.RecordBatch]) -> set[tuple[str, str]]:
    """Return the permissions and paths of the mappings that contain the buffers of these batches."""
    known = mappings()
    found = set()
    for batch in batches:
        for column in batch.columns:
            for buffer in buffers(column):
                (home,) = (m for m in known if m.start <= buffer.address and buffer.address + buffer.size <= m.end)
                found.add((home.permissions, home.path))
    return found


def shared_bytes(name: str) -> int:
    """Return how many bytes the memfds of this name occupy. Call it in the server's process."""
    blocks = {}
    for descriptor, target in descriptors().items():
        if target == f"/memfd:dissociated:{name} (deleted)":
            with suppress(OSError):  # closed meanwhile
                status = os.fstat(descriptor)
                blocks[status.st_ino] = status.st_blocks * 512
    return sum(blocks.values())
