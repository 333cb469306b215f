"""Event-driven reading: data is pushed into a decoder as it comes, which calls a listener with what it decodes.

The decoders here find out which messages are whole. What becomes of those is in `dissociated.ipc.decoding`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from queue import SimpleQueue

import pyarrow as pa

from dissociated.base.buffers import MAX_BODY, MAX_METADATA, Buffer
from dissociated.codec.attach import attach
from dissociated.codec.options import ReadOptions
from dissociated.codec.reader import PeerReader, StreamReader
from dissociated.errors import FormatError, OptionError, RemoteProtocolError
from dissociated.ipc.decoding import Decoder, Listener
from dissociated.ipc.parser import END, InputChunk, StreamParser, as_bytes
from dissociated.memory.leases import AddressSink, leased_buffer
from dissociated.memory.region import AddressSpace
from dissociated.protocol.receiver import Receiver


class StreamDecoder(Decoder):
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
        return 0 if self._failed else self._parser.required

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


class DissociatedDecoder(Decoder):
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
