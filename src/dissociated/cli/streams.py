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
    return io.BufferedReader(_Input(getattr(raw, "raw", raw)))


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


class _Unbuffered(io.TextIOWrapper):
    """The output of Python without a buffer, with a buffer for each line.

    A write can be partial if the process is stopped meanwhile. Python then drops the rest, but a buffer keeps it.
    """

    def __init__(self, stdout: io.TextIOWrapper) -> None:
        raw = io.FileIO(stdout.fileno(), "w", closefd=False)
        super().__init__(io.BufferedWriter(raw), stdout.encoding, "backslashreplace", line_buffering=True)
        self._stdout = stdout  # if nothing else refers to it, it would close the descriptor


def complete_stdout(stdout: TextIO) -> TextIO:
    """Return the standard output such that it writes all that it is given, and escapes characters that it lacks."""
    if not isinstance(stdout, io.TextIOWrapper):
        return stdout  # not of a process: a notebook, for example
    if isinstance(stdout.buffer, io.FileIO):
        stdout.flush()
        return _Unbuffered(stdout)
    stdout.reconfigure(errors="backslashreplace")
    return stdout
