"""Where writers on a host put segments, and what becomes of them there: the part of a catalog that keeps bytes.

There are three: a stage, whose segments live as long as the server (`StageBackend`); a store, whose versions outlive it
(`store_backend`); and none, for a catalog that only knows what its nodes have.
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
    """Segments that are ready to be published, as one dataset or as a part of one."""

    id: str
    dataset: Dataset
    serial: int = 0


@dataclass(frozen=True)
class CommitRequest:
    """What a writer asks for. `key` tells this commit from every other; `ttl` is in seconds.

    With `append` the segments follow those of `previous`, what the dataset is now. One that is not `whole` is
    published, or not, by a catalog elsewhere. `version` is the number that the catalog gave it, and
    `catalog` tells that catalog from all others.
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

    def ensure_room(self, name: str, size: int) -> None:
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

    def named(self, name: str) -> list[Version]:
        """See Store.named."""
        return []

    def removed(self) -> Mapping[str, Removed]:
        """See Store.removed."""
        return {}

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

    def set_aside(self) -> Sequence[SetAside]:
        """See Store.set_aside."""
        return ()

    @abstractmethod
    def staged(self) -> list[str]:
        """The segments in the directory, those too that are still written."""

    @abstractmethod
    def discard(self, names: Iterable[str]) -> None:
        """Remove these segments, as far as they exist. Who still writes one is told by an error, or finds it gone."""

    @abstractmethod
    def remove(self, ids: Iterable[str]) -> None:
        """What was prepared under these is not wanted any more. Whoever reads it is undisturbed."""

    def refuse(self, id: str) -> None:
        """What was prepared under this id is not published after all: remove it now, or else with a `sweep`."""
        self.remove([id])

    @abstractmethod
    def confirm(self, published: Mapping[str, bool], numbers: Mapping[str, int] | None = None) -> None:
        """What was prepared under these has been published, as a whole dataset or as a part of one.

        `numbers` are those of the versions that had none.
        """

    @abstractmethod
    def sweep(self) -> None:
        """Remove what was left behind by writers that were killed."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the directory."""


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

    def confirm(self, published: Mapping[str, bool], numbers: Mapping[str, int] | None = None) -> None: ...

    def sweep(self) -> None: ...

    def close(self) -> None: ...


class StageBackend(Backend):
    """Segments in memory alone: gone with the server, however it ends."""

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
        pass  # nothing has a name here: it goes with its dataset

    def confirm(self, published: Mapping[str, bool], numbers: Mapping[str, int] | None = None) -> None:
        pass  # nothing here outlives the catalog's knowledge of it

    def sweep(self) -> None:
        pass  # what is written here has no name before it is whole

    def close(self) -> None:
        self._stage.close()
