"""Datasets of Hugging Face `datasets`. Needs `pip install 'dissociated[huggingface]'`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from dissociated.adapters import identity, imported
from dissociated.client.dataset import DatasetHandle
from dissociated.client.partitions import PARTITION_BYTES, Partition, partitions, selected_schema
from dissociated.codec.filter.row_filter import filter_identity

if TYPE_CHECKING:
    import datasets


def to_iterable_dataset(
    dataset: DatasetHandle,
    *,
    columns: Sequence[str] | None = None,
    filter: Any = None,
    partition_bytes: int = PARTITION_BYTES,
) -> datasets.IterableDataset:
    """Return an IterableDataset over a version of a dataset, with a shard for each partition.

    Each worker of a DataLoader reads its shards by itself. `with_format("arrow")` yields tables, without conversion to
    Python. Pickled shards contain the token of the dataset's client.

    Args:
        dataset: The version.
        columns: The columns to read, in this order; None for all.
        filter: See `Client.read`.
        partition_bytes: The approximate size of a partition of all columns, before the filter.

    Raises:
        OptionError: Hugging Face `datasets` is not installed, or the filter is invalid.
        ColumnNotFound: A column does not exist.
        WrongKind: The dataset holds tensors.

    Example:
        ```python
        from dissociated.adapters.huggingface import to_iterable_dataset

        flights = to_iterable_dataset(client["flights"], columns=["dest", "distance"])
        for row in flights.shuffle(seed=1, buffer_size=100).take(3):
            print(row["dest"], row["distance"])
        ```
    """
    library = imported("datasets", "huggingface")
    iterable = imported("datasets.iterable_dataset", "huggingface")
    planned = partitions(dataset, columns, filter, partition_bytes)
    features = library.Features.from_arrow_schema(selected_schema(dataset.schema, columns))
    # `datasets` divides every list among its arguments between shards, and a filter may be a list, too.
    tables = partial(_tables, columns=columns, filter=filter)
    return library.IterableDataset(
        iterable.ArrowExamplesIterable(tables, {"partitions": planned}), library.DatasetInfo(features=features)
    )


def to_dataset(dataset: DatasetHandle, *, columns: Sequence[str] | None = None, filter: Any = None) -> datasets.Dataset:
    """Return a Dataset in memory. If the version lies in shared memory, its columns stay there, without a copy.

    Args:
        dataset: The version.
        columns: The columns to read, in this order; None for all.
        filter: See `Client.read`.

    Raises:
        OptionError: Hugging Face `datasets` is not installed, or the filter is invalid.
        ColumnNotFound: A column does not exist.
        DissociatedError: Further errors of `Client.read`.

    Example:
        ```python
        from dissociated.adapters.huggingface import to_dataset

        flights = to_dataset(client["flights"])
        assert flights[1999]["distance"] == 1999.0
        ```
    """
    library = imported("datasets", "huggingface")
    table = dataset.to_table(columns, filter=filter)
    # Without a fingerprint, `datasets` would pickle the whole table to compute its own.
    condition = None if filter is None else filter_identity(filter, dataset.schema)
    selection = repr((identity(dataset), columns, condition))
    return library.Dataset(table, fingerprint=hashlib.sha256(selection.encode()).hexdigest())


def _tables(
    partitions: Sequence[Partition], columns: Sequence[str] | None, filter: Any
) -> Iterator[tuple[tuple[Any, ...], pa.Table]]:
    """Yield each batch of the partitions as a table, after a key of its own."""
    for partition in partitions:
        for number, batch in enumerate(partition.read(columns, filter)):
            yield (partition.number, partition.slice, number), pa.Table.from_batches([batch])
