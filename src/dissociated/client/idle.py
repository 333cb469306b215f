"""The idle connections of a client."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from dissociated.base.fork import ProcessBound
from dissociated.errors import DissociatedError
from dissociated.transport.base import Connection
from dissociated.uri import Uri

#: Seconds for which an idle connection is kept. Servers close connections that idle for longer.
MAX_AGE = 8.0
#: The most idle connections that are kept: to one URI, and in all.
_MAX_OF_SERVER, _MAX_CONNECTIONS = 16, 64


class _IdleConnection(NamedTuple):
    uri: Uri
    since: float  # by time.monotonic
    connection: Connection


class IdleConnections(ProcessBound):
    """The connections of a client on which no stream runs. They carry its next requests to the same servers.

    Thread-safe, and also safe in a finalizer that interrupts a method of the same object: it takes no lock.
    """

    def __init__(self) -> None:
        self._idle: deque[_IdleConnection] = deque()  # the oldest first
        self._finalizer = weakref.finalize(self, _close_all, self._idle)
        self.bind_to_process()

    def take(self, uri: Uri) -> Connection | None:
        """Return an idle connection to this URI, ready for the next request; None if there is none."""
        self._close_surplus(lambda entry: entry.since < time.monotonic() - MAX_AGE)
        for entry in reversed(self._of(uri)):
            if self._remove(entry):
                if _has_no_input(entry.connection):
                    return entry.connection
                entry.connection.close()
        return None

    def put(self, uri: Uri, connection: Connection) -> None:
        """Keep a connection whose stream has ended, or close it. Never raises."""
        if self.is_inherited or not connection.is_reusable or not _has_no_input(connection):
            connection.close()
            return
        connection.end_stream()
        entry = _IdleConnection(uri, time.monotonic(), connection)
        self._idle.append(entry)
        if not self._finalizer.alive:  # `close` was called, perhaps just now
            _close_all(self._idle)
            return
        surplus = {*self._of(entry.uri)[:-_MAX_OF_SERVER], *[*self._idle][:-_MAX_CONNECTIONS]}
        self._close_surplus(lambda candidate: candidate in surplus or candidate.since < entry.since - MAX_AGE)

    def close(self) -> None:
        """Close the idle connections. A connection whose stream ends later is closed then."""
        if not self.is_inherited:
            self._finalizer()

    def after_fork_in_child(self) -> None:
        """Discard the connections, which belong to the parent."""
        self._idle.clear()

    def _of(self, uri: Uri) -> list[_IdleConnection]:
        return [entry for entry in [*self._idle] if entry.uri == uri]

    def _close_surplus(self, is_surplus: Callable[[_IdleConnection], bool]) -> None:
        for entry in [*self._idle]:
            if is_surplus(entry) and self._remove(entry):
                entry.connection.close()

    def _remove(self, entry: _IdleConnection) -> bool:
        """Take a connection out. Return False if another thread did."""
        try:
            self._idle.remove(entry)
        except ValueError:
            return False
        return True


def _has_no_input(connection: Connection) -> bool:
    """Return whether the peer has sent nothing, and has not closed the connection."""
    with suppress(DissociatedError, OSError, ValueError):
        return not connection.arrived()
    return False


def _close_all(idle: deque[_IdleConnection]) -> None:
    with suppress(IndexError):
        while True:
            idle.popleft().connection.close()
