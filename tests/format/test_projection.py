"""Projections of any columns of any batches: libarrow reads them as the selected columns of the whole."""

from __future__ import annotations

import random
from contextlib import suppress

import pyarrow as pa
import pytest

from dissociated.codec.options import WriteOptions
from dissociated.codec.split import SplitMessage, Splitter
from dissociated.errors import FormatError
from dissociated.format.encapsulated import END_OF_STREAM, encapsulate
from dissociated.format.layout import dictionary_of
from dissociated.format.message import HeaderType, parse_header
from dissociated.format.missed import MAX_NOTE_SIZE, note_missed, take_missed
from dissociated.format.projection import Projection
from support.arrow_cases import ARRAYS, ROWS
from support.helpers import case

METADATA = {b"k": b"v", b"": b"", "ü".encode(): b"\xff"}
OPTIONS = {
    "plain": WriteOptions(),
    "version 4": WriteOptions(metadata_version=pa.ipc.MetadataVersion.V4),
    "compressed": WriteOptions(codec="zstd"),
}


def messages(batches: list[pa.RecordBatch], options: WriteOptions | None, metadata=None) -> list[SplitMessage]:
    splitter = Splitter(batches[0].schema, options)
    return [splitter.schema_message, *(one for batch in batches for one in splitter.split(batch, metadata))]


@pytest.mark.parametrize("metadata", [None, METADATA, {**METADATA, b"dissociated.missed": b"not ours"}])
def test_a_note_of_missed_batches_leaves_all_else_as_it_was(metadata: dict[bytes, bytes] | None) -> None:
    batch = pa.record_batch({"n": [1, None, 3], "v": pa.array(["a", None, "a longer text"], pa.string_view())})
    _, old = messages([batch], OPTIONS["version 4"])
    assert note_missed(old.header, 7) == old.header  # libarrow cannot read metadata of batches of this version
    for options in (OPTIONS["plain"], OPTIONS["compressed"]):
        schema, message = messages([batch], options, metadata)
        noted = note_missed(message.header, 7)
        for header, expected in ((noted, b"7"), (take_missed(noted)[0], None)):
            stream = encapsulate(schema.header) + encapsulate(header) + b"".join(map(bytes, message.body or ()))
            read, kept = pa.ipc.open_stream(stream + END_OF_STREAM).read_next_batch_with_custom_metadata()
            others = {**(metadata or {})}
            others.pop(b"dissociated.missed", None)
            assert read.equals(batch)
            assert dict(kept or {}) == (others if expected is None else {**others, b"dissociated.missed": expected})
        assert take_missed(noted)[1] == 7
        assert take_missed(message.header) == (message.header, None)


def project(whole: list[SplitMessage], indices: list[int]) -> bytes:
    """Return the projected stream as bytes, assembled from the result of the projection."""
    projection = Projection(whole[0].header, indices)
    stream = encapsulate(projection.header)
    for message in whole[1:]:
        chosen = projection.project(message.header, message.parsed)
        if chosen is not None:
            assert message.body is not None
            body = b"".join(map(bytes, message.body))
            pieces = [bytes(padding) + body[begin:end] for padding, begin, end in chosen.cuts]
            packed = b"".join(pieces) + bytes(chosen.padding)
            assert len(packed) == chosen.parsed.body_length
            stream += encapsulate(chosen.header) + packed
    return stream + END_OF_STREAM


@pytest.mark.parametrize("options", OPTIONS)
def test_every_type(options: str) -> None:
    for kind, arrays in ARRAYS.items():
        with case(kind):
            check_columns_beside_others(arrays, options)


def check_columns_beside_others(arrays: list[pa.Array], options: str) -> None:
    numbers = pa.array(range(ROWS))
    whole = pa.record_batch([numbers, *arrays, numbers], ["first", *"ab"[: len(arrays)], "last"])
    last = len(whole.schema) - 1
    sent = [whole, whole.slice(0, 0), whole.slice(5, 9)]
    # libarrow takes metadata of a batch in version 4 for an unknown compression.
    metadata = None if options == "version 4" else METADATA
    split = messages(sent, OPTIONS[options], metadata)
    batch_headers = [one.header for one in split if one.parsed.type is HeaderType.RECORD_BATCH]
    assert batch_headers
    assert all(len(note_missed(header, 10**19)) <= len(header) + MAX_NOTE_SIZE for header in batch_headers)
    for indices in ([1], [0], [last], [0, last], [1, last], []):
        reader = pa.ipc.open_stream(project(split, indices))
        for batch in sent:
            got, found = reader.read_next_batch_with_custom_metadata()
            got.validate(full=True)
            assert got.equals(batch.select(indices), check_metadata=True)
            assert got.num_rows == batch.num_rows
            assert found == metadata


def test_dictionaries_that_nobody_needs_are_left_out_and_others_keep_their_ids() -> None:
    words = [pa.array(["x", "y", "x"]).dictionary_encode() for _ in range(3)]
    nested = pa.StructArray.from_arrays([words[2]], ["inner"])
    whole = messages([pa.record_batch([words[0], words[1], nested], ["a", "b", "c"])], None)
    ids = [dictionary_of(m.header)[0] for m in whole if m.parsed.type is HeaderType.DICTIONARY_BATCH]
    for index in range(3):
        projection = Projection(whole[0].header, [index])
        kept = [m for m in whole[1:] if projection.project(m.header, m.parsed) is not None]
        assert [dictionary_of(m.header)[0] for m in kept[:-1]] == [ids[index]]


def test_buffers_stay_as_aligned_as_they_were_and_neighbours_in_one_piece() -> None:
    batch = pa.record_batch({name: pa.array([1, None, 3]) for name in "abcd"})
    whole = messages([batch], None)
    found = Projection(whole[0].header, [0, 1, 3]).project(whole[1].header, whole[1].parsed)
    assert found is not None
    assert [(cut.begin, cut.end) for cut in found.cuts] == [(0, 64), (96, 128)]  # validity of 8 bytes, values of 24
    assert found.indices == [0, 1, 2, 3, 6, 7]
    assert found.parsed.body_length == 96


def test_a_batch_that_does_not_fit_the_schema_is_refused() -> None:
    one = messages([pa.record_batch({"a": [1]})], None)
    two = messages([pa.record_batch({"a": [1], "b": [1]})], None)
    with pytest.raises(FormatError, match="buffers that its schema does not explain"):
        Projection(two[0].header, [0]).project(one[1].header, one[1].parsed)
    with pytest.raises(FormatError, match="message is among the record batches"):
        Projection(two[0].header, [0]).project(two[0].header, two[0].parsed)


def test_damaged_metadata_is_refused_or_projected() -> None:
    """Raise only the documented exception for any content."""
    words = pa.array(["x", "y"]).dictionary_encode()
    whole = messages([pa.record_batch([words, [[1], None], ["a", None]], ["a", "b", "c"])], OPTIONS["compressed"])
    for seed in range(300):
        dice = random.Random(seed)
        headers = [bytearray(m.header) for m in whole]
        damaged = dice.choice(headers)
        for _ in range(dice.randint(1, 4)):
            damaged[dice.randrange(len(damaged))] = dice.choice([0, 1, 4, 127, 255])
        with case(f"seed {seed}"), suppress(FormatError):
            projection = Projection(bytes(headers[0]), [1, 2])
            for header, message in zip(headers[1:], whole[1:], strict=True):
                chosen = projection.project(bytes(header), message.parsed)
                assert chosen is None or parse_header(chosen.header)
