"""The log contains each sent and received message if tracing is enabled, and never its content."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator
from contextlib import closing

import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.errors import ConnectionClosed, DeadlineExceeded
from dissociated.protocol.message import Message
from dissociated.protocol.sender import Tags
from dissociated.protocol.wire import Streams
from dissociated.transport.base import Connection
from dissociated.transport.registry import transport
from dissociated.transport.trace import traced
from dissociated.uri import Uri
from support.helpers import PATIENCE, Serve, case, clients_end, connections_left, written_forms
from support.machine import media

TICKET, CONTENT = b"the ticket/of the data", b"what is+in the body?"
WORDS = pa.Table.from_batches([pa.record_batch({"word": pa.array([CONTENT.decode()] * 2).dictionary_encode()})])
MANY = pa.Table.from_batches([pa.record_batch({"n": [n]}) for n in range(100)])

LISTEN = {
    "shm": "shm:",
    "tcp": "tcp://127.0.0.1:0",
    "inproc": "inproc:",
    "ucx": "ucx://127.0.0.1:0",
    "fabric": "fabric://127.0.0.1:0",
}
#: Trace lines of the reads below: from the server to the client, apart from the bodies, and back.
FROM_SERVER = (
    r"schema 0: metadata of \d+ bytes",
    r"dictionary batch 1: metadata of \d+ bytes for a body of \d+ bytes",
    r"record batch 2: metadata of \d+ bytes for a body of \d+ bytes",
    "end of stream, after 3 messages",
    "end of stream, after 101 messages",
    "abort: 'no dataset has this ticket, .*'",
)
#: Size of what a client adds to its ticket for a server that shares memory.
MEMBERS_SIZE = len(b"DISSREQ\x01") + 4 + len('{"frees": "messages"}')


@pytest.fixture
def debugging(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.DEBUG, "dissociated"):
        yield caplog


@pytest.mark.parametrize("medium", media(LISTEN))
def test_each_message_is_a_line_and_its_content_in_none(
    debugging: pytest.LogCaptureFixture, serve: Serve, medium: str
) -> None:
    before = threading.enumerate()
    server = serve(LISTEN[medium])
    server.publish("words", WORDS, ticket=TICKET)
    server.publish("many", MANY)
    (uri,) = server.locations("words")
    assert dis.open_stream(uri, TICKET).read_all() == WORDS
    assert dis.open_stream(uri, server.ticket("many")).read_all() == MANY
    with pytest.raises(dis.errors.RemoteError, match="no dataset has this ticket"):
        dis.open_stream(uri, TICKET + b"!")
    clients_end(before)
    assert connections_left(server) == 0

    log = "\n".join(f"{record.getMessage()} {vars(record)}" for record in debugging.records)
    for form in written_forms(TICKET) | written_forms(CONTENT) | written_forms(server.ticket("many")):
        assert form not in log

    said = [record.getMessage() for record in debugging.records if record.name == "dissociated.transport.trace"]
    by_server = [line for line in said if re.match(r"connection [123] \(.+\): ", line)]
    by_client = [line for line in said if line not in by_server]
    assert all(re.match(r"connection c\d+ \(.+\): ", line) for line in by_client)
    assert {vars(record).get("connection") for record in debugging.records} - {None} == {1, 2, 3}
    kind = "by address" if medium == "shm" else "packed"
    from_server = [*FROM_SERVER, f"body 1: {kind}, .*", f"body 2: {kind}, .*"]
    added = MEMBERS_SIZE if medium == "shm" else 0
    from_client = [rf"want_data \(both\), {len(TICKET) + added + more} bytes" for more in (0, 1)]
    if medium == "shm":
        from_server.append(r"(a region of|regions: 1, of) [\d,]+ bytes.*")
        from_client.append(r"free_data of \d+ leases")
    for lines, sent, received in ((by_server, from_server, from_client), (by_client, from_client, from_server)):
        for what in [*(f"sent {one}" for one in sent), *(f"received {one}" for one in received)]:
            with case(what):
                assert any(re.search(rf": {what}\Z", line) for line in lines)
    runs = [line for line in said if "a run of 100 messages and their bodies, alike in size; the first: record" in line]
    assert sorted("sent" in line for line in runs) == ([True] if medium == "inproc" else [False, True])


@pytest.fixture
def pair() -> Iterator[tuple[Connection, Connection]]:
    """Yield the two ends of a connection, the client's first."""
    inproc = transport("inproc")
    with closing(inproc.listen(Uri.parse("inproc:"))) as listener, inproc.connect(listener.uri, PATIENCE) as client:
        accepted = listener.accept()
        assert accepted is not None
        with accepted:
            yield client, accepted


def test_what_cannot_be_sent_or_received_is_a_line_too(
    debugging: pytest.LogCaptureFixture, pair: tuple[Connection, Connection]
) -> None:
    client, server = pair
    client = traced(client, Tags({7: Streams.METADATA}, 8))
    server = traced(server, Tags({7: Streams.METADATA}, 8), 1)
    client.send([Message(7, (b"it",)), Message(8, (bytes(16),)), Message(9, (b"secret",))], PATIENCE)
    while server.arrived():
        server.receive(PATIENCE, bytearray_of)
    server.send([Message(None, (b"\x01secret",)), Message(1 << 40, (b"secret",)), Message(1 << 56, (b"s",))], PATIENCE)
    while client.arrived():
        client.receive(PATIENCE, bytearray_of)
    with pytest.raises(DeadlineExceeded):
        client.receive(0.01, bytearray_of)
    server.close("it has\nfailed", linger=PATIENCE)
    server.close("it has\nfailed", linger=PATIENCE)
    with pytest.raises(dis.errors.RemoteError):
        client.receive(PATIENCE, bytearray_of)
    client.close()
    with pytest.raises(ConnectionClosed):
        client.send([Message(7, (b"again",)), Message(8, (bytes(8),))], PATIENCE)
    assert [server.receive(PATIENCE, bytearray_of)] == [None]
    from_client = [
        "want_data (metadata), 2 bytes",
        "free_data of 2 leases",
        "a message with the unknown tag 0x0000000000000009, 6 bytes",
    ]
    from_server = [
        "metadata of 7 bytes that is not known",
        "a body with the unknown tag 0x0000010000000000, 6 bytes",
        "body 0: an address list that is cut off, 1 bytes",
    ]
    said = [record.getMessage().partition("(this process): ")[2] for record in debugging.records]
    assert said == [
        *(f"sent {one}" for one in from_client),
        *(f"received {one}" for one in from_client),
        *(f"sent {one}" for one in from_server),
        *(f"received {one}" for one in from_server),
        "received nothing: 'the peer was silent for 0.01 s'",
        "sent abort: 'it has\\nfailed'",
        "received abort: 'it has\\nfailed'",
        "could not send want_data (metadata), 5 bytes, nor 1 more: 'this side closed the connection'",
        "received the end",
    ]


def test_a_connection_is_as_it_was_where_nobody_asks(
    caplog: pytest.LogCaptureFixture, pair: tuple[Connection, Connection]
) -> None:
    with caplog.at_level(logging.INFO, "dissociated"):
        assert traced(pair[0], Tags({})) is pair[0]


def bytearray_of(tag: int | None, length: int) -> bytearray:
    return bytearray(length)
