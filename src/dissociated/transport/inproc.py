"""inproc://NAME: messages within one process, with buffers passed by reference. For tests and embedding."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

import pyarrow as pa

from dissociated.base.buffers import Buffer
from dissociated.base.fork import hold_over_forks
from dissociated.errors import ConnectionClosed, RemoteError, TransportError, UriError
from dissociated.protocol.close_reason import reason_error
from dissociated.protocol.message import Incoming, Message
from dissociated.transport.base import Allocate, Connection, Listener, Transport
from dissociated.transport.mailbox import Mailbox
from dissociated.transport.states import Call, ConnectionState
from dissociated.uri import Uri

_MAX_IN_FLIGHT = 1 << 26  # bytes, in one direction

_listeners: dict[str, _InprocListener] = {}
_lock = threading.Lock()
hold_over_forks(_lock)


class InprocConnection(Connection):
    """A side of a connection, with a mailbox in each direction."""

    def __init__(self, inbox: Mailbox[Incoming], outbox: Mailbox[Incoming]) -> None:
        super().__init__("this process")
        self._inbox = inbox
        self._outbox = outbox

    def send(self, messages: Sequence[Message] | Any, timeout: float) -> None:
        self._lifecycle.take(Call.SEND)
        for tag, parts in messages:
            data = _joined(parts)
            self._outbox.put(Incoming(tag, bytes(data) if tag is None else data), len(data), timeout)

    def receive(self, timeout: float, allocate: Allocate) -> Incoming | None:
        self._lifecycle.take(Call.RECEIVE)
        try:
            return self._inbox.get(timeout)
        except RemoteError:
            self.peer_gave_up = True
            raise

    def arrived(self) -> bool:
        return self._inbox.ready

    def _tell(self, reason: str, later: bool) -> None:
        self._outbox.close(reason_error(reason, self.peer))

    def _wait_peer(self, seconds: float) -> bool:
        return self._inbox.wait_closed(seconds)

    def _interrupt(self, sending: bool) -> None:
        error = ConnectionClosed("this side closed the connection") if sending else None
        self._inbox.close(error)
        if sending:
            self._outbox.close(error)

    def _release(self, state: ConnectionState) -> None:
        self._outbox.close()
        self._inbox.close()


def _joined(parts: Sequence[Buffer]) -> Buffer:
    """Return the parts as one buffer: a single part by reference, several parts as a copy."""
    if len(parts) == 1:
        return parts[0]
    joined = pa.BufferOutputStream()
    for part in parts:
        joined.write(part)
    return joined.getvalue()


class _InprocListener(Listener):
    def __init__(self, uri: Uri) -> None:
        super().__init__()
        self.uri = uri
        self.waiting: SimpleQueue[InprocConnection | None] = SimpleQueue()

    def accept(self) -> Connection | None:
        return self.waiting.get()

    def close(self) -> None:
        with _lock:
            if _listeners.get(self.uri.host) is self:
                del _listeners[self.uri.host]
        self.waiting.put(None)

    def after_fork_in_child(self) -> None:
        _listeners.pop(self.uri.host, None)
        super().after_fork_in_child()


class InprocTransport(Transport):
    """The transport `inproc`. See the module."""

    connection_type = InprocConnection
    locality = 2

    def reachable(self, uri: Uri) -> bool:
        return uri.host in _listeners

    def connect(self, uri: Uri, timeout: float) -> Connection:
        to_server: Mailbox[Incoming] = Mailbox(_MAX_IN_FLIGHT)
        to_client: Mailbox[Incoming] = Mailbox(_MAX_IN_FLIGHT)
        # Connections take the lock of `base.fork`, which a fork takes before `_lock` or after it.
        server = InprocConnection(inbox=to_server, outbox=to_client)
        client = InprocConnection(inbox=to_client, outbox=to_server)
        with _lock:
            listener = _listeners.get(uri.host)
            if listener is None:
                raise TransportError(f"no server listens at inproc://{uri.host} in this process")
            listener.waiting.put(server)
        return client

    def listen(self, uri: Uri) -> Listener:
        if uri.path:
            raise UriError(f"{uri} has a path; inproc needs a name alone: inproc://NAME")
        listener = _InprocListener(Uri("inproc", host=uri.host or secrets.token_hex(8)))
        with _lock:
            if listener.uri.host in _listeners:
                raise TransportError(f"another server listens at {listener.uri} already")
            _listeners[listener.uri.host] = listener
        return listener
