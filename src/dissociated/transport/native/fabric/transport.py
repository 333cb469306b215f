"""fabric://HOST:PORT[?provider=…]: libfabric, over TCP unless another provider is named.

Untagged and tagged messages of the protocol are untagged and tagged messages of libfabric. Tags do not name the sender,
so each connection has one or two endpoints of its own. Control messages, from the exchange of names to heartbeats, are
tagged messages too: see docs/fabric-peers.md.
"""

from __future__ import annotations

import logging
import socket
import struct
import time
import weakref
from collections import deque
from contextlib import ExitStack
from typing import Any

from dissociated.base.limited_log import LimitedLog
from dissociated.base.oserrors import socket_error
from dissociated.errors import TransportError, UriError
from dissociated.memory.region import Region
from dissociated.memory.remote import Span, parse_spans
from dissociated.transport.base import Connection, Listener, Transport
from dissociated.transport.framed.tcp import check_host_name
from dissociated.transport.native.addresses import host_and_port
from dissociated.transport.native.connection import NativeConnection
from dissociated.transport.native.fabric import libfabric as c
from dissociated.transport.native.fabric.channel import FabricChannel, ListenerAddress
from dissociated.transport.native.fabric.endpoint import ConnectionEndpoint, DualEndpoint, FabricEndpoint
from dissociated.transport.native.fabric.libfabric import LIBRARY, ofi
from dissociated.transport.native.fabric.memory import RMA_KEY, Completion, Domain
from dissociated.transport.native.fabric.messages import (
    CONTROL,
    CONTROL_BUFFERS,
    CONTROL_SIZE,
    VERSION,
    Kind,
    held_up,
)
from dissociated.transport.native.listener import NativeListener, Withdraw, withdraw_with
from dissociated.transport.native.threads import MAX_SLEEP
from dissociated.transport.runs import OFFER, offers_runs
from dissociated.uri import ANY_INTERFACE, Uri

_log = logging.getLogger(__name__)

PROVIDER = "tcp;ofi_rxm"
_HEARTBEAT = 2.0  # seconds
_RETRY_DELAY = 0.002  # seconds between two attempts while libfabric accepts no operation
LAST_TIMEOUT = 0.25  # seconds for an answer to be sent
_MAX_KNOWN_CLIENTS = 64  # limit of clients whose names are in the address vector
_MAX_WAITING = 128  # limit of clients that wait to be accepted
_MAX_ANSWERS = 16  # answers in progress, so that a client that does not receive its answer delays no other client
#: Limit of clients that have an endpoint and have not joined yet: each costs 16 MB and a dozen descriptors.
_MAX_JOINING = 16
_JOIN_TIME = 1.0  # seconds that such a client has to join, even if others wait
_UNUSABLE_PROVIDERS = {
    "shm": "it can only be waited for by spinning, and leaves memory in /dev/shm: use shm: or tcp;ofi_rxm",
    "net": "it keeps a processor busy while nothing happens: use tcp;ofi_rxm",
    "udp": "it cuts messages off without an error: use tcp;ofi_rxm",
    "sockets": "libfabric has given it up: use tcp;ofi_rxm",
}


class FabricTransport(Transport):
    """The transport for fabric: URIs."""

    connection_type = NativeConnection

    def connect(self, uri: Uri, timeout: float) -> Connection:
        if not uri.host or not uri.port:
            raise UriError(f"{uri} needs a host and a port: fabric://HOST:PORT")
        provider, heartbeat = provider_of(uri), heartbeat_interval(uri)
        where = f"the fabric server {uri.host}:{uri.port}"
        here, there = _probe(uri.host, uri.port, timeout, where)
        spans = parse_spans(uri)
        if any(len(span.key) != RMA_KEY.size for span in spans):
            raise UriError("the remote_handle was not made by libfabric: take the URI of a fabric: location unchanged")
        endpoint = open_endpoint(provider, here, bool(spans))
        try:
            check_same(uri, endpoint)
            listener = ListenerAddress(endpoint.find(there, str(uri.port)), there)
            channel = FabricChannel(endpoint, where, heartbeat, offers_runs(uri), listener)
            connection = NativeConnection(channel, spans)
        except BaseException:
            endpoint.close()
            raise
        connection.connect(timeout)
        return connection

    def listen(self, uri: Uri) -> Listener:
        return FabricListener(uri)


def _probe(host: str, port: int, timeout: float, where: str) -> tuple[str, str]:
    """Connect to the server once by TCP, because libfabric would try to connect to a closed port forever.

    Returns:
        The IP addresses of this host and of the server.

    Raises:
        TransportError: The server cannot be reached.
    """
    check_host_name(host)
    try:
        with socket.create_connection((host, port), timeout) as probe:
            return probe.getsockname()[0], probe.getpeername()[0]
    except OSError as error:
        raise socket_error(error, f"connecting to {where}") from None


