"""A region for a stream without end: a sparse memfd whose offsets only grow.

A body is written once, at the next offset, and its pages are punched out when its last address is freed. So the
memory in use is what the peer holds, and that is capped.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack

from dissociated.memory.region import reserve_base
from dissociated.memory.shared import Backing, create_memfd, explained, reopen_read_only, seal, write_parts
from dissociated.message import Buffer

_PAGE = mmap.PAGESIZE
#: Costs address space alone, in both processes, until it is written.
_SPAN = 1 << 36


class _Body:
    """Where a body lies, and how many of its addresses are still held."""

    __slots__ = ("held", "offset", "size")

    def __init__(self, offset: int, size: int, held: int) -> None:
        self.offset, self.size, self.held = offset, size, held


class LiveRegion:
    """Holds at most `limit` bytes that are not freed, but always up to two bodies. Close it after use.

    Two, because a reader that asks for the next batch still holds the last.

    What the peer has mapped stays readable after `close`: its memory goes with the peer's last mapping.
    """

    backing = Backing.LIVE
    size = _SPAN

    def __init__(self, name: str, limit: int) -> None:
        self.limit = limit
        self.base = reserve_base(_SPAN)
        self._bodies: dict[int, _Body] = {}  # by each address that is held
        self._offset = 0
        self.unfreed = 0
        self._unfreed_bodies = 0
        with explained(f"shared memory for {name}"), ExitStack() as undo:
            self._writable = create_memfd(name)
            undo.callback(os.close, self._writable)
            os.ftruncate(self._writable, _SPAN)
            seal(self._writable, Backing.LIVE)
            self.descriptor = reopen_read_only(self._writable)
            undo.callback(os.close, self.descriptor)
            undo.pop_all()

    def fits(self, length: int) -> bool:
        """Whether a body of `length` bytes may ever be written: offsets only grow, and end."""
        return self._offset + _pages(length) <= _SPAN

    def has_room(self, length: int, beside: int = 0) -> bool:
        """Whether a body of `length` bytes may be written now, by what is not freed, here and `beside` this region."""
        return self._unfreed_bodies < 2 or beside + self.unfreed + _pages(length) <= self.limit

    def place(self, parts: Sequence[Buffer], length: int, extents: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Write a body and return address and length of each of its buffers, given their offsets in it."""
        with explained("shared memory for a live stream"):
            write_parts(self._writable, parts, self._offset)
        start = self.base + self._offset
        placed = [(start + offset, size) if size else (0, 0) for offset, size in extents]
        held = {address for address, size in placed if size}
        if held:
            body = _Body(self._offset, _pages(length), len(held))
            self._bodies.update(dict.fromkeys(held, body))
            self.unfreed += body.size
            self._unfreed_bodies += 1
            self._offset += body.size
        return placed

    def free(self, addresses: Iterable[int]) -> None:
        """Nobody holds these addresses any more. Those of other regions are passed over."""
        for address in addresses:
            body = self._bodies.pop(address, None)
            if body is None:
                continue
            body.held -= 1
            if not body.held:
                with mmap.mmap(self._writable, body.size, offset=body.offset) as pages:
                    pages.madvise(mmap.MADV_REMOVE)
                self.unfreed -= body.size
                self._unfreed_bodies -= 1

    def close(self) -> None:
        """Give back the descriptors."""
        os.close(self.descriptor)
        os.close(self._writable)


def _pages(length: int) -> int:
    return -(-length // _PAGE) * _PAGE
