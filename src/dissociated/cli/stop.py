"""When a command that serves ends: at SIGINT or SIGTERM, or when a thread of its own says so."""

from __future__ import annotations

import os
import select
import signal


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
