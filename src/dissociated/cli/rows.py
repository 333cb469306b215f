"""Rows of a dataset as plain Python values, for text formats, and as a table for people."""

from __future__ import annotations

import json
import sys
from typing import Any

import pyarrow as pa
import pyarrow.types as types
from rich.cells import cell_len

from dissociated.cli import terminal, text

_CHUNK_ROWS = 1000  # rows of a chunk, from which the widths of the columns are computed
_MAX_WIDTH = 40  # columns of a terminal that a value may take
_GAP = "  "
_MORE = "…"
#: Seconds since 1970 that libarrow has a text for in every zone: the years from -32,766 to 32,766, and a margin.
_FIRST_ZONED, _LAST_ZONED = -1_096_193_000_000, 971_890_000_000
_UNITS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}  # units of a timestamp in a second


class RowPrinter:
    """A printer of batches as a table. In a terminal it shows the columns that fit, and elsewhere all columns.

    A note about hidden columns says that users choose columns by `choose`.
    """

    def __init__(self, schema: pa.Schema, choose: str) -> None:
        self._choose = choose
        self._heads = [text.printable(name) for name in schema.names]
        self._right = [
            types.is_integer(type_) or types.is_floating(type_) or types.is_decimal(type_) for type_ in schema.types
        ]
        self._limit = terminal.width(sys.stdout)
        self._widths: list[int] = []  # widths of the columns that are shown
        self.hidden = 0  # the number of columns that are not shown

    def write_batch(self, batch: pa.RecordBatch) -> None:
        """Print the rows of a batch."""
        for start in range(0, batch.num_rows, _CHUNK_ROWS):
            chunk = batch.slice(start, _CHUNK_ROWS)
            self._print([[_cell(value) for value in plain_values(column)] for column in chunk.columns], chunk.num_rows)

    def close(self) -> None:
        """Print the heads if there were no rows, and a note if columns are hidden."""
        if not self._widths and not self.hidden:
            self._print([[] for _ in self._heads], 0)
        if self.hidden:
            print(f"{len(self._widths)} of {len(self._heads)} columns: {self._choose} shows others")

    def _print(self, columns: list[list[str]], rows: int) -> None:
        longest = [max(map(cell_len, (head, *cells))) for head, cells in zip(self._heads, columns, strict=True)]
        if not self._widths:
            self._widths = self._fitting_widths(longest)
            self.hidden = len(longest) - len(self._widths)
            print(terminal.bold(self._line(self._heads), sys.stdout))
        elif self._limit is None:
            self._widths = [max(pair) for pair in zip(self._widths, longest, strict=True)]
        for row in range(rows):
            print(self._line([cells[row] for cells in columns]))

    def _fitting_widths(self, longest: list[int]) -> list[int]:
        """Return the widths of the columns that fit into the terminal, but of at least one column."""
        if self._limit is None:
            return longest
        widths: list[int] = []
        remaining = self._limit
        for index, width in enumerate(min(length, _MAX_WIDTH) for length in longest):
            last = index == len(longest) - 1
            if width + (0 if last else len(_GAP + _MORE)) > remaining:
                return widths or [max(1, remaining - (0 if last else len(_GAP + _MORE)))]
            widths.append(width)
            remaining -= width + len(_GAP)
        return widths

    def _line(self, cells: list[str]) -> str:
        columns = zip(cells, self._widths, self._right, strict=False)
        line = _GAP.join(text.align(cell, width, right) for cell, width, right in columns)
        return f"{line}{_GAP}{_MORE}" if self.hidden else line.rstrip()


def _cell(value: Any) -> str:
    match value:
        case None:
            return "NULL"
        case str():
            return text.printable(value)
        case bytes():
            return value.hex()
        case list() | dict():
            return text.printable(json.dumps(value, ensure_ascii=False, default=bytes.hex))
    return str(value)


