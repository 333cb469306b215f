"""A device for tests, whose memory crashes any process that accesses it directly.

Its memory is mapped without permissions, and is reached only through copies by descriptor, also from another process
that opens it by its handle. Copies are executed as late as possible, when a thread waits for them. So code that forgets
to wait does not see their results.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from functools import partial

import pyarrow as pa

from dissociated.errors import DeviceError, DeviceFull
from dissociated.memory.device.base import Device, DeviceMemory, DeviceType, Event, Release, Stream
from dissociated.memory.shared import create_memfd, write_parts

#: Number of emulated devices.
COUNT = 2


class _EmulatedMapping:
    """Memory that is mapped without permissions, and the descriptor for copies."""

    def __init__(self, descriptor: int, size: int, writable: bool) -> None:
        self.descriptor = descriptor
        self.size = size
        self.writable = writable
        # Neither PROT_READ nor PROT_WRITE: reading or writing raises SIGSEGV.
        self._memory = pa.py_buffer(mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED, prot=0))
        self.address: int = self._memory.address

    def close(self) -> None:
        os.close(self.descriptor)


class EmulatedDevice(Device):
    """An emulated device with `limit` bytes of memory. After `lose`, all calls fail, as with a lost context.

    While it is `capturing`, no thread can wait, as with CUDA while a thread captures a graph in its default mode.
    """

    type = DeviceType.EXTENSION

    def __init__(self, number: int) -> None:
        super().__init__(f"test:{number}", number, f"test-{number}")
        self.limit = 1 << 32
        self._is_lost = False
        self.capturing = False
        #: Whether memory can be exported.
        self.exports = True
        self._mappings: dict[int, _EmulatedMapping] = {}
        self._streams: weakref.WeakSet[_EmulatedStream] = weakref.WeakSet()
        self._registered: dict[object, int] = {}
        self._events: weakref.WeakValueDictionary[int, EmulatedEvent] = weakref.WeakValueDictionary()

    def lose(self, is_lost: bool = True) -> None:
        """Let all calls fail from now on."""
        self._is_lost = is_lost

    def check(self) -> None:
        """Raise DeviceError if the device is lost."""
        if self._is_lost:
            raise DeviceError(f"the context of {self.name} is lost, and nothing on the device can be used any more")

    def check_waiting(self) -> None:
        """Raise DeviceError if the device is lost, or if a capture forbids waits and queries of work in progress."""
        self.check()
        if self.capturing:
            raise DeviceError(f"a graph is being captured on {self.name}")

    def stream(self) -> Stream:
        self.check()
        stream = _EmulatedStream(self)
        with self.lock:
            self._streams.add(stream)
        return stream

    @property
    def registered(self) -> int:
        """Return the number of bytes of host memory that are registered."""
        return sum(self._registered.values())

    def register(self, memory: pa.Buffer, afterwards: Callable[[Callable[[], object]], object]) -> None:
        registration = object()
        afterwards(partial(self._registered.pop, registration, None))
        self._registered[registration] = memory.size

    def fence(self) -> Event | None:
        self.check_waiting()
        with self.lock:
            return EmulatedEvent(self, [(stream, stream.end) for stream in self._streams])

    def wait_on(self, consumer: int, event: Event) -> None:
        event.synchronize()

    def _allocate(self, size: int, stream: Stream, exportable: bool) -> tuple[int, Release]:
        self.check()
        if self.nbytes + size > self.limit:
            raise DeviceFull(f"{self.name} has no {size} bytes left: {self.nbytes} of {self.limit} are in use")
        descriptor = create_memfd(self.name)
        os.ftruncate(descriptor, size)
        return self._map(_EmulatedMapping(descriptor, size, True))

    def _export(self, memory: DeviceMemory) -> bytes:
        mapping, _ = self._find(memory.address, memory.size)
        if mapping is None or not self.exports:
            raise DeviceError(f"{self.name} cannot export handles")
        descriptor = mapping.descriptor
        return f"{os.getpid()}:{descriptor}:{os.fstat(descriptor).st_ino}".encode()

    def _open(self, handle: bytes, size: int) -> tuple[int, Release]:
        self.check()
        try:
            process, number, inode = map(int, handle.split(b":"))
            descriptor = os.open(f"/proc/{process}/fd/{number}", os.O_RDONLY | os.O_CLOEXEC)
        except (ValueError, OSError) as error:
            raise DeviceError(f"the peer's memory on {self.name} cannot be opened: {error}") from None
        status = os.fstat(descriptor)
        if status.st_ino != inode or status.st_size < size:
            os.close(descriptor)
            raise DeviceError(f"the peer's memory on {self.name} cannot be opened: it was replaced")
        return self._map(_EmulatedMapping(descriptor, size, False))

    def _map(self, mapping: _EmulatedMapping) -> tuple[int, Release]:
        with self.lock:
            self._mappings[mapping.address] = mapping

        def release(after: Event | None) -> None:
            if after is not None:
                after.synchronize()
            with self.lock:
                del self._mappings[mapping.address]
            mapping.close()

        return mapping.address, release

    def _find(self, address: int, length: int) -> tuple[_EmulatedMapping, int] | tuple[None, int]:
        """Find the memory that contains an address.

        Returns:
            The memory and the offset in it; None and 0 for an address that is not on this device.

        Raises:
            DeviceError: The range leaves its memory.
        """
        with self.lock:
            bases = sorted(self._mappings)
            at = bisect_right(bases, address) - 1
            mapping = self._mappings[bases[at]] if at >= 0 else None
        if mapping is None or address >= mapping.address + mapping.size:
            return None, 0
        if address + length > mapping.address + mapping.size:
            raise DeviceError(f"{length} bytes at {address:#x} extend beyond their allocation on {self.name}")
        return mapping, address - mapping.address

    def read(self, address: int, length: int) -> bytes:
        """Return the current content of memory on the device or on the host."""
        mapping, offset = self._find(address, length)
        if mapping is None:
            return ctypes.string_at(address, length)
        return os.pread(mapping.descriptor, length, offset)

    def write(self, address: int, content: bytes) -> None:
        """Change memory on the device or on the host."""
        mapping, offset = self._find(address, len(content))
        if mapping is None:
            ctypes.memmove(address, content, len(content))
        elif not mapping.writable:
            raise DeviceError(f"the peer's memory on {self.name} is read-only")
        else:
            write_parts(mapping.descriptor, [content], offset)

    def event(self, pointer: int) -> EmulatedEvent:
        """Return the event with this pointer."""
        number = ctypes.c_uint64.from_address(pointer).value
        try:
            return self._events[number]
        except KeyError:
            raise DeviceError(f"the event of {self.name} has been destroyed") from None


_numbers = itertools.count(1)


class EmulatedEvent(Event):
    """A point in the operations of streams of an emulated device."""

    def __init__(self, device: EmulatedDevice, points: list[tuple[_EmulatedStream, int]]) -> None:
        self._points = points
        number = next(_numbers)
        self._number = ctypes.c_uint64(number)
        self.pointer = ctypes.addressof(self._number)
        device._events[number] = self

    def synchronize(self) -> None:
        for stream, position in self._points:
            stream.run_to(position)


class _EmulatedStream(Stream):
    def __init__(self, device: EmulatedDevice) -> None:
        self.device = device
        self._lock = device.lock  # shared by all streams: collecting memory, at any point, runs all of them
        self._completed = 0
        self._due: deque[Callable[[], None]] = deque()

    @property
    def end(self) -> int:
        """Return the number of operations that were queued so far."""
        return self._completed + len(self._due)

    def copy(self, target: int, source: int, length: int) -> None:
        self._add(lambda: self.device.write(target, self.device.read(source, length)))

    def clear(self, target: int, length: int) -> None:
        self._add(lambda: self.device.write(target, bytes(length)))

    def record(self) -> Event:
        self.device.check()
        with self._lock:
            return EmulatedEvent(self.device, [(self, self.end)])

    def wait(self, pointer: int) -> None:
        event = self.device.event(pointer)
        self._add(event.synchronize)

    def synchronize(self) -> None:
        with self._lock:
            self.run_to(self.end)

    def run_to(self, position: int) -> None:
        self.device.check_waiting()
        with self._lock:
            while self._completed < position:
                self._completed += 1
                self._due.popleft()()

    def _add(self, task: Callable[[], None]) -> None:
        self.device.check()
        with self._lock:
            self._due.append(task)
