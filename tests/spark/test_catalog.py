"""Spark's catalog plug-in: SQL with dataset names."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException

import dissociated as dis
from dissociated.catalog.local import LocalCatalog
from dissociated.control.commit import Commit
from dissociated.node.node import Node
from dissociated.store.store import Store
from spark.conftest import plug_in

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def kept(spark: SparkSession, memory: Path) -> Iterator[str]:
    """Return the name of a catalog of Spark's with the tables of a node, which keeps replaced versions."""
    with Node(Store(memory / "store"), ["shm:"], flight="grpc://127.0.0.1:0") as node:
        yield plug_in(spark, node.uri)


def rows(spark: SparkSession, statement: str) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in spark.sql(statement).collect()]


def test_datasets_are_tables(spark: SparkSession, ours: str, client: dis.Client) -> None:
    def names() -> list[str]:
        return sorted(row.tableName for row in spark.sql(f"SHOW TABLES IN {ours}").collect())

    assert names() == []
    spark.sql(f"CREATE TABLE {ours}.flights (number BIGINT, dest STRING NOT NULL)")
    assert client.read("flights").read_all().num_rows == 0
    assert [tuple(row)[:2] for row in spark.sql(f"DESCRIBE {ours}.flights").collect()] == [
        ("number", "bigint"),
        ("dest", "string"),
    ]
    spark.sql(f"INSERT INTO {ours}.flights VALUES (1, 'Oslo'), (2, 'Rome')")
    spark.sql(f"INSERT INTO {ours}.flights (dest, number) SELECT concat('to ', id), id FROM range(3, 5)")
    found = spark.sql(f"SELECT dest FROM {ours}.flights WHERE number > 1 ORDER BY number").collect()
    assert [row.dest for row in found] == ["Rome", "to 3", "to 4"]
    spark.sql(f"INSERT OVERWRITE {ours}.flights VALUES (7, 'Bern')")
    assert client.read("flights").read_all().to_pylist() == [{"number": 7, "dest": "Bern"}]
    spark.sql(f"CREATE TABLE {ours}.far AS SELECT number + 1 AS number FROM {ours}.flights")
    spark.table(f"{ours}.flights").writeTo(f"{ours}.near").create()
    spark.range(3).write.mode("append").saveAsTable(f"{ours}.`with.dots`")
    assert client.read("far").read_all().to_pylist() == [{"number": 8}]
    assert client["with.dots"].count_rows() == 3
    with pytest.raises(PySparkException, match="flights cannot be altered: replace it by CREATE OR REPLACE TABLE"):
        spark.sql(f"ALTER TABLE {ours}.flights ADD COLUMN n INT")
    with pytest.raises(PySparkException, match="no partitions by columns"):
        spark.sql(f"CREATE TABLE {ours}.parted (n INT) PARTITIONED BY (n)")
    with pytest.raises(PySparkException, match="already exists"):
        spark.sql(f"CREATE TABLE {ours}.far AS SELECT 1 AS number")
    spark.sql(f"CREATE OR REPLACE TABLE {ours}.far AS SELECT 'x' AS letter")
    spark.sql(f"CREATE OR REPLACE TABLE {ours}.far AS SELECT letter, 1 AS n FROM {ours}.far")
    assert client.read("far").read_all().to_pylist() == [{"letter": "x", "n": 1}]
    spark.sql(f"CREATE OR REPLACE TABLE {ours}.near (n INT)")
    assert client.read("near").read_all().schema.names == ["n"]
    spark.range(5).write.mode("ignore").saveAsTable(f"{ours}.far")
    assert spark.table(f"{ours}.far").count() == 1
    assert names() == ["far", "flights", "near"]
    assert rows(spark, f"SHOW TABLES IN {ours}.with") == [("with", "dots", False)]
    spark.sql(f"DROP TABLE {ours}.far")
    assert names() == ["flights", "near"]
    with pytest.raises(PySparkException, match="cannot be found"):
        spark.table(f"{ours}.far")


