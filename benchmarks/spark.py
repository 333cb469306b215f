"""Benchmarks of publishing from Spark, reading into Spark, and Python functions, beside Spark's own ways.

The data are TPC-H's lineitem, and a table of narrow rows. `tpchgen-cli` generates the tables once; Spark writes them as
Parquet into `build/benchmarks`, and later runs use these files. All ways of publishing start from a cached DataFrame.
The floor is a `mapInArrow` that only counts rows: Spark converts every row to Arrow and passes it to Python. The no-op
sink of the JVM drops all rows.

A node in a process of its own serves. Another process, which is connected to the catalog already, opens the published
dataset: it asks the catalog, connects to the node, receives the addresses of all batches, maps them, and holds a Table.
Most of this time does not depend on the size of the dataset; the measurement of a dataset with one row shows how much.
The node runs with `--retain 0`: replaced versions are not kept, and their pages are reused within a minute.

At the end, all figures with a goal are printed.
"""

from __future__ import annotations

import multiprocessing
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
from examples.tpch.data import generate
from examples.tpch.memory import own_memory
from examples.tpch.queries import QUERIES

import dissociated as dis
from benchmarks.rounds import in_turns, medians
from dissociated.cli import text
from dissociated.spark import create_dataframe, map_in_arrow, publish, read, session, to_arrow

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_CONTEXT = multiprocessing.get_context("spawn")
_PREPARED = Path("build/benchmarks")
_NARROW_ROWS = 10_000_000  # at scale 1
_HEAP = 4  # GiB of Java's heap, plus as many for each unit of scale, for cached DataFrames and the rows of toArrow
_PARTITIONS = 4
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
_MORE_ROUNDS = 2  # factor for the rounds of short measurements, which vary most
_LOCAL_ROWS = 2_000_000  # at scale 1 and more, for data that moves between Spark and this process
_FIRST_ROWS = 100_000  # of the DataFrame whose first batch another process waits for
_FIRST_SECONDS = 0.015


class Goal(NamedTuple):
    """A measurement, the measurement that it is compared with, and the largest ratio of their times."""

    ours: str
    theirs: str
    most: float


class Figure(NamedTuple):
    """A measured ratio of times, or a time in seconds if it is compared with nothing, and the most that it may be."""

    goal: Goal
    value: float
    shown: tuple[str, str]


_PUBLISH_GOALS = (
    Goal("publish", "floor: mapInArrow", 0.5),
    Goal("publish", "no-op sink", 2),
    Goal("publish", "Parquet", 1),
    Goal("second process", "toArrow", 0.01),
)
_FIRST_GOAL = Goal("first batch after a commit", "", _FIRST_SECONDS)
_QUERY_GOALS = tuple(Goal(f"{query}, JVM", f"{query}, Parquet", 1) for query in _QUERIES)
_FUNCTION_GOALS = (
    Goal("map_in_arrow, dataset", "mapInArrow, dataset", 1 / 3),
    Goal("map_in_arrow, Parquet", "mapInArrow, Parquet", 1 / 1.5),
)
_LOCAL_GOALS = (
    Goal("to_arrow, cached", "toArrow, cached", 1 / 4),
    Goal("to_arrow, Parquet", "toArrow, Parquet", 1 / 4),
    Goal("create_dataframe", "createDataFrame", 1 / 2.5),
)


class Bench(NamedTuple):
    """The processes and data that all parts use."""

    spark: SparkSession
    catalog: str
    reader: Connection
    tables: Path  # Parquet files of Spark, a directory for each table
    scratch: Path
    scale: float
    rounds: int

    def files(self, name: str) -> DataFrame:
        """Return a table, read from Parquet."""
        return self.spark.read.parquet(str(self.tables / name))

    def cached(self, name: str) -> DataFrame:
        """Return a table, cached by Spark. `coalesce` makes it another plan than `files`, which is not cached."""
        frame = self.files(name).coalesce(_PARTITIONS).cache()
        frame.count()
        return frame

    def dataset(self, name: str) -> DataFrame:
        """Return a table, read from a dataset that is published now."""
        publish(self.files(name), name, self.catalog)
        return read(self.spark, name, self.catalog)


