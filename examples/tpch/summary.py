"""What came of it: two tables and a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

import dissociated as dis
from dissociated.cli import text
from examples.tpch.steps import Step

Steps = Mapping[str, Sequence[Step]]

CONSUMERS = ("polars", "duckdb", "loader")


def print_tables(console: Console, steps: Steps, published: Sequence[dis.DatasetInfo]) -> None:
    """What Spark published, and what each consumer did with lineitem."""
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
_WAYS = {"grpc": "Flight DoGet", "shm": "shm, in place"}


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if not number or column == "then worked" else "right")
    return table


def _of(steps: Sequence[Step], name: str) -> Step:
    return next(step for step in steps if step.name == name)


def _rate(step: Step) -> str:
    """GB/s, where bytes have moved."""
    return "" if step.name == "shm" else f"{step.facts['nbytes'] / step.seconds / 1e9:.2f}"


def plot(path: Path, steps: Steps, scale: float) -> None:
    """Draw when each process did what, and how long it took to open lineitem each way."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7.5), layout="constrained")
    FigureCanvasAgg(figure)
    when, ways = figure.subplots(2, 1, height_ratios=[3, 2])
    lanes = [lane for lane in ("data", "spark", *CONSUMERS, "transports") if lane in steps]
    origin = min(step.begun for lane in lanes for step in steps[lane])
    span = max(step.begun + step.seconds for lane in lanes for step in steps[lane]) - origin
    for row, lane in enumerate(lanes):
        for number, step in enumerate(steps[lane]):
            colour = f"C{row}"
            when.barh(row, step.seconds, left=step.begun - origin, color=colour, alpha=0.95 if number % 2 else 0.6)
            if step.seconds > span * 0.02:
                at = step.begun - origin + step.seconds / 2
                when.text(at, row, step.name, ha="center", va="center", fontsize=8, rotation=_turned(step, span))
    when.set_yticks(range(len(lanes)), lanes)
    when.invert_yaxis()
    when.set_xlabel("seconds")
    when.set_title(f"TPC-H at scale {scale:g}: Spark publishes, others go on where the data lies", loc="left")

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
    for axes in (when, ways):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def _turned(step: Step, span: float) -> int:
    """Names stand upright where the bar is narrow."""
    return 0 if step.seconds > span * 0.012 * len(step.name) else 90
