"""What Arrow arrays consist of, for Spark's JVM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter, methodcaller
from typing import Any

import pyarrow as pa
import pyarrow.types as types

from dissociated.codec.nesting import contains
from dissociated.spark.columns import field_places, is_readable, spark_type


@dataclass(frozen=True)
class ArrayLayout:
    """What arrays of one type have: how they differ from what Spark's type is in Arrow, a width, buffers, children.

    The number of buffers is None where it differs from array to array. `wanted` are the numbers of those children that
    Spark asks for.
    """

    kind: str
    width: int
    buffers: int | None
    children: Sequence[tuple[Callable[[pa.Array], pa.Array], ArrayLayout]] = ()
    wanted: Sequence[int] = ()

    @classmethod
    def of(cls, type_: pa.DataType, wanted: pa.DataType) -> ArrayLayout:
        """The layout of arrays of this type, of which Spark asks for what `wanted` has, the Arrow type of its own."""
        if types.is_null(type_):
            return cls("", 0, 0)
        if types.is_map(type_):
            entries = cls.of(*(pa.struct([one.key_field, one.item_field]) for one in (type_, wanted)))
            return cls("", 0, 2, ((_VALUES, entries),), (0,))
        if types.is_struct(type_):
            return cls("", 0, 1, *_fields(type_, wanted))
        if types.is_list(type_) or types.is_large_list(type_):
            values = cls.of(type_.value_type, wanted.value_type)
            return cls("large" if types.is_large_list(type_) else "", 0, 2, ((_VALUES, values),), (0,))
        if types.is_fixed_size_list(type_):
            values = cls.of(type_.value_type, wanted.value_type)
            return cls("fixed", type_.list_size, 1, ((_VALUES, values),), (0,))
        if types.is_dictionary(type_):
            values = cls.of(type_.value_type, wanted)
            return cls("dictionary", type_.index_type.byte_width, 2, ((_DICTIONARY, values),), (0,))
        if types.is_fixed_size_binary(type_):
            return cls("fixed", type_.byte_width, 2)
        if types.is_string(type_) or types.is_binary(type_):
            return cls("", 0, 3)
        if types.is_large_string(type_) or types.is_large_binary(type_):
            return cls("large", 0, 3)
        if types.is_string_view(type_) or types.is_binary_view(type_):
            return cls("view", 0, None)
        return cls("unsigned" if types.is_unsigned_integer(type_) else "", 0, 2)

    def to_json(self) -> list[Any]:
        """As lists and numbers: kind, width, number of buffers (-1 where it differs), children, wanted ones."""
        children = [child.to_json() for _, child in self.children]
        return [self.kind, self.width, -1 if self.buffers is None else self.buffers, children, [*self.wanted]]


_VALUES, _DICTIONARY = map(attrgetter, ("values", "dictionary"))


def _fields(type_: pa.DataType, wanted: pa.DataType) -> tuple[Any, Sequence[int]]:
    places = field_places(type_, wanted)
    types_ = {place: wanted.field(number).type for number, place in enumerate(places)}
    layouts = [ArrayLayout.of(one.type, types_.get(place, spark_type(one.type))) for place, one in enumerate(type_)]
    return [(methodcaller("field", place), one) for place, one in enumerate(layouts)], places


def stream_layout(schema: pa.Schema, wanted: pa.Schema) -> ArrayLayout | None:
    """That of a whole stream, as of a struct; None where Spark's JVM cannot take its batches apart."""
    if not all(is_readable(type_) and not contains(type_, types.is_dictionary) for type_ in schema.types):
        return None
    return ArrayLayout.of(pa.struct(schema), pa.struct(wanted))
