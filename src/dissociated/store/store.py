"""A directory of committed segments, which outlives whoever wrote it and whoever serves it.

    STORE/                      one owner at a time, who has it locked
        id                      tells this store from every other
        staging/NAME.part       is being written, and locked by its writer
        staging/NAME            is whole, and waits to be committed
        staging/VERSION.new/    is being committed
        segments/VERSION/       is committed: 0000.arrows, 0001.arrows ... and manifest.json
        trash/                  was removed; somebody may still read it

All segments of a version become visible by one rename. Whatever the moment at which a process is killed, opening the
store again shows exactly what was committed, and removes the halves of the rest. Segments are Arrow IPC streams that
any tool can open; they are read-only.

The limit counts the blocks of every segment in the directory, those in the trash too for as long as anybody has them
mapped: so it is the memory in use, not the memory that is listed. It counts what was handed over by descriptor too:
sealed memfds, which have no name, and so go when their owner ends.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import shutil
import threading
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from types import TracebackType

import pyarrow as pa

from dissociated.buffers import MAX_METADATA
from dissociated.codec.options import WriteOptions
from dissociated.errors import StoreError, StoreFull
from dissociated.fork import belongs, disown
from dissociated.host import machine_memory
from dissociated.memory.region import pages
from dissociated.oserrors import explained
from dissociated.store.contents import Blocks, Contents
from dissociated.store.directory import Shelf, Version, file_name, sizes
from dissociated.store.files import PART, Reserve, claimed, open_regular
from dissociated.store.memfds import FD, Memfds
from dissociated.store.recent import Opened, Recent
from dissociated.store.segment import Segment, SegmentWriter

#: Seconds after which a segment that is whole and was never committed is taken for forgotten.
FORGOTTEN = 86_400.0
#: What part of the limit, or of the machine's memory, removed segments may keep to be written over; and seconds.
_WARM = 1 / 8
_WARM_SECONDS = 60.0
_WARM_FILES = 64  # since all are looked at whenever something is removed
_WARM_SIZE = 1 << 16  # bytes from which on a file is worth that
_ROUNDING = 1 << 20  # bytes that a file system may take beside what it was asked for


class Policy(Enum):
    """What happens when the limit of a store is reached."""

    #: whoever writes is told
    REFUSE = "refuse"
    #: the oldest versions that nobody reads are removed
    EVICT = "evict"
    #: the oldest versions move to a directory on disk, and are served from there
    SPILL = "spill"


_ADVICE = {
    Policy.REFUSE: "drop datasets that are not needed, or give it a higher limit, or the policy evict or spill",
    Policy.EVICT: "what is left is being read, or not committed yet: wait for that, or give it a higher limit",
    Policy.SPILL: "what is left is being read, or not committed yet: wait for that, or give it a higher limit",
}


@dataclass(frozen=True)
class Usage:
    """What a store takes, in bytes. `limit` is None where there is none."""

    limit: int | None
    committed: int
    staged: int
    trash: int
    spilled: int

    @property
    def total(self) -> int:
        """What counts against the limit."""
        return self.committed + self.staged + self.trash


class Store:
    """The one owner of a store's directory, which is made where there is none. Close it, or use it in a `with`.

    `limit` is how many bytes it may take, and `policy` what happens then; `spill` is the directory on disk for
    Policy.SPILL. A segment that is whole and was not committed for `forgotten` seconds is removed. `in_use` tells
    whether anybody reads a version, and `removed` and `moved` are called after one has been removed to make room or
    has moved to disk: whoever serves the store sets them.

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
        self.limit = limit
        self.policy = policy
        self._forgotten = forgotten
        self.in_use: Callable[[Version], bool] = lambda version: False
        self.removed: Callable[[Version], None] = lambda version: None
        self.moved: Callable[[Version], None] = lambda version: None
        self._lock = threading.RLock()
        with ExitStack() as undo:
            self._shelf = undo.enter_context(Shelf(Path(directory)))
            self._disk = undo.enter_context(Shelf(Path(spill))) if spill is not None else None
            self._memfds = undo.enter_context(closing(Memfds()))
            self._warm = int(_WARM * (limit or machine_memory())) if _in_memory(self._shelf.directory) else 0
            self._contents: Contents[Shelf | Memfds] = Contents()
            self._serial = 0
            self._blocks: dict[Shelf | Memfds, Blocks] = defaultdict(Blocks)  # what is committed in each
            self._recent = Recent()
            undo.callback(self._recent.clear)
            self._files: weakref.WeakValueDictionary[tuple[int, int], Segment] = weakref.WeakValueDictionary()
            self._find_again()
            self.sweep()
            self._undo = undo.pop_all()
        belongs(self)

    def forked(self) -> None:
        disown(self)

    @property
    def directory(self) -> Path:
        """Where it is."""
        return self._shelf.directory

    @property
    def staging(self) -> Path:
        """Where writers put segments."""
        return self._shelf.staging

    @property
    def id(self) -> str:
        """Tells this store from every other, for as long as it exists."""
        return self._shelf.id

    # What is in it

    def versions(self) -> list[Version]:
        """Everything that is committed, in the order in which it was."""
        with self._lock:
            return [*self._contents]

    def serial(self) -> int:
        """A number that is higher than those of all versions before, and lower than those of all to come."""
        with self._lock:
            self._serial = max(self._serial + 1, self._contents.last + 1, int(time.time() * 1000))
            return self._serial

    def current(self, name: str) -> Version | None:
        """The version of `name` that was committed last, if there is one."""
        with self._lock:
            return next(iter(self._contents.named(name)[-1:]), None)

    def version(self, id: str) -> Version | None:
        """The version with this id, if it is still there."""
        with self._lock:
            found = self._contents.get(id)
            return None if found is None else found[0]

    def prepared(self) -> list[Version]:
        """The versions of which it is not known here whether they were published."""
        with self._lock:
            return self._contents.prepared()

    def by_key(self, key: str) -> Version | None:
        """What was committed with this key, if it is still there."""
        with self._lock:
            return self._contents.by_key(key)

    @property
    def changes(self) -> int:
        """How often anything was committed, confirmed, moved or removed: the same while all is as it was."""
        with self._lock:
            return self._contents.changes

    def changed(self, since: int) -> list[str] | None:
        """The ids of what has become another after so many `changes`; None where they were too many to know."""
        with self._lock:
            return self._contents.changed(since)

    def segments(self, version: Version) -> Opened:
        """The segments of a version, opened now or lately. Who has them reads on, whatever becomes of the version.

        Raises StoreError where they cannot be read, or the version is not there any more.
        """
        opened = self._recent.get(version.id)  # without the lock: whoever reads shall not wait for who makes room
        if opened is not None:
            return opened
        with self._lock:  # nothing is removed meanwhile, so what is opened is this version and nothing else
            opened = self._recent.get(version.id)
            if opened is None:
                _, shelf = self._find(version)
                opened = Opened(self._open(path) for path in shelf.files(version))
                if not opened:
                    raise StoreError(f"the segments of {version.name!r} in {self.directory} are gone")
                self._recent.put(version.id, opened)
            return opened

    def _open(self, path: Path) -> Segment:
        """The segment there. One that is open, for another version, is not opened again: so appending stays cheap."""
        handed = path.parent == FD  # which is a link to a memfd, made by the kernel
        with explained(f"opening {path}"):
            status = path.stat() if handed else path.lstat()
        file = status.st_dev, status.st_ino
        found = self._files.get(file)
        if found is None:
            self._files[file] = found = Segment.open(path, follow=handed)
        return found

    def usage(self) -> Usage:
        """What it takes now."""
        with self._lock:
            shelf = self._shelf
            committed = self._blocks[shelf]
            staged = {inode: size for inode, size in sizes(shelf.staging).items() if inode not in committed}
            trash = {inode: size for inode, size in sizes(shelf.trash).items() if inode not in committed}
            trash = {inode: size for inode, size in trash.items() if inode not in staged}
            held = self._blocks[self._memfds]
            handed, kept = self._memfds.uncommitted(held)
            spilled = self._blocks[self._disk].total if self._disk else 0
        return Usage(
            self.limit, committed.total + held.total, sum(staged.values()) + handed, sum(trash.values()) + kept, spilled
        )

    # Writing

    def writer(
        self, name: str, schema: pa.Schema, options: WriteOptions | None = None, reserve: Reserve | None = None
    ) -> SegmentWriter:
        """A writer of the segment `name` in the staging directory, to be committed.

        Its room is reserved here, or by `reserve`, which then calls this store's.
        """
        return SegmentWriter(self._shelf.staged(name), schema, options, reserve or self.reserve)

    def reserve(self, name: str, size: int, wish: int = 0) -> int:
        """Make sure that the file `name` in the staging directory can grow to `size` bytes, or to `wish`.

        Its blocks are allocated, so that neither this store's limit nor a full file system can come between. Returns
        how many bytes there is room for: more than `size` only where nothing has to go for it. Raises StoreFull
        where there is no room, and none can be made now.
        """
        path = self._shelf.staged(name)
        with self._lock, explained(f"reserving room for {path}"):
            descriptor = open_regular(path, os.O_WRONLY)
            try:
                has = os.fstat(descriptor).st_blocks * 512
                size = pages(size)
                if wish > size and self._fits(wish - has) and _allocate(descriptor, wish):
                    return wish
                self._allocate(descriptor, name, size, size - has)
                return size
            finally:
                os.close(descriptor)

    def expect(self, name: str, size: int) -> None:
        """Make room for so many bytes of `name`, which are about to be written, at once or not at all.

        Whoever knows how much there will be asks this first: what goes for the beginning of something that does not
        fit is lost for nothing. Raises StoreFull where there is no room, and none can be made now.
        """
        with self._lock, explained(f"making room in {self.directory}"):
            self._admit(repr(name), size, size)
            if size > self._free():
                self._make_room(lambda: size - self._free())
            if size > self._free():
                raise self._no_space(repr(name), size)

    def hand_over(self, descriptor: int) -> str:
        """Take a sealed memfd as a segment to be committed, where it lies. Returns its name.

        The descriptor stays yours. The memory counts against the limit, and goes when this store is closed. Raises
        StoreError where it is not sealed or holds no Arrow IPC stream or file, and where there is no room.
        """
        what = "the memory that was handed over"
        with self._lock, explained(what):
            memfd = self._memfds.open(descriptor)
            if memfd is None:
                raise StoreError(
                    "what was handed over could still be changed: only memfds that are sealed against writing, "
                    "shrinking and growing are taken"
                )
            try:
                Segment.open(memfd.path, what)
                self._admit(what, memfd.size, 0 if self._memfds.knows(memfd) else memfd.size)
                return self._memfds.stage(memfd)
            except BaseException:
                os.close(memfd.descriptor)
                raise

    def _fits(self, missing: int) -> bool:
        return self.limit is None or missing <= 0 or self.usage().total + missing <= self.limit

    def _admit(self, name: str, size: int, missing: int) -> None:
        """Make room under the limit."""
        if self.limit is not None and size > self.limit:
            raise StoreError(f"{self._full(name, missing)}: it would never fit")
        if not self._fits(missing):
            self._make_room(lambda: self.usage().total + missing - (self.limit or 0))
        if not self._fits(missing):
            raise StoreFull(f"{self._full(name, missing)}: {_ADVICE[self.policy]}")

    def _allocate(self, descriptor: int, name: str, size: int, missing: int) -> None:
        self._admit(name, size, missing)
        if not _allocate(descriptor, size):
            self._make_room(lambda: missing - self._free())
            if not _allocate(descriptor, size):
                raise self._no_space(name, missing)

    def _no_space(self, name: str, missing: int) -> StoreFull:
        return StoreFull(
            f"the file system of {self.directory} is full: {name} needs {missing:,} bytes more and "
            f"{self._free():,} are free: drop datasets that are not needed, enlarge it (in Docker, "
            "--shm-size), or choose another directory"
        )

    def _free(self) -> int:
        status = os.statvfs(self.directory)
        return status.f_bavail * status.f_frsize

    def _full(self, name: str, missing: int) -> str:
        usage = self.usage()
        return (
            f"the store {self.directory} is full: it holds {usage.total:,} bytes of at most {self.limit:,}, and {name} "
            f"needs {missing:,} more"
        )

    def _make_room(self, lacking: Callable[[], int]) -> None:
        """Give back as many bytes as are `lacking`: what was replaced goes first, then what the policy allows.

        Nothing goes where all that may go would not be enough.
        """
        self._empty_trash(0)
        while (lack := lacking()) > 0 and (going := self._enough(lack)):
            for version in going:
                if self.policy is Policy.SPILL and not self._contents.is_replaced(version):
                    self._spill(version)
                    self.moved(version)
                else:
                    self._give_up(version)
            self._empty_trash(0)  # what somebody has mapped all the same is not back: then there is another round

    def _enough(self, lack: int) -> list[Version]:
        """The versions to give up, in this order, to get so many bytes back; none where that cannot be."""
        going: dict[str, Version] = {}
        gone: dict[Shelf | Memfds, Counter[int]] = defaultdict(Counter)
        for version in self._expendable(going):
            _, shelf = self._find(version)
            going[version.id] = version
            for inode in shelf.sizes(version):
                gone[shelf][inode] += 1
                lack -= self._blocks[shelf].freed(inode, gone[shelf][inode])
            if lack <= 0:
                return [*going.values()]
        return []

    def _expendable(self, going: Mapping[str, Version]) -> Iterator[Version]:
        """What may go, the first first. What is taken of it is in `going` when the next is asked for."""
        for version in self._contents.replaced():
            if self._is_here(version) and not self.in_use(version):
                yield version
        if self.policy is Policy.REFUSE:
            return
        for version in self._contents:
            if version.id in going or version.prepared or not self._is_here(version) or self.in_use(version):
                continue
            others = (one for one in self._contents.named(version.name) if one.id not in going and one != version)
            if self.policy is Policy.SPILL or not any(others):  # else, after a restart, an older one would be the last
                yield version

    def _is_here(self, version: Version) -> bool:
        """Whether it takes memory."""
        return self._find(version)[1] is not self._disk

    def _give_up(self, version: Version) -> None:
        self.remove(version)
        self.removed(version)
        self._empty_trash(0)

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
        max_metadata: int = MAX_METADATA,
    ) -> Version:
        """Make these segments in the staging directory a version of `name`, at once and for good.

        With `append` they follow those of the version before. Where there is no segment at all, `schema` says what
        the dataset is. A repeated call, by its `key`, returns what the first one made; but if that was only prepared,
        and of other segments, it is forgotten: whoever wrote it tries again from the beginning. Raises StoreError.
        """
        with self._lock:
            told = _digest(staged)
            done = self.by_key(key)
            if done is not None and done.prepared and done.staged != told:
                self._give_up(done)
                done = None
            if done is not None:
                self._unstage(staged)
                return done
            self._check_limit(name)
            before = self.current(name) if append else None
            paths = [self._memfds.staged(one) or self._shelf.staged(one) for one in staged]
            if before is not None:
                _, shelf = self._find(before)
                paths = [*shelf.files(before), *paths]
            if not paths:
                if schema is None:
                    raise StoreError(f"{name!r} would have neither segments nor a schema")
                staged = [f"{secrets.token_hex(8)}.arrows"]
                self.writer(staged[0], schema).close()
                paths = [self._shelf.staged(staged[0])]
            segments = [self._open(path) for path in paths]
            for segment in segments:
                segment.check_metadata(max_metadata)
            version = replace(
                self._made(name, segments, key, prepared, tags or {}, ttl),
                before=() if before is None else (*before.before, before.key),
                staged=told,
            )
            self._commit(version, paths)
            self._unstage(staged)
            return version

    def _made(
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
                    f"the segments of {name!r} do not have one schema: {other.name} differs from the first"
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

    def _check_limit(self, name: str) -> None:
        """Raise StoreError where somebody has written what was not reserved."""
        if self.limit is not None and (total := self.usage().total) > self.limit + _ROUNDING:
            raise StoreError(
                f"{name!r} is not committed: the store {self.directory} holds {total:,} bytes, and its limit is "
                f"{self.limit:,}. Drop what is not needed; writers must reserve room before they write"
            )

    def _commit(self, version: Version, paths: Sequence[Path]) -> None:
        if self._memfds.has(paths):
            self._memfds.publish(version, paths)
            self._place(version, self._memfds)
            return
        with explained(f"committing {version.name!r} in {self.directory}"):
            draft = self._shelf.staging / f"{version.id}.new"
            draft.mkdir(mode=0o700)
            try:
                for index, path in enumerate(paths):
                    file = draft / file_name(index)
                    try:
                        os.link(path, file)
                    except OSError as error:  # what was spilled lies in another file system, and a memfd in none
                        if error.errno != errno.EXDEV:
                            raise
                        self._copy(path, file)
                    os.chmod(file, 0o400)
                self._shelf.publish(version, draft)
            except BaseException:
                shutil.rmtree(draft, ignore_errors=True)
                raise
        self._place(version, self._shelf)

    def _place(self, version: Version, shelf: Shelf | Memfds) -> None:
        self._contents.put(version, shelf)
        self._blocks[shelf].add(shelf.sizes(version))

    def _copy(self, source: Path, target: Path) -> None:
        """One file, room for it reserved."""
        part = self._shelf.staging / f"{secrets.token_hex(8)}{PART}"
        try:
            part.touch(0o600)
            self.reserve(part.name, source.stat().st_size)
            _copy(source, part)
            part.rename(target)
        finally:
            part.unlink(missing_ok=True)

    def confirm(self, version: Version, whole: bool) -> None:
        """A version that was prepared has been published, as the `whole` dataset or as a part of it."""
        with self._lock:
            there, shelf = self._find(version)
            if there.prepared or there.whole != whole:
                confirmed = replace(there, prepared=False, whole=whole)
                with explained(f"confirming {version.name!r} in {self.directory}"):
                    shelf.confirm(confirmed)
                self._contents.put(confirmed, shelf)

    # Removing

    def staged(self) -> list[str]:
        """The segments in the staging directory, whole ones and those that are being written."""
        with os.scandir(self._shelf.staging) as entries:
            return [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]

    def discard(self, names: Iterable[str]) -> None:
        """Remove these segments from the staging directory, as far as they exist."""
        self._unstage(names)

    def _unstage(self, names: Iterable[str]) -> None:
        for name in names:
            self._memfds.unstage(name)
            self._shelf.staged(name).unlink(missing_ok=True)

    def remove(self, *versions: Version) -> None:
        """Make versions disappear. Whoever reads them is undisturbed, and keeps their memory for so long.

        Of several, the one that is named last goes last: give them in the order of their commits.
        """
        with self._lock:
            for version in versions:
                found = self._contents.pop(version.id)
                if found is not None:
                    self._recent.pop(version.id)
                    with explained(f"removing {version.name!r} from {self.directory}"):
                        self._take_from(found[1], version)
            self._empty_trash(self._warm)

    def _spill(self, version: Version) -> None:
        assert self._disk is not None
        _, shelf = self._find(version)
        with explained(f"moving {version.name!r} to {self._disk.directory}"):
            draft = self._disk.staging / f"{version.id}.new"
            draft.mkdir(mode=0o700)
            try:
                for index, path in enumerate(shelf.files(version)):
                    file = draft / file_name(index)
                    _copy(path, file)
                    os.chmod(file, 0o400)
                self._disk.publish(version, draft)
            except BaseException:
                shutil.rmtree(draft, ignore_errors=True)
                raise
            self._place(version, self._disk)
            self._recent.pop(version.id)
            self._take_from(shelf, version)

    def _take_from(self, shelf: Shelf | Memfds, version: Version) -> None:
        files = shelf.sizes(version)
        shelf.remove(version)
        self._blocks[shelf].discard(files)

    def _find_again(self) -> None:
        """What was committed before."""
        places: dict[str, tuple[Version, Shelf]] = {one.id: (one, self._shelf) for one in self._shelf.committed()}
        if self._disk is not None:
            for version in self._disk.committed():
                if version.id in places:  # it has moved to disk, and its mover was killed before the last step
                    self._shelf.remove(version)
                places[version.id] = version, self._disk
        for version, shelf in sorted(places.values(), key=lambda place: place[0].number):
            self._place(version, shelf)

    def spilled(self, version: Version) -> bool:
        """Whether a version lies in the directory on disk."""
        with self._lock:
            return self._find(version)[1] is self._disk

    def sweep(self) -> None:
        """Remove what nobody needs: halves whose writer is gone, what was not committed for long, trash."""
        with self._lock:
            self._shelf.sweep(self._forgotten)
            self._memfds.sweep(self._forgotten)
            if self._disk is not None:
                self._disk.sweep(0)
            self._empty_trash(self._warm)

    def _empty_trash(self, keep: int) -> None:
        """Remove what nobody reads any more from the trash; `keep` bytes of it may be written over for a while."""
        self._memfds.empty_trash()
        files = _WARM_FILES
        oldest = time.time() - _WARM_SECONDS
        for path in self._shelf.trash.iterdir():
            descriptor = claimed(path)
            if descriptor is None:
                continue
            status = os.fstat(descriptor)
            lately = status.st_ctime >= oldest  # since when it is in the trash
            if files and lately and _WARM_SIZE <= status.st_size <= keep:
                keep -= status.st_size
                files -= 1
            else:
                path.unlink()
            os.close(descriptor)
        if self._disk is not None:
            for path in self._disk.trash.iterdir():
                path.unlink()

    def _find(self, version: Version) -> tuple[Version, Shelf | Memfds]:
        found = self._contents.get(version.id)
        if found is None:
            raise StoreError(f"{version.name!r} is not in {self.directory} any more")
        return found

    def close(self) -> None:
        """Let somebody else own the directory. Everything stays where it is."""
        self._undo.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _allocate(descriptor: int, size: int) -> bool:
    """Give a file blocks up to `size`. False where the file system is full."""
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return False
        raise
    return True


def _digest(staged: Sequence[str]) -> str:
    return hashlib.sha256("/".join(staged).encode()).hexdigest()


def _copy(source: Path, target: Path) -> None:
    with (
        source.open("rb") as read,
        open(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600), "wb") as written,
    ):
        left = os.fstat(read.fileno()).st_size
        while left:
            copied = os.sendfile(written.fileno(), read.fileno(), None, left)
            if not copied:
                raise StoreError(f"{source} became shorter while it was copied")
            left -= copied
        os.fsync(written.fileno())


def _in_memory(directory: Path) -> bool:
    """Whether a directory lies in a tmpfs."""
    device = os.stat(directory).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, rest = line.partition(" - ")
        if fields.split()[2] == wanted:
            return rest.split()[0] == "tmpfs"
    return False
