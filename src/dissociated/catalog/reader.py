"""`connect`, and the client that users have: datasets by name, whatever they are read over."""

from __future__ import annotations

import os
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import accumulate, chain
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, overload

import pyarrow as pa

from dissociated.buffers import MAX_BODY, MAX_METADATA
from dissociated.catalog.client import CatalogClient
from dissociated.catalog.locations import DatasetInfo, Endpoint, locations, reachable
from dissociated.client.asynchronous import asynchronous
from dissociated.client.connect import shares_memory, supports_selection
from dissociated.client.filtering import read_filtered
from dissociated.client.open import read_stream
from dissociated.client.request import TIMEOUT, ReadRequest
from dissociated.client.tensors import read_tensors
from dissociated.codec.batches import BatchReader
from dissociated.codec.columns import filter_batches, select_columns, select_fields, slice_batches, slice_rows
from dissociated.codec.device import DeviceReader, to_device
from dissociated.codec.options import ReadOptions, check_options
from dissociated.codec.split import batches
from dissociated.codec.tensor import Tensor
from dissociated.errors import CatalogError, DatasetNotFound, RemoteError, SourceError, TransportError, WrongKind
from dissociated.memory.device.base import Device
from dissociated.memory.device.registry import open_device
from dissociated.protocol.request import REFUSED, Selection
from dissociated.transport import registry
from dissociated.uri import Uri

if TYPE_CHECKING:
    import polars as pl

    from dissociated.catalog.handle import DatasetHandle

T = TypeVar("T")

_CLIENT_PARAMETERS = ("roots", "allow", "files")  # parameters of locations that only the one who connects may give
_MAX_RETRIES = 10  # times that a dataset may be replaced between looking it up and asking for it


