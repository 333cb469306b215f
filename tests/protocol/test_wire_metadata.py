import pytest
from hypothesis import given
from hypothesis import strategies as st

from dissociated.errors import RemoteProtocolError
from dissociated.protocol.wire import (
    PREFIX_SIZE,
    MetadataKind,
    encode_end_of_stream,
    encode_prefix,
    parse_metadata,
)

uint32 = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize(
    ("sequence", "prefix"),
    [
        (0, "01 00000000"),
        (1, "01 01000000"),
        (0x04030201, "01 01020304"),
        (0xFFFFFFFF, "01 ffffffff"),
        (2**32, "01 00000000"),
        (2**32 + 258, "01 02010000"),
    ],
)
def test_prefix_is_one_and_the_sequence_number_in_little_endian(sequence, prefix):
    assert encode_prefix(sequence) == bytes.fromhex(prefix)


@pytest.mark.parametrize(
    ("count", "message"),
    [(1, "00 01000000"), (0x04030201, "00 01020304"), (2**32 - 1, "00 ffffffff"), (2**32, "00 00000000")],
)
def test_end_of_stream_is_five_bytes_with_the_next_sequence_number(count, message):
    assert encode_end_of_stream(count) == bytes.fromhex(message)
    assert parse_metadata(bytes.fromhex(message)) == (MetadataKind.END_OF_STREAM, count % 2**32, b"")


def test_the_flatbuffer_is_everything_after_five_bytes_and_need_not_be_padded():
    assert PREFIX_SIZE == 5
    message = bytes.fromhex("01 07000000") + b"odd"
    assert parse_metadata(message) == (MetadataKind.MESSAGE, 7, b"odd")


@pytest.mark.parametrize("size", range(5))
@pytest.mark.parametrize("kind", [0, 1])
def test_a_message_shorter_than_its_prefix_is_refused(size, kind):
    with pytest.raises(RemoteProtocolError, match=f"of {size} bytes"):
        parse_metadata(bytes([kind, 0, 0, 0, 0])[:size])


@pytest.mark.parametrize("extra", [b"\0", b"\0\0\0", b"flatbuffer"])
def test_an_end_of_stream_of_more_than_five_bytes_is_refused(extra):
    with pytest.raises(RemoteProtocolError, match="instead of exactly 5"):
        parse_metadata(bytes.fromhex("00 01000000") + extra)


@pytest.mark.parametrize("kind", [2, 3, 0x7F, 0xFF])
def test_an_unknown_kind_is_refused_by_number(kind):
    with pytest.raises(RemoteProtocolError, match=f"unknown kind {kind}"):
        parse_metadata(bytes([kind, 0, 0, 0, 0]))


@given(uint32, st.binary())
def test_round_trip(sequence, header):
    assert parse_metadata(encode_prefix(sequence) + header) == (MetadataKind.MESSAGE, sequence, header)
    assert parse_metadata(encode_end_of_stream(sequence)) == (MetadataKind.END_OF_STREAM, sequence, b"")


@given(st.binary() | st.tuples(st.integers(0, 3), st.binary()).map(lambda t: bytes([t[0]]) + t[1]))
def test_any_bytes_are_understood_in_full_or_refused(message):
    try:
        kind, sequence, header = parse_metadata(message)
    except RemoteProtocolError:
        return
    assert bytes([kind]) + sequence.to_bytes(4, "little") + header == message
