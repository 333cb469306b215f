"""A reader over record batches and their metadata, as they come from somewhere else.

What `pyarrow.RecordBatchReader.from_batches` makes knows of no metadata, and cannot even be asked. This one is a reader
of an IPC stream: Python is given the very batches, and whatever reads through C++ a stream that is written around them,
batch by batch, from where their buffers lie.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from operator import itemgetter
from typing import Any, Generic, Self, TypeVar

import pyarrow as pa

from dissociated.base.buffers import Buffer
from dissociated.codec.join import Messages, message_file
from dissociated.codec.options import WriteOptions
from dissociated.codec.reader import Reading, ReadOnce, close_idle
from dissociated.codec.split import BatchAndMetadata, SplitMessage, Splitter
from dissociated.format.message import buffer_extents, relocate

T = TypeVar("T")

_ALIGNMENT = 8  # which libarrow asks of buffers in a body


class RaisingAgain(Generic[T]):
    """Iterates over `items`, and raises again what they raised once: a generator would end, as if that were all."""

    def __init__(self, items: Iterator[T]) -> None:
        self._items = items
        self._reading = Reading()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        return self._reading.take(self._items.__next__)

    def close(self) -> None:
        """Take no more items, and let go of where they come from. To ask for more raises StoreError, before the end."""
        self._reading.close()
        items, self._items = self._items, iter(())
        if isinstance(items, Generator):
            close_idle(items)


class BatchReader(ReadOnce, pa.ipc.RecordBatchStreamReader):  # type: ignore[misc]  # pyarrow has no type hints
    """Reads batches of one `schema` and their metadata from `pairs`. Whatever these raise comes out of it."""

    def __init__(self, schema: pa.Schema, pairs: Iterator[BatchAndMetadata]) -> None:
        self._schema = schema
        self._pairs = RaisingAgain(pairs)
        super().__init__(message_file(_messages(schema, self._pairs)))

    @property
    def schema(self) -> pa.Schema:
        """The schema of all batches."""
        return self._schema

    def __iter__(self) -> Self:
        self._begin()
        return self

    def read_next_batch(self) -> pa.RecordBatch:
        """The next batch. Raises StopIteration at the end."""
        return self._next()[0]

    def read_next_batch_with_custom_metadata(self) -> pa.lib.RecordBatchWithMetadata:
        """The next batch and its metadata. Raises StopIteration at the end."""
        return pa.lib.RecordBatchWithMetadata(*self._next())

    def read_all(self) -> pa.Table:
        """All batches that are left, as one table."""
        self._begin()
        table = pa.Table.from_batches((batch for batch, _ in self._pairs), self._schema)
        self._ended = True
        return table

    def _next(self) -> BatchAndMetadata:
        try:
            return next(self._pairs)
        except StopIteration:
            self._ended = True
            raise

    def close(self) -> None:
        """Read no more."""
        super().close()
        self._pairs.close()

    def __arrow_c_stream__(self, requested_schema: object = None) -> Any:
        self._begin()
        self._ended = True  # whoever takes it reads all
        batches = map(itemgetter(0), self._pairs)  # no generator: that would end after an error
        return pa.RecordBatchReader.from_batches(self._schema, batches).__arrow_c_stream__(requested_schema)


def _messages(schema: pa.Schema, pairs: Iterator[BatchAndMetadata]) -> Messages:
    splitter = Splitter(schema, WriteOptions(allow_64bit=True))
    yield splitter.schema_message.header, None
    for batch, metadata in pairs:
        yield from map(_in_one_piece, splitter.split(batch, metadata))


def _in_one_piece(message: SplitMessage) -> tuple[bytes, Buffer | None]:
    """Flatbuffer and body, which is all memory from the first of its buffers to the last, wherever they lie."""
    header, parsed, body = message
    starts: dict[int, pa.Buffer] = {}
    at = 0
    for part in body or ():
        starts[at] = part if isinstance(part, pa.Buffer) else pa.py_buffer(part)
        at += len(part)
    extents = [(starts.get(offset), length) for offset, length in zip(*buffer_extents(header, parsed), strict=True)]
    used = [(part.address, length) for part, length in extents if length and part is not None]
    first = min((address for address, _ in used), default=0)
    if len(used) < sum(bool(length) for _, length in extents) or any((at - first) % _ALIGNMENT for at, _ in used):
        return header, b"".join(map(memoryview, body or ()))  # a copy, of what libarrow cannot read where it is
    size = max((address + length for address, length in used), default=0) - first
    offsets = [part.address - first if length and part is not None else 0 for part, length in extents]
    return relocate(header, parsed, offsets, size), pa.foreign_buffer(first, size, list(starts.values()))
