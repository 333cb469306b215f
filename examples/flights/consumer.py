"""The consumer: a process without Spark that finds the flights through Arrow Flight and opens them.

python -m examples.flights.consumer --catalog URI --expect spark.json --report consumer.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.flight

import dissociated as dis
from examples.flights import checksums
from examples.flights.narrate import done, fail

EXPECTED = (dis.DissociatedError, pa.ArrowException, duckdb.Error, pl.exceptions.PolarsError)


class Timing(NamedTuple):
    """The cost of a way to read the data: medians, in seconds."""

    rows: int
    nbytes: int
    opened: float  # from the request until there is a Table
    touched: float  # from the request until every byte of the Table has been read once, too


def verify(table: pa.Table, expected: dict[str, Any], transport: str) -> None:
    """Compare a table with Spark's report. End the program at the first difference."""

    def equal(what: str, here: object, spark: object) -> None:
        if here != spark:
            fail(f"over {transport}, {what} is {here}, but Spark says {spark}")

    equal("the number of rows", table.num_rows, expected["rows"])
    equal("the schema", [[f.name, str(f.type), f.nullable] for f in table.schema], expected["schema"])
    for name in table.column_names:
        equal(f"the number of nulls in {name}", table[name].null_count, expected["nulls"][name])
        equal(f"the checksum of {name}", checksums.in_arrow(table[name]), expected["checksums"][name])


def ask_duckdb(reader: pa.RecordBatchReader) -> str:
    """Ask DuckDB how much later flights leave when visibility is low, and return a sentence with the answer."""
    with duckdb.connect() as database:
        late = database.from_arrow(reader).aggregate(
            "avg(dep_delay) FILTER (visib < 2) AS murky, avg(dep_delay) FILTER (visib >= 10) AS clear"
        )
        murky, clear = late.fetchall()[0]
    return f"visibility below 2 miles: {murky:.0f} minutes late; clear: {clear:.0f}"


def ask_polars(reader: pa.RecordBatchReader) -> str:
    """Ask Polars how late an aircraft leaves after it arrived late, and return a sentence with the answer."""
    flights = pl.DataFrame(reader).lazy().filter(pl.col("plane_last_delay") > 60)
    answer = flights.select(pl.len().alias("flights"), pl.col("dep_delay").mean().alias("delay")).collect()
    return f"after coming in over an hour late: {answer['delay'][0]:.0f} minutes late again"


def measure(open_reader: Callable[[], pa.RecordBatchReader], times: int) -> Timing:
    """Time a way to read the data, several times. The data are freed after each reading."""
    opened, touched = [], []
    for _ in range(times):
        start = time.perf_counter()
        table = open_reader().read_all()
        opened.append(time.perf_counter() - start)
        touch(table)
        touched.append(time.perf_counter() - start)
        rows, nbytes = table.num_rows, table.nbytes
        del table
    return Timing(rows, nbytes, statistics.median(opened), statistics.median(touched))


def touch(table: pa.Table) -> None:
    """Read every byte of a table once, at the speed of memory."""
    for column in table.columns:
        for chunk in column.chunks:
            for buffer in filter(None, chunk.buffers()):
                np.bitwise_or.reduce(np.frombuffer(buffer, np.uint64, buffer.size // 8))


def do_get(catalog: pyarrow.flight.FlightClient, name: str) -> pa.RecordBatchReader:
    """Read the dataset with pyarrow's own Flight client: batches over gRPC."""
    info = catalog.get_flight_info(pyarrow.flight.FlightDescriptor.for_path(name))
    return catalog.do_get(info.endpoints[0].ticket).to_reader()


def run(catalog: str, name: str, transports: Sequence[str], expected: dict[str, Any], times: int) -> dict[str, Timing]:
    """Find the dataset, compare it with Spark's report, query it, and time every way to read it."""
    start = time.perf_counter()
    with dis.connect(catalog) as client, pyarrow.flight.connect(catalog) as flight:
        client.describe(name)
        done("found", f"{name!r} in the catalog, through Arrow Flight", start)
        for transport in transports:
            start = time.perf_counter()
            verify(client.read(name, transport=transport).read_all(), expected, transport)
            columns = len(expected["checksums"])
            done("check", f"{transport}: count, schema, nulls, {columns} checksums equal Spark's", start)
        start = time.perf_counter()
        done("duckdb", ask_duckdb(client.read(name, transport="shm")), start)
        start = time.perf_counter()
        done("polars", ask_polars(client.read(name, transport="shm")), start)

        start = time.perf_counter()
        ways: dict[str, Callable[[], pa.RecordBatchReader]] = {
            transport: partial(client.read, name, transport=transport) for transport in transports
        }
        ways["Flight DoGet"] = lambda: do_get(flight, name)
        timings = {way: measure(open_reader, times) for way, open_reader in ways.items()}
        done("measure", f"{', '.join(ways)}: {times} times each", start)
    return timings


def main() -> None:
    parser = argparse.ArgumentParser(description="Find the table of flights, check it, query it, time it.")
    parser.add_argument("--catalog", required=True, help="URI of the catalog to look in")
    parser.add_argument("--name", default="flights", help="what the dataset is called")
    parser.add_argument("--expect", type=Path, required=True, help="the pipeline's report, as JSON")
    parser.add_argument("--report", type=Path, required=True, help="where to write the timings, as JSON")
    parser.add_argument("--transports", nargs="+", default=["shm", "tcp"], help="ways to read it")
    parser.add_argument("--times", type=int, default=7, help="how often to time each way")
    arguments = parser.parse_args()
    try:
        expected = json.loads(arguments.expect.read_text())
        timings = run(arguments.catalog, arguments.name, arguments.transports, expected, arguments.times)
    except (*EXPECTED, OSError) as error:
        fail(str(error))
    report = {way: timing._asdict() for way, timing in timings.items()}
    arguments.report.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
