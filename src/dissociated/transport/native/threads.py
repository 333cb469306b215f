"""Threads that work for a medium, or wait for it: starting one, and waking one that sleeps on descriptors."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Sequence

from dissociated.errors import TransportError
from dissociated.transport.framed.connection import socket_error

MAX_SLEEP = 1.0  # seconds, should the medium ever forget to wake us


def start_thread(run: Callable[[], object], name: str, what: str) -> None:
    """Start one. Raises TransportError, which says `what` takes a thread, where there is none to be had."""
    try:
        threading.Thread(target=run, name=name, daemon=True).start()
    except RuntimeError as error:
        raise TransportError(f"{what}: {error}") from None


class Waker:
    """Wakes whoever sleeps on its descriptor. May be set from any thread, at any time, closed or not.

    Raises TransportError where there is no descriptor to be had.
    """

    def __init__(self) -> None:
        try:
            self.descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except OSError as error:
            raise socket_error(error, "opening an eventfd") from None
        self._lock = threading.RLock()  # a finalizer may interrupt its owner
        self._open = True

    def set(self) -> None:
        """Wake, now or when somebody next sleeps."""
        with self._lock:
            if self._open:
                os.eventfd_write(self.descriptor, 1)

    def clear(self) -> None:
        """Forget what was set."""
        os.eventfd_read(self.descriptor)

    def sleep(self, descriptors: Sequence[int], seconds: float) -> bool:
        """Sleep until there is something to read at one of them, or this is set, which it then is no more.

        Whether one of them woke us.
        """
        poll = select.poll()
        for descriptor in (*descriptors, self.descriptor):
            poll.register(descriptor, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(seconds * 1000)}
        if self.descriptor in ready:
            self.clear()
        return not ready.isdisjoint(descriptors)

    def close(self) -> None:
        """Give the descriptor back."""
        with self._lock:
            self._open = False
            os.close(self.descriptor)
