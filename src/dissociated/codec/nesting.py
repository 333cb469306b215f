"""What types are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pyarrow as pa


def contains(type_: pa.DataType, is_wanted: Callable[[pa.DataType], bool]) -> bool:
    """Whether the type is one that is wanted, or is made of one, at whatever depth."""
    return is_wanted(type_) or any(contains(inner, is_wanted) for inner in _inner(type_))


def has_children(type_: pa.DataType) -> bool:
    """Whether arrays of the type have other arrays within, but for a dictionary."""
    if isinstance(type_, pa.BaseExtensionType):
        return has_children(type_.storage_type)
    return bool(type_.num_fields)


def is_extension(type_: pa.DataType) -> bool:
    """Whether pyarrow knows it as an extension type."""
    return isinstance(type_, pa.BaseExtensionType)


def _inner(type_: pa.DataType) -> Sequence[pa.DataType]:
    """The types that one is made of."""
    if is_extension(type_):
        return [type_.storage_type]
    if pa.types.is_dictionary(type_):
        return [type_.value_type]
    return [type_.field(number).type for number in range(type_.num_fields)]
