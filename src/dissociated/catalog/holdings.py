"""What this process holds of the datasets of a catalog: what it serves, and where writers put more."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import pyarrow as pa

from dissociated.base.access import Signer, Unsigned
from dissociated.catalog.backend import Backend, NoBackend, Prepared
from dissociated.codec.batches import BatchReader
from dissociated.codec.split import BatchAndMetadata, batches
from dissociated.control import schemas
from dissociated.control.records import AnnouncedVersion, Part
from dissociated.datasets.base import Dataset
from dissociated.datasets.registry import Registry
from dissociated.datasets.source_errors import source_errors
from dissociated.errors import DissociatedError
from dissociated.monitoring.activity import Activity
from dissociated.monitoring.changes import Change
from dissociated.monitoring.status import StoreStatus
from dissociated.protocol.request import parse_identifier
from dissociated.store.directory import Version

_log = logging.getLogger(__name__)


class EndpointProvider(Protocol):
    """Where what is served here can be requested."""

    def listener_uris(self) -> list[str]:
        """The URIs that listeners have themselves."""

    def base_locations(self) -> list[str]:
        """The URIs that any dataset can be requested at."""

    def dataset_locations(self, dataset: Dataset) -> list[str]:
        """The locations of a dataset."""

    def reference_locations(self, dataset: Dataset) -> list[str]:
        """The two URIs that the C++ reference expects; none without a place for it."""


class NoEndpoints:
    """The places of a process that serves nothing."""

    def listener_uris(self) -> list[str]:
        return []

    def base_locations(self) -> list[str]:
        return []

    def dataset_locations(self, dataset: Dataset) -> list[str]:
        return []

    def reference_locations(self, dataset: Dataset) -> list[str]:
        return []


class Holdings:
    """The datasets in `registry`, whose segments `backend` keeps, requested at `endpoints`, counted by `activity`.

    Owns the backend. Safe to use from many threads.
    """

    def __init__(self, registry: Registry, backend: Backend, endpoints: EndpointProvider, activity: Activity) -> None:
        self.registry = registry
        self.backend = backend
        self.endpoints = endpoints
        self.activity = activity

    @classmethod
    def empty(cls, tickets: Signer | Unsigned) -> Holdings:
        """Those of a catalog alone, which only knows what its nodes have."""
        return cls(Registry(tickets), NoBackend(), NoEndpoints(), Activity())

    def serve(self, prepared: Prepared, named: bool = False) -> None:
        """Serve this, from now on; `named` if it is a dataset and not a part of one."""
        self.registry.serve(prepared.id, prepared.dataset, named)

    def describe_part(self, prepared: Prepared, number: int = 0) -> Part:
        """What a catalog is told of it: part `number` of a version."""
        dataset = prepared.dataset
        return Part(prepared.id, self.backend.id, dataset.ticket, dataset.rows, dataset.nbytes, number, prepared.serial)

    def describe_versions(self, versions: Iterable[Version]) -> list[AnnouncedVersion]:
        """What a catalog is told of versions in the store."""
        return [self._describe_version(version) for version in versions]

    def _describe_version(self, version: Version) -> AnnouncedVersion:
        try:
            schema = schemas.serialize(self.backend.load_version(version).dataset.schema)
        except DissociatedError as error:
            _log.warning("%s is in the store and cannot be read now: %s", version.name, error)
            schema = b""
        return AnnouncedVersion(
            Part(version.id, self.backend.id, version.ticket, version.rows, version.nbytes, 0, version.number),
            version.name,
            version.key,
            schema,
            version.created,
            version.prepared,
            version.whole,
            version.tags,
            version.ttl,
            version.before,
            version.version,
            version.catalog,
        )

    def delete_parts(self, parts: Sequence[str]) -> None:
        """Keep these parts no more, and serve no part that is gone. Raises StoreError if one cannot be removed."""
        try:
            self.backend.remove(parts)
        finally:
            self.registry.withdraw_parts([part for part in parts if self.backend.version(part) is None])

    def open(self, ticket: bytes) -> pa.RecordBatchReader:
        """A reader over what a ticket is for, or a selection of that, for Flight.

        Raises as `Registry.resolve_ticket` does, ColumnNotFound and SourceError.
        """
        ticket, selection = parse_identifier(ticket)
        published, granted = self.registry.resolve_ticket(ticket)
        with source_errors(published.name):
            reader = self.registry.select(granted, selection).open_reader()
        self.activity.flight()

        def pairs() -> Iterator[BatchAndMetadata]:
            with published.reading(), source_errors(published.name):
                yield from batches(reader)

        return BatchReader(reader.schema, pairs())

    def record_change(self, kind: str, name: str, number: int | None, rows: int | None, nbytes: int | None) -> None:
        """What the store did to a part, to make room."""
        self.activity.changes.add(Change(kind, name, number, rows, nbytes, "the store had to make room"))

    def store_status(self) -> StoreStatus | None:
        """What the store holds, if there is one."""
        usage = self.backend.usage()
        aside = tuple(str(one) for one in self.backend.set_aside())
        return None if usage is None else StoreStatus(usage.total, usage.limit, aside)
