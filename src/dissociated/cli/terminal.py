"""What the standard output and error are: whether somebody looks at them, how wide they are, and in which colours.

On one that can be written again a command shows how far it is.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, TypeAlias

from dissociated.cli import text

#: Is told how many more rows, and how many bytes these have.
Advance: TypeAlias = Callable[[int, int], None]


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


@contextmanager
def progress(name: str, rows: int | None) -> Iterator[Advance]:
    """Show, for the time of the block, how much of `rows` there is, how fast it comes, and how long it will take.

    Only where standard error is a terminal whose lines can be written again; afterwards nothing is left of it.
    """
    if not is_smart(sys.stderr):
        yield lambda more, nbytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    started, total = time.monotonic(), 0
    shown = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        TaskProgressColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(compact=True),
        console=Console(file=sys.stderr, no_color=not has_colours(sys.stderr)),
        transient=True,
        expand=True,
    )
    with shown:
        task = shown.add_task(text.printable(name), total=rows, rate="")

        def advance(more: int, nbytes: int) -> None:
            nonlocal total
            total += nbytes
            rate = text.size(total / max(1e-3, time.monotonic() - started))
            shown.update(task, advance=more, rate=f"{text.size(total)}, {rate}/s")

        yield advance
