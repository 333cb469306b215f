"""Partitions of a dataset, which several processes read at once, each by itself.

Planning asks for the number of rows of each batch, and cuts each endpoint into slices of its batches. Spark and the
adapters plan so.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from dissociated.client.plan import Capabilities, row_filter
from dissociated.client.request import ReadRequest
from dissociated.codec.columns import positions, select_fields
from dissociated.control.dataset_info import DatasetInfo
from dissociated.control.locations import Endpoint, locations
from dissociated.errors import OptionError, WrongKind
from dissociated.protocol.request import Selection

if TYPE_CHECKING:
    from dissociated.client.dataset import DatasetHandle  # imports pyarrow.dataset, which Spark's workers do not need

#: Bytes of a partition of all columns.
PARTITION_BYTES = 64 << 20
_ALL_BATCHES = 0, sys.maxsize


class Slice(NamedTuple):
    """Consecutive rows of one endpoint.

    The slice lies in the batches from `first` up to `stop`, exclusive. It begins after `skip` rows and has `rows` rows.
    """

    first: int
    stop: int
    skip: int
    rows: int

    def narrow(self, request: ReadRequest) -> ReadRequest:
        """Return `request` for the rows of this slice."""
        return replace(self.narrow_to_batches(request), rows=range(self.skip, self.skip + self.rows))

    def narrow_to_batches(self, request: ReadRequest) -> ReadRequest:
        """Return `request` for all rows of the batches of this slice."""
        return replace(request, batches=(self.first, self.stop))


@dataclass(frozen=True)
class Partition:
    """The rows of one endpoint of a dataset, or a slice of them.

    A partition can be pickled, and is read in any process that reaches the dataset. The pickle contains the token of
    the client of the dataset.

    Attributes:
        dataset: The version of the dataset.
        number: The index of the endpoint.
        slice: The slice of the endpoint; None for all of its rows.
        whole: Whether the partition consists of whole batches.
        rows: The number of rows; None if it is unknown.
        nbytes: The approximate size of all columns, in bytes; None if it is unknown.
    """

    dataset: DatasetHandle
    number: int
    slice: Slice | None
    whole: bool
    rows: int | None
    nbytes: int | None

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts that hold the rows; empty if they are unknown."""
        return self.dataset.info.endpoints[self.number].hosts

    def read(self, columns: Sequence[str] | None = None, filter: Any = None) -> Iterator[pa.RecordBatch]:
        """Yield the rows in batches. Closing the iterator ends the read.

        Args:
            columns: The columns to read, in this order; None for all.
            filter: See `Client.read`.

        Raises:
            ReadOnce: The dataset is a stream that can be read only once, so a repeated task would miss rows.
            DissociatedError: Further errors of `Client.read`.
        """
        chosen = replace(self.dataset.defaults, columns=columns, filter=filter)
        request = narrow(chosen, self.dataset.info.endpoints[self.number], self.slice, self.whole)
        with closing(self.dataset.read_part(self.number, request)) as reader:
            for batch in reader:
                yield batch.select(positions(batch.schema, columns))

    def read_table(self, columns: Sequence[str] | None = None, filter: Any = None) -> pa.Table:
        """Return the rows as a table. Arguments and errors are those of `read`."""
        schema = selected_schema(self.dataset.schema, columns)
        return pa.Table.from_batches(self.read(columns, filter), schema)


def partitions(
    dataset: DatasetHandle,
    columns: Sequence[str] | None = None,
    filter: Any = None,
    partition_bytes: int = PARTITION_BYTES,
) -> list[Partition]:
    """Divide a version of a dataset into partitions, which together have each row once and in order.

    Args:
        dataset: The version.
        columns: The columns that will be read, to be checked; None for all.
        filter: The filter that will be applied, to be checked.
        partition_bytes: The approximate size of a partition of all columns.

    Returns:
        The partitions. A dataset without endpoints has none.

    Raises:
        ColumnNotFound: A column does not exist.
        OptionError: The filter is invalid, or `partition_bytes` is not positive.
        WrongKind: The dataset holds tensors.
    """
    info = dataset.info
    if not isinstance(partition_bytes, int) or partition_bytes < 1:
        raise OptionError(f"partition_bytes is a number of bytes from 1 on, not {partition_bytes!r}")
    if info.tensors is not None:
        raise WrongKind(f"{info.name!r} holds tensors, which have no rows: read it with Client.read_tensors")
    selected_schema(info.schema, columns)
    if filter is not None:
        row_filter(filter, info.schema)
    count = math.ceil((info.nbytes or 0) / partition_bytes)
    row_bytes = None if info.nbytes is None or not info.rows else info.nbytes / info.rows
    planned = []
    for number, endpoint in enumerate(info.endpoints):
        counting = partial(dataset.read_part, number, dataset.defaults.without_columns())
        # Between whole batches, so that no batch is sent twice.
        for cut, whole in cut_endpoint(info, endpoint, count, counting, whole=True):
            rows = endpoint.rows if cut is None else cut.rows
            nbytes = None if row_bytes is None or rows is None else round(row_bytes * rows)
            planned.append(Partition(dataset, number, cut, whole, rows, nbytes))
    return planned


