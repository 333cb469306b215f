"""Benchmarks of queries over datasets: DuckDB and Polars over handles, over their Tables, and over Parquet.

A node in a process of its own serves the tables of TPC-H. The engines run in this process, which has a handle on each
table. Calls take turns in each round, and all answers of an engine to one query must be equal: Tables of pyarrow from
DuckDB, DataFrames from Polars. Then small datasets are
read again and again, and the first batch of long ones. At the end, all figures with a goal are printed.
"""

from __future__ import annotations

import fcntl
import math
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.flight as flight
import pyarrow.parquet as pq
from examples.tpch.data import TABLES, generate

import dissociated as dis
from benchmarks.rounds import Clock, medians
from benchmarks.tpch_queries import QUERIES, SCANS
from dissociated.cli import text

_BATCH_ROWS = 122_880  # of a row group in DuckDB's own files
_SMALL_ROWS = 1_000
_FEW_ROWS = 8
_LENGTHS = (10, 100_000, 1_000_000)  # batches of a stream
_TIMEOUT = 60.0  # seconds: the default of clients, in which a commit must end
_TICKET = flight.Ticket(b"")

Ask = Callable[[str], Any]


PARTS = ("duckdb", "duckdb-tpch", "polars", "polars-tpch", "small", "first")
#: The work of a part with queries, and the goal for its time as a fraction of Parquet's.
_GOALS = {
    "duckdb": ("DuckDB, five scans", 0.8),
    "duckdb-tpch": ("DuckDB, 22 queries of TPC-H", 0.65),
    "polars": ("Polars, five scans", 0.8),
    "polars-tpch": ("Polars, 22 queries of TPC-H", 0.8),
}


class Figure(NamedTuple):
    """A figure, and the most that it may be."""

    work: str
    value: float
    goal: float
    unit: str = ""


def run(scale: float, rounds: int, parts: Sequence[str] = PARTS, clock: Clock = time.perf_counter) -> None:
    """Measure these parts, and print the tables and the goals. Parquet's time is 1.

    Args:
        scale: Scale of TPC-H.
        rounds: Number of rounds.
        parts: Names of the parts.
        clock: Clock of the queries. The processor time of this process, with the threads of the engines, hardly depends
            on other work.
    """
    figures: list[Figure] = []
    with _node() as catalog, dis.connect(catalog, timeout=_TIMEOUT) as client:
        if not {*parts}.isdisjoint(_GOALS):
            figures += _queries(client, scale, rounds, parts, clock)
        if "small" in parts:
            figures += _small(client, rounds)
        if "first" in parts:
            figures += _first(client, rounds)
    rows = [
        (one.work, f"{one.value:.2f}{one.unit}", f"{one.goal:g}{one.unit}", "" if one.value <= one.goal else "missed")
        for one in figures
    ]
    _print("goals", [("", "measured", "at most", ""), *rows])


def _queries(client: dis.Client, scale: float, rounds: int, parts: Sequence[str], clock: Clock) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory(prefix="benchmark-") as scratch:
        directory = Path(scratch)
        generate(scale, directory, parts=1)
        for name in TABLES:
            table = pq.read_table(directory / name)
            table = table.cast(pa.schema([field.with_type(_plain(field.type)) for field in table.schema]))
            client.put(name, pa.Table.from_batches(table.to_batches(max_chunksize=_BATCH_ROWS), table.schema))
        handles = {name: client.dataset(name) for name in TABLES}
        for part in parts:
            if part not in _GOALS:
                continue
            ways = _duckdb_ways(client, handles, directory) if "duckdb" in part else _polars_ways(handles, directory)
            work, goal = _GOALS[part]
            means = _compare(f"{part}, scale {scale:g}", QUERIES if "tpch" in part else SCANS, ways, rounds, clock)
            yield from (Figure(f"{work}, {way}", mean, goal) for way, mean in means.items() if way != "Parquet")


def _plain(type_: pa.DataType) -> pa.DataType:
    """Return the usual type of text in place of views, which this generator writes."""
    return pa.string() if type_ == pa.string_view() else type_


