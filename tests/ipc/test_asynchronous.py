"""Asynchronous readers: the batches of the blocking readers, in order, read ahead within limits, and no leaks."""

from __future__ import annotations

import asyncio
import gc
import inspect
import io
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.codec.options import ReadOptions
from dissociated.errors import DatasetNotFound, FormatError, OptionError, RemoteError, SourceError, StoreError
from dissociated.ipc import AsyncFileReader, AsyncStreamReader, async_batches, open_async, open_either_async
from dissociated.ipc.readahead import PendingRead
from ipc.test_files import (
    BATCHES,
    FILE,
    NOTES,
    ROWS,
    SCHEMA,
    SOURCES,
    STREAM,
    Counted,
    every_source,
    golden,
    message_spans,
    written,
)
from support.helpers import PATIENCE, Serve, leaving_nothing, location

Test = Callable[[], Awaitable[None]]


def run(test: Test) -> None:
    """Run a test, and check that it leaves no task, thread or descriptor."""

    async def checked() -> None:
        await asyncio.wait_for(test(), PATIENCE)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    with leaving_nothing():
        asyncio.run(checked(), debug=True)


class Source:
    """Counted batches of one row, which wait at `gate` and may end in an error."""

    def __init__(self, count: int, error: type[Exception] | None = None, size: int = 1) -> None:
        self.reading, self.gate = threading.Event(), threading.Event()
        self.gate.set()
        self.read = 0
        self.stopped = False
        self._count = count
        self._error = error
        self._size = size

    def reader(self) -> pa.RecordBatchReader:
        return pa.RecordBatchReader.from_batches(pa.schema({"n": pa.int64()}), self._batches())

    def _batches(self) -> Iterator[pa.RecordBatch]:
        try:
            for number in range(self._count):
                self.reading.set()
                assert self.gate.wait(PATIENCE)
                self.read += 1
                yield pa.record_batch({"n": [number] * self._size})
            if self._error is not None:
                raise self._error("no more")
        finally:
            self.stopped = True


def numbered(count: int, size: int = 1) -> bytes:
    """Return a stream of batches, in each of which all `size` rows are its number."""
    sink = pa.BufferOutputStream()
    schema = pa.schema({"n": pa.int64()})
    with pa.ipc.new_stream(sink, schema) as writer:
        for number in range(count):
            writer.write_batch(pa.record_batch({"n": [number] * size}, schema))
    return sink.getvalue().to_pybytes()


def number(batch: pa.RecordBatch) -> int:
    first: int = batch["n"][0].as_py()
    return first


