"""Streams that are read once for several consumers: each has its own position and its own leases."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.flight
import pytest

import dissociated as dis
from dissociated.errors import TransportError
from dissociated.memory import live as live_memory
from dissociated.server import connections
from memory.maps import shared_bytes
from support.helpers import PATIENCE, Serve, clients_end, connections_left, location, no_threads, open_live, wait_until

SCHEMA = pa.schema([("n", pa.int64()), ("s", pa.string())])
ROWS = 10_000
MEDIA = ("shm:", "tcp://127.0.0.1:0", "inproc:")


def batch(number: int) -> pa.RecordBatch:
    return pa.record_batch({"n": np.full(ROWS, number), "s": [f"batch {number}"] * ROWS}, SCHEMA)


def reader(batches: Iterator[pa.RecordBatch], schema: pa.Schema = SCHEMA) -> pa.RecordBatchReader:
    return pa.RecordBatchReader.from_batches(schema, batches)


class Fed:
    """A source that yields the batches that the test puts in. `closed` is set when its reader releases it."""

    def __init__(self, schema: pa.Schema = SCHEMA) -> None:
        self.put = SimpleQueue[Any]().put
        self._queue: SimpleQueue[Any] = self.put.__self__  # type: ignore[attr-defined]
        self.closed = threading.Event()
        self._schema = schema

    def reader(self) -> pa.RecordBatchReader:
        return reader(self._batches(), self._schema)

    def _batches(self) -> Iterator[pa.RecordBatch]:
        try:
            while (item := self._queue.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self.closed.set()

    def __enter__(self) -> Fed:
        return self

    def __exit__(self, *_: object) -> None:
        self.put(None)


def numbers(source: pa.RecordBatchReader) -> list[int]:
    found = []
    for one in source:
        one.validate(full=True)
        assert one["n"].unique().to_pylist() == [one["n"][0].as_py()]
        assert one["s"][-1].as_py() == f"batch {one['n'][0].as_py()}"
        found.append(one["n"][0].as_py())
    return found


def test_all_consumers_get_the_same_stream_over_every_transport(serve: Serve) -> None:
    """25 MB pass through 2 MB, by address and inline, and through the catalog's own DoGet."""
    server = serve(*MEDIA, catalog="grpc://127.0.0.1:0", live_limit=2 << 20)
    reads = threading.Lock()

    def source() -> pa.RecordBatchReader:
        assert reads.acquire(blocking=False), "it is opened once"
        return reader(map(batch, range(100)))

    server.publish("live", source, live=dis.Live(consumers=8))

    def consume(which: int) -> list[int]:
        if which == 7:
            with dis.connect(server.catalog_uri) as client:
                return numbers(client.read("live", transport="grpc"))
        if which == 6:
            packed = location(server, "live", "shm", bodies="packed")
            return numbers(dis.open_stream(packed, server.ticket("live")))
        return numbers(open_live(server, MEDIA[which % 3].partition(":")[0]))

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(consume, range(8))) == [list(range(100))] * 8
    assert connections_left(server) == 0
    clients_end()
    assert shared_bytes("live") == 0


def test_a_stream_that_could_not_begin_begins_with_the_next_consumer(serve: Serve) -> None:
    server = serve("tcp://127.0.0.1:0")
    server.publish("live", lambda: reader(map(batch, range(2))), live=dis.Live(late="refuse"))
    with no_threads(), pytest.raises(TransportError, match=r"cannot start the thread .*: can't start new thread"):
        server.dataset("live").open_reader()
    assert numbers(open_live(server, "tcp")) == [0, 1]


@pytest.mark.parametrize("columns", [None, ["n"]])
def test_a_client_of_flight_that_is_gone_is_no_consumer(serve: Serve, columns: list[str] | None) -> None:
    """It waits for the second consumer, and its call is cancelled. The stream begins with two others."""
    server = serve("tcp://127.0.0.1:0", catalog="grpc://127.0.0.1:0", ticket_lifetime=60)
    with Fed() as fed, dis.connect(server.catalog_uri) as client:
        server.publish("live", fed.reader(), live=dis.Live(consumers=2, late="refuse"))
        ticket = server.ticket("live", columns=columns)
        gone = pa.flight.connect(server.catalog_uri).do_get(pa.flight.Ticket(ticket))
        wait_until(lambda: server.dataset("live").readers == 1, "the server sends to the client")
        gone.cancel()
        wait_until(lambda: server.dataset("live").readers == 0, "the server notices that the client is gone")
        first, second = client.read("live", transport="grpc"), open_live(server, "tcp")
        fed.put(batch(0))
        fed.put(None)
        assert [numbers(one) for one in (first, second)] == [[0], [0]]


