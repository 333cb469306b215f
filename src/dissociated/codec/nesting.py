"""Inspection of nested types."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pyarrow as pa


def contains(type_: pa.DataType, is_wanted: Callable[[pa.DataType], bool]) -> bool:
    """Return whether `is_wanted` is true for the type or any type nested in it."""
    return any(is_wanted(inner) for inner, _ in nested_types(type_))


def nested_types(type_: pa.DataType) -> Iterator[tuple[pa.DataType, int]]:
    """Yield the type and all types nested in it, each with its depth, which is 1 for the type itself.

    The types in an extension type or a dictionary have the depth of that type. There is no recursion, for which a type
    may be too deep.
    """
    remaining = [(type_, 1)]
    while remaining:
        outer, depth = remaining.pop()
        yield outer, depth
        inner_depth = depth if is_extension(outer) or pa.types.is_dictionary(outer) else depth + 1
        remaining += ((inner, inner_depth) for inner in inner_types(outer))


def has_children(type_: pa.DataType) -> bool:
    """Return whether arrays of the type have child arrays. A dictionary does not count."""
    if isinstance(type_, pa.BaseExtensionType):
        return has_children(type_.storage_type)
    return bool(type_.num_fields)


def is_extension(type_: pa.DataType) -> bool:
    """Return whether the type is an extension type that pyarrow knows."""
    return isinstance(type_, pa.BaseExtensionType)


def inner_types(type_: pa.DataType) -> Sequence[pa.DataType]:
    """Return the types from which the type is made."""
    if is_extension(type_):
        return [type_.storage_type]
    if pa.types.is_dictionary(type_):
        return [type_.value_type]
    return [type_.field(number).type for number in range(type_.num_fields)]
