"""The backend of a server: segments in memory alone."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path

import pyarrow as pa

from dissociated.catalog.backend import Backend, CommitRequest, Prepared
from dissociated.codec.options import WriteOptions
from dissociated.datasets.static import SegmentsDataset
from dissociated.store.segment import Segment, SegmentWriter
from dissociated.store.stage import Stage


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
