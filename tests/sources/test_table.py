"""A published Table, and its copy in shared memory, which clients read while it is still being written."""

from __future__ import annotations

import ctypes
import os
import resource
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.client import stream
from dissociated.datasets import table
from dissociated.memory.shared import Backing, write_parts
from dissociated.server import encoding
from dissociated.store import copying
from support.helpers import PATIENCE, Serve, clients_end, connections_left, descriptors, leaving_nothing, wait_until

_ROWS = 100


def batch(number: int, rows: int = _ROWS) -> pa.RecordBatch:
    values = range(number * _ROWS, number * _ROWS + rows)
    return pa.record_batch(
        {"n": pa.array(values, pa.int64()), "s": pa.array([f"row {n}" for n in values], pa.string())}
    )


#: A batch in the middle has no rows, and one at the end has few.
TABLE = pa.Table.from_batches([*map(batch, range(20)), batch(20, 0), *map(batch, range(20, 40)), batch(40, 3)])


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let about three batches be copied at once, and copy every Table ahead, however small."""
    for module in (copying, encoding, table):
        monkeypatch.setattr(module, "STEP", 6000)
    monkeypatch.setattr(table, "MIN_EARLY_COPY", 0)


@pytest.fixture
def on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing be copied before a client requests it."""
    monkeypatch.setattr(table, "MIN_EARLY_COPY", 1 << 40)


def memfds(name: str) -> int:
    """Return the number of memfds of that name that this process has open."""
    return len({os.fstat(number).st_ino for number, what in descriptors().items() if f"dissociated:{name}" in what})


def open_shm(server: dis.Server, **options: Any) -> pa.RecordBatchReader:
    return dis.open_stream(server.locations("t")[0], server.ticket("t"), **options)


def read_until(reader: pa.RecordBatchReader, why: str) -> list[pa.RecordBatch]:
    """Return the batches that a reader yields before the server gives up."""
    read: list[pa.RecordBatch] = []
    with pytest.raises(dis.errors.RemoteError, match=why):
        read.extend(reader)  # keeps the batches before the error
    return read


