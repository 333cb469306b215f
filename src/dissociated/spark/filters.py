"""Conditions on rows: the option `filters`, in JSON, and the conditions of Spark's queries.

The data source in Python supports only the option. It does not implement `pushFilters`, because Spark 4.1 to 4.3 keep
the pushed filters with the DataFrame and return the rows of one query to the next.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pyarrow as pa
import pyarrow.types as types

from dissociated.codec.filter.conditions import Conditions
from dissociated.errors import OptionError
from dissociated.spark.columns import is_own

_MAX_LISTED_VALUES = 64  # values of an IN condition that a server accepts
_NULL_OPERATORS = {"IS_NULL": "is null", "IS_NOT_NULL": "is not null"}


def parse_filters(text: str) -> Conditions:
    """Parse JSON: a list of `[column, operator, value]`, which must all be true, or a list of such lists.

    Rows pass a list of lists if they pass any of its lists.

    Raises:
        OptionError: The text is not JSON, or not a valid filter.
    """
    try:
        plain = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise OptionError(f'the option filters is not JSON: {error}. Write it like [["dep_delay", ">", 60]]') from None
    return Conditions.parse(plain)


def as_filters(conditions: Sequence[tuple[str, str, Sequence[Any]]]) -> list[Any]:
    """Convert conditions of Spark (a column, an operator, values) to the form of the option `filters`.

    Servers reject long lists of values. A long list of integers becomes its bounds, and any other long list is omitted;
    Spark itself applies the exact condition later.
    """
    filters: list[Any] = []
    for column, operator, all_values in conditions:
        values = [value for value in all_values if value is not None]  # no value equals null
        if operator in _NULL_OPERATORS:
            filters.append([column, _NULL_OPERATORS[operator]])
        elif operator != "IN":
            filters += ([column, operator, value] for value in values)
        elif 0 < len(values) <= _MAX_LISTED_VALUES:
            filters.append([column, "in", values])
        elif values and all(type(value) is int for value in values):
            filters += [column, ">=", min(values)], [column, "<=", max(values)]
    return filters


def exact_filters(conditions: Sequence[Any], schema: pa.Schema) -> list[Any]:
    """Return the conditions that mean the same for the Arrow columns of `schema` as for Spark.

    Other conditions are omitted.

    Args:
        conditions: Conditions as `as_filters` returns them. Dates are days since 1970, instants are microseconds.
        schema: The Arrow schema of the dataset.
    """
    filters = []
    for column, operator, *values in conditions:
        if schema.names.count(column) != 1 or not is_own(schema.field(column).type):
            continue
        type_ = schema.field(column).type
        with suppress(OptionError, OverflowError):
            condition = [column, operator, *(_value(value, type_) for value in values)]
            Conditions.parse([condition]).expression(schema)
            filters.append(condition)
    return filters


def _value(plain: Any, type_: pa.DataType) -> Any:
    if isinstance(plain, list):
        return [_value(item, type_) for item in plain]
    if types.is_date32(type_):
        return date(1970, 1, 1) + timedelta(days=plain)
    if types.is_timestamp(type_):
        return datetime(1970, 1, 1, tzinfo=None if type_.tz is None else UTC) + timedelta(microseconds=plain)
    return plain
