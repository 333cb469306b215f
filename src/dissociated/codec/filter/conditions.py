"""Conditions on columns as expressions of pyarrow with the results that Spark has.

Spark and libarrow have three truth values, true, false and null, and only rows with true pass. They differ for NaN: in
Spark it equals itself and is larger than every other number.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import ROUND_FLOOR, Context, Decimal, InvalidOperation
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as types

from dissociated.base.display import missing_column
from dissociated.errors import ColumnNotFound, OptionError

_COMPARISONS: dict[str, Callable[[pc.Expression, pa.Scalar], pc.Expression]] = {
    "=": pc.equal,
    "!=": pc.not_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
    "<": pc.less,
    "<=": pc.less_equal,
}
_TEXT = {"starts with": pc.starts_with, "ends with": pc.ends_with, "contains": pc.match_substring}
_LISTED = ("in", "not in")
_UNARY = {"is null": pc.is_null, "is not null": pc.is_valid}
_MAX_SINGLY = 16  # values of a list that are compared one by one
_EPOCH = datetime(1970, 1, 1)
_NANOSECONDS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
_BELOW_MICROSECONDS = re.compile(r"[.,]\d{6}(\d{1,3})")
_OPERATORS = (*_COMPARISONS, *_LISTED, *_TEXT, *_UNARY)
_MAX_DIGITS = 38  # of Spark's decimals, to which Spark converts both sides
_EXACT = Context(prec=2 * _MAX_DIGITS)
_MAX_EXACT_FLOAT = 1 << 53  # below this, integers compare with a float as floats just as they do as decimals


class _Uncertain(Exception):
    """Spark's result cannot be determined with Arrow."""


class _NotRead(Exception):
    """A value is no date or no time of a column's type, and `form` is one."""

    def __init__(self, value: Any, to: pa.DataType) -> None:
        self.value = value
        self.form = "2026-11-24"
        if types.is_timestamp(to):
            self.form = "2026-11-24T10:30:00" if to.tz is None else "2026-11-24T10:30:00+01:00"


@dataclass(frozen=True)
class Condition:
    """A comparison of a column, or of a field nested in it, with a value."""

    path: tuple[str, ...]
    operator: str
    value: Any = None

    @classmethod
    def parse(cls, plain: Any) -> Condition:
        """Parse `[column, operator, value]`. Raises OptionError."""
        match plain:
            case [column, str(operator), *value] if operator in _OPERATORS and len(value) == (operator not in _UNARY):
                path = (column,) if isinstance(column, str) else column
                listed = operator not in _LISTED or _is_list(value[0])
                if listed and isinstance(path, list | tuple) and path and all(isinstance(name, str) for name in path):
                    return cls(tuple(path), operator, *value)
        raise OptionError(
            f"{plain!r} is not a condition: give a column, an operator ({', '.join(_OPERATORS)}) and, except for the "
            "null operators, a value"
        )

    def expression(self, schema: pa.Schema) -> pc.Expression:
        """Return the condition as an expression for batches of this schema.

        Raises:
            ColumnNotFound: The schema lacks the column.
            OptionError: The condition could select other rows than Spark would, or the name of the column is ambiguous.
        """
        if self.path[0] not in schema.names:
            raise ColumnNotFound(missing_column(self.path[0], schema.names, " to filter by"))
        if schema.names.count(self.path[0]) > 1:
            raise OptionError(f"column {self.path[0]!r} occurs more than once, so the filter is ambiguous")
        type_ = schema.field(self.path[0]).type
        with self._certain(type_):
            for name in self.path[1:]:
                type_ = type_.field(name).type
            return self._decide(pc.field(*self.path), type_)

    @contextmanager
    def _certain(self, type_: pa.DataType) -> Iterator[None]:
        try:
            yield
        except _NotRead as error:
            raise OptionError(
                f"column {'.'.join(self.path)!r} is {type_}, and {str(error.value)!r} cannot be one: write it in "
                f"ISO 8601, such as {error.form!r}"
            ) from None
        except (pa.ArrowException, _Uncertain, LookupError, ValueError, TypeError, OverflowError, InvalidOperation):
            raise OptionError(
                f"column {'.'.join(self.path)!r} is {type_}, so the condition {self.operator!r}"
                f"{'' if self.operator in _UNARY else f' {self.value!r}'} could select other rows than you mean: "
                f"write a value of that type, or read all rows and filter them in your program"
            ) from None

    def _decide(self, column: pc.Expression, type_: pa.DataType) -> pc.Expression:
        if types.is_dictionary(type_):
            column, type_ = column.cast(type_.value_type), type_.value_type
        if self.operator in _UNARY:
            return _UNARY[self.operator](column)
        if self.operator in _TEXT:
            if not _is_text(type_):
                raise _Uncertain
            return _TEXT[self.operator](column, pattern=self.value)
        if self.operator in _LISTED:
            result = _one_of(column, type_, self.value)
            return result if self.operator == "in" else pc.invert(result)
        return _compared(self.operator, column, type_, self.value)


