"""Where the bytes of a stream or file go."""

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
    """Takes bytes until it is closed or aborted. Every method raises StoreError where the medium fails."""

    #: Where the first byte will lie, in bytes from the beginning of the medium.
    position = 0

    @abstractmethod
    def write(self, parts: Sequence[Buffer]) -> None:
        """Write all of `parts`, one after the other."""

    @abstractmethod
    def close(self) -> None:
        """Everything was written."""

    @abstractmethod
    def abort(self) -> None:
        """No more will be written, although something is missing."""


class DescriptorSink(Sink):
    """A descriptor, which it owns and closes. `what` says in errors what was being written."""

    def __init__(self, descriptor: int, what: str) -> None:
        self._file = os.fdopen(descriptor, "wb", buffering=0)
        self.what = what

    @property
    def descriptor(self) -> int:
        """The descriptor that it writes to. It stays this object's."""
        return self._file.fileno()

    def write(self, parts: Sequence[Buffer]) -> None:
        """Write all of `parts`."""
        with store_errors(self.what):
            write_parts(self.descriptor, parts)

    def close(self) -> None:
        """Close the descriptor."""
        with store_errors(self.what):
            self._file.close()

    def abort(self) -> None:
        """Keeps what was written. Does nothing after `close`."""
        with suppress(OSError):
            self._file.close()


class FileSink(Sink):
    """A binary file object or a pyarrow.NativeFile, which stays open: whoever opened it closes it."""

    def __init__(self, file: Any) -> None:
        self._file = file
        with suppress(AttributeError, OSError, ValueError):  # a pipe or a socket stands nowhere
            self.position = file.tell()

    def write(self, parts: Sequence[Buffer]) -> None:
        """Write all of `parts`. Raises StoreError also for a file that does not block and takes no more."""
        with store_errors("writing to a file object"):
            for part in parts:
                left = memoryview(part).cast("B")
                while len(left):
                    count = self._file.write(left)
                    if count is None and not isinstance(self._file, io.RawIOBase):
                        break  # some write everything and say nothing
                    if not count:
                        raise StoreError("a file object that does not block takes no more: give one that waits")
                    left = left[count:]

    def close(self) -> None:
        """Flush the file."""
        with store_errors("writing to a file object"), suppress(AttributeError):
            self._file.flush()

    def abort(self) -> None:
        """What was written stays."""


def open_sink(where: Any) -> Sink:
    """The sink for a path, whose file is made or overwritten, or for a file object.

    Raises StoreError for anything else, and where there can be no such file.
    """
    if isinstance(where, (str, os.PathLike)):
        name = os.fspath(where)
        with store_errors(f"creating {name}"):
            descriptor = os.open(where, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        return DescriptorSink(descriptor, f"writing {name}")
    if hasattr(where, "write"):
        return FileSink(where)
    raise StoreError(f"cannot write to a {type(where).__name__}: give a path or a binary file object")
