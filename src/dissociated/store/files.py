"""New files, which get their names when they are whole, and room before they are written."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from dissociated.errors import StoreError
from dissociated.memory.shared import is_unused, write_parts

#: What a file is called that is being written.
PARTIAL_SUFFIX = ".part"

_GRANULE = 1 << 16  # bytes that are reserved ahead, at first
_MAX_GRANULE = 1 << 26  # and at last

#: Given a name in the staging directory, bytes needed and bytes wished for, returns the bytes that there is room for.
Reserve: TypeAlias = Callable[[str, int, int], int]


class NewFile:
    """A file without a name until `commit`: where its writer is killed, nothing is left.

    Raises OSError, FileExistsError too, where it cannot be created.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        self._named = False
        try:
            self.descriptor = os.open(path.parent, os.O_WRONLY | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):  # some file systems know no files without a name
                raise
            self.descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            self._named = True

    def reserve(self, end: int) -> int:
        """Make sure that bytes up to `end` can be written. Returns up to where they can, at least.

        Raises OSError or StoreError where they cannot.
        """
        return sys.maxsize

    def commit(self, size: int) -> None:
        """Give the file, which has `size` bytes, its name, and close it."""
        self.name()
        self.close()

    def name(self) -> None:
        """Give the file its name."""
        if not self._named:
            # src_dir_fd, which an absolute path ignores, makes Python call linkat, which follows the link
            source = f"/proc/self/fd/{self.descriptor}"
            os.link(source, self.path, src_dir_fd=self.descriptor, follow_symlinks=True)
            self._named = True

    def close(self) -> None:
        """Close it, once: who is interrupted within `commit` calls `abort`, and the number may be another file's."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def abort(self) -> None:
        """Close and remove it."""
        self.close()
        if self._named:
            self.path.unlink(missing_ok=True)


class StagedFile(NewFile):
    """A file in the staging directory of a store: its room is reserved there, in steps, before it is written.

    While it is written it is called `path` with ".part", and locked: a part that nobody has locked is the leftover
    of a writer that was killed. `reserve` is Store.reserve, here or by a call to whoever owns the store. What the
    store has in its trash is written over, where nobody reads it any more: its pages are there already, which makes
    writing faster.
    """

    def __init__(self, path: Path, reserve: Reserve) -> None:
        self.path = path
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        self._partial = path.with_name(path.name + PARTIAL_SUFFIX)
        self._reserve = reserve
        recycled = self._recycled(path.parent.parent / "trash")
        self.descriptor = self._created() if recycled is None else recycled
        self._reserved = os.fstat(self.descriptor).st_size
        self._granule = _GRANULE

    def _created(self) -> int:
        nameless = NewFile(self._partial)  # locked before anybody can see it
        fcntl.flock(nameless.descriptor, fcntl.LOCK_EX)
        nameless.name()
        return nameless.descriptor

    def _recycled(self, trash: Path) -> int | None:
        for entry in trash.iterdir():
            descriptor = claim_unused(entry)
            if descriptor is not None:
                try:
                    os.link(entry, self._partial)  # unlike a rename, it replaces nothing
                except BaseException:
                    os.close(descriptor)
                    raise
                entry.unlink()
                return descriptor
        return None

    def reserve(self, end: int) -> int:
        """Reserve room in the store, and some more ahead: see `NewFile.reserve`."""
        if end > self._reserved:
            self._reserved = self._reserve(self._partial.name, end, end + self._granule)
            self._granule = min(2 * self._granule, _MAX_GRANULE)
        return self._reserved

    def commit(self, size: int) -> None:
        """Give the file its name, for good: it is there after a loss of power, too."""
        os.ftruncate(self.descriptor, size)
        os.fsync(self.descriptor)
        os.rename(self._partial, self.path)
        self.close()

    def abort(self) -> None:
        """Remove and close it."""
        self._partial.unlink(missing_ok=True)
        self.close()


def open_regular(path: str | os.PathLike[str], flags: int, follow: bool = False) -> int:
    """Open what must be a regular file, and no symbolic link unless `follow`. The caller owns the descriptor.

    What it is shows before it is opened: to open a FIFO could take for ever, and to open a device do anything.
    Raises StoreError where it is something else, and OSError.
    """
    place = os.open(path, os.O_PATH | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))
    try:
        mode = os.fstat(place).st_mode
        if not stat.S_ISREG(mode):
            what = "a symbolic link" if stat.S_ISLNK(mode) else "no regular file"
            raise StoreError(f"{os.fspath(path)} is {what}: segments are regular files")
        return os.open(f"/proc/self/fd/{place}", flags | os.O_CLOEXEC)
    finally:
        os.close(place)


def claim_unused(path: Path) -> int | None:
    """The file open for writing and locked, if it has one name only and nobody else has it open or mapped.

    The kernel knows, of all processes: it grants a lease for writing to nobody else. The caller owns the descriptor.
    """
    try:
        descriptor = open_regular(path, os.O_WRONLY)
    except (OSError, StoreError):
        return None  # somebody else was first, or it is none of ours
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_nlink == 1 and is_unused(descriptor):
            return descriptor
    except OSError:
        pass  # somebody else claims it
    os.close(descriptor)
    return None


def is_used(path: Path, names: int) -> bool:
    """Whether somebody has a file open or mapped, or it has more than so many names. Raises OSError and StoreError."""
    descriptor = open_regular(path, os.O_RDONLY)
    try:
        return os.fstat(descriptor).st_nlink > names or not is_unused(descriptor)
    finally:
        os.close(descriptor)


def copy_file(source: Path, target: Path) -> None:
    """Copy a file, and make the copy last. Raises OSError, and StoreError where it becomes shorter meanwhile."""
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


def is_abandoned(path: Path) -> bool:
    """Whether the writer of a part is gone, or it never was a part."""
    try:
        descriptor = open_regular(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    except StoreError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def sync_directory(directory: Path) -> None:
    """Make what was created, renamed and removed in `directory` last through a loss of power."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, content: bytes) -> None:
    """Write a new file, which is there as a whole or not at all. Raises OSError."""
    draft = path.with_name(f"{path.name}.draft")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        write_parts(descriptor, [content])  # a call by itself may write a part, as where the file system is full
        os.fsync(descriptor)
        draft.rename(path)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise
    finally:
        os.close(descriptor)
