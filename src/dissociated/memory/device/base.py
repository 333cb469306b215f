"""Memory of a device: allocated, copied, exported and opened, all on streams.

Addresses are numbers. Nobody but a stream of the device touches what lies there. What is copied may lie in host memory
or on the device, as an address tells by itself.

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

#: Bytes of pinned memory that a process takes for each device, once it reads onto it from what is no shared memory; and
#: of the device's own that a reader takes, where the network writes there.
_MAX_PINNED = _MAX_RECEIVED = 1 << 28
#: The smallest block of these: a driver gives no less.
_RECEIVED_BLOCK = 1 << 21


class DeviceType(IntEnum):
    """The kinds of devices, as the Arrow C Device interface and DLPack both number them."""

    CPU = 1
    CUDA = 2
    EXTENSION = 12


class Event(ABC):
    """A point in what a stream has to do."""

    #: What the Arrow C Device interface hands on as `sync_event`. It is good for as long as this object.
    pointer: int

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the stream has come to it."""


class Stream(ABC):
    """A queue of copies that a device does one after the other. Whoever uses it is one thread at a time."""

    #: The driver's own handle of it.
    handle: int = 0

    @abstractmethod
    def copy(self, target: int, source: int, length: int) -> None:
        """Copy, at some time before the next `synchronize` ends: until then both must stay, and stay as they are."""

    @abstractmethod
    def clear(self, target: int, length: int) -> None:
        """Write zeros on the device, at some time like that."""

    @abstractmethod
    def record(self) -> Event:
        """The point after all that was asked for so far."""

    @abstractmethod
    def wait(self, pointer: int) -> None:
        """Go on only after another stream has come to the event that this `pointer` is of."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until all is done that was asked for."""


#: What gives memory back, once this event has happened; None where nothing is under way. Raises DeviceError where that
#: cannot be waited for: then nothing was given back.
Release = Callable[[Event | None], None]


class _Waited(Event):
    """The same event for one `Release`, and whether that is still waiting for it."""

    def __init__(self, event: Event) -> None:
        self.pointer = event.pointer
        self.waiting = False
        self._event = event

    def synchronize(self) -> None:
        self.waiting = True
        self._event.synchronize()
        self.waiting = False


class DeviceMemory:
    """One allocation on a device, or an opened one of another process. It goes back when it is closed or collected.

    Not before what others have begun with it is done: they may let go of it while their own streams still read it.
    """

    def __init__(self, device: Device, address: int, size: int, release: Release) -> None:
        self.device = device
        self.address = address
        self.size = size
        #: After which what was copied here is here. None where it is here already.
        self.event: Event | None = None
        self._close = weakref.finalize(self, device.give_back, release)
        self._close.atexit = False  # what a process has goes with it

    def close(self) -> None:
        """Give it back. Nobody may use it any more."""
        self._close()

    @property
    def closed(self) -> bool:
        """Whether it was given back."""
        return not self._close.alive

    def buffer(self) -> pa.Buffer:
        """The same for libarrow, which slices it and does not look into it. It keeps the memory."""
        return pa.foreign_buffer(self.address, self.size, self)

    def __repr__(self) -> str:
        return f"<DeviceMemory of {self.size} bytes on {self.device.name}>"


class DeviceBuffer:
    """Bytes on a device for somebody to write to, as the body of a message. They stay until they are taken out of it.

    So who only hands it on may keep it for a while, and no memory with it.
    """

    __slots__ = ("_length", "_memory", "address", "device")

    def __init__(self, device: Device, memory: pa.Buffer) -> None:
        self.device = device
        self.address: int = memory.address
        self._length: int = memory.size
        self._memory: pa.Buffer | None = memory

    def take(self) -> pa.Buffer:
        """The same for libarrow. It keeps the memory from now on. Once."""
        memory, self._memory = self._memory, None
        assert memory is not None
        return memory

    def __len__(self) -> int:
        return self._length


