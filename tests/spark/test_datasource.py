from __future__ import annotations

import datetime
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.ml.functions import array_to_vector
from pyspark.sql.functions import array, lit

import dissociated as dis
from dissociated.errors import DatasetNotFound, DissociatedError, OptionError
from dissociated.node.node import Node
from dissociated.spark import publish, read
from dissociated.spark.types import arrow_schema
from dissociated.store.store import Store
from support.certificates import Certificates
from support.helpers import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql import DataFrame, SparkSession

    Write = Callable[..., None]

NATIVE = {
    "nothing": "CAST(NULL AS VOID)",
    "flag": "id % 2 = 0",
    "i8": "CAST(id AS TINYINT)",
    "i16": "CAST(id AS SMALLINT)",
    "i32": "CAST(id AS INT)",
    "i64": "id * 10000000000",
    "f32": "CAST(id / 3 AS FLOAT)",
    "f64": "id / 3D",
    "money": "CAST(id * 1.01 AS DECIMAL(38, 18))",
    "text": "concat('öß€😀 ', id)",
    "raw": "CAST(concat('x', id) AS BINARY)",
    "day": "date_add(DATE'1969-12-25', CAST(id AS INT))",
    "hour": "IF(id % 2 = 0, TIME'00:00:00', TIME'23:59:59.999999')",
    "local": "TIMESTAMP_NTZ'2024-03-10 02:30:00' + make_dt_interval(CAST(id AS INT))",
    "instant": "TIMESTAMP'2024-11-03 05:30:00Z' + make_dt_interval(0, CAST(id AS INT))",
    "span": "make_dt_interval(CAST(id AS INT), 1, 2, 3.5)",
    "items": "array(id, NULL, id + 1)",
    "record": "named_struct('x', id, 'y', named_struct('z', concat('z', id)))",
    "lookup": "map(concat('k', id), array(id))",
}


def plain(value: Any) -> Any:
    """Convert a value that Spark collected or Arrow returned to common Python objects."""
    from pyspark.sql import Row

    match value:
        case datetime.datetime(tzinfo=zone) if zone is not None:
            return value.astimezone().replace(tzinfo=None)  # Spark collects instants as naive local times
        case Row():
            return plain(value.asDict())
        case dict():
            return {key: plain(item) for key, item in value.items()}
        case list() if value and all(isinstance(item, tuple) for item in value):
            return {key: plain(item) for key, item in value}  # Arrow returns a map as pairs
        case list():
            return [plain(item) for item in value]
        case bytearray():
            return bytes(value)
        case _:
            return value


def rows(table: pa.Table) -> list[tuple[Any, ...]]:
    return [tuple(plain(value) for value in row.values()) for row in table.to_pylist()]


def staged(stage: Path) -> list[str]:
    return sorted(os.listdir(stage))


def by_source(df: DataFrame, name: str, catalog: str, mode: str = "overwrite", **options: str) -> None:
    """Write by the source that Spark looks up by name."""
    df.write.format("dissociated").option("catalog", catalog).options(**options).mode(mode).save(name)


@pytest.fixture(params=["JVM", "Python"])
def write(request: pytest.FixtureRequest, use_jvm: Callable[[bool], None]) -> Write:
    """Return each of the two ways to write: `publish` in Spark's JVM, and the Python data source."""
    use_jvm(request.param == "JVM")
    return by_source if request.param == "JVM" else publish


def test_a_dataset_arrives_whole_and_in_order_of_the_partitions(
    spark: SparkSession, catalog: str, client: dis.Client, stage: Path, write: Write
) -> None:
    write(spark.range(0, 50_000, numPartitions=4), "numbers", catalog)
    table = client.read("numbers").read_all()
    assert table.schema == pa.schema([pa.field("id", pa.int64(), nullable=False)])
    assert table["id"].to_pylist() == list(range(50_000))
    assert staged(stage) == []


def test_overwrite_replaces(spark: SparkSession, catalog: str, client: dis.Client, write: Write) -> None:
    write(spark.range(10), "data", catalog)
    before = client.read("data", transport="shm")
    write(spark.sql("SELECT 'a' AS letter"), "data", catalog)
    assert client.read("data").read_all().to_pylist() == [{"letter": "a"}]
    assert before.read_all().num_rows == 10  # a reader that is already open keeps its version


