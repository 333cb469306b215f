"""Where writers on a host put segments, and what becomes of them there: the part of a catalog that keeps bytes.

There are three: a stage, whose segments live as long as the server, a store, whose versions outlive it, and none, of a
catalog that only knows what its nodes have.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import pyarrow as pa

from dissociated.buffers import MAX_METADATA
from dissociated.codec.options import WriteOptions
from dissociated.datasets.base import Dataset
from dissociated.datasets.registry import Registry
from dissociated.datasets.static import SegmentsDataset, StoredDataset
from dissociated.errors import CatalogError, DatasetNotFound, DissociatedError, SourceError, StoreError, StoreFull
from dissociated.store.directory import Version
from dissociated.store.places import Usage
from dissociated.store.segment import Segment, SegmentWriter
from dissociated.store.stage import Stage
from dissociated.store.store import Store

T = TypeVar("T")


@dataclass(frozen=True)
class Prepared:
    """Segments that are ready to be published, as one dataset or as a part of one."""

    id: str
    dataset: Dataset
    serial: int = 0


@dataclass(frozen=True)
class CommitRequest:
    """What a writer asks for. `key` tells this commit from every other; `ttl` is in seconds.

    With `append` the segments follow those of `previous`, what the dataset is now. One that is not `whole` is
    published, or not, by a catalog elsewhere.
    """

    name: str
    key: str
    staged: Sequence[str]
    schema: pa.Schema
    append: bool = False
    whole: bool = True
    previous: Dataset | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    ttl: float | None = None


class Backend(ABC):
    """See the module. Safe to use from many threads."""

    #: Tells the node that holds it from every other.
    id: str
    #: Whether writers must `reserve` before they write.
    limited = False
    #: How many bytes of metadata one message may have.
    max_metadata = MAX_METADATA
    #: Where writers hand over sealed memfds, the path of a Unix socket; empty where none are taken.
    handover = ""
    #: Whether there is a stage: else writers need that of another node.
    has_stage = True
    #: How often what it keeps has changed.
    changes = 0
    #: Called with a version that was evicted.
    on_evicted: Callable[[Version], None] = staticmethod(lambda version: None)
    #: Called with one that was spilled.
    on_spilled: Callable[[Prepared], None] = staticmethod(lambda prepared: None)
    #: Called where there is no room: it confirms what has been published since, and removes what is over.
    reconcile: Callable[[], None] = staticmethod(lambda: None)

    @property
    @abstractmethod
    def directory(self) -> Path:
        """Where writers put segments. Raises StoreError where there can be no such directory."""

    @abstractmethod
    def writer(self, name: str, schema: pa.Schema, options: WriteOptions | None = None) -> SegmentWriter:
        """A writer of a segment there."""

    def reserve(self, name: str, size: int, wish: int) -> int:
        """See Store.reserve."""
        return wish

    def ensure_room(self, name: str, size: int) -> None:  # noqa: B027  # where there is no limit there is room
        """See Store.ensure_room."""

    @abstractmethod
    def prepare(self, request: CommitRequest) -> Prepared:
        """Take these segments, whole and at once. A repeated call, by its key, gives what the first one gave.

        Raises StoreError, and SourceError where their schemas differ, or what they follow was not written in segments.
        """

    def load_version(self, version: Version) -> Prepared:
        """A version that is kept here, to be served. Raises SourceError where it cannot be read."""
        raise StoreError(f"{version.name!r} is in no store")

    def versions(self) -> list[Version]:
        """Everything that outlives the process, in the order in which it was committed."""
        return []

    def unconfirmed(self) -> list[Version]:
        """See Store.prepared."""
        return []

    def version(self, id: str) -> Version | None:
        """See Store.version."""
        return None

    def changed(self, since: int) -> list[str] | None:
        """See Store.changed."""
        return []

    def serial(self) -> int:
        """See Store.serial."""
        return 0

    def usage(self) -> Usage | None:
        """See Store.usage. None where there is no store."""
        return None

    @abstractmethod
    def staged(self) -> list[str]:
        """The segments in the directory, those too that are still written."""

    @abstractmethod
    def discard(self, names: Iterable[str]) -> None:
        """Remove these segments, as far as they exist. Who still writes one is told by an error, or finds it gone."""

    @abstractmethod
    def remove(self, ids: Iterable[str]) -> None:
        """What was prepared under these is not wanted any more. Whoever reads it is undisturbed."""

    @abstractmethod
    def confirm(self, published: Mapping[str, bool]) -> None:
        """What was prepared under these has been published, as a whole dataset or as a part of one."""

    @abstractmethod
    def sweep(self) -> None:
        """Remove what was left behind by writers that were killed."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the directory."""


