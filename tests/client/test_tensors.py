"""Guarantees of a reader of tensors: no copies, and memory is released when the last array is collected."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.client.stream import TensorReader
from memory.maps import mappings
from support.helpers import Serve, connections_left
from support.tensor_cases import arrays, some

SPARSE = np.arange(1 << 20) % 7 == 0
LARGE = [
    pa.Tensor.from_numpy(np.arange(1.0, 1 + (1 << 20)).reshape(1 << 10, -1)),
    pa.SparseCSRMatrix.from_dense_numpy(SPARSE.astype("f4").reshape(1 << 10, -1)),
]


def read(server: dis.Server, name: str = "data") -> TensorReader:
    return dis.open_tensors(server.locations(name)[0], server.ticket(name))


def origin(array: np.ndarray) -> tuple[str, str, int]:
    """Return the permissions and path of the mapping that contains an array, and the array's offset in it modulo 64."""
    first, last = array.ctypes.data, array.ctypes.data + array.nbytes
    (home,) = (one for one in mappings() if one.start <= first and last <= one.end)
    return home.permissions, home.path, (first - home.start) % 64


@pytest.fixture
def shm(serve: Serve) -> dis.Server:
    return serve("shm:")


@pytest.mark.parametrize("tensors", [some(), LARGE], ids=["small", "large"])
def test_arrays_lie_in_shared_memory_aligned_to_64(shm: dis.Server, tensors: list[Any]) -> None:
    shm.publish("data", tensors)
    found = {origin(array) for tensor in read(shm) for array in arrays(tensor) if array.size}
    assert found == {("r--s", "/memfd:dissociated:data (deleted)", 0)}


def test_reading_shared_memory_allocates_nothing(shm: dis.Server) -> None:
    shm.publish("data", LARGE)
    before = pa.total_allocated_bytes()
    kept = list(read(shm))
    assert pa.total_allocated_bytes() == before
    assert [one.equals(other) for one, other in zip(kept, LARGE, strict=True)] == [True, True]
    assert not any(array.flags.writeable for tensor in kept for array in arrays(tensor))


def test_tcp_receives_each_body_into_one_allocation(serve: Serve) -> None:
    server = serve("tcp://127.0.0.1:0")
    server.publish("data", LARGE)
    before = pa.total_allocated_bytes()
    reader = read(server)
    kept = [next(reader)]
    assert pa.total_allocated_bytes() - before == 8 << 20
    kept += reader
    begins, columns, values = 8 * 1025, 8 * int(SPARSE.sum()), 4 * int(SPARSE.sum())
    rounded = sum(-(-size // 64) * 64 for size in (begins, columns, values))
    assert pa.total_allocated_bytes() - before == (8 << 20) + rounded
    for tensor, other in zip(kept, LARGE, strict=True):
        assert tensor.equals(other)
        assert all(array.ctypes.data % 64 == 0 for array in arrays(tensor))


def test_inproc_hands_dense_tensors_over_as_they_are(serve: Serve) -> None:
    server = serve("inproc:")
    server.publish("data", LARGE[0])
    (arrived,) = read(server)
    assert arrived.to_numpy().ctypes.data == LARGE[0].to_numpy().ctypes.data


@pytest.mark.parametrize("which", range(2), ids=["dense", "sparse"])
def test_memory_is_held_until_the_last_array_is_collected(shm: dis.Server, which: int) -> None:
    shm.publish("data", LARGE)
    kept = arrays(list(read(shm))[which])[0][5:7]
    shm.drop("data")
    assert shm.connections == 1
    assert (kept == arrays(LARGE[which])[0][5:7]).all()
    del kept
    assert connections_left(shm) == 0
