"""Directories and files that belong to one user alone.

Their owner, mode and type are checked on open descriptors, before their content is trusted, written or removed: a path
may lead elsewhere a moment later, and an open descriptor does not. A symbolic link is refused, except above the last
part of a path. To use a directory that others could replace meanwhile, name its entries by its descriptor (`within`),
or below `/proc/self/fd/DESCRIPTOR`.
"""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from dissociated.base.descriptors import owned
from dissociated.errors import NotPrivate

_Name = str | os.PathLike[str]


def open_private_directory(
    path: _Name,
    *,
    within: int | None = None,
    create: bool = False,
    owners: Collection[int] = (),
    readable: bool = False,
) -> int:
    """Open a directory that belongs to this user and is closed to all others.

    Args:
        path: Path of the directory, or its name in the directory that `within` has open.
        within: Descriptor of the directory that `path` is relative to.
        create: Create the directory, and each missing directory above it, with mode 0700.
        owners: Ids of users who may own it instead of this one.
        readable: Whether others may read it. In no case may others write to it.

    Returns:
        A descriptor, which the caller owns.

    Raises:
        NotPrivate: The path is a symbolic link, not a directory, another user's, or open to others.
        OSError: The directory does not exist, or cannot be opened.
    """
    name = os.fspath(Path(path))  # without a last slash, which would follow a symbolic link
    if create:
        _make(name, within)
    with owned(os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=within)) as place:
        _check_directory(place, name, owners=owners, readable=readable)
        return os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _make(name: str, within: int | None) -> None:
    missing = []
    parent = Path(name)
    while True:
        try:
            os.mkdir(parent, 0o700, dir_fd=within)
            break
        except FileExistsError:
            break
        except FileNotFoundError:
            if parent == parent.parent:
                raise
            missing.append(parent)
            parent = parent.parent
    for directory in reversed(missing):
        with suppress(FileExistsError):  # another process makes it, too
            os.mkdir(directory, 0o700, dir_fd=within)


def _check_directory(descriptor: int, path: _Name, *, owners: Collection[int] = (), readable: bool = False) -> None:
    """Raise NotPrivate unless an open directory is as `open_private_directory` demands. `path` is for the message."""
    status = os.fstat(descriptor)
    if not stat.S_ISDIR(status.st_mode):
        raise NotPrivate(_type_error(path, status.st_mode, "directory"))
    if status.st_uid not in (os.geteuid(), *owners):
        raise NotPrivate(
            f"{os.fspath(path)!r} belongs to {_user(status.st_uid)}, and this process runs as {_user(os.geteuid())}: "
            "choose another directory, or remove this one if it is not needed"
        )
    if status.st_mode & (0o022 if readable else 0o077):
        raise NotPrivate(
            f"{os.fspath(path)!r} is open to other users (mode {stat.S_IMODE(status.st_mode):04o}): close it with "
            "chmod 700, or choose another directory"
        )


def open_private_file(path: _Name, flags: int = os.O_RDONLY, *, within: int | None = None) -> int:
    """Open a regular file that belongs to this user or to root, and that no other user can write to.

    The file is truncated only after these checks. A new file has mode 0600, and this user's file gets that mode if it
    is opened for writing.

    Args:
        path: Path of the file, or its name in the directory that `within` has open.
        flags: Flags of `os.open`.
        within: Descriptor of the directory that `path` is relative to.

    Returns:
        A descriptor, which the caller owns.

    Raises:
        NotPrivate: The path is a symbolic link, not a regular file, another user's, or writable by others.
        OSError: The file does not exist, or cannot be opened.
    """
    if flags & os.O_CREAT:
        try:
            return os.open(path, flags | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=within)
        except FileExistsError:
            if flags & os.O_EXCL:
                raise
    with owned(_find_file(path, within, close=bool(flags & (os.O_WRONLY | os.O_RDWR)))) as place:
        return os.open(f"/proc/self/fd/{place}", flags & ~os.O_CREAT | os.O_CLOEXEC)


def claim_private_file(path: _Name, *, create: bool = False) -> None:
    """Check a file as `open_private_file` does for writing, or create an empty one, without opening it.

    SQLite needs this: a process that opens and closes a database a second time loses its locks on it. Errors are those
    of `open_private_file`.
    """
    if create:
        with suppress(FileExistsError):
            os.mknod(path, stat.S_IFREG | 0o600)
    os.close(_find_file(path, None, close=True))


def _find_file(path: _Name, within: int | None, close: bool) -> int:
    """Return a descriptor (O_PATH) of a checked file. `close` removes other users' rights."""
    # Opening a FIFO could block forever, and opening a device could have any effect.
    place = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=within)
    try:
        status = os.fstat(place)
        _check_file(status, path)
        if close and status.st_mode & 0o077 and status.st_uid == os.geteuid():
            os.chmod(f"/proc/self/fd/{place}", 0o600)
    except BaseException:
        os.close(place)
        raise
    return place


def _check_file(status: os.stat_result, path: _Name) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise NotPrivate(_type_error(path, status.st_mode, "regular file"))
    if status.st_uid not in (os.geteuid(), 0):
        raise NotPrivate(
            f"{os.fspath(path)!r} belongs to {_user(status.st_uid)}, and this process runs as {_user(os.geteuid())}: "
            "move the file away"
        )
    if status.st_mode & 0o022:
        raise NotPrivate(
            f"{os.fspath(path)!r} can be written by other users (mode {stat.S_IMODE(status.st_mode):04o}): close it "
            "with chmod 600 if its content is right"
        )


def read_private_file(path: _Name, *, within: int | None = None) -> bytes:
    """Return the content of a file that `open_private_file` accepts. Errors are those of `open_private_file`."""
    with os.fdopen(open_private_file(path, within=within), "rb") as file:
        return file.read()


def write_private_file(path: _Name, content: bytes, *, within: int | None = None) -> None:
    """Write a file of mode 0600 atomically: readers see the previous file or all of the new one.

    The file survives a loss of power if the caller syncs its directory. If several callers write at once, all but one
    may fail.

    Raises:
        NotPrivate, OSError: See `open_private_file`.
    """
    draft = f"{os.fspath(path)}.draft"
    descriptor = open_private_file(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, within=within)
    try:
        remaining = memoryview(content)
        while remaining:
            remaining = remaining[os.write(descriptor, remaining) :]
        os.fsync(descriptor)
        os.rename(draft, path, src_dir_fd=within, dst_dir_fd=within)
    except BaseException:
        with suppress(OSError):
            os.unlink(draft, dir_fd=within)
        raise
    finally:
        os.close(descriptor)


def _type_error(path: _Name, mode: int, expected: str) -> str:
    if stat.S_ISLNK(mode):
        return f"{os.fspath(path)!r} is a symbolic link, which is not followed: name the {expected} that it leads to"
    return f"{os.fspath(path)!r} is not a {expected}: move it away, or choose another path"


def _user(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"
