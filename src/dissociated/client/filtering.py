"""Reads of which only some rows are wanted: filtered here, exactly, whatever was left out before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow as pa

from dissociated.client.request import ReadRequest
from dissociated.codec.columns import filter_batches
from dissociated.errors import RemoteProtocolError

if TYPE_CHECKING:
    from dissociated.codec.filter import RowFilter


def read_filtered(
    request: ReadRequest, schema: pa.Schema | None, opened: Callable[[ReadRequest], pa.RecordBatchReader]
) -> pa.RecordBatchReader:
    """What `request` wants of a dataset with this schema, which `opened` reads without a filter.

    Columns that are only filtered by are read, and go no further. Where the schema is not known, all are. Raises what
    `RowFilter.bind` and `opened` raise.
    """
    inner = replace(request, filter=None, limit=None)
    if request.filter is None:
        reader = opened(inner)
        return filter_batches(reader, None, range(len(reader.schema)), request.limit)
    if schema is None:
        reader = opened(_with_fields(inner, None))
        rows, wanted = _bind(request, reader.schema)
        return filter_batches(reader, rows, wanted, request.limit)
    rows, wanted = _bind(request, schema)
    needed = sorted({*wanted, *rows.columns})
    reader = opened(_with_fields(inner, needed if len(needed) < len(schema) else None))
    if reader.schema.names != [schema.names[index] for index in needed]:
        raise RemoteProtocolError("the stream has other columns than its dataset was said to have")
    rows = _filter(request, reader.schema)
    return filter_batches(reader, rows, [needed.index(index) for index in wanted], request.limit)


def _bind(request: ReadRequest, schema: pa.Schema) -> tuple[RowFilter, list[int]]:
    """The filter, and the positions of the columns that are wanted."""
    selection = request.selection
    wanted = [*range(len(schema))] if selection is None else selection.indices(schema.names)
    return _filter(request, schema), wanted


def _filter(request: ReadRequest, schema: pa.Schema) -> RowFilter:
    from dissociated.codec.filter import RowFilter  # on first use: pyarrow.compute takes long to import

    return RowFilter.bind(request.filter, schema)


def _with_fields(request: ReadRequest, fields: list[int] | None) -> ReadRequest:
    """The same with these fields, or with all."""
    columns = () if fields == [] else None  # no included fields would be all of them
    return replace(request, columns=columns, options=replace(request.options, included_fields=fields or ()))
