"""Which rows of a stream are wanted: by an expression of pyarrow, or by conditions on columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.acero as acero
import pyarrow.compute as pc

from dissociated.codec.columns import select_fields
from dissociated.codec.conditions import Conditions
from dissociated.errors import ColumnNotFound, DissociatedError, OptionError

#: What users say: an expression, or `[column, operator, value]`, a list of these, or a list of such lists.
Filter: TypeAlias = Any


@dataclass(frozen=True)
class RowFilter:
    """A filter of batches with one schema, and the positions there of the columns that it looks at."""

    expression: pc.Expression
    columns: tuple[int, ...]

    @classmethod
    def bind(cls, wanted: Filter, schema: pa.Schema) -> RowFilter:
        """What `wanted` is for batches of this schema.

        Raises OptionError for what is no filter of these, and ColumnNotFound.
        """
        if isinstance(wanted, pc.Expression):
            _try(wanted, schema)
            return cls(wanted, _columns(wanted, schema))
        single = isinstance(wanted, list | tuple) and wanted and isinstance(wanted[0], str)
        conditions = Conditions.parse([wanted] if single else wanted)
        expression = conditions.expression(schema)
        _try(expression, schema)
        return cls(expression, tuple(sorted(map(schema.get_field_index, conditions.columns))))

    def mask(self, batch: pa.RecordBatch) -> pa.BooleanArray:
        """True for the rows that pass. Raises OptionError where that cannot be computed, as a quotient by 0."""
        looked_at = pa.Table.from_batches([batch.select([*self.columns])])
        if not self.columns:  # the same for each row
            looked_at = pa.table({"": pa.nulls(batch.num_rows)})
        try:
            return _compute(self.expression, looked_at).combine_chunks()
        except pa.ArrowException as error:
            raise OptionError(f"the filter {self.expression} cannot be applied to these rows: {error}") from None


def _compute(expression: pc.Expression, table: pa.Table) -> pa.ChunkedArray:
    steps = [
        acero.Declaration("table_source", acero.TableSourceNodeOptions(table)),
        acero.Declaration("project", acero.ProjectNodeOptions([expression], ["passes"])),
    ]
    return acero.Declaration.from_sequence(steps).to_table(use_threads=False).column(0)


def _try(expression: pc.Expression, schema: pa.Schema) -> None:
    """Raise OptionError or ColumnNotFound where the expression is no filter of such batches."""
    try:
        type_ = _compute(expression, schema.empty_table()).type
    except pa.ArrowException as error:
        why = str(error).partition("\n")[0]
        if why.startswith("No match for FieldRef"):
            raise ColumnNotFound(
                f"the filter {expression} has a column that is not there; there are {', '.join(schema.names)}"
            ) from None
        raise OptionError(f"{expression} is no filter of these columns: {why}") from None
    if type_ != pa.bool_():
        raise OptionError(f"{expression} is no filter: it gives {type_}, not true or false")


def _columns(expression: pc.Expression, schema: pa.Schema) -> tuple[int, ...]:
    """The columns that an expression looks at, or more: it can be asked for its text alone.

    A name in it that is no column costs reading that column. Where a column is told by its position, all are taken.
    """
    text = str(expression)
    named = [index for index, name in enumerate(schema.names) if name in text]
    if "FieldPath" not in text:
        try:
            _try(expression, select_fields(schema, named))
            return tuple(named)
        except DissociatedError:
            pass
    return tuple(range(len(schema)))
