"""fabric://HOST:PORT[?provider=…]: libfabric, over TCP unless another provider is named.

Untagged and tagged messages are libfabric's own, and carry what the protocol says. Tags have no sender, so each
connection has an endpoint of its own, or two; what the two ends say to each other beside the protocol, from the
exchange of their names to heartbeats, are tagged messages too: see docs/fabric.md.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import IntEnum
from typing import Any, NamedTuple

from dissociated.buffers import Buffer
from dissociated.errors import (
    ConnectionClosed,
    DeadlineExceeded,
    LocalProtocolError,
    RemoteError,
    RemoteProtocolError,
    TransportError,
    UriError,
)
from dissociated.memory.region import Region
from dissociated.memory.remote import RemoteSpace, Span, spans_of
from dissociated.protocol.message import Incoming, Message
from dissociated.transport.base import Allocate, Connection, Listener, Transport
from dissociated.transport.framed.connection import explain
from dissociated.transport.framed.tcp import check_name
from dissociated.transport.native import _ofi as c
from dissociated.transport.native._ofi import ofi
from dissociated.transport.native.connection import MAX_IN_FLIGHT, NativeConnection, Waker
from dissociated.transport.native.endpoint import MAX_UNTAGGED as _MAX_PLAIN
from dissociated.transport.native.endpoint import (
    QUEUE,
    Completion,
    Domain,
    Done,
    Endpoint,
    Found,
    Pair,
    host_and_port,
    reachable,
)
from dissociated.transport.native.heartbeat import heartbeat_of
from dissociated.uri import Uri

_log = logging.getLogger(__name__)

PROVIDER = "tcp;ofi_rxm"
_VERSION = 2  # of what the two ends say to each other beside the protocol

_CONTROL = 0xFE44_4953_534F_0000  # the tags of that, but for the lowest byte
_KINDS = 0xFF
#: The tag of an untagged message that is too large for those who receive many into one buffer.
_LARGE = _CONTROL | 0x100
_CONTROL_SIZE = 4096  # bytes of a control message, at most
_CONTROL_BUFFERS = 8

_JOIN = 1 << 13  # bytes up to which parts are copied together at once
_OVERHEAD = 1 << 14  # bytes that a message counts beside its own: libfabric keeps as many for one that nobody waits for
_SINGLY = 1 << 22  # bytes from which copying costs more than fetching in pieces
#: Bytes that a client has under way: libfabric takes in 32 messages whenever one is looked for, so a server notices one
#: who sends without end only when it has 32 times as much.
_CLIENT_WINDOW = 1 << 20
_TELLING = 8  # parts of what may be under way that are worth telling once they are consumed
_UNDER_WAY = QUEUE // 2  # messages, so that libfabric always takes a heartbeat, too
_RETRY = 0.002  # seconds, while libfabric wants something to be tried again
_LAST = 0.25  # seconds for the last word
_MISSED = 10  # heartbeats that a peer may miss
_HEARTBEAT = 2.0  # seconds
_KNOWN = 64  # clients whose names a listener remembers
_MAX_WAITING = 128  # clients that wait to be accepted
_ANSWERING = 16  # that are answered at once: one that does not take its answer keeps no other waiting
#: That have an endpoint and have not joined: each costs 16 MB and a dozen descriptors, and has proved nothing yet.
_JOINING = 16
_JOIN_TIME = 1.0  # seconds that each of these may take although others wait
_STAGING = 4  # pieces of memory that are kept to join messages in
_LOOKS = 256  # messages that are taken before somebody else's turn
_BESIDE = 128  # messages beside the protocol that may wait at once: libfabric keeps many more beside them
_REFUSED = 1.0  # seconds that libfabric may take nothing, although it has nothing to do
_BUSY = 0.05  # seconds that a heartbeat waits for whoever uses the connection
_ROUNDS = 16  # of completions that are looked at before somebody else is
_LOOK_AGAIN = 1.0  # seconds, should libfabric ever forget to wake us


def _beside(tag: int | None) -> bool:
    """Whether a message with this tag is beside the protocol."""
    return tag is not None and tag & ~_KINDS == _CONTROL


class Kind(IntEnum):
    """What a control message says: the lowest byte of its tag."""

    #: client to listener: the version, and the name of the client's endpoint
    HELLO = 1
    #: listener to client: the version, and the name of the endpoint to talk to
    WELCOME = 2
    #: client to that endpoint: nothing; before it, the server sends nothing
    JOIN = 3
    #: now and then: how many bytes have been consumed, uint64. The heartbeat
    CREDIT = 4
    #: the reason for giving up, UTF-8
    ABORT = 5
    #: nothing: this end closes. It is answered by another
    BYE = 6
    #: JOIN and BYE for bodies, where those have endpoints of their own
    BODIES_JOIN = 7
    BODIES_BYE = 8


#: What is said at each endpoint of a connection, first and last.
_JOINS, _BYES = (Kind.JOIN, Kind.BODIES_JOIN), (Kind.BYE, Kind.BODIES_BYE)


def _held_up(tag: int) -> bool:
    """Whether a message with this tag has to wait until somebody claims it, or until others before it are claimed."""
    return not _beside(tag) or tag & _KINDS in (Kind.BODIES_JOIN, Kind.BODIES_BYE)


_consumed = struct.Struct("<Q")
#: A key in a URI: whether addresses are those of the server's process, rather than offsets; libfabric's key.
_key = struct.Struct("<BQ")


# Providers


def _rma(uri: Uri, provider: str) -> bool:
    """Whether a listener lets clients fetch from memory. Raises UriError where the provider cannot do it."""
    if uri.parameters.get("rma") != "allow":
        return False
    if not provider.endswith("ofi_rxm"):
        raise UriError(f"provider={provider} in {uri} cannot share registered memory: use {PROVIDER}, or no allow_rma")
    return True


def _provider(uri: Uri) -> str:
    """The provider that a URI names. Raises UriError for those that are known to be wrong."""
    name = uri.parameters.get("provider", PROVIDER)
    version = tuple(map(int, ofi().version.split(".")))
    wrong = None
    if name == "tcp" and version < (2, 0):
        wrong = f"before libfabric 2.0, and this is {ofi().version}, it means tcp;ofi_rxm: say that"
    elif name == "shm":
        wrong = "it can only be waited for by spinning, and leaves memory in /dev/shm: use shm: or tcp;ofi_rxm"
    elif name == "net":
        wrong = "it keeps a processor busy while nothing happens: use tcp;ofi_rxm"
    elif name.startswith("udp"):
        wrong = "it cuts messages off without an error: use tcp;ofi_rxm"
    elif name == "sockets":
        wrong = "libfabric has given it up: use tcp;ofi_rxm"
    elif not name or not all(part.isascii() and part.isidentifier() for part in name.split(";")):
        wrong = "that is no name of a provider"
    if wrong:
        raise UriError(f"provider={name} in {uri} cannot be used: {wrong}")
    return name


def _lanes(provider: str) -> int:
    """How many endpoints a connection has."""
    return Pair.lanes if provider == "tcp" else Endpoint.lanes


def _endpoint(provider: str, host: str, rma: bool, domain: Domain | None = None) -> Endpoint:
    """What one connection has."""
    if _lanes(provider) == Pair.lanes:
        return Pair(provider, host, _held_up)
    return Endpoint(provider, host, None, rma, domain)


def _check_same(uri: Uri, endpoint: Endpoint) -> None:
    """Raise TransportError where the server says that it talks otherwise: nothing would ever arrive."""
    ours = endpoint.ofi.version
    theirs = uri.parameters.get("libfabric", ours)
    protocol = uri.parameters.get("protocol", endpoint.protocol)
    if theirs.split(".")[0] != ours.split(".")[0] or protocol != endpoint.protocol:
        raise TransportError(
            f"the fabric server {uri.host}:{uri.port} has libfabric {theirs} (protocol {protocol}) and this process "
            f"{ours} ({endpoint.protocol}), which do not understand each other: install the same on both sides, or let "
            "DISSOCIATED_FABRIC_LIBRARY name the same libfabric.so.1"
        )


def _heartbeat(uri: Uri) -> float:
    text = uri.parameters.get("heartbeat", "")
    try:
        seconds = float(text or _HEARTBEAT)
    except ValueError:
        seconds = 0.0
    if not 0.01 <= seconds <= 3600:
        raise UriError(f"heartbeat={text} in {uri}: it is from 0.01 to 3600 seconds")
    return seconds


# Connections


class _Outgoing(NamedTuple):
    """A message to be sent: at most as many pieces as libfabric takes, or more, which are joined on the way."""

    tag: int | None
    size: int
    pieces: Sequence[Any]


class Prepared(list[_Outgoing]):
    """Messages that are encoded already."""


class _Sending:
    """A message that was given to libfabric, or waits until that takes it."""

    __slots__ = ("ended", "memory", "pieces", "size", "tag")

    def __init__(self, tag: int | None, pieces: Sequence[Any], memory: bytearray | None = None) -> None:
        self.tag, self.pieces, self.memory = tag, pieces, memory
        self.size = 0  # bytes, of a message that was asked for
        self.ended = False


class FabricConnection(NativeConnection):
    """One end of two endpoints that know each other; owns its own.

    `client` is the name of the client that will join, where a listener makes the connection for it.
    """

    def __init__(self, endpoint: Endpoint, peer: str, heartbeat: float, client: bytes | None = None) -> None:
        super().__init__(peer, accepted=client is not None)
        self._endpoint = endpoint
        self._ffi = endpoint.ofi.ffi
        self._client = client
        self._to: int | None = None  # the peer's number, once it may be sent to
        self._welcome: bytes | None = None
        self._unsent: deque[_Sending] = deque()
        self._again = False  # whether a read must be tried again
        self._staging: list[bytearray] = []  # in which messages were joined, for the next ones
        self._receiving = self._receiving_bytes = 0  # on their way into memory
        self._happened = False  # more than heartbeats
        self._ended_before = 0  # operations, when a thread last wanted to sleep
        self._sent = self._peer_consumed = 0  # bytes, each message with its overhead
        self._consumed = self._told = 0
        self._window = MAX_IN_FLIGHT if self._accepted else _CLIENT_WINDOW  # of ours
        self._peer_window = _CLIENT_WINDOW if self._accepted else MAX_IN_FLIGHT
        self._taken = self._largest = 0  # bytes that arrived, each message with its overhead; the largest of them
        self._beside = 0  # messages beside the protocol in a row that nobody waited for
        self._bodies_joined = False  # whether that was heard
        self._farewell: set[int] = set()  # of the last words, those that were heard
        self._remote: RemoteSpace | None = None
        self.heartbeat = heartbeat
        self._heard = True  # since the last heartbeat
        self._missed = 0
        self._refused: _Sending | None = None  # what libfabric did not take at the last heartbeat,
        self._refused_at = 0.0  # and since when
        #: Libfabric woke us while a message is on its way: how many operations had ended by then.
        self._stirred: int | None = None
        with self._lock:
            for _ in range(_CONTROL_BUFFERS):
                self._receive_control(self._ffi.new(f"char[{_CONTROL_SIZE}]"))
            for _ in range(2):
                self._receive_untagged(self._ffi.new(f"char[{_MAX_PLAIN * (2 if self._accepted else 16)}]"))
        heartbeat_of(os.getpid()).add(self)

    @property
    def joining(self) -> bool:
        """Whether the client that this was made for is still to come."""
        return self._client is not None and not self._closed

    def reach(self, spans: Sequence[Span]) -> None:
        """Let `fetch` take from these spans of the peer's memory. Raises UriError for keys that are none."""
        if any(len(span.key) != _key.size for span in spans):
            raise UriError("the remote_handle is not one of libfabric's")
        self._remote, self.fetches = RemoteSpace(spans), True

    def fetch(self, wanted: Sequence[tuple[int, int, int]], memory: Buffer, timeout: float) -> None:
        if self._remote is None:
            raise RemoteProtocolError(f"{self._peer} sent addresses, and its URI had no remote_handle")
        spans = [self._remote.find(address, length) for address, length, _ in wanted]
        view = self._ffi.from_buffer(memory, require_writable=True)
        with self._lock:
            for (address, length, at), span in zip(wanted, spans, strict=True):
                self._fetch(address, length, at, span, view, timeout)
            self._settle_until(lambda: not self._under_way, timeout)

    def _fetch(self, address: int, length: int, at: int, span: Span, view: Any, timeout: float) -> None:
        virtual, key = _key.unpack(span.key)
        reading = _Sending(None, ())

        def done(completion: Completion) -> None:
            reading.ended = self._happened = self._heard = True
            if completion.error:
                self._lose_by(completion.error)

        def begun() -> bool:
            assert self._to is not None
            where = address if virtual else address - span.base
            self._again = not (self._gone or self._endpoint.read(self._to, where, key, view, at, length, done))
            return not self._again

        self._settle_until(begun, timeout)
        self._posted(reading, 0, view)

    def introduce(self, listener: bytes, host: str, timeout: float) -> None:
        """Exchange names with the listener of this name. Raises DeadlineExceeded, TransportError, RemoteError."""
        endpoint, version = self._endpoint, bytes([_VERSION])
        end = time.monotonic() + timeout  # of all this: a server that says other things is not waited for either
        with self._lock:
            self._to = endpoint.insert(listener)
            self._say(Kind.HELLO, version + endpoint.name)
            self._until(lambda: self._welcome is not None, end, timeout)
            if self._reason is not None:
                raise RemoteError(self._reason)
            if self._welcome is None:
                raise ConnectionClosed(f"connecting to {self._peer}: the peer closed the connection")
            if not self._welcome.startswith(version):
                raise TransportError(f"{self._peer} exchanges names in another way than version {_VERSION}")
            try:
                if len(self._welcome) != 1 + len(endpoint.name):
                    raise ValueError
                self._to = endpoint.insert(reachable(self._welcome[1:], host))
            except (ValueError, OSError, struct.error):
                raise RemoteProtocolError(f"{self._peer} said what is no name of an endpoint") from None
            joining = self._say_each(_JOINS)
            self._until(lambda: all(one.ended for one in joining), end, timeout)
            self._check_open()

    def _until(self, done: Callable[[], bool], end: float, timeout: float) -> None:
        """Connecting: wait until `done`, or until the peer is gone. Raises DeadlineExceeded, RemoteProtocolError."""
        self._drive(lambda: done() or self._ended or self._broken is not None or time.monotonic() >= end, timeout)
        if self._broken is not None:
            raise self._broken
        if not (done() or self._ended):
            raise DeadlineExceeded(f"connecting to {self._peer}: no answer for {timeout:g} s")

    # Sending

    def prepare(self, messages: Sequence[Message] | Any) -> Prepared:
        return messages if isinstance(messages, Prepared) else Prepared(map(self._encode, messages))

    def _encode(self, message: Message) -> _Outgoing:
        tag, parts = message.tag, [part for part in message.parts if len(part)]
        size = sum(map(len, parts))
        if tag is not None and tag & ~(_KINDS | 0x100) == _CONTROL:
            raise LocalProtocolError(f"the tag {tag:#x} is one of those that fabric keeps for itself")
        if size > self._endpoint.max_message:
            raise LocalProtocolError(f"a message of {size} bytes is too long for libfabric")
        if tag is None and size > _MAX_PLAIN:
            tag = _LARGE
        if not parts or (len(parts) > 1 and size <= _JOIN):
            parts = [b"".join(parts)]
        return _Outgoing(tag, size, [self._ffi.from_buffer(part) for part in parts])

    def _start(self, message: _Outgoing) -> None:
        tag, size, pieces = message
        sending = _Sending(tag, pieces) if len(pieces) <= self._endpoint.iov_limit else self._joined(tag, size, pieces)
        sending.size = size
        self._sent += size + _OVERHEAD
        self._in_flight = self._sent - self._peer_consumed
        self._dispatch(sending)
        if not sending.ended:
            self._posted(sending, 0, None)

    def _joined(self, tag: int | None, size: int, pieces: Sequence[Any]) -> _Sending:
        """A message in as many pieces as libfabric takes: those in a row are copied together that are the fewest bytes.

        In memory that was used before if there is some: fresh memory costs as much again.
        """
        single = self._endpoint.iov_limit - 1 if size > _SINGLY else 0  # each piece is fetched by itself
        row = len(pieces) - single
        sizes = [sum(map(len, pieces[at : at + row])) for at in range(single + 1)]
        least = min(sizes)
        first = sizes.index(least)
        staged = next((at for at, memory in enumerate(self._staging) if least <= len(memory)), None)
        memory = bytearray(least) if staged is None else self._staging.pop(staged)
        whole = self._ffi.from_buffer(memoryview(memory)[:least])
        end = 0
        for piece in pieces[first : first + row]:
            self._ffi.memmove(whole + end, piece, len(piece))
            end += len(piece)
        return _Sending(tag, [*pieces[:first], whole, *pieces[first + row :]], memory)

    def _say(self, kind: Kind, payload: bytes = b"") -> _Sending:
        sending = _Sending(_CONTROL | kind, [self._ffi.from_buffer(payload[:_CONTROL_SIZE])])
        self._dispatch(sending)
        return sending

    def _say_each(self, kinds: Sequence[Kind]) -> list[_Sending]:
        return [self._say(kind) for kind in kinds[: self._endpoint.lanes]]

    def _dispatch(self, sending: _Sending) -> None:
        if self._unsent or self._to is None or not self._begin(sending):
            self._unsent.append(sending)

    def _begin(self, sending: _Sending) -> bool:
        def done(completion: Completion) -> None:
            sending.ended = True
            if completion.error:
                self._lose_by(completion.error)
            else:
                self.written += sending.size
                self._happened |= sending.tag != _CONTROL | Kind.CREDIT
            memory, sending.memory, sending.pieces = sending.memory, None, ()
            if memory is not None and len(self._staging) < _STAGING:
                self._staging.append(memory)

        assert self._to is not None
        try:
            return self._endpoint.send(self._to, sending.tag, sending.pieces, done)
        except TransportError as error:
            _log.debug("%r: %s", self, error)
            sending.ended = True
            self._lose_by(0)
            return True

    def _has_room(self, size: int) -> bool:
        # What is in flight is what the peer has not consumed, or has not told yet, which can be a part of all.
        few = self._in_flight < self._window // 2 or self._in_flight + size <= self._window
        return few and len(self._under_way) < _UNDER_WAY

    def _complete(self, request: _Sending) -> bool | None:
        return request.ended or None

    def _taken_all(self) -> bool:
        return self._peer_consumed == self._sent or len(self._farewell) == self._endpoint.lanes

    def _tell(self, reason: str) -> bool:
        self._say(Kind.ABORT, reason.encode(errors="backslashreplace"))
        return True

    # Receiving

    def receive(self, timeout: float, allocate: Allocate) -> Incoming | None:
        incoming = super().receive(timeout, allocate)
        if incoming is not None and not self._accepted:
            with self._lock:
                self._consumed += len(incoming.data) + _OVERHEAD
                self._tell_if_worthwhile()
        return incoming

    def _tell_if_worthwhile(self) -> None:
        worth = self._consumed - self._told >= self._peer_window // _TELLING
        if worth and not self._closed and not self._gone and self._to is not None:
            self._tell_consumed()

    def _tell_consumed(self) -> None:
        self._told = self._consumed
        self._say(Kind.CREDIT, _consumed.pack(self._consumed))

    def _receive_untagged(self, memory: Any) -> None:
        def done(completion: Completion) -> None:
            error, flags, length, pointer, _ = completion
            if error:
                self._lose_by(error)
                return
            if flags & c.RECV:
                self._arrive(Incoming(None, bytes(self._ffi.buffer(pointer, length))))
            if flags & c.MULTI_RECV:
                self._receive_untagged(memory)

        self._endpoint.receive_untagged(memory, done)

    def _receive_control(self, memory: Any) -> None:
        self._endpoint.receive_tagged(memory, _CONTROL, _KINDS, self._hearing(memory, self._receive_control))

    def _hearing(self, memory: Any, then: Callable[[Any], None]) -> Done:
        """What to do once `memory` holds what the peer says beside the protocol; then `then` may use that again."""

        def done(completion: Completion) -> None:
            error, _, length, _, tag = completion
            if error:
                self._lose_by(error)
                return
            data = bytes(self._ffi.buffer(memory, length))
            then(memory)
            self._control(tag, data)

        return done

    def _control(self, tag: int, data: bytes) -> None:
        """The peer says something beside the protocol."""
        self._heard = True
        kind = tag & _KINDS
        if kind == Kind.CREDIT and len(data) == _consumed.size:
            (consumed,) = _consumed.unpack(data)
            if consumed > self._sent:
                self._broken = RemoteProtocolError(f"{self._peer} says that it consumed more than it was sent")
            elif consumed > self._peer_consumed:  # one that was looked for may come after the next
                self._happened = True
                self._peer_consumed = consumed
                self._in_flight = self._sent - consumed
            return
        self._happened = True
        # Each of these is said once: one who says them again and again would be taken for one at work.
        if kind == Kind.WELCOME and not self._accepted and self._welcome is None:
            self._welcome = data
        elif kind == Kind.JOIN and self._client is not None:
            self._to, self._client = self._endpoint.insert(self._client), None
        elif kind == Kind.ABORT and self._reason is None:
            self._give_up(data.decode(errors="replace"))
        elif kind == Kind.BODIES_JOIN and self._accepted and not self._bodies_joined:
            self._bodies_joined = True  # it has done its work: there is a connection
        elif kind in _BYES and kind not in self._farewell:
            self._farewell.add(kind)
            if len(self._farewell) == self._endpoint.lanes:
                if not self._closed and not self._gone and self._to is not None:
                    self._say_each(_BYES)
                self._lose()
        else:
            self._broken = RemoteProtocolError(f"{self._peer} said {data[:20]!r}, of kind {kind}, which means nothing")

    def _waiting(self) -> bool:
        return bool(self._receiving) or self._look() is not None

    def _look(self) -> Found | None:
        """A message that nobody waits for. What is said beside the protocol is none: whoever waits for it would starve.

        Some of that is found here too, when more of it comes at once than there are receives for.
        """
        for _ in range(_LOOKS):  # each look lets more arrive: a peer that sends without end shall not keep us here
            found = self._endpoint.look()
            if found is None or not _beside(found.tag):
                self._beside = 0 if found is None else self._beside
                return found
            self._beside += 1
            if self._beside > _BESIDE and self._broken is None:
                self._broken = RemoteProtocolError(
                    f"{self._peer} says {self._beside} things at once beside the protocol"
                )
            if found.length <= _CONTROL_SIZE:
                memory = self._ffi.new(f"char[{_CONTROL_SIZE}]")
                self._endpoint.claim(memory, self._hearing(memory, lambda memory: None))
            else:
                self._endpoint.discard()
                self._broken = RemoteProtocolError(f"{self._peer} says {found.length} bytes beside the protocol")
        return None

    def _take(self, allocate: Allocate, most: int) -> bool:
        only_small = self._only_small(allocate)
        for _ in range(_LOOKS):
            if self._receiving_bytes + self._arrived_bytes > most or self._broken is not None:
                break
            if (found := self._look()) is None:
                if self._accepted:  # not before: nobody but one who sends without end has more under way
                    self._consumed = self._taken
                    self._tell_if_worthwhile()
                break
            if found.length > self._endpoint.whole and (only_small or not self._connected()):
                return not only_small or bool(self._receiving)
            try:
                if found.tag != _LARGE:
                    memory = allocate(found.tag, found.length)
                elif found.length <= self._max_untagged:
                    memory = bytearray(found.length)
                else:
                    raise RemoteProtocolError(
                        f"the peer sent an untagged message of {found.length} bytes; "
                        f"at most {self._max_untagged} are taken"
                    )
            except BaseException:
                self._endpoint.discard()
                raise
            self._claim(found.tag, memory)
        return bool(self._receiving)

    def _connected(self) -> bool:
        """Whether a message can be fetched from the peer. To try it where that is gone crashes in libfabric.

        Nothing tells but sending something: that is taken at once where there is a connection.
        """
        if self._gone or self._unsent:
            return False
        self._say(Kind.CREDIT, _consumed.pack(self._told))
        if self._unsent and not self._under_way:
            self._lose()
        return not self._unsent and not self._gone

    def _claim(self, tag: int, memory: Buffer) -> None:
        size = len(memory)

        def done(completion: Completion) -> None:
            self._receiving -= 1
            self._receiving_bytes -= size
            if completion.error:
                self._broken = ConnectionClosed(f"{self._peer} closed the connection in the middle of a message")
                self._lose_by(completion.error)
            elif tag == _LARGE:
                self._arrive(Incoming(None, bytes(memory)))
            else:
                self._arrive(Incoming(tag, memory))

        self._receiving += 1
        self._receiving_bytes += size
        view = self._ffi.from_buffer(memory, require_writable=True) if size else self._ffi.new("char[1]")
        self._endpoint.claim(view, done)

    def _arrive(self, incoming: Incoming) -> None:
        self._happened = self._heard = True
        super()._arrive(incoming)
        self._largest = max(self._largest, len(incoming.data))
        self._taken += len(incoming.data) + _OVERHEAD
        if self._taken - self._told - self._largest > self._peer_window * 5 // 4 and self._broken is None:
            self._broken = RemoteProtocolError(f"{self._peer} sends without waiting until that is consumed")

    # The endpoint

    def _progress(self) -> bool:
        while self._unsent and self._to is not None and self._begin(self._unsent[0]):
            self._unsent.popleft()
        for _ in range(_ROUNDS):
            if not self._endpoint.progress():
                break
        if self._stirred == self._endpoint.ended:
            self._heard = True  # a part of a large message, behind which heartbeats must wait
        self._stirred = None
        if self._asleep and self._endpoint.found is None and self._endpoint.look() is not None:
            self._happened = True  # for the one who sleeps: libfabric will not wake it for what it has shown us
        happened, self._happened = self._happened, False  # here, or while looking
        return happened

    def _arm(self) -> bool:
        # What arrives is found by looking alone: libfabric wakes us for it, but only as long as it has not seen it.
        found, endpoint = self._endpoint.found, self._endpoint
        if endpoint.look() is not found or endpoint.ended != self._ended_before:
            self._ended_before = endpoint.ended
            self._lock.notify_all()
            return False
        return endpoint.arm()

    def _sleep(self, seconds: float) -> None:
        ended = self._endpoint.ended
        woken = self._endpoint.sleep(self._waker, min(seconds, _RETRY) if self._unsent or self._again else seconds)
        self._stirred = ended if woken and self._receiving else None

    def beat(self) -> None:
        """Tell the peer that we are here, and see whether it is.

        Also see to it that a client which sends without end while nobody here receives is not kept for: each time
        libfabric works it takes some of that.
        """
        if not self._lock.acquire(timeout=_BUSY):
            return  # whoever has it is at work; the hearts of others must beat
        try:
            if self._closed or self._over:
                return
            for _ in range(_LOOKS):  # what the peer sent before its heartbeat comes first
                if self._has(lambda: self._heard):
                    break
                self._endpoint.progress()
            self._stirred = None  # it is we who woke whoever sleeps
            self._advance()
            self._has(lambda: False)
            self._missed = 0 if self._heard else self._missed + 1
            self._heard = False
            if self._missed >= _MISSED or self._refuses():
                _log.info("%s is gone without a word", self._peer)
                self._lose()
            elif self._to is not None and not self._unsent:
                self._tell_consumed()
        except RemoteProtocolError as error:
            self._broken = error
        finally:
            if self._asleep and self._over:
                self._waker.set()
            self._stirred = None
            self._lock.release()

    def _refuses(self) -> bool:
        """Whether libfabric took something once, has nothing to do, and takes no more: there is no connection then."""
        idle = not self._under_way and not self._receiving
        refused = self._unsent[0] if self._unsent and idle and (self._sent or self._consumed) else None
        now = time.monotonic()
        if refused is not self._refused:
            self._refused, self._refused_at = refused, now
        return refused is not None and now >= self._refused_at + _REFUSED

    def _lose_by(self, error: int) -> None:
        if not self._gone:
            _log.debug("%r: %s", self, self._endpoint.ofi.explain(error))
            self._lose()

    def _lose(self) -> None:
        self._happened = True
        self._unsent.clear()
        super()._lose()

    def close(self) -> None:
        heartbeat_of(os.getpid()).remove(self)
        super().close()

    def _release(self) -> None:
        if self._to is not None and not self._gone and self._broken is None:
            # Until the answer comes there is something to read: closing over that could take our last words back.
            self._say_each(_BYES)
            end = time.monotonic() + _LAST
            with suppress(TransportError):
                while not self._gone and time.monotonic() < end:
                    if self._look() is not None:
                        self._endpoint.discard()
                    elif not self._progress() and self._endpoint.arm():
                        self._endpoint.sleep(self._waker, _RETRY)
        self._unsent.clear()
        self._endpoint.close()