def test_a_catalog_without_a_uri_is_the_one_of_the_session(
    spark: SparkSession, catalog: str, client: dis.Client
) -> None:
    name = plug_in(spark)
    spark.conf.set("spark.dissociated.catalog", catalog)
    try:
        spark.sql(f"CREATE TABLE {name}.t AS SELECT 1 AS n")
        spark.conf.set("spark.dissociated.catalog", "grpc://127.0.0.1:1")
        spark.sql(f"INSERT INTO {name}.t VALUES (2)")
        assert sorted(rows(spark, f"SELECT * FROM {name}.t")) == [(1,), (2,)]
    finally:
        spark.conf.unset("spark.dissociated.catalog")
    assert client["t"].count_rows() == 2
    spark.conf.set(f"spark.sql.catalog.{name}_wrong", "org.apache.spark.sql.dissociated.DatasetCatalog")
    spark.conf.set(f"spark.sql.catalog.{name}_wrong.uri", catalog)
    with pytest.raises(PySparkException, match=r"no setting spark.sql.catalog.NAME.uri; after NAME .* catalog, "):
        spark.sql(f"SHOW TABLES IN {name}_wrong")


def test_a_view_of_a_table_reads_the_current_version(spark: SparkSession, kept: str) -> None:
    spark.sql(f"CREATE TABLE {kept}.t AS SELECT 1 AS n")
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW latest AS SELECT * FROM {kept}.t")
    queried = spark.table("latest")
    assert queried.collect() == [(1,)]
    spark.sql(f"INSERT INTO {kept}.t VALUES (2)")
    assert rows(spark, "SELECT a.n FROM latest a JOIN latest b ON a.n = b.n ORDER BY 1") == [(1,), (2,)]
    assert queried.collect() == [(1,)]  # a DataFrame stays at its version
    spark.catalog.dropTempView("latest")


def test_a_table_keeps_its_comment_and_properties(spark: SparkSession, ours: str, client: dis.Client) -> None:
    spark.sql(f"CREATE TABLE {ours}.t (n INT COMMENT 'a number') COMMENT 'of mine' TBLPROPERTIES ('team' = 'x')")
    spark.sql(f"INSERT INTO {ours}.t VALUES (1)")
    spark.sql(f"INSERT OVERWRITE {ours}.t VALUES (2)")
    assert client.describe("t").tags == {"comment": "of mine", "team": "x"}
    assert rows(spark, f"SHOW TBLPROPERTIES {ours}.t") == [("team", "x")]
    described = [row[:2] for row in rows(spark, f"DESCRIBE EXTENDED {ours}.t")]
    assert {("Comment", "of mine"), ("Provider", "dissociated"), ("Table Properties", "[team=x]")} <= {*described}
    assert rows(spark, f"DESCRIBE {ours}.t") == [("n", "int", "a number")]
    spark.sql(f"CREATE TABLE {ours}.copied TBLPROPERTIES ('team' = 'y') AS SELECT * FROM {ours}.t")
    assert client.describe("copied").tags == {"team": "y"}
    spark.range(1).writeTo(f"{ours}.both").tableProperty("team", "z").option("tags", "year=2026").create()
    assert client.describe("both").tags == {"team": "z", "year": "2026"}
    spark.sql(f"TRUNCATE TABLE {ours}.t")
    assert client.describe("t").tags == {"comment": "of mine", "team": "x"}
    assert client["t"].count_rows() == 0


@pytest.mark.parametrize(
    ("clause", "named"),
    [
        ("(n INT) USING parquet", "USING parquet"),
        ("USING parquet AS SELECT 1 AS n", "USING parquet"),
        ("(n INT) USING orc", "USING orc"),
        ("(n INT) OPTIONS (compression 'zstd')", "OPTIONS"),
        ("(n INT) USING dissociated OPTIONS (compression 'zstd')", "OPTIONS"),
        ("(n INT) LOCATION '/somewhere'", "LOCATION"),
        ("(n INT) CLUSTER BY (n)", "no partitions by columns"),
        ("(n INT DEFAULT 3)", "column default value"),
        ("(n INT PRIMARY KEY)", "table constraint"),
    ],
)
def test_a_table_refuses_what_it_cannot_keep(
    spark: SparkSession, ours: str, client: dis.Client, clause: str, named: str
) -> None:
    with pytest.raises(PySparkException, match=named):
        spark.sql(f"CREATE TABLE {ours}.t {clause}")
    assert "t" not in client


