"""Decoding of messages whose bodies came by reference: libarrow reads these bodies in shared memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import pyarrow as pa

from dissociated.base.buffers import Buffer
from dissociated.format.message import buffer_extents, relocate
from dissociated.memory.region import AddressSpace
from dissociated.protocol.delivery import Delivery


class LeaseManager(Protocol):
    """An owner of delivered addresses. Each address goes through exactly one of these two methods, once."""

    def lease(self, memory: pa.Buffer, addresses: Sequence[int]) -> pa.Buffer:
        """Return the same memory as a buffer; `addresses` are given back when the buffer is freed."""

    def free(self, addresses: Sequence[int]) -> None:
        """Give back these addresses at once: nothing uses them."""


def attach(
    delivery: Delivery, address_space: AddressSpace, leases: LeaseManager, allocate: Callable[[int], pa.Buffer]
) -> tuple[bytes, Buffer | None]:
    """Return the flatbuffer and the body of a message in the form that libarrow reads.

    The body of a message that came by address is the whole region, or all memory from the first of its regions to the
    last. The returned flatbuffer has the offsets of the buffers in that memory.

    Args:
        delivery: The message.
        address_space: The regions in which addresses may lie.
        leases: The owner of the addresses.
        allocate: A function that allocates memory of a size in bytes. A body whose buffers libarrow finds misaligned is
            copied there.

    Raises:
        RemoteProtocolError: An address leaves the regions of `address_space`.
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
    # libarrow refuses misaligned buffers: copy them to their offsets in a packed body.
    if any(offset % 8 for offset in located.offsets):
        offsets, _ = buffer_extents(header, parsed)
        packed = located.gather(placed.lengths, offsets, allocate(parsed.body_length))
        leases.free(leased)
        return header, packed
    return relocate(header, parsed, located.offsets, located.memory.size), leases.lease(located.memory, leased)