def plain_values(column: pa.Array) -> list[Any]:
    """Convert a column to plain Python values.

    Times, dates, durations and decimals become the text that libarrow prints, since Python's types have no
    nanoseconds.

    Returns:
        None, bool, int, float, str, bytes, and lists and dicts of these. A map becomes a list of pairs, and so does a
        struct in which a name is repeated.
    """
    of = column.type
    if isinstance(of, pa.BaseExtensionType):
        return plain_values(column.storage)
    if types.is_dictionary(of):
        return plain_values(column.dictionary_decode())
    if types.is_run_end_encoded(of):
        import pyarrow.compute

        return plain_values(pyarrow.compute.run_end_decode(column))
    if types.is_struct(of):
        columns = [plain_values(field) for field in column.flatten()]
        names = [of.field(index).name for index in range(of.num_fields)]
        pairs = [
            [[name, values[row]] for name, values in zip(names, columns, strict=True)] if valid else None
            for row, valid in enumerate(column.is_valid().to_pylist())
        ]
        if len({*names}) < len(names):
            return pairs
        return [None if row is None else dict(row) for row in pairs]
    if types.is_map(of):
        return [_pairs(entry.values) if entry.is_valid else None for entry in column]
    if types.is_nested(of) and not types.is_union(of):
        return [plain_values(value.values) if value.is_valid else None for value in column]
    if types.is_union(of):
        return [_plain_scalar(value.value) for value in column]
    if types.is_interval(of):
        return [None if value is None else list(value) for value in column.to_pylist()]
    if types.is_temporal(of) or types.is_decimal(of):
        return list(column.cast(pa.string()).to_pylist())
    return list(column.to_pylist())


def has_inexact_times(column: pa.Array) -> bool:
    """Return whether libarrow prints a time of a column as another text.

    It has no text for times beyond its calendar, and leaves out the seconds of the offset of a zone: all zones had some
    until about 1900.
    """
    import pyarrow.compute as pc

    of = column.type
    if column.null_count == len(column):
        return False
    if isinstance(of, pa.BaseExtensionType):
        return has_inexact_times(column.storage)
    if types.is_dictionary(of):
        # The dictionary may have values that the column does not use.
        return has_inexact_times(column.dictionary) and has_inexact_times(column.dictionary_decode())
    if types.is_run_end_encoded(of):  # of whose values a slice does not use all
        return has_inexact_times(column.values) and has_inexact_times(pc.run_end_decode(column))
    if types.is_union(of):
        return any(has_inexact_times(column.field(index)) for index in range(of.num_fields))
    if types.is_struct(of):
        return any(map(has_inexact_times, column.flatten()))
    if types.is_map(of):
        first, end = column.offsets[0].as_py(), column.offsets[-1].as_py()
        return any(has_inexact_times(children[first:end]) for children in (column.keys, column.items))
    if types.is_nested(of):
        return has_inexact_times(column.flatten())
    if not (types.is_date(of) or types.is_timestamp(of)):
        return False
    ends = pc.min_max(column)
    first, last = ends["min"], ends["max"]
    if types.is_date(of) or of.tz is None:
        return any(end.cast(pa.string()).as_py().startswith("<") for end in (first, last))  # <value out of range: ...>
    if first.value < _FIRST_ZONED * _UNITS[of.unit] or last.value > _LAST_ZONED * _UNITS[of.unit]:
        return True  # it would print another year
    offsets = pc.subtract(pc.local_timestamp(column).view(pa.int64()), column.view(pa.int64())).drop_null().to_numpy()
    return bool((offsets % (60 * _UNITS[of.unit])).any())


def plain_rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Convert a batch to a dict for each row. The names of its columns must be unique."""
    columns = [plain_values(column) for column in batch.columns]
    rows = zip(*columns, strict=True) if columns else [()] * batch.num_rows
    return [dict(zip(batch.schema.names, row, strict=True)) for row in rows]


def _pairs(entries: pa.StructArray) -> list[list[Any]]:
    return [[*pair] for pair in zip(*map(plain_values, entries.flatten()), strict=True)]


def _plain_scalar(value: Any) -> Any:
    return plain_values(pa.array([value], value.type))[0] if value is not None and value.is_valid else None
