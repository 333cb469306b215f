"""A dataset on a device, on its way to a client that can open its memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dissociated.memory.device.segment import DeviceSegment
from dissociated.protocol.bodies import encode_addresses
from dissociated.protocol.sender import Body
from dissociated.protocol.tags import BodyKind
from dissociated.server.sending import ClientRequest, Sending

if TYPE_CHECKING:
    from dissociated.datasets.device import DeviceDataset

#: What clients may still map although they were not waited for: a driver would give the same memory to somebody else.
_abandoned: list[DeviceSegment] = []


class DeviceSending(Sending):
    """Sends addresses in a segment on a device. That is given back only when the client has let go of it."""

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
        return True  # it may have opened the handle, whatever it leases: only when it has hung up has it closed that

    def end(self, disconnected: bool) -> None:
        super().end(disconnected)
        segment = self._dataset.segment
        if not disconnected and segment is not None:
            _abandoned.append(segment)
