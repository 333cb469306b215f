"""The walk finds the messages of IPC streams and files as libarrow wrote them, and otherwise raises FormatError."""

from __future__ import annotations

import io
import struct

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dissociated.errors import FormatError
from dissociated.format.encapsulated import Encapsulated, encapsulate, walk
from dissociated.format.message import HeaderType
from support.helpers import case

BATCHES = [
    pa.record_batch({"d": pa.array(words).dictionary_encode(), "n": pa.array(range(len(words)))})
    for words in (["a", "b"], ["a", "b", "c"], ["x"])
]
S, D, R = HeaderType.SCHEMA, HeaderType.DICTIONARY_BATCH, HeaderType.RECORD_BATCH


def stream(**options: object) -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, BATCHES[0].schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        for batch in BATCHES:
            writer.write_batch(batch)
    return sink.getvalue()


def file(**options: object) -> bytes:
    sink = io.BytesIO()
    told = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True, **options)
    with pa.ipc.new_file(sink, BATCHES[0].schema, options=told) as writer:
        for batch in BATCHES[:2]:
            writer.write_batch(batch)
    return sink.getvalue()


STREAM, FILE = stream(), file()


def messages(content: bytes) -> list[Encapsulated]:
    return list(walk(memoryview(content)))


@pytest.mark.parametrize("legacy", [False, True], ids=["", "legacy"])
def test_a_stream(legacy: bool) -> None:
    content = stream(use_legacy_format=legacy)
    found = messages(content)
    assert [one.parsed.type for one in found] == [S, D, R, D, R, D, R]
    expected = pa.ipc.MessageReader.open_stream(content)
    for one, message in zip(found, expected, strict=True):
        assert one.header == message.metadata.to_pybytes()
        assert content[one.body_at : one.body_at + one.parsed.body_length] == message.body.to_pybytes()


@pytest.mark.parametrize("legacy", [False, True], ids=["", "legacy"])
def test_a_file(legacy: bool) -> None:
    content = file(use_legacy_format=legacy)
    found = messages(content)
    assert [one.parsed.type for one in found] == [S, D, R, D, R]
    after_schema = [one for one in found if one.parsed.type is R]
    read = pa.ipc.open_file(content)
    assert len(after_schema) == read.num_record_batches
    assert all(one.body_at % 8 == 0 for one in found)


def test_a_stream_without_its_end_mark_ends_where_it_ends() -> None:
    assert messages(STREAM[:-8]) == messages(STREAM)


def test_what_follows_the_end_mark_is_not_looked_at() -> None:
    assert messages(STREAM + b"anything") == messages(STREAM)


def test_nothing_is_a_stream_without_messages() -> None:
    assert messages(b"") == []


def test_a_header_is_encapsulated_as_libarrow_does_it() -> None:
    for one in messages(STREAM):
        prefix = b"\xff\xff\xff\xff" + struct.pack("<i", len(one.header))
        assert encapsulate(one.header) == prefix + one.header
    assert encapsulate(b"12345") == b"\xff\xff\xff\xff\x08\0\0\0" + b"12345\0\0\0"


ENDS = {
    0,
    *(
        end
        for one in messages(STREAM)
        for end in (one.body_at + one.parsed.body_length, one.body_at + one.parsed.body_length + 4)
    ),
}


def test_a_stream_that_is_cut_off_anywhere() -> None:
    for at in set(range(len(STREAM) - 8)) - ENDS:
        with case(at), pytest.raises(FormatError, match="cut off"):
            messages(STREAM[:at])


def test_a_file_that_is_cut_off_anywhere() -> None:
    for at in range(8, len(FILE)):
        with case(at), pytest.raises(FormatError, match=r"cut off|outside"):
            messages(FILE[:at])


def check(content: bytes) -> None:
    """Check the only invariant: the messages lie within the content, or the walk raises FormatError."""
    try:
        found = messages(content)
    except FormatError:
        return
    at = 0
    for one in found:
        assert at < one.body_at <= one.body_at + one.parsed.body_length <= len(content)
        assert content[one.body_at - len(one.header) : one.body_at] == one.header
        at = one.body_at + one.parsed.body_length


@given(st.binary(max_size=200))
@example(b"ARROW1")
@example(b"ARROW1ARROW1")
@example(b"ARROW1\0\0\xff\xff\xff\xffARROW1")
@example(b"\xff\xff\xff\xff\xff\xff\xff\xff")
@example(b"\xff\xff\xff\xff\0\0\0\x80" + bytes(64))
def test_anything(content: bytes) -> None:
    check(content)


@pytest.mark.parametrize("original", [STREAM, FILE], ids=["stream", "file"])
@given(data=st.data())
def test_what_was_an_ipc_stream(original: bytes, data: st.DataObject) -> None:
    changes = data.draw(
        st.lists(
            st.tuples(st.integers(0, len(original) - 1), st.one_of(st.just(0), st.just(255), st.integers(0, 255))),
            min_size=1,
            max_size=8,
        )
    )
    content = bytearray(original)
    for at, value in changes:
        content[at] = value
    check(bytes(content[: data.draw(st.sampled_from([len(content), len(content) - 3, len(content) // 2]))]))
