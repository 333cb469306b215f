"""Event-driven reading: data is pushed into a decoder as it comes, which calls a listener with what it decodes.

The decoders find out what is whole; libarrow decodes it. It is only asked for a batch when the message of one is
there, so it never waits: messages lie in a queue until then, dictionaries before their batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

import pyarrow as pa

from dissociated._moved import renamed
from dissociated.buffers import MAX_BODY, MAX_METADATA, Buffer
from dissociated.codec.attach import attach
from dissociated.codec.join import Messages, join
from dissociated.codec.options import ReadOptions, check_options
from dissociated.codec.reader import PeerReader, StreamReader
from dissociated.codec.stats import ReadStats
from dissociated.errors import DissociatedError, FormatError, OptionError, RemoteProtocolError
from dissociated.format.encapsulated import encapsulate
from dissociated.format.message import HeaderType
from dissociated.ipc.parser import END, InputChunk, StreamParser, as_bytes
from dissociated.memory.leases import AddressSink, leased_buffer
from dissociated.memory.region import AddressSpace
from dissociated.protocol.receiver import Receiver

_NOTHING_READ = ReadStats(0, 0, 0, 0, 0)
_REENTERED = "a listener cannot feed the decoder that has called it"
_FAILED = "this stream has failed before: reset the decoder, and feed it another from the beginning"


class Listener:
    """What a decoder calls. Override what is of interest; what a method raises comes out of the decoder as it is.

    A method may call `reset` of the decoder; what is fed after that is another stream. It must not feed it.
    """

    def on_schema_decoded(self, schema: pa.Schema, filtered_schema: pa.Schema) -> None:
        """The schema, and the one that the batches have: only of the fields that are included."""

    def on_record_batch_decoded(self, batch: pa.RecordBatch) -> None:
        """A record batch, if `on_record_batch_with_metadata_decoded` is not overridden."""
        raise NotImplementedError(f"{type(self).__name__} has no on_record_batch_decoded")

    def on_record_batch_with_metadata_decoded(
        self, batch: pa.RecordBatch, custom_metadata: pa.KeyValueMetadata | None
    ) -> None:
        """A record batch, and the metadata of its own, None without any."""
        self.on_record_batch_decoded(batch)

    def on_eos(self) -> None:
        """The end of the stream."""


class CollectListener(Listener):
    """Keeps everything that was decoded."""

    def __init__(self) -> None:
        self.schema: pa.Schema | None = None
        self.filtered_schema: pa.Schema | None = None
        self.batches: list[pa.RecordBatch] = []
        #: of each batch, None where it has none
        self.custom_metadata: list[pa.KeyValueMetadata | None] = []
        self.ended = False

    def on_schema_decoded(self, schema: pa.Schema, filtered_schema: pa.Schema) -> None:
        self.schema, self.filtered_schema = schema, filtered_schema

    def on_record_batch_with_metadata_decoded(
        self, batch: pa.RecordBatch, custom_metadata: pa.KeyValueMetadata | None
    ) -> None:
        self.batches.append(batch)
        self.custom_metadata.append(custom_metadata)

    def on_eos(self) -> None:
        self.ended = True


class _Decoding:
    """One stream of whole messages in order: libarrow's reader of it, and the listener that it is decoded for."""

    def __init__(
        self,
        listener: Listener,
        options: ReadOptions,
        max_metadata: int,
        max_body: int,
        kind: type[StreamReader],
        error_type: type[DissociatedError],
    ) -> None:
        self._listener = listener
        self._options = options
        self._max_waiting = max_metadata + max_body
        self._max_body = max_body
        self._kind = kind
        self._error_type = error_type
        self._reader: StreamReader | None = None
        self._waiting: deque[tuple[Buffer, Buffer | None]] = deque()
        self._waiting_bytes = 0
        self._stats = _NOTHING_READ
        self.schema: pa.Schema | None = None

    @property
    def stats(self) -> ReadStats:
        return self._stats if self._reader is None else self._reader.stats

    def add(self, type_: HeaderType | None, header: Buffer, body: Buffer | None, body_length: int) -> None:
        """Take the next message, and tell the listener what has become whole by it."""
        self._waiting.append((header, body))
        if self._reader is None:
            self._begin(header)
        elif type_ is HeaderType.DICTIONARY_BATCH:
            self._waiting_bytes += len(header) + body_length
            if self._waiting_bytes > self._max_waiting:
                raise self._error_type(
                    f"dictionaries of {self._waiting_bytes} bytes wait for a batch; at most {self._max_waiting} may, "
                    "which is max_metadata and max_body together"
                )
        else:
            decoded = self._read()
            if decoded is None:
                raise self._error_type("libarrow cannot read this: it takes a message for the end of the stream")
            self._waiting_bytes = 0
            self._listener.on_record_batch_with_metadata_decoded(*decoded)

    def end(self) -> None:
        """There are no more messages."""
        if self._reader is None:
            raise self._error_type("the stream ended before its schema")
        if self._read() is not None:
            raise self._error_type("libarrow cannot read this: it has a batch after the last message")
        self.drop()
        self._listener.on_eos()

    def drop(self) -> None:
        """Let go of what was decoded and of what waits; `schema` and `stats` stay."""
        self._stats = self.stats
        self._reader = None
        self._waiting.clear()

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
    """What `join` reads. It knows nothing but the queue: libarrow owns it, where no garbage collector looks."""
    while waiting:
        yield waiting.popleft()


