"""A directory of committed segments, which outlives whoever wrote it and whoever serves it.

    STORE/                      one owner at a time, who has it locked
        id                      tells this store from every other
        numbers                 the number of the last version of each dataset that is here no more
        staging/NAME.part       is being written, and locked by its writer
        staging/NAME            is whole, and waits to be committed
        staging/VERSION.new/    is being committed
        segments/VERSION/       is committed: 0000.arrows, 0001.arrows ... and manifest.json. An entry without a
                                manifest that can be read is set aside: it stays, and nothing of it is served
        trash/                  was removed; somebody may still read it

All segments of a version become visible by one rename. Whatever the moment at which a process is killed, opening the
store again shows exactly what was committed, and removes the halves of the rest. Segments are Arrow IPC streams that
any tool can open; they are read-only.

The limit counts the blocks of every segment in the directory, those in the trash too for as long as anybody has them
mapped: so it is the memory in use, not the memory that is listed. It counts what was handed over by descriptor too:
sealed memfds, which have no name, and so go when their owner ends.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa

from dissociated.base.buffers import MAX_METADATA
from dissociated.base.fork import ProcessBound
from dissociated.base.oserrors import store_errors
from dissociated.codec.difference import schema_difference
from dissociated.codec.options import WriteOptions
from dissociated.errors import StoreError
from dissociated.store.admission import Quota
from dissociated.store.directory import Directory, SetAside, Version
from dissociated.store.eviction import Eviction, Policy
from dissociated.store.files import Reserve
from dissociated.store.memfds import Memfds
from dissociated.store.numbers import Removed
from dissociated.store.places import Places, Usage
from dissociated.store.segment import Segment, SegmentWriter
from dissociated.store.segment_cache import OpenSegments, SegmentFiles
from dissociated.store.trash import reuse_bytes

_log = logging.getLogger(__name__)

#: Seconds after which a segment that is whole and was never committed is taken for forgotten.
FORGOTTEN = 86_400.0


class Store(ProcessBound):
    """The one owner of a store's directory, which is made where there is none. Close it, or use it in a `with`.

    `limit` is how many bytes it may take, and `policy` what happens then; `spill` is the directory on disk for
    Policy.SPILL. A segment that is whole and was not committed for `forgotten` seconds is removed. Whoever serves the
    store tells `eviction` what is in use, and is told by it what goes.

    Raises StoreError where another process owns the directory, or it cannot be used.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        limit: int | None = None,
        policy: Policy = Policy.REFUSE,
        spill: str | os.PathLike[str] | None = None,
        forgotten: float = FORGOTTEN,
    ) -> None:
        if (policy is Policy.SPILL) != (spill is not None):
            raise StoreError("a store that spills needs a directory to spill to, and no other store takes one")
        self._forgotten = forgotten
        self._lock = threading.RLock()
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
    def _locked(self) -> AbstractContextManager[object]:
        """The lock of what this process knows of the store. Raises ForkedError in its children."""
        self.check_process()
        return self._lock

    @property
    def directory(self) -> Path:
        """Where it is."""
        return self._directory.path

    @property
    def staging(self) -> Path:
        """Where writers put segments."""
        return self._directory.staging

    @property
    def id(self) -> str:
        """Tells this store from every other, for as long as it exists."""
        return self._directory.id

    # What is in it

    def versions(self) -> list[Version]:
        """Everything that is committed, in the order in which it was."""
        with self._locked:
            return [*self._contents]

    def serial(self) -> int:
        """A number that is higher than those of all versions before, and lower than those of all to come."""
        with self._locked:
            self._serial = max(self._serial + 1, self._places.last_serial + 1, int(time.time() * 1000))
            return self._serial

    def current(self, name: str) -> Version | None:
        """The version of `name` that was committed last, if there is one."""
        with self._locked:
            return next(iter(self._contents.named(name)[-1:]), None)

    def named(self, name: str) -> list[Version]:
        """The versions of `name` that are known to be published and whole, in the order of their commits."""
        with self._locked:
            return self._contents.named(name)

    def version(self, id: str) -> Version | None:
        """The version with this id, if it is still there."""
        with self._locked:
            found = self._contents.get(id)
            return None if found is None else found[0]

    def removed(self) -> Mapping[str, Removed]:
        """Return the records of the datasets whose last versions are gone from the store."""
        with self._locked:
            return self._places.removed()

    def prepared(self) -> list[Version]:
        """The versions of which it is not known here whether they were published."""
        with self._locked:
            return self._contents.prepared()

    def by_key(self, key: str) -> Version | None:
        """What was committed with this key, if it is still there."""
        with self._locked:
            return self._contents.by_key(key)

    @property
    def changes(self) -> int:
        """How often anything was committed, confirmed, moved or removed: the same while all is as it was."""
        with self._locked:
            return self._contents.changes

    def changed(self, since: int) -> list[str] | None:
        """The ids of what has become another after so many `changes`; None where they were too many to know."""
        with self._locked:
            return self._contents.changed(since)

    def segments(self, version: Version) -> OpenSegments:
        """The segments of a version, opened now or lately. Who has them reads on, whatever becomes of the version.

        Raises StoreError where they cannot be read, or the version is not there any more.
        """
        opened = self._cache.get(version.id)  # without the lock: whoever reads shall not wait for who makes room
        if opened is not None:
            return opened
        with self._locked:  # nothing is removed meanwhile, so what is opened is this version and nothing else
            opened = self._cache.get(version.id)
            if opened is None:
                _, place = self._places.find(version)
                opened = OpenSegments(self._files.open(path) for path in place.files(version))
                if not opened:
                    raise StoreError(f"the segments of {version.name!r} in {self.directory} are gone")
                self._cache.put(version.id, opened)
            return opened

    @property
    def set_aside(self) -> Sequence[SetAside]:
        """The entries among its versions that were none, or could not be read, when it was opened."""
        return self._places.set_aside

    def usage(self) -> Usage:
        """What it takes now."""
        with self._locked:
            return self._quota.usage()

    # Writing

    def writer(
        self, name: str, schema: pa.Schema, options: WriteOptions | None = None, reserve: Reserve | None = None
    ) -> SegmentWriter:
        """A writer of the segment `name` in the staging directory, to be committed.

        Its room is reserved here, or by `reserve`, which then calls this store's.
        """
        return SegmentWriter(self._directory.staged(name), schema, options, reserve or self.reserve)

    def reserve(self, name: str, size: int, wish: int = 0) -> int:
        """Make sure that the file `name` in the staging directory can grow to `size` bytes, or to `wish`.

        Its blocks are allocated, so that neither this store's limit nor a full file system can come between. Returns
        how many bytes there is room for: more than `size` only where nothing has to go for it. Raises StoreFull
        where there is no room, and none can be made now.
        """
        with self._locked:
            return self._quota.reserve(name, size, wish)

    def ensure_room(self, name: str, size: int) -> None:
        """Make room for so many bytes of `name`, which are about to be written, at once or not at all.

        Whoever knows how much there will be asks this first: what goes for the beginning of something that does not
        fit is lost for nothing. Raises StoreFull where there is no room, and none can be made now.
        """
        with self._locked:
            self._quota.ensure_room(name, size)

    def hand_over(self, descriptor: int) -> str:
        """Take a sealed memfd as a segment to be committed, where it lies. Returns its name.

        The descriptor stays yours. The memory counts against the limit, and goes when this store is closed. Raises
        StoreError where it is not sealed or holds no Arrow IPC stream or file, and where there is no room.
        """
        description = "the memory that was handed over"
        with self._lock, store_errors(description):
            memfd = self._memfds.open(descriptor)
            if memfd is None:
                raise StoreError(
                    "what was handed over could still be changed: only memfds that are sealed against writing, "
                    "shrinking and growing are taken"
                )
            try:
                Segment.open(memfd.path, description)
                self._quota.admit(description, memfd.size, 0 if self._memfds.counts(memfd) else memfd.size)
                return self._memfds.stage(memfd)
            except BaseException:
                self._memfds.discard(memfd)
                raise

    def commit(
        self,
        name: str,
        staged: Sequence[str],
        *,
        key: str,
        schema: pa.Schema | None = None,
        append: bool = False,
        prepared: bool = False,
        tags: Mapping[str, str] | None = None,
        ttl: float | None = None,
        version: int = 0,
        catalog: int = 0,
        max_metadata: int = MAX_METADATA,
    ) -> Version:
        """Make these segments in the staging directory a version of `name`, at once and for good.

        `version` is the number that the catalog gave it; 0 where it will. `catalog` tells that catalog from all others.

        With `append` they follow those of the version before. Where there is no segment at all, `schema` says what
        the dataset is. A repeated call, by its `key`, returns what the first one made; but if that was only prepared,
        and of other segments, it is forgotten: whoever wrote it tries again from the beginning. Raises StoreError.
        """
        with self._locked:
            digest = _digest(staged)
            existing = self.by_key(key)
            if existing is not None and existing.prepared and existing.staged != digest:
                self.eviction.evict(existing)
                existing = None
            if existing is not None:
                self._unstage_committed(staged)
                return self._update(existing, version=version, catalog=catalog) if version else existing
            self._quota.check(name)
            previous = self.current(name) if append else None
            paths = [self._staged(one) for one in staged]
            if previous is not None:
                _, place = self._places.find(previous)
                paths = [*place.files(previous), *paths]
            if not paths:
                if schema is None:
                    raise StoreError(f"{name!r} would have neither segments nor a schema")
                staged = [f"{secrets.token_hex(8)}.arrows"]
                self.writer(staged[0], schema).close()
                paths = [self._directory.staged(staged[0])]
            segments = [self._files.open(path) for path in paths]
            for segment in segments:
                segment.check_metadata(max_metadata)
            made = replace(
                self._make_version(name, segments, key, prepared, tags or {}, ttl),
                before=() if previous is None else (*previous.before, previous.key),
                staged=digest,
                version=version,
                catalog=catalog,
            )
            self._places.commit(made, paths, self._quota.copy)
            self._unstage_committed(staged)
            return made

    def _unstage_committed(self, staged: Sequence[str]) -> None:
        """Remove from the staging directory segments that were committed: whatever fails, that has happened."""
        try:
            self._unstage(staged)
        except OSError as error:
            _log.warning("removing a committed segment from the stage failed, it is tried again: error=%s", str(error))

    def _staged(self, name: str) -> Path:
        path = self._memfds.staged(name) or self._directory.staged(name)
        if not os.path.lexists(path):  # what it is, whoever opens it says
            raise StoreError(
                f"the segment {name} is not in {self.staging} any more: what is not committed within "
                f"{self._forgotten:g} seconds after it was written is removed (--forget); write it again"
            )
        return path

    def _make_version(
        self,
        name: str,
        segments: Sequence[Segment],
        key: str,
        prepared: bool,
        tags: Mapping[str, str],
        ttl: float | None,
    ) -> Version:
        for other in segments[1:]:
            if other.messages[0].header != segments[0].messages[0].header:
                raise StoreError(
                    f"all of {name!r} must have one schema, and in what is added "
                    f"{schema_difference(segments[0].schema, other.schema)}"
                )
        number = self.serial()
        return Version(
            id=f"{number:014}-{secrets.token_hex(6)}",
            number=number,
            name=name,
            key=key,
            ticket=secrets.token_bytes(16),
            created=time.time(),
            prepared=prepared,
            tags=dict(tags),
            ttl=ttl,
            rows=sum(segment.rows for segment in segments),
            nbytes=sum(segment.nbytes for segment in segments),
            schema=segments[0].schema.serialize().to_pybytes(),
        )

    def confirm(self, version: Version, whole: bool, number: int = 0) -> None:
        """A version that was prepared has been published, as the `whole` dataset or as a part of it.

        `number` is that of the version of the dataset, where it has none yet.
        """
        with self._locked:
            known, _ = self._places.find(version)
            self._update(known, prepared=False, whole=whole, version=known.version or number)

    def _update(self, known: Version, **changes: Any) -> Version:
        updated = replace(known, **changes)
        if updated != known:
            self._places.confirm(updated)
        return updated

    # Removing

    def staged(self) -> list[str]:
        """The segments in the staging directory, whole ones and those that are being written."""
        with os.scandir(self._directory.staging) as entries:
            return [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]

    def discard(self, names: Iterable[str]) -> None:
        """Remove these segments from the staging directory, as far as they exist. Raises StoreError."""
        with store_errors(f"removing segments from {self.staging}"):
            self._unstage([*names])

    def _unstage(self, names: Sequence[str]) -> None:
        for name in names:
            self._memfds.unstage(name)
            self._directory.staged(name).unlink(missing_ok=True)
        self._quota.settle(names)

    def remove(self, *versions: Version) -> None:
        """Make versions disappear. Whoever reads them is undisturbed, and keeps their memory for so long.

        Of several, the one that is named last goes last: give them in the order of their commits. Raises StoreError if
        one cannot be removed for good: it is still there then, and so are later ones of its name.
        """
        with self._locked:
            self._places.remove(*versions)

    def spilled(self, version: Version) -> bool:
        """Whether a version lies in the directory on disk."""
        with self._locked:
            return not self._places.in_memory(version)

    def sweep(self) -> None:
        """Remove what nobody needs: halves whose writer is gone, what was not committed for long, trash."""
        with self._locked:
            self._places.sweep(self._forgotten)

    def close(self) -> None:
        """Let somebody else own the directory. Everything stays where it is."""
        if self.is_inherited:
            return
        self._undo.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _digest(staged: Sequence[str]) -> str:
    return hashlib.sha256("/".join(staged).encode()).hexdigest()
