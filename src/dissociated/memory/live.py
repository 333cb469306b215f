"""A region for a stream without end: a sparse memfd whose offsets only grow.

A body is written once, at the next offset, and its pages are punched out when its last address is freed. So the
memory in use is what the peer holds, and that is capped.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack, suppress
from functools import cached_property

from dissociated.base.buffers import Buffer
from dissociated.base.oserrors import store_errors
from dissociated.memory.region import pages, reserve_base
from dissociated.memory.shared import Backing, create_memfd, map_read_only, reopen_read_only, seal, write_parts

#: Costs address space alone, in both processes, until it is written.
_SPAN = 1 << 36


class _LiveBody:
    """Where a body lies, its addresses, and how many leases of them there are."""

    __slots__ = ("addresses", "exempt_leases", "leases", "offset", "size")

    def __init__(self, offset: int, size: int, addresses: Collection[int], holders: int) -> None:
        self.offset, self.size, self.addresses = offset, size, addresses
        self.leases = len(addresses) * holders
        self.exempt_leases = 0  # beside those: of holders that do not count against the limit


class LiveRegion:
    """Holds at most `limit` bytes that are not freed, but always up to two bodies. Close it after use.

    Two, because a reader that asks for the next batch still holds the last.

    What the peer has mapped stays readable after `close`: its memory goes with the peer's last mapping.
    """

    backing = Backing.LIVE
    size = _SPAN

    def __init__(self, name: str, limit: int) -> None:
        #: Bytes that may be held at once.
        self.limit = limit
        #: The first of its addresses.
        self.base = reserve_base(_SPAN)
        self._bodies: dict[int, _LiveBody] = {}  # by each address that is held
        #: Where the next body will lie.
        self.offset = 0
        #: Bytes of the bodies that are held and count.
        self.unfreed = 0
        self._unfreed_bodies = 0
        self._unpunched: list[_LiveBody] = []  # which nobody holds
        with store_errors(f"shared memory for {name}"), ExitStack() as undo:
            self._writable = create_memfd(name)
            undo.callback(os.close, self._writable)
            os.ftruncate(self._writable, _SPAN)
            seal(self._writable, Backing.LIVE)
            #: Read-only, to hand out. It stays this object's.
            self.descriptor = reopen_read_only(self._writable)
            undo.callback(os.close, self.descriptor)
            undo.pop_all()

    def fits(self, length: int) -> bool:
        """Whether a body of `length` bytes may ever be written: offsets only grow, and end."""
        return self.offset + pages(length) <= _SPAN

    def has_room(self, length: int, other_bytes: int = 0) -> bool:
        """Whether a body of `length` bytes may be written now, beside what is held here and `other_bytes` elsewhere."""
        return self._unfreed_bodies < 2 or other_bytes + self.unfreed + pages(length) <= self.limit

    def place(
        self, parts: Sequence[Buffer], length: int, extents: Iterable[tuple[int, int]], holders: int = 1
    ) -> list[tuple[int, int]]:
        """Write a body and return address and length of each of its buffers, given their offsets in it.

        Each of so many `holders` will free each address once.
        """
        self.write(parts)
        return self.lease(length, extents, holders)

    def write(self, parts: Sequence[Buffer]) -> None:
        """Write a body where the next one is to lie. `lease` must follow."""
        with store_errors("shared memory for a live stream"):
            write_parts(self._writable, parts, self.offset)

    def body(self, at: int, length: int) -> memoryview:
        """The `length` bytes written at this offset. They change once they are freed: give them only to who copies."""
        return self._mapped[at : at + length]

    @cached_property
    def _mapped(self) -> memoryview:
        with store_errors("shared memory for a live stream"):
            return memoryview(map_read_only(self.descriptor, _SPAN))

    def lease(self, length: int, extents: Iterable[tuple[int, int]], holders: int) -> list[tuple[int, int]]:
        """Lease the body that was just written: see `place`, which does both."""
        start = self.base + self.offset
        placed = [(start + offset, size) if size else (0, 0) for offset, size in extents]
        addresses = {address for address, size in placed if size}
        if addresses:
            body = _LiveBody(self.offset, pages(length), addresses, holders)
            self._bodies.update(dict.fromkeys(addresses, body))
            self.offset += body.size
            self._count(body, 1)
            if not holders:
                self._release(body, was_held=True)
        return placed

    def free(self, addresses: Iterable[int], exempt: bool = False) -> None:
        """One lease of each of these addresses has ended: an `exempt` one, or one that counts.

        Addresses of other regions are passed over.
        """
        for address in addresses:
            body = self._bodies.get(address)
            if body is None:
                continue
            was_held = body.leases > 0
            if exempt:
                body.exempt_leases -= 1
            else:
                body.leases -= 1
            self._release(body, was_held)

    def exempt(self, addresses: Iterable[int]) -> None:
        """One lease of each of these addresses no longer counts against the limit. The bodies stay until it ends."""
        for address in addresses:
            body = self._bodies.get(address)
            if body is not None:
                body.leases -= 1
                body.exempt_leases += 1
                self._release(body, was_held=True)

    def size_of(self, addresses: Iterable[int]) -> int:
        """Bytes of the bodies that these addresses belong to."""
        bodies = {self._bodies[address] for address in addresses if address in self._bodies}
        return sum(body.size for body in bodies)

    @property
    def empty(self) -> bool:
        """Whether nobody holds anything here."""
        return not self._bodies

    def _count(self, body: _LiveBody, sign: int) -> None:
        self.unfreed += sign * body.size
        self._unfreed_bodies += sign

    def _release(self, body: _LiveBody, was_held: bool) -> None:
        """Give back of `body` what nobody holds."""
        if was_held and not body.leases:
            self._count(body, -1)
        if not body.leases and not body.exempt_leases:
            for address in body.addresses:
                del self._bodies[address]
            self._unpunched.append(body)
            self._punch()

    def _punch(self) -> None:
        """Give back the pages of what nobody holds. What cannot be mapped for that now, can be with the next body."""
        with suppress(OSError):
            while self._unpunched:
                body = self._unpunched[-1]
                with mmap.mmap(self._writable, body.size, offset=body.offset) as mapped:
                    mapped.madvise(mmap.MADV_REMOVE)
                self._unpunched.pop()

    def close(self) -> None:
        """Give back the descriptors."""
        os.close(self.descriptor)
        os.close(self._writable)


class LiveMemory:
    """The regions of one live stream. The last one takes bodies; those before it are used up, and wait for frees."""

    def __init__(self, name: str, limit: int) -> None:
        self._name = name
        self._limit = limit
        self._regions: list[LiveRegion] = []

    def region(self, length: int) -> LiveRegion | None:
        """The region for a body of `length` bytes: a new one where the last is used up; None if it fits in none."""
        if not self._regions or not self._regions[-1].fits(length):
            for used_up in [region for region in self._regions if region.empty]:
                self._regions.remove(used_up)
                used_up.close()
            self._regions.append(LiveRegion(self._name, self._limit))
        last = self._regions[-1]
        return last if last.fits(length) else None

    def has_room(self, length: int, other_bytes: int = 0) -> bool:
        """Whether there is room for `length` bytes now, beside what is held here and `other_bytes` elsewhere."""
        if not self._regions:
            return other_bytes + length <= self._limit
        return self._regions[-1].has_room(length, other_bytes=other_bytes + self.unfreed - self._regions[-1].unfreed)

    @property
    def unfreed(self) -> int:
        """Bytes that are held, in all regions."""
        return sum(region.unfreed for region in self._regions)

    def free(self, addresses: Collection[int], exempt: bool = False) -> None:
        """See `LiveRegion.free`. After `close` nothing happens: what is mapped stays."""
        for region in self._regions:
            region.free(addresses, exempt)

    def exempt(self, addresses: Collection[int]) -> None:
        """See `LiveRegion.exempt`."""
        for region in self._regions:
            region.exempt(addresses)

    def size_of(self, addresses: Collection[int]) -> int:
        """Bytes of the bodies that these addresses belong to."""
        return sum(region.size_of(addresses) for region in self._regions)

    def close(self) -> None:
        """Give back the descriptors. What peers have mapped stays readable."""
        for region in self._regions:
            region.close()
        self._regions.clear()
