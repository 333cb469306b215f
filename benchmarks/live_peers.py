"""Live streams beside ZeroMQ, Flight's DoGet and iceoryx2: latency of small batches, processor time of the producer.

A process produces record batches, and others consume all of them. ZeroMQ carries the encapsulated IPC messages of the
batches over a Unix socket; Flight has a queue for each consumer; iceoryx2 carries the messages in shared memory, and
wakes consumers by its events. No peer may drop a batch.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import multiprocessing
import os
import queue
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import chain
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

import dissociated as dis
from dissociated.cli import text

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["benchmarks.live_peers", "pyarrow.flight"])  # once, not in each process
_DEPTH = 64  # batches that may wait for a consumer of a peer
_TIMEOUT = 120.0  # seconds
_COLUMNS = 16
#: The first value of the first column is the time at which the batch was made, by time.monotonic_ns.
_SCHEMA = pa.schema([("at", pa.int64()), *((f"v{n}", pa.float64()) for n in range(1, _COLUMNS))])


class Load(NamedTuple):
    """The batches that a producer makes: `number` batches of `nbytes`, `interval` seconds apart."""

    consumers: int
    number: int
    nbytes: int
    interval: float = 0.0

    @property
    def rows(self) -> int:
        """The rows of each batch."""
        return max(1, self.nbytes // 8 // _COLUMNS)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the batches, each at its time."""
        values = _values(self.rows)
        at = np.zeros(self.rows, np.int64)
        due = time.monotonic()
        for _ in range(self.number):
            if self.interval:
                due += self.interval
                time.sleep(max(0.0, due - time.monotonic()))
            at[0] = time.monotonic_ns()
            yield pa.record_batch([pa.array(at.copy()), *values], schema=_SCHEMA)


_made: dict[int, list[pa.Array]] = {}  # the columns of batches, by the number of rows


def _values(rows: int) -> list[pa.Array]:
    if rows not in _made:
        _made[rows] = [pa.array(np.random.default_rng(n).random(rows)) for n in range(1, _COLUMNS)]
    return _made[rows]


class Figures(NamedTuple):
    """The figures of one run, in ms: latencies, and processor time for each batch of the producer and of a consumer."""

    p50: float
    p99: float
    producer: float
    consumer: float


def _produce_live(load: Load, pipe: Connection) -> None:
    begin = threading.Event()

    def source() -> Iterator[pa.RecordBatch]:
        begin.wait(_TIMEOUT)
        yield from load.batches()

    limit = max(1 << 24, _DEPTH * load.nbytes)
    with dis.Server(["shm:"], catalog=None, live_limit=limit) as server:
        reader = pa.RecordBatchReader.from_batches(_SCHEMA, source())
        server.publish("live", reader, live=dis.Live(consumers=load.consumers))
        pipe.send((server.locations("live")[0], server.ticket("live")))
        _measured(load, pipe, begin.set)


@contextmanager
def _consume_live(load: Load, address: Any) -> Iterator[Iterator[pa.RecordBatch]]:
    uri, ticket = address
    with dis.open_stream(uri, ticket) as reader:
        yield iter(reader)


def _produce_zmq(load: Load, pipe: Connection) -> None:
    import zmq

    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        context = stack.enter_context(zmq.Context())
        socket = stack.enter_context(context.socket(zmq.XPUB))
        socket.setsockopt(zmq.XPUB_VERBOSE, 1)  # each subscription is reported, not only the first
        socket.setsockopt(zmq.XPUB_NODROP, 1)
        socket.setsockopt(zmq.SNDHWM, _DEPTH)
        socket.bind(f"ipc://{folder}/live")
        pipe.send(f"ipc://{folder}/live")

        def produce() -> None:
            for _ in range(load.consumers):
                socket.recv()  # a subscription
            for batch in load.batches():
                socket.send(batch.serialize(), copy=load.nbytes < 1 << 16)

        _measured(load, pipe, produce)


@contextmanager
def _consume_zmq(load: Load, address: Any) -> Iterator[Iterator[pa.RecordBatch]]:
    import zmq

    def batches() -> Iterator[pa.RecordBatch]:
        for _ in range(load.number):
            message = socket.recv(copy=load.nbytes < 1 << 16)
            yield pa.ipc.read_record_batch(pa.py_buffer(getattr(message, "buffer", message)), _SCHEMA)

    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.setsockopt(zmq.RCVHWM, _DEPTH)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(address)
        yield batches()