def test_kept_versions_are_read_by_number_and_by_time(spark: SparkSession, kept: str) -> None:
    spark.sql(f"CREATE TABLE {kept}.t AS SELECT 1 AS n")
    spark.sql(f"INSERT INTO {kept}.t VALUES (2)")
    between = datetime.now(UTC).isoformat()
    spark.sql(f"CREATE OR REPLACE TABLE {kept}.t AS SELECT 'three' AS word")
    assert rows(spark, f"SELECT * FROM {kept}.t VERSION AS OF 1") == [(1,)]
    assert sorted(rows(spark, f"SELECT * FROM {kept}.t VERSION AS OF 2")) == [(1,), (2,)]
    assert rows(spark, f"SELECT * FROM {kept}.t VERSION AS OF 3") == [("three",)]
    assert spark.read.option("versionAsOf", 1).table(f"{kept}.t").collect() == [(1,)]
    assert rows(spark, f"SELECT sum(n) FROM {kept}.t TIMESTAMP AS OF '{between}'") == [(3,)]
    assert rows(spark, f"SELECT * FROM {kept}.t TIMESTAMP AS OF current_timestamp()") == [("three",)]
    with pytest.raises(PySparkException, match=r"no version 7 .*Versions that are kept: 1 of .*, 2 of .*, 3 of "):
        spark.sql(f"SELECT * FROM {kept}.t VERSION AS OF 7")
    with pytest.raises(PySparkException, match=r"at 2020-01-01 .* is not kept.* 1 of "):
        spark.sql(f"SELECT * FROM {kept}.t TIMESTAMP AS OF '2020-01-01T12:00:00Z'")
    with pytest.raises(PySparkException, match="cannot be found"):
        spark.sql(f"SELECT * FROM {kept}.other VERSION AS OF 1")


def test_a_moment_whose_version_may_be_gone_is_refused(spark: SparkSession, ours: str, client: dis.Client) -> None:
    """The server keeps a replaced version only while a client reads it."""
    client.put("t", pa.table({"n": [1]}))
    with client.read("t", transport="shm") as reader:
        spark.sql(f"INSERT OVERWRITE {ours}.t VALUES (2)")
        between = datetime.now(UTC).isoformat()
        spark.sql(f"INSERT OVERWRITE {ours}.t VALUES (3)")
        assert [one["version"] for one in client.versions("t")][-1] == 3
        with pytest.raises(PySparkException, match="is not kept"):
            spark.sql(f"SELECT * FROM {ours}.t TIMESTAMP AS OF '{between}'")
        assert reader.read_all().to_pydict() == {"n": [1]}


def test_namespaces_are_the_beginnings_of_names(spark: SparkSession, ours: str, client: dis.Client) -> None:
    def namespaces(of: str = "") -> list[str]:
        return sorted(row.namespace for row in spark.sql(f"SHOW NAMESPACES IN {ours}{of}").collect())

    client.put(".odd..name", pa.table({"n": [1]}))
    assert namespaces() == []
    spark.sql(f"CREATE NAMESPACE {ours}.new")
    spark.sql(f"CREATE NAMESPACE IF NOT EXISTS {ours}.new")
    with pytest.raises(PySparkException, match="already exists"):
        spark.sql(f"CREATE NAMESPACE {ours}.new")
    with pytest.raises(PySparkException, match="has no properties"):
        spark.sql(f"CREATE NAMESPACE {ours}.other COMMENT 'mine'")
    assert rows(spark, f"SHOW TABLES IN {ours}.new") == []
    spark.sql(f"CREATE TABLE {ours}.a.b.t AS SELECT 1 AS n")
    assert (namespaces(), namespaces(".a")) == (["a", "new"], ["a.b"])
    assert rows(spark, f"SHOW TABLES IN {ours}.a.b") == [("a.b", "t", False)]
    assert [row[1] for row in rows(spark, f"SHOW TABLES IN {ours}")] == [".odd..name"]
    assert client.read("a.b.t").read_all().to_pydict() == {"n": [1]}
    with pytest.raises(PySparkException, match="cannot be found"):
        spark.sql(f"SHOW TABLES IN {ours}.none")
    with pytest.raises(PySparkException, match="contains objects"):
        spark.sql(f"DROP NAMESPACE {ours}.a")
    spark.sql(f"DROP NAMESPACE {ours}.a CASCADE")
    spark.sql(f"DROP NAMESPACE {ours}.new")
    assert namespaces() == []
    assert [info.name for info in client.list()] == [".odd..name"]


