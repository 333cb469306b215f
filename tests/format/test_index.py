"""An index of the positions of messages, made without reading bodies."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dissociated.errors import FormatError
from dissociated.format.encapsulated import END_OF_STREAM, walk
from dissociated.format.index import Entry, Index
from dissociated.format.message import HeaderType

S, D, R = HeaderType.SCHEMA, HeaderType.DICTIONARY_BATCH, HeaderType.RECORD_BATCH


def numbers(*rows: int, text: str = "") -> list[pa.RecordBatch]:
    return [
        pa.record_batch(
            {"n": np.arange(size), "s": pa.array([text * (index % 3) for index in range(size)], pa.string())}
        )
        for size in rows
    ]


def words(*some: list[str]) -> list[pa.RecordBatch]:
    return [
        pa.record_batch({"d": pa.array(these).dictionary_encode(), "n": pa.array(range(len(these)))}) for these in some
    ]


def written(make: Callable[..., Any], batches: list[pa.RecordBatch], **options: object) -> bytes:
    sink = io.BytesIO()
    with make(sink, batches[0].schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sink.getvalue()


stream, file = partial(written, pa.ipc.new_stream), partial(written, pa.ipc.new_file)


def messages(content: bytes) -> list[tuple[HeaderType, bytes, int]]:
    """Return type, metadata and body length of the messages that libarrow finds in a stream."""
    types = {"schema": S, "dictionary": D, "record batch": R}
    return [(types[m.type], m.metadata.to_pybytes(), m.body.size) for m in pa.ipc.MessageReader.open_stream(content)]


def seen(content: bytes, index: Index) -> list[tuple[HeaderType, bytes, int]]:
    """Return type, metadata and body length of the messages at the positions of the index."""
    found = []
    for entry in index:
        prefix = 8 if content[entry.offset : entry.offset + 4] == b"\xff\xff\xff\xff" else 4
        metadata = content[entry.offset + prefix : entry.offset + entry.metadata_length]
        assert struct.unpack_from("<i", content, entry.offset + prefix - 4) == (len(metadata),)
        found.append((entry.type, metadata, entry.body_length))
    return found


STREAMS = {
    "one": numbers(10),
    "many alike": numbers(*[10] * 300),
    "alike, but for the last": numbers(*[10] * 299, 3),
    "alike in size, not in rows": numbers(*[10, 9] * 200),
    "all different": numbers(*range(100), text="four"),
    "runs": numbers(*[10] * 50, *[200] * 70, *[10] * 20, 11, *[10] * 40),
    "dictionaries": words(["a", "b"], ["a", "b", "c"], ["x"], ["x"], ["x"], ["x"], ["y"]),
    "empty batches": numbers(*[0] * 100),
    "no columns": [pa.record_batch([], names=[])] * 50,
}


@pytest.mark.parametrize("legacy", [False, True], ids=["", "legacy"])
@pytest.mark.parametrize("kind", STREAMS)
def test_a_stream(kind: str, legacy: bool) -> None:
    content = stream(STREAMS[kind], use_legacy_format=legacy)
    index = Index(content)
    assert not index.is_file
    assert seen(content, index) == messages(content)
    assert index.body_size == sum(length for _, _, length in messages(content))


@pytest.mark.parametrize("legacy", [False, True], ids=["", "legacy"])
@pytest.mark.parametrize("kind", STREAMS)
def test_a_stream_is_ended_by_its_marker_and_not_by_zeros(kind: str, legacy: bool) -> None:
    """Cut streams before their marker. Zeros follow if the file was extended in advance."""
    whole = stream(STREAMS[kind], use_legacy_format=legacy)
    cut = whole[: -4 if legacy else -8]
    for content in (whole, cut + bytes(4)):  # readers accept either marker in both formats
        assert Index(content).is_ended
        assert not len(Index(content).trailing_bytes)
    for content in (cut, cut + bytes(8), cut + bytes(4096), cut + bytes(4) + whole):
        assert not Index(content).is_ended
    followed = Index(cut + END_OF_STREAM + whole)
    assert followed.is_ended
    assert followed.trailing_bytes == whole


@given(st.lists(st.sampled_from([0, 1, 8, 9, 10, 100]), min_size=1, max_size=60), st.sampled_from(["", "x", "long "]))
def test_any_stream(rows: list[int], text: str) -> None:
    content = stream(numbers(*rows, text=text))
    assert seen(content, Index(content)) == messages(content)


def test_a_file_is_listed_by_its_footer() -> None:
    """List a file with its dictionaries first, because a batch may precede a dictionary that it needs."""
    content = file(words(["a", "b"], ["a", "b", "c"], ["a", "b", "c"]), emit_dictionary_deltas=True)
    index = Index(content)
    assert index.is_file
    assert [entry.type for entry in index] == [S, D, D, R, R, R]
    by_position = sorted(seen(content, index)[1:])
    assert by_position == sorted(messages(content[8:])[1:])
    assert [entry.offset for entry in index if entry.type is R] == sorted(e.offset for e in index if e.type is R)


@pytest.mark.parametrize("before", [bytes(16), b"\xff" * 16, stream(words(["a"]))[:8] + bytes(8)])
def test_a_file_without_a_schema_before_its_batches_has_that_of_its_footer(before: bytes) -> None:
    whole = file(words(["a", "b"], ["a", "b"]))
    content = whole[:8] + before + whole[24:]
    assert pa.ipc.open_file(content).read_all() == pa.ipc.open_file(whole).read_all()
    index, expected = Index(content), Index(whole)
    assert [*index][1:] == [*expected][1:]
    header = index.message(0).header
    read = pa.ipc.read_schema(pa.py_buffer(struct.pack("<ii", -1, len(header)) + header))
    assert read.equals(pa.ipc.open_file(whole).schema, check_metadata=True)


@given(st.data())
def test_a_damaged_footer_is_refused_or_has_a_schema(data: st.DataObject) -> None:
    whole = bytearray(file(words(["a", "b"])))
    whole[8:16] = bytes(8)
    at = data.draw(st.integers(len(whole) - 10 - int.from_bytes(whole[-10:-6], "little"), len(whole) - 1))
    whole[at] = data.draw(st.integers(0, 255))
    try:
        assert Index(bytes(whole)).message(0).parsed.type is S
    except FormatError:
        pass


def test_a_message_of_the_index_is_the_message() -> None:
    content = stream(numbers(5, 6))
    index = Index(content)
    assert [index.message(number) for number in range(3)] == list(walk(memoryview(content)))


@pytest.mark.parametrize("kind", [stream, file])
def test_whatever_is_cut_off_is_refused_or_shorter(kind: object) -> None:
    content = (stream if kind is stream else file)(numbers(*[10] * 40))
    whole = list(Index(content))
    for size in range(1, len(content), 3):
        try:
            found: list[Entry] = list(Index(content[:size]))
        except FormatError:
            continue
        assert found == whole[: len(found)]
        assert kind is stream


@given(st.integers(0, 10_000), st.integers(0, 255))
def test_a_damaged_file_is_refused_or_leads_nowhere_outside(at: int, value: int) -> None:
    content = bytearray(file(words(["a", "b"], ["a", "b"])))
    content[at % len(content)] = value
    try:
        index = Index(bytes(content))
        for number in range(len(index)):
            message = index.message(number)
            assert 0 <= message.body_at <= message.body_at + message.parsed.body_length <= len(content)
    except FormatError:
        pass


def test_bodies_are_not_touched(tmp_path: Path) -> None:
    """Index a sparse file of 64 GiB that contains only metadata."""
    rows = 1 << 30
    batch = pa.record_batch({"n": pa.Array.from_buffers(pa.int64(), 8, [None, pa.py_buffer(bytes(64))])})
    written = stream([batch])
    first, second = Index(written)
    head = written[first.offset : second.offset]
    message = bytearray(written[second.offset : second.offset + second.metadata_length])
    for old, new in ((64, rows * 8), (8, rows)):
        while (at := message.find(struct.pack("<q", old))) >= 0:
            message[at : at + 8] = struct.pack("<q", new)
    path = tmp_path / "sparse"
    with path.open("wb") as sparse:
        sparse.write(head)
        for number in range(8):
            sparse.seek(len(head) + number * (len(message) + rows * 8))
            sparse.write(message)
        sparse.truncate(len(head) + 8 * (len(message) + rows * 8))
    with pa.memory_map(str(path)) as mapped:
        before = pa.total_allocated_bytes()
        index = Index(mapped.read_buffer())
        assert pa.total_allocated_bytes() == before
    assert len(index) == 9
    assert index.body_size == 8 * rows * 8
    assert path.stat().st_blocks * 512 < 1 << 20
