"""A directory of committed versions as it lies on a file system: see `dissociated.store.store` for its layout."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from dissociated.errors import StoreError
from dissociated.fork import ProcessBound
from dissociated.memory.shared import write_parts
from dissociated.oserrors import store_errors
from dissociated.store.files import PARTIAL_SUFFIX, claim_unused, is_abandoned, is_used, sync_directory

#: What is said of a version, in its directory.
MANIFEST = "manifest.json"
_MANIFEST_VERSION = 1
_ID = "id"


def store_id(directory: Path) -> str:
    """What tells the store in a directory from every other, its node too. Raises OSError where none has been there."""
    return (directory / _ID).read_text()


def file_name(index: int) -> str:
    """What a segment of a version is called, by its place."""
    return f"{index:04}.arrows"


@dataclass(frozen=True)
class Version:
    """What a dataset was at one commit, or one host's part of that."""

    #: Tells it from every other version, in this store and elsewhere.
    id: str
    #: Grows with every commit in this store.
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


class Directory(ProcessBound):
    """The directory: locked by one process for as long as the `with` lasts.

    Raises StoreError where another process has it, or it cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.staging = self.path / "staging"
        self.segments = self.path / "segments"
        self.trash = self.path / "trash"
        self.id = ""

    def __enter__(self) -> Directory:
        with store_errors(f"the store {self.path}"):
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = self.path.stat()
            if status.st_uid != os.geteuid() or status.st_mode & 0o077:
                raise StoreError(f"{self.path} must belong to this user and be closed to others (chmod 700)")
            self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
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
        for directory in (self.staging, self.segments, self.trash):
            directory.mkdir(mode=0o700, exist_ok=True)
        known = self.path / _ID
        if not known.exists():
            _write_atomically(known, secrets.token_hex(8).encode())
        self.id = store_id(self.path)
        probe = self.trash / "probe"
        probe.touch(0o600)
        descriptor = claim_unused(probe)
        self._leases = descriptor is not None  # without them nobody could tell when trash is not read any more
        if descriptor is not None:
            os.close(descriptor)
        probe.unlink()

    def __exit__(self, *_: object) -> None:
        self._owned = False
        os.close(self._lock)

    def staged(self, name: str) -> Path:
        """The path of a file in the staging directory. Raises StoreError for a name that leads elsewhere."""
        if Path(name).name != name or name in ("", ".", ".."):
            raise StoreError(f"{name!r} is not the name of a file in the staging directory")
        return self.staging / name

    def files(self, version: Version) -> list[Path]:
        """The paths of the segments of a version, in order."""
        return sorted((self.segments / version.id).glob("*.arrows"))

    def committed(self) -> list[Version]:
        """Every version that is committed here, in any order. Raises StoreError where a manifest is damaged."""
        found = []
        for directory in self.segments.iterdir():
            with store_errors(f"reading {directory}"):
                try:
                    found.append(_decoded((directory / MANIFEST).read_bytes()))
                except (ValueError, KeyError, TypeError) as error:
                    raise StoreError(f"{directory / MANIFEST} is damaged ({error!r}): remove {directory}") from None
        return found

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
        _write_atomically(directory / MANIFEST, _encoded(version))

    def confirm(self, version: Version) -> None:
        """Write the manifest of a version that is there anew: what is known of it has changed."""
        self.describe(version, self.segments / version.id)

    def _publish(self, version: Version, draft: Path) -> None:
        """Make a draft a version: the one step that counts is the rename."""
        self.describe(version, draft)
        for path in draft.iterdir():
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        sync_directory(draft)
        draft.rename(self.segments / version.id)
        sync_directory(self.segments)

    @contextmanager
    def draft(self, version: Version) -> Iterator[Path]:
        """A directory for the segments of a version, which is published at the end of the `with`, or removed."""
        draft = self.staging / f"{version.id}.new"
        draft.mkdir(mode=0o700)
        try:
            yield draft
            self._publish(version, draft)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise

    def remove(self, version: Version) -> None:
        """Make a version disappear in one step, then move its segments to the trash."""
        removed = self.staging / f"{version.id}.gone"
        (self.segments / version.id).rename(removed)
        sync_directory(self.segments)
        self._move_to_trash(removed)

    def _move_to_trash(self, removed: Path) -> None:
        for path in removed.glob("*.arrows"):
            if path.stat().st_nlink > 1 or not self._leases:
                path.unlink()
            else:
                os.utime(path)
                os.chmod(path, 0o600)
                path.rename(self.trash / f"{removed.stem}-{path.name}")
        shutil.rmtree(removed, ignore_errors=True)

    def sweep(self, forgotten: float) -> None:
        """Remove drafts that were not finished, parts without a writer, and segments staged for `forgotten` seconds."""
        oldest = time.time() - forgotten
        drafts = [path for path in self.staging.iterdir() if path.is_dir()]
        for path in drafts:  # first: what they link to has not been committed
            if path.suffix == ".gone":
                self._move_to_trash(path)
            else:
                shutil.rmtree(path, ignore_errors=True)
        for path in self.staging.iterdir():
            with suppress(FileNotFoundError):
                status = path.lstat()
                committed_or_never = status.st_nlink > 1 or status.st_mtime < oldest
                if is_abandoned(path) if path.suffix == PARTIAL_SUFFIX else committed_or_never:
                    path.unlink()


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


def _decoded(manifest: bytes) -> Version:
    plain: dict[str, Any] = json.loads(manifest)
    if plain.pop("format") != _MANIFEST_VERSION:
        raise ValueError("written by another version of this library")
    return replace(
        Version(**plain),
        ticket=base64.b64decode(plain["ticket"]),
        schema=base64.b64decode(plain.get("schema", "")),
        before=tuple(plain.get("before", ())),
    )


def _write_atomically(path: Path, content: bytes) -> None:
    """A new file, there as a whole or not at all."""
    draft = path.with_name(f"{path.name}.draft")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        write_parts(descriptor, [content])  # a call by itself may write a part, as where the file system is full
        os.fsync(descriptor)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    draft.rename(path)
