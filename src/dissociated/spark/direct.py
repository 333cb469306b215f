"""What Spark's JVM asks a server for by itself: over tcp, and what it need not convert. All else is read in Python."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pyarrow as pa

from dissociated.catalog.locations import DatasetInfo, Endpoint, reachable
from dissociated.client.connect import supports_filter, supports_selection
from dissociated.client.open import read_stream
from dissociated.client.request import ReadRequest
from dissociated.codec.filter import RowFilter
from dissociated.codec.substrait import encode_filter
from dissociated.protocol.request import RowSelection
from dissociated.uri import Uri


def direct_request(
    info: DatasetInfo, endpoint: Endpoint, transport: str | None, request: ReadRequest, known_rows: int
) -> dict[str, Any] | None:
    """Who is to be asked for what, and how much may come; None where the nearest way is not over tcp.

    Rows that do not pass `request.filter` may come, too. Without it there are so many `known_rows`; 0 if nobody knows.
    Where these all come, and so do once more if the server is asked again, "end" is the row after the last of them.
    Raises CatalogError where the endpoint cannot be reached.
    """
    if transport == "grpc":
        return None
    (uri, *others) = reachable(info.name, endpoint, transport, request.allow_rma)[0]
    if others or uri.scheme != "tcp":
        return None
    request = _filtered_at(uri, replace(request, schema=info.schema))
    identifier = _identifier(uri, endpoint.ticket, request)
    if identifier is None:
        return None
    rows = request.rows
    skip = 0 if rows is None else rows.start
    return {
        "uri": str(uri),
        "host": uri.host,
        "port": uri.port,
        "want_data": str(uri.require_want_data()),
        "identifier": base64.b64encode(identifier).decode(),
        "timeout": request.timeout,
        "max_metadata": request.max_metadata,
        "max_body": request.max_body,
        "skip": skip,
        **({} if rows is None else {"rows": len(rows)}),
        **({"end": skip + known_rows} if known_rows and request.rows_at_server is None else {}),
    }


def ask_again(server: Mapping[str, Any], at: int) -> pa.RecordBatchReader:
    """What the server of a direct request gives if it is asked the same once more, from the row `at` on, up to the end.

    Close the reader after use. Raises what `open_stream` does, and RemoteProtocolError where there are fewer rows.
    """
    request = ReadRequest(
        rows=range(at, server["end"]),
        timeout=server["timeout"],
        max_metadata=server["max_metadata"],
        max_body=server["max_body"],
    )
    return read_stream(server["uri"], base64.b64decode(server["identifier"]), request)


def _filtered_at(uri: Uri, request: ReadRequest) -> ReadRequest:
    """The same, filtered by the server if it can."""
    if request.filter is None:
        return request
    assert request.schema is not None, "that of the dataset"
    bound = RowFilter.bind(request.filter, request.schema)
    encoded = encode_filter(bound, request.schema) if supports_filter(uri) else None
    return replace(request, filter=None, rows_at_server=RowSelection(encoded) if encoded else None)


def _identifier(uri: Uri, ticket: bytes, request: ReadRequest) -> bytes | None:
    """What the server is asked with; None where it would send more than is wanted."""
    if request.selection is None:
        return ticket
    identifier = request.selection.identifier(ticket) if supports_selection(uri) else ticket
    return None if identifier == ticket else identifier
