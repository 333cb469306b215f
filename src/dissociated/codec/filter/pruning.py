"""Pruning by statistics: the batches that may have rows that pass a filter, and the batches of which every row passes.

Statistics decide only if they are certain. No batch with rows that pass is pruned, and no row passes unexamined that
does not pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import pyarrow as pa
import pyarrow.compute as pc

from dissociated.codec.filter.row_filter import compute
from dissociated.codec.filter.statistics import Bounds, Statistics
from dissociated.codec.filter.substrait import ColumnRef, FilterNode, FunctionCall, Value

_FLIPPED = {"lt": "gt", "lte": "gte", "gt": "lt", "gte": "lte", "equal": "equal", "not_equal": "not_equal"}
_ALWAYS = pc.scalar(True)
_NEVER = pc.scalar(False)


def passing_batches(tree: FilterNode, statistics: Statistics, columns: Sequence[int]) -> Sequence[bool]:
    """Return for each batch whether a row of it may pass the filter, by its statistics.

    Args:
        tree: The filter.
        statistics: The statistics of the batches.
        columns: The number of each column of the filter in the statistics.
    """
    bounds = _bounds(statistics, columns)
    passing: Sequence[bool] = may_pass(tree, statistics.num_rows, bounds).to_pylist()
    return passing


def whole_batches(tree: FilterNode, statistics: Statistics, columns: Sequence[int]) -> Sequence[bool]:
    """Return for each batch whether all rows of it certainly pass the filter. See `passing_batches`."""
    bounds = _bounds(statistics, columns)
    decided = _decide(_condition(tree, bounds, certain=True), statistics.num_rows, bounds)
    if decided is None:
        return [False] * len(statistics.num_rows)
    whole: Sequence[bool] = decided.fill_null(False).to_pylist()
    return whole


def _bounds(statistics: Statistics, columns: Sequence[int]) -> dict[int, Bounds]:
    """Return the bounds by the numbers that the filter gives to these columns."""
    return {at: statistics.bounds[column] for at, column in enumerate(columns) if column in statistics.bounds}


def may_pass(tree: FilterNode, num_rows: pa.Array, columns: dict[int, Bounds]) -> pa.BooleanArray:
    """Return for each batch whether a row of it may pass the filter; true if that is unknown.

    Nothing is known of a negated condition, except for tests for null.

    Args:
        tree: The filter.
        num_rows: The number of rows of each batch.
        columns: The bounds of each column of the filter that has any, by number.
    """
    expression = pc.and_kleene(pc.field("num_rows") > 0, _condition(tree, columns, certain=False))
    decided = _decide(expression, num_rows, columns)
    return pa.repeat(True, len(num_rows)) if decided is None else decided.fill_null(True)


def _decide(expression: pc.Expression, num_rows: pa.Array, columns: dict[int, Bounds]) -> pa.BooleanArray | None:
    """Compute an expression of the statistics; None if bounds cannot be compared with the values of the filter."""
    table = {"num_rows": num_rows}
    for number, bounds in columns.items():
        table |= {
            f"{number}.{bound_name}": _in_utc(getattr(bounds, bound_name))
            for bound_name in ("null_count", "min", "max")
        }
    try:
        return compute(expression, pa.table(table)).combine_chunks()
    except pa.ArrowException:
        return None


def _in_utc(values: pa.Array) -> pa.Array:
    """Return timestamps with the zone UTC, which is the only one in Substrait's filters. The unit stays."""
    type_ = values.type
    return values.cast(pa.timestamp(type_.unit, "UTC")) if pa.types.is_timestamp(type_) and type_.tz else values


def _condition(node: FilterNode, columns: dict[int, Bounds], certain: bool) -> pc.Expression:
    """Return an expression of the statistics of a batch.

    Args:
        node: The filter.
        columns: See `may_pass`.
        certain: If True, the expression is true only if all rows of the batch pass. If False, it is false only if no
            row passes.
    """
    match node:
        case FunctionCall("and", arguments):
            return reduce(pc.and_kleene, [_condition(argument, columns, certain) for argument in arguments])
        case FunctionCall("or", arguments):
            return reduce(pc.or_kleene, [_condition(argument, columns, certain) for argument in arguments])
        case FunctionCall("if_else", (condition, then, _)):  # otherwise null
            return pc.and_kleene(_condition(condition, columns, certain), _condition(then, columns, certain))
        case FunctionCall("not", (FunctionCall("is_null", inner),)):
            return _condition(FunctionCall("is_not_null", inner), columns, certain)
        case FunctionCall("not", (FunctionCall("is_not_null", inner),)):
            return _condition(FunctionCall("is_null", inner), columns, certain)
        case FunctionCall("is_null", (ColumnRef(number, False),)) if number in columns:
            nulls = pc.field(f"{number}.null_count")
            return nulls == pc.field("num_rows") if certain else nulls > 0
        case FunctionCall("is_not_null", (ColumnRef(number, False),)) if number in columns:
            nulls = pc.field(f"{number}.null_count")
            return nulls == 0 if certain else nulls < pc.field("num_rows")
        case FunctionCall(name, (ColumnRef(number, False), Value(value))) if name in _FLIPPED and number in columns:
            return (_all_compared if certain else _any_compared)(name, number, value, columns[number])
        case FunctionCall(name, (Value(value), ColumnRef(number, False))) if name in _FLIPPED and number in columns:
            return (_all_compared if certain else _any_compared)(_FLIPPED[name], number, value, columns[number])
    return _NEVER if certain else _ALWAYS


def _any_compared(name: str, number: int, value: pc.Expression, bounds: Bounds) -> pc.Expression:
    least, most = pc.field(f"{number}.min"), pc.field(f"{number}.max")
    possible = {
        "equal": pc.and_kleene(least <= value, most >= value),
        "not_equal": pc.or_kleene(least != value, most != value),
        "lt": least < value,
        "lte": least <= value,
        "gt": most > value,
        "gte": most >= value,
    }[name]
    return pc.and_kleene(pc.field(f"{number}.null_count") < pc.field("num_rows"), possible)


def _all_compared(name: str, number: int, value: pc.Expression, bounds: Bounds) -> pc.Expression:
    if pa.types.is_floating(bounds.min.type):  # bounds say nothing about NaN
        return _NEVER
    least, most = pc.field(f"{number}.min"), pc.field(f"{number}.max")
    certain = {
        "equal": pc.and_kleene(least == value, most == value),
        "not_equal": pc.or_kleene(least > value, most < value),
        "lt": most < value,
        "lte": most <= value,
        "gt": least > value,
        "gte": least >= value,
    }[name]
    return pc.and_kleene(pc.field(f"{number}.null_count") == 0, certain)