def test_append_adds(spark: SparkSession, catalog: str, client: dis.Client, write: Write) -> None:
    write(spark.range(3), "data", catalog, mode="append")
    write(spark.range(3, 5), "data", catalog, mode="append")
    assert client.read("data").read_all()["id"].to_pylist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "query", ["SELECT id FROM range(0)", "SELECT id FROM range(0, 10, 1, 3) WHERE id > 10"], ids=str
)
def test_no_rows_still_make_a_dataset(
    spark: SparkSession, catalog: str, client: dis.Client, query: str, write: Write
) -> None:
    write(spark.sql(query), "nothing", catalog)
    table = client.read("nothing").read_all()
    assert table.schema == pa.schema([pa.field("id", pa.int64(), nullable=False)])
    assert table.num_rows == 0


def test_no_partitions_still_make_a_dataset(
    spark: SparkSession, catalog: str, client: dis.Client, write: Write
) -> None:
    empty = spark.createDataFrame(spark.sparkContext.emptyRDD(), "a int, b string")
    assert empty.rdd.getNumPartitions() == 0
    write(empty, "nothing", catalog)
    assert client.read("nothing").read_all() == pa.table({"a": pa.array([], "i4"), "b": pa.array([], "str")})


def test_native_types_keep_their_values(spark: SparkSession, catalog: str, client: dis.Client, write: Write) -> None:
    present = [f"{value} AS {name}" for name, value in NATIVE.items()]
    nullable = [f"IF(id % 3 = 1, NULL, {value}) AS {name}_or_null" for name, value in NATIVE.items()]
    df = spark.range(0, 20, numPartitions=2).selectExpr(*present, *nullable)
    write(df, "types", catalog)
    table = client.read("types").read_all()
    assert rows(table) == [tuple(plain(value) for value in row) for row in df.collect()]
    assert table.schema == arrow_schema(df.schema)


def test_a_task_that_fails_publishes_nothing_and_leaves_nothing(
    spark: SparkSession, catalog: str, client: dis.Client, stage: Path, write: Write
) -> None:
    write(spark.range(3), "data", catalog)
    many = spark.range(0, 100_000, numPartitions=1)
    broken = many.selectExpr("IF(id = 77777, raise_error('boom'), id) AS id")
    with pytest.raises(PySparkException, match="boom"):
        write(broken, "data", catalog)
    assert client.read("data").read_all()["id"].to_pylist() == [0, 1, 2]
    wait_until(lambda: staged(stage) == [], "what a Python worker still wrote that Spark had given up is gone")


def test_a_task_that_succeeds_at_the_second_attempt_counts_once(
    spark: SparkSession, catalog: str, client: dis.Client, stage: Path, write: Write
) -> None:
    def fail_once(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        yield from batches
        context = TaskContext.get()
        assert context is not None
        if context.partitionId() == 1 and context.attemptNumber() == 0:
            raise RuntimeError("the first attempt")

    df = spark.range(0, 30_000, numPartitions=2).mapInArrow(fail_once, "id long")
    write(df, "data", catalog)
    assert client.read("data").read_all()["id"].to_pylist() == list(range(30_000))
    wait_until(lambda: staged(stage) == [], "what a Python worker still wrote that Spark had given up is gone")


def test_a_commit_that_fails_publishes_nothing_and_leaves_nothing(
    spark: SparkSession, catalog: str, client: dis.Client, stage: Path, write: Write
) -> None:
    write(spark.range(3), "data", catalog)
    with pytest.raises((PySparkException, DissociatedError), match="no column 'letter'"):  # before any task runs
        write(spark.sql("SELECT 'a' AS letter"), "data", catalog, mode="append")
    other = pa.table({"letter": ["a"]})

    def replace(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with dis.connect(catalog) as client:
            client.put("data", other)
        yield from batches

    with pytest.raises((PySparkException, DissociatedError), match="must have one schema"):
        write(spark.range(3).mapInArrow(replace, "id long"), "data", catalog, mode="append")
    assert client.read("data").read_all() == other
    assert staged(stage) == []


def test_a_dataset_that_never_was_is_not_there(
    spark: SparkSession, catalog: str, client: dis.Client, write: Write
) -> None:
    with pytest.raises(PySparkException, match="boom"):
        write(spark.sql("SELECT raise_error('boom') AS id FROM range(1)"), "never", catalog)
    with pytest.raises(DatasetNotFound):
        client.describe("never")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"catalog": "grpc://127.0.0.1:1"}, r"name of the dataset is missing: .*\.save"),
        ({"catalog": "grpc://127.0.0.1:1", "path": "x"}, "127.0.0.1:1"),
        ({"catalog": "grpc://127.0.0.1:1", "path": "x", "tag": "a=b"}, "no option 'tag' for writing; there are .*tags"),
        ({"catalog": "grpc://127.0.0.1:1", "path": "x", "ttl": "soon"}, "ttl is a number of seconds"),
    ],
)
def test_wrong_options_are_told_before_any_task(spark: SparkSession, options: dict[str, str], message: str) -> None:
    with pytest.raises(PySparkException, match=message):
        spark.range(1).write.format("dissociated").options(**options).mode("append").save()


