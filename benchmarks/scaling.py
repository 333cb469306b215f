"""Benchmarks of the cost of opening, by the number of batches, columns, bytes, datasets, consumers or versions.

Each curve grows a single number and keeps the others fixed. A point has the processor time of client and server
together, and the memory by which each has grown. The time is the least of several readings, so that other work on the
machine disturbs it little. The slope between two points is that of the logarithms: 0 is constant cost, 1 is linear
cost. A larger slope is a mistake in this library.
"""

from __future__ import annotations

import gc
import math
import multiprocessing
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

import dissociated as dis
from dissociated.cli import text
from dissociated.node.node import Node
from dissociated.store.store import Store

_CONTEXT = multiprocessing.get_context("spawn")
_LISTEN = ("shm:", "tcp://127.0.0.1:0")
_RETAIN = 3600.0  # seconds for which a replaced version stays
_READINGS = 5
_LINEAR = 1.15  # largest slope that counts as linear, with allowance for noise
_SHOWN = 2e-3  # seconds below which a slope is noise


class Point(NamedTuple):
    """The cost of opening at a number: processor seconds, and the bytes by which client and server have grown."""

    number: int
    seconds: float
    client: int
    server: int


@contextmanager
def _server() -> Iterator[dis.Server]:
    with dis.Server(_LISTEN, max_connections=2000, retain=_RETAIN) as server:
        server.publish("first", pa.table({"n": [1]}))  # loads modules before memory is measured
        yield server


@contextmanager
def _node() -> Iterator[Node]:
    with TemporaryDirectory(dir="/dev/shm") as directory, Node(Store(directory), _LISTEN, retain=_RETAIN) as node:
        yield node


class Curve(NamedTuple):
    """A curve: the numbers to measure, a function that creates as many things in a server, and how to read then."""

    counts: Sequence[int]
    make: Callable[[Any, int], None]
    transport: str | None = None
    open_server: Callable[[], AbstractContextManager[dis.Server | Node]] = _server
    together: bool = False  # whether the dataset is opened `number` times, and all readings are held


def _batches(server: dis.Server, count: int) -> None:
    batch = pa.record_batch({"a": np.arange(8), "b": np.arange(8)})
    server.publish("t", pa.Table.from_batches([batch] * count), wait=True)


def _columns(server: dis.Server, count: int) -> None:
    batch = pa.record_batch({f"c{number}": np.arange(8) for number in range(count)})
    server.publish("t", pa.Table.from_batches([batch] * 4), wait=True)


def _megabytes(server: dis.Server, count: int) -> None:
    batch = pa.record_batch({"a": np.zeros(1 << 17)})
    server.publish("t", pa.Table.from_batches([batch] * count), wait=True)


def _datasets(server: dis.Server, count: int) -> None:
    for number in range(count):
        server.publish(f"d{number}", pa.table({"n": [number]}))
    server.publish("t", pa.table({"n": [1]}))


def _versions(server: dis.Server, count: int) -> None:
    for number in range(count):
        server.publish("t", pa.table({"n": [number]}))


def _stored_versions(node: Node, count: int) -> None:
    with dis.connect(node.uri) as client:
        for number in range(count):
            client.put("t", pa.table({"n": [number]}))


def _consumers(server: dis.Server, count: int) -> None:
    _batches(server, 100)


CURVES = {
    "batches, shm": Curve((10, 100, 1_000, 10_000, 100_000, 1_000_000), _batches, "shm"),
    "batches, tcp": Curve((10, 100, 1_000, 10_000, 100_000, 1_000_000), _batches, "tcp"),
    "columns, shm": Curve((1, 10, 100, 1_000, 5_000), _columns, "shm"),
    "columns, tcp": Curve((1, 10, 100, 1_000, 5_000), _columns, "tcp"),
    "megabytes, shm": Curve((16, 64, 256, 1_024, 4_096, 16_384), _megabytes, "shm"),
    "datasets": Curve((10, 100, 1_000, 10_000, 100_000), _datasets),
    "versions": Curve((10, 100, 1_000, 10_000), _versions),
    "versions, stored": Curve((10, 100, 1_000, 10_000), _stored_versions, open_server=_node),
    "consumers, shm": Curve((1, 10, 100, 500), _consumers, "shm", together=True),
    "consumers, tcp": Curve((1, 10, 100, 500), _consumers, "tcp", together=True),
}


