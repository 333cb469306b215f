"""Memory in which Spark's tasks hand rows to the driver, in `to_arrow`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from dissociated.spark import to_arrow
from support.helpers import wait_until

from .conftest import IN_JVM
from .processes import descendants, function_memory

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.skipif(IN_JVM == "false", reason="Spark's own toArrow stands in")


def nothing_is_left() -> None:
    wait_until(lambda: not function_memory(descendants(os.getpid())), "Spark's processes hold no rows")


def test_only_the_table_holds_its_memory(spark: SparkSession) -> None:
    table = to_arrow(spark.range(0, 1_000_000, numPartitions=3))
    nothing_is_left()
    assert function_memory({os.getpid()}) >= table.nbytes == 8_000_000
    assert table["id"].combine_chunks().equals(pa.array(range(1_000_000), pa.int64()))
    del table
    assert function_memory({os.getpid()}) == 0


def test_nothing_is_left_of_a_job_that_fails(spark: SparkSession) -> None:
    df = spark.range(0, 600_000, numPartitions=2).selectExpr("id", "1 / IF(id = 599999, 0, 1) AS quotient")
    with pytest.raises(Exception, match="DIVIDE_BY_ZERO"):
        to_arrow(df)
    nothing_is_left()
    assert to_arrow(df.where("id < 599999")).num_rows == 599_999


def test_rows_may_be_large_and_partitions_skewed(spark: SparkSession) -> None:
    df = spark.range(0, 40, numPartitions=8).selectExpr("id", "repeat('x', IF(id = 39, 20000000, 3)) AS text")
    table = to_arrow(df.where("id > 30"))
    assert table["id"].to_pylist() == [*range(31, 40)]
    assert [len(text) for text in table["text"].to_pylist()] == [*[3] * 8, 20_000_000]
