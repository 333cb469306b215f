"""Messages that stay, as what is sent on one kind of connection: encoded once, and kept with their dataset."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from dissociated.datasets.sendable import StaticMessage
from dissociated.datasets.static import StaticDataset
from dissociated.protocol.bodies import encode_addresses
from dissociated.protocol.events import Streams
from dissociated.protocol.message import Message
from dissociated.protocol.sender import Body, Sender
from dissociated.protocol.tags import BodyKind
from dissociated.store.copying import STEP
from dissociated.transport.base import Connection

#: How many messages are encoded and sent at once.
_GROUP_SIZE = 512
#: How many messages of a dataset are kept encoded, for each kind of connection that asked. To encode one again takes as
#: long as to read it; to keep it takes a third of the memory that the message takes anyhow.
_MAX_CACHED_MESSAGES = 1 << 20
_UNLIMITED = 1 << 63


class MessageGroup(NamedTuple):
    """Messages that are encoded for one kind of connection."""

    #: What `Connection.prepare` made of them.
    encoded: Any
    #: The number of the first of them.
    first: int
    #: How many they are.
    messages: int
    #: The addresses that they lease.
    addresses: Sequence[int]
    #: How many pairs of an address and a length they are sent in, those of empty buffers included.
    pairs: int
    #: Bytes of the bodies.
    nbytes: int
    #: Everything below this address must be written before they are sent.
    end: int


def encode_groups(
    dataset: StaticDataset,
    messages: Sequence[StaticMessage],
    first: int,
    connection: Connection,
    streams: Streams,
    segment: int | None,
    growing: bool,
    inline_limit: int,
) -> Iterable[MessageGroup]:
    """These messages of `dataset`, number `first` and on, encoded for `connection`.

    Bodies travel by address if the messages lie in a `segment`, which is that number of those that are sent, but for
    bodies of at most `inline_limit` bytes. Where it is `growing`, groups are small, to be sent soon, and not kept.
    """
    group_bytes = STEP if growing else _UNLIMITED
    encoded = _encode(messages, first, connection, streams, segment is not None, group_bytes, inline_limit)
    if growing or first + len(messages) > _MAX_CACHED_MESSAGES:
        return encoded
    key = connection.encoding, streams, segment, inline_limit
    return dataset.encoded(key, lambda: [*encoded])


def _encode(
    messages: Sequence[StaticMessage],
    first: int,
    connection: Connection,
    streams: Streams,
    mapped: bool,
    group_bytes: int,
    inline_limit: int,
) -> Iterator[MessageGroup]:
    sender = Sender.ahead(streams, first)
    at = 0
    while at < len(messages):
        first = sender.sequence
        outgoing: list[Message] = []
        leased: list[int] = []
        pairs = 0
        group = _group(messages, at, group_bytes)
        at += len(group)
        for message in group:
            body = None
            if mapped and message.extents is not None and message.parsed.body_length > inline_limit:
                body = Body(BodyKind.ADDRESSES, (encode_addresses(message.extents),))
                leased += (address for address, length in message.extents if length)
                pairs += len(message.extents)
            elif message.packed is not None:
                body = Body(BodyKind.PACKED, message.packed)
            outgoing += sender.send(message.header, body)
        bodies = bool(streams & Streams.BODIES)
        nbytes = sum(message.parsed.body_length for message in group) if bodies else 0
        ends = (address + length for message in group for address, length in message.extents or ())
        end = max(ends, default=0) if mapped else 0
        held, pairs = (leased, pairs) if bodies else ((), 0)
        yield MessageGroup(connection.prepare(outgoing), first, len(group), held, pairs, nbytes, end)


def _group(messages: Sequence[StaticMessage], first: int, most: int) -> Sequence[StaticMessage]:
    """Some messages from number `first` on, until their bodies have `most` bytes or more."""
    stop, nbytes = first, 0
    # A group ends where a segment does, so that what it holds lies in one piece.
    while (
        stop < min(len(messages), first + _GROUP_SIZE)
        and nbytes < most
        and messages[stop].segment == messages[first].segment
    ):
        nbytes += messages[stop].parsed.body_length
        stop += 1
    return messages[first:stop]
