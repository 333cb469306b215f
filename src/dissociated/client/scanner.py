"""A selection of columns and rows of a dataset, with the methods of pyarrow's Scanner.

Importing this module imports pyarrow.dataset.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from dissociated.base.display import plural
from dissociated.client.request import ReadRequest
from dissociated.client.version_reader import VersionReader
from dissociated.codec.batches import BatchReader
from dissociated.codec.columns import positions, select_fields
from dissociated.codec.device import DeviceReader, to_device
from dissociated.codec.filter.row_filter import compute_columns, missing_field
from dissociated.codec.split import BatchAndMetadata, batches
from dissociated.errors import ColumnNotFound, OptionError
from dissociated.memory.device.base import Device

_COMPUTED_ROWS = 1 << 18  # most rows for which expressions are computed at once


class Scanner:
    """A selection of columns and rows of a handle, with the methods of pyarrow's Scanner. It can be read repeatedly.

    `DatasetHandle.scanner` makes it, and describes the parameters. Every method that reads raises the errors of
    `Client.read`.

    Raises:
        OptionError: An argument is invalid.

    Example:
        ```python
        scanner = client.dataset("flights").scanner(["dest"], filter=("distance", "<", 100))
        assert scanner.count_rows() == scanner.to_table().num_rows
        ```
    """

    def __init__(
        self,
        version: VersionReader,
        columns: Sequence[str] | Mapping[str, Any] | None,
        filter: Any,
        limit: int | None,
        batch_size: int | None,
        device: Device | None = None,
        decompress: bool = True,
    ) -> None:
        if isinstance(columns, str):
            raise OptionError(f"columns is a list of names: [{columns!r}]")
        if batch_size is not None and (not isinstance(batch_size, int) or batch_size < 1):
            raise OptionError(f"batch_size is a number of rows, 1 or more, not {batch_size!r}")
        self._version = version
        self._columns = columns
        # Without an expression there is nothing to compute: no columns are selected, as by an empty list.
        self._expressions = _checked({**columns}) if isinstance(columns, Mapping) and columns else None
        self._names = None if self._expressions is not None or columns is None else [*columns]
        self._filter = filter
        self._limit = limit
        self._batch_size = batch_size
        self._device = device
        self._decompress = decompress

    @property
    def dataset_schema(self) -> pa.Schema:
        """Return the schema of the whole dataset."""
        return self._version.info.schema

    @property
    def projected_schema(self) -> pa.Schema:
        """Return the schema of the result: the selected columns, in their order."""
        if self._expressions is not None:
            return _computed_schema(self.dataset_schema, self._expressions)
        return select_fields(self.dataset_schema, positions(self.dataset_schema, self._names))

    def open_reader(self) -> pa.RecordBatchReader:
        """Return a reader in memory of this process, whichever device was chosen. `publish` calls this."""
        return self._to_reader()

    def to_reader(self) -> Any:
        """Return a RecordBatchReader over the selection, or a DeviceReader if it has a device. It can be read once.

        Example:
            ```python
            scanner = client["flights"].scanner(["distance"], batch_size=500)
            assert [batch.num_rows for batch in scanner.to_reader()] == [500] * 4
            ```
        """
        if self._device is None:
            return self._to_reader()
        return self._to_device_reader(self._device)

    def _to_device_reader(self, device: Device) -> DeviceReader:
        chosen = [name for name in self.dataset_schema.names if self._names is None or name in self._names]
        if self._expressions is not None or self._batch_size is not None or self.projected_schema.names != chosen:
            return to_device(self._to_reader(device), device)
        return self._version.read_on_device(self._request(self._names, device))

    def _to_reader(self, device: Device | None = None) -> pa.RecordBatchReader:
        """Return a reader in memory of this process. Its batches may go to `device` afterwards."""
        reader = self._read(self._names, device)
        pieces = batches(reader) if self._batch_size is None else _pieces(reader, self._batch_size)
        if self._expressions is not None:
            return _computed(reader.schema, pieces, self._expressions)
        order = positions(reader.schema, self._names)
        if order == [*range(len(reader.schema))] and self._batch_size is None:
            return reader
        pairs = ((piece.select(order), metadata) for piece, metadata in pieces)
        return BatchReader(select_fields(reader.schema, order), pairs)

    def to_batches(self) -> Iterator[Any]:
        """Iterate over the record batches of `to_reader`."""
        return iter(self.to_reader())

    def to_table(self) -> pa.Table:
        """Read the selection as a table."""
        if self._expressions is not None or self._batch_size is not None:
            return self._to_reader().read_all()
        table = self._version.read_table(self._request(self._names, None))
        order = positions(table.schema, self._names)
        return table if order == [*range(len(table.schema))] else table.select(order)

    def head(self, num_rows: int = 10) -> pa.Table:
        """Read the first `num_rows` rows, as a table."""
        return self._limited(num_rows).to_table()

    def take(self, indices: Any) -> pa.Table:
        """Read the rows at these positions, counted from 0, as a table. This reads the whole selection.

        Raises:
            OptionError: The selection has no row at one of the positions.
        """
        table = self.to_table()
        try:
            return table.take(indices)
        except pa.ArrowIndexError:
            requested = indices if isinstance(indices, pa.Array | pa.ChunkedArray) else pa.array(indices)
            outside = next(at for at in requested.to_pylist() if at is not None and not 0 <= at < table.num_rows)
            raise OptionError(
                f"there is no row {outside}: the selection has {plural(table.num_rows, 'row')}, counted from 0"
            ) from None
        except (pa.ArrowNotImplementedError, pa.ArrowTypeError, pa.ArrowInvalid):
            raise OptionError(f"the positions of rows are whole numbers, not {indices!r}") from None

    def count_rows(self) -> int:
        """Return the number of rows of the selection.

        Example:
            ```python
            assert client["flights"].scanner(filter=("dest", "=", "MIA")).count_rows() == 500
            ```
        """
        rows = self._version.info.rows
        if self._filter is None and rows is not None:
            return rows if self._limit is None else min(rows, self._limit)
        return sum(batch.num_rows for batch in self._read([]))

    def __arrow_c_stream__(self, requested_schema: object = None) -> Any:
        return self._to_reader().__arrow_c_stream__(requested_schema)

    def __arrow_c_schema__(self) -> Any:
        return self.projected_schema.__arrow_c_schema__()

    def _limited(self, rows: int) -> Scanner:
        limit = rows if self._limit is None else min(rows, self._limit)
        return Scanner(self._version, self._columns, self._filter, limit, self._batch_size)

    def _read(self, columns: Sequence[str] | None, device: Device | None = None) -> pa.RecordBatchReader:
        return self._version.read(self._request(columns, device))

    def _request(self, columns: Sequence[str] | None, device: Device | None) -> ReadRequest:
        return replace(
            self._version.client.defaults,
            columns=columns,
            filter=self._filter,
            limit=self._limit,
            device=device,
            decompress=device is None or self._decompress,
        )


def _computed(
    columns: pa.Schema, pairs: Iterator[BatchAndMetadata], expressions: dict[str, pc.Expression]
) -> pa.RecordBatchReader:
    """Return a reader that computes expressions of columns of each batch.

    pyarrow's scanner computes the same, but reads its source to the end when it is closed or collected.
    """
    schema = _computed_schema(columns, expressions)
    empty = pa.RecordBatch.from_arrays([pa.nulls(0, type_) for type_ in schema.types], schema=schema)

    def computed() -> Iterator[BatchAndMetadata]:
        for batch, metadata in pairs:
            for at in range(0, batch.num_rows or 1, _COMPUTED_ROWS):
                rows = pa.Table.from_batches([batch.slice(at, _COMPUTED_ROWS)])
                with _column_errors(columns):
                    table = compute_columns(expressions, rows)
                for piece in table.to_batches() or [empty]:
                    yield pa.RecordBatch.from_arrays(piece.columns, schema=schema), metadata

    return BatchReader(schema, computed())


def _computed_schema(schema: pa.Schema, expressions: dict[str, pc.Expression]) -> pa.Schema:
    """Return the schema that pyarrow's scanner gives to the values of expressions of columns of `schema`."""
    with _column_errors(schema):
        return ds.Scanner.from_batches([], schema=schema, columns=expressions).projected_schema


def _pieces(reader: pa.RecordBatchReader, most_rows: int) -> Iterator[BatchAndMetadata]:
    """Yield the rows in batches of at most `most_rows` rows, each with the metadata of its batch."""
    for batch, metadata in batches(reader):
        for at in range(0, batch.num_rows, most_rows):
            yield batch.slice(at, most_rows), metadata


def _checked(expressions: dict[str, Any]) -> dict[str, pc.Expression]:
    """Return the expressions. Raise OptionError if one is not an expression: libarrow would crash on None."""
    for name, expression in expressions.items():
        if not isinstance(name, str) or not isinstance(expression, pc.Expression):
            raise OptionError(f"columns are expressions of pyarrow by name, not {expression!r} by {name!r}")
    return expressions


@contextmanager
def _column_errors(schema: pa.Schema) -> Iterator[None]:
    """Turn libarrow's errors in the computation of columns into ColumnNotFound and OptionError."""
    try:
        yield
    except pa.ArrowException as error:
        message = missing_field(error, schema)
        if message is not None:
            raise ColumnNotFound(message) from None
        why = str(error).partition("\n")[0]
        raise OptionError(f"the columns cannot be computed: {why}") from None
