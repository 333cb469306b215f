"""Publishing from Spark and reading into it, beside the ways that Spark has itself, on lineitem and on narrow rows.

All start from a cached DataFrame. The floor is a `mapInArrow` that counts: Spark hands every row to Python as Arrow,
and nothing is done with it. The no-op sink of the JVM does nothing with its rows. A node in a process of its own
serves; another process, which is connected to the catalog, opens what was published: it asks the catalog, connects to
the node, is told of all batches, maps them, and holds a Table. Most of that does not depend on how large the dataset
is: the row for one row tells how much. What was replaced is not kept for its tickets: its pages are written
over by what comes within a minute.
"""

from __future__ import annotations

import multiprocessing
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
from examples.tpch.data import generate
from examples.tpch.memory import own_memory
from examples.tpch.queries import QUERIES

import dissociated as dis
from benchmarks.rounds import medians
from dissociated.cli import text
from dissociated.spark import publish, read, session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_CONTEXT = multiprocessing.get_context("spawn")
_NARROW_ROWS = 10_000_000  # at scale 1
_HEAP = 4  # GiB for Java, and as many more for each unit of the scale: what is cached, and what toArrow collects
#: What reading is measured by: the tables that each uses, and their columns; all of them where there is no query.
_QUERIES: dict[str, dict[str, list[str] | None]] = {
    "q1": {
        "lineitem": [
            *("l_returnflag", "l_linestatus", "l_quantity", "l_extendedprice"),
            *("l_discount", "l_tax", "l_shipdate"),
        ]
    },
    "q3": {
        "lineitem": ["l_orderkey", "l_extendedprice", "l_discount", "l_shipdate"],
        "orders": ["o_orderkey", "o_custkey", "o_orderdate", "o_shippriority"],
        "customer": ["c_custkey", "c_mktsegment"],
    },
    "q6": {"lineitem": ["l_shipdate", "l_discount", "l_quantity", "l_extendedprice"]},
    "all": {"lineitem": None},
}
_TABLES = ("lineitem", "orders", "customer")
_MEMORY_ROUNDS = 5
_MORE_ROUNDS = 3  # times as many for what takes no longer than it varies: narrow rows, and queries in the JVM
_PANDAS = 1  # the largest scale at which toPandas is measured: its decimals are Python objects

#: What is measured, against what, at most so many times as long.
GOALS = [
    ("publish", "floor: mapInArrow", 0.5),
    ("publish", "no-op sink", 2),
    ("publish", "Parquet", 1),
    ("second process", "toArrow", 0.01),
]


def run(scale: float, rounds: int) -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as scratch, _node() as catalog, _reader(catalog) as reader:
        directory = Path(scratch)
        spark = session(
            "benchmark",
            **{
                "spark.log.level": "ERROR",
                "spark.driver.maxResultSize": "0",
                "spark.driver.memory": f"{round(_HEAP * (1 + scale))}g",
                "spark.sql.shuffle.partitions": "2",
            },
        )
        generate(scale, directory, _TABLES, parts=4)
        tables = {name: spark.read.parquet(str(directory / name)) for name in _TABLES}
        lineitem = tables["lineitem"]
        narrow = spark.range(round(_NARROW_ROWS * scale), numPartitions=4).selectExpr("id", "rand(1) AS value")
        measured = {"lineitem": lineitem, "narrow": narrow}
        for name, frame in measured.items():
            of_these = rounds if frame is lineitem else _MORE_ROUNDS * rounds
            _compare(spark, name, frame, catalog, reader, directory, of_these, pandas=scale <= _PANDAS)
            if frame is lineitem:
                _query(spark, tables, catalog, directory, rounds)
                _hold(spark, lineitem, catalog)
        spark.stop()


