"""The rows of a dataset as batches of NumPy arrays, or on a device."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from copy import copy
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import types

from dissociated.client.dataset import DatasetHandle
from dissociated.codec.batches import BatchReader
from dissociated.codec.device import to_device
from dissociated.codec.dlpack import DeviceColumn
from dissociated.codec.filter.row_filter import filter_identity
from dissociated.errors import ColumnNotFound, OptionError, WrongKind
from dissociated.memory.device.base import Device
from dissociated.memory.device.registry import open_device
from dissociated.training.access import Access, Lender
from dissociated.training.blocks import Blocks, slice_pieces
from dissociated.training.columns import Array, ArrayColumns, Column, encode, join, plain, take
from dissociated.training.gather import Gatherer
from dissociated.training.permutation import Positions
from dissociated.training.plan import Order, Plan, RowSpan, Shard
from dissociated.training.sampling import Sampling


class Examples:
    """A version of a dataset that is read in batches by any number of shards, in this process and in others."""

    def __init__(self, dataset: DatasetHandle, sampling: Sampling, access: Access) -> None:
        self.dataset = dataset
        # A copy of the options: `sampling` refers to these examples, and a reference to it would keep the mapped memory
        # until the garbage collector finds both.
        self._sampling = copy(sampling)
        self._access = access
        self._blocks = Blocks(
            dataset, sampling.read_columns, sampling.batch_size, access is not Access.COPIED, sampling.filter
        )
        self._columns = ArrayColumns(
            self._blocks.schema,
            sampling.as_arrow,
            sampling.matrices,
            {name: self._blocks.distinct(name) for name in sampling.codes},
            sampling.fill,
            sampling.mask,
        )
        self._filter = None if sampling.filter is None else filter_identity(sampling.filter, dataset.schema)
        self._is_mapped = self._blocks.mapped(()) is not None
        self._gatherer: Gatherer | None = None  # made on first use, in each process
        self._plan: Plan | None = None  # of the order of the last use
        if sampling.weights is not None:
            name = sampling.weights if isinstance(sampling.weights, str) else next(iter(sampling.weights))
            if name not in dataset.schema.names:
                raise ColumnNotFound(f"weights= has {name!r}; the columns are {', '.join(dataset.schema.names)}")
        if sampling.order(self._is_mapped) is Order.GLOBAL:
            self._plan = self.plan  # raises the errors of the weights now

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_gatherer": None}

    @property
    def ranks(self) -> int:
        """The number of ranks, which a launcher may tell late."""
        return self._sampling.part[1]

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
        """Return the sum of the weights of all rows that pass the filter, up to each row."""
        weights, classes = self._sampling.weights, None
        if isinstance(weights, Mapping):
            ((weights, classes),) = weights.items()
        assert weights is not None, "the caller has checked this"
        batches = self._blocks.mapped([weights])
        assert batches is not None, "the order needs mapped data"
        type_ = self.dataset.schema.field(weights).type
        values, passing = pa.chunked_array([batch.column(0) for batch in batches], type_), self._blocks.passing()
        if classes is not None:
            row_weights = _class_weights(weights, values, classes, passing)
        elif not any(test(type_) for test in (types.is_integer, types.is_floating, types.is_boolean, types.is_decimal)):
            raise WrongKind(
                f"column {weights!r} is {type_}, and weights are numbers: give weights= a mapping from the column to "
                "the weight of each of its values"
            )
        else:
            values = values if passing is None else values.take(pa.array(passing))
            if values.null_count:
                raise OptionError(f"column {weights!r} has nulls, which are no weights")
            row_weights = values.cast(pa.float64(), safe=False).to_numpy()
        sums = np.cumsum(row_weights)
        if row_weights.size and not (np.isfinite(sums[-1]) and row_weights.min() >= 0 and sums[-1] > 0):
            raise OptionError(f"the weights of {weights!r} must be 0 or more, with some above 0, and finite")
        return sums

    def read(self, shard: Shard, first: int = 0) -> Iterator[dict[str, Column]]:
        """Yield the batches of a shard, from number `first` on. A batch maps column names to arrays."""
        lender = Lender(self._access, self._blocks.find_region)
        read_batches = self._read_rows if shard.plan.order is Order.GLOBAL else self._read_blocks
        for batch in read_batches(shard, first):
            finished = ((name, self._columns.finish(name, column)) for name, column in batch.items())
            yield {name: lender.lend_column(column) for name, column in finished}

    def deliver(self, shard: Shard, first: int = 0) -> Iterator[dict[str, Any]]:
        """Yield the batches of `read`, on the device of the sampling if it has one."""
        device = self._sampling.device
        batches = self.read(shard, first)
        if device is None:
            return batches
        return _prefetch(batches, open_device(device), self._sampling.prefetch)

    @property
    def dictionaries(self) -> dict[str, pa.Array]:
        """The distinct values of the columns in `codes`."""
        return self._columns.codes

    def _read_rows(self, shard: Shard, first: int) -> Iterator[Mapping[str, Column]]:
        """Yield batches of single rows, which are copied from mapped memory."""
        if self._gatherer is None:
            batches = self._blocks.mapped(self._blocks.schema.names)
            if batches is None:  # such as a worker that has too many descriptors open
                raise OptionError(
                    f"{self.dataset.name!r} was mapped where this order of its rows was chosen, but cannot be mapped "
                    f"in this process: {self._sampling.unmapped_order}"
                )
            self._gatherer = Gatherer(batches, self._columns)
        passing = self._blocks.passing()
        for step in range(first, len(shard)):
            rows = np.concatenate([shard.order.rows(span) for span in shard.batch(step)])
            yield self._gatherer.take(rows if passing is None else passing[rows])

    def _read_blocks(self, shard: Shard, first: int) -> Iterator[Mapping[str, Column]]:
        """Yield batches of consecutive rows of blocks or windows. Writable arrays have memory of their own."""
        window = shard.plan.window
        loaded: tuple[int, list[pa.RecordBatch]] | None = None  # number and batches of the block that was read last
        opened: tuple[int, dict[str, Column], Any] | None = None  # number, columns and row order of the current window

        def load(spans: Sequence[RowSpan], by_row: bool) -> dict[str, Column]:
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
            parts = []
            for span in spans:
                for number in range(span.start // window, -(-span.stop // window)):
                    if opened is None or opened[0] != number:
                        opened = None  # frees the memory of the last window before the next is loaded
                        whole, order = shard.order.window(number)
                        opened = number, load([whole], True), order
                    _, columns, order = opened
                    start = number * window
                    parts.append(take(columns, order[max(0, span.start - start) : span.stop - start]))
            yield join(parts)

    def describe(self) -> dict[str, Any]:
        """Return the properties that must be equal for two positions to refer to the same rows."""
        plan, info = self.plan, self.dataset.info
        return {
            "dataset": info.name,
            "version": info.version,
            "lineage_id": info.lineage_id,
            "filter": self._filter,
            "weights": None if self._sampling.weights is None else str(self._sampling.weights),
            "batch_size": plan.batch_size,
            "shuffle": plan.order.value,
            "window": plan.window,
            "seed": plan.seed,
            "drop_last": plan.drop_last,
            "rows": plan.total,
            "blocks": plan.blocks,
        }


def _class_weights(
    name: str, values: pa.ChunkedArray, classes: Mapping[Any, float], passing: Positions | None
) -> npt.NDArray[np.float64]:
    """Return the weights of the classes of all rows that pass the filter.

    Raises:
        OptionError: A row has a class without a weight, or a class is no value of the column.
        WrongKind: pyarrow cannot find values of this type.
    """
    type_ = values.type.value_type if types.is_dictionary(values.type) else values.type
    try:
        class_values = plain(pa.array([*classes], type_))
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        raise OptionError(f"weights= has values that are no {type_} as column {name!r}: {[*classes]}") from None
    try:
        codes = np.concatenate([np.empty(0, np.int32), *(encode(chunk, class_values) for chunk in values.chunks)])
    except pa.ArrowNotImplementedError:
        raise WrongKind(f"column {name!r} of weights= is {type_}, whose values pyarrow cannot find") from None
    rows = np.arange(len(codes)) if passing is None else passing
    codes = codes[rows]
    if (codes < 0).any():
        missing = values[int(rows[np.argmin(codes)])].as_py()
        raise OptionError(f"weights= has no weight for the value {missing!r} of column {name!r}")
    weights: npt.NDArray[np.float64] = np.array([*classes.values()], np.float64)[codes]
    return weights


def _prefetch(batches: Iterator[Mapping[str, Column]], device: Device, count: int) -> Iterator[dict[str, DeviceColumn]]:
    """Yield the columns of batches on a device. While one batch is used, the next `count` are copied.

    Copies begin in pinned memory of the device's ring, and do not stop this thread. Booleans become bytes.

    Raises:
        WrongKind: A column is not an array of numbers.
    """
    first = next(batches, None)
    if first is None:
        return
    head = _pinned_batch(first, device)
    record_batches = chain([head], (_pinned_batch(batch, device) for batch in batches))
    reader = BatchReader(head.schema, ((batch, None) for batch in record_batches))  # None: no metadata of batches
    with closing(to_device(reader, device)) as copied:
        waiting = deque[dict[str, DeviceColumn]]()
        for batch in copied:
            waiting.append({name: batch[name] for name in head.schema.names})
            if len(waiting) > count:
                yield waiting.popleft()
        while waiting:
            yield waiting.popleft()


def _pinned_batch(batch: Mapping[str, Column], device: Device) -> pa.RecordBatch:
    return pa.record_batch({name: _pinned_array(name, column, device) for name, column in batch.items()})


def _pinned_array(name: str, column: Column, device: Device) -> pa.Array:
    """Copy a column into pinned memory. If the ring is full, the copy is in other memory."""
    if not isinstance(column, np.ndarray):
        raise WrongKind(f"column {name!r} has no array of numbers to be copied to {device.name}: leave it out")
    kind = np.dtype(np.uint8) if column.dtype == np.bool_ else column.dtype
    memory = device.ring.allocate(column.size * kind.itemsize)
    values: Array = np.empty(column.size, kind) if memory is None else np.frombuffer(memory, kind)
    values.reshape(column.shape)[:] = column
    buffer = pa.py_buffer(values) if memory is None else memory
    array = pa.Array.from_buffers(pa.from_numpy_dtype(kind), column.size, [None, buffer], 0)
    for size in reversed(column.shape[1:]):
        array = pa.FixedSizeListArray.from_arrays(array, size)
    return array
