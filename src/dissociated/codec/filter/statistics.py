"""Statistics of a segment: the smallest and largest values in each record batch.

They follow the end-of-stream marker of an IPC stream, at which every Arrow reader stops:

    IPC stream   a schema and one record batch, uncompressed, aligned to 8 bytes, with a row for each record batch
    8 bytes      the length of this stream, little-endian
    8 bytes      "DISSTATS"

The columns are `num_rows` (int64) and, for the top-level column number i, `i.null_count` (int64), `i.min` and `i.max`,
of the type of column i; null means unknown. Statistics tell of which batches no row, or every row, passes a filter: the
number of nulls is exact, and bounds may be wider than the values.
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
#: The least rows of a batch with statistics: those of a batch of Spark's Python. Smaller batches gain too little.
LEAST_ROWS = 10_000
_MAX_MEAN = 24  # bytes of a value, including 4 for its offset
_MAX_LENGTH = 256  # bytes of a bound
_SAMPLE = 1024  # first values of a batch that are compared with those of the last batch
_MAX_SHORT_DIGITS = 18
_MAX_VALUES = 1 << 20  # kept while a segment is written; a segment with more gets no statistics


@dataclass(frozen=True)
class Bounds:
    """The number of nulls, and the bounds of all other values, of one column in each record batch."""

    null_count: pa.Array
    min: pa.Array
    max: pa.Array

    @classmethod
    def unknown(cls, count: int, type_: pa.DataType) -> Bounds:
        """Return unknown bounds for `count` batches."""
        return cls(pa.nulls(count, pa.int64()), pa.nulls(count, type_), pa.nulls(count, type_))


@dataclass(frozen=True)
class Statistics:
    """The statistics of each record batch of a stream: its rows, and the bounds of columns by number."""

    num_rows: pa.Array
    bounds: dict[int, Bounds]

    @classmethod
    def unknown(cls, num_rows: Sequence[int]) -> Statistics:
        """Return statistics of batches with these numbers of rows and unknown bounds."""
        return cls(pa.array(num_rows, pa.int64()), {})

    @classmethod
    def concatenate(cls, parts: Sequence[Statistics]) -> Statistics:
        """Return the statistics of streams that follow each other."""
        types_ = {column: bounds.min.type for part in parts for column, bounds in part.bounds.items()}
        bounds = {}
        for column, type_ in sorted(types_.items()):
            bounds_of_parts = [part.bounds.get(column) or Bounds.unknown(len(part.num_rows), type_) for part in parts]
            bounds[column] = Bounds(
                *(
                    pa.concat_arrays([getattr(bounds_of_part, bound_name) for bounds_of_part in bounds_of_parts])
                    for bound_name in _BOUND_NAMES
                )
            )
        return cls(pa.concat_arrays([part.num_rows for part in parts]), bounds)

    def encode(self) -> bytes:
        """Encode the statistics, to follow an IPC stream that ends at a multiple of 8 bytes."""
        named = {"num_rows": self.num_rows}
        for column, bounds in self.bounds.items():
            named |= {f"{column}.{bound_name}": getattr(bounds, bound_name) for bound_name in _BOUND_NAMES}
        batch = pa.record_batch(list(named.values()), list(named))
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        encoded: bytes = sink.getvalue().to_pybytes()
        return encoded + len(encoded).to_bytes(8, "little") + STATISTICS_MAGIC


_BOUND_NAMES = ("null_count", "min", "max")


class StatisticsCollector:
    """A collector of statistics of record batches while they are written.

    Args:
        schema: The schema of all batches.
        columns: The numbers of the columns to consider. Default: all columns.
        thorough: Whether to include slow cases: small batches, text, decimals, and the exclusion of null slots.
    """

    def __init__(self, schema: pa.Schema, columns: Sequence[int] | None = None, thorough: bool = False) -> None:
        numbers = range(len(schema)) if columns is None else columns
        self._columns = {
            number: collector for number in numbers if (collector := _column(schema.field(number).type, thorough))
        }
        self._num_rows: list[int] = []
        self._remaining_values = _MAX_VALUES

    def add(self, batch: pa.RecordBatch) -> None:
        """Add the next batch, which must be valid."""
        self._remaining_values -= len(self._columns)
        if self._remaining_values < 0:
            self._columns = {}
        self._num_rows.append(batch.num_rows)
        for number, column in self._columns.items():
            column.add(batch.column(number))

    def statistics(self) -> Statistics | None:
        """Return the statistics; None if nothing is known of any column."""
        bounds = {number: column.bounds() for number, column in self._columns.items() if column.has_bounds}
        return Statistics(pa.array(self._num_rows, pa.int64()), bounds) if bounds else None


_Range: TypeAlias = tuple[Any, Any]
_UNKNOWN: _Range = (None, None)


class _ColumnCollector(ABC):
    """A collector for a column of one type. The bounds are kept as values of the type `storage`, of the same layout."""

    def __init__(self, type_: pa.DataType, storage: pa.DataType, thorough: bool) -> None:
        self._type = type_
        self._storage = storage
        self._thorough = thorough
        self._bound_values: dict[str, list[Any]] = {bound_name: [] for bound_name in _BOUND_NAMES}
        self.has_bounds = thorough

    def add(self, values: pa.Array) -> None:
        """Add the values of the next batch.

        Unless thorough, slots of nulls count, which only widens the bounds. Leaving them out takes ten times as long.
        """
        null_count = values.null_count
        if self._thorough and null_count:
            values = values.drop_null()
        looked_at = len(values) >= (1 if self._thorough else LEAST_ROWS)
        bound_values = null_count, *(self._range(values) if looked_at else _UNKNOWN)
        self.has_bounds = self.has_bounds or bound_values[1] is not None
        for bound_name, value in zip(_BOUND_NAMES, bound_values, strict=True):
            self._bound_values[bound_name].append(value)

    def bounds(self) -> Bounds:
        least, most = (
            pa.array(self._bound_values[bound_name], self._storage).view(self._type) for bound_name in ("min", "max")
        )
        return Bounds(pa.array(self._bound_values["null_count"], pa.int64()), least, most)

    @abstractmethod
    def _range(self, values: pa.Array) -> _Range: ...


class _NumberCollector(_ColumnCollector):
    """A collector for values that are numbers of this `dtype`."""

    def __init__(self, type_: pa.DataType, dtype: np.dtype, thorough: bool) -> None:
        super().__init__(type_, pa.from_numpy_dtype(dtype), thorough)
        self._dtype = dtype

    def _range(self, values: pa.Array) -> _Range:
        offset = values.offset * self._dtype.itemsize
        content = np.frombuffer(values.buffers()[1], self._dtype, len(values), offset)
        least, most = content.min().item(), content.max().item()
        return _UNKNOWN if least != least else (least, most)  # NaN is among them


class _DecimalCollector(_ColumnCollector):
    """A collector for decimals of up to 18 digits: the first of their two words has all digits, and the sign.

    There is no range if a value does not fit into the first word: a filter compares all its digits.
    """

    def _range(self, values: pa.Array) -> _Range:
        pairs = np.frombuffer(values.buffers()[1], np.int64, 2 * len(values), 16 * values.offset)
        words, signs = pairs[::2], pairs[1::2]
        if (words >> 63 != signs).any():
            return _UNKNOWN
        return _decimal(words.min(), self._type.scale), _decimal(words.max(), self._type.scale)


def _decimal(unscaled: np.int64, scale: int) -> Decimal:
    return Decimal(int(unscaled)).scaleb(-scale)


class _ValueCollector(_ColumnCollector):
    """A collector for comparable values that are not numbers, which takes about as long as writing them.

    Long values are skipped. So is a batch whose first values have the range of the last batch's first values: a filter
    could hardly tell these batches apart.
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
        bounds = _min_max(comparable)
        is_long = isinstance(bounds[0], bytes) and max(map(len, bounds)) > _MAX_LENGTH
        return _UNKNOWN if is_long else bounds