class Client(CatalogClient):
    """Reads datasets by name. Use it as a context manager, or `close` it."""

    @overload
    def read(
        self,
        name: str,
        transport: str | None = None,
        columns: Sequence[str] | None = None,
        *,
        version: int | None = None,
        rows: range | None = None,
        filter: Any = None,
        limit: int | None = None,
        options: ReadOptions | None = None,
        max_body: int = MAX_BODY,
        allow_rma: bool = False,
        device: None = None,
    ) -> pa.RecordBatchReader: ...

    @overload
    def read(
        self,
        name: str,
        transport: str | None = None,
        columns: Sequence[str] | None = None,
        *,
        version: int | None = None,
        rows: range | None = None,
        filter: Any = None,
        limit: int | None = None,
        options: ReadOptions | None = None,
        max_body: int = MAX_BODY,
        allow_rma: bool = False,
        device: object,
    ) -> DeviceReader: ...

    def read(
        self,
        name: str,
        transport: str | None = None,
        columns: Sequence[str] | None = None,
        *,
        version: int | None = None,
        rows: range | None = None,
        filter: Any = None,
        limit: int | None = None,
        options: ReadOptions | None = None,
        max_body: int = MAX_BODY,
        allow_rma: bool = False,
        device: object = None,
    ) -> pa.RecordBatchReader | DeviceReader:
        """A reader over the dataset `name`, through `transport`, or the nearest one that reaches it. It is read once:
        what `dataset` gives can be read again and again.

        - `transport`: a scheme: "shm", "tcp", or "grpc" for Flight's own DoGet.
        - `columns`: read only these top-level columns, in the order of the schema.
        - `version`: one that was replaced and is still there.
        - `rows`: those that are wanted, as in `range(10, 20)`. Parts of the dataset that have none of them are not
          opened.
        - `filter`: of these the rows for which this is true. It is an expression of pyarrow, as `pc.field("n") > 5`,
          or a condition `("n", ">", 5)`, a list of conditions, which must all be true, or a list of such lists, of
          which one must be. Conditions mean what they mean in Spark: NaN equals itself, and is the largest number.
          Columns that are only filtered by are not given.
        - `limit`: so many rows, the first of those.
        - `options`: how batches are decoded.
        - `max_body`, `allow_rma`: as for `open_stream`.
        - `device`: where batches are to lie, as "cuda:0": then this gives a `DeviceReader`. See docs/device.md.

        Raises DatasetNotFound, ColumnNotFound, and what `open_stream` raises; with a `device`, DeviceNotFound,
        DeviceFull and DeviceError, too.
        """
        request = replace(
            self.defaults,
            columns=columns,
            rows=rows,
            filter=filter,
            limit=limit,
            options=check_options(options, ReadOptions),
            max_body=max_body,
            allow_rma=allow_rma,
            device=None if device is None else open_device(device),
        )
        describe = partial(self.describe, name, version)
        if request.device is not None:
            return self._read_on_device(describe, transport, request, request.device)
        return self._read(describe, transport, request)

    read_async = asynchronous(read)
    """`read` for `async for`: awaited, it gives an `AsyncStreamReader`.

    It takes and raises the same, and blocks a thread in place of the event loop.
    """

    def dataset(self, name: str, version: int | None = None, *, transport: str | None = None) -> DatasetHandle:
        """A handle on the dataset `name`, as it is now or as that `version`, which can be read again and again.

        Whatever takes a pyarrow.dataset.Dataset takes it. It is read through `transport`, or the nearest one. Raises
        DatasetNotFound.
        """
        from dissociated.catalog.handle import DatasetHandle  # on first use: pyarrow.dataset takes long to import

        return DatasetHandle(self, self.describe(name, version), transport)

    def scan(self, name: str, version: int | None = None, *, transport: str | None = None) -> pl.LazyFrame:
        """The same as a LazyFrame of Polars, which reads the columns and rows that its plan needs."""
        return self.dataset(name, version, transport=transport).scan()

    def __getitem__(self, name: str) -> DatasetHandle:
        """The same as `dataset`."""
        return self.dataset(name)

    def __contains__(self, name: object) -> bool:
        """Whether there is a dataset of that name."""
        if not isinstance(name, str):
            return False
        try:
            self.describe(name)
        except DatasetNotFound:
            return False
        return True

    def __iter__(self) -> Iterator[str]:
        """The names of all datasets."""
        return (info.name for info in self.list())

    def read_version(self, info: DatasetInfo, transport: str | None, request: ReadRequest) -> pa.RecordBatchReader:
        """What `request` wants of just the version that `info` describes, wherever that is now.

        Raises DatasetNotFound where it is gone.
        """
        return self._read(partial(self._describe_again, info), transport, request)

    def read_version_on_device(
        self, info: DatasetInfo, transport: str | None, request: ReadRequest, device: Device
    ) -> DeviceReader:
        """The same, on a device."""
        return self._read_on_device(partial(self._describe_again, info), transport, request, device)

    def read_part(
        self, info: DatasetInfo, number: int, transport: str | None, request: ReadRequest
    ) -> pa.RecordBatchReader:
        """What `request` wants of one endpoint of just the version that `info` describes, wherever that is now.

        The catalog is asked only where the endpoint is not to be had as it was. Raises as `read_version` does.
        """
        try:
            return self.open_endpoint(info, info.endpoints[number], transport, request)
        except (CatalogError, RemoteError, TransportError):
            current = self._describe_again(info)
            if current.endpoints == info.endpoints:
                raise
        if [one.rows for one in current.endpoints] != [one.rows for one in info.endpoints]:
            raise CatalogError(f"{info.name!r} lies in other parts now than when it was looked up: look it up again")
        return self.open_endpoint(current, current.endpoints[number], transport, request)

    def is_mapped(self, info: DatasetInfo, number: int, transport: str | None) -> bool:
        """Whether one endpoint would be read over shared memory."""
        routes = reachable(info.name, info.endpoints[number], transport, False) if transport != "grpc" else []
        return bool(routes) and routes[0][-1].scheme == "shm"

    def _describe_again(self, info: DatasetInfo) -> DatasetInfo:
        if not info.version:  # the catalog is somebody else's: what it has given is all there is to know
            return info
        with suppress(DatasetNotFound):
            current = self.describe(info.name, info.version)
            if (current.created, current.lineage_id) == (info.created, info.lineage_id):  # not of another server there
                return current
        raise DatasetNotFound(
            f"version {info.version} of {info.name!r} is gone: it was replaced or dropped, and is kept no longer. "
            "refresh() gives a handle on what is there now"
        )

    def _read(
        self, describe: Callable[[], DatasetInfo], transport: str | None, request: ReadRequest
    ) -> pa.RecordBatchReader:
        def open_all(info: DatasetInfo) -> list[pa.RecordBatchReader]:
            return [
                self.open_endpoint(
                    info, endpoint, transport, self._select_batches(info, endpoint, transport, part_request)
                )
                for endpoint, part_request in _endpoints_with_rows(info, request)
            ]

        reader = _chain(*self._open_endpoints(describe, open_all), request)
        return (
            reader if request.limit is None else filter_batches(reader, None, range(len(reader.schema)), request.limit)
        )

    def _read_on_device(
        self, describe: Callable[[], DatasetInfo], transport: str | None, request: ReadRequest, device: Device
    ) -> DeviceReader:
        """What `_read` gives, on a device. Rows are chosen before they are copied there."""
        return to_device(self._read(describe, transport, request), device)

    def read_endpoint(
        self,
        info: DatasetInfo,
        endpoint: Endpoint,
        transport: str | None = None,
        columns: Sequence[str] | None = None,
        *,
        batches: tuple[int, int] | None = None,
        filter: Any = None,
        limit: int | None = None,
        options: ReadOptions | None = None,
        max_body: int = MAX_BODY,
        allow_rma: bool = False,
    ) -> pa.RecordBatchReader:
        """A reader over one endpoint of what `describe` gave, or over its `batches`, as `open_stream` takes them.

        It takes and raises what `read` does; and RemoteError where the endpoint's ticket is good no more.
        """
        request = replace(
            self.defaults,
            columns=columns,
            batches=batches,
            filter=filter,
            limit=limit,
            options=check_options(options, ReadOptions),
            max_body=max_body,
            allow_rma=allow_rma,
        )
        return self.open_endpoint(info, endpoint, transport, request)

    def open_endpoint(
        self, info: DatasetInfo, endpoint: Endpoint, transport: str | None, request: ReadRequest
    ) -> pa.RecordBatchReader:
        """What `request` wants of one endpoint. Raises as `read_endpoint` does."""
        request = replace(request, schema=info.schema)
        if transport == "grpc":
            return self._do_get(info, endpoint, request)
        return self._open_nearest(info.name, endpoint, transport, request, read_stream)

    def _select_batches(
        self, info: DatasetInfo, endpoint: Endpoint, transport: str | None, request: ReadRequest
    ) -> ReadRequest:
        """The same rows, of the batches that have them: where bodies travel, those of other batches do not."""
        rows = request.rows
        if rows is None or not rows.start:
            return request
        uris = [uri for route in locations(endpoint) for uri in route]
        mapped = transport in (None, "shm") and any(
            uri.scheme == "shm" and registry.transport("shm").reachable(uri) for uri in uris
        )
        if mapped or not uris or not all(map(supports_selection, uris)):
            return request
        row_counts = self.open_endpoint(info, endpoint, transport, request.without_columns())
        ends = [0, *accumulate(batch.num_rows for batch in row_counts)]
        first, stop = bisect_right(ends, rows.start) - 1, bisect_right(ends, rows.stop - 1)
        skipped = ends[first]
        return replace(request, batches=(first, stop), rows=range(rows.start - skipped, rows.stop - skipped))

    def read_tensors(
        self,
        name: str,
        transport: str | None = None,
        *,
        version: int | None = None,
        max_body: int = MAX_BODY,
        allow_rma: bool = False,
    ) -> Iterator[Tensor]:
        """The tensors of the dataset `name`, through `transport`, or the nearest one that reaches it.

        `transport` is a scheme: "shm" or "tcp"; Flight has no messages for tensors. `allow_rma` as for `open_stream`.
        Raises DatasetNotFound, WrongKind where the dataset holds record batches, and what `open_tensors` raises.
        """
        if transport == "grpc":
            raise WrongKind("Flight has no messages for tensors: read them over shm or tcp, or name no transport")
        request = replace(self.defaults, max_body=max_body, allow_rma=allow_rma)

        def open_all(info: DatasetInfo) -> list[Iterator[Tensor]]:
            return [self._open_nearest(name, part, transport, request, read_tensors) for part in info.endpoints]

        _, readers = self._open_endpoints(partial(self.describe, name, version), open_all)
        return chain.from_iterable(readers)

    def _open_endpoints(
        self, describe: Callable[[], DatasetInfo], open_all: Callable[[DatasetInfo], list[T]]
    ) -> tuple[DatasetInfo, list[T]]:
        """What `describe` gives, and its endpoints, opened."""
        info = describe()
        for _ in range(_MAX_RETRIES):
            try:
                return info, open_all(info)
            except RemoteError:
                current = describe()
                if current.endpoints == info.endpoints:
                    raise
                info = current  # it was replaced after we had looked it up
        return info, open_all(info)

    def _open_nearest(
        self,
        name: str,
        endpoint: Endpoint,
        transport: str | None,
        request: ReadRequest,
        open_at: Callable[[Sequence[str], bytes, ReadRequest], T],
    ) -> T:
        """The endpoint, opened where it is nearest."""
        routes = reachable(name, endpoint, transport, request.allow_rma)
        while True:
            nearest = [str(self._with_trust(uri)) for uri in routes.pop(0)]
            try:
                return open_at(nearest, endpoint.ticket, request)
            except TransportError:
                if not routes:
                    raise

    def _with_trust(self, uri: Uri) -> Uri:
        """The location, with what this client trusts, and not what the catalog may say about that."""
        parameters = {name: value for name, value in uri.parameters.items() if name not in _CLIENT_PARAMETERS}
        return replace(uri, parameters={**parameters, **self._trust.get(uri.scheme, {})})

    def _do_get(self, info: DatasetInfo, endpoint: Endpoint, request: ReadRequest) -> pa.RecordBatchReader:
        """The stream over Flight; only what is wanted of it from a server that takes selections elsewhere too."""
        if request.chooses_rows:
            network = [uri for route in locations(endpoint) for uri in route if not shares_memory(uri)]
            return read_filtered(request, network[:1], lambda inner: self._do_get(info, endpoint, inner))
        selection, identifier = request.selection, endpoint.ticket
        if selection is not None:
            indices = selection.indices(info.schema.names)
            if any(supports_selection(uri) for route in locations(endpoint) for uri in route):
                identifier = selection.identifier(endpoint.ticket)
        if request.rows_at_server is not None and identifier == endpoint.ticket:
            raise SourceError(f"{REFUSED}: the request would be too long")
        reader = self.do_get(identifier, request.options)
        if selection is not None and identifier == endpoint.ticket:
            reader = select_columns(reader, indices)
            if request.batches is not None:
                reader = slice_batches(reader, *request.batches)
        return reader if request.rows is None else slice_rows(reader, request.rows)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _chain(info: DatasetInfo, readers: Sequence[pa.RecordBatchReader], request: ReadRequest) -> pa.RecordBatchReader:
    if len(readers) == 1:
        return readers[0]
    if readers:
        schema = readers[0].schema
    else:
        selection = request.selection or Selection()
        schema = select_fields(info.schema, selection.indices(info.schema.names))
    return BatchReader(schema, (pair for reader in readers for pair in batches(reader)))