class StageBackend(Backend):
    """Segments in memory alone: gone with the server, however it ends."""

    def __init__(self) -> None:
        self.id = secrets.token_hex(8)
        self._stage = Stage()

    @property
    def directory(self) -> Path:
        return self._stage.directory

    def writer(self, name: str, schema: pa.Schema, options: WriteOptions | None = None) -> SegmentWriter:
        return SegmentWriter(self._stage.path(name), schema, options)

    def prepare(self, request: CommitRequest) -> Prepared:
        previous = request.previous.appendable() if request.append and request.previous is not None else ()
        segments = [*previous, *self._stage.take([*request.staged], self.max_metadata)]
        if not segments:
            segments = [Segment.in_memory(request.name, request.schema.empty_table().to_reader())]
        return Prepared(secrets.token_hex(8), SegmentsDataset(request.name, segments))

    def staged(self) -> list[str]:
        return self._stage.names()

    def discard(self, names: Iterable[str]) -> None:
        self._stage.discard([*names])

    def remove(self, ids: Iterable[str]) -> None:
        pass  # nothing has a name here: it goes with its dataset

    def confirm(self, published: Mapping[str, bool]) -> None:
        pass  # nothing here outlives the catalog's knowledge of it

    def sweep(self) -> None:
        pass  # what is written here has no name before it is whole

    def close(self) -> None:
        self._stage.close()


class NoBackend(Backend):
    """None: of a catalog that only knows what its nodes have."""

    has_stage = False

    def __init__(self) -> None:
        self.id = secrets.token_hex(8)

    @property
    def directory(self) -> Path:
        raise self._refusal()

    def writer(self, name: str, schema: pa.Schema, options: WriteOptions | None = None) -> SegmentWriter:
        raise self._refusal()

    def reserve(self, name: str, size: int, wish: int) -> int:
        raise self._refusal("the node that the segment is on")

    def prepare(self, request: CommitRequest) -> Prepared:
        raise self._refusal()

    def _refusal(self, whom: str = "one of its nodes") -> CatalogError:
        return CatalogError(f"this catalog has no stage of its own: ask {whom}")

    def staged(self) -> list[str]:
        return []

    def discard(self, names: Iterable[str]) -> None: ...

    def remove(self, ids: Iterable[str]) -> None: ...

    def confirm(self, published: Mapping[str, bool]) -> None: ...

    def sweep(self) -> None: ...

    def close(self) -> None: ...


