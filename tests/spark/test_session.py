from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.spark import session

from .test_quickstart import PROGRAM, RESULT

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_batches_are_not_measured_after_every_row(spark: SparkSession) -> None:
    assert spark.conf.get("spark.sql.execution.arrow.maxBytesPerBatch") == "2147483647"


def test_the_environment_is_as_it_was(spark: SparkSession) -> None:
    assert "SPARK_LOCAL_IP" not in os.environ


def test_a_running_session_is_taken_and_told_the_settings(spark: SparkSession) -> None:
    settings: dict[str, Any] = {"spark.sql.shuffle.partitions": 2}
    assert session("again", **settings) is spark


def test_a_name_that_is_no_setting_is_refused() -> None:
    """Spark would ignore it, and the program would use another catalog than its author meant."""
    settings: Any = {"conf": {"spark.dissociated.catalog": "grpc://127.0.0.1:1"}}
    with pytest.raises(TypeError, match=r"spark\.driver\.memory"):
        session(**settings)


def test_the_variable_with_the_catalog_becomes_a_setting(
    spark: SparkSession, catalog: str, client: dis.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The JVM was started without the variable."""
    client.put("numbers", pa.table({"n": [7]}))
    monkeypatch.setenv("DISSOCIATED_CATALOG", catalog)
    try:
        session("again")
        assert spark.read.format("dissociated").load("numbers").collect() == [(7,)]
    finally:
        spark.conf.unset("spark.dissociated.catalog")


def test_a_thread_that_takes_it_has_it(spark: SparkSession) -> None:
    """The session is active in that thread, so that Spark finds Python data sources there."""

    def active() -> SparkSession | None:
        session("again")
        return type(spark).getActiveSession()

    with ThreadPoolExecutor(1) as other:
        assert other.submit(active).result() is not None


def test_settings_of_the_caller_win(spark: SparkSession) -> None:
    conf = spark.sparkContext.getConf()
    assert conf.get("spark.log.level") == "OFF"
    assert conf.get("spark.driver.bindAddress") == "127.0.0.1"


def test_the_program_of_the_quickstart_runs_where_a_session_runs_already(
    spark: SparkSession, catalog: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A notebook has such a session."""
    monkeypatch.setenv("DISSOCIATED_CATALOG", catalog)
    try:
        exec(PROGRAM, {})
    finally:
        spark.conf.unset("spark.dissociated.catalog")
    assert RESULT in capsys.readouterr().out
