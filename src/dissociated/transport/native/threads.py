"""Threads that drive a medium or wait for it.

How to start a thread, how to wake a thread that sleeps on descriptors, the lock of a medium, and a thread for the
heartbeats of connections.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

from dissociated.base.interrupts import interrupts_held
from dissociated.base.once import once
from dissociated.base.oserrors import socket_error
from dissociated.errors import DissociatedError, TransportError

_log = logging.getLogger(__name__)

MAX_SLEEP = 1.0  # seconds, in case the medium fails to wake the thread


def start_thread(run: Callable[[], object], name: str) -> None:
    """Start a daemon thread called `name` that calls `run`.

    Raises:
        TransportError: The system has no thread to spare.
    """
    try:
        threading.Thread(target=run, name=name, daemon=True).start()
    except RuntimeError as error:
        raise TransportError(f"cannot start the thread {name!r}: {error}") from None


class Waker:
    """An eventfd that wakes a thread which sleeps on it. Any thread may set it at any time, even after `close`.

    Raises:
        TransportError: No descriptor can be opened.
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


class Monitor:
    """The lock of a medium, and the one thread at a time that sleeps on the medium without the lock.

    Raises:
        TransportError: No descriptor can be opened.
    """

    def __init__(self) -> None:
        #: Held while a thread uses the medium. It is reentrant only because such a lock knows its thread after Ctrl-C.
        self.lock = threading.Condition()
        self.waker = Waker()
        self.asleep = False  #: whether a thread sleeps on the medium; it notifies the threads that wait for the lock

    def wake(self) -> None:
        """Wake the sleeping thread, if there is one."""
        if self.asleep:
            self.waker.set()

    def sleep(self, sleep: Callable[[], object]) -> None:
        """Call `sleep`, which sleeps until the medium has work to do or the waker is set, without the lock."""
        with interrupts_held(self.waker.set):
            self.asleep = True
            self.lock.release()
            try:
                sleep()
            finally:
                self.lock.acquire()
                self.asleep = False
                self.lock.notify_all()


#: Sends one heartbeat of a connection.
Beat: TypeAlias = Callable[[], None]


class Heartbeat:
    """The heartbeats of all connections of this process, and their thread, which runs while there are connections."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._due: dict[Beat, tuple[float, float]] = {}  # the time of the next heartbeat, and the seconds between two
        self._running = False

    def add(self, beat: Beat, interval: float) -> None:
        """Call `beat` every `interval` seconds.

        Raises:
            TransportError: The system has no thread to spare.
        """
        with self._changed:
            if not self._running:
                start_thread(self._run, "heartbeat")
                self._running = True
            self._due[beat] = time.monotonic() + interval, interval
            self._changed.notify()

    def remove(self, beat: Beat) -> None:
        """Stop calling `beat`, if it is called."""
        with self._changed:
            self._due.pop(beat, None)
            self._changed.notify()

    def _run(self) -> None:
        with self._changed:
            try:
                while self._due:
                    self._beat()
            finally:
                self._running = False

    def _beat(self) -> None:
        beat = min(self._due, key=self._due.__getitem__)
        due, interval = self._due[beat]
        remaining = due - time.monotonic()
        if remaining > 0:
            self._changed.wait(remaining)
            return
        self._due[beat] = time.monotonic() + interval, interval
        self._changed.release()
        try:
            beat()
        except DissociatedError as error:
            _log.info("heartbeat failed: heartbeat=%r error=%s", beat, error)
        except Exception:  # such as a MemoryError, which must not stop the heartbeats of other connections
            _log.exception("heartbeat failed, internal error: heartbeat=%r", beat)
        finally:
            self._changed.acquire()


@once
def heartbeat_of(pid: int) -> Heartbeat:
    """Return the heartbeats of process `pid`: after a fork, threads and connections remain the parent's."""
    return Heartbeat()
