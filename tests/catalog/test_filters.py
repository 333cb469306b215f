"""Filters and limits that the server applies: the rows of a local filter, and no more bytes than they need."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import dissociated as dis
from dissociated.errors import FilterRefused, SourceError
from dissociated.node.node import Node
from dissociated.protocol.request import RowSelection, Selection
from dissociated.store.store import Store
from support.arrow_cases import ARRAYS
from support.helpers import case, open_over_flight, wait_until

ROWS, BATCH = 200_000, 20_000
TABLE = pa.Table.from_batches(
    pa.table({f"c{number}": pa.array(np.arange(ROWS) + number) for number in range(10)}).to_batches(BATCH)
)
n = pc.field("c0")


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    store = Store(tmp_path_factory.mktemp("filters") / "store")
    with Node(store, ["shm:", "tcp://127.0.0.1:0"]) as made, dis.connect(made.uri) as client:
        client.put("data", TABLE)
        yield made


@pytest.fixture(scope="module")
def client(node: Node) -> Iterator[dis.Client]:
    with dis.connect(node.uri) as made:
        yield made


def moved(client: dis.Client, read: Callable[[], Any]) -> tuple[Any, int]:
    """Return the result of `read`, and the number of body bytes that it transferred."""

    def sent() -> tuple[int, int]:
        (one,) = (one for one in client.status().datasets if one.name == "data")
        return one.bytes, one.consumers

    wait_until(lambda: sent()[1] == 0, "nobody reads")
    before, _ = sent()
    found = read()
    wait_until(lambda: sent()[1] == 0, "it has been read")
    return found, sent()[0] - before


def query(sql: str, data: Any) -> list[tuple[Any, ...]]:
    """Run a DuckDB query over `data`, which DuckDB finds among the variables of its caller."""
    return duckdb.execute(sql).fetchall()


def test_each_tool_moves_the_columns_and_rows_that_it_needs(client: dis.Client) -> None:
    data = client.dataset("data", transport="tcp")
    total = TABLE["c3"].to_numpy().sum()
    column: dict[str, Callable[[], Any]] = {
        "pyarrow": lambda: pc.sum(data.to_table(["c3"])["c3"]).as_py(),
        "pandas": lambda: data.to_pandas(["c3"])["c3"].sum(),
        "DuckDB": lambda: query("SELECT sum(c3) FROM data", data)[0][0],
        "Polars": lambda: data.scan().select(pl.col("c3").sum()).collect().item(),
        "client.scan": lambda: client.scan("data", transport="tcp").select(pl.col("c3").sum()).collect().item(),
        "scan_pyarrow_dataset": lambda: pl.scan_pyarrow_dataset(data).select(pl.col("c3").sum()).collect().item(),
        "to_polars": lambda: data.to_polars(["c3"])["c3"].sum(),
    }
    for tool, read in column.items():
        assert moved(client, read) == (total, TABLE.nbytes // 10), tool
    rows: dict[str, Callable[[], Any]] = {
        "pyarrow": lambda: data.to_table(["c3"], n >= ROWS - 2)["c3"].to_pylist(),
        "conditions": lambda: data.to_table(["c3"], ("c0", ">=", ROWS - 2))["c3"].to_pylist(),
        "DuckDB": lambda: [one for (one,) in query(f"SELECT c3 FROM data WHERE c0 >= {ROWS - 2}", data)],
        "DuckDB's IN": lambda: [
            one for (one,) in query(f"SELECT c3 FROM data WHERE c0 IN ({ROWS - 2}, {ROWS - 1})", data)
        ],
        "Polars": lambda: data.scan().filter(pl.col("c0") >= ROWS - 2).select("c3").collect()["c3"].to_list(),
        "Polars' is_in": lambda: (
            data.scan().filter(pl.col("c0").is_in([ROWS - 2, ROWS - 1])).select("c3").collect()["c3"].to_list()
        ),
        "Flight": lambda: (
            client.read("data", transport="grpc", columns=["c3"], filter=n >= ROWS - 2).read_all()["c3"].to_pylist()
        ),
        "head": lambda: data.head(2, ["c3"], n >= ROWS - 2)["c3"].to_pylist(),
    }
    for tool, read in rows.items():
        found, nbytes = moved(client, read)
        assert found == [ROWS + 1, ROWS + 2], tool
        assert nbytes <= 2 * 2 * 8, tool
    first: dict[str, Callable[[], Any]] = {
        "pyarrow": lambda: data.head(3, ["c3"])["c3"].to_pylist(),
        "Polars": lambda: data.scan().select("c3").head(3).collect()["c3"].to_list(),
    }
    for tool, read in first.items():
        assert moved(client, read) == ([3, 4, 5], 3 * 8), tool
    assert moved(client, lambda: data.count_rows(n < 5)) == (5, 0)


def test_in_shared_memory_batches_are_left_out_by_their_statistics(client: dis.Client) -> None:
    wanted = (n == 5) | (n == ROWS - 1)
    read, nbytes = moved(client, lambda: client.read("data", transport="shm", columns=["c3"], filter=wanted).read_all())
    assert read["c3"].to_pylist() == [8, ROWS + 2]
    assert nbytes == 2 * 2 * BATCH * 8  # two columns of two batches


def shown(table: pa.Table) -> list[str]:
    """Return the values of a table as text, in which NaN equals itself."""
    made = []
    for column in table.columns:
        try:
            made.append(repr(column.to_pylist()))
        except (OverflowError, ValueError):  # days outside the range of Python
            made.append(column.combine_chunks().to_string(window=100))
    return made


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
def test_every_type_passes_a_filter_as_it_was(transport: str) -> None:
    number = pc.field("number")
    with dis.Server() as server, dis.connect(server.catalog_uri) as reading:
        for name, (first, *_) in ARRAYS.items():
            table = pa.table([first, pa.array(range(len(first)), pa.int64())], [name, "number"])
            server.publish(name, table)
            read = reading.read(name, transport=transport, filter=number >= 0).read_all()
            assert shown(read) == shown(table), name
            read = reading.read(
                name, transport=transport, columns=[name], filter=(number == 0) | (number >= 3)
            ).read_all()
            read.validate(full=True)
            expected = pa.concat_tables([table[:1], table[3:]]).select([name])
            assert read.schema.equals(expected.schema), name
            assert shown(read) == shown(expected), name


def test_live_sources_and_what_servers_refuse(client: dis.Client) -> None:
    small = TABLE.select(["c0", "c1"])[: 3 * BATCH]
    with dis.Server(["shm:", "tcp://127.0.0.1:0"]) as server, dis.connect(server.catalog_uri) as reading:
        server.publish("callable", lambda: small.to_reader())
        for transport in ("tcp", "shm"):
            server.publish("shared", small.to_reader(), live=dis.Live())
            for name in ("callable", "shared"):
                read = reading.read(name, transport=transport, columns=["c1"], filter=n < 5).read_all()
                assert read == small.select(["c1"])[:5]
        server.publish("once", small.to_reader())
        assert (
            reading.read("once", transport="tcp", columns=["c1"], filter=n < 5).read_all() == small.select(["c1"])[:5]
        )
        server.publish("table", small)
        uri, ticket = server.locations("table")[1], server.ticket("table")
        for filter_ in (b"", b"\xff" * 40, bytes(20_000)):
            identifier = Selection(rows=RowSelection(filter_)).identifier(ticket)
            with pytest.raises(FilterRefused):
                dis.open_stream(uri, identifier)
        assert dis.open_stream(uri, ticket).read_all() == small


def test_a_server_may_leave_filters_to_its_clients() -> None:
    with dis.Server(choose_rows=False) as server, dis.connect(server.catalog_uri) as reading:
        server.publish("data", TABLE)
        for transport in ("tcp", "shm", "grpc"):
            assert reading.read("data", transport=transport, columns=["c3"], filter=n < 5, limit=2).read_all()[
                "c3"
            ].to_pylist() == [3, 4]
        asked = Selection(rows=RowSelection(limit=1)).identifier(server.ticket("data"))
        for uri in server.locations("data"):
            assert "filter=1" not in uri
            with pytest.raises(FilterRefused):
                dis.open_stream(uri, asked)
        with pytest.raises(FilterRefused):
            open_over_flight(reading, asked)


def test_a_server_that_does_not_say_that_it_filters_is_not_asked(client: dis.Client) -> None:
    info = client.describe("data")
    (endpoint,) = info.endpoints
    for gone in ("&filter=1", "&request=1"):
        old = replace(endpoint, locations=tuple(one.replace(gone, "") for one in endpoint.locations))
        for transport in ("shm", "tcp", "grpc"):
            read = client.read_endpoint(
                info, old, transport=transport, columns=["c3"], filter=n < 5, limit=3
            ).read_all()
            assert read["c3"].to_pylist() == [3, 4, 5]


def test_tickets_for_some_columns_filter_by_no_others(tmp_path: Path) -> None:
    with dis.Server(["tcp://127.0.0.1:0"], secret=bytes(32), ticket_lifetime=60) as server:
        server.publish("data", TABLE)
        (uri,), ticket = server.locations("data"), server.ticket("data", columns=["c3", "c4"])
        with dis.connect(server.catalog_uri) as client:
            info = client.describe("data")
            (endpoint,) = info.endpoints
        narrow = replace(endpoint, ticket=ticket)
        some = replace(info, schema=TABLE.select(["c3", "c4"]).schema)
        with dis.connect(server.catalog_uri) as client:
            read = client.read_endpoint(
                some, narrow, transport="tcp", columns=["c4"], filter=pc.field("c3") < 5
            ).read_all()
            assert read["c4"].to_pylist() == [4, 5]
            with pytest.raises(dis.DissociatedError):
                client.read_endpoint(info, narrow, transport="tcp", columns=["c4"], filter=n < 5).read_all()
        assert dis.open_stream(uri, ticket).read_all() == TABLE.select(["c3", "c4"])


def test_files_that_are_replaced_are_not_read_as_what_was_published(tmp_path: Path) -> None:
    """The new files have the same size, uncompressed, and other values, another order of columns, or fewer columns."""
    (tmp_path / "directory" / "k=1").mkdir(parents=True)
    files = [tmp_path / "file.parquet", tmp_path / "directory" / "k=1" / "1.parquet"]
    published = {"a": [1, 2, 9], "b": [9, 1, 1], "c": [100, 200, 300]}
    replacements: list[dict[str, list[int]]] = [
        {"a": [8, 7, 1], "b": [9, 1, 1], "c": [400, 500, 600]},
        {"b": [9, 1, 1], "a": [1, 2, 9], "c": [100, 200, 300]},
        {"a": [1, 2, 9]},
    ]

    def write(columns: dict[str, list[int]], seconds: int) -> None:
        for file in files:
            pq.write_table(pa.table(columns), file, compression="none", use_dictionary=False)
            os.utime(file, (seconds, seconds))  # the timestamps of file systems are coarse

    write(published, 0)
    with dis.Server(["tcp://127.0.0.1:0"]) as server, dis.connect(server.catalog_uri) as client:
        server.publish("file", files[0])
        server.publish("directory", tmp_path / "directory")

        def read(name: str) -> list[int]:
            return client.read(name, columns=["c"], filter=pc.field("a") > 5).read_all()["c"].to_pylist()

        for seconds, columns in enumerate(replacements, 1):
            for name in ("file", "directory"):
                with case((name, columns)):
                    write(published, 0)
                    assert read(name) == [300]
                    write(columns, seconds)
                    with pytest.raises(SourceError, match="was modified after it was published"):
                        read(name)


def test_polars_gets_what_it_would_filter_itself() -> None:
    """The client sends every part of a predicate that can be expressed as conditions."""
    nan = float("nan")
    table = pa.table(
        {
            "f": [1.0, None, nan, -0.0, 5.0],
            "s": ["a", "b", None, "c", "a"],
            "i": pa.array([1, 2, 3, None, 5], pa.int16()),
            "t": pa.array([0, 1, 2, 3, None], pa.timestamp("us", "UTC")),
            "d": pa.array([0, 1, None, 3, 4], pa.date32()),
            "r": pa.array([0.1, 0.2, nan, None, 1.0], pa.float32()),
        }
    )
    f, s, i, t, d, r = map(pl.col, table.column_names)
    with dis.Server() as server, dis.connect(server.catalog_uri) as client:
        server.publish("data", table)
        here = pl.DataFrame(table)
        for transport in ("shm", "tcp"):
            lazy = client.scan("data", transport=transport)
            predicates = (
                f > 0,
                f >= nan,
                f == 0.0,
                (f < 3) & (s == "a"),
                (i > 1) | (s == "c"),
                i > 2,
                i.is_between(2, 4),
                i.is_in([1, 5]) & (i != 5),
                f.is_null() | s.is_not_null(),
                s.is_not_null() & ~(i == 2),
                t > pl.lit(1).cast(pl.Datetime("us", "UTC")),
                d >= pl.lit(1).cast(pl.Date),
                (d < pl.lit(10_000_000).cast(pl.Date)) & (i > 1),  # beyond the years of Python, as the next three
                t > pl.lit(-(1 << 60)).cast(pl.Datetime("us", "UTC")),
                d.is_between(pl.lit(-10_000_000).cast(pl.Date), pl.lit(2).cast(pl.Date)),
                d.is_in(pl.Series([10_000_000, 3]).cast(pl.Date)),
                s.str.starts_with("a"),
                (i + 1 > 3) & f.is_nan(),
                r <= 0.1,
                (r == 0.2) | (r > pl.lit(1.0, pl.Float64)),
                r == 0.2,
                r.is_between(0.1, 0.2),
            )
            for predicate, columns in zip(predicates, cycle((["s"], ["f", "i"], table.column_names)), strict=False):
                expected = here.lazy().filter(predicate).select(columns).collect()
                assert lazy.filter(predicate).select(columns).collect().equals(expected), predicate
                assert lazy.filter(predicate).select(columns).head(1).collect().equals(expected.head(1)), predicate
            assert lazy.select(pl.len()).collect().item() == 5
            assert lazy.collect().equals(here)