def _produce_flight(load: Load, pipe: Connection) -> None:
    import pyarrow.flight as flight

    queues: queue.SimpleQueue[queue.Queue[pa.RecordBatch | None]] = queue.SimpleQueue()

    class _Server(flight.FlightServerBase):  # type: ignore[misc]  # pyarrow has no type hints
        def do_get(self, context: object, ticket: object) -> flight.GeneratorStream:
            waiting: queue.Queue[pa.RecordBatch | None] = queue.Queue(_DEPTH)
            queues.put(waiting)
            return flight.GeneratorStream(_SCHEMA, iter(waiting.get, None))

    def produce() -> None:
        everyone = [queues.get() for _ in range(load.consumers)]
        for batch in chain(load.batches(), (None,)):
            for waiting in everyone:
                waiting.put(batch)

    with _Server("grpc://127.0.0.1:0") as server:
        pipe.send(f"grpc://127.0.0.1:{server.port}")
        _measured(load, pipe, produce)


@contextmanager
def _consume_flight(load: Load, address: Any) -> Iterator[Iterator[pa.RecordBatch]]:
    import pyarrow.flight as flight

    with flight.connect(address) as client:
        yield (chunk.data for chunk in client.do_get(flight.Ticket(b"live")))


def _iceoryx2(load: Load, name: str) -> tuple[Any, Any]:
    """Return the factories of ports for samples and for events."""
    iceoryx2: Any = importlib.import_module("iceoryx2")
    iceoryx2.set_log_level(iceoryx2.LogLevel.Error)
    node = iceoryx2.NodeBuilder.new().create(iceoryx2.ServiceType.Ipc)
    service = iceoryx2.ServiceName.new(name)
    samples = node.service_builder(service).publish_subscribe(iceoryx2.Slice[ctypes.c_uint8])
    samples = samples.payload_alignment(iceoryx2.Alignment.new(64)).max_nodes(load.consumers + 1)
    samples = samples.max_publishers(1).max_subscribers(load.consumers)
    samples = samples.subscriber_max_buffer_size(_DEPTH).enable_safe_overflow(False)
    events = node.service_builder(service).event().max_listeners(load.consumers).max_nodes(load.consumers + 1)
    return samples.open_or_create(), events.open_or_create()


def _produce_iceoryx2(load: Load, pipe: Connection) -> None:
    iceoryx2: Any = importlib.import_module("iceoryx2")
    name = f"dissociated-benchmark-{os.getpid()}"
    samples, events = _iceoryx2(load, name)
    publisher = samples.publisher_builder().initial_max_slice_len(load.nbytes + (1 << 14))
    publisher = publisher.backpressure_strategy(iceoryx2.BackpressureStrategy.RetryUntilDelivered).create()
    notifier = events.notifier_builder().create()
    pipe.send(name)

    def produce() -> None:
        for batch in load.batches():
            message = batch.serialize()
            sample = publisher.loan_slice_uninit(message.size)
            ctypes.memmove(sample.payload_ptr, message.address, message.size)
            sample.assume_init().send()
            notifier.notify()

    _measured(load, pipe, produce)


@contextmanager
def _consume_iceoryx2(load: Load, address: Any) -> Iterator[Iterator[pa.RecordBatch]]:
    samples, events = _iceoryx2(load, address)
    subscriber = samples.subscriber_builder().create()
    listener = events.listener_builder().create()

    def batches() -> Iterator[pa.RecordBatch]:
        for _ in range(load.number):
            while (sample := subscriber.receive()) is None:
                listener.blocking_wait()
            message = pa.py_buffer(sample.payload().as_memory_view())
            yield pa.ipc.read_record_batch(message, _SCHEMA)
            sample.delete()

    yield batches()


def _measured(load: Load, pipe: Connection, produce: Callable[[], object]) -> None:
    """Produce once all consumers are ready, and send the processor time until all of them have finished."""
    _values(load.rows)
    pipe.recv()
    started = time.process_time()
    produce()
    pipe.recv()
    pipe.send(time.process_time() - started)


