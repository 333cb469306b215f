"""tls://HOST:PORT: the frames of tcp, within TLS 1.3.

    listening    tls://HOST:PORT?cert=FILE&key=FILE    PEM files: the certificate with its chain, its key
    connecting   tls://HOST:PORT?roots=FILE            PEM file: certificates to trust in place of the system's

These parameters apply to the side that uses them; locations that a server names have none. The server's certificate
must be trusted and name the host. Clients need no certificate: a ticket proves their rights.

libssl works on memory, and this module moves the bytes, so that deadlines and threads behave as in tcp. Two threads
must not use an SSL object at once: with an SSL socket, a sender would block while another thread waits for data that
may never come.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from dissociated.base.buffers import Buffer
from dissociated.base.oserrors import socket_error
from dissociated.errors import AccessDenied, ConnectionClosed, DeadlineExceeded, OptionError, RemoteProtocolError
from dissociated.transport.base import Connection, Listener, Transport
from dissociated.transport.framed.connection import SocketConnection, SocketListener
from dissociated.transport.framed.tcp import configure_socket, connect_socket, listen_socket
from dissociated.transport.states import ConnectionState
from dissociated.uri import Uri

_CHUNK = 1 << 18  # bytes that are encrypted, or read from the socket, at once
_RECORD = 1 << 14  # bytes; smaller parts are joined, because each record has a cost
_FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL


class TlsConnection(SocketConnection):
    """A connection that sends framed messages within TLS. Both sides begin with `handshake`.

    A client checks that the peer's certificate names `host`. A server passes None for `host`.
    """

    sends_at_once = False
    reads_in_kernel = False  # libssl reads everything here

    def __init__(self, sock: socket.socket, peer: str, context: ssl.SSLContext, host: str | None) -> None:
        super().__init__(sock, peer, accepted=host is None)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=host is None, server_hostname=host)
        self._using = threading.Lock()  # guards the three attributes above; never held while waiting
        self._agreed = False
        self._encrypted = memoryview(b"")  # encrypted bytes that are not sent yet
        self._received = memoryview(bytearray(_CHUNK))

    def handshake(self, timeout: float) -> None:
        end = time.monotonic() + timeout
        try:
            while not self._step():
                if time.monotonic() >= end:
                    raise BlockingIOError
                self._set_receive_timeout(end - time.monotonic())
                if not self._read_more():
                    raise ConnectionClosed(f"{self.peer} closed the connection before both had agreed on TLS")
        except BlockingIOError:
            raise DeadlineExceeded(f"{self.peer} did not agree on TLS within {timeout:g} s") from None
        except OSError as error:
            raise socket_error(error, f"agreeing on TLS with {self.peer}") from None

    def _step(self) -> bool:
        """Advance the handshake as far as the received bytes allow. Return whether it is complete."""
        try:
            with self._using:
                self._tls.do_handshake()
            self._agreed = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLCertVerificationError as error:
            raise AccessDenied(
                f"the certificate of the {self.peer} is not trusted: {error.verify_message.rstrip('.')}: name the "
                "certificates to trust by tls_roots (--tls-roots)"
            ) from None
        except ssl.SSLError as error:
            raise RemoteProtocolError(f"{self.peer} does not agree on TLS 1.3: {_reason(error)}") from None
        finally:
            self._encrypted = memoryview(self._outgoing.read())
            self._send_encrypted()  # also sends the alert for an error
        return self._agreed

    def _tell(self, reason: str, later: bool) -> None:
        if self._agreed:
            super()._tell(reason, later)

    def arrived(self) -> bool:
        return self._pending() or super().arrived()

    def wait(self, timeout: float) -> None:
        if not self._pending():
            super().wait(timeout)

    def _pending(self) -> bool:
        """Return whether bytes have arrived that were already read from the socket."""
        with self._using:
            return bool(self._incoming.pending or self._tls.pending())

    def _release(self, state: ConnectionState) -> None:
        if self._agreed and not self._cut_short:
            self._say_goodbye()
        super()._release(state)

    def _say_goodbye(self) -> None:
        try:
            with self._using:
                self._tls.unwrap()
        except ssl.SSLError:
            pass  # libssl would also wait for the peer's close_notify
        try:
            self._socket.send(self._outgoing.read(), _FLAGS)
        except OSError:
            pass  # the peer is gone, or does not listen any more

    # Sending

    def _write(self, parts: Sequence[Buffer], timeout: float) -> None:
        super()._write(parts, timeout)
        while self._encrypted:
            self._cut_short = True
            try:
                self._send_encrypted()
            except BlockingIOError:
                self._wait_writable(timeout)
        self._cut_short = False

    def _send_buffers(self, window: Sequence[Buffer], offset: int) -> int:
        """Encrypt some of these parts, and send as much as the socket takes. Return the number of bytes encrypted."""
        self._send_encrypted()
        encrypted, small = 0, bytearray()
        with self._using:
            for part in window:
                piece = memoryview(part).cast("B")[offset : offset + _CHUNK - encrypted]
                encrypted, offset = encrypted + len(piece), 0
                if len(piece) < _RECORD:
                    small += piece
                if len(piece) >= _RECORD or len(small) >= _RECORD:
                    self._encrypt(small)
                    small = bytearray()
                if len(piece) >= _RECORD:
                    self._encrypt(piece)
                if encrypted == _CHUNK:
                    break
            self._encrypt(small)
            self._encrypted = memoryview(self._outgoing.read())
        try:
            self._send_encrypted()
        except BlockingIOError:
            pass  # the rest is sent before the next parts, or at the end of `_write`
        return encrypted

    def _encrypt(self, data: bytearray | memoryview) -> None:
        view = memoryview(data)
        while view:
            view = view[self._tls.write(view) :]

    def _send_encrypted(self) -> None:
        while self._encrypted:
            self._encrypted = self._encrypted[self._socket.send(self._encrypted, _FLAGS) :]

    # Receiving

    def _receive_into(self, memory: memoryview) -> int:
        while (count := self._decrypt(memory)) is None:
            if self.request_deadline is not None:  # a record may come in many pieces
                self._set_receive_timeout(self._time_left(self._socket_timeout))
            if not self._read_more():
                return 0
        return count

    def _decrypt(self, memory: memoryview) -> int | None:
        """Fill `memory` with decrypted bytes. Return their number, 0 at the peer's end, None if nothing has arrived."""
        at = 0
        try:
            with self._using:
                while at < len(memory):
                    count: Any = self._tls.read(len(memory) - at, memory[at:])  # the number of bytes read
                    if not count:
                        break
                    at += count
        except ssl.SSLWantReadError:
            return at or None
        except ssl.SSLZeroReturnError:
            pass
        except ssl.SSLError as error:
            raise RemoteProtocolError(f"data from {self.peer} was altered in transit: {_reason(error)}") from None
        return at

    def _read_more(self) -> bool:
        count = self._socket.recv_into(self._received)
        with self._using:
            self._incoming.write(self._received[:count])
        return count > 0


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).lower().replace("_", " ")


