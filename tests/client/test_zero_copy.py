"""Guarantees of a reader: no copies, and memory is released as soon as it is unused, and not before.

pyarrow's documentation guarantees none of this. A release that changes it must fail here rather than make users slow.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.client import leases as client_leases
from dissociated.client import session
from dissociated.errors import TransportError
from dissociated.memory import leases as memory_leases
from dissociated.transport.framed import connection as framed
from memory.maps import origins, shared_bytes
from support.helpers import Interruption, Serve, clients_end, connections_left, no_threads, serving

MB = 1 << 20


def tiled(values: list[Any], of: pa.DataType | None = None) -> pa.Array:
    """Return 1 << 18 values, cycling through `values`."""
    some = pa.array(values * ((1 << 10) // len(values)), of)
    return pa.concat_arrays([some] * (1 << 8))


BATCHES = [
    pa.record_batch(
        {
            "n": np.arange(1, 1 + (1 << 18)) + number,
            "h": tiled([None, 1, 2, 3], pa.int32()),
            "s": tiled(["a", "", None, "many words"]),
            "v": tiled(["a", None, "", "more than twelve bytes"], pa.string_view()),
            "l": tiled([[1.5], [], None, [2.5, None]]),
            "d": tiled([f"a word of many, {n}" for n in range(1 << 10)]).dictionary_encode(),
        }
    )
    for number in range(4)
]
TABLE = pa.Table.from_batches(BATCHES)


def live(batches: list[pa.RecordBatch] = BATCHES) -> pa.RecordBatchReader:
    return pa.RecordBatchReader.from_batches(batches[0].schema, batches)


def read(server: dis.Server, name: str = "data", **options: Any) -> pa.RecordBatchReader:
    return dis.open_stream(server.locations(name)[0], server.ticket(name), **options)


@pytest.fixture
def shm(serve: Serve) -> dis.Server:
    return serve("shm:", inline_limit=0)


@pytest.mark.parametrize("columns", [None, ["d", "s"]], ids=["all", "some"])
@pytest.mark.parametrize("source", [lambda: TABLE, lambda: live], ids=["table", "callable"])
def test_arrays_lie_in_shared_memory(shm: dis.Server, source: Any, columns: list[str] | None) -> None:
    shm.publish("data", source())
    arrived = list(read(shm, columns=columns))
    assert origins(arrived) == {("r--s", "/memfd:dissociated:data (deleted)")}


def test_arrays_lie_in_the_file_that_was_published(shm: dis.Server, tmp_path: Path) -> None:
    for kind, new in (("stream", pa.ipc.new_stream), ("file", pa.ipc.new_file)):
        path = tmp_path / kind
        with new(path, TABLE.schema) as writer:
            writer.write_table(TABLE)
        shm.publish(kind, path)
        arrived = list(read(shm, kind))
        assert pa.Table.from_batches(arrived) == TABLE
        assert origins(arrived) == {("r--s", str(path))}


def test_arrays_lie_in_shared_memory_when_metadata_comes_from_elsewhere(serve: Serve) -> None:
    metadata, bodies = serve("tcp://127.0.0.1:0"), serve("shm:")
    for server in (metadata, bodies):
        server.publish("data", TABLE, ticket=b"shared")
    uris = [metadata.locations("data", streams="metadata")[0], bodies.locations("data", streams="bodies")[0]]
    arrived = list(dis.open_stream(uris, b"shared"))
    assert pa.Table.from_batches(arrived) == TABLE
    assert origins(arrived) == {("r--s", "/memfd:dissociated:data (deleted)")}


def test_small_bodies_may_come_inline_beside_shared_ones(serve: Serve) -> None:
    server = serve("shm:", inline_limit=4096)
    small, large = pa.record_batch({"n": [1, 2, 3]}), pa.record_batch({"n": np.arange(10_000)})
    for source in (pa.Table.from_batches([small, large]), lambda: live([small, large])):
        server.publish("data", source)
        arrived = list(read(server))
        assert arrived == [small, large]
        assert origins(arrived[1:]) == {("r--s", "/memfd:dissociated:data (deleted)")}
        assert not any(permissions == "r--s" for permissions, _ in origins(arrived[:1]))


@pytest.mark.parametrize("source", [lambda: TABLE, lambda: live], ids=["table", "callable"])
def test_reading_shared_memory_allocates_nothing(shm: dis.Server, source: Any) -> None:
    shm.publish("data", source())
    before = pa.total_allocated_bytes()
    kept = []
    for batch in read(shm):
        kept.append(batch)
        assert pa.total_allocated_bytes() - before < 1 << 16  # the server runs in this process and encodes headers
    assert kept == BATCHES
    assert TABLE.nbytes > 40 * MB


def test_tcp_receives_each_body_into_one_allocation(serve: Serve) -> None:
    server = serve("tcp://127.0.0.1:0")
    server.publish("data", TABLE)
    written = pa.BufferOutputStream()
    with pa.ipc.new_stream(written, TABLE.schema) as writer:
        writer.write_table(TABLE)
    messages = pa.ipc.MessageReader.open_stream(written.getvalue())
    bodies = [message.body.size for message in messages if message.type == "record batch"]
    reader, pool = read(server), pa.default_memory_pool()
    kept = [reader.read_next_batch()]  # the dictionary comes with it
    for body in bodies[1:]:
        allocations, before = pool.num_allocations(), pool.bytes_allocated()
        kept.append(reader.read_next_batch())
        assert pool.bytes_allocated() - before == -(-body // 64) * 64
        assert pool.num_allocations() - allocations == 1
    assert kept == BATCHES


def test_tcp_sends_a_table_from_where_it_lies(serve: Serve) -> None:
    server = serve("tcp://127.0.0.1:0")
    before = pa.total_allocated_bytes()
    server.publish("data", TABLE)
    for _ in read(server):
        pass
    del _
    assert connections_left(server) == 0
    assert pa.total_allocated_bytes() == before


# Leases


@pytest.mark.parametrize("inline_limit", [0, 64], ids=["in place", "batch by batch"])
def test_a_static_dataset_is_leased_until_the_last_array_is_collected(serve: Serve, inline_limit: int) -> None:
    server = serve("shm:", inline_limit=inline_limit)
    server.publish("data", pa.Table.from_batches([BATCHES[0], pa.record_batch(BATCHES[0].slice(0, 1)), BATCHES[1]]))
    reader = read(server)
    kept = reader.read_next_batch()["s"].slice(3, 1)
    assert reader.read_all().num_rows == BATCHES[0].num_rows + 1
    del reader
    server.drop("data")
    first = serving(server)
    server.publish("other", TABLE)  # Read a whole stream meanwhile, so that a wrong release would show.
    assert read(server, "other").read_all() == TABLE
    assert connections_left(server, but=first) == 1
    assert kept.to_pylist() == ["many words"]
    del kept
    assert connections_left(server) == 0


def test_memory_of_a_live_stream_is_held_while_a_slice_of_it_is(serve: Serve) -> None:
    """Read so many bodies through a small region that it is reused many times while one slice is held."""
    server = serve("shm:", live_limit=3 * MB)
    schema = pa.schema([("n", pa.int64())])
    numbers = (pa.record_batch({"n": np.full(MB // 8, number)}) for number in range(1, 60))
    server.publish("slices", pa.RecordBatchReader.from_batches(schema, numbers))
    reader = read(server, "slices")
    kept = reader.read_next_batch()["n"].slice(1000, 5)
    for number, batch in enumerate(reader, 2):
        assert batch["n"].unique().to_pylist() == [number]
    del reader, batch
    assert kept.to_pylist() == [1] * 5
    assert origins([pa.record_batch({"n": kept})]) == {("r--s", "/memfd:dissociated:slices (deleted)")}
    assert shared_bytes("slices") >= MB
    assert server.connections == 1
    del kept
    assert connections_left(server) == 0
    clients_end()
    assert shared_bytes("slices") == 0


def test_an_endless_stream_needs_no_more_than_its_limit(serve: Serve) -> None:
    """Read 800 MB through a region of 32 MB."""
    server = serve("shm:", live_limit=32 * MB)
    batch = pa.record_batch({"n": np.arange(4 * MB // 8)})
    server.publish("endless", pa.RecordBatchReader.from_batches(batch.schema, (batch for _ in range(200))))
    last_values, most = [], 0
    for arrived in read(server, "endless"):
        last_values.append(arrived["n"][-1].as_py())
        most = max(most, shared_bytes("endless"))
    assert last_values == [4 * MB // 8 - 1] * 200
    assert 4 * MB <= most <= 32 * MB


def test_a_reader_that_keeps_everything_gets_everything(serve: Serve) -> None:
    """Read bodies beyond the limit inline, into the reader's own memory."""
    server = serve("shm:", live_limit=4 * MB)
    sent = [pa.record_batch({"n": np.full(MB // 8, number)}) for number in range(20)]
    server.publish("hoarded", lambda: live(sent))
    arrived = list(read(server, "hoarded"))
    assert arrived == sent
    shared = [permissions == "r--s" for batch in arrived for permissions, _ in origins([batch])]
    assert shared == [True] * 4 + [False] * 16
    assert shared_bytes("hoarded") == 4 * MB


def test_bodies_larger_than_the_limit_are_shared_two_at_a_time(serve: Serve) -> None:
    server = serve("shm:", live_limit=MB)

    def large() -> Iterator[pa.RecordBatch]:
        for number in range(5):
            yield pa.record_batch({"n": np.full(2 * MB // 8, number)})

    schema = pa.schema([("n", pa.int64())])
    server.publish("large", pa.RecordBatchReader.from_batches(schema, large()))
    for number, batch in enumerate(read(server, "large")):
        assert batch["n"].unique().to_pylist() == [number]
        assert origins([batch]) == {("r--s", "/memfd:dissociated:large (deleted)")}
        assert shared_bytes("large") <= 4 * MB


def test_ctrl_c_while_a_stream_begins_keeps_no_connection(shm: dis.Server) -> None:
    shm.publish("data", pa.Tensor.from_numpy(np.arange(1000)))
    for at in count():
        with Interruption(session, "_account", at=at) as interruption, suppress(KeyboardInterrupt):
            next(dis.open_tensors(shm.locations("data")[0], shm.ticket("data")))
        assert connections_left(shm, patience=2) == 0, f"interrupted at {at}"
        if not interruption.came:
            break
    assert at, "it was interrupted"


def test_ctrl_c_while_a_stream_is_left_keeps_no_connection(shm: dis.Server) -> None:
    shm.publish("data", pa.Tensor.from_numpy(np.arange(1000)))
    for at in count():
        tensors = dis.open_tensors(shm.locations("data")[0], shm.ticket("data"))
        held = next(tensors)
        with Interruption(framed, "_interrupt", at=at) as interruption, suppress(KeyboardInterrupt):
            tensors.close()
        assert (held.to_numpy() == np.arange(1000)).all(), f"interrupted at {at}"
        del held, tensors
        assert connections_left(shm, patience=2) == 0, f"interrupted at {at}"
        if not interruption.came:
            break
    assert at, "it was interrupted"


def test_a_stream_fails_if_no_thread_can_free_its_memory() -> None:
    """The second read takes the connection of the first, so the server needs no thread for it."""
    with dis.Server(["shm:"]) as server, dis.connect(server.catalog_uri) as client:
        server.publish("data", TABLE)
        client.read("data", transport="shm").read_all()
        clients_end()
        with (
            no_threads(),
            pytest.raises(TransportError, match="cannot start the thread to give back: can't start new thread"),
        ):
            client.read("data", transport="shm").read_all()
        assert connections_left(server, patience=2) == 0
        assert client.read("data", transport="shm").read_all() == TABLE


@pytest.mark.parametrize("module", [client_leases, memory_leases], ids=["client", "memory"])
def test_ctrl_c_while_a_lease_begins_keeps_no_connection(shm: dis.Server, module: ModuleType) -> None:
    """Interrupt a lease at each line. Only batches that were leased before keep the connection."""
    sent = live().read_all().to_batches()[:3]
    shm.publish("live", lambda: live(sent))
    for at in count():
        reader = read(shm, "live")
        held = reader.read_next_batch()
        with Interruption(module, "lease", "__new__", "__init__", at=at) as interruption, suppress(KeyboardInterrupt):
            reader.read_next_batch()
        reader.close()
        assert connections_left(shm, patience=0.02) == 1, f"interrupted at {at}"
        assert held == sent[0], f"interrupted at {at}"
        del held, reader
        assert connections_left(shm, patience=2) == 0, f"interrupted at {at}"
        if not interruption.came:
            break
    assert at, "it was interrupted"
