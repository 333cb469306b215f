"""Encoding and recognition of runs: many record batches of one layout that travel together.

Thousands of small messages that differ in a few numbers only are checked here with NumPy, column by column, instead of
one by one. A run is recognized only if all of its messages are certainly valid. The messages of any other run go to the
Receiver one by one, which reports their errors.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dissociated.base.buffers import Buffer
from dissociated.errors import RemoteProtocolError
from dissociated.format.message import Header, parse_header, varying_ranges
from dissociated.protocol.delivery import Bytes, PackedBatches, SharedBatches, Uint64s
from dissociated.protocol.message import Run
from dissociated.protocol.wire import PREFIX_SIZE, SEQUENCE_MASK, BodyKind, MetadataKind, body_tag

_MAX_ADDRESS = np.uint64(1 << 62)  # below this limit, no sum in this file can overflow


def encode(sequence: int, header: bytes, bodies: Sequence[Buffer]) -> Run:
    """Encode record batches that share one flatbuffer.

    Args:
        sequence: Number of the first message.
        header: The flatbuffer.
        bodies: The packed bodies, all of equal length.
    """
    count = len(bodies)
    numbers = (sequence + np.arange(count, dtype=np.uint64)) & np.uint64(SEQUENCE_MASK)
    untagged = np.empty((count, PREFIX_SIZE + len(header)), np.uint8)
    untagged[:, 0] = MetadataKind.MESSAGE
    untagged[:, 1:PREFIX_SIZE] = numbers.astype("<u4").view(np.uint8).reshape(count, -1)
    untagged[:, PREFIX_SIZE:] = np.frombuffer(header, np.uint8)
    tags = (numbers | np.uint64(body_tag(BodyKind.PACKED, 0))).astype("<u8")
    tagged = b"".join(bodies)
    return Run(
        count,
        untagged.reshape(-1).data,
        untagged.shape[1],
        tags.view(np.uint8).data,
        memoryview(tagged),
        len(tagged) // count,
    )


def recognize(run: Run, sequence: int, frees_messages: bool = False) -> PackedBatches | SharedBatches | None:
    """Return the record batches of `run`, the first of which must have the number `sequence`.

    `frees_messages` says whether bodies by address are given back by the numbers of their messages.

    Returns:
        The batches with their packed bodies or addresses; None if they cannot be recognized together.
    """
    untagged = np.frombuffer(run.untagged, np.uint8).reshape(run.length, run.untagged_size)
    if run.untagged_size <= PREFIX_SIZE:
        return None
    kind = _kind_in_order(run, untagged, sequence)
    headers = untagged[:, PREFIX_SIZE:]
    first = headers[0].tobytes()
    try:
        parsed = parse_header(first)
    except RemoteProtocolError:
        return None
    spans = varying_ranges(first, parsed)
    if kind is None or not spans or parsed.misread:
        return None
    fixed = np.ones(headers.shape[1], np.bool_)
    for begin, end in spans:
        fixed[begin:end] = False
    if not (headers[:, fixed] == headers[0, fixed]).all():
        return None
    body_length = _uint64s(headers[:, parsed.body_length_at : parsed.body_length_at + 8])[:, 0]
    if kind is BodyKind.ADDRESSES:
        buffers = _uint64s(headers[:, parsed.buffers_at : parsed.buffers_at + 16 * parsed.buffer_count])
        shared = _shared(run, sequence, headers, parsed, body_length, buffers)
        return None if shared is None else shared._replace(frees_messages=frees_messages)
    if (body_length != run.tagged_size).any():
        return None
    return PackedBatches(sequence, headers, parsed, run.tagged)


def _shared(
    run: Run, sequence: int, headers: Bytes, parsed: Header, body_length: Uint64s, buffers: Uint64s
) -> SharedBatches | None:
    if run.tagged_size != 16 + 16 * parsed.buffer_count:
        return None
    offsets, lengths = buffers[:, 0::2], buffers[:, 1::2]
    lists = np.frombuffer(run.tagged, "<u8").reshape(run.length, -1)
    addresses = lists[:, 2::2]
    if max(int(part.max(initial=0)) for part in (body_length, buffers, lists)) >= _MAX_ADDRESS:
        return None
    present = lengths > 0
    if addresses[~present].any():  # empty buffers with addresses, which the Receiver handles message by message
        return None
    body_at = np.where(present, addresses - offsets, 0).max(axis=1, initial=0)
    agrees = (
        (addresses >= offsets)[present].all()  # no sum may wrap around
        and (lists[:, 0] == lengths.sum(axis=1, dtype=np.uint64)).all()
        and (lists[:, 1] == parsed.buffer_count).all()
        and (lists[:, 3::2] == lengths).all()
        and present.any(axis=1).all()
        and (body_at[:, None] + offsets == addresses)[present].all()
        and (offsets + lengths <= body_length[:, None]).all()
    )
    if not agrees:
        return None
    return SharedBatches(sequence, headers, body_at, body_length, addresses[present], parsed)


def _kind_in_order(run: Run, untagged: Bytes, sequence: int) -> BodyKind | None:
    """Return the common kind of all bodies; None if there are several, or the numbers do not run from `sequence` on."""
    numbers = (sequence + np.arange(run.length, dtype=np.uint64)) & np.uint64(SEQUENCE_MASK)
    on_wire = np.ascontiguousarray(untagged[:, 1:PREFIX_SIZE]).view("<u4")[:, 0]
    if (untagged[:, 0] != MetadataKind.MESSAGE).any() or (on_wire != numbers).any():
        return None
    tags = np.frombuffer(run.tags, "<u8")
    for kind in BodyKind:
        if (tags == (numbers | np.uint64(body_tag(kind, 0)))).all():
            return kind
    return None


def _uint64s(columns: Bytes) -> Uint64s:
    return np.ascontiguousarray(columns).view("<u8")
