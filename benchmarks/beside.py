"""Comparison of a medium with the benchmark tool of its own library, with tcp, and with Flight DoGet.

There are two measurements. The first is the use of a client: the time from the request until there is a Table, with
connecting, and with all batches in memory of their own on both sides. The first row is connecting alone. The second
measurement is comparable with the tools. It sends the same batch again and again, starts the clock when the first has
arrived, and drops batches at once, so that their memory is reused.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple

import pyarrow as pa

import dissociated as dis
from benchmarks.peers import Shape, running
from benchmarks.rounds import in_turns, medians
from dissociated.cli import text

GOAL = 0.9


class Way(NamedTuple):
    """A location to read, chosen by substrings that its URI has and lacks, and a tool to compare it with, if any.

    `measure` returns the GB/s of the tool.
    """

    has: str
    lacks: str = "nothing"
    tool: str = ""
    measure: Callable[[Shape], float] = lambda shape: 0.0


def shapes(gigabytes: float) -> list[Shape]:
    """Return the shapes: bodies of 1, 16 and 64 MB in 1 and in 10 buffers, 1,000 rows of 4 columns, and a single value.

    The single value measures connecting.
    """
    measured = []
    for columns, layout in ((1, "1 piece"), (10, "10 pieces")):
        for megabytes in (1, 16, 64):
            rows = (megabytes << 20) // (8 * columns)
            measured.append(
                Shape(f"{megabytes} MB, {layout}", max(2, round(gigabytes * 1000 / megabytes)), columns, rows)
            )
    return [Shape("connect", 1, 1, 1), *measured, Shape("1,000 rows", max(100, round(gigabytes * 10_000)), 4, 1_000)]


def compare(listen: Sequence[str], ways: Mapping[str, Way], gigabytes: float, rounds: int) -> None:
    """Measure every way of reading, and print the table.

    Args:
        listen: URIs that the server listens at.
        ways: The ways of reading, by name; tcp and Flight are added.
        gigabytes: The size of each dataset.
        rounds: How often each way is measured; medians are printed.
    """
    rows: list[tuple[str, ...]] = []
    ways = {**ways, "tcp": Way("tcp:")}
    for shape in shapes(gigabytes):
        # A server for each shape: all shapes, with their copies in shared memory, would take 20 times `gigabytes`.
        with running([shape, shape._replace(name=_again(shape), one=True)], listen) as peers:
            rows += _compare_shape(peers.catalog, shape, ways, rounds)
        print(f"{shape.name}: measured", file=sys.stderr, flush=True)
    tools_named = ", ".join(f"{way.tool} for {name}" for name, way in ways.items() if way.tool)
    print(f"{gigabytes:g} GB, median of {rounds} rounds; the goal is {GOAL:g}x of the tool: {tools_named}\n")
    heads = ("BATCHES OF", "OVER", "TABLE, MS", "GB/S", "AGAIN, GB/S", "THE TOOL, GB/S", "OF THE TOOL", "")
    print(text.table(heads, rows, right=(2, 3, 4, 5, 6)))


def _compare_shape(catalog: str, shape: Shape, ways: Mapping[str, Way], rounds: int) -> Iterator[tuple[str, ...]]:
    with dis.connect(catalog) as client:

        def place(name: str, way: Way) -> tuple[str, bytes]:
            (endpoint,) = client.describe(name).endpoints
            return next(one for one in endpoint.locations if way.has in one and way.lacks not in one), endpoint.ticket

        calls: dict[str, Callable[[], Any]] = {
            name: partial(_read, *place(shape.name, way)) for name, way in ways.items()
        }
        calls["Flight"] = lambda: client.read(shape.name, transport="grpc").read_all()
        seconds = medians(calls, rounds)
        rates: dict[str, float] = {}
        if shape.batches > 1:  # a shape of one batch measures connecting alone
            flows = {name: partial(_flow, *place(_again(shape), way)) for name, way in ways.items()}
            tools = {f"{name}, tool": partial(way.measure, shape) for name, way in ways.items()}
            rates = in_turns({**flows, **tools}, rounds)
        for name, took in seconds.items():
            kept = shape.nbytes / took / 1e9 if rates else 0.0
            flow, tool = rates.get(name, 0.0), rates.get(f"{name}, tool", 0.0)
            ratio = flow / tool if tool else 0.0
            shown = (f"{rate:.2f}" if rate else "" for rate in (kept, flow, tool))
            against = (f"{ratio:.2f}x", "missed" if ratio < GOAL else "") if tool else ("", "")
            yield (shape.name, name, f"{took * 1e3:.2f}", *shown, *against)


def _again(shape: Shape) -> str:
    return f"{shape.name}, again"


def _read(uri: str, ticket: bytes) -> pa.Table:
    return dis.open_stream(uri, ticket, allow_rma="remote_handle" in uri).read_all()


def _flow(uri: str, ticket: bytes) -> float:
    """Return the GB/s of all batches after the first."""
    with closing(dis.open_stream(uri, ticket, allow_rma="remote_handle" in uri)) as reader:
        next(reader)
        nbytes, started = 0, time.perf_counter()
        for batch in reader:
            nbytes += batch.nbytes
        return nbytes / (time.perf_counter() - started) / 1e9
