"""The exit of the interpreter, and threads that are still reading at that time.

Before Python 3.14, a daemon thread that requests the GIL while the interpreter is finalizing is ended wherever it is.
Below a frame of libarrow, that ends the process: libarrow's destructors run without the GIL, and abort. So this module
acts before finalization. It stops the threads of this library and waits for them. It holds the user's own threads where
they read: they wait for a lock that is never released, and never request the GIL again.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from types import CodeType, FrameType
from typing import Any, Protocol, TypeVar, cast

from dissociated.base.fork import hold_over_forks
from dissociated.base.once import once
from dissociated.errors import TransportError

F = TypeVar("F", bound=Callable[..., Any])

_TIMEOUT = 5.0  # seconds that threads may take to end, or to be held
_POLL_INTERVAL = 0.002  # seconds

_exiting_thread: int | None = None
_kept_values: list[object] = []
_keepable: weakref.WeakSet[Any] = weakref.WeakSet()
_stoppable: weakref.WeakSet[Stoppable] = weakref.WeakSet()
_sections: set[CodeType] = set()
_lock = threading.Lock()  # guards the two sets of weak references
_never_released = threading.Lock()
_never_released.acquire()


class Stoppable(Protocol):
    """An object in which another thread may be blocked."""

    def stop(self) -> None:
        """Make that thread return. Called from another thread."""


class StreamThread(threading.Thread):
    """A thread of a stream. At the exit of the interpreter, it is stopped and joined."""

    def __init__(self, owner: Stoppable, run: Callable[..., None], arguments: tuple[Any, ...], name: str) -> None:
        super().__init__(target=run, args=arguments, name=name, daemon=True)
        act_at_exit()
        self._owner = weakref.ref(owner)

    def start(self) -> None:
        """Start the thread.

        Raises:
            TransportError: The system has no more threads.
        """
        try:
            super().start()
        except RuntimeError as error:
            raise TransportError(f"cannot start the thread to {self.name}: {error}") from None

    def stop(self) -> None:
        """Stop the thread through its owner, if the owner still exists."""
        owner = self._owner()
        if owner is not None:
            owner.stop()


@once
def act_at_exit() -> None:
    """Register this module's action at exit. It runs after actions that are registered with `atexit` later."""
    hold_over_forks(_lock)
    atexit.register(_exit)


def stop_at_exit(stoppable: Stoppable) -> None:
    """Stop `stoppable` at exit, so that a thread that is blocked in it can be held."""
    act_at_exit()
    with _lock:
        _stoppable.add(stoppable)


def keep_at_exit(value: Any) -> None:
    """Keep `value` from exit on, so that no thread deallocates it: that would release the GIL below libarrow."""
    act_at_exit()
    with _lock:
        _keepable.add(value)


def section(function: F) -> F:
    """Mark a function or generator that libarrow calls, or that calls libarrow. At exit, no thread may be in it.

    The function must call `hold_at_exit` at its beginning and after each wait.
    """
    _sections.add(cast("Any", function).__code__)
    return function


def hold_at_exit() -> None:
    """Hold this thread forever if the interpreter is exiting.

    The thread that exits, and threads of this library, are not held.
    """
    if _exiting_thread is None or _exiting_thread == threading.get_ident():
        return
    if not isinstance(threading.current_thread(), StreamThread):
        _hold()


def _hold() -> None:
    _never_released.acquire()


def _is_held(frame: FrameType) -> bool:
    """Return whether a thread with this innermost frame waits in `_hold`. On the line of `def`, it may not wait yet."""
    return frame.f_code is _hold.__code__ and frame.f_lineno > _hold.__code__.co_firstlineno


def _in_section(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code in _sections:
            return True
        frame = frame.f_back
    return False


def _stream_threads() -> list[StreamThread]:
    return [thread for thread in threading.enumerate() if isinstance(thread, StreamThread)]


def _exit() -> None:
    global _exiting_thread
    _exiting_thread = threading.get_ident()
    with _lock:
        _kept_values.extend(_keepable)
    deadline = time.monotonic() + _TIMEOUT
    while True:
        own = {_exiting_thread, *(thread.ident for thread in _stream_threads())}
        other_frames = [frame for thread, frame in sys._current_frames().items() if thread not in own]
        if not other_frames:
            break
        with _lock:
            stoppables = [*_stoppable]
        for stoppable in stoppables:
            stoppable.stop()
        # The pause also lets a thread finish that is unmapping memory, which no frame shows.
        time.sleep(_POLL_INTERVAL)
        frames = [frame for thread, frame in sys._current_frames().items() if thread not in own]
        if time.monotonic() > deadline or all(_is_held(frame) or not _in_section(frame) for frame in frames):
            break
    threads = _stream_threads()
    for thread in threads:
        thread.stop()
    for thread in threads:
        with suppress(RuntimeError):  # another thread may be about to start it, or was interrupted then
            thread.join(max(0.0, deadline - time.monotonic()))
