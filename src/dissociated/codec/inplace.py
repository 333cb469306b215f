"""Reading of streams that lie in shared memory exactly in the form of an IPC stream: libarrow reads them there itself.

A segment is an IPC stream. If every message that arrives equals the segment's content at the addresses of its body, one
message after the other, then nothing must be paired or patched, and libarrow can read the segment.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from dissociated.codec.options import ReadOptions
from dissociated.codec.reader import PeerReader, Readable
from dissociated.errors import StoreError
from dissociated.format.encapsulated import encapsulate, first_message_at
from dissociated.format.message import buffer_extents, is_compressed
from dissociated.memory.region import AddressSpace, Region
from dissociated.protocol.delivery import Delivery, PackedBatches, SharedBatches

#: Returns the same memory as a buffer; the addresses are given back when the buffer is freed.
Hold = Callable[[pa.Buffer, Sequence[int]], pa.Buffer]


class MappedReader(PeerReader):
    """A reader of a stream in shared memory, whose batches take no other memory."""

    def __init__(
        self,
        source: object,
        options: ReadOptions | None,
        schema: bytes,
        regions: Sequence[Region],
        ends: Sequence[int],
    ) -> None:
        """Open the stream.

        Args:
            source: The memory or file from which libarrow reads.
            options: The options of reading.
            schema: The encapsulated message with which `source` begins.
            regions: The regions that contain the batches.
            ends: For each region, the position after the last batch.
        """
        self._lock = threading.RLock()  # `close` replaces libarrow's reader while no other thread uses it
        self._closed = False
        self._empty_stream = schema
        super().__init__(source, options)
        #: The regions of shared memory that contain the batches.
        self.regions = regions
        #: For each region, the position after the last batch.
        self.ends = ends

    @property
    def schema(self) -> pa.Schema:
        """The schema of all batches."""
        with self._lock:
            return self._last_schema if self._closed else super().schema

    @property
    def stats(self) -> pa.ipc.ReadStats:
        """Counters of the messages read so far."""
        with self._lock:
            return self._last_stats if self._closed else super().stats

    def read_next_batch(self) -> pa.RecordBatch:
        """Return the next batch. Raises StopIteration at the end."""
        with self._lock:
            self._check_open()
            return super().read_next_batch()

    def read_next_batch_with_custom_metadata(self) -> tuple[pa.RecordBatch, pa.KeyValueMetadata | None]:
        """Return the next batch and the metadata of its message. Raises StopIteration at the end."""
        with self._lock:
            self._check_open()
            return super().read_next_batch_with_custom_metadata()

    def read_all(self) -> pa.Table:
        """Return all remaining batches as one table."""
        with self._lock:
            self._check_open()
            return super().read_all()

    def __arrow_c_stream__(self, requested_schema: object = None) -> Any:
        with self._lock:
            self._check_open()
            return super().__arrow_c_stream__(requested_schema)

    def close(self) -> None:
        """Stop reading, and release the stream. Batches that were read stay valid."""
        with self._lock:
            if self._closed:
                return
            self._last_schema, self._last_stats = super().schema, super().stats
            self._closed = True
            super().close()
            # libarrow's reader keeps its source until it is deleted. Opening another one deletes it.
            pa.ipc.RecordBatchStreamReader.__init__(self, self._empty_stream)
            self.regions = ()

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

    def reader(self, hold: Hold, options: ReadOptions | None) -> pa.RecordBatchReader | None:
        """Return a reader of libarrow over the whole stream; None if nothing of it lies in shared memory."""
        if not self._streams:
            return None
        pieces: list[pa.Buffer] = []
        for part in self._streams:
            whole = hold(part.region.memory, np.concatenate(part.leased).tolist() if part.leased else [])
            start = part.start + len(self._schema) if pieces else part.start  # the first piece has the only schema
            pieces.append(whole.slice(start, part.end - start))
        source = pieces[0] if len(pieces) == 1 else pa.PythonFile(_ChainedFile(pieces), mode="r")
        regions = [part.region for part in self._streams]
        return MappedReader(source, options, self._schema, regions, [part.end for part in self._streams])

    def message(self, delivery: Delivery) -> bool:
        """Return whether this message lies in place."""
        if not delivery.parsed.has_body or delivery.body:
            return False
        leased = delivery.leased
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
            part.leased.append(np.array(leased, np.uint64))
        part.end = body_at + delivery.parsed.body_length
        return part.end <= part.region.size

    def packed(self, batches: PackedBatches) -> bool:
        """Return False: packed bodies do not lie in shared memory."""
        return False

    def shared(self, batches: SharedBatches) -> bool:
        """Return whether all of these batches lie in place."""
        part = self._stream_at(int(batches.leased[0]))
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
        encapsulated = part.memory[starts[:, None] + np.arange(len(head) + width)]
        prefixes, headers = encapsulated[:, : len(head)], encapsulated[:, len(head) :]
        if (prefixes != np.frombuffer(head, np.uint8)).any() or (headers != batches.headers).any():
            return False
        part.leased.append(batches.leased)
        part.end = int(ends[-1])
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
