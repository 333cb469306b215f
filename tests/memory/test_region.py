from __future__ import annotations

import sys
from itertools import pairwise

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dissociated.errors import RemoteProtocolError
from dissociated.memory.region import AddressSpace, Region, reserve_base


def region(base: int, size: int, static: bool = True) -> Region:
    return Region(base, pa.py_buffer(bytes(size)), static)


def covered(spans: list[tuple[int, int]]) -> set[int]:
    return {address for base, size in spans for address in range(base, base + size)}


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12)), max_size=12))
def test_a_space_holds_regions_that_do_not_overlap(spans: list[tuple[int, int]]) -> None:
    space = AddressSpace()
    accepted: list[tuple[int, int]] = []
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
            with pytest.raises(RemoteProtocolError, match=f"{address:#x}, which is in no region"):
                space.find(address)


def test_a_space_takes_no_more_regions_than_it_was_told() -> None:
    space = AddressSpace(max_regions=2)
    space.add(region(0, 1))
    space.add(region(1, 1))
    with pytest.raises(RemoteProtocolError, match="more than 2 regions"):
        space.add(region(2, 1))


def test_a_space_is_static_where_all_of_it_is() -> None:
    space = AddressSpace()
    seen = [space.static]
    for static in (True, False):
        space.add(region(len(seen), 1, static))
        seen.append(space.static)
    assert seen == [False, True, False]


def spaced(*regions: Region) -> AddressSpace:
    space = AddressSpace()
    for one in regions:
        space.add(one)
    return space


@given(st.integers(0, 2**64 - 1), st.integers(1, 2**64 - 1))
@example(1000, 100).via("all of it")
@example(1099, 1).via("its last byte")
@example(1099, 2).via("one too many")
@example(2**64 - 1, 2).via("the end of the addresses")
def test_extents_lie_within_their_region(address: int, length: int) -> None:
    space = spaced(region(1000, 100))
    if address >= 1000 and address + length <= 1100:
        assert space.locate([address], [length]).offsets == [address - 1000]
    else:
        with pytest.raises(RemoteProtocolError, match=r"extends beyond <Region 0x3e8 to 0x44c>|is in no region"):
            space.locate([address], [length])


@given(st.data())
def test_extents_may_lie_in_several_regions(data: st.DataObject) -> None:
    contents = [bytes([number]) * 16 + bytes(range(16 * number, 16 * number + 16)) for number in range(4)]
    space = spaced(*(Region(100 * number, pa.py_buffer(content)) for number, content in enumerate(contents)))
    extents = [(0, 1), *data.draw(st.lists(st.tuples(st.integers(0, 31), st.integers(0, 32)), max_size=8))]
    homes = [data.draw(st.integers(0, 3)) for _ in extents]
    addresses = [100 * home + at for home, (at, _) in zip(homes, extents, strict=True)]
    lengths = [min(length, 32 - at) for at, length in extents]
    located = space.locate(addresses, lengths)
    for home, (at, _), length, offset in zip(homes, extents, lengths, located.offsets, strict=True):
        assert located.memory.slice(offset, length).to_pybytes() == (
            contents[home][at : at + length] if length else b""
        )


def test_what_lies_in_several_regions_keeps_them() -> None:
    memories = [pa.py_buffer(bytes([number]) * 64) for number in range(2)]
    space = spaced(*(Region(4096 * number, memory) for number, memory in enumerate(memories)))
    located = space.locate([0, 4096], [64, 64])
    del space
    before = [sys.getrefcount(memory) for memory in memories]
    del located
    assert [sys.getrefcount(memory) for memory in memories] == [count - 1 for count in before]


def test_gathering_puts_extents_where_they_are_wanted() -> None:
    located = spaced(Region(0, pa.py_buffer(bytes(range(100))))).locate([10, 0, 51], [3, 0, 2])
    packed = pa.allocate_buffer(16)
    memoryview(packed).cast("B")[:] = bytes(16)
    assert located.gather([3, 0, 2], [8, 0, 0], packed) is packed
    assert packed.to_pybytes() == bytes([51, 52, 0, 0, 0, 0, 0, 0, 10, 11, 12, 0, 0, 0, 0, 0])


@pytest.mark.parametrize("at", [-1, 14, 16, 2**62])
def test_gathering_does_not_leave_the_body(at: int) -> None:
    located = spaced(Region(0, pa.py_buffer(bytes(100)))).locate([10], [3])
    with pytest.raises(RemoteProtocolError, match="extends beyond its body of 16 bytes"):
        located.gather([3], [at], pa.allocate_buffer(16))


def test_bases_are_never_given_twice() -> None:
    sizes = [0, 1, 4095, 4096, 4097, 1 << 40, 0, 1]
    spans = [(reserve_base(size), size) for size in sizes]
    for (base, size), (following, _) in pairwise(spans):
        assert base > 0
        assert base % 4096 == 0
        assert following > base + size
