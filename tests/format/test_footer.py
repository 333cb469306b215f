"""Footers of files: they are read as libarrow writes them, and refused if they are wrong."""

from __future__ import annotations

import struct

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dissociated.errors import FormatError
from dissociated.format.footer import BLOCK, parse_footer
from support.helpers import case
from support.machine import ARROW_TEST_DATA


def encoded(*words: str) -> pa.RecordBatch:
    return pa.record_batch({"n": range(len(words)), "d": pa.array(words).dictionary_encode()})


def footer_of(file: bytes) -> bytes:
    (length,) = struct.unpack("<i", file[-10:-6])
    return file[-10 - length : -10]


def file(count: int = 3) -> bytes:
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True)
    with pa.ipc.new_file(sink, encoded("a").schema, options=options, metadata={"k": "v"}) as writer:
        for index in range(count):
            writer.write_batch(encoded(*"abcdefg"[: index + 1]))
    return sink.getvalue().to_pybytes()


WHOLE = file()
FOOTER = footer_of(WHOLE)


def test_blocks_lie_where_the_messages_of_the_file_are() -> None:
    footer = parse_footer(FOOTER)
    assert len(footer.dictionaries) == 3  # a delta, and two deltas
    assert len(footer.record_batches) == 3
    kinds = {"dictionary": footer.dictionaries, "record batch": footer.record_batches}
    for kind, blocks in kinds.items():
        for offset, metadata_length, body_length in blocks.tolist():
            message = pa.ipc.read_message(pa.py_buffer(WHOLE[offset:]))
            assert message.type == kind
            assert message.metadata.size == metadata_length - 8
            assert message.body.size == body_length


def test_the_version_is_told() -> None:
    assert parse_footer(FOOTER).version == 4  # V5


@pytest.mark.needs("golden files")
def test_the_version_of_an_old_file_is_told() -> None:
    """Read another version than V5, which only old files have: libarrow writes V5 into every footer."""
    assert ARROW_TEST_DATA is not None
    old = ARROW_TEST_DATA / "arrow-ipc-stream" / "integration" / "0.17.1" / "generated_union.arrow_file"
    assert parse_footer(footer_of(old.read_bytes())).version == 3


def test_a_file_without_batches_has_no_blocks() -> None:
    footer = parse_footer(footer_of(file(count=0)))
    assert len(footer.dictionaries) == len(footer.record_batches) == 0


def test_blocks_of_a_footer_that_can_be_written_can_be_written() -> None:
    copy = bytearray(FOOTER)
    parse_footer(copy).record_batches["offset"] += 64
    before, after = parse_footer(FOOTER).record_batches, parse_footer(copy).record_batches
    assert (after["offset"] - before["offset"]).tolist() == [64, 64, 64]
    assert (after["body_length"] == before["body_length"]).all()
    assert len(copy) == len(FOOTER)


@pytest.mark.parametrize("field", BLOCK.names or ())
def test_a_block_that_can_be_nowhere_is_refused(field: str) -> None:
    copy = bytearray(FOOTER)
    parse_footer(copy).record_batches[field][1] = -8
    with pytest.raises(FormatError, match=r"the impossible block .*-8"):
        parse_footer(copy)


def test_a_block_beyond_every_file_is_refused() -> None:
    copy = bytearray(FOOTER)
    parse_footer(copy).dictionaries["body_length"][0] = (1 << 63) - 1
    with pytest.raises(FormatError, match="the impossible block"):
        parse_footer(copy)


def test_more_blocks_than_fit_are_refused() -> None:
    copy = bytearray(FOOTER)
    batches = parse_footer(copy).record_batches
    count_at = batches.__array_interface__["data"][0] - parse_footer_base(copy) - 4
    assert copy[count_at] == 3
    struct.pack_into("<I", copy, count_at, 0xFFFFFFFF)
    with pytest.raises(FormatError, match="4294967295 blocks lie outside"):
        parse_footer(copy)


def parse_footer_base(footer: bytearray) -> int:
    return pa.py_buffer(footer).address


def test_an_invalid_footer_is_refused() -> None:
    for junk in (b"", b"\0\0\0\0", bytes(64), b"\xff" * 64, b"ARROW1\0\0"):
        with case(junk), pytest.raises(FormatError, match="the Arrow IPC file has a footer"):
            parse_footer(junk)


def test_a_footer_cut_off_anywhere_is_refused_or_complete() -> None:
    refused = 0
    for length in range(len(FOOTER)):
        try:
            found = parse_footer(FOOTER[:length])
        except FormatError:
            refused += 1
            continue
        assert len(found.record_batches) == 3, length  # only unused data was cut off
    assert refused > len(FOOTER) / 2


@given(st.lists(st.tuples(st.integers(0, len(FOOTER) - 1), st.integers(0, 255)), min_size=1, max_size=6))
def test_damage_is_a_format_error_or_harmless(changes: list[tuple[int, int]]) -> None:
    damaged = bytearray(FOOTER)
    for at, value in changes:
        damaged[at] = value
    try:
        footer = parse_footer(damaged)
    except FormatError:
        return
    for blocks in (footer.dictionaries, footer.record_batches):
        assert blocks.nbytes <= len(FOOTER)
        assert (blocks["offset"] >= 0).all()
