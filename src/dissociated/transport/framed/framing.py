"""Frames: messages on a byte stream. docs/framing.md describes them byte by byte.

    8 bytes    preamble, once in each direction, before the first frame
    then frames, each
      8 bytes  kind in bits 56 to 63, length of the payload in bits 0 to 55
      8 bytes  tag, 0 if the kind has none
      payload, zero-padded to a multiple of 8 bytes

Integers are little-endian. Because of the padding, a body is aligned even if it is read in one piece with other frames.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple

from dissociated.base.buffers import Buffer
from dissociated.errors import ConnectionClosed, LocalProtocolError, RemoteProtocolError
from dissociated.protocol.message import Message, Run
from dissociated.transport.base import MAX_JOINED, Allocate
from dissociated.transport.runs import MAX_RUN, EncodedRun, encode_runs

PREAMBLE = b"DISSOC\x00\x01"  # the last byte is the version of the framing

_head = struct.Struct("<QQ")
HEAD_SIZE = _head.size
_LENGTH_MASK = (1 << 56) - 1
_PADDING = [bytes(-n % 8) for n in range(8)]

#: Largest payloads for which this module allocates memory: of untagged messages, by default, and of control frames.
MAX_UNTAGGED = 1 << 28
MAX_CONTROL = 1 << 16

#: Bytes of a read. Payloads of up to a quarter of it are returned as slices of the chunk.
_CHUNK = 1 << 18
_SLICE = _CHUNK // 4
#: Bytes of the first read after a larger payload. It should just reach the next payload, which is then read directly
#: into its memory.
_READ_BETWEEN = 1 << 12


class FrameKind(IntEnum):
    """The content of a frame."""

    UNTAGGED = 1
    TAGGED = 2
    #: a region of shared memory; its descriptor travels with the frame's first byte
    REGION = 3
    #: the sender gives up; the payload is the reason, as `protocol.close_reason` encodes it
    ABORT = 4
    #: many small messages, as `transport.runs` encodes them: three uint64 (number of pairs, size of an untagged
    #: message, size of a tagged message), then the tags, the untagged messages, and the tagged messages, each of these
    #: three zero-padded to a multiple of 8 bytes
    RUN = 5


# The first words of frames without payload.
_UNTAGGED, _TAGGED, _RUN = FrameKind.UNTAGGED << 56, FrameKind.TAGGED << 56, FrameKind.RUN << 56
_IN_PLACE_KINDS = (FrameKind.TAGGED, FrameKind.RUN)  # payloads are returned in the memory that they were read into


class Frame(NamedTuple):
    """A frame that arrived."""

    kind: int
    tag: int
    payload: Buffer


class _LargeFrame(NamedTuple):
    """A frame whose payload is read directly into its memory."""

    frame: Frame
    #: The part of the payload that has not been read.
    missing: memoryview
    #: The number of bytes after the payload.
    padding: int


def encode_frame(kind: FrameKind, tag: int, payload: bytes) -> bytes:
    """Return a whole frame with a small payload."""
    return _head.pack(kind << 56 | len(payload), tag) + payload + _PADDING[len(payload) % 8]


def encode_frames(messages: Iterable[Message | EncodedRun]) -> list[Buffer]:
    """Return the frames of these messages, in parts to be sent one after the other. Large parts are borrowed."""
    encoded: list[Buffer] = []
    small = bytearray()
    for message in messages:
        length = sum(map(len, message.parts))
        if length > _LENGTH_MASK:
            raise LocalProtocolError(f"a message of {length} bytes is too long for a frame")
        if isinstance(message, EncodedRun):
            small += _head.pack(_RUN | length, 0)
        elif message.tag is None:
            small += _head.pack(_UNTAGGED | length, 0)
        else:
            small += _head.pack(_TAGGED | length, message.tag)
        for part in message.parts:
            if len(part) <= MAX_JOINED:
                small += part
            else:
                if small:
                    encoded.append(small)
                    small = bytearray()
                encoded.append(part)
        small += _PADDING[length % 8]
    if small:
        encoded.append(small)
    return encoded


def encode_frames_with_runs(messages: Sequence[Message | Run]) -> list[Buffer]:
    """Return frames like `encode_frames`, with one frame for each run of small messages that `encode_runs` finds."""
    return encode_frames(encode_runs(messages))


class FrameReader:
    """A reader of frames from a byte stream.

    `read_into(memory, timeout)` reads at least one byte and returns the number of bytes, which is 0 at the end. Most
    data is read ahead in chunks. A large payload is read directly into the memory that `allocate` supplies.
    """

    def __init__(self, read_into: Callable[[memoryview, float], int], max_untagged: int = MAX_UNTAGGED) -> None:
        self._read_into = read_into
        self._limits = {
            FrameKind.UNTAGGED: max_untagged,
            FrameKind.REGION: MAX_CONTROL,
            FrameKind.ABORT: MAX_CONTROL,
            FrameKind.RUN: min(max_untagged, MAX_RUN),
        }
        self._new_chunk()
        self._begin = 0  # unused bytes of the chunk begin here, and end at `_end`
        self._end = 0
        self._read_size = _CHUNK
        self._preamble_read = False
        self._large: _LargeFrame | None = None  # whose payload is being read

    def limit_untagged(self, length: int) -> None:
        """Accept untagged messages of up to `length` bytes."""
        self._limits[FrameKind.UNTAGGED] = length

    @property
    def buffered(self) -> bool:
        """Return whether a part of the next frame has been read already."""
        return self._end > self._begin or self._large is not None

    def read(self, timeout: float, allocate: Allocate) -> Frame | None:
        """Return the next frame, or None at the end of the stream. After a DeadlineExceeded, the caller may read on.

        Raises:
            RemoteProtocolError: The bytes are not a valid frame.
        """
        if self._large is None:
            if not self._preamble_read:
                self._greet(timeout)
            if self._end - self._begin < HEAD_SIZE and not self._fill(HEAD_SIZE, timeout):
                return None
            kind, tag, length = self._head()
            padded = length + 7 & ~7
            if padded <= _SLICE:  # the bytes are consumed only when the frame is complete
                if self._end - self._begin < HEAD_SIZE + padded:
                    self._fill(HEAD_SIZE + padded, timeout)
                at = self._begin + HEAD_SIZE
                self._begin = at + padded
                part = memoryview(self._chunk)[at : at + length]
                if kind in _IN_PLACE_KINDS:
                    self._is_lent = True
                    return Frame(kind, tag, part)
                return Frame(kind, tag, bytes(part))
            payload = self._supply(kind, tag, length, allocate)
            self._large = _LargeFrame(Frame(kind, tag, payload), memoryview(payload).cast("B"), padded - length)
            self._begin += HEAD_SIZE
        frame, _, padding = self._large
        self._read_large(self._large, timeout)
        self._fill(padding, timeout, inside=True)
        self._begin += padding
        self._large = None
        return frame if frame.kind in _IN_PLACE_KINDS else frame._replace(payload=bytes(frame.payload))

    def _head(self) -> tuple[int, int, int]:
        """Return kind, tag and length of the next frame, whose head is in the chunk."""
        word, tag = _head.unpack_from(self._chunk, self._begin)
        kind, length = word >> 56, word & _LENGTH_MASK
        if kind != FrameKind.TAGGED:
            limit = self._limits.get(kind)
            if limit is None:
                raise RemoteProtocolError(f"the peer sent a frame of unknown kind {kind}", rule="frame-kind")
            if length > limit or tag:
                raise RemoteProtocolError(
                    f"the peer sent a frame of kind {FrameKind(kind).name}, of {length} bytes and with tag {tag}; "
                    f"this kind has no tag and at most {limit} bytes",
                    rule="frame-tag" if tag else "frame-length",
                )
        return kind, tag, length

    def detach(self) -> None:
        """Drop the references to the source of bytes and to unread memory. The stream has ended."""
        self._read_into, self._large = _read_end, None

    def _supply(self, kind: int, tag: int, length: int, allocate: Allocate) -> Buffer:
        if kind == FrameKind.TAGGED:
            return allocate(tag, length)
        return allocate(None, length) if kind == FrameKind.RUN else bytearray(length)

    def _greet(self, timeout: float) -> None:
        whole = self._fill(len(PREAMBLE), timeout)
        start = bytes(memoryview(self._chunk)[self._begin : min(self._end, len(PREAMBLE))])
        if not whole and not start:
            raise ConnectionClosed("the peer closed the connection before it sent anything")
        if start != PREAMBLE:
            if start[:-1] == PREAMBLE[:-1]:
                raise RemoteProtocolError(
                    f"the peer speaks version {start[-1]} of the framing, this library version {PREAMBLE[-1]}",
                    rule="preamble",
                )
            raise RemoteProtocolError(
                f"the peer does not speak dissociated's framing: its first bytes are {start!r}", rule="preamble"
            )
        self._begin += len(PREAMBLE)
        self._preamble_read = True

    def _fill(self, size: int, timeout: float, inside: bool = False) -> bool:
        """Read until the chunk has `size` unused bytes. Return False if the stream ended before the first of them.

        `size` is at most a quarter of the chunk and a head. `inside` is True if the stream must not end here.
        """
        missing = size - (self._end - self._begin)
        if missing <= 0:
            return True
        if self._begin + size > len(self._chunk):
            unread = bytes(memoryview(self._chunk)[self._begin : self._end])
            if self._is_lent:
                self._new_chunk()
            self._chunk[: len(unread)] = unread
            self._begin, self._end = 0, len(unread)
        view = memoryview(self._chunk)
        while missing > 0:
            limit = max(self._end + missing, min(len(view), self._end + self._read_size))
            count = self._read_into(view[self._end : limit], timeout)
            if not count:
                if not self._preamble_read:
                    return False
                if inside or self._end > self._begin:
                    raise ConnectionClosed("the peer closed the connection in the middle of a message")
                return False
            self._end += count
            missing -= count
        self._read_size = _CHUNK
        return True

    def _read_large(self, large: _LargeFrame, timeout: float) -> None:
        memory = large.missing
        at = min(self._end - self._begin, len(memory))
        memory[:at] = memoryview(self._chunk)[self._begin : self._begin + at]
        self._begin += at
        try:
            while at < len(memory):
                count = self._read_into(memory[at:], timeout)
                if not count:
                    raise ConnectionClosed("the peer closed the connection in the middle of a message")
                at += count
        finally:
            if self._large is not None:  # another thread may have called `detach`
                self._large = large._replace(missing=memory[at:])
        self._read_size = _READ_BETWEEN

    def _new_chunk(self) -> None:
        self._chunk = bytearray(_CHUNK)
        self._is_lent = False  # whether a returned payload is a view of the chunk, which must not be overwritten then


def _read_end(memory: memoryview, timeout: float) -> int:
    return 0
