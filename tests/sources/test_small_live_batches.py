"""Live streams of small batches: they count by their size and travel many at a time, but none waits alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count, product
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import dissociated as dis
from memory.maps import shared_bytes
from support.helpers import PATIENCE, Serve, connections_left, open_live, wait_until
from support.machine import missing

SCHEMA = pa.schema([("n", pa.int64()), ("s", pa.string()), ("d", pa.dictionary(pa.int8(), pa.string()))])
MEDIA = ("shm:", "tcp://127.0.0.1:0", "inproc:")
WORDS = pa.array(["a", "b", "c"])

#: How to publish: a single read for all readers, or a read for each.
SHARED_OR_NOT: list[dict[str, Any]] = [{"live": dis.Live()}, {}]


def test_a_reader_may_be_many_small_batches_behind(serve: Serve) -> None:
    """6,000 batches of one row are 100 kB; in pages of their own they would be 24 MB.

    The reader pauses until all are there.
    """
    rows = pa.record_batch({"n": np.arange(6_000), "v": np.arange(6_000) / 7})
    exhausted = threading.Event()

    def source() -> Iterator[pa.RecordBatch]:
        for row in range(rows.num_rows):
            yield rows.slice(row, 1)
        exhausted.set()

    server = serve("shm:", "tcp://127.0.0.1:0", live_limit=16 << 20)
    for scheme in ("shm", "tcp"):
        exhausted.clear()
        reader = pa.RecordBatchReader.from_batches(rows.schema, source())
        server.publish("live", reader, live=dis.Live(stall_timeout=0.5))
        one = open_live(server, scheme)
        first = one.read_next_batch()
        assert exhausted.wait(PATIENCE), "it held up the source"
        assert pa.Table.from_batches([first, *one]).combine_chunks() == pa.Table.from_batches([rows])
        assert connections_left(server) == 0


def test_what_waits_is_within_the_limit_whatever_its_size(serve: Serve) -> None:
    """The source stops when a paused reader is that far behind, continues with it, and gives up on it in the end."""
    limit = 1 << 20
    for size in (1, 1000, 4000):
        batch = pa.record_batch({"n": np.arange(size)})
        given = [0]

        def source(batch: pa.RecordBatch = batch, given: list[int] = given) -> Iterator[pa.RecordBatch]:
            for number in range(20_000):
                given[0] = number
                yield batch

        server = serve("shm:", live_limit=limit, stall_timeout=PATIENCE)
        reader = pa.RecordBatchReader.from_batches(batch.schema, source())
        server.publish("live", reader, live=dis.Live(stall_timeout=0.3))
        one = open_live(server, "shm")
        held = [one.read_next_batch()]

        def given_up(server: dis.Server = server) -> bool:
            return server.status().consumers[0].state == "cut off"

        wait_until(given_up, "it is given up")
        assert given[0] * batch.nbytes <= 4 * limit  # the waiting batches, and those in the socket and at its two ends
        assert shared_bytes("live") <= limit + (1 << 16)
        with pytest.raises(dis.errors.RemoteError, match="held up the others"):
            held.extend(one)
        assert 1 < len(held) < 20_000
        assert all(other == batch for other in held)
        del one, held
        assert connections_left(server) == 0


@pytest.fixture
def native() -> list[str]:
    """Return the media of the installed libraries.

    The check opens descriptors of UCX, so it runs before the descriptors of a test are counted.
    """
    return [
        *(() if missing("ucx") else ("ucx:", "ucx:?err_mode=none")),
        *(() if missing("libfabric") else ("fabric:",)),
    ]


def test_batches_of_all_sizes_in_one_stream(native: list[str], serve: Serve) -> None:
    """The stream has runs of similar batches, others between them, large ones and changing dictionaries.

    Every reader gets all batches, in order.
    """
    values = np.random.default_rng(5)
    sizes = [*[1] * 40, *values.integers(0, 3, 60), 5000, *[2] * 30, 0, 700, *values.integers(0, 900, 60), *[1] * 100]
    sent = []
    for number, size in enumerate(sizes):
        words = pa.DictionaryArray.from_arrays(
            values.integers(0, 2, size).astype(np.int8), WORDS.slice(number % 90 // 89)
        )
        texts = ["x" * (number % 50 // 49)] * size
        sent.append(pa.record_batch([np.full(size, number), pa.array(texts, pa.string()), words], schema=SCHEMA))
    server = serve(*MEDIA, *native)
    for shared, names in product((True, False), (["n", "s", "d"], ["n", "s"], ["n"])):
        others = native if names == ["n", "s"] else []  # connecting over these takes its time
        options: dict[str, Any] = {"live": dis.Live(consumers=4 + len(others))} if shared else {}
        some = [one.select(names) for one in sent]
        server.publish("live", partial(pa.RecordBatchReader.from_batches, some[0].schema, some), **options)
        readers = [open_live(server, scheme) for scheme in ("shm", "tcp", "inproc")]
        readers.append(open_live(server, "tcp", columns=["n"]))
        readers[:0] = [
            dis.open_stream(uri, server.ticket("live"), timeout=PATIENCE)
            for uri in server.locations("live")
            if others and uri.startswith(("ucx", "fabric"))
        ]
        whole: list[list[pa.RecordBatch]]
        narrow: list[pa.RecordBatch]
        with ThreadPoolExecutor(len(readers)) as pool:
            *whole, narrow = pool.map(list, readers)
        assert whole == [some] * (3 + len(others)), (options, names)
        assert narrow == [one.select(["n"]) for one in sent], (options, names)


def test_what_a_source_gave_before_it_failed_arrives(serve: Serve) -> None:
    batch = pa.record_batch({"n": [1]})
    server = serve(*MEDIA)
    for options, length, scheme in product(SHARED_OR_NOT, (1, 2, 100), ("shm", "tcp", "inproc")):

        def source(length: int = length) -> Iterator[pa.RecordBatch]:
            for _ in range(length):
                yield batch
            raise ValueError("no more")

        server.publish("live", lambda: pa.RecordBatchReader.from_batches(batch.schema, source()), **options)
        reader = open_live(server, scheme)
        assert [reader.read_next_batch() for _ in range(length)] == [batch] * length
        with pytest.raises(dis.errors.RemoteError, match="failed"):
            reader.read_next_batch()


def test_readers_that_go_leave_no_thread_behind(serve: Serve) -> None:
    """Each reader's own source ends with its reader, whether it is busy, or continues after a pause."""
    batch = pa.record_batch({"n": [1]})
    ended, goes_on = threading.Semaphore(0), threading.Event()

    def source() -> Iterator[pa.RecordBatch]:
        try:
            for number in count():
                if number == 10:
                    goes_on.wait(PATIENCE)
                yield batch
        finally:
            ended.release()

    server = serve(*MEDIA)
    server.publish("live", lambda: pa.RecordBatchReader.from_batches(batch.schema, source()))
    for pauses, scheme in product((True, False), ("shm", "tcp")):
        goes_on.clear()
        reader = open_live(server, scheme)
        if not pauses:
            goes_on.set()
        for _ in range(10 if pauses else 1000):
            assert reader.read_next_batch() == batch
        del reader
        goes_on.set()
        assert ended.acquire(timeout=PATIENCE), (pauses, scheme)
        assert connections_left(server) == 0
    wait_until(lambda: not [one for one in threading.enumerate() if one.name == "coalescer"], "its thread ends")


