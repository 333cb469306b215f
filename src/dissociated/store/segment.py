"""Segments: Arrow IPC streams or files that are mapped once and served from where they lie.

An address is an offset into the segment plus its base, so its metadata goes out as it was written, and any
Arrow tool can read the same file. Tensors have a segment of their own kind, in memory alone.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

import pyarrow as pa

from dissociated.base.buffers import Buffer, metadata_too_long
from dissociated.base.fork import ProcessBound
from dissociated.base.oserrors import store_errors
from dissociated.codec.filter.statistics import Statistics, StatisticsCollector, read_statistics
from dissociated.codec.options import WriteOptions, check_options
from dissociated.codec.reader import StreamReader, arrow_errors, read_schema
from dissociated.codec.sink import DescriptorSink, Sink
from dissociated.codec.split import BatchAndMetadata, Metadata, SplitMessage, Splitter, batches
from dissociated.codec.validation import OnceValidator
from dissociated.codec.writer import EncapsulatedWriter
from dissociated.errors import FormatError, RemoteProtocolError, SourceError, StoreError, StoreFull
from dissociated.format.encapsulated import FILE_MAGIC, Encapsulated, encapsulate, end_of_stream
from dissociated.format.index import Index
from dissociated.format.message import HeaderType, buffer_extents, row_count
from dissociated.format.tensor import ALIGNMENT
from dissociated.memory.region import Region
from dissociated.memory.shared import (
    Backing,
    create_memfd,
    is_sealed,
    map_read_only,
    reopen_read_only,
    seal,
    sealed_memfd,
    write_parts,
)
from dissociated.store.files import NewFile, Reserve, StagedFile, open_regular

_PREFIX_SIZE = 8  # bytes before the flatbuffer


class Segment:
    """A finished segment, mapped, with an index of its messages.

    Its read-only `descriptor`, which it owns, is closed when nobody uses the segment any more: a stream that is being
    sent keeps it although the dataset has been dropped. What was mapped from it outlives even that.
    Raises StoreError where it holds no IPC stream or file.
    """

    def __init__(self, descriptor: int, name: str, backing: Backing) -> None:
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)
        #: What errors call it.
        self.name = name
        self.backing = backing
        self._validated = OnceValidator()
        try:
            with store_errors(f"mapping {name}"):
                size = os.fstat(descriptor).st_size
                memory = map_read_only(descriptor, size)
                # Its own addresses, since peers that fetch over a network know no others.
                self.region = Region(memory.address, memory)
            self._memory = memoryview(self.region.memory)
            self.index = Index(self._memory)
            if not self.index or self.index[0].type is not HeaderType.SCHEMA:
                raise FormatError("not an Arrow IPC stream: it does not begin with a schema")
            self.schema = read_schema(self.index.message(0).header, FormatError)
        except (StoreError, FormatError) as error:
            raise StoreError(f"{name}: {error}") from None

    @classmethod
    def open(cls, path: str | os.PathLike[str], name: str = "", follow: bool = True) -> Segment:
        """The IPC stream or file at `path`, as it is; /dev/fd/N is that of a descriptor, as of a sealed memfd.

        It must be a regular file, and no symbolic link unless `follow`.
        """
        name = name or os.fspath(path)
        with store_errors(f"opening {name}"):
            descriptor = open_regular(path, os.O_RDONLY, follow)
        return cls(descriptor, name, Backing.SEALED if is_sealed(descriptor) else Backing.FILE)

    @classmethod
    def in_memory(cls, name: str, reader: pa.RecordBatchReader, options: WriteOptions | None = None) -> Segment:
        """A copy of everything that `reader` gives, in a sealed memfd."""
        segments: list[Segment] = []
        sink = partial(MemfdSink, name, segments.append)
        with SegmentWriter(sink, reader.schema, options, statistics=False) as writer:
            for batch, metadata in batches(reader):
                writer.write_batch(batch, metadata)
        return segments[0]

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

    @cached_property
    def statistics(self) -> Statistics | None:
        """What its writer says of each record batch; None where that is nothing, or does not fit."""
        if self.index.is_file:
            return None
        last = self.index[len(self.index) - 1]
        end = last.offset + last.metadata_length + last.body_length
        return read_statistics(self._memory, end, self.schema, self.batch_rows)

    @property
    def batch_rows(self) -> list[int]:
        """How many rows each record batch has."""
        return [row_count(one.header) for one in self.messages if one.parsed.type is HeaderType.RECORD_BATCH]

    def batches(self) -> Iterator[BatchAndMetadata]:
        """Its record batches, for who gives them to libarrow or gRPC. Each is validated in full, the first time.

        Raises SourceError and FormatError where one is damaged.
        """
        return self._validated.check(self.schema, self._decoded())

    def _decoded(self) -> Iterator[BatchAndMetadata]:
        if self._memory[: len(FILE_MAGIC)] != FILE_MAGIC:
            yield from batches(StreamReader(self.region.memory))
            return
        with arrow_errors(FormatError):
            reader = pa.ipc.open_file(self.region.memory)
        for number in range(reader.num_record_batches):
            with arrow_errors(FormatError):
                both: BatchAndMetadata = reader.get_batch_with_custom_metadata(number)
            yield both

    def wait(self, until: int) -> None:
        """Nothing is waited for: see `SharedSegment.wait`. All of it is written."""

    def check_metadata(self, limit: int) -> None:
        """Raise StoreError where the metadata of one of its messages has more than `limit` bytes."""
        why = metadata_too_long(self.name, int(self.index.metadata_lengths.max()) - _PREFIX_SIZE, limit)
        if why is not None:
            raise StoreError(why)

    def body(self, message: Encapsulated) -> Buffer:
        """The packed body of `message`, which lies in the mapping."""
        return self._memory[message.body_at : message.body_at + message.parsed.body_length]

    def addresses(self, message: Encapsulated) -> list[tuple[int, int]]:
        """Address and length of each buffer of `message`. Raises SourceError where one lies outside the body."""
        start = self.region.base + message.body_at
        offsets, lengths = buffer_extents(message.header, message.parsed)
        if any(n < 0 or o < 0 or o + n > message.parsed.body_length for o, n in zip(offsets, lengths, strict=True)):
            raise SourceError(f"{self.name} has a message whose buffers lie outside its body")
        return [(start + offset, length) for offset, length in zip(offsets, lengths, strict=True)]


class SegmentWriter(EncapsulatedWriter):
    """Writes a segment: to the path `place`, or to the sink that `place` makes. Each batch is copied once.

    A file, which must not exist, has a name only after `close`: a writer that is killed leaves nothing behind.
    Aborted, it is discarded. `reserve` is for files in the staging directory of a store: see StagedFile. Messages have
    the longer prefix even if `options` ask for the legacy one: segments are read in place, by this library. With
    `statistics`, these follow the end of the stream, if there is room. Raises StoreError where the path exists already
    or there is no space left.
    """

    def __init__(
        self,
        place: str | Path | Callable[[], Sink],
        schema: pa.Schema,
        options: WriteOptions | None = None,
        reserve: Reserve | None = None,
        statistics: bool = True,
    ) -> None:
        #: Rows that were written so far.
        self.rows = 0
        self._statistics = StatisticsCollector(schema, None if statistics else ())
        splitter = Splitter(schema, replace(check_options(options, WriteOptions), write_legacy_ipc_format=False))
        super().__init__(place() if callable(place) else _File(Path(place), reserve), splitter)

    @property
    def nbytes(self) -> int:
        """How long the segment is so far, in bytes."""
        return self._position

    def write_batch(self, batch: pa.RecordBatch, custom_metadata: Metadata | None = None) -> None:
        """Write a batch: see `RecordBatchWriter.write_batch`. Raises StoreFull and StoreError, too."""
        super().write_batch(batch, custom_metadata)
        self.rows += batch.num_rows
        self._statistics.add(batch)

    def _end(self) -> None:
        # A segment is whole without statistics, if there is no room for them or they cannot be made.
        with suppress(StoreFull, pa.ArrowException):
            found = self._statistics.statistics()
            if found is not None:
                self._write([end_of_stream(), found.encode()])
                self._sink.close()
                return
        super()._end()


class SharedSegmentWriter(SegmentWriter):
    """A SegmentWriter whose record batches another process writes, straight into its file.

    That process opens `path`, writes encapsulated record batches from `nbytes` on, and writes no further than
    `reserve` allows. `adopt` takes its batches in before `close`; `stats` does not count them.
    """

    def __init__(self, place: Path, schema: pa.Schema, reserve: Reserve | None = None) -> None:
        super().__init__(partial(self._create, place, reserve), schema)

    def _create(self, place: Path, reserve: Reserve | None) -> Sink:
        self._file = _File(place, reserve)
        return self._file

    @property
    def path(self) -> str:
        """The name by which another process opens the file, until this writer is closed or aborted."""
        return f"/proc/{os.getpid()}/fd/{self._file.descriptor}"

    def reserve(self, end: int) -> int:
        """Reserve room in the file up to `end`. Returns the end of the room, which may lie further.

        Raises StoreFull and StoreError.
        """
        return self._file.reserve(end)

    def adopt(self, end: int) -> None:
        """Take in the record batches that the other process has written, up to `end`. It must write no more.

        Raises FormatError if the file does not hold record batches of the schema up to there, and StoreError.
        """
        self._check_open()
        stream = pa.BufferReader(self._file.map(end))
        with arrow_errors(FormatError), pa.ipc.open_stream(stream) as reader:
            batches = [*reader]  # views of the mapping
            if stream.tell() != end:
                raise FormatError(f"the other process has ended the stream at {stream.tell()}, and wrote up to {end}")
        statistics = StatisticsCollector(self.schema, thorough=True)
        try:
            for batch in batches:
                statistics.add(batch)
        except pa.ArrowException:  # The values cannot be compared, and a segment needs no statistics.
            statistics = StatisticsCollector(self.schema, ())
        self._statistics = statistics
        self.rows = sum(batch.num_rows for batch in batches)
        self._file.written = self._position = end


class _File(Sink, ProcessBound):
    """A new file at `path`; see `dissociated.store.files`."""

    def __init__(self, path: Path, reserve: Reserve | None) -> None:
        place = path.parent.resolve() / path.name  # it may be named by a descriptor
        self._what = f"writing {place}"
        self._open = True
        #: The position of the next byte in the file.
        self.written = 0
        with store_errors(f"creating {place}"):
            self._file = NewFile(path) if reserve is None else StagedFile(path, reserve)
        self.bind_to_process()

    def after_fork_in_child(self) -> None:
        self._file.close()

    @property
    def descriptor(self) -> int:
        """The descriptor of the file; -1 once it is closed."""
        return self._file.descriptor

    def reserve(self, end: int) -> int:
        """Reserve room: see `NewFile.reserve`."""
        self.check_process()
        with store_errors(self._what):
            return self._file.reserve(end)

    def map(self, size: int) -> pa.Buffer:
        """Map the first `size` bytes, which the file must have."""
        with store_errors(self._what):
            descriptor = reopen_read_only(self._file.descriptor)
            try:
                return map_read_only(descriptor, size)
            finally:
                os.close(descriptor)

    def write(self, parts: Sequence[Buffer]) -> None:
        self.reserve(self.written + sum(memoryview(part).nbytes for part in parts))
        with store_errors(self._what):
            self.written += write_parts(self._file.descriptor, parts, self.written)

    def close(self) -> None:
        if self.is_inherited:
            return
        with store_errors(self._what):
            self._file.commit(self.written)
        self._open = False

    def abort(self) -> None:
        if self.is_inherited:
            return
        if self._open:
            self._open = False
            self._file.abort()


class MemfdSink(DescriptorSink, ProcessBound):
    """A memfd, which becomes a sealed segment when it is closed. `finished` is then called with the segment."""

    def __init__(self, name: str, finished: Callable[[Segment], object]) -> None:
        self._name = name
        self._finished = finished
        what = f"shared memory for {name}"
        with store_errors(what):
            descriptor = create_memfd(name)
        super().__init__(descriptor, what)
        self.bind_to_process()

    def after_fork_in_child(self) -> None:
        self._file.close()

    def write(self, parts: Sequence[Buffer]) -> None:
        self.check_process()
        super().write(parts)

    def close(self) -> None:
        """Seal the memfd. Raises StoreError."""
        if self.is_inherited:
            return
        with store_errors(self.what):
            seal(self.descriptor, Backing.SEALED)
            readable = reopen_read_only(self.descriptor)
        self._finished(Segment(readable, self._name, Backing.SEALED))
        super().close()


class TensorSegment:
    """A copy of these messages, as `write_tensor` writes them, in a sealed memfd, every buffer aligned to 64 bytes.

    Its read-only `descriptor` is closed when nobody uses the segment any more. Raises StoreError where there is no
    memory for it.
    """

    backing = Backing.SEALED

    def __init__(self, name: str, messages: Sequence[SplitMessage]) -> None:
        parts, bodies, end = [], [], 0
        for message in messages:
            head = encapsulate(message.header)  # which is a multiple of 64 long
            parts += [bytes(-end % ALIGNMENT), head, *(message.body or ())]
            bodies.append(end + -end % ALIGNMENT + len(head))
            end = bodies[-1] + message.parsed.body_length
        self.descriptor = sealed_memfd(name, lambda writable: write_parts(writable, parts, 0))
        weakref.finalize(self, os.close, self.descriptor)
        memory = map_read_only(self.descriptor, end)
        # Its own addresses, since peers that fetch over a network know no others.
        self.region = Region(memory.address, memory)
        #: Address and length of each buffer of each message.
        self.addresses = [
            [
                (self.region.base + body_at + offset, length)
                for offset, length in zip(*buffer_extents(message.header, message.parsed), strict=True)
            ]
            for message, body_at in zip(messages, bodies, strict=True)
        ]

    def wait(self, until: int) -> None:
        """Nothing is waited for: see `SharedSegment.wait`. All of it is written."""
