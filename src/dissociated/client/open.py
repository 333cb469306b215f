"""Reads datasets ("Client Sequence")."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from dissociated.buffers import MAX_BODY, MAX_METADATA, Buffer
from dissociated.client.stream import Deliveries, Stream
from dissociated.codec.columns import selected, sliced
from dissociated.codec.inplace import InPlace
from dissociated.codec.join import join
from dissociated.codec.options import ReadOptions, given
from dissociated.codec.reader import read_schema
from dissociated.errors import ConnectionClosed, OptionError, RemoteProtocolError, UnsafeMemory, UriError, WrongKind
from dissociated.protocol.events import Delivery
from dissociated.protocol.message import Message
from dissociated.protocol.metadata import PREFIX_SIZE
from dissociated.protocol.request import PARAMETER, Selection
from dissociated.protocol.run import Batches
from dissociated.transport.base import seconds
from dissociated.transport.registry import transport
from dissociated.uri import Uri

if TYPE_CHECKING:
    from dissociated.ipc.asynchronous import AsyncStreamReader

#: Seconds that a server may be silent.
TIMEOUT = 60.0

#: How many messages, or runs of them, are looked at before a dataset in shared memory is opened.
_MAX_SEEN = 1 << 16


def open_stream(
    uri: str | Sequence[str],
    ticket: bytes,
    *,
    columns: Sequence[str] | None = None,
    batches: tuple[int, int] | None = None,
    options: ReadOptions | None = None,
    timeout: float = TIMEOUT,
    max_body: int = MAX_BODY,
    max_metadata: int = MAX_METADATA,
    allow_rma: bool = False,
) -> pa.RecordBatchReader:
    """Request the stream `ticket` at `uri`, or at a metadata URI and a data URI, in any order of arrival.

    Batches are read as they are asked for. Where bodies come by address, arrays lie in the server's memory. That memory
    is given back when the last of them is collected, and the connection stays open until then. Dropping the reader ends
    the stream.

    - `columns`: read only these top-level columns, in the order of the schema. `included_fields` of `options` does the
      same by position.
    - `batches`: read the batches from the first number up to the second.
    - `options`: how batches are decoded.
    - `timeout`: how many seconds the server may be silent.
    - `max_body`: the largest body that is taken, in bytes. As much may wait for its metadata; at least 4 GiB.
    - `max_metadata`: the longest metadata of one message, in bytes. As much may wait for its body; at least 256 MiB.
    - `allow_rma`: this process may fetch from the server's memory where a URI has a remote_handle. The server could
      then write to ours.

    A server whose URI does not say that it can choose columns and batches sends everything, and the rest is dropped
    here.

    Raises UriError, TransportError and DeadlineExceeded where the server cannot be reached, RemoteError where it
    refuses, WrongKind where it holds tensors, ColumnNotFound, OptionError. Reading may raise these too,
    RemoteProtocolError, and FormatError where the schema nests deeper than `options` allow.
    """
    options = given(options, ReadOptions)
    selection = selection_of(columns, options, batches)
    uris = located(uri)
    asked = selection is not None and all(takes_selections(one) for one in uris)
    identifier = selection.identifier(ticket) if selection is not None and asked else ticket
    limits = timeout, max_body, max_metadata
    stream, schema, deliveries = begun(uris, identifier, *limits, pool=options.memory_pool, allow_rma=allow_rma)
    try:
        if schema.parsed.is_tensor:
            raise WrongKind("this stream holds tensors: read it with open_tensors, or by name with read_tensors")
        if selection is not None:
            fields = _left_to_choose(schema.header, selection, asked=identifier != ticket)
            options = replace(options, included_fields=fields or ())
        if stream.space.static:
            reader = _read_in_place(stream, schema, deliveries, options, max_body)
        else:
            reader = join(stream.attached(again([schema], deliveries)), options, max_body=max_body)
    except BaseException:
        deliveries.close()
        stream.settle()
        raise
    if selection is not None and fields == []:  # libarrow takes no included fields to mean all of them
        reader = selected(reader, [])
    return reader if batches is None or identifier != ticket else sliced(reader, *batches)


def selection_of(
    columns: Sequence[str] | None, options: ReadOptions, batches: tuple[int, int] | None = None
) -> Selection | None:
    """What a reader asks for: columns by name, by position, or all, and batches; None for everything.

    Raises OptionError where columns are said twice, and for batches that are no range.
    """
    if columns is not None and options.included_fields:
        raise OptionError("give columns or included_fields, not both")
    if batches is not None and not 0 <= batches[0] <= batches[1]:
        raise OptionError(f"batches are a first number and the one after the last, not {batches}")
    if columns is None and not options.included_fields and batches is None:
        return None
    fields = tuple(options.included_fields) or None
    return Selection(None if columns is None else tuple(columns), fields, batches)


def takes_selections(uri: Uri) -> bool:
    """Whether the server at `uri` chooses columns itself."""
    return uri.parameters.get(PARAMETER[0]) == PARAMETER[1]


def located(uri: str | Sequence[str]) -> list[Uri]:
    """One URI, or one for metadata and one for bodies. Raises UriError."""
    uris = [Uri.parse(uri)] if isinstance(uri, str) else [Uri.parse(one) for one in uri]
    if len(uris) not in (1, 2):
        raise UriError(f"a stream has one URI, or one for metadata and one for bodies, not {len(uris)}")
    if len(uris) == 2 and [one.parameters.get("stream") for one in uris] == ["bodies", "metadata"]:
        raise UriError("of two URIs the first is that of the metadata, and the second that of the bodies: swap them")
    return uris


def request(
    uris: Sequence[Uri],
    identifier: bytes,
    timeout: float,
    max_body: int,
    max_metadata: int,
    pool: pa.MemoryPool | None = None,
    allow_rma: bool = False,
) -> Stream:
    """Connect to the URI, or to both, and ask for the stream `identifier`. Raises as `open_stream` does."""
    timeout = seconds(timeout)
    tags = [one.require_want_data() for one in uris]
    if not allow_rma and any(one.remote_handle is not None for one in uris):
        raise UriError(
            "the URI has a remote_handle, and fetching from the server's memory would let the server write to ours: "
            'give allow_rma=True if you trust it, or take a location with bodies="packed"'
        )
    with ExitStack() as connections:
        opened = [connections.enter_context(transport(one.scheme).connect(one, timeout)) for one in uris]
        for connection, tag in zip(opened, tags, strict=True):
            connection.limit_untagged(PREFIX_SIZE + max_metadata)
            try:
                connection.send([Message(tag, (identifier,))], timeout)
            except ConnectionClosed:
                connection.receive(timeout, _nothing)  # the server may have said why: RemoteError
                raise
        stream = Stream(opened, uris[-1].free_data, timeout, max_body, max_metadata, pool)
        connections.pop_all()  # the stream owns them now
    return stream


def begun(uris: Sequence[Uri], identifier: bytes, *limits: Any, **options: Any) -> tuple[Stream, Delivery, Deliveries]:
    """`request`, the first message, and those after it.

    Where another user's server shares what is not safe to map, it is asked for packed bodies, if it has said how.
    """
    while True:
        stream = request(uris, identifier, *limits, **options)
        deliveries = stream.deliveries()
        try:
            first = next(deliveries)
        except UnsafeMemory:
            packed = uris[-1].with_packed_bodies()
            if packed is None:
                raise
            uris = [*uris[:-1], packed]
            continue
        assert isinstance(first, Delivery)  # no run begins a stream
        return stream, first, deliveries


async def open_stream_async(
    uri: str | Sequence[str],
    ticket: bytes,
    *,
    columns: Sequence[str] | None = None,
    batches: tuple[int, int] | None = None,
    options: ReadOptions | None = None,
    timeout: float = TIMEOUT,
    max_body: int = MAX_BODY,
    max_metadata: int = MAX_METADATA,
    allow_rma: bool = False,
) -> AsyncStreamReader:
    """`open_stream` for `async for`: it takes and raises the same, and blocks a thread in place of the event loop."""
    from dissociated.ipc.asynchronous import open_reader_async

    return await open_reader_async(
        open_stream,
        uri,
        ticket,
        columns=columns,
        batches=batches,
        options=options,
        timeout=timeout,
        max_body=max_body,
        max_metadata=max_metadata,
        allow_rma=allow_rma,
    )


def _nothing(tag: int | None, length: int) -> Buffer:
    raise RemoteProtocolError(f"the server sent {length} bytes before it was asked for anything")


def _read_in_place(
    stream: Stream, schema: Delivery, deliveries: Deliveries, options: ReadOptions, max_body: int
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
    return join(stream.attached(again(seen, deliveries)), options, max_body=max_body)


def _left_to_choose(header: bytes, selection: Selection, asked: bool) -> list[int] | None:
    """Which fields are to be kept of the schema that has come, if those are not all; `asked` if the server chose.

    Raises ColumnNotFound and OptionError.
    """
    names = read_schema(header, RemoteProtocolError).names
    if asked and selection.fields is not None and len(names) == len(set(selection.fields)):
        return None
    indices = selection.indices(names)
    return indices if len(indices) < len(names) else None


def again(seen: Sequence[Delivery | Batches], rest: Deliveries) -> Deliveries:
    """What has been seen of a stream, and then the rest of it, which is closed with this."""
    with closing(rest):
        yield from seen
        yield from rest
