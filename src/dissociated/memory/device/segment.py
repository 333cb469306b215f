"""Memory of a device that peers open by handle, as a region of addresses like any other."""

from __future__ import annotations

import logging

from dissociated.errors import DeviceError
from dissociated.memory.device.base import Device, DeviceMemory
from dissociated.memory.region import Region, reserve_base
from dissociated.memory.remote import Span

_log = logging.getLogger(__name__)


class DeviceSegment:
    """What a server has on a device, written once. It stays for as long as this is referred to."""

    def __init__(self, memory: DeviceMemory) -> None:
        self.device: Device = memory.device
        self.memory = memory
        try:
            handle = memory.device.export(memory)
        except DeviceError as error:
            why = str(error)  # and not the error: its frames hold the memory
            _log.warning("%s gives no handle of its memory, and clients get copies on the host: %s", self.device, why)
            handle = b""
        #: For peers: the addresses that they are sent, and what opens them; without a key, nobody can.
        self.span = Span(reserve_base(memory.size), memory.size, handle)

    def address(self, sent: int) -> int:
        """Where in this process that lies which peers know by this address."""
        return self.memory.address + sent - self.span.base


def open_region(device: Device, span: Span) -> Region:
    """The region of a peer's segment, opened on this device. Raises DeviceError where it cannot be."""
    return Region(span.base, device.open(span.key, span.size).buffer(), device=device, handle=span.key)
