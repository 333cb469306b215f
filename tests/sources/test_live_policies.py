"""Live streams for consumers that want the present: what they miss is counted, and what they get is valid."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Literal, TypeAlias

import numpy as np
import pyarrow as pa
import pytest

import dissociated as dis
from support.helpers import PATIENCE, Serve, connections_left, location, open_live, wait_until

Policy: TypeAlias = Literal["drop_oldest", "latest"]

MB = 1 << 20
LIMIT = 8 * MB
COUNT = 200
METADATA_SIZE = 136  # bytes of metadata of one of the batches, without a note


def large(number: int) -> pa.RecordBatch:
    return pa.record_batch({"n": np.full(MB // 8, number)})


def small(number: int) -> pa.RecordBatch:
    return pa.record_batch({"n": [number]})


def coded(number: int) -> pa.RecordBatch:
    """Return a batch with three dictionaries: one for each batch, one that grows, and one that seldom changes."""
    own = pa.array([f"own {number}"]).dictionary_encode()
    grown = pa.DictionaryArray.from_arrays([number % 50], [f"value {n}" for n in range(number % 50 + 1)])
    seldom = pa.DictionaryArray.from_arrays([0], [f"seldom {number // 300}"])
    return pa.record_batch({"n": [number], "own": own, "grown": grown, "seldom": seldom})


class Source:
    """A source of numbered batches that remembers whether it has given them all."""

    def __init__(self, make: Callable[[int], pa.RecordBatch], count: int) -> None:
        self.exhausted = threading.Event()
        self.goes_on = threading.Event()
        self.reader = pa.RecordBatchReader.from_batches(make(0).schema, self._batches(make, count))

    def _batches(self, make: Callable[[int], pa.RecordBatch], count: int) -> Iterator[pa.RecordBatch]:
        for number in range(count):
            yield make(number)
        self.exhausted.set()
        self.goes_on.wait(PATIENCE)


@pytest.mark.parametrize("scheme", ["shm", "tcp"])
@pytest.mark.parametrize("policy", ["drop_oldest", "latest"])
def test_a_consumer_that_pauses_does_not_hold_up_the_source(serve: Serve, policy: Policy, scheme: str) -> None:
    server = serve("shm:", "tcp://127.0.0.1:0", live_limit=LIMIT, max_metadata=METADATA_SIZE)
    source = Source(large, COUNT)
    live = dis.Live(policy=policy, stall_timeout=3600)
    server.publish("live", source.reader, live=live)
    reader = open_live(server, scheme, max_metadata=METADATA_SIZE)  # the note does not count
    assert source.exhausted.wait(PATIENCE), "the source waits for the consumer"
    (missed,) = [one.missed for one in server.status().consumers]
    source.goes_on.set()
    received = []
    numbers: list[int] = []
    for batch, metadata in reader.iter_batches_with_custom_metadata():
        received.append(batch)
        numbers.append(batch["n"][0].as_py())
        assert reader.missed == numbers[-1] + 1 - len(numbers)  # at each batch, as it numbers itself
        assert metadata is None  # as the source gave it
    assert reader.missed == missed
    assert received == [large(number) for number in numbers]
    assert all(first < second for first, second in pairwise(numbers))
    assert numbers[-1] == COUNT - 1
    assert len(numbers) + missed == COUNT
    if scheme == "shm":  # over tcp, the kernels of both sides take some batches before the client does
        assert len(numbers) <= (4 if policy == "latest" else 12)
    del reader, received, batch
    assert connections_left(server) == 0
    status = server.status()  # which counts connections that have ended
    assert status.totals.missed == missed
    assert [dataset.missed for dataset in status.datasets] == [missed]


@pytest.mark.parametrize("make", [small, coded])
@pytest.mark.parametrize("policy", ["drop_oldest", "latest"])
def test_batches_that_are_left_have_their_dictionaries(
    serve: Serve, policy: Policy, make: Callable[[int], pa.RecordBatch]
) -> None:
    server = serve("shm:", "tcp://127.0.0.1:0", live_limit=MB // 16)
    live = dis.Live(policy=policy, stall_timeout=3600)
    count = 1000
    for scheme in ("shm", "tcp"):
        source = Source(make, count)
        server.publish("live", source.reader, live=live)
        reader = open_live(server, scheme)
        assert source.exhausted.wait(PATIENCE), "the source waits for the consumer"
        (missed,) = [one.missed for one in server.status().consumers if one.dataset == "live"]
        assert missed or scheme == "tcp"  # over tcp, the kernels of both sides may take small ones
        source.goes_on.set()
        numbers = []
        for one in reader:
            numbers.append(one["n"][0].as_py())
            assert one == make(numbers[-1])
            assert reader.missed == numbers[-1] + 1 - len(numbers)
        assert all(first < second for first, second in pairwise(numbers))
        assert numbers[-1] == count - 1
        assert len(numbers) + missed == count
        del reader
        assert connections_left(server) == 0


@pytest.mark.parametrize("policy", ["drop_oldest", "latest"])
def test_a_consumer_that_keeps_up_misses_nothing(serve: Serve, policy: Policy) -> None:
    """One consumer reads each batch before the next is made; the other does not read at all."""
    arrived = threading.Semaphore(0)

    def source() -> Iterator[pa.RecordBatch]:
        for number in range(COUNT):
            yield large(number)
            assert arrived.acquire(timeout=PATIENCE), "a batch is kept back, or was dropped"

    server = serve("shm:", live_limit=LIMIT)
    reader = pa.RecordBatchReader.from_batches(large(0).schema, source())
    live = dis.Live(policy=policy, consumers=2, stall_timeout=3600)
    server.publish("live", reader, live=live)
    paused, keen = open_live(server, "shm"), open_live(server, "shm")
    for number in range(COUNT - 1):
        assert keen.read_next_batch() == large(number)
        arrived.release()
    last = keen.read_next_batch()
    assert last == large(COUNT - 1)
    missed = sorted(one.missed for one in server.status().consumers)
    arrived.release()
    numbers = [one["n"][0].as_py() for one in paused]
    assert missed[0] == 0
    assert missed[1] == COUNT - len(numbers)
    assert numbers[-1] == COUNT - 1


@pytest.mark.parametrize("scheme", ["shm", "tcp"])
def test_metadata_named_like_the_note_stays_where_nothing_is_dropped(serve: Serve, scheme: str) -> None:
    metadata = {"dissociated.missed": "7"}
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, small(0).schema) as writer:
        for number in range(COUNT):
            writer.write_batch(small(number), custom_metadata=metadata)
    stream = sink.getvalue()
    server = serve("shm:", "tcp://127.0.0.1:0")
    server.publish("static", stream)
    server.publish("live", pa.ipc.open_stream(stream), live=dis.Live())
    for name in ("static", "live"):
        reader = dis.open_stream(location(server, name, scheme), server.ticket(name), timeout=PATIENCE)
        found = [*reader.iter_batches_with_custom_metadata()]
        assert [batch["n"][0].as_py() for batch, _ in found] == [*range(COUNT)]
        assert [dict(kept or {}) for _, kept in found] == COUNT * [{b"dissociated.missed": b"7"}]


@pytest.mark.parametrize("scheme", ["shm", "tcp"])
@pytest.mark.parametrize("order", [["static", "live"], ["live", "static"]])
def test_only_locations_of_streams_that_drop_batches_say_so(scheme: str, order: list[str]) -> None:
    live = Source(small, 1)
    live.goes_on.set()
    sources = {"static": pa.Table.from_batches([small(0)]), "live": live.reader}
    with dis.Server(["shm:", "tcp://127.0.0.1:0"]) as server, dis.connect(server.catalog_uri) as client:
        for name in order:
            server.publish(name, sources[name], live=dis.Live(policy="latest") if name == "live" else None)
            (uri,) = (uri for uri in client.describe(name).endpoints[0].locations if uri.startswith(scheme))
            assert ("missed=1" in uri) == (name == "live")


def test_blocking_is_the_default(serve: Serve) -> None:
    server = serve("shm:", live_limit=LIMIT)
    source = Source(large, COUNT)
    server.publish("live", source.reader, live=dis.Live())
    reader = open_live(server, "shm")
    wait_until(lambda: server.status().consumers[0].leases >= 7, "as much as the limit allows was sent")
    source.goes_on.set()
    assert [one["n"][0].as_py() for one in reader] == [*range(COUNT)]


def test_which_policies_there_are() -> None:
    with pytest.raises(dis.errors.OptionError, match='"block", "drop_oldest" or "latest"'):
        dis.Live(policy="newest")  # type: ignore[arg-type]
