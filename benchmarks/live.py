"""A live stream passes through shared memory that is far too small for it: memory on both sides, at intervals.

One process publishes the stream, others consume it together: one at first, one that joins when a part has passed, and
one over tcp by option. Each touches every page of what it gets. What is printed is memory of each process's own,
and the memory that the stream holds.
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
from dissociated.cli import text

_CONTEXT = multiprocessing.get_context("spawn")
_BATCH = 16 << 20  # bytes
_LINES = 12  # of the table that is printed


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
    nbytes = 0
    for batch in dis.open_stream(uri, ticket):
        for column in batch.columns:
            np.frombuffer(column.buffers()[1], np.uint8)[::4096].max()
        nbytes += batch.nbytes
    pipe.send(nbytes)
    pipe.recv()


def _anonymous(pid: int | None) -> int:
    """Resident memory of a process's own, in bytes."""
    fields = dict(line.split(":") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


def _memfds(pid: int | None) -> int:
    """What the live memory of a process holds, in bytes."""
    held = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if os.readlink(entry).startswith("/memfd:dissociated:live"):
                status = os.stat(entry)
                held[status.st_ino] = status.st_blocks * 512
        except FileNotFoundError:
            pass  # closed since
    return sum(held.values())


def run(gigabytes: float, limit: int, tcp: bool) -> None:
    """Measure and print."""
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
        consumers.append((name, process, here))

    start("shm", shm)
    if tcp:
        start("tcp", over_tcp)
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
            start("late shm", shm)
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
