"""libarrow encodes batches, and passes on every body buffer without a copy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.codec.options import WriteOptions
from dissociated.codec.split import LargeBatch, SplitMessage, Splitter, split, split_small
from dissociated.codec.validation import validate_shared
from dissociated.errors import SourceError
from dissociated.format.encapsulated import encapsulate, end_of_stream
from dissociated.format.message import HeaderType
from support.arrow_cases import ARRAYS, ROWS, batches, dictionary_batch
from support.helpers import case


def written(
    *some: pa.RecordBatch, options: pa.ipc.IpcWriteOptions | None = None, custom: dict[str, str] | None = None
) -> list[pa.ipc.Message]:
    """Return the messages that libarrow itself writes."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, some[0].schema, options=options) as writer:
        for batch in some:
            writer.write_batch(batch, custom_metadata=custom)
    return list(pa.ipc.MessageReader.open_stream(sink.getvalue()))


def padded(header: bytes) -> bytes:
    return header + bytes(-len(header) % 8)


def body(message: SplitMessage) -> bytes:
    return b"".join(map(bytes, message.body or ()))


def reader(*some: pa.RecordBatch) -> pa.RecordBatchReader:
    return pa.RecordBatchReader.from_batches(some[0].schema, some)


def test_messages_are_those_that_libarrow_writes() -> None:
    for type_, arrays in ARRAYS.items():
        some = batches(arrays)
        got, expected = list(split(reader(*some))), written(*some)
        with case(type_):
            assert [padded(one.header) for one in got] == [one.metadata.to_pybytes() for one in expected]
            assert [body(one) for one in got[1:]] == [one.body.to_pybytes() for one in expected[1:]]
            assert got[0].body is None
            assert all(one.body is not None for one in got[1:])


def test_empty_arrays_that_libarrow_would_write_wrong() -> None:
    """Split an empty slice from the C interface, and an empty union from an IPC stream, each also within a list."""
    for type_, (whole, *_) in ARRAYS.items():
        batch = pa.record_batch({"x": whole})
        by_interface = pa.RecordBatchReader.from_stream(reader(batch[5:5])).read_next_batch()
        by_stream = pa.ipc.open_stream(encapsulated(reader(batch[:0]))).read_next_batch()
        empty_list = pa.ListArray.from_arrays(pa.array([0, 0], pa.int32()), whole[5:5])
        in_list = pa.record_batch({"x": pa.StructArray.from_arrays([empty_list, [1]], ["l", "n"])})
        list_by_interface = pa.RecordBatchReader.from_stream(reader(in_list)).read_next_batch()
        list_by_stream = pa.record_batch({"x": pa.ListArray.from_arrays(pa.array([0, 0], pa.int32()), by_stream["x"])})
        views = type_ in ("string_view", "binary_view")  # libarrow calls such a list invalid
        for one in (by_interface, by_stream, list_by_stream, *([] if views else [list_by_interface])):
            for options in (None, WriteOptions(codec="zstd")):
                with case((type_, one.schema, options)):
                    got = pa.ipc.open_stream(encapsulated(reader(one), options)).read_next_batch()
                    got.validate(full=True)
                    assert (got.schema, got["x"].to_pylist()) == (one.schema, one["x"].to_pylist())


def test_empty_unions_of_runs_of_which_libarrow_makes_none() -> None:
    runs = pa.RunEndEncodedArray.from_arrays(pa.array([2], pa.int32()), pa.array([7]))
    ids, offsets = pa.array([0, 0], pa.int8()), pa.array([0, 0, 2], pa.int32())
    for child in (runs, pa.StructArray.from_arrays([runs], ["r"]), pa.ListArray.from_arrays(offsets, runs)):
        sparse, dense = pa.UnionArray.from_sparse(ids, [child]), pa.UnionArray.from_dense(ids, offsets[1:], [child])
        for union in (sparse, dense):
            in_map = pa.MapArray.from_arrays(offsets, pa.array(["a", "b"]), union)
            for whole in (union, pa.ListArray.from_arrays(offsets, union), in_map):
                for start, rows in ((0, 0), (0, 1)):  # the first list and the first map are empty
                    batch = pa.record_batch({"x": whole}).slice(start, rows)
                    with pa.BufferOutputStream() as sink, pa.ipc.new_stream(sink, batch.schema) as writer:
                        writer.write_batch(batch)
                    one = pa.ipc.open_stream(sink.getvalue()).read_next_batch()
                    one.validate(full=True)
                    with case((one.schema, rows)):
                        got = pa.ipc.open_stream(encapsulated(reader(one))).read_next_batch()
                        got.validate(full=True)
                        assert (got.schema, got["x"].to_pylist()) == (one.schema, one["x"].to_pylist())


