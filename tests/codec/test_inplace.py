"""Datasets in shared memory in the form of IPC streams are read in place, and others are read, too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.client import stream
from dissociated.codec.inplace import InPlace
from dissociated.format.encapsulated import walk
from dissociated.format.message import buffer_extents
from dissociated.memory.region import AddressSpace, Region
from dissociated.protocol.delivery import Delivery
from dissociated.protocol.wire import AddressList
from dissociated.store.segment import Segment, SegmentWriter


@pytest.fixture
def server() -> Iterator[dis.Server]:
    with dis.Server(["shm:"], catalog=None) as made:
        yield made


@pytest.fixture
def only_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every other way of reading fail."""

    def refuse(*_: object) -> None:
        raise AssertionError("not read in place")

    monkeypatch.setattr(stream, "join_deliveries", refuse)


def read(server: dis.Server, name: str) -> pa.RecordBatchReader:
    return dis.open_stream(server.locations(name)[0], server.ticket(name))


def table(batches: int = 40, start: int = 0) -> pa.Table:
    """Return batches of different lengths with strings and nulls."""
    rows = [(start + n, None if n % 7 == 0 else f"value {n}" * (n % 5)) for n in range(batches * 10)]
    whole = pa.table({"n": [n for n, _ in rows], "text": [text for _, text in rows]})
    whole = whole.cast(pa.schema({"n": pa.int64(), "text": pa.string()}))
    slices = [batch for at in range(batches) for batch in whole.slice(at * 10, 10).to_batches()]
    return pa.Table.from_batches(slices, whole.schema)


def segment(path: Path, content: pa.Table) -> Segment:
    with SegmentWriter(path, content.schema) as writer:
        for batch in content.to_batches():
            writer.write(batch)
    return Segment.open(path)


@pytest.mark.usefixtures("only_in_place")
@pytest.mark.parametrize("batches", [1, 3, 40, 1100])  # below, within and beyond the size of one group
def test_a_table_is_read_in_place(server: dis.Server, batches: int) -> None:
    content = table(batches)
    server.publish("t", content)
    got = read(server, "t").read_all()
    got.validate(full=True)
    assert got.equals(content)
    assert [len(batch) for batch in got.to_batches()] == [10] * batches


@pytest.mark.usefixtures("only_in_place")
def test_columns_of_a_server_that_cannot_choose_are_chosen_in_place(server: dis.Server) -> None:
    server.publish("t", table())
    plain = server.locations("t")[0].replace("&request=1", "")
    got = dis.open_stream(plain, server.ticket("t"), columns=["text"]).read_all()
    assert got.equals(table().select(["text"]))


@pytest.mark.usefixtures("only_in_place")
def test_dictionaries_that_change_are_read_in_place(server: dis.Server) -> None:
    batches = [
        pa.record_batch({"d": pa.array(values * 5).dictionary_encode()})
        for values in (["a", "b"], ["a", "b"], ["c"], ["a", "c", None])
    ]
    server.publish("d", pa.Table.from_batches(batches))
    got = read(server, "d").read_all()
    assert got["d"].to_pylist() == ["a", "b"] * 10 + ["c"] * 5 + ["a", "c", None] * 5


@pytest.mark.usefixtures("only_in_place")
def test_batches_with_metadata_of_their_own_are_read_in_place(server: dis.Server, tmp_path: Path) -> None:
    path = tmp_path / "annotated.arrows"
    batch = table(1).to_batches()[0]
    with pa.ipc.new_stream(path, batch.schema) as writer:
        for number in range(20):
            writer.write_batch(batch, custom_metadata={"number": str(number)})
    server.publish("annotated", path)
    reader = read(server, "annotated")
    found = [reader.read_next_batch_with_custom_metadata()[1] for _ in range(20)]
    assert found == [{b"number": str(number).encode()} for number in range(20)]


@pytest.mark.usefixtures("only_in_place")
def test_segments_are_read_one_after_the_other(server: dis.Server, tmp_path: Path) -> None:
    parts = [table(20), table(1, start=1000), table(30, start=2000)]
    server.publish_segments("s", [segment(tmp_path / str(n), part) for n, part in enumerate(parts)])
    assert read(server, "s").read_all().equals(pa.concat_tables(parts))


