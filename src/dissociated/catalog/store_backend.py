"""The backend of a node: versions in a store, which outlive the node."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import pyarrow as pa

from dissociated.catalog.backend import Backend, Prepared
from dissociated.codec.options import WriteOptions
from dissociated.codec.schemas import deserialize
from dissociated.control.commit import Commit
from dissociated.control.version import Version
from dissociated.datasets.base import Dataset
from dissociated.datasets.registry import Registry
from dissociated.datasets.static import SegmentsDataset, StoredDataset
from dissociated.errors import DatasetNotFound, DissociatedError, SourceError, StoreError, StoreFull
from dissociated.store.segment import SegmentWriter
from dissociated.store.store import Store

_log = logging.getLogger(__name__)

T = TypeVar("T")


class StoreBackend(Backend):
    """A backend that keeps versions in a store. They are served in `registry`, and opened when they are read."""

    limited = True
    store: Store

    def __init__(self, store: Store, registry: Registry) -> None:
        self.id = store.id
        self.store = store
        self._registry = registry
        self._refused: set[str] = set()  # the ids of versions that are still to be removed
        store.eviction.in_use = self._in_use
        store.eviction.is_exposed = self._is_exposed
        store.eviction.withdraw = self._withdraw
        store.eviction.on_evicted = self._on_evicted
        store.eviction.on_spilled = self._on_spilled

    @property
    def directory(self) -> Path:
        return self.store.staging

    def writer(
        self, name: str, schema: pa.Schema, options: WriteOptions | None = None, appends_to: str = ""
    ) -> SegmentWriter:
        return self.store.writer(name, schema, options, partial(self.reserve, appends_to=appends_to))

    def reserve(self, name: str, size: int, wish: int, appends_to: str = "") -> int:
        return self._retry_when_full(lambda: self.store.reserve(name, size, wish, appends_to), appends_to)

    def ensure_room(self, name: str, size: int, appends_to: str = "") -> None:
        self._retry_when_full(lambda: self.store.ensure_room(name, size, appends_to), appends_to)

    def announce_evictions(
        self,
        announce: Callable[[Sequence[Version]], AbstractContextManager[Sequence[Version]]],
        is_base: Callable[[Version], bool],
    ) -> None:
        self.store.eviction.announce = announce
        self.store.eviction.is_base = is_base

    def _retry_when_full(self, operation: Callable[[], T], appends_to: str = "") -> T:
        """Run `operation`; if the store is full, reconcile with the catalog, which may free space, and retry once."""
        try:
            return operation()
        except StoreFull:
            with suppress(DissociatedError):  # An unreachable catalog cannot free space.
                self.free_space(appends_to)  # The store is not locked here, so others can use it meanwhile.
            return operation()

    def prepare(
        self, commit: Commit, previous: Dataset | None = None, *, whole: bool = True, new_lineage: bool = False
    ) -> Prepared:
        existing = self.store.by_key(commit.key)
        if existing is not None and existing.id in self._refused:
            self._remove_refused(existing.id)  # It may lack rows that were committed since.
        base = None
        if previous is None:
            commit = replace(commit, mode="overwrite")  # The store may still hold a version that was dropped.
        else:
            current = self.store.current(commit.name)
            if current is None or self._registry.lookup_part(current.id) is not previous:
                previous.appendable()  # This raises with the reason, if there is one.
                raise StoreError(
                    f"{commit.name!r} is not in this store, so no rows can be appended: put all rows again"
                )
            base = current.id  # Another thread may remove the version before `Store.commit` locks the store.
        version = self.store.commit(
            commit,
            prepared=not whole,
            pending=whole,
            base=base,
            new_lineage=new_lineage,
            max_metadata=self.max_metadata,
        )
        try:
            self._open_version(version)  # A version that nobody can read must not be published.
        except DissociatedError:
            if existing is None or version.id != existing.id:
                self.refuse(version.id)
            raise
        return self.load_version(version)

    def load_version(self, version: Version) -> Prepared:
        """Return a version in a form that can be served. Its segments are opened when it is read."""
        dataset = self._registry.lookup_part(version.id)
        if dataset is None:
            schema = deserialize(version.schema)
            stored = StoredDataset(
                version.name, schema, version.rows, version.nbytes, partial(self._open_version, version)
            )
            stored.ticket = version.ticket
            dataset = self._registry.serve(version.id, stored)
            if self.store.version(version.id) is None:  # The version was removed meanwhile.
                self._registry.withdraw_parts([version.id])
        return Prepared(version.id, dataset, version.serial)

    def _open_version(self, version: Version) -> SegmentsDataset:
        """Return the segments of a version, opened.

        Raises:
            SourceError: The segments cannot be read.
            DatasetNotFound: The version was deleted meanwhile.
        """
        try:
            segments = self.store.segments(version)
            return segments.serve_once(lambda: SegmentsDataset(version.name, [*segments]), SegmentsDataset.drop)
        except StoreError as error:
            if self.store.version(version.id) is None:
                raise DatasetNotFound(
                    f"{version.name!r} was dropped or replaced in the meantime: look it up again"
                ) from None
            raise SourceError(f"{version.name!r} cannot be read: {error}") from error

    def hand_over(self, descriptor: int) -> str:
        """Take over a sealed memfd as a staged segment. See `Store.hand_over`."""
        return self._retry_when_full(lambda: self.store.hand_over(descriptor))

    def staged_names(self) -> list[str]:
        return self.store.staged_names()

    def discard(self, names: Iterable[str]) -> None:
        self.store.discard(names)

    def remove(self, ids: Iterable[str]) -> None:
        versions = (self.store.version(id) for id in {*ids})
        held_versions = [version for version in versions if version is not None]
        self.store.remove(*sorted(held_versions, key=lambda version: (version.number, version.serial)))

    def refuse(self, id: str) -> None:
        try:
            self._remove_refused(id)
        except StoreError as error:
            _log.warning("removing a refused version failed, it is tried again: version=%s error=%s", id, str(error))
            self._refused.add(id)
            version = self.store.version(id)
            if version is not None:
                with suppress(StoreError):  # Then a restart before the next attempt would publish the version.
                    self.store.withhold(version)

    def _remove_refused(self, id: str) -> None:
        version = self.store.version(id)
        if version is not None:  # Its number is used up, but no client was told that the version was published.
            self.store.remove(replace(version, prepared=True))
        self._refused.discard(id)

    def confirm(self, published: Mapping[str, bool]) -> None:
        for id, whole in published.items():
            version = self.store.version(id)
            if version is not None:
                self.store.confirm(version, whole)

    def sweep(self) -> None:
        self.store.sweep()  # first, since it raises if the store is closed
        with suppress(OSError):  # It shows since when no node has served the store.
            os.utime(self.store.directory)
        for id in {*self._refused}:
            self._remove_refused(id)

    def _in_use(self, version: Version) -> bool:
        dataset = self._registry.lookup_part(version.id)
        return dataset is not None and dataset.readers > 0

    def _is_exposed(self, version: Version) -> bool:
        dataset = self._registry.lookup_part(version.id)
        return dataset is not None and dataset.exposed

    def _withdraw(self, version: Version) -> None:
        dataset = self._registry.lookup_part(version.id)
        if dataset is not None:
            dataset.close_segments()

    def _on_evicted(self, version: Version) -> None:
        self.on_evicted(version)

    def _on_spilled(self, version: Version) -> None:
        self._withdraw(version)
        self.on_spilled(self.load_version(version))

    def close(self) -> None:
        self.store.close()
