"""Connections over a medium that works only when it is called.

Sending is asynchronous, and there is one descriptor to wait on. Two threads may use a connection, a sender and a
receiver. The thread that has to wait lets the medium work for both.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from dissociated.errors import ConnectionClosed, DissociatedError
from dissociated.transport.base import Connection
from dissociated.transport.native.threads import MAX_SLEEP, Waker

_NO_WAKE = 0.005  # seconds between two polls once the peer is gone, since the medium may wake no thread any more


class UnderWay(NamedTuple):
    """A message that is being sent: the medium's request, its size in bytes, and the memory that must stay alive."""

    request: Any
    size: int
    keep: Any


class ProgressConnection(Connection):
    """A connection over a medium that works only when it is called.

    The methods of a subclass are called with the lock held, except `_sleep`.
    """

    def __init__(self, peer: str) -> None:
        super().__init__()
        self._peer = peer
        self._lock = threading.Condition()  # its RLock is never held twice, but tells whether this thread holds it
        self._asleep = False  # whether a thread sleeps on the medium; it wakes the other thread afterwards
        self._waker = Waker()
        self._under_way: deque[UnderWay] = deque()
        self._in_flight = 0  # bytes
        self._broken: DissociatedError | None = None  # an error of the peer, to be raised by the next call
        self._reason: str | None = None  # the reason of the peer's abort
        self._gone = False  # whether the peer, or the path to it, is lost
        self._ended_at = 0.0  # the time at which the loss was noticed, or the reason arrived
        self._interrupted = False
        self._closed = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} with {self._peer}>"

    @property
    def peer(self) -> str:
        return self._peer

    # Implemented by each medium

    @abstractmethod
    def _progress(self) -> bool:
        """Let the medium work for a moment. Return whether anything happened."""

    @abstractmethod
    def _arm(self) -> bool:
        """Prepare to sleep. Return False if the medium has work to do first."""

    @abstractmethod
    def _sleep(self, seconds: float) -> None:
        """Sleep until the medium has work to do or `_waker` is set, for `seconds` at most."""

    @abstractmethod
    def _complete(self, request: Any) -> bool | None:
        """Return whether the message of `request` was sent, and release `request`; None if it is still in progress."""

    # Implemented here for all media

    @property
    def _ended(self) -> bool:
        return self._gone or self._reason is not None

    @property
    def _over(self) -> bool:
        """Whether further sends are pointless: the peer is gone, or this side is interrupted or has failed."""
        return self._gone or self._interrupted or self._broken is not None

    def _check_open(self) -> None:
        if self._interrupted or self._closed:
            raise ConnectionClosed("this side closed the connection")
        if self._broken is not None:
            raise self._broken
        if self._gone:
            raise ConnectionClosed(f"sending to {self._peer}: the peer closed the connection")

    def _drive(self, done: Callable[[], bool], timeout: float) -> bool:
        """Let the medium work until `done` returns true. Return False if nothing happened for `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while True:
            if self._closed:  # checked first, because `done` may use the medium, which is released by now
                raise ConnectionClosed("this side closed the connection")
            if done():
                return True
            if self._advance():
                deadline = time.monotonic() + self._time_left(timeout)
                continue
            left = self._time_left(deadline - time.monotonic())
            if left <= 0:
                return False
            self._wait(min(left, _NO_WAKE if self._ended else MAX_SLEEP))

    def _wait(self, seconds: float) -> None:
        if self._asleep:
            self._lock.wait(seconds)
            return
        if not self._arm():
            return
        try:
            try:
                self._asleep = True
                self._lock.release()
                self._sleep(seconds)
            finally:
                self._wake_up()
        finally:
            self._wake_up()  # repeated, because a signal may have interrupted the first call

    def _wake_up(self) -> None:
        """Acquire the lock, unless this thread holds it, and notify the other threads."""
        try:
            self._lock.notify_all()
        except RuntimeError:  # not held: only this shows whether a signal interrupted `acquire` before it took effect
            self._lock.acquire()
            self._lock.notify_all()
        self._asleep = False

    def _advance(self) -> bool:
        """Let the medium work, and remove messages that have been sent. Return whether anything happened.

        Only the oldest message is checked, since nearly all messages complete in order. It may turn out to be complete
        although the medium did nothing in this call.
        """
        moved = self._progress()
        while self._under_way and (sent := self._complete(self._under_way[0].request)) is not None:
            size = self._under_way.popleft().size
            self._in_flight -= size
            self.written += size if sent else 0
            moved = True
        if moved and self._asleep:
            self._waker.set()
        return moved

    def _posted(self, request: Any, size: int, keep: Any) -> None:
        """Record a message that is being sent. `keep` is kept alive, and must not change, until it has been sent."""
        self._under_way.append(UnderWay(request, size, keep))
        self._in_flight += size

    def _lose(self) -> None:
        """Record that the peer is gone."""
        self._gone, self._ended_at = True, time.monotonic()

    def _give_up(self, reason: str) -> None:
        """Record the reason of the peer's abort."""
        self._reason, self._ended_at = reason, time.monotonic()
