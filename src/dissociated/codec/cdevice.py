"""The Arrow C Device interface: its structs, as capsules out of record batches, and record batches' arrays out of them.

libarrow makes the `ArrowArray`, whose release lets go of the buffers. It has no device of its own in pyarrow's wheels,
so which device it is, and what to wait for, is written here.
"""

from __future__ import annotations

import ctypes
import errno
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, TypeAlias, TypeVar

import pyarrow as pa

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
    """`struct ArrowSchema`, of which only the size matters here."""

    _fields_ = [("content", ctypes.c_int64 * 9)]


#: Makes a struct a batch.
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


# Of our own: `ctypes.pythonapi.NAME` belongs to everybody, and others say there what they pass.
_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
# By address: a capsule that is going must not be referred to.
_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_is_capsule = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))

_keep = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("Py_IncRef", ctypes.pythonapi))


def lasting(thunk: T) -> T:
    """`thunk`, which is never freed: who was given it may call it when the interpreter has taken our modules apart.

    Nor are module globals there any more then: whatever such a function needs to let go of memory is bound to it.
    """
    _keep(thunk)
    return thunk


_Destructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
#: What capsules point to, by their own addresses, until they are collected.
_structs: dict[int, ctypes.Structure] = {}


def capsule(struct: ctypes.Structure, name: bytes, destroy: Any) -> Any:
    """A capsule of that name around `struct`, for which `destroy` is called with the capsule's address at its end."""
    made = _new_capsule(ctypes.addressof(struct), name, ctypes.cast(destroy, ctypes.c_void_p))
    _structs[id(made)] = struct
    return made


def destructor(name: bytes, release: Callable[[Any], None]) -> Any:
    """What `capsule` takes: it calls `release` with the struct of a capsule that still has this name.

    The name lasts with it: capsules refer to its characters.
    """
    take, is_capsule = _structs.pop, _is_capsule

    def destroy(address: int) -> None:
        struct = take(address)
        if is_capsule(address, name):  # else somebody has taken it
            release(struct)

    return lasting(_Destructor(destroy))


def pointer(capsule: object, name: bytes) -> int:
    """What a capsule of this name points to. Raises SourceError for something else."""
    if not _is_capsule(id(capsule), name):
        raise SourceError(f"a capsule named {name.decode()} was to come, and a {type(capsule).__name__} did")
    return int(_capsule_pointer(id(capsule), name))


def _release_array(struct: ArrowDeviceArray, address_of: Callable[[Any], int] = ctypes.addressof) -> None:
    if struct.array.release:
        struct.array.release(address_of(struct))


def _release_stream(struct: _ArrowDeviceArrayStream, address_of: Callable[[Any], int] = ctypes.addressof) -> None:
    if struct.release:
        struct.release(address_of(struct))


def releasing(kind: type[ctypes.Structure], forget: Callable[[int, None], object]) -> Any:
    """What a struct of this kind has as its `release`: it calls `forget` with the `private_data`."""
    at = kind.from_address

    def release(address: int) -> None:
        struct: Any = at(address)
        forget(struct.private_data, None)
        struct.release = type(struct.release)()

    return lasting(_Release(release))


_destroy_array = destructor(_DEVICE_ARRAY, _release_array)
_destroy_stream = destructor(_DEVICE_STREAM, _release_stream)


# Out


def fill(struct: ArrowDeviceArray, batch: pa.RecordBatch, device: Device, event: int | None) -> None:
    """Make `struct` the batch, whose buffers lie on the device once what this `event` points to has happened.

    The event must be there for as long as the buffers.
    """
    ctypes.memset(ctypes.addressof(struct), 0, ctypes.sizeof(struct))  # the reserved fields, too
    struct.device_id = device.number
    struct.device_type = device.type
    struct.sync_event = event
    batch._export_to_c(ctypes.addressof(struct))


