"""The places of a store's versions, and the bytes that they take: its directory, memfds, and a directory on disk."""

from __future__ import annotations

import logging
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import NamedTuple, TypeAlias

from dissociated.base.oserrors import store_errors
from dissociated.base.private import read_private_file
from dissociated.control.version import Version
from dissociated.errors import StoreError
from dissociated.store import trash
from dissociated.store.contents import BlockCounter, Contents
from dissociated.store.directory import Directory, SetAside, file_name, sizes
from dissociated.store.files import copy_file, sync, write_atomically
from dissociated.store.keys import CommitKey
from dissociated.store.layout import SPILLED
from dissociated.store.memfds import Memfds
from dissociated.store.numbers import Removal
from dissociated.store.segment_cache import SegmentCache

_log = logging.getLogger(__name__)

Place: TypeAlias = Directory | Memfds


@dataclass(frozen=True)
class Usage:
    """The bytes that a store takes, and its limit, which is None if it has no limit."""

    limit: int | None
    committed: int
    staged: int
    trash: int
    spilled: int
    #: The bytes of entries that are set aside.
    aside: int = 0
    #: The free bytes in the file system of the store; None if it has no limit.
    free: int | None = None

    @property
    def total(self) -> int:
        """The bytes that count against the limit."""
        return self.committed + self.staged + self.trash + self.aside


class SpillDirectory(NamedTuple):
    """The directory on disk to which a store has moved versions."""

    id: str
    path: Path


def spill_of(store: Path) -> SpillDirectory | None:
    """Return the spill directory in which versions of the store at this path lie; None if none does.

    Raises StoreError if that cannot be read.
    """
    path = store / SPILLED
    with store_errors(f"reading {path}"), suppress(FileNotFoundError):
        id, _, disk = read_private_file(path).decode(errors="replace").partition(" ")
        return SpillDirectory(id, Path(disk))
    return None


