"""A node with default options: only its user can reach it, through a private Unix socket."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pyarrow.flight as flight
import pytest

import dissociated as dis
from dissociated.catalog.service import CatalogService
from dissociated.errors import AccessDenied, CatalogError, TransportError, UriError
from dissociated.node.launch import ensure, running
from dissociated.node.node import Node
from dissociated.store.store import Store
from support.helpers import PATIENCE, case, wait_until
from support.nodes import table
from support.processes import Fork, Start

pytestmark = pytest.mark.usefixtures("forks")

NOBODY = 65534


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield the directory of this user's sockets."""
    with tempfile.TemporaryDirectory(prefix="dis-") as directory:
        monkeypatch.setenv("XDG_RUNTIME_DIR", directory)
        yield f"{directory}/dissociated"


#: Another user that tries everything, and prints how each attempt ended. It imports its modules before it changes user.
STRANGER = """
import json, os, sys
from contextlib import closing, suppress
import pyarrow as pa, pyarrow.flight as flight
import dissociated as dis
from dissociated.client.flight_connection import CatalogConnection
from dissociated.store.handover import hand_over

uri, handover = sys.argv[1:3]
table = pa.table({"n": [0]})
with dis.Server(["shm:"]) as own, dis.connect(own.catalog_uri) as client:
    own.publish("d", table)
    assert len(client.list()) == 1 and client.read("d", transport="shm").read_all() == table
    for call in (lambda: client.put("d", 5), lambda: hand_over("/missing", 0, 1)):
        with suppress(dis.DissociatedError):
            call()
os.setuid(65534)
plain = flight.FlightClient(uri)
options = flight.FlightCallOptions(timeout=5)

def plain_put():
    writer, _ = plain.do_put(flight.FlightDescriptor.for_path("d"), table.schema, options)
    with writer:
        writer.write_table(table)

with closing(dis.connect(uri, timeout=5)) as client:
    tries = {
        "list": client.list,
        "read": lambda: client.read("d", transport="shm").read_all(),
        "put": lambda: client.put("d", table),
        "drop": lambda: client.drop("d"),
        "plain list": lambda: [*plain.list_flights(options=options)],
        "plain put": plain_put,
        "plain drop": lambda: [*plain.do_action(flight.Action("drop", b'{"name": "d"}'), options)],
        "hand over": lambda: hand_over(handover, os.memfd_create("x", os.MFD_ALLOW_SEALING), 5),
    }
    for name, call in tries.items():
        try:
            print(json.dumps([name, "done", repr(call())]))
        except Exception as error:
            print(json.dumps([name, type(error).__name__, str(error)]))
"""


