"""GPUs of NVIDIA: `cuda.core` for devices, streams, events and pools, and the driver's own functions for the rest.

Exported memory is an allocation of its own (`cuMemAlloc`), because its handle must fit into a URI. The handle has 64
bytes, and any process of this host can open it. Sharing a pool of `cuda.core` would need a descriptor as well.

Every call makes the primary context current, and restores the thread's previous context afterwards.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import starmap
from types import ModuleType
from typing import Any

import pyarrow as pa

from dissociated.base.once import once
from dissociated.errors import DeviceError, DeviceFull, DeviceNotFound
from dissociated.memory.device.base import Device, DeviceMemory, DeviceType, Event, Release, Stream

_PORTABLE, _READ_ONLY = 1, 8  # CU_MEMHOSTREGISTER_...
_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_HANDLE_SIZE = 64  # CU_IPC_HANDLE_SIZE
_OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"
_CAPTURING = "CUDA_ERROR_STREAM_CAPTURE"  # common prefix of the names of these errors
#: Smaller allocations share a block, and a handle gives access to a whole block.
_BLOCK = 1 << 21


@once
def _packages() -> tuple[ModuleType, Any]:
    """Return `cuda.core` and the module with the driver's functions. Raise DeviceNotFound if they are missing."""
    try:
        import cuda.core
        from cuda.bindings import driver
    except ImportError as error:
        raise DeviceNotFound(f"GPUs need the package cuda.core: pip install 'dissociated[cuda]' ({error})") from None
    return cuda.core, driver


def count() -> int:
    """Return the number of GPUs that this process sees.

    Raises:
        DeviceNotFound: A package or the driver is missing.
    """
    _, driver = _packages()
    try:
        (code,) = driver.cuInit(0)
        number = 0
        if not int(code):
            code, number = driver.cuDeviceGetCount()
    except Exception as error:  # loading the driver can raise several types
        raise DeviceNotFound(f"no GPU can be used: the driver cannot be loaded: {error}") from None
    if int(code):
        raise DeviceNotFound(f"no GPU can be used: the driver reports {code.name}")
    return int(number)


class _Capturing(DeviceError):
    """A stream is being captured into a graph, so the work in progress is unknown."""


class CudaDevice(Device):
    """The GPU with this number among those that this process sees."""

    type = DeviceType.CUDA

    def __init__(self, number: int) -> None:
        there = count()
        if number >= there:
            raise DeviceNotFound(
                f"device cuda:{number} does not exist: this process sees {there} (CUDA_VISIBLE_DEVICES)"
            )
        self._core, self._driver = _packages()
        with _device_errors(f"cuda:{number}"):
            super().__init__(f"cuda:{number}", number, f"cuda-{self._core.Device(number).uuid}")
        self._context = self._checked("cuDevicePrimaryCtxRetain", number)
        #: Stream for releases, which wait for the work of other streams. Copies must not wait for that.
        with self.current() as device:
            self._freeing = _CudaStream(self, device.create_stream())

    @contextmanager
    def current(self) -> Iterator[Any]:
        """Make the device current for calls of cuda.core, whose errors become DeviceError and DeviceFull."""
        self._checked("cuCtxPushCurrent", self._context)
        try:
            with _device_errors(self.name):
                device = self._core.Device(self.number)
                device.set_current()  # cuda.core requires this call in each thread
                yield device
        finally:
            self._driver.cuCtxPopCurrent()

    def call(self, function: str, *arguments: Any) -> Any:
        """Call a function of the driver, and return its result. Raise DeviceError or DeviceFull if it fails."""
        self._checked("cuCtxPushCurrent", self._context)
        try:
            return self._checked(function, *arguments)
        finally:
            self._driver.cuCtxPopCurrent()

    def _checked(self, function: str, *arguments: Any) -> Any:
        try:
            code, *results = getattr(self._driver, function)(*arguments)
        except RuntimeError as error:  # raised by the bindings if the driver is too old to have the function
            raise DeviceError(f"{function} on {self.name} failed: {error}") from None
        if int(code):
            name = getattr(code, "name", str(code))
            raise _kind(name)(f"{function} on {self.name} failed: {name}")
        return results[0] if len(results) == 1 else results

    def stream(self) -> Stream:
        with self.current() as device:
            return _CudaStream(self, device.create_stream())

    def fence(self) -> Event | None:
        try:
            with self.current() as device:
                event = _CudaEvent(self, device.create_event(self._core.EventOptions(blocking_sync=True)))
            self.call("cuCtxRecordEvent", self._context, event.handle)
            return event
        except _Capturing:
            raise
        except DeviceError:  # drivers before CUDA 12.5 cannot record an event for all streams
            self.call("cuCtxSynchronize")
        return None

    def wait_on(self, consumer: int, event: Event) -> None:
        assert isinstance(event, _CudaEvent)
        self.call("cuStreamWaitEvent", consumer, event.handle, 0)

    def register(self, memory: pa.Buffer, afterwards: Callable[[Callable[[], object]], object]) -> None:
        answers: list[tuple[Any]] = []  # the driver's answer

        def unregister() -> None:
            if answers and not int(answers[0][0]):
                with _giving_back():
                    self.call("cuMemHostUnregister", memory.address)

        afterwards(unregister)
        with self.current() as device:
            read_only = device.properties.read_only_host_register_supported
            arguments = memory.address, memory.size, _PORTABLE | (_READ_ONLY if read_only else 0)
            # This line runs in C only: Ctrl-C comes either before it, or after the driver's answer is stored. If the
            # driver refuses, copies go through its own pinned memory.
            answers.extend(starmap(self._driver.cuMemHostRegister, [arguments]))

    def _pin(self, size: int) -> pa.Buffer:
        try:
            address = int(self.call("cuMemHostAlloc", size, _PORTABLE))
        except DeviceError:  # the host cannot pin more memory
            return super()._pin(size)
        return pa.foreign_buffer(address, size, _Pinned(self, address))

    def _allocate(self, size: int, stream: Stream, exportable: bool) -> tuple[int, Release]:
        with suppress(DeviceFull):
            return self._allocate_now(size, stream, exportable)
        self._freeing.synchronize()  # pending releases may free enough memory
        try:
            return self._allocate_now(size, stream, exportable)
        except DeviceFull as error:
            raise DeviceFull(f"{self.name} has no {size} bytes left: drop batches, or read fewer ({error})") from None

    def _allocate_now(self, size: int, stream: Stream, exportable: bool) -> tuple[int, Release]:
        if exportable:
            address = int(self.call("cuMemAlloc", size + -size % _BLOCK))
            return address, lambda after: self._call_after(after, "cuMemFree", address)
        assert isinstance(stream, _CudaStream)
        with self.current() as device:
            allocated = device.allocate(size, stream=stream.stream)

        def release(after: Event | None) -> None:
            if after is not None:
                self._freeing.wait(after.pointer)
            with _giving_back(), self.current():
                allocated.close(self._freeing.stream)

        return int(allocated.handle), release

    def _call_after(self, after: Event | None, function: str, address: int) -> None:
        if after is not None:
            after.synchronize()
        with _giving_back():
            self.call(function, address)

    def _export(self, memory: DeviceMemory) -> bytes:
        base, _ = self.call("cuMemGetAddressRange", memory.address)
        if int(base) != memory.address:  # the driver would return the handle of the whole allocation
            raise DeviceError(f"the memory on {self.name} is part of an allocation, and cannot be exported by itself")
        handle = self.call("cuIpcGetMemHandle", memory.address)
        return ctypes.string_at(handle.getPtr(), _HANDLE_SIZE)

    def _open(self, handle: bytes, size: int) -> tuple[int, Release]:
        if len(handle) != _HANDLE_SIZE:
            raise DeviceError(
                f"the peer's handle of memory on {self.name} has {len(handle)} bytes instead of {_HANDLE_SIZE}"
            )
        opened = self._driver.CUipcMemHandle()
        ctypes.memmove(opened.getPtr(), handle, _HANDLE_SIZE)
        address = int(self.call("cuIpcOpenMemHandle", opened, _PEER_ACCESS))
        try:
            base, there = map(int, self.call("cuMemGetAddressRange", address))
            if base + there < address + size:
                raise DeviceError(f"the peer announced {size} bytes on {self.name}; its handle opens {there}")
        except DeviceError:
            self.call("cuIpcCloseMemHandle", address)
            raise
        return address, lambda after: self._call_after(after, "cuIpcCloseMemHandle", address)


