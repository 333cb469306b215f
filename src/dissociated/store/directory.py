"""A directory of committed versions as it lies on a file system: see `dissociated.store.store` for its layout."""

from __future__ import annotations

import base64
import fcntl
import json
import logging
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeGuard, cast

import pyarrow as pa

from dissociated.base.fork import ProcessBound
from dissociated.base.oserrors import store_errors
from dissociated.base.private import open_private_directory, open_private_file
from dissociated.errors import StoreError
from dissociated.store.files import (
    PARTIAL_SUFFIX,
    claim_unused,
    is_abandoned,
    is_used,
    open_regular,
    sync_directory,
    write_atomically,
)
from dissociated.store.layout import NUMBERS, SEGMENTS, STAGING, TRASH, is_draft, known_id, new_id, write_id
from dissociated.store.numbers import Numbers, Removed

_log = logging.getLogger(__name__)

#: What is said of a version, in its directory.
MANIFEST = "manifest.json"
_MANIFEST_VERSION = 1
_NUMBER = re.compile(r"[0-9]{14,19}")  # that a version's id begins with
#: What reading a damaged manifest may raise, the schema in it included.
_DAMAGE = (ValueError, KeyError, TypeError, AttributeError, RecursionError, pa.ArrowException)
_MAX_SECONDS = 1e11  # since the epoch: a date that can be shown
_NAME_MAX = 255  # bytes, of the name of a file


def file_name(index: int) -> str:
    """What a segment of a version is called, by its place."""
    return f"{index:04}.arrows"


@dataclass(frozen=True)
class Version:
    """What a dataset was at one commit, or one host's part of that."""

    #: Tells it from every other version, in this store and elsewhere.
    id: str
    #: Grows with every commit in this store, whatever dataset that is of.
    number: int
    #: The name of the dataset.
    name: str
    #: Tells its commit from every other.
    key: str
    ticket: bytes
    #: Seconds since the epoch.
    created: float
    #: Whether it is not known here if this was published.
    prepared: bool = False
    #: Whether it is all of the dataset, not one part of it.
    whole: bool = True
    tags: Mapping[str, str] = field(default_factory=dict)
    #: Seconds after which it is gone; None for no end.
    ttl: float | None = None
    rows: int = 0
    #: Bytes of all bodies.
    nbytes: int = 0
    #: The keys of the commits that this one was appended to, the first of them first.
    before: Sequence[str] = ()
    #: A digest of the segments that the commit named. It tells whether a repeated call means the same segments.
    staged: str = ""
    #: As Arrow serialises it, so that it is known without opening a segment. Empty where an older library wrote this.
    schema: bytes = b""
    #: The number of this version of the dataset, which its catalog gave it; 0 where an older library wrote this.
    version: int = 0
    #: Tells the database of that catalog from all others.
    catalog: int = 0


@dataclass(frozen=True)
class SetAside:
    """An entry among the versions that is none, or cannot be read: nothing is served of it, and nothing is changed."""

    path: Path
    reason: str
    #: The number that its name tells, or else its manifest, 0 if none of them does: it is not used again.
    number: int
    #: As much as can be read of its manifest.
    manifest: Mapping[str, Any]
    #: What its files take, in bytes, by their inodes.
    sizes: Mapping[int, int]

    @classmethod
    def of(cls, path: Path, reason: str, manifest: bytes) -> SetAside:
        """Look at an entry."""
        try:
            plain = json.loads(manifest)
        except _DAMAGE:
            plain = None
        plain = plain if isinstance(plain, dict) else {}
        name = path.name.partition("-")[0]
        number = int(name) if _NUMBER.fullmatch(name) else plain.get("number")
        held = {} if path.is_symlink() else sizes(path)
        return cls(path, reason, number if _is_count(number) else 0, plain, held)

    @property
    def removal(self) -> tuple[str, Removed] | None:
        """The dataset and the number of the version that it was, if its manifest still tells them."""
        name, number = self.manifest.get("name"), self.manifest.get("version")
        if not isinstance(name, str) or not _is_count(number) or not number:
            return None
        return name, Removed.of(number, lost=True, published=not self.manifest.get("prepared"))

    def replaces(self, version: Version) -> bool:
        """Return whether its manifest still tells that it came after `version`, under the same name."""
        return self.manifest.get("name") == version.name and self.number > version.number

    def __str__(self) -> str:
        return f"{os.fspath(self.path)!r} is set aside: {self.reason}"  # its name may be no text that can be shown


