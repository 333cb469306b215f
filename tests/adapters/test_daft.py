"""DataFrames of Daft: each row once, and only the wanted columns and rows move."""

from __future__ import annotations

import os

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import dissociated as dis
from dissociated.adapters.daft import read_dissociated
from support.helpers import case, wait_until

os.environ["DAFT_ANALYTICS_ENABLED"] = "0"
daft = pytest.importorskip("daft", reason="Daft is not installed: make bridges")

MIB = 1 << 20


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
def test_each_row_comes_once_and_in_order(client: dis.Client, table: pa.Table, transport: str) -> None:
    frame = read_dissociated(client.dataset("rows", transport=transport), partition_bytes=MIB)
    assert frame.num_partitions() > 3
    assert frame.to_arrow().cast(table.schema).equals(table)  # Daft has long strings only
    assert frame.count_rows() == table.num_rows


def test_only_wanted_columns_and_rows_move(server: dis.Server, client: dis.Client, table: pa.Table) -> None:
    rows = client.dataset("rows", transport="tcp")
    before = server.status().totals.bytes
    frame = read_dissociated(rows, partition_bytes=MIB)
    assert server.status().totals.bytes == before  # Planning reads no bodies.
    assert frame.sum("n").to_pydict() == {"n": [pc.sum(table["n"]).as_py()]}
    before += 8 * table.num_rows
    wait_until(lambda: server.status().totals.bytes == before, "the bodies of one column were sent")
    few = read_dissociated(rows, columns=["wide", "n"], filter=pc.field("n") >= 59_990, partition_bytes=MIB)
    wanted = table.select(["wide", "n"]).slice(59_990)
    assert few.to_arrow().cast(wanted.schema).equals(wanted)
    wait_until(lambda: 1_000 < server.status().totals.bytes - before < 10_000, "the bodies of ten rows were sent")
    assert frame.select(daft.lit(1)).count_rows() == table.num_rows
    wait_until(lambda: 4 <= (server.status().totals.bytes - before) / table.num_rows < 5, "those of third were sent")


def test_a_filter_of_daft_may_use_a_column_that_the_result_lacks(client: dis.Client, table: pa.Table) -> None:
    frame = read_dissociated(client["rows"], partition_bytes=MIB)
    last = frame.where(daft.col("n") >= 59_990).select("wide")
    assert last.to_pydict() == table.select(["wide"]).slice(59_990).to_pydict()
    assert frame.where(daft.col("third").is_null()).count_rows() == table["third"].null_count


def test_rows_without_a_column_of_the_dataset_are_all_there(client: dis.Client) -> None:
    client.put("texts", pa.table({"text": ["a"] * 5, "n": range(5), "small": pa.array(range(5), pa.int8())}))
    frame = read_dissociated(client["texts"], filter=pc.field("n") > 1, partition_bytes=1)
    ones = frame.select(daft.lit(1).alias("one"))
    assert ones.to_pydict() == {"one": [1, 1, 1]}
    assert ones.join(frame.select(daft.lit(1).alias("one"), "n"), on="one").count_rows() == 9
    assert frame.where(daft.col("n") > 2).select(daft.lit(1)).count_rows() == 2
    assert frame.count_rows() == 3


def test_a_filter_of_daft_may_use_a_field_of_a_struct(client: dis.Client) -> None:
    client.put("nested", pa.table({"point": [{"x": 1}, None, {"x": 3}], "n": [1, 2, 3]}))
    frame = read_dissociated(client["nested"])
    assert frame.where(daft.col("point")["x"] > 1).select("n").to_pydict() == {"n": [3]}


def test_dictionaries_and_views_become_plain_columns(client: dis.Client) -> None:
    values = ["a", None, "b", "a"]
    columns = {"d": pa.array(values).dictionary_encode(), "v": pa.array(values, pa.string_view())}
    client.put("coded", pa.table(columns))
    counted = read_dissociated(client["coded"]).groupby("d").agg(daft.col("v").count()).sort("d").to_pydict()
    assert counted == {"d": ["a", "b", None], "v": [2, 1, 0]}


def test_a_column_that_daft_does_not_hold_is_refused(client: dis.Client) -> None:
    held = {"n": [1, 2], "points": [[{"x": 1}], None]}
    views = pa.array(["a view of more than twelve bytes"], pa.string_view())
    refused = {
        "coded": pa.DictionaryArray.from_arrays(pa.array([0, None], pa.int8()), views),
        "empty": pa.array([{}, None], pa.struct([])),
        "halves": pa.array([[1.5], None], pa.list_(pa.float16())),
        "id": pa.array([b"0123456789abcdef", None], pa.uuid()),
        "views": pa.array([["a"], None], pa.list_(pa.string_view())),
        "words": pa.StructArray.from_arrays([pa.array(["a", None]).dictionary_encode()], ["word"]),
    }
    client.put("odd", pa.table({**held, **refused}))
    for name in refused:
        with case(name), pytest.raises(dis.errors.OptionError, match=f"as of '{name}'"):
            read_dissociated(client["odd"], columns=["n", name])
    assert read_dissociated(client["odd"], columns=["n", "points"]).to_pydict() == held
    client.put("twins", pa.table([[1], [2]], ["a", "a"]))
    with pytest.raises(dis.errors.OptionError, match="two columns of one name, such as 'a'"):
        read_dissociated(client["twins"])


def test_an_empty_dataset_has_its_columns(client: dis.Client, table: pa.Table) -> None:
    client.put("none", table.slice(0, 0))
    assert read_dissociated(client["none"]).to_pydict() == {"n": [], "third": [], "wide": []}


def test_wrong_arguments_are_refused_before_any_task(client: dis.Client) -> None:
    with pytest.raises(dis.errors.ColumnNotFound, match="no column 'm'; there are n, third, wide"):
        read_dissociated(client["rows"], columns=["m"])
    with pytest.raises(dis.errors.ColumnNotFound):
        read_dissociated(client["rows"], filter=("m", ">", 5))
    with pytest.raises(dis.errors.OptionError, match="no column is selected"):
        read_dissociated(client["rows"], columns=[])
