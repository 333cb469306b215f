"""Code on the pages, and in docstrings, that uses a Spark session: it runs exactly as printed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dissociated.node.node import Node
from dissociated.spark import publish
from dissociated.store.store import Store
from support.pages import PAGES, Reader, blocks, examples

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RUN = [page for page in PAGES if any(block.is_spark and not block.not_run for block in blocks(page))]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", RUN, ids=lambda page: page.stem)
def test_the_code_on_a_page_runs(page: Path, spark: SparkSession, memory: Path, tmp_path: Path) -> None:
    flights = spark.createDataFrame(
        [("JFK", "IAH", 70.0), ("LGA", "ORD", 2.0)], "origin string, dest string, dep_delay double"
    )
    with Node(Store(memory / "store"), ["shm:", "tcp://127.0.0.1:0"], flight="grpc://127.0.0.1:0") as node:
        for name in ("clicks", "events"):
            publish(flights, name, node.uri)
        events = spark.readStream.format("dissociated").option("catalog", node.uri).load("clicks")
        given = {"spark": spark, "df": flights, "uri": node.uri, "events": events, "directory": str(tmp_path)}
        with Reader(tmp_path, given, node.uri) as reader:
            try:
                reader.run(block for block in blocks(page) if block.is_spark)
            finally:
                for query in spark.streams.active:
                    query.stop()


def test_the_examples_of_docstrings_run(spark: SparkSession, memory: Path, tmp_path: Path) -> None:
    found = [example.block for example in examples() if example.block.page.parent.name == "spark"]
    assert len(found) >= 3
    with Node(Store(memory / "store"), ["shm:", "tcp://127.0.0.1:0"], flight="grpc://127.0.0.1:0") as node:
        publish(spark.createDataFrame([("IAH",), ("ORD",)], "dest string"), "flights", node.uri)
        with Reader(tmp_path, {"catalog": node.uri, "spark": spark}, node.uri) as reader:
            reader.run(found)
