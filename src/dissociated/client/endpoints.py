"""The endpoints of a dataset: each is opened at its nearest location, and all are read as one stream."""

from __future__ import annotations

import logging
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, chain
from typing import TypeAlias, TypeVar

import pyarrow as pa

from dissociated.client.connect import shares_memory, supports_selection
from dissociated.client.filtering import read_filtered
from dissociated.client.open import copy_stream, read_on_device, read_stream
from dissociated.client.request import ReadRequest
from dissociated.client.tensors import read_tensors
from dissociated.codec.batches import BatchReader
from dissociated.codec.columns import filter_batches, select_columns, select_fields, slice_batches, slice_rows
from dissociated.codec.device import DeviceReader, chain_on_device, to_device
from dissociated.codec.split import batches
from dissociated.codec.tensor import Tensor
from dissociated.control.locations import DatasetInfo, Endpoint, device_routes, locations, reachable
from dissociated.errors import (
    CatalogError,
    DatasetNotFound,
    DeviceError,
    FilterRefused,
    ForkedError,
    OptionError,
    RemoteError,
    TransportError,
    WrongKind,
)
from dissociated.memory.device.base import Device
from dissociated.protocol.request import Selection
from dissociated.transport import registry
from dissociated.uri import Uri

_log = logging.getLogger(__name__)

T = TypeVar("T")

#: Looks a dataset up. It may be called several times.
Describe: TypeAlias = Callable[[], DatasetInfo]

_CLIENT_PARAMETERS = ("roots", "allow", "files")  # parameters of locations that only the connecting side may set
_MAX_RETRIES = 10  # number of times that a dataset may be replaced between its look-up and its request


class EndpointReader:
    """An opener of endpoints.

    Args:
        open_flight: Opens an endpoint over Flight, with a ticket.
        trust: By scheme, the parameters of locations that only the connecting side may set.
    """

    def __init__(
        self,
        open_flight: Callable[[Endpoint, bytes, ReadRequest], pa.RecordBatchReader],
        trust: Mapping[str, Mapping[str, str]],
    ) -> None:
        self._open_flight = open_flight
        self._trust = trust

    def read(self, describe: Describe, transport: str | None, request: ReadRequest) -> pa.RecordBatchReader:
        """Read the rows of all endpoints, in order, that `request` selects. `describe` looks the dataset up."""

        def open_all(info: DatasetInfo) -> list[pa.RecordBatchReader]:
            return [
                self.open(info, endpoint, transport, self._select_batches(info, endpoint, transport, part_request))
                for endpoint, part_request in _endpoints_with_rows(info, request)
            ]

        reader = _chain(*self._open_all(describe, open_all), request)
        return (
            reader if request.limit is None else filter_batches(reader, None, range(len(reader.schema)), request.limit)
        )

    def read_on_device(
        self, describe: Describe, transport: str | None, request: ReadRequest, device: Device
    ) -> DeviceReader:
        """Read a dataset onto a device: in place if it lies there, else copied there, after rows have been selected."""

        def open_all(info: DatasetInfo) -> list[DeviceReader]:
            return [self._open_on_device(info, part, transport, request, device) for part in info.endpoints]

        if not request.chooses_rows and request.rows is None:
            _, readers = self._open_all(describe, open_all)
            if readers:
                return chain_on_device(device, readers)
        return to_device(self.read(describe, transport, request), device)

    def _open_on_device(
        self, info: DatasetInfo, endpoint: Endpoint, transport: str | None, request: ReadRequest, device: Device
    ) -> DeviceReader:
        for uri in device_routes(endpoint, transport, device.identity):
            try:
                return read_on_device(str(self._with_trust(uri)), endpoint.ticket, replace(request, device=device))
            except (TransportError, DeviceError) as error:
                _log.info("%r is copied to %s, since it cannot be read where it lies: %s", info.name, device, error)
        routes = _routes(info, endpoint, transport, request)
        if not routes:
            return to_device(self.open(info, endpoint, transport, request), device)
        request = replace(request, schema=info.schema, device=device)
        return self._open_nearest(routes, endpoint, request, copy_stream)

    def read_tensors(self, describe: Describe, transport: str | None, request: ReadRequest) -> Iterator[Tensor]:
        """Read the tensors of a dataset."""

        def open_all(info: DatasetInfo) -> list[Iterator[Tensor]]:
            routes = [_routes(info, part, transport, request) for part in info.endpoints]
            if not all(routes):
                raise WrongKind(f"{info.name!r} can be read by Flight alone, which has no messages for tensors")
            return [
                self._open_nearest(ways, part, request, read_tensors)
                for ways, part in zip(routes, info.endpoints, strict=True)
            ]

        _, readers = self._open_all(describe, open_all)
        return chain.from_iterable(readers)

    def open(
        self, info: DatasetInfo, endpoint: Endpoint, transport: str | None, request: ReadRequest
    ) -> pa.RecordBatchReader:
        """Read the part of one endpoint that `request` selects. Errors are those of `Client.read_endpoint`."""
        request = replace(request, schema=info.schema)
        routes = _routes(info, endpoint, transport, request)
        if not routes:
            if not request.decompress:
                raise OptionError("Flight always decompresses: with decompress=False, take another transport than grpc")
            return self._do_get(info, endpoint, request)
        return self._open_nearest(routes, endpoint, request, read_stream)

    def _open_all(self, describe: Describe, open_all: Callable[[DatasetInfo], list[T]]) -> tuple[DatasetInfo, list[T]]:
        """Return the description of a dataset and its opened endpoints. Retry if the dataset is replaced meanwhile."""
        info = describe()
        for _ in range(_MAX_RETRIES):
            try:
                return info, open_all(info)
            except (RemoteError, DatasetNotFound):  # raised by a transport, or by Flight
                current = describe()
                if current.endpoints == info.endpoints:
                    raise
                info = current  # it was replaced after the look-up
        return info, open_all(info)

    def _select_batches(
        self, info: DatasetInfo, endpoint: Endpoint, transport: str | None, request: ReadRequest
    ) -> ReadRequest:
        """Limit a request of rows to the batches that have them, if bodies travel, so that no other bodies are sent."""
        rows = request.rows
        if rows is None or not rows.start:
            return request
        uris = [uri for route in locations(endpoint) for uri in route]
        mapped = transport in (None, "shm") and any(
            uri.scheme == "shm" and registry.transport("shm").reachable(uri) for uri in uris
        )
        if mapped or not uris or not all(map(supports_selection, uris)):
            return request
        row_counts = self.open(info, endpoint, transport, request.without_columns())
        ends = [0, *accumulate(batch.num_rows for batch in row_counts)]
        first, stop = bisect_right(ends, rows.start) - 1, bisect_right(ends, rows.stop - 1)
        skipped = ends[first]
        return replace(request, batches=(first, stop), rows=range(rows.start - skipped, rows.stop - skipped))

    def _open_nearest(
        self,
        routes: list[list[Uri]],
        endpoint: Endpoint,
        request: ReadRequest,
        open_at: Callable[[Sequence[str], bytes, ReadRequest], T],
    ) -> T:
        """Open the endpoint by the first of these `routes` that works."""
        while True:
            nearest = [str(self._with_trust(uri)) for uri in routes.pop(0)]
            try:
                return open_at(nearest, endpoint.ticket, request)
            except (TransportError, ForkedError):
                if not routes:
                    raise

    def _with_trust(self, uri: Uri) -> Uri:
        """Return the location with this client's parameters of trust. Parameters of the catalog's are removed."""
        parameters = {name: value for name, value in uri.parameters.items() if name not in _CLIENT_PARAMETERS}
        return replace(uri, parameters={**parameters, **self._trust.get(uri.scheme, {})})

    def _do_get(self, info: DatasetInfo, endpoint: Endpoint, request: ReadRequest) -> pa.RecordBatchReader:
        """Read an endpoint over Flight. A server that supports selections elsewhere also gets a selection here."""
        uris = [uri for route in locations(endpoint) for uri in route] if endpoint.hosts else []
        if request.chooses_rows:
            network = [uri for uri in uris if not shares_memory(uri)]
            return read_filtered(request, network[:1], lambda inner: self._do_get(info, endpoint, inner))
        selection, identifier = request.selection, endpoint.ticket
        if selection is not None:
            selection.indices(info.schema.names)  # raises an error if a column does not exist
            if any(map(supports_selection, uris)):
                identifier = selection.identifier(endpoint.ticket)
        if request.rows_at_server is not None and identifier == endpoint.ticket:
            raise FilterRefused("the request would be too long for a filter at the server")
        reader = self._open_flight(endpoint, identifier, request)
        if selection is not None and identifier == endpoint.ticket:
            reader = select_columns(reader, selection.indices(reader.schema.names))
            if request.batches is not None:
                reader = slice_batches(reader, *request.batches)
        return reader if request.rows is None else slice_rows(reader, request.rows)


