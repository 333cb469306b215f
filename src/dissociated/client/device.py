"""Bodies on a device: copied there, received there, or in the server's own device memory."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import closing, suppress
from itertools import accumulate, chain

import pyarrow as pa

from dissociated.base.buffers import Buffer
from dissociated.client.bodies import Bodies
from dissociated.codec.device import LAYOUT, DeviceMessage, Mover, copy_to_host
from dissociated.codec.join import EncodedMessage, Messages
from dissociated.errors import DeviceError, DeviceFull, RemoteProtocolError
from dissociated.format.layout import dictionary_of, is_little_endian, nulls_are_counted
from dissociated.format.message import Header, HeaderType, buffer_extents, extents_within, is_compressed, relocate
from dissociated.memory.device.base import Device, DeviceBuffer
from dissociated.memory.region import Located
from dissociated.protocol.delivery import Delivery


def place_on_device(delivery: Delivery, bodies: Bodies, mover: Mover) -> DeviceMessage:
    """Return the message with its body on the device of `mover`. The body is used in place or copied there.

    Raises:
        RemoteProtocolError: libarrow would have to read the body, because null counts are missing; or its address is
            invalid.
        DeviceError: The body would have to be converted, because it is compressed or has the other byte order.
    """
    _, header, parsed, body, placed, _ = delivery
    if parsed.type is HeaderType.SCHEMA:
        if not is_little_endian(header) or sys.byteorder != "little":
            raise DeviceError("bodies of the other byte order are not swapped on a device: read them here")
        return DeviceMessage(header, parsed, None)
    if is_compressed(header):
        raise DeviceError("compressed bodies are not decompressed on a device: read them here")
    if not nulls_are_counted(header):
        raise RemoteProtocolError("the server does not give the number of nulls in data on a device")
    if placed is None:
        return mover.move(header, parsed, *_packed(delivery, body))
    if placed.is_empty:
        if delivery.leased:
            bodies.leases.free(delivery.leased)
        return DeviceMessage(relocate(header, parsed, [0] * len(placed.lengths), 0), parsed, pa.py_buffer(b""))
    located = bodies.address_space.locate(placed.addresses, placed.lengths)
    whole = bodies.leases.lease(located.memory, delivery.leased, located.device)
    if located.device is mover.device and not any(offset % 8 for offset in located.offsets):
        return _in_place(delivery, located, whole)
    if located.device not in (None, mover.device):
        raise RemoteProtocolError(f"the server sent addresses on another device than {mover.device.name}")
    return mover.move(header, parsed, [whole.address + offset for offset in located.offsets], whole)


class DeviceReceiver:
    """The messages of a stream that is received onto a device, up to the first that must be decoded on the host.

    It owns `deliveries`.
    """

    def __init__(self, deliveries: Generator[Delivery, None, None], bodies: Bodies, device: Device) -> None:
        self._deliveries = deliveries
        self._bodies = bodies
        self._device = device
        # The first message to decode on the host, preceded by its dictionaries.
        self._decoded_here: list[Delivery] = []

    def messages(self) -> Generator[DeviceMessage, None, None]:
        """Yield these messages.

        libarrow requires all dictionaries with the first batch. So dictionaries are held back until the batch that
        follows.

        Raises:
            DeviceFull, DeviceError: The device is full, or fails.
        """
        together: list[Delivery] = []
        try:
            with closing(Mover(self._device)) as mover:
                for delivery in self._deliveries:
                    together.append(delivery)
                    if not _arrived_movable(delivery):
                        self._decoded_here = together
                        return
                    ready = delivery.parsed.type is not HeaderType.DICTIONARY_BATCH
                    del delivery  # do not keep its body while this generator is suspended
                    while ready and together:
                        yield self._moved(together.pop(0), mover)
        finally:
            self._bodies.receive_onto(None)
            if not self._decoded_here:
                self._deliveries.close()

    def _moved(self, delivery: Delivery, mover: Mover) -> DeviceMessage:
        if not isinstance(delivery.body, DeviceBuffer):
            return _move(delivery, delivery.body, mover)
        received = delivery.body.take()
        with suppress(DeviceFull):
            return _move(delivery, received, mover)
        self._bodies.receive_onto(None)  # the memory for receiving may be exactly the memory that is lacking
        received = copy_to_host(self._device, received)
        mover.settle()
        return _move(delivery, received, mover)

    def remaining_messages(self, begin: Messages) -> Messages | None:
        """Return the remaining messages for libarrow to decode, preceded by `begin`; None if there are none."""
        return self._remaining_messages(begin) if self._decoded_here else None

    def _remaining_messages(self, begin: Messages) -> Messages:
        with closing(self._deliveries):
            yield from begin
            first, self._decoded_here = self._decoded_here, []
            yield from map(self._attach, chain(first, self._deliveries))

    def _attach(self, delivery: Delivery) -> EncodedMessage:
        return self._bodies.attach(delivery._replace(body=self._on_host(delivery.body)))

    def _on_host(self, body: Buffer | None) -> Buffer | None:
        return copy_to_host(self._device, body.take()) if isinstance(body, DeviceBuffer) else body


def is_movable(header: bytes, parsed: Header) -> bool:
    """Return whether the buffers of this message can be moved to a device unchanged, without libarrow reading them."""
    if parsed.type not in (HeaderType.RECORD_BATCH, HeaderType.DICTIONARY_BATCH):
        return parsed.type is HeaderType.SCHEMA
    if is_compressed(header) or not nulls_are_counted(header):
        return False
    if parsed.type is HeaderType.DICTIONARY_BATCH and dictionary_of(header)[1]:
        return False  # a delta would have to be joined with the dictionary
    _, lengths = buffer_extents(header, parsed)
    return all(length >= 0 for length in lengths) and sum(lengths) <= parsed.body_length


def _arrived_movable(delivery: Delivery) -> bool:
    return delivery.addresses is None and is_movable(delivery.header, delivery.parsed)


def _move(delivery: Delivery, body: Buffer | None, mover: Mover) -> DeviceMessage:
    """Copy a body to the device of `mover`, with its buffers aligned as in `LAYOUT`, and return the message."""
    header, parsed = delivery.header, delivery.parsed
    if parsed.type is HeaderType.SCHEMA:
        return DeviceMessage(header, parsed, None)
    addresses, whole = _packed(delivery, body)
    _, lengths = buffer_extents(header, parsed)
    ends = [*accumulate((length + -length % LAYOUT.alignment for length in lengths), initial=0)]
    header = relocate(header, parsed, ends[:-1], ends[-1])
    return mover.move(header, parsed._replace(body_length=ends[-1]), addresses, whole)


def _packed(delivery: Delivery, body: object) -> tuple[list[int], object]:
    """Return the addresses of the buffers of a packed body, and the object that keeps them allocated."""
    whole = pa.py_buffer(b"" if body is None else body)
    offsets, _ = extents_within(delivery.header, delivery.parsed, whole.size)
    return [whole.address + offset for offset in offsets], whole


def _in_place(delivery: Delivery, located: Located, whole: pa.Buffer) -> DeviceMessage:
    """Return the message with its buffers in place: the body reaches from the first buffer to the last."""
    _, lengths = buffer_extents(delivery.header, delivery.parsed)
    extents = [(offset, length) for offset, length in zip(located.offsets, lengths, strict=True) if length]
    first = min(offset for offset, _ in extents)
    size = max(offset + length for offset, length in extents) - first
    offsets = [offset - first if length else 0 for offset, length in zip(located.offsets, lengths, strict=True)]
    header = relocate(delivery.header, delivery.parsed, offsets, size)
    return DeviceMessage(header, delivery.parsed, whole.slice(first, size), shared=True)
