"""Writers: their output equals libarrow's, and a failed write leaves the documented state."""

from __future__ import annotations

import io
import os
import resource
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dissociated.errors import FormatError, LocalProtocolError, OptionError, StoreError
from dissociated.ipc import DissociatedWriter, FileWriter, RecordBatchWriter, StreamWriter, WriteOptions, WriteStats
from dissociated.protocol.message import Message
from dissociated.protocol.wire import Streams
from support.arrow_cases import ARRAYS, batches, dictionary_batch
from support.helpers import case, leaving_nothing

SCHEMA = pa.schema([("n", pa.int64()), ("s", pa.string())], metadata={"a": "b"})
NUMBERS = pa.record_batch([pa.array([1, 2, None]), pa.array(["a", "bb", None])], schema=SCHEMA)
OTHER = pa.record_batch({"other": [1]})
NAMES = [FileWriter, StreamWriter]
EOS = b"\xff\xff\xff\xff\0\0\0\0"

#: pyarrow's writer and reader for each of our writers.
PYARROW: dict[Any, tuple[Callable[..., Any], Callable[..., Any]]] = {
    FileWriter: (pa.ipc.new_file, pa.ipc.open_file),
    StreamWriter: (pa.ipc.new_stream, pa.ipc.open_stream),
}
kinds = pytest.mark.parametrize("kind", NAMES, ids=lambda kind: kind.__name__)


# Output


@kinds
def test_every_type_is_written_as_libarrow_writes_it(kind: Any) -> None:
    new, _ = PYARROW[kind]
    for type_, arrays in ARRAYS.items():
        some = batches(arrays)
        ours, theirs = io.BytesIO(), io.BytesIO()
        with kind(ours, some[0].schema) as writer, new(theirs, some[0].schema) as reference:
            for batch in some:
                writer.write_batch(batch)
                reference.write_batch(batch)
        with case(type_):
            assert ours.getvalue() == theirs.getvalue()


@kinds
@pytest.mark.parametrize("legacy", [False, True])
def test_without_batches_there_is_a_schema(kind: Any, legacy: bool) -> None:
    new, open_ = PYARROW[kind]
    ours, theirs = io.BytesIO(), io.BytesIO()
    kind(ours, SCHEMA, WriteOptions(write_legacy_ipc_format=legacy)).close()
    new(theirs, SCHEMA, options=pa.ipc.IpcWriteOptions(use_legacy_format=legacy)).close()
    assert ours.getvalue() == theirs.getvalue()
    assert open_(ours.getvalue()).read_all().schema.equals(SCHEMA, check_metadata=True)


def test_the_schema_is_written_at_once() -> None:
    sink = io.BytesIO()
    writer = StreamWriter(sink, SCHEMA)
    assert pa.ipc.read_schema(pa.py_buffer(sink.getvalue())).equals(SCHEMA, check_metadata=True)
    assert writer.schema == SCHEMA
    assert writer.stats == WriteStats(num_messages=1)
    writer.close()


@pytest.mark.parametrize("metadata", [{"k": "v"}, {b"\xff": b"\0"}, pa.KeyValueMetadata({"k": "v"}), None])
def test_batches_have_metadata_of_their_own(metadata: Any) -> None:
    sink = io.BytesIO()
    with StreamWriter(sink, SCHEMA) as writer:
        writer.write_batch(NUMBERS, metadata)
        writer.write_batch(NUMBERS)
    reader = pa.ipc.open_stream(sink.getvalue())
    _, first = reader.read_next_batch_with_custom_metadata()
    _, second = reader.read_next_batch_with_custom_metadata()
    assert first == (None if metadata is None else pa.KeyValueMetadata(metadata))
    assert second is None


def test_a_file_has_metadata_in_its_footer() -> None:
    sink = io.BytesIO()
    with FileWriter(sink, SCHEMA, metadata={"made by": "a test"}) as writer:
        writer.write(NUMBERS)
    assert pa.ipc.open_file(sink.getvalue()).metadata == {b"made by": b"a test"}


@kinds
def test_a_table_is_written_in_its_chunks_or_smaller_ones(kind: Any) -> None:
    table = pa.Table.from_batches([NUMBERS, NUMBERS.slice(0, 0), NUMBERS.slice(1)])
    for chunks, sizes in ((None, [3, 0, 2]), (2, [2, 1, 0, 2]), (100, [3, 0, 2])):
        sink = io.BytesIO()
        with kind(sink, SCHEMA) as writer:
            writer.write_table(table, chunks)
        ours = PYARROW[kind][1](sink.getvalue()).read_all()
        assert ours == table
        assert [len(chunk) for chunk in ours["n"].chunks] == sizes
        theirs = io.BytesIO()
        with PYARROW[kind][0](theirs, SCHEMA) as reference:
            reference.write_table(table, chunks)
        assert sink.getvalue() == theirs.getvalue()


