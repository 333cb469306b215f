"""What is committed in a store, found by id, key and name in a time that does not grow with how much there is."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from itertools import takewhile
from typing import Generic, TypeVar

from dissociated.store.directory import Version

P = TypeVar("P")

_MAX_CHANGES = 10_000  # versions that have changed: whoever asks seldom is told of all there are


class Contents(Generic[P]):
    """Versions in the order of their commits, each with its place, of the type P. Not safe to use from many threads."""

    def __init__(self) -> None:
        self._versions: dict[str, tuple[Version, P]] = {}
        self._keys: dict[str, str] = {}
        self._names: dict[str, dict[str, None]] = {}  # ids, in the same order
        self._prepared: dict[str, None] = {}
        self._with_older: dict[str, None] = {}  # names of more than one version
        #: The highest number that a version has had.
        self.last = 0
        #: How often anything has come, gone or changed.
        self.changes = 0
        self._changed: OrderedDict[str, int] = OrderedDict()  # ids, by the number of the last change
        self._forgotten = 0  # the number of the last change that is not known any more

    def __iter__(self) -> Iterator[Version]:
        return (version for version, _ in self._versions.values())

    def __contains__(self, id: str) -> bool:
        return id in self._versions

    def get(self, id: str) -> tuple[Version, P] | None:
        """The version with this id and its place, if it is there."""
        return self._versions.get(id)

    def put(self, version: Version, place: P) -> None:
        """Add a version, the latest, or change what is known of one."""
        self._note(version.id)
        self._versions[version.id] = version, place
        self._keys.setdefault(version.key, version.id)
        named = self._names.setdefault(version.name, {})
        named[version.id] = None
        if len(named) > 1:
            self._with_older[version.name] = None
        if version.prepared:
            self._prepared[version.id] = None
        else:
            self._prepared.pop(version.id, None)
        self.last = max(self.last, version.number)

    def pop(self, id: str) -> tuple[Version, P] | None:
        """Forget a version. Returns it and its place, or None where there was none."""
        found = self._versions.pop(id, None)
        if found is not None:
            self._note(id)
            version, _ = found
            if self._keys.get(version.key) == id:
                del self._keys[version.key]
            named = self._names[version.name]
            del named[id]
            if not named:
                del self._names[version.name]
            if len(named) < 2:
                self._with_older.pop(version.name, None)
            self._prepared.pop(id, None)
        return found

    def _note(self, id: str) -> None:
        self.changes += 1
        self._changed[id] = self.changes
        self._changed.move_to_end(id)
        if len(self._changed) > _MAX_CHANGES:
            _, self._forgotten = self._changed.popitem(last=False)

    def changed(self, since: int) -> list[str] | None:
        """The ids of what has come, gone or changed after so many `changes`; None where nobody knows any more."""
        if since < self._forgotten:
            return None
        return [id for id, _ in takewhile(lambda item: item[1] > since, reversed(self._changed.items()))]

    def by_key(self, key: str) -> Version | None:
        """What was committed with this key."""
        id = self._keys.get(key)
        return None if id is None else self._versions[id][0]

    def named(self, name: str) -> list[Version]:
        """The published versions of `name`, whole ones alone, in their order."""
        return [version for version in self.with_name(name) if version.whole and not version.prepared]

    def names(self) -> Iterator[str]:
        """The names of all versions."""
        return iter(self._names)

    def with_name(self, name: str) -> list[Version]:
        """Every version of `name`, in their order, whatever is known of it."""
        return [self._versions[id][0] for id in self._names.get(name, ())]

    def prepared(self) -> list[Version]:
        """Those of which it is not known here whether they were published."""
        return [self._versions[id][0] for id in self._prepared]

    def is_replaced(self, version: Version) -> bool:
        """Whether a later version of its name has replaced it."""
        return version in self.named(version.name)[:-1]

    def replaced(self) -> list[Version]:
        """Those that a later version of their name has replaced, in the order of their commits."""
        found = [version for name in self._with_older for version in self.named(name)[:-1]]
        return sorted(found, key=lambda version: version.number)


class BlockCounter:
    """Adds up the bytes of files, by their inodes. A file that several versions have counts once."""

    def __init__(self) -> None:
        #: Bytes of all files.
        self.total = 0
        self._sizes: dict[int, int] = {}
        #: How many versions have each of them, by inodes.
        self.names: Counter[int] = Counter()

    def __contains__(self, inode: object) -> bool:
        return inode in self._sizes

    def add(self, files: Mapping[int, int]) -> None:
        """One more version has these files: inodes, and the bytes of each."""
        for inode, size in files.items():
            self.names[inode] += 1
            if inode not in self._sizes:
                self._sizes[inode] = size
                self.total += size

    def discard(self, files: Mapping[int, int]) -> None:
        """One version less has these files."""
        for inode in files:
            self.names[inode] -= 1
            if not self.names[inode]:
                del self.names[inode]
                self.total -= self._sizes.pop(inode)

    def freed(self, inode: int, removed: int) -> int:
        """Bytes that come back if `removed` of the versions that have this file are removed: 0 while another has it."""
        return self._sizes[inode] if self.names[inode] == removed else 0
