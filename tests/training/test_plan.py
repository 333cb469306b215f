"""The rows of each shard: every row occurs once, and all shards have the same number of batches."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from itertools import accumulate, product

import numpy as np

from dissociated.training.permutation import Permutation
from dissociated.training.plan import LayoutProgress, Order, Plan, RowSpan, Shard, turns

LAYOUTS: tuple[list[int], ...] = ([], [0], [1], [7], [3, 0, 4, 1], [10] * 10, [64, 1, 1, 1, 33], [0, 0, 5, 0])


def rows_at(shard: Shard, spans: list[RowSpan]) -> list[tuple[int, int]]:
    """Return the rows at these positions, each as its block and its position in the block."""
    plan, order, found = shard.plan, shard.order, []
    for span in spans:
        if plan.order is Order.GLOBAL:
            ends = [0, *accumulate(plan.rows.tolist())]
            for row in order.rows(span).tolist():
                block = bisect_right(ends, row) - 1
                found.append((block, row - ends[block]))
        elif plan.order is Order.WINDOW:
            for position in range(*span):
                whole, places = order.window(position // plan.window)
                rows = [(block, row) for block, begin, end in order.pieces(whole) for row in range(begin, end)]
                found.append(rows[places[position - whole.start]])
        else:
            found += [(block, row) for block, begin, end in order.pieces(span) for row in range(begin, end)]
    return found


def given(shard: Shard, first: int = 0) -> list[list[tuple[int, int]]]:
    """Return the batches of a shard from number `first` on, each row as its block and its position in the block."""
    return [rows_at(shard, shard.batch(step)) for step in range(first, len(shard))]


def planned(rows: list[int], size: int, order: Order, window: int = 0, seed: int = 3, drop_last: bool = False) -> Plan:
    return Plan(np.array(rows, np.int64), size, order, window, seed, drop_last)


def test_every_row_comes_once_and_shards_have_as_many_batches() -> None:
    for rows, size, count, order in product(LAYOUTS, (1, 2, 3, 8), (1, 2, 3, 5), Order):
        window = 5 if order is Order.WINDOW else 0
        whole = Counter((block, row) for block, length in enumerate(rows) for row in range(length))
        plan = planned(rows, size, order, window)
        shards = [given(plan.shard(number, count, epoch=1)) for number in range(count)]
        case = rows, size, count, order
        assert Counter(row for shard in shards for batch in shard for row in batch) == whole, case
        assert all(0 < len(batch) <= size for shard in shards for batch in shard), case
        if size > 1 and whole.total() >= count:
            assert len({*map(len, shards)}) == 1, case
        plan = planned(rows, size, order, window, drop_last=True)
        shards = [given(plan.shard(number, count, epoch=1)) for number in range(count)]
        assert {len(batch) for shard in shards for batch in shard} <= {size}, case
        assert {*map(len, shards)} == {whole.total() // count // size}, case
        assert max(Counter(row for shard in shards for batch in shard for row in batch).values(), default=1) == 1


def test_an_epoch_is_finished_by_other_numbers_of_ranks_and_workers() -> None:
    """Each layout reads some batches of each rank, in turn of its workers; the last one reads the rest."""
    for rows, order, size, drop_last in product(LAYOUTS[3:], Order, (2, 3), (False, True)):
        plan = planned(rows, size, order, 5 if order is Order.WINDOW else 0, drop_last=drop_last)
        whole = Counter((block, row) for block, length in enumerate(rows) for row in range(length))
        for layouts in ([(2, 1, 1), (3, 1, 0)], [(1, 2, 3), (2, 1, 1), (1, 1, 0)], [(2, 2, 3), (1, 3, 2), (2, 3, 0)]):
            before: list[LayoutProgress] = []
            seen: list[tuple[int, int]] = []
            for ranks, workers, step in layouts:
                shards = [plan.shard(at, ranks * workers, 1, before) for at in range(ranks * workers)]
                steps = []
                for rank in range(ranks):
                    own = shards[rank * workers : (rank + 1) * workers]
                    each = [given(shard) for shard in own]
                    in_turn = [
                        batches[at] for at in range(max(map(len, each))) for batches in each if at < len(batches)
                    ]
                    steps.append(min(step, len(in_turn)) if step else len(in_turn))
                    seen += [row for batch in in_turn[: steps[-1]] for row in batch]
                if len({*steps}) > 1:
                    break  # ranks of less than one batch, which have not received as many
                before.append(LayoutProgress(ranks, workers, steps[0]))
            else:
                assert max(Counter(seen).values(), default=1) == 1, (rows, order, layouts)
                left = [row for at in range(1) for row in rows_at(shards[at], [*plan.remaining(before, 1)])]
                assert Counter(seen) + Counter(left) == whole, (rows, order, layouts)
                assert drop_last or not left


def test_shards_that_give_in_turn_go_on_where_they_were() -> None:
    """DataLoader asks its workers in turn, and drops a worker that has no more batches."""

    def in_turn(shards: list[list[int]]) -> list[int]:
        longest = max(map(len, shards))
        return [shard[step] for step in range(longest) for shard in shards if step < len(shard)]

    for rows, size, workers in product(range(9), (1, 2), (1, 2, 3, 4)):
        plan = planned([rows], size, Order.STORED)
        lengths = [len(plan.shard(number, workers, 0)) for number in range(workers)]
        shards = [[10 * number + step for step in range(length)] for number, length in enumerate(lengths)]
        whole = in_turn(shards)
        for given_before in range(len(whole) + 1):
            left = [shards[number][step:] for number, step in turns(lengths, given_before)]
            assert in_turn(left) == whole[given_before:], (lengths, given_before)


def test_orders_are_of_their_epoch_and_seed_and_never_change() -> None:
    def order(kind: Order, epoch: int, seed: int) -> list[int]:
        shard = planned([2] * 8, 4, kind, 8, seed).shard(0, 1, epoch)
        return [2 * block + row for batch in given(shard) for block, row in batch]

    for kind, expected in ORDERS.items():
        assert order(kind, 0, 0) == order(kind, 0, 0)
        assert len({tuple(order(kind, epoch, seed)) for epoch in range(3) for seed in range(3)}) == 9
        # States that were saved by an older release depend on this order.
        assert order(kind, 5, 7) == expected


#: The orders of epoch 5 with seed 7, for eight blocks of two rows, batches of four rows and a window of eight rows.
ORDERS = {
    Order.WINDOW: [12, 9, 11, 10, 13, 8, 0, 1, 4, 15, 5, 3, 6, 7, 14, 2],
    Order.GLOBAL: [4, 1, 14, 7, 0, 3, 10, 5, 12, 9, 6, 15, 8, 11, 2, 13],
}


def test_a_computed_permutation_is_one_and_as_good_as_a_stored_one() -> None:
    for length in (*range(70), 1000, 65_537):
        whole = Permutation(length, 1, 2).at(0, length)
        assert sorted(whole.tolist()) == [*range(length)]
        assert (
            Permutation(length, 1, 2).at(length // 3, length // 2).tolist() == whole[length // 3 : length // 2].tolist()
        )
    # Each number is at each position equally often: chi squared is near its degrees of freedom, 144.
    counts = np.zeros((13, 13))
    for seed in range(2000):
        counts[np.arange(13), Permutation(13, seed).at(0, 13)] += 1
    assert ((counts - 2000 / 13) ** 2 / (2000 / 13)).sum() < 220
    # The order of sorted rows tells nothing of them, nor of the row that comes next.
    large = Permutation(1 << 20, 5).at(0, 1 << 20)
    assert abs(np.corrcoef(np.arange(1 << 20), large)[0, 1]) < 0.004
    assert abs(np.corrcoef(large[:-1], large[1:])[0, 1]) < 0.004


def test_weighted_rows_come_in_proportion_to_their_weights() -> None:
    weights = np.array([0, 1, 2, 0, 0.5, 4.5, 0])
    plan = Plan(np.array([7]), 2, Order.GLOBAL, 0, 0, False, np.cumsum(weights))
    total: Counter[int] = Counter()
    for epoch in range(1000):
        shards = [given(plan.shard(number, 2, epoch)) for number in range(2)]
        rows = Counter(row for shard in shards for batch in shard for _, row in batch)
        assert rows.total() == 7
        for row, weight in enumerate(weights):
            assert abs(rows[row] - 7 * weight / 8) < 1
        total += rows
    for row, weight in enumerate(weights):
        assert abs(total[row] / 1000 - 7 * weight / 8) < 0.1
