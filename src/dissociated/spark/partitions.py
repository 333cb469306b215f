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
    """Rows of one endpoint: of the batches from `first` up to `stop`, without the first `skip`, so many `rows`."""

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
    """The endpoint of this `number`, or a slice of it, for one task, and the `hosts` that it lies on.

    `version`, of the lineage `lineage_id`, is 0 if the catalog has none; then `endpoint` is the one that the catalog
    described at planning. `rows` is 0 if it is not known.
    """

    version: int
    lineage_id: str
    number: int
    endpoint: Endpoint | None
    slice: Slice | None
    hosts: tuple[str, ...] = ()
    rows: int = 0
    whole: bool = True  # batches, none of which is cut


def slices(sizes: Sequence[int], count: int, whole: bool = False) -> list[Slice]:
    """Cut batches of these `sizes` into at most `count` slices of about equal length, in order and without gaps.

    A cut lies between two batches if their border is near; with `whole`, if no batch is as large as two slices.
    Batches that are whole can be left out by their statistics.
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
    """Return the end of a batch that is nearest to `row`; `row` itself if none is within this distance."""
    place = bisect_left(ends, row)
    nearest = min(ends[max(0, place - 1) : place + 1], key=lambda end: abs(end - row))
    return nearest if abs(nearest - row) <= distance else row


def _batch_of(ends: Sequence[int], row: int) -> int:
    return bisect_left(ends, row + 1) - 1
