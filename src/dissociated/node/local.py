"""The node of this host: found through its catalog, or started."""

from __future__ import annotations

import argparse
import hashlib
import os
import shlex
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from dissociated.base.host import boot_id, host_name
from dissociated.client.client import Client
from dissociated.control.catalog_uri import is_unix
from dissociated.control.stage import StagePlace
from dissociated.errors import CatalogError, CatalogUnreachable, DeadlineExceeded, StoreError, UriError
from dissociated.node.launch import NodeAddress, default_store, ensure
from dissociated.uri import Uri

#: What the command `dissociated node` is given where a node is started on this host.
OPTIONS = "DISSOCIATED_NODE"

_CATALOG_PORT = 8815


def stage_here(catalog: str, connect: Callable[[str], Client], timeout: float = 30.0) -> StagePlace:
    """The stage of a node on this host that belongs to `catalog`; where there is none, one is started.

    The nodes of this boot that can be written to will do, first those that give the same name to the host. One that is
    started has a store of its own for this catalog, in memory, and listens where this host faces the catalog; the
    variable DISSOCIATED_NODE has further options. It goes on when this process ends. Raises CatalogError and
    AccessDenied where the catalog refuses, StoreError where no node can be started within `timeout` seconds.
    """
    with connect(catalog) as client:
        nodes = [node for node in client.nodes() if node["alive"] and node["boot_id"] == boot_id()]
    for node in sorted(nodes, key=lambda node: bool(node["host"] != host_name())):
        place = _stage(node["flight"], connect)
        if place is not None:
            return place
    address = _ensure_here(catalog, timeout)
    place = _stage(address.uri, connect)
    if place is None:
        raise StoreError(f"the node {address.uri} was started on this host, and its store cannot be written to")
    return place


def restart_here(catalog: str, timeout: float = 30.0) -> bool:
    """Start the node again that `stage_here` has started here for `catalog`, if it has ended.

    False where there never was one: its store is not there. Raises as `stage_here`.
    """
    if not _store(catalog, _options()).exists():
        return False
    _ensure_here(catalog, timeout)
    return True


def _ensure_here(catalog: str, timeout: float) -> NodeAddress:
    options = _options()
    address = "127.0.0.1" if is_unix(catalog) else _local_address(catalog)
    return ensure(
        _store(catalog, options),
        catalog=catalog,
        listen=() if _option_value("--listen", options) else ("shm:", f"tcp://{address}:0"),
        flight=None if is_unix(catalog) else f"grpc://{address}:0",
        options=options,
        timeout=timeout,
    )


def _options() -> list[str]:
    return shlex.split(os.environ.get(OPTIONS, ""))


def _stage(flight: str, connect: Callable[[str], Client]) -> StagePlace | None:
    """The stage of the node that answers there, if one does and this process can write to it."""
    try:
        with connect(flight) as client:
            place = client.stage()
    except (CatalogUnreachable, DeadlineExceeded):
        return None  # it was killed, and the catalog has not noticed
    return place if place.here else None


def _option_value(option: str, options: Sequence[str]) -> str | None:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(option, dest="found")
    found: str | None = parser.parse_known_args(options)[0].found
    return found


def _store(catalog: str, options: Sequence[str]) -> Path:
    """One for each catalog, since a node belongs to one; and for each host, where one machine is several."""
    option = _option_value("--store", options)
    if option is not None:
        return Path(option)
    whose = hashlib.sha256(f"{catalog} {boot_id()}".encode()).hexdigest()[:12]
    store = default_store()
    return store.with_name(f"{store.name}-{whose}")


def _local_address(catalog: str) -> str:
    """The address that this host has towards the catalog: whoever reaches that may reach this."""
    uri = Uri.parse(catalog)
    if not uri.host:
        raise UriError(f"{catalog} is not the URI of a catalog: grpc://HOST:PORT")
    try:
        found = socket.getaddrinfo(uri.host, uri.port or _CATALOG_PORT, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as sock:
            sock.connect(address)  # sends nothing
            own_address = str(sock.getsockname()[0])
    except OSError as error:
        raise CatalogError(f"{uri.host}, where the catalog is, cannot be reached: {error.strerror}") from None
    return f"[{own_address}]" if ":" in own_address else own_address
