"""Of long streams in shared memory, the metadata is read when it is needed."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from pathlib import Path

import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.client import stream
from dissociated.codec import split
from dissociated.errors import RemoteError, RemoteProtocolError, StoreError, TransportError
from dissociated.store.segment import Segment
from support.helpers import case, clients_end, wait_until

LONG = 10_000  # batches: their metadata is much longer than the buffers of a socket


@pytest.fixture
def server() -> Iterator[dis.Server]:
    with dis.Server(["shm:"], catalog=None) as made:
        yield made


def read(server: dis.Server, name: str = "long") -> pa.RecordBatchReader:
    return dis.open_stream(server.locations(name)[0], server.ticket(name))


WAYS: dict[str, Callable[[pa.RecordBatchReader], list[pa.RecordBatch]]] = {
    "one by one": list,
    "with metadata": lambda reader: [batch for batch, _ in split.batches(reader)],
    "read_all": lambda reader: reader.read_all().to_batches(),
    "c stream": lambda reader: [*pa.RecordBatchReader.from_stream(reader)],
    # Whoever asks for the regions has the whole stream compared before the beginning is read.
    "one by one after the regions": lambda reader: [*reader] if reader.regions else [],
    "with metadata after the regions": lambda reader: (
        [batch for batch, _ in split.batches(reader)] if reader.regions else []
    ),
}


def ended(server: dis.Server) -> None:
    wait_until(lambda: not server.status().consumers, "the end of the connection")


@cache
def batches(count: int) -> list[pa.RecordBatch]:
    whole = pa.record_batch({"n": range(3 * count), "text": [f"value {n}" for n in range(3 * count)]})
    return [whole.slice(3 * number, 3) for number in range(count)]


def write(path: Path, content: list[pa.RecordBatch], compression: str | None = None) -> Path:
    with pa.ipc.new_stream(path, content[0].schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        for batch in content:
            writer.write_batch(batch)
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return the path of 3,000 batches."""
    return [write(tmp_path_factory.mktemp("whole") / "0", batches(3_000))]


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return the paths of the halves of 3,000 batches."""
    folder, content = tmp_path_factory.mktemp("halves"), batches(3_000)
    return [write(folder / "0", content[:1_500]), write(folder / "1", content[1_500:])]


@pytest.fixture(scope="module")
def partly_compressed(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return the paths of 1,000 batches, and of 200 more that are compressed."""
    folder, content = tmp_path_factory.mktemp("compressed"), batches(1_200)
    return [write(folder / "0", content[:1_000]), write(folder / "1", content[1_000:], "lz4")]


def test_the_first_batch_is_read_before_the_server_has_sent_the_rest(server: dis.Server) -> None:
    content = batches(LONG)
    server.publish("long", pa.Table.from_batches(content))
    reader = read(server)
    assert reader.read_next_batch().equals(content[0])
    (consumer,) = server.status().consumers
    assert consumer.messages < LONG
    reader.close()
    ended(server)


def test_no_address_is_held_after_the_last_batch_of_a_beginning_is_dropped(server: dis.Server) -> None:
    server.publish("long", pa.Table.from_batches(batches(LONG)))
    reader = read(server)
    batch = reader.read_next_batch()
    del reader
    gc.collect()
    assert batch["n"].to_pylist() == [0, 1, 2]
    del batch
    ended(server)


@pytest.mark.parametrize("parts", ["whole", "halves"])
def test_batches_come_in_order_however_they_are_read(
    server: dis.Server, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, parts: str
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("not read in place")

    monkeypatch.setattr(stream, "join_deliveries", refuse)
    content = batches(3_000)
    server.publish_segments("long", [*map(Segment.open, request.getfixturevalue(parts))])
    for alone in (0, 1, 40, 512, 600, 2_999, 3_000):
        reader = read(server)
        with case(alone):
            assert [reader.read_next_batch() for _ in range(alone)] == content[:alone]
            assert reader.stats.num_record_batches == alone
            assert reader.read_all().to_batches() == content[alone:]
            assert reader.stats.num_messages == 3_001
            assert reader.stats.num_record_batches == 3_000


def test_a_consumer_of_the_c_stream_gets_the_batches_that_are_left(server: dis.Server) -> None:
    content = batches(3_000)
    server.publish("long", pa.Table.from_batches(content))
    reader = read(server)
    assert [reader.read_next_batch() for _ in range(5)] == content[:5]
    assert [*pa.RecordBatchReader.from_stream(reader)] == content[5:]


def test_metadata_of_batches_survives(server: dis.Server, tmp_path: Path) -> None:
    path = tmp_path / "annotated.arrows"
    batch = batches(1)[0]
    with pa.ipc.new_stream(path, batch.schema) as writer:
        for number in range(3_000):
            writer.write_batch(batch, custom_metadata={"number": f"{number:04}"})
    server.publish("long", path)
    reader = read(server)
    found = [reader.read_next_batch_with_custom_metadata()[1] for _ in range(3_000)]
    assert found == [{b"number": b"%04d" % number} for number in range(3_000)]


def test_the_rest_may_not_lie_in_place(server: dis.Server, partly_compressed: list[Path]) -> None:
    content = batches(1_200)
    server.publish_segments("long", [*map(Segment.open, partly_compressed)])
    for way, alone in [*product(WAYS, (5,)), *product(("one by one", "read_all"), (0, 1_001))]:
        reader = read(server)
        with case((way, alone)):
            assert [reader.read_next_batch() for _ in range(alone)] == content[:alone]
            assert WAYS[way](reader) == content[alone:]
            del reader
            gc.collect()
            ended(server)


def test_a_device_gets_every_batch_though_the_rest_does_not_lie_in_place() -> None:
    table = pa.table({"n": range(700_001)})
    with dis.Server(["shm:"], inline_limit=1_000) as server, dis.connect(str(server.catalog_uri)) as client:
        server.publish("long", pa.Table.from_batches(table.to_batches(max_chunksize=1_000)))
        read = 0
        with client.read_on_device("long", "test:0") as reader:
            for batch in reader:
                read += batch.num_rows
    assert read == table.num_rows


def test_a_server_that_dies_after_the_beginning_is_an_error_each_time() -> None:
    before = {*threading.enumerate()}
    with dis.Server(["shm:"], catalog=None) as server:
        server.publish("long", pa.Table.from_batches(batches(LONG)))
        reader = read(server)
        assert reader.read_next_batch()["n"].to_pylist() == [0, 1, 2]
    for read_on in ("read_all", "read_all", "read_next_batch"):
        with pytest.raises((RemoteError, RemoteProtocolError, TransportError)):
            getattr(reader, read_on)()
    del reader
    gc.collect()
    assert not clients_end(before)


def test_closing_after_the_beginning_ends_the_stream(server: dis.Server) -> None:
    server.publish("long", pa.Table.from_batches(batches(LONG)))
    reader = read(server)
    kept = reader.read_next_batch()
    reader.close()
    with pytest.raises(StoreError, match="closed before its end"):
        reader.read_next_batch()
    assert kept["n"].to_pylist() == [0, 1, 2]
    del kept
    ended(server)