def test_the_environment_decides_on_no_format(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark's guide once told its users to set the first of these variables, which libarrow reads."""
    small, large = (pa.record_batch({"n": [*range(rows)]}) for rows in (3, 1 << 13))
    some = [*[small] * 3, large, small]
    expected = [(one.header, body(one)) for one in split(reader(*some))]
    for variable in ("ARROW_PRE_0_15_IPC_FORMAT", "ARROW_PRE_1_0_METADATA_VERSION"):
        with case(variable), monkeypatch.context() as patch:
            patch.setenv(variable, "1")
            assert [(one.header, body(one)) for one in split(reader(*some))] == expected


def encapsulated(source: pa.RecordBatchReader, options: WriteOptions | None = None) -> bytes:
    """Return the stream made of the split messages."""
    parts = [part for message in split(source, options) for part in (encapsulate(message.header), body(message))]
    return b"".join([*parts, end_of_stream()])


@pytest.mark.parametrize("options", [{"codec": "zstd"}, {"codec": "lz4"}, {"emit_dictionary_deltas": True}])
def test_options_reach_libarrow(options: dict[str, Any]) -> None:
    some = [
        pa.record_batch(
            {"d": pa.DictionaryArray.from_arrays(np.arange(size, dtype=np.int16), [f"word {n}" for n in range(size)])}
        )
        for size in (200, 300)
    ]
    told = pa.ipc.IpcWriteOptions(
        compression=options.get("codec"), emit_dictionary_deltas="emit_dictionary_deltas" in options
    )
    got, expected = list(split(reader(*some), WriteOptions(**options))), written(*some, options=told)
    assert [padded(one.header) for one in got] == [one.metadata.to_pybytes() for one in expected]
    assert [body(one) for one in got[1:]] == [one.body.to_pybytes() for one in expected[1:]]
    plain = [len(body(one)) for one in split(reader(*some))]
    assert sum(len(body(one)) for one in got) < sum(plain)


def test_body_buffers_are_handed_over_by_reference() -> None:
    """Detect a pyarrow that copies buffers, which would slow down every transport."""
    columns = {
        "n": pa.array(np.arange(10_000)),
        "h": pa.array([1, None] * 5_000, pa.int32()),
        "s": pa.array(["some", None, "words", ""] * 2_500),
        "v": pa.array(["a view of more than twelve bytes", None] * 5_000, pa.string_view()),
        "l": pa.array([[1.5, 2.5], [], None, [3.5]] * 2_500),
        "b": pa.array([True, None] * 5_000),
    }
    batch = pa.record_batch(columns)
    (_, message) = split(reader(batch))
    assert message.body is not None
    handed = {part.address: part.size for part in message.body if isinstance(part, pa.Buffer)}
    sent = {b.address: b.size for column in columns.values() for b in column.buffers() if b is not None and b.size}
    assert handed.keys() == sent.keys()
    copied = [part for part in message.body if not isinstance(part, pa.Buffer)]
    assert all(len(part) < 64 for part in copied)  # padding


def test_dictionaries_are_handed_over_by_reference() -> None:
    dictionary = pa.array([f"word {n}" for n in range(1000)])
    batch = pa.record_batch({"d": pa.DictionaryArray.from_arrays(pa.array([1, 2, 3], pa.int16()), dictionary)})
    _, words, _ = split(reader(batch))
    assert words.parsed.type is HeaderType.DICTIONARY_BATCH
    assert words.body is not None
    handed = {part.address for part in words.body if isinstance(part, pa.Buffer)}
    assert handed == {buffer.address for buffer in dictionary.buffers() if buffer is not None}


def test_splitting_allocates_no_bodies() -> None:
    batch = pa.record_batch({"n": np.arange(1 << 20), "h": pa.array([1, None] * (1 << 19))})
    before = pa.total_allocated_bytes()
    messages = list(split(reader(batch)))
    assert pa.total_allocated_bytes() - before < 1 << 12
    assert sum(len(body(one)) for one in messages) > 16 << 20


def test_the_schema_comes_before_the_source_gives_a_batch() -> None:
    def never() -> Iterator[pa.RecordBatch]:
        raise AssertionError("asked for a batch")
        yield  # type: ignore[unreachable]  # makes it a generator

    schema = pa.schema([("n", pa.int64())], metadata={"a": "b"})
    first = next(split(pa.RecordBatchReader.from_batches(schema, never())))
    assert first.parsed.type is HeaderType.SCHEMA
    empty = pa.record_batch([pa.array([], pa.int64())], schema=schema)
    assert padded(first.header) == written(empty)[0].metadata.to_pybytes()


def test_a_splitter_gives_each_batch_its_own_messages() -> None:
    splitter = Splitter(dictionary_batch("a").schema)
    kinds = [[one.parsed.type.name for one in splitter.split(dictionary_batch(*words))] for words in ("a", "a", "ab")]
    assert kinds == [["DICTIONARY_BATCH", "RECORD_BATCH"], ["RECORD_BATCH"], ["DICTIONARY_BATCH", "RECORD_BATCH"]]


def test_a_batch_takes_its_custom_metadata_along() -> None:
    batch = pa.record_batch({"n": [1, 2, 3]})
    (message,) = Splitter(batch.schema).split(batch, pa.KeyValueMetadata({"k": "v"}))
    assert padded(message.header) == written(batch, custom={"k": "v"})[1].metadata.to_pybytes()


def test_a_source_that_raises_raises() -> None:
    def broken() -> object:
        yield pa.record_batch({"n": [1]})
        raise RuntimeError("no more")

    messages = split(pa.RecordBatchReader.from_batches(pa.schema([("n", pa.int64())]), broken()))
    assert [next(messages).parsed.type.name for _ in range(2)] == ["SCHEMA", "RECORD_BATCH"]
    with pytest.raises(RuntimeError, match="no more"):
        next(messages)


def test_a_batch_whose_offsets_leave_its_values_is_refused() -> None:
    """Refuse a batch with which libarrow would crash the process."""
    offsets = np.array([0, 1], np.int32)
    buffers, values = [None, pa.py_buffer(offsets)], pa.array([1, 2], pa.int8())
    batch = pa.record_batch({"l": pa.Array.from_buffers(pa.list_(pa.int8()), 1, buffers, children=[values])})
    offsets += 5_000_000  # offsets as a peer may send them: libarrow's reader does not check them
    with pytest.raises(SourceError, match=r"a record batch is not valid: .*offset"):
        list(split(reader(batch)))


def test_rows_are_not_lost_where_there_is_nothing_else() -> None:
    _, message = split(reader(pa.record_batch({"n": pa.nulls(ROWS)})))
    assert message.body == []
    assert message.parsed.body_length == 0


def test_small_batches_one_after_the_other_are_those_that_libarrow_writes() -> None:
    """Split rows of every type one by one and all at once, each with its own lengths, null counts and dictionaries."""
    for name, arrays in ARRAYS.items():
        for array in arrays:
            with case(name):
                whole = pa.record_batch({"x": array})
                some = [whole.slice(row, 1) for row in range(whole.num_rows)]
                some += [whole.slice(0, 0), whole, whole.slice(2, 2)]
                splitter = Splitter(whole.schema)
                expected = [splitter.schema_message, *(one for batch in some for one in splitter.split(batch))]
                made = list(split(reader(*some)))
                assert [(one.header, one.parsed) for one in made] == [(one.header, one.parsed) for one in expected]
                assert [*map(body, made)] == [*map(body, expected)]


def test_small_batches_beside_a_large_one_of_as_many_rows() -> None:
    """Split more batches than the splitter's buffer holds, and rows that do not fit into it."""
    sizes = [*[1, 9] * 3000, 3 << 20, 5, 5, 1 << 17, *[30_000] * 100, 3, 2 << 20, 7]
    some = [pa.record_batch({"s": ["x" * size], "n": [number]}) for number, size in enumerate(sizes)]
    for one, expected in zip(split(reader(*some)), written(*some), strict=True):
        assert padded(one.header) == expected.metadata.to_pybytes()
        assert one.body is None or body(one) == expected.body.to_pybytes()


def test_large_batches_in_memory_of_the_caller_are_those_that_libarrow_writes() -> None:
    """Encode large batches of every layout, whole and sliced within a byte. Memory behind them is not touched."""
    arrays = {name: pa.concat_arrays([some[-1]] * 500) for name, some in ARRAYS.items() if "dictionary" not in name}
    large = {name: pa.record_batch({"x": array}) for name, array in arrays.items()}
    encoded = set()
    for name, whole in large.items():
        some = [whole, whole.slice(1), whole.slice(5, whole.num_rows // 2 + 3), whole]
        with case(name):
            for made, expected in zip(split_small(reader(*some)), written(*some), strict=True):
                if isinstance(made, LargeBatch):
                    encoded.add(name)
                    memory = np.full(made.size + 64, 7, np.uint8)
                    size = made.size
                    made, begin = made.encode(memory[:size])
                    body_length = made.parsed.body_length
                    assert memory[begin : begin + body_length].tobytes() == expected.body.to_pybytes()
                    assert (memory[size:] == 7).all()
                assert padded(made.header) == expected.metadata.to_pybytes()
                assert made.body is None or body(made) == expected.body.to_pybytes()
    assert len(encoded) > len(arrays) // 2


def test_a_large_batch_that_grows_meanwhile_is_refused() -> None:
    """Lengthen a text after its memory was measured. Nothing is written behind that memory."""
    offsets = np.array([0, 50_000, 100_000], np.int32)
    values = pa.py_buffer(bytes(1 << 20))
    array = pa.Array.from_buffers(pa.binary(), 2, [None, pa.py_buffer(offsets), values])
    _, large = split_small(reader(pa.record_batch({"b": array})))
    assert isinstance(large, LargeBatch)
    memory = np.full(1 << 20, 7, np.uint8)
    offsets[2] = 1 << 20
    with pytest.raises(SourceError, match="changed while it was written"):
        large.encode(memory[: large.size])
    assert (memory[large.size :] == 7).all()


def test_a_small_batch_of_another_schema_is_refused() -> None:
    one, other = pa.record_batch({"n": [1]}), pa.record_batch({"n": ["x"]})
    with pytest.raises(dis.errors.FormatError):
        list(split(pa.RecordBatchReader.from_batches(one.schema, iter([one, one, other]))))


def test_a_count_that_another_thread_knows_meanwhile_is_no_damage() -> None:
    """Ignore an error that does not come again: libarrow reports it once per array. A damaged batch fails again.

    libarrow reported it for one of 20,000 batches that one thread validated while another wrote it. Here it is
    emulated.
    """
    said = [f"In column {number}: whatever libarrow calls it" for number in (3, 7)]

    def validate() -> None:
        if said:
            raise pa.ArrowInvalid(said.pop())

    validate_shared(validate)
    assert not said
    told = ["damage"] * 2 + ["the count of a child"]

    def refuse() -> None:
        raise pa.ArrowInvalid(told.pop())

    with pytest.raises(pa.ArrowInvalid, match=r"^damage$"):
        validate_shared(refuse)
    assert not told  # the other error, and then the same error twice
