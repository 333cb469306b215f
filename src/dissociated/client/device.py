"""Bodies that come to lie on a device, or lie there already, in the server's memory."""

from __future__ import annotations

import sys

import pyarrow as pa

from dissociated.client.bodies import Bodies
from dissociated.codec.device import DeviceMessage, Mover
from dissociated.errors import DeviceError, RemoteProtocolError
from dissociated.format.layout import is_little_endian, nulls_are_counted
from dissociated.format.message import HeaderType, buffer_extents, is_compressed, relocate
from dissociated.memory.region import Located
from dissociated.protocol.delivery import Delivery


def place_on_device(delivery: Delivery, bodies: Bodies, mover: Mover) -> DeviceMessage:
    """The message with its body on the device of `mover`: where the server has it, or else copied there.

    Raises RemoteProtocolError for what libarrow would have to look into, DeviceError for what has to be computed.
    """
    _, header, parsed, body, placed = delivery
    if parsed.type is HeaderType.SCHEMA:
        if not is_little_endian(header) or sys.byteorder != "little":
            raise DeviceError("bodies of the other byte order are not swapped on a device: read them here")
        return DeviceMessage(header, parsed, None)
    if is_compressed(header):
        raise DeviceError("compressed bodies are not decompressed on a device: read them here")
    if not nulls_are_counted(header):
        raise RemoteProtocolError("the server does not say how many nulls there are in what lies on a device")
    if placed is None:
        return mover.move(header, parsed, *_packed(delivery, body))
    if not placed.leased:
        return DeviceMessage(relocate(header, parsed, placed.addresses, 0), parsed, pa.py_buffer(b""))
    located = bodies.address_space.locate(placed.addresses, placed.lengths)
    whole = bodies.lease(located.memory, placed.leased, located.device)
    if located.device is mover.device and not any(offset % 8 for offset in located.offsets):
        return _in_place(delivery, located, whole)
    if located.device not in (None, mover.device):
        raise RemoteProtocolError(f"the server sent addresses on another device than {mover.device.name}")
    return mover.move(header, parsed, [whole.address + offset for offset in located.offsets], whole)


def _packed(delivery: Delivery, body: object) -> tuple[list[int], object]:
    """Where the buffers of a packed body lie, and what keeps them there."""
    whole = pa.py_buffer(b"" if body is None else body)
    offsets, lengths = buffer_extents(delivery.header, delivery.parsed)
    if any(length and not 0 <= offset <= whole.size - length for offset, length in zip(offsets, lengths, strict=True)):
        raise RemoteProtocolError("the server sent a body that its buffers leave")
    return [whole.address + offset for offset in offsets], whole


def _in_place(delivery: Delivery, located: Located, whole: pa.Buffer) -> DeviceMessage:
    """The message around its buffers where they lie: the body is what reaches from the first to the last of them."""
    _, lengths = buffer_extents(delivery.header, delivery.parsed)
    extents = [(offset, length) for offset, length in zip(located.offsets, lengths, strict=True) if length]
    first = min(offset for offset, _ in extents)
    size = max(offset + length for offset, length in extents) - first
    offsets = [offset - first if length else 0 for offset, length in zip(located.offsets, lengths, strict=True)]
    header = relocate(delivery.header, delivery.parsed, offsets, size)
    return DeviceMessage(header, delivery.parsed, whole.slice(first, size), shared=True)
