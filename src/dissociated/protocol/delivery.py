"""What a receiver delivers: Arrow IPC messages, whole and in their turn, one or many that are alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np

from dissociated.base.buffers import Buffer
from dissociated.errors import RemoteProtocolError
from dissociated.format.message import Header, buffer_extents, parse_header
from dissociated.protocol.bodies import AddressList

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bytes: TypeAlias = NDArray[np.uint8]
    Uint64s: TypeAlias = NDArray[np.uint64]
else:
    Bytes = Uint64s = Any

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Delivered(Protocol):
    """Arrow IPC messages, one or more, whole and in their turn."""

    @property
    def largest_body(self) -> int:
        """Bytes of the largest body, as its metadata announced them."""

    @property
    def lease_count(self) -> int:
        """How many addresses must be given back."""

    def accept(self, visitor: DeliveryVisitor[T]) -> T:
        """What the method of `visitor` for this kind of delivery returns."""

    def expand(self) -> Iterable[Delivery]:
        """The messages one by one."""


class DeliveryVisitor(Protocol[T_co]):
    """What knows every kind of delivery."""

    def message(self, delivery: Delivery) -> T_co:
        """Take one message."""

    def packed(self, batches: PackedBatches) -> T_co:
        """Take record batches that arrived together, with their bodies."""

    def shared(self, batches: SharedBatches) -> T_co:
        """Take record batches that arrived together, with the addresses of their bodies."""


class Delivery(NamedTuple):
    """One Arrow IPC message, whole and in its turn.

    Its body is packed, in `body` as the transport delivered it, or lies at `addresses`, which agree with the header.
    Both are None where the message has none.
    """

    sequence: int
    header: bytes
    parsed: Header
    body: Buffer | None = None
    addresses: AddressList | None = None

    @property
    def largest_body(self) -> int:
        """Bytes of the body, as its metadata announced them."""
        return self.parsed.body_length

    @property
    def leased(self) -> tuple[int, ...]:
        """The addresses that must be given back: none of a packed body."""
        return () if self.addresses is None else self.addresses.leased

    @property
    def lease_count(self) -> int:
        """How many these are."""
        return len(self.leased)

    def accept(self, visitor: DeliveryVisitor[T]) -> T:
        """What `visitor.message` returns."""
        return visitor.message(self)

    def expand(self) -> Iterable[Delivery]:
        """This message."""
        return (self,)


class PackedBatches(NamedTuple):
    """Record batches of one layout, number `sequence` and on, their bodies packed and of one length.

    `headers` has a row for each, its flatbuffer; `bodies` has them one after the other.
    """

    sequence: int
    headers: Bytes
    parsed: Header
    bodies: memoryview

    @property
    def largest_body(self) -> int:
        """Bytes of each body."""
        return self.parsed.body_length

    @property
    def lease_count(self) -> int:
        """How many addresses must be given back: packed bodies have none."""
        return 0

    def accept(self, visitor: DeliveryVisitor[T]) -> T:
        """What `visitor.packed` returns."""
        return visitor.packed(self)

    def expand(self) -> Iterator[Delivery]:
        """The same messages one by one."""
        length = self.parsed.body_length
        known, parsed = b"", self.parsed
        for index, row in enumerate(self.headers):
            header = row.tobytes()
            if header != known:  # most often they are the same
                known, parsed = header, _as_expected(header, self.parsed)
            body = self.bodies[index * length : (index + 1) * length]
            yield Delivery(self.sequence + index, header, parsed, body)


class SharedBatches(NamedTuple):
    """Record batches of one layout, number `sequence` and on, each body in one piece of shared memory.

    `headers` has a row for each, its flatbuffer. `body_at` and `body_length` say where the packed bodies lie;
    `leased` are all addresses that must be given back.
    """

    sequence: int
    headers: Bytes
    body_at: Uint64s
    body_length: Uint64s
    leased: Uint64s
    parsed: Header

    @property
    def largest_body(self) -> int:
        """Bytes of the largest body."""
        return int(self.body_length.max())

    @property
    def lease_count(self) -> int:
        """How many addresses must be given back."""
        return len(self.leased)

    def accept(self, visitor: DeliveryVisitor[T]) -> T:
        """What `visitor.shared` returns."""
        return visitor.shared(self)

    def expand(self) -> Iterator[Delivery]:
        """The same messages one by one."""
        for index, row in enumerate(self.headers):
            header = row.tobytes()
            parsed = _as_expected(header, self.parsed)
            offsets, lengths = buffer_extents(header, parsed)
            start = int(self.body_at[index])
            addresses = tuple(start + offset if length else 0 for offset, length in zip(offsets, lengths, strict=True))
            yield Delivery(self.sequence + index, header, parsed, None, AddressList(addresses, lengths))


def _as_expected(header: bytes, first: Header) -> Header:
    """Read one of the like headers: what varies between them must not have been what tells how to read them."""
    parsed = parse_header(header)
    if parsed._replace(body_length=0) != first._replace(body_length=0):
        raise RemoteProtocolError("the peer sent a run of messages that are not alike")
    return parsed
