"""A log of the messages of a connection: their kinds and sizes, but not their content.

The log has a line for each message or run, at the level DEBUG. A connection whose messages are not logged has no
wrapper, and so no cost while data flows.
"""

from __future__ import annotations

import itertools
import logging
import struct
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Self, cast

from dissociated.base.buffers import Buffer
from dissociated.errors import DissociatedError, RemoteError, RemoteProtocolError
from dissociated.format.message import HeaderType, parse_envelope
from dissociated.memory.region import Region
from dissociated.memory.shared import Backing
from dissociated.protocol.close_reason import reason_text
from dissociated.protocol.message import Incoming, Message, Run
from dissociated.protocol.sender import Tags
from dissociated.protocol.wire import BodyKind, MetadataKind, parse_body_tag, parse_metadata
from dissociated.transport.base import Allocate, Connection, RemoteMemory
from dissociated.transport.runs import Alike, find_runs

_log = logging.getLogger(__name__)

_totals = struct.Struct("<QQ")  # head of an address list: total bytes, number of buffers

_client_numbers = itertools.count(1)


def traced(connection: Connection, tags: Tags, number: int | None = None) -> Connection:
    """Wrap `connection` so that it logs each message. Return it unchanged if the level DEBUG is disabled now.

    Args:
        connection: The connection.
        tags: The tags that the client of the connection sends.
        number: The number of the connection in a server's status. None for a client's connection, which gets a number
            here.
    """
    if not _log.isEnabledFor(logging.DEBUG):
        return connection
    name = f"c{next(_client_numbers)}" if number is None else str(number)
    return cast(Connection, _TracedConnection(connection, _Trace(name, connection.peer, tags, number)))


class _Encoded(NamedTuple):
    """The result of `prepare`, and the log lines that describe its messages."""

    messages: Any
    lines: Sequence[str]


