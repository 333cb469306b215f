"""Batches for training, as NumPy arrays: shuffled, of one shard, and from where a run was interrupted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from dissociated.client.dataset import DatasetHandle
from dissociated.errors import OptionError
from dissociated.training.blocks import Blocks, slice_pieces
from dissociated.training.columns import Access, ArrayColumns, Column, Lender, row_width, take
from dissociated.training.plan import Plan, Shard

_WINDOW_ROWS = 1 << 16
_WINDOW_BYTES = 1 << 26


@dataclass(kw_only=True, eq=False)
class Sampling:
    """Which batches are made of a dataset. Raises OptionError for what makes no sense.

    - `columns`: these alone. They must be numbers, without nulls, or lists of one size or tensors of one shape of them.
    - `batch_size`: rows of a batch.
    - `shuffle`: in an order that each epoch has for itself: first the record batches are shuffled, then the rows.
    - `buffer_size`: how many rows are shuffled together, and held in memory. Left out: 65,536, or as many as have
      64 MiB. With 0, rows keep their order within a record batch.
    - `seed`: decides the orders of all epochs.
    - `drop_last`: batches that are not full are left out.
    - `as_arrow`: columns that are given as pyarrow Arrays: texts, nested ones, those with nulls.
    - `rank`, `world_size`: which part of so many is read. All parts together are every row once, and as many batches
      each, unless batches have one row or there are fewer rows than parts. Left out: everything; for PyTorch the part
      of this process in torch.distributed, where that is initialised.
    - `writable`: arrays and tensors have memory of their own, as shuffled rows have anyway. Left out: they lie in the
      server's memory where they can. Nobody can write to NumPy's then. PyTorch's can be written to, and that changes
      nothing but the tensor.
    """

    columns: Sequence[str] | None = None
    batch_size: int = 1024
    shuffle: bool = False
    seed: int = 0
    buffer_size: int | None = None
    drop_last: bool = False
    as_arrow: Sequence[str] = ()
    rank: int | None = None
    world_size: int | None = None
    writable: bool = False

    def __post_init__(self) -> None:
        if not _is_count(self.batch_size) or self.batch_size < 1:
            raise OptionError(f"batch_size is a number of rows, 1 or more, not {self.batch_size!r}")
        if not _is_count(self.seed):
            raise OptionError(f"seed is a number, 0 or more, not {self.seed!r}")
        if self.buffer_size is not None and not _is_count(self.buffer_size):
            raise OptionError(f"buffer_size is a number of rows, 0 or more, not {self.buffer_size!r}")
        if (self.rank is None) != (self.world_size is None):
            raise OptionError("give rank and world_size, or neither")
        rank, world_size = self.part
        if not _is_count(world_size) or not _is_count(rank) or rank >= world_size:
            raise OptionError(f"rank is a number from 0 up to world_size, not {rank!r} of {world_size!r}")

    @property
    def part(self) -> tuple[int, int]:
        """Which part of how many is read."""
        return (0, 1) if self.rank is None or self.world_size is None else (self.rank, self.world_size)

    def window(self, schema: pa.Schema) -> int:
        """How many rows are shuffled together."""
        if not self.shuffle or self.buffer_size == 0:
            return 0
        rows = min(_WINDOW_ROWS, _WINDOW_BYTES // row_width(schema)) if self.buffer_size is None else self.buffer_size
        return max(1, -(-rows // self.batch_size)) * self.batch_size


class Examples:
    """A version of a dataset, to be read in batches by any number of shards, in this process and in others."""

    def __init__(self, dataset: DatasetHandle, sampling: Sampling, access: Access) -> None:
        self.dataset = dataset
        self._access = access
        self._blocks = Blocks(dataset, sampling.columns, sampling.batch_size, access is Access.PRIVATE)
        self._columns = ArrayColumns(self._blocks.schema, sampling.as_arrow)
        self.plan = Plan(
            self._blocks.rows,
            sampling.batch_size,
            sampling.shuffle,
            sampling.window(self._blocks.schema),
            sampling.seed,
            sampling.drop_last,
        )

    def read(self, shard: Shard, first: int = 0) -> Iterator[dict[str, Column]]:
        """The batches of a shard, from number `first`."""
        lender = Lender(self._access, self._blocks.find_region)
        for batch in self._read(shard, first):
            yield {
                name: lender.lend(column) if isinstance(column, np.ndarray) else column
                for name, column in batch.items()
            }

    def _read(self, shard: Shard, first: int) -> Iterator[dict[str, Column]]:
        """The same, as they lie: arrays that can be written to have memory of their own."""
        window = self.plan.window
        loaded: tuple[int, list[pa.RecordBatch]] | None = None  # the block that was read last
        opened: tuple[int, dict[str, Column], Any] | None = None  # a window, and the order of its rows

        def load(start: int, stop: int) -> dict[str, Column]:
            nonlocal loaded
            pieces: list[pa.RecordBatch] = []
            for block, begin, end in shard.pieces(start, stop):
                if loaded is None or loaded[0] != block:
                    loaded = block, self._blocks.read(block)
                pieces += slice_pieces(loaded[1], begin, end)
            return self._columns.join(pieces)

        for step in range(first, len(shard)):
            start, stop = shard.extent(step)
            if not window:
                yield load(start, stop)
                continue
            number = start // window
            if opened is None or opened[0] != number:
                opened = None  # its memory first
                begin, end = number * window, min((number + 1) * window, shard.rows)
                opened = number, load(begin, end), shard.order(number, end - begin)
            _, columns, order = opened
            yield take(columns, order[start - number * window : stop - number * window])

    def describe(self) -> dict[str, Any]:
        """What must be the same for positions to mean the same rows."""
        plan, info = self.plan, self.dataset.info
        return {
            "dataset": info.name,
            "version": info.version,
            "lineage_id": info.lineage_id,
            "rows": plan.total,
            "blocks": len(plan.rows),
            "batch_size": plan.batch_size,
            "shuffle": plan.shuffle,
            "window": plan.window,
            "seed": plan.seed,
            "drop_last": plan.drop_last,
        }


@dataclass
class Position:
    """Which batch comes next: number `step` of an epoch. It can be saved, and another process goes on from it."""

    examples: Examples
    shards: int
    epoch: int = 0
    step: int = 0
    _resumed: bool = field(default=False, repr=False)

    def set_epoch(self, epoch: int) -> None:
        """The next epoch to be read, from its beginning; where a state of that epoch was loaded, from there."""
        if not _is_count(epoch):
            raise OptionError(f"an epoch is a number, 0 or more, not {epoch!r}")
        if not (self._resumed and epoch == self.epoch):
            self.epoch, self.step, self._resumed = epoch, 0, False

    def begin(self) -> int:
        """An epoch is read now. Returns the number of its first batch."""
        if not self._resumed:
            self.step = 0
        self._resumed = False
        return self.step

    def state_dict(self) -> dict[str, Any]:
        """Texts and numbers, as JSON has them."""
        return {"epoch": self.epoch, "step": self.step, "shards": self.shards, **self.examples.describe()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there. Raises OptionError where the state is of something else."""
        for name, expected in self.state_dict().items():
            if name not in state:
                raise OptionError(f"this is no state of such batches: it does not say {name!r}")
            if name not in ("epoch", "step") and state[name] != expected:
                raise OptionError(
                    f"the state is of batches with another {name}, {state[name]!r}, where here it is {expected!r}: "
                    "they would not be the same rows"
                )
        if not _is_count(state["epoch"]) or not _is_count(state["step"]):
            raise OptionError(f"this is no place in an epoch: {state['epoch']!r}, {state['step']!r}")
        self.epoch, self.step, self._resumed = state["epoch"], state["step"], True


