"""Heartbeats of connections over libfabric, which detect dead peers: a posted receive never fails."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeAlias

from dissociated.base.once import once
from dissociated.errors import DissociatedError
from dissociated.transport.native.threads import start_thread

_log = logging.getLogger(__name__)

_MAX_MISSED = 10  # missing heartbeats after which a peer is considered dead
_REFUSED = 1.0  # seconds for which libfabric may refuse a message although it is idle


#: Sends one heartbeat of a connection.
Beat: TypeAlias = Callable[[], None]


class Heartbeat:
    """The heartbeats of all connections of this process, and their thread, which runs while there are connections."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._due: dict[Beat, tuple[float, float]] = {}  # the time of the next heartbeat, and the seconds between two
        self._running = False

    def add(self, beat: Beat, interval: float) -> None:
        """Call `beat` every `interval` seconds.

        Raises:
            TransportError: if the system has no thread to spare.
        """
        with self._changed:
            if not self._running:
                start_thread(self._run, "fabric heartbeat")
                self._running = True
            self._due[beat] = time.monotonic() + interval, interval
            self._changed.notify()

    def remove(self, beat: Beat) -> None:
        """Stop calling `beat`, if it is called."""
        with self._changed:
            self._due.pop(beat, None)
            self._changed.notify()

    def _run(self) -> None:
        with self._changed:
            try:
                while self._due:
                    self._beat()
            finally:
                self._running = False

    def _beat(self) -> None:
        beat = min(self._due, key=self._due.__getitem__)
        due, interval = self._due[beat]
        remaining = due - time.monotonic()
        if remaining > 0:
            self._changed.wait(remaining)
            return
        self._due[beat] = time.monotonic() + interval, interval
        self._changed.release()
        try:
            beat()
        except DissociatedError as error:
            _log.info("heartbeat failed: heartbeat=%r error=%s", beat, error)
        except Exception:  # such as a MemoryError, which must not stop the heartbeats of other connections
            _log.exception("heartbeat failed, internal error: heartbeat=%r", beat)
        finally:
            self._changed.acquire()


@once
def heartbeat_of(pid: int) -> Heartbeat:
    """Return the heartbeats of process `pid`: after a fork, threads and connections remain the parent's."""
    return Heartbeat()


class Liveness:
    """The number of heartbeats that a peer has missed, and the time for which libfabric has refused a message to it."""

    def __init__(self) -> None:
        self.heard = True  #: whether the peer has sent anything since the last heartbeat
        self._missed = 0
        self._refused: object = None  # the message that libfabric refused at the last heartbeat, or None
        self._refused_at = 0.0  # the time since which it has refused it

    def miss(self) -> bool:
        """Count this interval as missed unless the peer was heard. Return whether it has missed too many."""
        self._missed = 0 if self.heard else self._missed + 1
        self.heard = False
        return self._missed >= _MAX_MISSED

    def refuses(self, waiting: object) -> bool:
        """Return whether libfabric has refused a message for so long that there is no connection any more.

        Args:
            waiting: the message that libfabric refuses although it is idle and accepted earlier ones, or None.
        """
        now = time.monotonic()
        if waiting is not self._refused:
            self._refused, self._refused_at = waiting, now
        return waiting is not None and now >= self._refused_at + _REFUSED
