"""Who may be served: the limits of a server, and the connections that have not yet said what they want."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass

from dissociated.base.buffers import MAX_METADATA
from dissociated.errors import ConnectionClosed, DissociatedError, SourceError
from dissociated.monitoring.activity import Activity
from dissociated.monitoring.kept import Mappable
from dissociated.transport.base import Connection

#: Seconds in which a client has asked that asks at once, also on a busy machine.
_LEAST_TIME = 1.0
#: How many times the limit of one live stream those may keep of live streams who were cut off.
_KEPT_SHARE = 4


class ServerFull(DissociatedError):
    """There are as many connections as there may be."""


@dataclass(frozen=True)
class Limits:
    """What clients may take of a server, in seconds and bytes: `ServerOptions` says what each field means."""

    handshake_timeout: float
    stall_timeout: float
    lease_timeout: float
    live_limit: int
    kept_limit: int | None
    inline_limit: int | None = None
    max_metadata: int = MAX_METADATA
    max_connections: int = 1024
    max_asking: int = 128


class Admission:
    """Counts connections from when they begin to when they are gone. Safe to use from many threads."""

    def __init__(self, limits: Limits, activity: Activity) -> None:
        self._limits = limits
        self._activity = activity
        self._lock = threading.Condition()
        self._served: set[Connection] = set()  # those that have said what they want
        self._asking: dict[Connection, float] = {}  # since when those have not, the oldest first

    def make_room(self) -> None:
        """If too many have not said what they want, wait for one of them, or interrupt the one that has had most time.

        Each has `_LEAST_TIME`: otherwise, clients that come again at once whenever they are closed take all places.
        """
        slowest = None
        with self._lock:
            while len(self._asking) >= self._limits.max_asking and slowest is None:
                oldest, since = next(iter(self._asking.items()))
                left = since + _LEAST_TIME - time.monotonic()
                if left > 0:
                    self._lock.wait(left)
                else:
                    del self._asking[oldest]
                    slowest = oldest
        if slowest is not None:
            slowest.interrupt()

    def begin(self, connection: Connection) -> None:
        """The connection has been accepted."""
        with self._lock:
            self._asking[connection] = time.monotonic()

    def requested(self, connection: Connection) -> None:
        """It has said what it wants.

        Raises ConnectionClosed where it was too slow, and ServerFull where there are too many connections.
        """
        with self._lock:
            if connection not in self._asking:
                raise ConnectionClosed("it had not said what it wants when others wanted its place")
            self._leave(connection)
            connection.request_deadline = None
            self._served.add(connection)
            if len(self._served) > self._limits.max_connections:
                raise ServerFull("the server takes no more connections now: try again later")

    def end(self, connection: Connection) -> None:
        """The connection is over."""
        with self._lock:
            self._served.discard(connection)
            self._leave(connection)

    def _leave(self, connection: Connection) -> None:
        """It is none of those that ask any more."""
        if self._asking.pop(connection, None) is not None:
            self._lock.notify()

    def left(self, segments: Iterable[Mappable]) -> None:
        """A client is gone, or was cut off, that may still have these mapped."""
        for segment in segments:
            self._activity.kept_memory.watch(segment)

    def admit_live(self, name: str) -> None:
        """Raise SourceError where consumers that were cut off hold as much as they may: nobody else may hold memory.

        Without a limit that was set, live streams alone are counted, and have one.
        """
        if self._limits.kept_limit is not None:
            self.admit_mapped(name)
        else:
            self._admit_mapped(name, self._activity.kept_live, _KEPT_SHARE * self._limits.live_limit)

    def admit_mapped(self, name: str) -> None:
        """Raise SourceError where consumers that were cut off hold as much as they may, if that was limited."""
        if self._limits.kept_limit is not None:
            self._admit_mapped(name, self._activity.kept, self._limits.kept_limit)

    def _admit_mapped(self, name: str, kept: int, limit: int) -> None:
        if kept and kept >= limit:  # with a limit of 0, while they hold anything
            raise SourceError(
                f"{name!r} takes no new reader over shared memory: readers that were cut off still "
                f"hold {kept:,} bytes, and may hold {limit:,} (kept_limit). Wait until they let go, or end "
                "them (dissociated status shows them); or read over tcp, or with bodies packed"
            )
