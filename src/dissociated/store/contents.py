"""The index of a store's committed versions: lookups by id, key and name take constant time."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from itertools import pairwise, takewhile
from typing import Generic, TypeVar

from dissociated.control.version import Version

P = TypeVar("P")

#: Largest number of recorded changes. A caller that asks too seldom has to read all versions.
MAX_CHANGES = 10_000


class Contents(Generic[P]):
    """Versions in the order of their commits, each with its place, of type P. Not safe to use from many threads."""

    def __init__(self) -> None:
        self._versions: dict[str, tuple[Version, P]] = {}
        self._keys: dict[str, str] = {}
        self._names: dict[str, dict[str, None]] = {}  # ids by name, in the order of their commits
        self._prepared: dict[str, None] = {}
        self._with_older: dict[str, None] = {}  # names that have more than one version
        #: The highest serial number that a version has had.
        self.last = 0
        #: The number of changes so far: versions that were added, updated or removed.
        self.changes = 0
        self._changed: OrderedDict[str, int] = OrderedDict()  # the number of the last change, by id
        self._last_discarded = 0  # the number of the last change that is no longer recorded

    def __iter__(self) -> Iterator[Version]:
        return (version for version, _ in self._versions.values())

    def __contains__(self, id: str) -> bool:
        return id in self._versions

    def get(self, id: str) -> tuple[Version, P] | None:
        """Return the version with this id and its place, or None if there is no such version."""
        return self._versions.get(id)

    def put(self, version: Version, place: P) -> None:
        """Add a version, which becomes the latest, or replace the record of a known version."""
        self._note(version.id)
        if version.id not in self._versions:
            self._keys[version.key] = version.id
        self._versions[version.id] = version, place
        named = self._names.setdefault(version.name, {})
        named[version.id] = None
        if len(named) > 1:
            self._with_older[version.name] = None
        if version.prepared:
            self._prepared[version.id] = None
        else:
            self._prepared.pop(version.id, None)
        self.last = max(self.last, version.serial)

    def pop(self, id: str) -> tuple[Version, P] | None:
        """Remove a version. Return it and its place, or None if there is no such version."""
        entry = self._versions.pop(id, None)
        if entry is not None:
            self._note(id)
            version, _ = entry
            if self._keys.get(version.key) == id:
                del self._keys[version.key]
            named = self._names[version.name]
            del named[id]
            if not named:
                del self._names[version.name]
            if len(named) < 2:
                self._with_older.pop(version.name, None)
            self._prepared.pop(id, None)
        return entry

    def _note(self, id: str) -> None:
        self.changes += 1
        self._changed[id] = self.changes
        self._changed.move_to_end(id)
        if len(self._changed) > MAX_CHANGES:
            _, self._last_discarded = self._changed.popitem(last=False)

    def changed(self, since: int) -> list[str] | None:
        """Return the ids of the versions that were added, updated or removed after change number `since`.

        The result is None if some of these changes are no longer recorded.
        """
        if since < self._last_discarded:
            return None
        return [id for id, _ in takewhile(lambda item: item[1] > since, reversed(self._changed.items()))]

    def by_key(self, key: str) -> Version | None:
        """Return the last version that was committed with this key, or None if that version is gone."""
        id = self._keys.get(key)
        return None if id is None else self._versions[id][0]

    def named(self, name: str) -> list[Version]:
        """Return the published versions of `name` that are whole datasets, in the order of their numbers.

        A version gets a higher number than later commits have if its commit is repeated after them.
        """
        versions = [version for version in self.with_name(name) if version.whole and not version.prepared]
        # This is rare, and sorting takes longer than looking.
        if any(version.number > later.number for version, later in pairwise(versions)):
            versions.sort(key=lambda version: (version.number, version.serial))
        return versions

    def names(self) -> Iterator[str]:
        """Iterate over the names of all datasets."""
        return iter(self._names)

    def with_name(self, name: str) -> list[Version]:
        """Return all versions of `name` in the order of their commits, prepared and partial ones included."""
        return [self._versions[id][0] for id in self._names.get(name, ())]

    def prepared(self) -> list[Version]:
        """Return the prepared versions: this store does not know whether they were published."""
        return [self._versions[id][0] for id in self._prepared]

    def is_replaced(self, version: Version) -> bool:
        """Return whether a later version of the dataset has replaced `version`."""
        return version in self.named(version.name)[:-1]

    def replaced(self) -> list[Version]:
        """Return the versions that later versions of their datasets have replaced, in the order of their commits."""
        versions = [version for name in self._with_older for version in self.named(name)[:-1]]
        return sorted(versions, key=lambda version: version.serial)


class BlockCounter:
    """The total size of the files of versions. A file that several versions share counts once, by its inode."""

    def __init__(self) -> None:
        #: Bytes of all files.
        self.total = 0
        self._sizes: dict[int, int] = {}
        #: The number of versions that have each file, by inode.
        self.names: Counter[int] = Counter()

    def __contains__(self, inode: object) -> bool:
        return inode in self._sizes

    def add(self, files: Mapping[int, int]) -> None:
        """Count the files of one more version, given as bytes by inode."""
        for inode, size in files.items():
            self.names[inode] += 1
            if inode not in self._sizes:
                self._sizes[inode] = size
                self.total += size

    def discard(self, files: Mapping[int, int]) -> None:
        """Stop counting the files of one version."""
        for inode in files:
            self.names[inode] -= 1
            if not self.names[inode]:
                del self.names[inode]
                self.total -= self._sizes.pop(inode)

    def freed(self, inode: int, removed: int) -> int:
        """Return the bytes that are freed if `removed` versions with this file go: 0 if another version keeps it."""
        return self._sizes[inode] if self.names[inode] == removed else 0
