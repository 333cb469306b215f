"""A directory of committed versions on a file system. `dissociated.store.store` describes its layout."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dissociated.base.fork import ProcessBound
from dissociated.base.oserrors import store_errors
from dissociated.base.private import open_private_directory, open_private_file
from dissociated.control.version import Version
from dissociated.errors import StoreError
from dissociated.store.files import (
    PARTIAL_SUFFIX,
    claim_unused,
    is_abandoned,
    is_used,
    sync,
    write_atomically,
)
from dissociated.store.keys import Keys
from dissociated.store.layout import (
    KEYS,
    NUMBERS,
    SEGMENTS,
    STAGING,
    TRASH,
    check_staged_name,
    is_draft,
    is_version,
    known_id,
    new_id,
    write_id,
)
from dissociated.store.manifest import (
    DAMAGE,
    MANIFEST,
    decode_lines,
    decode_manifest,
    encode_manifest,
    is_count,
    read_manifest,
)
from dissociated.store.numbers import Numbers, Removal

_log = logging.getLogger(__name__)

_DROPPED = "dropped"  # the file in the directory of a version that was dropped or replaced, and is not removed yet
_REFUSED = "refused.json"  # the manifest of a version that was not published, and could not be recorded as prepared
_SERIAL = re.compile(r"[0-9]{14,19}")  # the beginning of a version's id


def file_name(index: int) -> str:
    """Return the name of the file of a version's segment number `index`."""
    return f"{index:04}.arrows"


@dataclass(frozen=True)
class SetAside:
    """An entry of `segments/` that is no version, or cannot be read. It is neither served nor changed."""

    path: Path
    reason: str
    #: The serial number in its name, or else in its manifest, or else 0. This number is not used again.
    serial: int
    #: The readable part of its manifest.
    manifest: Mapping[str, Any]
    #: The bytes that its files take, by inode.
    sizes: Mapping[int, int]

    @classmethod
    def of(cls, path: Path, reason: str, manifest: bytes) -> SetAside:
        """Describe the entry at `path`, whose `manifest` may be damaged or empty."""
        try:
            plain = json.loads(manifest)
        except DAMAGE:
            plain = decode_lines(manifest)
        plain = plain if isinstance(plain, dict) else {}
        name = path.name.partition("-")[0]
        serial = int(name) if _SERIAL.fullmatch(name) else plain.get("number")
        sizes_by_inode = {} if path.is_symlink() else sizes(path)
        return cls(path, reason, serial if is_count(serial) else 0, plain, sizes_by_inode)

    @property
    def id(self) -> str | None:
        """The id of the version, which is the name of the entry; None if no version has such a name."""
        return self.path.name if is_version(self.path.name) else None

    @property
    def removal(self) -> tuple[str, Removal] | None:
        """The dataset's name and the record of this version's number, if its manifest still has the name.

        If the number is gone, the serial number stands for it: the store's own catalog has assigned no larger one.
        """
        name = self.manifest.get("name")
        if not isinstance(name, str):
            return None
        number = self.number or max(1, self.serial)
        return name, Removal.of(number, lost=True, published=not self.manifest.get("prepared"))

    @property
    def number(self) -> int:
        """The number of the version, or 0 if its manifest does not have it."""
        number = self.manifest.get("version")
        return number if is_count(number) else 0

    def replaces(self, version: Version) -> bool:
        """Return whether this entry is, by its manifest, a later version of the dataset of `version`."""
        return self.manifest.get("name") == version.name and self.serial > version.serial

    def __str__(self) -> str:
        return f"{os.fspath(self.path)!r} is set aside: {self.reason}"  # quoted: the name may not be valid text


