"""Sequence numbers: 32 bits on the wire, unbounded here.

"If a sequence number reaches UINT32_MAX, it should be allowed to roll over". Both roles count messages without bound,
and truncate the number only on the wire. `unwrap` finds the count for a number from the wire, provided that the two
sides are less than 2^31 messages apart (RFC 1982, serial number arithmetic).
"""

from __future__ import annotations

from dissociated.protocol.tags import SEQUENCE_MASK

_HALF = 1 << 31


def unwrap(sequence: int, near: int) -> int:
    """Return the count closest to `near` whose low 32 bits are `sequence`. It may be negative."""
    ahead = (sequence - near) & SEQUENCE_MASK
    return near + ahead if ahead < _HALF else near + ahead - (SEQUENCE_MASK + 1)
