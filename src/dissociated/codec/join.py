"""IPC messages into record batches, whose arrays lie in the bodies as they arrived.

libarrow does all the decoding: it reads an IPC stream from a Python source, which hands over each body as one
buffer. Dictionaries, deltas, byte order, projection and validation are libarrow's. `join_deliveries` puts together
what arrived together.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Generator
from typing import TypeAlias

import pyarrow as pa

from dissociated.base.buffers import MAX_BODY, Buffer
from dissociated.base.exit import hold_at_exit, section
from dissociated.codec.options import ReadOptions, check_options
from dissociated.codec.reader import PeerReader, Readable, Reading, StreamReader, close_idle
from dissociated.errors import DissociatedError, RemoteProtocolError
from dissociated.format.encapsulated import END_OF_STREAM
from dissociated.format.message import is_compressed, uncompressed_length

_length = struct.Struct("<i")

#: A message as libarrow reads it: its flatbuffer, and its body, None where it has none.
EncodedMessage: TypeAlias = tuple[bytes, Buffer | None]
#: What `join` consumes.
Messages: TypeAlias = Generator[EncodedMessage, None, None]


class StreamFile(Readable, ABC):
    """The file that libarrow reads from. It asks for a length, the metadata, and the whole body.

    Closes `source`, which the messages come from, also where one of them cannot be had.
    """

    def __init__(
        self, source: Generator[object, None, None], max_body: int, error_type: type[DissociatedError]
    ) -> None:
        self._source = source
        self._max_body = max_body
        self._error_type = error_type
        self._pieces: list[Buffer] = []  # of the current message, last first
        self._uncompressed = b""  # a flatbuffer whose body is not
        self.reading = Reading()

    @section
    def read(self, size: int = -1) -> Buffer:
        """The next bytes of the stream: at most `size`, all in one buffer. Raises what `_next` raises."""
        hold_at_exit()
        if not size:
            return b""
        pieces = self._pieces
        while not pieces:
            if self.reading.ended:
                return b""
            self._refill()
        piece = pieces[-1]
        if len(piece) > size:  # libarrow reads as it says above, but a peer's lengths need not agree
            whole = memoryview(piece)
            piece, pieces[-1] = bytes(whole[:size]), whole[size:]
        else:
            del pieces[-1]  # at last: Ctrl-C before it must not lose a piece
        return piece

    @abstractmethod
    def _next(self) -> EncodedMessage | None:
        """The next message; None where the next call may have it. Raises StopIteration at the end."""

    def _refill(self) -> None:
        """Put the next message into `_pieces`, if `_next` has it, or the end of the stream."""
        if self.reading.ended:
            return
        try:
            self.reading.take(self._fill)
        except StopIteration:
            self._pieces += (END_OF_STREAM[4:], END_OF_STREAM[:4])
        except BaseException:
            self.reading.close()  # first: what is closed must not look like the end
            self._pieces.clear()
            close_idle(self._source)
            raise

    def _fill(self) -> None:
        message = self._next()
        self.reading.check_open()
        if message is None:
            return
        header, body = message
        if body is not None:
            self._check_size(header, body)
        pieces = [header, _length.pack(len(header))]  # the older prefix: one call fewer, and nobody sees it
        self._pieces += pieces if body is None or not len(body) else [body, *pieces]

    def _check_size(self, header: bytes, body: Buffer) -> None:
        """Raise where so much would come out of a body that libarrow is not to be given it."""
        if header == self._uncompressed:  # of small batches most are alike
            return
        try:
            if not is_compressed(header):
                self._uncompressed = header
                return
            length = uncompressed_length(header, body)
        except RemoteProtocolError:
            return  # libarrow will say what is wrong with it
        if length > self._max_body:
            raise self._error_type(
                f"a body of {len(body)} bytes would have {length} when it is decompressed; "
                f"at most {self._max_body} are taken (max_body)"
            )

    def close(self) -> None:
        """Read no more, and close the source. To read on raises StoreError, unless the stream had ended."""
        super().close()
        self.reading.close()
        close_idle(self._source)


class _MessageFile(StreamFile):
    """The messages, each as it comes."""

    def __init__(self, messages: Messages, max_body: int, error_type: type[DissociatedError]) -> None:
        super().__init__(messages, max_body, error_type)
        self._messages = messages

    def _next(self) -> EncodedMessage:
        return next(self._messages)


def message_file(messages: Messages) -> pa.PythonFile:
    """The stream that `messages` make, the schema first, as a file for libarrow to read from."""
    return pa.PythonFile(_MessageFile(messages, MAX_BODY, RemoteProtocolError), mode="r")


def join(
    messages: Messages,
    options: ReadOptions | None = None,
    kind: type[StreamReader] = PeerReader,
    max_body: int = MAX_BODY,
) -> StreamReader:
    """A reader over the stream that `messages` make, the schema first.

    It pulls from `messages` only when it is asked for a batch, and closes them when it is dropped or exhausted.
    Whatever they raise comes out of the reader. Raises RemoteProtocolError where libarrow finds the content
    invalid, or what another `kind` of reader raises; and where a body would have more than `max_body` bytes when it is
    decompressed, before it is.
    """
    options = check_options(options, ReadOptions)
    return kind(_MessageFile(messages, max_body, kind.error_type), options)
