"""The rows of one version of a dataset, in blocks that can be read in any order."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from dissociated.client.dataset import DatasetHandle
from dissociated.errors import ColumnNotFound, SourceError, WrongKind
from dissociated.memory.region import Region
from dissociated.training.columns import row_width
from dissociated.training.plan import Positions

_BLOCK_BYTES = 1 << 20  # of small record batches that go together
_BLOCKS = 256  # that there are at least, where there are as many record batches


class _Block(NamedTuple):
    """Record batches that follow each other in one part: their numbers are from `first` up to `stop`."""

    part: int
    first: int
    stop: int
    rows: int


class Blocks:
    """A block is a record batch, or several small ones that follow each other: `size` rows of them go together.

    Over shared memory everything is mapped once. Else the sizes of all batches are asked for, which moves no body, and
    each block when it is read. It can be sent to other processes, each of which then reads by itself. Raises what
    reading raises, and WrongKind for tensors. With `keep_files` what is mapped can be mapped once more.
    """

    def __init__(self, dataset: DatasetHandle, columns: Sequence[str] | None, size: int, keep_files: bool) -> None:
        if dataset.info.tensors is not None:
            raise WrongKind(f"{dataset.name!r} holds tensors: read it with client.read_tensors")
        for name in columns or ():
            if name not in dataset.schema.names:
                raise ColumnNotFound(f"there is no column {name!r}; there are {', '.join(dataset.schema.names)}")
        self.dataset = dataset
        self.schema = dataset.scanner(columns).projected_schema
        self._keep_files = keep_files
        self._mapped: dict[int, list[pa.RecordBatch] | None] = {}  # parts; None for those that are not
        self._regions: list[Region] = []  # of these, in the order of their addresses in this process
        self._addresses: list[int] = []
        lengths = [self._lengths(part) for part in range(len(dataset.info.endpoints))]
        together = min(_BLOCK_BYTES // row_width(self.schema), sum(map(sum, lengths)) // _BLOCKS)
        self._blocks = [
            block for part, each in enumerate(lengths) for block in _blocks(part, each, max(size, together))
        ]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_mapped": {}, "_regions": [], "_addresses": []}

    @property
    def rows(self) -> Positions:
        """How many each block has."""
        return np.array([block.rows for block in self._blocks], np.int64)

    def read(self, number: int) -> list[pa.RecordBatch]:
        """The record batches of a block. Raises SourceError where it is not what it was."""
        part, first, stop, rows = self._blocks[number]
        mapped = self._map(part)
        batches = self._fetch(part, first, stop) if mapped is None else mapped[first:stop]
        if sum(batch.num_rows for batch in batches) != rows:
            raise SourceError(
                f"{self.dataset.name!r} has other batches each time it is read: put it into a node, and read it there"
            )
        return batches

    def _fetch(self, part: int, first: int, stop: int) -> list[pa.RecordBatch]:
        names = self.schema.names
        reader = self.dataset.read_part(part, lambda defaults: replace(defaults, columns=names, batches=(first, stop)))
        return [batch.select(names) for batch in reader]

    def _map(self, part: int) -> list[pa.RecordBatch] | None:
        """Where a part lies in shared memory, its batches there."""
        if part not in self._mapped:
            reader = self.dataset.map_part(part, self._keep_files)
            if reader is not None:
                self._regions = sorted([*self._regions, *reader.regions], key=lambda region: region.memory.address)
                self._addresses = [region.memory.address for region in self._regions]
            self._mapped[part] = None if reader is None else [batch.select(self.schema.names) for batch in reader]
        return self._mapped[part]

    def find_region(self, address: int) -> Region | None:
        """What of the shared memory that was mapped has this address in this process, if any."""
        place = bisect_right(self._addresses, address) - 1
        if place < 0 or address >= self._addresses[place] + self._regions[place].size:
            return None
        return self._regions[place]

    def _lengths(self, part: int) -> list[int]:
        """The rows of each record batch."""
        mapped = self._map(part)
        counted = (
            self.dataset.read_part(part, lambda defaults: defaults.without_columns()) if mapped is None else mapped
        )
        return [batch.num_rows for batch in counted]


def slice_pieces(batches: Sequence[pa.RecordBatch], start: int, stop: int) -> Iterator[pa.RecordBatch]:
    """The rows from `start` up to `stop` of all together."""
    for batch in batches:
        first, last = max(0, start), min(stop, batch.num_rows)
        if first < last:
            yield batch.slice(first, last - first)
        start, stop = start - batch.num_rows, stop - batch.num_rows


def _blocks(part: int, lengths: Sequence[int], size: int) -> list[_Block]:
    blocks: list[_Block] = []
    for number, rows in enumerate(lengths):
        if blocks and blocks[-1].rows + rows <= size:
            blocks[-1] = blocks[-1]._replace(stop=number + 1, rows=blocks[-1].rows + rows)
        else:
            blocks.append(_Block(part, number, number + 1, rows))
    return blocks
