"""Buffers: what they are here, how large they may be, and cutting what lies in several."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, TypeAlias

#: Anything with the buffer protocol, C-contiguous: bytes, memoryview, pyarrow.Buffer. (PEP 688 needs Python 3.12.)
Buffer: TypeAlias = Any
#: The largest body that is taken, in bytes, unless somebody says otherwise.
MAX_BODY = 1 << 34
#: The longest metadata of one message, in bytes, that is sent and taken, unless somebody says otherwise.
MAX_METADATA = 1 << 28


def metadata_too_long(what: str, length: int, limit: int) -> str | None:
    """Why metadata of so many bytes cannot be sent; None where it can."""
    if length <= limit:
        return None
    return (
        f"{what} has a message with {length:,} bytes of metadata; at most {limit:,} are sent and taken: "
        "put less into it, or raise max_metadata on the server and on its clients"
    )


def slicer(parts: Sequence[Buffer]) -> Callable[[int, int], list[Buffer]]:
    """A function that gives the bytes from a first position up to a second one of `parts`, laid one after the other.

    It gives them in pieces, by reference.
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
