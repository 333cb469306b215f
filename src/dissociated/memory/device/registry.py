"""Devices by name."""

from __future__ import annotations

from dissociated.base.once import once
from dissociated.errors import DeviceNotFound
from dissociated.memory.device.base import Device


def open_device(name: object) -> Device:
    """Return the device with this name, such as cuda:0.

    Args:
        name: A name, an object that prints as one, or a Device, which is returned.

    Raises:
        DeviceNotFound: There is no such device, or no driver or package for it.
    """
    if isinstance(name, Device):
        return name
    kind, _, number = str(name).partition(":")
    if kind not in ("cuda", "test") or not (number or "0").isdecimal():
        raise DeviceNotFound(f"{name!r} is not the name of a device: give one such as cuda:0")
    return _opened(kind, int(number or "0"))


@once
def _opened(kind: str, number: int) -> Device:
    if kind == "cuda":
        from dissociated.memory.device.cuda import CudaDevice

        return CudaDevice(number)
    from dissociated.memory.device.emulated import COUNT, EmulatedDevice

    if number >= COUNT:
        raise DeviceNotFound(f"device test:{number} does not exist: there are {COUNT}, from test:0 on")
    return EmulatedDevice(number)
