"""Move Apache Arrow data between processes, hosts and devices with the Arrow Dissociated IPC Protocol.

import dissociated as dis

with dis.Server(["shm:", "tcp://127.0.0.1:0"]) as server:
    server.publish("flights", table)
    ...

with dis.connect(uri) as client:
    table = client.read("flights").read_all()
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dissociated import errors
from dissociated.errors import DatasetNotFound, DissociatedError

if TYPE_CHECKING:
    from dissociated.client.client import Client
    from dissociated.client.uri_stream import (
        open_stream,
        open_stream_async,
        open_stream_on_device,
        open_stream_on_device_async,
        open_tensors,
    )
    from dissociated.codec.options import ReadOptions, WriteOptions
    from dissociated.control.commit import Commit
    from dissociated.control.dataset_info import DatasetInfo
    from dissociated.datasets.live import Live
    from dissociated.node.client import connect
    from dissociated.server.options import ServerOptions
    from dissociated.server.server import Server

    __version__: str
else:
    #: The module of each public name. It is imported on first use, because importing all takes half a second (pyarrow).
    _PLACES = {
        "Client": "client.client",
        "Commit": "control.commit",
        "DatasetInfo": "control.dataset_info",
        "Live": "datasets.live",
        "ReadOptions": "codec.options",
        "Server": "server.server",
        "ServerOptions": "server.options",
        "WriteOptions": "codec.options",
        "connect": "node.client",
        "open_stream": "client.uri_stream",
        "open_stream_async": "client.uri_stream",
        "open_stream_on_device": "client.uri_stream",
        "open_stream_on_device_async": "client.uri_stream",
        "open_tensors": "client.uri_stream",
    }

    def __getattr__(name: str) -> Any:
        """Return a public name, which is imported on first use, or a package within this one (PEP 562)."""
        if name == "__version__":
            return import_module("dissociated.base.version").package_version()
        place = f"{__name__}.{_PLACES.get(name, name)}"
        try:
            if name.startswith("_"):
                raise ModuleNotFoundError(name=place)
            value = import_module(place)
        except ModuleNotFoundError as error:
            if error.name != place:  # a dependency of the module is missing, not the module itself
                raise
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
        if name in _PLACES:
            value = globals()[name] = getattr(value, name)
        return value

    def __dir__() -> list[str]:
        return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


__all__ = [
    "Client",
    "Commit",
    "DatasetInfo",
    "DatasetNotFound",
    "DissociatedError",
    "Live",
    "ReadOptions",
    "Server",
    "ServerOptions",
    "WriteOptions",
    "connect",
    "errors",
    "open_stream",
    "open_stream_async",
    "open_stream_on_device",
    "open_stream_on_device_async",
    "open_tensors",
]
