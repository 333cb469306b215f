"""The wanted rows of a stream, by an expression of pyarrow or by conditions on columns."""

from __future__ import annotations

import hashlib
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.acero as acero
import pyarrow.compute as pc

from dissociated.base.display import missing_column
from dissociated.codec.columns import select_fields
from dissociated.codec.filter.conditions import Conditions
from dissociated.codec.nesting import contains
from dissociated.errors import ColumnNotFound, DissociatedError, OptionError

#: A filter of users: an expression, or `[column, operator, value]`, a list of these, or a list of such lists, which may
#: be parsed already (`Conditions`).
Filter: TypeAlias = Any
#: The message of libarrow about a column that a schema lacks.
_MISSING = re.compile(r"No match for FieldRef\.Name\((.*)\) in ")


@dataclass(frozen=True)
class RowFilter:
    """A filter of batches with one schema, and the positions of the columns that it reads.

    `types`, if given, are the types to which these columns are cast first, such as timestamps of another zone.
    """

    expression: pc.Expression
    columns: tuple[int, ...]
    types: tuple[pa.DataType, ...] | None = None

    @classmethod
    def bind(cls, filter_: Filter, schema: pa.Schema) -> RowFilter:
        """Return the filter for batches of this schema.

        Raises:
            OptionError: `filter_` is not a filter for the schema.
            ColumnNotFound: The schema lacks a column of the filter.
        """
        if isinstance(filter_, pc.Expression):
            return cls(filter_, _columns(filter_, schema))
        single = isinstance(filter_, list | tuple) and filter_ and isinstance(filter_[0], str)
        parsed = isinstance(filter_, Conditions)
        conditions = filter_ if parsed else Conditions.parse([filter_] if single else filter_)
        columns = tuple(sorted(map(schema.get_field_index, conditions.columns)))
        expression = conditions.expression(schema)
        _try(expression, schema, columns)
        return cls(expression, columns)

    def at_columns(self, columns: Sequence[int]) -> RowFilter:
        """Return the filter for batches that have its columns at these positions."""
        return replace(self, columns=tuple(columns))

    def mask(self, rows: pa.RecordBatch | pa.Table) -> pa.BooleanArray:
        """Return a mask that is true for the rows that pass.

        Raises:
            OptionError: The filter cannot be computed, such as a division by 0.
        """
        selected = rows.select([*self.columns])
        table = pa.Table.from_batches([selected]) if isinstance(rows, pa.RecordBatch) else _combined(selected)
        if not self.columns:  # the filter is constant, and needs a column for its length
            table = pa.table({"": pa.nulls(rows.num_rows)})
        with application_errors(self):
            if self.types and self.types != tuple(table.schema.types):
                table = table.cast(pa.schema([*zip(table.schema.names, self.types, strict=True)]))
            return compute(self.expression, table).combine_chunks()


@contextmanager
def application_errors(rows: RowFilter | None) -> Iterator[None]:
    """Turn libarrow's errors in the application of a filter into OptionError."""
    try:
        yield
    except pa.ArrowException as error:
        if rows is None:
            raise
        text = expression_text(rows.expression)
        raise OptionError(f"the filter {text!r} cannot be applied to these rows: {error}") from None


def expression_text(expression: pc.Expression) -> str:
    """Return the text of an expression; empty if pyarrow cuts a long set of values within a character."""
    try:
        return str(expression)
    except UnicodeDecodeError:
        return ""


def filter_identity(filter_: Filter, schema: pa.Schema) -> str:
    """Return a text that only equal filters of this schema have. Errors are those of `RowFilter.bind`.

    The text of an expression alone is no identity: it leaves out values of a long set.
    """
    expression = RowFilter.bind(filter_, schema).expression
    digest = hashlib.blake2b(pickle.dumps(expression, protocol=5), digest_size=16).hexdigest()
    return f"{expression_text(expression)} ({digest})"


def _combined(table: pa.Table) -> pa.Table:
    """Return the table with one chunk for each column, unless its chunks have dictionaries of their own."""
    if any(contains(type_, pa.types.is_dictionary) for type_ in table.schema.types):
        return table
    return table.combine_chunks()


def compute(expression: pc.Expression, table: pa.Table) -> pa.ChunkedArray:
    """Return the value of an expression for each row. Raises libarrow's errors."""
    return compute_columns({"passes": expression}, table).column(0)


def compute_columns(expressions: Mapping[str, pc.Expression], table: pa.Table) -> pa.Table:
    """Return a column for each expression, with its value for each row. Raises libarrow's errors."""
    steps = [
        acero.Declaration("table_source", acero.TableSourceNodeOptions(table)),
        acero.Declaration("project", acero.ProjectNodeOptions([*expressions.values()], [*expressions])),
    ]
    return acero.Declaration.from_sequence(steps).to_table(use_threads=False)


def _try(expression: pc.Expression, schema: pa.Schema, columns: Sequence[int]) -> None:
    """Raise OptionError or ColumnNotFound if the expression is not a filter of these columns of the schema."""
    try:
        type_ = compute(expression, select_fields(schema, columns).empty_table()).type
    except pa.ArrowException as error:
        why = str(error).partition("\n")[0]
        # libarrow has no class for this error, and pyarrow does not name the columns of an expression.
        if why.startswith("No match for FieldRef"):
            message = missing_field(error, schema, " to filter by")
            if message is not None:
                raise ColumnNotFound(message) from None
            raise ColumnNotFound(
                f"the filter {expression_text(expression)} has a column that does not exist; there are "
                f"{', '.join(schema.names)}"
            ) from None
        raise OptionError(f"{expression_text(expression)} is not a filter of these columns: {why}") from None
    if type_ != pa.bool_():
        raise OptionError(f"{expression_text(expression)} is not a filter: its type is {type_} instead of bool")


def missing_field(error: pa.ArrowException, schema: pa.Schema, purpose: str = "") -> str | None:
    """Return the message for a column that `schema` lacks and an expression names; None for any other error."""
    named = _MISSING.match(str(error).partition("\n")[0])
    return None if named is None or named[1] in schema.names else missing_column(named[1], schema.names, purpose)


def _columns(expression: pc.Expression, schema: pa.Schema) -> tuple[int, ...]:
    """Return the positions of the columns that an expression reads, and perhaps of some that it does not.

    pyarrow only offers the text of an expression. If the text contains the name of another column, then that column is
    read, too. If the expression refers to columns by position, all columns are returned. Raises the errors of `_try`.
    """
    text = expression_text(expression)
    unknown = not text or "FieldPath" in text
    named = [index for index, name in enumerate(schema.names) if name in text or unknown]
    try:
        _try(expression, schema, named)
    except DissociatedError:
        if "FieldPath" in text:
            raise
        named = [index for index in named if _computable(schema.field(index))]
        _try(expression, schema, named)
    return tuple(named)


def _computable(field: pa.Field) -> bool:
    """Return whether libarrow computes expressions on batches with this column: not with unions."""
    try:
        compute(pc.scalar(True), pa.schema([field]).empty_table())
    except pa.ArrowException:
        return False
    return True
