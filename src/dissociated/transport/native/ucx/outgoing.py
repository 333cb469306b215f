"""Messages as UCX takes them."""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple

import pyarrow as pa

from dissociated.base.buffers import Buffer
from dissociated.protocol.message import Message
from dissociated.transport.native.ucx._ucp import Ucp
from dissociated.transport.native.views import view_of

_COPY_LIMIT = 1 << 12  # bytes up to which parts are copied together


class Outgoing(NamedTuple):
    """A message as UCX takes it: `length` bytes at `pointer`, or so many pieces. `keep` is what lies there."""

    tag: int | None
    size: int
    pointer: Any
    length: int
    pieces: bool
    keep: Any


def encode(u: Ucp, message: Message) -> Outgoing:
    """A message as UCX takes it: in its parts, unless they are small."""
    parts: list[Buffer] = [part for part in message.parts if len(part)]
    size = sum(map(len, parts))
    if len(parts) > 1 and size > _COPY_LIMIT:
        pieces = array("Q")
        keep = []
        for part in parts:
            view = view_of(u.ffi, part)
            keep.append(view)
            pieces.extend((u.address(view), len(view)))
        return Outgoing(message.tag, size, u.ffi.from_buffer(pieces), len(parts), True, keep)
    data = parts[0] if len(parts) == 1 else b"".join(parts)
    return Outgoing(message.tag, size, view_of(u.ffi, data), size, False, None)


def gather(u: Ucp, message: Outgoing) -> Outgoing:
    """The same message in one piece, which goes straight into the receiver's memory, and pieces do not."""
    pointer, at = u.ffi.from_buffer(pa.allocate_buffer(message.size)), 0
    for piece in message.keep:
        u.ffi.memmove(pointer + at, piece, len(piece))
        at += len(piece)
    return Outgoing(message.tag, message.size, pointer, message.size, False, None)
