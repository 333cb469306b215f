"""Where calls that block are made, for an event loop that must not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from dissociated.errors import StoreError

P = ParamSpec("P")
T = TypeVar("T")


class Threads:
    """Where calls that block are made: threads of its own, or an executor that somebody lends."""

    def __init__(self, count: int, executor: Executor | None = None) -> None:
        self._own = ThreadPoolExecutor(count, thread_name_prefix="dissociated read") if executor is None else None
        self._executor = executor or self._own
        self._running: set[Future[Any]] = set()

    def submit(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Make a call in one of the threads. Raises StoreError once this is closed, or the executor is shut down."""
        if self._executor is None:
            raise StoreError("this reader is closed")
        try:
            future = self._executor.submit(call, *args, **kwargs)
        except RuntimeError as error:
            raise StoreError(f"the executor takes no calls: {error}") from None
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        return future

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What a call returns that is made in one of the threads. Raises as `submit` does."""
        return await asyncio.wrap_future(self.submit(call, *args, **kwargs))

    def end(self) -> None:
        """Take no more calls. Threads end when those that were made do."""
        self._executor = None
        if self._own is not None:
            self._own.shutdown(wait=False)

    async def settle(self) -> None:
        """Wait for the calls that have begun, and cancel the others."""
        await finished(self._running)

    async def aclose(self) -> None:
        """Take no more calls, and wait until the threads have ended."""
        self.end()
        await self.settle()
        if self._own is not None:
            self._own.shutdown()


async def finished(futures: Iterable[Future[Any]]) -> None:
    """Wait for the calls that have begun, and cancel the others. A call that runs cannot be interrupted."""
    running = [future for future in [*futures] if not future.cancel()]
    await asyncio.gather(*map(asyncio.wrap_future, running), return_exceptions=True)