@dataclass(frozen=True)
class Conditions:
    """Lists of conditions: a row passes if all conditions of any list are true."""

    alternatives: tuple[tuple[Condition, ...], ...]

    @classmethod
    def parse(cls, plain: Any) -> Conditions:
        """Parse a list of `[column, operator, value]`, which must all be true, or a list of such lists.

        Tuples are accepted in place of lists. Raises OptionError.
        """
        if not isinstance(plain, list | tuple) or not plain:
            raise OptionError(
                f"the filter {plain!r} is neither an expression of pyarrow nor a list of [column, operator, value], "
                "such as [('delay', '>', 60)]"
            )
        nested = all(
            _is_list(conditions) and conditions and all(_is_list(condition) for condition in conditions)
            for conditions in plain
        )
        lists = plain if nested else [plain]
        return cls(tuple(tuple(map(Condition.parse, conditions)) for conditions in lists))

    @property
    def columns(self) -> list[str]:
        """The names of the columns in the conditions."""
        return [*dict.fromkeys(condition.path[0] for conditions in self.alternatives for condition in conditions)]

    def expression(self, schema: pa.Schema) -> pc.Expression:
        """Return an expression for batches of this schema. Raises OptionError and ColumnNotFound."""
        expressions = [
            _joined(pc.and_kleene, [condition.expression(schema) for condition in conditions])
            for conditions in self.alternatives
        ]
        return _joined(pc.or_kleene, expressions)


def _joined(function: Callable[[Any, Any], Any], parts: Sequence[Any]) -> Any:
    """Join all parts with `function`, in a tree that is as flat as possible."""
    if len(parts) == 1:
        return parts[0]
    middle = len(parts) // 2
    return function(_joined(function, parts[:middle]), _joined(function, parts[middle:]))


def _is_text(type_: pa.DataType) -> bool:
    return bool(types.is_string(type_) or types.is_large_string(type_))


def _is_list(value: object) -> bool:
    return isinstance(value, list | tuple)


def _compared(operator: str, column: pc.Expression, type_: pa.DataType, value: Any) -> Any:
    if value is not None and (grid := _Grid.of(type_)):
        return _compared_on_grid(operator, column, type_, grid, grid.number(value))
    if value is not None and types.is_timestamp(type_):
        ticks, remainder = _ticks(value, type_)
        return _compared_with_floor(operator, column, pa.scalar(ticks, type_), exact=not remainder)
    if types.is_floating(type_) and _is_number(value) and type_ != pa.float64():
        column, type_ = column.cast(pa.float64()), pa.float64()  # which holds each value of it, and more
    scalar = _scalar(value, type_)
    result = _COMPARISONS[operator](column, scalar)
    if not types.is_floating(type_) or value is None:
        return result
    is_nan = pc.is_nan(column)
    if math.isnan(value):
        alike = {"=": True, ">=": True, "!=": False, "<": False}
        return _always(column, operator == "<=") if operator not in alike else pc.equal(is_nan, alike[operator])
    return pc.or_kleene(result, is_nan) if operator in (">", ">=") else result  # both are null where the column is


@dataclass(frozen=True)
class _Grid:
    """All numbers from `least` to `most` that have at most `scale` digits after the point; None for integers."""

    least: Decimal
    most: Decimal
    scale: int | None

    @classmethod
    def of(cls, type_: pa.DataType) -> _Grid | None:
        """Return the grid of a column's type, or None if its values are not exact numbers."""
        if types.is_integer(type_):
            bits = type_.bit_width - types.is_signed_integer(type_)
            return cls(Decimal(-(1 << bits) if types.is_signed_integer(type_) else 0), Decimal((1 << bits) - 1), None)
        if types.is_decimal(type_) and 0 <= type_.scale <= type_.precision <= _MAX_DIGITS:
            most = Decimal(10**type_.precision - 1).scaleb(-type_.scale, _EXACT)
            return cls(-most, most, type_.scale)
        return None

    def number(self, value: Any) -> Decimal:
        """Return the exact number that a column is compared with.

        Raises _Uncertain if Spark rounds it, or if it is not a number.
        """
        if isinstance(value, bool) or not isinstance(value, int | float | Decimal | str):
            raise _Uncertain
        small_float = isinstance(value, float) and abs(value) < _MAX_EXACT_FLOAT
        if self.scale is None and not (small_float or isinstance(value, int | Decimal)):
            raise _Uncertain
        number = Decimal(str(value))
        _, digits, exponent = number.as_tuple()
        if not isinstance(exponent, int):  # NaN, infinity
            raise _Uncertain
        whole = max(len(digits) + exponent, self.most.adjusted() + 1)
        if whole + max(self.scale or 0, -exponent) > _MAX_DIGITS:
            raise _Uncertain
        return number

    def floor(self, value: Decimal) -> Decimal:
        """Return the largest number of the grid that is not above `value`."""
        return value.quantize(Decimal(1).scaleb(-(self.scale or 0)), ROUND_FLOOR, _EXACT)

    def has(self, value: Decimal) -> bool:
        """Return whether the column can have this value."""
        return self.least <= value <= self.most and self.floor(value) == value

    def scalar(self, value: Decimal, type_: pa.DataType) -> pa.Scalar:
        """Return a number of the grid as a scalar of Arrow."""
        return pa.scalar(int(value) if self.scale is None else self.floor(value), type_)


