"""Peers over libfabric that are really killed or stopped, and endpoints that break the rules."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.errors import ConnectionClosed, DeadlineExceeded, RemoteProtocolError, TransportError, UriError
from dissociated.transport.native.fabric.memory import Domain
from dissociated.transport.registry import transport
from dissociated.uri import Uri
from support.helpers import case, wait_until

from .clients import CLIENT, Reading, line
from .conftest import Serve, Spawn
from .content import BATCH_HEADER, BODY, SCHEMA_HEADER
from .peer import PATIENCE
from .stages import server_stages

pytestmark = pytest.mark.needs("libfabric")


#: Ten missed heartbeats take a second.
WHERE = "fabric:?heartbeat=0.1"

SERVER = """
import sys
import numpy as np
import pyarrow as pa
import dissociated as dis
server = dis.Server([sys.argv[1]], catalog=None)
server.publish("large", pa.table({"n": pa.array(np.arange(1 << 22))}))
print(server.ticket("large").hex(), server.locations("large")[0], flush=True)
sys.stdin.readline()
"""


#: A script that runs a peer up to a stage and then waits: a server if the URI has no port, otherwise a client.
PEER = """
import json, sys
from dissociated.protocol.message import Message
from dissociated.transport.registry import transport
from dissociated.uri import Uri

uri, fabric = Uri.parse(sys.argv[1]), transport("fabric")
if uri.port:
    connection = fabric.connect(uri, 20)
else:
    listener = fabric.listen(uri)
    print(f"{listener.uri}&want_data=7&free_data=9", flush=True)
    connection = listener.accept()
for step, *rest in json.loads(sys.argv[2]):
    if step == "send":
        tag, content = rest
        connection.send([Message(tag, (bytes.fromhex(content),))], 20)
    elif step == "read":
        connection.receive(20, lambda tag, length: bytearray(length))
    elif step == "read a tagged one":
        while connection.receive(20, lambda tag, length: bytearray(length)).tag is None:
            pass
print("reached", flush=True)
sys.stdin.read()
"""


def metadata(sequence: int, header: bytes) -> list[object]:
    return ["send", None, (struct.pack("<BI", 1, sequence) + header).hex()]


SCHEMA, META, END = metadata(0, SCHEMA_HEADER), metadata(1, BATCH_HEADER), ["send", None, "0002000000"]

#: Stages at which a server ends.
SERVER_STAGES = server_stages(["read"], SCHEMA, META, ["send", 1, BODY.hex()], END)
#: Stages at which a client ends. It receives addresses if it asks for them.
CLIENT_STAGES = ["before want_data", "after want_data", "before free_data"]


def shared_memory() -> set[str]:
    """Return the shared memory files of libfabric's providers."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(("fi_", "ofi", "sm2", "xpmem"))}


@pytest.fixture(autouse=True)
def _nothing_in_shared_memory() -> Iterator[None]:
    before = shared_memory()
    yield
    assert not shared_memory() - before


