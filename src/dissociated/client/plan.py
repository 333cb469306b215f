"""The plan of a read: the routes to each part, and the division of its selection between the server and the client.

Planning does no I/O. `client.parts` opens the planned parts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import pyarrow as pa

from dissociated.client.request import Filtering, ReadRequest
from dissociated.codec.columns import filter_batches, select_fields, slice_batches, slice_rows
from dissociated.codec.inplace import MappedReader
from dissociated.control.dataset_info import DatasetInfo
from dissociated.control.locations import Endpoint, locations
from dissociated.errors import CatalogError, FormatError, RemoteProtocolError
from dissociated.format.encapsulated import walk
from dissociated.format.message import is_compressed
from dissociated.protocol.request import (
    FILTER_PARAMETER,
    REQUEST_PARAMETER,
    TRACE_PARAMETER,
    RowSelection,
    Selection,
    announces,
    with_members,
)
from dissociated.transport.registry import transport
from dissociated.uri import DEVICE, Uri

if TYPE_CHECKING:
    from dissociated.codec.filter.row_filter import RowFilter

#: The most seconds to wait for a connection before the next route is tried. Half of the timeout of the request
#: counts if that is less. The last route has all of it, unless it is last only because its server is unresponsive.
CONNECT_TIMEOUT = 3.0


@dataclass(frozen=True)
class Capabilities:
    """The selections that a server applies.

    Attributes:
        selects: Whether it selects columns and batches.
        filters: Whether it also selects rows.
        traces: Whether it also takes the trace context of a request.
        shares_memory: Whether bodies are mapped or fetched. A batch that is not needed then costs nearly nothing.
    """

    selects: bool = False
    filters: bool = False
    shares_memory: bool = False
    traces: bool = False

    @classmethod
    def of(cls, uris: Sequence[Uri]) -> Capabilities:
        """Return the capabilities that a server announces in the parameters of its URIs."""
        selects = all(announces(uri, REQUEST_PARAMETER) for uri in uris)
        return cls(
            selects,
            selects and all(announces(uri, FILTER_PARAMETER) for uri in uris),
            any(transport(uri.scheme).shares_memory or uri.remote_handle is not None for uri in uris),
            selects and all(announces(uri, TRACE_PARAMETER) for uri in uris),
        )


@dataclass(frozen=True)
class EmbeddedRows:
    """All rows of a part, which came with its description: an IPC `stream`, and the flatbuffer of its `schema`."""

    schema: bytes
    stream: bytes = field(repr=False)

    @classmethod
    def check(cls, stream: bytes) -> Self:
        """Return the rows in `stream`. Raise RemoteProtocolError if it has no schema, is cut off, or is compressed."""
        try:
            headers = [message.header for message in walk(memoryview(stream))]
        except FormatError as error:
            raise RemoteProtocolError(f"the catalog sent unreadable rows: {error}") from None
        if not headers or any(map(is_compressed, headers)):
            raise RemoteProtocolError("the catalog sent rows with no schema, or compressed")
        return cls(headers[0], stream)


@dataclass(frozen=True)
class Route:
    """A way to a part: `uris` has one URI, or a URI for metadata and a URI for bodies. It is empty for Flight.

    It is also empty if the rows are `embedded` in the description of the part. `is_unresponsive` says whether the
    server has not accepted a connection lately: the other routes are tried first.
    """

    uris: tuple[Uri, ...]
    server: Capabilities
    embedded: EmbeddedRows | None = None
    is_unresponsive: bool = False

    @classmethod
    def of(cls, uris: Sequence[Uri], is_unresponsive: bool = False) -> Route:
        """Return the route through the server at these URIs."""
        return cls(tuple(uris), Capabilities.of(uris), is_unresponsive=is_unresponsive)

    @classmethod
    def by_flight(cls, endpoint: Endpoint) -> Route:
        """Return the route to an endpoint by Flight.

        Our catalogs understand requests there. They filter if a server that sends rows elsewhere does.
        """
        if not endpoint.hosts:
            return cls((), Capabilities())
        servers = [Capabilities.of([uri]) for route in locations(endpoint) for uri in route]
        filters = next((server.filters for server in servers if not server.shares_memory), False)
        return cls((), Capabilities(selects=True, filters=filters))

    @property
    def is_flight(self) -> bool:
        """Return whether this is the route by Flight."""
        return not self.uris and self.embedded is None

    @property
    def on_device(self) -> bool:
        """Return whether the server sends addresses on a device."""
        return any(DEVICE in uri.parameters for uri in self.uris)

    @property
    def is_mapped(self) -> bool:
        """Return whether bodies are mapped into this process."""
        return any(transport(uri.scheme).shares_memory for uri in self.uris)


@dataclass(frozen=True, kw_only=True)
class Residual:
    """The part of a request that this process applies to a stream, in the order of the attributes.

    Attributes:
        columns: The columns of the stream to decode. None: all.
        selected: Whether the server has selected these columns already.
        expected: The names that the decoded columns must have. None: any.
        batches: See `ReadRequest`.
        rows: See `ReadRequest`.
        filter: See `ReadRequest`.
        result: The decoded columns to return. The others are decoded for the filter only. None: all.
        limit: See `ReadRequest`.
    """

    columns: Selection | None = None
    selected: bool = False
    expected: tuple[str, ...] | None = None
    batches: tuple[int, int] | None = None
    rows: range | None = None
    filter: Any = None
    result: Selection | None = None
    limit: int | None = None

    def positions(self, names: Sequence[str]) -> list[int] | None:
        """Return the positions of the columns to decode of a stream with columns of these names. None: all.

        Raises:
            ColumnNotFound: A column does not exist.
            OptionError: A position does not exist.
        """
        if self.columns is None:
            return None
        fields = self.columns.fields
        if self.selected and fields is not None and len(names) == len(set(fields)):
            return None
        indices = self.columns.indices(names)
        return indices if len(indices) < len(names) else None

    @property
    def keeps_batches(self) -> bool:
        """Return whether all decoded batches are part of the result, as they are."""
        return self == Residual(columns=self.columns, selected=self.selected)

    def apply(self, reader: pa.RecordBatchReader) -> pa.RecordBatchReader:
        """Return the rows and columns of the result. `reader` has the `columns`.

        Raises:
            RemoteProtocolError: The reader has other columns than are expected.
            OptionError: The filter does not fit the columns.
        """
        if self.expected is not None and tuple(reader.schema.names) != self.expected:
            raise RemoteProtocolError("the stream has other columns than its dataset was said to have")
        never_blocks = isinstance(reader, MappedReader)
        if self.batches is not None:
            reader = slice_batches(reader, *self.batches)
        if self.rows is not None:
            reader = slice_rows(reader, self.rows)
        if self.filter is None and self.limit is None and self.expected is None:
            return reader
        # A server that filters sends a batch without rows now and then, which shows that it is alive. `filter_batches`
        # leaves these out, too.
        mask_of = None if self.filter is None else row_filter(self.filter, reader.schema).mask
        result = (self.result or Selection()).indices(reader.schema.names)
        return filter_batches(reader, mask_of, result, self.limit, never_blocks=never_blocks)


@dataclass(frozen=True)
class Step:
    """A route to a part with its division of labour.

    Attributes:
        route: The route.
        identifier: The identifier to request from the server: the ticket, and the selection that the server applies.
        residual: The part of the request that the client applies.
        filtered: Whether the server is asked to select rows.
        connect_timeout: Seconds in which the connection must be made; None for the timeout of the request.
    """

    route: Route
    identifier: bytes
    residual: Residual
    filtered: bool = False
    connect_timeout: float | None = None


@dataclass(frozen=True)
class PartPlan:
    """The plan for one part of a dataset.

    Attributes:
        endpoint: The part.
        request: The request for the part. Its `rows` are counted from the first row of the part.
        steps: The routes to try, in order.
        in_place: The routes to try before `steps`, if the part is read onto a device and already lies there.
        in_place_last: The routes of this kind to try after `steps`, since their servers are unresponsive.
        bound_filter: The filter of the request, if there is one and the schema of the dataset is known.
    """

    endpoint: Endpoint
    request: ReadRequest
    steps: tuple[Step, ...]
    in_place: tuple[Step, ...] = ()
    in_place_last: tuple[Step, ...] = ()
    bound_filter: BoundFilter | None = None

    @property
    def is_embedded(self) -> bool:
        """Return whether the description of the part has its rows, so that there is a single step."""
        return bool(self.steps) and self.steps[0].route.embedded is not None

    def identifier(self, step: Step) -> bytes:
        """Return the identifier of a step, with the members that select nothing, if the server supports them."""
        server, traceparent = step.route.server, self.request.traceparent
        members: dict[str, Any] = {}
        if server.selects and self.request.reads_others_first:
            members["ahead"] = True
        if server.traces and traceparent is not None:
            members["traceparent"] = traceparent
        return with_members(step.identifier, **members) if members else step.identifier

    def without_filter(self, step: Step) -> Step:
        """Return the step that replaces `step` after its server has refused to select rows. The client filters."""
        route = replace(step.route, server=replace(step.route.server, filters=False))
        again = _plan_step(self.request, self.bound_filter, route, self.endpoint)
        return replace(again, connect_timeout=step.connect_timeout)

    def counting(self) -> PartPlan | None:
        """Return the plan that reads the number of rows of each batch, and nothing else. `within` needs the numbers.

        Returns:
            The plan; None if counting saves nothing. This is so if the request begins with the first row or has
                `batches`, if a route maps bodies, or if a server cannot select batches.
        """
        rows, routes = self.request.rows, [step.route for step in self.steps]
        if rows is None or not rows.start or self.request.batches is not None:
            return None
        if any(route.is_mapped for route in routes) or not all(route.server.selects for route in routes):
            return None
        return _plan_part(self.request.without_columns(), None, self.endpoint, routes)

    def tried_last(self, is_unresponsive: Callable[[Uri], bool]) -> PartPlan:
        """Return this plan, in which routes to servers that have become unresponsive come last."""
        steps = (*self.in_place, *self.steps, *self.in_place_last)
        routes = [replace(step.route, is_unresponsive=any(map(is_unresponsive, step.route.uris))) for step in steps]
        if routes == [step.route for step in steps]:
            return self
        return _plan_part(self.request, self.bound_filter, self.endpoint, routes)

    def within(self, batch_rows: Sequence[int]) -> PartPlan:
        """Return the plan that requests only the batches that contain the rows. See `ReadRequest.within`."""
        routes = [step.route for step in self.steps]
        return _plan_part(self.request.within(batch_rows), self.bound_filter, self.endpoint, routes)


@dataclass(frozen=True)
class ReadPlan:
    """The plan for a dataset.

    Attributes:
        schema: The schema of the result if `parts` is empty. None: the schema is that of the opened parts.
        parts: The plans for the parts that have some of the rows, in order.
        limit: The largest number of rows of all parts together.
    """

    schema: pa.Schema | None
    parts: tuple[PartPlan, ...]
    limit: int | None


def plan(
    request: ReadRequest,
    info: DatasetInfo,
    parts: Sequence[tuple[Endpoint, ReadRequest]],
    routes: Sequence[Sequence[Route]],
) -> ReadPlan:
    """Plan the reading of a dataset.

    Args:
        request: The request.
        info: The dataset.
        parts: The `parts_to_read`.
        routes: The routes to each of these parts, nearest first.

    Raises:
        OptionError: The filter does not fit the columns.
        ColumnNotFound: A column of the filter does not exist.
    """
    bound_filter = _bind(request, info.schema)
    planned = tuple(
        _plan_part(
            replace(part_request, reads_others_first=True) if number else part_request,
            bound_filter,
            endpoint,
            routes_to_part,
        )
        for number, ((endpoint, part_request), routes_to_part) in enumerate(zip(parts, routes, strict=True))
    )
    _check_columns(request, info.schema, planned)
    return ReadPlan(None if planned else _result_schema(request, info.schema), planned, request.limit)


def parts_to_read(request: ReadRequest, info: DatasetInfo) -> list[tuple[Endpoint, ReadRequest]]:
    """Return the parts that have some of the rows, each with its request, whose `rows` are counted within the part.

    Raises:
        CatalogError: Rows are requested, and the catalog does not know which parts have them.
    """
    return [*_parts_with_rows(request, info)]


def plan_part(request: ReadRequest, schema: pa.Schema | None, endpoint: Endpoint, routes: Sequence[Route]) -> PartPlan:
    """Plan the reading of one part, whose positions are those of `request`. Errors are those of `plan`.

    A request with a filter requests all columns if the `schema` of the dataset is None.
    """
    if schema is None:
        return _plan_part(request, None, endpoint, routes)
    part = _plan_part(request, _bind(request, schema), endpoint, routes)
    _check_columns(request, schema, [part])
    return part


def _plan_part(
    request: ReadRequest, bound_filter: BoundFilter | None, endpoint: Endpoint, routes: Sequence[Route]
) -> PartPlan:
    routes = sorted(routes, key=lambda route: route.is_unresponsive)
    steps = [_plan_step(request, bound_filter, route, endpoint) for route in routes]
    if request.device is None:
        return PartPlan(endpoint, request, _with_deadlines(steps, request), bound_filter=bound_filter)
    to_host = [step for step in steps if not step.route.on_device]
    on_device = [step for step in steps if step.route.on_device and step.residual.keeps_batches]
    in_place_last = [
        step for step in on_device if to_host and step.route.is_unresponsive > to_host[0].route.is_unresponsive
    ]
    in_place = on_device[: len(on_device) - len(in_place_last)]  # unresponsive servers come last
    before = _with_deadlines([*in_place, *to_host], request)[: len(in_place)]
    after = _with_deadlines([*to_host, *in_place_last], request)[len(to_host) :]
    return PartPlan(endpoint, request, _with_deadlines(to_host, request), before, after, bound_filter)


def _with_deadlines(steps: Sequence[Step], request: ReadRequest) -> tuple[Step, ...]:
    """Return the steps, which are tried in this order, with their `connect_timeout`. See CONNECT_TIMEOUT."""
    connect_timeout = min(CONNECT_TIMEOUT, request.timeout / 2)
    return tuple(
        replace(step, connect_timeout=connect_timeout)
        if step is not steps[-1] or step.route.is_unresponsive > steps[0].route.is_unresponsive
        else step
        for step in steps
    )


def _plan_step(request: ReadRequest, bound_filter: BoundFilter | None, route: Route, endpoint: Endpoint) -> Step:
    """Divide the request. If the selection is too long for an identifier, the server gets less of it or none."""
    server = route.server
    is_named = server.selects and endpoint.part is not None
    whole = with_members(endpoint.ticket, part=endpoint.part) if is_named else endpoint.ticket
    while True:
        selection, residual = _divide(request, bound_filter, server)
        # `identifier` returns `whole` if the selection makes it too long. Then try a shorter selection.
        identifier = whole if selection is None else selection.identifier(whole)
        if selection is None or identifier != whole:
            break
        server = replace(server, selects=server.filters, filters=False)
    return Step(route, identifier, residual, selection is not None and selection.rows is not None)


class _Division(NamedTuple):
    """The division of a request between a server and this process.

    Attributes:
        columns: The columns to send, or to decode if the server selects none. None: all.
        rows: The selection of rows by the server. None: it sends all rows.
        residual: The filter and the limit that this process applies.
    """

    columns: Selection | None
    rows: RowSelection | None
    residual: Residual


def _divide(
    request: ReadRequest, bound_filter: BoundFilter | None, server: Capabilities
) -> tuple[Selection | None, Residual]:
    """Return the selection that the server applies, and the residual for this process."""
    # A server applies a filter or a limit to all rows of a part. So it gets neither if the request has `rows`.
    filters = server.filters and request.rows is None
    # If memory is shared, no rows are sent, and the server only leaves out batches.
    sends_rows = filters and not server.shares_memory
    if request.filter is None:
        division = _divide_limit(request, sends_rows)
    elif bound_filter is None:
        division = _divide_unknown_columns(request)
    else:
        encoded = bound_filter.encoded if filters else None
        if request.filtering is not Filtering.EXACT:
            division = _divide_inexact_filter(request, encoded, sends_rows)
        elif sends_rows and encoded is not None:
            division = _filter_at_server(request, bound_filter, encoded)
        else:
            division = _filter_here(request, bound_filter, encoded)
    columns = division.columns or Selection()
    selection = Selection(columns.columns, columns.fields, request.batches, division.rows)
    residual = replace(
        division.residual,
        columns=division.columns,
        selected=server.selects,
        batches=None if server.selects else request.batches,
        rows=request.rows,
    )
    return selection if server.selects and selection != Selection() else None, residual


def _divide_limit(request: ReadRequest, sends_rows: bool) -> _Division:
    """Divide a request without a filter. A server that sends rows need not send more than the limit."""
    rows = RowSelection(None, request.limit) if sends_rows and request.limit is not None else None
    return _Division(request.columns_selected, rows, Residual(limit=request.limit))


def _divide_unknown_columns(request: ReadRequest) -> _Division:
    """Divide a request with a filter if the columns of the filter are unknown: request all columns, and filter here."""
    residual = Residual(filter=request.filter, result=request.columns_selected, limit=request.limit)
    return _Division(None, None, residual)


def _divide_inexact_filter(request: ReadRequest, encoded: bytes | None, sends_rows: bool) -> _Division:
    """Divide a request that may also return rows that do not pass: nothing is filtered here, nor is a limit applied."""
    exact = sends_rows and request.filtering is Filtering.AT_SERVER
    rows = None if encoded is None else RowSelection(encoded, exact=exact)
    return _Division(request.columns_selected, rows, Residual())


def _filter_at_server(request: ReadRequest, bound_filter: BoundFilter, encoded: bytes) -> _Division:
    """Let the server filter: it sends the rows that pass, and of these the columns of the result."""
    result = bound_filter.result
    residual = Residual(expected=bound_filter.names(result), limit=request.limit)
    return _Division(bound_filter.columns(result), RowSelection(encoded, request.limit), residual)


def _filter_here(request: ReadRequest, bound_filter: BoundFilter, encoded: bytes | None) -> _Division:
    """Filter in this process. A server that understands the filter leaves out batches in which no row passes."""
    needed = bound_filter.needed
    residual = Residual(
        expected=bound_filter.names(needed),
        filter=request.filter,
        result=Selection(fields=tuple(map(needed.index, bound_filter.result))),
        limit=request.limit,
    )
    rows = None if encoded is None else RowSelection(encoded, exact=False)
    return _Division(bound_filter.columns(needed), rows, residual)


class BoundFilter:
    """The filter of a request for a dataset with this schema, and the positions of the columns that the read needs.

    Raises:
        OptionError: The filter does not fit the columns.
        ColumnNotFound: A column does not exist.
    """

    def __init__(self, request: ReadRequest, schema: pa.Schema) -> None:
        self._schema = schema
        self._rows = row_filter(request.filter, schema)
        selected = request.columns_selected or Selection()
        #: Positions of the columns of the result.
        self.result = selected.indices(schema.names)
        #: Positions of the columns of the result and of the filter, in ascending order.
        self.needed = sorted({*self.result, *self._rows.columns})

    @cached_property
    def encoded(self) -> bytes | None:
        """The filter as servers receive it; None if it cannot be encoded."""
        from dissociated.codec.filter.substrait import encode_filter

        return encode_filter(self._rows, self._schema)

    def names(self, positions: Sequence[int]) -> tuple[str, ...]:
        """Return the names of the columns at these positions."""
        return tuple(self._schema.names[position] for position in positions)

    def columns(self, positions: Sequence[int]) -> Selection | None:
        """Return the selection of the columns at these positions; None if they are all columns."""
        if len(positions) == len(self._schema):
            return None
        return Selection(fields=tuple(positions)) if positions else Selection(columns=())


def _bind(request: ReadRequest, schema: pa.Schema) -> BoundFilter | None:
    return None if request.filter is None else BoundFilter(request, schema)


def row_filter(condition: Any, schema: pa.Schema) -> RowFilter:
    """Return the filter for batches of this schema. Errors are those of `RowFilter.bind`."""
    from dissociated.codec.filter.row_filter import RowFilter  # on first use: pyarrow.compute is slow to import

    return RowFilter.bind(condition, schema)


def _check_columns(request: ReadRequest, schema: pa.Schema, parts: Sequence[PartPlan]) -> None:
    """Raise ColumnNotFound if a column is missing and Flight is tried first: Flight servers word this differently."""
    if any(step.route.is_flight for part in parts for step in part.steps[:1]):
        _result_schema(request, schema)


def _result_schema(request: ReadRequest, schema: pa.Schema) -> pa.Schema:
    columns = request.columns_selected or Selection()
    return select_fields(schema, columns.indices(schema.names))


def _parts_with_rows(request: ReadRequest, info: DatasetInfo) -> Iterator[tuple[Endpoint, ReadRequest]]:
    # Without a filter, a limit is a range of rows, which shows the parts that are not needed.
    if request.filter is None and request.limit is not None and all(part.rows is not None for part in info.endpoints):
        first = 0 if request.rows is None else request.rows.start
        stop = sys.maxsize if request.rows is None else request.rows.stop
        request = replace(request, rows=range(first, min(stop, first + request.limit)), limit=None)
    start, rows = 0, request.rows
    for part in info.endpoints:
        if rows is None:
            yield part, request
            continue
        if part.rows is None:
            raise CatalogError(f"the catalog does not know how many rows the parts of {info.name!r} have")
        first, end = max(0, rows.start - start), min(rows.stop - start, part.rows)
        if not first and end == part.rows and end:
            yield part, replace(request, rows=None)
        elif first < end and (first or request.filter is not None):
            yield part, replace(request, rows=range(first, end))
        elif first < end:  # the first rows of the part: a limit, which servers can apply
            yield part, replace(request, rows=None, limit=end)
        start += part.rows