def run(scale: float, rounds: int, parts: Sequence[str] = ()) -> None:
    """Measure these parts, by default those with goals, and print the tables and the goals."""
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="benchmark-") as scratch, node() as catalog, _reader(catalog) as reader:
        spark = session(
            "benchmark",
            **{
                "spark.log.level": "ERROR",
                "spark.driver.maxResultSize": "0",
                "spark.driver.memory": f"{round(_HEAP * (1 + scale))}g",
                "spark.sql.shuffle.partitions": "2",
            },
        )
        bench = Bench(spark, catalog, reader, _prepare(spark, scale), Path(scratch), scale, rounds)
        for name in parts or _WITH_GOALS:
            started = time.monotonic()
            figures += PARTS[name](bench)
            print(f"\n{name}: measured in {time.monotonic() - started:.0f} s", flush=True)
        spark.stop()
    _print_goals(figures)


def _prepare(spark: SparkSession, scale: float) -> Path:
    """Return the directory with the tables as Parquet files of Spark. They are written unless an earlier run has."""
    directory = _PREPARED / f"tpch-{scale:g}"
    if not directory.exists():
        incomplete = directory.with_suffix(".incomplete")
        shutil.rmtree(incomplete, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix="benchmark-") as scratch:
            generate(scale, Path(scratch), _TABLES, _PARTITIONS)
            for name in _TABLES:
                spark.read.parquet(f"{scratch}/{name}").write.parquet(str(incomplete / name))
        incomplete.rename(directory)
    return directory.absolute()


def _lineitem(bench: Bench) -> list[Figure]:
    return _publish(bench, "lineitem", bench.cached("lineitem"), bench.rounds)


def _narrow(bench: Bench) -> list[Figure]:
    rows = bench.spark.range(round(_NARROW_ROWS * bench.scale), numPartitions=_PARTITIONS)
    frame = rows.selectExpr("id", "rand(1) AS value").cache()
    return _publish(bench, "narrow", frame, _MORE_ROUNDS * bench.rounds)


def _publish(bench: Bench, name: str, frame: DataFrame, rounds: int) -> list[Figure]:
    """Measure publishing `frame`, and opening it in another process."""
    catalog, reader, count = bench.catalog, bench.reader, frame.count()
    parquet = str(bench.scratch / "out.parquet")
    publish(frame.limit(1), "one row", catalog)
    calls: dict[str, Callable[[], Any]] = {
        "floor: mapInArrow": lambda: _floor(frame),
        "no-op sink": lambda: _consume(frame),
        "publish": lambda: publish(frame, name, catalog),
        "Parquet": lambda: frame.write.mode("overwrite").parquet(parquet),
        "toArrow": frame.toArrow,
        "second process": lambda: _opened(reader, name),
        "second process, one row": lambda: _opened(reader, "one row"),
    }
    seconds = medians(calls, rounds)
    with dis.connect(catalog) as client:
        nbytes = client.describe(name).nbytes or 0
    print(f"\n{name}: {count:,} rows, {text.size(nbytes)} as Arrow, median of {rounds} rounds\n")
    lines = [
        (what, f"{took * 1e3:,.1f}", f"{nbytes / took / 1e6:,.0f}", f"{took / seconds['floor: mapInArrow']:.3f}")
        for what, took in seconds.items()
    ]
    print(text.table(("WHAT", "MS", "MB/S", "OF THE FLOOR"), lines, right=(1, 2, 3)))
    print(f"\ndriver's memory (Python): publish +{text.size(_growth(calls['publish']))}", flush=True)
    frame.unpersist()
    return _figures(f"{name}: ", seconds, _PUBLISH_GOALS)


def _figures(prefix: str, seconds: Mapping[str, float], goals: Sequence[Goal]) -> list[Figure]:
    return [
        Figure(
            goal._replace(ours=prefix + goal.ours),
            seconds[goal.ours] / seconds[goal.theirs],
            (f"{seconds[goal.ours] * 1e3:,.1f}", f"{seconds[goal.theirs] * 1e3:,.1f}"),
        )
        for goal in goals
    ]


