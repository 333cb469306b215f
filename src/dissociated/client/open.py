"""Opening of streams of record batches."""

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
from dissociated.errors import DeviceError, FilterRefused, RemoteProtocolError, WrongKind
from dissociated.memory.device.base import Device
from dissociated.memory.device.registry import open_device
from dissociated.memory.remote import parse_spans
from dissociated.protocol.request import Selection
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
    """Request the stream `ticket` at `uri`, or at a metadata URI and a data URI. Messages may arrive in any order.

    Batches are read as they are requested. If bodies come by address, arrays lie in the server's memory. That memory is
    freed when the last array in it is collected, and the connection stays open until then. Dropping the reader ends the
    stream.

    If the URI does not offer the selection of columns and batches, the server sends everything, and this process
    discards the rest.

    Args:
        uri: The URI, or one for metadata and one for bodies.
        ticket: The ticket.
        columns: Read only these top-level columns, in the order of the schema. `included_fields` of `options` selects
            columns by position.
        batches: Read the batches from the first number up to the second.
        filter: Read only rows for which this is true: an expression of pyarrow, a condition `[column, operator,
            value]`, a list of conditions, all of which must be true, or a list of such lists. `Client.read` reads only
            the columns that the filter needs. Here the schema is not known in advance, so all columns are read.
        limit: Number of rows to read, from the first on. None: all.
        options: Options of decoding.
        timeout: Seconds for which the server may be silent.
        max_body: Largest body that is accepted, in bytes. Bodies of this total size may wait for their metadata, and of
            at least 4 GiB.
        max_metadata: Largest metadata of a message that is accepted, in bytes. Metadata of this total size may wait for
            bodies, and of at least 256 MiB.
        allow_rma: Allow this process to fetch from the server's memory if a URI has a remote_handle. The server could
            then write to this process's memory.
        device: Device for the batches, as in `Client.read`. Batches are copied to it, or stay on it if the URI says
            that they are there.
        decompress: With a `device`, bodies that come compressed are decompressed on the host. False refuses them.

    Returns:
        A reader of record batches. Reading may raise the errors below, RemoteProtocolError, and FormatError if the
            schema nests deeper than `options` allow.

    Raises:
        UriError: A URI is invalid.
        TransportError, DeadlineExceeded: The server cannot be reached.
        RemoteError: The server refuses.
        WrongKind: The stream has tensors.
        ColumnNotFound: A column does not exist.
        OptionError: An argument is invalid.
        DeviceNotFound, DeviceFull, DeviceError: The `device` does not exist, is full, or fails.
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
"""Open an `AsyncStreamReader` for `async for`. Arguments and errors are those of `open_stream`.

The call blocks a thread in place of the event loop.
"""


def read_stream(uri: str | Sequence[str], ticket: bytes, request: ReadRequest) -> pa.RecordBatchReader:
    """Read the part of the stream `ticket` at `uri` that `request` selects. Errors are those of `open_stream`."""
    uris = parse_uris(uri)
    if request.chooses_rows:
        from dissociated.client.filtering import read_filtered

        return read_filtered(request, uris, lambda inner: read_stream(uri, ticket, inner))
    return _request(uris, ticket, request).read(request)


def copy_stream(uri: str | Sequence[str], ticket: bytes, request: ReadRequest) -> DeviceReader:
    """Read a stream onto the device of `request`: received there if the connection can do that, else copied there."""
    assert request.device is not None
    if request.chooses_rows or request.rows is not None:
        return to_device(read_stream(uri, ticket, request), request.device)
    requested = _request(parse_uris(uri), ticket, request)
    return requested.onto_device(request, request.device) or to_device(requested.read(request), request.device)


class _Requested(NamedTuple):
    """A stream that a server sends, the fields to keep of its schema, and whether the server has selected them."""

    stream: ClientStream
    fields: list[int] | None
    server_selects: bool

    def read(self, request: ReadRequest) -> pa.RecordBatchReader:
        fields = self.fields
        with self._closed_on_error():
            reader = self.stream.batches(replace(request.options, included_fields=fields or ()))
        if fields == []:  # libarrow reads all fields if `included_fields` is empty
            reader = select_columns(reader, [])
        if request.batches is not None and not self.server_selects:
            reader = slice_batches(reader, *request.batches)
        return reader if request.rows is None else slice_rows(reader, request.rows)

    def onto_device(self, request: ReadRequest, device: Device) -> DeviceReader | None:
        """Receive onto a device; return None if this process must select, or if the connection cannot do that."""
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
        raise FilterRefused("the request would be too long for a filter at the server")
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
    """Read the columns and batches that `request` selects in place, on the device on which the server has them.

    Raises:
        DeviceError: That is not possible. Errors of `open_stream` are raised, too.
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
    """Return the positions of the fields to keep of the received schema; None for all of them.

    With `server_selects`, the fields were requested, and the schema may have no others. Raise ColumnNotFound or
    OptionError for fields that do not exist.
    """
    names = read_schema(header, RemoteProtocolError).names
    if server_selects and selection.fields is not None and len(names) == len(set(selection.fields)):
        return None
    indices = selection.indices(names)
    return indices if len(indices) < len(names) else None
