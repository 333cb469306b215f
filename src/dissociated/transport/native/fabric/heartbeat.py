"""Heartbeats of connections over libfabric: a receive that was posted never fails, so nothing else tells who died."""

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

_MAX_MISSED = 10  # heartbeats that a peer may miss
_REFUSED = 1.0  # seconds that libfabric may take nothing, although it has nothing to do


#: Sends one heartbeat of a connection.
Beat: TypeAlias = Callable[[], None]


class Heartbeat:
    """A thread for the heartbeats of all connections of this process. There is none while there are no connections."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._due: dict[Beat, tuple[float, float]] = {}  # when the next is due, and the seconds between two
        self._running = False

    def add(self, beat: Beat, interval: float) -> None:
        """Call `beat` every `interval` seconds. Raises TransportError where there is no thread to be had for it."""
        with self._changed:
            if not self._running:
                start_thread(self._run, "fabric heartbeat", "heartbeats take a thread")
                self._running = True
            self._due[beat] = time.monotonic() + interval, interval
            self._changed.notify()

    def remove(self, beat: Beat) -> None:
        """Forget it."""
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
            _log.info("%r: %s", beat, error)
        except Exception:  # such as one of memory: the hearts of others must beat
            _log.exception("%r: no heartbeat was sent", beat)
        finally:
            self._changed.acquire()


@once
def heartbeat_of(pid: int) -> Heartbeat:
    """That of this process: threads do not survive a fork, and connections are the parent's."""
    return Heartbeat()


class Liveness:
    """Counts the heartbeats that a peer misses, and the time for which nothing is taken for it."""

    def __init__(self) -> None:
        self.heard = True  #: anything of the peer, since the last heartbeat
        self._missed = 0
        self._refused: object = None  # what libfabric did not take at the last heartbeat,
        self._refused_at = 0.0  # and since when

    def miss(self) -> bool:
        """A heartbeat is due. Whether the peer has missed too many."""
        self._missed = 0 if self.heard else self._missed + 1
        self.heard = False
        return self._missed >= _MAX_MISSED

    def refuses(self, waiting: object) -> bool:
        """Whether libfabric has not taken what is `waiting`, if anything is, for so long that there is no connection.

        That is true where it took something once, and has nothing to do.
        """
        now = time.monotonic()
        if waiting is not self._refused:
            self._refused, self._refused_at = waiting, now
        return waiting is not None and now >= self._refused_at + _REFUSED
