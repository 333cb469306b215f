"""A version of a dataset in shared memory, mapped by this process. A `DatasetHandle` keeps it for many scans."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import compress, groupby
from operator import itemgetter
from typing import Any, Self

import pyarrow as pa
import pyarrow.dataset as ds

from dissociated.client.request import Filtering, ReadRequest
from dissociated.codec.batches import BatchReader
from dissociated.codec.columns import filter_batches, positions, select_fields
from dissociated.codec.filter.pruning import passing_batches, whole_batches
from dissociated.codec.filter.row_filter import RowFilter, application_errors
from dissociated.codec.filter.statistics import Statistics, StatisticsCollector, read_statistics
from dissociated.codec.filter.substrait import filter_tree
from dissociated.codec.inplace import MappedReader
from dissociated.codec.nesting import contains, is_extension
from dissociated.codec.split import BatchAndMetadata, batches

_MAX_BATCHES = 1 << 14  # most batches of a version that is kept: each takes some kB of this process's own memory
_FEW_ROWS = 1 << 16  # a version of a single batch with fewer rows is small
_WHOLE_BATCH = 1 << 30  # rows: larger than any batch, so that libarrow's scanner does not cut batches
_PLAIN_NAME = re.compile(r"[^\W\d]\w*")  # libarrow's scanner reads some other names as paths
#: Names of columns that libarrow's scanner adds by itself.
_SCANNER_NAMES = {"__filename", "__fragment_index", "__batch_index", "__last_in_fragment"}
_UNFILTERABLE = (
    pa.types.is_string_view,
    pa.types.is_binary_view,
    pa.types.is_list_view,
    pa.types.is_large_list_view,
    pa.types.is_run_end_encoded,
    pa.types.is_union,
    is_extension,
)


class MappedVersion:
    """The record batches of a version, which lie in shared memory, with their metadata.

    The memory is given back when this object, and all arrays in the memory, have been collected.
    """

    def __init__(
        self,
        schema: pa.Schema,
        pairs: Sequence[BatchAndMetadata],
        statistics: Statistics,
        nbytes: int,
        computes_statistics: bool,
    ) -> None:
        #: The schema of all columns.
        self.schema = schema
        #: The size of the mapped memory in bytes.
        self.nbytes = nbytes
        self._pairs = pairs
        self._numbers = range(len(pairs))
        # A table has neither metadata of batches nor batches without rows.
        self._is_table = all(batch.num_rows and metadata is None for batch, metadata in pairs)
        # For few rows, statistics and libarrow's threads cost more than they save.
        self._is_small = len(pairs) < 2 and sum(batch.num_rows for batch, _ in pairs) < _FEW_ROWS
        self._statistics = statistics
        self._computes_statistics = computes_statistics

    @classmethod
    def read(cls, readers: Sequence[pa.RecordBatchReader], computes_statistics: bool = True) -> Self | None:
        """Read all batches of `readers`, which follow each other.

        Args:
            readers: The readers.
            computes_statistics: Whether statistics that the segments lack are computed for a filter.

        Returns:
            The version; None if not all of it is mapped, or if it has too many batches. The readers are closed then.
        """
        mapped = [reader for reader in readers if isinstance(reader, MappedReader) and reader.is_mapped]
        if not mapped or len(mapped) < len(readers) or any(reader.schema != mapped[0].schema for reader in mapped):
            _close(readers)
            return None
        pairs: list[BatchAndMetadata] = []
        statistics = []
        for reader in mapped:
            first = len(pairs)
            for pair in batches(reader):
                pairs.append(pair)
                if len(pairs) > _MAX_BATCHES:
                    _close(readers)
                    return None
            statistics.append(_stored_statistics(reader, [batch.num_rows for batch, _ in pairs[first:]]))
        nbytes = sum(region.size for reader in mapped for region in reader.regions)
        return cls(mapped[0].schema, pairs, Statistics.concatenate(statistics), nbytes, computes_statistics)

    @property
    def has_statistics(self) -> bool:
        """Return whether there are statistics of a column."""
        return bool(self._statistics.bounds)

    @property
    def batches(self) -> Sequence[pa.RecordBatch]:
        """The record batches."""
        return [batch for batch, _ in self._pairs]

    def select(self, request: ReadRequest) -> pa.RecordBatchReader:
        """Return a reader of the columns and rows that `request` selects. Errors are those of `Client.read`."""
        selected = self._selected_columns(request)
        if request.filter is None:
            reader = self._reader(self._numbers, selected)
            if request.limit is None:
                return reader
            return filter_batches(reader, None, range(len(selected)), request.limit)
        rows = RowFilter.bind(request.filter, self.schema)
        uses_whole = request.filtering is Filtering.EXACT and request.limit is None
        passing, whole = self._prune(rows, uses_whole)
        if request.filtering is not Filtering.EXACT or (uses_whole and whole.issuperset(passing)):
            return self._reader(passing, selected)
        needed = sorted({*selected, *rows.columns})
        is_scanned = request.limit is None and selected and self._is_table and not self._is_small
        if is_scanned and self._is_scannable(needed):
            return self._scan(passing, whole, rows, needed, selected)
        rows = rows.at_columns([needed.index(index) for index in rows.columns])
        columns = [needed.index(index) for index in selected]
        return filter_batches(self._reader(passing, needed), rows.mask, columns, request.limit, never_blocks=True)

    def table(self, request: ReadRequest) -> pa.Table:
        """Return the columns and rows that `request` selects as a table. Errors are those of `Client.read`."""
        if request.selects_rows:
            return self.select(request).read_all()
        return self._table(self._numbers, self._selected_columns(request))

    def _scan(
        self,
        passing: Sequence[int],
        whole: frozenset[int],
        rows: RowFilter,
        needed: Sequence[int],
        selected: Sequence[int],
    ) -> pa.RecordBatchReader:
        """Return a reader of the rows that pass. libarrow filters the batches of which only some rows pass."""
        names = [self.schema.field(index).name for index in selected]
        if whole.isdisjoint(passing):
            return _scan(self._table(passing, needed), rows, names)

        def pairs() -> Iterator[BatchAndMetadata]:
            for is_whole, group in groupby(passing, whole.__contains__):
                numbers = [*group]
                yield from batches(
                    self._reader(numbers, selected) if is_whole else _scan(self._table(numbers, needed), rows, names)
                )

        return BatchReader(select_fields(self.schema, selected), pairs())

    def _selected_columns(self, request: ReadRequest) -> list[int]:
        selection = request.columns_selected
        if selection is not None:
            selection.indices(self.schema.names)  # raises an error if a column does not exist
        return positions(self.schema, request.columns)

    def _reader(self, numbers: Sequence[int], columns: Sequence[int]) -> pa.RecordBatchReader:
        """Return a reader of some columns of the batches with these numbers."""
        if not self._is_table or not columns:
            chosen = (self._pairs[number] for number in numbers)
            pairs = ((batch.select([*columns]), metadata) for batch, metadata in chosen)
            return BatchReader(select_fields(self.schema, columns), pairs)
        return TableReader(self._table(numbers, columns).to_reader())

    def _table(self, numbers: Sequence[int], columns: Sequence[int]) -> pa.Table:
        if len(numbers) == len(self._pairs):
            return self.whole.select([*columns])
        chosen = (self._pairs[number][0].select([*columns]) for number in numbers)
        return pa.Table.from_batches(chosen, select_fields(self.schema, columns))

    @cached_property
    def whole(self) -> pa.Table:
        """All rows and columns as a table."""
        return pa.Table.from_batches([batch for batch, _ in self._pairs], self.schema)

    def _is_scannable(self, columns: Sequence[int]) -> bool:
        """Return whether libarrow's scanner can filter these columns."""
        scannable, names = self._scannable
        return scannable.issuperset(columns) and len({names[index] for index in columns}) == len(columns)

    @cached_property
    def _scannable(self) -> tuple[set[int], Sequence[str]]:
        fields = enumerate(self.schema)
        scannable = {
            index
            for index, field in fields
            if _PLAIN_NAME.fullmatch(field.name)
            and field.name not in _SCANNER_NAMES
            and not contains(field.type, _is_unfilterable)
        }
        return scannable, self.schema.names

    def passing_numbers(self, filter_: Any) -> Sequence[int]:
        """Return the numbers of the batches that may have rows that pass. Errors are those of `RowFilter.bind`."""
        return self._prune(RowFilter.bind(filter_, self.schema), False)[0]

    def _prune(self, rows: RowFilter, uses_whole: bool) -> tuple[Sequence[int], frozenset[int]]:
        """Return the numbers of the batches that may have rows that pass, and of the batches in which all rows pass.

        The latter are left out without `uses_whole`.
        """
        tree = None if self._is_small else filter_tree(rows, self.schema)
        if tree is None:
            return self._numbers, frozenset()
        statistics = self._statistics_of(rows.columns)
        passing = [*compress(self._numbers, passing_batches(tree, statistics, rows.columns))]
        if not uses_whole:
            return passing, frozenset()
        return passing, frozenset(compress(self._numbers, whole_batches(tree, statistics, rows.columns)))

    def _statistics_of(self, columns: Sequence[int]) -> Statistics:
        """Return the statistics, for at least these columns. Missing statistics of a column are computed once."""
        statistics = self._statistics
        missing = [column for column in columns if column not in statistics.bounds]
        if missing and self._computes_statistics:
            collector = StatisticsCollector(self.schema, missing, thorough=True)
            for batch, _ in self._pairs:
                collector.add(batch)
            computed = collector.statistics()
            bounds = {} if computed is None else computed.bounds
            statistics = self._statistics = Statistics(statistics.num_rows, {**statistics.bounds, **bounds})
        return statistics


