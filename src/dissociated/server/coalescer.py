"""Small messages that follow one another quickly, on their way to one client: they are sent together.

The thread that reads the source adds them. A message is sent at once, unless another was sent within the last
millisecond: then it waits until that has passed, or enough others wait with it. The source may pause meanwhile, and
with it that thread: so another thread stands by, which sends what waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType

from dissociated.codec.split import SplitMessage
from dissociated.datasets.live_message import MAX_SEND_BYTES, MAX_SEND_MESSAGES, LiveMessage

#: Seconds that small messages which follow others at once wait for more; one that is alone does not.
COALESCE_INTERVAL = 0.001


class Coalescer:
    """Gives messages to `send`, in order, from this thread or another one. It is a context, whose end sends the rest.

    `send` runs in one thread at a time. What it raises in the other thread comes out of the next call.
    """

    def __init__(self, send: Callable[[Sequence[LiveMessage]], None]) -> None:
        self._send = send
        self._waiting: list[LiveMessage] = []
        self._count = self._nbytes = 0  # of the messages that wait
        self._due = 0.0  # when they go
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._idle = False  # the thread waits to be told that there is something to stand by for
        self._over = False
        self._error: BaseException | None = None

    def add(self, message: SplitMessage) -> None:
        """Send a message, alone or with those before and after it. It must be small and have a body."""
        with self._changed:
            if not (self._waiting and self._waiting[-1].append_alike(message)):
                self._waiting.append(LiveMessage.inline(message))
            self._count += 1
            self._nbytes += len(message.header) + message.parsed.body_length
            if self._count >= MAX_SEND_MESSAGES or self._nbytes >= MAX_SEND_BYTES or time.monotonic() >= self._due:
                self._flush()
            elif self._thread is None:
                self._thread = threading.Thread(target=self._flush_when_due, name="coalescer", daemon=True)
                self._thread.start()
            elif self._idle:
                self._idle = False
                self._changed.notify()

    def flush(self) -> None:
        """Send what waits, now. Nothing is sent afterwards until something is added."""
        with self._changed:
            self._flush()

    def _flush(self) -> None:
        waiting, self._waiting, self._count, self._nbytes = self._waiting, [], 0, 0
        error, self._error = self._error, None
        if error is not None:
            raise error
        if waiting:
            self._send(waiting)
            self._due = time.monotonic() + COALESCE_INTERVAL

    def _flush_when_due(self) -> None:
        with self._changed:
            while not self._over:
                left = self._due - time.monotonic()
                if left > 0:
                    self._changed.wait(left)
                elif self._waiting:
                    try:
                        self._flush()
                    except BaseException as error:
                        self._error = error
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
                self._over = True
                self._changed.notify()
            if self._thread is not None:
                self._thread.join()
