"""Live streams of small batches: they hold what they weigh, and travel many at once, but none waits alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import dissociated as dis
from helpers import PATIENCE, Serve, connections_left, wait_until
from memory.maps import shared_bytes

SCHEMA = pa.schema([("n", pa.int64()), ("s", pa.string()), ("d", pa.dictionary(pa.int8(), pa.string()))])
MEDIA = ("shm:", "tcp://127.0.0.1:0", "inproc:")
WORDS = pa.array(["a", "b", "c"])


def open_at(server: dis.Server, scheme: str, **options: Any) -> pa.RecordBatchReader:
    (uri,) = (uri for uri in server.locations("live") if uri.startswith(scheme))
    return dis.open_stream(uri, server.ticket("live"), timeout=PATIENCE, **options)


def test_a_reader_may_be_many_small_batches_behind(serve: Serve) -> None:
    """20,000 of one row are 300 kB; each in pages of its own would be 80 MB. The reader pauses until all are there."""
    rows = pa.record_batch({"n": np.arange(20_000), "v": np.arange(20_000) / 7})
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
        one = open_at(server, scheme)
        first = one.read_next_batch()
        assert exhausted.wait(PATIENCE), "it held up the source"
        assert pa.Table.from_batches([first, *one]).combine_chunks() == pa.Table.from_batches([rows])
        assert connections_left(server) == 0


def test_what_waits_is_within_the_limit_whatever_its_size(serve: Serve) -> None:
    """The source stops where a paused reader is so far behind, goes on with it, and gives up on it in the end."""
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
        one = open_at(server, "shm")
        held = [one.read_next_batch()]
        wait_until(lambda server=server: server.status().consumers[0].state == "cut off", "it is given up")
        assert given[0] * batch.nbytes <= 4 * limit  # what waits, and what the socket and its two ends took
        assert shared_bytes("live") <= limit + (1 << 16)
        with pytest.raises(dis.errors.RemoteError, match="held up the others"):
            held.extend(one)
        assert 1 < len(held) < 20_000
        assert all(other == batch for other in held)
        del one, held
        assert connections_left(server) == 0


def test_batches_of_all_sizes_in_one_stream(serve: Serve) -> None:
    """Runs of alike ones, others between them, large ones, dictionaries that change: everybody gets all, in order."""
    values = np.random.default_rng(5)
    sizes = [*[1] * 40, *values.integers(0, 3, 60), 5000, *[2] * 30, 0, 700, *values.integers(0, 900, 60), *[1] * 100]
    sent = []
    for number, size in enumerate(sizes):
        words = pa.DictionaryArray.from_arrays(
            values.integers(0, 2, size).astype(np.int8), WORDS.slice(number % 90 // 89)
        )
        texts = ["x" * (number % 50 // 49)] * size
        sent.append(pa.record_batch([np.full(size, number), pa.array(texts, pa.string()), words], schema=SCHEMA))
    server = serve(*MEDIA)
    for names in (["n", "s", "d"], ["n", "s"], ["n"]):
        some = [one.select(names) for one in sent]
        reader = pa.RecordBatchReader.from_batches(some[0].schema, iter(some))
        server.publish("live", reader, live=dis.Live(consumers=4))
        readers = [open_at(server, scheme) for scheme in ("shm", "tcp", "inproc")]
        readers.append(open_at(server, "tcp", columns=["n"]))
        with ThreadPoolExecutor(4) as pool:
            *whole, narrow = pool.map(list, readers)
        assert whole == [some] * 3, names
        assert narrow == [one.select(["n"]) for one in sent], names


def test_a_batch_that_is_alone_is_sent_at_once(serve: Serve) -> None:
    """Each is made when the one before has arrived: nothing else would ever let it go."""
    batch = pa.record_batch({"n": [1]})
    arrived = threading.Semaphore()

    def source() -> Iterator[pa.RecordBatch]:
        for _ in range(200):
            assert arrived.acquire(timeout=PATIENCE), "a batch is kept back"
            yield batch

    server = serve(*MEDIA)
    for scheme in ("shm", "tcp", "inproc"):
        server.publish("live", pa.RecordBatchReader.from_batches(batch.schema, source()), live=dis.Live())
        for one in open_at(server, scheme):
            assert one == batch
            arrived.release()


def test_a_source_may_use_its_memory_again(serve: Serve) -> None:
    """A batch has been taken over, or sent, when the next one is asked for."""
    memory = np.zeros(3000, np.int64)

    def source() -> Iterator[pa.RecordBatch]:
        for number in range(300):
            memory[:] = number
            yield pa.record_batch({"n": pa.array(memory[: 3000 if number % 10 == 9 else 2])})

    server = serve(*MEDIA)
    for publish in ({"live": dis.Live()}, {}):
        for scheme in ("shm", "tcp", "inproc") if publish else ("shm", "tcp"):  # alone, inproc gives what it got
            made = lambda: pa.RecordBatchReader.from_batches(pa.schema([("n", pa.int64())]), source())  # noqa: E731
            server.publish("live", made, **publish)
            numbers = [one["n"].unique().to_pylist() for one in open_at(server, scheme)]
            assert numbers == [[number] for number in range(300)], (publish, scheme)
