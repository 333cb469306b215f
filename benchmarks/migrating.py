"""Processor time of a gigabyte that goes from one process to another, in the ways of docs/migrating.md.

Each figure is the time that all processes of a way take together: the producer, the consumer, and the server, Ray or
Java between them. The consumer computes the sum of each column, so it reads every byte.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.flight as flight

import dissociated as dis
from benchmarks.spark import node
from dissociated.spark import publish, session

_CONTEXT = multiprocessing.get_context("spawn")
_TICK = os.sysconf("SC_CLK_TCK")
_BATCH = 1 << 17  # rows of a batch of 8 MB
#: Hands the table over, under a name that was not used before, and lets the consumer read it.
Way = Callable[[str], object]


def run(gigabytes: float, rounds: int) -> None:
    """Measure, and print the table."""
    table = _table(gigabytes)
    with (
        TemporaryDirectory(dir="/dev/shm") as directory,
        node() as catalog,
        _consumer(catalog) as consumer,
        dis.connect(catalog) as client,
        dis.Server(["tcp:", "shm:"]) as server,
    ):
        server.publish("table", table)
        groups = [_ways(table, Path(directory), client, server.catalog_uri, consumer)]
        # Ray and Spark have processes that are never quite idle. They count in their own ways only.
        processes = [_children()]
        groups.append(_with_ray(table))
        processes.append(_children().difference(*processes))
        groups.append(_with_spark(gigabytes, catalog, consumer))
        processes.append(_children().difference(*processes))
        taken: dict[str, list[float]] = {name: [] for group in groups for name in group}
        for number in range(rounds + 1):
            for group, own in zip(groups, processes, strict=True):
                others = set[int]().union(*processes[1:]) - own
                for name, way in group.items():
                    before = _processor_time(others)
                    way(f"{list(taken).index(name)}-{number}")
                    taken[name].append(_processor_time(others) - before)
    print(f"{table.nbytes / 1e9:.2f} GB, medians of {rounds} rounds\n\nprocessor seconds for each GB")
    for name, seconds in taken.items():  # the first round starts and compiles
        print(f"{statistics.median(seconds[1:]) / table.nbytes * 1e9:8.2f}  {name}")


def _table(gigabytes: float) -> pa.Table:
    random = np.random.default_rng(1)
    rows = round(gigabytes * 1e9 / 64)
    return pa.Table.from_batches(
        pa.table({f"c{n}": random.random(rows) for n in range(8)}).to_batches(max_chunksize=_BATCH)
    )


def _ways(
    table: pa.Table, directory: Path, client: dis.Client, server: str | None, consumer: Connection
) -> dict[str, Way]:
    def file(name: str) -> None:
        path = directory / name
        with pa.OSFile(str(path) + ".new", "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        os.rename(str(path) + ".new", path)
        _read(consumer, "file", str(path))
        path.unlink()

    def put(name: str) -> None:
        client.put(name, table)
        _read(consumer, "dissociated", name)
        client.drop(name)

    served = _Flight(table)
    return {
        "a file in /dev/shm": file,
        "put, read": put,
        "Flight's DoGet": lambda name: _read(consumer, "flight", f"grpc://127.0.0.1:{served.port}"),
        "publish in a server, read over tcp": lambda name: _read(consumer, "tcp", str(server)),
        "publish in a server, read over shm": lambda name: _read(consumer, "shm", str(server)),
    }


def _with_ray(table: pa.Table) -> dict[str, Way]:
    if find_spec("ray") is None:
        return {}
    import ray

    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=4 * table.nbytes)
    summed = ray.remote(_sum)
    return {"ray.put, ray.get in a task": lambda name: ray.get(summed.remote(ray.put(table)))}


def _with_spark(gigabytes: float, catalog: str, consumer: Connection) -> dict[str, Way]:
    settings = {"spark.log.level": "ERROR", "spark.driver.maxResultSize": "0", "spark.driver.memory": "6g"}
    spark = session("benchmark", **settings)
    columns = [f"rand({n}) AS c{n}" for n in range(8)]
    frame = spark.range(round(gigabytes * 1e9 / 64), numPartitions=4).selectExpr(*columns).cache()
    frame.count()

    def to_pandas(name: str) -> None:
        pandas: Any = frame.toPandas()
        pandas.sum()

    def published(name: str) -> None:
        publish(frame, name, catalog)
        _read(consumer, "dissociated", name)

    return {
        "toArrow, in the driver": lambda name: _sum(frame.toArrow()),
        "toPandas, in the driver": to_pandas,
        "spark.publish, read": published,
        "Spark alone, without a result": lambda name: frame.write.format("noop").mode("overwrite").save(),
    }


class _Flight(flight.FlightServerBase):  # type: ignore[misc]  # pyarrow has no type hints
    """A server of Flight with one table."""

    def __init__(self, table: pa.Table) -> None:
        super().__init__("grpc://127.0.0.1:0")
        self._table = table

    def do_get(self, context: object, ticket: object) -> flight.RecordBatchStream:
        return flight.RecordBatchStream(self._table)


def _sum(table: pa.Table) -> list[float]:
    return [pc.sum(column).as_py() for column in table.columns]


def _read(consumer: Connection, way: str, place: str) -> None:
    consumer.send((way, place))
    consumer.recv()


def _consume(catalog: str, pipe: Connection) -> None:
    with dis.connect(catalog) as client:
        while (command := pipe.recv()) is not None:
            way, place = command
            if way == "file":
                table = pa.ipc.open_file(pa.memory_map(place)).read_all()
            elif way == "flight":
                table = flight.connect(place).do_get(flight.Ticket(b"")).read_all()
            elif way == "dissociated":
                table = client.read(place).read_all()
            else:
                with dis.connect(place) as other:
                    table = other.read("table", transport=way).read_all()
            pipe.send(_sum(table))
            del table


@contextmanager
def _consumer(catalog: str) -> Iterator[Connection]:
    """Yield the pipe to a process that reads on command."""
    ours, theirs = _CONTEXT.Pipe()
    process = _CONTEXT.Process(target=_consume, args=(catalog, theirs), daemon=True)
    process.start()
    yield ours
    ours.send(None)
    process.join()


def _children() -> set[int]:
    """Return the processes that this process has started."""
    return {process for process, (parent, _) in _processes().items() if parent == os.getpid()}


def _processor_time(without: Set[int]) -> float:
    """Return the seconds of the processor that this process and its descendants have taken.

    Args:
        without: Processes that do not count, and their descendants neither.
    """
    processes = _processes()
    total = 0
    for process, (_, ticks) in processes.items():
        ancestor = process
        while ancestor not in (os.getpid(), 0) and ancestor not in without:
            ancestor, _ = processes.get(ancestor, (0, 0))
        total += ticks if ancestor == os.getpid() else 0
    return total / _TICK


def _processes() -> dict[int, tuple[int, int]]:
    """Return the parent of each process of the machine, and its ticks with those of its children that have ended."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        found[int(entry.name)] = int(fields[1]), sum(map(int, fields[11:15]))
    return found
