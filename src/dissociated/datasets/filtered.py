"""Filtered datasets: a subset of the rows of a dataset, chosen by the server for one client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from dissociated.codec.columns import filter_batches, select_fields
from dissociated.datasets.base import Dataset
from dissociated.datasets.static import StaticDataset
from dissociated.datasets.streamed import StreamedDataset
from dissociated.errors import FilterRefused, FormatError, SourceError
from dissociated.protocol.request import RowSelection, Selection

if TYPE_CHECKING:
    from dissociated.codec.filter.row_filter import RowFilter

#: Seconds without a matching row after which an empty batch is sent, so that the client's timeout does not expire.
_KEEPALIVE_INTERVAL = 2.0


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
