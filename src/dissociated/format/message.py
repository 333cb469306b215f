"""The fields of an Arrow IPC `Message` (Message.fbs) that pairing metadata with bodies needs. libarrow reads the rest.

These are the type of the message, the length of its body, and the table of its buffers. The length and the table are
plain scalars and structs, so that `relocate` can overwrite them in a copy. Every offset comes from a peer and is
checked before it is followed.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from itertools import pairwise
from typing import NamedTuple

from dissociated.base.buffers import Buffer
from dissociated.errors import FormatError, RemoteProtocolError
from dissociated.format.flatbuffer import fields, follow
from dissociated.format.tensor import sparse_buffers

_u32 = struct.Struct("<I").unpack_from
_i16 = struct.Struct("<h").unpack_from
_i64 = struct.Struct("<q")
_read_i64 = _i64.unpack_from

#: Most buffers that a message may have, far more than libarrow ever writes.
MAX_BUFFERS = 1 << 24

#: MetadataVersion of Schema.fbs.
V5 = 4
#: Why a message is refused that is `misread`.
MISREAD = (
    "a body is compressed and its metadata is older than V5, so that libarrow would take compressed bytes for values: "
    "write it with metadata version V5, or without compression"
)

_BUFFER_SIZE = 16  # struct Buffer { offset: long; length: long; }
_NODE_SIZE = 16  # struct FieldNode { length: long; null_count: long; }


class HeaderType(IntEnum):
    """The union `MessageHeader` of Message.fbs."""

    SCHEMA = 1
    DICTIONARY_BATCH = 2
    RECORD_BATCH = 3
    TENSOR = 4
    SPARSE_TENSOR = 5


_TYPES = {int(type_): type_ for type_ in HeaderType}
#: Key of custom metadata by which Arrow 0.17 marks a compressed body. libarrow still reads it.
_OLD_COMPRESSION = b"ARROW:experimental_compression"


class Header(NamedTuple):
    """The parsed fields of a message's flatbuffer, and their positions in it."""

    type: HeaderType
    #: length of the body in bytes, padding included
    body_length: int
    #: position of `Message.bodyLength`, -1 if the flatbuffer leaves it out because it is 0
    body_length_at: int
    #: position of the first `Buffer` struct
    buffers_at: int
    buffer_count: int
    #: offsets and lengths of the buffers of a sparse tensor, which are not in one table; None for other messages
    sparse_extents: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    #: whether libarrow would take compressed bytes for values: before V5 it ignores `RecordBatch.compression`
    misread: bool = False

    @property
    def is_tensor(self) -> bool:
        """Return whether the message is a tensor, dense or sparse. Tensors belong to no schema."""
        return self.type is HeaderType.TENSOR or self.type is HeaderType.SPARSE_TENSOR

    @property
    def has_body(self) -> bool:
        """Return whether the message has a body. The type decides: an empty batch still has a body, of length 0."""
        return self.type is not HeaderType.SCHEMA


def parse_header(header: Buffer) -> Header:
    """Read the flatbuffer of a `Message`.

    Raises:
        RemoteProtocolError: The bytes are not a valid message.
    """
    try:
        return _parse(header)
    except (struct.error, IndexError) as error:
        raise no_message(error) from None


def parse_envelope(header: Buffer) -> tuple[HeaderType, int]:
    """Read only the type of a `Message` and the length of its body in bytes, which is faster than `parse_header`.

    Raises:
        RemoteProtocolError: The bytes are not a valid message.
    """
    try:
        return _envelope(header)[:2]
    except (struct.error, IndexError) as error:
        raise no_message(error) from None


def no_message(error: Exception) -> RemoteProtocolError:
    """Return the error that says that bytes are not the metadata of a message."""
    return RemoteProtocolError(
        f"the peer sent metadata that is not an Arrow IPC message ({error})", rule="metadata-message"
    )


def _envelope(header: bytes) -> tuple[HeaderType, int, int, int]:
    """Return type and body length, and the positions of the body length (0 if left out) and of the type's table."""
    root = _u32(header)[0]
    _, type_at, table_at, length_at = fields(header, root, 4)
    type_ = _TYPES.get(header[root + type_at]) if type_at else None
    if type_ is None or not table_at:
        raise RemoteProtocolError(
            f"the peer sent an Arrow IPC message of unknown type {header[root + type_at] if type_at else 0}",
            rule="metadata-message",
        )
    body_length = _read_i64(header, root + length_at)[0] if length_at else 0
    if body_length < 0:
        raise RemoteProtocolError(f"the peer announced a body of {body_length} bytes", rule="metadata-message")
    return type_, body_length, length_at and root + length_at, root + table_at


