"""Python functions over shared memory, against Spark's own `mapInArrow`."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyspark.sql import Row

import dissociated as dis
from dissociated.errors import OptionError
from dissociated.node.node import Node
from dissociated.spark import map_in_arrow, publish, read
from dissociated.store.store import Store
from support.helpers import case, connections_left, wait_until

from .conftest import IN_JVM, SPARK_4_1
from .test_datasource import NATIVE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

cloudpickle = pytest.importorskip("pyspark.cloudpickle")
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Spark's workers cannot import this module.

Batches = Iterator[pa.RecordBatch]

MANY = {**NATIVE, "few": "CAST(500 - id AS DECIMAL(9, 4)) / 7", "small": "CAST(id AS DECIMAL(5, 2))"}


@pytest.fixture
def node(memory: Path) -> Iterator[Node]:
    with Node(Store(memory / "store"), ["shm:", "tcp://127.0.0.1:0"]) as node:
        yield node


def identity(batches: Batches) -> Batches:
    yield from batches


def doubled(batches: Batches) -> Batches:
    for batch in batches:
        yield pa.concat_batches([batch, batch])


def every_type(spark: SparkSession, rows: int = 120) -> DataFrame:
    values = [f"IF(id % 3 = 1, NULL, {value}) AS `{name}`" for name, value in MANY.items()]
    return spark.range(0, rows, numPartitions=2).selectExpr("id", *values)


def rows(df: DataFrame) -> list[str]:
    return sorted(map(str, df.collect()))


def left_in_memory() -> set[str]:
    """Return the memfds that Python workers of this user have open or mapped for functions."""
    found = set()
    for process in filter(str.isdigit, os.listdir("/proc")):
        for link in Path(f"/proc/{process}/fd").glob("*"):
            try:
                target = os.readlink(link)
            except OSError:
                continue
            if "dissociated:function" in target:
                found.add(f"{process} {target}")
    return found


@pytest.mark.parametrize("source", ["rows", "parquet", "cached", "dataset", "tcp"])
def test_every_type_keeps_its_values(
    spark: SparkSession, node: Node, tmp_path: Path, request: pytest.FixtureRequest, source: str
) -> None:
    if source in ("rows", "dataset"):  # the others give their columns as a dataset does
        request.getfixturevalue("plans")
    df = every_type(spark)
    if source == "parquet":
        df = df.drop("span", "nothing", "hour")  # Spark's Parquet has no such type
        df.write.parquet(str(tmp_path / "data"))
        df = spark.read.parquet(str(tmp_path / "data"))
    elif source == "cached":
        df = df.cache()
    elif source in ("dataset", "tcp"):
        publish(df, "data", node.uri)
        df = read(spark, "data", node.uri, transport="tcp" if source == "tcp" else "shm")
    expected = rows(df)
    assert rows(map_in_arrow(df, identity, df.schema)) == expected
    if source == "cached":  # a function's own batches do not depend on the source
        assert rows(map_in_arrow(df, doubled, df.schema)) == sorted(2 * expected)


def test_a_function_sees_what_spark_itself_gives(spark: SparkSession) -> None:
    def schemas(batches: Batches) -> Batches:
        for batch in batches:
            yield pa.record_batch(
                {"schema": [batch.schema.to_string(show_field_metadata=False)], "rows": [batch.num_rows]}
            )

    df = every_type(spark).drop("instant") if SPARK_4_1 else every_type(spark)  # where its time zone is UTC
    asked = "schema string, rows bigint"
    assert rows(map_in_arrow(df, schemas, asked)) == rows(df.mapInArrow(schemas, asked))


def results(spark: SparkSession, arrays: list[pa.Array], type_: str) -> list[Any]:
    """Return the values that Spark reads if a function yields these arrays, each in a batch of its own."""

    def given(batches: Batches) -> Batches:
        for _ in batches:
            yield from (pa.record_batch({"v": array}) for array in arrays)

    one = spark.range(0, 1, numPartitions=1)
    return [row.v for row in map_in_arrow(one, given, f"v {type_}").collect()]


@pytest.mark.skipif(IN_JVM == "false", reason="Spark itself refuses most of these types")
def test_each_batch_of_a_function_may_have_another_arrow_type(spark: SparkSession) -> None:
    def categories(index: pa.DataType, *values: str) -> pa.Array:
        places = pa.array(range(len(values) - 1, -1, -1), index)
        return pa.DictionaryArray.from_arrays(places, pa.array(values))

    structs = pa.array([{"x": 5, "y": ["e", None]}], pa.struct({"x": pa.int64(), "y": pa.list_(pa.string())}))
    others = pa.struct({"x": pa.uint32(), "y": pa.large_list(pa.string_view())})
    for name, arrays, type_ in (
        ("categories", [categories(pa.int8(), "a", "b"), categories(pa.int16(), "x", "y", "z")], "string"),
        ("categories and text", [categories(pa.int8(), "a", "b"), pa.array(["p", "q"])], "string"),
        ("unsigned", [pa.array([1, 2, 3], pa.uint32()), pa.array([10, 20])], "bigint"),
        ("large", [pa.array(["p"]), pa.array(["r", "s"], pa.large_string()), pa.array(["t"])], "string"),
        ("fixed", [pa.array([b"ab", b"cd"], pa.binary(2)), pa.array([b"p", b"qrst"])], "binary"),
        ("nested", [structs, structs.cast(others), structs], "struct<x: bigint, y: array<string>>"),
    ):
        expected = [value for array in arrays for value in array.to_pylist()]
        with case(name):
            assert [plain(value) for value in results(spark, arrays, type_)] == expected


def plain(value: Any) -> Any:
    return value.asDict() if isinstance(value, Row) else bytes(value) if isinstance(value, bytearray) else value


@pytest.mark.skipif(IN_JVM == "false", reason="the subject is shared memory")
def test_the_fields_of_a_map_may_have_any_names(spark: SparkSession) -> None:
    for names in (("key", "value"), ("keys", "values"), ("value", "key")):
        map_type = pa.map_(pa.field(names[0], pa.string(), nullable=False), pa.field(names[1], pa.string()))
        maps = [[("a", "x"), ("b", "y")], None, [("c", None)]]
        with case(f"{names}"):
            found = results(spark, [pa.array(maps, map_type)], "map<string, string>")
            assert found == [{"a": "x", "b": "y"}, None, {"c": None}]


@pytest.mark.skipif(IN_JVM == "false", reason="Spark's own batches are smaller")
def test_batches_are_large_unless_spark_is_told_so(spark: SparkSession) -> None:
    def sizes(batches: Batches) -> Batches:
        for batch in batches:
            yield pa.record_batch({"n": [batch.num_rows]})

    df = spark.range(0, 300_000, numPartitions=1)
    assert [row.n for row in map_in_arrow(df, sizes, "n bigint").collect()] == [1 << 18, 300_000 - (1 << 18)]
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", 100_000)
    try:
        assert [row.n for row in map_in_arrow(df, sizes, "n bigint").collect()] == [100_000] * 3
    finally:
        spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")


def test_empty_skewed_and_filtered_partitions(spark: SparkSession) -> None:
    def counts(batches: Batches) -> Batches:
        yield pa.record_batch({"n": [sum(batch.num_rows for batch in batches)]})

    df = spark.range(0, 30_000, numPartitions=4).where("id < 3 or id >= 22500")
    assert sorted(row.n for row in map_in_arrow(df, counts, "n bigint").collect()) == [0, 0, 3, 7_500]
    assert map_in_arrow(df.where("id < 0"), identity, "id bigint").count() == 0


@pytest.mark.usefixtures("plans")
def test_it_goes_into_any_plan(spark: SparkSession) -> None:
    numbers = map_in_arrow(spark.range(0, 1_000, numPartitions=3), identity, "n bigint")
    twice = map_in_arrow(map_in_arrow(numbers, identity, "n bigint"), doubled, "n bigint")
    joined = twice.join(numbers, "n").groupBy("n").count().where("count = 2").orderBy("n")
    assert joined.count() == 1_000
    assert numbers.union(numbers).coalesce(1).selectExpr("sum(n)").first() == (999_000,)
    assert [row.n for row in numbers.limit(3).collect()] == [0, 1, 2]
    assert numbers.crossJoin(numbers.limit(5)).count() == 5_000
    numbers.createOrReplaceTempView("mapped_numbers")
    assert spark.newSession().range(1).count() == 1
    assert spark.sql("SELECT max(n) FROM mapped_numbers").first() == (999,)


def test_broadcast_values_and_accumulators_work(spark: SparkSession) -> None:
    context = spark.sparkContext
    factor, seen = context.broadcast(7), context.accumulator(0)

    def scaled(batches: Batches) -> Batches:
        for batch in batches:
            seen.add(batch.num_rows)
            yield pa.record_batch({"n": [value.as_py() * factor.value for value in batch["id"]]})

    out = map_in_arrow(spark.range(0, 1_000, numPartitions=2), scaled, "n bigint")
    assert out.selectExpr("sum(n)").first() == (7 * 499_500,)
    assert seen.value == 1_000


def test_a_function_may_keep_every_batch_or_end_early(spark: SparkSession) -> None:
    def keep(batches: Batches) -> Batches:
        yield from reversed([*batches])

    def early(batches: Batches) -> Batches:
        yield next(batches).slice(0, 2)

    def late(batches: Batches) -> Batches:
        """Ask for the batches in another thread, ahead of the results."""
        found: list[pa.RecordBatch] = []
        thread = threading.Thread(target=lambda: found.extend(batches))
        thread.start()
        thread.join()
        yield from found

    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", 50)
    try:
        df = spark.range(0, 10_000, numPartitions=1)
        expected = [number for start in range(9_950, -1, -50) for number in range(start, start + 50)]
        assert [row.id for row in map_in_arrow(df, keep, df.schema).collect()] == expected  # 200 batches at once
        assert [row.id for row in map_in_arrow(df, early, df.schema).collect()] == [0, 1]
        assert [row.id for row in map_in_arrow(df, late, df.schema).collect()] == [*range(10_000)]
    finally:
        spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")


def test_a_function_may_end_while_the_task_computes_the_batch_it_requested(spark: SparkSession) -> None:
    def early(batches: Batches) -> Batches:
        first = next(batches)
        yield first
        thread = threading.Thread(target=next, args=(batches, None), daemon=True)
        thread.start()
        thread.join(0.1)  # the task sleeps for longer

    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", 50)
    try:
        df = spark.range(0, 100, numPartitions=1)
        slow = df.selectExpr("IF(id = 60, id + length(java_method('java.lang.Thread', 'sleep', 400L)), id) AS id")
        assert [row.id for row in map_in_arrow(slow, early, df.schema).collect()] == [*range(50)]
    finally:
        spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")


def raising(batches: Batches) -> Batches:
    for batch in batches:
        yield batch
        raise ValueError("it does not like this batch")


def killed(batches: Batches) -> Batches:
    for batch in batches:
        yield batch
        os.kill(os.getpid(), signal.SIGKILL)


def a_list(batches: Batches) -> Any:
    return [*batches]


def no_batches(batches: Batches) -> Any:
    yield from (batch.to_pydict() for batch in batches)


def test_failures_are_told_and_leave_nothing(spark: SparkSession) -> None:
    df = spark.range(0, 1_000, numPartitions=1)
    for function, schema, message in (
        (raising, "id bigint", "it does not like this batch"),
        (killed, "id bigint", "Python worker exited unexpectedly"),
        (a_list, "id bigint", "returns list, not an iterator"),
        (no_batches, "id bigint", "RecordBatch"),
        (identity, "id string", "string"),
        (identity, "id timestamp", "timestamp"),
        (identity, "id bigint, more int", "more|column"),
    ):
        with case(f"{function.__name__} as {schema}"), pytest.raises(Exception, match=message):
            map_in_arrow(df, function, schema).collect()
        wait_until(lambda: not left_in_memory(), "all of it is gone")
    assert map_in_arrow(df, identity, df.schema).count() == 1_000


def test_nulls_that_the_schema_forbids_are_refused(spark: SparkSession) -> None:
    from pyspark.sql.types import LongType, StructField, StructType

    def null(batches: Batches) -> Batches:
        for batch in batches:
            yield pa.record_batch({"n": pa.array([None] * batch.num_rows, pa.int64())})

    schema = StructType([StructField("n", LongType(), nullable=False)])
    if IN_JVM == "true":
        with pytest.raises(Exception, match="'n' has nulls"):
            map_in_arrow(spark.range(10), null, schema).collect()


def test_a_task_that_fails_is_run_again(spark: SparkSession, tmp_path: Path) -> None:
    once = str(tmp_path / "once")

    def killed_once(batches: Batches) -> Batches:
        for number, batch in enumerate(batches):
            yield batch
            if number == 0 and not os.path.exists(once):
                Path(once).touch()
                os.kill(os.getpid(), signal.SIGKILL)

    df = spark.range(0, 300_000, numPartitions=1)
    out = map_in_arrow(df, killed_once, df.schema)
    assert out.selectExpr("count(id)", "sum(id)").first() == (300_000, sum(range(300_000)))
    assert Path(once).exists()


@pytest.mark.skipif(IN_JVM == "false", reason="Spark's rows pass through its socket")
def test_a_dataset_is_mapped_where_it_lies(spark: SparkSession, node: Node) -> None:
    def places(batches: Batches) -> Batches:
        """Return the file that each batch is mapped from."""
        for batch in batches:
            address = batch.column(0).buffers()[1].address
            for line in Path("/proc/self/maps").read_text().splitlines():
                span, *_, file = line.split()
                start, end = (int(part, 16) for part in span.split("-"))
                if start <= address < end:
                    yield pa.record_batch({"file": [file]})

    publish(spark.range(0, 100_000, numPartitions=2), "data", node.uri)
    found = map_in_arrow(read(spark, "data", node.uri), places, "file string").collect()
    assert found
    assert {str(Path(row.file).is_relative_to(node.store.directory)) for row in found} == {"True"}
    wait_until(lambda: connections_left(node.server) == 0, "all readers have left")


def test_a_live_source_is_read_and_its_memory_is_not_shared_on(spark: SparkSession) -> None:
    schema = pa.schema({"n": pa.int64(), "text": pa.string()})

    def produced() -> Iterator[pa.RecordBatch]:
        for first in range(0, 100_000, 1_000):
            numbers = range(first, first + 1_000)
            yield pa.record_batch([pa.array(numbers), pa.array(map(str, numbers))], schema)

    with dis.Server(["shm:"]) as server:
        server.publish("live", lambda: pa.RecordBatchReader.from_batches(schema, produced()))
        df = read(spark, "live", server.catalog_uri)
        out = map_in_arrow(df, identity, df.schema)
        assert out.selectExpr("sum(n)", "sum(CAST(text AS BIGINT))").first() == (sum(range(100_000)),) * 2
        assert out.orderBy("n").tail(1) == [(99_999, "99999")]
        wait_until(lambda: connections_left(server) == 0, "all readers have left")


def test_barriers_and_profiles_are_refused(spark: SparkSession) -> None:
    with pytest.raises(OptionError, match="no barrier mode"):
        map_in_arrow(spark.range(1), identity, "id bigint", barrier=True)
    with pytest.raises(OptionError, match="no resource profile"):
        map_in_arrow(spark.range(1), identity, "id bigint", profile=object())
