"""Rows of mapped record batches in any order, copied into new arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import pyarrow as pa
from pyarrow import types

from dissociated.errors import OptionError
from dissociated.training.columns import (
    Array,
    ArrayColumns,
    Column,
    check_fits,
    encode,
    is_scalar,
    mask_name,
    rearranging,
)
from dissociated.training.permutation import Positions

_SMALL_ARRAY = 1 << 17  # bytes of an array that is copied faster than some of its rows are taken
_MAX_COPIED = 1 << 26  # bytes of small arrays that are copied for one batch
_POSITIONS = 1 << 13  # of values that are read together: more do not fit into the cache of a core, which takes longer


class Gatherer:
    """The rows of record batches that stay in memory, numbered from the first batch on.

    A column of numbers is read by one operation of NumPy, however many record batches there are: its values are
    addressed as items of one array, which begins at the lowest address of the column. Between the record batches, this
    array covers memory that belongs to others, or is not mapped. It is only ever read at the positions of rows.

    Raises:
        OptionError: A column of numbers has nulls, or pyarrow cannot take rows of another column.
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
            try:
                with rearranging(name):
                    return _Arrow(arrays, columns.type(name))
            except OptionError:
                if name not in columns.codes:
                    raise
                return _Items.of_arrays([encode(array, columns.codes[name]) for array in arrays], self._lengths)
        if name in columns.fill and any(array.null_count for array in arrays):
            if not is_scalar(columns.type(name)):  # lists below a null have values of their own, which may be null
                filled = [columns.filled(name, array) if array.null_count else array for array in arrays]
                return self._source(name, filled)
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
        """Return the source of a matrix."""
        columns = self._columns.matrices[name]
        sources: list[Any] = []
        if self._batches:
            sources = [self._source(column, [batch.column(column) for batch in self._batches]) for column in columns]
        return _Matrix(self._columns.matrix_type(name), columns, sources)

    def take(self, rows: Positions) -> dict[str, Column]:
        """Return copies of the rows with these numbers. Raise IndexError if a number is not that of a row."""
        if rows.size and not 0 <= rows.min() <= rows.max() < self._ends[-1]:
            raise IndexError("there are no such rows")
        batch = np.searchsorted(self._ends, rows, side="right")
        within = rows - self._firsts[batch] if len(self._firsts) else rows
        columns: dict[str, Column] = {}
        for name, source in self._sources.items():
            with rearranging(name):
                columns[name] = source.take(batch, within)
            if isinstance(source, _Arrow) and name in self._columns.codes:
                columns[name] = encode(columns[name], self._columns.codes[name])
        for name, matrix in self._matrices.items():
            columns[name] = matrix.take(batch, within)
        return columns


