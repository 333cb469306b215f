"""Reading onto a device, compared with the bandwidth of pinned memory; and opening another process's device memory.

This was not yet run on a GPU. With `--device test:0` it runs on every machine, but its figures mean nothing.

A segment is registered with the driver each time it is read. There is a row for registration alone, and a row for
reading without it, in which the driver copies through a buffer of its own. Only a run on a GPU can tell which is
faster.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow.parquet as pq

import dissociated as dis
from benchmarks.peers import Shape
from benchmarks.rounds import medians
from dissociated.cli import text
from dissociated.codec.device import DeviceBatch, to_device
from dissociated.codec.inplace import MappedReader
from dissociated.memory.device.base import Device
from dissociated.memory.device.registry import open_device

_CONTEXT = multiprocessing.get_context("spawn")
_SIXTEENTHS = (1, 4, 16)  # sixteenths of the data that are opened by handle; the time should not depend on their number
_GOAL = 0.9  # fraction of the bandwidth of pinned memory that reading over shm should reach


def run(gigabytes: float, rounds: int, name: str) -> None:
    """Measure, and print the tables. Raise DeviceNotFound if this machine lacks the device."""
    device = open_device(name)
    count = max(16, round(gigabytes * 64))  # at least one for each sixteenth
    shape = Shape("16 MB or less", count, 10, min(209_715, round(gigabytes * 1e9) // (count * 80)))
    with _serving(shape, name) as catalog, dis.connect(catalog) as client, tempfile.TemporaryDirectory() as scratch:
        seconds = medians(_copies(client, device, shape, Path(scratch)), rounds)
        opened = medians({f"{part}/16": partial(_read, client, f"on {part}", device) for part in _SIXTEENTHS}, rounds)
    limit = seconds["pinned memory, the limit"]
    rows = [
        (way, f"{took * 1e3:.1f}", f"{shape.nbytes / took / 1e9:.2f}", f"{limit / took:.2f}")
        for way, took in seconds.items()
    ]
    size = shape.nbytes / shape.batches / 1e6
    print(f"{shape.nbytes / 1e9:.2f} GB in batches of {size:.0f} MB onto {name}, median of {rounds} rounds\n")
    print(text.table(("FROM", "MS", "GB/S", "OF THE LIMIT"), rows, right=(1, 2, 3)))
    print(f"\nshm: {limit / seconds['shm']:.2f} of the limit; the goal is {_GOAL}\n")
    print(
        text.table(
            ("OPENED BY HANDLE", "MS"), [(part, f"{took * 1e3:.2f}") for part, took in opened.items()], right=(1,)
        )
    )
    if not find_spec("pylibcudf"):
        print("\npylibcudf is not installed: its own reader of Parquet was not measured")


def _has_ucx() -> bool:
    return bool(find_spec("cffi") and find_spec("libucx"))


def _serve(shape: Shape, name: str, pipe: Connection) -> None:
    table = shape.table()
    with dis.Server(["shm:", "tcp://127.0.0.1:0", *(["ucx:"] if _has_ucx() else [])]) as server:
        server.publish("host", table)
        for part in _SIXTEENTHS:
            some = table.slice(0, table.num_rows * part // 16)
            server.publish(f"on {part}", to_device(some.to_reader(), open_device(name)))
        pipe.send(server.catalog_uri)
        pipe.recv()


@contextmanager
def _serving(shape: Shape, name: str) -> Iterator[str]:
    ours, theirs = _CONTEXT.Pipe()
    server = _CONTEXT.Process(target=_serve, args=(shape, name, theirs), daemon=True)
    server.start()
    theirs.close()  # so that `recv` fails if the server dies
    try:
        yield ours.recv()
        ours.send(None)
        server.join(10)
    finally:
        server.kill()


def _copies(client: dis.Client, device: Device, shape: Shape, scratch: Path) -> dict[str, Callable[[], Any]]:
    """Return the ways of copying all bytes to the device. Each call returns when the copy is complete."""
    body = shape.nbytes // shape.batches
    stream = device.stream()
    source = device.ring.allocate(body)
    assert source is not None

    def pinned() -> None:
        memories = [device.allocate(body, stream) for _ in range(shape.batches)]
        for memory in memories:
            stream.copy(memory.address, source.address, body)
        stream.synchronize()

    ways: dict[str, Callable[[], Any]] = {"pinned memory, the limit": pinned}
    for transport in ("shm", "tcp"):
        ways[transport] = partial(_read, client, "host", device, transport)
    if _has_ucx():
        ways["ucx"] = partial(_read, client, "host", device, "ucx")
        ways["ucx, into the device's memory"] = partial(_read_by_ucx_itself, client, device)
    ways["shm, not registered"] = partial(_read_unregistered, client, device)
    ways["registering alone"] = partial(_register, client, device)
    ways["Flight, and then a copy"] = partial(_read, client, "host", device, "grpc")
    if find_spec("pylibcudf"):
        path = scratch / "host.parquet"
        pq.write_table(client.read("host").read_all(), path, compression="none", use_dictionary=False)
        ways["pylibcudf's reader of Parquet"] = partial(_read_parquet, path)
    return ways


def _read(client: dis.Client, name: str, device: Device, transport: str | None = None) -> list[DeviceBatch]:
    batches = [*client.read_on_device(name, device, transport=transport)]
    for batch in batches:
        batch.synchronize()
    return batches


def _read_unregistered(client: dis.Client, device: Device) -> None:
    with patch.object(device, "register", lambda memory, afterwards: None):
        _read(client, "host", device, "shm")


def _read_by_ucx_itself(client: dis.Client, device: Device) -> None:
    with patch.dict(os.environ, DISSOCIATED_UCX_DEVICE_MEMORY="y"):
        _read(client, "host", device, "ucx")


def _register(client: dis.Client, device: Device) -> None:
    reader = client.read("host", transport="shm")
    assert isinstance(reader, MappedReader)
    with ExitStack() as registered:
        for region in reader.regions:
            device.register(region.memory, registered.callback)


def _read_parquet(path: Path) -> Any:
    import pylibcudf

    source = pylibcudf.io.SourceInfo([str(path)])
    return pylibcudf.io.parquet.read_parquet(pylibcudf.io.parquet.ParquetReaderOptions.builder(source).build())