@pytest.mark.parametrize("medium", MEDIA)
def test_a_client_with_a_ticket_for_some_columns_that_is_gone_is_no_consumer(serve: Serve, medium: str) -> None:
    server = serve(medium, ticket_lifetime=60)
    scheme = medium.partition(":")[0]
    with Fed() as fed:
        server.publish("live", fed.reader(), live=dis.Live(consumers=2))
        at, ticket = location(server, "live", scheme), server.ticket("live", columns=["n"])
        dis.open_stream(at, ticket).close()
        wait_until(lambda: server.dataset("live").readers == 0, "the server notices that the first is gone")
        some, whole = dis.open_stream(at, ticket), open_live(server, scheme)
        fed.put(batch(0))
        assert [one.read_next_batch()["n"][0].as_py() for one in (some, whole)] == [0, 0]
        del some
        wait_until(lambda: server.dataset("live").readers == 1, "the server notices that the second is gone")


def test_a_late_consumer_joins_where_the_stream_is(serve: Serve) -> None:
    server = serve(*MEDIA)
    with Fed() as fed:
        server.publish("live", fed.reader(), live=dis.Live())
        first = open_live(server, "shm")
        for number in range(3):
            fed.put(batch(number))
            assert first.read_next_batch()["n"][0].as_py() == number
        late = [open_live(server, scheme) for scheme in ("shm", "tcp", "inproc")]
        for number in range(3, 6):
            fed.put(batch(number))
        fed.put(None)
        assert [numbers(one) for one in (first, *late)] == [[3, 4, 5]] * 4


def test_a_late_consumer_is_refused_where_the_publisher_says_so(serve: Serve) -> None:
    server = serve(*MEDIA)
    with Fed() as fed:
        server.publish("live", fed.reader(), live=dis.Live(late="refuse", consumers=2))
        first, second = open_live(server, "shm"), open_live(server, "tcp")
        with pytest.raises(dis.errors.RemoteError, match="'live' has begun, and refuses late readers"):
            open_live(server, "shm")
        fed.put(batch(0))
        fed.put(None)
        assert [numbers(first), numbers(second)] == [[0], [0]]
    with pytest.raises(dis.errors.RemoteError, match="has ended"):
        open_live(server, "shm")


def test_nothing_is_read_before_enough_consumers_are_there(serve: Serve) -> None:
    server = serve("shm:")
    asked = threading.Event()

    def batches() -> Iterator[pa.RecordBatch]:
        asked.set()
        yield batch(0)

    server.publish("live", reader(batches()), live=dis.Live(consumers=2))
    first = open_live(server, "shm")
    assert first.schema == SCHEMA  # a waiting consumer already knows the schema
    assert not asked.is_set()
    second = open_live(server, "shm")
    assert asked.wait(PATIENCE)
    assert numbers(first) == numbers(second) == [0]


def test_a_stream_that_all_have_left_waits_for_the_next_one(serve: Serve) -> None:
    server = serve("shm:", "tcp://127.0.0.1:0")
    with Fed() as fed:
        server.publish("live", fed.reader(), live=dis.Live())
        first = open_live(server, "tcp")
        fed.put(batch(0))
        assert first.read_next_batch()["n"][0].as_py() == 0
        del first
        assert connections_left(server) == 0
        fed.put(batch(1))
        fed.put(None)
        assert numbers(open_live(server, "shm")) == [1]


@pytest.mark.parametrize("rows", [ROWS, 1])
def test_a_stream_that_takes_nobody_ends_when_all_have_left(serve: Serve, rows: int) -> None:
    server = serve("shm:")
    with Fed() as fed:
        server.publish("live", fed.reader(), live=dis.Live(late="refuse"))
        open_live(server, "shm")
        assert connections_left(server) == 0
        fed.put(batch(0)[:rows])
        assert fed.closed.wait(PATIENCE)
        server.dataset("live").wait_closed(PATIENCE)
        with pytest.raises(dis.errors.RemoteError, match="has ended"):
            open_live(server, "shm")


