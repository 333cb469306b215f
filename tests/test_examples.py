"""A consumer of the TPC-H demo, without Spark: DuckDB publishes its datasets. spark/test_programs.py runs the demo."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import date
from decimal import Decimal
from subprocess import PIPE

import pyarrow as pa
import pytest

import dissociated as dis
from support.pages import ROOT
from support.processes import Fork

pytest.importorskip("duckdb", reason="the demo's packages are not installed")
pytest.importorskip("polars", reason="the demo's packages are not installed")

from examples.tpch.queries import QUERIES

#: The columns of lineitem that Q1 and Q6 use.
LINEITEM = pa.table(
    {
        **{
            name: pa.array([Decimal(value)] * 3, pa.decimal128(15, 2))
            for name, value in (
                ("l_quantity", "17.00"),
                ("l_extendedprice", "24710.35"),
                ("l_discount", "0.06"),
                ("l_tax", "0.02"),
            )
        },
        "l_returnflag": ["N", "N", "R"],
        "l_linestatus": ["O"] * 3,
        "l_shipdate": [date(1994, 3, 13)] * 3,
    }
)


@pytest.fixture
def server() -> Iterator[dis.Server]:
    import duckdb

    with dis.Server(["shm:"]) as server, duckdb.connect() as database:
        server.publish("lineitem", LINEITEM)
        database.register("lineitem", LINEITEM)
        for name in ("q1", "q6"):
            server.publish(name, database.sql(QUERIES[name]).to_arrow_table())
        yield server


def consume(consumer: str, server: dis.Server) -> tuple[int, list[dict[str, object]]]:
    command = ("-m", "examples.tpch.consumers", consumer, "--catalog", server.catalog_uri)
    with Fork(*command, cwd=ROOT, stdout=PIPE) as run:
        output = run.communicate(timeout=100)[0]
    return run.returncode, [json.loads(line) for line in output.splitlines()]


def test_a_wrong_answer_is_found_and_said(forks: None, server: dis.Server) -> None:
    server.publish("q6", pa.table({"revenue": [Decimal("1.0000")]}))
    status, told = consume("duckdb", server)
    assert status == 1
    assert str(told[-1]["failed"]).startswith("revenue of q6 is ")