class Device(ABC):
    """A device of this host. There is one object for each in a process; any thread may use it."""

    type: DeviceType

    def __init__(self, name: str, number: int, identity: str) -> None:
        #: As it is asked for: cuda:0.
        self.name = name
        #: Its number among those of its type that this process sees.
        self.number = number
        #: What names it in every process of this host, whatever number it has there.
        self.identity = identity
        #: Host memory for what is to be copied here.
        self.ring = MemoryRing(self._pin, _MAX_PINNED)
        #: For what this object keeps account of. Memory may be collected by whoever holds it.
        self.lock = threading.RLock()
        self._used = [0, 0]
        #: Who copies here. They keep what their copies use, and stay until these are done.
        self.copies: set[object] = set()
        self._kept: list[Release] = []  # what could not be given back yet
        self._exported: weakref.WeakValueDictionary[bytes, DeviceMemory] = weakref.WeakValueDictionary()
        self._opened: Counter[bytes] = Counter()

    @property
    def allocations(self) -> int:
        """How many pieces of its memory this process has, opened ones included."""
        return self._used[0]

    @property
    def nbytes(self) -> int:
        """How many bytes these have."""
        return self._used[1]

    @property
    def kept(self) -> int:
        """How much was to be given back and is kept, since nobody could tell whether something still uses it."""
        return len(self._kept)

    @abstractmethod
    def stream(self) -> Stream:
        """A new stream."""

    @abstractmethod
    def fence(self) -> Event | None:
        """The point after all that anybody in this process has asked of the device so far, on whatever stream.

        None where nothing is under way any more. Raises DeviceError where that cannot be told: while a graph is
        captured, and on a device that is lost. Finalizers call this.
        """

    @abstractmethod
    def _allocate(self, size: int, stream: Stream, exportable: bool) -> tuple[int, Release]:
        """The address of so many bytes, and what gives them back."""

    @abstractmethod
    def _export(self, memory: DeviceMemory) -> bytes: ...

    @abstractmethod
    def _open(self, handle: bytes, size: int) -> tuple[int, Release]: ...

    def register(self, memory: pa.Buffer, afterwards: Callable[[Callable[[], object]], object]) -> None:
        """Let streams copy from this host memory at once, where the driver can.

        `afterwards` is given what ends that, before it begins: Ctrl-C may come at any time.
        """

    def _pin(self, size: int) -> pa.Buffer:
        """Host memory that streams copy from at once. The buffer owns it."""
        return pa.allocate_buffer(size)

    @abstractmethod
    def wait_on(self, consumer: int, event: Event) -> None:
        """Let a stream of somebody else's, by the driver's handle, go on only after the event."""

    def allocate(self, size: int, stream: Stream, exportable: bool = False) -> DeviceMemory:
        """Memory of so many bytes, one or more, for what `stream` does from now on.

        `exportable` if other processes shall open it. Raises DeviceFull.
        """
        return self._account(size, *self._allocate(size, stream, exportable))

    def receive_ring(self) -> MemoryRing:
        """Blocks that others write to: each an allocation of its own, as networks want it, which waits for no stream.

        They go back with the ring. Taking from it raises DeviceFull.
        """
        stream = self.stream()
        return MemoryRing(
            lambda size: self.allocate(size, stream, exportable=True).buffer(), _MAX_RECEIVED, _RECEIVED_BLOCK
        )

    def export(self, memory: DeviceMemory) -> bytes:
        """The handle by which another process of this host opens memory that is exportable, while that is there."""
        handle = self._export(memory)
        with self.lock:
            self._exported[handle] = memory
        return handle

    def open(self, handle: bytes, size: int) -> DeviceMemory:
        """Memory of so many bytes that a process of this host has exported; opened once, however often it is asked for.

        Close all of it before its owner gives it back. Raises DeviceError where it is not there, or is smaller.
        """
        with self.lock:  # throughout: two threads shall not open it twice
            known = self._in_use(handle)
            if known is None:  # a driver opens no handle in the process that it is of
                known = self._exported[handle] = self._account(size, *self._open_once(handle, size))
        if known.size < size:
            raise DeviceError(f"a peer announced {size} bytes on {self.name}, and there are {known.size}")
        return known

    def is_left_open(self, handle: bytes) -> bool:
        """Whether a peer's memory is still open that nobody here uses any more: it could not be closed yet."""
        with self.lock:
            return self._opened[handle] > 0 and self._in_use(handle) is None

    def _in_use(self, handle: bytes) -> DeviceMemory | None:
        known = self._exported.get(handle)
        return None if known is None or known.closed else known

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
            self._used[0] += 1
            self._used[1] += size

        def give_back(after: Event | None) -> None:
            release(after)
            with self.lock:
                self._used[0] -= 1
                self._used[1] -= size

        return DeviceMemory(self, address, size, give_back)

    def give_back(self, release: Release) -> None:
        """Call `release` when all is done that was asked for so far. Finalizers call this.

        Where nobody can tell, or wait for it, that is kept for a later `retry`; each that is given back is one.
        """
        self.keep(release)
        self.retry()

    def keep(self, release: Release) -> None:
        """Call it later: when a `retry` can tell that all is done."""
        with self.lock:
            self._kept.append(release)

    def retry(self) -> None:
        """Give back what is kept, where that can be done now."""
        with self.lock:
            due, self._kept = self._kept, []
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
                    if waited is not None and waited.waiting:  # Ctrl-C, and nothing was given back yet
                        again.append(release)
                    raise
        except DeviceError:
            pass
        finally:
            with self.lock:
                self._kept += [*due, *again]

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"
