"""Copies that are under way, and the memory that they use."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress

from dissociated.errors import DeviceError
from dissociated.memory.device.base import Device, Event, Stream


class Copies:
    """A stream to copy by, and all that its copies read and write. Use it as a context manager, or close it.

    The device keeps that memory until the copies have been waited for, whoever gives up before: a wait may be refused,
    or interrupted, and nothing says that they have ended then. CUDA does not even where the context is lost.
    """

    def __init__(self, device: Device) -> None:
        self.stream: Stream = device.stream()
        #: Where they are done.
        self.device = device
        self._used: deque[object] = deque()
        self._afterwards: list[Callable[[], object]] = []
        device.copies.add(self)

    def use(self, memory: object) -> None:
        """Keep what copies are going to use that are asked for after this."""
        self._used.append(memory)

    def afterwards(self, call: Callable[[], object]) -> None:
        """Call this when the copies are done, at the end."""
        self._afterwards.append(call)

    def let_go(self) -> None:
        """Let go of what was kept first: the copies that use it are done."""
        self._used.popleft()

    def wait(self) -> None:
        """Wait for the copies, and let go of what they used. Raises DeviceError: then it stays."""
        self.stream.synchronize()
        self._used.clear()

    def close(self) -> None:
        """The same, but where one cannot wait, it is the device's from now on."""
        try:
            with suppress(DeviceError):
                if self._used or self._afterwards:
                    self.stream.synchronize()
                self._end(None)
        finally:
            if self in self.device.copies:
                self.device.keep(self._end)

    def _end(self, after: Event | None) -> None:
        if after is not None:
            after.synchronize()
        self._used.clear()
        while self._afterwards:
            self._afterwards[-1]()
            self._afterwards.pop()
        self.device.copies.discard(self)

    def __enter__(self) -> Copies:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
