"""Eviction: which versions of a store go when there is no room, and whether they are removed or move to disk."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from dissociated.store.directory import Version
from dissociated.store.places import Place, Places


class Policy(Enum):
    """What happens when the limit of a store is reached."""

    #: whoever writes is told
    REFUSE = "refuse"
    #: the oldest versions that nobody reads are removed
    EVICT = "evict"
    #: the oldest versions move to a directory on disk, and are served from there
    SPILL = "spill"


@dataclass(frozen=True)
class Missing:
    """How many bytes have to come back: under the limit, and in the file system of the store, where no memfds lie."""

    limit: int
    files: int

    def __bool__(self) -> bool:
        return self.limit > 0 or self.files > 0


class Eviction:
    """Makes room in a store as its policy allows. Not safe to use from many threads: the store has a lock.

    `in_use` tells whether anybody reads a version here. `is_exposed` tells whether clients were told where its memory
    is, to fetch from it: the kernel takes that for a use, until `withdraw` ends it. `on_evicted` and `on_spilled` are
    called after one has been removed to make room or has moved to disk. Whoever serves the store sets them.
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
        """Give back as many bytes as are missing: what was replaced goes first, then what the policy allows.

        Nothing goes if all that may go would not be enough. There is one round: what the kernel said would come back
        and did not, another would not bring either. `on_evicted` is called with each dataset that is gone for that.
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
        """Remove a version, and tell who serves it."""
        self._places.remove(version, lost=not version.prepared and not self._places.contents.is_replaced(version))
        self.on_evicted(version)
        self._places.empty_trash()

    def _choose_evictions(self, missing: Missing) -> list[Version]:
        """The versions to give up, in this order, to get so many bytes back; none where that cannot be.

        What is exposed is withdrawn only where it would be enough, and then it is asked again whether others use it.
        """
        while True:
            chosen = self._choose_unused(missing)
            exposed = [one for version in chosen for one in self._exposing(version)]
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
        """What may go, the first first. What is taken of it is in `chosen` when the next is asked for."""
        contents = self._places.contents
        for version in contents.replaced():
            if self._is_evictable(version):
                yield version
        if self.policy is Policy.REFUSE:
            return
        for version in contents:
            if version.id in chosen or version.prepared or not self._is_evictable(version):
                continue
            others = (other for other in contents.named(version.name) if other.id not in chosen and other != version)
            if self.policy is Policy.SPILL or not any(others):  # else, after a restart, an older one would be the last
                yield version

    def _is_evictable(self, version: Version) -> bool:
        """Whether a version takes memory, which would come back: nobody reads it, and no process has it mapped.

        Whether another process has mapped what is exposed cannot be told.
        """
        if not self._places.in_memory(version) or self.in_use(version):
            return False
        return bool(self._exposing(version)) or not self._places.is_used(version)

    def _exposing(self, version: Version) -> list[Version]:
        """What is exposed of its segments: itself, and the versions that share some, since one was appended to."""
        exposed = [*filter(self.is_exposed, self._places.contents.with_name(version.name))]
        segments = self._segments(version) if exposed else set()  # which takes a walk over files
        return [one for one in exposed if not segments.isdisjoint(self._segments(one))]

    def _segments(self, version: Version) -> set[int]:
        return {*self._places.find(version)[1].sizes(version)}