class _Decoder(ABC):
    """What both decoders share: a listener, one stream at a time, and no more of it after an error."""

    def __init__(
        self,
        listener: Listener,
        options: ReadOptions | None,
        max_metadata: int,
        max_body: int,
        kind: type[StreamReader],
        error_type: type[DissociatedError],
    ) -> None:
        self._options = check_options(options, ReadOptions)
        self._max_metadata = max_metadata
        self._max_body = max_body
        self._decoding_of_stream = partial(_Decoding, listener, self._options, max_metadata, max_body, kind, error_type)
        self._refusal: str | None = None
        self.reset()

    @property
    def schema(self) -> pa.Schema | None:
        """The schema that the batches have, only of the fields that are included; None until it is decoded."""
        return self._decoding.schema

    @property
    def stats(self) -> ReadStats:
        """What has been decoded of this stream so far. A dictionary counts when the batch after it is decoded."""
        return self._decoding.stats

    def reset(self) -> None:
        """Begin anew: what is fed next is the beginning of another stream. What was fed of this one is let go."""
        if self._refusal is not _REENTERED:
            self._refusal = None
        self._decoding = self._decoding_of_stream()
        self._clear()

    @abstractmethod
    def finish(self) -> None: ...

    @abstractmethod
    def _clear(self) -> None:
        """Forget what was fed and is not whole."""

    def _work(self, step: Callable[..., None], *arguments: Any) -> None:
        """Do it, unless this stream has failed. If anything is raised, it has."""
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


class StreamDecoder(_Decoder):
    """Decodes an IPC stream that is pushed in pieces ("IPC Streaming Format"), and calls `listener` with it.

    It takes what libraries wrote before 0.15, a stream whose end is marked with 8 bytes, with 4, or not at all, and
    an IPC file from its first byte on, as the stream that it holds. What follows the end of a stream is passed over.

    Raises FormatError for anything else, MemoryError where what a compressed buffer announces cannot be had. After an
    error, and after anything that the listener raises, it takes no more until `reset`. Metadata of more than
    `max_metadata` bytes and bodies of more than `max_body` are refused when they are announced; dictionaries that
    wait for a batch may have as much as both together. Not thread-safe.
    """

    def __init__(
        self,
        listener: Listener,
        options: ReadOptions | None = None,
        *,
        max_metadata: int = MAX_METADATA,
        max_body: int = MAX_BODY,
    ) -> None:
        super().__init__(listener, options, max_metadata, max_body, StreamReader, FormatError)

    @property
    def next_required_size(self) -> int:
        """How many bytes would take the decoder further; 0 at the end of the stream, and after an error.

        What is fed in pieces of just this size, or in larger ones, is not copied. Smaller pieces are joined, once.
        """
        return 0 if self._refusal is _FAILED else self._parser.required

    def consume(self, data: Buffer) -> None:
        """Take the next bytes of the stream, from one to all of it, and decode what has become whole.

        `data` is anything with the buffer protocol, C-contiguous. Arrays lie in it: it must stay as it is as long
        as there is one.
        """
        self._work(self._consume, data)

    def finish(self) -> None:
        """No more data will come. Ends a stream whose end is not marked; does nothing where it is.

        Raises FormatError where the stream is cut off.
        """
        self._work(self._finish)

    def _consume(self, data: Buffer) -> None:
        chunk = InputChunk(data)
        while (message := self._parser.parse(chunk)) is not None:
            if message is END:
                self._decoding.end()
            else:
                type_, header, body = message
                self._decoding.add(type_, header, body, 0 if body is None else len(body))

    def _finish(self) -> None:
        if self._parser.end():
            self._decoding.end()

    def _clear(self) -> None:
        self._parser = StreamParser(self._max_metadata, self._max_body, self._options.memory_pool)