def _routes(info: DatasetInfo, endpoint: Endpoint, transport: str | None, request: ReadRequest) -> list[list[Uri]]:
    """Return the routes to an endpoint; none for "grpc", or if only Flight reaches it. Raise CatalogError."""
    return [] if transport == "grpc" else reachable(info.name, endpoint, transport, request.allow_rma)


def _chain(info: DatasetInfo, readers: Sequence[pa.RecordBatchReader], request: ReadRequest) -> pa.RecordBatchReader:
    if len(readers) == 1:
        return readers[0]
    if readers:
        schema = readers[0].schema
        if any((one.schema.names, one.schema.types) != (schema.names, schema.types) for one in readers):
            raise CatalogError(f"the parts of {info.name!r} have not all the same columns")
    else:
        selection = request.selection or Selection()
        schema = select_fields(info.schema, selection.indices(info.schema.names))
    return BatchReader(schema, (pair for reader in readers for pair in batches(reader)))


def _endpoints_with_rows(info: DatasetInfo, request: ReadRequest) -> Iterator[tuple[Endpoint, ReadRequest]]:
    """Yield the endpoints that have some of the rows, each with its request, in its own positions."""
    if request.filter is None and request.limit is not None and all(one.rows is not None for one in info.endpoints):
        first = 0 if request.rows is None else request.rows.start
        stop = sys.maxsize if request.rows is None else request.rows.stop
        request = replace(request, rows=range(first, min(stop, first + request.limit)), limit=None)
    at, rows = 0, request.rows
    for endpoint in info.endpoints:
        if rows is None:
            yield endpoint, request
            continue
        if endpoint.rows is None:
            raise CatalogError(f"the catalog does not know how many rows the parts of {info.name!r} have")
        first, end = max(0, rows.start - at), min(rows.stop - at, endpoint.rows)
        if not first and end == endpoint.rows and end:
            yield endpoint, replace(request, rows=None)
        elif first < end and (first or request.filter is not None):
            yield endpoint, replace(request, rows=range(first, end))
        elif first < end:  # a limit, because servers can apply it
            yield endpoint, replace(request, rows=None, limit=end)
        at += endpoint.rows
