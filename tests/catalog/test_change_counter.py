"""Reads that ask no catalog, because its counter in shared memory shows that nothing has changed."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import dissociated as dis
from dissociated.control.change_counter import ChangeCounter, CounterPlace, CounterView
from dissociated.errors import CatalogError, RemoteProtocolError
from dissociated.node.node import Node
from dissociated.store.store import Store
from support.helpers import case
from support.nodes import kill, put, spawn, table
from support.processes import free_port

#: Publishes the next number after each line of its input, and then writes it to the file of acknowledged numbers.
PUBLISHER = """
import mmap, sys
import pyarrow as pa
import dissociated as dis

with dis.Server(["shm:"], catalog=sys.argv[1]) as server, open(sys.argv[2], "r+b") as file:
    acknowledged = memoryview(mmap.mmap(file.fileno(), 8)).cast("Q")
    while True:
        number = acknowledged[0] + 1
        server.publish("n", pa.table({"n": [number]}))
        acknowledged[0] = number
        print("reached", flush=True)
        sys.stdin.readline()
"""
VERSIONS = 30


@pytest.mark.usefixtures("forks")
def test_a_read_sees_every_commit_that_was_acknowledged_before_it(tmp_path: Path) -> None:
    uri = f"grpc://127.0.0.1:{free_port()}"
    path = tmp_path / "acknowledged"
    path.write_bytes(bytes(8))
    with path.open("r+b") as file:
        acknowledged = memoryview(mmap.mmap(file.fileno(), 8)).cast("Q")
    seen = [0]

    def read(transport: str | None = None) -> None:
        least = max(acknowledged[0], seen[-1])
        seen.append(client.read("n", transport=transport).read_all()["n"][0].as_py())
        assert seen[-1] >= least

    publisher = spawn(PUBLISHER, uri, path)
    assert publisher.stdin is not None
    with dis.connect(uri) as client:
        for number in range(2, VERSIONS):
            publisher.stdin.write("\n")
            publisher.stdin.flush()
            while acknowledged[0] < number:
                read()
            for transport in (None, None, None, "shm", "shm"):
                read(transport)
        assert client.status().totals.flight < len(seen) / 2  # the other reads asked nobody
        kill(publisher)
        publisher = spawn(PUBLISHER, uri, path)  # another catalog at this address, with version 1
        for transport in ("shm", "shm", None, None):
            read(transport)
        assert seen[-1] == VERSIONS
        kill(publisher)
        with pytest.raises(CatalogError, match="no catalog answers"):
            client.read("n")


def test_a_read_through_a_node_asks_that_node(memory: Path) -> None:
    with Node(Store(memory / "upstream"), ["shm:"]) as upstream:
        put(upstream.uri, "t", table(1))
        with (
            Node(Store(memory / "node"), ["shm:"], catalog=upstream.uri) as node,
            dis.connect(node.uri) as client,
        ):
            assert [client.read("t").read_all()["n"].to_pylist() for _ in range(3)] == [[1]] * 3
            node.close()
            with pytest.raises(CatalogError, match="no catalog answers"):
                client.read("t")


def test_only_the_counter_that_an_answer_names_is_opened() -> None:
    counter = ChangeCounter()
    counter.number = 7
    view = CounterView(counter.place)
    assert view.read() == 7
    counter.number = 8
    assert view.read() == 8
    with pytest.raises(RemoteProtocolError, match="of another process"):
        CounterView(counter.place._replace(nonce="00" * 16))
    with _other_descriptors() as others:
        for what, descriptor in others.items():
            with case(what), pytest.raises(RemoteProtocolError):
                CounterView(counter.place._replace(descriptor=descriptor))
        os.dup2(others["a memfd without seals"], counter.place.descriptor)
        assert view.read() == 0
    counter.close()
    assert view.read() == 0
    with pytest.raises((OSError, RemoteProtocolError)):  # the number may be that of another file
        CounterView(counter.place)
    for plain in (None, [], [1, 2], [0, 2, ""], [1, -1, ""], ["1", 2, ""], {"process": 1}):
        assert CounterPlace.parse(plain) is None


@contextmanager
def _other_descriptors() -> Iterator[dict[str, int]]:
    reading, writing = os.pipe()
    memory = os.memfd_create("other")
    os.ftruncate(memory, mmap.PAGESIZE)
    try:
        yield {"a pipe": reading, "a memfd without seals": memory}
    finally:
        for descriptor in (reading, writing, memory):
            os.close(descriptor)
