"""A connection over a medium that moves nothing unless somebody lets it work.

Sending is asynchronous, and there is one descriptor to wait on. Two threads may use a connection, one that sends and
one that receives; whichever has to wait lets the medium work for both.
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

_NO_WAKE = 0.005  # seconds: when the peer is gone the medium may tell no more, and has only to be looked at


class UnderWay(NamedTuple):
    """A message that is being sent: what the medium calls it, its size, and the memory that must stay."""

    request: Any
    size: int
    keep: Any


class ProgressConnection(Connection):
    """See the module. Everything that a subclass implements is called with the lock held, but `_sleep`."""

    def __init__(self, peer: str) -> None:
        super().__init__()
        self._peer = peer
        self._lock = threading.Condition()  # never held twice, but it knows who holds it
        self._asleep = False  # whether a thread waits for the medium, and wakes the other
        self._waker = Waker()
        self._under_way: deque[UnderWay] = deque()
        self._in_flight = 0  # bytes
        self._broken: DissociatedError | None = None  # what the peer did wrong, noticed on the way
        self._reason: str | None = None  # that the peer gave for giving up
        self._gone = False  # the peer, or the way to it
        self._ended_at = 0.0  # when that was noticed, or the reason arrived
        self._interrupted = False
        self._closed = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} with {self._peer}>"

    @property
    def peer(self) -> str:
        return self._peer

    # What a medium does

    @abstractmethod
    def _progress(self) -> bool:
        """Let the medium work for a moment. Whether anything happened."""

    @abstractmethod
    def _arm(self) -> bool:
        """Prepare to sleep. False if there is something to do first."""

    @abstractmethod
    def _sleep(self, seconds: float) -> None:
        """Sleep until the medium, or `_waker`, has something to tell."""

    @abstractmethod
    def _complete(self, request: Any) -> bool | None:
        """Whether sending a message has ended well, and `request` is forgotten; None while it has not ended."""

    # What that makes

    @property
    def _ended(self) -> bool:
        return self._gone or self._reason is not None

    @property
    def _over(self) -> bool:
        """Whether there is no sense in sending more."""
        return self._gone or self._interrupted or self._broken is not None

    def _check_open(self) -> None:
        if self._interrupted or self._closed:
            raise ConnectionClosed("this side closed the connection")
        if self._broken is not None:
            raise self._broken
        if self._gone:
            raise ConnectionClosed(f"sending to {self._peer}: the peer closed the connection")

    def _drive(self, done: Callable[[], bool], timeout: float) -> bool:
        """Let the medium work until `done`; False if nothing happened for `timeout` seconds before that."""
        deadline = time.monotonic() + timeout
        while True:
            if self._closed:  # `done` may ask the medium, which is given back by then
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
            self._wake_up()  # a signal may have interrupted it

    def _wake_up(self) -> None:
        """Hold the lock, be it held already or not, and let the others look."""
        try:
            self._lock.notify_all()
        except RuntimeError:  # it is not held: nothing else tells whether `acquire` was interrupted before or after
            self._lock.acquire()
            self._lock.notify_all()
        self._asleep = False

    def _advance(self) -> bool:
        """Let the medium work, and forget what has been sent. Whether anything happened.

        The oldest goes first, which is how messages complete but for a few. That one has may show although the medium
        did nothing just now.
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
        """A message is under way, and `keep` must stay as it is until it has been sent."""
        self._under_way.append(UnderWay(request, size, keep))
        self._in_flight += size

    def _lose(self) -> None:
        """The peer is gone."""
        self._gone, self._ended_at = True, time.monotonic()

    def _give_up(self, reason: str) -> None:
        """The peer told why it gives up."""
        self._reason, self._ended_at = reason, time.monotonic()
