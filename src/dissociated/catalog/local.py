"""The catalog that knows by itself, from its database, what there is and on which nodes."""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight

from dissociated.access import Security
from dissociated.catalog import schemas
from dissociated.catalog.backend import Prepared, Wanted, appendable
from dissociated.catalog.base import Catalog, commit_key
from dissociated.catalog.chunks import upload
from dissociated.catalog.database import FOR_EVER, Database
from dissociated.catalog.descriptors import described, first_field, parsed
from dissociated.catalog.holdings import Holdings
from dissociated.catalog.listing import Listing, sooner
from dissociated.catalog.messages import parse_announced, parse_node, parse_part, plain_node
from dissociated.catalog.peer import Peer
from dissociated.catalog.publication import Publication
from dissociated.catalog.records import Announced, Node, Part, Record
from dissociated.codec.batches import BatchReader
from dissociated.codec.split import Pair, Validator, batches
from dissociated.datasets.base import Dataset
from dissociated.errors import AccessDenied, CatalogError, DatasetNotFound, DissociatedError
from dissociated.monitoring.status import DatasetStatus, NodeStatus, ServerStatus
from dissociated.protocol.request import parse_identifier
from dissociated.store.directory import Version

_log = logging.getLogger(__name__)


class LocalCatalog(Catalog):
    """Keeps what it knows in `database`, which it then owns.

    `retain` is for how many seconds a ticket that was given out stays good after its version has been replaced.
    """

    def __init__(
        self, node: Node, holdings: Holdings, security: Security, database: Database, retain: float = 0.0
    ) -> None:
        super().__init__(node, holdings, security)
        self.retain = retain
        self._database = database
        self._database.changed = holdings.activity.changes.add
        self._publishing = threading.Lock()
        self._latest: dict[str, float] = {}  # while the store is read: when a name was published last
        self._listing = Listing(holdings)
        if self._backend.stages:
            self._database.register(node, [], "", FOR_EVER, serial=-1)

    # What there is

    def infos(self, criteria: bytes) -> Iterator[flight.FlightInfo]:
        asked = parsed(criteria, 'the criteria are JSON: {"prefix": "...", "tags": {...}}') if criteria else {}
        tags = {str(key): str(value) for key, value in dict(asked.get("tags") or {}).items()}
        for record in self._database.datasets(str(asked.get("prefix") or ""), tags):
            yield self._listing.info(record, asked)

    def info(self, descriptor: flight.FlightDescriptor) -> flight.FlightInfo:
        asked = described(descriptor)
        expires = self._expiry()
        record = self._find(asked, self.retain)
        plainly = descriptor.descriptor_type == flight.DescriptorType.CMD and len(asked) == 1
        reference = self._listing.reference_info(record, descriptor) if plainly else None
        return reference or self._listing.info(record, asked, expires)

    def schema(self, descriptor: flight.FlightDescriptor) -> pa.Schema:
        return schemas.decoded(self._find(described(descriptor)).schema)

    def _find(self, asked: Mapping[str, Any], promise: float = 0.0) -> Record:
        """The version that a descriptor speaks of. Raises DatasetNotFound."""
        version = asked.get("version")
        return self._database.find(asked["name"], None if version is None else int(version), promise)

    def _expiry(self) -> float | None:
        """When a ticket that is given out now ends at the soonest; None where nothing is promised."""
        return time.time() + self.retain if self.retain else None

    def versions(self, name: str) -> Sequence[dict[str, Any]]:
        return [
            {"version": one.version, "created": one.created, "rows": one.rows, "current": one.current}
            for one in self._database.versions(name)
        ]

    def nodes(self) -> Sequence[dict[str, Any]]:
        return [{**plain_node(node), "alive": node.alive, "seen": node.seen} for node in self._database.nodes()]

    def renew(self, request: bytes) -> bytes:
        endpoint = flight.FlightEndpoint.deserialize(first_field(request))
        if not self.retain and not self._registry.tickets.mark():
            raise CatalogError("this catalog promises nothing of its tickets, so none can be renewed")
        ticket = parse_identifier(endpoint.ticket.ticket)[0]
        identifier, columns = self._registry.tickets.check(ticket, time.time())
        record, part = self._database.by_ticket(identifier, self.retain)
        renewed = self._listing.endpoint(part, {}, sooner(self._expiry(), record.expires), columns)
        return bytes(renewed.serialize())

    def _open_elsewhere(self, identifier: bytes, ticket: bytes) -> pa.RecordBatchReader:
        record, part = self._database.by_ticket(identifier)
        for node in part.nodes:
            if node.alive and node.id != self.node.id:
                reader = self._from_node(node, ticket)
                self.holdings.activity.flight()
                return reader
        silent = ", ".join(node.host for node in part.nodes)
        raise CatalogError(
            f"a part of {record.name!r} is on {silent}, which says nothing any more: is its node running?"
        )

    def _from_node(self, node: Node, ticket: bytes) -> pa.RecordBatchReader:
        peer = Peer(node.flight, self.security)
        reader = peer.do_get(ticket)
        validator = Validator(reader.schema)

        def pairs() -> Iterator[Pair]:
            with peer:
                for batch, metadata in batches(reader):
                    validator.check(batch, full=True)  # it may be another's mistake, and would end this process
                    yield batch, metadata

        return BatchReader(reader.schema, pairs())

    # Publishing

    def published(self, made: Dataset) -> None:
        part = Part(secrets.token_hex(8), self.node.id, made.ticket, made.rows, made.nbytes)
        self._registry.number(part.id, made)
        self._database.publish(made.name, part.id, schemas.encoded(made.schema), [part])
        self._delete_unwanted()

    def drop(self, name: str) -> None:
        self._database.drop(name)
        self._delete_unwanted()

    def abort(self, key: str) -> None:
        with self._publishing:
            self._database.abort(key)
        self._delete_unwanted()
        self.clear([key])

    def committed(self, key: str) -> bool:
        return self._database.committed(key) is not None

    def over(self, keys: Sequence[str]) -> Sequence[str]:
        return self._database.over(keys)

    def commit(self, body: Mapping[str, Any]) -> None:
        asked = Publication.parse({**body, "mode": "append" if body["append"] else "overwrite"})
        segments = [
            (str(one["node"]), str(one["segment"])) if isinstance(one, dict) else (self._own(), str(one))
            for one in body["segments"]
        ]
        key = str(body.get("key") or commit_key(asked.name, segments))
        schema = schemas.parsed(body["schema"])
        wanted = Wanted(asked.name, key, [], schema, asked.mode == "append", tags=asked.tags, ttl=asked.ttl)
        on: dict[str, list[str]] = {}
        for node, segment in segments:
            on.setdefault(node, []).extend([segment] if segment else [])  # a node without one has no rows
        with self._publishing:
            if self._database.committed(key) is not None:
                self.discard(on.get(self.node.id, ()))
                return
            if self._database.over([key]):
                raise CatalogError(f"what was to be published as {asked.name!r} has been aborted: write it again")
            if not on:
                on[self._own()] = []
            if [*on] == [self.node.id] and self._simple(wanted):
                self._commit_here(wanted, on[self.node.id])
            else:
                self._commit_there(wanted, on)
        self._delete_unwanted()
        self.clear([key])

    def _own(self) -> str:
        if not self._backend.stages:
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
        return len(record.parts) == 1 and self._registry.find(record.parts[0].ticket) is not None

    def _commit_here(self, wanted: Wanted, staged: Sequence[str]) -> None:
        wanted = replace(wanted, staged=staged)
        began: list[str] = []
        if wanted.append:
            with suppress(DatasetNotFound):
                record = self._database.find(wanted.name)
                before = appendable(wanted.name, self._registry.find(record.parts[0].ticket))
                began = [record.began]
                tags, ttl = record.more(wanted.tags, wanted.ttl)
                wanted = replace(wanted, before=before, tags=tags, ttl=ttl)
        prepared = self._backend.prepare(wanted)
        self.holdings.hold(prepared, named=True)
        self._database.publish(
            wanted.name,
            wanted.key,
            schemas.encoded(prepared.dataset.schema),
            [self.holdings.part(prepared)],
            tags=wanted.tags,
            ttl=wanted.ttl,
            before=began,
        )

    def _commit_there(self, wanted: Wanted, on: Mapping[str, Sequence[str]]) -> None:
        """Each node prepares its part; the catalog's transaction is the commit."""
        nodes = {node.id: node for node in self._database.nodes()}
        parts = []
        found = set()
        for number, (node, staged) in enumerate(on.items()):
            if node not in nodes:
                raise CatalogError(f"no node {node!r} has registered at this catalog")
            body = {
                "name": wanted.name,
                "key": wanted.key,
                "segments": [*staged],
                "schema": schemas.plain(wanted.schema),
                "tags": dict(wanted.tags),
                "ttl": wanted.ttl,
            }
            if node == self.node.id:
                told = self.prepare(body)
            else:
                with Peer(nodes[node].flight, self.security) as peer:
                    told = peer.act("prepare", body)
            parts.append(replace(parse_part(told["part"]), number=number))
            found.add(schemas.parsed(told["schema"]).serialize().to_pybytes())
        if len(found) > 1:
            raise CatalogError(f"the segments of {wanted.name!r} do not have one schema on all nodes")
        self._database.publish(
            wanted.name, wanted.key, found.pop(), parts, append=wanted.append, tags=wanted.tags, ttl=wanted.ttl
        )
        published = self._database.wanted(self.node.id, [part.id for part in parts if part.node == self.node.id])
        self._backend.confirm(published)
        self._database.settled(published)

    def _put(self, asked: Mapping[str, Any], schema: pa.Schema, pairs: Iterator[Pair]) -> dict[str, Any]:
        return super()._put(asked, schema, pairs) if self._backend.stages else self._put_there(asked, schema, pairs)

    def _put_there(self, asked: Mapping[str, Any], schema: pa.Schema, pairs: Iterator[Pair]) -> dict[str, Any]:
        node = self._some_node({})
        descriptor = flight.FlightDescriptor.for_command(json.dumps({**asked, "staged": True, "end": True}))
        with Peer(node.flight, self.security) as peer:
            answer = peer.forwarded(lambda client: upload(client, descriptor, schema, pairs))
            try:
                self._commit_put(asked, schema, {"node": node.id, "segment": answer["segment"]})
            except BaseException:
                with suppress(DissociatedError):
                    peer.discard([answer["segment"]])
                raise
        return answer

    def stage(self, asking: Mapping[str, Any]) -> dict[str, Any]:
        if self._backend.stages:
            return super().stage(asking)
        node = self._some_node(asking)
        with Peer(node.flight, self.security) as peer:
            return peer.act("stage", dict(asking))

    def _some_node(self, asking: Mapping[str, Any]) -> Node:
        nodes = [node for node in self._database.nodes() if node.alive and node.flight != self.node.flight]
        for node in nodes:
            if node.boot_id == asking.get("boot_id"):
                return node
        if not nodes:
            raise CatalogError("no node has registered at this catalog: start one, dissociated node --catalog URI")
        return nodes[0]

    # What nodes tell

    def register(self, body: Mapping[str, Any]) -> dict[str, Any]:
        node = parse_node(body["node"])
        if self.security.authorize is not None and not body.get("guarded"):
            raise AccessDenied("this catalog asks for tokens, and the node does not: give it authorize, a token file")
        if body.get("signs", "") != self._registry.tickets.mark():
            raise AccessDenied(
                "this catalog and the node do not make the same tickets: give both the same secret and a "
                "ticket_lifetime, or neither"
            )
        announced = [parse_announced(one) for one in body["parts"]]
        until = time.time() + float(body["lives"])
        self._database.register(node, announced, str(body["digest"]), until, int(body["serial"]))
        return self._said(node.id, announced)

    def heartbeat(self, body: Mapping[str, Any]) -> dict[str, Any]:
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
        self._database.left(node)

    # Time

    def start(self) -> None:
        self._latest = {version.name: version.created for version in self._backend.versions()}
        super().start()
        self._latest.clear()
        self._delete_unwanted()

    def _found(self, version: Version, prepared: Prepared) -> None:
        if not version.whole or version.prepared:
            return
        self._database.publish(
            version.name,
            version.key,
            schemas.encoded(prepared.dataset.schema),
            [self.holdings.part(prepared)],
            tags=version.tags,
            ttl=version.ttl,
            created=version.created,
            before=version.before,
        )
        replaced = self._latest[version.name]
        if replaced > version.created and replaced + self.retain > time.time():
            with suppress(DatasetNotFound):  # its time to live is over
                self._database.find(version.name, promise=self.retain)

    def catch_up(self) -> None:
        self._delete_unwanted()
        self.clear()

    def close(self) -> None: ...

    def release(self) -> None:
        super().release()
        self._database.close()

    def _delete_unwanted(self) -> None:
        """Remove what no version has any more."""
        announced = self.holdings.announced(self._backend.unconfirmed())
        unwanted = self._database.unwanted(self.node.id, announced)
        if unwanted:
            self.holdings.delete(unwanted)
            self._database.released(unwanted)

    def _version_of(self, part: str) -> int | None:
        return self._database.version_of(part)

    def _gone(self, parts: Sequence[str]) -> None:
        self._database.released(parts)

    # What comes of it

    def node_status(self) -> Sequence[NodeStatus]:
        now = time.time()
        return [
            NodeStatus(node.host, node.flight, node.alive, max(0.0, now - node.seen))
            for node in self._database.nodes()
            if node.id != self.node.id
        ]

    def status(self) -> ServerStatus:
        told = super().status()
        if self._backend.stages:
            return told
        datasets = (DatasetStatus(one.name, one.rows, one.nbytes, 0, 0, 0, 0, 0) for one in self._database.datasets())
        return replace(told, datasets=tuple(datasets))
