"""The segments of a store that are open: those that are read, and what was read last, to be read again at no cost."""

from __future__ import annotations

import resource
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol, TypeVar, cast

from dissociated.base.oserrors import store_errors
from dissociated.store.memfds import FD
from dissociated.store.segment import Segment

_MAX_SEGMENTS = 1 << 12  # segments, each of which has a mapping, of which a process may have 65,530
_DESCRIPTOR_SHARE = 8  # of the descriptors that a process may have: a segment takes two


class Droppable(Protocol):
    """What is made of open segments, to be served: a dataset."""

    def drop(self) -> None:
        """Nobody finds it any more: let go of what refers back to it."""


D = TypeVar("D", bound=Droppable)


class OpenSegments(list[Segment]):
    """The segments of a version, open for as long as somebody has this or one of them."""

    def __init__(self, segments: Iterable[Segment]) -> None:
        super().__init__(segments)
        self._lock = threading.Lock()
        self._served: Droppable | None = None
        self._dropped = False

    def serve_once(self, make: Callable[[], D]) -> D:
        """What `make` made of them, now or before. It is kept as long as they are."""
        with self._lock:
            if self._served is None:
                self._served = make()
                if self._dropped:
                    self._served.drop()
            return cast(D, self._served)  # everybody makes the same of them

    def release(self) -> None:
        """Nobody finds this any more. What is served of it then refers to nothing that would keep it open."""
        self._dropped = True  # without waiting for one that is being made: that one sees it
        if self._served is not None:
            self._served.drop()


class SegmentFiles:
    """The segments that anybody has open, by their files: one that several versions have is opened once.

    So appending stays cheap. Not safe to use from many threads: the store has a lock.
    """

    def __init__(self) -> None:
        self._open: weakref.WeakValueDictionary[tuple[int, int], Segment] = weakref.WeakValueDictionary()

    def open(self, path: Path) -> Segment:
        """The segment there. Raises StoreError."""
        handed_over = path.parent == FD  # which is a link to a memfd, made by the kernel
        with store_errors(f"opening {path}"):
            status = path.stat() if handed_over else path.lstat()
        file = status.st_dev, status.st_ino
        found = self._open.get(file)
        if found is None:
            self._open[file] = found = Segment.open(path, follow=handed_over)
        return found


class SegmentCache:
    """Versions that were read last, by their ids, with as many segments as `cap` but one version at least.

    Left out, `cap` follows from how many descriptors this process may have. Safe to use from many threads.
    """

    def __init__(self, cap: int | None = None) -> None:
        self._fixed_cap = cap
        self._lock = threading.Lock()
        self._known: OrderedDict[str, OpenSegments] = OrderedDict()
        self._count = 0

    @property
    def cap(self) -> int:
        """How many segments are kept open at most."""
        if self._fixed_cap is not None:
            return self._fixed_cap
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return _MAX_SEGMENTS if soft == resource.RLIM_INFINITY else min(_MAX_SEGMENTS, soft // _DESCRIPTOR_SHARE)

    def get(self, id: str) -> OpenSegments | None:
        """The segments of a version, if they are open here. This version is then the last that was read."""
        with self._lock:
            found = self._known.get(id)
            if found is not None:
                self._known.move_to_end(id)
            return found

    def put(self, id: str, opened: OpenSegments) -> None:
        """Keep the segments of a version that is read now. Those that were read longest ago may go."""
        self.pop(id)
        evicted = []
        cap = self.cap
        with self._lock:
            self._known[id] = opened
            self._count += len(opened)
            while self._count > cap and len(self._known) > 1:
                _, oldest = self._known.popitem(last=False)
                self._count -= len(oldest)
                evicted.append(oldest)
        for segments in evicted:
            segments.release()

    def pop(self, id: str) -> None:
        """Keep this version no longer. Whoever reads it still has its segments."""
        with self._lock:
            found = self._known.pop(id, None)
            self._count -= 0 if found is None else len(found)
        if found is not None:
            found.release()

    def clear(self) -> None:
        """Keep no version any longer."""
        with self._lock:
            versions = [*self._known.values()]
            self._known.clear()
            self._count = 0
        for segments in versions:
            segments.release()