def _min_max(values: pa.Array) -> _Range:
    import pyarrow.compute as pc  # imported on first use, since the import is slow

    result = pc.min_max(values)
    return result["min"].as_py(), result["max"].as_py()


def _column(type_: pa.DataType, thorough: bool) -> _ColumnCollector | None:
    """Return the collector for values of this type; None if it would take about as long as writing them."""
    if types.is_integer(type_) or types.is_float32(type_) or types.is_float64(type_):
        return _NumberCollector(type_, np.dtype(type_.to_pandas_dtype()), thorough)
    if types.is_temporal(type_) and not types.is_interval(type_):
        return _NumberCollector(type_, np.dtype(f"i{type_.bit_width // 8}"), thorough)
    if thorough and types.is_decimal128(type_) and type_.precision <= _MAX_SHORT_DIGITS:
        return _DecimalCollector(type_, type_, thorough)
    if thorough and (types.is_boolean(type_) or types.is_decimal128(type_) or types.is_decimal256(type_)):
        return _ValueCollector(type_, type_, thorough)
    if thorough and (types.is_string(type_) or types.is_binary(type_)):
        return _ValueCollector(type_, pa.binary(), thorough)  # not UTF-8 in all strings of Spark
    return None


def is_statistics(trailing_bytes: Buffer) -> bool:
    """Return whether the bytes after an end-of-stream marker are marked as statistics, valid or not."""
    whole = memoryview(trailing_bytes).cast("B")
    stop = len(whole) - _TAIL
    return whole[stop + 8 :] == STATISTICS_MAGIC and int.from_bytes(whole[stop : stop + 8], "little") == stop


