"""Listeners over a medium that works only when it is called, and that has one descriptor to wait on.

A listener also exposes memory if its connections allow one-sided reads: its connections then share the resources with
which the listener registers memory.
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeAlias

from dissociated.base.interrupts import interrupts_held
from dissociated.errors import ConnectionClosed, TransportError
from dissociated.memory.region import Region
from dissociated.memory.remote import Span
from dissociated.transport.base import Connection, Listener
from dissociated.transport.native.threads import Monitor

#: Withdraws memory from which peers can fetch, when it is called or when the region is garbage-collected.
Withdraw: TypeAlias = "weakref.finalize[..., Region]"


def withdraw_with(region: Region, withdraw: Callable[..., None], *arguments: Any) -> Withdraw:
    """Call `withdraw` with `arguments` when `region` is garbage-collected.

    Registered memory must not be unmapped before that. It must be one of the arguments, so that the finalizer keeps it
    alive.

    Returns:
        A finalizer, which also withdraws the memory when it is called.
    """
    finalizer = weakref.finalize(region, withdraw, *arguments)
    finalizer.atexit = False
    return finalizer


class NativeListener(Listener):
    """A listener over a medium that works only when it is called.

    The methods of a subclass are called with the lock held, except `_sleep`. A subclass opens the medium before it
    calls this constructor, so that a failure of the medium leaves no resources open here.
    """

    def __init__(self, exposes_memory: bool) -> None:
        super().__init__()
        self.exposes_memory = exposes_memory
        self._exposed: weakref.WeakKeyDictionary[Region, tuple[Span, Withdraw]] = weakref.WeakKeyDictionary()
        self._closed = self._released = False
        self._monitor = Monitor()
        self._lock = self._monitor.lock

    # Implemented by each medium

    @abstractmethod
    def _progress(self) -> None:
        """Let the medium work until it has nothing to do, or this listener is closed."""

    @abstractmethod
    def _next(self) -> Connection | None:
        """Return the connection of the next client; None if there is none yet."""

    @abstractmethod
    def _arm(self) -> bool:
        """Prepare to sleep. Return False if the medium has work to do first."""

    @abstractmethod
    def _sleep(self) -> None:
        """Sleep until the medium has work to do or the waker is set, for MAX_SLEEP seconds at most."""

    @abstractmethod
    def _register(self, region: Region) -> tuple[Span, Withdraw]:
        """Allow peers to fetch from `region`. Return its span, and the call that withdraws it."""

    @abstractmethod
    def _turn_away(self) -> None:
        """Reject clients that are waiting and were not accepted. The caller holds Ctrl-C back."""

    @abstractmethod
    def _release(self) -> None:
        """Give all resources back to the medium. The caller holds Ctrl-C back."""

    # Implemented here for all media

    def accept(self) -> Connection | None:
        while True:
            with self._lock:
                self._progress()
                if self._closed:
                    return None
                connection = self._next()
                if connection is not None:
                    connection.exposes_memory = self.exposes_memory
                    return connection
                if self._arm():
                    self._monitor.sleep(self._sleep)

    def expose(self, region: Region) -> Span:
        if not self.exposes_memory:
            raise TransportError(f"{self.uri} does not allow fetches from memory: start the server with allow_rma=True")
        with self._lock:
            if self._closed:
                raise ConnectionClosed("the listener is closed")
            if region not in self._exposed:
                self._exposed[region] = self._register(region)
            return self._exposed[region][0]

    def close(self) -> None:
        with interrupts_held():
            self._closed = True
            self._monitor.waker.set()
            with self._lock:
                while self._monitor.asleep:
                    self._lock.wait()
                if not self._released:
                    self._released = True
                    self._release_all()

    def _release_all(self) -> None:
        """Release all resources, even if releasing one of them raises."""
        with ExitStack() as undo:  # runs the callbacks in reverse order
            undo.callback(self._monitor.waker.close)
            undo.callback(self._release)
            for _, withdraw in self._exposed.values():
                undo.callback(withdraw)
            undo.callback(self._turn_away)

    def after_fork_in_child(self) -> None:
        for _, withdraw in self._exposed.values():
            withdraw.detach()
        super().after_fork_in_child()
