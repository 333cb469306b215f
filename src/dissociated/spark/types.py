"""Spark's types in Arrow: a dataset has one schema, independent of the session that wrote it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from dissociated.errors import SourceError

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructField, StructType

_log = logging.getLogger(__name__)

TIMEZONE = "UTC"
"""Time zone of all timestamps in datasets.

A Spark timestamp is an instant. Its batches carry the time zone of their session, which only matters for display.
"""

_TYPE_KEY = b"dissociated.spark.type"
"""Metadata key of a column with Spark's type in JSON, if the Arrow type does not determine it."""

_SPARKS_CLASSES = {f"spark.{package}.linalg.{kind}UDT" for package in ("ml", "mllib") for kind in ("Vector", "Matrix")}
"""User-defined types of Spark itself. Naming these classes runs no foreign code."""


def arrow_schema(schema: StructType) -> pa.Schema:
    """Return the Arrow schema under which a DataFrame with this schema is published.

    Raises:
        SourceError: Arrow cannot carry the type of a column. The message names the column.
    """
    return pa.schema(
        [_with_kept_type(_checked_arrow_field(_carrier(field), of=field), field) for field in schema.fields]
    )


def schema_from_json(text: str) -> pa.Schema:
    """Return the `arrow_schema` of a schema of Spark in JSON."""
    from pyspark.sql.types import StructType

    return arrow_schema(StructType.fromJson(json.loads(text)))


def function_schema(schema: StructType, timezone: str = TIMEZONE) -> pa.Schema:
    """Return the Arrow schema under which Spark gives rows with this schema to Python.

    Args:
        schema: Spark's schema of the rows.
        timezone: The time zone of the session, which timestamps carry. Spark 4.1 writes UTC.

    Raises:
        SourceError: Arrow cannot carry the type of a column. The message names the column.
    """
    return pa.schema([_checked_arrow_field(field, timezone) for field in schema.fields])


def kept_type(field: pa.Field) -> DataType | None:
    """Return Spark's type of a column if the Arrow type does not determine it, such as a collation or an interval.

    The metadata comes from outside and is not trusted.

    Returns:
        None if the metadata has no type, an invalid type, a type that does not fit the column, or a type that names a
        class.
    """
    from pyspark.sql.types import StructField

    encoded = (field.metadata or {}).get(_TYPE_KEY)
    if encoded is None:
        return None
    try:
        plain = json.loads(encoded)
        if _names_a_class(plain):
            return None
        field_of_spark = StructField.fromJson(plain)
        return field_of_spark.dataType if _arrow_field(_carrier(field_of_spark)).type.equals(field.type) else None
    except Exception:  # Spark raises many kinds of exceptions for an invalid type
        return None


def _carrier(field: StructField) -> StructField:
    """Return the field with types that have an Arrow type in pyarrow, in place of those that only Spark's JVM has."""
    from pyspark.sql.types import StructField

    return StructField(field.name, _carrier_type(field.dataType), field.nullable, field.metadata)


def _carrier_type(data_type: DataType) -> DataType:
    from pyspark.sql import types

    if isinstance(data_type, types.CharType | types.VarcharType):
        return types.StringType()
    if isinstance(data_type, types.YearMonthIntervalType):
        return types.IntegerType()  # months, as in Spark's rows
    if isinstance(data_type, types.ArrayType):
        element = _carrier_type(data_type.elementType)
        # pyarrow has no field of nulls that is never null; it is that of `array()`, which has no elements.
        return types.ArrayType(element, data_type.containsNull or isinstance(element, types.NullType))
    if isinstance(data_type, types.MapType):
        key, value = _carrier_type(data_type.keyType), _carrier_type(data_type.valueType)
        return types.MapType(key, value, data_type.valueContainsNull)
    if isinstance(data_type, types.StructType):
        return types.StructType([*map(_carrier, data_type.fields)])
    return data_type


def _checked_arrow_field(field: StructField, timezone: str = TIMEZONE, of: StructField | None = None) -> pa.Field:
    from pyspark.errors import PySparkException

    try:
        return _arrow_field(field, timezone)
    except (PySparkException, ValueError) as error:  # ValueError: from pyarrow, for a void that is never null
        raise SourceError(
            f"column {field.name!r} has the type {(of or field).dataType.simpleString()}, "
            "which Arrow cannot carry: cast it, or drop the column"
        ) from error


