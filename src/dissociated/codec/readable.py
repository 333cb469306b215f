"""A file object that libarrow reads from: what pyarrow asks of one."""

from __future__ import annotations


class Readable:
    """A file to be read, as pyarrow's PythonFile expects it."""

    closed = False

    def close(self) -> None:
        """Be read no more."""
        self.closed = True

    def readable(self) -> bool:
        """Always."""
        return True

    def writable(self) -> bool:
        """Never."""
        return False

    def seekable(self) -> bool:
        """Whether libarrow may move the position: not unless a subclass says so."""
        return False