class Directory(ProcessBound):
    """The directory: locked by one process for as long as the `with` lasts. It is made if it is missing.

    Raises StoreError if another process has it, if it cannot be used, is not this user's alone, or has something in it
    and is no store.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.staging = self.path / STAGING
        self.segments = self.path / SEGMENTS
        self.trash = self.path / TRASH
        self.id = ""
        self._refused: list[Version] = []  # whose commits failed after they were there
        self._put_back: set[str] = set()  # ids of versions whose removals failed after they were gone

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
            raise StoreError(f"the store {self.path} belongs to another process, which still runs") from None
        known = known_id(self._lock, self.path)
        self.id = known or new_id()
        if known is None:
            write_id(self._lock, self.id)
        for name in (STAGING, SEGMENTS, TRASH):
            os.close(open_private_directory(name, within=self._lock, create=True))
        #: The records of datasets whose last version is gone from here.
        self.numbers = Numbers(self.path / NUMBERS)
        probe = self.trash / "probe"
        os.close(open_private_file(probe, os.O_WRONLY | os.O_CREAT))
        descriptor = claim_unused(probe)
        self._leases = descriptor is not None  # without them nobody could tell when trash is not read any more
        if descriptor is not None:
            os.close(descriptor)
        probe.unlink()

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # the last attempt
            self._settle()
        self._owned = False
        os.close(self._lock)

    def staged(self, name: str) -> Path:
        """The path of a file in the staging directory. Raises StoreError for a name that leads elsewhere."""
        is_name = Path(name).name == name and name not in ("", ".", "..") and "\0" not in name
        if not is_name or len(os.fsencode(name)) > _NAME_MAX:
            raise StoreError(f"{name[:_NAME_MAX]!r} is not the name of a file in the staging directory")
        return self.staging / name

    def files(self, version: Version) -> list[Path]:
        """The paths of the segments of a version, in order."""
        return sorted((self.segments / version.id).glob("*.arrows"))

    def committed(self) -> tuple[list[Version], list[SetAside]]:
        """Return every version that is committed here, in any order, and the entries that are no versions."""
        versions, others = [], []
        with store_errors(f"reading {self.segments}"):
            entries = [*self.segments.iterdir()]
        for entry in entries:
            manifest = b""
            try:
                manifest = _read_manifest(entry)
                version = _decoded(manifest)
                if version.id != entry.name:
                    raise StoreError(f"its {MANIFEST} is that of {version.id!r}")
            except StoreError as error:
                others.append(SetAside.of(entry, str(error), manifest))
            except OSError as error:
                others.append(SetAside.of(entry, f"its {MANIFEST} cannot be read: {error.strerror}", manifest))
            except _DAMAGE as error:
                others.append(SetAside.of(entry, f"its {MANIFEST} is damaged ({error!r})", manifest))
            else:
                versions.append(version)
        return versions, others

    def holds(self, version: Version) -> bool:
        """Return whether a version lies here, or its removal has not come to its end."""
        return (self.segments / version.id).exists() or (self.staging / f"{version.id}.gone").exists()

    def sizes(self, version: Version) -> dict[int, int]:
        """What the segments of a version take, in bytes, by their inodes."""
        return sizes(self.segments / version.id)

    def is_used(self, version: Version, names: Mapping[int, int]) -> bool:
        """Whether memory of a version would stay if it went: somebody has it open or mapped, or by another name.

        `names` says how many names each of its inodes has in this store. Where nobody can tell, it is False.
        """
        return self._leases and any(is_used(path, names[path.stat().st_ino]) for path in self.files(version))

    def describe(self, version: Version, directory: Path) -> None:
        """Write the manifest."""
        write_atomically(directory / MANIFEST, _encoded(version))

    def confirm(self, version: Version) -> None:
        """Write the manifest of a version that is there anew: what is known of it has changed."""
        self.describe(version, self.segments / version.id)

    def _publish(self, version: Version, draft: Path) -> None:
        """Make a draft a version: the one step that counts is the rename. Raises OSError, and then it is none."""
        self.describe(version, draft)
        for path in draft.iterdir():
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        sync_directory(draft)
        committed = self.segments / version.id
        draft.rename(committed)
        try:
            sync_directory(self.segments)
        except OSError:
            self._refused.append(version)
            self._settle()
            raise

    def _settle(self) -> None:
        """Make the directory what callers were told, if the disk refused even to take a step back. Raises OSError."""
        self._put_removed_back()
        while self._refused:
            self.remove(replace(self._refused[0], prepared=True))  # nobody was told that it was published
            self._refused.pop(0)

    def _put_removed_back(self) -> None:
        for id in sorted(self._put_back):
            with suppress(FileNotFoundError):
                (self.staging / f"{id}.gone").rename(self.segments / id)
            self._put_back.remove(id)

    @contextmanager
    def draft(self, version: Version) -> Iterator[Path]:
        """A directory for the segments of a version, which is published at the end of the `with`, or removed.

        Raises OSError, also as long as an earlier version that was refused cannot be removed: its writer may try again
        with the same key, and must not find two.
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
        """Make a version disappear in one step, for good, then move its segments to the trash.

        Its number is recorded before the manifest goes, unless it is `superseded`: a later version of the dataset is
        there. See `Removed` for `lost`.

        Raises OSError if that step fails. The version is then still there, or will be as soon as the disk lets the step
        be taken back; in both cases a repeated call goes on. A version that is not there is removed already.
        """
        committed, removed = self.segments / version.id, self.staging / f"{version.id}.gone"
        with suppress(FileNotFoundError):
            committed.rename(removed)
        try:
            sync_directory(self.segments)
        except OSError:
            self._put_back.add(version.id)
            with suppress(OSError):
                self._put_removed_back()
            raise
        self._put_back.discard(version.id)
        self._move_to_trash(removed, None if superseded else version, lost)

    def _move_to_trash(self, removed: Path, recorded: Version | None, lost: bool) -> None:
        """Move the segments of a removed version to the trash, and record its number.

        If a step fails, the rest of the version stays until `sweep` tries it again.
        """
        try:
            for path in removed.glob("*.arrows"):
                if path.stat().st_nlink > 1 or not self._leases:
                    path.unlink()
                else:
                    os.utime(path)
                    os.chmod(path, 0o600)
                    path.rename(self.trash / f"{removed.stem}-{path.name}")
            if recorded is not None and recorded.version:
                removal = Removed.of(recorded.version, lost, not recorded.prepared)
                self.numbers.record(recorded.name, removal, recorded.number)
        except OSError as error:
            _log.warning("finishing a removal failed, it is tried again: path=%s error=%s", removed, str(error))
        else:
            shutil.rmtree(removed, ignore_errors=True)

    def _finish_removal(self, removed: Path) -> None:
        """Go on where `remove` ended early. Whether somebody asked for the removal is not known any more."""
        version = None
        with suppress(OSError, StoreError, *_DAMAGE):  # it has gone already, or is damaged
            version = _decoded((removed / MANIFEST).read_bytes())
        self._move_to_trash(removed, version, lost=True)

    def sweep(self, forgotten: float) -> None:
        """Remove drafts that were not finished, parts without a writer, and segments staged for `forgotten` seconds.

        Other directories are left alone.
        """
        try:
            self._settle()
        except OSError as error:
            _log.warning("taking a failed step back failed, it is tried again: error=%s", str(error))
        oldest = time.time() - forgotten
        drafts = [path for path in self.staging.iterdir() if is_draft(path.name) and _is_directory(path)]
        for path in drafts:  # first: what they link to has not been committed
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
            except OSError as error:  # which shall not keep the rest
                _log.warning("removing a leftover failed, it is tried again: path=%s error=%s", path, str(error))