def _compare(
    spark: SparkSession,
    name: str,
    frame: DataFrame,
    catalog: str,
    reader: Connection,
    directory: Path,
    rounds: int,
    pandas: bool,
) -> None:
    frame = frame.cache()
    rows = frame.count()
    parquet = str(directory / "out.parquet")
    publish(frame, name, catalog)
    publish(frame.limit(1), "one row", catalog)
    calls: dict[str, Callable[[], Any]] = {
        "floor: mapInArrow": lambda: _floor(frame),
        "no-op sink": lambda: _consume(frame),
        "publish": lambda: publish(frame, name, catalog),
        "publish, in Python": lambda: _publish_in_python(frame, name, catalog),
        "Parquet": lambda: frame.write.mode("overwrite").parquet(parquet),
        "toArrow": frame.toArrow,
        **({"toPandas": frame.toPandas} if pandas else {}),
        "Parquet, and pyarrow": lambda: _through(frame, parquet),
        "second process": lambda: _opened(reader, name),
        "second process, one row": lambda: _opened(reader, "one row"),
    }
    calls["Spark reads Parquet"] = lambda: _consume(spark.read.parquet(parquet))
    for transport in ("shm", "tcp", "grpc"):
        calls[f"Spark reads {transport}"] = partial(_read, spark, name, catalog, transport)
    grown = {what: _growth(calls[what]) for what in ("publish", "toArrow")}
    seconds = medians(calls, rounds)
    with dis.connect(catalog) as client:
        nbytes = client.describe(name).nbytes or 0
    print(f"\n{name}: {rows:,} rows, {text.size(nbytes)} as Arrow, median of {rounds} rounds\n")
    lines = [
        (what, f"{took * 1e3:,.1f}", f"{nbytes / took / 1e6:,.0f}", f"{took / seconds['floor: mapInArrow']:.3f}")
        for what, took in seconds.items()
    ]
    print(text.table(("WHAT", "MS", "MB/S", "OF THE FLOOR"), lines, right=(1, 2, 3)))
    print()
    goals = []
    for ours, theirs, goal in GOALS:
        ratio = seconds[ours] / seconds[theirs]
        goals.append((f"{ours} against {theirs}", f"{ratio:.4g}x", f"{goal:g}x", "" if ratio <= goal else "missed"))
    print(text.table(("TIME OF", "MEASURED", "GOAL", ""), goals, right=(1, 2)))
    print(
        f"\ndriver's memory (Python): {', '.join(f'{what} +{text.size(size)}' for what, size in grown.items())}",
        flush=True,
    )
    frame.unpersist()


def _query(spark: SparkSession, tables: Mapping[str, DataFrame], catalog: str, directory: Path, rounds: int) -> None:
    """Queries of TPC-H over Parquet, cached DataFrames, and what was published: in Spark's JVM, and in Python.

    Python is told the columns that a query uses.
    """
    for name, frame in tables.items():
        publish(frame, name, catalog)
        frame.write.mode("overwrite").parquet(str(directory / f"{name}.parquet"))
        frame.cache().count()  # what is read from there alone: the files that were written are not cached
    calls: dict[str, Callable[[], Any]] = {}
    for query, used in _QUERIES.items():
        sources: dict[str, Callable[[str], DataFrame]] = {
            "Parquet": lambda name: spark.read.parquet(str(directory / f"{name}.parquet")),
            "cached": lambda name: tables[name],
            "JVM": lambda name: read(spark, name, catalog),
            "Python": partial(_read_in_python, spark, used, catalog),
        }
        for source, table in sources.items():
            calls[f"{query}, {source}"] = _asked(spark, query, source, {name: table(name) for name in used})
    in_python = {what: call for what, call in calls.items() if what.endswith(", Python")}
    in_jvm = {what: call for what, call in calls.items() if what not in in_python}
    seconds = medians(in_jvm, _MORE_ROUNDS * rounds) | medians(in_python, rounds)
    lines = [
        (what, f"{seconds[what] * 1e3:,.1f}", f"{seconds[what] / seconds[what.partition(',')[0] + ', Parquet']:.2f}")
        for what in calls
    ]
    print(f"\nqueries, median of {_MORE_ROUNDS * rounds} rounds, and of {rounds} in Python\n")
    print(text.table(("WHAT", "MS", "OF PARQUET"), lines, right=(1, 2)), flush=True)
    for frame in tables.values():
        frame.unpersist()


def _asked(spark: SparkSession, query: str, source: str, frames: Mapping[str, DataFrame]) -> Callable[[], Any]:
    """The query over these tables; all of the only one into the no-op sink, where there is no query."""
    if query not in QUERIES:
        return partial(_consume, *frames.values())
    asked = QUERIES[query]
    for name, frame in frames.items():
        view = f"{name}_{query}_{source}"
        frame.createOrReplaceTempView(view)
        asked = re.sub(rf"\b{name}\b", view, asked)
    return partial(_collect, spark, asked)


def _read_in_python(spark: SparkSession, used: Mapping[str, list[str] | None], catalog: str, name: str) -> DataFrame:
    with _in_python(spark):
        return read(spark, name, catalog, columns=used[name])


