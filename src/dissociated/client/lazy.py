"""A dataset as a LazyFrame of Polars, which reads only the columns and rows that its plan needs."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from typing import Any, cast

import numpy as np
import polars as pl
import pyarrow as pa
from polars.io.plugins import register_io_source

from dissociated.client.mapped import MappedVersion
from dissociated.client.request import Filtering
from dissociated.client.version_reader import VersionReader
from dissociated.codec.filter.row_filter import RowFilter
from dissociated.errors import DissociatedError

_POLARS_OPERATORS = {"Gt": ">", "GtEq": ">=", "Lt": "<", "LtEq": "<=", "Eq": "=", "NotEq": "!="}
_FLIPPED = {"Gt": "Lt", "GtEq": "LtEq", "Lt": "Gt", "LtEq": "GtEq", "Eq": "Eq", "NotEq": "NotEq"}
_SCALAR_TYPES = {"Boolean": bool, "String": str, "Float64": float}
_EPOCH = datetime(1970, 1, 1)
_FRAME_ROWS = 1 << 17  # least rows of a frame, which Polars filters at once


def scan(version: VersionReader) -> pl.LazyFrame:
    """Return a LazyFrame over a version of a dataset."""
    schema = version.info.schema

    def source(
        columns: list[str] | None, predicate: pl.Expr | None, rows: int | None, batch_size: int | None
    ) -> Iterator[pl.DataFrame]:
        conditions = None if predicate is None else _conditions(predicate, schema) or None
        limit = rows if predicate is None else None
        request = replace(
            version.client.defaults, columns=columns, filter=conditions, limit=limit, filtering=Filtering.AT_SERVER
        )
        mapped = version.map(request)
        if mapped is None or columns == []:
            frames: Iterator[pl.DataFrame] = map(pl.DataFrame, version.read(request))
        else:
            frames = _frames_of(mapped).select(columns, conditions)
        remaining = rows
        for frame in frames:
            if predicate is not None:  # rows are left out by then only as far as that costs nothing
                frame = frame.filter(predicate)
            if remaining is not None:
                frame = frame.head(remaining)
                remaining -= frame.height
            yield frame
            if remaining == 0:
                return

    frame_schema = pl.DataFrame(schema.empty_table()).schema
    return register_io_source(source, schema=dict(frame_schema), is_pure=True)


class _Frames:
    """The columns of a mapped version, in frames of Polars. Each column is converted once, when it is first needed.

    Numbers stay in the mapped memory. Polars keeps views of text, which take 16 bytes of this process's own memory for
    each value.
    """

    def __init__(self, mapped: MappedVersion) -> None:
        self._mapped = weakref.ref(mapped)
        self._names = mapped.schema.names
        self._columns: dict[tuple[int, str], pl.Series] = {}
        self._groups: list[list[int]] = []  # numbers of the batches of each frame
        rows = _FRAME_ROWS
        for number, batch in enumerate(mapped.batches):
            if rows >= _FRAME_ROWS:
                self._groups.append([])
                rows = 0
            self._groups[-1].append(number)
            rows += batch.num_rows

    def select(self, columns: Sequence[str] | None, conditions: Any) -> Iterator[pl.DataFrame]:
        """Yield these columns of at least the rows that pass the conditions."""
        mapped = self._mapped()
        assert mapped is not None
        passing = None if conditions is None else {*mapped.passing_numbers(conditions)}
        for number, group in enumerate(self._groups):
            if passing is None or not passing.isdisjoint(group):
                yield self._frame(mapped, number, self._names if columns is None else columns)

    def _frame(self, mapped: MappedVersion, number: int, columns: Sequence[str]) -> pl.DataFrame:
        missing = [name for name in columns if (number, name) not in self._columns]
        if missing:
            some = mapped.batches[self._groups[number][0] : self._groups[number][-1] + 1]
            table = pa.Table.from_batches([batch.select(missing) for batch in some])
            frame = cast("pl.DataFrame", pl.from_arrow(table, rechunk=False))
            self._columns.update({(number, name): frame[name] for name in missing})
        return pl.DataFrame([self._columns[number, name] for name in columns])


#: Kept as long as the mapped version: `DatasetHandle.close` drops both.
_frames: weakref.WeakKeyDictionary[MappedVersion, _Frames] = weakref.WeakKeyDictionary()


def _frames_of(mapped: MappedVersion) -> _Frames:
    frames = _frames.get(mapped)
    if frames is None:
        frames = _frames[mapped] = _Frames(mapped)
    return frames


def _conditions(predicate: pl.Expr, schema: pa.Schema) -> list[tuple[str, str, Any]]:
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
