"""A reader over record batches with metadata, from any source of such pairs.

The reader of `pyarrow.RecordBatchReader.from_batches` has no metadata of batches. This reader is a reader of an IPC
stream: Python gets the original batches, and C++ code reads a stream that is written around them, batch by batch,
without copying their buffers if possible.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from operator import itemgetter
from typing import Any, Generic, Self, TypeVar

import pyarrow as pa

from dissociated.base.buffers import Buffer
from dissociated.codec.join import Messages, message_file
from dissociated.codec.options import WriteOptions
from dissociated.codec.reader import OneTimeReader, Reading, close_idle
from dissociated.codec.split import BatchAndMetadata, SplitMessage, Splitter
from dissociated.format.message import buffer_extents, relocate

T = TypeVar("T")

_ALIGNMENT = 8  # bytes; libarrow requires it of buffers in a body
_PREFIX_SIZE = 8  # bytes before the flatbuffer of an encapsulated message: a marker, and the length


class RaisingAgain(Generic[T]):
    """An iterator over `items` that raises an error of theirs again at each later call.

    A generator would end after its error, which looks like the regular end.
    """

    def __init__(self, items: Iterator[T]) -> None:
        self._items = items
        self._reading = Reading()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        items = self._items
        try:
            return self._reading.take(items.__next__)
        except BaseException:
            if self._items is not items:  # `close` found this thread reading
                _close(items)
            raise

    def close(self) -> None:
        """Take no more items, and close their source.

        A later call of `next` raises StoreError, unless the end was reached before.
        """
        self._reading.close()
        items, self._items = self._items, iter(())
        _close(items)


def _close(items: Iterator[object]) -> None:
    if isinstance(items, Generator):
        close_idle(items)


class BatchReader(OneTimeReader, pa.ipc.RecordBatchStreamReader):  # type: ignore[misc]  # pyarrow has no type hints
    """A reader of batches of one `schema` and their metadata from `pairs`.

    Errors of `pairs` are raised by the reader.
    """

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
        """Return the next batch. Raises StopIteration at the end."""
        return self._next()[0]

    def read_next_batch_with_custom_metadata(self) -> pa.lib.RecordBatchWithMetadata:
        """Return the next batch and its metadata. Raises StopIteration at the end."""
        return pa.lib.RecordBatchWithMetadata(*self._next())

    def read_all(self) -> pa.Table:
        """Return all remaining batches as one table."""
        self._begin()
        table = pa.Table.from_batches((batch for batch, _ in self._pairs), self._schema)
        self._at_end = True
        return table

    def _next(self) -> BatchAndMetadata:
        try:
            return next(self._pairs)
        except StopIteration:
            self._at_end = True
            raise

    def close(self) -> None:
        """Stop reading, and close the source."""
        super().close()
        self._pairs.close()

    def __arrow_c_stream__(self, requested_schema: object = None) -> Any:
        self._begin()
        self._at_end = True  # the consumer of the stream reads all batches
        batches = map(itemgetter(0), self._pairs)  # not a generator: it would end after an error
        return pa.RecordBatchReader.from_batches(self._schema, batches).__arrow_c_stream__(requested_schema)


def _messages(schema: pa.Schema, pairs: Iterator[BatchAndMetadata]) -> Messages:
    # Most readers are read in Python, so nothing else is prepared before C++ code reads the first batch.
    yield schema.serialize().to_pybytes()[_PREFIX_SIZE:], None
    splitter = Splitter(schema, WriteOptions(allow_64bit=True))
    for batch, metadata in pairs:
        yield from map(_in_one_piece, splitter.split(batch, metadata))


def _in_one_piece(message: SplitMessage) -> tuple[bytes, Buffer | None]:
    """Return the flatbuffer and the body, which is all memory from the first buffer to the last, uncopied.

    Buffers that libarrow cannot read in place are copied to a packed body.
    """
    header, parsed, body = message
    starts: dict[int, pa.Buffer] = {}
    at = 0
    for part in body or ():
        starts[at] = part if isinstance(part, pa.Buffer) else pa.py_buffer(part)
        at += len(part)
    extents = [(starts.get(offset), length) for offset, length in zip(*buffer_extents(header, parsed), strict=True)]
    buffers = [(part.address, length) for part, length in extents if length and part is not None]
    first = min((address for address, _ in buffers), default=0)
    if len(buffers) < sum(bool(length) for _, length in extents) or any((at - first) % _ALIGNMENT for at, _ in buffers):
        return header, b"".join(map(memoryview, body or ()))  # a copy: libarrow cannot read these buffers in place
    size = max((address + length for address, length in buffers), default=0) - first
    offsets = [part.address - first if length and part is not None else 0 for part, length in extents]
    return relocate(header, parsed, offsets, size), pa.foreign_buffer(first, size, list(starts.values()))
