"""Threads that drive a medium or wait for it: how to start one, and how to wake one that sleeps on descriptors."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Sequence

from dissociated.errors import TransportError
from dissociated.transport.framed.connection import socket_error

MAX_SLEEP = 1.0  # seconds, in case the medium fails to wake the thread


def start_thread(run: Callable[[], object], name: str) -> None:
    """Start a daemon thread called `name` that calls `run`.

    Raises:
        TransportError: if the system has no thread to spare.
    """
    try:
        threading.Thread(target=run, name=name, daemon=True).start()
    except RuntimeError as error:
        raise TransportError(f"cannot start the thread {name!r}: {error}") from None


class Waker:
    """An eventfd that wakes a thread which sleeps on it. Any thread may set it at any time, even after `close`.

    Raises:
        TransportError: if no descriptor can be opened.
    """

    def __init__(self) -> None:
        try:
            self.descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except OSError as error:
            raise socket_error(error, "opening an eventfd") from None
        self._lock = threading.RLock()  # a finalizer may interrupt its owner
        self._open = True

    def set(self) -> None:
        """Wake the sleeping thread, or else the next one as soon as it sleeps."""
        with self._lock:
            if self._open:
                os.eventfd_write(self.descriptor, 1)

    def clear(self) -> None:
        """Reset the waker after it was set."""
        os.eventfd_read(self.descriptor)

    def sleep(self, descriptors: Sequence[int], seconds: float) -> bool:
        """Sleep until one of `descriptors` is readable or the waker is set, for `seconds` at most. Reset the waker.

        Returns:
            Whether one of `descriptors` is readable.
        """
        poll = select.poll()
        for descriptor in (*descriptors, self.descriptor):
            poll.register(descriptor, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(seconds * 1000)}
        if self.descriptor in ready:
            self.clear()
        return not ready.isdisjoint(descriptors)

    def close(self) -> None:
        """Close the descriptor."""
        with self._lock:
            self._open = False
            os.close(self.descriptor)
