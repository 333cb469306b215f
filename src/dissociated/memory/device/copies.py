"""Copies in progress on a device, and the memory that they use."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress

from dissociated.errors import DeviceError
from dissociated.memory.device.base import Device, Event, Stream


class Copies:
    """A stream for copies, and all memory that its copies read and write. Use it as a context manager, or close it.

    The device keeps that memory until a wait for the copies has succeeded, even if the caller gives up earlier. A wait
    may be refused or interrupted, and then nothing shows that the copies have ended. With CUDA, that holds even if the
    context is lost.
    """

    def __init__(self, device: Device) -> None:
        self.stream: Stream = device.stream()
        #: The device that executes the copies.
        self.device = device
        self._memory_in_use: deque[object] = deque()
        self._afterwards: list[Callable[[], object]] = []
        device.copies.add(self)

    def use(self, memory: object) -> None:
        """Keep `memory`, which copies that are queued later will use."""
        self._memory_in_use.append(memory)

    def afterwards(self, call: Callable[[], object]) -> None:
        """Call `call` at the end, when the copies are done."""
        self._afterwards.append(call)

    def release_first(self) -> None:
        """Release the memory that was kept first. Its copies must be done."""
        self._memory_in_use.popleft()

    def wait(self) -> None:
        """Wait for the copies, and release the memory that they used.

        Raises:
            DeviceError: The wait failed. The memory is kept.
        """
        self.stream.synchronize()
        self._memory_in_use.clear()

    def close(self) -> None:
        """Wait for the copies, and release the memory that they used. If the wait fails, the device keeps it."""
        try:
            with suppress(DeviceError):
                if self._memory_in_use or self._afterwards:
                    self.stream.synchronize()
                self._end(None)
        finally:
            if self in self.device.copies:
                self.device.keep(self._end)

    def _end(self, after: Event | None) -> None:
        if after is not None:
            after.synchronize()
        self._memory_in_use.clear()
        while self._afterwards:
            self._afterwards[-1]()
            self._afterwards.pop()
        self.device.copies.discard(self)

    def __enter__(self) -> Copies:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
