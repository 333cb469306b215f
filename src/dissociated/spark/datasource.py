"""The `dissociated` data source. Only Spark imports this module: by name, through `pyspark_dissociated`.

A write goes through these steps, and nothing is visible to anyone before the last has succeeded:

    planning    asks the catalog for its stage, the directory where prepared segments wait
    each task   writes its partition's batches into a segment of its own there
    driver      commit: one call hands all the segments to the catalog; abort: they are removed

Spark may run a task twice, or kill it half-way. A segment's name therefore carries the job and the attempt,
only those whose message reaches commit are published, and whatever else bears the job's name is swept away.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, DataSourceReader, WriterCommitMessage
from pyspark.sql.types import StructType

from dissociated.access import read_token
from dissociated.catalog.client import Client, connect
from dissociated.errors import CatalogError, DissociatedError, StoreError
from dissociated.spark.types import arrow_schema, conform
from dissociated.store.segment import SegmentWriter
from dissociated.store.stage import boot_id, host_name


class DissociatedDataSource(DataSource):
    """`df.write.format("dissociated").option("catalog", uri).mode("overwrite").save("flights")`.

    The options `token_file` and `tls_roots` name files for a catalog that is guarded: its token, and whom to trust.
    """

    @classmethod
    def name(cls) -> str:
        return "dissociated"

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        return DatasetWriter(
            catalog=self._option("catalog", 'the catalog is: .option("catalog", "grpc://HOST:PORT")'),
            name=self._option("path", 'the dataset goes: .save("NAME")'),
            schema=arrow_schema(schema),
            mode="overwrite" if overwrite else "append",
            token_file=self.options.get("token_file"),
            tls_roots=self.options.get("tls_roots"),
        )

    def schema(self) -> NoReturn:
        raise DissociatedError(
            "Spark cannot read from dissociated in this release, only write to it; "
            "read with dissociated.connect(catalog).read(name)"
        )

    def reader(self, schema: StructType) -> DataSourceReader:
        self.schema()

    def _option(self, key: str, advice: str) -> str:
        if value := self.options.get(key):
            return str(value)
        raise CatalogError(f"say where {advice}")


@dataclass(frozen=True)
class Written(WriterCommitMessage):
    """What a task tells the driver about its partition."""

    partition: int
    segment: str | None  # its name within the stage; None where the partition has no rows
    rows: int
    nbytes: int


class DatasetWriter(DataSourceArrowWriter):
    """Writes one DataFrame as one dataset.

    Made once, while Spark plans the write, then copied to every task and to the commit; all share `job`.
    """

    def __init__(
        self,
        catalog: str,
        name: str,
        schema: pa.Schema,
        mode: str,
        token_file: str | None = None,
        tls_roots: str | None = None,
    ) -> None:
        self.catalog = catalog
        self.token_file = token_file  # not the token: this object is copied to every task
        self.tls_roots = tls_roots
        self.name = name
        self.schema = schema
        self.mode = mode
        self.job = uuid.uuid4().hex
        with self._connect(catalog) as client:
            self.stage = client.stage()

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """In a task: write the partition into a segment of its own. An exception leaves no file behind."""
        context = TaskContext.get()
        assert context is not None, "Spark calls this in a task"
        partition = context.partitionId()
        batches = (batch for batch in iterator if batch.num_rows)
        first = next(batches, None)
        if first is None:
            return Written(partition, None, 0, 0)
        self._require_stage()
        segment = f"{self.job}-{partition:06}-{context.taskAttemptId()}.arrows"
        path = os.path.join(self.stage.directory, segment)
        with ExitStack() as stack:
            reserve = stack.enter_context(self._node()).reserve if self.stage.limited else None
            writer = stack.enter_context(SegmentWriter(path, self.schema, reserve=reserve))
            writer.write(conform(first, self.schema))
            for batch in batches:
                writer.write(conform(batch, self.schema))
        return Written(partition, segment, writer.rows, writer.nbytes)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """On the driver, once every task has succeeded: make the dataset visible, whole."""
        written = [message for message in messages if isinstance(message, Written)]
        written.sort(key=lambda message: message.partition)
        segments = [message.segment for message in written if message.segment]
        self._sweep(keep=segments)  # before: once the dataset is visible, nothing may fail
        with self._connect(self.catalog) as client:
            there = [{"node": self.stage.node, "segment": segment} for segment in segments]
            client.commit(self.name, there, self.mode, self.schema, key=self.job)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """On the driver, after a task or the commit has failed: remove what the job has written."""
        self._sweep()

    def _connect(self, uri: str) -> Client:
        token = None if self.token_file is None else read_token(self.token_file)
        return connect(uri, token=token, tls_roots=self.tls_roots)

    def _sweep(self, keep: Sequence[str] = ()) -> None:
        left = {entry.name for entry in Path(self.stage.directory).glob(f"{self.job}-*")}.difference(keep)
        if left:
            with self._node() as client:
                client.discard(sorted(left))

    def _node(self) -> Client:
        """The node that has the stage."""
        return self._connect(self.stage.flight)

    def _require_stage(self) -> None:
        if boot_id() != self.stage.boot_id or not os.path.isdir(self.stage.directory):
            raise StoreError(
                f"this task runs on {host_name()}, but the stage of the catalog {self.catalog} is on "
                f"{self.stage.host}: in this release Spark and the catalog must share one host"
            )
