"""The parts of a dataset: all are planned together, opened at their nearest locations, and read as one stream."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Generic, Protocol, TypeAlias, TypeVar

import pyarrow as pa

from dissociated.base import tracing
from dissociated.base.display import utc
from dissociated.base.exit import StreamThread
from dissociated.client.connection import is_unresponsive
from dissociated.client.parts import OpenFlight, open_part, open_part_on_device, open_part_tensors
from dissociated.client.plan import (
    Capabilities,
    EmbeddedRows,
    PartPlan,
    ReadPlan,
    Route,
    parts_to_read,
    plan,
    plan_part,
)
from dissociated.client.readahead import ReadaheadReader
from dissociated.client.request import ReadRequest
from dissociated.client.stream import TensorReader
from dissociated.codec.columns import filter_batches
from dissociated.codec.device import DeviceReader, chain_on_device, to_device
from dissociated.codec.split import batches
from dissociated.codec.tensor import Tensor
from dissociated.control.dataset_info import DatasetInfo
from dissociated.control.locations import Endpoint, flight_uris, locations, unavailable
from dissociated.errors import (
    CatalogError,
    DatasetNotFound,
    RemoteError,
    TransportError,
    WrongKind,
)
from dissociated.memory.device.base import Device
from dissociated.transport import registry
from dissociated.uri import DEVICE, Uri

T = TypeVar("T")


class _Closeable(Protocol):
    def close(self) -> None: ...


C = TypeVar("C", bound=_Closeable)

#: Looks a dataset up. It may be called several times.
Describe: TypeAlias = Callable[[], DatasetInfo]
#: Opens a dataset as it is described.
Open: TypeAlias = Callable[[DatasetInfo, ReadRequest], T]
#: Returns the routes to an endpoint for a request.
RoutesTo: TypeAlias = Callable[[DatasetInfo, Endpoint, ReadRequest], list[Route]]

_CLIENT_PARAMETERS = ("roots", "allow", "files")  # parameters of locations that only the connecting side may set
_MAX_PLANS = 16  # plans that are kept

#: Number of times that a dataset may be replaced between its look-up and its request.
MAX_RETRIES = 10


class EndpointReader:
    """A reader of datasets that a catalog has described.

    Args:
        open_flight: Opens an endpoint over Flight, with an identifier.
        trust: By scheme, the parameters of locations that only the connecting side may set.
    """

    def __init__(self, open_flight: OpenFlight, trust: Mapping[str, Mapping[str, str]]) -> None:
        self._open_flight = open_flight
        self._trust = trust
        #: The last plans for datasets of one part, the latest first.
        self._plans: deque[tuple[DatasetInfo, ReadRequest, PartPlan]] = deque(maxlen=_MAX_PLANS)

    def read(self, describe: Describe, request: ReadRequest) -> pa.RecordBatchReader:
        """Read the rows of all endpoints, in order, that `request` selects. `describe` looks the dataset up.

        If `describe` returns the same object again, and it has one part, the plan is not made again.
        """
        return self._read(describe, request, self._open_rows)

    def read_at(self, info: DatasetInfo, request: ReadRequest) -> pa.RecordBatchReader:
        """Read as `read` does, at the endpoints of `info` alone."""
        with _traced(request) as traced, _opening(info, info.endpoints):
            return self._open_rows(info, traced)

    def read_parts(
        self, describe: Describe, request: ReadRequest, known_info: DatasetInfo | None = None
    ) -> Sequence[pa.RecordBatchReader]:
        """Open all endpoints, each with a reader of its own. If there is a `known_info`, the look-up is left out."""
        return self._read(describe, request, self._open_parts, known_info)

    def read_on_device(self, describe: Describe, request: ReadRequest) -> DeviceReader:
        """Read a dataset onto the device of `request`: in place if it lies there, else received or copied there.

        Rows are selected before they are copied.
        """
        return self._read(describe, request, self._open_on_device)

    def read_tensors(self, describe: Describe, request: ReadRequest) -> Iterator[Tensor]:
        """Read the tensors of a dataset."""
        return chain.from_iterable(self._read(describe, request, self._open_tensors))

    def open(self, info: DatasetInfo, endpoint: Endpoint, request: ReadRequest) -> pa.RecordBatchReader:
        """Read the part of one endpoint that `request` selects. Errors are those of `Client.read_endpoint`."""
        with _traced(request) as traced, _opening(info, [endpoint]):
            return self._open_part(info, endpoint, traced)

    def _read(
        self, describe: Describe, request: ReadRequest, open_info: Open[T], known_info: DatasetInfo | None = None
    ) -> T:
        """Look the dataset up and open it. If it is replaced between the two, do both again."""
        with _traced(request) as traced:
            info = known_info or describe()
            retries = 0
            while True:
                try:
                    with _opening(info, info.endpoints):
                        return open_info(info, traced)
                except (RemoteError, DatasetNotFound):  # raised by a transport, or by Flight
                    if retries == MAX_RETRIES:
                        raise
                    retries += 1
                    current = describe()
                    if current.endpoints == info.endpoints:
                        raise
                    info = current  # it was replaced after the look-up

    def _open_rows(self, info: DatasetInfo, request: ReadRequest) -> pa.RecordBatchReader:
        # Expressions cannot be compared, and the caller can change a list of columns.
        is_kept = request.columns is None and not request.selects_rows
        for known_info, known_request, part in [*self._plans] if is_kept else ():
            if known_info is info and known_request == request:
                return self._open_counted(part)
        planned = _plan(info, request, self._all_routes)
        if is_kept and len(planned.parts) == 1:
            self._plans.appendleft((info, request, planned.parts[0]))
        return self._chain(info, planned, _open_all(planned, self._open_counted))

    def _open_parts(self, info: DatasetInfo, request: ReadRequest) -> list[pa.RecordBatchReader]:
        return [self._open_part(info, endpoint, request) for endpoint in info.endpoints]

    def _open_part(self, info: DatasetInfo, endpoint: Endpoint, request: ReadRequest) -> pa.RecordBatchReader:
        return self._open(plan_part(request, info.schema, endpoint, self._all_routes(info, endpoint, request)))

    def _open_on_device(self, info: DatasetInfo, request: ReadRequest) -> DeviceReader:
        device = request.device
        assert device is not None, "the caller has chosen a device"
        if request.selects_rows or request.rows is not None:
            return to_device(self._open_rows(info, request), device)
        planned = _plan(info, request, partial(self.routes, device=device))
        readers = _open_all(planned, partial(open_part_on_device, device=device, open_flight=self._open_flight))
        return chain_on_device(device, readers) if readers else to_device(self._chain(info, planned, []), device)

    def _open_tensors(self, info: DatasetInfo, request: ReadRequest) -> list[TensorReader]:
        planned = _plan(info, request, self.routes)
        if any(step.route.is_flight for part in planned.parts for step in part.steps):
            raise WrongKind(f"{info.name!r} can be read by Flight alone, which has no messages for tensors")
        return _open_all(planned, open_part_tensors)

    def routes(
        self, info: DatasetInfo, endpoint: Endpoint, request: ReadRequest, device: Device | None = None
    ) -> list[Route]:
        """Return the routes to an endpoint from here, nearest first. Routes to addresses on `device` come first of all.

        Raises:
            CatalogError: No route leads there.
        """
        scheme = request.transport
        uris = [] if device is None else [[uri] for uri in _device_routes(endpoint, scheme, device.identity)]
        if scheme != "grpc":
            uris += _reachable_routes(info.name, endpoint, scheme, request.allow_rma)
        trusted = [
            Route.of([self._with_trust(uri) for uri in route], any(map(is_unresponsive, route))) for route in uris
        ]
        if any(not route.on_device for route in trusted):
            return trusted
        return [*trusted, Route.by_flight(endpoint)]

    def _all_routes(self, info: DatasetInfo, endpoint: Endpoint, request: ReadRequest) -> list[Route]:
        """Return the routes to an endpoint, with Flight as the last unless the request excludes it.

        The description is the only route if it has the rows.
        """
        if endpoint.embedded is not None and request.embed:
            return [Route((), Capabilities(), EmbeddedRows.check(endpoint.embedded))]
        routes = self.routes(info, endpoint, request)
        excluded = request.transport is not None or not request.decompress or request.options.memory_pool is not None
        if excluded or not routes[-1].uris or not flight_uris(endpoint):
            return routes
        return [*routes, Route.by_flight(endpoint)]

    def _open(self, part: PartPlan) -> pa.RecordBatchReader:
        return open_part(part, self._open_flight)

    def _open_counted(self, part: PartPlan) -> pa.RecordBatchReader:
        """Open a part. Count the rows of its batches first if fewer batches are then sent. See `PartPlan.counting`."""
        counting = part.counting()
        return self._open(part if counting is None else part.within([batch.num_rows for batch in self._open(counting)]))

    def _chain(
        self, info: DatasetInfo, planned: ReadPlan, readers: Sequence[pa.RecordBatchReader]
    ) -> pa.RecordBatchReader:
        """Return a reader of all rows of these readers, up to the limit of the plan."""
        schema = planned.schema if planned.schema is not None else readers[0].schema
        if any((part.schema.names, part.schema.types) != (schema.names, schema.types) for part in readers):
            for part in readers:
                part.close()
            raise CatalogError(f"the parts of {info.name!r} do not all have the same columns")
        if len(readers) == 1:
            (chained,) = readers
        else:
            # With a limit, the parts that follow may not be needed.
            max_parallel = _max_parallel(planned) if planned.limit is None else 1
            chained = ReadaheadReader(schema, [*map(batches, readers)], max_parallel)
        return chained if planned.limit is None else filter_batches(chained, None, range(len(schema)), planned.limit)

    def _with_trust(self, uri: Uri) -> Uri:
        """Return the location with this client's parameters of trust. Such parameters of the catalog are removed."""
        parameters = {name: value for name, value in uri.parameters.items() if name not in _CLIENT_PARAMETERS}
        return replace(uri, parameters={**parameters, **self._trust.get(uri.scheme, {})})


