"""Publishes datasets and sends them to whoever asks ("Server Sequence")."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

import pyarrow as pa

from dissociated.access import Authorize, Granted, Ticket, security
from dissociated.buffers import MAX_METADATA
from dissociated.codec.batches import BatchReader
from dissociated.codec.options import WriteOptions
from dissociated.codec.split import Pair, batches
from dissociated.datasets.base import Dataset, Source, check_name
from dissociated.datasets.broadcast import Broadcast, Live
from dissociated.datasets.sources import confined, dataset
from dissociated.datasets.static import SegmentsDataset, StaticDataset, StoredDataset
from dissociated.errors import (
    AccessDenied,
    ConnectionClosed,
    DatasetNotFound,
    DeadlineExceeded,
    DissociatedError,
    LocalProtocolError,
    SourceError,
    TransportError,
)
from dissociated.fork import belongs, disown
from dissociated.host import host_name
from dissociated.memory.remote import with_spans
from dissociated.monitoring.changes import Change
from dissociated.monitoring.status import Activity, ServerStatus, Tally
from dissociated.protocol.events import Streams
from dissociated.protocol.request import MAGIC, PARAMETER, Selection, parse_identifier
from dissociated.server.session import FREE_DATA, Session, want_tag
from dissociated.store.segment import Memory, Segment, SegmentWriter
from dissociated.transport.base import Connection, Listener, seconds
from dissociated.transport.registry import transport
from dissociated.uri import ANY_INTERFACE, PACKED, Uri

if TYPE_CHECKING:
    from dissociated.catalog.service import CatalogService
    from dissociated.monitoring.metrics import MetricsService

_log = logging.getLogger(__name__)

_APART = (Streams.METADATA, Streams.BODIES)
_JOIN_TIMEOUT = 5.0
_PUMP_TIMEOUT = 1.0  # for one that waits for its source, which nobody can hurry
_PAUSE = 0.2  # seconds, before the next try to accept


class _Full(DissociatedError):
    """There are as many connections as there may be."""


class Server:
    """Serves datasets over any number of transports, with a catalog beside them.

    `listen` are URIs of transports; parts that are left out are chosen: `shm:`, `tcp://127.0.0.1:0`. `catalog` is
    where Arrow Flight listens, None for no catalog. Times are in seconds: `handshake_timeout` for a client to have said
    what it wants, whatever it says before, `stall_timeout` for one that takes nothing, `lease_timeout` for one that
    holds memory and says nothing. `max_connections` are served at a time. Beside them `max_asking` may not have said
    what they want yet: where more come, the one that has had most time is closed. `live_limit` is how many bytes of a
    live stream one client may hold in shared memory. Who was sent away for being too slow keeps what he holds until he
    lets go: while all of these hold `kept_limit` bytes, four times `live_limit` unless you say otherwise, nobody new
    may read a live stream over shared memory. `inline_limit` is up to which size bodies are sent inline where they
    could be shared: left out, 16 KiB for live streams, and none for what is static. What has more than `max_metadata`
    bytes of metadata in one message, a schema above all, is not published: clients take no more either, unless they
    say so.

    With `allow_rma`, clients over `ucx:` and `fabric:` that ask for it fetch bodies from this process's memory by
    themselves. UCX then lets every client that connects read and write all of that memory, libfabric read what is
    published: only for networks and peers you trust.

    With `ticket_lifetime`, in seconds, tickets are signed and expire; servers with the same `secret` accept each
    other's tickets for what was published with the same one. `authorize` guards the catalog: tokens, or a callable
    that is given one and says whose it is, or something false. `tls_cert` and `tls_key` are PEM files for a catalog
    at grpc+tls: and for listeners of tls:. `metrics` is HOST:PORT, where Prometheus may ask for /metrics, and anybody
    else. See docs/access.md.

    `retain` is for how many seconds tickets that the catalog gives out stay good, and so for how long what they are for
    stays in memory after it has been replaced: the expiry of endpoints that Flight knows. With 0 nothing is promised.

    Locations of a server that listens on all interfaces name the host `advertise`, or else this host's own name.

    Use it as a context manager, or `close` it. Raises UriError and TransportError where it cannot listen.
    """

    def __init__(
        self,
        listen: Sequence[str] = ("shm:", "tcp://127.0.0.1:0"),
        *,
        catalog: str | None = "grpc://127.0.0.1:0",
        retain: float = 0.0,
        handshake_timeout: float = 10.0,
        stall_timeout: float = 300.0,
        lease_timeout: float = 86_400.0,
        live_limit: int = 1 << 28,
        kept_limit: int | None = None,
        inline_limit: int | None = None,
        max_metadata: int = MAX_METADATA,
        max_connections: int = 1024,
        max_asking: int = 128,
        advertise: str | None = None,
        allow_rma: bool = False,
        ticket_lifetime: float | None = None,
        secret: bytes | None = None,
        authorize: Authorize | Iterable[str] | Mapping[str, str] | None = None,
        tls_cert: str | os.PathLike[str] | None = None,
        tls_key: str | os.PathLike[str] | None = None,
        metrics: str | None = None,
    ) -> None:
        self.handshake_timeout = seconds(handshake_timeout)
        self.stall_timeout = seconds(stall_timeout)
        self.lease_timeout = seconds(lease_timeout)
        self.advertise = advertise or host_name()
        self.live_limit = live_limit
        self.kept_limit = 4 * live_limit if kept_limit is None else kept_limit
        self.inline_limit = inline_limit
        self.max_metadata = max_metadata
        self.max_connections = max_connections
        self.max_asking = max_asking
        guarded = security(
            ticket_lifetime=ticket_lifetime, secret=secret, authorize=authorize, tls_cert=tls_cert, tls_key=tls_key
        )
        certificate = guarded.certificate
        self.tickets = guarded.tickets
        self._lock = threading.Lock()
        self._datasets: dict[str, Dataset] = {}
        self._by_identifier: dict[bytes, Dataset] = {}
        self._changing = threading.Lock()  # held by whoever replaces what a name means
        #: What is counted; the catalog counts here, too.
        self.activity = Activity()
        self._connections: dict[Connection, threading.Thread] = {}
        self._asking: dict[Connection, None] = {}  # those of them that have not said what they want, the oldest first
        self._listeners: list[Listener] = []
        self._acceptors: list[threading.Thread] = []
        self._catalog: CatalogService | None = None
        self._metrics: MetricsService | None = None
        self._closed = False
        self._ended = threading.Event()
        try:
            for text in listen:
                uri = Uri.parse(text)
                if uri.scheme == "tls" and certificate is not None:
                    uri = uri.with_parameters(**{"cert": certificate[0], "key": certificate[1], **uri.parameters})
                if allow_rma and uri.scheme in ("ucx", "fabric"):
                    uri = uri.with_parameters(rma="allow")
                self._listeners.append(transport(uri.scheme).listen(uri))
            if catalog is not None:
                from dissociated.catalog.backend import StageStock
                from dissociated.catalog.service import CatalogService

                self._catalog = CatalogService(self, catalog, stock=StageStock(), retain=retain, security=guarded)
            if metrics is not None:
                from dissociated.monitoring.metrics import MetricsService

                self._metrics = MetricsService(metrics, self.status)
        except BaseException:
            self.close()
            raise
        for listener in self._listeners:
            thread = threading.Thread(target=self._accept, args=(listener,), name=f"accept {listener.uri}", daemon=True)
            thread.start()
            self._acceptors.append(thread)
        atexit.register(self.close)  # threads that outlive the interpreter could bring it down
        belongs(self)

    def forked(self) -> None:
        """See `dissociated.fork`."""
        atexit.unregister(self.close)
        disown(self)

    # What is published

    def publish(
        self,
        name: str,
        source: Source,
        *,
        options: WriteOptions | None = None,
        ticket: bytes | None = None,
        live: Live | None = None,
    ) -> None:
        """Make `source` available under `name`, instead of what had that name; streams of that one go on.

        What a source can be: see `dissociated.datasets.base.dataset`. `options` say how it is written: compression,
        alignment, dictionary deltas; an IPC file is served as it is and takes none. `ticket` is what clients ask
        with, or if tickets are signed what they are signed for; left out, it is random. Two servers that publish the
        same source with one ticket can share the work: metadata from one, bodies from the other.

        With `live` the source is read once, for all clients together, each of which has its own place in the stream;
        otherwise each client has its own reading. See `Live` for who may join, and what becomes of those who stall.

        Raises SourceError or StoreError where the source cannot be read, FormatError where it cannot be written with
        these options, OptionError where `options` or `live` are something else.
        """
        check_name(name)
        made = (
            dataset(name, source, options) if live is None else Broadcast(name, source, live, self.live_limit, options)
        )
        if ticket is not None:
            if ticket.startswith(MAGIC):
                raise DissociatedError(
                    f"a ticket may not begin with {MAGIC!r}: by that, selections of columns are told"
                )
            made.ticket = ticket
        with self._changing:
            self._adopt(made)

    def writer(self, name: str, schema: pa.Schema, options: WriteOptions | None = None) -> SegmentWriter:
        """A writer straight into shared memory, whose batches are published under `name` on `close`, whole and at once.

        Leaving its `with` by an exception discards them. Raises FormatError where the schema cannot be written so, and
        StoreError where there is no space left. Closing it raises DissociatedError where the server is closed.
        """
        check_name(name)
        return SegmentWriter(
            partial(Memory, name, lambda segment: self.publish_segments(name, [segment])), schema, options
        )

    def publish_segments(self, name: str, segments: Sequence[Segment], *, append: bool = False) -> None:
        """Make segments available under `name`, whole and at once.

        With `append` they follow the segments that have that name already; there must be only segments.
        """
        with self._changing:
            with self._lock:
                existing = self._datasets.get(name) if append else None
            if existing is not None:
                if not isinstance(existing, SegmentsDataset | StoredDataset):
                    raise DissociatedError(f"{name!r} was not written in segments, so nothing can be appended to it")
                segments = [*existing.opened().segments, *segments]
            self._adopt(SegmentsDataset(name, segments))

    def _adopt(self, new: Dataset) -> None:
        new.check_metadata(self.max_metadata)
        with self._lock:
            if self._closed:
                raise DissociatedError("the server is closed")
            old = self._datasets.get(new.name)
            if self._by_identifier.get(new.ticket, old) is not old:
                raise DissociatedError(f"another dataset than {new.name!r} has this ticket already")
            self._datasets[new.name] = new
            self._by_identifier[new.ticket] = new
        if self._catalog is not None:
            self._catalog.published(new)  # which lets go of the old one in its time
        else:
            why = "it is new" if old is None else "it replaces another"
            self._changed("committed", new, why)
            if old is not None:
                self.let_go(old)
                self._changed("retired", old, "it was replaced")

    def _changed(self, kind: str, it: Dataset, why: str) -> None:
        """What becomes of datasets without a catalog, which gives them no number."""
        self.activity.changes.add(Change(kind, it.name, None, it.rows, it.nbytes, why))

    def hold(self, held: Dataset, named: bool = False) -> None:
        """Serve `held` to whoever has its ticket, instead of what had that ticket; the catalog says what it is.

        With `named` it is what this server has under its name, too.
        """
        with self._lock:
            if self._closed:
                raise DissociatedError("the server is closed")
            known = self._datasets.get(held.name)
            self._by_identifier[held.ticket] = held
            if named or (known is not None and known.ticket == held.ticket):
                self._datasets[held.name] = held

    def let_go(self, held: Dataset) -> None:
        """Serve `held` no more; streams of it go on, but for a live one."""
        with self._lock:
            if self._by_identifier.get(held.ticket) is held:
                del self._by_identifier[held.ticket]
            if self._datasets.get(held.name) is held:
                del self._datasets[held.name]
        held.drop()

    def drop(self, name: str) -> None:
        """Make `name` unavailable; streams of it go on, but for a live one. Raises DatasetNotFound.

        The consumers of a live stream get what has been read of it, and then a RemoteError that says so.
        """
        with self._changing:
            old = self.dataset(name)
            if self._catalog is not None:
                self._catalog.drop(name)
            else:
                self._changed("dropped", old, "it was asked for")
            self.let_go(old)

    def dataset(self, name: str) -> Dataset:
        """What is published under `name`. Raises DatasetNotFound."""
        with self._lock:
            found = self._datasets.get(name)
        if found is None:
            raise DatasetNotFound(f"no dataset {name!r} is published here")
        return found

    def granted(self, ticket: bytes) -> tuple[Dataset, Dataset]:
        """What was published, and what of it this ticket is for.

        Raises DatasetNotFound, and AccessDenied for what is no ticket of this server, or not any more.
        """
        identifier, columns = self.tickets.check(ticket, time.time())
        found = self.identified(identifier)
        return found, found if columns is None else confined(found, columns)

    def identified(self, identifier: bytes) -> Dataset:
        """The publication that tickets are made for. Raises DatasetNotFound."""
        with self._lock:
            found = self._by_identifier.get(identifier)
        if found is None:
            raise DatasetNotFound("no dataset has this ticket: it may have been replaced or dropped; look it up again")
        return found

    def open_reader(self, identifier: bytes) -> pa.RecordBatchReader:
        """A reader over what a ticket is for, or a selection of that, for Flight.

        Raises as `granted` does, ColumnNotFound and SourceError.
        """
        ticket, selection = parse_identifier(identifier)
        found, whole = self.granted(ticket)
        reader = (whole if selection is None else whole.select(selection)).open_reader()
        self.activity.flight()

        def pairs() -> Iterator[Pair]:
            with found.reading():
                yield from batches(reader)

        return BatchReader(reader.schema, pairs())

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

    @property
    def metrics_uri(self) -> str:
        """Where metrics are. Raises DissociatedError for a server without them."""
        if self._metrics is None:
            raise DissociatedError("this server was made without metrics")
        return self._metrics.uri

    def ticket(self, name: str, *, columns: Sequence[str] | None = None) -> bytes:
        """The identifier that requests the dataset, or where tickets are signed these columns of it and no others.

        Raises DatasetNotFound, ColumnNotFound, and OptionError where tickets say nothing of columns.
        """
        wanted = self.dataset(name)
        if columns is None:
            return self.admit(wanted).data
        Selection(tuple(columns)).indices(wanted.schema.names)
        return self.tickets.sign(Granted(wanted.ticket, tuple(columns)), time.time()).data

    def admit(self, wanted: Dataset) -> Ticket:
        """A ticket for this publication, signed if tickets are, and when it expires."""
        return self.tickets.sign(Granted(wanted.ticket), time.time())

    def locations(self, name: str, *, streams: str = "both", bodies: str = "any") -> list[str]:
        """The URIs that `name` can be requested at, one for each listener.

        `streams` is "both", or one of "metadata" and "bodies" for clients that ask for the two separately.
        `bodies` is "any", or "packed" for clients that want no addresses. Raises DatasetNotFound.
        """
        found, wanted = self.dataset(name), Streams[streams.upper()]
        return [str(self._location(one, found, wanted, bodies == "packed")) for one in self._listeners]

    def listening(self) -> list[str]:
        """The URIs that any dataset can be requested at."""
        return [str(self._location(one, None, Streams.BOTH, False)) for one in self._listeners]

    def alternatives(self, found: Dataset) -> list[str]:
        """The locations of `found`; those that let clients fetch from memory are followed by one that does not."""
        ways = [(one, packed) for one in self._listeners for packed in (False, True)[: 1 + one.exposes_memory]]
        return [str(self._location(one, found, Streams.BOTH, packed)) for one, packed in ways]

    def reference_locations(self, found: Dataset) -> list[str]:
        """The two URIs that the C++ reference expects, for metadata and for bodies; none without a place for it.

        It needs UCX without error handling: `ucx:?err_mode=none`. There are none for what two connections cannot share.
        """
        if not found.divisible:
            return []
        places = [one for one in self._listeners if one.uri.parameters.get("err_mode") == "none"]
        return [str(self._location(one, found, streams, True)) for one in places[:1] for streams in _APART]

    def _location(self, listener: Listener, found: Dataset | None, streams: Streams, packed: bool) -> Uri:
        uri = listener.uri
        by_address = not packed and bool(streams & Streams.BODIES)
        memory = None
        if found is not None and by_address and listener.exposes_memory:
            with suppress(SourceError, DatasetNotFound):  # what is damaged is an error for who reads it, not who lists
                memory = found.exposed()
        exposed = isinstance(memory, StaticDataset)
        located = Uri(
            uri.scheme,
            host=self.advertise if uri.host in ANY_INTERFACE else uri.host,
            port=uri.port,
            path=uri.path,
            want_data=want_tag(streams, packed),
            free_data=FREE_DATA if exposed or (by_address and transport(uri.scheme).shares_memory) else None,
            parameters={**uri.parameters, PARAMETER[0]: PARAMETER[1]},
        )
        if by_address and transport(uri.scheme).shares_memory:
            located = located.with_parameters(**{PACKED: str(want_tag(streams, True))})
        if isinstance(memory, StaticDataset):
            located = with_spans(located, [listener.expose(segment.region) for segment in memory.mapped()[1]])
        return located if streams is Streams.BOTH else located.with_parameters(stream=str(streams.name).lower())

    def use_catalog(self, catalog: CatalogService) -> None:
        """Publish in this catalog, which the server owns from now on."""
        self._catalog = catalog

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
            self._make_room()
            if not self._start(connection, listener):
                connection.abort("the server can serve nobody now: try again later")
                connection.close()

    def _make_room(self) -> None:
        """Of those who have not said what they want, the one that has had most time goes, if there are too many."""
        with self._lock:
            slowest = next(iter(self._asking)) if len(self._asking) >= self.max_asking else None
            if slowest is not None:
                del self._asking[slowest]
        if slowest is not None:
            slowest.interrupt()

    def asked(self, connection: Connection) -> None:
        """It has said what it wants. Raises ConnectionClosed where it was too slow."""
        with self._lock:
            if connection not in self._asking:
                raise ConnectionClosed("it had not said what it wants when others wanted its place")
            del self._asking[connection]
            connection.due = None
            if len(self._connections) - len(self._asking) > self.max_connections:
                raise _Full("the server takes no more connections now: try again later")

    def _start(self, connection: Connection, listener: Listener) -> bool:
        """Serve `connection` in a thread of its own. False where there is none to be had."""
        with self._lock:
            if self._closed:
                return False
            tally = self.activity.begin(str(listener.uri), connection.peer)
            name = f"serve {tally.connection}"
            thread = threading.Thread(target=self._serve, args=(connection, tally), name=name, daemon=True)
            try:
                thread.start()  # within the lock: `close` joins whatever it finds
            except RuntimeError as error:
                _log.warning("%r: %s", connection, error)
                self.activity.end(tally, "failed")
                return False
            self._connections[connection] = thread
            self._asking[connection] = None
        return True

    def _serve(self, connection: Connection, tally: Tally) -> None:
        outcome, why = "failed", ""
        try:
            with connection:
                connection.due = time.monotonic() + self.handshake_timeout
                connection.handshake(self.handshake_timeout)
                Session(self, connection, tally).run()
            outcome, why = ("done", "the stream is over") if tally.sent else ("gone", "the client has had enough")
            if tally.sent:
                tally.settle()
        except (TransportError, DeadlineExceeded) as error:
            outcome, why = "gone", str(error)
        except (AccessDenied, DatasetNotFound, _Full) as error:
            outcome, why = "refused", str(error)
            if isinstance(error, _Full):
                self.activity.refuse(tally.listener)
        except Exception as error:
            if isinstance(error, DissociatedError) and not isinstance(error, LocalProtocolError):
                why = str(error)
            else:
                why = "a stream failed for a reason of ours"
                _log.exception("%r: %s", connection, why, extra=tally.fields())
        finally:
            level = logging.WARNING if outcome == "failed" else logging.INFO
            _log.log(level, "%r: %s", connection, why, extra=tally.fields() | {"outcome": outcome})
            self.activity.end(tally, outcome)
            with self._lock:
                self._connections.pop(connection, None)
                self._asking.pop(connection, None)

    @property
    def connections(self) -> int:
        """How many connections are open."""
        with self._lock:
            return len(self._connections)

    def status(self) -> ServerStatus:
        """What this server publishes, who reads it, and what it has sent."""
        datasets: dict[str, list[Dataset]] = {}
        with self._lock:
            for held in self._by_identifier.values():
                datasets.setdefault(held.name, []).append(held)
        listeners = [str(listener.uri) for listener in self._listeners]
        known = dict(sorted(datasets.items()))
        if self._catalog is None:
            return self.activity.status(None, listeners, known)
        catalog = self._catalog
        return self.activity.status(catalog.uri, listeners, known, catalog.node_status(), catalog.store_status())

    def admit_live(self, name: str) -> None:
        """Raise SourceError where those who were sent away hold so much that nobody else may hold memory."""
        kept = self.activity.kept
        if kept >= self.kept_limit:
            raise SourceError(
                f"the live stream {name!r} takes no new reader over shared memory: readers that were cut off still "
                f"hold {kept:,} bytes, and may hold {self.kept_limit:,} (kept_limit). Wait until they let go, or end "
                "them (dissociated status shows them); or read over tcp, or with bodies packed"
            )

    # The end

    def drain(self, timeout: float) -> bool:
        """Take no new connection, and wait up to `timeout` seconds for the others. Returns whether none is left."""
        for listener in self._listeners:
            listener.close()
        end = time.monotonic() + timeout
        with self._lock:
            threads = [*self._connections.values()]
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not self.connections

    def close(self) -> None:
        """Stop listening, end every stream, drop every dataset. What clients have mapped stays readable."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._ended.set()
        if self._metrics is not None:
            self._metrics.close()
        if self._catalog is not None:
            self._catalog.close()
        for listener in self._listeners:
            listener.close()
        with self._lock:
            connections = dict(self._connections)
            datasets = [*self._by_identifier.values()]
            self._datasets.clear()
            self._by_identifier.clear()
        end = time.monotonic() + _JOIN_TIMEOUT
        for one in datasets:
            one.close()
        for connection in connections:
            connection.interrupt()
        for thread in (*connections.values(), *self._acceptors):
            thread.join(max(0.0, end - time.monotonic()))
        end = min(end, time.monotonic() + _PUMP_TIMEOUT)
        for one in datasets:
            if isinstance(one, Broadcast) and one.pump is not None:
                one.pump.join(max(0.0, end - time.monotonic()))
        atexit.unregister(self.close)

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
