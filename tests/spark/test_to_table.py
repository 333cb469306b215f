"""Streams into tables of the catalog plug-in. Spark leaves the check of their columns to the table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException

import dissociated as dis

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SENT = pa.table({"b": [100, 101, 102], "a": [0, 1, 2], "text": ["x", "long", None]})


@pytest.fixture
def sent(spark: SparkSession, client: dis.Client, catalog: str) -> DataFrame:
    """Return a stream of `SENT`."""
    client.put("sent", SENT)
    return spark.readStream.format("dissociated").option("catalog", catalog).load("sent")


def run(df: DataFrame, table: str, checkpoint: Path, mode: str = "append") -> None:
    writer = df.writeStream.outputMode(mode).trigger(availableNow=True).option("checkpointLocation", str(checkpoint))
    assert writer.toTable(table).awaitTermination(200)


def test_columns_go_by_their_names_and_nulls_are_refused(
    spark: SparkSession, ours: str, sent: DataFrame, client: dis.Client, tmp_path: Path
) -> None:
    expected = SENT.select(["a", "b"]).to_pylist()
    run(sent.select("b", "a"), f"{ours}.new", tmp_path / "new")
    assert client.read("new").read_all().to_pylist() == SENT.select(["b", "a"]).to_pylist()
    spark.sql(f"CREATE TABLE {ours}.t (a BIGINT, b BIGINT)")
    run(sent.select("b", "a"), f"{ours}.t", tmp_path / "t")
    assert client.read("t").read_all().to_pylist() == expected
    spark.sql(f"CREATE TABLE {ours}.strict (text STRING NOT NULL, a BIGINT)")
    with pytest.raises(PySparkException, match="column 'text' is null in a row that is written to 'strict'"):
        run(sent.select("a", "text"), f"{ours}.strict", tmp_path / "strict")
    assert client.read("strict").read_all().num_rows == 0


@pytest.mark.parametrize(
    ("mode", "table", "columns", "message"),
    [
        ("append", "a BIGINT, b BIGINT", ["a"], "there is no column 'b': add it"),
        ("append", "a STRING", ["a"], "column 'a' is int64, not string: cast it"),
        ("complete", "a DOUBLE", ["a"], "column 'a' is int64, not double: cast it"),
        ("complete", "text VARCHAR(3)", ["text"], r"is string, not varchar\(3\): append it by DataFrame.writeTo"),
    ],
)
def test_rows_that_do_not_fit_are_refused(
    spark: SparkSession,
    ours: str,
    sent: DataFrame,
    client: dis.Client,
    tmp_path: Path,
    mode: str,
    table: str,
    columns: list[str],
    message: str,
) -> None:
    spark.sql(f"CREATE TABLE {ours}.t ({table})")
    rows = sent.select(columns) if mode == "append" else sent.groupBy(columns).count().select(columns)
    with pytest.raises(PySparkException, match=message):
        run(rows, f"{ours}.t", tmp_path / "t", mode)
    assert client.read("t").read_all().num_rows == 0


def test_complete_mode_keeps_the_columns_of_the_table(
    spark: SparkSession, ours: str, sent: DataFrame, client: dis.Client, tmp_path: Path
) -> None:
    spark.sql(f"CREATE TABLE {ours}.t (a BIGINT NOT NULL, n BIGINT)")
    before = client.describe("t").schema
    run(sent.groupBy("a").count().selectExpr("count AS n", "a"), f"{ours}.t", tmp_path / "t", "complete")
    assert client.describe("t").schema.equals(before, check_metadata=True)
    assert client.read("t").read_all().sort_by("a").to_pylist() == [{"a": n, "n": 1} for n in range(3)]
