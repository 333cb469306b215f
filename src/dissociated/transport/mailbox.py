"""A bounded queue of messages between two threads."""

from __future__ import annotations

import sys
import threading
from collections import deque
from typing import Generic, TypeVar

from dissociated.errors import ConnectionClosed, DeadlineExceeded, DissociatedError, Failure

T = TypeVar("T")


class Mailbox(Generic[T]):
    """A queue of items with a total size of up to `max_bytes`. It always takes at least one item, however large."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._items: deque[tuple[T, int]] = deque()
        self._bytes = 0
        self._changed = threading.Condition()
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
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._closed or not self._items or self._bytes + size <= self._max_bytes, timeout
            ):
                raise DeadlineExceeded(f"the peer took nothing for {timeout:g} s")
            if self._closed:
                raise ConnectionClosed("the peer closed the connection")
            self._items.append((item, size))
            self._bytes += size
            self._changed.notify_all()

    def get(self, timeout: float) -> T | None:
        """Return the oldest item. If the mailbox is closed and empty, return None, or raise the error of `close`.

        Raises:
            DeadlineExceeded: No item came for `timeout` seconds.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._closed or bool(self._items), timeout):
                raise DeadlineExceeded(f"the peer was silent for {timeout:g} s")
            if not self._items:
                if self._failure is not None:
                    raise self._failure.error()
                return None
            item, size = self._items.popleft()
            self._bytes -= size
            self._changed.notify_all()
            return item

    def lift(self) -> None:
        """Take any number of bytes from now on."""
        with self._changed:
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
        with self._changed:
            return self._changed.wait_for(lambda: self._closed, timeout)

    def close(self, error: DissociatedError | None = None) -> None:
        """Accept no more items. The remaining items can still be taken; after them, `get` raises `error`, if any."""
        with self._changed:
            if not self._closed:
                self._closed, self._failure = True, None if error is None else Failure.of(error)
            self._changed.notify_all()