@pytest.mark.usefixtures("only_in_place")
def test_an_ipc_file_is_read_in_place(server: dis.Server, tmp_path: Path) -> None:
    path = tmp_path / "t.arrow"
    with pa.ipc.new_file(path, table().schema) as writer:
        writer.write_table(table())
    server.publish("file", path)
    assert read(server, "file").read_all().equals(table())


@pytest.mark.parametrize("rows", [0, 10])
def test_segments_without_rows_take_part(server: dis.Server, tmp_path: Path, rows: int) -> None:
    parts = [table(1).slice(0, rows), table(0), table(2)]
    server.publish_segments("s", [segment(tmp_path / str(n), part) for n, part in enumerate(parts)])
    assert read(server, "s").read_all().equals(pa.concat_tables(parts))


@pytest.mark.usefixtures("only_in_place")
def test_metadata_of_batches_survives_several_segments(server: dis.Server, tmp_path: Path) -> None:
    batch = table(1).to_batches()[0]
    paths = [tmp_path / "0", tmp_path / "1"]
    for path in paths:
        with pa.ipc.new_stream(path, batch.schema) as writer:
            for number in range(10):
                writer.write_batch(batch, custom_metadata={"from": f"{path.name}.{number}"})
    server.publish_segments("s", [Segment.open(path) for path in paths])
    reader = read(server, "s")
    found = [reader.read_next_batch_with_custom_metadata()[1][b"from"].decode() for _ in range(20)]
    assert found == [f"{part}.{number}" for part in (0, 1) for number in range(10)]


@pytest.mark.usefixtures("only_in_place")
@pytest.mark.parametrize("segments", [1, 3])
def test_statistics_count_what_was_read(server: dis.Server, tmp_path: Path, segments: int) -> None:
    paths = [tmp_path / str(number) for number in range(segments)]
    for path in paths:
        with pa.ipc.new_stream(path, pa.schema({"d": pa.dictionary(pa.int8(), pa.string())})) as writer:
            for words in (["a", "b"], ["c"]):
                indices = pa.array(range(len(words)), pa.int8())
                writer.write_batch(pa.record_batch({"d": pa.DictionaryArray.from_arrays(indices, words)}))
    server.publish_segments("s", [Segment.open(path) for path in paths])
    reader = read(server, "s")
    assert reader.read_all()["d"].to_pylist() == ["a", "b", "c"] * segments
    assert reader.stats == pa.ipc.ReadStats(
        num_messages=1 + 4 * segments,
        num_record_batches=2 * segments,
        num_dictionary_batches=2 * segments,
        num_dictionary_deltas=0,
        num_replaced_dictionaries=2 * segments - 1,
    )


def test_small_bodies_may_come_inline_among_the_others() -> None:
    content = pa.Table.from_batches([*table(20).to_batches(), *pa.table({"n": [1], "text": ["x"]}).to_batches()])
    with dis.Server(["shm:"], catalog=None, inline_limit=100) as server:
        server.publish("mixed", content)
        assert read(server, "mixed").read_all().equals(content)


BASE = 1 << 20


def addressed(content: bytes) -> list[Delivery]:
    """Return the messages of a stream at BASE, each body by address, including empty bodies."""
    deliveries = []
    for number, (header, parsed, body_at) in enumerate(walk(memoryview(content))):
        offsets, lengths = buffer_extents(header, parsed)
        places = (BASE + body_at + offset if length else 0 for offset, length in zip(offsets, lengths, strict=True))
        listed = AddressList(tuple(places), lengths) if parsed.has_body else None
        deliveries.append(Delivery(number, header, parsed, None, listed))
    return deliveries


def test_what_has_no_bytes_lies_where_the_last_message_ended_or_is_not_in_place() -> None:
    full = pa.record_batch({"n": range(10)})
    empty = full.slice(0, 0)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, full.schema) as writer:
        for batch in (full, empty, full):
            writer.write_batch(batch)
    region = Region(BASE, sink.getvalue())
    space = AddressSpace()
    space.add(region)
    schema, *batches = addressed(region.memory.to_pybytes())
    assert [len(one.leased) for one in batches] == [1, 0, 1]
    place = InPlace(schema.header, space)
    assert [one.accept(place) for one in batches] == [True] * 3
    reader = place.reader(lambda memory, addresses: memory, None)
    assert reader is not None
    assert [*reader] == [full, empty, full]
    for wrong in ([batches[1]], [batches[0], batches[2]], [batches[0], batches[1], batches[1]]):
        place = InPlace(schema.header, space)
        assert [one.accept(place) for one in wrong][-1] is False
