"""A medium beside the tool that comes with its library, tcp and Flight DoGet.

What is timed is from the request until there is a Table, connecting included; that alone is the first row. It is left
out of the comparison with the tool, which does not count it either: where connecting took more than the rest, too
little was moved to compare. Tools send one buffer again and again and receive into one; ours go from memory of their
own into fresh memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import pyarrow as pa

import dissociated as dis
from benchmarks.peers import Shape, running
from benchmarks.rounds import medians
from dissociated.cli import text

GOAL = 0.9


class Way(NamedTuple):
    """Which location is read, by what is in its URI and what is not; and the tool, if there is one, with its GB/s."""

    has: str
    lacks: str = "nothing"
    tool: str = ""
    measure: Callable[[Shape], float] = lambda shape: 0.0


def shapes(gigabytes: float) -> list[Shape]:
    """Bodies of 1, 16 and 64 MB in one piece and in ten; 1,000 rows of 4 columns; next to nothing, to connect."""
    measured = []
    for columns, layout in ((1, "1 piece"), (10, "10 pieces")):
        for megabytes in (1, 16, 64):
            rows = (megabytes << 20) // (8 * columns)
            measured.append(
                Shape(f"{megabytes} MB, {layout}", max(2, round(gigabytes * 1000 / megabytes)), columns, rows)
            )
    return [Shape("connect", 1, 1, 1), *measured, Shape("1,000 rows", max(100, round(gigabytes * 10_000)), 4, 1_000)]


def compare(listen: Sequence[str], ways: Mapping[str, Way], gigabytes: float, rounds: int) -> None:
    """Measure and print."""
    measured = shapes(gigabytes)
    rows: list[tuple[str, ...]] = []
    connecting: dict[str, float] = {}
    ways = {**ways, "tcp": Way("tcp:")}
    with running(measured, listen) as peers, dis.connect(peers.catalog) as client:
        for shape in measured:
            (endpoint,) = client.describe(shape.name).endpoints
            calls: dict[str, Callable[[], Any]] = {}
            for name, way in ways.items():
                uri = next(one for one in endpoint.locations if way.has in one and way.lacks not in one)
                calls[name] = partial(_read, uri, endpoint.ticket)
            calls["Flight"] = lambda name=shape.name: client.read(name, "grpc").read_all()  # type: ignore[misc]
            seconds = medians(calls, rounds)
            if not connecting:  # the first shape is nothing else
                connecting = seconds
                rows += ((shape.name, name, f"{took * 1e3:.2f}", "", "", "", "") for name, took in seconds.items())
                continue
            bare = {name: way.measure(shape) for name, way in ways.items()}
            for name, took in seconds.items():
                moving = took - connecting[name]
                ratio = shape.nbytes / moving / 1e9 / bare[name] if bare.get(name) and moving > took / 2 else 0.0
                against = f"{ratio:.2f}x" if ratio else ""
                missed = "missed" if ratio and ratio < GOAL else ""
                rate, per_second = f"{shape.nbytes / took / 1e9:.2f}", f"{shape.batches / took:,.0f}"
                rows.append((shape.name, name, f"{took * 1e3:.2f}", rate, per_second, against, missed))
            rows += (
                (shape.name, f"{ways[name].tool} for {name}", "", f"{speed:.2f}", "", "", "")
                for name, speed in bare.items()
                if speed
            )
    print(f"{gigabytes:g} GB, median of {rounds} rounds; the goal is {GOAL:g}x of the tool, without connecting\n")
    heads = ("BATCHES OF", "OVER", "MS", "GB/S", "BATCHES/S", "OF THE TOOL", "")
    print(text.table(heads, rows, right=(2, 3, 4, 5)))


def _read(uri: str, ticket: bytes) -> pa.Table:
    return dis.open_stream(uri, ticket, allow_rma="remote_handle" in uri).read_all()