class Directory(ProcessBound):
    """A directory of versions, which this process locks during the `with` block, and creates if it is missing.

    Raises StoreError if another process has locked the directory, if it cannot be used, if other users have access to
    it, or if it is not empty and no store.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.staging = self.path / STAGING
        self.segments = self.path / SEGMENTS
        self.trash = self.path / TRASH
        self.id = ""
        self._refused: list[Version] = []  # versions whose commits failed after the rename
        self._put_back: set[str] = set()  # ids of versions whose removals failed after the rename

    def __enter__(self) -> Directory:
        with store_errors(f"the store {self.path}"):
            self._lock = open_private_directory(self.path, create=True)
            try:
                self._own()
            except BaseException:
                os.close(self._lock)
                raise
        self._owned = True
        self.bind_to_process()
        return self

    def after_fork_in_child(self) -> None:
        if self._owned:
            os.close(self._lock)

    def _own(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreError(
                f"the store {str(self.path)!r} belongs to another process, which is still running"
            ) from None
        id = known_id(self._lock, self.path)
        self.id = id or new_id()
        if id is None:
            write_id(self._lock, self.id)
        for name in (STAGING, SEGMENTS, TRASH):
            os.close(open_private_directory(name, within=self._lock, create=True))
        #: The records of datasets whose last version has left this directory.
        self.numbers = Numbers(self.path / NUMBERS)
        #: The keys of the commits that a node without an upstream has made here.
        self.keys = Keys(self.path / KEYS)
        probe = self.trash / "probe"
        os.close(open_private_file(probe, os.O_WRONLY | os.O_CREAT))
        descriptor = claim_unused(probe)
        self._has_kernel_leases = descriptor is not None  # without them, nothing tells whether trash is in use
        if descriptor is not None:
            os.close(descriptor)
        probe.unlink()

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # the last attempt
            self._settle()
        self._owned = False
        os.close(self._lock)

    def staged_path(self, name: str) -> Path:
        """Return the path of a file in the staging directory. Raises StoreError for a name that leads elsewhere."""
        check_staged_name(name)
        return self.staging / name

    def files(self, version: Version) -> list[Path]:
        """Return the paths of the segments of a version, in order."""
        return sorted((self.segments / version.id).glob("*.arrows"))

    def committed(self) -> tuple[list[Version], list[SetAside]]:
        """Return all committed versions, in no particular order, and the entries that are no versions."""
        versions: list[Version] = []
        invalid_entries: list[SetAside] = []
        with store_errors(f"reading {self.segments}"):
            entries = [*self.segments.iterdir()]
        for entry in entries:
            manifest = b""
            try:
                manifest, is_refused = _read_manifest(entry)
                version = _decode(manifest, is_refused)
                if version.id != entry.name:
                    raise StoreError(f"{MANIFEST} is that of {version.id!r}")
            except StoreError as error:
                invalid_entries.append(SetAside.of(entry, str(error), manifest))
            except OSError as error:
                invalid_entries.append(SetAside.of(entry, f"{MANIFEST} cannot be read: {error.strerror}", manifest))
            except DAMAGE as error:
                invalid_entries.append(SetAside.of(entry, f"{MANIFEST} is damaged ({type(error).__name__})", manifest))
            else:
                versions.append(version)
        return versions, invalid_entries

    def holds(self, version: Version) -> bool:
        """Return whether this directory has a version, or has not finished removing it."""
        return (self.segments / version.id).exists() or (self.staging / f"{version.id}.gone").exists()

    def sizes(self, version: Version) -> dict[int, int]:
        """Return the bytes that the segments of a version take, by inode, also if its removal has failed."""
        return sizes(self.segments / version.id) or sizes(self.staging / f"{version.id}.gone")

    def is_used(self, version: Version, names: Mapping[int, int]) -> bool:
        """Return whether some memory of a version would remain in use after its removal.

        This is so if a process has a segment open or mapped, or if a segment has a name outside this store. The
        result is False if there are no kernel leases, which would tell.

        Args:
            version: The version.
            names: The number of names that each inode has in this store.
        """
        return self._has_kernel_leases and any(is_used(path, names[path.stat().st_ino]) for path in self.files(version))

    def describe(self, version: Version, directory: Path) -> None:
        """Write the manifest of a version into `directory`."""
        write_atomically(directory / MANIFEST, encode_manifest(version))

    def confirm(self, version: Version) -> None:
        """Replace the manifest of a committed version, durably, after its attributes have changed."""
        committed = self.segments / version.id
        self.describe(version, committed)
        sync(committed)

    def _publish(self, version: Version, draft: Path) -> None:
        """Turn a draft into a version with one rename. If this raises OSError, the version does not exist."""
        self.describe(version, draft)
        for path in draft.iterdir():
            sync(path)
        sync(draft)
        committed = self.segments / version.id
        draft.rename(committed)
        try:
            sync(self.segments)
        except OSError:
            self._refused.append(version)
            self._settle()
            raise

    def _settle(self) -> None:
        """Undo the failed commits and removals that could not be undone when they failed. Raises OSError."""
        self._put_removed_back()
        while self._refused:
            self.remove(replace(self._refused[0], prepared=True))  # its writer was told that the commit failed
            self._refused.pop(0)

    def _put_removed_back(self) -> None:
        for id in sorted(self._put_back):
            with suppress(FileNotFoundError):
                (self.staging / f"{id}.gone").rename(self.segments / id)
            self._put_back.remove(id)

    def commit(self, version: Version, paths: Sequence[Path], copy: Callable[[Path, Path], None]) -> None:
        """Commit segments as a version: link them into a draft, and publish it.

        Args:
            version: The new version.
            paths: The segments.
            copy: Copies a segment that lies on another file system.

        Raises OSError: see `draft`.
        """
        with self.draft(version) as draft:
            for index, path in enumerate(paths):
                file = draft / file_name(index)
                try:
                    os.link(path, file)
                except OSError as error:
                    if error.errno != errno.EXDEV:
                        raise
                    copy(path, file)
                os.chmod(file, 0o400)

    @contextmanager
    def draft(self, version: Version) -> Iterator[Path]:
        """Yield a directory for the segments of a version, which is published after the `with` block.

        If the block or the publication fails, the directory is removed.

        Raises OSError, also if the version of an earlier, failed commit cannot be removed: its writer may retry with
        the same key, and there must not be two versions with one key.
        """
        self._settle()
        draft = self.staging / f"{version.id}.new"
        draft.mkdir(mode=0o700)
        try:
            yield draft
            self._publish(version, draft)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise

    def remove(self, version: Version, lost: bool = False, superseded: bool = False) -> None:
        """Remove a version durably with one rename, then move its segments to the trash.

        A repeated call continues a failed one. Removing a version that does not exist does nothing.

        Args:
            version: The version.
            lost: See `Removal`.
            superseded: Whether a later version of the dataset is here. If not, the number of `version` is recorded
                before its manifest goes.

        Raises:
            OSError: The rename failed. The version still exists, or will again as soon as the disk lets the rename
                be undone.
        """
        committed, removed = self.segments / version.id, self.staging / f"{version.id}.gone"
        if version.prepared and committed.exists():
            # The manifest may say that it was published. An interrupted removal would then hide the version before it.
            try:
                self.confirm(version)
            except OSError:
                with suppress(FileNotFoundError):  # A full disk lets the rename pass.
                    (committed / MANIFEST).rename(committed / _REFUSED)
        with suppress(FileNotFoundError):
            committed.rename(removed)
        try:
            sync(self.segments)
        except OSError:
            self._put_back.add(version.id)
            with suppress(OSError):
                self._put_removed_back()
            raise
        self._put_back.discard(version.id)
        if not lost:
            with suppress(OSError):  # The removal then counts as lost if it is interrupted.
                _mark_dropped(removed)
        self._move_to_trash(removed, None if superseded else version, lost)

    def mark_dropped(self, version: Version) -> None:
        """Mark a version that could not be removed as dropped, durably, if it is here. Raises OSError."""
        for directory in (self.segments / version.id, self.staging / f"{version.id}.gone"):
            with suppress(FileNotFoundError):
                _mark_dropped(directory)
                sync(directory)

    def is_dropped(self, version: Version) -> bool:
        """Return whether a version that is here was marked as dropped."""
        return (self.segments / version.id / _DROPPED).exists()

    def _move_to_trash(self, removed: Path, recorded: Version | None, lost: bool) -> None:
        """Move the segments of a removed version to the trash, and record the number of `recorded`, if any.

        If a step fails, the rest of the version stays until `sweep` tries again.
        """
        try:
            for path in removed.glob("*.arrows"):
                if path.stat().st_nlink > 1 or not self._has_kernel_leases:
                    path.unlink()
                else:
                    os.utime(path)
                    os.chmod(path, 0o600)
                    path.rename(self.trash / f"{removed.stem}-{path.name}")
            if recorded is not None and recorded.number:
                removal = Removal.of(recorded.number, lost, not recorded.prepared)
                self.numbers.record(recorded.name, removal, recorded.serial)
            (removed / MANIFEST).unlink(missing_ok=True)  # before `dropped`, without which the version counts as lost
        except OSError as error:
            _log.warning("removal failed, it is tried again: path=%s error=%s", removed, str(error))
        else:
            shutil.rmtree(removed, ignore_errors=True)

    def _finish_removal(self, removed: Path) -> None:
        """Finish a removal that was interrupted. Without a mark its reason is unknown, so it counts as lost."""
        lost = not (removed / _DROPPED).exists()
        version = None
        with suppress(OSError, StoreError, *DAMAGE):  # the manifest is removed already, or damaged
            version = _decode(*_read_manifest(removed))
        self._move_to_trash(removed, version, lost)

    def sweep(self, staging_timeout: float) -> None:
        """Remove unfinished drafts, parts without a writer, and segments staged for `staging_timeout` seconds.

        Directories that the store has not made stay.
        """
        try:
            self._settle()
        except OSError as error:
            _log.warning("rollback failed, it is tried again: error=%s", str(error))
        oldest = time.time() - staging_timeout
        drafts = [path for path in self.staging.iterdir() if is_draft(path.name) and _is_directory(path)]
        for path in drafts:  # first, since a staged file that a draft links to looks committed
            if path.stem in self._put_back:
                continue
            if path.suffix == ".gone":
                self._finish_removal(path)
            else:
                shutil.rmtree(path, ignore_errors=True)
        for path in self.staging.iterdir():
            try:
                status = path.lstat()
                if stat.S_ISDIR(status.st_mode):
                    continue
                committed_or_never = status.st_nlink > 1 or status.st_mtime < oldest
                if is_abandoned(path) if path.suffix == PARTIAL_SUFFIX else committed_or_never:
                    path.unlink()
            except FileNotFoundError:
                pass
            except OSError as error:  # the other leftovers are removed nevertheless
                _log.warning("removal of a leftover failed, it is tried again: path=%s error=%s", path, str(error))


def _mark_dropped(directory: Path) -> None:
    os.close(open_private_file(directory / _DROPPED, os.O_WRONLY | os.O_CREAT))


def _is_directory(path: Path) -> bool:
    return stat.S_ISDIR(path.lstat().st_mode)


def _read_manifest(directory: Path) -> tuple[bytes, bool]:
    """Return the manifest of a version, and whether the version was refused. Raises the errors of `read_manifest`."""
    is_refused = not (directory / MANIFEST).exists() and (directory / _REFUSED).exists()
    return read_manifest(directory, _REFUSED if is_refused else MANIFEST), is_refused


def _decode(manifest: bytes, is_refused: bool) -> Version:
    version = decode_manifest(manifest)
    return replace(version, prepared=True) if is_refused else version


def sizes(directory: Path) -> dict[int, int]:
    """Return the bytes that the segments below a directory take, by inode."""
    bytes_by_inode: dict[int, int] = {}
    is_complete = False
    while not is_complete:
        is_complete = True
        for parent, _, names in os.walk(directory):
            for name in names:
                if name in (MANIFEST, _DROPPED, _REFUSED):  # a few kB, for which no room is reserved
                    continue
                try:
                    status = os.lstat(os.path.join(parent, name))
                except FileNotFoundError:  # A writer may have renamed it, and its new name may not be listed.
                    is_complete = False
                else:
                    bytes_by_inode[status.st_ino] = status.st_blocks * 512
    return bytes_by_inode
