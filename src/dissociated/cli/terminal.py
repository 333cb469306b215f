"""What the standard output and error are: whether somebody looks at them, how wide they are, and in which colours."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import IO

from dissociated.cli import text


def is_smart(stream: IO[str]) -> bool:
    """Whether it is a terminal whose lines can be written again."""
    return stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def has_colours(stream: IO[str]) -> bool:
    """By NO_COLOR (no-color.org), then FORCE_COLOR and CLICOLOR_FORCE, then CLICOLOR, then by what the stream is."""
    variable = os.environ.get
    if variable("NO_COLOR"):
        return False
    if variable("FORCE_COLOR", "0") not in ("", "0") or variable("CLICOLOR_FORCE", "0") not in ("", "0"):
        return True
    return variable("CLICOLOR") != "0" and is_smart(stream)


def width(stream: IO[str]) -> int | None:
    """How many columns it has; None where nobody looks."""
    return shutil.get_terminal_size().columns if stream.isatty() else None


def bold(words: str, stream: IO[str]) -> str:
    """The words, bold where the stream has colours."""
    return f"\x1b[1m{words}\x1b[0m" if has_colours(stream) else words


def red(words: str, stream: IO[str]) -> str:
    """The words, red where the stream has colours."""
    return f"\x1b[31m{words}\x1b[0m" if has_colours(stream) else words


def print_table(head: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int] = ()) -> None:
    """Print a table, no wider than the terminal if that can be."""
    first, _, rest = text.table(head, rows, right, width(sys.stdout)).partition("\n")
    print(bold(first, sys.stdout) + (f"\n{rest}" if rest else ""))
