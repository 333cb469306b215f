"""Record batches on a device: metadata here, bodies there, each body in one piece.

libarrow encodes and decodes as ever: it looks into no body that is not compressed, so its arrays lie on the device.
Whoever looks into them here dies: they are handed on by the Arrow C Device interface, DLPack and
`__cuda_array_interface__` alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from operator import attrgetter
from types import TracebackType
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

#: How bodies are laid out on a device: what reads there wants buffers that are aligned to 64 bytes, and padded to them.
LAYOUT = WriteOptions(allow_64bit=True, alignment=64)
#: How many batches are under way to a device at once: while one is copied the next is fetched.
_UNDER_WAY = 2
_WORTH_REGISTERING = 1 << 20  # bytes of a segment


class DeviceMessage(NamedTuple):
    """An IPC message whose body lies on a device, in one buffer; None without one. It is there after the `event`.

    What is `shared` with others must not be written to.
    """

    header: bytes
    parsed: Header
    body: pa.Buffer | None
    event: Event | None = None
    shared: bool = False


class DeviceBatch(OnDevice):
    """A record batch whose columns lie on a device. It is freed there when the last that uses it is collected."""

    def __init__(
        self,
        device: Device,
        batch: pa.RecordBatch,
        metadata: pa.KeyValueMetadata | None,
        messages: tuple[DeviceMessage, ...],
    ) -> None:
        #: Where it lies.
        self.device = device
        #: What its writer has said of it.
        self.metadata = metadata
        self._batch = batch
        self._messages = messages  # the schema, the dictionaries that it uses, and the batch itself
        self._event = messages[-1].event
        if self._event is None:  # it was there before, but a dictionary may have been copied
            for message in messages:
                if message.event is not None:
                    message.event.synchronize()

    @property
    def schema(self) -> pa.Schema:
        """That of the reader that it is from."""
        return self._batch.schema

    @property
    def num_rows(self) -> int:
        """How many rows it has."""
        return int(self._batch.num_rows)

    @property
    def num_columns(self) -> int:
        """How many columns it has."""
        return int(self._batch.num_columns)

    @property
    def nbytes(self) -> int:
        """How many bytes it takes on the device, without the dictionaries that batches share."""
        body = self._messages[-1].body
        return 0 if body is None else int(body.size)

    def get_total_buffer_size(self) -> int:
        """The same, as pyarrow calls it: what reads ahead counts it."""
        return self.nbytes

    def column(self, which: int | str) -> DeviceColumn:
        """A column by its position or name. Raises KeyError and IndexError as pyarrow does."""
        return DeviceColumn(self.device, self._batch.column(which), self._event, self._messages[-1].shared)

    def __getitem__(self, which: int | str) -> DeviceColumn:
        return self.column(which)

    def __len__(self) -> int:
        return self.num_rows

    def synchronize(self) -> None:
        """Wait until it has arrived on the device. Consumers that know the Arrow C Device interface do so themselves.

        Raises DeviceError.
        """
        if self._event is not None:
            self._event.synchronize()

    def to_host(self) -> pa.RecordBatch:
        """A copy of it in memory of this process. Raises DeviceError."""
        with closing(_messages_on_host(self.device, self._messages)) as messages:
            return join(messages).read_next_batch()

    def __arrow_c_device_array__(self, requested_schema: object = None, **options: Any) -> tuple[Any, Any]:
        """The same for other libraries, which need not wait: they are told what their streams wait for."""
        check_request(requested_schema, self.schema, options)
        return export_array(self._batch, self.device, self._awaited())

    def fill(self, struct: ArrowDeviceArray) -> None:
        """Make `struct` this batch."""
        fill(struct, self._batch, self.device, self._awaited())

    def fills(self) -> Iterator[Fill]:
        """This one."""
        return iter([self.fill])

    def _awaited(self) -> int | None:
        """The event that others wait for, which is there for as long as the memory of the body.

        libarrow keeps no validity where nothing is null. Where it has kept nothing else either, nothing keeps the
        event: then it is waited for here.
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
    """A copy of what lies on a device. Raises DeviceError."""
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
    """Reads record batches onto a device, or where they lie there. It is read once.

    Use it as a context manager, or `close` it; dropping it does, too. Reading raises what the reader raises that it
    reads from, DeviceError, and DeviceFull.
    """

    def __init__(
        self, device: Device, schema: pa.Schema, batches: Generator[DeviceBatch, None, None], close: Callable[[], None]
    ) -> None:
        #: Where batches lie.
        self.device = device
        self.schema = schema
        self._batches = RaisingAgain(batches)
        self._closes = self._batches.close, close

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> DeviceBatch:
        return self.read_next_batch()

    def read_next_batch(self) -> DeviceBatch:
        """The next batch. Raises StopIteration at the end, and never there after an error: that is raised again."""
        return next(self._batches)

    def close(self) -> None:
        """Read no more. What has been read stays."""
        for close in self._closes:
            close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __arrow_c_device_stream__(self, requested_schema: object = None, **options: Any) -> Any:
        """What is left, for other libraries."""
        check_request(requested_schema, self.schema, options)
        return export_stream(self.schema, self.device, self.fills())

    def fills(self) -> Iterator[Fill]:
        """Each batch that is left."""
        return map(attrgetter("fill"), self)