def _compared_on_grid(operator: str, column: pc.Expression, type_: pa.DataType, grid: _Grid, value: Decimal) -> Any:
    if not grid.least <= value <= grid.most:
        larger = value < grid.least
        return _always(column, operator in (("!=", ">", ">=") if larger else ("!=", "<", "<=")))
    below = grid.floor(value)
    return _compared_with_floor(operator, column, grid.scalar(below, type_), exact=below == value)


def _compared_with_floor(operator: str, column: pc.Expression, below: pa.Scalar, exact: bool) -> Any:
    """Compare a column with a value, given `below`: the largest value of the column's type that is not above it.

    `exact` is whether `below` equals the value.
    """
    if not exact:
        if operator in ("=", "!="):
            return _always(column, operator == "!=")
        operator = ">" if operator in (">", ">=") else "<="
    return _COMPARISONS[operator](column, below)


def _always(column: pc.Expression, value: bool) -> Any:
    """Return `value` for every row in which the column is not null, and null for the others."""
    return pc.if_else(pc.is_valid(column), value, pa.scalar(None, pa.bool_()))


def _one_of(column: pc.Expression, type_: pa.DataType, values: Sequence[Any]) -> Any:
    non_null = [value for value in values if value is not None]
    if types.is_floating(type_) or len(non_null) <= _MAX_SINGLY:
        comparisons = [_compared("=", column, type_, value) for value in non_null]
        result = _joined(pc.or_kleene, comparisons) if comparisons else _always(column, False)
    else:
        value_set = pa.array([*_values(non_null, type_)], type_)
        result = pc.if_else(pc.is_valid(column), pc.is_in(column, value_set), pa.scalar(None, pa.bool_()))
    return result if len(non_null) == len(values) else pc.or_kleene(result, pa.scalar(None, pa.bool_()))


def _values(values: Sequence[Any], type_: pa.DataType) -> Iterator[pa.Scalar]:
    """Yield the values that a column of this type can have."""
    grid = _Grid.of(type_)
    for value in values:
        if types.is_timestamp(type_):
            ticks, remainder = _ticks(value, type_)
            if not remainder:
                yield pa.scalar(ticks, type_)
        elif grid is None:
            yield _scalar(value, type_)
        elif grid.has(number := grid.number(value)):
            yield grid.scalar(number, type_)


def _parse_iso(kind: type[date], value: str, to: pa.DataType) -> date:
    """Parse a date or a datetime. Raise _NotRead if the text has another form."""
    try:
        return kind.fromisoformat(value)
    except ValueError:
        raise _NotRead(value, to) from None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _ticks(value: Any, to: pa.DataType) -> tuple[int, int]:
    """Return a timestamp in the unit of a column, rounded down, and the rest in nanoseconds.

    Digits of a text below microseconds only count if the column has nanoseconds; otherwise Spark ignores them. Raises
    _Uncertain and ValueError.
    """
    moment = _parse_iso(datetime, value, to) if isinstance(value, str) else value
    if not isinstance(moment, datetime):
        raise _Uncertain
    if (moment.tzinfo is None) is not (to.tz is None):
        raise _NotRead(value, to)
    nanoseconds = getattr(moment, "nanosecond", 0)  # pandas' timestamps have it
    if isinstance(value, str) and to.unit == "ns" and (below := _BELOW_MICROSECONDS.search(value)):
        nanoseconds = int(below[1].ljust(3, "0"))
    since = moment - (_EPOCH if moment.tzinfo is None else _EPOCH.replace(tzinfo=UTC))
    return divmod(since // timedelta(microseconds=1) * 1000 + nanoseconds, _NANOSECONDS[to.unit])


def _scalar(value: Any, to: pa.DataType) -> pa.Scalar:
    """`value` as one of the column's type, which must hold just that. Raises _Uncertain, and what libarrow raises."""
    if value is None:
        return pa.scalar(None, to)
    if types.is_date(to) and isinstance(value, str | date) and not isinstance(value, datetime):
        return pa.scalar(_parse_iso(date, value, to) if isinstance(value, str) else value, to)
    if types.is_floating(to) and _is_number(value):
        scalar = pa.scalar(float(value), to)
        if math.isnan(value) or scalar.as_py() == value:
            return scalar
    if (types.is_boolean(to) and isinstance(value, bool)) or (_is_text(to) and isinstance(value, str)):
        return pa.scalar(value, to)
    raise _Uncertain
