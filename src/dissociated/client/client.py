"""The client for users: datasets by name, over any transport."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from dissociated.base import tracing
from dissociated.base.buffers import MAX_BODY
from dissociated.client.asynchronous import asynchronous
from dissociated.client.calls import CatalogClient
from dissociated.client.put import Progress, Put
from dissociated.codec.device import DeviceReader
from dissociated.codec.options import ReadOptions, check_options
from dissociated.codec.tensor import Tensor
from dissociated.control.commit import Commit
from dissociated.control.dataset_info import DatasetInfo
from dissociated.control.locations import Endpoint
from dissociated.datasets.base import Source
from dissociated.datasets.sources import make_dataset
from dissociated.errors import DatasetNotFound, OptionError, WrongKind
from dissociated.memory.device.registry import open_device

if TYPE_CHECKING:
    import polars as pl

    from dissociated.client.dataset import DatasetHandle


class Client(CatalogClient):
    """A reader of datasets by name. Use it as a context manager, or `close` it.

    Example:
        ```python
        import dissociated as dis

        with dis.connect(server.catalog_uri) as client:
            assert "flights" in client
            table = client["flights"].to_table(["dest", "distance"])
        ```
    """

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
    ) -> pa.RecordBatchReader:
        """Read the dataset `name` through `transport`, or through the nearest transport that reaches it.

        The result can be read once. `dataset` returns a handle that can be read repeatedly.

        Args:
            name: Name of the dataset.
            transport: A scheme: "shm", "tcp", or "grpc" for Flight's DoGet. DoGet is the default if no other transport
                reaches the dataset, for instance at a Flight server that is not of this library.
            columns: Read only these top-level columns, in the order of the schema.
            version: A version that was replaced and can still be read. None: the current one.
            rows: Read only these rows, such as `range(10, 20)`. Parts of the dataset without any of them are not
                opened.
            filter: Read only rows for which this is true: an expression of pyarrow, such as `pc.field("n") > 5`; a
                condition `("n", ">", 5)`; a list of conditions, all of which must be true; or a list of such lists, one
                of which must be true. Conditions have the semantics of Spark: NaN equals itself, and is the largest
                number. An expression has those of pyarrow, in which NaN compares as false. Columns that only the filter
                uses are not in the result. The filter applies to the selected `rows`.
            limit: Number of these rows to read, from the first on. None: all.
            options: Options of decoding.
            max_body: Largest body that is accepted, in bytes. See `open_stream`. Over grpc, the size of a decoded batch
                with its dictionaries is checked, after libarrow has allocated it.
            allow_rma: Allow fetching from the server's memory. See `open_stream`.

        Returns:
            A reader of record batches.

        Raises:
            DatasetNotFound: There is no such dataset or version.
            ColumnNotFound: A column does not exist. Errors of `open_stream` are raised, too.

        Example:
            ```python
            reader = client.read("flights", columns=["dest", "distance"], filter=("distance", ">", 1000), limit=100)
            table = reader.read_all()
            ```

            In a coroutine:

            ```python
            async for batch in await client.read_async("flights"):
                print(batch.num_rows)
            ```
        """
        request = self.defaults.updated(
            transport=transport,
            columns=columns,
            rows=rows,
            filter=filter,
            limit=limit,
            options=check_options(options, ReadOptions),
            max_body=max_body,
            allow_rma=allow_rma,
        )
        return self.endpoints.read(partial(self._lookup.describe, name, version, request.embed, reuse=True), request)

    read_async = asynchronous(read)
    """Open an `AsyncStreamReader` for `async for`. Arguments and errors are those of `read`.

    The call blocks a thread in place of the event loop. `read` has an example.
    """

    def read_on_device(
        self,
        name: str,
        device: object,
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
        decompress: bool = True,
    ) -> DeviceReader:
        """Read the dataset `name` onto a device: in place if it lies there, else received or copied there.

        Args:
            name: Name of the dataset.
            device: The device, such as "cuda:0". See docs/device.md.
            transport: See `read`.
            columns: See `read`.
            version: See `read`.
            rows: See `read`.
            filter: See `read`.
            limit: See `read`.
            options: See `read`.
            max_body: See `read`.
            allow_rma: See `read`.
            decompress: Decompress compressed bodies on the host. False refuses them.

        Returns:
            A reader of batches on the device.

        Raises:
            DeviceNotFound, DeviceFull, DeviceError: The device does not exist, is full, or fails. Errors of `read` are
                raised, too.

        Example:
            ```python
            with client.read_on_device("flights", "test:0", columns=["distance"]) as reader:  # or "cuda:0"
                for batch in reader:
                    distance = batch["distance"]  # an array on the device, for DLPack
            ```

            In a coroutine:

            ```python
            async for batch in await client.read_on_device_async("flights", "test:0"):
                print(batch.num_rows)
            ```
        """
        request = replace(
            self.defaults,
            transport=transport,
            columns=columns,
            rows=rows,
            filter=filter,
            limit=limit,
            options=check_options(options, ReadOptions),
            max_body=max_body,
            allow_rma=allow_rma,
            device=open_device(device),
            decompress=decompress,
        )
        return self.endpoints.read_on_device(partial(self.describe, name, version), request)

    read_on_device_async = asynchronous(read_on_device)
    """Open an `AsyncStreamReader` for `async for`. Arguments and errors are those of `read_on_device`.

    The call blocks a thread in place of the event loop. `read_on_device` has an example.
    """

    def dataset(self, name: str, version: int | None = None, *, transport: str | None = None) -> DatasetHandle:
        """Return a handle on the dataset `name`, which can be read repeatedly.

        The handle is accepted wherever a pyarrow.dataset.Dataset is.

        Args:
            name: Name of the dataset.
            version: Version to read. None: the current one.
            transport: Transport to read through. None: the nearest one.

        Raises:
            DatasetNotFound: There is no such dataset or version.

        Example:
            ```python
            with client.dataset("flights") as flights:
                longest = flights.to_table(["dest", "distance"], filter=("distance", ">", 1900))
                print(flights.version, flights.num_rows, longest.num_rows)
            ```
        """
        from dissociated.client.dataset import DatasetHandle  # on first use: pyarrow.dataset is slow to import

        return DatasetHandle(self, self.describe(name, version), transport, described_now=True)

    def scan(self, name: str, version: int | None = None, *, transport: str | None = None) -> pl.LazyFrame:
        """Return a LazyFrame of Polars over the dataset `name`. It reads only the columns and rows that its plan needs.

        Args:
            name: Name of the dataset.
            version: Version to read. None: the current one.
            transport: Transport to read through. None: the nearest one.

        Raises:
            DatasetNotFound: There is no such dataset or version.

        Example:
            ```python
            import polars as pl

            flights = client.scan("flights").filter(pl.col("distance") > 1000)
            means = flights.group_by("dest").agg(pl.col("air_time").mean()).collect()
            ```
        """
        return self.dataset(name, version, transport=transport).scan()

    def sql(self, query: str) -> pa.Table:
        """Run a query of SQL over the datasets in DuckDB, and return its result (`pip install duckdb`).

        The tables are the current versions of the datasets. Write a name in double quotes if it has other characters
        than letters, digits and underscores. DuckDB resolves all other names: "other.parquet" is a file if no dataset
        has this name. "./other.parquet" is always a file: names that begin with `/`, `./`, `../` or `~/`, and URLs, are
        not looked up. A file may be read twice, and so must be a regular one. DuckDB does not distinguish `a` and `A`.
        If both are datasets, a query that contains both names is refused, and so is one over either that computes
        names, with `query_table`. Data in shared memory is not copied, and stays mapped for 8 s for the next query, or
        until this client puts, commits or drops a dataset; else only the needed columns and rows are read. Of several
        statements, the last must return rows: a query, also `PIVOT` or `EXPLAIN`. Statements that would change a
        dataset are refused. Tables and settings of a call do not remain for later calls. But a function that changes
        DuckDB itself, such as `enable_logging()`, does so until the client is closed.

        Returns:
            The result. It has memory of its own, and needs neither the client nor the datasets.

        Raises:
            OptionError: The query is invalid or fails, it may mean two datasets whose names differ only in case, or
                DuckDB is not installed.
            DatasetNotFound: There is neither a dataset nor a table of a name. Errors of `read` are raised, too.

        Example:
            ```python
            table = client.sql("SELECT dest, count(*) AS flights FROM flights GROUP BY dest")
            assert sum(table["flights"].to_pylist()) == 2000
            ```
        """
        from dissociated.client.sql import SqlSession  # on first use: duckdb is slow to import

        with SqlSession(self, "publish a result instead: client.put(name, client.sql(query))") as session:
            for statement in session.parse(query, returns_rows=True):
                reader = session.run(statement)
                result = None if reader is None else reader.read_all()
        return result

    def __getitem__(self, name: str) -> DatasetHandle:
        """Return a handle on the current version of the dataset `name`. See `dataset`."""
        return self.dataset(name)

    def __contains__(self, name: object) -> bool:
        """Return whether a dataset of that name exists."""
        if not isinstance(name, str):
            return False
        try:
            self.describe(name)
        except DatasetNotFound:
            return False
        return True

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of all datasets."""
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
        """Read one endpoint of a dataset.

        Args:
            info: Result of `describe`.
            endpoint: An endpoint of `info`.
            transport: See `read`.
            columns: See `read`.
            batches: First record batch, and the batch after the last. See `open_stream`.
            filter: See `read`.
            limit: See `read`.
            options: See `read`.
            max_body: See `read`.
            allow_rma: See `read`.

        Raises:
            RemoteError: The endpoint's ticket is no longer valid. Errors of `read` are raised, too.

        Example:
            ```python
            info = client.describe("flights")
            parts = [client.read_endpoint(info, endpoint).read_all() for endpoint in info.endpoints]
            assert pa.concat_tables(parts).num_rows == info.rows
            ```
        """
        request = replace(
            self.defaults,
            transport=transport,
            columns=columns,
            batches=batches,
            filter=filter,
            limit=limit,
            options=check_options(options, ReadOptions),
            max_body=max_body,
            allow_rma=allow_rma,
        )
        return self.endpoints.open(info, endpoint, request)

    def read_tensors(
        self,
        name: str,
        *,
        transport: str | None = None,
        version: int | None = None,
        max_body: int = MAX_BODY,
        allow_rma: bool = False,
    ) -> Iterator[Tensor]:
        """Read the tensors of the dataset `name`.

        Args:
            name: Name of the dataset.
            transport: A scheme: "shm" or "tcp", but not "grpc", because Flight has no messages for tensors. None: the
                nearest transport.
            version: Version to read. None: the current one.
            max_body: Largest body that is accepted, in bytes.
            allow_rma: Allow fetching from the server's memory. See `open_stream`.

        Raises:
            DatasetNotFound: There is no such dataset or version.
            WrongKind: The dataset has record batches. Errors of `open_tensors` are raised, too.

        Example:
            ```python
            server.publish("weights", pa.Tensor.from_numpy(np.eye(3)))
            (weights,) = client.read_tensors("weights")
            assert weights.to_numpy().trace() == 3
            ```
        """
        if transport == "grpc":
            raise WrongKind("Flight has no messages for tensors: read them over shm or tcp, or name no transport")
        request = replace(self.defaults, transport=transport, max_body=max_body, allow_rma=allow_rma)
        return self.endpoints.read_tensors(partial(self.describe, name, version), request)

    def put(
        self,
        name: str,
        source: Source,
        *,
        schema: pa.Schema | None = None,
        mode: str = "overwrite",
        tags: Mapping[str, str] | None = None,
        ttl: float | None = None,
        transport: str | None = None,
        progress: Progress | None = None,
    ) -> int:
        """Publish all data of `source` under `name`, atomically.

        If this fails or is interrupted, also by the end of this process, the previous dataset of that name stays. If
        the catalog stops answering while it publishes, the outcome is unknown, and the error says so. An interrupt does
        not undo a publication that the catalog has begun.

        Args:
            name: Name of the dataset.
            source: Anything that `Server.publish` takes, except tensors.
            schema: Schema of an iterator or list of record batches, which may then be empty.
            mode: "overwrite" or "append".
            tags: Tags of the dataset, which `list` can filter by.
            ttl: Seconds after which the dataset is deleted, at most 1e10. None: never.
            transport: "shm", through the memory of a node on this host, or "grpc", by Flight's DoPut. None: shm if
                possible.
            progress: Is called after each batch with the rows and bytes so far, and with the total number of rows, or
                None if it is unknown. An exception of it ends the put.

        Returns:
            The number of rows.

        Raises:
            SourceError: The source cannot be read, or has tensors.
            OptionError: An argument is invalid.
            CatalogError: The catalog refuses, or cannot be reached.

        Example:
            ```python
            rows = client.put("trips", table, tags={"source": "airline"}, ttl=3600)
            client.put("trips", table.to_reader(), mode="append")
            assert client.describe("trips").rows == 2 * rows
            ```
        """
        if transport not in (None, "shm", "grpc"):
            raise OptionError(f'transport is "shm" or "grpc" for a put, not {transport!r}')
        commit = Commit(name, key=secrets.token_hex(16), mode=mode, tags=tags or {}, ttl=ttl)
        with tracing.traced("dissociated.put", dataset=name, transport=transport) as span:
            rows = Put(commit, make_dataset(name, source, schema=schema), progress).publish(self, transport)
            if span is not None:
                span.set(rows=rows)
            return rows
