"""Decoding of complete messages: libarrow decodes them, and a `Listener` is called with the batches.

Messages wait in a queue, dictionaries before their batch. libarrow is only asked for a batch when its message is in the
queue, and therefore never waits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import pyarrow as pa

from dissociated.base.buffers import Buffer
from dissociated.codec.join import Messages, join
from dissociated.codec.options import ReadOptions, check_options
from dissociated.codec.reader import StreamReader
from dissociated.codec.writer import ReadStats
from dissociated.errors import FormatError, RemoteProtocolError
from dissociated.format.encapsulated import encapsulate
from dissociated.format.layout import dictionary_of
from dissociated.format.message import HeaderType

_NOTHING_READ = ReadStats(0, 0, 0, 0, 0)
_REENTERED = "a listener cannot feed the decoder that calls the listener"
_FAILED = "the stream failed before: reset the decoder, and feed a stream from its beginning"


class Decoding:
    """The decoding of one stream of complete messages, in order, with a reader of libarrow. Calls the listener."""

    def __init__(
        self,
        listener: Listener,
        options: ReadOptions,
        max_metadata: int,
        max_body: int,
        kind: type[StreamReader],
    ) -> None:
        self._listener = listener
        self._options = options
        self._max_waiting = max_metadata + max_body
        self._max_body = max_body
        self._kind = kind
        self._error_type = kind.error_type
        self._reader: StreamReader | None = None
        self._waiting: deque[tuple[Buffer, Buffer | None]] = deque()
        self._waiting_bytes = 0
        self._stats = self._waiting_stats = _NOTHING_READ  # the second counts waiting dictionaries
        self._dictionaries: set[int] = set()  # the ids of the dictionaries so far
        #: The schema of the batches; None until it is decoded.
        self.schema: pa.Schema | None = None

    @property
    def stats(self) -> ReadStats:
        """The counts of messages that were decoded so far."""
        if self._reader is None:
            return self._stats
        decoded, waiting = self._reader.stats, self._waiting_stats
        return ReadStats(*(sum(both) for both in zip(decoded, waiting, strict=True)))

    def add(self, type_: HeaderType | None, header: Buffer, body: Buffer | None, body_length: int) -> None:
        """Take the next message, and call the listener if a schema or a batch can be decoded.

        Args:
            type_: The type of the message; None if its metadata has none.
            header: The metadata, a flatbuffer.
            body: The body; None if there is none.
            body_length: The length of the body, in bytes.

        Raises:
            DissociatedError: An error of the reader's `error_type`. libarrow cannot read the message, or too many bytes
                of dictionaries wait for a batch.
        """
        self._waiting.append((header, body))
        if self._reader is None:
            self._begin(header)
        elif type_ is HeaderType.DICTIONARY_BATCH:
            self._count_dictionary(bytes(header))
            self._waiting_bytes += len(header) + body_length
            if self._waiting_bytes > self._max_waiting:
                raise self._error_type(
                    f"dictionaries of {self._waiting_bytes} bytes wait for a batch; at most {self._max_waiting} may "
                    "(max_metadata and max_body together)"
                )
        else:
            decoded = self._read()
            self._waiting_stats = _NOTHING_READ
            if decoded is None:
                raise self._error_type("libarrow cannot read this stream: a message reads as the end of the stream")
            self._waiting_bytes = 0
            self._listener.on_record_batch_with_metadata_decoded(*decoded)

    def end(self) -> None:
        """End the stream. Raises an error of the reader's `error_type` if the stream is incomplete."""
        if self._reader is None:
            raise self._error_type("the stream ended before its schema")
        if self._read() is not None:
            raise self._error_type("libarrow cannot read this stream: a batch follows the last message")
        self._waiting_stats = _NOTHING_READ
        self.drop()
        self._listener.on_eos()

    def drop(self) -> None:
        """Release the reader and the waiting messages. `schema` and `stats` stay."""
        self._stats = self.stats
        self._reader = None
        self._waiting_stats = _NOTHING_READ
        self._waiting.clear()

    def _count_dictionary(self, header: bytes) -> None:
        """Count a dictionary when it arrives, like the C++ decoder. libarrow's reader counts it with the next batch."""
        try:
            id_, is_delta = dictionary_of(header)
        except RemoteProtocolError:
            return  # libarrow reports the error when it reads the message
        replaces = id_ in self._dictionaries and not is_delta
        self._dictionaries.add(id_)
        stats = self._waiting_stats
        self._waiting_stats = ReadStats(
            num_messages=stats.num_messages + 1,
            num_record_batches=0,
            num_dictionary_batches=stats.num_dictionary_batches + 1,
            num_dictionary_deltas=stats.num_dictionary_deltas + is_delta,
            num_replaced_dictionaries=stats.num_replaced_dictionaries + replaces,
        )

    def _begin(self, header: Buffer) -> None:
        options = self._options
        whole = None
        if options.included_fields:
            message = pa.py_buffer(encapsulate(bytes(header)))
            whole = self._kind(message, ReadOptions(ensure_native_endian=options.ensure_native_endian)).schema
            options.check_fields(whole)
        self._reader = join(_drain(self._waiting), options, self._kind, self._max_body)
        self.schema = self._reader.schema
        self._listener.on_schema_decoded(whole or self.schema, self.schema)

    def _read(self) -> tuple[pa.RecordBatch, pa.KeyValueMetadata | None] | None:
        assert self._reader is not None
        try:
            return self._reader.read_next_batch_with_custom_metadata()
        except StopIteration:
            return None


