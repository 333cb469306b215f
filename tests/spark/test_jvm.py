"""Reads that only Spark's JVM does. The other tests run in the JVM too, and show that it reads the same values."""

from __future__ import annotations

import fcntl
import io
import mmap
import os
import signal
import sys
import termios
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.errors import PySparkException

import dissociated as dis
from dissociated.spark import read
from support.helpers import case, connections_left, files_below, wait_until
from support.jvm import executed_plan, java_pid, jvm

from .processes import sidecar

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: For tests whose subject is a plan.
plans = pytest.mark.usefixtures("plans")

ROWS = 1000
TABLE = pa.table(
    {
        "n": pa.array(range(ROWS)),
        "s": [f"{n:08}" for n in range(ROWS)],
        "l": [[n, n, n] for n in range(ROWS)],
        "d": pa.array([f"{n % 100}" for n in range(ROWS)]).dictionary_encode(),
        "v": pa.array([f"{n:016}" for n in range(ROWS)], pa.string_view()),
    }
)


@pytest.fixture
def server() -> Iterator[dis.Server]:
    with dis.Server(["shm:", "tcp://127.0.0.1:0"]) as server:
        yield server


def plan(df: DataFrame) -> str:
    return str(executed_plan(df).toString())


@plans
def test_a_query_reads_what_it_needs_and_a_count_or_a_limit_nearly_nothing(
    spark: SparkSession, server: dis.Server
) -> None:
    parts = [TABLE.select(["n", "s"]).slice(first, 100) for first in range(0, ROWS, 100)]
    server.publish("data", pa.concat_tables(parts))
    df = read(spark, "data", server.catalog_uri, partitions=10, transport="tcp")

    def moved(df: DataFrame) -> int:
        before = server.status().totals.bytes
        df.collect()
        wait_until(lambda: connections_left(server) == 0, "all have left")
        return server.status().totals.bytes - before

    assert 8 * ROWS <= moved(df.selectExpr("sum(n)")) < 9 * ROWS  # bodies are padded
    counts = df.selectExpr("count(*)", "count(1)", "count(DISTINCT 1)")
    assert moved(counts) == 0
    assert counts.first() == (ROWS, ROWS, 1)
    for query in ("SELECT count(*) FROM (SELECT count(*) FROM {df})", "SELECT 1 FROM {df} HAVING true"):
        assert spark.sql(query, df=df).collect() == [(1,)]  # Spark requests no aggregate at all
    assert df.where("n % 2 = 0").count() == ROWS / 2
    assert len(df.selectExpr("1").collect()) == ROWS
    assert df.select("n").limit(150).rdd.getNumPartitions() <= 2
    assert len(df.select("n").limit(150).collect()) == 150
    small = read(spark, "data", server.catalog_uri).join(df, "n")
    assert "BroadcastHashJoin" in plan(small)  # Spark knows the sizes of the tables


def test_a_constant_is_counted_once_if_it_is_to_be_distinct(spark: SparkSession, server: dis.Server) -> None:
    server.publish("data", TABLE)
    server.publish("empty", TABLE.slice(0, 0))
    df, empty = (read(spark, name, server.catalog_uri) for name in ("data", "empty"))
    for expression, expected, of_empty in (
        ("count(DISTINCT 1)", 1, 0),
        ("count(DISTINCT 'a', 2)", 1, 0),
        ("count(DISTINCT NULL)", 0, 0),
        ("count(DISTINCT 1) FILTER (WHERE n < 0)", 0, 0),
        ("count(DISTINCT 1) + count(DISTINCT d) + count(1)", 1 + 100 + ROWS, 0),
    ):
        with case(expression):
            assert df.selectExpr(expression).collect() == [(expected,)]
            assert empty.selectExpr(expression).collect() == [(of_empty,)]
    constant = df.selectExpr("'a' AS source", "n % 2 AS odd")
    assert constant.selectExpr("count(DISTINCT source)", "count(source)").collect() == [(1, ROWS)]
    grouped = constant.groupBy("odd").agg({"*": "count"}).selectExpr("count(DISTINCT 1)")
    assert grouped.collect() == [(1,)]
    each = spark.sql("SELECT odd, count(DISTINCT source), count(*) FROM {df} GROUP BY odd ORDER BY odd", df=constant)
    assert each.collect() == [(0, 1, ROWS / 2), (1, 1, ROWS / 2)]


