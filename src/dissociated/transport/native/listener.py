"""A listener over a medium that nothing moves unless somebody lets it work, and that has one descriptor to wait on.

It exposes memory too, where its connections can be read from: whoever may fetch shares what the listener has open.
"""

from __future__ import annotations

import threading
import weakref
from abc import abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeAlias

from dissociated.errors import ConnectionClosed, TransportError
from dissociated.memory.region import Region
from dissociated.memory.remote import Span
from dissociated.transport.base import Connection, Listener
from dissociated.transport.native.interrupts import interrupts_held
from dissociated.transport.native.threads import Waker

#: Withdraws memory that peers can fetch from: when it is called, or when the region is collected.
Withdraw: TypeAlias = "weakref.finalize[..., Region]"


def withdraw_with(region: Region, withdraw: Callable[..., None], *arguments: Any) -> Withdraw:
    """Withdraw memory by this call, with these arguments, once `region` is collected.

    What is registered must not be unmapped before: the finalizer holds on to it, so it is one of the arguments.
    """
    finalizer = weakref.finalize(region, withdraw, *arguments)
    finalizer.atexit = False
    return finalizer


class NativeListener(Listener):
    """See the module. Everything that a subclass implements is called with the lock held, but `_sleep`.

    Whoever makes one opens the medium first: what it raises then leaves nothing behind.
    """

    def __init__(self, exposes_memory: bool) -> None:
        super().__init__()
        self.exposes_memory = exposes_memory
        self._exposed: weakref.WeakKeyDictionary[Region, tuple[Span, Withdraw]] = weakref.WeakKeyDictionary()
        self._closed = self._released = False
        self._waker = Waker()
        self._lock = threading.Condition(threading.Lock())  # held by whoever uses the medium
        self._asleep = False

    # What a medium does

    @abstractmethod
    def _progress(self) -> None:
        """Let the medium work until it has nothing more to do, or this is closed."""

    @abstractmethod
    def _next(self) -> Connection | None:
        """The connection for a client that has come, if there is one to hand over."""

    @abstractmethod
    def _arm(self) -> bool:
        """Prepare to sleep. False if there is something to do first."""

    @abstractmethod
    def _sleep(self) -> None:
        """Sleep until the medium, or `_waker`, has something to tell, but for LOOK_AGAIN at most."""

    @abstractmethod
    def _register(self, region: Region) -> tuple[Span, Withdraw]:
        """Let peers fetch from this memory."""

    @abstractmethod
    def _turn_away(self) -> None:
        """Reject the clients that have come and were not handed over. Ctrl-C is held back meanwhile."""

    @abstractmethod
    def _release(self) -> None:
        """Give everything back to the medium. Ctrl-C is held back meanwhile."""

    # What that makes

    def accept(self) -> Connection | None:
        while True:
            try:
                try:
                    with self._lock:
                        self._progress()
                        if self._closed:
                            return None
                        connection = self._next()
                        if connection is not None:
                            return connection
                        self._asleep = self._arm()
                    if self._asleep:
                        self._sleep()
                finally:
                    self._wake_up()
            finally:
                self._wake_up()  # a signal may have interrupted it

    def _wake_up(self) -> None:
        with self._lock:
            self._asleep = False
            self._lock.notify_all()

    def expose(self, region: Region) -> Span:
        if not self.exposes_memory:
            raise TransportError(f"{self.uri} lets nobody fetch from memory: make the server with allow_rma=True")
        with self._lock:
            if self._closed:
                raise ConnectionClosed("the listener is closed")
            if region not in self._exposed:
                self._exposed[region] = self._register(region)
            return self._exposed[region][0]

    def close(self) -> None:
        with interrupts_held():
            self._closed = True
            self._waker.set()
            with self._lock:
                while self._asleep:
                    self._lock.wait()
                if not self._released:
                    self._released = True
                    self._release_all()

    def _release_all(self) -> None:
        """Give everything back, whatever any of it raises."""
        with ExitStack() as undo:  # the last comes first
            undo.callback(self._waker.close)
            undo.callback(self._release)
            for _, withdraw in self._exposed.values():
                undo.callback(withdraw)
            undo.callback(self._turn_away)

    def after_fork_in_child(self) -> None:
        for _, withdraw in self._exposed.values():
            withdraw.detach()
        super().after_fork_in_child()
