"""`connect`, and the client that users have: datasets by name, whatever they are read over."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, overload

import pyarrow as pa

from dissociated.base.buffers import MAX_BODY, MAX_METADATA
from dissociated.client.asynchronous import asynchronous
from dissociated.client.calls import CatalogClient
from dissociated.client.request import TIMEOUT, ReadRequest
from dissociated.codec.device import DeviceReader
from dissociated.codec.options import ReadOptions, check_options
from dissociated.codec.tensor import Tensor
from dissociated.control.locations import DatasetInfo, Endpoint
from dissociated.errors import DatasetNotFound, WrongKind
from dissociated.memory.device.registry import open_device

if TYPE_CHECKING:
    import polars as pl

    from dissociated.client.dataset import DatasetHandle


class Client(CatalogClient):
    """Reads datasets by name. Use it as a context manager, or `close` it."""

    @overload
    def read(
        self,
        name: str,
        *,
        transport: str | None = None,
        columns: Sequence[str] | None = None,
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
        *,
        transport: str | None = None,
        columns: Sequence[str] | None = None,
        version: int | None = None,
        rows: range | None = None,
        filter: Any = None,
        limit: int | None = None,
        options: ReadOptions | None = None,
        max_body: int = MAX_BODY,
        allow_rma: bool = False,
        device: object,
        decompress: bool = True,
    ) -> DeviceReader: ...

    def read(
        self,
        name: str,
        *,
        transport: str | None = None,
        columns: Sequence[str] | None = None,
        version: int | None = None,
        rows: range | None = None,
        filter: Any = None,
        limit: int | None = None,
        options: ReadOptions | None = None,
        max_body: int = MAX_BODY,
        allow_rma: bool = False,
        device: object = None,
        decompress: bool = True,
    ) -> pa.RecordBatchReader | DeviceReader:
        """A reader over the dataset `name`, through `transport`, or the nearest one that reaches it. It is read once:
        what `dataset` gives can be read again and again.

        - `transport`: a scheme: "shm", "tcp", or "grpc" for Flight's own DoGet, which is taken by itself where nothing
          else leads there, as to a Flight server of somebody else's.
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
        - `max_body`, `allow_rma`: as for `open_stream`. Over grpc the size of a decoded batch with its dictionaries is
          looked at, after libarrow has allocated it.
        - `device`: where batches are to lie, as "cuda:0": then this gives a `DeviceReader`. See docs/device.md.
        - `decompress`: False refuses bodies that come compressed for a `device`. They are decompressed on the host.

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
            decompress=decompress,
        )
        describe = partial(self.describe, name, version)
        if request.device is not None:
            return self.endpoints.read_on_device(describe, transport, request, request.device)
        return self.endpoints.read(describe, transport, request)

    read_async = asynchronous(read)
    """`read` for `async for`: awaited, it gives an `AsyncStreamReader`.

    It takes and raises the same, and blocks a thread in place of the event loop.
    """

    def dataset(self, name: str, version: int | None = None, *, transport: str | None = None) -> DatasetHandle:
        """A handle on the dataset `name`, as it is now or as that `version`, which can be read again and again.

        Whatever takes a pyarrow.dataset.Dataset takes it. It is read through `transport`, or the nearest one. Raises
        DatasetNotFound.
        """
        from dissociated.client.dataset import DatasetHandle  # on first use: pyarrow.dataset takes long to import

        return DatasetHandle(self, self.describe(name, version), transport)

    def scan(self, name: str, version: int | None = None, *, transport: str | None = None) -> pl.LazyFrame:
        """A LazyFrame of Polars over the dataset `name`, or over that `version` of it.

        It reads the columns and rows that its plan needs, through `transport`, or the nearest one. Raises
        DatasetNotFound.
        """
        return self.dataset(name, version, transport=transport).scan()

    def __getitem__(self, name: str) -> DatasetHandle:
        """A handle on the dataset `name` as it is now: see `dataset`."""
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

    def read_endpoint(
        self,
        info: DatasetInfo,
        endpoint: Endpoint,
        *,
        transport: str | None = None,
        columns: Sequence[str] | None = None,
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
        return self.endpoints.open(info, endpoint, transport, request)

    def read_tensors(
        self,
        name: str,
        *,
        transport: str | None = None,
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
        return self.endpoints.read_tensors(partial(self.describe, name, version), transport, request)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


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

    - `timeout`: how many seconds the catalog, or a server, may be silent. What is read over grpc is waited for without
      an end: nobody sees there whether a batch is on its way.
    - `token`: sent with each call.
    - `tls_roots`: a PEM file with the certificates to trust, for the catalog and for data over tls:. Left out: the
      system's.
    - `trusted_users`: names or numbers of users whose servers' memory is mapped over shm, beside this user's and
      root's.
    - `trusted_files`: map their files, too. They could cut a file short under this process. Without it, what lies in
      such files comes another way.
    - `max_metadata`: as for `open_stream`. Over grpc the schema, and what comes beside a batch, are looked at after
      they have come.

    Nothing is called yet. Raises UriError and OptionError. The client's calls raise CatalogError, AccessDenied and
    DeadlineExceeded.
    """
    return Client(catalog_uri, timeout, token, tls_roots, trusted_users, max_metadata, trusted_files)
