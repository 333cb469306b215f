"""Segments: Arrow IPC streams or files that are mapped once and served in place.

The address of a buffer is its offset in the segment plus the base of the mapping. Metadata is therefore sent unchanged,
and any Arrow tool can read the same file. Tensors have their own kind of segment, in memory alone.
"""

from __future__ import annotations

import os
import re
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import NoReturn

import numpy as np
import pyarrow as pa

from dissociated.base.buffers import Buffer, metadata_too_long
from dissociated.base.fork import ProcessBound
from dissociated.base.oserrors import store_errors
from dissociated.codec.columns import pick, select_fields
from dissociated.codec.filter.statistics import (
    MAX_STATISTICS,
    Statistics,
    StatisticsCollector,
    is_statistics,
    read_statistics,
)
from dissociated.codec.join import Messages, join
from dissociated.codec.options import WriteOptions, check_options
from dissociated.codec.reader import StreamReader, arrow_errors, read_schema
from dissociated.codec.sink import DescriptorSink, Sink
from dissociated.codec.split import BatchAndMetadata, Metadata, SplitMessage, Splitter, batches
from dissociated.codec.validation import OnceValidator
from dissociated.codec.writer import EncapsulatedWriter
from dissociated.errors import CatalogError, FormatError, RemoteProtocolError, SourceError, StoreError
from dissociated.format.encapsulated import FILE_MAGIC, Encapsulated, encapsulate, end_of_stream
from dissociated.format.index import Index
from dissociated.format.message import HeaderType, buffer_extents, row_count_at
from dissociated.format.projection import ProjectedMessage, Projection
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

_PREFIX_SIZE = 8  # bytes before the flatbuffer of a message
#: The mean number of bytes for each selected batch from which a user's file is read in part. libarrow decodes a whole
#: smaller batch in less time than this library selects from it.
_MIN_READ_IN_PART = 1 << 16


