"""Record batches on a device: metadata in host memory, and each body in one piece on the device.

libarrow encodes and decodes them: it never reads uncompressed bodies, so its arrays lie on the device. Reading their
values here would crash the process. They are only passed on, by the Arrow C Device interface, DLPack and
`__cuda_array_interface__`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, Self, TypeAlias

import pyarrow as pa

from dissociated.codec.batches import RaisingAgain
from dissociated.codec.cdevice import ArrowDeviceArray, Fill, OnDevice, check_request, export_array, export_stream, fill
from dissociated.codec.dlpack import DeviceColumn
from dissociated.codec.inplace import MappedReader
from dissociated.codec.join import EncodedMessage, Messages, join
from dissociated.codec.options import ReadOptions, WriteOptions
from dissociated.codec.packing import by_position
from dissociated.codec.reader import StreamReader, close_idle
from dissociated.codec.split import SplitMessage, Splitter, batches
from dissociated.errors import DeviceError, RemoteProtocolError
from dissociated.format.layout import SchemaLayout, dictionary_of, layout_of
from dissociated.format.message import Header, HeaderType, buffer_extents, extents_within
from dissociated.memory.device.base import Device, Event
from dissociated.memory.device.copies import Copies
from dissociated.memory.remote import fetch_ranges

#: Layout of bodies on a device: device libraries require buffers that are aligned and padded to 64 bytes.
LAYOUT = WriteOptions(allow_64bit=True, alignment=64)
#: Number of batches that are copied to a device at once: a batch is fetched while another is copied.
_UNDER_WAY = 2
_WORTH_REGISTERING = 1 << 20  # bytes; smaller segments are not registered


class DeviceMessage(NamedTuple):
    """An IPC message whose body lies on a device, in one buffer, once the `event` has happened; None without a body.

    A body that is `shared` with other readers must not be written to.
    """

    header: bytes
    parsed: Header
    body: pa.Buffer | None
    event: Event | None = None
    shared: bool = False


class DeviceBatch(OnDevice):
    """A record batch whose columns lie on a device. Its memory is freed when its last user is collected.

    Example:
        ```python
        with client.read_on_device("flights", "test:0") as reader:  # or "cuda:0"
            batch = reader.read_next_batch()
        distance = batch["distance"]  # a DeviceColumn, for DLPack
        copied = batch.to_host()  # a pyarrow.RecordBatch
        ```
    """

    def __init__(
        self,
        device: Device,
        batch: pa.RecordBatch,
        metadata: pa.KeyValueMetadata | None,
        messages: tuple[DeviceMessage, ...],
    ) -> None:
        #: The device of the columns.
        self.device = device
        #: The metadata that the writer gave the batch.
        self.metadata = metadata
        self._batch = batch
        self._messages = messages  # the schema, the dictionaries in use, and the batch
        self._event = messages[-1].event
        if self._event is None:  # the batch was on the device before; a dictionary may have been copied
            for message in messages:
                if message.event is not None:
                    message.event.synchronize()

    @property
    def schema(self) -> pa.Schema:
        """The schema of the reader from which the batch comes."""
        return self._batch.schema

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return int(self._batch.num_rows)

    @property
    def num_columns(self) -> int:
        """The number of columns."""
        return int(self._batch.num_columns)

    @property
    def nbytes(self) -> int:
        """The size on the device in bytes, without dictionaries, which batches share."""
        body = self._messages[-1].body
        return 0 if body is None else int(body.size)

    def get_total_buffer_size(self) -> int:
        """Return `nbytes`, under pyarrow's name, for readers that limit prefetched bytes."""
        return self.nbytes

    def column(self, i: int | str) -> DeviceColumn:
        """Return a column by position or name. Raises KeyError and IndexError in the cases that pyarrow does."""
        return DeviceColumn(self.device, self._batch.column(i), self._event, self._messages[-1].shared)

    def __getitem__(self, i: int | str) -> DeviceColumn:
        return self.column(i)

    def __len__(self) -> int:
        return self.num_rows

    def synchronize(self) -> None:
        """Wait until the batch has arrived on the device. Consumers of the Arrow C Device interface wait themselves.

        Raises DeviceError.
        """
        if self._event is not None:
            self._event.synchronize()

    def to_host(self) -> pa.RecordBatch:
        """Return a copy in memory of this process. Raises DeviceError."""
        with closing(_messages_on_host(self.device, self._messages)) as messages:
            return join(messages).read_next_batch()

    def __arrow_c_device_array__(self, requested_schema: object = None, **options: Any) -> tuple[Any, Any]:
        """Export the batch with its event, for which the streams of the consumer wait."""
        check_request(requested_schema, self.schema, options)
        return export_array(self._batch, self.device, self._awaited())

    def fill(self, struct: ArrowDeviceArray) -> None:
        """Write this batch into `struct`."""
        fill(struct, self._batch, self.device, self._awaited())

    def fills(self) -> Iterator[Fill]:
        """Return an iterator over a single function, which writes this batch."""
        return iter([self.fill])

    def _awaited(self) -> int | None:
        """Return the event for which consumers wait, which lives as long as the memory of the body.

        libarrow drops the validity of a column without nulls. If it has kept no buffer of the body at all, nothing
        keeps the event alive: then wait here, and return None.
        """
        if self._event is None:
            return None
        body = self._messages[-1].body
        buffers = (buffer for column in self._batch.columns for buffer in column.buffers() if buffer is not None)
        if body is not None and any(0 <= buffer.address - body.address < body.size for buffer in buffers):
            return self._event.pointer
        self._event.synchronize()
        return None

    def __repr__(self) -> str:
        return f"<DeviceBatch of {self.num_rows} rows and {self.num_columns} columns on {self.device.name}>"


