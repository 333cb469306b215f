"""Writing a DataFrame as a dataset. Only Spark imports this module, on the driver and in every task.

A write has these steps, and nothing is visible to readers before the last has succeeded:

    planning    asks the catalog for the schema of the dataset
    each task   writes its partition's batches into a segment of its own, in the stage of the node on its host
    driver      commits: a single call publishes all segments as a dataset; or aborts: a call removes all segments

Spark may run a task twice, or kill it half-way. The name of a segment therefore begins with the key of the commit and
contains the attempt. Only segments whose messages reach the commit are published. Every node removes the other segments
of that key once the catalog reports that the commit was done or will never be.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.pandas.types import from_arrow_schema

from dissociated.client.staging import staged_file
from dissociated.control.commit import StagedSegment
from dissociated.errors import CatalogUnreachable, DeadlineExceeded, DissociatedError
from dissociated.node.local import stage_here
from dissociated.spark.catalog_config import CatalogConfig
from dissociated.spark.fitting import Fitting
from dissociated.spark.target import WriteTarget
from dissociated.spark.types import arrow_schema, function_schema
from dissociated.store.segment import SegmentWriter

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from dissociated.client.client import Client


@dataclass(frozen=True)
class Written(WriterCommitMessage):
    """The result of a task, for the driver: the segment of its partition."""

    partition: int
    node: str | None  # id of the node that has the segment
    segment: str | None  # name in the stage of the node; None if the partition has no rows
    rows: int
    nbytes: int


#: The seconds for which the driver waits, at most, for a catalog that is to abort a commit.
_ABORT_WAIT = 5.0
_WRITTEN = pa.schema(
    {"partition": pa.int32(), "node": pa.string(), "segment": pa.string(), "rows": pa.int64(), "nbytes": pa.int64()}
)


def write_segment(target: WriteTarget, prefix: str, fitting: Fitting, iterator: Iterator[pa.RecordBatch]) -> Written:
    """In a task: write its partition into a segment on this host.

    An exception leaves no file. A killed process leaves a file that its node removes.

    Args:
        target: The dataset.
        prefix: The beginning of the segment's name: the key of the commit, "-", and perhaps more without "-".
        fitting: The conversion of the batches to the schema of the dataset.
        iterator: The batches of the partition.
    """
    context = TaskContext.get()
    assert context is not None, "Spark calls this in a task"
    partition = context.partitionId()
    batches = (batch for batch in iterator if batch.num_rows)
    first = next(batches, None)
    if first is None:
        return Written(partition, None, None, 0, 0)
    catalog = target.catalog
    stage = catalog.retry(lambda: stage_here(catalog.uri, catalog.connect))
    segment = f"{prefix}{partition:06}.{context.taskAttemptId()}.arrows"
    with (
        staged_file(stage, segment, catalog.connect, target.commit) as (path, reserve),
        SegmentWriter(path, fitting.schema, reserve=reserve and catalog.retrying(reserve)) as writer,
    ):
        writer.write(fitting.conform(first))
        for batch in batches:
            writer.write(fitting.conform(batch))
    return Written(partition, stage.node, segment, writer.rows, writer.nbytes)


def commit(target: WriteTarget, key: str, schema: pa.Schema, messages: Sequence[WriterCommitMessage | None]) -> None:
    """On the driver: publish the segments that tasks have written as the dataset, on each host by partition.

    A repeated call has no effect, so the call is repeated for a while if the catalog does not answer. A dataset without
    any rows gets a node all the same: that of the driver's host.
    """
    results = [message for message in messages if isinstance(message, Written)]
    results.sort(key=lambda result: result.partition)
    segments = [StagedSegment(result.segment, result.node) for result in results if result.node and result.segment]
    catalog = target.catalog

    def once(client: Client) -> None:
        placed = segments or [StagedSegment("", stage_here(catalog.uri, catalog.connect).node)]
        client.commit(replace(target.commit, key=key, schema=schema, segments=placed))

    catalog.ask(once)


def abort(catalog: CatalogConfig, key: str) -> None:
    """On the driver: remove all segments of the commit with that `key`, also those that tasks still write.

    Tasks may have waited for the same catalog before, so this does not wait as long again. If it fails, the nodes
    remove the segments later.
    """
    replace(catalog, wait=min(catalog.wait, _ABORT_WAIT)).ask(lambda client: client.abort(key))


def is_committed(catalog: CatalogConfig, key: str) -> bool:
    """In a task: return whether the commit with that `key` took effect."""
    return catalog.ask(lambda client: client.committed(key))


class DatasetWriter(DataSourceArrowWriter):
    """A writer of one DataFrame as one dataset, whose methods Spark calls, or `publish` in this module.

    Spark creates it while it plans the write, and copies it to every task and to the commit; all share `key`.
    """

    def __init__(self, target: WriteTarget, schema: pa.Schema) -> None:
        self.target = target
        self.schema = schema
        self.fitting = Fitting.of(schema, target)  # raises before any task runs
        self.key = uuid.uuid4().hex

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """In a task: write its partition into a segment."""
        return write_segment(self.target, f"{self.key}-", self.fitting, iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """On the driver, after all tasks have succeeded: publish the dataset at once and whole."""
        try:
            commit(self.target, self.key, self.fitting.schema, messages)
        except DissociatedError as error:
            if not self._was_committed(error):
                raise

    def _was_committed(self, error: DissociatedError) -> bool:
        """Return whether a commit that raised `error` took effect; False if the catalog does not answer.

        Otherwise Spark would report a failed write, and a user who repeats it would append the rows twice.
        """

        def once(client: Client) -> bool:
            # The commit may still be in progress: the abort waits for it, or prevents it.
            if isinstance(error, CatalogUnreachable | DeadlineExceeded):
                client.abort(self.key)
            return client.committed(self.key)

        with suppress(DissociatedError):
            return self.target.catalog.ask(once)
        return False

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """On the driver, after a task or the commit has failed: remove the segments of the tasks."""
        abort(self.target.catalog, self.key)


def publish(frame: DataFrame, target: WriteTarget) -> None:
    """On the driver: write a DataFrame of a Spark in this process.

    `mapInArrow` runs the tasks, because Spark passes rows to it in less time than to a data source
    (docs/performance.md). Its only result rows are the `Written` of each partition, of one attempt each.
    """
    function_schema(frame.schema)  # raises for types that only the data source for Spark's JVM has
    writer = DatasetWriter(target, arrow_schema(frame.schema))
    # Spark cannot find a column `a.b` by name.
    frame = frame.toDF(*(f"c{number}" for number in range(len(frame.columns))))

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield pa.RecordBatch.from_pylist([asdict(writer.write(batches))], _WRITTEN)

    try:
        written = frame.mapInArrow(write, from_arrow_schema(_WRITTEN)).collect()
        writer.commit([Written(**row.asDict()) for row in written])
    except BaseException:
        with suppress(DissociatedError):  # the catalog itself gives up uncommitted segments later
            writer.abort(())
        raise
