"""The streams of a connection, and an event that a sender reports to its caller."""

from __future__ import annotations

from enum import Flag
from typing import NamedTuple


class Streams(Flag):
    """The streams that travel on a connection: metadata, bodies, or both."""

    METADATA = 1
    BODIES = 2
    BOTH = 3


class AddressesFreed(NamedTuple):
    """A client sent free_data: it no longer needs these addresses. An address that was sent twice is freed twice."""

    addresses: tuple[int, ...]
