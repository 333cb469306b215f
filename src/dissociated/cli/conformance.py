"""The command conformance: tests somebody's client with `variants.py`, and somebody's server with the checks here."""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from hashlib import blake2b

import pyarrow as pa

from dissociated.base.buffers import MAX_BODY, MAX_METADATA
from dissociated.base.display import plural, printable
from dissociated.cli import quantities
from dissociated.cli.variants import allocate_bounded, serve_variants
from dissociated.client.uri_stream import open_stream, open_tensors
from dissociated.errors import (
    AccessDenied,
    ConnectionClosed,
    DatasetNotFound,
    DissociatedError,
    RemoteError,
    RemoteProtocolError,
    UriError,
    error_number,
)
from dissociated.format.message import extents_within
from dissociated.protocol.delivery import Delivery
from dissociated.protocol.message import Message
from dissociated.protocol.receiver import Receiver
from dissociated.protocol.request import FREES_PARAMETER, REQUEST_PARAMETER, announces, with_members
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

_MAX_FREES = 1 << 13  # addresses in a message
_GRACE = 0.2  # seconds
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
        self._leased = self._freed = 0  # addresses, or messages, in this check
        self._digests: list[bytes] = []  # of the streams that were read whole
        self._tensors = False
        self._freeing_messages = with_members(ticket, **dict([FREES_PARAMETER]))

    def run(self) -> Iterator[tuple[str, str | None]]:
        """Run all checks. Yield the line of each, and the reason why it failed."""
        yield self._run("whole stream", self._whole)
        yield self._run("Arrow data", self._arrow_data)
        yield self._run("frees one by one, in reverse order", self._reverse_frees)
        packed = self._uri.with_packed_bodies()
        if packed is not None:
            yield self._run("packed bodies", lambda: self._packed(packed))
        if announces(self._uri, REQUEST_PARAMETER):
            yield self._run("two streams on one connection", self._two_streams)
            yield self._run("a client that reads other streams first", self._ahead)
            yield self._run("unknown part", self._unknown_part)
            if announces(self._uri, FREES_PARAMETER):
                yield self._run("frees by message", self._message_frees)
                name = "refuses what breaks free-leased, a message twice"
                yield self._run(name, lambda: self._bad_free(_one_too_many, self._freeing_messages))
        yield self._run("unknown ticket", self._unknown_ticket)
        yield self._run("refuses what breaks client-tags", lambda: self._refused(self._tag ^ 1 << 63, self._ticket))
        yield self._run("refuses what breaks client-frames", lambda: self._refused(None, self._ticket))
        if self._uri.free_data is not None:
            yield self._run("refuses what breaks free-leased", lambda: self._bad_free(_unknown_address))
            yield self._run("refuses what breaks free-leased, one free too many", lambda: self._bad_free(_one_too_many))
            yield self._run("refuses what breaks free-length", lambda: self._bad_free(lambda leased: bytes(7)))

    def _run(self, name: str, check: Callable[[], str]) -> tuple[str, str | None]:
        self._leased = self._freed = 0
        reason = None
        try:
            outcome = check()
        except RemoteProtocolError as error:
            outcome = reason = f"breaks {error.rule or 'no rule by name'}: {error}"
        except DissociatedError as error:
            outcome = reason = f"{error.code}: {error}"
        leases = f"; leased {self._leased}, freed {self._freed}" if self._leased else ""
        return f"{'ok   ' if reason is None else 'FAIL '} {name}: {outcome}{leases}", reason

    def _connect(self, uri: Uri | None = None) -> Connection:
        connection = transport(self._uri.scheme).connect(uri or self._uri, self._timeout)
        connection.handshake(self._timeout)
        return connection

    def _request(self, connection: Connection, tag: int, ticket: bytes) -> None:
        connection.send([Message(tag, (ticket,))], self._timeout)

    def _read_all(self, connection: Connection, identifier: bytes | None = None) -> _Content:
        """Request the stream, and read it."""
        identifier = identifier or self._ticket
        self._request(connection, self._tag, identifier)
        return self._read(connection, identifier == self._freeing_messages)

    def _read(self, connection: Connection, frees_messages: bool = False) -> _Content:
        """Read a whole stream."""
        receiver = Receiver.with_limits(MAX_METADATA, MAX_BODY, frees_messages)
        content = _Content()
        while True:
            while (delivery := receiver.next()) is not None:
                self._leased += delivery.lease_count
                content.add(delivery, connection)
            if receiver.complete:
                return content
            arrived = connection.receive(self._timeout, lambda tag, length: bytearray(length))
            if arrived is None:
                receiver.disconnected()
            else:
                receiver.receive(arrived)

    def _free(self, connection: Connection, addresses: Sequence[int]) -> None:
        connection.send([Message(self._uri.free_data, (encode_free(addresses),))], self._timeout)
        self._freed += len(addresses)

    def _closes(self, connection: Connection) -> None:
        if connection.receive(self._timeout, _bounded) is not None:
            raise RemoteProtocolError("the server sent a message after the end of the stream", rule="end-count")

    def _stays_open(self, connection: Connection) -> None:
        """Give a server that does not wait for frees the time to close the connection."""
        if self._leased:
            connection.wait(_GRACE)
            if connection.arrived():
                raise RemoteProtocolError(
                    f"the server sent a message or closed the connection, although it has {self._leased} leases"
                )

    def _whole(self) -> str:
        with self._connect() as connection:
            content = self._read_all(connection)
            self._digests.append(content.digest)
            self._tensors = content.tensors
            for first in range(0, len(content.leased), _MAX_FREES):
                self._free(connection, content.leased[first : first + _MAX_FREES])
            self._closes(connection)
        return f"{content.count} messages"

    def _arrow_data(self) -> str:
        """Have libarrow read the stream, and validate every value."""
        if not self._digests:
            return "not checked: the whole stream cannot be read"
        count = rows = 0
        try:
            if self._tensors:
                return f"{sum(1 for _ in open_tensors(str(self._uri), self._ticket, timeout=self._timeout))} tensors"
            with open_stream(str(self._uri), self._ticket, timeout=self._timeout) as reader:
                for batch in reader:
                    batch.validate(full=True)
                    count, rows = count + 1, rows + batch.num_rows
        except pa.ArrowInvalid as error:
            raise RemoteProtocolError(f"the values are not valid: {error}") from None
        return f"{count} batches, {rows} rows"

    def _reverse_frees(self) -> str:
        return self._free_backwards(self._ticket)

    def _message_frees(self) -> str:
        return self._free_backwards(self._freeing_messages)

    def _free_backwards(self, identifier: bytes) -> str:
        with self._connect() as connection:
            content = self._read_all(connection, identifier)
            self._digests.append(content.digest)
            self._stays_open(connection)
            for lease in reversed(content.leased):
                self._free(connection, [lease])
            self._closes(connection)
        return f"{content.count} messages"

    def _packed(self, uri: Uri) -> str:
        with self._connect(uri) as connection:
            self._request(connection, uri.require_want_data(), self._ticket)
            content = self._read(connection)
            if content.leased:
                raise RemoteProtocolError("the server sent addresses to a client that asked for packed bodies")
            self._closes(connection)
        if not self._digests:
            return f"{content.count} messages, not compared: the whole stream cannot be read"
        if len({*self._digests}) > 1:
            return f"{content.count} messages, not compared: the stream is not the same for each request"
        if content.digest not in self._digests:
            raise RemoteProtocolError("the packed bodies have other bytes than the bodies by address")
        return f"{content.count} messages, the same bytes"

    def _two_streams(self) -> str:
        with self._connect() as connection:
            for _ in range(2):
                self._request(connection, self._tag, with_members(self._ticket, keep=True))
                content = self._read(connection)
                if content.leased:
                    self._free(connection, content.leased)
                connection.end_stream()
        return f"{content.count} messages each"

    def _ahead(self) -> str:
        with self._connect() as connection:
            self._request(connection, self._tag, with_members(self._ticket, ahead=True))
            return f"{self._read(connection).count} messages"

    def _unknown_ticket(self) -> str:
        # A server whose tickets are signed refuses it without looking it up.
        return self._ask_unknown(b"no such ticket \xff", "an unknown ticket", DatasetNotFound, AccessDenied)

    def _unknown_part(self) -> str:
        identifier = with_members(self._ticket, part="no such part")
        return self._ask_unknown(identifier, "an unknown part", DatasetNotFound)

    def _ask_unknown(self, identifier: bytes, reason: str, *expected: type[DissociatedError]) -> str:
        with self._connect() as connection:
            self._request(connection, self._tag, identifier)
            return self._abort(connection, reason, *expected)

    def _refused(self, tag: int | None, content: bytes) -> str:
        with self._connect() as connection:
            connection.send([Message(tag, (content,))], self._timeout)
            return self._abort(connection, "a broken rule", RemoteProtocolError)

    def _bad_free(self, content_for: Callable[[Sequence[int]], bytes], identifier: bytes | None = None) -> str:
        """Send a `free_data` that breaks a rule: `content_for` returns its content for the leases."""
        with self._connect() as connection:
            leased = self._read_all(connection, identifier).leased
            if not leased:
                return "not checked: the stream has no addresses"
            connection.send([Message(self._uri.free_data, (content_for(leased),))], self._timeout)
            return self._abort(connection, "a broken rule", RemoteProtocolError)

    def _abort(self, connection: Connection, reason: str, *expected: type[DissociatedError]) -> str:
        """Wait for the server's ABORT with the code of one of `expected`."""
        numbers = [*map(error_number, expected)]
        outcome = "closed the connection without ABORT"
        try:
            if connection.receive(self._timeout, _bounded) is not None:
                raise RemoteProtocolError(f"the server sent a message in place of ABORT for {reason}")
        except RemoteError as error:
            if error.number in numbers:
                return f"ABORT with the code {error.number}: {error}"
            outcome = f"sent ABORT {'without a code' if error.number is None else f'with the code {error.number}'}"
        except ConnectionClosed:
            pass
        raise RemoteProtocolError(f"the server {outcome}; {reason} has the code {' or '.join(map(str, numbers))}")


