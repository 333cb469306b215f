"""A handle on one version of a dataset, which every tool takes that takes a dataset of pyarrow.

Importing this imports pyarrow.dataset.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol, Self

import pyarrow as pa
import pyarrow.dataset as ds

from dissociated.catalog.locations import DatasetInfo
from dissociated.client.request import ReadRequest
from dissociated.codec.batches import BatchReader
from dissociated.codec.device import DeviceReader, to_device
from dissociated.codec.inplace import MappedReader
from dissociated.errors import OptionError
from dissociated.memory.device.base import Device
from dissociated.memory.device.registry import open_device

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl

#: What pyarrow's own scanners take beside these, and what has no meaning here.
_IGNORED_OPTIONS = {
    "batch_readahead",
    "fragment_readahead",
    "fragment_scan_options",
    "use_threads",
    "cache_metadata",
    "memory_pool",
}


_UNREADABLE_SIZE = 1 << 20  # bytes; with fewer than a file has, pyarrow would not try to read it


class HandleClient(Protocol):
    """What a handle asks of its client."""

    defaults: ReadRequest

    def describe(self, name: str, version: int | None = None) -> DatasetInfo: ...

    def versions(self, name: str) -> Sequence[dict[str, Any]]: ...

    def read_version(self, info: DatasetInfo, transport: str | None, request: ReadRequest) -> pa.RecordBatchReader: ...

    def read_version_on_device(
        self, info: DatasetInfo, transport: str | None, request: ReadRequest, device: Device
    ) -> DeviceReader: ...

    def read_part(
        self, info: DatasetInfo, number: int, transport: str | None, request: ReadRequest
    ) -> pa.RecordBatchReader: ...

    def is_mapped(self, info: DatasetInfo, number: int, transport: str | None) -> bool: ...


class DatasetHandle(ds.UnionDataset):  # type: ignore[misc]  # pyarrow has no type hints
    """One version of a dataset, as `Client.dataset` gives it. It can be read again and again.

    What it reads is that version, or DatasetNotFound where that is gone; `refresh` gives a handle on what is there
    now. Columns, filters and limits are those of `Client.read`, but columns come in the order in which they are named.
    Whoever scans it as a dataset of pyarrow (DuckDB, Polars) asks for its columns and rows alone.

    Every method that reads raises what `Client.read` raises.
    """

    def __init__(self, client: HandleClient, info: DatasetInfo, transport: str | None = None) -> None:
        super().__init__(info.schema, [_unreadable_dataset(info.schema)])
        self._client = client
        self._transport = transport
        #: What the catalog says of it.
        self.info = info

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._client, self.info, self._transport)

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def schema(self) -> pa.Schema:
        return self.info.schema

    @property
    def num_rows(self) -> int | None:
        """None where the catalog does not know; `count_rows` finds out."""
        return self.info.rows

    @property
    def nbytes(self) -> int | None:
        """Bytes of its bodies; None where the catalog does not know."""
        return self.info.nbytes

    @property
    def version(self) -> int:
        """The number of the version; 0 where the catalog has none."""
        return self.info.version

    @property
    def created(self) -> datetime | None:
        """When it was published; None where the catalog does not say."""
        return datetime.fromtimestamp(self.info.created, UTC) if self.info.created else None

    @property
    def tags(self) -> Mapping[str, str]:
        """As they were given to `Client.put`."""
        return self.info.tags

    @property
    def children(self) -> list[Any]:
        """Always empty: a handle stands for one dataset, and not for a union of some."""
        return []

    def versions(self) -> Sequence[dict[str, Any]]:
        """All versions of the dataset that can still be read, as `Client.versions` gives them."""
        return self._client.versions(self.name)

    def refresh(self) -> Self:
        """A handle on the version that is there now. Raises DatasetNotFound."""
        return type(self)(self._client, self._client.describe(self.name), self._transport)

    def scanner(
        self,
        columns: Sequence[str] | Mapping[str, Any] | None = None,
        filter: Any = None,
        *,
        limit: int | None = None,
        batch_size: int | None = None,
        device: object = None,
        **tuning: Any,
    ) -> Scanner:
        """Some columns and rows, to be read again and again.

        - `columns`: in this order; or expressions of pyarrow by name.
        - `filter`, `limit`: as for `Client.read`.
        - `batch_size`: rows of a batch, at most.
        - `device`: where batches are to lie, as for `Client.read`: `to_reader` then gives a DeviceReader, and
          `to_batches` its batches. Whatever gives a Table, or counts, does not go by it.

        What pyarrow's own scanners take beside these is taken, and means nothing here.
        """
        if unknown := tuning.keys() - _IGNORED_OPTIONS:
            raise OptionError(
                f"a scanner takes columns, filter, limit, batch_size and device, not {', '.join(sorted(unknown))}"
            )
        return Scanner(self, columns, filter, limit, batch_size, None if device is None else open_device(device))

    def filter(self, expression: Any) -> ds.Dataset:
        """Not for handles: give the filter to what reads."""
        raise OptionError("a handle has no filter of its own: give filter= to to_table, to_reader or scanner")

    def to_table(self, columns: Any = None, filter: Any = None, **options: Any) -> pa.Table:
        """A table of all rows and columns, or of those that `columns`, `filter` and the options of `scanner` choose."""
        return self.scanner(columns, filter, **options).to_table()

    def to_batches(self, columns: Any = None, filter: Any = None, **options: Any) -> Iterator[pa.RecordBatch]:
        """The record batches of what is chosen, one by one, as they arrive."""
        return self.scanner(columns, filter, **options).to_batches()

    def to_reader(self, columns: Any = None, filter: Any = None, **options: Any) -> pa.RecordBatchReader:
        """A reader over what is chosen, which is read once."""
        return self.scanner(columns, filter, **options).to_reader()

    def to_pandas(self, columns: Any = None, filter: Any = None, **options: Any) -> pd.DataFrame:
        """What is chosen, as a DataFrame of pandas. `to_table().to_pandas(...)` takes options of pyarrow."""
        return self.to_table(columns, filter, **options).to_pandas()

    def to_polars(self, columns: Any = None, filter: Any = None, **options: Any) -> pl.DataFrame:
        """What is chosen, as a DataFrame of Polars. Over shared memory nothing is copied."""
        import polars

        return polars.from_arrow(self.to_table(columns, filter, **options), rechunk=False)  # type: ignore[return-value]

    def scan(self) -> pl.LazyFrame:
        """A LazyFrame of Polars, which reads the columns and rows that its plan needs."""
        from dissociated.catalog.lazy import scan

        return scan(self)

    def head(self, num_rows: int = 10, columns: Any = None, filter: Any = None, **options: Any) -> pa.Table:
        """A table of the first `num_rows` of the rows that are chosen."""
        return self.scanner(columns, filter, **options).head(num_rows)

    def take(self, indices: Any, columns: Any = None, filter: Any = None, **options: Any) -> pa.Table:
        """A table of the rows at these positions, counted from 0 among those that are chosen. Reads all of these."""
        return self.scanner(columns, filter, **options).take(indices)

    def count_rows(self, filter: Any = None, **options: Any) -> int:
        """How many rows the version has, or how many of them pass `filter`."""
        return self.scanner(filter=filter, **options).count_rows()

    def __arrow_c_stream__(self, requested_schema: object = None) -> Any:
        return self.scanner().__arrow_c_stream__(requested_schema)

    def __arrow_c_schema__(self) -> Any:
        return self.schema.__arrow_c_schema__()

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return repr(self.info)

    def _repr_html_(self) -> str:
        return self.info._repr_html_()

    def _open(self, request: Callable[[ReadRequest], ReadRequest]) -> pa.RecordBatchReader:
        """A reader of this version; `request` makes of the defaults what is wanted."""
        return self._client.read_version(self.info, self._transport, request(self._client.defaults))

    def _open_on_device(self, request: Callable[[ReadRequest], ReadRequest], device: Device) -> DeviceReader:
        """The same, on a device."""
        wanted = replace(request(self._client.defaults), device=device)
        return self._client.read_version_on_device(self.info, self._transport, wanted, device)

    def read_part(self, number: int, request: Callable[[ReadRequest], ReadRequest]) -> pa.RecordBatchReader:
        """The same of one of its endpoints."""
        return self._client.read_part(self.info, number, self._transport, request(self._client.defaults))

    def map_part(self, number: int) -> pa.RecordBatchReader | None:
        """All of one of its endpoints, where that lies in shared memory, and reading it takes no other; else None."""
        if not self._client.is_mapped(self.info, number, self._transport):
            return None
        reader = self.read_part(number, lambda defaults: defaults)
        return reader if isinstance(reader, MappedReader) else None


class Scanner:
    """Some columns and rows of a handle, with the methods of pyarrow's Scanner. It can be read again and again."""

    def __init__(
        self,
        dataset: DatasetHandle,
        columns: Sequence[str] | Mapping[str, Any] | None,
        filter: Any,
        limit: int | None,
        batch_size: int | None,
        device: Device | None = None,
    ) -> None:
        if isinstance(columns, str):
            raise OptionError(f"columns is a list of names: [{columns!r}]")
        if batch_size is not None and (not isinstance(batch_size, int) or batch_size < 1):
            raise OptionError(f"batch_size is a number of rows, 1 or more, not {batch_size!r}")
        self._dataset = dataset
        self._columns = columns
        self._expressions = {**columns} if isinstance(columns, Mapping) else None
        self._names = None if self._expressions is not None or columns is None else [*columns]
        self._filter = filter
        self._limit = limit
        self._batch_size = batch_size
        self._device = device

    @property
    def dataset_schema(self) -> pa.Schema:
        """The schema of the whole dataset."""
        return self._dataset.schema

    @property
    def projected_schema(self) -> pa.Schema:
        """The schema of what is read: the chosen columns, in their order."""
        if self._expressions is not None:
            return self._project(pa.RecordBatchReader.from_batches(self.dataset_schema, []), self._expressions).schema
        return _ordered(self.dataset_schema, self._names)

    def to_reader(self) -> Any:
        """A reader over what is chosen, which is read once: a RecordBatchReader, or on a device a DeviceReader."""
        if self._device is None:
            return self._to_reader()
        return self._to_device_reader(self._device)

    def _to_device_reader(self, device: Device) -> DeviceReader:
        chosen = [name for name in self.dataset_schema.names if self._names is None or name in self._names]
        if self._expressions is not None or self._batch_size is not None or self.projected_schema.names != chosen:
            return to_device(self._to_reader(), device)
        return self._dataset._open_on_device(self._requested(self._names), device)

    def _to_reader(self) -> pa.RecordBatchReader:
        reader = self._read(self._names)
        if self._expressions is not None:
            return self._project(reader, self._expressions)
        schema = _ordered(reader.schema, self._names)
        if schema.names == reader.schema.names and self._batch_size is None:
            return reader
        positions = [reader.schema.get_field_index(name) for name in schema.names]
        return BatchReader(schema, ((piece.select(positions), None) for piece in self._pieces(reader)))

    def to_batches(self) -> Iterator[Any]:
        """The record batches of `to_reader`, one by one."""
        return iter(self.to_reader())

    def to_table(self) -> pa.Table:
        """A table of everything that is chosen."""
        return self._to_reader().read_all()

    def head(self, num_rows: int = 10) -> pa.Table:
        """A table of the first `num_rows` rows."""
        return self._limited(num_rows).to_table()

    def take(self, indices: Any) -> pa.Table:
        """A table of the rows at these positions, counted from 0. Reads all rows that are chosen."""
        return self.to_table().take(indices)

    def count_rows(self) -> int:
        """How many rows there are."""
        known = self._dataset.num_rows
        if self._filter is None and known is not None:
            return known if self._limit is None else min(known, self._limit)
        return sum(batch.num_rows for batch in self._read([]))

    def __arrow_c_stream__(self, requested_schema: object = None) -> Any:
        return self._to_reader().__arrow_c_stream__(requested_schema)

    def __arrow_c_schema__(self) -> Any:
        return self.projected_schema.__arrow_c_schema__()

    def _limited(self, rows: int) -> Scanner:
        limit = rows if self._limit is None else min(rows, self._limit)
        return Scanner(self._dataset, self._columns, self._filter, limit, self._batch_size)

    def _read(self, columns: Sequence[str] | None) -> pa.RecordBatchReader:
        return self._dataset._open(self._requested(columns))

    def _requested(self, columns: Any) -> Callable[[ReadRequest], ReadRequest]:
        return lambda defaults: replace(defaults, columns=columns, filter=self._filter, limit=self._limit)

    def _project(self, reader: pa.RecordBatchReader, expressions: dict[str, Any]) -> pa.RecordBatchReader:
        """Expressions of the columns, as pyarrow computes them."""
        return ds.Scanner.from_batches(reader, columns=expressions, use_threads=False).to_reader()

    def _pieces(self, reader: pa.RecordBatchReader) -> Iterator[pa.RecordBatch]:
        for batch in reader:
            size = self._batch_size or max(1, batch.num_rows)
            for at in range(0, batch.num_rows, size):
                yield batch.slice(at, size)


def _ordered(schema: pa.Schema, columns: Sequence[str] | None) -> pa.Schema:
    """The fields in the order in which they are named. What is not there is an error of who reads."""
    if columns is None:
        return schema
    fields = [schema.field(name) for name in dict.fromkeys(columns) if name in schema.names]
    return pa.schema(fields, schema.metadata)


class _UnreadableFile(io.RawIOBase):
    """What pyarrow's own code would read. It gives nothing, so that nobody takes that for the data.

    It can be measured, which pyarrow does at once: an error then would be kept for as long as the handle, and with it
    every frame that was running, and what those had.
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
            "pyarrow cannot read a handle in this way: call its own scanner(), to_table() or to_reader(), and go on "
            "with what that gives"
        )


def _unreadable_dataset(schema: pa.Schema) -> ds.Dataset:
    """A dataset of pyarrow that cannot be read."""
    fragment = ds.IpcFileFormat().make_fragment(pa.PythonFile(_UnreadableFile(), mode="r"))
    return ds.FileSystemDataset([fragment], schema, ds.IpcFileFormat())