@kinds
def test_write_takes_tables_and_batches(kind: Any) -> None:
    sink = io.BytesIO()
    with kind(sink, SCHEMA) as writer:
        writer.write(NUMBERS)
        writer.write(pa.Table.from_batches([NUMBERS]))
    assert PYARROW[kind][1](sink.getvalue()).read_all() == pa.Table.from_batches([NUMBERS, NUMBERS])


@pytest.mark.parametrize("alignment", [8, 64])
@pytest.mark.parametrize("legacy", [False, True])
def test_any_batch_of_a_file_can_be_read(alignment: int, legacy: bool) -> None:
    some = [pa.record_batch({"d": pa.array(["x", "y"]).dictionary_encode(), "n": [n, None]}) for n in range(5)]
    sink = io.BytesIO()
    options = WriteOptions(alignment=alignment, write_legacy_ipc_format=legacy)
    with FileWriter(sink, some[0].schema, options) as writer:
        for batch in some:
            writer.write(batch)
    reader = pa.ipc.open_file(sink.getvalue())
    assert reader.num_record_batches == 5
    assert [reader.get_batch(index) for index in (4, 0, 3)] == [some[4], some[0], some[3]]


def test_a_file_can_follow_something_else() -> None:
    """Write behind other content. Positions count from the start of the sink, so that libarrow can read all of it."""
    for before in (b"x" * 100, b"x" * 64):
        sink = io.BytesIO()
        sink.write(before)
        with FileWriter(sink, SCHEMA, WriteOptions(alignment=64)) as writer:
            writer.write(NUMBERS)
        content = pa.py_buffer(sink.getvalue())
        got = pa.ipc.open_file(content).get_batch(0)
        assert got == NUMBERS
        assert got["n"].buffers()[1].address % 64 == content.address % 64
        assert bytes(content)[: len(before) + 6] == before + b"ARROW1"


# Statistics


def counted(stream: bytes) -> dict[str, int]:
    """Return pyarrow's statistics of a stream."""
    messages = list(pa.ipc.MessageReader.open_stream(stream))
    reader = pa.ipc.open_stream(stream)
    reader.read_all()
    return {
        **reader.stats._asdict(),
        "num_messages": len(messages),
        "total_serialized_body_size": sum(m.body.size for m in messages if m.type == "record batch"),
    }


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"alignment": 64},
        {"codec": "lz4"},
        {"codec": "zstd", "min_space_savings": 0.5},
        {"codec": "zstd", "min_space_savings": 1, "alignment": 32},
        {"emit_dictionary_deltas": True},
    ],
    ids=str,
)
def test_statistics_are_what_the_bytes_hold(fields: dict[str, Any]) -> None:
    some = [
        pa.record_batch(
            {
                "n": pa.array([7] * 1000),
                "r": np.random.default_rng(1).random(1000),
                "s": pa.array(["w"] * 1000),
                "d": pa.array([words[index % len(words)] for index in range(1000)]).dictionary_encode(),
            }
        )
        for words in ("ab", "ab", "abc", "x")
    ]
    sink = io.BytesIO()
    with StreamWriter(sink, some[0].schema, WriteOptions(**fields)) as writer:
        for batch in some:
            writer.write(batch)
    raw = 8000 + 8000 + (4004 + 1000) + 4000  # of a batch: indices count, dictionaries do not
    assert writer.stats.__dict__ == counted(sink.getvalue()) | {"total_raw_body_size": 4 * raw}
    assert writer.stats.num_dictionary_deltas == (1 if "emit_dictionary_deltas" in fields else 0)


def test_statistics_are_those_of_libarrow() -> None:
    """Compare with libarrow's C++ writer for the same batch and options, apart from numbers that depend on a codec."""
    batch = pa.record_batch(
        {
            "n": pa.array([1, None, 3] * 5),
            "s": pa.array(["a", "bb", None] * 5),
            "d": pa.array(["x", "y", "x"] * 5).dictionary_encode(),
            "z": pa.array([7] * 15, pa.int8()),
            "e": pa.nulls(15),
        }
    )
    for kind in NAMES:
        with kind(io.BytesIO(), batch.schema) as writer:
            writer.write(batch)
        assert writer.stats == WriteStats(3, 1, 1, 0, 0, 278, 296)


