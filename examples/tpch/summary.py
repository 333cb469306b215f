"""The summary of the demo: three tables and a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

import dissociated as dis
from dissociated.cli import text
from examples.tpch.steps import Step

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Steps = Mapping[str, Sequence[Step]]

CONSUMERS = ("polars", "duckdb", "loader")


def print_tables(console: Console, steps: Steps, published: Sequence[dis.DatasetInfo]) -> None:
    """Print the datasets that Spark published, the work of each consumer, and the time to open lineitem."""
    seconds = {step.name: step.seconds for step in steps["spark"]}
    spark = _table("Spark published", "dataset", "rows", "bytes", "seconds")
    for info in published:
        spark.add_row(info.name, text.count(info.rows), text.size(info.nbytes), f"{seconds[info.name]:.2f}")
    console.print(spark)

    work = _table("Each consumer, of lineitem", "process", "opened", "in place", "own memory", "then worked", "checked")
    for name in CONSUMERS:
        facts = {key: value for step in steps[name] for key, value in step.facts.items() if key != "checked"}
        checked = sum(step.facts.get("checked", 0) for step in steps[name])
        worked = ", ".join(f"{step.name} {step.seconds:.3f} s" for step in steps[name] if step.name in _WORK)
        opened = f"{_of(steps[name], 'open').seconds * 1e3:.1f} ms"
        work.add_row(name, opened, f"{facts['in_place']:.0%}", text.size(facts["own"]), worked, str(checked))
    console.print(work)

    ways = _table("Opened over", "way", "ms", "GB/s")
    for step in steps["transports"]:
        ways.add_row(_WAYS.get(step.name, step.name), f"{step.seconds * 1e3:.1f}", _rate(step))
    console.print(ways)


_WORK = ("q1", "q6", "epoch 1", "epoch 2")
_COLOURS = {"data": "C7", "spark": "C0", "polars": "C2", "duckdb": "C8", "loader": "C9", "transports": "C1"}
_WAYS = {"grpc": "Flight DoGet", "shm": "shm, in place"}


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if not number or column == "then worked" else "right")
    return table


def _of(steps: Sequence[Step], name: str) -> Step:
    return next(step for step in steps if step.name == name)


def _rate(step: Step) -> str:
    """Return the GB/s of a step as text; empty for shm, over which no bytes move."""
    return "" if step.name == "shm" else f"{step.facts['nbytes'] / step.seconds / 1e9:.2f}"


def plot(path: Path, steps: Steps, scale: float) -> None:
    """Plot the steps of all processes over time, those of the consumers in detail, and the time to open lineitem."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 7.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplot_mosaic([["all", "zoom"], ["ways", "ways"]], width_ratios=[3, 2], height_ratios=[3, 2])
    figure.suptitle(f"TPC-H at scale {scale:g}: Spark publishes, others go on where the data lies")
    lanes = [lane for lane in ("data", "spark", *CONSUMERS, "transports") if lane in steps]
    _draw_steps(axes["all"], {lane: steps[lane] for lane in lanes}, 1.0)
    axes["all"].set_title("when each process did what, seconds", loc="left")
    _draw_steps(axes["zoom"], {lane: steps[lane] for lane in CONSUMERS}, 1e3)
    axes["zoom"].set_title("the consumers, milliseconds", loc="left")
    ways = axes["ways"]
    bars = [(f"{lane}, in place", _of(steps[lane], "open").seconds, "C2") for lane in CONSUMERS]
    copies = [step for step in steps["transports"] if step.name != "shm"]
    bars += [(f"copy over {_WAYS.get(step.name, step.name)}", step.seconds, "C1") for step in copies]
    bars.append(("Spark published it in", _of(steps["spark"], "lineitem").seconds, "C0"))
    ways.barh([name for name, _, _ in bars], [took * 1e3 for _, took, _ in bars], color=[bar[2] for bar in bars])
    for row, (_, took, _) in enumerate(bars):
        ways.text(took * 1e3, row, f" {took * 1e3:,.1f} ms", va="center", fontsize=9)
    ways.set_xscale("log")
    ways.margins(x=0.15)
    ways.invert_yaxis()
    rows, nbytes = (_of(steps["polars"], "open").facts[key] for key in ("rows", "nbytes"))
    ways.set_title(f"until there is a Table of lineitem: {rows:,} rows, {text.size(nbytes)}", loc="left")
    ways.set_xlabel("milliseconds, logarithmic")
    for each in axes.values():
        each.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def _draw_steps(axes: Axes, steps: Steps, per_second: float) -> None:
    """Draw a row for each process, with a bar for each of its steps. Names on narrow bars are turned upright."""
    origin = min(step.begun for lane in steps.values() for step in lane)
    span = max(step.begun + step.seconds for lane in steps.values() for step in lane) - origin
    for row, (name, lane) in enumerate(steps.items()):
        for number, step in enumerate(lane):
            begin, width = (step.begun - origin) * per_second, step.seconds * per_second
            axes.barh(row, width, left=begin, color=_COLOURS[name], alpha=0.95 if number % 2 else 0.6)
            if step.seconds > span * 0.025:
                turned = 0 if step.seconds > span * 0.018 * len(step.name) else 90
                axes.text(begin + width / 2, row, step.name, ha="center", va="center", fontsize=8, rotation=turned)
    axes.set_yticks(range(len(steps)), [*steps])
    axes.invert_yaxis()
