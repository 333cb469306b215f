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
from dissociated.client.plan import Capabilities, EmbeddedRows, PartPlan, ReadPlan, Route, plan, plan_part
from dissociated.client.readahead import ReadaheadReader
from dissociated.client.request import ReadRequest
from dissociated.client.routes import device_routes, reachable_routes
from dissociated.client.stream import TensorReader
from dissociated.codec.columns import filter_batches
from dissociated.codec.device import DeviceReader, chain_on_device, to_device
from dissociated.codec.split import batches
from dissociated.codec.tensor import Tensor
from dissociated.control.dataset_info import DatasetInfo
from dissociated.control.locations import Endpoint, flight_uris, locations
from dissociated.errors import CatalogError, DatasetNotFound, RemoteError, TransportError, WrongKind
from dissociated.memory.device.base import Device
from dissociated.uri import Uri

T = TypeVar("T")


class _Closeable(Protocol):
    def close(self) -> None: ...


C = TypeVar("C", bound=_Closeable)

#: Looks a dataset up. It may be called several times.
Describe: TypeAlias = Callable[[], DatasetInfo]

_CLIENT_PARAMETERS = ("roots", "allow", "files")  # parameters of locations that only the connecting side may set
_MAX_PLANS = 16  # plans that are kept
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
        #: The last plans for datasets of one part, the latest first.
        self._plans: deque[tuple[DatasetInfo, ReadRequest, PartPlan]] = deque(maxlen=_MAX_PLANS)

    def read(self, describe: Describe, request: ReadRequest) -> pa.RecordBatchReader:
        """Read the rows of all endpoints, in order, that `request` selects. `describe` looks the dataset up.

        If `describe` returns the same object again, and it has one part, the plan is not made again.
        """

        def open_parts(info: DatasetInfo) -> pa.RecordBatchReader:
            # Expressions cannot be compared, and the caller can change a list of columns.
            is_kept = traced.columns is None and not traced.selects_rows
            for known_info, known_request, part in [*self._plans] if is_kept else ():
                if known_info is info and known_request == traced:
                    return self._open_counted(part)
            planned = plan(traced, info, lambda endpoint: self._all_routes(info, endpoint, traced))
            if is_kept and len(planned.parts) == 1:
                self._plans.appendleft((info, traced, planned.parts[0]))
            return self._chain(info, planned, _open_all(planned, self._open_counted))

        with _traced(request) as traced:
            return _retry_if_replaced(describe, open_parts)

    def open_all(self, describe: Describe, request: ReadRequest) -> Sequence[pa.RecordBatchReader]:
        """Open all endpoints, each with a reader of its own. `describe` looks the dataset up."""

        def open_parts(info: DatasetInfo) -> list[pa.RecordBatchReader]:
            return [self._open_endpoint(info, endpoint, traced) for endpoint in info.endpoints]

        with _traced(request) as traced:
            return _retry_if_replaced(describe, open_parts)

    def read_on_device(self, describe: Describe, request: ReadRequest) -> DeviceReader:
        """Read a dataset onto the device of `request`: in place if it lies there, else received or copied there.

        Rows are selected before they are copied.
        """
        device = request.device
        assert device is not None, "the caller has chosen a device"

        def open_parts(info: DatasetInfo) -> list[DeviceReader]:
            planned = plan(traced, info, lambda endpoint: self.routes(info, endpoint, traced, device))
            return _open_all(planned, lambda part: open_part_on_device(part, device, self._open_flight))

        if not request.selects_rows and request.rows is None:
            with _traced(request) as traced:
                readers = _retry_if_replaced(describe, open_parts)
            if readers:
                return chain_on_device(device, readers)
        return to_device(self.read(describe, request), device)

    def read_tensors(self, describe: Describe, request: ReadRequest) -> Iterator[Tensor]:
        """Read the tensors of a dataset."""

        def open_parts(info: DatasetInfo) -> list[TensorReader]:
            planned = plan(traced, info, lambda endpoint: self.routes(info, endpoint, traced))
            if any(step.route.is_flight for part in planned.parts for step in part.steps):
                raise WrongKind(f"{info.name!r} can be read by Flight alone, which has no messages for tensors")
            return _open_all(planned, open_part_tensors)

        with _traced(request) as traced:
            return chain.from_iterable(_retry_if_replaced(describe, open_parts))

    def open(self, info: DatasetInfo, endpoint: Endpoint, request: ReadRequest) -> pa.RecordBatchReader:
        """Read the part of one endpoint that `request` selects. Errors are those of `Client.read_endpoint`."""
        with _traced(request) as traced, _explained(info.name, [endpoint]):
            _annotate(info)
            return self._open_endpoint(info, endpoint, traced)

    def _open_endpoint(self, info: DatasetInfo, endpoint: Endpoint, request: ReadRequest) -> pa.RecordBatchReader:
        return self._open(plan_part(request, info.schema, endpoint, self._all_routes(info, endpoint, request)))

    def routes(
        self, info: DatasetInfo, endpoint: Endpoint, request: ReadRequest, device: Device | None = None
    ) -> list[Route]:
        """Return the routes to an endpoint from here, nearest first. Routes to addresses on `device` come first of all.

        Raises:
            CatalogError: No route leads there.
        """
        scheme = request.transport
        uris = [] if device is None else [[uri] for uri in device_routes(endpoint, scheme, device.identity)]
        if scheme != "grpc":
            uris += reachable_routes(info.name, endpoint, scheme, request.allow_rma)
        trusted = [
            Route.of([self._with_trust(uri) for uri in route], any(map(is_unresponsive, route))) for route in uris
        ]
        if any(not route.on_device for route in trusted):
            return trusted
        return [*trusted, self._by_flight(endpoint)]

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
        return [*routes, self._by_flight(endpoint)]

    def _by_flight(self, endpoint: Endpoint) -> Route:
        return Route.by_flight([uri for route in locations(endpoint) for uri in route] if endpoint.hosts else [])

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


