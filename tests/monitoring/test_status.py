"""The status of a server: it is correct, also while fifty clients read at once."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import FrozenInstanceError, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.errors import CatalogError, FormatError
from dissociated.monitoring.status import ServerStatus
from support.certificates import Certificates
from support.helpers import PATIENCE, Serve, clients_end, connections_left, location, serving, wait_until

#: Three batches, each of 1,000 integers of 8 bytes in 8,000 bytes of body.
TABLE = pa.Table.from_batches([pa.record_batch({"n": np.full(1000, number)}) for number in range(3)])
BYTES = 3 * 8000
MESSAGES = 1 + 3


def read(server: dis.Server, name: str = "data", scheme: str = "tcp") -> pa.Table:
    uri = location(server, name, scheme)
    return dis.open_stream(uri, server.ticket(name), timeout=PATIENCE).read_all()


def test_a_server_that_has_done_nothing(serve: Serve) -> None:
    server = serve("tcp:")
    server.publish("data", TABLE)
    server.publish("live", TABLE.to_reader)
    now = server.status()
    assert [(one.name, one.rows, one.size, one.streams) for one in now.datasets] == [
        ("data", 3000, TABLE.nbytes, 0),
        ("live", None, None, 0),
    ]
    assert [(one.uri.partition(":")[0], one.open, one.accepted, one.refused) for one in now.listeners] == [
        ("tcp", 0, 0, 0)
    ]
    assert (now.consumers, now.leases, now.catalog) == ((), 0, None)
    assert not any(vars(now.totals).values())
    assert 0 < now.seconds < PATIENCE
    with pytest.raises(FrozenInstanceError):
        now.leases = 1  # type: ignore[misc]


@pytest.mark.parametrize("scheme", ["tcp", "tls", "shm", "inproc"])
@pytest.mark.parametrize("source", [lambda: TABLE, lambda: TABLE.to_reader], ids=["static", "live"])
def test_what_was_sent_is_counted(serve: Serve, trusted: Certificates, scheme: str, source: Callable[[], Any]) -> None:
    server = serve(f"{scheme}:", **trusted.options)
    server.publish("data", source())
    for _ in range(2):
        assert read(server, scheme=scheme) == TABLE
    assert connections_left(server) == 0
    now = server.status()
    (of_data,) = now.datasets
    assert (of_data.streams, of_data.messages, of_data.bytes) == (2, 2 * MESSAGES, 2 * BYTES)
    assert (now.totals.streams, now.totals.messages, now.totals.bytes) == (2, 2 * MESSAGES, 2 * BYTES)
    assert (now.totals.done, now.listeners[0].accepted) == (2, 2)
    assert (of_data.consumers, of_data.leases, now.leases) == (0, 0, 0)


def test_a_notebook_shows_datasets_and_consumers(serve: Serve) -> None:
    server = serve("shm:")
    server.publish("<data>", TABLE)
    uri, ticket = server.locations("<data>")[0], server.ticket("<data>")
    with dis.open_stream(uri, ticket) as reader:
        reader.read_next_batch()
        wait_until(lambda: server.status().totals.bytes == BYTES, "the batches are sent")
        status: Any = server.status()
        shown = status._repr_html_()
    assert "&lt;data&gt;" in shown
    assert "<data>" not in shown
    assert "3,000" in shown
    assert status.consumers[0].peer in shown
    idle: Any = serve("shm:").status()
    assert "<table>" not in idle._repr_html_()


def test_bodies_are_counted_where_they_are_sent(serve: Serve) -> None:
    metadata, bodies = serve("tcp:"), serve("tcp:")
    for server in (metadata, bodies):
        server.publish("data", TABLE, ticket=b"one")
    uris = [metadata.locations("data", streams="metadata")[0], bodies.locations("data", streams="bodies")[0]]
    assert dis.open_stream(uris, b"one").read_all() == TABLE
    assert [connections_left(server) for server in (metadata, bodies)] == [0, 0]
    assert [server.status().totals.bytes for server in (metadata, bodies)] == [0, BYTES]


def test_a_consumer_is_seen_with_what_it_holds(serve: Serve) -> None:
    server = serve("shm:")
    server.publish("data", TABLE)
    kept = read(server, scheme="shm")
    wait_until(lambda: server.status().consumers[0].state == "holding", "the server knows that it has sent all")
    (consumer,) = server.status().consumers
    assert (consumer.transport, consumer.dataset, consumer.messages, consumer.bytes) == ("shm", "data", 4, BYTES)
    assert consumer.leases == 3
    assert consumer.peer.startswith("shm client ")
    (of_data,) = server.status().datasets
    assert (of_data.consumers, of_data.leases, server.status().leases) == (1, 3, 3)
    assert kept == TABLE
    del kept
    clients_end()
    assert connections_left(server) == 0
    now = server.status()
    assert (now.consumers, now.leases, now.totals.done) == ((), 0, 1)


def test_a_consumer_that_has_not_asked_yet_is_seen(serve: Serve) -> None:
    from dissociated.transport.registry import transport
    from dissociated.uri import Uri

    server = serve("inproc:")
    server.publish("data", TABLE)
    with transport("inproc").connect(Uri.parse(server.locations("data")[0]), PATIENCE):
        while not (consumers := server.status().consumers):  # the server's thread may start late
            pass
    assert [(one.state, one.dataset, one.messages) for one in consumers] == [("pending", None, 0)]


def test_how_connections_end_is_counted(serve: Serve) -> None:
    server = serve("tcp:", max_connections=1)

    def failing() -> Any:
        schema = pa.schema([("n", pa.int64())])

        def batches() -> Any:
            yield pa.record_batch({"n": [1]}, schema)
            raise OSError("the disk")

        return pa.RecordBatchReader.from_batches(schema, batches())

    server.publish("data", TABLE)
    server.publish("failing", failing)
    server.publish("large", pa.table({"b": [bytes(1 << 20)] * 64}))
    read(server)
    connections_left(server)
    with pytest.raises(dis.errors.RemoteError, match="no dataset has this ticket"):
        dis.open_stream(server.locations("data")[0], b"wrong")
    connections_left(server)
    with pytest.raises(dis.errors.RemoteError, match="its server says more"):
        read(server, "failing")
    connections_left(server)
    reader = dis.open_stream(server.locations("large")[0], server.ticket("large"))
    with pytest.raises(dis.errors.RemoteError, match="accepts no more connections"):
        read(server)
    del reader
    connections_left(server)
    now = server.status()
    assert (now.totals.done, now.totals.refused, now.totals.failed, now.totals.gone) == (1, 2, 1, 1)
    (listener,) = now.listeners
    assert (listener.accepted, listener.refused, listener.open) == (5, 1, 0)
    assert now.totals.streams == 3  # the stream with the wrong ticket does not count


def test_a_dataset_that_is_replaced_begins_anew_and_totals_go_on(serve: Serve) -> None:
    server = serve("tcp:")
    for _ in range(2):
        server.publish("data", TABLE)
        read(server)
        connections_left(server)
    assert [one.bytes for one in server.status().datasets] == [BYTES]
    server.drop("data")
    now = server.status()
    assert (now.datasets, now.totals.streams, now.totals.bytes) == ((), 2, 2 * BYTES)


def test_fifty_clients_at_once_are_counted_right(serve: Serve) -> None:
    """The counts are also correct during the reads: no number decreases or exceeds its maximum."""
    server = serve("shm:", "tcp:", "inproc:")
    server.publish("static", TABLE)
    server.publish("live", TABLE.to_reader)
    rounds, clients = 2, 50
    whole = rounds * clients
    seen: list[ServerStatus] = []
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.005):  # many times during the reads
            seen.append(server.status())

    def client(number: int) -> None:
        for turn in range(rounds):
            name, scheme = ("static", "live")[(number + turn) % 2], ("shm", "tcp", "inproc")[(number // 2 + turn) % 3]
            assert read(server, name, scheme).num_rows == 3000

    with ThreadPoolExecutor(clients + 1) as pool:
        looking = pool.submit(look)
        for one in [pool.submit(client, number) for number in range(clients)]:
            one.result(PATIENCE * 3)
        over.set()
        looking.result(PATIENCE)
    clients_end()
    assert connections_left(server) == 0
    now = server.status()
    assert (now.totals.streams, now.totals.messages, now.totals.bytes) == (whole, whole * MESSAGES, whole * BYTES)
    assert (now.totals.done, now.totals.gone, now.totals.failed) == (whole, 0, 0)
    assert sum(one.accepted for one in now.listeners) == whole
    assert sum(one.streams for one in now.datasets) == whole
    assert sum(one.bytes for one in now.datasets) == whole * BYTES
    assert (now.leases, now.consumers) == (0, ())
    for earlier, later in zip(seen, [*seen[1:], now], strict=True):
        for field in ("streams", "messages", "bytes", "done"):
            assert getattr(earlier.totals, field) <= getattr(later.totals, field)
        assert len(earlier.consumers) <= clients + 50  # the client of some may have finished before the server


def test_the_catalog_answers_with_the_same() -> None:
    with dis.Server(["tcp:"]) as server, dis.connect(server.catalog_uri) as client:
        server.publish("data", TABLE)
        assert client.read("data", transport="tcp").read_all() == TABLE
        assert client.read("data", transport="grpc").read_all() == TABLE
        while serving(server):
            connections_left(server)
        told, here = client.status(), server.status()
        assert replace(told, seconds=0.0) == replace(here, seconds=0.0)
        assert told.catalog == server.catalog_uri
        assert (told.totals.streams, told.totals.flight) == (1, 1)


def test_a_status_is_the_same_after_json(serve: Serve) -> None:
    server = serve("tcp:", "shm:")
    server.publish("data", TABLE)
    kept = read(server, scheme="shm")
    now = server.status()
    assert ServerStatus.parse(json.loads(json.dumps(now.plain()))) == now
    newer = {**now.plain(), "of a later version": 1}
    assert ServerStatus.parse(newer) == now
    assert kept == TABLE


@pytest.mark.parametrize("said", [None, [], {}, {"totals": 1}, {"datasets": [1]}])
def test_an_invalid_status_is_refused(said: Any) -> None:
    with pytest.raises(FormatError, match="not the status of a server"):
        ServerStatus.parse(said)


def test_values_of_other_types_are_refused(serve: Serve) -> None:
    """Such values would fail when they are displayed."""
    plain = serve("tcp:").status().plain()
    for part, name, value in (
        (plain, "seconds", "long"),
        (plain, "pid", None),
        (plain["totals"], "bytes", [1]),
        (plain["listeners"][0], "uri", 5),
        (plain["listeners"][0], "open", {}),
    ):
        before, part[name] = part[name], value
        with pytest.raises(FormatError, match=f"{name} is"):
            ServerStatus.parse(plain)
        part[name] = before
    ServerStatus.parse(plain)


def test_a_catalog_that_answers_with_nonsense() -> None:
    with dis.Server([]) as server, dis.connect(server.catalog_uri) as client:
        activity = server.activity
        now = activity.status(None, [], {})
        activity.status = lambda *_: replace(now, totals=None)  # type: ignore[method-assign,arg-type]  # nonsense
        with pytest.raises(CatalogError, match="sent an unreadable status"):
            client.status()