def _plan(info: DatasetInfo, request: ReadRequest, routes_to: RoutesTo) -> ReadPlan:
    parts = parts_to_read(request, info)
    return plan(request, info, parts, [routes_to(info, endpoint, request) for endpoint, _ in parts])


def _reachable_routes(name: str, endpoint: Endpoint, scheme: str | None, allow_rma: bool) -> list[list[Uri]]:
    """Return the routes by which this process can reach an endpoint, nearest first.

    Args:
        name: The name of the dataset, for messages.
        endpoint: The endpoint.
        scheme: The scheme that the routes must have; None for any.
        allow_rma: Whether to include routes by remote memory access.

    Returns:
        The routes. They are empty if only Flight reaches the endpoint.

    Raises:
        NodeUnreachable: Its node does not respond.
        CatalogError: Its node has set it aside, or no route and no Flight server reaches it.
    """
    if endpoint.is_away:
        raise unavailable(name, endpoint.hosts, endpoint.seen, endpoint.set_aside)
    routes = [
        uris
        for uris in locations(endpoint)
        if (scheme is None or uris[0].scheme == scheme)
        and (allow_rma or uris[-1].remote_handle is None)
        and DEVICE not in uris[-1].parameters
        and all(registry.transport(uri.scheme).reachable(uri) for uri in uris)
    ]
    by_flight = flight_uris(endpoint)
    if not routes and (scheme is not None or not by_flight):
        offered = ", ".join(sorted({*endpoint.schemes, *(["grpc"] if by_flight else [])}))
        raise CatalogError(
            f"{name!r} cannot be reached from here by {scheme or 'any transport'}: it is offered by {offered}"
        )
    # The sort is stable, so routes of equal preference keep the order of the server.
    return sorted(routes, key=_preference, reverse=True)


