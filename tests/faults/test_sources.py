"""Sources that fail, and clients that stop within the stream."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.errors import DissociatedError, RemoteError, SourceError
from support.helpers import case, wait_until

from .conftest import Good, Serve
from .peer import PATIENCE

BATCH = pa.record_batch({"n": pa.array(range(1000), pa.int64())})


def reader(batches: Iterator[pa.RecordBatch]) -> pa.RecordBatchReader:
    return pa.RecordBatchReader.from_batches(BATCH.schema, batches)


def failing(error: BaseException, after: int) -> Callable[[], pa.RecordBatchReader]:
    def batches() -> Iterator[pa.RecordBatch]:
        for _ in range(after):
            yield BATCH
        raise error

    return lambda: reader(batches())


#: Exceptions of a source, and the text that a client sees: only the kind, unless the error is meant for clients.
ERRORS = {
    "ValueError": (ValueError("the query was cancelled"), "failed (ValueError): the log of its server"),
    "KeyError": (KeyError("column"), "failed (KeyError): the log of its server"),
    "no reason": (RuntimeError(), "RuntimeError"),
    "lone surrogates": (ValueError("\udcff in a path"), "failed ("),
    "a long reason": (dis.errors.SourceError.for_peer("x" * 100_000), "x" * 1000),
    "ArrowInvalid": (pa.ArrowInvalid("not valid"), "failed (ArrowInvalid): the log of its server"),
    "MemoryError": (MemoryError("too much"), "failed (MemoryError): the log of its server"),
    "TimeoutError": (TimeoutError("the database is asleep"), "failed (TimeoutError): the log of its server"),
    "ours": (dis.errors.StoreError("the store is gone"), "failed (StoreError): the log of its server"),
    "StopIteration": (StopIteration(), "failed (RuntimeError)"),
}


def test_source_raises(serve: Serve) -> None:
    """Raise each error after a batch, and one of them at once and after many batches."""
    good = serve("shm:", "tcp://127.0.0.1:0", "inproc:")
    for name, after in [*((name, 1) for name in ERRORS), ("no reason", 0), ("no reason", 50)]:
        error, phrase = ERRORS[name]
        with case((name, after)):
            check_source_that_raises(good, error, phrase, after)


def check_source_that_raises(good: Good, error: BaseException, phrase: str, after: int) -> None:
    good.server.publish("bad", failing(error, after))
    for uri in good.server.locations("bad"):
        stream = dis.open_stream(uri, good.server.ticket("bad"), timeout=PATIENCE)
        for _ in range(after):  # The batches before the error are complete,
            assert stream.read_next_batch().equals(BATCH)
        with pytest.raises(RemoteError) as caught:
            stream.read_next_batch()
        assert phrase in str(caught.value)
        with pytest.raises(DissociatedError):  # and the stream does not end normally.
            stream.read_next_batch()
        del caught, stream
        good.check()


def test_source_cannot_be_opened(serve: Serve) -> None:
    good = serve("shm:")

    def opens_once() -> pa.RecordBatchReader:
        opened.append(None)
        if len(opened) > 2:  # once for the schema, once for a reader
            raise OSError("the table is locked")
        return reader(iter([BATCH]))

    opened: list[None] = []
    good.server.publish("bad", opens_once)
    (uri,) = good.server.locations("bad")
    assert dis.open_stream(uri, good.server.ticket("bad")).read_all().num_rows == 1000
    with pytest.raises(RemoteError, match=r"'bad' failed \(OSError\): the log of its server says more"):
        dis.open_stream(uri, good.server.ticket("bad"))

    def never() -> pa.RecordBatchReader:
        raise ValueError("no such query")

    with pytest.raises(SourceError, match="'worse' failed: ValueError: no such query"):
        good.server.publish("worse", never)
    with pytest.raises(SourceError, match="cannot publish a int"):
        good.server.publish("worse", lambda: 3)
    assert good.server.names() == ["bad", "good"]


def test_source_changes_its_schema(serve: Serve) -> None:
    good = serve("shm:")
    first = pa.table({"a": [1]})
    tables = iter([first, first, pa.table({"b": ["x"]})])  # once for the schema, then for each reader
    good.server.publish("bad", lambda: next(tables))
    (uri,) = good.server.locations("bad")
    assert dis.open_stream(uri, good.server.ticket("bad")).read_all().column_names == ["a"]
    with pytest.raises(RemoteError, match="has another schema"):
        dis.open_stream(uri, good.server.ticket("bad"))


def test_source_gives_batches_of_another_schema(serve: Serve) -> None:
    good = serve("tcp://127.0.0.1:0")
    other = pa.record_batch({"n": ["x"]})
    good.server.publish("bad", lambda: reader(iter([BATCH, other])))
    (uri,) = good.server.locations("bad")
    stream = dis.open_stream(uri, good.server.ticket("bad"))
    assert stream.read_next_batch().equals(BATCH)
    with pytest.raises(RemoteError, match=r"the source of 'bad' failed: .* different schema"):
        stream.read_next_batch()


def test_one_shot_source_is_used_up(serve: Serve) -> None:
    good = serve("shm:")
    good.server.publish("once", reader(iter([BATCH])))
    (uri,) = good.server.locations("once")
    assert dis.open_stream(uri, good.server.ticket("once")).read_all().num_rows == 1000
    with pytest.raises(RemoteError, match="which can be read once and was read"):
        dis.open_stream(uri, good.server.ticket("once"))


def test_table_that_cannot_be_encoded(serve: Serve) -> None:
    # libarrow does not write batches of 2**31 rows or more. Nulls take no memory.
    good = serve("shm:", "tcp://127.0.0.1:0")
    good.server.publish("huge", pa.table({"nothing": pa.nulls(2**31)}))
    for uri in good.server.locations("huge"):
        with pytest.raises(RemoteError, match=r"Cannot write arrays larger than 2\^31"):
            dis.open_stream(uri, good.server.ticket("huge"), timeout=PATIENCE).read_all()


def test_slow_source_exceeds_the_client_s_patience(serve: Serve) -> None:
    good = serve("shm:", "tcp://127.0.0.1:0", "inproc:")
    go_on = threading.Event()

    def slow() -> Iterator[pa.RecordBatch]:
        yield BATCH
        go_on.wait(PATIENCE)

    good.server.publish("slow", lambda: reader(slow()))
    for uri in good.server.locations("slow"):
        stream = dis.open_stream(uri, good.server.ticket("slow"), timeout=0.5)
        assert stream.read_next_batch().equals(BATCH)
        with pytest.raises(dis.errors.DeadlineExceeded, match=r"silent for 0.5 s"):
            stream.read_next_batch()
        del stream
    go_on.set()


# Clients that stop within the stream


@pytest.mark.parametrize("kind", ["static", "live", "partly inline"])
@pytest.mark.parametrize("batches", [0, 1, 3])
def test_reader_is_dropped(serve: Serve, kind: str, batches: int) -> None:
    good = serve("shm:", "tcp://127.0.0.1:0", "inproc:", inline_limit=1000 if kind == "partly inline" else 0)
    large = pa.record_batch({"n": np.arange(50_000)})
    small = large.slice(0, 3)
    table = pa.Table.from_batches([large] * 30 + [small] + [large] * 30)
    good.server.publish("many", (lambda: table.to_reader()) if kind == "live" else table)
    for bodies in "any", "packed":
        for uri in good.server.locations("many", bodies=bodies):
            stream = dis.open_stream(uri, good.server.ticket("many"), timeout=PATIENCE)
            held = [stream.read_next_batch() for _ in range(batches)]
            del stream
            good.check()
            for batch in held:
                assert batch.equals(large)
            del held
            if batches:
                del batch
            wait_until(good.alone, "everything is given back")


def test_columns_that_are_not_there(serve: Serve) -> None:
    good = serve("shm:", "tcp://127.0.0.1:0", "inproc:")
    for uri in good.server.locations("good"):
        with pytest.raises(dis.errors.ColumnNotFound, match="no column 'x'; there are n, name") as caught:
            dis.open_stream(uri, good.server.ticket("good"), columns=["n", "x"])
        wait_until(good.alone, "the connection is closed although the error is still held")
        del caught


def test_server_closes_under_its_clients(serve: Serve, table: pa.Table) -> None:
    stuck = threading.Event()

    def source() -> Iterator[pa.RecordBatch]:
        yield BATCH
        stuck.wait(PATIENCE)

    server = dis.Server(["shm:", "tcp://127.0.0.1:0", "inproc:"], catalog=None)
    server.publish("stuck", lambda: reader(source()))
    server.publish("table", table)
    held = dis.open_stream(server.locations("table")[0], server.ticket("table")).read_all()
    streams = [dis.open_stream(uri, server.ticket("stuck"), timeout=PATIENCE) for uri in server.locations("stuck")]
    for stream in streams:
        assert stream.read_next_batch().equals(BATCH)
    closing = threading.Thread(target=server.close)
    closing.start()
    for stream in streams:
        with pytest.raises((dis.errors.ConnectionClosed, dis.errors.RemoteProtocolError), match="closed"):
            stream.read_next_batch()
    stuck.set()
    closing.join(PATIENCE)
    assert not closing.is_alive()
    assert held.equals(table)
    with pytest.raises(DissociatedError, match="the server is closed"):
        server.publish("table", table)
    del held, streams, stream
    gc.collect()
