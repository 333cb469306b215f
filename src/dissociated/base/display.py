"""How numbers and tables are shown to people, as text and as HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def size(nbytes: float | None) -> str:
    """Bytes with three digits and a decimal unit: 1.23 GB."""
    if nbytes is None:
        return "-"
    unit = 0
    while nbytes >= 999.5 and unit < len(_UNITS) - 1:
        nbytes /= 1000
        unit += 1
    return f"{nbytes:.0f} B" if not unit else f"{nbytes:#.3g}".rstrip(".") + f" {_UNITS[unit]}"


def count(number: int | None) -> str:
    """A whole number with its thousands apart: 336,776."""
    return "-" if number is None else f"{number:,}"


def plural(number: int | None, what: str) -> str:
    """A number of things: 1 row, 336,776 rows."""
    return f"{count(number)} {what}{'' if number == 1 else 's'}"


def plain_table(head: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Columns below their heads, those numbered in `right` flush right."""
    lines = [list(head), *map(list, rows)]
    widths = [max(len(line[index]) for line in lines) for index in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def shorten(text: str, width: int) -> str:
    """The text on one line, cut to `width` characters; nothing in it tells a terminal what to do."""
    line = "".join(one if one.isprintable() else "�" for one in " ".join(text.split()))
    return line if len(line) <= width else f"{line[: width - 1]}…"


def html_table(head: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int] = ()) -> str:
    """The same as `plain_table`, in HTML for a notebook."""

    def line(cells: Sequence[str], tag: str) -> str:
        sides = ["right" if index in right else "left" for index in range(len(cells))]
        return "".join(
            f'<{tag} style="text-align:{side};padding:1px 12px 1px 0">{escape(cell)}</{tag}>'
            for cell, side in zip(cells, sides, strict=True)
        )

    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    return f"<table><thead><tr>{line(head, 'th')}</tr></thead><tbody>{body}</tbody></table>"


def html(title: str, lines: Iterable[str], *tables: str) -> str:
    """A thing for a notebook: its name, a few lines of text, and tables, which are HTML already."""
    text = "".join(f"<div>{escape(one)}</div>" for one in lines)
    return f"<div><div><b>{escape(title)}</b></div>{text}{''.join(tables)}</div>"
