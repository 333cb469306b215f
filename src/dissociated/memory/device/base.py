"""Memory of devices: allocation, copies, export and opening, all on streams.

Addresses are numbers. Only streams of the device access its memory. Copies may read and write host memory, too: an
address alone tells to which memory it belongs.

Every method may raise DeviceError.
"""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from enum import IntEnum

import pyarrow as pa

from dissociated.errors import DeviceError
from dissociated.memory.device.ring import MemoryRing

#: Most bytes of pinned host memory for each device, which is used by reads onto it from anything but shared memory.
#: Also the most bytes of device memory for each reader, if a network writes to it.
_MAX_PINNED = _MAX_RECEIVED = 1 << 28
#: Smallest block of received memory in bytes, the least that a driver allocates.
_RECEIVED_BLOCK = 1 << 21


class DeviceType(IntEnum):
    """The kinds of devices, numbered as in the Arrow C Device interface and in DLPack."""

    CPU = 1
    CUDA = 2
    EXTENSION = 12


class Event(ABC):
    """A point in the work of a stream."""

    #: The `sync_event` of the Arrow C Device interface. It is valid for as long as this object exists.
    pointer: int

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the stream has reached this point."""


class Stream(ABC):
    """A queue of copies that a device executes in order. Only one thread may use it at a time."""

    #: The driver's handle of the stream.
    handle: int = 0

    @abstractmethod
    def copy(self, target: int, source: int, length: int) -> None:
        """Queue a copy of `length` bytes.

        The copy happens before the next `synchronize` returns. Until then, both ranges must stay allocated and
        unchanged.
        """

    @abstractmethod
    def clear(self, target: int, length: int) -> None:
        """Queue writing `length` zero bytes on the device. The conditions of `copy` apply."""

    @abstractmethod
    def record(self) -> Event:
        """Return the point after all work that was queued so far."""

    @abstractmethod
    def wait(self, pointer: int) -> None:
        """Let this stream's later work wait for another stream's event, given its `pointer`."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until all queued work is done."""


#: Function that releases memory after the given event; None means that no work is left. It raises DeviceError, and
#: releases nothing, if it cannot wait for the event.
Release = Callable[[Event | None], None]


class _Waited(Event):
    """An event that is passed to one `Release`, and whether that call is still waiting for it."""

    def __init__(self, event: Event) -> None:
        self.pointer = event.pointer
        self.waiting = False
        self._event = event

    def synchronize(self) -> None:
        self.waiting = True
        self._event.synchronize()
        self.waiting = False


class DeviceMemory:
    """An allocation on a device, or an opened allocation of another process, released when it is closed or collected.

    The release waits for work on it that was queued before: a user may drop the memory while streams of its own read
    it.
    """

    def __init__(self, device: Device, address: int, size: int, release: Release) -> None:
        self.device = device
        self.address = address
        self.size = size
        #: The event after which copies to this memory are complete; None if they are.
        self.event: Event | None = None
        self._close = weakref.finalize(self, device.give_back, release)
        self._close.atexit = False  # memory of a process is released when the process ends

    def close(self) -> None:
        """Release the memory. It must not be used any more."""
        self._close()

    @property
    def closed(self) -> bool:
        """Return whether the memory was released."""
        return not self._close.alive

    def buffer(self) -> pa.Buffer:
        """Return the memory as a buffer, which keeps it. libarrow slices such a buffer and does not read it."""
        return pa.foreign_buffer(self.address, self.size, self)

    def __repr__(self) -> str:
        return f"<DeviceMemory of {self.size} bytes on {self.device.name}>"


class DeviceBuffer:
    """Writable bytes on a device, for instance for the body of a message. It holds the memory until `take`.

    So code that only passes a DeviceBuffer on may keep it for a while without keeping the memory.
    """

    __slots__ = ("_length", "_memory", "address", "device")

    def __init__(self, device: Device, memory: pa.Buffer) -> None:
        self.device = device
        self.address: int = memory.address
        self._length: int = memory.size
        self._memory: pa.Buffer | None = memory

    def take(self) -> pa.Buffer:
        """Return the memory as a buffer, which owns it from now on. Call this once."""
        memory, self._memory = self._memory, None
        assert memory is not None
        return memory

    def __len__(self) -> int:
        return self._length