def run(most: int, into: Path, names: Sequence[str]) -> None:
    """Measure curves, print them, and draw them.

    Args:
        most: The largest number to measure.
        into: The directory for the drawings, SVG files.
        names: The curves; empty for all.
    """
    for name in names or CURVES:
        points = [*_measure(CURVES[name], most)]
        print(text.table((name.upper(), "MS", "CLIENT", "SERVER", "SLOPE", ""), _rows(points), right=(0, 1, 2, 3, 4)))
        print(flush=True)
        into.mkdir(parents=True, exist_ok=True)
        (into / f"{name.replace(', ', '-')}.svg").write_text(_drawing(name, points))
    print(f"drawn in {into}")


def _rows(points: Sequence[Point]) -> Iterator[tuple[str, ...]]:
    for before, point in zip([None, *points], points, strict=False):
        slope = None if before is None else _slope(before, point)
        steep = slope is not None and slope > _LINEAR and point.seconds > _SHOWN
        yield (
            f"{point.number:,}",
            f"{point.seconds * 1e3:.2f}",
            text.size(point.client),
            text.size(point.server),
            "" if slope is None else f"{slope:.2f}",
            "worse than linear" if steep else "",
        )


def _slope(before: Point, point: Point) -> float:
    return math.log(point.seconds / before.seconds) / math.log(point.number / before.number)


def _measure(curve: Curve, most: int) -> Iterator[Point]:
    for count in curve.counts:
        if count > most:
            return
        ours, theirs = _CONTEXT.Pipe()
        server = _CONTEXT.Process(target=_serve, args=(curve, count, theirs), daemon=True)
        server.start()
        try:
            yield _point(curve, count, ours)
            ours.send(None)
            server.join(30)
        finally:
            server.kill()


def _serve(curve: Curve, count: int, pipe: Connection) -> None:
    with curve.open_server() as server:
        before = _resident()
        curve.make(server, count)
        pipe.send(server.uri if isinstance(server, Node) else server.catalog_uri)
        while pipe.recv() is not None:
            pipe.send((_processor(), _resident() - before))


def _point(curve: Curve, count: int, pipe: Connection) -> Point:
    def server() -> tuple[float, int]:
        pipe.send(True)
        used, grown = pipe.recv()
        return float(used), int(grown)

    with dis.connect(pipe.recv()) as client:
        client.read("t", transport=curve.transport).read_all()  # warms caches and loads modules
        readings = []
        grown = 0
        for _ in range(_READINGS):
            gc.collect()
            memory, begin = _resident(), server()[0] + _processor()
            held: list[Any] = [
                client.read("t", transport=curve.transport).read_all() for _ in range(count if curve.together else 1)
            ]
            readings.append(server()[0] + _processor() - begin)
            grown = max(grown, _resident() - memory)
            del held
        return Point(count, min(readings), grown, server()[1])


def _processor() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _resident() -> int:
    """Return the anonymous resident memory of this process, in bytes."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


_WIDTH, _HEIGHT, _MARGIN = 480, 320, 48


def _drawing(name: str, points: Sequence[Point]) -> str:
    """Draw the curve as SVG, with logarithmic axes and a dashed line of linear cost."""
    across = [math.log10(point.number) for point in points]
    up = [math.log10(point.seconds * 1e3) for point in points]
    left, right, bottom, top = across[0], across[-1], math.floor(min(up)), math.ceil(max(up))

    def place(x: float, y: float) -> str:
        at = _MARGIN + (x - left) / ((right - left) or 1) * (_WIDTH - 2 * _MARGIN)
        return f"{at:.1f},{_HEIGHT - _MARGIN - (y - bottom) / ((top - bottom) or 1) * (_HEIGHT - 2 * _MARGIN):.1f}"

    def label(x: float, y: float, words: str, anchor: str, down: int = 0) -> str:
        at_x, at_y = place(x, y).split(",")
        return f'<text x="{at_x}" y="{float(at_y) + down:.1f}" text-anchor="{anchor}">{words}</text>'

    curve = " ".join(map(place, across, up))
    reach = min(right, left + top - up[0])
    linear = f"{place(left, up[0])} {place(reach, up[0] + reach - left)}"
    labels = [label(x, bottom, f"{point.number:,}", "middle", 18) for x, point in zip(across, points, strict=True)]
    labels += [label(left, y, f"{10.0**y:g} ms", "end") for y in range(bottom, top + 1)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        f'font-size="11"><rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>'
        f'<text x="{_WIDTH / 2}" y="20" text-anchor="middle">opening, by {name}</text>'
        f'<polyline points="{linear}" fill="none" stroke="gray" stroke-dasharray="4"/>'
        f'<polyline points="{curve}" fill="none" stroke="black" stroke-width="2"/>{"".join(labels)}</svg>\n'
    )
