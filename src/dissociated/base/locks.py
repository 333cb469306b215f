"""Locks that a thread does not wait for without a deadline."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from dissociated.errors import DeadlineExceeded


@contextmanager
def held_within(timeout: float, lock: threading.Lock | threading.RLock, message: str) -> Iterator[None]:
    """Hold `lock` in the `with` block.

    Args:
        timeout: The seconds to wait for the lock.
        lock: The lock.
        message: The text of the error.

    Raises:
        DeadlineExceeded: Another thread has kept the lock for longer.
    """
    if not lock.acquire(timeout=timeout):
        raise DeadlineExceeded(message)
    try:
        yield
    finally:
        lock.release()
