"""IPC files and streams from every kind of source: the readers return the data that pyarrow's own readers return."""

from __future__ import annotations

import gc
import io
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dissociated.codec.options import ReadOptions
from dissociated.errors import FormatError, OptionError, StoreError
from dissociated.ipc import CollectListener, FileReader, StreamDecoder, StreamReader, open_file, open_stream
from dissociated.ipc.files import open_either
from memory.maps import buffers, mappings, origins
from support import arrow_cases
from support.helpers import as_big_endian, case, leaving_nothing, wait_until
from support.machine import ARROW_TEST_DATA
from support.processes import run_script

ROWS = 1000
BATCHES = [
    pa.record_batch(
        {
            "n": pa.array(range(first, first + ROWS)),
            "d": pa.array(["x", "y", "z", None] * (ROWS // 4)).dictionary_encode(),
            "f": pa.array([first / 7] * ROWS),
        }
    )
    for first in range(0, 5 * ROWS, ROWS)
]
SCHEMA = BATCHES[0].schema
NOTES = [{b"batch": b"%d" % number} for number in range(5)]


def as_file(batches: list[pa.RecordBatch] = BATCHES, metadata: Any = None, **options: Any) -> bytes:
    sink = io.BytesIO()
    told = pa.ipc.IpcWriteOptions(**options)
    with pa.ipc.new_file(sink, batches[0].schema, options=told, metadata=metadata) as writer:
        for batch, note in zip(batches, NOTES, strict=False):
            writer.write_batch(batch, custom_metadata=note)
    return sink.getvalue()


def as_stream(batches: list[pa.RecordBatch] = BATCHES, **options: Any) -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, batches[0].schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        for batch, note in zip(batches, NOTES, strict=False):
            writer.write_batch(batch, custom_metadata=note)
    return sink.getvalue()


FILE, STREAM = as_file(metadata={"k": "v"}), as_stream()


class Old:
    """A file object without readinto."""

    def __init__(self, content: bytes) -> None:
        self._file = io.BytesIO(content)
        self.read, self.seek, self.tell, self.seekable = (
            self._file.read,
            self._file.seek,
            self._file.tell,
            self._file.seekable,
        )


class Counted(io.BytesIO):
    """A file that records the ranges that were read."""

    def __init__(self, content: bytes) -> None:
        super().__init__(content)
        self.reads: list[tuple[int, int]] = []

    def readinto(self, buffer: Any) -> int:
        start = self.tell()
        count = super().readinto(buffer)
        self.reads.append((start, start + count))
        return count

    def total(self) -> int:
        return sum(end - start for start, end in self.reads)


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def native(path: Path, content: bytes) -> pa.NativeFile:
    return pa.OSFile(str(written(path, content)))


#: Functions that make a source of the content, and whether arrays lie in the source itself.
SOURCES: dict[str, tuple[Callable[[Path, bytes], Any], bool]] = {
    "path": (written, True),
    "text path": (lambda path, content: str(written(path, content)), True),
    "bytes": (lambda path, content: content, True),
    "memoryview": (lambda path, content: memoryview(content), True),
    "buffer": (lambda path, content: pa.py_buffer(content), True),
    "BufferReader": (lambda path, content: pa.BufferReader(content), True),
    "MemoryMappedFile": (lambda path, content: pa.memory_map(str(written(path, content))), True),
    "OSFile": (native, False),
    "PythonFile": (lambda path, content: pa.PythonFile(io.BytesIO(content), mode="r"), False),
    "BytesIO": (lambda path, content: io.BytesIO(content), False),
    "without readinto": (lambda path, content: Old(content), False),
}
every_source = pytest.mark.parametrize("source", SOURCES)


@every_source
def test_a_file_is_read_from_it(source: str, tmp_path: Path) -> None:
    make, in_place = SOURCES[source]
    given = make(tmp_path / "file", FILE)
    before = pa.total_allocated_bytes()
    with open_file(given) as reader:
        assert reader.schema.equals(SCHEMA, check_metadata=True)
        assert reader.num_record_batches == 5
        assert reader.version == pa.ipc.MetadataVersion.V5
        assert reader.metadata == {b"k": b"v"}
        assert reader.count_rows() == 5 * ROWS
        assert reader.get_batch(3) == BATCHES[3]
        assert reader.get_batch_with_custom_metadata(1) == (BATCHES[1], NOTES[1])
        assert reader.to_record_batches() == BATCHES == list(reader)
        assert reader.to_table() == pa.Table.from_batches(BATCHES)
        assert reader.stats == pa.ipc.ReadStats(19, 17, 1, 0, 0)  # the schema, and 2 + 3 * 5 batches
        kept = reader.get_batch(0)
    assert pa.total_allocated_bytes() == before or not in_place
    assert kept == BATCHES[0]


@every_source
def test_a_stream_is_read_from_it(source: str, tmp_path: Path) -> None:
    make, in_place = SOURCES[source]
    given = make(tmp_path / "stream", STREAM)
    before = pa.total_allocated_bytes()
    with open_stream(given) as reader:
        assert isinstance(reader, StreamReader)
        assert reader.schema.equals(SCHEMA, check_metadata=True)
        first = reader.read_next_batch_with_custom_metadata()
        assert first == (BATCHES[0], NOTES[0])
        assert pa.total_allocated_bytes() == before or not in_place
        assert list(reader) == BATCHES[1:]
        assert reader.stats == (7, 5, 1, 0, 0)


def test_a_stream_is_not_read_on_after_a_damaged_batch() -> None:
    """Libarrow would continue with the batch after it, so that a batch would be missing."""
    sink, batch = io.BytesIO(), pa.record_batch({"n": range(77)})
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        for _ in range(2):
            writer.write_batch(batch)
        at = sink.tell()
        writer.write_batch(batch)
        writer.write_batch(batch)
    content = bytearray(sink.getvalue())
    length = content.index((77).to_bytes(8, "little"), at)
    content[length : length + 8] = (1 << 40).to_bytes(8, "little")
    for read_on in (StreamReader.read_next_batch, StreamReader.read_all, next):
        reader = StreamReader(pa.py_buffer(content))
        assert [reader.read_next_batch(), reader.read_next_batch()] == [batch, batch]
        for _ in range(2):
            with pytest.raises(FormatError):
                reader.read_next_batch()
            with pytest.raises(FormatError):
                read_on(reader)


def test_a_path_is_read_without_mapping_it_if_that_is_wanted(tmp_path: Path) -> None:
    file, stream = written(tmp_path / "file", FILE), written(tmp_path / "stream", STREAM)
    with open_file(file, memory_map=False) as reader:
        batches = reader.to_record_batches()
    with open_stream(stream, memory_map=False) as reader:
        batches += list(reader)
    assert batches == BATCHES + BATCHES
    assert not [m for m in mappings() if m.path in (str(file), str(stream))]


def test_arrays_of_a_mapped_file_lie_in_the_mapping_and_outlive_the_reader(tmp_path: Path) -> None:
    file, stream = written(tmp_path / "file", FILE), written(tmp_path / "stream", STREAM)
    with open_file(file) as reader:
        batches = reader.to_record_batches()
    with open_stream(stream) as reader:
        streamed = list(reader)
    del reader
    assert {path for _, path in origins(batches)} == {str(file)}
    assert {path for _, path in origins(streamed)} == {str(stream)}
    assert batches == streamed == BATCHES


def test_arrays_of_a_buffer_lie_in_it() -> None:
    memory = pa.py_buffer(FILE)
    for batch in open_file(memory):
        for column in batch.columns:
            for buffer in buffers(column):
                assert memory.address <= buffer.address <= memory.address + memory.size - buffer.size


def test_every_type(tmp_path: Path) -> None:
    for number, (name, arrays) in enumerate(arrow_cases.ARRAYS.items()):
        batches = arrow_cases.batches(arrays)
        path = written(tmp_path / f"{number}", as_file(batches))
        theirs = pa.ipc.open_file(path)
        batches = [theirs.get_batch(index) for index in range(len(batches))]
        for mapped in (True, False):
            with case(name), open_file(path, memory_map=mapped) as reader:
                assert reader.to_record_batches() == batches
                assert reader.count_rows() == sum(batch.num_rows for batch in batches)


@pytest.mark.parametrize(
    "options",
    [{"compression": "zstd"}, {"compression": "lz4"}, {"use_legacy_format": True}, {"metadata_version": "V4"}],
    ids=str,
)
def test_every_way_to_write_it(options: dict[str, Any]) -> None:
    if "metadata_version" in options:
        options = {"metadata_version": pa.ipc.MetadataVersion[options["metadata_version"]]}
    sink = io.BytesIO()  # without metadata of batches, which libarrow cannot read in V4
    with pa.ipc.new_file(sink, SCHEMA, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(pa.Table.from_batches(BATCHES))
    for source in (sink.getvalue(), sink):
        with open_file(source) as reader:
            assert reader.to_record_batches() == BATCHES
            assert reader.count_rows() == 5 * ROWS
            reader.pre_buffer_metadata()
            assert reader.to_record_batches() == BATCHES
            assert reader.metadata is None


def test_compressed_bodies_with_metadata_before_v5_are_refused(tmp_path: Path) -> None:
    """Libarrow writes them for those who ask it to, and then takes the compressed bytes for values."""
    old = pa.ipc.IpcWriteOptions(compression="lz4", metadata_version=pa.ipc.MetadataVersion.V4)
    path = tmp_path / "old.arrow"
    for new in (pa.ipc.new_stream, pa.ipc.new_file):
        sink = io.BytesIO()
        with new(sink, SCHEMA, options=old) as writer:
            writer.write_batch(BATCHES[0])
        content = sink.getvalue()
        path.write_bytes(content)
        sources = (content, path, io.BytesIO(content), pa.OSFile(str(path)), pa.memory_map(str(path)))
        for source, memory_map in [*((source, True) for source in sources), (path, False)]:
            with (
                case(f"{new.__name__}, {type(source)}"),
                pytest.raises(FormatError, match="its metadata is older than V5"),
            ):
                pa.Table.from_batches(open_either(source, memory_map=memory_map))
        with pytest.raises(FormatError, match="its metadata is older than V5"):
            StreamDecoder(CollectListener()).consume(content)


AHEAD = """
import sys
import pyarrow.dataset as ds
from dissociated import ipc

print(ds.Scanner.from_batches(ipc.open_stream(sys.argv[1])).head(10).num_rows)
"""


@pytest.mark.usefixtures("forks")
def test_the_interpreter_may_end_while_libarrow_reads_ahead(tmp_path: Path) -> None:
    path = tmp_path / "stream.arrows"
    batch = pa.record_batch({"n": range(10)})
    with pa.ipc.new_stream(path, batch.schema) as writer:
        for _ in range(30_000):
            writer.write_batch(batch)
    for _ in range(3):
        run = run_script(AHEAD, path)
        assert (run.returncode, run.stdout) == (0, "10\n"), run.stderr


def test_dictionaries_that_grow() -> None:
    batches = [pa.record_batch({"d": pa.array(words).dictionary_encode()}) for words in (["a"], ["a", "b"])]
    content = as_file(batches, emit_dictionary_deltas=True)
    for source in (content, io.BytesIO(content)):
        with open_file(source) as reader:
            reader.pre_buffer_metadata()
            assert [batch["d"].to_pylist() for batch in reader] == [["a"], ["a", "b"]]
            assert reader.stats == pa.ipc.ReadStats(5, 2, 2, 1, 0)


def test_a_file_without_batches() -> None:
    sink = io.BytesIO()
    pa.ipc.new_file(sink, SCHEMA).close()
    with open_file(sink) as reader:
        assert (reader.num_record_batches, reader.count_rows(), reader.to_record_batches()) == (0, 0, [])
        assert reader.to_table() == SCHEMA.empty_table()
        reader.pre_buffer_metadata()


def test_counting_rows_reads_no_bodies() -> None:
    source = Counted(FILE)
    bodies = sum(batch.get_total_buffer_size() for batch in BATCHES)
    with open_file(source) as reader:
        assert reader.count_rows() == 5 * ROWS
    assert len(FILE) > bodies > 50_000 > 10_000 > source.total()


def message_spans() -> list[tuple[int, int, int]]:
    """Return the start, the body's start and the end of each message of FILE, by libarrow's own reading."""
    found, source = [], pa.BufferReader(FILE)
    source.seek(8)
    for _ in range(7):
        start = source.tell()
        message = pa.ipc.read_message(source)
        end = source.tell()
        found.append((start, end - (message.body.size if message.body is not None else 0), end))
    return found


def test_metadata_that_was_loaded_ahead_is_not_read_again() -> None:
    _, dictionary, *batches = message_spans()
    source = Counted(FILE)
    with open_file(source, options=ReadOptions(pre_buffer_cache_options=pa.CacheOptions(hole_size_limit=0))) as reader:
        reader.pre_buffer_metadata([1, 3])
        expected = [(dictionary[0], dictionary[2]), (batches[1][0], batches[1][1]), (batches[3][0], batches[3][1])]
        wait_until(
            lambda: [span for span in source.reads if span[1] <= batches[-1][2]] == expected, "these pieces are read"
        )
        source.reads.clear()
        assert reader.get_batch(3) == BATCHES[3]
        assert source.reads == [batches[3][1:]]
        assert reader.get_batch(0) == BATCHES[0]
        assert source.reads == [batches[3][1:], (batches[0][0], batches[0][2])]


@pytest.mark.parametrize(("hole", "reads"), [(0, 5), (1 << 20, 1)])
def test_reads_ahead_are_put_together_as_the_cache_options_say(hole: int, reads: int) -> None:
    source = Counted(FILE)
    cache = pa.CacheOptions(hole_size_limit=hole)
    with open_file(source, options=ReadOptions(pre_buffer_cache_options=cache)) as reader:
        opened = len(source.reads)
        reader.count_rows()  # so that the footer has been read
        counted = len(source.reads)
        reader.pre_buffer_metadata()
        reader.pre_buffer_metadata()  # already loaded
        assert reader.to_record_batches() == BATCHES
        bodies = 5 if hole == 0 else 1  # the last body lies behind the last metadata
        assert len(source.reads) == counted + reads + bodies
        assert counted == opened + 2 + 5


def test_a_range_is_no_larger_than_its_limit() -> None:
    source = Counted(FILE)
    cache = pa.CacheOptions(hole_size_limit=1 << 20, range_size_limit=50_000)
    with open_file(source, options=ReadOptions(pre_buffer_cache_options=cache)) as reader:
        reader.pre_buffer_metadata()
        assert reader.to_record_batches() == BATCHES
    assert max(end - start for start, end in source.reads) <= 50_000


def test_loading_ahead_is_done_in_the_background() -> None:
    class Slow(io.BytesIO):
        gate = threading.Event()

        def readinto(self, buffer: Any) -> int:
            assert self.gate.wait(20)
            return super().readinto(buffer)

    Slow.gate.set()

    with leaving_nothing(), open_file(Slow(FILE)) as reader:
        assert reader.footer  # read on first use
        Slow.gate.clear()
        reader.pre_buffer_metadata()
        Slow.gate.set()
        assert reader.to_record_batches() == BATCHES


def test_data_may_come_before_and_after_a_file(tmp_path: Path) -> None:
    path = tmp_path / "container"
    with pa.OSFile(str(path), "wb") as sink:
        sink.write(b"whatever came first, of any length")
        with pa.ipc.new_file(sink, SCHEMA) as writer:
            for batch in BATCHES:
                writer.write_batch(batch)
        end = sink.tell()
    for mapped in (True, False):
        with open_file(path, memory_map=mapped) as reader:
            assert reader.to_record_batches() == BATCHES
    with path.open("ab") as more:
        more.write(b"and what comes behind it")
    for source, mapped in ((path, True), (path, False), (path.read_bytes(), True)):
        with open_file(source, footer_offset=end, memory_map=mapped) as reader:
            assert reader.to_record_batches() == BATCHES
            assert reader.count_rows() == 5 * ROWS
        with pytest.raises(FormatError):
            open_file(source, memory_map=mapped)
        for wrong in (0, -1, path.stat().st_size + 1):
            with pytest.raises(OptionError, match="from 1 to"):
                open_file(source, footer_offset=wrong, memory_map=mapped)


def test_neighbours_are_read_at_once() -> None:
    spans = message_spans()[2:]
    source = Counted(FILE)
    with open_file(source) as reader:
        reader.get_batch(0)  # the dictionary
        assert reader.footer
        source.reads.clear()
        assert list(reader.read_together([1, 2, 3])) == [(BATCHES[i], NOTES[i]) for i in (1, 2, 3)]
        assert source.reads == [(spans[1][0], spans[3][2])]


def test_memory_comes_from_the_pool(tmp_path: Path) -> None:
    pool = pa.proxy_memory_pool(pa.system_memory_pool())
    options = ReadOptions(memory_pool=pool)
    path = written(tmp_path / "file", FILE)
    stream = written(tmp_path / "stream", STREAM)
    with open(stream, "rb") as file:
        for source, mapped in ((path, False), (io.BytesIO(FILE), True)):
            with open_file(source, memory_map=mapped, options=options) as reader:
                batch = reader.get_batch(0)
                held = batch.nbytes
                assert pool.bytes_allocated() >= held
                del batch
            assert pool.bytes_allocated() < held
        for origin, mapped in ((stream, False), (file, True)):
            batch = next(open_stream(origin, memory_map=mapped, options=options))
            assert pool.bytes_allocated() >= batch.nbytes
            del batch
    batch = open_file(as_file(compression="zstd"), options=options).get_batch(0)  # libarrow's own allocations
    assert pool.bytes_allocated() >= batch["n"].nbytes
    del batch  # before its pool


def test_only_included_fields_are_read() -> None:
    source = Counted(FILE)
    with open_file(source, options=ReadOptions(included_fields=[0])) as reader:
        assert reader.schema == pa.schema([SCHEMA.field(0)])
        assert reader.to_record_batches() == [batch.select([0]) for batch in BATCHES]
        assert list(reader.read_together([0, 1])) == [(BATCHES[i].select([0]), NOTES[i]) for i in (0, 1)]
    assert source.total() < len(FILE)


@pytest.mark.parametrize(("opened", "content"), [(open_file, FILE), (open_stream, STREAM)])
def test_a_field_to_include_that_is_not_there(opened: Callable[..., Any], content: bytes) -> None:
    with pytest.raises(OptionError, match="included_fields"):
        opened(content, options=ReadOptions(included_fields=[3]))


@pytest.mark.parametrize(("opened", "write"), [(open_file, as_file), (open_stream, as_stream)])
def test_types_that_nest_too_deep(opened: Callable[..., Any], write: Callable[..., bytes]) -> None:
    content = write([pa.record_batch({"l": [[[1]]]})])
    assert list(opened(content, options=ReadOptions(max_recursion_depth=3)))
    with leaving_nothing(), pytest.raises(FormatError, match="max_recursion_depth is 2"):
        opened(content, options=ReadOptions(max_recursion_depth=2))


def test_the_byte_order_of_data_is_kept_where_that_is_wanted() -> None:
    content = as_big_endian(as_stream([pa.record_batch({"n": pa.array([1, 256], pa.int16())})]))
    assert open_stream(content).read_all()["n"].to_pylist() == [256, 1]
    kept = open_stream(content, options=ReadOptions(ensure_native_endian=False))
    assert kept.schema.field("n").type == pa.int16()
    assert bytes(next(kept)["n"].buffers()[1])[:4] == b"\1\0\0\1"


@pytest.mark.parametrize("alignment", [pa.ipc.Alignment.Any, pa.ipc.Alignment.At64Byte])
def test_buffers_are_aligned_where_that_is_wanted(alignment: pa.ipc.Alignment) -> None:
    room = pa.allocate_buffer(len(FILE) + 64)
    at = -room.address % 64 + 8
    memoryview(room).cast("B")[at : at + len(FILE)] = FILE
    source = room.slice(at, len(FILE))
    batches = open_file(source, options=ReadOptions(ensure_alignment=alignment)).to_record_batches()
    assert batches == BATCHES
    aligned = {buffer.address % 64 == 0 for batch in batches for column in batch for buffer in buffers(column)}
    assert aligned == {True} if alignment == pa.ipc.Alignment.At64Byte else False in aligned


def test_threads_may_share_a_reader(tmp_path: Path) -> None:
    path = written(tmp_path / "file", FILE)
    for mapped in (True, False):
        with open_file(path, memory_map=mapped) as reader, ThreadPoolExecutor(4) as threads:
            reader.pre_buffer_metadata([0, 2, 4])
            assert list(threads.map(reader.get_batch, [*range(5)] * 20)) == BATCHES * 20


@pytest.mark.parametrize("mapped", [True, False])
def test_nothing_is_left_of_a_reader(mapped: bool, tmp_path: Path) -> None:
    path = written(tmp_path / "file", FILE)
    with leaving_nothing():
        with open_file(path, memory_map=mapped) as reader:
            reader.pre_buffer_metadata()
        dropped = open_file(path, memory_map=mapped)
        dropped.pre_buffer_metadata()
        del dropped
        del reader
        stream = open_stream(written(tmp_path / "stream", STREAM), memory_map=mapped)
        next(stream)
        del stream
        with pytest.raises(FormatError):
            open_file(tmp_path / "stream", memory_map=mapped)
    assert not [m for m in mappings() if str(tmp_path) in m.path]


@pytest.mark.parametrize("mapped", [True, False])
def test_a_closed_reader_says_so(mapped: bool, tmp_path: Path) -> None:
    reader = open_file(written(tmp_path / "file", FILE), memory_map=mapped)
    reader.count_rows()
    reader.close()
    reader.close()
    for use in (
        lambda: reader.get_batch(0),
        reader.count_rows,
        reader.pre_buffer_metadata,
        lambda: list(reader.read_together([0])),
        lambda: reader.stats,
        lambda: reader.metadata,
    ):
        with pytest.raises(StoreError, match="closed"):
            use()


def test_a_file_object_stays_its_owners() -> None:
    file = io.BytesIO(FILE)
    open_file(file).close()
    stream = io.BytesIO(STREAM + b"more")
    assert len(list(open_stream(stream))) == 5
    gc.collect()
    assert not file.closed
    assert stream.read() == b"more"


def test_streams_come_through_pipes(tmp_path: Path) -> None:
    named = tmp_path / "fifo"
    os.mkfifo(named)

    def write(file: int | Path) -> None:
        with open(file, "wb") as pipe:
            pipe.write(STREAM)

    with leaving_nothing(), ThreadPoolExecutor(1) as threads:
        for kind in (open_stream, open_either):
            reading, writing = os.pipe()
            written = threads.submit(write, writing)
            with os.fdopen(reading, "rb", 0) as pipe:
                assert list(kind(pipe)) == BATCHES
                with pytest.raises(StoreError, match="cannot seek"):
                    open_file(pipe)
            written.result()
            written = threads.submit(write, named)
            assert list(kind(named)) == BATCHES
            written.result()


def test_a_file_object_that_does_not_block_is_refused() -> None:
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    with os.fdopen(writing, "wb"), os.fdopen(reading, "rb", 0) as pipe, pytest.raises(StoreError, match="block"):
        open_stream(pipe)


@every_source
def test_a_file_is_told_from_a_stream(source: str, tmp_path: Path) -> None:
    make, _ = SOURCES[source]
    assert isinstance(open_either(make(tmp_path / "file", FILE)), FileReader)
    reader = open_either(make(tmp_path / "stream", STREAM))
    assert isinstance(reader, StreamReader)
    assert list(reader) == BATCHES
    assert list(open_either(make(tmp_path / "legacy", as_stream(use_legacy_format=True)))) == BATCHES


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    closed = io.BytesIO(FILE)
    closed.close()
    os.mkfifo(tmp_path / "fifo")
    kinds: list[Callable[..., Any]] = [open_file, open_stream, open_either]
    with leaving_nothing():
        for kind in kinds:
            for mapped in (True, False):
                with pytest.raises(StoreError, match=r"nothing: No such file or directory$"):
                    kind(tmp_path / "nothing", memory_map=mapped)
                with pytest.raises(StoreError, match="is a directory"):
                    kind(tmp_path, memory_map=mapped)
            with pytest.raises(StoreError, match="closed"):
                kind(closed)
            for wrong in (7, None, ["path"]):
                with pytest.raises(OptionError, match="path, a buffer or a binary file"):
                    kind(wrong)
            with pytest.raises(FormatError):
                kind(b"")
            with pytest.raises(FormatError):
                kind(b"neither a file nor a stream, but long enough for both")
        writing = os.open(tmp_path / "fifo", os.O_RDWR)
        with pytest.raises(StoreError, match="not a regular file"):
            open_file(tmp_path / "fifo")
        os.close(writing)


@pytest.mark.parametrize("number", [-1, 5, 1 << 40])
def test_a_batch_that_is_not_there(number: int) -> None:
    reader = open_file(FILE)
    for use in (
        lambda: reader.get_batch(number),
        lambda: list(reader.read_together([0, number])),
        lambda: reader.pre_buffer_metadata([number]),
    ):
        with pytest.raises(OptionError, match="has 5"):
            use()


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    path = written(tmp_path / "file", FILE)
    with open(path, "rb", 0) as file, open_file(path, memory_map=False) as reader, open_file(file) as other:
        os.truncate(path, 1000)
        for one in (reader, other):
            with pytest.raises(FormatError, match="truncated"):
                one.get_batch(4)


def test_a_file_object_that_fails() -> None:
    class Failing(io.BytesIO):
        def readinto(self, buffer: Any) -> int:
            if self.tell() < 10_000:
                raise OSError(5, "Input/output error")
            return super().readinto(buffer)

    with open_file(Failing(FILE)) as reader:
        with pytest.raises(StoreError, match="Input/output error"):
            reader.get_batch(0)
        reader.pre_buffer_metadata()
        with pytest.raises(StoreError, match="Input/output error"):
            reader.get_batch(0)
    with pytest.raises(StoreError, match="Input/output error"):
        open_stream(Failing(STREAM))


def test_a_block_of_the_footer_that_is_no_record_batch() -> None:
    spans = message_spans()
    content = bytearray(FILE)
    block = spans[2][0].to_bytes(8, "little")
    at = content.rindex(block)
    content[at : at + 8] = spans[1][0].to_bytes(8, "little")  # the dictionary
    with open_file(bytes(content)) as reader, pytest.raises(FormatError, match="and none is there"):
        reader.count_rows()


SMALL = [pa.record_batch({"n": [1, 2], "d": pa.array(["a", "b"]).dictionary_encode(), "s": ["", None]})] * 2
SMALL_FILE, SMALL_STREAM = as_file(SMALL, metadata={"k": "v"}), as_stream(SMALL)


def use(content: bytes, kind: Callable[..., Any]) -> None:
    """Check that every use of a damaged file works or raises FormatError.

    Reading does not check the contents of buffers.
    """
    for source in (content, io.BytesIO(content)):
        for act in (
            lambda reader: [batch.num_rows for batch in reader],
            lambda reader: reader.count_rows(),
            lambda reader: (reader.metadata, reader.version),
            lambda reader: (reader.pre_buffer_metadata(), [*reader]),
            lambda reader: [*reader.read_together(range(reader.num_record_batches))],
        )[: 5 if kind is open_file else 1]:
            try:
                with kind(source) as reader:
                    act(reader)
            except FormatError:
                pass
            if isinstance(source, io.BytesIO):
                source.seek(0)


@pytest.mark.parametrize(("kind", "original"), [(open_file, SMALL_FILE), (open_stream, SMALL_STREAM)])
@given(data=st.data())
def test_damage(kind: Callable[..., Any], original: bytes, data: st.DataObject) -> None:
    change = st.tuples(st.integers(0, len(original) - 1), st.sampled_from([0, 1, 127, 128, 255]) | st.integers(0, 255))
    content = bytearray(original)
    for at, value in data.draw(st.lists(change, max_size=6)):
        content[at] = value
    use(bytes(content[: data.draw(st.just(len(original)) | st.integers(0, len(original)))]), kind)


@given(st.binary(max_size=300))
@example(b"ARROW1" * 2)
@example(b"ARROW1\0\0" + b"\xff\xff\xff\x7fARROW1")
@example(b"\xff\xff\xff\xff\xff\xff\xff\x7f")
@example(b"\xff\xff\xff\x7f")
def test_anything(content: bytes) -> None:
    use(content, open_file)
    use(content, open_stream)


def test_a_file_that_is_cut_off() -> None:
    for at in range(0, len(SMALL_FILE), 17):
        for source in (SMALL_FILE[:at], io.BytesIO(SMALL_FILE[:at])):
            with case(at), pytest.raises(FormatError):
                open_file(source)


def golden(pattern: str) -> Iterator[Path]:
    assert ARROW_TEST_DATA is not None
    found = sorted(path for path in ARROW_TEST_DATA.glob(pattern) if path.is_file())
    assert found, f"nothing below {ARROW_TEST_DATA}: is it the directory `data` of apache/arrow-testing?"
    return iter(found)


@pytest.mark.needs("golden files")
def test_golden_files() -> None:
    for path in golden("**/*.arrow_file"):
        try:
            expected = pa.ipc.open_file(path)
            batches = [expected.get_batch_with_custom_metadata(i) for i in range(expected.num_record_batches)]
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            continue  # libarrow does not read the file either
        for source in (path, io.BytesIO(path.read_bytes())):
            with open_file(source) as reader:
                assert reader.schema.equals(expected.schema, check_metadata=True), path
                reader.pre_buffer_metadata()
                assert [*reader.read_together(range(len(batches)))] == batches, path
                assert reader.metadata == expected.metadata
                assert reader.version == pa.ipc.MetadataVersion["V4" if "0.17.1" in path.parts else "V5"]
                assert reader.count_rows() == sum(batch.num_rows for batch, _ in batches), path


@pytest.mark.needs("golden files")
def test_golden_streams() -> None:
    for path in golden("**/*.stream"):
        try:
            expected = pa.ipc.open_stream(path).read_all()
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            continue  # libarrow does not read the file either
        for mapped in (True, False):
            assert open_stream(path, memory_map=mapped).read_all() == expected, path


@pytest.mark.needs("golden files")
def test_what_fuzzers_found() -> None:
    for path in golden("arrow-ipc-file/*"):
        use(path.read_bytes(), open_file)
    for path in golden("arrow-ipc-stream/*"):
        use(path.read_bytes(), open_stream)


def test_a_file_that_is_opened_as_a_stream_is_called_one(tmp_path: Path) -> None:
    with pa.ipc.new_file(tmp_path / "file", pa.schema([("n", pa.int64())])) as writer:
        writer.write_batch(pa.record_batch({"n": [1, 2, 3]}))
    for source in tmp_path / "file", (tmp_path / "file").read_bytes():
        with pytest.raises(FormatError, match="this begins like an Arrow IPC file, which is no stream"):
            open_stream(source)