class Segment:
    """A finished segment, mapped, with an index of its messages.

    The segment owns its read-only `descriptor`, which is closed when the segment is no longer referenced: a stream
    that is being sent keeps it open although the dataset has been dropped. Mappings made by clients stay valid even
    afterwards. Raises StoreError if the descriptor holds no IPC stream or file.
    """

    def __init__(self, descriptor: int, name: str, backing: Backing) -> None:
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)
        #: The name of the segment in errors.
        self.name = name
        self.backing = backing
        #: Raises SourceError if the file was modified since it was opened. None if this is no file of a user.
        self.modification_check: Callable[[], None] | None = None
        self._validated = OnceValidator()
        self._has_checked_buffers = False
        try:
            with store_errors(f"mapping {name}"):
                size = os.fstat(descriptor).st_size
                memory = map_read_only(descriptor, size)
                # The region has the addresses of this process: peers that fetch over a network use these.
                self.region = Region(memory.address, memory)
            self._memory = memoryview(self.region.memory)
            self.index = Index(self._memory)
            if not self.index or self.index[0].type is not HeaderType.SCHEMA:
                raise FormatError("not an Arrow IPC stream: the first message is not a schema")
            if (self.index.types[1:] == HeaderType.SCHEMA).any():
                raise FormatError(
                    "the file has several schemas, as streams in a row: publish each stream by itself "
                    "(with --append, dissociated put adds one to another)"
                )
            self.schema = read_schema(self.index.message(0).header, FormatError)
        except (StoreError, FormatError) as error:
            raise StoreError(f"{name}: {error}") from None

    @classmethod
    def open(cls, path: str | os.PathLike[str], name: str = "", follow: bool = True) -> Segment:
        """Open the IPC stream or file at `path`, without a copy.

        Args:
            path: A regular file. /dev/fd/N is the file of descriptor N, for example a sealed memfd.
            name: The name of the segment in errors; by default the path.
            follow: Whether `path` may be a symbolic link.

        Raises:
            StoreError: The file cannot be opened, is not regular, or holds no IPC stream or file.
        """
        name = name or os.fspath(path)
        with store_errors(f"opening {name}"):
            descriptor = open_regular(path, os.O_RDONLY, follow)
        return cls(descriptor, name, Backing.SEALED if is_sealed(descriptor) else Backing.FILE)

    @classmethod
    def in_memory(cls, name: str, reader: pa.RecordBatchReader, options: WriteOptions | None = None) -> Segment:
        """Copy all batches of `reader` into a sealed memfd."""
        segments: list[Segment] = []
        sink = partial(MemfdSink, name, segments.append)
        with SegmentWriter(sink, reader.schema, options, statistics=False) as writer:
            for batch, metadata in batches(reader):
                writer.write_batch(batch, metadata)
        return segments[0]

    @property
    def is_modifiable(self) -> bool:
        """Whether this is a user's file, which may be modified at any time."""
        return self.modification_check is not None

    def check_unchanged(self) -> None:
        """Raise SourceError if this is a user's file that was modified since it was opened."""
        if self.modification_check is not None:
            self.modification_check()

    def message(self, number: int) -> Encapsulated:
        """Return a message, of those in the order in which they are sent. It may be that of a file modified meanwhile.

        Raises:
            StoreError: The message is damaged.
            SourceError: The file was modified.
        """
        try:
            return self.index.message(number, None if self.modification_check is None else self._read)
        except FormatError as error:
            self.check_unchanged()
            raise StoreError(f"{self.name}: {error}") from None

    def copy_parts(self, parts: Sequence[Buffer], max_length: int) -> list[Buffer]:
        """Return the parts of a body, with copies of those that lie in the segment and have up to `max_length` bytes.

        Raises:
            SourceError: The file was shortened.
        """
        return [self._copy(part) if len(part) <= max_length else part for part in parts]

    def _copy(self, part: Buffer) -> Buffer:
        at = pa.py_buffer(part).address - self.region.memory.address
        return self._read(at, len(part)) if len(part) and 0 <= at < self.region.size else part

    def _read(self, at: int, length: int) -> bytes:
        """Read bytes of the file, which may have been shortened: then reading the mapping would end this process."""
        with store_errors(f"reading {self.name}"):
            content = os.pread(self.descriptor, length, at)
        if len(content) < length:
            self._fail_at_end(at + len(content))
        return content

    def _read_into(self, memory: memoryview, at: int) -> None:
        while len(memory):
            with store_errors(f"reading {self.name}"):
                count = os.preadv(self.descriptor, [memory], at)  # at most 2 GiB at once
            if not count:
                self._fail_at_end(at)
            memory, at = memory[count:], at + count

    def _fail_at_end(self, at: int) -> NoReturn:
        self.check_unchanged()
        raise StoreError(f"{self.name} ends at byte {at}, within a message")

    @cached_property
    def rows(self) -> int:
        """The number of rows of all record batches. Raises StoreError if a batch has no length."""
        return int(self._row_counts.sum())

    @cached_property
    def _row_counts(self) -> np.ndarray:
        """The number of rows of each message; 0 for messages other than record batches."""
        counts = np.zeros(len(self.index), np.int64)
        try:
            for run in self.index.runs:
                message = self.message(run[0])
                if message.parsed.type is HeaderType.RECORD_BATCH:
                    at = row_count_at(message.header)
                    rows = 0 if at is None else self.index.integers(run, at, 1)[:, 0]
                    counts[run[0] : run[0] + run[1]] = rows
        except RemoteProtocolError:
            raise StoreError(f"{self.name} has a record batch without a length") from None
        return counts

    def check_buffers(self) -> None:
        """Raise SourceError if a buffer lies outside the body of its message. The first call checks this."""
        for run in () if self._has_checked_buffers else self.index.runs:
            message = self.message(run[0])
            parsed = message.parsed
            if not parsed.buffer_count:
                continue
            if run[1] == 1:
                extents = np.array([buffer_extents(message.header, parsed)], np.int64).swapaxes(1, 2)
            else:
                flat = self.index.integers(run, parsed.buffers_at, 2 * parsed.buffer_count)
                extents = flat.reshape(run[1], parsed.buffer_count, 2)
            if (extents < 0).any() or (extents[:, :, 0] > parsed.body_length - extents[:, :, 1]).any():
                raise SourceError(f"{self.name} has a message whose buffers lie outside its body")
        self._has_checked_buffers = True

    @property
    def nbytes(self) -> int:
        """The bytes of all message bodies."""
        return self.index.body_size

    @cached_property
    def statistics(self) -> Statistics | None:
        """The statistics of each record batch that its writer has added; None if they are missing or do not fit."""
        if self.index.is_file:
            return None
        last = self.index[len(self.index) - 1]
        end = last.offset + last.metadata_length + last.body_length
        if self.modification_check is None:
            return read_statistics(self._memory, end, self.schema, self.batch_rows)
        tail = self._read(end, min(self.region.size - end, 2 * MAX_STATISTICS))
        statistics = read_statistics(tail, 0, self.schema, self.batch_rows)
        self.check_unchanged()  # before they are kept
        return statistics

    @property
    def batch_count(self) -> int:
        """The number of record batches."""
        return int(np.count_nonzero(self.index.types == HeaderType.RECORD_BATCH))

    @property
    def batch_rows(self) -> list[int]:
        """The number of rows of each record batch."""
        counts: list[int] = self._row_counts[self.index.types == HeaderType.RECORD_BATCH].tolist()
        return counts

    def batches(self) -> Iterator[BatchAndMetadata]:
        """Decode the record batches, for use by libarrow or gRPC. Each is validated in full the first time.

        Raises SourceError and FormatError if one is damaged, or the file was modified.
        """
        yield from self._unmodified(self._validated.check(self.schema, self._decoded()))

    def some_batches(self, columns: Sequence[int], numbers: Sequence[int] | None) -> Iterator[BatchAndMetadata]:
        """Decode the columns at these positions, as `batches` does. Large batches of a user's file are read in part.

        Args:
            columns: Ascending positions of columns.
            numbers: Ascending numbers of batches, counted from 0; None for all batches.
        """
        count = self.batch_count if numbers is None else len(numbers)
        if self.is_modifiable and count * _MIN_READ_IN_PART <= self.nbytes:
            yield from self._unmodified(self._decoded_in_part(columns, numbers))
            return
        whole = self.batches() if numbers is None else pick(self.batches(), numbers)
        for batch, metadata in whole:
            yield batch.select([*columns]), metadata

    def _decoded_in_part(self, columns: Sequence[int], numbers: Sequence[int] | None) -> Iterator[BatchAndMetadata]:
        pairs = batches(join(self._messages(columns, numbers), kind=StreamReader, max_body=sys.maxsize))
        yield from OnceValidator().check(select_fields(self.schema, columns), pairs)

    def _messages(self, columns: Sequence[int], numbers: Sequence[int] | None) -> Messages:
        """Read the messages of some columns and batches, and no other bodies."""
        projection = Projection(self.message(0).header, columns)
        yield projection.header, None
        header, projected = b"", None
        for number in self._numbers_of_messages(numbers):
            message = self.message(number)
            if message.header != header:  # batches of equal length mostly have equal flatbuffers
                header, projected = message.header, projection.project(message.header, message.parsed)
                if projected is not None:
                    self._check_overlap(projected, message.parsed.body_length)
            if projected is not None:
                yield projected.header, self._projected_body(message.body_at, projected)

    def _numbers_of_messages(self, numbers: Sequence[int] | None) -> list[int]:
        """Return the numbers of the messages of batches, and of all dictionaries before the last of these batches."""
        is_batch = self.index.types == HeaderType.RECORD_BATCH
        batch_messages = np.flatnonzero(is_batch)
        if numbers is not None:
            batch_messages = batch_messages[np.array(numbers, np.int64)]
        chosen = ~is_batch
        chosen[batch_messages.max(initial=0) :] = False
        chosen[0] = False  # the schema
        chosen[batch_messages] = True
        return np.flatnonzero(chosen).tolist()

    def _check_overlap(self, projected: ProjectedMessage, body_length: int) -> None:
        """Raise FormatError if the columns together are longer than the whole body: they could fill the memory."""
        if sum(cut.end - cut.begin for cut in projected.cuts) > body_length:
            raise FormatError(f"the columns of a record batch of {self.name} overlap: read all columns")

    def _projected_body(self, body_at: int, projected: ProjectedMessage) -> pa.Buffer:
        body = pa.allocate_buffer(projected.parsed.body_length)
        memory, end = memoryview(body).cast("B"), 0
        for padding, begin, stop in projected.cuts:
            memory[end : end + padding] = bytes(padding)
            end += padding
            self._read_into(memory[end : end + stop - begin], body_at + begin)
            end += stop - begin
        memory[end:] = bytes(projected.padding)
        return body

    def _unmodified(self, pairs: Iterator[BatchAndMetadata]) -> Iterator[BatchAndMetadata]:
        """Yield each of `pairs` if the file is unmodified after it was decoded. Raises SourceError otherwise."""
        self.check_unchanged()
        while True:
            try:
                pair = next(pairs, None)
            finally:
                self.check_unchanged()  # in a modified file, decoding may fail with any error; this one tells why
            if pair is None:
                return
            yield pair

    def _decoded(self) -> Iterator[BatchAndMetadata]:
        source = self.region.memory
        if self.modification_check is not None:
            with store_errors(f"opening {self.name}"):
                source = pa.OSFile(f"/dev/fd/{self.descriptor}")  # which libarrow reads batch by batch
        if not self.index.is_file:
            yield from batches(StreamReader(source))
            return
        with arrow_errors(FormatError):
            reader = pa.ipc.open_file(source)
        for number in range(reader.num_record_batches):
            with arrow_errors(FormatError):
                both: BatchAndMetadata = reader.get_batch_with_custom_metadata(number)
            yield both

    def wait(self, until: int) -> None:
        """Return at once, since all of the segment is written. See `SharedSegment.wait`."""

    def check_whole(self) -> None:
        """Raise StoreError unless this is one IPC stream or file that its writer has ended. It reads no message."""
        if not self.index.is_ended:
            raise StoreError(
                f"{self.name} has no end-of-stream marker, so it may be incomplete: close its writer before the commit"
            )
        # Zeros fill memory of a size that was chosen in advance.
        if not is_alone(self.index) and np.frombuffer(self.index.trailing_bytes, np.uint8).any():
            raise StoreError(
                f"{self.name} has data after its end, where Arrow readers stop: write each stream or file into a "
                "segment of its own"
            )

    def check_metadata(self, limit: int) -> None:
        """Raise StoreError if the metadata of a message has more than `limit` bytes."""
        why = metadata_too_long(self.name, int(self.index.metadata_lengths.max()) - _PREFIX_SIZE, limit)
        if why is not None:
            raise StoreError(why)

    def body(self, message: Encapsulated) -> Buffer:
        """Return the packed body of `message`, a view of the mapping."""
        return self._memory[message.body_at : message.body_at + message.parsed.body_length]

    def addresses(self, message: Encapsulated) -> list[tuple[int, int]]:
        """Return the address and the length of each buffer of `message`, which `check_buffers` has checked."""
        start = self.region.base + message.body_at
        offsets, lengths = buffer_extents(message.header, message.parsed)
        return [(start + offset, length) for offset, length in zip(offsets, lengths, strict=True)]


