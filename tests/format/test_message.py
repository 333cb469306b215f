"""Parsed flatbuffers that libarrow wrote. Each position is compared with libarrow's result."""

from __future__ import annotations

from itertools import product

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dissociated.errors import RemoteProtocolError
from dissociated.format.message import Header, HeaderType, buffer_extents, parse_header, relocate
from protocol.wire import BY_HAND, Encoded, decode, encode, encode_tensor, golden_tensor, patched
from support.helpers import case

BATCH = pa.record_batch(
    {
        "i": pa.array([1, None, 3], pa.int32()),
        "s": pa.array(["a", "bcd", None]),
        "l": pa.array([[1, 2], None, []], pa.list_(pa.int16())),
        "b": pa.array([b"12", b"34", None], pa.binary(2)),
        "t": pa.array([{"x": 1.5}, None, {"x": None}], pa.struct({"x": pa.float64()})),
        "f": pa.array([True, False, None]),
        "v": pa.array(["a string beyond twelve bytes", "short", None], pa.string_view()),
    }
)
DICTIONARY = pa.record_batch({"d": pa.array(["x", "yy", "x"]).dictionary_encode()})
EMPTY = pa.record_batch({"i": pa.array([], pa.int32())})
TENSOR = pa.Tensor.from_numpy(np.arange(12.0).reshape(3, 4))

SCHEMA_MESSAGE, BATCH_MESSAGE = encode(BATCH)
_, DICTIONARY_MESSAGE, INDICES_MESSAGE = encode(DICTIONARY)
_, EMPTY_MESSAGE = encode(EMPTY)
_, ANNOTATED_MESSAGE = encode(BATCH, custom_metadata={"key": "value"})
TENSOR_MESSAGE = encode_tensor(TENSOR)

CORPUS = {
    "schema": SCHEMA_MESSAGE,
    "record batch": BATCH_MESSAGE,
    "dictionary batch": DICTIONARY_MESSAGE,
    "indices": INDICES_MESSAGE,
    "empty batch": EMPTY_MESSAGE,
    "custom metadata": ANNOTATED_MESSAGE,
    "tensor": TENSOR_MESSAGE,
    **{f"sparse {kind}": golden_tensor(f"{kind}_int32") for kind in ("coo", "csr", "csc", "csf")},
}


def slices(message: Encoded) -> list[bytes]:
    """Return the buffers of a message, cut from its packed body."""
    offsets, lengths = buffer_extents(message.header, parse_header(message.header))
    body = message.body or b""
    return [body[offset : offset + length] for offset, length in zip(offsets, lengths, strict=True)]


class TestParse:
    def test_by_hand(self):
        parsed = parse_header(BY_HAND)
        assert parsed == Header(HeaderType.RECORD_BATCH, 100, 28, 58, 2)
        assert buffer_extents(BY_HAND, parsed) == ((0, 32), (30, 68))

    @pytest.mark.parametrize(
        ("name", "type_", "has_body"),
        [
            ("schema", HeaderType.SCHEMA, False),
            ("record batch", HeaderType.RECORD_BATCH, True),
            ("dictionary batch", HeaderType.DICTIONARY_BATCH, True),
            ("indices", HeaderType.RECORD_BATCH, True),
            ("empty batch", HeaderType.RECORD_BATCH, True),
            ("tensor", HeaderType.TENSOR, True),
            ("sparse csf", HeaderType.SPARSE_TENSOR, True),
        ],
    )
    def test_the_type_tells_whether_a_body_follows(self, name, type_, has_body):
        parsed = parse_header(CORPUS[name].header)
        assert parsed.type is type_
        assert parsed.has_body is has_body

    def test_the_body_is_as_long_as_libarrow_made_it(self):
        for name, message in CORPUS.items():
            assert parse_header(message.header).body_length == len(message.body or b""), name

    @pytest.mark.parametrize(
        ("name", "extents"),
        [
            ("dictionary batch", [(0, 0), (0, 12), (16, 3)]),  # validity; offsets 0, 1, 3; "xyy"
            ("indices", [(0, 0), (0, 12)]),  # validity; int32 0, 1, 0
            ("empty batch", [(0, 0), (0, 0)]),
            ("tensor", [(0, 96)]),
            # libarrow rounds these lengths up to 8: 5 x 3 coordinates, 5 values.
            ("sparse coo", [(0, 64), (64, 40)]),
            ("sparse csr", [(0, 24), (24, 24), (48, 40)]),  # 5 begins, 5 columns
            ("sparse csc", [(0, 32), (32, 24), (56, 40)]),  # 7 begins, 5 rows
            # libarrow gives these lengths in elements: 3 and 5 begins; 2, 4 and 5 indices.
            ("sparse csf", [(0, 12), (16, 20), (40, 8), (48, 16), (64, 20), (88, 40)]),
        ],
    )
    def test_buffers_lie_where_the_columnar_format_puts_them(self, name, extents):
        header = CORPUS[name].header
        offsets, lengths = buffer_extents(header, parse_header(header))
        assert list(zip(offsets, lengths, strict=True)) == extents

    @pytest.mark.parametrize("message", [BATCH_MESSAGE, ANNOTATED_MESSAGE], ids=["plain", "annotated"])
    def test_buffers_hold_the_bytes_that_libarrow_holds(self, message):
        arrays = [buffer for column in BATCH.columns for buffer in column.buffers()]
        found = slices(message)
        assert len(found) == len(arrays)
        for content, array in zip(found, arrays, strict=True):
            assert content == (array.to_pybytes()[: len(content)] if array else b"")
        assert slices(TENSOR_MESSAGE) == [np.arange(12.0).tobytes()]

    def test_compressed_batches_keep_their_buffer_table(self):
        sink = pa.BufferOutputStream()
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        batch = pa.record_batch({"i": pa.array([7] * 10_000)})
        with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
            writer.write_batch(batch)
        reader = pa.BufferReader(sink.getvalue())
        pa.ipc.read_message(reader)
        message = pa.ipc.read_message(reader)
        header = message.metadata.to_pybytes()
        parsed = parse_header(header)
        (_, offset), (_, length) = buffer_extents(header, parsed)
        assert parsed.body_length == message.body.size < 10_000
        # A compressed buffer begins with its uncompressed length.
        assert message.body.to_pybytes()[offset : offset + 8] == (80_000).to_bytes(8, "little")
        assert offset + length <= message.body.size

    @pytest.mark.parametrize("shift", [1, 5])
    def test_alignment_and_padding_do_not_matter(self, shift):
        for name, (header, *_) in CORPUS.items():
            unaligned = memoryview(bytes(shift) + header)[shift:]
            assert parse_header(unaligned) == parse_header(header), name
            assert parse_header(header + b"\0\0\0") == parse_header(header), name


