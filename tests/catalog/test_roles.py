"""Roles of tokens: every call of Flight, every action and every page with each role."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight
import pyarrow.parquet as pq
import pytest

import dissociated as dis
from cli.shell import call
from dissociated.catalog.service import CatalogService
from dissociated.control import roles
from dissociated.control.access import Tokens, security
from dissociated.errors import AccessDenied
from dissociated.node.node import Node
from dissociated.store.store import Store
from support.helpers import PATIENCE, case, commit_of
from support.pages import ROOT

TABLE = pa.table({"n": [1, 2, 3]})
SECRET = bytes(range(32))
TOKENS = {"r": ("a reader", "read"), "w": ("a writer", "write"), "a": ("an operator", "admin"), "u": "without a role"}
#: From the fewest to the most permissions.
ORDER = ("read", "write", "admin", "peer")

CALLS = {
    "Handshake": "read",
    "ListFlights": "read",
    "GetFlightInfo": "read",
    "GetSchema": "read",
    "DoGet": "read",
    "DoPut": "write",
    "DoExchange": "write",
    "DoAction": "read",
    "ListActions": "read",
}
ACTIONS = {
    "current": "read",
    "versions": "read",
    "nodes": "read",
    "RenewFlightEndpoint": "read",
    "CancelFlightInfo": "read",
    "stage": "write",
    "reserve": "write",
    "commit": "write",
    "committed": "write",
    "discard": "write",
    "abort": "write",
    "drop": "write",
    "status": "admin",
    "forget": "admin",
    "prepare": "peer",
    "over": "peer",
    "register": "peer",
    "heartbeat": "peer",
    "leave": "peer",
}
PAGES = {
    "/healthz": None,
    "/metrics": "read",
    "/": "admin",
    "/page.css": "admin",
    "/page.js": "admin",
    "/status.json": "admin",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Yield the URIs of a catalog that requires tokens and of its node, their pages, and the token of a peer."""
    directory = tmp_path_factory.mktemp("roles")
    guarded = security(authorize=TOKENS, secret=SECRET, peers=True)
    assert guarded.peer is not None
    with (
        closing(CatalogService("grpc://127.0.0.1:0", security=guarded)) as catalog,
        Node(
            Store(directory / "store"),
            ["shm:", "tcp://127.0.0.1:0"],
            catalog=catalog.uri,
            security=guarded,
            http="127.0.0.1:0",
        ) as node,
        dis.connect(catalog.uri, token="w") as client,
    ):
        client.put("d", TABLE)
        tokens = {"read": "r", "write": "w", "admin": "a", "peer": guarded.peer}
        yield {"catalog": catalog.uri, "node": node.uri, "page": node.server.http_uri, "tokens": tokens}


def bearing(token: str) -> flight.FlightCallOptions:
    return flight.FlightCallOptions(headers=[(b"authorization", f"Bearer {token}".encode())], timeout=PATIENCE)


def allowed(role: str, needed: str) -> bool:
    return ORDER.index(role) >= ORDER.index(needed)


def act(client: flight.FlightClient, action: str, options: flight.FlightCallOptions) -> None:
    [*client.do_action(flight.Action(action, b""), options)]


def is_refused(call: Callable[[], Any]) -> bool:
    """Return whether a call is rejected because of its role; any other error means that the role sufficed."""
    try:
        call()
    except flight.FlightUnauthorizedError:
        return True
    except (flight.FlightError, pa.ArrowException, NotImplementedError):
        pass
    return False


def test_every_call_action_and_page_has_a_role(place: dict[str, Any]) -> None:
    """A call that is added to the server without a role fails this test, and the server rejects it meanwhile."""
    for uri in (place["catalog"], place["node"]):
        with flight.FlightClient(uri) as plain:
            assert {action.type for action in plain.list_actions(bearing("r"))} == {*ACTIONS}
    methods = {method.name.title().replace("_", "") for method in flight.FlightMethod} - {"Invalid"}
    assert methods == {*CALLS}
    told = urllib.request.Request(f"{place['page']}/nothing", headers={"Authorization": "Bearer r"})
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(told, timeout=PATIENCE)
    with caught.value as answer:
        assert {*answer.read().decode().partition("the paths are ")[2].strip().split(", ")} == {*PAGES}
    assert {call: str(role) for call, role in roles.FLIGHT_CALLS.items()} == CALLS
    assert {action: str(role) for action, role in roles.ACTIONS.items()} == ACTIONS
    assert {page: None if role is None else str(role) for page, role in roles.PAGES.items()} == PAGES


