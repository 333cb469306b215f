"""Signals that end a command: a command waits for them, or they raise exceptions."""

from __future__ import annotations

import os
import select
import signal
import sys
from typing import Self

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignal:
    """An event that is set by SIGINT or SIGTERM, and stays set. Create it in the main thread, before other threads.

    Waiting uses no processor time. The event is a pipe to which Python's C signal handler writes. A `threading.Event`
    that a Python handler sets would not work. If the main thread were just acquiring the lock of the event, the handler
    would wait for its own thread. And a signal just before the main thread sleeps would be handled only when something
    else wakes the thread.
    """

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)

    def set(self) -> None:
        """Set the event, like a signal does."""
        os.write(self._write, b"\0")

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the event, at most `timeout` seconds. Return whether it is set."""
        waiting = select.poll()
        waiting.register(self._read, select.POLLIN)
        return bool(waiting.poll(None if timeout is None else timeout * 1000))


class EndingSignals:
    """A context in which the first ending signal raises KeyboardInterrupt or SystemExit. For the main thread.

    Later signals are ignored, so that the cleanup after the first is not interrupted; SIGQUIT and SIGKILL still work.
    With a `limit`, the process ends if the cleanup takes longer than this number of seconds.

    Call `check` regularly, because Python discards an exception that is raised within a finalizer. Signals that were
    ignored before stay ignored, for example SIGHUP under `nohup`.
    """

    def __init__(self, limit: float = 0) -> None:
        self._limit = limit
        handlers = {number: signal.getsignal(number) for number in _ENDING}
        self._before = {
            number: handler for number, handler in handlers.items() if handler not in (None, signal.SIG_IGN)
        }
        self._first_signal: int | None = None

    def __enter__(self) -> Self:
        self.catch()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def catch(self) -> None:
        """Install the handlers that raise."""
        for number in self._before:
            signal.signal(number, self._end)

    def release(self) -> None:
        """Restore the previous handlers."""
        if self._first_signal is not None and self._limit:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, self._alarm_before or signal.SIG_DFL)
        for number, before in self._before.items():
            signal.signal(number, before)

    def check(self) -> None:
        """Raise again if a signal has arrived: its first exception may have been lost."""
        if self._first_signal is not None:
            self._raise(self._first_signal)

    def _end(self, number: int, _: object) -> None:
        if self._first_signal is None:
            self._first_signal = number
            if self._limit:
                self._alarm_before = signal.signal(signal.SIGALRM, lambda *_: os._exit(128 + number))
                signal.setitimer(signal.ITIMER_REAL, self._limit)
            self._raise(number)

    def _raise(self, number: int) -> None:
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(128 + number)
