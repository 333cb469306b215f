"""A message has exactly the buffers that its schema requires. libarrow would read other buffers of a longer list."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from contextlib import nullcontext

import pyarrow as pa
import pytest

from dissociated.codec.join import join
from dissociated.errors import RemoteProtocolError
from dissociated.format.flatbuffer import Builder
from dissociated.format.layout import SchemaLayout, layout_of
from dissociated.format.message import HeaderType, buffer_extents, parse_header, relocate
from dissociated.format.record_batch import encode_record_batch
from dissociated.protocol.message import Run
from dissociated.protocol.receiver import Receiver
from protocol.wire import Encoded, encode, metadata, tag
from support import arrow_cases
from support.helpers import case


def with_buffers(count: int, body: bytes) -> bytes:
    """Return a record batch of one row with one node and `count` buffers, each 8 bytes of `body`."""
    builder = Builder()
    _, _, header, _ = builder.table(0, [("h", 4), ("B", 3), ("I", 0), ("q", len(body))])
    _, nodes, buffers = builder.table(header, [("q", 1), ("I", 0), ("I", 0)])
    builder.vector(nodes, 1, struct.pack("<qq", 1, 0))
    extents = [(0, 0), *((8 * index, 8) for index in range(count - 1))]
    builder.vector(buffers, count, b"".join(struct.pack("<qq", *extent) for extent in extents))
    return builder.finish()


def reading(schema: bytes) -> Receiver:
    receiving = Receiver()
    receiving.want()
    receiving.receive_metadata(metadata(0, schema))
    assert receiving.next() is not None
    return receiving


def test_every_type_has_as_many_buffers_as_its_schema_says() -> None:
    for name, arrays in arrow_cases.ARRAYS.items():
        messages = encode(*arrow_cases.batches(arrays))
        layout = SchemaLayout(messages[0].header)
        for message in messages[1:]:
            parsed = parse_header(message.header)
            assert layout.buffers_of(message.header, parsed) == parsed.buffer_count, name


def test_what_is_shorter_than_its_rows_need_is_refused_as_libarrow_does() -> None:
    """Shorten each buffer of every type by a byte. Unlike libarrow, the layout does not compare data with offsets."""
    refused = 0
    for name, arrays in arrow_cases.ARRAYS.items():
        messages = encode(*arrow_cases.batches(arrays))
        layout = SchemaLayout(messages[0].header)
        for number, (header, body) in enumerate(messages[1:], 1):
            parsed = parse_header(header)
            layout.check_sizes(header, parsed)
            offsets, lengths = buffer_extents(header, parsed)
            for index in (index for index, length in enumerate(lengths) if length):
                shorter = [length - (index == other) for other, length in enumerate(lengths)]
                damaged = relocate(header, parsed, offsets, parsed.body_length, shorter)
                stream = Encoded(damaged, body)
                why = refusal([*messages[:number], stream, *messages[number + 1 :]])
                if why and "Length spanned by binary offsets" not in why:
                    with case((name, index)), pytest.raises(RemoteProtocolError, match="which need"):
                        layout.check_sizes(damaged, parsed)
                    refused += 1
                else:
                    layout.check_sizes(damaged, parsed)
    assert refused > 500


def refusal(messages: Sequence[Encoded]) -> str:
    """Return libarrow's complaint about the sizes in a stream."""
    reader = join((header, body) for header, body in messages)
    try:
        for batch in reader:
            batch.validate()
    except pa.ArrowException as error:
        return str(error)
    return ""


