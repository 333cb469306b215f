"""A put: the reading of a source, and its transfer to a node, through shared memory on the same host or by DoPut."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeAlias

import pyarrow as pa

from dissociated.codec.columns import values_size
from dissociated.codec.split import BatchAndMetadata, batches
from dissociated.codec.validation import Validator
from dissociated.control.flight_streams import upload
from dissociated.control.stage import StagePlace
from dissociated.datasets.base import Dataset
from dissociated.datasets.source_errors import source_errors
from dissociated.errors import CatalogError
from dissociated.store.commit import Commit
from dissociated.store.files import Reserve
from dissociated.store.segment import SegmentWriter

#: Is called with the rows and bytes so far, and with the total number of rows, or None if it is unknown.
Progress: TypeAlias = Callable[[int, int, int | None], object]


@dataclass
class Put:
    """A reading of `source`, to be published as `commit` describes.

    Args:
        commit: The commit, without segments and schema.
        source: The data.
        progress: See `Progress`.

    Raises:
        SourceError: The source cannot be read.
    """

    commit: Commit
    source: Dataset
    progress: Progress | None = None

    def __post_init__(self) -> None:
        self._reader = self.source.open_reader()
        #: Number of rows that were read so far.
        self.rows = 0
        #: Whether all data was read. Incomplete data is not published.
        self.complete = False
        #: Bytes of all bodies, or a lower bound, or None. A node first makes room for this many bytes.
        self.nbytes = self._measure() if self.source.repeatable else self.source.min_packed_size

    def _measure(self) -> int | None:
        with source_errors(self.commit.name):
            for _ in batches(self.source.open_reader()):
                pass  # refuse invalid data before its content is read
        return self.source.packed_size

    @property
    def schema(self) -> pa.Schema:
        """Return the schema of the published data."""
        return self._reader.schema

    def pairs(self) -> Iterator[BatchAndMetadata]:
        """Yield all batches and their metadata, once, and call `progress` after each.

        Raises:
            SourceError: The source cannot be read.
        """
        remaining = batches(self._reader)
        nbytes = 0
        while True:
            with source_errors(self.commit.name):
                pair = next(remaining, None)
            if pair is None:
                self.complete = True
                return
            yield pair
            self.rows += pair[0].num_rows
            if self.progress is not None:
                nbytes += values_size(pair[0])
                self.progress(self.rows, nbytes, self.source.rows)

    def by_flight(self, client: Any) -> int:
        """Send the data by DoPut of a Flight client, which commits it. Return the number of rows."""
        from pyarrow.flight import FlightDescriptor

        command = {**self.commit.options(), "end": True, "nbytes": self.nbytes}
        answer = upload(client, FlightDescriptor.for_command(json.dumps(command)), self.schema, self.pairs())
        if not isinstance(answer.get("rows"), int):
            raise CatalogError("the server read the whole stream, and does not say how many rows it published")
        return int(answer["rows"])

    def write(self, place: StagePlace, segment: str, reserve: Reserve | None) -> int:
        """Write the data as a segment into the stage of a node on this host. Return the number of rows."""
        validator = Validator(self.schema)
        with ExitStack() as stack:
            path = stack.enter_context(place.open()) / segment
            reserve_all = None if reserve is None else self._reserve_all(reserve)
            writer = stack.enter_context(SegmentWriter(path, self.schema, reserve=reserve_all))
            for batch, metadata in self.pairs():
                writer.write_batch(validator.check(batch), metadata)
        return writer.rows

    def _reserve_all(self, reserve: Reserve) -> Reserve:
        """Return a `reserve` that first requests the room for all data."""
        whole = self.nbytes or 0
        return lambda name, size, wish: reserve(name, max(size, whole), max(wish, whole))
