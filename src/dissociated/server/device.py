"""Sending of a dataset on a device to a client that can open the device's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dissociated.memory.device.segment import DeviceSegment
from dissociated.protocol.bodies import encode_addresses
from dissociated.protocol.sender import Body
from dissociated.protocol.tags import BodyKind
from dissociated.server.sending import ClientRequest, Sending

if TYPE_CHECKING:
    from dissociated.datasets.device import DeviceDataset

#: Segments that clients may still have mapped when this side stopped waiting for them. They are never freed, since the
#: driver would give the same memory to another allocation while a client still reads it.
_abandoned: list[DeviceSegment] = []


class DeviceSending(Sending):
    """The sending of a dataset as addresses in a device segment, which is freed only after the client closed it."""

    def __init__(self, client: ClientRequest, dataset: DeviceDataset) -> None:
        super().__init__(client)
        self._dataset = dataset

    def send(self) -> None:
        for message in self._dataset.placed:
            extents = message.extents
            body = Body(BodyKind.PACKED, ()) if message.parsed.has_body else None
            if extents is not None:
                body = Body(BodyKind.ADDRESSES, (encode_addresses(extents),))
                self._hold([address for address, length in extents if length], len(extents))
            with self._stats.sending(self._connection, message.parsed.body_length):
                self._connection.send(self._sender.send(message.header, body), self._limits.stall_timeout)
            self._stats.messages += 1
            self._take_frees()

    @property
    def holds_live(self) -> bool:
        # The client may have opened the handle even if it leases no address. Only its disconnection shows that the
        # handle is closed.
        return True

    def end(self, disconnected: bool) -> None:
        super().end(disconnected)
        segment = self._dataset.segment
        if not disconnected and segment is not None:
            _abandoned.append(segment)