class _TlsListener(SocketListener):
    def __init__(self, sock: socket.socket, uri: Uri, context: ssl.SSLContext) -> None:
        super().__init__(sock, uri)
        self._context = context

    def _welcome(self, accepted: socket.socket, address: Any) -> Connection:
        peer = f"tls client {address[0]}:{address[1]}"
        return TlsConnection(configure_socket(accepted), peer, self._context, host=None)


class TlsTransport(Transport):
    """The transport `tls`. See the module."""

    connection_type = TlsConnection
    encrypted = True

    def connect(self, uri: Uri, timeout: float) -> Connection:
        context = _client_context(uri.parameters.get("roots"))
        sock, where = connect_socket(uri, timeout)
        connection = TlsConnection(sock, where, context, uri.host)
        try:
            connection.handshake(timeout)
        except BaseException:
            connection.close()
            raise
        return connection

    def listen(self, uri: Uri) -> Listener:
        context = _server_context(uri)
        return _TlsListener(*listen_socket(uri), context)


def _client_context(roots: str | None) -> ssl.SSLContext:
    with _certificate_errors(roots):
        context = ssl.create_default_context(cafile=roots)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


def _server_context(uri: Uri) -> ssl.SSLContext:
    cert, key = (uri.parameters.get(name) for name in ("cert", "key"))
    if not cert or not key:
        raise OptionError(
            "listening at tls: needs a certificate and its key: tls_cert and tls_key "
            "(--tls-cert, --tls-key), or tls:?cert=&key="
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # Clients never resume sessions. A client that closes before it has read a session ticket could also reset the
    # connection, and lose its own last messages.
    context.num_tickets = 0
    with _certificate_errors(f"{cert} or {key}"):
        context.load_cert_chain(cert, key, password=_refuse)
    return context


def _refuse() -> str:
    raise OptionError("the key for TLS is encrypted: use an unencrypted key, in a file that only this user can read")


@contextmanager
def _certificate_errors(files: str | None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        why = _reason(error) if isinstance(error, ssl.SSLError) else error.strerror
        raise OptionError(f"cannot use {files} for TLS: {why}") from None
