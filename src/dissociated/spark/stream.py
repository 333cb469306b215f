"""Batches in memory that Spark's JVM maps: the answers that describe them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from dissociated.memory.region import AddressSpace
from dissociated.spark.layouts import ArrayLayout, BufferLocator

_MAX_BATCHES = 64  # in one answer
#: The bytes of one batch. Java maps at most 2 GiB at once.
MAX_BATCH_BYTES = 1 << 29


class SharedStream:
    """The batches of one partition, which are described to the JVM by places in files.

    Each batch is held until the next answer, and the last batch until the stream is closed.
    """

    def __init__(
        self,
        batches: Iterator[pa.RecordBatch],
        spaces: Sequence[AddressSpace],
        types: Sequence[pa.DataType],
        max_batches: int = _MAX_BATCHES,
        static_only: bool = False,
    ) -> None:
        """Create a stream.

        Args:
            batches: A generator of the batches, which the stream closes.
            spaces: The address spaces whose regions may hold the batches. See `BufferLocator`.
            types: The Arrow types of Spark's columns.
            max_batches: The largest number of batches in one answer.
            static_only: Whether to copy batches whose memory is reused when they are freed. The JVM may then read the
                last batch after the stream was closed.
        """
        self._batches = batches
        self._max_batches = max_batches
        self._types = types
        self._spaces = spaces
        self._locator = BufferLocator(spaces, static_only)
        self._held_batches: list[pa.RecordBatch] = []
        self._described_types: list[pa.DataType] = []  # of the last batch, to which the layouts belong
        self._layouts: list[ArrayLayout] = []
        self._next_count = 1  # the most batches in the next answer: starts small for queries with a limit
        self._lock = threading.Lock()  # a killed task closes the stream while `next` still waits
        self._closed = False

    def next(self) -> Any:
        """Return the next answer: {"regions": new files to map, "batches", "ended"}."""
        try:
            with self._lock:
                return self._next()
        finally:
            if self._closed:  # another thread called `close`, which leaves the release to this one
                self.close()

    def _next(self) -> Any:
        del self._held_batches[:-1]
        self._locator.clear()
        descriptions: list[Any] = []
        while not self._closed and len(descriptions) < self._next_count and not self._locator.copied:
            batch = next(self._batches, None)
            if batch is None:
                break
            if batch.num_rows:
                if not descriptions:
                    self._held_batches.clear()
                self._held_batches.append(batch)
                descriptions += [self._describe(portion) for portion in _cut_to_map(batch)]
        # A server that reuses memory may need it back before it can send the next batch.
        reuses_memory = any(space.has_live_memory for space in self._spaces)
        self._next_count = 1 if reuses_memory else min(2 * self._next_count, self._max_batches)
        return {"regions": self._locator.new_regions(), "batches": descriptions, "ended": not descriptions}

    def _describe(self, batch: pa.RecordBatch) -> Any:
        types = batch.schema.types
        if types != self._described_types:  # a function may yield, for example, dictionaries with wider indices
            self._layouts = [*map(ArrayLayout.of, types, self._types)]
            self._described_types = types
        return {"rows": batch.num_rows, "columns": [*map(self._locator.describe, batch.columns, self._layouts)]}

    def close(self) -> None:
        """Release the batches and their memory.

        If a call of `next` is still waiting, that call releases them after its next batch.
        """
        self._closed = True
        if not self._lock.acquire(blocking=False):
            return
        try:
            self._batches.close()  # type: ignore[attr-defined]  # it is a generator
            self._held_batches.clear()
            self._locator.close()
        finally:
            self._lock.release()


def _cut_to_map(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a batch in slices whose buffers Java can map."""
    size = batch.get_total_buffer_size()  # `nbytes` would rely on unchecked offsets
    step = batch.num_rows if size <= MAX_BATCH_BYTES else max(1, batch.num_rows * MAX_BATCH_BYTES // size)
    for first in range(0, batch.num_rows, step):
        yield batch.slice(first, step)
