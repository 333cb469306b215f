"""Many readers, readers that stop, and datasets that change while they are read."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import count, product
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.server import connections
from support.certificates import Certificates
from support.helpers import PATIENCE, Serve, case
from support.machine import media

from .conftest import MEDIA, Route

ROWS = 10_000


@cache
def table(seed: int, batches: int = 10) -> pa.Table:
    values = np.arange(ROWS * batches) * (seed + 1)
    return pa.table({"n": values, "s": np.char.add("s", values[:ROWS].astype(str)).tolist() * batches})


@cache
def chunked(seed: int, batches: int = 10) -> pa.Table:
    return pa.Table.from_batches(table(seed, batches).to_batches(max_chunksize=ROWS))


def test_several_datasets_do_not_mix(arranged: Route) -> None:
    sent = {name: chunked(seed, 2) for seed, name in enumerate(["a", "b", "with / and ü", "a" * 300])}
    for name, one in sent.items():
        arranged.publish(one, name)
        arranged.publish(one.to_reader, name + " live")
    for name, one in sent.items():
        assert arranged.open(name).read_all() == one
        assert arranged.open(name + " live").read_all() == one


def test_many_clients_at_once(route: Route) -> None:
    """Read a dataset per client, and with many clients also one dataset by all of them, all batch by batch."""
    number = 5 if route.is_quick else 2
    everybody = threading.Barrier(number, timeout=PATIENCE)
    sent = {"shared": chunked(100), **{str(seed): chunked(seed) for seed in range(number)}}
    for name, one in sent.items():
        route.publish(one.to_reader if name == "shared" else one, name)

    def client(seed: int) -> bool:
        everybody.wait()
        names = [str(seed), "shared"] if route.is_quick else [str(seed)]
        together = zip(*map(route.open, names), strict=True)
        return list(map(pa.Table.from_batches, zip(*together, strict=True))) == [sent[name] for name in names]

    with ThreadPoolExecutor(number) as pool:
        assert list(pool.map(client, range(number))) == [True] * number


def test_a_client_that_stops_half_way_leaves_nothing(route: Route) -> None:
    """Close readers when the whole stream has arrived, and when most of it has not."""
    quick = route.is_quick and route.way.arrangement == "one"
    for live, batches in product((False, True), (2, 600)) if quick else [(True, 600)]:
        sent = pa.Table.from_batches(table(1).slice(0, 20 * batches).to_batches(max_chunksize=20))
        route.publish(sent.to_reader if live else sent)
        for stop in (0, 1) if quick and batches > 2 else (2,) if quick else (1,):
            with case((live, batches, stop)):
                reader = route.open()
                arrived = [reader.read_next_batch() for _ in range(stop)]
                assert arrived == sent.to_batches()[:stop]
                del reader, arrived
                assert route.connections == 0
        assert route.open().read_all() == sent


def test_a_client_that_stops_a_stream_without_end(route: Route) -> None:
    over = threading.Event()

    def batches() -> Iterator[pa.RecordBatch]:
        try:
            for number in count():
                yield pa.record_batch({"n": np.full(ROWS, number)})
        finally:
            over.set()

    schema = pa.schema([("n", pa.int64())])
    route.publish(lambda: pa.RecordBatchReader.from_batches(schema, batches()))
    reader = route.open()
    for number in range(20):
        assert reader.read_next_batch()["n"].unique().to_pylist() == [number]
    del reader
    assert over.wait(PATIENCE)


def test_what_was_read_outlives_the_reader_and_the_dataset(route: Route) -> None:
    sent = chunked(3, 2)
    route.publish(sent)
    arrived = route.open().read_all()
    for server in route.servers:
        server.drop("data")
    assert arrived == sent


def test_replacing_a_dataset_leaves_readers_of_the_old_one_alone(arranged: Route) -> None:
    old, new = chunked(1), chunked(2)
    for source in (old, old.to_reader):
        arranged.publish(source)
        reader, uris, ticket = arranged.open(), arranged.uris(), arranged.ticket()
        first = reader.read_next_batch()
        arranged.publish(new)
        assert pa.Table.from_batches([first, *reader]) == old
        assert arranged.open().read_all() == new
        with pytest.raises(dis.errors.RemoteError, match="no dataset has this ticket"):
            arranged.request(uris, ticket)


def test_a_dropped_dataset_cannot_be_requested_but_read_to_its_end(arranged: Route) -> None:
    sent = chunked(1)
    arranged.publish(sent)
    reader, uris, ticket = arranged.open(), arranged.uris(), arranged.ticket()
    first = reader.read_next_batch()  # so both of two servers have received the request
    for server in arranged.servers:
        server.drop("data")
        assert "data" not in server.names()
        with pytest.raises(dis.errors.DatasetNotFound, match="no dataset 'data'"):
            server.drop("data")
    assert pa.Table.from_batches([first, *reader]) == sent
    with pytest.raises(dis.errors.RemoteError, match="no dataset has this ticket"):
        arranged.request(uris, ticket)


CLOSED_READS: dict[str, dict[str, Any]] = {
    "all of it": {},
    "one column": {"columns": ["s"]},
    "some batches": {"batches": (1, 9)},
    "some rows": {"filter": ["n", ">", 100]},
    "the first rows": {"limit": 500},
}


def test_closing_a_reader_ends_its_connection(direct: Route) -> None:
    direct.publish(chunked(0))
    for name, chosen in CLOSED_READS.items() if direct.is_quick else [("the first rows", {"limit": 500})]:
        with case(name):
            with direct.open(**chosen) as reader:
                schema, rows = reader.schema, sum(batch.num_rows for batch in reader)
            assert rows
            assert direct.connections == 0
            assert reader.schema == schema


def test_closing_a_reader_leaves_the_arrays_that_were_read(direct: Route) -> None:
    direct.publish(chunked(0))
    for name, chosen in CLOSED_READS.items() if direct.is_quick else [("all of it", {})]:
        with case(name):
            whole = direct.open(**chosen).read_all()
            with direct.open(**chosen) as reader:
                kept = reader.read_next_batch()
            with pytest.raises(dis.errors.StoreError, match="closed before its end"):
                reader.read_next_batch()
            assert pa.Table.from_batches([kept]) == whole.slice(0, kept.num_rows)
            del kept, whole
            assert direct.connections == 0


@pytest.mark.parametrize("medium", media(MEDIA))
def test_a_client_that_reads_on_learns_that_the_server_closes(
    serve: Serve, trusted: Certificates, monkeypatch: pytest.MonkeyPatch, medium: str
) -> None:
    monkeypatch.setattr(connections, "TELL_TIMEOUT", PATIENCE)
    schema = pa.schema([("n", pa.int64())])
    endless = (pa.record_batch({"n": np.full(ROWS, number)}) for number in count())
    server = serve(MEDIA[medium], **trusted.options)
    server.publish("data", pa.RecordBatchReader.from_batches(schema, endless))
    reader = dis.open_stream(server.locations("data")[0], server.ticket("data"))
    kept = reader.read_next_batch()
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(server.close)
        with pytest.raises(dis.errors.RemoteError, match="the server is closing"):
            for _ in reader:
                pass
        closing.result(PATIENCE)
    assert kept["n"].to_pylist() == [0] * ROWS


@pytest.mark.parametrize("medium", media(MEDIA))
def test_a_server_that_has_closed_ends_streams_with_an_error(serve: Serve, trusted: Certificates, medium: str) -> None:
    schema = pa.schema([("n", pa.int64())])
    endless = (pa.record_batch({"n": np.full(ROWS, number)}) for number in count())
    server = serve(MEDIA[medium], **trusted.options)
    server.publish("data", pa.RecordBatchReader.from_batches(schema, endless))
    reader = dis.open_stream(server.locations("data")[0], server.ticket("data"))
    reader.read_next_batch()
    server.close()
    with pytest.raises(dis.errors.DissociatedError, match="clos"):
        for _ in reader:
            pass
