"""Catalogs that are missing, are no catalogs, do not answer, or have misbehaving clients."""

from __future__ import annotations

import socket
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import pytest

import dissociated as dis
from dissociated.errors import CatalogError, DatasetNotFound, DeadlineExceeded, DissociatedError
from support.helpers import wait_until

from .conftest import Spawn
from .peer import PATIENCE

TABLE = pa.table({"n": pa.array(np.arange(1 << 20))})


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    """Open the descriptors that gRPC keeps, so that they do not count as leaks."""
    with dis.Server([]) as server, dis.connect(server.catalog_uri) as client:
        client.list()


@pytest.fixture
def server() -> Iterator[dis.Server]:
    with dis.Server(["shm:", "tcp://127.0.0.1:0"]) as server:
        server.publish("numbers", TABLE)
        yield server


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    with (
        dis.connect(f"grpc://127.0.0.1:{port}", timeout=2) as client,
        pytest.raises(CatalogError, match=f"no catalog answers at grpc://127.0.0.1:{port}: is it running"),
    ):
        client.list()


@pytest.mark.parametrize(
    "uri", ["nonsense", "", "http://127.0.0.1:1", "tcp://127.0.0.1:1", "grpc://", "grpc://h:99999"]
)
def test_not_a_place(uri: str) -> None:
    with pytest.raises(DissociatedError), dis.connect(uri, timeout=1) as client:
        client.list()


def test_silence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        uri = f"grpc://127.0.0.1:{sock.getsockname()[1]}"
        with (
            dis.connect(uri, timeout=0.3) as client,
            pytest.raises(DeadlineExceeded, match=r"did not answer for 0.3 s"),
        ):
            client.describe("numbers")


def test_garbage() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:

        def answer() -> None:
            while True:
                try:
                    accepted = sock.accept()[0]
                except OSError:
                    return
                with accepted:
                    accepted.sendall(b"220 mail.example.org ESMTP\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        uri = f"grpc://127.0.0.1:{sock.getsockname()[1]}"
        with dis.connect(uri, timeout=1) as client, pytest.raises((CatalogError, DeadlineExceeded), match="catalog"):
            client.list()
        sock.shutdown(socket.SHUT_RDWR)
        thread.join(PATIENCE)


def test_names_that_are_not_there(server: dis.Server) -> None:
    with dis.connect(server.catalog_uri) as client:
        for name in "nothing", "", "a/b", "\0", "ü", "x" * 1000:
            for call in client.describe, client.read, client.drop:
                with pytest.raises(DatasetNotFound, match="no dataset"):
                    call(name)
        with pytest.raises(CatalogError, match="cannot be reached from here by carrier-pigeon"):
            client.read("numbers", transport="carrier-pigeon")
        with pytest.raises(dis.errors.ColumnNotFound, match="no column 'x'"):
            client.read("numbers", columns=["x"])
        assert client.read("numbers").read_all().equals(TABLE)


def test_server_is_gone(server: dis.Server) -> None:
    with dis.connect(server.catalog_uri, timeout=2) as client:
        info = client.describe("numbers")
        server.close()
        with pytest.raises(CatalogError, match="no catalog answers"):
            client.read("numbers")
        for location in info.endpoints[0].locations[:2]:
            with pytest.raises(dis.errors.TransportError, match=r"check that it runs on this host|refused"):
                dis.open_stream(location, info.endpoints[0].ticket)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'{"name": 1}', b"\xff", b'{"segments": ["../../etc/passwd"]}']
)
def test_actions_with_nonsense(server: dis.Server, body: bytes) -> None:
    client = flight.FlightClient(server.catalog_uri)
    for action in "commit", "discard", "drop", "nonsense":
        if (action, body) in (("discard", b"{}"),):
            continue
        with pytest.raises((flight.FlightError, pa.ArrowException, KeyError)):
            list(client.do_action(flight.Action(action, body)))
    client.close()
    with dis.connect(server.catalog_uri) as good:
        assert good.read("numbers").read_all().equals(TABLE)


