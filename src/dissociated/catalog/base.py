"""The base of both catalogs: listing and locating datasets, publishing, and the messages of nodes.

`LocalCatalog` answers from its own database. `UpstreamCatalog` runs on a node and forwards requests to the catalog that
the node belongs to. This module has their common code, which manages the datasets that this process holds.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight

from dissociated.base.host import boot_id, directory_id, host_name
from dissociated.catalog.backend import Prepared
from dissociated.catalog.holdings import Holdings
from dissociated.codec import schemas
from dissociated.codec.reader import check_field_names
from dissociated.codec.split import BatchAndMetadata
from dissociated.control.access import Security
from dissociated.control.commit import Commit, StagedSegment
from dissociated.control.flight_streams import receive_put
from dissociated.control.version import NodeRecord, Version
from dissociated.datasets.base import Dataset, IsGone
from dissociated.errors import CatalogError, DissociatedError, FormatError
from dissociated.monitoring.status import NodeStatus, ServerStatus
from dissociated.protocol.request import Request
from dissociated.store.layout import commit_key_of
from dissociated.store.stage import StagePlace

_log = logging.getLogger(__name__)


class Catalog(ABC):
    """The operations that Flight clients, writers and nodes call. They may be called from several threads.

    The catalog owns `holdings`.

    Args:
        node: The record of this process as a node.
        holdings: The datasets that this process serves and stores.
        security: The access rules for callers, and the credentials of this process towards other catalogs and nodes.
    """

    #: The number of seconds between two calls of `reconcile`.
    reconcile_interval = 1.0

    def __init__(self, node: NodeRecord, holdings: Holdings, security: Security) -> None:
        self.node = node
        self.holdings = holdings
        self.security = security
        #: The time at which a writer last requested the stage, by time.monotonic.
        self.stage_asked_at = -math.inf
        #: Whether this process holds nothing and will not come back when it ends.
        self.retiring = False
        self._backend = holdings.backend
        self._registry = holdings.registry
        self._backend.on_evicted = self._on_evicted
        self._backend.on_spilled = self._on_spilled
        self._backend.free_space = self.free_space

    # Listing

    @abstractmethod
    def infos(self, criteria: bytes) -> Iterator[flight.FlightInfo]:
        """Yield every dataset that meets `criteria` (JSON or empty). Raise CatalogError if they are invalid."""

    @abstractmethod
    def info(self, descriptor: flight.FlightDescriptor) -> flight.FlightInfo:
        """Return a dataset and the locations of its parts.

        Raises:
            DatasetNotFound: The dataset does not exist.
            CatalogError: The descriptor is invalid.
        """

    @abstractmethod
    def schema(self, descriptor: flight.FlightDescriptor) -> pa.Schema:
        """Return the schema of a dataset. Raise DatasetNotFound if the dataset does not exist."""

    @abstractmethod
    def current(self, names: Sequence[str]) -> Mapping[str, dict[str, Any]]:
        """Return the identity of the current version of each of these datasets that exists."""

    @abstractmethod
    def versions(self, name: str) -> Sequence[dict[str, Any]]:
        """Return every version of a dataset that can still be read. See `CatalogClient.versions`."""

    @abstractmethod
    def nodes(self) -> Sequence[dict[str, Any]]:
        """Return every node. See `CatalogClient.nodes`."""

    @abstractmethod
    def forget(self, node: str) -> None:
        """Remove a node that will not come back, with the datasets that only this node has.

        Args:
            node: The id of the node, the name of its host, or its Flight URI.

        Raises:
            CatalogError: No node, or more than one, is called so, or the node is alive.
        """

    @abstractmethod
    def renew(self, request: bytes) -> bytes:
        """Return an endpoint with a ticket that is valid for longer.

        Args:
            request: A `RenewFlightEndpointRequest` of Flight.proto, serialized.

        Returns:
            A `FlightEndpoint` of Flight.proto, serialized.

        Raises:
            DatasetNotFound: The dataset of the endpoint is gone.
            AccessDenied: The ticket has expired.
            CatalogError: The tickets of this catalog have no guaranteed lifetime.
        """

    def open(self, ticket: bytes, is_gone: IsGone) -> pa.RecordBatchReader:
        """Return the stream for a ticket, read here or from the node that holds the part.

        Args:
            ticket: The ticket.
            is_gone: See `Dataset.open_reader_for`.

        Raises:
            DatasetNotFound: No dataset has this ticket.
            AccessDenied: The ticket is invalid or has expired.
        """
        identifier = self._registry.tickets.check(Request.parse(ticket).ticket, self._registry.now()).identifier
        if self._registry.lookup(identifier) is not None:
            return self.holdings.open(ticket, is_gone)
        return self._open_remote(identifier, ticket)

    @abstractmethod
    def _open_remote(self, identifier: bytes, ticket: bytes) -> pa.RecordBatchReader:
        """Return the stream for a ticket of a part that this process does not serve.

        Args:
            identifier: The identifier of the part, which the ticket was made from.
            ticket: The ticket.
        """

    # Publishing

    @abstractmethod
    def publish_dataset(self, dataset: Dataset, ttl: float | None = None) -> None:
        """Serve a dataset of this process under its name, and list it.

        If that fails, the dataset that had the name is still served and listed.

        Args:
            dataset: The dataset.
            ttl: Its time to live in seconds; None if it does not expire.

        Raises:
            CatalogError: This process is a node, and only its upstream catalog may publish.
            DissociatedError: Another dataset has the same ticket, or the server is closed.
        """

    @abstractmethod
    def commit(self, commit: Commit) -> None:
        """Publish segments, which may be on several nodes, as one dataset, all of them or none.

        Raises:
            CatalogError: The commit was aborted, its key is that of another dataset, or the schemas differ.
            DissociatedError: A node failed, with the error of that node.
        """

    def _resolved(self, commit: Commit) -> Commit:
        """Return a commit with a key, and with the node of each segment."""
        if not self._backend.has_stage and not (commit.segments and all(segment.node for segment in commit.segments)):
            raise CatalogError("this catalog has no stage of its own: add the node of each segment")
        return commit.resolved(self.node.id)

    @abstractmethod
    def drop(self, name: str) -> None:
        """Make a dataset unavailable. Raise DatasetNotFound if it does not exist."""

    @abstractmethod
    def abort(self, key: str) -> None:
        """Forbid any commit with this key, unless one is in progress, and remove the segments written for it."""

    @abstractmethod
    def committed(self, key: str) -> bool:
        """Return whether a commit with this key was made."""

    @abstractmethod
    def resolved_commits(self, keys: Sequence[str]) -> Sequence[str]:
        """Return the members of `keys` whose commits were made or aborted."""

    def put(self, command: Mapping[str, Any], reader: Any, cancelled: Callable[[], bool]) -> dict[str, Any]:
        """Write a stream from a Flight client, and publish it unless the command has `staged`.

        An incomplete stream leaves nothing behind. A stream is incomplete if `cancelled` returns True at its end, or if
        the command announces an end marker and the marker is missing or wrong.
        """
        try:
            schema = check_field_names(reader.schema)
        except UnicodeDecodeError as error:
            raise FormatError(f"the name of a column is not UTF-8: {error}") from None
        commit = Commit.parse_options(command, schema)  # Check the command before any data moves.
        return self._write_put(commit, command, receive_put(reader, cancelled, bool(command.get("end"))))

    def _write_put(
        self, commit: Commit, command: Mapping[str, Any], pairs: Iterator[BatchAndMetadata]
    ) -> dict[str, Any]:
        segment = StagedSegment(f"{secrets.token_hex(16)}.arrows", self.node.id)
        if isinstance(size := command.get("nbytes"), int):
            self._backend.ensure_room(commit.name, size, commit.appends_to)
        with self._backend.writer(segment.name, commit.schema, appends_to=commit.appends_to) as writer:
            for batch, metadata in pairs:
                writer.write_batch(batch, metadata)
        if not command.get("staged"):
            try:
                self.commit(replace(commit, segments=[segment]))
            except BaseException:
                self.discard([segment.name])
                raise
        return {"node": segment.node, "segment": segment.name, "rows": writer.rows}

    def prepare(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Make segments on this node ready to be published by another catalog."""
        commit = Commit.parse({**body, "append": False})  # The catalog itself appends this part to the earlier parts.
        prepared = self._backend.prepare(commit, whole=False)
        self._registry.serve(prepared.id, prepared.dataset)
        return {
            "part": self.holdings.describe_part(prepared).to_json(),
            "schema": schemas.to_base64(prepared.dataset.schema),
        }

    # Staging

    def stage(self, caller: Mapping[str, Any]) -> dict[str, Any]:
        """Return the directory in which writers put segments, preferably that of a node on the caller's host."""
        directory = self._backend.directory
        self.stage_asked_at = time.monotonic()
        return StagePlace(
            str(directory),
            host_name(),
            boot_id(),
            self.node.id,
            "",
            self._backend.limited,
            directory_id(directory),
            self._backend.handover,
        ).to_json()

    def reserve(self, segment: str, size: int, wish: int, appends_to: str = "") -> int:
        """Reserve room for a segment in the stage, and return the number of bytes reserved. See `Store.reserve`."""
        return self._backend.reserve(segment, size, wish, appends_to)

    def discard(self, segments: Sequence[str]) -> None:
        """Remove segments from the stage."""
        self._backend.discard(segments)

    def clear_stage(self, resolved: Sequence[str] | None = None) -> None:
        """Remove the segments of resolved commits from the stage. A commit is resolved when it was made or aborted.

        Args:
            resolved: The keys of resolved commits. If omitted, the catalog is asked for them.
        """
        names = [name for name in self._backend.staged_names() if "-" in name]
        keys = sorted({commit_key_of(name) for name in names})
        if keys and resolved is None:
            resolved = self.resolved_commits(keys)
        self._backend.discard(name for name in names if commit_key_of(name) in (resolved or ()))

    def _clean_up(self, *steps: Callable[[], object]) -> None:
        """Run the steps that follow a publication, drop or abort.

        The operation itself has succeeded, so an error in a step is only logged, and `reconcile` tries again.
        """
        for step in steps:
            try:
                step()
            except (DissociatedError, OSError) as error:
                # Log only the text of the error. A handler that keeps records would keep the traceback too, and with it
                # the memory that its frames have mapped.
                _log.warning("cleanup failed, it is tried again: catalog=%s error=%s", self.node.flight, str(error))
            except Exception:
                _log.exception("cleanup failed, it is tried again: catalog=%s", self.node.flight)

    # Messages of nodes

    @abstractmethod
    def register(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Register a node with all the parts that it holds.

        Returns:
            The state of those parts in this catalog.

        Raises:
            AccessDenied: The tickets or tokens of the node do not match those of this catalog.
        """

    @abstractmethod
    def heartbeat(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Record a heartbeat of a node, with its changes since the last one. Return the state of those parts."""

    @abstractmethod
    def deregister(self, node: str, retiring: bool = False, gone_ids: Sequence[str] = ()) -> None:
        """Record that a node, and these parts with it, are gone. Forget a `retiring` node that holds no more."""

    # Start, reconciliation and end

    def start(self) -> None:
        """Serve the versions in the store."""
        for version in self._backend.store.versions():
            try:
                prepared = self._backend.load_version(version)
                self._registry.serve(prepared.id, prepared.dataset)
                self._restore(version, prepared)
            except DissociatedError as error:
                _log.error(
                    "serving a stored version failed: dataset=%r version=%s error=%s", version.name, version.id, error
                )

    @abstractmethod
    def join(self) -> None:
        """Report the versions in the store to the upstream, if there is one. Calls are answered already.

        Raises:
            AccessDenied: The upstream refuses this node.
        """

    @abstractmethod
    def _restore(self, version: Version, prepared: Prepared) -> None:
        """Restore a version that was in the store when the process started."""

    @abstractmethod
    def reconcile(self) -> None:
        """Learn which versions were published, and remove the unreferenced ones."""

    def free_space(self, appends_to: str) -> None:
        """Reconcile for a write for which the store is full, and which appends to this dataset, if it has a name."""
        self.reconcile()

    @abstractmethod
    def close(self) -> None:
        """Stop working with other catalogs. The holdings stay open until `release`."""

    def release(self) -> None:
        """Close the holdings. Call it when no more requests can come."""
        self._backend.close()

    def _on_evicted(self, version: Version) -> None:
        """Withdraw a version that was evicted, or a prepared version that was removed before its publication."""
        number = self._version_number(version.id)
        self._registry.withdraw_parts([version.id])
        if not version.prepared:
            self.holdings.record_change("evicted", version.name, number, version.rows, version.nbytes)
        self._on_parts_deleted([version.id])

    def _on_spilled(self, prepared: Prepared) -> None:
        """Record that a version was spilled."""
        dataset = prepared.dataset
        self.holdings.record_change(
            "spilled", dataset.name, self._version_number(prepared.id), dataset.rows, dataset.nbytes
        )

    @abstractmethod
    def _version_number(self, part: str) -> int | None:
        """Return the number of the version that has this part, or None if this process does not know it."""

    @abstractmethod
    def _on_parts_deleted(self, parts: Sequence[str]) -> None:
        """Record that this process no longer holds these parts."""

    # Status

    @abstractmethod
    def node_status(self) -> Sequence[NodeStatus]:
        """Return the status of the nodes of this catalog, except this process."""

    def status(self) -> ServerStatus:
        """Return the datasets served here, their readers, and the amount of data sent."""
        return self.holdings.activity.status(
            self.node.flight,
            self.holdings.endpoints.listener_uris(),
            self._registry.datasets(),
            [*self.node_status()],
            self.holdings.store_status(),
        )