def is_alone(index: Index) -> bool:
    """Return whether nothing but statistics follows an Arrow IPC stream or file: no reader would read other data."""
    if index.is_file:  # the end of a file, and the beginning of the next
        return not re.search(FILE_MAGIC * 2, index.trailing_bytes)
    return not len(index.trailing_bytes) or is_statistics(index.trailing_bytes)


class SegmentWriter(EncapsulatedWriter):
    """A writer of a segment, which copies each batch once.

    The file gets its name in `close`, so a writer that is killed leaves nothing behind. `abort` discards the file.
    Messages always have the 8-byte prefix, even if `options` ask for the legacy one, since this library reads segments
    in place.

    Args:
        place: The path of the file, which must not exist, or a function that makes the sink to write to.
        schema: The schema of the batches.
        options: Options of the IPC format.
        reserve: Reserves room for a file in the staging directory of a store: see `StagedFile`.
        statistics: Whether to add statistics after the end of the stream, if there is room for them.

    Raises:
        StoreError: The path exists already, or there is no space left.
    """

    def __init__(
        self,
        place: str | Path | Callable[[], Sink],
        schema: pa.Schema,
        options: WriteOptions | None = None,
        reserve: Reserve | None = None,
        statistics: bool = True,
    ) -> None:
        #: The number of rows that were written so far.
        self.rows = 0
        self._statistics = StatisticsCollector(schema, None if statistics else ())
        splitter = Splitter(schema, replace(check_options(options, WriteOptions), write_legacy_ipc_format=False))
        super().__init__(place() if callable(place) else _File(Path(place), reserve), splitter)

    @property
    def nbytes(self) -> int:
        """The length of the segment so far, in bytes."""
        return self._position

    def write_batch(self, batch: pa.RecordBatch, custom_metadata: Metadata | None = None) -> None:
        """Write a batch. Raises StoreFull and StoreError, and the errors of `RecordBatchWriter.write_batch`."""
        super().write_batch(batch, custom_metadata)
        self.rows += batch.num_rows
        self._statistics.add(batch)

    def _end(self) -> None:
        if self._write_statistics():
            self._sink.close()
        else:
            super()._end()

    def _write_statistics(self) -> bool:
        """Write the end of the stream with statistics. Return False if they are unknown, or cannot be written."""
        # They are optional. Without them, the segment may still fit.
        with suppress(StoreError, CatalogError, pa.ArrowException):
            statistics = self._statistics.statistics()
            if statistics is not None:
                self._write([end_of_stream(), statistics.encode()])
                return True
        return False


