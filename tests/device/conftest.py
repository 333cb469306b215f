"""The devices of the tests: an emulated one everywhere, and a GPU on machines that have one."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

import dissociated as dis
from dissociated.errors import DeviceNotFound
from dissociated.memory.device.base import Device
from dissociated.memory.device.emulated import EmulatedDevice
from dissociated.memory.device.registry import open_device
from support.helpers import clients_end, connections_left


@pytest.fixture(scope="module", autouse=True)
def _objects_of_others() -> Iterator[None]:
    """Exclude objects that earlier tests left from garbage collection, which most of these tests ask for.

    Later modules collect what has become garbage since.
    """
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(params=["test:0", "cuda:0"])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """Yield a device, and check that the test leaves nothing on it."""
    try:
        found = open_device(request.param)
    except DeviceNotFound as error:
        pytest.skip(f"no driver: {error}")
    gc.collect()
    before = found.allocations, found.nbytes
    yield found
    gc.collect()
    assert (found.allocations, found.nbytes) == before, "memory is left on the device"
    assert (found.pending_release_count, found.copies) == (0, set()), "somebody has not waited for its copies"


@pytest.fixture
def emulated() -> Iterator[EmulatedDevice]:
    """Yield the emulated device, which tests may limit and lose."""
    found = open_device("test:1")
    assert isinstance(found, EmulatedDevice)
    limit = found.limit
    yield found
    found.limit, found.exports, found.capturing = limit, True, False
    found.lose(False)
    gc.collect()
    found.retry()
    assert (found.allocations, found.pending_release_count, found.copies) == (0, 0, set())


@pytest.fixture
def server() -> Iterator[dis.Server]:
    """Yield a server, and check that all readers have left at the end.

    Then drop its datasets, because their memory is the device's.
    """
    with dis.Server(["shm:", "tcp://127.0.0.1:0"]) as server:
        yield server
        gc.collect()
        assert not connections_left(server)
        for name in server.names():
            server.drop(name)


@pytest.fixture
def client(server: dis.Server) -> Iterator[dis.Client]:
    """Yield a client of this server, or the module's own, and release the memory of its reads at the end."""
    with dis.connect(server.catalog_uri) as client:
        yield client
        gc.collect()
        clients_end()
