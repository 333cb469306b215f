"""A region for an endless stream uses freed memory again, or gives it back to the system."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import resource
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from dissociated.memory.live import LiveRegion

PAGE = 4096
MB = 1 << 20


@pytest.fixture
def region() -> Iterator[LiveRegion]:
    with closing(LiveRegion("test", 10 * PAGE)) as made:
        yield made


def used(region: LiveRegion) -> int:
    return os.fstat(region.descriptor).st_blocks * 512


def read(region: LiveRegion, address: int, length: int) -> bytes:
    return os.pread(region.descriptor, length, address - region.base)


def test_buffers_lie_where_their_addresses_say(region: LiveRegion) -> None:
    body = [b"0123", b"4567", memoryview(b"89abcdef")]
    placed = region.place(body, 16, [(0, 3), (0, 0), (8, 8)])
    (first, three), absent, (last, eight) = placed
    assert (three, absent, eight) == (3, (0, 0), 8)
    assert read(region, first, 3) == b"012"
    assert read(region, last, 8) == b"89abcdef"
    assert first >= region.base > 0


def test_freed_bodies_go_back_to_the_system_and_others_stay(region: LiveRegion) -> None:
    bodies = [region.place([bytes([n]) * 2 * PAGE], 2 * PAGE, [(0, PAGE), (PAGE, PAGE)]) for n in range(1, 4)]
    assert (region.unfreed, used(region)) == (6 * PAGE, 6 * PAGE)
    middle = [address for address, _ in bodies[1]]
    region.free(middle[:1])
    assert (region.unfreed, used(region)) == (6 * PAGE, 6 * PAGE)  # the other half is still held
    region.free(middle[1:])
    region.trim()
    assert (region.unfreed, used(region)) == (4 * PAGE, 4 * PAGE)
    assert read(region, middle[0], 2 * PAGE) == bytes(2 * PAGE)
    assert read(region, bodies[0][0][0], 2 * PAGE) == b"\1" * 2 * PAGE
    assert read(region, bodies[2][0][0], 2 * PAGE) == b"\3" * 2 * PAGE


def test_pages_that_cannot_be_given_back_now_go_back_with_the_next(region: LiveRegion) -> None:
    size = 16 * MB
    (first, _), (second, _) = (region.place([bytes([n]) * size], size, [(0, size)])[0] for n in (1, 2))
    ((third, _),) = region.place([b"3" * PAGE], PAGE, [(0, PAGE)])
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * PAGE
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (taken + size // 2, limits[1]))  # no room in the region for these bodies
    try:
        region.free([first, second])
        assert used(region) == 2 * size + PAGE
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert region.unfreed == PAGE
    region.free([third])
    assert (region.unfreed, used(region), region.empty) == (0, PAGE, True)


def test_freed_pages_are_used_again(region: LiveRegion) -> None:
    """A stream whose consumer frees each body needs the pages of two bodies, however long it is."""
    held = deque[int]()
    for number in range(100):
        ((address, _),) = region.place([bytes([number]) * PAGE], PAGE, [(0, PAGE)])
        held.append(address)
        if len(held) == 2:
            assert read(region, held[0], PAGE) == bytes([number - 1]) * PAGE
            region.free([held.popleft()])
        assert used(region) <= 2 * PAGE


def test_pages_that_somebody_holds_are_never_written_again(region: LiveRegion) -> None:
    """Bodies of random sizes are freed in parts, in random order, by two holders, of which one may be cut off."""
    choose = random.Random(40)
    held: list[tuple[bytes, list[tuple[int, int]], list[tuple[int, bool]]]] = []  # content, extents, leases to end
    for number in range(3000):
        size = choose.randint(1, 3 * PAGE)
        if region.has_room(size):
            cut = choose.randint(0, size)
            content = number.to_bytes(4, "little") * (size // 4 + 1)
            extents = region.place([content[:size]], size, [(0, cut), (cut, size - cut)], holders=2)
            addresses = list({address for address, length in extents if length})
            exempt = choose.random() < 0.1
            if exempt:
                region.exempt(addresses)
            held.append((content[:size], extents, [(one, flag) for one in addresses for flag in (False, exempt)]))
        for body in choose.sample(held, min(len(held), 2)):
            content, extents, leases = body
            assert b"".join(read(region, *extent) for extent in extents if extent[1]) == content
            address, exempt = leases.pop(choose.randrange(len(leases)))
            region.free([address], exempt)
            if not leases:
                held.remove(body)
        assert region.unfreed <= region.limit + 6 * PAGE
    assert used(region) <= region.limit + sum(len(content) + PAGE for content, *_ in held)


def test_a_share_of_the_limit_is_kept_for_later_bodies() -> None:
    with closing(LiveRegion("test", 40 * PAGE)) as region:
        held = [region.place([b"x" * PAGE], PAGE, [(0, PAGE)])[0][0] for _ in range(40)]
        region.free(held)
        assert (region.unfreed, used(region)) == (0, 10 * PAGE)
        # Bodies for which no kept page is large enough do not take the region over its limit.
        held = [region.place([b"x" * 2 * PAGE], 2 * PAGE, [(0, PAGE)])[0][0] for _ in range(20)]
        assert used(region) == 40 * PAGE
        region.retire()
        region.free(held)
        assert (used(region), region.empty) == (0, True)


def test_room_is_what_is_not_held(region: LiveRegion) -> None:
    held = [region.place([b"x"], 1, [(0, 1)])[0][0] for _ in range(9)]
    assert region.has_room(PAGE)
    assert not region.has_room(PAGE + 1)
    held.append(region.place([b"x"], 1, [(0, 1)])[0][0])
    assert not region.has_room(1)
    region.free(held[:3])
    assert region.has_room(3 * PAGE)
    assert not region.has_room(3 * PAGE + 1)


def test_there_is_room_for_two_bodies_of_any_size(region: LiveRegion) -> None:
    """Place two bodies of any size, because a reader that asks for the next batch still holds the last."""
    placed = []
    for _ in range(2):
        assert region.has_room(MB)
        placed += region.place([bytes(MB)], MB, [(0, MB)])
    assert not region.has_room(1)
    region.free([placed[0][0]])
    assert region.has_room(MB)


def test_a_body_without_bytes_holds_nothing(region: LiveRegion) -> None:
    assert region.place([], 0, [(0, 0), (0, 0)]) == [(0, 0), (0, 0)]
    assert region.unfreed == 0


def test_an_address_that_two_buffers_share_is_freed_once_for_both(region: LiveRegion) -> None:
    (first, _), (second, _) = region.place([b"x" * PAGE], PAGE, [(0, 8), (0, 16)])
    assert first == second
    region.free([first])
    assert (region.unfreed, region.empty) == (0, True)


def test_what_several_hold_goes_back_when_the_last_has_freed_all_of_it(region: LiveRegion) -> None:
    placed = region.place([b"x" * 2 * PAGE], 2 * PAGE, [(0, PAGE), (PAGE, PAGE)], holders=3)
    one, other = [address for address, _ in placed]
    for freed in ([one, other], [other], [one], [other]):
        region.free(freed)
        assert (region.unfreed, used(region)) == (2 * PAGE, 2 * PAGE)
    region.free([one])
    region.trim()
    assert (region.unfreed, used(region), region.empty) == (0, 0, True)


def test_what_nobody_holds_goes_back_at_once(region: LiveRegion) -> None:
    region.place([b"x" * PAGE], PAGE, [(0, PAGE)], holders=0)
    assert (region.unfreed, region.empty) == (0, True)


def test_exempt_leases_keep_memory_and_make_room(region: LiveRegion) -> None:
    held = [region.place([b"x" * 5 * PAGE], 5 * PAGE, [(0, 5 * PAGE)], holders=2)[0][0] for _ in range(2)]
    assert not region.has_room(1)
    region.exempt(held)
    assert region.size_of(held) == region.unfreed == 10 * PAGE  # the other holder still counts
    region.free(held)
    assert (region.unfreed, used(region)) == (0, 10 * PAGE)
    assert region.has_room(10 * PAGE)
    assert read(region, held[0], 1) == b"x"
    region.free(held[:1], exempt=True)
    assert used(region) == 5 * PAGE
    region.free(held[1:], exempt=True)
    assert (used(region), region.empty) == (0, True)


def test_what_is_handed_out_can_be_neither_written_nor_shrunk(region: LiveRegion) -> None:
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        os.write(region.descriptor, b"x")
    with pytest.raises(OSError, match=os.strerror(errno.EINVAL)):
        os.ftruncate(region.descriptor, 0)
    assert fcntl.fcntl(region.descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
