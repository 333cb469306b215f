"""A handle on one version of a dataset, for all tools that take a dataset of pyarrow.

Importing this module imports pyarrow.dataset.
"""

from __future__ import annotations

import io
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from dissociated.base.display import missing_column
from dissociated.client.calls import CatalogClient
from dissociated.client.request import ReadRequest, check_decompress
from dissociated.client.scanner import Scanner
from dissociated.client.version_reader import VersionReader
from dissociated.codec.filter.row_filter import RowFilter
from dissociated.codec.inplace import MappedReader
from dissociated.control.dataset_info import DatasetInfo
from dissociated.errors import ColumnNotFound, OptionError
from dissociated.memory.device.registry import open_device

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl

#: Options of pyarrow's own scanners that have no effect here.
_IGNORED_OPTIONS = {
    "batch_readahead",
    "fragment_readahead",
    "fragment_scan_options",
    "use_threads",
    "cache_metadata",
    "memory_pool",
}

_UNREADABLE_SIZE = 1 << 20  # bytes: large enough for pyarrow to try a read, which raises a helpful error


class _Rows(ds.UnionDataset):  # type: ignore[misc]  # pyarrow has no type hints
    """A dataset of pyarrow that is read by this library: every method that reads does so through `scanner`.

    Code of pyarrow in C++ cannot read it. Methods of pyarrow that would need that read all rows first, which copies
    nothing over shared memory.
    """

    def __init__(self, schema: pa.Schema) -> None:
        super().__init__(schema, [_unreadable_dataset(schema)])

    @abstractmethod
    def scanner(self, columns: Any = None, filter: Any = None, **options: Any) -> Scanner:
        """Return a selection of columns and rows, which can be read repeatedly. See `DatasetHandle.scanner`."""

    @property
    def children(self) -> list[Any]:
        """Return an empty list: this stands for one dataset, not for a union."""
        return []

    def to_table(self, columns: Any = None, filter: Any = None, **options: Any) -> pa.Table:
        """Read all rows and columns, or those that `columns`, `filter` and options of `scanner` select, as a table.

        Example:
            ```python
            flights = client["flights"]
            longest = flights.to_table(["dest", "distance"], filter=("distance", ">", 1900))
            assert longest.column_names == ["dest", "distance"]
            ```
        """
        return self.scanner(columns, filter, **options).to_table()

    def to_batches(self, columns: Any = None, filter: Any = None, **options: Any) -> Iterator[pa.RecordBatch]:
        """Yield the record batches of the selection, one by one, as they arrive.

        Example:
            ```python
            rows = sum(batch.num_rows for batch in client["flights"].to_batches(["dest"]))
            ```
        """
        return self.scanner(columns, filter, **options).to_batches()

    def to_reader(self, columns: Any = None, filter: Any = None, **options: Any) -> pa.RecordBatchReader:
        """Return a reader over the selection, which can be read once.

        Example:
            ```python
            import pyarrow.parquet as pq

            reader = client["flights"].to_reader(["dest"])
            with pq.ParquetWriter("dest.parquet", reader.schema) as file:
                for batch in reader:
                    file.write_batch(batch)
            ```
        """
        return self.scanner(columns, filter, **options).to_reader()

    def open_reader(self) -> pa.RecordBatchReader:
        """Return a reader over all data. `publish` calls this."""
        return self.scanner().open_reader()

    def to_pandas(self, columns: Any = None, filter: Any = None, **options: Any) -> pd.DataFrame:
        """Read the selection as a DataFrame of pandas. `to_table().to_pandas(...)` takes options of pyarrow.

        Example:
            ```python
            frame = client["flights"].to_pandas(["dest", "air_time"])
            print(frame.groupby("dest").air_time.mean())
            ```
        """
        return self.to_table(columns, filter, **options).to_pandas()

    def to_polars(self, columns: Any = None, filter: Any = None, **options: Any) -> pl.DataFrame:
        """Read the selection as a DataFrame of Polars. Over shared memory, no data is copied.

        Example:
            ```python
            frame = client["flights"].to_polars(["dest", "air_time"])
            print(frame.group_by("dest").mean())
            ```
        """
        import polars

        return polars.from_arrow(self.to_table(columns, filter, **options), rechunk=False)  # type: ignore[return-value]

    def head(self, num_rows: int = 10, columns: Any = None, filter: Any = None, **options: Any) -> pa.Table:
        """Read the first `num_rows` rows of the selection, as a table.

        Example:
            ```python
            assert client["flights"].head(5, ["dest"]).num_rows == 5
            ```
        """
        return self.scanner(columns, filter, **options).head(num_rows)

    def take(self, indices: Any, columns: Any = None, filter: Any = None, **options: Any) -> pa.Table:
        """Read the rows at these positions, counted from 0 in the selection, as a table.

        This reads the whole selection.

        Raises:
            OptionError: The selection has no row at one of the positions.

        Example:
            ```python
            first, last = client["flights"].take([0, 1999])["distance"].to_pylist()
            ```
        """
        return self.scanner(columns, filter, **options).take(indices)

    def count_rows(self, filter: Any = None, **options: Any) -> int:
        """Return the number of rows of the version, or of the rows that pass `filter`.

        Example:
            ```python
            assert client["flights"].count_rows(("dest", "in", ["IAH", "ORD"])) == 1000
            ```
        """
        return self.scanner(filter=filter, **options).count_rows()

    def __arrow_c_stream__(self, requested_schema: object = None) -> Any:
        return self.scanner().__arrow_c_stream__(requested_schema)

    def __arrow_c_schema__(self) -> Any:
        return self.schema.__arrow_c_schema__()

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__

    def filter(self, expression: Any) -> FilteredDataset:
        """Return a dataset of the rows that pass `expression`, which is applied when they are read.

        Args:
            expression: See `filter` of `Client.read`.

        Raises:
            OptionError: It is not a filter for the schema.
            ColumnNotFound: The schema lacks a column of the filter.

        Example:
            ```python
            to_miami = client["flights"].filter(("dest", "=", "MIA"))
            assert to_miami.count_rows() == 500
            ```
        """
        return FilteredDataset(self, RowFilter.bind(expression, self.schema).expression)

    def sort_by(self, sorting: Any, **options: Any) -> ds.InMemoryDataset:
        """Read all rows, and return them as a dataset in memory, sorted as `pyarrow.Table.sort_by` sorts.

        Raises:
            ColumnNotFound: The schema lacks a column of `sorting`.
            OptionError: The columns cannot be sorted by.

        Example:
            ```python
            longest = client["flights"].sort_by([("distance", "descending")]).head(10)
            ```
        """
        _check_columns(
            self,
            [sorting] if isinstance(sorting, str) else [key if isinstance(key, str) else key[0] for key in sorting],
            "to sort by",
        )
        whole = self.to_table()
        with _table_errors("the rows cannot be sorted"):
            return ds.InMemoryDataset(whole.sort_by(sorting, **options))

    def join(
        self, right_dataset: Any, keys: Any, right_keys: Any = None, *arguments: Any, **options: Any
    ) -> ds.InMemoryDataset:
        """Read this dataset and `right_dataset`, and return their join in memory. See `pyarrow.Table.join`.

        Raises:
            ColumnNotFound: A column of the keys is missing in its schema.
            OptionError: The datasets cannot be joined in this way.

        Example:
            ```python
            airports = pa.table({"dest": ["MIA", "ORD"], "city": ["Miami", "Chicago"]})
            flights = client["flights"].join(airports, "dest", join_type="inner")
            assert flights.count_rows() == 1000
            ```
        """
        _check_columns(self, keys, "on the left side of the join")
        _check_columns(right_dataset, right_keys or keys, "on the right side of the join")
        table, right_table = self.to_table(), _table(right_dataset)
        with _table_errors("the datasets cannot be joined"):
            return ds.InMemoryDataset(table.join(right_table, keys, right_keys, *arguments, **options))

    def join_asof(
        self, right_dataset: Any, on: str, by: Any, tolerance: int, right_on: str | None = None, right_by: Any = None
    ) -> ds.InMemoryDataset:
        """Read this dataset and `right_dataset`, and return their join in memory. See `pyarrow.Table.join_asof`.

        Raises:
            ColumnNotFound: A column of the keys is missing in its schema.
            OptionError: The datasets cannot be joined in this way.

        Example:
            ```python
            client.put("departures", pa.table({"minute": [3, 8], "dest": ["IAH", "IAH"]}))
            weather = pa.table({"minute": [0, 5], "dest": ["IAH", "IAH"], "wind": [10, 20]})
            departures = client["departures"].join_asof(weather, on="minute", by="dest", tolerance=-60)
            assert departures.to_table()["wind"].to_pylist() == [10, 20]
            ```
        """
        for source, side, nearest, equal in (
            (self, "left", on, by),
            (right_dataset, "right", right_on or on, by if right_by is None else right_by),
        ):
            _check_columns(source, nearest, f"on the {side} side of the join")
            _check_columns(source, equal, f"on the {side} side of the join")
        table, right_table = self.to_table(), _table(right_dataset)
        with _table_errors("the datasets cannot be joined"):
            return ds.InMemoryDataset(table.join_asof(right_table, on, by, tolerance, right_on, right_by))

    def replace_schema(self, schema: pa.Schema) -> ds.InMemoryDataset:
        """Read all rows, and return them as a dataset in memory with another schema.

        `pyarrow.dataset.dataset` calls this to make one dataset of several.

        Raises:
            OptionError: Columns of the same name have different types. `to_table().cast(schema)` converts values.

        Example:
            ```python
            schema = pa.schema([("dest", pa.string()), ("carrier", pa.string())])
            flights = client["flights"].replace_schema(schema)
            assert flights.to_table()["carrier"].null_count == 2000
            ```
        """
        try:
            return ds.InMemoryDataset(self.to_table()).replace_schema(schema)
        except pa.ArrowTypeError as error:
            raise OptionError(f"{error}: convert the values by to_table().cast(schema)") from None

    def get_fragments(self, filter: Any = None) -> Iterator[ds.Fragment]:
        """Read all rows, and return an iterator over fragments in memory. DataFusion calls this.

        Args:
            filter: An expression of pyarrow, which is ignored: rows are filtered when fragments are scanned.

        Example:
            ```python
            rows = sum(fragment.count_rows() for fragment in client["flights"].get_fragments())
            ```
        """
        return iter(ds.InMemoryDataset(self.to_table()).get_fragments())

    def __iter__(self) -> Iterator[Any]:
        raise OptionError(
            "a dataset cannot be iterated over: to_batches() gives its batches, to_pandas() or "
            "pandas.DataFrame.from_arrow() a DataFrame of pandas, and to_polars() or polars.DataFrame() one of Polars"
        )


