"""The server of `conformance serve`: one stream, sent in many valid and invalid ways to somebody's client."""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import NamedTuple

import pyarrow as pa

from dissociated.base.descriptors import owned
from dissociated.codec.split import SplitMessage, split
from dissociated.errors import (
    ConnectionClosed,
    DatasetNotFound,
    DeadlineExceeded,
    DissociatedError,
    OptionError,
    RemoteError,
    RemoteProtocolError,
    TransportError,
)
from dissociated.format.message import buffer_extents
from dissociated.memory.leases import AddressLedger, Ledger, MessageLedger
from dissociated.memory.region import reserve_base
from dissociated.memory.shared import Backing, sealed_memfd, write_parts
from dissociated.protocol.close_reason import close_reason
from dissociated.protocol.message import Message
from dissociated.protocol.request import FREES_PARAMETER, REQUEST_PARAMETER
from dissociated.protocol.sender import Body, MemoryFreed, Sender, StreamRequested, Tags
from dissociated.protocol.wire import SEQUENCE_MASK, BodyKind, Streams, body_tag, encode_addresses, encode_end_of_stream
from dissociated.transport.base import Connection, Listener
from dissociated.transport.registry import transport
from dissociated.uri import Uri

#: The tags exceed 2**53, so that a client which takes them for floating-point numbers fails.
_WANT, _FREE = 0x4449_5353_0000_1003, 0x4449_5353_0000_1100
_TAGS = Tags({_WANT: Streams.BOTH, _WANT | 4: Streams.BOTH}, _FREE)
_SEED = 42
_TRICKLE = 7  # bytes sent at a time
_MAX_MESSAGE = 1 << 16  # bytes of a message that is no part of a stream


class _Share(NamedTuple):
    """A region to share before the next message."""

    content: bytes
    base: int
    backing: int = Backing.SEALED
    sealed: bool = True


@dataclass
class _Stream:
    """The messages of the stream, from which the variants make their own."""

    messages: Sequence[SplitMessage]
    metadata: Sequence[Message]
    bodies: Sequence[Message]
    end: Message

    @property
    def pairs(self) -> Iterator[Message]:
        """Yield each body after its metadata, without the end of stream."""
        yield self.metadata[0]
        for pair in zip(self.metadata[1:], self.bodies, strict=True):
            yield from pair

    @property
    def whole(self) -> list[Message]:
        return [*self.pairs, self.end]

    def placed(self, scattered: bool = False) -> tuple[list[_Share], list[list[tuple[int, int]]]]:
        """Return regions with all bodies, and the extents of the buffers of each message with a body."""
        regions: list[_Share] = []
        extents: list[list[tuple[int, int]]] = []
        memory = bytearray()
        base = reserve_base(1 << 20)
        for message in self.messages[1:]:
            body = b"".join(map(bytes, message.body or ()))
            buffers = zip(*buffer_extents(message.header, message.parsed), strict=True)
            if scattered:
                own = [(reserve_base(size), at, size) if size else (0, 0, 0) for at, size in buffers]
                regions += [_Share(body[at : at + size], start) for start, at, size in own if size]
                extents.append([(start, size) for start, _, size in own])
            else:
                start = base + len(memory)
                memory += body + bytes(-len(body) % 64)
                extents.append([(start + at, size) if size else (0, 0) for at, size in buffers])
        return regions or [_Share(bytes(memory), base)], extents

    def by_address(self, scattered: bool = False) -> tuple[list[_Share], list[Message]]:
        regions, extents = self.placed(scattered)
        return regions, [_listed(number, encode_addresses(pairs)) for number, pairs in enumerate(extents, 1)]

    def with_bodies(self, bodies: Sequence[Message]) -> list[Message]:
        return replace(self, bodies=bodies).whole


_Sent = Iterable[Message | _Share]


def _listed(number: int, content: bytes) -> Message:
    return Message(body_tag(BodyKind.ADDRESSES, number), (content,))


class _Variant(NamedTuple):
    """A way to send the stream. A `rule` is the one that it breaks."""

    summary: str
    arrange: Callable[[_Stream], _Sent]
    rule: str | None = None
    by_address: bool = False
    trickled: bool = False
    abort: DissociatedError | None = None


