"""Deliveries of a receiver: complete Arrow IPC messages in order, alone or as many similar record batches at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np

from dissociated.base.buffers import Buffer
from dissociated.errors import RemoteProtocolError
from dissociated.format.message import Header, buffer_extents, parse_header
from dissociated.protocol.wire import AddressList

if TYPE_CHECKING:
    from numpy.typing import NDArray

Bytes: TypeAlias = "NDArray[np.uint8]"
Uint64s: TypeAlias = "NDArray[np.uint64]"
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class DeliveryVisitor(Protocol[T_co]):
    """A handler with a method for each kind of delivery."""

    def message(self, delivery: Delivery) -> T_co:
        """Handle one message."""

    def packed(self, batches: PackedBatches) -> T_co:
        """Handle record batches that arrived together, with their bodies."""

    def shared(self, batches: SharedBatches) -> T_co:
        """Handle record batches that arrived together, with the addresses of their bodies."""


class Delivery(NamedTuple):
    """An Arrow IPC message, complete and in order.

    Its body is either packed, in `body` as the transport delivered it, or lies at `addresses`, which agree with the
    header. Both are None for a message without a body. `frees_messages` says whether a body by address is given back by
    the number of its message.
    """

    sequence: int
    header: bytes
    parsed: Header
    body: Buffer | None = None
    addresses: AddressList | None = None
    frees_messages: bool = False

    @property
    def largest_body(self) -> int:
        """Return the length of the body in bytes, as the metadata announces it."""
        return self.parsed.body_length

    @property
    def leased(self) -> tuple[int, ...]:
        """Return the addresses, or the number of the message, that must be given back. A packed body has none."""
        if self.addresses is None:
            return ()
        return (self.sequence,) if self.frees_messages else self.addresses.leased

    @property
    def lease_count(self) -> int:
        """Return the length of `leased`."""
        return len(self.leased)

    def accept(self, visitor: DeliveryVisitor[T]) -> T:
        """Call `visitor.message`, and return its result."""
        return visitor.message(self)

    def expand(self) -> Iterable[Delivery]:
        """Return this message."""
        return (self,)


class PackedBatches(NamedTuple):
    """Record batches of one layout, numbered from `sequence` on, with packed bodies of equal length.

    `headers` is an array with a row for each flatbuffer. `bodies` is the concatenation of the bodies.
    """

    sequence: int
    headers: Bytes
    parsed: Header
    bodies: memoryview

    @property
    def largest_body(self) -> int:
        """Return the length of each body, in bytes."""
        return self.parsed.body_length

    @property
    def lease_count(self) -> int:
        """Return 0: packed bodies have no addresses to give back."""
        return 0

    def accept(self, visitor: DeliveryVisitor[T]) -> T:
        """Call `visitor.packed`, and return its result."""
        return visitor.packed(self)

    def expand(self) -> Iterator[Delivery]:
        """Yield the messages one by one."""
        length = self.parsed.body_length
        previous, parsed = b"", self.parsed
        for index, row in enumerate(self.headers):
            header = row.tobytes()
            if header != previous:  # rows are mostly equal
                previous, parsed = header, _as_expected(header, self.parsed)
            body = self.bodies[index * length : (index + 1) * length]
            yield Delivery(self.sequence + index, header, parsed, body)


class SharedBatches(NamedTuple):
    """Record batches of one layout, numbered from `sequence` on, each with its body in one piece of shared memory.

    `headers` is an array with a row for each flatbuffer. `body_at` and `body_length` are the address and the length of
    each packed body. `addresses` holds the addresses of all buffers that have bytes.
    """

    sequence: int
    headers: Bytes
    body_at: Uint64s
    body_length: Uint64s
    addresses: Uint64s
    parsed: Header
    frees_messages: bool = False

    @property
    def largest_body(self) -> int:
        """Return the length of the largest body, in bytes."""
        return int(self.body_length.max())

    @property
    def leased(self) -> Uint64s:
        """Return the addresses, or the numbers of the messages, that must be given back."""
        if not self.frees_messages:
            return self.addresses
        return self.sequence + np.arange(len(self.headers), dtype=np.uint64)

    @property
    def lease_count(self) -> int:
        """Return the length of `leased`."""
        return len(self.headers) if self.frees_messages else len(self.addresses)

    def accept(self, visitor: DeliveryVisitor[T]) -> T:
        """Call `visitor.shared`, and return its result."""
        return visitor.shared(self)

    def expand(self) -> Iterator[Delivery]:
        """Yield the messages one by one."""
        for index, row in enumerate(self.headers):
            header = row.tobytes()
            parsed = _as_expected(header, self.parsed)
            offsets, lengths = buffer_extents(header, parsed)
            start = int(self.body_at[index])
            addresses = tuple(start + offset if length else 0 for offset, length in zip(offsets, lengths, strict=True))
            placed = AddressList(addresses, lengths)
            yield Delivery(self.sequence + index, header, parsed, None, placed, self.frees_messages)


#: Arrow IPC messages, one or more, that are complete and in order.
Delivered: TypeAlias = Delivery | PackedBatches | SharedBatches


def _as_expected(header: bytes, first: Header) -> Header:
    """Parse a header of a run. Raise RemoteProtocolError if its layout differs from that of the `first` header."""
    parsed = parse_header(header)
    if parsed._replace(body_length=0) != first._replace(body_length=0):
        raise RemoteProtocolError("the peer sent a run of messages that differ")
    return parsed
