"""Options of libarrow's writer: dictionaries that change and grow, compression, metadata of single batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.errors import SourceError

from .conftest import Route

Custom = dict[bytes, bytes] | None


def stream(batches: Sequence[pa.RecordBatch]) -> Callable[[], pa.RecordBatchReader]:
    return lambda: pa.RecordBatchReader.from_batches(batches[0].schema, batches)


def encoded(*dictionaries: list[Any], type_: pa.DataType | None = None) -> list[pa.RecordBatch]:
    """Return a batch for each dictionary. The batch uses all values, the last first."""
    return [
        pa.record_batch(
            {
                "d": pa.DictionaryArray.from_arrays(
                    pa.array([*reversed(range(len(values))), None], pa.int16()), pa.array(values, type_)
                ),
                "n": pa.array(range(len(values) + 1)),
            }
        )
        for values in dictionaries
    ]


def test_a_dictionary_that_is_replaced(arranged: Route) -> None:
    sent = encoded(["a", "b"], ["c"], ["a", "b"], ["a", "b"], ["d" * 1000, "e", "f"])
    _, arrived = arranged.read(stream(sent))
    assert [batch["d"].to_pylist() for batch in arrived] == [
        ["b", "a", None],
        ["c", None],
        ["b", "a", None],
        ["b", "a", None],
        ["f", "e", "d" * 1000, None],
    ]


@pytest.mark.parametrize("type_", [pa.string(), pa.string_view(), pa.list_(pa.string())], ids=str)
def test_a_dictionary_that_grows(quick: Route, type_: pa.DataType) -> None:
    words = [[word] if pa.types.is_list(type_) else word for word in ("a", "bb", "c" * 400, "d", "e")]
    sent = encoded(words[:2], words[:3], words[:3], words, type_=type_)
    _, arrived = quick.read(stream(sent), dis.WriteOptions(emit_dictionary_deltas=True))
    assert [batch["d"].to_pylist() for batch in arrived] == [
        [*reversed(words[:2]), None],
        [*reversed(words[:3]), None],
        [*reversed(words[:3]), None],
        [*reversed(words), None],
    ]


def test_dictionaries_within_dictionaries_that_change(quick: Route) -> None:
    sent = []
    for words in (["a", "b"], ["c", "d"]):
        inner = pa.DictionaryArray.from_arrays(pa.array([0, 1, 0], pa.int8()), words)
        pairs = pa.StructArray.from_arrays([inner, pa.array([1, 2, None])], ["w", "n"])
        sent.append(pa.record_batch({"d": pa.DictionaryArray.from_arrays(pa.array([2, 1, None], pa.int8()), pairs)}))
    _, arrived = quick.read(stream(sent))
    assert [batch["d"].to_pylist() for batch in arrived] == [
        [{"w": first, "n": None}, {"w": second, "n": 2}, None] for first, second in ("ab", "cd")
    ]


def test_compression(quick: Route) -> None:
    """Compress buffers that shrink, that would grow and so stay uncompressed, and that are empty or absent."""
    sent = pa.record_batch(
        {
            "same": pa.array([7] * 5000),
            "short": pa.array([1, None] * 2500, pa.int8()),
            "words": pa.array(["many words", None, "", "and more"] * 1250),
            "empty": pa.array([""] * 5000),
            "d": pa.array(["x", "y"] * 2500).dictionary_encode(),
        }
    )
    chunks = [sent, sent.slice(0, 0), sent.slice(1, 3), sent.slice(3, 4000)]
    for source, codec in product((stream(chunks), pa.Table.from_batches(chunks)), ("lz4", "zstd")):
        _, arrived = quick.read(source, dis.WriteOptions(codec=codec))
        assert pa.Table.from_batches(arrived) == pa.Table.from_batches(chunks)


def buffers(batch: pa.RecordBatch) -> list[pa.Buffer]:
    """Return the nonempty buffers of all columns."""
    return [buffer for column in batch.columns for buffer in column.buffers() if buffer is not None and buffer.size]


@pytest.mark.parametrize(
    "fields",
    [
        {"alignment": 64},
        {"alignment": 64, "write_legacy_ipc_format": True},
        {"write_legacy_ipc_format": True},
        {"codec": "zstd", "min_space_savings": 0.2},
        {"codec": "lz4", "min_space_savings": 1.0, "alignment": 32},
        {"allow_64bit": True, "unify_dictionaries": True, "use_threads": False},
    ],
    ids=str,
)
def test_options_that_libarrow_cannot_be_told(quick: Route, fields: dict[str, Any]) -> None:
    """Read bodies with options of our own. Buffers have few bytes, so that they are not aligned by chance."""
    chunks = [
        pa.record_batch(
            {
                "b": pa.array([True, None] * count),
                "s": pa.array(["a word", None] * count),
                "n": pa.array([count, None] * count),
                "v": pa.array(["a view of more than twelve bytes", ""] * count, pa.string_view()),
                "d": pa.DictionaryArray.from_arrays(pa.array([0, 1] * count, pa.int8()), ["x", "y"]),
            }
        )
        for count in (1, 500, 3)
    ]
    chunks.insert(1, chunks[0].slice(0, 0))
    for source in (stream(chunks), pa.Table.from_batches(chunks)):
        _, arrived = quick.read(source, dis.WriteOptions(**fields))
        assert pa.Table.from_batches(arrived) == pa.Table.from_batches(chunks)
        if fields.get("alignment") != 64:
            continue
        starts = [{buffer.address % 64 for buffer in buffers(batch)} for batch in arrived]
        # Buffers are aligned within a body. A small body may start anywhere in a socket's buffer, also for a live
        # stream over shm. In shared memory all bodies are aligned.
        assert [len(one) for one in starts if one] == [1] * len(starts)
        if quick.way.medium == "shm" and quick.way.bodies == "any" and isinstance(source, pa.Table):
            assert set().union(*starts) == {0}


def test_options_do_not_apply_to_a_file_that_is_served_as_it_is(either: Route, tmp_path: Path) -> None:
    sent = pa.table({"n": [7] * 1000})
    with pa.ipc.new_file(tmp_path / "file", sent.schema) as writer:
        writer.write_table(sent)
    with pytest.raises(
        SourceError, match=r"cannot publish '.*/file' with options: an Arrow IPC file is served unchanged"
    ):
        either.publish(tmp_path / "file", options=dis.WriteOptions(codec="zstd"))
    schema, arrived = either.read(
        lambda: pa.ipc.open_file(tmp_path / "file").read_all().to_reader(), dis.WriteOptions(codec="zstd")
    )
    assert pa.Table.from_batches(arrived, schema) == sent


def test_metadata_version_4(quick: Route) -> None:
    sent = pa.table({"n": [1, 2, None], "s": ["a", None, "c"]})
    _, arrived = quick.read(sent, dis.WriteOptions(metadata_version=pa.ipc.MetadataVersion.V4))
    assert pa.Table.from_batches(arrived) == sent


def with_metadata() -> tuple[pa.Buffer, list[tuple[pa.RecordBatch, Custom]]]:
    """Return a stream in which some batches have metadata, and these metadata."""
    batches = [pa.record_batch({"n": [n], "d": pa.array([f"w{n}"]).dictionary_encode()}) for n in range(4)]
    metadata: list[Custom] = [{b"watermark": b"17", b"": b""}, None, {b"\xff": b"\0" * 1000}, {b"last": b"yes"}]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema) as writer:
        for batch, custom in zip(batches, metadata, strict=True):
            writer.write_batch(batch, custom_metadata=custom)
    return sink.getvalue(), list(zip(batches, metadata, strict=True))


def read_with_metadata(reader: pa.RecordBatchReader) -> list[tuple[pa.RecordBatch, Custom]]:
    pairs: list[tuple[pa.RecordBatch, Custom]] = []
    while True:
        try:
            batch, custom = reader.read_next_batch_with_custom_metadata()
        except StopIteration:
            return pairs
        pairs.append((batch, None if custom is None else dict(custom)))


def test_metadata_of_single_batches_of_a_reader(quick: Route) -> None:
    written, sent = with_metadata()
    quick.publish(lambda: pa.ipc.open_stream(written))
    assert read_with_metadata(quick.open()) == sent


def test_metadata_of_single_batches_of_a_file(quick: Route, tmp_path: Path) -> None:
    written, sent = with_metadata()
    path = tmp_path / "stream.arrows"
    path.write_bytes(written)
    quick.publish(path)
    assert read_with_metadata(quick.open()) == sent
