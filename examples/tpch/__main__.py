"""The demo: Spark answers queries of TPC-H, and publishes the answers with lineitem; three other processes use these.

    pip install '.[demo]'
    python -m examples.tpch [--scale 1] [--query q3] [--transport ucx|fabric] [--device cuda:0] [--plot tpch.png]

This process serves the datasets, which Spark's tasks write into shared memory. Polars, DuckDB and a batch loader open
lineitem in place, all at the same time. Each computes answers of its own, and compares them with Spark's.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

import dissociated as dis
from examples.tpch.data import TABLES, generate, generator
from examples.tpch.queries import LINEITEM_QUERIES, QUERIES
from examples.tpch.screen import Lane, Screen
from examples.tpch.steps import Step
from examples.tpch.summary import CONSUMERS, plot, print_tables

ROOT = Path(__file__).resolve().parents[2]

NEEDS = ("pyspark", "duckdb", "polars", "numpy", "matplotlib")
TRANSPORTS = ["shm", "tcp"]
STEPS = {"polars": 6, "duckdb": 6, "loader": 6}


class Failed(Exception):
    """The error of a part of the demo, with the reason that it printed."""


class Running:
    """A part of the demo in a process of its own, which is terminated at the end of the `with` block."""

    def __init__(self, lane: Lane, module: str, *arguments: str, log: Path) -> None:
        self._lane = lane
        self._log = log
        with log.open("wb") as errors:  # Spark prints much to stderr
            command = [sys.executable, "-m", f"examples.tpch.{module}", *arguments]
            self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True)

    def steps(self) -> list[Step]:
        """Show the steps of the process until it ends, and return them. Raise Failed if it fails."""
        assert self._process.stdout is not None
        steps, why = [], ""
        for line in self._process.stdout:
            match json.loads(line):
                case {"begins": name}:
                    self._lane.begins(name)
                case {"share": share}:
                    self._lane.share(share)
                case {"done": done}:
                    steps.append(Step(**done))
                    self._lane.done(steps[-1])
                case {"failed": sentence}:
                    why = sentence
        if self._process.wait():
            said = self._log.read_text(errors="replace").splitlines() or ["it died, and said nothing"]
            raise Failed(why or said[-1])
        return steps

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        with self._process:
            self._lane.ends()


def run(
    scale: float, queries: list[str], transports: list[str], device: str | None, scratch: Path, console: Console
) -> dict[str, list[Step]]:
    """Run all parts of the demo in order, with the consumers at the same time, and print the tables.

    Returns:
        The steps of each part, by its name.
    """
    steps: dict[str, list[Step]] = {}
    with dis.Server([f"{transport}:" for transport in transports]) as server, Screen(console) as screen:
        catalog = server.catalog_uri

        def start(lane: str, module: str, *arguments: str, of: int) -> Running:
            told = [*arguments, "--catalog", catalog]
            return Running(screen.process(lane, of), module, *told, log=scratch / f"{lane}.log")

        steps["data"] = [make(scale, scratch / "data", screen.process("data", 1))]
        options = ("--data", str(scratch / "data"), "--queries", *queries)
        with start("spark", "pipeline", *options, of=2 + len(queries)) as spark:
            steps["spark"] = spark.steps()
        with ExitStack() as processes, ThreadPoolExecutor(len(CONSUMERS)) as threads:
            told = {"loader": ["--device", device]} if device is not None else {}
            consumers = {
                name: processes.enter_context(
                    start(name, "consumers", name, *told.get(name, ()), of=STEPS[name] + 3 * (name in told))
                )
                for name in CONSUMERS
            }
            steps.update(zip(consumers, threads.map(Running.steps, consumers.values()), strict=True))
        ways = [*transports, "grpc"]
        with start("transports", "consumers", "transports", "--transports", *ways, of=len(ways)) as all_ways:
            steps["transports"] = all_ways.steps()
        with dis.connect(catalog) as client:
            published = client.list()
    print_tables(console, steps, published)
    return steps


def make(scale: float, directory: Path, lane: Lane) -> Step:
    """Generate the data on all cores."""
    lane.begins("generate")
    made = Step("generate", time.time())
    started = time.perf_counter()
    generate(scale, directory, parts=min(8, math.ceil(800 * scale)))  # as many files for each table
    made.seconds = time.perf_counter() - started
    nbytes = sum(path.stat().st_size for path in directory.rglob("*.parquet"))
    made.says = f"TPC-H at scale {scale:g}: {len(TABLES)} tables, {nbytes / 1e6:,.1f} MB as Parquet"
    lane.done(made)
    lane.ends()
    return made


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.tpch", description="TPC-H from Spark to its consumers.")
    parser.add_argument("--scale", type=float, default=0.01, help="of TPC-H; 1 is a gigabyte (default: %(default)s)")
    parser.add_argument(
        "--query",
        action="append",
        choices=[*QUERIES],
        default=[],
        help="a query for Spark beside q1 and q6; may be given several times (default: all)",
    )
    parser.add_argument(
        "--transport",
        action="append",
        choices=["ucx", "fabric"],
        default=[],
        help="a transport to read over beside shm and tcp; may be given twice",
    )
    parser.add_argument("--device", help="where the batch loader takes lineitem, too: cuda:0, or test:0 for none")
    parser.add_argument("--plot", type=Path, default=Path("tpch.png"), help="where to draw (default: %(default)s)")
    arguments = parser.parse_args()
    missing = [module for module in NEEDS if not find_spec(module)] + ([] if generator() else ["tpchgen-cli"])
    if missing:
        sys.exit(f"tpch: {', '.join(missing)} not installed: pip install 'dissociated[spark,demo]'")
    console = Console(width=None if sys.stdout.isatty() else 100)
    names = (*LINEITEM_QUERIES, *arguments.query) if arguments.query else QUERIES
    queries = [name for name in QUERIES if name in names]
    transports = [*TRANSPORTS, *arguments.transport]
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="tpch-") as scratch:
        steps = run(arguments.scale, queries, transports, arguments.device, Path(scratch), console)
    plot(arguments.plot, steps, arguments.scale)
    seconds = time.perf_counter() - started
    checked = sum(step.facts.get("checked", 0) for lane in steps.values() for step in lane)
    console.print(
        f"  Done in {seconds:.0f} s: {checked} values computed outside of Spark equal Spark's.", highlight=False
    )
    console.print(f"  {arguments.plot} shows what happened when.", highlight=False)


if __name__ == "__main__":
    try:
        main()
    except (dis.DissociatedError, Failed, OSError) as error:
        sys.exit(f"tpch: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
