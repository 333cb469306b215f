"""Reads by name while servers and datasets come and go."""

from __future__ import annotations

import ctypes
import json
import os
import socket
import struct
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.flight as flight
import pyarrow.parquet as pq
import pytest

import dissociated as dis
from dissociated.control.commit import StagedSegment
from dissociated.errors import (
    CatalogError,
    ColumnNotFound,
    DatasetNotFound,
    OptionError,
    RemoteProtocolError,
    StoreError,
    TransportError,
)
from dissociated.node.node import Node
from dissociated.store.store import Store
from dissociated.uri import Uri
from support.helpers import PATIENCE, case, commit_of, connections_left
from support.nodes import until_expired

TABLE = pa.table({"n": range(10_000)})  # too large for an answer of the catalog
SMALL = pa.table({"n": range(1000), "text": pa.array(["a", None, "b", "a"] * 250).dictionary_encode()})


def test_the_next_nearest_transport_is_tried() -> None:
    with dis.Server(["shm:", "tcp://127.0.0.1:0"]) as server, dis.connect(server.catalog_uri) as client:
        server.publish("data", TABLE)
        path = Uri.parse(server.locations("data")[0]).path
        os.unlink(path)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
            dead.bind(path)  # bound, but not listening
        assert client.read("data").read_all() == TABLE
        with pytest.raises(TransportError, match="Connection refused"):
            client.read("data", transport="shm")
        os.unlink(path)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[dis.Client]:
    """A client of a node that has the dataset "small" in two versions, the second of which has two segments."""
    with Node(Store(tmp_path / "store"), ["tcp://127.0.0.1:0"]) as node, dis.connect(node.uri) as client:
        client.put("small", SMALL)
        client.put("small", SMALL, mode="append")
        yield client


def _accepted(client: dis.Client) -> int:
    return sum(listener.accepted for listener in client.status().listeners)


def test_a_small_dataset_comes_with_its_description(small: dis.Client) -> None:
    both = pa.concat_tables([SMALL, SMALL])
    assert small.read("small").read_all() == both
    assert small.read("small", version=2).read_all() == both
    assert small.read("small", columns=["text"], rows=range(998, 1002)).read_all() == both[998:1002].select(["text"])
    assert small.read("small", columns=[]).read_all().num_rows == 2000
    filtered = small.read("small", columns=["text"], filter=pc.field("n") > 997, limit=3).read_all()
    assert filtered["text"].to_pylist() == ["b", "a", "b"]
    with pytest.raises(ColumnNotFound):
        small.read("small", columns=["m"])
    # The first read learned of the catalog's counter, and the read of columns used it. The later ones asked nobody.
    assert (_accepted(small), small.status().totals.flight) == (0, 3)
    small.put("small", SMALL[:1])
    assert small.read("small").read_all() == SMALL[:1]
    assert small.read("small", transport="tcp").read_all() == SMALL[:1]
    assert (_accepted(small), small.status().totals.flight) == (1, 4)


def test_every_change_is_seen_by_the_next_read(small: dis.Client) -> None:
    """The catalog may repeat an answer only as long as nothing has changed."""
    for rows in range(1, 6):
        small.put("small", SMALL[:rows])
        assert [small.read("small").read_all() for _ in range(3)] == [SMALL[:rows]] * 3

    def change(number: int) -> None:
        for _ in range(5):
            before = small.describe("small").version
            small.put("small", SMALL[:number])
            assert small.describe("small").version > before

    with ThreadPoolExecutor(4) as pool:
        deque(pool.map(change, range(4)), 0)
    small.put("short", SMALL, ttl=0.2)
    assert all(table == SMALL for table in until_expired(small, "short", lambda: small.read("short").read_all()))
    columns = ["n"]
    assert small.read("small", columns=columns).read_all().column_names == ["n"]
    columns[:] = ["text"]
    assert small.read("small", columns=columns).read_all().column_names == ["text"]
    small.drop("small")
    with pytest.raises(DatasetNotFound):
        small.read("small")


