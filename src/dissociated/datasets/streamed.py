"""Datasets whose messages are made for each client: a source that is read anew, or the rows that a request selects."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from dissociated.codec.columns import filter_batches, select_columns, select_fields, slice_batches
from dissociated.codec.options import WriteOptions
from dissociated.codec.schemas import schema_difference
from dissociated.codec.split import SplitMessage, split
from dissociated.datasets.base import Dataset, OpenColumns, OpenReader
from dissociated.datasets.static import StaticDataset
from dissociated.errors import FilterRefused, FormatError, ReadOnce, SourceError
from dissociated.protocol.request import RowSelection, Selection

if TYPE_CHECKING:
    from dissociated.codec.filter.row_filter import RowFilter

#: Seconds without a matching row after which an empty batch is sent, so that the client's timeout does not expire.
_KEEPALIVE_INTERVAL = 2.0


class StreamedDataset(Dataset):
    """A dataset whose messages are made for each client, and written with `options`."""

    options: WriteOptions | None = None
    repeatable = False

    def messages(self) -> Iterator[SplitMessage]:
        """Yield the messages of one reading, with packed bodies."""
        return split(self.open_reader(), self.options)

    def slice_batches(self, first: int, stop: int) -> Dataset:
        if self.loses_batches and (first > 0 or stop < sys.maxsize):
            raise ReadOnce(
                f"{self.name!r} was published from a reader, which can be read once, so reading some of its batches "
                "would lose the others: request all of the stream"
            )
        return _StreamedBatches(self, first, stop)


class SourceDataset(StreamedDataset):
    """A dataset of a source that is opened for each client, or of a reader that can be read once.

    `open_columns`, if given, reads some columns without reading the others. `rows` and `min_size` are the number of
    rows and the least number of bytes of all bodies, if these are known.
    """

    def __init__(
        self,
        name: str,
        open_reader: OpenReader,
        options: WriteOptions | None = None,
        one_shot: bool = False,
        open_columns: OpenColumns | None = None,
        rows: int | None = None,
        min_size: int | None = None,
    ) -> None:
        first = open_reader()
        super().__init__(name, first.schema)
        self._first = first if one_shot else None
        self._open_reader = open_reader
        self._one_shot = self.loses_batches = one_shot
        self.splits_streams = not one_shot
        self._lock = threading.Lock()
        self.options = options
        self.open_columns = open_columns
        self.rows = rows
        self._min_size = min_size

    @property
    def min_packed_size(self) -> int | None:
        return self._min_size

    @property
    def exhausted(self) -> bool:  # type: ignore[override]
        return self._one_shot and self._first is None

    def open_reader(self) -> pa.RecordBatchReader:
        if self._one_shot:
            with self._lock:
                reader, self._first = self._first, None
            if reader is not None:
                return reader
            raise SourceError(
                f"{self.name!r} was published from a reader, which can be read once and was read: publish a Table, a "
                "file, or a callable that returns a new reader each time"
            )
        return _check_schema(self, self._open_reader())

    def _select(self, indices: tuple[int, ...]) -> Dataset:
        return _SourceColumns(self, indices)


def _check_schema(dataset: Dataset, reader: pa.RecordBatchReader) -> pa.RecordBatchReader:
    """Return `reader`. Raise SourceError if its schema differs from that of the dataset."""
    if not reader.schema.equals(dataset.schema):
        difference = schema_difference(dataset.schema, reader.schema)
        raise SourceError(f"the source of {dataset.name!r} has another schema than at publication: {difference}")
    return reader


class _SourceColumns(StreamedDataset):
    """Some columns of a source. The other columns are dropped before batches are encoded."""

    def __init__(self, whole: SourceDataset, indices: tuple[int, ...]) -> None:
        super().__init__(whole.name, select_fields(whole.schema, indices))
        self.options = whole.options
        self.loses_batches = whole.loses_batches
        self._whole = whole
        self._indices = indices

    def open_reader(self) -> pa.RecordBatchReader:
        if self._whole.open_columns is not None:
            return _check_schema(self, self._whole.open_columns(self._indices))
        return select_columns(self._whole.open_reader(), self._indices)

    def _select(self, indices: tuple[int, ...]) -> Dataset:
        return _SourceColumns(self._whole, tuple(self._indices[index] for index in indices))


class _StreamedBatches(StreamedDataset):
    """Some batches of a streamed dataset. The batches before them are read, but not encoded."""

    def __init__(self, whole: StreamedDataset, first: int, stop: int) -> None:
        super().__init__(whole.name, whole.schema)
        self.options = whole.options
        self._whole = whole
        self._place = first, stop

    def open_reader(self) -> pa.RecordBatchReader:
        return slice_batches(self._whole.open_reader(), *self._place)

    def _select(self, indices: tuple[int, ...]) -> Dataset:
        return self._whole._select(indices).slice_batches(*self._place)


def select(whole: Dataset, selection: Selection | None) -> Dataset:
    """Return the part of a dataset that a request selects.

    Args:
        whole: The dataset.
        selection: The columns, batches and rows; None for the whole dataset.

    Raises:
        FilterRefused: The server cannot apply the filter or limit.
        ColumnNotFound: A selected column does not exist.
        OptionError: Batches are selected and the batches of the dataset have no numbers.
    """
    if selection is None or selection.rows is None:
        return whole if selection is None else whole.select(selection)
    if not whole.filterable:
        why = f"{whole.name!r} is not a stream of rows that is read for one client"
        raise FilterRefused(f"this server does not apply the filter: {why}")
    whole = whole.open()
    indices = selection.indices(whole.schema.names)
    if selection.rows.filter is None:
        return FilteredStream(whole.select(selection), None, range(len(indices)), selection.rows)
    # Imported on first use, since pyarrow.compute loads slowly.
    from dissociated.codec.filter.substrait import parse_filter

    try:
        received = parse_filter(selection.rows.filter)
        rows, filter_columns = received.bind(whole.schema)
    except FormatError as error:
        raise FilterRefused(f"this server does not apply the filter: {error}") from None
    needed = sorted({*indices, *filter_columns}) if selection.rows.exact else indices
    dataset = _batches(
        whole.select_positions(needed), whole.passing_batches(received.tree, filter_columns), selection.batches
    )
    if not selection.rows.exact:
        return dataset
    rows = rows.at_columns([needed.index(index) for index in filter_columns])
    return FilteredStream(dataset, rows, [needed.index(index) for index in indices], selection.rows)


def _batches(dataset: Dataset, passing: Sequence[bool] | None, batch_range: tuple[int, int] | None) -> Dataset:
    """Return a dataset of the batches in `batch_range` that may have rows that pass the filter.

    `passing` has a flag for each batch, or is None if no statistics are known. None as `batch_range` means all batches.
    """
    if passing is None:
        return dataset if batch_range is None else dataset.slice_batches(*batch_range)
    first, stop = (0, len(passing)) if batch_range is None else batch_range
    numbers = [number for number in range(first, min(stop, len(passing))) if passing[number]]
    return dataset if len(numbers) == len(passing) else dataset.pick_batches(numbers)


class FilteredStream(StreamedDataset):
    """The rows of `source` that pass `rows`, up to the limit of `selection`, with the given `columns` alone."""

    def __init__(
        self, source: Dataset, rows: RowFilter | None, columns: Sequence[int], selection: RowSelection
    ) -> None:
        super().__init__(source.name, select_fields(source.schema, columns))
        self.splits_streams = source.splits_streams
        self._source = source
        self._rows = rows
        self._columns = columns
        self._limit = selection.limit

    def open_reader(self) -> pa.RecordBatchReader:
        reader = self._source.open_reader()
        mask_of = None if self._rows is None else self._rows.mask
        never_blocks = isinstance(self._source, StaticDataset)
        return filter_batches(reader, mask_of, self._columns, self._limit, _KEEPALIVE_INTERVAL, never_blocks)

    def _select(self, indices: tuple[int, ...]) -> Dataset:
        raise SourceError(f"the columns of filtered rows of {self.name!r} are already selected")
