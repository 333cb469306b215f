"""Bodies that a connection receives directly into the memory of the device."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.errors import DeviceFull, RemoteProtocolError
from dissociated.memory.device.base import Device, DeviceBuffer, Stream
from dissociated.memory.device.emulated import EmulatedDevice
from dissociated.protocol.message import Incoming, Run
from dissociated.transport import registry
from dissociated.transport.base import Allocate, Connection
from dissociated.transport.framed.connection import SocketConnection
from dissociated.transport.framed.tcp import TcpTransport
from dissociated.uri import Uri

from . import consumer

ROWS = 100_000
#: Each column has more bytes than a medium buffers in host memory before they are requested.
BIG = pa.table({
    "n": np.arange(5 * ROWS),
    "holes": pa.array(np.arange(5 * ROWS, dtype=np.float64), mask=np.arange(5 * ROWS) % 3 == 0),
    "s": pa.array(np.arange(5 * ROWS)).cast(pa.string()),
    "b": pa.array(np.arange(5 * ROWS) % 2 == 0),
})  # fmt: skip


class Landed(SocketConnection):
    """A TCP connection that, like some network adapters, writes to devices if the receiver allocated device memory."""

    written = 0  # number of bodies
    _stream: Stream

    def receive_onto(self, device: Device) -> bool:
        self._stream = device.stream()
        return True

    def receive(self, timeout: float, allocate: Allocate) -> Incoming | Run | None:
        there: list[DeviceBuffer] = []

        def supply(tag: int | None, length: int) -> Any:
            memory = allocate(tag, length)
            if not isinstance(memory, DeviceBuffer):
                return memory
            there.append(memory)
            return pa.allocate_buffer(length)

        incoming = super().receive(timeout, supply)
        if not there or not isinstance(incoming, Incoming):
            return incoming
        self._stream.copy(there[0].address, incoming.data.address, len(there[0]))
        self._stream.synchronize()
        Landed.written += 1
        return Incoming(incoming.tag, there[0])


class Lands(TcpTransport):
    """A transport whose clients receive onto devices, from the servers of TCP."""

    def connect(self, uri: Uri, timeout: float) -> Connection:
        connection = super().connect(uri, timeout)
        connection.__class__ = Landed
        return connection


@pytest.fixture(autouse=True)
def lands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the scheme `lands` as the package of a third party would."""
    package = tmp_path / "lands-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: lands\nVersion: 1\n")
    (package / "entry_points.txt").write_text(f"[dissociated.transports]\nlands = {__name__}:Lands\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    Landed.written = 0


@pytest.fixture(scope="module")
def server() -> Iterator[dis.Server]:
    with dis.Server(["tcp://127.0.0.1:0"]) as server:
        server.publish("big", BIG.to_batches(max_chunksize=ROWS))
        yield server


def read(server: dis.Server, name: str, device: Device, **options: Any) -> Any:
    (uri,) = server.locations(name)
    return dis.open_stream_on_device(uri.replace("tcp:", "lands:"), server.ticket(name), device=device, **options)


def on_host(reader: Any) -> pa.Table:
    return pa.Table.from_batches([batch.to_host() for batch in reader], reader.schema)


def test_they_come_to_lie_there_as_all_others_do(server: dis.Server, device: Device) -> None:
    pinned, before = device.ring.nbytes, device.allocations
    batches = [*read(server, "big", device)]
    assert Landed.written == len(batches) == 5
    assert device.ring.nbytes == pinned
    assert pa.Table.from_batches([batch.to_host() for batch in batches]) == BIG
    assert device.allocations == before + 5, "what was received into has gone back"
    taken = consumer.Taken(batches[0])
    assert {address % 64 for address in consumer.addresses(taken.struct.array)} == {0}
    taken.release()
    del batches, taken
    some = read(server, "big", device, columns=["n", "b"], batches=(1, 3))
    assert on_host(some) == BIG.select(["n", "b"]).slice(ROWS, 2 * ROWS)
    assert Landed.written == 7
    few = read(server, "big", device, columns=["n"], limit=ROWS)
    assert on_host(few) == BIG.select(["n"]).slice(0, ROWS), "rows are chosen on the host"
    reader = read(server, "big", device)
    kept = reader.read_next_batch()
    reader.close()
    assert kept.to_host() == BIG.to_batches(max_chunksize=ROWS)[0], "what was read stays"


def test_what_has_to_be_decoded_is_received_here(server: dis.Server, device: Device) -> None:
    words = pa.array([f"a word that is number {number}" for number in range(20_000)])
    schema = pa.schema([("plain", pa.int64()), ("coded", pa.dictionary(pa.int32(), pa.string()))])

    def batch(dictionary: pa.Array, shift: int = 0) -> pa.RecordBatch:
        indices = pa.array((np.arange(ROWS) + shift) % len(dictionary), pa.int32())
        return pa.record_batch(
            [range(shift, ROWS + shift), pa.DictionaryArray.from_arrays(indices, dictionary)], schema
        )

    growing = [batch(words[:15_000]), batch(words[:15_000], 7), batch(words), batch(words, 9)]
    replaced = [batch(words[:15_000]), batch(words[3_000:]), batch(words[5:])]
    deltas = dis.WriteOptions(emit_dictionary_deltas=True)
    for name, batches, options, written in (
        ("compressed", growing, dis.WriteOptions(codec="zstd"), 0),
        ("replaced", replaced, None, 6),
        ("growing", growing, deltas, 3),
        ("small", [one.slice(5, 20) for one in BIG.to_batches(max_chunksize=ROWS)], None, 0),
    ):
        server.publish(name, batches, options=options)
        Landed.written = 0
        arrived = [one.to_host() for one in read(server, name, device)]
        assert [*map(plain, arrived)] == [*map(plain, batches)], name
        assert Landed.written == written, name


def test_libarrow_looks_into_no_body_that_says_as_arrow_0_17_did_that_it_is_compressed(
    server: dis.Server, device: Device, tmp_path: Path
) -> None:
    options = pa.ipc.IpcWriteOptions(metadata_version=pa.ipc.MetadataVersion.V4)
    with pa.ipc.new_stream(tmp_path / "old.arrows", BIG.schema, options=options) as writer:
        for batch in BIG.to_batches(max_chunksize=ROWS):
            writer.write_batch(batch, custom_metadata={"ARROW:experimental_compression": "lz4"})
    server.publish("old", tmp_path / "old.arrows")
    with pytest.raises(RemoteProtocolError, match="bytes when decompressed"):
        list(read(server, "old", device))


def plain(batch: pa.RecordBatch) -> list[pa.Array]:
    return [one.dictionary_decode() if isinstance(one, pa.DictionaryArray) else one for one in batch.columns]


def test_a_device_that_has_no_room(server: dis.Server, emulated: EmulatedDevice) -> None:
    reader = read(server, "big", emulated)
    first = reader.read_next_batch()
    emulated.limit = 1000
    with pytest.raises(DeviceFull, match="bytes left"):
        reader.read_next_batch()
    assert first.to_host() == BIG.to_batches(max_chunksize=ROWS)[0]
    del reader
    gc.collect()
    assert emulated.allocations == 1
    emulated.limit = 6_000_000  # enough for a batch, but for no other block
    del first
    gc.collect()
    Landed.written = 0
    rows = 0
    for batch in read(server, "big", emulated):
        rows += batch.num_rows
        del batch
    assert rows == 5 * ROWS
    assert Landed.written == 1, "the others were received here"


@pytest.mark.needs("ucx")
@pytest.mark.parametrize("allowed", [True, False])
def test_ucx_writes_to_devices_that_it_knows(device: Device, allowed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX does not know emulated devices, whose bodies come through host memory, and would crash on their addresses."""
    monkeypatch.setenv("DISSOCIATED_UCX_DEVICE_MEMORY", "y" if allowed else "n")
    with dis.Server(["ucx:"], catalog=None) as ucx:
        ucx.publish("big", BIG.to_batches(max_chunksize=ROWS))
        (uri,) = ucx.locations("big")
        with registry.transport("ucx").connect(Uri.parse(uri), 10) as connection:
            knows = connection.receive_onto(device)
        assert knows is (allowed and device.name.startswith("cuda"))
        assert on_host(dis.open_stream_on_device(uri, ucx.ticket("big"), device)) == BIG
