"""Event-driven reading: the caller pushes data into a decoder, which calls a listener with each decoded batch.

The decoders of this module assemble complete messages. `dissociated.ipc.decoding` decodes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from queue import SimpleQueue

import pyarrow as pa

from dissociated.base.buffers import MAX_BODY, MAX_METADATA, Buffer
from dissociated.codec.join import attach
from dissociated.codec.options import ReadOptions
from dissociated.codec.reader import PeerReader, StreamReader
from dissociated.errors import OptionError, RemoteProtocolError
from dissociated.ipc.decoding import Decoder, Listener
from dissociated.ipc.parser import END, InputChunk, StreamParser, as_bytes
from dissociated.memory.leases import leased_buffer
from dissociated.memory.region import AddressSpace
from dissociated.protocol.receiver import Receiver


class StreamDecoder(Decoder):
    """A decoder of an IPC stream that is pushed in pieces ("IPC Streaming Format"). Not thread-safe.

    It accepts streams of libraries before 0.15, streams with an end marker of 8 bytes, of 4 bytes, or without one, and
    IPC files from their first byte on, since a file contains a stream. Data after the end of the stream is ignored.

    After an error, or after an exception of the listener, the decoder accepts no data until `reset`.

    Args:
        listener: Receives the schema, the batches and the end of the stream.
        options: Options of reading.
        max_metadata: The largest metadata of a message, in bytes. Larger ones are refused as soon as they are
            announced.
        max_body: The largest body of a message, in bytes. Dictionaries that wait for a batch may have
            `max_metadata + max_body` bytes together.

    Raises:
        FormatError: The data is no valid IPC stream, or exceeds a limit.
        MemoryError: There is no memory for the size that a compressed buffer announces.

    Example:
        ```python
        from pathlib import Path

        from dissociated import ipc

        listener = ipc.CollectListener()
        decoder = ipc.StreamDecoder(listener)
        decoder.consume(Path("flights.arrows").read_bytes())
        ```
    """

    def __init__(
        self,
        listener: Listener,
        options: ReadOptions | None = None,
        *,
        max_metadata: int = MAX_METADATA,
        max_body: int = MAX_BODY,
    ) -> None:
        super().__init__(listener, options, max_metadata, max_body, StreamReader)

    @property
    def next_required_size(self) -> int:
        """The number of bytes until the next step of decoding; 0 at the end of the stream, and after an error.

        Pieces of at least this size are not copied. Smaller pieces are copied once, into one buffer.
        """
        return 0 if self._failed else self._parser.required

    def consume(self, data: Buffer) -> None:
        """Take the next bytes of the stream, and decode the messages that are complete.

        Args:
            data: A C-contiguous object with the buffer protocol, of any length. Arrays refer to its memory, so it must
                not change as long as one of them exists.
        """
        self._work(self._consume, data)

    def finish(self) -> None:
        """End the input, which ends a stream without an end marker. Does nothing if the stream has ended.

        Raises FormatError if the stream is cut off.
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
    """A decoder of a dissociated stream, whose messages may arrive in any order. Not thread-safe.

    After an error, or after an exception of the listener, the decoder accepts no messages until `reset`. The addresses
    of messages that were not decoded then, or before an early `reset`, are not returned: disconnecting frees them.
    Messages that arrive early wait within the limits of `protocol.receiver`.

    Args:
        listener: Receives the schema, the batches and the end of the stream.
        options: Options of reading.
        address_space: The regions of shared memory in which bodies that are sent by address lie.
        returns: A `queue.SimpleQueue` that gets the addresses of a message, as one sequence, when the last array that
            refers to its body is collected. Send them to the peer as `free_data` (`protocol.wire.encode_free`).
        max_metadata: The largest metadata of a message, in bytes.
        max_body: The largest body of a message, in bytes. Dictionaries that wait for a batch may have
            `max_metadata + max_body` bytes together.

    Raises:
        RemoteProtocolError: The peer breaks the protocol, exceeds a limit, or sends data that libarrow cannot read.
        OptionError: Only one of `address_space` and `returns` was given.
    """

    def __init__(
        self,
        listener: Listener,
        options: ReadOptions | None = None,
        *,
        address_space: AddressSpace | None = None,
        returns: SimpleQueue[Sequence[int]] | None = None,
        max_metadata: int = MAX_METADATA,
        max_body: int = MAX_BODY,
    ) -> None:
        if (address_space is None) is not (returns is None):
            raise OptionError("address_space and returns depend on each other: give both or neither")
        self._address_space = AddressSpace() if address_space is None else address_space
        self._leases = _DecoderLeases(SimpleQueue() if returns is None else returns)
        super().__init__(listener, options, max_metadata, max_body, PeerReader)
        self._allocate = partial(pa.allocate_buffer, memory_pool=self._options.memory_pool)

    @property
    def complete(self) -> bool:
        """Whether the stream was decoded up to its end."""
        return self._receiver.complete

    def consume_metadata(self, message: Buffer) -> None:
        """Take an untagged message ("Metadata Stream Sequence"), and decode the messages that are complete."""
        self._work(self._consume_metadata, message)

    def consume_body(self, tag: int, body: Buffer) -> None:
        """Take a tagged message ("Data Stream Sequence"), and decode the messages that are complete.

        Arrays refer to the memory of a packed `body`, so it must not change as long as one of them exists.
        """
        self._work(self._consume_body, tag, body)

    def finish(self) -> None:
        """End the input. Raises RemoteProtocolError, which names the gap, if a message is missing."""
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
        if not complete:  # otherwise the message can only be the schema's empty body
            self._advance()

    def _advance(self) -> None:
        while (delivery := self._receiver.next()) is not None:
            self._check(delivery.largest_body, self._max_body, "max_body")
            header, body = attach(delivery, self._address_space, self._leases, self._allocate)
            self._decoding.add(delivery.parsed.type, header, body, delivery.largest_body)
        if self._receiver.complete:  # the receiver accepts no more messages
            self._decoding.end()

    def _check(self, length: int, limit: int, name: str) -> None:
        if length > limit:
            raise RemoteProtocolError(f"a message has a part of {length} bytes; at most {limit} are accepted ({name})")

    def _clear(self) -> None:
        self._receiver = Receiver.with_limits(self._max_metadata, self._max_body)


class _DecoderLeases:
    """The leases of a decoder on a peer's memory, which it returns through `returns`."""

    def __init__(self, returns: SimpleQueue[Sequence[int]]) -> None:
        self._returns = returns

    def lease(self, memory: pa.Buffer, addresses: Sequence[int]) -> pa.Buffer:
        return leased_buffer(memory, addresses, self._returns)

    def free(self, addresses: Sequence[int]) -> None:
        self._returns.put(addresses)