def _compare(
    title: str, queries: Mapping[str, str], ways: Mapping[str, Ask], rounds: int, clock: Clock
) -> dict[str, float]:
    """Print the time of each query in each way. Returns the geometric mean of each way, as a fraction of Parquet's."""
    ratios: dict[str, list[float]] = {way: [] for way in ways}
    rows = []
    for name, sql in queries.items():
        _check(name, {way: ask(sql) for way, ask in ways.items()})
        took = medians({way: partial(ask, sql) for way, ask in ways.items()}, rounds, clock)
        for way, seconds in took.items():
            ratios[way].append(seconds / took["Parquet"])
        cells = (f"{seconds * 1e3:,.1f} ms ({seconds / took['Parquet']:.2f})" for seconds in took.values())
        rows.append((name, *cells))
    means = {way: geometric_mean(some) for way, some in ratios.items()}
    rows.append(("geometric mean", *(f"{mean:.2f}" for mean in means.values())))
    rows.append(("worst", *(f"{max(some):.2f}" for some in ratios.values())))
    _print(title, [("", *ways), *rows])
    return means


def _check(name: str, answers: Mapping[str, Any]) -> None:
    """Raise ValueError if answers to a query differ."""
    first, *others = answers.values()
    for other in others:
        if len(first) != len(other) or not all(map(_alike, _cells(first), _cells(other))):
            raise ValueError(f"{name} has different answers: {dict(answers)}")


def _cells(answer: pa.Table | pl.DataFrame) -> Iterator[Any]:
    """Return the values of all columns, one column after the other."""
    columns = answer.to_pydict() if isinstance(answer, pa.Table) else answer.to_dict(as_series=False)
    return chain.from_iterable(columns.values())


def _alike(one: Any, other: Any) -> bool:
    return math.isclose(one, other, rel_tol=1e-9) if isinstance(one, float) else bool(one == other)


def _duckdb_ways(client: dis.Client, handles: Mapping[str, Any], directory: Path) -> dict[str, Ask]:
    ways: dict[str, Ask] = {"client.sql": client.sql}
    for way in ("handle", "Table", "Parquet"):
        database = duckdb.connect()
        for name, handle in handles.items():
            if way == "Parquet":
                database.execute(f"CREATE VIEW {name} AS SELECT * FROM read_parquet('{directory}/{name}/*.parquet')")
            else:
                database.register(name, handle if way == "handle" else handle.to_table())
        ways[way] = partial(_ask_duckdb, database)
    return ways


def _polars_ways(handles: Mapping[str, Any], directory: Path) -> dict[str, Ask]:
    frames: dict[str, Callable[[str], Any]] = {
        "client.scan": lambda name: handles[name].scan(),
        "Table": lambda name: pl.DataFrame(handles[name].to_table()),
        "Parquet": lambda name: pl.scan_parquet(f"{directory}/{name}/*.parquet"),
    }
    ways: dict[str, Ask] = {}
    for way, frame in frames.items():
        context = pl.SQLContext({name: frame(name) for name in handles})
        ways[way] = partial(_ask_polars, context)
    return ways


def _ask_duckdb(database: duckdb.DuckDBPyConnection, sql: str) -> Any:
    return database.sql(sql).to_arrow_table()


def _ask_polars(context: Any, sql: str) -> Any:
    return context.execute(sql, eager=True)


def _first_batch(client: dis.Client, name: str) -> Any:
    return client.read(name, transport="shm").read_next_batch()


def _head(client: dis.Client, name: str) -> Any:
    return client.dataset(name).head(1)


def _small(client: dis.Client, rounds: int) -> list[Figure]:
    small = _table(1, _SMALL_ROWS)
    client.put("small", small)
    handle = client.dataset("small")
    with _flight(1, _SMALL_ROWS) as peer:
        calls: dict[str, Callable[[], Any]] = {
            "Flight's DoGet": lambda: peer.do_get(_TICKET).read_all(),
            "client.read": lambda: client.read("small").read_all(),
            "handle.to_table": handle.to_table,
        }
        took = medians(calls, max(rounds, 50))
    least = took["Flight's DoGet"]
    rows = [(name, f"{seconds * 1e3:,.3f}", f"{seconds / least:.2f}") for name, seconds in took.items()]
    _print("1,000 rows", [("", "ms", "of DoGet"), *rows])
    return [
        Figure("1,000 rows by client.read, of DoGet", took["client.read"] / least, 1),
        Figure("1,000 rows by handle.to_table() repeatedly, of DoGet", took["handle.to_table"] / least, 0.5),
    ]