# Listening and connecting


class _Answer:
    """What a client that said HELLO is told, and the connection that there is once it has been."""

    __slots__ = ("begun", "client", "connection", "end", "ended", "kind", "payload")

    def __init__(self, client: int, kind: Kind, payload: Any, connection: Connection | None) -> None:
        self.client, self.kind, self.payload, self.connection = client, kind, payload, connection
        self.begun, self.end = False, time.monotonic() + _LAST
        self.ended: list[Completion] = []


class _FabricListener(Listener):
    """An endpoint that only hears of clients; each then gets one of its own."""

    def __init__(self, uri: Uri) -> None:
        super().__init__()
        self._provider, self._heartbeat = _provider(uri), _heartbeat(uri)
        self._host = uri.host or "127.0.0.1"
        self.exposes_memory = _rma(uri, self._provider)
        self._exposed: weakref.WeakKeyDictionary[Region, tuple[Span, weakref.finalize[..., Region]]]
        self._exposed = weakref.WeakKeyDictionary()
        self._endpoint = endpoint = Endpoint(self._provider, self._host, str(uri.port or 0), self.exposes_memory)
        self._ffi = endpoint.ofi.ffi
        self._hellos: deque[bytes] = deque()
        self._known: deque[int] = deque()
        self._answers: list[_Answer] = []
        self._joining: list[tuple[float, FabricConnection]] = []  # and since when, the oldest first
        self._closed = False
        self._waker = Waker()
        self._lock = threading.Condition(threading.Lock())  # held by whoever uses the endpoint
        self._asleep = False
        for _ in range(_CONTROL_BUFFERS):
            self._listen(self._ffi.new(f"char[{_CONTROL_SIZE}]"))
        parameters = {"provider": self._provider, "protocol": endpoint.protocol, "libfabric": endpoint.ofi.version}
        if "heartbeat" in uri.parameters:
            parameters["heartbeat"] = uri.parameters["heartbeat"]
        self.uri = Uri("fabric", host=self._host, port=host_and_port(endpoint.name)[1], parameters=parameters)

    def _listen(self, memory: Any) -> None:
        def done(completion: Completion) -> None:
            if not completion.error:
                if len(self._hellos) < _MAX_WAITING:
                    self._hellos.append(bytes(self._ffi.buffer(memory, completion.length)))
                self._listen(memory)

        self._endpoint.receive_tagged(memory, _CONTROL | Kind.HELLO, 0, done)

    def accept(self) -> Connection | None:
        while True:
            with self._lock:
                while not self._closed and self._endpoint.progress():
                    pass
                while not self._closed and self._endpoint.look() is not None:
                    self._endpoint.discard()
                if self._closed:
                    return None
                while self._hellos and len(self._answers) < _ANSWERING and self._has_place():
                    self._welcome(self._hellos[0])
                    self._hellos.popleft()
                for answer in [one for one in self._answers if self._given(one)]:
                    self._answers.remove(answer)
                    if answer.connection is not None:
                        return answer.connection
                self._asleep = self._endpoint.arm()
            if self._asleep:
                self._endpoint.sleep(self._waker, _RETRY if self._answers or self._hellos else _LOOK_AGAIN)
            with self._lock:
                self._asleep = False
                self._lock.notify_all()

    def _has_place(self) -> bool:
        """Whether one more may have an endpoint. If not, the one that has had most time to join goes, once it had some.

        Whoever has accepted it closes it.
        """
        self._joining = [(since, one) for since, one in self._joining if one.joining]
        if len(self._joining) < _JOINING:
            return True
        since, slowest = self._joining[0]
        if time.monotonic() >= since + _JOIN_TIME:
            slowest.arrived()  # it may have come, and nobody has looked yet
            if slowest.joining:
                slowest.interrupt()
        return False

    def _welcome(self, hello: bytes) -> None:
        """Begin to answer the client that says this: with a connection, unless there can be none."""
        version, name = hello[:1], hello[1:]
        try:
            client = self._endpoint.insert(name)
            peer = "fabric client {}:{}".format(*host_and_port(name))
        except (TransportError, ValueError, struct.error) as error:
            _log.info("%s: a client said what is no name: %s", self.uri, error)
            return
        self._known.append(client)
        if len(self._known) > _KNOWN:
            self._endpoint.remove(self._known.popleft())
        if version != bytes([_VERSION]) or len(name) != len(self._endpoint.name) * _lanes(self._provider):
            self._answer(client, Kind.ABORT, b"the server exchanges names in another way: install the same version")
            return
        # Memory is registered with a domain, so that endpoints from which it is read share the listener's.
        domain = self._endpoint.domain if self.exposes_memory else None
        endpoint = _endpoint(self._provider, self._host, self.exposes_memory, domain)
        try:
            connection = FabricConnection(endpoint, peer, self._heartbeat, name)
        except BaseException:
            endpoint.close()
            raise
        connection.exposes_memory = self.exposes_memory
        self._joining.append((time.monotonic(), connection))
        self._answer(client, Kind.WELCOME, bytes([_VERSION]) + endpoint.name, connection)

    def _answer(self, client: int, kind: Kind, payload: bytes, connection: Connection | None = None) -> None:
        self._answers.append(_Answer(client, kind, self._ffi.from_buffer(payload), connection))

    def _given(self, answer: _Answer) -> bool:
        """Whether an answer has been given, or is so no more: who does not take it is waited for no longer."""
        try:
            if not answer.begun:
                answer.begun = self._endpoint.send(
                    answer.client, _CONTROL | answer.kind, [answer.payload], answer.ended.append
                )
        except TransportError as error:  # it is gone already
            _log.debug("%s: %s", self.uri, error)
            return True
        return bool(answer.ended) or time.monotonic() >= answer.end

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._waker.set()
        with self._lock:
            while self._asleep:
                self._lock.wait()
            for answer in self._answers:
                if answer.connection is not None:
                    answer.connection.close()
            for _, withdraw in self._exposed.values():
                withdraw()
            self._endpoint.close()
            self._waker.close()

    def forked(self) -> None:
        for _, withdraw in self._exposed.values():
            withdraw.detach()
        super().forked()

    def expose(self, region: Region) -> Span:
        with self._lock:
            if self._closed:
                raise ConnectionClosed("the listener is closed")
            if region not in self._exposed:
                self._exposed[region] = self._register(region)
            return self._exposed[region][0]

    def _register(self, region: Region) -> tuple[Span, weakref.finalize[..., Region]]:
        endpoint = self._endpoint
        memory = self._ffi.from_buffer(region.memory)
        registered = endpoint.domain.register(memory, c.REMOTE_READ)
        # What is registered must not be unmapped before: the finalizer holds on to it.
        withdraw = weakref.finalize(region, _withdraw, endpoint.domain, registered, memory)
        withdraw.atexit = False
        return Span(region.base, region.size, _key.pack(endpoint.virtual_addresses, registered.key)), withdraw


