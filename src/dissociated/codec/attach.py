"""Messages whose bodies came by reference, with those bodies where libarrow shall find them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import pyarrow as pa

from dissociated.base.buffers import Buffer
from dissociated.format.message import buffer_extents, relocate
from dissociated.memory.region import AddressSpace
from dissociated.protocol.delivery import Delivery


class LeaseManager(Protocol):
    """What becomes of the addresses that were delivered. Each goes through one of these two methods, once."""

    def lease(self, memory: pa.Buffer, addresses: Sequence[int]) -> pa.Buffer:
        """The same memory as a buffer, at whose end `addresses` go back."""

    def free(self, addresses: Sequence[int]) -> None:
        """These addresses are not needed."""


def attach(
    delivery: Delivery, address_space: AddressSpace, leases: LeaseManager, allocate: Callable[[int], pa.Buffer]
) -> tuple[bytes, Buffer | None]:
    """The flatbuffer and the body of a message, as libarrow reads them.

    Of a body by address, the body is the whole region, or all memory from the first of its regions to the last, and the
    flatbuffer says where in it the buffers lie. `allocate` gives memory for a body whose buffers are not aligned as
    libarrow needs them: they are copied.
    Raises RemoteProtocolError where an address leaves the regions of `address_space`.
    """
    _, header, parsed, body, placed = delivery
    if placed is None:
        return header, body
    leased = placed.leased
    if placed.is_empty:
        if leased:
            leases.free(leased)
        return (header if not parsed.body_length else relocate(header, parsed, [0] * len(placed.lengths), 0)), b""
    located = address_space.locate(placed.addresses, placed.lengths)
    if any(offset % 8 for offset in located.offsets):  # which libarrow refuses: gather them where they should be
        wanted, _ = buffer_extents(header, parsed)
        packed = located.gather(placed.lengths, wanted, allocate(parsed.body_length))
        leases.free(leased)
        return header, packed
    return relocate(header, parsed, located.offsets, located.memory.size), leases.lease(located.memory, leased)
