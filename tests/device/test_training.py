"""Batches for training that are copied to a device ahead of their use."""

from __future__ import annotations

import gc
import importlib
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.codec.device import copy_to_host
from dissociated.codec.dlpack import DeviceColumn
from dissociated.errors import OptionError, WrongKind
from dissociated.memory.device.base import Device, DeviceType
from dissociated.torch import loader
from dissociated.training import Batches

ROWS = 1000


@pytest.fixture
def torch(device: Device) -> Any:
    """Return PyTorch. It gets a backend for the emulated device, whose tensors it can make but not compute with."""
    module = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'dissociated[torch]'")
    if device.type is not DeviceType.CUDA:
        registration = importlib.import_module("torch.utils.backend_registration")
        if not hasattr(registration, "_setup_privateuseone_for_python_backend"):
            pytest.skip(f"PyTorch {module.__version__} cannot register a backend from Python")
        if not hasattr(module, "privateuseone"):  # once in a process
            registration._setup_privateuseone_for_python_backend()
    elif not module.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    return module


def on_host(column: DeviceColumn) -> Any:
    """Return the values of a column that array libraries get by its interface, copied from the device."""
    there = column.array_interface()
    kind = np.dtype(there["typestr"])
    length = int(np.prod(there["shape"])) * kind.itemsize
    memory = copy_to_host(column.device, pa.foreign_buffer(there["data"][0], length, column))
    return np.frombuffer(memory, kind).reshape(there["shape"])


def publish(server: dis.Server) -> None:
    columns: dict[str, Any] = {f"f{at}": np.arange(ROWS, dtype=np.float32) + at for at in range(3)}
    flags = np.arange(ROWS) % 2 == 0
    table = pa.table({**columns, "n": range(ROWS), "flag": flags, "s": map(str, range(ROWS))})
    server.publish("data", pa.Table.from_batches(table.to_batches(max_chunksize=70)))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_batches_come_on_the_device(server: dis.Server, client: dis.Client, device: Device, transport: str) -> None:
    publish(server)
    handle = client.dataset("data", transport=transport)
    ways: list[dict[str, Any]] = [
        {},
        {"prefetch": 0},
        {"prefetch": 100},
        {"shuffle": True},
        {"shuffle": True, "features": ["f2"]},
    ]
    for options in ways[1:4] if transport == "shm" else ways[::4]:
        given: dict[str, Any] = {"columns": ["n", "flag"], "batch_size": 64, "features": ["f0", "f1", "f2"], **options}
        batches = Batches(handle, device=device.name, **given)
        seen = []
        for batch in batches:
            assert batch["n"].device is device
            n, flags, features = (on_host(batch[name]) for name in ("n", "flag", "features"))
            width = len(given["features"])
            assert features.shape == (len(n), width)
            assert np.array_equal(features, n[:, None] + np.arange(3 - width if width == 1 else 0, 3)[:width])
            assert np.array_equal(flags, n % 2 == 0)
            seen += n.tolist()
        assert sorted(seen) == [*range(ROWS)]
        assert batches.state_dict()["epoch"] == 1
        del batch
        gc.collect()


def test_lists_within_lists_keep_their_shape_on_the_device(server: dis.Server, client: dis.Client) -> None:
    values = np.arange(ROWS * 6, dtype=np.int16)
    inner = pa.FixedSizeListArray.from_arrays(values, 3)
    server.publish("data", pa.table({"image": pa.FixedSizeListArray.from_arrays(inner, 2)}))
    for shuffle in (False, True):
        batches = Batches(client["data"], columns=["image"], batch_size=64, device="test:0", shuffle=shuffle)
        images = np.concatenate([on_host(batch["image"]) for batch in batches])
        assert images.shape == (ROWS, 2, 3)
        ordered = images[images[:, 0, 0].argsort(kind="stable")] if shuffle else images
        assert np.array_equal(ordered, values.reshape(-1, 2, 3))


def test_a_run_on_a_device_goes_on_where_it_was_interrupted(server: dis.Server, client: dis.Client) -> None:
    publish(server)
    options: dict[str, Any] = {"columns": ["n"], "batch_size": 64, "shuffle": True, "device": "test:0"}
    first = Batches(client["data"], **options)
    seen = []
    for number, batch in enumerate(first):
        seen += on_host(batch["n"]).tolist()
        if number == 4:
            break
    second = Batches(client["data"], **options)
    second.load_state_dict(first.state_dict())  # which counts no batches that were only copied ahead
    seen += [row for batch in second for row in on_host(batch["n"]).tolist()]
    assert sorted(seen) == [*range(ROWS)]


def test_only_numbers_come_on_a_device(server: dis.Server, client: dis.Client) -> None:
    publish(server)
    with pytest.raises(WrongKind, match="'s' has no array of numbers"):
        [*Batches(client["data"], columns=["s"], as_arrow=["s"], device="test:0")]
    with pytest.raises(OptionError, match="prefetch"):
        Batches(client["data"], columns=["n"], device="test:0", prefetch=-1)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_the_loader_gives_tensors_on_the_device(
    torch: Any, server: dis.Server, client: dis.Client, device: Device, transport: str
) -> None:
    publish(server)
    handle = client.dataset("data", transport=transport)
    where = torch.device("cuda" if device.type is DeviceType.CUDA else "privateuseone", device.number)

    def values(tensor: Any) -> Any:
        assert tensor.device == where
        memory = copy_to_host(device, pa.foreign_buffer(tensor.data_ptr(), tensor.nbytes, tensor))
        return np.frombuffer(memory, str(tensor.dtype).removeprefix("torch.")).reshape(tensor.shape)

    def check(batches: Any, seen: list[int], stop: int = 0) -> None:
        for batch in batches:
            n, flags, features = (values(batch[name]) for name in ("n", "flag", "features"))
            assert np.array_equal(flags, n % 2 == 0)
            assert np.array_equal(features, n[:, None] + [0, 1, 2])
            seen += n.tolist()
            if len(seen) == stop:
                break

    options: dict[str, Any] = {"columns": ["n", "flag"], "features": ["f0", "f1", "f2"], "device": device.name}
    for shuffle in (False, True):
        for prefetch in (0, 2, 100):
            seen: list[int] = []
            first = loader(handle, batch_size=64, shuffle=shuffle, prefetch=prefetch, **options)
            check(first, seen, stop=5 * 64)
            again = loader(handle, batch_size=64, shuffle=shuffle, prefetch=prefetch, **options)
            again.load_state_dict(first.state_dict())  # which counts no batches that were only copied ahead
            check(again, seen)
            assert (seen if not shuffle else sorted(seen)) == [*range(ROWS)]
            assert again.state_dict()["epoch"] == 1
    with pytest.raises(OptionError, match="use num_workers=0"):
        [*loader(handle, num_workers=1, multiprocessing_context="fork", **options)]
    with pytest.raises(WrongKind, match="'s' has no array of numbers"):
        [*loader(handle, columns=["s"], as_arrow=["s"], device=device.name)]
