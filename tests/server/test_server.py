"""A server: its datasets, their locations, and its end."""

from __future__ import annotations

import fcntl
import gc
import os
import signal
import socket
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.catalog.database import Database
from dissociated.catalog.upstream import UpstreamCatalog
from dissociated.control.commit import StagedSegment
from dissociated.errors import CatalogError, FormatError, OptionError
from dissociated.node.node import Node
from dissociated.store.store import Store
from dissociated.uri import Uri
from support.helpers import (
    PATIENCE,
    Serve,
    clients_end,
    connections_left,
    descriptors,
    leaving_nothing,
    serving,
    wait_until,
)
from support.nodes import SCHEMA, table

TABLE = pa.table({"n": [1, 2, 3]})


def read(server: dis.Server, name: str = "data") -> pa.Table:
    return dis.open_stream(server.locations(name)[0], server.ticket(name)).read_all()


def test_locations(serve: Serve) -> None:
    server = serve("shm:", "tcp://127.0.0.1:0", "inproc://here")
    server.publish("data", TABLE)
    shm, tcp, inproc = map(Uri.parse, server.locations("data"))
    assert (shm.scheme, tcp.scheme, inproc.scheme) == ("shm", "tcp", "inproc")
    assert (inproc.host, tcp.host) == ("here", "127.0.0.1")
    assert tcp.port
    assert Path(shm.path).is_socket()
    assert shm.free_data is not None  # only shm frees addresses
    assert (tcp.free_data, inproc.free_data) == (None, None)


def test_locations_of_single_streams_say_so(serve: Serve) -> None:
    server = serve("tcp://127.0.0.1:0")
    server.publish("data", TABLE)
    seen = set()
    for streams in ("both", "metadata", "bodies"):
        for bodies in ("any", "packed"):
            (uri,) = map(Uri.parse, server.locations("data", streams=streams, bodies=bodies))
            assert uri.parameters.get("stream", "both") == streams
            seen.add(uri.want_data)
    assert len(seen) == 6


def test_what_is_not_published_is_not_found(serve: Serve) -> None:
    server = serve("inproc:")
    for ask in (server.locations, server.ticket, server.drop, server.dataset):
        with pytest.raises(dis.errors.DatasetNotFound, match="no dataset 'data' is published here"):
            ask("data")
    assert issubclass(dis.errors.DatasetNotFound, KeyError)


def test_options_are_one_value_which_shows_no_secret() -> None:
    options = dis.ServerOptions(["tcp:"], catalog=None, ticket_lifetime=60, secret=b"x" * 32, authorize=["a-token"])
    assert "xxx" not in repr(options)
    assert "a-token" not in repr(options)
    with dis.Server.of(options) as server, dis.Server.of(replace(options, listen=["shm:"])) as other:
        assert [one.partition(":")[0] for one in server.endpoints.listener_uris()] == ["tcp"]
        for one in (server, other):
            one.publish("numbers", TABLE, ticket=b"the same")
        (uri,) = other.locations("numbers")
        assert dis.open_stream(uri, server.ticket("numbers")).read_all() == TABLE  # both servers share the secret
    with pytest.raises(TypeError, match="catlog"):
        dis.Server(catlog=None)  # type: ignore[call-arg]
    with pytest.raises(OptionError, match="max_pending is 0; it must be 1 or more"):
        dis.Server(["tcp:"], catalog=None, max_pending=0)


def test_names_are_sorted(serve: Serve) -> None:
    server = serve("inproc:")
    for name in ("b", "ä", "a", "c"):
        server.publish(name, TABLE)
    server.drop("c")
    assert server.names() == ["a", "b", "ä"]


def test_a_chosen_ticket(serve: Serve) -> None:
    server = serve("inproc:")
    server.publish("data", TABLE, ticket=b"chosen")
    assert server.ticket("data") == b"chosen"
    server.publish("data", TABLE.slice(1), ticket=b"chosen")  # replaces the dataset itself
    assert dis.open_stream(server.locations("data")[0], b"chosen").read_all() == TABLE.slice(1)
    with pytest.raises(dis.DissociatedError, match="the ticket for 'other' is already the ticket of another dataset"):
        server.publish("other", TABLE, ticket=b"chosen")
    assert server.names() == ["data"]
    server.drop("data")
    server.publish("other", TABLE, ticket=b"chosen")
    assert read(server, "other") == TABLE


