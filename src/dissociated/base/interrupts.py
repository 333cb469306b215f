"""The shield that holds Ctrl-C back in the few critical sections that need it. It takes effect right after.

A critical section takes a resource and hands it to its owner, or gives several resources back. No other code defends
itself against an exception between two bytecodes. docs/architecture.md states what is guaranteed.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def interrupts_held(wake: Callable[[], object] | None = None) -> Iterator[None]:
    """Hold Ctrl-C back until the end of the `with` block, and then deliver it.

    In other threads than the main one this does nothing, because Python runs signal handlers in the main thread only.
    A handler that was not installed by Python is not replaced.

    Args:
        wake: Is called when Ctrl-C arrives, to end a wait in the block at once.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is None:
        yield
        return
    pending = False

    def hold(number: int, frame: object) -> None:
        nonlocal pending
        pending = True
        if wake is not None:
            wake()

    previous = signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if pending:
            signal.raise_signal(signal.SIGINT)
