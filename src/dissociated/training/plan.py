"""The plan of an epoch: the order of its rows, and their division into shards and batches.

This is arithmetic alone. Every shard computes the same plan, so that shards need not communicate.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Positions = npt.NDArray[np.int64]


class Piece(NamedTuple):
    """Rows of a block, from `start` up to, but not including, `stop`."""

    block: int
    start: int
    stop: int


@dataclass(frozen=True)
class Plan:
    """A plan in which every epoch reads each row exactly once, over all shards together.

    - `rows`: the number of rows of each block.
    - `batch_size`: the number of rows of a batch.
    - `shuffle`: whether blocks are read in an order of the epoch's own, which follows from `seed`.
    - `window`: the number of rows that are shuffled together, a multiple of `batch_size`. With 0, the rows of a block
      keep their order.
    - `seed`: determines the order of every epoch.
    - `drop_last`: whether batches that are not full are left out. All shards then have the same number of batches.
    """

    rows: Positions
    batch_size: int
    shuffle: bool
    window: int
    seed: int
    drop_last: bool

    @property
    def total(self) -> int:
        """The total number of rows."""
        return int(self.rows.sum())

    def shard(self, number: int, count: int, epoch: int) -> Shard:
        """Return shard `number` of `count` in an epoch."""
        return Shard(self, number, count, epoch)


@dataclass(frozen=True)
class Shard:
    """A part of an epoch: consecutive rows in the epoch's order of blocks. Shards differ by one row at most."""

    plan: Plan
    number: int
    count: int
    epoch: int

    @cached_property
    def _order(self) -> Positions:
        """The numbers of the blocks, in the order of the epoch."""
        blocks = len(self.plan.rows)
        return _permutation(blocks, self.plan.seed, self.epoch, 1) if self.plan.shuffle else np.arange(blocks)

    @cached_property
    def _ends(self) -> Positions:
        """The end position of each block in the epoch's order of rows."""
        return np.cumsum(self.plan.rows[self._order])

    @property
    def _first(self) -> int:
        return self.number * self.plan.total // self.count

    @property
    def rows(self) -> int:
        """The number of rows of the shard, including rows that `drop_last` leaves out."""
        return (self.number + 1) * self.plan.total // self.count - self._first

    @property
    def _full(self) -> int:
        """The number of batches that the rows fill, the last of which may be incomplete."""
        return -(-self.rows // self.plan.batch_size)

    @property
    def _halved(self) -> bool:
        """Whether the last batch is split in two, since shards with one more row have one more batch."""
        most = -(-self.plan.total // self.count)
        one_more = -(-most // self.plan.batch_size) > self._full
        return one_more and self.rows > 0 and self.plan.batch_size > 1

    def __len__(self) -> int:
        """Return the number of batches of the shard, which is the same for all shards.

        Without `drop_last`, there is an exception: if there are fewer rows than shards, or `batch_size` is 1, some
        shards have one batch less.
        """
        if self.plan.drop_last:
            return self.plan.total // self.count // self.plan.batch_size
        return self._full + self._halved

    def extent(self, step: int) -> tuple[int, int]:
        """Return the range of the shard's rows in batch number `step`, as its start and its exclusive end."""
        size = self.plan.batch_size
        if not self.plan.drop_last and self._halved and step >= self._full - 1:
            begin, end = (self._full - 1) * size, self.rows
            middle = (begin + end + 1) // 2
            return (begin, middle) if step == self._full - 1 else (middle, end)
        return step * size, min((step + 1) * size, self.rows)

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        """Yield the pieces of blocks that hold the shard's rows from `start` up to, but not including, `stop`."""
        at, stop = self._first + start, self._first + stop
        place = int(np.searchsorted(self._ends, at, side="right"))
        while at < stop:
            block = int(self._order[place])
            begin = int(self._ends[place] - self.plan.rows[block])
            end = min(stop, int(self._ends[place]))
            if at < end:
                yield Piece(block, at - begin, end - begin)
            at, place = end, place + 1

    def order(self, window: int, rows: int) -> Positions:
        """Return the shuffled order of the `rows` rows of window number `window`, as positions within the window."""
        return _permutation(rows, self.plan.seed, self.epoch, 2, self._first, window)


def turns(lengths: Sequence[int], given: int) -> list[tuple[int, int]]:
    """Compute the order in which shards give their next batches, if each shard gives one batch in turn.

    Args:
        lengths: the number of batches of each shard.
        given: the number of batches that all shards together have given already.

    Returns:
        A pair for each shard, in the order of their turns: the number of the shard, and the number of its next batch.
        Shards that have given all of their batches come last.
    """
    count = len(lengths)
    rounds = min(given // count, *lengths)
    steps, left = [rounds] * count, given - rounds * count
    waiting, ended = deque(range(count)), []
    while left and waiting:
        number = waiting.popleft()
        if steps[number] == lengths[number]:
            ended.append(number)
            continue
        steps[number] += 1
        left -= 1
        waiting.append(number)
    return [(number, steps[number]) for number in (*waiting, *ended)]


def _permutation(length: int, *seeds: int) -> Positions:
    """Return a permutation of the numbers below `length` that follows from the seeds, in every release of NumPy.

    NumPy guarantees the output of a bit generator across releases, but not the results of its own `permutation`.
    """
    keys = np.random.PCG64(np.random.SeedSequence(seeds)).random_raw(length)
    return np.argsort(keys, kind="stable").astype(np.int64, copy=False)