def test_a_server_without_a_catalog_says_so(serve: Serve) -> None:
    with pytest.raises(dis.DissociatedError, match="made without a catalog"):
        _ = serve("inproc:").catalog_uri


@pytest.mark.parametrize("listen", [["gopher:"], ["tcp://127.0.0.1:0", "not a uri at all"]])
def test_a_uri_that_cannot_be_used(serve: Serve, listen: list[str]) -> None:
    with pytest.raises(dis.errors.UriError):
        serve(*listen)


def test_closing_twice_does_nothing(serve: Serve) -> None:
    server = serve("shm:", "tcp://127.0.0.1:0")
    server.publish("data", TABLE)
    server.close()
    server.close()
    for use in (lambda: server.publish("data", TABLE), lambda: server.ticket("data")):
        with pytest.raises(dis.DissociatedError, match="the server is closed"):
            use()
    assert (server.status().datasets, server.status().consumers) == ((), ())


def test_closing_ends_everything_and_leaves_nothing_on_disk(tmp_path: Path) -> None:
    with leaving_nothing():
        server = dis.Server([f"shm://{tmp_path}/socket", "tcp://127.0.0.1:0"], catalog=None)
        server.publish("data", TABLE.to_reader())
        port = Uri.parse(server.locations("data")[1]).port
        reader = dis.open_stream(server.locations("data")[0], server.ticket("data"))
        silent = socket.create_connection(("127.0.0.1", port))
        server.close()
        assert list(tmp_path.iterdir()) == []
        with silent, suppress(ConnectionResetError):  # if the server had not accepted it yet
            while silent.recv(1 << 16):  # the reason, and then nothing
                pass
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        del reader


def test_what_clients_have_mapped_outlives_the_server(serve: Serve) -> None:
    server = serve("shm:")
    server.publish("data", TABLE)
    arrived = read(server)
    server.close()
    assert arrived == TABLE


def test_a_client_that_says_nothing_is_sent_away(serve: Serve) -> None:
    server = serve("tcp://127.0.0.1:0", handshake_timeout=1.0)  # a deadline for good clients, too
    server.publish("data", TABLE)
    uri = Uri.parse(server.locations("data")[0])
    with socket.create_connection((uri.host, uri.port), PATIENCE) as silent:
        content = b""
        while received := silent.recv(1 << 16):
            content += received
    assert b"silent for 1 s" in content or b"took too long" in content  # whichever deadline expires first
    assert read(server) == TABLE


def test_a_client_that_takes_nothing_is_sent_away(serve: Serve) -> None:
    server = serve("tcp://127.0.0.1:0", stall_timeout=0.05)
    server.publish("data", pa.table({"b": [bytes(1 << 20)] * 64}))
    uri = server.locations("data")[0]
    reader = dis.open_stream(uri, server.ticket("data"))
    assert connections_left(server) == 0
    with pytest.raises(dis.errors.TransportError, match="closed the connection"):
        reader.read_all()


def test_a_client_that_holds_memory_for_too_long_is_sent_away(serve: Serve) -> None:
    """Disconnect the client, which can still read the memory that it has mapped."""
    server = serve("shm:", lease_timeout=0.05)
    server.publish("data", TABLE)
    arrived = read(server)
    assert connections_left(server) == 0
    assert arrived == TABLE


def test_more_connections_than_are_allowed_are_refused_with_a_reason(serve: Serve) -> None:
    server = serve("shm:", max_connections=2)
    server.publish("data", TABLE)
    first = read(server)  # the connection stays open while `first` is used
    of_first = serving(server)
    second = read(server)
    of_second = serving(server) - of_first
    with pytest.raises(dis.errors.RemoteError, match="accepts no more connections"):
        read(server)
    assert first == TABLE
    del first
    assert connections_left(server, but=of_second) == 1
    assert read(server) == second