class _Answer:
    """The answer to the HELLO of a client, and the connection that is returned once the answer is sent."""

    __slots__ = ("client", "completions", "connection", "end", "is_begun", "kind", "payload")

    def __init__(self, client: int, kind: Kind, payload: Any, connection: Connection | None) -> None:
        self.client, self.kind, self.payload, self.connection = client, kind, payload, connection
        self.is_begun, self.end = False, time.monotonic() + LAST_TIMEOUT
        self.completions: list[Completion] = []


class FabricListener(NativeListener):
    """A listener with an endpoint that only receives the HELLO of clients. Each client gets an endpoint of its own."""

    def __init__(self, uri: Uri) -> None:
        self._log = LimitedLog(_log)
        self._provider, self._heartbeat = provider_of(uri), heartbeat_interval(uri)
        self._host = uri.host or "127.0.0.1"
        rma = allows_rma(uri, self._provider)
        self._endpoint = endpoint = FabricEndpoint(self._provider, self._host, str(uri.port or 0), rma)
        self._ffi = endpoint.ofi.ffi
        self._hellos: deque[bytes] = deque()
        self._clients: deque[int] = deque()
        self._answers: list[_Answer] = []
        #: Connections whose clients have not joined, and their start times, oldest first. Their acceptors own them.
        self._joining: list[tuple[float, weakref.ref[NativeConnection]]] = []
        with ExitStack() as undo:
            undo.callback(endpoint.close)
            super().__init__(exposes_memory=rma)
            undo.callback(self._monitor.waker.close)
            for _ in range(CONTROL_BUFFERS):
                self._listen(self._ffi.new(f"char[{CONTROL_SIZE}]"))
            host, port = host_and_port(endpoint.name)
            if self._host in ANY_INTERFACE and self._provider != "tcp":
                self._host = host  # the address that rxm has chosen
            undo.pop_all()
        parameters = {
            "provider": self._provider,
            "protocol": endpoint.protocol,
            "libfabric": endpoint.ofi.version,
            **OFFER,
        }
        if "heartbeat" in uri.parameters:
            parameters["heartbeat"] = uri.parameters["heartbeat"]
        self.uri = Uri("fabric", host=self._host, port=port, parameters=parameters)

    def _listen(self, memory: Any) -> None:
        def on_done(completion: Completion) -> None:
            if not completion.error:
                if len(self._hellos) < _MAX_WAITING:
                    self._hellos.append(bytes(self._ffi.buffer(memory, completion.length)))
                self._listen(memory)

        self._endpoint.receive_tagged(memory, CONTROL | Kind.HELLO, 0, on_done)

    def _progress(self) -> None:
        while not self._closed and self._endpoint.progress():
            pass
        while not self._closed and self._endpoint.peek() is not None:
            self._endpoint.discard()

    def _next(self) -> Connection | None:
        while self._hellos and len(self._answers) < _MAX_ANSWERS and self._has_place():
            self._welcome(self._hellos[0])
            self._hellos.popleft()
        for answer in [answer for answer in self._answers if self._is_answered(answer)]:
            self._answers.remove(answer)
            if answer.connection is not None:
                return answer.connection
        return None

    def _arm(self) -> bool:
        return self._endpoint.arm()

    def _sleep(self) -> None:
        seconds = _RETRY_DELAY if self._answers or self._hellos else MAX_SLEEP
        self._monitor.waker.sleep(self._endpoint.wakes, seconds)

    def _has_place(self) -> bool:
        """Return whether another client may have an endpoint.

        If not, interrupt the connection whose client has had the longest time to join, once it has had `_JOIN_TIME`.
        The owner of that connection closes it.
        """
        self._joining = [
            (since, client) for since, client in self._joining if (joining := client()) and joining.is_joining
        ]
        if len(self._joining) < _MAX_JOINING:
            return True
        since, oldest = self._joining[0]
        slowest = oldest()
        if slowest is not None and time.monotonic() >= since + _JOIN_TIME:
            slowest.arrived()  # handles a JOIN that has arrived and was not read yet
            if slowest.is_joining:
                slowest.interrupt()
        return False

    def _welcome(self, hello: bytes) -> None:
        """Begin to answer the HELLO of a client: with a new connection, or with a rejection."""
        version, name = hello[:1], hello[1:]
        try:
            client = self._endpoint.insert(name)
            peer = "fabric client {}:{}".format(*host_and_port(name))
        except (TransportError, ValueError, struct.error) as error:
            self._log.write(
                logging.INFO,
                "client refused, invalid endpoint name: listener=%s error=%s",
                self.uri,
                error,
                event="no name",
            )
            return
        self._clients.append(client)
        if len(self._clients) > _MAX_KNOWN_CLIENTS:
            self._endpoint.remove(self._clients.popleft())
        if version != VERSION or len(name) != len(self._endpoint.name) * lanes(self._provider):
            self._answer(client, Kind.ABORT, b"the server exchanges names in another way: install the same version")
            return
        # Memory is registered with the listener's domain, so endpoints from which peers read it must share that domain.
        domain = self._endpoint.domain if self.exposes_memory else None
        endpoint = open_endpoint(self._provider, self._host, self.exposes_memory, domain)
        try:
            channel = FabricChannel(endpoint, peer, self._heartbeat, client=name)
            connection = NativeConnection(channel)
        except BaseException:
            endpoint.close()
            raise
        connection.open()
        self._joining.append((time.monotonic(), weakref.ref(connection)))
        self._answer(client, Kind.WELCOME, VERSION + endpoint.name, connection)

    def _answer(self, client: int, kind: Kind, payload: bytes, connection: Connection | None = None) -> None:
        self._answers.append(_Answer(client, kind, self._ffi.from_buffer(payload), connection))

    def _is_answered(self, answer: _Answer) -> bool:
        """Return whether an answer was sent or has expired, and begin to send it if that has not begun yet."""
        try:
            if not answer.is_begun:
                answer.is_begun = self._endpoint.send(
                    answer.client, CONTROL | answer.kind, [answer.payload], answer.completions.append
                )
        except TransportError as error:  # the client is gone
            _log.debug("answer failed: uri=%s error=%s", self.uri, error)
            return True
        return bool(answer.completions) or time.monotonic() >= answer.end

    def _turn_away(self) -> None:
        for answer in self._answers:
            if answer.connection is not None:
                answer.connection.close()

    def _release(self) -> None:
        self._endpoint.close()

    def _register(self, region: Region) -> tuple[Span, Withdraw]:
        endpoint = self._endpoint
        memory = self._ffi.from_buffer(region.memory)
        registered = endpoint.domain.register(memory, c.REMOTE_READ)
        withdraw = withdraw_with(region, _withdraw, endpoint.domain, registered, memory)
        return Span(region.base, region.size, RMA_KEY.pack(endpoint.virtual_addresses, registered.key)), withdraw


