"""Conversion of the batches of a DataFrame to the schema of the dataset that receives them.

A version of a dataset has one schema, with which each of its segments begins. So appended rows are converted to the
schema of the dataset, matched by column name. A conversion that would lose information is refused before any task runs,
and the error names the columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.types as types

from dissociated.errors import DatasetNotFound, SourceError
from dissociated.spark.columns import misplaced_null
from dissociated.spark.types import conform, is_alike, kept_type, same_layout

if TYPE_CHECKING:
    from dissociated.spark.target import WriteTarget

_MAX_NAMED = 5  # differences that an error lists
_DIGITS = {pa.int8(): 3, pa.int16(): 5, pa.int32(): 10, pa.int64(): 19}
_WIDER: dict[pa.DataType, tuple[pa.DataType, ...]] = {
    pa.int8(): (pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64()),
    pa.int16(): (pa.int32(), pa.int64(), pa.float32(), pa.float64()),
    pa.int32(): (pa.int64(), pa.float64()),
    pa.float32(): (pa.float64(),),
    pa.date32(): (pa.timestamp("us"),),
}
_ANOTHER_LAYOUT = {
    pa.string(): (pa.large_string(), pa.string_view()),
    pa.binary(): (pa.large_binary(), pa.binary_view()),
}


@dataclass(frozen=True)
class Fitting:
    """A conversion of the batches of a DataFrame to the `schema` of the dataset `name`.

    `sources` has for each column of the dataset the index of the column in the DataFrame, or None for a column of
    nulls. `without_nulls` has the indices of the dataset's columns that forbid nulls which the DataFrame may have:
    `conform` checks these.
    """

    name: str
    schema: pa.Schema
    sources: tuple[int | None, ...]
    without_nulls: tuple[int, ...] = ()

    @classmethod
    def of(cls, frame: pa.Schema, target: WriteTarget) -> Fitting:
        """Plan the conversion for a DataFrame with the schema `frame`.

        Appended rows take the schema of the existing dataset. A DataFrame that replaces or creates a dataset takes the
        schema of the target's commit, or else keeps its own.

        Raises:
            CatalogError: The catalog cannot be reached.
            SourceError: The rows cannot be appended. The message names the columns and types.
        """
        name, append = target.commit.name, target.commit.append
        if repeated := [column for column in dict.fromkeys(frame.names) if frame.names.count(column) > 1]:
            raise SourceError(
                f"there is more than one column {repeated[0]!r}, and readers ask for columns by name: rename it"
            )
        with target.catalog.connect() as client:
            client.nodes()  # fails early if the catalog cannot be reached
            existing = frame if target.commit.schema is None else target.commit.schema
            with suppress(DatasetNotFound):
                existing = client.describe(name).schema if append else existing
        if differences := [*_differences(frame, existing, target.merge_schema)]:
            more = [] if len(differences) <= _MAX_NAMED else [f"and {len(differences) - _MAX_NAMED} more"]
            raise SourceError(
                f"the DataFrame cannot {'be appended to' if append else 'replace'} {name!r}: "
                f"{'; '.join(differences[:_MAX_NAMED] + more)}"
            )
        sources = tuple(frame.names.index(column) if column in frame.names else None for column in existing.names)
        stricter = tuple(
            number
            for number, source in enumerate(sources)
            if source is not None and _is_stricter(existing.field(number), frame.field(source))
        )
        return cls(name, existing, sources, stricter)

    def is_identity(self, frame: pa.Schema) -> bool:
        """Return whether the DataFrame's values have the dataset's columns and layout in memory already."""
        return (
            self.sources == (*range(len(frame)),)
            and not self.without_nulls
            and all(map(same_layout, frame.types, self.schema.types))
        )

    def conform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows of a batch of the DataFrame in the schema of the dataset, without a copy if no type differs.

        Raises:
            SourceError: A column has a null that the dataset forbids, or a value does not fit. A null's column is
                named.
        """
        if not self.sources:
            return batch
        columns = [
            pa.nulls(batch.num_rows, field.type) if source is None else batch.column(source)
            for field, source in zip(self.schema, self.sources, strict=True)
        ]
        for number in self.without_nulls:
            if (path := misplaced_null(columns[number], self.schema.field(number))) is not None:
                raise SourceError(
                    f"column {path!r} is null in a row that is written to {self.name!r}, where it must not be null: "
                    "filter such rows, fill them, or write the dataset anew"
                )
        try:
            return conform(pa.RecordBatch.from_arrays(columns, self.schema.names), self.schema)
        except pa.ArrowException as error:
            raise SourceError(f"a value does not fit into {self.name!r}: {error}") from None


