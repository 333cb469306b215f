"""The versions in shared memory that a client keeps mapped between its queries of SQL."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dissociated.base.exit import StreamThread
from dissociated.base.fork import ProcessBound
from dissociated.client.idle import MAX_AGE
from dissociated.control.dataset_info import DatasetInfo
from dissociated.errors import TransportError

if TYPE_CHECKING:
    from dissociated.client.mapped import MappedVersion

_MAX_VERSIONS = 64


@dataclass
class _Kept:
    info: DatasetInfo
    mapped: MappedVersion
    used: float  # by time.monotonic


class KeptVersions(ProcessBound):
    """The mapped versions of the last queries, which the next ones read again. It is thread-safe.

    A query over memory that is mapped anew has a page fault for each few pages, which can take longer than the rest of
    the query. A version is kept until no query has used it for MAX_AGE seconds. Then a thread gives it back, because a
    node cannot make room of mapped memory.
    """

    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}  # by name; the version that was used last is the last one
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread: StreamThread | None = None
        self.bind_to_process()

    def get(self, info: DatasetInfo) -> MappedVersion | None:
        """Return the version that the catalog has described, if it is kept."""
        with self._lock:
            kept = self._kept.get(info.name)
            if kept is None or _identity(kept.info) != _identity(info):
                return None
            self._keep(kept)
            return kept.mapped

    def put(self, info: DatasetInfo, mapped: MappedVersion) -> None:
        """Keep a version in place of the others of its name."""
        with self._lock:
            self._keep(_Kept(info, mapped, 0.0))
            if self._thread is None:
                self.bind_to_process()  # a child that keeps versions may fork, too
                self._closing.clear()
                self._thread = StreamThread(self, self._expire, (), "give back")
                try:
                    self._thread.start()
                except TransportError:  # the system has no more threads, and this version is not kept
                    self._thread = None
                    self._kept.clear()

    def _keep(self, kept: _Kept) -> None:
        kept.used = time.monotonic()
        self._kept.pop(kept.info.name, None)
        self._kept[kept.info.name] = kept
        if len(self._kept) > _MAX_VERSIONS:
            del self._kept[next(iter(self._kept))]

    def _expire(self) -> None:
        """Remove versions when they are old, until there are none."""
        while True:
            with self._lock:
                now = time.monotonic()
                self._kept = {name: kept for name, kept in self._kept.items() if kept.used + MAX_AGE > now}
                if self._closing.is_set() or not self._kept:
                    self._kept.clear()
                    self._thread = None
                    return
                pause = min(kept.used for kept in self._kept.values()) + MAX_AGE - now
            self._closing.wait(pause)

    def stop(self) -> None:
        """Make the thread return. Called at the exit of the interpreter."""
        self._closing.set()

    def close(self) -> None:
        """Keep nothing. Memory is given back when the last query that reads it ends."""
        with self._lock:
            self._kept.clear()
            self._closing.set()

    def after_fork_in_child(self) -> None:
        """Forget the versions, which the parent keeps, and the thread, which the child lacks."""
        self._kept = {}
        self._lock = threading.Lock()  # a thread of the parent may hold the other
        self._closing = threading.Event()
        self._thread = None


def _identity(info: DatasetInfo) -> tuple[int, str, float]:
    """Return an identity of a version among all versions of its name, also of those in an earlier catalog."""
    return info.version, info.lineage_id, info.created
