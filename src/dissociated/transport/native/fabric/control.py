"""What the two ends of a connection over libfabric say to each other beside the protocol: see docs/fabric-peers.md."""

from __future__ import annotations

import struct
from enum import IntEnum

VERSION = 2  # of what the two ends say to each other beside the protocol

CONTROL = 0xFE44_4953_534F_0000  # the tags of that, but for the lowest byte
KIND_MASK = 0xFF
#: The tag of an untagged message that is too large for those who receive many into one buffer, or does not come whole.
LARGE = CONTROL | 0x100
CONTROL_SIZE = 4096  # bytes of a control message, at most
CONTROL_BUFFERS = 8
#: What a client that takes runs says as it joins; others say nothing.
TAKES_RUNS = b"\x01"
#: How many bytes have been consumed.
CONSUMED = struct.Struct("<Q")


def is_control(tag: int | None) -> bool:
    """Whether a message with this tag is beside the protocol."""
    return tag is not None and tag & ~KIND_MASK == CONTROL


class Kind(IntEnum):
    """What a control message says: the lowest byte of its tag."""

    #: client to listener: the version, and the name of the client's endpoint
    HELLO = 1
    #: listener to client: the version, and the name of the endpoint to talk to
    WELCOME = 2
    #: client to that endpoint: nothing, or TAKES_RUNS; before it, the server sends nothing
    JOIN = 3
    #: now and then: how many bytes have been consumed, uint64. The heartbeat
    CREDIT = 4
    #: the reason for giving up, UTF-8
    ABORT = 5
    #: nothing: this end closes. It is answered by another
    BYE = 6
    #: JOIN and BYE for bodies, where those have endpoints of their own
    BODIES_JOIN = 7
    BODIES_BYE = 8


#: What is said at each endpoint of a connection, first and last.
JOINS, BYES = (Kind.JOIN, Kind.BODIES_JOIN), (Kind.BYE, Kind.BODIES_BYE)


def held_up(tag: int) -> bool:
    """Whether a message with this tag has to wait until somebody claims it, or until others before it are claimed."""
    return not is_control(tag) or tag & KIND_MASK in (Kind.BODIES_JOIN, Kind.BODIES_BYE)
