"""Publishes datasets and sends them to whoever asks ("Server Sequence")."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

import pyarrow as pa

from dissociated.base.display import count, html, html_table, size
from dissociated.base.exit import act_at_exit
from dissociated.base.fork import ProcessBound
from dissociated.base.host import host_name
from dissociated.codec.options import WriteOptions
from dissociated.control.commit import Publication
from dissociated.datasets.base import Dataset, Source, check_name
from dissociated.datasets.broadcast import Broadcast
from dissociated.datasets.live import Live
from dissociated.datasets.registry import Registry
from dissociated.datasets.sources import make_dataset
from dissociated.datasets.static import SegmentsDataset
from dissociated.errors import DissociatedError, OptionError
from dissociated.monitoring.activity import Activity
from dissociated.monitoring.changes import Change
from dissociated.monitoring.status import ConsumerStatus, ServerStatus
from dissociated.protocol.events import Streams
from dissociated.protocol.request import SELECTION_MAGIC
from dissociated.server.connections import Connections, open_listener
from dissociated.server.endpoints import Endpoints
from dissociated.server.options import ServerOptions, takes
from dissociated.server.pages import Pages
from dissociated.store.segment import MemfdSink, Segment, SegmentWriter
from dissociated.transport.base import Listener
from dissociated.uri import Uri

if TYPE_CHECKING:
    from dissociated.catalog.backend import Backend
    from dissociated.catalog.holdings import Holdings
    from dissociated.catalog.service import CatalogService

_JOIN_TIMEOUT = 5.0
_PUMP_TIMEOUT = 1.0  # for one that waits for its source, which nobody can hurry


class Server(ProcessBound):
    """Serves datasets over any number of transports, with a catalog beside them.

    `Server(listen, retain=300)` takes what `ServerOptions` has; `Server.of(options)` takes these as one value. Use it
    as a context manager, or `close` it. Raises UriError and TransportError where it cannot listen, and OptionError.
    """

    @takes(ServerOptions)
    def __init__(self, options: ServerOptions) -> None:
        self.limits = options.limits
        guarded = options.security()
        #: How it is guarded.
        self.security = guarded
        #: What is served.
        self.registry = Registry(guarded.tickets, options.choose_rows)
        #: What is counted; the catalog counts here, too.
        self.activity = Activity()
        self._changing = threading.Lock()  # held by whoever replaces what a name means
        self._listeners: list[Listener] = []
        self._connections = Connections(self._listeners, self.registry, self.limits, self.activity)
        #: Where datasets can be requested.
        self.endpoints = Endpoints(self._listeners, options.advertise or host_name(), options.choose_rows)
        self._catalog: CatalogService | None = None
        self._pages = Pages()
        self._lock = threading.Lock()
        self._closed = False
        try:
            for text in options.listen:
                self._listeners.append(open_listener(Uri.parse(text), guarded.certificate, options.allow_rma))
            if options.catalog is not None:
                from dissociated.catalog.backend import StageBackend
                from dissociated.catalog.service import CatalogService

                self._catalog = CatalogService(
                    options.catalog,
                    self.holdings(StageBackend()),
                    retain=options.retain,
                    advertise=options.advertise,
                    security=guarded,
                )
            self._pages.open(options.metrics, options.http, self.status, self.activity, guarded)
        except BaseException:
            self.close()
            raise
        self._connections.accept()
        act_at_exit()  # first, so that it is done last: a server may read as a client does
        atexit.register(self.close)  # threads that outlive the interpreter could bring it down
        self.bind_to_process()

    @classmethod
    def of(cls, options: ServerOptions) -> Server:
        """A server with these options, as one value. Raises as `Server` does."""
        return cls(**{field.name: getattr(options, field.name) for field in fields(options)})

    def after_fork_in_child(self) -> None:
        """See `dissociated.base.fork`."""
        atexit.unregister(self.close)

    # What is published

    def publish(
        self,
        name: str,
        source: Source,
        *,
        schema: pa.Schema | None = None,
        options: WriteOptions | None = None,
        ticket: bytes | None = None,
        live: Live | None = None,
        wait: bool = False,
        ttl: float | None = None,
    ) -> None:
        """Make `source` available under `name`, in place of what had that name. Its streams go on, except live ones.

        - `source`: a Table, a reader, record batches, a path, a callable, tensors, and more: see
          `dissociated.datasets.sources.make_dataset`.
        - `schema`: of an iterator or a list of record batches, which may then be empty.
        - `options`: how it is written: compression, alignment, dictionary deltas. An IPC file is served as it is, and
          takes none.
        - `ticket`: what clients ask with; where tickets are signed, what they are signed for. Left out, it is random.
          Two servers that publish the same source with one ticket can share the work: metadata from one, bodies from
          the other.
        - `live`: the source is read once, for all clients together. Each has its own place in the stream. `Live` says
          who may join, and what becomes of those who stall. Left out, each client has its own reading.
        - `wait`: publish a Table when its copy in shared memory is made, and raise here what that raises.
        - `ttl`: the seconds after which the dataset is dropped, 1e10 at most. The catalog of this server sees to that.

        Clients that map memory read a copy of what is held. Where a transport shares memory, the copy of a large Table
        begins now, in the background, unless it would take more than half of the memory that is left. It can be read
        meanwhile.

        Raises SourceError or StoreError where the source cannot be read, FormatError where it cannot be written with
        these options, OptionError where `options` or `live` are something else, or `ttl` is no time or there is no
        catalog for it.
        """
        self.check_process()
        Publication(name, ttl=ttl)
        if ttl is not None and self._catalog is None:
            raise OptionError("ttl takes a catalog, which drops what is over: this server was made without one")
        dataset = (
            make_dataset(name, source, options, schema)
            if live is None
            else Broadcast(name, source, live, self.limits.live_limit, options)
        )
        if ticket is not None:
            if ticket.startswith(SELECTION_MAGIC):
                raise DissociatedError(
                    f"a ticket may not begin with {SELECTION_MAGIC!r}: by that, selections of columns are told"
                )
            dataset.ticket = ticket
        if wait and self.endpoints.by_address:
            dataset.prepare_sharing(wait=True)
        with self._changing:
            self._publish(dataset, ttl)
        if self.endpoints.by_address:
            dataset.prepare_sharing(wait=False)

    def writer(self, name: str, schema: pa.Schema, options: WriteOptions | None = None) -> SegmentWriter:
        """A writer straight into shared memory, whose batches are published under `name` on `close`, whole and at once.

        Leaving its `with` by an exception discards them. Raises FormatError where the schema cannot be written so, and
        StoreError where there is no space left. Closing it raises DissociatedError where the server is closed.
        """
        self.check_process()
        check_name(name)
        return SegmentWriter(
            partial(MemfdSink, name, lambda segment: self.publish_segments(name, [segment])), schema, options
        )

    def publish_segments(self, name: str, segments: Sequence[Segment], *, append: bool = False) -> None:
        """Make segments available under `name`, whole and at once.

        With `append` they follow the segments that have that name already; there must be only segments.
        """
        self.check_process()
        with self._changing:
            existing = self.registry.find_name(name) if append else None
            if existing is not None:
                segments = [*existing.appendable(), *segments]
            self._publish(SegmentsDataset(name, segments))

    def _publish(self, new: Dataset, ttl: float | None = None) -> None:
        new.check_metadata(self.limits.max_metadata)
        with self._lock:
            if self._closed:
                raise DissociatedError("the server is closed")
        old = self.registry.publish(new)
        if self._catalog is not None:
            self._catalog.record_publication(new, ttl)  # which withdraws the old one in its time
        else:
            self._record_change("committed", new, "it is new" if old is None else "it replaces another")
            if old is not None:
                self.registry.withdraw(old)
                self._record_change("retired", old, "it was replaced")

    def _record_change(self, kind: str, dataset: Dataset, why: str) -> None:
        """What becomes of datasets without a catalog, which gives them no number."""
        self.activity.changes.add(Change(kind, dataset.name, None, dataset.rows, dataset.nbytes, why))

    def drop(self, name: str) -> None:
        """Make `name` unavailable; streams of it go on, but for a live one. Raises DatasetNotFound.

        The consumers of a live stream get what has been read of it, and then a RemoteError that says so.
        """
        self.check_process()
        with self._changing:
            old = self.dataset(name)
            if self._catalog is not None:
                self._catalog.drop(name)
            else:
                self._record_change("dropped", old, "it was asked for")
            self.registry.withdraw(old)

    def dataset(self, name: str) -> Dataset:
        """What is published under `name`. Raises DatasetNotFound."""
        self.check_process()
        return self.registry.lookup_name(name)

    def names(self) -> list[str]:
        """The names of all datasets, sorted."""
        self.check_process()
        return self.registry.names()

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
        return self._pages.metrics_uri

    @property
    def http_uri(self) -> str:
        """Where the page is. Raises DissociatedError for a server without it."""
        return self._pages.http_uri

    def ticket(self, name: str, *, columns: Sequence[str] | None = None) -> bytes:
        """The identifier that requests the dataset, or where tickets are signed these columns of it and no others.

        Raises DatasetNotFound, ColumnNotFound, and OptionError where tickets say nothing of columns.
        """
        return self.registry.issue_ticket(self.dataset(name), columns).data

    def locations(self, name: str, *, streams: str = "both", bodies: str = "any") -> list[str]:
        """The URIs that `name` can be requested at, one for each listener.

        `streams` is "both", or one of "metadata" and "bodies" for clients that ask for the two separately.
        `bodies` is "any", or "packed" for clients that want no addresses. Raises DatasetNotFound.
        """
        return self.endpoints.locations(self.dataset(name), Streams[streams.upper()], bodies == "packed")

    def holdings(self, backend: Backend) -> Holdings:
        """What a catalog of this process is made of: what is served here, and where writers put segments."""
        from dissociated.catalog.holdings import Holdings

        backend.max_metadata = self.limits.max_metadata
        return Holdings(self.registry, backend, self.endpoints, self.activity)

    def use_catalog(self, catalog: CatalogService) -> None:
        """Publish in this catalog, which the server owns from now on."""
        self._catalog = catalog

    # What becomes of it

    @property
    def connections(self) -> int:
        """How many connections are open."""
        self.check_process()
        return len(self._connections)

    def status(self) -> ServerStatus:
        """What this server publishes, who reads it, and what it has sent. Once it is closed, who still holds memory."""
        self.check_process()
        if self._catalog is not None and not self._closed:
            return self._catalog.status()
        return self.activity.status(None, self.endpoints.listener_uris(), self.registry.datasets())

    def __repr__(self) -> str:
        if self.is_inherited:
            return "<Server of the parent process>"
        if self._closed:
            return "<Server, closed>"
        names = self.names()
        published = "nothing published" if not names else f"{count(len(names))} published"
        return f"<Server of {published}, {', '.join(self._places)}>"

    def _repr_html_(self) -> str:
        served = [self.registry.find_name(name) for name in self.names()]
        rows = [[one.name, count(one.rows), size(one.nbytes), count(one.readers)] for one in served if one is not None]
        listed = html_table(["name", "rows", "size", "readers"], rows, right=(1, 2, 3)) if rows else "nothing published"
        return html("Server, closed", []) if self._closed else html("Server", self._places, listed)

    @property
    def _places(self) -> list[str]:
        catalog = [] if self._catalog is None else [f"catalog at {self.catalog_uri}"]
        return [*catalog, *(f"listening at {uri.partition('?')[0]}" for uri in self.endpoints.listener_uris())]

    # The end

    def drain(
        self, timeout: float, on_waiting: Callable[[Sequence[ConsumerStatus]], None] = lambda waited: None
    ) -> bool:
        """Take no new connections, and wait up to `timeout` seconds for streams in progress.

        It does not wait for clients that only hold memory of static datasets which they have mapped: that stays
        readable when this process has ended. Meanwhile `status` says "stopping".

        Args:
            timeout: seconds, in all.
            on_waiting: called with the connections that are waited for, at first and at most every five seconds.

        Returns:
            Whether no stream is in progress any more.
        """
        self.check_process()
        self._connections.stop_listening()
        return self._connections.drain(timeout, on_waiting)

    def close(self) -> None:
        """Stop listening, end every stream, drop every dataset. What clients have mapped stays readable."""
        if self.is_inherited:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._connections.refuse()
        self._pages.close()
        if self._catalog is not None:
            self._catalog.close()
        self._connections.stop_listening()
        datasets = self.registry.close()
        end = time.monotonic() + _JOIN_TIMEOUT
        for dataset in datasets:
            dataset.close()
        self._connections.interrupt()
        self._connections.join(max(0.0, end - time.monotonic()))
        end = min(end, time.monotonic() + _PUMP_TIMEOUT)
        for dataset in datasets:
            dataset.wait_closed(max(0.0, end - time.monotonic()))
        self.activity.kept_memory.close()
        atexit.unregister(self.close)

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
