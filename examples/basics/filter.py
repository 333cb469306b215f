"""Read only some columns and rows of what `publish` serves, with pyarrow, Polars and DuckDB."""

import duckdb
import polars as pl
import pyarrow.compute as pc

import dissociated as dis

with dis.connect() as client:
    flights = client.dataset("flights")
    late = flights.to_table(columns=["dest", "delay"], filter=pc.field("delay") > 60)
    print(late.to_pylist())
    print(flights.filter(("origin", "in", ["JFK", "LGA"])).count_rows())
    lazy = client.scan("flights").filter(pl.col("delay") > 60).select(pl.col("delay").mean())
    print(lazy.collect().item())
    print(duckdb.execute("SELECT origin, count(*) FROM flights GROUP BY origin ORDER BY origin").fetchall())
