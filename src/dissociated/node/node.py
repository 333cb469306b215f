"""A node: a process that serves the versions in one store. A writer that needs a node starts it."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict
from pathlib import Path

from dissociated.base.buffers import MAX_METADATA
from dissociated.base.fork import ProcessBound
from dissociated.base.oserrors import store_errors
from dissociated.base.private import open_private_directory, write_private_file
from dissociated.catalog.database import Database
from dissociated.catalog.service import CatalogService
from dissociated.catalog.store_backend import StoreBackend
from dissociated.catalog.upstream import HEARTBEAT_INTERVAL
from dissociated.control.access import Security
from dissociated.control.catalog_uri import UNIX_SCHEME, is_unix, is_usable, socket_path, unix_uri
from dissociated.monitoring.status import ConsumerStatus
from dissociated.node.launch import ADDRESS_FILE, STOPPING_FILE, NodeAddress
from dissociated.server.options import ServerOptions
from dissociated.server.server import Server
from dissociated.store.handover import HandoverListener
from dissociated.store.store import Store
from dissociated.transport.framed.shm import runtime_directory

_log = logging.getLogger(__name__)

#: The number of seconds for which a ticket stays valid after its version was replaced.
RETAIN = 300.0
_SHM_SOCKET = "shm.sock"
_MEMFD_SOCKET = "memfd.sock"
_FLIGHT_SOCKET = "flight.sock"
_STAGE_GRACE = 2.0  # seconds between the answer to a writer and its first file
_PATH_MAX = 107  # bytes in the path of a Unix socket
_STATE_FIELD, _CONNECTED = 5, b"03"  # of a socket in /proc/net/unix


class Node(ProcessBound):
    """A server for the versions in a store, with a catalog.

    Use it as a context manager, or `close` it. Clients that find the store also find the node, since its address is in
    a file of the store.

    Times are in seconds, sizes in bytes.

    Args:
        store: The store, which the node owns.
        listen: The URIs at which the node serves datasets.
        flight: The URI of the node's catalog. By default the catalog listens at a Unix socket in the store
            (`grpc+unix:`), which only this user can reach. If the node belongs to a `catalog` that has no Unix socket
            itself, the default is the loopback interface, so that the catalog can reach the node.
        catalog: The URI of the upstream catalog that the node belongs to; None for a node with its own database.
        database: The path of the database, or `:memory:`; not used with `catalog`.
        retain: See `CatalogService`.
        heartbeat_interval: See `CatalogService`.
        advertise: See `ServerOptions`.
        security: The access rules for clients, and the credentials of this process: see `security` of
            `dissociated.control.access`. A node and its upstream catalog need the same secret, and must trust each
            other's certificates.
        metrics: See `ServerOptions`.
        http: See `ServerOptions`.
        lease_timeout: See `ServerOptions`.
        max_metadata: See `ServerOptions`.

    Raises:
        StoreError: The store cannot be used.
        TransportError: The node cannot listen.
        CatalogError: The database cannot be used.
        AccessDenied: The upstream catalog refuses the node.
        OptionError: An argument is invalid.
    """

    def __init__(
        self,
        store: Store,
        listen: Sequence[str] = ("shm:", "tcp://127.0.0.1:0"),
        *,
        flight: str | None = None,
        catalog: str | None = None,
        database: str = ":memory:",
        retain: float = RETAIN,
        heartbeat_interval: float = HEARTBEAT_INTERVAL,
        advertise: str | None = None,
        security: Security | None = None,
        metrics: str | None = None,
        http: str | None = None,
        lease_timeout: float = ServerOptions.lease_timeout,
        max_metadata: int = MAX_METADATA,
    ) -> None:
        self.store = store
        with ExitStack() as undo:
            undo.callback(store.close)
            options = ServerOptions(
                [self._listen_uri(uri) for uri in listen],
                catalog=None,
                advertise=advertise,
                metrics=metrics,
                http=http,
                lease_timeout=lease_timeout,
                max_metadata=max_metadata,
            )
            self.server = undo.enter_context(Server.of(options, security))
            backend = StoreBackend(store, self.server.registry)
            self._handover = undo.enter_context(
                closing(HandoverListener(self._socket(_MEMFD_SOCKET), backend.hand_over))
            )
            backend.handover = str(self._handover.path)
            self.service = CatalogService(
                self._flight_uri(flight or _default_flight(catalog)),
                self.server.holdings(backend),
                database=Database(database) if catalog is None else None,
                upstream=catalog,
                retain=retain,
                heartbeat_interval=heartbeat_interval,
                advertise=advertise,
                security=security,
            )
            self.server.use_catalog(self.service)
            self._closed = False
            with store_errors(f"the store {store.directory}"):
                self._tell_address()
            undo.pop_all()
        self.bind_to_process()

    def _tell_address(self) -> None:
        address = json.dumps(asdict(NodeAddress(self.service.uri, os.getpid())))
        write_private_file(self.store.directory / ADDRESS_FILE, address.encode())

    def _listen_uri(self, uri: str) -> str:
        return f"shm://{self._socket(_SHM_SOCKET)}" if uri == "shm:" else uri

    def _flight_uri(self, uri: str) -> str:
        return unix_uri(self._socket(_FLIGHT_SOCKET, is_usable)) if uri == f"{UNIX_SCHEME}:" else uri

    def _socket(self, name: str, fits: Callable[[Path], bool] = lambda path: True) -> Path:
        """Return the path of a socket in the store, or in the runtime directory if the first would be too long.

        The path is the same after a restart. A container that mounts the store has its sockets, too.
        """
        path = self.store.directory / "run" / name
        if len(os.fsencode(path)) > _PATH_MAX or not fits(path):
            return runtime_directory() / f"{self.store.id}.{name}"
        # The sockets have a directory of their own, since listeners lock the directory for a moment.
        with store_errors(f"the directory {path.parent}"):
            os.close(open_private_directory(path.parent, create=True))
        return path

    @property
    def uri(self) -> str:
        """The URI of the node's catalog: grpc+unix:///PATH.sock, or grpc://HOST:PORT."""
        return self.service.uri

    @property
    def idle(self) -> bool:
        """Whether no client receives data and no segment waits for its commit."""
        return not self.server.connections and not self.store.staged_names()

    @property
    def is_awaited(self) -> bool:
        """Whether a writer may be about to stage a segment."""
        return time.monotonic() - self.service.catalog.stage_asked_at < _STAGE_GRACE

    @property
    def empty(self) -> bool:
        """Whether the store has no version, and no writer is about to stage a segment."""
        return not self.is_awaited and not self.store.versions()

    @property
    def has_clients(self) -> bool:
        """Whether a client is connected to the catalog of this node. It is known for a catalog at a Unix socket only.

        The kernel lists the connections, with the path of the socket that has accepted them. gRPC does not.
        """
        if not is_unix(self.uri):
            return False
        path = os.fsencode(socket_path(self.uri))
        connections = (line.split(maxsplit=7) for line in Path("/proc/net/unix").read_bytes().splitlines())
        return any(fields[_STATE_FIELD] == _CONNECTED and fields[7:] == [path] for fields in connections)

    def retire(self) -> None:
        """Let the catalog of this node forget the node when it is closed, since it holds nothing."""
        self.service.catalog.retiring = True

    def drain(
        self, timeout: float, on_waiting: Callable[[Sequence[ConsumerStatus]], None] = lambda waited: None
    ) -> bool:
        """Accept no new connections, and wait for streams in progress. See `Server.drain`.

        Args:
            timeout: The maximum number of seconds to wait.
            on_waiting: A callback that receives the connections that the node is waiting for.

        Returns:
            Whether all streams ended in time.
        """
        self.check_process()
        with suppress(FileNotFoundError):
            (self.store.directory / ADDRESS_FILE).rename(self.store.directory / STOPPING_FILE)

        def log_and_tell(waited: Sequence[ConsumerStatus]) -> None:
            for consumer in waited:
                fields = {"connection": consumer.connection, "peer": consumer.peer, "dataset": consumer.dataset or "-"}
                _log.info("stopping: stream in progress", extra=fields)
            on_waiting(waited)

        is_drained = self.server.drain(timeout, log_and_tell)
        if not is_drained:
            _log.warning("stopping: streams in progress cut off: timeout=%g", timeout)
        return is_drained

    def close(self) -> None:
        """End every stream. Committed versions stay in the store."""
        if self.is_inherited:
            return
        if self._closed:
            return  # The address file may belong to another node by now.
        self._closed = True
        for file in (ADDRESS_FILE, STOPPING_FILE):
            (self.store.directory / file).unlink(missing_ok=True)
        self._handover.close()
        self.server.close()

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _default_flight(catalog: str | None) -> str:
    """Return the default URI of a node's catalog: private, unless an upstream at `catalog` must reach it."""
    return f"{UNIX_SCHEME}:" if catalog is None or is_unix(catalog) else "grpc://127.0.0.1:0"