#: Goes on with a stream that ends early, given how it began: its schema and the dictionaries there are.
GoOn: TypeAlias = Callable[[Messages], pa.RecordBatchReader | None]


def join_on_device(
    device: Device,
    messages: Generator[DeviceMessage, None, None],
    options: ReadOptions | None = None,
    go_on: GoOn = lambda begin: None,
) -> DeviceReader:
    """A reader over the stream that `messages` make, the schema first. Raises what libarrow finds wrong with them.

    Where they end, `go_on` may have a reader of more, which is copied to the device.
    """
    seen = _Seen()
    # What would have libarrow look into bodies, or copy them.
    options = replace(options or ReadOptions(), ensure_native_endian=False, ensure_alignment=pa.ipc.Alignment.Any)
    reader = join(seen.follow(messages), options)

    def batches() -> Generator[DeviceBatch, None, None]:
        yield from _batches(device, reader, seen, messages)
        more = go_on(_messages_on_host(device, seen.take()))
        if more is not None:
            yield from to_device(more, device)

    return DeviceReader(device, reader.schema, batches(), partial(close_idle, messages))


class _Seen:
    """What the next batch of a stream needs of it. It must not refer to the reader, which owns it through C++."""

    def __init__(self) -> None:
        self._begin: tuple[DeviceMessage, ...] = ()
        self._layout: SchemaLayout | None = None
        self._dictionaries: dict[int, DeviceMessage] = {}
        self._last: tuple[DeviceMessage, ...] = ()

    def take(self) -> tuple[DeviceMessage, ...]:
        """The schema, the dictionaries, and the batch that was read last, which is forgotten: its memory is others'."""
        last, self._last = self._last, ()
        return (*self._begin, *self._dictionaries.values(), *last)

    def follow(self, messages: Generator[DeviceMessage, None, None]) -> Messages:
        """The same for libarrow. Raises DeviceError for a dictionary that grows: libarrow would put it together.

        And RemoteProtocolError for buffers that are shorter than their rows need: whoever takes a column reads all of
        it, and libarrow's own validation would look into memory of the device.
        """
        with closing(messages):
            yield from map(self._note, messages)  # and not in a loop, whose variable would hold a body

    def _note(self, message: DeviceMessage) -> EncodedMessage:
        match message.parsed.type:
            case HeaderType.SCHEMA:
                self._begin = (message,)
                self._layout = layout_of(message.header)
                return message.header, message.body
            case HeaderType.DICTIONARY_BATCH:
                number, delta = dictionary_of(message.header)
                if delta:
                    raise DeviceError("a dictionary that grows cannot be put together on a device")
                self._dictionaries[number] = message
            case _:
                self._last = (message,)
        if self._layout is None:
            raise RemoteProtocolError("the peer sent a schema that cannot be read")
        self._layout.check_sizes(message.header, message.parsed)
        return message.header, message.body