def test_the_page_about_access_has_the_same_table() -> None:
    text = (ROOT / "docs" / "access.md").read_text().partition("| call | role |")[2].partition("\n\n")[0]
    told: dict[str, str] = {}
    for calls, role in re.findall(r"^\| (.+) \| (.+) \|$", text, re.MULTILINE):
        told |= dict.fromkeys(re.findall(r"`([^`]+)`", calls), role.strip("`"))
    expected = {**CALLS, **ACTIONS, **{page: role or "none" for page, role in PAGES.items()}}
    assert told == expected


@pytest.mark.parametrize("where", ["catalog", "node"])
@pytest.mark.parametrize("role", ORDER)
def test_each_action_by_each_role(place: dict[str, Any], where: str, role: str) -> None:
    with flight.FlightClient(place[where]) as plain:
        options = bearing(place["tokens"][role])
        for action, needed in ACTIONS.items():
            with case(action):
                assert is_refused(partial(act, plain, action, options)) is not allowed(role, needed)
        with pytest.raises(flight.FlightServerError, match="no action 'other'"):
            [*plain.do_action(flight.Action("other", b""), options)]


@pytest.mark.parametrize("where", ["catalog", "node"])
@pytest.mark.parametrize("role", ORDER)
def test_each_call_by_each_role(place: dict[str, Any], where: str, role: str) -> None:
    descriptor = flight.FlightDescriptor.for_path("mine")
    with flight.FlightClient(place[where]) as plain:
        options = bearing(place["tokens"][role])
        (info,) = (one for one in plain.list_flights(options=options) if one.descriptor.path == [b"d"])

        def put() -> None:
            writer, _ = plain.do_put(descriptor, TABLE.schema, options)
            with writer:
                writer.write_table(TABLE)

        def exchange() -> None:
            writer, reader = plain.do_exchange(descriptor, options)
            with writer:
                reader.read_all()

        calls = {
            "ListFlights": lambda: [*plain.list_flights(options=options)],
            "GetFlightInfo": lambda: plain.get_flight_info(info.descriptor, options),
            "GetSchema": lambda: plain.get_schema(info.descriptor, options),
            "DoGet": lambda: plain.do_get(info.endpoints[0].ticket, options).read_all(),
            "DoPut": put,
            "DoExchange": exchange,
            "ListActions": lambda: plain.list_actions(options),
            "DoAction": lambda: [*plain.do_action(flight.Action("nodes", b""), options)],
        }
        assert {*CALLS} - {*calls} == {"Handshake"}
        for call, make in calls.items():
            with case(call):
                assert is_refused(make) is not allowed(role, CALLS[call])
        names = {one.descriptor.path[0] for one in plain.list_flights(options=options)}
        assert (b"mine" in names) is allowed(role, "write")
        if b"mine" in names:
            [*plain.do_action(flight.Action("drop", b'{"name": "mine"}'), options)]


@pytest.mark.parametrize("where", ["catalog", "node"])
def test_a_reader_reads_and_changes_nothing(place: dict[str, Any], where: str) -> None:
    for token in ("r", "u"):
        with case(token), dis.connect(place[where], token=token) as client:
            for transport in (None, "shm", "tcp", "grpc"):
                assert client.read("d", transport=transport).read_all() == TABLE
            assert [one.name for one in client.list()] == ["d"]
            assert client.versions("d")
            changes: dict[str, Callable[[], Any]] = {
                "put": lambda: client.put("d", TABLE.slice(1)),
                "append": lambda: client.put("d", TABLE, mode="append"),
                "put another": lambda: client.put("e", TABLE),
                "put by shm": lambda: client.put("d", TABLE, transport="shm"),
                "put by grpc": lambda: client.put("d", TABLE.slice(1), transport="grpc"),
                "drop": lambda: client.drop("d"),
                "commit": lambda: client.commit(commit_of("d", [], TABLE.schema)),
                "reserve": lambda: client.reserve("x", 1, 1),
                "discard": lambda: client.discard(["x"]),
                "abort": lambda: client.abort("x"),
                "hand over": lambda: client.hand_over(0),
                "status": client.status,
            }
            for change, make in changes.items():
                sentence = "needs the role (write|admin), and this token has the role read: .* NAME TOKEN ROLE"
                with case(change), pytest.raises(AccessDenied, match=sentence):
                    make()
            assert [(one.name, one.version) for one in client.list()] == [("d", client.describe("d").version)]
            assert client.read("d").read_all() == TABLE


