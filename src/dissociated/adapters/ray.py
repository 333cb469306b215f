"""Datasets of Ray Data. Needs `pip install 'dissociated[ray]'`."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import pyarrow as pa

from dissociated.adapters import imported
from dissociated.client.client import Client
from dissociated.client.dataset import DatasetHandle
from dissociated.client.partitions import PARTITION_BYTES, Partition, partitions, selected_schema
from dissociated.client.put import was_published
from dissociated.client.staging import staged_file
from dissociated.codec.schemas import schema_difference
from dissociated.control.commit import Commit, StagedSegment
from dissociated.errors import DissociatedError, OptionError
from dissociated.node.local import stage_here
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
                    partial(_blocks, part, columns, filter),
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

    rows: ray.data.Dataset = data.read_datasource(Dissociated(), override_num_blocks=len(planned) or None, **options)
    return rows


def _blocks(part: Partition, columns: Sequence[str] | None, filter: Any) -> Iterable[pa.Table]:
    """In a task: read a partition as one block."""
    # Ray copies a block into its own store when the task yields it.
    return [part.read_table(columns, filter)]


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
        schema: The schema of the dataset. Blocks have exactly its columns, in any order, and are cast to its types as
            far as Arrow considers it safe. None for the schema of the blocks, which must then all have the same.
        mode: See `Client.put`.
        tags: See `Client.put`.
        ttl: See `Client.put`.
        **options: Further arguments of `ray.data.Dataset.write_datasink`, such as `concurrency`.

    Raises:
        OptionError: Ray Data is not installed, an argument is invalid, blocks have different schemas, or a block does
            not fit `schema`.
        DissociatedError: The catalog refuses, or cannot be reached. The message says so if the rows may have been
            published nevertheless.

    Example:
        ```python
        from dissociated.adapters.ray import read_dissociated, write_dissociated

        far = read_dissociated(client["flights"], filter=("distance", ">", 1000))
        write_dissociated(far, client, "far", mode="append")
        ```
    """
    data = imported("ray.data", "ray")
    commit = Commit(name, schema=schema, key=secrets.token_hex(16), mode=mode, tags=tags or {}, ttl=ttl)
    with DatasetWrite(client, commit) as write:

        class Dissociated(data.Datasink):  # type: ignore[misc, name-defined]
            """A sink whose tasks write segments, which are published together."""

            def write(self, blocks: Iterable[Any], context: Any) -> TaskResult | None:
                accessor = imported("ray.data.block", "ray").BlockAccessor
                return write.write(context.task_idx, (accessor.for_block(block).to_arrow() for block in blocks))

            def on_write_complete(self, result: Any) -> None:
                write.publish([returned for returned in result.write_returns if returned is not None])

        rows.write_datasink(Dissociated(), **options)


class TaskResult(NamedTuple):
    """The result of a task, for the driver: its segment, and the schema of its rows."""

    task: int
    segment: StagedSegment
    schema: pa.Schema


@dataclass(frozen=True)
class DatasetWrite:
    """A write of one dataset by several tasks. Its `with` block ends it: if that fails, no row is published later.

    Ray copies this object to every task.

    Args:
        client: The client of the catalog.
        commit: The commit, with its key and without segments. If it has no schema, all tables must have the same one.
    """

    client: Client
    commit: Commit

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        # Ray tells its sinks of exceptions, but not of Ctrl-C.
        if error is not None:
            with suppress(DissociatedError):  # the catalog itself gives up uncommitted segments later
                self.client.abort(self.commit.key)

    def write(self, task: int, tables: Iterable[pa.Table]) -> TaskResult | None:
        """In a task: write tables into a segment on this host. Return None if they have no rows.

        Raises:
            OptionError: A table does not fit the schema of the commit or, if it has none, that of the first table.
            DissociatedError: The catalog or the node of this host refuses, or cannot be reached.
        """
        nonempty = (table for table in tables if table.num_rows)
        first = next(nonempty, None)
        if first is None:
            return None
        schema = self.commit.schema or first.schema.remove_metadata()
        stage = stage_here(self.client.uri, self.client.with_uri)
        # A repeated task has a segment of its own.
        segment = f"{self.commit.key}-{task:06}.{secrets.token_hex(8)}.arrows"
        with (
            staged_file(stage, segment, self.client.with_uri, self.commit) as (path, reserve),
            SegmentWriter(path, schema, reserve=reserve) as writer,
        ):
            for table in chain([first], nonempty):
                for batch in self._conform(table, schema).to_batches():
                    writer.write(batch)
        return TaskResult(task, StagedSegment(segment, stage.node), schema)

    def _conform(self, table: pa.Table, schema: pa.Schema) -> pa.Table:
        """Return the table with this schema; its values differ in type only if the caller has given the schema."""
        if self.commit.schema is None:
            _require_same(schema, table.schema.remove_metadata())
            return table.replace_schema_metadata(None)
        if sorted(table.schema.names) != sorted(schema.names):
            raise OptionError(
                f"a block has the columns {', '.join(table.schema.names)}, but the schema has "
                f"{', '.join(schema.names)}: select the columns, or give another schema"
            )
        try:
            return table.select(schema.names).cast(schema, safe=True)
        except (KeyError, ValueError, pa.ArrowException) as error:
            raise OptionError(f"a block does not fit the schema, so give another: {error}") from None

    def publish(self, results: Iterable[TaskResult]) -> None:
        """On the driver: publish the segments of all tasks, in the order of the tasks.

        Raises:
            OptionError: There are no rows and no schema, or tasks have written different schemas.
            CatalogUnreachable, DeadlineExceeded: The catalog does not answer. The message says so if it may have
                published the dataset nevertheless.
            CatalogError: The catalog refuses.
        """
        results = sorted(results, key=lambda result: result.task)
        schema = results[0].schema if results else self.commit.schema
        if schema is None:
            raise OptionError("there are no rows, so the columns are unknown: give schema=...")
        for result in results:
            _require_same(schema, result.schema)
        segments = [result.segment for result in results]
        if not segments:
            segments = [StagedSegment("", stage_here(self.client.uri, self.client.with_uri).node)]
        try:
            self.client.commit(replace(self.commit, schema=schema, segments=segments))
        except DissociatedError as error:
            if not was_published(self.client, self.commit, error):
                raise


def _require_same(first: pa.Schema, other: pa.Schema) -> None:
    # Metadata of a field may be the only sign of an extension type.
    if not other.equals(first, check_metadata=True):
        raise OptionError(f"blocks have different schemas, so give schema=...: {schema_difference(first, other)}")
