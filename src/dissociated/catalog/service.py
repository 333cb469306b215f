"""The catalog of one server, over Arrow Flight.

An ordinary Flight client can list, describe and, with DoGet, read every dataset. A client of this library takes
from the FlightInfo where the dataset can be had without Flight.

Actions, most for writers on the same host; their bodies and results are JSON:
    stage    {}                                          -> {directory, host, boot_id}
    commit   {name, segments, append, schema (base64)}   -> {}
    discard  {segments}                                  -> {}
    drop     {name}                                      -> {}
    status   {}                                          -> what `Server.status` says, as `ServerStatus.plain` does
"""

from __future__ import annotations

import base64
import json
import logging
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.flight as flight

from dissociated.access import Authorize
from dissociated.catalog.guard import protection
from dissociated.dataset import Dataset
from dissociated.errors import AccessDenied, DatasetNotFound, DissociatedError, TransportError, UriError
from dissociated.protocol.selection import parse_identifier
from dissociated.store.segment import Segment
from dissociated.store.stage import Stage, boot_id, host_name
from dissociated.uri import Uri

if TYPE_CHECKING:
    from dissociated.server import Server

#: "the client should re-use the connection that GetFlightInfo came over": for those who know only Flight.
REUSE_CONNECTION = "arrow-flight-reuse-connection://?"

_log = logging.getLogger(__name__)

_STOP_TIMEOUT = 5.0  # seconds
_MAX_REMEMBERED = 1024  # commits, so that one that is sent twice is done once


class CatalogService:
    """Serves the catalog of `server` at `uri`, on threads of gRPC's own. Raises TransportError if it cannot listen.

    `authorize` is asked about the bearer token of each call; `certificate` are the files of a certificate and its key.
    """

    def __init__(
        self,
        server: Server,
        uri: str,
        authorize: Authorize | None = None,
        certificate: tuple[str, str] | None = None,
    ) -> None:
        self._stage = Stage()
        _check_free(uri)  # gRPC would say it, and much else, on stderr
        try:
            self._flight = _Flight(server, self._stage, uri, **protection(uri, authorize, certificate))
        except (pa.ArrowException, OSError) as error:
            raise TransportError(f"the catalog cannot listen at {uri}: {error}") from None
        scheme, _, host = uri.partition("://")
        self.uri = f"{scheme}://{host.rpartition(':')[0] or host}:{self._flight.port}"
        # Not `serve`: gRPC answers already, and `serve` would take SIGINT and SIGTERM away from the program.

    def close(self) -> None:
        """Stop answering. Calls that run are waited for, but not for ever: a client may have stopped reading."""
        stopping = threading.Thread(target=self._flight.shutdown, name="catalog shutdown", daemon=True)
        stopping.start()
        stopping.join(_STOP_TIMEOUT)
        if stopping.is_alive():
            _log.warning("%s: a client still reads, or does not; its stream is left to end by itself", self.uri)
        else:
            self._stage.close()


def _check_free(uri: str) -> None:
    located = Uri.parse(uri)
    if located.scheme not in ("grpc", "grpc+tcp", "grpc+tls") or not located.host:
        raise UriError(f"{uri} is no place for a catalog: grpc://HOST:PORT, or grpc+tls://HOST:PORT")
    try:
        family = socket.AF_INET6 if ":" in located.host else socket.AF_INET
        socket.create_server((located.host, located.port or 0), family=family).close()
    except OSError as error:
        raise TransportError(f"the catalog cannot listen at {uri}: {error.strerror or error}") from None


def _timestamp(seconds: float | None) -> Any:
    return None if seconds is None else pa.scalar(round(seconds * 1000), pa.timestamp("ms", "UTC"))


@contextmanager
def _told_by_flight() -> Iterator[None]:
    """Turn our errors into those that Flight carries to the client: a KeyError arrives as "not found"."""
    try:
        yield
    except DatasetNotFound as error:
        raise KeyError(str(error)) from None
    except AccessDenied as error:
        raise flight.FlightUnauthorizedError(str(error)) from None
    except DissociatedError as error:
        raise flight.FlightServerError(str(error)) from None