def _parse(header: bytes) -> Header:
    type_, body_length, length_at, table_at = _envelope(header)
    body_length_at = length_at or -1
    if type_ is HeaderType.SCHEMA:
        if body_length:
            raise RemoteProtocolError(
                f"the peer announced a body of {body_length} bytes for a schema", rule="schema-body"
            )
        return Header(type_, 0, body_length_at, 0, 0)
    table = follow(header, table_at)
    if type_ is HeaderType.SPARSE_TENSOR:
        try:
            scattered = sparse_buffers(header, table)
        except FormatError as error:
            raise RemoteProtocolError(
                f"the peer sent a sparse tensor that cannot be read: {error}", rule="metadata-message"
            ) from None
        return Header(type_, body_length, body_length_at, 0, len(scattered[0]), scattered)
    if type_ is HeaderType.DICTIONARY_BATCH:
        _, batch_at = fields(header, table, 2)
        if not batch_at:
            raise RemoteProtocolError("the peer sent a dictionary batch without data", rule="metadata-message")
        table = follow(header, table + batch_at)
    at, count = _buffers(header, table, type_)
    if type_ is HeaderType.TENSOR or not fields(header, table, 4)[3]:
        return Header(type_, body_length, body_length_at, at, count)
    return Header(type_, body_length, body_length_at, at, count, misread=is_before_v5(header))


def is_before_v5(header: Buffer) -> bool:
    """Return whether the metadata version of a valid message is older than V5."""
    root = _u32(header)[0]
    version_at = fields(header, root, 1)[0]
    return not version_at or bool(_i16(header, root + version_at)[0] < V5)


def is_misread(header: Buffer) -> bool:
    """Return whether these bytes are a message that is `misread`. libarrow refuses bytes that are no message."""
    try:
        return is_before_v5(header) and _parse(header).misread
    except (struct.error, IndexError, RemoteProtocolError):
        return False


def _buffers(header: bytes, table: int, type_: HeaderType) -> tuple[int, int]:
    """Return the position and the number of the buffer structs of a record batch or dense tensor."""
    if type_ is HeaderType.TENSOR:  # Tensor { type_type, type, shape, strides, data: Buffer }
        at, count = table + fields(header, table, 5)[4], 1
        absent = at == table
    else:  # RecordBatch { length, nodes, buffers: [Buffer], ... }
        vector_at = fields(header, table, 3)[2]
        if not vector_at:
            return 0, 0
        vector = follow(header, table + vector_at)
        at, count, absent = vector + 4, _u32(header, vector)[0], False
    if absent or count > MAX_BUFFERS or at + count * _BUFFER_SIZE > len(header):
        raise RemoteProtocolError(
            f"the peer sent metadata whose {count} buffers lie outside the message", rule="metadata-message"
        )
    return at, count


def buffer_extents(header: bytes, parsed: Header) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the offsets and the lengths, in bytes, of the message's buffers within its packed body."""
    if parsed.sparse_extents is not None:
        return parsed.sparse_extents
    flat = struct.unpack_from(f"<{2 * parsed.buffer_count}q", header, parsed.buffers_at)
    return flat[0::2], flat[1::2]


