"""Datasets on a device. Clients that can open the device's memory receive addresses; all others receive copies."""

from __future__ import annotations

import ctypes
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pyarrow as pa

from dissociated.base.buffers import metadata_too_long
from dissociated.codec.cdevice import ImportedArray, device_name, import_batches, is_on_device
from dissociated.codec.columns import select_fields
from dissociated.codec.device_split import DeviceSplitter, PlacedMessage
from dissociated.codec.dlpack import import_columns
from dissociated.codec.join import EncodedMessage, join
from dissociated.codec.options import WriteOptions
from dissociated.codec.reader import StreamReader
from dissociated.codec.schemas import schema_difference
from dissociated.codec.split import SplitMessage
from dissociated.datasets.base import Dataset
from dissociated.datasets.static import project_messages
from dissociated.datasets.static_message import StaticMessage
from dissociated.datasets.streamed import StreamedDataset
from dissociated.datasets.table import TableDataset
from dissociated.errors import DeviceError, FormatError, SourceError
from dissociated.format.message import Header, HeaderType, buffer_extents, row_count
from dissociated.format.projection import Projection
from dissociated.memory.device.base import Stream
from dissociated.memory.device.copies import Copies
from dissociated.memory.device.registry import open_device
from dissociated.memory.device.segment import DeviceSegment
from dissociated.memory.remote import fetch_ranges


class DeviceDataset(StreamedDataset):
    """Static messages whose bodies lie in one segment on a device. The segment is None if all bodies are empty."""

    repeatable = True

    def __init__(
        self, name: str, schema: pa.Schema, segment: DeviceSegment | None, messages: Sequence[StaticMessage]
    ) -> None:
        super().__init__(name, schema)
        self.segment = segment
        self.placed = messages
        self.rows = sum(row_count(message.header) for message in messages)
        self.nbytes = sum(message.parsed.body_length for message in messages)

    @property
    def device_segment(self) -> DeviceSegment | None:
        return self.segment

    @property
    def packed_size(self) -> int | None:
        return self.nbytes

    def check_metadata(self, limit: int) -> None:
        for message in self.placed:
            why = metadata_too_long(repr(self.name), len(message.header), limit)
            if why is not None:
                raise SourceError(why)

    def messages(self) -> Iterator[SplitMessage]:
        """Yield the messages. Each body is copied from the device when its message is due."""
        with nullcontext() if self.segment is None else Copies(self.segment.device) as copies:
            for header, parsed, _, extents, _ in self.placed:
                if extents is None or copies is None:
                    yield SplitMessage(header, parsed, [] if parsed.has_body else None)
                    continue
                copy = self._copy_out(copies, header, parsed, [address for address, _ in extents])
                yield SplitMessage(header, parsed, [copy])

    def open_reader(self) -> pa.RecordBatchReader:
        return join(self._encoded(), kind=StreamReader)

    def _encoded(self) -> Generator[EncodedMessage, None, None]:
        for header, parsed, body in self.messages():
            yield header, (body[0] if body else b"") if parsed.has_body else None

    def _copy_out(self, copies: Copies, header: bytes, parsed: Header, addresses: Sequence[int]) -> pa.Buffer:
        """Copy the buffers at these addresses from the device, and return the packed body in host memory."""
        assert self.segment is not None
        copy = pa.allocate_buffer(parsed.body_length)
        copies.use((copy, self.segment))
        bytes_of = np.frombuffer(copy, np.uint8)
        offsets, lengths = buffer_extents(header, parsed)
        end = 0
        for address, length, at in fetch_ranges([*map(self.segment.address, addresses)], lengths, offsets):
            bytes_of[end:at] = 0
            copies.stream.copy(copy.address + at, address, length)
            end = at + length
        bytes_of[end:] = 0
        copies.wait()
        return copy

    def _select(self, indices: tuple[int, ...]) -> Dataset:
        try:
            chosen = [*project_messages(self.placed, Projection(self.placed[0].header, indices))]
        except FormatError as error:
            raise SourceError(f"columns of {self.name!r} cannot be selected: {error}") from None
        return DeviceDataset(self.name, select_fields(self.schema, indices), self.segment, chosen)

    def slice_batches(self, first: int, stop: int) -> Dataset:
        chosen, number = [], 0
        for message in self.placed:
            is_batch = message.parsed.type is HeaderType.RECORD_BATCH
            if not is_batch or first <= number < stop:
                chosen.append(message)
            number += is_batch
        return DeviceDataset(self.name, self.schema, self.segment, chosen)


