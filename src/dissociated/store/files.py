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

from dissociated.base.private import open_private_directory
from dissociated.errors import StoreError
from dissociated.memory.shared import is_unused, write_parts
from dissociated.store.layout import TRASH, is_removed_segment, store_id

#: What a file is called that is being written.
PARTIAL_SUFFIX = ".part"

_GRANULE = 1 << 16  # bytes that are reserved ahead, at first
_MAX_GRANULE = 1 << 26  # and at last

#: Given a name in the staging directory, bytes needed and bytes wished for, returns the bytes that there is room for.
Reserve: TypeAlias = Callable[[str, int, int], int]


class NewFile:
    """A file without a name until `commit`: where its writer is killed, nothing is left.

    It belongs to the directory that `path` leads to now, whatever becomes of that path. Raises OSError,
    FileExistsError too, where it cannot be created.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._named = False
        self.descriptor = -1
        self._directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if _exists(path.name, self._directory):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
            self.descriptor = self._create()
        except BaseException:
            self.close()
            raise

    def _create(self) -> int:
        descriptor, self._named = _create(self.path.name, self._directory)
        return descriptor

    def reserve(self, end: int) -> int:
        """Make sure that bytes up to `end` can be written. Returns up to where they can, at least.

        Raises OSError or StoreError where they cannot.
        """
        return sys.maxsize

    def commit(self, size: int) -> None:
        """Give the file, which has `size` bytes, its name, and close it."""
        if not self._named:
            _link(self.descriptor, self.path.name, self._directory)
            self._named = True
        self.close()

    def close(self) -> None:
        """Close it, once: who is interrupted within `commit` calls `abort`, and the number may be another file's."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
        directory, self._directory = self._directory, -1
        if directory >= 0:
            os.close(directory)

    def abort(self) -> None:
        """Close and remove it. Raises nothing, so that nobody is told of this in place of the reason for it."""
        if self._named and self._directory >= 0:
            _unlink(self.path.name, self._directory)
        self.close()


class StagedFile(NewFile):
    """A file in the staging directory of a store: its room is reserved there, in steps, before it is written.

    While it is written it is called `path` with ".part", and locked: a part that nobody has locked is the leftover
    of a writer that was killed. `reserve` is Store.reserve, here or by a call to whoever owns the store. What the
    store has in its trash is written over, where nobody reads it any more: its pages are there already, which makes
    writing faster.
    """

    def __init__(self, path: Path, reserve: Reserve) -> None:
        self._partial = path.name + PARTIAL_SUFFIX
        self._reserve = reserve
        super().__init__(path)
        self._reserved = os.fstat(self.descriptor).st_size
        self._granule = _GRANULE

    def _create(self) -> int:
        recycled = self._recycle()
        if recycled is not None:
            return recycled
        descriptor, named = _create(self._partial, self._directory)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # before anybody can see it
            if not named:
                _link(descriptor, self._partial, self._directory)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _recycle(self) -> int | None:
        """Take a file from the trash of the store, if there is one: a directory that is no store has no trash."""
        try:
            store = open_private_directory("..", within=self._directory)
        except (OSError, StoreError):
            return None
        try:
            store_id(store, self.path.parent.parent)
            trash = open_private_directory(TRASH, within=store)
        except (OSError, StoreError):
            return None
        finally:
            os.close(store)
        try:
            return self._take_from(trash)
        finally:
            os.close(trash)

    def _take_from(self, trash: int) -> int | None:
        for name in os.listdir(trash):
            descriptor = claim_unused(name, trash) if is_removed_segment(name) else None
            if descriptor is not None:
                try:  # unlike a rename, a link replaces nothing
                    os.link(name, self._partial, src_dir_fd=trash, dst_dir_fd=self._directory, follow_symlinks=False)
                    os.unlink(name, dir_fd=trash)
                except BaseException:
                    os.close(descriptor)  # a part that was linked is a leftover from here on
                    raise
                return descriptor
        return None

    def reserve(self, end: int) -> int:
        """Reserve room in the store, and some more ahead: see `NewFile.reserve`."""
        if end > self._reserved:
            self._reserved = self._reserve(self._partial, end, end + self._granule)
            self._granule = min(2 * self._granule, _MAX_GRANULE)
        return self._reserved

    def commit(self, size: int) -> None:
        """Give the file its name, for good: it is there after a loss of power, too."""
        os.ftruncate(self.descriptor, size)
        os.fsync(self.descriptor)
        os.rename(self._partial, self.path.name, src_dir_fd=self._directory, dst_dir_fd=self._directory)
        self.close()

    def abort(self) -> None:
        """Remove and close it. A part that cannot be removed has no writer any more, and is a leftover."""
        if self._directory >= 0:
            _unlink(self._partial, self._directory)
        self.close()


def _exists(name: str, directory: int) -> bool:
    try:
        os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _create(name: str, directory: int) -> tuple[int, bool]:
    """Create a file in an open directory. Returns its descriptor, and whether it has its name already."""
    try:
        return os.open(".", os.O_WRONLY | os.O_TMPFILE | os.O_CLOEXEC, 0o600, dir_fd=directory), False
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):  # some file systems know no files without a name
            raise
        return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=directory), True


def _link(descriptor: int, name: str, directory: int) -> None:
    """Give a file its name in an open directory. It replaces nothing."""
    # src_dir_fd, which an absolute path ignores, makes Python call linkat, which follows the link
    source = f"/proc/self/fd/{descriptor}"
    os.link(source, name, src_dir_fd=directory, dst_dir_fd=directory, follow_symlinks=True)


def _unlink(name: str, directory: int) -> None:
    """Remove a file that nobody needs, if it can be removed."""
    with suppress(OSError):
        os.unlink(name, dir_fd=directory)


def open_regular(path: str | os.PathLike[str], flags: int, follow: bool = False, within: int | None = None) -> int:
    """Open what must be a regular file, and no symbolic link unless `follow`. The caller owns the descriptor.

    What it is shows before it is opened: to open a FIFO could take for ever, and to open a device do anything.
    `within` is the descriptor of the directory that `path` is relative to. Raises StoreError where it is something
    else, and OSError.
    """
    place = os.open(path, os.O_PATH | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW), dir_fd=within)
    try:
        mode = os.fstat(place).st_mode
        if not stat.S_ISREG(mode):
            what = "a symbolic link" if stat.S_ISLNK(mode) else "no regular file"
            raise StoreError(f"{os.fspath(path)} is {what}: segments are regular files")
        return os.open(f"/proc/self/fd/{place}", flags | os.O_CLOEXEC)
    finally:
        os.close(place)


def claim_unused(path: str | os.PathLike[str], within: int | None = None) -> int | None:
    """The file open for writing and locked, if it has one name only and nobody else has it open or mapped.

    The kernel knows, of all processes: it grants a lease for writing to nobody else. A file of another user is left
    alone. `within` is the descriptor of the directory that `path` is relative to. The caller owns the descriptor.
    """
    try:
        descriptor = open_regular(path, os.O_WRONLY, within=within)
    except (OSError, StoreError):
        return None  # somebody else was first, or it is none of ours
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        status = os.fstat(descriptor)
        if status.st_nlink == 1 and status.st_uid == os.geteuid() and is_unused(descriptor):
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
