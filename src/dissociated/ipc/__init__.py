"""Arrow IPC files and streams: the readers, writers and decoders of the C++ API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dissociated.codec.options import ReadOptions, WriteOptions
from dissociated.codec.reader import StreamReader
from dissociated.codec.writer import (
    DissociatedWriter,
    FileWriter,
    ReadStats,
    RecordBatchWriter,
    StreamWriter,
    WriteStats,
)
from dissociated.ipc.decoder import DissociatedDecoder, StreamDecoder
from dissociated.ipc.decoding import CollectListener, Listener
from dissociated.ipc.files import FileReader, open_file, open_stream
from dissociated.ipc.tensors import read_tensor, write_tensor

if TYPE_CHECKING:
    from dissociated.ipc.asynchronous import (
        AsyncFileReader,
        AsyncStreamReader,
        async_batches,
        open_async,
        open_either_async,
    )
    from dissociated.ipc.readahead import AsyncBatches

__all__ = [
    "AsyncBatches",
    "AsyncFileReader",
    "AsyncStreamReader",
    "CollectListener",
    "DissociatedDecoder",
    "DissociatedWriter",
    "FileReader",
    "FileWriter",
    "Listener",
    "ReadOptions",
    "ReadStats",
    "RecordBatchWriter",
    "StreamDecoder",
    "StreamReader",
    "StreamWriter",
    "WriteOptions",
    "WriteStats",
    "async_batches",
    "open_async",
    "open_either_async",
    "open_file",
    "open_stream",
    "read_tensor",
    "write_tensor",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dissociated.ipc import asynchronous  # on first use: asyncio takes as long to import as all of this library

    return getattr(asynchronous, name)
