"""A bounded queue of messages between two threads."""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

from dissociated.errors import ConnectionClosed, DeadlineExceeded, DissociatedError

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Holds items of up to `max_bytes` together; always at least one, however large."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._items: deque[tuple[T, int]] = deque()
        self._bytes = 0
        self._changed = threading.Condition()
        self._closed = False
        # Not the error itself: its traceback would keep everything that its receiver holds until the GC comes by.
        self._error: tuple[type[DissociatedError], str] | None = None

    def put(self, item: T, size: int, timeout: float | None) -> None:
        """Add an item of `size` bytes, waiting for room for up to `timeout` seconds; None is without a limit.

        Raises ConnectionClosed once closed, and DeadlineExceeded where there is no room in time.
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
        """The oldest item. Once closed and empty, None, or it raises the error that was given to `close`.

        Raises DeadlineExceeded where nothing comes for `timeout` seconds.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._closed or bool(self._items), timeout):
                raise DeadlineExceeded(f"the peer was silent for {timeout:g} s")
            if not self._items:
                if self._error is not None:
                    kind, reason = self._error
                    raise kind(reason)
                return None
            item, size = self._items.popleft()
            self._bytes -= size
            self._changed.notify_all()
            return item

    def __len__(self) -> int:
        return len(self._items)

    @property
    def ready(self) -> bool:
        """Whether `get` would return, or raise, at once."""
        return bool(self._items) or self._closed

    def close(self, error: DissociatedError | None = None) -> None:
        """Accept no more items. What is there can still be taken; then comes `error`, if one is given."""
        with self._changed:
            if not self._closed:
                self._closed, self._error = True, None if error is None else (type(error), str(error))
            self._changed.notify_all()