def _shuffled(stream: _Stream) -> _Sent:
    messages = stream.whole
    random.Random(_SEED).shuffle(messages)
    return messages


def _mixed(stream: _Stream) -> _Sent:
    regions, listed = stream.by_address()
    return [*regions, *stream.with_bodies([*chain(listed[:1], stream.bodies[1:])])]


def _addresses(stream: _Stream) -> _Sent:
    regions, listed = stream.by_address()
    return [*regions, *stream.with_bodies(listed)]


def _scattered(stream: _Stream) -> _Sent:
    regions, listed = stream.by_address(scattered=True)
    return [*regions, *stream.with_bodies(listed)]


def _late_regions(stream: _Stream) -> _Sent:
    regions, listed = stream.by_address()
    return [*stream.metadata, stream.end, *regions, *listed]


def _changed_list(stream: _Stream, at: int, by: int) -> _Sent:
    """Return the stream with `by` added to a number of its first address list: 0 the total, 1 the count, then pairs."""
    regions, (first, *later_lists) = stream.by_address()
    content = bytes(first.parts[0])
    number = int.from_bytes(content[8 * at : 8 * at + 8], "little") + by
    changed = content[: 8 * at] + number.to_bytes(8, "little") + content[8 * at + 8 :]
    return [*regions, *stream.with_bodies([_listed(1, changed), *later_lists])]


def _bad_seals(stream: _Stream) -> _Sent:
    regions, listed = stream.by_address()
    return [regions[0]._replace(sealed=False), *stream.with_bodies(listed)]


def _overlap(stream: _Stream) -> _Sent:
    regions, listed = stream.by_address()
    return [regions[0], regions[0]._replace(base=regions[0].base + 8), *stream.with_bodies(listed)]


def _retagged(stream: _Stream, tag: int) -> _Sent:
    return stream.with_bodies([Message(tag, stream.bodies[0].parts), *stream.bodies[1:]])


_VARIANTS = {
    "ordinary": _Variant("each body after its metadata", lambda stream: stream.whole),
    "shuffled": _Variant("all messages in random order, the end of stream among them", _shuffled),
    "reversed": _Variant("all messages in reverse order", lambda stream: stream.whole[::-1]),
    "metadata-first": _Variant(
        "all metadata, the end of stream, all bodies", lambda stream: [*stream.metadata, stream.end, *stream.bodies]
    ),
    "trickled": _Variant(f"{_TRICKLE} bytes at a time", lambda stream: stream.whole, trickled=True),
    "addresses": _Variant("bodies by address in one region", _addresses, by_address=True),
    "scattered": _Variant("a region for each buffer", _scattered, by_address=True),
    "mixed": _Variant("bodies of both kinds", _mixed, by_address=True),
    "late-regions": _Variant("regions after all metadata", _late_regions, by_address=True),
    "abort": _Variant(
        "a reason with the code 27 after the first batch",
        lambda stream: stream.whole[:3],
        abort=DatasetNotFound("the dataset was dropped: this variant always says so"),
    ),
    "cut": _Variant("the connection ends before the last body", lambda stream: stream.whole[:-2], "stream-whole"),
    "schema-last": _Variant("a batch as message 0", lambda stream: [_numbered(stream, 1, 0)], "schema-first"),
    "twice": _Variant(
        "metadata that comes twice",
        lambda stream: [*stream.metadata, stream.metadata[1], *stream.bodies],
        "message-once",
    ),
    "short-body": _Variant(
        "a body that is 8 bytes too short",
        lambda stream: stream.with_bodies([_shortened(stream.bodies[0]), *stream.bodies[1:]]),
        "body-length",
    ),
    "reserved-bit": _Variant("a reserved bit in a tag", lambda stream: _retagged(stream, 1 << 40 | 1), "tag-reserved"),
    "unknown-kind": _Variant("a body of kind 2", lambda stream: _retagged(stream, 2 << 56 | 1), "tag-kind"),
    "wrong-count": _Variant(
        "an end of stream that counts one message too few",
        lambda stream: [*stream.pairs, Message(None, (encode_end_of_stream(len(stream.metadata) - 1),))],
        "end-count",
    ),
    "two-ends": _Variant(
        "two ends of stream", lambda stream: [stream.metadata[0], stream.end, stream.end, *stream.bodies], "end-once"
    ),
    "wrong-total": _Variant(
        "an address list with a wrong total", lambda stream: _changed_list(stream, 0, -1), "list-total", by_address=True
    ),
    "wrong-length": _Variant(
        "an address list that is longer than it says", lambda stream: _changed_list(stream, 1, -1), "list-length", True
    ),
    "stray-address": _Variant(
        "an address in no region", lambda stream: _changed_list(stream, -2, 1 << 40), "address-region", by_address=True
    ),
    "bad-seals": _Variant("a memfd without its seals", _bad_seals, "region-seals", by_address=True),
    "overlap": _Variant("two regions that overlap", _overlap, "region-overlap", by_address=True),
}


