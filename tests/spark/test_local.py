"""DataFrames of Spark, and data of this process, through shared memory."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.ml.linalg import Vectors

import dissociated as dis
from dissociated.errors import SourceError
from dissociated.spark import create_dataframe, map_in_arrow, read, to_arrow, to_pandas, to_polars
from support.helpers import wait_until
from support.jvm import evict_cached_data, executed_plan, jvm

from .conftest import IN_JVM
from .test_datasource import NATIVE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


cloudpickle = pytest.importorskip("pyspark.cloudpickle")
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Spark's workers cannot import this module.


def every_type(spark: SparkSession) -> DataFrame:
    values = [f"IF(id % 3 = 1, NULL, {value}) AS `{name}`" for name, value in NATIVE.items()]
    return spark.range(0, 120, numPartitions=3).selectExpr("id", *values)


def shared_memory() -> int:
    """Return the bytes of memfds that this process has mapped."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:dissociated" in line:
            start, end = line.split()[0].split("-")
            total += int(end, 16) - int(start, 16)
    return total


def memfds() -> set[int]:
    """Return the inodes of the memfds that this process has open."""
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # it was closed meanwhile
            if "memfd:dissociated" in os.readlink(link):
                found.add(os.stat(link).st_ino)
    return found


def collect_garbage(spark: SparkSession) -> None:
    """Collect what neither Python nor Java uses, in both."""
    gc.collect()
    jvm(spark).java.lang.System.gc()


def test_to_arrow_is_that_of_spark(spark: SparkSession) -> None:
    df = every_type(spark)
    found = to_arrow(df)
    found.validate(full=True)
    # Spark's own toArrow refuses a null struct whose fields are not nullable.
    assert found.drop_columns("record") == df.drop("record").toArrow()
    assert found["record"].to_pylist() == [None if n % 3 == 1 else {"x": n, "y": {"z": f"z{n}"}} for n in range(120)]
    assert found["id"].to_pylist() == [*range(120)]
    assert to_arrow(df.where("id < 0")) == df.where("id < 0").toArrow()
    assert to_arrow(df.where("id > 100")).num_rows == 19  # some partitions are empty
    assert to_arrow(df.select()).num_rows == 120


@pytest.mark.skipif(IN_JVM == "false", reason="Spark's own toArrow stands in")
@pytest.mark.usefixtures("plans")
def test_to_arrow_copies_columns_if_the_plan_ends_in_columns(spark: SparkSession, tmp_path: Path) -> None:
    every_type(spark).drop("span", "nothing", "hour").write.parquet(str(tmp_path / "data"))  # no such type in Parquet
    df = spark.read.parquet(str(tmp_path / "data"))
    found = to_arrow(df)
    # Spark's page of queries shows these numbers.
    assert output_rows(df) == {"FileSourceScanExec": 120, "ColumnarToRowExec": 0}
    assert found.drop_columns("record") == df.drop("record").toArrow()
    ids = found["id"].to_pylist()
    assert sorted(ids) == [*range(120)]
    assert found["record"].to_pylist() == [None if n % 3 == 1 else {"x": n, "y": {"z": f"z{n}"}} for n in ids]
    # Both columns have a dictionary, which for `many` has more strings than a batch has rows.
    texts = spark.range(0, 20_000, numPartitions=1).selectExpr(
        "id", "IF(id % 7 = 1, NULL, concat('few ', id % 3)) AS few", "concat('many ', id % 10000) AS many"
    )
    texts.write.parquet(str(tmp_path / "texts"))
    found = to_arrow(spark.read.parquet(str(tmp_path / "texts")))
    assert found["few"].to_pylist() == [None if n % 7 == 1 else f"few {n % 3}" for n in range(20_000)]
    assert found["many"].to_pylist() == [f"many {n % 10_000}" for n in range(20_000)]
    df.dropna().write.parquet(str(tmp_path / "no nulls"))  # values without nulls are copied together
    dense = spark.read.parquet(str(tmp_path / "no nulls"))
    found = to_arrow(dense)
    assert found.num_rows == 80
    assert found == dense.toArrow()


