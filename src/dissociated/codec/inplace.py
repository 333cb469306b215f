"""Reading of streams that lie in shared memory exactly in the form of an IPC stream: libarrow reads them there itself.

A segment is an IPC stream. If every message that arrives equals the segment's content at the addresses of its body, one
message after the other, then nothing must be paired or patched, and libarrow can read the segment.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from dissociated.codec.batches import BatchReader
from dissociated.codec.options import ReadOptions
from dissociated.codec.reader import PeerReader, Readable, Reading
from dissociated.codec.split import BatchAndMetadata, batches
from dissociated.errors import StoreError
from dissociated.format.encapsulated import encapsulate, first_message_at
from dissociated.format.layout import layout_of
from dissociated.format.message import buffer_extents, is_compressed
from dissociated.memory.region import AddressSpace, Region
from dissociated.protocol.delivery import Delivery, PackedBatches, SharedBatches

T = TypeVar("T")

#: Least number of messages after which the beginning of a stream is read before the rest is compared.
_LONG = 64

#: Returns the same memory as a buffer; the addresses are given back when the buffer is freed.
Hold = Callable[[pa.Buffer, Sequence[int]], pa.Buffer]


class StreamPlace(NamedTuple):
    """The memory from which libarrow reads a stream, or the beginning of one.

    Attributes:
        source: The memory, or a file of it. It begins with the schema.
        regions: The regions of shared memory that contain the batches.
        ends: For each region, the position after the last batch.
        at: The position in `source` of the next message to read; None for the message after the schema.
    """

    source: pa.NativeFile
    regions: Sequence[Region]
    ends: Sequence[int]
    at: int | None = None


class Tail(NamedTuple):
    """The rest of a stream, of which only the beginning was compared.

    Attributes:
        compare: Compares the rest, once, for a reader at a position in the source of the beginning. It returns the
            place of the whole stream, to be read from that position; or, if the rest does not lie in place, a reader of
            the rest.
        is_due: Returns whether the rest should be compared now, because its sender has waited for some time.
        interrupt: Makes `compare` fail in another thread. Never raises.
        close: Ends the stream.
    """

    compare: Callable[[int], StreamPlace | pa.RecordBatchReader]
    is_due: Callable[[], bool]
    interrupt: Callable[[], None]
    close: Callable[[], None]


class MappedReader(PeerReader):
    """A reader of a stream that lies in memory. In shared memory, batches take no other memory if it `is_mapped`."""

    def __init__(
        self, schema: bytes, place: StreamPlace, options: ReadOptions | None, tail: Tail | None = None
    ) -> None:
        """Open the stream.

        Args:
            schema: The encapsulated message with which the source begins.
            place: The place of the stream.
            options: The options of reading.
            tail: The rest of the stream if `place` is that of its beginning only.
        """
        self._lock = threading.RLock()  # `close` replaces libarrow's reader while no other thread uses it
        self._closed = False
        self._empty_stream = schema
        self._place = place
        self._tail = tail
        self._comparing = Reading()
        self._elsewhere: pa.RecordBatchReader | None = None  # reader of a rest that does not lie in place
        self._before = pa.ipc.ReadStats(0, 0, 0, 0, 0)  # of the beginning
        super().__init__(place.source, options)
        self._options = options

    @property
    def schema(self) -> pa.Schema:
        """The schema of all batches."""
        with self._lock:
            return self._last_schema if self._closed else super().schema

    @property
    def stats(self) -> pa.ipc.ReadStats:
        """Counters of the messages read so far."""
        with self._lock:
            now = self._last_stats if self._closed else super().stats
            return pa.ipc.ReadStats(*map(sum, zip(self._before, now, strict=True)))

    @property
    def is_mapped(self) -> bool:
        """Return whether all batches lie in the `regions`. The rest of the stream is compared for this."""
        with self._lock:
            self._complete()
            return self._elsewhere is None

    @property
    def regions(self) -> Sequence[Region]:
        """Return the regions of shared memory that contain the batches that lie there."""
        with self._lock:
            self._complete()
            return self._place.regions

    @property
    def ends(self) -> Sequence[int]:
        """Return, for each region, the position after the last batch."""
        with self._lock:
            self._complete()
            return self._place.ends

    def read_next_batch(self) -> pa.RecordBatch:
        """Return the next batch. Raises StopIteration at the end."""
        return self._next(super().read_next_batch, "read_next_batch")

    def read_next_batch_with_custom_metadata(self) -> tuple[pa.RecordBatch, pa.KeyValueMetadata | None]:
        """Return the next batch and the metadata of its message. Raises StopIteration at the end."""
        return self._next(super().read_next_batch_with_custom_metadata, "read_next_batch_with_custom_metadata")

    def _next(self, read: Callable[[], T], name: str) -> T:
        with self._lock:
            self._check_open()
            if self._elsewhere is None:
                if self._tail is None:
                    return read()
                self._comparing.check()
                if not self._tail.is_due():
                    try:
                        return read()
                    except StopIteration:
                        self._at_end = False
                self._complete()
            if self._elsewhere is None:
                return read()
            with suppress(StopIteration):  # batches of the beginning that were not read yet
                return read()
            self._at_end = False
            try:
                item: T = getattr(self._elsewhere, name)()
            except StopIteration:
                self._at_end = True
                raise
            return item

    def read_all(self) -> pa.Table:
        """Return all remaining batches as one table."""
        with self._lock:
            self._check_open()
            self._complete()
            if self._elsewhere is None:
                return super().read_all()
            self._begin()
            table = pa.Table.from_batches((batch for batch, _ in self._remaining(self._elsewhere)), self.schema)
            self._at_end = True
            return table

    def __arrow_c_stream__(self, requested_schema: object = None) -> Any:
        with self._lock:
            self._check_open()
            self._complete()
            if self._elsewhere is None:
                return super().__arrow_c_stream__(requested_schema)
            self._begin()
            self._at_end = True  # the consumer of the stream reads all batches
            reader = BatchReader(self.schema, self._remaining(self._elsewhere))
            return reader.__arrow_c_stream__(requested_schema)

    def _remaining(self, elsewhere: pa.RecordBatchReader) -> Iterator[BatchAndMetadata]:
        """Yield the batches of the beginning that were not read, and those of the rest."""
        with suppress(StopIteration):
            while True:
                with self._lock:
                    pair = super().read_next_batch_with_custom_metadata()
                yield pair
        yield from batches(elsewhere)

    def _complete(self) -> None:
        """Compare the rest of the stream, and continue in its place.

        Raises the errors of `Tail.compare`, also when this is called again.
        """
        if self._tail is None or self._closed:
            return
        continuation = self._comparing.take(partial(self._tail.compare, self._place.source.tell()))
        if isinstance(continuation, StreamPlace):
            self._before, at_end = self.stats, self._at_end
            self._before = self._before._replace(num_messages=self._before.num_messages - 1)  # the schema comes again
            # libarrow's reader cannot change its source, so this object becomes another reader of libarrow.
            super().__init__(continuation.source, self._options)
            if continuation.at is not None:
                continuation.source.seek(continuation.at)
            self._place, self._at_end = continuation, at_end
        else:
            self._elsewhere = continuation
        self._tail = None

    def close(self) -> None:
        """Stop reading, and release the stream. Batches that were read stay valid."""
        tail = self._tail
        if tail is not None:
            tail.interrupt()  # another thread may compare it under the lock
        with self._lock:
            if self._closed:
                return
            self._last_schema, self._last_stats = super().schema, super().stats
            self._closed = True
            super().close()
            # libarrow's reader keeps its source until it is deleted. Opening another one deletes it.
            pa.ipc.RecordBatchStreamReader.__init__(self, self._empty_stream)
            self._place = StreamPlace(pa.BufferReader(self._empty_stream), (), ())
            self._tail = None
            if tail is not None:
                tail.close()
            if self._elsewhere is not None:
                self._elsewhere.close()

    def _check_open(self) -> None:
        if self._closed and not self._at_end:
            raise StoreError("this reader was closed before its end")


class _MappedStream:
    """The part of a stream that was found in a region: an IPC stream from `start` to `end` so far."""

    def __init__(self, region: Region, start: int, end: int) -> None:
        self.region = region
        self.memory = np.frombuffer(region.memory, np.uint8)
        self.start = start
        self.end = end
        self.leased: list[np.ndarray] = []
        self.whole: pa.Buffer | None = None  # the memory of the region, with the leases so far

    def holds(self, at: int, content: bytes) -> bool:
        return self.memory[at : at + len(content)].tobytes() == content


class _ChainedFile(Readable):
    """A file of consecutive pieces of a stream, each of whole messages, for libarrow."""

    def __init__(self, pieces: Sequence[pa.Buffer]) -> None:
        self._pieces = [*reversed(pieces)]
        self._at = 0  # position in the last piece

    def read(self, size: int = -1) -> pa.Buffer | bytes:
        while self._pieces and self._at == self._pieces[-1].size:
            self._pieces.pop()
            self._at = 0
        if not self._pieces:
            return b""
        piece = self._pieces[-1].slice(self._at, size)
        self._at += piece.size
        return piece

    def close(self) -> None:
        super().close()
        self._pieces = []


class InPlace:
    """A check that a whole stream, from its schema on, lies in place in shared memory.

    It is a DeliveryVisitor: its methods return whether a delivery has the place that it has in an IPC stream. After the
    first delivery without this place, the check must not be used any more.
    """

    def __init__(self, schema: bytes, address_space: AddressSpace) -> None:
        self._schema = encapsulate(schema)
        self._address_space = address_space
        self._streams: list[_MappedStream] = []
        layout = layout_of(schema)
        self._has_dictionaries = layout is None or bool(layout.values)
        self._batches = 0  # number of messages that were compared

    @property
    def can_begin(self) -> bool:
        """Return whether the beginning that was compared can be read, and the rest be compared later."""
        return self._batches >= _LONG and len(self._streams) == 1 and not self._has_dictionaries

    def reader(self, hold: Hold, options: ReadOptions | None, tail: Tail | None = None) -> MappedReader | None:
        """Return a reader of libarrow over the whole stream; None if nothing of it lies in shared memory.

        If only the beginning was compared, `tail` compares the rest.
        """
        return MappedReader(self._schema, self.place(hold), options, tail) if self._streams else None

    def place(self, hold: Hold, at: int = 0) -> StreamPlace:
        """Return the place of the messages that were compared.

        Args:
            hold: Leases the memory.
            at: The position of the first message to read, counted from the beginning of the first region's stream. 0
                stands for the first message of all.
        """
        pieces: list[pa.Buffer] = []
        for part in self._streams:
            leased = np.concatenate(part.leased).tolist() if part.leased else []
            if leased or part.whole is None:  # the new lease keeps the one before, which ends with it
                part.whole = hold(part.region.memory if part.whole is None else part.whole, leased)
                part.leased = []
            start = part.start + len(self._schema) if pieces else part.start  # the first piece has the only schema
            pieces.append(part.whole.slice(start, part.end - start))
        regions, ends = [part.region for part in self._streams], [part.end for part in self._streams]
        if len(pieces) == 1:
            return StreamPlace(pa.BufferReader(pieces[0]), regions, ends, at or None)
        if at:
            pieces[:1] = [pieces[0].slice(0, len(self._schema)), pieces[0].slice(at)]
        return StreamPlace(pa.PythonFile(_ChainedFile(pieces), mode="r"), regions, ends)

    def message(self, delivery: Delivery) -> bool:
        """Return whether this message lies in place."""
        if not delivery.parsed.has_body or delivery.body:
            return False
        leased = () if delivery.addresses is None else delivery.addresses.leased
        if not (leased or self._streams):
            return False
        if delivery.addresses is not None and len(leased) != sum(map(bool, delivery.addresses.lengths)):
            return False  # an empty buffer has an address, perhaps outside all regions
        # An empty body has no address: the message must follow the last one.
        part = self._stream_at(leased[0]) if leased else self._streams[-1]
        if part is None:
            return False
        if is_compressed(delivery.header):
            return False  # only `join` limits the size of decompressed bodies
        head = encapsulate(delivery.header)
        body_at = part.end + len(head)
        if not part.holds(part.end, head):
            return False
        if leased:
            start = part.region.base + body_at
            extents = zip(*buffer_extents(delivery.header, delivery.parsed), strict=True)
            if leased != tuple(start + offset for offset, length in extents if length):
                return False
        if delivery.leased:
            part.leased.append(np.array(delivery.leased, np.uint64))
        part.end = body_at + delivery.parsed.body_length
        self._batches += 1
        return part.end <= part.region.size

    def packed(self, batches: PackedBatches) -> bool:
        """Return False: packed bodies do not lie in shared memory."""
        return False

    def shared(self, batches: SharedBatches) -> bool:
        """Return whether all of these batches lie in place."""
        part = self._stream_at(int(batches.addresses[0]))
        if part is None:
            return False
        width = batches.headers.shape[1]
        head = encapsulate(bytes(width))[:-width]
        if width % 8 or is_compressed(bytes(batches.headers[0])):
            return False
        body_at = batches.body_at.astype(np.int64) - part.region.base
        ends = body_at + batches.body_length.astype(np.int64)
        starts = body_at - (len(head) + width)
        if starts[0] != part.end or (starts[1:] != ends[:-1]).any() or ends[-1] > part.region.size:
            return False
        length, size = len(head) + width, int(ends[0] - starts[0])
        if (ends - starts == size).all():  # as of most batches of equal length: a view
            encapsulated = part.memory[starts[0] : ends[-1]].reshape(-1, size)[:, :length]
        else:
            encapsulated = part.memory[starts[:, None] + np.arange(length)]
        prefixes, headers = encapsulated[:, : len(head)], encapsulated[:, len(head) :]
        if (prefixes != np.frombuffer(head, np.uint8)).any() or (headers != batches.headers).any():
            return False
        part.leased.append(batches.leased)
        part.end = int(ends[-1])
        self._batches += len(batches.headers)
        return True

    def _stream_at(self, address: int) -> _MappedStream | None:
        """Return the part that contains `address`: the last part, or a new one after the schema of another region."""
        region = self._address_space.find(address)
        if self._streams and self._streams[-1].region is region:
            return self._streams[-1]
        if not region.static:  # only static regions hold whole streams
            return None
        start = first_message_at(memoryview(region.memory))
        part = _MappedStream(region, start, start + len(self._schema))
        if any(stream.region is region for stream in self._streams) or not part.holds(start, self._schema):
            return None
        self._streams.append(part)
        return part