class _Relay(flight.FlightServerBase):  # type: ignore[misc]
    """A catalog with the answers of another one, in which `old` bytes of rows are `new` ones."""

    def __init__(self, catalog: str) -> None:
        super().__init__("grpc://127.0.0.1:0")
        self._catalog = flight.connect(catalog)
        self.old = self.new = b""
        self._info: Any = None

    def get_flight_info(self, context: Any, descriptor: Any) -> Any:
        info = self._info = self._info or self._catalog.get_flight_info(descriptor)  # the moment in it stays
        (end,) = info.endpoints
        rows = end.app_metadata.replace(self.old, self.new)
        ends = [flight.FlightEndpoint(end.ticket, end.locations, end.expiration_time, rows)]
        metadata = json.loads(info.app_metadata)
        del metadata["counter"]  # which does not count the changes of this catalog
        return flight.FlightInfo(
            info.schema, info.descriptor, ends, info.total_records, info.total_bytes, info.ordered, json.dumps(metadata)
        )


def test_equal_answers_have_rows_of_their_own(small: dis.Client) -> None:
    """The client keeps the parsed description and the plan of an answer, but each read has the rows of its own."""
    with _Relay(small.uri) as relay, dis.connect(f"grpc://127.0.0.1:{relay.port}") as client:
        first, second = (client.read("small").read_all() for _ in range(2))
        # A library that gets the array through DLPack can do this.
        ctypes.memset(first["n"].chunk(0).buffers()[1].address, 0xFF, 8)
        assert first["n"][0].as_py() == -1
        relay.old, relay.new = struct.pack("<qq", 1, 2), struct.pack("<qq", 3, 4)
        third = client.read("small").read_all()
        relay.old = relay.new = b""
        both = pa.concat_tables([SMALL, SMALL])
        assert second == client.read("small").read_all() == both
        assert third["n"].to_pylist() == [0, 3, 4, *range(3, 1000)] * 2


@pytest.mark.parametrize("options", [{}, {"columns": ["n"]}, {"columns": []}, {"limit": 1500}])
def test_a_small_dataset_is_not_read_on_after_closing(small: dis.Client, options: dict[str, Any]) -> None:
    reader = small.read("small", **options)
    assert reader.read_next_batch().num_rows
    reader.close()
    with pytest.raises(StoreError, match="closed before its end"):
        reader.read_next_batch()
    assert _accepted(small) == 0


def test_other_datasets_do_not_come_with_their_descriptions(tmp_path: Path) -> None:
    with (
        dis.Server(["tcp://127.0.0.1:0"]) as server,
        Node(Store(tmp_path / "store"), ["tcp://127.0.0.1:0"], catalog=server.catalog_uri) as node,
        dis.connect(server.catalog_uri) as client,
    ):
        server.publish("compressed", SMALL, options=dis.WriteOptions(codec="lz4"))
        server.publish("live", lambda: SMALL.to_reader())
        server.publish("large", TABLE)
        server.publish("many", pa.Table.from_batches(SMALL[:1].to_batches() * 1000))
        for name in ("compressed", "live", "large", "many"):
            with case(name):
                expected = {"large": TABLE, "many": pa.concat_tables([SMALL[:1]] * 1000)}.get(name, SMALL)
                assert client.read(name).read_all() == expected
        tensor = pa.Tensor.from_numpy(np.arange(6))
        server.publish("tensors", [tensor])
        assert [*client.read_tensors("tensors")] == [tensor]
        client.put("parts", SMALL)
        with node.store.writer("x", SMALL.schema) as writer:
            writer.write(SMALL)
        client.commit(commit_of("parts", [StagedSegment("x", node.store.id)], SMALL.schema, mode="append"))
        assert len(client.describe("parts").endpoints) == 2
        assert client.read("parts").read_all() == pa.concat_tables([SMALL, SMALL])
        few = SMALL[:10]
        server.publish("few", few)
        pool = pa.proxy_memory_pool(pa.default_memory_pool())
        assert client.read("few", max_body=1000).read_all() == few
        assert client.read("few", options=dis.ReadOptions(memory_pool=pool)).read_all() == few
        assert client.status().totals.flight == node.server.status().totals.flight == 0
        assert client.read("few").read_all() == few
        assert client.status().totals.flight == 1


