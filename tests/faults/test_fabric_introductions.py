"""Introductions over libfabric: servers that lie or send without end, and clients that do not receive the answer."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

from dissociated.errors import DeadlineExceeded, DissociatedError, RemoteProtocolError, TransportError
from dissociated.transport.native.addresses import host_and_port
from dissociated.transport.native.fabric import transport as transports
from dissociated.transport.native.fabric.endpoint import FabricEndpoint
from dissociated.transport.native.fabric.memory import Completion
from dissociated.transport.native.fabric.messages import Kind
from dissociated.transport.native.fabric.transport import PROVIDER
from dissociated.transport.registry import transport
from dissociated.uri import Uri
from support.fabric_peer import CONTROL, VERSION, progress_until, tell

from .conftest import Serve
from .peer import PATIENCE

pytestmark = pytest.mark.needs("libfabric")

TIMEOUT = 1.0  # seconds for connecting

#: A tag or None, and a function that makes the message from the sender's name.
Word = tuple[int | None, Callable[[bytes], bytes]]


def word(kind: int, content: bytes = b"") -> Word:
    return CONTROL | kind, lambda name: content


@contextmanager
def server(words: list[Word], again: bool) -> Iterator[Uri]:
    """Send these messages to the first peer that says HELLO, and repeat the last one."""
    endpoint = FabricEndpoint(PROVIDER, "127.0.0.1", "0")
    memory = endpoint.ofi.ffi.new("char[4096]")
    hello: list[Completion] = []
    endpoint.receive_tagged(memory, CONTROL | Kind.HELLO, 0, hello.append)
    stop = threading.Event()

    def talk() -> None:
        if not progress_until(endpoint, lambda: hello or stop.is_set()) or not hello:
            return
        client = endpoint.insert(bytes(endpoint.ofi.ffi.buffer(memory, hello[0].length))[1:])
        with suppress(TransportError):
            for tag, content in words:
                tell(endpoint, client, tag, content(endpoint.name), stop.is_set)
            while not stop.wait(TIMEOUT / 10):
                if again:
                    tell(endpoint, client, words[-1][0], words[-1][1](endpoint.name), stop.is_set)
                endpoint.progress()

    thread = threading.Thread(target=talk)
    thread.start()
    try:
        yield Uri("fabric", host="127.0.0.1", port=host_and_port(endpoint.name)[1])
    finally:
        stop.set()
        thread.join(PATIENCE)
        endpoint.close()


#: The messages of each server, whether it repeats the last one, and the resulting error of its client.
LIES: dict[str, tuple[list[Word], bool, type[DissociatedError], str]] = {
    "another version": ([word(Kind.WELCOME, b"\x09" + bytes(16))], False, TransportError, "another way"),
    "an empty answer": ([word(Kind.WELCOME)], False, TransportError, "another way"),
    "half a name": (
        [word(Kind.WELCOME, VERSION + bytes(8))],
        False,
        RemoteProtocolError,
        "invalid name of an endpoint",
    ),
    "a name of no family": (
        [word(Kind.WELCOME, VERSION + b"\xff" * 16)],
        False,
        RemoteProtocolError,
        "invalid name of an endpoint",
    ),
    "a kind that is none": ([word(99)], False, RemoteProtocolError, "invalid control message"),
    "what only clients say": ([word(Kind.JOIN)], False, RemoteProtocolError, "invalid control message"),
    "a place for bodies, forever": ([word(Kind.BODIES_JOIN)], True, RemoteProtocolError, "invalid control message"),
    "more consumed than sent": (
        [word(Kind.CREDIT, b"\xff" * 8)],
        False,
        RemoteProtocolError,
        "received more bytes than were sent",
    ),
    "heartbeats, forever": ([word(Kind.CREDIT, bytes(8))], True, DeadlineExceeded, "no answer"),
    "metadata, forever": ([(None, lambda name: b"\1" * 100)], True, DeadlineExceeded, "no answer"),
    "bodies, forever": ([(1, lambda name: bytes(100))], True, DeadlineExceeded, "no answer"),
}


def test_a_server_that_lies_or_talks_without_end_holds_nobody() -> None:
    for name, (words, again, kind, complaint) in LIES.items():
        with server(words, again) as uri:
            begun = time.monotonic()
            with pytest.raises(DissociatedError) as raised:
                transport("fabric").connect(uri, TIMEOUT)
            assert type(raised.value) is kind, (name, raised.value)
            assert complaint in str(raised.value), name
            assert time.monotonic() - begun < TIMEOUT + 4, name


def test_an_answer_that_is_given_again_and_again_is_no_sign_of_work() -> None:
    with (
        server([(CONTROL | Kind.WELCOME, lambda name: VERSION + name)], again=True) as uri,
        pytest.raises(RemoteProtocolError, match="invalid control message"),
        transport("fabric").connect(uri, PATIENCE) as connection,
    ):
        connection.receive(TIMEOUT, lambda tag, length: bytearray(length))


def test_clients_that_only_say_hello_keep_no_other_client_out(serve: Serve) -> None:
    """Limit clients that say HELLO and never join. Each place costs 16 MB, and 40 are requested."""
    good = serve("fabric:", handshake_timeout=5.0)
    uri = Uri.parse(good.server.locations("good")[0])
    assert uri.host is not None
    endpoint = FabricEndpoint(PROVIDER, "127.0.0.1", None)
    try:
        listener, most = endpoint.insert(endpoint.find(uri.host, str(uri.port))), 0
        for _ in range(40):
            tell(endpoint, listener, CONTROL | Kind.HELLO, VERSION + endpoint.name)
        client = threading.Thread(target=good.check)
        client.start()
        while client.is_alive():
            endpoint.progress()
            most = max(most, good.server.connections)
            client.join(0.01)
    finally:
        endpoint.close()
    assert 16 <= most <= 18


def test_clients_that_do_not_take_an_answer_delay_nobody(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give silent clients as long to take their answers as the good client has to connect, so that waits show."""
    monkeypatch.setattr(transports, "LAST_TIMEOUT", 2 * PATIENCE)
    good = serve("fabric:", handshake_timeout=1.0)
    uri = Uri.parse(good.server.locations("good")[0])
    assert uri.host is not None
    with ExitStack() as stack:
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=64))
        endpoint = FabricEndpoint(PROVIDER, "127.0.0.1", None)
        stack.callback(endpoint.close)
        listener = endpoint.insert(endpoint.find(uri.host, str(uri.port)))
        name = endpoint.name[:2] + silent.getsockname()[1].to_bytes(2, "big") + endpoint.name[4:]
        for _ in range(15):
            tell(endpoint, listener, CONTROL | Kind.HELLO, VERSION + name)
        transport("fabric").connect(uri, PATIENCE).close()
        assert good.server.connections <= 1  # The others still wait for their answers.
