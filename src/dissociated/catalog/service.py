"""The catalog over Arrow Flight: what there is, and where it can be had.

An ordinary Flight client can list (ListFlights), describe (GetFlightInfo, GetSchema), read (DoGet) and publish
(DoPut) every dataset. A client of this library takes from the FlightInfo where it can be had without Flight.

A descriptor is a path of one part, the name; or a command: the name, or JSON:
    {"name": N, "version": V, "host": H, "boot_id": B}     V is one that was replaced; H and B say who asks
and for DoPut
    {"name": N, "mode": "overwrite" or "append", "tags": {...}, "ttl": seconds, "key": K, "end": true, "nbytes": B}
where "end" says that nothing is published unless the writer says the end: see `dissociated.catalog.chunks`; and
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
and between catalogs and nodes: prepare, over, register, heartbeat, leave. Where there are tokens or a secret, these
take a peer: whoever has the same secret.

A segment in `commit` is a name in the stage of this catalog's own node, or {node, segment}. One catalog knows many
nodes; one that is given an `outer` catalog is a node of that, and answers with what that says.

Within, and in the database, a publication has an identifier. `Security.tickets` make of it what clients ask with, and
understand that again; without signatures the two are the same.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa
import pyarrow.flight as flight

from dissociated.access import Granted, Security
from dissociated.catalog.backend import Prepared, Stock, StoreStock, Wanted, appendable
from dissociated.catalog.chunks import received, upload
from dissociated.catalog.client import CatalogClient
from dissociated.catalog.database import FOR_EVER, Announced, Database, Held, Node, Part, Record
from dissociated.catalog.flight import FlightServer
from dissociated.catalog.guard import protection
from dissociated.catalog.messages import (
    parse_announced,
    parse_node,
    parse_part,
    plain_announced,
    plain_node,
    plain_part,
)
from dissociated.catalog.publication import Publication
from dissociated.codec.batches import BatchReader
from dissociated.codec.split import Pair, Validator, batches
from dissociated.datasets.base import Dataset
from dissociated.datasets.streamed import LiveDataset
from dissociated.errors import (
    AccessDenied,
    CatalogError,
    DatasetNotFound,
    DeadlineExceeded,
    DissociatedError,
    TransportError,
    UriError,
)
from dissociated.fork import belongs, disown, keep, use_grpc
from dissociated.host import boot_id, directory_id, host_name
from dissociated.monitoring.changes import Change
from dissociated.monitoring.status import Activity, DatasetStatus, NodeStatus, ServerStatus, StoreStatus
from dissociated.protocol.request import parse_identifier
from dissociated.store.directory import Version
from dissociated.uri import ANY_INTERFACE, Uri

if TYPE_CHECKING:
    from dissociated.server.server import Server

#: "the client should re-use the connection that GetFlightInfo came over": for those who know only Flight.
REUSE_CONNECTION = "arrow-flight-reuse-connection://?"

T = TypeVar("T")

_log = logging.getLogger(__name__)

_STOP_TIMEOUT = 5.0  # seconds
_NODE_TIMEOUT = 60.0  # seconds, for another node to answer
_VERSION_TIMEOUT = 0.01  # seconds more, for each version that it is told of at once
_TICK = 1.0  # seconds between looks at what is over
_TIDY = 10  # ticks between looks at what writers left behind
_SAME_HOST = ("shm", "inproc")
_ANY_INTERFACE = (*ANY_INTERFACE, "[::]")


class CatalogService:
    """Serves a catalog at `uri`, on threads of gRPC's own. Raises TransportError if it cannot listen.

    `server` and `stock`, which it then owns, make this process a node; without them it is a catalog alone. What it
    knows is in `database`, which it owns too, and by default in memory. `retain` is for how many seconds a ticket that
    was given out stays good after its version has been replaced. `beat` is how many seconds there are between signs
    of life to the `outer` catalog. `security` says who may call, and how this one proves itself to others; a `server`
    checks the tickets that it signs.
    """

    def __init__(
        self,
        server: Server | None,
        uri: str,
        *,
        stock: Stock | None = None,
        database: Database | None = None,
        outer: str | None = None,
        retain: float = 0.0,
        beat: float = 5.0,
        advertise: str | None = None,
        security: Security | None = None,
    ) -> None:
        self.security = security or Security()
        self._tickets = self.security.tickets if server is None else server.tickets
        self._activity = Activity() if server is None else server.activity
        self._server = server
        self._stock = stock
        if stock is not None and server is not None:
            stock.max_metadata = server.max_metadata
        self.retain = retain
        self._beat = beat
        self._prepared: dict[str, Dataset] = {}  # what this node holds, by the ids of the parts
        self._lock = threading.Lock()
        self._publishing = threading.Lock()
        self._stopped = threading.Event()
        self._beating: threading.Thread | None = None
        self._telling = threading.Lock()  # the outer catalog, in the order in which it happened
        self._digest = ""
        self._told: int | None = None  # how much had changed in the store when the outer catalog was told of it
        self._life = secrets.token_hex(8)  # of this process: how much has changed counts from its start
        with ExitStack() as undo:
            if stock is not None:
                undo.callback(stock.close)
            self._database = database or Database()
            undo.callback(self._database.close)
            self._database.changed = self._activity.changes.add
            self._outer = undo.enter_context(_Outer(outer, self.security)) if outer else None
            use_grpc()
            _check_free(uri)  # gRPC would say it, and much else, on stderr
            try:
                self._flight = FlightServer(self, uri, **protection(uri, self.security))
            except (pa.ArrowException, OSError) as error:
                raise TransportError(f"the catalog cannot listen at {uri}: {error}") from None
            scheme, _, host = uri.partition("://")
            name = host.rpartition(":")[0] or host
            shown = (advertise or host_name()) if name in _ANY_INTERFACE else name
            self.uri = f"{scheme}://{shown}:{self._flight.port}"
            undo.callback(self._flight.shutdown)
            undo.callback(self._flight.ready.set)  # else, calls that came early would wait, and shutdown for them
            self.node = Node(
                id=stock.id if stock else secrets.token_hex(8),
                host=host_name(),
                boot_id=boot_id(),
                flight=self.uri,
                locations=tuple(server.listening()) if server else (),
            )
            if stock is not None:
                self._database.register(self.node, [], "", FOR_EVER, serial=-1)
            if isinstance(stock, StoreStock):
                self._serve_store(stock)
            if self._outer is not None:
                try:
                    self._heartbeat()
                except (CatalogError, DeadlineExceeded) as error:
                    _log.warning("%s: %s; it will be told later", self.uri, error)
            undo.pop_all()
        self._flight.ready.set()
        # Not `serve`: gRPC answers already, and `serve` would take SIGINT and SIGTERM away from the program.
        self._beating = threading.Thread(target=self._tick, name="catalog", daemon=True)
        self._beating.start()
        belongs(self)

    def forked(self) -> None:
        keep(self._flight)
        disown(self)

    def close(self) -> None:
        """Stop answering. Calls that run are waited for, but not for ever: a client may have stopped reading."""
        self._stopped.set()
        if self._beating is not None:
            self._beating.join(_STOP_TIMEOUT)
        with self._lock:
            self._prepared.clear()
        if self._outer is not None:
            try:
                self._outer.act("leave", {"node": self.node.id})
            except DissociatedError as error:
                _log.info("%s: %s", self.uri, error)
            self._outer.close()
        stopping = threading.Thread(target=self._flight.shutdown, name="catalog shutdown", daemon=True)
        stopping.start()
        stopping.join(_STOP_TIMEOUT)
        if stopping.is_alive():
            _log.warning("%s: a client still reads, or does not; its stream is left to end by itself", self.uri)
            return
        if self._stock is not None:
            self._stock.close()
        self._database.close()

    # What this node holds

    def _serve_store(self, stock: StoreStock) -> None:
        """Serve whatever is committed in the store, each version under the ticket that it always had."""
        stock.lost = self._lost
        stock.moved = self._moved
        stock.catch_up = self._catch_up
        versions = stock.versions()
        replaced = {version.name: version.created for version in versions}
        for version in versions:
            try:
                prepared = stock.of(version)
            except DissociatedError as error:
                _log.error("%s is in the store and cannot be served: %s", version.name, error)
                continue
            self._hold(prepared)
            if self._outer is None and version.whole and not version.prepared:
                self._database.publish(
                    version.name,
                    version.key,
                    _encoded(prepared.dataset.schema),
                    [self._part(prepared)],
                    tags=version.tags,
                    ttl=version.ttl,
                    created=version.created,
                    before=version.before,
                )
                if replaced[version.name] > version.created and replaced[version.name] + self.retain > time.time():
                    with suppress(DatasetNotFound):  # its time to live is over
                        self._database.find(version.name, promise=self.retain)
        self._release()

    def _hold(self, prepared: Prepared, named: bool = False) -> None:
        assert self._server is not None
        with self._lock:
            self._prepared[prepared.id] = prepared.dataset
        self._server.hold(prepared.dataset, named)

    def _part(self, prepared: Prepared, number: int = 0) -> Part:
        made = prepared.dataset
        return Part(prepared.id, self.node.id, made.ticket, made.rows, made.nbytes, number, prepared.serial)

    def published(self, made: Dataset) -> None:
        """The server has published this by itself."""
        part = Part(secrets.token_hex(8), self.node.id, made.ticket, made.rows, made.nbytes)
        with self._lock:
            self._prepared[part.id] = made
        self._database.publish(made.name, part.id, _encoded(made.schema), [part])
        self._release()

    def _lost(self, version: Version) -> None:
        """A version was evicted; or what was prepared and never published is gone."""
        self._forget([version.id])
        if not version.prepared:
            self._changed("evicted", version.id, version.name, version.rows, version.nbytes)
        self._database.released([version.id])

    def _changed(self, kind: str, id: str, name: str, rows: int | None, nbytes: int | None) -> None:
        """What the store did to a part, to make room."""
        number = self._database.version_of(id)
        change = Change(kind, name, number, rows, nbytes, "the store had to make room")
        self._activity.changes.add(change)

    def _moved(self, prepared: Prepared) -> None:
        """A version was spilled."""
        made = prepared.dataset
        self._changed("spilled", prepared.id, made.name, made.rows, made.nbytes)

    def _forget(self, ids: Sequence[str]) -> None:
        assert self._server is not None
        with self._lock:
            gone = [self._prepared.pop(id, None) for id in ids]
        for one in gone:
            if one is not None:
                self._server.let_go(one)

    def _release(self, unwanted: Sequence[str] | None = None) -> None:
        """Remove what no version has any more; with an outer catalog, only what that names."""
        if self._stock is None:
            return
        if unwanted is None:
            if self._outer is not None:
                return
            unwanted = self._database.unwanted(self.node.id, self._announced(self._unconfirmed()))
        if unwanted:
            self._forget(unwanted)
            self._stock.remove(unwanted)
            self._database.released(unwanted)

    def _announced(self, versions: Iterable[Version]) -> list[Announced]:
        """What is told of versions in the store."""
        if not isinstance(self._stock, StoreStock):
            return []
        found = []
        for version in versions:
            try:
                schema = _encoded(self._stock.of(version).dataset.schema)
            except DissociatedError as error:
                _log.warning("%s is in the store and cannot be read now: %s", version.name, error)
                schema = b""
            found.append(
                Announced(
                    Part(version.id, self.node.id, version.ticket, version.rows, version.nbytes, 0, version.number),
                    version.name,
                    version.key,
                    schema,
                    version.created,
                    version.prepared,
                    version.whole,
                    version.tags,
                    version.ttl,
                    version.before,
                )
            )
        return found

    # Time

    def _tick(self) -> None:
        ticks = 0
        beaten = time.monotonic()
        while not self._stopped.wait(min(_TICK, self._beat)):
            ticks += 1
            try:
                if self._outer is None or time.monotonic() >= beaten + self._beat:
                    beaten = time.monotonic()
                    self._catch_up()
                if ticks % _TIDY == 0 and self._stock is not None:
                    self._stock.tidy()
            except DissociatedError as error:
                _log.warning("%s: %s", self.uri, error)
            except Exception:
                _log.exception("%s: what is over was not looked at", self.uri)

    def _catch_up(self) -> None:
        """Learn what has been published, and let go of what is over."""
        if self._outer is None:
            self._release()
        else:
            self._heartbeat()
        self._clear()

    def _heartbeat(self) -> None:
        """Tell the outer catalog what has changed; or everything, where it knows this node otherwise or not at all."""
        assert self._outer is not None
        with self._telling:
            changes = self._changes()  # before it is looked at: what comes meanwhile is told once more
            news = self._news()
            if news is None or not self._tell(self._outer, "heartbeat", changes, **news):
                self._register(changes)

    def _register(self, changes: int) -> None:
        """Tell the outer catalog everything."""
        serial, versions = 0, []
        if isinstance(self._stock, StoreStock):
            serial, versions = self._stock.serial(), self._stock.versions()  # in this order: all were made before
        assert self._outer is not None
        with _Outer(self._outer.uri, self.security, _NODE_TIMEOUT + len(versions) * _VERSION_TIMEOUT) as patient:
            self._tell(
                patient,
                "register",
                changes,
                node=plain_node(self.node),
                parts=self._plain(versions),
                serial=serial,
                guarded=self.security.authorize is not None,
                signs=self._tickets.mark(),
            )

    def _tell(self, outer: _Outer, action: str, changes: int, **body: Any) -> bool:
        """Returns whether the outer catalog then knows what this node has. It says what has become of that, too."""
        digest = f"{self._life}:{changes}"
        told = outer.act(action, {**body, "digest": digest, "lives": 3 * self._beat})
        if not told.get("known", True):
            return False
        self._digest, self._told = digest, changes
        if self._stock is not None:
            self._stock.confirm(told.get("wanted", {}))
        self._release(told["unwanted"])
        return True

    def _news(self) -> dict[str, Any] | None:
        """What a heartbeat tells; None where everything must be told."""
        if self._told is None:
            return None
        body = {"node": self.node.id, "since": self._digest}
        if not isinstance(self._stock, StoreStock):
            return body
        changed = self._stock.changed(self._told)
        if changed is None:
            return None
        some = {id: self._stock.version(id) for id in changed}
        some |= {version.id: version for version in self._unconfirmed()}  # again, until it is known what became of them
        there = [version for version in some.values() if version is not None]
        return {**body, "parts": self._plain(there), "gone": [id for id, version in some.items() if version is None]}

    def _plain(self, versions: Iterable[Version]) -> list[dict[str, Any]]:
        return [plain_announced(one) for one in self._announced(versions)]

    def _changes(self) -> int:
        return self._stock.changes if isinstance(self._stock, StoreStock) else 0

    def _unconfirmed(self) -> list[Version]:
        return self._stock.unconfirmed() if isinstance(self._stock, StoreStock) else []

    # What clients ask; names

    def infos(self, criteria: Mapping[str, Any], asking: Mapping[str, Any]) -> Iterator[flight.FlightInfo]:
        """Every dataset that meets the criteria."""
        tags = {str(key): str(value) for key, value in dict(criteria.get("tags") or {}).items()}
        for record in self._database.datasets(str(criteria.get("prefix") or ""), tags):
            yield self.info(record, asking)

    def find(self, asked: Mapping[str, Any], promise: float = 0.0) -> Record:
        """The version that a descriptor speaks of. Raises DatasetNotFound."""
        version = asked.get("version")
        return self._database.find(asked["name"], None if version is None else int(version), promise)

    def info(self, record: Record, asking: Mapping[str, Any], expires: float | None = None) -> flight.FlightInfo:
        """What Flight says of a version."""
        about = {
            "host": host_name(),
            "boot_id": boot_id(),
            "version": record.version,
            "created": record.created,
            "expires": record.expires,
            "began": record.began,
            "tags": dict(record.tags),
        }
        return flight.FlightInfo(
            _decoded(record.schema),
            flight.FlightDescriptor.for_path(record.name),
            [self.endpoint(part, asking, _sooner(expires, record.expires)) for part in record.parts],
            -1 if record.rows is None else record.rows,
            -1 if record.nbytes is None else record.nbytes,
            ordered=True,
            app_metadata=json.dumps(about),
        )

    def reference_info(self, record: Record, descriptor: flight.FlightDescriptor) -> flight.FlightInfo | None:
        """What the C++ reference expects, whose command is a name; None where this server has no place for it."""
        mine = self._mine(record.parts[0].ticket) if len(record.parts) == 1 else None
        pair = [] if self._server is None or mine is None else self._server.reference_locations(mine)
        if mine is None or not pair:
            return None
        ticket = self._tickets.sign(Granted(mine.ticket), time.time())
        endpoint = flight.FlightEndpoint(ticket.data, pair)
        return flight.FlightInfo(_decoded(record.schema), descriptor, [endpoint], -1, -1)

    def endpoint(
        self,
        part: Held,
        asking: Mapping[str, Any],
        expires: float | None,
        columns: tuple[str, ...] | None = None,
    ) -> flight.FlightEndpoint:
        """One part, and where it can be had, the nearest to who asks first. Dead nodes are told, and left out."""
        host, boot = asking.get("host"), asking.get("boot_id")
        mine = self._mine(part.ticket)

        def distance(node: Node) -> int:
            return 0 if node.boot_id == boot else 1 if node.host == host else 2

        locations: list[str] = []
        for node in sorted(part.nodes, key=distance):
            if node.alive:
                near = boot is None or node.boot_id == boot
                offered = (
                    self._server.alternatives(mine)
                    if self._server is not None and mine is not None and node.id == self.node.id
                    else node.locations
                )
                locations += [one for one in offered if near or one.partition(":")[0] not in _SAME_HOST]
                if node.id != self.node.id:
                    locations.append(node.flight)
        if locations:
            locations.append(REUSE_CONNECTION)
        about = [
            {"id": node.id, "host": node.host, "boot_id": node.boot_id, "alive": node.alive} for node in part.nodes
        ]
        if isinstance(mine, LiveDataset):
            expires = None  # whoever asks again may get nothing, or another stream
        ticket = self._tickets.sign(Granted(part.ticket, columns), time.time())
        ends = [end for end in (expires, ticket.expires) if end is not None]
        return flight.FlightEndpoint(
            ticket.data,
            locations,
            None if not ends else pa.scalar(int(min(ends) * 1e6), pa.timestamp("us", "UTC")),
            json.dumps({"nodes": about, "rows": part.rows}),
        )

    def _mine(self, identifier: bytes) -> Dataset | None:
        if self._server is not None:
            try:
                return self._server.identified(identifier)
            except DatasetNotFound:
                pass
        return None

    def expiry(self) -> float | None:
        """When a ticket that is given out now ends at the soonest; None where nothing is promised."""
        return time.time() + self.retain if self.retain else None

    def open(self, ticket: bytes) -> pa.RecordBatchReader:
        """The stream of a ticket, from here or from the node that has it. Raises DatasetNotFound and AccessDenied."""
        identifier, _ = self._tickets.check(parse_identifier(ticket)[0], time.time())
        if self._server is not None and self._mine(identifier) is not None:
            return self._server.open_reader(ticket)
        if self._outer is not None:
            return self._outer.do_get(ticket)
        record, part = self._database.by_ticket(identifier)
        for node in part.nodes:
            if node.alive and node.id != self.node.id:
                reader = self._from_node(node, ticket)
                self._activity.flight()
                return reader
        silent = ", ".join(node.host for node in part.nodes)
        raise CatalogError(
            f"a part of {record.name!r} is on {silent}, which says nothing any more: is its node running?"
        )

    def _from_node(self, node: Node, ticket: bytes) -> pa.RecordBatchReader:
        client = _Outer(node.flight, self.security)
        reader = client.do_get(ticket)

        validator = Validator(reader.schema)

        def pairs() -> Iterator[Pair]:
            with client:
                for batch, metadata in batches(reader):
                    validator.check(batch, full=True)  # it may be another's mistake, and would end this process
                    yield batch, metadata

        return BatchReader(reader.schema, pairs())

    def renew(self, ticket: bytes) -> flight.FlightEndpoint:
        """The endpoint, good for longer. Raises DatasetNotFound where it is over, AccessDenied where it has expired."""
        if not self.retain and not self._tickets.mark():
            raise CatalogError("this catalog promises nothing of its tickets, so none can be renewed")
        identifier, columns = self._tickets.check(parse_identifier(ticket)[0], time.time())
        record, part = self._database.by_ticket(identifier, self.retain)
        return self.endpoint(part, {}, _sooner(self.expiry(), record.expires), columns)

    def drop(self, name: str) -> None:
        """Make a dataset unavailable. Raises DatasetNotFound."""
        if self._outer is not None:
            self._outer.drop(name)
            self._heartbeat()
        else:
            self._database.drop(name)
            self._release()

    # Publishing

    def commit(self, body: Mapping[str, Any]) -> None:
        """Publish segments, on whichever nodes they are, as one dataset, whole and at once."""
        asked = Publication.parse({**body, "mode": "append" if body["append"] else "overwrite"})
        name = asked.name
        segments = [
            (str(one["node"]), str(one["segment"])) if isinstance(one, dict) else (self._own(), str(one))
            for one in body["segments"]
        ]
        schema = _decoded(base64.b64decode(body["schema"]))
        key = str(body.get("key") or _key(name, segments))
        wanted = Wanted(name, key, [], schema, asked.mode == "append", tags=asked.tags, ttl=asked.ttl)
        if self._outer is not None:
            there = [{"node": node, "segment": segment} for node, segment in segments]
            there = there or [{"node": self.node.id, "segment": ""}]
            encoded = base64.b64encode(_encoded(schema)).decode()
            self._outer.act("commit", {**body, "key": key, "segments": there, "schema": encoded})
            self._clear([key])
            return
        on: dict[str, list[str]] = {}
        for node, segment in segments:
            on.setdefault(node, []).extend([segment] if segment else [])  # a node without one has no rows
        with self._publishing:
            if self._database.committed(key) is not None:
                self.discard(on.get(self.node.id, ()))
                return
            if self._database.over([key]):
                raise CatalogError(f"what was to be published as {name!r} has been aborted: write it again")
            if not on:
                on[self._own()] = []
            if [*on] == [self.node.id] and self._stock is not None and self._simple(wanted):
                self._commit_here(wanted, on[self.node.id])
            else:
                self._commit_there(wanted, on)
        self._release()
        self._clear([key])

    def _own(self) -> str:
        if self._stock is None:
            raise CatalogError("this catalog has no stage of its own: say which node each segment is on")
        return self.node.id

    def _simple(self, wanted: Wanted) -> bool:
        """Whether everything that the dataset will be is on this node, in one part."""
        if not wanted.append:
            return True
        try:
            record = self._database.find(wanted.name)
        except DatasetNotFound:
            return True
        return len(record.parts) == 1 and self._mine(record.parts[0].ticket) is not None

    def _commit_here(self, wanted: Wanted, staged: Sequence[str]) -> None:
        assert self._stock is not None
        wanted = replace(wanted, staged=staged)
        began: list[str] = []
        if wanted.append:
            try:
                record = self._database.find(wanted.name)
            except DatasetNotFound:
                pass
            else:
                before = appendable(wanted.name, self._mine(record.parts[0].ticket))
                began = [record.began]
                tags, ttl = record.more(wanted.tags, wanted.ttl)
                wanted = replace(wanted, before=before, tags=tags, ttl=ttl)
        prepared = self._stock.prepare(wanted)
        self._hold(prepared, named=True)
        schema = _encoded(prepared.dataset.schema)
        self._database.publish(
            wanted.name, wanted.key, schema, [self._part(prepared)], tags=wanted.tags, ttl=wanted.ttl, before=began
        )

    def _commit_there(self, wanted: Wanted, on: Mapping[str, Sequence[str]]) -> None:
        """Each node prepares its part; the catalog's transaction is the commit."""
        nodes = {node.id: node for node in self._database.nodes()}
        parts = []
        schemas = set()
        for number, (node, staged) in enumerate(on.items()):
            if node not in nodes:
                raise CatalogError(f"no node {node!r} has registered at this catalog")
            body = {
                "name": wanted.name,
                "key": wanted.key,
                "segments": [*staged],
                "schema": base64.b64encode(_encoded(wanted.schema)).decode(),
                "tags": dict(wanted.tags),
                "ttl": wanted.ttl,
            }
            if node == self.node.id:
                told = self.prepare(body)
            else:
                with _Outer(nodes[node].flight, self.security) as client:
                    told = client.act("prepare", body)
            parts.append(replace(parse_part(told["part"]), number=number))
            schemas.add(base64.b64decode(told["schema"]))
        if len(schemas) > 1:
            raise CatalogError(f"the segments of {wanted.name!r} do not have one schema on all nodes")
        self._database.publish(
            wanted.name, wanted.key, schemas.pop(), parts, append=wanted.append, tags=wanted.tags, ttl=wanted.ttl
        )
        if self._stock is not None:
            published = self._database.wanted(self.node.id, [part.id for part in parts if part.node == self.node.id])
            self._stock.confirm(published)
            self._database.settled(published)

    def prepare(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Make segments on this node ready to be published by a catalog."""
        if self._stock is None:
            raise CatalogError("this catalog holds no segments: ask one of its nodes")
        schema = _decoded(base64.b64decode(body["schema"]))
        prepared = self._stock.prepare(
            Wanted(
                str(body["name"]),
                str(body["key"]),
                [str(one) for one in body["segments"]],
                schema,
                whole=False,
                tags=body.get("tags") or {},
                ttl=body.get("ttl"),
            )
        )
        self._hold(prepared)
        encoded = base64.b64encode(_encoded(prepared.dataset.schema)).decode()
        return {"part": plain_part(self._part(prepared)), "schema": encoded}

    def put(self, asked: Mapping[str, Any], reader: Any, cancelled: Callable[[], bool]) -> dict[str, Any]:
        """Write a stream that a Flight client sends, and publish it unless it asks for that to wait.

        What breaks off, which `cancelled` tells or an end that is missing, leaves nothing.
        """
        Publication.parse(asked)  # before anything moves
        pairs = received(reader, cancelled, bool(asked.get("end")))
        if self._stock is None:
            return self._put_there(asked, reader.schema, pairs)
        segment = f"{secrets.token_hex(16)}.arrows"
        if isinstance(size := asked.get("nbytes"), int):
            self._stock.expect(asked["name"], size)
        with self._stock.writer(segment, reader.schema) as writer:
            for batch, metadata in pairs:
                writer.write_batch(batch, metadata)
        told = {"node": self.node.id, "segment": segment}
        if not asked.get("staged"):
            try:
                self._commit_put(asked, reader.schema, told)
            except BaseException:
                self.discard([segment])
                raise
        return {**told, "rows": writer.rows}

    def _put_there(self, asked: Mapping[str, Any], schema: pa.Schema, pairs: Iterator[Pair]) -> dict[str, Any]:
        node = self._some_node({})
        descriptor = flight.FlightDescriptor.for_command(json.dumps({**asked, "staged": True, "end": True}))
        with _Outer(node.flight, self.security) as there:
            answer = there.forwarded(lambda client: upload(client, descriptor, schema, pairs))
            try:
                self._commit_put(asked, schema, {"node": node.id, "segment": answer["segment"]})
            except BaseException:
                with suppress(DissociatedError):
                    there.discard([answer["segment"]])
                raise
        return answer

    def _commit_put(self, asked: Mapping[str, Any], schema: pa.Schema, segment: Mapping[str, str]) -> None:
        encoded = base64.b64encode(_encoded(schema)).decode()
        self.commit(
            {
                "name": asked["name"],
                "segments": [segment],
                "append": asked.get("mode") == "append",
                "schema": encoded,
                "key": asked.get("key"),
                "tags": asked.get("tags"),
                "ttl": asked.get("ttl"),
            }
        )

    def _some_node(self, asking: Mapping[str, Any]) -> Node:
        nodes = [node for node in self._database.nodes() if node.alive and node.flight != self.uri]
        for node in nodes:
            if node.boot_id == asking.get("boot_id"):
                return node
        if not nodes:
            raise CatalogError("no node has registered at this catalog: start one, dissociated node --catalog URI")
        return nodes[0]

    # What writers ask

    def stage(self, asking: Mapping[str, Any]) -> dict[str, Any]:
        """Where writers put segments: on the host that asks, if there is a node."""
        if self._stock is None:
            node = self._some_node(asking)
            with _Outer(node.flight, self.security) as client:
                return client.act("stage", dict(asking))
        directory = self._stock.directory
        return {
            "directory": str(directory),
            "host": host_name(),
            "boot_id": boot_id(),
            "node": self.node.id,
            "flight": self.uri,
            "limited": self._stock.limited,
            "inode": directory_id(directory),
            "handover": self._stock.handover,
        }

    def reserve(self, segment: str, size: int, wish: int) -> int:
        """Room for a segment in the stage."""
        if self._stock is None:
            raise CatalogError("this catalog has no stage of its own: ask the node that the segment is on")
        return self._stock.reserve(segment, size, wish)

    def discard(self, segments: Sequence[str]) -> None:
        """Remove segments from the stage."""
        if self._stock is not None:
            self._stock.discard(segments)

    def abort(self, key: str) -> None:
        """There shall be no commit with this key. One that is under way comes first."""
        if self._outer is not None:
            self._outer.abort(key)
        else:
            with self._publishing:
                self._database.abort(key)
            self._release()
        self._clear([key])

    def committed(self, key: str) -> bool:
        """Whether there was a commit with this key."""
        if self._outer is not None:
            return self._outer.committed(key)
        return self._database.committed(key) is not None

    def over(self, keys: Sequence[str]) -> list[str]:
        """Those of `keys` that were committed or aborted."""
        return self._database.over(keys)

    def _clear(self, over: Sequence[str] | None = None) -> None:
        """Remove from the stage what was written for commits that are `over`: have been, or will never be."""
        if self._stock is None:
            return
        staged = [name for name in self._stock.staged() if "-" in name]
        keys = sorted({_key_of(name) for name in staged})
        if keys and over is None:
            over = self.over(keys) if self._outer is None else self._outer.act("over", {"keys": keys})["over"]
        self._stock.discard(name for name in staged if _key_of(name) in (over or ()))

    # What nodes tell

    def register(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """A node tells everything."""
        node = parse_node(body["node"])
        if self.security.authorize is not None and not body.get("guarded"):
            raise AccessDenied("this catalog asks for tokens, and the node does not: give it authorize, a token file")
        if body.get("signs", "") != self._tickets.mark():
            raise AccessDenied(
                "this catalog and the node do not make the same tickets: give both the same secret and a "
                "ticket_lifetime, or neither"
            )
        announced = [parse_announced(one) for one in body["parts"]]
        until = time.time() + float(body["lives"])
        self._database.register(node, announced, str(body["digest"]), until, int(body["serial"]))
        return self._said(node.id, announced)

    def heartbeat(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """A node lives, and tells what has changed since the last time."""
        node, digest = str(body["node"]), str(body["digest"])
        announced = [parse_announced(one) for one in body.get("parts", ())]
        known = self._database.heard(
            node,
            digest,
            time.time() + float(body["lives"]),
            since=str(body.get("since", digest)),
            announced=announced,
            gone=[str(one) for one in body.get("gone", ())],
        )
        return {"known": known, **(self._said(node, announced) if known else {})}

    def _said(self, node: str, announced: Sequence[Announced]) -> dict[str, Any]:
        """What a node should know of what it has told: which of that is published, and what of all it may forget."""
        return {
            "wanted": self._database.wanted(node, [one.part.id for one in announced]),
            "unwanted": self._database.unwanted(node, announced),
        }

    def leave(self, node: str) -> None:
        """A node ends."""
        self._database.left(node)

    def nodes(self) -> list[dict[str, Any]]:
        """Every node."""
        if self._outer is not None:
            return [*self._outer.nodes()]
        return [{**plain_node(node), "alive": node.alive, "seen": node.seen} for node in self._database.nodes()]

    def status(self) -> ServerStatus:
        """What is served here; of a catalog alone what there is, and who serves it."""
        if self._server is not None:
            return self._server.status()
        datasets = tuple(
            DatasetStatus(one.name, one.rows, one.nbytes, 0, 0, 0, 0, 0) for one in self._database.datasets()
        )
        return replace(self._activity.status(self.uri, [], {}, self.node_status()), datasets=datasets)

    def node_status(self) -> list[NodeStatus]:
        """The nodes of this catalog, itself left out."""
        now = time.time()
        return [
            NodeStatus(node.host, node.flight, node.alive, max(0.0, now - node.seen))
            for node in self._database.nodes()
            if node.id != self.node.id
        ]

    def store_status(self) -> StoreStatus | None:
        """What the store of this node holds, if it has one."""
        usage = self._stock.usage() if isinstance(self._stock, StoreStock) else None
        return None if usage is None else StoreStatus(usage.total, usage.limit)

    def versions(self, name: str) -> list[dict[str, Any]]:
        """Every version of a dataset that can still be read."""
        return [
            {"version": one.version, "created": one.created, "rows": one.rows, "current": one.current}
            for one in self._database.versions(name)
        ]

    @property
    def outer(self) -> _Outer | None:
        """The catalog that this is a node of."""
        return self._outer


class _Outer(CatalogClient):
    """Another catalog, or a node of this one."""

    def __init__(self, uri: str, security: Security, timeout: float = _NODE_TIMEOUT) -> None:
        super().__init__(uri, timeout, security.peer, security.roots)

    def forwarded(self, call: Callable[[flight.FlightClient], T]) -> T:
        """What that one answers."""
        return self._call(lambda: call(self._client))

    def forward_action(self, action: str, body: bytes) -> bytes:
        """The answer to an action whose body is not JSON."""
        (result,) = self.forwarded(lambda client: [*client.do_action(flight.Action(action, body))])
        return bytes(result.body.to_pybytes())

    def __enter__(self) -> _Outer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _sooner(promised: float | None, expires: float | None) -> float | None:
    """When what is promised, if anything is, ends for a dataset that expires."""
    return promised if promised is None or expires is None else min(promised, expires)


def _encoded(schema: pa.Schema) -> bytes:
    return bytes(schema.serialize())


def _decoded(schema: bytes) -> pa.Schema:
    return pa.ipc.read_schema(pa.py_buffer(schema))


def _key_of(segment: str) -> str:
    """The key of the commit that a segment was written for, by its name."""
    return segment.partition("-")[0]


def _key(name: str, segments: Sequence[tuple[str, str]]) -> str:
    """A repeated call of a client that gives no key names the same segments, which nobody writes twice."""
    if not segments:
        return secrets.token_hex(16)
    return hashlib.sha256(json.dumps([name, segments]).encode()).hexdigest()


def _check_free(uri: str) -> None:
    located = Uri.parse(uri)
    if located.scheme not in ("grpc", "grpc+tcp", "grpc+tls") or not located.host:
        raise UriError(f"{uri} is no place for a catalog: grpc://HOST:PORT, or grpc+tls://HOST:PORT")
    try:
        family = socket.AF_INET6 if ":" in located.host else socket.AF_INET
        socket.create_server((located.host, located.port or 0), family=family).close()
    except OSError as error:
        raise TransportError(f"the catalog cannot listen at {uri}: {error.strerror or error}") from None
