"""Reading ahead: threads read record batches from a blocking reader before `async for` requests them."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, ParamSpec, TypeVar

from dissociated.codec.reader import Reading
from dissociated.codec.split import BatchAndMetadata
from dissociated.errors import OptionError, StoreError

P = ParamSpec("P")
T = TypeVar("T")

#: The default limits of reading ahead: a number of batches, and the bytes of these.
READAHEAD = 8
READAHEAD_BYTES = 1 << 26


class ReadStep(NamedTuple):
    """A call that reads some batches. A call that returns none is the end."""

    read: Callable[[], Iterable[BatchAndMetadata]]
    #: The number of batches that the call returns.
    number: int = 1
    #: The bytes of these batches; None if they are not known before the call.
    nbytes: int | None = None


@dataclass(frozen=True)
class ReadAheadOptions:
    """The limits of reading ahead, and whether to return the metadata of batches. Raises OptionError."""

    readahead: int
    readahead_bytes: int
    custom_metadata: bool

    def __post_init__(self) -> None:
        if self.readahead < 0 or self.readahead_bytes < 0:
            raise OptionError("readahead and readahead_bytes must be 0 or more")


class PendingRead:
    """A step whose call was submitted to a thread, and may be finished."""

    def __init__(self, step: ReadStep, threads: Threads) -> None:
        self.remaining = step.number  # batches that were not taken yet
        self.nbytes = step.nbytes or 0
        self.batches: deque[BatchAndMetadata] = deque()
        self.error: BaseException | None = None
        self.last = False  # whether the call reached the end, or failed
        self.future = threads.submit(self._make, step)

    def _make(self, step: ReadStep) -> None:
        try:
            self.batches.extend(step.read())  # keeps the batches before an exception
        except BaseException as error:
            self.error = error
        if step.nbytes is None:
            # `nbytes` would read offsets in the buffers, which are not validated yet.
            self.nbytes = sum(batch.get_total_buffer_size() for batch, _ in self.batches)
        self.last = self.error is not None or not self.batches


class PendingReads:
    """The reads of one source whose batches were not all taken, in order.

    Iterators in several event loops may take from it.
    """

    def __init__(self) -> None:
        self.jobs: deque[PendingRead] = deque()
        self.lock = threading.Lock()  # while a read is begun, or a batch is taken. Finalizers must not take it


class AsyncBatches(AsyncIterator[Any]):
    """An asynchronous iterator over record batches, some of which are read ahead.

    Several calls of `__anext__` may be outstanding. They get the next batches in the order of the calls, and this many
    batches are read at once. A cancelled call takes no batch. If reading a batch fails, the call that would have
    returned the batch raises the error, and so do all later calls.

    Reading ahead pauses at its limits, and stops when the iterator is closed or collected. `aclose` waits for the reads
    in progress, which cannot be interrupted.

    Iterators over one stream share its reads (`shared_reads`). A batch that was read ahead, or is being read when its
    iterator is stopped, is taken by the next iterator.
    """

    def __init__(
        self,
        steps: Iterator[ReadStep],
        threads: Threads,
        options: ReadAheadOptions,
        at_once: int,
        owns_threads: bool = False,
        shared_reads: PendingReads | None = None,
    ) -> None:
        reads = PendingReads() if shared_reads is None else shared_reads
        self._jobs, self._lock = reads.jobs, reads.lock
        self._shares_jobs = shared_reads is not None
        self._awaited: weakref.WeakSet[PendingRead] = weakref.WeakSet()  # the reads that notify this iterator
        self._steps: Iterator[ReadStep] | None = steps  # None at the end
        self._threads = threads
        self._options = options
        self._at_once = at_once
        self._owns_threads = owns_threads
        self._outstanding = 0  # the number of outstanding calls of __anext__
        self._turn = asyncio.Lock()  # first come, first served
        self._progress = asyncio.Event()
        self._reading = Reading()

    async def __anext__(self) -> Any:
        self._outstanding += 1
        try:
            self._read_ahead()
            async with self._turn:
                both = await self._next()
        finally:
            self._outstanding -= 1
        self._read_ahead()
        return both if self._options.custom_metadata else both[0]

    async def aclose(self) -> None:
        """Stop reading. Outstanding and later calls raise StoreError, unless the end was reached before."""
        running = [job.future for job in [*self._jobs]]
        self._stop()
        await finished(running)
        if self._owns_threads:
            await self._threads.aclose()

    async def _next(self) -> BatchAndMetadata:
        while not self._reading.at_end:
            self._reading.check()
            self._read_ahead()  # another iterator over the stream may have taken the batch
            with self._lock:
                job = self._jobs[0] if self._jobs else None
                is_finished = job is not None and job.future.done()
                if job is not None and is_finished:
                    if job.batches:
                        job.remaining -= 1
                        return job.batches.popleft()
                    self._jobs.popleft()
            if job is None:
                break
            if not is_finished:
                self._progress.clear()
                self._await_progress(job)  # another iterator may have begun it
                await self._progress.wait()
            else:
                if job.future.cancelled():
                    if self._shares_jobs:
                        continue  # an iterator stopped before the read had begun
                    job.error = StoreError("the executor was shut down during a read")
                if job.error is not None:
                    self._reading.stop_by(job.error)
                    self._stop()
                    raise job.error
                if job.last:
                    break
        self._reading.at_end = True
        self._stop()
        raise StopAsyncIteration

    def _read_ahead(self) -> None:
        with self._lock:
            while self._steps is not None and self._has_room():
                step = next(self._steps, None)
                if step is None:
                    self._steps = None
                    return
                job = PendingRead(step, self._threads)
                self._jobs.append(job)
                self._await_progress(job)

    def _await_progress(self, job: PendingRead) -> None:
        if job in self._awaited:
            return  # a future keeps every callback until it is done
        self._awaited.add(job)
        job.future.add_done_callback(partial(_report_progress, asyncio.get_running_loop(), weakref.ref(self)))

    def _has_room(self) -> bool:
        running = sum(not job.future.done() for job in self._jobs)
        if running >= self._at_once or any(job.last for job in self._jobs):
            return False
        surplus = sum(job.remaining for job in self._jobs) - self._outstanding
        if surplus < 0:
            return True
        nbytes = sum(job.nbytes for job in self._jobs if job.remaining)
        return surplus < self._options.readahead and nbytes < self._options.readahead_bytes

    def _progressed(self) -> None:
        self._progress.set()
        with suppress(StoreError):  # the next call of __anext__ raises it again, in the caller
            self._read_ahead()

    def _stop(self) -> None:
        self._reading.close()
        self._steps = None
        for job in [*self._jobs]:
            job.future.cancel()
        if not self._shares_jobs:
            self._jobs.clear()
        self._progress.set()
        if self._owns_threads:
            self._threads.end()

    def __del__(self) -> None:
        self._stop()


def _report_progress(loop: asyncio.AbstractEventLoop, waiting: weakref.ref[AsyncBatches], future: Future[None]) -> None:
    """Notify the event loop, from another thread, that a step is finished."""

    def progressed() -> None:
        if (batches := waiting()) is not None:
            batches._progressed()

    with suppress(RuntimeError):  # the loop is closed, and so nothing waits
        loop.call_soon_threadsafe(progressed)


class Threads:
    """The threads in which blocking calls run: threads of its own, or an executor of the caller."""

    def __init__(self, count: int, executor: Executor | None = None) -> None:
        self._own = ThreadPoolExecutor(count, thread_name_prefix="dissociated read") if executor is None else None
        self._executor = executor or self._own
        self._running: set[Future[Any]] = set()

    def submit(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run a call in one of the threads. Raises StoreError if this is closed, or the executor is shut down."""
        if self._executor is None:
            raise StoreError("this reader is closed")
        try:
            future = self._executor.submit(call, *args, **kwargs)
        except RuntimeError as error:
            raise StoreError(f"the executor accepts no calls: {error}") from None
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        return future

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a call in one of the threads, and return its result. Raises the errors of `submit`, and of the call."""
        return await asyncio.wrap_future(self.submit(call, *args, **kwargs))

    def end(self) -> None:
        """Accept no more calls. The threads end after the submitted calls."""
        self._executor = None
        if self._own is not None:
            self._own.shutdown(wait=False)

    async def settle(self) -> None:
        """Cancel the calls that have not begun, and wait for the others."""
        await finished(self._running)

    async def aclose(self) -> None:
        """Accept no more calls, and wait until the threads have ended."""
        self.end()
        await self.settle()
        if self._own is not None:
            self._own.shutdown()


async def finished(futures: Iterable[Future[Any]]) -> None:
    """Cancel the calls that have not begun, and wait for the others, which cannot be interrupted."""
    running = [future for future in [*futures] if not future.cancel()]
    await asyncio.gather(*map(asyncio.wrap_future, running), return_exceptions=True)