@pytest.mark.skipif(IN_JVM == "false", reason="Spark's own toArrow stands in")
@pytest.mark.parametrize("compressed", [True, False])
def test_to_arrow_of_cached_data_is_that_of_spark(spark: SparkSession, compressed: bool) -> None:
    """A cached batch of a column holds its values, their runs, an index of few values, or differences of numbers."""
    columns = NATIVE | {
        # Spark's own toArrow refuses a null struct whose fields are not nullable.
        "record": "named_struct('x', nullif(id % 5, 0), 'y', nullif(concat('y', id), 'y1'))",
        "i8": "CAST(id % 100 AS TINYINT)",
        "runs": "concat('v', id div 50)",
        "few": "concat('v', id % 3)",
        "few_i32": "CAST(id % 3 * 70000 AS INT)",
        "first_few_i32": "IF(id < 100, CAST(id % 3 * 70000 AS INT), CAST(id * 7919 AS INT))",
        "first_few_i64": "IF(id < 100, id % 3 * 70000, id * 7919)",
        "cents": "CAST(id % 100 / 4 AS DECIMAL(5, 2))",
        "price": "CAST(id * 1000000.01 AS DECIMAL(15, 2))",
        "collated": "concat('V', id % 3) COLLATE UTF8_LCASE",
    }
    # Nulls begin and end the second batch, and are all of the third. The last batch is shorter.
    is_null = "id div 100 = 1 AND id % 7 > 1 OR id div 100 = 2"
    values = [f"IF({is_null}, NULL, {value}) AS {name}" for name, value in columns.items()]
    spark.conf.set("spark.sql.inMemoryColumnarStorage.batchSize", 100)
    spark.conf.set("spark.sql.inMemoryColumnarStorage.compressed", compressed)
    df = spark.range(0, 430, numPartitions=1).selectExpr("id", *values).cache()
    try:
        assert reads_cached_batches(spark, df)
        found = to_arrow(df)
        found.validate(full=True)
        assert found == df.toArrow()
        assert to_arrow(df.select("few", "id", "text")) == found.select(["few", "id", "text"])
        assert to_arrow(df.select()).num_rows == 430
        assert to_arrow(df.where("id < 20")) == found.slice(0, 20)
    finally:
        df.unpersist()
        spark.conf.unset("spark.sql.inMemoryColumnarStorage.batchSize")
        spark.conf.unset("spark.sql.inMemoryColumnarStorage.compressed")


@pytest.mark.skipif(IN_JVM == "false", reason="Spark's own toArrow stands in")
def test_to_arrow_of_cached_vectors_and_large_decimals(spark: SparkSession) -> None:
    vectors = spark.createDataFrame([(Vectors.dense([1.0, 2.0]),), (None,), (Vectors.sparse(3, {1: 0.5}),)], ["v"])
    vectors.cache()
    assert reads_cached_batches(spark, vectors)
    # Spark's own toArrow refuses a null vector.
    assert to_arrow(vectors)["v"].to_pylist() == [
        {"type": 1, "size": None, "indices": None, "values": [1.0, 2.0]},
        None,
        {"type": 0, "size": 3, "indices": [1], "values": [0.5]},
    ]
    vectors.unpersist()
    # A decimal has 16 bytes in Arrow, and one byte in the cache.
    wide = spark.range(0, 14_000, numPartitions=1).selectExpr(
        *(f"CAST((id + {n}) % 100 AS DECIMAL(38, 0)) AS d{n}" for n in range(40))
    )
    wide.cache()
    assert reads_cached_batches(spark, wide)
    found = to_arrow(wide)
    assert found.num_rows == 14_000
    assert found["d7"].to_pylist() == [(n + 7) % 100 for n in range(14_000)]
    assert max(batch.nbytes for batch in found.to_batches()) < (8 << 20) + 1_000
    wide.unpersist()