class StoreBackend(Backend):
    """Versions in a store, opened when they are read. What is served of them is in `registry`."""

    limited = True

    def __init__(self, store: Store, registry: Registry) -> None:
        self.id = store.id
        self._store = store
        self._registry = registry
        store.eviction.in_use = self._in_use
        store.eviction.on_evicted = self._on_evicted
        store.eviction.on_spilled = self._on_spilled

    @property
    def directory(self) -> Path:
        return self._store.staging

    def writer(self, name: str, schema: pa.Schema, options: WriteOptions | None = None) -> SegmentWriter:
        return self._store.writer(name, schema, options, self.reserve)

    def reserve(self, name: str, size: int, wish: int) -> int:
        return self._retry_when_full(lambda: self._store.reserve(name, size, wish))

    def ensure_room(self, name: str, size: int) -> None:
        self._retry_when_full(lambda: self._store.ensure_room(name, size))

    def _retry_when_full(self, operation: Callable[[], T]) -> T:
        """What needs room, and once more where there was none: what may go is known as of the last look only."""
        try:
            return operation()
        except StoreFull:
            with suppress(DissociatedError):  # a catalog that does not answer has nothing new
                self.reconcile()  # not within the store, which others use meanwhile
            return operation()

    def prepare(self, request: CommitRequest) -> Prepared:
        previous = request.previous if request.append else None
        if previous is not None and self._store.by_key(request.key) is None:
            current = self._store.current(request.name)
            if current is None or self.load_version(current).dataset is not previous:
                previous.appendable()  # which may say why not
                raise StoreError(f"{request.name!r} does not lie in this store, so nothing can be appended to it")
        committed = self._store.by_key(request.key)
        version = self._store.commit(
            request.name,
            request.staged,
            key=request.key,
            schema=request.schema,
            append=previous is not None,
            prepared=not request.whole,
            tags=request.tags,
            ttl=request.ttl,
            max_metadata=self.max_metadata,
        )
        try:
            self._open_version(version)  # nothing is published that nobody could read
        except DissociatedError:
            if version != committed:
                self._store.remove(version)
            raise
        return self.load_version(version)

    def load_version(self, version: Version) -> Prepared:
        """A version, to be served; it is opened when it is read.

        Raises SourceError where what an older library wrote cannot be read: its schema is in its segments alone.
        """
        dataset = self._registry.lookup_part(version.id)
        if dataset is None:
            stored = StoredDataset(
                version.name, self._schema(version), version.rows, version.nbytes, partial(self._open_version, version)
            )
            stored.ticket = version.ticket
            dataset = self._registry.serve(version.id, stored)
            if self._store.version(version.id) is None:  # it was removed meanwhile
                self._registry.withdraw_parts([version.id])
        return Prepared(version.id, dataset, version.number)

    def _schema(self, version: Version) -> pa.Schema:
        if not version.schema:
            return self._open_version(version).schema
        return pa.ipc.read_schema(pa.py_buffer(version.schema))

    def _open_version(self, version: Version) -> SegmentsDataset:
        """What is read of a version. Raises SourceError where it cannot be, DatasetNotFound where it is gone."""
        try:
            opened = self._store.segments(version)
            return opened.serve_once(lambda: SegmentsDataset(version.name, [*opened]))
        except StoreError as error:
            if self._store.version(version.id) is None:
                raise DatasetNotFound(f"{version.name!r} was dropped or replaced just now: look it up again") from None
            raise SourceError(f"{version.name!r} cannot be read: {error}") from error

    def versions(self) -> list[Version]:
        return self._store.versions()

    def unconfirmed(self) -> list[Version]:
        return self._store.prepared()

    @property
    def changes(self) -> int:  # type: ignore[override]  # which nobody writes
        return self._store.changes

    def changed(self, since: int) -> list[str] | None:
        return self._store.changed(since)

    def version(self, id: str) -> Version | None:
        return self._store.version(id)

    def serial(self) -> int:
        return self._store.serial()

    def usage(self) -> Usage:
        return self._store.usage()

    def hand_over(self, descriptor: int) -> str:
        """See Store.hand_over."""
        return self._retry_when_full(lambda: self._store.hand_over(descriptor))

    def staged(self) -> list[str]:
        return self._store.staged()

    def discard(self, names: Iterable[str]) -> None:
        self._store.discard(names)

    def remove(self, ids: Iterable[str]) -> None:
        versions = (self._store.version(id) for id in {*ids})
        self._store.remove(*sorted((one for one in versions if one is not None), key=lambda one: one.number))

    def confirm(self, published: Mapping[str, bool]) -> None:
        for id, whole in published.items():
            version = self._store.version(id)
            if version is not None:
                self._store.confirm(version, whole)

    def sweep(self) -> None:
        self._store.sweep()

    def _in_use(self, version: Version) -> bool:
        dataset = self._registry.lookup_part(version.id)
        return dataset is not None and dataset.readers > 0

    def _on_evicted(self, version: Version) -> None:
        self.on_evicted(version)

    def _on_spilled(self, version: Version) -> None:
        dataset = self._registry.lookup_part(version.id)
        if dataset is not None:
            dataset.reopen()
        self.on_spilled(self.load_version(version))

    def close(self) -> None:
        self._store.close()
