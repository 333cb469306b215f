"""What becomes of datasets: every change is a line of the log, and counted."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass

_log = logging.getLogger(__name__)

#: How many of the latest are kept.
MAX_CHANGES = 200

#: What may become of a version: it is published; it is dropped; its time to live is over; it was replaced, and nobody
#: was promised it for longer; its memory or its node had to go; it moved to disk, and stays.
KINDS = ("committed", "dropped", "expired", "retired", "evicted", "spilled")


@dataclass(frozen=True)
class Change:
    """One of KINDS, of a version of a dataset. `version`, `rows` and `nbytes` may be unknown."""

    kind: str
    dataset: str
    version: int | None
    rows: int | None
    nbytes: int | None
    why: str

    def __str__(self) -> str:
        what = f"{self.dataset!r}" if self.version is None else f"{self.dataset!r}, version {self.version}"
        size = [
            f"{count:,} {unit}" for count, unit in ((self.rows, "rows"), (self.nbytes, "bytes")) if count is not None
        ]
        return f"{what}, {self.kind}: {self.why}" + (f" ({', '.join(size)})" if size else "")


class Changes:
    """The changes that there have been: counts of all, and the latest. Safe to use from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._latest: deque[tuple[float, Change]] = deque(maxlen=MAX_CHANGES)

    def add(self, change: Change) -> None:
        """Count a change, keep it, and log it."""
        with self._lock:
            self._counts[change.kind] += 1
            self._latest.append((time.time(), change))
        fields = {
            "change": change.kind,
            "dataset": change.dataset,
            "version": change.version,
            "rows": change.rows,
            "bytes": change.nbytes,
            "why": change.why,
        }
        _log.info("%s", change, extra={name: value for name, value in fields.items() if value is not None})

    def counts(self) -> dict[str, int]:
        """How many of each kind."""
        with self._lock:
            return {kind: self._counts[kind] for kind in KINDS}

    def latest(self) -> list[tuple[float, Change]]:
        """The last MAX_CHANGES of them, the latest first, and when each was, in seconds since 1970."""
        with self._lock:
            return list(reversed(self._latest))
