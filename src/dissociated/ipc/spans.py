"""Ranges of bytes in a file, and which of them are read together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import pyarrow as pa

#: From this byte up to, not including, that one.
ByteRange: TypeAlias = tuple[int, int]


def coalesced(spans: Sequence[ByteRange], cache: pa.CacheOptions) -> list[ByteRange]:
    """The same bytes in fewer spans: neighbours are put together where `cache` lets them."""
    together: list[ByteRange] = []
    for start, end in sorted(spans):
        if together and joins(together[-1], (start, end), cache):
            together[-1] = together[-1][0], max(together[-1][1], end)
        else:
            together.append((start, end))
    return together


def joins(one: ByteRange, other: ByteRange, cache: pa.CacheOptions) -> bool:
    """Whether `other`, which does not begin before `one`, shall be read together with it."""
    near: bool = other[0] - one[1] <= cache.hole_size_limit and other[1] - one[0] <= cache.range_size_limit
    return near and other[0] >= one[0]
