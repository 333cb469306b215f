"""Batches for training as NumPy arrays, with their sampling options and the position in an epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dissociated.client.dataset import DatasetHandle
from dissociated.errors import ColumnNotFound, OptionError
from dissociated.memory.device.registry import open_device
from dissociated.training.blocks import Blocks, slice_pieces
from dissociated.training.columns import Access, ArrayColumns, Column, Lender, join, row_width, take
from dissociated.training.gather import Gatherer
from dissociated.training.launch import is_alone
from dissociated.training.plan import Order, Plan, Progress, Shard, Span

_WINDOW_ROWS = 1 << 16  # the least number of rows of a window by default
_WINDOW_BLOCKS = 16  # number of the longest blocks that fit into a window by default
_WINDOW_BYTES = 1 << 28  # about the most memory that a window takes by default


@dataclass(kw_only=True, eq=False)
class Sampling:
    """Options that define the batches of a dataset. Raises OptionError for invalid values.

    - `columns`: the columns to read, besides those of `features` and `codes`. Default: all. A column must hold numbers
      without nulls, or lists or fixed-shape tensors of such numbers; see `codes`, `fill` and `as_arrow` for others.
    - `batch_size`: the number of rows of a batch.
    - `shuffle`: shuffle each epoch in an order of its own. `"global"` shuffles all rows, which needs data that is
      mapped into this process. `"window"` shuffles the record batches, and then the rows within a window. `True` is
      `"global"` if the data is mapped, `buffer_size` is not given, and all ranks are on this host; else `"window"`.
    - `weights`: read rows in proportion to their weights, in a global shuffle: the name of a column of weights, or the
      weight of each value of a column, such as `{"label": {"rare": 10, "common": 1}}`. An epoch has as many rows as
      without weights. A row comes as often as its share of the weights says, rounded up or down.
    - `buffer_size`: the number of rows of a window, which are held in memory. Default: 16 record batches, and 65,536
      rows or more, but at most 256 MiB. With 0, only record batches are shuffled, and their rows keep their order.
    - `filter`: the rows to read, as for `read`. Its columns are read before the first batch. Shards are parts of the
      rows that pass.
    - `seed`: determines the order of every epoch.
    - `drop_last`: leave out batches that are not full.
    - `as_arrow`: columns to return as pyarrow Arrays: strings, nested types, columns with nulls.
    - `features`: columns of numbers to pack into one matrix, `batch["features"]`, with a column for each. A mapping has
      the columns of several matrices by name. The type of a matrix holds the values of all of its columns.
    - `codes`: columns of strings or other values to return as numbers, from 0 on, of their distinct values, which
      `dictionaries` has; -1 is null. The distinct values are found before the first batch.
    - `fill`: the numbers that replace the nulls of columns, by column.
    - `mask`: columns whose nulls are 0, or as `fill` says. `batch["x_mask"]` says which values of `x` are not
      null.
    - `rank`, `world_size`: the number of the part to read, and the number of parts. Together, the parts contain every
      row exactly once. All parts have the same number of batches, unless `batch_size` is 1 or there are fewer rows than
      parts. Default: everything; for PyTorch, the part of this process in `torch.distributed` if that is initialised,
      or else that of `torchrun`.
    - `writable`: return copies that can be written to. Shuffled rows are always copied. Default: arrays and tensors lie
      in the server's memory if possible. NumPy arrays are then read-only; PyTorch tensors can be written to, which
      changes only the tensor.
    - `device`: the device to copy batches to, such as `"cuda:0"`. `Batches` then gives a `DeviceColumn` for each
      column, and PyTorch's loader a tensor on the device.
    - `prefetch`: the number of batches that are copied to the device while an earlier one is used.
    """

    columns: Sequence[str] | None = None
    batch_size: int = 1024
    filter: Any = None
    shuffle: bool | str = False
    weights: str | Mapping[str, Mapping[Any, float]] | None = None
    seed: int = 0
    buffer_size: int | None = None
    drop_last: bool = False
    as_arrow: Sequence[str] = ()
    features: Sequence[str] | Mapping[str, Sequence[str]] = ()
    codes: Sequence[str] = ()
    fill: Mapping[str, Any] = field(default_factory=dict)
    mask: Sequence[str] = ()
    rank: int | None = None
    world_size: int | None = None
    writable: bool = False
    device: Any = None
    prefetch: int = 2

    def __post_init__(self) -> None:
        if not _is_count(self.batch_size) or self.batch_size < 1:
            raise OptionError(f"batch_size is a number of rows, 1 or more, not {self.batch_size!r}")
        if self.shuffle not in (False, True, "global", "window"):
            raise OptionError(f"shuffle is True, False, 'global' or 'window', not {self.shuffle!r}")
        if self.shuffle == "global" and self.buffer_size is not None:
            raise OptionError("buffer_size is for shuffle='window': a global shuffle has no buffer")
        if isinstance(self.columns, str):
            raise OptionError(f"columns is a list of names: [{self.columns!r}]")
        if isinstance(self.weights, Mapping) and len(self.weights) != 1:
            raise OptionError(f"weights has the values of one column, not of {len(self.weights)}")
        if self.weights is not None and (self.buffer_size is not None or self.shuffle == "window"):
            raise OptionError("weights= needs a global shuffle: leave out buffer_size= and shuffle='window'")
        if isinstance(self.features, str):
            raise OptionError(f"features is a list of names: [{self.features!r}]")
        if not _is_count(self.prefetch):
            raise OptionError(f"prefetch is a number of batches, 0 or more, not {self.prefetch!r}")
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

    @property
    def read_columns(self) -> Sequence[str] | None:
        """The names of all columns to read; None for all of the dataset."""
        if self.columns is None:
            return None
        packed = [name for columns in self.matrices.values() for name in columns]
        return [*dict.fromkeys([*self.columns, *packed, *_names("codes", self.codes)])]

    @property
    def matrices(self) -> dict[str, Sequence[str]]:
        """The columns of each matrix, by the name of the matrix."""
        if isinstance(self.features, Mapping):
            return {**self.features}
        return {"features": self.features} if self.features else {}

    def order(self, mapped: bool) -> Order:
        """Return the kind of order for data that is `mapped` into this process, or not.

        Raises:
            OptionError: if the order needs mapped data.
        """
        if self.weights is not None or self.shuffle == "global":
            if not mapped:
                option = "shuffle='global'" if self.weights is None else "weights="
                raise OptionError(
                    f"{option} reads single rows, and this dataset cannot be mapped into this process: read it on its "
                    "host over shm:, uncompressed, or use shuffle='window'"
                )
            return Order.GLOBAL
        if not self.shuffle:
            return Order.STORED
        if self.shuffle == "window" or self.buffer_size is not None:
            return Order.BLOCKS if self.buffer_size == 0 else Order.WINDOW
        return Order.GLOBAL if mapped and is_alone(self.part[1]) else Order.WINDOW

    def window(self, blocks: Blocks) -> int:
        """Return the number of rows that are shuffled together in a `WINDOW` order."""
        if self.buffer_size is not None:
            return max(1, self.buffer_size)
        most = _WINDOW_BYTES // row_width(blocks.schema)
        return max(1, min(max(_WINDOW_ROWS, _WINDOW_BLOCKS * blocks.longest), most))


class Examples:
    """A version of a dataset that is read in batches by any number of shards, in this process and in others."""

    def __init__(self, dataset: DatasetHandle, sampling: Sampling, access: Access) -> None:
        self.dataset = dataset
        self._sampling = sampling
        self._access = access
        self._blocks = Blocks(
            dataset, sampling.read_columns, sampling.batch_size, access is not Access.COPIED, sampling.filter
        )
        self._columns = ArrayColumns(
            self._blocks.schema,
            sampling.as_arrow,
            sampling.matrices,
            {name: self._blocks.distinct(name) for name in _names("codes", sampling.codes)},
            sampling.fill,
            sampling.mask,
        )
        self._is_mapped = self._blocks.mapped(()) is not None
        self._gatherer: Gatherer | None = None
        self._plan: Plan | None = None
        if sampling.weights is not None:
            name = sampling.weights if isinstance(sampling.weights, str) else next(iter(sampling.weights))
            if name not in dataset.schema.names:
                raise ColumnNotFound(f"weights= has {name!r}; the columns are {', '.join(dataset.schema.names)}")
        if sampling.order(self._is_mapped) is Order.GLOBAL:
            assert self.plan  # raises the errors of the weights at once

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_gatherer": None}

    @property
    def plan(self) -> Plan:
        """The plan of every epoch. The default order depends on the number of ranks, which a launcher may tell late."""
        sampling = self._sampling
        order = sampling.order(self._is_mapped)
        if self._plan is None or self._plan.order is not order:
            self._plan = Plan(
                self._blocks.rows,
                sampling.batch_size,
                order,
                sampling.window(self._blocks) if order is Order.WINDOW else 0,
                sampling.seed,
                sampling.drop_last,
                self._sum_weights() if sampling.weights is not None and len(self._blocks.rows) else None,
            )
        return self._plan

    def _sum_weights(self) -> npt.NDArray[np.float64]:
        """Return the sum of the weights of all rows up to each row."""
        import pyarrow.compute as pc  # on first use: it is slow to import

        weights, classes = self._sampling.weights, None
        if isinstance(weights, Mapping):
            ((weights, classes),) = weights.items()
        assert weights is not None, "the caller has checked this"
        batches = self._blocks.mapped([weights])
        assert batches is not None, "the order needs mapped data"
        values = pa.chunked_array([batch.column(0) for batch in batches])
        if classes is not None:
            if pa.types.is_dictionary(values.type):
                values = values.cast(values.type.value_type)
            numbers = pc.index_in(values, pa.array([*classes], values.type))
            if numbers.null_count:
                missing = values.filter(numbers.is_null())[0].as_py()
                raise OptionError(f"weights= has no weight for the value {missing!r} of column {weights!r}")
            found = np.array([*classes.values()], np.float64)[numbers.to_numpy()]
        elif values.null_count:
            raise OptionError(f"column {weights!r} has nulls, which are no weights")
        else:
            found = values.to_numpy().astype(np.float64)
        passing = self._blocks.passing()
        found = found if passing is None else found[passing]
        sums = np.cumsum(found)
        if found.size and not (np.isfinite(sums[-1]) and found.min() >= 0 and sums[-1] > 0):
            raise OptionError(f"the weights of {weights!r} must be 0 or more, with some above 0, and finite")
        return sums

    def read(self, shard: Shard, first: int = 0) -> Iterator[dict[str, Column]]:
        """Yield the batches of a shard, from number `first` on. A batch maps column names to arrays."""
        lender = Lender(self._access, self._blocks.find_region)
        for batch in self._gather(shard, first) if shard.plan.order is Order.GLOBAL else self._read(shard, first):
            finished = ((name, self._columns.finish(name, column)) for name, column in batch.items())
            yield {name: lender.lend_column(column) for name, column in finished}

    def deliver(self, shard: Shard, first: int = 0) -> Iterator[dict[str, Any]]:
        """Yield the batches of `read`, on the device of the sampling if it has one."""
        device = self._sampling.device
        batches = self.read(shard, first)
        if device is None:
            return batches
        from dissociated.training.prefetch import prefetch  # on first use: few read onto a device

        return prefetch(batches, open_device(device), self._sampling.prefetch)

    @property
    def dictionaries(self) -> dict[str, pa.Array]:
        """The distinct values of the columns in `codes`."""
        return self._columns.codes

    def _gather(self, shard: Shard, first: int) -> Iterator[dict[str, Column]]:
        """Yield batches of single rows, which are copied from mapped memory."""
        if self._gatherer is None:
            batches = self._blocks.mapped(self._blocks.schema.names)
            if batches is None:  # such as a worker that has too many descriptors open
                raise OptionError(
                    f"{self.dataset.name!r} was mapped where this order of its rows was chosen, but cannot be mapped "
                    "in this process: use shuffle='window'"
                )
            self._gatherer = Gatherer(batches, self._columns)
        passing = self._blocks.passing()
        for step in range(first, len(shard)):
            rows = np.concatenate([shard.order.rows(span) for span in shard.batch(step)])
            yield self._gatherer.take(rows if passing is None else passing[rows])

    def _read(self, shard: Shard, first: int) -> Iterator[Mapping[str, Column]]:
        """Yield the batches before access is applied. Writable arrays have memory of their own."""
        window = shard.plan.window
        loaded: tuple[int, list[pa.RecordBatch]] | None = None  # number and batches of the block that was read last
        opened: tuple[int, dict[str, Column], Any] | None = None  # number, columns and row order of the current window

        def load(spans: Sequence[Span], by_row: bool) -> dict[str, Column]:
            nonlocal loaded
            pieces: list[pa.RecordBatch] = []
            for span in spans:
                for block, begin, end in shard.order.pieces(span):
                    if loaded is None or loaded[0] != block:
                        loaded = block, self._blocks.read(block)
                    pieces += slice_pieces(loaded[1], begin, end)
            return self._columns.join(pieces, by_row)

        for step in range(first, len(shard)):
            spans = shard.batch(step)
            if not window:
                yield load(spans, False)
                continue
            taken = []
            for span in spans:
                for number in range(span.start // window, -(-span.stop // window)):
                    if opened is None or opened[0] != number:
                        opened = None  # frees the memory of the last window before the next is loaded
                        whole, order = shard.order.window(number)
                        opened = number, load([whole], True), order
                    _, columns, order = opened
                    start = number * window
                    taken.append(take(columns, order[max(0, span.start - start) : span.stop - start]))
            yield join(taken)

    def describe(self) -> dict[str, Any]:
        """Return the properties that must be equal for two positions to refer to the same rows."""
        plan, info = self.plan, self.dataset.info
        return {
            "dataset": info.name,
            "version": info.version,
            "lineage_id": info.lineage_id,
            "filter": None if self._sampling.filter is None else str(self._sampling.filter),
            "weights": None if self._sampling.weights is None else str(self._sampling.weights),
            "batch_size": plan.batch_size,
            "shuffle": plan.order.value,
            "window": plan.window,
            "seed": plan.seed,
            "drop_last": plan.drop_last,
            "rows": plan.total,
            "blocks": len(plan.rows),
        }


class Position:
    """The next batch to read in an epoch. It can be saved, and resumed in another process.

    `layout` returns the number of ranks, and of workers of each rank, which a launcher may tell late.
    """

    def __init__(self, examples: Examples, layout: Callable[[], tuple[int, int]]) -> None:
        self.examples = examples
        self.epoch = 0
        self._layout = layout
        self._progress: list[Progress] = []  # of this epoch, in each layout that has read a part of it
        self._resumed = False

    @property
    def step(self) -> int:
        """The number of batches that each rank has received in the current layout."""
        return self._current()[1]

    @step.setter
    def step(self, step: int) -> None:
        self._progress = [*self.before, Progress(*self._layout(), step)]

    @property
    def before(self) -> list[Progress]:
        """The progress of this epoch in earlier layouts."""
        return self._current()[0]

    def _current(self) -> tuple[list[Progress], int]:
        *before, last = self._progress or [Progress(*self._layout(), 0)]
        if last[:2] == self._layout():
            return before, last.step
        return ([*before, last] if last.step else before), 0

    def set_epoch(self, epoch: int) -> None:
        """Set the next epoch. It is read from its beginning, unless a state of this epoch was loaded just before."""
        if not _is_count(epoch):
            raise OptionError(f"an epoch is a number, 0 or more, not {epoch!r}")
        if not (self._resumed and epoch == self.epoch):
            self.epoch, self._progress, self._resumed = epoch, [], False

    def start(self, epoch: int, before: Sequence[Progress]) -> None:
        """Start to read the rest of an epoch, after the progress of earlier layouts."""
        self.epoch, self._progress = epoch, [*before]

    def begin(self) -> int:
        """Begin to read the epoch. Return the number of the first batch to read."""
        if not self._resumed:
            self._progress = []
        self._resumed = False
        return self.step

    def state_dict(self) -> dict[str, Any]:
        """Return the position as a dict of strings, numbers, booleans and lists, which can be written as JSON."""
        progress = self._progress or [Progress(*self._layout(), 0)]
        return {"epoch": self.epoch, "progress": [[*each] for each in progress], **self.examples.describe()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position. Raise OptionError if the state is invalid or refers to other rows."""
        for name, expected in self.state_dict().items():
            if name not in state:
                raise OptionError(f"the state is not one of such batches: {name!r} is missing")
            if name not in ("epoch", "progress") and state[name] != expected:
                raise OptionError(
                    f"the state has {name} {state[name]!r}, and these batches have {name} {expected!r}: they would not "
                    "be the same rows"
                )
        epoch, progress = state["epoch"], state["progress"]
        if not _is_count(epoch) or not isinstance(progress, list) or not all(map(_is_progress, progress)):
            raise OptionError(f"the state has an invalid position: epoch {epoch!r}, progress {progress!r}")
        self.epoch, self._progress, self._resumed = epoch, [Progress(*each) for each in progress], True


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
        self._position = Position(self._examples, self._layout)

    def __len__(self) -> int:
        """Return the number of batches of the current epoch, with those that were read before it was resumed."""
        return sum(each.step for each in self._position.before) + len(self._shard())

    def __iter__(self) -> Iterator[dict[str, Column]]:
        position = self._position
        first, epoch = position.begin(), position.epoch
        for step, batch in enumerate(self._examples.deliver(self._shard(), first), first + 1):
            position.step = step
            yield batch
        position.set_epoch(epoch + 1)

    def _layout(self) -> tuple[int, int]:
        return self.part[1], 1

    def _shard(self) -> Shard:
        position = self._position
        return self._examples.plan.shard(*self.part, position.epoch, position.before)

    @property
    def dictionaries(self) -> dict[str, pa.Array]:
        """The distinct values of the columns in `codes`, of which the batches have the positions."""
        return self._examples.dictionaries

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that the next `for` loop reads. With `shuffle`, each epoch has an order of its own."""
        self._position.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next batch, which can be written as JSON. See `load_state_dict`."""
        return self._position.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the next `for` loop from a saved position, with exactly the batch that was next.

        With another `world_size` than before, the rows that were not read are divided anew.

        Raises:
            OptionError: if the state refers to other rows: to another version or other options.
        """
        self._position.load_state_dict(state)


def _names(option: str, names: Sequence[str]) -> Sequence[str]:
    if isinstance(names, str):
        raise OptionError(f"{option} is a list of names: [{names!r}]")
    return names


def _is_progress(progress: object) -> bool:
    if not isinstance(progress, list | tuple) or len(progress) != 3 or not all(map(_is_count, progress)):
        return False
    return all(progress[:2])


def _is_count(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= 0
