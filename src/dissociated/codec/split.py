"""Encoding of record batches to IPC messages whose body buffers are borrowed, not copied.

libarrow does all the encoding: it writes an IPC stream to a Python file, which receives every body buffer by reference.
Only buffers that libarrow must create (rebased offsets of a slice, compressed buffers) are new memory.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

import pyarrow as pa

from dissociated.base.buffers import Buffer
from dissociated.codec.nesting import contains
from dissociated.codec.options import WriteOptions, check_options
from dissociated.codec.packing import Packing
from dissociated.codec.validation import Validator
from dissociated.errors import FormatError, OptionError, SourceError
from dissociated.format.encapsulated import CONTINUATION, encapsulate, encode_footer, encode_magic
from dissociated.format.message import Header, parse_header

#: Metadata of a batch or of a file: a dict, or pyarrow's class.
Metadata: TypeAlias = "pa.KeyValueMetadata | Mapping[str | bytes, str | bytes]"
#: A record batch, and its metadata or None.
BatchAndMetadata: TypeAlias = "tuple[pa.RecordBatch, pa.KeyValueMetadata | None]"


_SMALL_BODY = 1 << 14  # bytes of the largest body of a small batch
_MIN_LARGE = 1 << 15  # bytes of the smallest large batch
_DEFAULT_OPTIONS = WriteOptions().to_pyarrow()  # without options, pyarrow looks into the environment for each writer
_BODY_ALIGNMENT = 64  # bytes; of the bodies of large batches
#: Size of the memory for small batches, in bytes. It is reused when less than the margin is free.
_BLOCK_SIZE, _BLOCK_MARGIN = 1 << 20, 1 << 16


class SplitMessage(NamedTuple):
    """An IPC message: its flatbuffer, the parsed header, and the packed body in parts, or None without a body."""

    header: bytes
    parsed: Header
    body: list[Buffer] | None


class _MessageSink:
    """A file for libarrow to write to, which takes the stream apart again by the lengths in it."""

    closed = False

    def __init__(self, magic: int = 0) -> None:
        self.messages: list[SplitMessage] = []
        self.tail = b""  # the bytes after the end of the stream
        self._magic = magic  # bytes before the stream
        self._header_next = 0  # length of the next flatbuffer, with padding
        self._body_left = 0
        #: consumes a piece that is neither marker, length, flatbuffer nor body
        self._skip_piece: Callable[[Buffer], None] | None = self._take_magic if magic else None

    def write(self, piece: Buffer) -> int:
        size = len(piece)
        if self._body_left:
            self.messages[-1].body.append(piece)  # type: ignore[union-attr]  # a message with a length has a body
            self._body_left -= size
        elif self._header_next:
            header = bytes(piece)
            parsed = parse_header(header)
            self.messages.append(SplitMessage(header, parsed, [] if parsed.has_body else None))
            if size == self._header_next:
                self._body_left = parsed.body_length
            else:
                self._skip_piece = self._take_padding
            self._header_next = 0
        elif self._skip_piece is not None:
            self._skip_piece(piece)
        elif piece != CONTINUATION:  # so it is the length of the metadata; 0 ends the stream
            self._header_next = int.from_bytes(piece, "little")
            if not self._header_next:
                self._skip_piece = self._take_tail
        return size

    def _take_magic(self, piece: Buffer) -> None:
        self._magic -= len(piece)
        if not self._magic:
            self._skip_piece = None

    def _take_padding(self, piece: Buffer) -> None:
        self._skip_piece = None
        self._body_left = self.messages[-1].parsed.body_length

    def _take_tail(self, piece: Buffer) -> None:
        self.tail += piece

    def take(self) -> list[SplitMessage]:
        """Return the messages written since the last call."""
        messages, self.messages = self.messages, []
        return messages

    def flush(self) -> None: ...

    def close(self) -> None:
        self.closed = True

    def readable(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False


class Splitter:
    """An encoder of the record batches of one stream, in order.

    Raises:
        FormatError: A field nests deeper than `options` allow, or a batch cannot be written. The next batch still can.
    """

    def __init__(self, schema: pa.Schema, options: WriteOptions | None = None) -> None:
        self.schema = schema
        self.options = check_options(options, WriteOptions)
        self.options.check_depth(schema)
        self._validator = Validator(schema)
        packing = Packing(self.options)
        self._pack = packing.pack if packing.needed else None
        ipc_options = self.options.to_pyarrow()
        # libarrow writes the schema together with the first batch. Receivers should not have to wait for that batch, so
        # another writer, which is closed at once, writes an equal message now.
        eager = _MessageSink()
        try:
            pa.ipc.new_stream(pa.PythonFile(eager, mode="w"), schema, options=ipc_options).close()
            self._sink, self._writer = self._open(ipc_options)
        except pa.ArrowException as error:
            raise _unwritable(error) from None
        #: The first message of the stream.
        self.schema_message = eager.take()[0]
        self._schema_written = False

    def _open(self, ipc_options: pa.ipc.IpcWriteOptions) -> tuple[_MessageSink, Any]:
        sink = _MessageSink()
        return sink, pa.ipc.new_stream(pa.PythonFile(sink, mode="w"), self.schema, options=ipc_options)

    @property
    def stats(self) -> pa.ipc.WriteStats:
        """The counters of written messages in libarrow."""
        return self._writer.stats

    def split(self, batch: pa.RecordBatch, metadata: Metadata | None = None) -> list[SplitMessage]:
        """Return the messages of `batch`: dictionaries of it that are new or changed, then the batch.

        Raises:
            SourceError: Lengths and offsets of the batch contradict each other. libarrow would abort the process.
            OptionError: There is metadata, and the metadata version is V4. libarrow could not read its own message.
            FormatError: libarrow cannot write the batch.
        """
        if metadata and self.options.metadata_version is pa.ipc.MetadataVersion.V4:
            raise OptionError("custom metadata of a batch needs metadata version V5")
        batch = self._validator.check(batch)
        try:
            self._writer.write_batch(batch, custom_metadata=metadata)
        except pa.ArrowException as error:
            raise _unwritable(error) from None
        return self._take()

    def _take(self) -> list[SplitMessage]:
        messages = self._sink.take()
        if not self._schema_written:
            del messages[0]
            self._schema_written = True
        if self._pack is None:
            return messages
        return [SplitMessage(*self._pack(header, parsed, body or [])) for header, parsed, body in messages]


class LargeBatch:
    """A large record batch of a stream, to be encoded into memory of the caller."""

    def __init__(self, splitter: _StreamSplitter, batch: pa.RecordBatch, size: int) -> None:
        self._splitter, self._batch = splitter, batch
        #: Bytes of memory that encoding the batch takes.
        self.size = size

    def encode(self, memory: Buffer) -> tuple[SplitMessage, int]:
        """Encode the batch into `memory`, which has `size` bytes. The batches of a stream are encoded in order.

        Returns:
            The message, whose body is a part of `memory`, and the position of its body in `memory`.

        Raises:
            SourceError: Another thread has changed the batch, so that it does not fit into `memory`.
            FormatError: libarrow cannot write the batch.
        """
        return self._splitter.encode_large(self._batch, memory)


class _StreamSplitter(Splitter):
    """A Splitter that encodes a batch after a small batch in one piece: copying takes less time than taking apart.

    A separate writer writes such batches to memory that is reused, so `stats` does not count them.
    """

    def __init__(self, schema: pa.Schema, options: WriteOptions | None = None) -> None:
        super().__init__(schema, options)
        self._begin = len(encapsulate(self.schema_message.header))  # position of the first batch in that memory
        dictionaries = any(contains(type_, pa.types.is_dictionary) for type_ in schema.types)
        self._plain = self.options == WriteOptions() and not dictionaries and self._begin <= _BLOCK_MARGIN
        self._small = -1  # the most rows of a batch that is expected to be small
        self._last: tuple[bytes, bytes, Header] = b"", b"", self.schema_message.parsed  # head, flatbuffer, header
        self._memory: pa.Buffer | None = None
        self._at = _BLOCK_SIZE  # position of the next batch

    def split(self, batch: pa.RecordBatch, metadata: Metadata | None = None) -> list[SplitMessage]:
        if metadata is None and batch.num_rows <= self._small and batch.schema.equals(self.schema):
            messages = [self._encoded(self._validator.check(batch))]
        else:
            messages = super().split(batch, metadata)
        if self._plain:
            self._small = 2 * batch.num_rows if messages[-1].parsed.body_length <= _SMALL_BODY else -1
        return messages

    def _encoded(self, batch: pa.RecordBatch) -> SplitMessage:
        if self._at > _BLOCK_SIZE - _BLOCK_MARGIN:
            self._restart()
        try:
            self._block.write_batch(batch)
        except (pa.ArrowException, OSError):  # libarrow's IOError arrives as an OSError
            self._at = _BLOCK_SIZE
            return super().split(batch)[-1]  # the batch is not small, or this call raises
        head, header, parsed = self._last
        end = self._at + len(head) + parsed.body_length
        whole = bytes(self._view[self._at : end])
        if not head or not whole.startswith(head):  # small batches often have equal heads
            head, header, parsed = self._last = _parse_head(self._view[self._at :])
            end = self._at + len(head) + parsed.body_length
            whole = bytes(self._view[self._at : end])
        self._at = end
        return SplitMessage(header, parsed, [whole[len(head) :]])

    def large(self, batch: pa.RecordBatch) -> LargeBatch | None:
        """Return `batch` to be encoded by the caller, or None if it is small, or if `split` must encode it."""
        if not self._plain or batch.num_rows <= self._small or not batch.schema.equals(self.schema):
            return None
        batch = self._validator.check(batch)
        try:
            size = pa.ipc.get_record_batch_size(batch)
        except pa.ArrowException:
            return None  # `split` raises the error
        if size - len(self._last[0]) < _MIN_LARGE:  # most batches have a head of the last one's length
            return None
        return LargeBatch(self, batch, self._begin + size + _BODY_ALIGNMENT)

    def encode_large(self, batch: pa.RecordBatch, memory: Buffer) -> tuple[SplitMessage, int]:
        """Encode a batch: see `LargeBatch.encode`."""
        head, header, parsed = self._last
        at = -(self._begin + len(head)) % _BODY_ALIGNMENT  # most heads have the length of the last one
        target = memoryview(memory)[at:]
        try:
            # libarrow writes the schema, too. A writer for several batches could exceed the memory of one.
            sink = pa.FixedSizeBufferWriter(pa.py_buffer(target))
            pa.ipc.new_stream(sink, self.schema, options=_DEFAULT_OPTIONS).write_batch(batch)
        except pa.ArrowException as error:
            raise _unwritable(error) from None
        except OSError as error:
            raise SourceError(f"a record batch was changed while it was written: {error}") from None
        whole = target[self._begin :]
        if not head or bytes(whole[: len(head)]) != head:  # comparing a memoryview takes longer
            head, header, parsed = self._last = _parse_head(whole)
        body = whole[len(head) : len(head) + parsed.body_length]
        return SplitMessage(header, parsed, [body]), at + self._begin + len(head)

    def _restart(self) -> None:
        if self._memory is None:
            self._memory = pa.allocate_buffer(_BLOCK_SIZE)
            self._view = memoryview(self._memory).cast("B")
        self._block = pa.ipc.new_stream(pa.FixedSizeBufferWriter(self._memory), self.schema, options=_DEFAULT_OPTIONS)
        self._at = self._begin


def _parse_head(message: memoryview) -> tuple[bytes, bytes, Header]:
    """Return the bytes of an encapsulated message before its body, its flatbuffer, and its parsed header."""
    head = bytes(message[: 8 + int.from_bytes(message[4:8], "little")])
    header = head[8:]
    return head, header, parse_header(header)


class FileSplitter(Splitter):
    """An encoder of the record batches of a file, which cannot replace dictionaries and ends with a footer."""

    def __init__(
        self, schema: pa.Schema, options: WriteOptions | None = None, metadata: Metadata | None = None
    ) -> None:
        self._metadata = metadata
        super().__init__(schema, options)

    def _open(self, ipc_options: pa.ipc.IpcWriteOptions) -> tuple[_MessageSink, Any]:
        sink = _MessageSink(magic=len(encode_magic()))
        file = pa.PythonFile(sink, mode="w")
        return sink, pa.ipc.new_file(file, self.schema, options=ipc_options, metadata=self._metadata)

    def finish(self) -> tuple[list[SplitMessage], bytes]:
        """End the file.

        Returns:
            The remaining messages, and the flatbuffer of the footer, whose blocks have positions of libarrow's own
            layout. There are messages if a batch could not be written after some of its dictionaries.
        """
        try:
            self._writer.close()
        except pa.ArrowException as error:
            raise _unwritable(error) from None
        return self._take(), self._sink.tail[: -len(encode_footer(b""))]


def _unwritable(error: pa.ArrowException) -> FormatError:
    advice = ""
    if "Dictionary replacement" in str(error):
        advice = (
            " If dictionaries only grow, emit_dictionary_deltas helps; if the whole table is in memory, "
            "unify_dictionaries and write_table."
        )
    return FormatError(f"cannot write this as Arrow IPC: {error}{advice}")


def split(reader: pa.RecordBatchReader, options: WriteOptions | None = None) -> Iterator[SplitMessage]:
    """Yield every message of the stream of `reader`, schema first."""
    splitter = _StreamSplitter(reader.schema, options)
    yield splitter.schema_message
    for batch, metadata in batches(reader):
        yield from splitter.split(batch, metadata)


def split_small(
    reader: pa.RecordBatchReader, options: WriteOptions | None = None
) -> Iterator[SplitMessage | LargeBatch]:
    """Yield the messages of `split`, but some large batches before they are encoded."""
    splitter = _StreamSplitter(reader.schema, options)
    yield splitter.schema_message
    for batch, metadata in batches(reader):
        large = splitter.large(batch) if metadata is None else None
        if large is not None:
            yield large
        else:
            yield from splitter.split(batch, metadata)


def batches(reader: pa.RecordBatchReader) -> Generator[BatchAndMetadata, None, None]:
    """Yield each batch of `reader` with its metadata."""
    if not isinstance(reader, pa.ipc.RecordBatchStreamReader):  # other readers have no metadata of batches
        for batch in reader:
            yield batch, None
        return
    with suppress(StopIteration):
        while True:
            yield reader.read_next_batch_with_custom_metadata()