def test_an_answer_of_the_catalog_is_checked(small: dis.Client) -> None:
    """The places of buffers are, as over each transport."""
    info = small.describe("small")

    def stream(batch: pa.RecordBatch, codec: str | None = None) -> bytes:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as writer:
            writer.write_batch(batch)
        return bytes(sink.getvalue())

    def read(embedded: bytes, columns: list[str] | None = None) -> pa.RecordBatchReader:
        return small.read_endpoint(info, replace(info.endpoints[0], embedded=embedded), columns=columns)

    for junk in (b"junk", bytes(8), stream(SMALL.to_batches()[0], "lz4")):
        with case(junk), pytest.raises(RemoteProtocolError, match=r"the catalog sent (unreadable )?rows"):
            read(junk)
    ipc = stream(pa.record_batch({"text": ["abc"]}))
    place = ipc.rindex(struct.pack("<qq", 8, 3), 0, ipc.rindex(b"abc"))  # of the letters in the body
    for at, length in ((1 << 20, 3), (8, 1 << 40), (-64, 3)):
        damaged = ipc[:place] + struct.pack("<qq", at, length) + ipc[place + 16 :]
        with case((at, length)), pytest.raises(RemoteProtocolError, match="the peer sent what libarrow cannot read"):
            read(damaged).read_all()
    numbers = stream(pa.record_batch({"n": [1, 2]}))
    schema = pa.schema([("text", pa.string())]).serialize().to_pybytes()
    of_numbers = pa.schema([("n", pa.int64())]).serialize().to_pybytes()
    assert numbers.startswith(of_numbers)
    with pytest.raises(RemoteProtocolError, match="the peer sent what libarrow cannot read"):
        read(schema + numbers[len(of_numbers) :]).read_all()
    with pytest.raises(ColumnNotFound, match="no column 'text'; there are n"):
        read(numbers, columns=["text"])


def test_flight_is_used_if_no_transport_reaches_the_server() -> None:
    with dis.Server(["shm:"]) as server, dis.connect(server.catalog_uri) as client:
        server.publish("data", TABLE)
        handle = client["data"]
        os.unlink(Uri.parse(server.locations("data")[0]).path)  # like on another host
        assert client.read("data").read_all() == handle.to_table() == TABLE
        with pytest.raises(CatalogError, match="cannot be reached from here by shm: it is offered by grpc, shm"):
            client.read("data", transport="shm")


def test_of_places_that_are_equally_near_the_first_is_tried_first() -> None:
    with dis.Server(["tcp://127.0.0.1:0"] * 3) as server, dis.connect(server.catalog_uri) as client:
        server.publish("data", TABLE)
        assert client.read("data").read_all() == TABLE
        assert [listener.accepted for listener in client.status().listeners] == [1, 0, 0]