@pytest.mark.skipif(IN_JVM == "false", reason="Spark's own toArrow stands in")
@pytest.mark.usefixtures("plans")
def test_to_arrow_of_cached_data_does_not_depend_on_the_cache(spark: SparkSession) -> None:
    """Spark caches the partitions of a shuffle, most of which are empty, and computes evicted partitions again."""
    numbers = spark.range(0, 100, numPartitions=1).selectExpr("id", "concat('v', id % 3) AS text")
    df = numbers.repartition(6, "text").cache()
    assert reads_cached_batches(spark, df)
    found = to_arrow(df)
    assert found.sort_by("id").to_pydict() == {"id": [*range(100)], "text": [f"v{id % 3}" for id in range(100)]}
    evict_cached_data(spark)
    assert to_arrow(df) == found
    df.unpersist()
    assert to_arrow(df) == found == df.toArrow()


def reads_cached_batches(spark: SparkSession, df: DataFrame) -> bool:
    """Return whether the columns of `df` are copied from Spark's cache."""
    plan = executed_plan(df)
    if plan.getClass().getSimpleName() == "AdaptiveSparkPlanExec":
        plan = plan.finalPhysicalPlan()
    return bool(jvm(spark).org.apache.spark.sql.dissociated.CachedBatches.of(plan).isDefined())


def output_rows(df: DataFrame) -> dict[str, int]:
    """Return the number of rows that each operator of the last execution of `df` has reported."""
    found, plans = {}, [executed_plan(df)]
    for plan in plans:
        plans += [plan.children().apply(index) for index in range(plan.children().size())]
        metric = plan.metrics().get("numOutputRows")
        if metric.isDefined():
            found[plan.getClass().getSimpleName()] = metric.get().value()
    return found


@pytest.mark.skipif(IN_JVM == "false", reason="Spark's own toArrow stands in")
def test_to_arrow_and_functions_divide_columns_into_batches(
    spark: SparkSession, server: dis.Server, client: dis.Client
) -> None:
    table = pa.table({"id": range(600_000)})
    assert len(table["id"].chunks) == 1
    client.put("numbers", table)
    numbers = read(spark, "numbers", server.catalog_uri, partitions=1)
    found = to_arrow(numbers)
    assert found["id"].to_pylist() == table["id"].to_pylist()
    assert [len(chunk) for chunk in found["id"].chunks] == [262_144, 262_144, 75_712]
    passed = to_arrow(map_in_arrow(map_in_arrow(numbers, lambda batches: batches, "id long"), shifted, "id long"))
    assert passed["id"].to_pylist() == [*range(1, 600_001)]
    assert to_arrow(map_in_arrow(numbers, emptied, "id long")).num_rows == 0


