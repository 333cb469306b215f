"""Validation of record batches before libarrow writes them, and repair of empty arrays that it cannot write.

libarrow's full validation refuses harmful data (offsets, sizes and indices out of range) and also values that are
invalid for their type: a date64 within a day, text that is not UTF-8, a decimal with too many digits. If the same
buffers are validated under a type of equal layout that accepts every value, then only harmful data is refused.

Two kinds of arrays without values are valid, but libarrow's writer fails on them. A slice that came by the Arrow C
interface has empty buffers and an offset: libarrow would write negative lengths. A union that was read from IPC has no
buffer of type codes: compressing it ends the process. Either may be nested in other arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TypeVar

import pyarrow as pa

from dissociated.codec.nesting import contains, has_children, is_extension
from dissociated.errors import SourceError

T = TypeVar("T")

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
#: Number of buffers of lists without those of their values.
_OWN_BUFFERS = (
    (pa.types.is_fixed_size_list, 1),
    (pa.types.is_list, 2),
    (pa.types.is_map, 2),
    (pa.types.is_large_list, 2),
    (pa.types.is_list_view, 3),
    (pa.types.is_large_list_view, 3),
)


class Validator:
    """A check of the record batches of a schema, which refuses batches on which libarrow would abort, or worse.

    `check` inspects lengths and offsets. With `full`, it inspects all offsets and indices, which takes as long as
    reading them. Slices of columns with children are always inspected in full: libarrow cuts the children by offsets
    that no cheaper check inspects. A value that is merely invalid for its type, such as text that is not UTF-8, does no
    harm here; its consumer must check it.
    """

    def __init__(self, schema: pa.Schema) -> None:
        self._columns = len(schema)
        self._nested = [index for index, field in enumerate(schema) if has_children(field.type)]
        self._layouts = _Layouts(schema)

    def check(self, batch: pa.RecordBatch, full: bool = False) -> pa.RecordBatch:
        """Return the batch as it must be written. Raises SourceError if it is not valid: see the class."""
        alike = batch.num_columns == self._columns  # otherwise libarrow raises
        try:
            if not batch.num_rows and alike:
                # libarrow's validation rejects some zero-length slices of view arrays.
                broken = {number: column for number, column in enumerate(batch.columns) if _is_broken(column)}
                batch = _replace_columns(batch, {number: _empty(column) for number, column in broken.items()})
            if self._nested and alike and not full:
                full = any(batch.column(index).offset for index in self._nested)
            validate_shared(partial(self._layouts.validate, batch) if full else batch.validate)
            return self._mended(batch) if self._nested and alike else batch
        except pa.ArrowException as error:
            raise SourceError(f"a record batch is not valid: {error}") from None

    def _mended(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Repair a valid batch so that libarrow can write it. Raises ArrowException if that is impossible."""
        broken = [number for number in self._nested if _is_broken(batch.column(number))]
        return _replace_columns(batch, {number: _mend(batch.column(number)) for number in broken})

    def check_values(self, batch: pa.RecordBatch) -> None:
        """Raise SourceError also for a value that is not valid for its type, since another format would change it."""
        try:
            validate_shared(partial(batch.validate, full=True))
        except pa.ArrowException as error:
            raise SourceError(f"a record batch is not valid: {error}") from None


def validate_shared(validate: Callable[[], None]) -> None:
    """Call `validate` for arrays that other threads may use meanwhile. Raise its error only if it comes twice in a row.

    libarrow reads a null count twice. If another thread computes it in between, libarrow takes it for negative. That
    happens once for each array, and the error has no class of its own. A damaged array fails again with the same error.
    """
    last_message = ""
    while True:
        try:
            validate()
            return
        except pa.ArrowInvalid as error:
            if str(error) == last_message:
                raise
            last_message = str(error)


class OnceValidator:
    """A validator that remembers how many batches of a stream it has validated in full, to do so once for each."""

    def __init__(self) -> None:
        self._batches = 0

    def check(self, schema: pa.Schema, pairs: Iterable[tuple[pa.RecordBatch, T]]) -> Iterator[tuple[pa.RecordBatch, T]]:
        """Yield the batches of the stream, from its first on. Raises SourceError if one is not valid."""
        validator = Validator(schema)
        for number, (batch, metadata) in enumerate(pairs):
            checked = validator.check(batch, full=number >= self._batches)
            self._batches = max(self._batches, number + 1)
            yield checked, metadata


