"""Reads of selected rows: the server selects as far as it can, and the client does the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow as pa

from dissociated.client.connect import shares_memory, supports_filter
from dissociated.client.request import ReadRequest
from dissociated.codec.columns import filter_batches
from dissociated.errors import FilterRefused, RemoteProtocolError
from dissociated.protocol.request import RowSelection
from dissociated.uri import Uri

if TYPE_CHECKING:
    from dissociated.codec.filter.row_filter import RowFilter

_OpenRequest = Callable[[ReadRequest], pa.RecordBatchReader]


def read_filtered(request: ReadRequest, uris: Sequence[Uri], open_request: _OpenRequest) -> pa.RecordBatchReader:
    """Return the rows that `request` selects from the stream that `open_request` reads at `uris`.

    If bodies travel, a capable server sends these rows alone. If bodies are shared or fetched, the server leaves out
    batches without matching rows, and this process filters the rest. Errors are those of `RowFilter.bind` and
    `open_request`.
    """
    inner = replace(request, filter=None, limit=None)
    capable = bool(uris) and all(map(supports_filter, uris)) and request.rows is None
    exact = capable and not any(map(shares_memory, uris))
    if request.filter is None:
        reader = _open_selected(inner, RowSelection(None, request.limit), open_request) if exact else None
        return _filter(reader or open_request(inner), None, None, request.limit)
    if request.schema is None:  # so the columns of the filter are unknown, and all columns are read
        reader = open_request(_with_fields(inner, None))
        rows, wanted = _bind(request, reader.schema)
        return _filter(reader, rows, wanted, request.limit)
    schema = request.schema
    rows, wanted = _bind(request, schema)
    if not request.exact:
        encoded = _encode(rows, schema) if capable else None
        reader = None if encoded is None else _open_selected(inner, RowSelection(encoded, exact=exact), open_request)
        return reader or open_request(inner)
    needed = sorted({*wanted, *rows.columns})
    encoded = _encode(rows, schema) if capable else None
    if encoded is not None and exact:
        wanted_request = _with_fields(inner, wanted if len(wanted) < len(schema) else None)
        reader = _open_selected(wanted_request, RowSelection(encoded, request.limit), open_request)
        if reader is not None:
            return _filter(_check_columns(reader, schema, wanted), None, None, request.limit)
    needed_request = _with_fields(inner, needed if len(needed) < len(schema) else None)
    skipping = encoded is not None and not exact
    reader = _open_selected(needed_request, RowSelection(encoded, exact=False), open_request) if skipping else None
    reader = _check_columns(reader or open_request(needed_request), schema, needed)
    return _filter(
        reader, _bind(request, reader.schema, False)[0], [needed.index(index) for index in wanted], request.limit
    )


def _open_selected(request: ReadRequest, rows: RowSelection, open_request: _OpenRequest) -> pa.RecordBatchReader | None:
    """Request these rows from the server. Return None if the server refuses the filter."""
    try:
        return open_request(replace(request, rows_at_server=rows))
    except FilterRefused:
        return None


def _filter(
    reader: pa.RecordBatchReader, rows: RowFilter | None, columns: Sequence[int] | None, limit: int | None
) -> pa.RecordBatchReader:
    mask_of = None if rows is None else rows.mask
    return filter_batches(reader, mask_of, range(len(reader.schema)) if columns is None else columns, limit)


def _check_columns(reader: pa.RecordBatchReader, schema: pa.Schema, fields: Sequence[int]) -> pa.RecordBatchReader:
    """Return `reader`. Raise RemoteProtocolError if its columns are not these fields of the schema."""
    if reader.schema.names != [schema.names[index] for index in fields]:
        raise RemoteProtocolError("the stream has other columns than its dataset was said to have")
    return reader


def _bind(request: ReadRequest, schema: pa.Schema, whole: bool = True) -> tuple[RowFilter, list[int]]:
    """Return the filter, and the positions of the requested columns in the schema of the whole stream."""
    from dissociated.codec.filter.row_filter import RowFilter  # on first use: pyarrow.compute is slow to import

    selection = request.selection if whole else None
    wanted = [*range(len(schema))] if selection is None else selection.indices(schema.names)
    return RowFilter.bind(request.filter, schema), wanted


def _encode(rows: RowFilter, schema: pa.Schema) -> bytes | None:
    from dissociated.codec.filter.substrait import encode_filter

    return encode_filter(rows, schema)


def _with_fields(request: ReadRequest, fields: list[int] | None) -> ReadRequest:
    """Return the request with these fields, or with all if `fields` is None."""
    columns = () if fields == [] else None  # an empty `included_fields` would mean all fields
    return replace(request, columns=columns, options=replace(request.options, included_fields=fields or ()))
