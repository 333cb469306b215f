"""Conditions on columns, decided on Arrow just as Spark decides them.

Both know three values, true, false and null, and only true passes. They differ over NaN: in Spark it equals itself, and
is larger than every other number.

They are an option of each read, and not what Spark hands over (`pushFilters`): Spark 4.1 to 4.3 keep that with the
DataFrame, and give the rows of one query to the next.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal, InvalidOperation
from functools import reduce
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as types

from dissociated.errors import OptionError

_COMPARED: dict[str, Callable[[pa.Array, pa.Scalar], pa.BooleanArray]] = {
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
_OPERATORS = (*_COMPARED, *_LISTED, *_TEXT, *_UNARY)


@dataclass(frozen=True)
class Condition:
    """That a column, or a field within one, compares with a value."""

    path: tuple[str, ...]
    operator: str
    value: Any = None

    @classmethod
    def parse(cls, plain: Any) -> Condition:
        """Raises OptionError for what is none."""
        match plain:
            case [column, str(operator), *value] if operator in _OPERATORS and len(value) == (operator not in _UNARY):
                path = (column,) if isinstance(column, str) else column
                listed = operator not in _LISTED or isinstance(value[0], list)
                if listed and isinstance(path, list | tuple) and path and all(isinstance(name, str) for name in path):
                    return cls(tuple(path), operator, *value)
        raise OptionError(
            f"{plain!r} is no filter: give a column, an operator ({', '.join(_OPERATORS)}) and, but for nulls, a value"
        )

    def decide(self, batch: pa.RecordBatch) -> pa.BooleanArray:
        """True, false or null for each row. Raises OptionError where the column cannot be compared so."""
        column = batch.column(self.path[0])
        try:
            for name in self.path[1:]:
                column = pc.struct_field(column, [column.type.get_field_index(name)])
            return self._decide(column)
        except (pa.ArrowException, _Uncertain, ValueError, TypeError, OverflowError, InvalidOperation):
            raise OptionError(
                f"column {'.'.join(self.path)!r} is {column.type}, for which {self.operator!r}"
                f"{'' if self.operator in _UNARY else f' {self.value!r}'} is not certain: filter the DataFrame by it"
            ) from None

    def _decide(self, column: pa.Array) -> pa.BooleanArray:
        if self.operator in _UNARY:
            return _UNARY[self.operator](column)
        if self.operator in _TEXT:
            if not types.is_string(column.type):
                raise _Uncertain
            return _TEXT[self.operator](column, pattern=self.value)
        if self.operator in _LISTED:
            found = _one_of(column, self.value)
            return found if self.operator == "in" else pc.invert(found)
        return _compared(self.operator, column, self.value)


@dataclass(frozen=True)
class Filters:
    """Lists of conditions: a row passes where all of one list are true."""

    either: tuple[tuple[Condition, ...], ...]

    @classmethod
    def parse(cls, text: str) -> Filters:
        """JSON: a list of `[column, operator, value]`, which must all be true, or a list of such lists.

        Raises OptionError.
        """
        try:
            plain = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise OptionError(f"the option filters is not JSON: {error}") from None
        if not isinstance(plain, list) or not plain:
            raise OptionError(f"the option filters is a list of [column, operator, value], not {text}")
        nested = all(isinstance(some, list) and some and all(isinstance(one, list) for one in some) for some in plain)
        lists = plain if nested else [plain]
        return cls(tuple(tuple(map(Condition.parse, some)) for some in lists))

    @property
    def columns(self) -> list[str]:
        """The columns that are looked at."""
        return [*dict.fromkeys(one.path[0] for some in self.either for one in some)]

    def mask(self, batch: pa.RecordBatch) -> pa.BooleanArray:
        """True for the rows that pass."""
        decided = [reduce(pc.and_kleene, (one.decide(batch) for one in some)) for some in self.either]
        return reduce(pc.or_kleene, decided)


class _Uncertain(Exception):
    """Arrow cannot tell what Spark would."""


def _compared(operator: str, column: pa.Array, value: Any) -> pa.BooleanArray:
    scalar = _scalar(value, column.type)
    known = _COMPARED[operator](column, scalar)
    if not types.is_floating(column.type) or value is None:
        return known
    is_nan = pc.is_nan(column)
    if math.isnan(value):
        alike = {"=": True, ">=": True, "!=": False, "<": False}
        return _always(column, operator == "<=") if operator not in alike else pc.equal(is_nan, alike[operator])
    return pc.or_(known, is_nan) if operator in (">", ">=") else known


def _always(column: pa.Array, value: bool) -> pa.BooleanArray:
    """The same for every row, but null where the column is."""
    return pc.if_else(pc.is_valid(column), value, None)


def _one_of(column: pa.Array, values: Sequence[Any]) -> pa.BooleanArray:
    known = [value for value in values if value is not None]
    if types.is_floating(column.type):
        found = reduce(pc.or_, [_compared("=", column, value) for value in known], _always(column, False))
    else:
        among = pa.array([_scalar(value, column.type) for value in known], column.type)
        found = pc.if_else(pc.is_valid(column), pc.is_in(column, among), None)
    return found if len(known) == len(values) else pc.or_kleene(found, pa.scalar(None, pa.bool_()))


def _scalar(value: Any, to: pa.DataType) -> pa.Scalar:
    """`value` as one of the column's type, which must hold just that. Raises _Uncertain, and what libarrow raises."""
    if value is None:
        return pa.scalar(None, to)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if types.is_decimal(to) and (number or isinstance(value, str)):
        return pa.scalar(Decimal(str(value)), to)
    if types.is_date(to) and isinstance(value, str):
        return pa.scalar(date.fromisoformat(value), to)
    if types.is_timestamp(to) and isinstance(value, str):
        moment = datetime.fromisoformat(value)
        if (moment.tzinfo is None) is (to.tz is None):
            return pa.scalar(moment, to)
    if types.is_floating(to) and number:
        scalar = pa.scalar(float(value), to)
        if math.isnan(value) or scalar.as_py() == value:
            return scalar
    if types.is_integer(to) and number and isinstance(value, int):
        return pa.scalar(value, to)
    if (types.is_boolean(to) and isinstance(value, bool)) or (types.is_string(to) and isinstance(value, str)):
        return pa.scalar(value, to)
    raise _Uncertain