class Device(ABC):
    """A device of this host. A process has one object for each device, which any thread may use."""

    type: DeviceType

    def __init__(self, name: str, number: int, identity: str) -> None:
        #: Name by which users request it, such as cuda:0.
        self.name = name
        #: Number among the devices of its type that this process sees.
        self.number = number
        #: Identity in all processes of this host, which may give the device different numbers.
        self.identity = identity
        #: Host memory from which data is copied to the device.
        self.ring = MemoryRing(self._pin, _MAX_PINNED)
        #: Guards this object's accounts. Reentrant, because memory may be collected by the thread that holds it.
        self.lock = threading.RLock()
        self._usage = [0, 0]  # number of allocations, and their bytes
        #: The `Copies` in progress on this device, which keep the memory that they use.
        self.copies: set[object] = set()
        self._pending_releases: list[Release] = []  # pending releases
        self._exported: weakref.WeakValueDictionary[bytes, DeviceMemory] = weakref.WeakValueDictionary()
        self._opened: Counter[bytes] = Counter()

    @property
    def allocations(self) -> int:
        """Return the number of allocations of this process on the device, opened ones included."""
        return self._usage[0]

    @property
    def nbytes(self) -> int:
        """Return the total size of these allocations, in bytes."""
        return self._usage[1]

    @property
    def pending_release_count(self) -> int:
        """Return the number of pending releases: the device could not tell yet whether the memory is still in use."""
        return len(self._pending_releases)

    @abstractmethod
    def stream(self) -> Stream:
        """Create a stream."""

    @abstractmethod
    def fence(self) -> Event | None:
        """Return the point after all work that this process has queued so far, on any stream. Finalizers call this.

        Returns:
            The point, or None if no work is left.

        Raises:
            DeviceError: That is unknown, because a graph is captured or the device is lost.
        """

    @abstractmethod
    def _allocate(self, size: int, stream: Stream, exportable: bool) -> tuple[int, Release]:
        """Return the address of `size` bytes, and the function that releases them."""

    @abstractmethod
    def _export(self, memory: DeviceMemory) -> bytes: ...

    @abstractmethod
    def _open(self, handle: bytes, size: int) -> tuple[int, Release]: ...

    def register(self, memory: pa.Buffer, afterwards: Callable[[Callable[[], object]], object]) -> None:
        """Let streams copy directly from this host memory, if the driver supports it.

        Args:
            memory: The host memory.
            afterwards: Is called with the function that ends the registration, before the registration begins, because
                Ctrl-C may come at any time.
        """

    def _pin(self, size: int) -> pa.Buffer:
        """Return host memory from which streams copy directly. The buffer owns it."""
        return pa.allocate_buffer(size)

    @abstractmethod
    def wait_on(self, consumer: int, event: Event) -> None:
        """Let a foreign stream, given the driver's handle, wait for the event."""

    def allocate(self, size: int, stream: Stream, exportable: bool = False) -> DeviceMemory:
        """Allocate memory for later work of `stream`.

        Args:
            size: Number of bytes, 1 or more.
            stream: The stream that uses the memory first.
            exportable: Whether other processes can open the memory.

        Raises:
            DeviceFull: The device has not enough memory.
        """
        return self._account(size, *self._allocate(size, stream, exportable))

    def receive_ring(self) -> MemoryRing:
        """Return a ring of blocks that the network can write to.

        Each block is an allocation of its own, as networks require, and does not wait for a stream. The blocks are
        released with the ring. Allocating from it raises DeviceFull.
        """
        stream = self.stream()
        return MemoryRing(
            lambda size: self.allocate(size, stream, exportable=True).buffer(), _MAX_RECEIVED, _RECEIVED_BLOCK
        )

    def export(self, memory: DeviceMemory) -> bytes:
        """Return a handle by which other processes of this host can open exportable memory, while it exists."""
        handle = self._export(memory)
        with self.lock:
            self._exported[handle] = memory
        return handle

    def open(self, handle: bytes, size: int) -> DeviceMemory:
        """Open memory that a process of this host has exported.

        A handle is opened once, even if it is requested several times. Close all of the memory before its owner
        releases it.

        Args:
            handle: The handle.
            size: Number of bytes.

        Raises:
            DeviceError: The memory does not exist, or is smaller.
        """
        with self.lock:  # held throughout, so that two threads do not open the handle twice
            memory = self._in_use(handle)
            if memory is None:  # not exported here: a driver does not open a handle in the process that exported it
                memory = self._exported[handle] = self._account(size, *self._open_once(handle, size))
        if memory.size < size:
            raise DeviceError(f"the peer announced {size} bytes on {self.name}; its handle opens {memory.size}")
        return memory

    def is_left_open(self, handle: bytes) -> bool:
        """Return whether a peer's memory is still open although nothing uses it, because it could not be closed yet."""
        with self.lock:
            return self._opened[handle] > 0 and self._in_use(handle) is None

    def _in_use(self, handle: bytes) -> DeviceMemory | None:
        memory = self._exported.get(handle)
        return None if memory is None or memory.closed else memory

    def _open_once(self, handle: bytes, size: int) -> tuple[int, Release]:
        address, release = self._open(handle, size)
        self._opened[handle] += 1

        def close(after: Event | None) -> None:
            release(after)
            with self.lock:
                self._opened[handle] -= 1
                if not self._opened[handle]:
                    del self._opened[handle]

        return address, close

    def _account(self, size: int, address: int, release: Release) -> DeviceMemory:
        with self.lock:
            self._usage[0] += 1
            self._usage[1] += size

        def give_back(after: Event | None) -> None:
            release(after)
            with self.lock:
                self._usage[0] -= 1
                self._usage[1] -= size

        return DeviceMemory(self, address, size, give_back)

    def give_back(self, release: Release) -> None:
        """Call `release` when all work that was queued so far is done. Finalizers call this.

        If the device cannot tell, or cannot wait for that, `release` is kept for a later `retry`. Every later call of
        this method retries, too.
        """
        self.keep(release)
        self.retry()

    def keep(self, release: Release) -> None:
        """Keep `release` until a `retry` can tell that all work is done."""
        with self.lock:
            self._pending_releases.append(release)

    def retry(self) -> None:
        """Call the pending releases that can be called now."""
        with self.lock:
            due, self._pending_releases = self._pending_releases, []
        again: list[Release] = []
        try:
            after = self.fence() if due else None
            while due:
                release = due.pop()
                waited = None if after is None else _Waited(after)
                try:
                    release(waited)
                except DeviceError:
                    again.append(release)
                except BaseException:
                    if waited is not None and waited.waiting:  # Ctrl-C during the wait: nothing was released yet
                        again.append(release)
                    raise
        except DeviceError:
            pass
        finally:
            with self.lock:
                self._pending_releases += [*due, *again]

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"
