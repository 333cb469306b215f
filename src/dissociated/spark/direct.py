"""What Spark's JVM asks a server for by itself: over tcp, and what it need not convert. All else is read in Python."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

from dissociated.client.connect import supports_filter, supports_selection
from dissociated.client.request import ReadRequest
from dissociated.codec.filter.row_filter import RowFilter
from dissociated.codec.filter.substrait import encode_filter
from dissociated.control.locations import DatasetInfo, Endpoint, reachable
from dissociated.protocol.request import RowSelection
from dissociated.uri import Uri


def direct_request(
    info: DatasetInfo, endpoint: Endpoint, transport: str | None, request: ReadRequest
) -> dict[str, Any] | None:
    """Who is to be asked for what, and how much may come; None where the nearest way is not over tcp.

    Rows that do not pass `request.filter` may come, too. Raises CatalogError where the endpoint cannot be reached.
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
    """What the server is asked with; None where it would send more than is wanted."""
    if request.filter is not None:
        assert request.schema is not None, "that of the dataset"
        bound = RowFilter.bind(request.filter, request.schema)
        encoded = encode_filter(bound, request.schema) if supports_filter(uri) else None
        request = replace(request, filter=None, rows_at_server=RowSelection(encoded) if encoded else None)
    if request.selection is None:
        return ticket
    identifier = request.selection.identifier(ticket) if supports_selection(uri) else ticket
    return None if identifier == ticket else identifier
