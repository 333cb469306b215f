"""The bytes of every frame, written and read: whole, byte by byte, and cut at any position."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dissociated.errors import ConnectionClosed, DeadlineExceeded
from dissociated.protocol.message import Incoming, Message
from dissociated.transport.framed.framing import (
    PREAMBLE,
    Frame,
    FrameKind,
    FrameReader,
    encode_frame,
    encode_frames,
    encode_frames_with_runs,
)
from dissociated.transport.runs import parse_run
from support.helpers import case

HELLO = bytes.fromhex("444953534f430001")

#: The bytes of a frame of each kind, and their meaning.
GOLDEN = [
    ("03000000000000010000000000000000 6162630000000000", Frame(1, 0, b"abc")),
    ("00000000000000010000000000000000", Frame(1, 0, b"")),
    ("08000000000000020700000000000001 3132333435363738", Frame(2, 0x0100_0000_0000_0007, b"12345678")),
    ("0000000000000002ffffffff00000000", Frame(2, 0xFFFF_FFFF, b"")),
    (
        "18000000000000030000000000000000 001000000000000000200000000000000100000000000000",
        Frame(3, 0, (0x1000).to_bytes(8, "little") + (0x2000).to_bytes(8, "little") + (1).to_bytes(8, "little")),
    ),
    ("04000000000000040000000000000000 c3bc6e6f00000000", Frame(4, 0, "üno".encode())),
    (
        "38000000000000050000000000000000 020000000000000003000000000000000100000000000000"
        "05000000000000000600000000000000 6162636465660000 7879000000000000",
        Frame(
            5,
            0,
            bytes.fromhex(
                "020000000000000003000000000000000100000000000000050000000000000006000000000000006162636465660000"
                "7879000000000000"
            ),
        ),
    ),
]
STREAM = HELLO + b"".join(bytes.fromhex(text) for text, _ in GOLDEN)
FRAMES = [frame for _, frame in GOLDEN]


class Source:
    """A stream that arrives in these pieces. An exception among them is raised."""

    def __init__(self, pieces: Iterable[bytes | Exception]) -> None:
        self._pieces = [piece for piece in pieces if piece != b""]
        self.largest = 0

    def read_into(self, memory: memoryview, timeout: float) -> int:
        if not self._pieces:
            return 0
        piece = self._pieces.pop(0)
        if isinstance(piece, Exception):
            raise piece
        taken = min(len(piece), len(memory))
        memory[:taken] = piece[:taken]
        if taken < len(piece):
            self._pieces.insert(0, piece[taken:])
        self.largest = max(self.largest, taken)
        return taken


def allocate(tag: int | None, length: int) -> Any:
    return bytearray(length)


def read_all(pieces: Iterable[bytes]) -> list[Frame]:
    reader = FrameReader(Source(pieces).read_into)
    frames = []
    while (frame := reader.read(1.0, allocate)) is not None:
        frames.append(Frame(frame.kind, frame.tag, bytes(frame.payload)))
    return frames


def cut(stream: bytes, *at: int) -> list[bytes]:
    return [stream[begin:end] for begin, end in zip((0, *at), (*at, len(stream)), strict=True)]


def test_preamble() -> None:
    assert PREAMBLE == HELLO


def test_a_frame_is_written() -> None:
    for text, frame in GOLDEN:
        assert encode_frame(FrameKind(frame.kind), frame.tag, frame.payload) == bytes.fromhex(text)


def test_messages_are_written() -> None:
    messages = [Message(None, (b"a", b"", b"bc")), Message(0x0100_0000_0000_0007, (b"1234", memoryview(b"5678")))]
    assert b"".join(encode_frames(messages)) == bytes.fromhex(GOLDEN[0][0] + GOLDEN[2][0])


def test_large_parts_are_borrowed() -> None:
    large = bytes(10_000)
    encoded = encode_frames([Message(None, (b"small", large)), Message(1, (large, b"small"))])
    assert [part for part in encoded if len(part) > 100] == [large, large]
    assert all(part is large for part in encoded if len(part) > 100)


def test_frames_are_read_whole() -> None:
    assert read_all([STREAM]) == FRAMES


def test_frames_are_read_byte_by_byte() -> None:
    assert read_all(STREAM[at : at + 1] for at in range(len(STREAM))) == FRAMES


def test_frames_are_read_cut_in_two() -> None:
    for at in range(1, len(STREAM)):
        with case(at):
            assert read_all(cut(STREAM, at)) == FRAMES


def read_with_deadline(stream: bytes, at: int, count: int) -> list[Frame]:
    """Return the frames of a stream whose sender pauses before the byte `at` for longer than the reader waits."""
    reader = FrameReader(Source([stream[:at], DeadlineExceeded("silent"), stream[at:]]).read_into)
    frames: list[Frame] = []
    deadlines = 0
    while len(frames) < count:
        try:
            frame = reader.read(1.0, allocate)
        except DeadlineExceeded:
            deadlines += 1
            continue
        assert frame is not None
        frames.append(Frame(frame.kind, frame.tag, bytes(frame.payload)))
    assert deadlines == 1
    assert reader.read(1.0, allocate) is None
    return frames


def test_a_reader_goes_on_after_a_deadline() -> None:
    """Resume after a deadline at each position of the stream."""
    for at in range(1, len(STREAM)):
        with case(at):
            assert read_with_deadline(STREAM, at, len(FRAMES)) == FRAMES


def test_a_reader_goes_on_after_a_deadline_in_a_large_frame() -> None:
    """Resume within the head, the payload and the padding of frames that are read directly into their memory."""
    payload = bytes(range(251)) * 1001
    head = len(payload).to_bytes(7, "little")
    frames = [Frame(2, 7, payload), Frame(1, 0, payload), FRAMES[0]]
    tagged, untagged = head + b"\2" + (7).to_bytes(8, "little"), head + b"\1" + bytes(8)
    stream = HELLO + b"".join(
        [tagged, payload, bytes(-len(payload) % 8), untagged, payload, bytes(-len(payload) % 8), STREAM[8 : ENDS[1]]]
    )
    for first in (len(HELLO), len(HELLO) + 16 + len(payload) + (-len(payload) % 8)):
        for at in (1, 8, 16, 17, 65_537, 200_000, 16 + len(payload), 16 + len(payload) + (-len(payload) % 8)):
            with case((first, at)):
                assert read_with_deadline(stream, first + at, 3) == frames


ENDS = [len(HELLO) + sum(len(bytes.fromhex(text)) for text, _ in GOLDEN[:count]) for count in range(len(GOLDEN) + 1)]


def test_a_stream_ends_between_frames_or_with_an_error() -> None:
    for at in range(len(STREAM) + 1):
        with case(at):
            if at in ENDS:
                assert read_all([STREAM[:at]]) == FRAMES[: ENDS.index(at)]
            elif at >= len(HELLO):
                with pytest.raises(ConnectionClosed, match="in the middle of a message"):
                    read_all([STREAM[:at]])
            elif not at:
                with pytest.raises(ConnectionClosed, match="before it sent anything"):
                    read_all([STREAM[:at]])


def test_large_payloads_are_read_straight_into_the_memory_that_was_supplied() -> None:
    payload = bytes(range(256)) * 4096
    source = Source([HELLO, *encode_frames([Message(3, (payload,)), Message(None, (b"next",))])])
    reader = FrameReader(source.read_into)
    supplied: list[bytearray] = []

    def supply(tag: int | None, length: int) -> bytearray:
        assert (tag, length) == (3, len(payload))
        supplied.append(bytearray(length))
        return supplied[-1]

    frame = reader.read(1.0, supply)
    assert frame is not None
    assert frame.payload is supplied[0]
    assert frame.payload == payload
    assert source.largest > len(payload) - (1 << 18)  # all but the start that came with the head, in one read
    assert reader.read(1.0, supply) == Frame(1, 0, b"next")


def test_payloads_stay_as_they_are_while_more_is_read() -> None:
    messages = [Message(number, (bytes([number % 251]) * (number * 7 % 5000),)) for number in range(2000)]
    reader = FrameReader(Source([HELLO, b"".join(encode_frames(messages))]).read_into)
    kept = [reader.read(1.0, allocate) for _ in messages]
    assert [(frame.tag, bytes(frame.payload)) for frame in kept if frame] == [
        (tag, parts[0]) for tag, parts in messages
    ]


def test_bodies_are_aligned_to_8_bytes() -> None:
    """Align bodies, because libarrow copies or refuses unaligned buffers."""
    import numpy as np

    messages = [message for n in range(300) for message in (Message(None, (b"m" * n,)), Message(n, (b"b" * 3 * n,)))]
    reader = FrameReader(Source([HELLO, b"".join(encode_frames(messages))]).read_into)
    for _ in messages:
        frame = reader.read(1.0, allocate)
        assert frame is not None
        if frame.kind == FrameKind.TAGGED and len(frame.payload):
            assert np.frombuffer(frame.payload, np.uint8).ctypes.data % 8 == 0


SIZES = st.one_of(
    st.integers(0, 40), st.sampled_from([511, 512, 513, 4095, 65528, 65529, 65536, 65537, 262144, 300001])
)
MESSAGES = st.lists(
    st.builds(
        lambda tag, sizes: Message(tag, [bytes([size % 256]) * size for size in sizes]),
        st.one_of(st.none(), st.integers(0, 2**64 - 1)),
        st.lists(SIZES, max_size=3),
    ),
    max_size=12,
)


def plain(messages: Iterable[Message | Incoming]) -> list[tuple[int | None, bytes]]:
    return [
        (one.tag, b"".join(map(bytes, one.parts)) if isinstance(one, Message) else bytes(one.data)) for one in messages
    ]


@given(MESSAGES, st.lists(st.integers(1, 100_000), max_size=20))
def test_whatever_is_written_is_read(messages: list[Message], sizes: list[int]) -> None:
    stream = HELLO + b"".join(map(bytes, encode_frames(messages)))
    at = [sum(sizes[:count]) for count in range(len(sizes)) if sum(sizes[:count]) < len(stream)]
    frames = read_all(cut(stream, *at))
    assert [(f.tag if f.kind == FrameKind.TAGGED else None, f.payload) for f in frames] == plain(messages)


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 40), st.integers(0, 600)), max_size=5),
    st.lists(st.sampled_from([None, 1]), max_size=3),
)
def test_runs_mean_what_their_messages_mean(shapes: list[tuple[int, int, int]], odd: list[int | None]) -> None:
    """Encode runs of equal pairs, and other messages between them."""
    messages = []
    for count, untagged, tagged in shapes:
        messages += [Message(tag, (b"odd",)) for tag in odd]
        for number in range(count):
            messages.append(Message(None, (bytes([number]), b"u" * untagged)))
            messages.append(Message(number << 40, (b"t" * tagged, b"", bytes([number]))))
    arrived: list[Incoming] = []
    for frame in read_all([HELLO, b"".join(map(bytes, encode_frames_with_runs(messages)))]):
        if frame.kind == FrameKind.RUN:
            arrived += parse_run(frame.payload).expand()
        else:
            arrived.append(Incoming(frame.tag if frame.kind == FrameKind.TAGGED else None, frame.payload))
    assert plain(arrived) == plain(messages)


def test_many_like_small_messages_become_one_frame() -> None:
    messages = [Message(tag, (b"12345678",)) for number in range(100) for tag in (None, number)]
    frames = read_all([HELLO, b"".join(map(bytes, encode_frames_with_runs(messages)))])
    assert [frame.kind for frame in frames] == [FrameKind.RUN]
