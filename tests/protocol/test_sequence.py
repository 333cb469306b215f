import pytest
from hypothesis import given
from hypothesis import strategies as st

from dissociated.protocol.sequence import unwrap

HALF = 2**31
counts = st.integers(0, 2**40)


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
