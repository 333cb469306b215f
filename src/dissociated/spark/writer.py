"""Writes a DataFrame as a dataset. Only Spark imports this module, on the driver and in every task.

A write goes through these steps, and nothing is visible to anyone before the last has succeeded:

    planning    asks the catalog whether it is there
    each task   writes its partition's batches into a segment of its own, in the stage of the node on its host
    driver      commit: one call makes all the segments a dataset; abort: one call, and nothing of them stays

Spark may run a task twice, or kill it half-way. A segment's name therefore begins with the key of the commit and
carries the attempt: only those whose message reaches the commit are published, and every node removes whatever else
bears that key, once the catalog says that the commit was done or will never be.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.pandas.types import from_arrow_schema

from dissociated.errors import CatalogUnreachable, DeadlineExceeded, DissociatedError
from dissociated.node.local import stage_here
from dissociated.spark.catalog import CatalogConfig, wait_for_catalog
from dissociated.spark.fitting import Fitting
from dissociated.spark.target import WriteTarget
from dissociated.spark.types import arrow_schema
from dissociated.store.segment import SegmentWriter

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True)
class Written(WriterCommitMessage):
    """What a task tells the driver about its partition."""

    partition: int
    node: str | None  # where the segment lies
    segment: str | None  # its name in the stage of the node; None where the partition has no rows
    rows: int
    nbytes: int


_WRITTEN = pa.schema(
    {"partition": pa.int32(), "node": pa.string(), "segment": pa.string(), "rows": pa.int64(), "nbytes": pa.int64()}
)


def write_segment(catalog: CatalogConfig, key: str, fitting: Fitting, iterator: Iterator[pa.RecordBatch]) -> Written:
    """In a task: write its partition into a segment on this host, for the commit with that `key`, which has no "-".

    An exception leaves no file behind; a killed process leaves one that its node removes.
    """
    context = TaskContext.get()
    assert context is not None, "Spark calls this in a task"
    partition = context.partitionId()
    batches = (batch for batch in iterator if batch.num_rows)
    first = next(batches, None)
    if first is None:
        return Written(partition, None, None, 0, 0)
    stage = wait_for_catalog(lambda: stage_here(catalog.uri, catalog.connect))
    segment = f"{key}-{partition:06}-{context.taskAttemptId()}.arrows"
    with ExitStack() as stack:
        reserve = stack.enter_context(catalog.connect(stage.flight)).reserve if stage.limited else None
        place = stack.enter_context(stage.open()) / segment
        writer = stack.enter_context(SegmentWriter(place, fitting.schema, reserve=reserve))
        writer.write(fitting.conform(first))
        for batch in batches:
            writer.write(fitting.conform(batch))
    return Written(partition, stage.node, segment, writer.rows, writer.nbytes)


def commit(target: WriteTarget, key: str, schema: pa.Schema, messages: Sequence[WriterCommitMessage | None]) -> None:
    """On the driver: make what the tasks have written the dataset, on each host in order of the partitions.

    A repeated call does nothing, so a catalog that does not answer is asked again for a while. Where there are no rows
    at all, it is the node of the driver's host that has them.
    """
    written = sorted((one for one in messages if isinstance(one, Written)), key=lambda one: one.partition)
    segments = [{"node": one.node, "segment": one.segment} for one in written if one.node and one.segment]
    catalog, publication = target.catalog, target.publication

    def once() -> None:
        placed = segments or [{"node": stage_here(catalog.uri, catalog.connect).node, "segment": ""}]
        with catalog.connect() as client:
            client.commit(
                publication.name, placed, publication.mode, schema, key=key, tags=publication.tags, ttl=publication.ttl
            )

    wait_for_catalog(once)


def abort(catalog: CatalogConfig, key: str) -> None:
    """On the driver: what was written for the commit with that `key` goes, and so does what is still written."""

    def once() -> None:
        with catalog.connect() as client:
            client.abort(key)

    wait_for_catalog(once)


class DatasetWriter(DataSourceArrowWriter):
    """Writes one DataFrame as one dataset: Spark does with it what the module says, or `publish` here does.

    Made once, while Spark plans the write, then copied to every task and to the commit; all share `key`.
    """

    def __init__(self, target: WriteTarget, schema: pa.Schema) -> None:
        self.target = target
        self.schema = schema
        self.fitting = Fitting.of(schema, target)  # before any task runs in vain
        self.key = uuid.uuid4().hex

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """In a task."""
        return write_segment(self.target.catalog, self.key, self.fitting, iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """On the driver, once every task has succeeded: make the dataset visible, whole."""
        try:
            commit(self.target, self.key, self.fitting.schema, messages)
        except DissociatedError as error:
            if not self._was_committed(error):
                raise

    def _was_committed(self, error: DissociatedError) -> bool:
        """Whether a commit that ended with `error` has happened all the same, as far as the catalog answers.

        Spark would be told that the write failed; whoever then writes again appends the rows twice.
        """

        def once() -> bool:
            with self.target.catalog.connect() as client:
                if isinstance(error, CatalogUnreachable | DeadlineExceeded):  # it may be under way, and is waited for
                    client.abort(self.key)
                return client.committed(self.key)

        with suppress(DissociatedError):
            return wait_for_catalog(once)
        return False

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """On the driver, after a task or the commit has failed: remove what the tasks have written."""
        abort(self.target.catalog, self.key)


def publish(frame: DataFrame, target: WriteTarget) -> None:
    """On the driver: write a DataFrame of this process's own Spark.

    By `mapInArrow`, whose only rows are those that tell what was written: Spark hands over its rows in less time there
    than to a data source (docs/performance.md). It collects the rows of one attempt for each partition.
    """
    writer = DatasetWriter(target, arrow_schema(frame.schema))
    frame = frame.toDF(*(f"c{number}" for number in range(len(frame.columns))))  # Spark finds no column `a.b` by name

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield pa.RecordBatch.from_pylist([asdict(writer.write(batches))], _WRITTEN)

    try:
        written = frame.mapInArrow(write, from_arrow_schema(_WRITTEN)).collect()
        writer.commit([Written(**row.asDict()) for row in written])
    except BaseException:
        with suppress(DissociatedError):  # the catalog gives up what is not committed by itself, later
            writer.abort(())
        raise
