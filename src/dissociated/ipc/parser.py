"""A parser that cuts a stream, which arrives in pieces of any size, into its encapsulated messages without a copy.

start     4 bytes: `ARRO`, the beginning of a file, whose messages follow 4 bytes later; or a `prefix`
prefix    4 bytes: the continuation marker; or, before 0.15, the length of the metadata; 0 ends the stream
length    4 bytes: the length of the metadata; 0 ends the stream
metadata  the metadata, of this length
body      the body, of the length that the metadata has
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import pyarrow as pa

from dissociated.base.buffers import Buffer
from dissociated.errors import FormatError, RemoteProtocolError
from dissociated.format.encapsulated import CONTINUATION, FILE_MAGIC, encode_magic
from dissociated.format.message import HeaderType, parse_envelope

_length = struct.Struct("<i")
_marker_and_length = struct.Struct("<ii")
_MARKER_SIZE = 4
#: The bytes that are allocated at first for a part that arrives in pieces.
_AT_FIRST = 1 << 20
_FILE_BEGINNING = encode_magic()


class ParsedMessage(NamedTuple):
    """A message. The end of the stream is a message without type and with empty metadata, as on the wire."""

    type: HeaderType | None
    header: Buffer
    body: Buffer | None


END = ParsedMessage(None, b"", None)


def as_bytes(data: Buffer) -> memoryview:
    """Return a view of the bytes of a buffer. Raises TypeError if it is not C-contiguous."""
    view = memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")


class InputChunk:
    """A piece of input, and the position up to which it was consumed."""

    __slots__ = ("at", "bytes")

    def __init__(self, data: Buffer) -> None:
        self.bytes = as_bytes(data)
        self.at = 0

    def take(self, size: int) -> memoryview:
        """Return a view of the next bytes, at most `size`, and consume them."""
        start, self.at = self.at, min(self.at + size, len(self.bytes))
        return self.bytes[start : self.at]


class _PartialPart:
    """A part that arrives in several pieces.

    The allocated memory grows with the bytes that have arrived, and does not depend on the announced length.
    """

    def __init__(self, size: int, pool: pa.MemoryPool | None) -> None:
        self._size = size
        self._memory = pa.allocate_buffer(min(size, _AT_FIRST), pool, resizable=True)
        self._view = as_bytes(self._memory)
        self.arrived = 0

    def add(self, piece: memoryview) -> memoryview | None:
        """Add a piece. Return the whole part if this was its last piece, and None otherwise."""
        end = self.arrived + len(piece)
        if end > len(self._view):
            self._memory.resize(min(self._size, max(end, 2 * len(self._view))))
            self._view = as_bytes(self._memory)
        self._view[self.arrived : end] = piece
        self.arrived = end
        return self._view if end == self._size else None


#: A method of StreamParser that handles an awaited part.
_ParseStep: TypeAlias = "Callable[[StreamParser, memoryview], ParsedMessage | None]"


class StreamParser:
    """A parser of one stream.

    Only parts of a message that arrive in several pieces are copied, into memory of `pool`. Metadata of more than
    `max_metadata` bytes, and bodies of more than `max_body` bytes, are refused as soon as they are announced.
    """

    def __init__(self, max_metadata: int, max_body: int, pool: pa.MemoryPool | None = None) -> None:
        self._max_metadata = max_metadata
        self._max_body = max_body
        self._pool = pool
        self._step: _ParseStep = StreamParser._start  # a bound method would be a reference cycle
        self._size = _MARKER_SIZE  # the size of the awaited part
        self._joined: _PartialPart | None = None  # the awaited part, if it arrives in several pieces
        self._type: HeaderType | None = None
        self._header: Buffer = b""  # the metadata of the message whose body is awaited
        self._cut = 0  # the number of messages so far

    @property
    def required(self) -> int:
        """The number of bytes that complete the awaited part; 0 after the end of the stream."""
        return self._size - (self._joined.arrived if self._joined else 0)

    def parse(self, piece: InputChunk) -> ParsedMessage | None:
        """Consume the bytes of `piece` that belong to the next message.

        Bytes after the end of the stream are consumed and ignored.

        Returns:
            The message, or None if more bytes are needed.

        Raises:
            FormatError: The bytes are no IPC stream.
        """
        while self._size:
            if self._step is StreamParser._prefix and (message := self._at_once(piece)) is not None:
                return message
            part = piece.take(self.required)
            if len(part) < self._size:
                whole = self._join(part)
                if whole is None:
                    return None
                part = whole
            message = self._step(self, part)
            if message is not None:
                return message
        piece.take(len(piece.bytes))
        return None

    def _at_once(self, piece: InputChunk) -> ParsedMessage | None:
        """Return the next message in one step if all of it lies in `piece`. Return None in all other cases."""
        view, at = piece.bytes, piece.at + 2 * _MARKER_SIZE
        if self._joined or at > len(view):
            return None
        marker, length = _marker_and_length.unpack_from(view, piece.at)
        body_at = at + length
        if marker != -1 or not 0 < length <= self._max_metadata or body_at > len(view):
            return None
        header = view[at:body_at]
        type_, body_length = self._envelope(header)
        end = body_at + body_length
        if end > len(view):
            return None
        piece.at = end
        self._cut += 1
        return ParsedMessage(type_, header, view[body_at:end] if body_length else None)

    def _join(self, part: memoryview) -> memoryview | None:
        if not part:
            return None
        if self._joined is None:
            self._joined = _PartialPart(self._size, self._pool)
        whole = self._joined.add(part)
        if whole is not None:
            self._joined = None
        return whole

    def _await(self, step: _ParseStep, size: int) -> None:
        self._step, self._size = step, size

    def _start(self, part: memoryview) -> ParsedMessage | None:
        if part == _FILE_BEGINNING[:_MARKER_SIZE]:
            self._await(StreamParser._magic, len(_FILE_BEGINNING) - _MARKER_SIZE)
            return None
        return self._prefix(part)

    def _magic(self, part: memoryview) -> None:
        if part[:2] != FILE_MAGIC[_MARKER_SIZE:]:
            raise FormatError(
                "the data is neither an Arrow IPC stream nor a file: only its beginning looks like a file"
            )
        self._await(StreamParser._prefix, _MARKER_SIZE)

    def _prefix(self, part: memoryview) -> ParsedMessage | None:
        if part == CONTINUATION:
            self._await(StreamParser._length, _length.size)
            return None
        return self._length(part)

    def _length(self, part: memoryview) -> ParsedMessage | None:
        (length,) = _length.unpack(part)
        if not length:
            self._await(StreamParser._prefix, 0)
            return END
        if length < 0:
            raise FormatError(
                f"the data is not an Arrow IPC stream: message {self._cut} begins with {bytes(part).hex(' ')}"
            )
        if length > self._max_metadata:
            raise FormatError(
                f"message {self._cut} announces metadata of {length} bytes; at most {self._max_metadata} are "
                "accepted (max_metadata)"
            )
        self._await(StreamParser._metadata, length)
        return None

    def _metadata(self, part: memoryview) -> ParsedMessage | None:
        self._type, body_length = self._envelope(part)
        self._header = part
        if not body_length:
            return self._body(None)
        self._await(StreamParser._body, body_length)
        return None

    def _envelope(self, header: memoryview) -> tuple[HeaderType, int]:
        try:
            type_, body_length = parse_envelope(header)
        except RemoteProtocolError:
            raise FormatError(f"the metadata of message {self._cut} is not an Arrow IPC message") from None
        if body_length > self._max_body:
            raise FormatError(
                f"message {self._cut} announces a body of {body_length} bytes; at most {self._max_body} are accepted "
                "(max_body)"
            )
        return type_, body_length

    def _body(self, part: memoryview | None) -> ParsedMessage:
        self._await(StreamParser._prefix, _MARKER_SIZE)
        self._cut += 1
        header, self._header = self._header, b""  # the input is released as soon as possible
        return ParsedMessage(self._type, header, part)

    def end(self) -> bool:
        """End the input. Return whether this ends the stream, and False if the stream had ended before.

        Raises FormatError within a message.
        """
        if not self._size:
            return False
        if self._joined or self._step not in (StreamParser._start, StreamParser._prefix):
            raise FormatError(
                f"the Arrow IPC stream is cut off: {self.required} bytes of message {self._cut} are missing"
            )
        self._await(StreamParser._prefix, 0)
        return True
