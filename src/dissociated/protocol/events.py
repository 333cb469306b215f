"""What the two roles report to whoever drives them."""

from __future__ import annotations

from enum import Flag
from typing import NamedTuple


class Streams(Flag):
    """Which of the two streams travel on a connection."""

    METADATA = 1
    BODIES = 2
    BOTH = 3


class StreamRequested(NamedTuple):
    """A client sent want_data: "an opaque binary identifier of the data stream being requested"."""

    identifier: bytes
    streams: Streams
    tag: int


class AddressesFreed(NamedTuple):
    """A client sent free_data: it no longer needs these addresses, one entry for each time one was sent."""

    addresses: tuple[int, ...]
