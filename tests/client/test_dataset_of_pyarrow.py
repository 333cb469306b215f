"""A handle where a pyarrow.dataset.Dataset is expected."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pytest

import dissociated as dis
from dissociated.client.dataset import DatasetHandle
from dissociated.errors import ColumnNotFound, OptionError

TABLE = pa.table({"n": [3, 1, 2, 1], "s": ["c", "a", "b", "d"]})
OTHER = pa.table({"n": [1, 2], "v": [10, 20]})


@pytest.fixture(scope="module")
def client() -> Iterator[dis.Client]:
    with dis.Server(["shm:", "tcp://127.0.0.1:0"]) as server, dis.connect(server.catalog_uri) as client:
        server.publish("d", TABLE)
        server.publish("other", OTHER)
        yield client


@pytest.fixture(params=["shm", "tcp"])
def handle(client: dis.Client, request: pytest.FixtureRequest) -> DatasetHandle:
    return client.dataset("d", transport=request.param)


def test_filters_add_up_and_apply_to_each_way_of_reading(handle: DatasetHandle) -> None:
    plain = ds.dataset(TABLE)
    small, expected = handle.filter(("n", "<", 3)), plain.filter(pc.field("n") < 3)
    assert isinstance(small, ds.Dataset)
    assert small.to_table() == expected.to_table()
    assert small.filter(pc.field("s") > "a").to_table() == expected.filter(pc.field("s") > "a").to_table()
    assert small.to_table(columns=["s"], filter=pc.field("n") == 1)["s"].to_pylist() == ["a", "d"]
    assert small.count_rows() == 3
    assert small.head(2) == expected.head(2)
    assert small.take([2]) == expected.take([2])
    assert pa.table(small) == expected.to_table()
    assert pa.Table.from_batches(small.to_batches(), TABLE.schema) == expected.to_table()
    assert small.to_pandas()["n"].to_list() == pl.DataFrame(small)["n"].to_list() == [1, 2, 1]
    assert duckdb.execute("SELECT sum(n) FROM small WHERE s > 'a'").fetchall() == [(3,)]
    assert pl.scan_pyarrow_dataset(small).filter(pl.col("n") > 1).collect()["s"].to_list() == ["b"]
    assert pickle.loads(pickle.dumps(small)).to_table() == expected.to_table()
    assert handle.count_rows() == 4


def test_other_columns_are_refused_at_once(handle: DatasetHandle) -> None:
    for missing in (("nn", ">", 1), pc.field("nn") > 1, (pc.field("s") == "a") | (pc.field("nn") > 1)):
        with pytest.raises(ColumnNotFound, match=r"'nn' to filter by \(did you mean 'n'\?\); there are n, s"):
            handle.filter(missing)
    with pytest.raises(ColumnNotFound, match=r"'nn' \(did you mean 'n'\?\); there are n, s"):
        handle.to_table({"double": pc.multiply(pc.field("nn"), 2)})
    with pytest.raises(ColumnNotFound, match=r"'nn' to sort by \(did you mean 'n'\?\)"):
        handle.sort_by([("s", "ascending"), ("nn", "descending")])
    with pytest.raises(ColumnNotFound, match="'nn' on the left side of the join"):
        handle.join(OTHER, "nn")
    with pytest.raises(ColumnNotFound, match="'nn' on the right side of the join"):
        handle.join(OTHER, "n", "nn")
    with pytest.raises(ColumnNotFound, match="'nn' on the left side of the join"):
        handle.join_asof(OTHER, "nn", [], 0)
    with pytest.raises(ColumnNotFound, match="'s' on the right side of the join"):
        handle.join_asof(OTHER, "n", "s", 0)


def test_positions_and_keys_that_do_not_suit_the_rows_are_refused(handle: DatasetHandle) -> None:
    for outside in (99, -1):
        with pytest.raises(OptionError, match=f"there is no row {outside}: the selection has 4 rows, counted from 0"):
            handle.take([0, outside])
    with pytest.raises(OptionError, match=r"the positions of rows are whole numbers, not \['n'\]"):
        handle.take(["n"])
    with pytest.raises(OptionError, match=r"cannot be joined: Incompatible data types .* int64 and .* string"):
        handle.join(TABLE, "n", "s")
    with pytest.raises(OptionError, match=r"cannot be joined: Columns {'s'} present in both tables"):
        handle.join_asof(TABLE, "n", [], 0)


def test_a_filtered_dataset_is_published_without_the_other_rows(client: dis.Client, handle: DatasetHandle) -> None:
    assert client.put("ones", handle.filter(("n", "=", 1))) == 2
    assert client.read("ones").read_all()["s"].to_pylist() == ["a", "d"]


def test_methods_that_need_all_rows(client: dis.Client, handle: DatasetHandle) -> None:
    plain, other = ds.dataset(TABLE), client.dataset("other")
    by = [("n", "ascending"), ("s", "descending")]
    assert handle.sort_by(by).to_table() == plain.sort_by(by).to_table()
    joined = handle.join(other, "n", join_type="inner").sort_by("s").to_table()
    assert joined == plain.join(ds.dataset(OTHER), "n", join_type="inner").sort_by("s").to_table()
    asof = handle.sort_by("n").join_asof(ds.dataset(OTHER), on="n", by=[], tolerance=0).to_table()
    assert asof["v"].to_pylist() == [10, 10, 20, None]
    both = ds.dataset([handle, handle])
    assert both.to_table() == pa.concat_tables([TABLE, TABLE])
    assert both.count_rows(filter=pc.field("n") == 1) == 4
    schema = pa.schema([("s", pa.string()), ("new", pa.int8())])
    assert handle.replace_schema(schema).to_table() == plain.replace_schema(schema).to_table()
    with pytest.raises(OptionError, match=r"to_table\(\)\.cast\(schema\)"):
        handle.replace_schema(pa.schema([("n", pa.int8())]))


def test_pandas_and_others_take_it(handle: DatasetHandle) -> None:
    assert pd.DataFrame.from_arrow(handle).to_dict("list") == TABLE.to_pydict()
    assert pl.DataFrame(handle).to_dict(as_series=False) == TABLE.to_pydict()
    assert duckdb.from_arrow(handle).fetchall() == [*zip(*TABLE.to_pydict().values(), strict=True)]
    with pytest.raises(OptionError, match=r"to_pandas\(\)"):
        pd.DataFrame(handle)
    with pytest.raises(OptionError, match=r"to_table\(\)"):
        ds.dataset(OTHER).join(handle, "n").to_table()
