"""Limits of metadata, which are equal on both sides: everything that can be published can be read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.errors import CatalogError, RemoteError, RemoteProtocolError, SourceError, StoreError
from dissociated.node.node import Node
from dissociated.store.store import Store

LIMIT = 1 << 16
MEDIA = ("inproc:", "tcp://127.0.0.1:0", "shm:")
BATCH = pa.record_batch({"n": [1, 2, 3]})


def schema_of(length: int) -> pa.Schema:
    """Return a schema whose message has slightly more than `length` bytes."""
    return BATCH.schema.with_metadata({"x": "x" * length})


def written(path: Path, schema: pa.Schema, custom: int = 0) -> str:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        writer.write_batch(BATCH.cast(schema), custom_metadata={"x": "x" * custom})
    return str(path)


@pytest.fixture
def server() -> Iterator[dis.Server]:
    with dis.Server(MEDIA, max_metadata=LIMIT) as made:
        yield made


def test_more_metadata_than_clients_take_is_not_published(server: dis.Server, tmp_path: Path) -> None:
    long, whole = schema_of(LIMIT), [BATCH.cast(schema_of(LIMIT))]
    sources = {
        "table": pa.Table.from_batches(whole),
        "reader": pa.RecordBatchReader.from_batches(long, iter(whole)),
        "callable": lambda: pa.RecordBatchReader.from_batches(long, iter(whole)),
        "file": written(tmp_path / "schema.arrows", long),
        "file, metadata of a batch": written(tmp_path / "batch.arrows", BATCH.schema, LIMIT),
    }
    for name, source in sources.items():
        with pytest.raises((SourceError, StoreError), match=r"at most 65,536 are sent and taken: put less into it"):
            server.publish(name, source)
    with pytest.raises((SourceError, StoreError), match="65,536"), server.writer("w", BATCH.schema) as writer:
        writer.write_batch(BATCH, {"x": "x" * LIMIT})
    assert server.names() == []
    with dis.connect(server.catalog_uri) as client:
        with pytest.raises(CatalogError, match="at most 65,536"):
            client.put("p", sources["callable"]())
        assert not client.list()


def test_metadata_within_a_stream_ends_it_with_the_reason(server: dis.Server, tmp_path: Path) -> None:
    path = written(tmp_path / "batch.arrows", BATCH.schema, LIMIT)
    server.publish("live", lambda: pa.ipc.open_stream(path))
    for uri in server.locations("live"):
        with pytest.raises(RemoteError, match=r"'live' has a message with 65,\d+ bytes of metadata"):
            dis.open_stream(uri, server.ticket("live")).read_all()


def test_more_than_64_mib_can_be_read_and_each_side_can_be_told_another_limit() -> None:
    table = pa.Table.from_batches([BATCH.cast(schema_of(65 << 20))])
    with dis.Server(["tcp:"], catalog=None) as server:
        server.publish("long", table)
        for uri in server.locations("long"):
            with pytest.raises(RemoteProtocolError, match=r"at most (67108864|67108869)"):
                dis.open_stream(uri, server.ticket("long"), max_metadata=64 << 20)
            reader = dis.open_stream(uri, server.ticket("long"))
            assert reader.schema.equals(table.schema, check_metadata=True)
            reader.close()
    with pytest.raises(SourceError, match="67,108,864"), dis.Server([], catalog=None, max_metadata=64 << 20) as server:
        server.publish("long", table)


def test_limits_are_those_of_one_message_to_the_byte(server: dis.Server) -> None:
    fits = next(
        schema
        for length in range(LIMIT - 512, LIMIT)
        if (schema := schema_of(length)).serialize().size - 8 == LIMIT  # without the prefix
    )
    server.publish("fits", pa.Table.from_batches([BATCH.cast(fits)]))
    for uri in server.locations("fits"):
        reader = dis.open_stream(uri, server.ticket("fits"), max_metadata=LIMIT)
        assert reader.schema.equals(fits, check_metadata=True)
        reader.close()
        with pytest.raises(RemoteProtocolError, match=r"at most (65528|65533)"):
            dis.open_stream(uri, server.ticket("fits"), max_metadata=LIMIT - 8)  # The padding may be omitted.
    longer = pa.Table.from_batches([BATCH.cast(fits.with_metadata({"x": fits.metadata[b"x"] + b"x" * 8}))])
    with pytest.raises(SourceError, match="65,536"):
        server.publish("does not", longer)


def test_a_node_refuses_it_before_anything_is_committed(tmp_path: Path) -> None:
    with (
        Node(store := Store(tmp_path / "store"), ["tcp:"], max_metadata=LIMIT) as node,
        dis.connect(node.uri) as client,
    ):
        client.put("p", BATCH)
        with pytest.raises(CatalogError, match="at most 65,536"):
            client.put("p", pa.Table.from_batches([BATCH.cast(schema_of(LIMIT))]))
        assert client.read("p").read_all().num_rows == 3
        assert len(store.versions()) == 1
