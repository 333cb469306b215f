"""The flatbuffers of tensors (Tensor.fbs, SparseTensor.fbs): shape, type, and the positions of their buffers.

A body holds the buffers of the index, if there is one, and then the values:

    dense  values
    COO    coordinates, a matrix with a row for each value; values
    CSR    for each row, the position of its first value (indptr); the column of each value (indices); values
    CSC    the same for columns
    CSF    indptr of each level but the last; indices of each level; values

libarrow gives the lengths of CSF's index buffers in elements, and all other lengths in bytes. For CSF, both units are
read here, and elements are written, because libarrow reads those.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from dissociated.errors import FormatError
from dissociated.format.flatbuffer import REFERENCE, Builder, Table, follow

#: Most dimensions of a tensor: the least that any supported version of NumPy allows.
MAX_DIMENSIONS = 32
#: Alignment of metadata, body, and each buffer in the body: "align [...] to be multiples of 64 bytes"
ALIGNMENT = 64

_MAX_TENSOR_SIZE = 1 << 63
_INT, _FLOATING_POINT = 2, 3  # the union Type of Schema.fbs
_FLOATS = ("<f2", "<f4", "<f8")  # the enum Precision
_COO, _CSX, _CSF = 1, 2, 3  # the union SparseTensorIndex
_TENSOR, _SPARSE_TENSOR = 4, 5  # the union MessageHeader
_BUFFER_FORMAT = "qq"  # struct Buffer { offset: long; length: long; }

Extents = tuple[tuple[int, ...], tuple[int, ...]]


class TensorFormat(Enum):
    """The layout of a tensor's values."""

    DENSE = "dense"
    COO = "COO"
    CSR = "CSR"
    CSC = "CSC"
    CSF = "CSF"


class TensorHeader(NamedTuple):
    """The content of a tensor's flatbuffer. Types are named as in NumPy; lengths and strides are in bytes."""

    format: TensorFormat
    type: str
    shape: tuple[int, ...]
    #: name of each dimension, empty if it has none
    names: tuple[str, ...]
    #: offset and length of each buffer of the body, in order
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    #: strides of dense values, or of COO's coordinates
    strides: tuple[int, ...] = ()
    #: number of values of a sparse tensor
    non_zero: int = 0
    #: type of `indptr`, which CSR, CSC and CSF have
    indptr_type: str = "<i8"
    #: type of the indices of a sparse tensor
    indices_type: str = "<i8"
    #: for CSF, the dimension of each level
    axis_order: tuple[int, ...] = ()
    #: for COO, whether the coordinates are sorted and unique
    canonical: bool = False


def size_in_bytes(shape: Sequence[int], type_: str) -> int:
    """Return the size, in bytes, of a dense array of this shape and type."""
    return math.prod(shape) * value_width(type_)


def value_width(type_: str) -> int:
    """Return the size of a value, in bytes."""
    return int(type_[2:])


def row_major(shape: Sequence[int], type_: str) -> tuple[int, ...]:
    """Return the strides of a row-major array, as libarrow computes them. An array without values has strides, too."""
    if 0 in shape:
        return (value_width(type_),) * len(shape)
    return tuple(size_in_bytes(shape[axis + 1 :], type_) for axis in range(len(shape)))


def spanned(shape: Sequence[int], strides: Sequence[int], type_: str) -> int:
    """Return the number of bytes from the first byte of a strided array to its last."""
    if 0 in shape:
        return 0
    return sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + value_width(type_)


# Reading


def parse_tensor(header: bytes) -> TensorHeader:
    """Read the flatbuffer of a `Message` that holds a tensor.

    Returns:
        A consistent header: every buffer is long enough for the shape.

    Raises:
        FormatError: The message is damaged or inconsistent, or holds no tensor.
    """
    try:
        message = Table.read(header, follow(header, 0), 3)
        kind = message.scalar(1, "B")
        if kind == _TENSOR:
            tensor = _dense(message.table(2, 5))
        elif kind == _SPARSE_TENSOR:
            tensor = _sparse(message.table(2, 7))
        else:
            raise FormatError("the Arrow IPC message has no tensor")
    except (struct.error, IndexError) as error:
        raise FormatError(f"the tensor message is damaged ({error})") from None
    _check(tensor)
    return tensor