def test_a_writer_writes_and_an_admin_sees_who_reads(place: dict[str, Any]) -> None:
    for where in ("catalog", "node"):
        for transport in ("shm", "grpc"):
            with dis.connect(place[where], token="w") as client:
                client.put("e", TABLE, transport=transport if where == "node" else None)
                client.put("e", TABLE, mode="append")
                assert client.read("e").read_all().num_rows == 6
                client.drop("e")
                with pytest.raises(AccessDenied, match="status needs the role admin, and this token has"):
                    client.status()
        with dis.connect(place[where], token="a") as client:
            assert [one.name for one in client.status().datasets] == ["d"]
            client.put("e", TABLE)
            client.drop("e")
            with pytest.raises(AccessDenied, match="only catalogs and nodes with the same secret may call this"):
                client.do_action("register", {})


@pytest.mark.parametrize("page", PAGES)
def test_each_page_by_each_role(place: dict[str, Any], page: str) -> None:
    pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    needed = PAGES[page]
    for token, role in ((None, None), ("wrong", None), ("r", "read"), ("u", "read"), ("w", "write"), ("a", "admin")):
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        try:
            with urllib.request.urlopen(urllib.request.Request(place["page"] + page, headers=headers)) as answer:
                status = answer.status
        except urllib.error.HTTPError as error:
            with error:
                status = error.code
        if needed is None:
            assert status == 200
        elif role is None:
            assert status == 401
        else:
            assert status == (200 if allowed(role, needed) else 403)


def test_the_command_line_says_what_a_reader_lacks(tmp_path: Path) -> None:
    pq.write_table(TABLE, tmp_path / "d.parquet")
    tokens = tmp_path / "tokens"
    tokens.write_text("ali sesame read\nzoe simsim write\n")
    tokens.chmod(0o600)
    with Node(Store(tmp_path / "store"), ["shm:"], security=security(authorize=Tokens.read(tokens))) as node:

        def put(token: str) -> subprocess.CompletedProcess[str]:
            (tmp_path / token).write_text(token)
            (tmp_path / token).chmod(0o600)
            return call("put", tmp_path / "d.parquet", f"{node.uri}/d", "--token-file", tmp_path / token)

        refused = put("sesame")
        assert refused.returncode != 0
        assert "needs the role write, and this token has the role read" in refused.stderr
        assert put("simsim").returncode == 0


def test_a_callable_says_the_role() -> None:
    owners: dict[str, object] = {
        "true": True,
        "name": "ali",
        "pair": ("ali", "write"),
        "admin": ("ali", "admin"),
        "misspelt": ("ali", "writer"),
        "peer": ("ali", "peer"),
        "three": ("ali", "write", "more"),
        "iterator": iter(()),  # any object is true, such as the coroutine of a callable that is asynchronous
        "list": ["ali", "admin"],
        "number": 1,
    }
    may = {"true": "read", "name": "read", "pair": "write", "admin": "admin"}
    with dis.Server([], authorize=owners.get) as server:
        for token in owners:
            with case(token), flight.FlightClient(server.catalog_uri) as plain:
                for action, needed in (("versions", "read"), ("drop", "write"), ("status", "admin")):
                    body = json.dumps({"name": "d"}).encode()
                    try:
                        [*plain.do_action(flight.Action(action, body), bearing(token))]
                        ended = "done"
                    except (flight.FlightError, pa.ArrowException) as error:
                        ended = type(error).__name__
                    if token not in may:
                        assert ended == "FlightUnauthenticatedError"
                    else:
                        assert (ended == "FlightUnauthorizedError") is not allowed(may[token], needed)