def _traced(request: ReadRequest) -> AbstractContextManager[ReadRequest]:
    """Trace the opening of streams, if this process traces. The block gets its request, with the span's context."""
    return _spanned(request) if tracing.is_active() else nullcontext(request)


@contextmanager
def _spanned(request: ReadRequest) -> Iterator[ReadRequest]:
    parent = request.traceparent
    with tracing.traced("dissociated.read", parent, transport=request.transport) as span:
        yield request if span is None else replace(request, traceparent=span.traceparent)


def _annotate(info: DatasetInfo) -> None:
    tracing.annotate(dataset=info.name, version=info.version or None)


@contextmanager
def _explained(name: str, endpoints: Sequence[Endpoint]) -> Iterator[None]:
    """Add to the error of a medium which dataset could not be read, and when its nodes were last heard.

    A node that was killed has no locations only after the catalog has missed its heartbeats.
    """
    try:
        yield
    except TransportError as error:
        last_seen = max((endpoint.seen for endpoint in endpoints), default=0.0)
        if type(error) is not TransportError or not last_seen:
            raise
        hosts = ", ".join(dict.fromkeys(host for endpoint in endpoints for host in endpoint.hosts))
        explained = TransportError(
            f"{error}. {name!r} is on {hosts}, whose node was last heard {utc(last_seen)}: "
            "if it has ended, start it again"
        )
        explained.reference, explained.peer_reason = error.reference, error.peer_reason
        raise explained from None


def _retry_if_replaced(describe: Describe, open_parts: Callable[[DatasetInfo], T]) -> T:
    """Look the dataset up and open its parts. Retry if the dataset is replaced meanwhile."""
    info = describe()
    for _ in range(_MAX_RETRIES):
        _annotate(info)
        try:
            with _explained(info.name, info.endpoints):
                return open_parts(info)
        except (RemoteError, DatasetNotFound):  # raised by a transport, or by Flight
            current = describe()
            if current.endpoints == info.endpoints:
                raise
            info = current  # it was replaced after the look-up
    return open_parts(info)


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
