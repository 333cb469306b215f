"""Admission of clients: the limits of a server, and the connections whose request has not arrived yet."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

from dissociated.base.buffers import MAX_METADATA
from dissociated.datasets.static_message import SharedSegment
from dissociated.errors import ConnectionClosed, OptionError, ServerFull, SourceError, TransportError
from dissociated.monitoring.activity import Activity
from dissociated.transport.base import Connection, check_timeout

#: Seconds that every new connection has for its request before it may be interrupted to make room for another. This is
#: enough, even on a busy machine, for a client that sends its request at once.
_MIN_REQUEST_TIME = 1.0
#: Default limit of the live memory that consumers hold after they were cut off, as a multiple of `live_limit`.
_KEPT_SHARE = 4


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits on clients, in seconds and bytes. `ServerOptions` documents each field."""

    handshake_timeout: float = 10.0
    stall_timeout: float = 300.0
    lease_timeout: float = 86_400.0
    idle_timeout: float = 10.0
    live_limit: int = 1 << 28
    kept_limit: int | None = None
    inline_limit: int | None = None
    max_metadata: int = MAX_METADATA
    max_connections: int = 1024
    max_pending: int = 128
    max_idle: int = 128

    def __post_init__(self) -> None:
        for name in ("handshake_timeout", "stall_timeout", "lease_timeout", "idle_timeout"):
            object.__setattr__(self, name, check_timeout(getattr(self, name)))
        if self.max_pending < 1:
            raise OptionError(f"max_pending is {self.max_pending!r}; it must be 1 or more")
        if self.max_idle < 0:
            raise OptionError(f"max_idle is {self.max_idle!r}; it must be 0 or more")

    @property
    def for_reading_others_first(self) -> Limits:
        """The limits of a stream whose client reads others first. It may stall for as long as it may hold memory."""
        return replace(self, stall_timeout=max(self.stall_timeout, self.lease_timeout))