class _Content:
    """The content of a stream that was read."""

    def __init__(self) -> None:
        self.count = 0  # messages
        self.leased: list[int] = []
        self.tensors = False
        self._hash = blake2b()

    @property
    def digest(self) -> bytes:
        """Return a digest of all buffers, which does not depend on where they lay."""
        return self._hash.digest()

    def add(self, delivery: Delivery, connection: Connection) -> None:
        """Add a message, after checking that its buffers lie in its body or in a region."""
        self.count += 1
        self.leased += delivery.leased
        self.tensors = delivery.parsed.is_tensor
        if not delivery.parsed.has_body:
            return
        places, lengths = extents_within(delivery.header, delivery.parsed, delivery.parsed.body_length)
        memory = memoryview(delivery.body or b"")
        offsets: Sequence[int] = places
        if delivery.addresses is not None and any(lengths):
            located = connection.address_space.locate(delivery.addresses.addresses, lengths)
            memory, offsets = memoryview(located.memory), located.offsets
        for offset, length in zip(offsets, lengths, strict=True):
            self._hash.update(length.to_bytes(8, "little"))
            self._hash.update(memory[offset : offset + length])


def _unknown_address(leased: Sequence[int]) -> bytes:
    return encode_free([min({*range(1, len(leased) + 2)}.difference(leased))])


def _one_too_many(leased: Sequence[int]) -> bytes:
    """Free one of the addresses, or messages, once more than it was sent."""
    lease, count = Counter(leased).most_common()[-1]
    return encode_free([lease] * (count + 1))


def _run_check(arguments: argparse.Namespace) -> None:
    """Check a server, and print a line for each check."""
    uri = Uri.parse(arguments.uri)
    if uri.scheme not in ("tcp", "tls", "shm"):
        raise UriError(f"check plays a client over tcp:, tls: and shm:, not over {uri.scheme}:")
    failed = 0
    for line, reason in _Checks(uri, _ticket(arguments.ticket), arguments.timeout).run():
        print(printable(line), flush=True)  # it may quote the server
        failed += reason is not None
    if failed:
        raise RemoteProtocolError(f"{plural(failed, 'check')} failed")


def _ticket(text: str) -> bytes:
    return bytes.fromhex(text[2:]) if re.fullmatch("0x(?:[0-9a-fA-F]{2})+", text) else text.encode()
