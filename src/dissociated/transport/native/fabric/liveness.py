"""Whether the peer of a connection over libfabric is still there: a receive that was posted never fails."""

from __future__ import annotations

import time

_MAX_MISSED = 10  # heartbeats that a peer may miss
_REFUSED = 1.0  # seconds that libfabric may take nothing, although it has nothing to do


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
