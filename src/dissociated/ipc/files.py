"""Blocking readers of IPC streams and files ("IPC Streaming Format", "IPC File Format").

libarrow decodes the batches. This module parses the footer as well: with the positions of the batches it can count rows
and load metadata ahead without reading a body.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import pyarrow as pa

from dissociated.codec.options import ReadOptions, check_options
from dissociated.codec.reader import StreamReader, arrow_errors
from dissociated.codec.writer import ReadStats
from dissociated.errors import FormatError, OptionError, RemoteProtocolError, StoreError
from dissociated.format.encapsulated import CONTINUATION, FILE_MAGIC, FOOTER_TAIL
from dissociated.format.footer import Footer, parse_footer
from dissociated.format.message import MISREAD, HeaderType, is_before_v5, is_misread, parse_header, row_count
from dissociated.ipc.opening import random_access, sequential
from dissociated.ipc.raw_files import file_errors
from dissociated.ipc.source import ByteRange, Prefetched, RandomAccess, coalesced


class FileReader:
    """A reader of the record batches of an IPC file, in any order, made by `open_file`.

    Batches of a mapped file or a buffer refer to its memory without a copy, and stay valid after `close`. Several
    threads may use one reader. Close it after all of them are done.

    Reading raises FormatError if the content is invalid, StoreError if it cannot be read or the reader is closed, and
    OptionError if the file does not have the requested batch.
    """

    def __init__(self, source: RandomAccess, footer_offset: int | None, options: ReadOptions) -> None:
        if footer_offset is not None and not 0 < footer_offset <= source.size:
            raise OptionError(
                f"footer_offset is {footer_offset!r}; it must be the end of the Arrow file, from 1 to {source.size}"
            )
        self._source = source
        self._end = footer_offset or source.size
        self._options = options
        self._lock = threading.Lock()  # libarrow's reader is not thread-safe
        self._is_old: bool | None = None  # whether the metadata is older than V5; the footer does not tell
        self._dictionaries_checked = False
        with arrow_errors(FormatError):
            self._reader: Any = pa.ipc.RecordBatchFileReader(
                source.native(), footer_offset, options=options.to_pyarrow(), memory_pool=options.memory_pool
            )
        #: The schema of the batches, with the included fields only.
        self.schema: pa.Schema = self._reader.schema
        self.num_record_batches: int = self._reader.num_record_batches
        options.check_depth(self.schema)

    @property
    def version(self) -> pa.ipc.MetadataVersion:
        """The metadata version in the footer. Raises FormatError if it is unknown."""
        try:
            return pa.ipc.MetadataVersion(self.footer.version)
        except ValueError:
            raise FormatError(
                f"the footer of the Arrow IPC file has the unknown version {self.footer.version}"
            ) from None

    @property
    def metadata(self) -> dict[bytes, bytes] | None:
        """The custom metadata of the footer; None if it has none."""
        metadata: dict[bytes, bytes] | None = self._native().metadata
        return metadata

    @property
    def stats(self) -> ReadStats:
        """The counts of messages that were read so far."""
        return self._native().stats

    @cached_property
    def footer(self) -> Footer:
        """The positions of dictionaries and record batches.

        Raises FormatError if the footer is damaged, or has changed since the file was opened.
        """
        end = self._end - FOOTER_TAIL
        length = int.from_bytes(self._source.read(end, 4), "little")
        footer = parse_footer(self._source.read(max(end - length, 0), length).to_pybytes())
        if len(footer.record_batches) != self.num_record_batches:
            raise FormatError("the footer of the Arrow IPC file has changed since it was opened")
        return footer

    def get_batch(self, i: int) -> pa.RecordBatch:
        """Return batch number `i`, counted from 0."""
        return self.get_batch_with_custom_metadata(i)[0]

    def get_batch_with_custom_metadata(self, i: int) -> tuple[pa.RecordBatch, pa.KeyValueMetadata | None]:
        """Return batch number `i`, counted from 0, and the custom metadata of its message."""
        self._check((i,))
        return self._decode(i, None)

    def read_together(self, indices: Sequence[int]) -> Iterator[tuple[pa.RecordBatch, pa.KeyValueMetadata | None]]:
        """Read several batches with one read, from the beginning of the first to the end of the last.

        If only some fields are included, each batch is read on its own, without the other fields. Other threads can
        decode during the read.

        Args:
            indices: The numbers of the batches, counted from 0.

        Yields:
            Pairs of a batch and the custom metadata of its message.
        """
        self._check(indices)
        self._native()
        piece = None
        if indices and not self._options.included_fields:
            spans = [self._span(index) for index in indices]
            piece = self._source.fetch(min(start for start, _ in spans), max(end for _, end in spans))
        for index in indices:
            yield self._decode(index, piece)

    def count_rows(self) -> int:
        """Return the number of rows of all batches. Only metadata is read, no bodies."""
        self._native()
        blocks = self.footer.record_batches
        return sum(map(self._rows, blocks["offset"].tolist(), blocks["metadata_length"].tolist()))

    def pre_buffer_metadata(self, indices: Sequence[int] | None = None) -> None:
        """Begin to load all dictionaries, and the metadata of batches, before `get_batch` needs them.

        A background thread reads them, and the reader keeps them until `close`. The option `pre_buffer_cache_options`
        limits how neighbours are read together. For a mapped file, the kernel is asked to load the pages.

        Args:
            indices: The numbers of the batches; by default all.
        """
        self._check(indices or ())
        self._native()
        blocks, dictionaries = self.footer.record_batches, self.footer.dictionaries
        if indices:
            blocks = blocks[[*indices]]
        starts, ends = blocks["offset"], blocks["offset"] + blocks["metadata_length"]
        spans = [*zip(starts.tolist(), ends.tolist(), strict=True)]
        starts = dictionaries["offset"]
        ends = starts + dictionaries["metadata_length"] + dictionaries["body_length"]
        spans += zip(starts.tolist(), ends.tolist(), strict=True)
        self._source.load(coalesced(spans, self._options.pre_buffer_cache_options or pa.CacheOptions()))

    def to_record_batches(self) -> list[pa.RecordBatch]:
        """Return all batches."""
        return list(self)

    def to_table(self) -> pa.Table:
        """Return all batches as one table."""
        return pa.Table.from_batches(self, self.schema)

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return map(self.get_batch, range(self.num_record_batches))

    def close(self) -> None:
        """Close the file. Batches that were read stay valid. A file object of the caller stays open."""
        with self._lock:
            self._reader = None
        self._source.close()

    def _decode(self, index: int, piece: Prefetched | None) -> tuple[pa.RecordBatch, pa.KeyValueMetadata | None]:
        """Decode a batch. Raise FormatError if libarrow would misread the batch or a dictionary."""
        with arrow_errors(FormatError), self._lock, self._source.offer(piece):
            reader = self._native()
            if self._is_old is not False:
                self._refuse_misread(index)
            both: tuple[pa.RecordBatch, pa.KeyValueMetadata | None] = reader.get_batch_with_custom_metadata(index)
            return both

    def _refuse_misread(self, index: int) -> None:
        """Raise FormatError if libarrow would misread the batch. The version of the first one read is that of all."""
        blocks = self.footer.record_batches[index : index + 1].tolist()
        if self._is_old is None:
            start, length, _ = blocks[0]
            with suppress(struct.error, IndexError):  # libarrow reports the damage
                self._is_old = is_before_v5(self._header(start, length))
            if not self._is_old:
                return
        if not self._dictionaries_checked:  # libarrow reads all dictionaries with the first batch
            blocks += self.footer.dictionaries.tolist()
        if any(is_misread(self._header(start, length)) for start, length, _ in blocks):
            raise FormatError(MISREAD)
        self._dictionaries_checked = True

    def _native(self) -> Any:
        if self._reader is None:
            raise StoreError("this reader of an Arrow IPC file is closed")
        return self._reader

    def _check(self, indices: Sequence[int]) -> None:
        for index in indices:
            if not 0 <= index < self.num_record_batches:
                raise OptionError(
                    f"record batch {index} does not exist: the file has {self.num_record_batches}, from 0 on"
                )

    def _span(self, index: int) -> ByteRange:
        start, metadata_length, body_length = self.footer.record_batches[index].tolist()
        return start, start + metadata_length + body_length

    def _header(self, offset: int, metadata_length: int) -> bytes:
        """Return the flatbuffer of the message at `offset`."""
        encapsulated: bytes = self._source.read(offset, metadata_length).to_pybytes()
        return encapsulated[8:] if encapsulated.startswith(CONTINUATION) else encapsulated[4:]

    def _rows(self, offset: int, metadata_length: int) -> int:
        header = self._header(offset, metadata_length)
        try:
            rows = row_count(header)
            if rows > 0 or (rows == 0 and parse_header(header).type is HeaderType.RECORD_BATCH):
                return rows
        except RemoteProtocolError:
            pass
        raise FormatError(f"the footer of the Arrow IPC file lists a record batch at byte {offset}, and none is there")

    def __enter__(self) -> FileReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_file(
    source: Any, *, footer_offset: int | None = None, memory_map: bool = True, options: ReadOptions | None = None
) -> FileReader:
    """Open an IPC file.

    Args:
        source: A path, a buffer, a pyarrow.NativeFile, or a binary file object that can seek. The caller closes a file
            object. Any data may precede the Arrow file; offsets in the footer count from the start of `source`.
        footer_offset: The position at which the Arrow file ends, if other data follows it.
        memory_map: Whether to map the file at a path. Otherwise pieces are read when they are needed. A mapped file
            must not be shrunk while it is mapped.
        options: Options of reading.

    Returns:
        The reader, to be closed by the caller.

    Raises:
        FormatError: The source is no Arrow IPC file, is damaged, or nests deeper than `options` allow.
        StoreError: The source cannot be opened or read.
        OptionError: An argument is invalid.

    Example:
        ```python
        from dissociated import ipc

        with ipc.open_file("flights.arrow") as reader:
            print(reader.num_record_batches, reader.count_rows())
            batch = reader.get_batch(0)
        ```
    """
    options = check_options(options, ReadOptions)
    opened = random_access(source, memory_map, options.memory_pool)
    try:
        return FileReader(opened, footer_offset, options)
    except BaseException:
        opened.close()
        raise


def open_stream(source: Any, *, memory_map: bool = True, options: ReadOptions | None = None) -> StreamReader:
    """Open an IPC stream.

    Args:
        source: A source of `open_file`, or a file object that cannot seek. A file object is read from its current
            position, and no further than the end of the stream. The caller closes it.
        memory_map: See `open_file`.
        options: Options of reading.

    Returns:
        The reader. Opening and reading raise the errors of `open_file`.

    Example:
        ```python
        from dissociated import ipc

        with ipc.open_stream("flights.arrows") as reader:
            for batch in reader:
                print(batch.num_rows)
        ```
    """
    options = check_options(options, ReadOptions)
    return StreamReader(sequential(source, memory_map, options.memory_pool), options)


def open_either(
    source: Any, *, footer_offset: int | None = None, memory_map: bool = True, options: ReadOptions | None = None
) -> FileReader | StreamReader:
    """Open an IPC file or stream.

    The source is a file if it begins or ends with the magic of a file. If it begins with the marker of a message, it is
    a stream. Arguments and errors are the ones of `open_file`.
    """
    if footer_offset is None and not _is_file(source):
        return open_stream(source, memory_map=memory_map, options=options)
    return open_file(source, footer_offset=footer_offset, memory_map=memory_map, options=options)


def _is_file(source: Any) -> bool:
    if isinstance(source, str | os.PathLike) and os.path.exists(source) and not os.path.isfile(source):
        return False
    at = 0
    if is_object := hasattr(source, "read"):
        with file_errors(source):
            if not source.seekable():
                return False
            at = source.tell()
    opened = random_access(source, False, None)
    try:
        first = opened.read(at, len(FILE_MAGIC)).to_pybytes()
        last = opened.read(max(opened.size - len(FILE_MAGIC), 0), len(FILE_MAGIC)).to_pybytes()
    finally:
        opened.close()
        if is_object:
            source.seek(at)
    return first == FILE_MAGIC or (last == FILE_MAGIC and not first.startswith(CONTINUATION))
