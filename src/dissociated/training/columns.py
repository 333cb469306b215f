"""Conversion of Arrow columns into NumPy arrays, without a copy if possible."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import types

from dissociated.base.display import missing_column
from dissociated.codec.columns import without_views
from dissociated.errors import ColumnNotFound, OptionError, WrongKind

Array: TypeAlias = "npt.NDArray[Any]"
#: A column of a batch: an Array, or a pyarrow.Array for a column in `as_arrow`.
Column: TypeAlias = Any

_INT64_DIGITS = 18  # the most digits with which every decimal fits into 64 bits
_MAX_WHOLE = 1 << 53  # float64 has every whole number up to this magnitude
_UNKNOWN_WIDTH = 32  # assumed bytes of a string or nested value


class Lists(NamedTuple):
    """A column of lists of any length: list `n` has the values from `offsets[n]` up to `offsets[n + 1]`."""

    values: Any
    offsets: Any


class ArrayColumns:
    """A converter of record batches with one schema into arrays by name.

    Args:
        schema: The schema.
        as_arrow: The columns that stay pyarrow Arrays.
        matrices: The columns of each matrix, by the name of the matrix.
        codes: The distinct values of each column that becomes codes, by the name of the column.
        fill: The replacements of nulls, by the name of the column.
        mask: The columns that get a mask, whose nulls are 0 if they are not in `fill`.

    Raises:
        ColumnNotFound: An option has a column that is not in the schema.
        WrongKind: Another column does not hold numbers, or lists of numbers.
        OptionError: Two columns have the same name, or two options contradict each other.
    """

    def __init__(
        self,
        schema: pa.Schema,
        as_arrow: Sequence[str] = (),
        matrices: Mapping[str, Sequence[str]] = MappingProxyType({}),
        codes: Mapping[str, pa.Array] = MappingProxyType({}),
        fill: Mapping[str, Any] = MappingProxyType({}),
        mask: Sequence[str] = (),
    ) -> None:
        packed = [name for columns in matrices.values() for name in columns]
        options = {"as_arrow": as_arrow, "codes": [*codes], "features": packed, "fill": [*fill]}
        for option, names in {**options, "mask": mask}.items():
            if isinstance(names, str):
                raise OptionError(f"the option {option} is {names!r}; it must be a list of names: [{names!r}]")
            for name in names:
                if name not in schema.names:
                    raise ColumnNotFound(missing_column(name, schema.names, f" for {option}"))
        if len({*schema.names}) < len(schema.names):
            raise OptionError("two columns have one name: choose some by columns=")
        self._types = dict(zip(schema.names, schema.types, strict=True))
        self._as_arrow = {*as_arrow}
        self.matrices = {name: [*columns] for name, columns in matrices.items()}
        self.codes = dict(codes)
        self.fill = {**{name: _zero(self._types[name]) for name in mask}, **fill}
        self.masks = [*mask]
        for name in self.fill.keys() & {*as_arrow, *codes}:
            raise OptionError(f"column {name!r} is not read as numbers, so its nulls are not replaced")
        for name in matrices.keys() & ({*schema.names} - {*packed}):
            raise OptionError(f"a column and a matrix are both called {name!r}")
        for name, type_ in self._types.items():
            if name in self._as_arrow or name in codes or self.is_list(name):
                continue
            if not _is_numeric(type_):
                raise WrongKind(
                    f"column {name!r} is {type_}, which is not an array of numbers: leave it out with columns=, name "
                    "it in codes= to get the numbers of its distinct values, or in as_arrow= to get a pyarrow.Array"
                )
        for name in packed:
            if name in self._as_arrow or name in codes or not is_scalar(self._types[name]):
                raise WrongKind(f"column {name!r} of features= is {self._types[name]}, which is not one number")
        #: The columns that are not packed into a matrix.
        self.names = [name for name in schema.names if name not in packed]
        for name in mask:
            if mask_name(name) in (*self.names, *matrices):
                kind = "matrix" if mask_name(name) in matrices else "column"
                raise OptionError(f"a {kind} and the mask of column {name!r} are both called {mask_name(name)!r}")

    def type(self, name: str) -> pa.DataType:
        """Return the Arrow type of a column."""
        return self._types[name]

    def is_list(self, name: str) -> bool:
        """Return whether a column becomes `Lists`."""
        type_ = self._types[name]
        is_list = types.is_list(type_) or types.is_large_list(type_)
        return name not in self._as_arrow and is_list and is_scalar(type_.value_type)

    def is_numeric(self, name: str) -> bool:
        """Return whether a column becomes an array of numbers, which are the column's own values."""
        return name not in self._as_arrow and name not in self.codes and not self.is_list(name)

    def matrix_type(self, name: str) -> np.dtype[Any]:
        """Return the type of the items of a matrix: NumPy's common type of its columns.

        It is float64 if integers of 64 bits are mixed with floats, or signed with unsigned ones. See `check_fits`.
        """
        kinds = [np.dtype(np.bool_) if types.is_boolean(t) else _kind(t) for t in map(self.type, self.matrices[name])]
        kind: np.dtype[Any] = np.result_type(*(kind for kind in kinds if kind is not None))
        return kind

    def join(self, pieces: Sequence[pa.RecordBatch], by_row: bool = False) -> dict[str, Column]:
        """Join record batches into one array for each column or matrix, by name.

        A column of a single batch is not copied, and its array is read-only. With `by_row`, rows of a matrix can be
        taken faster.

        Raises:
            OptionError: A column of numbers has nulls that are not replaced, or numbers that a matrix would round; or
                pyarrow cannot join a column of another kind.
        """
        joined = {name: self._join(name, [piece.column(name) for piece in pieces]) for name in self.names}
        joined.update((name, self._pack(name, pieces, by_row)) for name in self.matrices)
        for name in self.masks:
            joined[mask_name(name)] = np.concatenate([valid(piece.column(name)) for piece in pieces])
        return joined

    def _join(self, name: str, pieces: list[pa.Array]) -> Column:
        if name in self.codes:
            return np.concatenate([encode(piece, self.codes[name]) for piece in pieces])
        if name in self._as_arrow or self.is_list(name):
            with rearranging(name):
                return pieces[0] if len(pieces) == 1 else pa.concat_arrays(pieces)
        arrays = [self.view(name, piece) for piece in pieces]
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)

    def _pack(self, name: str, pieces: Sequence[pa.RecordBatch], by_row: bool) -> Array:
        columns, kind = self.matrices[name], self.matrix_type(name)
        rows = sum(piece.num_rows for piece in pieces)
        matrix = np.empty((rows, len(columns)), kind, order="C" if by_row else "F")
        uniform = {self._types[column] for column in columns} <= {pa.from_numpy_dtype(kind)} and kind.kind in "iuf"
        start = 0
        for piece in pieces:
            part = matrix[start : start + piece.num_rows]
            start += piece.num_rows
            if uniform and not any(piece.column(column).null_count for column in columns):
                part[:] = piece.select(columns).to_tensor(row_major=by_row).to_numpy()
            else:
                for at, column in enumerate(columns):
                    values = self.view(column, piece.column(column))
                    check_fits([column], values, kind)
                    part[:, at] = values
        return matrix

    def view(self, name: str, array: pa.Array) -> Array:
        """Return the numbers of a column. Raise OptionError if it has nulls that are not replaced."""
        if array.null_count and name in self.fill:
            array = self.filled(name, array)
        try:
            values = view(array)
        except _Nulls:
            raise OptionError(
                f"column {name!r} has nulls, which numbers cannot say: replace them by fill={{{name!r}: 0}}, also with "
                f"mask=[{name!r}], leave it out by columns=, or name it in as_arrow= to get a pyarrow.Array"
            ) from None
        values.flags.writeable = False  # libarrow marks some buffers as mutable even if others share them
        return values

    def filled(self, name: str, array: pa.Array) -> pa.Array:
        """Return the array with its nulls replaced. Raise OptionError if the replacement is no value of its type."""
        type_ = array.type
        is_tensor = isinstance(type_, pa.FixedShapeTensorType)
        storage = array.storage if is_tensor else array
        try:
            # pyarrow gives small decimals a wider type.
            filled = storage.fill_null(pa.scalar(self.fill[name], storage.type)).cast(storage.type)
            return pa.ExtensionArray.from_storage(type_, filled) if is_tensor else filled
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            raise OptionError(f"fill= has {self.fill[name]!r}, which is no {type_} as column {name!r}") from None

    def finish(self, name: str, column: Column) -> Column:
        """Return a column of a batch as users get it."""
        if not isinstance(column, pa.Array) or name in self._as_arrow:
            return column
        if column.null_count:
            raise OptionError(f"column {name!r} has lists that are null: name it in as_arrow= to get a pyarrow.Array")
        offsets = column.offsets.to_numpy().astype(np.int64)
        return Lists(self.view(name, column.flatten()), offsets - offsets[0])