WORDS = [["a", "b"], ["a", "b", "c"], ["x"], ["x", "y"], ["x", "y", "z"]]


@pytest.mark.parametrize("deltas", [False, True], ids=["replaced", "deltas"])
@pytest.mark.parametrize("scheme", ["shm", "tcp", "inproc"])
def test_a_late_consumer_gets_the_dictionaries_as_they_are(serve: Serve, scheme: str, deltas: bool) -> None:
    def words(number: int) -> pa.RecordBatch:
        some = WORDS[number]
        inner = pa.DictionaryArray.from_arrays(pa.array([len(some) - 1, 0], pa.int8()), some)
        fixed = pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.int8()), ["never", "changes"])
        return pa.record_batch([inner, pa.StructArray.from_arrays([fixed, inner], ["f", "d"])], ["d", "t"])

    def expected(number: int) -> list[dict[str, Any]]:
        last = WORDS[number][-1], WORDS[number][0]
        return [{"d": d, "t": {"f": f, "d": d}} for d, f in zip(last, ("never", "changes"), strict=True)]

    server = serve(*MEDIA)
    for start in range(1, len(WORDS)):
        with Fed(words(0).schema) as fed:
            options = dis.WriteOptions(emit_dictionary_deltas=deltas)
            server.publish("live", fed.reader(), options=options, live=dis.Live())
            first = open_live(server, "shm")
            for number in range(start):
                fed.put(words(number))
                assert first.read_next_batch().to_pylist() == expected(number)
            late, narrow = open_live(server, scheme), open_live(server, scheme, columns=["t"])
            for number in range(start, len(WORDS)):
                fed.put(words(number))
                for one in first, late:
                    assert one.read_next_batch().to_pylist() == expected(number)
                assert narrow.read_next_batch().to_pylist() == [{"t": row["t"]} for row in expected(number)]
            fed.put(None)
            assert [list(one) for one in (first, late, narrow)] == [[], [], []]


@pytest.mark.parametrize("scheme", ["shm", "tcp", "inproc"])
def test_each_consumer_chooses_its_columns(serve: Serve, scheme: str) -> None:
    server = serve(*MEDIA, live_limit=2 << 20)
    server.publish("live", reader(map(batch, range(50))), live=dis.Live(consumers=4))
    readers = [open_live(server, scheme, columns=columns) for columns in (["n"], ["s"], [], None)]

    def consume(one: pa.RecordBatchReader) -> list[tuple[int, list[dict[str, Any]]]]:
        return [(some.num_rows, some.slice(0, 1).to_pylist()) for some in one]

    with ThreadPoolExecutor(4) as pool:
        arrived = list(pool.map(consume, readers))
    for columns, batches in zip((["n"], ["s"], [], ["n", "s"]), arrived, strict=True):
        assert batches == [(ROWS, batch(number).slice(0, 1).select(columns).to_pylist()) for number in range(50)]
    with pytest.raises(dis.errors.ColumnNotFound, match="no column 'x'; there are n, s"):
        open_live(server, scheme, columns=["x"])


def test_memory_that_one_client_freed_stays_readable_for_another(serve: Serve) -> None:
    server = serve("shm:")
    server.publish("live", reader(map(batch, range(3))), live=dis.Live(consumers=2))
    one, other = open_live(server, "shm"), open_live(server, "shm")
    kept = other.read_next_batch()
    assert numbers(one) == [0, 1, 2]
    del one
    assert numbers(other) == [1, 2]
    del other
    assert kept == batch(0)
    assert shared_bytes("live") > 0
    del kept
    assert connections_left(server) == 0
    clients_end()
    assert shared_bytes("live") == 0