def _empty(array: pa.Array) -> pa.Array:
    type_ = array.type
    if isinstance(type_, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(type_, _empty(array.storage))
    if pa.types.is_dictionary(type_):
        return pa.DictionaryArray.from_arrays(pa.nulls(0, type_.index_type), array.dictionary, ordered=type_.ordered)
    if contains(type_, is_extension):
        return array  # libarrow makes some that end the process
    if contains(type_, pa.types.is_run_end_encoded):
        return _empty_with_runs(array)
    return pa.nulls(0, type_)  # a dictionary further within is sent anew with the next batch that has it


def _empty_with_runs(array: pa.Array) -> pa.Array:
    """Return an empty array of a type with runs: libarrow makes an invalid one if a union is around them."""
    type_ = array.type
    if pa.types.is_run_end_encoded(type_):
        return pa.RunEndEncodedArray.from_arrays(pa.nulls(0, type_.run_end_type), _empty(array.values.slice(0, 0)))
    own = next((count for is_list, count in _OWN_BUFFERS if is_list(type_)), 1)
    if pa.types.is_union(type_):
        own = 3 if type_.mode == "dense" else 2
    zeros = [pa.py_buffer(bytes(8))] * (own - 1)  # the one offset of a list; no type codes
    children = [_empty(child.slice(0, 0)) for child in _children(array)]
    return pa.Array.from_buffers(type_, 0, [None, *zeros], 0, 0, children)


def _mend(array: pa.Array) -> pa.Array:
    """Make empty arrays within lists and structs anew. Raises ArrowException if they are within other arrays."""
    type_ = array.type
    if not _is_broken(array):
        return array
    if len(array) == 0 and not contains(type_, is_extension):
        return _empty(array)
    if isinstance(type_, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(type_, _mend(array.storage))
    for is_list, count in _OWN_BUFFERS:
        if is_list(type_):
            own = array.buffers()[:count]
            return pa.Array.from_buffers(type_, len(array), own, -1, array.offset, [_mend(array.values)])
    if pa.types.is_struct(type_) and not array.offset:
        fields = [_mend(array.field(number)) for number in range(type_.num_fields)]
        return pa.Array.from_buffers(type_, len(array), array.buffers()[:1], -1, 0, fields)
    return pa.concat_arrays([array])


def _is_broken(array: pa.Array) -> bool:
    if isinstance(array, pa.ExtensionArray):
        return _is_broken(array.storage)
    if len(array) == 0 and pa.types.is_union(array.type) and array.buffers()[1] is None:
        return True
    if len(array) == 0 and array.offset and not array.type.num_fields:
        return any(buffer is not None and not buffer.size for buffer in array.buffers()[1:])
    return any(map(_is_broken, _children(array)))


def _children(array: pa.Array) -> Iterator[pa.Array]:
    type_ = array.type
    if pa.types.is_dictionary(type_):
        yield array.dictionary
    elif pa.types.is_struct(type_) or pa.types.is_union(type_):
        for number in range(type_.num_fields):
            yield array.field(number)
    elif type_.num_fields:
        yield array.values


def _replace_columns(batch: pa.RecordBatch, columns: dict[int, pa.Array]) -> pa.RecordBatch:
    if not columns:
        return batch
    all_columns = [columns.get(number, column) for number, column in enumerate(batch.columns)]
    return pa.RecordBatch.from_arrays(all_columns, schema=batch.schema)


class _Layouts:
    """A full validation of record batches of a schema that ignores whether values are valid for their types."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        types = {number: _layout(field.type) for number, field in enumerate(schema)}
        self._types = {number: type_ for number, type_ in types.items() if type_ != schema.field(number).type}
        self._directly = [number for number in types if number not in self._types]

    def validate(self, batch: pa.RecordBatch) -> None:
        """Raise ArrowException if offsets, sizes or indices are out of range, at any depth."""
        batch.validate()  # first: the full validation relies on these checks
        if not self._types or not batch.schema.equals(self._schema):
            batch.validate(full=True)
            return
        # All at once in a batch: pyarrow has no array classes for some of these types.
        batch.select(self._directly).validate(full=True)
        for number, type_ in self._types.items():
            column = batch.column(number)
            try:
                _view_as(column, type_).validate(full=True)
            except pa.ArrowException:  # libarrow's view of some slices of structs has children that are too short
                column.validate(full=True)


def _layout(type_: pa.DataType) -> pa.DataType:
    """Return the type of the same layout that takes every value. A type with nested runs is returned as it is."""
    if isinstance(type_, pa.BaseExtensionType):
        return _layout(type_.storage_type)
    if type_ in _STORED_AS:
        return _STORED_AS[type_]
    if pa.types.is_decimal(type_):
        return pa.binary(type_.byte_width)
    if pa.types.is_run_end_encoded(type_):
        return pa.run_end_encoded(type_.run_end_type, _layout(type_.value_type))
    return type_ if contains(type_, pa.types.is_run_end_encoded) else _nested_layout(type_)


def _nested_layout(type_: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(type_):
        return pa.dictionary(type_.index_type, _layout(type_.value_type), type_.ordered)
    # Fields that may have nulls: libarrow would take none for those that may not, though they may have some.
    fields = [
        pa.field(_field_name(type_.field(number)), _layout(type_.field(number).type))
        for number in range(type_.num_fields)
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


def _field_name(field: pa.Field) -> str:
    """Return the name of the field, so that a type that is its own layout stays so. A damaged name is not text."""
    try:
        return str(field.name)
    except UnicodeDecodeError:
        return ""


def _view_as(array: pa.Array, type_: pa.DataType) -> pa.Array:
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
    values = array.values if array.values.type == type_.value_type else _view_as(array.values, type_.value_type)
    return pa.RunEndEncodedArray.from_buffers(type_, len(array), [None], 0, array.offset, [array.run_ends, values])
