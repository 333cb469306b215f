"""The server, which publishes datasets and sends them to clients ("Server Sequence" of the specification)."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa

from dissociated.base.display import count, html, html_table, size
from dissociated.base.exit import act_at_exit
from dissociated.base.fork import ProcessBound
from dissociated.base.host import host_name
from dissociated.codec.options import WriteOptions
from dissociated.control.access import Grant, Security
from dissociated.control.commit import Commit, check_name
from dissociated.datasets.base import Dataset, Source
from dissociated.datasets.broadcast import Broadcast
from dissociated.datasets.live import Live
from dissociated.datasets.registry import Registry
from dissociated.datasets.sources import make_dataset
from dissociated.datasets.static import SegmentsDataset
from dissociated.errors import DissociatedError, OptionError
from dissociated.monitoring.activity import Activity
from dissociated.monitoring.changes import Change
from dissociated.monitoring.status import ConsumerStatus, ServerStatus
from dissociated.protocol.request import REQUEST_MAGIC
from dissociated.protocol.wire import Streams
from dissociated.server.admission import Limits
from dissociated.server.connections import Connections, open_listener
from dissociated.server.endpoints import Endpoints
from dissociated.server.options import ServerOptions, takes_fields
from dissociated.store.segment import MemfdSink, Segment, SegmentWriter
from dissociated.transport.base import Listener
from dissociated.uri import Uri

if TYPE_CHECKING:
    from dissociated.catalog.backend import Backend
    from dissociated.catalog.holdings import Holdings
    from dissociated.catalog.service import CatalogService
    from dissociated.monitoring.dashboard import Dashboard
    from dissociated.monitoring.http import HttpService

_JOIN_TIMEOUT = 5.0  # seconds that `close` waits for threads
_PUMP_TIMEOUT = 1.0  # seconds that `close` waits for a thread that may be blocked in the source of a live stream


class Server(ProcessBound):
    """A server of datasets over any number of transports, with a catalog of them.

    `Server(listen, retain=300)` takes the fields of `ServerOptions` as arguments; `Server.of(options)` takes the
    options as one object. Use the server as a context manager, or `close` it.

    Raises:
        UriError: An address is invalid.
        TransportError: The server cannot listen at an address.
        OptionError: An option is invalid.

    Example:
        ```python
        import dissociated as dis

        with dis.Server(["shm:", "tcp://127.0.0.1:0"]) as server:
            server.publish("flights", table)
            print(server.catalog_uri)  # the URI for dis.connect
        ```
    """

    @takes_fields(ServerOptions)
    def __init__(self, options: ServerOptions) -> None:
        self._open(options, options.security())

    def _open(self, options: ServerOptions, security: Security) -> None:
        #: The limits on clients.
        self.limits: Limits = options
        #: The access rules of the server.
        self.security = security
        #: The datasets that are served.
        self.registry = Registry(self.security.tickets, options.choose_rows)
        #: The counters of the server, which the catalog updates, too.
        self.activity = Activity()
        self._changing = threading.Lock()  # held while a server without a catalog publishes or drops a dataset
        # `_connections` and `endpoints` share this list, which is filled below.
        self._listeners: list[Listener] = []
        self._connections = Connections(self._listeners, self.registry, self.limits, self.activity)
        #: The URIs at which datasets can be requested.
        self.endpoints = Endpoints(self._listeners, options.advertise or host_name(), options.choose_rows)
        self._service: CatalogService | None = None
        self._metrics: HttpService | None = None
        self._dashboard: Dashboard | None = None
        self._lock = threading.Lock()  # of `_closed`
        self._closed = False
        try:
            for text in options.listen:
                uri, advertised = Uri.parse(text).split_advertised()
                listener = open_listener(uri, self.security.certificate, options.allow_rma)
                self._listeners.append(listener)
                if advertised.host:
                    self.endpoints.advertise(listener, advertised)
            if options.catalog is not None:
                from dissociated.catalog.backend import StageBackend
                from dissociated.catalog.service import CatalogService

                self._service = CatalogService(
                    options.catalog,
                    self.holdings(StageBackend()),
                    retain=options.retain,
                    advertise=options.advertise,
                    security=self.security,
                )
            if options.metrics is not None:
                from dissociated.monitoring.metrics import metrics_service

                self._metrics = metrics_service(options.metrics, self.status)
            if options.http is not None:
                from dissociated.monitoring.dashboard import Dashboard

                self._dashboard = Dashboard(options.http, self.status, self.activity, self.security)
        except BaseException:
            self.close()
            raise
        self._connections.accept()
        # Handlers at exit run in reverse order. A server may also read as a client. So the handlers of clients, which
        # must run after `close`, are registered before it.
        act_at_exit()
        atexit.register(self.close)  # threads that outlive the interpreter can crash the process
        self.bind_to_process()

    @classmethod
    def of(cls, options: ServerOptions, security: Security | None = None) -> Server:
        """Create a server from an options object. Raises the same errors as `Server`.

        Args:
            options: The options.
            security: The access rules, if they are made already. Default: those of the options.

        Example:
            ```python
            import dissociated as dis

            options = dis.ServerOptions(listen=["shm:"], retain=300)
            with dis.Server.of(options) as server:
                server.publish("flights", table)
            ```
        """
        server = cls.__new__(cls)
        server._open(options, security or options.security())
        return server

    def after_fork_in_child(self) -> None:
        """Unregister the handler at exit, since the parent process owns the server. See `dissociated.base.fork`."""
        atexit.unregister(self.close)

    # Publishing

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
        """Publish `source` under `name`, in place of the dataset that had this name.

        Streams of the replaced dataset go on, unless it was published with `live`.

        Clients over shared memory read a copy of a Table. If the server listens at a transport that shares memory, it
        starts to copy a large Table at once, in the background, unless the copy would take more than half of the free
        memory. The dataset can be read in the meantime.

        Args:
            name: The name of the dataset.
            source: A Table, a reader, record batches, a path, a callable, tensors, and more: see
                `dissociated.datasets.sources.make_dataset`.
            schema: The schema of an iterator or a list of record batches, which may then be empty.
            options: How batches are written: compression, alignment, dictionary deltas. An IPC file is served as it
                is, and takes no options.
            ticket: The bytes by which clients request the dataset. With signed tickets, the identifier that they are
                signed for. Default: random bytes. Two servers that publish the same source with the same ticket can
                share the work: a client reads metadata from one and bodies from the other.
            live: Read the source once for all clients together, each with its own position in the stream. `Live` says
                which clients may join, and when a client that stalls is cut off. Default: each client has a reading of
                its own.
            wait: Publish a Table only after its copy in shared memory was made, and raise errors of copying here.
            ttl: Seconds after which the catalog of this server drops the dataset, at most 1e10.

        Raises:
            SourceError: The source cannot be read.
            StoreError: A file cannot be read, or there is no room for the copy.
            FormatError: The source cannot be written with these options.
            OptionError: `name`, `options`, `live` or `ttl` is invalid, `ttl` is set and there is no catalog,
                `schema` is given for a source that has its own, or the ticket is too long.
            DissociatedError: The ticket belongs to another dataset or is reserved, or the server is closed.

        Example:
            ```python
            server.publish("flights", table)
            server.publish("archive", "flights.parquet", ttl=3600)
            server.publish("ticks", lambda: table.to_reader(max_chunksize=1000))  # read anew for each client
            ```
        """
        self.check_process()
        Commit(name, ttl=ttl)  # raises for an invalid name or time to live
        if ttl is not None and self._service is None:
            raise OptionError("ttl needs a catalog, which this server does not have: create the server with one")
        dataset = (
            make_dataset(name, source, options, schema)
            if live is None
            else Broadcast(name, source, live, self.limits.live_limit, options, schema)
        )
        if ticket is not None:
            if ticket.startswith(REQUEST_MAGIC):
                raise DissociatedError(
                    f"a ticket may not begin with {REQUEST_MAGIC!r}, which marks structured requests: give another"
                )
            self.security.tickets.sign(Grant(ticket), self.registry.now())  # raises if it is too long for requests
            dataset.ticket = ticket
        if wait and self.endpoints.exposes_memory:
            dataset.prepare_sharing(wait=True)
        self._publish(dataset, ttl)
        if self.endpoints.exposes_memory:
            dataset.prepare_sharing(wait=False)

    def writer(self, name: str, schema: pa.Schema, options: WriteOptions | None = None) -> SegmentWriter:
        """Open a writer into shared memory.

        Closing the writer publishes its batches under `name`, all at once. If its `with` block is left by an
        exception, the batches are discarded.

        Args:
            name: The name of the dataset.
            schema: The schema of the batches.
            options: How batches are written.

        Returns:
            The writer, which the caller closes. Closing it raises DissociatedError if the server is closed.

        Raises:
            FormatError: The schema cannot be written with these options.
            StoreError: There is no space left.

        Example:
            ```python
            with server.writer("squares", pa.schema({"n": pa.int64()})) as writer:
                for first in range(0, 3000, 1000):
                    numbers = pa.array([n * n for n in range(first, first + 1000)])
                    writer.write_batch(pa.record_batch({"n": numbers}))
            ```
        """
        self.check_process()
        check_name(name)
        return SegmentWriter(
            partial(MemfdSink, name, lambda segment: self.publish_segments(name, [segment])), schema, options
        )

    def publish_segments(self, name: str, segments: Sequence[Segment]) -> None:
        """Publish segments under `name`, all at once.

        Args:
            name: The name of the dataset.
            segments: The segments, in order.

        Raises:
            SourceError: Schemas differ, or there are too many segments.
        """
        self.check_process()
        self._publish(SegmentsDataset(name, segments))

    def _publish(self, new: Dataset, ttl: float | None = None) -> None:
        new.check_metadata(self.limits.max_metadata)
        with self._lock:
            if self._closed:
                raise DissociatedError("the server is closed")
        if self._service is not None:
            # The catalog withdraws the old dataset if nobody needs it. It has a lock for each name.
            self._service.catalog.publish_dataset(new, ttl)
            return
        with self._changing:
            old = self.registry.publish(new)
            self._record_change("committed", new, "it is new" if old is None else "it replaces another")
            if old is not None:
                self.registry.withdraw(old)
                self._record_change("retired", old, "it was replaced")

    def _record_change(self, kind: str, dataset: Dataset, why: str) -> None:
        """Record a change of a dataset of a server without a catalog; such datasets have no version number."""
        self.activity.changes.add(Change(kind, dataset.name, None, dataset.rows, dataset.nbytes, why))

    def drop(self, name: str) -> None:
        """Drop the dataset `name`. Streams of it go on, unless it was published with `live`.

        Consumers of a live stream receive the batches that have been read already, and then a RemoteError.

        Raises:
            DatasetNotFound: No dataset has this name.

        Example:
            ```python
            server.drop("flights")
            assert server.names() == []
            ```
        """
        self.check_process()
        if self._service is not None:
            old = self.dataset(name)
            self._service.catalog.drop(name)
            self.registry.withdraw(old)
            return
        with self._changing:
            old = self.dataset(name)
            self._record_change("dropped", old, "by request")
            self.registry.withdraw(old)

    def dataset(self, name: str) -> Dataset:
        """Return the dataset that is published under `name`. Raise DatasetNotFound if there is none."""
        self.check_process()
        return self.registry.lookup_name(name)

    def names(self) -> list[str]:
        """Return the names of all datasets that can be read, sorted."""
        self.check_process()
        return self.registry.names()

    # Addresses and tickets

    @property
    def catalog_uri(self) -> str:
        """The Arrow Flight URI of the catalog, `grpc://HOST:PORT`. Raises DissociatedError if there is no catalog."""
        if self._service is None:
            raise DissociatedError("this server was made without a catalog")
        return self._service.uri

    @property
    def metrics_uri(self) -> str:
        """The URI of the metrics. Raises DissociatedError if the server has none."""
        if self._metrics is None:
            raise DissociatedError("this server was made without metrics")
        return f"{self._metrics.uri}/metrics"

    @property
    def http_uri(self) -> str:
        """The URI of the dashboard. Raises DissociatedError if the server has none."""
        if self._dashboard is None:
            raise DissociatedError("this server was made without http")
        return self._dashboard.uri

    def ticket(self, name: str, *, columns: Sequence[str] | None = None) -> bytes:
        """Return a ticket for the dataset `name`, by which a client requests it.

        Args:
            name: The name of the dataset.
            columns: The only columns that the ticket gives access to. Needs signed tickets. Default: all columns.

        Raises:
            DatasetNotFound: No dataset has this name.
            ColumnNotFound: The dataset lacks one of the columns.
            OptionError: `columns` is set and tickets are not signed.

        Example:
            ```python
            reader = dis.open_stream(server.locations("flights")[0], server.ticket("flights"))
            ```
        """
        return self.registry.issue_ticket(self.dataset(name), columns).data

    def locations(self, name: str, *, streams: str = "both", bodies: str = "any") -> list[str]:
        """Return the URIs at which the dataset `name` can be requested, one for each listener.

        Args:
            name: The name of the dataset.
            streams: "both", or "metadata" or "bodies" for a client that requests the two over separate connections.
            bodies: "any", or "packed" for a client that accepts no addresses.

        Raises:
            DatasetNotFound: No dataset has this name.

        Example:
            ```python
            for uri in server.locations("flights"):
                print(dis.open_stream(uri, server.ticket("flights")).read_all().num_rows)
            ```
        """
        return self.endpoints.locations(self.dataset(name), Streams[streams.upper()], bodies == "packed")

    def holdings(self, backend: Backend) -> Holdings:
        """Return the holdings for a catalog of this process: its served datasets, and `backend` for new segments."""
        from dissociated.catalog.holdings import Holdings

        backend.max_metadata = self.limits.max_metadata
        return Holdings(self.registry, backend, self.endpoints, self.activity)

    def use_catalog(self, service: CatalogService) -> None:
        """Record publications in the catalog of `service` from now on. The server owns the service and closes it."""
        self._service = service

    # Status

    @property
    def connections(self) -> int:
        """The number of open connections."""
        self.check_process()
        return len(self._connections)

    def status(self) -> ServerStatus:
        """Return the published datasets, their readers, and the counters of this server.

        After `close`, the status lists the clients that still hold memory.
        """
        self.check_process()
        if self._service is not None and not self._closed:
            return self._service.catalog.status()
        return self.activity.status(None, self.endpoints.listener_uris(), self.registry.datasets())

    def __repr__(self) -> str:
        if self.is_inherited:
            return "<Server of the parent process>"
        if self._closed:
            return "<Server, closed>"
        names = self.names()
        published = "nothing published" if not names else f"{count(len(names))} published"
        return f"<Server of {published}, {', '.join(self._addresses)}>"

    def _repr_html_(self) -> str:
        if self.is_inherited:
            return html("Server of the parent process", [])
        if self._closed:
            return html("Server, closed", [])
        datasets = [self.registry.find_name(name) for name in self.names()]
        rows = [
            [dataset.name, count(dataset.rows), size(dataset.nbytes), count(dataset.readers)]
            for dataset in datasets
            if dataset is not None  # dropped meanwhile
        ]
        table = html_table(["name", "rows", "size", "readers"], rows, right=(1, 2, 3)) if rows else "nothing published"
        return html("Server", self._addresses, table)

    @property
    def _addresses(self) -> list[str]:
        """The addresses of the catalog and of the listeners, in words."""
        catalog = [] if self._service is None else [f"catalog at {self.catalog_uri}"]
        return [*catalog, *(f"listening at {uri.partition('?')[0]}" for uri in self.endpoints.listener_uris())]

    # Closing

    def drain(
        self, timeout: float, on_waiting: Callable[[Sequence[ConsumerStatus]], None] = lambda waited: None
    ) -> bool:
        """Accept no new connections, and wait for streams in progress. Meanwhile, the status is "stopping".

        A client that only keeps memory of a static dataset mapped is not waited for, since that memory stays readable
        after this process has ended.

        Args:
            timeout: Seconds, in all.
            on_waiting: Called with the connections that are waited for, first at once and then whenever they have
                changed, but at most every five seconds.

        Returns:
            Whether no stream is in progress any more.

        Example:
            ```python
            if not server.drain(timeout=10):
                print("streams are still in progress")
            server.close()
            ```
        """
        self.check_process()
        self._connections.stop_listening()
        return self._connections.drain(timeout, on_waiting)

    def close(self) -> None:
        """Stop listening, end every stream, and drop every dataset. Memory that clients have mapped stays readable."""
        if self.is_inherited:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._connections.refuse()
        for service in (self._metrics, self._dashboard):
            if service is not None:
                service.close()
        if self._service is not None:
            self._service.close()
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

    def __exit__(self, *_: object) -> None:
        self.close()