@pytest.mark.parametrize("transport", ["shm", "grpc"])
def test_a_dataset_that_is_replaced_all_the_time_can_be_read(transport: str) -> None:
    with dis.Server(["shm:"]) as server, dis.connect(server.catalog_uri) as client:
        server.publish("data", TABLE)
        wanted, done = threading.Semaphore(0), threading.Semaphore(0)

        def replace() -> None:
            while wanted.acquire() and not over:
                server.publish("data", TABLE)
                done.release()

        over = False
        replacing = threading.Thread(target=replace)
        replacing.start()
        try:
            for _ in range(20):
                wanted.release(5)  # replaced during reads, and less often than the name is looked up
                assert client.read("data", transport=transport).read_all() == TABLE
                for _ in range(5):
                    assert done.acquire(timeout=PATIENCE)
        finally:
            over = True
            wanted.release()
            replacing.join()


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
def test_rows_by_their_positions(transport: str, tmp_path: Path) -> None:
    """The dataset has batches of 10 rows."""
    with Node(Store(tmp_path / "store"), ["shm:", "tcp://127.0.0.1:0"]) as node, dis.connect(node.uri) as client:
        for first in range(0, 100, 10):
            client.put("data", pa.table({"n": range(first, first + 10)}).to_reader(), mode="append")
        for rows in (range(100), range(3), range(95, 200), range(17, 43), range(20, 30), range(100, 101), range(5, 5)):
            read = client.read("data", transport=transport, columns=["n"], rows=rows).read_all()
            assert read["n"].to_pylist() == [n for n in rows if n < 100]


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
def test_rows_of_fields_by_their_positions(transport: str, tmp_path: Path) -> None:
    with Node(Store(tmp_path / "store"), ["shm:", "tcp://127.0.0.1:0"]) as node, dis.connect(node.uri) as client:
        for first in range(0, 30, 10):
            numbers = range(first, first + 10)
            client.put("data", pa.table({"n": numbers, "m": numbers}).to_reader(), mode="append")
        options = dis.ReadOptions(included_fields=[1])
        assert client.read("data", transport=transport, rows=range(17, 23), options=options).read_all() == pa.table(
            {"m": range(17, 23)}
        )


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
def test_rows_of_parquet_by_their_positions(transport: str, tmp_path: Path) -> None:
    """The row groups do not end at batch boundaries. Each choice of columns is read."""
    table = pa.table({"n": range(200_000), "m": range(200_000)})
    pq.write_table(table, tmp_path / "data.parquet", row_group_size=50_000)
    with dis.Server() as server, dis.connect(server.catalog_uri) as client:
        server.publish("data", tmp_path / "data.parquet")
        for columns in (["n"], ["m"], ["n", "m"]):
            for rows in (range(50_000, 50_003), range(99_999, 140_001), range(199_999, 200_005)):
                read = client.read("data", transport=transport, columns=columns, rows=rows).read_all()
                assert read == table.select(columns).slice(rows.start, len(rows))


def test_parts_without_any_of_the_rows_are_not_opened(tmp_path: Path) -> None:
    with (
        dis.Server(["tcp://127.0.0.1:0"]) as server,
        Node(Store(tmp_path / "a"), ["tcp://127.0.0.1:0"], catalog=server.catalog_uri) as a,
        Node(Store(tmp_path / "b"), ["tcp://127.0.0.1:0"], catalog=server.catalog_uri) as b,
        dis.connect(server.catalog_uri) as client,
    ):
        for node, numbers in ((a, [1, 2]), (b, [3, 4])):
            with node.store.writer("x", (table := pa.table({"n": numbers})).schema) as writer:
                writer.write(table)
            client.commit(commit_of("data", [StagedSegment("x", node.store.id)], table.schema, mode="append"))
        assert client.read("data", rows=range(1, 3)).read_all()["n"].to_pylist() == [2, 3]
        b.server.close()
        assert client.read("data", rows=range(2)).read_all()["n"].to_pylist() == [1, 2]
        with pytest.raises(CatalogError, match="no node there is alive"):
            client.read("data", rows=range(1, 3))


def test_over_tcp_the_batches_before_the_wanted_rows_do_not_move(tmp_path: Path) -> None:
    with Node(Store(tmp_path / "store"), ["tcp://127.0.0.1:0"]) as node, dis.connect(node.uri) as client:
        batches = [pa.record_batch({"n": pa.array(range(10_000), pa.int64())})] * 100
        client.put("data", pa.Table.from_batches(batches).to_reader())
        read = client.read("data", rows=range(985_000, 1_000_000)).read_all()
        assert read["n"].to_pylist() == [*range(5_000, 10_000), *range(10_000)]
        assert connections_left(node.server) == 0  # the server counts sent bytes asynchronously
        (status,) = client.status().datasets
        assert status.bytes == 2 * 80_000


