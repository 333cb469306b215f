"""Device memory that peers open by handle, as a region of addresses."""

from __future__ import annotations

import logging

from dissociated.errors import DeviceError
from dissociated.memory.device.base import Device, DeviceMemory
from dissociated.memory.region import Region, reserve_base
from dissociated.memory.remote import Span

_log = logging.getLogger(__name__)


class DeviceSegment:
    """Data of a server on a device, written once. It exists for as long as this object is referred to."""

    def __init__(self, memory: DeviceMemory) -> None:
        self.device: Device = memory.device
        self.memory = memory
        try:
            handle = memory.device.export(memory)
        except DeviceError as error:
            why = str(error)  # not the error itself, whose traceback would keep the memory
            _log.warning("export failed, clients get copies on the host: device=%s error=%s", self.device, why)
            handle = b""
        #: The addresses that peers are sent, and the handle that opens them. Without a handle, no peer can open them.
        self.span = Span(reserve_base(memory.size), memory.size, handle)

    def address(self, peer_address: int) -> int:
        """Return the address in this process of the memory that peers know by the address `peer_address`."""
        return self.memory.address + peer_address - self.span.base


def open_region(device: Device, span: Span) -> Region:
    """Open a peer's segment on this device, and return its region.

    Raises:
        DeviceError: The segment cannot be opened.
    """
    return Region(span.base, device.open(span.key, span.size).buffer(), device=device, handle=span.key)
