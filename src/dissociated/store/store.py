"""A directory of committed segments, which outlives the processes that write and serve them.

    STORE/                      the directory, locked by its one owner
        id                      the id of the store
        numbers                 the last version number of each dataset, also of those that are no longer in the store
        keys                    the keys of the commits that its node has made without an upstream
        spilled                 the id and the path of the spill directory, while versions of this store lie there
        staging/NAME.part       a segment that is being written, locked by its writer
        staging/NAME            a finished segment that is not committed yet
        staging/VERSION.new/    a version that is being committed
        staging/VERSION.gone/   a version that is being removed
        segments/VERSION/       a committed version: 0000.arrows, 0001.arrows ... and manifest.json. An entry without a
                                readable manifest is set aside: it stays, and is not served. One with the file `dropped`
                                was dropped and could not be removed. It is no version any more
        trash/                  removed segments that a process may still read

All segments of a version become visible through a single rename. If a process is killed, at any moment, reopening the
store shows exactly the committed versions, and removes unfinished files. Segments are read-only Arrow IPC streams or
files that any Arrow tool can open.

The limit counts the blocks of every segment in the directory. Removed segments count as long as a process has them
mapped, so the limit applies to the memory in use. Sealed memfds that were handed over count, too. They have no name,
and are gone when the owner of the store ends.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import pyarrow as pa

from dissociated.base.buffers import MAX_METADATA
from dissociated.base.fork import ProcessBound
from dissociated.base.oserrors import store_errors
from dissociated.codec.options import WriteOptions
from dissociated.codec.schemas import schema_difference
from dissociated.control.commit import Commit
from dissociated.control.version import Part, Version
from dissociated.errors import StoreError
from dissociated.store.admission import Quota
from dissociated.store.directory import Directory, SetAside
from dissociated.store.eviction import Eviction, Policy
from dissociated.store.files import PARTIAL_SUFFIX, Reserve
from dissociated.store.keys import CommitKey
from dissociated.store.memfds import FD, Memfds
from dissociated.store.numbers import Removal
from dissociated.store.places import Places, Usage
from dissociated.store.segment import Segment, SegmentWriter
from dissociated.store.segment_cache import OpenSegments, SegmentFiles
from dissociated.store.trash import reuse_bytes

_log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

#: Seconds after which a finished segment that was never committed is removed.
STAGING_TIMEOUT = 86_400.0


def _makes_room(method: Callable[Concatenate[Store, P], T]) -> Callable[Concatenate[Store, P], T]:
    """Decorate a method that may need evictions which must be announced without the lock: see `Eviction.run`."""

    @wraps(method)
    def run(store: Store, /, *args: P.args, **options: P.kwargs) -> T:
        return store.eviction.run(lambda: method(store, *args, **options), lambda: store._locked)

    return run


class Store(ProcessBound):
    """The owner of a store's directory, locked against other processes. Close it, or use it in a `with` block.

    The server of the store sets the callbacks of `eviction`, which ask it for the versions in use, and notify it of
    evictions. Safe to use from many threads.

    Args:
        directory: The directory, which is made if it is missing.
        limit: The largest number of bytes that the store may take; None for no limit.
        policy: The reaction to a write that would exceed the limit.
        spill: The directory on disk for `Policy.SPILL`.
        staging_timeout: Seconds after which a finished segment that was not committed is removed.

    Raises:
        StoreError: Another process owns the directory, or it cannot be used, or versions of the store lie in another
            spill directory.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        limit: int | None = None,
        policy: Policy = Policy.REFUSE,
        spill: str | os.PathLike[str] | None = None,
        staging_timeout: float = STAGING_TIMEOUT,
    ) -> None:
        if (policy is Policy.SPILL) != (spill is not None):
            raise StoreError(
                "spill and policy disagree: give a directory (--spill DIR) with the policy spill, and with no other "
                "policy"
            )
        self._staging_timeout = staging_timeout
        self._lock = threading.RLock()
        self._is_closed = False
        with ExitStack() as undo:
            locked = undo.enter_context(Directory(Path(directory)))
            disk = undo.enter_context(Directory(Path(spill))) if spill is not None else None
            memfds = undo.enter_context(closing(Memfds()))
            self._directory = locked
            self._memfds = memfds
            self._places = Places(locked, memfds, disk, reuse_bytes(locked.path, limit))
            self._contents = self._places.contents
            self._cache = self._places.cache
            self.eviction = Eviction(self._places, policy)
            self._quota = Quota(self._places, self.eviction, limit)
            self._serial = 0
            undo.callback(self._cache.clear)
            self._files = SegmentFiles()
            self._places.load()
            self.sweep()
            self._undo = undo.pop_all()
        self.bind_to_process()

    @property
    @contextmanager
    def _locked(self) -> Iterator[None]:
        """The lock of the store's state in this process.

        Raises ForkedError in a forked child, and StoreError if the store is closed: its directory may have a new owner.
        """
        self.check_process()
        with self._lock:
            if self._is_closed:
                raise StoreError(f"the store {str(self.directory)!r} is closed in this process")
            yield

    @property
    def directory(self) -> Path:
        """The path of the store's directory."""
        return self._directory.path

    @property
    def staging(self) -> Path:
        """The path of the directory in which writers put segments."""
        return self._directory.staging

    @property
    def id(self) -> str:
        """The unique id of the store, which never changes."""
        return self._directory.id

    # Reading

    def versions(self) -> list[Version]:
        """Return all committed versions, in the order of their commits."""
        with self._locked:
            return [*self._contents]

    def next_serial(self) -> int:
        """Return a new serial number: higher than those of all earlier versions, lower than those of later ones."""
        with self._locked:
            self._serial = max(self._serial + 1, self._places.last_serial + 1, int(time.time() * 1000))
            return self._serial

    def current(self, name: str) -> Version | None:
        """Return the published version of `name` with the highest number, or None."""
        with self._locked:
            return next(iter(self._contents.named(name)[-1:]), None)

    def named(self, name: str) -> list[Version]:
        """Return the versions of `name` that are known to be published and whole, in the order of their numbers."""
        with self._locked:
            return self._contents.named(name)

    def version(self, id: str) -> Version | None:
        """Return the version with this id, or None if it does not exist any more."""
        with self._locked:
            entry = self._contents.get(id)
            return None if entry is None else entry[0]

    def removals(self) -> Mapping[str, Removal]:
        """Return the records of the datasets whose highest version number is no longer in the store, by name."""
        with self._locked:
            return self._places.removals()

    def prepared(self) -> list[Version]:
        """Return the prepared versions: this store does not know whether they were published."""
        with self._locked:
            return self._contents.prepared()

    def by_key(self, key: str) -> Version | None:
        """Return the last version that was committed with this key, or None if it does not exist any more."""
        with self._locked:
            return self._contents.by_key(key)

    def ids_in_memfds(self) -> list[str]:
        """Return the ids of the versions that end with the owner of the store, since they lie in memfds."""
        with self._locked:
            return [version.id for version in self._contents if self._places.find(version)[1] is self._memfds]

    @property
    def changes(self) -> int:
        """The number of changes so far: commits, confirmations, moves and removals of versions."""
        with self._locked:
            return self._contents.changes

    def changed(self, since: int) -> list[str] | None:
        """Return the ids of the versions that changed after change number `since`; None if these were too many."""
        with self._locked:
            return self._contents.changed(since)

    def segments(self, version: Version) -> OpenSegments:
        """Return the open segments of a version. They stay readable after the version was removed.

        Raises StoreError if they cannot be read, or the version does not exist any more.
        """
        segments = self._cache.get(version.id)  # without the lock, so that readers do not wait for evictions
        if segments is not None:
            return segments
        with self._locked:  # nothing is removed meanwhile, so the opened files are those of this version
            segments = self._cache.get(version.id)
            if segments is None:
                _, place = self._places.find(version)
                segments = OpenSegments(self._files.open(path) for path in place.files(version))
                if not segments:
                    raise StoreError(f"the segments of {version.name!r} in {str(self.directory)!r} are gone")
                self._cache.put(version.id, segments)
            return segments

    def location(self, version: Version) -> Path:
        """Return the directory with the segments of a version. Raises StoreError if the version is gone."""
        with self._locked:
            _, place = self._places.find(version)
            return next((path.parent.resolve() for path in place.files(version)), self.directory)

    @property
    def set_aside(self) -> Sequence[SetAside]:
        """The entries of `segments/` that were no versions, or could not be read, when the store was opened."""
        return self._places.set_aside

    @property
    def set_aside_ids(self) -> list[str]:
        """The ids of the versions that are set aside. A version with a second, readable copy is not."""
        return [entry.id for entry in self.set_aside if entry.id is not None and self.version(entry.id) is None]

    def usage(self) -> Usage:
        """Return the bytes that the store takes now."""
        with self._locked:
            return self._quota.usage()

    # Writing

    def writer(
        self, name: str, schema: pa.Schema, options: WriteOptions | None = None, reserve: Reserve | None = None
    ) -> SegmentWriter:
        """Return a writer of the segment `name` in the staging directory, which can be committed afterwards.

        Room is reserved with `self.reserve`, or with `reserve`, which has to call it.
        """
        return SegmentWriter(self._directory.staged_path(name), schema, options, reserve or self.reserve)

    @_makes_room
    def reserve(self, name: str, size: int, wish: int = 0, appends_to: str = "") -> int:
        """Allocate blocks for a staged file, so that a later write fails neither by the limit nor by a full disk.

        Args:
            name: The name of the file in the staging directory.
            size: The bytes that the file needs. Versions are evicted for them if the policy allows.
            wish: The bytes that the file could use. Nothing is evicted for the part beyond `size`.
            appends_to: The name of the dataset that the file will be appended to, which is not evicted for it; empty
                if there is none.

        Returns:
            The bytes that the file has room for: `wish`, or `size` rounded up to pages.

        Raises:
            StoreFull: There is no room for `size` bytes, and none can be made now.
            CatalogUnreachable, DeadlineExceeded: Versions can be evicted, but the catalog does not answer.
        """
        with self._locked:
            return self._quota.reserve(name, size, wish, appends_to)

    @_makes_room
    def ensure_room(self, name: str, size: int, appends_to: str = "") -> None:
        """Make room for `size` bytes of `name` that are about to be written. Evict nothing if they cannot all fit.

        A writer that knows its total size calls this first. Otherwise, versions could be evicted for the beginning of a
        segment that turns out not to fit. For `appends_to`, and for the errors, see `reserve`.
        """
        with self._locked:
            self._quota.ensure_room(name, size, appends_to)

    @_makes_room
    def hand_over(self, descriptor: int) -> str:
        """Stage a sealed memfd as a segment, without a copy. Its memory counts against the limit.

        Args:
            descriptor: The memfd. The caller keeps the descriptor; the store has its own, until it is closed.

        Returns:
            The name of the segment.

        Raises:
            StoreError: The memfd is not sealed, does not hold one whole Arrow IPC stream or file, or there is no room.
        """
        description = "the memory that was handed over"
        with self._locked, store_errors(description):
            memfd = self._memfds.open(descriptor)
            if memfd is None:
                raise StoreError(
                    "the memory can still be modified: hand over a memfd that is sealed against writing, shrinking "
                    "and growing"
                )
            try:
                Segment.open(memfd.path, description).check_whole()
                self._quota.admit(description, memfd.size, 0 if self._memfds.counts(memfd) else memfd.size)
                return self._memfds.stage(memfd)
            except BaseException:
                self._memfds.discard(memfd)
                raise

    @_makes_room
    def commit(
        self,
        commit: Commit,
        *,
        prepared: bool = False,
        pending: bool = False,
        base: str | None = None,
        new_lineage: bool = False,
        max_metadata: int = MAX_METADATA,
    ) -> Version:
        """Commit staged segments as a version, atomically and durably.

        A repeated call with the same key and segments returns the version of the first call. If that version is only
        prepared, and the call has other segments or `pending` is set, it is removed and replaced: its writer has
        started again. A published version stays.

        Args:
            commit: The commit, with a key. Its segments are in the staging directory of this store. It needs a schema
                if there are no segments at all.
            prepared: Whether the version is not published until `confirm`.
            pending: Whether the version is only prepared in this process until `record_published`. So it is not
                evicted, and replaces no version, as long as its publication can fail. A restart publishes it.
            base: The id of the version that an append must extend; by default, it extends the current version, if
                there is one.
            new_lineage: Whether an append begins a new lineage.
            max_metadata: The largest metadata of a message, in bytes.

        Returns:
            The version.

        Raises:
            StoreError: The version cannot be committed, `base` is not the current version any more, or the store has a
                version with this key that is of another dataset, of a later attempt, or whole and published.
        """
        with self._locked:
            names = commit.segment_names
            digest = _digest(names)
            repeated = self._find_repeated(commit, digest, pending)
            if repeated is not None:
                self._unstage_committed(names)
                if commit.number:
                    # The catalog abandons a version that has been prepared for long: this attempt begins now.
                    created = time.time() if repeated.prepared else repeated.created
                    repeated = self._update(repeated, number=commit.number, catalog=commit.catalog, created=created)
                return repeated
            self._quota.check(commit.name)
            previous = self.current(commit.name) if commit.append else None
            if base is not None and (previous is None or previous.id != base):
                raise StoreError(
                    f"{commit.name!r} cannot be appended to: its last version was evicted, or has expired, during the "
                    "commit; put all rows again, with the mode overwrite"
                )
            paths = [self._staged_path(name) for name in names]
            if previous is not None:
                _, place = self._places.find(previous)
                kept_paths = place.files(previous)
                if sum(self._files.open(path).rows for path in kept_paths) != previous.rows:
                    raise StoreError(
                        f"{commit.name!r} cannot be appended to: segments of version {previous.number} are missing, or "
                        "were modified after its commit; put all rows again, with the mode overwrite"
                    )
                paths = [*kept_paths, *paths]
            if not paths:
                if commit.schema is None:
                    raise StoreError(f"the commit of {commit.name!r} has neither segments nor a schema: add the schema")
                names = [f"{secrets.token_hex(8)}.arrows"]
                self.writer(names[0], commit.schema, reserve=self._quota.reserve).close()  # with the lock
                paths = [self._directory.staged_path(names[0])]
            before = () if previous is None else (*previous.before, previous.key)
            if before and new_lineage:
                before = (commit.key, *before)
            segments = [self._files.open(path) for path in paths]
            for segment in segments[len(paths) - len(names) :]:  # not those of the previous version
                segment.check_whole()
            for segment in segments:
                segment.check_metadata(max_metadata)
            _check_one_schema(commit.name, segments)
            serial = self.next_serial()
            part = Part(
                f"{serial:014}-{secrets.token_hex(6)}",
                "",
                secrets.token_bytes(16),
                sum(segment.rows for segment in segments),
                sum(segment.nbytes for segment in segments),
                serial=serial,
            )
            version = Version.of(
                commit,
                segments[0].schema.serialize().to_pybytes(),
                time.time(),
                [part],
                before=before,
                prepared=prepared,
                segments_digest=digest,
            )
            on_disk = previous is not None and not self._places.in_memory(previous)
            opened = {path: FD / str(segment.descriptor) for path, segment in zip(paths, segments, strict=True)}

            def copy(source: Path, target: Path) -> None:
                # Making room may close the memfd at `source`, and another file may get the number of its descriptor.
                self._quota.copy(opened[source], target, "" if previous is None else previous.name)

            self._places.commit(version, paths, copy, on_disk)
            if pending:
                version = self._places.mark(version, prepared=True)
            self._unstage_committed(names)
            return version

    def _find_repeated(self, commit: Commit, digest: str, pending: bool) -> Version | None:
        """Return the version of an earlier call with the same key, dataset and segments, or None.

        A prepared version of another attempt is removed. Raises StoreError if the key is not free for this attempt.
        """
        existing = self.by_key(commit.key)
        if existing is None:
            return None
        if existing.name != commit.name:
            raise StoreError(
                f"nothing was committed to {commit.name!r}: its key {commit.key!r} is that of a commit of "
                f"{existing.name!r}; use another key"
            )
        if existing.number > commit.number > 0:
            raise StoreError(
                f"this attempt to commit {commit.name!r} came too late: a later one with the same key has been prepared"
            )
        # A part of a distributed commit has no rows of earlier commits, in contrast to a pending append.
        is_same = not pending and existing.segments_digest == digest and not existing.before
        if is_same and not self._are_written_again(commit.segment_names, existing):
            return existing
        if existing.prepared:
            self.eviction.evict(existing)
        elif existing.whole:
            raise StoreError(
                f"nothing was committed to {commit.name!r}: the store has published a version with the key "
                f"{commit.key!r}, which the catalog does not know; write the segments again, and use another key"
            )
        # Else only a lost database, or one from which a backup was restored, knew the version of this part.
        return None

    def _are_written_again(self, names: Sequence[str], version: Version) -> bool:
        """Return whether staged segments with these names are not those of a version, which had the same names."""
        _, place = self._places.find(version)
        committed = place.sizes(version)
        paths = [self._memfds.staged_path(name) or self._directory.staged_path(name) for name in names]
        return any(path.exists() and path.stat().st_ino not in committed for path in paths)

    def _unstage_committed(self, names: Sequence[str]) -> None:
        """Remove committed segments from the staging directory. Errors are logged only: the commit has succeeded."""
        try:
            self._unstage(names)
        except OSError as error:
            _log.warning(
                "removal of a committed segment from the stage failed, it is tried again: error=%s", str(error)
            )

    def _staged_path(self, name: str) -> Path:
        path = self._memfds.staged_path(name) or self._directory.staged_path(name)
        if not os.path.lexists(path):  # opening the file checks its type
            raise StoreError(
                f"the segment {name!r} is not in {str(self.staging)!r} any more: a segment that is not committed "
                f"within {self._staging_timeout:g} seconds after it was written is removed (--forget); write it again"
            )
        return path

    def confirm(self, version: Version, whole: bool) -> None:
        """Record that a prepared version was published.

        Args:
            version: The version.
            whole: Whether the version is all of the dataset, not one host's part.
        """
        with self._locked:
            current, _ = self._places.find(version)
            self._places.record_published(self._update(current, prepared=False, whole=whole))

    def use_number(self, name: str, number: int) -> None:
        """Record durably that a version of `name` gets this number, which is not in the store. Raises StoreError."""
        with self._locked:
            self._places.use_number(name, number)

    def commit_keys(self) -> Sequence[CommitKey]:
        """Return the keys that were recorded with `record_keys` and are not too old."""
        with self._locked:
            return self._places.commit_keys()

    def record_keys(self, keys: Sequence[CommitKey], *, earlier: bool = False) -> None:
        """Record durably that commits with these keys were made or aborted. Known keys stay.

        Args:
            keys: The keys, in the order of their commits.
            earlier: Whether they are earlier than the recorded keys. See `Keys.record`.

        Raises:
            StoreError: The keys cannot be recorded.
        """
        with self._locked:
            self._places.record_keys(keys, earlier)

    def withhold(self, version: Version) -> None:
        """Record durably that a version was not published, because it cannot be removed now. Raises StoreError."""
        with self._locked:
            self._places.confirm(self._places.mark(version, prepared=True))

    def record_published(self, version: Version) -> None:
        """Record that a pending version was published, unless it is gone already.

        Its number is recorded apart from its manifest, which may be damaged later. The store then still knows that the
        dataset has had this version, and that it is lost. Errors are logged only.
        """
        with self._locked:
            if version.id not in self._contents:
                return
            try:
                self._places.record_published(self._places.mark(version, prepared=False))
            except StoreError as error:
                _log.warning("the number of a version has no second record: error=%s", str(error))

    def _update(self, version: Version, **changes: Any) -> Version:
        updated = replace(version, **changes)
        if updated != version:
            self._places.confirm(updated)
        return updated

    # Removing

    def staged_names(self) -> list[str]:
        """Return the names of the segments that are not committed yet: files, finished and unfinished, and memfds."""
        with self._locked:
            memfds = self._memfds.staged_names()
        with os.scandir(self._directory.staging) as entries:
            return [*memfds, *(entry.name for entry in entries if entry.is_file(follow_symlinks=False))]

    def discard(self, names: Iterable[str]) -> None:
        """Remove segments from the staging directory. Missing ones are ignored. Raises StoreError."""
        with self._locked, store_errors(f"removing segments from {self.staging}"):
            self._unstage([*names])

    def _unstage(self, names: Sequence[str]) -> None:
        for name in names:
            self._memfds.unstage(name)
            self._directory.staged_path(name).unlink(missing_ok=True)
        self._quota.settle(names)

    def remove(self, *versions: Version) -> None:
        """Remove versions. Their readers are not disturbed, and keep the memory until they have finished.

        Args:
            versions: The versions, in the order of their numbers. They are removed in this order.

        Raises:
            StoreError: A version cannot be removed durably. That version still exists, and so do the later versions of
                its dataset.
        """
        with self._locked:
            self._places.remove(*versions)

    def record_dropped(self, *versions: Version) -> None:
        """Record versions as dropped that `remove` has failed to remove. They are gone; `sweep` removes the files.

        Raises:
            StoreError: The record cannot be made durable.
        """
        with self._locked:
            self._places.record_dropped(*versions)

    def clear(self) -> None:
        """Remove all versions, the segments that wait for a commit, and the trash that no process uses.

        Raises:
            StoreError: A version or a segment cannot be removed.
        """
        with self._locked:
            self.remove(*self.versions())
            self.discard(name for name in self.staged_names() if not name.endswith(PARTIAL_SUFFIX))
            self.sweep()
            self._places.empty_trash()

    def sweep(self) -> None:
        """Remove unfinished files without a writer, segments that were not committed in time, and unused trash."""
        with self._locked:
            self._places.sweep(self._staging_timeout)

    def close(self) -> None:
        """Unlock the directory, so that another process can own it. Files stay; memfds are closed."""
        if self.is_inherited:
            return
        with self._lock:  # an operation in progress ends first
            self._is_closed = True
            self._undo.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_one_schema(name: str, segments: Sequence[Segment]) -> None:
    """Raise StoreError if the segments have different schemas."""
    for segment in segments[1:]:
        if segment.message(0).header != segments[0].message(0).header:
            difference = schema_difference(segments[0].schema, segment.schema)
            raise StoreError(f"the segments of {name!r} must have one schema, and in the added ones {difference}")


def _digest(names: Sequence[str]) -> str:
    return hashlib.sha256("/".join(names).encode()).hexdigest()
