"""Segments: Arrow IPC streams or files that are mapped once and served from where they lie.

An address is an offset into the segment plus its base, so its metadata goes out as it was written, and any
Arrow tool can read the same file.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType

import pyarrow as pa

from dissociated.errors import FormatError, RemoteProtocolError, SourceError, StoreError
from dissociated.ipc.encapsulated import END_OF_STREAM, Encapsulated, encapsulate
from dissociated.ipc.index import Index
from dissociated.ipc.options import WriteOptions
from dissociated.ipc.split import SplitMessage, Splitter, split
from dissociated.memory.region import Region, reserve_base
from dissociated.memory.shared import (
    Backing,
    explained,
    map_read_only,
    sealed_memfd,
    write_parts,
)
from dissociated.message import Buffer, FileSpan
from dissociated.protocol.header import HeaderType, buffer_extents, row_count
from dissociated.store.files import NewFile, Reserve, StagedFile

#: From how many bytes on a body is sent from the file.
_MIN_SPAN = 1 << 17


class Segment:
    """A finished segment, mapped, with an index of its messages.

    Its read-only `descriptor` is closed when nobody uses the segment any more: a stream that is being sent keeps
    it although the dataset has been dropped. What was mapped from it outlives even that.
    Raises StoreError where it holds no IPC stream or file.
    """

    def __init__(self, descriptor: int, name: str, backing: Backing) -> None:
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)
        self.name = name
        self.backing = backing
        try:
            with explained(f"mapping {name}"):
                size = os.fstat(descriptor).st_size
                self.region = Region(reserve_base(size), map_read_only(descriptor, size))
            self._memory = memoryview(self.region.memory)
            self.index = Index(self._memory)
            if not self.index or self.index[0].type is not HeaderType.SCHEMA:
                raise FormatError("not an Arrow IPC stream: it does not begin with a schema")
            self.schema = pa.ipc.read_schema(pa.py_buffer(encapsulate(self.index.message(0).header)))
        except (StoreError, FormatError, pa.ArrowException, OSError) as error:  # libarrow raises OSError too
            raise StoreError(f"{name}: {error}") from None

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Segment:
        """The IPC stream or file at `path`, as it is."""
        with explained(f"opening {os.fspath(path)}"):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return cls(descriptor, os.fspath(path), Backing.FILE)

    @classmethod
    def in_memory(cls, name: str, reader: pa.RecordBatchReader, options: WriteOptions | None = None) -> Segment:
        """A copy of everything that `reader` gives, in a sealed memfd."""
        descriptor = sealed_memfd(name, lambda writable: _write(writable, split(reader, options), 0))
        return cls(descriptor, name, Backing.SEALED)

    @cached_property
    def messages(self) -> list[Encapsulated]:
        """The messages, in the order in which they are sent. Raises StoreError where one is damaged."""
        try:
            return [self.index.message(number) for number in range(len(self.index))]
        except FormatError as error:
            raise StoreError(f"{self.name}: {error}") from None

    @cached_property
    def rows(self) -> int:
        """How many rows all record batches have together."""
        try:
            return sum(row_count(message.header) for message in self.messages)
        except RemoteProtocolError:
            raise StoreError(f"{self.name} has a record batch that does not say how long it is") from None

    @property
    def nbytes(self) -> int:
        """How many bytes the bodies have together."""
        return self.index.body_size

    def body(self, message: Encapsulated) -> Buffer:
        """The packed body of `message`, which lies in the mapping."""
        return self._memory[message.body_at : message.body_at + message.parsed.body_length]

    def span(self, message: Encapsulated) -> FileSpan | None:
        """The packed body of `message` as a span of the file; None for a small one, which memory serves better."""
        length = message.parsed.body_length
        return FileSpan(self.descriptor, message.body_at, length) if length >= _MIN_SPAN else None

    def addresses(self, message: Encapsulated) -> list[tuple[int, int]]:
        """Address and length of each buffer of `message`."""
        start = self.region.base + message.body_at
        offsets, lengths = buffer_extents(message.header, message.parsed)
        if any(n < 0 or o < 0 or o + n > message.parsed.body_length for o, n in zip(offsets, lengths, strict=True)):
            raise SourceError(f"{self.name} has a message whose buffers lie outside its body")
        return [(start + offset, length) for offset, length in zip(offsets, lengths, strict=True)]


def _write(descriptor: int, messages: Iterable[SplitMessage], offset: int) -> int:
    """Write these messages as a whole stream. Returns the offset after it."""
    for message in messages:
        offset += write_parts(descriptor, _parts(message), offset)
    return offset + write_parts(descriptor, [END_OF_STREAM], offset)


def _parts(message: SplitMessage) -> list[Buffer]:
    return [encapsulate(message.header), *(message.body or ())]


class SegmentWriter:
    """Writes an IPC stream to a new file, one copy of each batch, in one system call.

    The file has a name only after `close`: a writer that is killed leaves nothing behind. Leaving the `with` by an
    exception discards it. `reserve` is for files in the staging directory of a store, see StagedFile.
    Raises StoreError where the file exists already or there is no space left.
    """

    def __init__(
        self,
        path: str | Path,
        schema: pa.Schema,
        options: WriteOptions | None = None,
        reserve: Reserve | None = None,
    ) -> None:
        self.path = Path(path)
        self.rows = 0
        self._splitter = Splitter(schema, options)
        self._offset = 0
        self._open = True
        with explained(f"creating {self.path}"):
            self._file = NewFile(self.path) if reserve is None else StagedFile(self.path, reserve)
        try:
            self._append([self._splitter.schema_message])
        except BaseException:
            self.abort()
            raise

    @property
    def nbytes(self) -> int:
        """How long the file is so far, in bytes."""
        return self._offset

    def write(self, batch: pa.RecordBatch) -> None:
        """Append a batch, which must have the writer's schema."""
        self._append(self._splitter.split(batch))
        self.rows += batch.num_rows

    def close(self) -> None:
        """End the stream. The file may now be read by anyone who finds it."""
        if not self._open:
            return
        try:
            with explained(f"writing {self.path}"):
                self._write([END_OF_STREAM])
                self._file.commit(self._offset)
        except BaseException:
            self.abort()
            raise
        self._open = False

    def abort(self) -> None:
        """Discard the file. Does nothing after `close`."""
        if self._open:
            self._file.abort()
            self._open = False

    def _append(self, messages: Iterable[SplitMessage]) -> None:
        parts = [part for message in messages for part in _parts(message)]
        with explained(f"writing {self.path}"):
            self._write(parts)

    def _write(self, parts: Sequence[Buffer]) -> None:
        self._file.reserve(self._offset + sum(memoryview(part).nbytes for part in parts))
        self._offset += write_parts(self._file.descriptor, parts, self._offset)

    def __enter__(self) -> SegmentWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()
