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

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.types as types

from dissociated.base.buffers import Buffer
from dissociated.errors import DissociatedError
from dissociated.format.encapsulated import end_of_stream, message_at
from dissociated.format.message import is_compressed

STATISTICS_MAGIC = b"DISSTATS"
MAX_STATISTICS = 1 << 28  # bytes

_ALIGNMENT = 8
_TAIL = 8 + len(STATISTICS_MAGIC)
_LEAST_ROWS = 10_000  # of a batch, as Spark's Python has it: to look at a smaller one costs more than it can spare
_MAX_MEAN = 24  # bytes of a value, with 4 for where it ends
_MAX_LENGTH = 256  # bytes of a bound
_SAMPLE = 1024  # values that a batch begins with
_MAX_SHORT_DIGITS = 18
_MAX_VALUES = 1 << 20  # kept while a segment is written; of one with more, nothing is written


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
    """Looks at record batches of one schema as they are written; at these of their columns, or at all.

    What takes long is not looked at, but if it is `thorough`: small batches, text, decimals, and which slots are null.
    """

    def __init__(self, schema: pa.Schema, columns: Sequence[int] | None = None, thorough: bool = False) -> None:
        wanted = range(len(schema)) if columns is None else columns
        self._columns = {number: found for number in wanted if (found := _column(schema.field(number).type, thorough))}
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


_Range: TypeAlias = tuple[Any, Any]
_UNKNOWN: _Range = (None, None)


class _ColumnCollector(ABC):
    """A column of one type. Its bounds are kept as values of the type `storage`, which has the same layout."""

    def __init__(self, type_: pa.DataType, storage: pa.DataType, thorough: bool) -> None:
        self._type = type_
        self._storage = storage
        self._thorough = thorough
        self._found: dict[str, list[Any]] = {what: [] for what in _BOUND_NAMES}
        self.known = thorough

    def add(self, values: pa.Array) -> None:
        """Slots of nulls count, too, which only widens the bounds. To leave them out takes ten times as long."""
        null_count = values.null_count
        if self._thorough and null_count:
            values = values.drop_null()
        looked_at = len(values) >= (1 if self._thorough else _LEAST_ROWS)
        found = null_count, *(self._range(values) if looked_at else _UNKNOWN)
        self.known = self.known or found[1] is not None
        for what, value in zip(_BOUND_NAMES, found, strict=True):
            self._found[what].append(value)

    def bounds(self) -> Bounds:
        least, most = (pa.array(self._found[what], self._storage).view(self._type) for what in ("min", "max"))
        return Bounds(pa.array(self._found["null_count"], pa.int64()), least, most)

    @abstractmethod
    def _range(self, values: pa.Array) -> _Range: ...


class _NumberCollector(_ColumnCollector):
    """Its values are numbers of this `dtype`."""

    def __init__(self, type_: pa.DataType, dtype: np.dtype, thorough: bool) -> None:
        super().__init__(type_, pa.from_numpy_dtype(dtype), thorough)
        self._dtype = dtype

    def _range(self, values: pa.Array) -> _Range:
        offset = values.offset * self._dtype.itemsize
        content = np.frombuffer(values.buffers()[1], self._dtype, len(values), offset)
        least, most = content.min().item(), content.max().item()
        return _UNKNOWN if least != least else (least, most)  # NaN is among them


class _DecimalCollector(_ColumnCollector):
    """Its values have up to 18 digits. So the first of their two words has all of them, and the other the sign."""

    def _range(self, values: pa.Array) -> _Range:
        words = np.frombuffer(values.buffers()[1], np.int64, 2 * len(values), 16 * values.offset)[::2]
        return _decimal(words.min(), self._type.scale), _decimal(words.max(), self._type.scale)


def _decimal(unscaled: np.int64, scale: int) -> Decimal:
    return Decimal(int(unscaled)).scaleb(-scale)


class _ValueCollector(_ColumnCollector):
    """Its values can be compared, but are no numbers, and that takes about as long as to write them.

    So it is not done where they are long, nor where a batch begins as the last one did, with values of some range:
    whoever looks for values could hardly tell these batches apart.
    """

    def __init__(self, type_: pa.DataType, storage: pa.DataType, thorough: bool) -> None:
        super().__init__(type_, storage, thorough)
        self._first = _UNKNOWN

    def _range(self, values: pa.Array) -> _Range:
        if values.nbytes > _MAX_MEAN * len(values):
            return _UNKNOWN
        comparable = values.view(self._storage)
        last, self._first = self._first, _min_max(comparable[:_SAMPLE])
        if last == self._first and last[0] != last[1]:
            return _UNKNOWN
        found = _min_max(comparable)
        is_long = isinstance(found[0], bytes) and max(map(len, found)) > _MAX_LENGTH
        return _UNKNOWN if is_long else found


def _min_max(values: pa.Array) -> _Range:
    import pyarrow.compute as pc  # on first use: it takes long to import

    found = pc.min_max(values)
    return found["min"].as_py(), found["max"].as_py()


def _column(type_: pa.DataType, thorough: bool) -> _ColumnCollector | None:
    """What looks at values of this type; None where that takes about as long as to write them."""
    if types.is_integer(type_) or types.is_float32(type_) or types.is_float64(type_):
        return _NumberCollector(type_, np.dtype(type_.to_pandas_dtype()), thorough)
    if types.is_temporal(type_) and not types.is_interval(type_):
        return _NumberCollector(type_, np.dtype(f"i{type_.bit_width // 8}"), thorough)
    if thorough and types.is_decimal128(type_) and type_.precision <= _MAX_SHORT_DIGITS:
        return _DecimalCollector(type_, type_, thorough)
    if thorough and (types.is_boolean(type_) or types.is_decimal128(type_) or types.is_decimal256(type_)):
        return _ValueCollector(type_, type_, thorough)
    if thorough and (types.is_string(type_) or types.is_binary(type_)):
        return _ValueCollector(type_, pa.binary(), thorough)  # not all that Spark calls a string is UTF-8
    return None


def is_statistics(rest: Buffer) -> bool:
    """Whether what follows an end-of-stream marker calls itself that, whatever it says."""
    whole = memoryview(rest).cast("B")
    stop = len(whole) - _TAIL
    return whole[stop + 8 :] == STATISTICS_MAGIC and int.from_bytes(whole[stop : stop + 8], "little") == stop


def read_statistics(memory: Buffer, end: int, schema: pa.Schema, num_rows: Sequence[int]) -> Statistics | None:
    """Those after the IPC stream of this schema, whose last message ends at `end`, and whose batches have these rows.

    None where there are none, or such as do not fit: whoever wrote them may have written anything.
    """
    whole = memoryview(memory).cast("B")
    marker = end_of_stream()
    start = end + len(marker)
    stop = len(whole) - _TAIL
    if start % _ALIGNMENT or not start < stop <= start + MAX_STATISTICS or whole[end:start] != marker:
        return None
    if not is_statistics(whole[start:]):
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
