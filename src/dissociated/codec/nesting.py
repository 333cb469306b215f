"""Inspection of nested types."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pyarrow as pa


def contains(type_: pa.DataType, is_wanted: Callable[[pa.DataType], bool]) -> bool:
    """Return whether `is_wanted` is true for the type or any type nested in it."""
    return is_wanted(type_) or any(contains(inner, is_wanted) for inner in inner_types(type_))


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
