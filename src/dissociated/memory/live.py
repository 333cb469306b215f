"""Live memory: regions for endless streams, which are sparse memfds in which bodies come and go.

A body is written once. When its last address is freed, its pages are kept for a later body, since new pages cost more
than writing them: the kernel clears them, maps them and takes them back. Of the pages that nobody holds, a region keeps
a share of its limit, and punches out the rest. So the memory in use is what peers hold and this share, within the
limit.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack, suppress
from functools import cached_property

import numpy as np

from dissociated.base.buffers import Buffer
from dissociated.base.exit import keep_at_exit
from dissociated.base.oserrors import store_errors
from dissociated.memory.region import pages, reserve_base
from dissociated.memory.shared import Backing, create_memfd, map_read_only, reopen_read_only, seal

#: Size of a region in bytes. Until it is written, it takes only address space, in both processes.
SPAN = 1 << 36
#: The part of a region's limit up to which freed pages are kept.
_KEPT_SHARE = 4
_MADV_POPULATE_WRITE = 23  # maps all pages at once, which takes less time than a page fault for each
_POPULATED = 1 << 20  # bytes that are mapped at once, while no other thread of Python runs
#: Number of kept pieces of memory, the last freed first, that may be looked at for a new body.
_MAX_CANDIDATES = 64


class _LiveBody:
    """A body in a region: its position in bytes, its addresses, and the number of their leases."""

    __slots__ = ("addresses", "exempt_leases", "leases", "offset", "size")

    def __init__(self, offset: int, size: int, addresses: Collection[int], holders: int) -> None:
        self.offset, self.size, self.addresses = offset, size, addresses
        self.leases = len(addresses) * holders
        self.exempt_leases = 0  # further leases, which do not count against the limit


class LiveRegion:
    """A region that holds at most `limit` bytes of unfreed bodies, but always up to two bodies. Close it after use.

    Two bodies are always allowed because a reader that asks for the next batch still holds the last one.

    Memory that the peer has mapped stays readable after `close`. It is released with the peer's last mapping.
    """

    backing = Backing.LIVE
    size = SPAN

    def __init__(self, name: str, limit: int) -> None:
        #: Bytes that may be held at once.
        self.limit = limit
        #: First address of the region.
        self.base = reserve_base(SPAN)
        self._bodies: dict[int, _LiveBody] = {}  # keyed by each address that is held
        #: Offset from which on nothing was written yet.
        self.offset = 0
        #: Bytes of the bodies that are held and count against the limit.
        self.unfreed = 0
        self._unfreed_bodies = 0
        #: Offset and size of freed pages that are kept, the last freed last.
        self._kept_pages: list[tuple[int, int]] = []
        self._kept_bytes = 0
        self._allocated = 0  # offset up to which pages were allocated
        self._max_kept = limit // _KEPT_SHARE
        self._unpunched: list[tuple[int, int]] = []  # offset and size of pages that are not punched out yet
        with store_errors(f"shared memory for {name}"), ExitStack() as undo:
            self._writable = create_memfd(name)
            undo.callback(os.close, self._writable)
            os.ftruncate(self._writable, SPAN)
            seal(self._writable, Backing.LIVE)
            #: Read-only descriptor to share with peers. This object owns it.
            self.descriptor = reopen_read_only(self._writable)
            undo.callback(os.close, self.descriptor)
            undo.pop_all()

    def fits(self, length: int) -> bool:
        """Return whether the region has new offsets left for a body of `length` bytes."""
        return self.offset + pages(length) <= SPAN

    def has_room(self, length: int, other_bytes: int = 0) -> bool:
        """Return whether the limit allows a body of `length` bytes now.

        Args:
            length: Length of the body, in bytes.
            other_bytes: Bytes that are held elsewhere and count against the same limit.
        """
        return self._unfreed_bodies < 2 or other_bytes + self.unfreed + pages(length) <= self.limit

    def place(
        self, parts: Sequence[Buffer], length: int, extents: Iterable[tuple[int, int]], holders: int = 1
    ) -> list[tuple[int, int]]:
        """Write a body and lease it.

        Args:
            parts: The body.
            length: Length of the body, in bytes.
            extents: Offset in the body and length of each buffer, in bytes.
            holders: Number of clients, each of which will free each address once.

        Returns:
            Address and length of each buffer; (0, 0) for an empty one.
        """
        at = self.reserve(length)
        self.write(parts, at)
        return self.lease(at, length, extents, holders)[0]

    def reserve(self, length: int) -> int:
        """Return the offset of pages for a body of `length` bytes, which nobody holds.

        `memory` or `write`, and then `lease`, must follow.

        The pages that were freed last are preferred, since the processor's caches may still have them.
        """
        size = pages(length)
        for index in range(len(self._kept_pages) - 1, max(0, len(self._kept_pages) - _MAX_CANDIDATES) - 1, -1):
            offset, available = self._kept_pages[index]
            if available >= size:
                if available > size:
                    self._kept_pages[index] = offset + size, available - size
                else:
                    del self._kept_pages[index]
                self._kept_bytes -= size
                return offset
        self._trim(self.limit - self.unfreed - size)
        offset = self.offset
        self.offset += size
        return offset

    def memory(self, at: int, length: int) -> np.ndarray:
        """Return `length` writable bytes at the offset that `reserve` has just returned. `lease` must follow.

        Raises:
            StoreError: There is no memory for new pages.
        """
        mapping, view = self._writable_mapping
        if at + length > self._allocated:
            size = pages(length)
            with store_errors("shared memory for a live stream"):
                os.posix_fallocate(self._writable, at, size)  # writing to a page that does not exist ends the process
            self._allocated = at + size
            with suppress(OSError):  # an older kernel
                for begin in range(at, at + size, _POPULATED):
                    mapping.madvise(_MADV_POPULATE_WRITE, begin, min(_POPULATED, at + size - begin))
        return view[at : at + length]

    def write(self, parts: Sequence[Buffer], at: int) -> None:
        """Write a body at the offset that `reserve` has just returned. `lease` must follow. Raise as `memory` does."""
        memory = self.memory(at, sum(map(len, parts)))
        begin = 0
        for part in filter(len, parts):
            source = np.frombuffer(part, np.uint8)
            memory[begin : begin + source.size] = source
            begin += source.size

    def body(self, at: int, length: int) -> memoryview:
        """Return the `length` bytes at this offset. They change once they are freed, so only copy from them."""
        return self._mapped[at : at + length]

    @cached_property
    def _mapped(self) -> memoryview:
        with store_errors("shared memory for a live stream"):
            return memoryview(map_read_only(self.descriptor, SPAN))

    @cached_property
    def _writable_mapping(self) -> tuple[mmap.mmap, np.ndarray]:
        with store_errors("shared memory for a live stream"):
            mapping = mmap.mmap(self._writable, SPAN)
        keep_at_exit(mapping)
        return mapping, np.frombuffer(mapping, np.uint8)

    def lease(
        self, at: int, length: int, extents: Iterable[tuple[int, int]], holders: int, begin: int = 0
    ) -> tuple[list[tuple[int, int]], Collection[int]]:
        """Lease the body that was written `begin` bytes after the offset `at` of `reserve`.

        The other arguments are those of `place`, but `length` is that of `reserve`.

        Returns:
            The result of `place`, and the addresses in it.
        """
        start = self.base + at + begin
        placed = [(start + offset, size) if size else (0, 0) for offset, size in extents]
        addresses = {address for address, size in placed if size}
        if addresses:
            body = _LiveBody(at, pages(length), addresses, holders)
            self._bodies.update(dict.fromkeys(addresses, body))
            self._count(body, 1)
            if not holders:
                self._release(body, was_held=True)
        else:
            self._keep(at, pages(length))
        return placed, addresses

    def free(self, addresses: Iterable[int], exempt: bool = False) -> None:
        """End one lease of each of these addresses. Addresses of other regions are ignored.

        Args:
            addresses: The addresses.
            exempt: Whether to end a lease that `exempt` has taken out of the limit.
        """
        for address in addresses:
            body = self._bodies.get(address)
            if body is None:
                continue
            if exempt:
                body.exempt_leases -= 1
                if not body.exempt_leases:
                    self._release(body, was_held=False)
            else:
                body.leases -= 1
                if not body.leases:
                    self._release(body, was_held=True)

    def exempt(self, addresses: Iterable[int]) -> None:
        """Take one lease of each of these addresses out of the limit. The body stays until that lease ends."""
        for address in addresses:
            body = self._bodies.get(address)
            if body is not None:
                body.leases -= 1
                body.exempt_leases += 1
                self._release(body, was_held=True)

    def size_of(self, addresses: Iterable[int]) -> int:
        """Return the total size of the bodies to which these addresses belong, in bytes."""
        bodies = {self._bodies[address] for address in addresses if address in self._bodies}
        return sum(body.size for body in bodies)

    @property
    def empty(self) -> bool:
        """Return whether no body is held."""
        return not self._bodies

    def _count(self, body: _LiveBody, sign: int) -> None:
        self.unfreed += sign * body.size
        self._unfreed_bodies += sign

    def _release(self, body: _LiveBody, was_held: bool) -> None:
        """Stop counting `body` if no counted lease is left, and take its pages back if no lease is left at all."""
        if was_held and not body.leases:
            self._count(body, -1)
        if not body.leases and not body.exempt_leases:
            for address in body.addresses:
                del self._bodies[address]
            self._keep(body.offset, body.size)

    def _keep(self, offset: int, size: int) -> None:
        """Keep pages that nobody holds, and punch out those that were freed before all others if these are too many."""
        if size:
            self._kept_pages.append((offset, size))
            self._kept_bytes += size
            self._trim(self._max_kept)

    def _trim(self, limit: int) -> None:
        """Punch out kept pages until at most `limit` bytes are kept."""
        if self._kept_bytes > limit or self._unpunched:
            count = 0
            while count < len(self._kept_pages) and self._kept_bytes > limit:
                self._kept_bytes -= self._kept_pages[count][1]
                count += 1
            self._unpunched += self._kept_pages[:count]
            del self._kept_pages[:count]
            self._punch()

    def _punch(self) -> None:
        """Punch out pages. If mapping some of them fails, they are tried again with the next ones."""
        with suppress(OSError):
            while self._unpunched:
                offset, size = self._unpunched[-1]
                with mmap.mmap(self._writable, size, offset=offset) as mapped:
                    mapped.madvise(mmap.MADV_REMOVE)
                self._unpunched.pop()

    def trim(self) -> None:
        """Punch out all pages that nobody holds."""
        self._trim(0)

    def retire(self) -> None:
        """Keep no more freed pages, since no body will be written."""
        self._max_kept = 0
        self.trim()

    def close(self) -> None:
        """Close the descriptors. Nothing can be written afterwards."""
        os.close(self.descriptor)
        os.close(self._writable)
        self.descriptor = self._writable = -1  # the numbers may soon be those of other files


class LiveMemory:
    """The regions of one live stream. The last region takes new bodies; the others are used up and wait for frees."""

    def __init__(self, name: str, limit: int) -> None:
        self._name = name
        self._limit = limit
        self._regions: list[LiveRegion] = []

    def region(self, length: int) -> LiveRegion | None:
        """Return the region for a body of `length` bytes; None if no region can hold it.

        If the last region is used up, add a new one.
        """
        if self._regions and self._regions[-1].fits(length):
            return self._regions[-1]
        for region in self._regions:
            region.retire()
        for empty_region in [region for region in self._regions if region.empty]:
            self._regions.remove(empty_region)
            empty_region.close()
        self._regions.append(LiveRegion(self._name, self._limit))
        last = self._regions[-1]
        return last if last.fits(length) else None

    def has_room(self, length: int, other_bytes: int = 0) -> bool:
        """Return whether the limit allows `length` more bytes now. `other_bytes` held elsewhere count, too."""
        if not self._regions:
            return other_bytes + length <= self._limit
        for region in self._regions[:-1]:
            other_bytes += region.unfreed
        return self._regions[-1].has_room(length, other_bytes)

    @property
    def unfreed(self) -> int:
        """Return the number of bytes that are held and count against the limit, in all regions."""
        return sum(region.unfreed for region in self._regions)

    def free(self, addresses: Collection[int], exempt: bool = False) -> None:
        """End one lease of each address, as `LiveRegion.free` does. After `close`, this does nothing: mappings stay."""
        for region in self._regions:
            region.free(addresses, exempt)

    def exempt(self, addresses: Collection[int]) -> None:
        """Take one lease of each address out of the limit, as `LiveRegion.exempt` does."""
        for region in self._regions:
            region.exempt(addresses)

    def size_of(self, addresses: Collection[int]) -> int:
        """Return the total size of the bodies to which these addresses belong, in bytes."""
        return sum(region.size_of(addresses) for region in self._regions)

    def trim(self) -> None:
        """Give the pages that nobody holds back to the system."""
        for region in self._regions:
            region.trim()

    def retire(self) -> None:
        """Give pages back to the system from now on as soon as nobody holds them: the stream has ended."""
        for region in self._regions:
            region.retire()

    def close(self) -> None:
        """Close the descriptors. Memory that peers have mapped stays readable."""
        for region in self._regions:
            region.close()
        self._regions.clear()