def export_array(batch: pa.RecordBatch, device: Device, event: int | None) -> tuple[Any, Any]:
    """What `__arrow_c_device_array__` returns of `batch`; see `fill`."""
    schema = batch.schema.__arrow_c_schema__()  # first: where it fails, nothing is held yet
    struct = ArrowDeviceArray()
    fill(struct, batch, device, event)
    return schema, capsule(struct, _DEVICE_ARRAY, _destroy_array)


class OnDevice(ABC):
    """Batches of ours on a device. We read them as they are: in between, C would lose Ctrl-C, and what it stopped."""

    schema: Any

    @abstractmethod
    def fills(self) -> Iterator[Fill]:
        """What writes each batch that is left into a struct."""


class _Exported:
    """The stream that a consumer pulls from. KeyError stands for whatever went wrong, and `text` says what that was."""

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
        ctypes.memset(out, 0, ctypes.sizeof(struct))  # no release: the end, unless a batch comes
        self._attempt(self._fill, struct)

    def _attempt(self, write: Callable[[T], None], out: T) -> None:
        try:
            write(out)
        except BaseException as error:
            self.text.value = f"{type(error).__name__}: {error}".encode(errors="replace")[: _LONGEST_ERROR - 1]
            raise KeyError from None

    def _fill(self, struct: ArrowDeviceArray) -> None:
        self._broken = True  # and where it stays so, a batch may be lost that was under way
        try:
            write = next(self._fills, None)
            if write is not None:
                write(struct)
            self._broken = False  # at last
        except BaseException:
            _release_array(struct)  # nobody else will
            raise


#: By the addresses of their texts.
_streams: dict[int, _Exported] = {}


def _stream(address: int | None) -> _Exported:
    assert address is not None
    return _streams[_ArrowDeviceArrayStream.from_address(address).private_data]


# What consumers call. Ctrl-C may come at the first bytecode of a callback, before any `try`. ctypes would return what
# lies on the stack then, and 0 is a success: without a batch it is the end of the stream. So C is called, which calls
# `__getitem__`, and says whether that has raised.

_answer = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.py_object)(("PyMapping_HasKey", ctypes.pythonapi))
_answer.restype = (errno.EIO, 0).__getitem__


class _GetSchema(ctypes.c_void_p):
    def __getitem__(self, out: int) -> None:
        _stream(self.value).write_schema(out)


class _GetNext(ctypes.c_void_p):
    def __getitem__(self, out: int) -> None:
        _stream(self.value).write_next(out)


_CALLBACKS = lasting(
    (
        ctypes.cast(ctypes.CFUNCTYPE(ctypes.c_int, _GetSchema, ctypes.c_void_p)(_answer), _Callback),
        ctypes.cast(ctypes.CFUNCTYPE(ctypes.c_int, _GetNext, ctypes.c_void_p)(_answer), _Callback),
        ctypes.cast(
            ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_ArrowDeviceArrayStream))(
                attrgetter("contents.private_data")
            ),
            _LastError,
        ),
        releasing(_ArrowDeviceArrayStream, _streams.pop),
    )
)


def export_stream(schema: pa.Schema, device: Device, fills: Iterator[Fill]) -> Any:
    """What `__arrow_c_device_stream__` returns of batches, each of which writes itself into a struct."""
    stream = _Exported(schema, fills)
    number = ctypes.addressof(stream.text)
    _streams[number] = stream
    struct = _ArrowDeviceArrayStream(device.type, *_CALLBACKS, number)
    return capsule(struct, _DEVICE_STREAM, _destroy_stream)


def check_request(requested_schema: object, schema: pa.Schema, options: dict[str, Any]) -> None:
    """Raise DeviceError for what cannot be done on a device: another schema, and options that nobody knows."""
    if requested_schema is not None and not pa.Schema._import_from_c_capsule(requested_schema).equals(schema):
        raise DeviceError("what lies on a device cannot be cast to another schema here: ask for none")
    if unknown := [name for name, value in options.items() if value is not None]:
        raise NotImplementedError(f"options that are not known: {', '.join(unknown)}")


# In