class Places:
    """The versions in the store's `directory`, in `memfds`, and on `disk`, which is None if the store does not spill.

    Versions on disk take no memory; all others do. The trash of `directory` may keep `reuse_bytes` bytes for reuse. Not
    thread-safe: the lock of the store protects it.
    """

    def __init__(self, directory: Directory, memfds: Memfds, disk: Directory | None, reuse_bytes: int) -> None:
        self.directory = directory
        self.memfds = memfds
        self.disk = disk
        self.contents: Contents[Place] = Contents()
        #: The bytes that are committed in each place.
        self.blocks: dict[Place, BlockCounter] = defaultdict(BlockCounter)
        self.cache = SegmentCache()
        #: The entries of `segments/` that are no versions.
        self.set_aside: Sequence[SetAside] = ()
        self._aside_sizes: dict[int, int] = {}  # bytes by inode, of the entries that take memory
        self._dropped: list[tuple[Version, Place]] = []  # dropped versions that could not be removed
        self._reuse_bytes = reuse_bytes

    def load(self) -> None:
        """Load the versions that were committed before this process started.

        Raises StoreError if versions lie in another spill directory: a catalog would count them as evicted.
        """
        self._check_disk()
        versions, invalid_entries = self.directory.committed()
        places_by_id: dict[str, tuple[Version, Directory]] = {
            version.id: (version, self.directory) for version in versions
        }
        self._aside_sizes = dict(chain.from_iterable(entry.sizes.items() for entry in invalid_entries))
        if self.disk is not None:
            with self._disk_may_be_full():
                self.disk.numbers.merge(self.directory.numbers)  # the node may have run without the disk
            with store_errors(f"recording the numbers of {self.disk.path} in {self.directory.path}"):
                self.directory.numbers.merge(self.disk.numbers)  # the memory may have been lost
            versions, on_disk = self.disk.committed()
            invalid_entries += on_disk
            for version in versions:
                if version.id not in places_by_id:
                    places_by_id[version.id] = version, self.disk
                    continue
                # A move to disk was not finished. The manifest in memory may have changed since the copy was made.
                try:
                    self.disk.remove(version, superseded=True)
                except OSError as error:  # the next move, or the removal of the version, tries again
                    _log.warning("removing an unused copy on disk failed: version=%s error=%s", version.id, str(error))
        for version, place in sorted(places_by_id.values(), key=lambda item: item[0].serial):
            self.put(version, place)
            if any(directory.is_dropped(version) for directory in self._directories()):
                self._set_dropped(version)
        for entry in invalid_entries:
            self.contents.last = max(self.contents.last, entry.serial)
            _log.error("entry set aside, it stays where it is: path=%r reason=%s", str(entry.path), entry.reason)
        self.set_aside = tuple(invalid_entries)
        self._record_spilled()

    def _check_disk(self) -> None:
        spilled = spill_of(self.directory.path)
        if spilled is not None and (self.disk is None or self.disk.id != spilled.id):
            reason = "no spill directory was given" if self.disk is None else f"{str(self.disk.path)!r} is another"
            raise StoreError(
                f"versions of the store {str(self.directory.path)!r} lie in the spill directory {str(spilled.path)!r}, "
                f"and {reason}: start with --policy spill --spill and that directory, mounted, or remove the file "
                f"{str(self.directory.path / SPILLED)!r} if these versions are lost"
            )

    def _record_spilled(self, spilled: bool = False) -> None:
        """Record whether versions lie on disk, or will if `spilled` is set. Errors are logged only.

        The store may be full, and spilling is what makes room.
        """
        if self.disk is None:
            return
        path = self.directory.path / SPILLED
        try:
            if (
                spilled
                or self.blocks[self.disk].names
                or any(entry.path.parent == self.disk.segments for entry in self.set_aside)
            ):
                content = f"{self.disk.id} {self.disk.path}".encode(errors="replace")
                if not path.exists() or path.read_bytes() != content:
                    write_atomically(path, content)
                    sync(path.parent)
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            _log.warning("recording the spill directory failed: path=%r error=%s", str(path), error)

    @contextmanager
    def _disk_may_be_full(self) -> Iterator[None]:
        """Log an error of the second record of a number or key, which is on disk.

        If the number is out of date, the version counts as lost there, so that nothing can be appended to it.
        """
        try:
            yield
        except OSError as error:
            _log.warning("a number or key has no second record on disk: error=%s", error)

    def find(self, version: Version) -> tuple[Version, Place]:
        """Return the current record of a version, and its place. Raises StoreError if the version is gone."""
        entry = self.contents.get(version.id)
        if entry is None:
            raise StoreError(f"the version of {version.name!r} is not in {str(self.directory.path)!r} any more")
        return entry

    def in_memory(self, version: Version) -> bool:
        """Return whether a version takes memory."""
        return self.find(version)[1] is not self.disk

    def is_used(self, version: Version) -> bool:
        """Return whether some process has a version open or mapped, so that its memory would outlast its removal.

        Cached segments of this process are closed first, because the kernel would count them as a use.
        """
        _, place = self.find(version)
        for candidate in self.contents.with_name(version.name):  # these may share its segments
            self.cache.pop(candidate.id)
        with store_errors(f"checking whether {version.name!r} is used in {self.directory.path}"):
            return place.is_used(version, self.blocks[place].names)

    def put(self, version: Version, place: Place) -> None:
        """Record that a version lies in `place` now."""
        self.contents.put(version, place)
        self.blocks[place].add(place.sizes(version))

    def commit(
        self, version: Version, paths: Sequence[Path], copy: Callable[[Path, Path], None], on_disk: bool
    ) -> None:
        """Commit segments as a version, without a copy if possible.

        Args:
            version: The new version.
            paths: The segments. If all are memfds, the version lies in memfds, and else in the directory.
            copy: Copies a memfd into the directory, if `paths` also has files.
            on_disk: Whether the version is appended to a spilled one. It lies on disk, too: its rows may be more than
                the memory holds, and links between the two places would count the same bytes differently.

        Raises:
            StoreError: The version was not committed.
        """
        if on_disk:
            assert self.disk is not None
            with store_errors(f"committing {version.name!r} in {self.disk.path}"):
                self.disk.commit(version, paths, copy_file)
            self.put(version, self.disk)
            return
        if self.memfds.has(paths):
            with store_errors(f"recording the number of {version.name!r} in {self.directory.path}"):
                # No manifest has this number, which must survive a restart.
                self._record(replace(version, prepared=True), lost=False)
            self.memfds.publish(version, paths)
            self.put(version, self.memfds)
            return
        with store_errors(f"committing {version.name!r} in {self.directory.path}"):
            self.directory.commit(version, paths, copy)
        self.put(version, self.directory)

    def mark(self, version: Version, prepared: bool) -> Version:
        """Change whether a version counts as prepared, in this process only. Return its new record."""
        current, place = self.find(version)
        marked = replace(current, prepared=prepared)
        self.contents.put(marked, place)
        return marked

    def removals(self) -> dict[str, Removal]:
        """Return the records of the datasets whose highest version number has left the store, or is set aside."""
        records: dict[str, Removal] = {}
        for directory in self._directories():
            for name, removed in directory.numbers.records().items():
                records[name] = records.get(name, removed).merge(removed)
        recorded_names = {*records}
        for entry in self.set_aside:
            if (removal := entry.removal) is not None:
                name, removed = removal
                if not entry.number and name in recorded_names:
                    continue  # the record has the number, since a version is recorded when it is published
                records[name] = records.get(name, removed).merge(removed)
        unseen_records = {name: self._missing(name, removed) for name, removed in records.items()}
        return {name: removed for name, removed in unseen_records.items() if removed is not None}

    def _missing(self, name: str, removed: Removal) -> Removal | None:
        """Return the part of a record that the versions which are here do not show."""
        numbers = [version.number for version in self.contents.with_name(name)]
        if removed.used <= max(numbers, default=0):
            return None
        return Removal.of(removed.used, lost=False, published=False) if removed.version in numbers else removed

    def record_published(self, version: Version) -> None:
        """Record that a version was published, in case that its manifest is lost. Raises StoreError."""
        with store_errors(f"recording the number of {version.name!r} in {self.directory.path}"):
            self._record(version, lost=True)

    @property
    def last_serial(self) -> int:
        """The highest serial number of all versions that this store has, or had (`Version.serial`)."""
        return max(self.contents.last, *(directory.numbers.serial for directory in self._directories()))

    def _directories(self) -> Sequence[Directory]:
        return [self.directory] if self.disk is None else [self.directory, self.disk]

    def use_number(self, name: str, number: int) -> None:
        """Record that a version gets this number, which is not in the store. Raises StoreError."""
        with store_errors(f"recording the number of {name!r} in {self.directory.path}"):
            self._record_removal(name, Removal.of(number, lost=False, published=False), 0)

    def _record(self, version: Version, lost: bool) -> None:
        if version.number:
            self._record_removal(version.name, Removal.of(version.number, lost, not version.prepared), version.serial)

    def _record_removal(self, name: str, removal: Removal, serial: int) -> None:
        self.directory.numbers.record(name, removal, serial)
        if self.disk is not None:  # the memory may be lost while the disk stays
            with self._disk_may_be_full():
                self.disk.numbers.record(name, removal, serial)

    def commit_keys(self) -> Sequence[CommitKey]:
        """Return the keys of the commits that were made here or aborted."""
        records = chain.from_iterable(directory.keys.records() for directory in self._directories())
        return [*{record.key: record for record in records}.values()]

    def record_keys(self, keys: Sequence[CommitKey], earlier: bool) -> None:
        """Record keys of commits, durably. See `Keys.record`. Raises StoreError."""
        with store_errors(f"recording the key of a commit in {self.directory.path}"):
            self.directory.keys.record(keys, earlier)
            if self.disk is not None:  # the memory may be lost while the disk stays
                with self._disk_may_be_full():
                    self.disk.keys.record(keys, earlier)

    def record_dropped(self, *versions: Version) -> None:
        """Record versions as dropped, durably, although they cannot be removed now. Raises StoreError.

        From then on, they are no versions of the store. Only their bytes count until `sweep` has removed them.
        """
        for version in sorted(versions, key=lambda version: version.serial):
            with store_errors(f"recording that {version.name!r} in {self.directory.path} was dropped"):
                self._record(version, lost=False)
                for directory in self._directories():
                    directory.mark_dropped(version)
            self._set_dropped(version)

    def _set_dropped(self, version: Version) -> None:
        if (entry := self.contents.pop(version.id)) is not None:
            self._dropped.append(entry)
        self.cache.pop(version.id)

    def _remove_dropped(self) -> None:
        while self._dropped:
            try:
                self._remove(*self._dropped[-1], lost=False)
            except StoreError as error:
                _log.warning("removing dropped versions failed, it is tried again: error=%s", error)
                return
            self._dropped.pop()

    def confirm(self, version: Version) -> None:
        """Store the changed attributes of a version in its manifest. Raises StoreError."""
        _, place = self.find(version)
        with store_errors(f"confirming {version.name!r} in {self.directory.path}"):
            place.confirm(version)
        self.contents.put(version, place)

    def remove(self, *versions: Version, lost: bool = False) -> None:
        """Remove versions durably, in this order. Versions that are gone already are skipped.

        Args:
            versions: The versions.
            lost: Whether the versions are lost, that is, neither dropped nor replaced. See `Removal`.

        Raises:
            StoreError: A version cannot be removed. That version still exists, and so do the later arguments of the
                same dataset, so that no older version becomes the current one. All other versions are removed.
        """
        failures: dict[str, StoreError] = {}
        for version in versions:
            entry = self.contents.get(version.id)
            if entry is None or version.name in failures:
                continue
            try:
                self._remove(version, entry[1], lost)
            except StoreError as error:
                failures[version.name] = error
        self.empty_trash(self._reuse_bytes)
        for failure in failures.values():
            raise failure

    def _remove(self, version: Version, place: Place, lost: bool) -> None:
        with store_errors(f"removing {version.name!r} from {self.directory.path}"):
            for directory in (self.directory, self.disk):  # a move to disk that failed may have left a second copy
                if directory is not None and directory is not place and directory.holds(version):
                    directory.remove(version, superseded=True)
            if self.disk is not None:
                # Since a version was published or spilled, its record there counts it as lost. A refused version has no
                # such record, and a manifest that may say that it was published: it is removed also on a full disk.
                with suppress(OSError) if version.prepared else nullcontext():
                    self._record(version, lost)
            self._take_from(place, version, lost)
        self.contents.pop(version.id)
        self.cache.pop(version.id)
        if place is self.disk:
            self._record_spilled()

    def spill(self, version: Version) -> None:
        """Move a version to disk: first copy all of it, then remove it from its place.

        Raises StoreError if one of the two steps fails. The version then stays in its place.
        """
        assert self.disk is not None
        _, place = self.find(version)
        with store_errors(f"moving {version.name!r} to {self.disk.path}"):
            self._record_spilled(spilled=True)
            if self.disk.holds(version):  # left by an earlier attempt
                self.disk.remove(version, superseded=True)
            with self.disk.draft(version) as draft:
                for index, path in enumerate(place.files(version)):
                    file = draft / file_name(index)
                    copy_file(path, file)
                    os.chmod(file, 0o400)
            try:
                self._take_from(place, version, lost=True)  # from now on, as if the copy on disk were damaged
            except OSError:
                with suppress(OSError):  # a copy that remains is removed by the next attempt, or with the version
                    self.disk.remove(version, superseded=True)
                raise
            self.put(version, self.disk)
            self.cache.pop(version.id)

    def _take_from(self, place: Place, version: Version, lost: bool = False) -> None:
        files = place.sizes(version)
        # A later version in the same place has a higher number there, so the number of this one need not be recorded.
        siblings = (sibling for sibling in self.contents.with_name(version.name) if not sibling.prepared)
        superseded = any(sibling.number > version.number and self.find(sibling)[1] is place for sibling in siblings)
        if place is self.memfds and not superseded:
            with suppress(OSError):  # then the record of the publication stays, which counts the version as lost
                self._record(version, lost)
        place.remove(version, lost, superseded)
        self.blocks[place].discard(files)

    def sweep(self, staging_timeout: float) -> None:
        """Remove dropped versions, unfinished files, segments that were not committed in time, and unused trash."""
        self.directory.sweep(staging_timeout)
        self.memfds.sweep(staging_timeout)
        if self.disk is not None:
            self.disk.sweep(staging_timeout)
        self._remove_dropped()
        self.empty_trash(self._reuse_bytes)

    def empty_trash(self, keep: int = 0) -> None:
        """Remove unused segments from the trash, except up to `keep` bytes that stay for reuse."""
        self.memfds.empty_trash()
        trash.empty(self.directory.trash, keep)
        if self.disk is not None:
            trash.empty(self.disk.trash, 0)

    def usage(self, limit: int | None) -> Usage:
        """Return the bytes that the store takes now, with its `limit`."""
        committed = self.blocks[self.directory]
        in_trash = sizes(self.directory.trash)  # first: a writer may take a file from there into `staging`
        staged = {inode: size for inode, size in sizes(self.directory.staging).items() if inode not in committed}
        removed = {inode: size for inode, size in in_trash.items() if inode not in committed and inode not in staged}
        memfd_blocks = self.blocks[self.memfds]
        memfds_staged, memfds_removed = self.memfds.uncommitted(memfd_blocks)
        return Usage(
            limit,
            committed.total + memfd_blocks.total,
            sum(staged.values()) + memfds_staged,
            sum(removed.values()) + memfds_removed,
            self.blocks[self.disk].total if self.disk else 0,
            sum(size for inode, size in self._aside_sizes.items() if inode not in committed),
            None if (free := self.free()) == sys.maxsize else free,
        )

    def free(self) -> int:
        """Return the free bytes in the file system of the store."""
        status = os.statvfs(self.directory.path)
        return status.f_bavail * status.f_frsize if status.f_blocks else sys.maxsize  # 0 blocks: a tmpfs without limit
