"""The streams of a read that has several parts, most of which wait for their turn."""

from __future__ import annotations

import time
import weakref
from typing import Protocol

#: Seconds after which the servers of streams that wait are told again that the client is there. It is far below the
#: default `stall_timeout` of servers.
INTERVAL = 20.0


class _Session(Protocol):
    @property
    def idle_time(self) -> float:
        """Return the number of seconds since a message arrived."""

    def say_alive(self) -> None:
        """Tell the server that this client is still there. Never raises."""


class WaitingStreams:
    """The streams of one read. While the reader takes batches, it keeps the streams that wait from being cut off.

    A reader that pauses says nothing: its streams are cut off like a single stream that nobody reads.
    """

    def __init__(self) -> None:
        self._sessions: list[weakref.ref[_Session]] = []
        self._last = time.monotonic()

    def add(self, session: _Session) -> None:
        """Add a stream, which is kept only as long as others refer to it. Thread-safe."""
        self._sessions.append(weakref.ref(session))

    def say_alive(self) -> None:
        """Tell the servers of streams from which nothing arrives that this client is there, unless that was just done.

        Called by the thread that takes batches.
        """
        now = time.monotonic()
        if now - self._last < INTERVAL:
            return
        self._last = now
        for reference in [*self._sessions]:
            session = reference()
            if session is not None and session.idle_time >= INTERVAL:
                session.say_alive()