def mask_name(column: str) -> str:
    """Return the name of the array that says which values of a column were not null."""
    return f"{column}_mask"


def check_fits(names: Sequence[str], values: Array, kind: np.dtype[Any]) -> None:
    """Raise OptionError if a matrix of `kind` would round some of `values`, which have a row for each column.

    Only float64 can: no narrower float is the common type of integers that it rounds.
    """
    if kind.kind != "f" or values.dtype.kind not in "iu" or values.itemsize < 8 or not values.size:
        return
    if values.min() >= -_MAX_WHOLE and values.max() <= _MAX_WHOLE:
        return
    for name, row in zip(names, values.reshape(len(names), -1), strict=True):
        for value in (row.min(), row.max()):
            if abs(int(value)) > _MAX_WHOLE:
                raise OptionError(
                    f"column {name!r} of features= has {value}, which a matrix of {kind} rounds: leave it out of the "
                    "matrix, or put only integers of its sign and size into the matrix"
                )


def valid(array: pa.Array) -> Array:
    """Return which values are not null."""
    if not array.null_count:
        return np.ones(len(array), np.bool_)
    is_valid: Array = array.is_valid().to_numpy(zero_copy_only=False)
    return is_valid


def take(columns: Mapping[str, Column], rows: Array) -> dict[str, Column]:
    """Return copies of the rows of a batch that have these positions."""
    copies: dict[str, Column] = {}
    for name, column in columns.items():
        if isinstance(column, pa.Array):
            with rearranging(name):
                copies[name] = column.take(pa.array(rows))
        else:
            copies[name] = column[rows]
    return copies


