"""Rows of a dataset as a table that people read."""

from __future__ import annotations

import json
import sys
from typing import Any

import pyarrow as pa
import pyarrow.types as types
from rich.cells import cell_len

from dissociated.cli import terminal, text
from dissociated.cli.plain import plain_values

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