def _messages_on_host(device: Device, messages: tuple[DeviceMessage, ...]) -> Messages:
    with Copies(device) as copies:
        for message in messages:
            if message.body is None:
                yield message.header, None
                continue
            if message.event is not None:
                copies.stream.wait(message.event.pointer)
            yield message.header, _copied(message.body, copies)


def copy_to_host(device: Device, memory: pa.Buffer) -> pa.Buffer:
    """Return a copy of device memory in memory of this process. Raises DeviceError."""
    with Copies(device) as copies:
        return _copied(memory, copies)


def _copied(memory: pa.Buffer, copies: Copies) -> pa.Buffer:
    copy = pa.allocate_buffer(memory.size)
    copies.use((copy, memory))
    if copy.size:
        copies.stream.copy(copy.address, memory.address, copy.size)
    copies.wait()
    return copy


class DeviceReader(OnDevice):
    """A reader of record batches on a device. It can be read once.

    Use it as a context manager, or `close` it; dropping it closes it, too. Reading raises the errors of the source,
    DeviceError, and DeviceFull.

    Example:
        ```python
        with client.read_on_device("flights", "test:0") as reader:  # or "cuda:0"
            rows = sum(batch.num_rows for batch in reader)
        ```
    """

    def __init__(
        self, device: Device, schema: pa.Schema, batches: Generator[DeviceBatch, None, None], close: Callable[[], None]
    ) -> None:
        #: The device of the batches.
        self.device = device
        self.schema = schema
        self._batches = RaisingAgain(batches)
        self._closes = self._batches.close, close

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> DeviceBatch:
        return self.read_next_batch()

    def read_next_batch(self) -> DeviceBatch:
        """Return the next batch. Raises StopIteration at the end; an error is raised again by later calls."""
        return next(self._batches)

    def close(self) -> None:
        """Stop reading. Batches that were read stay valid."""
        for close in self._closes:
            close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __arrow_c_device_stream__(self, requested_schema: object = None, **options: Any) -> Any:
        """Export the remaining batches to other libraries."""
        check_request(requested_schema, self.schema, options)
        return export_stream(self.schema, self.device, self.fills())

    def fills(self) -> Iterator[Fill]:
        """Return for each remaining batch the function that writes it into a struct."""
        return map(attrgetter("fill"), self)


#: Continues a stream that ends early, given its schema, its dictionaries and the last batch that was not read.
GoOn: TypeAlias = Callable[[Messages], pa.RecordBatchReader | None]


def join_on_device(
    device: Device,
    messages: Generator[DeviceMessage, None, None],
    options: ReadOptions | None = None,
    go_on: GoOn = lambda begin: None,
) -> DeviceReader:
    """Return a reader over the stream of `messages`, the schema first. Raises libarrow's errors of content.

    When the messages end, `go_on` may return a reader of further batches, which are copied to the device.
    """
    tracker = _MessageTracker()
    # With these options libarrow would read bodies, or copy them.
    options = replace(options or ReadOptions(), ensure_native_endian=False, ensure_alignment=pa.ipc.Alignment.Any)
    reader = join(tracker.follow(messages), options)

    def batches() -> Generator[DeviceBatch, None, None]:
        yield from _batches(device, reader, tracker, messages)
        more = go_on(_messages_on_host(device, tracker.take()))
        if more is not None:
            yield from to_device(more, device)

    return DeviceReader(device, reader.schema, batches(), partial(close_idle, messages))


class _MessageTracker:
    """The messages that the next batch of a stream needs.

    It must not refer to the reader, which owns it through C++.
    """

    def __init__(self) -> None:
        self._begin: tuple[DeviceMessage, ...] = ()
        self._layout: SchemaLayout | None = None
        self._dictionaries: dict[int, DeviceMessage] = {}
        self._last: tuple[DeviceMessage, ...] = ()

    def take(self) -> tuple[DeviceMessage, ...]:
        """Return the schema, the dictionaries, and the batch read last, which the caller now owns."""
        last, self._last = self._last, ()
        return (*self._begin, *self._dictionaries.values(), *last)

    def follow(self, messages: Generator[DeviceMessage, None, None]) -> Messages:
        """Yield the messages for libarrow, and record them.

        Raises:
            DeviceError: A dictionary grows, which libarrow would have to concatenate.
            RemoteProtocolError: A buffer is shorter than its rows need. Consumers of a column read all of it, and
                libarrow's own validation would read memory of the device.
        """
        with closing(messages):
            yield from map(self._record, messages)  # not a loop, whose variable would keep a body alive

    def _record(self, message: DeviceMessage) -> EncodedMessage:
        match message.parsed.type:
            case HeaderType.SCHEMA:
                self._begin = (message,)
                self._layout = layout_of(message.header)
                return message.header, message.body
            case HeaderType.DICTIONARY_BATCH:
                number, delta = dictionary_of(message.header)
                if delta:
                    raise DeviceError(
                        "dictionaries with deltas cannot be joined on a device: read this dataset on the host"
                    )
                self._dictionaries[number] = message
            case _:
                self._last = (message,)
        if self._layout is None:
            raise RemoteProtocolError("the peer sent a schema that cannot be read")
        self._layout.check_sizes(message.header, message.parsed)
        return message.header, message.body


