"""Storage backends of a catalog, which hold the segments of local writers and the versions made of them.

There are three backends. `StageBackend` keeps segments as long as the server lives. `StoreBackend` (in `store_backend`)
keeps versions that outlive the server. `NoBackend` belongs to a catalog that stores nothing and only knows the parts
that its nodes hold.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from dissociated.base.buffers import MAX_METADATA
from dissociated.codec.options import WriteOptions
from dissociated.datasets.base import Dataset
from dissociated.datasets.static import SegmentsDataset
from dissociated.errors import CatalogError, StoreError
from dissociated.store.directory import SetAside, Version
from dissociated.store.numbers import Removed
from dissociated.store.places import Usage
from dissociated.store.segment import Segment, SegmentWriter
from dissociated.store.stage import Stage


@dataclass(frozen=True)
class Prepared:
    """Segments that are ready to be published, either as a whole dataset or as one part of a dataset.

    Attributes:
        id: The id of the part.
        dataset: The segments as a dataset that can be served.
        serial: A number that grows with every part in the store; 0 in a stage.
    """

    id: str
    dataset: Dataset
    serial: int = 0


@dataclass(frozen=True)
class CommitRequest:
    """The request of a writer to publish staged segments.

    Attributes:
        name: The name of the dataset.
        key: The key of the commit, which is unique to it. A repeated request has the same key.
        staged: The names of the segments in the directory of the backend.
        schema: The schema of the dataset, for a commit without segments.
        append: Whether the segments follow those of `previous`.
        whole: Whether the segments are the whole dataset. If False, another catalog decides whether they are published.
        previous: The current version of the dataset, if the commit appends to it.
        tags: The tags of the version.
        ttl: The time to live in seconds; None if the version does not expire.
        version: The number of the version, which the catalog assigned.
        catalog: The id of that catalog, which differs from the id of every other catalog.
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
    version: int = 0
    catalog: int = 0


class Backend(ABC):
    """The storage of a catalog or node. Its methods may be called from several threads."""

    #: The id of the node that holds this backend. It differs from the ids of all other nodes.
    id: str
    #: Whether writers must call `reserve` before they write.
    limited = False
    #: The maximum number of bytes of metadata in one message.
    max_metadata = MAX_METADATA
    #: The path of the Unix socket at which writers hand over sealed memfds; empty if the backend accepts none.
    handover = ""
    #: Whether the backend has a stage. Without one, writers need the stage of another node.
    has_stage = True
    #: The number of changes to the stored versions so far.
    changes = 0
    #: A callback that receives each version that was evicted.
    on_evicted: Callable[[Version], None] = staticmethod(lambda version: None)
    #: A callback that receives each version that was spilled.
    on_spilled: Callable[[Prepared], None] = staticmethod(lambda prepared: None)
    #: A callback for a full store: it confirms versions that were published since, and removes unreferenced ones.
    reconcile: Callable[[], None] = staticmethod(lambda: None)

    @property
    @abstractmethod
    def directory(self) -> Path:
        """Return the directory in which writers put segments. Raise CatalogError if this backend has none."""

    @abstractmethod
    def writer(self, name: str, schema: pa.Schema, options: WriteOptions | None = None) -> SegmentWriter:
        """Return a writer of the segment `name` in that directory."""

    def reserve(self, name: str, size: int, wish: int) -> int:
        """Reserve room for a segment. See `Store.reserve`."""
        return wish

    def ensure_room(self, name: str, size: int) -> None:
        """Make room for a segment, or raise. See `Store.ensure_room`."""

    @abstractmethod
    def prepare(self, request: CommitRequest) -> Prepared:
        """Make the requested segments ready to be published, all of them or none.

        A repeated request with the same key returns the result of the first.

        Raises:
            CatalogError: This backend has no stage.
            StoreError: The segments cannot be stored.
            SourceError: The schemas of the segments differ, or the previous version does not consist of segments.
        """

    def load_version(self, version: Version) -> Prepared:
        """Return a stored version in a form that can be served. Raise SourceError if it cannot be read."""
        raise StoreError(f"{version.name!r} is in no store")

    def versions(self) -> list[Version]:
        """Return all versions that outlive the process, in the order of their commits."""
        return []

    def named(self, name: str) -> list[Version]:
        """Return the versions of a dataset. See `Store.named`."""
        return []

    def removed(self) -> Mapping[str, Removed]:
        """Return the versions that are gone, by dataset. See `Store.removed`."""
        return {}

    def unconfirmed(self) -> list[Version]:
        """Return the versions whose publication is not confirmed. See `Store.prepared`."""
        return []

    def version(self, id: str) -> Version | None:
        """Return the version with this id. See `Store.version`."""
        return None

    def changed(self, since: int) -> list[str] | None:
        """Return the ids of the versions that changed after `since` changes; None if unknown. See `Store.changed`."""
        return []

    def serial(self) -> int:
        """Return a number above the serials of all versions so far, and below all later serials."""
        return 0

    def usage(self) -> Usage | None:
        """Return the bytes in use and their limit, or None if the backend has no store. See `Store.usage`."""
        return None

    def set_aside(self) -> Sequence[SetAside]:
        """Return the entries that could not be read when the store was opened. See `Store.set_aside`."""
        return ()

    @abstractmethod
    def staged(self) -> list[str]:
        """Return the names of the segments in the directory, including segments that are still being written."""

    @abstractmethod
    def discard(self, names: Iterable[str]) -> None:
        """Remove the named segments, if they exist.

        A writer of a removed segment gets an error, or finds the segment missing.
        """

    @abstractmethod
    def remove(self, ids: Iterable[str]) -> None:
        """Remove prepared versions that are no longer needed. Their readers are not disturbed."""

    def refuse(self, id: str) -> None:
        """Remove a prepared version that will not be published, now or, if that fails, in a later `sweep`."""
        self.remove([id])

    @abstractmethod
    def confirm(self, published: Mapping[str, bool], numbers: Mapping[str, int] | None = None) -> None:
        """Record that prepared versions were published.

        Args:
            published: For each id, True if it was published as a whole dataset and False if as a part of one.
            numbers: The version numbers of the ids that had none.
        """

    @abstractmethod
    def sweep(self) -> None:
        """Remove segments that killed writers left behind."""

    @abstractmethod
    def close(self) -> None:
        """Release the directory."""


class NoBackend(Backend):
    """The backend of a catalog that stores nothing itself and only knows the parts that its nodes hold."""

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

    def confirm(self, published: Mapping[str, bool], numbers: Mapping[str, int] | None = None) -> None: ...

    def sweep(self) -> None: ...

    def close(self) -> None: ...


class StageBackend(Backend):
    """Segments that exist in memory only. They are gone when the server ends, also if it is killed."""

    def __init__(self) -> None:
        self._stage = Stage()
        self.id = self._stage.id

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
        pass  # Segments have no names here: their memory is released with the dataset.

    def confirm(self, published: Mapping[str, bool], numbers: Mapping[str, int] | None = None) -> None:
        pass  # No segment outlives the database of the catalog.

    def sweep(self) -> None:
        pass  # A segment gets its name only when it is complete.

    def close(self) -> None:
        self._stage.close()
