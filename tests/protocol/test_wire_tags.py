import pytest
from hypothesis import given
from hypothesis import strategies as st

from dissociated.errors import RemoteProtocolError
from dissociated.protocol.wire import RESERVED_MASK, SEQUENCE_MASK, BodyKind, body_tag, parse_body_tag, unwrap
from support.helpers import case

uint32 = st.integers(0, 2**32 - 1)
uint64 = st.integers(0, 2**64 - 1)
counts = st.integers(0, 2**40)
HALF = 2**31

GOLDEN = [
    (BodyKind.PACKED, 0, 0x0000_0000_0000_0000),
    (BodyKind.PACKED, 1, 0x0000_0000_0000_0001),
    (BodyKind.PACKED, 0xFFFFFFFF, 0x0000_0000_FFFF_FFFF),
    (BodyKind.ADDRESSES, 0, 0x0100_0000_0000_0000),
    (BodyKind.ADDRESSES, 0x12345678, 0x0100_0000_1234_5678),
    (BodyKind.ADDRESSES, 0xFFFFFFFF, 0x0100_0000_FFFF_FFFF),
]


@pytest.mark.parametrize(("kind", "sequence", "tag"), GOLDEN)
def test_tag_holds_the_sequence_number_below_and_the_kind_in_the_most_significant_byte(kind, sequence, tag):
    assert body_tag(kind, sequence) == tag
    assert parse_body_tag(tag) == (kind, sequence)


def test_kind_is_byte_7_of_the_little_endian_tag_and_the_sequence_number_bytes_0_to_3():
    assert body_tag(BodyKind.ADDRESSES, 0x04030201).to_bytes(8, "little") == bytes([1, 2, 3, 4, 0, 0, 0, 1])


def test_masks_are_those_of_the_specification():
    assert SEQUENCE_MASK == 0x00000000FFFFFFFF
    assert RESERVED_MASK == 0x00FFFFFF00000000


@pytest.mark.parametrize(("sequence", "tag"), [(2**32, 0), (2**32 + 7, 7), (5 * 2**32 - 1, 0xFFFFFFFF)])
def test_sequence_numbers_roll_over_in_the_tag_without_touching_its_other_bits(sequence, tag):
    assert body_tag(BodyKind.PACKED, sequence) == tag


@pytest.mark.parametrize("kind", [0, 1])
def test_each_reserved_bit_is_refused(kind):
    for bit in range(32, 56):
        with case(bit), pytest.raises(RemoteProtocolError, match="reserved bits"):
            parse_body_tag(kind << 56 | 1 << bit | 3)


def test_a_kind_shifted_by_55_as_in_the_diagram_is_refused():
    with pytest.raises(RemoteProtocolError, match="reserved bits"):
        parse_body_tag(1 << 55)


@pytest.mark.parametrize("kind", [2, 3, 0x80, 0xFF])
def test_an_unknown_kind_is_refused_by_number(kind):
    with pytest.raises(RemoteProtocolError, match=f"unknown kind {kind} "):
        parse_body_tag(kind << 56 | 9)


@given(st.sampled_from(BodyKind), uint32)
def test_round_trip(kind, sequence):
    assert parse_body_tag(body_tag(kind, sequence)) == (kind, sequence)


@given(uint64)
def test_any_tag_is_understood_in_full_or_refused(tag):
    try:
        kind, sequence = parse_body_tag(tag)
    except RemoteProtocolError:
        assert tag & 0xFEFF_FFFF_0000_0000
    else:
        assert (kind << 56) + sequence == tag


@pytest.mark.parametrize(
    ("sequence", "near", "count"),
    [
        (0, 0, 0),
        (5, 0, 5),
        (5, 9, 5),
        (0, 2**32 - 1, 2**32),
        (2, 2**32 - 3, 2**32 + 2),
        (0xFFFFFFFF, 2**32, 2**32 - 1),
        (0xFFFFFFFF, 2**33 + 5, 2**33 - 1),
        (7, 3 * 2**32, 3 * 2**32 + 7),
    ],
)
def test_the_count_that_is_meant_is_the_nearest_one(sequence, near, count):
    assert unwrap(sequence, near) == count


def test_a_number_from_before_the_start_is_negative():
    assert unwrap(0xFFFFFFFF, 0) == -1


def test_half_of_all_numbers_lie_ahead_and_half_behind():
    assert unwrap(HALF - 1, 0) == HALF - 1
    assert unwrap(HALF, 0) == -HALF


@given(counts, st.integers(-HALF, HALF - 1))
def test_every_count_within_2_to_the_31_survives_the_wire(near, distance):
    count = near + distance
    assert unwrap(count % 2**32, near) == count
