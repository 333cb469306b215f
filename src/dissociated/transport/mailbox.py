"""A bounded queue of messages between two threads."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from dissociated.errors import ConnectionClosed, DeadlineExceeded, DissociatedError, Failure, TransportError

T = TypeVar("T")


class Mailbox(Generic[T]):
    """A queue of items with a total size of up to `max_bytes`. It always takes at least one item, however large."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._items: deque[tuple[T, int]] = deque()
        self._bytes = 0
        self._lock = threading.RLock()  # a finalizer may interrupt a method, and close the mailbox
        self._changed = threading.Condition(self._lock)
        self._waiting = 0  # number of threads that wait for a change
        self._closed = False
        # Not the error: its traceback would keep all that the receiver holds until a GC.
        self._failure: Failure | None = None

    def put(self, item: T, size: int, timeout: float | None) -> None:
        """Add an item of `size` bytes.

        Args:
            item: The item.
            size: Its size, in bytes.
            timeout: Seconds to wait for room; None for no limit.

        Raises:
            ConnectionClosed: The mailbox is closed.
            DeadlineExceeded: There was no room in time.
        """
        with self._lock:
            if self._items and self._bytes + size > self._max_bytes:
                self._wait(lambda: not self._items or self._bytes + size <= self._max_bytes, timeout, "took nothing")
            if self._closed:
                raise ConnectionClosed("the peer closed the connection")
            self._items.append((item, size))
            self._bytes += size
            if self._waiting:
                self._changed.notify_all()

    def get(self, timeout: float) -> T | None:
        """Return the oldest item. If the mailbox is closed and empty, return None, or raise the error of `close`.

        Raises:
            DeadlineExceeded: No item came for `timeout` seconds.
        """
        with self._lock:
            if self._is_over(timeout):
                return None
            item, size = self._items.popleft()
            self._bytes -= size
            if self._waiting:
                self._changed.notify_all()
            return item

    def get_all(self, timeout: float) -> list[T]:
        """Return all items, the oldest first; none if the mailbox is closed and empty. Errors are those of `get`."""
        with self._lock:
            if self._is_over(timeout):
                return []
            items = [item for item, _ in self._items]
            self._items.clear()
            self._bytes = 0
            if self._waiting:
                self._changed.notify_all()
            return items

    def _is_over(self, timeout: float) -> bool:
        """Wait for an item. Return whether there will be none, or raise the error of `close`."""
        if not self._items:
            self._wait(lambda: bool(self._items), timeout, "was silent")
        if not self._items and self._failure is not None:
            raise self._failure.error()
        return not self._items

    def _wait(self, is_ready: Callable[[], bool], timeout: float | None, fault: str) -> None:
        """Wait until `is_ready`, or the mailbox is closed. Raise DeadlineExceeded with the peer's `fault`."""
        self._waiting += 1
        try:
            if not self._changed.wait_for(lambda: self._closed or is_ready(), timeout):
                raise DeadlineExceeded(f"the peer {fault} for {timeout:g} s")
        finally:
            self._waiting -= 1

    @contextmanager
    def filled_by(self, task: str) -> Iterator[None]:
        """Close the mailbox after the block, which puts items into it in a thread of its own. Its error is passed on.

        Args:
            task: The name of the block in the error that stands for an exception of another kind, which is raised.
        """
        try:
            yield
            self.close()
        except DissociatedError as error:  # also because the mailbox was closed meanwhile
            self.close(error)
        except BaseException as error:
            self.close(TransportError(f"{task} failed: {type(error).__name__}: {error}"))
            raise

    def lift(self) -> None:
        """Take any number of bytes from now on."""
        with self._lock:
            self._max_bytes = sys.maxsize
            self._changed.notify_all()

    def __len__(self) -> int:
        return len(self._items)

    @property
    def ready(self) -> bool:
        """Return whether `get` would return, or raise, at once."""
        return bool(self._items) or self._closed

    def wait_closed(self, timeout: float) -> bool:
        """Wait until the mailbox is closed, for `timeout` seconds at most. Return whether it is."""
        with self._lock:
            return self._changed.wait_for(lambda: self._closed, timeout)

    def close(self, error: DissociatedError | None = None) -> None:
        """Accept no more items. The remaining items can still be taken; after them, `get` raises `error`, if any."""
        with self._lock:
            if not self._closed:
                self._closed, self._failure = True, None if error is None else Failure.of(error)
            self._changed.notify_all()
