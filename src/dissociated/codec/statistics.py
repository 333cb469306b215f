"""Statistics of a segment: how large and how small the values of each record batch are.

They follow the end-of-stream marker of an IPC stream, where every Arrow reader stops:

    IPC stream   a schema and one record batch, uncompressed, aligned to 8 bytes, with a row for each record batch
    8 bytes      its length, little-endian
    8 bytes      "DISSTATS"

Its columns are `num_rows` (int64) and, for top-level columns by their number i, `i.null_count` (int64), `i.min` and
`i.max`, of the column's own type; null where they are not known. They only ever tell which batches need not be read,
and bounds that are wider than the values are as good.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as types

from dissociated.buffers import Buffer
from dissociated.errors import DissociatedError
from dissociated.format.encapsulated import end_of_stream, message_at
from dissociated.format.message import is_compressed

STATISTICS_MAGIC = b"DISSTATS"

_ALIGNMENT = 8
_TAIL = 8 + len(STATISTICS_MAGIC)
_LEAST_ROWS = 10_000  # of a batch, as Spark's Python has it: to look at a smaller one costs more than it can spare
_MAX_VALUES = 1 << 20  # kept while a segment is written; of one with more, nothing is written
_MAX_SIZE = 1 << 28  # bytes


@dataclass(frozen=True)
class Bounds:
    """Of one column, for each record batch: how many values are null, and between what the others lie."""

    null_count: pa.Array
    min: pa.Array
    max: pa.Array

    @classmethod
    def unknown(cls, count: int, type_: pa.DataType) -> Bounds:
        """Those of so many batches of which nothing is known."""
        return cls(pa.nulls(count, pa.int64()), pa.nulls(count, type_), pa.nulls(count, type_))


@dataclass(frozen=True)
class Statistics:
    """What is known of each record batch of a stream: its rows, and the bounds of columns by their number."""

    num_rows: pa.Array
    bounds: dict[int, Bounds]

    @classmethod
    def unknown(cls, num_rows: Sequence[int]) -> Statistics:
        """Those of batches with so many rows, of which nothing more is known."""
        return cls(pa.array(num_rows, pa.int64()), {})

    @classmethod
    def concatenate(cls, parts: Sequence[Statistics]) -> Statistics:
        """Those of streams that follow each other."""
        types_ = {column: bounds.min.type for one in parts for column, bounds in one.bounds.items()}
        bounds = {}
        for column, type_ in sorted(types_.items()):
            bounds_of_parts = [one.bounds.get(column) or Bounds.unknown(len(one.num_rows), type_) for one in parts]
            bounds[column] = Bounds(
                *(pa.concat_arrays([getattr(some, what) for some in bounds_of_parts]) for what in _BOUND_NAMES)
            )
        return cls(pa.concat_arrays([one.num_rows for one in parts]), bounds)

    def encode(self) -> bytes:
        """As it follows an IPC stream that ends at a multiple of 8 bytes."""
        named = {"num_rows": self.num_rows}
        for column, bounds in self.bounds.items():
            named |= {f"{column}.{what}": getattr(bounds, what) for what in _BOUND_NAMES}
        batch = pa.record_batch(list(named.values()), list(named))
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        encoded: bytes = sink.getvalue().to_pybytes()
        return encoded + len(encoded).to_bytes(8, "little") + STATISTICS_MAGIC


_BOUND_NAMES = ("null_count", "min", "max")


class StatisticsCollector:
    """Looks at record batches of one schema as they are written; at these of their columns, or at all."""

    def __init__(self, schema: pa.Schema, columns: Sequence[int] | None = None) -> None:
        wanted = range(len(schema)) if columns is None else columns
        self._columns = {number: found for number in wanted if (found := _column(schema.field(number).type))}
        self._num_rows: list[int] = []
        self._left = _MAX_VALUES

    def add(self, batch: pa.RecordBatch) -> None:
        """The next batch, which is valid."""
        self._left -= len(self._columns)
        if self._left < 0:
            self._columns = {}
        self._num_rows.append(batch.num_rows)
        for number, column in self._columns.items():
            column.add(batch.column(number))

    def statistics(self) -> Statistics | None:
        """What was found; None where that is nothing."""
        bounds = {number: column.bounds() for number, column in self._columns.items() if column.known}
        return Statistics(pa.array(self._num_rows, pa.int64()), bounds) if bounds else None


class _ColumnCollector:
    """A column whose values are numbers of this `dtype`."""

    def __init__(self, type_: pa.DataType, dtype: np.dtype) -> None:
        self._type = type_
        self._dtype = dtype
        self._found: dict[str, list[Any]] = {what: [] for what in _BOUND_NAMES}
        self.known = False

    def add(self, values: pa.Array) -> None:
        found = values.null_count, *(self._range(values) if len(values) >= _LEAST_ROWS else (None, None))
        self.known = self.known or found[1] is not None
        for what, value in zip(_BOUND_NAMES, found, strict=True):
            self._found[what].append(value)

    def bounds(self) -> Bounds:
        storage = pa.from_numpy_dtype(self._dtype)
        least, most = (pa.array(self._found[what], storage).view(self._type) for what in ("min", "max"))
        return Bounds(pa.array(self._found["null_count"], pa.int64()), least, most)

    def _range(self, values: pa.Array) -> tuple[Any, Any]:
        """Slots of nulls count, too: that only widens the bounds, and to look at validity takes ten times as long."""
        offset = values.offset * self._dtype.itemsize
        content = np.frombuffer(values.buffers()[1], self._dtype, len(values), offset)
        least, most = content.min().item(), content.max().item()
        return (None, None) if least != least else (least, most)  # NaN is among them


def _column(type_: pa.DataType) -> _ColumnCollector | None:
    """What looks at values of this type; None where that takes about as long as to write them, as for strings."""
    if types.is_integer(type_) or types.is_float32(type_) or types.is_float64(type_):
        return _ColumnCollector(type_, np.dtype(type_.to_pandas_dtype()))
    if types.is_temporal(type_) and not types.is_interval(type_):
        return _ColumnCollector(type_, np.dtype(f"i{type_.bit_width // 8}"))
    return None


def read_statistics(memory: Buffer, end: int, schema: pa.Schema, num_rows: Sequence[int]) -> Statistics | None:
    """Those after the IPC stream of this schema, whose last message ends at `end`, and whose batches have these rows.

    None where there are none, or such as do not fit: whoever wrote them may have written anything.
    """
    whole = memoryview(memory).cast("B")
    marker = end_of_stream()
    start = end + len(marker)
    stop = len(whole) - _TAIL
    if start % _ALIGNMENT or not start < stop <= start + _MAX_SIZE or whole[end:start] != marker:
        return None
    if (
        whole[-len(STATISTICS_MAGIC) :] != STATISTICS_MAGIC
        or int.from_bytes(whole[stop : stop + 8], "little") != stop - start
    ):
        return None
    try:
        batch = _batch(whole[start:stop])
        return None if batch is None else _checked(batch, schema, num_rows)
    except (DissociatedError, pa.ArrowException, OSError, ValueError, IndexError, KeyError):
        return None


def _batch(stream: memoryview) -> pa.RecordBatch | None:
    """The one record batch of this IPC stream, if nothing in it is compressed."""
    first = message_at(stream, 0, len(stream))
    second = None if first is None else message_at(stream, first.body_at + first.parsed.body_length, len(stream))
    if second is None or is_compressed(second.header):
        return None
    batch = pa.ipc.open_stream(stream).read_next_batch()
    batch.validate(full=True)
    return batch


def _checked(batch: pa.RecordBatch, schema: pa.Schema, num_rows: Sequence[int]) -> Statistics | None:
    """What `batch` says of a stream of this schema, as far as the types fit; None where it is of another stream."""
    counted = batch.column("num_rows")
    if counted.type != pa.int64() or counted.to_pylist() != [*num_rows]:
        return None
    found = {}
    names = set(batch.schema.names)
    for number, field in enumerate(schema):
        if {f"{number}.{what}" for what in _BOUND_NAMES} <= names:
            bounds = Bounds(*(batch.column(f"{number}.{what}") for what in _BOUND_NAMES))
            if bounds.null_count.type == pa.int64() and bounds.min.type == bounds.max.type == field.type:
                found[number] = bounds
    return Statistics(counted, found) if found else None
