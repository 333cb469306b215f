"""Decoding of IPC messages to record batches, whose arrays use the memory of the bodies as they arrived.

libarrow does all the decoding: it reads an IPC stream from a Python file, which passes each body as one buffer.
Dictionaries, deltas, byte order, projection and validation are libarrow's. `join_deliveries` also decodes messages that
arrived together.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from typing import Protocol, TypeAlias

import pyarrow as pa

from dissociated.base.buffers import MAX_BODY, Buffer
from dissociated.base.exit import hold_at_exit, section
from dissociated.codec.options import ReadOptions, check_options
from dissociated.codec.reader import PeerReader, Readable, Reading, StreamReader, close_idle
from dissociated.errors import DissociatedError, RemoteProtocolError
from dissociated.format.encapsulated import END_OF_STREAM
from dissociated.format.message import (
    MISREAD,
    buffer_extents,
    is_compressed,
    is_misread,
    relocate,
    uncompressed_length,
)
from dissociated.memory.region import AddressSpace
from dissociated.protocol.delivery import Delivery

_length = struct.Struct("<i")

#: A message in the form that libarrow reads: its flatbuffer, and its body or None.
EncodedMessage: TypeAlias = tuple[bytes, Buffer | None]
#: The messages of a stream, for `join`.
Messages: TypeAlias = Generator[EncodedMessage, None, None]


class StreamFile(Readable, ABC):
    """A file from which libarrow reads a stream. libarrow reads a length, the metadata, and the whole body in turn.

    The file closes `source`, from which the messages come, also if a message cannot be read.
    """

    def __init__(
        self, source: Generator[object, None, None], max_body: int, error_type: type[DissociatedError]
    ) -> None:
        self._source = source
        self._max_body = max_body
        self._error_type = error_type
        self._pieces: list[Buffer] = []  # of the current message, in reverse order
        self._uncompressed = b""  # the last flatbuffer whose body was not compressed
        self.reading = Reading()

    @section
    def read(self, size: int = -1) -> Buffer:
        """Return the next bytes of the stream: at most `size`, all in one buffer.

        Raises:
            DissociatedError: `_next` failed, or the file was closed before the end of the stream.
        """
        hold_at_exit()
        if not size:
            return b""
        pieces = self._pieces
        while not pieces:
            if self.reading.at_end:
                return b""
            self._refill()
        piece = pieces[-1]
        if len(piece) > size:  # only if the lengths of a peer contradict each other
            whole = memoryview(piece)
            piece, pieces[-1] = bytes(whole[:size]), whole[size:]
        else:
            del pieces[-1]  # last, so that Ctrl-C cannot lose a piece
        return piece

    @abstractmethod
    def _next(self) -> EncodedMessage | None:
        """Return the next message; None if the caller must call again. Raises StopIteration at the end."""

    def _refill(self) -> None:
        """Put the next message into `_pieces`, if `_next` returns one, or the end of the stream."""
        if self.reading.at_end:
            return
        try:
            self.reading.take(self._fill)
        except StopIteration:
            self._pieces += (END_OF_STREAM[4:], END_OF_STREAM[:4])
        except BaseException:
            self.reading.close()  # before the source is closed, which must not look like the end
            self._pieces.clear()
            close_idle(self._source)
            raise

    def _fill(self) -> None:
        message = self._next()
        self.reading.check_open()
        if message is None:
            return
        header, body = message
        if body is not None:
            self._check_size(header, body)
        pieces = [header, _length.pack(len(header))]  # the older prefix saves a call of `read`
        self._pieces += pieces if body is None or not len(body) else [body, *pieces]

    def _check_size(self, header: bytes, body: Buffer) -> None:
        """Raise `error_type` if the decompressed body would be larger than `max_body`."""
        if header == self._uncompressed:  # most small batches have equal flatbuffers
            return
        try:
            if not is_compressed(header):
                self._uncompressed = header
                return
            misread, length = is_misread(header), uncompressed_length(header, body)
        except RemoteProtocolError:
            return  # libarrow will report the damage
        if misread:
            raise self._error_type(MISREAD)
        if length > self._max_body:
            raise self._error_type(
                f"a body of {len(body)} bytes would have {length} bytes when decompressed; at most {self._max_body} "
                "are accepted (max_body)"
            )

    def close(self) -> None:
        """Stop reading, and close the source. Reading on raises StoreError unless the stream had ended."""
        super().close()
        self.reading.close()
        close_idle(self._source)


class _MessageFile(StreamFile):
    """The file of a stream whose messages come one by one."""

    def __init__(self, messages: Messages, max_body: int, error_type: type[DissociatedError]) -> None:
        super().__init__(messages, max_body, error_type)
        self._messages = messages

    def _next(self) -> EncodedMessage:
        return next(self._messages)


def message_file(messages: Messages) -> pa.PythonFile:
    """Return the stream of `messages`, the schema first, as a file for libarrow."""
    return pa.PythonFile(_MessageFile(messages, MAX_BODY, RemoteProtocolError), mode="r")


def join(
    messages: Messages,
    options: ReadOptions | None = None,
    kind: type[StreamReader] = PeerReader,
    max_body: int = MAX_BODY,
) -> StreamReader:
    """Return a reader over the stream of `messages`, the schema first.

    The reader takes messages only when it is asked for a batch, and closes them when it is dropped or exhausted. Errors
    of `messages` are raised by the reader.

    Args:
        messages: The flatbuffers and bodies of the messages.
        options: The options of reading.
        kind: The class of the reader, which determines the type of its errors.
        max_body: The largest size of a decompressed body, in bytes. It is checked before decompression.

    Raises:
        RemoteProtocolError: The content is invalid, or a body is too large; or another error, of the `kind` of reader.
    """
    options = check_options(options, ReadOptions)
    return kind(_MessageFile(messages, max_body, kind.error_type), options)


class LeaseManager(Protocol):
    """An owner of delivered addresses. Each address goes through exactly one of these two methods, once."""

    def lease(self, memory: pa.Buffer, addresses: Sequence[int]) -> pa.Buffer:
        """Return the same memory as a buffer; `addresses` are given back when the buffer is freed."""

    def free(self, addresses: Sequence[int]) -> None:
        """Give back these addresses at once: nothing uses them."""


def attach(
    delivery: Delivery, address_space: AddressSpace, leases: LeaseManager, allocate: Callable[[int], pa.Buffer]
) -> EncodedMessage:
    """Return a message in the form that libarrow reads: libarrow reads bodies that came by address in their memory.

    The body of a message that came by address is the whole region, or all memory from the first of its regions to the
    last. The returned flatbuffer has the offsets of the buffers in that memory.

    Args:
        delivery: The message.
        address_space: The regions in which addresses may lie.
        leases: The owner of the addresses.
        allocate: A function that allocates memory of a size in bytes. A body whose buffers libarrow finds misaligned is
            copied there.

    Raises:
        RemoteProtocolError: An address leaves the regions of `address_space`.
    """
    _, header, parsed, body, placed, _ = delivery
    if placed is None:
        return header, body
    leased = delivery.leased
    if placed.is_empty:
        if leased:
            leases.free(leased)
        return (header if not parsed.body_length else relocate(header, parsed, [0] * len(placed.lengths), 0)), b""
    located = address_space.locate(placed.addresses, placed.lengths)
    # libarrow refuses misaligned buffers: copy them to their offsets in a packed body.
    if any(offset % 8 for offset in located.offsets):
        offsets, _ = buffer_extents(header, parsed)
        packed = located.gather(placed.lengths, offsets, allocate(parsed.body_length))
        leases.free(leased)
        return header, packed
    return relocate(header, parsed, located.offsets, located.memory.size), leases.lease(located.memory, leased)
