"""A catalog, whichever it is: what there is, where it can be had, and how writers publish.

There are two: `LocalCatalog` knows by itself, from its database; `UpstreamCatalog` is a node of another catalog, and
says what that one says. What both do with what this process holds is here.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight

from dissociated.base.access import Security
from dissociated.base.host import boot_id, directory_id, host_name
from dissociated.catalog.backend import CommitRequest, Prepared
from dissociated.catalog.holdings import Holdings
from dissociated.codec.split import BatchAndMetadata
from dissociated.control import schemas
from dissociated.control.commit import Publication
from dissociated.control.flight_streams import receive_put
from dissociated.control.messages import part_to_json
from dissociated.control.records import NodeRecord
from dissociated.datasets.base import Dataset
from dissociated.errors import CatalogError, DissociatedError
from dissociated.monitoring.status import NodeStatus, ServerStatus
from dissociated.protocol.request import parse_identifier
from dissociated.store.directory import Version

_log = logging.getLogger(__name__)


class Catalog(ABC):
    """What Flight clients, writers and nodes ask of a catalog. Safe to use from many threads.

    It owns `holdings`, what this process serves and keeps of it. `node` is this process, as nodes are told;
    `security` says who may call, and how this one proves itself to others.
    """

    #: Seconds between two calls of `reconcile`.
    reconcile_interval = 1.0

    def __init__(self, node: NodeRecord, holdings: Holdings, security: Security) -> None:
        self.node = node
        self.holdings = holdings
        self.security = security
        self._backend = holdings.backend
        self._registry = holdings.registry
        self._backend.on_evicted = self._on_evicted
        self._backend.on_spilled = self._on_spilled
        self._backend.reconcile = self.reconcile

    # What there is

    @abstractmethod
    def infos(self, criteria: bytes) -> Iterator[flight.FlightInfo]:
        """Every dataset that meets the criteria, which are JSON or empty. Raises CatalogError for other criteria."""

    @abstractmethod
    def info(self, descriptor: flight.FlightDescriptor) -> flight.FlightInfo:
        """A dataset, and where its parts are. Raises DatasetNotFound, and CatalogError for an unknown descriptor."""

    @abstractmethod
    def schema(self, descriptor: flight.FlightDescriptor) -> pa.Schema:
        """The schema of a dataset. Raises DatasetNotFound."""

    @abstractmethod
    def versions(self, name: str) -> Sequence[dict[str, Any]]:
        """Every version of a dataset that can still be read: see `CatalogClient.versions`."""

    @abstractmethod
    def nodes(self) -> Sequence[dict[str, Any]]:
        """Every node: see `CatalogClient.nodes`."""

    @abstractmethod
    def renew(self, request: bytes) -> bytes:
        """The endpoint in this message of Flight.proto with a ticket that is good for longer, as such a message.

        Raises DatasetNotFound where its dataset is gone, AccessDenied where its ticket has expired, and CatalogError
        where this catalog promises nothing of tickets.
        """

    def open(self, ticket: bytes) -> pa.RecordBatchReader:
        """The stream of a ticket, from here or from where it is. Raises DatasetNotFound and AccessDenied."""
        identifier = self._registry.tickets.check(parse_identifier(ticket)[0], time.time()).identifier
        if self._registry.lookup(identifier) is not None:
            return self.holdings.open(ticket)
        return self._open_remote(identifier, ticket)

    @abstractmethod
    def _open_remote(self, identifier: bytes, ticket: bytes) -> pa.RecordBatchReader:
        """The stream of a ticket that is not served here; `identifier` is what it was made for."""

    # Publishing

    @abstractmethod
    def record_publication(self, dataset: Dataset, ttl: float | None = None) -> None:
        """Record what this process has published by itself, and serves already, for `ttl` seconds if that is given.

        Raises CatalogError where only another catalog may publish.
        """

    @abstractmethod
    def commit(self, body: Mapping[str, Any]) -> None:
        """Publish segments, on whichever nodes they are, as one dataset, whole and at once.

        Raises CatalogError where it was aborted, or the schemas differ, and what the nodes raise.
        """

    def _parse_commit(self, body: Mapping[str, Any]) -> tuple[Publication, str, list[tuple[str, str]]]:
        """What is published, the key of its commit, and its segments as pairs of node and name."""
        publication = Publication.parse({**body, "mode": "append" if body["append"] else "overwrite"})
        segments = [
            (str(one["node"]), str(one["segment"])) if isinstance(one, dict) else (self._own_node_id(), str(one))
            for one in body["segments"]
        ]
        return publication, str(body.get("key") or _commit_key(publication.name, segments)), segments

    def _own_node_id(self) -> str:
        if not self._backend.has_stage:
            raise CatalogError("this catalog has no stage of its own: say which node each segment is on")
        return self.node.id

    @abstractmethod
    def drop(self, name: str) -> None:
        """Make a dataset unavailable. Raises DatasetNotFound."""

    @abstractmethod
    def abort(self, key: str) -> None:
        """Let no commit with this key come, unless it is under way, and remove what was written for it."""

    @abstractmethod
    def committed(self, key: str) -> bool:
        """Whether there was a commit with this key."""

    @abstractmethod
    def resolved_commits(self, keys: Sequence[str]) -> Sequence[str]:
        """Those of `keys` that were committed or aborted."""

    def put(self, command: Mapping[str, Any], reader: Any, cancelled: Callable[[], bool]) -> dict[str, Any]:
        """Write a stream that a Flight client sends, and publish it unless it asks for that to wait.

        What breaks off, which `cancelled` tells or an end that is missing, leaves nothing.
        """
        Publication.parse(command)  # before anything moves
        return self._put(command, reader.schema, receive_put(reader, cancelled, bool(command.get("end"))))

    def _put(self, command: Mapping[str, Any], schema: pa.Schema, pairs: Iterator[BatchAndMetadata]) -> dict[str, Any]:
        segment = f"{secrets.token_hex(16)}.arrows"
        if isinstance(size := command.get("nbytes"), int):
            self._backend.ensure_room(command["name"], size)
        with self._backend.writer(segment, schema) as writer:
            for batch, metadata in pairs:
                writer.write_batch(batch, metadata)
        written = {"node": self.node.id, "segment": segment}
        if not command.get("staged"):
            try:
                self._commit_put(command, schema, written)
            except BaseException:
                self.discard([segment])
                raise
        return {**written, "rows": writer.rows}

    def _commit_put(self, command: Mapping[str, Any], schema: pa.Schema, segment: Mapping[str, str]) -> None:
        self.commit(
            {
                "name": command["name"],
                "segments": [segment],
                "append": command.get("mode") == "append",
                "schema": schemas.to_base64(schema),
                "key": command.get("key"),
                "tags": command.get("tags"),
                "ttl": command.get("ttl"),
            }
        )

    def prepare(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Make segments on this node ready to be published by a catalog."""
        prepared = self._backend.prepare(
            CommitRequest(
                str(body["name"]),
                str(body["key"]),
                [str(one) for one in body["segments"]],
                schemas.from_base64(body["schema"]),
                whole=False,
                tags=body.get("tags") or {},
                ttl=body.get("ttl"),
                version=int(body.get("version") or 0),
                catalog=int(body.get("catalog") or 0),
            )
        )
        self.holdings.serve(prepared)
        return {
            "part": part_to_json(self.holdings.describe_part(prepared)),
            "schema": schemas.to_base64(prepared.dataset.schema),
        }

    # What writers ask

    def stage(self, caller: Mapping[str, Any]) -> dict[str, Any]:
        """Where writers put segments: on the host that asks, if there is a node."""
        directory = self._backend.directory
        return {
            "directory": str(directory),
            "host": host_name(),
            "boot_id": boot_id(),
            "node": self.node.id,
            "flight": self.node.flight,
            "limited": self._backend.limited,
            "inode": directory_id(directory),
            "handover": self._backend.handover,
        }

    def reserve(self, segment: str, size: int, wish: int) -> int:
        """Room for a segment in the stage."""
        return self._backend.reserve(segment, size, wish)

    def discard(self, segments: Sequence[str]) -> None:
        """Remove segments from the stage."""
        self._backend.discard(segments)

    def clear_stage(self, resolved: Sequence[str] | None = None) -> None:
        """Remove from the stage what was written for commits that are `resolved`: have been, or will never be.

        Left out, `resolved` is asked of the catalog.
        """
        staged = [name for name in self._backend.staged() if "-" in name]
        keys = sorted({_commit_key_of(name) for name in staged})
        if keys and resolved is None:
            resolved = self.resolved_commits(keys)
        self._backend.discard(name for name in staged if _commit_key_of(name) in (resolved or ()))

    def _clean_up(self, *steps: Callable[[], object]) -> None:
        """Do what is due once something has been published, dropped or aborted.

        That has happened, whatever fails now: so this is logged, and `reconcile` tries it again.
        """
        for step in steps:
            try:
                step()
            except (DissociatedError, OSError) as error:
                # Its text alone: a handler that keeps the record would keep the traceback, and so what that has mapped.
                _log.warning("%s: %s; it is tried again", self.node.flight, str(error))
            except Exception:
                _log.exception("%s: what is over was not looked at", self.node.flight)

    # What nodes tell

    @abstractmethod
    def register(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """A node says who it is and everything that it holds. Returns what it should know of that.

        Raises AccessDenied where its tickets or tokens are not those of this catalog.
        """

    @abstractmethod
    def heartbeat(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """A node lives, and says what has changed since the last time. Returns what it should know of that."""

    @abstractmethod
    def deregister(self, node: str) -> None:
        """A node ends."""

    # Time

    def start(self) -> None:
        """Serve what the store holds."""
        for version in self._backend.versions():
            try:
                prepared = self._backend.load_version(version)
                self.holdings.serve(prepared)
                self._restore(version, prepared)
            except DissociatedError as error:
                _log.error("%s is in the store and cannot be served: %s", version.name, error)

    @abstractmethod
    def _restore(self, version: Version, prepared: Prepared) -> None:
        """This version was in the store when the process began."""

    @abstractmethod
    def reconcile(self) -> None:
        """Learn what has been published, and let go of what is over."""

    @abstractmethod
    def close(self) -> None:
        """This process ends. The holdings stay until `release`."""

    def release(self) -> None:
        """Nobody asks any more: let go of what is kept."""
        self._backend.close()

    def _on_evicted(self, version: Version) -> None:
        """A version was evicted; or what was prepared and never published is gone."""
        number = self._version_number(version.id)
        self._registry.withdraw_parts([version.id])
        if not version.prepared:
            self.holdings.record_change("evicted", version.name, number, version.rows, version.nbytes)
        self._on_parts_deleted([version.id])

    def _on_spilled(self, prepared: Prepared) -> None:
        """A version was spilled."""
        dataset = prepared.dataset
        self.holdings.record_change(
            "spilled", dataset.name, self._version_number(prepared.id), dataset.rows, dataset.nbytes
        )

    @abstractmethod
    def _version_number(self, part: str) -> int | None:
        """The number of the version that has this part, where that is known here."""

    @abstractmethod
    def _on_parts_deleted(self, parts: Sequence[str]) -> None:
        """These parts are not kept here any more."""

    # What comes of it

    @abstractmethod
    def node_status(self) -> Sequence[NodeStatus]:
        """The nodes of this catalog, itself left out."""

    def status(self) -> ServerStatus:
        """What is served here, who reads it, and what was sent."""
        return self.holdings.activity.status(
            self.node.flight,
            self.holdings.endpoints.listener_uris(),
            self._registry.datasets(),
            [*self.node_status()],
            self.holdings.store_status(),
        )


def _commit_key(name: str, segments: Sequence[tuple[str, str]]) -> str:
    """A repeated call of a client that gives no key names the same segments, which nobody writes twice."""
    if not segments:
        return secrets.token_hex(16)
    return hashlib.sha256(json.dumps([name, segments]).encode()).hexdigest()


def _commit_key_of(segment: str) -> str:
    """The key of the commit that a segment was written for, by its name."""
    return segment.partition("-")[0]
