"""The connections of a client are kept between reads, within limits, and never mix two streams."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.client import idle
from dissociated.client.dataset import DatasetHandle
from dissociated.control.dataset_info import DatasetInfo
from dissociated.errors import DatasetNotFound
from memory.maps import shared_bytes
from support.certificates import certificates
from support.helpers import PATIENCE, clients_end, connections_left, serving, wait_until

TABLES = {name: pa.table({"n": range(at, at + 1000)}) for at, name in enumerate(["a", "b", "c"])}


class Relay:
    """A TCP proxy that counts the connections of clients, and how often the client waits for the server."""

    def __init__(self, uri: str) -> None:
        address = urlsplit(uri)
        self._target = str(address.hostname), int(address.port or 0)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.place = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()
        self.connections = self.trips = 0
        self.cut_requests = False  # whether to drop connections that send another request
        self.is_open = threading.Event()  # requests wait for it
        self.is_open.set()

    def moved(self, info: DatasetInfo) -> DatasetInfo:
        """Return the description of a dataset that is reached through the relay."""
        target = "{}:{}".format(*self._target)
        endpoints = (
            replace(one, locations=tuple(uri.replace(target, self.place) for uri in one.locations))
            for one in info.endpoints
        )
        return replace(info, version=0, endpoints=tuple(endpoints))

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.connections += 1
                server = socket.create_connection(self._target)
                self._sockets += client, server
                turns = ["server"]
                for ends in ((client, server, "client"), (server, client, "server")):
                    self._threads.append(threading.Thread(target=self._pass, args=(*ends, turns)))
                    self._threads[-1].start()

    def _pass(self, source: socket.socket, sink: socket.socket, side: str, turns: list[str]) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if side == "client" and self.cut_requests:
                    break
                if side == "client":
                    self.is_open.wait(PATIENCE)
                if side == "server" and turns[-1] == "client":
                    self.trips += 1
                turns.append(side)
                sink.sendall(data)
        for one in (source, sink):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for one in (self._listener, *self._sockets):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for thread in self._threads:
            thread.join()


def tcp_location(info: DatasetInfo) -> str:
    return next(one for one in info.endpoints[0].locations if one.startswith("tcp:"))


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep idle connections for longer than a busy machine pauses."""
    monkeypatch.setattr(idle, "MAX_AGE", 100)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[dis.Server]:
    listen = ["tcp://127.0.0.1:0", "shm:", "tls://127.0.0.1:0"]
    made = certificates(tmp_path)
    with dis.Server(listen, **(made.options | {"catalog": "grpc://127.0.0.1:0"}), idle_timeout=100) as server:
        server.roots = made.roots  # type: ignore[attr-defined]
        for name, table in TABLES.items():
            server.publish(name, table)
        yield server


@pytest.fixture
def client(server: dis.Server) -> Iterator[dis.Client]:
    with dis.connect(str(server.catalog_uri), tls_roots=server.roots) as client:  # type: ignore[attr-defined]
        yield client


def read(client: dis.Client, name: str, transport: str, but: Collection[threading.Thread] = ()) -> None:
    """Read a dataset, and wait until its connection is idle. Threads in `but` serve arrays that stay."""
    assert client.read(name, transport=transport).read_all().equals(TABLES[name])
    clients_end(but)


@pytest.mark.parametrize("transport", ["tcp", "tls", "shm"])
def test_reads_follow_each_other_on_one_connection(server: dis.Server, client: dis.Client, transport: str) -> None:
    read(client, "a", transport)
    threads = serving(server)
    assert len(threads) == 1
    for name in "abcab":
        read(client, name, transport)
    assert serving(server) == threads
    wait_until(lambda: server.status().totals.done == 6, "the end of six streams")
    assert sum(listener.accepted for listener in server.status().listeners) == 1
    client.close()
    assert connections_left(server) == 0


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_stream_that_is_not_read_to_its_end_ends_its_connection(
    server: dis.Server, client: dis.Client, transport: str
) -> None:
    read(client, "a", transport)
    threads = serving(server)
    server.publish("long", pa.Table.from_batches(TABLES["a"].to_batches(max_chunksize=1) * 20))
    reader = client.read("long", transport=transport)
    assert reader.read_next_batch()["n"].to_pylist() == [0]
    assert serving(server) == threads
    reader.close()
    del reader
    clients_end()
    read(client, "b", transport)
    wait_until(lambda: threads.isdisjoint(serving(server)), "the end of the first connection")