_PEERS: dict[str, tuple[Callable[..., None], Callable[..., AbstractContextManager[Iterator[pa.RecordBatch]]]]] = {
    "dissociated": (_produce_live, _consume_live),
    "ZeroMQ": (_produce_zmq, _consume_zmq),
    "Flight": (_produce_flight, _consume_flight),
    "iceoryx2": (_produce_iceoryx2, _consume_iceoryx2),
}
_PACKAGES = {"ZeroMQ": "zmq", "iceoryx2": "iceoryx2"}


def _consume(peer: str, load: Load, address: Any, pipe: Connection) -> None:
    latencies = []
    with _PEERS[peer][1](load, address) as batches:
        pipe.send(None)
        started = time.process_time()
        for batch in batches:
            at = batch.column(0)[0].as_py()
            latencies.append(time.monotonic_ns() - at)
        processor = time.process_time() - started
        del batch
    assert len(latencies) == load.number, (peer, len(latencies))
    pipe.send((latencies[load.number // 10 :], processor))


def measure(peer: str, load: Load) -> Figures:
    """Run producer and consumers once, in processes of their own."""
    ours, theirs = _CONTEXT.Pipe()
    producer = _CONTEXT.Process(target=_PEERS[peer][0], args=(load, theirs), daemon=True)
    producer.start()
    theirs.close()  # so that a producer that fails ends this run
    address = ours.recv()
    pipes = [_CONTEXT.Pipe() for _ in range(load.consumers)]
    consumers = [
        _CONTEXT.Process(target=_consume, args=(peer, load, address, there), daemon=True) for _, there in pipes
    ]
    for consumer in consumers:
        consumer.start()
    for here, _ in pipes:
        here.recv()
    ours.send(None)
    latencies, consumed = zip(*[here.recv() for here, _ in pipes], strict=True)
    ours.send(None)
    produced = ours.recv()
    for process in (*consumers, producer):
        process.join(10)
    p50, p99 = np.quantile(np.concatenate(latencies) / 1e6, (0.5, 0.99))
    return Figures(
        float(p50), float(p99), produced / load.number * 1000, statistics.mean(consumed) / load.number * 1000
    )


#: The loads: 1,000 small batches a second to one and to four consumers and 250 to sixteen, small batches as fast as
#: possible, and batches of 1 MB as fast as possible.
LOADS = {
    "small-1": ("128 B, 1 consumer", Load(1, 2000, 128, 0.001)),
    "small-4": ("128 B, 4 consumers", Load(4, 2000, 128, 0.001)),
    "small-16": ("128 B, 16 consumers", Load(16, 500, 128, 0.004)),
    "small-at-once": ("128 B, 1 consumer, at once", Load(1, 10_000, 128)),
    "large-1": ("1 MB, 1 consumer", Load(1, 1000, 1 << 20)),
    "large-4": ("1 MB, 4 consumers", Load(4, 500, 1 << 20)),
}


def run(rounds: int, names: Iterable[str]) -> None:
    """Measure the named loads in `rounds` rounds, in which the peers take turns, and print the medians."""
    missing = [name for name, package in _PACKAGES.items() if importlib.util.find_spec(package) is None]
    peers = [name for name in _PEERS if name not in missing]
    if missing:
        print(f"\n{' and '.join(missing)} left out: pip install -e '.[bench]'")
    rows = []
    for title, load in [LOADS[name] for name in names]:
        figures: dict[str, list[Figures]] = {name: [] for name in peers}
        for _ in range(rounds):
            for name in peers:
                figures[name].append(measure(name, load))
        for name, some in figures.items():
            p50, p99, producer, consumer = (statistics.median(column) for column in zip(*some, strict=True))
            rows.append((title, name, f"{p50:.2f}", f"{p99:.2f}", f"{producer:.3f}", f"{consumer:.3f}"))
    print(f"\nLive batches, median of {rounds} rounds, in ms; processor time for each batch\n")
    print(text.table(("LOAD", "OVER", "P50", "P99", "PRODUCER", "A CONSUMER"), rows, right=(2, 3, 4, 5)))
