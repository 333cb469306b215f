"""Rows of mapped record batches in any order, copied into new arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import pyarrow as pa
from pyarrow import types

from dissociated.training.columns import Array, ArrayColumns, Column, is_scalar, mask_name
from dissociated.training.permutation import Positions


class Gatherer:
    """The rows of record batches that stay in memory, numbered from the first batch on.

    A column of numbers is read by one operation of NumPy, however many record batches there are: its values are
    addressed as items of one array, which begins at the lowest address of the column. Between the record batches, this
    array covers memory that belongs to others, or is not mapped. It is only ever read at the positions of rows.

    Raises:
        OptionError: A column of numbers has nulls.
    """

    def __init__(self, batches: Sequence[pa.RecordBatch], columns: ArrayColumns) -> None:
        batches = [batch for batch in batches if batch.num_rows]
        self._batches = batches  # keeps the memory that `_sources` read without a reference to it
        self._columns = columns
        self._lengths = np.array([batch.num_rows for batch in batches], np.int64)
        self._ends = np.cumsum(self._lengths)
        self._firsts = self._ends - self._lengths
        self._sources: dict[str, _Items | _Bits | _Arrow | _Filled] = {}
        for name in columns.names:
            self._sources[name] = self._source(name, [batch.column(name) for batch in batches])
        for name in columns.masks:
            self._sources[mask_name(name)] = _Bits.of_validity([batch.column(name) for batch in batches])
        self._matrices = {name: self._matrix(name) for name in columns.matrices}

    def _source(self, name: str, arrays: Sequence[pa.Array]) -> _Items | _Bits | _Arrow | _Filled:
        columns = self._columns
        if not arrays or not columns.is_numeric(name):
            return _Arrow(arrays, columns.type(name))
        if name in columns.fill and any(array.null_count for array in arrays):
            fill = columns.view(name, columns.filled(name, pa.nulls(1, columns.type(name))))[0]
            plain = [_without_nulls(array) for array in arrays]
            return _Filled(self._source(name, plain), _Bits.of_validity(arrays), fill)
        for array in arrays:
            if array.null_count:
                columns.view(name, array)  # raises the error
        if types.is_boolean(columns.type(name)):
            return _Bits([(array.buffers()[1], array.offset) for array in arrays])
        if is_scalar(columns.type(name)):
            items = _Items.of_scalars(columns.view(name, arrays[0]), arrays, self._lengths)
            if items is not None:
                return items
        return _Items.of_arrays([columns.view(name, array) for array in arrays], self._lengths)

    def _matrix(self, name: str) -> _Matrix:
        """Return the source of a matrix: columns of one type together, and each other column alone."""
        columns = self._columns.matrices[name]
        sources = [self._source(column, [batch.column(column) for batch in self._batches]) for column in columns]
        together = [
            at for at, source in enumerate(sources) if isinstance(source, _Items) and source.can_join(sources[0])
        ]
        return _Matrix(self._columns.matrix_type(name), sources, together, self._lengths)

    def take(self, rows: Positions) -> dict[str, Column]:
        """Return copies of the rows with these numbers. Raise IndexError if a number is not that of a row."""
        if rows.size and not 0 <= rows.min() <= rows.max() < self._ends[-1]:
            raise IndexError("there are no such rows")
        batch = np.searchsorted(self._ends, rows, side="right")
        within = rows - self._firsts[batch] if len(self._firsts) else rows
        columns: dict[str, Column] = {}
        for name, source in self._sources.items():
            if not isinstance(source, _Arrow):
                columns[name] = source.take(batch, within)
            elif name in self._columns.codes:
                columns[name] = self._columns.encode(name, source.take(rows))
            else:
                columns[name] = source.take(rows)
        for name, matrix in self._matrices.items():
            columns[name] = matrix.take(batch, within)
        return columns


class _Items:
    """Arrays of items of one size, as items of one array over all of their memory.

    `arrays` has the first array, and all arrays whose memory must be kept. All have the strides of the first, and begin
    at `addresses`.
    """

    def __init__(self, arrays: Sequence[Array], addresses: Positions, lengths: Positions) -> None:
        self._arrays = arrays
        first = arrays[0]
        # If a row has several items: their offsets from its first item.
        self._shape = first.shape[1:]
        self._offsets = np.arange(first[0].size) if self._shape else None
        self._stride = first.strides[0] // first.itemsize  # items from one row to the next
        self._addresses = addresses
        self._stop = int((addresses + lengths * first.strides[0]).max())
        self._all, self._starts = _cover(addresses, self._stop, first.dtype)

    @classmethod
    def of_scalars(cls, first: Array, arrays: Sequence[pa.Array], lengths: Positions) -> Self | None:
        """Return the values of arrays of numbers without an object for each array. None if they are not aligned."""
        width = first.strides[0]
        addresses = np.array([array.buffers()[1].address + width * array.offset for array in arrays], np.int64)
        return None if (addresses % first.itemsize).any() else cls([first], addresses, lengths)

    @classmethod
    def of_arrays(cls, arrays: Sequence[Array], lengths: Positions) -> Self:
        """Return the items of `arrays`, which are copied if they are not aligned or have different strides."""
        first = arrays[0]
        addresses = np.array([_address(array) for array in arrays], np.int64)
        regular = all(array[0].flags.c_contiguous and array.strides[0] == first.strides[0] for array in arrays)
        if not regular or first.strides[0] % first.itemsize or (addresses % first.itemsize).any():
            first = np.concatenate(arrays)
            addresses = _address(first) + (np.cumsum(lengths) - lengths) * first.strides[0]
            arrays = [first]
        return cls(arrays, addresses, lengths)

    def can_join(self, items: object) -> bool:
        """Return whether one operation can read these items and `items`. See `join`."""
        return (
            isinstance(items, _Items)
            and self._offsets is None
            and (self._all.dtype, self._stride) == (items._all.dtype, items._stride)
        )

    @classmethod
    def join(cls, columns: Sequence[Self], lengths: Positions) -> Self:
        """Return items whose starts have a row for each of several columns, which stay in memory."""
        return cls(columns[0]._arrays, np.array([column._addresses for column in columns]), lengths)

    def take(self, batch: Positions, within: Positions) -> Array:
        at = self._starts[batch]
        at += within * self._stride if self._stride != 1 else within
        if self._offsets is None:
            return self._all.take(at)
        return self._all.take(at[:, None] + self._offsets).reshape(len(at), *self._shape)

    def take_columns(self, batch: Positions, within: Positions) -> Array:
        """Return a row of items for each of several columns that were joined."""
        at = self._starts[:, batch]
        at += within * self._stride
        return self._all.take(at)


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _cover(addresses: Positions, stop: int, kind: np.dtype[Any]) -> tuple[Array, Positions]:
    """Return an array from the lowest address up to `stop`, and the positions in it of all addresses."""
    lowest = int(addresses.min())
    length = (stop - lowest) // kind.itemsize
    items: Array = np.frombuffer(pa.foreign_buffer(lowest, stop - lowest), kind, length)
    return items, (addresses - lowest) // kind.itemsize


class _Bits:
    """Bits that begin at an offset of each buffer, in bytes of one array over all of their memory."""

    def __init__(self, bits: Sequence[tuple[pa.Buffer, int]]) -> None:
        lowest = min((buffer.address for buffer, _ in bits), default=0)
        stop = max((buffer.address + buffer.size for buffer, _ in bits), default=0)
        self._buffers = bits  # keeps the memory that `_all` covers
        self._all = np.frombuffer(pa.foreign_buffer(lowest, stop - lowest), np.uint8)
        self._starts = np.array([8 * (buffer.address - lowest) + offset for buffer, offset in bits], np.int64)

    @classmethod
    def of_validity(cls, arrays: Sequence[pa.Array]) -> _Bits:
        """Return the bits that say which values are not null."""
        all_ones = pa.py_buffer(b"\xff" * (max(map(len, arrays), default=0) // 8 + 1))
        validity = [(array.buffers()[0], array.offset) if array.null_count else (all_ones, 0) for array in arrays]
        return cls(validity)

    def take(self, batch: Positions, within: Positions) -> Array:
        at = self._starts[batch] + within
        bits: Array = (self._all.take(at >> 3) >> (at & 7).astype(np.uint8)) & 1
        return bits.view(np.bool_)


class _Filled:
    """Values whose nulls are replaced by `fill`."""

    def __init__(self, values: Any, validity: _Bits, fill: Any) -> None:
        self._values, self._validity, self._fill = values, validity, fill

    def take(self, batch: Positions, within: Positions) -> Array:
        values: Array = self._values.take(batch, within)
        values[~self._validity.take(batch, within)] = self._fill
        return values


class _Matrix:
    """Columns that are packed into a matrix: `together` are those that one operation reads."""

    def __init__(
        self, kind: np.dtype[Any], sources: Sequence[Any], together: Sequence[int], lengths: Positions
    ) -> None:
        self._kind, self._sources, self._together = kind, sources, together
        if len(together) > 1:
            self._joined = _Items.join([sources[at] for at in together], lengths)

    def take(self, batch: Positions, within: Positions) -> Array:
        if len(self._together) == len(self._sources) > 1:
            return self._joined.take_columns(batch, within).astype(self._kind, copy=False).T
        matrix = np.empty((len(self._sources), len(batch)), self._kind)
        single = [*range(len(self._sources))]
        if len(self._together) > 1:
            matrix[self._together] = self._joined.take_columns(batch, within)
            single = [at for at in single if at not in self._together]
        for at in single:
            matrix[at] = self._sources[at].take(batch, within)
        return matrix.T


def _without_nulls(array: pa.Array) -> pa.Array:
    """Return the array with the values, which are undefined, that lie at nulls."""
    return pa.Array.from_buffers(array.type, len(array), [None, *array.buffers()[1:]], 0, array.offset)


class _Arrow:
    """Arrays that stay pyarrow Arrays."""

    def __init__(self, arrays: Sequence[pa.Array], type_: pa.DataType) -> None:
        chunks = pa.chunked_array(arrays, type_)
        self._chunks = chunks.unify_dictionaries() if types.is_dictionary(type_) else chunks

    def take(self, rows: Positions) -> pa.Array:
        values = self._chunks.take(pa.array(rows)).combine_chunks()
        return values if isinstance(values, pa.Array) else pa.concat_arrays(values.chunks)
