"""Options for writing: invalid values raise an error with an explanation, and every field has its effect."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.errors import FormatError, OptionError
from dissociated.format.message import buffer_extents, parse_header
from dissociated.ipc import (
    CollectListener,
    FileWriter,
    ReadOptions,
    StreamDecoder,
    StreamWriter,
    WriteOptions,
    open_file,
    open_stream,
    write_tensor,
)
from support.arrow_cases import dictionary_batch

V4, V5 = pa.ipc.MetadataVersion.V4, pa.ipc.MetadataVersion.V5

NONSENSE: list[tuple[dict[str, Any], str]] = [
    ({"allow_64bit": 1}, "allow_64bit is 1; it must be a bool"),
    ({"max_recursion_depth": 0}, "max_recursion_depth is 0; it must be from 1 to 64, the limit of libarrow"),
    ({"max_recursion_depth": 65}, " is 65;"),
    ({"max_recursion_depth": 2.5}, " is 2.5;"),
    ({"max_recursion_depth": True}, " is True;"),
    ({"alignment": 0}, "alignment is 0; it must be 8, 16, 32 or 64 bytes"),
    ({"alignment": 24}, " is 24;"),
    ({"alignment": 128}, " is 128;"),
    ({"alignment": 64.0}, " is 64.0;"),
    ({"alignment": "64"}, " is '64';"),
    ({"write_legacy_ipc_format": None}, "write_legacy_ipc_format is None; it must be a bool"),
    ({"memory_pool": "jemalloc"}, "memory_pool is 'jemalloc'; it must be a MemoryPool"),
    ({"codec": "gzip"}, "the codec 'gzip' is unknown: Arrow IPC has lz4 and zstd"),
    ({"codec": 3}, "codec 3 is"),
    ({"codec": pa.Codec("snappy")}, "codec 'snappy' is"),
    ({"min_space_savings": -0.1}, "min_space_savings is -0.1; it must be from 0 to 1"),
    ({"min_space_savings": 1.5}, " is 1.5;"),
    ({"min_space_savings": math.nan}, " is nan;"),
    ({"min_space_savings": "10%"}, " is '10%';"),
    ({"min_space_savings": True}, " is True;"),
    ({"use_threads": "yes"}, "use_threads is 'yes'; it must be a bool"),
    ({"emit_dictionary_deltas": 2}, "emit_dictionary_deltas is 2; it must be a bool"),
    ({"unify_dictionaries": 0}, "unify_dictionaries is 0; it must be a bool"),
    ({"metadata_version": 5}, "metadata_version is 5; it must be a MetadataVersion"),
    ({"metadata_version": pa.ipc.MetadataVersion.V3}, "metadata_version is V3; only V4 and V5 can be written"),
    ({"metadata_version": V4, "codec": "lz4"}, "compression needs metadata version V5"),
]


@pytest.mark.parametrize(("fields", "sentence"), NONSENSE, ids=[str(fields) for fields, _ in NONSENSE])
def test_nonsense_is_refused_with_a_sentence(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(OptionError) as raised:
        WriteOptions(**fields)
    assert sentence in str(raised.value)


TABLE = pa.table({"n": [1]})
OTHERS = pa.ipc.IpcWriteOptions()  # options of another library


def _publish(**given: Any) -> None:
    with dis.Server(["inproc:"], catalog=None) as server:
        server.publish("n", TABLE.to_reader(), **given)


TAKES_OPTIONS: dict[str, tuple[Callable[[], object], str]] = {
    "publish": (lambda: _publish(options=OTHERS), "WriteOptions"),
    "publish live": (lambda: _publish(options=OTHERS, live=dis.Live()), "WriteOptions"),
    "publish no Live": (lambda: _publish(live=True), "live is True; it must be a dissociated.Live"),
    "StreamWriter": (lambda: StreamWriter(io.BytesIO(), TABLE.schema, OTHERS), "WriteOptions"),
    "FileWriter": (lambda: FileWriter(io.BytesIO(), TABLE.schema, OTHERS), "WriteOptions"),
    "write_tensor": (lambda: write_tensor(pa.Tensor.from_numpy(np.zeros(2)), io.BytesIO(), OTHERS), "WriteOptions"),
    "ipc.open_stream": (lambda: open_stream(io.BytesIO(), options=OTHERS), "ReadOptions"),
    "ipc.open_file": (lambda: open_file(io.BytesIO(), options=OTHERS), "ReadOptions"),
    "StreamDecoder": (lambda: StreamDecoder(CollectListener(), OTHERS), "ReadOptions"),
    "open_stream": (lambda: dis.open_stream("tcp://h:1?want_data=1", b"", options=OTHERS), "ReadOptions"),
}


@pytest.mark.parametrize("call", TAKES_OPTIONS)
def test_options_of_another_library_are_refused_with_a_sentence(call: str) -> None:
    give, sentence = TAKES_OPTIONS[call]
    with pytest.raises(OptionError) as raised:
        give()
    assert sentence in str(raised.value)


@pytest.mark.parametrize("included", [5, None, [True], [-1], "ab", [0.0]], ids=str)
def test_fields_that_are_no_indices_are_refused(included: Any) -> None:
    with pytest.raises(OptionError, match="included_fields"):
        ReadOptions(included_fields=included)


def written(*batches: pa.RecordBatch, **fields: Any) -> bytes:
    sink = io.BytesIO()
    with StreamWriter(sink, batches[0].schema, WriteOptions(**fields)) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sink.getvalue()


def written_file(table: pa.Table, **fields: Any) -> bytes:
    sink = io.BytesIO()
    with FileWriter(sink, table.schema, WriteOptions(**fields)) as writer:
        writer.write_table(table)
    return sink.getvalue()


def read(stream: bytes) -> list[pa.RecordBatch]:
    """Return the batches that plain pyarrow reads, fully validated."""
    batches = list(pa.ipc.open_stream(stream))
    for batch in batches:
        batch.validate(full=True)
    return batches


def libarrow(*batches: pa.RecordBatch, **fields: Any) -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, batches[0].schema, options=pa.ipc.IpcWriteOptions(**fields)) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sink.getvalue()


def buffers(stream: bytes) -> list[bytes]:
    """Return the buffers of the only batch of a stream, in the order of the body."""
    _, message = pa.ipc.MessageReader.open_stream(stream)
    header = message.metadata.to_pybytes()
    offsets, lengths = buffer_extents(header, parse_header(header))
    body = message.body.to_pybytes()
    return [body[offset : offset + length] for offset, length in zip(offsets, lengths, strict=True)]


# A batch whose buffers differ in the savings of compression: all of "same", nothing of "random".
MIXED = pa.record_batch(
    {
        "same": pa.array([7] * 1000),
        "random": pa.array(np.random.default_rng(1).integers(0, 1 << 63, 1000, np.uint64)),
        "bits": pa.array(np.random.default_rng(2).integers(0, 1 << 16, 1000).astype(np.int32)),
        "holes": pa.array([None, 1] * 500, pa.int8()),
        "empty": pa.array([""] * 1000),
    }
)
COLUMNS = MIXED.schema.names


@pytest.mark.parametrize("allowed", [False, True])
def test_more_rows_than_an_int_counts_are_written_only_if_allowed(allowed: bool) -> None:
    batch = pa.record_batch({"n": pa.nulls(1 << 31)})  # nulls take no memory
    if allowed:
        assert read(written(batch, allow_64bit=True))[0].num_rows == 1 << 31
    else:
        with pytest.raises(FormatError, match=r"Cannot write arrays larger than 2\^31 - 1"):
            written(batch)


def test_depth_is_limited() -> None:
    nested = pa.record_batch({"n": pa.array([[[1]]])})
    assert read(written(nested, max_recursion_depth=3)) == [nested]
    for write in (written, lambda batch, **fields: written_file(pa.table(batch), **fields)):
        with pytest.raises(FormatError, match="field 'n' is nested 3 levels deep; max_recursion_depth is 2"):
            write(nested, max_recursion_depth=2)


def addresses(table: pa.Table, start: int) -> list[int]:
    """Return the addresses of the buffers relative to `start`."""
    chunks = [chunk for column in table.columns for chunk in column.chunks]
    every = [b for chunk in chunks for b in chunk.buffers() if b is not None and b.size]
    every += [b for chunk in chunks if pa.types.is_dictionary(chunk.type) for b in chunk.dictionary.buffers() if b]
    return [buffer.address - start for buffer in every]


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("alignment", [8, 16, 32, 64])
@pytest.mark.parametrize("kind", ["stream", "file"])
def test_buffers_lie_aligned(kind: str, alignment: int, legacy: bool) -> None:
    """Align every buffer of every message that libarrow finds. Messages start at any multiple of 8 otherwise."""
    whole = pa.record_batch(
        {
            "n": pa.array([1, None, 3]),
            "s": pa.array(["a", None, "of some length"]),
            "v": pa.array(["a view longer than that", "b", "another view, also long"], pa.string_view()),
            "d": pa.array(["x", "y", "x"]).dictionary_encode(),
        }
    )
    some = [whole, whole.slice(1), whole.slice(0, 0), whole.slice(2, 1)]
    table = pa.Table.from_batches(some)
    fields = {"alignment": alignment, "write_legacy_ipc_format": legacy}
    if kind == "stream":
        memory = pa.py_buffer(written(*some, **fields))
        got = pa.ipc.open_stream(memory).read_all()
    else:
        memory = pa.py_buffer(written_file(table, unify_dictionaries=True, **fields))
        got = pa.ipc.open_file(memory).read_all()
    got.validate(full=True)
    assert got == table
    found = addresses(got, memory.address)
    assert len(found) > 20
    assert all(0 < at < memory.size for at in found)
    assert all(at % alignment == 0 for at in found)
    if alignment == 8:
        assert any(at % 16 for at in found)


def test_bodies_are_padded_to_the_alignment() -> None:
    sizes = [
        message.body.size for message in pa.ipc.MessageReader.open_stream(written(MIXED, alignment=64)) if message.body
    ]
    assert sizes[-1] % 64 == 0
    assert [len(one) for one in buffers(written(MIXED, alignment=64))] == [len(one) for one in buffers(written(MIXED))]


def test_the_legacy_format_has_no_continuation_marker() -> None:
    some = [dictionary_batch("a", "b"), dictionary_batch("c")]
    got = written(*some, write_legacy_ipc_format=True)
    assert got == libarrow(*some, use_legacy_format=True)
    assert got[:4] != b"\xff\xff\xff\xff"
    assert got[-4:] == b"\0\0\0\0"
    assert written(*some)[-8:] == b"\xff\xff\xff\xff\0\0\0\0"
    assert read(got) == some


def test_memory_is_taken_from_the_pool() -> None:
    pool = pa.proxy_memory_pool(pa.default_memory_pool())
    written(MIXED, codec="zstd", min_space_savings=0.5, memory_pool=pool)
    assert pool.max_memory() >= 8000  # memory of discarded compressed buffers is returned
    table = pa.Table.from_batches([dictionary_batch("a" * 1000), dictionary_batch("b" * 1000)])
    unifying = pa.proxy_memory_pool(pa.default_memory_pool())
    written_file(table, unify_dictionaries=True, memory_pool=unifying)
    assert unifying.max_memory() >= 2000


@pytest.mark.parametrize("codec", ["lz4", "lz4_frame", "zstd", pa.Codec("zstd", compression_level=19), pa.Codec("lz4")])
@pytest.mark.parametrize("savings", [None, 0.1])
def test_bodies_are_compressed(codec: Any, savings: float | None) -> None:
    got = written(MIXED, codec=codec, min_space_savings=savings)
    assert len(got) < 0.9 * len(written(MIXED))
    assert read(got) == [MIXED]
    if savings is None:
        told = "lz4" if codec == "lz4_frame" else codec
        assert got == libarrow(MIXED, compression=told)


def raw(compressed: list[bytes]) -> list[bool]:
    """Return for each nonempty buffer whether it is stored uncompressed, which is marked by the length -1."""
    return [one[:8] == b"\xff" * 8 for one in compressed if one]


@pytest.mark.parametrize(
    ("savings", "expected"),
    [
        # columns: same, random, bits, validity of holes, holes, empty
        (0, [False, True, False, False, False, False]),
        (0.1, [False, True, False, False, False, False]),
        (0.6, [False, True, True, False, False, False]),
        (1, [True, True, True, True, True, True]),
    ],
)
@pytest.mark.parametrize("alignment", [8, 64])
def test_a_buffer_is_compressed_only_where_that_saves_enough(
    savings: float, expected: list[bool], alignment: int
) -> None:
    got = written(MIXED, codec="zstd", min_space_savings=savings, alignment=alignment)
    assert raw(buffers(got)) == expected
    assert read(got) == [MIXED]
    plain = [one for one in buffers(written(MIXED)) if one]
    packed = [one for one in buffers(got) if one]
    always = [one for one in buffers(written(MIXED, codec="zstd")) if one]
    for original, one, compressed, stored in zip(plain, packed, always, expected, strict=True):
        assert one == (b"\xff" * 8 + original if stored else compressed)


def test_without_a_codec_there_is_nothing_to_save() -> None:
    assert written(MIXED, min_space_savings=0.5) == written(MIXED)


#: Output of libarrow's C++ writer for the batch below with zstd and min_space_savings = 1, which pyarrow cannot set.
SAVES_NOTHING = bytes.fromhex(
    "ffffffffa80000001000000000000a000c000600050008000a000000000104000c0000000800080000000400080000000400000002000000"
    "4000000004000000d8ffffff0000010510000000180000000400000000000000010000007300000004000400040000001000140008000600"
    "07000c00000010001000000000000102100000001c0000000400000000000000010000006e00000008000c00080007000800000000000001"
    "4000000000000000ffffffffe000000014000000000000000c0018000600050008000c000c000000000304001c0000006800000000000000"
    "000000000c001e001000040008000c000c000000800000002400000018000000030000000000000000000000000006000800070006000000"
    "0000000105000000000000000000000009000000000000001000000000000000200000000000000030000000000000000900000000000000"
    "4000000000000000180000000000000058000000000000000b00000000000000000000000200000003000000000000000100000000000000"
    "03000000000000000100000000000000ffffffffffffffff0300000000000000ffffffffffffffff01000000000000000200000000000000"
    "0000000000000000ffffffffffffffff0300000000000000ffffffffffffffff00000000010000000300000003000000ffffffffffffffff"
    "6162620000000000ffffffff00000000"
)


def test_what_saves_too_little_is_written_as_libarrow_writes_it() -> None:
    batch = pa.record_batch({"n": pa.array([1, 2, None]), "s": pa.array(["a", "bb", None])})
    assert written(batch, codec="zstd", min_space_savings=1) == SAVES_NOTHING


@pytest.mark.parametrize("threads", [False, True])
def test_threads_change_nothing_that_is_written(threads: bool) -> None:
    assert written(MIXED, codec="zstd", use_threads=threads) == libarrow(MIXED, compression="zstd")


@pytest.mark.parametrize("alignment", [8, 64])
def test_dictionaries_that_grow_are_sent_as_what_was_added(alignment: int) -> None:
    some = [dictionary_batch("a"), dictionary_batch("a", "b"), dictionary_batch("a", "b", "c")]
    for deltas in (False, True):
        got = written(*some, emit_dictionary_deltas=deltas, alignment=alignment)
        reader = pa.ipc.open_stream(got)
        assert [batch.to_pydict() for batch in reader] == [batch.to_pydict() for batch in some]
        assert reader.stats.num_dictionary_deltas == (2 if deltas else 0)
        assert reader.stats.num_replaced_dictionaries == (0 if deltas else 2)


def test_dictionaries_of_a_table_are_unified_in_files_alone() -> None:
    table = pa.Table.from_batches([dictionary_batch("a"), dictionary_batch("b", "a")])
    with pytest.raises(FormatError, match=r"Dictionary replacement.* unify_dictionaries and write_table"):
        written_file(table)
    reader = pa.ipc.open_file(written_file(table, unify_dictionaries=True))
    assert [reader.get_batch(index)["d"].dictionary.to_pylist() for index in range(2)] == [["a", "b"], ["a", "b"]]
    assert reader.read_all().to_pydict() == table.to_pydict()
    assert written(*table.to_batches(), unify_dictionaries=True) == written(*table.to_batches())


def test_dictionaries_that_cannot_be_unified_are_named() -> None:
    values = [pa.array([[value]]) for value in (1, 2)]
    chunks = [pa.DictionaryArray.from_arrays(pa.array([0], pa.int8()), one) for one in values]
    with pytest.raises(FormatError, match="the dictionaries of this table cannot be unified"):
        written_file(pa.table({"d": pa.chunked_array(chunks)}), unify_dictionaries=True)


@pytest.mark.parametrize(("version", "byte"), [(V4, b"\3"), (V5, b"\4")])
def test_the_metadata_version_is_what_messages_say(version: pa.ipc.MetadataVersion, byte: bytes) -> None:
    got = written(MIXED, metadata_version=version)
    assert {message.metadata_version for message in pa.ipc.MessageReader.open_stream(got)} == {version}
    assert got == libarrow(MIXED, metadata_version=version)
    assert read(got) == [MIXED]
