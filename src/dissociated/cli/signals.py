"""The signals that end a command: waited for, or as exceptions."""

from __future__ import annotations

import os
import select
import signal
import sys
from typing import Self

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignal:
    """Comes once, and stays. Made by the main thread, before there are others; it waits without using the processor.

    It is a pipe that the kernel's signal handler itself writes into. A `threading.Event` that a handler sets would
    not do: set while the main thread is about to wait for it, it waits for that thread, which is itself; and a signal
    just before the main thread sleeps is seen when something else wakes it, if ever.
    """

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)

    def set(self) -> None:
        """As if a signal had come."""
        os.write(self._write, b"\0")

    def wait(self, timeout: float | None = None) -> bool:
        """Whether it has come, within so many seconds."""
        waiting = select.poll()
        waiting.register(self._read, select.POLLIN)
        return bool(waiting.poll(None if timeout is None else timeout * 1000))


class EndingSignals:
    """Within the `with` the first of them raises KeyboardInterrupt or SystemExit. For the main thread.

    The others do nothing, so that what is done because of the first is done to its end. SIGQUIT and SIGKILL remain.
    Call `check` now and then: an exception that is raised within a finalizer is lost. What is ignored stays so: `nohup`
    has SIGHUP ignored.
    """

    def __init__(self) -> None:
        found = {number: signal.getsignal(number) for number in _ENDING}
        self._before = {number: one for number, one in found.items() if one not in (None, signal.SIG_IGN)}
        self._came: int | None = None  # the first of them

    def __enter__(self) -> Self:
        self.catch()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def catch(self) -> None:
        """Raise from now on."""
        for number in self._before:
            signal.signal(number, self._end)

    def release(self) -> None:
        """Do from now on what was done before."""
        for number, before in self._before.items():
            signal.signal(number, before)

    def check(self) -> None:
        """Raise once more if one of them came. For where nothing is done because of it."""
        if self._came is not None:
            self._raise(self._came)

    def _end(self, number: int, _: object) -> None:
        if self._came is None:
            self._came = number
            self._raise(number)

    def _raise(self, number: int) -> None:
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(128 + number)