def as_device_dataset(name: str, source: Any, options: WriteOptions | None = None) -> Dataset | None:
    """Make a dataset of a source whose data lie on a device.

    The data are copied once, within the device, into memory that can be exported to other processes. Memory of a
    framework's pool cannot be exported.

    Args:
        name: The name of the dataset.
        source: An object with the Arrow C Device interface, a list of such objects, or a mapping of column names to
            objects with DLPack.
        options: Write options, which are valid only if the data turn out to lie in host memory.

    Returns:
        The dataset; None if `source` is none of these.

    Raises:
        SourceError: The batches differ in their schema or device, or `options` are not valid for them.
        DeviceError: The device fails.
        DeviceFull: The device has no memory left.
    """
    if isinstance(source, Mapping) and source and all(hasattr(column, "__dlpack__") for column in source.values()):
        schema, arrays = import_columns(source)
    elif is_on_device(source):
        schema, imported = import_batches(source)
        arrays = [*imported]
    elif isinstance(source, list | tuple) and source and all(map(is_on_device, source)):
        schema, arrays = _all_batches(source)
    else:
        return None
    names = {device_name(array.struct) for array in arrays}
    if len(names) > 1:
        raise SourceError(
            f"the batches of {name!r} are on several devices: {', '.join(sorted(map(str, names)))}; copy them to one"
        )
    where = names.pop() if names else None
    if where is None:
        batches = [pa.RecordBatch._import_from_c(ctypes.addressof(array.struct), schema) for array in arrays]
        return TableDataset(name, pa.Table.from_batches(batches, schema), options)
    if options is not None:
        raise SourceError(f"cannot publish {name!r} with options: data on a device is sent unchanged")
    with Copies(open_device(where)) as copies:
        return _place(name, schema, copies, arrays)


def _all_batches(sources: Sequence[Any]) -> tuple[pa.Schema, list[ImportedArray]]:
    imported = [import_batches(source) for source in sources]
    schema = imported[0][0]
    for other_schema, _ in imported:
        if not other_schema.equals(schema):
            raise SourceError(f"the batches have different schemas: {schema_difference(schema, other_schema)}")
    return schema, [array for _, arrays in imported for array in arrays]


def _place(name: str, schema: pa.Schema, copies: Copies, arrays: Sequence[ImportedArray]) -> DeviceDataset:
    """Copy the batches into one new segment on their device."""
    stream = copies.stream
    for array in arrays:
        if array.struct.sync_event:
            stream.wait(array.struct.sync_event)
    splitter = DeviceSplitter(schema, copies)
    split = [message for array in arrays for message in splitter.split(array)]
    size = sum(message.parsed.body_length for message in split)
    begin = StaticMessage(splitter.schema_message.header, splitter.schema_message.parsed, None)
    if not size:
        return DeviceDataset(name, schema, None, [begin, *(StaticMessage(m.header, m.parsed, ()) for m in split)])
    memory = copies.device.allocate(size, stream, exportable=True)
    copies.use((arrays, split))
    try:
        stream.clear(memory.address, size)  # padding must not expose old contents of the memory
        segment = DeviceSegment(memory)
        messages = [begin, *_copy(stream, segment, split)]
        copies.wait()
    except DeviceError:
        memory.close()
        raise
    return DeviceDataset(name, schema, segment, messages)


def _copy(stream: Stream, segment: DeviceSegment, messages: Iterable[PlacedMessage]) -> Iterator[StaticMessage]:
    at = segment.span.base
    for header, parsed, extents, _ in messages:
        offsets, lengths = buffer_extents(header, parsed)
        if not parsed.body_length:
            yield StaticMessage(header, parsed, ())
            continue
        # Each buffer is copied on its own, since the bytes after it in the source belong to other data.
        for (address, length), offset in zip(extents, offsets, strict=True):
            if length:
                stream.copy(segment.address(at) + offset, address, length)
        placed = [(at + offset if length else 0, length) for offset, length in zip(offsets, lengths, strict=True)]
        yield StaticMessage(header, parsed, None, placed)
        at += parsed.body_length
