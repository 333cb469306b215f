"""Datasets of Ray Data: each row once, and only the wanted columns and rows move, straight to Ray's workers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import dissociated as dis
from dissociated.adapters.ray import read_dissociated
from support.helpers import wait_until

ray = pytest.importorskip("ray", reason="Ray is not installed: make bridges")
pytest.importorskip("ray.data")
pytestmark = pytest.mark.filterwarnings("default")

MIB = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


def rows_of(read: Any) -> list[dict[str, Any]]:
    return sorted(read.take_all(), key=lambda row: int(row["n"]))


def test_workers_read_each_row_once(server: dis.Server, client: dis.Client, table: pa.Table) -> None:
    rows = read_dissociated(client.dataset("rows", transport="tcp"), partition_bytes=2 * MIB)
    seen = rows.map_batches(
        lambda batch: {"pid": [os.getpid()], "sum": [int(batch["n"].sum())], "rows": [len(batch["n"])]},
        batch_size=None,
    ).take_all()
    assert os.getpid() not in {row["pid"] for row in seen}
    assert sum(row["rows"] for row in seen) == table.num_rows == rows.count()
    assert sum(row["sum"] for row in seen) == pc.sum(table["n"]).as_py()


def test_only_wanted_columns_and_rows_move(server: dis.Server, client: dis.Client, table: pa.Table) -> None:
    rows = client.dataset("rows", transport="tcp")
    before = server.status().totals.bytes
    numbers = read_dissociated(rows, columns=["n"], partition_bytes=2 * MIB)
    assert numbers.sum("n") == pc.sum(table["n"]).as_py()
    before += 8 * table.num_rows
    wait_until(lambda: server.status().totals.bytes == before, "the bodies of one column were sent")
    few = read_dissociated(rows, columns=["wide", "n"], filter=pc.field("n") >= 59_990, partition_bytes=2 * MIB)
    assert rows_of(few) == table.select(["wide", "n"]).slice(59_990).to_pylist()
    wait_until(lambda: 1_000 < server.status().totals.bytes - before < 10_000, "the bodies of ten rows were sent")


def test_wrong_arguments_are_refused_before_any_task(client: dis.Client) -> None:
    with pytest.raises(dis.errors.ColumnNotFound):
        read_dissociated(client["rows"], columns=["m"])
