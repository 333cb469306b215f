"""`connect`, and the client that users have: datasets by name, whatever they are read over."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, chain
from types import TracebackType
from typing import TYPE_CHECKING

import pyarrow as pa

from dissociated.buffers import MAX_BODY, MAX_METADATA
from dissociated.catalog.locations import DatasetInfo, Endpoint, locations
from dissociated.client.open import TIMEOUT, open_stream, selection_of, takes_selections
from dissociated.client.tensors import open_tensors
from dissociated.codec.batches import BatchReader
from dissociated.codec.columns import between, selected, sliced
from dissociated.codec.options import ReadOptions, given
from dissociated.codec.split import batches
from dissociated.codec.tensor import Tensor
from dissociated.errors import (
    CatalogError,
    OptionError,
    RemoteError,
    TransportError,
    WrongKind,
)
from dissociated.protocol.request import Selection
from dissociated.transport import registry
from dissociated.uri import Uri

if TYPE_CHECKING:
    from dissociated.ipc.asynchronous import AsyncStreamReader
from dissociated.catalog.client import CatalogClient, T

_OWN = ("roots", "allow", "files")  # parameters of locations that only the one who connects may give
_MAX_REPLACED = 10  # times that a dataset may be replaced between looking it up and asking for it


class Client(CatalogClient):
    """Reads datasets by name. Use it as a context manager, or `close` it."""

    def read(
        self,
        name: str,
        transport: str | None = None,
        columns: Sequence[str] | None = None,
        *,
        version: int | None = None,
        rows: range | None = None,
        options: ReadOptions | None = None,
        max_body: int = MAX_BODY,
        allow_rma: bool = False,
    ) -> pa.RecordBatchReader:
        """A reader over the dataset `name`, through `transport`, or the nearest one that reaches it.

        - `transport`: a scheme: "shm", "tcp", or "grpc" for Flight's own DoGet.
        - `columns`: read only these top-level columns, in the order of the schema.
        - `version`: one that was replaced and is still there.
        - `rows`: those that are wanted, as in `range(10, 20)`. Parts of the dataset that have none of them are not
          opened.
        - `options`: how batches are decoded.
        - `max_body`, `allow_rma`: as for `open_stream`.

        Raises DatasetNotFound, ColumnNotFound, and what `open_stream` raises.
        """

        def opened(info: DatasetInfo) -> list[pa.RecordBatchReader]:
            wanted = partial(
                self.read_endpoint,
                info,
                transport=transport,
                columns=columns,
                options=options,
                max_body=max_body,
                allow_rma=allow_rma,
            )
            if rows is None:
                return [wanted(endpoint) for endpoint in info.endpoints]
            return [self._rows(wanted, endpoint, some, transport) for endpoint, some in _having(info, rows)]

        return _chained(*self._endpoints(name, version, opened))

    def _rows(
        self,
        read: Callable[..., pa.RecordBatchReader],
        endpoint: Endpoint,
        rows: range,
        transport: str | None,
    ) -> pa.RecordBatchReader:
        """These rows of an endpoint. Where bodies travel, those of the batches before do not."""
        ways = locations(endpoint)
        mapped = transport in (None, "shm") and any(
            uri.scheme == "shm" and registry.transport("shm").reachable(uri) for uris in ways for uri in uris
        )
        if not rows.start or mapped or not all(takes_selections(uri) for uris in ways for uri in uris):
            return between(read(endpoint), rows)
        ends = [*accumulate(batch.num_rows for batch in read(endpoint, columns=[]))]
        first, stop = bisect_right(ends, rows.start), bisect_right(ends, rows.stop - 1) + 1
        before = ends[first - 1] if first else 0
        return between(read(endpoint, batches=(first, stop)), range(rows.start - before, rows.stop - before))

    def read_endpoint(
        self,
        info: DatasetInfo,
        endpoint: Endpoint,
        transport: str | None = None,
        columns: Sequence[str] | None = None,
        *,
        batches: tuple[int, int] | None = None,
        options: ReadOptions | None = None,
        max_body: int = MAX_BODY,
        allow_rma: bool = False,
    ) -> pa.RecordBatchReader:
        """A reader over one endpoint of what `describe` gave, or over its `batches`, as `open_stream` takes them.

        It takes and raises what `read` does; and RemoteError where the endpoint's ticket is good no more.
        """
        if transport == "grpc":
            selection = selection_of(columns, given(options, ReadOptions), batches)
            return self._do_get(info, endpoint, selection, options)
        opened = partial(
            open_stream,
            columns=columns,
            batches=batches,
            options=options,
            timeout=self._timeout,
            max_body=max_body,
            max_metadata=self._max_metadata,
            allow_rma=allow_rma,
        )
        return self._nearest(info.name, transport, endpoint, opened, allow_rma)

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
        opened = partial(
            open_tensors,
            timeout=self._timeout,
            max_body=max_body,
            max_metadata=self._max_metadata,
            allow_rma=allow_rma,
        )
        _, readers = self._endpoints(
            name,
            version,
            lambda info: [self._nearest(name, transport, part, opened, allow_rma) for part in info.endpoints],
        )
        return chain.from_iterable(readers)

    def _endpoints(
        self, name: str, version: int | None, opened: Callable[[DatasetInfo], list[T]]
    ) -> tuple[DatasetInfo, list[T]]:
        """The dataset `name`, and its endpoints, opened."""
        info = self.describe(name, version)
        for _ in range(_MAX_REPLACED):
            try:
                return info, opened(info)
            except RemoteError:
                found = self.describe(name, version)
                if found.endpoints == info.endpoints:
                    raise
                info = found  # it was replaced after we had looked it up
        return info, opened(info)

    async def read_async(
        self,
        name: str,
        transport: str | None = None,
        columns: Sequence[str] | None = None,
        *,
        version: int | None = None,
        rows: range | None = None,
        options: ReadOptions | None = None,
        max_body: int = MAX_BODY,
        allow_rma: bool = False,
    ) -> AsyncStreamReader:
        """`read` for `async for`: it takes and raises the same, and blocks a thread in place of the event loop."""
        from dissociated.ipc.asynchronous import open_reader_async

        return await open_reader_async(
            self.read,
            name,
            transport,
            columns,
            version=version,
            rows=rows,
            options=options,
            max_body=max_body,
            allow_rma=allow_rma,
        )

    def _nearest(
        self,
        name: str,
        scheme: str | None,
        endpoint: Endpoint,
        opened: Callable[[Sequence[str], bytes], T],
        allow_rma: bool = False,
    ) -> T:
        """The endpoint, opened where it is nearest."""
        if not endpoint.locations:
            raise CatalogError(
                f"a part of {name!r} is on {', '.join(endpoint.hosts)}, whose node says nothing any more: "
                "is it running?"
            )
        usable = [
            uris
            for uris in locations(endpoint)
            if (scheme is None or uris[0].scheme == scheme) and (allow_rma or uris[-1].remote_handle is None)
        ]
        reachable = [uris for uris in usable if all(registry.transport(uri.scheme).reachable(uri) for uri in uris)]
        if not reachable:
            offered = ", ".join(sorted({one.partition(":")[0] for one in endpoint.locations}))
            raise CatalogError(
                f"{name!r} cannot be reached from here by {scheme or 'any transport'}: it is offered by {offered}"
            )
        reachable.sort(
            key=lambda uris: (registry.transport(uris[-1].scheme).nearness, uris[-1].remote_handle is not None)
        )
        while True:
            nearest = [str(self._trusting(uri)) for uri in reachable.pop()]
            try:
                return opened(nearest, endpoint.ticket)
            except TransportError:
                if not reachable:
                    raise

    def _trusting(self, uri: Uri) -> Uri:
        """The location, with what this client trusts, and not what the catalog may say about that."""
        told = {name: value for name, value in uri.parameters.items() if name not in _OWN}
        return replace(uri, parameters={**told, **self._trust.get(uri.scheme, {})})

    def _do_get(
        self, info: DatasetInfo, endpoint: Endpoint, selection: Selection | None, options: ReadOptions | None
    ) -> pa.RecordBatchReader:
        """The stream over Flight; only what is wanted of it from a server that takes selections elsewhere too."""
        if selection is None:
            return self.do_get(endpoint.ticket, options)
        indices = selection.indices(info.schema.names)
        options = replace(given(options, ReadOptions), included_fields=())
        if any(takes_selections(uri) for uris in locations(endpoint) for uri in uris):
            identifier = selection.identifier(endpoint.ticket)
            if identifier != endpoint.ticket:
                return self.do_get(identifier, options)
        reader = selected(self.do_get(endpoint.ticket, options), indices)
        return reader if selection.batches is None else sliced(reader, *selection.batches)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _chained(info: DatasetInfo, readers: Sequence[pa.RecordBatchReader]) -> pa.RecordBatchReader:
    if len(readers) == 1:
        return readers[0]
    schema = readers[0].schema if readers else info.schema
    return BatchReader(schema, (pair for reader in readers for pair in batches(reader)))


def _having(info: DatasetInfo, rows: range) -> Iterator[tuple[Endpoint, range]]:
    """The endpoints that have some of these rows, and which of their own these are."""
    if rows.step != 1 or rows.start < 0:
        raise OptionError(f"rows is a range of positions that follow each other, not {rows}")
    at = 0
    for endpoint in info.endpoints:
        if endpoint.rows is None:
            raise CatalogError(f"the catalog does not know how many rows the parts of {info.name!r} have")
        first, end = max(0, rows.start - at), min(rows.stop - at, endpoint.rows)
        if first < end:
            yield endpoint, range(first, end)
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
