"""Flat columns on a device for array libraries: DLPack, and `__cuda_array_interface__`.

A column is flat if it has no nulls and a number per row, of a width that array libraries support: integers and floats,
and dates, times and durations as integers. So is a column of lists of one size of such numbers. A decimal is an integer
in units of its last digit; a decimal of more than 64 bits is a row of such integers, the lowest first, of which the
last has the sign.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from dissociated.codec.cdevice import (
    ArrowArray,
    ArrowDeviceArray,
    ImportedArray,
    is_capsule,
    pointer,
    release_callback,
)
from dissociated.errors import SourceError
from dissociated.memory.device.base import Device, DeviceType, Event
from dissociated.memory.device.registry import open_device

_TENSOR, _VERSIONED = b"dltensor", b"dltensor_versioned"
_DLPACK_VERSION = 1, 0
_COPIED = 2  # DLPACK_FLAG_BITMASK_IS_COPIED
_INT, _UINT, _FLOAT = 0, 1, 2  # DLDataTypeCode
_ALIGNMENT = 64  # bytes
_NO_SYNCHRONIZATION = -1
_LEGACY_STREAM = 1


class _Tensor(ctypes.Structure):
    """`DLTensor`."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _ManagedTensor(ctypes.Structure):
    """`DLManagedTensor`."""

    _fields_ = [("tensor", _Tensor), ("manager_ctx", ctypes.c_void_p), ("deleter", _Deleter)]


class _VersionedTensor(ctypes.Structure):
    """`DLManagedTensorVersioned`."""

    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", _Deleter),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


class _Values:
    """Values in memory that `owner` keeps, described as NumPy expects it. NumPy reads no value to export them."""

    def __init__(self, interface: dict[str, Any], owner: object) -> None:
        self.__array_interface__ = interface
        self._owner = owner


