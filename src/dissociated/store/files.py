"""New files, which get their names when they are complete, and their room before they are written."""

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

from dissociated.base.descriptors import owned
from dissociated.base.private import open_private_directory
from dissociated.errors import StoreError
from dissociated.memory.shared import is_unused, write_parts
from dissociated.store.layout import TRASH, is_removed_segment, store_id

#: The suffix of a file that is being written.
PARTIAL_SUFFIX = ".part"

_GRANULE = 1 << 16  # bytes that are reserved ahead, at first; doubled with each reservation
_MAX_GRANULE = 1 << 26  # the limit of this doubling

#: Reserves room for a staged file: takes its name, the bytes needed and the bytes wanted, returns the bytes reserved.
Reserve: TypeAlias = Callable[[str, int, int], int]


class NewFile:
    """A file without a name until `commit`: if its writer is killed, nothing is left.

    The directory is opened once, so renaming it later does not matter. Raises FileExistsError if the file exists, and
    OSError if it cannot be created.
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
        """Make sure that bytes up to the position `end` can be written.

        Returns:
            The position up to which there is room, which is at least `end`.

        Raises:
            OSError, StoreError: There is not enough room.
        """
        return sys.maxsize

    def commit(self, size: int) -> None:
        """Give the file, which has `size` bytes, its name, and close it."""
        if not self._named:
            _link(self.descriptor, self.path.name, self._directory)
            self._named = True
        self.close()

    def close(self) -> None:
        """Close the file. A second call does nothing.

        An interrupted `commit` is followed by `abort`; by then the descriptor's number may belong to another file.
        """
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
        directory, self._directory = self._directory, -1
        if directory >= 0:
            os.close(directory)

    def abort(self) -> None:
        """Close and remove the file. Raises nothing, so that the error that led to the call is not hidden."""
        if self._named and self._directory >= 0:
            _unlink(self.path.name, self._directory)
        self.close()


class StagedFile(NewFile):
    """A file in the staging directory of a store, for which room is reserved in steps before it is written.

    While it is written, its name is that of `path` with ".part", and it is locked: a part without a lock is the
    leftover of a writer that was killed. `reserve` is `Store.reserve`, called directly or in the process that owns the
    store. If the store's trash has a segment that is not in use, the file takes over its pages: writing is faster when
    the pages are allocated already.
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
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # before the file is visible
            if not named:
                _link(descriptor, self._partial, self._directory)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _recycle(self) -> int | None:
        """Take a file from the trash of the store. Return None if there is none, or the directory is no store."""
        try:
            store = open_private_directory("..", within=self._directory)
        except (OSError, StoreError):
            return None
        with owned(store):
            try:
                store_id(store, self.path.parent.parent)
                trash = open_private_directory(TRASH, within=store)
            except (OSError, StoreError):
                return None
        with owned(trash):
            return self._take_from(trash)

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
        """Reserve room in the store, and some more for later writes. See `NewFile.reserve`."""
        if end > self._reserved:
            self._reserved = self._reserve(self._partial, end, end + self._granule)
            self._granule = min(2 * self._granule, _MAX_GRANULE)
        return self._reserved

    def commit(self, size: int) -> None:
        """Give the file its name, and sync its content, so that the content survives a loss of power."""
        os.ftruncate(self.descriptor, size)
        os.fsync(self.descriptor)
        os.rename(self._partial, self.path.name, src_dir_fd=self._directory, dst_dir_fd=self._directory)
        self.close()

    def abort(self) -> None:
        """Remove and close the file. A part that cannot be removed becomes a leftover, for `Store.sweep`."""
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
    """Create a file in an open directory. Return its descriptor, and whether the file has its name already."""
    try:
        return os.open(".", os.O_WRONLY | os.O_TMPFILE | os.O_CLOEXEC, 0o600, dir_fd=directory), False
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):  # some file systems have no O_TMPFILE
            raise
        return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=directory), True


