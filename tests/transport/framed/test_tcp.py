from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from dissociated.errors import TransportError, UriError
from dissociated.transport.base import Connection
from dissociated.transport.registry import transport
from dissociated.uri import Uri
from support.helpers import PATIENCE, Serve

TCP = transport("tcp")


def test_a_listener_names_the_real_port() -> None:
    with closing(TCP.listen(Uri.parse("tcp:"))) as listener:
        assert listener.uri.host == "127.0.0.1"
        assert listener.uri.port
        assert str(listener.uri) == f"tcp://127.0.0.1:{listener.uri.port}"
        TCP.connect(listener.uri, PATIENCE).close()


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(TransportError, match=rf"listening on 127\.0\.0\.1:{port}: Address already in use"):
            TCP.listen(Uri.parse(f"tcp://127.0.0.1:{port}"))


def test_a_server_that_cannot_listen_leaves_nothing(serve: Serve) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(TransportError, match="in use"):
        serve("shm:", f"tcp://127.0.0.1:{taken.getsockname()[1]}")


def test_a_port_where_nobody_listens_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    with pytest.raises(TransportError, match=rf"connecting to the tcp server 127\.0\.0\.1:{port}: Connection refused"):
        TCP.connect(Uri.parse(f"tcp://127.0.0.1:{port}"), PATIENCE)


def test_a_host_that_does_not_exist_is_named() -> None:
    with pytest.raises(TransportError, match=r"no-such-host\.invalid:1"):
        TCP.connect(Uri.parse("tcp://no-such-host.invalid:1"), PATIENCE)


@pytest.mark.parametrize("uri", ["tcp:", "tcp://127.0.0.1", "tcp://:4000"])
def test_connecting_needs_a_host_and_a_port(uri: str) -> None:
    with pytest.raises(UriError, match="tcp://HOST:PORT"):
        TCP.connect(Uri.parse(uri), PATIENCE)


def test_a_wake_never_raises_while_the_connection_closes() -> None:
    """A wake that raises would end a live stream for everybody when one of its clients is sent away."""

    def wake(server: Connection, closed: threading.Event) -> None:
        while not closed.is_set():
            server.wake()

    with closing(TCP.listen(Uri.parse("tcp:"))) as listener, ThreadPoolExecutor(1) as pool:
        for _ in range(30):
            with TCP.connect(listener.uri, PATIENCE):
                server = listener.accept()
                assert server is not None
                server.wait(0)
                closed = threading.Event()
                waking = pool.submit(wake, server, closed)
                server.close()
                closed.set()
                waking.result(PATIENCE)
