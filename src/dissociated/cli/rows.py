"""Rows of a dataset as plain values of Python, for text, and as a table that people read."""

from __future__ import annotations

import json
import sys
from typing import Any

import pyarrow as pa
import pyarrow.types as types
from rich.cells import cell_len

from dissociated.cli import terminal, text

_CHUNK_ROWS = 1000  # rows, whose widths are those of the columns
_WIDEST = 40  # columns of a terminal that a value may take, where somebody looks
_GAP = "  "
_MORE = "…"


class RowPrinter:
    """Prints batches below the names of their columns: as many columns as the terminal has room for, elsewhere all."""

    def __init__(self, schema: pa.Schema) -> None:
        self._heads = [text.printable(name) for name in schema.names]
        self._right = [types.is_integer(one) or types.is_floating(one) or types.is_decimal(one) for one in schema.types]
        self._limit = terminal.width(sys.stdout)
        self._widths: list[int] = []  # of the columns that are shown
        self.hidden = 0  # how many are not

    def write_batch(self, batch: pa.RecordBatch) -> None:
        """Print its rows."""
        for start in range(0, batch.num_rows, _CHUNK_ROWS):
            chunk = batch.slice(start, _CHUNK_ROWS)
            self._print([[_cell(value) for value in plain_values(column)] for column in chunk.columns], chunk.num_rows)

    def close(self) -> None:
        """Print the heads, if there was no row; and which columns are not there."""
        if not self._widths and not self.hidden:
            self._print([[] for _ in self._heads], 0)
        if self.hidden:
            print(f"{len(self._widths)} of {len(self._heads)} columns: --columns A,B shows others")

    def _print(self, columns: list[list[str]], rows: int) -> None:
        longest = [max(map(cell_len, (head, *cells))) for head, cells in zip(self._heads, columns, strict=True)]
        if not self._widths:
            self._widths = self._fitting(longest)
            self.hidden = len(longest) - len(self._widths)
            print(terminal.bold(self._line(self._heads), sys.stdout))
        elif self._limit is None:
            self._widths = [max(pair) for pair in zip(self._widths, longest, strict=True)]
        for row in range(rows):
            print(self._line([cells[row] for cells in columns]))

    def _fitting(self, longest: list[int]) -> list[int]:
        """The widths of the columns that are shown: as many as there is room for, and one at least."""
        if self._limit is None:
            return longest
        widths: list[int] = []
        left = self._limit
        for index, wanted in enumerate(min(one, _WIDEST) for one in longest):
            last = index == len(longest) - 1
            if wanted + (0 if last else len(_GAP + _MORE)) > left:
                return widths or [max(1, left - (0 if last else len(_GAP + _MORE)))]
            widths.append(wanted)
            left -= wanted + len(_GAP)
        return widths

    def _line(self, cells: list[str]) -> str:
        shown = zip(cells, self._widths, self._right, strict=False)
        line = _GAP.join(text.align(cell, width, right) for cell, width, right in shown)
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
    """None, bool, int, float, str, bytes, and lists and dicts of these; a list may hold the pairs of a map.

    Times, dates, durations and decimals are what libarrow prints: Python's own are shorter of nanoseconds.
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
        columns = [plain_values(one) for one in column.flatten()]
        names = [of.field(index).name for index in range(of.num_fields)]
        return [
            {name: values[row] for name, values in zip(names, columns, strict=True)} if valid else None
            for row, valid in enumerate(column.is_valid().to_pylist())
        ]
    if types.is_map(of):
        return [_pairs(one.values) if one.is_valid else None for one in column]
    if types.is_nested(of) and not types.is_union(of):
        return [plain_values(one.values) if one.is_valid else None for one in column]
    if types.is_union(of):
        return [_plain_scalar(one.value) for one in column]
    if types.is_interval(of):
        return [None if one is None else list(one) for one in column.to_pylist()]
    if types.is_temporal(of) or types.is_decimal(of):
        return list(column.cast(pa.string()).to_pylist())
    return list(column.to_pylist())


def plain_rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """The rows of a batch, whose columns have names that differ."""
    columns = [plain_values(column) for column in batch.columns]
    rows = zip(*columns, strict=True) if columns else [()] * batch.num_rows
    return [dict(zip(batch.schema.names, row, strict=True)) for row in rows]


def _pairs(entries: pa.StructArray) -> list[list[Any]]:
    return [[*pair] for pair in zip(*map(plain_values, entries.flatten()), strict=True)]


def _plain_scalar(value: Any) -> Any:
    return plain_values(pa.array([value], value.type))[0] if value is not None and value.is_valid else None
