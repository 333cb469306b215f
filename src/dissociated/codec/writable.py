"""Record batches with empty arrays in them, as libarrow can write them.

Two kinds of arrays without values are valid, and libarrow's writer breaks on them. A slice that came by the Arrow C
interface has buffers of no bytes and an offset: it would write lengths below zero. A union that was read from IPC has
no buffer of type codes: compressing it ends the process. Either may lie within other arrays.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.types as types

from dissociated.codec.nesting import contains, has_children, is_extension

#: How many buffers lists have beside those of their values.
_OWN_BUFFERS = (
    (types.is_fixed_size_list, 1),
    (types.is_list, 2),
    (types.is_large_list, 2),
    (types.is_list_view, 3),
    (types.is_large_list_view, 3),
)


class Writable:
    """Makes batches of one schema so that libarrow can write them: the same values and dictionaries."""

    def __init__(self, schema: pa.Schema) -> None:
        self._outer = [number for number, field in enumerate(schema) if has_children(field.type)]

    def empty(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """One that has no rows, and may be invalid: libarrow calls empty slices of views so."""
        columns = {number: _empty(column) for number, column in enumerate(batch.columns) if _is_broken(column)}
        return _replaced(batch, columns)

    def valid(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """One that is valid. Raises ArrowException where that cannot be made."""
        broken = [number for number in self._outer if _is_broken(batch.column(number))]
        return _replaced(batch, {number: _mended(batch.column(number)) for number in broken})


def _empty(array: pa.Array) -> pa.Array:
    type_ = array.type
    if isinstance(type_, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(type_, _empty(array.storage))
    if types.is_dictionary(type_):
        return pa.DictionaryArray.from_arrays(pa.nulls(0, type_.index_type), array.dictionary, ordered=type_.ordered)
    if contains(type_, is_extension):
        return array  # libarrow makes some that end the process
    return pa.nulls(0, type_)  # a dictionary further within is sent anew with the next batch that has it


def _mended(array: pa.Array) -> pa.Array:
    """The same with empty arrays made anew, within lists and structs. Raises ArrowException elsewhere."""
    type_ = array.type
    if not _is_broken(array):
        return array
    if len(array) == 0 and not contains(type_, is_extension):
        return _empty(array)
    if isinstance(type_, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(type_, _mended(array.storage))
    for is_list, count in _OWN_BUFFERS:
        if is_list(type_):
            own = array.buffers()[:count]
            return pa.Array.from_buffers(type_, len(array), own, -1, array.offset, [_mended(array.values)])
    if types.is_struct(type_) and not array.offset:
        fields = [_mended(array.field(number)) for number in range(type_.num_fields)]
        return pa.Array.from_buffers(type_, len(array), array.buffers()[:1], -1, 0, fields)
    return pa.concat_arrays([array])


def _is_broken(array: pa.Array) -> bool:
    if isinstance(array, pa.ExtensionArray):
        return _is_broken(array.storage)
    if len(array) == 0 and types.is_union(array.type) and array.buffers()[1] is None:
        return True
    if len(array) == 0 and array.offset and not array.type.num_fields:
        return any(buffer is not None and not buffer.size for buffer in array.buffers()[1:])
    return any(map(_is_broken, _children(array)))


def _children(array: pa.Array) -> Iterator[pa.Array]:
    type_ = array.type
    if types.is_dictionary(type_):
        yield array.dictionary
    elif types.is_struct(type_) or types.is_union(type_):
        for number in range(type_.num_fields):
            yield array.field(number)
    elif type_.num_fields:
        yield array.values


def _replaced(batch: pa.RecordBatch, columns: dict[int, pa.Array]) -> pa.RecordBatch:
    if not columns:
        return batch
    all_columns = [columns.get(number, column) for number, column in enumerate(batch.columns)]
    return pa.RecordBatch.from_arrays(all_columns, schema=batch.schema)