class TableReader(BatchReader):
    """A reader of the batches of `reader`, without metadata of batches. C++ code reads from `reader` directly.

    Args:
        reader: The other reader.
        filter_: The filter that `reader` applies. If it cannot be applied, the error names it.
    """

    def __init__(self, reader: pa.RecordBatchReader, filter_: RowFilter | None = None) -> None:
        # `_without_metadata` is no method, because that would make a reference cycle: libarrow would keep this object,
        # and this object libarrow's reader.
        super().__init__(reader.schema, _without_metadata(reader, filter_))
        self._reader = reader
        self._filter = filter_

    def read_all(self) -> pa.Table:
        """Return all remaining batches as one table."""
        self._begin()
        with application_errors(self._filter):
            table = self._reader.read_all()
        self._at_end = True
        return table

    def close(self) -> None:
        """Stop reading, and release the source."""
        super().close()
        # Without its last reference, libarrow's scanner stops. If it is closed, it filters all remaining rows first.
        self._reader = pa.RecordBatchReader.from_batches(self.schema, map(itemgetter(0), self._pairs))

    def __arrow_c_stream__(self, requested_schema: object = None) -> Any:
        self._begin()
        self._at_end = True  # the consumer of the stream reads all batches
        return self._reader.__arrow_c_stream__(requested_schema)


def _without_metadata(reader: pa.RecordBatchReader, filter_: RowFilter | None) -> Iterator[BatchAndMetadata]:
    with application_errors(filter_):
        for batch in reader:
            yield batch, None


def _scan(table: pa.Table, rows: RowFilter, columns: Sequence[str]) -> pa.RecordBatchReader:
    scanner = ds.InMemoryDataset(table).scanner(columns=[*columns], filter=rows.expression, batch_size=_WHOLE_BATCH)
    with application_errors(rows):
        return TableReader(scanner.to_reader(), rows)


def _is_unfilterable(type_: pa.DataType) -> bool:
    return any(is_kind(type_) for is_kind in _UNFILTERABLE)


def _stored_statistics(reader: MappedReader, num_rows: Sequence[int]) -> Statistics:
    stored = None
    if len(reader.regions) == 1:
        stored = read_statistics(reader.regions[0].memory, reader.ends[0], reader.schema, num_rows)
    return stored or Statistics.unknown(num_rows)


def _close(readers: Sequence[pa.RecordBatchReader]) -> None:
    for reader in readers:
        reader.close()
