"""Reads datasets ("Client Sequence")."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeAlias

import pyarrow as pa

from dissociated.errors import ColumnNotFound, DissociatedError, RemoteProtocolError, UriError
from dissociated.ipc.encapsulated import encapsulate
from dissociated.ipc.join import Messages, join
from dissociated.memory.leases import Returns, leased_buffer
from dissociated.memory.region import Region
from dissociated.message import Buffer, Message
from dissociated.protocol.bodies import AddressList, encode_free
from dissociated.protocol.events import Delivery
from dissociated.protocol.header import buffer_extents, relocate
from dissociated.protocol.receiver import Receiver
from dissociated.transport.base import Allocate, Connection, Incoming
from dissociated.transport.mailbox import Mailbox
from dissociated.transport.registry import transport
from dissociated.uri import Uri

_log = logging.getLogger(__name__)

#: Seconds that a server may be silent.
TIMEOUT = 60.0
#: The largest body that is taken, in bytes.
MAX_BODY = 1 << 34

_MAX_AHEAD = 1 << 26  # bytes that one of two connections may be ahead of the other
_FREE_AT_ONCE = 1 << 12  # addresses in one free_data message, about


def open_stream(
    uri: str | Sequence[str],
    ticket: bytes,
    *,
    columns: Sequence[str] | None = None,
    timeout: float = TIMEOUT,
    max_body: int = MAX_BODY,
) -> pa.RecordBatchReader:
    """Request the stream `ticket` at `uri`, or at a metadata URI and a data URI, in any order of arrival.

    Batches are read as they are asked for. Where bodies come by address, arrays lie in the server's memory, which
    is given back when the last of them is collected; the connection stays open until then. Dropping the reader
    ends the stream.

    `columns` keeps only these top-level columns, in the order of the schema. `timeout` is how many seconds the
    server may be silent, `max_body` the largest body that is taken, in bytes.

    Raises UriError, TransportError and DeadlineExceeded where the server cannot be reached, RemoteError where it
    refuses, ColumnNotFound. Reading may raise these too, and RemoteProtocolError.
    """
    uris = [Uri.parse(uri)] if isinstance(uri, str) else [Uri.parse(one) for one in uri]
    if len(uris) not in (1, 2):
        raise UriError(f"a stream has one URI, or one for metadata and one for bodies, not {len(uris)}")
    tags = [one.require_want_data() for one in uris]
    with ExitStack() as connections:
        opened = [connections.enter_context(transport(one.scheme).connect(one, timeout)) for one in uris]
        for connection, tag in zip(opened, tags, strict=True):
            connection.send([Message(tag, (ticket,))], timeout)
        stream = _Stream(opened, uris[-1].free_data, timeout, max_body)
        connections.pop_all()  # the stream owns them now
    messages = stream.messages()
    if columns is None:
        return join(messages)
    first = next(messages)
    fields = column_indices(pa.ipc.read_schema(pa.py_buffer(encapsulate(first[0]))), columns)
    return join(_again(first, messages), pa.ipc.IpcReadOptions(included_fields=fields))


def column_indices(schema: pa.Schema, columns: Sequence[str]) -> list[int]:
    """Where these columns stand in `schema`, ascending. Raises ColumnNotFound."""
    fields = []
    for column in columns:
        found = schema.get_all_field_indices(column)
        if not found:
            raise ColumnNotFound(f"there is no column {column!r}; there are {', '.join(schema.names)}")
        fields += found
    return sorted(fields)


def _again(first: tuple[bytes, Buffer | None], rest: Messages) -> Messages:
    yield first
    yield from rest


class _Stream:
    """A stream that was requested: owns its connections, and the leases that come with it."""

    def __init__(self, connections: Sequence[Connection], free_data: int | None, timeout: float, max_body: int) -> None:
        self._connections = connections
        self._timeout = timeout
        self._max_body = max_body
        self._receiver = Receiver()
        self._receiver.want()
        self._leases = _Leases(connections[-1], free_data, timeout)

    def messages(self) -> Messages:
        """Every message in order, its body where libarrow shall find it. Ends the stream when it is closed."""
        receiver = self._receiver
        stopped = True
        try:
            with _arrivals(self._connections, self._allocate, self._timeout) as receive:
                while not receiver.complete:
                    delivery = receiver.next()
                    if delivery is not None:
                        yield self._attach(delivery)
                        continue
                    incoming = receive(receiver.needs_body)
                    if incoming is None:
                        receiver.disconnected()
                    elif incoming.tag is None:
                        receiver.receive_metadata(incoming.data)
                    else:
                        receiver.receive_body(incoming.tag, incoming.data)
            stopped = False
        finally:
            for connection in self._connections[:-1]:
                connection.close()
            self._leases.finish(stopped)

    def _attach(self, delivery: Delivery) -> tuple[bytes, Buffer | None]:
        _, header, parsed, body = delivery
        if not isinstance(body, AddressList):
            return header, body
        leased = body.leased
        if not leased:
            return (header if not parsed.body_length else relocate(header, parsed, body.addresses, 0)), b""
        region = self._connections[-1].space.find(leased[0])
        offsets = region.offsets(body.addresses, body.lengths)
        if any(offset % 8 for offset in offsets):  # which libarrow refuses: gather them where they should be
            wanted, _ = buffer_extents(header, parsed)
            packed = region.gather(offsets, body.lengths, wanted, self._allocate_packed(parsed.body_length))
            self._leases.give_back(leased)
            return header, packed
        return relocate(header, parsed, offsets, region.size), self._leases.lease(region, leased)

    def _allocate(self, tag: int, length: int) -> Buffer:
        announced = self._receiver.announced_length(tag)
        if announced is not None and announced != length:
            raise RemoteProtocolError(f"a body has {length} bytes; its metadata announced {announced}")
        return self._allocate_packed(length)

    def _allocate_packed(self, length: int) -> pa.Buffer:
        if length > self._max_body:
            raise RemoteProtocolError(f"a body has {length} bytes; at most {self._max_body} are taken (max_body)")
        return pa.allocate_buffer(length)


#: The next message of the stream of bodies, or of metadata; None at the end of its connection.
_Receive: TypeAlias = Callable[[bool], Incoming | None]


@contextmanager
def _arrivals(connections: Sequence[Connection], allocate: Allocate, timeout: float) -> Iterator[_Receive]:
    """A function that receives from one connection, or from two, each of which then has a thread of its own."""
    if len(connections) == 1:
        (connection,) = connections
        yield lambda bodies: connection.receive(timeout, allocate)
        return
    pumps = [_Pump(connection, allocate, timeout) for connection in connections]
    try:
        yield lambda bodies: pumps[bodies].arrived.get(timeout)
    finally:
        for pump in pumps:
            pump.stop()


class _Pump:
    """A thread that receives from one of two connections, so that neither can hold up the other."""

    def __init__(self, connection: Connection, allocate: Allocate, timeout: float) -> None:
        self.arrived: Mailbox[Incoming] = Mailbox(_MAX_AHEAD)
        self._connection = connection
        self._thread = threading.Thread(target=self._run, args=(allocate, timeout), name="receive", daemon=True)
        self._thread.start()

    def _run(self, allocate: Allocate, timeout: float) -> None:
        try:
            while (incoming := self._connection.receive(timeout, allocate)) is not None:
                self.arrived.put(incoming, len(incoming.data), None)
            self.arrived.close()
        except DissociatedError as error:
            self.arrived.close(error)

    def stop(self) -> None:
        self.arrived.close()
        self._connection.stop_receiving()
        self._thread.join()


class _Leases:
    """What this client holds of one server, and the thread that gives it back. Closes the connection at the end."""

    def __init__(self, connection: Connection, free_data: int | None, timeout: float) -> None:
        self._connection = connection
        self._free_data = free_data
        self._timeout = timeout
        self._returns = Returns()
        self._leased = 0
        self._finished = False
        self._thread: threading.Thread | None = None

    def lease(self, region: Region, addresses: tuple[int, ...]) -> pa.Buffer:
        """The region as a buffer that gives `addresses` back when it is no longer used."""
        self._count(addresses)
        return leased_buffer(region, addresses, self._returns)

    def give_back(self, addresses: tuple[int, ...]) -> None:
        """These addresses are not needed."""
        self._count(addresses)
        self._returns.put(addresses)

    def finish(self, stopped: bool) -> None:
        """No more leases will come; `stopped` if the server does not know that yet."""
        if stopped:
            self._connection.stop_receiving()
        self._finished = True
        if self._thread is None:
            self._connection.close()
        else:
            self._returns.wake()

    def _count(self, addresses: tuple[int, ...]) -> None:
        self._leased += len(addresses)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="give back", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        returned = 0
        listening = self._free_data is not None
        while not (self._finished and returned == self._leased):
            addresses = self._returns.take(_FREE_AT_ONCE)
            returned += len(addresses)
            if addresses and listening:
                try:
                    self._connection.send([Message(self._free_data, (encode_free(addresses),))], self._timeout)
                except DissociatedError as error:
                    # A server that is gone has nothing to take back; what is mapped stays readable without it.
                    _log.debug("%r: %s", self._connection, error)
                    listening = False
        self._connection.close()
