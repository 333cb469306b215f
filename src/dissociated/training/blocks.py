"""Blocks of rows of one version of a dataset, which can be read in any order."""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from dissociated.client.dataset import DatasetHandle
from dissociated.client.partitions import selected_schema
from dissociated.client.plan import row_filter
from dissociated.errors import ColumnNotFound, ReadOnce, SourceError, WrongKind
from dissociated.memory.region import Region
from dissociated.training.columns import plain, rearranging, row_width
from dissociated.training.permutation import Positions

_BLOCK_BYTES = 1 << 20  # bytes of a block up to which small record batches are combined
_MIN_BLOCKS = 256  # number of blocks that remain, about, after record batches were combined
_MANY_BATCHES = 0, sys.maxsize - 1  # more than any part has, but not all that there may be


class _Block(NamedTuple):
    """Consecutive record batches of one part, with the numbers from `first` up to, but not including, `stop`."""

    part: int
    first: int
    stop: int
    rows: int


class Blocks:
    """The blocks of a dataset. A block is a record batch, or several small record batches that follow one another.

    Over shared memory, every part is mapped once. Over other transports, only the number of rows of each batch is read
    at first, without bodies, and each block when it is needed. The object can be pickled; each process then maps and
    reads by itself.

    Args:
        dataset: The dataset.
        columns: The columns to read; None for all.
        size: The number of rows up to which record batches are combined into a block.
        keep_files: Whether to keep the files of mapped regions, so that they can be mapped again privately.
        filter: The filter of the rows; None for all rows. Its columns are read at once.

    Raises:
        WrongKind: The dataset holds tensors.
        ColumnNotFound: The dataset lacks one of the columns.
        OptionError: The filter does not fit the columns.
        ReadOnce: The dataset is a stream that can be read only once.
        DissociatedError: Further errors of reading.
    """

    def __init__(
        self, dataset: DatasetHandle, columns: Sequence[str] | None, size: int, keep_files: bool, filter: Any = None
    ) -> None:
        if dataset.info.tensors is not None:
            raise WrongKind(f"{dataset.name!r} holds tensors: read it with client.read_tensors")
        self.dataset = dataset
        self.schema = selected_schema(dataset.schema, columns)
        self._keep_files = keep_files
        self._mapped: dict[int, list[pa.RecordBatch] | None] = {}  # batches by part; None if it cannot be mapped
        self._regions: list[Region] = []  # all mapped regions, sorted by their address in this process
        self._addresses: list[int] = []  # the addresses of `_regions`
        self._filter = None if filter is None else row_filter(filter, dataset.schema)
        self._filter_names = [] if self._filter is None else [dataset.schema.names[at] for at in self._filter.columns]
        self._distinct: dict[str, pa.Array] = {}  # the results of `distinct`, by column
        #: The number of rows of each record batch, by part.
        self._lengths: list[list[int]] = []
        #: The positions in each record batch of the rows that pass the filter, by part.
        self._passing: list[list[Positions]] = []
        for part in range(len(dataset.info.endpoints)):
            self._count_rows(part)
        together = min(_BLOCK_BYTES // max(1, row_width(self.schema)), sum(map(sum, self._lengths)) // _MIN_BLOCKS)
        max_rows = max(size, together)
        self._blocks = [
            block for part, lengths in enumerate(self._lengths) for block in _combine(part, lengths, max_rows)
        ]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_mapped": {}, "_regions": [], "_addresses": []}

    @property
    def rows(self) -> Positions:
        """The number of rows of each block that pass the filter."""
        return np.array(
            [
                block.rows
                if self._filter is None
                else sum(map(len, self._passing[block.part][block.first : block.stop]))
                for block in self._blocks
            ],
            np.int64,
        )

    def row_bytes(self, codes: Sequence[str]) -> int:
        """Return the approximate number of bytes of a row in memory, which is the same for all readers of the version.

        Columns in `codes` are numbers of 32 bits. Strings and nested values have the rest of an average row of the
        dataset. If some of them are not read, or the catalog does not know the size, a size is assumed for each.
        """
        values = pa.schema([field for field in self.schema if field.name not in codes])
        unread = pa.schema([field for field in self.dataset.schema if field.name not in self.schema.names])
        assumed, fixed = row_width(values), row_width(values, 0)
        nbytes, rows = self.dataset.info.nbytes, sum(map(sum, self._lengths))
        if assumed > fixed and row_width(unread) == row_width(unread, 0) and nbytes is not None and rows:
            other_bytes = row_width(self.dataset.schema, 0) - fixed
            assumed = max(assumed, -(-nbytes // rows) - other_bytes)
        return max(1, assumed + 4 * len({*codes}))

    @property
    def longest(self) -> int:
        """The number of rows of the longest block; 0 if there is none."""
        return max((block.rows for block in self._blocks), default=0)

    def mapped(self, columns: Sequence[str]) -> list[pa.RecordBatch] | None:
        """Return these columns of all record batches, or None if a part that has rows cannot be mapped."""
        selected: list[pa.RecordBatch] = []
        for part, lengths in enumerate(self._lengths):
            batches = self._map(part) if any(lengths) else []
            if batches is None:
                return None
            selected += [batch.select(columns) for batch in batches]
        return selected

    def distinct(self, name: str) -> pa.Array:
        """Return the distinct values of a column, without null. All of the column is read, or its dictionaries.

        Raises:
            ColumnNotFound: There is no such column.
            WrongKind: pyarrow cannot find the distinct values of its type.
        """
        import pyarrow.compute as pc  # on first use: it is slow to import

        if name not in self.schema.names:
            raise ColumnNotFound(f"codes has {name!r}; the columns are {', '.join(self.schema.names)}")
        type_ = self.schema.field(name).type
        try:
            distinct = plain(pa.nulls(0, type_.value_type if pa.types.is_dictionary(type_) else type_))
            pc.is_in(distinct.unique(), distinct)
        except pa.ArrowNotImplementedError:
            raise WrongKind(
                f"column {name!r} of codes= is {type_}, whose distinct values pyarrow cannot find: leave it "
                "out of codes="
            ) from None
        for part in range(len(self._lengths)):
            for batch in self._map(part) or self._read_whole(part, [name]):
                new = _new_values(batch.column(name), distinct)
                distinct = pa.concat_arrays([distinct, new.unique()]) if len(new) else distinct
        self._distinct[name] = distinct
        return distinct

    def _read_whole(self, part: int, columns: Sequence[str]) -> pa.RecordBatchReader:
        """Open a reader over columns of a part."""
        request = replace(self.dataset.defaults, columns=columns)
        if self.dataset.info.endpoints[part].rows is None:
            # A server refuses some batches of a stream that can be read only once, and gives all of them.
            request = replace(request, batches=_MANY_BATCHES)
        return self.dataset.read_part(part, request)

    def passing(self) -> Positions | None:
        """Return the numbers of the rows that pass the filter, counted over all parts; None without a filter."""
        if self._filter is None:
            return None
        lengths = [length for part in self._lengths for length in part]
        firsts = np.cumsum([0, *lengths]).tolist()
        passing = [positions for part in self._passing for positions in part]
        numbers = (positions + first for positions, first in zip(passing, firsts, strict=False))
        return np.concatenate([np.empty(0, np.int64), *numbers])

    def read(self, number: int) -> list[pa.RecordBatch]:
        """Return the rows of a block that pass the filter.

        Raises:
            SourceError: The source has changed: other numbers of rows, other rows that pass the filter, or values that
                `distinct` has not found. The values of other columns are not compared.
        """
        part, first, stop, _ = self._blocks[number]
        mapped = self._map(part)
        batches = self._fetch(part, first, stop) if mapped is None else mapped[first:stop]
        is_same = [batch.num_rows for batch in batches] == self._lengths[part][first:stop]
        if not is_same or (mapped is None and self._is_changed(part, first, batches)):
            raise SourceError(
                f"{self.dataset.name!r} has other batches each time it is read: put it into a node, and read it there"
            )
        batches = [batch.select(self.schema.names) for batch in batches]
        if self._filter is None:
            return batches
        passing = self._passing[part][first:stop]
        return [
            batch if len(rows) == batch.num_rows else _take(batch, rows)
            for batch, rows in zip(batches, passing, strict=True)
        ]

    def _fetch(self, part: int, first: int, stop: int) -> list[pa.RecordBatch]:
        columns = [*dict.fromkeys([*self.schema.names, *self._filter_names])]
        request = replace(self.dataset.defaults, columns=columns, batches=(first, stop))
        return [*self.dataset.read_part(part, request)]

    def _is_changed(self, part: int, first: int, batches: Sequence[pa.RecordBatch]) -> bool:
        """Return whether batches, from number `first` on, have other rows that pass, or values that are not distinct.

        A source that is read anew for each request may have changed. Rows that pass are taken by their positions.
        """
        if self._filter is not None:
            for batch, positions in zip(batches, self._passing[part][first : first + len(batches)], strict=True):
                if not np.array_equal(self._find_passing(batch), positions):
                    return True
        return any(
            len(_new_values(batch.column(name), distinct))
            for name, distinct in self._distinct.items()
            for batch in batches
        )

    def _find_passing(self, batch: pa.RecordBatch) -> Positions:
        """Return the positions of the rows of a batch that pass the filter."""
        assert self._filter is not None, "the caller has checked this"
        rows = self._filter.at_columns(range(len(self._filter_names)))
        mask = rows.mask(batch.select(self._filter_names)).fill_null(False)
        return np.flatnonzero(mask.to_numpy(zero_copy_only=False))

    def _map(self, part: int) -> list[pa.RecordBatch] | None:
        """Return the batches of a part in shared memory, or None if the part cannot be mapped."""
        if part not in self._mapped:
            reader = self.dataset.map_part(part, self._keep_files)
            if reader is not None:
                self._regions = sorted([*self._regions, *reader.regions], key=lambda region: region.memory.address)
                self._addresses = [region.memory.address for region in self._regions]
            self._mapped[part] = None if reader is None else [*reader]
        return self._mapped[part]

    def find_region(self, address: int) -> Region | None:
        """Return the mapped region that contains this address of this process, or None."""
        place = bisect_right(self._addresses, address) - 1
        if place < 0 or address >= self._addresses[place] + self._regions[place].size:
            return None
        return self._regions[place]

    def _count_rows(self, part: int) -> None:
        """Count the rows of each record batch of a part, and find those that pass the filter."""
        lengths, passing = [], []
        try:
            # Without columns, only metadata is sent, which has the number of rows.
            for batch in self._map(part) or self._read_whole(part, self._filter_names):
                lengths.append(batch.num_rows)
                if self._filter is not None:
                    passing.append(self._find_passing(batch))
        except ReadOnce:
            raise ReadOnce(
                f"{self.dataset.name!r} is a stream that can be read only once, and loaders read their rows more than "
                "once: put it into a node, and read it there"
            ) from None
        self._lengths.append(lengths)
        self._passing.append(passing)


def _take(batch: pa.RecordBatch, rows: Positions) -> pa.RecordBatch:
    """Return the rows at these positions, which must ascend. Raise OptionError if pyarrow cannot take them."""
    try:
        return batch.take(pa.array(rows))
    except pa.ArrowNotImplementedError:
        columns = []
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            with rearranging(name):
                columns.append(_take_values(column, rows))
        return pa.RecordBatch.from_arrays(columns, schema=batch.schema)


def _take_values(array: pa.Array, rows: Positions) -> pa.Array:
    """Return the values at these positions, which must ascend, also of strings in views and of encoded runs.

    Slices of views are not joined: the result would refer to all buffers of every slice.
    """
    if pa.types.is_run_end_encoded(array.type):
        if not len(rows):
            return array[:0]
        runs = np.searchsorted(array.run_ends.to_numpy(), rows + array.offset, side="right")
        ends = np.append(np.flatnonzero(np.diff(runs)) + 1, len(rows))
        run_ends = pa.array(ends, array.type.run_end_type)
        return pa.RunEndEncodedArray.from_arrays(run_ends, _take_values(array.values, runs[ends - 1]), array.type)
    values = plain(array)
    selected = values.take(pa.array(rows))
    return selected if values is array else selected.cast(array.type)


def _new_values(column: pa.Array, distinct: pa.Array) -> pa.Array:
    """Return the values of a column, or of its dictionary, that are not among `distinct`, without null."""
    import pyarrow.compute as pc  # on first use: it is slow to import

    values = plain(column.dictionary if pa.types.is_dictionary(column.type) else column.unique())
    return values.filter(pc.invert(pc.is_in(values, distinct))).drop_null()


def slice_pieces(batches: Sequence[pa.RecordBatch], start: int, stop: int) -> Iterator[pa.RecordBatch]:
    """Yield slices of `batches` that together are the rows from `start` up to, but not including, `stop`."""
    for batch in batches:
        first, last = max(0, start), min(stop, batch.num_rows)
        if first < last:
            yield batch.slice(first, last - first)
        start, stop = start - batch.num_rows, stop - batch.num_rows


def _combine(part: int, lengths: Sequence[int], max_rows: int) -> list[_Block]:
    """Combine the record batches of a part into blocks of up to `max_rows` rows. A longer batch is a block alone."""
    blocks: list[_Block] = []
    for number, rows in enumerate(lengths):
        if blocks and blocks[-1].rows + rows <= max_rows:
            blocks[-1] = blocks[-1]._replace(stop=number + 1, rows=blocks[-1].rows + rows)
        else:
            blocks.append(_Block(part, number, number + 1, rows))
    return blocks
