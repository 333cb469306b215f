"""Threads that a stream needs beside its reader's own, and their end."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from dissociated.errors import TransportError
from dissociated.once import once

_EXIT_TIMEOUT = 5.0  # seconds that threads may take to end with the interpreter


class Stoppable(Protocol):
    """What has a thread, and can make it return."""

    def stop(self) -> None:
        """Make the thread return, from another thread."""


class StreamThread(threading.Thread):
    """A thread of a stream. It is stopped, and waited for, before the interpreter goes.

    A daemon thread that comes back from the system then is ended wherever it is. Within libarrow, where the last
    reference to a region unmaps it, that would bring down the process.
    """

    def __init__(self, owner: Stoppable, run: Callable[..., None], arguments: tuple[Any, ...], name: str) -> None:
        super().__init__(target=run, args=arguments, name=name, daemon=True)
        self._owner = weakref.ref(owner)
        end_at_exit()

    def start(self) -> None:
        """Start it. Raises TransportError where no thread is to be had."""
        try:
            super().start()
        except RuntimeError as error:
            raise TransportError(f"to {self.name} takes a thread: {error}") from None

    def stop(self) -> None:
        """Have the owner stop it, if the owner is still there."""
        owner = self._owner()
        if owner is not None:
            owner.stop()


@once
def end_at_exit() -> None:
    """Stop every StreamThread before the interpreter goes, and wait for them for a few seconds."""
    atexit.register(_stop_threads)


def _stop_threads() -> None:
    helpers = [thread for thread in threading.enumerate() if isinstance(thread, StreamThread)]
    for helper in helpers:
        helper.stop()
    end = time.monotonic() + _EXIT_TIMEOUT
    for helper in helpers:
        helper.join(max(0.0, end - time.monotonic()))
