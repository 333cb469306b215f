"""Encoding and decoding of tensors, dense and sparse (Arrow IPC "Tensor" and "SparseTensor Message Format").

libarrow has no Python API for messages of sparse tensors. It copies dense tensors on their way to a sink, and ignores
the offset of a dense tensor in its body. So flatbuffers are read and written here, and pyarrow's tensors are made
around the bytes in place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, permutations
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from dissociated.base.buffers import Buffer
from dissociated.codec.options import WriteOptions, check_options
from dissociated.codec.split import SplitMessage
from dissociated.errors import FormatError, OptionError, RemoteProtocolError
from dissociated.format.message import Header, buffer_extents, parse_header
from dissociated.format.tensor import (
    ALIGNMENT,
    TensorFormat,
    TensorHeader,
    encode_tensor,
    parse_tensor,
    row_major,
    value_width,
)

#: pa.Tensor, or one of pyarrow's four sparse ones. pyarrow has no type hints.
Tensor: TypeAlias = Any
#: A NumPy array.
_Array: TypeAlias = Any

TENSOR_FORMATS = {
    pa.Tensor: TensorFormat.DENSE,
    pa.SparseCOOTensor: TensorFormat.COO,
    pa.SparseCSRMatrix: TensorFormat.CSR,
    pa.SparseCSCMatrix: TensorFormat.CSC,
    pa.SparseCSFTensor: TensorFormat.CSF,
}

_PREFIX_SIZE = 8  # bytes before the flatbuffer
_METADATA_VERSION = {pa.ipc.MetadataVersion.V4: 3, pa.ipc.MetadataVersion.V5: 4}  # MetadataVersion of Schema.fbs
_MAX_EXPANDED = 1 << 28  # bytes
_MAX_ORDERED = 8  # dimensions; all orders are tried, 8! = 40,320


@contextmanager
def tensor_errors() -> Iterator[None]:
    """Turn errors of a message that holds no valid tensor into FormatError."""
    try:
        yield
    except RemoteProtocolError:  # its text is about a peer
        raise FormatError("the bytes are not an Arrow IPC message, or are damaged") from None
    except pa.ArrowException as error:
        raise FormatError(f"libarrow rejects this tensor: {error}") from None


def split_tensor(tensor: Tensor, options: WriteOptions | None = None) -> SplitMessage:
    """Return the message of `tensor`, whose body is borrowed from the tensor.

    Each buffer is aligned to 64 bytes in the body. The header is padded so that the body is aligned if the encapsulated
    message is.

    Raises:
        OptionError: The options have a codec.
        FormatError: The tensor could not be read back: libarrow accepts some sparse tensors with indices out of range.
    """
    options = check_options(options, WriteOptions)
    if options.codec is not None:
        raise OptionError("tensors cannot be compressed in Arrow IPC: give no codec")
    header, arrays = _disassemble(tensor)
    parts: list[Buffer] = []
    offsets, end = [], 0
    for array in arrays:
        padding = -end % ALIGNMENT
        offsets.append(end + padding)
        parts += [bytes(padding), pa.py_buffer(array.reshape(-1).view(np.uint8))]
        end = offsets[-1] + array.nbytes
    if header.format is not TensorFormat.DENSE:
        parts.append(bytes(-end % 8))
        end += -end % 8
    header = header._replace(offsets=(*offsets,), lengths=tuple(array.nbytes for array in arrays))
    encoded = encode_tensor(header, end, _METADATA_VERSION[options.metadata_version])
    encoded += bytes(-(len(encoded) + _PREFIX_SIZE) % ALIGNMENT)
    try:
        join_tensor(encoded, arrays)
    except FormatError as error:
        raise FormatError(f"this tensor cannot be written as Arrow IPC: {error}") from None
    return SplitMessage(encoded, parse_header(encoded), [part for part in parts if len(part)])


def slice_buffers(header: bytes, parsed: Header, body: Buffer) -> list[pa.Buffer]:
    """Return the buffers of a message from its packed body. Raises FormatError if one leaves the body."""
    whole = body if isinstance(body, pa.Buffer) else pa.py_buffer(body)
    buffers = []
    for offset, length in zip(*buffer_extents(header, parsed), strict=True):
        if offset < 0 or length < 0 or offset + length > whole.size:
            raise FormatError(f"a buffer at {offset} of {length} bytes extends beyond its body of {whole.size} bytes")
        buffers.append(whole.slice(offset, length))
    return buffers


def join_tensor(header: bytes, buffers: Sequence[Buffer]) -> Tensor:
    """Return the tensor of this flatbuffer, whose arrays use `buffers`, one for each `Buffer` of the message.

    The index of a sparse tensor is read and checked, because libarrow writes wherever it points. Raises FormatError.
    """
    tensor = parse_tensor(header)
    names = tensor.names if any(tensor.names) else None
    with tensor_errors():
        if tensor.format is TensorFormat.DENSE:
            return pa.Tensor.from_numpy(_array(buffers[0], tensor.type, tensor.shape, tensor.strides), names)
        *index, data = buffers
        values = _array(data, tensor.type, (tensor.non_zero,))
        if tensor.format is TensorFormat.COO:
            return pa.SparseCOOTensor.from_numpy(values, _coordinates(tensor, index[0]), tensor.shape, names)
        indptr, indices = _levels(tensor, index)
        if tensor.format is TensorFormat.CSF:
            return pa.SparseCSFTensor.from_numpy(values, indptr, indices, tensor.shape, tensor.axis_order, names)
        matrix = pa.SparseCSRMatrix if tensor.format is TensorFormat.CSR else pa.SparseCSCMatrix
        return matrix.from_numpy(values, indptr[0], indices[0], tensor.shape, names)


def _coordinates(tensor: TensorHeader, buffer: Buffer) -> _Array:
    shape = (tensor.non_zero, len(tensor.shape))
    coordinates = _array(buffer, tensor.indices_type, shape, tensor.strides)
    for axis, size in enumerate(tensor.shape):
        _check_indices(coordinates[:, axis], size)
    expected_strides = row_major(shape, "<i8")
    if coordinates.dtype == np.int64 and coordinates.strides == expected_strides:
        return coordinates
    # NumPy's own strides of what is empty, or has one row, are not always what libarrow calls contiguous.
    return np.ndarray(shape, "<i8", np.array(coordinates, "<i8", order="C"), 0, expected_strides)


def _levels(tensor: TensorHeader, buffers: Sequence[Buffer]) -> tuple[list[_Array], list[_Array]]:
    """Return the indptr and the indices of CSR, CSC and CSF."""
    shape, types = tensor.shape, (tensor.indptr_type, tensor.indices_type)
    if tensor.format is TensorFormat.CSF:
        axes = tensor.axis_order
        counts = [length // value_width(types[1]) for length in tensor.lengths[len(axes) - 1 : -1]]
        indices = [_array(buffers[len(axes) - 1 + level], types[1], (count,)) for level, count in enumerate(counts)]
        _check_indices(indices[0], shape[axes[0]])
        above, below = counts[:-1], indices[1:]
    else:
        axes = (0, 1) if tensor.format is TensorFormat.CSR else (1, 0)
        indices = below = [_array(buffers[1], types[1], (tensor.non_zero,))]
        above = [shape[axes[0]]]
    indptr = [_array(buffers[level], types[0], (count + 1,)) for level, count in enumerate(above)]
    for begins, level_indices, axis in zip(indptr, below, axes[1:], strict=True):
        _check_begins(begins, len(level_indices))
        _check_indices(level_indices, shape[axis])
    return indptr, indices


def _array(buffer: Buffer, type_: str, shape: tuple[int, ...], strides: tuple[int, ...] | None = None) -> _Array:
    """Return the array in this buffer, which must be long enough. A misaligned array is copied."""
    if 0 in shape:
        strides = row_major(shape, type_)
    return np.require(np.ndarray(shape, type_, buffer, 0, strides), requirements="A")


def _check_indices(indices: _Array, size: int) -> None:
    if len(indices) and (indices.min() < 0 or indices.max() >= size):
        raise FormatError(f"the sparse tensor has an index outside a dimension of {size}")


def _check_begins(begins: _Array, end: int) -> None:
    if begins[0] != 0 or begins[-1] != end or (begins[1:] < begins[:-1]).any():
        raise FormatError("the sparse tensor has rows or fibers that are not in order")


def _disassemble(tensor: Tensor) -> tuple[TensorHeader, list[_Array]]:
    """Return the description of `tensor` in its message, without buffers, and the arrays of the buffers."""
    format_ = TENSOR_FORMATS.get(type(tensor))
    if format_ is None:
        raise FormatError(
            f"a {type(tensor).__name__} is not a tensor: give a pyarrow.Tensor or a sparse tensor of pyarrow"
        )
    shape = tensor.shape
    names = (*tensor.dim_names, *[""] * len(shape))[: len(shape)]
    if format_ is TensorFormat.DENSE:
        array = tensor.to_numpy()
        if not (array.flags.c_contiguous or array.flags.f_contiguous):
            array = np.ascontiguousarray(array)
        strides = array.strides if array.size else row_major(shape, _type(array))
        header = TensorHeader(format_, _type(array), shape, names, (), (), strides)
        return header, [array if array.flags.c_contiguous else array.T]
    values, *index = tensor.to_numpy()
    header = TensorHeader(format_, _type(values), shape, names, (), (), (), len(values))
    if format_ is TensorFormat.COO:
        (coordinates,) = index
        coordinates = np.ascontiguousarray(coordinates)
        strides = row_major(coordinates.shape, "<i8")
        return header._replace(strides=strides, canonical=tensor.has_canonical_format), [coordinates, values]
    if format_ is TensorFormat.CSF:
        indptr, indices = index
        order = _axis_order(tensor, values, indptr, indices)
        return header._replace(axis_order=order), [*map(np.ascontiguousarray, chain(indptr, indices)), values]
    return header, [*map(np.ascontiguousarray, index), values]


def _type(array: _Array) -> str:
    return array.dtype.str.replace("|", "<")  # type: ignore[no-any-return]  # NumPy's arrays are Any here


def _axis_order(tensor: Tensor, values: _Array, indptr: list[_Array], indices: list[_Array]) -> tuple[int, ...]:
    """Find the dimension of each level of a CSF tensor by comparing values: pyarrow does not expose it."""
    shape = tensor.shape
    if len(shape) > _MAX_ORDERED:
        raise FormatError(
            f"a CSF tensor of {len(shape)} dimensions cannot be written; at most {_MAX_ORDERED} dimensions can: "
            "convert the tensor to COO"
        )

    def same(order: tuple[int, ...]) -> bool:
        candidate = pa.SparseCSFTensor.from_numpy(values, indptr, indices, shape, order, tensor.dim_names)
        if not nan:
            return bool(candidate.equals(tensor))
        return bool(candidate.to_tensor().to_numpy().tobytes() == expanded)

    nan = bool(values.dtype.kind == "f" and np.isnan(values).any())  # NaN equals no value
    if nan:
        if math.prod(shape) * values.itemsize > _MAX_EXPANDED:
            raise FormatError(
                "a large CSF tensor with NaN among its values cannot be written: convert the tensor to COO"
            )
        expanded = tensor.to_tensor().to_numpy().tobytes()
    dense_order = tuple(sorted(range(len(shape)), key=lambda axis: shape[axis]))  # libarrow's order for dense tensors
    fitting_axes = [
        [axis for axis in range(len(shape)) if not len(level) or int(level.max()) < shape[axis]] for level in indices
    ]
    for order in chain([dense_order], permutations(range(len(shape)))):
        if all(axis in some for axis, some in zip(order, fitting_axes, strict=True)) and same(order):
            return order
    raise FormatError("a CSF tensor whose indices exceed its shape cannot be written")
