"""Events that a sender reports to its caller."""

from __future__ import annotations

from enum import Flag
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from dissociated.protocol.request import Request


class Streams(Flag):
    """The streams that travel on a connection: metadata, bodies, or both."""

    METADATA = 1
    BODIES = 2
    BOTH = 3


class StreamRequested(NamedTuple):
    """A client sent want_data: "an opaque binary identifier of the data stream being requested"."""

    request: Request
    streams: Streams
    tag: int


class AddressesFreed(NamedTuple):
    """A client sent free_data: it no longer needs these addresses. An address that was sent twice is freed twice."""

    addresses: tuple[int, ...]
