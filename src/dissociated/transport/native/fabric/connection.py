"""A connection over libfabric.

Tags have no sender, so each has an endpoint of its own, or two.
"""

from __future__ import annotations

import logging
import os
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

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
from dissociated.memory.remote import Span
from dissociated.protocol.message import Incoming, Message
from dissociated.transport.base import Allocate
from dissociated.transport.native.addresses import advertised_names
from dissociated.transport.native.connection import NativeConnection
from dissociated.transport.native.fabric import _ofi as c
from dissociated.transport.native.fabric.control import (
    BYES,
    CONSUMED,
    CONTROL,
    CONTROL_BUFFERS,
    CONTROL_SIZE,
    JOINS,
    KIND_MASK,
    LARGE,
    VERSION,
    Kind,
    is_control,
)
from dissociated.transport.native.fabric.credit import Credit
from dissociated.transport.native.fabric.domain import RMA_KEY
from dissociated.transport.native.fabric.endpoint import MAX_UNTAGGED, QUEUE, Completion, Done, PeekedMessage
from dissociated.transport.native.fabric.outgoing import FabricMessages, Joiner, Outgoing, PendingSend
from dissociated.transport.native.fabric.provider import ConnectionEndpoint
from dissociated.transport.native.heartbeat import heartbeat_of

_log = logging.getLogger(__name__)

_JOIN = 1 << 13  # bytes up to which parts are copied together at once
_UNDER_WAY = QUEUE // 2  # messages, so that libfabric always takes a heartbeat, too
_RETRY_DELAY = 0.002  # seconds, while libfabric wants something to be tried again
_LAST_TIMEOUT = 0.25  # seconds for the last word
_MISSED = 10  # heartbeats that a peer may miss
_LOOKS = 256  # messages that are taken before somebody else's turn
_BESIDE = 128  # messages beside the protocol that may wait at once: libfabric keeps many more beside them
_REFUSED = 1.0  # seconds that libfabric may take nothing, although it has nothing to do
_BUSY = 0.05  # seconds that a heartbeat waits for whoever uses the connection
_ROUNDS = 16  # of completions that are looked at before somebody else is


