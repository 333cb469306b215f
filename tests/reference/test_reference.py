"""Each side of this library with the other side of the C++ reference."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.protocol.message import Message
from dissociated.transport.native.connection import NativeConnection
from support.helpers import PATIENCE, connections_left, leaving_nothing

from .double import COMMAND, WANT_DATA, WANT_METADATA, ReferenceClient, ReferenceFlight, ReferenceServer

pytestmark = pytest.mark.needs("ucx")

_RANDOM = np.random.default_rng(1)

#: Batches of one row and of many, empty batches, dictionaries; metadata that fits into a packet, and larger metadata.
TABLES = {
    "numbers": pa.Table.from_batches(
        pa.table({"n": np.arange(100_000), "x": _RANDOM.random(100_000)}).to_batches(max_chunksize=9_999)
    ),
    "an empty batch": pa.Table.from_batches(
        [pa.record_batch({"s": pa.array([], pa.string())}), pa.record_batch({"s": ["a", None, "ccc"]})]
    ),
    "dictionaries": pa.table({"d": pa.array(["x", "y", None, "x"]).dictionary_encode(), "n": range(4)}),
    "wide": pa.table({f"column number {n}": [n, None] for n in range(5_000)}),
    "a large body": pa.table({"x": _RANDOM.random(3_000_000)}),
}


@pytest.fixture(params=TABLES)
def table(request: pytest.FixtureRequest) -> pa.Table:
    return TABLES[request.param]


@pytest.fixture
def reference(table: pa.Table) -> Iterator[ReferenceServer]:
    with closing(ReferenceServer(table)) as server:
        yield server


@pytest.mark.parametrize("mode", ["none", "peer"])
def test_our_client_reads_from_the_reference(table: pa.Table, reference: ReferenceServer, mode: str) -> None:
    with leaving_nothing():
        uris = [f"{location}&err_mode={mode}" for location in reference.locations]
        arrived = dis.open_stream(uris, COMMAND, timeout=PATIENCE).read_all()
        arrived.validate(full=True)
        assert arrived == table
    assert sorted(reference.asked) == ["bodies", "metadata"]


def test_our_client_asks_and_closes_in_the_order_of_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client asks for the metadata first, and closes that connection first."""
    asked: list[int | None] = []
    on: list[NativeConnection] = []
    closed: list[NativeConnection] = []
    send, close = NativeConnection.send, NativeConnection.close

    def sending(connection: NativeConnection, messages: list[Message], timeout: float) -> None:
        asked.append(messages[0].tag)
        on.append(connection)
        send(connection, messages, timeout)

    def closing_one(connection: NativeConnection, reason: str | None = None) -> None:
        if connection not in closed:
            closed.append(connection)
        close(connection, reason)

    monkeypatch.setattr(NativeConnection, "send", sending)
    monkeypatch.setattr(NativeConnection, "close", closing_one)
    with closing(ReferenceServer(TABLES["numbers"])) as reference:
        assert dis.open_stream(reference.locations, COMMAND, timeout=PATIENCE).read_all() == TABLES["numbers"]
    assert asked == [WANT_METADATA, WANT_DATA]
    assert len(set(on)) == 2
    assert closed == on


def test_our_client_finds_what_the_reference_has_through_flight(reference: ReferenceServer, table: pa.Table) -> None:
    with (
        ReferenceFlight(reference, table.schema) as answering,
        dis.connect(f"grpc://127.0.0.1:{answering.port}") as client,
    ):
        assert client.read(COMMAND.decode()).read_all() == table


def test_the_reference_reads_from_our_server(table: pa.Table) -> None:
    with dis.Server(["ucx:?err_mode=none"]) as server:
        server.publish(COMMAND.decode(), table)
        client = ReferenceClient(server.catalog_uri, COMMAND)
        for _ in range(3):
            assert client.read_all() == table
        assert connections_left(server) == 0


def test_the_reference_reads_a_live_stream_from_our_server() -> None:
    table = TABLES["numbers"]
    with dis.Server(["ucx:?err_mode=none"]) as server:
        server.publish("live", lambda: table)
        assert ReferenceClient(server.catalog_uri, b"live").read_all() == table
        assert connections_left(server) == 0


def test_metadata_reaches_the_reference_in_every_form() -> None:
    with dis.Server(["ucx:?err_mode=none"]) as server:
        forms = set()
        for name in ("an empty batch", "wide"):
            server.publish(name, TABLES[name])
            client = ReferenceClient(server.catalog_uri, name.encode())
            client.read_all()
            forms |= client.forms
    assert "rendezvous" in forms
    assert len(forms) > 1


def test_a_server_that_insists_on_error_handling_refuses_the_reference() -> None:
    with dis.Server(["ucx:"]) as server:
        server.publish("data", TABLES["numbers"])
        uri = server.locations("data")[0]
        with pytest.raises(dis.errors.TransportError, match="err_mode=none"):
            dis.open_stream(f"{uri}&err_mode=none", server.ticket("data"), timeout=PATIENCE)
        assert dis.open_stream(uri, server.ticket("data")).read_all() == TABLES["numbers"]
