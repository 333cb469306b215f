"""The devices that the suite runs on: one of our own, everywhere, and a GPU where there is one."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

import dissociated as dis
from dissociated.errors import DeviceNotFound
from dissociated.memory.device.base import Device
from dissociated.memory.device.emulated import EmulatedDevice
from dissociated.memory.device.registry import open_device
from helpers import clients_end


@pytest.fixture(params=["test:0", "cuda:0"])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """A device on which the test must leave nothing."""
    try:
        found = open_device(request.param)
    except DeviceNotFound as error:
        pytest.skip(f"no driver: {error}")
    gc.collect()
    before = found.allocations, found.nbytes
    yield found
    gc.collect()
    assert (found.allocations, found.nbytes) == before, "memory is left on the device"


@pytest.fixture
def emulated() -> Iterator[EmulatedDevice]:
    """The device of our own, to be limited and lost."""
    found = open_device("test:1")
    assert isinstance(found, EmulatedDevice)
    limit = found.limit
    yield found
    found.limit, found.exports, found.capturing = limit, True, False
    found.lose(False)
    gc.collect()
    assert not found.allocations


@pytest.fixture
def client(server: dis.Server) -> Iterator[dis.Client]:
    """Of the module's server. What it has read is given back at its end."""
    with dis.connect(server.catalog_uri) as client:
        yield client
        gc.collect()
        clients_end()
