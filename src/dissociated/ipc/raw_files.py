"""Files as bytes: a descriptor of this library, which is read by position, or a file object that the caller closes.

Errors of the system become StoreErrors. A file that is truncated during the read raises FormatError.
"""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import AbstractContextManager
from typing import Any, Protocol

import pyarrow as pa

from dissociated.base.buffers import Buffer
from dissociated.base.oserrors import store_errors
from dissociated.codec.reader import Readable
from dissociated.errors import FormatError, StoreError


class PositionedFile(Protocol):
    """A file of `size` bytes that is read by position."""

    size: int

    def fill(self, offset: int, view: memoryview) -> None:
        """Fill `view` with the bytes at `offset`. Raises StoreError and FormatError."""

    def close(self) -> None:
        """Close the file if this object opened it."""


class DescriptorFile:
    """A file with a descriptor that this object owns. `name` is used in errors."""

    def __init__(self, descriptor: int, name: str) -> None:
        self.size = os.fstat(descriptor).st_size
        self._descriptor = descriptor
        self._name = name
        self._close = weakref.finalize(self, os.close, descriptor)

    def fill(self, offset: int, view: memoryview) -> None:
        """See `PositionedFile.fill`."""
        if not self._close.alive:  # the descriptor may be another file's by now
            raise StoreError(f"the reader of {self._name!r} is closed")
        try:
            while view:
                count = os.preadv(self._descriptor, [view], offset)
                if not count:
                    raise FormatError(f"{self._name!r} was truncated at byte {offset} during a read")
                view, offset = view[count:], offset + count
        except OSError:
            with store_errors(f"reading {self._name}"):
                raise

    def close(self) -> None:
        """Close the descriptor."""
        self._close()


class FileObject:
    """A file object that the caller closes."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._lock = threading.Lock()
        with file_errors(file):
            self.size: int = file.seek(0, os.SEEK_END)

    def fill(self, offset: int, view: memoryview) -> None:
        """See `PositionedFile.fill`. Moves the position of the file."""
        with self._lock, file_errors(self._file):
            self._file.seek(offset)
            count = _fill(self._file, view)
        if count < len(view):
            raise FormatError(f"{self._file!r} was truncated at byte {offset + count} during a read")

    def close(self) -> None:
        """Do nothing: the caller closes the file."""


class SequentialFile(Readable):
    """A file object of the caller that is read from its current position, into memory of `pool`."""

    def __init__(self, file: Any, pool: pa.MemoryPool | None) -> None:
        self._file = file
        self._pool = pool

    def read(self, size: int) -> Buffer:
        """Return the next `size` bytes, or fewer at the end of the file. Raises FormatError and StoreError."""
        if not size:
            return b""
        try:
            content = pa.allocate_buffer(size, self._pool)
        except MemoryError:
            raise FormatError(f"no memory is left for the {size} bytes that a message announces") from None
        with file_errors(self._file):
            return content.slice(0, _fill(self._file, byte_view(content)))


def byte_view(buffer: pa.Buffer) -> memoryview:
    """Return a writable view of the bytes of a buffer."""
    return memoryview(buffer).cast("B")


def _fill(file: Any, view: memoryview) -> int:
    """Read into `view`. Return the number of bytes, which is less than the view's only at the end of the file."""
    read_into = getattr(file, "readinto", None)
    filled = 0
    while filled < len(view):
        if read_into is not None:
            count = read_into(view[filled:])
        else:
            content = file.read(len(view) - filled)
            count = None if content is None else len(content)
            if count:
                view[filled : filled + count] = content
        if count is None:
            raise StoreError(f"{file!r} does not block: give a file that waits for its data")
        if not count:
            break
        filled += count
    return filled


def file_errors(file: Any) -> AbstractContextManager[None]:
    """Convert the errors of a file object to StoreError."""
    return store_errors(f"reading {file!r}")
