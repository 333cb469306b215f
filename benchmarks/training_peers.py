"""Peers of the benchmark of training: each writes the data in its own format, and yields shuffled batches of tensors.

A peer that is not installed is left out: `pip install -e '.[bench-training]'` installs all of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

#: A function that yields the batches of an epoch, which map names to arrays or tensors.
Epoch: TypeAlias = Callable[[], Iterator[Any]]

_SHARD_ROWS = 65_536
_BUFFER = 65_536  # rows that WebDataset shuffles together


class Data:
    """The data of the benchmark: a table of columns of float32 and a label, as arrays, and as a file of Parquet."""

    def __init__(self, table: pa.Table, path: Path, batch_size: int) -> None:
        self._table = table
        self.path = path
        self.folder = path.parent
        self.batch_size = batch_size
        self.arrays: dict[str, Any] = {name: table[name].to_numpy() for name in table.column_names}
        self.label = self.arrays["label"]
        self.matrix = np.stack([array for name, array in self.arrays.items() if name != "label"], 1)

    def first(self, rows: int) -> Data:
        """Return the data of the first rows, and write their file."""
        table, path = self._table.slice(0, rows), self.path.with_stem("first")
        pq.write_table(table, path)
        return Data(table, path, self.batch_size)


def parquet(path: Path, groups: int, batch_size: int) -> Iterator[dict[str, Any]]:
    """Yield batches of row groups that are read in random order, and whose rows are shuffled, `groups` at a time."""
    file = pq.ParquetFile(path)
    order = np.random.permutation(file.num_row_groups)
    for start in range(0, len(order), groups):
        window = file.read_row_groups(order[start : start + groups].tolist())
        yield from permuted({name: window[name].to_numpy() for name in window.column_names}, batch_size)


def permuted(arrays: dict[str, Any], batch_size: int) -> Iterator[dict[str, Any]]:
    """Yield batches of all rows in random order."""
    order = np.random.permutation(len(arrays["label"]))
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        yield {name: array[rows] for name, array in arrays.items()}


def epochs(data: Data, few_rows: int) -> dict[str, Epoch]:
    """Return the epochs of all peers that are installed, by their name, and print which are not.

    Peers that make an object of each row have the first `few_rows` rows, and say so in their name.
    """
    few = data.first(few_rows)
    of_few = f"the first {few_rows:,} rows"
    peers: list[tuple[str, Sequence[str], Callable[[Data], Epoch], Data]] = [
        ("DataLoader over Parquet, a window of 16", ["torch"], _parquet, data),
        (f"DataLoader over tensors in memory, {of_few}", ["torch"], _tensors, few),
        (f"MosaicML streaming, {of_few}", ["torch", "streaming"], _mosaic, few),
        (f"WebDataset, {of_few}", ["torch", "webdataset"], _webdataset, few),
        (f"Hugging Face datasets, {of_few}", ["torch", "datasets"], _huggingface, few),
    ]
    installed = {}
    for name, packages, make, given in peers:
        missing = [package for package in packages if find_spec(package) is None]
        if missing:
            print(f"{name} is left out, since {missing[0]} is not installed: pip install -e '.[bench-training]'")
        else:
            installed[name] = make(given)
    return installed


def _tensors(data: Data) -> Epoch:
    from torch import tensor
    from torch.utils.data import DataLoader, TensorDataset

    tensors = TensorDataset(tensor(data.matrix), tensor(data.label))
    return partial(_named, partial(DataLoader, tensors, batch_size=data.batch_size, shuffle=True))


def _parquet(data: Data) -> Epoch:
    from torch import from_numpy
    from torch.utils.data import DataLoader, IterableDataset

    class _Rows(IterableDataset):  # type: ignore[misc]  # where PyTorch is not installed
        def __iter__(self) -> Iterator[Any]:
            for batch in parquet(data.path, 16, data.batch_size):
                yield {name: from_numpy(array) for name, array in batch.items()}

    return lambda: iter(DataLoader(_Rows(), batch_size=None))


def _mosaic(data: Data) -> Epoch:
    streaming: Any = import_module("streaming")
    from torch.utils.data import DataLoader

    folder = str(data.folder / "mosaic")
    columns = {"features": f"ndarray:float32:{data.matrix.shape[1]}", "label": "int64"}
    with streaming.MDSWriter(out=folder, columns=columns) as writer:
        for features, label in zip(data.matrix, data.label, strict=True):
            writer.write({"features": features, "label": label})

    def epoch() -> Iterator[Any]:
        streaming.base.util.clean_stale_shared_memory()  # of the dataset of an earlier epoch in this process
        rows = streaming.StreamingDataset(local=folder, shuffle=True, batch_size=data.batch_size)
        return iter(DataLoader(rows, batch_size=data.batch_size))

    return epoch


def _webdataset(data: Data) -> Epoch:
    webdataset: Any = import_module("webdataset")

    for start in range(0, len(data.label), _SHARD_ROWS):
        with webdataset.TarWriter(str(data.folder / f"{start:09}.tar")) as writer:
            for row in range(start, min(start + _SHARD_ROWS, len(data.label))):
                sample = {"features.npy": data.matrix[row], "label.cls": int(data.label[row])}
                writer.write({"__key__": f"{row:09}", **sample})
    shards = [str(path) for path in sorted(data.folder.glob("*.tar"))]

    def epoch() -> Iterator[Any]:
        rows = webdataset.WebDataset(shards, shardshuffle=len(shards), empty_check=False).shuffle(_BUFFER).decode()
        pairs = rows.to_tuple("features.npy", "label.cls").batched(data.batch_size)
        return _named(lambda: webdataset.WebLoader(pairs, batch_size=None))

    return epoch


def _huggingface(data: Data) -> Epoch:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the data is here
    datasets: Any = import_module("datasets")
    from torch.utils.data import DataLoader

    rows = datasets.Dataset.from_parquet(str(data.path), cache_dir=str(data.folder / "huggingface"))
    return lambda: iter(DataLoader(rows.with_format("torch"), batch_size=data.batch_size, shuffle=True))


def _named(pairs: Callable[[], Any]) -> Iterator[dict[str, Any]]:
    return ({"features": features, "label": label} for features, label in pairs())
