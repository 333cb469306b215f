"""Conversion of Arrow columns for Spark: the type that each column becomes, and its values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as types

from dissociated.base.display import missing, missing_column
from dissociated.codec.nesting import contains
from dissociated.errors import ColumnNotFound, OptionError, SourceError
from dissociated.spark.types import TIMEZONE, arrow_schema, kept_type

if TYPE_CHECKING:
    from pyspark.sql.types import StructField, StructType

_MAX_PRECISION = 38  # digits of Spark's decimals
_NANOSECONDS = "refuse", "truncate"
_ADVICE = "read it as it is and cast it in Spark; or load it again, if it has been replaced"

_WIDENED = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20, 0),
    pa.float16(): pa.float32(),
    pa.date64(): pa.date32(),
}
_UNCHANGED = (
    types.is_null,
    types.is_boolean,
    types.is_integer,
    types.is_floating,
    types.is_date,
)
_SCALARS: Sequence[tuple[Callable[[pa.DataType], bool], pa.DataType]] = (
    (lambda type_: types.is_string(type_) or types.is_large_string(type_) or types.is_string_view(type_), pa.string()),
    (lambda type_: types.is_binary(type_) or types.is_large_binary(type_) or types.is_binary_view(type_), pa.binary()),
    (types.is_fixed_size_binary, pa.binary()),
    (types.is_time, pa.time64("ns")),
    (types.is_duration, pa.duration("us")),
)


def spark_schema(schema: pa.Schema, columns: Sequence[str] | None = None) -> StructType:
    """Return Spark's schema for data with this Arrow schema.

    Args:
        schema: The Arrow schema of the data.
        columns: The names of the columns to include, in this order. Default: all columns.

    Raises:
        ColumnNotFound: The schema lacks one of the `columns`.
        SourceError: Spark has no type for a column, or two columns have the same name. The message names the column.
    """
    from pyspark.sql.pandas.types import from_arrow_schema

    names = schema.names if columns is None else [*columns]
    fields = []
    for index in _positions(schema, names):
        field = schema.field(index)
        try:
            fields.append(field.with_type(spark_type(field.type)))
        except _UnsupportedType as unsupported:
            raise SourceError(
                f"column {field.name!r} has the type {field.type}, and Spark has none for {unsupported}: "
                "leave the column out with the option columns, or publish it with another type"
            ) from None
    spark = from_arrow_schema(pa.schema(fields), prefer_timestamp_ntz=True)  # the default of Spark 4.2
    for spark_field, index in zip(spark.fields, _positions(schema, names), strict=True):
        spark_field.dataType = kept_type(schema.field(index)) or spark_field.dataType
    return spark


class ColumnConverter:
    """A converter of batches with the Arrow schema `source` to batches that Spark accepts for the schema `target`.

    Args:
        source: The Arrow schema of the batches to convert.
        target: Spark's schema of the result.
        nanoseconds: Treatment of values that do not fit into Spark's microseconds: "refuse" or "truncate".

    Raises:
        ColumnNotFound: `source` lacks a column of `target`.
        SourceError: A column of `source` has a type other than the type in `target`.
        OptionError: `nanoseconds` is invalid.
    """

    def __init__(self, source: pa.Schema, target: StructType, nanoseconds: str = "refuse") -> None:
        if nanoseconds not in _NANOSECONDS:
            raise OptionError(f"the option nanoseconds is refuse or truncate, not {nanoseconds!r}")
        self.names = target.fieldNames()
        self.schema = arrow_schema(target)
        self._truncate = nanoseconds == "truncate"
        available = spark_schema(source, self.names)
        self._to_convert = {name for name in self.names if not is_readable(source.field(name).type)}
        self._without_nulls = [(place, field) for place, field in enumerate(self.schema) if _forbids_nulls(field)]
        fields = zip(arrow_schema(available), self.schema, strict=True)
        for (arrow_field, to), field, target_field in zip(fields, available, target, strict=True):
            if not _fits(arrow_field, to):
                raise SourceError(
                    f"column {to.name!r} is {_describe_field(field)}, not {_describe_field(target_field)}: {_ADVICE}"
                )

    @property
    def readable(self) -> bool:
        """Whether Spark's JVM reads all of these columns without conversion."""
        return not self._to_convert

    def convert(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return a batch with the columns of the target schema, in that order.

        Columns whose types are Spark's own are not copied.

        Raises:
            SourceError: Spark cannot hold a value, or a column has nulls although its schema forbids them. Spark does
                not check for such nulls and would read the bytes below them as values. The message names the column.
        """
        if not self.names:
            return batch.select([])  # keeps the number of rows
        arrays = [self._column(batch.column(field.name), field) for field in self.schema]
        for place, field in self._without_nulls:
            if misplaced_null(arrays[place], field) is not None:
                raise SourceError(
                    f"column {field.name!r} has nulls, and its schema says that it has none: declare a schema in "
                    "which it may be null (for a read, .schema('...'))"
                )
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def select(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the columns of the target schema for Spark's JVM, which reads more types than Spark's Python.

        Columns of readable types (see `is_readable`) keep their type and are not copied; all other columns are
        converted.

        Raises:
            SourceError: The batch is damaged, or Spark cannot hold a value.
        """
        chosen = batch.select(self.names)
        try:
            chosen.validate()
        except pa.ArrowInvalid as error:
            columns = zip(self.names, chosen.columns, strict=True)
            damaged = next((f"column {name!r}" for name, column in columns if _is_damaged(column)), "a batch")
            raise SourceError(f"{damaged} is damaged: {error}") from None
        if not self._to_convert:
            return chosen
        arrays = [
            self._column(column, field) if field.name in self._to_convert else column
            for column, field in zip(chosen.columns, self.schema, strict=True)
        ]
        return pa.RecordBatch.from_arrays(arrays, self.names)

    def _column(self, column: pa.Array, field: pa.Field) -> pa.Array:
        try:
            return self._converted(column, field.type)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            advice = ""
            if not self._truncate and contains(column.type, _has_nanoseconds):
                advice = "; Spark has microseconds: cast the column, or read it with .option('nanoseconds', 'truncate')"
            raise SourceError(
                f"column {field.name!r} of the type {column.type} has a value that Spark cannot hold as "
                f"{field.type}: {error}{advice}"
            ) from None

    def _converted(self, array: pa.Array, to: pa.DataType) -> pa.Array:
        type_ = array.type
        if isinstance(type_, pa.BaseExtensionType):
            return self._converted(array.storage, to)
        if types.is_dictionary(type_):
            if not len(array.dictionary):
                return pa.nulls(len(array), to)
            return self._converted(array.dictionary, to).take(array.indices)
        if types.is_run_end_encoded(type_):
            return self._converted(pc.run_end_decode(array), to)
        # Times are converted even if their type is Spark's already: values may have nanoseconds, and Spark's have none.
        if type_.equals(to) and not contains(to, types.is_time):
            return array
        if types.is_map(to):
            return self._map(array, to)
        if types.is_list(to):
            return self._list(array, to)
        if types.is_struct(to):
            return self._struct(array, to)
        if types.is_time(type_):
            return self._cast(array, pa.time64("us")).cast(to)
        return self._cast(array, to)

    def _cast(self, array: pa.Array, to: pa.DataType) -> pa.Array:
        if not self._truncate or not _has_nanoseconds(array.type):
            return array.cast(to)
        if types.is_timestamp(array.type):
            # Local time would be rounded by the clocks of that zone, which repeat one hour of each year.
            if array.type.tz is not None:
                array = array.view(pa.timestamp("ns", TIMEZONE))
            return pc.floor_temporal(array, unit="microsecond").cast(to)
        return array.cast(to, safe=False)

    def _list(self, array: pa.Array, to: pa.DataType) -> pa.Array:
        # pyarrow's cast turns list views into invalid lists, so the offsets are computed here.
        lengths = pc.list_value_length(array).fill_null(0).cast(pa.int32())
        # Not a constant of the module: pa.array imports pandas, and most tasks have no lists.
        zero = pa.array([0], pa.int32())
        offsets = pa.concat_arrays([zero, pc.cumulative_sum_checked(lengths)])
        values = self._converted(array.flatten(), to.value_type)
        return pa.ListArray.from_arrays(offsets, values, type=to, mask=_nulls(array))

    def _map(self, array: pa.Array, to: pa.DataType) -> pa.Array:
        keys, items = _pairs(array)
        keys, items = self._converted(keys, to.key_type), self._converted(items, to.item_type)
        offsets = pc.subtract(array.offsets, array.offsets[0])
        return pa.MapArray.from_arrays(offsets, keys, items, type=to, mask=_nulls(array))

    def _struct(self, array: pa.Array, to: pa.DataType) -> pa.Array:
        if not to.num_fields:
            return pa.Array.from_buffers(to, len(array), array.buffers()[:1], offset=array.offset)
        parts = array.flatten()
        places = zip(field_places(array.type, to), to, strict=True)
        children = [self._converted(parts[place], field.type) for place, field in places]
        return pa.StructArray.from_arrays(children, fields=[*to], mask=_nulls(array))


def _has_nanoseconds(type_: pa.DataType) -> bool:
    return getattr(type_, "unit", None) == "ns"


def _is_damaged(column: pa.Array) -> bool:
    try:
        column.validate()
    except pa.ArrowInvalid:
        return True
    return False


@dataclass
class _UnsupportedType(Exception):
    """An Arrow type, described by `text`, for which Spark has no type."""

    text: str

    def __str__(self) -> str:
        return self.text


def _positions(schema: pa.Schema, names: Sequence[str]) -> list[int]:
    places = []
    for name in names:
        indices = schema.get_all_field_indices(name)
        if not indices:
            raise ColumnNotFound(missing_column(name, schema.names))
        if len(indices) > 1 or names.count(name) > 1:
            raise SourceError(f"there is more than one column {name!r}, which Spark cannot tell apart: leave them out")
        places += indices
    return places


def spark_type(type_: pa.DataType) -> pa.DataType:
    """Return the Arrow type of the Spark type that this type becomes.

    Raises:
        _UnsupportedType: Spark has no such type. The caller turns this into a SourceError that names the column.
    """
    if isinstance(type_, pa.BaseExtensionType):
        return spark_type(type_.storage_type)
    if types.is_dictionary(type_) or types.is_run_end_encoded(type_):
        return spark_type(type_.value_type)
    if type_ in _WIDENED:
        return _WIDENED[type_]
    if any(is_kind(type_) for is_kind in _UNCHANGED):
        return type_
    for is_kind, to in _SCALARS:
        if is_kind(type_):
            return to
    if types.is_timestamp(type_):
        return pa.timestamp("us", TIMEZONE if type_.tz is not None else None)
    if types.is_decimal(type_):
        digits = max(type_.precision - min(type_.scale, 0), type_.scale)
        if digits > _MAX_PRECISION:
            raise _UnsupportedType(f"decimals of {digits} digits, only of {_MAX_PRECISION}")
        return pa.decimal128(digits, max(type_.scale, 0))
    if types.is_map(type_):
        return pa.map_(_spark_field(type_.key_field, "key"), _spark_field(type_.item_field, "value"))
    if types.is_struct(type_):
        return pa.struct([_spark_field(field, field.name) for field in type_])
    if types.is_nested(type_) and not types.is_union(type_):
        return pa.list_(_spark_field(type_.value_field, "element"))
    raise _UnsupportedType(str(type_))


def _spark_field(field: pa.Field, name: str) -> pa.Field:
    return field.with_name(name).with_type(spark_type(field.type))


def _fits(field: pa.Field, to: pa.Field) -> bool:
    """Return whether data of the type `field` can be read as `to`.

    The types must be equal, except that `to` may allow nulls that `field` forbids, and may lack some fields of structs.
    """
    if field.nullable > to.nullable:
        return False
    if not types.is_nested(to.type):
        return bool(field.type.equals(to.type))
    if field.type.id != to.type.id:
        return False
    try:
        places = field_places(field.type, to.type) if types.is_struct(to.type) else range(to.type.num_fields)
    except ColumnNotFound:
        return False
    return all(_fits(field.type.field(place), to.type.field(number)) for number, place in enumerate(places))


def field_places(struct: pa.DataType, target: pa.DataType) -> Sequence[int]:
    """Return the index in `struct` of each field of `target`, by name.

    Raises:
        ColumnNotFound: `struct` lacks a field of `target`, or has two fields with its name.
    """
    names, available = [field.name for field in target], [field.name for field in struct]
    if names == available:
        return range(len(names))
    places = [struct.get_field_index(name) for name in names]
    if -1 in places:
        raise ColumnNotFound(missing("field", names[places.index(-1)], available))
    return places


def _describe_field(field: StructField) -> str:
    return field.dataType.simpleString() + ("" if field.nullable else " without nulls")


_READABLE: Sequence[Callable[[pa.DataType], bool]] = (
    lambda type_: types.is_integer(type_) and type_ != pa.uint64(),
    lambda type_: types.is_list(type_) or types.is_large_list(type_) or types.is_fixed_size_list(type_),
    types.is_large_string,
    types.is_large_binary,
    types.is_string_view,
    types.is_binary_view,
    types.is_fixed_size_binary,
    types.is_struct,
    types.is_map,
)


def is_readable(type_: pa.DataType) -> bool:
    """Return whether Spark's JVM reads this Arrow type without conversion, as all of Spark's own types."""
    if types.is_dictionary(type_):
        return not types.is_nested(type_.value_type) and is_readable(type_.value_type)
    if not any(is_kind(type_) for is_kind in _READABLE):
        return is_own(type_)
    return all(is_readable(type_.field(index).type) for index in range(type_.num_fields))


def is_own(type_: pa.DataType) -> bool:
    """Return whether this is the Arrow type of a Spark type, and Spark can hold each of its values."""
    try:
        return bool(type_.equals(spark_type(type_))) and not contains(type_, types.is_time)
    except _UnsupportedType:
        return False


def _forbids_nulls(field: pa.Field) -> bool:
    """Return whether the field, or a field nested in it, is not nullable."""
    below = (field.type.field(number) for number in range(field.type.num_fields))
    return not field.nullable or any(map(_forbids_nulls, below))


def misplaced_null(array: pa.Array, field: pa.Field, path: str = "") -> str | None:
    """Return the path of the column, at any depth, that has a null which `field` forbids; None if there is none.

    Values below a null are ignored. `path` is the path of the column that `field` is in.
    """
    if not _forbids_nulls(field):
        return None
    path = f"{path}.{field.name}" if path else field.name
    if array.null_count:
        if not field.nullable:
            return path
        array = array.drop_null()
    if types.is_map(field.type):
        children, fields = _pairs(array), [field.type.key_field, field.type.item_field]
    elif types.is_struct(field.type):
        children, fields = array.flatten(), [*field.type]
    elif types.is_list(field.type):
        children, fields = [array.flatten()], [field.type.value_field]
    else:
        return None
    below = (misplaced_null(child, inner, path) for child, inner in zip(children, fields, strict=True))
    return next(filter(None, below), None)


def _pairs(array: pa.Array) -> Sequence[pa.Array]:
    """Return the keys and the items of an array of maps."""
    start, stop = array.offsets[0].as_py(), array.offsets[-1].as_py()
    return [array.keys.slice(start, stop - start), array.items.slice(start, stop - start)]


def _nulls(array: pa.Array) -> pa.Array | None:
    return array.is_null() if array.null_count else None
