"""Coalescing of small messages: several that follow one another quickly are sent to a client in one call.

The thread that reads the source adds the messages. A message is sent at once unless it belongs to a burst: several
messages that followed one another without a pause. The later messages of a burst wait until a millisecond has passed
since the last send, or until enough messages wait. The source may pause in the meantime and block the thread that reads
it, so a second thread sends waiting messages when they are due.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType

from dissociated.codec.split import SplitMessage
from dissociated.datasets.live_message import MAX_SEND_BYTES, MAX_SEND_MESSAGES, LiveMessage
from dissociated.server.pending_error import PendingError

#: Seconds between two sends of small messages in a burst.
COALESCE_INTERVAL = 0.001
#: A message that follows at least this many others without a pause belongs to a burst, and may wait.
MIN_BURST = 3
#: Seconds without a message that end a burst.
_BURST_GAP = 0.0001


class Coalescer:
    """A queue of small messages that passes them to `send`, in order, several at a time.

    `send` runs in the thread that adds messages or in a thread of the coalescer, but never in both at once. An
    exception of `send` in the second thread is raised by the next call. Use the coalescer as a context manager: leaving
    it sends the remaining messages.
    """

    def __init__(self, send: Callable[[Sequence[LiveMessage]], None]) -> None:
        self._send = send
        self._waiting: list[LiveMessage] = []
        self._count = self._nbytes = 0  # number and bytes of the waiting messages
        # Times are by time.monotonic.
        self._due = 0.0  # the time at which waiting messages are sent
        self._last_activity = 0.0  # the time at which the last message was added, or the last send ended
        self._burst = 0  # number of messages that the last one followed without a pause
        self._changed = threading.Condition()  # held during a send; notified to wake the idle thread
        #: Sends messages that are due. Started with the first message that waits.
        self._thread: threading.Thread | None = None
        self._idle = False  # whether the thread waits to be notified of a message
        self._closed = False
        self._error = PendingError()  # of `send` in the thread, until a caller has got it

    def add(self, message: SplitMessage) -> None:
        """Send a message, alone or together with its neighbours. The message must be small and have a body."""
        with self._changed:
            if not (self._waiting and self._waiting[-1].append_alike(message)):
                self._waiting.append(LiveMessage.inline(message))
            self._count += 1
            self._nbytes += len(message.header) + message.parsed.body_length
            now = time.monotonic()
            self._burst = self._burst + 1 if now - self._last_activity < _BURST_GAP else 0
            self._last_activity = now
            is_due = self._burst < MIN_BURST or now >= self._due
            if is_due or self._count >= MAX_SEND_MESSAGES or self._nbytes >= MAX_SEND_BYTES:
                self._flush()
            elif self._thread is None:
                self._thread = threading.Thread(target=self._flush_when_due, name="coalescer", daemon=True)
                self._thread.start()
            elif self._idle:
                self._idle = False
                self._changed.notify()

    def flush(self) -> None:
        """Send all waiting messages now. Afterwards, nothing is sent until another message is added."""
        with self._changed:
            self._flush()

    def _flush(self) -> None:
        waiting, self._waiting, self._count, self._nbytes = self._waiting, [], 0, 0
        self._error.raise_once()
        if waiting:
            self._send(waiting)
            self._last_activity = time.monotonic()
            self._due = self._last_activity + COALESCE_INTERVAL

    def _flush_when_due(self) -> None:
        with self._changed:
            while not self._closed:
                remaining = self._due - time.monotonic()
                if remaining > 0:
                    self._changed.wait(remaining)
                elif self._waiting:
                    try:
                        self._flush()
                    except BaseException as error:
                        self._error.set(error)
                        return
                else:
                    self._idle = True
                    self._changed.wait()

    def __enter__(self) -> Coalescer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.flush()
        finally:
            with self._changed:
                self._closed = True
                self._changed.notify()
            if self._thread is not None:
                self._thread.join()