class SharedSegmentWriter(SegmentWriter):
    """A SegmentWriter for record batches that another process writes directly into the file.

    The other process opens `path`, and writes encapsulated record batches from the position `nbytes` on, but no further
    than `reserve` allows. Call `adopt` before `close` to add these batches. `stats` does not count them.
    """

    def __init__(self, place: Path, schema: pa.Schema, reserve: Reserve | None = None) -> None:
        super().__init__(partial(self._create, place, reserve), schema)

    def _create(self, place: Path, reserve: Reserve | None) -> Sink:
        self._file = _File(place, reserve)
        return self._file

    @property
    def path(self) -> str:
        """The path at which another process can open the file, until this writer is closed or aborted."""
        return f"/proc/{os.getpid()}/fd/{self._file.descriptor}"

    def reserve(self, end: int) -> int:
        """Reserve room in the file up to the position `end`.

        Returns:
            The position up to which there is room, which is at least `end`.

        Raises:
            StoreFull: There is no room now.
            StoreError: There can be no room, or the file cannot be used.
        """
        return self._file.reserve(end)

    def adopt(self, end: int) -> None:
        """Add the record batches that the other process has written. That process must not write any more.

        Args:
            end: The position at which the last batch ends.

        Raises:
            FormatError: The file does not hold record batches of the schema up to `end`.
            StoreError: The file cannot be read.
        """
        self._check_open()
        stream = pa.BufferReader(self._file.map(end))
        with arrow_errors(FormatError), pa.ipc.open_stream(stream) as reader:
            batches = [*reader]  # views of the mapping
            if stream.tell() != end:
                raise FormatError(f"the other process ended the stream at byte {stream.tell()}, and wrote {end} bytes")
        statistics = StatisticsCollector(self.schema, thorough=True)
        try:
            for batch in batches:
                statistics.add(batch)
        except pa.ArrowException:  # The values cannot be compared. Statistics are optional.
            statistics = StatisticsCollector(self.schema, ())
        self._statistics = statistics
        self.rows = sum(batch.num_rows for batch in batches)
        self._file.written = self._position = end


