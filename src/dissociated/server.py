"""Publishes datasets and sends them to whoever asks ("Server Sequence")."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import pyarrow as pa

from dissociated.dataset import Dataset, LiveDataset, SegmentsDataset, Source, StaticDataset, dataset
from dissociated.errors import (
    ConnectionClosed,
    DatasetNotFound,
    DeadlineExceeded,
    DissociatedError,
    RemoteProtocolError,
    SourceError,
    TransportError,
)
from dissociated.ipc.split import SplitMessage
from dissociated.memory.leases import Ledger
from dissociated.memory.live import LiveRegion
from dissociated.message import Buffer, Incoming, Run
from dissociated.protocol.bodies import encode_addresses
from dissociated.protocol.events import AddressesFreed, StreamRequested, Streams
from dissociated.protocol.header import buffer_extents
from dissociated.protocol.sender import Body, Sender, Tags
from dissociated.protocol.states import State
from dissociated.protocol.tags import BodyKind
from dissociated.store.segment import Segment
from dissociated.store.stage import host_name
from dissociated.transport.base import Connection, Listener, seconds
from dissociated.transport.registry import transport
from dissociated.uri import Uri

if TYPE_CHECKING:
    from dissociated.catalog.service import CatalogService

_log = logging.getLogger(__name__)

# The values are ours to choose; these spell DISS. Bits 0 and 1 say which streams, bit 2 that bodies come packed.
_WANT = 0x4449_5353_0000_0000
_PACKED = 4
_FREE = _WANT | 0x100
_TAGS = Tags(
    want={_WANT | one.value | packed: one for one in Streams.__members__.values() for packed in (0, _PACKED)},
    free_data=_FREE,
)

_MAX_REQUEST = 1 << 16  # bytes of a message from a client
_ANY_INTERFACE = ("0.0.0.0", "::")
_JOIN_TIMEOUT = 5.0
_PAUSE = 0.2  # seconds, before the next try to accept


class Server:
    """Serves datasets over any number of transports, with a catalog beside them.

    `listen` are URIs of transports; parts that are left out are chosen: `shm:`, `tcp://127.0.0.1:0`. `catalog` is
    where Arrow Flight listens, None for no catalog. Times are in seconds: `handshake_timeout` for a client to say
    what it wants, `stall_timeout` for one that takes nothing, `lease_timeout` for one that holds memory and says
    nothing. `live_limit` is how many bytes of a live stream one client may hold in shared memory; `inline_limit`
    up to which size bodies are sent inline where they could be shared.

    Locations of a server that listens on all interfaces name the host `advertise`, or else this host's own name.

    Use it as a context manager, or `close` it. Raises UriError and TransportError where it cannot listen.
    """

    def __init__(
        self,
        listen: Sequence[str] = ("shm:", "tcp://127.0.0.1:0"),
        *,
        catalog: str | None = "grpc://127.0.0.1:0",
        handshake_timeout: float = 10.0,
        stall_timeout: float = 300.0,
        lease_timeout: float = 86_400.0,
        live_limit: int = 1 << 28,
        inline_limit: int = 0,
        max_connections: int = 1024,
        advertise: str | None = None,
    ) -> None:
        self.handshake_timeout = seconds(handshake_timeout)
        self.stall_timeout = seconds(stall_timeout)
        self.lease_timeout = seconds(lease_timeout)
        self.advertise = advertise or host_name()
        self.live_limit = live_limit
        self.inline_limit = inline_limit
        self.max_connections = max_connections
        self._lock = threading.Lock()
        self._datasets: dict[str, Dataset] = {}
        self._by_ticket: dict[bytes, Dataset] = {}
        self._changing = threading.Lock()  # held by whoever replaces what a name means
        self._connections: dict[Connection, threading.Thread] = {}
        self._listeners: list[Listener] = []
        self._acceptors: list[threading.Thread] = []
        self._catalog: CatalogService | None = None
        self._closed = False
        self._ended = threading.Event()
        try:
            for text in listen:
                uri = Uri.parse(text)
                self._listeners.append(transport(uri.scheme).listen(uri))
            if catalog is not None:
                from dissociated.catalog.service import CatalogService

                self._catalog = CatalogService(self, catalog)
        except BaseException:
            self.close()
            raise
        for listener in self._listeners:
            thread = threading.Thread(target=self._accept, args=(listener,), name=f"accept {listener.uri}", daemon=True)
            thread.start()
            self._acceptors.append(thread)
        atexit.register(self.close)  # threads that outlive the interpreter could bring it down

    # What is published

    def publish(
        self,
        name: str,
        source: Source,
        *,
        options: pa.ipc.IpcWriteOptions | None = None,
        ticket: bytes | None = None,
    ) -> None:
        """Make `source` available under `name`, instead of what had that name; streams of that one go on.

        What a source can be: see `dissociated.dataset.dataset`. `options` are libarrow's for writing: compression,
        dictionary deltas. `ticket` is what clients ask with; left out, it is random. Two servers that publish the
        same source with one ticket can share the work: metadata from one, bodies from the other.
        Raises SourceError or StoreError where the source cannot be read.
        """
        made = dataset(name, source, options)
        if ticket is not None:
            made.ticket = ticket
        with self._changing:
            self._adopt(made)

    def publish_segments(self, name: str, segments: Sequence[Segment], *, append: bool = False) -> None:
        """Make segments available under `name`, whole and at once.

        With `append` they follow the segments that have that name already; there must be only segments.
        """
        with self._changing:
            with self._lock:
                existing = self._datasets.get(name) if append else None
            if existing is not None:
                if not isinstance(existing, SegmentsDataset):
                    raise DissociatedError(f"{name!r} was not written in segments, so nothing can be appended to it")
                segments = [*existing.segments, *segments]
            self._adopt(SegmentsDataset(name, segments))

    def _adopt(self, new: Dataset) -> None:
        with self._lock:
            if self._closed:
                raise DissociatedError("the server is closed")
            old = self._datasets.get(new.name)
            if self._by_ticket.get(new.ticket, old) is not old:
                raise DissociatedError(f"another dataset than {new.name!r} has this ticket already")
            if old is not None:
                del self._by_ticket[old.ticket]
            self._datasets[new.name] = new
            self._by_ticket[new.ticket] = new

    def drop(self, name: str) -> None:
        """Make `name` unavailable; streams of it go on. Raises DatasetNotFound."""
        with self._changing, self._lock:
            old = self._datasets.pop(name, None)
            if old is None:
                raise DatasetNotFound(f"no dataset {name!r} is published here")
            del self._by_ticket[old.ticket]

    def dataset(self, name: str) -> Dataset:
        """What is published under `name`. Raises DatasetNotFound."""
        with self._lock:
            found = self._datasets.get(name)
        if found is None:
            raise DatasetNotFound(f"no dataset {name!r} is published here")
        return found

    def by_ticket(self, ticket: bytes) -> Dataset:
        """What has this ticket. Raises DatasetNotFound."""
        with self._lock:
            found = self._by_ticket.get(ticket)
        if found is None:
            raise DatasetNotFound("no dataset has this ticket: it may have been replaced or dropped; look it up again")
        return found

    def names(self) -> list[str]:
        """The names of all datasets, sorted."""
        with self._lock:
            return sorted(self._datasets)

    # Where it can be had

    @property
    def catalog_uri(self) -> str:
        """Where Arrow Flight answers: grpc://HOST:PORT. Raises DissociatedError for a server without a catalog."""
        if self._catalog is None:
            raise DissociatedError("this server was made without a catalog")
        return self._catalog.uri

    def ticket(self, name: str) -> bytes:
        """The identifier that requests the dataset. Raises DatasetNotFound."""
        return self.dataset(name).ticket

    def locations(self, name: str, *, streams: str = "both", bodies: str = "any") -> list[str]:
        """The URIs that `name` can be requested at, one for each listener.

        `streams` is "both", or one of "metadata" and "bodies" for clients that ask for the two separately.
        `bodies` is "any", or "packed" for clients that want no addresses. Raises DatasetNotFound.
        """
        self.dataset(name)
        wanted = Streams[streams.upper()]
        return [str(self._location(listener.uri, wanted, bodies == "packed")) for listener in self._listeners]

    def _location(self, uri: Uri, streams: Streams, packed: bool) -> Uri:
        want_data = _WANT | streams.value | (_PACKED if packed else 0)
        shares = transport(uri.scheme).shares_memory and streams & Streams.BODIES and not packed
        located = Uri(
            uri.scheme,
            host=self.advertise if uri.host in _ANY_INTERFACE else uri.host,
            port=uri.port,
            path=uri.path,
            want_data=want_data,
            free_data=_FREE if shares else None,
            parameters=uri.parameters,
        )
        return located if streams is Streams.BOTH else located.with_parameters(stream=str(streams.name).lower())

    # Connections

    def _accept(self, listener: Listener) -> None:
        complained = False
        while True:
            try:
                connection = listener.accept()
            except TransportError as error:  # out of descriptors: some will be closed, and the client waits
                if not complained:
                    _log.warning("%s: %s; trying again", listener.uri, error)
                complained = True
                self._ended.wait(_PAUSE)
                continue
            if connection is None:
                return
            complained = False
            if not self._start(connection):
                connection.abort("the server takes no more connections now: try again later")
                connection.close()

    def _start(self, connection: Connection) -> bool:
        """Serve `connection` in a thread of its own. False where there can be no more."""
        thread = threading.Thread(target=self._serve, args=(connection,), name="serve", daemon=True)
        with self._lock:
            if self._closed or len(self._connections) >= self.max_connections:
                return False
            try:
                thread.start()  # within the lock: `close` joins whatever it finds
            except RuntimeError as error:
                _log.warning("%r: %s", connection, error)
                return False
            self._connections[connection] = thread
        return True

    def _serve(self, connection: Connection) -> None:
        try:
            with connection:
                _Session(self, connection).run()
        except (ConnectionClosed, DeadlineExceeded) as error:
            _log.debug("%r: %s", connection, error)
        except DissociatedError as error:
            _log.info("%r: %s", connection, error)
        except Exception:
            _log.exception("%r: a stream failed for a reason of ours", connection)
        finally:
            with self._lock:
                self._connections.pop(connection, None)

    @property
    def connections(self) -> int:
        """How many connections are open."""
        with self._lock:
            return len(self._connections)

    # The end

    def close(self) -> None:
        """Stop listening, end every stream, drop every dataset. What clients have mapped stays readable."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._ended.set()
        if self._catalog is not None:
            self._catalog.close()
        for listener in self._listeners:
            listener.close()
        with self._lock:
            connections = dict(self._connections)
            self._datasets.clear()
            self._by_ticket.clear()
        for connection in connections:
            connection.interrupt()
        end = time.monotonic() + _JOIN_TIMEOUT
        for thread in (*connections.values(), *self._acceptors):
            thread.join(max(0.0, end - time.monotonic()))
        atexit.unregister(self.close)

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Session:
    """One connection: a request, the stream, and the frees that come back."""

    def __init__(self, server: Server, connection: Connection) -> None:
        self._server = server
        self._connection = connection
        self._sender = Sender(_TAGS)
        self._ledger = Ledger()
        self._regions: list[LiveRegion] = []  # of a live stream; bodies go to the last
        self._inline = False  # a live region was full, and no free has come since

    def run(self) -> None:
        try:
            request = self._request()
            if request is None:
                return
            identifier, streams, packed = request
            try:
                self._send(self._server.by_ticket(identifier), streams, packed)
            except ConnectionClosed:
                # The client may have stopped listening and still hold memory: then it goes on to give it back.
                self._sender.fail()
            self._drain()
            if self._sender.state is State.ENDING:
                self._sender.drained()
        except DissociatedError as error:
            self._connection.abort(str(error))
            raise
        except Exception:
            self._connection.abort("the server failed for a reason that its log tells")
            raise
        finally:
            self._ledger.release_all()
            for region in self._regions:
                region.close()

    def _request(self) -> tuple[bytes, Streams, bool] | None:
        incoming = self._receive(self._server.handshake_timeout)
        if incoming is None:
            return None
        event = self._sender.receive(incoming.tag, bytes(incoming.data))
        assert isinstance(event, StreamRequested)  # the table allows nothing else first
        return event.identifier, event.streams, bool((incoming.tag or 0) & _PACKED)

    def _send(self, wanted: Dataset, streams: Streams, packed: bool) -> None:
        mapped = self._connection.shares_memory and not packed and bool(streams & Streams.BODIES)
        if isinstance(wanted, StaticDataset):
            self._send_static(wanted, streams, mapped)
        elif isinstance(wanted, LiveDataset):
            self._send_live(wanted, streams, mapped)
        self._connection.send(self._sender.end(), self._server.stall_timeout)

    def _send_static(self, wanted: StaticDataset, streams: Streams, mapped: bool) -> None:
        if mapped:
            for segment in wanted.mapped()[1]:
                region = segment.region
                self._connection.share(segment.descriptor, region.base, region.size, segment.backing)
        for group in wanted.groups(self._connection, streams, mapped, self._server.inline_limit):
            self._ledger.hold(group.leased)  # first: of a group that is cut off, some may have arrived
            self._connection.send(group.prepared, self._server.stall_timeout)
            self._sender.sent(group.messages)
            self._take_frees()

    def _send_live(self, wanted: LiveDataset, streams: Streams, mapped: bool) -> None:
        for message in _blamed(wanted):
            body = None
            if message.body is not None and streams & Streams.BODIES:
                length = message.parsed.body_length
                if mapped and length > self._server.inline_limit and self._room(wanted.name, length):
                    body = self._place(message, message.body)
                else:
                    body = Body(BodyKind.PACKED, message.body)
            self._connection.send(self._sender.send(message.header, body), self._server.stall_timeout)
            self._take_frees()

    def _room(self, name: str, length: int) -> bool:
        """Whether the live region takes a body of this length, after waiting for frees if need be.

        A client that holds everything until the stream ends would wait for us, and we for it. So if no free comes
        for a second, bodies go inline, and the client's own memory is the limit, until one comes.
        """
        if not self._regions or not self._regions[-1].fits(length):
            self._open_region(name)
        region = self._regions[-1]
        if not region.fits(length):
            return False
        while not region.has_room(length):
            if self._inline:
                return False
            try:
                incoming = self._receive(_PATIENCE)
            except DeadlineExceeded:
                self._inline = True
                return False
            if incoming is None:
                raise ConnectionClosed("the client closed the connection")
            self._freed(incoming)
        return True

    def _open_region(self, name: str) -> None:
        # What is held of the regions before counts no longer; a client that holds on to it has only its own memory.
        for used_up in [region for region in self._regions if not region.unfreed]:
            self._regions.remove(used_up)
            used_up.close()
        region = LiveRegion(name, self._server.live_limit)
        self._regions.append(region)
        self._connection.share(region.descriptor, region.base, region.size, region.backing)

    def _place(self, message: SplitMessage, parts: Sequence[Buffer]) -> Body:
        offsets, lengths = buffer_extents(message.header, message.parsed)
        placed = self._regions[-1].place(parts, message.parsed.body_length, zip(offsets, lengths, strict=True))
        self._ledger.hold(address for address, length in placed if length)
        return Body(BodyKind.ADDRESSES, (encode_addresses(placed),))

    def _take_frees(self) -> None:
        while self._connection.arrived():
            incoming = self._receive(self._server.stall_timeout)
            if incoming is None:
                raise ConnectionClosed("the client closed the connection")
            self._freed(incoming)

    def _freed(self, incoming: Incoming) -> None:
        event = self._sender.receive(incoming.tag, bytes(incoming.data))
        assert isinstance(event, AddressesFreed)  # the table allows nothing else now
        gone = self._ledger.release(event.addresses)
        for region in self._regions:
            region.free(gone)
        self._inline = False

    def _receive(self, timeout: float) -> Incoming | None:
        incoming = self._connection.receive(timeout, _allocate)
        if isinstance(incoming, Run):
            raise RemoteProtocolError("the client sent a run of messages, which only servers do")
        return incoming

    def _drain(self) -> None:
        """ "wait for tagged <free_data> messages", until nothing is outstanding or the client is gone."""
        while len(self._ledger):
            incoming = self._receive(self._server.lease_timeout)
            if incoming is None:
                return
            self._freed(incoming)


_PATIENCE = 1.0  # seconds


def _allocate(tag: int | None, length: int) -> Buffer:
    if length > _MAX_REQUEST:
        raise RemoteProtocolError(f"the client sent a message of {length} bytes; at most {_MAX_REQUEST} are taken")
    return bytearray(length)


def _blamed(wanted: LiveDataset) -> Iterator[SplitMessage]:
    """The messages of `wanted`. What its source raises becomes a reason that the client is told."""
    try:
        yield from wanted.messages()
    except DissociatedError:
        raise
    except Exception as error:
        raise SourceError(f"the source of {wanted.name!r} failed: {type(error).__name__}: {error}") from error
