"""The catalog over Arrow Flight: what there is, and where it can be had.

An ordinary Flight client can list (ListFlights), describe (GetFlightInfo, GetSchema), read (DoGet) and publish
(DoPut) every dataset. A client of this library takes from the FlightInfo where it can be had without Flight.

A descriptor is a path of one part, the name; or a command: the name, or JSON:
    {"name": N, "version": V, "host": H, "boot_id": B}     V is one that was replaced; H and B say who asks
and for DoPut
    {"name": N, "mode": "overwrite" or "append", "tags": {...}, "ttl": seconds, "key": K, "end": true, "nbytes": B}
where "end" says that nothing is published unless the writer says the end: see `dissociated.control.flight_streams`; and
"nbytes" how much will come, so that room is made for all of it or not at all

ListFlights takes criteria, JSON too: {"prefix": P, "tags": {...}}.

Actions; their bodies and results are JSON, but for those that Flight defines:
    stage     {host, boot_id}           -> {directory, host, boot_id, node, flight, limited, inode, handover}
    reserve   {segment, size, wish}                  -> {size}
    commit    {name, segments, append, schema, key, tags, ttl}  -> {}
    discard   {segments}                             -> {}
    committed {key}                                  -> {committed}
    abort     {key}                                  -> {}
    drop      {name}                                 -> {}
    versions  {name}                                 -> {versions}
    nodes     {}                                     -> {nodes}
    status    {}                                     -> what `ServerStatus.plain` says
    RenewFlightEndpoint, CancelFlightInfo            as in Flight.proto
and between catalogs and nodes: prepare, over, register, heartbeat, leave. `dissociated.base.roles` has the role that
each of them needs if there are tokens or a secret.

A segment in `commit` is a name in the stage of this catalog's own node, or {node, segment}. One catalog knows many
nodes; one that is given an `upstream` is a node of that catalog, and answers with what that says.

Within, and in the database, a publication has an identifier. `Security.tickets` make of it what clients ask with, and
understand that again; without signatures the two are the same.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from secrets import token_hex

import pyarrow as pa

from dissociated.base.access import Security
from dissociated.base.fork import ProcessBound, leak, use_grpc
from dissociated.base.host import boot_id, host_name
from dissociated.catalog.base import Catalog
from dissociated.catalog.database import Database
from dissociated.catalog.flight import FlightServer
from dissociated.catalog.guard import server_options
from dissociated.catalog.holdings import Holdings
from dissociated.catalog.local import LocalCatalog
from dissociated.catalog.upstream import UpstreamCatalog
from dissociated.control.catalog_uri import UNIX_SCHEME, check_socket, describe_reach, is_unix, socket_path, unix_uri
from dissociated.control.records import NodeRecord
from dissociated.datasets.base import Dataset
from dissociated.errors import DissociatedError, TransportError, UriError
from dissociated.monitoring.status import ServerStatus
from dissociated.transport.framed.shm import runtime_directory
from dissociated.uri import ANY_INTERFACE, Uri

_log = logging.getLogger(__name__)

_STOP_TIMEOUT = 5.0  # seconds
_TICK_INTERVAL = 1.0  # seconds between looks at what is over
_SWEEP_TICKS = 10  # ticks between looks at what writers left behind
_ANY_INTERFACE = (*ANY_INTERFACE, "[::]")


class CatalogService(ProcessBound):
    """A catalog that answers over Arrow Flight at `uri`, on threads of gRPC's own.

    `holdings`, which it then owns, are what this process serves: that makes it a node. Left out, it is a catalog alone.
    What it knows is in `database`, which it owns too, and by default in memory. `retain` is for how many seconds a
    ticket that was given out stays good after its version has been replaced. With `upstream` it is a node of that
    catalog, which has both, and hears from it every `heartbeat_interval` seconds. `security` says who may call, and how
    this one proves itself to others.

    Raises TransportError if it cannot listen, UriError for what is no place, and AccessDenied where the upstream does
    not take it.
    """

    def __init__(
        self,
        uri: str,
        holdings: Holdings | None = None,
        *,
        database: Database | None = None,
        upstream: str | None = None,
        retain: float = 0.0,
        heartbeat_interval: float = 5.0,
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
            uri = _check_place(uri)  # gRPC would say it, and much else, on stderr
            try:
                self._flight = FlightServer(uri, **server_options(uri, security))
                undo.callback(self._flight.shutdown)
                undo.callback(self._flight.stop)  # else, calls that came early would wait, and shutdown for them
                if is_unix(uri):
                    os.chmod(socket_path(uri), 0o600)
            except (pa.ArrowException, OSError) as error:
                raise TransportError(f"the catalog cannot listen at {uri}: {error}") from None
            self.uri = _advertised_uri(uri, self._flight.port, advertise)
            if (reach := describe_reach(uri, security)) is not None:
                _log.info("%s: %s", self.uri, reach)
            node = NodeRecord(
                holdings.backend.id, host_name(), boot_id(), self.uri, tuple(holdings.endpoints.base_locations())
            )
            self.catalog: Catalog = (
                LocalCatalog(node, holdings, security, database or Database(), retain)
                if upstream is None
                else UpstreamCatalog(node, holdings, security, upstream, heartbeat_interval)
            )
            self.catalog.start()
            undo.pop_all()
        self._flight.set_catalog(self.catalog)
        # Not `serve`: gRPC answers already, and `serve` would take SIGINT and SIGTERM away from the program.
        self._ticker = threading.Thread(target=self._tick, name="catalog", daemon=True)
        self._ticker.start()
        self.bind_to_process()

    def after_fork_in_child(self) -> None:
        """See `dissociated.base.fork`."""
        leak(self._flight)

    def record_publication(self, dataset: Dataset, ttl: float | None = None) -> None:
        """See `Catalog.record_publication`."""
        self.check_process()
        self.catalog.record_publication(dataset, ttl)

    def drop(self, name: str) -> None:
        """Make a dataset unavailable. Raises DatasetNotFound."""
        self.check_process()
        self.catalog.drop(name)

    def status(self) -> ServerStatus:
        """What is served here; of a catalog alone what there is, and who serves it."""
        self.check_process()
        return self.catalog.status()

    def _tick(self) -> None:
        ticks = 0
        last = time.monotonic()
        while not self._stopped.wait(min(_TICK_INTERVAL, self.catalog.reconcile_interval)):
            ticks += 1
            try:
                if time.monotonic() >= last + self.catalog.reconcile_interval:
                    last = time.monotonic()
                    self.catalog.reconcile()
                if ticks % _SWEEP_TICKS == 0:
                    self.catalog.holdings.backend.sweep()
            except DissociatedError as error:
                _log.warning("%s: %s", self.uri, error)
            except Exception:
                _log.exception("%s: what is over was not looked at", self.uri)

    def close(self) -> None:
        """Stop answering. Calls that run are waited for, but not for ever: a client may have stopped reading."""
        if self.is_inherited:
            return
        self._stopped.set()
        if self._ticker is not None:
            self._ticker.join(_STOP_TIMEOUT)
        self.catalog.close()
        stopping = threading.Thread(target=self._flight.shutdown, name="catalog shutdown", daemon=True)
        stopping.start()
        stopping.join(_STOP_TIMEOUT)
        if stopping.is_alive():
            _log.warning("%s: a client still reads, or does not; its stream is left to end by itself", self.uri)
            return
        self.catalog.release()


def _advertised_uri(uri: str, port: int, advertise: str | None) -> str:
    """Return where others reach the server that listens at `uri` on this `port`."""
    if is_unix(uri):
        return uri
    scheme, _, host = uri.partition("://")
    name = host.rpartition(":")[0] or host
    return f"{scheme}://{(advertise or host_name()) if name in _ANY_INTERFACE else name}:{port}"


def _check_place(uri: str) -> str:
    """Return `uri`, with a path if it is `grpc+unix:` alone. Raises UriError, and TransportError if it is in use."""
    located = Uri.parse(uri)
    if located.scheme == UNIX_SCHEME:
        path = Path(located.path) if located.path else runtime_directory() / f"{os.getpid()}-{token_hex(4)}.sock"
        check_socket(path)
        return unix_uri(path)
    if located.scheme not in ("grpc", "grpc+tcp", "grpc+tls") or not located.host:
        raise UriError(
            f"{uri} is no place for a catalog: grpc://HOST:PORT, grpc+tls://HOST:PORT, or grpc+unix:///PATH.sock"
        )
    try:
        family = socket.AF_INET6 if ":" in located.host else socket.AF_INET
        socket.create_server((located.host, located.port or 0), family=family).close()
    except OSError as error:
        raise TransportError(f"the catalog cannot listen at {uri}: {error.strerror or error}") from None
    return uri