def test_a_dynamic_overwrite_replaces_the_table(spark: SparkSession, ours: str, client: dis.Client) -> None:
    """A table without partitions is one partition."""
    spark.range(3).writeTo(f"{ours}.t").create()
    spark.conf.set("spark.sql.sources.partitionOverwriteMode", "dynamic")
    try:
        spark.sql(f"INSERT OVERWRITE {ours}.t VALUES (7)")
        assert client.read("t").read_all().to_pydict() == {"id": [7]}
        spark.range(1).write.mode("overwrite").insertInto(f"{ours}.t")
        assert client.read("t").read_all().to_pydict() == {"id": [0]}
    finally:
        spark.conf.unset("spark.sql.sources.partitionOverwriteMode")
    spark.range(2).writeTo(f"{ours}.t").overwritePartitions()
    assert client["t"].count_rows() == 2


def test_explain_tells_the_version_and_what_is_pushed(
    spark: SparkSession, ours: str, client: dis.Client, capsys: pytest.CaptureFixture[str]
) -> None:
    client.put("t", pa.table({"n": [1, 2], "s": ["a", "b"], "unread": [0.0, 0.0]}))
    spark.table(f"{ours}.t").where("n > 1 AND s IN ('a', 'b')").select("s").explain()
    said = capsys.readouterr().out
    assert "dissociated t, version 1, partitions 1, columns [n, s], pushed filters [" in said
    for part in ("n > 1", "s IN (a, b)"):
        assert part in said
    spark.table(f"{ours}.t").limit(1).explain()
    assert "partitions 1, columns [n, s, unread], pushed filters [], limit 1" in capsys.readouterr().out


def test_an_error_is_not_said_to_be_of_python(spark: SparkSession, catalog: str) -> None:
    with pytest.raises(PySparkException) as error:
        spark.read.format("dissociated").option("catalog", catalog).load("none").collect()
    assert "no dataset 'none'" in str(error.value)
    assert "Python data source" not in str(error.value)
    assert error.value.getCondition() == "DATA_SOURCE_EXTERNAL_ERROR"


def test_columns_that_differ_in_case_are_read(spark: SparkSession, catalog: str, ours: str) -> None:
    both = spark.sql("SELECT 1 AS a, 2 AS A, 5 AS b UNION ALL SELECT 3, 4, 6")
    both.write.format("dissociated").option("catalog", catalog).mode("overwrite").save("t")
    found = spark.table(f"{ours}.t").toDF("lower", "upper", "b")
    assert sorted(found.collect()) == [(1, 2, 5), (3, 4, 6)]
    assert found.where("lower = 1 AND upper = 2 AND b > 0").collect() == [(1, 2, 5)]
    assert sorted(found.select("upper").collect()) == [(2,), (4,)]
    assert found.where("upper = 3").collect() == []


def test_columns_that_differ_in_case_may_have_different_types(
    spark: SparkSession, catalog: str, ours: str, client: dis.Client
) -> None:
    structs = [{"p": n, "q": {"r": str(n)}} for n in range(3)]
    client.put("t", pa.table({"a": range(3), "A": ["x", "y", None], "b": structs, "B": [1.5, None, 2.5]}))
    found = spark.table(f"{ours}.t").toDF("a", "x", "b", "y")
    assert found.select("x", "a").collect() == [("x", 0), ("y", 1), (None, 2)]
    assert found.select("x").collect() == [("x",), ("y",), (None,)]
    assert found.where("x = 'y'").selectExpr("a", "b.q.r", "y").collect() == [(1, "1", None)]
    assert found.where("b.q.r = '2' AND y > 0").selectExpr("x", "b.p").collect() == [(None, 2)]
    assert found.where("a > 1 AND x IS NULL").collect() == [(2, None, (2, ("2",)), 2.5)]


