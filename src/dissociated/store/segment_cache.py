"""The open segments of a store, and a cache that keeps the segments open that were read last."""

from __future__ import annotations

import resource
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from dissociated.base.oserrors import store_errors
from dissociated.store.memfds import FD
from dissociated.store.segment import Segment

#: Segments that are kept open. Each has a mapping, and a process may have 65,530 of them.
MAX_SEGMENTS = 1 << 12
_DESCRIPTOR_SHARE = 8  # the cache holds a segment per 8 descriptors that the process may have; a segment takes two


T = TypeVar("T")


class OpenSegments(list[Segment]):
    """The segments of a version, which stay open as long as this list or one of them is referenced."""

    def __init__(self, segments: Iterable[Segment]) -> None:
        super().__init__(segments)
        self._lock = threading.Lock()
        self._served: Any = None
        self._drop: Callable[[], None] | None = None
        self._dropped = False

    def serve_once(self, make: Callable[[], T], drop: Callable[[T], None]) -> T:
        """Return the dataset that the first call of `make` made of these segments. It lives as long as they do.

        When the segments leave the cache, `drop` drops the references that would keep the dataset alive.
        """
        with self._lock:
            if self._drop is None:
                self._served = dataset = make()
                self._drop = partial(drop, dataset)
                if self._dropped:
                    self._drop()
            return cast(T, self._served)  # all callers make datasets of one type

    def release(self) -> None:
        """Drop the served dataset, so that it does not keep these segments open: they have left the cache."""
        self._dropped = True  # without the lock: if `make` is running, `serve_once` sees this afterwards
        if self._drop is not None:
            self._drop()


class SegmentFiles:
    """All open segments, by file. A segment that several versions share is opened once, which makes appending cheap.

    Not thread-safe: the lock of the store protects it.
    """

    def __init__(self) -> None:
        self._open: weakref.WeakValueDictionary[tuple[int, ...], Segment] = weakref.WeakValueDictionary()

    def open(self, path: Path) -> Segment:
        """Open the segment at `path`, or return it if it is open already. Raises StoreError."""
        handed_over = path.parent == FD  # the path is a link to a memfd, made by the kernel
        with store_errors(f"opening {path}"):
            status = path.stat() if handed_over else path.lstat()
        # A staged file may have been refused before its writer had finished.
        file = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
        segment = self._open.get(file)
        if segment is None:
            self._open[file] = segment = Segment.open(path, follow=handed_over)
        return segment


class SegmentCache:
    """The versions that were read last, by id: at most `cap` segments, but at least one version.

    By default, `cap` is derived from the process's limit of descriptors. Safe to use from many threads.
    """

    def __init__(self, cap: int | None = None) -> None:
        self._fixed_cap = cap
        self._lock = threading.Lock()
        self._segments: OrderedDict[str, OpenSegments] = OrderedDict()
        self._count = 0

    @property
    def cap(self) -> int:
        """The largest number of segments that are kept open."""
        if self._fixed_cap is not None:
            return self._fixed_cap
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return MAX_SEGMENTS if soft == resource.RLIM_INFINITY else min(MAX_SEGMENTS, soft // _DESCRIPTOR_SHARE)

    def get(self, id: str) -> OpenSegments | None:
        """Return the open segments of a version, or None. The version then counts as the last one read."""
        with self._lock:
            segments = self._segments.get(id)
            if segments is not None:
                self._segments.move_to_end(id)
            return segments

    def put(self, id: str, opened: OpenSegments) -> None:
        """Add the segments of a version. The versions that were read least recently are dropped above `cap`."""
        self.pop(id)
        evicted = []
        cap = self.cap
        with self._lock:
            self._segments[id] = opened
            self._count += len(opened)
            while self._count > cap and len(self._segments) > 1:
                _, oldest = self._segments.popitem(last=False)
                self._count -= len(oldest)
                evicted.append(oldest)
        for segments in evicted:
            segments.release()

    def pop(self, id: str) -> None:
        """Remove a version from the cache. Its readers keep its segments."""
        with self._lock:
            segments = self._segments.pop(id, None)
            self._count -= 0 if segments is None else len(segments)
        if segments is not None:
            segments.release()

    def clear(self) -> None:
        """Remove all versions from the cache."""
        with self._lock:
            versions = [*self._segments.values()]
            self._segments.clear()
            self._count = 0
        for segments in versions:
            segments.release()
