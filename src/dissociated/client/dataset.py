"""A handle on one version of a dataset, which every tool takes that takes a dataset of pyarrow.

Importing this imports pyarrow.dataset.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa
import pyarrow.dataset as ds

from dissociated.client.calls import CatalogClient
from dissociated.client.request import ReadRequest, check_decompress
from dissociated.client.scanner import Scanner
from dissociated.client.version_reader import VersionReader
from dissociated.codec.inplace import MappedReader
from dissociated.control.locations import DatasetInfo
from dissociated.errors import OptionError
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


class DatasetHandle(ds.UnionDataset):  # type: ignore[misc]  # pyarrow has no type hints
    """One version of a dataset, as `Client.dataset` gives it. It can be read again and again.

    What it reads is that version, or DatasetNotFound where that is gone; `refresh` gives a handle on what is there
    now. Columns, filters and limits are those of `Client.read`, but columns come in the order in which they are named.
    Whoever scans it as a dataset of pyarrow (DuckDB, Polars) asks for its columns and rows alone.

    Every method that reads raises what `Client.read` raises.
    """

    def __init__(self, client: CatalogClient, info: DatasetInfo, transport: str | None = None) -> None:
        super().__init__(info.schema, [_unreadable_dataset(info.schema)])
        self._client = client
        self._reader = VersionReader(client, info, transport)
        #: What the catalog says of it.
        self.info = info

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._client, self.info, self._reader.transport)

    @property
    def name(self) -> str:
        """The name of the dataset."""
        return self.info.name

    @property
    def schema(self) -> pa.Schema:
        """The schema of all its columns."""
        return self.info.schema

    @property
    def num_rows(self) -> int | None:
        """How many rows the version has; None where the catalog does not know. `count_rows` finds out."""
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
        """The tags that were given to `Client.put`."""
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
        return type(self)(self._client, self._client.describe(self.name), self._reader.transport)

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
        """Some columns and rows, to be read again and again.

        - `columns`: in this order; or expressions of pyarrow by name.
        - `filter`, `limit`: as for `Client.read`.
        - `batch_size`: rows of a batch, at most.
        - `device`: where batches are to lie, as for `Client.read`: `to_reader` then gives a DeviceReader, and
          `to_batches` its batches. Whatever gives a Table, or counts, does not go by it.
        - `decompress`: False refuses bodies that come compressed for a `device`, as for `Client.read`.

        What pyarrow's own scanners take beside these is taken, and means nothing here. Raises OptionError for anything
        else, and DeviceNotFound where there is no such device.
        """
        if unknown := tuning.keys() - _IGNORED_OPTIONS:
            raise OptionError(
                "a scanner takes columns, filter, limit, batch_size, device and decompress, "
                f"not {', '.join(sorted(unknown))}"
            )
        opened = None if device is None else open_device(device)
        check_decompress(decompress, opened)
        return Scanner(self._reader, columns, filter, limit, batch_size, opened, decompress)

    def filter(self, expression: Any) -> ds.Dataset:
        """Raises OptionError: a handle has no filter of its own. Give `filter` to what reads."""
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

    def open_reader(self) -> pa.RecordBatchReader:
        """A reader over all of it, for who publishes it."""
        return self.scanner().open_reader()

    def to_pandas(self, columns: Any = None, filter: Any = None, **options: Any) -> pd.DataFrame:
        """What is chosen, as a DataFrame of pandas. `to_table().to_pandas(...)` takes options of pyarrow."""
        return self.to_table(columns, filter, **options).to_pandas()

    def to_polars(self, columns: Any = None, filter: Any = None, **options: Any) -> pl.DataFrame:
        """What is chosen, as a DataFrame of Polars. Over shared memory nothing is copied."""
        import polars

        return polars.from_arrow(self.to_table(columns, filter, **options), rechunk=False)  # type: ignore[return-value]

    def scan(self) -> pl.LazyFrame:
        """A LazyFrame of Polars, which reads the columns and rows that its plan needs."""
        from dissociated.client.lazy import scan

        return scan(self.schema, self.to_reader)

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

    def read_part(self, number: int, request: Callable[[ReadRequest], ReadRequest]) -> pa.RecordBatchReader:
        """Open a reader over one endpoint; `request` makes the request out of the client's defaults."""
        return self._reader.read_part(number, request(self._client.defaults))

    def map_part(self, number: int, keep_files: bool) -> MappedReader | None:
        """All of one of its endpoints, where that lies in shared memory, and reading it takes no other; else None.

        With `keep_files` its regions can be mapped once more.
        """
        if not self._reader.is_mapped(number):
            return None
        reader = self.read_part(number, lambda defaults: replace(defaults, keep_files=keep_files))
        return reader if isinstance(reader, MappedReader) else None


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