def _first(client: dis.Client, rounds: int) -> Iterator[Figure]:
    rows = []
    lengths = _LENGTHS
    first_times: dict[int, float] = {}
    with _flight(lengths[0], _FEW_ROWS) as peer:
        flight_time = medians({"": lambda: peer.do_get(_TICKET).read_chunk()}, max(rounds, 20))[""]
    for length in lengths:
        name = f"long {length}"
        commit_time, first_time = _commit(client, name, length)
        took = {"commit": commit_time, "the very first batch": first_time} | medians(
            {
                "first batch": partial(_first_batch, client, name),
                "head(1)": partial(_head, client, name),
                "head(1) again": partial(client.dataset(name).head, 1),
            },
            rounds,
        )
        client.drop(name)
        first_times[length] = took["first batch"]
        growth = took["first batch"] / first_times[lengths[0]]
        rows.append((f"{length:,}", *(f"{seconds * 1e3:,.2f}" for seconds in took.values()), f"{growth:.1f}"))
        if length == lengths[0]:
            yield Figure(f"first batch of {length}, of Flight's", took["first batch"] / flight_time, 2)
            continue
        yield Figure(f"first batch of {length:,}", took["first batch"] * 1e3, 10, " ms")
        yield Figure(f"first batch of {length:,}, of that of {lengths[0]}", growth, 2)
        yield Figure(f"head(1) of {length:,} batches", took["head(1)"] * 1e3, 10, " ms")
        yield Figure(f"commit of {length:,} batches", took["commit"], _TIMEOUT, " s")
    heads = (
        "batches",
        "commit, ms",
        "the very first batch, ms",
        "first batch, ms",
        "head(1), ms",
        "head(1) again, ms",
        "first, of that of 10",
    )
    _print(f"the first batch (Flight's of 10: {flight_time * 1e3:.2f} ms)", [heads, *rows])


def _commit(client: dis.Client, name: str, length: int) -> tuple[float, float]:
    """Commit a stream of short batches that libarrow has written. Returns the seconds of the commit, and of a read."""
    descriptor = os.memfd_create(name, os.MFD_ALLOW_SEALING)
    table = _table(1, length * _FEW_ROWS)
    with open(os.dup(descriptor), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, _FEW_ROWS)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    started = time.perf_counter()
    client.commit(dis.Commit(name, [client.hand_over(descriptor)], table.schema))
    os.close(descriptor)
    committed = time.perf_counter()
    _first_batch(client, name)
    return committed - started, time.perf_counter() - committed


def _print(title: str, rows: Sequence[Sequence[str]]) -> None:
    print(f"{title}\n{text.table(rows[0], rows[1:])}\n", flush=True)


def _table(batches: int, rows: int) -> pa.Table:
    batch = pa.record_batch({f"c{number}": range(rows) for number in range(4)})
    return pa.Table.from_batches([batch] * batches)


def _serve(batches: int, rows: int, port: Connection) -> None:
    table = _table(batches, rows)

    class Server(flight.FlightServerBase):  # type: ignore[misc]  # pyarrow has no type hints
        def do_get(self, context: Any, ticket: Any) -> Any:
            return flight.RecordBatchStream(table)

    server = Server("grpc://127.0.0.1:0")
    port.send(server.port)
    server.serve()


@contextmanager
def _flight(batches: int, rows: int) -> Iterator[Any]:
    """Serve a table by Flight's own server in another process. Yields a client of it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(batches, rows, theirs), daemon=True)
    process.start()
    try:
        with flight.connect(f"grpc://127.0.0.1:{ours.recv()}") as client:
            yield client
    finally:
        process.kill()
        process.join()


@contextmanager
def _node() -> Iterator[str]:
    """Run a node in a process of its own. Yields the URI of its catalog."""
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir="/dev/shm") as directory:
        command = [sys.executable, "-m", "dissociated", "node", "--store", f"{directory}/store", "--listen", "shm:"]
        process = subprocess.Popen([*command, "--log-level", "error"], stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            yield next(line.split()[1] for line in process.stdout if line.startswith("catalog"))
        finally:
            process.terminate()
            process.wait()