def read_statistics(memory: Buffer, end: int, schema: pa.Schema, num_rows: Sequence[int]) -> Statistics | None:
    """Return the statistics after the IPC stream of this schema; None if there are none that fit the stream.

    The bytes come from outside and are checked.

    Args:
        memory: The segment.
        end: The end of the last message of the stream.
        schema: The schema of the stream.
        num_rows: The rows of each batch of the stream.
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
        return None if batch is None else _valid_statistics(batch, schema, num_rows)
    except (DissociatedError, pa.ArrowException, OSError, ValueError, IndexError, KeyError):
        return None


def _batch(stream: memoryview) -> pa.RecordBatch | None:
    """Return the only record batch of this IPC stream; None if it is compressed or damaged."""
    first = message_at(stream, 0, len(stream))
    second = None if first is None else message_at(stream, first.body_at + first.parsed.body_length, len(stream))
    if second is None or is_compressed(second.header):
        return None
    batch = pa.ipc.open_stream(stream).read_next_batch()
    batch.validate(full=True)
    return batch


def _valid_statistics(batch: pa.RecordBatch, schema: pa.Schema, num_rows: Sequence[int]) -> Statistics | None:
    """Return the statistics in `batch`, for the columns whose types fit; None if they belong to another stream."""
    counted = batch.column("num_rows")
    if counted.type != pa.int64() or counted.to_pylist() != [*num_rows]:
        return None
    bounds_of_columns = {}
    names = set(batch.schema.names)
    for number, field in enumerate(schema):
        if {f"{number}.{bound_name}" for bound_name in _BOUND_NAMES} <= names:
            bounds = Bounds(*(batch.column(f"{number}.{bound_name}") for bound_name in _BOUND_NAMES))
            if bounds.null_count.type == pa.int64() and bounds.min.type == bounds.max.type == field.type:
                bounds_of_columns[number] = bounds
    return Statistics(counted, bounds_of_columns) if bounds_of_columns else None
