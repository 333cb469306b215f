"""Arrays as their layout alone: the same buffers under a type that takes every value.

libarrow's full validation refuses what can harm (offsets, sizes, indices that lead elsewhere) and what is merely no
good value of its type: a date64 within a day, text that is no UTF-8, a decimal with too many digits. Of an array as its
layout alone it refuses only the first.
"""

from __future__ import annotations

import pyarrow as pa

from dissociated.codec.nesting import contains

_STORED_AS = {
    pa.string(): pa.binary(),
    pa.large_string(): pa.large_binary(),
    pa.string_view(): pa.binary_view(),
    pa.date64(): pa.int64(),
    **{pa.time32(unit): pa.int32() for unit in ("s", "ms")},
    **{pa.time64(unit): pa.int64() for unit in ("us", "ns")},
}
_LISTS = (
    (pa.types.is_list, pa.list_),
    (pa.types.is_large_list, pa.large_list),
    (pa.types.is_list_view, pa.list_view),
    (pa.types.is_large_list_view, pa.large_list_view),
)


class Layouts:
    """Validates the record batches of a schema as their layouts alone."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        types = {number: layout(field.type) for number, field in enumerate(schema)}
        self._types = {number: type_ for number, type_ in types.items() if type_ != schema.field(number).type}
        self._others = [number for number in types if number not in self._types]

    def validate(self, batch: pa.RecordBatch) -> None:
        """Raise ArrowException where offsets, sizes or indices, at whatever depth, lead elsewhere."""
        batch.validate()  # what looks at the rest trusts what this looks at
        if not self._types or not batch.schema.equals(self._schema):
            batch.validate(full=True)
            return
        batch.select(self._others).validate(full=True)  # as a whole, since pyarrow has no arrays of some of their types
        for number, type_ in self._types.items():
            column = batch.column(number)
            try:
                _seen_as(column, type_).validate(full=True)
            except pa.ArrowException:  # libarrow's view of some slices of structs has children that are too short
                column.validate(full=True)


def layout(type_: pa.DataType) -> pa.DataType:
    """The type of the same layout that takes every value; the same where there are runs within lists or the like."""
    if isinstance(type_, pa.BaseExtensionType):
        return layout(type_.storage_type)
    if type_ in _STORED_AS:
        return _STORED_AS[type_]
    if pa.types.is_decimal(type_):
        return pa.binary(type_.byte_width)
    if pa.types.is_run_end_encoded(type_):
        return pa.run_end_encoded(type_.run_end_type, layout(type_.value_type))
    return type_ if contains(type_, pa.types.is_run_end_encoded) else _nested(type_)


def _nested(type_: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(type_):
        return pa.dictionary(type_.index_type, layout(type_.value_type), type_.ordered)
    # Fields that may have nulls: libarrow would take none for those that may not, though they may have some.
    fields = [
        pa.field(_name(type_.field(number)), layout(type_.field(number).type)) for number in range(type_.num_fields)
    ]
    for is_list, list_of in _LISTS:
        if is_list(type_):
            return list_of(fields[0])
    if pa.types.is_fixed_size_list(type_):
        return pa.list_(fields[0], type_.list_size)
    if pa.types.is_map(type_):
        return pa.list_(fields[0])
    if pa.types.is_struct(type_):
        return pa.struct(fields)
    if pa.types.is_union(type_):
        return pa.union(fields, type_.mode, type_.type_codes)
    return type_


def _name(field: pa.Field) -> str:
    """The field's own, so that a type that is its own layout stays so. Damaged, it is no text."""
    try:
        return str(field.name)
    except UnicodeDecodeError:
        return ""


def _seen_as(array: pa.Array, type_: pa.DataType) -> pa.Array:
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if not pa.types.is_run_end_encoded(type_):
        try:
            return array.view(type_)
        except (
            pa.ArrowException
        ):  # of an extension type over a dictionary within another: it is looked at by its values
            return array
    # libarrow's view of runs forgets where a slice begins.
    values = array.values if array.values.type == type_.value_type else _seen_as(array.values, type_.value_type)
    return pa.RunEndEncodedArray.from_buffers(type_, len(array), [None], 0, array.offset, [array.run_ends, values])