@dataclass(kw_only=True, eq=False)
class Batches(Sampling):
    """Batches of a dataset: of each column a NumPy array, by name. Each `for` is an epoch.

    `dataset`, a handle, comes first, by position. The others are those of `Sampling`.

    What is read is the version that the handle stands for, from its first row to its last. `set_epoch` tells the next
    epoch; else it is the one after the last that was read to its end. Raises WrongKind for columns that are no numbers,
    ColumnNotFound, OptionError, and what reading raises.
    """

    dataset: DatasetHandle = field(kw_only=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._examples = Examples(self.dataset, self, Access.COPIED if self.writable else Access.READ_ONLY)
        rank, world_size = self.part
        self._rank = rank
        self._position = Position(self._examples, world_size)

    def __len__(self) -> int:
        """How many batches an epoch has."""
        return len(self._shard())

    def __iter__(self) -> Iterator[dict[str, Column]]:
        position, shard = self._position, self._shard()
        first = position.begin()
        for step, batch in enumerate(self._examples.read(shard, first), first + 1):
            position.step = step
            yield batch
        position.set_epoch(shard.epoch + 1)

    def _shard(self) -> Shard:
        position = self._position
        return self._examples.plan.shard(self._rank, position.shards, position.epoch)

    def set_epoch(self, epoch: int) -> None:
        """The epoch that the next `for` reads. Each has an order of its own."""
        self._position.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Which batch comes next, as JSON has it; `load_state_dict` of as many parts goes on there, exactly."""
        return self._position.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next `for` goes on where that was. Raises OptionError where it was of other rows."""
        self._position.load_state_dict(state)


def _is_count(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= 0
