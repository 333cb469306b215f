"""A heartbeat beside a connection of libfabric: a peer that died is noticed."""

from __future__ import annotations

import logging
import threading
import time
from typing import Protocol

from dissociated.base.once import once
from dissociated.errors import DissociatedError
from dissociated.transport.native.threads import start_thread

_log = logging.getLogger(__name__)


class HeartbeatConnection(Protocol):
    """A connection that is kept alive."""

    heartbeat: float  # seconds between two of them

    def send_heartbeat(self) -> None: ...


class Heartbeat:
    """A thread for the heartbeats of all connections of this process. There is none while there are no connections."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._due: dict[HeartbeatConnection, float] = {}
        self._running = False

    def add(self, connection: HeartbeatConnection) -> None:
        """Keep this connection alive. Raises TransportError where there is no thread to be had for it."""
        with self._changed:
            if not self._running:
                start_thread(self._run, "fabric heartbeat", "heartbeats take a thread")
                self._running = True
            self._due[connection] = time.monotonic() + connection.heartbeat
            self._changed.notify()

    def remove(self, connection: HeartbeatConnection) -> None:
        """Forget it."""
        with self._changed:
            self._due.pop(connection, None)
            self._changed.notify()

    def _run(self) -> None:
        with self._changed:
            try:
                while self._due:
                    self._beat()
            finally:
                self._running = False

    def _beat(self) -> None:
        connection = min(self._due, key=self._due.__getitem__)
        left = self._due[connection] - time.monotonic()
        if left > 0:
            self._changed.wait(left)
            return
        self._due[connection] = time.monotonic() + connection.heartbeat
        self._changed.release()
        try:
            connection.send_heartbeat()
        except DissociatedError as error:
            _log.info("%r: %s", connection, error)
        except Exception:  # such as one of memory: the hearts of others must beat
            _log.exception("%r: no heartbeat was sent", connection)
        finally:
            self._changed.acquire()


@once
def heartbeat_of(pid: int) -> Heartbeat:
    """That of this process: threads do not survive a fork, and connections are the parent's."""
    return Heartbeat()
