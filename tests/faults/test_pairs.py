"""Metadata and bodies from two servers, one of which misbehaves: the client notices, and closes both connections."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import dissociated as dis
from dissociated.errors import (
    ConnectionClosed,
    DeadlineExceeded,
    RemoteError,
    RemoteProtocolError,
    TransportError,
    UriError,
)

from .conftest import Scripted, Serve
from .content import BODY, META, SCHEMA, TABLE
from .peer import ABORT, PREAMBLE, TAGGED, RawConnection, Script, body, end, frame, head

SILENCE = 0.3  # seconds

METADATA = PREAMBLE + SCHEMA + META + end(2)
BODIES = PREAMBLE + body(1, BODY)


def saying(data: bytes, then: Callable[[RawConnection], None] = RawConnection.hold) -> Script:
    def script(connection: RawConnection) -> None:
        assert connection.read_frame().payload == b"ticket"
        connection.send(data)
        then(connection)

    return script


Then = Callable[[RawConnection], None]
HOLD, CLOSE = RawConnection.hold, RawConnection.close

#: Messages and actions of the two servers, and the resulting error.
PAIRS: dict[str, tuple[bytes, Then, bytes, Then, type[Exception], str]] = {
    "bodies are silent": (METADATA, HOLD, b"", HOLD, DeadlineExceeded, "silent"),
    "bodies stop": (METADATA, HOLD, BODIES[:4000], HOLD, DeadlineExceeded, "silent"),
    "bodies end before a word": (METADATA, HOLD, b"", CLOSE, ConnectionClosed, "before it sent anything"),
    "bodies end": (METADATA, HOLD, PREAMBLE, CLOSE, RemoteProtocolError, "before its end: message 1"),
    "bodies end within one": (METADATA, HOLD, BODIES[:4000], CLOSE, ConnectionClosed, "in the middle"),
    "bodies are garbage": (METADATA, HOLD, b"garbage!" * 3, HOLD, RemoteProtocolError, "does not speak"),
    "bodies abort": (METADATA, HOLD, PREAMBLE + frame(ABORT, b"no"), HOLD, RemoteError, "no"),
    "bodies are enormous": (METADATA, HOLD, PREAMBLE + head(TAGGED, 2**55, 1), HOLD, RemoteProtocolError, "body"),
    "metadata is silent": (b"", HOLD, BODIES, HOLD, DeadlineExceeded, "silent"),
    "metadata stops": (METADATA[:-10], HOLD, BODIES, HOLD, DeadlineExceeded, "silent"),
    "metadata ends": (METADATA[:-24], CLOSE, BODIES, HOLD, RemoteProtocolError, "before its end: message 2"),
    "metadata is garbage": (b"garbage!" * 3, HOLD, BODIES, HOLD, RemoteProtocolError, "does not speak"),
    "metadata aborts": (PREAMBLE + SCHEMA + frame(ABORT, b"no"), HOLD, BODIES, HOLD, RemoteError, "no"),
    "metadata has reserved bits": (
        PREAMBLE + SCHEMA + head(1, 5, 1),
        HOLD,
        BODIES,
        HOLD,
        RemoteProtocolError,
        "no tag",
    ),
    "the two are swapped": (BODIES, HOLD, METADATA, HOLD, RemoteProtocolError, "the first is that of the metadata"),
}


@pytest.mark.parametrize("name", PAIRS)
def test_broken_pair(scripted: Scripted, name: str) -> None:
    metadata, then, bodies, and_then, error, phrase = PAIRS[name]
    servers = scripted("tcp", saying(metadata, then)), scripted("shm", saying(bodies, and_then))
    with pytest.raises(error, match=phrase) as caught:
        dis.open_stream([server.uri for server in servers], b"ticket", timeout=SILENCE).read_all()
    assert type(caught.value) is error
    for server in servers:
        server.wait_done()
    del caught


def test_good_pair(scripted: Scripted) -> None:
    servers = scripted("tcp", saying(METADATA)), scripted("tcp", saying(BODIES))
    assert dis.open_stream([server.uri for server in servers], b"ticket", timeout=5).read_all().equals(TABLE)
    for server in servers:
        server.wait_done()


def test_second_server_is_not_there(scripted: Scripted, runtime: str) -> None:
    first = scripted("shm", RawConnection.hold)
    with pytest.raises(TransportError, match="check that it runs on this host"):
        dis.open_stream([first.uri, f"shm://{runtime}/nobody.sock?want_data=1"], b"ticket")
    first.wait_done()


def test_second_uri_is_wrong(scripted: Scripted) -> None:
    # The client connects only after both URIs have been checked.
    with pytest.raises(UriError, match="want_data"):
        dis.open_stream(["tcp://127.0.0.1:1?want_data=1", "tcp://127.0.0.1:1"], b"ticket")
    with pytest.raises(UriError, match="not 3"):
        dis.open_stream(["tcp://127.0.0.1:1?want_data=1"] * 3, b"ticket")
    with pytest.raises(UriError, match="not 0"):
        dis.open_stream([], b"ticket")


def test_one_of_two_refuses(serve: Serve, scripted: Scripted) -> None:
    good = serve("tcp://127.0.0.1:0")
    (metadata,) = good.server.locations("good", streams="metadata")
    (bodies,) = good.server.locations("good", streams="bodies")
    silent = scripted("tcp", RawConnection.hold)
    for uris in ([metadata, silent.uri], [silent.uri, bodies]):
        with pytest.raises((RemoteError, DeadlineExceeded), match=r"no dataset has this ticket|silent"):
            dis.open_stream(uris, b"unknown", timeout=SILENCE)
        silent.wait_done()
    good.check()


def test_reader_is_dropped_half_way(scripted: Scripted) -> None:
    # A body is in progress that never ends.
    servers = scripted("tcp", saying(METADATA)), scripted("tcp", saying(BODIES[:4000]))
    reader = dis.open_stream([server.uri for server in servers], b"ticket", timeout=60)
    del reader
    for server in servers:
        server.wait_done()
