"""Datasets of Ray Data. Needs `pip install 'dissociated[ray]'`."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from dissociated.adapters import imported
from dissociated.client.client import Client
from dissociated.client.dataset import DatasetHandle
from dissociated.client.partitions import PARTITION_BYTES, Partition, partitions, selected_schema
from dissociated.errors import CatalogUnreachable, DeadlineExceeded, DissociatedError, OptionError
from dissociated.node.local import stage_here
from dissociated.store.commit import Commit, StagedSegment
from dissociated.store.segment import SegmentWriter

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


def write_dissociated(
    rows: ray.data.Dataset,
    client: Client,
    name: str,
    *,
    schema: pa.Schema | None = None,
    mode: str = "overwrite",
    tags: Mapping[str, str] | None = None,
    ttl: float | None = None,
    **options: Any,
) -> None:
    """Publish a Dataset of Ray under `name`, atomically.

    Each task writes its blocks into memory of the node on its host, and starts a node there if there is none. Tasks
    contain the token of `client`.

    Args:
        rows: The rows.
        client: The client of the catalog.
        name: The name of the dataset.
        schema: The schema to which blocks are cast; None for that of the blocks, which must then be the same.
        mode: See `Client.put`.
        tags: See `Client.put`.
        ttl: See `Client.put`.
        **options: Further arguments of `ray.data.Dataset.write_datasink`, such as `concurrency`.

    Raises:
        OptionError: Ray Data is not installed, an argument is invalid, or blocks have different schemas.
        DissociatedError: The catalog refuses, or cannot be reached.

    Example:
        ```python
        from dissociated.adapters.ray import read_dissociated, write_dissociated

        far = read_dissociated(client["flights"], filter=("distance", ">", 1000))
        write_dissociated(far, client, "far", mode="append")
        ```
    """
    data = imported("ray.data", "ray")
    commit = Commit(name, schema=schema, key=secrets.token_hex(16), mode=mode, tags=tags or {}, ttl=ttl)

    class Dissociated(data.Datasink):  # type: ignore[misc, name-defined]
        """A sink whose tasks write segments, which are published together."""

        def write(self, blocks: Iterable[Any], context: Any) -> _Written | None:
            return _write(client, commit, context.task_idx, blocks)

        def on_write_complete(self, result: Any) -> None:
            _commit(client, commit, [written for written in result.write_returns if written is not None])

        def on_write_failed(self, error: Exception) -> None:
            with suppress(DissociatedError):  # the catalog itself gives up uncommitted segments later
                client.abort(commit.key)

    rows.write_datasink(Dissociated(), **options)


class _Written(NamedTuple):
    """The result of a task, for the driver: its segment, and the schema of its blocks."""

    task: int
    segment: StagedSegment
    schema: pa.Schema


def _write(client: Client, commit: Commit, task: int, blocks: Iterable[Any]) -> _Written | None:
    """In a task: write blocks into a segment on this host. Return None if they have no rows."""
    accessor = imported("ray.data.block", "ray").BlockAccessor
    tables = (accessor.for_block(block).to_arrow() for block in blocks)
    filled = (table for table in tables if table.num_rows)
    first = next(filled, None)
    if first is None:
        return None
    schema = commit.schema or first.schema.remove_metadata()
    stage = stage_here(client.uri, client.with_uri)
    segment = f"{commit.key}-{task:06}-{secrets.token_hex(8)}.arrows"  # a repeated task has a segment of its own
    with ExitStack() as stack:
        reserve = stack.enter_context(client.with_uri(stage.flight)).reserve if stage.limited else None
        path = stack.enter_context(stage.open()) / segment
        writer = stack.enter_context(SegmentWriter(path, schema, reserve=reserve))
        for table in chain([first], filled):
            for batch in _conform(table, schema).to_batches():
                writer.write(batch)
    return _Written(task, StagedSegment(segment, stage.node), schema)


def _conform(table: pa.Table, schema: pa.Schema) -> pa.Table:
    try:
        return table.select(schema.names).cast(schema)
    except (KeyError, ValueError, pa.ArrowException) as error:
        raise OptionError(f"a block does not fit the schema of the dataset: give schema=... ({error})") from None


def _commit(client: Client, commit: Commit, results: Sequence[_Written]) -> None:
    """On the driver: publish the segments of all tasks, in the order of the tasks."""
    results = sorted(results, key=lambda written: written.task)
    schemas = [written.schema for written in results] or [commit.schema]
    if schemas[0] is None:
        raise OptionError("there are no rows, so the columns are unknown: give schema=...")
    for schema in schemas:
        if not schema.equals(schemas[0]):
            raise OptionError(
                f"tasks have written different schemas: give schema=... ({schemas[0].to_string()!r} and "
                f"{schema.to_string()!r})"
            )
    segments = [written.segment for written in results]
    if not segments:
        segments = [StagedSegment("", stage_here(client.uri, client.with_uri).node)]
    try:
        client.commit(replace(commit, schema=schemas[0], segments=segments))
    except (CatalogUnreachable, DeadlineExceeded):
        client.abort(commit.key)  # waits for a commit in progress, or prevents it
        if not client.committed(commit.key):
            raise
