"""A Table in shared memory: copied in segments, which are read while the others are still being made."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.client import stream
from dissociated.datasets import mapped, static
from dissociated.datasets.mapped import SharedCopy
from helpers import PATIENCE, Serve, clients_end, connections_left, descriptors, leaving_nothing, wait_until

_ROWS = 100


def batch(number: int, rows: int = _ROWS) -> pa.RecordBatch:
    values = range(number * _ROWS, number * _ROWS + rows)
    return pa.record_batch(
        {"n": pa.array(values, pa.int64()), "s": pa.array([f"row {n}" for n in values], pa.string())}
    )


#: One batch in the middle has no rows, and one at the end has few.
TABLE = pa.Table.from_batches([*map(batch, range(20)), batch(20, 0), *map(batch, range(20, 40)), batch(40, 3)])


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let segments have about three batches, and every Table be large enough to be copied ahead."""
    for size in ("_FIRST_BYTES", "_SEGMENT_BYTES"):
        monkeypatch.setattr(mapped, size, 6000)
    monkeypatch.setattr(static, "_MIN_AHEAD", 0)


def segments(name: str) -> int:
    """How many memfds of that name this process has open."""
    return len({os.fstat(number).st_ino for number, what in descriptors().items() if f"dissociated:{name}" in what})


def open_shm(server: dis.Server, **options: object) -> pa.RecordBatchReader:
    return dis.open_stream(server.locations("t")[0], server.ticket("t"), **options)  # type: ignore[arg-type]


def read_until(reader: pa.RecordBatchReader, why: str) -> list[pa.RecordBatch]:
    """What it gives before the server gives up."""
    read: list[pa.RecordBatch] = []
    with pytest.raises(dis.errors.RemoteError, match=why):
        read.extend(reader)  # which has them one by one
    return read


@contextmanager
def little_space() -> Iterator[None]:
    """No memfd of this process may have more than 64 KiB."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_copy_is_made_segment_by_segment_by_whoever_needs_it() -> None:
    copy = SharedCopy("lazily", TABLE, TABLE.nbytes, None)
    first = next(iter(copy))
    assert segments("lazily") == 1
    with ThreadPoolExecutor(8) as pool:
        several = [*pool.map(lambda _: [*copy], range(8))]
    assert all(one == several[0] for one in several)
    assert several[0][0] is first
    assert segments("lazily") == len(several[0]) > 10


@pytest.mark.parametrize("ahead", [True, False])
def test_what_is_read_while_it_is_copied_is_the_table(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    monkeypatch.setattr(static, "_MIN_AHEAD", 0 if ahead else 1 << 40)
    monkeypatch.delattr(stream, "join_deliveries")  # it is all read in place
    server = serve("shm:", "tcp://127.0.0.1:0")
    for _ in range(5):
        server.publish("t", TABLE)
        reader = open_shm(server)
        assert [reader.read_next_batch() for _ in range(2)] == TABLE.to_batches()[:2]
        rest = reader.read_all()
        assert rest == TABLE.slice(2 * _ROWS)
        assert [len(one) for one in rest.to_batches()] == [len(one) for one in TABLE.to_batches()[2:]]
        assert reader.stats.num_messages == 43
        assert reader.stats.num_record_batches == 42
        with pytest.raises(dis.errors.StoreError, match="read to its end"):
            reader.read_all()


READS: dict[str, tuple[dict[str, object], Callable[[], pa.Table]]] = {
    "columns": ({"columns": ["s"]}, lambda: TABLE.select(["s"])),
    "batches": ({"batches": (17, 31)}, lambda: pa.Table.from_batches(TABLE.to_batches()[17:31])),
    "no batches": ({"batches": (3, 3)}, lambda: TABLE.slice(0, 0)),
    "both": ({"columns": ["n"], "batches": (39, 50)}, lambda: TABLE.select(["n"]).slice(38 * _ROWS)),
    "filter": ({"filter": ["n", ">", 3900]}, lambda: TABLE.slice(3901)),
    "positions": ({"options": dis.ReadOptions(included_fields=[1])}, lambda: TABLE.select(["s"])),
}


def test_parts_of_what_is_being_copied(serve: Serve) -> None:
    server = serve("shm:", "tcp://127.0.0.1:0")
    for options, expected in READS.values():
        server.publish("t", TABLE)
        for uri in server.locations("t"):
            assert dis.open_stream(uri, server.ticket("t"), **options).read_all() == expected()  # type: ignore[arg-type]


def test_bodies_by_address_and_metadata_of_another_connection_count_alike(serve: Serve) -> None:
    server = serve("shm:", "tcp://127.0.0.1:0")
    words = pa.array(["a", "b", None, "c"] * (_ROWS // 4)).dictionary_encode()
    encoded = pa.Table.from_batches([pa.record_batch({"n": batch(n)["n"], "d": words}) for n in range(20)])
    for table in (TABLE, encoded):
        server.publish("t", table)
        (_, metadata), (bodies, _) = (server.locations("t", streams=one) for one in ("metadata", "bodies"))
        assert dis.open_stream([metadata, bodies], server.ticket("t")).read_all() == table
        assert open_shm(server).read_all() == table


def test_an_error_within_the_copy_reaches_each_reader_until_it_passes(serve: Serve) -> None:
    server = serve("shm:")
    large = pa.Table.from_batches([*TABLE.to_batches()[:30], batch(30, 5000), *map(batch, range(80, 90))])
    why = "no space left for shared memory"
    with little_space():
        server.publish("t", large)
        for _ in range(3):
            reader = open_shm(server)
            read = read_until(reader, why)
            assert 20 < len(read) <= 30
            assert read == large.to_batches()[: len(read)]
            for again in (reader.read_all, reader.read_next_batch, reader.read_all):  # what failed has not ended
                with pytest.raises(dis.errors.RemoteError, match=why):
                    again()
            with pytest.raises(dis.errors.RemoteError, match=why):
                open_shm(server).read_all()
    assert open_shm(server).read_all() == large
    with little_space(), pytest.raises(dis.errors.StoreError, match=why):
        server.publish("t", large.slice(1), wait=True)
    assert open_shm(server).read_all() == large  # which that did not replace


def test_to_wait_is_to_publish_what_is_copied(serve: Serve) -> None:
    server = serve("shm:")
    server.publish("waited for", TABLE, wait=True)
    assert segments("waited for") > 10
    server.publish("t", TABLE.to_reader(), wait=True)  # nothing of which is copied
    assert open_shm(server).read_all() == TABLE


def test_what_is_dropped_while_it_is_read_is_read_to_its_end(serve: Serve) -> None:
    server = serve("shm:")
    with leaving_nothing():
        server.publish("t", TABLE)
        readers = [open_shm(server) for _ in range(3)]
        begun = [reader.read_next_batch() for reader in readers]
        server.drop("t")
        assert [reader.read_all() for reader in readers] == [TABLE.slice(_ROWS)] * 3
        assert connections_left(server, patience=0) == 3  # whose arrays are still there
        del begun, readers
        clients_end()
        wait_until(lambda: not segments("t"), "everything of it to be given back", PATIENCE)


def test_a_reader_that_is_dropped_gives_everything_back(serve: Serve) -> None:
    server = serve("shm:")
    server.publish("t", TABLE, wait=True)
    reader = open_shm(server)
    reader.read_next_batch()
    del reader
    clients_end()
    assert connections_left(server) == 0


def test_a_server_that_closes_ends_its_copying(monkeypatch: pytest.MonkeyPatch) -> None:
    with leaving_nothing(), dis.Server(["shm:"], catalog=None) as server:
        for _ in range(10):
            server.publish("t", TABLE)