def test_no_batch_waits_for_others(serve: Serve) -> None:
    """The source pauses after one or more batches until they have all arrived: no later batch pushes them out."""
    batch = pa.record_batch({"n": [1]})
    bursts = [*[1] * 30, 2, 7, 8, 9, 1, 300, 1, 1, 40, 2, 2, 2, 2000, 1]
    arrived = threading.Semaphore(0)

    def source() -> Iterator[pa.RecordBatch]:
        for burst in bursts:
            for _ in range(burst):
                yield batch
            for _ in range(burst):
                assert arrived.acquire(timeout=PATIENCE), "a batch is kept back"

    server = serve(*MEDIA)
    for options in SHARED_OR_NOT:
        for scheme in ("shm", "tcp", "inproc"):
            server.publish("live", lambda: pa.RecordBatchReader.from_batches(batch.schema, source()), **options)
            count = 0
            for one in open_live(server, scheme):
                assert one == batch
                count += 1
                arrived.release()
            assert count == sum(bursts)


def test_an_idle_connection_sends_at_once(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each batch is made when the last has arrived. None waits for more, even if waiting would take an hour."""
    monkeypatch.setattr("dissociated.server.live.COALESCE_INTERVAL", 3600.0)
    batch = pa.record_batch({"n": [1]})
    arrived = threading.Semaphore(0)

    def source() -> Iterator[pa.RecordBatch]:
        for burst in (*[1] * 50, *[2] * 50):  # at most two are on their way
            for _ in range(burst):
                yield batch
            for _ in range(burst):
                assert arrived.acquire(timeout=PATIENCE), "a batch is kept back"

    server = serve(*MEDIA)
    for scheme in ("shm", "tcp", "inproc"):
        reader = pa.RecordBatchReader.from_batches(batch.schema, source())
        server.publish("live", reader, live=dis.Live())
        rows = 0
        for one in open_live(server, scheme):
            rows += one.num_rows
            arrived.release()
        assert rows == 150


def test_a_reader_that_pauses_gets_every_batch_in_order(serve: Serve) -> None:
    """Each batch is made when one reader has the last. The connection of another, which pauses, is soon full.

    A third one leaves when its connection is full. The source uses the memory of its batches again.
    """
    memory = np.zeros(1500, np.int64)  # 12 kB, so that some twenty batches fill a connection
    arrived, length = threading.Semaphore(0), 600

    def source() -> Iterator[pa.RecordBatch]:
        for number in range(length):
            memory[:] = number
            yield pa.record_batch({"n": pa.array(memory)})
            assert arrived.acquire(timeout=PATIENCE), "a batch is kept back"

    server = serve("shm:", "tcp://127.0.0.1:0")
    for scheme in ("shm", "tcp"):
        reader = pa.RecordBatchReader.from_batches(pa.schema([("n", pa.int64())]), source())
        server.publish("live", reader, live=dis.Live(consumers=3, stall_timeout=PATIENCE))
        present, pausing, leaving = (open_live(server, scheme) for _ in range(3))
        numbers = []
        for batch in present:
            numbers.append(batch["n"].unique().to_pylist())
            if len(numbers) == length // 2:
                leaving.close()
            arrived.release()
        expected = [[number] for number in range(length)]
        assert numbers == expected
        assert [batch["n"].unique().to_pylist() for batch in pausing] == expected
        assert connections_left(server) == 0


def test_batches_linger_on_request(serve: Serve) -> None:
    """A stream that lingers delays batches, and neither loses nor reorders any."""
    rows = pa.record_batch({"n": np.arange(500)})
    server = serve(*MEDIA)
    for scheme in ("shm", "tcp", "inproc"):
        reader = pa.RecordBatchReader.from_batches(rows.schema, [rows.slice(row, 1) for row in range(500)])
        server.publish("live", reader, live=dis.Live(linger=0.01))
        received = pa.Table.from_batches(open_live(server, scheme))
        assert received.combine_chunks() == pa.Table.from_batches([rows])


@pytest.mark.parametrize("linger", [-0.001, 1.5, float("nan")])
def test_how_long_batches_may_linger(linger: float) -> None:
    with pytest.raises(dis.errors.OptionError, match="linger"):
        dis.Live(linger=linger)


def test_a_source_may_use_its_memory_again(serve: Serve) -> None:
    """The server has taken over or sent a batch when it requests the next one."""
    memory = np.zeros(3000, np.int64)

    def source() -> Iterator[pa.RecordBatch]:
        for number in range(300):
            memory[:] = number
            yield pa.record_batch({"n": pa.array(memory[: 3000 if number % 10 == 9 else 2])})

    def reader() -> pa.RecordBatchReader:
        return pa.RecordBatchReader.from_batches(pa.schema([("n", pa.int64())]), source())

    server = serve(*MEDIA)
    for publish in SHARED_OR_NOT:
        # Without sharing, inproc passes on the source's own batches.
        for scheme in ("shm", "tcp", "inproc") if publish else ("shm", "tcp"):
            server.publish("live", reader, **publish)
            numbers = [one["n"].unique().to_pylist() for one in open_live(server, scheme)]
            assert numbers == [[number] for number in range(300)], (publish, scheme)
