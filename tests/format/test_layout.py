"""Messages have the buffers that their schema needs, and no others: libarrow would read the first of more."""

from __future__ import annotations

import struct

import pyarrow as pa
import pytest

import arrow_cases
from dissociated.errors import RemoteProtocolError
from dissociated.format.flatbuffer import Builder
from dissociated.format.layout import SchemaLayout, layout_of
from dissociated.format.message import HeaderType, parse_header
from dissociated.protocol.message import Run
from dissociated.protocol.receiver import Receiver
from protocol.wire import encode, metadata, tag


def with_buffers(count: int, body: bytes) -> bytes:
    """A record batch of one row with one node and so many buffers, all of them 8 bytes of `body`."""
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


def test_a_message_with_the_buffers_of_earlier_ones_is_refused() -> None:
    # What the C++ example sends, unmodified, for the third batch: the buffers of the first come first.
    (schema, _) = encode(pa.record_batch({"n": [1]}))
    for count in (1, 3, 4, 6):
        body = struct.pack(f"<{count - 1}q", *range(count - 1))
        receiving = reading(schema.header)
        receiving.receive_metadata(metadata(1, with_buffers(2, bytes(8))))
        receiving.receive_body(tag(1), bytes(8))
        assert receiving.next() is not None
        receiving.receive_metadata(metadata(2, with_buffers(count, body)))
        receiving.receive_body(tag(2), body)
        with pytest.raises(RemoteProtocolError, match=f"message 2 has {count} buffers; by the schema it has 2"):
            receiving.next()


def test_a_run_of_such_messages_is_refused() -> None:
    (schema, _) = encode(pa.record_batch({"n": [1]}))
    headers = [metadata(number, with_buffers(4, bytes(24))) for number in range(1, 21)]
    tags = b"".join(tag(number).to_bytes(8, "little") for number in range(1, 21))
    run = Run(20, memoryview(b"".join(headers)), len(headers[0]), memoryview(tags), memoryview(bytes(480)), 24)
    receiving = reading(schema.header)
    receiving.receive(run)
    with pytest.raises(RemoteProtocolError, match="message 1 has 4 buffers; by the schema it has 2"):
        receiving.next_together()


def test_a_dictionary_with_other_buffers_is_refused() -> None:
    schema, dictionary, _ = encode(pa.record_batch({"d": pa.array(["x"]).dictionary_encode()}))
    _, other, _ = encode(pa.record_batch({"d": pa.array([1]).dictionary_encode()}))
    receiving = reading(schema.header)
    receiving.receive_metadata(metadata(1, other.header))
    receiving.receive_body(tag(1), other.body)
    with pytest.raises(RemoteProtocolError, match="message 1 has 2 buffers; by the schema it has 3"):
        receiving.next()
    assert parse_header(dictionary.header).type is HeaderType.DICTIONARY_BATCH


def test_a_schema_that_leads_in_circles_ends() -> None:
    deep = pa.struct([("a", pa.int8()), ("b", pa.int8())])
    header = bytearray(encode(pa.record_batch({"s": pa.array([{"a": 1, "b": 2}], deep)}))[0].header)
    circular = 0
    for at in range(0, len(header) - 4, 4):  # each offset in turn leads back to where it stands in the message
        changed = bytearray(header)
        for back in range(4, at, 4):
            struct.pack_into("<I", changed, at, (at - back) & 0xFFFFFFFF)
            circular += layout_of(bytes(changed)) is None
    assert circular  # and every one of them came to an end
