"""Every call that a catalog answers, from a client that knows only Arrow Flight."""

from __future__ import annotations

import errno
import gc
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import pytest

import dissociated as dis
from dissociated.base.host import boot_id
from dissociated.catalog.database import Database
from dissociated.catalog.listing import REUSE_CONNECTION
from dissociated.catalog.service import CatalogService
from dissociated.control.commit import StagedSegment
from dissociated.control.flight_streams import checked, generate_get
from dissociated.errors import SourceError
from dissociated.format.encapsulated import encapsulate
from dissociated.node.node import Node
from dissociated.store.store import Store
from support.helpers import case, clients_end, commit_of, descriptors, misnamed, wait_until
from support.injection import SQLiteFault

TABLE = pa.table({"n": pa.array([1, 2, 3], pa.int64())})
RETAIN = 60.0


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with Node(Store(tmp_path / "store"), retain=RETAIN) as running:
        yield running


@pytest.fixture
def plain(node: Node) -> Iterator[flight.FlightClient]:
    with flight.FlightClient(node.uri) as client:
        yield client


@pytest.fixture(params=["node", "server", "catalog"])
def anywhere(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[flight.FlightClient]:
    """Yield a client of a node, of the catalog in a server, or of a separate catalog that has a node."""
    with ExitStack() as running:
        if request.param == "server":
            uri = running.enter_context(dis.Server(["shm:"])).catalog_uri
        elif request.param == "node":
            uri = running.enter_context(Node(Store(tmp_path / "store"))).uri
        else:
            uri = running.enter_context(closing(CatalogService("grpc://127.0.0.1:0"))).uri
            running.enter_context(Node(Store(tmp_path / "store"), catalog=uri))
        yield running.enter_context(flight.FlightClient(uri))


def command(**asked: Any) -> flight.FlightDescriptor:
    return flight.FlightDescriptor.for_command(json.dumps(asked))


def path(name: str) -> flight.FlightDescriptor:
    return flight.FlightDescriptor.for_path(name)


def put(client: flight.FlightClient, descriptor: flight.FlightDescriptor, table: pa.Table) -> None:
    writer, _ = client.do_put(descriptor, table.schema)
    with writer:
        writer.write_table(table)


def read(client: flight.FlightClient, descriptor: flight.FlightDescriptor) -> list[int]:
    info = client.get_flight_info(descriptor)
    return [n for endpoint in info.endpoints for n in client.do_get(endpoint.ticket).read_all()["n"].to_pylist()]


def act(client: flight.FlightClient, name: str, body: bytes) -> bytes:
    (result,) = client.do_action(flight.Action(name, body))
    return bytes(result.body.to_pybytes())


def request(message: bytes) -> bytes:
    """Encode a message of Flight.proto whose first field is another message."""
    length, size = b"", len(message)
    while size > 0x7F:
        length += bytes([size & 0x7F | 0x80])
        size >>= 7
    return b"\x0a" + length + bytes([size]) + message


def test_put_list_describe_and_get(anywhere: flight.FlightClient) -> None:
    put(anywhere, path("d"), TABLE)
    (info,) = anywhere.list_flights()
    assert (info.descriptor.path, info.total_records, info.schema) == ([b"d"], 3, TABLE.schema)
    assert anywhere.get_schema(path("d")).schema == TABLE.schema
    assert read(anywhere, path("d")) == [1, 2, 3]
    put(anywhere, path("d"), TABLE.slice(1))  # replaced
    assert read(anywhere, path("d")) == [2, 3]
    put(anywhere, command(name="d", mode="append"), TABLE)
    assert read(anywhere, path("d")) == [2, 3, 1, 2, 3]
    assert read(anywhere, flight.FlightDescriptor.for_command("d")) == [2, 3, 1, 2, 3]


def test_a_client_that_takes_messages_of_4_mib_gets_batches_that_are_larger(plain: flight.FlightClient) -> None:
    """The clients of Go, Rust and JavaScript have this limit.

    This test uses gRPC's own, which reads Flight.proto messages.
    """
    grpc = pytest.importorskip("grpc", reason="grpcio is not installed")
    rows = 500_000
    table = pa.table({"n": range(rows), "s": [None, *"x" * (rows - 2), "y" * (1 << 20)]})
    put(plain, path("large"), table)
    (endpoint,) = plain.get_flight_info(path("large")).endpoints
    with grpc.insecure_channel(
        endpoint.locations[0].uri.decode().removeprefix("grpc://").removeprefix("grpc+")
    ) as channel:
        do_get = channel.unary_stream("/arrow.flight.protocol.FlightService/DoGet")
        messages = [fields(data) for data in do_get(request(endpoint.ticket.ticket), timeout=60)]
    with pa.BufferOutputStream() as sink:
        for message in messages:
            sink.write(encapsulate(message[DATA_HEADER]) + message.get(DATA_BODY, b""))
        assert pa.ipc.open_stream(sink.getvalue()).read_all().equals(table)
    whole = plain.do_get(endpoint.ticket).read_all()
    assert whole.equals(table)
    assert whole["n"].num_chunks == 1


def test_batches_with_wrong_offsets_are_not_cut_for_such_a_client() -> None:
    """libarrow would abort the process, or send adjacent memory."""
    rows, length = 8, 1 << 20
    offsets = np.arange(0, (rows + 1) * length, length, dtype=np.int32)
    offsets[rows // 2] = np.iinfo(np.int32).max
    values, at = pa.array(np.zeros(rows * length, np.int8)), pa.py_buffer(offsets.tobytes())
    for array in (
        pa.Array.from_buffers(pa.binary(), rows, [None, at, values.buffers()[1]]),
        pa.Array.from_buffers(pa.list_(pa.int8()), rows, [None, at], children=[values]),
    ):
        batch = pa.record_batch({"x": array})
        with pytest.raises(SourceError, match="not valid"):
            [run.read_all() for run in generate_get(checked(batch.schema, iter([(batch, None)]), True))]


DATA_HEADER, DATA_BODY = 2, 1000  # field numbers of FlightData


def fields(message: bytes) -> dict[int, bytes]:
    """Return the fields of a protobuf message that contain bytes, by number."""
    found, at = {}, 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at, value, shift = at + 1, value | (byte & 0x7F) << shift, shift + 7
            if byte < 0x80:
                return value

    while at < len(message):
        key, length = number() >> 3, number()
        found[key], at = message[at : at + length], at + length
    return found


def test_a_put_with_one_key_counts_once(anywhere: flight.FlightClient) -> None:
    for _ in range(2):
        put(anywhere, command(name="d", mode="append", key="k"), TABLE)
    assert read(anywhere, path("d")) == [1, 2, 3]


def test_criteria(anywhere: flight.FlightClient) -> None:
    put(anywhere, command(name="a/1", tags={"team": "x"}), TABLE)
    put(anywhere, command(name="a/2"), TABLE)
    put(anywhere, command(name="b", tags={"team": "x"}), TABLE)

    def names(**criteria: Any) -> list[bytes]:
        return [info.descriptor.path[0] for info in anywhere.list_flights(json.dumps(criteria).encode())]

    assert names(prefix="a/") == [b"a/1", b"a/2"]
    assert names(tags={"team": "x"}) == [b"a/1", b"b"]
    assert names(prefix="a/", tags={"team": "x"}) == [b"a/1"]
    assert json.loads(next(anywhere.list_flights()).app_metadata)["tags"] == {"team": "x"}
    for criteria in (b"a/", b"[]", b"\xff"):
        with pytest.raises(flight.FlightServerError, match="criteria are JSON"):
            list(anywhere.list_flights(criteria))


def test_readers_of_a_replaced_version_finish_and_its_tickets_stay_good(plain: flight.FlightClient) -> None:
    put(plain, path("d"), TABLE)
    old = plain.get_flight_info(path("d"))
    version = json.loads(old.app_metadata)["version"]
    for _ in range(50):  # an answer may be repeated, and promises as much
        asked = time.time()
        old = plain.get_flight_info(path("d"))
        expires = old.endpoints[0].expiration_time.as_py().timestamp()
        assert asked + 0.99 * RETAIN <= expires <= time.time() + RETAIN
    put(plain, path("d"), TABLE.slice(2))
    assert plain.do_get(old.endpoints[0].ticket).read_all() == TABLE
    assert read(plain, command(name="d", version=version)) == [1, 2, 3]
    assert [one["current"] for one in json.loads(act(plain, "versions", b'{"name": "d"}'))["versions"]] == [False, True]
    with pytest.raises(KeyError, match="no version 99 of the dataset 'd'"):
        plain.get_flight_info(command(name="d", version=99))


def test_endpoints_are_renewed_as_flight_defines_it(plain: flight.FlightClient) -> None:
    put(plain, path("d"), TABLE)
    (endpoint,) = plain.get_flight_info(path("d")).endpoints
    answer = act(plain, "RenewFlightEndpoint", request(endpoint.serialize()))
    renewed = flight.FlightEndpoint.deserialize(answer)
    assert renewed.ticket == endpoint.ticket
    assert renewed.expiration_time.as_py() >= endpoint.expiration_time.as_py()
    act(plain, "drop", b'{"name": "d"}')
    with pytest.raises(KeyError, match="no dataset has this ticket"):
        act(plain, "RenewFlightEndpoint", request(endpoint.serialize()))
    for body in (b"", b"\x0a", b"\x0a\x05abc", b"\x12\x00", b"\x0a\xff\xff\xff\xff\xff\xff"):
        with pytest.raises(flight.FlightServerError, match="is invalid"):
            act(plain, "RenewFlightEndpoint", body)


def test_endpoints_expire_no_later_than_their_dataset(plain: flight.FlightClient) -> None:
    put(plain, command(name="d", ttl=30), TABLE)
    info = plain.get_flight_info(path("d"))
    (endpoint,) = info.endpoints
    renewed = flight.FlightEndpoint.deserialize(act(plain, "RenewFlightEndpoint", request(endpoint.serialize())))
    expires = json.loads(info.app_metadata)["expires"]
    for one in (endpoint, renewed):
        assert one.expiration_time.as_py().timestamp() == pytest.approx(expires, abs=0.01)


def test_endpoints_of_the_catalog_in_a_server_expire_and_are_renewed_where_it_retains() -> None:
    with dis.Server(["shm:"], retain=RETAIN) as server, flight.FlightClient(server.catalog_uri) as plain:
        server.publish("d", TABLE)
        (endpoint,) = plain.get_flight_info(path("d")).endpoints
        server.publish("d", TABLE.slice(2))
        assert plain.do_get(endpoint.ticket).read_all() == TABLE  # a ticket can be used again until it expires
        assert dis.open_stream(endpoint.locations[1].uri.decode(), endpoint.ticket.ticket).read_all() == TABLE
        renewed = flight.FlightEndpoint.deserialize(act(plain, "RenewFlightEndpoint", request(endpoint.serialize())))
        for one in (endpoint, renewed):
            assert RETAIN - 10 < one.expiration_time.as_py().timestamp() - time.time() <= RETAIN
        assert renewed.expiration_time.as_py() >= endpoint.expiration_time.as_py()
        assert read(plain, path("d")) == [3]


@pytest.mark.needs("SQLite's calls")
def test_datasets_are_read_without_a_promise_while_the_disk_of_the_database_is_full(tmp_path: Path) -> None:
    database = str(tmp_path / "db")
    with Node(Store(tmp_path / "store"), database=database, retain=RETAIN) as node, flight.connect(node.uri) as plain:
        put(plain, path("d"), TABLE)
        with SQLiteFault(0, errno.ENOSPC, times=1 << 30) as fault:
            (endpoint,) = plain.get_flight_info(path("d")).endpoints
            serialized = act(plain, "RenewFlightEndpoint", request(endpoint.serialize()))
            renewed = flight.FlightEndpoint.deserialize(serialized)
            assert plain.do_get(renewed.ticket).read_all() == TABLE
        assert fault.came
        assert [one.expiration_time for one in (endpoint, renewed)] == [None, None]
        (endpoint,) = plain.get_flight_info(command(name="d")).endpoints
        assert endpoint.expiration_time is not None


def test_what_was_replaced_goes_when_its_tickets_expire() -> None:
    with dis.Server(["shm:"], retain=0.5) as server, flight.FlightClient(server.catalog_uri) as plain:
        server.publish("d", TABLE)
        (endpoint,) = plain.get_flight_info(path("d")).endpoints
        server.publish("d", TABLE.slice(2))

        def there() -> bool:
            try:
                return bool(plain.do_get(endpoint.ticket).read_all() == TABLE)
            except KeyError:
                return False

        assert there()
        wait_until(lambda: not there(), "the old one is gone")
        assert time.time() >= endpoint.expiration_time.as_py().timestamp()


def test_a_server_that_retains_nothing_promises_nothing() -> None:
    with dis.Server(["shm:"]) as server, flight.FlightClient(server.catalog_uri) as plain:
        server.publish("d", TABLE)
        (endpoint,) = plain.get_flight_info(path("d")).endpoints
        assert endpoint.expiration_time is None
        with pytest.raises(flight.FlightServerError, match="guarantees no lifetime of tickets"):
            act(plain, "RenewFlightEndpoint", request(endpoint.serialize()))


def test_there_is_nothing_to_cancel(plain: flight.FlightClient) -> None:
    put(plain, path("d"), TABLE)
    info = plain.get_flight_info(path("d"))
    assert act(plain, "CancelFlightInfo", request(info.serialize())) == b"\x08\x03"  # NOT_CANCELLABLE
    assert plain.do_get(info.endpoints[0].ticket).read_all() == TABLE


def test_a_time_to_live(plain: flight.FlightClient) -> None:
    put(plain, command(name="d", ttl=1e-6), TABLE)
    with pytest.raises(KeyError, match="no dataset 'd'"):
        plain.get_flight_info(path("d"))
    assert list(plain.list_flights()) == []


@pytest.mark.parametrize(
    ("descriptor", "why"),
    [
        (command(name="d", mode="sideways"), "neither overwrite nor append"),
        (command(mode="append"), "or JSON with its name"),
        (command(name="d", mod="append"), "the key 'mod' is unknown: the keys are name, mode, tags, ttl"),
        (flight.FlightDescriptor.for_path("a", "b"), "a path of one part"),
        (flight.FlightDescriptor.for_command("{nonsense"), "a command is a name, or JSON"),
    ],
)
def test_a_put_that_makes_no_sense_publishes_nothing(
    node: Node, plain: flight.FlightClient, descriptor: flight.FlightDescriptor, why: str
) -> None:
    with pytest.raises(flight.FlightServerError, match=why):
        put(plain, descriptor, TABLE)
    assert list(plain.list_flights()) == []
    assert list(node.store.staging.iterdir()) == []


def test_hostile_calls_are_refused_and_are_no_fault_of_the_server(
    plain: flight.FlightClient, caplog: pytest.LogCaptureFixture
) -> None:
    """The server logs no error, and the client sees no line of the server's code."""
    put(plain, path("d"), TABLE)
    ticket = plain.get_flight_info(command(name="d")).endpoints[0].ticket.ticket
    deep = b'{"name":' * 60_000
    actions = [
        ("drop", deep),
        ("drop", rb'{"name": "\ud800"}'),
        ("versions", b'{"name": ' + b"9" * 5000 + b"}"),
        ("discard", json.dumps({"segments": ["x" * 5000]}).encode()),
        ("reserve", b'{"segment": "s", "size": 1e308, "wish": 1}'),
    ]
    calls: list[Callable[[], object]] = [partial(act, plain, name, body) for name, body in actions]
    calls += [partial(plain.get_flight_info, command(name="d", version=version)) for version in (2**64, -(2**70))]
    calls += [partial(plain.get_schema, command(name="d", version="x")), lambda: [*plain.list_flights(b"[" * 60_000)]]
    calls += [partial(plain.do_get, flight.Ticket(selected(ticket, stop))) for stop in (2**63, 2**64)]
    for number, call in enumerate(calls):
        with case(number), pytest.raises((flight.FlightError, pa.ArrowException)) as refused:
            call()
        assert "Traceback" not in str(refused.value), number
        assert "see its log" not in str(refused.value), number
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def selected(ticket: bytes, stop: int) -> bytes:
    """Return a request for the batches up to the number `stop`."""
    return b"DISSREQ\x01" + len(ticket).to_bytes(4, "little") + ticket + json.dumps({"batches": [0, stop]}).encode()


def test_a_put_that_is_refused_leaves_nothing(node: Node, plain: flight.FlightClient) -> None:
    put(plain, path("d"), TABLE)
    with pytest.raises(flight.FlightServerError, match="must have one schema"):
        put(plain, command(name="d", mode="append"), pa.table({"s": ["a"]}))
    assert read(plain, path("d")) == [1, 2, 3]
    assert list(node.store.staging.iterdir()) == []


def test_a_put_of_columns_with_unreadable_names_is_refused_at_once(
    node: Node, plain: flight.FlightClient, caplog: pytest.LogCaptureFixture
) -> None:
    for column in (pa.array([], pa.int64()), pa.array([{"x": 1}])):
        with pytest.raises(flight.FlightServerError, match="the name of a column is not UTF-8") as refused:
            put(plain, path("d"), misnamed(pa.table({"NAME": column})))
        assert str(node.store.directory) not in str(refused.value)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


# Several nodes


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[CatalogService, list[Node]]]:
    """Yield an empty catalog and its two nodes, and check that they leave nothing open or mapped at the end."""
    with ExitStack() as owned:
        catalog = CatalogService("grpc://127.0.0.1:0", database=Database(str(tmp_path / "db")), retain=RETAIN)
        owned.enter_context(closing(catalog))
        stores = [Store(tmp_path / name) for name in "ab"]
        yield (
            catalog,
            [owned.enter_context(Node(one, catalog=catalog.uri, heartbeat_interval=2.0)) for one in stores],
        )
    clients_end()
    gc.collect()
    assert not [target for target in descriptors().values() if target.startswith(str(tmp_path))]
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_a_catalog_alone_forwards_what_is_put_and_read(cluster: tuple[CatalogService, list[Node]]) -> None:
    catalog, nodes = cluster
    with flight.FlightClient(catalog.uri) as plain, dis.connect(catalog.uri) as ours:
        put(plain, path("d"), TABLE)
        assert read(plain, path("d")) == [1, 2, 3]
        assert ours.read("d", transport="shm").read_all() == TABLE
        for node in nodes:  # each node answers for the catalog
            with flight.FlightClient(node.uri) as there:
                assert [info.descriptor.path for info in there.list_flights()] == [[b"d"]]
                assert there.get_schema(path("d")).schema == TABLE.schema
                assert read(there, path("d")) == [1, 2, 3]
        ours.drop("d")
        assert list(plain.list_flights()) == []


def write(node: Node, name: str, *numbers: int) -> StagedSegment:
    with node.store.writer(name, TABLE.schema) as writer:
        writer.write(pa.record_batch({"n": pa.array(numbers, pa.int64())}))
    return StagedSegment(name, node.store.id)


def test_a_dataset_of_parts_on_several_nodes_is_one(cluster: tuple[CatalogService, list[Node]]) -> None:
    catalog, (a, b) = cluster
    with flight.FlightClient(catalog.uri) as plain, dis.connect(catalog.uri) as ours:
        ours.commit(commit_of("d", [write(a, "1", 1, 2), write(b, "2", 3)], TABLE.schema))
        assert read(plain, path("d")) == [1, 2, 3]
        assert ours.read("d").read_all()["n"].to_pylist() == [1, 2, 3]
        ours.commit(commit_of("d", [write(b, "3", 4)], TABLE.schema, mode="append"))
        assert ours.describe("d").rows == 4
        assert ours.read("d", transport="tcp").read_all()["n"].to_pylist() == [1, 2, 3, 4]
        with pytest.raises(dis.errors.CatalogError, match="no node 'z' has registered"):
            ours.commit(commit_of("d", [StagedSegment("s", "z")], TABLE.schema, mode="append"))


def test_a_version_stays_equal_to_itself_after_heartbeats(cluster: tuple[CatalogService, list[Node]]) -> None:
    catalog, (a, _) = cluster
    with dis.connect(catalog.uri) as client:
        client.commit(commit_of("d", [write(a, "1", 1)], TABLE.schema))
        before = client.describe("d")
        wait_until(lambda: client.describe("d").endpoints[0].seen > before.endpoints[0].seen, "another heartbeat")
        assert client.describe("d") == before
        assert client.list() == [before]


def test_locations_are_ordered_for_who_asks(cluster: tuple[CatalogService, list[Node]]) -> None:
    catalog, (a, _) = cluster
    with flight.FlightClient(catalog.uri) as plain, dis.connect(catalog.uri) as ours:
        ours.commit(commit_of("d", [write(a, "1", 1)], TABLE.schema))

        def schemes(**asking: str) -> list[str]:
            (endpoint,) = plain.get_flight_info(command(name="d", **asking)).endpoints
            return [location.uri.decode().partition(":")[0] for location in endpoint.locations]

        reuse = REUSE_CONNECTION.partition(":")[0]
        assert schemes() == ["grpc", "shm", "tcp", reuse]
        assert schemes(host="here", boot_id=boot_id()) == ["shm", "tcp", "grpc", reuse]
        assert schemes(host="far", boot_id="another") == ["tcp", "grpc", reuse]


def test_the_endpoints_of_a_node_that_left_are_marked(cluster: tuple[CatalogService, list[Node]]) -> None:
    catalog, (a, b) = cluster
    with flight.FlightClient(catalog.uri) as plain, dis.connect(catalog.uri) as ours:
        ours.commit(commit_of("d", [write(a, "1", 1), write(b, "2", 2)], TABLE.schema))
        b.close()
        first, second = plain.get_flight_info(path("d")).endpoints
        assert first.locations
        assert list(second.locations) == []
        assert [one["alive"] for one in json.loads(second.app_metadata)["nodes"]] == [False]
        with pytest.raises(flight.FlightServerError, match="no node there is alive"):
            plain.do_get(second.ticket).read_all()
        with pytest.raises(dis.errors.CatalogError, match="and no node there is alive"):
            ours.read("d")
        assert [node["alive"] for node in ours.nodes() if node["id"] in (a.store.id, b.store.id)].count(False) == 1


def test_a_catalog_identifies_no_more_datasets_at_once_than_a_client_asks_for(plain: flight.FlightClient) -> None:
    put(plain, path("d"), TABLE)
    one = json.dumps({"names": ["d"] * 100 + ["missing"]}).encode()
    assert [*json.loads(act(plain, "current", one))["current"]] == ["d"]
    with pytest.raises(flight.FlightServerError, match="is invalid"):
        act(plain, "current", json.dumps({"names": [*map(str, range(65))]}).encode())
