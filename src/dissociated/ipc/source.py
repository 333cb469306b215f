"""Where IPC files and streams are read from: memory, a mapped file, or a file that is read piece by piece.

Whatever the system refuses, as a file that is not there, is a StoreError; what is wrong with content a FormatError.
"""

from __future__ import annotations

import os
import threading
import weakref
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import pyarrow as pa

from dissociated.codec.reader import Readable
from dissociated.ipc.raw_files import PositionedFile, byte_view

#: From this byte up to, not including, that one.
ByteRange: TypeAlias = tuple[int, int]
#: How many ranges are read together in the background.
_READS = 64


class Prefetched(NamedTuple):
    """A range of bytes that has been read ahead, or is being read, together with others."""

    start: int
    end: int
    #: What is read together: a buffer for each range.
    group: Future[list[pa.Buffer]]
    #: Which of these buffers is that of this range.
    nth: int

    def slice(self, start: int, end: int) -> pa.Buffer:
        """The bytes from `start` to `end` of the file, once they have been read."""
        return self.group.result()[self.nth].slice(start - self.start, end - start)


class RandomAccess(ABC):
    """Bytes that are read by position. Several threads may read at once."""

    size: int

    @abstractmethod
    def native(self) -> Any:
        """What pyarrow reads from here with. It keeps this source open, so the source must not keep it."""

    @abstractmethod
    def read(self, offset: int, length: int) -> pa.Buffer:
        """The bytes at this offset: `length` of them, or fewer where the source ends before."""

    @abstractmethod
    def load(self, spans: Sequence[ByteRange]) -> None:
        """Read these ranges in the background, and keep them until `close`: `read` takes what was read."""

    @abstractmethod
    def fetch(self, start: int, end: int) -> Prefetched | None:
        """Read this range now, for `offer`. None where reading it later costs nothing."""

    @contextmanager
    def offer(self, piece: Prefetched | None) -> Iterator[None]:
        """Within this context, `read` takes this piece. Only one thread may be within."""
        yield

    @abstractmethod
    def close(self) -> None:
        """Let go of what this opened. What was read stays."""


class MemorySource(RandomAccess):
    """A buffer, or a mapped file: reading is slicing. The `descriptor` of a mapped file is owned."""

    def __init__(self, memory: pa.Buffer, descriptor: int | None = None) -> None:
        self.size: int = memory.size
        self._memory = memory
        self._descriptor = descriptor
        self._close = weakref.finalize(self, os.close, descriptor) if descriptor is not None else None

    def native(self) -> pa.Buffer:
        return self._memory

    def read(self, offset: int, length: int) -> pa.Buffer:
        start = min(offset, self.size)
        return self._memory.slice(start, min(length, self.size - start))

    def load(self, spans: Sequence[ByteRange]) -> None:
        if self._close is not None and self._close.alive:
            for start, end in spans:  # the kernel does the same for madvise, which takes an address
                os.posix_fadvise(self._descriptor, start, end - start, os.POSIX_FADV_WILLNEED)  # type: ignore[arg-type]

    def fetch(self, start: int, end: int) -> None:
        self.load([(start, end)])

    def close(self) -> None:
        if self._close is not None:
            self._close()


