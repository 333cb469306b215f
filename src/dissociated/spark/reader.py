"""Reading one dataset into Spark. Only Spark imports this module, through the data source.

    planning    asks the catalog for the version, and cuts each endpoint into slices of its batches
    each task   asks the catalog for the nearest location of its endpoint, and requests its slice

All tasks read the planned version: the catalog keeps a replaced version for a while after each request for it. Tasks
request only their columns and slices, so nothing else moves.
"""

from __future__ import annotations

import base64
import math
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from dissociated.base.buffers import Buffer
from dissociated.client.client import Client
from dissociated.client.partitions import PARTITION_BYTES, Slice, cut_endpoint, narrow
from dissociated.client.plan import CONNECT_TIMEOUT, PartPlan, plan_part, row_filter
from dissociated.client.request import Filtering, ReadRequest
from dissociated.codec.join import Messages, join
from dissociated.control.dataset_info import DatasetInfo
from dissociated.control.locations import Endpoint
from dissociated.errors import DatasetNotFound, DissociatedError, NodeUnreachable, ReadOnce, SourceError
from dissociated.memory.region import AddressSpace
from dissociated.spark.columns import ColumnConverter, spark_schema
from dissociated.spark.filters import exact_filters
from dissociated.spark.request import DatasetRequest, PlannedVersion
from dissociated.spark.types import arrow_schema

#: The smallest slice, in bytes, that is cut so that each task has one.
MIN_SLICE_BYTES = 4 << 20
_LOOKUP_TTL = 10.0  # seconds
_MAX_ROWS = 10_000  # of a batch for Spark's Python, which is slower with larger batches


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


