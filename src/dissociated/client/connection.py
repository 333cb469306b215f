"""The request of a stream: connects to its server and sends want_data ("Client Sequence")."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import lru_cache, partial

from dissociated.base.buffers import Buffer
from dissociated.client.idle import IdleConnections
from dissociated.client.request import ReadRequest
from dissociated.client.session import ClientSession
from dissociated.client.stream import ClientStream
from dissociated.errors import (
    ConnectionClosed,
    DeadlineExceeded,
    RemoteProtocolError,
    TransportError,
    UnsafeMemory,
    UriError,
)
from dissociated.format.missed import MAX_NOTE_SIZE
from dissociated.protocol.message import Message
from dissociated.protocol.request import (
    FREES_PARAMETER,
    MISSED_PARAMETER,
    REQUEST_PARAMETER,
    Request,
    announces,
    with_members,
)
from dissociated.protocol.sender import Tags
from dissociated.protocol.wire import PREFIX_SIZE, Streams
from dissociated.transport.base import Connection
from dissociated.transport.registry import transport
from dissociated.transport.trace import traced
from dissociated.uri import DEVICE, Uri

_log = logging.getLogger(__name__)

#: Seconds for which a server counts as unresponsive after it did not accept a connection: routes to it are tried last.
UNRESPONSIVE_TIME = 60.0
#: The servers that did not accept a connection in time, each with the time by `time.monotonic`. All clients of the
#: process share them, since each task of Spark has a client of its own.
_unresponsive: dict[tuple[str, str, int | None, str], float] = {}

_MAX_IDENTIFIERS = 16  # identifiers that are kept as they are sent
#: The streams that each connection carries, by the number of connections.
_STREAMS = {1: (Streams.BOTH,), 2: (Streams.METADATA, Streams.BODIES)}


def parse_uris(uri: str | Sequence[str]) -> list[Uri]:
    """Parse one URI, or a URI for metadata and a URI for bodies.

    Raises:
        UriError: A URI is invalid, or their number or order is wrong.
    """
    uris = [Uri.parse(uri)] if isinstance(uri, str) else [Uri.parse(item) for item in uri]
    if len(uris) not in (1, 2):
        raise UriError(f"a stream has one URI, or one for metadata and one for bodies, not {len(uris)}")
    if len(uris) == 2 and [item.parameters.get("stream") for item in uris] == ["bodies", "metadata"]:
        raise UriError("of two URIs the first is that of the metadata, and the second that of the bodies: swap them")
    return uris


def request_stream(
    uris: Sequence[Uri], identifier: bytes, request: ReadRequest, connect_timeout: float | None = None
) -> ClientStream:
    """Connect to the URI, or to both URIs, and request the stream `identifier`. Errors are those of `open_stream`.

    If another user's server shares memory that is not safe to map, request packed bodies, provided that the URI offers
    them. If the server has not accepted the connection after `connect_timeout` seconds, raise TransportError.
    """
    while True:
        idle = _idle_for(uris, request)
        tags = [uri.require_want_data() for uri in uris]
        can_free_messages = len(uris) == 1 and all(
            announces(uris[0], parameter) for parameter in (REQUEST_PARAMETER, FREES_PARAMETER)
        )
        requested = _requested(identifier, idle is not None, can_free_messages)
        try:
            if idle is not None and (connection := idle.take(uris[0])) is not None:
                # The server may have closed it meanwhile: then connect anew.
                with suppress(ConnectionClosed, RemoteProtocolError):
                    return ClientStream(_open_session(uris, tags, [connection], requested, request, idle))
            opened = _connect_all(uris, tags, request, connect_timeout)
            return ClientStream(_open_session(uris, tags, opened, requested, request, idle))
        except UnsafeMemory:
            packed = uris[-1].with_packed_bodies()
            if packed is None:
                raise
        uris = [*uris[:-1], packed]


@lru_cache(_MAX_IDENTIFIERS)
def _requested(identifier: bytes, keep: bool, can_free_messages: bool) -> tuple[bytes, bool]:
    """Return the identifier to send, and whether it says that bodies by address are freed by numbers of messages.

    `keep` asks the server to keep the connection after the stream.
    """
    if keep:
        identifier = with_members(identifier, keep=True)
    with suppress(RemoteProtocolError):  # an identifier that cannot be read is left to the server, which refuses it
        if can_free_messages:
            identifier = with_members(identifier, **dict([FREES_PARAMETER]))
        return identifier, Request.parse(identifier).frees_messages
    return identifier, False


def _idle_for(uris: Sequence[Uri], request: ReadRequest) -> IdleConnections | None:
    """Return the place of connections that can carry several streams: one connection, to memory of this process."""
    if len(uris) > 1 or request.device is not None or not transport(uris[0].scheme).carries_streams:
        return None
    return request.idle if announces(uris[0], REQUEST_PARAMETER) else None


def _connect_all(
    uris: Sequence[Uri], tags: Sequence[int], request: ReadRequest, connect_timeout: float | None
) -> list[Connection]:
    """Connect to all URIs. `tags` are the tags of the requests."""
    if any(DEVICE in uri.parameters for uri in uris):
        if request.device is None or request.device.identity != uris[-1].parameters.get(DEVICE):
            raise UriError("the URI is for readers on the device of the dataset: use another location")
    elif not request.allow_rma and any(uri.remote_handle is not None for uri in uris):
        raise UriError(
            "the URI has a remote_handle, and fetching from the server's memory would let the server write to ours: "
            'give allow_rma=True if you trust it, or take a location with bodies="packed"'
        )
    with ExitStack() as connections:
        opened = [connections.enter_context(_connect(uri, request.timeout, connect_timeout)) for uri in uris]
        connections.pop_all()  # the caller owns them now
    return [
        traced(connection, Tags({tag: streams}, uris[-1].free_data))
        for connection, tag, streams in zip(opened, tags, _STREAMS[len(uris)], strict=True)
    ]


def _open_session(
    uris: Sequence[Uri],
    tags: Sequence[int],
    opened: Sequence[Connection],
    requested: tuple[bytes, bool],
    request: ReadRequest,
    idle: IdleConnections | None,
) -> ClientSession:
    """Request the stream on these connections, which are closed if that fails. `requested` is of `_requested`.

    If `idle` is given, it gets the connection when the stream has ended.
    """
    timeout = request.timeout
    identifier, frees_messages = requested
    takes_missed = announces(uris[0], MISSED_PARAMETER)
    if takes_missed:  # the limit is for the publisher's metadata
        request = replace(request, max_metadata=request.max_metadata + MAX_NOTE_SIZE)
    with ExitStack() as connections:
        for connection in opened:
            connections.enter_context(connection)
        for connection, tag in zip(opened, tags, strict=True):
            connection.limit_untagged(PREFIX_SIZE + request.max_metadata)
            connection.address_space.keeps_files = request.keep_files
            if request.spaces is not None:
                request.spaces.append(connection.address_space)
            try:
                connection.send([Message(tag, (identifier,))], timeout)
            except ConnectionClosed:
                connection.receive(timeout, _refuse_body)  # raises RemoteError if the server has sent a reason
                raise
        keep = None if idle is None else partial(idle.put, uris[0])
        session = ClientSession(opened, uris[-1].free_data, request, keep, takes_missed, frees_messages)
        connections.pop_all()  # the session owns them now
    return session


def _connect(uri: Uri, timeout: float, connect_timeout: float | None) -> Connection:
    try:
        connection = transport(uri.scheme).connect(uri, timeout if connect_timeout is None else connect_timeout)
    except DeadlineExceeded as error:
        if connect_timeout is None:
            raise
        if not is_unresponsive(uri):
            _log.warning("server is tried last for a while: seconds=%g error=%s", UNRESPONSIVE_TIME, error)
        remember_unresponsive(uri)
        raise TransportError(str(error)) from None
    _unresponsive.pop(_server(uri), None)
    return connection


def remember_unresponsive(uri: Uri) -> None:
    """Record that the server at `uri` did not accept a connection in time."""
    now = time.monotonic()
    for server in [server for server, since in list(_unresponsive.items()) if now - since >= UNRESPONSIVE_TIME]:
        _unresponsive.pop(server, None)  # older entries have no effect, and would take memory
    _unresponsive[_server(uri)] = now


def is_unresponsive(uri: Uri) -> bool:
    """Return whether the server at `uri` did not accept a connection in the last `UNRESPONSIVE_TIME` seconds."""
    since = _unresponsive.get(_server(uri))
    return since is not None and time.monotonic() - since < UNRESPONSIVE_TIME


def _server(uri: Uri) -> tuple[str, str, int | None, str]:
    return uri.scheme, uri.host, uri.port, uri.path


def _refuse_body(tag: int | None, length: int) -> Buffer:
    raise RemoteProtocolError(f"the server sent {length} bytes before it got a request", rule="request-first")
