"""A dataset as a LazyFrame of Polars, which reads only the columns and rows that its plan needs."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from inspect import signature
from typing import Any, cast

import numpy as np
import pyarrow as pa

from dissociated.client.mapped import MappedVersion
from dissociated.client.request import Filtering
from dissociated.client.version_reader import VersionReader
from dissociated.codec.filter.row_filter import RowFilter
from dissociated.errors import DissociatedError, OptionError

try:
    import polars as pl
    from polars.io.plugins import register_io_source
except ImportError:
    raise OptionError("scan needs Polars: pip install polars") from None
if "is_pure" not in signature(register_io_source).parameters:
    raise OptionError(f"scan needs Polars 1.33 or later, not {pl.__version__}: pip install --upgrade polars")

try:
    from polars.lazyframe.resolver import FilterExpr, LazyFrameResolver, ResolvedLazyFrameProps
except ImportError:  # older releases of Polars have no resolvers
    LazyFrameResolver = object  # type: ignore[misc, assignment]

_FRAME_ROWS = 1 << 17  # least number of rows of a frame, which is read or skipped as a whole
_POLARS_OPERATORS = {"Gt": ">", "GtEq": ">=", "Lt": "<", "LtEq": "<=", "Eq": "=", "NotEq": "!="}
_FLIPPED = {"Gt": "Lt", "GtEq": "LtEq", "Lt": "Gt", "LtEq": "GtEq", "Eq": "Eq", "NotEq": "NotEq"}
_ORDERS = (">", ">=", "<", "<=")
_SCALAR_TYPES = {"Boolean": bool, "String": str, "Float64": float}
_EPOCH = datetime(1970, 1, 1)


def scan(version: VersionReader) -> pl.LazyFrame:
    """Return a LazyFrame over a version of a dataset."""
    stream = _stream(version)
    return stream if LazyFrameResolver is object else Resolver(version, stream).lazy()


def _stream(version: VersionReader) -> pl.LazyFrame:
    """Return a LazyFrame that reads the version for each query, and only the columns and rows that the query needs."""
    schema = version.info.schema

    def source(
        columns: list[str] | None, predicate: pl.Expr | None, rows: int | None, batch_size: int | None
    ) -> Iterator[pl.DataFrame]:
        conditions = None if predicate is None else implied_conditions(predicate, schema) or None
        limit = rows if predicate is None else None
        request = replace(
            version.client.defaults, columns=columns, filter=conditions, limit=limit, filtering=Filtering.AT_SERVER
        )
        remaining = rows
        for frame in map(pl.DataFrame, version.read(request)):
            if predicate is not None:  # rows that were cheap to skip are left out already
                frame = frame.filter(predicate)
            if remaining is not None:
                frame = frame.head(remaining)
                remaining -= frame.height
            yield frame
            if remaining == 0:
                return

    return register_io_source(source, schema=dict(pl.DataFrame(schema.empty_table()).schema), is_pure=True)


class Resolver(LazyFrameResolver):
    """The LazyFrame of a version, which Polars requests for each query with its columns and filters.

    A mapped version becomes a DataFrame, which Polars then scans in its threads, without Python. Polars applies all
    filters; batches that have no passing rows are left out before.
    """

    def __init__(self, version: VersionReader, stream: pl.LazyFrame) -> None:
        self._version = version
        self._stream = stream
        self._schema = stream.collect_schema()

    def schema(self) -> pl.Schema:
        """Return the types of the columns."""
        return self._schema

    def cse_eq(self, other: object) -> bool:
        """Return whether the other scan has the same rows."""
        return isinstance(other, Resolver) and other._version is self._version

    def resolve_lazyframe(
        self,
        *,
        projection: list[str] | None,
        limit: int | None,
        filters: list[FilterExpr],
        filter_columns: list[str],
        filter_drop_columns_idx: int | None,
        existing_resolved_version_key: str | None,
    ) -> tuple[pl.LazyFrame, ResolvedLazyFrameProps]:
        """Return the columns of the rows that pass all filters, among the first `limit` rows if there is a limit."""
        mapped = self._version.map(replace(self._version.client.defaults, limit=limit))
        columns = [*self._schema] if projection is None else [*dict.fromkeys([*projection, *filter_columns])]
        if mapped is None or not columns:
            lazy = self._stream
        else:
            conditions = []
            if limit is None:  # a limit comes before the filters
                conditions = [part for each in filters for part in implied_conditions(each.expr, mapped.schema)]
            lazy = _frames_of(mapped).select(columns, conditions).lazy()
        if limit is not None:
            lazy = lazy.head(limit)
        for each in filters:
            lazy = lazy.filter(each.expr)
        if projection is not None:
            lazy = lazy.select(projection)
        return lazy, ResolvedLazyFrameProps(applied_filters=range(len(filters)))


class _Frames:
    """The columns of a mapped version, in frames of Polars. Each column is converted once, when it is first needed.

    Numbers stay in the mapped memory. Polars keeps views of text, which take 16 bytes of this process's own memory for
    each value.
    """

    def __init__(self, mapped: MappedVersion) -> None:
        self._mapped = weakref.ref(mapped)
        self._columns: dict[tuple[int, str], pl.Series] = {}
        self._groups: list[list[int]] = []  # numbers of the batches of each frame
        rows = _FRAME_ROWS
        for number, batch in enumerate(mapped.batches):
            if rows >= _FRAME_ROWS:
                self._groups.append([])
                rows = 0
            self._groups[-1].append(number)
            rows += batch.num_rows

    def select(self, columns: Sequence[str], conditions: Sequence[Any]) -> pl.DataFrame:
        """Return these columns of at least the rows that pass all conditions."""
        mapped = self._mapped()
        assert mapped is not None
        groups = [*enumerate(self._groups)]
        if conditions:
            passing = {*mapped.passing_numbers(conditions)}
            groups = [(number, group) for number, group in groups if not passing.isdisjoint(group)]
        if not groups:
            return pl.DataFrame(mapped.schema.empty_table().select([*columns]))
        return pl.concat([self._frame(mapped, number, columns) for number, _ in groups], rechunk=False)

    def _frame(self, mapped: MappedVersion, number: int, columns: Sequence[str]) -> pl.DataFrame:
        missing = [name for name in columns if (number, name) not in self._columns]
        if missing:
            some = mapped.batches[self._groups[number][0] : self._groups[number][-1] + 1]
            table = pa.Table.from_batches([batch.select(missing) for batch in some])
            frame = cast("pl.DataFrame", pl.from_arrow(table, rechunk=False))
            self._columns.update({(number, name): frame[name] for name in missing})
        return pl.DataFrame([self._columns[number, name] for name in columns])


#: Kept as long as the mapped version. A LazyFrame that was collected keeps its DataFrame, also after `close`.
_frames: weakref.WeakKeyDictionary[MappedVersion, _Frames] = weakref.WeakKeyDictionary()


def _frames_of(mapped: MappedVersion) -> _Frames:
    frames = _frames.get(mapped)
    if frames is None:
        frames = _frames[mapped] = _Frames(mapped)
    return frames


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
    # Polars compares the values of an Enum by the order of its categories. Conditions compare them as text.
    return condition[1] not in _ORDERS or not pa.types.is_dictionary(schema.field(condition[0]).type)


def _conjuncts(tree: Any) -> Iterator[tuple[str, str, Any]]:
    match tree:
        case {"BinaryExpr": {"left": left, "op": "And", "right": right}}:
            yield from _conjuncts(left)
            yield from _conjuncts(right)
        case _:
            with suppress(OverflowError, ValueError):  # Python has no such date or time
                yield from [*_conditions(tree)]


def _conditions(tree: Any) -> Iterator[tuple[str, str, Any]]:
    match tree:
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
