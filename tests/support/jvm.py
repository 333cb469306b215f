"""Spark's JVM. PySpark has no public way to it, so only this file uses PySpark's private attributes."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def jvm(spark: SparkSession) -> Any:
    """Return the packages and classes of the Java process of `spark`."""
    return spark._jvm


def java_pid(spark: SparkSession) -> int:
    """Return the process ID of the Java process of `spark`."""
    return int(jvm(spark).java.lang.ProcessHandle.current().pid())


def java_process(spark: SparkSession) -> subprocess.Popen[bytes]:
    """Return the Java process of `spark`, which ends when its standard input is closed."""
    gateway = spark.sparkContext._gateway
    assert gateway is not None
    process: subprocess.Popen[bytes] = gateway.proc
    return process


def executed_plan(df: DataFrame) -> Any:
    """Return the physical plan that Spark executes for `df`."""
    return df._jdf.queryExecution().executedPlan()


def evict_cached_data(spark: SparkSession) -> None:
    """Remove all cached partitions of all DataFrames, as Spark does if it needs the memory."""
    for identifier in spark.sparkContext._jsc.getPersistentRDDs():
        spark.sparkContext._jsc.sc().unpersistRDD(identifier, True)
