"""Writers of record batches with a common interface, for streams, files and transports."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import numpy as np
import pyarrow as pa

from dissociated.base.buffers import Buffer
from dissociated.codec.options import WriteOptions
from dissociated.codec.packing import raw_size
from dissociated.codec.sink import Sink, open_sink
from dissociated.codec.split import FileSplitter, Metadata, SplitMessage, Splitter
from dissociated.errors import FormatError, LocalProtocolError, OptionError
from dissociated.format.encapsulated import encapsulate, encode_footer, encode_magic, end_of_stream
from dissociated.format.footer import BLOCK, parse_footer
from dissociated.format.message import Header, HeaderType
from dissociated.protocol.message import Message
from dissociated.protocol.sender import Body, Sender
from dissociated.protocol.wire import BodyKind, Streams

#: The counters of a reader: num_messages, num_record_batches, num_dictionary_batches, num_dictionary_deltas,
#: num_replaced_dictionaries.
ReadStats: TypeAlias = pa.ipc.ReadStats


@dataclass(frozen=True)
class WriteStats:
    """The counters of `ReadStats`, and the size of bodies before and after encoding."""

    num_messages: int = 0
    num_record_batches: int = 0
    num_dictionary_batches: int = 0
    num_dictionary_deltas: int = 0
    num_replaced_dictionaries: int = 0
    #: Bytes of the original buffers.
    total_raw_body_size: int = 0
    #: Bytes of bodies as written, with padding and compression.
    total_serialized_body_size: int = 0


class RecordBatchWriter(ABC):
    """A writer of record batches of one schema.

    The schema is written at once, and `close` writes the end. Leaving the `with` closes the writer, or aborts it after
    an exception. A batch that cannot be encoded raises FormatError, and the writer can go on. If the messages cannot be
    written to their destination, the writer is aborted. Writing to a closed or aborted writer raises
    LocalProtocolError.
    """

    def __init__(self, splitter: Splitter) -> None:
        self._splitter = splitter
        self._open = True
        self._messages = self._batches = self._dictionaries = self._raw = self._serialized = 0
        self._emit([splitter.schema_message])

    @property
    def schema(self) -> pa.Schema:
        """The schema of every batch. The metadata of batches may differ."""
        return self._splitter.schema

    @property
    def stats(self) -> WriteStats:
        """Counters of the messages written so far."""
        splitter_stats = self._splitter.stats
        return WriteStats(
            num_messages=self._messages,
            num_record_batches=self._batches,
            num_dictionary_batches=self._dictionaries,
            num_dictionary_deltas=splitter_stats.num_dictionary_deltas,
            num_replaced_dictionaries=splitter_stats.num_replaced_dictionaries,
            total_raw_body_size=self._raw,
            total_serialized_body_size=self._serialized,
        )

    def write_batch(self, batch: pa.RecordBatch, custom_metadata: Metadata | None = None) -> None:
        """Write a batch, after the dictionaries that it needs. Raises FormatError and SourceError."""
        self._check_open()
        if not isinstance(batch, pa.RecordBatch):
            raise FormatError(f"a {type(batch).__name__} is not a record batch")
        self._emit(self._splitter.split(batch, custom_metadata))

    def write_table(self, table: pa.Table, max_chunksize: int | None = None) -> None:
        """Write a table in batches, which are its chunks.

        Args:
            table: The table to write.
            max_chunksize: The largest number of rows of a batch: larger chunks are cut. None and -1 mean no maximum.

        Raises:
            FormatError: The table cannot be written.
            SourceError: The table is invalid.
            OptionError: `max_chunksize` is not a number of rows.
        """
        self._check_open()
        if not isinstance(table, pa.Table):
            raise FormatError(f"a {type(table).__name__} is not a table")
        if max_chunksize == -1:
            max_chunksize = None
        if max_chunksize is not None and not (isinstance(max_chunksize, int) and max_chunksize > 0):
            raise OptionError(f"max_chunksize is {max_chunksize!r}; it must be 1 or more rows, or -1 for no maximum")
        for batch in table.to_batches(max_chunksize):
            self.write_batch(batch)

    def write(self, table_or_batch: pa.Table | pa.RecordBatch) -> None:
        """Write a table or a batch. See `write_table` and `write_batch`."""
        if isinstance(table_or_batch, pa.Table):
            self.write_table(table_or_batch)
        else:
            self.write_batch(table_or_batch)

    def close(self) -> None:
        """Write the end. Does nothing if called again or after `abort`. Raises StoreError."""
        if self._open:
            try:
                self._end()
            except BaseException:
                self.abort()
                raise
            self._open = False

    def abort(self) -> None:
        """Stop writing, without an end. Does nothing after `close`."""
        if self._open:
            self._open = False
            self._discard()

    @abstractmethod
    def _write_messages(self, messages: Sequence[SplitMessage]) -> None:
        """Write these messages to the destination."""

    @abstractmethod
    def _end(self) -> None:
        """Write the end to the destination, and close it."""

    @abstractmethod
    def _discard(self) -> None:
        """Release the destination without an end."""

    def _emit(self, messages: Sequence[SplitMessage]) -> None:
        try:
            self._write_messages(messages)
        except BaseException:
            self.abort()
            raise
        self._messages += len(messages)
        for header, parsed, body in messages:
            if parsed.type is HeaderType.RECORD_BATCH:
                self._batches += 1
                self._raw += raw_size(header, parsed, body or (), self._splitter.options.codec is not None)
                self._serialized += parsed.body_length
            elif parsed.type is HeaderType.DICTIONARY_BATCH:
                self._dictionaries += 1

    def _check_open(self) -> None:
        if not self._open:
            raise LocalProtocolError("this writer is closed: open another one to write more")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()


class EncapsulatedWriter(RecordBatchWriter):
    """A writer of encapsulated messages, padded so that each body is aligned in the sink.

    It owns the sink. `position` is the sink's initial position in bytes, and `preface` the bytes before the first
    message.
    """

    def __init__(self, sink: Sink, splitter: Splitter, position: int = 0, preface: bytes = b"") -> None:
        self._sink = sink
        self._position = position
        self._preface = preface
        super().__init__(splitter)

    def _write_messages(self, messages: Sequence[SplitMessage]) -> None:
        options = self._splitter.options
        parts, self._preface = [self._preface], b""
        at = self._position + len(parts[0])
        for header, parsed, body in messages:
            head = encapsulate(header, alignment=options.alignment, legacy=options.write_legacy_ipc_format, at=at)
            parts += [head, *(body or ())]
            self._placed(parsed, at, len(head))
            at += len(head) + parsed.body_length
        self._write(parts)

    def _write(self, parts: Sequence[Buffer]) -> None:
        self._sink.write(parts)
        self._position += sum(map(len, parts))

    def _placed(self, parsed: Header, at: int, head: int) -> None:
        """Record the position of a message, whose body follows `head` bytes later."""

    def _end(self) -> None:
        self._write([end_of_stream(self._splitter.options.write_legacy_ipc_format)])
        self._sink.close()

    def _discard(self) -> None:
        self._sink.abort()


class StreamWriter(EncapsulatedWriter):
    """A writer of an encapsulated stream to `sink`: a path, a binary file object, or a pyarrow.NativeFile.

    The file of a path is created or overwritten. A file object is written from its current position, flushed at the
    end, and stays open. An aborted stream has no end. Raises StoreError if the sink fails.

    Example:
        ```python
        from dissociated import ipc

        with ipc.StreamWriter("copy.arrows", table.schema) as writer:
            writer.write_table(table)
        ```
    """

    def __init__(self, sink: Any, schema: pa.Schema, options: WriteOptions | None = None) -> None:
        splitter = Splitter(schema, options)  # before the file is created, since this may raise
        super().__init__(open_sink(sink), splitter)


class FileWriter(EncapsulatedWriter):
    """A writer of an IPC file, whose batches can be read in any order. `metadata` goes into its footer.

    Sinks are those of StreamWriter. Positions in the footer count from the beginning of the sink, so a file can follow
    other data in it. An aborted file has no footer, and is not a valid file.

    Dictionaries cannot be replaced. With the option `unify_dictionaries`, each table gets a single dictionary per
    column.

    Example:
        ```python
        from dissociated import ipc

        with ipc.FileWriter("copy.arrow", table.schema, metadata={"source": "example"}) as writer:
            writer.write_table(table)
        ```
    """

    def __init__(
        self, sink: Any, schema: pa.Schema, options: WriteOptions | None = None, metadata: Metadata | None = None
    ) -> None:
        self._file = FileSplitter(schema, options, metadata)
        self._dictionary_blocks: list[tuple[int, int, int]] = []
        self._batch_blocks: list[tuple[int, int, int]] = []
        opened = open_sink(sink)
        super().__init__(opened, self._file, opened.position, encode_magic(opened.position))

    def write_table(self, table: pa.Table, max_chunksize: int | None = None) -> None:
        """Write a table: see `RecordBatchWriter.write_table`. Raises FormatError if dictionaries cannot be unified."""
        options = self._file.options
        if options.unify_dictionaries and isinstance(table, pa.Table):
            try:
                table = table.unify_dictionaries(options.memory_pool)
            except pa.ArrowException as error:
                raise FormatError(f"the dictionaries of this table cannot be unified: {error}") from None
        super().write_table(table, max_chunksize)

    def _placed(self, parsed: Header, at: int, head: int) -> None:
        block = (at, head, parsed.body_length)
        if parsed.type is HeaderType.DICTIONARY_BATCH:
            self._dictionary_blocks.append(block)
        elif parsed.type is HeaderType.RECORD_BATCH:
            self._batch_blocks.append(block)

    def _end(self) -> None:
        messages, written = self._file.finish()
        self._emit(messages)
        footer = bytearray(written)
        blocks = parse_footer(footer)  # libarrow's footer is right except for the positions of messages
        blocks.dictionaries[:] = np.array(self._dictionary_blocks, BLOCK)
        blocks.record_batches[:] = np.array(self._batch_blocks, BLOCK)
        self._write([end_of_stream(self._file.options.write_legacy_ipc_format), encode_footer(footer)])
        self._sink.close()


class DissociatedWriter(RecordBatchWriter):
    """A writer that passes the messages of a dissociated stream to `send`, in order, for a transport of your own.

    Each is a Message: untagged metadata; packed bodies with their tag; and the end of stream at `close`. The parts of a
    message are borrowed until `send` returns. `streams` selects the streams to send: for metadata and bodies on two
    connections, write the same batches to two writers.
    """

    def __init__(
        self,
        send: Callable[[Message], object],
        schema: pa.Schema,
        options: WriteOptions | None = None,
        streams: Streams = Streams.BOTH,
    ) -> None:
        self._send = send
        self._sender = Sender.before_request(streams)
        super().__init__(Splitter(schema, options))

    def _write_messages(self, messages: Sequence[SplitMessage]) -> None:
        for header, _, parts in messages:
            body = Body(BodyKind.PACKED, parts) if parts is not None else None
            for message in self._sender.send(header, body):
                self._send(message)

    def _end(self) -> None:
        for message in self._sender.end():
            self._send(message)

    def _discard(self) -> None: ...