def _print_goals(figures: Sequence[Figure]) -> None:
    lines = []
    for (ours, theirs, most), value, shown in figures:
        ratio = (f"{value:.3g}", f"{most:.3g}") if theirs else ("", f"{most * 1e3:g} ms")
        lines.append((ours, shown[0], theirs, shown[1], *ratio, "" if value <= most else "missed"))
    print("\ngoals: times in ms\n")
    heads = ("TIME OF", "MS", "BESIDE", "MS", "RATIO", "AT MOST", "")
    print(text.table(heads, lines, right=(1, 3, 4, 5)), flush=True)


def _first(bench: Bench) -> list[Figure]:
    """Measure the time from the commit of a small DataFrame to its first batch in another process."""
    frame = bench.spark.range(_FIRST_ROWS, numPartitions=_PARTITIONS).selectExpr("id", "rand(1) AS value").cache()

    def wait() -> float:
        publish(frame, "first", bench.catalog)
        started = time.perf_counter()
        _opened(bench.reader, "first", first=True)
        return time.perf_counter() - started

    name = _FIRST_GOAL.ours
    seconds = in_turns({name: wait}, 3 * _MORE_ROUNDS * bench.rounds)[name]
    return [Figure(_FIRST_GOAL, seconds, (f"{seconds * 1e3:,.1f}", ""))]


def _functions(bench: Bench) -> list[Figure]:
    """Measure the identity function over all columns, by Spark's own `mapInArrow` and in shared memory."""
    sources = {"dataset": bench.dataset("lineitem"), "Parquet": bench.files("lineitem")}
    calls: dict[str, Callable[[], Any]] = {}
    for name, source in sources.items():
        calls[f"no function, {name}"] = partial(_consume, source)
        calls[f"mapInArrow, {name}"] = partial(_consume, source.mapInArrow(_identity, source.schema))
        calls[f"map_in_arrow, {name}"] = partial(_consume, map_in_arrow(source, _identity, source.schema))
    seconds = medians(calls, bench.rounds)
    _print_times(f"Python functions over lineitem, median of {bench.rounds} rounds", seconds)
    return _figures("", seconds, _FUNCTION_GOALS)


def _print_times(title: str, seconds: Mapping[str, float]) -> None:
    print(f"\n{title}\n")
    lines = [(what, f"{took * 1e3:,.1f}") for what, took in seconds.items()]
    print(text.table(("WHAT", "MS"), lines, right=(1,)), flush=True)


