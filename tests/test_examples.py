"""The TPC-H demo, and one of its consumers without Spark. DuckDB publishes its datasets instead of Spark."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from datetime import date
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pytest

import dissociated as dis
from spark.archive import environment_for_plans

pytest.importorskip("duckdb", reason="the demo's packages are not installed")
pytest.importorskip("polars", reason="the demo's packages are not installed")

from examples.tpch.data import generator
from examples.tpch.queries import QUERIES

ROOT = Path(__file__).resolve().parents[1]


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
    command = [sys.executable, "-m", "examples.tpch.consumers", *consumer.split(), "--catalog", server.catalog_uri]
    run = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=100)
    return run.returncode, [json.loads(line) for line in run.stdout.splitlines()]


def test_a_wrong_answer_is_found_and_said(server: dis.Server) -> None:
    server.publish("q6", pa.table({"revenue": [Decimal("1.0000")]}))
    status, told = consume("duckdb", server)
    assert status == 1
    assert str(told[-1]["failed"]).startswith("revenue of q6 is ")


@pytest.mark.needs("ucx", "libfabric", "java")
@pytest.mark.timeout(400)
def test_the_demo_runs_over_ucx_and_libfabric(tmp_path: Path) -> None:
    """Run Spark with its defaults for plans, which other tests go without."""
    if generator() is None:
        pytest.skip("tpchgen-cli is not installed")
    transports = ["--transport", "ucx", "--transport", "fabric"]
    plot = str(tmp_path / "tpch.png")
    command = [
        sys.executable,
        "-m",
        "examples.tpch",
        *("--scale", "0.001", "--query", "q3"),
        *transports,
        "--device",
        "test:0",
        "--plot",
        plot,
    ]
    done = subprocess.run(command, cwd=ROOT, env=environment_for_plans(), capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    for transport in ("ucx", "fabric"):
        assert f"copy over {transport}" in done.stdout or f"  {transport} " in done.stdout
