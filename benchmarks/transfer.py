"""Benchmarks of shm, tcp, Flight DoGet and a bare socket, which move the same bytes between the same two processes.

The time is that from the request until there is a Table, or for the bare socket until the bytes are in memory. For
comparison with shm, an Arrow IPC stream in shared memory is mapped by hand, and Ray's `get` is called if Ray is
installed. The peers take turns in each round, so that other work on the machine disturbs all of them alike. Medians are
compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import dissociated as dis
from benchmarks.peers import Peers, Readers, Shape, in_files, in_ray, in_vineyard, receive_bare, running
from benchmarks.rounds import medians
from dissociated.cli import text

#: The goals in the README: the shape, a measurement, the measurement that it is compared with, and the least speed-up.
PROMISES = [
    ("16 MB", "shm", "Flight", 100.0),
    ("1 MB", "shm", "Flight", 100.0),
    ("1 MB", "shm", "by hand", 0.67),
    ("1 MB", "shm", "Ray", 5.0),
    ("1 MB", "shm", "Vineyard", 20.0),
    ("16 MB", "tcp", "socket", 0.9),
    ("16 MB", "tcp", "Flight", 1.6),
    ("1 MB", "tcp", "socket", 0.9),
    ("1 MB", "tcp", "Flight", 1.6),
    ("1,000 rows", "tcp", "Flight", 1.5),
    ("1,000 rows", "shm", "Flight", 8.0),
]


def shapes(gigabytes: float) -> list[Shape]:
    """Return the shapes: batches of 16 MB and of 1 MB in 10 columns, and batches of 1,000 rows in 4 columns."""
    return [
        Shape("16 MB", max(2, round(gigabytes * 64)), 10, 209_715),
        Shape("1 MB", max(16, round(gigabytes * 1000)), 10, 13_107),
        Shape("1,000 rows", max(100, round(gigabytes * 10_000)), 4, 1_000),
    ]


def run(gigabytes: float, rounds: int) -> None:
    """Measure, and print the tables."""
    measured = shapes(gigabytes)
    with ExitStack() as opened:
        peers = opened.enter_context(running(measured))
        client = opened.enter_context(dis.connect(peers.catalog))
        others = {
            "by hand": opened.enter_context(in_files(measured)),
            "Ray": opened.enter_context(in_ray(measured)),
            "Vineyard": opened.enter_context(in_vineyard(measured)),
        }
        measured_in = {
            shape.name: _measure(client, peers, others, index, shape, rounds) for index, shape in enumerate(measured)
        }
        growth = _growth(client, measured[0])
    rows = [
        (
            shape.name,
            peer,
            f"{seconds * 1e3:.2f}",
            f"{shape.nbytes / seconds / 1e9:.2f}",
            f"{shape.batches / seconds:,.0f}",
        )
        for shape in measured
        for peer, seconds in measured_in[shape.name].items()
    ]
    print(f"{gigabytes:g} GB, median of {rounds} rounds\n")
    print(text.table(("BATCHES OF", "OVER", "MS", "GB/S", "BATCHES/S"), rows, right=(2, 3, 4)))
    print()
    promised = []
    for name, ours, peer, goal in PROMISES:
        if peer not in measured_in[name]:
            continue
        ratio = measured_in[name][peer] / measured_in[name][ours]
        promised.append(
            (f"{ours} against {peer}, {name}", f"{ratio:.2f}x", f"{goal:g}x", "" if ratio >= goal else "missed")
        )
    print(text.table(("PROMISE", "MEASURED", "GOAL", ""), promised, right=(1, 2)))
    print(f"\nmemory that opening over shm added to the client: {growth}")


def _measure(
    client: dis.Client,
    peers: Peers,
    others: Mapping[str, Readers],
    index: int,
    shape: Shape,
    rounds: int,
) -> dict[str, float]:
    calls: dict[str, Callable[[], Any]] = {
        "shm": lambda: client.read(shape.name, transport="shm").read_all(),
        "tcp": lambda: client.read(shape.name, transport="tcp").read_all(),
        "Flight": lambda: client.read(shape.name, transport="grpc").read_all(),
        "socket": lambda: receive_bare(peers.bare_port, index, shape),
        **{name: readers[shape.name] for name, readers in others.items() if readers},
    }
    return medians(calls, rounds)


def _growth(client: dis.Client, shape: Shape) -> str:
    before = _resident()
    table = client.read(shape.name, transport="shm").read_all()
    after = _resident()
    private, shared = after[0] - before[0], after[1] - before[1]
    assert table.nbytes == shape.nbytes
    return (
        f"{text.size(max(private, 0))} of its own, {text.size(max(shared, 0))} of pages shared with the server, "
        f"{(private + shared) / shape.nbytes:.2%} of the data"
    )


def _resident() -> tuple[int, int]:
    """Return the anonymous and the shared resident memory of this process, in bytes."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return tuple(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))  # type: ignore[return-value]