def test_tables_that_differ_in_case_are_not_confused(spark: SparkSession, kept: str) -> None:
    spark.sql(f"CREATE TABLE {kept}.a AS SELECT 1 AS x")
    with pytest.raises(PySparkException, match="TABLE_OR_VIEW_NOT_FOUND"):
        spark.table(f"{kept}.A")
    spark.sql(f"CREATE TABLE {kept}.A AS SELECT 100 AS x")
    both = f"SELECT s.x, t.x FROM {kept}.a s, {kept}.A t"
    assert rows(spark, both) == [(1, 100)]
    assert rows(spark, f"FROM {kept}.a UNION ALL FROM {kept}.A") == [(1,), (100,)]
    assert rows(spark, f"WITH v AS (FROM {kept}.A) SELECT a.x, v.x FROM {kept}.a, v") == [(1, 100)]
    spark.sql(f"CACHE TABLE {kept}.a")
    assert rows(spark, both) == [(1, 100)]
    spark.sql(f"INSERT INTO {kept}.A VALUES (200)")
    assert rows(spark, f"FROM {kept}.A ORDER BY x") == [(100,), (200,)]
    assert rows(spark, f"FROM {kept}.a") == [(1,)]
    spark.sql(f"UNCACHE TABLE {kept}.a")
    spark.sql(f"DROP TABLE {kept}.A")
    assert rows(spark, f"FROM {kept}.a") == [(1,)]


def test_types_that_only_spark_has_are_kept(spark: SparkSession, ours: str, client: dis.Client) -> None:
    columns = {
        "c": "char(5)",
        "v": "varchar(3)",
        "i": "interval year to month",
        "y": "interval year",
        "a": "array<void>",
    }
    spark.sql(f"CREATE TABLE {ours}.t ({', '.join(f'{name} {type_}' for name, type_ in columns.items())})")
    spark.sql(f"INSERT INTO {ours}.t VALUES ('ab', 'abc', INTERVAL '1-2' YEAR TO MONTH, INTERVAL '3' YEAR, array())")
    spark.sql(f"INSERT INTO {ours}.t VALUES (null, null, null, null, null)")
    spark.sql(f"CREATE TABLE {ours}.copied AS SELECT * FROM {ours}.t")
    for table in ("t", "copied"):
        assert {row[0]: row[1] for row in rows(spark, f"DESCRIBE {ours}.{table}")} == columns
        assert rows(
            spark, f"SELECT c, v, CAST(i AS STRING), CAST(y AS STRING), a FROM {ours}.{table} WHERE c = 'ab'"
        ) == [("ab   ", "abc", "INTERVAL '1-2' YEAR TO MONTH", "INTERVAL '3' YEAR", [])]
        assert client.read(table).read_all()["i"].to_pylist() == [14, None]
    for after in ("> INTERVAL '1-1'", "= INTERVAL '1-2'"):
        assert rows(spark, f"SELECT v FROM {ours}.t WHERE i {after} YEAR TO MONTH") == [("abc",)]
    for values in ("'abcdef', 'a'", "'a', 'abcd'"):
        with pytest.raises(PySparkException, match="Exceeds char/varchar type length limitation"):
            spark.sql(f"INSERT INTO {ours}.t (c, v) VALUES ({values})")