def sparse_buffers(header: bytes, table: int) -> Extents:
    """Return offsets and lengths, in bytes and in the body's order, of the buffers of the `SparseTensor` at `table`."""
    tensor = _sparse(Table.read(header, table, 7))
    return tensor.offsets, tensor.lengths


def _dense(tensor: Table) -> TensorHeader:
    # Tensor { type_type, type, shape, strides, data: Buffer }
    type_, shape, names = _type_and_shape(tensor)
    strides = tuple(stride for (stride,) in tensor.vector(3, "q")) or row_major(shape, type_)
    offset, length = tensor.struct(4, _BUFFER_FORMAT)
    return TensorHeader(TensorFormat.DENSE, type_, shape, names, (offset,), (length,), strides)


def _sparse(tensor: Table) -> TensorHeader:
    # SparseTensor { type_type, type, shape, non_zero_length, sparseIndex_type, sparseIndex, data: Buffer }
    type_, shape, names = _type_and_shape(tensor)
    count, kind = tensor.scalar(3, "q"), tensor.scalar(4, "B")
    data = tensor.struct(6, _BUFFER_FORMAT)
    if kind == _COO:  # { indicesType, indicesStrides, indicesBuffer: Buffer, isCanonical }
        index = tensor.table(5, 4)
        buffers = [index.struct(2, _BUFFER_FORMAT), data]
        indices_type = _int(index.table(0, 2))
        strides = tuple(stride for (stride,) in index.vector(1, "q")) or row_major((count, len(shape)), indices_type)
        parsed = TensorHeader(TensorFormat.COO, type_, shape, names, (), (), strides, count, indices_type=indices_type)
        parsed = parsed._replace(canonical=bool(index.scalar(3, "B")))
    elif kind == _CSX:  # { compressedAxis, indptrType, indptrBuffer, indicesType, indicesBuffer }
        index = tensor.table(5, 5)
        buffers = [index.struct(2, _BUFFER_FORMAT), index.struct(4, _BUFFER_FORMAT), data]
        axis = index.scalar(0, "h")
        if axis not in (0, 1):
            raise FormatError(f"the sparse matrix has the compressed axis {axis}, which is neither row nor column")
        format_, types = (TensorFormat.CSR, TensorFormat.CSC)[axis], (_int(index.table(1, 2)), _int(index.table(3, 2)))
        parsed = TensorHeader(format_, type_, shape, names, (), (), (), count, *types)
    elif kind == _CSF:  # { indptrType, indptrBuffers, indicesType, indicesBuffers, axisOrder }
        index = tensor.table(5, 5)
        types = _int(index.table(0, 2)), _int(index.table(2, 2))
        order = tuple(axis for (axis,) in index.vector(4, "i"))
        buffers = [*_csf_buffers(index, count, types, len(shape)), data]
        parsed = TensorHeader(TensorFormat.CSF, type_, shape, names, (), (), (), count, *types, order)
    else:
        raise FormatError(f"the sparse tensor has an index of the unknown kind {kind}")
    offsets, lengths = zip(*buffers, strict=True)
    return parsed._replace(offsets=offsets, lengths=lengths)


def _type_and_shape(tensor: Table) -> tuple[str, tuple[int, ...], tuple[str, ...]]:
    kind = tensor.scalar(0, "B")
    if kind == _INT:
        type_ = _int(tensor.table(1, 2))
    elif kind == _FLOATING_POINT:
        precision = tensor.table(1, 1).scalar(0, "h")
        if not 0 <= precision < len(_FLOATS):
            raise FormatError(f"the tensor has floating-point numbers of the unknown precision {precision}")
        type_ = _FLOATS[precision]
    else:
        raise FormatError("the tensor has a type other than integers and floating-point numbers")
    dimensions = tensor.tables(2, 2)  # TensorDim { size, name }
    if len(dimensions) > MAX_DIMENSIONS:
        raise FormatError(f"the tensor has {len(dimensions)} dimensions; at most {MAX_DIMENSIONS} are accepted")
    shape = tuple(dimension.scalar(0, "q") for dimension in dimensions)
    # Strides must be computable from the other dimensions also if some dimensions are empty.
    if min(shape, default=0) < 0 or size_in_bytes([size or 1 for size in shape], type_) >= _MAX_TENSOR_SIZE:
        raise FormatError(f"the tensor has the impossible shape {shape}")
    return type_, shape, tuple(dimension.text(1) for dimension in dimensions)