def _withdraw(domain: Domain, registered: Any, memory: Any) -> None:
    domain.unregister(registered)


class FabricTransport(Transport):
    """See the module."""

    def connect(self, uri: Uri, timeout: float) -> Connection:
        if not uri.host or not uri.port:
            raise UriError(f"{uri} needs a host and a port: fabric://HOST:PORT")
        provider, heartbeat = _provider(uri), _heartbeat(uri)
        where = f"the fabric server {uri.host}:{uri.port}"
        here, there = _probe(uri.host, uri.port, timeout, where)
        spans = spans_of(uri)
        endpoint = _endpoint(provider, here, bool(spans))
        try:
            _check_same(uri, endpoint)
            listener = endpoint.find(there, str(uri.port))
            connection = FabricConnection(endpoint, where, heartbeat)
        except BaseException:
            endpoint.close()
            raise
        try:
            connection.introduce(listener, there, timeout)
            if spans:
                connection.reach(spans)
        except BaseException:
            connection.close()
            raise
        return connection

    def listen(self, uri: Uri) -> Listener:
        return _FabricListener(uri)


def _probe(host: str, port: int, timeout: float, where: str) -> tuple[str, str]:
    """The addresses of this host and of the other one, as seen from here. Raises where nobody listens.

    libfabric would try to connect to a closed port for ever.
    """
    check_name(host)
    try:
        with socket.create_connection((host, port), timeout) as probe:
            return probe.getsockname()[0], probe.getpeername()[0]
    except OSError as error:
        raise explain(error, f"connecting to {where}") from None
