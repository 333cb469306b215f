"""The time from the commit of a Spark DataFrame to the first training batch in another process, beside Parquet.

A node in a process of its own serves. The process that trains is connected to its catalog already. It is told by a pipe
that the DataFrame was committed, or that Spark has written the files of Parquet to tmpfs, and sends the time at which
it has its first batch of shuffled rows.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

import dissociated as dis
from benchmarks.spark import node
from benchmarks.training_peers import permuted
from dissociated.cli import text
from dissociated.training import Batches

_CONTEXT = multiprocessing.get_context("spawn")
_COLUMNS = 30
_PARTITIONS = 4


def run(rows: int, batch_size: int, rounds: int) -> None:
    """Measure, and print the table. Nothing is measured if PySpark is not installed."""
    if find_spec("pyspark") is None:
        print("\nThe first batch after a commit of Spark is left out: pip install -e '.[spark]'")
        return
    from dissociated.spark import publish, session

    ours, theirs = _CONTEXT.Pipe()
    with node() as catalog, tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        trainer = _CONTEXT.Process(target=_train, args=(catalog, batch_size, theirs), daemon=True)
        trainer.start()
        theirs.close()  # so that a trainer that fails ends this run
        spark = session("benchmark", **{"spark.log.level": "ERROR"})
        columns = [f"CAST(rand({column}) AS float) AS f{column}" for column in range(_COLUMNS)]
        frame = spark.range(rows, numPartitions=_PARTITIONS).selectExpr(*columns, "id % 1000 AS label").cache()
        frame.count()
        path = str(Path(folder, "out.parquet"))
        writes: dict[str, tuple[Callable[[], Any], str, str]] = {
            "publish, and Batches": (lambda: publish(frame, "training", catalog), "dataset", "training"),
            "Parquet, all files": (lambda: frame.write.mode("overwrite").parquet(path), "files", path),
            "Parquet, one file": (lambda: frame.write.mode("overwrite").parquet(path), "file", path),
        }
        figures: dict[str, list[tuple[float, float]]] = {name: [] for name in writes}
        for turn in range(rounds + 1):  # the first warms up
            for name, (write, kind, place) in writes.items():
                started = time.monotonic()
                write()
                committed = time.monotonic()
                ours.send((kind, place))
                arrived = ours.recv()
                if turn:
                    figures[name].append((arrived - committed, arrived - started))
        spark.stop()
        trainer.kill()
    lines = [
        (name, *(f"{statistics.median(seconds) * 1000:,.1f} ms" for seconds in zip(*pairs, strict=True)))
        for name, pairs in figures.items()
    ]
    print(f"\n{rows:,} rows of Spark, {_PARTITIONS} partitions: to the first batch in another process\n")
    print(text.table(("WHAT", "FROM THE COMMIT", "WITH WRITING"), lines, right=(1, 2)), flush=True)


def _train(catalog: str, batch_size: int, pipe: Connection) -> None:
    with dis.connect(catalog) as client:
        while True:
            kind, place = pipe.recv()
            if kind == "dataset":
                handle = client.dataset(place, transport="shm")
                batches = iter(Batches(handle, batch_size=batch_size, shuffle="global"))
            else:
                files = [*Path(place).glob("*.parquet")]
                table = pq.read_table(files if kind == "files" else files[np.random.randint(len(files))])
                batches = permuted({name: table[name].to_numpy() for name in table.column_names}, batch_size)
            float(next(batches)["label"].sum())
            pipe.send(time.monotonic())
            del batches
