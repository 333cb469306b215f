"""The options that define the batches of a dataset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dissociated.errors import OptionError
from dissociated.training.blocks import Blocks
from dissociated.training.launch import find_rank
from dissociated.training.plan import Order

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
      `"window"`, except in a process that trains alone: that is `"global"` if the data is mapped and `buffer_size` is
      not given. A process trains alone if `rank` is not given and no launcher has started other processes.
    - `weights`: read rows in proportion to their weights, in a global shuffle: the name of a column of weights, or the
      weight of each value of a column, such as `{"label": {"rare": 10, "common": 1}}`. An epoch has as many rows as
      without weights. A row comes as often as its share of the weights says, rounded up or down.
    - `buffer_size`: the number of rows of a window, which are held in memory. Default: 16 record batches, and 65,536
      rows or more, but at most about 256 MiB. For strings and nested values, this is the average of the dataset if its
      size is known and all of them are read; otherwise 32 bytes each. With 0, only record batches are shuffled, and
      their rows keep their order.
    - `filter`: the rows to read, as for `read`. Its columns are read before the first batch. Shards are parts of the
      rows that pass.
    - `seed`: determines the order of every epoch.
    - `drop_last`: leave out batches that are not full.
    - `as_arrow`: columns to return as pyarrow Arrays: strings, nested types, columns with nulls.
    - `features`: columns of numbers to pack into one matrix, `batch["features"]`, with a column for each. A mapping has
      the columns of several matrices by name. The type of a matrix is NumPy's common type of its columns. Where that is
      `float64`, an integer, date or decimal beyond 2^53 raises OptionError, since it would be rounded.
    - `codes`: columns of strings or other values to return as numbers, from 0 on, of their distinct values, which
      `dictionaries` has; -1 is null. The distinct values are found before the first batch.
    - `fill`: the numbers that replace the nulls of columns, by column.
    - `mask`: columns whose nulls are 0, or as `fill` says. `batch["x_mask"]` says which values of `x` are not
      null. No column that is read, and no matrix, may have this name.
    - `rank`, `world_size`: the number of the part to read, and the number of parts. Together, the parts contain every
      row exactly once. All parts have the same number of batches, unless `batch_size` is 1 or there are fewer rows than
      parts. Default: everything; for PyTorch, the part of this process in `torch.distributed` if that is initialized,
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
        if not is_count(self.batch_size) or self.batch_size < 1:
            raise OptionError(f"batch_size is a number of rows, 1 or more, not {self.batch_size!r}")
        if self.shuffle not in (False, True, "global", "window"):
            raise OptionError(f"shuffle is True, False, 'global' or 'window', not {self.shuffle!r}")
        if self.shuffle == "global" and self.buffer_size is not None:
            raise OptionError("buffer_size is for shuffle='window': a global shuffle has no buffer")
        matrices = {f"features[{name!r}]": names for name, names in self.matrices.items()}
        for option, names in {
            "columns": self.columns,
            "features": self.features,
            "codes": self.codes,
            **matrices,
        }.items():
            if isinstance(names, str):
                raise OptionError(f"{option} is a list of names: [{names!r}]")
        if isinstance(self.weights, Mapping) and len(self.weights) != 1:
            raise OptionError(f"weights has the values of one column, not of {len(self.weights)}")
        if self.weights is not None and (self.buffer_size is not None or self.shuffle == "window"):
            raise OptionError("weights= needs a global shuffle: leave out buffer_size= and shuffle='window'")
        if not is_count(self.prefetch):
            raise OptionError(f"prefetch is a number of batches, 0 or more, not {self.prefetch!r}")
        if not is_count(self.seed):
            raise OptionError(f"seed is a number, 0 or more, not {self.seed!r}")
        if self.buffer_size is not None and not is_count(self.buffer_size):
            raise OptionError(f"buffer_size is a number of rows, 0 or more, not {self.buffer_size!r}")
        if (self.rank is None) != (self.world_size is None):
            raise OptionError("give rank and world_size, or neither")
        rank, world_size = self.part
        if not is_count(world_size) or not is_count(rank) or rank >= world_size:
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
        return [*dict.fromkeys([*self.columns, *packed, *self.codes])]

    @property
    def matrices(self) -> dict[str, Sequence[str]]:
        """The columns of each matrix, by the name of the matrix."""
        if isinstance(self.features, Mapping):
            return {**self.features}
        return {"features": self.features} if self.features else {}

    @property
    def unmapped_order(self) -> str:
        """The advice to choose an order that needs no mapped data."""
        return "use shuffle='window'" if self.weights is None else "leave out weights="

    def order(self, mapped: bool) -> Order:
        """Return the kind of order for data that is `mapped` into this process, or not.

        Raises:
            OptionError: The order needs mapped data.
        """
        if self.weights is not None or self.shuffle == "global":
            if not mapped:
                single_rows = "shuffle='global'" if self.weights is None else "weights="
                raise OptionError(
                    f"{single_rows} reads single rows, and this dataset cannot be mapped into this process: read it on "
                    f"its host over shm:, uncompressed, or {self.unmapped_order}"
                )
            return Order.GLOBAL
        if not self.shuffle:
            return Order.STORED
        if self.shuffle == "window" or self.buffer_size is not None:
            return Order.BLOCKS if self.buffer_size == 0 else Order.WINDOW
        return Order.GLOBAL if mapped and self._trains_alone else Order.WINDOW

    @property
    def _trains_alone(self) -> bool:
        """Whether no other process needs the same order. Another may map the data later, or not at all."""
        return self.rank is None and self.part[1] == find_rank().world_size == 1

    def window(self, blocks: Blocks) -> int:
        """Return the number of rows that are shuffled together in a `WINDOW` order."""
        if self.buffer_size is not None:
            return max(1, self.buffer_size)
        max_rows = _WINDOW_BYTES // blocks.row_bytes(self.codes)
        return max(1, min(max(_WINDOW_ROWS, _WINDOW_BLOCKS * blocks.longest), max_rows))


def is_count(number: object) -> bool:
    """Return whether this is a whole number, 0 or more."""
    return isinstance(number, int) and not isinstance(number, bool) and number >= 0
