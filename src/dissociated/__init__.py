"""Move Apache Arrow data between processes, hosts and devices: the Arrow Dissociated IPC Protocol, whole.

import dissociated as dis

with dis.Server(["shm:", "tcp://127.0.0.1:0"]) as server:
    server.publish("flights", table)
    ...

with dis.connect(uri) as client:
    table = client.read("flights").read_all()
"""

from __future__ import annotations

from dissociated import errors
from dissociated.broadcast import Live
from dissociated.catalog.client import Client, DatasetInfo, connect
from dissociated.client import open_stream, open_stream_async
from dissociated.errors import DissociatedError
from dissociated.ipc.options import ReadOptions, WriteOptions
from dissociated.server import Server
from dissociated.tensor_client import open_tensors

__version__ = "0.1.0"

__all__ = [
    "Client",
    "DatasetInfo",
    "DissociatedError",
    "Live",
    "ReadOptions",
    "Server",
    "WriteOptions",
    "connect",
    "errors",
    "open_stream",
    "open_stream_async",
    "open_tensors",
]