def _endpoints_with_rows(info: DatasetInfo, request: ReadRequest) -> Iterator[tuple[Endpoint, ReadRequest]]:
    """The endpoints that have some of the rows, and the request of each, by its own positions."""
    if request.filter is None and request.limit is not None and all(one.rows is not None for one in info.endpoints):
        first = 0 if request.rows is None else request.rows.start
        stop = sys.maxsize if request.rows is None else request.rows.stop
        request = replace(request, rows=range(first, min(stop, first + request.limit)), limit=None)
    at, rows = 0, request.rows
    for endpoint in info.endpoints:
        if rows is None:
            yield endpoint, request
            continue
        if endpoint.rows is None:
            raise CatalogError(f"the catalog does not know how many rows the parts of {info.name!r} have")
        first, end = max(0, rows.start - at), min(rows.stop - at, endpoint.rows)
        if not first and end == endpoint.rows and end:
            yield endpoint, replace(request, rows=None)
        elif first < end and (first or request.filter is not None):
            yield endpoint, replace(request, rows=range(first, end))
        elif first < end:  # which a server may do, too
            yield endpoint, replace(request, rows=None, limit=end)
        at += endpoint.rows


def connect(
    catalog_uri: str,
    *,
    timeout: float = TIMEOUT,
    token: str | None = None,
    tls_roots: str | os.PathLike[str] | None = None,
    trusted_users: Sequence[str | int] = (),
    max_metadata: int = MAX_METADATA,
    trusted_files: bool = False,
) -> Client:
    """A client of the catalog at `catalog_uri`: grpc://HOST:PORT, or grpc+tls://HOST:PORT for TLS.

    - `timeout`: how many seconds the catalog, or a server, may be silent.
    - `token`: sent with each call.
    - `tls_roots`: a PEM file with the certificates to trust, for the catalog and for data over tls:. Left out: the
      system's.
    - `trusted_users`: names or numbers of users whose servers' memory is mapped over shm, beside this user's and
      root's.
    - `trusted_files`: map their files, too. They could cut a file short under this process. Without it, what lies in
      such files comes another way.
    - `max_metadata`: as for `open_stream`.

    Nothing is called yet. Raises UriError and OptionError. The client's calls raise CatalogError, AccessDenied and
    DeadlineExceeded.
    """
    return Client(catalog_uri, timeout, token, tls_roots, trusted_users, max_metadata, trusted_files)
