"""Opening of the planned parts of a dataset: connect, request, decode, and apply `Step.residual`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TypeAlias, TypeVar

import pyarrow as pa

from dissociated.client.connection import is_unresponsive, request_stream
from dissociated.client.plan import EmbeddedRows, PartPlan, Step
from dissociated.client.request import ReadRequest
from dissociated.client.stream import ClientStream, TensorReader
from dissociated.codec.columns import select_columns
from dissociated.codec.device import DeviceReader, to_device
from dissociated.codec.inplace import MappedReader, StreamPlace
from dissociated.codec.reader import read_schema
from dissociated.control.locations import Endpoint
from dissociated.errors import (
    CatalogError,
    DeadlineExceeded,
    DeviceError,
    Failure,
    FilterRefused,
    ForkedError,
    OptionError,
    RemoteProtocolError,
    TransportError,
    WrongKind,
)
from dissociated.format.encapsulated import encapsulate
from dissociated.memory.device.base import Device
from dissociated.memory.remote import parse_spans

_log = logging.getLogger(__name__)

T = TypeVar("T")

#: Opens a part over Flight. Its arguments are the endpoint, the identifier to request, and the request.
OpenFlight: TypeAlias = Callable[[Endpoint, bytes, ReadRequest], pa.RecordBatchReader]


def open_part(part: PartPlan, open_flight: OpenFlight | None = None) -> pa.RecordBatchReader:
    """Open the part by the first route that works.

    Args:
        part: The plan.
        open_flight: Opens the part over Flight if a route leads there.
    """
    if part.is_embedded:
        return _open(part, open_flight, part.steps[0])
    part = part.tried_last(is_unresponsive)  # found out by another part of the plan
    return _first(part, partial(_open, part, open_flight))


def open_part_on_device(part: PartPlan, device: Device, open_flight: OpenFlight | None = None) -> DeviceReader:
    """Open the part on a device: in place if it lies there, else received there, else copied there.

    Raises:
        DeviceError: The part cannot be opened in place, and there is no other route.
    """
    part = part.tried_last(is_unresponsive)
    refused: TransportError | DeviceError = DeviceError(
        "only whole columns and batches can be read where they lie on a device: take another location"
    )
    for step in part.in_place:
        try:
            return _open_in_place(part, device, step)
        except (TransportError, DeviceError) as error:
            _log.info(
                "part is copied to the device, since it cannot be opened in place: device=%s error=%s", device, error
            )
            refused = error
    if not part.steps:
        raise refused
    try:
        return _first(part, partial(_open_on_device, part, device, open_flight))
    except (TransportError, CatalogError):
        for step in part.in_place_last:
            with suppress(TransportError, DeviceError):
                return _open_in_place(part, device, step)
        raise


def open_part_tensors(part: PartPlan) -> TensorReader:
    """Open the tensors of a part by the first route that works."""
    part = part.tried_last(is_unresponsive)

    def open_tensors(step: Step) -> TensorReader:
        return request_stream(step.route.uris, part.identifier(step), part.request, step.connect_timeout).tensors()

    return _first(part, open_tensors)


def _first(part: PartPlan, open_step: Callable[[Step], T]) -> T:
    """Open the part by the first route that works. If a server refuses a filter, request the part without it.

    If all routes fail, raise the error of the last one. But if the last is Flight, and the catalog raises CatalogError,
    raise the error of the route before it.
    """
    waiting = [*part.steps]
    failure: Failure | None = None
    while True:
        step = waiting.pop(0)
        try:
            return open_step(step)
        except FilterRefused:
            if not step.filtered:
                raise
            waiting.insert(0, part.without_filter(step))
        except (TransportError, ForkedError) as error:
            if not waiting or (isinstance(error, ForkedError) and waiting[0].route.is_flight):
                raise  # the next route is Flight, and gRPC does not survive a fork
            failure = Failure.of(error)
            _log.info("part is read by its next route: error=%s", error)
        except (CatalogError, DeadlineExceeded) as error:
            if not step.route.is_flight:
                raise
            if waiting:  # only unresponsive servers remain
                failure = failure or Failure.of(error)
            elif failure is None or isinstance(error, DeadlineExceeded):
                raise
            else:
                raise failure.error() from None


def _open(part: PartPlan, open_flight: OpenFlight | None, step: Step) -> pa.RecordBatchReader:
    if step.route.is_flight:
        return step.residual.apply(_open_over_flight(part, open_flight, step))
    if step.route.embedded is not None:
        return step.residual.apply(_open_embedded(part, step, step.route.embedded))
    return step.residual.apply(_decode(*_request(part, step), part))


def _open_on_device(part: PartPlan, device: Device, open_flight: OpenFlight | None, step: Step) -> DeviceReader:
    if step.route.is_flight or not step.residual.keeps_batches:
        return to_device(_open(part, open_flight, step), device)
    stream, fields = _request(part, step)
    if fields is None:
        with _closed_on_error(stream):
            received = stream.receive_on_device(device, part.request.options.with_fields(()))
        if received is not None:
            return received
    return to_device(_decode(stream, fields, part), device)


def _open_in_place(part: PartPlan, device: Device, step: Step) -> DeviceReader:
    stream, fields = _request(part, step)
    with _closed_on_error(stream):
        if fields is not None:
            raise DeviceError("the server sent columns that were not requested")
        return stream.map_on_device(device, parse_spans(step.route.uris[-1]))


def _open_over_flight(part: PartPlan, open_flight: OpenFlight | None, step: Step) -> pa.RecordBatchReader:
    assert open_flight is not None, "only a catalog describes parts that are reached by Flight"
    if not part.request.decompress:
        raise OptionError("Flight always decompresses: with decompress=False, take another transport than grpc")
    reader = open_flight(part.endpoint, part.identifier(step), part.request)
    fields = step.residual.positions(reader.schema.names)
    return reader if fields is None else select_columns(reader, fields)


def _open_embedded(part: PartPlan, step: Step, rows: EmbeddedRows) -> pa.RecordBatchReader:
    is_whole = step.residual.columns is None
    fields = None if is_whole else step.residual.positions(read_schema(rows.schema, RemoteProtocolError).names)
    # The plan may be used again. Readers share no memory, because other libraries can write to arrays through DLPack.
    place = StreamPlace(pa.BufferReader(memoryview(rows.stream).tobytes()), (), ())
    options = part.request.options.with_fields(fields or ())
    return _select(MappedReader(encapsulate(rows.schema), place, options), fields)


def _request(part: PartPlan, step: Step) -> tuple[ClientStream, list[int] | None]:
    """Request the stream of a step. Return it, and the positions of the columns to decode; None for all."""
    stream = request_stream(step.route.uris, part.identifier(step), part.request, step.connect_timeout)
    with _closed_on_error(stream):
        if stream.is_tensors:
            raise WrongKind("this stream holds tensors: read it with open_tensors, or by name with read_tensors")
        if step.residual.columns is None:
            return stream, None
        return stream, step.residual.positions(read_schema(stream.header, RemoteProtocolError).names)


def _decode(stream: ClientStream, fields: list[int] | None, part: PartPlan) -> pa.RecordBatchReader:
    with _closed_on_error(stream):
        reader = stream.batches(part.request.options.with_fields(fields or ()))
    return _select(reader, fields)


def _select(reader: pa.RecordBatchReader, fields: list[int] | None) -> pa.RecordBatchReader:
    return select_columns(reader, []) if fields == [] else reader  # libarrow reads all fields for an empty list


@contextmanager
def _closed_on_error(stream: ClientStream) -> Iterator[None]:
    try:
        yield
    except BaseException:
        stream.close()
        raise
