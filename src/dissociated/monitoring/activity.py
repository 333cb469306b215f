"""Counters of a server's activity.

Each connection has statistics that only its own thread writes and any thread may read, so that counting takes no lock
while data flow. When a connection ends, its statistics are added to the totals.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from itertools import chain, count
from typing import Any
from weakref import WeakKeyDictionary

from dissociated.base.host import host_name
from dissociated.base.tracing import TraceSpan
from dissociated.base.version import package_version
from dissociated.datasets.base import Dataset
from dissociated.monitoring.changes import Changes
from dissociated.monitoring.kept_memory import KeptMemory
from dissociated.monitoring.status import (
    OUTCOMES,
    ChangeCounts,
    ConsumerStatus,
    DatasetStatus,
    ListenerStatus,
    NodeStatus,
    ServerStatus,
    StoreStatus,
    Totals,
)
from dissociated.transport.base import Connection


class Rate:
    """The growth of a count per second, computed when it is read, so that counting itself needs no clock.

    The rate covers the time since the latest reading that is at least a second old, or since `began` if there is none.
    Times are those of time.monotonic.
    """

    _MIN_INTERVAL = 1.0  # seconds

    def __init__(self, began: float) -> None:
        self._looks = (began, 0), (began, 0)  # the two latest readings: time and count

    def at(self, now: float, count: int) -> float:
        """Return the rate at the time `now`, which must be later than in all earlier calls."""
        before, last = self._looks
        if now - last[0] >= self._MIN_INTERVAL:
            before = last
            self._looks = last, (now, count)
        return max(0, count - before[1]) / (now - before[0]) if now > before[0] else 0.0


class ConnectionStats:
    """The statistics of one connection. Only the thread that sends writes them."""

    def __init__(self, connection: int, listener: str, peer: str) -> None:
        #: The number of the connection, which the status and the log show.
        self.connection = connection
        #: The URI of the listener that accepted the connection.
        self.listener = listener
        #: The scheme of that URI.
        self.transport = listener.partition(":")[0]
        #: A description of the peer.
        self.peer = peer
        #: The requested dataset; None before the request.
        self.dataset: Dataset | None = None
        #: The span of the stream; None if the server does not trace.
        self.span: TraceSpan | None = None
        #: The number of messages sent.
        self.messages = 0
        # The state of the bytes of bodies sent: the number of bytes that the medium had taken when this was set. While
        # more are being sent, also the connection, its count of written bytes when this was set, and the number of
        # bytes to send.
        self._transfer: tuple[int, Connection | None, int, int] = 0, None, 0, 0
        #: The addresses that the client holds.
        self.leases: Sized = ()
        #: Returns the number of bytes of live streams that the client still holds; None unless the client was cut off.
        self.count_kept: Callable[[], int | None] | None = None
        #: Returns the number of batches of a live stream that were dropped because the client did not keep up.
        self.count_missed: Callable[[], int] | None = None
        #: Whether all requested data were sent.
        self.all_sent = False
        #: Returns whether all sent data have arrived, and the data that the client holds stay valid when this process
        #: ends. None if nothing was sent.
        self.outlives_server: Callable[[], bool] | None = None
        self._began = time.monotonic()
        self._rate = Rate(self._began)

    @property
    def bytes(self) -> int:
        """The number of bytes of bodies that the medium has taken, as precisely as the medium reports it."""
        sent_bytes, connection, written_before, pending = self._transfer
        return sent_bytes if connection is None else sent_bytes + min(connection.written - written_before, pending)

    @contextmanager
    def sending(self, connection: Connection, nbytes: int) -> Iterator[None]:
        """Count `nbytes` bytes of bodies that are sent within the `with` block.

        If the transfer fails, only bytes that the medium has taken are counted. After the block, the medium may still
        have to send some of these bytes or of earlier ones.
        """
        whole = self._transfer[0] + self._transfer[3] + nbytes
        written_before, sent_bytes = connection.written, self.bytes
        self._transfer = sent_bytes, connection, written_before, whole - sent_bytes
        try:
            yield
        except BaseException:
            self._transfer = self.bytes, None, 0, 0
            raise
        self._count(connection, whole, whole - self.bytes)

    def add_sent(self, connection: Connection, nbytes: int) -> None:
        """Count `nbytes` bytes of bodies that were passed on to be sent. The medium may still have to send them."""
        sent_bytes, _, _, pending = self._transfer
        unknown = pending + nbytes
        if connection.backlog:
            self._count(connection, sent_bytes + unknown, unknown)
        else:
            self._transfer = sent_bytes + unknown, None, 0, 0

    def _count(self, connection: Connection, whole: int, unknown: int) -> None:
        """Count `whole` bytes in all. The medium may still have to send up to `unknown` of them."""
        written = connection.written  # read first: bytes that are written meanwhile must be counted later
        pending = min(connection.backlog, unknown)
        self._transfer = whole - pending, connection if pending else None, written, pending

    def settle(self) -> None:
        """Count all bytes as sent, since the client has received everything, even if the medium has not reported it."""
        self._transfer = self._transfer[0] + self._transfer[3], None, 0, 0

    @property
    def in_progress(self) -> bool:
        """Whether the client would lose data if this process ended."""
        # Read the attribute once, since the connection's thread may set it to None.
        outlives_server = self.outlives_server
        return not (self.all_sent and len(self.leases) and outlives_server is not None and outlives_server())

    def status(self) -> ConsumerStatus:
        """Return the present state of the connection."""
        kept_bytes, now, nbytes = self.kept_bytes(), time.monotonic(), self.bytes
        state = "pending" if self.dataset is None else "holding" if self.all_sent else "reading"
        if kept_bytes is not None:
            state = "cut off"
        return ConsumerStatus(
            self.connection,
            self.transport,
            self.peer,
            state,
            None if self.dataset is None else self.dataset.name,
            now - self._began,
            self.messages,
            nbytes,
            len(self.leases),
            kept_bytes or 0,
            self._rate.at(now, nbytes),
            self.missed_batches,
        )

    def kept_bytes(self) -> int | None:
        """Return the number of bytes of a live stream that a client holds after being cut off; None if it was not."""
        count_kept = self.count_kept  # Read the attribute once, since the connection's thread may set it to None.
        return None if count_kept is None else count_kept()

    @property
    def missed_batches(self) -> int:
        """The number of batches of a live stream that were dropped because the client did not keep up."""
        count_missed = self.count_missed  # see `kept_bytes`
        return 0 if count_missed is None else count_missed()

    def counts(self) -> Counter[str]:
        """Return the counts of this stream that add up to those of its dataset and of the server."""
        return Counter(streams=1, messages=self.messages, bytes=self.bytes, missed=self.missed_batches)

    def detach(self) -> None:
        """Release the references to what was sent, and keep the number of missed batches."""
        missed = self.missed_batches
        self.count_missed, self.count_kept, self.outlives_server = (lambda: missed), None, None

    def fields(self) -> dict[str, Any]:
        """Return the fields of a log record about this connection."""
        now = self.status()
        fields = {"connection": now.connection, "transport": now.transport, "peer": now.peer}
        if now.dataset is None:
            return fields
        fields |= {
            "dataset": now.dataset,
            "seconds": round(now.seconds, 3),
            "messages": now.messages,
            "bytes": now.bytes,
        }
        return fields | ({"missed": now.missed} if now.missed else {})


def _total(ended_counts: Iterable[Counter[str]], open_stats: Iterable[ConnectionStats]) -> Counter[str]:
    """Add up the counts of ended streams and of open ones, which also have consumers and leases."""
    total: Counter[str] = Counter()
    for counts in ended_counts:
        total.update(counts)
    for stats in open_stats:
        total.update(stats.counts(), consumers=1, leases=len(stats.leases))
    return total


class Activity:
    """The statistics of a server's open connections, and the totals of ended ones."""

    def __init__(self) -> None:
        #: The changes of datasets.
        self.changes = Changes()
        #: The memory that clients keep of segments that are no longer served.
        self.kept_memory = KeptMemory()
        #: Whether the server is stopping: it accepts no connections, and ends when no stream is in progress.
        self.stopping = False
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._numbers = count(1)
        self._open: dict[int, ConnectionStats] = {}
        self._ended_counts: Counter[str] = Counter()  # the counts of ended streams
        # A dataset has an entry while it is published or being read.
        self._of_datasets: WeakKeyDictionary[Dataset, Counter[str]] = WeakKeyDictionary()
        self._outcomes: Counter[str] = Counter()
        self._accepted: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._flight = 0
        self._refused_puts = 0

    def accept(self, listener: str, peer: str) -> ConnectionStats:
        """Register a connection that `listener` accepted, and its first stream. See `begin`."""
        with self._lock:
            self._accepted[listener] += 1
        return self.begin(listener, peer)

    def begin(self, listener: str, peer: str) -> ConnectionStats:
        """Register a stream of a connection that `listener` accepted. It counts as open until `end`."""
        with self._lock:
            stats = ConnectionStats(next(self._numbers), listener, peer)
            self._open[stats.connection] = stats
        return stats

    def end(self, stats: ConnectionStats, outcome: str) -> None:
        """Record the end of a connection. Its statistics must not change any more."""
        with self._lock:
            del self._open[stats.connection]
            self._outcomes[outcome] += 1
            if stats.dataset is not None:
                for counts in (self._ended_counts, self._of_datasets.setdefault(stats.dataset, Counter())):
                    counts.update(stats.counts())

    def in_progress(self) -> list[ConsumerStatus]:
        """Return the connections that a stopping server waits for."""
        with self._lock:
            statistics = list(self._open.values())
        return [stats.status() for stats in statistics if stats.in_progress]

    def refuse(self, listener: str) -> None:
        """Record that a connection was refused because there were too many."""
        with self._lock:
            self._refused[listener] += 1

    @property
    def kept_bytes(self) -> int:
        """The number of bytes that clients keep after their streams or segments ended.

        It includes live streams from which a client was cut off, and segments that are no longer served.
        """
        return self.kept_live_bytes + self.kept_memory.nbytes

    @property
    def kept_live_bytes(self) -> int:
        """The number of bytes of live streams that clients still hold after being cut off."""
        with self._lock:
            statistics = list(self._open.values())
        return sum(stats.kept_bytes() or 0 for stats in statistics)

    def bytes_sent(self) -> int:
        """Return the number of bytes of bodies sent. Unlike `status`, this does not examine datasets."""
        with self._lock:
            requested = (stats for stats in self._open.values() if stats.dataset is not None)
            return self._ended_counts["bytes"] + sum(stats.bytes for stats in requested)

    def flight(self) -> None:
        """Record that a stream is sent over Flight."""
        with self._lock:
            self._flight += 1

    def refuse_put(self) -> None:
        """Record that a put or a commit was refused."""
        with self._lock:
            self._refused_puts += 1

    def status(
        self,
        catalog: str | None,
        listeners: Sequence[str],
        datasets: Mapping[str, Sequence[Dataset]],
        nodes: Sequence[NodeStatus] = (),
        store: StoreStatus | None = None,
    ) -> ServerStatus:
        """Return the present state of the server.

        Args:
            catalog: The URI of its catalog; None if it has none.
            listeners: The URIs of its listeners.
            datasets: All versions that are served under each name, latest last.
            nodes: The status of the nodes of its catalog.
            store: The usage of its store; None if it has none.
        """
        with self._lock:
            statistics = list(self._open.values())
            requested: dict[Dataset, list[ConnectionStats]] = defaultdict(list)
            for stats in statistics:
                if stats.dataset is not None:
                    requested[stats.dataset].append(stats)
            at = Counter(stats.listener for stats in statistics)
            total = _total([self._ended_counts], chain.from_iterable(requested.values()))
            consumers = tuple(stats.status() for stats in statistics)
            waits_for = [stats.connection for stats in statistics if stats.in_progress] if self.stopping else []
            return ServerStatus(
                package_version(),
                host_name(),
                os.getpid(),
                time.monotonic() - self._began,
                catalog,
                total["leases"],
                Totals(
                    total["streams"],
                    total["messages"],
                    total["bytes"],
                    self._flight,
                    **{outcome: self._outcomes[outcome] for outcome in OUTCOMES},
                    refused_puts=self._refused_puts,
                    missed=total["missed"],
                ),
                tuple(ListenerStatus(uri, at[uri], self._accepted[uri], self._refused[uri]) for uri in listeners),
                tuple(self._dataset(versions, requested) for versions in datasets.values()),
                consumers,
                tuple(nodes),
                store,
                sum(consumer.kept for consumer in consumers) + self.kept_memory.nbytes,
                ChangeCounts(**self.changes.counts()),
                "stopping" if self.stopping else "running",
                tuple(waits_for),
            )

    def _dataset(
        self, versions: Sequence[Dataset], requested: Mapping[Dataset, Sequence[ConnectionStats]]
    ) -> DatasetStatus:
        ended_counts = [self._of_datasets[version] for version in versions if version in self._of_datasets]
        total = _total(ended_counts, chain.from_iterable(requested.get(version, ()) for version in versions))
        latest = versions[-1]
        return DatasetStatus(
            latest.name,
            latest.rows,
            latest.nbytes,
            total["consumers"],
            total["streams"],
            total["messages"],
            total["bytes"],
            total["leases"],
            len(versions),
            total["missed"],
        )
