"""Spark's catalog plug-in: SQL with dataset names."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from pyspark.errors import PySparkException

import dissociated as dis

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_datasets_are_tables(spark: SparkSession, catalog: str, client: dis.Client) -> None:
    spark.conf.set("spark.sql.catalog.ours", "org.apache.spark.sql.dissociated.DatasetCatalog")
    spark.conf.set("spark.sql.catalog.ours.catalog", catalog)

    def names() -> list[str]:
        return sorted(row.tableName for row in spark.sql("SHOW TABLES IN ours").collect())

    assert names() == []
    spark.sql("CREATE TABLE ours.flights (number BIGINT, dest STRING NOT NULL)")
    assert client.read("flights").read_all().num_rows == 0
    assert [tuple(row)[:2] for row in spark.sql("DESCRIBE ours.flights").collect()] == [
        ("number", "bigint"),
        ("dest", "string"),
    ]
    spark.sql("INSERT INTO ours.flights VALUES (1, 'Oslo'), (2, 'Rome')")
    spark.sql("INSERT INTO ours.flights (dest, number) SELECT concat('to ', id), id FROM range(3, 5)")
    found = spark.sql("SELECT dest FROM ours.flights WHERE number > 1 ORDER BY number").collect()
    assert [row.dest for row in found] == ["Rome", "to 3", "to 4"]
    spark.sql("INSERT OVERWRITE ours.flights VALUES (7, 'Bern')")
    assert client.read("flights").read_all().to_pylist() == [{"number": 7, "dest": "Bern"}]
    spark.sql("CREATE TABLE ours.far AS SELECT number + 1 AS number FROM ours.flights")
    spark.table("ours.flights").writeTo("ours.near").create()
    spark.range(3).write.mode("append").saveAsTable("ours.`with.dots`")
    assert client.read("far").read_all().to_pylist() == [{"number": 8}]
    assert client["with.dots"].count_rows() == 3
    with pytest.raises(PySparkException, match="no partitions by columns"):
        spark.sql("CREATE TABLE ours.parted (n INT) PARTITIONED BY (n)")
    with pytest.raises(PySparkException, match="already exists"):
        spark.sql("CREATE TABLE ours.far AS SELECT 1 AS number")
    spark.sql("CREATE OR REPLACE TABLE ours.far AS SELECT 'x' AS letter")
    assert client.read("far").read_all().to_pylist() == [{"letter": "x"}]
    spark.sql("CREATE OR REPLACE TABLE ours.near (n INT)")
    assert client.read("near").read_all().schema.names == ["n"]
    spark.range(5).write.mode("ignore").saveAsTable("ours.far")
    assert spark.table("ours.far").count() == 1
    assert names() == ["far", "flights", "near", "with.dots"]
    spark.sql("DROP TABLE ours.far")
    assert names() == ["flights", "near", "with.dots"]
    with pytest.raises(PySparkException, match="cannot be found"):
        spark.table("ours.far")
