"""Destinations for the bytes of a stream or file."""

from __future__ import annotations

import io
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from dissociated.base.buffers import Buffer
from dissociated.base.oserrors import store_errors
from dissociated.errors import StoreError
from dissociated.memory.shared import write_parts


class Sink(ABC):
    """A destination that takes bytes until it is closed or aborted.

    Every method raises StoreError if the medium fails.
    """

    #: Position of the first byte to write, in bytes from the beginning of the medium.
    position = 0

    @abstractmethod
    def write(self, parts: Sequence[Buffer]) -> None:
        """Write all of `parts`, in order."""

    @abstractmethod
    def close(self) -> None:
        """End the output: all bytes were written."""

    @abstractmethod
    def abort(self) -> None:
        """End the output before all bytes were written."""


class DescriptorSink(Sink):
    """A file descriptor, which the sink owns and closes. `operation` describes it in error messages."""

    def __init__(self, descriptor: int, operation: str) -> None:
        self._file = os.fdopen(descriptor, "wb", buffering=0)
        self.operation = operation

    @property
    def descriptor(self) -> int:
        """The descriptor, which the sink still owns."""
        return self._file.fileno()

    def write(self, parts: Sequence[Buffer]) -> None:
        """Write all of `parts`."""
        with store_errors(self.operation):
            write_parts(self.descriptor, parts)

    def close(self) -> None:
        """Close the descriptor."""
        with store_errors(self.operation):
            self._file.close()

    def abort(self) -> None:
        """Close the descriptor, and keep the written bytes. Does nothing after `close`."""
        with suppress(OSError):
            self._file.close()


class FileSink(Sink):
    """A binary file object or a pyarrow.NativeFile. Its owner closes it; the sink does not."""

    def __init__(self, file: Any) -> None:
        self._file = file
        with suppress(AttributeError, OSError, ValueError):  # a pipe or a socket has no position
            self.position = file.tell()

    def write(self, parts: Sequence[Buffer]) -> None:
        """Write all of `parts`. Raises StoreError also for a non-blocking file that is full."""
        with store_errors("writing to a file object"):
            for part in parts:
                remaining = memoryview(part).cast("B")
                while len(remaining):
                    count = self._file.write(remaining)
                    if count is None and not isinstance(self._file, io.RawIOBase):
                        break  # such files write everything and return None
                    if not count:
                        raise StoreError("the file object accepts no more bytes without blocking: give one that waits")
                    remaining = remaining[count:]

    def close(self) -> None:
        """Flush the file."""
        with store_errors("writing to a file object"), suppress(AttributeError):
            self._file.flush()

    def abort(self) -> None:
        """Keep the written bytes."""


def open_sink(where: Any) -> Sink:
    """Open the sink for a path or a file object. The file of a path is created or overwritten.

    Raises:
        StoreError: `where` is neither a path nor a file object, or the file cannot be created.
    """
    if isinstance(where, (str, os.PathLike)):
        name = os.fspath(where)
        with store_errors(f"creating {name}"):
            descriptor = os.open(where, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        return DescriptorSink(descriptor, f"writing {name}")
    if hasattr(where, "write"):
        return FileSink(where)
    raise StoreError(f"cannot write to a {type(where).__name__}: give a path or a binary file object")
