"""The terminal of a command: detection of a terminal, its width and its colours, and a progress bar."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, TypeAlias

from dissociated.cli import text
from dissociated.errors import OptionError

#: Reports progress: takes the number of further rows, and their bytes.
Advance: TypeAlias = Callable[[int, int], None]


def is_smart(stream: IO[str]) -> bool:
    """Return whether a stream is a terminal whose lines can be overwritten."""
    return stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def has_colours(stream: IO[str]) -> bool:
    """Return whether to write colours to a stream.

    In this order decide NO_COLOR (no-color.org), FORCE_COLOR and CLICOLOR_FORCE, CLICOLOR, and the kind of stream.
    """
    variable = os.environ.get
    if variable("NO_COLOR"):
        return False
    if variable("FORCE_COLOR", "0") not in ("", "0") or variable("CLICOLOR_FORCE", "0") not in ("", "0"):
        return True
    return variable("CLICOLOR") != "0" and is_smart(stream)


def width(stream: IO[str]) -> int | None:
    """Return the number of columns of a terminal, or None if the stream is no terminal."""
    return shutil.get_terminal_size().columns if stream.isatty() else None


def bold(words: str, stream: IO[str]) -> str:
    """Return the words, in bold if the stream has colours."""
    return f"\x1b[1m{words}\x1b[0m" if has_colours(stream) else words


def red(words: str, stream: IO[str]) -> str:
    """Return the words, in red if the stream has colours."""
    return f"\x1b[31m{words}\x1b[0m" if has_colours(stream) else words


def print_table(
    head: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int] = (), whole: bool = False
) -> None:
    """Print a table, no wider than the terminal: texts are cut, and then columns left out.

    With `whole`, nothing is cut or left out, and the terminal wraps long lines.
    """
    limit = None if whole else width(sys.stdout)
    heads, _, body = text.narrow_table(head, [*rows], right, limit, cut=True).partition("\n")
    print(bold(heads, sys.stdout) + (f"\n{body}" if body else ""))


def confirm(question: str) -> bool:
    """Ask a question, and return whether the answer is yes.

    Raises:
        OptionError: The standard input is no terminal, so nobody can answer.
    """
    if sys.stdin is None or not sys.stdin.isatty():
        raise OptionError(f"the question {question!r} needs an answer from a terminal: give --yes")
    try:
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:  # Ctrl-D
        print()
        return False


@contextmanager
def progress(name: str, rows: int | None) -> Iterator[Advance]:
    """Show a progress bar with the rate and the remaining time during the `with` block.

    It is shown only if standard error is a terminal whose lines can be overwritten, and is removed afterwards.

    Args:
        name: The label of the bar.
        rows: The total number of rows; None if it is not known.

    Yields:
        A function that reports progress: see `Advance`.
    """
    if not is_smart(sys.stderr):
        yield lambda more, nbytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    started, total = time.monotonic(), 0
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        TaskProgressColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(compact=True),
        console=Console(file=sys.stderr, no_color=not has_colours(sys.stderr)),
        transient=True,
        expand=True,
    )
    with bar:
        task = bar.add_task(text.printable(name), total=rows, rate="")

        def advance(more: int, nbytes: int) -> None:
            nonlocal total
            total += nbytes
            rate = text.size(total / max(1e-3, time.monotonic() - started))
            bar.update(task, advance=more, rate=f"{text.size(total)}, {rate}/s")

        yield advance
