"""An epoch of batches for training, beside Parquet, arrays in memory, and PyTorch's DataLoader if it is installed.

The data are columns of float32 and one integer label, by which the rows are sorted, in record batches of 65,536 rows in
tmpfs. Batches have 4,096 rows. Each epoch sums a column of each batch, so that it is read.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import dissociated as dis
from benchmarks.rounds import medians
from dissociated.cli import text
from dissociated.training import Batches

_BATCH = 4096
_RECORD_BATCH = 65_536
_COLUMNS = [f"f{column}" for column in range(30)]
_BASE = "Batches, shuffle='global', features"


def run(gigabytes: float, rounds: int) -> None:
    """Print the time of an epoch for each way to read it, and its ratio to that of a global shuffle."""
    rows = max(2 * _RECORD_BATCH, int(gigabytes * 1e9) // (4 * len(_COLUMNS) + 8))
    random = np.random.default_rng(1)
    columns: dict[str, Any] = {name: random.random(rows, np.float32) for name in _COLUMNS}
    table = pa.table({**columns, "label": np.sort(random.integers(0, 1000, rows))})
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, dis.Server(["shm:", "tcp://127.0.0.1:0"]) as server:
        path = Path(folder, "data.parquet")
        pq.write_table(table, path, row_group_size=_RECORD_BATCH)
        batches = pa.Table.from_batches(table.to_batches(max_chunksize=_RECORD_BATCH))
        server.publish("data", batches, wait=True)
        with dis.connect(server.catalog_uri) as client:
            calls = {**_ours(client), **_peers(table, path)}
            print(f"{rows:,} rows, {len(_COLUMNS)} columns of float32 and a label, batches of {_BATCH:,} rows")
            epochs = {name: partial(_read, call) for name, call in calls.items()}
            for measured, title in ((epochs, "an epoch"), (_first(calls), "the first batch")):
                seconds = medians(measured, rounds)
                base = seconds[_BASE]
                found = [[name, f"{time * 1000:,.1f} ms", f"{time / base:.2f}"] for name, time in seconds.items()]
                print("\n" + text.table((title.upper(), "TIME", "RATIO"), found, right=(1, 2)))


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


def _peers(table: pa.Table, path: Path) -> dict[str, Callable[[], Iterator[Any]]]:
    arrays = {name: table[name].to_numpy() for name in table.column_names}
    matrix = np.stack([arrays[name] for name in _COLUMNS], 1)
    peers: dict[str, Callable[[], Iterator[Any]]] = {
        "a matrix in memory, all rows shuffled": partial(_permuted, {"features": matrix, "label": arrays["label"]}),
        "columns in memory, all rows shuffled": partial(_permuted, arrays),
        "Parquet, row groups shuffled, a window of 16": partial(_parquet, path, 16),
        "Parquet, row groups shuffled, a window of 1": partial(_parquet, path, 1),
    }
    if find_spec("torch") is None:
        print("PyTorch is not installed: its DataLoader is left out")
        return peers
    from torch import from_numpy
    from torch.utils.data import DataLoader, TensorDataset

    tensors = TensorDataset(from_numpy(matrix), from_numpy(arrays["label"]))
    peers["DataLoader over tensors in memory"] = lambda: (
        {"features": x, "label": y} for x, y in DataLoader(tensors, batch_size=_BATCH, shuffle=True)
    )
    return peers


def _permuted(arrays: dict[str, Any]) -> Iterator[Any]:
    order = np.random.permutation(len(arrays["label"]))
    for start in range(0, len(order), _BATCH):
        rows = order[start : start + _BATCH]
        yield {name: array[rows] for name, array in arrays.items()}


def _parquet(path: Path, groups: int) -> Iterator[Any]:
    """Yield batches of row groups that are read in random order, and whose rows are shuffled, some at a time."""
    file = pq.ParquetFile(path)
    order = np.random.permutation(file.num_row_groups)
    for start in range(0, len(order), groups):
        window = file.read_row_groups(order[start : start + groups].tolist())
        arrays = {name: window[name].to_numpy() for name in window.column_names}
        yield from _permuted(arrays)


def _read(call: Callable[[], Iterator[Any]]) -> None:
    for batch in call():
        float(batch["label"].sum())


def _first(calls: dict[str, Callable[[], Iterator[Any]]]) -> dict[str, Callable[[], Any]]:
    return {name: partial(lambda read: next(read()), call) for name, call in calls.items()}