def refusals(uri: str, handover: Path) -> dict[str, tuple[str, str]]:
    """Return the results of another user's attempts."""
    with Fork("-c", STRANGER, uri, handover, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        told, log = process.communicate(timeout=3 * PATIENCE)
    assert process.returncode == 0, log
    return {name: (kind, text) for name, kind, text in map(json.loads, told.splitlines())}


@pytest.mark.needs("root")
@pytest.mark.usefixtures("forked_nodes")
@pytest.mark.parametrize("enterable", [False, True])
def test_another_user_gets_nothing_of_a_node_that_a_put_started(memory: Path, enterable: bool) -> None:
    """Even a user who could enter its directories gets nothing: the sockets themselves are private, too."""
    memory.chmod(0o755)
    store = memory / "store"
    address = ensure(store, idle_exit=600)
    try:
        with dis.connect(address.uri) as client:
            client.put("d", table(1, 2, 3))
        assert address.uri == f"grpc+unix://{store}/run/flight.sock"
        assert stat.S_IMODE((store / "run" / "flight.sock").stat().st_mode) == 0o600
        if enterable:
            store.chmod(0o755)
            (store / "run").chmod(0o755)
        tries = refusals(address.uri, store / "run" / "memfd.sock")
        assert len(tries) == 8
        assert [name for name, (kind, _) in tries.items() if kind == "done"] == []
        assert [name for name, (kind, _) in tries.items() if kind == "FlightUnavailableError"] == [
            "plain list",
            "plain put",
            "plain drop",
        ]
        assert {kind for name, (kind, _) in tries.items() if name in ("list", "read", "put", "drop")} == {
            "AccessDenied"
        }
        with dis.connect(address.uri) as client:
            assert [one.name for one in client.list()] == ["d"]
            assert client.read("d").read_all() == table(1, 2, 3)
    finally:
        os.kill(address.pid, signal.SIGKILL)


def test_the_same_user_finds_the_node_by_its_uri_by_its_store_and_by_the_variable(
    memory: Path, start: Start, tmp_path: Path
) -> None:
    """This holds for a directory with a space in its name, and for plain Flight."""
    store = memory / "a store"
    node = start("node", "--store", store)
    assert node.uri == f"grpc+unix://{memory}/a%20store/run/flight.sock"
    found = running(store)
    assert found is not None
    assert (found.uri, found.pid) == (node.uri, node.pid)
    with pa.ipc.new_file(tmp_path / "d.arrow", table().schema) as writer:
        writer.write_table(table(1, 2, 3))

    def command(*arguments: str, **environment: str) -> str:
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with Fork("-m", "dissociated", *arguments, env={**os.environ, **environment}, **streams) as process:
            told: str = process.communicate(timeout=PATIENCE)[0]
        assert process.returncode == 0, told
        return told

    assert f"at {node.uri}/d" in command("put", str(tmp_path / "d.arrow"), "d", "--store", str(store))
    told = {
        command("cat", f"{node.uri}/d"),
        command("cat", "d", "--catalog", node.uri),
        command("cat", "d", "--store", str(store)),
        command("cat", "d", DISSOCIATED_CATALOG=node.uri),
    }
    assert len(told) == 1
    with flight.FlightClient(node.uri) as plain:
        (info,) = plain.list_flights()
        assert info.endpoints[0].locations[0].uri.decode() == node.uri
        with flight.FlightClient(info.endpoints[0].locations[0]) as there:
            assert there.do_get(info.endpoints[0].ticket).read_all() == table(1, 2, 3)
    for transport in (None, "shm", "tcp", "grpc"):
        with case(transport), dis.connect(node.uri) as client:
            assert client.read("d", transport=transport).read_all() == table(1, 2, 3)


def test_a_node_that_was_killed_is_started_again_over_its_socket(memory: Path, start: Start) -> None:
    store = memory / "store"
    first = start("node", "--store", store)
    with dis.connect(first.uri) as client:
        client.put("d", table(1))
        first.kill()
        assert (store / "run" / "flight.sock").exists()
        second = start("node", "--store", store)
        assert second.uri == first.uri
        assert client.read("d", transport="shm").read_all() == table(1)  # the client finds the new node by itself


def test_a_node_that_ends_leaves_no_socket(memory: Path) -> None:
    store = memory / "store"
    with Node(Store(store), ["shm:"]):
        assert (store / "run" / "flight.sock").exists()
    assert [*(store / "run").iterdir()] == []


@pytest.mark.parametrize("name", ["with%percent", "with#number", "a.sock", "x" * 90])
def test_a_store_in_a_directory_that_flight_cannot_name(memory: Path, runtime: str, name: str) -> None:
    with Node(Store(memory / name), ["shm:"]) as node:
        assert node.uri.startswith(f"grpc+unix://{runtime}/")
        with dis.connect(node.uri) as client:
            client.put("d", table(1))
            assert client.read("d", transport="shm").read_all() == table(1)


def test_nodes_of_a_catalog_at_a_socket_answer_at_sockets(memory: Path) -> None:
    directory = memory / "private"
    directory.mkdir(mode=0o700)
    with (
        closing(CatalogService(f"grpc+unix://{directory}/catalog.sock")) as catalog,
        Node(Store(memory / "store"), ["shm:"], catalog=catalog.uri) as node,
        dis.connect(catalog.uri) as client,
    ):
        assert node.uri == f"grpc+unix://{memory}/store/run/flight.sock"
        client.put("d", table(1, 2))
        for transport in ("shm", "grpc"):
            assert client.read("d", transport=transport).read_all() == table(1, 2)
        client.drop("d")


def test_places_that_a_catalog_does_not_take(tmp_path: Path, memory: Path) -> None:
    private, public = memory / "private", memory / "public"
    private.mkdir(mode=0o700)
    public.mkdir(mode=0o755)
    public.chmod(0o755)
    (private / "file.sock").write_text("a letter")
    (memory / "link").symlink_to(private)
    with closing(CatalogService(f"grpc+unix://{private}/taken.sock")) as living:
        for uri, error, sentence in (
            ("grpc+unix:relative.sock", UriError, "its path must be absolute"),
            (f"grpc+unix://{private}/catalog", UriError, r"end in \.sock"),
            (f"grpc+unix://{private}/a%2523.sock", UriError, "none of them % # ?"),
            (f"grpc+unix://{private}/{'x' * 107}.sock", UriError, "at most 107 bytes"),
            (f"grpc+unix://{private}/dir.sock/x.sock", UriError, "no directory on it has"),
            (f"grpc+unix://{private}/missing/x.sock", TransportError, "No such file or directory"),
            (f"grpc+unix://{public}/x.sock", TransportError, "is open to other users .*chmod 700"),
            (f"grpc+unix://{memory}/link/x.sock", TransportError, "is a symbolic link"),
            (f"grpc+unix://{private}/file.sock", TransportError, "a file that is not a socket is there"),
            (living.uri, TransportError, "another server answers there"),
        ):
            with case(uri), pytest.raises(error, match=sentence):
                CatalogService(uri)
        with dis.connect(living.uri) as client:
            assert client.list() == []
    assert (private / "file.sock").read_text() == "a letter"


@pytest.mark.needs("root")
def test_a_socket_of_another_user_is_not_believed(memory: Path) -> None:
    """Otherwise, a user who guesses the address of a catalog would receive the data that is put there."""
    path = memory / "catalog.sock"
    with socket.socket(socket.AF_UNIX) as theirs:
        theirs.bind(str(path))
        theirs.listen()
        os.chown(path, NOBODY, NOBODY)
        with dis.connect(f"grpc+unix://{path}", timeout=5) as client:
            for call in (client.list, lambda: client.put("d", table(1))):
                with pytest.raises(AccessDenied, match="belongs to the user nobody: only one of your own is trusted"):
                    call()
        theirs.setblocking(False)
        with pytest.raises(BlockingIOError):
            theirs.accept()


def test_no_catalog_at_a_socket(memory: Path) -> None:
    with (
        dis.connect(f"grpc+unix://{memory}/none.sock", timeout=2) as client,
        pytest.raises(CatalogError, match=r"no catalog answers at grpc\+unix://.*: is it running\? .*No such file"),
    ):
        client.list()


@pytest.mark.parametrize(
    ("arguments", "reach"),
    [
        (("--flight", "grpc://127.0.0.1:0"), "every user of this host can list, read, overwrite and drop"),
        (("--flight", "grpc://0.0.0.0:0"), "everybody who reaches this port can list, read, overwrite and drop"),
        (("--flight", "grpc://127.0.0.1:0", "--token-file", "TOKENS"), None),
        ((), None),
    ],
)
def test_a_node_that_is_open_to_others_says_so_when_it_starts(
    memory: Path, arguments: tuple[str, ...], reach: str | None
) -> None:
    tokens = memory / "tokens"
    tokens.write_text("ali sesame\n")
    tokens.chmod(0o600)
    command = ["-m", "dissociated", "node", "--store", str(memory / "store"), *arguments]
    command = [str(tokens) if part == "TOKENS" else part for part in command]
    with Fork(*command, stdout=subprocess.PIPE) as node:
        assert node.stdout is not None
        lines: list[str] = []
        while not lines or not lines[-1].startswith("catalog"):
            lines.append(node.stdout.readline())
            assert lines[-1]
        node.terminate()
    said = [line for line in lines if line.startswith("access")]
    assert len(said) == (reach is not None)
    assert all(str(reach) in line and "--token-file FILE" in line and "grpc+unix:" in line for line in said)


def test_serve_and_a_server_answer_at_a_socket(tmp_path: Path, runtime: str, start: Start) -> None:
    with pa.ipc.new_file(tmp_path / "d.arrow", table().schema) as writer:
        writer.write_table(table(1, 2))
    served = start("serve", tmp_path / "d.arrow", "--catalog", "grpc+unix:", "--listen", "shm:")
    with dis.Server(["shm:"], catalog="grpc+unix:") as server:
        server.publish("d", table(1, 2))
        for uri in (served.uri, server.catalog_uri):
            assert uri.startswith(f"grpc+unix://{runtime}/")
            with dis.connect(uri) as client:
                assert client.read("d", transport="shm").read_all() == table(1, 2)
        path = Path(server.catalog_uri.partition("://")[2])
    wait_until(lambda: not path.exists(), "the socket is gone")
