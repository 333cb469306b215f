"""Encapsulated messages: the format of IPC streams and files ("Encapsulated message format").

    4 bytes  continuation marker, all ones; libraries before 0.15 wrote none
    4 bytes  length of the metadata, padding included; 0 ends the stream
    the flatbuffer, its padding, the body

A file is such a stream between the magic `ARROW1`, padded to 8 bytes, and a footer. The footer is followed by its own
length and by the magic again.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from dissociated.errors import FormatError, RemoteProtocolError
from dissociated.format.message import MISREAD, Header, parse_header

CONTINUATION = b"\xff\xff\xff\xff"
END_OF_STREAM = CONTINUATION + b"\0\0\0\0"
FILE_MAGIC = b"ARROW1"
#: Bytes after the footer of a file: its length and the magic.
FOOTER_TAIL = 4 + len(FILE_MAGIC)

_marker = struct.Struct("<I")
_length = struct.Struct("<i")


class Encapsulated(NamedTuple):
    """A message in the memory of a stream or file: its flatbuffer, and the position of its body."""

    header: bytes
    parsed: Header
    body_at: int


def encapsulate(header: bytes, *, alignment: int = 8, legacy: bool = False, at: int = 0) -> bytes:
    """Return the bytes of an encapsulated message up to its body: marker, length, flatbuffer and padding.

    Args:
        header: The flatbuffer.
        alignment: The body's position is padded to a multiple of this many bytes.
        legacy: Leave out the continuation marker, as libraries before 0.15 do.
        at: Position at which the message begins.
    """
    marker = b"" if legacy else CONTINUATION
    padding = -(at + len(marker) + _length.size + len(header)) % alignment
    return marker + _length.pack(len(header) + padding) + header + bytes(padding)


def end_of_stream(legacy: bool = False) -> bytes:
    """Return the end-of-stream marker, a message without metadata.

    Args:
        legacy: Leave out the continuation marker, as libraries before 0.15 do.
    """
    return END_OF_STREAM[4:] if legacy else END_OF_STREAM


def encode_magic(at: int = 0) -> bytes:
    """Return the magic of a file that begins `at` this position. Padding aligns the first message to 8 bytes."""
    return FILE_MAGIC + bytes(-(at + len(FILE_MAGIC)) % 8)


def encode_footer(footer: bytes | bytearray) -> bytes:
    """Return the end of a file: the flatbuffer of the footer, its length, and the magic."""
    return bytes(footer) + _length.pack(len(footer)) + FILE_MAGIC


def first_message_at(memory: memoryview) -> int:
    """Return the position of the first message of an IPC stream or file. In a file, it follows the magic."""
    return 8 if bytes(memory[: len(FILE_MAGIC)]) == FILE_MAGIC else 0


def footer_at(memory: memoryview) -> int:
    """Return the position of an IPC file's footer.

    Raises:
        FormatError: The file is cut off, or its footer lies outside it.
    """
    tail = len(memory) - FOOTER_TAIL
    if tail < 8 or bytes(memory[-len(FILE_MAGIC) :]) != FILE_MAGIC:
        raise FormatError("the Arrow IPC file is cut off: the magic at its end is missing")
    begin: int = tail - _length.unpack_from(memory, tail)[0]
    if not 8 <= begin <= tail:
        raise FormatError("the Arrow IPC file has a footer that extends beyond the file")
    return begin


def message_at(memory: memoryview, at: int, end: int) -> Encapsulated | None:
    """Read the message that begins at byte `at`, without touching its body.

    Args:
        memory: The stream or file.
        at: Position of the message.
        end: Position that the message, body included, must not exceed.

    Returns:
        The message, or None if the stream ends there.

    Raises:
        FormatError: There is no message, or only a part of one, or libarrow would misread its body.
    """
    begin = at
    try:
        (length,) = _marker.unpack_from(memory, at)
        at += 4
        if length == 0xFFFFFFFF:
            (length,) = _marker.unpack_from(memory, at)
            at += 4
        if not length:
            return None
        body_at = at + length
        if body_at > end:
            raise FormatError(f"not an Arrow IPC stream, or cut off: the metadata at byte {at} extends beyond its end")
        header = bytes(memory[at:body_at])
        parsed = parse_header(header)
    except (struct.error, RemoteProtocolError):
        raise FormatError(f"not an Arrow IPC stream, or cut off: no message begins at byte {begin}") from None
    if parsed.misread:
        raise FormatError(MISREAD)
    if body_at + parsed.body_length > end:
        raise FormatError(f"the Arrow IPC stream is cut off: a body at byte {body_at} extends beyond its end")
    return Encapsulated(header, parsed, body_at)


def walk(memory: memoryview) -> Iterator[Encapsulated]:
    """Yield the messages of an IPC stream or file, in order of position, without touching a body.

    Raises:
        FormatError: `memory` is neither a stream nor a file, or is cut off.
    """
    at = first_message_at(memory)
    end = footer_at(memory) if at else len(memory)
    while at < end and (message := message_at(memory, at, end)) is not None:
        yield message
        at = message.body_at + message.parsed.body_length