def _differences(frame: pa.Schema, existing: pa.Schema, merge: bool) -> Iterator[str]:
    """Describe each difference that prevents appending the DataFrame, in words for the user."""
    for name in dict.fromkeys(existing.names):
        if existing.names.count(name) > 1:
            yield f"the dataset has more than one column {name!r}"
        elif name not in frame.names:
            if not existing.field(name).nullable:
                yield f"there is no column {name!r}, which the dataset does not allow to be null: add it"
            elif not merge:
                yield f'there is no column {name!r}: add it, or let .option("mergeSchema", "true") fill it with nulls'
        elif difference := _difference(frame.field(name), existing.field(name), merge):
            yield difference
    for name in frame.names:
        if name not in existing.names:
            yield (
                f"the dataset has no column {name!r}, and its columns stay as they are: drop it, or write the dataset "
                "anew, overwriting it with read(...).unionByName(df, allowMissingColumns=True)"
            )


def _difference(added: pa.Field, existing: pa.Field, merge: bool) -> str | None:
    from pyspark.sql.types import CharType, VarcharType, YearMonthIntervalType, _has_type

    added_type, dataset_type = kept_type(added), kept_type(existing)
    # Without a type of its own, the dataset would keep months as numbers. It holds all other kinds of values, such as
    # text of a limited length.
    is_months = added_type is not None and _has_type(added_type, YearMonthIntervalType)
    is_kept = not is_months if dataset_type is None else dataset_type == added_type
    if _fits(added.type, existing.type, merge) and is_kept:
        return None
    advice = "cast it"
    if not merge and _fits(added.type, existing.type, True):
        advice += ', or let .option("mergeSchema", "true") widen it'
    if dataset_type is not None and _has_type(dataset_type, (CharType, VarcharType)):
        advice = "append it by DataFrame.writeTo, in a stream within foreachBatch, so that Spark checks its length"
    described = added.type if added_type is None else added_type.simpleString()
    expected = existing.type if dataset_type is None else dataset_type.simpleString()
    return f"column {added.name!r} is {described}, not {expected}: {advice}"


def _fits(added: pa.DataType, existing: pa.DataType, widen: bool) -> bool:
    """Return whether the type `existing` can hold every value of the type `added`.

    Args:
        added: The type of the DataFrame's column.
        existing: The type of the dataset's column.
        widen: Whether `existing` may be a wider type, such as int64 for int32.
    """

    def holds(added: pa.DataType, existing: pa.DataType) -> bool:
        if added.equals(existing) or existing in _ANOTHER_LAYOUT.get(added, ()):
            return True
        if not widen:
            return False
        if types.is_decimal128(existing) and (added in _DIGITS or types.is_decimal128(added)):
            digits, scale = (_DIGITS[added], 0) if added in _DIGITS else (added.precision - added.scale, added.scale)
            return bool(existing.precision - existing.scale >= digits and existing.scale >= scale)
        return types.is_null(added) or existing in _WIDER.get(added, ())

    return is_alike(added, existing, holds)


def _is_stricter(existing: pa.Field, added: pa.Field) -> bool:
    """Return whether `existing` forbids nulls that `added` may have, at any depth."""
    if added.nullable and not existing.nullable:
        return True
    return types.is_nested(existing.type) and any(
        _is_stricter(existing.type.field(index), added.type.field(index)) for index in range(existing.type.num_fields)
    )