def test_over_flight_alone_rows_are_counted_and_then_read(tmp_path: Path) -> None:
    """The first call asks for no columns, and the second for the batches with the rows alone."""
    with Node(Store(tmp_path / "store"), []) as node, dis.connect(node.uri) as client:
        client.put("data", TABLE)
        assert client.read("data", transport="grpc", rows=range(10, 20)).read_all()["n"].to_pylist() == [*range(10, 20)]
        assert client.status().totals.flight == 2


@pytest.mark.parametrize("rows", [range(-1, 3), range(0, 6, 2)])
def test_rows_are_a_range_of_positions(rows: range) -> None:
    with dis.Server(["shm:"]) as server, dis.connect(server.catalog_uri) as client:
        server.publish("data", TABLE)
        wrongs: list[tuple[dict[str, Any], str]] = [
            ({"rows": 10}, "rows is a range of positions, .* limit="),
            ({"columns": "n"}, r"columns is a list of names: \['n'\]"),
        ]
        for wrong, why in wrongs:
            with pytest.raises(OptionError, match=why):
                client.read("data", **wrong)
        with pytest.raises(OptionError, match="rows is a range of positions"):
            client.read("data", rows=rows)


def test_a_server_on_all_interfaces_names_a_host() -> None:
    with dis.Server(["tcp://0.0.0.0:0"], advertise="localhost") as server:
        server.publish("data", TABLE)
        (location,) = server.locations("data")
        assert location.startswith("tcp://localhost:")
        with dis.connect(server.catalog_uri) as client:
            assert client.read("data", transport="tcp").read_all() == TABLE
    with dis.Server(["tcp://0.0.0.0:0"], catalog=None) as server:
        server.publish("data", TABLE)
        assert server.locations("data")[0].startswith(f"tcp://{socket.gethostname().lower()}:")


def test_limits_hold_over_grpc_too_or_are_refused() -> None:
    """The limits concern a body that grows when decompressed, and the metadata of the schema and of a batch."""
    zeros = pa.record_batch({"n": pa.array([0] * 10_000)})  # 80,000 bytes
    wide = pa.table({"n": [1]}, schema=pa.schema([("n", pa.int64())], metadata={"x": "y" * 2000}))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, zeros.schema) as writer:
        writer.write_batch(zeros[:1], custom_metadata={"x": "y" * 2000})
    with dis.Server(["shm:", "tcp://127.0.0.1:0"]) as server:
        server.publish("zeros", zeros, options=dis.WriteOptions(codec="zstd"))
        server.publish("wide", wide)
        server.publish("beside", sink.getvalue())
        pool = dis.ReadOptions(memory_pool=pa.proxy_memory_pool(pa.default_memory_pool()))
        with dis.connect(server.catalog_uri, max_metadata=1000) as client:
            info = client.describe("zeros")
            read = partial(client.read_endpoint, info, info.endpoints[0])
            for transport in ("shm", "tcp", "grpc"):
                for wanted in ({}, {"filter": ("n", "=", 0)}, {"columns": ["n"]}, {"batches": (0, 1)}):
                    with pytest.raises(RemoteProtocolError, match="max_body"):
                        read(transport=transport, max_body=79_999, **wanted).read_all()
                    assert read(transport=transport, max_body=90_000, **wanted).read_all().num_rows == 10_000
                for name in ("wide", "beside"):
                    with pytest.raises(RemoteProtocolError, match="at most 10"):
                        client.read(name, transport=transport).read_all()
                if transport != "grpc":
                    assert client.read("zeros", transport=transport, options=pool).read_all().num_rows == 10_000
                    continue
                with pytest.raises(OptionError, match="memory_pool"):
                    client.read("zeros", transport=transport, options=pool)