def _preference(uris: Sequence[Uri]) -> tuple[int, bool, bool]:
    """Return the rank of a route: the nearest medium first, then encryption, then remote memory access."""
    medium = registry.transport(uris[-1].scheme)
    return medium.locality, medium.encrypted, uris[-1].remote_handle is not None


def _device_routes(endpoint: Endpoint, scheme: str | None, identity: str) -> list[Uri]:
    """Return the URIs at which the device addresses of an endpoint can be requested.

    Args:
        endpoint: The endpoint.
        scheme: The scheme that the URIs must have; None for any.
        identity: The identity of the device that must hold the data.
    """
    return [
        uri
        for route in locations(endpoint)
        for uri in route
        if uri.parameters.get(DEVICE) == identity
        and scheme in (None, uri.scheme)
        and registry.transport(uri.scheme).reachable(uri)
    ]


def _traced(request: ReadRequest) -> AbstractContextManager[ReadRequest]:
    """Trace the opening of streams, if this process traces. The block gets its request, with the span's context."""
    return _spanned(request) if tracing.is_active() else nullcontext(request)


@contextmanager
def _spanned(request: ReadRequest) -> Iterator[ReadRequest]:
    parent = request.traceparent
    with tracing.traced("dissociated.read", parent, transport=request.transport) as span:
        yield request if span is None else replace(request, traceparent=span.traceparent)


