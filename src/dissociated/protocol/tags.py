"""The 64-bit tag of a body message ("Data Stream Sequence"), and the sequence number in it.

    bits  0 to 31   sequence number of the metadata message that the body belongs to
    bits 32 to 55   reserved, must be 0
    bits 56 to 63   kind of body

The specification's diagram shifts the kind by 55; its prose says bits 56 to 63. The prose is authoritative.

"If a sequence number reaches UINT32_MAX, it should be allowed to roll over". Both roles count messages without bound,
and truncate the number only on the wire.
"""

from __future__ import annotations

from enum import IntEnum

from dissociated.errors import RemoteProtocolError

#: "the tag mask of 0x00000000FFFFFFFF should be used alongside the sequence number to match the message"
SEQUENCE_MASK = 0x0000_0000_FFFF_FFFF
_HALF = 1 << 31
#: "All unspecified bits (bits 32 - 55) of the tag are reserved [...] they MUST be 0."
RESERVED_MASK = 0x00FF_FFFF_0000_0000
#: "The most significant byte (bits 56 - 63) of the tag indicates the message body type"
KIND_SHIFT = 56


class BodyKind(IntEnum):
    """The content of a body message."""

    #: "the raw body buffer bytes as a packed buffer (i.e. the standard IPC format body bytes)"
    PACKED = 0
    #: "a series of unsigned, little-endian 64-bit integer pairs to represent either shared or remote memory"
    ADDRESSES = 1


_KINDS = {int(kind): kind for kind in BodyKind}


def body_tag(kind: BodyKind, sequence: int) -> int:
    """Return the tag of the body of message number `sequence`, of which the low 32 bits are sent."""
    return kind << KIND_SHIFT | sequence & SEQUENCE_MASK


def parse_body_tag(tag: int) -> tuple[BodyKind, int]:
    """Return the kind and the 32-bit sequence number in `tag`.

    Raises:
        RemoteProtocolError: The kind is unknown, or a reserved bit is set.
    """
    if tag & RESERVED_MASK:
        raise RemoteProtocolError(f"the peer set reserved bits in the body tag {tag:#018x}", rule="tag-reserved")
    kind = _KINDS.get(tag >> KIND_SHIFT)
    if kind is None:
        raise RemoteProtocolError(
            f"the peer sent a body of unknown kind {tag >> KIND_SHIFT} (tag {tag:#018x})", rule="tag-kind"
        )
    return kind, tag & SEQUENCE_MASK


def unwrap(sequence: int, near: int) -> int:
    """Return the count closest to `near` whose low 32 bits are `sequence`. It may be negative.

    It is the right count if the two sides are less than 2^31 messages apart (RFC 1982, serial number arithmetic).
    """
    ahead = (sequence - near) & SEQUENCE_MASK
    return near + ahead if ahead < _HALF else near + ahead - (SEQUENCE_MASK + 1)
