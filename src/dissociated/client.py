"""Reads datasets ("Client Sequence")."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

import pyarrow as pa

from dissociated.errors import ConnectionClosed, OptionError, RemoteProtocolError, UriError
from dissociated.ipc.columns import selected
from dissociated.ipc.encapsulated import encapsulate
from dissociated.ipc.inplace import InPlace
from dissociated.ipc.join import join
from dissociated.ipc.options import ReadOptions
from dissociated.ipc.reader import blamed
from dissociated.message import Buffer, Message
from dissociated.protocol.events import Delivery
from dissociated.protocol.run import Batches
from dissociated.protocol.selection import PARAMETER, Selection
from dissociated.stream import Deliveries, Stream
from dissociated.transport.base import seconds
from dissociated.transport.registry import transport
from dissociated.uri import Uri

#: Seconds that a server may be silent.
TIMEOUT = 60.0
#: The largest body that is taken, in bytes.
MAX_BODY = 1 << 34

#: How many messages, or runs of them, are looked at before a dataset in shared memory is opened.
_MAX_SEEN = 1 << 16


def open_stream(
    uri: str | Sequence[str],
    ticket: bytes,
    *,
    columns: Sequence[str] | None = None,
    options: ReadOptions | None = None,
    timeout: float = TIMEOUT,
    max_body: int = MAX_BODY,
) -> pa.RecordBatchReader:
    """Request the stream `ticket` at `uri`, or at a metadata URI and a data URI, in any order of arrival.

    Batches are read as they are asked for. Where bodies come by address, arrays lie in the server's memory, which
    is given back when the last of them is collected; the connection stays open until then. Dropping the reader
    ends the stream.

    `columns` asks for these top-level columns alone, in the order of the schema; so does `included_fields` of
    `options`, which say how batches are decoded. A server whose URI does not say that it can choose sends all columns,
    and the others are dropped here. `timeout` is how many seconds the server may be silent, `max_body` the largest
    body that is taken, in bytes.

    Raises UriError, TransportError and DeadlineExceeded where the server cannot be reached, RemoteError where it
    refuses, ColumnNotFound, OptionError. Reading may raise these too, RemoteProtocolError, and FormatError where
    the schema nests deeper than `options` allow.
    """
    timeout = seconds(timeout)
    options = options or ReadOptions()
    selection = selection_of(columns, options)
    uris = [Uri.parse(uri)] if isinstance(uri, str) else [Uri.parse(one) for one in uri]
    if len(uris) not in (1, 2):
        raise UriError(f"a stream has one URI, or one for metadata and one for bodies, not {len(uris)}")
    tags = [one.require_want_data() for one in uris]
    asked = selection is not None and all(takes_selections(one) for one in uris)
    identifier = selection.identifier(ticket) if selection is not None and asked else ticket
    with ExitStack() as connections:
        opened = [connections.enter_context(transport(one.scheme).connect(one, timeout)) for one in uris]
        for connection, tag in zip(opened, tags, strict=True):
            try:
                connection.send([Message(tag, (identifier,))], timeout)
            except ConnectionClosed:
                connection.receive(timeout, _nothing)  # the server may have said why: RemoteError
                raise
        stream = Stream(opened, uris[-1].free_data, timeout, max_body, options.memory_pool)
        connections.pop_all()  # the stream owns them now
    deliveries = stream.deliveries()
    schema = next(deliveries)
    assert isinstance(schema, Delivery)  # no run begins a stream
    try:
        if selection is not None:
            fields = _left_to_choose(schema.header, selection, asked=identifier != ticket)
            options = replace(options, included_fields=fields or ())
        if stream.space.static:
            reader = _read_in_place(stream, schema, deliveries, options)
        else:
            reader = join(stream.attached(_again([schema], deliveries)), options)
    except BaseException:
        deliveries.close()
        stream.settle()
        raise
    # libarrow takes no included fields to mean all of them.
    return selected(reader, []) if selection is not None and fields == [] else reader


def selection_of(columns: Sequence[str] | None, options: ReadOptions) -> Selection | None:
    """What a reader asks for: columns by name, by position, or all. Raises OptionError where that is said twice."""
    if columns is None:
        return Selection(fields=tuple(options.included_fields)) if options.included_fields else None
    if options.included_fields:
        raise OptionError("give columns or included_fields, not both")
    return Selection(columns=tuple(columns))


def takes_selections(uri: Uri) -> bool:
    """Whether the server at `uri` chooses columns itself."""
    return uri.parameters.get(PARAMETER[0]) == PARAMETER[1]


def _nothing(tag: int | None, length: int) -> Buffer:
    raise RemoteProtocolError(f"the server sent {length} bytes before it was asked for anything")


def _read_in_place(
    stream: Stream, schema: Delivery, deliveries: Deliveries, options: ReadOptions
) -> pa.RecordBatchReader:
    """A reader over a dataset in regions that were shared before it began.

    If all of it lies there as an IPC stream, libarrow reads it there. That only shows at its end, which costs little:
    metadata and addresses are all that arrives.
    """
    seen: list[Delivery | Batches] = [schema]
    place = InPlace(schema, stream.space)
    for item in deliveries:
        seen.append(item)
        if len(seen) > _MAX_SEEN or not place.add(item):
            break
    else:
        reader = place.reader(stream.hold, options)
        if reader is not None:
            return reader
    return join(stream.attached(_again(seen, deliveries)), options)


def _left_to_choose(header: bytes, selection: Selection, asked: bool) -> list[int] | None:
    """Which fields are to be kept of the schema that has come, if those are not all; `asked` if the server chose.

    Raises ColumnNotFound and OptionError.
    """
    with blamed(RemoteProtocolError):
        names = pa.ipc.read_schema(pa.py_buffer(encapsulate(header))).names
    if asked and selection.fields is not None and len(names) == len(set(selection.fields)):
        return None
    indices = selection.indices(names)
    return indices if len(indices) < len(names) else None


def _again(seen: Sequence[Delivery | Batches], rest: Deliveries) -> Deliveries:
    yield from seen
    yield from rest
