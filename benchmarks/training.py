"""An epoch of batches for training, beside Parquet, arrays in memory, and the loaders that are installed.

The data are columns of float32 and one integer label, by which the rows are sorted, in record batches of 65,536 rows in
tmpfs. Batches have 4,096 rows. Each epoch sums a column of each batch, so that it is read. Loaders that make an object
of each row take hundreds of times as long as the others. They have an epoch of the first 8,192 rows only, and times of
epochs are those of a million rows.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import dissociated as dis
from benchmarks import training_spark
from benchmarks.rounds import in_turns
from benchmarks.training_peers import Data, epochs, parquet, permuted
from dissociated.cli import text
from dissociated.training import Batches

_BATCH = 4096
_RECORD_BATCH = 65_536
_FEW_ROWS = 2 * _BATCH  # for the loaders that make an object of each row
_COLUMNS = [f"f{column}" for column in range(30)]
_BASE = "Batches, shuffle='global', features"


def run(gigabytes: float, rounds: int) -> None:
    """Print the times of an epoch and of the first batch of each loader, and their ratios to a global shuffle."""
    rows = max(4 * _BATCH, int(gigabytes * 1e9) // (4 * len(_COLUMNS) + 8))
    random = np.random.default_rng(1)
    columns: dict[str, Any] = {name: random.random(rows, np.float32) for name in _COLUMNS}
    table = pa.table({**columns, "label": np.sort(random.integers(0, 1000, rows))})
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, dis.Server(["shm:", "tcp://127.0.0.1:0"]) as server:
        path = Path(folder, "data.parquet")
        pq.write_table(table, path, row_group_size=_RECORD_BATCH)
        batches = pa.Table.from_batches(table.to_batches(max_chunksize=_RECORD_BATCH))
        server.publish("data", batches, wait=True)
        with dis.connect(server.catalog_uri) as client:
            calls = {**_ours(client), **_peers(Data(table, path, _BATCH), _FEW_ROWS)}
            print(f"{rows:,} rows, {len(_COLUMNS)} columns of float32 and a label, batches of {_BATCH:,} rows")
            whole = {name: partial(_read, call) for name, call in calls.items()}
            for measured, title in ((whole, "a million rows of an epoch"), (_first(calls), "the first batch")):
                _compare(title, measured, rounds)
    training_spark.run(rows, _BATCH, rounds)


def _compare(title: str, calls: Mapping[str, Callable[[], float]], rounds: int) -> None:
    """Print the median time of each call, and the ratios of its time and its processor time to those of the base.

    The times of a call are divided by the number that it returns.
    """
    processor: dict[str, list[float]] = {name: [] for name in calls}

    def run(name: str) -> float:
        started, busy = time.perf_counter(), time.process_time()
        count = calls[name]()
        processor[name].append((time.process_time() - busy) / count)
        return (time.perf_counter() - started) / count

    seconds = in_turns({name: partial(run, name) for name in calls}, rounds)
    of_processor = {name: statistics.median(times[1:]) for name, times in processor.items()}  # the first warms up
    lines = [
        [
            name,
            f"{wall * 1000:,.1f} ms",
            f"{wall / seconds[_BASE]:.2f}",
            f"{of_processor[name] / of_processor[_BASE]:.2f}",
        ]
        for name, wall in seconds.items()
    ]
    print("\n" + text.table((title.upper(), "TIME", "RATIO", "OF PROCESSOR TIME"), lines, right=(1, 2, 3)), flush=True)


def _ours(client: dis.Client) -> dict[str, Callable[[], Iterator[Any]]]:
    def read(transport: str, **options: Any) -> Iterator[Any]:
        return iter(Batches(client.dataset("data", transport=transport), batch_size=_BATCH, **options))

    features = {"features": _COLUMNS}
    return {
        _BASE: partial(read, "shm", shuffle="global", **features),
        "Batches, shuffle='global', columns": partial(read, "shm", shuffle="global"),
        "Batches, shuffle='window', features": partial(read, "shm", shuffle="window", **features),
        "Batches, shuffle='window', columns": partial(read, "shm", shuffle="window"),
        "Batches, no shuffle, features": partial(read, "shm", **features),
        "Batches, no shuffle, columns": partial(read, "shm"),
        "Batches over tcp, shuffle='window', features": partial(read, "tcp", shuffle="window", **features),
    }


def _peers(data: Data, few_rows: int) -> dict[str, Callable[[], Iterator[Any]]]:
    matrix = {"features": data.matrix, "label": data.label}
    return {
        "a matrix in memory, all rows shuffled": partial(permuted, matrix, _BATCH),
        "columns in memory, all rows shuffled": partial(permuted, data.arrays, _BATCH),
        "Parquet, row groups shuffled, a window of 16": partial(parquet, data.path, 16, _BATCH),
        "Parquet, row groups shuffled, a window of 1": partial(parquet, data.path, 1, _BATCH),
        **epochs(data, few_rows),
    }


def _read(call: Callable[[], Iterator[Any]]) -> float:
    """Read an epoch, and return its number of rows in millions."""
    rows = 0
    for batch in call():
        float(batch["label"].sum())
        rows += len(batch["label"])
    return rows / 1e6


def _first(calls: dict[str, Callable[[], Iterator[Any]]]) -> dict[str, Callable[[], float]]:
    def read(call: Callable[[], Iterator[Any]]) -> float:
        next(call())
        return 1

    return {name: partial(read, call) for name, call in calls.items()}