@pytest.fixture(autouse=True)
def _nothing_is_registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail unless all registered memory was released and all domains were closed."""
    owed: Counter[str] = Counter()

    def counted(method: str, change: int, what: str) -> None:
        original = getattr(Domain, method)

        def call(*arguments: Any) -> Any:
            result = original(*arguments)
            owed[what] += change
            return result

        monkeypatch.setattr(Domain, method, call)

    counted("register", 1, "memory")
    counted("unregister", -1, "memory")
    counted("enter", 1, "domains")
    counted("leave", -1, "domains")
    yield
    wait_until(lambda: not +owed, f"given back is {owed}")


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("stage", SERVER_STAGES)
def test_a_server_that_ends_is_noticed(spawn: Spawn, stage: str, by: signal.Signals) -> None:
    process = spawn("-c", PEER, WHERE, json.dumps(SERVER_STAGES[stage]))
    reading = Reading(line(process), PATIENCE)
    assert line(process) == "reached"
    process.send_signal(by)
    failure = reading.failure()
    assert type(failure) in (ConnectionClosed, RemoteProtocolError), failure
    assert "closed the" in str(failure)


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("stage", CLIENT_STAGES)
def test_a_client_that_ends_is_noticed(serve: Serve, spawn: Spawn, stage: str, by: signal.Signals) -> None:
    good = serve(WHERE, allow_rma=True)
    uri = Uri.parse(good.server.locations("good")[0])
    request = ["send", uri.want_data, good.server.ticket("good").hex()]
    steps = [[], [request], [request, ["read a tagged one"]]][CLIENT_STAGES.index(stage)]
    process = spawn("-c", PEER, str(uri), json.dumps(steps))
    assert line(process) == "reached"
    assert good.server.connections == 1, "the server waits"
    process.send_signal(by)
    wait_until(good.alone, "the server has noticed")
    good.check()


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_server_that_ends_within_a_body_is_noticed(
    spawn: Spawn, monkeypatch: pytest.MonkeyPatch, by: signal.Signals
) -> None:
    from dissociated.client.bodies import Bodies

    process = spawn("-c", SERVER, WHERE)
    ticket, uri = line(process).split()
    allocate = Bodies.allocate

    def allocating(bodies: Bodies, length: int) -> object:
        process.send_signal(by)
        if by is signal.SIGKILL:
            process.wait(PATIENCE)
        return allocate(bodies, length)

    monkeypatch.setattr(Bodies, "allocate", allocating)
    with pytest.raises((ConnectionClosed, RemoteProtocolError), match="closed the"):
        dis.open_stream(uri, bytes.fromhex(ticket), timeout=PATIENCE).read_all()


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_client_that_ends_within_a_live_stream_is_noticed(serve: Serve, spawn: Spawn, by: signal.Signals) -> None:
    batch = pa.record_batch({"n": np.arange(1 << 17)})
    good = serve(WHERE)
    good.server.publish("live", lambda: pa.RecordBatchReader.from_batches(batch.schema, (batch for _ in iter(int, 1))))
    (uri,) = good.server.locations("live")
    process = spawn("-c", CLIENT, uri, good.server.ticket("live").hex(), "3")
    assert line(process) == "reached"
    good.check()
    process.send_signal(by)
    wait_until(good.alone, "the server has noticed")


@pytest.mark.parametrize("provider", ["tcp;ofi_rxm", pytest.param("tcp", marks=pytest.mark.needs("libfabric 2"))])
def test_a_client_that_does_nothing_for_long_is_not_lost(serve: Serve, provider: str) -> None:
    """Keep inactive clients connected: heartbeats pass in both directions in spite of unread data before them.

    Each dataset is larger than the 64 MB that a server has in flight.
    """
    good = serve(f"{WHERE}&provider={provider}")
    readers = {}
    for rows, batches in ((1 << 20, 9), (20_000, 450), (1_000, 9_000)):
        batch, name = pa.record_batch({"n": np.arange(rows)}), f"{batches} of {rows} rows"
        good.server.publish(name, pa.Table.from_batches([batch] * batches))
        readers[name] = dis.open_stream(good.server.locations(name)[0], good.server.ticket(name))
        assert readers[name].read_next_batch() == batch
    select.select([], [], [], 2.5)  # longer than a peer may be silent
    for name, reader in readers.items():
        batches, rows = map(int, name.removesuffix(" rows").split(" of "))
        with case(name):
            assert sum(one.num_rows for one in reader) == rows * (batches - 1)


def test_a_closed_port_is_an_error_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(TransportError, match="refused"):
        transport("fabric").connect(Uri.parse(f"fabric://127.0.0.1:{port}"), PATIENCE)


def test_a_port_where_somebody_else_listens_exceeds_the_deadline() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        pytest.raises((DeadlineExceeded, ConnectionClosed)),
    ):
        transport("fabric").connect(Uri.parse(f"fabric://127.0.0.1:{other.getsockname()[1]}"), 0.5)


@pytest.mark.parametrize(
    ("provider", "why"),
    [
        ("net", "busy"),
        ("udp;ofi_rxd", "cuts messages off"),
        ("sockets", "given it up"),
        ("shm", "/dev/shm"),
        ("", "no name"),
        ("tcp ofi", "no name"),
    ],
)
def test_providers_that_are_known_to_be_wrong_are_refused(provider: str, why: str) -> None:
    uri = Uri("fabric", parameters={"provider": provider})
    with pytest.raises(UriError, match=why):
        transport("fabric").listen(uri)


def test_an_unknown_provider_is_an_error() -> None:
    with pytest.raises(TransportError, match="No data available"):
        transport("fabric").listen(Uri("fabric", parameters={"provider": "nowhere"}))


@pytest.mark.parametrize("parameter", [{"libfabric": "9.0"}, {"protocol": "1.1"}])
def test_a_server_that_talks_otherwise_is_refused(serve: Serve, parameter: dict[str, str]) -> None:
    good = serve("fabric:")
    uri = Uri.parse(good.server.locations("good")[0]).with_parameters(**parameter)
    with pytest.raises(TransportError, match="do not work together"):
        dis.open_stream(str(uri), good.server.ticket("good"))


def test_memory_outside_of_what_the_uri_names_is_not_read(serve: Serve) -> None:
    good = serve("fabric:", allow_rma=True)
    uri = Uri.parse(good.server.locations("good")[0])
    base, size, length = uri.parameters["remote_memory"].split("-")
    less = uri.with_parameters(remote_memory=f"{int(base, 16) + (1 << 40):x}-{size}-{length}")
    with pytest.raises(RemoteProtocolError, match="is in no memory that its URI names"):
        dis.open_stream(str(less), good.server.ticket("good"), allow_rma=True).read_all()
    good.check()


def test_a_handle_that_is_not_ours_is_refused(serve: Serve) -> None:
    good = serve("fabric:")
    uri = replace(Uri.parse(good.server.locations("good")[0]), remote_handle=b"UCX")
    with pytest.raises(UriError, match="was not made by libfabric"):
        dis.open_stream(str(uri), good.server.ticket("good"), allow_rma=True)


@pytest.mark.parametrize("text", ["0", "-1", "nan", "often", "1e9"])
def test_a_heartbeat_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(UriError, match="heartbeat"):
        transport("fabric").listen(Uri("fabric", parameters={"heartbeat": text}))
