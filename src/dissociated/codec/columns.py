"""Selections from a stream of record batches: some columns, some batches, or some rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, islice

import numpy as np
import pyarrow as pa

from dissociated.codec.batches import BatchReader
from dissociated.codec.nesting import contains
from dissociated.codec.split import BatchAndMetadata, batches
from dissociated.errors import RemoteProtocolError

#: Rows, batches and bytes whose mask is computed at once, if the reader never blocks.
_GROUP_ROWS = 1 << 16
_GROUP_BATCHES = 1 << 10
_GROUP_BYTES = 8 << 20


def select_fields(schema: pa.Schema, indices: Sequence[int]) -> pa.Schema:
    """Return `schema` with only the fields at these indices."""
    return pa.schema([schema.field(index) for index in indices], schema.metadata)


def positions(schema: pa.Schema, columns: Sequence[str] | None) -> list[int]:
    """Return the positions of the columns that exist, in the order in which they are named; None means all columns."""
    if columns is None:
        return [*range(len(schema))]
    return [position for name in dict.fromkeys(columns) for position in schema.get_all_field_indices(name)]


def without_views(type_: pa.DataType) -> pa.DataType:
    """Return the type of strings in views as other strings, which more functions and libraries accept."""
    if pa.types.is_string_view(type_):
        return pa.large_string()
    return pa.large_binary() if pa.types.is_binary_view(type_) else type_


def select_columns(reader: pa.RecordBatchReader, indices: Sequence[int]) -> pa.RecordBatchReader:
    """Return the batches with only the columns at these indices. Without columns, they keep their row counts."""
    schema = select_fields(reader.schema, indices)
    return BatchReader(schema, ((batch.select([*indices]), metadata) for batch, metadata in batches(reader)))


def slice_batches(reader: pa.RecordBatchReader, first: int, stop: int) -> pa.RecordBatchReader:
    """Return the batches from number `first` up to `stop`, exclusive, if they exist.

    Batches before `first` are read and dropped.
    """
    return BatchReader(reader.schema, islice(batches(reader), first, stop))


def pick_batches(reader: pa.RecordBatchReader, numbers: Sequence[int]) -> pa.RecordBatchReader:
    """Return the batches with these ascending numbers, if they exist. Nothing is read after the last of them."""
    return BatchReader(reader.schema, pick(batches(reader), numbers))


def pick(pairs: Iterator[BatchAndMetadata], numbers: Sequence[int]) -> Iterator[BatchAndMetadata]:
    """Yield the batches with these ascending numbers, as `pick_batches` does."""
    stop = numbers[-1] + 1 if numbers else 0
    selected = numbers if isinstance(numbers, range) else {*numbers}
    return (pair for number, pair in enumerate(islice(pairs, stop)) if number in selected)


def even_batches(pieces: Iterable[pa.RecordBatch], rows: int) -> Iterator[pa.RecordBatch]:
    """Yield the same rows in batches of exactly `rows` rows; the last batch may be smaller.

    pyarrow cuts Parquet at the ends of row groups and of full arrays, which depends on the requested columns. Batches
    are identified by number, so their borders must not depend on the columns.
    """
    waiting: list[pa.RecordBatch] = []
    missing = rows
    for piece in pieces:
        remaining = piece
        while remaining.num_rows:
            waiting.append(remaining[:missing])
            missing -= waiting[-1].num_rows
            remaining = remaining[waiting[-1].num_rows :]
            if not missing:
                yield _concatenate(waiting)
                waiting, missing = [], rows
    if waiting:
        yield _concatenate(waiting)


def _concatenate(pieces: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    return pieces[0] if len(pieces) == 1 else pa.concat_batches(pieces)


def slice_rows(reader: pa.RecordBatchReader, rows: range) -> pa.RecordBatchReader:
    """Return these rows. No batch is read after the last of them; part of a batch has the metadata of the whole.

    Raises:
        RemoteProtocolError: On reading, if the stream has fewer rows.
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
            raise RemoteProtocolError(f"the stream ended after {at:,} rows; {rows.stop:,} or more were expected")

    return BatchReader(reader.schema, pairs())