def _arrow_field(field: StructField, timezone: str = TIMEZONE) -> pa.Field:
    import pyspark
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.sql.types import StructType

    # Spark 4.1 always makes instants in UTC, and has no argument for it.
    in_utc: dict[str, Any] = {} if pyspark.__version__.startswith("4.1.") else {"timezone": timezone}
    (arrow_field,) = to_arrow_schema(StructType([field]), **in_utc)
    return arrow_field


def _with_kept_type(arrow_field: pa.Field, field: StructField) -> pa.Field:
    from pyspark.sql.pandas.types import from_arrow_type

    plain = field.jsonValue()
    if from_arrow_type(arrow_field.type, prefer_timestamp_ntz=True) == field.dataType:
        return arrow_field
    if _names_a_class(plain):
        _log.warning(
            "column of a user-defined type is read as its storage type: column=%r type=%s", field.name, arrow_field.type
        )
        return arrow_field
    return arrow_field.with_metadata({**(arrow_field.metadata or {}), _TYPE_KEY: json.dumps(plain).encode()})


def _names_a_class(plain: Any) -> bool:
    """Return whether a type in JSON contains a class that is not Spark's own.

    Spark would import or unpickle such a class.
    """
    if isinstance(plain, list):
        return any(map(_names_a_class, plain))
    if not isinstance(plain, dict):
        return False
    if plain.get("type") == "udt":
        names = plain.get("pyClass"), plain.get("class")
        return "serializedClass" in plain or not any(
            names == (f"py{name}", f"org.apache.{name}") for name in _SPARKS_CLASSES
        )
    return any(map(_names_a_class, plain.values()))


def conform(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return `batch` with exactly this schema. No memory is copied unless a type really differs."""
    if batch.schema.equals(schema, check_metadata=True):
        return batch
    if all(map(same_layout, batch.schema.types, schema.types)):
        return pa.record_batch(_Relabelled(batch, schema))
    return batch.cast(schema)


def same_layout(first: pa.DataType, second: pa.DataType) -> bool:
    """Return whether two types differ only in time zones, names, nullability and metadata."""
    if pa.types.is_timestamp(first) and pa.types.is_timestamp(second):
        return bool(first.unit == second.unit)
    if not pa.types.is_nested(first):
        return bool(first == second)
    return first.id == second.id and all(
        same_layout(first.field(i).type, second.field(i).type) for i in range(first.num_fields)
    )


def is_alike(
    first: pa.DataType, second: pa.DataType, fits: Callable[[pa.DataType, pa.DataType], bool] = pa.DataType.equals
) -> bool:
    """Return whether two types are the same type of Spark: they may differ in time zones and nullability.

    Args:
        first: A type.
        second: A type.
        fits: Decides about two types that are not nested, and not both timestamps.
    """
    if pa.types.is_timestamp(first) and pa.types.is_timestamp(second):
        return bool(first.unit == second.unit and (first.tz is None) is (second.tz is None))
    if not pa.types.is_nested(first):
        return fits(first, second)
    if first.id != second.id or first.num_fields != second.num_fields:
        return False
    if pa.types.is_fixed_size_list(first) and first.list_size != second.list_size:
        return False
    fields = [(first.field(number), second.field(number)) for number in range(first.num_fields)]
    named = pa.types.is_struct(first)
    return all(is_alike(a.type, b.type, fits) and (not named or a.name == b.name) for a, b in fields)


@dataclass(frozen=True)
class _Relabelled:
    """The memory of a batch under another schema, exported by the Arrow C data interface.

    A cast is no substitute: it refuses a null struct whose fields are not nullable, and Spark has nulls below such
    structs.
    """

    batch: pa.RecordBatch
    schema: pa.Schema

    def __arrow_c_array__(self, requested_schema: object = None) -> tuple[object, object]:
        _, array = self.batch.__arrow_c_array__()
        return self.schema.__arrow_c_schema__(), array
