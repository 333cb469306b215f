"""Functions of `map_in_arrow` that need much memory, yield wrong batches late, or never end."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from dissociated.node.node import Node
from dissociated.spark import map_in_arrow, publish, read
from dissociated.store.store import Store
from support.helpers import PATIENCE, case, connections_left, wait_until

from . import processes
from .conftest import IN_JVM
from .processes import descendants, function_memory

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

cloudpickle = pytest.importorskip("pyspark.cloudpickle")
for module in (sys.modules[__name__], processes):
    cloudpickle.register_pickle_by_value(module)  # Spark's workers cannot import these modules.

Batches = Iterator[pa.RecordBatch]

#: The bytes that pass through each of two functions. A function has two workers, each of which gets half of the bytes
#: and yields as many. DISSOCIATED_TEST_FUNCTION_BYTES=4294967296 is the full size: 4 GiB, with the same LIMIT.
SIZE = int(os.environ.get("DISSOCIATED_TEST_FUNCTION_BYTES", 128 << 20))
#: The largest amount of shared memory that a worker may hold at once, whatever the size. By default, four times as much
#: passes through the worker, and either half that leaked would exceed this.
LIMIT = 32 << 20
ROW = 1_000  # bytes of the text in each row


@pytest.fixture
def small_batches(spark: SparkSession) -> Iterator[None]:
    """Give functions batches of 10,000 rows."""
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", 10_000)
    yield
    spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")


def nothing_is_left() -> None:
    wait_until(lambda: not function_memory(descendants(os.getpid())), "all memory of functions is freed", 2 * PATIENCE)


def measured(batches: Batches) -> Batches:
    """Yield new arrays with the rows of each batch, and the largest memory of this worker or of an earlier one."""
    for batch in batches:
        text = pc.binary_join_element_wise(batch["text"], "", "")  # a copy, which lies outside of shared memory
        memory = pa.array([function_memory({os.getpid()})] * batch.num_rows, pa.int64())
        if "memory" in batch.schema.names:
            memory = pc.max_element_wise(memory, batch["memory"])
        yield pa.record_batch({"id": batch["id"], "text": text, "memory": memory})


@pytest.mark.skipif(IN_JVM == "false", reason="Spark's rows pass through its socket")
@pytest.mark.parametrize("source", ["rows", "dataset"])
def test_more_data_than_shared_memory_flows_through_functions(spark: SparkSession, memory: Path, source: str) -> None:
    count = SIZE // ROW
    df = spark.range(0, count, numPartitions=2).selectExpr("id", f"repeat(chr(65 + id % 26), {ROW}) AS text")
    schema = "id bigint, text string, memory bigint"
    with Node(Store(memory / "store")) as node:
        if source == "dataset":
            df = df.where(f"id < {min(count, 100_000)}")  # which lies in shared memory as a whole
            count = min(count, 100_000)
            publish(df, "data", node.uri)
            df = read(spark, "data", node.uri)
        mapped = map_in_arrow(map_in_arrow(df, measured, schema), measured, schema)
        rows, total, texts, largest = mapped.selectExpr(
            "count(id)", "sum(id)", f"count_if(text = repeat(chr(65 + id % 26), {ROW}))", "max(memory)"
        ).collect()[0]
        assert (rows, total, texts) == (count, sum(range(count)), count)
        assert 0 < largest < LIMIT
        nothing_is_left()
        wait_until(lambda: connections_left(node.server) == 0, "all readers have left")


def test_a_function_may_keep_everything(spark: SparkSession) -> None:
    def kept(batches: Batches) -> Batches:
        yield from [*batches]

    count = SIZE // 4 // ROW
    df = spark.range(0, count, numPartitions=1).selectExpr("id", f"repeat('x', {ROW}) AS text")
    out = map_in_arrow(df, kept, df.schema)
    assert out.selectExpr("count(id)", "sum(id)", "sum(length(text))").first() == (
        count,
        sum(range(count)),
        ROW * count,
    )
    nothing_is_left()


def another_type(batch: pa.RecordBatch) -> Any:
    return pa.record_batch({"id": batch["id"].cast(pa.string())})


def another_column(batch: pa.RecordBatch) -> Any:
    return pa.record_batch({"id": batch["id"], "more": batch["id"]})


def no_column(batch: pa.RecordBatch) -> Any:
    return batch.select([])


def a_table(batch: pa.RecordBatch) -> Any:
    return pa.Table.from_batches([batch])


def an_error(batch: pa.RecordBatch) -> Any:
    raise ValueError("the second batch is refused")


def test_a_later_batch_that_is_wrong_fails_the_job_and_leaves_nothing(spark: SparkSession, small_batches: None) -> None:
    df = spark.range(0, 60_000, numPartitions=2)
    messages = {
        another_type: "string",
        another_column: "column",
        no_column: "column",
        a_table: "Table",
        an_error: "the second batch is refused",
    }
    for late, message in messages.items():

        def wrong(batches: Batches, late: Callable[[pa.RecordBatch], Any] = late) -> Batches:
            for number, batch in enumerate(batches):
                yield late(batch) if number else batch

        with case(late.__name__), pytest.raises(Exception, match=message):
            map_in_arrow(df, wrong, df.schema).collect()
        nothing_is_left()
    assert map_in_arrow(df, lambda batches: batches, df.schema).count() == 60_000


@pytest.mark.parametrize("way", ["before its first batch", "between batches", "by yielding"])
def test_a_function_that_never_ends_is_ended_with_its_job(
    spark: SparkSession, small_batches: None, tmp_path: Path, way: str
) -> None:
    started, ended = tmp_path / "started", tmp_path / "ended"

    def endless(batches: Batches) -> Batches:
        batch = next(batches)
        if way != "before its first batch":
            yield batch  # which the task has mapped before it is cancelled
        started.with_suffix(".new").write_text(str(os.getpid()))
        started.with_suffix(".new").rename(started)
        try:
            while True:
                if way == "by yielding":
                    yield batch
                else:
                    time.sleep(3_600)
        finally:
            ended.touch()

    df = spark.range(0, 60_000, numPartitions=1)
    mapped = map_in_arrow(df, endless, df.schema)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(mapped.write.format("noop").mode("overwrite").save)
        wait_until(started.exists, "the function runs", 5 * PATIENCE)
        spark.sparkContext.cancelAllJobs()
        with pytest.raises(Exception, match=r"(?i)cancel"):
            running.result(5 * PATIENCE)
    worker = Path("/proc", started.read_text())
    is_over = ended.exists if way == "by yielding" else lambda: not worker.exists()
    wait_until(is_over, "the function, or its worker, has ended", 2 * PATIENCE)
    nothing_is_left()
    assert map_in_arrow(df, lambda batches: batches, df.schema).count() == 60_000


@pytest.mark.usefixtures("plans")
def test_a_limit_ends_a_function_that_yields_for_ever(spark: SparkSession) -> None:
    def endless(batches: Batches) -> Batches:
        for batch in batches:
            while True:
                yield batch

    df = spark.range(0, 10, numPartitions=2)
    assert len(map_in_arrow(df, endless, df.schema).limit(1_000).collect()) == 1_000
    nothing_is_left()
