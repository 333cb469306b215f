"""The plan of an epoch: the order of its rows, and their division into shards and batches.

This is arithmetic alone. Every shard computes the same plan, so that shards need not communicate. The order of an epoch
does not depend on the number of shards, so that an epoch can be finished by another number of shards.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dissociated.training.permutation import Permutation, Positions, shuffled

_CHUNK = 1 << 16  # positions whose rows are computed at once
# The last seed of each use of random numbers in an epoch, so that the uses are independent. Saved states need the same.
_BLOCK_ORDER, _WINDOW_ORDER, _ROW_ORDER, _WEIGHT_OFFSET = 1, 2, 3, 4


class Piece(NamedTuple):
    """Rows of a block, from `start` up to, but not including, `stop`."""

    block: int
    start: int
    stop: int


class RowSpan(NamedTuple):
    """Positions in the order of an epoch, from `start` up to, but not including, `stop`."""

    start: int
    stop: int


class LayoutProgress(NamedTuple):
    """The number of batches, `step`, that each of `ranks` ranks has received, which `workers` workers have read."""

    ranks: int
    workers: int
    step: int


class Order(Enum):
    """A kind of order of the rows of an epoch."""

    #: Rows come as they are stored.
    STORED = "stored"
    #: Blocks come in random order. The rows of a block keep their order.
    BLOCKS = "blocks"
    #: Blocks come in random order, and the rows of each window of positions are shuffled.
    WINDOW = "window"
    #: Every order of the rows is about as probable as any other. Rows are read at random.
    GLOBAL = "global"


@dataclass(frozen=True)
class Plan:
    """A plan in which every epoch reads each row exactly once, over all shards together.

    - `rows`: the number of rows of each block.
    - `batch_size`: the number of rows of a batch.
    - `order`: the kind of order, which is another in each epoch, and follows from `seed`.
    - `window`: the number of rows that are shuffled together in a `WINDOW` order.
    - `seed`: determines the order of every epoch.
    - `drop_last`: whether batches that are not full are left out. All shards then have the same number of batches.
    - `weights`: the sum of the weights of all rows up to each row, for a `GLOBAL` order in which a row comes more or
      less often than once, in proportion to its weight. An epoch has as many rows as without weights.
    """

    rows: Positions
    batch_size: int
    order: Order
    window: int
    seed: int
    drop_last: bool
    weights: npt.NDArray[np.float64] | None = None

    @cached_property
    def total(self) -> int:
        """The total number of rows."""
        return int(self.rows.sum())

    @cached_property
    def blocks(self) -> int | str:
        """The number of blocks, and a digest of their lengths if they are shuffled: their borders define the order.

        The borders depend on the columns that are read, too.
        """
        if self.order in (Order.STORED, Order.GLOBAL):
            return len(self.rows)
        digest = hashlib.blake2b(self.rows.astype("<i8").tobytes(), digest_size=16).hexdigest()
        return f"{len(self.rows)} ({digest})"

    def shard(self, number: int, count: int, epoch: int, before: Sequence[LayoutProgress] = ()) -> Shard:
        """Return shard `number` of `count` of the rows of an epoch that were not read in the progress `before`."""
        return Shard(self, number, count, EpochOrder(self, epoch), self.remaining(before, epoch))

    def remaining(self, before: Sequence[LayoutProgress], epoch: int) -> tuple[RowSpan, ...]:
        """Return the positions of the rows of an epoch that were not read in the progress `before`."""
        spans: tuple[RowSpan, ...] = (RowSpan(0, self.total),)
        for ranks, workers, step in before:
            order, count = EpochOrder(self, epoch), ranks * workers
            shards = [Shard(self, number, count, order, spans) for number in range(count)]
            remaining: list[RowSpan] = []
            for rank in range(ranks):
                own = shards[rank * workers : (rank + 1) * workers]
                steps = dict(turns([len(shard) for shard in own], step))
                remaining += [span for number, shard in enumerate(own) for span in shard.remaining(steps[number])]
            spans = tuple(remaining)
        return spans


class EpochOrder:
    """The order of the rows of one epoch."""

    def __init__(self, plan: Plan, epoch: int) -> None:
        self.plan = plan
        self.epoch = epoch
        self._chunk = -1, np.empty(0, np.int64)  # number and rows of the chunk that was computed last

    @cached_property
    def _blocks(self) -> Positions:
        """The numbers of the blocks, in the order of the epoch."""
        blocks = len(self.plan.rows)
        if self.plan.order is Order.STORED:
            return np.arange(blocks)
        return shuffled(blocks, self.plan.seed, self.epoch, _BLOCK_ORDER)

    @cached_property
    def _ends(self) -> Positions:
        """The end position of each block in the epoch's order of blocks."""
        return np.cumsum(self.plan.rows[self._blocks])

    @cached_property
    def _permutation(self) -> Permutation:
        return Permutation(self.plan.total, self.plan.seed, self.epoch, _ROW_ORDER)

    def pieces(self, span: RowSpan) -> Iterator[Piece]:
        """Yield the pieces of blocks at these positions, before the rows of windows are shuffled."""
        at, stop = span
        number = int(np.searchsorted(self._ends, at, side="right"))  # in the order of the epoch
        while at < stop:
            block = int(self._blocks[number])
            begin = int(self._ends[number] - self.plan.rows[block])
            end = min(stop, int(self._ends[number]))
            if at < end:
                yield Piece(block, at - begin, end - begin)
            at, number = end, number + 1

    def window(self, number: int) -> tuple[RowSpan, Positions]:
        """Return the positions of a window, and the shuffled order of its rows, as positions within the window."""
        size = self.plan.window
        span = RowSpan(number * size, min((number + 1) * size, self.plan.total))
        return span, shuffled(span.stop - span.start, self.plan.seed, self.epoch, _WINDOW_ORDER, 0, number)

    def rows(self, span: RowSpan) -> Positions:
        """Return the numbers of the rows at these positions of a `GLOBAL` order."""
        chunks = []
        for number in range(span.start // _CHUNK, -(-span.stop // _CHUNK)):
            first = number * _CHUNK
            if self._chunk[0] != number:
                self._chunk = number, self._compute_rows(RowSpan(first, min(first + _CHUNK, self.plan.total)))
            chunks.append(self._chunk[1][max(0, span.start - first) : span.stop - first])
        return np.concatenate(chunks)

    def _compute_rows(self, span: RowSpan) -> Positions:
        places = self._permutation.at(span.start, span.stop)
        weights = self.plan.weights
        if weights is None:
            return places
        # Each place has an equal share of the sum of the weights. So the number of times that a row comes differs by
        # less than one from its share of the epoch. The offset gives the same chance to all rows.
        seeds = np.random.SeedSequence((self.plan.seed, self.epoch, _WEIGHT_OFFSET))
        offset = np.random.PCG64(seeds).random_raw() / 2**64
        points = (places + offset) * (weights[-1] / self.plan.total)
        last = np.searchsorted(weights, weights[-1])  # the last row with a weight; rounding must not lead past it
        rows: Positions = np.minimum(np.searchsorted(weights, points, side="right"), last).astype(np.int64, copy=False)
        return rows


@dataclass(frozen=True, eq=False)
class Shard:
    """A part of the spans of an epoch: their positions are consecutive. Shards differ by one row at most."""

    plan: Plan
    number: int
    count: int
    order: EpochOrder
    spans: tuple[RowSpan, ...]

    @cached_property
    def _total(self) -> int:
        """The number of rows of all shards."""
        return sum(stop - start for start, stop in self.spans)

    @property
    def _first(self) -> int:
        """The position in the spans, taken together, of the shard's first row."""
        return self.number * self._total // self.count

    @property
    def rows(self) -> int:
        """The number of rows of the shard, including rows that `drop_last` leaves out."""
        return (self.number + 1) * self._total // self.count - self._first

    @property
    def _unsplit(self) -> int:
        """The number of batches before the last is split. The last may be incomplete."""
        return -(-self.rows // self.plan.batch_size)

    @property
    def _splits_last(self) -> bool:
        """Whether the last batch is split in two, since shards with one more row have one more batch."""
        max_rows = -(-self._total // self.count)
        has_fewer = self._unsplit < -(-max_rows // self.plan.batch_size)
        return has_fewer and self.rows > 0 and self.plan.batch_size > 1

    def __len__(self) -> int:
        """Return the number of batches of the shard, which is the same for all shards.

        Without `drop_last`, there is an exception: if there are fewer rows than shards, or `batch_size` is 1, some
        shards have one batch less.
        """
        if self.plan.drop_last:
            return self._total // self.count // self.plan.batch_size
        return self._unsplit + self._splits_last

    def extent(self, step: int) -> tuple[int, int]:
        """Return the range of the shard's rows in batch number `step`, as its start and its exclusive end."""
        size = self.plan.batch_size
        if not self.plan.drop_last and self._splits_last and step >= self._unsplit - 1:
            begin, end = (self._unsplit - 1) * size, self.rows
            middle = (begin + end + 1) // 2
            return (begin, middle) if step == self._unsplit - 1 else (middle, end)
        return step * size, min((step + 1) * size, self.rows)

    def batch(self, step: int) -> list[RowSpan]:
        """Return the positions of batch number `step`."""
        return self._within(*self.extent(step))

    def remaining(self, step: int) -> list[RowSpan]:
        """Return the positions of the shard's rows after its first `step` batches, including those left out."""
        return self._within(self.extent(step - 1)[1] if step else 0, self.rows)

    def _within(self, start: int, stop: int) -> list[RowSpan]:
        """Return the positions of the shard's rows from `start` up to, but not including, `stop`."""
        start, stop, spans = start + self._first, stop + self._first, []
        for begin, end in self.spans:
            length = end - begin
            first, last = max(0, start), min(stop, length)
            if first < last:
                spans.append(RowSpan(begin + first, begin + last))
            start, stop = start - length, stop - length
        return spans


def turns(lengths: Sequence[int], batches: int) -> list[tuple[int, int]]:
    """Compute the order in which shards give their next batches, if each shard gives one batch in turn.

    Args:
        lengths: The number of batches of each shard.
        batches: The number of batches that all shards together have given already.

    Returns:
        A pair for each shard, in the order of their turns: the number of the shard, and the number of its next batch.
        Shards that have given all of their batches come last.
    """
    count = len(lengths)
    rounds = min(batches // count, *lengths)
    steps, remaining = [rounds] * count, batches - rounds * count
    waiting, finished = deque(range(count)), []
    while remaining and waiting:
        number = waiting.popleft()
        if steps[number] == lengths[number]:
            finished.append(number)
            continue
        steps[number] += 1
        remaining -= 1
        waiting.append(number)
    return [(number, steps[number]) for number in (*waiting, *finished)]
