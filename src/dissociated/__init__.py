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
from dissociated._version import __version__ as __version__
from dissociated.catalog.locations import DatasetInfo
from dissociated.catalog.reader import Client, connect
from dissociated.client.open import open_stream, open_stream_async
from dissociated.client.tensors import open_tensors
from dissociated.codec.options import ReadOptions, WriteOptions
from dissociated.datasets.live import Live
from dissociated.errors import DatasetNotFound, DissociatedError
from dissociated.server.server import Server

__all__ = [
    "Client",
    "DatasetInfo",
    "DatasetNotFound",
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
