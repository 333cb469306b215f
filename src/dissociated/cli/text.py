"""Text for people: the format of numbers, times, tables and locations."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime

from rich.cells import cell_len, set_cell_size

from dissociated.base.display import count as count
from dissociated.base.display import duration as duration
from dissociated.base.display import first_names as first_names
from dissociated.base.display import plural as plural
from dissociated.base.display import printable as printable
from dissociated.base.display import size as size
from dissociated.control.catalog_uri import is_unix, split_unix

_GAP = "  "
_MIN_WIDTH = 8  # columns of a terminal to which a text may be cut


def local_time(seconds: float) -> str:
    """Format seconds since the epoch in this host's time zone: 2026-11-22 10:31:07."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def utc(seconds: float) -> str:
    """Format seconds since the epoch in UTC, for programs: 2026-11-22T09:31:07.123456+00:00."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def time_until(seconds: float | None) -> str:
    """Format the time until `seconds` since the epoch: in 23 h 59 min."""
    if seconds is None:
        return "-"
    remaining = seconds - time.time()
    return f"in {duration(remaining)}" if remaining > 0 else "now"


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int] = (), width: int | None = None
) -> str:
    """Format a table.

    Args:
        head: The heads of the columns.
        rows: The cells of each row.
        right: The indices of the columns that are aligned to the right: numbers.
        width: The largest width, in columns of a terminal. If the table is wider, texts in the widest columns are cut,
            if that makes it fit. Numbers and the first column are never cut.
    """
    lines = [[printable(cell) for cell in line] for line in (head, *rows)]
    widths = [max(cell_len(line[index]) for line in lines) for index in range(len(head))]
    if width is not None:
        texts = {index: cell_len(cell) for index, cell in enumerate(lines[0]) if index and index not in right}
        widths = _fit(widths, width, {index: max(length, _MIN_WIDTH) for index, length in texts.items()})
    return "\n".join(
        _GAP.join(align(cell, widths[index], index in right) for index, cell in enumerate(line)).rstrip()
        for line in lines
    )


def narrow_table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Sequence[int] = (),
    width: int | None = None,
    cut: bool = False,
) -> str:
    """Format a table with as many columns, from the left, as fit into `width`; "…" stands for the others.

    Long texts in the first column lose their middle, so that the next two columns can be read. With `cut`, texts in
    other columns are cut before columns are left out, as `table` does.
    """
    if width is not None:
        widths = [max(cell_len(line[index]) for line in (head, *rows)) for index in range(1, min(3, len(head)))]
        if cut:
            widths = [
                length if index in right else min(length, max(cell_len(head[index]), _MIN_WIDTH))
                for index, length in enumerate(widths, 1)
            ]
        room = max(width - sum(widths) - 3 * len(_GAP) - 1, 2 * _MIN_WIDTH)
        rows = [[_shorten_middle(printable(row[0]), room), *row[1:]] for row in rows]
    for number in range(len(head), 0, -1):
        ellipsis = ["…"] if number < len(head) else []
        lines = table(
            [*head[:number], *ellipsis], [[*row[:number], *ellipsis] for row in rows], right, width if cut else None
        )
        if width is None or all(cell_len(line) <= width for line in lines.splitlines()):
            return lines
    return "\n".join(align(line, width or 0).rstrip() for line in lines.splitlines())


def _fit(widths: list[int], width: int, least: Mapping[int, int]) -> list[int]:
    """Reduce the widths of the columns in `least`, down to these values, until the table fits into `width`.

    Return the widths unchanged if that is impossible.
    """
    fitted = [*widths]
    while sum(fitted) + len(_GAP) * (len(fitted) - 1) > width:
        reducible = [index for index, least_width in least.items() if fitted[index] > least_width]
        if not reducible:
            return widths
        fitted[max(reducible, key=lambda index: fitted[index])] -= 1
    return fitted


def _shorten_middle(cell: str, width: int) -> str:
    """Cut the middle out of a text that is wider than `width` columns of a terminal."""
    if cell_len(cell) <= width:
        return cell
    end = cell[-(width // 2) :]
    return f"{set_cell_size(cell, max(0, width - 1 - cell_len(end)))}…{end}"


def align(cell: str, width: int, right: bool = False) -> str:
    """Pad or cut a cell to `width` columns of a terminal."""
    missing = width - cell_len(cell)
    if missing < 0:
        return set_cell_size(cell, width - 1) + "…"
    return " " * missing + cell if right else cell + " " * missing


def split_name(uri: str) -> tuple[str, str]:
    """Return the catalog and the dataset in grpc://HOST:PORT/NAME; the name may be empty."""
    if is_unix(uri):
        return split_unix(uri)
    scheme, separator, path = uri.partition("://")
    host, _, name = path.partition("/")
    return f"{scheme}{separator}{host}", name
