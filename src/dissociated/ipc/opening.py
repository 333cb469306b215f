"""Opening of sources of IPC data: a path, a buffer, or a file object.

Errors of the system, for example a missing file, become StoreErrors.
"""

from __future__ import annotations

import io
import os
import stat
import weakref
from typing import Any

import pyarrow as pa

from dissociated.base.oserrors import store_errors
from dissociated.errors import OptionError, StoreError
from dissociated.ipc.raw_files import DescriptorFile, FileObject, SequentialFile, file_errors
from dissociated.ipc.source import FileSource, MemorySource, RandomAccess


def random_access(source: Any, memory_map: bool, pool: pa.MemoryPool | None) -> RandomAccess:
    """Open a source for reading by position.

    Args:
        source: A path, a buffer, a pyarrow.NativeFile, or a binary file object that can seek.
        memory_map: Whether to map the file at a path.
        pool: The memory pool for the bytes that are read.

    Raises:
        StoreError: The source cannot be opened, or cannot seek.
        OptionError: The source is of another type.
    """
    if isinstance(source, str | os.PathLike):
        descriptor, name, regular = _open(source)
        if not regular:
            os.close(descriptor)
            raise StoreError(f"{name!r} is not a regular file: read it as a stream")
        return _of_descriptor(descriptor, name, memory_map, pool)
    if isinstance(source, pa.MemoryMappedFile | pa.BufferReader):
        return _of_mapping(source)
    if hasattr(source, "read"):
        with file_errors(source):
            if not source.seekable():
                raise StoreError(f"{source!r} cannot seek: read it as a stream")
        return FileSource(FileObject(source), pool)
    return MemorySource(_buffer(source))


def sequential(source: Any, memory_map: bool, pool: pa.MemoryPool | None) -> Any:
    """Open a source for pyarrow to read a stream from.

    The source is one of `random_access`, or a file object that cannot seek. A file object is read from its current
    position. Raises StoreError and OptionError.
    """
    if isinstance(source, str | os.PathLike):
        descriptor, name, regular = _open(source)
        if regular:
            return _of_descriptor(descriptor, name, memory_map, pool).native()
        file = io.FileIO(descriptor, closefd=False)
        weakref.finalize(file, os.close, descriptor)
        return pa.PythonFile(SequentialFile(file, pool), mode="r")
    if isinstance(source, pa.NativeFile):
        return source
    if hasattr(source, "read"):
        return pa.PythonFile(SequentialFile(source, pool), mode="r")
    return _buffer(source)


def _open(path: str | os.PathLike[str]) -> tuple[int, str, bool]:
    """Open a file. Return its descriptor, its name, and whether it is a regular file."""
    name = os.fspath(path)
    with store_errors(f"opening {name}"):
        descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISDIR(mode):
        os.close(descriptor)
        raise StoreError(f"{name!r} is a directory: give a file")
    return descriptor, name, stat.S_ISREG(mode)


def _of_descriptor(descriptor: int, name: str, memory_map: bool, pool: pa.MemoryPool | None) -> RandomAccess:
    if not memory_map:
        return FileSource(DescriptorFile(descriptor, name), pool)
    try:
        with store_errors(f"mapping {name}"), pa.memory_map(f"/proc/self/fd/{descriptor}") as file:
            return MemorySource(file.read_buffer(), descriptor)
    except BaseException:
        os.close(descriptor)
        raise


def _of_mapping(file: pa.NativeFile) -> MemorySource:
    with file_errors(file):
        at = file.tell()
        file.seek(0)
        whole = file.read_buffer(file.size())
        file.seek(at)
        return MemorySource(whole, os.dup(file.fileno()) if isinstance(file, pa.MemoryMappedFile) else None)


def _buffer(source: Any) -> pa.Buffer:
    try:
        return pa.py_buffer(source)
    except TypeError:
        raise OptionError(
            f"cannot read Arrow IPC from a {type(source).__name__}: give a path, a buffer or a binary file"
        ) from None
