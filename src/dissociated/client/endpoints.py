"""The parts of a dataset: all are planned together, opened at their nearest locations, and read as one stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TypeAlias, TypeVar

import pyarrow as pa

from dissociated.client.parts import OpenFlight, open_part, open_part_on_device, open_part_tensors
from dissociated.client.plan import PartPlan, ReadPlan, Route, plan, plan_part
from dissociated.client.request import ReadRequest
from dissociated.codec.batches import BatchReader
from dissociated.codec.columns import filter_batches
from dissociated.codec.device import DeviceReader, chain_on_device, to_device
from dissociated.codec.split import batches
from dissociated.codec.tensor import Tensor
from dissociated.control.locations import DatasetInfo, Endpoint, device_routes, locations, reachable
from dissociated.errors import CatalogError, DatasetNotFound, RemoteError, WrongKind
from dissociated.memory.device.base import Device
from dissociated.uri import Uri

T = TypeVar("T")

#: Looks a dataset up. It may be called several times.
Describe: TypeAlias = Callable[[], DatasetInfo]

_CLIENT_PARAMETERS = ("roots", "allow", "files")  # parameters of locations that only the connecting side may set
_MAX_RETRIES = 10  # number of times that a dataset may be replaced between its look-up and its request


class EndpointReader:
    """A reader of datasets that a catalog has described.

    Args:
        open_flight: Opens an endpoint over Flight, with an identifier.
        trust: By scheme, the parameters of locations that only the connecting side may set.
    """

    def __init__(self, open_flight: OpenFlight, trust: Mapping[str, Mapping[str, str]]) -> None:
        self._open_flight = open_flight
        self._trust = trust

    def read(self, describe: Describe, request: ReadRequest) -> pa.RecordBatchReader:
        """Read the rows of all endpoints, in order, that `request` selects. `describe` looks the dataset up."""

        def open_parts(info: DatasetInfo) -> pa.RecordBatchReader:
            planned = plan(request, info, lambda endpoint: self.routes(info, endpoint, request))
            return _chain(info, [self._open(_counted(part, self._open)) for part in planned.parts], planned)

        return _retried(describe, open_parts)

    def open_all(self, describe: Describe, request: ReadRequest) -> Sequence[pa.RecordBatchReader]:
        """Open all endpoints, each with a reader of its own. `describe` looks the dataset up."""

        def open_parts(info: DatasetInfo) -> list[pa.RecordBatchReader]:
            return [self.open(info, endpoint, request) for endpoint in info.endpoints]

        return _retried(describe, open_parts)

    def read_on_device(self, describe: Describe, request: ReadRequest) -> DeviceReader:
        """Read a dataset onto the device of `request`: in place if it lies there, else received or copied there.

        Rows are selected before they are copied.
        """
        device = request.device
        assert device is not None, "the caller has chosen a device"

        def open_parts(info: DatasetInfo) -> list[DeviceReader]:
            planned = plan(request, info, lambda endpoint: self.routes(info, endpoint, request, device))
            return [open_part_on_device(part, device, self._open_flight) for part in planned.parts]

        if not request.chooses_rows and request.rows is None:
            readers = _retried(describe, open_parts)
            if readers:
                return chain_on_device(device, readers)
        return to_device(self.read(describe, request), device)

    def read_tensors(self, describe: Describe, request: ReadRequest) -> Iterator[Tensor]:
        """Read the tensors of a dataset."""

        def open_parts(info: DatasetInfo) -> list[Iterator[Tensor]]:
            planned = plan(request, info, lambda endpoint: self.routes(info, endpoint, request))
            if not all(step.route.uris for part in planned.parts for step in part.steps):
                raise WrongKind(f"{info.name!r} can be read by Flight alone, which has no messages for tensors")
            return [open_part_tensors(part) for part in planned.parts]

        return chain.from_iterable(_retried(describe, open_parts))

    def open(self, info: DatasetInfo, endpoint: Endpoint, request: ReadRequest) -> pa.RecordBatchReader:
        """Read the part of one endpoint that `request` selects. Errors are those of `Client.read_endpoint`."""
        return self._open(plan_part(request, info.schema, endpoint, self.routes(info, endpoint, request)))

    def routes(
        self, info: DatasetInfo, endpoint: Endpoint, request: ReadRequest, device: Device | None = None
    ) -> list[Route]:
        """Return the routes to an endpoint from here, nearest first; routes to addresses on the `device` lead.

        Raises:
            CatalogError: No route leads there.
        """
        scheme = request.transport
        uris = [] if device is None else [[uri] for uri in device_routes(endpoint, scheme, device.identity)]
        if scheme != "grpc":
            uris += reachable(info.name, endpoint, scheme, request.allow_rma)
        trusted = [Route.of([self._with_trust(uri) for uri in route]) for route in uris]
        if any(not route.on_device for route in trusted):
            return trusted
        known = [uri for route in locations(endpoint) for uri in route] if endpoint.hosts else []
        return [*trusted, Route.by_flight(known)]

    def _open(self, part: PartPlan) -> pa.RecordBatchReader:
        return open_part(part, self._open_flight)

    def _with_trust(self, uri: Uri) -> Uri:
        """Return the location with this client's parameters of trust. Parameters of the catalog's are removed."""
        parameters = {name: value for name, value in uri.parameters.items() if name not in _CLIENT_PARAMETERS}
        return replace(uri, parameters={**parameters, **self._trust.get(uri.scheme, {})})


def _retried(describe: Describe, open_parts: Callable[[DatasetInfo], T]) -> T:
    """Look the dataset up and open its parts. Retry if the dataset is replaced meanwhile."""
    info = describe()
    for _ in range(_MAX_RETRIES):
        try:
            return open_parts(info)
        except (RemoteError, DatasetNotFound):  # raised by a transport, or by Flight
            current = describe()
            if current.endpoints == info.endpoints:
                raise
            info = current  # it was replaced after the look-up
    return open_parts(info)


def _counted(part: PartPlan, open_counting: Callable[[PartPlan], pa.RecordBatchReader]) -> PartPlan:
    """Return a plan that requests no superfluous batches, after their rows have been counted if need be."""
    counting = part.counting()
    return part if counting is None else part.within([batch.num_rows for batch in open_counting(counting)])


def _chain(info: DatasetInfo, readers: Sequence[pa.RecordBatchReader], planned: ReadPlan) -> pa.RecordBatchReader:
    """Return a reader of all rows of these readers, up to the limit of the plan."""
    schema = planned.schema if planned.schema is not None else readers[0].schema
    if any((part.schema.names, part.schema.types) != (schema.names, schema.types) for part in readers):
        raise CatalogError(f"the parts of {info.name!r} have not all the same columns")
    if len(readers) == 1:
        (chained,) = readers
    else:
        chained = BatchReader(schema, (pair for reader in readers for pair in batches(reader)))
    return chained if planned.limit is None else filter_batches(chained, None, range(len(schema)), planned.limit)
