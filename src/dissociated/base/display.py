"""Formatting of numbers and tables for people, as text and as HTML."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from difflib import get_close_matches
from html import escape

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_MAX_NAMES = 40  # in the message of an error


def size(nbytes: float | None) -> str:
    """Format a number of bytes with three digits and a decimal unit: 1.23 GB."""
    if nbytes is None:
        return "-"
    unit = 0
    while nbytes >= 999.5 and unit < len(_UNITS) - 1:
        nbytes /= 1000
        unit += 1
    return f"{nbytes:.0f} B" if not unit else f"{nbytes:#.3g}".rstrip(".") + f" {_UNITS[unit]}"


def count(number: int | None) -> str:
    """Format a whole number with thousands separators: 336,776."""
    return "-" if number is None else f"{number:,}"


def plural(number: int | None, noun: str) -> str:
    """Format a count with its noun: 1 row, 336,776 rows."""
    return f"{count(number)} {noun}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """Format seconds with at most two units: 0.5 s, 12 s, 3 min 05 s, 2 h 03 min, 4 d 01 h."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60:02} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600:02} h"


def utc(seconds: float) -> str:
    """Format seconds since the epoch in UTC: 2026-11-22 09:31:07 UTC."""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"


def advise_name(name: str, names: Sequence[str], how: str) -> str:
    """Return advice for a name that is none of `names`: the closest of them, and how to list all."""
    question = _did_you_mean(name, names)
    return f"{question} List the names with {how}" if question else f"list the names with {how}"


def missing_column(name: str, names: Sequence[str], purpose: str = "") -> str:
    """Return the message for a column that is none of `names`: the closest of them, and all or the first."""
    return missing("column", name, names, purpose)


def missing(noun: str, name: str, names: Sequence[str], purpose: str = "") -> str:
    """Return the message for a thing that is none of `names`: the closest of them, and all or the first."""
    question = _did_you_mean(name, names)
    hint = f" ({question})" if question else ""
    return f"there is no {noun} {name!r}{purpose}{hint}; there are {first_names(names, _MAX_NAMES)}"


def first_names(names: Sequence[str], most: int = 10) -> str:
    """Return the names as text: all, or the first `most` and how many others there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f", and {plural(more, 'other')}" if more > 0 else "")


def _did_you_mean(name: str, names: Sequence[str]) -> str:
    other_names = [other for other in names if other != name]  # it may have been published meanwhile
    close = [repr(match) for match in get_close_matches(name, other_names)]
    return f"did you mean {' or '.join(close)}?" if close else ""


def plain_table(head: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Format a table as text. The columns whose indices are in `right` are aligned to the right."""
    lines = [list(head), *map(list, rows)]
    widths = [max(len(line[index]) for line in lines) for index in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def printable(written: str) -> str:
    """Replace control characters, which could change the state of a terminal, by Python's escapes."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), written)


def shorten(text: str, width: int) -> str:
    """Return the text on one line, cut to `width` characters, without control characters for a terminal."""
    line = "".join(character if character.isprintable() else "�" for character in " ".join(text.split()))
    return line if len(line) <= width else f"{line[: width - 1]}…"


def html_table(head: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Format a table like `plain_table`, as HTML for a notebook."""

    def line(cells: Sequence[str], tag: str) -> str:
        # A narrow notebook wraps names and types, and never a number from its unit.
        aligned = ["right;white-space:nowrap" if index in right else "left" for index in range(len(cells))]
        return "".join(
            f'<{tag} style="text-align:{align};padding:1px 12px 1px 0">{escape(cell)}</{tag}>'
            for cell, align in zip(cells, aligned, strict=True)
        )

    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    return f"<table><thead><tr>{line(head, 'th')}</tr></thead><tbody>{body}</tbody></table>"


def html(title: str, lines: Iterable[str], *tables: str) -> str:
    """Format an object for a notebook: its name, lines of text, and tables that are HTML already."""
    text = "".join(f"<div>{escape(line)}</div>" for line in lines)
    return f"<div><div><b>{escape(title)}</b></div>{text}{''.join(tables)}</div>"
