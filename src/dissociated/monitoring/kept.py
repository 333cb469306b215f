"""Memory that clients keep of what is served no more."""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Protocol, TypeAlias

from dissociated.base.fork import ProcessBound
from dissociated.memory.region import Region
from dissociated.memory.shared import can_tell_unused, is_unused, reopen_read_only

_INTERVAL = 1.0  # seconds
_JOIN_TIMEOUT = 5.0

_Left: TypeAlias = tuple[int, int]  # a descriptor, and how many bytes it keeps


class Mappable(Protocol):
    """A segment: the memory of `descriptor`, which is closed when nobody here uses the segment any more."""

    descriptor: int
    region: Region


class KeptMemory(ProcessBound):
    """Counts what is left of segments when nobody here uses them any more, for as long as clients have them mapped.

    Their connections are over, so the kernel alone can tell. It is asked by a descriptor, which itself keeps the
    memory: so it is asked every second. Where it never tells nothing is kept, and nothing counted. Safe to use from
    many threads. Close it after use.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: weakref.WeakSet[Mappable] = weakref.WeakSet()
        self._left: SimpleQueue[_Left | None] = SimpleQueue()  # its `put` may be called at any point of any thread
        self._kept: list[_Left] = []
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._can_tell: bool | None = None  # not known yet
        self.bind_to_process()

    def after_fork_in_child(self) -> None:
        for descriptor, _ in self._kept:
            os.close(descriptor)

    def watch(self, segment: Mappable) -> None:
        """A client is gone, or was cut off, and may still have this mapped. Files with a name are not counted."""
        with self._lock:
            if self._closed.is_set() or segment in self._watched or os.fstat(segment.descriptor).st_nlink:
                return
            if self._can_tell is None:
                with suppress(OSError):  # there are no descriptors now, say
                    self._can_tell = can_tell_unused()
            if not self._can_tell:
                return
            self._watched.add(segment)
            # It is called before the descriptor is closed: the latest finalizer is the first.
            end = weakref.finalize(
                segment, _keep, self._left, self._closed, os.getpid(), segment.descriptor, segment.region.size
            )
            end.atexit = False
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="kept memory", daemon=True)
                with suppress(RuntimeError):  # there are too many now: until there is one, whoever asks looks
                    thread.start()
                    self._thread = thread
                self._look()

    @property
    def nbytes(self) -> int:
        """How many bytes there are."""
        with self._lock:
            self._look()
            return sum(nbytes for _, nbytes in self._kept)

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                left = self._left.get(timeout=_INTERVAL if self._kept else None)
            except Empty:
                left = None
            with self._lock:
                self._kept += () if left is None else (left,)
                self._look()

    def _look(self) -> None:
        if self._thread is None:
            self._take()
        unused = [left for left in self._kept if is_unused(left[0])]
        self._kept = [left for left in self._kept if left not in unused]  # first: a forked child closes these
        for descriptor, _ in unused:
            os.close(descriptor)

    def _take(self) -> None:  # for the thread, where there is none
        with suppress(Empty):
            while True:
                left = self._left.get_nowait()
                self._kept += () if left is None else (left,)

    def close(self) -> None:
        """Keep and count nothing any more."""
        with self._lock:
            self._closed.set()
        if self._thread is not None:
            self._left.put(None)
            self._thread.join(_JOIN_TIMEOUT)
        with self._lock:
            self._take()
            kept, self._kept = self._kept, []
            for descriptor, _ in kept:
                os.close(descriptor)


def _keep(left: SimpleQueue[_Left | None], closed: threading.Event, process: int, descriptor: int, nbytes: int) -> None:
    if not closed.is_set() and os.getpid() == process:
        left.put((reopen_read_only(descriptor), nbytes))
