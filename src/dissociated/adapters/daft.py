"""Datasets as DataFrames of Daft. Needs `pip install 'dissociated[daft]'`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from dissociated.adapters import imported
from dissociated.client.partitions import PARTITION_BYTES, Partition, partitions, selected_schema
from dissociated.codec.columns import without_views
from dissociated.codec.nesting import inner_types, is_extension
from dissociated.errors import OptionError

if TYPE_CHECKING:
    import daft

    from dissociated.client.dataset import DatasetHandle


def read_dissociated(
    dataset: DatasetHandle,
    *,
    columns: Sequence[str] | None = None,
    filter: Any = None,
    partition_bytes: int = PARTITION_BYTES,
) -> daft.DataFrame:
    """Return a DataFrame of Daft over a version of a dataset. Each task reads its partition by itself.

    Daft pushes the selection of columns down to the server, but not its own filters: give `filter`. Tasks contain the
    token of the dataset's client.

    Columns of dictionaries and views get the types of their values, because Daft would treat each value as a Python
    object. It does so with columns of some further types, such as half floats and unions. Daft cannot hold these types
    within lists, structs and maps, nor empty structs, nor extension types other than tensors of a fixed shape and its
    own. Such columns are refused, and so are dictionaries of views or of nested values, and names that several columns
    share.

    Args:
        dataset: The version.
        columns: The columns to read, in this order; None for all.
        filter: See `Client.read`.
        partition_bytes: The approximate size of a partition of all columns, before the filter.

    Raises:
        OptionError: Daft is not installed or cannot hold a column, no column is selected, or the filter is invalid.
        ColumnNotFound: A column does not exist.
        WrongKind: The dataset holds tensors.

    Example:
        ```python
        from dissociated.adapters.daft import read_dissociated

        flights = read_dissociated(client["flights"], filter=("distance", ">", 1000))
        means = flights.groupby("dest").agg(flights["distance"].mean()).collect()
        ```
    """
    daft = imported("daft", "daft")
    planned = partitions(dataset, columns, filter, partition_bytes)
    selected = _plain(selected_schema(dataset.schema, columns))
    _check(selected)

    class Source(daft.io.source.DataSource):  # type: ignore[misc, name-defined]
        name = "dissociated"
        schema = daft.Schema.from_pyarrow_schema(selected)

        def get_tasks(self, pushdowns: Any) -> Iterator[_Task]:
            needed = selected.names
            if pushdowns.columns is not None:
                # Daft filters the rows of a task by columns that the result need not have.
                try:
                    read = {*pushdowns.columns, *pushdowns.filter_required_column_names()}
                except ValueError:  # Daft does not know the columns of functions, such as a field of a struct.
                    read = {*needed}
                # Without a column, Daft would count no rows.
                needed = [name for name in needed if name in read] or [min(selected, key=_width).name]
            return (_Task(partition, needed, filter, selected) for partition in planned)

    return Source().read()


@dataclass(frozen=True)
class _Task:
    """A task of Daft, which reads a partition."""

    partition: Partition
    columns: Sequence[str]
    filter: Any
    selected: pa.Schema

    @property
    def schema(self) -> Any:
        import daft

        return daft.Schema.from_pyarrow_schema(self.selected)

    def get_micro_partitions(self) -> Iterator[Any]:
        from daft.recordbatch import MicroPartition

        rows = self.partition.read_table(self.columns, self.filter)
        yield MicroPartition.from_arrow(rows.cast(_plain(rows.schema)))


def _width(field: pa.Field) -> float:
    """Return the bits of a value; infinity if values differ in length."""
    try:
        return float(field.type.bit_width)
    except ValueError:
        return math.inf


def _plain(schema: pa.Schema) -> pa.Schema:
    """Return the schema with the types of the values in place of dictionaries and views."""
    for index, field in enumerate(schema):
        type_ = field.type
        if pa.types.is_dictionary(type_):
            values = type_.value_type
            type_ = type_ if pa.types.is_nested(values) or _is_view(values) else values  # Arrow casts no others.
        schema = schema.set(index, field.with_type(without_views(type_)))
    return schema


def _is_view(type_: pa.DataType) -> bool:
    return bool(pa.types.is_string_view(type_) or pa.types.is_binary_view(type_))


def _check(schema: pa.Schema) -> None:
    """Raise an OptionError if Daft cannot hold the columns: its own errors would come from the tasks, or not at all."""
    if not schema.names:
        raise OptionError("a DataFrame of Daft has the rows of its columns, and no column is selected: give columns")
    for field in schema:
        if schema.names.count(field.name) > 1:
            raise OptionError(f"Daft has no two columns of one name, such as {field.name!r}: give columns without it")
        if not _holds(field.type):
            raise OptionError(f"Daft does not hold {field.type}, as of {field.name!r}: give columns without it")


def _holds(type_: pa.DataType, inside: bool = False) -> bool:
    """Return whether Daft holds such values, which are `inside` of others or a column."""
    from daft import DataType

    if is_extension(type_):
        tensor = isinstance(type_, pa.FixedShapeTensorType) or type_.extension_name == "daft.super_extension"
        return tensor and not inside
    if pa.types.is_dictionary(type_):  # `_plain` could not convert it.
        return False
    if DataType.from_arrow_type(type_).is_python():  # Each value of a column becomes an object of Python.
        return not inside
    inner = inner_types(type_)
    return bool(inner or not pa.types.is_struct(type_)) and all(_holds(each, inside=True) for each in inner)
