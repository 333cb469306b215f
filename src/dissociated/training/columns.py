"""Conversion of Arrow columns into NumPy arrays, without a copy if possible, and the access to these arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import types

from dissociated.errors import ColumnNotFound, OptionError, WrongKind
from dissociated.memory.private import PrivateMapping
from dissociated.memory.region import Region

Array: TypeAlias = "npt.NDArray[Any]"
#: A column of a batch: an Array, or a pyarrow.Array for a column in `as_arrow`.
Column: TypeAlias = Any

_INT64_DIGITS = 18  # number of digits of every decimal that fits into 64 bits


class ArrayColumns:
    """The conversion of the columns of one schema.

    Columns in `as_arrow` stay pyarrow Arrays; all others must hold numbers.

    Raises:
        ColumnNotFound: if `as_arrow` has a column that is not in the schema.
        WrongKind: if another column does not hold numbers.
        OptionError: if two columns have the same name.
    """

    def __init__(self, schema: pa.Schema, as_arrow: Sequence[str] = ()) -> None:
        if isinstance(as_arrow, str):
            raise OptionError(f"the option as_arrow is {as_arrow!r}; it must be a list of names: [{as_arrow!r}]")
        for name in as_arrow:
            if name not in schema.names:
                raise ColumnNotFound(f"there is no column {name!r} for as_arrow; there are {', '.join(schema.names)}")
        if len({*schema.names}) < len(schema.names):
            raise OptionError("two columns have one name: choose some by columns=")
        self._types = dict(zip(schema.names, schema.types, strict=True))
        self._as_arrow = {*as_arrow}
        for name in self._types.keys() - self._as_arrow:
            if not _is_numeric(self._types[name]):
                raise WrongKind(
                    f"column {name!r} is {self._types[name]}, which is not an array of numbers: leave the column out "
                    "with columns=, or name it in as_arrow= to get a pyarrow.Array"
                )

    @property
    def names(self) -> list[str]:
        """The names of the columns."""
        return [*self._types]

    def type(self, name: str) -> pa.DataType:
        """Return the Arrow type of a column."""
        return self._types[name]

    def is_numeric(self, name: str) -> bool:
        """Return whether a column becomes an array of numbers."""
        return name not in self._as_arrow

    def join(self, pieces: Sequence[pa.RecordBatch]) -> dict[str, Column]:
        """Join record batches into one array for each column, by name.

        A single batch is not copied, and its arrays are read-only.

        Raises:
            OptionError: if a column of numbers has nulls.
        """
        return {name: self._join(name, [piece.column(name) for piece in pieces]) for name in self._types}

    def _join(self, name: str, pieces: list[pa.Array]) -> Column:
        if name in self._as_arrow:
            return pieces[0] if len(pieces) == 1 else pa.concat_arrays(pieces)
        arrays = [self.view(name, piece) for piece in pieces]
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)

    def view(self, name: str, array: pa.Array) -> Array:
        """Return the numbers of a column. Raise OptionError if it has nulls."""
        try:
            values = view(array)
        except _Nulls:
            raise OptionError(
                f"column {name!r} has nulls, which numbers cannot say: fill them where it is published, leave it out "
                "by columns=, or name it in as_arrow= to get a pyarrow.Array"
            ) from None
        values.flags.writeable = False  # libarrow marks some buffers as mutable even if others share them
        return values

    def check_nulls(self, name: str, arrays: Sequence[pa.Array]) -> None:
        """Raise OptionError if one of the arrays of a column has nulls."""
        for array in arrays:
            if array.null_count:
                self.view(name, array)


def take(columns: Mapping[str, Column], rows: Array) -> dict[str, Column]:
    """Return copies of the rows at these positions."""
    return {
        name: column.take(pa.array(rows)) if isinstance(column, pa.Array) else column[rows]
        for name, column in columns.items()
    }


def join(parts: Sequence[Mapping[str, Column]]) -> Mapping[str, Column]:
    """Join batches of the same columns into one, which needs no copy if there is only one."""
    if len(parts) == 1:
        return parts[0]
    return {
        name: pa.concat_arrays([part[name] for part in parts])
        if isinstance(column, pa.Array)
        else np.concatenate([part[name] for part in parts])
        for name, column in parts[0].items()
    }


class _Nulls(Exception):
    """The error of an array with nulls."""


def view(array: pa.Array) -> Array:
    """Return the values of `array` as a NumPy array, without a copy except for booleans.

    Fixed-size lists and fixed-shape tensors become further dimensions: the shape is `(rows, ...)`. Decimals become
    integers in units of their last digit; dates and times become integers in their own unit, since 1970 or midnight.
    """
    if array.null_count:
        raise _Nulls
    type_ = array.type
    if isinstance(type_, pa.FixedShapeTensorType):
        if array.storage.flatten().null_count:
            raise _Nulls
        tensors: Array = array.to_numpy_ndarray()
        return tensors
    if types.is_fixed_size_list(type_):
        values = view(array.flatten())
        return values.reshape(len(array), type_.list_size, *values.shape[1:])
    if types.is_boolean(type_):
        return view(array.cast(pa.uint8())).view(np.bool_)
    kind = _kind(type_)
    assert kind is not None, "the schema was looked at"  # ArrayColumns has checked the types
    if not len(array):
        return np.empty(0, kind)
    buffer = array.buffers()[1]
    if types.is_decimal128(type_):
        # The lower half of each value is enough, since the upper half only repeats the sign.
        return np.frombuffer(buffer, kind, 2 * len(array), 16 * array.offset)[::2]
    return np.frombuffer(buffer, kind, len(array), kind.itemsize * array.offset)


def _is_numeric(type_: pa.DataType) -> bool:
    if isinstance(type_, pa.FixedShapeTensorType):
        return bool(types.is_integer(type_.value_type) or types.is_floating(type_.value_type))
    if types.is_fixed_size_list(type_):
        return _is_numeric(type_.value_type)
    return bool(types.is_boolean(type_)) or _kind(type_) is not None


def _kind(type_: pa.DataType) -> np.dtype[Any] | None:
    """Return the NumPy type that reads values of an Arrow type in place, or None if there is none."""
    if types.is_integer(type_) or types.is_floating(type_):
        kind: np.dtype[Any] = np.dtype(type_.to_pandas_dtype())
        return kind
    if types.is_date32(type_) or types.is_time32(type_) or types.is_decimal32(type_):
        return np.dtype("<i4")
    if types.is_decimal128(type_):
        return np.dtype("<i8") if type_.precision <= _INT64_DIGITS else None
    if any(
        test(type_)
        for test in (types.is_date64, types.is_time64, types.is_timestamp, types.is_duration, types.is_decimal64)
    ):
        return np.dtype("<i8")
    return None


def row_width(schema: pa.Schema) -> int:
    """Return the approximate number of bytes of a row."""
    return sum(_width(type_) for type_ in schema.types) or 1


def _width(type_: pa.DataType) -> int:
    if isinstance(type_, pa.BaseExtensionType):
        return _width(type_.storage_type)
    if types.is_fixed_size_list(type_):
        return int(type_.list_size) * _width(type_.value_type)
    try:
        return -(-int(type_.bit_width) // 8)
    except ValueError:
        return _UNKNOWN_WIDTH


_UNKNOWN_WIDTH = 32  # assumed bytes of a string or nested value


class Access(Enum):
    """A kind of access to the arrays of a batch."""

    #: Arrays lie in the server's memory if possible, and are read-only.
    READ_ONLY = auto()
    #: Arrays lie in the server's memory if possible, mapped privately. They can be written to, and the change is
    #: visible in that array alone.
    PRIVATE = auto()
    #: Arrays are copies that can be written to.
    COPIED = auto()


class Lender:
    """The conversion of the arrays of one epoch to the requested access.

    No two arrays that can be written to share a byte. `find` returns the region of shared memory that contains an
    address of this process, or None.
    """

    def __init__(self, access: Access, find: Callable[[int], Region | None]) -> None:
        self._access = access
        self._find = find
        self._region: Region | None = None
        self._mapping: PrivateMapping | None = None  # a private mapping of `_region`

    def lend(self, array: Array) -> Array:
        """Return an array of the same values with the requested access.

        A writable `array` is returned as it is, since it has memory of its own already.
        """
        if self._access is Access.READ_ONLY:
            array.flags.writeable = False
            return array
        if array.flags.writeable:
            return array
        private = self._map(array) if self._access is Access.PRIVATE else None
        return array.copy() if private is None else private

    def _map(self, array: Array) -> Array | None:
        """Return the array in a private mapping of its memory.

        Return None if the array does not lie in shared memory, or shares bytes with an array that was mapped before.
        """
        if not array.size or not array.flags.aligned:
            return None
        start, stop = _extent(array)
        region = self._find(start)
        if region is None or region.file is None:
            return None
        mapping = self._mapping
        if mapping is None or region is not self._region or mapping.claims.full:
            self._region = region
            self._mapping = mapping = region.file.map_private(region.size, array)
        base = region.memory.address
        if mapping is None or not mapping.claims.add(start - base, stop - base):
            return None
        return np.ndarray(array.shape, array.dtype, mapping, start - base, array.strides)


def _extent(array: Array) -> tuple[int, int]:
    """Return the addresses at which the bytes of `array` begin and end. Its strides must not be negative."""
    if array.flags.c_contiguous:
        buffer = pa.py_buffer(array)  # ten times faster than NumPy's array interface
        return buffer.address, buffer.address + buffer.size
    start: int = array.__array_interface__["data"][0]
    last = sum((length - 1) * stride for length, stride in zip(array.shape, array.strides, strict=True))
    return start, start + last + array.itemsize
