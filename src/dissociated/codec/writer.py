"""Writers of record batches: one shape, wherever the messages go."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa

from dissociated.base.buffers import Buffer
from dissociated.codec.options import WriteOptions
from dissociated.codec.packing import raw_size
from dissociated.codec.sink import Sink, open_sink
from dissociated.codec.split import FileSplitter, Metadata, SplitMessage, Splitter
from dissociated.codec.stats import WriteStats
from dissociated.errors import FormatError, LocalProtocolError, OptionError
from dissociated.format.encapsulated import encapsulate, encode_footer, encode_magic, end_of_stream
from dissociated.format.footer import BLOCK, parse_footer
from dissociated.format.message import Header, HeaderType
from dissociated.protocol.events import Streams
from dissociated.protocol.message import Message
from dissociated.protocol.sender import Body, Sender
from dissociated.protocol.tags import BodyKind


class RecordBatchWriter(ABC):
    """Writes the record batches of one schema.

    The schema is written at once. `close` writes the end; so does leaving the `with`, unless by an exception, which
    is an `abort`. A batch that cannot be written raises FormatError and the writer goes on; where the messages cannot
    go anywhere, it is aborted. Whatever is closed or aborted raises LocalProtocolError when it is told to write.
    """

    def __init__(self, splitter: Splitter) -> None:
        self._splitter = splitter
        self._open = True
        self._messages = self._batches = self._dictionaries = self._raw = self._serialized = 0
        self._emit([splitter.schema_message])

    @property
    def schema(self) -> pa.Schema:
        """What every batch must have; its metadata may differ."""
        return self._splitter.schema

    @property
    def stats(self) -> WriteStats:
        """What has been written so far."""
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
        """Write a batch, and before it the dictionaries that it needs. Raises FormatError and SourceError."""
        self._check_open()
        if not isinstance(batch, pa.RecordBatch):
            raise FormatError(f"a {type(batch).__name__} is no record batch")
        self._emit(self._splitter.split(batch, custom_metadata))

    def write_table(self, table: pa.Table, max_chunksize: int | None = None) -> None:
        """Write a table in batches: its chunks, those of more than `max_chunksize` rows in pieces.

        None and -1 are no maximum. Raises FormatError and SourceError, and OptionError for a `max_chunksize` that is no
        number of rows.
        """
        self._check_open()
        if not isinstance(table, pa.Table):
            raise FormatError(f"a {type(table).__name__} is no table")
        if max_chunksize == -1:
            max_chunksize = None
        if max_chunksize is not None and not (isinstance(max_chunksize, int) and max_chunksize > 0):
            raise OptionError(f"max_chunksize is a number of rows, 1 or more, not {max_chunksize!r}; -1 is no maximum")
        for batch in table.to_batches(max_chunksize):
            self.write_batch(batch)

    def write(self, table_or_batch: pa.Table | pa.RecordBatch) -> None:
        """Write a table or a batch. Raises as `write_table` and `write_batch` do."""
        if isinstance(table_or_batch, pa.Table):
            self.write_table(table_or_batch)
        else:
            self.write_batch(table_or_batch)

    def close(self) -> None:
        """Write the end. Does nothing after the first time, nor after `abort`. Raises StoreError."""
        if self._open:
            try:
                self._end()
            except BaseException:
                self.abort()
                raise
            self._open = False

    def abort(self) -> None:
        """Write no more, not even an end. Does nothing after `close`."""
        if self._open:
            self._open = False
            self._discard()

    @abstractmethod
    def _put(self, messages: Sequence[SplitMessage]) -> None:
        """Make these messages go where they should."""

    @abstractmethod
    def _end(self) -> None:
        """Say that this was all."""

    @abstractmethod
    def _discard(self) -> None:
        """Let go of everything."""

    def _emit(self, messages: Sequence[SplitMessage]) -> None:
        try:
            self._put(messages)
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()


class EncapsulatedWriter(RecordBatchWriter):
    """Writes encapsulated messages one after the other, padded so that each body lies aligned in the sink.

    It owns the sink. `position` is where that begins, and `preface` what comes before the first message.
    """

    def __init__(self, sink: Sink, splitter: Splitter, position: int = 0, preface: bytes = b"") -> None:
        self._sink = sink
        self._position = position
        self._preface = preface
        super().__init__(splitter)

    def _put(self, messages: Sequence[SplitMessage]) -> None:
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
        """A message goes to this position, where `head` bytes come before its body."""

    def _end(self) -> None:
        self._write([end_of_stream(self._splitter.options.write_legacy_ipc_format)])
        self._sink.close()

    def _discard(self) -> None:
        self._sink.abort()


class StreamWriter(EncapsulatedWriter):
    """Writes an encapsulated stream to `sink`: a path, a binary file object, or a pyarrow.NativeFile.

    A path is made or overwritten. A file object is written where it stands, flushed at the end, and stays open.
    Aborted, a stream has no end. Raises StoreError where the sink takes no more.
    """

    def __init__(self, sink: Any, schema: pa.Schema, options: WriteOptions | None = None) -> None:
        splitter = Splitter(schema, options)  # first: it may raise
        super().__init__(open_sink(sink), splitter)


class FileWriter(EncapsulatedWriter):
    """Writes an IPC file, whose batches can be read in any order. `metadata` goes into its footer.

    The sink is as for StreamWriter. Positions in the footer count from the beginning of the sink, so that a file can
    follow something else in it. Aborted, a file has no footer, and so is none.

    No dictionary can be replaced. With the option `unify_dictionaries`, each table that is written gets one
    dictionary for each column.
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
        blocks = parse_footer(footer)  # libarrow's footer is right but for where messages lie
        blocks.dictionaries[:] = np.array(self._dictionary_blocks, BLOCK)
        blocks.record_batches[:] = np.array(self._batch_blocks, BLOCK)
        self._write([end_of_stream(self._file.options.write_legacy_ipc_format), encode_footer(footer)])
        self._sink.close()


class DissociatedWriter(RecordBatchWriter):
    """Gives the messages of a dissociated stream to `send`, in order, for a transport of your own.

    Each is a Message: untagged metadata; bodies, packed, with their tag; at `close`, the end of stream. The parts of
    a message are borrowed until `send` returns. `streams` says which of the two streams go here: for metadata and
    bodies on two connections, write the same batches to two writers.
    """

    def __init__(
        self,
        send: Callable[[Message], object],
        schema: pa.Schema,
        options: WriteOptions | None = None,
        streams: Streams = Streams.BOTH,
    ) -> None:
        self._send = send
        self._sender = Sender.ahead(streams)
        super().__init__(Splitter(schema, options))

    def _put(self, messages: Sequence[SplitMessage]) -> None:
        for header, _, parts in messages:
            body = Body(BodyKind.PACKED, parts) if parts is not None else None
            for message in self._sender.send(header, body):
                self._send(message)

    def _end(self) -> None:
        for message in self._sender.end():
            self._send(message)

    def _discard(self) -> None: ...
