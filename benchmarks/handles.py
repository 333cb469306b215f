"""Benchmarks of queries over handles: DuckDB and Polars over a handle, over its Table, and over Parquet.

A node in a process of its own serves the tables of TPC-H. The engines run in this process, which has a handle on each
table. Calls take turns in each round, and all answers of an engine to one query must be equal. Then small datasets are
read again and again, and the first batch of long ones.
"""

from __future__ import annotations

import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.flight as flight
import pyarrow.parquet as pq
from examples.tpch.data import TABLES, generate

import dissociated as dis
from benchmarks.rounds import medians
from benchmarks.tpch_queries import QUERIES, SCANS
from dissociated.cli import text

_BATCH_ROWS = 122_880  # of a row group in DuckDB's own files
_SMALL_ROWS = 1_000
_LENGTHS = (10, 100_000, 1_000_000)  # batches of a stream

Ask = Callable[[str], Any]


#: The measurements, by name.
PARTS = ("duckdb", "duckdb-tpch", "polars", "polars-tpch", "small", "first")


def run(scale: float, rounds: int, parts: Sequence[str] = PARTS) -> None:
    """Measure these parts, and print the tables. Parquet's time is 1."""
    with _node() as catalog, dis.connect(catalog) as client:
        with tempfile.TemporaryDirectory(prefix="benchmark-") as scratch:
            directory = Path(scratch)
            generate(scale, directory, parts=1)
            for name in TABLES:
                table = pq.read_table(directory / name)
                table = table.cast(pa.schema([field.with_type(_plain(field.type)) for field in table.schema]))
                client.put(name, pa.Table.from_batches(table.to_batches(max_chunksize=_BATCH_ROWS), table.schema))
            handles = {name: client.dataset(name) for name in TABLES}
            for part, ways, queries in (
                ("duckdb", _duckdb_ways, SCANS),
                ("duckdb-tpch", _duckdb_ways, QUERIES),
                ("polars", _polars_ways, SCANS),
                ("polars-tpch", _polars_ways, QUERIES),
            ):
                if part in parts:
                    _compare(f"{part}, scale {scale:g}", queries, ways(handles, directory), rounds)
        if "small" in parts:
            _small(client, rounds)
        if "first" in parts:
            _first(client, rounds)


def _plain(type_: pa.DataType) -> pa.DataType:
    """Return the usual type of text in place of views, which this generator writes."""
    return pa.string() if type_ == pa.string_view() else type_


def _compare(title: str, queries: Mapping[str, str], ways: Mapping[str, Ask], rounds: int) -> None:
    ratios: dict[str, list[float]] = {way: [] for way in ways}
    rows = []
    for name, sql in queries.items():
        _check(name, {way: ask(sql) for way, ask in ways.items()})
        took = medians({way: partial(ask, sql) for way, ask in ways.items()}, rounds)
        for way, seconds in took.items():
            ratios[way].append(seconds / took["Parquet"])
        cells = (f"{seconds * 1e3:,.1f} ms ({seconds / took['Parquet']:.2f})" for seconds in took.values())
        rows.append((name, *cells))
    rows.append(("geometric mean", *(f"{geometric_mean(some):.2f}" for some in ratios.values())))
    rows.append(("worst", *(f"{max(some):.2f}" for some in ratios.values())))
    _print(title, [("", *ways), *rows])


def _check(name: str, answers: Mapping[str, Any]) -> None:
    """Raise ValueError if answers to a query differ."""
    first, *others = answers.values()
    for other in others:
        if len(first) != len(other) or not all(map(_alike, _cells(first), _cells(other))):
            raise ValueError(f"{name} has different answers: {dict(answers)}")


def _cells(rows: list[tuple[Any, ...]]) -> Iterator[Any]:
    return (cell for row in rows for cell in row)


def _alike(one: Any, other: Any) -> bool:
    return math.isclose(one, other, rel_tol=1e-9) if isinstance(one, float) else bool(one == other)


