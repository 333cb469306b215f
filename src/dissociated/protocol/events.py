"""What the two roles report to whoever drives them."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Flag
from typing import NamedTuple, Protocol

from dissociated.buffers import Buffer
from dissociated.format.message import Header
from dissociated.protocol.bodies import AddressList


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


class Delivered(Protocol):
    """Arrow IPC messages, one or more, whole and in their turn."""

    @property
    def largest_body(self) -> int:
        """Bytes of the largest body, as its metadata announced them."""

    @property
    def lease_count(self) -> int:
        """How many addresses must be given back."""

    def expand(self) -> Iterable[Delivery]:
        """The messages one by one."""


class Delivery(NamedTuple):
    """One Arrow IPC message, whole and in its turn.

    `body` is None (no body), the packed bytes as the transport delivered them, or an AddressList that agrees
    with the header.
    """

    sequence: int
    header: bytes
    parsed: Header
    body: Buffer | AddressList | None

    @property
    def largest_body(self) -> int:
        """Bytes of the body, as its metadata announced them."""
        return self.parsed.body_length

    @property
    def lease_count(self) -> int:
        """How many addresses must be given back."""
        return len(self.body.leased) if isinstance(self.body, AddressList) else 0

    def expand(self) -> Iterable[Delivery]:
        """This message."""
        return (self,)
