"""Conditions that a predicate of Polars implies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from dissociated.codec.filter.row_filter import RowFilter
from dissociated.errors import DissociatedError

_POLARS_OPERATORS = {"Gt": ">", "GtEq": ">=", "Lt": "<", "LtEq": "<=", "Eq": "=", "NotEq": "!="}
_FLIPPED = {"Gt": "Lt", "GtEq": "LtEq", "Lt": "Gt", "LtEq": "GtEq", "Eq": "Eq", "NotEq": "NotEq"}
_SCALAR_TYPES = {"Boolean": bool, "String": str, "Float64": float}
_EPOCH = datetime(1970, 1, 1)


def implied_conditions(predicate: pl.Expr, schema: pa.Schema) -> list[tuple[str, str, Any]]:
    """Return the parts of the predicate that can be written as conditions. Each is necessary for the predicate."""
    try:
        tree = json.loads(predicate.meta.serialize(format="json"))
    except (pl.exceptions.PolarsError, ValueError):
        return []
    return [conjunct for conjunct in _conjuncts(tree) if _is_valid(conjunct, schema)]


def _is_valid(condition: tuple[str, str, Any], schema: pa.Schema) -> bool:
    try:
        RowFilter.bind([condition], schema)
    except DissociatedError:
        return False
    return True


def _conjuncts(tree: Any) -> Iterator[tuple[str, str, Any]]:
    match tree:
        case {"BinaryExpr": {"left": left, "op": "And", "right": right}}:
            yield from _conjuncts(left)
            yield from _conjuncts(right)
        case {"BinaryExpr": {"left": {"Column": str(name)}, "op": str(op), "right": {"Literal": literal}}}:
            yield from _comparison(name, op, literal)
        case {"BinaryExpr": {"left": {"Literal": literal}, "op": str(op), "right": {"Column": str(name)}}}:
            yield from _comparison(name, _FLIPPED.get(op, op), literal)
        case {
            "Function": {
                "input": [{"Column": str(name)}, {"Literal": {"Scalar": {"List": list(encoded)}}}],
                "function": {"Boolean": {"IsIn": {"nulls_equal": False}}},
            }
        }:
            yield name, "in", pa.ipc.open_stream(bytes(encoded)).read_all().column(0).to_pylist()
        case {"Function": {"input": [{"Column": str(name)}], "function": {"Boolean": "IsNull"}}}:
            yield (name, "is null")  # type: ignore[misc]  # a tuple of two
        case {"Function": {"input": [{"Column": str(name)}], "function": {"Boolean": "IsNotNull"}}}:
            yield (name, "is not null")  # type: ignore[misc]
        case {
            "Function": {
                "input": [{"Column": str(name)}, {"Literal": least}, {"Literal": most}],
                "function": {"Boolean": {"IsBetween": _}},
            }
        }:
            yield from _comparison(name, "GtEq", least)
            yield from _comparison(name, "LtEq", most)


def _comparison(name: str, op: str, literal: Any) -> Iterator[tuple[str, str, Any]]:
    if op in _POLARS_OPERATORS and (value := _value(literal)) is not None:
        yield name, _POLARS_OPERATORS[op], value


def _value(literal: Any) -> Any:
    """Return the value of a literal as a condition uses it, or None if its type is not supported."""
    match literal:
        case {"Dyn": {"Int": int(value)}} | {"Dyn": {"Float": float(value)}}:
            return value
        case {"Dyn": {"Str": str(value)}}:
            return value
        case {"Scalar": {"Date": int(days)}}:
            return date(1970, 1, 1) + timedelta(days)
        case {"Scalar": {"Datetime": [int(ticks), "Microseconds", zone]}}:
            moment = _EPOCH + timedelta(microseconds=ticks)
            return moment if zone is None else moment.replace(tzinfo=UTC)
        case {"Scalar": {"Float32": float(value)}}:  # serialized as the shortest decimal that stands for it
            return float(np.float32(value))
        case {"Scalar": dict(scalar)} if len(scalar) == 1:
            kind, plain = next(iter(scalar.items()))
            python_type = int if kind.startswith(("Int", "UInt")) else _SCALAR_TYPES.get(kind)
            return plain if type(plain) is python_type else None
    return None
