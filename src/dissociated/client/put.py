"""A put: what is read of a source, and the way that it takes to a node: shared memory on the same host, else DoPut."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import pyarrow as pa

from dissociated.codec.columns import values_size
from dissociated.codec.split import BatchAndMetadata, Validator, batches
from dissociated.control.commit import Publication
from dissociated.control.flight_streams import upload
from dissociated.control.stage import StagePlace
from dissociated.datasets.base import Dataset
from dissociated.datasets.source_errors import source_errors
from dissociated.errors import CatalogError
from dissociated.store.files import Reserve
from dissociated.store.segment import SegmentWriter

#: Called with the rows and bytes so far, and with how many rows there will be, None where that is not known.
Progress: TypeAlias = Callable[[int, int, int | None], object]


@dataclass
class Put:
    """One reading of `source`, to be published as `publication` says. Raises SourceError where it cannot be read."""

    publication: Publication
    source: Dataset
    progress: Progress | None = None

    def __post_init__(self) -> None:
        self._reader = self.source.open_reader()
        #: How many rows were read so far.
        self.rows = 0
        #: Whether everything was read: what was not is not published.
        self.complete = False
        #: Bytes of all bodies, or as many as are certain: a node makes room for so much at first, or for nothing.
        self.nbytes = self._measure() if self.source.repeatable else self.source.min_packed_size

    def _measure(self) -> int | None:
        with source_errors(self.publication.name):
            for _ in batches(self.source.open_reader()):
                pass  # what is no valid data is refused before anything looks into it
        return self.source.packed_size

    @property
    def schema(self) -> pa.Schema:
        """The schema of what is published."""
        return self._reader.schema

    def pairs(self) -> Iterator[BatchAndMetadata]:
        """All batches and their metadata, once. Calls `progress`. Raises SourceError."""
        remaining = batches(self._reader)
        nbytes = 0
        while True:
            with source_errors(self.publication.name):
                pair = next(remaining, None)
            if pair is None:
                self.complete = True
                return
            yield pair
            self.rows += pair[0].num_rows
            if self.progress is not None:
                nbytes += values_size(pair[0])
                self.progress(self.rows, nbytes, self.source.rows)

    def by_flight(self, client: Any, key: str) -> int:
        """Send it by DoPut of a Flight client, to be committed with this `key`. Returns the number of rows."""
        from pyarrow.flight import FlightDescriptor

        command = {**asdict(self.publication), "key": key, "end": True, "nbytes": self.nbytes}
        answer = upload(client, FlightDescriptor.for_command(json.dumps(command)), self.schema, self.pairs())
        if not isinstance(answer.get("rows"), int):
            raise CatalogError("the server took everything, and does not say how many rows it published")
        return int(answer["rows"])

    def write(self, place: StagePlace, segment: str, reserve: Reserve | None) -> int:
        """Write it into the stage of a node on this host, as a segment. Returns the number of rows."""
        validator = Validator(self.schema)
        with ExitStack() as stack:
            path = stack.enter_context(place.open()) / segment
            reserve_all = None if reserve is None else self._reserve_all(reserve)
            writer = stack.enter_context(SegmentWriter(path, self.schema, reserve=reserve_all))
            for batch, metadata in self.pairs():
                writer.write_batch(validator.check(batch), metadata)
        return writer.rows

    def _reserve_all(self, reserve: Reserve) -> Reserve:
        """A `reserve` that asks at first for the room of all of it."""
        whole = self.nbytes or 0
        return lambda name, size, wish: reserve(name, max(size, whole), max(wish, whole))
