"""Encoding of static messages for one kind of connection. The result is computed once and kept with the dataset."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from dissociated.datasets.static import StaticDataset
from dissociated.datasets.static_message import StaticMessage
from dissociated.protocol.message import Message
from dissociated.protocol.sender import Body, Sender
from dissociated.protocol.wire import BodyKind, Streams, encode_addresses, leased_addresses
from dissociated.store.copying import STEP
from dissociated.transport.base import MAX_JOINED, Connection

#: Largest number of messages that are encoded and sent in one call.
_GROUP_SIZE = 512
#: Largest number of messages in the first group, which a reader waits for. Clients read the beginning of a stream from
#: 64 batches on.
_FIRST_GROUP_SIZE = 128
#: Largest number of messages of a dataset that are kept encoded, for each kind of connection. Encoding a message again
#: takes as long as reading it. Keeping it encoded takes a third of the memory that the message itself takes.
_MAX_CACHED_MESSAGES = 1 << 20
_UNLIMITED = 1 << 63
#: Largest body, in bytes, that is copied if it lies in a file that a user may modify. Each client costs as much memory.
#: The lower limit applies if the kernel reads larger bodies from the file itself, and their metadata can follow them.
_MAX_COPIED, _MAX_COPIED_HERE = 1 << 16, 1 << 24
#: Bytes of copied bodies after which a group ends.
_COPIED_BYTES = 1 << 18


class MessageGroup(NamedTuple):
    """Consecutive messages that are encoded for one kind of connection."""

    #: The result of `Connection.prepare`.
    encoded: Any
    #: The sequence number of the first message.
    first: int
    #: The number of messages.
    message_count: int
    #: The addresses that the messages lease to the client, by the number of the message.
    leased: Mapping[int, Sequence[int]]
    #: The number of (address, length) pairs in the bodies, pairs of empty buffers included.
    pairs: int
    #: The total length of the bodies, in bytes.
    nbytes: int
    #: All memory below this address must be written before the group is sent.
    end: int
    #: The metadata of the last message if it is not among `encoded`. The next group begins with it.
    unsent: Message | None = None


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

    If bodies lie in a file that a user may modify, the caller checks that it is unmodified before it sends each group.
    So a body that the connection reads in the file is sent before its metadata, with which the next group begins.

    Args:
        dataset: Keeps the encoded groups for later connections of the same kind.
        messages: The messages to encode.
        first: The sequence number of the first message.
        connection: The connection that the messages are encoded for.
        streams: The streams that travel over this connection.
        segment_number: The number of the segment that the bodies lie in, among the segments that are sent; bodies then
            travel by address. None if all bodies travel inline.
        is_growing: Whether the segment is still being written. Groups are then small, so that each can be sent as soon
            as its bodies are written, and are not kept.
        inline_limit: Bodies of up to this many bytes travel inline even if they lie in a segment.

    Yields:
        The encoded groups, in order.
    """
    by_address = segment_number is not None
    max_inline = inline_limit if by_address else _UNLIMITED
    copies = dataset.is_modifiable and max_inline > 0 and bool(streams & Streams.BODIES)
    max_whole = _UNLIMITED  # bytes of the largest body whose metadata is sent before it
    if copies:
        has_metadata = streams is Streams.BOTH  # which can be held back until the body was sent
        max_copied = _MAX_COPIED if connection.reads_in_kernel and has_metadata else _MAX_COPIED_HERE
        if connection.copies and has_metadata:
            max_whole = max_copied
        take = partial(_take_copies, dataset, messages, max_copied, max_inline)
    else:
        take = partial(_take, messages, STEP if is_growing else _UNLIMITED)
    kept_groups: _KeptGroups | None = None
    if not (is_growing or copies) and first + len(messages) <= _MAX_CACHED_MESSAGES:
        kept_groups = dataset.encoded((connection.encoding, streams, segment_number, inline_limit), _KeptGroups)
    start = number = 0
    unsent: Message | None = None
    while start < len(messages):
        encode = partial(_encode, take, start, first + start, connection, streams, max_inline, max_whole, unsent)
        group = encode() if kept_groups is None else kept_groups.get(number, partial(_checked, dataset, encode))
        yield group
        unsent = group.unsent
        start += group.message_count
        number += 1
    if unsent is not None:
        yield MessageGroup(connection.prepare([unsent]), first + start, 0, {}, 0, 0, 0)


def _checked(dataset: StaticDataset, encode: Callable[[], MessageGroup]) -> MessageGroup:
    """Return a group that may be kept, since its file was unmodified after the group was read."""
    group = encode()
    dataset.check_unchanged()
    return group


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
    take: Callable[[int], Sequence[StaticMessage]],
    start: int,
    first: int,
    connection: Connection,
    streams: Streams,
    max_inline: int,
    max_whole: int,
    unsent: Message | None,
) -> MessageGroup:
    """Encode the group that `take` returns for the index `start`, whose first message has the number `first`.

    It is sent after the message `unsent` of the group before.
    """
    sender = Sender.before_request(streams, first)
    sends_bodies = bool(streams & Streams.BODIES)
    outgoing: list[Message] = [] if unsent is None else [unsent]
    leased: dict[int, tuple[int, ...]] = {}
    pairs = 0
    group = take(start)
    for message in group:
        body = None
        if message.extents is not None and message.parsed.body_length > max_inline:
            body = Body(BodyKind.ADDRESSES, (encode_addresses(message.extents),))
            leased[sender.sequence] = leased_addresses(message.extents)
            pairs += len(message.extents)
        elif message.packed is not None:
            body = Body(BodyKind.PACKED, message.packed)
        outgoing += sender.send(message.header, body)
    unsent = outgoing.pop(-2) if max_whole < group[-1].parsed.body_length <= max_inline else None
    nbytes = sum(message.parsed.body_length for message in group) if sends_bodies else 0
    ends = (address + length for message in group for address, length in message.extents or ())
    end = max(ends, default=0) if max_inline < _UNLIMITED else 0
    leased, pairs = (leased, pairs) if sends_bodies else ({}, 0)
    encoded = connection.prepare(outgoing)
    return MessageGroup(encoded, first, len(group), leased, pairs, nbytes, end, unsent)


def _take(messages: Sequence[StaticMessage], max_bytes: int, start: int) -> Sequence[StaticMessage]:
    """Return the messages from index `start` on until their bodies have `max_bytes` bytes, or the group is full."""
    candidates = messages[start : start + (_GROUP_SIZE if start else _FIRST_GROUP_SIZE)]
    nbytes = 0
    for count, message in enumerate(candidates):
        # A group ends at the end of a segment, so that its bodies lie in one piece of memory.
        if nbytes >= max_bytes or message.segment != candidates[0].segment:
            return candidates[:count]
        nbytes += message.parsed.body_length
    return candidates


def _take_copies(
    dataset: StaticDataset, messages: Sequence[StaticMessage], max_copied: int, max_inline: int, start: int
) -> Sequence[StaticMessage]:
    """Return a group whose bodies lie in a file that may become shorter, with copies of all that this process reads.

    A body that is not copied is the last of its group.
    """
    group: list[StaticMessage] = []
    nbytes = 0
    for index in range(start, min(start + (_GROUP_SIZE if start else _FIRST_GROUP_SIZE), len(messages))):
        message = messages[index]
        length = message.parsed.body_length
        is_inline = length <= max_inline
        if is_inline:
            message = dataset.copied(message, length if length <= max_copied else MAX_JOINED)
            nbytes += length
        group.append(message)
        if is_inline and (nbytes >= _COPIED_BYTES or length > _MAX_COPIED):
            break
    return group