@contextmanager
def _opening(info: DatasetInfo, endpoints: Sequence[Endpoint]) -> Iterator[None]:
    """Name the dataset that is opened in the trace, and in the error of a medium, with the time of its last heartbeat.

    A node that was killed has no locations only after the catalog has missed its heartbeats.
    """
    tracing.annotate(dataset=info.name, version=info.version or None)
    try:
        yield
    except TransportError as error:
        last_seen = max((endpoint.seen for endpoint in endpoints), default=0.0)
        if type(error) is not TransportError or not last_seen:
            raise
        hosts = ", ".join(dict.fromkeys(host for endpoint in endpoints for host in endpoint.hosts))
        explained = TransportError(
            f"{error}. {info.name!r} is on {hosts}, whose node was last heard {utc(last_seen)}: "
            "if it has ended, start it again"
        )
        explained.reference, explained.peer_reason = error.reference, error.peer_reason
        raise explained from None


def _open_all(planned: ReadPlan, open_one: Callable[[PartPlan], C]) -> list[C]:
    """Open the parts, up to `_max_parallel` at a time."""
    return _open_together([partial(open_one, part) for part in planned.parts], _max_parallel(planned))


def _max_parallel(planned: ReadPlan) -> int:
    """Return how many parts may be opened or received at a time: several only if the bodies of several are sent.

    The first routes decide, because bodies may also be mapped or fetched.
    """
    distant = sum(not part.steps[0].route.server.shares_memory for part in planned.parts if part.steps)
    return planned.parts[0].request.max_parallel if distant > 1 else 1


def _open_together(calls: Sequence[Callable[[], C]], max_parallel: int) -> list[C]:
    """Return the results of all `calls`, of which at most `max_parallel` run at once: one here, the others in threads.

    If a call fails, its error is raised, and the results of the others are closed.
    """
    if len(calls) == 1:
        return [calls[0]()]
    openings = _Openings(calls)
    try:
        openings.start(min(max_parallel, len(calls)) - 1)
        openings.run()
        return [future.result() for future in openings.futures]
    except BaseException:
        openings.abandon()
        raise


class _Openings(Generic[C]):
    def __init__(self, calls: Sequence[Callable[[], C]]) -> None:
        self.futures: list[Future[C]] = [Future() for _ in calls]
        self._waiting = deque(zip(self.futures, calls, strict=True))

    def start(self, number: int) -> None:
        with suppress(TransportError):  # the system has no more threads, and this thread makes all calls
            for _ in range(number):
                StreamThread(self, self.run, (), "open").start()

    def run(self) -> None:
        """Make the next call, until none waits."""
        with suppress(IndexError):
            while True:
                future, call = self._waiting.popleft()
                try:
                    result = call()
                except Exception as error:
                    self._waiting.clear()  # no thread needs the other results
                    future.set_exception(error)
                except BaseException:
                    future.set_exception(TransportError("the opening was interrupted"))
                    raise
                else:
                    future.set_result(result)

    def stop(self) -> None:
        """Make no more calls. A call that runs ends by the deadline of its connection."""
        self._waiting.clear()

    def abandon(self) -> None:
        """Close the results, also of calls that still run."""
        self.stop()
        for future in self.futures:
            future.add_done_callback(_close_result)
        self.futures.clear()  # the traceback of the error keeps this object


def _close_result(future: Future[C]) -> None:
    if future.exception() is None:
        future.result().close()