class _Flight(flight.FlightServerBase):  # type: ignore[misc]  # pyarrow has no type hints
    def __init__(self, server: Server, stage: Stage, uri: str, **protection: Any) -> None:
        self._server = server
        self._stage = stage
        self._lock = threading.Lock()
        self._committed: OrderedDict[tuple[str, ...], None] = OrderedDict()
        self._actions: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
            "stage": (self._stage_action, "where writers on this host put segments"),
            "commit": (self._commit, "publish segments under a name, whole and at once"),
            "discard": (self._discard, "remove segments that will not be committed"),
            "drop": (self._drop, "make a dataset unavailable"),
            "status": (lambda body: self._server.status().plain(), "what there is, who reads it, what was sent"),
        }
        super().__init__(uri, **protection)

    # What Flight defines

    def list_flights(self, context: Any, criteria: bytes) -> Iterator[flight.FlightInfo]:
        for name in self._server.names():
            try:
                yield self._info(self._server.dataset(name))
            except DatasetNotFound:
                pass  # dropped since

    def get_flight_info(self, context: Any, descriptor: flight.FlightDescriptor) -> flight.FlightInfo:
        described = self._described(descriptor)
        if descriptor.descriptor_type == flight.DescriptorType.CMD:
            pair = self._server.reference_locations(described.name)
            if pair:
                endpoint = flight.FlightEndpoint(self._server.admit(described).data, pair)
                return flight.FlightInfo(described.schema, descriptor, [endpoint], -1, -1)
        return self._info(described)

    def get_schema(self, context: Any, descriptor: flight.FlightDescriptor) -> flight.SchemaResult:
        return flight.SchemaResult(self._described(descriptor).schema)

    def do_get(self, context: Any, ticket: flight.Ticket) -> flight.FlightDataStream:
        with _told_by_flight():
            plain, selection = parse_identifier(ticket.ticket)
            return flight.RecordBatchStream(self._server.open_reader(plain, selection))

    def list_actions(self, context: Any) -> list[tuple[str, str]]:
        return [(name, description) for name, (_, description) in self._actions.items()]

    def do_action(self, context: Any, action: flight.Action) -> list[bytes]:
        found = self._actions.get(action.type)
        if found is None:
            raise flight.FlightServerError(f"no action {action.type!r}; there are {', '.join(self._actions)}")
        with _told_by_flight():
            try:
                body = json.loads(action.body.to_pybytes() or b"{}")
                return [json.dumps(found[0](body)).encode()]
            except DissociatedError:
                raise
            except (ValueError, KeyError, TypeError) as error:
                raise flight.FlightServerError(f"the body of {action.type!r} is not what it takes: {error!r}") from None

    def _described(self, descriptor: flight.FlightDescriptor) -> Dataset:
        if descriptor.descriptor_type == flight.DescriptorType.PATH and len(descriptor.path) == 1:
            name = descriptor.path[0].decode(errors="replace")
        elif descriptor.descriptor_type == flight.DescriptorType.CMD:
            name = descriptor.command.decode(errors="replace")
        else:
            raise flight.FlightServerError("a dataset is described by a path of one part, or a command: its name")
        with _told_by_flight():
            return self._server.dataset(name)

    def _info(self, dataset: Dataset) -> flight.FlightInfo:
        locations = [*self._server.alternatives(dataset.name), REUSE_CONNECTION]
        ticket = self._server.admit(dataset)
        return flight.FlightInfo(
            dataset.schema,
            flight.FlightDescriptor.for_path(dataset.name),
            [flight.FlightEndpoint(ticket.data, locations, _timestamp(ticket.expires))],
            -1 if dataset.rows is None else dataset.rows,
            -1 if dataset.nbytes is None else dataset.nbytes,
            ordered=True,
            app_metadata=json.dumps({"host": host_name(), "boot_id": boot_id()}),
        )

    # Actions

    def _stage_action(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"directory": str(self._stage.directory), "host": host_name(), "boot_id": boot_id()}

    def _commit(self, body: dict[str, Any]) -> dict[str, Any]:
        name, names, append = str(body["name"]), [str(one) for one in body["segments"]], bool(body["append"])
        schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(body["schema"])))
        key = (name, *names)
        with self._lock:
            if names and key in self._committed:
                return {}
            segments = self._stage.take(names)
            if not segments:
                segments = [Segment.in_memory(name, schema.empty_table().to_reader())]
            self._server.publish_segments(name, segments, append=append)
            self._committed[key] = None
            while len(self._committed) > _MAX_REMEMBERED:
                self._committed.popitem(last=False)
        return {}

    def _discard(self, body: dict[str, Any]) -> dict[str, Any]:
        self._stage.discard([str(one) for one in body["segments"]])
        return {}

    def _drop(self, body: dict[str, Any]) -> dict[str, Any]:
        self._server.drop(str(body["name"]))
        return {}
