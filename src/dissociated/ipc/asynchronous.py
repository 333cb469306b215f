"""`async for` over IPC files and streams, and over any reader: the blocking readers, in a few threads."""

from __future__ import annotations

import asyncio
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Executor
from functools import partial, wraps
from itertools import islice, repeat
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import pyarrow as pa

from dissociated.codec.batches import RaisingAgain
from dissociated.codec.device import DeviceBatch, DeviceReader
from dissociated.codec.options import ReadOptions
from dissociated.codec.split import BatchAndMetadata
from dissociated.codec.stats import ReadStats
from dissociated.errors import StoreError
from dissociated.ipc.files import FileReader, open_either, open_file
from dissociated.ipc.readahead import (
    READAHEAD,
    READAHEAD_BYTES,
    AsyncBatches,
    ReadAheadOptions,
    ReadStep,
    Threads,
)
from dissociated.ipc.source import ByteRange, joins

_THREADS = 4  # that read one file

P = ParamSpec("P")
T = TypeVar("T")


class _AsyncReader(ABC):
    """What asynchronous readers of files and of streams share: a blocking reader, and the threads that use it."""

    schema: pa.Schema

    def __init__(self, reader: Any, threads: Threads) -> None:
        self.schema = reader.schema
        self._reader = reader
        self._threads = threads
        self._closing = False
        self._one_closes = asyncio.Lock()
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
        """All batches, or those that are left of a stream, as one table. From a device they are copied."""
        batches = [batch async for batch in self.batches()]
        return await self._threads.run(_table, batches, self.schema)

    async def aclose(self) -> None:
        """Let go of the source, and end the threads, once the reads that have begun are done. Batches stay."""
        self._closing = True  # else a read could begin while the source is closed, and read of another file
        for batches in self._begun:
            batches._stop()
        async with self._one_closes:  # else another would cancel what this one has not begun
            await self._threads.settle()
            if self._reader is not None:
                await self._threads.run(self._close)  # which may block
                self._reader = None
            await self._threads.aclose()

    def _close(self) -> None:
        self._reader.close()

    def _open(self) -> Any:
        if self._closing:
            raise StoreError("this reader is closed")
        return self._reader

    def _begin(self, steps: Iterator[ReadStep], readahead_options: ReadAheadOptions, at_once: int) -> AsyncBatches:
        batches = AsyncBatches(steps, self._threads, readahead_options, at_once)
        self._begun.add(batches)
        return batches

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


def _table(batches: list[Any], schema: pa.Schema) -> pa.Table:
    return pa.Table.from_batches([one.to_host() if isinstance(one, DeviceBatch) else one for one in batches], schema)


