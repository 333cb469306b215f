"""Memory that clients still have mapped after the server has stopped serving it."""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TypeAlias

from dissociated.base.fork import ProcessBound
from dissociated.datasets.static_message import SharedSegment
from dissociated.memory.shared import can_tell_unused, is_unused, reopen_read_only

_INTERVAL = 1.0  # seconds
_JOIN_TIMEOUT = 5.0

_Mapping: TypeAlias = tuple[int, int]  # a descriptor, and the number of bytes that it keeps


class KeptMemory(ProcessBound):
    """A count of the memory of segments that only clients use, since they still have it mapped.

    The connections of these clients have ended, so only the kernel knows of their mappings. The query needs a
    descriptor, which itself keeps the memory alive. Therefore a thread repeats the query every second, and closes the
    descriptors of unused segments. On kernels that do not support the query, nothing is kept and nothing counted.

    Its methods may be called from several threads. Close it after use.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: weakref.WeakSet[SharedSegment] = weakref.WeakSet()
        # A queue whose `put` is reentrant, since finalizers run at any point of any thread
        self._queue: SimpleQueue[_Mapping | None] = SimpleQueue()
        self._mappings: list[_Mapping] = []
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._can_tell: bool | None = None  # None until it is known.
        self.bind_to_process()

    def after_fork_in_child(self) -> None:
        for descriptor, _ in self._mappings:
            os.close(descriptor)

    def watch(self, segment: SharedSegment) -> None:
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
                segment, _enqueue, self._queue, self._closed, os.getpid(), segment.descriptor, segment.region.size
            )
            end.atexit = False
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="kept memory", daemon=True)
                # At the limit of threads, `_look` does the work of the thread whenever the count is read, until a
                # thread starts.
                with suppress(RuntimeError):
                    thread.start()
                    self._thread = thread
                self._close_unused()

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
        with self._lock:
            self._close_unused()
            return sum(nbytes for _, nbytes in self._mappings)

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                mapping = self._queue.get(timeout=_INTERVAL if self._mappings else None)
            except Empty:
                mapping = None
            with self._lock:
                self._mappings += () if mapping is None else (mapping,)
                self._close_unused()

    def _close_unused(self) -> None:
        if self._thread is None:
            self._drain_queue()
        unused = [mapping for mapping in self._mappings if is_unused(mapping[0])]
        # Remove them first, since a forked child closes the rest of `_mappings`.
        self._mappings = [mapping for mapping in self._mappings if mapping not in unused]
        for descriptor, _ in unused:
            os.close(descriptor)

    def _drain_queue(self) -> None:  # replaces the thread if it could not start
        with suppress(Empty):
            while True:
                mapping = self._queue.get_nowait()
                self._mappings += () if mapping is None else (mapping,)

    def close(self) -> None:
        """Stop counting, and close all descriptors."""
        with self._lock:
            self._closed.set()
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(_JOIN_TIMEOUT)
        with self._lock:
            self._drain_queue()
            mappings, self._mappings = self._mappings, []
            for descriptor, _ in mappings:
                os.close(descriptor)


def _enqueue(
    queue: SimpleQueue[_Mapping | None], closed: threading.Event, process: int, descriptor: int, nbytes: int
) -> None:
    if not closed.is_set() and os.getpid() == process:
        queue.put((reopen_read_only(descriptor), nbytes))