@pytest.mark.parametrize("end", ["fails", "dropped", "replaced", "closed"])
def test_every_consumer_learns_why_there_is_no_more_and_keeps_what_it_has(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr(connections, "TELL_TIMEOUT", PATIENCE)
    server = serve(*MEDIA)
    with Fed() as fed:
        server.publish("live", fed.reader(), live=dis.Live(consumers=4))
        here = server.dataset("live").open_reader()
        readers = [open_live(server, scheme) for scheme in ("shm", "tcp", "inproc")]
        fed.put(batch(0))
        held = [one.read_next_batch() for one in (here, *readers)]
        if end == "fails":
            fed.put(ValueError("the sensor is on fire"))
        elif end == "dropped":
            server.drop("live")
        elif end == "replaced":
            server.publish("live", batch(7))
        else:
            server.close()
        for one in readers:
            with pytest.raises(dis.errors.DissociatedError) as caught:
                one.read_next_batch()
            if end == "fails":
                assert "the source of 'live' failed (ValueError)" in str(caught.value)
            elif end == "closed":
                assert "the server of the live stream 'live' is closing" in str(caught.value)
            else:
                assert "'live' was dropped by whoever published it" in str(caught.value)
            del caught
        reason = {"fails": "says more", "closed": "the server of the live stream 'live' is closing"}.get(end, "dropped")
        with pytest.raises(dis.errors.DissociatedError, match=reason):
            here.read_next_batch()
        # Other streams may take the memory.
        if end == "replaced":
            assert open_live(server, "shm").read_all().num_rows == ROWS
        assert held == [batch(0)] * 4
        if end == "fails":
            assert shared_bytes("live") > 0  # a consumer still holds it
            with pytest.raises(dis.errors.RemoteError, match="says more"):
                open_live(server, "shm")
        if end == "replaced":
            server.drop("live")
        del readers, one, held, here
        assert connections_left(server) == 0
        clients_end()
        assert shared_bytes("live") == 0


def test_a_consumer_that_holds_up_the_others_is_cut_off(serve: Serve) -> None:
    """The batches that it holds stay as they are; the others receive everything."""
    server = serve(*MEDIA, live_limit=2 << 20)
    server.publish("live", reader(map(batch, range(100))), live=dis.Live(consumers=3, stall_timeout=1.0))
    stalled = open_live(server, "shm")
    with ThreadPoolExecutor(2) as pool:
        others = [pool.submit(numbers, open_live(server, scheme)) for scheme in ("shm", "tcp")]
        held = [stalled.read_next_batch()]
        assert [other.result(PATIENCE) for other in others] == [list(range(100))] * 2
    with pytest.raises(dis.errors.RemoteError, match=r"held up the others for 1 s: it was cut off"):
        held.extend(stalled)
    assert 1 <= len(held) < 20
    assert held == [batch(number) for number in range(len(held))]
    del held, stalled
    assert connections_left(server) == 0
    clients_end()
    assert shared_bytes("live") == 0


def test_a_slow_consumer_is_waited_for(serve: Serve) -> None:
    """It takes longer in all than a consumer may stall, but no single pause is that long."""
    server = serve("shm:", live_limit=1 << 20)
    server.publish("live", reader(map(batch, range(20))), live=dis.Live(consumers=2, stall_timeout=1.0))
    slow = open_live(server, "shm")
    with ThreadPoolExecutor(1) as pool:
        fast = pool.submit(numbers, open_live(server, "shm"))
        found = []
        for one in slow:
            found.append(one["n"][0].as_py())
            threading.Event().wait(0.06)  # processing takes time
        assert found == fast.result(PATIENCE) == list(range(20))


def test_a_consumer_that_only_frees_is_waited_for(serve: Serve) -> None:
    """It reads nothing while it frees batches, so that the server waits in a send of addresses."""
    schema = pa.schema([(f"c{column}", pa.int64()) for column in range(64)])  # some 40 batches fill a socket

    def wide(number: int) -> pa.RecordBatch:
        return pa.record_batch([np.full(64, number)] * len(schema), schema)

    server = serve("shm:", live_limit=4 << 20, inline_limit=0)
    source = pa.RecordBatchReader.from_batches(schema, map(wide, range(300)))
    server.publish("live", source, live=dis.Live(stall_timeout=1.0))
    slow = open_live(server, "shm")
    held = [slow.read_next_batch() for _ in range(20)]
    for number in range(20):
        assert held.pop(0) == wide(number)
        threading.Event().wait(0.08)  # processing takes time
    assert [one[0][0].as_py() for one in slow] == [*range(20, 300)]


@pytest.mark.parametrize("stall_timeout", [PATIENCE, float("inf"), 1e300])
def test_a_consumer_that_stops_does_not_hold_up_the_others(serve: Serve, stall_timeout: float) -> None:
    server = serve("shm:", live_limit=1 << 20)
    server.publish("live", reader(map(batch, range(50))), live=dis.Live(consumers=2, stall_timeout=stall_timeout))
    one, other = open_live(server, "shm"), open_live(server, "shm")
    kept = one.read_next_batch()
    del one  # it reads no further, and still holds a batch
    assert numbers(other) == list(range(50))
    assert kept == batch(0)


def test_what_a_consumer_that_stops_was_not_sent_any_more_is_free(serve: Serve) -> None:
    """It holds a batch of half the limit. The server cannot send the next one, of which the consumer knows nothing."""
    large = pa.record_batch({"n": np.arange(7 << 13)})
    server = serve("shm:", live_limit=1 << 20)
    with Fed(large.schema) as fed:
        server.publish("live", fed.reader(), live=dis.Live(consumers=2, stall_timeout=2 * PATIENCE))
        one, other = open_live(server, "shm"), open_live(server, "shm")
        fed.put(large)
        kept = one.read_next_batch()
        assert other.read_next_batch() == large
        del one
        for _ in range(4):
            fed.put(large)
            assert other.read_next_batch() == large
        assert kept == large


def test_a_broadcast_goes_on_in_another_region(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_memory, "SPAN", 1 << 20)
    monkeypatch.setattr(live_memory.LiveRegion, "size", 1 << 20)
    server = serve("shm:", "tcp://127.0.0.1:0")
    server.publish("live", reader(map(batch, range(60))), live=dis.Live(consumers=2))
    one, other = open_live(server, "shm"), open_live(server, "tcp")
    with ThreadPoolExecutor(1) as pool:
        kept = pool.submit(list, one)
        assert numbers(other) == list(range(60))
        assert kept.result(PATIENCE) == [batch(number) for number in range(60)]
        del kept


def test_bodies_without_bytes_and_small_ones(serve: Serve) -> None:
    schema = pa.schema([("n", pa.int64())])
    sent = [pa.record_batch({"n": pa.array(range(rows), pa.int64())}) for rows in (0, 1, 0, 5000, 3)]
    server = serve(*MEDIA, inline_limit=1000)
    server.publish("live", reader(iter(sent), schema), live=dis.Live(consumers=3))
    readers = [open_live(server, scheme) for scheme in ("shm", "tcp", "inproc")]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(list, readers)) == [sent] * 3


