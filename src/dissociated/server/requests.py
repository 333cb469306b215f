"""What clients say to a server: the tags that tell it, and how much of it is taken."""

from __future__ import annotations

from dissociated.base.buffers import Buffer
from dissociated.errors import RemoteProtocolError
from dissociated.protocol.bodies import ADDRESS_SIZE
from dissociated.protocol.events import Streams
from dissociated.protocol.message import Incoming, Run
from dissociated.protocol.request import MAX_IDENTIFIER
from dissociated.protocol.sender import Tags
from dissociated.transport.base import Connection

# The values are ours to choose; these spell DISS. Bits 0 and 1 say which streams, bit 2 that bodies come packed,
# bit 3 that they may be addresses on a device.
_WANT = 0x4449_5353_0000_0000
_PACKED = 4
_DEVICE = 8
#: The tag of free_data.
FREE_DATA = _WANT | 0x100


def want_tag(streams: Streams, packed: bool, device: bool = False) -> int:
    """The tag of want_data that requests these streams, and bodies that are `packed` or come as they can.

    As they can is by addresses on a `device` only for who asks for that.
    """
    return _WANT | streams.value | (_PACKED if packed else 0) | (_DEVICE if device else 0)


def wants_packed(tag: int) -> bool:
    """Whether this tag of want_data requests packed bodies."""
    return bool(tag & _PACKED)


def wants_device(tag: int) -> bool:
    """Whether this tag of want_data takes addresses on a device."""
    return bool(tag & _DEVICE)


TAGS = Tags(
    want={
        **{want_tag(one, packed): one for one in Streams.__members__.values() for packed in (False, True)},
        want_tag(Streams.BOTH, False, device=True): Streams.BOTH,
    },
    free_data=FREE_DATA,
)


def max_message(max_freed: int) -> int:
    """Return how many bytes a message may have of a client that may free so many addresses."""
    return max(MAX_IDENTIFIER, max_freed * ADDRESS_SIZE)


def receive(connection: Connection, timeout: float, max_freed: int = 0) -> Incoming | Run | None:
    """Return the next message of the client, None at its end.

    Raises as `Connection.receive` does, and RemoteProtocolError if the message has more bytes than `max_message`.
    """
    limit = max_message(max_freed)

    def allocate(tag: int | None, length: int) -> Buffer:
        if length > limit:
            raise RemoteProtocolError(f"the client sent a message of {length} bytes; at most {limit} are taken")
        return bytearray(length)

    return connection.receive(timeout, allocate)