def _shortened(message: Message) -> Message:
    return Message(message.tag, (b"".join(map(bytes, message.parts))[:-8],))


def _numbered(stream: _Stream, index: int, number: int) -> Message:
    sender = Sender.before_request(Streams.BOTH, number)
    return sender.send(stream.messages[index].header, None)[0]


def _stream() -> _Stream:
    """Return a stream with several types, nulls, and a dictionary. It is always the same."""
    batches = [
        pa.record_batch({
            "n": pa.array([first, None, first + 2]),
            "s": ["a", "", f"row {first}"],
            "d": pa.array(["x", "y", "x"]).dictionary_encode(),
            "l": pa.array([[1, 2], [], None]),
        })
        for first in (0, 3)
    ]  # fmt: skip
    messages = [*split(pa.RecordBatchReader.from_batches(batches[0].schema, batches))]
    sender = Sender.before_request(Streams.BOTH)
    metadata, bodies = [], []
    for message in messages:
        body = None if message.body is None else Body(BodyKind.PACKED, message.body)
        encoded = sender.send(message.header, body)
        metadata.append(encoded[0])
        bodies += encoded[1:]
    (end,) = sender.end()
    return _Stream(messages, metadata, bodies, end)


def serve_variants(arguments: argparse.Namespace) -> None:
    """Serve the variants, one client after the other."""
    if arguments.list:
        for name, variant in _VARIANTS.items():
            print(f"{name:15} {variant.summary}{f': breaks {variant.rule}' if variant.rule else ''}")
        return
    stream = _stream()
    place = Uri.parse(arguments.listen)
    listener = transport(place.scheme).listen(place)
    try:
        print(_served_uri(listener), flush=True)
        served = 0
        while arguments.count is None or served < arguments.count:
            connection = listener.accept()
            if connection is None:
                return
            served += 1
            with connection:
                print(_Service(connection, stream, arguments.timeout).run(), flush=True)
    finally:
        listener.close()


def _served_uri(listener: Listener) -> Uri:
    uri = replace(listener.uri, want_data=_WANT)
    if not transport(uri.scheme).shares_memory:
        return uri
    return replace(uri, free_data=_FREE).with_parameters(
        packed=str(_WANT | 4), **dict([REQUEST_PARAMETER, FREES_PARAMETER])
    )


