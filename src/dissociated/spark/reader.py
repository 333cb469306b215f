"""Reads one dataset into Spark. Only Spark imports this module, through the data source.

    planning    asks the catalog which version there is, and cuts each endpoint into slices of its batches
    each task   asks the catalog where its endpoint can be had best from there, and requests its slice

The catalog keeps a version that was replaced for a while after anyone has asked for it; so all tasks read the version
that was planned. Columns and slices are requested: what no task wants does not move.
"""

from __future__ import annotations

import base64
import math
import sys
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from dissociated.base.buffers import Buffer
from dissociated.client.client import Client
from dissociated.client.connect import supports_filter, supports_selection
from dissociated.client.request import ReadRequest
from dissociated.codec.filter.row_filter import RowFilter
from dissociated.codec.filter.substrait import encode_filter
from dissociated.codec.join import Messages, join
from dissociated.control.locations import DatasetInfo, Endpoint, locations, reachable
from dissociated.errors import DatasetNotFound, DissociatedError, ReadOnce, SourceError
from dissociated.memory.region import AddressSpace
from dissociated.protocol.request import RowSelection
from dissociated.spark.catalog import wait_for_catalog
from dissociated.spark.columns import Columns, spark_schema
from dissociated.spark.filters import exact_filters
from dissociated.spark.partitions import EndpointPartition, Slice, slices
from dissociated.spark.request import PlannedVersion, Request
from dissociated.spark.types import arrow_schema
from dissociated.uri import Uri

#: Bytes of one partition, unless the option `partitions` says how many there are.
SLICE_BYTES = 64 << 20
_LOOKUP_TTL = 10.0  # seconds
_MAX_ROWS = 10_000  # that Spark's Python is given at once: it takes larger batches more slowly
_ALL_BATCHES = 0, sys.maxsize


