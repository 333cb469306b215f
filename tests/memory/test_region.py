from __future__ import annotations

from itertools import pairwise

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dissociated.errors import RemoteProtocolError
from dissociated.memory.region import AddressSpace, Region, reserve_base


def region(base: int, size: int, static: bool = True) -> Region:
    return Region(base, pa.py_buffer(bytes(size)), static)


def covered(spans: list[tuple[int, int]]) -> set[int]:
    return {address for base, size in spans for address in range(base, base + size)}


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12)), max_size=12))
def test_a_space_holds_regions_that_do_not_overlap(spans: list[tuple[int, int]]) -> None:
    space, accepted = AddressSpace(), []
    for base, size in spans:
        if covered([(base, size)]) & covered(accepted):
            with pytest.raises(RemoteProtocolError, match="overlaps"):
                space.add(region(base, size))
        else:
            space.add(region(base, size))
            accepted.append((base, size))
    for address in range(75):
        homes = [base for base, size in accepted if base <= address < base + size]
        if homes:
            assert [space.find(address).base] == homes
        else:
            with pytest.raises(RemoteProtocolError, match=f"{address:#x}, which lies in no region"):
                space.find(address)


def test_a_space_takes_no_more_regions_than_it_was_told() -> None:
    space = AddressSpace(max_regions=2)
    space.add(region(0, 1))
    space.add(region(1, 1))
    with pytest.raises(RemoteProtocolError, match="more than 2 regions"):
        space.add(region(2, 1))


def test_a_space_is_static_where_all_of_it_is() -> None:
    space = AddressSpace()
    assert not space.static
    space.add(region(0, 1))
    assert space.static
    space.add(region(1, 1, static=False))
    assert not space.static


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_extents_lie_within_their_region(address: int, length: int) -> None:
    within = region(1000, 100)
    if not length:
        assert within.offsets([address], [length]) == [0]
    elif address >= 1000 and address + length <= 1100:
        assert within.offsets([address], [length]) == [address - 1000]
    else:
        with pytest.raises(RemoteProtocolError, match=r"leaves <Region 0x3e8 to 0x44c>"):
            within.offsets([address], [length])


@pytest.mark.parametrize("extent", [(1000, 100), (1099, 1), (1000, 1)])
def test_the_edges_of_a_region_belong_to_it(extent: tuple[int, int]) -> None:
    assert region(1000, 100).offsets([extent[0]], [extent[1]]) == [extent[0] - 1000]


@pytest.mark.parametrize("extent", [(999, 1), (1000, 101), (1100, 1), (1099, 2), (2**64 - 1, 2)])
def test_what_leaves_a_region_is_refused(extent: tuple[int, int]) -> None:
    with pytest.raises(RemoteProtocolError, match="leaves"):
        region(1000, 100).offsets([extent[0]], [extent[1]])


def test_gathering_puts_extents_where_they_are_wanted() -> None:
    source = Region(0, pa.py_buffer(bytes(range(100))))
    packed = pa.allocate_buffer(16)
    memoryview(packed).cast("B")[:] = bytes(16)
    assert source.gather([10, 0, 51], [3, 0, 2], [8, 0, 0], packed) is packed
    assert packed.to_pybytes() == bytes([51, 52, 0, 0, 0, 0, 0, 0, 10, 11, 12, 0, 0, 0, 0, 0])


@pytest.mark.parametrize("at", [-1, 14, 16, 2**62])
def test_gathering_does_not_leave_the_body(at: int) -> None:
    source = Region(0, pa.py_buffer(bytes(100)))
    with pytest.raises(RemoteProtocolError, match="leaves its body of 16 bytes"):
        source.gather([10], [3], [at], pa.allocate_buffer(16))


def test_bases_are_never_given_twice() -> None:
    sizes = [0, 1, 4095, 4096, 4097, 1 << 40, 0, 1]
    spans = [(reserve_base(size), size) for size in sizes]
    for (base, size), (following, _) in pairwise(spans):
        assert base > 0
        assert base % 4096 == 0
        assert following > base + size