# Data that cannot be written


@kinds
@pytest.mark.parametrize(
    ("wrong", "error", "sentence"),
    [
        (OTHER, FormatError, "cannot write this as Arrow IPC: Tried to write record batch with different schema"),
        (pa.table(OTHER), FormatError, "different schema"),
        (None, FormatError, "a NoneType is not a record batch"),
        ([1, 2], FormatError, "a list is not a record batch"),
    ],
    ids=["batch", "table", "none", "list"],
)
def test_what_cannot_be_written_is_refused_and_the_writer_goes_on(
    kind: Any, wrong: Any, error: type[Exception], sentence: str
) -> None:
    sink = io.BytesIO()
    with kind(sink, SCHEMA) as writer:
        with pytest.raises(error, match=sentence):
            writer.write(wrong)
        writer.write(NUMBERS)
        with pytest.raises(error, match=sentence):
            writer.write(wrong)
    assert PYARROW[kind][1](sink.getvalue()).read_all() == pa.Table.from_batches([NUMBERS])
    assert writer.stats.num_record_batches == 1


def test_tables_and_sizes_of_chunks_are_checked() -> None:
    with StreamWriter(io.BytesIO(), SCHEMA) as writer:
        with pytest.raises(FormatError, match="a RecordBatch is not a table"):
            writer.write_table(NUMBERS)
        for wrong in (0, -2, 2.5):
            with pytest.raises(OptionError, match=f"max_chunksize is {wrong}; it must be 1 or more rows"):
                writer.write_table(pa.table(NUMBERS), wrong)  # type: ignore[arg-type]  # 2.5 is no number of rows


def test_minus_one_is_no_maximum_of_rows() -> None:
    sink = io.BytesIO()
    with StreamWriter(sink, SCHEMA) as writer:
        writer.write_table(pa.Table.from_batches([NUMBERS, NUMBERS]), -1)
    assert list(pa.ipc.open_stream(sink.getvalue())) == [NUMBERS, NUMBERS]


@kinds
def test_metadata_of_a_batch_is_refused_in_version_4(kind: Any) -> None:
    sink = io.BytesIO()
    with kind(sink, SCHEMA, WriteOptions(metadata_version=pa.ipc.MetadataVersion.V4)) as writer:
        with pytest.raises(OptionError, match="needs metadata version V5"):
            writer.write_batch(NUMBERS, {"k": "v"})
        writer.write_batch(NUMBERS)
    assert PYARROW[kind][1](sink.getvalue()).read_all() == pa.Table.from_batches([NUMBERS])


@pytest.mark.parametrize("more", [False, True], ids=["at the end", "in between"])
def test_a_file_replaces_no_dictionary(more: bool) -> None:
    """Refuse a batch after its other, growing dictionary was written. The file stays valid."""

    def pair(left: list[str], right: list[str]) -> pa.RecordBatch:
        return pa.record_batch({"a": pa.array(left).dictionary_encode(), "b": pa.array(right).dictionary_encode()})

    sink = io.BytesIO()
    good, refused = [pair(["x"], ["y"])], pair(["x", "z"], ["w", "w"])
    with FileWriter(sink, refused.schema, WriteOptions(emit_dictionary_deltas=True)) as writer:
        writer.write(good[0])
        with pytest.raises(FormatError, match=r"Dictionary replacement detected.* emit_dictionary_deltas helps"):
            writer.write(refused)
        if more:
            good.append(pair(["x", "z"], ["y", "y"]))
            writer.write(good[1])
    reader = pa.ipc.open_file(sink.getvalue())
    got = [reader.get_batch(index) for index in range(reader.num_record_batches)]
    assert [batch.to_pydict() for batch in got] == [batch.to_pydict() for batch in good]
    assert writer.stats.num_dictionary_batches == 3


# Ends of a writer


def new_writers(sink: io.BytesIO) -> list[RecordBatchWriter]:
    return [StreamWriter(sink, SCHEMA), FileWriter(sink, SCHEMA), DissociatedWriter(lambda message: None, SCHEMA)]


@pytest.mark.parametrize("end", ["close", "abort"])
def test_nothing_is_written_after_the_end(end: str) -> None:
    for writer in new_writers(io.BytesIO()):
        getattr(writer, end)()
        getattr(writer, end)()
        for write in (writer.write, writer.write_batch, writer.write_table):
            with pytest.raises(LocalProtocolError, match="this writer is closed"):
                write(NUMBERS)
        assert writer.stats.num_messages == 1


