"""A file object that libarrow reads from: what pyarrow asks of one."""

from __future__ import annotations


class Readable:
    """A file to be read, as pyarrow's PythonFile expects it."""

    closed = False

    def close(self) -> None:
        self.closed = True

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False
