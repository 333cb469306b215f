"""What a server does, counted where it happens.

Each connection has statistics that its own thread writes and anybody may read, so that counting takes no lock while
data flows. When a connection ends, they are added to the totals.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from dissociated._version import __version__
from dissociated.base.host import host_name
from dissociated.datasets.base import Dataset
from dissociated.monitoring.changes import Changes
from dissociated.monitoring.kept import KeptMemory
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
    """How much a count grows in a second, computed when somebody looks: so counting itself needs no clock.

    It is the growth since the latest look that is at least a second ago; at first since `began`, by time.monotonic.
    """

    _MIN_INTERVAL = 1.0  # seconds

    def __init__(self, began: float) -> None:
        self._looks = (began, 0), (began, 0)  # the two latest: when, and the count

    def at(self, now: float, count: int) -> float:
        """The rate, at a time after all others."""
        before, last = self._looks
        if now - last[0] >= self._MIN_INTERVAL:
            before = last
            self._looks = last, (now, count)
        return max(0, count - before[1]) / (now - before[0]) if now > before[0] else 0.0


class ConnectionStats:
    """What one connection has done so far. Only its own thread writes."""

    def __init__(self, connection: int, listener: str, peer: str) -> None:
        #: The number of the connection, in the status and in the log.
        self.connection = connection
        #: The URI where it was accepted.
        self.listener = listener
        #: The scheme of that URI.
        self.transport = listener.partition(":")[0]
        #: Who is at the other end, for people.
        self.peer = peer
        #: What it has asked for; None until it has.
        self.dataset: Dataset | None = None
        #: How many messages it was sent.
        self.messages = 0
        # Bytes of bodies that the medium has taken. While more are sent: the connection, what it had written before,
        # and how many bytes these are.
        self._sent: tuple[int, Connection | None, int, int] = 0, None, 0, 0
        #: The addresses that it holds.
        self.held: Sized = ()
        #: Returns how many bytes of live streams it holds; None where it was not cut off.
        self.kept: Callable[[], int | None] | None = None
        #: Whether it was sent everything that it has asked for.
        self.sent = False
        #: Returns whether everything that it was sent has reached it, and what it holds of that stays when this process
        #: ends. None where it was sent nothing.
        self.outlives_server: Callable[[], bool] | None = None
        self._began = time.monotonic()
        self._rate = Rate(self._began)

    @property
    def bytes(self) -> int:
        """Bytes of bodies that the medium has taken, as far as it tells while it does."""
        sent, connection, written_before, pending = self._sent
        return sent if connection is None else sent + min(connection.written - written_before, pending)

    @contextmanager
    def sending(self, connection: Connection, nbytes: int) -> Iterator[None]:
        """For as long as `nbytes` bytes of bodies are being sent. If that breaks off, those that the medium took count.

        Afterwards the medium may still have to send some of them, and of those before.
        """
        whole = self._sent[0] + self._sent[3] + nbytes
        written_before, sent = connection.written, self.bytes
        self._sent = sent, connection, written_before, whole - sent
        try:
            yield
        except BaseException:
            self._sent = self.bytes, None, 0, 0
            raise
        written_before, sent = connection.written, self.bytes
        pending = min(connection.backlog, whole - sent)
        self._sent = whole - pending, connection if pending else None, written_before, pending

    def settle(self) -> None:
        """The client has got everything, whether the medium told or not."""
        self._sent = self._sent[0] + self._sent[3], None, 0, 0

    @property
    def in_progress(self) -> bool:
        """Whether the end of this process would take something from the client."""
        outlives_server = self.outlives_server  # which its own thread may take away now
        return not (self.sent and len(self.held) and outlives_server is not None and outlives_server())

    def status(self) -> ConsumerStatus:
        """How it stands now."""
        kept, now, nbytes = self._kept(), time.monotonic(), self.bytes
        state = "asking" if self.dataset is None else "holding" if self.sent else "reading"
        if kept is not None:
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
            len(self.held),
            kept or 0,
            self._rate.at(now, nbytes),
        )

    def _kept(self) -> int | None:
        kept = self.kept  # which its own thread may take away now
        return None if kept is None else kept()

    def fields(self) -> dict[str, Any]:
        """What a line of the log says beside its message."""
        now = self.status()
        fields = {"connection": now.connection, "transport": now.transport, "peer": now.peer}
        if now.dataset is None:
            return fields
        return fields | {
            "dataset": now.dataset,
            "seconds": round(now.seconds, 3),
            "messages": now.messages,
            "bytes": now.bytes,
        }


class _Sums:
    """Streams, messages and bytes, added up."""

    def __init__(self) -> None:
        self.streams = self.messages = self.bytes = self.consumers = self.leases = 0

    def add(self, stats: ConnectionStats) -> None:
        self.streams += 1
        self.messages += stats.messages
        self.bytes += stats.bytes

    def include(self, other: _Sums) -> None:
        self.streams += other.streams
        self.messages += other.messages
        self.bytes += other.bytes
        self.consumers += other.consumers
        self.leases += other.leases

    def plus(self, open_stats: Iterable[ConnectionStats]) -> _Sums:
        """These and those of connections that are open."""
        total = _Sums()
        total.streams, total.messages, total.bytes = self.streams, self.messages, self.bytes
        for stats in open_stats:
            total.add(stats)
            total.consumers += 1
            total.leases += len(stats.held)
        return total


class Activity:
    """The statistics of a server, and the totals of what has ended."""

    def __init__(self) -> None:
        #: What becomes of datasets.
        self.changes = Changes()
        #: What clients keep of segments that are served no more.
        self.kept_memory = KeptMemory()
        #: Whether the server takes no new connections, and ends when no stream is in progress.
        self.stopping = False
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._open: dict[int, ConnectionStats] = {}
        self._ended = _Sums()
        self._of_datasets: WeakKeyDictionary[Dataset, _Sums] = WeakKeyDictionary()  # while each is published or read
        self._outcomes: Counter[str] = Counter()
        self._accepted: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._flight = 0

    def begin(self, listener: str, peer: str) -> ConnectionStats:
        """A connection was accepted by `listener`. It is counted until `end`."""
        with self._lock:
            stats = ConnectionStats(next(self._numbers), listener, peer)
            self._accepted[listener] += 1
            self._open[stats.connection] = stats
        return stats

    def end(self, stats: ConnectionStats, outcome: str) -> None:
        """The connection is over, and its statistics will not change any more."""
        with self._lock:
            del self._open[stats.connection]
            self._outcomes[outcome] += 1
            if stats.dataset is not None:
                self._ended.add(stats)
                self._of_datasets.setdefault(stats.dataset, _Sums()).add(stats)

    def in_progress(self) -> list[ConsumerStatus]:
        """Return the connections that a server that is stopping waits for."""
        with self._lock:
            statistics = list(self._open.values())
        return [stats.status() for stats in statistics if stats.in_progress]

    def refuse(self, listener: str) -> None:
        """A connection was turned away, since there are too many."""
        with self._lock:
            self._refused[listener] += 1

    @property
    def kept(self) -> int:
        """How many bytes those hold that were cut off, of live streams and of segments that are served no more."""
        return self.kept_live + self.kept_memory.nbytes

    @property
    def kept_live(self) -> int:
        """How many bytes of live streams those hold that were cut off."""
        with self._lock:
            statistics = list(self._open.values())
        return sum(stats.status().kept for stats in statistics)

    def sent(self) -> int:
        """How many bytes of bodies were sent. Unlike `status` it does not look at datasets."""
        with self._lock:
            return self._ended.bytes + sum(stats.bytes for stats in self._open.values() if stats.dataset is not None)

    def flight(self) -> None:
        """A stream goes out over Flight."""
        with self._lock:
            self._flight += 1

    def status(
        self,
        catalog: str | None,
        listeners: Sequence[str],
        datasets: Mapping[str, Sequence[Dataset]],
        nodes: Sequence[NodeStatus] = (),
        store: StoreStatus | None = None,
    ) -> ServerStatus:
        """How everything stands now. `datasets` has all that is served under each name, the latest last."""
        with self._lock:
            statistics = list(self._open.values())
            requested = [stats for stats in statistics if stats.dataset is not None]
            at = Counter(stats.listener for stats in statistics)
            everything = self._ended.plus(requested)
            consumers = tuple(stats.status() for stats in statistics)
            waits_for = [stats.connection for stats in statistics if stats.in_progress] if self.stopping else []
            return ServerStatus(
                __version__,
                host_name(),
                os.getpid(),
                time.monotonic() - self._began,
                catalog,
                everything.leases,
                Totals(
                    everything.streams,
                    everything.messages,
                    everything.bytes,
                    self._flight,
                    **{outcome: self._outcomes[outcome] for outcome in OUTCOMES},
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

    def _dataset(self, versions: Sequence[Dataset], requested: Sequence[ConnectionStats]) -> DatasetStatus:
        total = _Sums()
        for one in versions:
            known = self._of_datasets.get(one, _Sums())
            total.include(known.plus(stats for stats in requested if stats.dataset is one))
        latest = versions[-1]
        return DatasetStatus(
            latest.name,
            latest.rows,
            latest.nbytes,
            total.consumers,
            total.streams,
            total.messages,
            total.bytes,
            total.leases,
            len(versions),
        )
