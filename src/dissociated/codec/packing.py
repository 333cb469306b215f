"""Layout of buffers in bodies beyond the options of libarrow: alignment, and a least saving of compression.

libarrow's own option of alignment pads only metadata: within bodies its buffers are aligned to 8 bytes. Our option pads
buffers, too.

A compressed buffer begins with its uncompressed size, an int64; -1 means that the rest of the buffer is not compressed
(Message.fbs, `BodyCompression`).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import accumulate

import pyarrow as pa

from dissociated.base.buffers import Buffer
from dissociated.codec.options import WriteOptions
from dissociated.format.message import Header, buffer_extents, relocate

_i64 = struct.Struct("<q")
_UNCOMPRESSED = _i64.pack(-1)

#: The flatbuffer, its parsed header, and the packed body in parts.
Packed = tuple[bytes, Header, list[Buffer]]


class Packing:
    """The requirements of `options` on bodies that libarrow does not implement."""

    def __init__(self, options: WriteOptions) -> None:
        self._alignment = options.alignment
        self._pool = options.memory_pool
        self._codec: pa.Codec | None = None
        if options.codec is not None and options.min_space_savings is not None:
            self._savings = options.min_space_savings
            self._codec = options.codec if isinstance(options.codec, pa.Codec) else pa.Codec(options.codec)

    @property
    def needed(self) -> bool:
        """Whether libarrow's bodies do not meet the options, so that `pack` must be called."""
        return self._alignment != 8 or self._codec is not None

    def pack(self, header: bytes, parsed: Header, body: Sequence[Buffer]) -> Packed:
        """Return the message with its buffers in a new layout. No buffer is copied."""
        offsets, lengths = buffer_extents(header, parsed)
        part_at = by_position(body)
        packed: list[Buffer] = []
        moved, sizes, end = [], [], 0
        for offset, length in zip(offsets, lengths, strict=True):
            parts = self._smaller(part_at[offset]) if length else []
            size = sum(map(len, parts))
            padding = -size % self._alignment
            packed += [*parts, bytes(padding)] if padding else parts
            moved.append(end)
            sizes.append(size)
            end += size + padding
        if end:  # a flatbuffer may omit a length of 0, which cannot be changed then
            header = relocate(header, parsed, moved, end, sizes)
        return header, parsed._replace(body_length=end), packed

    def _smaller(self, buffer: Buffer) -> list[Buffer]:
        """Return a non-empty buffer in parts, decompressed if compression saved too little."""
        if self._codec is None:
            return [buffer]
        (size,) = _i64.unpack_from(buffer)
        compressed = buffer.slice(_i64.size)
        if 1 - len(compressed) / size >= self._savings:
            return [buffer]
        return [_UNCOMPRESSED, self._codec.decompress(compressed, size, memory_pool=self._pool)]


def raw_size(header: bytes, parsed: Header, body: Sequence[Buffer], compressed: bool) -> int:
    """Return the total size of the buffers of a body before padding and compression, in bytes."""
    offsets, lengths = buffer_extents(header, parsed)
    if not compressed:
        return sum(lengths)
    part_at = by_position(body)
    total = 0
    for offset, length in zip(offsets, lengths, strict=True):
        if length:
            (size,) = _i64.unpack_from(part_at[offset])
            total += size if size >= 0 else length - _i64.size
    return total


def by_position(body: Sequence[Buffer]) -> dict[int, Buffer]:
    """Return the parts of a body by their positions. No part may be empty, and each buffer must begin a part."""
    return dict(zip(accumulate(map(len, body), initial=0), body, strict=False))
