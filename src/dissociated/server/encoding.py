"""Encoding of static messages for one kind of connection. The result is computed once and kept with the dataset."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from dissociated.datasets.static import StaticDataset
from dissociated.datasets.static_message import StaticMessage
from dissociated.protocol.message import Message
from dissociated.protocol.sender import Body, Sender
from dissociated.protocol.wire import BodyKind, Streams, encode_addresses
from dissociated.store.copying import STEP
from dissociated.transport.base import Connection

#: Largest number of messages that are encoded and sent in one call.
_GROUP_SIZE = 512
#: The same for the first group, which a reader waits for. Clients read the beginning of a stream from 64 batches on.
_FIRST_GROUP_SIZE = 128
#: Largest number of messages of a dataset that are kept encoded, for each kind of connection. Encoding a message again
#: takes as long as reading it. Keeping it encoded takes a third of the memory that the message itself takes.
_MAX_CACHED_MESSAGES = 1 << 20
_UNLIMITED = 1 << 63


class MessageGroup(NamedTuple):
    """Consecutive messages that are encoded for one kind of connection."""

    #: The result of `Connection.prepare`.
    encoded: Any
    #: The sequence number of the first message.
    first: int
    #: The number of messages.
    message_count: int
    #: The addresses that the messages lease to the client.
    addresses: Sequence[int]
    #: The number of (address, length) pairs in the bodies, pairs of empty buffers included.
    pairs: int
    #: The total length of the bodies, in bytes.
    nbytes: int
    #: All memory below this address must be written before the group is sent.
    end: int


def encode_groups(
    dataset: StaticDataset,
    messages: Sequence[StaticMessage],
    first: int,
    connection: Connection,
    streams: Streams,
    segment_number: int | None,
    is_growing: bool,
    inline_limit: int,
) -> Iterator[MessageGroup]:
    """Encode consecutive messages of `dataset` for `connection`.

    Args:
        dataset: keeps the encoded groups for later connections of the same kind.
        messages: the messages to encode.
        first: the sequence number of the first message.
        connection: the connection that the messages are encoded for.
        streams: the streams that travel over this connection.
        segment_number: the number of the segment that the bodies lie in, among the segments that are sent; bodies then
            travel by address. None if all bodies travel inline.
        is_growing: whether the segment is still being written. Groups are then small, so that each can be sent as soon
            as its bodies are written, and are not kept.
        inline_limit: bodies of up to this many bytes travel inline even if they lie in a segment.

    Yields:
        The encoded groups, in order.
    """
    group_bytes = STEP if is_growing else _UNLIMITED
    by_address = segment_number is not None
    kept: _KeptGroups | None = None
    if not is_growing and first + len(messages) <= _MAX_CACHED_MESSAGES:
        kept = dataset.encoded((connection.encoding, streams, segment_number, inline_limit), _KeptGroups)
    start = number = 0
    while start < len(messages):
        encode = partial(
            _encode, messages, start, first + start, connection, streams, by_address, group_bytes, inline_limit
        )
        group = encode() if kept is None else kept.get(number, encode)
        yield group
        start += group.message_count
        number += 1


class _KeptGroups:
    """The groups of one kind of connection, from the first on. The reader that needs a group first has it encoded.

    So no reader waits for groups that it does not need yet. Thread-safe.
    """

    def __init__(self) -> None:
        self._groups: list[MessageGroup] = []
        self._encoding = threading.Lock()

    def get(self, number: int, encode: Callable[[], MessageGroup]) -> MessageGroup:
        """Return a group, whose predecessors were all returned before."""
        if number == len(self._groups):
            with self._encoding:
                if number == len(self._groups):  # no other reader has encoded it meanwhile
                    self._groups.append(encode())
        return self._groups[number]


def _encode(
    messages: Sequence[StaticMessage],
    start: int,
    first: int,
    connection: Connection,
    streams: Streams,
    by_address: bool,
    group_bytes: int,
    inline_limit: int,
) -> MessageGroup:
    """Encode the group that begins at index `start` of `messages`, whose first message has the number `first`."""
    sender = Sender.before_request(streams, first)
    sends_bodies = bool(streams & Streams.BODIES)
    outgoing: list[Message] = []
    leased: list[int] = []
    pairs = 0
    group = _group(messages, start, group_bytes)
    for message in group:
        body = None
        if by_address and message.extents is not None and message.parsed.body_length > inline_limit:
            body = Body(BodyKind.ADDRESSES, (encode_addresses(message.extents),))
            leased += (address for address, length in message.extents if length)
            pairs += len(message.extents)
        elif message.packed is not None:
            body = Body(BodyKind.PACKED, message.packed)
        outgoing += sender.send(message.header, body)
    nbytes = sum(message.parsed.body_length for message in group) if sends_bodies else 0
    ends = (address + length for message in group for address, length in message.extents or ())
    end = max(ends, default=0) if by_address else 0
    addresses, pairs = (leased, pairs) if sends_bodies else ((), 0)
    return MessageGroup(connection.prepare(outgoing), first, len(group), addresses, pairs, nbytes, end)


def _group(messages: Sequence[StaticMessage], start: int, max_bytes: int) -> Sequence[StaticMessage]:
    """Return the messages from index `start` on until their bodies have `max_bytes` bytes, or the group is full."""
    candidates = messages[start : start + (_GROUP_SIZE if start else _FIRST_GROUP_SIZE)]
    nbytes = 0
    for count, message in enumerate(candidates):
        # A group ends at the end of a segment, so that its bodies lie in one piece of memory.
        if nbytes >= max_bytes or message.segment != candidates[0].segment:
            return candidates[:count]
        nbytes += message.parsed.body_length
    return candidates
