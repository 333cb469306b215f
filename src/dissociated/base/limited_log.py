"""A log of peers' actions that peers cannot flood."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from dissociated.base.fork import ProcessBound

#: The part of a peer that differs between its connections: a port, or the number of a process.
_PER_CONNECTION = re.compile(r":\d+$|(?<=client )\d+ (?=of )")
_MAX_PEERS = 1024
_MAX_SHOWN = 300  # characters of a line
_Key: TypeAlias = tuple[str, str]  # an event and a peer


@dataclass
class _Bucket:
    """A token bucket: the lines that one event may still have for one peer."""

    tokens: float
    filled: float  # by the clock
    suppressed: int = 0
    level: int = 0
    last_line: str = ""  # the last line that was suppressed


class LimitedLog(ProcessBound):
    """A log that writes at most `burst` lines of one event and peer to `logger`, and then one in `interval` seconds.

    The next line that is written has the number of suppressed lines in its field `suppressed`. If no line follows, a
    later report, or `close`, has it. Connections from one host or user count as one peer, whatever their port or
    process. `clock` returns seconds.
    """

    def __init__(
        self,
        logger: logging.Logger,
        burst: int = 20,
        interval: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger = logger
        self._burst = burst
        self._interval = interval
        self._clock = clock
        self._lock = threading.Lock()
        self._buckets: OrderedDict[_Key, _Bucket] = OrderedDict()  # the least recently used first
        self.bind_to_process()

    def after_fork_in_child(self) -> None:
        """Replace the lock, which another thread of the parent may hold: a child may log."""
        self._lock = threading.Lock()

    def write(
        self,
        level: int,
        message: str,
        *arguments: object,
        event: str,
        peer: str = "",
        fields: Mapping[str, object] | None = None,
        exc_info: bool = False,
    ) -> None:
        """Log a line as `Logger.log` does, unless `peer` has caused too many lines of this `event`."""
        if not self._logger.isEnabledFor(level):
            return
        key = event, _PER_CONNECTION.sub("", peer)
        now = self._clock()
        with self._lock:
            bucket = self._filled_bucket(key, now)
            written = bucket.tokens >= 1
            before = bucket.suppressed
            if written:
                bucket.tokens -= 1
                bucket.suppressed = 0
            else:
                bucket.suppressed += 1
                bucket.level = level
                bucket.last_line = (message % arguments)[:_MAX_SHOWN]
            idle = self._remove_idle(now)
        if written:
            extra = {**(fields or {}), **({"peer": peer} if peer else {}), **({"suppressed": before} if before else {})}
            self._logger.log(level, message, *arguments, extra=extra, exc_info=exc_info)
        self._report(idle)

    def close(self) -> None:
        """Report the suppressed lines that no other line has reported."""
        with self._lock:
            buckets = [*self._buckets.items()]
            self._buckets.clear()
        self._report(buckets)

    def _filled_bucket(self, key: _Key, now: float) -> _Bucket:
        """Return the bucket of this key, filled for the time that has passed."""
        bucket = self._buckets.setdefault(key, _Bucket(self._burst, now))
        self._buckets.move_to_end(key)
        bucket.tokens = min(self._burst, bucket.tokens + (now - bucket.filled) / self._interval)
        bucket.filled = now
        return bucket

    def _remove_idle(self, now: float) -> list[tuple[_Key, _Bucket]]:
        """Remove and return the buckets that are full by now, and the least recently used if there are too many."""
        removed = []
        while self._buckets:
            key, bucket = next(iter(self._buckets.items()))
            if len(self._buckets) <= _MAX_PEERS and now - bucket.filled < self._interval * self._burst:
                break
            removed.append((key, self._buckets.pop(key)))
        return removed

    def _report(self, buckets: list[tuple[_Key, _Bucket]]) -> None:
        for (_, peer), bucket in buckets:
            if bucket.suppressed:
                extra = {"suppressed": bucket.suppressed, **({"peer": peer} if peer else {})}
                self._logger.log(bucket.level, "lines suppressed: last=%s", bucket.last_line, extra=extra)
