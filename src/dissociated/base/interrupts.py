"""The shield that holds Ctrl-C back in the few critical sections that need it. It takes effect right after.

A critical section takes a resource and hands it to its owner, or gives several resources back. No other code defends
itself against an exception between two bytecodes. docs/architecture.md states what is guaranteed.
"""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


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


def error_code_callback(error: int) -> Any:
    """Return a function for ctypes callbacks with two arguments: it calls `__getitem__` of the first with the second.

    It returns 0, or `error` if `__getitem__` raises an exception. Ctrl-C may come at the first bytecode of a callback
    in Python, before any `try` or `with`. ctypes would then return an arbitrary value from the stack, and 0 means
    success. So this is a function in C, which no signal handler interrupts.
    """
    answer = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.py_object)(("PyMapping_HasKey", ctypes.pythonapi))
    answer.restype = (error, 0).__getitem__  # whether the key was found, as an error code
    return answer
