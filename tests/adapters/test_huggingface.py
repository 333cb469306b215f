"""Hugging Face datasets: each row once, in shards that workers read by themselves, or in shared memory."""

from __future__ import annotations

import os
import pickle

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import dissociated as dis
from dissociated.adapters.huggingface import to_dataset, to_iterable_dataset
from support.helpers import case, wait_until

pytest.importorskip("datasets", reason="Hugging Face datasets is not installed: make bridges")

MIB = 1 << 20


def shard_rows(shard: bytes) -> tuple[int, list[int]]:
    """In a worker: return its process id, and the rows of a shard."""
    return os.getpid(), [row["n"] for row in pickle.loads(shard)]


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
def test_each_row_comes_once_and_in_order(client: dis.Client, table: pa.Table, transport: str) -> None:
    rows = to_iterable_dataset(client.dataset("rows", transport=transport), partition_bytes=MIB)
    assert rows.num_shards > 3
    tables = [*rows.with_format("arrow").iter(batch_size=5_000)]
    assert pa.concat_tables(tables).equals(table)
    assert next(iter(rows)) == table.slice(0, 1).to_pylist()[0]
    shuffled = [row["n"] for row in rows.select_columns(["n"]).shuffle(seed=1, buffer_size=100)]
    assert shuffled != sorted(shuffled) == table["n"].to_pylist()


def test_only_wanted_columns_and_rows_move(server: dis.Server, client: dis.Client, table: pa.Table) -> None:
    rows = client.dataset("rows", transport="tcp")
    before = server.status().totals.bytes
    numbers = to_iterable_dataset(rows, columns=["n"], partition_bytes=MIB)
    assert sum(row["n"] for row in numbers) == pc.sum(table["n"]).as_py()
    before += 8 * table.num_rows
    wait_until(lambda: server.status().totals.bytes == before, "the bodies of one column were sent")
    few = to_iterable_dataset(rows, columns=["wide", "n"], filter=pc.field("n") >= 59_990, partition_bytes=MIB)
    assert [*few] == table.select(["wide", "n"]).slice(59_990).to_pylist()
    wait_until(lambda: 1_000 < server.status().totals.bytes - before < 10_000, "the bodies of ten rows were sent")


def test_a_filter_of_several_conditions_holds_in_every_shard(client: dis.Client, table: pa.Table) -> None:
    """`datasets` divides lists of the same length as the partitions between shards, and rejects other lists."""
    condition = [("n", ">=", 15_000), ("third", "=", 1), ("n", "<", 50_000)]
    expected = client["rows"].to_table(["n"], filter=condition)["n"].to_pylist()
    for partition_bytes, shards in ((MIB, 7), (3 * MIB, 3)):
        rows = to_iterable_dataset(client["rows"], columns=["n"], filter=condition, partition_bytes=partition_bytes)
        with case(shards):
            assert rows.num_shards == shards
            assert [row["n"] for row in rows] == expected
            assert sorted(row["n"] for row in rows.shuffle(seed=1)) == expected
            assert [row["n"] for index in range(shards) for row in rows.shard(shards, index)] == expected


def test_workers_read_by_themselves(client: dis.Client, table: pa.Table) -> None:
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    rows = to_iterable_dataset(client.dataset("rows", transport="tcp"), columns=["n"], partition_bytes=2 * MIB)
    shards = [pickle.dumps(rows.shard(2, index)) for index in range(2)]
    assert max(map(len, shards)) < 50_000
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        read = [*pool.map(shard_rows, shards)]
    assert os.getpid() not in {pid for pid, _ in read}
    assert [n for _, numbers in read for n in numbers] == table["n"].to_pylist()


def test_an_interrupted_epoch_goes_on(client: dis.Client, table: pa.Table) -> None:
    rows = to_iterable_dataset(client["rows"], columns=["n"], partition_bytes=MIB)
    begun = iter(rows)
    first = [next(begun)["n"] for _ in range(12_345)]
    resumed = to_iterable_dataset(client["rows"], columns=["n"], partition_bytes=MIB)
    resumed.load_state_dict(rows.state_dict())
    assert first + [row["n"] for row in resumed] == table["n"].to_pylist()


def test_a_dataset_lies_in_shared_memory(client: dis.Client, table: pa.Table) -> None:
    before = pa.total_allocated_bytes()
    rows = to_dataset(client["rows"])
    assert pa.total_allocated_bytes() - before < 100_000  # of 7 MB
    assert rows[59_999] == table.slice(59_999).to_pylist()[0]
    assert rows.data.table.equals(table)
    few = to_dataset(client["rows"], columns=["wide", "n"], filter=("n", "<", 3))
    assert few.to_list() == table.select(["wide", "n"]).slice(0, 3).to_pylist()


def test_wrong_arguments_are_refused_before_any_read(client: dis.Client) -> None:
    for make in (to_iterable_dataset, to_dataset):
        with pytest.raises(dis.errors.ColumnNotFound):
            make(client["rows"], columns=["m"])
