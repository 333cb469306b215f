"""`async for` over IPC files, streams and other readers. The blocking readers run in a few threads."""

from __future__ import annotations

import asyncio
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Executor
from functools import partial, wraps
from itertools import islice, repeat
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import pyarrow as pa

from dissociated.codec.batches import RaisingAgain
from dissociated.codec.device import DeviceBatch, DeviceReader
from dissociated.codec.options import ReadOptions
from dissociated.codec.split import BatchAndMetadata, batches
from dissociated.codec.writer import ReadStats
from dissociated.errors import StoreError
from dissociated.ipc.files import FileReader, open_either, open_file
from dissociated.ipc.readahead import (
    READAHEAD,
    READAHEAD_BYTES,
    AsyncBatches,
    PendingReads,
    ReadAheadOptions,
    ReadStep,
    Threads,
)
from dissociated.ipc.source import ByteRange, joins

_THREADS = 4  # threads that read one file

P = ParamSpec("P")
T = TypeVar("T")


class _AsyncReader(ABC):
    """The base of asynchronous readers of files and streams: a blocking reader, and the threads that use it."""

    schema: pa.Schema

    def __init__(self, reader: Any, threads: Threads) -> None:
        self.schema = reader.schema
        self._reader = reader
        self._threads = threads
        self._closing = False
        self._close_lock = asyncio.Lock()
        self._reads: weakref.WeakSet[AsyncBatches] = weakref.WeakSet()

    @property
    def stats(self) -> ReadStats:
        """The counts of messages that were read so far. Raises StoreError if the reader is closed."""
        return self._open().stats

    @abstractmethod
    def batches(self) -> AsyncBatches:
        """Iterate over all batches."""

    def __aiter__(self) -> AsyncBatches:
        return self.batches()

    async def to_table(self) -> pa.Table:
        """Return all batches, or the remaining batches of a stream, as one table. Batches on a device are copied."""
        batches = [batch async for batch in self.batches()]
        return await self._threads.run(_table, batches, self.schema)

    async def aclose(self) -> None:
        """Wait for the reads in progress, close the source, and end the threads. Batches stay valid."""
        self._closing = True  # A read that begins during the close could use the descriptor of another file.
        for read in self._reads:
            read._stop()
        async with self._close_lock:  # A second call would cancel the close that this one has submitted.
            await self._threads.settle()
            self._drop()
            if self._reader is not None:
                await self._threads.run(self._close)  # in a thread, since it may block
                self._reader = None
            await self._threads.aclose()

    def _drop(self) -> None:
        """Drop the batches that were read ahead for later loops."""

    def _close(self) -> None:
        self._reader.close()

    def _open(self) -> Any:
        if self._closing:
            raise StoreError("this reader is closed")
        return self._reader

    def _begin(
        self,
        steps: Iterator[ReadStep],
        readahead_options: ReadAheadOptions,
        at_once: int,
        shared_reads: PendingReads | None = None,
    ) -> AsyncBatches:
        batches = AsyncBatches(steps, self._threads, readahead_options, at_once, shared_reads=shared_reads)
        self._reads.add(batches)
        return batches

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def _table(batches: list[Any], schema: pa.Schema) -> pa.Table:
    return pa.Table.from_batches(
        [batch.to_host() if isinstance(batch, DeviceBatch) else batch for batch in batches], schema
    )


