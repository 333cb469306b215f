"""How far a command is, on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from dissociated.cli import terminal, text

#: Is told how many more rows, and how many bytes these have.
Advance: TypeAlias = Callable[[int, int], None]


@contextmanager
def progress(name: str, rows: int | None) -> Iterator[Advance]:
    """Show, for the time of the block, how much of `rows` there is, how fast it comes, and how long it will take.

    Only where standard error is a terminal whose lines can be written again; afterwards nothing is left of it.
    """
    if not terminal.is_smart(sys.stderr):
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
        console=Console(file=sys.stderr, no_color=not terminal.has_colours(sys.stderr)),
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
