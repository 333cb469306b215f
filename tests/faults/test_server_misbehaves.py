"""Servers that break the protocol: the client raises one documented exception, closes, and keeps no resource."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.errors import ConnectionClosed, DeadlineExceeded, RemoteError, RemoteProtocolError
from dissociated.protocol.message import Message
from dissociated.transport.base import Connection, Listener
from dissociated.transport.registry import transport
from dissociated.uri import Uri
from support.helpers import case
from support.machine import media

from .conftest import Scripted
from .content import BATCH_HEADER, BODY, BUFFERS, GOOD, META, SCHEMA, SCHEMA_HEADER, TABLE
from .peer import (
    ABORT,
    ADDRESSES,
    PATIENCE,
    PREAMBLE,
    RUN,
    TAGGED,
    UNTAGGED,
    WANT,
    RawConnection,
    RawServer,
    Script,
    addresses,
    body,
    end,
    frame,
    head,
    metadata,
    run,
)

SILENCE = 0.2  # seconds that these clients wait


def read(uri: str, timeout: float = 10.0, **options: Any) -> pa.Table:
    return dis.open_stream(uri, b"ticket", timeout=timeout, **options).read_all()


def refused(server: RawServer, error: type[Exception], phrase: str, timeout: float = 10.0) -> None:
    """Fail unless reading raises exactly `error`, and closes the connection while the exception is still referenced."""
    with pytest.raises(error, match=phrase) as caught:
        read(server.uri, timeout)
    assert type(caught.value) is error
    server.wait_done()
    del caught  # The traceback refers to this frame, which would be a reference cycle.


def saying(data: bytes, then: Callable[[RawConnection], None] = RawConnection.hold) -> Script:
    """Read the request, send `data`, and wait for the client to close, or close first."""

    def script(connection: RawConnection) -> None:
        request = connection.read_frame()
        assert (request.kind, request.payload) == (TAGGED, b"ticket")
        connection.send(data)
        then(connection)

    return script


def record_aborts(aborts: list[bytes], connection: RawConnection) -> None:
    """Read to the end of the connection, and record the payloads of ABORT frames."""
    with suppress(ConnectionResetError, EOFError):
        while True:
            received = connection.read_frame()
            if received.kind == ABORT:
                aborts.append(received.payload)


class Case(NamedTuple):
    name: str
    data: bytes
    error: type[Exception]
    phrase: str


def abort(reason: bytes) -> bytes:
    return frame(ABORT, reason)


BROKEN = RemoteProtocolError

FRAMES = [
    Case("garbage instead of a handshake", b"HTTP/1.1 400 Bad Request\r\n\r\n", BROKEN, "does not speak dissociated's"),
    Case("zeros instead of a handshake", bytes(64), BROKEN, "does not speak dissociated's"),
    Case("another version", b"DISSOC\x00\x02", BROKEN, "speaks version 2 of the framing"),
    Case("unknown kind of frame", PREAMBLE + head(9, 0), BROKEN, "unknown kind 9"),
    Case("kind 0", PREAMBLE + bytes(16), BROKEN, "unknown kind 0"),
    Case("a tag where there is none", PREAMBLE + head(UNTAGGED, 8, 1), BROKEN, "has no tag"),
    Case("metadata beyond the cap", PREAMBLE + head(UNTAGGED, 2**28 + 6), BROKEN, "at most 268435461 bytes"),
    Case("metadata of 2**55 bytes", PREAMBLE + head(UNTAGGED, 2**55), BROKEN, "at most 268435461 bytes"),
    Case("an endless reason", PREAMBLE + head(ABORT, 2**16 + 1), BROKEN, "at most 65536 bytes"),
    Case("a reason", PREAMBLE + abort(b"the disk is on fire"), RemoteError, "the disk is on fire"),
    Case("a reason that is no UTF-8", PREAMBLE + abort(b"caf\xe9 \xff"), RemoteError, "caf\ufffd \ufffd"),
    Case("an empty reason", PREAMBLE + abort(b""), RemoteError, "did not say why"),
    Case("a reason in the middle", GOOD[:-24] + abort(b"no more"), RemoteError, "no more"),
]

METADATA = [
    Case("shorter than the prefix", frame(UNTAGGED, b"\x01\0\0\0"), BROKEN, "the prefix alone needs 5"),
    Case("empty", frame(UNTAGGED), BROKEN, "the prefix alone needs 5"),
    Case("unknown kind", frame(UNTAGGED, b"\x02\0\0\0\0"), BROKEN, "unknown kind 2"),
    Case("end of stream with a tail", SCHEMA + frame(UNTAGGED, b"\0\1\0\0\0\0"), BROKEN, "instead of exactly 5"),
    Case("end before the schema", end(0), BROKEN, "before its first message"),
    Case("end before what was sent", SCHEMA + META + end(1), BROKEN, "ended the stream at 1"),
    Case("two ends", SCHEMA + end(2) + end(2), BROKEN, "not allowed"),
    Case("no flatbuffer", metadata(0, b""), BROKEN, "not an Arrow IPC message"),
    Case("garbage for a flatbuffer", metadata(0, b"\xff" * 64), BROKEN, "not an Arrow IPC message"),
    Case("zeros for a flatbuffer", metadata(0, bytes(64)), BROKEN, "unknown type 0"),
    Case("a batch instead of the schema", metadata(0, BATCH_HEADER), BROKEN, "which comes first"),
    Case("a second schema", SCHEMA + metadata(1, SCHEMA_HEADER), BROKEN, "one schema"),
    Case("a message twice", SCHEMA + META + META, BROKEN, "twice"),
    Case("a message far ahead", SCHEMA + metadata(2**30, BATCH_HEADER) + end(2), BROKEN, "but has sent message 1073"),
    Case(
        "a message after the end", SCHEMA + end(2) + metadata(2, BATCH_HEADER), BROKEN, "after it ended the stream at 2"
    ),
]

BODIES = [
    Case("a body for the schema", SCHEMA + body(0, bytes(8)), BROKEN, "twice|has none"),
    Case("a body before its schema", body(0, bytes(8)) + SCHEMA, BROKEN, "which has none"),
    Case("a body twice", SCHEMA + body(1, BODY) + body(1, BODY), BROKEN, "twice"),
    Case("an unknown kind of body", SCHEMA + META + body(1, BODY, kind=2), BROKEN, "unknown kind 2"),
    Case("the kind shifted by 55", SCHEMA + META + frame(TAGGED, BODY, 1 << 55 | 1), BROKEN, "reserved bits"),
    Case("reserved bits", SCHEMA + META + frame(TAGGED, BODY, 1 << 32 | 1), BROKEN, "reserved bits"),
    Case("a body too short", SCHEMA + META + body(1, BODY[:-8]), BROKEN, "its metadata announced 8000"),
    Case("a body too long", SCHEMA + META + body(1, BODY + bytes(8)), BROKEN, "its metadata announced 8000"),
    Case("a short body first", SCHEMA + body(1, BODY[:-8]) + META, BROKEN, "its metadata announced 8000"),
    Case("an enormous body", SCHEMA + META + head(TAGGED, 2**55, 1), BROKEN, "its metadata announced 8000"),
    Case(
        "an enormous body first",
        SCHEMA + head(TAGGED, 2**55, 1),
        BROKEN,
        r"at most 17179869184 are accepted \(max_body\)",
    ),
    Case("the largest body of all", SCHEMA + head(TAGGED, 2**56 - 1, 1), BROKEN, "at most 17179869184 are accepted"),
    Case("a body after the end", SCHEMA + end(2) + body(5, BODY), BROKEN, "after it ended the stream at 2"),
]


def _run(*messages: tuple[int, int, bytes], first: bytes = SCHEMA) -> bytes:
    """Return a run of batches from the numbers in the metadata and in the tags, and the bodies."""
    untagged = [struct.pack("<BI", 1, number) + BATCH_HEADER for number, _, _ in messages]
    tags = [struct.pack("<Q", tag) for _, tag, _ in messages]
    bodies = [payload for _, _, payload in messages]
    sizes = len(untagged[0]), len(bodies[0])
    return first + run(len(messages), *sizes, b"".join(tags), b"".join(untagged), b"".join(bodies))


PAIRS = addresses(*((0, 0), (64, 8000)))
BY_ADDRESS = ADDRESSES << 56

RUNS = [
    Case("cut off", SCHEMA + frame(RUN, bytes(16)), BROKEN, "cut off"),
    Case("of nothing", SCHEMA + run(0, 8, 8), BROKEN, "a run of 0 messages"),
    Case("of too much", SCHEMA + run(2, 8, 8, bytes(16), bytes(16)), BROKEN, "a run of 2 messages"),
    Case("of 2**60 times nothing", SCHEMA + run(2**60, 0, 0), BROKEN, "a run of 1152921504606846976 messages"),
    Case("of sizes beyond all bounds", SCHEMA + run(1, 2**63, 2**63, bytes(8)), BROKEN, "a run of 1 messages"),
    Case("of empty messages", SCHEMA + run(100, 0, 0, bytes(800)), BROKEN, "the prefix alone needs 5"),
    Case(
        "of garbage", SCHEMA + run(16, 96, 48, b"\xff" * 128, b"\xff" * 1536, b"\xff" * 768), BROKEN, "unknown kind 255"
    ),
    Case("with a tag", SCHEMA + head(RUN, 24, 1), BROKEN, "has no tag"),
    Case("beyond the cap", SCHEMA + head(RUN, 2**26 + 1), BROKEN, "at most 67108864 bytes"),
    Case("instead of the schema", _run((0, BY_ADDRESS, PAIRS), first=b""), BROKEN, "which comes first"),
    Case("twice", _run((1, BY_ADDRESS | 1, PAIRS), (1, BY_ADDRESS | 1, PAIRS)), BROKEN, "no region|twice"),
    Case("with a gap", _run((2, BY_ADDRESS | 2, PAIRS)) + end(3) + abort(b"done"), RemoteError, "done"),
    Case("of other bodies", _run((1, BY_ADDRESS | 2, PAIRS)) + abort(b"done"), RemoteError, "done"),
    Case("with reserved bits", _run((1, BY_ADDRESS | 1 << 32 | 1, PAIRS)), BROKEN, "reserved bits"),
    Case("in no region", _run((1, BY_ADDRESS | 1, PAIRS), (2, BY_ADDRESS | 2, PAIRS)), BROKEN, "in no region"),
    Case(
        "with huge addresses", _run((1, BY_ADDRESS | 1, addresses((0, 0), (2**64 - 8, 8000)))), BROKEN, "in no region"
    ),
    Case(
        "with a wrong total", _run((1, BY_ADDRESS | 1, addresses((0, 0), (64, 8000), total=1))), BROKEN, "whose total"
    ),
    Case(
        "with other lengths",
        _run((1, BY_ADDRESS | 1, addresses((0, 0), (64, 80)))),
        BROKEN,
        "gives 80 bytes to buffer 1",
    ),
]


def _list(payload: bytes) -> bytes:
    return SCHEMA + META + body(1, payload, ADDRESSES)


ADDRESS_LISTS = [
    Case("shorter than its totals", _list(bytes(8)), BROKEN, "8 bytes"),
    Case("empty", _list(b""), BROKEN, "0 bytes"),
    Case("fewer pairs than it says", _list(addresses((0, 0), (1, 8000), count=3)), BROKEN, "for 3 buffers"),
    Case("2**60 pairs", _list(addresses((0, 0), (1, 8000), count=2**60)), BROKEN, "for 1152921504606846976 buffers"),
    Case("a total too small", _list(addresses((0, 0), (1, 8000), total=7999)), BROKEN, "whose total is 7999"),
    Case("a total too large", _list(addresses((0, 0), (1, 8000), total=8001)), BROKEN, "whose total is 8001"),
    Case(
        "an address for nothing, and none for the rest", _list(addresses((64, 0), (64, 8000))), BROKEN, "in no region"
    ),
    Case("fewer buffers than announced", _list(addresses((1, 8000))), BROKEN, "announced"),
    Case("more buffers than announced", _list(addresses(*BUFFERS, (1, 8))), BROKEN, "announced"),
    Case(
        "other lengths",
        _list(addresses((0, 0), (64, 8008))),
        BROKEN,
        "8008 bytes to buffer 1; its metadata announced 8000",
    ),
    Case(
        "lengths swapped",
        _list(addresses((64, 8000), (0, 0))),
        BROKEN,
        "gives 8000 bytes to buffer 0; its metadata announced 0",
    ),
    Case("no region at all", _list(addresses((0, 0), (64, 8000))), BROKEN, "in no region that it shared"),
    Case(
        "the last address there is", _list(addresses((0, 0), (2**64 - 8, 8000))), BROKEN, "in no region that it shared"
    ),
]

ALL = [
    *FRAMES,
    *(
        Case(f"{what}: {name}", PREAMBLE + data, error, phrase)
        for what, cases in (("metadata", METADATA), ("body", BODIES), ("addresses", ADDRESS_LISTS), ("run", RUNS))
        for name, data, error, phrase in cases
    ),
]


#: The tag of a run over media with messages of their own.
RUN_TAG = 0xFE44_4953_534F_0200


def _messages(frames: bytes) -> Iterator[tuple[int, Message]]:
    """Convert frames to the messages of these media. A missing payload becomes zeros."""
    while frames:
        word, tag = struct.unpack_from("<QQ", frames)
        kind, length = word >> 56, word & (1 << 56) - 1
        payload = frames[16 : 16 + length].ljust(length, b"\0")
        frames = frames[16 + length + -length % 8 :]
        yield kind, Message({UNTAGGED: None, RUN: RUN_TAG}.get(kind, tag), (payload,))


def _say(connection: Connection, frames: bytes) -> None:
    """Read the request, and send the messages of these frames."""
    with connection, suppress(ConnectionClosed):  # The client has closed the connection.
        connection.handshake(PATIENCE)
        request = connection.receive(PATIENCE, lambda tag, length: bytearray(length))
        assert request is not None
        for kind, message in _messages(frames):
            if kind == ABORT:
                connection.close(bytes(message.parts[0]).decode(), linger=PATIENCE)
            else:
                connection.send([message], PATIENCE)
        connection.close(linger=PATIENCE)


@pytest.mark.parametrize("medium", media(["ucx", "fabric"]))
def test_broken_runs_over_media_with_messages_of_their_own(medium: str) -> None:
    def accept(listener: Listener) -> Connection:
        connection = listener.accept()
        assert connection is not None
        return connection

    with closing(transport(medium).listen(Uri.parse(f"{medium}://127.0.0.1:0"))) as listener:
        uri = str(replace(listener.uri, want_data=WANT))
        for name, data, error, phrase in RUNS[["ucx", "fabric"].index(medium) * 2 :: 4]:
            with case(name), ThreadPoolExecutor(1) as pool:
                saying_it = pool.submit(lambda data=data: _say(accept(listener), data))  # type: ignore[misc]
                with pytest.raises(error, match=phrase) as caught:
                    read(uri)
                assert type(caught.value) is error
                del caught
                saying_it.result(PATIENCE)


@pytest.mark.parametrize("scheme", ["tcp", "tls", "shm"])
def test_broken_rule(scripted: Scripted, scheme: str) -> None:
    """Try all cases over one medium, and a few over media that treat them alike."""
    for name, data, error, phrase in ALL if scheme == "shm" else ALL[::8]:
        with case(name):
            aborts: list[bytes] = []
            refused(scripted(scheme, saying(data, partial(record_aborts, aborts))), error, phrase)
            if error is BROKEN:  # the server is told so, with the number of `remote_protocol`
                assert len(aborts) == 1
                assert aborts[0].endswith(b"\x005")
            else:
                assert aborts == []


@pytest.mark.parametrize("scheme", ["tcp", "shm"])
def test_compressed_bodies_with_metadata_before_v5(scripted: Scripted, scheme: str) -> None:
    """Libarrow ignores that they are compressed. It writes them only for those who ask it to."""
    plain, words = pa.table({"n": range(1000)}), pa.table({"w": pa.array(["a", "b"] * 500).dictionary_encode()})
    options = pa.ipc.IpcWriteOptions(compression="zstd", metadata_version=pa.ipc.MetadataVersion.V4)
    for table in (plain, words):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
            writer.write_table(table)
        schema, *others = pa.ipc.MessageReader.open_stream(sink.getvalue())
        first = PREAMBLE + metadata(0, schema.metadata.to_pybytes())
        header, content = others[0].metadata.to_pybytes(), others[0].body.to_pybytes()
        one = first + metadata(1, header) + body(1, content) + end(2)
        untagged = b"".join(struct.pack("<BI", 1, number) + header for number in (1, 2))
        both = run(2, 5 + len(header), len(content), struct.pack("<QQ", 1, 2), untagged, content * 2)
        for data in (one, first + both + end(3)):
            refused(scripted(scheme, saying(data)), RemoteProtocolError, "message 1 cannot be read: a body is compr")


def test_good_conversation(scripted: Scripted) -> None:
    # The cases above are variations of this test.
    server = scripted("tcp", saying(GOOD))
    assert read(server.uri).equals(TABLE)
    server.wait_done()


def byte_by_byte(data: bytes) -> Script:
    def script(connection: RawConnection) -> None:
        connection.read_frame()
        for at in range(min(len(data), 200)):
            connection.send(data[at : at + 1])
        connection.send(data[200:])
        connection.hold()

    return script


def test_broken_rule_byte_by_byte(scripted: Scripted) -> None:
    for name, data, error, phrase in ALL:
        with case(name):
            refused(scripted("shm", byte_by_byte(data)), error, phrase)


def test_region_on_tcp(scripted: Scripted) -> None:
    server = scripted("tcp", saying(PREAMBLE + frame(3, struct.pack("<QQQ", 64, 8192, 1))))
    refused(server, RemoteProtocolError, "shared memory on a connection that cannot")


# Servers that stop within a message

#: Every position in the small frames, and some in the body.
CUTS = [0, 1, 7, 8, 9, 23, 24, 30, len(GOOD) - 8000, len(GOOD) - 4000, len(GOOD) - 25, len(GOOD) - 24, len(GOOD) - 20]


@pytest.mark.parametrize("scheme", ["tcp", "tls", "shm"])
def test_server_closes_in_the_middle(scripted: Scripted, scheme: str) -> None:
    for cut in CUTS:
        server = scripted(scheme, saying(GOOD[:cut], RawConnection.close))
        with case(cut), pytest.raises(dis.DissociatedError, match=r"the peer closed|does not speak") as caught:
            read(server.uri)
        assert type(caught.value) in (ConnectionClosed, RemoteProtocolError)
        server.wait_done()
        del caught


def test_server_falls_silent(scripted: Scripted) -> None:
    for cut in CUTS:
        with case(cut):
            refused(scripted("tcp", saying(GOOD[:cut])), DeadlineExceeded, f"silent for {SILENCE:g} s", SILENCE)


# Memory


def test_enormous_body_is_not_allocated(scripted: Scripted) -> None:
    for length in (2**55, 2**34 + 1):
        before = pa.total_allocated_bytes()
        server = scripted("tcp", saying(PREAMBLE + SCHEMA + head(TAGGED, length, 1)))
        refused(server, RemoteProtocolError, "max_body")
        assert pa.total_allocated_bytes() == before


def test_flood_of_metadata(scripted: Scripted) -> None:
    # Each has a flatbuffer of 64 MiB, and none has its body.
    def script(connection: RawConnection) -> None:
        connection.read_frame()
        connection.send(PREAMBLE + SCHEMA)
        length = 2**26
        rest = bytes(length - 5 - len(BATCH_HEADER))
        for number in range(1, 6):
            connection.send(head(UNTAGGED, length) + struct.pack("<BI", 1, number) + BATCH_HEADER)
            connection.send(rest)
        connection.hold()

    refused(
        scripted("shm", script), RemoteProtocolError, "metadata of .* bytes waits for message 1; the cap is 268435456"
    )


def test_max_body(scripted: Scripted) -> None:
    server = scripted("tcp", saying(GOOD))
    # The transport has its own memory for bodies this small: the metadata has announced their length.
    assert read(server.uri, max_body=8000).equals(TABLE)
    server.wait_done()
    with pytest.raises(RemoteProtocolError, match=r"max_body"):
        read(scripted("tcp", saying(PREAMBLE + SCHEMA + head(TAGGED, 70_000, 1))).uri, max_body=60_000)
