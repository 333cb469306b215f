"""Messages from clients to a server: their tags, and the limit on their length."""

from __future__ import annotations

from dissociated.base.buffers import Buffer
from dissociated.errors import RemoteProtocolError
from dissociated.protocol.message import Incoming, Run
from dissociated.protocol.request import MAX_IDENTIFIER
from dissociated.protocol.sender import Tags
from dissociated.protocol.wire import ADDRESS_SIZE, Streams
from dissociated.transport.base import Connection

# The specification leaves the values of tags to the server, and no client interprets them. These spell DISS. Bits 0 and
# 1 name the requested streams. Bit 2 requests packed bodies. Bit 3 allows addresses on a device.
_WANT = 0x4449_5353_0000_0000
_PACKED = 4
_DEVICE = 8
#: The tag of `free_data` messages.
FREE_DATA = _WANT | 0x100


def want_tag(streams: Streams, packed: bool, device: bool = False) -> int:
    """Return the tag of a `want_data` message.

    Args:
        streams: The requested streams.
        packed: Whether all bodies must be packed. Otherwise the server may send addresses.
        device: Whether these addresses may be on a device.
    """
    return _WANT | streams.value | (_PACKED if packed else 0) | (_DEVICE if device else 0)


def wants_packed(tag: int) -> bool:
    """Return whether this tag of `want_data` requests packed bodies."""
    return bool(tag & _PACKED)


def wants_device(tag: int) -> bool:
    """Return whether this tag of `want_data` allows addresses on a device."""
    return bool(tag & _DEVICE)


TAGS = Tags(
    want={
        **{want_tag(streams, packed): streams for streams in Streams.__members__.values() for packed in (False, True)},
        want_tag(Streams.BOTH, False, device=True): Streams.BOTH,
    },
    free_data=FREE_DATA,
)


def frees_nothing(message: Incoming) -> bool:
    """Return whether a message frees only buffers without bytes, which a client may do at any time."""
    return message.tag == FREE_DATA and not any(bytes(message.data))


def max_message(max_freed: int) -> int:
    """Return the largest valid length, in bytes, of a message from a client that may free `max_freed` addresses."""
    return max(MAX_IDENTIFIER, max_freed * ADDRESS_SIZE)


def receive(connection: Connection, timeout: float, max_freed: int = 0) -> Incoming | Run | None:
    """Return the next message of the client, or None if the client has ended its side of the connection.

    Raises:
        RemoteProtocolError: The message is longer than `max_message(max_freed)`.
        DissociatedError: Further errors of `Connection.receive`.
    """
    limit = max_message(max_freed)

    def allocate(tag: int | None, length: int) -> Buffer:
        if length > limit:
            raise RemoteProtocolError(
                f"the client sent a message of {length} bytes; at most {limit} are accepted", rule="frame-length"
            )
        return bytearray(length)

    return connection.receive(timeout, allocate)
