"""What is made on first use, and then shared by every thread of the process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable
from functools import update_wrapper
from typing import Generic, TypeVar

T = TypeVar("T")


class once(Generic[T]):  # noqa: N801  # a decorator
    """Make something for each tuple of arguments once, whoever asks; those who ask meanwhile wait for it.

    `functools.cache` lets all in who ask before the first is done, and each gets a thing of its own. What raises is
    not remembered. A process that is forked while another thread makes something does not wait for that thread.
    """

    def __init__(self, make: Callable[..., T]) -> None:
        update_wrapper(self, make)
        self._make = make
        self._made: dict[tuple[Hashable, ...], T] = {}
        self._locks: dict[int, threading.RLock] = {}  # by process

    def __call__(self, *arguments: Hashable) -> T:
        try:
            return self._made[arguments]
        except KeyError:
            pass
        with self._locks.setdefault(os.getpid(), threading.RLock()):
            if arguments not in self._made:
                self._made[arguments] = self._make(*arguments)
            return self._made[arguments]

    def cache_clear(self) -> None:
        """Forget what was made."""
        self._made.clear()