class _File(Sink, ProcessBound):
    """A new file at `path`; see `dissociated.store.files`."""

    def __init__(self, path: Path, reserve: Reserve | None) -> None:
        place = path.parent.resolve() / path.name  # the path may be one of /proc/self/fd
        self._operation = f"writing {place}"
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
        """The descriptor of the file; -1 after it was closed."""
        return self._file.descriptor

    def reserve(self, end: int) -> int:
        """Reserve room in the file. See `NewFile.reserve`."""
        self.check_process()
        with store_errors(self._operation):
            return self._file.reserve(end)

    def map(self, size: int) -> pa.Buffer:
        """Map the first `size` bytes of the file, which must be at least this long."""
        with store_errors(self._operation):
            descriptor = reopen_read_only(self._file.descriptor)
            try:
                return map_read_only(descriptor, size)
            finally:
                os.close(descriptor)

    def write(self, parts: Sequence[Buffer]) -> None:
        self.reserve(self.written + sum(memoryview(part).nbytes for part in parts))
        with store_errors(self._operation):
            self.written += write_parts(self._file.descriptor, parts, self.written)

    def close(self) -> None:
        if self.is_inherited:
            return
        with store_errors(self._operation):
            self._file.commit(self.written)
        self._open = False

    def abort(self) -> None:
        if self.is_inherited:
            return
        if self._open:
            self._open = False
            self._file.abort()


