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
from pathlib import Path

import numpy as np
import pyarrow as pa

import dissociated as dis
from dissociated.cli import text

_CONTEXT = multiprocessing.get_context("spawn")
_BATCH = 16 << 20  # bytes
_LINES = 12  # of the table that is printed


def _publish(batches: int, limit: int, consumers: int, pipe: Connection) -> None:
    batch = pa.record_batch({f"c{n}": np.random.default_rng(n).random(_BATCH // 64) for n in range(8)})
    passed = 0

    def source() -> Iterator[pa.RecordBatch]:
        nonlocal passed
        for _ in range(batches):
            passed += batch.nbytes
            yield batch

    with dis.Server(["shm:", "tcp://127.0.0.1:0"], catalog=None, live_limit=limit) as server:
        reader = pa.RecordBatchReader.from_batches(batch.schema, source())
        server.publish("live", reader, live=dis.Live(consumers=consumers))
        pipe.send((server.ticket("live"), server.locations("live")))
        while pipe.recv():
            pipe.send((passed, _anonymous(), _memfds()))


def _consume(uri: str, ticket: bytes, pipe: Connection) -> None:
    nbytes = 0
    for batch in dis.open_stream(uri, ticket):
        for column in batch.columns:
            np.frombuffer(column.buffers()[1], np.uint8)[::4096].max()
        nbytes += batch.nbytes
        if pipe.poll():
            pipe.recv()
            pipe.send((nbytes, _anonymous()))
    pipe.send((nbytes, _anonymous()))


def _anonymous() -> int:
    """Resident memory of this process's own, in bytes."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


def _memfds() -> int:
    """What the memory files of this process hold, in bytes."""
    held = {}
    for entry in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{entry}").startswith("/memfd:dissociated:live"):
                status = os.stat(f"/proc/self/fd/{entry}")
                held[status.st_ino] = status.st_blocks * 512
        except FileNotFoundError:
            pass  # closed since
    return sum(held.values())


def run(gigabytes: float, limit: int, tcp: bool) -> None:
    """Measure and print."""
    batches = max(2, round(gigabytes * 1e9 / _BATCH))
    ours, theirs = _CONTEXT.Pipe()
    server = _CONTEXT.Process(target=_publish, args=(batches, limit, 1 + tcp, theirs), daemon=True)
    server.start()
    ticket, (shm, over_tcp) = ours.recv()
    names, pipes = [], []

    def start(name: str, uri: str) -> None:
        here, there = _CONTEXT.Pipe()
        _CONTEXT.Process(target=_consume, args=(uri, ticket, there), daemon=True).start()
        names.append(name)
        pipes.append(here)

    start("shm", shm)
    if tcp:
        start("tcp", over_tcp)
    started = time.perf_counter()
    rows: list[tuple[str, ...]] = []
    total = batches * _BATCH
    passed = 0
    while passed < total:
        time.sleep(0.02)
        ours.send(True)
        passed, own, held = ours.recv()
        if passed < total * (len(rows) + 1) / _LINES:
            continue
        if len(rows) == _LINES // 2:
            start("late shm", shm)
        told = []
        for pipe in pipes:
            pipe.send(True)
            told.append(text.size(pipe.recv()[1]))
        rows.append((f"{time.perf_counter() - started:.1f}", text.size(passed), text.size(held), text.size(own), *told))
    last = [pipe.recv()[0] for pipe in pipes]
    seconds = time.perf_counter() - started
    ours.send(False)
    server.join(10)
    heads = ("S", "PASSED", "SHARED", "SERVER", *(name.upper() for name in names))
    print(f"{text.size(total)} in batches of {text.size(_BATCH)} through {text.size(limit)}\n")
    print(text.table(heads, [(*row, *[""] * (len(heads) - len(row))) for row in rows], right=range(len(heads))))
    print(f"\n{seconds:.1f} s, {text.size(total / seconds)}/s")
    print(", ".join(f"{name} got {text.size(got)}" for name, got in zip(names, last, strict=True)))
