"""Descriptions of Arrow arrays for Spark's JVM: buffers, children, and the files that hold the buffers."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, methodcaller
from typing import Any

import pyarrow as pa
import pyarrow.types as types

from dissociated.codec.nesting import contains
from dissociated.memory.region import AddressSpace, Region
from dissociated.spark.columns import field_places, is_readable, spark_type
from dissociated.spark.exchange import JvmMemfd

_COLUMN_ALIGNMENT = 64
_VALUES, _DICTIONARY = attrgetter("values"), attrgetter("dictionary")  # take a child from an array


@dataclass(frozen=True)
class ArrayLayout:
    """The structure of arrays of one Arrow type, for Spark's JVM.

    `kind` says how the type differs from the Arrow type of Spark's type, such as "large" or "dictionary". `width` is
    the bytes of a fixed-size value or of a dictionary index, or the length of a fixed-size list; 0 for other types.
    `buffers` is the number of buffers, or None if it differs from array to array. `children` has for each child a
    function that takes it from an array, and its layout. `used_children` has the indices of the children that Spark
    reads.
    """

    kind: str
    width: int
    buffers: int | None
    children: Sequence[tuple[Callable[[pa.Array], pa.Array], ArrayLayout]] = ()
    used_children: Sequence[int] = ()

    @classmethod
    def of(cls, type_: pa.DataType, spark: pa.DataType) -> ArrayLayout:
        """Return the layout of arrays of `type_`, of which Spark reads the fields that `spark` has.

        Args:
            type_: The type of the arrays.
            spark: The Arrow type of Spark's type; it may lack fields of structs.
        """
        if types.is_null(type_):
            return cls("", 0, 0)
        if types.is_map(type_):
            entries = cls.of(_entry_type(type_), _entry_type(spark))
            return cls("", 0, 2, ((_VALUES, entries),), (0,))
        if types.is_struct(type_):
            return cls("", 0, 1, *_fields(type_, spark))
        if types.is_list(type_) or types.is_large_list(type_):
            values = cls.of(type_.value_type, spark.value_type)
            return cls("large" if types.is_large_list(type_) else "", 0, 2, ((_VALUES, values),), (0,))
        if types.is_fixed_size_list(type_):
            values = cls.of(type_.value_type, spark.value_type)
            return cls("fixed", type_.list_size, 1, ((_VALUES, values),), (0,))
        if types.is_dictionary(type_):
            values = cls.of(type_.value_type, spark)
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
        """Return lists and numbers: kind, width, number of buffers (-1 if it differs), children, children to read."""
        children = [child.to_json() for _, child in self.children]
        return [self.kind, self.width, -1 if self.buffers is None else self.buffers, children, [*self.used_children]]


def _entry_type(map_type: pa.DataType) -> pa.DataType:
    # Names of the fields differ between libraries, such as `keys`, so the fields are matched by their order.
    return pa.struct([map_type.key_field.with_name("key"), map_type.item_field.with_name("value")])


def _fields(type_: pa.DataType, spark: pa.DataType) -> tuple[Any, Sequence[int]]:
    places = field_places(type_, spark)
    types_ = {place: spark.field(number).type for number, place in enumerate(places)}
    layouts = [
        ArrayLayout.of(field.type, types_.get(place, spark_type(field.type))) for place, field in enumerate(type_)
    ]
    return [(methodcaller("field", place), layout) for place, layout in enumerate(layouts)], places


def stream_layout(schema: pa.Schema, spark: pa.Schema) -> ArrayLayout | None:
    """Return the layout of the batches of a stream, in the form of a struct.

    Returns:
        None if Spark's JVM cannot read such batches itself.
    """
    if not all(is_readable(type_) and not contains(type_, types.is_dictionary) for type_ in schema.types):
        return None
    return ArrayLayout.of(pa.struct(schema), pa.struct(spark))


class BufferLocator:
    """Locations of buffers in files that the JVM can open until the locator is closed.

    A buffer in a region of shared memory is located in the file of the region. Any other buffer is copied to a memfd.
    """

    def __init__(self, spaces: Sequence[AddressSpace], static_only: bool = False) -> None:
        """Create a locator for buffers in the regions of `spaces`.

        Args:
            spaces: The address spaces of the connections. The caller may add more later. Their regions must stay mapped
                at the same addresses while the locator is in use.
            static_only: Whether to copy buffers in regions whose memory is reused when it is freed.
        """
        self._spaces = spaces
        self._static_only = static_only
        self._new: list[str] = []  # files of the regions that `new_regions` has not returned yet
        self._region_count = 0
        self._mapped: list[tuple[int, int, int]] = []  # begin, end and number of each region
        self._unmapped: set[int] = set()  # 4 KiB pages that no region contains
        self._memfd: JvmMemfd | None = None  # holds the copies
        self._memfd_region = 0  # number of the memfd among the regions
        self._memfd_size = 0
        self._copies: dict[tuple[int, int], tuple[int, int]] = {}  # by addresses: slices of a batch share buffers
        #: Bytes of the memfd in use.
        self.copied = 0

    def describe(self, array: pa.Array, layout: ArrayLayout) -> Any:
        """Return the description of an array and of its children, as the sidecar sends it."""
        buffers: list[int] = []
        for buffer in array.buffers()[: layout.buffers]:
            buffers += (-1, 0, 0) if buffer is None or not buffer.size else (*self._locate(buffer), buffer.size)
        children = (layout.children[number] for number in layout.used_children)
        below = [self.describe(child(array), child_layout) for child, child_layout in children]
        return [len(array), array.offset, array.null_count, buffers, below, layout.kind, layout.width]

    def new_regions(self) -> list[str]:
        """Return the files of the regions that were added since the last call."""
        new, self._new = self._new, []
        return new

    def clear(self) -> None:
        """Discard the copies, once the JVM no longer reads them.

        The addresses of unmapped memory are discarded, too: a new region may be mapped there.
        """
        self.copied = 0
        self._copies.clear()
        self._unmapped.clear()

    def close(self) -> None:
        """Close the memfd of the copies."""
        if self._memfd is not None:
            self._memfd.close()
            self._memfd = None

    def _locate(self, buffer: pa.Buffer) -> tuple[int, int]:
        """Return the number of the buffer's region, and the offset in it in bytes. Copy the buffer if it has none."""
        first, last = buffer.address, buffer.address + buffer.size
        for begin, end, number in self._mapped:
            if begin <= first and last <= end:
                return number, first - begin
        if first >> 12 not in self._unmapped and (region := self._find(first, last)) is not None:
            assert region.file is not None
            begin = region.memory.address
            self._mapped.append((begin, begin + region.size, self._add(region.file.path)))
            return self._region_count - 1, first - begin
        self._unmapped.add(first >> 12)
        if (first, last) not in self._copies:
            self._copies[first, last] = self._copy(buffer)
        return self._copies[first, last]

    def _find(self, first: int, last: int) -> Region | None:
        """Return the region that contains these addresses; None if there is none or the JVM may not open its file.

        Another user's memfd is such a file.
        """
        for region in chain.from_iterable(space.regions for space in self._spaces):
            begin = region.memory.address
            if self._static_only and not region.static:
                continue
            if region.file is not None and begin <= first and last <= begin + region.size:
                return region if os.access(region.file.path, os.R_OK) else None
        return None

    def _add(self, path: str) -> int:
        self._new.append(path)
        self._region_count += 1
        return self._region_count - 1

    def _copy(self, buffer: pa.Buffer) -> tuple[int, int]:
        if self._memfd is None:
            self._memfd = JvmMemfd()
            self._memfd_region = self._add(self._memfd.path)
        at = self.copied
        self.copied = -(-(at + buffer.size) // _COLUMN_ALIGNMENT) * _COLUMN_ALIGNMENT
        self._memfd_size = max(self._memfd_size, self.copied)
        os.ftruncate(self._memfd.descriptor, self._memfd_size)
        remaining = memoryview(buffer)
        while len(remaining):
            remaining = remaining[os.pwrite(self._memfd.descriptor, remaining, at + buffer.size - len(remaining)) :]
        return self._memfd_region, at