def _is_directory(path: Path) -> bool:
    return stat.S_ISDIR(path.lstat().st_mode)


def sizes(directory: Path) -> dict[int, int]:
    """What the segments below a directory take, in bytes, by their inodes."""
    found: dict[int, int] = {}
    for parent, _, names in os.walk(directory):
        for name in names:
            if name == MANIFEST:  # a few kB, which nobody reserves
                continue
            with suppress(FileNotFoundError):
                status = os.lstat(os.path.join(parent, name))
                found[status.st_ino] = status.st_blocks * 512
    return found


def _encoded(version: Version) -> bytes:
    plain = {
        **asdict(version),
        "ticket": base64.b64encode(version.ticket).decode(),
        "schema": base64.b64encode(version.schema).decode(),
        "format": _MANIFEST_VERSION,
    }
    return json.dumps(plain, indent=1).encode()


def _read_manifest(entry: Path) -> bytes:
    """Read the manifest of an entry. Raises OSError, and StoreError if the entry or the manifest is something else."""
    if not stat.S_ISDIR(entry.lstat().st_mode):
        raise StoreError("it is no directory")
    try:
        descriptor = open_regular(entry / MANIFEST, os.O_RDONLY)
    except FileNotFoundError:
        raise StoreError(f"it has no {MANIFEST}") from None
    except StoreError:
        raise StoreError(f"its {MANIFEST} is no regular file") from None
    with open(descriptor, "rb") as file:
        return file.read()