def test_rows_that_cannot_be_are_refused() -> None:
    schema, batch = encode(pa.record_batch({"n": range(8), "s": [{"a": 1}] * 8, "f": fixed_size_lists()}))
    layout, parsed = SchemaLayout(schema.header), parse_header(batch.header)
    offsets, lengths = buffer_extents(batch.header, parsed)
    buffers = [*zip(offsets, lengths, strict=True)]
    good = [(8, 0), (8, 0), (8, 0), (8, 0), (16, 0)]
    for rows, index, node, match in (
        (8, 0, (8, 0), None),
        (-1, 0, (8, 0), "-1 rows"),
        (9, 0, (8, 0), "8 values; at least 9"),
        (8, 0, (-8, 0), "-8 values"),
        (8, 0, (9, 0), "64 bytes for 9 values"),
        (8, 0, (8, 1), "0 bytes for 8 values"),
        (8, 2, (7, 0), "7 values; at least 8"),
        (8, 4, (15, 0), "15 values; at least 16"),
    ):
        nodes = [node if index == other else one for other, one in enumerate(good)]
        header = encode_record_batch(rows, nodes, buffers, (), parsed.body_length)
        with case(match), nullcontext() if match is None else pytest.raises(RemoteProtocolError, match=match):
            layout.check_sizes(header, parse_header(header))
    header = encode_record_batch(8, good[:-1], buffers, (), parsed.body_length)
    with pytest.raises(RemoteProtocolError, match="does not match its schema"):
        layout.check_sizes(header, parse_header(header))


def fixed_size_lists() -> pa.Array:
    return pa.array([[1, 2]] * 8, pa.list_(pa.int32(), 2))


def test_a_message_with_the_buffers_of_earlier_ones_is_refused() -> None:
    # The C++ example sends this, unmodified, for the third batch: the buffers of the first batch come first.
    (schema, _) = encode(pa.record_batch({"n": [1]}))
    for count in (1, 3, 4, 6):
        body = struct.pack(f"<{count - 1}q", *range(count - 1))
        receiving = reading(schema.header)
        receiving.receive_metadata(metadata(1, with_buffers(2, bytes(8))))
        receiving.receive_body(tag(1), bytes(8))
        assert receiving.next() is not None
        receiving.receive_metadata(metadata(2, with_buffers(count, body)))
        receiving.receive_body(tag(2), body)
        with pytest.raises(RemoteProtocolError, match=f"message 2 has {count} buffers; its schema needs 2"):
            receiving.next()


def test_a_run_of_such_messages_is_refused() -> None:
    (schema, _) = encode(pa.record_batch({"n": [1]}))
    headers = [metadata(number, with_buffers(4, bytes(24))) for number in range(1, 21)]
    tags = b"".join(tag(number).to_bytes(8, "little") for number in range(1, 21))
    run = Run(20, memoryview(b"".join(headers)), len(headers[0]), memoryview(tags), memoryview(bytes(480)), 24)
    receiving = reading(schema.header)
    receiving.receive(run)
    with pytest.raises(RemoteProtocolError, match="message 1 has 4 buffers; its schema needs 2"):
        receiving.next_together()


def test_a_dictionary_with_other_buffers_is_refused() -> None:
    schema, dictionary, _ = encode(pa.record_batch({"d": pa.array(["x"]).dictionary_encode()}))
    _, other, _ = encode(pa.record_batch({"d": pa.array([1]).dictionary_encode()}))
    receiving = reading(schema.header)
    receiving.receive_metadata(metadata(1, other.header))
    receiving.receive_body(tag(1), other.body)
    with pytest.raises(RemoteProtocolError, match="message 1 has 2 buffers; its schema needs 3"):
        receiving.next()
    assert parse_header(dictionary.header).type is HeaderType.DICTIONARY_BATCH


def test_a_schema_that_leads_in_circles_ends() -> None:
    deep = pa.struct([("a", pa.int8()), ("b", pa.int8())])
    header = bytearray(encode(pa.record_batch({"s": pa.array([{"a": 1, "b": 2}], deep)}))[0].header)
    circular = 0
    for at in range(0, len(header) - 4, 4):  # Let each offset in turn lead back to an earlier place.
        changed = bytearray(header)
        for back in range(4, at, 4):
            struct.pack_into("<I", changed, at, (at - back) & 0xFFFFFFFF)
            circular += layout_of(bytes(changed)) is None
    assert circular  # and each of them was parsed to an end
