"""Values that are made on first use and then shared by every thread of the process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable
from functools import update_wrapper
from typing import Generic, TypeVar

T = TypeVar("T")


class once(Generic[T]):  # noqa: N801  # a decorator
    """A decorator that calls a function once for each tuple of arguments. Other threads wait for the first call.

    With `functools.cache`, threads that call before the first call returns would each get a value of their own. An
    exception is not remembered. A process that is forked while another thread makes a value does not wait for that
    thread.
    """

    def __init__(self, make: Callable[..., T]) -> None:
        update_wrapper(self, make)
        self._make = make
        self._values: dict[tuple[Hashable, ...], T] = {}
        self._locks: dict[int, threading.RLock] = {}  # by process id

    def __call__(self, *arguments: Hashable) -> T:
        try:
            return self._values[arguments]
        except KeyError:
            pass
        with self._locks.setdefault(os.getpid(), threading.RLock()):
            if arguments not in self._values:
                self._values[arguments] = self._make(*arguments)
            return self._values[arguments]