def is_on_device(source: object) -> bool:
    """Whether `source` offers the Arrow C Device interface, as record batches do, and not only one array of pyarrow."""
    offers = hasattr(source, "__arrow_c_device_stream__") or hasattr(source, "__arrow_c_device_array__")
    return offers and not isinstance(source, pa.Array)


class ImportedArray:
    """An array of a batch that somebody else has on a device. It is given back when this is collected."""

    struct = ArrowDeviceArray()  # for one that Ctrl-C left without

    def __init__(self, struct: ArrowDeviceArray) -> None:
        self.struct = struct

    def __del__(self) -> None:
        _release_array(self.struct)

    @property
    def array(self) -> ArrowArray:
        array: ArrowArray = self.struct.array
        return array


def _moved(address: int) -> ArrowDeviceArray:
    """The struct at `address`, which is empty from now on."""
    struct = ArrowDeviceArray.from_buffer_copy(ArrowDeviceArray.from_address(address))
    ArrowDeviceArray.from_address(address).array.release = type(struct.array.release)()
    return struct


def import_batches(source: Any) -> tuple[pa.Schema, Iterator[ImportedArray]]:
    """The schema of `source`, which offers the Arrow C Device interface, and its batches. Raises SourceError."""
    if isinstance(source, OnDevice):
        return source.schema, _read(source)
    if not hasattr(source, "__arrow_c_device_stream__"):
        schema, array = source.__arrow_c_device_array__()
        imported = ImportedArray(_moved(pointer(array, _DEVICE_ARRAY)))
        return pa.Schema._import_from_c_capsule(schema), iter([imported])
    from_capsule = source.__arrow_c_device_stream__()
    struct = _ArrowDeviceArrayStream.from_address(pointer(from_capsule, _DEVICE_STREAM))
    place = _ArrowSchema()
    _checked(struct, struct.get_schema(ctypes.addressof(struct), ctypes.addressof(place)))
    return pa.Schema._import_from_c(ctypes.addressof(place)), _pulled(from_capsule, struct)


def _read(source: OnDevice) -> Iterator[ImportedArray]:
    try:
        for fill in source.fills():
            imported = ImportedArray(ArrowDeviceArray())
            fill(imported.struct)
            yield imported
    except Exception as error:
        raise _failed(f"{type(error).__name__}: {error}") from error


#: The release of a struct that nobody has written to.
_UNTOUCHED = lasting(_Release(id))


def _pulled(from_capsule: object, stream: _ArrowDeviceArrayStream) -> Iterator[ImportedArray]:
    while True:
        imported = ImportedArray(ArrowDeviceArray(ArrowArray(release=_UNTOUCHED)))
        _checked(stream, stream.get_next(ctypes.addressof(stream), ctypes.addressof(imported.struct)))
        release = ctypes.cast(imported.array.release, ctypes.c_void_p).value
        if release == ctypes.cast(_UNTOUCHED, ctypes.c_void_p).value:
            raise SourceError("a source on a device gave neither a batch nor its end: was it interrupted?")
        if not release:
            return
        yield imported


def _checked(struct: _ArrowDeviceArrayStream, code: int) -> None:
    if code:
        said = struct.get_last_error(ctypes.addressof(struct))
        raise _failed(ctypes.string_at(said).decode(errors="replace") if said else errno.errorcode.get(code, code))


def _failed(reason: object) -> SourceError:
    return SourceError(f"a source on a device failed: {reason}")


def device_name(struct: ArrowDeviceArray) -> str | None:
    """What `open_device` calls the device that an array lies on; None for host memory. Raises SourceError."""
    kinds = {DeviceType.CUDA: "cuda", DeviceType.EXTENSION: "test"}
    if struct.device_type == DeviceType.CPU:
        return None
    if struct.device_type not in kinds:
        raise SourceError(f"what lies on a device of type {struct.device_type} of the Arrow C Device interface")
    return f"{kinds[DeviceType(struct.device_type)]}:{struct.device_id}"
