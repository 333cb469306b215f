"""Spark's filters, evaluated on Arrow: the same rows pass as would in Spark.

Both know three values, true, false and null, and only true passes. They differ over NaN: in Spark it equals itself, and
is larger than every other number.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from decimal import Decimal
from functools import reduce
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as types
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringContains,
    StringEndsWith,
    StringStartsWith,
)

_COMPARED = {
    EqualTo: pc.equal,
    GreaterThan: pc.greater,
    GreaterThanOrEqual: pc.greater_equal,
    LessThan: pc.less,
    LessThanOrEqual: pc.less_equal,
}
#: What Spark gives as a literal, and the columns that are compared with it.
_LITERALS = {
    bool: types.is_boolean,
    int: types.is_integer,
    float: types.is_floating,
    str: types.is_string,
    bytes: types.is_binary,
    Decimal: types.is_decimal128,
    datetime.date: types.is_date32,
    datetime.datetime: types.is_timestamp,
}
_TEXT = {StringStartsWith: pc.starts_with, StringEndsWith: pc.ends_with, StringContains: pc.match_substring}


def supported(filter: Filter, schema: pa.Schema) -> bool:
    """Whether `passing` decides this filter as Spark does, on batches with this schema."""
    try:
        _evaluate(filter, pa.RecordBatch.from_pylist([], schema))
    except (_Unsupported, pa.ArrowException, KeyError, ValueError, TypeError, OverflowError):
        return False
    return True


def passing(batch: pa.RecordBatch, filters: Sequence[Filter]) -> pa.RecordBatch:
    """The rows that pass all `filters`, which are supported."""
    if not filters:
        return batch
    mask = reduce(pc.and_kleene, [_evaluate(one, batch) for one in filters])
    return batch if pc.all(mask, skip_nulls=False).as_py() else batch.filter(mask)


class _Unsupported(Exception):
    """Spark decides this filter itself."""


def _evaluate(filter: Filter, batch: pa.RecordBatch) -> pa.BooleanArray:
    if isinstance(filter, Not):
        return pc.invert(_evaluate(filter.child, batch))
    column = _column(batch, filter.attribute)  # type: ignore[attr-defined]  # every other filter has one
    match filter:
        case IsNull():
            return pc.is_null(column)
        case IsNotNull():
            return pc.is_valid(column)
        case In(value=values):
            return _one_of(column, values)
        case EqualNullSafe(value=None):
            return pc.is_null(column)
        case EqualNullSafe(value=value):
            return _compared(EqualTo, column, value).fill_null(False)
        case StringStartsWith(value=text) | StringEndsWith(value=text) | StringContains(value=text):
            if not types.is_string(column.type):
                raise _Unsupported
            return _TEXT[type(filter)](column, pattern=text)
        case _ if type(filter) in _COMPARED:
            return _compared(type(filter), column, filter.value)  # type: ignore[attr-defined]
        case _:
            raise _Unsupported


def _column(batch: pa.RecordBatch, path: Sequence[str]) -> pa.Array:
    name, *within = path
    column = batch.column(name)
    for field in within:
        column = pc.struct_field(column, [column.type.get_field_index(field)])
    return column


def _compared(kind: type[Filter], column: pa.Array, value: Any) -> pa.BooleanArray:
    scalar = _scalar(value, column.type)
    if not types.is_floating(column.type) or value is None:
        return _COMPARED[kind](column, scalar)
    if not math.isnan(value):
        known = _COMPARED[kind](column, scalar)
        return pc.or_(known, pc.is_nan(column)) if kind in (GreaterThan, GreaterThanOrEqual) else known
    if kind in (EqualTo, GreaterThanOrEqual):
        return pc.is_nan(column)
    if kind is LessThan:
        return pc.invert(pc.is_nan(column))
    return _always(column, kind is LessThanOrEqual)


def _always(column: pa.Array, value: bool) -> pa.BooleanArray:
    """The same for every row, but null where the column is."""
    return pc.if_else(pc.is_valid(column), value, None)


def _one_of(column: pa.Array, values: Sequence[Any]) -> pa.BooleanArray:
    known = [value for value in values if value is not None]
    if types.is_floating(column.type):
        found = reduce(pc.or_, [_compared(EqualTo, column, value) for value in known], _always(column, False))
    else:
        among = pa.array([_scalar(value, column.type) for value in known], column.type)
        found = pc.if_else(pc.is_valid(column), pc.is_in(column, among), None)
    return found if len(known) == len(values) else pc.or_kleene(found, pa.scalar(None, pa.bool_()))


def _scalar(value: Any, type_: pa.DataType) -> pa.Scalar:
    """`value` as one of the column's type, which must be able to hold just that. Raises _Unsupported."""
    if value is None:
        return pa.scalar(None, type_)
    if type(value) not in _LITERALS or not _LITERALS[type(value)](type_):
        raise _Unsupported
    if isinstance(value, datetime.datetime) and (value.tzinfo is None) is not (type_.tz is None):
        raise _Unsupported
    scalar = pa.scalar(value, type_)
    if types.is_floating(type_) and not math.isnan(value) and scalar.as_py() != value:
        raise _Unsupported
    return scalar