def selected_schema(schema: pa.Schema, columns: Sequence[str] | None) -> pa.Schema:
    """Return the schema of these columns, in this order; of all columns if `columns` is None.

    A name that several columns share selects all of them.

    Raises:
        ColumnNotFound: A column does not exist.
        OptionError: `columns` is a string.
    """
    if columns is None:
        return schema
    if isinstance(columns, str):
        raise OptionError(f"columns is a list of names: [{columns!r}]")
    Selection(tuple(columns)).indices(schema.names)  # raises an error if a column does not exist
    return select_fields(schema, positions(schema, columns))


def cut_endpoint(
    info: DatasetInfo, endpoint: Endpoint, count: int, open_counting: Callable[[], pa.RecordBatchReader], whole: bool
) -> list[tuple[Slice | None, bool]]:
    """Cut an endpoint into slices, of which the dataset has about `count`.

    Args:
        info: The version.
        endpoint: One of its endpoints.
        count: The approximate number of slices of the whole dataset.
        open_counting: Opens the batches of the endpoint without columns, of which only metadata moves.
        whole: See `slices`.

    Returns:
        Each slice, and whether it consists of whole batches; None for the whole endpoint, if it cannot or need not be
        cut.
    """
    uncut: list[tuple[Slice | None, bool]] = [(None, True)]
    # A published reader can be read only once, and its number of rows is unknown.
    if not info.rows or count <= 1 or not _supports_selection(endpoint):
        return uncut
    if endpoint.rows and round(count * endpoint.rows / info.rows) <= 1:
        return uncut
    with closing(open_counting()) as reader:
        sizes = [batch.num_rows for batch in reader]
    cuts = slices(sizes, max(1, round(count * sum(sizes) / info.rows)), whole)
    return [(cut, sum(sizes[cut.first : cut.stop]) == cut.rows) for cut in cuts] or uncut


def narrow(request: ReadRequest, endpoint: Endpoint, cut: Slice | None, whole: bool) -> ReadRequest:
    """Return `request` for the rows of a partition.

    Args:
        request: The request for the endpoint.
        endpoint: The endpoint of the partition.
        cut: The slice of the endpoint; None for all of its rows.
        whole: Whether to request the batches of the slice without the number of its rows. The slice must consist of
            whole batches. A server applies a filter to whole batches only.
    """
    if cut is not None:
        return cut.narrow_to_batches(request) if whole else cut.narrow(request)
    if endpoint.rows is None and _supports_selection(endpoint):
        # A stream that can be read only once refuses a request by number. A second attempt would get only its rest.
        return replace(request, batches=_ALL_BATCHES)
    return request


def slices(sizes: Sequence[int], count: int, whole: bool = False) -> list[Slice]:
    """Cut batches of these `sizes` into at most `count` slices of about equal length, in order and without gaps.

    Args:
        sizes: The number of rows of each batch.
        count: The largest number of slices.
        whole: Whether to cut between two batches unless a batch is as large as two slices. Whole batches can be skipped
            by their statistics. By default a cut moves to the end of a batch only if that is near.
    """
    ends = [0, *accumulate(sizes)]
    rows = ends[-1]
    distance = rows // count if whole else rows // (4 * count)
    cuts = {0, rows, *(_near(ends, rows * number // count, distance) for number in range(1, count))}
    cut = []
    for begin, end in pairwise(sorted(cuts)):
        first, stop = _batch_of(ends, begin), _batch_of(ends, end - 1) + 1
        cut.append(Slice(first, stop, begin - ends[first], end - begin))
    return cut


def _near(ends: Sequence[int], row: int, distance: int) -> int:
    """Return the end of a batch that is nearest to `row`, or `row` itself if none is within `distance` rows."""
    place = bisect_left(ends, row)
    nearest = min(ends[max(0, place - 1) : place + 1], key=lambda end: abs(end - row))
    return nearest if abs(nearest - row) <= distance else row


def _batch_of(ends: Sequence[int], row: int) -> int:
    return bisect_left(ends, row + 1) - 1


def _supports_selection(endpoint: Endpoint) -> bool:
    """Return whether all locations of the endpoint support requests by batch number."""
    routes = locations(endpoint)
    return bool(routes) and all(Capabilities.of(route).selects for route in routes)
