"""Datasets of Ray Data: each row once, and only the wanted columns and rows move, straight to Ray's workers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import dissociated as dis
from dissociated.adapters.ray import read_dissociated, write_dissociated
from dissociated.node.node import Node
from dissociated.store.store import Store
from support.helpers import wait_until

ray = pytest.importorskip("ray", reason="Ray is not installed: make bridges")
pytest.importorskip("ray.data")
pytestmark = pytest.mark.filterwarnings("default")

MIB = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


def rows_of(read: Any) -> list[dict[str, Any]]:
    return sorted(read.take_all(), key=lambda row: int(row["n"]))


def test_workers_read_each_row_once(server: dis.Server, client: dis.Client, table: pa.Table) -> None:
    rows = read_dissociated(
        client.dataset("rows", transport="tcp"),
        partition_bytes=2 * MIB,
        label_selector={"ray.io/node-id": ray.get_runtime_context().get_node_id()},
        fallback_strategy=[{"label_selector": {}}],
    )
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


@pytest.fixture
def node(tmp_path: Path) -> Iterator[dis.Client]:
    """Yield a client of a node with an empty store."""
    with Node(Store(tmp_path / "store"), ["tcp://127.0.0.1:0"]) as node, dis.connect(node.uri) as client:
        yield client


def test_tasks_write_their_rows_and_all_appear_at_once(node: dis.Client, table: pa.Table) -> None:
    rows = ray.data.from_arrow([table.slice(at, 15_000) for at in range(0, table.num_rows, 15_000)])
    write_dissociated(rows, node, "rows", tags={"from": "ray"})
    info = node.describe("rows")
    assert (info.rows, info.version, info.tags) == (table.num_rows, 1, {"from": "ray"})
    assert node.read("rows").read_all().sort_by("n").equals(table)
    write_dissociated(rows.limit(10), node, "rows", mode="append")
    assert node.describe("rows").rows == table.num_rows + 10


def test_a_failed_write_changes_nothing(node: dis.Client, table: pa.Table, tmp_path: Path) -> None:
    node.put("rows", table)

    def fail(batch: Any) -> Any:
        if 59_999 in batch["n"]:
            raise ValueError("the last row is bad")
        return batch

    with pytest.raises(Exception, match="the last row is bad"):
        write_dissociated(ray.data.from_arrow([table.slice(0, 100), table]).map_batches(fail), node, "rows")
    different = ray.data.from_arrow([pa.table({"n": [1]}), pa.table({"n": ["text"]})])
    with pytest.raises(dis.errors.OptionError, match="schema="):
        write_dissociated(different, node, "rows", concurrency=1)
    assert node.describe("rows").version == 1
    wait_until(lambda: not [*(tmp_path / "store").rglob("*-0*.arrows")], "the segments of failed writes are removed")


def test_blocks_are_cast_to_the_schema(node: dis.Client) -> None:
    schema = pa.schema({"n": pa.int64(), "s": pa.string()})
    blocks = [pa.table({"s": ["a"], "n": pa.array([1], pa.int8())}), pa.table({"s": pa.nulls(1), "n": [2]})]
    write_dissociated(ray.data.from_arrow(blocks), node, "cast", schema=schema)
    read = node.read("cast").read_all()
    assert read.schema.equals(schema)
    assert read.sort_by("n").to_pydict() == {"n": [1, 2], "s": ["a", None]}
    write_dissociated(ray.data.from_arrow(blocks[0].slice(0, 0)), node, "none", schema=schema)
    assert node.read("none").read_all().equals(schema.empty_table())
