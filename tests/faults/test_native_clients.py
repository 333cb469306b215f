"""Clients over UCX and libfabric that break the rules, or that connect in numbers and send no request."""

from __future__ import annotations

import re
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.errors import ConnectionClosed, DeadlineExceeded, DissociatedError, RemoteError
from dissociated.protocol.message import Message
from dissociated.transport.base import Connection
from dissociated.transport.native.fabric.messages import CONTROL_SIZE, LARGE, Kind
from dissociated.transport.registry import transport
from dissociated.uri import Uri
from support.fabric_peer import CONTROL, fabric_client, progress_until
from support.helpers import case, wait_until
from support.machine import media

from .conftest import Good, Serve
from .peer import PATIENCE

MEDIA = {"ucx": "ucx:", "fabric": "fabric:", "fabric, tcp": "fabric:?provider=tcp"}


def connect(good: Good) -> tuple[Connection, Uri]:
    uri = Uri.parse(good.server.locations("good")[0])
    return transport(uri.scheme).connect(uri, PATIENCE), uri


def last_word(connection: Connection) -> str:
    """Return why the server closed the connection, after any messages of the stream."""
    try:
        while True:
            connection.receive(PATIENCE, lambda tag, length: bytearray(length))
    except RemoteError as error:
        return str(error)


class Tags(NamedTuple):
    want: int
    free: int


def wanted(good: Good, tags: Tags) -> Message:
    return Message(tags.want, (good.server.ticket("good"),))


#: Messages of a client, and the reason that the server gives.
LIES: dict[str, tuple[Callable[[Good, Tags], Sequence[Message]], str]] = {
    "an unknown tag": (lambda good, tags: [Message(tags.want ^ 1 << 9, (b"ticket",))], "unknown tag"),
    "the tag zero": (lambda good, tags: [Message(0, (b"ticket",))], "unknown tag"),
    "the tag of addresses": (lambda good, tags: [Message(1 << 56, (b"ticket",))], "unknown tag"),
    "an untagged message": (lambda good, tags: [Message(None, (b"\1\0\0\0\0",))], "untagged message"),
    "an empty ticket": (lambda good, tags: [Message(tags.want, (b"",))], "no dataset has this ticket"),
    "an unknown ticket": (lambda good, tags: [Message(tags.want, (b"no such ticket",))], "no dataset has this ticket"),
    "a large request": (lambda good, tags: [Message(tags.want, (bytes(1 << 17),))], "at most 65536 are accepted"),
    "a free before its request": (lambda good, tags: [Message(tags.free, (bytes(8),))], "is not allowed|is idle"),
    "a second request": (lambda good, tags: [wanted(good, tags)] * 2, "a second stream"),
    "a free of what it was not sent": (
        lambda good, tags: [wanted(good, tags), Message(tags.free, (bytes([1] * 8),))],
        "which it does not hold",
    ),
    "half a free": (lambda good, tags: [wanted(good, tags), Message(tags.free, (bytes(12),))], "12 bytes"),
}


@pytest.mark.parametrize("medium", media(MEDIA))
def test_a_client_that_breaks_the_protocol_gets_the_reason_and_harms_no_other(serve: Serve, medium: str) -> None:
    fetches = medium != "fabric, tcp"  # test_fabric.py covers servers that refuse allow_rma
    good = serve(MEDIA[medium], allow_rma=fetches)
    for name, (lie, phrase) in LIES.items():
        if "free" in name and not fetches:
            continue  # A server that sends no addresses accepts none.
        connection, uri = connect(good)
        with case(name), connection:
            assert uri.want_data is not None
            assert (uri.free_data is not None) == fetches
            with suppress(ConnectionClosed):
                connection.send(lie(good, Tags(uri.want_data, uri.free_data or 0)), PATIENCE)
            assert re.search(phrase, last_word(connection))
    with case("a second request after the whole stream"), connect(good)[0] as connection:
        connection.send([wanted(good, Tags(uri.want_data or 0, 0))], PATIENCE)
        wait_until(lambda: [one.state for one in good.server.status().consumers] == ["holding"], "all is sent")
        connection.send([wanted(good, Tags(uri.want_data or 0, 0))], PATIENCE)
        assert re.search("a second stream", last_word(connection))
    good.check()
    wait_until(good.alone, "all have gone")


