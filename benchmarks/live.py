"""Benchmarks of live streams: the memory of a long stream through little shared memory, and the rate of tiny batches.

In the first, a process publishes a stream that is far larger than its shared memory. Other processes consume it
together: the first from the beginning, a second that joins later, and optionally a third over tcp. Each consumer
touches every page that it receives. At intervals, the memory of each process and of the stream is printed.

The second measures batches of one row, over shm, over tcp and over Flight's DoGet.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

import numpy as np
import pyarrow as pa

import dissociated as dis
from benchmarks.rounds import in_turns
from dissociated.cli import text

_CONTEXT = multiprocessing.get_context("spawn")
_BATCH = 16 << 20  # bytes
_LINES = 12  # number of rows of the printed table
_ROWS = 70_000  # number of batches of one row


def _publish(batches: int, limit: int, consumers: int, passed: Synchronized[int], pipe: Connection) -> None:
    batch = pa.record_batch({f"c{n}": np.random.default_rng(n).random(_BATCH // 64) for n in range(8)})

    def source() -> Iterator[pa.RecordBatch]:
        for _ in range(batches):
            passed.value += batch.nbytes
            yield batch

    with dis.Server(["shm:", "tcp://127.0.0.1:0"], catalog=None, live_limit=limit) as server:
        reader = pa.RecordBatchReader.from_batches(batch.schema, source())
        server.publish("live", reader, live=dis.Live(consumers=consumers))
        pipe.send((server.ticket("live"), server.locations("live")))
        pipe.recv()


def _consume(uri: str, ticket: bytes, pipe: Connection) -> None:
    pipe.send("started")
    pipe.recv()  # when to join the stream
    nbytes = 0
    for batch in dis.open_stream(uri, ticket):
        for column in batch.columns:
            np.frombuffer(column.buffers()[1], np.uint8)[::4096].max()
        nbytes += batch.nbytes
    pipe.send(nbytes)
    pipe.recv()


def _anonymous(pid: int | None) -> int:
    """Return the anonymous resident memory of a process, in bytes."""
    fields = dict(line.split(":") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


def _memfds(pid: int | None) -> int:
    """Return the bytes that a process's live memory holds."""
    held = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if os.readlink(entry).startswith("/memfd:dissociated:live"):
                status = os.stat(entry)
                held[status.st_ino] = status.st_blocks * 512
        except FileNotFoundError:
            pass  # the descriptor was closed meanwhile
    return sum(held.values())


def run(gigabytes: float, limit: int, tcp: bool) -> None:
    """Measure the memory of a long stream, and print the table.

    Args:
        gigabytes: The size of the stream.
        limit: The bytes of its shared memory.
        tcp: Whether there is a consumer over tcp, too.
    """
    batches = max(2, round(gigabytes * 1e9 / _BATCH))
    total = batches * _BATCH
    passed = _CONTEXT.Value("q", 0)
    ours, theirs = _CONTEXT.Pipe()
    server = _CONTEXT.Process(target=_publish, args=(batches, limit, 1 + tcp, passed, theirs), daemon=True)
    server.start()
    ticket, (shm, over_tcp) = ours.recv()
    consumers: list[tuple[str, BaseProcess, Connection]] = []

    def start(name: str, uri: str) -> None:
        here, there = _CONTEXT.Pipe()
        process = _CONTEXT.Process(target=_consume, args=(uri, ticket, there), daemon=True)
        process.start()
        here.recv()
        consumers.append((name, process, here))

    def join(number: int) -> None:
        consumers[number][2].send(None)

    start("shm", shm)
    if tcp:
        start("tcp", over_tcp)
    start("late shm", shm)  # it starts now, since a fast stream would end before a process has started
    for number in range(1 + tcp):
        join(number)
    while not passed.value:
        time.sleep(0.01)
    started = time.perf_counter()
    rows: list[tuple[str, ...]] = []
    while passed.value < total:
        time.sleep(0.01)
        now = passed.value
        if now < total * (len(rows) + 1) / _LINES:
            continue
        if len(rows) == 1:
            join(-1)
        told = [_anonymous(process.pid) for _, process, _ in consumers]
        memory = [now, _memfds(server.pid), _anonymous(server.pid), *told]
        rows.append((f"{time.perf_counter() - started:.1f}", *map(text.size, memory)))
    got = [pipe.recv() for _, _, pipe in consumers]
    seconds = time.perf_counter() - started
    for pipe in (ours, *(pipe for _, _, pipe in consumers)):
        pipe.send(None)
    server.join(10)
    heads = ("S", "READ", "SHARED", "SERVER", *(name.upper() for name, _, _ in consumers))
    print(f"{text.size(total)} in batches of {text.size(_BATCH)} through {text.size(limit)}\n")
    print(text.table(heads, [(*row, *[""] * (len(heads) - len(row))) for row in rows], right=range(len(heads))))
    print(f"\n{seconds:.1f} s, {text.size(total / seconds)}/s")
    print(", ".join(f"{name} got {text.size(size)}" for (name, _, _), size in zip(consumers, got, strict=True)))


def _serve_rows(pipe: Connection) -> None:
    """Serve batches of one row over Flight, and as a live stream that is published anew for each message of `pipe`."""
    import pyarrow.flight as flight

    whole = pa.record_batch({"t": np.arange(_ROWS), "v": np.random.default_rng(1).random(_ROWS)})
    batches = [whole.slice(row, 1) for row in range(_ROWS)]

    def reader() -> pa.RecordBatchReader:
        return pa.RecordBatchReader.from_batches(whole.schema, iter(batches))

    class _Flight(flight.FlightServerBase):  # type: ignore[misc]  # pyarrow has no type hints
        def do_get(self, context: object, ticket: object) -> flight.RecordBatchStream:
            return flight.RecordBatchStream(reader())

    with _Flight("grpc://127.0.0.1:0") as other, dis.Server(["shm:", "tcp://127.0.0.1:0"], catalog=None) as server:
        pipe.send(other.port)
        while pipe.recv():
            server.publish("live", reader(), live=dis.Live())
            pipe.send((server.ticket("live"), server.locations("live")))


def run_rows(rounds: int) -> None:
    """Measure how long it takes to read all batches of one row, and print the medians."""
    import pyarrow.flight as flight

    ours, theirs = _CONTEXT.Pipe()
    server = _CONTEXT.Process(target=_serve_rows, args=(theirs,), daemon=True)
    server.start()
    port = ours.recv()

    def read(which: int) -> float:
        ours.send(True)
        ticket, locations = ours.recv()
        started = time.perf_counter()
        assert sum(batch.num_rows for batch in dis.open_stream(locations[which], ticket)) == _ROWS
        return time.perf_counter() - started

    def read_flight() -> float:
        started = time.perf_counter()
        with flight.connect(f"grpc://127.0.0.1:{port}") as client:
            assert sum(chunk.data.num_rows for chunk in client.do_get(flight.Ticket(b"rows"))) == _ROWS
        return time.perf_counter() - started

    measured = in_turns({"shm": lambda: read(0), "tcp": lambda: read(1), "Flight": read_flight}, rounds)
    ours.send(False)
    server.join(10)
    rows = [(over, f"{seconds:.2f}", f"{_ROWS / seconds:,.0f}") for over, seconds in measured.items()]
    print(f"\n{_ROWS:,} batches of one row, median of {rounds} rounds\n")
    print(text.table(("OVER", "S", "BATCHES/S"), rows, right=(1, 2)))
