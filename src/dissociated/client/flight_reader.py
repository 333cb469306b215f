"""Reading of Flight streams (DoGet), from any location of an endpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa

from dissociated.client.flight_connection import CatalogConnection, FlightBatches
from dissociated.client.request import ReadRequest
from dissociated.codec.batches import BatchReader
from dissociated.codec.reader import check_field_names
from dissociated.control.flight_streams import receive_get
from dissociated.control.locations import Endpoint, flight_uris
from dissociated.errors import CatalogUnreachable, OptionError, RemoteProtocolError, UriError


def open_flight(
    calls: CatalogConnection, endpoint: Endpoint, ticket: bytes, request: ReadRequest
) -> pa.RecordBatchReader:
    """Read the dataset of `ticket` over Flight, at the first location of the endpoint that answers.

    Args:
        calls: The server that described the endpoint, which is used if the endpoint has no Flight location.
        endpoint: The endpoint.
        ticket: The ticket.
        request: The options and limits of the read.
    """
    uris = flight_uris(endpoint) or [None]
    while True:
        uri = uris.pop(0)
        try:
            return read_flight(calls if uri in (None, calls.uri) else calls.elsewhere(str(uri)), ticket, request)
        except (CatalogUnreachable, UriError):
            if not uris:
                raise


def read_flight(calls: CatalogConnection, ticket: bytes, request: ReadRequest) -> pa.RecordBatchReader:
    """Read the dataset of `ticket` from the server of these `calls`. Only options and limits of `request` apply.

    libarrow receives a batch without asking. So the size of a batch is checked before it is passed on to the reader.
    """
    options = request.options
    if options.memory_pool is not None:
        raise OptionError(
            "Flight allocates in libarrow's default pool: with memory_pool, take another transport than grpc"
        )
    flight = calls.flight
    call_options = flight.FlightCallOptions(read_options=replace(options, included_fields=()).to_pyarrow())
    reader = calls.call(lambda client: client.do_get(flight.Ticket(ticket), call_options))
    with calls.errors():
        schema = check_field_names(reader.schema)
    options.check_depth(schema)
    _check_metadata(schema.serialize().size, request)
    return BatchReader(schema, receive_get(_limited(FlightBatches(calls, reader), request)))


def _limited(chunks: FlightBatches, request: ReadRequest) -> Iterator[Any]:
    """Yield the chunks. Raise RemoteProtocolError for a chunk that is larger than the `request` allows."""
    for chunk in chunks:
        if chunk.app_metadata is not None:
            _check_metadata(chunk.app_metadata.size, request)
        size = 0 if chunk.data is None else chunk.data.get_total_buffer_size()
        if size > request.max_body:
            raise RemoteProtocolError(
                f"a record batch has {size} bytes in its buffers; at most {request.max_body} are taken (max_body)"
            )
        yield chunk


def _check_metadata(size: int, request: ReadRequest) -> None:
    if size > request.max_metadata:
        raise RemoteProtocolError(
            f"a message has {size} bytes of metadata; at most {request.max_metadata} are taken (max_metadata)"
        )
