"""Datasets of a Table, with its copy in shared memory."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence

import pyarrow as pa

from dissociated.base.host import available_memory
from dissociated.codec.batches import BatchReader
from dissociated.codec.columns import values_size
from dissociated.codec.filter.statistics import Statistics, StatisticsCollector
from dissociated.codec.options import WriteOptions
from dissociated.codec.split import batches, split
from dissociated.codec.validation import OnceValidator
from dissociated.datasets.static import StaticDataset
from dissociated.datasets.static_message import MappedMessages, StaticMessage
from dissociated.errors import DissociatedError
from dissociated.store.copying import STEP, CopiedSegment

_log = logging.getLogger(__name__)

#: Tables of at least this many bytes are copied into shared memory before a client requests them. Copying a smaller
#: Table takes no noticeable time.
MIN_EARLY_COPY = 1 << 24
#: The lock under which a single Table at a time is copied early, by process id. A forked child needs a lock of its own,
#: since the inherited lock may be held by a thread that exists only in the parent.
_turns: dict[int, threading.Lock] = {}


class TableDataset(StaticDataset):
    """A dataset of a Table. Inline bodies are sent from its own memory; clients that map memory share one copy."""

    def __init__(self, name: str, table: pa.Table, options: WriteOptions | None = None) -> None:
        super().__init__(name, table.schema)
        self.rows = table.num_rows
        self.nbytes: int = values_size(table)
        self._table = table
        self._options = options
        self._packed: list[StaticMessage] | None = None
        self._copying = threading.Lock()  # separate from `_lock`, so that clients that need no copy do not wait for it
        self._mapped: Sequence[MappedMessages] | None = None
        self._segment: CopiedSegment | None = None
        self._thread: threading.Thread | None = None
        self._validated = OnceValidator()
        self._looking = threading.Lock()
        self._statistics: dict[int, Statistics | None] = {}

    def open_reader(self) -> pa.RecordBatchReader:
        return BatchReader(self.schema, self._validated.check(self.schema, batches(self._table.to_reader())))

    def statistics(self, columns: Sequence[int]) -> Statistics | None:
        """Return statistics of these columns. They are computed on request, once for each column."""
        with self._looking:
            for column in columns:
                if column not in self._statistics:
                    collector = StatisticsCollector(self.schema, [column])
                    for batch in self._table.to_reader():
                        collector.add(batch)
                    self._statistics[column] = collector.statistics()
            parts = [part for column in columns if (part := self._statistics[column]) is not None]
        if not parts:
            return None
        return Statistics(
            parts[0].num_rows, {column: bounds for part in parts for column, bounds in part.bounds.items()}
        )

    def packed(self) -> Sequence[StaticMessage]:
        with self._lock:
            if self._packed is None:
                self._packed = [StaticMessage(*m) for m in split(self._table.to_reader(), self._options)]
            return self._packed

    def mapped(self) -> Sequence[MappedMessages]:
        packed = self.packed()
        with self._copying:
            if self._mapped is None:
                alignment = (self._options or WriteOptions()).alignment
                segment = CopiedSegment(self.name, [message[:3] for message in packed], alignment)
                if segment.region.size <= STEP:
                    segment.wait(segment.region.base + segment.region.size)
                messages = [
                    message._replace(extents=extents) for message, extents in zip(packed, segment.extents, strict=True)
                ]
                self._mapped = [MappedMessages(segment, messages)]
                self._segment = segment
            return self._mapped

    def prepare_sharing(self, wait: bool) -> None:
        if wait:
            self.regions()
        elif MIN_EARLY_COPY <= self.nbytes <= available_memory() // 2:
            self._thread = threading.Thread(target=self._copy_early, name=f"copy {self.name}", daemon=True)
            self._thread.start()

    def _copy_early(self) -> None:
        """Copy the Table in the background until it is complete or dropped.

        Readers do not depend on this: if they need more of the copy, they write it themselves.
        """
        try:
            self.mapped()
            while self._copy_more():
                pass
        except DissociatedError as error:
            why = str(error)  # not the error itself, whose traceback would keep this dataset alive in captured logs
            _log.warning(
                "copying into shared memory failed, it is tried again at the next request: dataset=%r error=%s",
                self.name,
                why,
            )

    def _copy_more(self) -> bool:
        """Copy one more step. Only one Table is copied at a time, so that each sees the memory that others have taken.

        Returns:
            False if the copy is complete, the dataset was dropped, or the rest would take more than half of the
            available memory.
        """
        segment = self._segment
        with _turns.setdefault(os.getpid(), threading.Lock()):
            if segment is None or self._dropped or not 0 < segment.missing <= available_memory() // 2:
                return False
            segment.advance()
        return True

    def wait_closed(self, timeout: float) -> None:
        if self._thread is not None:
            self._thread.join(timeout)
