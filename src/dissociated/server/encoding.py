"""Messages that stay, as what is sent on one kind of connection: encoded once, and kept with their dataset."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from dissociated.datasets.sendable import Static, StaticMessage
from dissociated.protocol.bodies import encode_addresses
from dissociated.protocol.events import Streams
from dissociated.protocol.message import Message
from dissociated.protocol.sender import Body, Sender
from dissociated.protocol.tags import BodyKind
from dissociated.transport.base import Connection

#: How many messages are encoded and sent at once.
_GROUP_SIZE = 512
#: Datasets of up to this many messages keep them encoded for each kind of connection that asked.
_MAX_CACHED = 1 << 16


class MessageGroup(NamedTuple):
    """Messages ready to be sent on one kind of connection, number `first` and on, and the addresses that they lease."""

    encoded: Any
    first: int
    messages: int
    addresses: Sequence[int]
    nbytes: int  # of the bodies


def encode_groups(
    wanted: Static, connection: Connection, streams: Streams, mapped: bool, inline_limit: int
) -> Iterable[MessageGroup]:
    """The whole stream but its end, encoded for `connection`.

    Bodies travel by address if `mapped`, but for those of at most `inline_limit` bytes.
    """
    messages = wanted.mapped()[0] if mapped else wanted.packed()
    if len(messages) > _MAX_CACHED:
        return _encode(messages, connection, streams, mapped, inline_limit)
    key = type(connection), streams, mapped, inline_limit
    return wanted.encoded(key, lambda: [*_encode(messages, connection, streams, mapped, inline_limit)])


def _encode(
    messages: Sequence[StaticMessage], connection: Connection, streams: Streams, mapped: bool, inline_limit: int
) -> Iterator[MessageGroup]:
    sender = Sender.ahead(streams)
    while sender.sequence < len(messages):
        first = sender.sequence
        outgoing: list[Message] = []
        leased: list[int] = []
        # A group ends where a segment does, so that what it holds lies in one piece.
        group = [m for m in messages[first : first + _GROUP_SIZE] if m.segment == messages[first].segment]
        for message in group:
            body = None
            if mapped and message.extents is not None and message.parsed.body_length > inline_limit:
                body = Body(BodyKind.ADDRESSES, (encode_addresses(message.extents),))
                leased += (address for address, length in message.extents if length)
            elif message.packed is not None:
                body = Body(BodyKind.PACKED, message.packed)
            outgoing += sender.send(message.header, body)
        bodies = bool(streams & Streams.BODIES)
        nbytes = sum(message.parsed.body_length for message in group) if bodies else 0
        yield MessageGroup(connection.prepare(outgoing), first, len(group), leased if bodies else (), nbytes)