def test_a_type_that_arrow_lacks_is_told_before_any_task(spark: SparkSession, catalog: str, write: Write) -> None:
    with pytest.raises((PySparkException, DissociatedError), match="column 'none' has the type map<void"):
        write(spark.sql("SELECT map() AS none"), "x", catalog)


def test_what_spark_wrote_into_a_store_outlives_the_node(spark: SparkSession, tmp_path: Path, write: Write) -> None:
    store = tmp_path / "store"
    for _ in range(2):
        with Node(Store(store, limit=64 << 20), ["shm:"]) as node, dis.connect(node.uri) as client:
            if not client.list():
                write(spark.range(0, 50_000, numPartitions=4), "numbers", node.uri)
                write(spark.range(50_000, 60_000, numPartitions=2), "numbers", node.uri, mode="append")
            assert client.read("numbers", transport="shm").read_all()["id"].to_pylist() == list(range(60_000))
            assert staged(node.store.staging) == []


def test_a_store_that_is_full_is_told_by_the_task(spark: SparkSession, tmp_path: Path, write: Write) -> None:
    with Node(Store(tmp_path / "store", limit=1 << 20), ["shm:"]) as node, dis.connect(node.uri) as client:
        with pytest.raises(PySparkException, match=r"the store .* is full: it holds [\d,]+ bytes of at most"):
            write(spark.range(0, 300_000, numPartitions=2), "numbers", node.uri)
        assert client.list() == []
        wait_until(lambda: staged(node.store.staging) == [], "what the other task still wrote is gone")