def test_batches_without_rows_that_a_query_wants_stay_where_they_are(spark: SparkSession, server: dis.Server) -> None:
    each, count = 20_000, 4  # smaller batches have no statistics
    days = pa.array([n // each for n in range(each * count)], pa.int32())
    table = pa.table(
        {
            "n": pa.array(range(each * count)),
            "day": days.cast(pa.date32()),
            "at": pa.array(range(each * count), pa.timestamp("us", "UTC")),
            "x": pa.array([n / 2 if n % each else None for n in range(each * count)]),
            "exact": pa.array(range(each * count), pa.timestamp("ns")),  # Spark sees microseconds only
        }
    )
    server.publish("data", pa.Table.from_batches(table.to_batches(max_chunksize=each)))
    conditions = {
        "n >= 75000": True,
        "n in (3, 4) and x is not null": True,
        "day = date'1970-01-03'": True,
        "at < timestamp'1970-01-01 00:00:00.000007Z'": True,
        "x = 37500.5 or n < 0": False,  # this exceeds these bounds
        "exact = timestamp_ntz'1970-01-01 00:00:00.000001'": False,
    }
    for transport in ("shm", "tcp"):
        df = read(spark, "data", server.catalog_uri, transport=transport, nanoseconds="truncate")
        for condition, spares in conditions.items() if transport == "shm" else [("n >= 75000", True)]:
            wanted, all_there_is = (df.where(one).select("n") for one in (condition, f"coalesce({condition}, false)"))
            before = server.status().totals.bytes
            found = wanted.collect()
            wait_until(lambda: connections_left(server) == 0, "all have left")
            between = server.status().totals.bytes
            assert found == all_there_is.collect() != [], condition
            wait_until(lambda: connections_left(server) == 0, "all have left")
            after = server.status().totals.bytes
            assert (2 * (between - before) < after - between) is spares, (transport, condition)
        cut = read(spark, "data", server.catalog_uri, transport=transport, nanoseconds="truncate", partitions=12)
        before = server.status().totals.bytes
        assert cut.where("n >= 75000").selectExpr("count(*)", "sum(n)").first() == (5000, sum(range(75_000, 80_000)))
        assert cut.where("n > 1000000").count() == 0
        wait_until(lambda: connections_left(server) == 0, "all have left")
        between = server.status().totals.bytes
        assert cut.selectExpr("count(n)").first() == (each * count,)
        wait_until(lambda: connections_left(server) == 0, "all have left")
        assert 2 * (between - before) < server.status().totals.bytes - between


def test_partitions_are_as_many_as_cores_wherever_each_has_4_mib(spark: SparkSession) -> None:
    """Rows and sizes are those of TPC-H at scale 1. Planning reads no rows, so all batches are the same in memory."""
    cores, default = 16, spark.sparkContext.defaultParallelism
    tables = [
        # name, rows, bytes of a row, partitions with 16 cores and with the cores of the session
        ("region", 5, 100, 1, 1),
        ("supplier", 10_000, 150, 1, 1),
        ("customer", 150_000, 180, 6, default),
        ("partsupp", 800_000, 160, cores, default),
        ("orders", 1_500_000, 140, cores, default),
        ("lineitem", 6_001_215, 170, cores, 8),
    ]
    conf = jvm(spark).org.apache.spark.SparkContext.getOrCreate().conf()
    with dis.Server(["tcp://127.0.0.1:0"]) as server:
        for name, rows, width, with_cores, with_default in tables:
            each = min(rows, 50_000)
            batch = pa.record_batch({"key": pa.array(range(each)), "text": ["x" * (width - 12)] * each})
            table = pa.Table.from_batches([batch] * -(-rows // each)).slice(0, rows)
            server.publish(name, table)
            for setting, count in ((cores, with_cores), (default, with_default)):
                conf.set("spark.default.parallelism", str(setting))
                try:
                    with case(f"{name}, {setting} cores"):
                        assert read(spark, name, server.catalog_uri).rdd.getNumPartitions() == count
                finally:
                    conf.remove("spark.default.parallelism")


@plans
def test_a_join_reads_only_batches_that_may_have_its_keys(spark: SparkSession, server: dis.Server) -> None:
    table = pa.table({"n": range(80_000), "m": range(80_000)})
    server.publish("data", pa.Table.from_batches(table.to_batches(max_chunksize=20_000)))
    df = read(spark, "data", server.catalog_uri, transport="tcp")
    for step in (1, 7):  # many keys, which are reduced to their bounds, and few keys
        some = spark.range(61_000, 61_400, step).selectExpr("IF(id % 5 = 4, NULL, id) AS n", "id % 2 AS odd")
        before = server.status().totals.bytes
        joined = df.join(some.where("odd = 1"), "n")
        assert joined.count() == len([n for n in range(61_000, 61_400, step) if n % 5 < 4 and n % 2])
        wait_until(lambda: connections_left(server) == 0, "all have left")
        assert server.status().totals.bytes - before < 2 * 8 * 20_000


@plans
def test_the_source_in_python_reads_where_it_is_asked_to(
    spark: SparkSession, server: dis.Server, use_jvm: Callable[[bool], None]
) -> None:
    server.publish("data", TABLE)
    use_jvm(False)
    df = read(spark, "data", server.catalog_uri)
    assert "(Python)" in plan(df)
    assert df.toArrow().select(["n", "s"]) == TABLE.select(["n", "s"])


class Sparse(io.RawIOBase):
    """A file that stores long runs of zeros as holes."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        if size < 1 << 20:
            return os.write(self._descriptor, data)
        os.lseek(self._descriptor, size, os.SEEK_CUR)
        return size

    def close(self) -> None:
        if not self.closed:
            os.close(self._descriptor)
        super().close()


def test_a_segment_may_have_many_gigabytes(spark: SparkSession, server: dis.Server, tmp_path: Path) -> None:
    """Java maps at most two gigabytes at once."""
    hole = pa.py_buffer(mmap.mmap(-1, 3 << 29))
    lengths = pa.array([0, 3 << 29], pa.int64())
    holes = pa.Array.from_buffers(pa.large_binary(), 1, [None, lengths.buffers()[1], hole])
    batches = [pa.record_batch({"before": [n], "hole": holes, "after": [str(n)]}) for n in range(4)]
    path = tmp_path / "large.arrows"
    with Sparse(path) as sink, pa.ipc.new_stream(sink, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    assert path.stat().st_size > 6 << 30
    server.publish("large", path)
    for transport in ("shm", "tcp"):
        df = read(spark, "large", server.catalog_uri, transport=transport, partitions=2)
        assert df.select("before", "after").collect() == [(n, str(n)) for n in range(4)], transport


def changed(content: bytes, values: np.ndarray, place: int, value: int) -> bytes:
    """Return `content` with one element of `values` replaced. `values` must occur in it exactly once."""
    found = content.index(values.tobytes()) + place * values.itemsize
    assert content.count(values.tobytes()) == 1
    return content[:found] + np.array([value], values.dtype).tobytes() + content[found + values.itemsize :]


@plans
def test_of_structs_only_the_fields_that_a_query_uses_are_looked_at(
    spark: SparkSession, server: dis.Server, tmp_path: Path, use_jvm: Callable[[bool], None]
) -> None:
    structs = pa.array([{"a": n, "b": {"bad": f"{n:08}", "c": str(n), "d": [n]}, "e": None} for n in range(ROWS)])
    table = pa.table({"s": structs, "l": pa.array([[{"x": n, "y": str(n)}] * 2 for n in range(ROWS)])})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    path = tmp_path / "data.arrows"
    offsets = np.arange(ROWS + 1, dtype=np.int32) * 8
    path.write_bytes(changed(sink.getvalue().to_pybytes(), offsets, 500, 3))
    server.publish("data", path)
    for transport in ("shm", "tcp"):
        df = read(spark, "data", server.catalog_uri, transport=transport, partitions=3)
        found = df.selectExpr("s.b.c", "s.a + s.b.d[0]", "l.y").collect()
        assert found == [(str(n), 2 * n, [str(n)] * 2) for n in range(ROWS)], transport
        with pytest.raises(PySparkException, match="column 's' is damaged: its offsets do not ascend"):
            df.selectExpr("s.b.bad").collect()
    use_jvm(False)
    server.publish("sound", table.slice(10))
    reader = spark.read.format("dissociated").option("catalog", server.catalog_uri)
    some = reader.schema("l array<struct<y: string>>, s struct<b: struct<c: string>>").load("sound")
    assert some.collect() == [([(str(n),)] * 2, ((str(n),),)) for n in range(10, ROWS)]


def test_what_is_damaged_is_told_with_its_column_and_harms_nothing_else(
    spark: SparkSession, server: dis.Server, tmp_path: Path
) -> None:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, TABLE.schema) as writer:
        writer.write_table(TABLE)
    content = sink.getvalue().to_pybytes()
    strings, lists = np.arange(ROWS + 1, dtype=np.int32) * 8, np.arange(ROWS + 1, dtype=np.int32) * 3
    keys = np.arange(ROWS, dtype=np.int32) % 100
    (views,) = (buffer for buffer in TABLE["v"].chunk(0).buffers()[1:2])
    offsets = np.frombuffer(views, np.int32)
    damaged = {
        "s descends": ("s", changed(content, strings, 500, 3)),
        "s ends beyond its bytes": ("s", changed(content, strings, ROWS, 1 << 30)),
        "s begins before them": ("s", changed(content, strings, 0, -8)),
        "l ends beyond its values": ("l", changed(content, lists, ROWS, 1 << 30)),
        "d has no such value": ("d", changed(content, keys, 700, 100)),
        "d has less than none": ("d", changed(content, keys, 700, -1)),
        "v lies beyond its buffer": ("v", changed(content, offsets, 4 * 900 + 3, 1 << 30)),
        "v has no such buffer": ("v", changed(content, offsets, 4 * 900 + 2, 7)),
    }
    for what, (column, bytes_) in damaged.items():
        path = tmp_path / f"{what}.arrows"
        path.write_bytes(bytes_)
        server.publish(what, path)
        with pytest.raises(PySparkException, match=f"column '{column}' is damaged"):
            read(spark, what, server.catalog_uri).collect()
        others = [name for name in TABLE.column_names if name != column]
        assert len(read(spark, what, server.catalog_uri).select(others).collect()) == ROWS, what


def test_a_task_fails_whose_sidecar_has_ended(spark: SparkSession, server: dis.Server) -> None:
    """The memory of a live stream that the sidecar held may be reused before Spark has read it."""
    batches = [pa.record_batch({"n": range(first, first + ROWS * 10)}) for first in (0, ROWS * 10)]
    server.publish("data", lambda: pa.RecordBatchReader.from_batches(batches[0].schema, iter(batches)))
    scan = executed_plan(read(spark, "data", server.catalog_uri, transport="shm")).collectLeaves().head()
    reader = scan.readerFactory().createColumnarReader(scan.inputPartitions().head())
    for batch in batches:
        assert reader.next()
        assert reader.get().column(0).getLong(0) == batch["n"][0].as_py()
    os.kill(sidecar(java_pid(spark)), signal.SIGKILL)
    for end in reader.next, reader.close:  # at the end of all rows, or when a LIMIT stops early
        with pytest.raises(PySparkException, match="sidecar has ended"):
            end()


SCRIPT = """
echo $$ > {0}/pid
cat {0}/gate  # until the test opens it and writes to it
exec sleep 1000
"""


@plans
def test_a_script_that_takes_no_more_ends_with_its_task(
    spark: SparkSession, server: dis.Server, tmp_path: Path
) -> None:
    """Spark waits neither for the script nor for the thread that feeds it, which would read from freed memory."""
    script, pid, gate = (tmp_path / name for name in ("script", "pid", "gate"))
    script.write_text(SCRIPT.format(tmp_path))
    os.mkfifo(gate)
    server.publish("data", pa.table({"s": [f"{n:064}" for n in range(100_000)]}))
    read(spark, "data", server.catalog_uri, partitions=1).createOrReplaceTempView("data")
    query = f"SELECT TRANSFORM(s) USING 'sh {script}' AS (s string) FROM data LIMIT 1"

    def waits() -> bool:
        """Return whether the pipe to the script is full."""
        if not pid.exists() or not pid.read_text().strip():
            return False
        with open(f"/proc/{pid.read_text().strip()}/fd/0", "rb") as pipe:
            unread = fcntl.ioctl(pipe, termios.FIONREAD, bytes(4))
        return int.from_bytes(unread, sys.byteorder) > 60_000

    with ThreadPoolExecutor(1) as other:
        found = other.submit(lambda: spark.sql(query).collect())
        try:
            wait_until(waits, "the script takes nothing", 60)  # includes the time that Spark takes to start the script
            gate.write_text("x\n" * 3)  # Spark reads one row ahead
            assert found.result(60) == [("x",)]
            wait_until(lambda: not Path("/proc", pid.read_text().strip()).exists(), "the script has ended", 60)
            wait_until(lambda: connections_left(server) == 0, "what was read is given back")
        finally:
            with suppress(ProcessLookupError):
                os.kill(int(pid.read_text()), signal.SIGKILL)


def test_a_thread_that_is_interrupted_maps_and_stays_interrupted(spark: SparkSession, tmp_path: Path) -> None:
    """Spark interrupts the threads of tasks that it cancels.

    In such a thread, Java's FileChannel.map may throw after it has mapped, and the mapping would stay while Java runs.
    """
    path = tmp_path / "region"
    path.write_bytes(b"dissociated")
    regions = jvm(spark).org.apache.spark.sql.dissociated.Regions()
    regions.add(str(path))
    thread = jvm(spark).java.lang.Thread
    thread.currentThread().interrupt()  # this connection to Java has a thread of its own
    try:
        address = regions.address(0, 0, 11)
    finally:
        is_interrupted = thread.interrupted()  # which also ends the state, for the tests that follow
    assert is_interrupted
    assert files_below(tmp_path, java_pid(spark)) == {str(path)}
    assert address
    regions.close()
    assert files_below(tmp_path, java_pid(spark)) == set()
