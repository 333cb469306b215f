"""The datasets of a catalog that this process serves, and the backend in which writers store more."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import pyarrow as pa

from dissociated.catalog.backend import Backend, NoBackend, Prepared
from dissociated.codec.batches import BatchReader
from dissociated.codec.split import BatchAndMetadata, batches
from dissociated.control.access import Signer, Unsigned
from dissociated.control.version import Part, Version
from dissociated.datasets.base import Dataset, IsGone
from dissociated.datasets.registry import Registry
from dissociated.datasets.source_errors import source_errors
from dissociated.datasets.static import StaticDataset
from dissociated.errors import DissociatedError
from dissociated.monitoring.activity import Activity
from dissociated.monitoring.changes import Change
from dissociated.monitoring.status import StoreStatus
from dissociated.protocol.request import Request
from dissociated.store.layout import NODE_LOG


class OwnLocations:
    """The URIs at which clients can request the datasets of this process: none, as long as it has no listener."""

    def listener_uris(self) -> list[str]:
        """Return the URIs of the listeners, without parameters of a dataset."""
        return []

    def base_locations(self) -> list[str]:
        """Return the URIs at which any dataset of the process can be requested, one for each listener."""
        return []

    def dataset_locations(self, dataset: Dataset) -> list[str]:
        """Return the URIs at which `dataset` can be requested, in the order in which clients should try them."""
        return []

    def are_fixed(self, dataset: Dataset) -> bool:
        """Return whether the locations of `dataset` stay as they are, because none has addresses of its memory."""
        return False

    def reference_locations(self, dataset: Dataset) -> list[str]:
        """Return the two URIs that the C++ reference client expects, or no URIs if a listener for it is missing."""
        return []


class Holdings:
    """The datasets that a process serves and stores. Its methods may be called from several threads.

    Args:
        registry: The datasets that are served.
        backend: The storage of their segments, which this object owns.
        endpoints: The URIs at which the datasets can be requested.
        activity: The counters of requests and data.
    """

    def __init__(self, registry: Registry, backend: Backend, endpoints: OwnLocations, activity: Activity) -> None:
        self.registry = registry
        self.backend = backend
        self.endpoints = endpoints
        self.activity = activity

    @classmethod
    def empty(cls, tickets: Signer | Unsigned) -> Holdings:
        """Return the holdings of a catalog that stores nothing and only knows the parts that its nodes hold."""
        return cls(Registry(tickets), NoBackend(), OwnLocations(), Activity())

    def describe_part(self, prepared: Prepared) -> Part:
        """Return the record that describes a prepared dataset to a catalog."""
        dataset = prepared.dataset
        return Part(prepared.id, self.backend.id, dataset.ticket, dataset.rows, dataset.nbytes, serial=prepared.serial)

    def describe_versions(self, versions: Iterable[Version]) -> list[Version]:
        """Return stored versions as this node reports them to a catalog: with its id."""
        return [replace(version, parts=(replace(version.part, node=self.backend.id),)) for version in versions]

    def delete_parts(self, parts: Sequence[str]) -> None:
        """Delete parts, and stop serving the deleted ones. Raise StoreError if a part cannot be deleted."""
        try:
            self.backend.remove(parts)
        finally:
            self._withdraw_missing(parts)

    def record_dropped(self, parts: Sequence[str]) -> None:
        """Record those of `parts` that could not be deleted as dropped, and stop serving them.

        Raises StoreError if they cannot be recorded, either.
        """
        store = self.backend.store
        try:
            store.record_dropped(*(version for version in map(store.version, parts) if version is not None))
        finally:
            self._withdraw_missing(parts)

    def _withdraw_missing(self, parts: Sequence[str]) -> None:
        self.registry.withdraw_parts([part for part in parts if self.backend.store.version(part) is None])

    def open(self, ticket: bytes, is_gone: IsGone) -> pa.RecordBatchReader:
        """Return a reader of the data of a ticket, or of a selection of that data, for Flight.

        Args:
            ticket: The ticket.
            is_gone: See `Dataset.open_reader_for`.

        Raises:
            DatasetNotFound: No dataset has this ticket.
            AccessDenied: The ticket is invalid or has expired.
            ColumnNotFound: The selection has a column that the dataset lacks.
            SourceError: The data cannot be read.
        """
        request = Request.parse(ticket)
        published, granted = self.registry.resolve_ticket(request.ticket, request.part, is_gone)
        with source_errors(published.name):
            reader = self.registry.select(granted, request.selection).open_reader_for(is_gone)
        self.activity.flight()

        def pairs() -> Iterator[BatchAndMetadata]:
            with published.reading(), source_errors(published.name):
                yield from batches(reader)

        return BatchReader(reader.schema, pairs())

    def read_small(self, published: Dataset, limit: int) -> bytes | None:
        """Return a small dataset as an IPC stream, for clients that want its rows with its description.

        Returns:
            The stream; None if it would be longer than `limit` bytes, or the dataset has to be read in another way. A
            client that then requests the dataset gets its error, if there is one.
        """
        if published.nbytes is None or published.nbytes > limit or not published.repeatable:
            return None
        with suppress(DissociatedError), published.reading():
            published.check_unchanged()
            opened = published.open()
            stream = opened.small_stream(limit) if isinstance(opened, StaticDataset) else None
            published.check_unchanged()
            if stream is not None:
                self.activity.flight()
            return stream
        return None

    def record_change(self, kind: str, name: str, number: int | None, rows: int | None, nbytes: int | None) -> None:
        """Record an eviction or spill of a part."""
        self.activity.changes.add(Change(kind, name, number, rows, nbytes, "the store had to make room"))

    def store_status(self) -> StoreStatus | None:
        """Return the usage of the store, or None if there is no store."""
        usage = self.backend.store.usage()
        directory = self.backend.store.directory
        if usage is None or directory is None:
            return None
        set_aside = tuple(str(entry) for entry in self.backend.store.set_aside)
        log = directory / NODE_LOG
        return StoreStatus(
            usage.total, usage.limit, set_aside, usage.free, str(directory), str(log) if log.exists() else ""
        )
