"""IPC messages into record batches, whose arrays lie in the bodies as they arrived.

libarrow does all the decoding: it reads an IPC stream from a Python source, which hands over each body as one
buffer. Dictionaries, deltas, byte order, projection and validation are libarrow's.

A run of small batches is put together as an IPC stream of its own, which libarrow reads from one buffer: to copy them
is less than to call Python three times for each. Who reads through C++ gets them from the Python source, one by one.
"""

from __future__ import annotations

import struct
from collections.abc import Generator, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa

from dissociated.buffers import MAX_BODY, Buffer
from dissociated.codec.options import ReadOptions, check_options
from dissociated.codec.pyfile import Readable
from dissociated.codec.reader import PeerReader, StreamReader
from dissociated.errors import DissociatedError, RemoteProtocolError
from dissociated.format.encapsulated import END_OF_STREAM, encapsulate
from dissociated.format.layout import layout_of
from dissociated.format.message import is_compressed, uncompressed_length
from dissociated.protocol.run import PackedBatches

_length = struct.Struct("<i")
_ALIGNMENT = 8  # of messages in a stream
#: How many batches are worth a stream of their own, and how many bytes of body each may have to be copied into it.
_MIN_BATCH_RUN = 32
_MAX_COPY = 1 << 12

#: What `join` consumes: flatbuffer and body (None without one) of each message, or batches that arrived together.
Messages = Generator[tuple[bytes, Buffer | None] | PackedBatches, None, None]


class _BatchRun:
    """Record batches that arrived together: each can be had as a message, or by libarrow."""

    def __init__(self, batches: PackedBatches, schema: bytes, options: ReadOptions) -> None:
        self.remaining = len(batches.headers)
        self._batches = batches
        self._messages: Iterator[tuple[bytes, Buffer | None]] | None = None
        #: libarrow's of those that are left, if it has them in one buffer. Who takes one counts down `remaining`.
        self.reader: StreamReader | None = None
        if self.remaining >= _MIN_BATCH_RUN and _may_copy(batches, schema):
            self.reader = PeerReader(_to_ipc_stream(batches, schema, options.memory_pool), options)

    def message(self) -> tuple[bytes, Buffer | None]:
        """The next one as it came. From then on they can be had no other way."""
        if self._messages is None:
            self.reader = None
            rest = islice(self._batches.expand(), len(self._batches.headers) - self.remaining, None)
            self._messages = ((one.header, one.body) for one in rest)
        self.remaining -= 1
        return next(self._messages)


def _may_copy(batches: PackedBatches, schema: bytes) -> bool:
    """Whether these batches can be copied into a stream of their own, which would know no dictionaries."""
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
    """The same as an IPC stream."""
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


