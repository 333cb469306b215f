"""A foreign library: it knows the Arrow C Device interface and DLPack, and copies from the device."""

from __future__ import annotations

import ctypes
from typing import Any

import pyarrow as pa

from dissociated.codec.cdevice import ArrowArray, ArrowDeviceArray
from dissociated.memory.device.base import Device, Stream

pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
_rename = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_SetName", ctypes.pythonapi))


class _Exported:
    """A schema in a capsule, as pyarrow imports it."""

    def __init__(self, capsule: object) -> None:
        self._capsule = capsule

    def __arrow_c_schema__(self) -> object:
        return self._capsule


class TakenTensor:
    """A tensor taken from a capsule of `__dlpack__` by the rules of DLPack. `delete` gives it back."""

    _USED = b"used_dltensor"

    def __init__(self, source: Any, stream: Stream) -> None:
        capsule = source.__dlpack__(stream=stream.handle or None)
        address = pointer(capsule, b"dltensor")
        assert address is not None
        self._at: int = address
        _rename(capsule, self._USED)
        (self.data,) = (ctypes.c_uint64 * 1).from_address(address)

    def delete(self) -> None:
        deleter = ctypes.c_uint64.from_address(self._at + 56).value  # after DLTensor and manager_ctx
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(deleter)(self._at)


class Taken:
    """A batch moved out of a capsule of `__arrow_c_device_array__`. `release` gives it back."""

    def __init__(self, source: Any) -> None:
        schema, array = source.__arrow_c_device_array__()
        self.schema = pa.schema(_Exported(schema))
        self._at = ArrowDeviceArray.from_address(pointer(array, b"arrow_device_array"))
        self.struct = ArrowDeviceArray.from_buffer_copy(self._at)
        self._at.array.release = type(self._at.array.release)()

    def release(self) -> None:
        self.struct.array.release(ctypes.addressof(self.struct))
        assert not self.struct.array.release, "releasing says so"


class TakenStream:
    """A stream taken from a capsule of `__arrow_c_device_stream__`."""

    def __init__(self, source: Any) -> None:
        self._capsule = source.__arrow_c_device_stream__()
        address = pointer(self._capsule, b"arrow_device_array_stream")
        assert address is not None
        call = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
        fields = (ctypes.c_uint64 * 6).from_address(address)
        self._address: int = address
        self._schema, self._next = call(fields[1]), call(fields[2])
        self._error = ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_void_p)(fields[3])

    def schema(self) -> pa.Schema:
        place = (ctypes.c_int64 * 9)()
        assert self._schema(self._address, ctypes.addressof(place)) == 0
        return pa.schema(_Exported(_capsule(ctypes.addressof(place), b"arrow_schema", None)))

    def next(self) -> ArrowDeviceArray | None:
        """Return the next array, which the caller releases, or raise OSError with the message of the stream."""
        place = ArrowDeviceArray()
        ctypes.memset(ctypes.addressof(place), 0xAA, ctypes.sizeof(place))
        place.array.release = type(place.array.release)()
        if self._next(self._address, ctypes.addressof(place)):
            raise OSError(self._error(self._address).decode())
        return place if place.array.release else None


def fetched(device: Device, address: int, length: int, event: int | None, stream: Stream | None = None) -> bytes:
    """Return bytes of the device, as a `stream` of this library sees them after it has waited for `event`."""
    stream = device.stream() if stream is None else stream
    if event:
        stream.wait(event)
    target = pa.allocate_buffer(length)
    if length:
        stream.copy(target.address, address, length)
    stream.synchronize()
    return bytes(target)


def same(device: Device, struct: ArrowDeviceArray, expected: pa.RecordBatch) -> None:
    """Fail unless the data on the device is `expected`, buffer by buffer."""
    _, capsule = expected.__arrow_c_array__()  # releases the array when it is collected
    host = ArrowArray.from_address(pointer(capsule, b"arrow_array"))
    assert (struct.device_type, struct.device_id) == (device.type, device.number)
    sizes = _sizes(expected)
    _compare(device, struct.array, host, struct.sync_event, sizes)
    assert not sizes


def addresses(array: ArrowArray) -> set[int]:
    """Return the addresses of all buffers of an array and its children."""
    own = {array.buffers[index] for index in range(array.n_buffers) if array.buffers[index]}
    return own.union(*(addresses(array.children[index].contents) for index in range(array.n_children)))


def _sizes(batch: pa.RecordBatch) -> list[int]:
    """Return the bytes of each buffer in the order of the C interface. The batch must not contain views."""
    found: list[int] = [0]  # a batch is a struct without a validity bitmap

    def add(array: pa.Array) -> None:
        if isinstance(array, pa.ExtensionArray):
            array = array.storage
        found.extend(0 if one is None else one.size for one in array.buffers())

    for column in batch.columns:
        add(column)
    return found


def _compare(device: Device, here: ArrowArray, there: ArrowArray, event: int | None, sizes: list[int]) -> None:
    assert (here.length, here.offset, here.n_buffers, here.n_children) == (
        there.length,
        there.offset,
        there.n_buffers,
        there.n_children,
    )
    assert here.null_count == there.null_count
    for index in range(here.n_buffers):
        length = sizes.pop(0)
        assert bool(here.buffers[index]) >= bool(length)
        if length:
            assert fetched(device, here.buffers[index], length, event) == ctypes.string_at(there.buffers[index], length)
    for index in range(here.n_children):
        _compare(device, here.children[index].contents, there.children[index].contents, event, sizes)
