"""The bytes that the specification defines: prefixes of metadata, tags of bodies, and lists of addresses.

A metadata message ("Metadata Stream Sequence") is a 5-byte prefix, then the flatbuffer:

    byte  0        kind of message: 0 end of stream, 1 Arrow IPC metadata
    bytes 1 to 4   sequence number, little-endian uint32
    then           the flatbuffer of an Arrow IPC `Message`; nothing in an end of stream

Other implementations do not pad the flatbuffer to 8 bytes, so nothing here relies on alignment.

A body message ("Data Stream Sequence") has a 64-bit tag:

    bits  0 to 31   sequence number of the metadata message that the body belongs to
    bits 32 to 55   reserved, must be 0
    bits 56 to 63   kind of body

The specification's diagram shifts the kind by 55; its prose says bits 56 to 63. The prose is authoritative.

"If a sequence number reaches UINT32_MAX, it should be allowed to roll over". Both roles count messages without bound,
and truncate the number only on the wire.

A body of kind 1 is an address list of little-endian uint64: the total size of all buffers, the number of buffers, and
then, for each buffer of the message in order, its address and its length. We send (0, 0) for an absent or empty buffer.
A peer may send an address with the length 0; the client gives it back like any other. A peer's total may include
padding.

A free_data list holds one or more addresses that the client no longer needs. A 0 in it has no meaning. With
`frees=messages`, it holds numbers of messages instead, which are not truncated.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from enum import Flag, IntEnum
from functools import lru_cache
from typing import NamedTuple

from dissociated.errors import LocalProtocolError, RemoteProtocolError

#: "the tag mask of 0x00000000FFFFFFFF should be used alongside the sequence number to match the message"
SEQUENCE_MASK = 0x0000_0000_FFFF_FFFF
_HALF = 1 << 31
#: "All unspecified bits (bits 32 - 55) of the tag are reserved [...] they MUST be 0."
RESERVED_MASK = 0x00FF_FFFF_0000_0000
#: "The most significant byte (bits 56 - 63) of the tag indicates the message body type"
KIND_SHIFT = 56
_PREFIX = struct.Struct("<BI")
PREFIX_SIZE = _PREFIX.size
#: Size of an address on the wire, in bytes.
ADDRESS_SIZE = 8
_MOST_ALIGNED = 64  # "Buffers [...] should be padded to a multiple of 8 or 64 bytes"
_HEAD = struct.Struct("<QQ")


class Streams(Flag):
    """The streams that travel on a connection: metadata, bodies, or both."""

    METADATA = 1
    BODIES = 2
    BOTH = 3


# Metadata


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


# Tags of bodies


class BodyKind(IntEnum):
    """The content of a body message."""

    #: "the raw body buffer bytes as a packed buffer (i.e. the standard IPC format body bytes)"
    PACKED = 0
    #: "a series of unsigned, little-endian 64-bit integer pairs to represent either shared or remote memory"
    ADDRESSES = 1


_KINDS = {int(kind): kind for kind in BodyKind}


def body_tag(kind: BodyKind, sequence: int) -> int:
    """Return the tag of the body of message number `sequence`, of which the low 32 bits are sent."""
    return kind << KIND_SHIFT | sequence & SEQUENCE_MASK


def parse_body_tag(tag: int) -> tuple[BodyKind, int]:
    """Return the kind and the 32-bit sequence number in `tag`.

    Raises:
        RemoteProtocolError: The kind is unknown, or a reserved bit is set.
    """
    if tag & RESERVED_MASK:
        raise RemoteProtocolError(f"the peer set reserved bits in the body tag {tag:#018x}", rule="tag-reserved")
    kind = _KINDS.get(tag >> KIND_SHIFT)
    if kind is None:
        raise RemoteProtocolError(
            f"the peer sent a body of unknown kind {tag >> KIND_SHIFT} (tag {tag:#018x})", rule="tag-kind"
        )
    return kind, tag & SEQUENCE_MASK


def unwrap(sequence: int, near: int) -> int:
    """Return the count closest to `near` whose low 32 bits are `sequence`. It may be negative.

    It is the right count if the two sides are less than 2^31 messages apart (RFC 1982, serial number arithmetic).
    """
    distance = (sequence - near) & SEQUENCE_MASK
    return near + distance if distance < _HALF else near + distance - (SEQUENCE_MASK + 1)


# Lists of addresses


@lru_cache(maxsize=256)
def _uint64s(count: int) -> struct.Struct:
    return struct.Struct(f"<{count}Q")


class AddressList(NamedTuple):
    """Positions of a message's buffers: `addresses[i]` and `lengths[i]` (in bytes) belong to buffer i."""

    addresses: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def leased(self) -> tuple[int, ...]:
        """Return the addresses that must be given back: all but the 0 of an empty buffer."""
        if all(self.lengths):
            return self.addresses
        return tuple(address for address, length in zip(self.addresses, self.lengths, strict=True) if length or address)

    @property
    def is_empty(self) -> bool:
        """Return whether all buffers are empty."""
        return not any(self.lengths)