def extents_within(header: bytes, parsed: Header, size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the offsets and the lengths of the message's buffers, after checking that they lie in its packed body.

    Args:
        header: The flatbuffer of the message.
        parsed: Its positions.
        size: Size of the body, in bytes.

    Raises:
        RemoteProtocolError: A buffer lies outside the body.
    """
    offsets, lengths = buffer_extents(header, parsed)
    for offset, length in zip(offsets, lengths, strict=True):
        if length and not 0 <= offset <= size - length:
            raise RemoteProtocolError(
                f"a buffer at {offset} of {length} bytes extends beyond its body of {size} bytes",
                rule="metadata-message",
            )
    return offsets, lengths


def is_compressed(header: bytes) -> bool:
    """Return whether the message is a record batch or dictionary batch with compressed buffers."""
    try:
        root = _u32(header)[0]
        _, type_at, table_at = fields(header, root, 3)
        type_ = _TYPES.get(header[root + type_at])
        if type_ not in (HeaderType.RECORD_BATCH, HeaderType.DICTIONARY_BATCH):
            return False
        table = follow(header, root + table_at)
        if type_ is HeaderType.DICTIONARY_BATCH:
            table = follow(header, table + fields(header, table, 2)[1])
        return fields(header, table, 4)[3] != 0 or _OLD_COMPRESSION in header
    except (struct.error, IndexError) as error:
        raise no_message(error) from None


def uncompressed_length(header: bytes, body: Buffer) -> int:
    """Return the total size, in bytes, that the buffers of a compressed `body` announce for their decompressed content.

    Each buffer begins with that size, or with -1 if it is not compressed.
    """
    parsed, memory, total = parse_header(header), memoryview(body), 0
    for offset, length in zip(*buffer_extents(header, parsed), strict=True):
        if length >= _i64.size and 0 <= offset <= len(memory) - _i64.size:
            declared = int(_read_i64(memory, offset)[0])
            total += length if declared < 0 else declared
    return total


def relocate(
    header: bytes, parsed: Header, offsets: Sequence[int], body_length: int, lengths: Sequence[int] | None = None
) -> bytes:
    """Return a copy of the flatbuffer in which the buffers lie at `offsets` within a body of `body_length` bytes.

    This is how bodies by reference reach libarrow: the whole region serves as the body. Tensors are not relocated:
    their buffers are sliced from the region individually.

    Args:
        header: The flatbuffer of the message.
        parsed: Its positions.
        offsets: New offset of each buffer, in bytes.
        body_length: New length of the body, in bytes.
        lengths: New length of each buffer; None keeps the lengths.

    Raises:
        RemoteProtocolError: The flatbuffer leaves out the body length, as libarrow does for an empty batch, but has
            buffers with bytes.
    """
    if parsed.body_length_at < 0:
        if any(buffer_extents(header, parsed)[1]):
            raise RemoteProtocolError(
                "the peer sent buffers in a message that announced no body", rule="metadata-message"
            )
        return header
    copy = bytearray(header)
    _i64.pack_into(copy, parsed.body_length_at, body_length)
    flat = list(struct.unpack_from(f"<{2 * parsed.buffer_count}q", copy, parsed.buffers_at))
    flat[0::2] = offsets
    if lengths is not None:
        flat[1::2] = lengths
    struct.pack_into(f"<{len(flat)}q", copy, parsed.buffers_at, *flat)
    return bytes(copy)


def varying_ranges(header: bytes, parsed: Header) -> list[tuple[int, int]]:
    """Return the byte ranges (begin, end) of a record batch's flatbuffer that differ between batches of one layout.

    These ranges hold the row count, the lengths and null counts of the columns, the buffers, and the body length. The
    result is empty for other messages, and if a scalar is left out or ranges overlap.
    """
    if parsed.type is not HeaderType.RECORD_BATCH or parsed.body_length_at < 0:
        return []
    try:
        root = _u32(header)[0]
        table = follow(header, root + fields(header, root, 3)[2])
        length_at, nodes_at = fields(header, table, 2)
        if not length_at or not nodes_at:
            return []
        nodes = follow(header, table + nodes_at)
        spans = [
            (parsed.body_length_at, parsed.body_length_at + 8),
            (table + length_at, table + length_at + 8),
            (nodes + 4, nodes + 4 + _NODE_SIZE * _u32(header, nodes)[0]),
            (parsed.buffers_at, parsed.buffers_at + _BUFFER_SIZE * parsed.buffer_count),
        ]
        ordered = sorted(spans)
        apart = all(end <= begin for (_, end), (begin, _) in pairwise(ordered))
        return spans if apart and ordered[-1][1] <= len(header) else []
    except (struct.error, IndexError):
        return []


def row_count(header: bytes) -> int:
    """Return the number of rows of a record batch message, 0 for other messages.

    Raises:
        RemoteProtocolError: `header` is not a message.
    """
    at = row_count_at(header)
    return 0 if at is None else int(_read_i64(header, at)[0])


def row_count_at(header: bytes) -> int | None:
    """Return the position of the number of rows of a record batch message.

    Returns:
        The position in `header`; None if the message is of another type, or leaves the number out because it is 0.

    Raises:
        RemoteProtocolError: `header` is not a message.
    """
    try:
        root = _u32(header)[0]
        _, type_at, table_at = fields(header, root, 3)
        if not type_at or header[root + type_at] != HeaderType.RECORD_BATCH:
            return None
        table = follow(header, root + table_at)
        length_at = fields(header, table, 1)[0]
        if not length_at:
            return None
        _read_i64(header, table + length_at)
        return table + length_at
    except (struct.error, IndexError) as error:
        raise no_message(error) from None
