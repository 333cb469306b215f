"""Datasets of several parts: opened at once, and read in order, however long a part waits for its turn."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.client import connection, plan, readahead
from dissociated.client.dataset import DatasetHandle
from dissociated.control.dataset_info import DatasetInfo
from dissociated.control.locations import Endpoint
from dissociated.errors import ConnectionClosed, DeadlineExceeded, OptionError, TransportError
from support.helpers import wait_until
from support.machine import needs

PARTS = 10


class Gate:
    """A TCP proxy that passes requests on only when some of them have arrived at the same time."""

    def __init__(self, target: tuple[str, int], together: int) -> None:
        self._target = target
        self._barrier = threading.Barrier(together)
        self._lock = threading.Lock()
        self.unanswered = self.most = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._threads = [self._start(self._accept)]
        self._sockets: list[socket.socket] = []

    def _start(self, run: Callable[..., None], *arguments: object) -> threading.Thread:
        thread = threading.Thread(target=run, args=arguments)
        thread.start()
        return thread

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                self._sockets += client, server
                self._threads += self._start(self._forward, client, server), self._start(self._relay, server, client)

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        """Pass the request on when all others have arrived, and then what follows."""
        with suppress(OSError, threading.BrokenBarrierError):
            request = client.recv(1 << 16)
            with self._lock:
                self.unanswered += 1
                self.most = max(self.most, self.unanswered)
            self._barrier.wait(60)
            with self._lock:
                self.unanswered -= 1
            server.sendall(request)
            self._relay(client, server)
        for one in (client, server):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _relay(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._barrier.abort()
        for one in (self._listener, *self._sockets):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for thread in self._threads:
            thread.join()


@pytest.fixture
def server() -> Iterator[dis.Server]:
    with dis.Server(["tcp://127.0.0.1:0"], stall_timeout=0.5) as server:
        yield server


def in_parts(client: dis.Client, server: dis.Server, parts: list[pa.Table]) -> DatasetInfo:
    """Describe a dataset with these parts, as a catalog of several nodes does."""
    endpoints: list[Endpoint] = []
    for number, part in enumerate(parts):
        server.publish(f"part {number}", part)
        endpoints += client.describe(f"part {number}").endpoints
    # Without a version, a handle does not look the dataset up again.
    return DatasetInfo("data", client.describe("part 0").schema, None, None, tuple(endpoints))


@contextmanager
def gated(info: DatasetInfo, together: int) -> Iterator[tuple[DatasetInfo, Gate]]:
    """Yield the description of the dataset behind a gate, and the gate."""
    address = urlsplit(next(one for one in info.endpoints[0].locations if one.startswith("tcp:")))
    with closing(Gate((str(address.hostname), int(address.port or 0)), together)) as gate:

        def moved(location: str) -> str:
            return location.replace(f"{address.hostname}:{address.port}", f"127.0.0.1:{gate.port}")

        endpoints = (replace(one, locations=tuple(map(moved, one.locations))) for one in info.endpoints)
        yield replace(info, endpoints=tuple(endpoints)), gate


@pytest.mark.parametrize(("max_parallel", "together"), [(None, PARTS), (2, 2), (1, 1)])
def test_parts_are_requested_at_once(server: dis.Server, max_parallel: int | None, together: int) -> None:
    parts = [pa.table({"n": [number, -number]}) for number in range(PARTS)]
    options = {} if max_parallel is None else {"max_parallel": max_parallel}
    with dis.connect(str(server.catalog_uri), **options) as client:  # type: ignore[arg-type]
        info = in_parts(client, server, parts)
        with gated(info, together) as (behind, gate):
            assert DatasetHandle(client, behind, "tcp").to_table() == pa.concat_tables(parts), "in order"
            assert gate.most == together


def test_the_number_of_parts_at_once_is_checked(server: dis.Server) -> None:
    for number in (0, -1, True, 1.5, "2"):
        with pytest.raises(OptionError, match="max_parallel"):
            dis.connect(str(server.catalog_uri), max_parallel=number)  # type: ignore[arg-type]


def test_a_part_that_fails_to_open_ends_the_others(server: dis.Server) -> None:
    with dis.connect(str(server.catalog_uri)) as client:
        info = in_parts(client, server, [pa.table({"n": range(100)})] * PARTS)
        wrong = replace(info.endpoints[4], ticket=b"none")
        endpoints = (*info.endpoints[:4], wrong, *info.endpoints[5:])
        with pytest.raises(dis.DissociatedError):
            DatasetHandle(client, replace(info, endpoints=endpoints), "tcp").to_table()
        wait_until(lambda: not client.status().consumers, "all connections are closed")


@pytest.mark.parametrize(
    ("transport", "limit"),
    [
        ("tcp", None),
        ("tcp", 1_500_000),
        ("shm", None),
        pytest.param("ucx", None, marks=needs("ucx")),
        pytest.param("fabric", 1_500_000, marks=needs("fabric")),
    ],
)
def test_a_part_that_waits_for_its_turn_is_not_cut_off(
    monkeypatch: pytest.MonkeyPatch, transport: str, limit: int | None
) -> None:
    """A stream that is read alone is cut off meanwhile. With a limit, the parts are opened and not received ahead."""
    monkeypatch.setattr(readahead, "MAX_BYTES", 1 << 20)
    # More bytes than sockets hold and, over shm, more metadata.
    large = pa.Table.from_batches(
        pa.table({"n": np.arange(2_000_000)}).to_batches(200 if transport == "shm" else 50_000)
    )
    first = pa.Table.from_batches(pa.table({"n": [-1, -2]}).to_batches(1))
    uri = "tcp://127.0.0.1:0" if transport == "tcp" else f"{transport}:"
    with dis.Server([uri], stall_timeout=0.5) as server, dis.connect(str(server.catalog_uri)) as client:
        data = DatasetHandle(client, in_parts(client, server, [first, large, first]), transport)
        with data.scanner(limit=limit).to_reader() as reader:
            batches = [reader.read_next_batch() for _ in range(2)]
            with client.read("part 1", transport=transport):
                wait_until(lambda: server.status().totals.gone, "the server has cut off the stream that is read alone")
            batches += reader
        assert pa.Table.from_batches(batches) == pa.concat_tables([first, large, first])[:limit]


def at_port(info: DatasetInfo, port: int) -> DatasetInfo:
    """Return the description with other ports in the locations for data."""
    (endpoint,) = info.endpoints
    moved = tuple(re.sub(r"(tcp://[^:/]+):\d+", rf"\1:{port}", location) for location in endpoint.locations)
    return replace(info, version=0, endpoints=(replace(endpoint, locations=moved),))


def test_flight_is_the_last_way_to_data_whose_port_is_closed(server: dis.Server) -> None:
    table = pa.table({"n": range(1_000)})
    server.publish("data", table)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with dis.connect(str(server.catalog_uri)) as client:
        info = at_port(client.describe("data"), port)
        assert DatasetHandle(client, info).to_table(["n"], ("n", ">", 990)) == table[991:]
        assert client.read_endpoint(info, info.endpoints[0]).read_all() == table
        with pytest.raises(TransportError, match="refused"):
            DatasetHandle(client, info, "tcp").to_table()
        server.close()
        with pytest.raises(TransportError, match="refused"):
            client.read_endpoint(info, info.endpoints[0])


def test_flight_is_the_last_way_to_data_whose_port_answers_nothing(
    server: dis.Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first read waits for the port once. For a while, all clients of the process then try that port last."""
    table = pa.table({"n": range(1_000)})
    server.publish("data", table, ticket=b"of both servers")
    with (
        dis.connect(str(server.catalog_uri), timeout=5) as client,
        socket.create_server(("127.0.0.1", 0), backlog=0) as silent,
        closing(socket.create_connection(silent.getsockname())),  # it takes the only place
    ):
        info = at_port(client.describe("data"), silent.getsockname()[1])
        monkeypatch.setattr(plan, "CONNECT_TIMEOUT", 0.1)
        with caplog.at_level("INFO", "dissociated.client.parts"):  # it counts the rows of batches, and then reads some
            some = client.endpoints.read_at(info, replace(client.defaults, rows=range(500, 600))).read_all()
        assert some == table[500:600]
        assert [record.name for record in caplog.records].count("dissociated.client.parts") == 1
        monkeypatch.setattr(plan, "CONNECT_TIMEOUT", 100)  # a read that tries the port first fails from now on
        assert DatasetHandle(client, info).to_table() == table
        with dis.connect(client.uri, timeout=1) as another:
            assert another.read_endpoint(info, info.endpoints[0]).read_all() == table
            with pytest.raises(DeadlineExceeded, match=r"tcp server .* no answer in time"):
                another.read_endpoint(info, info.endpoints[0], transport="tcp")
            with pytest.MonkeyPatch.context() as later:
                later.setattr(connection, "UNRESPONSIVE_TIME", 0)
                # The first route has half of the timeout.
                assert another.read_endpoint(info, info.endpoints[0]).read_all() == table
            server.close()
            with pytest.raises(TransportError, match=r"tcp server .* no answer in time"):  # tried after Flight
                another.read_endpoint(info, info.endpoints[0])
            port = silent.getsockname()[1]
            silent.close()
            with dis.Server([f"tcp://127.0.0.1:{port}"], catalog=None) as now_there:
                now_there.publish("data", table, ticket=b"of both servers")
                of_any_server = replace(info.endpoints[0], part=None)
                assert another.read_endpoint(info, of_any_server).read_all() == table


def test_a_reader_that_was_cut_off_is_told_why() -> None:
    large = pa.Table.from_batches(pa.table({"n": np.arange(4_000_000)}).to_batches(50_000))
    with dis.Server(["tcp://127.0.0.1:0"], stall_timeout=1.5) as server, dis.connect(str(server.catalog_uri)) as client:
        server.publish("data", large)
        with client.read("data", transport="tcp") as reader:
            reader.read_next_batch()
            wait_until(lambda: not client.status().consumers, "the server has cut the reader off")
            with pytest.raises(ConnectionClosed, match=r"received nothing for \d+ s .* stall_timeout"):
                reader.read_all()