def _int(table: Table) -> str:
    bits, signed = table.scalar(0, "i"), table.scalar(1, "B")
    if bits not in (8, 16, 32, 64):
        raise FormatError(f"the tensor has integers of {bits} bits")
    return f"<{'i' if signed else 'u'}{bits // 8}"


def _csf_buffers(index: Table, count: int, types: tuple[str, str], levels: int) -> list[tuple[int, int]]:
    """Return offset and length of each index buffer. Lengths are in bytes, whichever unit the flatbuffer has."""
    indptr, indices = index.vector(1, _BUFFER_FORMAT), index.vector(3, _BUFFER_FORMAT)
    if levels < 2 or len(indices) != levels or len(indptr) != levels - 1:
        raise FormatError(f"the CSF index has {len(indptr)} and {len(indices)} buffers for {levels} dimensions")
    for units in ((1, 1), (value_width(types[0]), value_width(types[1]))):
        begins = [divmod(length, units[0]) for _, length in indptr]
        sizes = [divmod(length, units[1]) for _, length in indices]
        if sizes[-1] == (count, 0) and begins == [(size + 1, 0) for size, _ in sizes[:-1]]:
            break
    else:
        raise FormatError("the CSF index has levels that disagree")
    return [
        (offset, length // unit * value_width(type_))
        for buffers, unit, type_ in zip((indptr, indices), units, types, strict=True)
        for offset, length in buffers
    ]


def _check(tensor: TensorHeader) -> None:
    """Raise FormatError if a buffer is too short for the shape or has an impossible position."""
    shape, count, lengths = tensor.shape, tensor.non_zero, tensor.lengths
    if any(offset < 0 or length < 0 for offset, length in zip(tensor.offsets, lengths, strict=True)):
        raise FormatError("the tensor has a buffer at an impossible place")
    if count < 0:
        raise FormatError(f"the sparse tensor has {count} values")
    if tensor.format is TensorFormat.DENSE:
        needed = [_strided(shape, tensor.strides, tensor.type)]
    else:
        needed = [count * value_width(tensor.type)]
    if tensor.format is TensorFormat.COO:
        needed.insert(0, _strided((count, len(shape)), tensor.strides, tensor.indices_type))
    elif tensor.format in (TensorFormat.CSR, TensorFormat.CSC):
        if len(shape) != 2:
            raise FormatError(f"the sparse matrix has {len(shape)} dimensions")
        compressed = shape[0] if tensor.format is TensorFormat.CSR else shape[1]
        needed[:0] = (compressed + 1) * value_width(tensor.indptr_type), count * value_width(tensor.indices_type)
    elif tensor.format is TensorFormat.CSF:
        if sorted(tensor.axis_order) != [*range(len(shape))]:
            raise FormatError(f"the CSF index has levels for the dimensions {tensor.axis_order}")
        needed[:0] = lengths[:-1]  # `_csf_buffers` has checked these
    for length, least in zip(lengths, needed, strict=True):
        if length < least:
            raise FormatError(f"the tensor has a buffer of {length} bytes; at least {least} are required")


def _strided(shape: tuple[int, ...], strides: tuple[int, ...], type_: str) -> int:
    if len(strides) != len(shape) or min(strides, default=0) < 0:
        raise FormatError(f"the tensor has the shape {shape} with the strides {strides}")
    # At least the size of the values: with strides of 0, a buffer of a few bytes could claim terabytes.
    return max(spanned(shape, strides, type_), size_in_bytes(shape, type_))


# Writing


def encode_tensor(tensor: TensorHeader, body_length: int, version: int) -> bytes:
    """Return the flatbuffer of a `Message` that holds this tensor.

    Args:
        tensor: The tensor.
        body_length: Length of the body, in bytes.
        version: MetadataVersion of Schema.fbs.
    """
    builder = Builder()
    kind, put = (_TENSOR, _put_dense) if tensor.format is TensorFormat.DENSE else (_SPARSE_TENSOR, _put_sparse)
    _, _, header, _ = builder.table(0, [("h", version), ("B", kind), REFERENCE, ("q", body_length)])
    put(builder, header, tensor)
    return builder.finish()


def _put_dense(builder: Builder, at: int, tensor: TensorHeader) -> None:
    """Write a `Tensor { type_type, type, shape, strides, data: Buffer }`."""
    kind = ("B", _type_kind(tensor.type))
    _, type_, shape, strides, _ = builder.table(at, [kind, REFERENCE, REFERENCE, REFERENCE, _buffer(tensor, 0)])
    _put_type(builder, type_, tensor.type)
    _put_shape(builder, shape, tensor)
    builder.numbers(strides, "q", tensor.strides)


def _put_sparse(builder: Builder, at: int, tensor: TensorHeader) -> None:
    """Write a `SparseTensor { type_type, type, shape, non_zero, sparseIndex_type, sparseIndex, data: Buffer }`."""
    index_kind, put_index = {TensorFormat.COO: (_COO, _put_coo), TensorFormat.CSF: (_CSF, _put_csf)}.get(
        tensor.format, (_CSX, _put_csx)
    )
    kind, count, data = ("B", _type_kind(tensor.type)), ("q", tensor.non_zero), _buffer(tensor, -1)
    _, type_, shape, _, _, index, _ = builder.table(
        at, [kind, REFERENCE, REFERENCE, count, ("B", index_kind), REFERENCE, data]
    )
    _put_type(builder, type_, tensor.type)
    _put_shape(builder, shape, tensor)
    put_index(builder, index, tensor)


def _put_coo(builder: Builder, at: int, tensor: TensorHeader) -> None:
    canonical = ("?", tensor.canonical)
    type_, strides, _, _ = builder.table(at, [REFERENCE, REFERENCE, _buffer(tensor, 0), canonical])
    _put_type(builder, type_, tensor.indices_type)
    builder.numbers(strides, "q", tensor.strides)


def _put_csx(builder: Builder, at: int, tensor: TensorHeader) -> None:
    axis = ("h", 0 if tensor.format is TensorFormat.CSR else 1)
    _, indptr_type, _, indices_type, _ = builder.table(
        at, [axis, REFERENCE, _buffer(tensor, 0), REFERENCE, _buffer(tensor, 1)]
    )
    _put_type(builder, indptr_type, tensor.indptr_type)
    _put_type(builder, indices_type, tensor.indices_type)


def _put_csf(builder: Builder, at: int, tensor: TensorHeader) -> None:
    indptr_type, indptr, indices_type, indices, order = builder.table(at, [REFERENCE] * 5)
    _put_type(builder, indptr_type, tensor.indptr_type)
    _put_type(builder, indices_type, tensor.indices_type)
    between = len(tensor.shape) - 1  # levels, each of which has an indptr
    for reference, type_, numbers in (
        (indptr, tensor.indptr_type, range(between)),
        (indices, tensor.indices_type, range(between, len(tensor.offsets) - 1)),
    ):
        extents = [(tensor.offsets[number], tensor.lengths[number] // value_width(type_)) for number in numbers]
        builder.extents(reference, extents)  # lengths in elements, as libarrow does it
    builder.numbers(order, "i", tensor.axis_order)


def _type_kind(type_: str) -> int:
    return _FLOATING_POINT if type_ in _FLOATS else _INT


def _put_type(builder: Builder, at: int, type_: str) -> None:
    if type_ in _FLOATS:
        builder.table(at, [("h", _FLOATS.index(type_))])
    else:
        builder.table(at, [("i", 8 * value_width(type_)), ("?", type_[1] == "i")])


def _put_shape(builder: Builder, at: int, tensor: TensorHeader) -> None:
    dimensions = builder.references(at, len(tensor.shape))
    for place, size, name in zip(dimensions, tensor.shape, tensor.names, strict=True):
        _, text = builder.table(place, [("q", size), REFERENCE])
        builder.text(text, name.encode())


def _buffer(tensor: TensorHeader, number: int) -> tuple[str, int, int]:
    return _BUFFER_FORMAT, tensor.offsets[number], tensor.lengths[number]