def _link(descriptor: int, name: str, directory: int) -> None:
    """Give a file its name in an open directory. An existing file is not replaced."""
    # Only with src_dir_fd does Python call linkat, which follows the link. An absolute path ignores it otherwise.
    source = f"/proc/self/fd/{descriptor}"
    os.link(source, name, src_dir_fd=directory, dst_dir_fd=directory, follow_symlinks=True)


def _unlink(name: str, directory: int) -> None:
    """Remove a file, and ignore errors."""
    with suppress(OSError):
        os.unlink(name, dir_fd=directory)


def open_regular(path: str | os.PathLike[str], flags: int, follow: bool = False, within: int | None = None) -> int:
    """Open a regular file. The type is checked first: opening a FIFO can block, and opening a device have effects.

    Args:
        path: The path of the file.
        flags: The flags of `os.open`.
        follow: Whether `path` may be a symbolic link.
        within: The descriptor of the directory that `path` is relative to.

    Returns:
        The descriptor, which the caller owns.

    Raises:
        StoreError: The file is not regular.
        OSError: The file cannot be opened.
    """
    with owned(os.open(path, os.O_PATH | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW), dir_fd=within)) as place:
        mode = os.fstat(place).st_mode
        if not stat.S_ISREG(mode):
            file_kind = "a symbolic link" if stat.S_ISLNK(mode) else "not a regular file"
            raise StoreError(f"{os.fspath(path)!r} is {file_kind}: segments are regular files")
        return os.open(f"/proc/self/fd/{place}", flags | os.O_CLOEXEC)


def claim_unused(path: str | os.PathLike[str], within: int | None = None) -> int | None:
    """Open and lock a file for writing, if it has only one name and no other process has it open or mapped.

    A kernel lease tells: Linux grants a lease for writing only on a file that is not in use elsewhere.

    Args:
        path: The path of the file.
        within: The descriptor of the directory that `path` is relative to.

    Returns:
        The descriptor, which the caller owns, or None if the file is in use, locked, missing, or of another user.
    """
    try:
        descriptor = open_regular(path, os.O_WRONLY, within=within)
    except (OSError, StoreError):
        return None  # another process took it first, or it is not a file of the store
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        status = os.fstat(descriptor)
        if status.st_nlink == 1 and status.st_uid == os.geteuid() and is_unused(descriptor):
            return descriptor
    except OSError:
        pass  # another process has locked it
    os.close(descriptor)
    return None


def is_used(path: Path, names: int) -> bool:
    """Return whether a process has a file open or mapped, or the file has more than `names` names.

    Raises OSError and StoreError.
    """
    with owned(open_regular(path, os.O_RDONLY)) as descriptor:
        return os.fstat(descriptor).st_nlink > names or not is_unused(descriptor)


def copy_file(source: Path, target: Path) -> None:
    """Copy a file and sync the copy, which may have been longer. Raises OSError, and StoreError if `source` shrinks."""
    with (
        source.open("rb") as read,
        open(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600), "wb") as written,
    ):
        remaining = size = os.fstat(read.fileno()).st_size
        while remaining:
            copied = os.sendfile(written.fileno(), read.fileno(), None, remaining)
            if not copied:
                raise StoreError(f"{str(source)!r} became shorter during the copy")
            remaining -= copied
        os.ftruncate(written.fileno(), size)  # Whole pages were reserved, and an IPC file ends with its footer.
        os.fsync(written.fileno())


def is_abandoned(path: Path) -> bool:
    """Return whether a part has no writer any more, or is no regular file and so never was a part."""
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


def sync(path: Path) -> None:
    """Sync a file, or a directory: creations, renames and removals in it then survive a loss of power."""
    with owned(os.open(path, os.O_RDONLY | os.O_CLOEXEC)) as descriptor:
        os.fsync(descriptor)


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that after a crash it has either all of `content` or its state before. Raises OSError."""
    draft = path.with_name(f"{path.name}.draft")
    with suppress(FileNotFoundError):
        draft.unlink()  # A killed process left it. A link to another file must not be followed.
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        write_parts(descriptor, [content])  # os.write may write less, for example if the file system is full
        os.fsync(descriptor)
        draft.rename(path)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise
    finally:
        os.close(descriptor)
