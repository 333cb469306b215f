"""The opening of several streams at once, so that their round trips overlap."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

from dissociated.base.exit import StreamThread
from dissociated.errors import TransportError


class _Closeable(Protocol):
    def close(self) -> None: ...


C = TypeVar("C", bound=_Closeable)


def open_together(calls: Sequence[Callable[[], C]], max_parallel: int) -> list[C]:
    """Return the results of all `calls`, of which at most `max_parallel` run at once: one here, the others in threads.

    If a call fails, its error is raised, and the results of the others are closed.
    """
    openings = _Openings(calls)
    try:
        openings.start(min(max_parallel, len(calls)) - 1)
        openings.run()
        return [future.result() for future in openings.futures]
    except BaseException:
        openings.abandon()
        raise


class _Openings(Generic[C]):
    def __init__(self, calls: Sequence[Callable[[], C]]) -> None:
        self.futures: list[Future[C]] = [Future() for _ in calls]
        self._waiting = deque(zip(self.futures, calls, strict=True))

    def start(self, number: int) -> None:
        with suppress(TransportError):  # the system has no more threads, and this thread makes all calls
            for _ in range(number):
                StreamThread(self, self.run, (), "open").start()

    def run(self) -> None:
        """Make the next call, until none waits."""
        with suppress(IndexError):
            while True:
                future, call = self._waiting.popleft()
                try:
                    result = call()
                except Exception as error:
                    self._waiting.clear()  # nobody needs the others any more
                    future.set_exception(error)
                except BaseException:
                    future.set_exception(TransportError("the opening was interrupted"))
                    raise
                else:
                    future.set_result(result)

    def stop(self) -> None:
        """Make no more calls. A call that runs ends by the deadline of its connection."""
        self._waiting.clear()

    def abandon(self) -> None:
        """Close the results, also of calls that still run."""
        self.stop()
        for future in self.futures:
            future.add_done_callback(_close_result)
        self.futures.clear()  # the traceback of the error keeps this object


def _close_result(future: Future[C]) -> None:
    if future.exception() is None:
        future.result().close()
