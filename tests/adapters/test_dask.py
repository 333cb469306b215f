"""DataFrames of Dask: each row once, and only the wanted columns and rows move, straight to the workers."""

from __future__ import annotations

import os
import pickle
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import dissociated as dis
from dissociated.adapters.dask import read_dissociated
from support.helpers import case, wait_until

dask = pytest.importorskip("dask", reason="Dask is not installed: make bridges")
pd = pytest.importorskip("pandas")

MIB = 1 << 20


def collected(frame: Any, scheduler: str = "sync") -> pa.Table:
    return pa.Table.from_pandas(frame.compute(scheduler=scheduler), preserve_index=False).replace_schema_metadata()


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
def test_each_row_comes_once_and_in_order(client: dis.Client, table: pa.Table, transport: str) -> None:
    frame = read_dissociated(client.dataset("rows", transport=transport), partition_bytes=MIB)
    assert frame.npartitions > 3
    assert collected(frame).equals(table)
    assert len(frame) == table.num_rows


def test_only_wanted_columns_and_rows_move(server: dis.Server, client: dis.Client, table: pa.Table) -> None:
    rows = client.dataset("rows", transport="tcp")
    before = server.status().totals.bytes
    frame = read_dissociated(rows, partition_bytes=MIB)
    assert frame.npartitions > 3
    assert server.status().totals.bytes == before  # Planning reads no bodies.
    assert frame["n"].sum().compute(scheduler="sync") == pc.sum(table["n"]).as_py()
    before += 8 * table.num_rows
    wait_until(lambda: server.status().totals.bytes == before, "the bodies of one column were sent")
    few = read_dissociated(rows, columns=["wide", "n"], filter=pc.field("n") >= 59_990, partition_bytes=MIB)
    assert collected(few).equals(table.select(["wide", "n"]).slice(59_990))
    wait_until(lambda: 1_000 < server.status().totals.bytes - before < 10_000, "the bodies of ten rows were sent")


def test_rows_count_also_without_columns(client: dis.Client, table: pa.Table) -> None:
    frame = read_dissociated(client.dataset("rows"), partition_bytes=MIB)
    assert frame.assign(one=1)["one"].sum().compute(scheduler="sync") == table.num_rows


def test_workers_read_by_themselves(server: dis.Server, client: dis.Client, table: pa.Table) -> None:
    frame = read_dissociated(client.dataset("rows", transport="tcp"), partition_bytes=2 * MIB)
    assert len(pickle.dumps(frame.optimize())) < 100_000  # of 7 MB
    seen = frame.map_partitions(
        lambda rows: pd.DataFrame({"pid": [os.getpid()], "sum": [int(rows["n"].sum())], "rows": [len(rows)]}),
        meta={"pid": "int64", "sum": "int64", "rows": "int64"},
    ).compute(scheduler="processes", num_workers=2)
    assert os.getpid() not in {*seen["pid"]}
    assert seen["rows"].sum() == table.num_rows
    assert seen["sum"].sum() == pc.sum(table["n"]).as_py()


def test_partitions_with_and_without_nulls_have_one_type(client: dis.Client, table: pa.Table) -> None:
    frame = read_dissociated(client["rows"], columns=["third"], partition_bytes=MIB)
    assert frame.npartitions > 3
    assert {str(part.compute(scheduler="sync").dtypes["third"]) for part in frame.partitions} == {"int32[pyarrow]"}
    assert frame["third"].isna().sum().compute(scheduler="sync") == table["third"].null_count


def test_the_index_of_a_published_frame_comes_as_columns(client: dis.Client) -> None:
    indices: dict[str | None, Any] = {
        "when": pd.Index([*range(1000, 1100)], name="when"),
        "__index_level_0__": pd.Index([str(n) for n in range(100)]),
        None: pd.RangeIndex(5, 105),
    }
    for name, index in indices.items():
        with case(name):
            client.put("frame", pa.Table.from_pandas(pd.DataFrame({"a": range(100)}, index=index)))
            frame = read_dissociated(client["frame"])
            assert [*frame.columns] == ["a"] + [name] * (name is not None)
            assert frame["a"].compute(scheduler="sync").tolist() == [*range(100)]
            read = frame.compute(scheduler="sync")
            assert [*read.index] == [*range(100)]
            assert name is None or [*read[name]] == [*index]


def test_an_empty_dataset_has_its_columns(client: dis.Client, table: pa.Table) -> None:
    client.put("none", table.slice(0, 0))
    assert collected(read_dissociated(client["none"])).equals(table.slice(0, 0))


def test_views_become_large_strings_and_binaries(client: dis.Client) -> None:
    table = pa.table({"s": ["a", None, "b"], "b": [b"x", b"", None], "n": [1, 2, 3]})
    views = table.cast(pa.schema([("s", pa.string_view()), ("b", pa.binary_view()), ("n", pa.int64())]))
    large = table.cast(pa.schema([("s", pa.large_string()), ("b", pa.large_binary()), ("n", pa.int64())]))
    for rows in (3, 0):
        client.put("views", views[:rows])
        frame = read_dissociated(client["views"])
        assert collected(frame).equals(large[:rows])
        assert collected(frame[["n"]]).equals(large[:rows].select(["n"]))


def test_columns_that_dask_does_not_hold_are_refused(client: dis.Client) -> None:
    union = pa.UnionArray.from_sparse(pa.array([0], pa.int8()), [pa.array([1])])
    runs = pa.RunEndEncodedArray.from_arrays(pa.array([1], pa.int32()), [1])
    within = pa.array([["a"]], pa.list_(pa.string_view()))
    client.put("others", pa.table({"n": [1], "union": union, "runs": runs, "within": within}))
    for name in ("union", "runs", "within"):
        with case(name), pytest.raises(dis.errors.OptionError, match=f"Dask does not hold .*, as of '{name}'"):
            read_dissociated(client["others"], columns=["n", name])
    assert read_dissociated(client["others"], columns=["n"]).compute(scheduler="sync")["n"].tolist() == [1]


def test_wrong_arguments_are_refused_before_any_task(client: dis.Client) -> None:
    with pytest.raises(dis.errors.ColumnNotFound, match="no column 'm'; there are n, third, wide"):
        read_dissociated(client["rows"], columns=["m"])
    with pytest.raises(dis.errors.OptionError, match="columns is a list"):
        read_dissociated(client["rows"], columns="n")
    with pytest.raises(dis.errors.ColumnNotFound):
        read_dissociated(client["rows"], filter=("m", ">", 5))
    with pytest.raises(dis.errors.OptionError, match="partition_bytes"):
        read_dissociated(client["rows"], partition_bytes=0)
