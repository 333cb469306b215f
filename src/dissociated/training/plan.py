"""In which order rows are given, and to whom: arithmetic alone, which every shard does alike."""

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
    """Some rows of a block: those from `start` up to `stop`."""

    block: int
    start: int
    stop: int


@dataclass(frozen=True)
class Plan:
    """Every row once an epoch, over all shards together, in batches.

    - `rows`: how many each block has.
    - `window`: so many rows are shuffled together, a multiple of `batch_size`; 0: they keep their order in a block.
    - `shuffle`: blocks come in an order of the epoch's own, which `seed` tells.
    - `drop_last`: batches that are not full are left out, and all shards have as many.
    """

    rows: Positions
    batch_size: int
    shuffle: bool
    window: int
    seed: int
    drop_last: bool

    @property
    def total(self) -> int:
        """All rows."""
        return int(self.rows.sum())

    def shard(self, number: int, count: int, epoch: int) -> Shard:
        """What the shard `number` of `count` is given in an epoch."""
        return Shard(self, number, count, epoch)


@dataclass(frozen=True)
class Shard:
    """A part of an epoch: rows that follow each other in its order of blocks. Shards differ by one row at most."""

    plan: Plan
    number: int
    count: int
    epoch: int

    @cached_property
    def _order(self) -> Positions:
        """The blocks, as the epoch has them."""
        blocks = len(self.plan.rows)
        return _permutation(blocks, self.plan.seed, self.epoch, 1) if self.plan.shuffle else np.arange(blocks)

    @cached_property
    def _ends(self) -> Positions:
        """Where each block ends in the epoch's order of rows."""
        return np.cumsum(self.plan.rows[self._order])

    @property
    def _first(self) -> int:
        return self.number * self.plan.total // self.count

    @property
    def rows(self) -> int:
        """How many it has, of which `drop_last` leaves some out."""
        return (self.number + 1) * self.plan.total // self.count - self._first

    @property
    def _full(self) -> int:
        """How many batches its rows make."""
        return -(-self.rows // self.plan.batch_size)

    @property
    def _halved(self) -> bool:
        """Whether its last batch is given as two, so that it has as many as a shard with one row more."""
        most = -(-self.plan.total // self.count)
        one_more = -(-most // self.plan.batch_size) > self._full
        return one_more and self.rows > 0 and self.plan.batch_size > 1

    def __len__(self) -> int:
        """How many batches it has: as many as every other shard.

        But for this: where there are fewer rows than shards, or batches of one row, some have one less, unless the
        last are dropped.
        """
        if self.plan.drop_last:
            return self.plan.total // self.count // self.plan.batch_size
        return self._full + self._halved

    def extent(self, step: int) -> tuple[int, int]:
        """Which of the shard's rows the batch number `step` has: from the first of these numbers up to the second."""
        size = self.plan.batch_size
        if not self.plan.drop_last and self._halved and step >= self._full - 1:
            begin, end = (self._full - 1) * size, self.rows
            middle = (begin + end + 1) // 2
            return (begin, middle) if step == self._full - 1 else (middle, end)
        return step * size, min((step + 1) * size, self.rows)

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        """Where these of the shard's rows lie."""
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
        """In which order the rows of a window are given, where they are shuffled."""
        return _permutation(rows, self.plan.seed, self.epoch, 2, self._first, window)


def turns(lengths: Sequence[int], given: int) -> list[tuple[int, int]]:
    """Who gives the next batches of shards of these lengths, where each gives one in turn and `given` were given.

    Each shard by its number, with the number of the batch that it gives next; those that have given all come last.
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
    """Numbers below `length` in an order that the seeds tell, with every release of NumPy.

    It promises that for what a bit generator gives, and not for its own permutations.
    """
    keys = np.random.PCG64(np.random.SeedSequence(seeds)).random_raw(length)
    return np.argsort(keys, kind="stable").astype(np.int64, copy=False)