def test_tags_and_a_time_to_live_come_with_it(
    spark: SparkSession, catalog: str, client: dis.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    df = spark.range(1)
    df.write.format("dissociated").options(tags="of=spark, by=me", ttl="600", catalog=catalog).mode("append").save("a")
    monkeypatch.setenv("DISSOCIATED_CATALOG", catalog)
    publish(df, "b", tags={"of": "spark", "by": "me"}, ttl=600)
    assert [one.name for one in client.list(tags={"of": "spark", "by": "me"})] == ["a", "b"]
    assert all(one.expires is not None for one in client.list())


def test_a_view_is_read_and_appended_to_and_a_table_says_what_to_do(
    spark: SparkSession, catalog: str, client: dis.Client
) -> None:
    client.put("data", pa.table({"id": [1]}))
    using = f"USING dissociated OPTIONS (catalog '{catalog}', path 'data')"
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW a_view {using}")
    spark.sql("INSERT INTO a_view VALUES (2)")
    assert spark.sql("SELECT * FROM a_view ORDER BY id").collect() == [(1,), (2,)]
    spark.sql("INSERT INTO a_view SELECT id + 2 FROM a_view")
    # The view stays at the version of its first query, which this server does not keep.
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW a_view {using}")
    assert spark.sql("SELECT * FROM a_view ORDER BY id").collect() == [(1,), (2,), (3,), (4,)]
    spark.catalog.dropTempView("a_view")
    tables = {
        "CREATE TABLE": lambda: spark.sql(f"CREATE TABLE a_table {using}"),
        "AS SELECT": lambda: spark.sql(f"CREATE TABLE a_table {using} AS SELECT 1 AS id"),
        "writeTo": lambda: spark.range(1).writeTo("a_table").using("dissociated").option("catalog", catalog).create(),
        "saveAsTable": lambda: by_table(spark.range(1), catalog),
    }
    for what, make in tables.items():
        with pytest.raises(PySparkException, match=r"cannot be a dataset: .*DatasetCatalog.*CREATE TEMPORARY VIEW"):
            make()
        assert not spark.catalog.tableExists("a_table"), what
    for mode in ("errorifexists", "ignore"):  # the first is Spark's default
        with pytest.raises(PySparkException, match='either the "Append" or "Overwrite" mode'):
            by_source(spark.range(1), "data", catalog, mode)
    assert client["data"].count_rows() == 4


def by_table(df: DataFrame, catalog: str) -> None:
    df.write.format("dissociated").option("catalog", catalog).option("path", "data").saveAsTable("a_table")


def test_a_new_column_comes_by_writing_the_dataset_anew_as_the_error_says(
    spark: SparkSession, catalog: str, client: dis.Client
) -> None:
    publish(spark.range(2), "data", catalog)
    more = spark.sql("SELECT 7L AS id, 'x' AS extra")
    with pytest.raises(DissociatedError, match=r"no column 'extra'.*unionByName\(df, allowMissingColumns=True\)"):
        publish(more, "data", catalog, mode="append", merge_schema=True)
    publish(read(spark, "data", catalog).unionByName(more, allowMissingColumns=True), "data", catalog)
    assert client.read("data").read_all().to_pylist() == [
        {"id": 0, "extra": None},
        {"id": 1, "extra": None},
        {"id": 7, "extra": "x"},
    ]


def test_names_that_spark_cannot_tell_apart(
    spark: SparkSession, catalog: str, client: dis.Client, write: Write
) -> None:
    write(spark.sql("SELECT 1 AS `a.b`, 2 AS a, 3 AS A, 4 AS ``` `"), "data", catalog)
    assert client.read("data").read_all().to_pylist() == [{"a.b": 1, "a": 2, "A": 3, "` ": 4}]
    with pytest.raises((PySparkException, DissociatedError), match=r"more than one column 'a'.*rename it"):
        write(spark.sql("SELECT 1 AS a, 2 AS a"), "data", catalog)


def test_any_thread_may_write_and_read(spark: SparkSession, catalog: str, client: dis.Client, write: Write) -> None:
    with ThreadPoolExecutor(1) as other:
        other.submit(write, spark.range(3), "data", catalog).result()
        read = other.submit(lambda: spark.read.format("dissociated").option("catalog", catalog).load("data").collect())
        assert [row.id for row in read.result()] == [0, 1, 2]


def test_types_that_arrow_does_not_have_come_back(
    spark: SparkSession, catalog: str, write: Write, use_jvm: Callable[[bool], None]
) -> None:
    df = spark.sql(
        """SELECT 'Ab' COLLATE UTF8_LCASE AS s, map('k', array('é' COLLATE UNICODE_CI)) AS m, INTERVAL '3' DAY AS d,
        named_struct('h', INTERVAL '5' HOUR) AS h, TIME'12:00:00' :: time(0) AS t, parse_json('{"a": [1, "x"]}') AS v"""
    ).withColumn("vector", array_to_vector(array(lit(1.5), lit(2.0))))
    write(df, "data", catalog)
    for jvm in (True, False):
        use_jvm(jvm)
        found = read(spark, "data", catalog)
        assert found.schema == df.schema
        assert found.drop("v").collect() == df.drop("v").collect()
        assert found.selectExpr("to_json(v) AS v").first() == ('{"a":[1,"x"]}',)
        assert found.where("s = 'aB'").count() == 1


def test_a_mode_that_is_none(spark: SparkSession, catalog: str) -> None:
    with pytest.raises(OptionError, match="the mode 'ignore' is neither overwrite nor append"):
        publish(spark.range(1), "x", catalog, mode="ignore")


def test_a_guarded_catalog(spark: SparkSession, certified: Certificates, tmp_path: Path, write: Write) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("sesame\n")
    with dis.Server(
        ["shm:"], catalog="grpc+tls://127.0.0.1:0", authorize={"sesame": ("ali", "write")}, **certified.options
    ) as server:
        with pytest.raises((PySparkException, DissociatedError), match="requires a token"):
            write(spark.range(10), "numbers", server.catalog_uri, tls_roots=certified.roots)
        assert server.names() == []
        write(spark.range(10), "numbers", server.catalog_uri, tls_roots=certified.roots, token_file=str(token_file))
        with dis.connect(server.catalog_uri, token="sesame", tls_roots=certified.roots) as client:
            assert client.read("numbers").read_all()["id"].to_pylist() == [*range(10)]