class _MessageFile(Readable):
    """The file that libarrow reads from. It asks for a length, the metadata, and the whole body."""

    def __init__(self, messages: Messages, options: ReadOptions, max_body: int, blame: type[DissociatedError]) -> None:
        self._messages = messages
        self._options = options
        self._max_body = max_body
        self._blame = blame
        self._schema = b""
        self._run: _BatchRun | None = None  # which the stream goes on with
        self._pieces: list[Buffer] = []  # of the current message, last first
        self._ended = False
        self._failed: tuple[type[DissociatedError], str] | None = None

    def read(self, size: int = -1) -> Buffer:
        if not size:
            return b""
        pieces = self._pieces
        if not pieces:
            self._refill()
            if not pieces:
                return b""
        piece = pieces.pop()
        if len(piece) > size:  # libarrow reads as it says above, but a peer's lengths need not agree
            piece = memoryview(piece)
            pieces.append(piece[size:])
            piece = bytes(piece[:size])
        return piece

    def run(self) -> _BatchRun | None:
        """The run that the stream goes on with; None where something else comes next. To be asked between messages."""
        if (self._run is None or not self._run.remaining) and not self._pieces:
            self._refill(whole=True)
        return self._run

    def _refill(self, whole: bool = False) -> None:
        """Have the pieces of the next message; or a run, if one begins that is wanted `whole`."""
        if self._failed is not None:  # what looks like an end now would be taken for one
            kind, reason = self._failed
            raise kind(reason)
        if self._ended:
            return
        if self._run is not None and not self._run.remaining:
            self._run = None
        try:
            item = next(self._messages) if self._run is None else self._run.message()
            if isinstance(item, PackedBatches):
                self._run = _BatchRun(item, self._schema, self._options)
                if whole:
                    return
                item = self._run.message()
            header, body = item
            if body is not None:
                self._check_size(header, body)
        except StopIteration:
            self._ended = True
            self._pieces += (END_OF_STREAM[4:], END_OF_STREAM[:4])
            return
        except BaseException as error:
            # Not the error itself: its traceback leads to the reader, which owns this through C++, unseen by the GC.
            self._failed = (type(error) if isinstance(error, DissociatedError) else DissociatedError), str(error)
            raise
        self._schema = self._schema or header
        if body is not None and len(body):
            self._pieces.append(body)
        self._pieces += (header, _length.pack(len(header)))  # the older prefix: one call fewer, and nobody sees it

    def _check_size(self, header: bytes, body: Buffer) -> None:
        """Raise where so much would come out of a body that libarrow is not to be given it."""
        try:
            length = uncompressed_length(header, body) if is_compressed(header) else 0
        except RemoteProtocolError:
            return  # libarrow will say what is wrong with it
        if length > self._max_body:
            raise self._blame(
                f"a body of {len(body)} bytes would have {length} when it is decompressed; "
                f"at most {self._max_body} are taken (max_body)"
            )

    def close(self) -> None:
        super().close()
        self._messages.close()


def message_file(messages: Messages) -> pa.PythonFile:
    """The stream that `messages` make, the schema first, as a file for libarrow to read from."""
    return pa.PythonFile(_MessageFile(messages, ReadOptions(), MAX_BODY, RemoteProtocolError), mode="r")


class _JoinedReader(PeerReader):
    """Reads what a source gives, and runs past it."""

    def __init__(self, source: _MessageFile, options: ReadOptions) -> None:
        self._source = source
        self._past = 0  # batches
        super().__init__(source, options)

    def read_next_batch(self) -> pa.RecordBatch:
        reader: Any = self._run() or super()
        return reader.read_next_batch()

    def read_next_batch_with_custom_metadata(self) -> tuple[pa.RecordBatch, pa.KeyValueMetadata | None]:
        reader: Any = self._run() or super()
        return reader.read_next_batch_with_custom_metadata()  # type: ignore[no-any-return]

    def _run(self) -> StreamReader | None:
        """A reader that gives the next batch; None where the source does."""
        run = self._source.run()
        if run is None or run.reader is None:
            return None
        run.remaining -= 1
        self._past += 1
        return run.reader

    @property
    def stats(self) -> pa.ipc.ReadStats:
        stats = super().stats
        return stats._replace(
            num_messages=stats.num_messages + self._past, num_record_batches=stats.num_record_batches + self._past
        )


def join(
    messages: Messages,
    options: ReadOptions | None = None,
    kind: type[StreamReader] | None = None,
    max_body: int = MAX_BODY,
) -> StreamReader:
    """A reader over the stream that `messages` make, the schema first.

    It pulls from `messages` only when it is asked for a batch, and closes them when it is dropped or exhausted.
    Whatever they raise comes out of the reader. Raises RemoteProtocolError where libarrow finds the content
    invalid, or what another `kind` of reader raises; and where a body would have more than `max_body` bytes when it is
    decompressed, before it is.
    """
    kind = kind or _JoinedReader
    options = check_options(options, ReadOptions)
    return kind(_MessageFile(messages, options, max_body, kind.blame), options)
