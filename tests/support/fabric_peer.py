"""Peers over libfabric that say what no peer of the library says: see docs/fabric-peers.md."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from dissociated.transport.native.addresses import advertised_names, host_and_port
from dissociated.transport.native.fabric.endpoint import ConnectionEndpoint, FabricEndpoint
from dissociated.transport.native.fabric.memory import Completion
from dissociated.transport.native.fabric.messages import Kind
from dissociated.transport.native.fabric.transport import open_endpoint, provider_of
from dissociated.uri import Uri
from support.helpers import PATIENCE

CONTROL = 0xFE44_4953_534F_0000  # the tags of control messages, without their kind
VERSION = b"\x02"


def progress_until(endpoint: ConnectionEndpoint, done: Callable[[], object]) -> bool:
    """Let libfabric work until `done`. Return False if that takes longer than the patience of a test."""
    end = time.monotonic() + PATIENCE
    while not (over := bool(done())) and time.monotonic() < end:
        if not endpoint.progress():
            time.sleep(0.002)
    return over


def begin(
    endpoint: ConnectionEndpoint, to: int, tag: int | None, content: bytes, stopped: Callable[[], object]
) -> list[Completion]:
    """Begin to send a message, unless `stopped` comes first. Return the list that its completion is added to."""
    ended: list[Completion] = []
    piece = endpoint.ofi.ffi.from_buffer(content)
    progress_until(endpoint, lambda: stopped() or endpoint.send(to, tag, [piece], ended.append))
    return ended


def tell(
    endpoint: ConnectionEndpoint,
    to: int,
    tag: int | None,
    content: bytes,
    stopped: Callable[[], object] = lambda: False,
) -> None:
    """Send a message, unless `stopped` comes first."""
    ended = begin(endpoint, to, tag, content, stopped)
    progress_until(endpoint, lambda: stopped() or ended)


class FabricPeer:
    """The other end of a connection, which sends anything and receives nothing. One thread may use it.

    Args:
        endpoint: The endpoint of this end.
        address: libfabric's number of the endpoint of the other end.
    """

    def __init__(self, endpoint: ConnectionEndpoint, address: int) -> None:
        self.endpoint, self.address = endpoint, address

    def begin(self, tag: int | None, content: bytes, stopped: Callable[[], object] = lambda: False) -> list[Completion]:
        """Begin to send a message. See `begin`."""
        return begin(self.endpoint, self.address, tag, content, stopped)

    def tell(self, tag: int | None, content: bytes) -> None:
        """Send a message, and wait until libfabric has sent it."""
        tell(self.endpoint, self.address, tag, content)

    def progress(self) -> None:
        """Let libfabric work for a moment."""
        self.endpoint.progress()


@contextmanager
def fabric_client(uri: Uri, rma: bool = False) -> Iterator[FabricPeer]:
    """Yield a client that has joined the server at `uri`. With `rma`, it can read the server's memory."""
    assert uri.host is not None
    endpoint = open_endpoint(provider_of(uri), "127.0.0.1", rma)
    try:
        memory, answers = endpoint.ofi.ffi.new("char[4096]"), list[Completion]()
        endpoint.receive_tagged(memory, CONTROL | Kind.WELCOME, 0, answers.append)
        listener = endpoint.insert(endpoint.find(uri.host, str(uri.port)))
        tell(endpoint, listener, CONTROL | Kind.HELLO, VERSION + endpoint.name)
        assert progress_until(endpoint, lambda: answers)
        welcome = bytes(endpoint.ofi.ffi.buffer(memory, answers[0].length))
        peer = FabricPeer(endpoint, endpoint.insert(advertised_names(welcome[1:], uri.host)))
        for kind in (Kind.JOIN, Kind.BODIES_JOIN)[: endpoint.lanes]:
            peer.tell(CONTROL | kind, b"")
        yield peer
    finally:
        endpoint.close()


class FabricServer:
    """A server of one client.

    Args:
        where: A URI like those of listeners, which may name a provider.
    """

    def __init__(self, where: Uri) -> None:
        provider = provider_of(where)
        with ExitStack() as stack:
            self._listener = FabricEndpoint(provider, "127.0.0.1", "0")
            stack.callback(self._listener.close)
            #: The endpoint for the client.
            self.endpoint = open_endpoint(provider, "127.0.0.1", rma=False)
            stack.callback(self.endpoint.close)
            self._hellos = list[Completion]()
            self._memory = self.endpoint.ofi.ffi.new("char[4096]")
            self._listener.receive_tagged(self._memory, CONTROL | Kind.HELLO, 0, self._hellos.append)
            self.uri = Uri("fabric", "127.0.0.1", host_and_port(self._listener.name)[1], parameters=where.parameters)
            self.close = stack.pop_all().close

    def accept(self) -> FabricPeer:
        """Wait for the client, and for it to join."""
        assert progress_until(self._listener, lambda: self._hellos)
        name = bytes(self.endpoint.ofi.ffi.buffer(self._memory, self._hellos[0].length))[1:]
        joins, memory = list[Completion](), self.endpoint.ofi.ffi.new("char[4096]")
        self.endpoint.receive_tagged(memory, CONTROL | Kind.JOIN, 0, joins.append)
        to = self._listener.insert(name[: len(name) // self.endpoint.lanes])
        tell(self._listener, to, CONTROL | Kind.WELCOME, VERSION + self.endpoint.name)
        assert progress_until(self.endpoint, lambda: joins)
        return FabricPeer(self.endpoint, self.endpoint.insert(name))