def test_flight_client_that_takes_nothing(
    server: dis.Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # An ordinary Flight client that stops reading does not keep the server from closing.
    monkeypatch.setattr("dissociated.catalog.service.STOP_TIMEOUT", 0.3)
    server.publish("large", pa.Table.from_batches(TABLE.to_batches() * 16))
    client = flight.FlightClient(server.catalog_uri)
    stream = client.do_get(flight.Ticket(server.ticket("large")))
    stream.read_chunk()
    closing = threading.Thread(target=server.close, daemon=True)
    closing.start()
    closing.join(PATIENCE)
    hangs = closing.is_alive()
    # gRPC had read ahead, and ended the stream with an error.
    if "shutdown timed out" not in caplog.text:
        with pytest.raises(pa.ArrowException):
            stream.read_all()
    stream.cancel()
    client.close()
    closing.join(PATIENCE)
    assert not hangs


STALLED = textwrap.dedent(
    """
    import sys
    import numpy as np
    import pyarrow as pa
    import dissociated as dis
    import dissociated.catalog.service as service

    service.STOP_TIMEOUT = 0.2
    server = dis.Server([])
    server.publish("large", pa.table({"n": pa.array(np.arange(1 << 22))}))
    print(server.catalog_uri, server.ticket("large").hex(), flush=True)
    sys.stdin.readline()
    server.close()
    """
)


def test_process_ends_although_a_flight_client_takes_nothing(spawn: Spawn) -> None:
    process = spawn("-c", STALLED)
    assert process.stdout is not None
    uri, ticket = process.stdout.readline().split()
    client = flight.FlightClient(uri)
    stream = client.do_get(flight.Ticket(bytes.fromhex(ticket)))
    stream.read_chunk()
    process.communicate("\n", timeout=PATIENCE)
    assert process.returncode == 0
    stream.cancel()
    client.close()


RECEIVING = textwrap.dedent(
    """
    import sys
    import dissociated.catalog.service as service
    from dissociated.node.node import Node
    from dissociated.store.store import Store

    service.STOP_TIMEOUT = 0.2
    node = Node(Store(sys.argv[1]), ["shm:"])
    print(node.uri, flush=True)
    sys.stdin.readline()
    node.close()
    """
)


def test_process_ends_although_a_flight_client_has_a_put_in_progress(spawn: Spawn, tmp_path: Path) -> None:
    process = spawn("-c", RECEIVING, tmp_path / "store")
    assert process.stdout is not None
    client = flight.FlightClient(process.stdout.readline().strip())
    writer, _ = client.do_put(flight.FlightDescriptor.for_command(b'{"name": "d"}'), TABLE.schema)
    writer.write_table(TABLE)
    wait_until(lambda: any((tmp_path / "store" / "staging").iterdir()), "the node receives the rows")
    process.communicate("\n", timeout=PATIENCE)
    assert process.returncode == 0
    with pytest.raises(pa.ArrowException):
        writer.close()
    client.close()


LARGE = textwrap.dedent(
    """
    import sys
    import numpy as np
    import pyarrow as pa
    import dissociated as dis

    with dis.Server([]) as server:
        batch = pa.record_batch({"n": pa.array(np.arange(1 << 20))})
        server.publish("large", pa.Table.from_batches([batch] * 64))
        print(server.catalog_uri, flush=True)
        sys.stdin.readline()
    """
)


def test_a_server_that_dies_while_flight_carries_a_stream(spawn: Spawn) -> None:
    process = spawn("-c", LARGE)
    assert process.stdout is not None
    with dis.connect(process.stdout.readline().strip()) as client:
        reader = client.read("large", transport="grpc")
        reader.read_next_batch()
        process.kill()
        process.wait(PATIENCE)
        with pytest.raises(CatalogError, match=r"the catalog at .* refused|no catalog answers"):
            reader.read_all()
