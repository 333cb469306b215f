"""A client against a server made by hand that sees every byte of the client."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.errors import RemoteProtocolError
from dissociated.memory.shared import Backing, create_memfd, seal
from dissociated.protocol.message import Message
from dissociated.transport.base import Connection
from dissociated.transport.registry import transport
from dissociated.uri import Uri
from support.helpers import PATIENCE, leaving_nothing

WANT, FREE = 0xABCDEF, 77
BASE = 0x100000
PAGE = 4096


def allocate(tag: int | None, length: int) -> Any:
    return bytearray(length)


def encoded(*batches: pa.RecordBatch) -> list[tuple[bytes, bytes | None]]:
    """Return the flatbuffer and the body of each message that libarrow writes for these batches."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return [
        (one.metadata.to_pybytes(), None if one.type == "schema" else one.body.to_pybytes())
        for one in pa.ipc.MessageReader.open_stream(sink.getvalue())
    ]


def metadata(sequence: int, header: bytes) -> Message:
    return Message(None, (b"\x01" + sequence.to_bytes(4, "little") + header,))


def end(count: int) -> Message:
    return Message(None, (b"\x00" + count.to_bytes(4, "little"),))


def uint64s(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(8, "little") for number in numbers)


def by_address(sequence: int, *extents: tuple[int, int]) -> Message:
    flat = [number for extent in extents for number in extent]
    return Message(1 << 56 | sequence, (uint64s(sum(flat[1::2]), len(extents), *flat),))


class Scripted:
    """The server's end of one connection, and the client that opens a stream meanwhile."""

    def __init__(self, scheme: str) -> None:
        self.listener = transport(scheme).listen(Uri.parse(f"{scheme}:"))
        self._pool = ThreadPoolExecutor(1)
        self.connection: Connection

    def open(self, **options: Any) -> Future[pa.RecordBatchReader]:
        uri = f"{self.listener.uri}?want_data={WANT}&free_data={FREE}"
        opening = self._pool.submit(lambda: dis.open_stream(uri, b"the ticket", timeout=PATIENCE, **options))
        accepted = self.listener.accept()
        assert accepted is not None
        self.connection = accepted
        assert self.receive() == (WANT, b"the ticket")
        return opening

    def receive(self) -> tuple[int | None, bytes] | None:
        arrived = self.connection.receive(PATIENCE, allocate)
        return None if arrived is None else (arrived[0], bytes(arrived[1]))

    def freed(self) -> list[int]:
        """Return the addresses in the next free_data message."""
        arrived = self.receive()
        assert arrived is not None
        assert arrived[0] == FREE
        return np.frombuffer(arrived[1], "<u8").tolist()

    def send(self, *messages: Message) -> None:
        self.connection.send(messages, PATIENCE)

    def share(self, content: bytes, backing: Backing = Backing.LIVE) -> None:
        descriptor = create_memfd("scripted")
        os.write(descriptor, content)
        seal(descriptor, backing)
        self.connection.memory.share(descriptor, BASE, len(content), backing, PATIENCE)
        os.close(descriptor)

    def close(self) -> None:
        self.connection.close()
        self.listener.close()
        self._pool.shutdown()


@pytest.fixture
def shm() -> Iterator[Scripted]:
    with leaving_nothing(), closing(Scripted("shm")) as scripted:
        yield scripted


@pytest.fixture(params=["shm", "tcp", "inproc"])
def any_server(request: pytest.FixtureRequest) -> Iterator[Scripted]:
    with leaving_nothing(), closing(Scripted(request.param)) as scripted:
        yield scripted


BATCHES = [pa.record_batch({"n": [n, n + 1], "m": pa.array([None, n], pa.int64())}) for n in (10, 20, 30)]


def live(shm: Scripted, backing: Backing = Backing.LIVE) -> pa.RecordBatchReader:
    """Send BATCHES by address, a page for each body, with these buffers: none, 16 bytes, bitmap (1 byte), 16 bytes."""
    (schema, _), *messages = encoded(*BATCHES)
    opening = shm.open()
    shm.share(b"".join(body + bytes(PAGE - len(body)) for _, body in messages if body is not None), backing)
    shm.send(metadata(0, schema))
    for sequence, (header, body) in enumerate(messages, 1):
        at = BASE + (sequence - 1) * PAGE
        assert body is not None
        values, bitmap, more = 0, 64, 128  # libarrow aligns the buffers of a body to 64 bytes
        if len(body) < 144:
            values, bitmap, more = 0, 16, 24  # or to 8
        assert body[bitmap] == 0b10
        shm.send(
            metadata(sequence, header),
            by_address(sequence, (0, 0), (at + values, 16), (at + bitmap, 1), (at + more, 16)),
        )
    shm.send(end(4))
    return opening.result(PATIENCE)


def addresses(shm: Scripted, number: int) -> set[int]:
    _, *messages = encoded(*BATCHES)
    body = messages[0][1]
    assert body is not None
    steps = (0, 64, 128) if len(body) >= 144 else (0, 16, 24)
    return {BASE + number * PAGE + step for step in steps}


def test_each_address_is_freed_when_the_last_array_in_its_body_is_collected(shm: Scripted) -> None:
    """Free each address once and not earlier, as the order shows, and never the address of an empty buffer."""
    first, second, third = live(shm)
    assert [first, second, third] == BATCHES
    kept = second["m"].slice(1, 1)
    del first
    assert set(shm.freed()) == addresses(shm, 0)
    del second, third
    assert set(shm.freed()) == addresses(shm, 2)
    assert kept.to_pylist() == [20]
    del kept
    assert set(shm.freed()) == addresses(shm, 1)
    assert shm.receive() is None