class Admission:
    """The connections of a server by their state, and the limits on the number of connections in each. Thread-safe.

    A connection is accepted (`begin`), is served when its request has arrived (`begin_stream`), may then wait for
    another request (`begin_idle`), and ends (`end`). While it is served, a stream is sent (`begin_sending` to
    `end_sending`).
    """

    def __init__(self, limits: Limits, activity: Activity) -> None:
        self._limits = limits
        self._activity = activity
        self._changed = threading.Condition()  # notified when a connection leaves `_pending` or `_sending`
        #: The connections that have sent no request yet, oldest first, each with the time at which it was accepted.
        self._pending: dict[Connection, float] = {}
        self._served: set[Connection] = set()  # the connections whose request has arrived
        self._sending: set[Connection] = set()  # the connections whose stream is being sent
        self._closing = False  # whether streams must end
        self._idle: dict[Connection, None] = {}  # the connections that wait for another request, oldest first
        self._max_idle = limits.max_idle  # 0 once the server refuses requests

    def make_room(self) -> None:
        """Wait for a free place if `max_pending` connections have sent no request yet.

        If no place becomes free, interrupt the oldest of these connections once it has had `_MIN_REQUEST_TIME`. Without
        that minimum, clients that reconnect at once whenever they are closed would take all places.
        """
        removed = None
        with self._changed:
            while len(self._pending) >= self._limits.max_pending and removed is None:
                oldest, since = next(iter(self._pending.items()))
                remaining = since + _MIN_REQUEST_TIME - time.monotonic()
                if remaining > 0:
                    self._changed.wait(remaining)
                else:
                    del self._pending[oldest]
                    removed = oldest
        if removed is not None:
            removed.interrupt()

    def begin(self, connection: Connection) -> None:
        """Count a connection that was accepted and has sent no request yet."""
        with self._changed:
            self._pending[connection] = time.monotonic()

    def begin_idle(self, connection: Connection) -> bool:
        """Count a connection whose stream has ended and that waits for another request.

        If more than `max_idle` connections would wait, interrupt the one that has waited longest.

        Returns:
            False if the connection must be closed instead.
        """
        with self._changed:
            if not self._max_idle:
                return False
            self._served.discard(connection)
            self._sending.discard(connection)
            oldest = next(iter(self._idle)) if len(self._idle) >= self._max_idle else None
            self._idle[connection] = None
            if oldest is not None:
                del self._idle[oldest]
        if oldest is not None:
            oldest.interrupt()
        return True

    def interrupt_idle(self) -> None:
        """Interrupt the connections that wait for another request, and let no other connection wait from now on."""
        with self._changed:
            self._max_idle = 0
            idle = [*self._idle]
            self._idle.clear()
        for connection in idle:
            connection.interrupt()

    def begin_stream(self, connection: Connection) -> None:
        """Count a connection whose request has arrived.

        Raises:
            ConnectionClosed: The connection was interrupted meanwhile because it was too slow.
            ServerFull: More than `max_connections` connections would be served.
        """
        with self._changed:
            if connection not in self._pending and connection not in self._idle:
                raise ConnectionClosed("the client sent no request before its place was needed for others")
            self._idle.pop(connection, None)
            self._remove_pending(connection)
            connection.request_deadline = None
            self._served.add(connection)
            if len(self._served) > self._limits.max_connections:
                raise ServerFull("the server accepts no more connections now: try again later")

    def begin_sending(self, connection: Connection) -> None:
        """Count a connection whose stream is about to be sent."""
        with self._changed:
            self._sending.add(connection)

    def end_sending(self, connection: Connection) -> None:
        """Stop counting a connection whose stream was sent, or whose client was told a reason."""
        with self._changed:
            self._sending.discard(connection)
            self._changed.notify_all()

    def check_open(self) -> None:
        """Raise TransportError, which the client is told, if streams must end because the server closes."""
        if self._closing:
            raise TransportError("the server is closing")

    def end_streams(self, seconds: float) -> None:
        """Let `check_open` raise from now on, and wait up to `seconds` for the streams that are being sent."""
        with self._changed:
            self._closing = True
            self._changed.wait_for(lambda: not self._sending, seconds)

    def end(self, connection: Connection) -> None:
        """Stop counting `connection`, which has ended."""
        self.end_sending(connection)
        with self._changed:
            self._served.discard(connection)
            self._idle.pop(connection, None)
            self._remove_pending(connection)

    def _remove_pending(self, connection: Connection) -> None:
        """Remove `connection` from `_pending` if it is there, and wake a thread that waits for its place."""
        if self._pending.pop(connection, None) is not None:
            self._changed.notify_all()

    def watch_kept(self, segments: Iterable[SharedSegment]) -> None:
        """Watch `segments`, which a client that is gone or was cut off may still have mapped."""
        for segment in segments:
            self._activity.kept_memory.watch(segment)

    def admit_stream(self, name: str) -> None:
        """Check that a client may read the stream `name` through live memory.

        If `kept_limit` is not set, only live memory counts, up to `_KEPT_SHARE` times `live_limit`.

        Raises:
            SourceError: Consumers that were cut off still hold as much memory as the limit allows.
        """
        if self._limits.kept_limit is not None:
            self.admit_static(name)
        else:
            self._check_kept(name, self._activity.kept_live_bytes, _KEPT_SHARE * self._limits.live_limit)

    def admit_static(self, name: str) -> None:
        """Check that a client may read the static dataset `name` over shared memory.

        Raises:
            SourceError: `kept_limit` is set, and consumers that were cut off still hold that much memory.
        """
        if self._limits.kept_limit is not None:
            self._check_kept(name, self._activity.kept_bytes, self._limits.kept_limit)

    def _check_kept(self, name: str, kept_bytes: int, limit: int) -> None:
        if kept_bytes and kept_bytes >= limit:  # a limit of 0 refuses new readers only while some memory is held
            raise SourceError(
                f"{name!r} accepts no new reader over shared memory: readers that were cut off still hold "
                f"{kept_bytes:,} bytes; the limit (kept_limit) is {limit:,}; wait until they release it, or end them "
                "(dissociated status lists them); or read over tcp, or with packed bodies"
            )
