"""Some of the columns of a stream of record batches, some of the batches, or some of the rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

import numpy as np
import pyarrow as pa

from dissociated.codec.batches import BatchReader
from dissociated.codec.nesting import contains
from dissociated.codec.split import BatchAndMetadata, batches
from dissociated.errors import RemoteProtocolError


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


def pick_batches(reader: pa.RecordBatchReader, numbers: Sequence[int]) -> pa.RecordBatchReader:
    """The batches of these numbers, which ascend, as far as they are there. None after the last of them is read."""
    stop = numbers[-1] + 1 if numbers else 0
    wanted = numbers if isinstance(numbers, range) else {*numbers}
    numbered = enumerate(islice(batches(reader), stop))
    return BatchReader(reader.schema, (pair for number, pair in numbered if number in wanted))


def even_batches(pieces: Iterable[pa.RecordBatch], rows: int) -> Iterator[pa.RecordBatch]:
    """The same rows in batches of just so many, the last but for what is left.

    pyarrow cuts Parquet where a row group ends, or an array is full, and that depends on the columns that are read.
    Batches are known by their numbers, whatever is read of them.
    """
    waiting: list[pa.RecordBatch] = []
    missing = rows
    for piece in pieces:
        left = piece
        while left.num_rows:
            waiting.append(left[:missing])
            missing -= waiting[-1].num_rows
            left = left[waiting[-1].num_rows :]
            if not missing:
                yield _concatenate(waiting)
                waiting, missing = [], rows
    if waiting:
        yield _concatenate(waiting)


def _concatenate(pieces: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    return pieces[0] if len(pieces) == 1 else pa.concat_batches(pieces)


def slice_rows(reader: pa.RecordBatchReader, rows: range) -> pa.RecordBatchReader:
    """These rows. No batch is read after the last of them; a part of one has the metadata of the whole.

    Reading raises RemoteProtocolError where some of them are not there.
    """

    def pairs() -> Iterator[BatchAndMetadata]:
        remaining = batches(reader)
        at = 0
        while at < rows.stop and (pair := next(remaining, None)) is not None:
            batch, metadata = pair
            first, end = max(0, rows.start - at), min(rows.stop - at, batch.num_rows)
            if first < end:
                yield batch.slice(first, end - first), metadata
            at += batch.num_rows
        if at < rows.stop:
            raise RemoteProtocolError(f"the stream ended after {at:,} rows, and should have {rows.stop:,} or more")

    return BatchReader(reader.schema, pairs())


def filter_batches(
    reader: pa.RecordBatchReader,
    mask_of: Callable[[pa.RecordBatch], pa.BooleanArray] | None,
    columns: Sequence[int],
    limit: int | None = None,
    keepalive: float = float("inf"),
) -> pa.RecordBatchReader:
    """Return the rows that pass, at most `limit` of them, with the columns at these positions of the reader.

    `mask_of` returns a mask for a batch, which is true for the rows that pass, and false or null for the others.

    No batch is read after the last such row. Batches without such rows are left out, but for one after every
    `keepalive` seconds in which nothing else came: so whoever waits knows that the source lives.
    """
    schema = select_fields(reader.schema, columns)

    def pairs() -> Iterator[BatchAndMetadata]:
        left, last = limit, time.monotonic()
        remaining = batches(reader)
        while left != 0 and (pair := next(remaining, None)) is not None:
            batch, metadata = pair
            mask = None if mask_of is None else mask_of(batch)
            batch = batch.select([*columns])
            if mask is not None and mask.true_count < len(mask):  # else it stays where it lies
                batch = _passing(batch, mask)
            batch = batch[:left]
            if left is not None:
                left -= batch.num_rows
            if batch.num_rows or time.monotonic() - last > keepalive:
                yield batch, metadata
                last = time.monotonic()

    return BatchReader(schema, pairs())


def _passing(batch: pa.RecordBatch, mask: pa.BooleanArray) -> pa.RecordBatch:
    """The rows for which `mask` is true."""
    try:
        return batch.filter(mask)
    except pa.ArrowNotImplementedError:  # of views and run-end encoded arrays libarrow can only put slices together
        passes = np.concatenate([[0], mask.fill_null(False).to_numpy(zero_copy_only=False).view(np.int8), [0]])
        edges = np.flatnonzero(np.diff(passes)).tolist()
        runs = [batch.slice(first, stop - first) for first, stop in zip(edges[::2], edges[1::2], strict=True)]
        return pa.concat_batches(runs) if runs else batch[:0]


def values_size(rows: pa.RecordBatch | pa.Table) -> int:
    """Bytes of these rows, which are valid. With unions among them, those of the whole buffers that they lie in."""
    # Without unions `nbytes` of pyarrow is exact; on a union without rows it crashes.
    has_union = any(contains(type_, pa.types.is_union) for type_ in rows.schema.types)
    return int(rows.get_total_buffer_size() if has_union else rows.nbytes)
