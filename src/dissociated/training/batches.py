"""Batches for training as NumPy arrays, with their sampling options and the position in an epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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
    """Options that define the batches of a dataset. Raises OptionError for invalid values.

    - `columns`: the columns to read. Default: all. A column must hold numbers without nulls, or fixed-size lists or
      fixed-shape tensors of such numbers; see `as_arrow` for other types.
    - `batch_size`: the number of rows of a batch.
    - `shuffle`: shuffle each epoch in an order of its own: first the record batches, then the rows within a buffer.
    - `buffer_size`: the number of rows that are shuffled together and held in memory. Default: 65,536 rows, but at most
      64 MiB. With 0, only record batches are shuffled, and the rows of a record batch keep their order.
    - `seed`: determines the order of every epoch.
    - `drop_last`: leave out batches that are not full.
    - `as_arrow`: columns to return as pyarrow Arrays: strings, nested types, columns with nulls.
    - `rank`, `world_size`: the number of the part to read, and the number of parts. Together, the parts contain every
      row exactly once. All parts have the same number of batches, unless `batch_size` is 1 or there are fewer rows than
      parts. Default: everything; for PyTorch, the part of this process in `torch.distributed` if that is initialised,
      or else that of `torchrun`.
    - `writable`: return copies that can be written to. Shuffled rows are always copied. Default: arrays and tensors lie
      in the server's memory if possible. NumPy arrays are then read-only; PyTorch tensors can be written to, which
      changes only the tensor.
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
        """The number of the part that is read, and the number of parts."""
        return (0, 1) if self.rank is None or self.world_size is None else (self.rank, self.world_size)

    def window(self, schema: pa.Schema) -> int:
        """Return the number of rows that are shuffled together, a multiple of `batch_size`; 0 if no rows are."""
        if not self.shuffle or self.buffer_size == 0:
            return 0
        rows = min(_WINDOW_ROWS, _WINDOW_BYTES // row_width(schema)) if self.buffer_size is None else self.buffer_size
        return max(1, -(-rows // self.batch_size)) * self.batch_size


class Examples:
    """A version of a dataset that is read in batches by any number of shards, in this process and in others."""

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
        """Yield the batches of a shard, from number `first` on. A batch maps column names to arrays."""
        lender = Lender(self._access, self._blocks.find_region)
        for batch in self._read(shard, first):
            yield {
                name: lender.lend(column) if isinstance(column, np.ndarray) else column
                for name, column in batch.items()
            }

    def _read(self, shard: Shard, first: int) -> Iterator[dict[str, Column]]:
        """Yield the batches before access is applied. Writable arrays have memory of their own."""
        window = self.plan.window
        loaded: tuple[int, list[pa.RecordBatch]] | None = None  # number and batches of the block that was read last
        opened: tuple[int, dict[str, Column], Any] | None = None  # number, columns and row order of the current window

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
                opened = None  # frees the memory of the last window before the next is loaded
                begin, end = number * window, min((number + 1) * window, shard.rows)
                opened = number, load(begin, end), shard.order(number, end - begin)
            _, columns, order = opened
            yield take(columns, order[start - number * window : stop - number * window])

    def describe(self) -> dict[str, Any]:
        """Return the properties that must be equal for two positions to refer to the same rows."""
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
    """The next batch to read, number `step` of an epoch. It can be saved, and resumed in another process."""

    examples: Examples
    count: Callable[[], int]  # returns the number of shards, which a launcher may tell late
    epoch: int = 0
    step: int = 0
    _resumed: bool = field(default=False, repr=False)

    @property
    def shards(self) -> int:
        """The number of shards of an epoch."""
        return self.count()

    def set_epoch(self, epoch: int) -> None:
        """Set the next epoch. It is read from its beginning, unless a state of this epoch was loaded just before."""
        if not _is_count(epoch):
            raise OptionError(f"an epoch is a number, 0 or more, not {epoch!r}")
        if not (self._resumed and epoch == self.epoch):
            self.epoch, self.step, self._resumed = epoch, 0, False

    def begin(self) -> int:
        """Begin to read the epoch. Return the number of the first batch to read."""
        if not self._resumed:
            self.step = 0
        self._resumed = False
        return self.step

    def state_dict(self) -> dict[str, Any]:
        """Return the position as a dict of strings, numbers and booleans, which can be written as JSON."""
        return {"epoch": self.epoch, "step": self.step, "shards": self.shards, **self.examples.describe()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position. Raise OptionError if the state is invalid or refers to other rows."""
        for name, expected in self.state_dict().items():
            if name not in state:
                raise OptionError(f"the state is not one of such batches: {name!r} is missing")
            if name not in ("epoch", "step") and state[name] != expected:
                raise OptionError(
                    f"the state is of batches with another {name}, {state[name]!r}, where here it is {expected!r}: "
                    "they would not be the same rows"
                )
        if not _is_count(state["epoch"]) or not _is_count(state["step"]):
            raise OptionError(f"the state has an invalid position: epoch {state['epoch']!r}, step {state['step']!r}")
        self.epoch, self.step, self._resumed = state["epoch"], state["step"], True


@dataclass(kw_only=True, eq=False)
class Batches(Sampling):
    """Batches of a dataset for training. Each batch maps column names to NumPy arrays; each `for` loop is an epoch.

    `dataset`, a dataset handle, is the only positional argument. The other arguments are the fields of `Sampling`. All
    epochs read the version of the dataset that the handle refers to. Without `set_epoch`, the epoch after the last
    complete one is read next.

    Raises:
        WrongKind: if a column does not hold numbers, and is not in `as_arrow`.
        ColumnNotFound: if the dataset lacks one of the columns.
        OptionError: if an option is invalid.
        DissociatedError: further errors of reading.

    Example:
        ```python
        from dissociated.training import Batches

        batches = Batches(client.dataset("flights"), columns=["distance", "air_time"], batch_size=4096, shuffle=True)
        for batch in batches:
            print(batch["distance"].mean())
        ```
    """

    dataset: DatasetHandle = field(kw_only=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._examples = Examples(self.dataset, self, Access.COPIED if self.writable else Access.READ_ONLY)
        rank, world_size = self.part
        self._rank = rank
        self._position = Position(self._examples, lambda: world_size)

    def __len__(self) -> int:
        """Return the number of batches of the current epoch."""
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
        """Set the epoch that the next `for` loop reads. With `shuffle`, each epoch has an order of its own."""
        self._position.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next batch, which can be written as JSON. See `load_state_dict`."""
        return self._position.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the next `for` loop from a saved position, with exactly the batch that was next.

        Raises:
            OptionError: if the state refers to other rows: to another version, other options or another `world_size`.
        """
        self._position.load_state_dict(state)


def _is_count(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= 0
