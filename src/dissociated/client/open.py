"""Reads datasets of record batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, overload

import pyarrow as pa

from dissociated.base.buffers import MAX_BODY, MAX_METADATA
from dissociated.client.asynchronous import asynchronous
from dissociated.client.connect import parse_uris, request_stream, supports_selection
from dissociated.client.request import TIMEOUT, ReadRequest
from dissociated.client.stream import ClientStream
from dissociated.codec.columns import select_columns, slice_batches, slice_rows
from dissociated.codec.device import DeviceReader, to_device
from dissociated.codec.options import ReadOptions, check_options
from dissociated.codec.reader import read_schema
from dissociated.errors import DeviceError, RemoteProtocolError, SourceError, WrongKind
from dissociated.memory.device.base import Device
from dissociated.memory.device.registry import open_device
from dissociated.memory.remote import parse_spans
from dissociated.protocol.request import REFUSED, Selection
from dissociated.uri import DEVICE, Uri


@overload
def open_stream(
    uri: str | Sequence[str],
    ticket: bytes,
    *,
    columns: Sequence[str] | None = None,
    batches: tuple[int, int] | None = None,
    filter: Any = None,
    limit: int | None = None,
    options: ReadOptions | None = None,
    timeout: float = TIMEOUT,
    max_body: int = MAX_BODY,
    max_metadata: int = MAX_METADATA,
    allow_rma: bool = False,
    device: None = None,
) -> pa.RecordBatchReader: ...


@overload
def open_stream(
    uri: str | Sequence[str],
    ticket: bytes,
    *,
    columns: Sequence[str] | None = None,
    batches: tuple[int, int] | None = None,
    filter: Any = None,
    limit: int | None = None,
    options: ReadOptions | None = None,
    timeout: float = TIMEOUT,
    max_body: int = MAX_BODY,
    max_metadata: int = MAX_METADATA,
    allow_rma: bool = False,
    device: object,
    decompress: bool = True,
) -> DeviceReader: ...


def open_stream(
    uri: str | Sequence[str],
    ticket: bytes,
    *,
    columns: Sequence[str] | None = None,
    batches: tuple[int, int] | None = None,
    filter: Any = None,
    limit: int | None = None,
    options: ReadOptions | None = None,
    timeout: float = TIMEOUT,
    max_body: int = MAX_BODY,
    max_metadata: int = MAX_METADATA,
    allow_rma: bool = False,
    device: object = None,
    decompress: bool = True,
) -> pa.RecordBatchReader | DeviceReader:
    """Request the stream `ticket` at `uri`, or at a metadata URI and a data URI, in any order of arrival.

    Batches are read as they are asked for. Where bodies come by address, arrays lie in the server's memory. That memory
    is given back when the last of them is collected, and the connection stays open until then. Dropping the reader ends
    the stream.

    - `columns`: read only these top-level columns, in the order of the schema. `included_fields` of `options` does the
      same by position.
    - `batches`: read the batches from the first number up to the second.
    - `filter`: of these the rows for which this is true: an expression of pyarrow, or `[column, operator, value]`, a
      list of such conditions, which must all be true, or a list of such lists. See `Client.read`, which reads the
      columns that it needs: here nobody knows the schema before, so all columns are read.
    - `limit`: so many rows, the first.
    - `options`: how batches are decoded.
    - `timeout`: how many seconds the server may be silent.
    - `max_body`: the largest body that is taken, in bytes. As much may wait for its metadata; at least 4 GiB.
    - `max_metadata`: the longest metadata of one message, in bytes. As much may wait for its body; at least 256 MiB.
    - `allow_rma`: this process may fetch from the server's memory where a URI has a remote_handle. The server could
      then write to ours.
    - `device`, `decompress`: as for `Client.read`. Batches are copied onto the device, or stay where a URI says that
      they lie on it.

    A server whose URI does not say that it can choose columns and batches sends everything, and the rest is dropped
    here.

    Raises UriError, TransportError and DeadlineExceeded where the server cannot be reached, RemoteError where it
    refuses, WrongKind where it holds tensors, ColumnNotFound, OptionError. Reading may raise these too,
    RemoteProtocolError, and FormatError where the schema nests deeper than `options` allow. With a `device` it raises
    DeviceNotFound, DeviceFull and DeviceError, too.
    """
    request = ReadRequest(
        columns=columns,
        batches=batches,
        filter=filter,
        limit=limit,
        options=check_options(options, ReadOptions),
        timeout=timeout,
        max_body=max_body,
        max_metadata=max_metadata,
        allow_rma=allow_rma,
        device=None if device is None else open_device(device),
        decompress=decompress,
    )
    if request.device is None:
        return read_stream(uri, ticket, request)
    if not any(DEVICE in one.parameters for one in parse_uris(uri)):
        return copy_stream(uri, ticket, request)
    if request.chooses_rows:
        raise DeviceError("rows are not chosen where they lie on a device: take another location for filter and limit")
    return read_on_device(uri, ticket, request)


open_stream_async = asynchronous(open_stream)
"""`open_stream` for `async for`: awaited, it gives an `AsyncStreamReader`.

