"""The memory of a stream's bodies: allocated in this process, or mapped from the server."""

from __future__ import annotations

from contextlib import suppress

import pyarrow as pa

from dissociated.base.buffers import Buffer
from dissociated.client.leases import ClientLeases
from dissociated.client.request import ReadRequest
from dissociated.codec.join import attach
from dissociated.codec.tensor import slice_buffers
from dissociated.errors import DeviceFull, TransportError
from dissociated.format.message import extents_within
from dissociated.memory.device.base import Device, DeviceBuffer
from dissociated.memory.device.ring import MemoryRing
from dissociated.memory.remote import fetch_ranges
from dissociated.protocol.delivery import Delivery
from dissociated.transport.base import Connection

#: Least size, in bytes, of a body that is received into memory of a device. A medium may have received a smaller body
#: in this process before memory is allocated for it.
_WORTH_A_BLOCK = 1 << 18


class Bodies:
    """An allocator for bodies that are sent, which also maps or fetches the bodies that come by address."""

    def __init__(self, connection: Connection, leases: ClientLeases, request: ReadRequest) -> None:
        self.address_space = connection.address_space
        self._connection = connection
        #: The leases of the addresses at which bodies lie.
        self.leases = leases
        self._timeout = request.timeout
        self._pool = request.options.memory_pool
        self._ring = None if request.device is None or self._pool is not None else request.device.ring
        self._onto: tuple[Device, MemoryRing] | None = None

    def receive_onto(self, device: Device | None) -> None:
        """Let `allocate_on_device` return memory of this device from now on. None ends that and releases unused memory.

        Raises:
            DeviceError: The device fails.
        """
        self._onto = None if device is None else (device, device.receive_ring())

    def wants_device(self, length: int) -> bool:
        """Return whether a body of `length` bytes should be allocated with `allocate_on_device`."""
        return self._onto is not None and length >= _WORTH_A_BLOCK

    def allocate_on_device(self, length: int) -> DeviceBuffer | None:
        """Return memory of the device for a body, or None if there is none at present."""
        onto = self._onto  # read once, because another thread may reset it
        if onto is None:
            return None
        device, ring = onto
        with suppress(DeviceFull):
            memory = ring.allocate(length)
            return None if memory is None else DeviceBuffer(device, memory)
        return None

    def attach(self, delivery: Delivery) -> tuple[bytes, Buffer | None]:
        """Return the flatbuffer and the body of a message, ready for libarrow."""
        if self._connection.supports_rma and delivery.addresses is not None and not delivery.addresses.is_empty:
            return delivery.header, self._fetch(delivery)
        return attach(delivery, self.address_space, self.leases, self.allocate)

    def buffers(self, delivery: Delivery) -> list[pa.Buffer]:
        """Return the buffers of a message one by one, without copying mapped memory.

        Raises:
            FormatError: A buffer leaves its body.
        """
        _, header, parsed, body, placed, _ = delivery
        if placed is None:
            return slice_buffers(header, parsed, body or b"")
        if placed.is_empty:
            if delivery.leased:
                self.leases.free(delivery.leased)
            return [pa.py_buffer(b"")] * len(placed.lengths)
        if self._connection.supports_rma:
            return slice_buffers(header, parsed, self._fetch(delivery))
        located = self.address_space.locate(placed.addresses, placed.lengths)
        whole = self.leases.lease(located.memory, delivery.leased)
        return [whole.slice(offset, length) for offset, length in zip(located.offsets, placed.lengths, strict=True)]

    def allocate(self, length: int) -> pa.Buffer:
        """Allocate memory for a body.

        Raises:
            TransportError: There is not enough memory.
        """
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
        """Fetch the body from the server's memory, and free its addresses."""
        self.leases.check_process()
        assert delivery.addresses is not None
        body_length = delivery.parsed.body_length
        offsets, lengths = extents_within(delivery.header, delivery.parsed, body_length)
        packed = self.allocate(body_length)
        self._connection.memory.fetch(
            fetch_ranges(delivery.addresses.addresses, lengths, offsets), packed, self._timeout
        )
        self.leases.free(delivery.leased)
        return packed
