"""Partitions of a dataset: slices of its endpoints, each read by one task."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import NamedTuple

from pyspark.sql.datasource import InputPartition

from dissociated.client.request import ReadRequest
from dissociated.control.locations import Endpoint


class Slice(NamedTuple):
    """Consecutive rows of one endpoint.

    The slice lies in the batches from `first` up to `stop`, exclusive. It begins after `skip` rows and has `rows` rows.
    """

    first: int
    stop: int
    skip: int
    rows: int

    def of(self, request: ReadRequest) -> ReadRequest:
        """Return `request` for the rows of this slice."""
        return replace(self.batches_of(request), rows=range(self.skip, self.skip + self.rows))

    def batches_of(self, request: ReadRequest) -> ReadRequest:
        """Return `request` for all rows of the batches of this slice."""
        return replace(request, batches=(self.first, self.stop))


@dataclass(frozen=True)
class EndpointPartition(InputPartition):
    """The endpoint with the index `number`, or a slice of it, for one task.

    `version`, of the lineage `lineage_id`, is 0 if the catalog has no versions; then `endpoint` is the endpoint that
    the catalog described at planning. `hosts` are the hosts that hold the endpoint. `rows` is 0 if the number is not
    known.
    """

    version: int
    lineage_id: str
    number: int
    endpoint: Endpoint | None
    slice: Slice | None
    hosts: tuple[str, ...] = ()
    rows: int = 0
    whole: bool = True  # whether the partition consists of whole batches


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
    found = []
    for begin, end in pairwise(sorted(cuts)):
        first, stop = _batch_of(ends, begin), _batch_of(ends, end - 1) + 1
        found.append(Slice(first, stop, begin - ends[first], end - begin))
    return found


def _near(ends: Sequence[int], row: int, distance: int) -> int:
    """Return the end of a batch that is nearest to `row`, or `row` itself if none is within `distance` rows."""
    place = bisect_left(ends, row)
    nearest = min(ends[max(0, place - 1) : place + 1], key=lambda end: abs(end - row))
    return nearest if abs(nearest - row) <= distance else row


def _batch_of(ends: Sequence[int], row: int) -> int:
    return bisect_left(ends, row + 1) - 1
