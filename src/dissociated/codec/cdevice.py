"""The Arrow C Device interface: export of record batches as capsules, and import of arrays from capsules.

libarrow makes the `ArrowArray`, whose release callback frees the buffers. pyarrow's wheels support no devices, so the
device and the event to wait for are written here.
"""

from __future__ import annotations

import ctypes
import errno
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, TypeAlias, TypeVar

import pyarrow as pa

from dissociated.base.interrupts import error_code_callback
from dissociated.errors import DeviceError, SourceError
from dissociated.memory.device.base import Device, DeviceType

T = TypeVar("T")

_LONGEST_ERROR = 4096  # bytes
_DEVICE_ARRAY, _DEVICE_STREAM = b"arrow_device_array", b"arrow_device_array_stream"


class ArrowArray(ctypes.Structure):
    """`struct ArrowArray`."""


ArrowArray._fields_ = [
    ("length", ctypes.c_int64),
    ("null_count", ctypes.c_int64),
    ("offset", ctypes.c_int64),
    ("n_buffers", ctypes.c_int64),
    ("n_children", ctypes.c_int64),
    ("buffers", ctypes.POINTER(ctypes.c_void_p)),
    ("children", ctypes.POINTER(ctypes.POINTER(ArrowArray))),
    ("dictionary", ctypes.POINTER(ArrowArray)),
    ("release", ctypes.CFUNCTYPE(None, ctypes.c_void_p)),
    ("private_data", ctypes.c_void_p),
]


class ArrowDeviceArray(ctypes.Structure):
    """`struct ArrowDeviceArray`."""

    _fields_ = [
        ("array", ArrowArray),
        ("device_id", ctypes.c_int64),
        ("device_type", ctypes.c_int32),
        ("sync_event", ctypes.c_void_p),
        ("reserved", ctypes.c_int64 * 3),
    ]


class _ArrowSchema(ctypes.Structure):
    """`struct ArrowSchema`, of which only the size is needed here."""

    _fields_ = [("content", ctypes.c_int64 * 9)]


#: Writes a batch into a struct.
Fill: TypeAlias = Callable[[ArrowDeviceArray], None]

_Callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
_LastError = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
_Release = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _ArrowDeviceArrayStream(ctypes.Structure):
    """`struct ArrowDeviceArrayStream`."""

    _fields_ = [
        ("device_type", ctypes.c_int32),
        ("get_schema", _Callback),
        ("get_next", _Callback),
        ("get_last_error", _LastError),
        ("release", _Release),
        ("private_data", ctypes.c_void_p),
    ]


# Capsules


# Own prototypes: `ctypes.pythonapi.NAME` is shared, and other code may set its argument types.
_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
# Takes an address, because a capsule that is being destroyed must not get a new reference.
_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_is_capsule = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))

_keep = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("Py_IncRef", ctypes.pythonapi))


def keep_alive(thunk: T) -> T:
    """Return `thunk`, which is never freed: consumers may call it after the interpreter has cleared our modules.

    Module globals are gone then. So such a function must have everything it needs to free memory bound to it.
    """
    _keep(thunk)
    return thunk


def is_capsule(value: object, name: bytes) -> bool:
    """Return whether `value` is a capsule with this name."""
    return bool(_is_capsule(id(value), name))


def pointer(capsule: object, name: bytes) -> int:
    """Return the pointer in a capsule with this name. Raises SourceError for any other object."""
    if not is_capsule(capsule, name):
        raise SourceError(f"the object gave a {type(capsule).__name__} instead of a capsule named {name.decode()!r}")
    return int(_capsule_pointer(id(capsule), name))


def _release_array(struct: ArrowDeviceArray, address_of: Callable[[Any], int] = ctypes.addressof) -> None:
    if struct.array.release:
        struct.array.release(address_of(struct))


def release_callback(kind: type[ctypes.Structure], remove: Callable[[int, None], object]) -> Any:
    """Return a `release` callback for structs of this kind, which calls `remove` with the `private_data`."""
    at = kind.from_address

    def release(address: int) -> None:
        struct: Any = at(address)
        remove(struct.private_data, None)
        struct.release = type(struct.release)()

    return keep_alive(_Release(release))


# Export


def fill(struct: ArrowDeviceArray, batch: pa.RecordBatch, device: Device, event: int | None) -> None:
    """Write the batch into `struct`. Its buffers are valid on the device once the `event` has happened.

    The event, a pointer, must live as long as the buffers.
    """
    ctypes.memset(ctypes.addressof(struct), 0, ctypes.sizeof(struct))  # the reserved fields, too
    _place(struct, device, event)
    batch._export_to_c(ctypes.addressof(struct))


