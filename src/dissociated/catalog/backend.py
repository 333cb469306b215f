"""Storage backends of a catalog, which hold the segments of local writers and the versions made of them.

There are three backends. `StageBackend` keeps segments as long as the server lives. `StoreBackend` (in `store_backend`)
keeps versions that outlive the server. `NoBackend` belongs to a catalog that stores nothing and only knows the parts
that its nodes hold.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from dissociated.base.buffers import MAX_METADATA
from dissociated.codec.options import WriteOptions
from dissociated.control.commit import Commit
from dissociated.control.version import Version
from dissociated.datasets.base import Dataset
from dissociated.datasets.static import SegmentsDataset
from dissociated.errors import CatalogError, StoreError
from dissociated.store.directory import SetAside
from dissociated.store.keys import CommitKey
from dissociated.store.numbers import Removal
from dissociated.store.places import Usage
from dissociated.store.segment import Segment, SegmentWriter
from dissociated.store.stage import Stage
from dissociated.store.store import Store


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


class NoStore:
    """The store of a backend whose segments do not outlive the process. See `Store`."""

    changes = 0
    set_aside: Sequence[SetAside] = ()
    set_aside_ids: Sequence[str] = ()

    def versions(self) -> list[Version]:
        return []

    def named(self, name: str) -> list[Version]:
        return []

    def removals(self) -> Mapping[str, Removal]:
        return {}

    def prepared(self) -> list[Version]:
        return []

    def version(self, id: str) -> Version | None:
        return None

    def ids_in_memfds(self) -> list[str]:
        return []

    def location(self, version: Version) -> Path:
        raise StoreError(f"{version.name!r} is not in a store")

    def changed(self, since: int) -> list[str] | None:
        return []

    def record_dropped(self, *versions: Version) -> None: ...

    def record_published(self, version: Version) -> None: ...

    def next_serial(self) -> int:
        return 0

    def usage(self) -> Usage | None:
        return None

    def use_number(self, name: str, number: int) -> None: ...

    def commit_keys(self) -> Sequence[CommitKey]:
        return ()

    def record_keys(self, keys: Sequence[CommitKey], *, earlier: bool = False) -> None: ...

    @property
    def directory(self) -> Path | None:
        return None


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
    #: The store, whose versions outlive the process.
    store: Store | NoStore
    #: A callback that receives each version that was evicted.
    on_evicted: Callable[[Version], None] = staticmethod(lambda version: None)
    #: A callback that receives each version that was spilled.
    on_spilled: Callable[[Prepared], None] = staticmethod(lambda prepared: None)
    #: A callback for a full store, with the name of the dataset that the write appends to, if any: it confirms versions
    #: that were published since, and removes unreferenced ones.
    free_space: Callable[[str], None] = staticmethod(lambda appends_to: None)

    @property
    @abstractmethod
    def directory(self) -> Path:
        """Return the directory in which writers put segments. Raise CatalogError if this backend has none."""

    @abstractmethod
    def writer(
        self, name: str, schema: pa.Schema, options: WriteOptions | None = None, appends_to: str = ""
    ) -> SegmentWriter:
        """Return a writer of the segment `name` in that directory. For `appends_to` see `Store.reserve`."""

    def reserve(self, name: str, size: int, wish: int, appends_to: str = "") -> int:
        """Reserve room for a segment. See `Store.reserve`."""
        return wish

    def ensure_room(self, name: str, size: int, appends_to: str = "") -> None:
        """Make room for a segment, or raise. See `Store.ensure_room`."""

    def announce_evictions(
        self,
        announce: Callable[[Sequence[Version]], AbstractContextManager[Sequence[Version]]],
        is_base: Callable[[Version], bool],
    ) -> None:
        """Have `announce` called before versions are evicted, and `is_base` before that. See `Eviction`."""

    @abstractmethod
    def prepare(
        self, commit: Commit, previous: Dataset | None = None, *, whole: bool = True, new_lineage: bool = False
    ) -> Prepared:
        """Make the segments of a commit ready to be published, all of them or none.

        A repeated call with the same key returns the result of the first.

        Args:
            commit: The commit. Its segments are in the directory of this backend.
            previous: The current version of the dataset, if the commit appends to it.
            whole: Whether the segments are the whole dataset. If False, another catalog decides whether they are
                published.
            new_lineage: Whether an append begins a new lineage.

        Raises:
            CatalogError: This backend has no stage.
            StoreError: The segments cannot be stored.
            SourceError: The schemas of the segments differ, or the previous version does not consist of segments.
        """

    def load_version(self, version: Version) -> Prepared:
        """Return a stored version in a form that can be served. Raise SourceError if it cannot be read."""
        raise StoreError(f"{version.name!r} is not in a store")

    def staged_names(self) -> list[str]:
        """Return the names of the segments in the directory, including segments that are still being written."""
        return []

    def discard(self, names: Iterable[str]) -> None:
        """Remove the named segments, if they exist.

        A writer of a removed segment gets an error, or finds the segment missing.
        """

    def remove(self, ids: Iterable[str]) -> None:
        """Remove prepared versions that are no longer needed. Their readers are not disturbed.

        Without a store, their memory is released with the dataset.
        """

    def refuse(self, id: str) -> None:
        """Remove a prepared version that will not be published, now or, if that fails, in a later `sweep`."""

    def confirm(self, published: Mapping[str, bool]) -> None:
        """Record in the store that prepared versions were published.

        Args:
            published: For each id, True if it was published as a whole dataset and False if as a part of one.
        """

    def sweep(self) -> None:
        """Remove segments that killed writers left behind."""

    def close(self) -> None:
        """Release the directory."""


class NoBackend(Backend):
    """The backend of a catalog that stores nothing itself and only knows the parts that its nodes hold."""

    has_stage = False

    def __init__(self) -> None:
        self.id = secrets.token_hex(8)
        self.store = NoStore()

    @property
    def directory(self) -> Path:
        raise self._refusal()

    def writer(
        self, name: str, schema: pa.Schema, options: WriteOptions | None = None, appends_to: str = ""
    ) -> SegmentWriter:
        raise self._refusal()

    def reserve(self, name: str, size: int, wish: int, appends_to: str = "") -> int:
        raise self._refusal("the node that the segment is on")

    def prepare(
        self, commit: Commit, previous: Dataset | None = None, *, whole: bool = True, new_lineage: bool = False
    ) -> Prepared:
        raise self._refusal()

    def _refusal(self, addressee: str = "one of its nodes") -> CatalogError:
        return CatalogError(f"this catalog has no stage of its own: ask {addressee}")


class StageBackend(Backend):
    """Segments that exist in memory only. They are gone when the server ends, also if it is killed."""

    def __init__(self) -> None:
        self._stage = Stage()
        self.id = self._stage.id
        self.store = NoStore()

    @property
    def directory(self) -> Path:
        return self._stage.directory

    def writer(
        self, name: str, schema: pa.Schema, options: WriteOptions | None = None, appends_to: str = ""
    ) -> SegmentWriter:
        return SegmentWriter(self._stage.path(name), schema, options)

    def prepare(
        self, commit: Commit, previous: Dataset | None = None, *, whole: bool = True, new_lineage: bool = False
    ) -> Prepared:
        earlier = () if previous is None else previous.appendable()
        segments = [*earlier, *self._stage.take(commit.segment_names, self.max_metadata)]
        if not segments:
            if commit.schema is None:
                raise StoreError(f"the commit of {commit.name!r} has neither segments nor a schema: add the schema")
            segments = [Segment.in_memory(commit.name, commit.schema.empty_table().to_reader())]
        return Prepared(secrets.token_hex(8), SegmentsDataset(commit.name, segments))

    def staged_names(self) -> list[str]:
        return self._stage.names()

    def discard(self, names: Iterable[str]) -> None:
        self._stage.discard([*names])

    def close(self) -> None:
        self._stage.close()
