"""Rows of mapped record batches in any order, copied into new arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from pyarrow import types

from dissociated.training.columns import Array, ArrayColumns, Column
from dissociated.training.permutation import Positions


class Gatherer:
    """The rows of record batches that stay in memory, numbered from the first batch on.

    A column of numbers is read by one operation of NumPy, however many record batches there are: its values are
    addressed as items of one array, which begins at the lowest address of the column. Between the record batches, this
    array covers memory that belongs to others, or is not mapped. It is only ever read at the positions of rows.

    Raises:
        OptionError: if a column of numbers has nulls.
    """

    def __init__(self, batches: Sequence[pa.RecordBatch], columns: ArrayColumns) -> None:
        batches = [batch for batch in batches if batch.num_rows]
        self._batches = batches  # keeps the memory
        self._columns = columns
        self._ends = np.cumsum([batch.num_rows for batch in batches], dtype=np.int64)
        self._firsts = self._ends - np.array([batch.num_rows for batch in batches], np.int64)
        self._sources: dict[str, _Items | _Bits | _Arrow] = {}
        for name in columns.names:
            arrays = [batch.column(name) for batch in batches]
            if not arrays or not columns.is_numeric(name):
                self._sources[name] = _Arrow(arrays, columns.type(name))
            elif types.is_boolean(columns.type(name)):
                columns.check_nulls(name, arrays)
                self._sources[name] = _Bits(arrays)
            else:
                self._sources[name] = _Items([columns.view(name, array) for array in arrays])

    def take(self, rows: Positions) -> dict[str, Column]:
        """Return copies of these rows. Their numbers must be those of rows."""
        if rows.size and not 0 <= rows.min() <= rows.max() < self._ends[-1]:
            raise IndexError("there are no such rows")
        batch = np.searchsorted(self._ends, rows, side="right")
        within = rows - self._firsts[batch] if len(self._firsts) else rows
        return {
            name: source.take(rows) if isinstance(source, _Arrow) else source.take(batch, within)
            for name, source in self._sources.items()
        }


class _Items:
    """Arrays of items of one size, as items of one array over all of their memory."""

    def __init__(self, arrays: Sequence[Array]) -> None:
        self._arrays = arrays
        first = arrays[0]
        self._shape, size = first.shape[1:], first.itemsize
        addresses = np.array([array.__array_interface__["data"][0] for array in arrays], np.int64)
        lowest = int(addresses.min())
        stop = max(at + len(array) * array.strides[0] for at, array in zip(addresses.tolist(), arrays, strict=True))
        regular = all(array[0].flags.c_contiguous and array.strides[0] == first.strides[0] for array in arrays)
        if not regular or first.strides[0] % size or ((addresses - lowest) % size).any() or lowest % size:
            self._all = np.concatenate(arrays)
            self._starts = np.cumsum([0, *map(len, arrays[:-1])], dtype=np.int64)
            self._stride, self._items = 1, None
            return
        self._all = np.frombuffer(pa.foreign_buffer(lowest, stop - lowest), first.dtype, (stop - lowest) // size)
        self._starts = (addresses - lowest) // size
        self._stride = first.strides[0] // size
        self._items = np.arange(first[0].size) if self._shape else None

    def take(self, batch: Positions, within: Positions) -> Array:
        at = self._starts[batch]
        at += within * self._stride if self._stride != 1 else within
        if self._items is None:
            return self._all.take(at, axis=0)
        return self._all.take(at[:, None] + self._items).reshape(len(at), *self._shape)


class _Bits:
    """Arrays of booleans, each a bit, as bytes of one array over all of their memory."""

    def __init__(self, arrays: Sequence[pa.Array]) -> None:
        buffers = [array.buffers()[1] for array in arrays]
        lowest = min(buffer.address for buffer in buffers)
        stop = max(buffer.address + buffer.size for buffer in buffers)
        self._arrays = buffers
        self._all = np.frombuffer(pa.foreign_buffer(lowest, stop - lowest), np.uint8)
        self._starts = np.array(
            [8 * (buffer.address - lowest) + array.offset for buffer, array in zip(buffers, arrays, strict=True)],
            np.int64,
        )

    def take(self, batch: Positions, within: Positions) -> Array:
        at = self._starts[batch] + within
        found: Array = (self._all.take(at >> 3) >> (at & 7).astype(np.uint8)) & 1
        return found.view(np.bool_)


class _Arrow:
    """Arrays that stay pyarrow Arrays."""

    def __init__(self, arrays: Sequence[pa.Array], type_: pa.DataType) -> None:
        chunks = pa.chunked_array(arrays, type_)
        self._chunks = chunks.unify_dictionaries() if types.is_dictionary(type_) else chunks

    def take(self, rows: Positions) -> pa.Array:
        taken = self._chunks.take(pa.array(rows)).combine_chunks()
        return taken if isinstance(taken, pa.Array) else pa.concat_arrays(taken.chunks)
