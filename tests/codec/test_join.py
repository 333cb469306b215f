"""libarrow decodes messages and leaves every array in the body that it arrived in."""

from __future__ import annotations

import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pytest

from dissociated.codec.join import join
from dissociated.codec.options import ReadOptions
from dissociated.codec.reader import close_idle
from dissociated.errors import DissociatedError, RemoteError, RemoteProtocolError, TransportError
from ipc.vectors import LZ4, SCHEMA
from support.helpers import PATIENCE

Pair: TypeAlias = tuple[bytes, pa.Buffer | None]
Pairs: TypeAlias = Generator[Pair, None, None]

BATCH = pa.record_batch({"n": np.arange(1000), "h": pa.array([1, None] * 500), "s": ["a", None] * 500})


def encoded(
    *batches: pa.RecordBatch, options: pa.ipc.IpcWriteOptions | None = None, **metadata: dict[str, str]
) -> list[Pair]:
    """Return the messages that libarrow writes for these batches, split by libarrow."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema, options=options) as writer:
        for batch in batches:
            writer.write_batch(batch, **metadata)
    messages = pa.ipc.MessageReader.open_stream(sink.getvalue())
    return [(one.metadata.to_pybytes(), None if one.type == "schema" else one.body) for one in messages]


class Feed:
    """A source of messages for `join` that records whether it was closed."""

    def __init__(self, pairs: list[Pair], error: type[Exception] | None = None) -> None:
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


def test_an_error_of_closing_the_source_is_raised() -> None:
    """Close a generator that fails at that, and then one that another thread reads, which closes it itself."""

    def source() -> Generator[int, None, None]:
        try:
            yield 1
            begun.set()
            going_on.wait(PATIENCE)
        finally:
            if not begun.is_set():
                raise ValueError("generator already executing")  # the words of Python's own error

    begun, going_on = threading.Event(), threading.Event()
    failing, running = source(), source()
    next(failing)
    with pytest.raises(ValueError, match="already executing"):
        close_idle(failing)
    next(running)
    with ThreadPoolExecutor(1) as threads:
        rest = threads.submit(list[int], running)
        assert begun.wait(PATIENCE)
        close_idle(running)
        going_on.set()
        assert rest.result(PATIENCE) == []


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
    """Decode a compressed buffer whose first 8 bytes announce a huge length."""
    assert LZ4.body is not None
    body = (1 << 56).to_bytes(8, "little") + LZ4.body[8:]
    reader = join(iter(Feed([(SCHEMA.header, None), (LZ4.header, pa.py_buffer(body))])), max_body=1 << 60)
    with pytest.raises(TransportError, match=r"there is no memory for what the peer sent: .* 72057594037927936 "):
        reader.read_next_batch()
