"""The command conformance: tests somebody's client with `variants.py`, and somebody's server with the checks here."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial

from dissociated.base.buffers import MAX_BODY, MAX_METADATA
from dissociated.cli import quantities
from dissociated.cli.variants import allocate_bounded, serve_variants
from dissociated.errors import (
    ConnectionClosed,
    DissociatedError,
    RemoteError,
    RemoteProtocolError,
    UriError,
    error_number,
)
from dissociated.protocol.message import Message
from dissociated.protocol.receiver import Receiver
from dissociated.protocol.request import REQUEST_PARAMETER, announces, with_members
from dissociated.protocol.wire import encode_free
from dissociated.transport.base import Connection
from dissociated.transport.registry import transport
from dissociated.uri import Uri

_CONFORMANCE = """\
Test an implementation of the protocol in another language. Each broken rule is reported by its name in
docs/framing.md."""
_SERVE = """\
Play a server for somebody's client. The client names a variant as its ticket; --list shows them. For each connection,
print how many addresses were leased and freed, and the rule that the client broke, if any. Of a wrong variant, the
client must read at most the messages before the error, report an error, and end the connection."""
_CHECK = """\
Play a client for somebody's server. URI is a location of a stream, with want_data. Print a line for each check. The
status is 1 if one of them fails."""

_NO_REASON = "the server ended the connection without a reason"
_bounded = partial(allocate_bounded, "server")


def add_conformance(parser: argparse.ArgumentParser) -> None:
    """Add the description, the options and the function of `conformance` to its parser."""
    parser.description = _CONFORMANCE
    roles = parser.add_subparsers(metavar="ROLE", required=True)
    serve = roles.add_parser("serve", help="play a server", description=_SERVE)
    serve.add_argument("--listen", default="tcp:", metavar="URI", help="tcp://HOST:PORT, shm:///PATH or shm:")
    serve.add_argument("--count", type=int, metavar="N", help="end after N connections")
    serve.add_argument("--list", action="store_true", help="list the variants and end")
    serve.set_defaults(run=serve_variants)
    check = roles.add_parser("check", help="play a client", description=_CHECK)
    check.add_argument("uri", metavar="URI", help="the location of a stream")
    check.add_argument("--ticket", required=True, help="the identifier to send; 0x... for bytes in hexadecimal")
    check.set_defaults(run=_run_check)
    for role in (serve, check):
        quantities.add_duration(role, "--timeout", "silence that ends a connection (default: 10s)", 10.0)


class _Checks:
    """The checks of a server."""

    def __init__(self, uri: Uri, ticket: bytes, timeout: float) -> None:
        self._uri = uri
        self._ticket = ticket
        self._timeout = timeout
        self._tag = uri.require_want_data()

    def run(self) -> Iterator[tuple[str, str | None]]:
        """Run all checks. Yield the line of each, and the reason why it failed."""
        yield self._run("whole stream", self._whole)
        yield self._run("frees one by one, in reverse order", self._reverse_frees)
        packed = self._uri.with_packed_bodies()
        if packed is not None:
            yield self._run("packed bodies", lambda: self._packed(packed))
        if announces(self._uri, REQUEST_PARAMETER):
            yield self._run("two streams on one connection", self._two_streams)
            yield self._run("a client that reads other streams first", self._ahead)
            yield self._run("unknown part", self._unknown_part)
        yield self._run("unknown ticket", self._unknown_ticket)
        yield self._run("refuses what breaks client-tags", lambda: self._refused(self._tag ^ 1 << 63, self._ticket))
        yield self._run("refuses what breaks client-frames", lambda: self._refused(None, self._ticket))
        if self._uri.free_data is not None:
            stray, odd = lambda leased: encode_free([max(leased) + (1 << 50)]), lambda leased: bytes(7)
            yield self._run("refuses what breaks free-leased", lambda: self._bad_free(stray))
            yield self._run("refuses what breaks free-length", lambda: self._bad_free(odd))

    def _run(self, name: str, check: Callable[[], str]) -> tuple[str, str | None]:
        try:
            return f"ok    {name}: {check()}", None
        except RemoteProtocolError as error:
            reason = f"breaks {error.rule or 'no rule by name'}: {error}"
        except DissociatedError as error:
            reason = f"{error.code}: {error}"
        return f"FAIL  {name}: {reason}", reason

    def _connect(self, uri: Uri | None = None) -> Connection:
        connection = transport(self._uri.scheme).connect(uri or self._uri, self._timeout)
        connection.handshake(self._timeout)
        return connection

    def _request(self, connection: Connection, tag: int, ticket: bytes) -> None:
        connection.send([Message(tag, (ticket,))], self._timeout)

    def _read_all(self, connection: Connection) -> tuple[int, list[int]]:
        """Request the stream, and read it. See `_read`."""
        self._request(connection, self._tag, self._ticket)
        return self._read(connection)

    def _read(self, connection: Connection) -> tuple[int, list[int]]:
        """Read a whole stream, and return the number of its messages, and the leased addresses."""
        receiver = Receiver.with_limits(MAX_METADATA, MAX_BODY)
        count, leased = 0, list[int]()
        while True:
            while (delivery := receiver.next()) is not None:
                count += 1
                if delivery.addresses is not None:
                    if not delivery.addresses.is_empty:
                        connection.address_space.locate(delivery.addresses.addresses, delivery.addresses.lengths)
                    leased += delivery.leased
            if receiver.complete:
                return count, leased
            arrived = connection.receive(self._timeout, lambda tag, length: bytearray(length))
            if arrived is None:
                receiver.disconnected()
            else:
                receiver.receive(arrived)

    def _free(self, connection: Connection, addresses: Sequence[int]) -> None:
        connection.send([Message(self._uri.free_data, (encode_free(addresses),))], self._timeout)

    def _closes(self, connection: Connection) -> None:
        if connection.receive(self._timeout, _bounded) is not None:
            raise RemoteProtocolError("the server sent a message after the end of the stream", rule="end-count")

    def _whole(self) -> str:
        with self._connect() as connection:
            count, leased = self._read_all(connection)
            for first in range(0, len(leased), 8192):
                self._free(connection, leased[first : first + 8192])
            self._closes(connection)
        return f"{count} messages; leased {len(leased)}, freed {len(leased)}"

    def _reverse_frees(self) -> str:
        with self._connect() as connection:
            _, leased = self._read_all(connection)
            for address in reversed(leased):
                self._free(connection, [address])
            self._closes(connection)
        return f"leased {len(leased)}, freed {len(leased)}"

    def _packed(self, uri: Uri) -> str:
        with self._connect(uri) as connection:
            self._request(connection, uri.require_want_data(), self._ticket)
            count, leased = self._read(connection)
            if leased:
                raise RemoteProtocolError("the server sent addresses to a client that asked for packed bodies")
            self._closes(connection)
        return f"{count} messages"

    def _two_streams(self) -> str:
        with self._connect() as connection:
            for _ in range(2):
                self._request(connection, self._tag, with_members(self._ticket, keep=True))
                count, leased = self._read(connection)
                if leased:
                    self._free(connection, leased)
                connection.end_stream()
        return f"{count} messages each"

    def _ahead(self) -> str:
        with self._connect() as connection:
            self._request(connection, self._tag, with_members(self._ticket, ahead=True))
            count, _ = self._read(connection)
        return f"{count} messages"

    def _unknown_ticket(self) -> str:
        return self._not_found(b"no such ticket \xff", "ticket")

    def _unknown_part(self) -> str:
        return self._not_found(with_members(self._ticket, part="no such part"), "part")

    def _not_found(self, identifier: bytes, kind: str) -> str:
        with self._connect() as connection:
            self._request(connection, self._tag, identifier)
            with suppress(ConnectionClosed):
                try:
                    connection.receive(self._timeout, _bounded)
                except RemoteError as error:
                    return f"ABORT with the code {error_number(error)}"
        raise RemoteProtocolError(f"the server did not say why it refused an unknown {kind}")

    def _refused(self, tag: int | None, content: bytes) -> str:
        with self._connect() as connection:
            connection.send([Message(tag, (content,))], self._timeout)
            with suppress(ConnectionClosed):
                try:
                    if connection.receive(self._timeout, _bounded) is not None:
                        raise RemoteProtocolError("the server answered a request that it must refuse")
                except RemoteError as error:
                    return f"ABORT: {error}"
        return _NO_REASON

    def _bad_free(self, content_for: Callable[[Sequence[int]], bytes]) -> str:
        """Send a `free_data` that breaks a rule: `content_for` returns its content for the leased addresses."""
        with self._connect() as connection:
            _, leased = self._read_all(connection)
            if not leased:
                return "not checked: the stream has no addresses"
            connection.send([Message(self._uri.free_data, (content_for(leased),))], self._timeout)
            return self._abort(connection)

    def _abort(self, connection: Connection) -> str:
        """Wait for the server to end the connection after a broken rule."""
        try:
            while connection.receive(self._timeout, lambda tag, length: bytearray(length)) is not None:
                pass
        except RemoteError as error:
            return f"ABORT: {error}"
        except ConnectionClosed:
            pass
        return _NO_REASON


def _run_check(arguments: argparse.Namespace) -> None:
    """Check a server, and print a line for each check."""
    uri = Uri.parse(arguments.uri)
    if uri.scheme not in ("tcp", "tls", "shm"):
        raise UriError(f"check plays a client over tcp:, tls: and shm:, not over {uri.scheme}:")
    failed = 0
    for line, reason in _Checks(uri, _ticket(arguments.ticket), arguments.timeout).run():
        print(line, flush=True)
        failed += reason is not None
    if failed:
        raise RemoteProtocolError(f"{failed} checks failed")


def _ticket(text: str) -> bytes:
    return bytes.fromhex(text[2:]) if re.fullmatch("0x(?:[0-9a-fA-F]{2})+", text) else text.encode()