def _in_a_thread(
    call: Callable[Concatenate[FileReader, P], T],
) -> Callable[Concatenate[AsyncFileReader, P], Coroutine[Any, Any, T]]:
    """Turn a method of FileReader into one of AsyncFileReader, which calls it in one of the reader's threads."""

    @wraps(call)
    async def called(reader: AsyncFileReader, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await reader._threads.run(call, reader._open(), *args, **kwargs)

    return called


class AsyncFileReader(_AsyncReader):
    """A reader of an IPC file that does not block the event loop, made by `open_async`.

    Its methods raise the errors of FileReader.
    """

    _reader: FileReader

    def __init__(self, file: FileReader, threads: Threads) -> None:
        super().__init__(file, threads)
        self.num_record_batches = file.num_record_batches
        self.version = file.version
        self.metadata = file.metadata

    get_batch = _in_a_thread(FileReader.get_batch)
    """Return batch number `i`, counted from 0."""

    get_batch_with_custom_metadata = _in_a_thread(FileReader.get_batch_with_custom_metadata)
    """Return batch number `i`, counted from 0, and the custom metadata of its message."""

    count_rows = _in_a_thread(FileReader.count_rows)
    """Return the number of rows of all batches, without reading a body."""

    pre_buffer_metadata = _in_a_thread(FileReader.pre_buffer_metadata)
    """Begin to load all dictionaries, and the metadata of the given batches, or of all. See FileReader."""

    def batches(
        self,
        *,
        coalesce: bool = False,
        readahead: int = READAHEAD,
        readahead_bytes: int = READAHEAD_BYTES,
        cache_options: pa.CacheOptions | None = None,
        custom_metadata: bool = False,
    ) -> AsyncBatches:
        """Iterate over all batches, and read some of them ahead.

        Args:
            coalesce: Whether to read up to `readahead` neighbouring batches at once. Their arrays then share memory.
            readahead: The largest number of batches that are read ahead.
            readahead_bytes: Reading ahead pauses when the batches that were read ahead have this many bytes.
            cache_options: The limits for neighbours that are read at once.
            custom_metadata: Whether to yield pairs of a batch and the custom metadata of its message.
        """
        cache = (cache_options or pa.CacheOptions()) if coalesce else None
        readahead_options = ReadAheadOptions(readahead, readahead_bytes, custom_metadata)
        return self._begin(_steps_of(self._open(), cache, max(1, readahead)), readahead_options, _THREADS)


def _steps_of(file: FileReader, cache: pa.CacheOptions | None, most: int) -> Iterator[ReadStep]:
    """Return the steps that read a file: each reads one batch, or with `cache` several neighbours."""
    blocks = file.footer.record_batches
    starts = blocks["offset"]
    ends = (starts + blocks["metadata_length"] + blocks["body_length"]).tolist()
    spans: list[ByteRange] = [*zip(starts.tolist(), ends, strict=True)]
    first = 0
    while first < len(spans):
        span, stop = spans[first], first + 1
        while cache and stop < min(first + most, len(spans)) and joins(span, spans[stop], cache):
            span, stop = (span[0], spans[stop][1]), stop + 1
        yield ReadStep(partial(file.read_together, range(first, stop)), stop - first, span[1] - span[0])
        first = stop


class AsyncStreamReader(_AsyncReader):
    """A reader of a stream that does not block the event loop, and reads the stream only once.

    `open_either_async` and `open_stream_async` make it. Batches of a `DeviceReader` are on its device. Raises the
    errors of the underlying `reader`.
    """

    def __init__(self, reader: pa.RecordBatchReader | DeviceReader, threads: Threads) -> None:
        super().__init__(reader, threads)
        self._remaining = _RemainingBatches(reader)
        self._pending = PendingReads()

    def batches(
        self,
        *,
        readahead: int = READAHEAD,
        readahead_bytes: int = READAHEAD_BYTES,
        custom_metadata: bool = False,
    ) -> AsyncBatches:
        """Iterate over the remaining batches, and read some of them ahead.

        Batches that an earlier loop has read ahead come first. So a loop that was left, or whose task was cancelled,
        is continued by the next one without a gap.

        Args:
            readahead: The largest number of batches that are read ahead.
            readahead_bytes: Reading ahead pauses when the batches that were read ahead have this many bytes.
            custom_metadata: Whether to yield pairs of a batch and its custom metadata.
        """
        self._open()
        readahead_options = ReadAheadOptions(readahead, readahead_bytes, custom_metadata)
        return self._begin(repeat(ReadStep(self._remaining.take)), readahead_options, 1, self._pending)

    def _drop(self) -> None:
        self._pending.jobs.clear()

    def _close(self) -> None:
        self._remaining.drop()
        super()._close()


class _RemainingBatches:
    """The remaining batches of a reader, taken by one thread at a time."""

    def __init__(self, reader: pa.RecordBatchReader | DeviceReader) -> None:
        self._lock = threading.Lock()
        on_device = isinstance(reader, DeviceReader)
        pairs = ((batch, batch.metadata) for batch in reader) if on_device else batches(reader)
        self._pairs: Iterator[BatchAndMetadata] = RaisingAgain(pairs)

    def take(self) -> list[BatchAndMetadata]:
        """Return a list of the next batch, or an empty list at the end."""
        with self._lock:
            return [*islice(self._pairs, 1)]

    def drop(self) -> None:
        """Release the reader."""
        self._pairs = iter(())


def async_batches(
    reader: pa.RecordBatchReader | DeviceReader,
    *,
    readahead: int = READAHEAD,
    readahead_bytes: int = READAHEAD_BYTES,
    custom_metadata: bool = False,
) -> AsyncBatches:
    """Iterate over an open reader, for example one of `dissociated.open_stream`, with `async for`.

    A thread reads; it ends with the last batch, or with `aclose`. The caller keeps the reader, and must not read from
    it: batches that were read ahead are missing there, also after a loop that was left. Batches of a `DeviceReader` are
    on its device. For the other arguments see `AsyncStreamReader.batches`.
    """
    readahead_options = ReadAheadOptions(readahead, readahead_bytes, custom_metadata)
    return AsyncBatches(
        repeat(ReadStep(_RemainingBatches(reader).take)), Threads(1), readahead_options, 1, owns_threads=True
    )


async def open_async(
    source: Any,
    *,
    footer_offset: int | None = None,
    memory_map: bool = True,
    options: ReadOptions | None = None,
    executor: Executor | None = None,
) -> AsyncFileReader:
    """Open an IPC file without blocking the event loop.

    `source` and the options are the arguments of `open_file`, and so are the errors. Reads run in up to 4 threads that
    end with the reader, or in `executor`, which the caller keeps and shuts down.

    Example:
        ```python
        from dissociated import ipc

        async with await ipc.open_async("flights.arrow") as reader:
            batch = await reader.get_batch(0)
        ```
    """
    threads = Threads(_THREADS, executor)

    def opened() -> AsyncFileReader:
        reader = open_file(source, footer_offset=footer_offset, memory_map=memory_map, options=options)
        return AsyncFileReader(reader, threads)

    return await _opened(threads, opened)


async def open_either_async(
    source: Any, *, memory_map: bool = True, options: ReadOptions | None = None, executor: Executor | None = None
) -> AsyncFileReader | AsyncStreamReader:
    """Open an IPC file or stream without blocking the event loop.

    A source that begins or ends with the magic of a file is opened as a file. Arguments and errors are the ones of
    `open_file` and `open_stream`; `executor` is the one of `open_async`.
    """
    threads = Threads(_THREADS, executor)

    def opened() -> AsyncFileReader | AsyncStreamReader:
        reader = open_either(source, memory_map=memory_map, options=options)
        return (AsyncFileReader if isinstance(reader, FileReader) else AsyncStreamReader)(reader, threads)

    return await _opened(threads, opened)


async def open_reader_async(
    open_reader: Callable[P, pa.RecordBatchReader | DeviceReader], *args: P.args, **kwargs: P.kwargs
) -> AsyncStreamReader:
    """Call `open_reader` with the other arguments, in the thread that reads afterwards, and wrap the opened reader."""
    threads = Threads(1)
    return await _opened(threads, lambda: AsyncStreamReader(open_reader(*args, **kwargs), threads))


async def _opened(threads: Threads, opened: Callable[[], T]) -> T:
    try:
        return await threads.run(opened)
    except BaseException:
        await threads.aclose()
        raise
