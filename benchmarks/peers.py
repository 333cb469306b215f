"""What is measured against each other: our server with its Flight, a bare socket, a mapped file, and Ray."""

from __future__ import annotations

import multiprocessing
import socket
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

#: How to read each shape, by its name.
Readers: TypeAlias = Mapping[str, Callable[[], pa.Table]]


class Shape(NamedTuple):
    """A dataset: so many batches, each of so many float64 columns of so many rows; `one` batch again and again."""

    name: str
    batches: int
    columns: int
    rows: int
    one: bool = False

    @property
    def nbytes(self) -> int:
        return self.batches * self.columns * self.rows * 8

    def table(self) -> pa.Table:
        """Batches with memory of their own each, so that nothing is measured out of a cache; unless it is `one`."""
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
    """For each connection: read the index of a shape, send as many bytes as it has from buffers of its size."""
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
    """Where they listen."""

    catalog: str
    bare_port: int


@contextmanager
def running(shapes: list[Shape], listen: Sequence[str] = ("shm:", "tcp://127.0.0.1:0")) -> Iterator[Peers]:
    """Both processes, until the end of the `with`."""
    ours, theirs = _CONTEXT.Pipe()
    bare_ours, bare_theirs = _CONTEXT.Pipe()
    server = _CONTEXT.Process(target=_serve, args=(shapes, listen, theirs), daemon=True)
    bare = _CONTEXT.Process(target=_send_bare, args=(shapes, bare_theirs), daemon=True)
    server.start()
    bare.start()
    try:
        port = bare_ours.recv()
        yield Peers(ours.recv(), port)
        socket.create_connection(("127.0.0.1", port)).close()
        ours.send(None)
        server.join(10)
        bare.join(10)
    finally:
        server.kill()
        bare.kill()


def receive_bare(port: int, index: int, shape: Shape) -> list[pa.Buffer]:
    """What a bare Python socket needs to receive the same bytes, each batch into freshly allocated memory."""
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
    """Arrow IPC streams in shared memory, written by another process; whoever reads maps them by hand."""
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
    """Objects of Ray, made by a task. None where Ray is not installed (pip install ray)."""
    try:
        import ray
    except ImportError:
        yield {}
        return
    memory = 2 * sum(shape.nbytes for shape in shapes)
    with ray.init(num_cpus=1, include_dashboard=False, object_store_memory=memory, log_to_driver=False):
        make = ray.remote(Shape.table)
        objects = {shape.name: make.remote(shape) for shape in shapes}
        ray.wait([*objects.values()], num_returns=len(objects))
        yield {name: partial(ray.get, object) for name, object in objects.items()}
