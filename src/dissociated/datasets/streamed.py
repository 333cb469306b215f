"""Datasets whose source is read anew for each client."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pyarrow as pa

from dissociated.codec.columns import select_columns, select_fields, slice_batches
from dissociated.codec.options import WriteOptions
from dissociated.codec.schemas import schema_difference
from dissociated.codec.split import SplitMessage, split
from dissociated.datasets.base import Dataset, OpenColumns, OpenReader
from dissociated.errors import SourceError


class StreamedDataset(Dataset):
    """A dataset whose messages are made for each client, and written with `options`."""

    options: WriteOptions | None = None
    repeatable = False

    def messages(self) -> Iterator[SplitMessage]:
        """Yield the messages of one reading, with packed bodies."""
        return split(self.open_reader(), self.options)

    def slice_batches(self, first: int, stop: int) -> Dataset:
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
        self._one_shot = one_shot
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
