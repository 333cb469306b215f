"""Memory that clients still have mapped after the server has stopped serving it."""

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

_Left: TypeAlias = tuple[int, int]  # a descriptor, and the number of bytes that it keeps


class Mappable(Protocol):
    """A segment: the memory of `descriptor`, which is closed when this process no longer uses the segment."""

    descriptor: int
    region: Region


class KeptMemory(ProcessBound):
    """A count of the memory of segments that only clients use, since they still have it mapped.

    The connections of these clients have ended, so only the kernel knows of their mappings. The query needs a
    descriptor, which itself keeps the memory alive. Therefore a thread repeats the query every second, and closes the
    descriptors of unused segments. On kernels that do not support the query, nothing is kept and nothing counted.

    Its methods may be called from several threads. Close it after use.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: weakref.WeakSet[Mappable] = weakref.WeakSet()
        # A queue whose `put` is reentrant, since finalizers run at any point of any thread
        self._left: SimpleQueue[_Left | None] = SimpleQueue()
        self._kept: list[_Left] = []
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._can_tell: bool | None = None  # None until it is known.
        self.bind_to_process()

    def after_fork_in_child(self) -> None:
        for descriptor, _ in self._kept:
            os.close(descriptor)

    def watch(self, segment: Mappable) -> None:
        """Watch a segment that a disconnected client may still have mapped. Files that have a name are not counted."""
        with self._lock:
            if self._closed.is_set() or segment in self._watched or os.fstat(segment.descriptor).st_nlink:
                return
            if self._can_tell is None:
                with suppress(OSError):  # For example, no descriptor may be free now.
                    self._can_tell = can_tell_unused()
            if not self._can_tell:
                return
            self._watched.add(segment)
            # The finalizer runs before the descriptor is closed, since finalizers run in the reverse order of their
            # creation.
            end = weakref.finalize(
                segment, _keep, self._left, self._closed, os.getpid(), segment.descriptor, segment.region.size
            )
            end.atexit = False
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="kept memory", daemon=True)
                # At the limit of threads, `_look` does the work of the thread whenever the count is read, until a
                # thread starts.
                with suppress(RuntimeError):
                    thread.start()
                    self._thread = thread
                self._look()

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
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
        # Remove them first, since a forked child closes the rest of `_kept`.
        self._kept = [left for left in self._kept if left not in unused]
        for descriptor, _ in unused:
            os.close(descriptor)

    def _take(self) -> None:  # replaces the thread if it could not start
        with suppress(Empty):
            while True:
                left = self._left.get_nowait()
                self._kept += () if left is None else (left,)

    def close(self) -> None:
        """Stop counting, and close all descriptors."""
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