class TestRefusal:
    @pytest.mark.parametrize(
        ("header", "reason"),
        [
            pytest.param(b"", "not an Arrow IPC message", id="nothing"),
            pytest.param(bytes(4), "unknown type 0", id="zeros"),
            pytest.param(patched(0, "ffffffff"), "not an Arrow IPC message", id="root outside"),
            pytest.param(patched(16, "11000000"), "not an Arrow IPC message", id="vtable before the message"),
            # -86 is the position of the vtable relative to the end of the message.
            pytest.param(patched(16, "66000000"), "not an Arrow IPC message", id="vtable from the end"),
            pytest.param(patched(16, "00000080"), "not an Arrow IPC message", id="vtable after the message"),
            pytest.param(patched(20, "00"), "unknown type 0", id="type none"),
            pytest.param(patched(20, "06"), "unknown type 6", id="type 6"),
            pytest.param(patched(20, "ff"), "unknown type 255", id="type 255"),
            pytest.param(patched(10, "0000"), "unknown type 0", id="no type"),
            pytest.param(patched(12, "0000"), "unknown type 3", id="no header table"),
            pytest.param(patched(28, "ff" * 8), "body of -1 bytes", id="negative body"),
            pytest.param(patched(54, "03000000"), "3 buffers lie outside", id="one buffer too many"),
            pytest.param(patched(54, "ffffffff"), "buffers lie outside", id="2^32 - 1 buffers"),
            pytest.param(patched(50, "ff000000"), "not an Arrow IPC message", id="vector outside"),
            pytest.param(patched(20, "01"), "100 bytes for a schema", id="schema with a body"),
            pytest.param(patched(20, "02"), "dictionary batch without data", id="dictionary without data"),
            pytest.param(patched(20, "04"), "1 buffers lie outside", id="tensor without data"),
            pytest.param(patched(20, "05"), "sparse tensor that cannot be read", id="sparse tensor of nothing"),
        ],
    )
    def test_an_invalid_message_is_refused_with_the_reason(self, header, reason):
        with pytest.raises(RemoteProtocolError, match=reason):
            parse_header(header)

    def test_the_end_of_the_buffer_table_may_be_the_end_of_the_message_but_not_beyond(self):
        assert parse_header(BY_HAND).buffer_count == 2
        with pytest.raises(RemoteProtocolError):
            parse_header(BY_HAND[:-1])


def survives(header: bytes) -> None:
    """Check the only guarantee for arbitrary bytes: they are refused with RemoteProtocolError, or are safe to use."""
    try:
        parsed = parse_header(header)
        offsets, lengths = buffer_extents(header, parsed)
        assert len(offsets) == len(lengths) == parsed.buffer_count
        if parsed.sparse_extents is not None:
            return
        moved = relocate(header, parsed, offsets, 4096)
    except RemoteProtocolError:
        return
    assert len(moved) == len(header)


