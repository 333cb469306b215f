"""Writing by `publish` and `df.write`: how long a job waits, and clauses that a dataset cannot keep."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException

import dissociated as dis
from dissociated.errors import OptionError
from dissociated.spark import publish, read
from support.processes import Start

from .conftest import IN_JVM

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_the_time_to_wait_for_a_lost_catalog_is_an_argument(spark: SparkSession, start: Start, memory: Path) -> None:
    """The catalog and its node are killed by a task, so the commit reaches neither."""
    node = start("node", "--store", memory / "store")
    pid = node.pid

    def kill(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches
        os.kill(pid, signal.SIGKILL)

    df = spark.range(0, 10, numPartitions=1).mapInArrow(kill, "id long")
    with pytest.raises(Exception, match=r"(?i)catalog"):
        publish(df, "numbers", node.uri, wait=0)
    with pytest.raises(OptionError, match="the option wait is a number of seconds"):
        publish(spark.range(1), "numbers", node.uri, wait=-1)
    with pytest.raises(Exception, match="the option wait is a number of seconds"):
        read(spark, "numbers", node.uri, wait="soon")


@pytest.mark.skipif(IN_JVM == "false", reason="Spark does not tell the data source in Python")
def test_partitions_by_columns_are_refused(spark: SparkSession, catalog: str, client: dis.Client) -> None:
    writer = spark.range(10).write.format("dissociated").option("catalog", catalog).mode("overwrite")
    with pytest.raises(PySparkException, match="a dataset has no partitions by columns: leave them out, and sort"):
        writer.partitionBy("id").save("numbers")
    assert client.list() == []
