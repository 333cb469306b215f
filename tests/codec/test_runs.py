"""Batches that arrived together are read as if each had arrived alone, by every method of a reader."""

from __future__ import annotations

import struct
from collections.abc import Callable, Generator

import numpy as np
import pyarrow as pa
import pytest

from codec.test_join import BATCH, Pair, encoded
from dissociated.codec.options import ReadOptions
from dissociated.codec.runs import join_deliveries
from dissociated.errors import RemoteProtocolError
from dissociated.format.message import buffer_extents, parse_header
from dissociated.protocol.delivery import Delivered, Delivery, PackedBatches


def one(pair: Pair) -> Delivery:
    """Return a message as a delivery of its own."""
    return Delivery(0, pair[0], parse_header(pair[0]), pair[1])


def together(pairs: list[Pair]) -> PackedBatches:
    """Return record batches of one layout as they arrive in a run."""
    headers = np.array([np.frombuffer(header, np.uint8) for header, _ in pairs])
    bodies = b"".join(body.to_pybytes() for _, body in pairs if body is not None)
    return PackedBatches(1, headers, parse_header(pairs[0][0]), memoryview(bodies))


def read(*deliveries: Delivered, options: ReadOptions | None = None) -> pa.RecordBatchReader:
    """Return a reader of deliveries with inline bodies."""

    def attach(delivery: Delivery) -> Pair:
        return delivery.header, delivery.body

    return join_deliveries((delivered for delivered in deliveries), attach, options or ReadOptions())


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
    """Read runs, one of them too short to be used as such, and batches before, between and after them."""
    batches = [BATCH, *[pa.record_batch({"n": [n], "h": [n % 7], "s": ["x"]}, BATCH.schema) for n in range(200)], BATCH]
    schema, *pairs = encoded(*batches)

    reader = read(
        one(schema),
        one(pairs[0]),
        together(pairs[1:101]),
        one(pairs[101]),
        together(pairs[102:105]),
        together(pairs[105:201]),
        one(pairs[201]),
    )
    assert way(reader) == batches
    assert reader.stats.num_record_batches == len(batches)
    assert reader.stats.num_messages == len(batches) + 1
    with pytest.raises(StopIteration):
        reader.read_next_batch()


def test_what_came_together_whatever_it_is() -> None:
    """Read dictionaries, compressed bodies, different null counts, metadata, and no wanted fields as if one by one."""
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
            items: list[Delivered] = [*map(one, pairs[:first]), together(pairs[first:])]
            assert list(read(*items)) == batches
            reader: pa.RecordBatchReader = read(*items)
            assert reader.read_next_batch_with_custom_metadata().custom_metadata == {b"k": b"v"}
    schema, *pairs = encoded(*[batch.append_column("m", batch["n"]) for batch in plain])
    reader = read(one(schema), together(pairs), options=ReadOptions(included_fields=[1]))
    assert [batch["m"] for batch in reader] == [batch["n"] for batch in plain]


def test_arrays_that_came_together_lie_in_the_pool() -> None:
    pool = pa.proxy_memory_pool(pa.default_memory_pool())
    schema, *pairs = encoded(*[pa.record_batch({"n": [n]}) for n in range(100)])
    reader = read(one(schema), together(pairs), options=ReadOptions(memory_pool=pool))
    last = [*reader][-1]
    assert pool.bytes_allocated() > 0
    del reader, last
    assert pool.bytes_allocated() == 0


def test_a_batch_that_libarrow_refuses_among_others_that_came_together() -> None:
    schema, *pairs = encoded(*[pa.record_batch({"n": [n]}) for n in range(100)])
    header = bytearray(pairs[0][0])
    parsed = parse_header(bytes(header))
    assert buffer_extents(bytes(header), parsed)[1] == (0, 8)
    struct.pack_into("<q", header, parsed.buffers_at + 24, 1 << 20)  # the values, which exceed the body
    reader = read(one(schema), together([(bytes(header), body) for _, body in pairs]))
    for _ in range(2):
        with pytest.raises(RemoteProtocolError, match="what libarrow cannot read"):
            reader.read_next_batch()


def test_a_body_that_cannot_be_attached_ends_the_stream_at_once() -> None:
    schema, *pairs = encoded(BATCH, BATCH)
    ended = []

    def deliveries() -> Generator[Delivered, None, None]:
        try:
            yield from map(one, [schema, *pairs])
        finally:
            ended.append(True)

    def attach(delivery: Delivery) -> Pair:
        if delivery.body is not None:
            raise RemoteProtocolError("an address that nobody knows")
        return delivery.header, None

    reader = join_deliveries(deliveries(), attach, ReadOptions())
    for _ in range(2):
        with pytest.raises(RemoteProtocolError, match="an address that nobody knows"):
            reader.read_next_batch()
        assert ended == [True]