def _drain(waiting: deque[tuple[Buffer, Buffer | None]]) -> Messages:
    """Iterate over the queue, for `join`.

    The generator refers to the queue only: libarrow owns it, and the garbage collector cannot find a cycle there.
    """
    while waiting:
        yield waiting.popleft()


class Decoder(ABC):
    """The base of decoders: they decode one stream at a time, and stop after an error."""

    def __init__(
        self,
        listener: Listener,
        options: ReadOptions | None,
        max_metadata: int,
        max_body: int,
        kind: type[StreamReader],
    ) -> None:
        self._options = check_options(options, ReadOptions)
        self._max_metadata = max_metadata
        self._max_body = max_body
        self._decoding_of_stream = partial(Decoding, listener, self._options, max_metadata, max_body, kind)
        self._refusal: str | None = None
        self.reset()

    @property
    def _failed(self) -> bool:
        """Whether this stream has failed."""
        return self._refusal is _FAILED

    @property
    def schema(self) -> pa.Schema | None:
        """The schema of the batches, with the included fields only; None until it is decoded."""
        return self._decoding.schema

    @property
    def stats(self) -> ReadStats:
        """The counts of messages of this stream that were decoded so far. A dictionary counts when it arrives."""
        return self._decoding.stats

    def reset(self) -> None:
        """Discard the current stream. The next input is the beginning of another stream."""
        if self._refusal is not _REENTERED:
            self._refusal = None
        self._decoding = self._decoding_of_stream()
        self._clear()

    @abstractmethod
    def finish(self) -> None:
        """End the input."""

    @abstractmethod
    def _clear(self) -> None:
        """Discard the input that was not decoded yet."""

    def _work(self, step: Callable[..., None], *arguments: Any) -> None:
        """Run a step of decoding. If it raises, the stream has failed: every later step then raises FormatError."""
        if self._refusal is not None:
            raise FormatError(self._refusal)
        self._refusal = _REENTERED
        try:
            step(*arguments)
        except BaseException:
            self._refusal = _FAILED
            self._decoding.drop()
            self._clear()
            raise
        self._refusal = None


class Listener:
    """The callbacks of a decoder, to be overridden. The decoder passes their exceptions on to its caller.

    A callback may call `reset` of the decoder, so that the next input begins another stream. It must not feed the
    decoder.
    """

    def on_schema_decoded(self, schema: pa.Schema, filtered_schema: pa.Schema) -> None:
        """Receive the schema of the stream, and the schema of the batches, with the included fields only."""

    def on_record_batch_decoded(self, batch: pa.RecordBatch) -> None:
        """Receive a record batch. Override this method or `on_record_batch_with_metadata_decoded`.

        Raises NotImplementedError if neither is overridden.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement on_record_batch_decoded")

    def on_record_batch_with_metadata_decoded(
        self, batch: pa.RecordBatch, custom_metadata: pa.KeyValueMetadata | None
    ) -> None:
        """Receive a record batch and its custom metadata, which is None if it has none."""
        self.on_record_batch_decoded(batch)

    def on_eos(self) -> None:
        """Receive the end of the stream."""


class CollectListener(Listener):
    """A listener that keeps all batches."""

    def __init__(self) -> None:
        #: The schema of the stream; None until it is decoded.
        self.schema: pa.Schema | None = None
        #: The schema of the batches, with the included fields only.
        self.filtered_schema: pa.Schema | None = None
        #: The record batches, in order.
        self.batches: list[pa.RecordBatch] = []
        #: The custom metadata of each batch, which is None if it has none.
        self.custom_metadata: list[pa.KeyValueMetadata | None] = []
        #: Whether the stream has ended.
        self.complete = False

    def on_schema_decoded(self, schema: pa.Schema, filtered_schema: pa.Schema) -> None:
        """Keep both schemas."""
        self.schema, self.filtered_schema = schema, filtered_schema

    def on_record_batch_with_metadata_decoded(
        self, batch: pa.RecordBatch, custom_metadata: pa.KeyValueMetadata | None
    ) -> None:
        """Keep the batch and its metadata."""
        self.batches.append(batch)
        self.custom_metadata.append(custom_metadata)

    def on_eos(self) -> None:
        """Remember that the stream has ended."""
        self.complete = True
