"""A guarded catalog and its nodes: TLS, tokens and signed tickets from end to end, and the errors of strangers."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight
import pytest

import dissociated as dis
from dissociated.catalog.database import Database
from dissociated.catalog.service import CatalogService
from dissociated.control.access import Security, security
from dissociated.errors import AccessDenied
from dissociated.node.node import Node
from dissociated.store.store import Store
from support.certificates import Certificates

TABLE = pa.table({"n": [1, 2, 3], "s": ["a", "b", "c"]})
SECRET = bytes(range(32))
TLS = "grpc+tls://127.0.0.1:0"
BETWEEN = ("prepare", "over", "register", "heartbeat", "leave")
RETAIN = 60.0


@pytest.fixture
def options(certified: Certificates) -> dict[str, Any]:
    """Return the options that a catalog and its nodes share."""
    return {
        **certified.options,
        "tls_roots": certified.roots,
        "authorize": {"sesame": ("ali", "admin")},
        "secret": SECRET,
        "ticket_lifetime": 3600.0,
    }


@pytest.fixture
def guarded(options: dict[str, Any]) -> Security:
    return security(**options, peers=True)


@pytest.fixture
def catalog(tmp_path: Path, guarded: Security) -> Iterator[CatalogService]:
    database = Database(str(tmp_path / "db"))
    service = CatalogService(TLS, database=database, retain=RETAIN, security=guarded)
    yield service
    service.close()


@pytest.fixture
def node(tmp_path: Path, catalog: CatalogService, guarded: Security) -> Iterator[Node]:
    with Node(
        Store(tmp_path / "store"), ["shm:", "tls:"], flight=TLS, catalog=catalog.uri, security=guarded
    ) as running:
        yield running


@pytest.fixture
def client(catalog: CatalogService, certified: Certificates) -> Iterator[dis.Client]:
    with dis.connect(catalog.uri, token="sesame", tls_roots=certified.roots) as connected:
        yield connected


def plain(uri: str, certified: Certificates) -> flight.FlightClient:
    return flight.FlightClient(uri, tls_root_certs=Path(certified.roots).read_bytes())


def bearing(token: str) -> flight.FlightCallOptions:
    return flight.FlightCallOptions(headers=[(b"authorization", f"Bearer {token}".encode())])


@pytest.mark.parametrize("transport", [None, "shm", "tls", "grpc"])
def test_what_is_put_through_the_catalog_is_read_from_its_node(
    client: dis.Client, node: Node, transport: str | None
) -> None:
    assert client.put("d", TABLE.to_reader()) == 3
    assert client.read("d", transport=transport).read_all() == TABLE
    assert client.read("d", transport=transport, columns=["s"]).read_all() == TABLE.select(["s"])
    client.drop("d")
    assert client.list() == []


def test_a_ticket_of_the_catalog_is_signed_and_good_at_the_node(
    client: dis.Client, catalog: CatalogService, node: Node, certified: Certificates
) -> None:
    client.put("d", TABLE.to_reader())
    (endpoint,) = client.describe("d").endpoints
    ((identifier,),) = [[version.ticket for version in node.store.versions()]]
    assert identifier in endpoint.ticket  # the ticket names the publication
    assert endpoint.ticket != identifier  # and proves that it may be read
    (tls,) = (uri for uri in endpoint.locations if uri.startswith("tls"))
    trusting = f"{tls}&roots={certified.roots}"
    assert dis.open_stream(trusting, endpoint.ticket).read_all() == TABLE
    with pytest.raises(dis.errors.RemoteError, match="not made by this server, or was altered"):
        dis.open_stream(trusting, identifier)
    with plain(catalog.uri, certified) as bare, pytest.raises(flight.FlightUnauthorizedError, match="was altered"):
        bare.do_get(flight.Ticket(identifier), bearing("sesame")).read_all()


def test_a_renewed_endpoint_ends_with_what_ends_first(
    client: dis.Client, catalog: CatalogService, node: Node, certified: Certificates
) -> None:
    """A replaced version is kept for a minute, and the ticket is valid for an hour."""
    client.put("d", TABLE.to_reader())
    with plain(catalog.uri, certified) as bare:
        (endpoint,) = bare.get_flight_info(flight.FlightDescriptor.for_path("d"), bearing("sesame")).endpoints
        raw = endpoint.serialize()
        assert len(raw) >= 128
        request = bytes([0x0A, len(raw) & 0x7F | 0x80, len(raw) >> 7]) + raw
        (result,) = bare.do_action(flight.Action("RenewFlightEndpoint", request), bearing("sesame"))
        renewed = flight.FlightEndpoint.deserialize(result.body.to_pybytes())
        client.put("d", TABLE.slice(1).to_reader())
        assert bare.do_get(renewed.ticket, bearing("sesame")).read_all() == TABLE
    left = renewed.expiration_time.as_py().timestamp() - time.time()
    assert 0 < left <= RETAIN


@pytest.mark.parametrize("action", BETWEEN)
@pytest.mark.parametrize("place", ["catalog", "node"])
def test_only_peers_make_the_calls_between_catalogs_and_nodes(
    catalog: CatalogService, node: Node, certified: Certificates, guarded: Security, place: str, action: str
) -> None:
    uri = catalog.uri if place == "catalog" else node.uri
    assert guarded.peer is not None
    other = security(secret=SECRET[::-1], peers=True).peer
    assert other is not None
    with plain(uri, certified) as bare:
        for token in ("", "wrong", other):
            with pytest.raises(flight.FlightUnauthenticatedError):
                list(bare.do_action(flight.Action(action, b"{}"), bearing(token)))
        with pytest.raises(flight.FlightUnauthorizedError, match="only catalogs and nodes with the same secret"):
            list(bare.do_action(flight.Action(action, b"{}"), bearing("sesame")))
        with pytest.raises(flight.FlightServerError, match=r"is invalid|no stage of its own|register there"):
            # Authorized, but without arguments.
            list(bare.do_action(flight.Action(action, b"{}"), bearing(guarded.peer)))


def test_without_a_token_nothing_is_put_dropped_or_renewed(
    client: dis.Client, catalog: CatalogService, node: Node, certified: Certificates
) -> None:
    client.put("d", TABLE.to_reader())
    for uri in (catalog.uri, node.uri):
        with dis.connect(uri, tls_roots=certified.roots) as stranger:
            with pytest.raises(AccessDenied, match="requires a token"):
                stranger.put("d", TABLE.slice(1).to_reader())
            for action in ("drop", "commit", "reserve", "discard", "versions", "nodes", "status", "stage"):
                with pytest.raises(AccessDenied, match="requires a token"):
                    stranger.do_action(action, {"name": "d"})
            with pytest.raises(AccessDenied, match="requires a token"):
                stranger.do_action("RenewFlightEndpoint", {})
    assert client.read("d").read_all() == TABLE


def test_a_secret_alone_keeps_strangers_from_registering(tmp_path: Path) -> None:
    """Without tokens everybody may read, but only nodes with the secret may register."""
    shared = security(secret=SECRET, peers=True)
    catalog = CatalogService("grpc://127.0.0.1:0", database=Database(), security=shared)
    try:
        with pytest.raises(AccessDenied, match="the same secret"):
            Node(Store(tmp_path / "stranger"), ["shm:"], catalog=catalog.uri)
        with (
            Node(Store(tmp_path / "store"), ["shm:"], catalog=catalog.uri, security=shared),
            dis.connect(catalog.uri) as client,
        ):
            client.put("d", TABLE.to_reader())
            assert client.read("d").read_all() == TABLE
    finally:
        catalog.close()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"authorize": None}, "requires tokens, and the node does not"),
        ({"ticket_lifetime": None}, "do not make the same tickets"),
        ({"secret": None}, "requires a token"),
        ({"secret": SECRET[::-1]}, "does not accept this token"),
        ({"tls_roots": None}, "certificate"),
    ],
)
def test_a_node_that_is_guarded_otherwise_is_told_when_it_starts(
    tmp_path: Path, catalog: CatalogService, options: dict[str, Any], change: dict[str, Any], sentence: str
) -> None:
    other = security(**{**options, **change}, peers=True)
    with pytest.raises(AccessDenied, match=sentence):
        Node(Store(tmp_path / "store"), ["tls:"], flight=TLS, catalog=catalog.uri, security=other)


def test_a_node_with_the_same_secret_accepts_tickets_from_before_it_was_started_again(
    tmp_path: Path, certified: Certificates, options: dict[str, Any]
) -> None:
    tickets: list[bytes] = []
    for _ in range(2):
        again = security(**options, peers=True)
        with (
            Node(Store(tmp_path / "store"), ["shm:"], flight=TLS, security=again) as node,
            dis.connect(node.uri, token="sesame", tls_roots=certified.roots) as client,
            plain(node.uri, certified) as bare,
        ):
            if not tickets:
                client.put("d", TABLE.to_reader())
                tickets.append(client.describe("d").endpoints[0].ticket)
            assert bare.do_get(flight.Ticket(tickets[0]), bearing("sesame")).read_all() == TABLE


def test_status_of_a_catalog_names_its_nodes_and_that_of_a_node_what_it_holds(client: dis.Client, node: Node) -> None:
    client.put("d", TABLE.to_reader())
    client.read("d", transport="shm").read_all()
    told = client.status()
    assert [(one.catalog, one.alive) for one in told.nodes] == [(node.uri, True)]
    assert [(one.name, one.rows) for one in told.datasets] == [("d", 3)]
    assert told.listeners == ()
    served = node.server.status()
    assert [(one.name, one.rows) for one in served.datasets] == [("d", 3)]
    assert served.totals.streams == 1
    client.put("d", TABLE.slice(1).to_reader())
    assert [(one.name, one.rows, one.streams) for one in node.server.status().datasets] == [("d", 2, 1)]
    assert json.loads(json.dumps(told.plain()))["nodes"][0]["alive"] is True