class DatasetReader(DataSourceReader):
    """Reads the columns of `schema`, by name. Made while Spark plans a query, then copied to every task.

    Spark itself filters by `conditions`: what has no such rows may be left out.
    """

    def __init__(self, request: Request, schema: StructType, conditions: Sequence[Any] = ()) -> None:
        self.request = request
        self.schema = schema
        self.conditions = conditions
        self._lookup: _Lookup | None = None

    @cached_property
    def arrow_schema(self) -> pa.Schema:
        """The Arrow types of Spark's own."""
        return arrow_schema(self.schema)

    def partitions(
        self, planned: PlannedVersion | None = None, slice_bytes: int = SLICE_BYTES, share: float = 1.0, tasks: int = 1
    ) -> Sequence[EndpointPartition]:
        """One for each endpoint, or for each slice of one where those can be requested.

        A slice has about so many bytes of what is read, which is this `share` of what there is. Where that would make
        fewer than so many `tasks`, slices are smaller, but not smaller than `slice_bytes` of all columns.
        They are those of the version that was `planned`, if one was. Raises DatasetNotFound where it is there no more.
        """
        with self.request.catalog.connect() as client:
            info = self._describe(client, planned)
            _BatchFilter(self.request, self.schema, info.schema)  # what does not fit is told before any task
            nbytes = min(slice_bytes / share, max(slice_bytes, (info.nbytes or 0) / tasks))
            return [
                EndpointPartition(
                    info.version,
                    info.lineage_id,
                    number,
                    endpoint=None if info.version else endpoint,
                    slice=one,
                    hosts=endpoint.hosts,
                    rows=(endpoint.rows or 0) if one is None else one.rows,
                    whole=whole,
                )
                for number, endpoint in enumerate(info.endpoints)
                for one, whole in self._slices(client, info, endpoint, nbytes)
            ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """In a task: the rows of one partition. Closed early, it gives back what it holds."""
        assert isinstance(partition, EndpointPartition), "Spark gives what partitions has made"
        return self.batches(partition, _MAX_ROWS)

    def batches(
        self, partition: EndpointPartition, max_rows: int, spaces: list[AddressSpace] | None = None
    ) -> Generator[pa.RecordBatch, None, None]:
        """The same, in batches of at most so many rows.

        Where `spaces` are given, types are as `Columns.select` leaves them, and values in place where that is possible:
        in regions of one of these, whose files are kept. Then batches without rows come, too: who waits may have gone.
        """
        with self.request.catalog.connect() as client, self._refusals():
            was_known = self._lookup is not None
            try:
                reader, batch_filter = self._open(client, partition, spaces)
            except DissociatedError:
                self._lookup = None
                if not was_known:
                    raise
                # It may have moved since.
                reader, batch_filter = self._open(client, partition, spaces)
        with closing(reader), self._refusals():
            for batch in portions(reader, max_rows):
                wanted = batch_filter.of(batch, in_place=spaces is not None)
                if wanted.num_rows or spaces is not None:
                    yield wanted

    def direct_request(self, partition: EndpointPartition) -> dict[str, Any] | None:
        """In a task: the server that sends just the wanted rows, and how to ask it; None where there is none.

        What comes is what is wanted where its schema is `readable`.
        """
        if self.request.filters is not None:
            return None
        with self.request.catalog.connect() as client:
            lookup, endpoint, read_request = self._request(client, partition)
        return _direct_request(lookup.info, endpoint, self.request.transport, read_request)

    def decoded(
        self, schema: bytes, header: bytes, body: Buffer, max_body: int, max_rows: int
    ) -> Generator[pa.RecordBatch, None, None]:
        """The rows of one message of the server of a `direct_request`, as `batches` gives them to Spark's JVM.

        Raises RemoteProtocolError where it is damaged, or has more than `max_body` bytes when it is decompressed.
        """

        def messages() -> Messages:
            yield schema, None
            yield header, body

        with closing(join(messages(), max_body=max_body)) as reader:
            columns = Columns(reader.schema, self.schema, self.request.nanoseconds)
            for batch in portions(reader, max_rows):
                yield columns.select(batch)

    def readable(self, schema: pa.Schema) -> bool:
        """Whether Spark's JVM reads what is wanted of a stream with this schema as it is."""
        return Columns(schema, self.schema, self.request.nanoseconds).readable

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        """Say what to do where a server refuses batches by number."""
        try:
            yield
        except ReadOnce:
            raise SourceError(
                f"{self.request.name!r} is a live stream that all its clients read together, and Spark may run a task "
                "twice: the second would get only the rest. Publish a callable that gives the same stream each time, "
                "without live=; or read it outside of Spark, and append it to a dataset"
            ) from None

    def _open(
        self, client: Client, partition: EndpointPartition, spaces: list[AddressSpace] | None
    ) -> tuple[pa.RecordBatchReader, _BatchFilter]:
        lookup, endpoint, read_request = self._request(client, partition)
        read_request = replace(read_request, keep_files=spaces is not None, spaces=spaces)
        reader = self.request.open(client, lookup.info, endpoint, self.request.transport, read_request)
        return reader, lookup.batch_filter

    def _request(self, client: Client, partition: EndpointPartition) -> tuple[_Lookup, Endpoint, ReadRequest]:
        """What is wanted of which endpoint, as the catalog knows it now."""
        lookup = self._lookup
        planned = PlannedVersion(partition.version, partition.lineage_id)
        if lookup is None or lookup.planned != planned or not planned.version or time.monotonic() > lookup.until:
            info = wait_for_catalog(lambda: self._describe(client, planned))
            batch_filter = _BatchFilter(self.request, self.schema, info.schema)
            conditions = exact_filters(self.conditions, info.schema)
            lookup = _Lookup(planned, info, batch_filter, conditions, time.monotonic() + _LOOKUP_TTL, {})
            self._lookup = lookup
        endpoint = partition.endpoint or lookup.info.endpoints[partition.number]
        read_request = replace(client.defaults, columns=lookup.batch_filter.requested)
        if partition.slice is not None:
            read_request = partition.slice.of(read_request)
        elif endpoint.rows is None and _supports_selection(endpoint):
            # By number, which a live stream refuses that is read once for all: a second attempt would get its rest.
            read_request = replace(read_request, batches=_ALL_BATCHES)
        if lookup.conditions and partition.whole:
            read_request = replace(read_request, rows=None, filter=lookup.conditions, exact=False)
        elif lookup.conditions:
            cut = partition.number, partition.slice
            if cut not in lookup.passing:
                lookup.passing[cut] = self._may_pass(client, lookup, endpoint, partition.slice)
            if not lookup.passing[cut]:
                read_request = replace(read_request, rows=None, batches=(0, 0))
        return lookup, endpoint, read_request

    def _may_pass(self, client: Client, lookup: _Lookup, endpoint: Endpoint, cut: Slice | None) -> bool:
        """Whether its batches may have rows that pass, by statistics: what is true of a batch is true of its parts."""
        assert cut is not None, "what is not whole is a slice"
        schema = lookup.info.schema
        wanted = RowSelection(encode_filter(RowFilter.bind(lookup.conditions, schema), schema), exact=False)
        passing = replace(cut.batches_of(client.defaults.without_columns()), rows_at_server=wanted)
        with (
            suppress(DissociatedError),  # of a server that does not know, or of one that is gone: that is told later
            closing(self.request.open(client, lookup.info, endpoint, self.request.transport, passing)) as reader,
        ):
            return any(batch.num_rows for batch in reader)
        return True

    def _describe(self, client: Client, planned: PlannedVersion | None) -> DatasetInfo:
        """The version that was planned, if one was. Raises DatasetNotFound where it is there no more."""
        try:
            return self.request.describe(client, planned)
        except DatasetNotFound as error:
            raise DatasetNotFound(
                f"{error}: {self.request.name!r} was replaced or dropped after this DataFrame was planned. Load it "
                "again; nodes keep what was replaced for a while (--retain), and a server in your own process does not"
            ) from None

    def _slices(
        self, client: Client, info: DatasetInfo, endpoint: Endpoint, slice_bytes: float
    ) -> Sequence[tuple[Slice | None, bool]]:
        """How to cut an endpoint, and whether at the ends of batches; where it cannot choose, it stays whole."""
        whole: list[tuple[Slice | None, bool]] = [(None, True)]
        count = self.request.partitions
        parts = count or math.ceil((info.nbytes or 0) / slice_bytes)
        if not info.rows or parts <= 1:  # a reader that is published can be read once, and has no rows to be known
            return whole
        if not _supports_selection(endpoint):
            return whole
        # Batches without columns: nothing but their metadata moves.
        transport = "grpc" if self.request.transport == "grpc" else None
        counting = client.defaults.without_columns()
        with closing(self.request.open(client, info, endpoint, transport, counting)) as reader:
            sizes = [batch.num_rows for batch in reader]
        cut = slices(sizes, max(1, round(parts * sum(sizes) / info.rows)), whole=bool(self.conditions))
        return [(one, sum(sizes[one.first : one.stop]) == one.rows) for one in cut] or whole


def _supports_selection(endpoint: Endpoint) -> bool:
    """Whether its batches can be requested by number, wherever it is read."""
    uris = [uri for route in locations(endpoint) for uri in route]
    return bool(uris) and all(map(supports_selection, uris))


class _Lookup(NamedTuple):
    """What the catalog said. After `_LOOKUP_TTL` it is asked again, and so keeps the version for longer."""

    planned: PlannedVersion
    info: DatasetInfo
    batch_filter: _BatchFilter
    conditions: Sequence[Any]
    until: float
    passing: dict[tuple[int, Slice | None], bool]  # which slices of which endpoints may have rows that pass


class _BatchFilter:
    """What is wanted of batches with the schema `source`: the columns `wanted`, and the rows that pass the filters.

    Raises what `Columns` does, and OptionError for filters that cannot be decided for these columns.
    """

    def __init__(self, request: Request, wanted: StructType, source: pa.Schema) -> None:
        self._columns = Columns(source, wanted, request.nanoseconds)
        self._filters = request.filters
        names = self._columns.names
        if self._filters is not None:
            filter_columns = self._filters.columns
            self._filter_columns = Columns(source, spark_schema(source, filter_columns), request.nanoseconds)
            self._filters.mask(pa.RecordBatch.from_pylist([], self._filter_columns.schema))  # can it be?
            names = [*names, *filter_columns]
        #: The columns to be requested; None for all there are.
        self.requested = None if {*names} == {*source.names} else names

    def of(self, batch: pa.RecordBatch, in_place: bool) -> pa.RecordBatch:
        """The wanted columns of the rows that pass."""
        if self._filters is None:
            return self._columns.select(batch) if in_place else self._columns.convert(batch)
        mask = self._filters.mask(self._filter_columns.convert(batch))
        return self._columns.convert(batch).filter(mask)


def portions(batches: Iterable[pa.RecordBatch], max_rows: int = _MAX_ROWS) -> Iterator[pa.RecordBatch]:
    """The same rows in batches that Spark's Python takes well."""
    for batch in batches:
        for at in range(0, max(1, batch.num_rows), max_rows):
            yield batch.slice(at, max_rows)


def _direct_request(
    info: DatasetInfo, endpoint: Endpoint, transport: str | None, request: ReadRequest
) -> dict[str, Any] | None:
    """Return the request that Spark's JVM sends by itself, and its limits; None if the nearest way is not over tcp.

    Rows that do not pass `request.filter` may come, too. Raises CatalogError if the endpoint cannot be reached.
    """
    if transport == "grpc":
        return None
    nearest = next(iter(reachable(info.name, endpoint, transport, request.allow_rma)), [])
    if [uri.scheme for uri in nearest] != ["tcp"]:
        return None
    (uri,) = nearest
    identifier = _identifier(uri, endpoint.ticket, replace(request, schema=info.schema))
    if identifier is None:
        return None
    rows = request.rows
    return {
        "host": uri.host,
        "port": uri.port,
        "want_data": str(uri.require_want_data()),
        "identifier": base64.b64encode(identifier).decode(),
        "timeout": request.timeout,
        "max_metadata": request.max_metadata,
        "max_body": request.max_body,
        **({"skip": 0} if rows is None else {"skip": rows.start, "rows": len(rows)}),
    }


def _identifier(uri: Uri, ticket: bytes, request: ReadRequest) -> bytes | None:
    """Return the identifier to ask the server for; None if it would send more than is wanted."""
    if request.filter is not None:
        assert request.schema is not None, "that of the dataset"
        bound = RowFilter.bind(request.filter, request.schema)
        encoded = encode_filter(bound, request.schema) if supports_filter(uri) else None
        request = replace(request, filter=None, rows_at_server=RowSelection(encoded) if encoded else None)
    if request.selection is None:
        return ticket
    identifier = request.selection.identifier(ticket) if supports_selection(uri) else ticket
    return None if identifier == ticket else identifier
