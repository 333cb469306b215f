"""What the protocol hands to a transport to move, and what comes out at the other end."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

#: Anything with the buffer protocol, C-contiguous: bytes, memoryview, pyarrow.Buffer. (PEP 688 needs Python 3.12.)
Buffer: TypeAlias = Any

#: The largest body that is taken, in bytes, unless somebody says otherwise.
MAX_BODY = 1 << 34
#: The longest metadata of one message, in bytes, that is sent and taken, unless somebody says otherwise.
MAX_METADATA = 1 << 28


def too_long(what: str, length: int, limit: int) -> str | None:
    """Why metadata of so many bytes cannot be sent; None where it can."""
    if length <= limit:
        return None
    return (
        f"{what} has a message with {length:,} bytes of metadata; at most {limit:,} are sent and taken: "
        "put less into it, or raise max_metadata on the server and on its clients"
    )


def cutter(parts: Sequence[Buffer]) -> Callable[[int, int], list[Buffer]]:
    """A function that gives the bytes from one position to another of what `parts` are one after the other.

    They are given by reference.
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


class Message(NamedTuple):
    """A delimited message, tagged or not ("Requirements").

    `tag` is None for an untagged message. `parts` are sent one after the other and arrive as one; they are
    borrowed until the send returns and never joined on the way.
    """

    tag: int | None
    parts: Sequence[Buffer]


class Incoming(NamedTuple):
    """A message as it arrived. An untagged one is `bytes`; a tagged one is a buffer that the receiver owns."""

    tag: int | None
    data: Buffer


class Run(NamedTuple):
    """Many small messages that arrived together: `length` untagged ones of one size, and as many tagged ones of one.

    It means what its messages mean, one after the other; `expand` gives them. `tags` holds little-endian uint64.
    """

    length: int
    untagged: memoryview
    untagged_size: int
    tags: memoryview
    tagged: memoryview
    tagged_size: int

    def expand(self) -> Iterator[Incoming]:
        """The messages of the run, each untagged one followed by a tagged one."""
        untagged, tagged = self.untagged_size, self.tagged_size
        for index in range(self.length):
            yield Incoming(None, bytes(self.untagged[index * untagged : (index + 1) * untagged]))
            tag = int.from_bytes(self.tags[8 * index : 8 * index + 8], "little")
            yield Incoming(tag, self.tagged[index * tagged : (index + 1) * tagged])