class _Items:
    """Arrays of items of one size, as items of one array over all of their memory.

    `arrays` has the first array, and all arrays whose memory must be kept. All have the strides of the first, begin at
    `addresses`, and end at the address `stop` or before.
    """

    def __init__(self, arrays: Sequence[Array], addresses: Positions, stop: int) -> None:
        self._arrays = arrays
        first = arrays[0]
        self._stride, *strides = (stride // first.itemsize for stride in first.strides)  # in items, along each axis
        # If a row has several items: their offsets from its first item.
        self._shape = first.shape[1:]
        axes = [np.arange(size) * stride for size, stride in zip(self._shape, strides, strict=True)]
        self._offsets: Positions | None = np.sum(np.meshgrid(*axes, indexing="ij"), axis=0).ravel() if axes else None
        self._addresses, self._stop = addresses, stop
        self._all, self._starts = _cover(addresses, stop, first.dtype)

    @classmethod
    def of_scalars(cls, first: Array, arrays: Sequence[pa.Array], lengths: Positions) -> Self | None:
        """Return the values of arrays of numbers without an object for each array. None if they are not aligned."""
        width = first.strides[0]
        addresses = np.array([array.buffers()[1].address + width * array.offset for array in arrays], np.int64)
        if (addresses % first.itemsize).any():
            return None
        return cls([first], addresses, int((addresses + width * lengths).max()))

    @classmethod
    def of_arrays(cls, arrays: Sequence[Array], lengths: Positions) -> Self:
        """Return the items of `arrays`, which are copied if they are not aligned or have different strides."""
        first = arrays[0]
        addresses = np.array([_address(array) for array in arrays], np.int64)
        if any(array.strides != first.strides for array in arrays) or (addresses % first.itemsize).any():
            first = np.ascontiguousarray(np.concatenate(arrays))  # `concatenate` keeps the order of axes in memory
            addresses = _address(first) + (np.cumsum(lengths) - lengths) * first.strides[0]
            arrays = [first]
        return cls(arrays, addresses, int((addresses + first.strides[0] * lengths).max()))

    @property
    def layout(self) -> object:
        """A value that is equal for columns of scalars that can be joined."""
        return self._all.dtype, self._stride

    @classmethod
    def join(cls, columns: Sequence[Self]) -> Self:
        """Return items whose starts have a row for each of several columns of one layout."""
        arrays = [array for column in columns for array in column._arrays]
        return cls(arrays, np.array([column._addresses for column in columns]), max(c._stop for c in columns))

    def take(self, batch: Positions, within: Positions) -> Array:
        at = self._starts[batch]
        at += within * self._stride if self._stride != 1 else within
        if self._offsets is None:
            return self._all.take(at)
        return self._all.take(at[:, None] + self._offsets).reshape(len(at), *self._shape)

    def take_columns(self, columns: slice, batch: Positions, within: Positions) -> Array:
        """Return a row of items for each of some columns that were joined."""
        at = self._starts[columns].take(batch, axis=1)
        at += within * self._stride
        return self._all.take(at, mode="clip")  # the positions were checked, so this is only faster than "raise"


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

    layout = "bits"

    def __init__(self, bits: Sequence[tuple[pa.Buffer, int]]) -> None:
        self._buffers = [_aligned(buffer, offset) for buffer, offset in bits]  # keeps the memory that `_all` covers
        lowest = min((buffer.address for buffer in self._buffers), default=0)
        stop = max((buffer.address + buffer.size for buffer in self._buffers), default=0)
        self._all = np.frombuffer(pa.foreign_buffer(lowest, stop - lowest), np.uint8)
        self._starts = np.array([buffer.address - lowest for buffer in self._buffers], np.int64)

    @classmethod
    def of_validity(cls, arrays: Sequence[pa.Array]) -> _Bits:
        """Return the bits that say which values are not null."""
        all_ones = pa.py_buffer(b"\xff" * (max(map(len, arrays), default=0) // 8 + 1))
        validity = [(array.buffers()[0], array.offset) if array.null_count else (all_ones, 0) for array in arrays]
        return cls(validity)

    @classmethod
    def join(cls, columns: Sequence[_Bits]) -> _Bits:
        """Return bits whose starts have a row for each of several columns."""
        joined = cls([(buffer, 0) for column in columns for buffer in column._buffers])
        joined._starts = joined._starts.reshape(len(columns), -1)
        return joined

    def take(self, batch: Positions, within: Positions) -> Array:
        return self._take(self._starts[batch], within)

    def take_columns(self, columns: slice, batch: Positions, within: Positions) -> Array:
        """Return a row of bits for each of some columns that were joined."""
        return self._take(self._starts[columns].take(batch, axis=1), within)

    def _take(self, starts: Positions, within: Positions) -> Array:
        starts += within >> 3
        bits = self._all.take(starts, mode="clip")
        bits &= np.left_shift(1, within & 7).astype(np.uint8)
        is_set: Array = bits != 0
        return is_set


def _aligned(buffer: pa.Buffer, offset: int) -> pa.Buffer:
    """Return a buffer of the bits from `offset` on, which are copied if they begin within a byte."""
    if offset % 8 == 0:
        return buffer[offset // 8 :]
    bits = np.unpackbits(np.frombuffer(buffer, np.uint8), bitorder="little")[offset:]
    return pa.py_buffer(np.packbits(bits, bitorder="little"))


class _Filled:
    """Values whose nulls are replaced by `fill`."""

    def __init__(self, values: Any, validity: _Bits, fill: Any) -> None:
        self._values, self._validity, self._fill = values, validity, fill

    @property
    def layout(self) -> object:
        """A value that is equal for columns that can be joined."""
        return self._values.layout, "filled"

    @classmethod
    def join(cls, columns: Sequence[Self]) -> Self:
        """Return the values of several columns of one layout."""
        values = type(columns[0]._values).join([column._values for column in columns])
        fills = np.array([[column._fill] for column in columns])
        return cls(values, _Bits.join([column._validity for column in columns]), fills)

    def take(self, batch: Positions, within: Positions) -> Array:
        values: Array = self._values.take(batch, within)
        values[~self._validity.take(batch, within)] = self._fill
        return values

    def take_columns(self, columns: slice, batch: Positions, within: Positions) -> Array:
        """Return a row of values for each of some columns that were joined."""
        values: Array = self._values.take_columns(columns, batch, within)
        np.copyto(values, self._fill[columns], where=~self._validity.take_columns(columns, batch, within))
        return values


class _Matrix:
    """The sources of numbers that are packed into a matrix. Those of one layout are joined, and read together."""

    def __init__(self, kind: np.dtype[Any], names: Sequence[str], sources: Sequence[Any]) -> None:
        self._kind, self._names = kind, names
        self._joined: list[tuple[list[int], Any]] = []
        places: dict[object, list[int]] = {}
        for at, source in enumerate(sources):
            places.setdefault(source.layout, []).append(at)
        for together in places.values():
            columns = [sources[at] for at in together]
            self._joined.append((together, type(columns[0]).join(columns)))

    def take(self, batch: Positions, within: Positions) -> Array:
        matrix = np.empty((len(self._names), len(batch)), self._kind)
        count = max(1, _POSITIONS // max(1, len(batch)))
        for together, columns in self._joined:
            for first in range(0, len(together), count):
                some = slice(first, first + count)
                values = columns.take_columns(some, batch, within)
                check_fits([self._names[at] for at in together[some]], values, self._kind)
                matrix[together[some]] = values
        return matrix.T


def _without_nulls(array: pa.Array) -> pa.Array:
    """Return the array with the values, which are undefined, that lie at nulls."""
    return pa.Array.from_buffers(array.type, len(array), [None, *array.buffers()[1:]], 0, array.offset)


class _Arrow:
    """Arrays that stay pyarrow Arrays."""

    def __init__(self, arrays: Sequence[pa.Array], type_: pa.DataType) -> None:
        self._type, self._dictionary = type_, None
        if types.is_dictionary(type_) and arrays:
            # Joining arrays would compare their dictionaries, so only the indices are taken.
            arrays = pa.chunked_array(arrays, type_).unify_dictionaries().chunks
            self._dictionary = arrays[0].dictionary
            arrays = [array.indices for array in arrays]
        self._arrays = arrays
        self._lengths = np.array([len(array) for array in arrays], np.int64)
        # Not `nbytes`, with which pyarrow crashes on unions without rows.
        self._sizes = np.array([array.get_total_buffer_size() for array in arrays], np.int64)
        self._empty = arrays[0][:0] if arrays else pa.nulls(0, type_)
        self._empty.take(pa.array([], pa.int64()))  # raises the error of types whose rows pyarrow cannot take

    def take(self, batch: Positions, within: Positions) -> pa.Array:
        values = self._take(batch, within)
        if self._dictionary is None:
            return values
        return pa.DictionaryArray.from_arrays(values, self._dictionary, ordered=self._type.ordered)

    def _take(self, batch: Positions, within: Positions) -> pa.Array:
        # pyarrow would join all arrays of a chunked array, however few of their rows are taken.
        numbers = np.flatnonzero(np.bincount(batch))
        small = numbers[self._sizes[numbers] <= _SMALL_ARRAY]
        copied = small[np.cumsum(self._sizes[small]) <= _MAX_COPIED]
        pieces = [self._arrays[number] for number in copied.tolist()]
        starts = np.full(len(self._arrays), -1)
        starts[copied] = np.cumsum(self._lengths[copied]) - self._lengths[copied]
        positions = starts[batch] + within
        # The rows of the remaining arrays are taken array by array, and follow the copied arrays in this order.
        remaining = np.flatnonzero(starts[batch] < 0)
        order = remaining[np.argsort(batch[remaining], kind="stable")]
        positions[order] = np.arange(len(order)) + self._lengths[copied].sum()
        numbers, firsts = np.unique(batch[order], return_index=True)
        for number, places in zip(numbers.tolist(), np.split(order, firsts[1:]), strict=False):
            pieces.append(self._arrays[number].take(pa.array(within[places])))
        return pa.concat_arrays(pieces).take(pa.array(positions)) if pieces else self._empty
