"""The catalog's datasets and locations, for clients of this library and for any client of Arrow Flight."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import pytest

import dissociated as dis
from dissociated.catalog.listing import REUSE_CONNECTION
from dissociated.control.locations import Endpoint, locations
from dissociated.store.segment import SegmentWriter
from dissociated.uri import Uri
from support.helpers import commit_of, wait_until

TABLE = pa.table(
    {"n": [1, None, 3], "s": ["a", "b", None], "d": pa.array(["x", "y", "x"]).dictionary_encode()}, metadata={"a": "b"}
)


@pytest.fixture(scope="module")
def server() -> Iterator[dis.Server]:
    with dis.Server(["shm:", "tcp://127.0.0.1:0", "inproc:"]) as running:
        running.publish("static", TABLE)
        running.publish("live", TABLE.to_reader)
        running.publish("ünïcödé / with spaces", TABLE)
        yield running


@pytest.fixture(scope="module")
def plain(server: dis.Server) -> Iterator[flight.FlightClient]:
    """Return a client that knows only Arrow Flight."""
    with flight.FlightClient(server.catalog_uri) as connected:
        yield connected


def test_list(client: dis.Client) -> None:
    assert [info.name for info in client.list()] == ["live", "static", "ünïcödé / with spaces"]


def test_describe(server: dis.Server, client: dis.Client) -> None:
    static = client.describe("static")
    assert static.schema.equals(TABLE.schema, check_metadata=True)
    assert static.rows == 3
    assert static.nbytes
    assert [endpoint.ticket for endpoint in static.endpoints] == [server.ticket("static")]
    live = client.describe("live")
    assert live.schema.equals(TABLE.schema, check_metadata=True)
    assert (live.rows, live.nbytes) == (None, None)


@pytest.mark.parametrize("transport", [None, "shm", "tcp", "inproc", "grpc"])
@pytest.mark.parametrize("name", ["static", "live", "ünïcödé / with spaces"])
def test_read(client: dis.Client, name: str, transport: str | None) -> None:
    reader = client.read(name, transport=transport)
    assert reader.schema.equals(TABLE.schema, check_metadata=True)
    assert reader.read_all() == TABLE


@pytest.mark.parametrize("transport", ["shm", "tcp", "inproc", "grpc"])
@pytest.mark.parametrize("columns", [["s"], ["d", "n"], []], ids="-".join)
def test_read_some_columns(client: dis.Client, transport: str, columns: list[str]) -> None:
    arrived = client.read("static", transport=transport, columns=columns).read_all()
    expected = TABLE.select([name for name in TABLE.schema.names if name in columns])
    assert arrived.schema.equals(expected.schema, check_metadata=True)
    assert arrived.num_rows == 3
    assert arrived == expected


@pytest.mark.parametrize("transport", [None, "grpc"])
def test_a_column_that_does_not_exist(client: dis.Client, transport: str | None) -> None:
    with pytest.raises(dis.errors.ColumnNotFound, match="no column 'x'; there are n, s, d"):
        client.read("static", transport=transport, columns=["x"])


def test_a_dataset_that_does_not_exist(client: dis.Client) -> None:
    for ask in (client.describe, client.read, client.drop):
        with pytest.raises(dis.errors.DatasetNotFound, match='no dataset "it\'s" is published here: list the names'):
            ask("it's")
        with pytest.raises(dis.errors.DatasetNotFound, match=r"did you mean 'static'\? List .* with client\.list\(\)"):
            ask("sttaic")
    with pytest.raises(dis.errors.DatasetNotFound, match=r"no version 9 of .* with client\.versions\(name\)"):
        client.describe("static", 9)


def test_a_server_names_the_dataset_that_may_be_meant(server: dis.Server) -> None:
    with pytest.raises(dis.errors.DatasetNotFound, match=r"did you mean 'static'\? .* with server\.names\(\)"):
        server.drop("sttaic")


def test_a_name_is_never_taken_for_another(server: dis.Server, client: dis.Client) -> None:
    """Foreign servers are also asked by other descriptors, such as a name with escaped bytes that `ls` prints."""
    server.publish("A", TABLE)
    assert client.describe("A").rows == 3
    for name in (r"\x41", '{"name": "A"}', '{"name": "A", "version": 1}'):
        for ask in (client.describe, client.read):
            with pytest.raises(dis.errors.DatasetNotFound, match="no dataset"):
                ask(name)
        assert name not in client


def test_a_transport_that_is_not_offered(client: dis.Client) -> None:
    with pytest.raises(
        dis.errors.CatalogError, match=r"cannot be reached from here by ucx: it is offered by grpc, inproc, shm, tcp"
    ):
        client.read("static", transport="ucx")


def test_the_nearest_transport_is_used(server: dis.Server, client: dis.Client) -> None:
    """The transport inproc copies nothing: its arrays are those of the table itself."""
    server.publish("near", pa.table({"n": np.arange(10_000)}))  # too large for an answer of the catalog
    reader = client.read("near")
    sent = server.dataset("near").open_reader().read_all()["n"].chunk(0).buffers()[1]
    assert reader.read_all()["n"].chunk(0).buffers()[1].address == sent.address
    server.drop("near")


def test_a_source_that_fails_says_why_over_flight_too(server: dis.Server, client: dis.Client) -> None:
    server.publish("once", TABLE.to_reader())
    assert client.read("once", transport="grpc").read_all() == TABLE
    with pytest.raises(dis.errors.DissociatedError, match="'once' was published from a reader, which can be read once"):
        client.read("once", transport="grpc").read_all()
    server.drop("once")


@pytest.mark.parametrize("live", [None, dis.Live()], ids=["once", "live"])
def test_a_stream_that_was_read_leaves_every_list(
    server: dis.Server, client: dis.Client, live: dis.Live | None
) -> None:
    def listed() -> list[bool]:
        return ["stream" in names for names in (server.names(), [info.name for info in client.list()])]

    server.publish("stream", TABLE.to_reader(), live=live)
    assert listed() == [True, True]
    assert client.read("stream", transport="tcp").read_all() == TABLE
    wait_until(lambda: listed() == [False, False], "the stream has left every list")
    with pytest.raises(
        dis.errors.SourceError if live else dis.errors.RemoteError, match=r"'stream' (has ended|was publ)"
    ):
        client.read("stream", transport="tcp").read_all()  # still says why there is nothing to read
    server.publish("stream", TABLE)
    assert listed() == [True, True]
    server.drop("stream")


def test_drop(server: dis.Server, client: dis.Client) -> None:
    server.publish("gone", TABLE)
    client.drop("gone")
    assert "gone" not in server.names()


def test_no_catalog_there() -> None:
    with dis.Server(["inproc:"]) as gone:
        uri = gone.catalog_uri
    why = rf"no catalog answers at {uri}: is it running\? \(Connection refused\)"
    with pytest.raises(dis.errors.CatalogError, match=why):
        dis.connect(uri, timeout=5).list()


def test_a_port_in_use(server: dis.Server) -> None:
    with pytest.raises(dis.errors.TransportError, match=r"the catalog cannot listen at .*: Address already in use"):
        dis.Server(["inproc:"], catalog=server.catalog_uri)


# Writing


def write(client: dis.Client, name: str, *numbers: int) -> str:
    with SegmentWriter(Path(client.stage().directory) / name, pa.schema([("n", pa.int64())])) as writer:
        writer.write(pa.record_batch({"n": pa.array(numbers, pa.int64())}))
    return name


def read(client: dis.Client, name: str) -> list[int]:
    numbers: list[int] = client.read(name, transport="shm").read_all()["n"].to_pylist()
    return numbers


def test_a_commit_shows_all_segments_at_once(client: dis.Client) -> None:
    schema = pa.schema([("n", pa.int64())])
    names = [write(client, "a", 1, 2), write(client, "b", 3)]
    client.commit(commit_of("written", names, schema))
    assert read(client, "written") == [1, 2, 3]
    assert list(Path(client.stage().directory).iterdir()) == []
    client.commit(commit_of("written", names, schema))  # a repeated commit, which Spark may send, has no effect
    assert read(client, "written") == [1, 2, 3]
    client.commit(commit_of("written", [write(client, "c", 4)], schema, mode="append"))
    assert read(client, "written") == [1, 2, 3, 4]
    client.commit(commit_of("written", [], schema))
    assert read(client, "written") == []
    client.drop("written")


def test_a_commit_of_what_is_not_there_changes_nothing(client: dis.Client) -> None:
    schema = pa.schema([("n", pa.int64())])
    client.commit(commit_of("kept", [write(client, "d", 1)], schema))
    with pytest.raises(dis.errors.CatalogError, match="No such file"):
        client.commit(commit_of("kept", [write(client, "e", 2), "missing"], schema))
    assert read(client, "kept") == [1]
    client.discard(["e", "missing"])
    assert list(Path(client.stage().directory).iterdir()) == []
    client.drop("kept")


@pytest.mark.parametrize("name", ["../escape", "/etc/passwd"])
def test_segments_outside_the_stage_cannot_be_named(client: dis.Client, name: str) -> None:
    for act in (lambda: client.discard([name]), lambda: client.commit(commit_of("x", [name], pa.schema([])))):
        with pytest.raises(dis.errors.CatalogError, match="is not the name of a file in the staging directory"):
            act()


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b"not json", b'{"other": 1}', b"\xff"])
@pytest.mark.parametrize("action", ["commit", "discard", "drop"])
def test_actions_without_what_they_take_are_refused(plain: flight.FlightClient, action: str, body: bytes) -> None:
    with pytest.raises(flight.FlightServerError, match="is invalid"):
        list(plain.do_action(flight.Action(action, body)))


def test_an_unknown_action_is_answered_with_those_there_are(plain: flight.FlightClient) -> None:
    with pytest.raises(flight.FlightServerError, match="no action 'dance'; there are stage, reserve, commit"):
        list(plain.do_action(flight.Action("dance", b"")))
    assert {action.type for action in plain.list_actions()} >= {
        "stage",
        "commit",
        "discard",
        "drop",
        "status",
        "CancelFlightInfo",
    }


# Any client of Arrow Flight


def test_flight_do_get(plain: flight.FlightClient) -> None:
    for name in ("static", "live"):
        info = plain.get_flight_info(flight.FlightDescriptor.for_path(name))
        (endpoint,) = info.endpoints
        assert plain.do_get(endpoint.ticket).read_all() == TABLE


def test_flight_info(server: dis.Server, plain: flight.FlightClient) -> None:
    for descriptor in (flight.FlightDescriptor.for_path("static"), flight.FlightDescriptor.for_command("static")):
        info = plain.get_flight_info(descriptor)
        (endpoint,) = info.endpoints
        told = [location.uri.decode() for location in endpoint.locations]
        assert told == [server.catalog_uri, *server.locations("static"), REUSE_CONNECTION]
        assert all(Uri.parse(uri).want_data is not None for uri in told[1:-1])
        with flight.connect(endpoint.locations[0]) as there:  # like in the documentation of Flight
            assert there.do_get(endpoint.ticket).read_all() == TABLE
        assert info.ordered
        assert json.loads(info.app_metadata).keys() >= {"host", "boot_id", "version", "tags"}
        assert plain.get_schema(descriptor).schema == TABLE.schema


@pytest.mark.parametrize(
    "descriptor",
    [flight.FlightDescriptor.for_path("no"), flight.FlightDescriptor.for_command("no")],
    ids=["path", "command"],
)
def test_flight_names_what_does_not_exist(plain: flight.FlightClient, descriptor: Any) -> None:
    for ask in (plain.get_flight_info, plain.get_schema):
        with pytest.raises(KeyError, match="no dataset 'no' is published here") as refused:
            ask(descriptor)
        assert "Traceback" not in str(refused.value)


def test_flight_takes_names_of_one_part(plain: flight.FlightClient) -> None:
    with pytest.raises(flight.FlightServerError, match="path of one part"):
        plain.get_flight_info(flight.FlightDescriptor.for_path("a", "b"))


def test_flight_knows_no_other_tickets(plain: flight.FlightClient) -> None:
    with pytest.raises(KeyError, match="no dataset has this ticket") as refused:
        plain.do_get(flight.Ticket(b"guessed")).read_all()
    assert "Traceback" not in str(refused.value)


def test_flight_says_what_is_not_answered(plain: flight.FlightClient) -> None:
    with pytest.raises(
        pa.ArrowNotImplementedError, match="DoExchange is not supported: read with GetFlightInfo"
    ) as refused:
        plain.do_exchange(flight.FlightDescriptor.for_path("static"))[1].read_all()
    assert "Traceback" not in str(refused.value)


def test_what_is_not_understood_is_refused(server: dis.Server, plain: flight.FlightClient) -> None:
    """Ignoring a misspelt key would return another version than requested, or a list of all datasets."""

    def ask(**asked: Any) -> None:
        plain.get_flight_info(flight.FlightDescriptor.for_command(json.dumps(asked)))

    for asked, why in (
        ({"verzion": 1}, "the key 'verzion' is unknown: the keys are name, version, host"),
        ({"version": "1"}, "a whole number"),
    ):
        with pytest.raises(flight.FlightServerError, match=why):
            ask(name="static", **asked)
    with pytest.raises(flight.FlightServerError, match="the key 'prefx' is unknown: the keys are prefix, tags"):
        list(plain.list_flights(b'{"prefx": "s"}'))
    with pytest.raises(flight.FlightServerError, match="is invalid"):
        list(plain.do_action(flight.Action("drop", b'{"name": "static", "version": 1}')))
    assert "static" in server.names()


# Locations


@pytest.mark.parametrize(
    ("told", "ways"),
    [
        (["tcp://h:1?want_data=1"], [["tcp://h:1?want_data=1"]]),
        (["tcp://h:1", "nonsense:", "grpc://h:1", REUSE_CONNECTION, "ucx://h:1?want_data=x"], []),
        (
            ["shm:///s?want_data=1", "tcp://h:1?want_data=1"],
            [["shm:///s?want_data=1"], ["tcp://h:1?want_data=1"]],
        ),
        (  # exactly two of one scheme that differ in want_data: metadata and bodies, like in the C++ reference
            ["tcp://h:1?want_data=1", "tcp://h:1?want_data=2"],
            [["tcp://h:1?want_data=1", "tcp://h:1?want_data=2"]],
        ),
        (  # equal want_data: alternatives
            ["tcp://h:1?want_data=1", "tcp://g:1?want_data=1"],
            [["tcp://h:1?want_data=1"], ["tcp://g:1?want_data=1"]],
        ),
        (
            ["tcp://h:1?want_data=2&stream=bodies", "tcp://h:1?want_data=1&stream=metadata"],
            [["tcp://h:1?want_data=1&stream=metadata", "tcp://h:1?want_data=2&stream=bodies"]],
        ),
        (
            ["tcp://h:1?want_data=1&stream=metadata", "shm:///s?want_data=2&stream=bodies", "tcp://h:1?want_data=3"],
            [
                ["tcp://h:1?want_data=3"],
                ["tcp://h:1?want_data=1&stream=metadata", "shm:///s?want_data=2&stream=bodies"],
            ],
        ),
        (["tcp://h:1?want_data=1&stream=bodies"], []),
    ],
)
def test_locations_are_alternatives_or_pairs(told: list[str], ways: list[list[str]]) -> None:
    assert [[str(uri) for uri in uris] for uris in locations(Endpoint(b"", tuple(told)))] == ways


@pytest.mark.parametrize("transport", [None, "shm", "tcp", "inproc", "grpc"])
def test_options_mean_the_same_over_every_transport(client: dis.Client, transport: str | None) -> None:
    def read(columns: list[str] | None = None, **options: Any) -> pa.Table:
        return client.read(
            "static", transport=transport, columns=columns, options=dis.ReadOptions(**options)
        ).read_all()

    assert read(included_fields=[2, 0]) == TABLE.select([0, 2])
    with pytest.raises(dis.errors.OptionError, match="field 9 does not exist"):
        read(included_fields=[9])
    with pytest.raises(dis.errors.OptionError, match="columns or included_fields"):
        read(["n"], included_fields=[0])


@pytest.mark.parametrize("transport", [None, "shm", "tcp", "inproc", "grpc"])
def test_depth_is_limited_over_every_transport(server: dis.Server, client: dis.Client, transport: str | None) -> None:
    server.publish("nested", pa.table({"l": [[1]]}))
    with pytest.raises(dis.errors.FormatError, match="nested 2 levels deep"):
        client.read("nested", transport=transport, options=dis.ReadOptions(max_recursion_depth=1)).read_all()
