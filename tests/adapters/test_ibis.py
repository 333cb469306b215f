"""Handles as tables of ibis, which scans them by DuckDB: only the wanted columns and rows move."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import dissociated as dis
from support.helpers import wait_until

ibis = pytest.importorskip("ibis", reason="ibis is not installed: make bridges")


def test_only_wanted_columns_and_rows_move(server: dis.Server, client: dis.Client, table: pa.Table) -> None:
    rows = client.dataset("rows", transport="tcp")
    before = server.status().totals.bytes
    seen = ibis.memtable(rows)
    assert seen.schema().names == ("n", "third", "wide")
    assert seen.n.sum().execute() == pc.sum(table["n"]).as_py()
    before += 8 * table.num_rows
    wait_until(lambda: server.status().totals.bytes == before, "the bodies of one column were sent")
    few = seen.filter(seen.n >= 59_990).select("wide", "n").order_by("n")
    assert few.to_pyarrow().to_pylist() == table.select(["wide", "n"]).slice(59_990).to_pylist()
    wait_until(lambda: 1_000 < server.status().totals.bytes - before < 10_000, "the bodies of ten rows were sent")


def test_each_row_comes_once(client: dis.Client, table: pa.Table) -> None:
    with client["rows"] as handle:  # ibis keeps the handle, so leaving the block gives back its memory
        rows = ibis.memtable(handle)
        assert rows.order_by("n").to_pyarrow().equals(table)
        assert rows.third.count().execute() == table.num_rows - table["third"].null_count