It takes and raises the same, and blocks a thread in place of the event loop.
"""


def read_stream(uri: str | Sequence[str], ticket: bytes, request: ReadRequest) -> pa.RecordBatchReader:
    """A reader of the stream `ticket` at `uri` that gives what `request` wants. Raises as `open_stream` does."""
    uris = parse_uris(uri)
    if request.chooses_rows:
        from dissociated.client.filtering import read_filtered

        return read_filtered(request, uris, lambda inner: read_stream(uri, ticket, inner))
    return _request(uris, ticket, request).read(request)


def copy_stream(uri: str | Sequence[str], ticket: bytes, request: ReadRequest) -> DeviceReader:
    """The same on the device of `request`: received there as far as the connection can, and else copied."""
    assert request.device is not None
    if request.chooses_rows or request.rows is not None:
        return to_device(read_stream(uri, ticket, request), request.device)
    requested = _request(parse_uris(uri), ticket, request)
    return requested.onto_device(request, request.device) or to_device(requested.read(request), request.device)


class _Requested(NamedTuple):
    """A stream that a server has begun to send, what is to be kept of its fields, and whether the server chose them."""

    stream: ClientStream
    fields: list[int] | None
    server_selects: bool

    def read(self, request: ReadRequest) -> pa.RecordBatchReader:
        fields = self.fields
        with self._closed_on_error():
            reader = self.stream.batches(replace(request.options, included_fields=fields or ()))
        if fields == []:  # libarrow takes no included fields to mean all of them
            reader = select_columns(reader, [])
        if request.batches is not None and not self.server_selects:
            reader = slice_batches(reader, *request.batches)
        return reader if request.rows is None else slice_rows(reader, request.rows)

    def onto_device(self, request: ReadRequest, device: Device) -> DeviceReader | None:
        """None where something has to be chosen here, or the connection does not receive there."""
        if self.fields is not None or (request.batches is not None and not self.server_selects):
            return None
        with self._closed_on_error():
            return self.stream.onto_device(device, replace(request.options, included_fields=()))

    @contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.stream.close()
            raise


def _request(uris: Sequence[Uri], ticket: bytes, request: ReadRequest) -> _Requested:
    selection = request.selection
    identifier = ticket
    if selection is not None and all(map(supports_selection, uris)):
        identifier = selection.identifier(ticket)
    server_selects = identifier != ticket
    if request.rows_at_server is not None and not server_selects:
        raise SourceError(f"{REFUSED}: the request would be too long")
    stream = request_stream(uris, identifier, request)
    try:
        if stream.is_tensors:
            raise WrongKind("this stream holds tensors: read it with open_tensors, or by name with read_tensors")
        fields = None if selection is None else _fields_to_keep(stream.header, selection, server_selects)
    except BaseException:
        stream.close()
        raise
    return _Requested(stream, fields, server_selects)


def read_on_device(uri: str | Sequence[str], ticket: bytes, request: ReadRequest) -> DeviceReader:
    """A reader of the columns and batches that `request` wants, on its device, where the server has them.

    Raises as `open_stream` does, and DeviceError where that cannot be.
    """
    assert request.device is not None
    uris = parse_uris(uri)
    selection = request.selection
    identifier = ticket if selection is None else selection.identifier(ticket)
    if identifier == ticket and selection is not None:
        raise DeviceError("the columns that are wanted take too long a request")
    stream = request_stream(uris, identifier, request)
    try:
        if selection is not None and _fields_to_keep(stream.header, selection, True) is not None:
            raise DeviceError("the server has not left out the columns that are not wanted")
        return stream.on_device(request.device, parse_spans(uris[-1]))
    except BaseException:
        stream.close()
        raise


def _fields_to_keep(header: bytes, selection: Selection, server_selects: bool) -> list[int] | None:
    """Which fields are to be kept of the schema that has come, if those are not all.

    Where `server_selects`, they were asked for, and the schema may have no others.
    Raises ColumnNotFound and OptionError.
    """
    names = read_schema(header, RemoteProtocolError).names
    if server_selects and selection.fields is not None and len(names) == len(set(selection.fields)):
        return None
    indices = selection.indices(names)
    return indices if len(indices) < len(names) else None
