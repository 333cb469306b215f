"""Datasets of Ray Data. Needs `pip install 'dissociated[ray]'`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from dissociated.adapters import imported
from dissociated.client.dataset import DatasetHandle
from dissociated.client.partitions import PARTITION_BYTES, Partition, partitions, selected_schema

if TYPE_CHECKING:
    import ray.data


def read_dissociated(
    dataset: DatasetHandle,
    *,
    columns: Sequence[str] | None = None,
    filter: Any = None,
    partition_bytes: int = PARTITION_BYTES,
    **options: Any,
) -> ray.data.Dataset:
    """Return a Dataset of Ray over a version of a dataset. Each task reads its partitions by itself.

    Tasks contain the token of the dataset's client.

    Args:
        dataset: The version.
        columns: The columns to read, in this order; None for all.
        filter: See `Client.read`.
        partition_bytes: The approximate size of a partition of all columns, before the filter.
        **options: Further arguments of `ray.data.read_datasource`, such as `num_cpus` and `concurrency`.

    Raises:
        OptionError: Ray Data is not installed, or the filter is invalid.
        ColumnNotFound: A column does not exist.
        WrongKind: The dataset holds tensors.

    Example:
        ```python
        from dissociated.adapters.ray import read_dissociated

        flights = read_dissociated(client["flights"], columns=["distance"], filter=("distance", ">", 1000))
        print(flights.mean("distance"))
        ```
    """
    data = imported("ray.data", "ray")
    planned = partitions(dataset, columns, filter, partition_bytes)
    schema = selected_schema(dataset.schema, columns)

    class Dissociated(data.Datasource):  # type: ignore[misc, name-defined]
        """A source of tasks, one for each partition."""

        def get_read_tasks(self, parallelism: int, *limits: Any, **more: Any) -> list[Any]:
            block = imported("ray.data.block", "ray")
            row_limit = more.get("per_task_row_limit", limits[0] if limits else None)
            return [
                data.ReadTask(
                    partial(_blocks, part, schema, columns, filter),
                    block.BlockMetadata(
                        num_rows=None if filter is not None else part.rows,
                        size_bytes=part.nbytes,
                        input_files=None,
                        exec_stats=None,
                    ),
                    schema=schema,
                    per_task_row_limit=row_limit,
                )
                for part in planned
            ]

        def estimate_inmemory_data_size(self) -> int | None:
            return dataset.nbytes

    return data.read_datasource(Dissociated(), override_num_blocks=len(planned) or None, **options)


def _blocks(part: Partition, schema: pa.Schema, columns: Sequence[str] | None, filter: Any) -> Iterable[pa.Table]:
    """In a task: read a partition as one block."""
    # Ray copies a block into its own store when the task yields it.
    return [pa.Table.from_batches(part.read(columns, filter), schema)]