def _place(struct: ArrowDeviceArray, device: Device, event: int | None) -> None:
    struct.device_id = device.number
    struct.device_type = device.type
    struct.sync_event = event


def export_array(batch: pa.RecordBatch, device: Device, event: int | None) -> tuple[Any, Any]:
    """Return the result of `__arrow_c_device_array__` for `batch`. See `fill`.

    The capsules are pyarrow's, which are destroyed in C. A consumer that refuses an array destroys it while its error
    is raised, and a callback of ctypes would replace that error by a SystemError.
    """
    schema, array = batch.__arrow_c_device_array__()
    _place(ArrowDeviceArray.from_address(pointer(array, _DEVICE_ARRAY)), device, event)
    return schema, array


class OnDevice(ABC):
    """Batches of this library on a device. They are imported directly, without callbacks of C.

    C would lose Ctrl-C, and the batch that it interrupts.
    """

    schema: Any

    @abstractmethod
    def fills(self) -> Iterator[Fill]:
        """Return for each remaining batch the function that writes it into a struct."""


class _Exported:
    """A stream from which a consumer pulls. Every failure raises KeyError, and `text` describes it."""

    def __init__(self, schema: pa.Schema, fills: Iterator[Fill]) -> None:
        self.text = ctypes.create_string_buffer(b"interrupted", _LONGEST_ERROR)
        self._schema = schema
        self._fills = fills
        self._broken = False

    def write_schema(self, out: int) -> None:
        self._attempt(self._schema._export_to_c, out)

    def write_next(self, out: int) -> None:
        if self._broken:
            raise KeyError
        struct = ArrowDeviceArray.from_address(out)
        ctypes.memset(out, 0, ctypes.sizeof(struct))  # without a release, the struct means the end of the stream
        self._attempt(self._fill, struct)

    def _attempt(self, write: Callable[[T], None], out: T) -> None:
        try:
            write(out)
        except BaseException as error:
            self.text.value = f"{type(error).__name__}: {error}".encode(errors="replace")[: _LONGEST_ERROR - 1]
            raise KeyError from None

    def _fill(self, struct: ArrowDeviceArray) -> None:
        self._broken = True  # if it stays true, a batch may have been lost
        try:
            write = next(self._fills, None)
            if write is not None:
                write(struct)
            self._broken = False  # last, once nothing can be lost
        except BaseException:
            _release_array(struct)  # the consumer will not release it
            raise


#: Exported streams, by the addresses of their texts.
_streams: dict[int, _Exported] = {}


def _stream(address: int | None) -> _Exported:
    assert address is not None
    return _streams[_ArrowDeviceArrayStream.from_address(address).private_data]


# Callbacks for consumers, to which a success without a batch would mean the end of the stream.

_answer = error_code_callback(errno.EIO)


class _GetSchema(ctypes.c_void_p):
    def __getitem__(self, out: int) -> None:
        _stream(self.value).write_schema(out)


class _GetNext(ctypes.c_void_p):
    def __getitem__(self, out: int) -> None:
        _stream(self.value).write_next(out)


_CALLBACKS = keep_alive(
    (
        ctypes.cast(ctypes.CFUNCTYPE(ctypes.c_int, _GetSchema, ctypes.c_void_p)(_answer), _Callback),
        ctypes.cast(ctypes.CFUNCTYPE(ctypes.c_int, _GetNext, ctypes.c_void_p)(_answer), _Callback),
        ctypes.cast(
            ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_ArrowDeviceArrayStream))(
                attrgetter("contents.private_data")
            ),
            _LastError,
        ),
        release_callback(_ArrowDeviceArrayStream, _streams.pop),
    )
)


#: The structs of capsules of streams, by the addresses of the capsules, until these are collected.
_structs: dict[int, _ArrowDeviceArrayStream] = {}


def _stream_destructor() -> Any:
    """Return the destructor of a capsule of a stream, which releases the stream unless a consumer has taken it."""
    name, take, is_capsule, address_of = _DEVICE_STREAM, _structs.pop, _is_capsule, ctypes.addressof

    def destroy(address: int) -> None:
        struct = take(address)
        if is_capsule(address, name) and struct.release:
            struct.release(address_of(struct))

    return keep_alive(ctypes.CFUNCTYPE(None, ctypes.c_void_p)(destroy))


_destroy_stream = _stream_destructor()


def export_stream(schema: pa.Schema, device: Device, fills: Iterator[Fill]) -> Any:
    """Return the result of `__arrow_c_device_stream__` for batches that `fills` write into structs."""
    stream = _Exported(schema, fills)
    number = ctypes.addressof(stream.text)
    _streams[number] = stream
    struct = _ArrowDeviceArrayStream(device.type, *_CALLBACKS, number)
    capsule = _new_capsule(ctypes.addressof(struct), _DEVICE_STREAM, ctypes.cast(_destroy_stream, ctypes.c_void_p))
    _structs[id(capsule)] = struct
    return capsule


