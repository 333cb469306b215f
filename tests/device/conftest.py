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
from helpers import clients_end, connections_left


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
    assert (found.kept, found.copies) == (0, set()), "somebody has not waited for its copies"


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
    found.retry()
    assert (found.allocations, found.kept, found.copies) == (0, 0, set())


@pytest.fixture
def server() -> Iterator[dis.Server]:
    """One that all its readers have left at the end, and that then drops what it served: its memory is the device's."""
    with dis.Server(["shm:", "tcp://127.0.0.1:0"]) as server:
        yield server
        gc.collect()
        assert not connections_left(server)
        for name in server.names():
            server.drop(name)


@pytest.fixture
def client(server: dis.Server) -> Iterator[dis.Client]:
    """Of this server, or the module's own. What it has read is given back at its end."""
    with dis.connect(server.catalog_uri) as client:
        yield client
        gc.collect()
        clients_end()