class _Pinned:
    def __init__(self, device: CudaDevice, address: int) -> None:
        self._free = weakref.finalize(self, device.call, "cuMemFreeHost", address)
        self._free.atexit = False


class _CudaEvent(Event):
    def __init__(self, device: CudaDevice, event: Any) -> None:
        self._device = device
        self._event = event
        self.handle = int(event.handle)
        self._handle = ctypes.c_void_p(self.handle)
        self.pointer = ctypes.addressof(self._handle)

    def synchronize(self) -> None:
        with self._device.current():
            self._event.sync()


class _CudaStream(Stream):
    def __init__(self, device: CudaDevice, stream: Any) -> None:
        self._device = device
        self.stream = stream
        self.handle = int(stream.handle)

    def copy(self, target: int, source: int, length: int) -> None:
        self._device.call("cuMemcpyAsync", target, source, length, self.handle)

    def clear(self, target: int, length: int) -> None:
        self._device.call("cuMemsetD8Async", target, 0, length, self.handle)

    def record(self) -> Event:
        with self._device.current():
            options = self._device._core.EventOptions(blocking_sync=True)  # a wait must not spin
            return _CudaEvent(self._device, self.stream.record(options=options))

    def wait(self, pointer: int) -> None:
        self._device.call("cuStreamWaitEvent", self.handle, ctypes.c_void_p.from_address(pointer).value, 0)

    def synchronize(self) -> None:
        with self._device.current():
            self.stream.sync()


@contextmanager
def _device_errors(name: str) -> Iterator[None]:
    """Turn errors of cuda.core into DeviceError and DeviceFull."""
    try:
        yield
    except DeviceError:
        raise
    except Exception as error:  # cuda.core's exceptions have no common base class
        raise _kind(str(error))(f"{name} failed: {error}") from error


@contextmanager
def _giving_back() -> Iterator[None]:
    """Ignore errors of a release, which may have succeeded all the same and is not repeated.

    During a capture the driver only refuses, so that error is raised, and the release is tried again later.
    """
    try:
        yield
    except _Capturing:
        raise
    except DeviceError:
        pass


def _kind(message: str) -> type[DeviceError]:
    """Return the type of error for this name of the driver's code, or for a message of cuda.core that begins with one.

    The exceptions of cuda.core have no attribute for the code.
    """
    if _CAPTURING in message:
        return _Capturing
    return DeviceFull if _OUT_OF_MEMORY in message else DeviceError