class MemfdSink(DescriptorSink, ProcessBound):
    """A sink that writes to a memfd. Closing it seals the memfd and passes the finished segment to `finished`."""

    def __init__(self, name: str, finished: Callable[[Segment], object]) -> None:
        self._name = name
        self._finished = finished
        operation = f"shared memory for {name}"
        with store_errors(operation):
            descriptor = create_memfd(name)
        super().__init__(descriptor, operation)
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
        with store_errors(self.operation):
            seal(self.descriptor, Backing.SEALED)
            readable = reopen_read_only(self.descriptor)
        self._finished(Segment(readable, self._name, Backing.SEALED))
        super().close()


class TensorSegment:
    """A copy of tensor messages in a sealed memfd, in the format of `write_tensor`: buffers are aligned to 64 bytes.

    Its read-only `descriptor` is closed when the segment is no longer referenced. Raises StoreError if there is no
    memory for it.
    """

    backing = Backing.SEALED

    def __init__(self, name: str, messages: Sequence[SplitMessage]) -> None:
        parts, bodies, end = [], [], 0
        for message in messages:
            head = encapsulate(message.header)  # its length is a multiple of 64
            parts += [bytes(-end % ALIGNMENT), head, *(message.body or ())]
            bodies.append(end + -end % ALIGNMENT + len(head))
            end = bodies[-1] + message.parsed.body_length
        self.descriptor = sealed_memfd(name, lambda writable: write_parts(writable, parts, 0))
        weakref.finalize(self, os.close, self.descriptor)
        memory = map_read_only(self.descriptor, end)
        # The region has the addresses of this process: peers that fetch over a network use these.
        self.region = Region(memory.address, memory)
        #: The address and the length of each buffer, by message.
        self.addresses = [
            [
                (self.region.base + body_at + offset, length)
                for offset, length in zip(*buffer_extents(message.header, message.parsed), strict=True)
            ]
            for message, body_at in zip(messages, bodies, strict=True)
        ]

    def wait(self, until: int) -> None:
        """Return at once, since all of the segment is written. See `SharedSegment.wait`."""