def test_memory_that_is_kept_keeps_its_connection(server: dis.Server, client: dis.Client) -> None:
    kept = client.read("a", transport="shm").read_all()
    first, of_kept = serving(server), threading.enumerate()
    for name in "bcb":
        read(client, name, "shm", of_kept)
    wait_until(lambda: len(server.status().consumers) == 1, "the end of the streams that were read")
    (consumer,) = server.status().consumers
    assert (consumer.dataset, consumer.state) == ("a", "holding")
    assert len(serving(server)) == 2
    assert kept.equals(TABLES["a"])
    del kept
    wait_until(lambda: not server.status().consumers, "the end of the leases")
    assert first <= serving(server)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_dataset_that_is_dropped_is_freed_though_connections_idle(
    server: dis.Server, client: dis.Client, transport: str
) -> None:
    server.publish("d", TABLES["a"], wait=True)
    assert client.read("d", transport=transport).read_all().equals(TABLES["a"])
    clients_end()
    read(client, "b", transport)
    assert shared_bytes("d")
    server.drop("d")
    wait_until(lambda: not shared_bytes("d"), "the memory of the dataset is freed")
    assert serving(server)


def test_a_read_by_handle_takes_one_round_trip(server: dis.Server, client: dis.Client) -> None:
    with closing(Relay(tcp_location(client.describe("a")))) as relay:
        handles = {name: DatasetHandle(client, relay.moved(client.describe(name)), "tcp") for name in TABLES}
        for number, name in enumerate("abcab", 1):
            assert handles[name].to_table().equals(TABLES[name])
            assert (relay.connections, relay.trips) == (1, number)
        client.close()


def test_a_handle_asks_its_catalog_and_its_server_at_the_same_time(server: dis.Server) -> None:
    with closing(Relay(str(server.catalog_uri))) as relay, dis.connect(f"grpc://{relay.place}") as client:
        handle = client.dataset("a", transport="tcp")
        with ThreadPoolExecutor() as threads:

            def read_before_the_catalog_answers(streams: int) -> Future[pa.Table]:
                relay.is_open.clear()
                reading = threads.submit(handle.to_table)
                wait_until(lambda: server.status().totals.done == streams, "the end of the stream")
                assert not reading.done()
                return reading

            first = read_before_the_catalog_answers(1)
            relay.is_open.set()
            assert first.result().equals(TABLES["a"])
            again = read_before_the_catalog_answers(2)
            server.publish("a", TABLES["b"])
            relay.is_open.set()
            with pytest.raises(DatasetNotFound, match="version 1 of 'a' is gone"):
                again.result()
        client.close()


def test_a_request_on_a_connection_that_is_lost_is_made_again(server: dis.Server, client: dis.Client) -> None:
    with closing(Relay(tcp_location(client.describe("a")))) as relay:
        handle = DatasetHandle(client, relay.moved(client.describe("a")), "tcp")
        assert handle.to_table().equals(TABLES["a"])
        relay.cut_requests = True
        with pytest.raises(dis.DissociatedError):
            handle.to_table()
        relay.cut_requests = False
        assert handle.to_table().equals(TABLES["a"])
        assert relay.connections > 2
        client.close()


def test_the_server_closes_connections_that_idle() -> None:
    with dis.Server(["tcp://127.0.0.1:0"], idle_timeout=0.1) as server, dis.connect(str(server.catalog_uri)) as client:
        server.publish("a", TABLES["a"])
        for _ in range(3):
            read(client, "a", "tcp")
            assert connections_left(server) == 0


def test_the_server_keeps_as_many_idle_connections_as_it_may() -> None:
    with dis.Server(["tcp://127.0.0.1:0"], idle_timeout=100, max_idle=2) as server:
        server.publish("a", TABLES["a"])
        clients = [dis.connect(str(server.catalog_uri)) for _ in range(5)]
        for client in clients:
            read(client, "a", "tcp")
        wait_until(lambda: server.connections == 2, "the end of all but two connections")
        for client in clients:
            read(client, "a", "tcp")
            client.close()
        assert connections_left(server) == 0


def test_a_server_that_stops_waits_for_no_idle_connection(server: dis.Server, client: dis.Client) -> None:
    read(client, "a", "tcp")
    assert server.drain(60)
    server.close()
    assert server.connections == 0


def test_a_dropped_client_leaves_no_connection(server: dis.Server) -> None:
    client = dis.connect(str(server.catalog_uri))
    read(client, "a", "tcp")
    assert server.connections == 1
    del client
    assert connections_left(server) == 0


def test_a_forked_child_uses_no_connection_of_its_parent(server: dis.Server, client: dis.Client) -> None:
    info = client.describe("a")
    (endpoint,) = info.endpoints
    assert client.read_endpoint(info, endpoint, transport="tcp").read_all().equals(TABLES["a"])
    threads = serving(server)
    child = os.fork()
    if not child:
        same = False
        with suppress(BaseException):
            same = client.read_endpoint(info, endpoint, transport="tcp").read_all().equals(TABLES["a"])
        os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert client.read_endpoint(info, endpoint, transport="tcp").read_all().equals(TABLES["a"])
    assert threads <= serving(server)
    wait_until(lambda: server.status().totals.done == 3, "each stream is counted")  # after its reader has all
