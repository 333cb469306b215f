"""Some of the columns of a stream of record batches, some of the batches, or some of the rows, by their position."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import pyarrow as pa

from dissociated.codec.batches import BatchReader
from dissociated.codec.split import BatchAndMetadata, batches


def select_fields(schema: pa.Schema, indices: Sequence[int]) -> pa.Schema:
    """`schema` with these of its fields alone."""
    return pa.schema([schema.field(index) for index in indices], schema.metadata)


def select_columns(reader: pa.RecordBatchReader, indices: Sequence[int]) -> pa.RecordBatchReader:
    """The same batches with these of their columns alone, or with none: their row counts stay."""
    schema = select_fields(reader.schema, indices)
    return BatchReader(schema, ((batch.select([*indices]), metadata) for batch, metadata in batches(reader)))


def slice_batches(reader: pa.RecordBatchReader, first: int, stop: int) -> pa.RecordBatchReader:
    """The batches from number `first` up to `stop`, as far as they are there. The others before `stop` are read too."""
    return BatchReader(reader.schema, islice(batches(reader), first, stop))


def slice_rows(reader: pa.RecordBatchReader, rows: range) -> pa.RecordBatchReader:
    """These rows. No batch is read after the last of them; a part of one has the metadata of the whole."""

    def pairs() -> Iterator[BatchAndMetadata]:
        some = batches(reader)
        at = 0
        while at < rows.stop and (pair := next(some, None)) is not None:
            batch, metadata = pair
            first, end = max(0, rows.start - at), min(rows.stop - at, batch.num_rows)
            if first < end:
                yield batch.slice(first, end - first), metadata
            at += batch.num_rows

    return BatchReader(reader.schema, pairs())