class FileSource(RandomAccess):
    """A file that is read piece by piece. Memory comes from `pool`."""

    def __init__(self, file: PositionedFile, pool: pa.MemoryPool | None) -> None:
        self.size = file.size
        self._file = file
        self._pool = pool
        self._pieces: tuple[list[int], list[Prefetched]] = [], []  # where they start, and they: replaced, never changed
        self._offered: Prefetched | None = None
        self._background: ThreadPoolExecutor | None = None
        self._loading = threading.Lock()

    def native(self) -> pa.PythonFile:
        return pa.PythonFile(_Cursor(self), mode="r")

    def read(self, offset: int, length: int) -> pa.Buffer:
        end = min(offset + length, self.size)
        if not 0 <= offset < end:
            return pa.py_buffer(b"")
        piece = self._piece_at(offset)
        if piece is not None and end <= piece.end:
            return piece.slice(offset, end)
        whole = pa.allocate_buffer(end - offset, self._pool)
        view = byte_view(whole)
        while offset < end:
            if (piece := self._piece_at(offset)) is not None:
                stop = min(end, piece.end)
                view[: stop - offset] = byte_view(piece.slice(offset, stop))
            else:
                stop = min(end, self._next_piece(offset))
                self._file.fill(offset, view[: stop - offset])
            view = view[stop - offset :]
            offset = stop
        return whole

    def load(self, spans: Sequence[ByteRange]) -> None:
        wanted = [(start, min(end, self.size)) for start, end in spans if start < self.size]
        with self._loading:
            missing = [span for span in wanted if (piece := self._piece_at(span[0])) is None or piece.end < span[1]]
            if missing and self._background is None:
                self._background = ThreadPoolExecutor(1, thread_name_prefix="read ahead")
            pieces = [*self._pieces[1]]
            for first in range(0, len(missing), _READS):
                some = missing[first : first + _READS]
                group = self._background.submit(self._read_all, some)  # type: ignore[union-attr]  # it is there now
                pieces += (Prefetched(start, end, group, nth) for nth, (start, end) in enumerate(some))
            pieces.sort(key=lambda piece: piece.start)
            self._pieces = [piece.start for piece in pieces], pieces

    def fetch(self, start: int, end: int) -> Prefetched:
        content = self.read(start, end - start)
        group: Future[list[pa.Buffer]] = Future()
        group.set_result([content])
        return Prefetched(start, start + content.size, group, 0)

    @contextmanager
    def offer(self, piece: Prefetched | None) -> Iterator[None]:
        self._offered = piece
        try:
            yield
        finally:
            self._offered = None

    def close(self) -> None:
        if self._background is not None:
            self._background.shutdown(cancel_futures=True)
        self._pieces = [], []
        self._file.close()

    def _piece_at(self, offset: int) -> Prefetched | None:
        offered = self._offered
        if offered is not None and offered.start <= offset < offered.end:
            return offered
        starts, pieces = self._pieces
        index = bisect_right(starts, offset) - 1
        return pieces[index] if index >= 0 and offset < pieces[index].end else None

    def _next_piece(self, offset: int) -> int:
        starts, _ = self._pieces
        index = bisect_right(starts, offset)
        return starts[index] if index < len(starts) else self.size

    def _read_all(self, spans: Sequence[ByteRange]) -> list[pa.Buffer]:
        contents = []
        for start, end in spans:
            contents.append(pa.allocate_buffer(end - start, self._pool))
            self._file.fill(start, byte_view(contents[-1]))
        return contents


class _Cursor(Readable):
    """Reads a source at a position that libarrow moves."""

    def __init__(self, source: RandomAccess) -> None:
        self._source = source
        self._at = 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (self._source.size if whence == os.SEEK_END else 0)
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int) -> pa.Buffer:
        found = self._source.read(self._at, size)
        self._at += found.size
        return found

    def seekable(self) -> bool:
        return True


def coalesced(spans: Sequence[ByteRange], cache: pa.CacheOptions) -> list[ByteRange]:
    """The same bytes in fewer spans: neighbours are put together where `cache` lets them."""
    together: list[ByteRange] = []
    for start, end in sorted(spans):
        if together and joins(together[-1], (start, end), cache):
            together[-1] = together[-1][0], max(together[-1][1], end)
        else:
            together.append((start, end))
    return together


def joins(one: ByteRange, other: ByteRange, cache: pa.CacheOptions) -> bool:
    """Whether `other`, which does not begin before `one`, shall be read together with it."""
    near: bool = other[0] - one[1] <= cache.hole_size_limit and other[1] - one[0] <= cache.range_size_limit
    return near and other[0] >= one[0]