def _in_a_thread(
    call: Callable[Concatenate[FileReader, P], T],
) -> Callable[Concatenate[AsyncFileReader, P], Coroutine[Any, Any, T]]:
    """The same method of the file that an AsyncFileReader reads, called in one of its threads."""

    @wraps(call)
    async def called(reader: AsyncFileReader, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await reader._threads.run(call, reader._open(), *args, **kwargs)

    return called


class AsyncFileReader(_AsyncReader):
    """Reads an IPC file without blocking the event loop; made by `open_async`. Raises what FileReader raises."""

    _reader: FileReader

    def __init__(self, file: FileReader, threads: Threads) -> None:
        super().__init__(file, threads)
        self.num_record_batches = file.num_record_batches
        self.version = file.version
        self.metadata = file.metadata

    get_batch = _in_a_thread(FileReader.get_batch)
    """The batch of that number, from 0 on."""

    get_batch_with_custom_metadata = _in_a_thread(FileReader.get_batch_with_custom_metadata)
    """The batch of that number, and the metadata that its message carries."""

    count_rows = _in_a_thread(FileReader.count_rows)
    """The rows of all batches together. Reads no body."""

    pre_buffer_metadata = _in_a_thread(FileReader.pre_buffer_metadata)
    """Begin to load the metadata of these batches, or of all, and all dictionaries; see FileReader."""

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
        readahead_options = ReadAheadOptions(readahead, readahead_bytes, custom_metadata)
        return self._begin(_steps_of(self._open(), cache, max(1, readahead)), readahead_options, _THREADS)


def _steps_of(file: FileReader, cache: pa.CacheOptions | None, most: int) -> Iterator[ReadStep]:
    """The batches of a file, one by one, or some at once as `cache` says."""
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
    """Reads a stream, once, without blocking the event loop; made by `open_either_async` and `open_stream_async`.

    With a `device`, batches lie there. Raises what the reader raises that it is made of.
    """

    def __init__(self, reader: pa.RecordBatchReader | DeviceReader, threads: Threads) -> None:
        super().__init__(reader, threads)
        self._left = _RemainingBatches(reader)

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
        return self._begin(
            repeat(ReadStep(self._left.take)), ReadAheadOptions(readahead, readahead_bytes, custom_metadata), 1
        )

    def _close(self) -> None:
        self._left.drop()
        super()._close()


class _RemainingBatches:
    """What is left of a reader, to be taken by one thread at a time."""

    def __init__(self, reader: pa.RecordBatchReader | DeviceReader) -> None:
        self._lock = threading.Lock()
        pairs: Iterator[BatchAndMetadata]
        if isinstance(reader, pa.ipc.RecordBatchStreamReader):  # only those know metadata of single batches
            pairs = reader.iter_batches_with_custom_metadata()
        elif isinstance(reader, DeviceReader):
            pairs = ((batch, batch.metadata) for batch in reader)
        else:
            pairs = ((batch, None) for batch in reader)
        self._pairs: Iterator[BatchAndMetadata] = RaisingAgain(pairs)

    def take(self) -> list[BatchAndMetadata]:
        """The next batch, or none."""
        with self._lock:
            return [*islice(self._pairs, 1)]

    def drop(self) -> None:
        """Let go of the reader."""
        self._pairs = iter(())


def async_batches(
    reader: pa.RecordBatchReader | DeviceReader,
    *,
    readahead: int = READAHEAD,
    readahead_bytes: int = READAHEAD_BYTES,
    custom_metadata: bool = False,
) -> AsyncBatches:
    """`async for` over a reader that is open, as what `dissociated.open_stream` gives: see AsyncStreamReader.batches.

    It reads in a thread of its own, which ends with the last batch, or with `aclose`. The reader stays the caller's,
    who does not read from it meanwhile. Of a `DeviceReader`, batches are on its device.
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
    """Open an IPC file: what `open_file` takes, and raises, without blocking the loop.

    Any data may precede the file. Reads are done in up to 4 threads that end with the reader, or in `executor`, which
    stays the caller's.
    """
    threads = Threads(_THREADS, executor)

    def opened() -> AsyncFileReader:
        reader = open_file(source, footer_offset=footer_offset, memory_map=memory_map, options=options)
        return AsyncFileReader(reader, threads)

    return await _opened(threads, opened)


async def open_either_async(
    source: Any, *, memory_map: bool = True, options: ReadOptions | None = None, executor: Executor | None = None
) -> AsyncFileReader | AsyncStreamReader:
    """Open an IPC file or stream: what `open_file` or `open_stream` takes, and raises, without blocking the loop.

    A source that begins or ends with the magic of a file is opened as a file. Threads are those of `open_async`.
    """
    threads = Threads(_THREADS, executor)

    def opened() -> AsyncFileReader | AsyncStreamReader:
        reader = open_either(source, memory_map=memory_map, options=options)
        return (AsyncFileReader if isinstance(reader, FileReader) else AsyncStreamReader)(reader, threads)

    return await _opened(threads, opened)


async def open_reader_async(
    open_reader: Callable[P, pa.RecordBatchReader | DeviceReader], *args: P.args, **kwargs: P.kwargs
) -> AsyncStreamReader:
    """What `open_reader` opens when it is called with these, which is done in the thread that then reads."""
    threads = Threads(1)
    return await _opened(threads, lambda: AsyncStreamReader(open_reader(*args, **kwargs), threads))


async def _opened(threads: Threads, opened: Callable[[], T]) -> T:
    try:
        return await threads.run(opened)
    except BaseException:
        await threads.aclose()
        raise