def _batches(
    device: Device, reader: StreamReader, seen: _Seen, source: Generator[DeviceMessage, None, None]
) -> Generator[DeviceBatch, None, None]:
    with closing(source), suppress(StopIteration):
        while True:
            yield DeviceBatch(device, *reader.read_next_batch_with_custom_metadata(), seen.take())


def chain_on_device(device: Device, readers: Sequence[DeviceReader]) -> DeviceReader:
    """What these give, one after the other. There is at least one."""

    def chained() -> Generator[DeviceBatch, None, None]:
        for reader in readers:
            yield from reader

    def close() -> None:
        for reader in readers:
            reader.close()

    return readers[0] if len(readers) == 1 else DeviceReader(device, readers[0].schema, chained(), close)


def to_device(reader: pa.RecordBatchReader, device: Device) -> DeviceReader:
    """What `reader` gives, copied onto a device, batch by batch, as they are asked for. The reader is closed with it.

    Copies are asynchronous: a batch is given while it is under way. A segment that is read in place is made known to
    the driver, once, for as long as it is copied from.
    """
    return join_on_device(device, _moved(reader, device))


def _moved(reader: pa.RecordBatchReader, device: Device) -> Generator[DeviceMessage, None, None]:
    splitter = Splitter(reader.schema, LAYOUT)
    with closing(reader), closing(Mover(device)) as mover:
        yield DeviceMessage(splitter.schema_message.header, splitter.schema_message.parsed, None)
        if isinstance(reader, MappedReader):
            mover.register([region.memory for region in reader.regions])
        for batch, metadata in batches(reader):
            for message in splitter.split(batch, metadata):
                yield mover.move_split(message)


class Mover:
    """Copies bodies onto a device, and keeps what they are copied from until they are there."""

    def __init__(self, device: Device) -> None:
        #: Where to.
        self.device = device
        self._copies = Copies(device)
        self._events: deque[Event] = deque()

    def move_split(self, message: SplitMessage) -> DeviceMessage:
        """Copy a message whose body is in parts, each of which begins with a buffer."""
        header, parsed, body = message
        parts = {at: pa.py_buffer(part) for at, part in by_position(body or ()).items()}
        offsets, lengths = buffer_extents(header, parsed)
        addresses = [parts[at].address if length else 0 for at, length in zip(offsets, lengths, strict=True)]
        return self.move(header, parsed, addresses, parts)

    def move(self, header: bytes, parsed: Header, addresses: Sequence[int], sources: object) -> DeviceMessage:
        """Copy the buffers of a message from where they lie, here or on the device; `sources` keep them there.

        Raises RemoteProtocolError where one leaves its body, DeviceError, and DeviceFull.
        """
        if not parsed.body_length:
            return DeviceMessage(header, parsed, pa.py_buffer(b""))
        offsets, lengths = extents_within(header, parsed, parsed.body_length)  # where a peer says that they lie
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
            self._copies.let_go()
        return DeviceMessage(header, parsed, memory.buffer(), event)

    def register(self, memory: Sequence[pa.Buffer]) -> None:
        """Bodies lie in this memory: let the driver know, until this is closed."""
        for one in memory:
            if one.size >= _WORTH_REGISTERING:
                self.device.register(one, self._copies.afterwards)

    def settle(self) -> None:
        """Let go of what was copied, once it has been: where one cannot wait, later."""
        self._events.clear()
        with suppress(DeviceError):
            self._copies.wait()

    def close(self) -> None:
        """The same, and let the driver forget what was registered. Where one cannot wait, the device does it later."""
        self._copies.close()
