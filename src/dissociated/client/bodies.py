"""Where the bodies of a stream come to lie: in memory of this process, or mapped, in the server's."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import pyarrow as pa

from dissociated.base.buffers import Buffer
from dissociated.client.leases import ClientLeases
from dissociated.client.request import ReadRequest
from dissociated.codec.attach import attach
from dissociated.codec.tensor import slice_buffers
from dissociated.errors import DeviceFull, TransportError
from dissociated.format.message import extents_within
from dissociated.memory.device.base import Device, DeviceBuffer
from dissociated.memory.device.ring import MemoryRing
from dissociated.memory.remote import fetch_ranges
from dissociated.protocol.delivery import Delivery
from dissociated.transport.base import Connection

#: Bytes of a body from which on memory of a device is allocated for it. Media have smaller ones here before anybody
#: asks for them.
_WORTH_A_BLOCK = 1 << 18


class Bodies:
    """Allocates memory for bodies that are sent, and finds, maps or fetches those that come by address."""

    def __init__(self, connection: Connection, leases: ClientLeases, request: ReadRequest) -> None:
        self.address_space = connection.address_space
        self._connection = connection
        self._leases = leases
        self._timeout = request.timeout
        self._pool = request.options.memory_pool
        self._ring = None if request.device is None or self._pool is not None else request.device.ring
        self._onto: tuple[Device, MemoryRing] | None = None

    def receive_onto(self, device: Device | None) -> None:
        """Let `allocate_on_device` give memory of this device from now on; None ends that, and gives back what is left.

        Raises DeviceError.
        """
        self._onto = None if device is None else (device, device.receive_ring())

    def wants_device(self, length: int) -> bool:
        """Whether `allocate_on_device` is worth a try for so many bytes."""
        return self._onto is not None and length >= _WORTH_A_BLOCK

    def allocate_on_device(self, length: int) -> DeviceBuffer | None:
        """Memory of a device for a body; None where none is to be had now."""
        onto = self._onto  # which another thread may end
        if onto is None:
            return None
        device, ring = onto
        with suppress(DeviceFull):
            memory = ring.allocate(length)
            return None if memory is None else DeviceBuffer(device, memory)
        return None

    def attach(self, delivery: Delivery) -> tuple[bytes, Buffer | None]:
        """Flatbuffer and body of a message, as libarrow shall read them."""
        if self._connection.supports_rma and delivery.addresses is not None and not delivery.addresses.is_empty:
            return delivery.header, self._fetch(delivery)
        return attach(delivery, self.address_space, self._leases, self.allocate)

    def buffers(self, delivery: Delivery) -> list[pa.Buffer]:
        """The buffers of a message, each by itself, where they lie. Raises FormatError for one that leaves its body."""
        _, header, parsed, body, placed = delivery
        if placed is None:
            return slice_buffers(header, parsed, body or b"")
        if placed.is_empty:
            if placed.leased:
                self._leases.free(placed.leased)
            return [pa.py_buffer(b"")] * len(placed.lengths)
        if self._connection.supports_rma:
            return slice_buffers(header, parsed, self._fetch(delivery))
        located = self.address_space.locate(placed.addresses, placed.lengths)
        whole = self.lease(located.memory, placed.leased)
        return [whole.slice(offset, length) for offset, length in zip(located.offsets, placed.lengths, strict=True)]

    def lease(self, memory: pa.Buffer, addresses: Sequence[int], device: Device | None = None) -> pa.Buffer:
        """Memory that is mapped, or on a `device`, as a buffer, at whose end `addresses`, once delivered, go back."""
        return self._leases.lease(memory, addresses, device)

    def free(self, addresses: Sequence[int]) -> None:
        """Give back addresses of a message that no array uses."""
        self._leases.free(addresses)

    def allocate(self, length: int) -> pa.Buffer:
        """Memory for a body. Raises TransportError where there is none."""
        pinned = None if self._ring is None else self._ring.allocate(length)
        if pinned is not None:
            return pinned
        try:
            return pa.allocate_buffer(length, self._pool)
        except MemoryError:
            raise TransportError(
                f"there is no memory for a body of {length} bytes: read fewer columns, or over shm"
            ) from None

    def _fetch(self, delivery: Delivery) -> pa.Buffer:
        """The body, fetched from where it lies, which is then given back."""
        self._leases.check_process()
        assert delivery.addresses is not None
        body_length = delivery.parsed.body_length
        wanted, lengths = extents_within(delivery.header, delivery.parsed, body_length)
        packed = self.allocate(body_length)
        self._connection.fetch(fetch_ranges(delivery.addresses.addresses, lengths, wanted), packed, self._timeout)
        self._leases.free(delivery.leased)
        return packed