def _decoded(manifest: bytes) -> Version:
    """Read a manifest, so that nobody later doubts the types of its values.

    Raises StoreError for one of a later library, and one of `_DAMAGE`.
    """
    plain = json.loads(manifest)
    written = plain.pop("format") if isinstance(plain, dict) else None
    if _is_count(written) and written > _MANIFEST_VERSION:
        raise StoreError(f"a later version of this library wrote it (format {written}): use that one to read it")
    if written != _MANIFEST_VERSION:
        raise ValueError(f"format {written!r}")
    version = replace(
        Version(**plain),
        ticket=base64.b64decode(plain["ticket"], validate=True),
        schema=base64.b64decode(plain.get("schema", ""), validate=True),
        before=tuple(plain.get("before", ())),
    )
    texts = (version.id, version.name, version.key, version.staged, *version.before, *chain(*version.tags.items()))
    counts = (version.number, version.rows, version.nbytes, version.version, version.catalog)
    if not (
        all(isinstance(one, str) and one.encode() is not None for one in texts)  # which a lone surrogate cannot be
        and all(_is_count(one) for one in counts)
        and all(isinstance(one, bool) for one in (version.prepared, version.whole))
        and _is_seconds(version.created)
        and (version.ttl is None or _is_seconds(version.ttl))
        and isinstance(plain.get("before", []), list)
    ):
        raise TypeError("a value of another type")
    if version.schema:
        pa.ipc.read_schema(pa.py_buffer(version.schema))
    return version


def _is_count(value: object) -> TypeGuard[int]:
    """Return whether `value` is an integer from 0 on, which a database can hold."""
    return type(value) is int and 0 <= value < 1 << 63


def _is_seconds(value: object) -> bool:
    return type(value) in (int, float) and 0 <= cast(float, value) <= _MAX_SECONDS