class _Trace:
    """A writer of the lines of one connection."""

    def __init__(self, name: str, peer: str, tags: Tags, number: int | None) -> None:
        self._prefix = f"connection {name} ({peer})"
        self._tags = tags
        self._accepted = number is not None
        self._fields: Mapping[str, object] = {"connection": number} if number is not None else {}
        self._reason: str | None = None  # the last reason of an abort

    def line(self, event: str) -> None:
        _log.debug("%s: %s", self._prefix, event, extra=self._fields)

    @contextmanager
    def sending(self, lines: Sequence[str]) -> Iterator[None]:
        """Record that messages are sent in this block, or why they were not."""
        try:
            yield
        except DissociatedError as error:
            more = f", nor {len(lines) - 1:,} more" if len(lines) > 1 else ""
            self.line(f"could not send {lines[0] if lines else 'nothing'}{more}: {str(error)!r}")
            raise
        for line in lines:
            self.line(f"sent {line}")

    def mapped(self, before: Sequence[Region], after: Sequence[Region]) -> None:
        if len(before) < len(after):
            nbytes = sum(region.size for region in {*after}.difference(before))
            self.line(f"received regions: {len(after) - len(before)}, of {nbytes:,} bytes together")

    def aborted(self, reason: str) -> None:
        if reason != self._reason:  # an abort may repeat the close reason
            self._reason = reason
            self.line(f"sent abort: {reason_text(reason)!r}")

    def outgoing(self, messages: Sequence[Message | Run]) -> Iterator[str]:
        """Yield a line for each message or run that is to be sent."""
        for item in find_runs(messages):
            if isinstance(item, Run):
                yield _run(item)
            elif isinstance(item, Alike):
                first, second = item.messages[:2]
                yield _alike(len(item.messages) // 2, _metadata(first.parts), _body(second.tag or 0, second.parts))
            else:
                yield self._message(item.tag, item.parts, not self._accepted)

    def incoming(self, arrived: Incoming | Run) -> str:
        """Return the line for a received message or run."""
        if isinstance(arrived, Run):
            return _run(arrived)
        return self._message(arrived.tag, (arrived.data,), self._accepted)

    def _message(self, tag: int | None, parts: Sequence[Buffer], of_client: bool) -> str:
        if tag is None:
            return _metadata(parts)
        if not of_client:
            return _body(tag, parts)
        length = sum(map(len, parts))
        if tag in self._tags.want:
            return f"want_data ({str(self._tags.want[tag].name).lower()}), {length:,} bytes"
        if tag == self._tags.free_data:
            return f"free_data of {length // 8:,} leases"
        return f"a message with the unknown tag {tag:#018x}, {length:,} bytes"


class _TracedConnection:
    """A connection that logs its messages and passes everything else on to the wrapped connection."""

    def __init__(self, connection: Connection, trace: _Trace) -> None:
        self._connection = connection
        self._trace = trace

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def __repr__(self) -> str:
        return repr(self._connection)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    @property
    def request_deadline(self) -> float | None:
        return self._connection.request_deadline

    @request_deadline.setter
    def request_deadline(self, deadline: float | None) -> None:
        self._connection.request_deadline = deadline

    @property
    def encoding(self) -> Hashable:
        return _Encoded, self._connection.encoding

    def prepare(self, messages: Sequence[Message | Run]) -> Any:
        encoded = self._connection.prepare(messages)
        return encoded if encoded is messages else _Encoded(encoded, [*self._trace.outgoing(messages)])

    def send(self, messages: Sequence[Message] | Any, timeout: float) -> None:
        if not isinstance(messages, _Encoded):
            messages = _Encoded(self._connection.prepare(messages), [*self._trace.outgoing(messages)])
        with self._trace.sending(messages.lines):
            self._connection.send(messages.messages, timeout)

    def send_at_once(self, messages: _Encoded) -> None:
        with self._trace.sending(messages.lines):
            self._connection.send_at_once(messages.messages)

    def receive(self, timeout: float, allocate: Allocate) -> Incoming | Run | None:
        regions = self._connection.address_space.regions
        try:
            arrived = self._connection.receive(timeout, allocate)
        except DissociatedError as error:
            result = "abort" if isinstance(error, RemoteError) else "nothing"
            self._trace.line(f"received {result}: {str(error)!r}")
            raise
        self._trace.mapped(regions, self._connection.address_space.regions)
        self._trace.line(f"received {'the end' if arrived is None else self._trace.incoming(arrived)}")
        return arrived

    @property
    def held_by_fork(self) -> bool:
        return self._connection.held_by_fork

    @held_by_fork.setter
    def held_by_fork(self, is_held: bool) -> None:
        self._connection.held_by_fork = is_held

    @property
    def memory(self) -> RemoteMemory:
        return _TracedMemory(self._connection.memory, self._trace)

    def close(self, reason: str | None = None, linger: float = 0) -> bool:
        closed = self._connection.close(reason, linger)
        if reason is not None and not self._connection.peer_gave_up:
            self._trace.aborted(reason)
        return closed


class _TracedMemory(RemoteMemory):
    def __init__(self, memory: RemoteMemory, trace: _Trace) -> None:
        self._memory = memory
        self._trace = trace

    def share(self, descriptor: int, base: int, size: int, backing: int, timeout: float) -> None:
        self._memory.share(descriptor, base, size, backing, timeout)
        self._trace.line(f"sent a region of {size:,} bytes ({Backing(backing).name.lower()})")

    def retain(self, region: Region) -> None:
        self._memory.retain(region)

    def fetch(self, ranges: Sequence[tuple[int, int, int]], memory: Buffer, timeout: float) -> None:
        self._memory.fetch(ranges, memory, timeout)
        self._trace.line(f"fetched {sum(length for _, length, _ in ranges):,} bytes from {len(ranges):,} addresses")


def _metadata(parts: Sequence[Buffer]) -> str:
    message = b"".join(parts)
    try:
        kind, sequence, header = parse_metadata(message)
        if kind is MetadataKind.END_OF_STREAM:
            return f"end of stream, after {sequence:,} messages"
        type_, body_length = parse_envelope(header)
    except RemoteProtocolError:
        return f"metadata of {len(message):,} bytes that is not known"
    announced = "" if type_ is HeaderType.SCHEMA else f" for a body of {body_length:,} bytes"
    return f"{type_.name.lower().replace('_', ' ')} {sequence}: metadata of {len(header):,} bytes{announced}"


def _body(tag: int, parts: Sequence[Buffer]) -> str:
    length = sum(map(len, parts))
    try:
        kind, sequence = parse_body_tag(tag)
    except RemoteProtocolError:
        return f"a body with the unknown tag {tag:#018x}, {length:,} bytes"
    if kind is BodyKind.PACKED:
        return f"body {sequence}: packed, {length:,} bytes"
    if length < _totals.size:
        return f"body {sequence}: an address list that is cut off, {length:,} bytes"
    nbytes, count = _totals.unpack_from(parts[0])
    return f"body {sequence}: by address, {nbytes:,} bytes in {count:,} buffers"


def _run(run: Run) -> str:
    tag = int.from_bytes(run.tags[:8], "little")
    return _alike(
        run.length, _metadata([run.untagged[: run.untagged_size]]), _body(tag, [run.tagged[: run.tagged_size]])
    )


def _alike(count: int, metadata: str, body: str) -> str:
    return f"a run of {count:,} messages and their bodies, alike in size; the first: {metadata}; {body}"