class FabricConnection(NativeConnection):
    """One end of two endpoints that know each other; owns its own.

    `client` is the name of the client that will join, where a listener makes the connection for it.
    """

    def __init__(self, endpoint: ConnectionEndpoint, peer: str, heartbeat: float, client: bytes | None = None) -> None:
        super().__init__(peer, accepted=client is not None)
        self._endpoint = endpoint
        self._ffi = endpoint.ofi.ffi
        self._client = client
        self._to: int | None = None  # the peer's number, once it may be sent to
        self._welcome: bytes | None = None
        self._unsent: deque[PendingSend] = deque()
        self._again = False  # whether a read must be tried again
        self._joiner = Joiner(self._ffi, endpoint.iov_limit)
        self._receiving = self._receiving_bytes = 0  # on their way into memory
        self._happened = False  # more than heartbeats
        self._ended_before = 0  # operations, when a thread last wanted to sleep
        self._credit = Credit(self._accepted)
        self._beside = 0  # messages beside the protocol in a row that nobody waited for
        self._bodies_joined = False  # whether that was heard
        self._farewell: set[int] = set()  # of the last words, those that were heard
        self.heartbeat = heartbeat
        self._heard = True  # since the last heartbeat
        self._missed = 0
        self._refused: PendingSend | None = None  # what libfabric did not take at the last heartbeat,
        self._refused_at = 0.0  # and since when
        #: Libfabric woke us while a message is on its way: how many operations had ended by then.
        self._stirred: int | None = None
        with self._lock:
            for _ in range(CONTROL_BUFFERS):
                self._receive_control(self._ffi.new(f"char[{CONTROL_SIZE}]"))
            for _ in range(2):
                self._receive_untagged(self._ffi.new(f"char[{MAX_UNTAGGED * (2 if self._accepted else 16)}]"))
        heartbeat_of(os.getpid()).add(self)

    @property
    def joining(self) -> bool:
        """Whether the client that this was made for is still to come."""
        return self._client is not None and not self._closed

    def reach(self, spans: Sequence[Span]) -> None:
        """Let `fetch` take from these spans of the peer's memory. Raises UriError for keys that are none."""
        if any(len(span.key) != RMA_KEY.size for span in spans):
            raise UriError("the remote_handle is not one of libfabric's")
        super().reach(spans)

    def _read(self, span: Span, address: int, length: int, into: Any, at: int, timeout: float) -> None:
        virtual, key = RMA_KEY.unpack(span.key)
        reading = PendingSend(None, ())

        def done(completion: Completion) -> None:
            reading.ended = self._happened = self._heard = True
            if completion.error:
                self._lose_by(completion.error)

        def begun() -> bool:
            assert self._to is not None
            where = address if virtual else address - span.base
            self._again = not (self._gone or self._endpoint.read(self._to, where, key, into, at, length, done))
            return not self._again

        self._settle_until(begun, timeout)
        self._posted(reading, 0, into)

    def introduce(self, listener: bytes, host: str, timeout: float) -> None:
        """Exchange names with the listener of this name. Raises DeadlineExceeded, TransportError, RemoteError."""
        endpoint, version = self._endpoint, bytes([VERSION])
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
                raise TransportError(f"{self._peer} exchanges names in another way than version {VERSION}")
            try:
                if len(self._welcome) != 1 + len(endpoint.name):
                    raise ValueError
                self._to = endpoint.insert(advertised_names(self._welcome[1:], host))
            except (ValueError, OSError, struct.error):
                raise RemoteProtocolError(f"{self._peer} said what is no name of an endpoint") from None
            joining = self._say_each(JOINS)
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

    def prepare(self, messages: Sequence[Message] | Any) -> FabricMessages:
        return messages if isinstance(messages, FabricMessages) else FabricMessages(map(self._encode, messages))

    def _encode(self, message: Message) -> Outgoing:
        tag, parts = message.tag, [part for part in message.parts if len(part)]
        size = sum(map(len, parts))
        if tag is not None and tag & ~(KIND_MASK | 0x100) == CONTROL:
            raise LocalProtocolError(f"the tag {tag:#x} is one of those that fabric keeps for itself")
        if size > self._endpoint.max_message:
            raise LocalProtocolError(f"a message of {size} bytes is too long for libfabric")
        if tag is None and size > MAX_UNTAGGED:
            tag = LARGE
        if not parts or (len(parts) > 1 and size <= _JOIN):
            parts = [b"".join(parts)]
        return Outgoing(tag, size, [self._ffi.from_buffer(part) for part in parts])

    def _start(self, message: Outgoing) -> None:
        sending = self._joiner.fitted(message)
        sending.size = message.size
        self._credit.send(message.size)
        self._dispatch(sending)
        if not sending.ended:
            self._posted(sending, 0, None)

    def _say(self, kind: Kind, payload: bytes = b"") -> PendingSend:
        sending = PendingSend(CONTROL | kind, [self._ffi.from_buffer(payload[:CONTROL_SIZE])])
        self._dispatch(sending)
        return sending

    def _say_each(self, kinds: Sequence[Kind]) -> list[PendingSend]:
        return [self._say(kind) for kind in kinds[: self._endpoint.lanes]]

    def _dispatch(self, sending: PendingSend) -> None:
        if self._unsent or self._to is None or not self._begin(sending):
            self._unsent.append(sending)

    def _begin(self, sending: PendingSend) -> bool:
        def done(completion: Completion) -> None:
            sending.ended = True
            if completion.error:
                self._lose_by(completion.error)
            else:
                self.written += sending.size
                self._happened |= sending.tag != CONTROL | Kind.CREDIT
            self._joiner.release(sending)

        assert self._to is not None
        try:
            return self._endpoint.send(self._to, sending.tag, sending.pieces, done)
        except TransportError as error:
            _log.debug("%r: %s", self, error)
            sending.ended = True
            self._lose_by(0)
            return True

    def _has_room(self, size: int) -> bool:
        return self._credit.has_room(size) and len(self._under_way) < _UNDER_WAY

    def _complete(self, request: PendingSend) -> bool | None:
        return request.ended or None

    def _taken_all(self) -> bool:
        return self._credit.spent or len(self._farewell) == self._endpoint.lanes

    def _tell(self, reason: str) -> bool:
        self._say(Kind.ABORT, reason.encode(errors="backslashreplace"))
        return True

    # Receiving

    def receive(self, timeout: float, allocate: Allocate) -> Incoming | None:
        incoming = super().receive(timeout, allocate)
        if incoming is not None and not self._accepted:
            with self._lock:
                self._credit.consume(len(incoming.data))
                self._tell_if_worthwhile()
        return incoming

    def _tell_if_worthwhile(self) -> None:
        if self._credit.worth_telling and not self._closed and not self._gone and self._to is not None:
            self._tell_consumed()

    def _tell_consumed(self) -> None:
        self._say(Kind.CREDIT, self._credit.tell())

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
        self._endpoint.receive_tagged(memory, CONTROL, KIND_MASK, self._hearing(memory, self._receive_control))

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
        kind = tag & KIND_MASK
        if kind == Kind.CREDIT and len(data) == CONSUMED.size:
            more = self._credit.hear(data)
            if more is None:
                self._broken = RemoteProtocolError(f"{self._peer} says that it consumed more than it was sent")
            elif more:
                self._happened = True
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
        elif kind in BYES and kind not in self._farewell:
            self._farewell.add(kind)
            if len(self._farewell) == self._endpoint.lanes:
                if not self._closed and not self._gone and self._to is not None:
                    self._say_each(BYES)
                self._lose()
        else:
            self._broken = RemoteProtocolError(f"{self._peer} said {data[:20]!r}, of kind {kind}, which means nothing")

    def _waiting(self) -> bool:
        return bool(self._receiving) or self._look() is not None

    def _look(self) -> PeekedMessage | None:
        """A message that nobody waits for. What is said beside the protocol is none: whoever waits for it would starve.

        Some of that is found here too, when more of it comes at once than there are receives for.
        """
        for _ in range(_LOOKS):  # each look lets more arrive: a peer that sends without end shall not keep us here
            found = self._endpoint.peek()
            if found is None or not is_control(found.tag):
                self._beside = 0 if found is None else self._beside
                return found
            self._beside += 1
            if self._beside > _BESIDE and self._broken is None:
                self._broken = RemoteProtocolError(
                    f"{self._peer} says {self._beside} things at once beside the protocol"
                )
            if found.length <= CONTROL_SIZE:
                memory = self._ffi.new(f"char[{CONTROL_SIZE}]")
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
                    self._credit.consume_all()
                    self._tell_if_worthwhile()
                break
            if found.length > self._endpoint.eager_limit and (only_small or not self._connected()):
                return not only_small or bool(self._receiving)
            try:
                if found.tag != LARGE:
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
        self._say(Kind.CREDIT, self._credit.repeat())
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
            elif tag == LARGE:
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
        if not self._credit.arrive(len(incoming.data)) and self._broken is None:
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
        if self._asleep and self._endpoint.peeked is None and self._endpoint.peek() is not None:
            self._happened = True  # for the one who sleeps: libfabric will not wake it for what it has shown us
        happened, self._happened = self._happened, False  # here, or while looking
        return happened

    def _arm(self) -> bool:
        # What arrives is found by looking alone: libfabric wakes us for it, but only as long as it has not seen it.
        found, endpoint = self._endpoint.peeked, self._endpoint
        if endpoint.peek() is not found or endpoint.ended != self._ended_before:
            self._ended_before = endpoint.ended
            self._lock.notify_all()
            return False
        return endpoint.arm()

    def _sleep(self, seconds: float) -> None:
        ended = self._endpoint.ended
        woken = self._endpoint.sleep(
            self._waker, min(seconds, _RETRY_DELAY) if self._unsent or self._again else seconds
        )
        self._stirred = ended if woken and self._receiving else None

    def send_heartbeat(self) -> None:
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
        refused = self._unsent[0] if self._unsent and idle and self._credit.used else None
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
            self._say_each(BYES)
            end = time.monotonic() + _LAST_TIMEOUT
            with suppress(TransportError):
                while not self._gone and time.monotonic() < end:
                    if self._look() is not None:
                        self._endpoint.discard()
                    elif not self._progress() and self._endpoint.arm():
                        self._endpoint.sleep(self._waker, _RETRY_DELAY)
        self._unsent.clear()
        self._endpoint.close()
