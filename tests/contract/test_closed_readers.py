from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.client import bodies
from dissociated.codec.join import attach
from dissociated.errors import StoreError
from dissociated.transport.framed.connection import SocketConnection
from support.helpers import PATIENCE, connections_left, wait_until

TABLE = pa.Table.from_batches([pa.record_batch({"n": range(at, at + 50), "m": range(50)}) for at in range(0, 5000, 50)])


#: Options that select the data, each of which uses another kind of reader.
CHOICES: list[dict[str, Any]] = [{}, {"columns": ["m"]}, {"filter": ["n", ">", 10]}, {"limit": 1 << 40}]


@pytest.mark.parametrize("listen", ["shm:", "tcp://127.0.0.1:0"])
def test_a_reader_that_is_closed_ends_its_stream_though_somebody_holds_it(listen: str) -> None:
    """Close each kind of reader in the middle. The batches that were read stay valid."""
    schema = TABLE.schema

    def endless() -> pa.RecordBatchReader:
        return pa.RecordBatchReader.from_batches(schema, (TABLE.to_batches()[at % 100] for at in count()))

    with dis.Server([listen]) as server, dis.connect(server.catalog_uri) as client:
        server.publish("endless", endless)
        for options in CHOICES:
            with client.read("endless", **options) as reader:
                batch = reader.read_next_batch()
                kept = batch.to_pydict()
            wait_until(lambda: connections_left(server) == 0, "the stream has ended")
            with pytest.raises(StoreError, match="closed before its end"):
                reader.read_next_batch()
            assert batch.to_pydict() == kept
            del batch
        wait_until(lambda: server.status().leases == 0, "all has been given back")


def test_a_reader_that_another_thread_reads_can_be_closed() -> None:
    """Close a reader while another thread waits for a batch. That thread raises the error once the batch arrives."""
    going_on = threading.Event()

    def slow() -> Iterator[pa.RecordBatch]:
        """Never end: the connection of a stream that has ended stays open for the next read."""
        for at in count():
            yield TABLE.to_batches()[at % 100]
            going_on.wait(PATIENCE)

    with dis.Server(["tcp://127.0.0.1:0"]) as server, dis.connect(server.catalog_uri) as client:
        server.publish("slow", lambda: pa.RecordBatchReader.from_batches(TABLE.schema, slow()))
        openers: list[Callable[[], Any]] = [
            *(partial(client.read, "slow", **options) for options in CHOICES),
            partial(client.read_on_device, "slow", "test:0"),
        ]
        for open_reader in openers:
            going_on.clear()
            begun = threading.Event()
            reader = open_reader()
            reader.read_next_batch()
            failures: list[Exception] = []

            def read(reader: Any, begun: threading.Event, failures: list[Exception]) -> None:
                try:
                    begun.set()
                    while True:
                        reader.read_next_batch()
                except Exception as error:
                    failures.append(error)

            thread = threading.Thread(target=read, args=(reader, begun, failures))
            thread.start()
            assert begun.wait(PATIENCE)
            reader.close()
            going_on.set()
            thread.join(PATIENCE)
            assert [type(one) for one in failures] == [StoreError], (open_reader, failures)
            wait_until(lambda: connections_left(server) == 0, "the stream has ended")


def test_memory_that_was_given_back_by_closing_is_no_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Close a reader while another thread maps a message of a live stream."""
    taken, closed = threading.Event(), threading.Event()

    def paused(*arguments: Any) -> Any:
        taken.set()
        assert closed.wait(PATIENCE)
        return attach(*arguments)

    batches = (pa.record_batch({"n": np.full(1 << 17, 1 + at)}) for at in range(100))
    source = pa.RecordBatchReader.from_batches(pa.schema({"n": pa.int64()}), batches)
    with dis.Server(["shm:"]) as server, dis.connect(server.catalog_uri) as client:
        server.publish("live", source, live=dis.Live())
        reader = client.read("live")
        assert reader.read_next_batch()["n"].unique().to_pylist() == [1]
        monkeypatch.setattr(bodies, "attach", paused)
        with ThreadPoolExecutor() as pool:
            reading = pool.submit(reader.read_next_batch)
            assert taken.wait(PATIENCE)
            reader.close()
            wait_until(lambda: connections_left(server) == 0, "all has been given back")
            closed.set()
            with pytest.raises(StoreError, match="closed before its end"):
                reading.result(PATIENCE)


def test_a_reader_whose_closing_was_interrupted_does_not_look_like_one_that_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    close = SocketConnection.close
    with dis.Server(["tcp://127.0.0.1:0"]) as server, dis.connect(server.catalog_uri) as client:
        server.publish("data", TABLE)
        for options in CHOICES[:2]:
            reader = client.read("data", **options)
            reader.read_next_batch()

            def interrupted(connection: SocketConnection, reason: str | None = None) -> None:
                close(connection, reason)
                if threading.current_thread() is threading.main_thread():
                    monkeypatch.setattr(SocketConnection, "close", close)
                    raise KeyboardInterrupt

            monkeypatch.setattr(SocketConnection, "close", interrupted)
            with pytest.raises(KeyboardInterrupt):
                reader.close()
            with pytest.raises(StoreError, match="closed before its end"):
                reader.read_all()