def _identity(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from batches


def _local(bench: Bench) -> list[Figure]:
    """Measure the way of rows from Spark into this process, and back."""
    rows = bench.files("lineitem").limit(_LOCAL_ROWS).repartition(_PARTITIONS).cache()
    local = to_arrow(rows)
    rows.write.mode("overwrite").parquet(str(bench.scratch / "local.parquet"))
    files = bench.spark.read.parquet(str(bench.scratch / "local.parquet"))
    calls: dict[str, Callable[[], Any]] = {
        "toArrow, cached": rows.toArrow,
        "to_arrow, cached": partial(to_arrow, rows),
        "toArrow, Parquet": files.toArrow,
        "to_arrow, Parquet": partial(to_arrow, files),
        "createDataFrame": lambda: _consume(bench.spark.createDataFrame(local)),
        "create_dataframe": lambda: _consume(create_dataframe(bench.spark, local)),
    }
    grown = {what: _growth(calls[what]) for what in ("toArrow, cached", "to_arrow, cached")}
    rounds = _MORE_ROUNDS * bench.rounds
    seconds = medians(calls, rounds)
    _print_times(f"{local.num_rows:,} rows of lineitem to and from this process, median of {rounds} rounds", seconds)
    print(f"\ndriver's memory (Python): {', '.join(f'{what} +{text.size(size)}' for what, size in grown.items())}")
    rows.unpersist()
    return _figures("", seconds, _LOCAL_GOALS)


def _queries(bench: Bench) -> list[Figure]:
    """Measure queries of TPC-H over Parquet, cached DataFrames, and published datasets."""
    sources = {
        "Parquet": {name: bench.files(name) for name in _TABLES},
        "cached": {name: bench.cached(name) for name in _TABLES},
        "JVM": {name: bench.dataset(name) for name in _TABLES},
    }
    seconds = _query(bench, sources, _MORE_ROUNDS * bench.rounds)
    for frame in sources["cached"].values():
        frame.unpersist()
    return _figures("", seconds, _QUERY_GOALS)


def _query(bench: Bench, sources: Mapping[str, Mapping[str, DataFrame]], rounds: int) -> dict[str, float]:
    calls = {
        f"{query}, {source}": _asked(bench.spark, query, source, {name: frames[name] for name in used})
        for query, used in _QUERIES.items()
        for source, frames in sources.items()
    }
    seconds = medians(calls, rounds)
    lines = [
        (what, f"{took * 1e3:,.1f}", f"{took / seconds[what.partition(',')[0] + ', Parquet']:.2f}")
        for what, took in seconds.items()
    ]
    print(f"\nqueries, median of {rounds} rounds\n")
    print(text.table(("WHAT", "MS", "OF PARQUET"), lines, right=(1, 2)), flush=True)
    return seconds


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


def _transports(bench: Bench) -> list[Figure]:
    """Measure reading all of lineitem over each transport."""
    publish(bench.files("lineitem"), "lineitem", bench.catalog)
    calls: dict[str, Callable[[], Any]] = {"Parquet": partial(_consume, bench.files("lineitem"))}
    for transport in ("shm", "tcp", "grpc"):
        calls[transport] = partial(_read, bench, transport)
    _print_times(f"Spark reads lineitem, median of {bench.rounds} rounds", medians(calls, bench.rounds))
    return []


def _python(bench: Bench) -> list[Figure]:
    """Measure the data source in Python. It does not know the columns that a query uses, so they are named."""
    spark, frame = bench.spark, bench.cached("lineitem")
    calls: dict[str, Callable[[], Any]] = {
        "floor: mapInArrow": lambda: _floor(frame),
        "publish": lambda: publish(frame, "in Python", bench.catalog),
    }
    with _in_python(spark):
        _print_times(f"publish in Python, median of {bench.rounds} rounds", medians(calls, bench.rounds))
    frame.unpersist()
    for name in _TABLES:
        publish(bench.files(name), name, bench.catalog)
    for query, used in _QUERIES.items():
        with _in_python(spark):
            frames = {name: read(spark, name, bench.catalog, columns=columns) for name, columns in used.items()}
        sources = {"Parquet": {name: bench.files(name) for name in used}, "Python": frames}
        asked = {source: _asked(spark, query, source, some) for source, some in sources.items()}
        _print_times(f"{query}, median of {bench.rounds} rounds", medians(asked, bench.rounds))
    return []


def _memory(bench: Bench) -> list[Figure]:
    """Print Java's memory before and after several rounds of publishing and reading."""
    frame = bench.cached("lineitem")
    before = _java_memory(bench.spark)
    for _ in range(_MEMORY_ROUNDS):
        publish(frame, "lineitem", bench.catalog)
        for transport in ("shm", "tcp"):
            _read(bench, transport)
    told = (
        f"{what} {text.size(first)}, then {text.size(last)}"
        for (what, first), last in zip(before.items(), _java_memory(bench.spark).values(), strict=True)
    )
    print(
        f"\nJava's memory, before and after {_MEMORY_ROUNDS} rounds of publishing and reading: {'; '.join(told)}",
        flush=True,
    )
    frame.unpersist()
    return []


#: The parts with goals, and then the others, which run only if they are named.
_WITH_GOALS: dict[str, Callable[[Bench], list[Figure]]] = {
    "lineitem": _lineitem,
    "narrow": _narrow,
    "first-batch": _first,
    "queries": _queries,
    "functions": _functions,
    "local": _local,
}
PARTS = {**_WITH_GOALS, "transports": _transports, "python": _python, "memory": _memory}


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


def _read(bench: Bench, transport: str) -> None:
    _consume(read(bench.spark, "lineitem", bench.catalog, transport=transport))


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
    """Run a process that opens datasets. See `_opened`."""
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
            name, first = pipe.recv()
            rows = client.read(name, transport="shm")
            held = rows.read_next_batch() if first else rows.read_all()
            pipe.send(held.num_rows)
            rows.close()
            del held


def _opened(reader: Connection, name: str, first: bool = False) -> int:
    """Let the other process open a dataset and hold all of it, or its `first` batch. Returns the number of rows."""
    reader.send((name, first))
    count: int = reader.recv()
    return count