@pytest.mark.parametrize("medium", media(["ucx", "fabric"]))
def test_one_message_frees_everything(serve: Serve, medium: str) -> None:
    good = serve(MEDIA[medium], allow_rma=True)
    batch = pa.record_batch({str(number): pa.array([number], pa.int64()) for number in range(200)})
    good.server.publish("many", pa.Table.from_batches([batch] * 100))
    uri = next(uri for uri in map(Uri.parse, good.server.locations("many")) if uri.remote_handle is not None)
    assert uri.want_data is not None
    assert uri.free_data is not None
    with transport(uri.scheme).connect(uri, PATIENCE) as connection:
        connection.send([Message(uri.want_data, (good.server.ticket("many"),))], PATIENCE)
        held: list[int] = []
        while len(held) < 200 * 100:  # The end of the stream may overtake bodies.
            arrived = connection.receive(PATIENCE, lambda tag, length: bytearray(length))
            assert arrived is not None
            for tag, data in arrived.expand():
                if tag is not None and tag >> 56:
                    pairs = struct.unpack(f"<{len(data) // 8}Q", data)[2:]
                    held += (address for address, length in zip(pairs[::2], pairs[1::2], strict=True) if length)
        assert len(held) == 200 * 100, "an address was sent twice"
        connection.send([Message(uri.free_data, (struct.pack(f"<{len(held)}Q", *held),))], PATIENCE)
        wait_until(lambda: [one.leases for one in good.server.status().consumers] == [0], "all is given back")
    wait_until(good.alone, "all have gone")


def control(kind: int, content: bytes = b"") -> tuple[int, bytes]:
    return CONTROL | kind, content


#: Messages outside the protocol from a client over libfabric that has joined.
SAYINGS = {
    "consumed what was never sent": [control(Kind.CREDIT, b"\xff" * 8)],
    "half a number": [control(Kind.CREDIT, b"\xff" * 4)],
    "a kind that is none": [control(99)],
    "what only servers say": [control(Kind.WELCOME, bytes(17))],
    "what is said to a listener": [control(Kind.HELLO, bytes(17))],
    "that it joins, again": [control(Kind.JOIN)],
    "too much at once": [control(Kind.ABORT, bytes(CONTROL_SIZE + 1))],
    "too many things": [control(Kind.CREDIT, bytes(8))] * 3 + [control(99)] * 300,
    "a large message that has no tag": [(LARGE, bytes(1 << 17))],
    "that it gives up": [control(Kind.ABORT, b"\xff never mind")],
    "that it goes": [control(Kind.BYE)],
}


@pytest.mark.needs("libfabric")
def test_a_client_with_false_control_messages_is_disconnected_and_harms_no_other(serve: Serve) -> None:
    good = serve("fabric:")
    for name, words in SAYINGS.items():
        with case(name), fabric_client(Uri.parse(good.server.locations("good")[0])) as client:
            wait_until(lambda: good.server.connections, "it is there")
            for tag, content in words:
                client.begin(tag, content, lambda: not good.server.connections)
            assert progress_until(client.endpoint, lambda: not good.server.connections), "the server has let go of it"
    good.check()


@contextmanager
def waiting(good: Good, count: int) -> Iterator[None]:
    """Keep `count` connections that send no request, and reconnect when they are disconnected."""
    over = threading.Event()

    def wait() -> None:
        while not over.is_set():
            with suppress(DissociatedError), connect(good)[0] as connection:
                while not over.is_set():
                    with suppress(DeadlineExceeded):
                        connection.receive(0.1, lambda tag, length: bytearray(length))

    threads = [threading.Thread(target=wait) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("medium", media(MEDIA))
def test_a_client_with_a_request_is_served_beside_many_idle_ones(serve: Serve, medium: str) -> None:
    good = serve(MEDIA[medium], max_connections=2, max_pending=4, handshake_timeout=60)
    with waiting(good, 6):
        wait_until(lambda: good.server.connections >= 4, "they are there")
        for _ in range(2):
            dis.open_stream(good.server.locations("good")[0], good.server.ticket("good"), timeout=PATIENCE).read_all()
            wait_until(
                lambda: {one.state for one in good.server.status().consumers} <= {"pending"}, "its place is free"
            )
            assert good.server.connections <= 2 + 2 * 4  # Disconnected clients take a moment to close.
    wait_until(good.alone, "all have gone")
