"""Tensors in files and streams, in the format of pyarrow.ipc.write_tensor and pyarrow.ipc.read_tensor.

A standalone message begins at a multiple of 64 bytes, and so do its body and each buffer in it:

    zeros up to a multiple of 64, marker, length of the metadata, flatbuffer, zeros up to a multiple of 64, body
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from dissociated.base.oserrors import store_errors
from dissociated.codec.options import WriteOptions, check_options
from dissociated.codec.sink import open_sink
from dissociated.codec.tensor import Tensor, join_tensor, slice_buffers, split_tensor, tensor_errors
from dissociated.errors import FormatError
from dissociated.format.encapsulated import CONTINUATION, encapsulate
from dissociated.format.message import parse_header
from dissociated.format.tensor import ALIGNMENT
from dissociated.ipc.opening import sequential

_READ_SIZE = 1 << 24  # bytes of one read from a source of unknown length


def write_tensor(tensor: Tensor, sink: Any, options: WriteOptions | None = None) -> int:
    """Write a tensor as one message.

    A dense tensor is written in its memory layout if that is row-major or column-major, and in row-major order
    otherwise.

    Args:
        tensor: The tensor, dense or sparse.
        sink: A path, a pyarrow.NativeFile or a binary file. If a file has no position, it is assumed to be at a
            multiple of 64 bytes.
        options: Options of the IPC format, of which the metadata version and the legacy format apply.

    Returns:
        The number of bytes written, including the padding before the message.

    Raises:
        FormatError: The tensor cannot be written.
        OptionError: The options have a compression codec.
        StoreError: Writing to the sink failed.

    Example:
        ```python
        from dissociated import ipc

        with open("weights.tensor", "wb") as file:
            ipc.write_tensor(pa.Tensor.from_numpy(np.eye(3)), file)
        with open("weights.tensor", "rb") as file:
            assert ipc.read_tensor(file).shape == (3, 3)
        ```
    """
    options = check_options(options, WriteOptions)
    message = split_tensor(tensor, options)
    opened = open_sink(sink)
    head = encapsulate(message.header, alignment=ALIGNMENT, legacy=options.write_legacy_ipc_format)
    parts = [bytes(-opened.position % ALIGNMENT), head, *(message.body or ())]
    try:
        opened.write(parts)
    except BaseException:
        opened.abort()
        raise
    opened.close()
    return sum(map(len, parts))


def read_tensor(source: Any) -> Tensor:
    """Read the next message of a source as a tensor.

    The tensor refers to the memory of the buffer, of the mapped file, or of the bytes that were read, without a copy.
    Only indices that are not 64-bit signed integers are converted to such integers, since pyarrow has no others.

    Args:
        source: A path, which is mapped, a buffer, a pyarrow.NativeFile or a binary file. If its position is no multiple
            of 64 bytes, padding is skipped. Afterwards the position is the end of the body.

    Returns:
        The tensor, dense or sparse.

    Raises:
        FormatError: There is no tensor, or it is cut off or damaged.
        StoreError: The source cannot be read.
    """
    if not hasattr(source, "read"):
        source = sequential(source, memory_map=True, pool=None)
        if isinstance(source, pa.Buffer):
            source = pa.BufferReader(source)
    with store_errors(f"reading {source!r}"):
        return _next_tensor(source if isinstance(source, pa.NativeFile) else pa.PythonFile(source, "r"))


def _next_tensor(source: pa.NativeFile) -> Tensor:
    _skip_padding(source)
    start = bytes(_take(source, 4))
    length = int.from_bytes(bytes(_take(source, 4)) if start == CONTINUATION else start, "little", signed=True)
    if length <= 0:
        raise FormatError("the stream of messages has ended: no tensor follows")
    header = bytes(_take(source, length))
    with tensor_errors():
        parsed = parse_header(header)
    if not parsed.is_tensor:
        raise FormatError(
            f"the message is a {parsed.type.name} instead of a tensor: read it as an Arrow IPC stream or file"
        )
    return join_tensor(header, slice_buffers(header, parsed, _take(source, parsed.body_length)))


def _seekable(source: pa.NativeFile) -> bool:
    try:
        return source.tell() >= 0 and bool(source.seekable())
    except OSError:  # pyarrow treats a pipe as a file
        return False


def _skip_padding(source: pa.NativeFile) -> None:
    if not _seekable(source):
        return
    at = source.tell()
    padding = -at % ALIGNMENT
    if any(source.read(min(padding, 4))):  # no padding but a message: libarrow does not align messages
        source.seek(at)
    else:
        source.seek(min(at + padding, source.size()))


def _take(source: pa.NativeFile, size: int) -> pa.Buffer:
    """Return the next `size` bytes, without a copy if possible. Raises FormatError if there are fewer."""
    if _seekable(source):
        content = source.read_buffer(max(0, min(size, source.size() - source.tell())))
    else:
        read = bytearray()  # grows with the bytes that arrive, not with the announced size
        while len(read) < size and (piece := source.read(min(size - len(read), _READ_SIZE))):
            read += piece
        content = pa.py_buffer(read)
    if len(content) < size:
        raise FormatError(f"the tensor is cut off: {len(content)} of {size} bytes follow")
    return content