def _withdraw(domain: Domain, registered: Any, memory: Any) -> None:
    domain.unregister(registered)


def allows_rma(uri: Uri, provider: str) -> bool:
    """Return whether a listener lets clients fetch from memory.

    Only rxm supports that. Memory is registered with the listener's domain, which all its connections then share. With
    other providers, a peek of any endpoint of a domain, including the listener's, finds the messages of all of them.

    Raises:
        UriError: The URI requests it with another provider. Clients would receive addresses that they cannot read.
    """
    if uri.parameters.get("rma") != "allow":
        return False
    if not provider.endswith("ofi_rxm"):
        raise UriError(
            f"allow_rma is not possible with provider={provider} in {uri}: use {PROVIDER}, or leave allow_rma out"
        )
    return True


def provider_of(uri: Uri) -> str:
    """Return the provider in `uri`, or the default. Raise UriError for a provider that is known to be unusable."""
    name = uri.parameters.get("provider", PROVIDER)
    version = tuple(map(int, ofi().version.split(".")))
    wrong = _UNUSABLE_PROVIDERS.get("udp" if name.startswith("udp") else name)
    if name == "tcp" and version < (2, 0):
        wrong = f"before libfabric 2.0, and this is {ofi().version}, it means tcp;ofi_rxm: say that"
    elif not name or not all(part.isascii() and part.isidentifier() for part in name.split(";")):
        wrong = "that is no name of a provider"
    if wrong:
        raise UriError(f"provider={name} in {uri} cannot be used: {wrong}")
    return name


def lanes(provider: str) -> int:
    """Return the number of endpoints of a connection."""
    return DualEndpoint.lanes if provider == "tcp" else FabricEndpoint.lanes


def open_endpoint(provider: str, host: str, rma: bool, domain: Domain | None = None) -> ConnectionEndpoint:
    """Open the endpoint, or the pair of endpoints, of one connection."""
    if lanes(provider) == DualEndpoint.lanes:
        return DualEndpoint(provider, host, held_up)
    return FabricEndpoint(provider, host, None, rma, domain)


def check_same(uri: Uri, endpoint: ConnectionEndpoint) -> None:
    """Raise TransportError if the server has an incompatible libfabric or protocol: no message would ever arrive."""
    version = endpoint.ofi.version
    server_version = uri.parameters.get("libfabric", version)
    protocol = uri.parameters.get("protocol", endpoint.protocol)
    if server_version.split(".")[0] != version.split(".")[0] or protocol != endpoint.protocol:
        where = f"the fabric server {uri.host}:{uri.port}"
        raise LIBRARY.mismatch(where, f"{server_version} (protocol {protocol})", f"{version} ({endpoint.protocol})")


def heartbeat_interval(uri: Uri) -> float:
    """Return the seconds between heartbeats that a URI asks for. Raises UriError if they are out of range."""
    text = uri.parameters.get("heartbeat", "")
    try:
        seconds = float(text or _HEARTBEAT)
    except ValueError:
        seconds = 0.0
    if not 0.01 <= seconds <= 3600:
        raise UriError(f"heartbeat={text!r} in {uri} is not a number of seconds from 0.01 to 3600")
    return seconds