def join(parts: Sequence[Mapping[str, Column]]) -> Mapping[str, Column]:
    """Join batches of the same columns into one, which needs no copy if there is only one."""
    if len(parts) == 1:
        return parts[0]
    joined: dict[str, Column] = {}
    for name, column in parts[0].items():
        pieces = [part[name] for part in parts]
        with rearranging(name):
            joined[name] = pa.concat_arrays(pieces) if isinstance(column, pa.Array) else np.concatenate(pieces)
    return joined


@contextmanager
def rearranging(name: str) -> Iterator[None]:
    """Raise OptionError if pyarrow cannot join or take the values of a column, such as strings in views."""
    try:
        yield
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowCapacityError) as error:
        raise OptionError(
            f"pyarrow cannot put rows of column {name!r} together ({error}): name it in codes= to get the numbers of "
            "its distinct values, or leave it out by columns="
        ) from None


def encode(array: pa.Array, values: pa.Array) -> Array:
    """Return the position of each item of `array` among `values`; -1 if it is not there, as null usually is."""
    import pyarrow.compute as pc  # on first use: it is slow to import

    items = array.dictionary if types.is_dictionary(array.type) else array
    # For a dictionary, null is added at the end, and null indices are mapped to it.
    items = pa.concat_arrays([items, pa.nulls(1, items.type)]) if items is not array else items
    codes: Array = pc.index_in(plain(items), values).fill_null(-1).to_numpy().astype(np.int32, copy=False)
    if items is array:
        return codes
    encoded: Array = codes[array.indices.cast(pa.int64()).fill_null(len(codes) - 1).to_numpy()]
    return encoded


def plain(array: pa.Array) -> pa.Array:
    """Return strings in views as other strings, which more of pyarrow's functions accept."""
    type_ = without_views(array.type)
    return array if type_ == array.type else array.cast(type_)


class _Nulls(Exception):
    """The error of an array with nulls."""


def view(array: pa.Array) -> Array:
    """Return the values of `array` as a NumPy array, without a copy except for booleans.

    Fixed-size lists and fixed-shape tensors become further dimensions: the shape is `(rows, ...)`. The dimensions of
    tensors are in their logical order, so an array of tensors with a permutation is not contiguous. Decimals become
    integers in units of their last digit; dates and times become integers in their own unit, since 1970 or midnight.
    """
    if array.null_count:
        raise _Nulls
    type_ = array.type
    if isinstance(type_, pa.FixedShapeTensorType):
        tensors = view(array.storage).reshape(len(array), *type_.shape)
        # pyarrow's own conversion has wrong strides for some permutations of three dimensions.
        return tensors.transpose(0, *(1 + axis for axis in type_.permutation or range(len(type_.shape))))
    if types.is_fixed_size_list(type_):
        values = view(array.flatten())
        return values.reshape(len(array), type_.list_size, *values.shape[1:])
    if types.is_boolean(type_):
        return view(array.cast(pa.uint8())).view(np.bool_)
    kind = _kind(type_)
    assert kind is not None, "ArrayColumns has checked the types"
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


def _zero(type_: pa.DataType) -> Any:
    """Return the value that replaces nulls of this type by default."""
    if isinstance(type_, pa.FixedShapeTensorType):
        return _zero(type_.storage_type)
    if types.is_fixed_size_list(type_):
        return [_zero(type_.value_type)] * type_.list_size
    return False if types.is_boolean(type_) else 0


def is_scalar(type_: pa.DataType) -> bool:
    """Return whether a value of this type is one number."""
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


def row_width(schema: pa.Schema, unknown: int = _UNKNOWN_WIDTH) -> int:
    """Return the approximate number of bytes of a row, with `unknown` for each string or nested value."""
    return sum(_width(type_, unknown) for type_ in schema.types)


def _width(type_: pa.DataType, unknown: int) -> int:
    if isinstance(type_, pa.BaseExtensionType):
        return _width(type_.storage_type, unknown)
    if types.is_fixed_size_list(type_):
        return int(type_.list_size) * _width(type_.value_type, unknown)
    try:
        return -(-int(type_.bit_width) // 8)
    except ValueError:
        return unknown
