"""Record batches into IPC messages whose body buffers are borrowed, not copied.

libarrow does all the encoding: it writes an IPC stream into a Python sink, which receives every body buffer by
reference. Only what libarrow itself must allocate (rebased offsets of a slice, compressed buffers) is new memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

import pyarrow as pa

from dissociated.errors import SourceError
from dissociated.ipc.encapsulated import CONTINUATION
from dissociated.ipc.options import WriteOptions
from dissociated.message import Buffer
from dissociated.protocol.header import Header, parse_header


class SplitMessage(NamedTuple):
    """One IPC message: the flatbuffer, what pairing needs from it, and the packed body in parts, None without one."""

    header: bytes
    parsed: Header
    body: list[Buffer] | None


class _Sink:
    """The file that libarrow writes to. Takes the stream apart again by the lengths that it announces."""

    closed = False

    def __init__(self) -> None:
        self.messages: list[SplitMessage] = []
        self._header_next = False
        self._body_left = 0

    def write(self, piece: Buffer) -> int:
        size = len(piece)
        if self._body_left:
            self.messages[-1].body.append(piece)  # type: ignore[union-attr]  # a message with a length has a body
            self._body_left -= size
        elif self._header_next:
            header = bytes(piece)
            parsed = parse_header(header)
            self.messages.append(SplitMessage(header, parsed, [] if parsed.has_body else None))
            self._body_left = parsed.body_length
            self._header_next = False
        elif piece != CONTINUATION:  # so it is the length of the metadata; 0 ends the stream
            self._header_next = bytes(piece) != b"\0\0\0\0"
        return size

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

    Raises FormatError where a field nests deeper than `options` allow.
    """

    def __init__(self, schema: pa.Schema, options: WriteOptions | None = None) -> None:
        self.schema = schema
        self.options = options or WriteOptions()
        self.options.check_depth(schema)
        told = self.options.to_pyarrow()
        # libarrow writes the schema together with the first batch. A receiver should not have to wait for that:
        # a writer of its own, closed at once, gives the very same message now.
        eager = _Sink()
        pa.ipc.new_stream(pa.PythonFile(eager, mode="w"), schema, options=told).close()
        self._schema_message = eager.take()[0]
        self._schema_written = False
        self._sink = _Sink()
        self._writer = pa.ipc.new_stream(pa.PythonFile(self._sink, mode="w"), schema, options=told)

    @property
    def schema_message(self) -> SplitMessage:
        """The first message of the stream."""
        return self._schema_message

    def split(self, batch: pa.RecordBatch, metadata: pa.KeyValueMetadata | None = None) -> list[SplitMessage]:
        """The messages of `batch`: the dictionaries that it needs and are new or changed, then the batch.

        Raises SourceError for a batch whose lengths and offsets contradict each other: on those libarrow would abort.
        """
        try:
            batch.validate()
        except pa.ArrowInvalid as error:
            raise SourceError(f"a record batch is not valid: {error}") from None
        self._writer.write_batch(batch, custom_metadata=metadata)
        messages = self._sink.take()
        if not self._schema_written:
            del messages[0]
            self._schema_written = True
        return messages


def split(reader: pa.RecordBatchReader, options: WriteOptions | None = None) -> Iterator[SplitMessage]:
    """Every message of the stream that `reader` gives, schema first."""
    splitter = Splitter(reader.schema, options)
    yield splitter.schema_message
    for batch, metadata in _batches(reader):
        yield from splitter.split(batch, metadata)


def _batches(reader: pa.RecordBatchReader) -> Iterator[tuple[pa.RecordBatch, pa.KeyValueMetadata | None]]:
    if not isinstance(reader, pa.ipc.RecordBatchStreamReader):  # only those know metadata of single batches
        for batch in reader:
            yield batch, None
        return
    with suppress(StopIteration):
        while True:
            yield reader.read_next_batch_with_custom_metadata()
