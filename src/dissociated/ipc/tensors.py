"""Tensors in files and streams: what pyarrow.ipc.write_tensor and read_tensor do.

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

_READ_SIZE = 1 << 24  # bytes that are read at once where it cannot be known how many follow


def write_tensor(tensor: Tensor, sink: Any, options: WriteOptions | None = None) -> int:
    """Write `tensor` as one message, and return how many bytes that took, the padding before it included.

    `sink` is a path, a pyarrow.NativeFile or a binary file; one that cannot tell its position is taken to
    stand at a multiple of 64. Of `options` count the metadata version and the legacy format. A dense tensor is
    written as it lies in memory if that is row-major or column-major, and row-major otherwise.

    Raises FormatError for what is no tensor that can be written, OptionError for a codec, StoreError where the sink
    takes no more.
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
    """The tensor whose message comes next in `source`: a path, a buffer, a pyarrow.NativeFile or a binary file.

    Where `source` stands between multiples of 64, padding is passed over. Afterwards it stands behind the body. The
    tensor's arrays lie in the buffer, in the mapped file (a path is mapped), or in what was read; only indices that
    are no 64-bit signed integers are converted to such, since pyarrow knows no others.

    Raises FormatError where there is no tensor, or one that is cut off or damaged, StoreError where the source cannot
    be read.
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
        raise FormatError("there is no tensor: the stream of messages ends here")
    header = bytes(_take(source, length))
    with tensor_errors():
        parsed = parse_header(header)
    if not parsed.is_tensor:
        raise FormatError(f"the message is a {parsed.type.name}, no tensor: read it as an Arrow IPC stream or file")
    return join_tensor(header, slice_buffers(header, parsed, _take(source, parsed.body_length)))


def _seekable(source: pa.NativeFile) -> bool:
    try:
        return source.tell() >= 0 and bool(source.seekable())
    except OSError:  # a pipe, which pyarrow takes for a file
        return False


def _skip_padding(source: pa.NativeFile) -> None:
    if not _seekable(source):
        return
    at = source.tell()
    padding = -at % ALIGNMENT
    if any(source.read(min(padding, 4))):  # a message, which libarrow puts anywhere
        source.seek(at)
    else:
        source.seek(min(at + padding, source.size()))


def _take(source: pa.NativeFile, size: int) -> pa.Buffer:
    """So many bytes, where they lie if that can be. Raises FormatError where there are fewer."""
    if _seekable(source):
        content = source.read_buffer(max(0, min(size, source.size() - source.tell())))
    else:
        read = bytearray()  # grows as bytes come, not as they are announced
        while len(read) < size and (piece := source.read(min(size - len(read), _READ_SIZE))):
            read += piece
        content = pa.py_buffer(read)
    if len(content) < size:
        raise FormatError(f"the tensor is cut off: {size} bytes should follow, and {len(content)} do")
    return content
