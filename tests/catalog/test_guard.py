"""A guarded catalog: TLS, tokens, and the errors of clients without the right ones."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight
import pytest

import dissociated as dis
from dissociated.errors import AccessDenied, CatalogError, OptionError, UriError
from dissociated.spark.catalog_config import CatalogConfig
from support.certificates import Certificates, certificates
from support.helpers import commit_of, location, open_over_flight

TABLE = pa.table({"n": [1, 2, 3]})
TLS = "grpc+tls://127.0.0.1:0"


@pytest.fixture(scope="module")
def server(certified: Certificates) -> Iterator[dis.Server]:
    """Yield a server that requires a token, and TLS for connections from other hosts."""
    with dis.Server(
        ["shm:", "tls:"],
        catalog=TLS,
        authorize={"sesame": "ali", "simsim": "cassim"},
        ticket_lifetime=3600.0,
        **certified.options,
    ) as running:
        running.publish("data", TABLE)
        yield running


CALLS: dict[str, Callable[[dis.Client], Any]] = {
    "list": lambda client: client.list(),
    "describe": lambda client: client.describe("data"),
    "read": lambda client: client.read("data"),
    "stage": lambda client: client.stage(),
    "commit": lambda client: client.commit(commit_of("mine", [], TABLE.schema)),
    "discard": lambda client: client.discard([]),
    "drop": lambda client: client.drop("data"),
}


@pytest.mark.parametrize("transport", [None, "shm", "tls", "grpc"])
def test_the_right_token_reads(server: dis.Server, certified: Certificates, transport: str | None) -> None:
    for token in ("sesame", "simsim"):
        with dis.connect(server.catalog_uri, token=token, tls_roots=certified.roots) as client:
            assert client.read("data", transport=transport).read_all() == TABLE


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("token", "sentence"), [(None, "requires a token"), ("wrong", "does not accept this token: it may have been")]
)
def test_without_the_right_token_nothing_is_answered(
    server: dis.Server, certified: Certificates, token: str | None, sentence: str, call: str
) -> None:
    with dis.connect(server.catalog_uri, token=token, tls_roots=certified.roots) as client:
        with pytest.raises(AccessDenied, match=sentence):
            CALLS[call](client)
        with pytest.raises(AccessDenied, match=sentence):
            open_over_flight(client, server.ticket("data"))  # a valid ticket alone is not enough
    assert server.names() == ["data"]


def test_a_plain_flight_client_sends_its_token_in_the_usual_header(server: dis.Server, certified: Certificates) -> None:
    roots = Path(certified.roots).read_bytes()
    with flight.FlightClient(server.catalog_uri, tls_root_certs=roots) as plain:
        for header, accepted in ((b"Bearer sesame", True), (b"bearer sesame", True), (b"Basic sesame", False)):
            options = flight.FlightCallOptions(headers=[(b"authorization", header)])
            if accepted:
                (info,) = plain.list_flights(options=options)
                assert plain.do_get(info.endpoints[0].ticket, options).read_all() == TABLE
                lifetime = info.endpoints[0].expiration_time.as_py().timestamp() - time.time()
                assert 3000 < lifetime <= 3600
            else:
                with pytest.raises(flight.FlightUnauthenticatedError):
                    list(plain.list_flights(options=options))


def test_a_certificate_that_is_not_trusted_ends_it(server: dis.Server, tmp_path: Path) -> None:
    """A certificate of an authority that is trusted for other servers is rejected, too."""
    other = certificates(tmp_path)
    for roots in (None, other.roots):
        with dis.connect(server.catalog_uri, token="sesame", tls_roots=roots, timeout=10) as client:
            for call in CALLS.values():
                with pytest.raises(AccessDenied, match=r"certificate of the catalog at .* is not trusted"):
                    call(client)


def test_a_certificate_for_another_host_ends_it(tmp_path: Path) -> None:
    made = certificates(tmp_path, "elsewhere.example")
    with (
        dis.Server([], catalog=TLS, **made.options) as server,
        dis.connect(server.catalog_uri, tls_roots=made.roots, timeout=10) as client,
        pytest.raises(AccessDenied, match="or is for another host"),
    ):
        client.list()


def test_what_an_eavesdropper_hears_has_neither_token_nor_ticket_nor_data(
    server: dis.Server, certified: Certificates
) -> None:
    """A client without TLS receives nothing either."""
    in_the_clear = dis.connect(server.catalog_uri.replace("+tls", ""), token="sesame", timeout=2)
    with in_the_clear as client, pytest.raises((CatalogError, dis.errors.DeadlineExceeded)):
        client.list()
    host, _, port = server.catalog_uri.partition("://")[2].rpartition(":")
    with socket.create_connection((host, int(port)), 5) as plain:
        plain.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9))
        heard = b""
        while piece := plain.recv(1 << 16):
            heard += piece
    assert len(heard) < 100


def test_a_token_that_the_catalog_protects_is_not_sent_to_a_node_in_the_clear(tmp_path: Path) -> None:
    received: list[str] = []
    file = tmp_path / "token"
    file.write_text("sesame\n")
    with dis.Server([], authorize=received.append) as node:
        for catalog, sent in (("grpc+tls://h:1", []), (f"grpc+unix://{tmp_path}/s", []), ("grpc://h:1", ["sesame"])):
            with dis.connect(catalog, token="sesame") as client:
                for connect in (client.with_uri, CatalogConfig(catalog, str(file)).connect):
                    received.clear()
                    with connect(node.catalog_uri) as there, pytest.raises(AccessDenied):
                        there.stage()
                    assert received == sent


def test_a_callable_decides(caplog: pytest.LogCaptureFixture) -> None:
    asked = []

    def authorize(token: str) -> object:
        asked.append(token)
        if token == "broken":
            raise KeyError(token)
        if token.startswith("odd"):
            return {"odd-list": [token], "odd-name": (7, "read"), "odd-role": ("ali", token)}[token]
        return token == "sesame"

    with dis.Server([], authorize=authorize) as server:
        for token in ("sesame", "wrong", "broken", "odd-list", "odd-name", "odd-role"):
            with dis.connect(server.catalog_uri, token=token) as client:
                if token == "sesame":
                    assert client.list() == []
                else:
                    with pytest.raises(AccessDenied):
                        client.list()
    assert [*dict.fromkeys(asked)][:3] == ["sesame", "wrong", "broken"]  # an empty list is requested twice
    errors = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert errors == [
        "token check failed: error=authorize raised KeyError",
        "token check failed: error=the owner of a token is a list: give a name, a name and a role, or True",
        "token check failed: error=the owner of a token is a tuple: give a name, a name and a role, or True",
        "token check failed: error=the role is unknown: the roles of tokens are read, write, admin",
    ]


def test_a_withdrawn_token_is_refused_at_the_next_call() -> None:
    good = {"sesame"}
    with (
        dis.Server([], authorize=good.__contains__) as server,
        dis.connect(server.catalog_uri, token="sesame") as client,
    ):
        assert client.list() == []
        server.publish("data", pa.table({"n": [1]}))
        assert [client.read("data").read_all().num_rows for _ in range(3)] == [1, 1, 1]
        good.clear()
        with pytest.raises(AccessDenied, match="may have been withdrawn"):
            client.list()
        with pytest.raises(AccessDenied, match="may have been withdrawn"):
            client.read("data")


def test_what_a_catalog_says_of_trust_is_not_believed(server: dis.Server, certified: Certificates) -> None:
    """Locations must not define which roots are trusted; only the client may."""
    uri = location(server, "data", "tls")

    with dis.Server([]) as lying:
        lying.publish("data", TABLE)
        lying.endpoints.dataset_locations = lambda dataset: [f"{uri}&roots={certified.roots}"]  # type: ignore[method-assign]
        with dis.connect(lying.catalog_uri) as client, pytest.raises(AccessDenied, match="is not trusted"):
            client.read("data", transport="tls")
        told = dis.connect(lying.catalog_uri, tls_roots=certified.roots)
        with told as client, pytest.raises(dis.errors.RemoteError, match="not made by this server"):
            client.read("data", transport="tls")


def test_an_endpoint_is_shown_without_its_ticket(server: dis.Server, certified: Certificates) -> None:
    with dis.connect(server.catalog_uri, token="sesame", tls_roots=certified.roots) as client:
        (endpoint,) = client.describe("data").endpoints
    assert "tls://" in repr(endpoint)
    assert "ticket" not in repr(endpoint)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"catalog": TLS}, "needs a certificate and its key"),
        ({"catalog": TLS, "tls_cert": "x"}, "give both"),
        ({"catalog": TLS, "tls_cert": "/nowhere/c.pem", "tls_key": "/nowhere/k.pem"}, "cannot read '/nowhere/c.pem'"),
        ({"catalog": "grpc://127.0.0.1:0", "authorize": []}, "authorize has no token"),
    ],
)
def test_what_cannot_be_guarded(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(OptionError, match=sentence):
        dis.Server([], **options)


def test_a_catalog_elsewhere_than_in_flight_is_no_catalog(certified: Certificates) -> None:
    with pytest.raises(UriError, match=r"grpc\+tls://HOST:PORT"):
        dis.Server([], catalog="https://127.0.0.1:0", **certified.options)
    with pytest.raises(OptionError, match=r"cannot read /nowhere/roots\.pem"):
        dis.connect("grpc+tls://127.0.0.1:1", tls_roots="/nowhere/roots.pem")
    with pytest.raises(OptionError, match="printable ASCII"):
        dis.connect("grpc://127.0.0.1:1", token="two words")
