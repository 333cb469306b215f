"""Transports by URI scheme. Third parties add theirs as entry points in the group `dissociated.transports`."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points

from dissociated.base.once import once
from dissociated.errors import UriError
from dissociated.transport.base import Transport

_BUILT_IN = {
    "fabric": "dissociated.transport.native.fabric.transport:FabricTransport",
    "inproc": "dissociated.transport.inproc:InprocTransport",
    "shm": "dissociated.transport.framed.shm:ShmTransport",
    "tcp": "dissociated.transport.framed.tcp:TcpTransport",
    "tls": "dissociated.transport.framed.tls:TlsTransport",
    "ucx": "dissociated.transport.native.ucx.transport:UcxTransport",
}


@once
def transport(scheme: str) -> Transport:
    """Return the transport for `scheme`, loaded on first use.

    Raises:
        UriError: No transport is registered for the scheme.
    """
    if scheme in _BUILT_IN:
        module, name = _BUILT_IN[scheme].split(":")
        built_in: Transport = getattr(import_module(module), name)()
        return built_in
    for entry in entry_points(group="dissociated.transports", name=scheme):
        loaded: Transport = entry.load()()
        return loaded
    raise UriError(f"no transport for {scheme}: here; there are {', '.join(sorted(schemes()))}")


@once
def schemes() -> frozenset[str]:
    """Return every scheme that has a transport."""
    return frozenset(_BUILT_IN) | {entry.name for entry in entry_points(group="dissociated.transports")}
