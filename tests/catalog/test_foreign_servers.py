"""This library's client at foreign Flight servers, which answer in every way that Flight permits."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight
import pytest

import dissociated as dis
from dissociated.base.host import boot_id
from dissociated.cli import main
from dissociated.errors import CatalogError, DatasetNotFound, WrongKind
from support.certificates import Certificates
from support.helpers import connections_left, misnamed

TABLE = pa.table({"n": [1, 2, 3]})
REUSE = "arrow-flight-reuse-connection://?"
GONE = pa.scalar(1_000_000, pa.timestamp("us", "UTC"))  # in 1970

_Streams = dict[bytes, pa.Table]


class Flights(flight.FlightServerBase):  # type: ignore[misc]  # pyarrow has no type hints
    """A server that finds datasets by descriptor and streams by ticket, and lists nothing if criteria are set."""

    def __init__(self, uri: str = "grpc://127.0.0.1:0", **options: Any) -> None:
        super().__init__(uri, middleware={"headers": _Headers()}, **options)
        self.uri = uri.replace(":0", f":{self.port}")
        self.infos: dict[bytes, flight.FlightInfo] = {}
        self.streams: _Streams = {b"t": TABLE}
        self.tokens: list[list[str]] = []  # of each DoGet

    def add(self, name: str | bytes, *endpoints: flight.FlightEndpoint, told: bytes = b"", rows: int = 3) -> None:
        descriptor = flight.FlightDescriptor.for_path(name)
        self.infos[descriptor.path[0]] = flight.FlightInfo(
            TABLE.schema, descriptor, [*endpoints], rows, -1, app_metadata=told
        )

    def get_flight_info(self, context: Any, descriptor: flight.FlightDescriptor) -> flight.FlightInfo:
        try:
            return self.infos[b"|".join(descriptor.path or [descriptor.command])]
        except KeyError:
            raise KeyError("Flight not found.") from None

    def list_flights(self, context: Any, criteria: bytes) -> Iterator[flight.FlightInfo]:
        yield from [] if criteria else self.infos.values()

    def do_get(self, context: Any, ticket: flight.Ticket) -> flight.RecordBatchStream:
        self.tokens.append(context.get_middleware("headers").tokens)
        return flight.RecordBatchStream(self.streams[ticket.ticket])


class _Headers(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """A middleware that records the token of each call."""

    def start_call(self, info: Any, headers: dict[str, list[str]]) -> flight.ServerMiddleware:
        return _Call(headers.get("authorization", []))


class _Call(flight.ServerMiddleware):  # type: ignore[misc]
    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens


@pytest.fixture
def server() -> Iterator[Flights]:
    with Flights() as server:
        yield server


@pytest.fixture
def client(server: Flights) -> Iterator[dis.Client]:
    with dis.connect(server.uri) as client:
        yield client


def endpoint(*locations: str, ticket: bytes = b"t", told: bytes = b"", expires: object = None) -> flight.FlightEndpoint:
    return flight.FlightEndpoint(ticket, [*locations], expires, told)


#: Values of app_metadata that this library did not write.
TOLD = [
    b"\x00\xff",
    b"hello",
    b"7",
    b"[1]",
    b"[" * 100_000,
    b'{"nodes": [1], "rows": 1}',
    b'{"nodes": {}, "rows": "x"}',
    b'{"rows": 99, "version": 3, "created": 1, "expires": 5, "tags": {"a": "b"}}',
    b'{"host": "h", "boot_id": "b", "version": "x", "created": "y"}',
    *(
        f'{{"host": "h", "boot_id": "b", "version": 1, "created": {created}, "expires": {expires}}}'.encode()
        for created, expires in ((1e30, 5), (10**30, 5), (9e15, 5), (-9e15, 5), (5, 1e300), ("1e999", 5), ("NaN", 5))
    ),
]


def test_metadata_of_other_servers_is_not_taken_for_ours(
    server: Flights, client: dis.Client, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, told in enumerate(TOLD):
        server.add(f"info {number}", endpoint(), told=told)
        server.add(f"part {number}", endpoint(told=told))
    assert [*client] == sorted(name.decode() for name in server.infos)
    for name in client:
        assert name in client
        info = client.describe(name)
        assert (info.name, info.version, info.rows, info.tags) == (name, 0, 3, {})
        assert (info.endpoints[0].rows, info.endpoints[0].hosts) == (None, ())
        assert "grpc" in repr(info)
        assert "the server that told of it" in repr(info.endpoints)
        assert client.read(name).read_all() == client[name].to_table() == TABLE
        assert client.read(name, filter=("n", ">", 1), limit=1).read_all() == TABLE[1:2]
    assert "nope" not in client
    with pytest.raises(DatasetNotFound, match="has no dataset 'nope'"):
        client.read("nope")
    with pytest.raises(WrongKind, match="Flight alone"):
        client.read_tensors("info 0")
    assert main(["ls", "-l", server.uri]) == main(["describe", "-l", f"{server.uri}/info 0"]) == 0
    assert "grpc" in capsys.readouterr().out


#: Values of the metadata of a schema under the key of this library's tensors.
TENSORS = [
    *(
        b'{"count": %s, "first": []}' % count
        for count in (b"1e999", b"NaN", b"9" * 400, b"9" * 5000, b"-5", b'"x"', b"[]")
    ),
    *(
        b'{"count": 1, "first": [{"format": "f", "type": "t", "shape": [%s], "names": []}]}' % length
        for length in (b"1e999", b"9" * 400, b"-1e999", b"{}", b"null")
    ),
    rb'{"count": 1, "first": [{"format": "\ud800", "type": "\u001b[2J", "shape": [1], "names": ["\ud800"]}]}',
    rb'{"count": 1, "first": [{"format": "\u001b[2J", "type": "\u001b[2J", "shape": [1], "names": []}]}',
    b"[" * 100_000,
    b"\xff",
]


def test_descriptions_of_tensors_by_other_servers_can_be_shown(
    server: Flights, client: dis.Client, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, told in enumerate(TENSORS):
        descriptor = flight.FlightDescriptor.for_path(f"{number}")
        schema = pa.schema([], metadata={b"dissociated.tensors": told})
        server.infos[descriptor.path[0]] = flight.FlightInfo(schema, descriptor, [endpoint()], 2**63 - 1, -(2**63))
    found = client.list()
    assert len(found) == len(TENSORS)
    for info in found:
        for shown in (repr(info), info._repr_html_(), repr(client.dataset(info.name)), repr([info]), repr(found)):
            assert len(shown.encode()) < 10_000
            assert "\x1b" not in shown
        assert main(["describe", f"{server.uri}/{info.name}"]) == 0
    assert found._repr_html_()
    assert main(["ls", "-l", server.uri]) == main(["ls", "--json", server.uri]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_a_dataset_is_read_wherever_flight_says(server: Flights, client: dis.Client) -> None:
    """The token of the catalog is sent along. Only `other` knows its ticket."""
    with Flights() as other, dis.connect(server.uri, token="sesame") as guarded, socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # without listening
        other.streams = {b"there": TABLE}
        here = [[], [server.uri], [server.uri.replace("grpc:", "grpc+tcp:")], [REUSE], ["weird:bar", REUSE]]
        dead = f"grpc://127.0.0.1:{silent.getsockname()[1]}"
        there = [[other.uri], [dead, other.uri], ["https://x/y?z", "s3://b/k", other.uri]]
        for locations in here:
            server.add(repr(locations), endpoint(*locations))
        for locations in there:
            server.add(repr(locations), endpoint(*locations, ticket=b"there"))
        for name in guarded:
            for transport in (None, "grpc"):
                assert guarded.read(name, transport=transport).read_all() == TABLE, name
            with pytest.raises(CatalogError, match=r"cannot be reached from here by tcp: it is offered by .*grpc"):
                guarded.read(name, transport="tcp")
        assert server.tokens == [["Bearer sesame"]] * 2 * len(here)
        assert other.tokens == [["Bearer sesame"]] * 2 * len(there)
        server.add("dead", endpoint(dead))
        with pytest.raises(CatalogError, match=f"no catalog answers at {dead}"):
            client.read("dead")
        server.add("web", endpoint("https://x/y?z"))
        with pytest.raises(CatalogError, match="by any transport: it is offered by https"):
            client.read("web")
        assert main(["ls", "-l", server.uri]) == 0


def test_a_token_that_tls_kept_secret_is_not_sent_in_the_clear(certified: Certificates) -> None:
    certificate, key = (Path(certified.options[name]).read_bytes() for name in ("tls_cert", "tls_key"))
    with Flights("grpc+tls://127.0.0.1:0", tls_certificates=[(certificate, key)]) as server, Flights() as other:
        server.add("d", endpoint(other.uri))
        with dis.connect(server.uri, token="sesame", tls_roots=certified.roots) as client:
            assert client.read("d").read_all() == TABLE
        assert other.tokens == [[]]


def test_several_endpoints_are_one_dataset_in_their_order(server: Flights, client: dis.Client) -> None:
    """Expired endpoints are read as well: only their server knows whether they are still valid."""
    server.streams |= {bytes([n]): pa.table({"n": [n]}) for n in range(3)}
    server.streams[b"other"] = pa.table({"m": [1]})
    server.add("d", *(endpoint(ticket=bytes([n]), expires=GONE) for n in (2, 0, 1)))
    assert client.read("d").read_all()["n"].to_pylist() == [2, 0, 1]
    server.add("none")
    assert client.read("none").read_all() == TABLE[:0]
    server.add("mixed", endpoint(), endpoint(ticket=b"other"))
    with pytest.raises(CatalogError, match="the parts of 'mixed' do not all have the same columns"):
        client.read("mixed")
    with dis.Server(["tcp://127.0.0.1:0"], catalog=None) as ours:
        for name in ("n", "m"):  # more than a connection holds
            ours.publish(name, [pa.record_batch({name: range(1 << 16)})] * 100)
        server.add("ours", *(endpoint(*ours.locations(name), ticket=ours.ticket(name)) for name in ("n", "m")))
        with pytest.raises(CatalogError, match="the parts of 'ours'") as caught:
            client.read("ours")
        assert connections_left(ours) == 0, "the error keeps no stream open"
        del caught
    server.add("over", endpoint(ticket=b"forgotten", expires=GONE))
    with pytest.raises(CatalogError, match="forgotten"):
        client.read("over")
    assert "over" in client


def test_columns_are_those_of_the_stream_and_rows_are_counted(server: Flights, client: dis.Client) -> None:
    """The FlightInfo is ignored: its 0 rows may mean that the server did not set the number."""
    server.infos[b"d"] = flight.FlightInfo(
        pa.schema([("a", pa.int64()), ("b", pa.int64())]), flight.FlightDescriptor.for_path("d"), [endpoint()], 0, 0
    )
    server.streams[b"t"] = pa.table({"b": [20, 21], "a": [10, 11]})
    assert client.read("d", columns=["a"]).read_all() == pa.table({"a": [10, 11]})
    assert client["d"].count_rows() == 2
    assert (client["d"].num_rows, client["d"].nbytes) == (None, None)


class Obliging(Flights):
    """A server that answers any descriptor, and checks the ticket only when the stream is read."""

    def get_flight_info(self, context: Any, descriptor: flight.FlightDescriptor) -> flight.FlightInfo:
        return flight.FlightInfo(TABLE.schema, descriptor, [endpoint(ticket=descriptor.command)])


def test_a_server_that_takes_any_descriptor_is_asked_by_the_name() -> None:
    with Obliging() as server, dis.connect(server.uri) as client:
        server.streams = {b"d": TABLE}
        assert client.read("d").read_all() == TABLE
        assert client.describe("d").name == "d"
        with pytest.raises(CatalogError, match="no"):
            client.read("no")
        with pytest.raises(CatalogError, match="has no versions"):
            client.read("d", version=3)


def test_what_is_listed_is_found_by_the_name_that_it_is_listed_by(server: Flights, client: dis.Client) -> None:
    """Paths of several parts and names that are not text are listed.

    This server lists nothing if it gets the criteria that this library sends.
    """
    for_path, for_command = flight.FlightDescriptor.for_path, flight.FlightDescriptor.for_command
    listed = {
        "a/b": for_path("a", "b"),
        "a/c": for_command("a/c"),
        "d": for_path("d"),
        "e\\xff\n": for_command(b"e\xff\n"),
    }
    for name, descriptor in listed.items():
        key = b"|".join(descriptor.path or [descriptor.command])
        server.infos = {key: flight.FlightInfo(TABLE.schema, descriptor, [endpoint()])}
        assert [*client] == [name]
        assert client.read(name).read_all() == TABLE
        assert [info.name for info in client.list(name[:1])] == [name]
        assert client.list("z") == client.list(tags={"a": "b"}) == []
    assert "\udcff" not in client


def test_a_dataset_with_an_unreadable_schema_is_listed_with_the_others(
    server: Flights, client: dis.Client, caplog: pytest.LogCaptureFixture
) -> None:
    server.add("good", endpoint())
    schema = misnamed(pa.table({"NAME": [1]})).schema
    server.infos[b"bad"] = flight.FlightInfo(schema, flight.FlightDescriptor.for_path("bad"), [endpoint()])
    assert [(info.name, info.schema.names) for info in client.list()] == [("bad", []), ("good", ["n"])]
    assert "schema of a dataset is unreadable" in caplog.text
    assert client.read("good").read_all() == TABLE
    with pytest.raises(CatalogError, match="sent an unreadable schema for 'bad'"):
        client.read("bad")


class Mute(Flights):
    """A server whose FlightInfo has no schema."""

    def get_flight_info(self, context: Any, descriptor: flight.FlightDescriptor) -> flight.FlightInfo:
        return flight.FlightInfo(None, descriptor, [endpoint()])


class Telling(Mute):
    """A server that returns the schema by GetSchema only."""

    def get_schema(self, context: Any, descriptor: flight.FlightDescriptor) -> flight.SchemaResult:
        return flight.SchemaResult(TABLE.schema)


def test_columns_that_are_not_told_are_asked_for() -> None:
    with Telling() as server, dis.connect(server.uri) as client:
        assert client["d"].schema == TABLE.schema
        assert client.read("d", columns=["n"]).read_all() == TABLE
    refused = pytest.raises(CatalogError, match="does not say what columns 'd' has")
    with Mute() as server, dis.connect(server.uri) as client, refused:
        client.read("d")


class Echoing(Flights):
    """A server that echoes the descriptor of an unknown dataset."""

    def __init__(self, refuse: Callable[[str], Exception]) -> None:
        super().__init__()
        self._refuse = refuse

    def get_flight_info(self, context: Any, descriptor: flight.FlightDescriptor) -> flight.FlightInfo:
        raise self._refuse(f"what is {descriptor}?")


def test_a_version_of_others_is_refused_without_what_our_client_says_of_itself() -> None:
    for refuse in (KeyError, flight.FlightServerError):
        with Echoing(refuse) as server, dis.connect(server.uri) as client:
            with pytest.raises(CatalogError, match="has no version 3 of 'd'") as raised:
                client.describe("d", 3)
            assert boot_id() not in str(raised.value)


class Answering(Flights):
    """A server that takes every action and every put, and answers in its own way."""

    answers: tuple[bytes, ...] = ()
    taken: tuple[flight.FlightDescriptor, ...] = ()

    def do_action(self, context: Any, action: flight.Action) -> list[bytes]:
        return [*self.answers]

    def do_put(self, context: Any, descriptor: flight.FlightDescriptor, reader: Any, writer: Any) -> None:
        self.taken += (descriptor,)
        reader.read_all()
        for answer in self.answers:
            writer.write(pa.py_buffer(answer))


def test_what_others_answer_to_actions_and_puts_is_refused_with_a_sentence() -> None:
    calls: list[Callable[[dis.Client], object]] = [
        lambda client: client.current(["d"]),
        lambda client: client.versions("d"),
        lambda client: client.nodes(),
        lambda client: client.stage(),
        lambda client: client.reserve("s", 1, 1),
        lambda client: client.committed("k"),
        lambda client: client.status(),
        lambda client: client.hand_over(0),
        lambda client: client.put("d", TABLE),
        lambda client: client.put("d", TABLE, transport="grpc"),
    ]
    answers = [
        (),
        (b"\xff",),
        (b"7",),
        (b"[" * 100_000,),
        (b"{}",),
        (b'{"versions": 1, "committed": "no", "rows": "x"}',),
    ]
    with Answering() as server, dis.connect(server.uri) as client:
        for server.answers in answers:
            for call in calls:
                with pytest.raises(CatalogError, match=r"answer|published"):
                    call(client)
        assert server.taken == ()  # nothing is put under a name that is our JSON
        server.answers = (b'{"committed": false}',)
        with pytest.raises(CatalogError, match="does not say how many rows it published"):
            client.put("d", TABLE)
