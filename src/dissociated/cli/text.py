"""How numbers, tables and locations are shown to people."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(?:([kKMGTP])(i?))?B?")
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


def parse_size(written: str) -> int:
    """The bytes that 8GiB, 500MB or 4096 means. Raises ValueError."""
    found = _SIZE.fullmatch(written.strip())
    if found is None:
        raise ValueError(f"{written!r} is not a size: 8GiB, 500MB, or a number of bytes")
    number, prefix, binary = found.groups()
    power = "_KMGTP".index(prefix.upper()) if prefix else 0
    return int(float(number) * (1024 if binary else 1000) ** power)


def count(number: int | None) -> str:
    """A whole number with its thousands apart: 336,776."""
    return "-" if number is None else f"{number:,}"


def duration(seconds: float) -> str:
    """Seconds in the two units that matter: 0.5 s, 12 s, 3 min 05 s, 2 h 03 min, 4 d 01 h."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60:02} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600:02} h"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int] = ()) -> str:
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


def split_name(uri: str) -> tuple[str, str]:
    """The catalog and the dataset in grpc://HOST:PORT/NAME; the name is empty where there is none."""
    scheme, separator, rest = uri.partition("://")
    host, _, name = rest.partition("/")
    return f"{scheme}{separator}{host}", name