class TestFuzz:
    EXTREMES = [
        b"\x00",
        b"\xff",
        b"\x80",
        b"\x00\x00\x00\x00",
        b"\xff\xff\xff\x7f",
        b"\x00\x00\x00\x80",
        b"\xff\xff\xff\xff",
        b"\xff\xff\xff\xff\xff\xff\xff\x7f",
        b"\x00\x00\x00\x00\x00\x00\x00\x80",
    ]

    def test_every_truncation(self):
        for name, message in CORPUS.items():
            for size in range(len(message.header)):
                with case((name, size)):
                    survives(message.header[:size])

    def test_every_extreme_at_every_position(self):
        for (name, (header, *_)), extreme in product(CORPUS.items(), self.EXTREMES):
            for at in range(len(header) - len(extreme) + 1):
                with case((name, extreme, at)):
                    survives(header[:at] + extreme + header[at + len(extreme) :])

    @given(st.data())
    def test_several_mutations_at_once(self, data):
        header = bytearray(data.draw(st.sampled_from([message.header for message in CORPUS.values()])))
        positions = st.integers(0, len(header) - 1)
        for at, value in data.draw(st.lists(st.tuples(positions, st.integers(0, 255)), min_size=1)):
            header[at] = value
        survives(bytes(header[: data.draw(st.integers(0, len(header)) | st.just(len(header)))]))

    @given(st.binary(max_size=256))
    def test_any_bytes(self, header):
        survives(header)


class TestRelocate:
    """Bodies by reference, whose buffers lie anywhere in a region: libarrow decodes them in place."""

    @staticmethod
    def scattered(message: Encoded, gap: int) -> tuple[bytes, bytes]:
        """Return the header and the body of `message` with its buffers in reverse order, `gap` bytes apart."""
        region, offsets = bytearray(b"\xee" * gap), []
        for content in reversed(slices(message)):
            offsets.append(len(region) if content else 0)
            region += content + b"\xee" * (-len(content) % 8 + gap)
        header = relocate(message.header, parse_header(message.header), offsets[::-1], len(region))
        return header, bytes(region)

    @pytest.mark.parametrize("gap", [0, 8, 4096])
    @pytest.mark.parametrize("message", [BATCH_MESSAGE, ANNOTATED_MESSAGE], ids=["plain", "annotated"])
    def test_libarrow_decodes_a_batch_from_a_larger_region(self, message, gap):
        decoded = pa.ipc.read_record_batch(decode(*self.scattered(message, gap)), BATCH.schema)
        decoded.validate(full=True)
        assert decoded.equals(BATCH)

    def test_libarrow_decodes_dictionaries_from_larger_regions(self):
        schema, *messages = encode(DICTIONARY)
        stream = b""
        for header, body in [schema, *(self.scattered(message, 64) for message in messages)]:
            padded = header + bytes(-len(header) % 8)
            stream += b"\xff\xff\xff\xff" + len(padded).to_bytes(4, "little") + padded + (body or b"")
        assert pa.ipc.open_stream(stream).read_all().to_batches() == [DICTIONARY]

    def test_libarrow_reads_a_tensor_from_the_start_of_its_body_whatever_its_offset(self):
        # For this reason a tensor by reference is cut out of its region. If this fails, relocate it like a batch.
        header, region = self.scattered(TENSOR_MESSAGE, 64)
        read = pa.ipc.read_tensor(pa.BufferReader(decode(header, region).serialize()))
        assert read.to_numpy().tobytes() == region[:96]
        cut = decode(TENSOR_MESSAGE.header, region[64:160])
        assert pa.ipc.read_tensor(pa.BufferReader(cut.serialize())).equals(TENSOR)

    def test_only_the_offsets_and_the_body_length_change(self):
        moved = relocate(BY_HAND, parse_header(BY_HAND), [0x1000, 0x2000], 0x10000)
        assert moved == (
            BY_HAND[:28]
            + bytes.fromhex("0000010000000000")
            + BY_HAND[36:58]
            + bytes.fromhex("0010000000000000 1e00000000000000 0020000000000000 4400000000000000")
        )

    def test_an_empty_batch_has_nothing_to_relocate(self):
        parsed = parse_header(EMPTY_MESSAGE.header)
        assert relocate(EMPTY_MESSAGE.header, parsed, [0, 0], 4096) == EMPTY_MESSAGE.header
        decoded = pa.ipc.read_record_batch(decode(EMPTY_MESSAGE.header, b""), EMPTY.schema)
        assert decoded.equals(EMPTY)

    def test_buffers_without_an_announced_body_are_refused(self):
        header = patched(14, "0000")
        with pytest.raises(RemoteProtocolError, match="announced no body"):
            relocate(header, parse_header(header), [0, 0], 4096)

    @given(st.lists(st.integers(0, 2**63 - 1), min_size=2, max_size=2), st.integers(0, 2**63 - 1))
    def test_offsets_and_body_length_read_back(self, offsets, body_length):
        moved = relocate(BY_HAND, parse_header(BY_HAND), offsets, body_length)
        parsed = parse_header(moved)
        assert parsed.body_length == body_length
        assert buffer_extents(moved, parsed) == (tuple(offsets), (30, 68))