@kinds
def test_leaving_by_an_exception_writes_no_end(kind: Any) -> None:
    sink = io.BytesIO()
    with suppress(KeyError), kind(sink, SCHEMA) as writer:
        writer.write(NUMBERS)
        raise KeyError
    length = len(sink.getvalue())
    writer.close()
    assert len(sink.getvalue()) == length
    assert not sink.getvalue().endswith((EOS, b"ARROW1"))


def test_a_file_object_stays_open_and_is_flushed(tmp_path: Path) -> None:
    with open(tmp_path / "stream", "wb") as file:
        with StreamWriter(file, SCHEMA) as writer:
            writer.write(NUMBERS)
        assert not file.closed
        assert (tmp_path / "stream").read_bytes().endswith(EOS)


@kinds
@pytest.mark.parametrize("how", ["str", "path", "raw file", "buffered file", "OSFile", "BufferOutputStream"])
def test_sinks_are_paths_and_files_of_python_and_pyarrow(kind: Any, how: str, tmp_path: Path) -> None:
    path = tmp_path / "made"
    path.write_bytes(b"x" * 100_000)  # is overwritten
    memory = pa.BufferOutputStream()
    sink: Any = {
        "str": lambda: str(path),
        "path": lambda: path,
        "raw file": lambda: path.open("wb", buffering=0),
        "buffered file": lambda: path.open("wb"),
        "OSFile": lambda: pa.OSFile(str(path), "wb"),
        "BufferOutputStream": lambda: memory,
    }[how]()
    with leaving_nothing(), kind(sink, SCHEMA) as writer:
        writer.write(NUMBERS)
    if how == "BufferOutputStream":
        path.write_bytes(memory.getvalue())
    elif hasattr(sink, "close"):
        sink.close()
    assert PYARROW[kind][1](path.read_bytes()).read_all() == pa.Table.from_batches([NUMBERS])