@contextmanager
def little_space() -> Iterator[None]:
    """Limit each memfd of this process to 64 KiB."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@contextmanager
def pinned(memory: pa.Buffer) -> Iterator[None]:
    """Make the kernel hold the first page of `memory`, like a device that reads it, or a socket that sends it."""
    piece = (ctypes.c_void_p * 2)(memory.address, 1)
    ends = os.pipe()
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.vmsplice(ends[1], ctypes.byref(piece), ctypes.c_size_t(1), 0) == 1
        yield
    finally:
        for end in ends:
            os.close(end)


def copy_of(server: dis.Server, name: str = "t") -> Any:
    (mapped,) = server.dataset(name).mapped()  # type: ignore[attr-defined]
    return mapped.segment


def is_sealed(segment: Any) -> bool:
    return bool(segment.backing is Backing.SEALED)


@pytest.mark.usefixtures("on_demand")
def test_a_copy_is_written_by_whoever_needs_it(serve: Serve) -> None:
    server = serve("shm:")
    server.publish("t", TABLE)
    copy = copy_of(server)
    end = copy.region.base + copy.region.size
    copy.wait(copy.region.base + 1)
    assert not is_sealed(copy)
    written = bytes(copy.region.memory)
    copy.wait(copy.region.base + 5000)
    assert bytes(copy.region.memory) == written  # already written
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: copy.wait(end), range(8)))
    assert is_sealed(copy)
    assert pa.ipc.open_stream(copy.region.memory).read_all() == TABLE
    assert written.rstrip(b"\0") == bytes(copy.region.memory)[: len(written.rstrip(b"\0"))]
    assert memfds("t") == 1


def check_read(reader: pa.RecordBatchReader) -> None:
    assert [reader.read_next_batch() for _ in range(2)] == TABLE.to_batches()[:2]
    rest = reader.read_all()
    assert rest == TABLE.slice(2 * _ROWS)
    assert [len(one) for one in rest.to_batches()] == [len(one) for one in TABLE.to_batches()[2:]]
    assert (reader.stats.num_messages, reader.stats.num_record_batches) == (43, 42)


@pytest.mark.parametrize("ahead", [0, 1 << 40])
def test_what_is_read_while_it_is_copied_is_the_table(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    monkeypatch.setattr(table, "MIN_EARLY_COPY", ahead)
    server = serve("shm:", "tcp://127.0.0.1:0")
    for _ in range(5):
        server.publish("t", TABLE)
        check_read(open_shm(server))
    monkeypatch.delattr(stream, "join_deliveries")  # after the copy is complete, it is read in place
    check_read(open_shm(server))


@pytest.mark.usefixtures("on_demand")
def test_what_is_there_is_read_before_the_rest_is(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, gate = threading.Event(), threading.Event()

    def write_late(*arguments: Any) -> None:
        begun.set()
        assert gate.wait(PATIENCE)
        write_parts(*arguments)

    server = serve("shm:")
    server.publish("t", TABLE)
    copy = copy_of(server)
    copy.wait(copy.region.base + 20_000)
    monkeypatch.setattr(copying, "write_parts", write_late)
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(copy.advance)
        try:
            assert begun.wait(PATIENCE)
            reader = open_shm(server)
            assert [reader.read_next_batch() for _ in range(3)] == TABLE.to_batches()[:3]
            assert not is_sealed(copy)
        finally:
            gate.set()
        writing.result()
    assert reader.read_all() == TABLE.slice(3 * _ROWS)
    assert is_sealed(copy)


READS: dict[str, tuple[dict[str, Any], Callable[[], pa.Table]]] = {
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
            assert dis.open_stream(uri, server.ticket("t"), **options).read_all() == expected()


def test_bodies_by_address_and_metadata_of_another_connection_count_alike(serve: Serve) -> None:
    server = serve("shm:", "tcp://127.0.0.1:0")
    words = pa.array(["a", "b", None, "c"] * (_ROWS // 4)).dictionary_encode()
    encoded = pa.Table.from_batches([pa.record_batch({"n": batch(n)["n"], "d": words}) for n in range(20)])
    for content in (TABLE, encoded):
        server.publish("t", content)
        (_, metadata), (bodies, _) = (server.locations("t", streams=one) for one in ("metadata", "bodies"))
        assert dis.open_stream([metadata, bodies], server.ticket("t")).read_all() == content
        assert open_shm(server).read_all() == content


@pytest.mark.usefixtures("on_demand")
def test_an_error_within_the_copy_reaches_each_reader_until_it_passes(serve: Serve) -> None:
    server = serve("shm:")
    large = pa.Table.from_batches([*TABLE.to_batches(), *map(batch, range(80, 90))])
    why = "no space is left for shared memory"
    server.publish("t", large)
    copy_of(server)
    with little_space():
        for _ in range(3):
            reader = open_shm(server)
            read = read_until(reader, why)
            assert 10 < len(read) < 40
            assert read == large.to_batches()[: len(read)]
            for again in (reader.read_all, reader.read_next_batch, reader.read_all):  # a failed stream has not ended
                with pytest.raises(dis.errors.RemoteError, match=why):
                    again()
    assert open_shm(server).read_all() == large
    with little_space(), pytest.raises(dis.errors.StoreError, match=why):
        server.publish("t", large.slice(1), wait=True)
    assert open_shm(server).read_all() == large  # the first copy was not replaced


def test_a_copy_ahead_that_fails_is_made_when_it_is_asked_for(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    server = serve("shm:")
    with little_space():
        server.publish("t", pa.concat_tables([TABLE, TABLE]))
        wait_until(lambda: "no space is left" in caplog.text, "the copy to fail")
    assert open_shm(server).read_all() == pa.concat_tables([TABLE, TABLE])


@pytest.mark.usefixtures("on_demand")
def test_pinned_pages_of_a_copy_keep_no_client_from_reading(serve: Serve) -> None:
    """Such memory cannot be sealed."""
    server = serve("shm:")
    server.publish("t", TABLE)
    copy = copy_of(server)
    copy.wait(copy.region.base + 1)
    with pinned(copy.region.memory):
        for _ in range(2):
            assert open_shm(server).read_all() == TABLE
        assert not copy.missing
        assert not is_sealed(copy)
    assert is_sealed(copy)
    assert open_shm(server).read_all() == TABLE


def test_tables_that_are_copied_ahead_leave_memory_free(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is room for each when it is published, but not for all."""
    server = serve("shm:")
    free = 5 * TABLE.nbytes
    published = threading.Event()

    def available() -> int:
        if not threading.current_thread().name.startswith("copy"):
            return free
        assert published.wait(PATIENCE)
        files = [os.stat(f"/proc/self/fd/{number}") for number, what in descriptors().items() if ":t" in what]
        return free - sum({file.st_ino: file.st_blocks * 512 for file in files}.values())

    monkeypatch.setattr(table, "available_memory", available)
    for number in range(10):
        server.publish(f"t{number}", TABLE)
    published.set()
    for number in range(10):
        server.dataset(f"t{number}").wait_closed(PATIENCE)
    assert 0 < sum(not copy_of(server, name).missing for name in server.names()) < 5


def test_to_wait_is_to_publish_what_is_copied(serve: Serve) -> None:
    server = serve("shm:")
    server.publish("waited for", TABLE, wait=True)
    (mapped,) = server.dataset("waited for").mapped()  # type: ignore[attr-defined]
    assert is_sealed(mapped.segment)
    server.publish("t", TABLE.to_reader(), wait=True)  # a reader, which is not copied
    assert open_shm(server).read_all() == TABLE


def test_what_is_dropped_while_it_is_read_is_read_to_its_end(serve: Serve) -> None:
    server = serve("shm:")
    with leaving_nothing():
        server.publish("t", TABLE)
        readers = [open_shm(server) for _ in range(3)]
        begun = [reader.read_next_batch() for reader in readers]
        server.drop("t")
        assert [reader.read_all() for reader in readers] == [TABLE.slice(_ROWS)] * 3
        assert connections_left(server, patience=0) == 3  # their arrays still exist
        del begun, readers
        clients_end()
        wait_until(lambda: not memfds("t"), "everything of it to be given back", PATIENCE)


def test_a_reader_that_is_dropped_gives_everything_back(serve: Serve) -> None:
    server = serve("shm:")
    for _ in range(5):
        server.publish("t", TABLE)
        reader = open_shm(server)
        reader.read_next_batch()
        del reader
    clients_end()
    assert connections_left(server) == 0


def test_a_server_that_closes_ends_its_copying() -> None:
    with leaving_nothing(), dis.Server(["shm:"], catalog=None) as server:
        for _ in range(10):
            server.publish("t", TABLE)
