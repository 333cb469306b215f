"""Encoding of record batches on a device to IPC messages whose buffers stay there.

libarrow reads offsets when it encodes, so metadata is written here, by the layout of each type. Only necessary values
are copied from the device: the last offset of a column of variable length, and the validity of a column whose nulls
were not counted or that begins within a byte.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from dissociated.codec.cdevice import ArrowArray, ImportedArray
from dissociated.codec.split import SplitMessage, Splitter
from dissociated.errors import SourceError
from dissociated.format.message import Header, parse_header
from dissociated.format.record_batch import encode_record_batch
from dissociated.memory.device.copies import Copies

_DEVICE_ALIGNMENT = 64
_VIEW_SIZE = 16  # bytes


class PlacedMessage(NamedTuple):
    """A message, with the address and length of each of its buffers. `kept` are the buffers in host memory."""

    header: bytes
    parsed: Header
    extents: Sequence[tuple[int, int]]
    keepalive: Sequence[pa.Buffer]


class DeviceSplitter:
    """An encoder of batches of one stream whose columns lie on a device. It reads the device with `copies`.

    Raises SourceError for a batch that it cannot encode.
    """

    def __init__(self, schema: pa.Schema, copies: Copies) -> None:
        self._types = schema.types
        self._copies = copies
        self.schema_message: SplitMessage = Splitter(schema).schema_message

    def split(self, batch: ImportedArray) -> list[PlacedMessage]:
        """Return the messages of `batch`: its dictionaries, then the batch. Addresses are valid while it lives."""
        whole = batch.array
        if whole.n_children != len(self._types):
            raise SourceError(f"a batch has {whole.n_children} columns, and its schema has {len(self._types)}")
        if whole.buffers[0] and whole.null_count:
            raise SourceError("a batch has rows that are null as a whole: give its columns instead of a struct")
        walk = _Walk(batch, self._copies, itertools.count(), [])
        for type_, child in zip(self._types, whole.children[: whole.n_children], strict=True):
            walk.visit(type_, child.contents, whole.offset, whole.length)
        return [*walk.dictionaries, walk.message(whole.length, None)]


class _Walk:
    """A traversal of the arrays of one message, which belong to `batch`."""

    def __init__(
        self, batch: ImportedArray, copies: Copies, ids: itertools.count[int], dictionaries: list[PlacedMessage]
    ) -> None:
        self._batch = batch
        self._copies = copies
        self._ids = ids  # in libarrow's order: fields before their children
        self.dictionaries = dictionaries
        self._nodes: list[tuple[int, int]] = []
        self._buffers: list[tuple[int, int]] = []
        self._variadic: list[int] = []
        self._keepalive: list[pa.Buffer] = []

    def message(self, num_rows: int, dictionary: int | None) -> PlacedMessage:
        placed, end = [], 0
        for _, length in self._buffers:
            placed.append((end, length))
            end += length + -length % _DEVICE_ALIGNMENT
        header = encode_record_batch(num_rows, self._nodes, placed, self._variadic, end, dictionary=dictionary)
        return PlacedMessage(header, parse_header(header), self._buffers, self._keepalive)

    def visit(self, type_: Any, array: ArrowArray, offset: int, length: int) -> None:
        """Add `length` values of an array from `offset` on, which is relative to the array's own offset."""
        while isinstance(type_, pa.BaseExtensionType):
            type_ = type_.storage_type
        types = pa.types
        whole = not offset and length == array.length
        offset += array.offset
        if types.is_null(type_):
            self._nodes.append((length, length))
            return
        if types.is_run_end_encoded(type_):
            if not whole or array.offset:
                raise SourceError("a slice of run-end encoded values on a device cannot be sent: copy it first")
            self._nodes.append((length, 0))
            self._children([type_.run_end_type, type_.value_type], array)
            return
        if types.is_union(type_):
            self._visit_union(type_, array, offset, length)
            return
        self._validity(array, offset, length, whole)
        if types.is_dictionary(type_):
            self._fixed(array, 1, offset, length, type_.index_type.bit_width)
            number = next(self._ids)
            inner = _Walk(self._batch, self._copies, self._ids, self.dictionaries)
            values = array.dictionary.contents
            inner.visit(type_.value_type, values, 0, values.length)
            self.dictionaries.append(inner.message(values.length, number))
        elif types.is_struct(type_):
            self._children([type_.field(index).type for index in range(type_.num_fields)], array, offset, length)
        elif types.is_fixed_size_list(type_):
            size = type_.list_size
            self._children([type_.value_type], array, offset * size, length * size)
        elif types.is_string_view(type_) or types.is_binary_view(type_):
            self._visit_views(array, offset, length)
        elif types.is_list_view(type_) or types.is_large_list_view(type_):
            width = 64 if types.is_large_list_view(type_) else 32
            self._fixed(array, 1, offset, length, width)
            self._fixed(array, 2, offset, length, width)
            self._children([type_.value_type], array)
        elif types.is_list(type_) or types.is_large_list(type_) or types.is_map(type_):
            end = self._offsets(array, offset, length, 8 if types.is_large_list(type_) else 4)
            self._children([type_.field(0).type], array, 0, end)
        elif any(
            is_(type_) for is_ in (types.is_string, types.is_binary, types.is_large_string, types.is_large_binary)
        ):
            large = types.is_large_string(type_) or types.is_large_binary(type_)
            end = self._offsets(array, offset, length, 8 if large else 4)
            self._buffers.append((array.buffers[2] or 0, end) if end else (0, 0))
        else:
            self._fixed(array, 1, offset, length, type_.bit_width)

    def _children(self, child_types: Sequence[Any], array: ArrowArray, offset: int = 0, length: int = -1) -> None:
        for type_, child in zip(child_types, array.children[: array.n_children], strict=True):
            self.visit(type_, child.contents, offset, child.contents.length if length < 0 else length)

    def _visit_union(self, type_: Any, array: ArrowArray, offset: int, length: int) -> None:
        self._nodes.append((length, 0))
        self._fixed(array, 0, offset, length, 8)
        child_types = [type_.field(index).type for index in range(type_.num_fields)]
        if type_.mode == "dense":
            self._fixed(array, 1, offset, length, 32)
            self._children(child_types, array)
        else:
            self._children(child_types, array, offset, length)

    def _visit_views(self, array: ArrowArray, offset: int, length: int) -> None:
        self._buffers.append(((array.buffers[1] or 0) + offset * _VIEW_SIZE, length * _VIEW_SIZE))
        count = array.n_buffers - 3
        sizes = np.frombuffer(self._peek(array.buffers[2 + count] or 0, 8 * count), np.int64)
        self._variadic.append(count)
        self._buffers += [(array.buffers[2 + index] or 0, int(size)) for index, size in enumerate(sizes)]

    def _fixed(self, array: ArrowArray, number: int, offset: int, length: int, bits: int) -> None:
        """Add a buffer with this number of bits for each value."""
        address = array.buffers[number] or 0
        if bits % 8:
            self._buffers.append(self._bits(address, offset, length))
        else:
            self._buffers.append((address + offset * bits // 8, length * bits // 8))

    def _offsets(self, array: ArrowArray, offset: int, length: int, width: int) -> int:
        """Add a buffer of offsets. Return the last offset."""
        if not length:
            self._buffers.append((0, 0))
            return 0
        first = (array.buffers[1] or 0) + offset * width
        self._buffers.append((first, (length + 1) * width))
        return int.from_bytes(self._peek(first + length * width, width), "little")

    def _validity(self, array: ArrowArray, offset: int, length: int, whole: bool) -> None:
        address = array.buffers[0]
        if not address or not length:
            self._nodes.append((length, 0))
            self._buffers.append((0, 0))
            return
        place = self._bits(address, offset, length)
        nulls = array.null_count if whole and array.null_count >= 0 else length - self._count(place, length)
        self._nodes.append((length, nulls))
        self._buffers.append(place if nulls else (0, 0))

    def _bits(self, address: int, offset: int, length: int) -> tuple[int, int]:
        """Return the address and length of these bits, which begin at a byte: a shifted copy if necessary."""
        first, shift = divmod(offset, 8)
        if not shift:
            return address + first, -(-length // 8)
        packed = np.frombuffer(self._peek(address + first, -(-(shift + length) // 8)), np.uint8)
        bits = np.unpackbits(packed, bitorder="little")[shift : shift + length]
        moved = pa.py_buffer(np.packbits(bits, bitorder="little").tobytes())
        self._keepalive.append(moved)
        return moved.address, moved.size

    def _count(self, place: tuple[int, int], length: int) -> int:
        """Return the number of bits that are set."""
        packed = np.frombuffer(self._peek(*place), np.uint8)
        return int(np.unpackbits(packed, bitorder="little")[:length].sum())

    def _peek(self, address: int, length: int) -> bytes:
        copy = pa.allocate_buffer(length)
        if length:
            self._copies.use((copy, self._batch))
            self._copies.stream.copy(copy.address, address, length)
            self._copies.wait()
        return bytes(copy)
