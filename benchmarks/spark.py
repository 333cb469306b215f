"""Benchmarks of publishing from Spark and reading into Spark, compared with Spark's own ways.

The data are TPC-H's lineitem, and a table of narrow rows. All ways of publishing start from a cached DataFrame. The
floor is a `mapInArrow` that only counts rows: Spark converts every row to Arrow and passes it to Python. The no-op sink
of the JVM drops all rows.

A node in a process of its own serves. Another process, which is connected to the catalog already, opens the published
dataset: it asks the catalog, connects to the node, receives the addresses of all batches, maps them, and holds a Table.
Most of this time does not depend on the size of the dataset; the measurement of a dataset with one row shows how much.
The node runs with `--retain 0`: replaced versions are not kept, and their pages are reused within a minute.
"""

from __future__ import annotations

import multiprocessing
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from dissociated.spark import create_dataframe, map_in_arrow, publish, read, session, to_arrow

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_CONTEXT = multiprocessing.get_context("spawn")
_NARROW_ROWS = 10_000_000  # at scale 1
_HEAP = 4  # GiB of Java's heap, plus as many for each unit of scale, for cached DataFrames and the rows of toArrow
#: The queries that measure reading: the tables of each, and their columns; None for all columns.
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
_MORE_ROUNDS = 3  # factor for the rounds of short measurements, which vary most: narrow rows, and queries in the JVM
_PANDAS = 1  # largest scale at which toPandas is measured, since it makes each decimal a Python object

_LOCAL_ROWS = 2_000_000  # at scale 1 and more, for data that moves between Spark and this process
#: Goals: a measurement, the measurement that it is compared with, and the largest ratio of their times.
FUNCTION_GOALS = [
    ("map_in_arrow, dataset", "mapInArrow, dataset", 1 / 3),
    ("map_in_arrow, Parquet", "mapInArrow, Parquet", 1 / 1.5),
]
LOCAL_GOALS = [("to_arrow", "toArrow", 1 / 4), ("create_dataframe", "createDataFrame", 1 / 2.5)]
GOALS = [
    ("publish", "floor: mapInArrow", 0.5),
    ("publish", "no-op sink", 2),
    ("publish", "Parquet", 1),
    ("second process", "toArrow", 0.01),
]


def run(scale: float, rounds: int) -> None:
    """Measure, and print the tables."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as scratch, node() as catalog, _reader(catalog) as reader:
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
                _map(spark, frame, catalog, directory, rounds)
                _move(spark, frame, rounds)
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
    _print_goals(seconds, GOALS)
    print(
        f"\ndriver's memory (Python): {', '.join(f'{what} +{text.size(size)}' for what, size in grown.items())}",
        flush=True,
    )
    frame.unpersist()


def _print_goals(seconds: Mapping[str, float], goals: Sequence[tuple[str, str, float]]) -> None:
    lines = []
    for ours, theirs, goal in goals:
        ratio = seconds[ours] / seconds[theirs]
        lines.append((f"{ours} against {theirs}", f"{ratio:.4g}x", f"{goal:.3g}x", "" if ratio <= goal else "missed"))
    print()
    print(text.table(("TIME OF", "MEASURED", "GOAL", ""), lines, right=(1, 2)), flush=True)


def _map(spark: SparkSession, frame: DataFrame, catalog: str, directory: Path, rounds: int) -> None:
    """Measure the identity function over all columns, by Spark's own `mapInArrow` and in shared memory."""
    publish(frame, "lineitem", catalog)
    parquet = str(directory / "lineitem.parquet")
    frame.write.mode("overwrite").parquet(parquet)
    sources = {"dataset": read(spark, "lineitem", catalog), "Parquet": spark.read.parquet(parquet)}
    calls: dict[str, Callable[[], Any]] = {}
    for name, source in sources.items():
        calls[f"no function, {name}"] = partial(_consume, source)
        calls[f"mapInArrow, {name}"] = partial(_consume, source.mapInArrow(_identity, source.schema))
        calls[f"map_in_arrow, {name}"] = partial(_consume, map_in_arrow(source, _identity, source.schema))
    seconds = medians(calls, rounds)
    print(f"\nPython functions over lineitem, median of {rounds} rounds\n")
    print(text.table(("WHAT", "MS"), [(what, f"{took * 1e3:,.1f}") for what, took in seconds.items()], right=(1,)))
    _print_goals(seconds, FUNCTION_GOALS)


def _identity(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from batches


def _move(spark: SparkSession, frame: DataFrame, rounds: int) -> None:
    """Measure the way of rows from Spark into this process, and back."""
    rows = frame.limit(_LOCAL_ROWS).repartition(4).cache()
    local = to_arrow(rows)
    calls: dict[str, Callable[[], Any]] = {
        "toArrow": rows.toArrow,
        "to_arrow": partial(to_arrow, rows),
        "createDataFrame": lambda: _consume(spark.createDataFrame(local)),
        "create_dataframe": lambda: _consume(create_dataframe(spark, local)),
    }
    grown = {what: _growth(calls[what]) for what in ("toArrow", "to_arrow")}
    seconds = medians(calls, rounds)
    print(f"\n{local.num_rows:,} rows of lineitem to and from this process, median of {rounds} rounds\n")
    print(text.table(("WHAT", "MS"), [(what, f"{took * 1e3:,.1f}") for what, took in seconds.items()], right=(1,)))
    _print_goals(seconds, LOCAL_GOALS)
    print(f"\ndriver's memory (Python): {', '.join(f'{what} +{text.size(size)}' for what, size in grown.items())}")
    rows.unpersist()


def _query(spark: SparkSession, tables: Mapping[str, DataFrame], catalog: str, directory: Path, rounds: int) -> None:
    """Measure queries of TPC-H over Parquet, cached DataFrames, and published datasets.

    Published datasets are read by the data source for the JVM, and by that in Python, which is given the columns that
    a query uses.
    """
    for name, frame in tables.items():
        publish(frame, name, catalog)
        frame.write.mode("overwrite").parquet(str(directory / f"{name}.parquet"))
        frame.cache().count()  # only the DataFrames are cached, not the files that were written from them
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
    """Return a function that runs the query over `frames`, or sends the only frame to the no-op sink if it is "all"."""
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
    """Print Java's memory before and after several rounds of publishing and reading."""
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
    """Return Java's memory, in bytes: heap after a garbage collection, classes and code, and all anonymous memory."""
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
    """Use the data source in Python, instead of that for the JVM, while the context is open."""
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
    """Publish by the data source in Python, under another name, and drop it again.

    The dataset `name` stays as Spark's JVM has written it, for the measurements of reading.
    """
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
    """Return the bytes by which this process grows while it holds the result of `call`.

    If Arrow's own count of allocated bytes has grown by more, return that, since Arrow may reuse free memory of the
    process.
    """
    pa.default_memory_pool().release_unused()
    resident, allocated = own_memory(), pa.total_allocated_bytes()
    result = call()
    grown: int = max(0, own_memory() - resident, pa.total_allocated_bytes() - allocated)
    del result
    return grown


@contextmanager
def node() -> Iterator[str]:
    """Run a node with an empty store in shared memory, and yield its URI. The store is deleted afterwards."""
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
    """Run a process that opens datasets. It receives a name, and sends the number of rows when it holds the Table."""
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
