"""`async for` over IPC files and streams, and over any reader: the blocking readers, in a few threads."""

from __future__ import annotations

import asyncio
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import islice, repeat
from types import TracebackType
from typing import Any, NamedTuple, ParamSpec, Self, TypeAlias, TypeVar

import pyarrow as pa

from dissociated.codec.options import ReadOptions
from dissociated.codec.stats import ReadStats
from dissociated.errors import OptionError, StoreError
from dissociated.ipc.files import FileReader, open_either
from dissociated.ipc.source import Span, joins

#: How many batches, and bytes of them, are read before they are asked for.
READAHEAD = 8
READAHEAD_BYTES = 1 << 26

_THREADS = 4  # that read one file

P = ParamSpec("P")
T = TypeVar("T")

Pair: TypeAlias = tuple[pa.RecordBatch, pa.KeyValueMetadata | None]


class _Threads:
    """Where calls that block are made: threads of its own, or an executor that somebody lends."""

    def __init__(self, count: int, executor: Executor | None = None) -> None:
        self._own = ThreadPoolExecutor(count, thread_name_prefix="dissociated read") if executor is None else None
        self._executor = executor or self._own
        self._running: set[Future[Any]] = set()

    def submit(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        if self._executor is None:
            raise StoreError("this reader is closed")
        try:
            future = self._executor.submit(call, *args, **kwargs)
        except RuntimeError as error:
            raise StoreError(f"the executor takes no calls: {error}") from None
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        return future

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.wrap_future(self.submit(call, *args, **kwargs))

    def end(self) -> None:
        """Take no more calls. Threads end when those that were made do."""
        self._executor = None
        if self._own is not None:
            self._own.shutdown(wait=False)

    async def settle(self) -> None:
        """Wait for the calls that were made, and leave out those that have not begun."""
        await _finished(self._running)

    async def aclose(self) -> None:
        """Take no more calls, and wait until the threads have ended."""
        self.end()
        await self.settle()
        if self._own is not None:
            self._own.shutdown()


async def _finished(futures: Iterable[Future[Any]]) -> None:
    """Wait for calls, and leave out those that have not begun. A call that runs cannot be interrupted."""
    running = [future for future in [*futures] if not future.cancel()]
    await asyncio.gather(*map(asyncio.wrap_future, running), return_exceptions=True)


class _Step(NamedTuple):
    """A call that reads some batches. None for what is not known before; a call that gives none is the last."""

    read: Callable[[], Iterable[Pair]]
    number: int = 1
    nbytes: int | None = None


class _How(NamedTuple):
    """What a caller wants of batches."""

    readahead: int
    readahead_bytes: int
    custom_metadata: bool


def _how(readahead: int, readahead_bytes: int, custom_metadata: bool) -> _How:
    if readahead < 0 or readahead_bytes < 0:
        raise OptionError("readahead and readahead_bytes are numbers of batches and of bytes, from 0 on")
    return _How(readahead, readahead_bytes, custom_metadata)


class _Job:
    """A step that is being made, or has been."""

    def __init__(self, step: _Step, threads: _Threads) -> None:
        self.left = step.number  # of batches that are still to be taken
        self.nbytes = step.nbytes or 0
        self.batches: deque[Pair] = deque()
        self.error: BaseException | None = None
        self.last = False  # of all: it found the end, or an error
        self.future = threads.submit(self._make, step)

    def _make(self, step: _Step) -> None:
        try:
            self.batches.extend(step.read())  # keeps what comes before an exception
        except BaseException as error:
            self.error = error
        if step.nbytes is None:
            # not nbytes, which follows offsets that nobody has checked
            self.nbytes = sum(batch.get_total_buffer_size() for batch, _ in self.batches)
        self.last = self.error is not None or not self.batches


class AsyncBatches(AsyncIterator[Any]):
    """Record batches, in order, some of them read before they are asked for.

    Several `__anext__` may be outstanding: each gets the next batch, in the order in which they began, and so many
    are read at once. One that is cancelled takes no batch. What reading a batch raises comes out where the batch
    would have, and ends the iteration.

    Reading ahead pauses where it has come far enough, and stops when this is closed or dropped. `aclose` waits for
    the reads that have begun, which nothing can interrupt.
    """

    def __init__(
        self, steps: Iterator[_Step], threads: _Threads, how: _How, at_once: int, owns_threads: bool = False
    ) -> None:
        self._jobs: deque[_Job] = deque()  # in order; the first stays until all of its batches are taken
        self._steps: Iterator[_Step] | None = steps  # None where there are no more
        self._threads = threads
        self._how = how
        self._at_once = at_once
        self._owns_threads = owns_threads
        self._asked = 0  # calls of __anext__ that are outstanding
        self._turn = asyncio.Lock()  # first come, first served
        self._progress = asyncio.Event()

    async def __anext__(self) -> Any:
        self._asked += 1
        try:
            self._read_ahead()
            async with self._turn:
                both = await self._next()
        finally:
            self._asked -= 1
        self._read_ahead()
        return both if self._how.custom_metadata else both[0]

    async def aclose(self) -> None:
        """Stop. Outstanding calls find the end."""
        running = [job.future for job in self._jobs]
        self._stop()
        await _finished(running)
        if self._owns_threads:
            await self._threads.aclose()

    async def _next(self) -> Pair:
        while self._jobs:
            job = self._jobs[0]
            if not job.future.done():
                self._progress.clear()
                await self._progress.wait()
            elif job.batches:
                job.left -= 1
                return job.batches.popleft()
            else:
                self._jobs.popleft()
                if job.future.cancelled():
                    job.error = StoreError("the executor was shut down while a file was read")
                if job.error is not None:
                    self._stop()
                    raise job.error
                if job.last:
                    break
                self._read_ahead()
        self._stop()
        raise StopAsyncIteration

    def _read_ahead(self) -> None:
        while self._steps is not None and self._has_room():
            step = next(self._steps, None)
            if step is None:
                self._steps = None
                return
            job = _Job(step, self._threads)
            self._jobs.append(job)
            job.future.add_done_callback(partial(_tell, asyncio.get_running_loop(), weakref.ref(self)))

    def _has_room(self) -> bool:
        running = sum(not job.future.done() for job in self._jobs)
        if running >= self._at_once or any(job.last for job in self._jobs):
            return False
        ahead = sum(job.left for job in self._jobs) - self._asked
        if ahead < 0:
            return True
        held = sum(job.nbytes for job in self._jobs if job.left)
        return ahead < self._how.readahead and held < self._how.readahead_bytes

    def _progressed(self) -> None:
        self._progress.set()
        with suppress(StoreError):  # which comes again, and to the caller, with the next batch
            self._read_ahead()

    def _stop(self) -> None:
        self._steps = None
        for job in self._jobs:
            job.future.cancel()
        self._jobs.clear()
        self._progress.set()
        if self._owns_threads:
            self._threads.end()

    def __del__(self) -> None:
        self._stop()


def _tell(loop: asyncio.AbstractEventLoop, waiting: weakref.ref[AsyncBatches], future: Future[None]) -> None:
    """Let the loop know, from a thread, that a step is made."""

    def progressed() -> None:
        if (batches := waiting()) is not None:
            batches._progressed()

    with suppress(RuntimeError):  # the loop is closed: nobody waits
        loop.call_soon_threadsafe(progressed)


class _AsyncReader(ABC):
    """What readers of files and of streams share: threads, and what is open in them."""

    schema: pa.Schema

    def __init__(self, reader: Any, threads: _Threads) -> None:
        self.schema = reader.schema
        self._reader = reader
        self._threads = threads
        self._begun: weakref.WeakSet[AsyncBatches] = weakref.WeakSet()

    @property
    def stats(self) -> ReadStats:
        """What has been read so far. Raises StoreError where the reader is closed."""
        return self._open().stats

    @abstractmethod
    def batches(self) -> AsyncBatches:
        """All batches."""

    def __aiter__(self) -> AsyncBatches:
        return self.batches()

    async def to_table(self) -> pa.Table:
        """All batches, or those that are left of a stream, as one table."""
        return pa.Table.from_batches([batch async for batch in self.batches()], self.schema)

    async def aclose(self) -> None:
        """Let go of the source, and end the threads, once the reads that have begun are done. Batches stay."""
        for batches in self._begun:
            batches._stop()
        await self._threads.settle()
        if self._reader is not None:
            await self._threads.run(self._close)  # which may block
        await self._threads.aclose()

    def _close(self) -> None:
        reader, self._reader = self._reader, None
        reader.close()

    def _open(self) -> Any:
        if self._reader is None:
            raise StoreError("this reader is closed")
        return self._reader

    def _begin(self, steps: Iterator[_Step], how: _How, at_once: int) -> AsyncBatches:
        batches = AsyncBatches(steps, self._threads, how, at_once)
        self._begun.add(batches)
        return batches

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class AsyncFileReader(_AsyncReader):
    """Reads an IPC file without blocking the event loop; made by `open_async`. Raises what FileReader raises."""

    _reader: FileReader

    def __init__(self, file: FileReader, threads: _Threads) -> None:
        super().__init__(file, threads)
        self.num_record_batches = file.num_record_batches
        self.version = file.version
        self.metadata = file.metadata

    async def get_batch(self, i: int) -> pa.RecordBatch:
        """The batch of that number, from 0 on."""
        return await self._threads.run(self._open().get_batch, i)

    async def get_batch_with_custom_metadata(self, i: int) -> Pair:
        """The batch of that number, and the metadata that its message carries."""
        both: Pair = await self._threads.run(self._open().get_batch_with_custom_metadata, i)
        return both

    async def count_rows(self) -> int:
        """The rows of all batches together. Reads no body."""
        rows: int = await self._threads.run(self._open().count_rows)
        return rows

    async def pre_buffer_metadata(self, indices: Sequence[int] | None = None) -> None:
        """Begin to load the metadata of these batches, or of all, and all dictionaries; see FileReader."""
        await self._threads.run(self._open().pre_buffer_metadata, indices)

    def batches(
        self,
        *,
        coalesce: bool = False,
        readahead: int = READAHEAD,
        readahead_bytes: int = READAHEAD_BYTES,
        cache_options: pa.CacheOptions | None = None,
        custom_metadata: bool = False,
    ) -> AsyncBatches:
        """All batches, of which up to `readahead` are read before they are asked for, and no more once these have
        `readahead_bytes`.

        With `coalesce`, up to `readahead` neighbours are read at once, as `cache_options` say: their arrays then
        share memory. With `custom_metadata`, it gives pairs of a batch and the metadata of its message.
        """
        cache = (cache_options or pa.CacheOptions()) if coalesce else None
        how = _how(readahead, readahead_bytes, custom_metadata)
        return self._begin(_steps_of(self._open(), cache, max(1, readahead)), how, _THREADS)


def _steps_of(file: FileReader, cache: pa.CacheOptions | None, most: int) -> Iterator[_Step]:
    """The batches of a file, one by one, or some at once as `cache` says."""
    blocks = file.footer.record_batches
    starts = blocks["offset"]
    ends = (starts + blocks["metadata_length"] + blocks["body_length"]).tolist()
    spans: list[Span] = [*zip(starts.tolist(), ends, strict=True)]
    first = 0
    while first < len(spans):
        span, stop = spans[first], first + 1
        while cache and stop < min(first + most, len(spans)) and joins(span, spans[stop], cache):
            span, stop = (span[0], spans[stop][1]), stop + 1
        yield _Step(partial(file.read_together, range(first, stop)), stop - first, span[1] - span[0])
        first = stop


class AsyncStreamReader(_AsyncReader):
    """Reads a stream, once, without blocking the event loop; made by `open_async` and `open_stream_async`.

    Raises what the reader raises that it is made of.
    """

    def __init__(self, reader: pa.RecordBatchReader, threads: _Threads) -> None:
        super().__init__(reader, threads)
        self._left = _Left(reader)

    def batches(
        self,
        *,
        readahead: int = READAHEAD,
        readahead_bytes: int = READAHEAD_BYTES,
        custom_metadata: bool = False,
    ) -> AsyncBatches:
        """The batches that are left, of which up to `readahead` are read before they are asked for, and no more once
        these have `readahead_bytes`. With `custom_metadata`, it gives pairs of a batch and its metadata.
        """
        self._open()
        return self._begin(repeat(_Step(self._left.take)), _how(readahead, readahead_bytes, custom_metadata), 1)

    def _close(self) -> None:
        self._left.drop()
        super()._close()


class _Left:
    """What is left of a reader, to be taken by one thread at a time."""

    def __init__(self, reader: pa.RecordBatchReader) -> None:
        self._lock = threading.Lock()
        self._pairs: Iterator[Pair]
        if isinstance(reader, pa.ipc.RecordBatchStreamReader):  # only those know metadata of single batches
            self._pairs = reader.iter_batches_with_custom_metadata()
        else:
            self._pairs = ((batch, None) for batch in reader)

    def take(self) -> list[Pair]:
        """The next batch, or none."""
        with self._lock:
            return [*islice(self._pairs, 1)]

    def drop(self) -> None:
        """Let go of the reader."""
        self._pairs = iter(())


def async_batches(
    reader: pa.RecordBatchReader,
    *,
    readahead: int = READAHEAD,
    readahead_bytes: int = READAHEAD_BYTES,
    custom_metadata: bool = False,
) -> AsyncBatches:
    """`async for` over a reader that is open, as what `dissociated.open_stream` gives: see AsyncStreamReader.batches.

    It reads in a thread of its own, which ends with the last batch, or with `aclose`. The reader stays the caller's,
    who does not read from it meanwhile.
    """
    how = _how(readahead, readahead_bytes, custom_metadata)
    return AsyncBatches(repeat(_Step(_Left(reader).take)), _Threads(1), how, 1, owns_threads=True)


async def open_async(
    source: Any,
    *,
    footer_offset: int | None = None,
    memory_map: bool = True,
    options: ReadOptions | None = None,
    executor: Executor | None = None,
) -> AsyncFileReader | AsyncStreamReader:
    """Open an IPC file or stream: what `open_file` or `open_stream` takes, and raises, without blocking the loop.

    It is taken for a file if it begins or ends with the magic; `footer_offset` says that it is one. Reads are done in
    up to 4 threads that end with the reader, or in `executor`, which stays the caller's.
    """
    threads = _Threads(_THREADS, executor)

    def opened() -> AsyncFileReader | AsyncStreamReader:
        reader = open_either(source, footer_offset=footer_offset, memory_map=memory_map, options=options)
        return (AsyncFileReader if isinstance(reader, FileReader) else AsyncStreamReader)(reader, threads)

    return await _opened(threads, opened)


async def open_reader_async(
    open_reader: Callable[P, pa.RecordBatchReader], *args: P.args, **kwargs: P.kwargs
) -> AsyncStreamReader:
    """What `open_reader` opens when it is called with these, which is done in the thread that then reads."""
    threads = _Threads(1)
    return await _opened(threads, lambda: AsyncStreamReader(open_reader(*args, **kwargs), threads))


async def _opened(threads: _Threads, opened: Callable[[], T]) -> T:
    try:
        return await threads.run(opened)
    except BaseException:
        await threads.aclose()
        raise