class DatasetReader(DataSourceReader):
    """A reader of the columns of `schema`, by name. Spark creates it while planning and copies it to every task.

    Rows that do not pass `conditions` may be omitted: Spark filters by these conditions itself.
    """

    def __init__(self, request: DatasetRequest, schema: StructType, conditions: Sequence[Any] = ()) -> None:
        self.request = request
        self.schema = schema
        self.conditions = conditions
        self._lookup: _Lookup | None = None

    @cached_property
    def arrow_schema(self) -> pa.Schema:
        """The Arrow schema of Spark's `schema`."""
        return arrow_schema(self.schema)

    def partitions(
        self,
        planned: PlannedVersion | None = None,
        slice_bytes: int = PARTITION_BYTES,
        share: float = 1.0,
        tasks: int = 1,
    ) -> Sequence[EndpointPartition]:
        """Return the partitions: the endpoints, cut into slices if their batches can be requested by number.

        Args:
            planned: The version to read. Default: the version of the options, or the latest.
            slice_bytes: The approximate size of a slice, in bytes that are read.
            share: The fraction of the bytes of a row that is read.
            tasks: The number of tasks that run at once. If it does not divide the number of slices, there are more and
                smaller slices, so that no task waits for the others of the last round. No slice is made smaller than
                4 MiB that are read.

        Raises:
            DatasetNotFound: The planned version is gone.
            SourceError: The columns do not fit the schema.
            OptionError: The filters do not fit the columns.
        """
        with self.request.catalog.connect() as client:
            info = self._describe(client, planned)
            # Raises, before any task runs, if the columns or filters do not fit the schema.
            _BatchFilter(self.request, self.schema, info.schema)
            nbytes = (info.nbytes or 0) * share
            parts = math.ceil(nbytes / slice_bytes)
            rounds = math.ceil(parts / max(1, tasks))
            parts = max(parts, min(rounds * tasks, int(nbytes / MIN_SLICE_BYTES)))
            return [
                EndpointPartition(
                    info.version,
                    info.lineage_id,
                    number,
                    endpoint=None if info.version else endpoint,
                    slice=cut,
                    hosts=endpoint.hosts,
                    rows=(endpoint.rows or 0) if cut is None else cut.rows,
                    whole=whole,
                )
                for number, endpoint in enumerate(info.endpoints)
                for cut, whole in self._slices(client, info, endpoint, self.request.partitions or parts)
            ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """In a task: yield the rows of one partition. Closing the iterator early releases its resources."""
        assert isinstance(partition, EndpointPartition), "Spark passes the partitions of this reader"
        return self.batches(partition, _MAX_ROWS)

    def batches(
        self,
        partition: EndpointPartition,
        max_rows: int,
        spaces: list[AddressSpace] | None = None,
        in_place: bool = False,
    ) -> Generator[pa.RecordBatch, None, None]:
        """In a task: yield the rows of one partition.

        Args:
            partition: A partition that `partitions` returned.
            max_rows: The largest number of rows of a batch.
            spaces: A list for the address spaces of the connections, for Spark's JVM. If given, the files of their
                regions are kept, and batches without rows are yielded, too: they let the caller notice that its own
                caller has gone.
            in_place: Whether types are those of `ColumnConverter.select`, so that more values stay in shared memory.
        """
        with self.request.catalog.connect() as client, self._refusals():
            was_known = self._lookup is not None
            try:
                reader, batch_filter = self._open(client, partition, spaces)
            except DissociatedError:
                self._lookup = None
                if not was_known:
                    raise
                # The endpoint may have moved since the lookup.
                reader, batch_filter = self._open(client, partition, spaces)
        with closing(reader), self._refusals():
            for batch in portions(reader, max_rows):
                filtered = batch_filter.apply(batch, in_place)
                if filtered.num_rows or spaces is not None:
                    yield filtered

    def direct_request(self, partition: EndpointPartition) -> dict[str, Any] | None:
        """In a task: return the server that sends exactly the wanted rows, and the request to send to it.

        The rows need no conversion if the schema of the stream is `readable`.

        Returns:
            None if no server does, or the rows must be filtered here.
        """
        if self.request.filters is not None:
            return None
        with self.request.catalog.connect() as client:
            lookup, endpoint, read_request = self._request(client, partition)
            try:
                routes = client.endpoints.routes(lookup.info, endpoint, read_request)
            except NodeUnreachable:
                return None  # `batches` waits for the node
            return _request_for_jvm(plan_part(read_request, lookup.info.schema, endpoint, routes))

    def decoded(
        self, schema: bytes, header: bytes, body: Buffer, max_body: int, max_rows: int
    ) -> Generator[pa.RecordBatch, None, None]:
        """Yield the rows of one message of the server of a `direct_request`, as `batches` does for Spark's JVM.

        Args:
            schema: The encoded message with the schema of the stream.
            header: The metadata of the message.
            body: The body of the message.
            max_body: The largest size of the decompressed body, in bytes.
            max_rows: The largest number of rows of a batch.

        Raises:
            RemoteProtocolError: The message is damaged, or its body is larger than `max_body`.
        """

        def messages() -> Messages:
            yield schema, None
            yield header, body

        with closing(join(messages(), max_body=max_body)) as reader:
            columns = ColumnConverter(reader.schema, self.schema, self.request.nanoseconds)
            for batch in portions(reader, max_rows):
                yield columns.select(batch)

    def readable(self, schema: pa.Schema) -> bool:
        """Return whether Spark's JVM reads the wanted columns of a stream with this schema without conversion."""
        return ColumnConverter(schema, self.schema, self.request.nanoseconds).readable

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        """Turn ReadOnce, with which a server refuses requests by batch number, into a SourceError with a remedy."""
        try:
            yield
        except ReadOnce:
            raise SourceError(
                f"{self.request.name!r} is a live stream that all its clients read together, and Spark may run a "
                "task twice, which would then read only the rest: publish a callable that returns the same stream "
                "each time, without live=; or read the stream outside of Spark, and append it to a dataset"
            ) from None

    def _open(
        self, client: Client, partition: EndpointPartition, spaces: list[AddressSpace] | None
    ) -> tuple[pa.RecordBatchReader, _BatchFilter]:
        lookup, endpoint, read_request = self._request(client, partition)
        read_request = replace(read_request, keep_files=spaces is not None, spaces=spaces)
        reader = self.request.open(client, lookup.info, endpoint, read_request)
        return reader, lookup.batch_filter

    def _request(self, client: Client, partition: EndpointPartition) -> tuple[_Lookup, Endpoint, ReadRequest]:
        """Look up the partition's endpoint in the catalog, and return the request for its rows."""
        lookup = self._lookup
        planned = PlannedVersion(partition.version, partition.lineage_id)
        if lookup is None or lookup.planned != planned or not planned.version or time.monotonic() > lookup.valid_until:
            info = self.request.catalog.retry(lambda: self._describe(client, planned))
            batch_filter = _BatchFilter(self.request, self.schema, info.schema)
            conditions = exact_filters(self.conditions, info.schema)
            lookup = _Lookup(planned, info, batch_filter, conditions, time.monotonic() + _LOOKUP_TTL, {})
            self._lookup = lookup
        endpoint = partition.endpoint or lookup.info.endpoints[partition.number]
        read_request = replace(client.defaults, transport=self.request.transport, columns=lookup.batch_filter.requested)
        at_server = partition.whole and bool(lookup.conditions)
        # Without conditions the number of rows is requested, too, so that missing rows are an error.
        read_request = narrow(read_request, endpoint, partition.slice, at_server)
        if at_server:
            read_request = replace(read_request, filter=lookup.conditions, filtering=Filtering.AT_SERVER)
        elif lookup.conditions:
            cut = partition.number, partition.slice
            if cut not in lookup.passing:
                lookup.passing[cut] = self._may_pass(client, lookup, endpoint, partition.slice)
            if not lookup.passing[cut]:
                read_request = replace(read_request, rows=None, batches=(0, 0))
        return lookup, endpoint, read_request

    def _may_pass(self, client: Client, lookup: _Lookup, endpoint: Endpoint, cut: Slice | None) -> bool:
        """Return whether the batches of a slice may have rows that pass the conditions, by the server's statistics.

        If no row of a batch passes, then no row of a slice of the batch does. If the server does not answer, return
        True.
        """
        assert cut is not None, "only a slice consists of parts of batches"
        by_statistics = replace(
            cut.narrow_to_batches(client.defaults.without_columns()),
            transport=self.request.transport,
            filter=lookup.conditions,
            filtering=Filtering.BY_STATISTICS,
        )
        with (
            suppress(DissociatedError),  # a server without statistics, or one that is gone: reading raises later
            closing(self.request.open(client, lookup.info, endpoint, by_statistics)) as reader,
        ):
            return any(batch.num_rows for batch in reader)
        return True

    def _describe(self, client: Client, planned: PlannedVersion | None) -> DatasetInfo:
        """Describe the planned version, if there is one, or else the current version.

        Raises:
            DatasetNotFound: The version is gone. The message says how to go on.
        """
        try:
            return self.request.describe(client, planned)
        except DatasetNotFound as error:
            raise DatasetNotFound(
                f"{error}: {self.request.name!r} was replaced or dropped after this DataFrame was planned: load it "
                "again; nodes keep replaced versions for a while (--retain), and a server in your own process does "
                "not"
            ) from None

    def _slices(
        self, client: Client, info: DatasetInfo, endpoint: Endpoint, parts: int
    ) -> Sequence[tuple[Slice | None, bool]]:
        """Cut an endpoint into slices, of which the dataset has about `parts`. See `cut_endpoint`."""
        transport = "grpc" if self.request.transport == "grpc" else None
        counting = replace(client.defaults.without_columns(), transport=transport)
        open_counting = partial(self.request.open, client, info, endpoint, counting)
        return cut_endpoint(info, endpoint, parts, open_counting, whole=bool(self.conditions))


class _Lookup(NamedTuple):
    """The answer of the catalog for a planned version, and the decisions that follow from it.

    After `_LOOKUP_TTL` the catalog is asked again, which also makes it keep the version for longer.
    """

    planned: PlannedVersion
    info: DatasetInfo
    batch_filter: _BatchFilter
    conditions: Sequence[Any]
    valid_until: float  # by time.monotonic
    passing: dict[tuple[int, Slice | None], bool]  # by endpoint and slice: whether any row may pass the conditions


class _BatchFilter:
    """A filter that reduces batches with the schema `source` to the columns `target` and the rows that pass.

    Raises:
        ColumnNotFound: `source` lacks a column.
        SourceError: A column of `source` has a type other than the type in `target`.
        OptionError: The filters cannot be applied to these columns.
    """

    def __init__(self, request: DatasetRequest, target: StructType, source: pa.Schema) -> None:
        self._columns = ColumnConverter(source, target, request.nanoseconds)
        self._rows = None
        names = self._columns.names
        if request.filters is not None:
            filter_columns = request.filters.columns
            self._filter_columns = ColumnConverter(source, spark_schema(source, filter_columns), request.nanoseconds)
            self._rows = row_filter(request.filters, self._filter_columns.schema)
            names = [*names, *filter_columns]
        #: The names of the columns to request; None for all columns.
        self.requested = None if {*names} == {*source.names} else names

    def apply(self, batch: pa.RecordBatch, in_place: bool) -> pa.RecordBatch:
        """Return the wanted columns of the rows that pass the filters."""
        if self._rows is None:
            return self._columns.select(batch) if in_place else self._columns.convert(batch)
        mask = self._rows.mask(self._filter_columns.convert(batch))
        return self._columns.convert(batch).filter(mask)


def portions(batches: Iterable[pa.RecordBatch], max_rows: int = _MAX_ROWS) -> Iterator[pa.RecordBatch]:
    """Cut batches into batches of at most `max_rows` rows, of which Spark's Python takes small ones fastest.

    A batch without rows stays.
    """
    for batch in batches:
        for at in range(0, max(1, batch.num_rows), max_rows):
            yield batch.slice(at, max_rows)


def _request_for_jvm(part: PartPlan) -> dict[str, Any] | None:
    """Return the request that Spark's JVM sends by itself, and its limits.

    The rows may include some that do not pass the filter of the request.

    Returns:
        None if the nearest location of the endpoint is not reached over tcp, its server did not answer lately, or it
            would send more rows.
    """
    step, request = part.steps[0], part.request
    if [uri.scheme for uri in step.route.uris] != ["tcp"] or step.route.is_unresponsive:
        return None
    remaining = step.residual
    if not replace(remaining, rows=None).keeps_batches or (
        remaining.columns is not None and step.identifier == part.endpoint.ticket
    ):
        return None
    (uri,) = step.route.uris
    rows = request.rows
    return {
        "host": uri.host,
        "port": uri.port,
        "want_data": str(uri.require_want_data()),
        "identifier": base64.b64encode(part.identifier(step)).decode(),
        "timeout": request.timeout,
        "connect_timeout": min(request.timeout, CONNECT_TIMEOUT),  # then this process tries all routes
        "max_metadata": request.max_metadata,
        "max_body": request.max_body,
        **({"skip": 0} if rows is None else {"skip": rows.start, "rows": len(rows)}),
    }
