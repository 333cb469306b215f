"""Where IPC files and streams are read from: memory, a mapped file, or a file that is read piece by piece.

Whatever the system refuses, as a file that is not there, is a StoreError; what is wrong with content a FormatError.
"""

from __future__ import annotations

import io
import os
import stat
import threading
import weakref
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, TypeAlias

import pyarrow as pa

from dissociated.buffers import Buffer
from dissociated.codec.pyfile import Readable
from dissociated.errors import FormatError, OptionError, StoreError
from dissociated.oserrors import store_errors

#: From this byte up to, not including, that one.
ByteRange: TypeAlias = tuple[int, int]


#: Reads in the background are done so many at a time.
_READS = 64


class Prefetched(NamedTuple):
    """Bytes that have been read ahead, or are being read: some of a group."""

    start: int
    end: int
    group: Future[list[pa.Buffer]]
    nth: int

    def slice(self, start: int, end: int) -> pa.Buffer:
        """What lies there in the file, once it has been read."""
        return self.group.result()[self.nth].slice(start - self.start, end - start)


class RandomAccess(ABC):
    """Bytes that are read by position. Several threads may read at once."""

    size: int

    @abstractmethod
    def native(self) -> Any:
        """What pyarrow takes to read from here; it keeps this open. Not to be kept by this."""

    @abstractmethod
    def read(self, offset: int, length: int) -> pa.Buffer:
        """What lies there; less where the source ends before."""

    @abstractmethod
    def load(self, spans: Sequence[ByteRange]) -> None:
        """Read these in the background, and keep what was read: `read` will find it."""

    @abstractmethod
    def fetch(self, start: int, end: int) -> Prefetched | None:
        """Read this now, for `offer`."""

    @contextmanager
    def offer(self, piece: Prefetched | None) -> Iterator[None]:
        """Within, `read` finds this piece. Only one thread may be within."""
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

    def __init__(self, file: _Descriptor | _FileObject, pool: pa.MemoryPool | None) -> None:
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
        view = _bytes(whole)
        while offset < end:
            if (piece := self._piece_at(offset)) is not None:
                stop = min(end, piece.end)
                view[: stop - offset] = _bytes(piece.slice(offset, stop))
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
            self._file.fill(start, _bytes(contents[-1]))
        return contents


class _Descriptor:
    """A file of our own, which needs no position."""

    def __init__(self, descriptor: int, name: str) -> None:
        self.size = os.fstat(descriptor).st_size
        self._descriptor = descriptor
        self._name = name
        self._close = weakref.finalize(self, os.close, descriptor)

    def fill(self, offset: int, view: memoryview) -> None:
        if not self._close.alive:  # its number may be that of another file by now
            raise StoreError(f"reading {self._name}: the reader is closed")
        try:
            while view:
                count = os.preadv(self._descriptor, [view], offset)
                if not count:
                    raise FormatError(f"{self._name} was cut off at byte {offset} while it was read")
                view, offset = view[count:], offset + count
        except OSError:
            with store_errors(f"reading {self._name}"):
                raise

    def close(self) -> None:
        self._close()


class _FileObject:
    """A file object of the caller, who closes it."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._lock = threading.Lock()
        with file_errors(file):
            self.size: int = file.seek(0, os.SEEK_END)

    def fill(self, offset: int, view: memoryview) -> None:
        with self._lock, file_errors(self._file):
            self._file.seek(offset)
            count = _fill(self._file, view)
        if count < len(view):
            raise FormatError(f"{self._file!r} was cut off at byte {offset + count} while it was read")

    def close(self) -> None: ...


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


class _Sequential(Readable):
    """Reads a file object of the caller from where it stands. Memory comes from `pool`."""

    def __init__(self, file: Any, pool: pa.MemoryPool | None) -> None:
        self._file = file
        self._pool = pool

    def read(self, size: int) -> Buffer:
        if not size:
            return b""
        try:
            content = pa.allocate_buffer(size, self._pool)
        except MemoryError:
            raise FormatError(f"there is no memory for the {size} bytes that a message announces") from None
        with file_errors(self._file):
            return content.slice(0, _fill(self._file, _bytes(content)))


def _bytes(buffer: pa.Buffer) -> memoryview:
    return memoryview(buffer).cast("B")


def _fill(file: Any, view: memoryview) -> int:
    """Read into `view`. Returns how many bytes there were, fewer only at the end."""
    read_into = getattr(file, "readinto", None)
    done = 0
    while done < len(view):
        if read_into is not None:
            count = read_into(view[done:])
        else:
            content = file.read(len(view) - done)
            count = None if content is None else len(content)
            if count:
                view[done : done + count] = content
        if count is None:
            raise StoreError(f"{file!r} does not block: give a file that waits for what it reads")
        if not count:
            break
        done += count
    return done


def file_errors(file: Any) -> AbstractContextManager[None]:
    """Turn what a file object raises into a StoreError."""
    return store_errors(f"reading {file!r}")


def random_access(source: Any, memory_map: bool, pool: pa.MemoryPool | None) -> RandomAccess:
    """A path, a buffer, a pyarrow.NativeFile, or a binary file object that can seek, to be read by position."""
    if isinstance(source, str | os.PathLike):
        descriptor, name, regular = _open(source)
        if not regular:
            os.close(descriptor)
            raise StoreError(f"opening {name}: it is no regular file, so it can only be read as a stream")
        return _of_descriptor(descriptor, name, memory_map, pool)
    if isinstance(source, pa.MemoryMappedFile | pa.BufferReader):
        return _of_mapping(source)
    if hasattr(source, "read"):
        with file_errors(source):
            if not source.seekable():
                raise StoreError(f"{source!r} cannot seek, so it can only be read as a stream")
        return FileSource(_FileObject(source), pool)
    return MemorySource(_buffer(source))


def sequential(source: Any, memory_map: bool, pool: pa.MemoryPool | None) -> Any:
    """The same, or a file object that cannot seek, from where it stands on: what pyarrow reads a stream from."""
    if isinstance(source, str | os.PathLike):
        descriptor, name, regular = _open(source)
        if regular:
            return _of_descriptor(descriptor, name, memory_map, pool).native()
        file = io.FileIO(descriptor, closefd=False)
        weakref.finalize(file, os.close, descriptor)
        return pa.PythonFile(_Sequential(file, pool), mode="r")
    if isinstance(source, pa.NativeFile):
        return source
    if hasattr(source, "read"):
        return pa.PythonFile(_Sequential(source, pool), mode="r")
    return _buffer(source)


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


def _open(path: str | os.PathLike[str]) -> tuple[int, str, bool]:
    """A descriptor of it, its name, and whether it is a regular file."""
    name = os.fspath(path)
    with store_errors(f"opening {name}"):
        descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISDIR(mode):
        os.close(descriptor)
        raise StoreError(f"opening {name}: it is a directory")
    return descriptor, name, stat.S_ISREG(mode)


def _of_descriptor(descriptor: int, name: str, memory_map: bool, pool: pa.MemoryPool | None) -> RandomAccess:
    if not memory_map:
        return FileSource(_Descriptor(descriptor, name), pool)
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
            f"IPC is read from a path, a buffer, or a binary file, not from a {type(source).__name__}"
        ) from None