def test_publishing_from_many_threads(serve: Serve) -> None:
    server = serve("inproc:")

    def publish(number: int) -> list[int]:
        server.publish("shared", TABLE)
        server.publish(str(number), pa.table({"n": [number]}))
        numbers: list[int] = read(server, str(number))["n"].to_pylist()
        return numbers

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(publish, range(100))) == [[number] for number in range(100)]
    assert server.names() == sorted([*map(str, range(100)), "shared"])


def test_a_table_is_copied_into_shared_memory_once(serve: Serve) -> None:
    server = serve("shm:")
    server.publish("copied once", TABLE)

    def memfds() -> int:
        return len({os.fstat(number).st_ino for number in shared("copied once")})

    arrived = [read(server, "copied once") for _ in range(5)]
    assert arrived == [TABLE] * 5
    assert memfds() == 1
    del arrived
    server.drop("copied once")
    assert connections_left(server) == 0
    clients_end()
    assert memfds() == 0


def test_what_is_held_stays_as_it_was_published(serve: Serve) -> None:
    numbers = np.arange(1000)
    with pa.BufferOutputStream() as sink, pa.ipc.new_stream(sink, TABLE.schema) as writer:
        writer.write_table(TABLE)
    encoded = {name: bytearray(sink.getvalue()) for name in ("bytes", "view")}
    server = serve("tcp://127.0.0.1:0")
    server.publish("columns", {"n": numbers})
    server.publish("bytes", encoded["bytes"])
    server.publish("view", memoryview(encoded["view"]))
    numbers[:] = -1
    for content in encoded.values():
        content[-len(content) // 2 :] = bytes(len(content) - len(content) // 2)
    expected = {"columns": pa.table({"n": range(1000)}), "bytes": TABLE, "view": TABLE}
    for name, rows in expected.items():
        assert dis.open_stream(server.locations(name)[0], server.ticket(name)).read_all() == rows


def test_what_a_writer_writes_is_published_at_its_close(serve: Serve) -> None:
    server = serve()
    with server.writer("data", TABLE.schema) as writer:
        writer.write_table(TABLE, max_chunksize=2)
        assert server.names() == []
        writer.write(TABLE)
    assert writer.rows == 6
    assert writer.stats.num_record_batches == 3
    for uri in server.locations("data"):
        assert dis.open_stream(uri, server.ticket("data")).read_all() == pa.concat_tables([TABLE, TABLE])
    dataset: Any = server.dataset("data")
    segment = dataset.mapped()[0].segment
    assert segment.nbytes == writer.stats.total_serialized_body_size
    modes = {fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE for descriptor in shared("data")}
    assert modes == {os.O_RDONLY}  # the handle that wrote it is closed


def test_what_a_writer_writes_replaces_what_had_its_name(serve: Serve) -> None:
    server = serve("shm:")
    server.publish("data", TABLE)
    with server.writer("data", pa.schema([("s", pa.string())])) as writer:
        assert read(server) == TABLE
        writer.write(pa.table({"s": ["x"]}))
    assert read(server) == pa.table({"s": ["x"]})


def test_what_a_writer_has_written_when_it_fails_is_discarded(serve: Serve) -> None:
    server = serve("shm:")
    server.publish("data", TABLE)
    with leaving_nothing():
        with suppress(KeyError), server.writer("data", TABLE.schema) as writer:
            writer.write(TABLE)
            raise KeyError
        writer.close()
        with pytest.raises(FormatError, match="different schema"), server.writer("data", TABLE.schema) as writer:
            writer.write(pa.table({"other": [1]}))
        with pytest.raises(FormatError, match="nested 2 levels deep"):
            server.writer("data", pa.schema([("l", pa.list_(pa.int8()))]), dis.WriteOptions(max_recursion_depth=1))
    assert read(server) == TABLE


def test_a_writer_without_batches_publishes_a_schema(serve: Serve) -> None:
    server = serve("shm:")
    server.writer("data", TABLE.schema).close()
    assert read(server) == TABLE.schema.empty_table()


def test_a_writer_of_a_closed_server_cannot_publish(serve: Serve) -> None:
    server = serve("inproc:")
    writer = server.writer("data", TABLE.schema)
    writer.write(TABLE)
    server.close()
    with pytest.raises(dis.DissociatedError, match="the server is closed"):
        writer.close()
    del writer
    gc.collect()
    assert shared("data") == []


@pytest.mark.parametrize(
    "fields",
    [{"codec": "zstd"}, {"alignment": 64}, {"write_legacy_ipc_format": True}, {"emit_dictionary_deltas": True}],
)
def test_a_writer_has_options(serve: Serve, fields: dict[str, Any]) -> None:
    server = serve()
    batches = [pa.record_batch({"d": pa.array(["x", "y"][:n] * 500).dictionary_encode()}) for n in (1, 2)]
    with server.writer("data", batches[0].schema, dis.WriteOptions(**fields)) as writer:
        for batch in batches:
            writer.write(batch)
    deltas = writer.stats.num_dictionary_deltas
    assert deltas == (1 if "emit_dictionary_deltas" in fields else 0)
    assert (writer.stats.total_serialized_body_size < 2000) == ("codec" in fields)
    for uri in server.locations("data"):
        arrived = list(dis.open_stream(uri, server.ticket("data")))
        assert [batch.to_pydict() for batch in arrived] == [batch.to_pydict() for batch in batches]


def shared(name: str) -> list[int]:
    """Return the descriptors of memfds of this name."""
    return [number for number, target in descriptors().items() if target == f"/memfd:dissociated:{name} (deleted)"]


@pytest.mark.parametrize("is_made", [False, True])
def test_a_publication_that_ctrl_c_interrupts_is_made_first(monkeypatch: pytest.MonkeyPatch, is_made: bool) -> None:
    """The catalog lists what the server serves under the name, whether Ctrl-C comes before or after the transaction."""
    publish = Database.publish

    def interrupted(*arguments: Any) -> int:
        if not is_made:
            signal.raise_signal(signal.SIGINT)
        number = publish(*arguments)
        if is_made:
            signal.raise_signal(signal.SIGINT)
        return number

    with dis.Server(["tcp:"]) as server, dis.connect(server.catalog_uri) as client:
        server.publish("data", pa.table({"n": [0]}))
        monkeypatch.setattr(Database, "publish", interrupted)
        with pytest.raises(KeyboardInterrupt):
            server.publish("data", pa.table({"n": [1]}))
        assert server.names() == [info.name for info in client.list()] == ["data"]
        for table in (read(server), client.read("data", transport="tcp").read_all()):
            assert table["n"].to_pylist() == [1]


def test_a_dataset_that_expires_while_its_replacement_fails_does_not_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with dis.Server(["tcp:"]) as server, dis.connect(server.catalog_uri) as client:
        server.publish("data", TABLE, ttl=0.3)
        location, ticket = server.locations("data")[0], server.ticket("data")

        def has_gone() -> bool:
            with suppress(dis.DatasetNotFound), dis.open_stream(location, ticket):
                return False
            return True

        def failing(*arguments: Any) -> int:
            wait_until(has_gone, "its time is over")
            raise CatalogError("the disk is full")

        monkeypatch.setattr(Database, "publish", failing)
        with pytest.raises(CatalogError, match="the disk is full"):
            server.publish("data", TABLE)
        assert server.names() == [info.name for info in client.list()] == []


def test_a_server_that_listens_nowhere_is_read_over_flight() -> None:
    with dis.Server([]) as server, dis.connect(server.catalog_uri) as client:
        table = pa.table({"n": range(100_000)})  # too large to come with its description
        server.publish("data", table)
        assert client.read("data").read_all() == table


def test_a_dataset_keeps_its_name_while_a_put_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    with dis.Server(["tcp:", "shm:"]) as server, dis.connect(server.catalog_uri) as client:
        server.publish("data", TABLE)

        def failing(*arguments: Any) -> int:
            raise CatalogError("the disk is full")

        with monkeypatch.context() as patch:
            patch.setattr(Database, "publish", failing)
            with pytest.raises(CatalogError, match="the disk is full"):
                client.put("data", TABLE.slice(1))
        assert server.names() == ["data"]
        assert client.read("data").read_all() == read(server) == TABLE
        server.drop("data")
        assert server.names() == [info.name for info in client.list()] == []


@pytest.mark.parametrize("live", [None, dis.Live()], ids=["table", "live"])
def test_a_dataset_with_a_time_to_live_goes(live: dis.Live | None) -> None:
    """Remove the dataset from the catalog and from the server. A replacement in time has its own time to live."""
    with dis.Server(["tcp:"]) as server, dis.connect(server.catalog_uri) as client:
        server.publish("longer", TABLE, ttl=600)
        server.publish("stays", TABLE, ttl=0.3)
        server.publish("stays", TABLE)
        server.publish("short", TABLE if live is None else TABLE.to_reader, live=live, ttl=0.3)
        assert client.describe("longer").expires == pytest.approx(time.time() + 600, abs=60)
        wait_until(lambda: server.names() == ["longer", "stays"], "its time is over")
        assert [(one.name, one.expires is None) for one in client.list()] == [("longer", False), ("stays", True)]
        with pytest.raises(dis.DatasetNotFound):
            client.read("short")
        assert client.read("stays").read_all() == TABLE
        (expired,) = [change for _, change in server.activity.changes.latest() if change.kind == "expired"]
        assert expired.dataset == "short"


@pytest.mark.parametrize("ttl", [0, -1, float("nan"), 1e11, "soon", True])
def test_times_to_live_that_make_no_sense(ttl: Any) -> None:
    with dis.Server([]) as server, pytest.raises(OptionError, match="is not a positive number of seconds"):
        server.publish("data", TABLE, ttl=ttl)


def test_a_time_to_live_takes_a_catalog(serve: Serve) -> None:
    server = serve("inproc:")
    with pytest.raises(OptionError, match="ttl needs a catalog"):
        server.publish("data", TABLE, ttl=60)
    assert server.names() == []


def test_a_slow_commit_of_a_dataset_delays_no_publication_of_another(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_begun, may_end = threading.Event(), threading.Event()
    prepare = UpstreamCatalog.prepare

    def prepare_slowly(self: UpstreamCatalog, body: Mapping[str, Any]) -> dict[str, Any]:
        has_begun.set()
        assert may_end.wait(PATIENCE)
        return prepare(self, body)

    monkeypatch.setattr(UpstreamCatalog, "prepare", prepare_slowly)
    with (
        dis.Server(["shm:"]) as server,
        Node(Store(memory), ["shm:"], catalog=server.catalog_uri) as node,
        dis.connect(server.catalog_uri) as client,
        ThreadPoolExecutor(3) as pool,
    ):
        with node.store.writer("w", SCHEMA) as writer:
            writer.write(table(1).to_batches()[0])
        commit = pool.submit(client.commit, dis.Commit("slow", [StagedSegment("w", node.store.id)], SCHEMA))
        try:
            assert has_begun.wait(PATIENCE)
            same_name = pool.submit(server.publish, "slow", table(2))
            pool.submit(server.publish, "other", table(3)).result(PATIENCE)
            assert client.read("other").read_all() == table(3)
            server.drop("other")
            assert not same_name.done()
        finally:
            may_end.set()
        commit.result(PATIENCE)
        same_name.result(PATIENCE)
        assert client.read("slow").read_all() == table(2)


def test_publications_of_one_name_and_ticket_wait_for_one_another() -> None:
    def publish(server: dis.Server, number: int) -> None:
        for _ in range(100):
            server.publish("data", TABLE, ticket=b"ticket" if number % 2 else None)

    with dis.Server(["shm:"]) as server, ThreadPoolExecutor(4) as pool:
        for publication in [pool.submit(publish, server, number) for number in range(4)]:
            publication.result()
        server.publish("data", TABLE, ticket=b"ticket")
        assert dis.open_stream(server.locations("data")[0], b"ticket").read_all() == TABLE
