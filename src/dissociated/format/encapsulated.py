"""Encapsulated messages: the format of IPC streams and files ("Encapsulated message format").

    4 bytes  continuation marker, all ones; absent in what libraries before 0.15 wrote
    4 bytes  length of the metadata, with padding; 0 ends the stream
    the flatbuffer, its padding, the body

A file is such a stream between the magic `ARROW1` (padded to 8 bytes) and a footer, which ends in its own length
and the magic again.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from dissociated.errors import FormatError, RemoteProtocolError
from dissociated.format.message import Header, parse_header

CONTINUATION = b"\xff\xff\xff\xff"
END_OF_STREAM = CONTINUATION + b"\0\0\0\0"
FILE_MAGIC = b"ARROW1"
#: What follows the footer of a file: its length and the magic.
FOOTER_TAIL = 4 + len(FILE_MAGIC)

_marker = struct.Struct("<I")
_length = struct.Struct("<i")


class Encapsulated(NamedTuple):
    """One message where it lies: its flatbuffer, and where its body begins."""

    header: bytes
    parsed: Header
    body_at: int


def encapsulate(header: bytes, *, alignment: int = 8, legacy: bool = False, at: int = 0) -> bytes:
    """The flatbuffer with everything that stands before the body.

    It is padded so that the body is aligned to so many bytes, where the whole lies `at` that position. `legacy` is
    what libraries before 0.15 wrote: no continuation marker.
    """
    marker = b"" if legacy else CONTINUATION
    padding = -(at + len(marker) + _length.size + len(header)) % alignment
    return marker + _length.pack(len(header) + padding) + header + bytes(padding)


def end_of_stream(legacy: bool = False) -> bytes:
    """What ends a stream: a message without metadata."""
    return END_OF_STREAM[4:] if legacy else END_OF_STREAM


def encode_magic(at: int = 0) -> bytes:
    """What begins a file `at` this position: the magic, padded so that the first message is aligned to 8 bytes."""
    return FILE_MAGIC + bytes(-(at + len(FILE_MAGIC)) % 8)


def encode_footer(footer: bytes | bytearray) -> bytes:
    """What ends a file: the flatbuffer of the footer, its length, the magic."""
    return bytes(footer) + _length.pack(len(footer)) + FILE_MAGIC


def first_message_at(memory: memoryview) -> int:
    """Where the first message of an IPC stream or file begins: a file has its magic before it."""
    return 8 if bytes(memory[: len(FILE_MAGIC)]) == FILE_MAGIC else 0


def footer_at(memory: memoryview) -> int:
    """Where the footer of an IPC file begins. Raises FormatError for a file that is cut off."""
    tail = len(memory) - FOOTER_TAIL
    if tail < 8 or bytes(memory[-len(FILE_MAGIC) :]) != FILE_MAGIC:
        raise FormatError("the Arrow IPC file is cut off: it does not end with its magic")
    begin: int = tail - _length.unpack_from(memory, tail)[0]
    if not 8 <= begin <= tail:
        raise FormatError("the Arrow IPC file has a footer that lies outside it")
    return begin


def message_at(memory: memoryview, at: int, end: int) -> Encapsulated | None:
    """The message that begins at byte `at` and must lie before `end`; None where the stream ends there.

    Its body is not touched. Raises FormatError where there is no message, or a part of one.
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
            raise FormatError(f"not an Arrow IPC stream, or cut off: metadata at byte {at} leaves its end")
        header = bytes(memory[at:body_at])
        parsed = parse_header(header)
    except (struct.error, RemoteProtocolError):
        raise FormatError(f"not an Arrow IPC stream, or cut off: there is no message at byte {begin}") from None
    if body_at + parsed.body_length > end:
        raise FormatError(f"the Arrow IPC stream is cut off: a body at byte {body_at} leaves its end")
    return Encapsulated(header, parsed, body_at)


def walk(memory: memoryview) -> Iterator[Encapsulated]:
    """The messages of an IPC stream or file, in order of position. No body is touched.

    Raises FormatError for anything else, and for one that is cut off in the middle.
    """
    at = first_message_at(memory)
    end = footer_at(memory) if at else len(memory)
    while at < end and (message := message_at(memory, at, end)) is not None:
        yield message
        at = message.body_at + message.parsed.body_length
