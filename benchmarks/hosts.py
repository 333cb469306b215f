"""Processor time for each gigabyte on both sides: `tcp:`, Flight, a bare Python socket and iperf3, over loopback TCP.

Two hosts with a fast link are limited by their processors. So this counts the processor time of each process, which
other work on the machine disturbs less than the duration. Readers drop each batch when they have it.
"""

from __future__ import annotations

import json
import multiprocessing
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from typing import NamedTuple

import pyarrow as pa
import pyarrow.flight as flight

import dissociated as dis
from benchmarks.peers import Shape, running
from benchmarks.rounds import in_turns
from dissociated.cli import text

_CONTEXT = multiprocessing.get_context("spawn")


class Cost(NamedTuple):
    """The seconds that a transfer of one gigabyte takes: by the clock, and of the processor on each side."""

    seconds: float
    server: float
    client: float


class _Table(flight.FlightServerBase):  # type: ignore[misc]
    """A server of pyarrow.flight with some tables, which a ticket names."""

    def __init__(self, tables: dict[bytes, pa.Table]) -> None:
        super().__init__("grpc://127.0.0.1:0")
        self._tables = tables

    def do_get(self, context: object, ticket: flight.Ticket) -> flight.RecordBatchStream:
        return flight.RecordBatchStream(self._tables[ticket.ticket])


def _serve_flight(shapes: Sequence[Shape], pipe: Connection) -> None:
    with _Table({shape.name.encode(): shape.table() for shape in shapes}) as server:
        pipe.send(server.port)
        pipe.recv()


@contextmanager
def _flight(shapes: Sequence[Shape]) -> Iterator[tuple[flight.FlightClient, int]]:
    """Run a server of pyarrow.flight. Yield a client of it, and the id of its process."""
    ours, theirs = _CONTEXT.Pipe()
    process = _CONTEXT.Process(target=_serve_flight, args=(shapes, theirs), daemon=True)
    process.start()
    try:
        with flight.FlightClient(f"grpc://127.0.0.1:{ours.recv()}") as client:
            yield client, int(process.pid or 0)
    finally:
        process.kill()


def shapes(gigabytes: float) -> list[Shape]:
    """Return the shapes: batches of 16 MB and of 1 MB in 10 columns."""
    return [
        Shape("16 MB", max(2, round(gigabytes * 60)), 10, 209_715),
        Shape("1 MB", max(16, round(gigabytes * 950)), 10, 13_107),
    ]


def run(gigabytes: float, rounds: int) -> None:
    """Measure, and print the table."""
    measured = shapes(gigabytes)
    rows: list[tuple[str, ...]] = []
    with running(measured) as peers, dis.connect(peers.catalog) as client, _flight(measured) as (plain, flight_pid):
        for index, shape in enumerate(measured):
            calls: dict[str, tuple[Callable[[], object], int]] = {
                "bare socket": (partial(_receive, peers.bare_port, index, shape), peers.bare_pid),
                "Flight": (partial(_get, plain, shape), flight_pid),
                "tcp": (partial(_read, client, shape), peers.server_pid),
            }
            costs: dict[str, list[Cost]] = {name: [] for name in calls}
            in_turns({name: partial(_measure, *call, shape, costs[name]) for name, call in calls.items()}, rounds)
            medians = {name: Cost(*map(statistics.median, zip(*some[1:], strict=True))) for name, some in costs.items()}
            if (iperf := _iperf3(gigabytes)) is not None:
                medians["iperf3"] = iperf
            of_flight = medians["Flight"].server + medians["Flight"].client
            for name, cost in medians.items():
                both = cost.server + cost.client
                shown = (f"{1 / cost.seconds:.2f}", *(f"{1e3 * side:.0f}" for side in (*cost[1:], both)))
                rows.append((shape.name, name, *shown, f"{both / of_flight:.2f}"))
    print(f"{gigabytes:g} GB, median of {rounds} rounds; the goal is at most the processor time of Flight\n")
    heads = ("BATCHES OF", "OVER", "GB/S", "SERVER, MS/GB", "CLIENT, MS/GB", "BOTH, MS/GB", "OF FLIGHT")
    print(text.table(heads, rows, right=(2, 3, 4, 5, 6)))
    if shutil.which("iperf3") is None:
        print("\niperf3 is not installed, so its figures are missing", file=sys.stderr)


def _measure(call: Callable[[], object], server: int, shape: Shape, costs: list[Cost]) -> float:
    """Make a call, and add its cost for each gigabyte to `costs`."""
    before = time.perf_counter(), _processor_time(server), time.process_time()
    call()
    after = time.perf_counter(), _processor_time(server), time.process_time()
    costs.append(Cost(*((end - start) / shape.nbytes * 1e9 for start, end in zip(before, after, strict=True))))
    return costs[-1].seconds


def _processor_time(pid: int) -> float:
    """Return the seconds of the processor that another process has taken, by clock_getcpuclockid of Linux."""
    return time.clock_gettime(~pid << 3 | 2)


def _receive(port: int, index: int, shape: Shape) -> None:
    body = memoryview(bytearray(shape.nbytes // shape.batches))
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(bytes([index]))
        for _ in range(shape.batches):
            at = 0
            while at < len(body):
                at += connection.recv_into(body[at:])


def _get(client: flight.FlightClient, shape: Shape) -> None:
    for _ in client.do_get(flight.Ticket(shape.name)):
        pass


def _read(client: dis.Client, shape: Shape) -> None:
    for _ in client.read(shape.name, transport="tcp"):
        pass


def _iperf3(gigabytes: float) -> Cost | None:
    """Return the cost of a transfer by iperf3, or None if it is not installed."""
    if shutil.which("iperf3") is None:
        return None
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    serve = ["iperf3", "-s", "-1", "-p", port, "--forceflush"]
    with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        while "listening" not in server.stdout.readline():
            pass
        client = ["iperf3", "-c", "127.0.0.1", "-p", port, "-J", "-n", str(round(gigabytes * 1e9))]
        done = subprocess.run(client, capture_output=True, text=True, check=True)
        server.communicate()
    end = json.loads(done.stdout)["end"]
    sent, used = end["sum_sent"], end["cpu_utilization_percent"]
    seconds = sent["seconds"] / sent["bytes"] * 1e9
    return Cost(seconds, seconds * used["host_total"] / 100, seconds * used["remote_total"] / 100)
