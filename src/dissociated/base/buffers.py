"""Buffers: their type, their limits, and slices across several of them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, TypeAlias

#: Anything with the buffer protocol, C-contiguous: bytes, memoryview, pyarrow.Buffer. (PEP 688 needs Python 3.12.)
Buffer: TypeAlias = Any
#: Default limit of a body that is received, in bytes.
MAX_BODY = 1 << 34
#: Default limit of the metadata of a message that is sent or received, in bytes.
MAX_METADATA = 1 << 28


def metadata_too_long(subject: str, length: int, limit: int) -> str | None:
    """Return the reason why metadata of `length` bytes cannot be sent; None if it can."""
    if length <= limit:
        return None
    return (
        f"{subject} has a message with {length:,} bytes of metadata; at most {limit:,} are sent and taken: "
        "put less into it, or raise max_metadata on the server and on its clients"
    )


def slicer(parts: Sequence[Buffer]) -> Callable[[int, int], list[Buffer]]:
    """Return a function that slices the concatenation of `parts`.

    The function takes a begin and an end, in bytes, and returns the slice in pieces, by reference.
    """
    ends = [*accumulate(map(len, parts))]

    def cut(begin: int, end: int) -> list[Buffer]:
        pieces = []
        for index in range(bisect_right(ends, begin), len(parts)):
            part, at = parts[index], ends[index] - len(parts[index])
            if at >= end:
                break
            first, last = max(begin - at, 0), min(end - at, len(part))
            pieces.append(memoryview(part)[first:last])
        return pieces

    return cut
