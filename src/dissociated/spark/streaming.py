"""Structured Streaming, both ways. Only Spark imports this module, on the driver and in every task.

The sink appends each micro-batch to a dataset, as a batch write would, under a key made of the query and the batch:
however often Spark runs that batch again, the catalog takes it once.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage

from dissociated.errors import DissociatedError, StoreError

if TYPE_CHECKING:
    import pyarrow as pa

    from dissociated.spark.datasource import DatasetWriter

_log = logging.getLogger(__name__)

# Spark tells tasks which query and batch they work for, and nobody else.
_QUERY = "sql.streaming.queryId"
_BATCH = "streaming.sql.batchId"


@dataclass(frozen=True)
class Part(WriterCommitMessage):
    """What a task tells the driver: what it wrote, and for which query, which the driver is not told."""

    query: str
    written: WriterCommitMessage


class StreamWriter(DataSourceStreamArrowWriter):
    """Writes each micro-batch as `writer` writes a DataFrame, with a job that is the same whenever it is run again.

    Spark makes a new one to commit or abort a batch. `checkpoint` is where the query keeps its own identifier.
    """

    def __init__(self, writer: DatasetWriter, checkpoint: str | None = None) -> None:
        self._writer = writer
        self._checkpoint = checkpoint

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Part:
        """In a task: as the batch writer does."""
        context = TaskContext.get()
        assert context is not None, "Spark calls this in a task"
        query, batch = context.getLocalProperty(_QUERY), context.getLocalProperty(_BATCH)
        if query is None or batch is None:
            raise StoreError("this task does not know which streaming query and batch it belongs to")
        # Besides, for a driver that was killed may have had tasks with the same numbers.
        self._writer.job = f"{_job(query, int(batch))}-{secrets.token_hex(4)}"
        return Part(query, self._writer.write(iterator))

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """On the driver: the batch is appended, or replaces the dataset, once. May be called again after anything."""
        parts = [message for message in messages if isinstance(message, Part)]
        query = parts[0].query if parts else self._query()
        if query is None:
            return  # a batch without partitions
        self._writer.job = _job(query, batchId)
        self._writer.commit([part.written for part in parts])
        with contextlib.suppress(DissociatedError):  # it is committed; these are of no use, and are removed in time
            self._writer.abort([])  # what this run wrote, if an earlier one had been committed

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """On the driver: what was not committed is removed. If it was, this finds nothing to remove."""
        query = next((message.query for message in messages if isinstance(message, Part)), None) or self._query()
        if query is not None:
            self._writer.job = _job(query, batchId)
            self._writer.abort([])

    def _query(self) -> str | None:
        """What the checkpoint says, if it can be read from here."""
        if self._checkpoint is None or urlsplit(self._checkpoint).scheme not in ("", "file"):
            return None
        try:
            with open(os.path.join(urlsplit(self._checkpoint).path, "metadata"), encoding="utf-8") as file:
                return str(json.load(file)["id"])
        except (OSError, ValueError, KeyError):
            return None


def _job(query: str, batch: int) -> str:
    return f"{query}-{batch}"
