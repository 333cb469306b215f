"""The peers of the benchmarks: our server with its Flight, a bare socket, a mapped file, Ray, and Vineyard."""

from __future__ import annotations

import multiprocessing
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa

import dissociated as dis

_CONTEXT = multiprocessing.get_context("spawn")

#: A function for each shape, by its name, that reads it.
Readers: TypeAlias = Mapping[str, Callable[[], pa.Table]]


class Shape(NamedTuple):
    """The shape of a dataset of float64 columns: its number of batches, and the columns and rows of each batch.

    If `one` is set, all batches are the same object.
    """

    name: str
    batches: int
    columns: int
    rows: int
    one: bool = False

    @property
    def nbytes(self) -> int:
        return self.batches * self.columns * self.rows * 8

    def table(self) -> pa.Table:
        """Build the dataset. Unless `one` is set, each batch has memory of its own, so that caches do not help."""
        random = np.random.default_rng(1)
        batches = [
            pa.record_batch({f"c{column}": random.random(self.rows) for column in range(self.columns)})
            for _ in range(1 if self.one else self.batches)
        ]
        return pa.Table.from_batches(batches * (self.batches // len(batches)))


def _serve(shapes: list[Shape], listen: Sequence[str], pipe: Connection) -> None:
    with dis.Server(listen) as server:
        for shape in shapes:
            server.publish(shape.name, shape.table())
        pipe.send(server.catalog_uri)
        pipe.recv()


def _send_bare(shapes: list[Shape], pipe: Connection) -> None:
    """Serve bare sockets: read the index of a shape, and send its number of bytes from buffers of its batch size."""
    listener = socket.create_server(("127.0.0.1", 0))
    pipe.send(listener.getsockname()[1])
    bodies = [
        [memoryview(np.random.default_rng(2).bytes(shape.nbytes // shape.batches)) for _ in range(8)]
        for shape in shapes
    ]
    while True:
        connection, _ = listener.accept()
        with connection:
            index = connection.recv(1)
            if not index:
                return
            shape, some = shapes[index[0]], bodies[index[0]]
            for batch in range(shape.batches):
                connection.sendall(some[batch % len(some)])


class Peers(NamedTuple):
    """The peers: the URI of the catalog, the port of the bare socket, and the ids of both processes."""

    catalog: str
    bare_port: int
    server_pid: int
    bare_pid: int


@contextmanager
def running(shapes: list[Shape], listen: Sequence[str] = ("shm:", "tcp://127.0.0.1:0")) -> Iterator[Peers]:
    """Run a server and a bare socket in processes of their own while the context is open."""
    ours, theirs = _CONTEXT.Pipe()
    bare_ours, bare_theirs = _CONTEXT.Pipe()
    server = _CONTEXT.Process(target=_serve, args=(shapes, listen, theirs), daemon=True)
    bare = _CONTEXT.Process(target=_send_bare, args=(shapes, bare_theirs), daemon=True)
    server.start()
    bare.start()
    try:
        port = bare_ours.recv()
        yield Peers(ours.recv(), port, int(server.pid or 0), int(bare.pid or 0))
        socket.create_connection(("127.0.0.1", port)).close()
        ours.send(None)
        server.join(10)
        bare.join(10)
    finally:
        server.kill()
        bare.kill()


def receive_bare(port: int, index: int, shape: Shape) -> list[pa.Buffer]:
    """Receive the same bytes over a bare Python socket, each batch into newly allocated memory."""
    received = []
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(bytes([index]))
        for _ in range(shape.batches):
            body = pa.allocate_buffer(shape.nbytes // shape.batches)
            view, at = memoryview(body), 0
            while at < len(view):
                at += connection.recv_into(view[at:])
            received.append(body)
    return received


@contextmanager
def in_files(shapes: Sequence[Shape]) -> Iterator[Readers]:
    """Write Arrow IPC streams to shared memory in another process, and yield functions that map them by hand."""
    with TemporaryDirectory(dir="/dev/shm") as directory:
        paths = {shape.name: Path(directory, str(number)) for number, shape in enumerate(shapes)}
        writer = _CONTEXT.Process(target=_write, args=(shapes, [*paths.values()]))
        writer.start()
        writer.join()
        yield {name: partial(_map, path) for name, path in paths.items()}


def _write(shapes: Sequence[Shape], paths: Sequence[Path]) -> None:
    for shape, path in zip(shapes, paths, strict=True):
        table = shape.table()
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)


def _map(path: Path) -> pa.Table:
    return pa.ipc.open_stream(pa.memory_map(str(path))).read_all()


@contextmanager
def in_ray(shapes: Sequence[Shape]) -> Iterator[Readers]:
    """Put the shapes into Ray's object store, and yield functions that get them, or none if Ray is not installed."""
    try:
        import ray
    except ImportError:
        print("left out: Ray is not installed (pip install ray)")
        yield {}
        return
    memory = 2 * sum(shape.nbytes for shape in shapes)
    with ray.init("local", num_cpus=1, include_dashboard=False, object_store_memory=memory, log_to_driver=False):
        make = ray.remote(Shape.table)
        objects = {shape.name: make.remote(shape) for shape in shapes}
        ray.wait([*objects.values()], num_returns=len(objects))
        yield {name: partial(ray.get, object) for name, object in objects.items()}


@contextmanager
def in_vineyard(shapes: Sequence[Shape]) -> Iterator[Readers]:
    """Put the shapes into a server of Vineyard, and yield functions that get them, or none if it is not installed."""
    try:
        import vineyard
        import vineyard.bdist
    except ImportError:
        print("left out: Vineyard is not installed (pip install --no-build-isolation vineyard)")
        yield {}
        return
    memory = 2 * sum(shape.nbytes for shape in shapes)
    with TemporaryDirectory() as directory:
        place = Path(directory, "socket")
        program = Path(vineyard.bdist.__file__).with_name("vineyardd")
        command = [str(program), f"--socket={place}", f"--size={memory}", "--meta=local"]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            while not place.exists() and server.poll() is None:
                time.sleep(0.1)
            client = vineyard.connect(str(place))
            objects = {shape.name: client.put(shape.table()) for shape in shapes}
            yield {name: partial(client.get, object) for name, object in objects.items()}
        finally:
            server.kill()
            server.wait()
