"""The node of this host for a catalog: found through the catalog, or started."""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shlex
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from dissociated.base.host import boot_id, host_name
from dissociated.client.client import Client
from dissociated.control.catalog_uri import is_unix
from dissociated.errors import CatalogError, CatalogUnreachable, DeadlineExceeded, NodeUnreachable, StoreError, UriError
from dissociated.node.launch import NodeAddress, default_store, ensure
from dissociated.store.layout import NODE_LOG
from dissociated.store.stage import StagePlace
from dissociated.uri import Uri

#: The environment variable with options of `dissociated node` for a node that is started on this host.
OPTIONS = "DISSOCIATED_NODE"

#: The end of the name of a store that `stage_here` makes for a catalog. The name begins as that of the default store.
STORE_SUFFIX = re.compile("-[0-9a-f]{12}")

_CATALOG_PORT = 8815
_START_TIMEOUT = 30.0  # seconds in which a started node must answer
#: The seconds after which a node ends that was started for a task, if it is empty and unused.
EMPTY_EXIT = 600.0


def stage_here(catalog: str, connect: Callable[[str], Client]) -> StagePlace:
    """Return the stage of a node on this host that belongs to `catalog`, and start a node if there is none.

    Any writable node of the current boot is suitable. Nodes with the same host name are tried first. A node is only
    started on a host that has none, or if an earlier call started the one that it has. A started node has a store in
    memory for this catalog alone, and listens at the address that this host uses towards the catalog. It continues when
    this process ends, and ends when its store has been empty and unused for a while. The variable DISSOCIATED_NODE has
    further options for it.

    Args:
        catalog: The URI of the catalog.
        connect: A function that opens a client for a URI.

    Raises:
        CatalogError: The catalog cannot be reached, or refuses the request.
        AccessDenied: The catalog refuses the caller.
        StoreError: No node can be started in time.
        NodeUnreachable: The node of this host does not answer, and it is not for callers to start it.
    """
    with connect(catalog) as client:
        nodes = [node for node in client.nodes() if node["boot_id"] == boot_id() and node.get("registered", True)]
    away = []
    for node in sorted(nodes, key=lambda node: bool(node["host"] != host_name())):
        try:
            if node["alive"] and (place := _stage(node["flight"], connect)) is not None:
                return place
        except (CatalogUnreachable, DeadlineExceeded):
            pass  # The node was killed, and the catalog has not noticed yet.
        else:
            if node["alive"]:
                continue  # The node belongs to another user, or to another container on this host.
        if node["host"] == host_name():
            away.append(node["flight"])
    if away and not _was_started_here(_store(catalog, _options())):
        raise NodeUnreachable(
            f"the node of this host, {host_name()}, does not answer at {away[0]}: start it; if it will not come "
            f"back, remove it from the catalog: dissociated forget {away[0]}"
        )
    address = _ensure_here(catalog)
    place = _stage(address.uri, connect)
    if place is None:
        raise StoreError(f"the node at {address.uri} was started on this host, and its store cannot be written")
    return place


def restart_here(catalog: str) -> bool:
    """Restart the node that `stage_here` once started on this host for `catalog`, if it has ended.

    Returns:
        False if no such node was ever started: its store is missing, or belongs to a node that is started otherwise.

    Raises:
        CatalogError, AccessDenied, StoreError: The node cannot be started. See `stage_here`.
    """
    if not _was_started_here(_store(catalog, _options())):
        return False
    _ensure_here(catalog)
    return True


def _ensure_here(catalog: str) -> NodeAddress:
    options = _options()
    address = "127.0.0.1" if is_unix(catalog) else _local_address(catalog)
    defaults = [f"--catalog={catalog}"]
    if not _option_value("--listen", options):
        defaults += ["--listen=shm:", f"--listen=tcp://{address}:0"]
    if not is_unix(catalog):
        defaults.append(f"--flight=grpc://{address}:0")
    return ensure(
        _store(catalog, options), empty_exit=EMPTY_EXIT, options=[*defaults, *options], timeout=_START_TIMEOUT
    )


def _was_started_here(store: Path) -> bool:
    """Return whether the node of a store was last started in the background, and not by a service."""
    return (store / NODE_LOG).exists()


def _options() -> list[str]:
    return shlex.split(os.environ.get(OPTIONS, ""))


def _stage(flight: str, connect: Callable[[str], Client]) -> StagePlace | None:
    """Return the stage of the node at `flight`; None if this process cannot write to it."""
    with connect(flight) as client:
        place = client.stage()
    return place if place.here else None


def _option_value(option: str, options: Sequence[str]) -> str | None:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(option, dest="value")
    value: str | None = parser.parse_known_args(options)[0].value
    return value


def _store(catalog: str, options: Sequence[str]) -> Path:
    """Return the path of a store for this catalog and this boot.

    A node belongs to one catalog, so each catalog needs a store of its own. The boot id differs
    between hosts, also if the variable DISSOCIATED_HOST makes one machine act as several hosts.
    """
    option = _option_value("--store", options)
    if option is not None:
        return Path(option)
    whose = hashlib.sha256(f"{catalog} {boot_id()}".encode()).hexdigest()[:12]
    store = default_store()
    return store.with_name(f"{store.name}-{whose}")


def _local_address(catalog: str) -> str:
    """Return the address that this host uses towards the catalog, in whose network the node may be reachable, too."""
    uri = Uri.parse(catalog)
    if not uri.host:
        raise UriError(f"{catalog!r} is not the URI of a catalog: give grpc://HOST:PORT")
    try:
        routes = socket.getaddrinfo(uri.host, uri.port or _CATALOG_PORT, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, address = routes[0]
        with socket.socket(family, kind, protocol) as sock:
            sock.connect(address)  # This selects a route, and sends nothing.
            own_address = str(sock.getsockname()[0])
    except OSError as error:
        raise CatalogError(f"the host {uri.host!r} of the catalog cannot be reached: {error.strerror}") from None
    return f"[{own_address}]" if ":" in own_address else own_address