class _Service:
    """The serving of one client."""

    def __init__(self, connection: Connection, stream: _Stream, timeout: float) -> None:
        self._connection = connection
        self._stream = stream
        self._timeout = timeout
        self._sender = Sender(_TAGS)
        self._ledger: Ledger = AddressLedger()
        self._leased = self._freed = 0
        self._name = "-"

    def run(self) -> str:
        """Serve the client, and return the report."""
        try:
            variant = self._request()
            try:
                self._send(variant)
            except ConnectionClosed:
                if variant.rule is None:
                    raise
            return self._report(self._follow(variant))
        except RemoteProtocolError as error:
            self._connection.close(close_reason(error))
            return self._report(f"FAIL breaks {error.rule or 'no rule by name'}: {error}")
        except RemoteError as error:
            return self._report(f"the client gave up: {error.code}: {error}")
        except DeadlineExceeded:
            return self._report("FAIL the client neither freed everything nor ended the connection in time")
        except ConnectionClosed:
            return self._report("the client closed the connection before everything was sent")
        except DissociatedError as error:
            self._connection.close(close_reason(error))
            return self._report(f"refused: {error}")

    def _report(self, outcome: str) -> str:
        return f"{self._name}: {outcome}; leased {self._leased}, freed {self._freed}"

    def _receive(self) -> StreamRequested | MemoryFreed | None:
        arrived = self._connection.receive(self._timeout, partial(allocate_bounded, "client"))
        return None if arrived is None else self._sender.receive(arrived)

    def _request(self) -> _Variant:
        request = self._receive()
        if not isinstance(request, StreamRequested):
            raise ConnectionClosed("the client sent no request")
        if request.request.selection is not None or request.request.streams is not None:
            raise OptionError("variants are sent whole: request no selection and no single stream")
        if request.request.frees_messages:
            self._ledger = MessageLedger()
        name = request.request.ticket.decode(errors="replace")
        variant = _VARIANTS.get(name)
        if variant is None:
            raise DatasetNotFound(f"there is no variant {name!r}: dissociated conformance serve --list")
        self._name = name
        if variant.by_address and (request.tag != _WANT or not self._connection.shares_memory):
            raise TransportError(f"the variant {name!r} needs shared memory: listen at shm:")
        return variant

    def _send(self, variant: _Variant) -> None:
        for item in variant.arrange(self._stream):
            if isinstance(item, _Share):
                self._share(item)
                continue
            if item.tag is not None and item.tag >> 56 == BodyKind.ADDRESSES:
                self._hold(item.tag & SEQUENCE_MASK, bytes(item.parts[0]))
            if variant.trickled:
                self._trickle(item)
            else:
                self._connection.send([item], self._timeout)
        if variant.abort is not None:
            self._connection.close(close_reason(variant.abort))

    def _share(self, region: _Share) -> None:
        def write(descriptor: int) -> None:
            write_parts(descriptor, [region.content])

        with owned(sealed_memfd("conformance", write) if region.sealed else _unsealed(region.content)) as descriptor:
            memory = self._connection.memory
            memory.share(descriptor, region.base, len(region.content), region.backing, self._timeout)

    def _hold(self, sequence: int, content: bytes) -> None:
        numbers = [int.from_bytes(content[at : at + 8], "little") for at in range(16, len(content), 8)]
        addresses = [address for address, size in zip(numbers[0::2], numbers[1::2], strict=True) if size]
        before = self._ledger.max_freed
        self._ledger.hold({sequence: addresses})
        self._leased += self._ledger.max_freed - before

    def _trickle(self, message: Message) -> None:
        prepared = self._connection.prepare([message])
        whole = b"".join(map(bytes, prepared))
        for at in range(0, len(whole), _TRICKLE):
            self._connection.send(type(prepared)([whole[at : at + _TRICKLE]]), self._timeout)

    def _follow(self, variant: _Variant) -> str:
        """Take frees until everything is freed or the client is gone. Return the outcome."""
        if variant.abort is not None:
            return "gave up, as the variant says"
        if variant.rule == "stream-whole":
            return f"sent what breaks {variant.rule}"
        while variant.rule is not None or len(self._ledger):
            try:
                event = self._receive()
            except (ConnectionClosed, RemoteError):
                event = None
                if variant.rule is None:
                    raise
            if event is None:
                if variant.rule is not None:
                    return f"ok   the client ended the connection after a message that breaks {variant.rule}"
                return "the client ended the connection, which frees the rest"
            if isinstance(event, MemoryFreed):
                self._ledger.release(event.freed)
                self._freed += len(event.freed)
        return "ok"


def allocate_bounded(peer: str, tag: int | None, length: int) -> bytearray:
    """Return memory for a message of `peer` that is no part of a stream. Raise RemoteProtocolError if it is long."""
    if length > _MAX_MESSAGE:
        raise RemoteProtocolError(f"the {peer} sent a message of {length} bytes", rule="frame-length")
    return bytearray(length)


def _unsealed(content: bytes) -> int:
    descriptor = os.memfd_create("conformance")
    os.write(descriptor, content)
    return descriptor