class Reluctant(io.RawIOBase):
    """A file that accepts at most `most` bytes at a time, as a socket may."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.content = b""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int | None:
        self.content += bytes(data[: self.most])
        return min(len(data), self.most) or None


def test_a_file_that_takes_less_gets_the_rest() -> None:
    sink = Reluctant(7)
    with StreamWriter(sink, SCHEMA) as writer:
        writer.write(NUMBERS)
    assert pa.ipc.open_stream(sink.content).read_all() == pa.Table.from_batches([NUMBERS])


def test_a_file_that_would_block_is_refused() -> None:
    with pytest.raises(StoreError, match="the file object accepts no more bytes without blocking"):
        StreamWriter(Reluctant(0), SCHEMA)


def test_a_file_that_says_nothing_took_everything() -> None:
    taken = []

    class Silent:
        def write(self, data: Any) -> None:
            taken.append(bytes(data))

    with StreamWriter(Silent(), SCHEMA) as writer:
        writer.write(NUMBERS)
    assert pa.ipc.open_stream(b"".join(taken)).read_all() == pa.Table.from_batches([NUMBERS])


# Failures of the sink


def test_an_invalid_sink_is_refused(tmp_path: Path) -> None:
    with leaving_nothing():
        with pytest.raises(StoreError, match="cannot write to a int: give a path or a binary file object"):
            StreamWriter(5, SCHEMA)
        with pytest.raises(StoreError, match=r"creating .*/nowhere/file: No such file or directory"):
            FileWriter(tmp_path / "nowhere" / "file", SCHEMA)
        with pytest.raises(FormatError, match="field 'l' is nested 2 levels deep"):
            StreamWriter(
                tmp_path / "deep", pa.schema([("l", pa.list_(pa.int8()))]), WriteOptions(max_recursion_depth=1)
            )
        assert not (tmp_path / "deep").exists()


@kinds
def test_a_full_disk_is_a_store_error(kind: Any) -> None:
    with leaving_nothing():
        with pytest.raises(StoreError, match="no space is left for writing /dev/full"):
            kind("/dev/full", SCHEMA)
        with open("/dev/full", "wb", buffering=0) as raw, pytest.raises(StoreError, match="no space is left"):
            kind(raw, SCHEMA)
        with pa.OSFile("/dev/full", "wb") as file, pytest.raises(StoreError, match="no space is left"):
            kind(file, SCHEMA)


def test_a_disk_that_fills_up_ends_the_writer(tmp_path: Path) -> None:
    path = tmp_path / "stream"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    batch = pa.record_batch([pa.array(range(1000)), pa.array(["x"] * 1000)], schema=SCHEMA)
    with leaving_nothing():
        writer = StreamWriter(path, SCHEMA)
        writer.write(batch)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, limits[1]))
        try:
            with pytest.raises(StoreError, match=f"no space is left for writing {path}"):
                writer.write(batch)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert writer.stats.num_record_batches == 1
        with pytest.raises(LocalProtocolError):
            writer.write(batch)
        writer.close()
        assert path.stat().st_size == 1 << 14


def test_a_file_opened_for_reading_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with open(tmp_path / "file", "rb") as file, pytest.raises(StoreError, match=r"writing to a file object: .*write"):
        StreamWriter(file, SCHEMA)


def test_a_pipe_whose_reader_is_gone_is_a_store_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb", buffering=0) as file, pytest.raises(StoreError, match="Broken pipe"):
        StreamWriter(file, SCHEMA)


# Dissociated messages


def dissociated(*some: pa.RecordBatch, streams: Streams = Streams.BOTH, **fields: Any) -> list[Message]:
    messages: list[Message] = []
    with DissociatedWriter(messages.append, some[0].schema, WriteOptions(**fields), streams) as writer:
        for batch in some:
            writer.write(batch)
    assert writer.stats.num_record_batches == len(some)
    return messages


def test_dissociated_messages_are_numbered_metadata_and_tagged_bodies() -> None:
    some = [dictionary_batch("a"), dictionary_batch("a", "b")]
    messages = dissociated(*some)
    written = io.BytesIO()
    with pa.ipc.new_stream(written, some[0].schema) as reference:
        for batch in some:
            reference.write_batch(batch)
    expected = list(pa.ipc.MessageReader.open_stream(written.getvalue()))
    assert len(expected) == 5  # schema; dictionary and batch, twice
    wanted: list[tuple[int | None, bytes]] = []
    for sequence, message in enumerate(expected):
        wanted.append((None, struct.pack("<BI", 1, sequence) + message.metadata.to_pybytes()))
        if sequence:
            wanted.append((sequence, message.body.to_pybytes()))
    wanted.append((None, struct.pack("<BI", 0, 5)))
    got = [(message.tag, b"".join(map(bytes, message.parts))) for message in messages]
    assert [(tag, data[:5]) for tag, data in got] == [(tag, data[:5]) for tag, data in wanted]
    # libarrow pads the flatbuffer of a schema for the message behind it. Here no message follows.
    assert [(tag, data.ljust(len(other), b"\0")) for (tag, data), (_, other) in zip(got, wanted, strict=True)] == wanted


def test_metadata_and_bodies_can_go_two_ways() -> None:
    some = [dictionary_batch("a"), dictionary_batch("b")]

    def joined(messages: list[Message]) -> list[tuple[int | None, bytes]]:
        return [(message.tag, b"".join(map(bytes, message.parts))) for message in messages]

    both = joined(dissociated(*some))
    metadata, bodies = (joined(dissociated(*some, streams=one)) for one in (Streams.METADATA, Streams.BODIES))
    assert metadata == [one for one in both if one[0] is None]
    assert bodies == [one for one in both if one[0] is not None]
    assert len(bodies) == 4


@pytest.mark.parametrize("alignment", [8, 64])
def test_bodies_are_handed_over_by_reference(alignment: int) -> None:
    batch = pa.record_batch({"n": np.arange(10_000), "h": pa.array([1, None] * 5_000, pa.int32())})
    before = pa.total_allocated_bytes()
    *_, body, _ = dissociated(batch, alignment=alignment)
    assert pa.total_allocated_bytes() - before < 1 << 12
    handed = {part.address: part.size for part in body.parts if isinstance(part, pa.Buffer)}
    assert handed == {b.address: b.size for column in batch.columns for b in column.buffers() if b is not None}
    assert sum(map(len, body.parts)) % alignment == 0


def test_an_aborted_stream_has_no_end() -> None:
    messages: list[Message] = []
    with suppress(KeyError), DissociatedWriter(messages.append, SCHEMA) as writer:
        writer.write(NUMBERS)
        raise KeyError
    assert [message.tag for message in messages] == [None, None, 1]


def test_a_way_that_fails_ends_the_writer() -> None:
    messages: list[Message] = []

    def send(message: Message) -> None:
        if len(messages) == 2:
            raise ConnectionResetError("gone")
        messages.append(message)

    writer = DissociatedWriter(send, SCHEMA)
    with pytest.raises(ConnectionResetError):
        writer.write(NUMBERS)
    with pytest.raises(LocalProtocolError):
        writer.write(NUMBERS)
    writer.close()
    assert len(messages) == 2
    with pytest.raises(FormatError, match="different schema"):
        dissociated(NUMBERS, OTHER)
