"""Small bodies that become large when they are decompressed."""

from __future__ import annotations

import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.errors import FormatError, RemoteProtocolError
from dissociated.ipc import Listener, StreamDecoder

from .conftest import Serve

SIZE = 1 << 26


def bomb(codec: str) -> pa.RecordBatch:
    assert codec in ("lz4", "zstd")
    return pa.record_batch({"n": pa.nulls(SIZE // 8, pa.int64()).fill_null(0)})


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_what_comes_out_is_bounded_before_it_does(serve: Serve, codec: str) -> None:
    good = serve("shm:", "tcp:")
    batch = bomb(codec)
    options = dis.WriteOptions(codec=codec)
    table = pa.Table.from_batches([batch])
    encoded = pa.table({"d": pa.DictionaryArray.from_arrays(pa.array([0], pa.int32()), pa.array(["x" * SIZE]))})
    good.server.publish("kept", table, options=options)
    good.server.publish("dictionary", encoded, options=options)
    good.server.publish("read", lambda: table.to_reader(), options=options)
    for name, whole in (("kept", table), ("dictionary", encoded), ("read", table)):
        for uri in good.server.locations(name):
            ticket = good.server.ticket(name)
            assert dis.open_stream(uri, ticket).read_all() == whole
            before = pa.total_allocated_bytes()
            with pytest.raises(RemoteProtocolError, match="bytes when decompressed; at most"):
                dis.open_stream(uri, ticket, max_body=SIZE // 2).read_all()
            assert pa.total_allocated_bytes() - before < SIZE // 2
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as writer:
        writer.write_batch(batch)
    with pytest.raises(FormatError, match="bytes when decompressed"):
        StreamDecoder(Listener(), max_body=SIZE // 2).consume(sink.getvalue())