class Reads(ThreadPoolExecutor):
    """A thread for reads, which are counted."""

    def __init__(self) -> None:
        super().__init__(1)
        self._count = 0

    def submit(self, call: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        self._count += 1
        return super().submit(call, *arguments, **options)

    async def settle(self) -> None:
        """Wait until all reads have ended, and the event loop has begun no others after them."""
        count = None
        while count != self._count:
            count = self._count
            await asyncio.wrap_future(super().submit(int))  # begins after the reads, and after their callbacks


@every_source
@pytest.mark.parametrize("coalesce", [False, True])
def test_a_file(source: str, coalesce: bool, tmp_path: Path) -> None:
    content = SOURCES[source][0](tmp_path / "file", FILE)

    async def test() -> None:
        async with await open_async(content) as reader:
            assert isinstance(reader, AsyncFileReader)
            assert reader.schema.equals(SCHEMA, check_metadata=True)
            assert (reader.num_record_batches, reader.metadata) == (5, {b"k": b"v"})
            assert reader.version == pa.ipc.MetadataVersion.V5
            assert await reader.count_rows() == 5 * ROWS
            await reader.pre_buffer_metadata([0, 4])
            assert await reader.get_batch(4) == BATCHES[4]
            assert await reader.get_batch_with_custom_metadata(2) == (BATCHES[2], NOTES[2])
            assert [batch async for batch in reader.batches(coalesce=coalesce)] == BATCHES
            both = reader.batches(coalesce=coalesce, custom_metadata=True)
            assert [one async for one in both] == [*zip(BATCHES, NOTES, strict=True)]
            assert [batch async for batch in reader] == BATCHES
            assert await reader.to_table() == pa.Table.from_batches(BATCHES)
            assert reader.stats.num_record_batches == 22

    run(test)


def test_a_file_after_other_data_from_any_position() -> None:
    """Like for RecordBatchFileReader::OpenAsync, the end of the source is the end of the file."""
    for before in (STREAM, FILE[:8], b"\xff\xff\xff\xff" * 2, bytes(64)):
        source = io.BytesIO(before + FILE)
        source.seek(len(before) + 3)

        async def test(source: io.BytesIO = source) -> None:
            async with await open_async(source) as reader:
                assert reader.num_record_batches == 5
                assert reader.schema.equals(SCHEMA, check_metadata=True)

        run(test)


@every_source
def test_a_stream(source: str, tmp_path: Path) -> None:
    content = SOURCES[source][0](tmp_path / "stream", STREAM)

    async def test() -> None:
        async with await open_either_async(content) as reader:
            assert isinstance(reader, AsyncStreamReader)
            assert reader.schema.equals(SCHEMA, check_metadata=True)
            batches = reader.batches(custom_metadata=True)
            assert await anext(batches) == (BATCHES[0], NOTES[0])
            assert [batch async for batch, _ in batches] == BATCHES[1:]
            assert (await reader.to_table()).num_rows == 0
            assert reader.stats == pa.ipc.ReadStats(7, 5, 1, 0, 0)

    run(test)


@pytest.mark.parametrize("readahead", [0, 1, 3, 100])
def test_any_reader(readahead: int) -> None:
    async def test() -> None:
        batches = async_batches(Source(10).reader(), readahead=readahead)
        assert [number(batch) async for batch in batches] == [*range(10)]
        with pytest.raises(StopAsyncIteration):
            await anext(batches)

    run(test)


def test_a_reader_without_batches() -> None:
    async def test() -> None:
        assert [batch async for batch in async_batches(Source(0).reader())] == []
        async with await open_async(FILE, options=ReadOptions(included_fields=[1])) as reader:
            assert (await anext(reader.batches())).schema.names == ["d"]

    run(test)


@pytest.mark.parametrize("coalesce", [False, True])
def test_calls_that_are_outstanding_get_the_batches_in_order(coalesce: bool) -> None:
    async def test() -> None:
        async with await open_async(FILE) as reader:
            assert isinstance(reader, AsyncFileReader)
            batches = reader.batches(coalesce=coalesce, readahead=2)
            found = await asyncio.gather(*(anext(batches) for _ in range(7)), return_exceptions=True)
            assert found[:5] == BATCHES
            assert [type(one) for one in found[5:]] == [StopAsyncIteration] * 2

    run(test)


def test_calls_that_are_outstanding_read_at_once() -> None:
    """Four threads meet within reading: none could continue alone."""
    meeting = threading.Barrier(4, timeout=PATIENCE)

    class Meeting(ThreadPoolExecutor):
        def submit(self, call: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
            return super().submit(lambda: (meeting.wait(), call(*arguments, **named))[1])

    async def test() -> None:
        with ThreadPoolExecutor(4) as executor:
            async with await open_async(FILE, executor=executor) as reader:
                executor.__class__ = Meeting
                batches = reader.batches(readahead=0)
                assert await asyncio.gather(*(anext(batches) for _ in range(4))) == BATCHES[:4]
                executor.__class__ = ThreadPoolExecutor

    run(test)


@pytest.mark.parametrize("readahead", [0, 1, 4])
def test_no_more_is_read_ahead_than_is_wanted(readahead: int) -> None:
    async def test() -> None:
        with Reads() as reads:
            async with await open_either_async(numbered(20), executor=reads) as reader:
                batches = reader.batches(readahead=readahead)
                for taken in range(1, 16):
                    assert number(await anext(batches)) == taken - 1
                    await reads.settle()
                    assert reader.stats.num_record_batches == taken + readahead

    run(test)


def test_no_more_bytes_are_read_ahead_than_are_wanted() -> None:
    async def test() -> None:
        with Reads() as reads:
            async with await open_either_async(numbered(20, size=1000), executor=reads) as reader:  # 8,000 bytes each
                batches = reader.batches(readahead=10, readahead_bytes=20_000)
                await anext(batches)
                await reads.settle()
                assert reader.stats.num_record_batches == 1 + 3
            async with await open_async(FILE, executor=reads) as reader:
                assert len(FILE) // 5 > 20_000
                batches = reader.batches(readahead=10, readahead_bytes=20_000)
                await anext(batches)
                await reads.settle()
                assert reader.stats.num_record_batches == 2

    run(test)


def test_nothing_is_read_before_the_first_batch_is_asked_for() -> None:
    source = Source(1)

    async def test() -> None:
        threads = {*threading.enumerate()}
        batches = async_batches(source.reader())
        await asyncio.sleep(0)
        assert {*threading.enumerate()} == threads
        assert source.read == 0
        await batches.aclose()

    run(test)


@pytest.mark.parametrize(("hole", "reads"), [(0, 1), (-1, 5)])
def test_neighbours_are_read_together(hole: int, reads: int) -> None:
    source = Counted(FILE)
    spans = message_spans()[2:]
    cache = pa.CacheOptions(hole_size_limit=hole)

    async def test() -> None:
        async with await open_async(source) as reader:
            assert isinstance(reader, AsyncFileReader)
            await reader.get_batch(0)  # also reads the dictionary
            source.reads.clear()
            assert [batch async for batch in reader.batches(coalesce=True, cache_options=cache)] == BATCHES
            assert len(source.reads) == reads
            assert sorted(source.reads)[0][0] == spans[0][0]
            assert sum(end - start for start, end in source.reads) == spans[-1][2] - spans[0][0]

    run(test)


def test_the_loop_goes_on_while_a_batch_is_awaited() -> None:
    source = Source(2)
    source.gate.clear()

    async def test() -> None:
        async with await dis.ipc.asynchronous.open_reader_async(source.reader) as reader:
            batches = reader.batches()
            waiting = asyncio.create_task(anext(batches))
            await asyncio.sleep(0)
            assert not waiting.done()
            source.gate.set()  # a blocked loop could not run this
            assert number(await waiting) == 0

    run(test)


def test_a_call_that_is_cancelled_takes_no_batch() -> None:
    source = Source(5)
    source.gate.clear()

    async def test() -> None:
        batches = async_batches(source.reader())
        calls = [asyncio.create_task(anext(batches)) for _ in range(3)]
        await asyncio.sleep(0)
        calls[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await calls[0]
        calls[1].cancel()
        source.gate.set()
        assert number(await calls[2]) == 0
        assert [number(batch) async for batch in batches] == [1, 2, 3, 4]

    run(test)


def test_closing_ends_the_calls_that_are_outstanding_by_an_error() -> None:
    """A clean end would look like the end of the stream."""
    source = Source(5)
    source.gate.clear()

    async def test() -> None:
        batches = async_batches(source.reader())
        waiting = asyncio.create_task(anext(batches))
        await asyncio.sleep(0)
        closing = asyncio.create_task(batches.aclose())
        with pytest.raises(StoreError, match="closed before its end"):
            await waiting
        assert not closing.done()  # the thread still reads
        source.gate.set()
        await closing
        await batches.aclose()

    run(test)
    assert source.read == 1


def test_a_table_is_all_of_it_or_an_error() -> None:
    source = Source(5)
    source.gate.clear()

    def failing() -> pa.RecordBatchReader:
        def batches() -> Iterator[pa.RecordBatch]:
            yield BATCHES[0]
            raise StoreError("the disk is gone")

        return pa.RecordBatchReader.from_batches(SCHEMA, batches())

    async def test() -> None:
        closed = await dis.ipc.asynchronous.open_reader_async(source.reader)
        table = asyncio.create_task(closed.to_table())
        await asyncio.sleep(0)
        closing = asyncio.create_task(closed.aclose())
        with pytest.raises(StoreError, match="closed before its end"):
            await table
        source.gate.set()
        await closing
        async with await dis.ipc.asynchronous.open_reader_async(failing) as failed:
            for _ in range(3):
                with pytest.raises(dis.DissociatedError, match="the disk is gone"):
                    await failed.to_table()

    run(test)


@pytest.mark.parametrize("memory_map", [True, False])
def test_leaving_a_loop_stops_reading(memory_map: bool, tmp_path: Path) -> None:
    path = written(tmp_path / "file", FILE)
    source = Source(100)

    async def test() -> None:
        async with await open_async(path, memory_map=memory_map) as reader:
            async for batch in reader:
                assert batch == BATCHES[0]
                break
        async for _ in async_batches(source.reader(), readahead=3):
            break

    run(test)
    assert source.stopped
    assert source.read <= 4


def test_a_task_that_is_cancelled_leaves_nothing(tmp_path: Path) -> None:
    path = written(tmp_path / "file", FILE)
    source = Source(5)
    source.gate.clear()
    begun = asyncio.Event()

    async def read() -> None:
        async with (
            await open_async(path) as file,
            await dis.ipc.asynchronous.open_reader_async(source.reader) as reader,
        ):
            await anext(file.batches())
            begun.set()
            async for _ in reader:
                raise AssertionError

    async def test() -> None:
        task = asyncio.create_task(read())
        await begun.wait()
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        source.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(test)


def test_a_loop_that_ends_without_closing_leaves_nothing(tmp_path: Path) -> None:
    async def test() -> None:
        reader = await open_async(written(tmp_path / "file", FILE), memory_map=False)
        assert isinstance(reader, AsyncFileReader)
        await anext(reader.batches())
        await reader.pre_buffer_metadata()

    with leaving_nothing():
        asyncio.run(test())


@pytest.mark.parametrize("coalesce", [False, True])
@pytest.mark.parametrize("memory_map", [False, True])
def test_an_exception_comes_out_where_its_batch_would_have(coalesce: bool, memory_map: bool, tmp_path: Path) -> None:
    content = bytearray(FILE)
    start, body, _ = message_spans()[2 + 3]
    content[start + 8 : body] = b"\xff" * (body - start - 8)
    path = written(tmp_path / "file", bytes(content))

    async def test() -> None:
        async with await open_async(path, memory_map=memory_map) as reader:
            assert isinstance(reader, AsyncFileReader)
            batches = reader.batches(coalesce=coalesce)
            calls = [asyncio.create_task(anext(batches)) for _ in range(5)]
            found = await asyncio.gather(*calls, return_exceptions=True)
            assert found[:3] == BATCHES[:3]
            assert isinstance(found[3], FormatError)
            assert isinstance(found[4], FormatError)  # the iteration is over, but not at its end, so it raises again
            assert await reader.get_batch(4) == BATCHES[4]  # the file itself stays usable
            with pytest.raises(FormatError):
                await reader.to_table()
            with pytest.raises(FormatError):
                await reader.count_rows()

    run(test)


def test_what_a_reader_raises_comes_after_its_batches() -> None:
    async def test() -> None:
        batches = async_batches(Source(3, ZeroDivisionError).reader(), readahead=10)
        found = [number(await anext(batches)) for _ in range(3)]
        assert found == [0, 1, 2]
        with pytest.raises(ZeroDivisionError, match="no more"):
            await anext(batches)
        with pytest.raises(dis.DissociatedError, match="no more"):
            await anext(batches)

    run(test)


def test_an_executor_that_is_lent_is_used_and_stays(tmp_path: Path) -> None:
    path = written(tmp_path / "file", FILE)

    async def test() -> None:
        with ThreadPoolExecutor(1) as executor:
            async with await open_async(path, executor=executor) as reader:
                assert isinstance(reader, AsyncFileReader)
                assert [batch async for batch in reader.batches(coalesce=True)] == BATCHES
            async with await open_either_async(written(tmp_path / "stream", STREAM), executor=executor) as stream:
                assert (await stream.to_table()).num_rows == 5 * ROWS
            assert not [one for one in threading.enumerate() if one.name.startswith("dissociated read")]
            assert await asyncio.wrap_future(executor.submit(int, "7")) == 7
            left = await open_async(path, executor=executor)
        with pytest.raises(StoreError, match="executor"):
            await left.to_table()
        with pytest.raises(StoreError, match="executor"):
            await open_async(path, executor=executor)
        del left

    run(test)


def test_a_closed_reader_says_so() -> None:
    async def test() -> None:
        for content in (FILE, STREAM):
            reader = await open_either_async(content)
            kept = reader.batches()
            await anext(kept)
            await reader.aclose()
            await reader.aclose()
            with pytest.raises(StoreError, match="closed before its end"):
                await anext(kept)
            for use in (reader.batches, lambda reader=reader: reader.stats):
                with pytest.raises(StoreError, match="closed"):
                    use()
            with pytest.raises(StoreError, match="closed"):
                await reader.to_table()
        assert isinstance(reader, AsyncStreamReader)

    run(test)


class Held(Counted):
    """A file in which each read waits at `gate`."""

    def __init__(self, content: bytes) -> None:
        super().__init__(content)
        self.reading, self.gate = threading.Event(), threading.Event()
        self.gate.set()

    def readinto(self, buffer: Any) -> int:
        self.reading.set()
        assert self.gate.wait(PATIENCE)
        return super().readinto(buffer)


def test_nothing_is_read_from_a_reader_that_is_being_closed() -> None:
    """The number of its descriptor may belong to another file by then."""

    async def test() -> None:
        source = Held(FILE)
        with ThreadPoolExecutor(4) as executor:
            reader = await open_async(source, executor=executor)
            source.reading.clear()
            source.gate.clear()
            reading = asyncio.create_task(reader.get_batch(4))
            assert await asyncio.to_thread(source.reading.wait, PATIENCE)  # otherwise it would be cancelled
            reads = len(source.reads)
            closing = asyncio.create_task(reader.aclose()), asyncio.create_task(reader.aclose())
            await asyncio.sleep(0)
            with pytest.raises(StoreError, match="this reader is closed"):
                await reader.get_batch(0)
            assert len(source.reads) == reads
            source.gate.set()
            assert await reading == BATCHES[4]
            await asyncio.gather(*closing)

    run(test)


def test_two_loops_over_one_stream_share_it() -> None:
    async def test() -> None:
        async with await open_either_async(STREAM) as reader:
            both = await asyncio.gather(reader.to_table(), reader.to_table())
            assert sum(table.num_rows for table in both) == 5 * ROWS

    run(test)


def test_loops_in_two_threads_share_a_stream() -> None:
    async def numbers(reader: AsyncStreamReader) -> list[int]:
        return [number(batch) async for batch in reader.batches(readahead=2)]

    async def test() -> None:
        async with await open_either_async(numbered(2000)) as reader:
            assert isinstance(reader, AsyncStreamReader)
            loops = [asyncio.to_thread(asyncio.run, numbers(reader)) for _ in range(2)]
            assert sorted(chain.from_iterable(await asyncio.gather(*loops))) == [*range(2000)]

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        run(test)
    finally:
        sys.setswitchinterval(interval)


def test_calls_that_are_given_up_leave_nothing_with_the_read() -> None:
    class Counting(Future[Any]):
        callbacks = 0

        def add_done_callback(self, callback: Callable[[Future[Any]], object]) -> None:
            Counting.callbacks += 1
            super().add_done_callback(callback)

    class Executor(ThreadPoolExecutor):
        def submit(self, call: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
            future = Counting()
            inner = super().submit(call, *arguments, **options)
            future.set_running_or_notify_cancel()
            inner.add_done_callback(lambda done: future.set_result(done.result()))
            return future

    async def test() -> None:
        source = Held(FILE)
        with Executor(1) as executor:
            async with await open_async(source, executor=executor) as reader:
                source.gate.clear()
                batches = reader.batches()
                for _ in range(50):
                    waiting = asyncio.ensure_future(anext(batches))
                    await asyncio.sleep(0)
                    waiting.cancel()
                    await asyncio.gather(waiting, return_exceptions=True)
                assert Counting.callbacks < 20
                source.gate.set()
                assert [batch async for batch in batches] == BATCHES

    run(test)


def test_a_reader_whose_executor_was_shut_down_keeps_no_batches() -> None:
    async def test() -> None:
        reads = Reads()
        reader = await open_either_async(numbered(9, size=1 << 16), executor=reads)
        async for _ in reader:
            await reads.settle()
            break
        ahead = [weakref.ref(job) for job in gc.get_objects() if isinstance(job, PendingRead)]
        assert len(ahead) > 3
        reads.shutdown()
        with pytest.raises(StoreError, match="accepts no calls"):
            await reader.aclose()
        gc.collect()
        assert [job for job in ahead if job() is not None] == []

    run(test)


async def _numbers(reader: AsyncStreamReader) -> list[int]:
    return [number(batch) async for batch in reader]


def test_a_stream_goes_on_without_a_gap_after_a_loop_that_was_left() -> None:
    async def first(reader: AsyncStreamReader) -> AsyncIterator[int]:
        async for batch in reader:
            yield number(batch)

    async def test() -> None:
        with Reads() as reads:
            async with await open_either_async(numbered(20), executor=reads) as reader:
                assert isinstance(reader, AsyncStreamReader)
                async for batch in reader:
                    assert number(batch) == 0
                    await reads.settle()
                    break
                assert reader.stats.num_record_batches == 9  # eight of them were read ahead
                kept = reader.batches(readahead=3)
                assert number(await anext(kept)) == 1
                kept_generator = first(reader)
                assert await anext(kept_generator) == 2
                closed = reader.batches()
                assert number(await anext(closed)) == 3
                await closed.aclose()
                with pytest.raises(StoreError, match="closed before its end"):
                    await anext(closed)
                table = await reader.to_table()
                assert table["n"].to_pylist() == [*range(4, 20)]
                for ended in (kept, kept_generator):
                    assert [one async for one in ended] == []
                assert (await reader.to_table()).num_rows == 0

    run(test)


def test_a_stream_goes_on_with_the_batch_whose_loop_was_cancelled() -> None:
    source = Source(20)

    async def test() -> None:
        async with await dis.ipc.asynchronous.open_reader_async(source.reader) as reader:
            batches = reader.batches(readahead=0)
            assert number(await anext(batches)) == 0
            source.reading.clear()
            source.gate.clear()
            task = asyncio.create_task(_numbers(reader))
            assert await asyncio.to_thread(source.reading.wait, PATIENCE)  # otherwise the read would be cancelled
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            rest = asyncio.create_task(reader.to_table())
            await asyncio.sleep(0)
            source.gate.set()
            assert (await rest)["n"].to_pylist() == [*range(1, 20)]

    run(test)


def test_a_stream_goes_on_after_a_loop_that_was_cancelled_before_its_read_began() -> None:
    busy = threading.Event()

    async def test() -> None:
        with Reads() as reads:
            async with await open_either_async(numbered(20), executor=reads) as reader:
                assert isinstance(reader, AsyncStreamReader)
                reads.submit(busy.wait, PATIENCE)
                loops = [asyncio.create_task(_numbers(reader)) for _ in range(2)]
                await asyncio.sleep(0)
                loops[0].cancel()
                with pytest.raises(asyncio.CancelledError):
                    await loops[0]
                busy.set()
                assert await loops[1] == [*range(20)]

    run(test)


def test_two_loops_that_wait_for_one_batch_both_get_its_error() -> None:
    source = Source(1, ZeroDivisionError)
    source.gate.clear()

    async def test() -> None:
        async with await dis.ipc.asynchronous.open_reader_async(source.reader) as reader:
            loops = [asyncio.create_task(_numbers(reader)) for _ in range(2)]
            await asyncio.sleep(0)
            source.gate.set()
            for error in await asyncio.gather(*loops, return_exceptions=True):
                assert isinstance(error, (ZeroDivisionError, dis.DissociatedError))

    run(test)


def test_the_rest_of_a_dataset_follows_a_loop_that_was_left(serve: Serve) -> None:
    server = serve("tcp://127.0.0.1:0")
    server.publish("data", pa.Table.from_batches([pa.record_batch({"n": [n]}) for n in range(20)]))

    async def test() -> None:
        async with await dis.open_stream_async(server.locations("data")[0], server.ticket("data")) as reader:
            for start in range(18):
                async for batch in reader:
                    assert number(batch) == start
                    break
            assert (await reader.to_table())["n"].to_pylist() == [18, 19]

    asyncio.run(test())


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    async def test() -> None:
        with pytest.raises(StoreError, match="No such file"):
            await open_async(tmp_path / "nothing")
        with pytest.raises(FormatError):
            await open_async(STREAM)
        with pytest.raises(FormatError):
            await open_either_async(b"neither a file nor a stream, but long enough for both")
        with pytest.raises(OptionError):
            await open_async(7)
        with pytest.raises(OptionError, match="footer_offset"):
            await open_async(FILE, footer_offset=len(FILE) + 1)
        async with await open_async(FILE) as reader:
            assert isinstance(reader, AsyncFileReader)
            with pytest.raises(OptionError, match="has 5"):
                await reader.get_batch(5)
            cases: list[dict[str, Any]] = [{"readahead": -1}, {"readahead_bytes": -1}]
            for wrong in cases:
                with pytest.raises(OptionError, match="readahead"):
                    reader.batches(**wrong)

    run(test)


def test_an_embedded_file(tmp_path: Path) -> None:
    with pa.OSFile(str(tmp_path / "container"), "wb") as sink:
        sink.write(b"before")
        with pa.ipc.new_file(sink, SCHEMA) as writer:
            writer.write_batch(BATCHES[0])
        end = sink.tell()
        sink.write(b"after")

    async def test() -> None:
        async with await open_async(tmp_path / "container", footer_offset=end) as reader:
            assert [batch async for batch in reader] == BATCHES[:1]

    run(test)


@pytest.mark.parametrize("transport", ["shm", "tcp", "inproc"])
def test_a_dissociated_stream(transport: str, serve: Serve) -> None:
    server = serve("shm:", "tcp://127.0.0.1:0", "inproc:")
    server.publish("static", pa.Table.from_batches(BATCHES))
    server.publish("live", lambda: pa.Table.from_batches(BATCHES).to_reader())
    uri = location(server, "static", transport)

    async def test() -> None:
        for name in ("static", "live"):
            async with await dis.open_stream_async(uri, server.ticket(name), columns=["n", "f"]) as reader:
                assert reader.schema.names == ["n", "f"]
                assert [batch async for batch in reader] == [batch.select(["n", "f"]) for batch in BATCHES]
            async with await dis.open_stream_async(uri, server.ticket(name), batches=(1, 3)) as reader:
                assert [batch async for batch in reader] == BATCHES[1:3]
            batches = async_batches(dis.open_stream(uri, server.ticket(name)), custom_metadata=True)
            assert [batch async for batch, _ in batches] == BATCHES
            async with await dis.open_stream_async(uri, server.ticket(name)) as reader:
                await anext(reader.batches(readahead=0))
            del reader, batches
        with pytest.raises(RemoteError):
            await dis.open_stream_async(uri, b"unknown")

    asyncio.run(test())


def test_a_dissociated_stream_that_fails(serve: Serve) -> None:
    server = serve("tcp://127.0.0.1:0")
    server.publish("live", Source(3, SourceError).reader)

    async def test() -> None:
        async with await dis.open_stream_async(server.locations("live")[0], server.ticket("live")) as reader:
            batches = reader.batches(readahead=10)
            assert [number(await anext(batches)) for _ in range(3)] == [0, 1, 2]
            with pytest.raises(RemoteError, match="source_failed"):
                await anext(batches)

    asyncio.run(test())


def test_a_dataset_by_name() -> None:
    async def test() -> None:
        with dis.Server(["shm:"]) as server, dis.connect(server.catalog_uri) as client:
            server.publish("data", pa.Table.from_batches(BATCHES))
            for transport in (None, "shm"):
                async with await client.read_async("data", columns=["n"], transport=transport) as reader:
                    assert (await reader.to_table()).num_rows == 5 * ROWS
            with pytest.raises(DatasetNotFound):
                await client.read_async("nothing")

    asyncio.run(test())


@pytest.mark.parametrize(
    ("asynchronous", "blocking"),
    [
        (dis.open_stream_async, dis.open_stream),
        (dis.Client.read_async, dis.Client.read),
        (AsyncFileReader.get_batch, dis.ipc.FileReader.get_batch),
    ],
)
def test_help_says_what_the_blocking_function_takes(asynchronous: Any, blocking: Any) -> None:
    assert inspect.iscoroutinefunction(asynchronous)
    assert asynchronous.__name__.startswith(blocking.__name__)
    assert inspect.signature(asynchronous).parameters.keys() == inspect.signature(blocking).parameters.keys()


@pytest.mark.needs("golden files")
def test_golden_files_and_streams() -> None:
    async def test() -> None:
        for path in (*golden("**/*.arrow_file"), *golden("**/*.stream")):
            kind = pa.ipc.open_stream if path.suffix == ".stream" else pa.ipc.open_file
            try:
                expected = kind(path).read_all()
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
                continue  # libarrow does not read the file either
            async with await open_either_async(path) as reader:
                assert await reader.to_table() == expected, path

    run(test)
