"""The rows of each shard: every row occurs once, and all shards have the same number of batches."""

from __future__ import annotations

from collections import Counter
from itertools import product

import numpy as np

from dissociated.training.plan import Plan, Shard, turns

LAYOUTS: tuple[list[int], ...] = ([], [0], [1], [7], [3, 0, 4, 1], [10] * 10, [64, 1, 1, 1, 33], [0, 0, 5, 0])


def given(shard: Shard) -> list[list[tuple[int, int]]]:
    """Return the batches of a shard, each row as its block and its position in the block."""
    window, batches = shard.plan.window, []
    for step in range(len(shard)):
        start, stop = shard.extent(step)
        first = start // window * window if window else start
        last = min(first + window, shard.rows) if window else stop
        rows = [(block, row) for block, begin, end in shard.pieces(first, last) for row in range(begin, end)]
        if window:
            rows = [rows[at] for at in shard.order(start // window, last - first)]
        batches.append(rows[start - first : stop - first])
    return batches


def test_every_row_comes_once_and_shards_have_as_many_batches() -> None:
    for rows, size, count, shuffle in product(LAYOUTS, (1, 2, 3, 8), (1, 2, 3, 5), (False, True)):
        for window in (0, 2 * size) if shuffle else (0,):
            whole = Counter((block, row) for block, length in enumerate(rows) for row in range(length))
            plan = Plan(np.array(rows, np.int64), size, shuffle, window, seed=3, drop_last=False)
            shards = [given(plan.shard(number, count, epoch=1)) for number in range(count)]
            case = rows, size, count, shuffle, window
            assert Counter(row for shard in shards for batch in shard for row in batch) == whole, case
            assert all(0 < len(batch) <= size for shard in shards for batch in shard), case
            if size > 1 and whole.total() >= count:
                assert len({*map(len, shards)}) == 1, case
            plan = Plan(np.array(rows, np.int64), size, shuffle, window, seed=3, drop_last=True)
            shards = [given(plan.shard(number, count, epoch=1)) for number in range(count)]
            assert {len(batch) for shard in shards for batch in shard} <= {size}, case
            assert {*map(len, shards)} == {whole.total() // count // size}, case
            assert max(Counter(row for shard in shards for batch in shard for row in batch).values(), default=1) == 1


def test_shards_that_give_in_turn_go_on_where_they_were() -> None:
    """DataLoader asks its workers in turn, and drops a worker that has no more batches."""

    def in_turn(shards: list[list[int]]) -> list[int]:
        longest = max(map(len, shards))
        return [shard[step] for step in range(longest) for shard in shards if step < len(shard)]

    for rows, size, workers in product(range(9), (1, 2), (1, 2, 3, 4)):
        plan = Plan(np.array([rows], np.int64), size, False, 0, seed=0, drop_last=False)
        lengths = [len(plan.shard(number, workers, 0)) for number in range(workers)]
        shards = [[10 * number + step for step in range(length)] for number, length in enumerate(lengths)]
        whole = in_turn(shards)
        for given_before in range(len(whole) + 1):
            left = [shards[number][step:] for number, step in turns(lengths, given_before)]
            assert in_turn(left) == whole[given_before:], (lengths, given_before)


def test_orders_are_of_their_epoch_and_seed_and_never_change() -> None:
    def order(epoch: int, seed: int) -> list[int]:
        shard = Plan(np.full(8, 2), 4, True, 8, seed, False).shard(0, 1, epoch)
        return [2 * block + row for batch in given(shard) for block, row in batch]

    assert order(0, 0) == order(0, 0)
    assert len({tuple(order(epoch, seed)) for epoch in range(3) for seed in range(3)}) == 9
    # States that were saved by an older release depend on this order.
    assert order(5, 7) == ORDER


#: The order of epoch 5 with seed 7, for eight blocks of two rows, batches of four rows and a window of eight rows.
ORDER = [12, 9, 11, 10, 13, 8, 0, 1, 4, 15, 5, 3, 6, 7, 14, 2]
