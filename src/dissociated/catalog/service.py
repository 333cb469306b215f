"""The catalog as a service over Arrow Flight.

An ordinary Flight client can list (ListFlights), describe (GetFlightInfo, GetSchema), read (DoGet) and publish (DoPut)
every dataset. A client of this library finds in the FlightInfo the locations that it can read without Flight.

A descriptor is a path with one part, the name of the dataset, or a command. A command is the name, or JSON:
    {"name": N, "version": V, "host": H, "boot_id": B, "embed": E}
V is an earlier version; H and B identify the caller's host. If the dataset has one part, in this process, and all its
rows fit into E bytes and into 64 KiB as an IPC stream, the stream follows in the endpoint's app_metadata, after the
JSON and a zero byte. So a small dataset is described and read by one call. For DoPut, a command is
    {"name": N, "mode": "overwrite" or "append", "exists": X, "tags": {...}, "ttl": seconds, "key": K, "end": true,
    "nbytes": B}
With "end", the stream is published only if it has an end marker: see `dissociated.control.flight_streams`. "nbytes" is
the expected size; room for all of it is made in advance, or the call fails.

The criteria of ListFlights are JSON too: {"prefix": P, "tags": {...}}.

The bodies and results of actions are JSON, except for the actions that Flight defines:
    stage     {host, boot_id}           -> {directory, host, boot_id, node, flight, limited, inode, handover}
    reserve   {segment, size, wish, appends}         -> {size}
    commit    {name, segments, append, schema, key, tags, ttl, exists}  -> {}
    discard   {segments}                             -> {}
    committed {key}                                  -> {committed}
    abort     {key}                                  -> {}
    drop      {name}                                 -> {}
    current   {names}                                -> {current: {name: {version, created, began}}}
    versions  {name}                                 -> {versions}
    nodes     {}                                     -> {nodes}
    forget    {node}                                 -> {}
    status    {}                                     -> the result of `ServerStatus.plain`
    RenewFlightEndpoint, CancelFlightInfo            messages of Flight.proto
Catalogs and nodes call each other with these actions:
    prepare   the commit of a node's own segments    -> the node's part of the version
    over      {keys}                                 -> {over: the keys that were committed or aborted}
    register  {node, parts, numbers, aside, serial, guarded, signs, digest, lives, now, unlisted}  -> a reply
    heartbeat {node, since, parts, gone, digest, lives, now, unlisted}            -> a reply
    leave     {node, retiring, gone}                 -> {}
    a reply   {known, now, wanted, unwanted}
"guarded" says whether the node requires tokens, and "signs" identifies the secret of its tickets. "lives" is the number
of seconds after which the node counts as away unless another message comes. "digest" identifies the state of the node
after this report, and "since" the report that it continues. "gone" are parts that the node has removed, or that end
with its process, and "aside" those that it could not read at its start. "unlisted" is the number of published versions
on the node of which no reply said what to do with them. Of the reported parts, "wanted" are those of published
versions, and "unwanted" those to delete.
`dissociated.control.roles` has the role that each action needs if the catalog checks tokens or a secret.

"appends" is the name of the dataset that the segment will be appended to, or missing.

A segment in `commit` is the name of a segment in the stage of this catalog's own node, or {node, segment}. If "exists"
is true or false, the dataset must exist, or must not exist, when the commit is made; else the commit fails. A catalog
can have many nodes. A catalog that is created with an `upstream` is a node of that catalog and forwards calls to it.

Inside the process and in the database, a part has an identifier. `Security.tickets` converts it to the ticket that
clients send, and back. Without signatures, ticket and identifier are equal.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from secrets import token_hex

import pyarrow as pa

from dissociated.base.fork import ProcessBound, leak, use_grpc
from dissociated.base.host import boot_id, host_name
from dissociated.catalog.base import Catalog
from dissociated.catalog.database import Database
from dissociated.catalog.flight import FlightServer
from dissociated.catalog.guard import server_options
from dissociated.catalog.holdings import Holdings
from dissociated.catalog.local import LocalCatalog
from dissociated.catalog.upstream import HEARTBEAT_INTERVAL, UpstreamCatalog
from dissociated.control.access import Security
from dissociated.control.catalog_uri import UNIX_SCHEME, check_socket, describe_reach, is_unix, socket_path, unix_uri
from dissociated.control.version import NodeRecord
from dissociated.errors import DissociatedError, TransportError, UriError
from dissociated.transport.framed.shm import runtime_directory
from dissociated.uri import ANY_INTERFACE, Uri

_log = logging.getLogger(__name__)

#: Seconds that the end of a thread may take.
STOP_TIMEOUT = 5.0
_TICK_INTERVAL = 1.0  # seconds between two ticks, which may reconcile
#: Ticks between two sweeps of the staging directory.
SWEEP_TICKS = 10
_ANY_INTERFACE = (*ANY_INTERFACE, "[::]")


class CatalogService(ProcessBound):
    """A catalog that answers over Arrow Flight at `uri`, on threads that gRPC owns.

    Args:
        uri: The URI to listen at.
        holdings: The datasets that this process serves, which makes it a node. The service owns them. If omitted, the
            catalog only knows the parts that its nodes hold.
        database: The database, which the service owns; by default in memory.
        upstream: The URI of a catalog that this process is a node of. That catalog has the database.
        retain: The number of seconds for which an issued ticket stays valid after its version was replaced.
        heartbeat_interval: The number of seconds between two heartbeats to the upstream.
        advertise: The host name to announce if the catalog listens on all interfaces; by default that of this host.
        security: The access rules for callers, and the credentials of this process.

    Raises:
        TransportError: The service cannot listen.
        UriError: A catalog cannot be served at such a URI.
        AccessDenied: The upstream refuses this node.
    """

    def __init__(
        self,
        uri: str,
        holdings: Holdings | None = None,
        *,
        database: Database | None = None,
        upstream: str | None = None,
        retain: float = 0.0,
        heartbeat_interval: float = HEARTBEAT_INTERVAL,
        advertise: str | None = None,
        security: Security | None = None,
    ) -> None:
        security = security or Security()
        holdings = holdings or Holdings.empty(security.tickets)
        self._stopped = threading.Event()
        self._ticker: threading.Thread | None = None
        with ExitStack() as undo:
            undo.callback(holdings.backend.close)
            if database is not None:
                undo.callback(database.close)
            use_grpc()
            located, advertised = Uri.parse(uri).split_advertised()
            # gRPC would report the errors found here, with much else, on stderr.
            uri = _check_place(str(located) if advertised.host else uri)
            self.uri = uri
            try:
                self._flight = FlightServer(uri, **server_options(uri, security))
                undo.callback(self._shut_down, undo.pop_all().close)
                # Otherwise early calls would wait for a catalog, and the shutdown for these calls.
                undo.callback(self._flight.stop)
                if is_unix(uri):
                    os.chmod(socket_path(uri), 0o600)
            except (pa.ArrowException, OSError) as error:
                raise TransportError(f"the catalog cannot listen at {uri}: {error}") from None
            self.uri = _advertised_uri(uri, self._flight.port, advertise)
            if advertised.host:
                self.uri = str(replace(advertised, port=advertised.port or self._flight.port))
            if (reach := describe_reach(uri, security)) is not None:
                _log.info("catalog is reachable: catalog=%s access=%r", self.uri, reach)
            node = NodeRecord(
                holdings.backend.id, host_name(), boot_id(), self.uri, tuple(holdings.endpoints.base_locations())
            )
            self.catalog: Catalog = (
                LocalCatalog(node, holdings, security, database or Database(), retain)
                if upstream is None
                else UpstreamCatalog(node, holdings, security, upstream, heartbeat_interval)
            )
            self.catalog.start()
            self._flight.set_catalog(self.catalog)
            self.catalog.join()  # The upstream calls this node back before it registers the node.
            undo.pop_all()
        # Do not call `serve`: gRPC answers already, and `serve` would take over SIGINT and SIGTERM from the program.
        self._ticker = threading.Thread(target=self._tick, name="catalog", daemon=True)
        self._ticker.start()
        self.bind_to_process()

    def after_fork_in_child(self) -> None:
        """Leave the gRPC server untouched. See `dissociated.base.fork`."""
        leak(self._flight)

    def _tick(self) -> None:
        ticks = 0
        last = time.monotonic()
        while not self._stopped.wait(min(_TICK_INTERVAL, self.catalog.reconcile_interval)):
            ticks += 1
            if time.monotonic() >= last + self.catalog.reconcile_interval:
                last = time.monotonic()
                self._attempt("reconcile", self.catalog.reconcile)
            if ticks % SWEEP_TICKS == 0:
                self._attempt("sweep", self.catalog.holdings.backend.sweep)

    def _attempt(self, step: str, function: Callable[[], None]) -> None:
        """Call `function` until the service is closed, and log its error. The step is repeated in any case."""
        if self._stopped.is_set():
            return
        try:
            function()
        except DissociatedError as error:
            if not self._stopped.is_set():  # else the step came too late, and the store may be closed
                _log.warning("periodic step failed: step=%s catalog=%s error=%s", step, self.uri, error)
        except Exception:
            _log.exception("periodic step failed: step=%s catalog=%s", step, self.uri)

    def close(self) -> None:
        """Stop answering. Calls in progress get a few seconds to end, since a client may have stopped reading."""
        if self.is_inherited:
            return
        self._stopped.set()
        if self._ticker is not None:
            self._ticker.join(STOP_TIMEOUT)
        self.catalog.close()
        self._shut_down(self.catalog.release)

    def _shut_down(self, release: Callable[[], None]) -> None:
        """Stop answering, and call `release` after the last call, which this method awaits for a few seconds only."""

        def wait_and_release() -> None:
            self._flight.shutdown()
            release()

        stopping = threading.Thread(target=wait_and_release, name="catalog shutdown", daemon=True)
        stopping.start()
        stopping.join(STOP_TIMEOUT)
        if stopping.is_alive():
            leak(self._flight)  # pyarrow would wait for the call again when this process exits.
            _log.warning("shutdown timed out, a client still has an open stream: catalog=%s", self.uri)


def _advertised_uri(uri: str, port: int, advertise: str | None) -> str:
    """Return the URI at which others reach the server that listens at `uri` on this `port`."""
    if is_unix(uri):
        return uri
    scheme, _, host = uri.partition("://")
    name = host.rpartition(":")[0] or host
    return f"{scheme}://{(advertise or host_name()) if name in _ANY_INTERFACE else name}:{port}"


def _check_place(uri: str) -> str:
    """Return `uri`, with a path added to a bare `grpc+unix:`.

    Raises:
        UriError: A catalog cannot be served at such a URI.
        TransportError: The address is in use or cannot be bound.
    """
    located = Uri.parse(uri)
    if located.scheme == UNIX_SCHEME:
        path = Path(located.path) if located.path else runtime_directory() / f"{os.getpid()}-{token_hex(4)}.sock"
        check_socket(path)
        return unix_uri(path)
    if located.scheme not in ("grpc", "grpc+tcp", "grpc+tls") or not located.host:
        raise UriError(
            f"a catalog cannot listen at {uri!r}: use grpc://HOST:PORT, grpc+tls://HOST:PORT or grpc+unix:///PATH.sock"
        )
    try:
        family = socket.AF_INET6 if ":" in located.host else socket.AF_INET
        socket.create_server((located.host, located.port or 0), family=family).close()
    except OSError as error:
        raise TransportError(f"the catalog cannot listen at {uri}: {error.strerror or error}") from None
    return uri