def encode_addresses(extents: Iterable[tuple[int, int]]) -> bytes:
    """Encode a body of kind 1 from (address, length) pairs, one for each buffer of the message, in order."""
    flat = [number for address, length in extents for number in ((address, length) if length else (0, 0))]
    return _uint64s(2 + len(flat)).pack(sum(flat[1::2]), len(flat) // 2, *flat)


def leased_addresses(extents: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    """Return the addresses that a client must give back after `encode_addresses`: those of buffers with bytes."""
    return tuple(address for address, length in extents if length)


def parse_addresses(body: bytes, body_length: int = 0) -> AddressList:
    """Parse a body of kind 1.

    Args:
        body: The body.
        body_length: Length of the packed body that the metadata announced, in bytes.

    Returns:
        The addresses and lengths of the buffers.

    Raises:
        RemoteProtocolError: The number of buffers does not fit the body's size, or the total is wrong. The total must
            be the sum of the lengths; it may include padding, up to `body_length` or up to a multiple of 64 bytes for
            each buffer.
    """
    if len(body) < _HEAD.size:
        raise RemoteProtocolError(
            f"the peer sent an address list of {len(body)} bytes; its two totals alone need 16", rule="list-length"
        )
    total, count = _HEAD.unpack_from(body)
    if len(body) != _HEAD.size + count * _HEAD.size:
        raise RemoteProtocolError(
            f"the peer sent an address list of {len(body)} bytes for {count} buffers", rule="list-length"
        )
    flat = _uint64s(2 * count).unpack_from(body, _HEAD.size)
    addresses, lengths = flat[0::2], flat[1::2]
    if total != sum(lengths) and not sum(lengths) < total <= max(body_length, sum(map(_padded, lengths))):
        raise RemoteProtocolError(
            f"the peer sent an address list whose total is {total} bytes, but its buffers have {sum(lengths)}",
            rule="list-total",
        )
    return AddressList(addresses, lengths)


def _padded(length: int) -> int:
    return length + -length % _MOST_ALIGNED


def encode_free(freed: Sequence[int]) -> bytes:
    """Encode the body of a free_data message ("one or more unsigned, little-endian 64-bit integers").

    Raises:
        LocalProtocolError: `freed` is empty.
    """
    if not freed:
        raise LocalProtocolError("a free_data message needs at least one address")
    return _uint64s(len(freed)).pack(*freed)


def parse_free(body: bytes) -> tuple[int, ...]:
    """Parse the addresses, or the numbers of messages, in the body of a free_data message.

    Raises:
        RemoteProtocolError: The body is empty, or its length is no multiple of 8.
    """
    if not body or len(body) % ADDRESS_SIZE:
        raise RemoteProtocolError(
            f"the peer sent a free_data message of {len(body)} bytes, which is not one or more uint64",
            rule="free-length",
        )
    return _uint64s(len(body) // ADDRESS_SIZE).unpack(body)