def filter_batches(
    reader: pa.RecordBatchReader,
    mask_of: Callable[[pa.RecordBatch | pa.Table], pa.BooleanArray] | None,
    columns: Sequence[int],
    limit: int | None = None,
    keepalive: float = float("inf"),
    never_blocks: bool = False,
) -> pa.RecordBatchReader:
    """Return the rows that pass, at most `limit` of them.

    With a limit, no batch is read after the last such row. Batches without such rows are omitted, except for one after
    every `keepalive` seconds without output, which tells the consumer that the source is alive.

    Args:
        reader: The batches.
        mask_of: A function that returns a mask for these rows: true for rows that pass, false or null for others. None
            lets all rows pass.
        columns: The positions in `reader` of the columns to return.
        limit: The largest number of rows.
        keepalive: The longest time without a batch, in seconds.
        never_blocks: Whether `reader` never waits, so that the mask of many small batches can be computed at once.
    """
    schema = select_fields(reader.schema, columns)

    def pairs() -> Iterator[BatchAndMetadata]:
        remaining_rows, last_output = limit, time.monotonic()
        together = never_blocks and mask_of is not None and limit is None
        groups = _groups(batches(reader)) if together else ([pair] for pair in batches(reader))
        while remaining_rows != 0 and (group := next(groups, None)) is not None:
            for (batch, metadata), mask in _passing(group, mask_of):
                batch = batch.select([*columns])
                if mask is not None:
                    batch = _filter_batch(batch, mask)
                batch = batch[:remaining_rows]
                if remaining_rows is not None:
                    remaining_rows -= batch.num_rows
                yield batch, metadata
                last_output = time.monotonic()
            if time.monotonic() - last_output > keepalive:
                batch, metadata = group[-1]
                yield batch.select([*columns])[:0], metadata
                last_output = time.monotonic()

    return BatchReader(schema, pairs())


def _groups(pairs: Iterator[BatchAndMetadata]) -> Iterator[Sequence[BatchAndMetadata]]:
    """Yield consecutive small batches together, up to `_GROUP_ROWS` rows and `_GROUP_BYTES` bytes.

    A batch with more rows or bytes is alone. The computation of a mask copies batches that are together, and the source
    may have decompressed them.
    """
    group: list[BatchAndMetadata] = []
    rows = nbytes = 0
    for pair in pairs:
        batch = pair[0]
        size = batch.get_total_buffer_size()
        if nbytes + size > _GROUP_BYTES:
            size = values_size(batch)  # which takes longer to compute, and is less for a slice of larger buffers
        if group and (
            rows + batch.num_rows > _GROUP_ROWS or nbytes + size > _GROUP_BYTES or len(group) == _GROUP_BATCHES
        ):
            yield group
            group, rows, nbytes = [], 0, 0
        group.append(pair)
        rows += batch.num_rows
        nbytes += size
    if group:
        yield group


def _passing(
    group: Sequence[BatchAndMetadata], mask_of: Callable[[pa.RecordBatch | pa.Table], pa.BooleanArray] | None
) -> Iterator[tuple[BatchAndMetadata, pa.BooleanArray | None]]:
    """Yield the batches with rows that pass, each with its mask. The mask is None if all rows pass."""
    sizes = [batch.num_rows for batch, _ in group]
    if mask_of is None:
        yield from ((pair, None) for pair, size in zip(group, sizes, strict=True) if size)
        return
    if len(group) == 1:
        mask = mask_of(group[0][0])
        counts = [mask.true_count]
    else:
        mask = mask_of(pa.Table.from_batches([batch for batch, _ in group]))
        passes = mask.fill_null(False).to_numpy(zero_copy_only=False)
        before = np.concatenate([[0], np.cumsum(passes)])[np.concatenate([[0], np.cumsum(sizes)])]
        counts = np.diff(before).tolist()
    for pair, size, end, count in zip(group, sizes, accumulate(sizes), counts, strict=True):
        if count:
            yield pair, None if count == size else mask.slice(end - size, size)  # all rows need no copy


def _filter_batch(batch: pa.RecordBatch, mask: pa.BooleanArray) -> pa.RecordBatch:
    """Return the rows for which `mask` is true."""
    try:
        return batch.filter(mask)
    except pa.ArrowNotImplementedError:
        # libarrow cannot filter views and run-end encoded arrays, but it can concatenate slices of them.
        passes = np.concatenate([[0], mask.fill_null(False).to_numpy(zero_copy_only=False).view(np.int8), [0]])
        edges = np.flatnonzero(np.diff(passes)).tolist()
        runs = [batch.slice(first, stop - first) for first, stop in zip(edges[::2], edges[1::2], strict=True)]
        return pa.concat_batches(runs) if runs else batch[:0]


def values_size(rows: pa.RecordBatch | pa.Table) -> int:
    """Return the size of these rows, which must be valid, in bytes.

    If there are unions among the columns, it is the size of the whole buffers that contain the rows.
    """
    # Without unions `nbytes` of pyarrow is exact; on a union without rows it crashes.
    has_union = any(contains(type_, pa.types.is_union) for type_ in rows.schema.types)
    return int(rows.get_total_buffer_size() if has_union else rows.nbytes)
