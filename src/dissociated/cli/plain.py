"""The values of a column as plain ones of Python, for text: none says less than Arrow's own."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.types as types


def plain_values(column: pa.Array) -> list[Any]:
    """None, bool, int, float, str, bytes, and lists and dicts of these; a list may hold the pairs of a map.

    Times, dates, durations and decimals are what libarrow prints: Python's own are shorter of nanoseconds.
    """
    of = column.type
    if isinstance(of, pa.BaseExtensionType):
        return plain_values(column.storage)
    if types.is_dictionary(of):
        return plain_values(column.dictionary_decode())
    if types.is_run_end_encoded(of):
        import pyarrow.compute

        return plain_values(pyarrow.compute.run_end_decode(column))
    if types.is_struct(of):
        columns = [plain_values(one) for one in column.flatten()]
        names = [of.field(index).name for index in range(of.num_fields)]
        return [
            {name: values[row] for name, values in zip(names, columns, strict=True)} if valid else None
            for row, valid in enumerate(column.is_valid().to_pylist())
        ]
    if types.is_map(of):
        return [_pairs(one.values) if one.is_valid else None for one in column]
    if types.is_nested(of) and not types.is_union(of):
        return [plain_values(one.values) if one.is_valid else None for one in column]
    if types.is_union(of):
        return [_plain_scalar(one.value) for one in column]
    if types.is_interval(of):
        return [None if one is None else list(one) for one in column.to_pylist()]
    if types.is_temporal(of) or types.is_decimal(of):
        return list(column.cast(pa.string()).to_pylist())
    return list(column.to_pylist())


def plain_rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """The rows of a batch, whose columns have names that differ."""
    columns = [plain_values(column) for column in batch.columns]
    rows = zip(*columns, strict=True) if columns else [()] * batch.num_rows
    return [dict(zip(batch.schema.names, row, strict=True)) for row in rows]


def _pairs(entries: pa.StructArray) -> list[list[Any]]:
    return [[*pair] for pair in zip(*map(plain_values, entries.flatten()), strict=True)]


def _plain_scalar(value: Any) -> Any:
    return plain_values(pa.array([value], value.type))[0] if value is not None and value.is_valid else None
