"""The processes that are measured against each other: our server with its Flight, and a bare socket."""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import NamedTuple

import numpy as np
import pyarrow as pa

import dissociated as dis

_CONTEXT = multiprocessing.get_context("spawn")


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
