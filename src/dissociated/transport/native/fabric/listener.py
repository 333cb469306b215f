"""Listeners over libfabric: an endpoint that receives the HELLO of clients, and answers with an endpoint for each."""

from __future__ import annotations

import logging
import struct
import time
import weakref
from collections import deque
from contextlib import ExitStack
from typing import Any

from dissociated.base.limited_log import LimitedLog
from dissociated.errors import TransportError
from dissociated.memory.region import Region
from dissociated.memory.remote import Span
from dissociated.transport.base import Connection
from dissociated.transport.native.addresses import host_and_port
from dissociated.transport.native.fabric import libfabric as c
from dissociated.transport.native.fabric.connection import FabricConnection
from dissociated.transport.native.fabric.control import CONTROL, CONTROL_BUFFERS, CONTROL_SIZE, VERSION, Kind
from dissociated.transport.native.fabric.endpoint import FabricEndpoint
from dissociated.transport.native.fabric.memory import RMA_KEY, Completion, Domain
from dissociated.transport.native.fabric.provider import (
    allows_rma,
    heartbeat_interval,
    lanes,
    open_endpoint,
    provider_of,
)
from dissociated.transport.native.listener import NativeListener, Withdraw, withdraw_with
from dissociated.transport.native.threads import MAX_SLEEP
from dissociated.transport.runs import OFFER
from dissociated.uri import ANY_INTERFACE, Uri

_log = logging.getLogger(__name__)

_RETRY_DELAY = 0.002  # seconds between two attempts while libfabric accepts no operation
_LAST_TIMEOUT = 0.25  # seconds for an answer to be sent
_MAX_KNOWN_CLIENTS = 64  # limit of clients whose names are in the address vector
_MAX_WAITING = 128  # limit of clients that wait to be accepted
_MAX_ANSWERS = 16  # answers in progress, so that a client that does not receive its answer delays no other client
#: Limit of clients that have an endpoint and have not joined yet: each costs 16 MB and a dozen descriptors.
_MAX_JOINING = 16
_JOIN_TIME = 1.0  # seconds that such a client has to join, even if others wait


class _Answer:
    """The answer to the HELLO of a client, and the connection that is returned once the answer is sent."""

    __slots__ = ("client", "completions", "connection", "end", "is_begun", "kind", "payload")

    def __init__(self, client: int, kind: Kind, payload: Any, connection: Connection | None) -> None:
        self.client, self.kind, self.payload, self.connection = client, kind, payload, connection
        self.is_begun, self.end = False, time.monotonic() + _LAST_TIMEOUT
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
        self._joining: list[tuple[float, weakref.ref[FabricConnection]]] = []
        with ExitStack() as undo:
            undo.callback(endpoint.close)
            super().__init__(exposes_memory=rma)
            undo.callback(self._waker.close)
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
        self._endpoint.sleep(self._waker, _RETRY_DELAY if self._answers or self._hellos else MAX_SLEEP)

    def _has_place(self) -> bool:
        """Return whether another client may have an endpoint.

        If not, interrupt the connection whose client has had the longest time to join, once it has had `_JOIN_TIME`.
        The owner of that connection closes it.
        """
        self._joining = [
            (since, client) for since, client in self._joining if (joining := client()) and joining.joining
        ]
        if len(self._joining) < _MAX_JOINING:
            return True
        since, oldest = self._joining[0]
        slowest = oldest()
        if slowest is not None and time.monotonic() >= since + _JOIN_TIME:
            slowest.arrived()  # handles a JOIN that has arrived and was not read yet
            if slowest.joining:
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
            connection = FabricConnection(endpoint, peer, self._heartbeat, name)
        except BaseException:
            endpoint.close()
            raise
        connection.exposes_memory = self.exposes_memory
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
