import pytest
from hypothesis import given
from hypothesis import strategies as st

from dissociated.errors import LocalProtocolError, RemoteProtocolError
from dissociated.protocol.wire import (
    AddressList,
    encode_addresses,
    encode_free,
    parse_addresses,
    parse_free,
)

from .wire import uint64s

uint64 = st.integers(0, 2**64 - 1)
buffers = st.tuples(uint64, st.integers(1, 2**56)) | st.just((0, 0))
#: Lists of uint64 that look like address lists, so that random cases pass the size check.
plausible_lists = st.lists(st.integers(0, 3) | uint64, max_size=12).map(lambda numbers: uint64s(*numbers))

TWO_BUFFERS_AND_AN_ABSENT_ONE = bytes.fromhex(
    "0d00000000000000 0300000000000000"  # 13 bytes in 3 buffers
    "0010000000000000 0500000000000000"
    "0000000000000000 0000000000000000"
    "8877665544332211 0800000000000000"
)


class TestAddressList:
    def test_it_is_two_totals_and_a_pair_for_each_buffer(self):
        extents = [(0x1000, 5), (0, 0), (0x1122334455667788, 8)]
        assert encode_addresses(extents) == TWO_BUFFERS_AND_AN_ABSENT_ONE
        listed = parse_addresses(TWO_BUFFERS_AND_AN_ABSENT_ONE)
        assert listed == AddressList((0x1000, 0, 0x1122334455667788), (5, 0, 8))

    def test_without_buffers_it_is_its_two_totals(self):
        assert encode_addresses([]) == bytes(16)
        assert parse_addresses(bytes(16)) == AddressList((), ())

    def test_an_empty_buffer_goes_out_without_its_address(self):
        assert encode_addresses([(0xDEAD, 0)]) == uint64s(0, 1, 0, 0)

    def test_address_zero_is_an_offset_like_any_other(self):
        assert parse_addresses(uint64s(4, 1, 0, 4)) == AddressList((0,), (4,))

    @pytest.mark.parametrize(
        ("numbers", "leased"),
        [
            ((0, 0), ()),
            ((0, 2, 0, 0, 0, 0), ()),
            ((7, 2, 64, 3, 0, 4), (64, 0)),
            ((7, 3, 64, 3, 0, 0, 128, 4), (64, 128)),
            ((7, 2, 64, 3, 64, 4), (64, 64)),
        ],
    )
    def test_leased_are_the_addresses_of_buffers_that_have_bytes_once_for_each_time_sent(self, numbers, leased):
        assert parse_addresses(uint64s(*numbers)).leased == leased

    @pytest.mark.parametrize("size", [0, 1, 8, 15])
    def test_one_too_short_for_its_totals_is_refused(self, size):
        with pytest.raises(RemoteProtocolError, match=f"of {size} bytes"):
            parse_addresses(bytes(size))

    @pytest.mark.parametrize(
        "body",
        [
            uint64s(8, 2, 64, 8),
            uint64s(8, 0, 64, 8),
            uint64s(8, 1, 64, 8, 0),
            uint64s(8, 1, 64, 8)[:-1],
            uint64s(8, 1, 64, 8) + b"\0",
            uint64s(0, 2**64 - 1),
            uint64s(0, 2**60, 0, 0),  # 16 * 2^60 is 0 modulo 2^64
        ],
    )
    def test_a_count_that_disagrees_with_the_size_is_refused(self, body):
        with pytest.raises(RemoteProtocolError, match="buffers"):
            parse_addresses(body)

    @pytest.mark.parametrize(
        "body",
        [
            uint64s(65, 1, 64, 8),
            uint64s(7, 1, 64, 8),
            uint64s(1, 0),
            uint64s(0, 2, 64, 2**63, 128, 2**63),  # the sum is 0 modulo 2^64
        ],
    )
    def test_a_total_that_disagrees_with_the_lengths_is_refused(self, body):
        with pytest.raises(RemoteProtocolError, match="total"):
            parse_addresses(body)

    def test_the_address_of_an_empty_buffer_is_given_back_unless_it_is_0(self):
        for address, leased in ((0, (64,)), (128, (64, 128)), (2**64 - 1, (64, 2**64 - 1))):
            listed = parse_addresses(uint64s(8, 2, 64, 8, address, 0))
            assert listed == AddressList((64, address), (8, 0))
            assert listed.leased == leased

    def test_a_total_may_count_padding(self):
        for total in (11, 16, 24, 64, 128):
            assert parse_addresses(uint64s(total, 2, 64, 8, 128, 3)).lengths == (8, 3)
        assert parse_addresses(uint64s(4096, 1, 64, 8), body_length=4096).lengths == (8,)
        for total, body_length in ((129, 128), (10, 128), (0, 128), (4097, 4096), (2**64 - 1, 4096)):
            with pytest.raises(RemoteProtocolError, match=f"total is {total} bytes"):
                parse_addresses(uint64s(total, 2, 64, 8, 128, 3), body_length)

    @given(st.lists(buffers))
    def test_round_trip(self, extents):
        listed = parse_addresses(encode_addresses(extents))
        assert list(zip(listed.addresses, listed.lengths, strict=True)) == extents

    @given(st.binary() | plausible_lists)
    def test_any_bytes_are_understood_in_full_or_refused(self, body):
        try:
            listed = parse_addresses(body)
        except RemoteProtocolError:
            return
        total, count, *pairs = (int.from_bytes(body[at : at + 8], "little") for at in range(0, len(body), 8))
        assert sum(listed.lengths) <= total <= sum(length + -length % 64 for length in listed.lengths)
        assert count == len(listed.lengths)
        assert listed.lengths == tuple(pairs[1::2])
        assert listed.addresses == tuple(pairs[0::2])

    def test_any_buffer_can_be_parsed_where_it_lies(self):
        framed = b"ab" + TWO_BUFFERS_AND_AN_ABSENT_ONE
        listed = parse_addresses(memoryview(framed)[2:])  # type: ignore[arg-type]  # which says bytes
        assert listed == parse_addresses(TWO_BUFFERS_AND_AN_ABSENT_ONE)


class TestFreeList:
    def test_it_is_one_or_more_little_endian_uint64(self):
        golden = bytes.fromhex("0010000000000000 8877665544332211 0000000000000000")
        assert encode_free([0x1000, 0x1122334455667788, 0]) == golden
        assert parse_free(golden) == (0x1000, 0x1122334455667788, 0)

    def test_an_address_sent_twice_is_freed_twice(self):
        assert parse_free(uint64s(64, 64)) == (64, 64)

    def test_naming_nothing_is_a_mistake_of_the_side_that_does_it(self):
        with pytest.raises(LocalProtocolError):
            encode_free([])
        with pytest.raises(RemoteProtocolError):
            parse_free(b"")

    @pytest.mark.parametrize("size", [1, 7, 9, 15, 17])
    def test_a_ragged_one_is_refused(self, size):
        with pytest.raises(RemoteProtocolError, match=f"of {size} bytes"):
            parse_free(bytes(size))

    @given(st.lists(uint64, min_size=1))
    def test_round_trip(self, addresses):
        assert parse_free(encode_free(addresses)) == tuple(addresses)

    @given(st.binary())
    def test_any_bytes_are_understood_in_full_or_refused(self, body):
        try:
            addresses = parse_free(body)
        except RemoteProtocolError:
            assert not body or len(body) % 8
        else:
            assert uint64s(*addresses) == body
