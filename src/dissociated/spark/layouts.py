"""What Arrow arrays consist of, for Spark's JVM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter, methodcaller
from typing import Any

import pyarrow as pa
import pyarrow.types as types

from dissociated.codec.nesting import contains
from dissociated.spark.columns import is_readable


@dataclass(frozen=True)
class ArrayLayout:
    """What arrays of one type have: how they differ from what Spark's type is in Arrow, a width, buffers, children.

    The number of buffers is None where it differs from array to array.
    """

    kind: str
    width: int
    buffers: int | None
    children: Sequence[tuple[Callable[[pa.Array], pa.Array], ArrayLayout]] = ()

    @classmethod
    def of(cls, type_: pa.DataType) -> ArrayLayout:
        """The layout of arrays of this type."""
        if types.is_null(type_):
            return cls("", 0, 0)
        if types.is_map(type_):
            return cls("", 0, 2, ((_VALUES, cls.of(pa.struct([type_.key_field, type_.item_field]))),))
        if types.is_struct(type_):
            fields = range(type_.num_fields)
            return cls("", 0, 1, [(methodcaller("field", index), cls.of(type_.field(index).type)) for index in fields])
        if types.is_list(type_) or types.is_large_list(type_):
            return cls("large" if types.is_large_list(type_) else "", 0, 2, ((_VALUES, cls.of(type_.value_type)),))
        if types.is_fixed_size_list(type_):
            return cls("fixed", type_.list_size, 1, ((_VALUES, cls.of(type_.value_type)),))
        if types.is_dictionary(type_):
            return cls("dictionary", type_.index_type.byte_width, 2, ((_DICTIONARY, cls.of(type_.value_type)),))
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
        """As lists and numbers: kind, width, number of buffers (-1 where it differs), children."""
        children = [child.to_json() for _, child in self.children]
        return [self.kind, self.width, -1 if self.buffers is None else self.buffers, children]


_VALUES, _DICTIONARY = map(attrgetter, ("values", "dictionary"))


def stream_layouts(schema: pa.Schema) -> list[ArrayLayout] | None:
    """Those of all columns of a stream; None where Spark's JVM cannot take its batches apart."""
    if not all(is_readable(type_) and not contains(type_, types.is_dictionary) for type_ in schema.types):
        return None
    return [ArrayLayout.of(type_) for type_ in schema.types]
