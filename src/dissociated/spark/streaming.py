"""Structured Streaming, both ways. Only Spark imports this module, on the driver and in every task.

The sink appends each micro-batch to a dataset, or in the mode "complete" replaces the dataset. The key of the commit
consists of the query and the batch, so the catalog accepts a batch once, even if Spark runs it more often.

The source reads a dataset that grows, by the sink, by batch writes or by other clients. An offset is a number of rows,
and appended rows keep their position. So a batch has the same rows whenever it is read again, and from any later
version. The `lineage_id` tells a dataset that was replaced in between.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from dissociated.client.client import Client
from dissociated.control.dataset_info import DatasetInfo
from dissociated.errors import CatalogError, DatasetNotFound, DissociatedError, OptionError, PySparkNotFound, StoreError
from dissociated.spark.columns import ColumnConverter
from dissociated.spark.fitting import Fitting
from dissociated.spark.reader import portions
from dissociated.spark.request import DatasetRequest, parse_number
from dissociated.spark.target import WriteTarget
from dissociated.spark.writer import Written, commit, is_committed, write_segment

try:
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxBytes,
        ReadMaxRows,
        SupportsTriggerAvailableNow,
    )
except ImportError as error:
    raise PySparkNotFound(f"streaming needs Spark 4.2 or later: {error}", name=error.name) from None

# Local properties of a task, by which alone Spark names the query and the batch.
_QUERY = "sql.streaming.queryId"
_BATCH = "streaming.sql.batchId"

_ROWS_PER_PARTITION = 1 << 20
_BATCH_ONLY_OPTIONS = ("filters", "version")  # a stream would not return the rows that these options request


@dataclass(frozen=True)
class TaskCommit(WriterCommitMessage):
    """The result of a task, for the driver. `written` is None if the batch had been committed before."""

    key: str
    written: Written | None


class DatasetStreamWriter(DataSourceStreamArrowWriter):
    """A writer that commits each micro-batch. Spark creates another instance to commit or abort a batch."""

    def __init__(self, target: WriteTarget, schema: pa.Schema) -> None:
        self.target = target
        self.catalog = target.catalog
        self.schema = schema
        self.fitting = target.catalog.retry(lambda: Fitting.of(schema, target))

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskCommit:
        """In a task: write its partition into a segment, unless the whole batch has been committed before."""
        key = _key()
        if is_committed(self.catalog, key):
            return TaskCommit(key, None)
        # An earlier run of the batch, by a killed driver, may have left segments of tasks with the same numbers.
        run = secrets.token_hex(4)
        return TaskCommit(key, write_segment(self.target, f"{key}-{run}.", self.fitting, iterator))

    def commit(self, messages: Sequence[WriterCommitMessage | None], batch: int) -> None:
        """On the driver: publish the batch once and whole, and remove the remains of all its runs."""
        parts = [message for message in messages if isinstance(message, TaskCommit)]
        if parts:  # else the batch had no partitions
            commit(self.target, parts[0].key, self.fitting.schema, [part.written for part in parts])

    def abort(self, messages: Sequence[WriterCommitMessage | None], batch: int) -> None:
        """On the driver: remove the segments that this run of the batch wrote; a committed batch stays.

        The key is not aborted, because Spark repeats the batch. Segments of killed tasks are removed with the commit.
        """
        written = [message.written for message in messages if isinstance(message, TaskCommit) and message.written]
        with self.catalog.connect() as client:
            flights = {node["id"]: node["flight"] for node in client.nodes()}
        for node_id in {segment.node for segment in written if segment.node in flights}:
            with self.catalog.connect(flights[node_id]) as node:
                node.discard([segment.segment for segment in written if segment.segment and segment.node == node_id])


def _key() -> str:
    """In a task: return a key without "-" that is unique to this batch of this query.

    Raises:
        StoreError: Spark does not tell the task its query and batch.
    """
    context = TaskContext.get()
    assert context is not None, "Spark calls this in a task"
    query, batch = context.getLocalProperty(_QUERY), context.getLocalProperty(_BATCH)
    if query is None or batch is None:
        raise StoreError("Spark does not tell this task which streaming query and which batch it belongs to")
    return f"{query.replace('-', '')}.{batch}"


@dataclass(frozen=True)
class StreamOptions:
    """Options of a streaming read.

    A query without a checkpoint begins with the existing rows, or with `from_latest` after these.
    """

    limit: ReadLimit
    from_latest: bool = False
    rows_per_partition: int = _ROWS_PER_PARTITION

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> StreamOptions:
        """Parse the options of the data source.

        Raises:
            OptionError: An option is invalid, or only supported by batch reads.
        """
        if refused := [name for name in _BATCH_ONLY_OPTIONS if options.get(name) is not None]:
            raise OptionError(
                f"a stream does not support the option {', '.join(refused)}: it reads the rows that are appended to "
                "a dataset, of any version; filter them with .where(...)"
            )
        rows, nbytes = parse_number(options, "maxRowsPerTrigger", 1), parse_number(options, "maxBytesPerTrigger", 1)
        if rows and nbytes:
            raise OptionError("give maxRowsPerTrigger or maxBytesPerTrigger, not both")
        start = options.get("startingOffsets", "earliest")
        if start not in ("earliest", "latest"):
            raise OptionError(f"startingOffsets is earliest or latest, not {start!r}")
        return cls(
            limit=ReadMaxRows(rows) if rows else ReadMaxBytes(nbytes) if nbytes else ReadAllAvailable(),
            from_latest=start == "latest",
            rows_per_partition=parse_number(options, "rowsPerPartition", 1) or _ROWS_PER_PARTITION,
        )


@dataclass
class RowsPartition(InputPartition):
    """Rows of a dataset, from `first` up to `end`, exclusive, while the dataset has this lineage."""

    lineage_id: str
    first: int
    end: int


class DatasetStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A reader of the rows that are appended to a dataset.

    The instance on the driver lives as long as the query; tasks have copies of it. The driver keeps a reader of the
    rows of a batch until Spark commits the batch: so no store evicts these rows, and replaced data keeps its memory. If
    the driver shares no memory with the node, it holds nothing.
    """

    def __init__(self, request: DatasetRequest, schema: StructType, options: StreamOptions) -> None:
        self.request = request
        self.name = request.name
        self.schema = schema
        self.options = options
        self._client: Client | None = None  # opened on first use; tasks get a copy without it
        self._target: int | None = None  # last row for Trigger.AvailableNow
        self._held_readers: dict[int, pa.RecordBatchReader] = {}  # by the last row of the batch

    # On the driver

    def initialOffset(self) -> dict[str, Any]:
        return _offset(self._describe() if self.options.from_latest else None)

    def getDefaultReadLimit(self) -> ReadLimit:
        return self.options.limit

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = _offset(self._describe())["rows"]

    def reportLatestOffset(self) -> dict[str, Any]:
        return _offset(self._describe())

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        info = self._describe()
        if info is None and not start["rows"]:
            return start
        total = self._check_lineage(info, start["began"], start["rows"])
        last = total if self._target is None else min(total, self._target)
        new = max(0, last - start["rows"])
        match limit:
            case ReadMaxRows():
                new = min(new, limit.max_rows)
            case ReadMaxBytes():
                assert info is not None
                new = min(new, max(1, limit.max_bytes * total // max(1, info.nbytes or 0)))
        return {**_offset(info), "rows": start["rows"] + new} if new else start

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        first, last, step = start["rows"], end["rows"], self.options.rows_per_partition
        if first < last:
            self._check_lineage(self._describe(), end["began"], last)
            self._hold(range(first, last))
        return [RowsPartition(end["began"], at, min(at + step, last)) for at in range(first, last, step)]

    def _hold(self, rows: range) -> None:
        try:
            self._held_readers[rows.stop] = self._connected().read(self.name, transport="shm", rows=rows)
        except DissociatedError:
            pass  # the data is not in shared memory of this host, or its server does not answer

    def commit(self, end: dict[str, Any]) -> None:
        for last in [last for last in self._held_readers if last <= end["rows"]]:
            del self._held_readers[last]

    def stop(self) -> None:
        self._held_readers.clear()
        if self._client is not None:
            self._client.close()
            self._client = None

    def _connected(self) -> Client:
        if self._client is None:
            self._client = self.request.catalog.connect()
        return self._client

    def _describe(self) -> DatasetInfo | None:
        try:
            return self.request.describe(self._connected())
        except DatasetNotFound:
            return None

    def _check_lineage(self, info: DatasetInfo | None, lineage_id: str, rows: int) -> int:
        """Return the number of rows of the dataset.

        Raises:
            CatalogError: The dataset is gone, has another lineage, has fewer than `rows` rows, or has no known number
                of rows.
        """
        if info is None or (lineage_id and info.lineage_id != lineage_id):
            raise CatalogError(
                f"{self.name!r} was {'dropped' if info is None else 'replaced'} after this query had read {rows} "
                "rows of it: start the query with another checkpoint to read the current rows"
            )
        if info.rows is None or info.rows < rows:
            raise CatalogError(
                f"the catalog does not say how many rows {self.name!r} has: Spark can stream datasets that "
                "Spark, put or DoPut wrote, and no others"
                if info.rows is None
                else f"{self.name!r} has {info.rows} rows, and this query has read {rows}: use its catalog"
            )
        return info.rows

    # In a task

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, RowsPartition)
        rows = range(partition.first, partition.end)
        with self.request.catalog.connect() as client:
            reader = client.read(
                self.name, transport=self.request.transport, columns=self.schema.fieldNames(), rows=rows
            )
            columns = ColumnConverter(reader.schema, self.schema, self.request.nanoseconds)
            # A replaced lineage never returns: if the lineage matches now, it did when the reader was opened.
            self._check_lineage(client.describe(self.name), partition.lineage_id, partition.end)
            yield from (columns.convert(batch) for batch in portions(reader) if batch.num_rows)


def _offset(info: DatasetInfo | None) -> dict[str, Any]:
    """Return the offset after all rows of a dataset: its lineage and number of rows. None means no dataset yet.

    Spark keeps offsets in checkpoints, so the keys stay: "began" is the `lineage_id`.
    """
    return {"began": "", "rows": 0} if info is None else {"began": info.lineage_id, "rows": info.rows or 0}