def _duckdb_ways(handles: Mapping[str, Any], directory: Path) -> dict[str, Ask]:
    ways: dict[str, Ask] = {}
    for way in ("handle", "Table", "Parquet"):
        database = duckdb.connect()
        for name, handle in handles.items():
            if way == "Parquet":
                database.execute(f"CREATE VIEW {name} AS SELECT * FROM read_parquet('{directory}/{name}/*.parquet')")
            else:
                database.register(name, handle if way == "handle" else handle.to_table())
        ways[way] = partial(_rows_of_duckdb, database)
    return ways


def _polars_ways(handles: Mapping[str, Any], directory: Path) -> dict[str, Ask]:
    frames: dict[str, Callable[[str], Any]] = {
        "handle": lambda name: handles[name].scan(),
        "Table": lambda name: pl.DataFrame(handles[name].to_table()),
        "Parquet": lambda name: pl.scan_parquet(f"{directory}/{name}/*.parquet"),
    }
    ways: dict[str, Ask] = {}
    for way, frame in frames.items():
        context = pl.SQLContext({name: frame(name) for name in handles})
        ways[way] = partial(_rows_of_polars, context)
    return ways


def _rows_of_duckdb(database: duckdb.DuckDBPyConnection, sql: str) -> Any:
    return database.execute(sql).fetchall()


def _rows_of_polars(context: Any, sql: str) -> Any:
    return context.execute(sql, eager=True).rows()


def _first_batch(client: dis.Client, name: str) -> Any:
    return client.read(name, transport="shm").read_next_batch()


def _head(client: dis.Client, name: str) -> Any:
    return client.dataset(name).head(1)


def _small(client: dis.Client, rounds: int) -> None:
    small = pa.table({f"c{n}": range(_SMALL_ROWS) for n in range(4)})
    client.put("small", small)
    handle = client.dataset("small")
    with _flight(small) as uri, flight.connect(uri) as peer:
        ticket = flight.Ticket(b"small")
        calls: dict[str, Callable[[], Any]] = {
            "Flight's DoGet": lambda: peer.do_get(ticket).read_all(),
            "client.read": lambda: client.read("small").read_all(),
            "handle.to_table": handle.to_table,
        }
        took = medians(calls, max(rounds, 50))
    least = took["Flight's DoGet"]
    rows = [(name, f"{seconds * 1e3:,.3f}", f"{seconds / least:.2f}") for name, seconds in took.items()]
    _print("1,000 rows", [("", "ms", "of DoGet"), *rows])


def _first(client: dis.Client, rounds: int) -> None:
    rows = []
    least_first = 0.0
    for length in _LENGTHS:
        name = f"long {length}"
        batch = pa.record_batch({"n": range(8), "x": [n / 2 for n in range(8)]})
        client.put(name, pa.RecordBatchReader.from_batches(batch.schema, (batch for _ in range(length))))
        took = medians(
            {
                "first batch": partial(_first_batch, client, name),
                "head(1)": partial(_head, client, name),
                "head(1) again": partial(client.dataset(name).head, 1),
            },
            rounds,
        )
        least_first = least_first or took["first batch"]
        growth = f"{took['first batch'] / least_first:.1f}"
        rows.append((f"{length:,}", *(f"{seconds * 1e3:,.2f}" for seconds in took.values()), growth))
    heads = ("batches", "first batch, ms", "head(1), ms", "head(1) again, ms", "first, of that of 10")
    _print("the first batch", [heads, *rows])


def _print(title: str, rows: Sequence[Sequence[str]]) -> None:
    print(f"{title}\n{text.table(rows[0], rows[1:])}\n", flush=True)


@contextmanager
def _flight(table: pa.Table) -> Iterator[str]:
    """Serve the table by Flight's own server in another process. Yields its URI."""
    code = """
import sys
import pyarrow as pa, pyarrow.flight as flight
class Server(flight.FlightServerBase):
    def do_get(self, context, ticket):
        return flight.RecordBatchStream(TABLE)
TABLE = pa.table({f"c{n}": range(int(sys.argv[1])) for n in range(4)})
server = Server("grpc://127.0.0.1:0")
print(server.port, flush=True)
server.serve()
"""
    process = subprocess.Popen([sys.executable, "-c", code, str(len(table))], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f"grpc://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.terminate()
        process.wait()


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