def _check_columns(source: Any, columns: Any, purpose: str) -> None:
    """Raise ColumnNotFound for columns that a table or dataset lacks, before any row is read."""
    names = source.schema.names
    for column in [columns] if isinstance(columns, str) else columns:
        is_name = isinstance(column, str) and not column.startswith((".", "["))  # others are expressions and paths
        if is_name and column not in names:
            raise ColumnNotFound(missing_column(column, names, f" {purpose}"))


@contextmanager
def _table_errors(fact: str) -> Iterator[None]:
    """Convert the errors of a table for values that do not suit it into OptionError."""
    try:
        yield
    except (ValueError, pa.ArrowNotImplementedError, pa.ArrowTypeError, pa.ArrowKeyError) as error:
        why = str(error).partition("\n")[0]
        raise OptionError(f"{fact}: {why}") from None


def _table(source: Any) -> pa.Table:
    """Return a table, or all rows of a dataset."""
    return source if isinstance(source, pa.Table) else source.to_table()


class FilteredDataset(_Rows):
    """The rows of a dataset that pass a filter, from `DatasetHandle.filter`. It can be read repeatedly."""

    def __init__(self, whole: _Rows, expression: pc.Expression) -> None:
        super().__init__(whole.schema)
        self._whole = whole
        self._expression = expression

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._whole, self._expression)

    def scanner(self, columns: Any = None, filter: Any = None, **options: Any) -> Scanner:
        """Return a selection of columns and of these rows. See `DatasetHandle.scanner`."""
        both = self._expression
        if filter is not None:
            both = both & RowFilter.bind(filter, self.schema).expression
        return self._whole.scanner(columns, both, **options)

    def __repr__(self) -> str:
        return f"{self._whole!r}\nonly rows that pass {self._expression}"


