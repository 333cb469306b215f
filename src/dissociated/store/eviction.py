"""Eviction: selects the versions that leave a full store, and removes them or moves them to disk."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from dissociated.control.version import Version
from dissociated.store.places import Place, Places


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


class Eviction:
    """The eviction of versions from a store, under its policy.

    Not thread-safe: the lock of the store protects it. The server of the store sets these attributes:

    - `in_use` returns whether the server is reading a version for a client.
    - `is_exposed` returns whether clients know the addresses of a version, to fetch from its memory themselves. The
      kernel counts exposed memory as used until `withdraw` ends the exposure.
    - `on_evicted` is called after a version was removed to make room, and `on_spilled` after it has moved to disk.
    """

    def __init__(self, places: Places, policy: Policy) -> None:
        self.in_use: Callable[[Version], bool] = lambda version: False
        self.is_exposed: Callable[[Version], bool] = lambda version: False
        self.withdraw: Callable[[Version], None] = lambda version: None
        self.on_evicted: Callable[[Version], None] = lambda version: None
        self.on_spilled: Callable[[Version], None] = lambda version: None
        self.policy = policy
        self._places = places

    def make_room(self, count_missing: Callable[[], Missing], on_evicted: Callable[[Version], object]) -> None:
        """Free the missing bytes: evict replaced versions first, then the versions that the policy allows.

        Nothing is evicted if all candidates together would not be enough. There is only one round: if the kernel
        frees less memory than expected, a second round would not help.

        Args:
            count_missing: Returns the bytes to free, after the trash was emptied.
            on_evicted: Called with each removed version that no later version had replaced.
        """
        self._places.empty_trash()
        missing = count_missing()
        for version in self._choose_evictions(missing) if missing else ():
            replaced = self._places.contents.is_replaced(version)
            if self.policy is Policy.SPILL and not replaced:
                self._places.spill(version)
                self.on_spilled(version)
            else:
                self.evict(version)
                if not replaced:
                    on_evicted(version)
        self._places.empty_trash()

    def evict(self, version: Version) -> None:
        """Remove a version, and call `self.on_evicted`."""
        self._places.remove(version, lost=not version.prepared and not self._places.contents.is_replaced(version))
        self.on_evicted(version)
        self._places.empty_trash()

    def _choose_evictions(self, missing: Missing) -> list[Version]:
        """Return the versions to evict, in this order, to free the missing bytes; none if that is impossible.

        Exposed versions are withdrawn only if evicting them would be enough. The choice is then made again, because
        only after the withdrawal can the kernel tell whether other processes use the memory.
        """
        while True:
            chosen = self._choose_unused(missing)
            exposed = [exposing_version for version in chosen for exposing_version in self._exposing(version)]
            if not exposed:
                return chosen
            for version in exposed:
                self.withdraw(version)

    def _choose_unused(self, missing: Missing) -> list[Version]:
        limit, files = missing.limit, missing.files
        chosen: dict[str, Version] = {}
        counts: dict[Place, Counter[int]] = defaultdict(Counter)
        for version in self._eviction_candidates(chosen):
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

    def _eviction_candidates(self, chosen: Mapping[str, Version]) -> Iterator[Version]:
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
