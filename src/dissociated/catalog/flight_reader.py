"""A stream of Flight's DoGet, from wherever it is answered, as a reader."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa

from dissociated.catalog.connection import CatalogConnection, FlightBatches
from dissociated.catalog.flight_streams import receive_get
from dissociated.catalog.locations import Endpoint, flight_uris
from dissociated.client.request import ReadRequest
from dissociated.codec.batches import BatchReader
from dissociated.codec.reader import check_field_names
from dissociated.errors import CatalogUnreachable, UriError


def open_flight(
    calls: CatalogConnection, endpoint: Endpoint, ticket: bytes, request: ReadRequest
) -> pa.RecordBatchReader:
    """All that `ticket` stands for at an endpoint of which the server of these `calls` has told.

    It is asked for where Flight says: there, or at the first of its locations that answers.
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
    """All that the server of these `calls` gives for `ticket`. Of the request count the options of decoding."""
    options = request.options
    flight = calls.flight
    call_options = flight.FlightCallOptions(read_options=replace(options, included_fields=()).to_pyarrow())
    reader = calls.call(lambda client: client.do_get(flight.Ticket(ticket), call_options))
    with calls.errors():
        schema = check_field_names(reader.schema)
    options.check_depth(schema)
    return BatchReader(schema, receive_get(FlightBatches(calls, reader)))
