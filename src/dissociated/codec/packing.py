"""How buffers lie in a body where libarrow cannot be told: aligned, and compressed only where that saves enough.

libarrow's own option of alignment pads metadata alone: within its bodies buffers lie aligned to 8 bytes whatever one
asks for. "Write padding after memory buffers up to this multiple of bytes" is done here.

A compressed buffer begins with its size before, an int64; -1 there says that what follows is not compressed
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

#: The flatbuffer, what pairing needs from it, and the packed body in parts.
Packed = tuple[bytes, Header, list[Buffer]]


class Packing:
    """What `options` want of bodies and libarrow does not do."""

    def __init__(self, options: WriteOptions) -> None:
        self._alignment = options.alignment
        self._pool = options.memory_pool
        self._codec: pa.Codec | None = None
        if options.codec is not None and options.min_space_savings is not None:
            self._savings = options.min_space_savings
            self._codec = options.codec if isinstance(options.codec, pa.Codec) else pa.Codec(options.codec)

    @property
    def needed(self) -> bool:
        """Whether bodies as libarrow gives them are not what is wanted."""
        return self._alignment != 8 or self._codec is not None

    def pack(self, header: bytes, parsed: Header, body: Sequence[Buffer]) -> Packed:
        """The same message with its buffers laid out anew. None is copied."""
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
        if end:  # a flatbuffer may leave a length of 0 out
            header = relocate(header, parsed, moved, end, sizes)
        return header, parsed._replace(body_length=end), packed

    def _smaller(self, buffer: Buffer) -> list[Buffer]:
        """A buffer that is not empty as it is, or as it was before it was compressed for too little."""
        if self._codec is None:
            return [buffer]
        (size,) = _i64.unpack_from(buffer)
        compressed = buffer.slice(_i64.size)
        if 1 - len(compressed) / size >= self._savings:
            return [buffer]
        return [_UNCOMPRESSED, self._codec.decompress(compressed, size, memory_pool=self._pool)]


def raw_size(header: bytes, parsed: Header, body: Sequence[Buffer], compressed: bool) -> int:
    """How many bytes the buffers of a body had before padding and compression."""
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
    """The parts of a body, none of them empty, by where they begin. Each buffer begins a part."""
    return dict(zip(accumulate(map(len, body), initial=0), body, strict=False))