def _batches(
    device: Device, reader: StreamReader, tracker: _MessageTracker, source: Generator[DeviceMessage, None, None]
) -> Generator[DeviceBatch, None, None]:
    with closing(source), suppress(StopIteration):
        while True:
            yield DeviceBatch(device, *reader.read_next_batch_with_custom_metadata(), tracker.take())


def chain_on_device(device: Device, readers: Sequence[DeviceReader]) -> DeviceReader:
    """Concatenate `readers`, which must not be empty."""

    def chained() -> Generator[DeviceBatch, None, None]:
        for reader in readers:
            yield from reader

    def close() -> None:
        for reader in readers:
            reader.close()

    return readers[0] if len(readers) == 1 else DeviceReader(device, readers[0].schema, chained(), close)


def to_device(reader: pa.RecordBatchReader, device: Device) -> DeviceReader:
    """Copy the batches of `reader` to a device, one by one on demand. The reader is closed with the result.

    Copies are asynchronous: a batch is returned while it is being copied. A segment that is read in place is registered
    with the driver, once, while it is copied from.
    """
    return join_on_device(device, _move_batches(reader, device))


def _move_batches(reader: pa.RecordBatchReader, device: Device) -> Generator[DeviceMessage, None, None]:
    splitter = Splitter(reader.schema, LAYOUT)
    with closing(reader), closing(Mover(device)) as mover:
        yield DeviceMessage(splitter.schema_message.header, splitter.schema_message.parsed, None)
        if isinstance(reader, MappedReader):
            mover.register([region.memory for region in reader.regions])
        for batch, metadata in batches(reader):
            for message in splitter.split(batch, metadata):
                yield mover.move_split(message)


class Mover:
    """A copier of bodies to a device, which keeps the sources alive until they are copied."""

    def __init__(self, device: Device) -> None:
        #: The destination.
        self.device = device
        self._copies = Copies(device)
        self._events: deque[Event] = deque()

    def move_split(self, message: SplitMessage) -> DeviceMessage:
        """Copy a message whose body is in parts. Each buffer must begin a part."""
        header, parsed, body = message
        parts = {at: pa.py_buffer(part) for at, part in by_position(body or ()).items()}
        offsets, lengths = buffer_extents(header, parsed)
        addresses = [parts[at].address if length else 0 for at, length in zip(offsets, lengths, strict=True)]
        return self.move(header, parsed, addresses, parts)

    def move(self, header: bytes, parsed: Header, addresses: Sequence[int], sources: object) -> DeviceMessage:
        """Copy the buffers of a message from their addresses, in host memory or on the device.

        Args:
            header: The flatbuffer of the message.
            parsed: The parsed header.
            addresses: The address of each buffer.
            sources: An object that keeps this memory alive.

        Raises:
            RemoteProtocolError: A buffer leaves its body.
            DeviceError: The device failed.
            DeviceFull: The device has no memory for the body.
        """
        if not parsed.body_length:
            return DeviceMessage(header, parsed, pa.py_buffer(b""))
        # The offsets may come from a peer, and are checked.
        offsets, lengths = extents_within(header, parsed, parsed.body_length)
        stream = self._copies.stream
        memory = self.device.allocate(parsed.body_length, stream)
        self._copies.use(sources)
        try:
            for address, length, at in fetch_ranges(addresses, lengths, offsets):
                stream.copy(memory.address + at, address, length)
            memory.event = event = stream.record()
        except BaseException:
            memory.close()
            raise
        self._events.append(event)
        while len(self._events) > _UNDER_WAY:
            self._events[0].synchronize()
            self._events.popleft()
            self._copies.release_first()
        return DeviceMessage(header, parsed, memory.buffer(), event)

    def register(self, buffers: Sequence[pa.Buffer]) -> None:
        """Register memory that contains bodies with the driver, until the mover is closed."""
        for buffer in buffers:
            if buffer.size >= _WORTH_REGISTERING:
                self.device.register(buffer, self._copies.afterwards)

    def settle(self) -> None:
        """Release the sources once they are copied. If waiting fails, they are released later."""
        self._events.clear()
        with suppress(DeviceError):
            self._copies.wait()

    def close(self) -> None:
        """Release the sources, and unregister memory. If waiting fails, the device does so later."""
        self._copies.close()