class DatasetHandle(_Rows):
    """A version of a dataset, from `Client.dataset`. It can be read repeatedly.

    A handle reads its version, or raises DatasetNotFound if that is gone; `refresh` returns a handle on the current
    version. Columns, filters and limits are those of `Client.read`, but columns are in the order in which they are
    named. Tools that scan the handle as a dataset of pyarrow (DuckDB, Polars) read only the columns and rows that they
    need. For Polars, use `scan`: with `polars.scan_pyarrow_dataset`, comparisons with NaN are those of pyarrow.

    A version in shared memory stays mapped once it was read. Later reads need neither the catalog nor a server, and
    succeed even if the version is dropped meanwhile. `mapped_nbytes` is the size of this memory. It is given back by
    `close`, at the end of a `with` block, or when the handle is collected.

    Every method that reads raises the errors of `Client.read`.

    Example:
        ```python
        with client.dataset("flights") as flights:
            frame = flights.to_pandas(["dest", "distance"], filter=("dest", "=", "MIA"))
            assert flights.count_rows(("dest", "=", "MIA")) == len(frame)
        ```
    """

    def __init__(
        self,
        client: CatalogClient,
        info: DatasetInfo,
        transport: str | None = None,
        described_now: bool = False,
        reader: VersionReader | None = None,
    ) -> None:
        super().__init__(info.schema)
        self._client = client
        self._reader = reader or VersionReader(client, info, transport, described_now)
        #: Description of the version by the catalog.
        self.info = info

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._client, self.info, self._reader.transport)

    @property
    def name(self) -> str:
        """Return the name of the dataset."""
        return self.info.name

    @property
    def catalog_uri(self) -> str:
        """Return the URI of the catalog that the dataset belongs to."""
        return self._client.uri

    @property
    def schema(self) -> pa.Schema:
        """Return the schema of all columns."""
        return self.info.schema

    @property
    def num_rows(self) -> int | None:
        """Return the number of rows of the version; None if the catalog does not know it. `count_rows` counts them."""
        return self.info.rows

    @property
    def nbytes(self) -> int | None:
        """Return the total size of the bodies in bytes, or None if the catalog does not know it."""
        return self.info.nbytes

    @property
    def version(self) -> int:
        """Return the number of the version, or 0 if the catalog has no versions."""
        return self.info.version

    @property
    def created(self) -> datetime | None:
        """Return the time of publication, or None if the catalog does not tell it."""
        return datetime.fromtimestamp(self.info.created, UTC) if self.info.created else None

    @property
    def tags(self) -> Mapping[str, str]:
        """Return the tags that `Client.put` was given."""
        return self.info.tags

    @property
    def mapped_nbytes(self) -> int:
        """Return the size of the shared memory that the handle keeps mapped, in bytes; 0 if it keeps none."""
        return self._reader.mapped_nbytes

    def close(self) -> None:
        """Give back the shared memory that the handle keeps mapped. A later read maps it again.

        Memory in which there are arrays is given back when the last of them is collected. A LazyFrame of `scan` that
        was collected keeps such arrays, as long as it lives.

        Example:
            ```python
            flights = client["flights"]
            flights.count_rows(("dest", "=", "MIA"))
            flights.close()
            assert flights.mapped_nbytes == 0
            ```
        """
        self._reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def versions(self) -> Sequence[dict[str, Any]]:
        """List all versions of the dataset that can still be read. See `Client.versions`.

        Example:
            ```python
            numbers = [version["version"] for version in client["flights"].versions()]
            ```
        """
        return self._client.versions(self.name)

    def refresh(self) -> Self:
        """Return a handle on the current version.

        Raises:
            DatasetNotFound: The dataset does not exist any more.

        Example:
            ```python
            flights = client.dataset("flights")
            client.put("flights", pa.concat_tables([table, table]))
            assert flights.refresh().num_rows == 2 * flights.num_rows
            ```
        """
        info = self._client.describe(self.name)
        return type(self)(self._client, info, self._reader.transport, described_now=True)

    def scanner(
        self,
        columns: Sequence[str] | Mapping[str, Any] | None = None,
        filter: Any = None,
        *,
        limit: int | None = None,
        batch_size: int | None = None,
        device: object = None,
        decompress: bool = True,
        **tuning: Any,
    ) -> Scanner:
        """Return a selection of columns and rows, which can be read repeatedly.

        Args:
            columns: Names of columns, which determine the order; or expressions of pyarrow by name.
            filter: See `Client.read`.
            limit: See `Client.read`.
            batch_size: Most rows of a batch.
            device: Device for the batches, as in `Client.read`: `to_reader` then returns a DeviceReader, and
                `to_batches` yields its batches. Methods that return a Table or a count ignore it.
            decompress: With a `device`, bodies that come compressed are decompressed on the host. False refuses them.
            tuning: Further options of pyarrow's scanners, which are accepted and ignored.

        Raises:
            OptionError: An option is unknown or invalid.
            DeviceNotFound: The device does not exist.

        Example:
            ```python
            import pyarrow.compute as pc

            kilometres = pc.multiply(pc.field("distance"), 1.609)
            scanner = client.dataset("flights").scanner({"dest": pc.field("dest"), "km": kilometres}, batch_size=500)
            assert scanner.to_table().column_names == ["dest", "km"]
            ```
        """
        if unknown := tuning.keys() - _IGNORED_OPTIONS:
            raise OptionError(
                "a scanner takes columns, filter, limit, batch_size, device and decompress, "
                f"not {', '.join(sorted(unknown))}"
            )
        opened = None if device is None else open_device(device)
        check_decompress(decompress, opened)
        return Scanner(self._reader, columns, filter, limit, batch_size, opened, decompress)

    def scan(self) -> pl.LazyFrame:
        """Return a LazyFrame of Polars, which reads only the columns and rows that its plan needs.

        Example:
            ```python
            import polars as pl

            flights = client["flights"].scan()
            longest = flights.filter(pl.col("distance") > 1900).select("dest").collect()
            ```
        """
        from dissociated.client.lazy import scan

        return scan(self._reader)

    def __repr__(self) -> str:
        return repr(self.info)

    def _repr_html_(self) -> str:
        return self.info._repr_html_()

    @property
    def defaults(self) -> ReadRequest:
        """The request for all columns and rows, with the client's options. Loaders of this library derive theirs."""
        return self._client.defaults

    def read_part(self, number: int, request: ReadRequest) -> pa.RecordBatchReader:
        """Open a reader over one endpoint. Loaders of this library call this. Users call `Client.read_endpoint`."""
        return self._reader.read_part(number, request)

    def map_part(self, number: int, keep_files: bool) -> MappedReader | None:
        """Return a reader over a whole endpoint if it lies in shared memory and can be read without a copy; else None.

        With `keep_files`, its regions can be mapped again. Loaders of this library call this.
        """
        # A stream has no known number of rows, and opening it would take its rows.
        if self.info.endpoints[number].rows is None or not self._reader.is_mapped(number):
            return None
        reader = self.read_part(number, replace(self.defaults, keep_files=keep_files))
        if isinstance(reader, MappedReader) and reader.is_mapped:
            return reader
        reader.close()
        return None


class _UnreadableFile(io.RawIOBase):
    """The file that pyarrow's own code would read. It has no data, so that none can be mistaken for the dataset's.

    pyarrow asks for its size at once, so that must work: pyarrow would keep an error for as long as the handle, and
    with the error all frames of its traceback and their objects.
    """

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return offset

    def tell(self) -> int:
        return _UNREADABLE_SIZE

    def read(self, size: int | None = -1) -> bytes:
        raise OptionError(
            "pyarrow cannot read a handle in this way: call its to_table() or to_reader(), and pass the result"
        )


def _unreadable_dataset(schema: pa.Schema) -> ds.Dataset:
    """Return a dataset of pyarrow that cannot be read."""
    fragment = ds.IpcFileFormat().make_fragment(pa.PythonFile(_UnreadableFile(), mode="r"))
    return ds.FileSystemDataset([fragment], schema, ds.IpcFileFormat())
