"""Decoding of deliveries to record batches, in which small batches that arrived together are decoded at once.

A run of small batches is copied to an IPC stream of its own, which libarrow reads from one buffer. Copying takes less
time than three calls of Python for each batch. C++ code reads the batches one by one from the Python file.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from itertools import islice
from typing import TypeAlias, TypeVar

import numpy as np
import pyarrow as pa

from dissociated.base.buffers import MAX_BODY
from dissociated.codec.join import EncodedMessage, StreamFile
from dissociated.codec.options import ReadOptions
from dissociated.codec.reader import PeerReader, StreamReader
from dissociated.format.encapsulated import encapsulate
from dissociated.format.layout import layout_of
from dissociated.format.message import is_compressed
from dissociated.format.missed import take_missed
from dissociated.protocol.delivery import Delivered, Delivery, PackedBatches, SharedBatches

T = TypeVar("T")

_ALIGNMENT = 8  # bytes; alignment of messages in a stream
#: The least number of batches of a run, and the largest body, in bytes, that is copied.
_MIN_BATCH_RUN = 32
_MAX_COPY = 1 << 12

#: Returns the flatbuffer and the body of a message in the form that libarrow reads.
Attach: TypeAlias = Callable[[Delivery], EncodedMessage]


def join_deliveries(
    deliveries: Generator[Delivered, None, None],
    attach: Attach,
    options: ReadOptions,
    max_body: int = MAX_BODY,
    takes_missed: bool = False,
) -> StreamReader:
    """Return a reader over the stream of `deliveries`, with the errors of `join`.

    `attach` is called for each message except runs of small batches, and never after the end of the stream. Notes of
    missed batches are removed if `takes_missed`.
    """
    return _RunReader(_DeliveryFile(deliveries, attach, options, max_body, takes_missed), options)


class _BatchRun:
    """Record batches that arrived together, to be read by a reader of libarrow or taken as messages."""

    def __init__(self, batches: PackedBatches, schema: bytes, options: ReadOptions) -> None:
        self.remaining = len(batches.headers)
        self._batches = batches
        #: A reader of the remaining batches, if they were copied to a stream. Its caller decrements `remaining`.
        self.reader: StreamReader | None = None
        if self.remaining >= _MIN_BATCH_RUN and _may_copy(batches, schema):
            self.reader = PeerReader(_to_ipc_stream(batches, schema, options.memory_pool), options)

    def messages(self) -> Iterator[EncodedMessage]:
        """Yield the remaining batches as messages. Once the first is taken, `reader` is None."""
        self.reader = None
        for delivery in islice(self._batches.expand(), len(self._batches.headers) - self.remaining, None):
            self.remaining -= 1
            yield delivery.header, delivery.body


def _may_copy(batches: PackedBatches, schema: bytes) -> bool:
    """Return whether these batches can be copied to a stream of their own, which has no dictionaries."""
    body_length, layout = batches.parsed.body_length, layout_of(schema)
    return (
        body_length <= _MAX_COPY
        and not body_length % _ALIGNMENT
        and layout is not None
        and not layout.values
        and bool((batches.headers == batches.headers[0]).all())
        and not is_compressed(batches.headers[0].tobytes())
    )


def _to_ipc_stream(batches: PackedBatches, schema: bytes, pool: pa.MemoryPool | None) -> pa.Buffer:
    """Return the batches as an IPC stream in one buffer."""
    begin, head = encapsulate(schema), encapsulate(batches.headers[0].tobytes())
    count, body_length = len(batches.headers), batches.parsed.body_length
    size = len(head) + body_length
    stream = pa.allocate_buffer(len(begin) + count * size, pool)
    memory = np.frombuffer(stream, np.uint8)
    memory[: len(begin)] = np.frombuffer(begin, np.uint8)
    rows = memory[len(begin) :].reshape(count, size)
    rows[:, : len(head)] = np.frombuffer(head, np.uint8)
    rows[:, len(head) :] = np.frombuffer(batches.bodies, np.uint8).reshape(count, body_length)
    return stream


class _DeliveryFile(StreamFile):
    """A file of the messages of deliveries, for libarrow, from which whole runs can be taken instead."""

    def __init__(
        self,
        deliveries: Generator[Delivered, None, None],
        attach: Attach,
        options: ReadOptions,
        max_body: int,
        takes_missed: bool,
    ) -> None:
        super().__init__(deliveries, max_body, _RunReader.error_type)
        self._deliveries = deliveries
        self._attach = attach
        self._options = options
        self._takes_missed = takes_missed
        self._schema = b""
        self._run: _BatchRun | None = None  # the current run
        self._messages: Iterator[EncodedMessage] = iter(())  # of the current delivery
        self.missed = 0  # number of batches of a live stream that this client missed

    def run(self) -> _BatchRun | None:
        """Return the run that comes next in the stream; None if something else comes next.

        Call this only between messages.
        """
        run = self._run  # copied, because another thread may close this file
        if (run is None or not run.remaining) and not self._pieces:
            self._refill()
        return self._run

    def _next(self) -> EncodedMessage | None:
        """Return the next message; None if a run begins, which the reader may take as a whole."""
        run = self._run
        if run is not None and not run.remaining:
            self._run, self._messages = None, iter(())
        while (message := next(self._messages, None)) is None:
            next(self._deliveries).accept(self)
            if self._run is not None:
                return None
        self._schema = self._schema or message[0]
        header, missed = take_missed(message[0]) if self._takes_missed else (b"", None)
        if missed is None:
            return message
        self.missed = missed
        return header, message[1]

    def message(self, delivery: Delivery) -> None:
        """Continue the stream with this message."""
        self._messages = map(self._attach, delivery.expand())  # `map` keeps no body once it is taken

    def packed(self, batches: PackedBatches) -> None:
        """Continue the stream with this run."""
        self._run = _BatchRun(batches, self._schema, self._options)
        self._messages = self._run.messages()

    def shared(self, batches: SharedBatches) -> None:
        """Continue the stream with these batches, one by one."""
        self._messages = map(self._attach, batches.expand())

    def close(self) -> None:
        super().close()
        self._run, self._messages = None, iter(())


class _RunReader(PeerReader):
    """A reader of the messages of a file, which takes whole runs directly."""

    def __init__(self, file: _DeliveryFile, options: ReadOptions) -> None:
        self._file = file
        self._past = 0  # batches that were read from runs, which libarrow does not count
        super().__init__(file, options)

    def read_next_batch(self) -> pa.RecordBatch:
        run = self._file.run()
        if run is None or run.reader is None:
            return super().read_next_batch()
        return self._take(run, run.reader.read_next_batch)

    def read_next_batch_with_custom_metadata(self) -> tuple[pa.RecordBatch, pa.KeyValueMetadata | None]:
        run = self._file.run()
        if run is None or run.reader is None:
            return super().read_next_batch_with_custom_metadata()
        return self._take(run, run.reader.read_next_batch_with_custom_metadata)

    def close(self) -> None:
        """Stop reading, and end the stream. Batches that were read stay valid."""
        super().close()
        self._file.close()

    def _take(self, run: _BatchRun, read: Callable[[], T]) -> T:
        """Return the next batch of a run, which `read` reads directly."""

        def read_next() -> T:
            run.remaining -= 1
            self._past += 1
            return read()

        return self._file.reading.take(read_next)

    @property
    def missed(self) -> int:
        """The number of batches of a live stream that this client missed before the last batch that it read."""
        return self._file.missed

    @property
    def stats(self) -> pa.ipc.ReadStats:
        stats = super().stats
        return stats._replace(
            num_messages=stats.num_messages + self._past, num_record_batches=stats.num_record_batches + self._past
        )
