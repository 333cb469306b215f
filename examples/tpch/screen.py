"""The output of the demo while it runs: a line for each completed step, and progress bars in a terminal."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from examples.tpch.steps import Step


class Screen:
    """The output of all processes. Progress bars are shown only in a terminal. Use it as a context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.fields[process]:<10} {task.description:<12}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )

    def process(self, name: str, steps: int) -> Lane:
        """Add a progress bar for a process with this number of steps."""
        return Lane(self._console, self._bars, name, self._bars.add_task("", process=name, total=steps))

    def __enter__(self) -> Screen:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()


class Lane:
    """The output of a process: its progress bar, and its lines."""

    def __init__(self, console: Console, bars: Progress, name: str, bar: TaskID) -> None:
        self._console = console
        self._bars = bars
        self._name = name
        self._bar = bar
        self._done = 0

    def begins(self, step: str) -> None:
        self._bars.update(self._bar, description=step)

    def share(self, share: float) -> None:
        self._bars.update(self._bar, completed=self._done + share)

    def done(self, step: Step) -> None:
        self._done += 1
        self._bars.update(self._bar, completed=self._done)
        line = f"  {self._name:<11}{step.name:<10}{step.says:<48}{step.seconds:9.3f} s"
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def ends(self) -> None:
        self._bars.remove_task(self._bar)