def shifted(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield pa.record_batch({"id": pc.add(batch["id"], 1)})


@pytest.mark.skipif(IN_JVM == "false", reason="Spark's own toArrow stands in")
def test_batches_of_columns_with_large_values_are_small(spark: SparkSession, tmp_path: Path) -> None:
    """Values of several MB come after a thousand that are null, so no mean of the rows before tells their size."""
    values = spark.range(0, 1_010, numPartitions=1).selectExpr(
        "id", "IF(id < 1000, NULL, CAST(REPEAT(CAST(id AS STRING), 700000) AS BINARY)) AS value"
    )
    values.write.parquet(str(tmp_path / "values"))
    for df in (spark.read.parquet(str(tmp_path / "values")), values.cache()):
        found = to_arrow(df)
        assert found["id"].to_pylist() == [*range(1_010)]
        for row, value in enumerate(found["value"]):
            assert (value.as_py() == str(row).encode() * 700_000) if row >= 1_000 else not value.is_valid
        assert max(batch.nbytes for batch in found.to_batches()) < (8 << 20) + 3_000_000
        sizes = to_arrow(map_in_arrow(df, sizes_of_batches, "size long, rows long")).to_pydict()
        assert sum(sizes["rows"]) == 1_010
        assert max(sizes["size"]) < (8 << 20) + 3_000_000
    values.unpersist()


def sizes_of_batches(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield pa.record_batch({"size": [batch.nbytes], "rows": [batch.num_rows]})


def emptied(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield batch.slice(0, 0)


def test_to_arrow_has_the_large_types_that_a_setting_asks_for(spark: SparkSession) -> None:
    df = spark.range(3).selectExpr("CAST(id AS STRING) AS s")
    assert to_arrow(df).schema.types == [pa.string()]
    spark.conf.set("spark.sql.execution.arrow.useLargeVarTypes", True)
    try:
        assert to_arrow(df) == pa.table({"s": pa.array(["0", "1", "2"], pa.large_string())}, df.toArrow().schema)
    finally:
        spark.conf.unset("spark.sql.execution.arrow.useLargeVarTypes")


@pytest.mark.usefixtures("plans")
def test_to_arrow_takes_rows_in_the_order_of_a_sorted_dataframe(spark: SparkSession) -> None:
    assert to_arrow(spark.range(0, 10_000).orderBy("id", ascending=False))["id"].to_pylist() == [*range(9_999, -1, -1)]


def test_to_arrow_lies_in_shared_memory_until_nobody_holds_it(spark: SparkSession) -> None:
    before, allocated = shared_memory(), pa.total_allocated_bytes()
    table = to_arrow(spark.range(0, 1_000_000, numPartitions=2))
    assert pa.total_allocated_bytes() - allocated < table.nbytes
    assert shared_memory() - before >= table.nbytes
    part = table.slice(5, 3)
    del table
    assert part["id"].to_pylist() == [5, 6, 7]
    del part
    assert shared_memory() == before


def test_to_polars_and_to_pandas(spark: SparkSession) -> None:
    df = spark.range(0, 1_000, numPartitions=2).selectExpr("id", "CAST(id AS STRING) AS text", "id / 2D AS half")
    polars, pandas = to_polars(df), to_pandas(df)
    assert polars.rows() == [(n, str(n), n / 2) for n in range(1_000)]
    assert [*pandas.itertuples(index=False, name=None)] == polars.rows()


def test_to_arrow_of_a_killed_task_has_each_row_once(spark: SparkSession, tmp_path: Path) -> None:
    once = str(tmp_path / "once")

    def failing(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches
        if not os.path.exists(once):
            Path(once).touch()
            os.kill(os.getpid(), 9)

    df = spark.range(0, 1_000, numPartitions=2).mapInArrow(failing, "id bigint")
    assert sorted(to_arrow(df)["id"].to_pylist()) == [*range(1_000)]
    with pytest.raises(Exception, match="DIVIDE_BY_ZERO"):
        to_arrow(spark.range(1).selectExpr("1 / (id - id)"))
    assert not [thread for thread in threading.enumerate() if thread.name == "dissociated-receiver"]


@pytest.mark.parametrize("kind", ["table", "batch", "reader", "polars", "pandas"])
def test_create_dataframe_of_any_table(spark: SparkSession, kind: str) -> None:
    table = pa.table({"n": [*range(1_000)], "text": [None if n % 7 == 0 else str(n) for n in range(1_000)]})
    data: Any = {
        "table": lambda: table,
        "batch": lambda: table.to_batches()[0],
        "reader": table.to_reader,
        "polars": lambda: pl.from_arrow(table),
        "pandas": lambda: pd.DataFrame({"n": range(1_000), "text": table["text"].to_pylist()}, index=range(5, 1_005)),
    }[kind]()
    df = create_dataframe(spark, data)
    assert df.columns == ["n", "text"]
    assert df.orderBy("n").collect() == [*zip(range(1_000), table["text"].to_pylist(), strict=True)]
    assert df.where("text IS NULL").count() == 143
    with pytest.raises(SourceError, match="int is not a table"):
        create_dataframe(spark, 5)


@pytest.mark.usefixtures("plans")
def test_create_dataframe_of_every_type_and_back(spark: SparkSession) -> None:
    table = to_arrow(every_type(spark))
    found = to_arrow(create_dataframe(spark, table).orderBy("id"))
    assert found.to_pylist() == table.to_pylist()


def test_create_dataframe_of_columns_with_the_same_name(spark: SparkSession) -> None:
    table = pa.table([pa.array([1, 2]), pa.array(["x", "y"])], names=["a", "a"])
    df = create_dataframe(spark, table)
    assert df.columns == ["a", "a"]
    assert df.collect() == [(1, "x"), (2, "y")]


@pytest.mark.skipif(IN_JVM == "false", reason="Spark's own createDataFrame stands in")
def test_create_dataframe_of_a_type_that_spark_lacks_is_refused_at_once(spark: SparkSession) -> None:
    table = pa.table({"n": [1], "span": pa.array([(1, 2, 3)], pa.month_day_nano_interval())})
    with pytest.raises(SourceError, match="column 'span' has the type month_day_nano_interval"):
        create_dataframe(spark, table)


def test_create_dataframe_of_a_handle_reads_its_version(spark: SparkSession, client: dis.Client) -> None:
    client.put("numbers", pa.table({"n": [1, 2, 3]}))
    df = create_dataframe(spark, client.dataset("numbers"))
    assert sorted(df.collect()) == [(1,), (2,), (3,)]


def test_create_dataframe_of_a_handle_refuses_another_dataset_of_its_name_and_version(spark: SparkSession) -> None:
    with dis.Server(["shm:"]) as server:
        uri = str(server.catalog_uri)
        server.publish("numbers", pa.table({"n": [1, 2, 3]}))
        with dis.connect(uri) as client:
            handle = client.dataset("numbers")
    with dis.Server(["shm:"], catalog=uri) as server:
        server.publish("numbers", pa.table({"n": [4, 5, 6]}))
        with dis.connect(uri) as client:
            assert client.dataset("numbers").version == handle.version
        with pytest.raises(Exception, match=f"version {handle.version} of 'numbers' is gone"):
            create_dataframe(spark, handle).collect()


@pytest.mark.skipif(IN_JVM == "false", reason="Spark's own createDataFrame stands in")
def test_a_created_dataframe_is_kept_for_its_plans_and_then_dropped(spark: SparkSession) -> None:
    create_dataframe(spark, pa.table({"n": [0]}))  # starts the server, which has memory of its own
    before = memfds()
    df = create_dataframe(spark, pa.table({"n": range(100_000)}))
    added = memfds() - before
    assert added
    derived = df.where("n > 10").selectExpr("n + 1 AS m")
    del df
    collect_garbage(spark)
    assert derived.count() == 99_989
    del derived
    wait_until(partial(is_collected, spark, added), "its memory is free")


@pytest.mark.skipif(IN_JVM == "false", reason="Spark's own createDataFrame stands in")
def test_a_created_dataframe_is_kept_for_its_rdds(spark: SparkSession) -> None:
    table = pa.table({"id": range(100_000)})
    create_dataframe(spark, table)  # starts the server, which has memory of its own
    before = memfds()
    df = create_dataframe(spark, table)
    of_the_rdds = memfds() - before
    rdds: list[Any] = [df.rdd, map_in_arrow(df, shifted, "id bigint").rdd]
    del df
    # Java drops datasets one after the other: when it has dropped the second, it has dropped all that it found before.
    for _ in range(2):
        before = memfds()
        create_dataframe(spark, table)
        added = memfds() - before
        wait_until(partial(is_collected, spark, added), "the memory of an unused one is free")
    assert [rdd.map(sum).sum() for rdd in rdds] == [sum(range(100_000)), sum(range(1, 100_001))]
    rdds.clear()
    wait_until(partial(is_collected, spark, of_the_rdds), "their memory is free")


def is_collected(spark: SparkSession, added: set[int]) -> bool:
    """Collect garbage, which takes a long time, and return whether the memory `added` is free a little later."""
    collect_garbage(spark)
    with suppress(AssertionError):
        wait_until(lambda: not memfds() & added, "it is free", 0.3)
    return not memfds() & added
