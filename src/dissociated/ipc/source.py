"""Sources of IPC files and streams: memory, a mapped file, or a file that is read piece by piece.

Errors of the system, for example a missing file, become StoreErrors. Invalid content raises FormatError.
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

#: The position of the first byte, and the position after the last byte.
ByteRange: TypeAlias = tuple[int, int]
#: The number of ranges that are read by one call in the background.
_READS = 64


class Prefetched(NamedTuple):
    """A range of bytes that was read ahead, or is being read, together with other ranges."""

    start: int
    end: int
    #: The read of several ranges: a buffer for each range.
    group: Future[list[pa.Buffer]]
    #: The index of this range's buffer.
    nth: int

    def slice(self, start: int, end: int) -> pa.Buffer:
        """Wait for the read, and return the bytes from position `start` to `end` of the file."""
        return self.group.result()[self.nth].slice(start - self.start, end - start)


class RandomAccess(ABC):
    """A source that is read by position. Several threads may read at once."""

    size: int

    @abstractmethod
    def native(self) -> Any:
        """Return an object through which pyarrow reads this source.

        The object refers to this source, which must not refer back to it.
        """

    @abstractmethod
    def read(self, offset: int, length: int) -> pa.Buffer:
        """Return `length` bytes at `offset`, or fewer if the source ends before."""

    @abstractmethod
    def load(self, spans: Sequence[ByteRange]) -> None:
        """Read ranges in the background, and keep them for `read` until `close`."""

    @abstractmethod
    def fetch(self, start: int, end: int) -> Prefetched | None:
        """Read a range now, for `offer`. Return None if a later read costs nothing."""

    @contextmanager
    def offer(self, piece: Prefetched | None) -> Iterator[None]:
        """Make `read` use `piece` within this context, in which there may be only one thread at a time."""
        yield

    @abstractmethod
    def close(self) -> None:
        """Close the source if this object opened it. Buffers that were read stay valid."""


class MemorySource(RandomAccess):
    """A buffer or a mapped file: reads return slices. This object owns the `descriptor` of a mapped file."""

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
            for start, end in spans:  # equivalent to madvise, which would need an address
                os.posix_fadvise(self._descriptor, start, end - start, os.POSIX_FADV_WILLNEED)  # type: ignore[arg-type]

    def fetch(self, start: int, end: int) -> None:
        self.load([(start, end)])

    def close(self) -> None:
        if self._close is not None:
            self._close()


class FileSource(RandomAccess):
    """A file that is read piece by piece, into memory of `pool`."""

    def __init__(self, file: PositionedFile, pool: pa.MemoryPool | None) -> None:
        self.size = file.size
        self._file = file
        self._pool = pool
        # The starts of the pieces, and the pieces. Both lists are replaced, never changed, since readers hold no lock.
        self._pieces: tuple[list[int], list[Prefetched]] = [], []
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
        requested = [(start, min(end, self.size)) for start, end in spans if start < self.size]
        with self._loading:
            missing = [span for span in requested if (piece := self._piece_at(span[0])) is None or piece.end < span[1]]
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
    """A source with a current position, which libarrow moves."""

    def __init__(self, source: RandomAccess) -> None:
        self._source = source
        self._at = 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (self._source.size if whence == os.SEEK_END else 0)
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int) -> pa.Buffer:
        content = self._source.read(self._at, size)
        self._at += content.size
        return content

    def seekable(self) -> bool:
        return True


def coalesced(spans: Sequence[ByteRange], cache: pa.CacheOptions) -> list[ByteRange]:
    """Join neighbouring ranges within the limits of `cache`. Return the joined ranges, in order."""
    together: list[ByteRange] = []
    for start, end in sorted(spans):
        if together and joins(together[-1], (start, end), cache):
            together[-1] = together[-1][0], max(together[-1][1], end)
        else:
            together.append((start, end))
    return together


def joins(first: ByteRange, second: ByteRange, cache: pa.CacheOptions) -> bool:
    """Return whether to read two ranges together. This is never so if `second` begins before `first`."""
    near: bool = second[0] - first[1] <= cache.hole_size_limit and second[1] - first[0] <= cache.range_size_limit
    return near and second[0] >= first[0]
