"""Arrow IPC: libarrow on one side, plain (header, buffers) on the other."""

from __future__ import annotations

from dissociated.ipc.options import WriteOptions
from dissociated.ipc.stats import WriteStats
from dissociated.ipc.writer import DissociatedWriter, FileWriter, RecordBatchWriter, StreamWriter

__all__ = [
    "DissociatedWriter",
    "FileWriter",
    "RecordBatchWriter",
    "StreamWriter",
    "WriteOptions",
    "WriteStats",
]