def check_request(requested_schema: object, schema: pa.Schema, options: dict[str, Any]) -> None:
    """Raise DeviceError for a request of another schema, and NotImplementedError for unknown options."""
    if requested_schema is not None and not pa.Schema._import_from_c_capsule(requested_schema).equals(schema):
        raise DeviceError("data on a device cannot be cast to another schema: request no schema")
    if unknown := [name for name, value in options.items() if value is not None]:
        raise NotImplementedError(f"unknown options: {', '.join(unknown)}")


# Import


def is_on_device(source: object) -> bool:
    """Return whether `source` offers the Arrow C Device interface for record batches.

    A single array of pyarrow does not count.
    """
    offers = hasattr(source, "__arrow_c_device_stream__") or hasattr(source, "__arrow_c_device_array__")
    return offers and not isinstance(source, pa.Array)


class ImportedArray:
    """An array of another library's batch on a device. It is released when this object is collected."""

    struct = ArrowDeviceArray()  # for an object whose `__init__` was interrupted

    def __init__(self, struct: ArrowDeviceArray) -> None:
        self.struct = struct

    def __del__(self) -> None:
        _release_array(self.struct)

    @property
    def array(self) -> ArrowArray:
        array: ArrowArray = self.struct.array
        return array


def _move_struct(address: int) -> ArrowDeviceArray:
    """Return the struct at `address`, and mark the original as released."""
    struct = ArrowDeviceArray.from_buffer_copy(ArrowDeviceArray.from_address(address))
    ArrowDeviceArray.from_address(address).array.release = type(struct.array.release)()
    return struct


def import_batches(source: Any) -> tuple[pa.Schema, Iterator[ImportedArray]]:
    """Return the schema and batches of `source`, which offers the Arrow C Device interface. Raises SourceError."""
    if isinstance(source, OnDevice):
        return source.schema, _read(source)
    if not hasattr(source, "__arrow_c_device_stream__"):
        schema, array = source.__arrow_c_device_array__()
        imported = ImportedArray(_move_struct(pointer(array, _DEVICE_ARRAY)))
        return pa.Schema._import_from_c_capsule(schema), iter([imported])
    from_capsule = source.__arrow_c_device_stream__()
    struct = _ArrowDeviceArrayStream.from_address(pointer(from_capsule, _DEVICE_STREAM))
    place = _ArrowSchema()
    _check_code(struct, struct.get_schema(ctypes.addressof(struct), ctypes.addressof(place)))
    return pa.Schema._import_from_c(ctypes.addressof(place)), _pull_arrays(from_capsule, struct)


def _read(source: OnDevice) -> Iterator[ImportedArray]:
    try:
        for fill in source.fills():
            imported = ImportedArray(ArrowDeviceArray())
            fill(imported.struct)
            yield imported
    except Exception as error:
        raise _source_error(f"{type(error).__name__}: {error}") from error


#: The release of a struct before the source has written to it.
_UNTOUCHED = keep_alive(_Release(id))


def _pull_arrays(from_capsule: object, stream: _ArrowDeviceArrayStream) -> Iterator[ImportedArray]:
    while True:
        imported = ImportedArray(ArrowDeviceArray(ArrowArray(release=_UNTOUCHED)))
        _check_code(stream, stream.get_next(ctypes.addressof(stream), ctypes.addressof(imported.struct)))
        release = ctypes.cast(imported.array.release, ctypes.c_void_p).value
        if release == ctypes.cast(_UNTOUCHED, ctypes.c_void_p).value:
            raise SourceError("a source on a device gave neither a batch nor its end; it may have been interrupted")
        if not release:
            return
        yield imported


def _check_code(struct: _ArrowDeviceArrayStream, code: int) -> None:
    if code:
        message = struct.get_last_error(ctypes.addressof(struct))
        raise _source_error(
            ctypes.string_at(message).decode(errors="replace") if message else errno.errorcode.get(code, code)
        )


def _source_error(reason: object) -> SourceError:
    return SourceError(f"a source on a device failed: {reason}")


def device_name(struct: ArrowDeviceArray) -> str | None:
    """Return the name for `open_device` of the array's device; None for host memory. Raises SourceError."""
    kinds = {DeviceType.CUDA: "cuda", DeviceType.EXTENSION: "test"}
    if struct.device_type == DeviceType.CPU:
        return None
    if struct.device_type not in kinds:
        raise SourceError(f"the device type {struct.device_type} of the Arrow C Device interface is not supported")
    return f"{kinds[DeviceType(struct.device_type)]}:{struct.device_id}"
