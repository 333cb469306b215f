"""The standard input and output of a command, in whatever state the process that started it has left them."""

from __future__ import annotations

import io
import select
import sys
from typing import Any, TextIO

from dissociated.base.buffers import Buffer

_KIND_SIZE = 4  # bytes that tell the kind of the data


def has_input() -> bool:
    """Return whether the standard input is a file or a pipe: it can also be closed or a terminal."""
    return sys.stdin is not None and not sys.stdin.isatty()


def open_stdin() -> io.BufferedReader:
    """Open the standard input. `peek` returns at least 4 bytes, if the input has so many."""
    raw: Any = sys.stdin.buffer
    return io.BufferedReader(_Input(_raw(raw)))


class _Input(io.RawIOBase):
    """A raw input that waits for data.

    Python returns None from a pipe that is empty for a moment, if another process has made it non-blocking. Callers
    take that for the end.
    """

    def __init__(self, raw: Any) -> None:
        self._raw = raw

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer) -> int:
        size = 0
        with memoryview(buffer) as view:
            while size < min(_KIND_SIZE, len(view)):
                count = self._raw.readinto(view[size:])
                if count is None:
                    select.select([self._raw], [], [])
                elif count == 0:
                    break
                else:
                    size += count
        return size


class _Output(io.FileIO):
    """A raw output that writes all bytes, and waits for a pipe that another process has made non-blocking.

    A write can be partial if the process is stopped meanwhile. With PYTHONUNBUFFERED, Python then drops the rest.
    """

    def write(self, data: Buffer, /) -> int:
        with memoryview(data).cast("B") as view:
            size = 0
            while size < len(view):
                count = super().write(view[size:])
                if count is None:
                    poll = select.poll()
                    poll.register(self.fileno(), select.POLLOUT)
                    poll.poll()
                size += count or 0
            return size


def complete_stdout(stdout: TextIO) -> TextIO:
    """Return the standard output such that it writes all that it is given, and escapes characters that it lacks."""
    if not isinstance(stdout, io.TextIOWrapper):
        return stdout  # not of a process: a notebook, for example
    if not isinstance(_raw(stdout.buffer), io.FileIO):
        stdout.reconfigure(errors="backslashreplace")
        return stdout
    stdout.flush()
    raw = _Output(stdout.fileno(), "w", closefd=False)
    by_line = stdout.line_buffering or stdout.write_through
    return io.TextIOWrapper(io.BufferedWriter(raw), stdout.encoding, "backslashreplace", line_buffering=by_line)


def _raw(buffer: Any) -> Any:
    return getattr(buffer, "raw", buffer)
