"""Eviction: selects the versions that leave a full store, and removes them or moves them to disk."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from dissociated.base.locks import held_within
from dissociated.control.version import Version
from dissociated.store.places import Place, Places

T = TypeVar("T")

#: Seconds that a writer waits for the announcements of other writers: no longer than for the answer to its own.
ANNOUNCE_TIMEOUT = 60.0


class Policy(Enum):
    """The reaction of a store to a write that would exceed its limit."""

    #: The write fails with StoreFull.
    REFUSE = "refuse"
    #: The oldest versions that are not being read are removed.
    EVICT = "evict"
    #: The oldest versions move to a directory on disk, and are served from there.
    SPILL = "spill"


@dataclass(frozen=True)
class Missing:
    """The bytes to free: `limit` bytes of all segments, and `files` bytes in the store's file system.

    Memfds count against the limit only, since they do not lie in the file system.
    """

    limit: int
    files: int

    def __bool__(self) -> bool:
        return self.limit > 0 or self.files > 0


class _EvictionPending(Exception):
    """The end of an operation that needs evictions: `versions` must be announced before they are evicted.

    `on_evicted` is called with each of them afterwards.
    """

    def __init__(self, versions: Sequence[Version], on_evicted: Callable[[Version], object]) -> None:
        super().__init__()
        self.versions = versions
        self.on_evicted = on_evicted


class Eviction:
    """The eviction of versions from a store, under its policy.

    The lock of the store protects it: only `run` is thread-safe. The server of the store sets these attributes:

    - `in_use` returns whether the server is reading a version for a client.
    - `is_exposed` returns whether clients know the addresses of a version, to fetch from its memory themselves. The
      kernel counts exposed memory as used until `withdraw` ends the exposure.
    - `announce`, if it is not None, returns a context manager, in which versions are evicted that clients may still
      look up. On entry, it tells the catalog that they are gone and returns them, or raises StoreFull,
      CatalogUnreachable or DeadlineExceeded. It returns none if the catalog has just had other versions deleted.
    - `is_base` returns whether an append may extend a version: not if a later one, on another node, has replaced it.
    - `on_evicted` is called after a version was removed to make room, and `on_spilled` after it has moved to disk.
    """

    def __init__(self, places: Places, policy: Policy) -> None:
        self.in_use: Callable[[Version], bool] = lambda version: False
        self.is_exposed: Callable[[Version], bool] = lambda version: False
        self.withdraw: Callable[[Version], None] = lambda version: None
        self.announce: Callable[[Sequence[Version]], AbstractContextManager[Sequence[Version]]] | None = None
        self.is_base: Callable[[Version], bool] = lambda version: True
        self.on_evicted: Callable[[Version], None] = lambda version: None
        self.on_spilled: Callable[[Version], None] = lambda version: None
        self.policy = policy
        self._places = places
        self._announcing = threading.Lock()  # writers that would choose the same versions wait for each other

    def run(self, operation: Callable[[], T], lock: Callable[[], AbstractContextManager[object]]) -> T:
        """Run an operation that calls `make_room`, and again after the evictions that had to be announced.

        Args:
            operation: The operation, which locks the store itself.
            lock: Returns a context that locks the store. Announcements are made without it.

        Returns:
            The result of the operation.

        Raises:
            StoreFull, CatalogUnreachable, DeadlineExceeded: The versions cannot be announced, or those of another
                writer have not been announced in time.
        """
        with suppress(_EvictionPending):
            return operation()
        reason = (
            f"the store {str(self._places.directory.path)!r} is full, and the catalog has not recorded the evictions "
            f"of other writers for {ANNOUNCE_TIMEOUT:g} s"
        )
        with held_within(ANNOUNCE_TIMEOUT, self._announcing, reason), ExitStack() as locked:
            while True:  # A version goes in each round, and an operation that finds none to evict ends the loop.
                try:
                    return operation()
                except _EvictionPending as pending:
                    locked.close()
                    assert self.announce is not None
                    with self.announce(pending.versions) as announced:
                        # The lock is kept until the operation was repeated, so that no other writer takes the room.
                        locked.enter_context(lock())
                        for version in announced:
                            if (entry := self._places.contents.get(version.id)) is not None:
                                self.evict(entry[0])
                                pending.on_evicted(entry[0])

    def make_room(
        self, count_missing: Callable[[], Missing], on_evicted: Callable[[Version], object], appends_to: str
    ) -> None:
        """Free the missing bytes: evict replaced versions first, then the versions that the policy allows.

        Nothing is evicted if all candidates together would not be enough. There is only one round: if the kernel
        frees less memory than expected, a second round would not help. If versions must be announced first, an
        exception ends the operation: see `run`.

        Args:
            count_missing: Returns the bytes to free, after the trash was emptied.
            on_evicted: Called with each removed version that no later version had replaced.
            appends_to: The name of the dataset that the room is to append to, which is not evicted; empty for none.
        """
        self._places.empty_trash()
        missing = count_missing()
        pending = []
        for version in self._choose_evictions(missing, appends_to) if missing else ():
            if self._places.contents.is_replaced(version):
                self.evict(version)
            elif self.policy is Policy.SPILL:
                self._places.spill(version)
                self.on_spilled(version)
            elif self.announce is None:
                self.evict(version)
                on_evicted(version)
            else:
                pending.append(version)
        if pending:
            raise _EvictionPending(pending, on_evicted)
        self._places.empty_trash()

    def evict(self, version: Version) -> None:
        """Remove a version, and call `self.on_evicted`."""
        self._places.remove(version, lost=not version.prepared and not self._places.contents.is_replaced(version))
        self.on_evicted(version)
        self._places.empty_trash()

    def base_size(self, appends_to: str) -> int:
        """Return the bytes of the current version of a dataset that stay in memory while rows are appended to it."""
        if self.policy is Policy.SPILL:
            return 0
        current = filter(self.is_base, self._places.contents.named(appends_to)[-1:])
        return sum(sum(self._places.find(version)[1].sizes(version).values()) for version in current)

    def _choose_evictions(self, missing: Missing, appends_to: str) -> list[Version]:
        """Return the versions to evict, in this order, to free the missing bytes; none if that is impossible.

        Exposed versions are withdrawn only if evicting them would be enough. The choice is then made again, because
        only after the withdrawal can the kernel tell whether other processes use the memory.
        """
        while True:
            chosen = self._choose_unused(missing, appends_to)
            exposed = [exposing_version for version in chosen for exposing_version in self._exposing(version)]
            if not exposed:
                return chosen
            for version in exposed:
                self.withdraw(version)

    def _choose_unused(self, missing: Missing, appends_to: str) -> list[Version]:
        limit, files = missing.limit, missing.files
        chosen: dict[str, Version] = {}
        counts: dict[Place, Counter[int]] = defaultdict(Counter)
        for version in self._eviction_candidates(chosen, appends_to):
            _, place = self._places.find(version)
            in_files = place is self._places.directory
            if limit <= 0 and not in_files:
                continue
            chosen[version.id] = version
            for inode in place.sizes(version):
                counts[place][inode] += 1
                freed = self._places.blocks[place].freed(inode, counts[place][inode])
                limit -= freed
                files -= freed if in_files else 0
            if limit <= 0 and files <= 0:
                return [*chosen.values()]
        return []

    def _eviction_candidates(self, chosen: Mapping[str, Version], appends_to: str) -> Iterator[Version]:
        """Iterate over the versions that may be evicted, in the order of eviction.

        The caller adds an accepted version to `chosen` before it asks for the next candidate.
        """
        contents = self._places.contents
        for version in contents.replaced():
            if self._is_evictable(version):
                yield version
        if self.policy is Policy.REFUSE:
            return
        for version in contents:
            if version.id in chosen or version.prepared or not self._is_evictable(version):
                continue
            if version.name == appends_to and self.policy is Policy.EVICT and self.is_base(version):
                continue
            remaining = (
                candidate
                for candidate in contents.named(version.name)
                if candidate.id not in chosen and candidate != version
            )
            # Removing a version while an older one stays would make the older one current after a restart.
            if self.policy is Policy.SPILL or not any(remaining):
                yield version

    def _is_evictable(self, version: Version) -> bool:
        """Return whether removing a version would free memory: it lies in memory, is not read and not mapped.

        For an exposed version the kernel cannot tell whether other processes have mapped it; it counts as evictable.
        """
        if not self._places.in_memory(version) or self.in_use(version):
            return False
        return bool(self._exposing(version)) or not self._places.is_used(version)

    def _exposing(self, version: Version) -> list[Version]:
        """Return the exposed versions that share segments with `version`, itself included.

        Versions share segments if one was appended to the other.
        """
        exposed = [*filter(self.is_exposed, self._places.contents.with_name(version.name))]
        segments = self._segments(version) if exposed else set()  # skipped if not needed: it lists files
        return [candidate for candidate in exposed if not segments.isdisjoint(self._segments(candidate))]

    def _segments(self, version: Version) -> set[int]:
        return {*self._places.find(version)[1].sizes(version)}
