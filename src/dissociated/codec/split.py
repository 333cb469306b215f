"""Record batches into IPC messages whose body buffers are borrowed, not copied.

libarrow does all the encoding: it writes an IPC stream into a Python sink, which receives every body buffer by
reference. Only what libarrow itself must allocate (rebased offsets of a slice, compressed buffers) is new memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

import pyarrow as pa

from dissociated.base.buffers import Buffer
from dissociated.codec.nesting import contains
from dissociated.codec.options import WriteOptions, check_options
from dissociated.codec.packing import Packing
from dissociated.codec.validation import Validator
from dissociated.errors import FormatError, OptionError
from dissociated.format.encapsulated import CONTINUATION, encapsulate, encode_footer, encode_magic
from dissociated.format.message import Header, parse_header

#: Of a batch or of a file: a dict, or what pyarrow gives.
Metadata: TypeAlias = "pa.KeyValueMetadata | Mapping[str | bytes, str | bytes]"
#: A record batch and its metadata, None without any.
BatchAndMetadata: TypeAlias = "tuple[pa.RecordBatch, pa.KeyValueMetadata | None]"


_SMALL_BODY = 1 << 14  # bytes of a body
#: Small batches are written to memory of so many bytes. It is begun anew when fewer than the margin are left.
_BLOCK_SIZE, _BLOCK_MARGIN = 1 << 20, 1 << 16


class SplitMessage(NamedTuple):
    """One IPC message: the flatbuffer, what pairing needs from it, and the packed body in parts, None without one."""

    header: bytes
    parsed: Header
    body: list[Buffer] | None


class _MessageSink:
    """The file that libarrow writes to. Takes the stream apart again by the lengths that it announces."""

    closed = False

    def __init__(self, magic: int = 0) -> None:
        self.messages: list[SplitMessage] = []
        self.tail = b""  # what came after the end of the stream
        self._magic = magic  # how many bytes come before the stream
        self._header_next = 0  # its length, with padding
        self._body_left = 0
        #: takes what is neither marker, length, flatbuffer nor body
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
        """The messages written since the last call."""
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
    """Encodes record batches of one stream, one after the other.

    Raises FormatError where a field nests deeper than `options` allow, and for batches that cannot be written: the
    next one still can.
    """

    def __init__(self, schema: pa.Schema, options: WriteOptions | None = None) -> None:
        self.schema = schema
        self.options = check_options(options, WriteOptions)
        self.options.check_depth(schema)
        self._validator = Validator(schema)
        packing = Packing(self.options)
        self._pack = packing.pack if packing.needed else None
        ipc_options = self.options.to_pyarrow()
        # libarrow writes the schema together with the first batch. A receiver should not have to wait for that:
        # a writer of its own, closed at once, gives the very same message now.
        eager = _MessageSink()
        try:
            pa.ipc.new_stream(pa.PythonFile(eager, mode="w"), schema, options=ipc_options).close()
            self._sink, self._writer = self._open(ipc_options)
        except pa.ArrowException as error:
            raise _unwritable(error) from None
        self._schema_message = eager.take()[0]
        self._schema_written = False

    def _open(self, ipc_options: pa.ipc.IpcWriteOptions) -> tuple[_MessageSink, Any]:
        sink = _MessageSink()
        return sink, pa.ipc.new_stream(pa.PythonFile(sink, mode="w"), self.schema, options=ipc_options)

    @property
    def schema_message(self) -> SplitMessage:
        """The first message of the stream."""
        return self._schema_message

    @property
    def stats(self) -> pa.ipc.WriteStats:
        """What libarrow has counted."""
        return self._writer.stats

    def split(self, batch: pa.RecordBatch, metadata: Metadata | None = None) -> list[SplitMessage]:
        """The messages of `batch`: the dictionaries that it needs and are new or changed, then the batch.

        Raises SourceError for a batch whose lengths and offsets contradict each other: on those libarrow would abort.
        Raises OptionError for metadata with metadata version V4, which libarrow would write and could not read.
        """
        if metadata and self.options.metadata_version is pa.ipc.MetadataVersion.V4:
            raise OptionError("libarrow reads custom metadata of a batch with metadata version V5 only")
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


class _StreamSplitter(Splitter):
    """A Splitter that encodes a batch in one piece where it follows a small one: copying costs less than taking apart.

    A writer of their own writes such batches, to memory that is used again and again. So `stats` does not count them.
    """

    def __init__(self, schema: pa.Schema, options: WriteOptions | None = None) -> None:
        super().__init__(schema, options)
        self._begin = len(encapsulate(self._schema_message.header))  # of the first batch in that memory
        dictionaries = any(contains(type_, pa.types.is_dictionary) for type_ in schema.types)
        self._plain = self.options == WriteOptions() and not dictionaries and self._begin <= _BLOCK_MARGIN
        self._small = -1  # rows of a batch that is taken for a small one
        self._last: tuple[bytes, bytes, Header] = b"", b"", self._schema_message.parsed  # with what stands before it
        self._memory: pa.Buffer | None = None
        self._at = _BLOCK_SIZE  # where the next batch goes

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
            return super().split(batch)[-1]  # it is no small one, or this says what is wrong with it
        head, header, parsed = self._last
        end = self._at + len(head) + parsed.body_length
        whole = bytes(self._view[self._at : end])
        if not head or not whole.startswith(head):  # most often they are the same
            length = int.from_bytes(self._view[self._at + 4 : self._at + 8], "little")
            head = bytes(self._view[self._at : self._at + 8 + length])
            header = head[8:]
            parsed = parse_header(header)
            self._last = head, header, parsed
            end = self._at + len(head) + parsed.body_length
            whole = bytes(self._view[self._at : end])
        self._at = end
        return SplitMessage(header, parsed, [whole[len(head) :]])

    def _restart(self) -> None:
        if self._memory is None:
            self._memory = pa.allocate_buffer(_BLOCK_SIZE)
            self._view = memoryview(self._memory).cast("B")
        self._block = pa.ipc.new_stream(pa.FixedSizeBufferWriter(self._memory), self.schema)
        self._at = self._begin


class FileSplitter(Splitter):
    """Encodes the record batches of a file. It may not replace a dictionary, and ends in a footer."""

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
        """What is left to write, and the flatbuffer of the footer, whose blocks are those of libarrow's own layout.

        There are messages left where a batch had dictionaries before the one that could not be written.
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
            " Where dictionaries only grow, emit_dictionary_deltas helps; where the whole table is at hand, "
            "unify_dictionaries and write_table."
        )
    return FormatError(f"this cannot be written as Arrow IPC: {error}{advice}")


def split(reader: pa.RecordBatchReader, options: WriteOptions | None = None) -> Iterator[SplitMessage]:
    """Every message of the stream that `reader` gives, schema first."""
    splitter = _StreamSplitter(reader.schema, options)
    yield splitter.schema_message
    for batch, metadata in batches(reader):
        yield from splitter.split(batch, metadata)


def batches(reader: pa.RecordBatchReader) -> Iterator[BatchAndMetadata]:
    """What `reader` gives, each batch with its metadata."""
    if not isinstance(reader, pa.ipc.RecordBatchStreamReader):  # only those know metadata of single batches
        for batch in reader:
            yield batch, None
        return
    with suppress(StopIteration):
        while True:
            yield reader.read_next_batch_with_custom_metadata()