def _hold(spark: SparkSession, frame: DataFrame, catalog: str) -> None:
    """Tell what Java holds before and after more rounds of publishing and reading."""
    frame.cache().count()
    before = _java_memory(spark)
    for _ in range(_MEMORY_ROUNDS):
        publish(frame, "lineitem", catalog)
        for transport in ("shm", "tcp"):
            _read(spark, "lineitem", catalog, transport)
    told = (
        f"{what} {text.size(first)}, then {text.size(last)}"
        for (what, first), last in zip(before.items(), _java_memory(spark).values(), strict=True)
    )
    print(
        f"\nJava's memory, before and after {_MEMORY_ROUNDS} rounds of publishing and reading: {'; '.join(told)}",
        flush=True,
    )
    frame.unpersist()


def _java_memory(spark: SparkSession) -> dict[str, int]:
    """Bytes: used on the heap after a collection, used for classes and code, and of all memory that is not of files."""
    jvm: Any = spark._jvm
    jvm.java.lang.System.gc()
    factory = jvm.java.lang.management.ManagementFactory
    memory = factory.getMemoryMXBean()
    process = int(factory.getRuntimeMXBean().getName().partition("@")[0])
    status = Path(f"/proc/{process}/status").read_text()
    anonymous = next(line.split()[1] for line in status.splitlines() if line.startswith("RssAnon"))
    return {
        "heap": memory.getHeapMemoryUsage().getUsed(),
        "classes and code": memory.getNonHeapMemoryUsage().getUsed(),
        "all of the process, without files": int(anonymous) << 10,
    }


def _collect(spark: SparkSession, query: str) -> None:
    spark.sql(query).collect()


@contextmanager
def _in_python(spark: SparkSession) -> Iterator[None]:
    """The data source in Python reads what is loaded here."""
    spark.conf.set("spark.dissociated.jvm", "false")
    try:
        yield
    finally:
        spark.conf.unset("spark.dissociated.jvm")


def _floor(frame: DataFrame) -> None:
    def count(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield pa.record_batch({"rows": [sum(batch.num_rows for batch in batches)]})

    frame.mapInArrow(count, "rows long").write.format("noop").mode("overwrite").save()


def _publish_in_python(frame: DataFrame, name: str, catalog: str) -> None:
    """Under another name, which goes again: who opens `name` is to find what Spark's JVM has written."""
    with _in_python(frame.sparkSession):
        publish(frame, f"{name}, in Python", catalog)
    with dis.connect(catalog) as client:
        client.drop(f"{name}, in Python")


def _through(frame: DataFrame, parquet: str) -> pa.Table:
    frame.write.mode("overwrite").parquet(parquet)
    return pq.read_table(parquet)


def _read(spark: SparkSession, name: str, catalog: str, transport: str) -> None:
    _consume(read(spark, name, catalog, transport=transport))


def _consume(frame: DataFrame) -> None:
    frame.write.format("noop").mode("overwrite").save()


def _growth(call: Callable[[], Any]) -> int:
    """By how much this process is larger, with what the call gives, than before; or what Arrow holds, if that is more.

    What Arrow holds may lie in memory that this process had already.
    """
    pa.default_memory_pool().release_unused()
    resident, allocated = own_memory(), pa.total_allocated_bytes()
    result = call()
    grown: int = max(0, own_memory() - resident, pa.total_allocated_bytes() - allocated)
    del result
    return grown


@contextmanager
def _node() -> Iterator[str]:
    """The URI of a node with an empty store in shared memory, which goes with it."""
    store = Path(tempfile.mkdtemp(prefix="benchmark-", dir="/dev/shm"))
    command = [sys.executable, "-m", "dissociated", "node", "--store", str(store / "store")]
    command += ["--listen", "shm:", "--listen", "tcp://127.0.0.1:0", "--retain", "0"]
    try:
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                yield next(line.split()[1] for line in process.stdout if line.startswith("catalog"))
            finally:
                process.terminate()
    finally:
        shutil.rmtree(store, ignore_errors=True)


@contextmanager
def _reader(catalog: str) -> Iterator[Connection]:
    """A process that opens datasets: it is sent a name, and tells the rows when it holds the Table."""
    ours, theirs = _CONTEXT.Pipe()
    process = _CONTEXT.Process(target=_open, args=(catalog, theirs), daemon=True)
    process.start()
    try:
        yield ours
    finally:
        process.kill()


def _open(catalog: str, pipe: Connection) -> None:
    with dis.connect(catalog) as client:
        while True:
            table = client.read(pipe.recv(), transport="shm").read_all()
            pipe.send(table.num_rows)
            del table


def _opened(reader: Connection, name: str) -> int:
    reader.send(name)
    rows: int = reader.recv()
    return rows
