"""Changes of datasets, which are counted and logged."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass

_log = logging.getLogger(__name__)

#: The number of latest changes that are kept.
MAX_CHANGES = 200

#: The kinds of changes to a version. `committed`: it was published. `dropped`: it was deleted on request. `expired`:
#: its time to live ended. `retired`: it had been replaced, and the guaranteed lifetime of its tickets ended. `evicted`:
#: its memory was freed, or its node lost it. `spilled`: it was moved to disk, and is still available.
KINDS = ("committed", "dropped", "expired", "retired", "evicted", "spilled")


@dataclass(frozen=True)
class Change:
    """A change to a version of a dataset.

    Attributes:
        kind: The kind of change, which is in KINDS.
        dataset: The name of the dataset.
        version: The number of the version; None if unknown.
        rows: The number of rows; None if unknown.
        nbytes: The number of bytes; None if unknown.
        why: The reason of the change.
    """

    kind: str
    dataset: str
    version: int | None
    rows: int | None
    nbytes: int | None
    why: str


class Changes:
    """The counts of all changes, and the latest changes. Its methods may be called from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._latest: deque[tuple[float, Change]] = deque(maxlen=MAX_CHANGES)

    def add(self, change: Change) -> None:
        """Count, keep and log a change."""
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
        extra = {name: value for name, value in fields.items() if value is not None}
        _log.info("dataset changed: change=%s dataset=%r why=%r", change.kind, change.dataset, change.why, extra=extra)

    def counts(self) -> dict[str, int]:
        """Return the number of changes of each kind."""
        with self._lock:
            return {kind: self._counts[kind] for kind in KINDS}

    def latest(self) -> list[tuple[float, Change]]:
        """Return the last MAX_CHANGES changes, latest first, each with its time in seconds since the epoch."""
        with self._lock:
            return list(reversed(self._latest))