def test_a_client_that_ends_its_reader_keeps_what_it_holds(shm: Scripted) -> None:
    """Free the unread messages when the reader is dropped."""
    reader = live(shm)
    first = reader.read_next_batch()
    del reader
    unread = addresses(shm, 1) | addresses(shm, 2)
    while unread:
        unread -= set(shm.freed())
    assert first == BATCHES[0]
    del first
    assert set(shm.freed()) == addresses(shm, 0)
    with suppress(dis.errors.ConnectionClosed):  # because the rest was not read
        assert shm.receive() is None


def test_bodies_may_overtake_metadata_and_the_end_may_overtake_both(any_server: Scripted) -> None:
    (schema, _), *messages = encoded(*BATCHES)
    opening = any_server.open()
    bodies = [Message(sequence, (body,)) for sequence, (_, body) in enumerate(messages, 1)]
    headers = [metadata(sequence, header) for sequence, (header, _) in enumerate(messages, 1)]
    any_server.send(bodies[2], headers[1], bodies[0], end(4), headers[2], metadata(0, schema), bodies[1], headers[0])
    assert list(opening.result(PATIENCE)) == BATCHES
    assert any_server.receive() is None


def test_a_client_reads_a_server_that_knows_nothing_of_free_data(any_server: Scripted) -> None:
    uri = f"{any_server.listener.uri}?want_data={WANT}"
    (schema, _), (header, body) = encoded(BATCHES[0])
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(dis.open_stream, uri, b"")
        accepted = any_server.listener.accept()
        assert accepted is not None
        any_server.connection = accepted
        assert any_server.receive() == (WANT, b"")
        any_server.send(metadata(0, schema), metadata(1, header), Message(1, (body,)), end(2))
        assert list(opening.result(PATIENCE)) == BATCHES[:1]


def test_bodies_that_are_not_aligned_are_gathered(shm: Scripted) -> None:
    """Read unaligned bodies, which other servers may send. libarrow would refuse them."""
    batch = pa.record_batch({"n": [1, 2, 3], "m": [4, 5, 6]})
    (schema, _), (header, _) = encoded(batch)
    opening = shm.open()
    shm.share(b"x" * 3 + uint64s(1, 2, 3) + b"yy" + uint64s(4, 5, 6))
    extents = (0, 0), (BASE + 3, 24), (0, 0), (BASE + 29, 24)
    shm.send(metadata(0, schema), metadata(1, header), by_address(1, *extents), end(2))
    assert list(opening.result(PATIENCE)) == [batch]
    assert set(shm.freed()) == {BASE + 3, BASE + 29}


def test_the_reason_of_an_abort_comes_out(any_server: Scripted) -> None:
    opening = any_server.open()
    any_server.connection.close("closed for the night")
    any_server.connection.close()
    with pytest.raises(dis.errors.RemoteError, match="closed for the night"):
        opening.result(PATIENCE)


def test_a_reader_that_had_paused_is_told_what_may_have_ended_its_stream(shm: Scripted) -> None:
    (schema, _), (header, body) = encoded(BATCHES[0])
    assert body is not None
    opening = shm.open()
    shm.send(metadata(0, schema), metadata(1, header), Message(1, (body,)))
    reader = opening.result(PATIENCE)
    assert reader.read_next_batch() == BATCHES[0]
    threading.Event().wait(1.1)  # processing takes time
    shm.connection.close()
    with pytest.raises(RemoteProtocolError, match=r"received nothing for 1 s .* stall_timeout"):
        reader.read_next_batch()


def test_a_silent_server_exceeds_the_deadline(any_server: Scripted) -> None:
    uri = f"{any_server.listener.uri}?want_data={WANT}"
    with pytest.raises(dis.errors.DeadlineExceeded, match=r"silent for 0\.01 s"):
        dis.open_stream(uri, b"", timeout=0.01)
    accepted = any_server.listener.accept()
    assert accepted is not None
    any_server.connection = accepted


@pytest.mark.parametrize("any_server", ["shm", "tcp"], indirect=True)  # inproc makes no copies that could be too large
def test_a_body_larger_than_the_client_takes_is_refused(any_server: Scripted) -> None:
    batch = pa.record_batch({"n": np.arange(10_000)})
    (schema, _), (header, body) = encoded(batch)
    opening = any_server.open(max_body=50_000)
    any_server.send(metadata(0, schema), metadata(1, header), Message(1, (body,)), end(2))
    with pytest.raises(
        dis.errors.RemoteProtocolError, match=r"80\d\d\d bytes; at most 50000 are accepted \(max_body\)"
    ):
        opening.result(PATIENCE).read_all()


@pytest.mark.parametrize(
    ("uris", "problem"),
    [
        ("tcp://127.0.0.1:1", "no want_data parameter"),
        ([], "not 0"),
        (["tcp://127.0.0.1:1?want_data=1"] * 3, "not 3"),
        ("gopher://x?want_data=1", "no transport for gopher"),
        ("tcp://127.0.0.1?want_data=1", "tcp://HOST:PORT"),
    ],
)
def test_uris_that_cannot_be_used(uris: str | list[str], problem: str) -> None:
    with pytest.raises(dis.errors.UriError, match=problem):
        dis.open_stream(uris, b"")


def test_a_second_uri_that_cannot_be_reached_leaves_no_connection(any_server: Scripted) -> None:
    uri = f"{any_server.listener.uri}?want_data={WANT}"
    with pytest.raises(dis.errors.TransportError):
        dis.open_stream([uri, "shm:///nowhere?want_data=1"], b"")
    accepted = any_server.listener.accept()
    assert accepted is not None
    any_server.connection = accepted
    try:
        assert any_server.receive() is None
    except dis.errors.ConnectionClosed:
        pass  # closed without a message