class DeviceColumn:
    """A column of a record batch on a device. Array libraries use a flat column without a copy."""

    def __init__(self, device: Device, array: pa.Array, event: Event | None, shared: bool) -> None:
        #: The device of the column.
        self.device = device
        self._array = array
        self._event = event
        self._shared = shared

    @property
    def type(self) -> pa.DataType:
        """The Arrow type."""
        return self._array.type

    @property
    def null_count(self) -> int:
        """The number of nulls."""
        return int(self._array.null_count)

    def __len__(self) -> int:
        return len(self._array)

    def __dlpack_device__(self) -> tuple[int, int]:
        return int(self.device.type), self.device.number

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Return a tensor of one dimension, or of two for long decimals and lists of one size.

        A read-only column is copied if the version of DLPack cannot express that it is read-only.

        Raises:
            BufferError: The column is not flat, its values are too short, or the request cannot be met.
        """
        code, bits, words = self._element()
        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            raise BufferError(f"the column is on {self.device.name}, and is not copied to another device")
        versioned = max_version is not None and max_version[0] >= _DLPACK_VERSION[0]
        read_only = self._shared and not copy
        if read_only and not versioned:  # DLPack without versions cannot express this
            if copy is False:
                raise BufferError(
                    "the column is in the memory of its server, which must not be written to, and DLPack without "
                    "versions cannot mark it as read-only: request a copy, request DLPack version 1, or take the "
                    "column as Arrow"
                )
            copy, read_only = True, False
        there = self._array, self._event, self._address(bits * words)
        owner, event, address = self._copied(bits * words) if copy else there
        if event is not None and stream == _NO_SYNCHRONIZATION and copy:
            event.synchronize()  # the consumer cannot wait for the copy
        elif event is not None and stream != _NO_SYNCHRONIZATION:
            self.device.wait_on(_LEGACY_STREAM if stream is None else stream, event)
        place = address or _ALIGNMENT  # NumPy 2.1 refuses null, which is the address of an empty column
        interface = {"shape": self._shape(words), "typestr": _typestr(code, bits), "data": (place, read_only)}
        # NumPy's capsules are deleted in C. A consumer deletes them while its error is raised if it refuses them, and a
        # callback of ctypes would replace that error by a SystemError.
        array = np.asarray(_Values({**interface, "version": 3}, owner))
        exported = array.__dlpack__(max_version=_DLPACK_VERSION if versioned else None)
        struct = _managed(exported)
        if copy and isinstance(struct, _VersionedTensor):
            struct.flags |= _COPIED
        tensor = struct.tensor
        tensor.data, (tensor.device_type, tensor.device_id) = address, self.__dlpack_device__()
        return exported

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The interface for CuPy, Numba and others, once the column has arrived. Only CUDA devices have it."""
        if self.device.type is not DeviceType.CUDA:
            raise AttributeError(f"{self.device.name} is not a CUDA device")
        return self.array_interface()

    def array_interface(self) -> dict[str, Any]:
        """Return the content of `__cuda_array_interface__` on any device, for libraries that can copy from it.

        Raises:
            AttributeError: The column is not flat or too short; missing attributes raise the same type.
        """
        try:
            code, bits, words = self._element()
            address = self._address(bits * words)
        except BufferError as error:
            raise AttributeError(str(error)) from None
        if self._event is not None:
            self._event.synchronize()
        return {
            "shape": self._shape(words),
            "typestr": _typestr(code, bits),
            "data": (address, self._shared),
            "version": 3,
            "strides": None,
            "stream": None,
        }

    def _element(self) -> tuple[int, int, int]:
        """Return the type code and bits of the numbers, and the numbers per value.

        Raises:
            BufferError: The column is not flat.
        """
        type_ = self.type.storage_type if isinstance(self.type, pa.BaseExtensionType) else self.type
        types, numbers, array = pa.types, math.prod(self._list_sizes), self._array
        for _ in self._list_sizes:
            type_, array = type_.value_type, array.values
            if array.null_count:
                raise BufferError("the lists have nulls, which an array cannot: take the column as Arrow")
        if types.is_floating(type_):
            code = _FLOAT
        elif types.is_unsigned_integer(type_):
            code = _UINT
        elif (
            types.is_signed_integer(type_)
            or types.is_decimal(type_)
            or (types.is_temporal(type_) and not types.is_interval(type_))
        ):
            code = _INT
        else:
            raise BufferError(f"a column of {self.type} does not have a number for each row: take the column as Arrow")
        if self.null_count:
            raise BufferError(
                f"the column has {self.null_count} nulls, which an array cannot hold: take the column as Arrow"
            )
        bits: int = type_.bit_width
        return code, min(bits, 64), max(1, bits // 64) * numbers

    @property
    def _list_sizes(self) -> tuple[int, ...]:
        """The sizes of the lists of a fixed size in each row, the outer ones first; empty if a row is no list."""
        sizes: list[int] = []
        type_ = self.type
        while pa.types.is_fixed_size_list(type_):
            sizes.append(type_.list_size)
            type_ = type_.value_type
        return tuple(sizes)

    def _shape(self, words: int) -> tuple[int, ...]:
        sizes = self._list_sizes
        if not sizes:
            return (len(self), words) if words > 1 else (len(self),)
        outer = sizes[:-1]
        return (len(self), *outer, words // max(1, math.prod(outer)))

    def _copied(self, bits: int) -> tuple[object, Event | None, int]:
        """Copy the values on the device. Return the owner of the copy, its event, and its address."""
        length = len(self) * bits // 8
        if not length:
            return None, None, 0
        stream = self.device.stream()
        if self._event is not None:
            stream.wait(self._event.pointer)
        memory = self.device.allocate(length, stream)
        stream.copy(memory.address, self._address(bits), length)
        memory.event = stream.record()
        return (memory, self._array), memory.event, memory.address

    def _address(self, bits: int) -> int:
        """Return the address of the values.

        Raises:
            BufferError: There are fewer bytes than the rows need: the peer's lengths are not trusted.
        """
        *_, values = self._array.buffers()
        array, first, bits_per_value = self._array, self._array.offset, bits
        for size in self._list_sizes:  # the values of each list may begin at an offset of their own
            array, bits_per_value = array.values, bits_per_value // max(1, size)
            first = first * size + array.offset
        first = first * bits_per_value // 8
        there, needed = 0 if values is None else int(values.size), first + len(self) * bits // 8
        if len(self) and there < needed:
            raise BufferError(f"the column has {len(self)} rows, which need {needed} bytes, and its buffer has {there}")
        return int(values.address) + first if len(self) else 0

    def __repr__(self) -> str:
        return f"<DeviceColumn of {len(self)} {self.type} on {self.device.name}>"


def _typestr(code: int, bits: int) -> str:
    """Return the type of values in the notation of NumPy's array interface."""
    return f"<{'iuf'[code]}{bits // 8}"


def _managed(capsule: object) -> _ManagedTensor | _VersionedTensor:
    """Return the struct in a capsule, which still owns it. Raises SourceError for any other object."""
    if is_capsule(capsule, _VERSIONED):
        return _VersionedTensor.from_address(pointer(capsule, _VERSIONED))
    return _ManagedTensor.from_address(pointer(capsule, _TENSOR))


# Import


_ARROW_TYPES = {
    **{(_INT, width): getattr(pa, f"int{width}")() for width in (8, 16, 32, 64)},
    **{(_UINT, width): getattr(pa, f"uint{width}")() for width in (8, 16, 32, 64)},
    **{(_FLOAT, width): getattr(pa, f"float{width}")() for width in (16, 32, 64)},
}
#: DLPack's types of host memory: plain, or pinned by CUDA.
_HOST_DEVICE = (DeviceType.CPU, 3)
_batches: dict[int, object] = {}
_numbers = itertools.count(1)
_RELEASE_BATCH = release_callback(ArrowArray, _batches.pop)


def import_columns(columns: Mapping[str, Any]) -> tuple[pa.Schema, list[ImportedArray]]:
    """Return one-dimensional arrays of other libraries, all on one device, as a record batch.

    The batch has an event after the computation of the arrays. Raises SourceError.
    """
    places = {tuple(map(int, column.__dlpack_device__())) for column in columns.values()}
    if len(places) > 1:
        raise SourceError("the columns are on several devices: put all columns of a dataset on one device")
    ((kind, number),) = places
    struct = ArrowDeviceArray()
    if kind in _HOST_DEVICE:
        batch = pa.record_batch({name: pa.array(np.array(np.from_dlpack(column))) for name, column in columns.items()})
        batch._export_to_c(ctypes.addressof(struct))
        struct.device_type = DeviceType.CPU
        return batch.schema, [ImportedArray(struct)]
    if kind not in (DeviceType.CUDA, DeviceType.EXTENSION):
        raise SourceError(f"the device type {kind} of DLPack is not supported")
    device = open_device(f"{'cuda' if kind == DeviceType.CUDA else 'test'}:{number}")
    stream = device.stream()
    capsules = [_capsule(column, stream.handle or None) for column in columns.values()]
    tensors = [_tensor(name, exported) for name, exported in zip(columns, capsules, strict=True)]
    event = stream.record()
    lengths = {tensor.shape[0] for tensor in tensors}
    if len(lengths) > 1:
        raise SourceError(f"the columns have {', '.join(map(str, sorted(lengths)))} rows: give columns of equal length")
    (length,) = lengths
    arrays = [
        _array(length, (ctypes.c_void_p * 2)(None, (tensor.data or 0) + tensor.byte_offset)) for tensor in tensors
    ]
    whole = _array(length, (ctypes.c_void_p * 1)())
    whole.n_children = len(arrays)
    children = (ctypes.POINTER(ArrowArray) * len(arrays))(*map(ctypes.pointer, arrays))
    whole.children = children
    whole.release = _RELEASE_BATCH
    whole.private_data = next(_numbers)
    _batches[whole.private_data] = capsules, arrays, children, whole, event
    struct.array, struct.device_type, struct.device_id, struct.sync_event = whole, kind, number, event.pointer
    schema = pa.schema(
        [(name, _ARROW_TYPES[tensor.code, tensor.bits]) for name, tensor in zip(columns, tensors, strict=True)]
    )
    return schema, [ImportedArray(struct)]


def _array(length: int, buffers: Any) -> ArrowArray:
    array = ArrowArray(length, 0, 0, len(buffers))
    array.buffers = buffers
    return array


def _capsule(column: Any, stream: int | None) -> Any:
    try:
        return column.__dlpack__(stream=stream, max_version=_DLPACK_VERSION)
    except TypeError:  # the library does not support versions of DLPack
        return column.__dlpack__(stream=stream)


def _tensor(name: str, capsule: Any) -> _Tensor:
    """Return the tensor in a capsule, which still owns it."""
    tensor = _managed(capsule).tensor
    flat = tensor.ndim == 1 and tensor.lanes == 1 and (not tensor.strides or tensor.strides[0] == 1)
    if not flat or (tensor.code, tensor.bits) not in _ARROW_TYPES:
        raise SourceError(f"column {name!r} is not a contiguous, one-dimensional array of integers or floats")
    return tensor  # type: ignore[no-any-return]  # ctypes' fields are Any
