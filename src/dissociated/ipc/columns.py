"""Some of the columns of a stream of record batches, some of the batches, or some of the rows, by their position."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import pyarrow as pa


def only(schema: pa.Schema, indices: Sequence[int]) -> pa.Schema:
    """`schema` with these of its fields alone."""
    return pa.schema([schema.field(index) for index in indices], schema.metadata)


def selected(reader: pa.RecordBatchReader, indices: Sequence[int]) -> pa.RecordBatchReader:
    """The same batches with these of their columns alone, or with none: their row counts stay."""
    schema = only(reader.schema, indices)
    return pa.RecordBatchReader.from_batches(schema, (batch.select([*indices]) for batch in reader))


def sliced(reader: pa.RecordBatchReader, first: int, stop: int) -> pa.RecordBatchReader:
    """The batches from number `first` up to `stop`, as far as they are there. The others before `stop` are read too."""
    return pa.RecordBatchReader.from_batches(reader.schema, islice(reader, first, stop))


def between(batches: Iterator[pa.RecordBatch], rows: range) -> Iterator[pa.RecordBatch]:
    """These rows of batches, of which none is read after the last of them."""
    at = 0
    while at < rows.stop and (batch := next(batches, None)) is not None:
        first, end = max(0, rows.start - at), min(rows.stop - at, batch.num_rows)
        if first < end:
            yield batch.slice(first, end - first)
        at += batch.num_rows