def test_metadata_and_bodies_come_over_one_connection(serve: Serve) -> None:
    server = serve("tcp://127.0.0.1:0")
    server.publish("live", batch(0), live=dis.Live())
    pair = [server.locations("live", streams=streams)[0] for streams in ("metadata", "bodies")]
    with pytest.raises(dis.errors.RemoteError, match="request all of it over one"):
        dis.open_stream(pair, server.ticket("live"))


@pytest.mark.parametrize(
    "arguments", [{"late": "maybe"}, {"consumers": 0}, {"stall_timeout": 0}, {"stall_timeout": float("nan")}]
)
def test_options_that_make_no_sense(arguments: dict[str, Any]) -> None:
    with pytest.raises(dis.errors.OptionError):
        dis.Live(**arguments)


def test_a_source_that_is_no_stream_cannot_be_published_live(serve: Serve) -> None:
    server = serve("shm:")
    for source in ("a path", b"bytes", pa.Tensor.from_numpy(np.arange(3))):
        with pytest.raises(dis.errors.SourceError, match=r"cannot publish a .*, or, without live= and .* the path"):
            server.publish("live", source, live=dis.Live())


@pytest.mark.parametrize("live", [None, dis.Live()])
def test_a_schema_is_that_of_an_iterator_or_a_list(serve: Serve, live: dis.Live | None) -> None:
    server = serve("tcp:")
    for source, rows in ((iter([]), 0), ([], 0), ([batch(0)], ROWS), (lambda: [batch(0), batch(1)], 2 * ROWS)):
        server.publish("live", source, schema=SCHEMA, live=live)
        table = open_live(server, "tcp").read_all()
        assert (table.schema, table.num_rows) == (SCHEMA, rows)
    other = pa.schema([("m", pa.int64())])
    for source in (batch(0), reader(iter([batch(0)]))):
        with pytest.raises(dis.errors.OptionError, match="has its own schema"):
            server.publish("live", source, schema=SCHEMA, live=live)
    with pytest.raises(dis.errors.SourceError, match="there is no column 'm'"):
        server.publish("live", lambda: reader(iter([batch(0)])), schema=other, live=live)
