"""libarrow decodes, and leaves every array in the body that it came in."""

from __future__ import annotations

import struct
from collections.abc import Callable, Generator

import numpy as np
import pyarrow as pa
import pytest

from dissociated.codec.join import Messages, join
from dissociated.codec.options import ReadOptions
from dissociated.errors import DissociatedError, RemoteError, RemoteProtocolError, TransportError
from dissociated.format.message import buffer_extents, parse_header
from dissociated.protocol.run import PackedBatches
from ipc.vectors import LZ4, SCHEMA

Pairs = Generator[tuple[bytes, pa.Buffer | None], None, None]

BATCH = pa.record_batch({"n": np.arange(1000), "h": pa.array([1, None] * 500), "s": ["a", None] * 500})


def encoded(
    *batches: pa.RecordBatch, options: pa.ipc.IpcWriteOptions | None = None, **metadata: dict[str, str]
) -> list[tuple[bytes, pa.Buffer | None]]:
    """What libarrow writes for these batches, taken apart by libarrow."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema, options=options) as writer:
        for batch in batches:
            writer.write_batch(batch, **metadata)
    messages = pa.ipc.MessageReader.open_stream(sink.getvalue())
    return [(one.metadata.to_pybytes(), None if one.type == "schema" else one.body) for one in messages]


class Feed:
    """Messages for `join`, and whether it has closed them."""

    def __init__(self, pairs: list[tuple[bytes, pa.Buffer | None]], error: type[Exception] | None = None) -> None:
        self.given = 0
        self.closed = False
        self._pairs = pairs
        self._error = error

    def __iter__(self) -> Pairs:
        try:
            for pair in self._pairs:
                self.given += 1
                yield pair
            if self._error is not None:
                raise self._error("no more")
        finally:
            self.closed = True


def test_arrays_lie_in_the_bodies() -> None:
    pairs = encoded(BATCH)
    body = pairs[1][1]
    assert body is not None
    before = pa.total_allocated_bytes()
    (batch,) = join(iter(Feed(pairs)))
    assert pa.total_allocated_bytes() == before
    assert batch == BATCH
    for column in batch.columns:
        for buffer in column.buffers():
            assert buffer is None or body.address <= buffer.address <= body.address + body.size - buffer.size


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, pa.py_buffer])
def test_bodies_may_be_any_buffer(kind: type) -> None:
    header, body = encoded(BATCH)[1]
    assert body is not None
    pairs = [encoded(BATCH)[0], (header, kind(body.to_pybytes()))]
    assert list(join(iter(Feed(pairs)))) == [BATCH]


def test_messages_are_taken_one_by_one() -> None:
    feed = Feed(encoded(BATCH, BATCH, BATCH))
    reader = join(iter(feed))
    assert feed.given == 1
    for given in (2, 3, 4):
        assert reader.read_next_batch() == BATCH
        assert feed.given == given
    with pytest.raises(StopIteration):
        reader.read_next_batch()
    assert feed.closed


def test_dropping_the_reader_closes_the_messages() -> None:
    feed = Feed(encoded(BATCH, BATCH))
    reader = join(iter(feed))
    reader.read_next_batch()
    assert not feed.closed
    del reader
    assert feed.closed


@pytest.mark.parametrize(("raised", "again"), [(RemoteError, RemoteError), (ValueError, DissociatedError)])
def test_an_error_comes_out_and_never_looks_like_an_end(raised: type[Exception], again: type[Exception]) -> None:
    feed = Feed(encoded(BATCH), raised)
    reader = join(iter(feed))
    assert reader.read_next_batch() == BATCH
    with pytest.raises(raised, match="no more"):
        reader.read_next_batch()
    for _ in range(2):
        with pytest.raises(again, match="no more"):
            reader.read_next_batch()


def test_an_error_keeps_nothing_alive() -> None:
    feed = Feed(encoded(BATCH), RemoteError)
    reader = join(iter(feed))
    body = reader.read_next_batch()["n"]
    allocated = pa.total_allocated_bytes()
    for _ in range(3):
        with pytest.raises(RemoteError):
            reader.read_next_batch()
    del reader, body, feed
    assert pa.total_allocated_bytes() < allocated


def test_some_fields() -> None:
    feed = Feed(encoded(BATCH))
    reader = join(iter(feed), ReadOptions(included_fields=[2]))
    assert list(reader) == [BATCH.select(["s"])]


def test_content_that_libarrow_refuses() -> None:
    schema, (header, body) = encoded(BATCH)
    assert body is not None
    reader = join(iter(Feed([schema, (header, body.slice(0, body.size - 64))])))
    with pytest.raises(RemoteProtocolError, match="what libarrow cannot read"):
        reader.read_next_batch()


def test_compressed_content_that_would_be_longer_than_memory() -> None:
    """Its first 8 bytes say how long."""
    assert LZ4.body is not None
    body = (1 << 56).to_bytes(8, "little") + LZ4.body[8:]
    reader = join(iter(Feed([(SCHEMA.header, None), (LZ4.header, pa.py_buffer(body))])), max_body=1 << 60)
    with pytest.raises(TransportError, match=r"there is no memory for what the peer sent: .* 72057594037927936 "):
        reader.read_next_batch()


def together(pairs: list[tuple[bytes, pa.Buffer | None]]) -> PackedBatches:
    """These record batches, alike but for some numbers, as they arrive in a run."""
    headers = np.array([np.frombuffer(header, np.uint8) for header, _ in pairs])
    bodies = b"".join(body.to_pybytes() for _, body in pairs if body is not None)
    return PackedBatches(1, headers, parse_header(pairs[0][0]), memoryview(bodies))


WAYS: dict[str, Callable[[pa.RecordBatchReader], list[pa.RecordBatch]]] = {
    "one by one": list,
    "all": lambda reader: reader.read_all().to_batches(),
    "through C++": lambda reader: list(pa.RecordBatchReader.from_stream(reader)),
    "with metadata": lambda reader: [reader.read_next_batch_with_custom_metadata()[0] for _ in range(202)],
    "half of them through C++": lambda reader: [
        *(reader.read_next_batch() for _ in range(70)),
        *reader.read_all().to_batches(),
    ],
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_batches_that_came_together_may_be_read_in_any_way(way: Callable[..., list[pa.RecordBatch]]) -> None:
    """Two runs, one too short to be worth anything, and batches before, between and after them."""
    batches = [BATCH, *[pa.record_batch({"n": [n], "h": [n % 7], "s": ["x"]}, BATCH.schema) for n in range(200)], BATCH]
    schema, *pairs = encoded(*batches)

    def messages() -> Messages:
        yield schema
        yield pairs[0]
        yield together(pairs[1:101])
        yield pairs[101]
        yield together(pairs[102:105])
        yield together(pairs[105:201])
        yield pairs[201]

    reader = join(messages())
    assert way(reader) == batches
    assert reader.stats.num_record_batches == len(batches)
    assert reader.stats.num_messages == len(batches) + 1
    with pytest.raises(StopIteration):
        reader.read_next_batch()


def test_what_came_together_whatever_it_is() -> None:
    """Dictionaries, compression, null counts that differ, metadata, none of the fields wanted: as one by one."""
    count = 50
    plain = [pa.record_batch({"n": [n, None] if n % 2 else [None, n]}) for n in range(count)]
    nulls = [
        pa.record_batch({"n": pa.array([n, n], pa.int64(), mask=np.array([True, n % 2 == 0]))}) for n in range(count)
    ]
    words = [pa.record_batch({"d": pa.DictionaryArray.from_arrays([n % 2], ["a", "b"])}) for n in range(count)]
    none = [pa.record_batch([], schema=pa.schema([])) for _ in range(count)]
    for batches in (plain, nulls, words, none):
        for codec in (None, "lz4"):
            pairs = encoded(*batches, options=pa.ipc.IpcWriteOptions(compression=codec), custom_metadata={"k": "v"})
            first = len(pairs) - count  # the schema, and dictionaries
            messages: list[tuple[bytes, pa.Buffer | None] | PackedBatches] = [*pairs[:first], together(pairs[first:])]
            assert list(join(one for one in messages)) == batches
            reader: pa.RecordBatchReader = join(one for one in messages)
            assert reader.read_next_batch_with_custom_metadata().custom_metadata == {b"k": b"v"}
    schema, *pairs = encoded(*[one.append_column("m", one["n"]) for one in plain])
    reader = join((one for one in (schema, together(pairs))), ReadOptions(included_fields=[1]))
    assert [one["m"] for one in reader] == [one["n"] for one in plain]


def test_arrays_that_came_together_lie_in_the_pool() -> None:
    pool = pa.proxy_memory_pool(pa.default_memory_pool())
    schema, *pairs = encoded(*[pa.record_batch({"n": [n]}) for n in range(100)])
    reader = join((one for one in (schema, together(pairs))), ReadOptions(memory_pool=pool))
    last = [*reader][-1]
    assert pool.bytes_allocated() > 0
    del reader, last
    assert pool.bytes_allocated() == 0


def test_a_batch_that_libarrow_refuses_among_others_that_came_together() -> None:
    schema, *pairs = encoded(*[pa.record_batch({"n": [n]}) for n in range(100)])
    header = bytearray(pairs[0][0])
    parsed = parse_header(bytes(header))
    assert buffer_extents(bytes(header), parsed)[1] == (0, 8)
    struct.pack_into("<q", header, parsed.buffers_at + 24, 1 << 20)  # the values, which leave the body
    reader = join(one for one in (schema, together([(bytes(header), body) for _, body in pairs])))
    for _ in range(2):
        with pytest.raises(RemoteProtocolError, match="what libarrow cannot read"):
            reader.read_next_batch()