class DissociatedDecoder(_Decoder):
    """Decodes the messages of a dissociated stream, which come in any order, and calls `listener` with it.

    Bodies by address lie in the regions of `address_space`. The addresses of a message go to `returns.put`, as one
    sequence, when the last array that lies in its body is collected: send them as `free_data`
    (`protocol.bodies.encode_free`). `put` is called from finalizers, so let it only enqueue, and not refer to this
    decoder: `queue.SimpleQueue` will do. After an error, or a reset before the end, addresses of messages that were not
    decoded do not go there: disconnecting gives them back.

    Raises RemoteProtocolError where the peer breaks the protocol or sends what libarrow cannot read, OptionError for an
    `address_space` without `returns`. After an error, and after anything that the listener raises, it takes no more
    until `reset`. Metadata of more than `max_metadata` bytes and bodies of more than `max_body` are refused;
    dictionaries that wait for a batch may have as much as both together. What was overtaken waits within the caps of
    `protocol.receiver`. Not thread-safe.
    """

    @renamed(space="address_space")
    def __init__(
        self,
        listener: Listener,
        options: ReadOptions | None = None,
        *,
        address_space: AddressSpace | None = None,
        returns: AddressSink | None = None,
        max_metadata: int = MAX_METADATA,
        max_body: int = MAX_BODY,
    ) -> None:
        if (address_space is None) is not (returns is None):
            raise OptionError("give the space that addresses lie in, and where they are returned to, or neither")
        self._address_space = AddressSpace() if address_space is None else address_space
        self._leases = _DecoderLeases(SimpleQueue() if returns is None else returns)
        super().__init__(listener, options, max_metadata, max_body, PeerReader, RemoteProtocolError)
        self._allocate = partial(pa.allocate_buffer, memory_pool=self._options.memory_pool)

    @property
    def complete(self) -> bool:
        """Whether everything up to the end of the stream has been decoded."""
        return self._receiver.complete

    def consume_metadata(self, message: Buffer) -> None:
        """Take an untagged message ("Metadata Stream Sequence"), and decode what has become whole."""
        self._work(self._consume_metadata, message)

    def consume_body(self, tag: int, body: Buffer) -> None:
        """Take a tagged message ("Data Stream Sequence"), and decode what has become whole.

        Arrays lie in a packed `body`: it must stay as it is as long as there is one.
        """
        self._work(self._consume_body, tag, body)

    def finish(self) -> None:
        """No more messages will come. Raises RemoteProtocolError, naming the gap, where one is missing."""
        self._work(self._receiver.disconnected)

    def _consume_metadata(self, message: Buffer) -> None:
        view = as_bytes(message)
        self._check(len(view), self._max_metadata, "max_metadata")
        self._receiver.receive_metadata(bytes(view))
        self._advance()

    def _consume_body(self, tag: int, body: Buffer) -> None:
        view = as_bytes(body)
        self._check(len(view), self._max_body, "max_body")
        complete = self._receiver.complete
        self._receiver.receive_body(tag, view)
        if not complete:  # nothing can follow but the schema's empty body
            self._advance()

    def _advance(self) -> None:
        while (delivery := self._receiver.next()) is not None:
            self._check(delivery.largest_body, self._max_body, "max_body")
            header, body = attach(delivery, self._address_space, self._leases, self._allocate)
            self._decoding.add(delivery.parsed.type, header, body, delivery.largest_body)
        if self._receiver.complete:  # after which it takes nothing
            self._decoding.end()

    def _check(self, length: int, limit: int, name: str) -> None:
        if length > limit:
            raise RemoteProtocolError(f"a message has a part of {length} bytes; at most {limit} are taken ({name})")

    def _clear(self) -> None:
        self._receiver = Receiver.with_limits(self._max_metadata, self._max_body)


class _DecoderLeases:
    """What a decoder holds of a peer's memory, and where it returns it to."""

    def __init__(self, returns: AddressSink) -> None:
        self._returns = returns

    def lease(self, memory: pa.Buffer, addresses: Sequence[int]) -> pa.Buffer:
        return leased_buffer(memory, addresses, self._returns)

    def free(self, addresses: Sequence[int]) -> None:
        self._returns.put(addresses)