@pytest.mark.usefixtures("plans")
def test_rows_are_deleted_changed_and_merged_by_overwriting(spark: SparkSession, kept: str) -> None:
    """The recipes of docs/spark.md, which do not change rows whose condition is null."""
    flights, changes = f"{kept}.flights", f"{kept}.changes"

    def found() -> list[tuple[Any, ...]]:
        return sorted(rows(spark, f"SELECT * FROM {flights}"), key=str)

    spark.sql(
        f"CREATE TABLE {flights} AS SELECT * FROM VALUES (70, 'a'), (-5, 'b'), (null, 'c'), (9, 'd') AS t(n, key)"
    )
    for statement, recipe in {
        f"DELETE FROM {flights} WHERE n > 60": r"SELECT \* FROM .* WHERE \(CONDITION\) IS NOT TRUE",
        f"UPDATE {flights} SET n = 0 WHERE n < 0": r"SELECT \* EXCEPT \(COLUMN\), IF\(CONDITION, VALUE, COLUMN\)",
        f"MERGE INTO {flights} f USING {flights} g ON f.key = g.key WHEN MATCHED THEN DELETE": "LEFT ANTI JOIN CHANGES",
    }.items():
        with pytest.raises(PySparkException, match=f"INSERT OVERWRITE {flights} BY NAME .*{recipe}"):
            spark.sql(statement)
    assert len(found()) == 4
    spark.sql(f"INSERT OVERWRITE {flights} BY NAME SELECT * FROM {flights} WHERE (n > 60) IS NOT TRUE")
    assert found() == [(-5, "b"), (9, "d"), (None, "c")]
    spark.sql(f"INSERT OVERWRITE {flights} BY NAME SELECT * EXCEPT (n), IF(n < 0, 0, n) AS n FROM {flights}")
    assert found() == [(0, "b"), (9, "d"), (None, "c")]
    spark.sql(f"CREATE TABLE {changes} AS SELECT * FROM VALUES ('c', 3), ('e', 5) AS t(key, n)")
    spark.sql(
        f"INSERT OVERWRITE {flights} BY NAME SELECT key, n FROM {flights} LEFT ANTI JOIN {changes} USING (key) "
        f"UNION ALL SELECT key, n FROM {changes}"
    )
    assert found() == [(0, "b"), (3, "c"), (5, "e"), (9, "d")]
    assert len(rows(spark, f"SELECT * FROM {flights} VERSION AS OF 1")) == 4
    spark.sql(f"DELETE FROM {flights}")
    assert found() == []


def test_a_table_is_created_or_replaced_only_as_it_was_found(
    spark: SparkSession, ours: str, client: dis.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program creates or drops the dataset after Spark has looked for it, and before its commit."""
    commit = LocalCatalog.commit
    precious = pa.schema({"precious": pa.int64()})

    def commit_late(catalog: LocalCatalog, requested: Commit) -> None:
        name = requested.name
        if name.startswith("created"):
            commit(catalog, Commit(name, schema=precious))
        else:
            catalog.drop(name)
        commit(catalog, requested)

    for name in ("dropped", "dropped2", "dropped3"):
        spark.sql(f"CREATE TABLE {ours}.{name} (n INT)")
    monkeypatch.setattr(LocalCatalog, "commit", commit_late)
    for statement in (
        f"CREATE TABLE {ours}.created AS SELECT 1 AS n",
        f"CREATE TABLE IF NOT EXISTS {ours}.created2 (n INT)",
    ):
        with pytest.raises(PySparkException, match=r"'created2?' has been created meanwhile, so nothing was written"):
            spark.sql(statement)
    with pytest.raises(PySparkException, match="'created3' has been created meanwhile"):
        spark.range(3).write.saveAsTable(f"{ours}.created3")
    for statement in (
        f"REPLACE TABLE {ours}.dropped AS SELECT 1 AS n",
        f"REPLACE TABLE {ours}.dropped2 (n INT)",
        f"TRUNCATE TABLE {ours}.dropped3",
    ):
        with pytest.raises(PySparkException, match=r"'dropped\d?' does not exist any more, so nothing was replaced"):
            spark.sql(statement)
    spark.sql(f"CREATE OR REPLACE TABLE {ours}.created4 AS SELECT 1 AS n")
    assert client.read("created4").read_all().to_pylist() == [{"n": 1}]
    assert {info.name: info.schema for info in client.list() if info.name != "created4"} == dict.fromkeys(
        ("created", "created2", "created3"), precious
    )
