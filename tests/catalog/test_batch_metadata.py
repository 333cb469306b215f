"""Custom metadata of record batches: it arrives by every path, and readers return None for batches without any."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.flight as flight
import pytest

import dissociated as dis
from dissociated.catalog.service import CatalogService
from dissociated.cli import main
from dissociated.codec.batches import BatchReader
from dissociated.node.node import Node
from dissociated.store.store import Store

Pairs: TypeAlias = list[tuple[pa.RecordBatch, pa.KeyValueMetadata | None]]

KEPT = pa.KeyValueMetadata([(b"k", b"1"), (b"k", b"2"), (b"\xff", b"\x00")])


def batch(*words: str) -> pa.RecordBatch:
    numbers = pa.array(range(len(words)), pa.int64())
    return pa.record_batch({"n": numbers, "s": pa.array(words, pa.string()), "d": pa.array(words).dictionary_encode()})


EMPTY = batch("a").slice(0, 0)
#: Batches with metadata: the first, one with another dictionary and an empty one. The others have none.
PAIRS: Pairs = [(batch("a", "b"), KEPT), (batch("a"), None), (batch("c", "d", "e"), KEPT), (EMPTY, KEPT), (EMPTY, None)]
SCHEMA = EMPTY.schema
#: The streams: with a dictionary, without one, beginning with an empty batch, and without metadata.
PLAIN: Pairs = [(one.select(["n", "s"]), metadata) for one, metadata in PAIRS]
STREAMS = {"dictionary": PAIRS, "plain": PLAIN, "empty first": PAIRS[::-1], "none": [(one, None) for one, _ in PAIRS]}


def written(pairs: Pairs) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, pairs[0][0].schema) as writer:
        for one, metadata in pairs:
            writer.write_batch(one, custom_metadata=metadata)
    return sink.getvalue()


def read(reader: pa.RecordBatchReader) -> Pairs:
    pairs = []
    try:
        while True:
            pairs.append(tuple(reader.read_next_batch_with_custom_metadata()))
    except StopIteration:
        return pairs


def same(found: Pairs, expected: Pairs) -> None:
    for one, _ in found:
        one.validate(full=True)
    assert [one.to_pydict() for one, _ in found] == [one.to_pydict() for one, _ in expected]
    assert [metadata for _, metadata in found] == [metadata for _, metadata in expected]


def selected(pairs: Pairs, *columns: str) -> Pairs:
    return [(one.select([*columns]), metadata) for one, metadata in pairs]


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("signed", [False, True])
def test_from_a_server(kind: str, signed: bool, tmp_path: Path) -> None:
    pairs = STREAMS[kind]
    stream = written(pairs)
    (tmp_path / "file.arrows").write_bytes(stream)
    sources: dict[str, Any] = {"file": tmp_path / "file.arrows", "callable": lambda: pa.ipc.open_stream(stream)}
    options: dict[str, Any] = {"ticket_lifetime": 60} if signed else {}
    with dis.Server(["shm:", "tcp://127.0.0.1:0"], **options) as server, dis.connect(server.catalog_uri) as client:
        for name, source in sources.items():
            server.publish(name, source)
            info = client.describe(name)
            for way in ("shm", "tcp", "grpc"):
                same(read(client.read(name, transport=way)), pairs)
                same(read(client.read(name, transport=way, columns=["s"])), selected(pairs, "s"))
                same(read(client.read_endpoint(info, info.endpoints[0], transport=way, batches=(1, 4))), pairs[1:4])
            if name == "file":
                cut = [(one, metadata) for one, metadata in pairs if one.num_rows]
                cut[0] = cut[0][0].slice(1), cut[0][1]
                for way in ("shm", "tcp", "grpc"):
                    same(
                        read(client.read(name, transport=way, rows=range(1, 6))),
                        [pair for pair in cut if pair[0].num_rows],
                    )
            if signed:
                ticket = server.ticket(name, columns=["n"])
                for location in server.locations(name):
                    same(read(dis.open_stream(location, ticket)), selected(pairs, "n"))
                    some = dis.open_stream(location, ticket, batches=(2, 4))
                    same(read(some), selected(pairs, "n")[2:4])


@pytest.mark.parametrize("kind", STREAMS)
def test_through_put_nodes_and_get(kind: str, tmp_path: Path) -> None:
    """Two parts are put on a node through the catalog, read through the catalog, and copied into a file."""
    pairs = STREAMS[kind]
    with ExitStack() as running:
        catalog = running.enter_context(closing(CatalogService("grpc://127.0.0.1:0"))).uri
        running.enter_context(Node(Store(tmp_path / "store"), catalog=catalog))
        client = running.enter_context(dis.connect(catalog))
        plain = running.enter_context(flight.FlightClient(catalog))
        for mode in ("overwrite", "append"):
            assert client.put("d", lambda: pa.ipc.open_stream(written(pairs)), mode=mode) == 6
        for way in (None, "tcp", "grpc"):
            same(read(client.read("d", transport=way)), pairs * 2)
        endpoints = client.describe("d").endpoints
        expected = pa.Table.from_batches([one for one, _ in pairs] * 2).to_pydict()
        got = pa.concat_tables([plain.do_get(flight.Ticket(one.ticket)).read_all() for one in endpoints])
        assert got.to_pydict() == expected
        assert main(["get", f"{catalog}/d", "-o", str(tmp_path / "out.arrows")]) == 0
        same(read(pa.ipc.open_stream(tmp_path / "out.arrows")), pairs * 2)


@pytest.mark.parametrize("kind", STREAMS)
def test_through_handles(kind: str, tmp_path: Path) -> None:
    """A handle and a scanner are sources like a reader.

    Batches that were cut or have reordered columns keep their metadata.
    """
    pairs = STREAMS[kind]
    names = pairs[0][0].schema.names[::-1]
    with (
        Node(Store(tmp_path / "store")) as node,
        dis.connect(node.uri) as client,
        dis.Server(["tcp://127.0.0.1:0"]) as server,
    ):
        client.put("d", lambda: pa.ipc.open_stream(written(pairs)))
        handle = client["d"]
        for source in (handle, handle.scanner(), lambda: handle):
            client.put("put", source)
            same(read(client.read("put")), pairs)
        server.publish("published", handle)
        same(read(dis.open_stream(server.locations("published")[0], server.ticket("published"))), pairs)
        same(read(handle.to_reader(names)), selected(pairs, *names))
        rows = [(one.slice(at, 1), metadata) for one, metadata in pairs for at in range(one.num_rows)]
        same(read(handle.to_reader(batch_size=1)), rows)


def readers(reader: Callable[[], BatchReader]) -> Iterator[pa.Table]:
    """Read everything in each of the ways in which Python and C++ pull from a reader."""
    yield reader().read_all()
    yield pa.Table.from_batches([*reader()], reader().schema)
    yield pa.RecordBatchReader.from_stream(reader()).read_all()
    yield ds.Scanner.from_batches(reader()).to_table()  # which knows the C++ object alone
    first = reader()
    batches = [first.read_next_batch()]
    yield pa.Table.from_batches([*batches, *ds.Scanner.from_batches(first).to_table().to_batches()])


def test_a_reader_of_batches_gives_the_same_to_python_and_to_cpp_from_where_it_lies() -> None:
    deep = pa.record_batch(
        {
            "l": pa.array([[1, 2], None, [3]] * 50),
            "v": pa.array(["a view of more than twelve bytes", None, "b"] * 50, pa.string_view()),
            "u": pa.UnionArray.from_dense(
                pa.array([0, 1, 0] * 50, pa.int8()), pa.array(range(150), pa.int32()), [pa.array(range(150))] * 2
            ),
        }
    )
    for pairs in (PAIRS, [(deep, KEPT), (deep.slice(3, 100), None), (deep.slice(0, 0), None)]):
        expected = pa.Table.from_batches([one for one, _ in pairs]).to_pydict()
        for table in readers(lambda pairs=pairs: BatchReader(pairs[0][0].schema, iter(pairs))):  # type: ignore[misc]
            table.validate(full=True)
            assert table.to_pydict() == expected
    numbers = pa.record_batch({"n": pa.array(range(1 << 16)), "m": pa.array(range(1 << 16))})
    before = pa.total_allocated_bytes()
    (column,) = ds.Scanner.from_batches(BatchReader(numbers.schema, iter([(numbers, None)]))).to_table()["n"].chunks
    assert column.buffers()[1].address == numbers["n"].buffers()[1].address
    assert pa.total_allocated_bytes() - before < 1 << 16


def test_what_a_reader_of_batches_is_given_to_raise_comes_out_of_it() -> None:
    def failing() -> Iterator[tuple[pa.RecordBatch, None]]:
        yield PAIRS[0][0], None
        raise dis.errors.RemoteError("no more")

    with pytest.raises(dis.errors.RemoteError, match="no more"):
        BatchReader(SCHEMA, failing()).read_all()
    with pytest.raises(dis.errors.RemoteError, match="no more"):
        ds.Scanner.from_batches(BatchReader(SCHEMA, failing())).to_table()
    exported = pa.RecordBatchReader.from_stream(BatchReader(SCHEMA, failing()))
    exported.read_next_batch()
    for _ in range(2):  # after a failure the stream does not end as if it were complete
        with pytest.raises(pa.ArrowInvalid, match="no more"):
            exported.read_next_batch()
