"""Messages of the metadata stream: a 5-byte prefix, then the flatbuffer ("Metadata Stream Sequence").

    byte  0        kind of message: 0 end of stream, 1 Arrow IPC metadata
    bytes 1 to 4   sequence number, little-endian uint32
    then           the flatbuffer of an Arrow IPC `Message`; nothing in an end of stream

Other implementations do not pad the flatbuffer to 8 bytes, so nothing here relies on alignment.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from dissociated.errors import RemoteProtocolError
from dissociated.protocol.tags import SEQUENCE_MASK

_PREFIX = struct.Struct("<BI")
PREFIX_SIZE = _PREFIX.size


class MetadataKind(IntEnum):
    """The first byte of a metadata message."""

    END_OF_STREAM = 0
    MESSAGE = 1


class MetadataMessage(NamedTuple):
    """A parsed metadata message. `header` is the flatbuffer; it is empty in an end of stream."""

    kind: MetadataKind
    sequence: int
    header: bytes


def encode_prefix(sequence: int) -> bytes:
    """Encode the five bytes before the flatbuffer of message number `sequence`, of which the low 32 bits are sent."""
    return _PREFIX.pack(MetadataKind.MESSAGE, sequence & SEQUENCE_MASK)


def encode_end_of_stream(count: int) -> bytes:
    """Encode the end-of-stream message after `count` metadata messages. It carries the next sequence number."""
    return _PREFIX.pack(MetadataKind.END_OF_STREAM, count & SEQUENCE_MASK)


def parse_metadata(message: bytes) -> MetadataMessage:
    """Parse a metadata message.

    Raises:
        RemoteProtocolError: The message is not one that the specification defines.
    """
    if len(message) < PREFIX_SIZE:
        raise RemoteProtocolError(
            f"the peer sent a metadata message of {len(message)} bytes; the prefix alone needs 5",
            rule="metadata-prefix",
        )
    kind, sequence = _PREFIX.unpack_from(message)
    if kind == MetadataKind.MESSAGE:
        return MetadataMessage(MetadataKind.MESSAGE, sequence, message[PREFIX_SIZE:])
    if kind != MetadataKind.END_OF_STREAM:
        raise RemoteProtocolError(f"the peer sent a metadata message of unknown kind {kind}", rule="metadata-prefix")
    if len(message) != PREFIX_SIZE:
        raise RemoteProtocolError(
            f"the peer sent an end of stream of {len(message)} bytes instead of exactly 5", rule="end-length"
        )
    return MetadataMessage(MetadataKind.END_OF_STREAM, sequence, b"")
