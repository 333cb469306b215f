"""Datasets as DataFrames of Dask. Needs `pip install 'dissociated[dask]'`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from dissociated.adapters import identity, imported
from dissociated.client.dataset import DatasetHandle
from dissociated.client.partitions import PARTITION_BYTES, Partition, partitions, selected_schema
from dissociated.codec.columns import without_views
from dissociated.errors import OptionError

if TYPE_CHECKING:
    import dask.dataframe as dd
    import pandas as pd


def read_dissociated(
    dataset: DatasetHandle,
    *,
    columns: Sequence[str] | None = None,
    filter: Any = None,
    partition_bytes: int = PARTITION_BYTES,
) -> dd.DataFrame:
    """Return a DataFrame of Dask over a version of a dataset. Each task reads its partition by itself.

    Dask pushes the selection of columns down to the server, but not its own filters: give `filter`. Columns have the
    types of Arrow (`pandas.ArrowDtype`), so partitions with and without nulls have the same type. The columns
    of an index that was published with a DataFrame of pandas are ordinary columns. Views, which a DataFrame of Polars
    has, become large strings and binaries. Dask cannot hold views within other types, unions, and run-end encoded
    values: such columns are refused. Tasks contain the token of the dataset's client.

    Args:
        dataset: The version.
        columns: The columns to read, in this order; None for all.
        filter: See `Client.read`.
        partition_bytes: The approximate size of a partition of all columns, before the filter.

    Raises:
        OptionError: Dask is not installed or cannot hold a column, or the filter is invalid.
        ColumnNotFound: A column does not exist.
        WrongKind: The dataset holds tensors.

    Example:
        ```python
        from dissociated.adapters.dask import read_dissociated

        flights = read_dissociated(client["flights"], filter=("distance", ">", 1000))
        means = flights.groupby("dest")["distance"].mean().compute()
        ```
    """
    dataframe = imported("dask.dataframe", "dask")
    # Dask would look for the files of a dataset of pyarrow, which a handle is, too.
    imported("dask.base", "dask").normalize_token.register(DatasetHandle, identity)
    planned = partitions(dataset, columns, filter, partition_bytes)
    schema = selected_schema(dataset.schema, columns)
    _check(schema)
    empty = _frame(schema.empty_table())
    frame: dd.DataFrame
    if planned:
        # Dask replaces `columns` by those that its plan needs.
        frame = dataframe.from_map(_read, planned, columns=schema.names, filter=filter, meta=empty, label="dissociated")
    else:
        frame = dataframe.from_pandas(empty, npartitions=1)
    return frame


def _read(partition: Partition, columns: Sequence[str], filter: Any) -> pd.DataFrame:
    """In a task: read a partition."""
    return _frame(partition.read_table(columns, filter))


def _check(schema: pa.Schema) -> None:
    """Raise an OptionError if Dask cannot hold the columns."""
    make_meta = imported("dask.dataframe.dispatch", "dask").make_meta
    for field in schema:
        try:
            make_meta(_frame(pa.schema([field]).empty_table()))
        except NotImplementedError:
            raise OptionError(
                f"Dask does not hold {field.type}, as of {field.name!r}: give columns without it"
            ) from None


def _frame(table: pa.Table) -> pd.DataFrame:
    import pandas as pd

    for at, column in enumerate(table.columns):
        if (type_ := without_views(column.type)) != column.type:  # of which Dask takes no rows
            table = table.set_column(at, table.field(at).name, column.cast(type_))
    # The metadata of pandas names columns of the index, which a plan may leave out, and Dask expects no other index.
    return table.to_pandas(types_mapper=pd.ArrowDtype, ignore_metadata=True)
