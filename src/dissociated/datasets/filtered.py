"""Some rows of a dataset, chosen for one client."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from dissociated.codec.columns import filter_batches, select_fields
from dissociated.codec.split import SplitMessage, split
from dissociated.datasets.base import Dataset
from dissociated.datasets.streamed import StreamedDataset
from dissociated.errors import FormatError, SourceError
from dissociated.protocol.request import REFUSED, RowSelection, Selection

if TYPE_CHECKING:
    from dissociated.codec.filter import RowFilter

_KEEPALIVE_INTERVAL = 2.0  # seconds after which a client is sent a batch without rows: others do not pass for so long


class FilterRefused(SourceError):
    """Rows are not chosen as a client asks for them: it then does so itself."""

    def __init__(self, why: str) -> None:
        super().__init__(f"{REFUSED}: {why}")


def select(whole: Dataset, selection: Selection | None) -> Dataset:
    """The part of a dataset that a request selects. Raises what `Dataset.select` raises, and FilterRefused."""
    if selection is None or selection.rows is None:
        return whole if selection is None else whole.select(selection)
    if not whole.filterable:
        raise FilterRefused(f"{whole.name!r} is no stream of rows that are read for one client")
    whole = whole.open()
    wanted = selection.indices(whole.schema.names)
    if selection.rows.filter is None:
        return FilteredDataset(whole.select(selection), None, range(len(wanted)), selection.rows)
    from dissociated.codec.substrait import parse_filter  # on first use: pyarrow.compute takes long to import

    try:
        received = parse_filter(selection.rows.filter)
        rows, filter_columns = received.bind(whole.schema)
    except FormatError as error:
        raise FilterRefused(str(error)) from None
    needed = sorted({*wanted, *filter_columns}) if selection.rows.exact else wanted
    chosen = _batches(
        whole.select_positions(needed), whole.passing_batches(received.tree, filter_columns), selection.batches
    )
    if not selection.rows.exact:
        return chosen
    rows = rows.among([needed.index(index) for index in filter_columns])
    return FilteredDataset(chosen, rows, [needed.index(index) for index in wanted], selection.rows)


def _batches(chosen: Dataset, passing: Sequence[bool] | None, wanted: tuple[int, int] | None) -> Dataset:
    """A dataset of those of the `wanted` batches that may have rows that pass."""
    if passing is None:
        return chosen if wanted is None else chosen.slice_batches(*wanted)
    first, stop = (0, len(passing)) if wanted is None else wanted
    numbers = [number for number in range(first, min(stop, len(passing))) if passing[number]]
    return chosen if len(numbers) == len(passing) else chosen.pick_batches(numbers)


class FilteredDataset(StreamedDataset):
    """The rows of `source` that pass, and of its columns those at these positions."""

    def __init__(self, source: Dataset, rows: RowFilter | None, columns: Sequence[int], wanted: RowSelection) -> None:
        super().__init__(source.name, select_fields(source.schema, columns))
        self.splits_streams = source.splits_streams
        self._source = source
        self._rows = rows
        self._columns = columns
        self._limit = wanted.limit

    def open_reader(self) -> pa.RecordBatchReader:
        reader = self._source.open_reader()
        mask_of = None if self._rows is None else self._rows.mask
        return filter_batches(reader, mask_of, self._columns, self._limit, keepalive=_KEEPALIVE_INTERVAL)

    def messages(self) -> Iterator[SplitMessage]:
        return split(self.open_reader(), self.options)

    def _select(self, indices: tuple[int, ...]) -> Dataset:
        raise SourceError(f"the columns of some rows of {self.name!r} have been chosen already")
