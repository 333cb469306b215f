"""Connections over libfabric.

Tags do not name the sender, so each connection has one or two endpoints of its own.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from dissociated.base.buffers import Buffer
from dissociated.errors import (
    ConnectionClosed,
    DeadlineExceeded,
    RemoteProtocolError,
    TransportError,
    UriError,
)
from dissociated.memory.remote import Span
from dissociated.protocol.close_reason import decode_reason, encode_reason
from dissociated.protocol.message import Incoming, Message
from dissociated.transport.base import Allocate
from dissociated.transport.native.connection import NativeConnection
from dissociated.transport.native.fabric import libfabric as c
from dissociated.transport.native.fabric.control import (
    BYES,
    CONSUMED,
    CONTROL,
    CONTROL_BUFFERS,
    CONTROL_SIZE,
    JOINS,
    KIND_MASK,
    LARGE,
    TAKES_RUNS,
    Credit,
    Handshake,
    Kind,
    Liveness,
    is_control,
)
from dissociated.transport.native.fabric.dual_endpoint import ConnectionEndpoint
from dissociated.transport.native.fabric.endpoint import MAX_SMALL_UNTAGGED, PeekedMessage
from dissociated.transport.native.fabric.libfabric import QUEUE
from dissociated.transport.native.fabric.memory import RMA_KEY, Completion, Done
from dissociated.transport.native.fabric.outbox import FabricMessage, Outbox, PendingSend
from dissociated.transport.native.threads import heartbeat_of
from dissociated.transport.states import ConnectionState

_log = logging.getLogger(__name__)

_MAX_UNDER_WAY = QUEUE // 2  # messages in flight; leaves room in the queue for heartbeats
_RETRY_DELAY = 0.002  # seconds between two attempts while libfabric accepts no operation
_LAST_TIMEOUT = 0.25  # seconds for the BYE messages of both sides
_MAX_PEEKS = 256  # messages that are received before another thread gets its turn
_MAX_CONTROL_WAITING = 128  # control messages that may wait in a row; libfabric would keep many more
_LOCK_TIMEOUT = 0.05  # seconds for which a heartbeat waits for the thread that uses the connection
_MAX_ROUNDS = 16  # reads of the completion queue in one step of progress


class FabricConnection(NativeConnection):
    """An end of a connection over libfabric. Owns its endpoint.

    Args:
        endpoint: the endpoint of this end.
        peer: the name of the peer, for messages.
        heartbeat: the seconds between two heartbeats.
        client: on the server's side, the name of the endpoint of the client that will join.
    """

    def __init__(self, endpoint: ConnectionEndpoint, peer: str, heartbeat: float, client: bytes | None = None) -> None:
        super().__init__(peer, accepted=client is not None)
        self._endpoint = endpoint
        self._ffi = endpoint.ofi.ffi
        self._handshake = Handshake(endpoint, peer, client)
        self._outbox = Outbox(endpoint, self._handshake)
        self._retries_read = False  # whether a read must be tried again
        self._receiving = self._receiving_bytes = 0  # messages that are being received, and their bytes
        self._happened = False  # whether anything other than heartbeats happened
        self._ended_before = 0  # the number of ended operations when a thread last tried to sleep
        self._credit = Credit(self._accepted)
        self._control_waiting = 0  # control messages in a row for which no receive was posted
        self._byes: set[int] = set()  # the kinds of BYE messages that the peer has sent
        self._liveness = Liveness()
        #: The number of ended operations when libfabric woke this side while a message was being received, or None.
        self._woken_at: int | None = None
        try:
            with self._lock:
                for _ in range(CONTROL_BUFFERS):
                    self._receive_control(self._ffi.new(f"char[{CONTROL_SIZE}]"))
                for _ in range(2):
                    self._receive_untagged(self._ffi.new(f"char[{MAX_SMALL_UNTAGGED * (2 if self._accepted else 16)}]"))
            heartbeat_of(os.getpid()).add(self._send_heartbeat, heartbeat)
        except BaseException:
            heartbeat_of(os.getpid()).remove(self._send_heartbeat)
            self._waker.close()
            raise

    @property
    def joining(self) -> bool:
        """Whether the client for which this connection was made has not joined yet."""
        return self._handshake.joining and not self._closed

    def reach(self, spans: Sequence[Span]) -> None:
        """Allow `fetch` to read from `spans` of the peer's memory. Raise UriError for an invalid key."""
        if any(len(span.key) != RMA_KEY.size for span in spans):
            raise UriError("the remote_handle was not made by libfabric: take the URI of a fabric: location unchanged")
        super().reach(spans)

    def _read(self, span: Span, address: int, length: int, into: Any, at: int, timeout: float) -> None:
        self._check_open()
        virtual, key = RMA_KEY.unpack(span.key)
        reading = PendingSend(None, ())

        def on_done(completion: Completion) -> None:
            reading.has_ended = self._happened = self._liveness.heard = True
            if completion.error:
                self._lose_by(completion.error)

        def begin_read() -> bool:
            source = self._handshake.address
            assert source is not None
            where = address if virtual else address - span.base
            self._retries_read = not (
                self._peer_gone or self._endpoint.read(source, where, key, into, at, length, on_done)
            )
            return not self._retries_read

        self._settle_until(begin_read, timeout)
        self._track(reading, 0, into)

    def introduce(self, listener: bytes, host: str, timeout: float) -> None:
        """Exchange endpoint names with the server, and join the endpoint that it opens for this client.

        Args:
            listener: the name of the listener's endpoint.
            host: the IP address of the server.
            timeout: the seconds to wait in total.

        Raises:
            DeadlineExceeded: if the server does not answer in time.
            TransportError: if the connection fails, or the server has another version of the exchange.
            RemoteError: if the server rejects the client.
            RemoteProtocolError: if the server violates the protocol.
        """
        handshake = self._handshake
        end = time.monotonic() + timeout  # not extended by other messages of the server
        with self._lock:
            handshake.address = self._endpoint.insert(listener)
            self._send_control(Kind.HELLO, handshake.hello)
            self._until(lambda: handshake.welcomed, end, timeout)
            if self._reason is not None:
                raise self._given_up(self._reason)
            if not handshake.welcomed:
                raise ConnectionClosed(f"connecting to {self.peer}: the peer closed the connection")
            handshake.take_name(host)
            joining = self._send_controls(JOINS, TAKES_RUNS if self.takes_runs else b"")
            self._until(lambda: all(sending.has_ended for sending in joining), end, timeout)
            self._check_open()

    def _until(self, is_done: Callable[[], bool], end: float, timeout: float) -> None:
        """Wait, while connecting, until `is_done` returns true or the peer is gone.

        Raises:
            DeadlineExceeded: if neither happens until the time `end`.
            RemoteProtocolError: if the peer violates the protocol.
        """
        self._drive(
            lambda: is_done() or self._peer_ended or self._failure is not None or time.monotonic() >= end, timeout
        )
        if self._failure is not None:
            raise self._failure
        if not (is_done() or self._peer_ended):
            raise DeadlineExceeded(
                f"connecting to {self.peer}: no answer for {timeout:g} s. libfabric uses further ports for data: set "
                "FI_TCP_PORT_LOW_RANGE and FI_TCP_PORT_HIGH_RANGE for the server, and open these ports of its host"
            )

    # Sending

    def _encode(self, message: Message) -> FabricMessage:
        return self._outbox.encode(message)

    def _start(self, message: FabricMessage) -> None:
        self._credit.send(message.size)
        sending = self._outbox.send_message(message, self._on_sent)
        if not sending.has_ended:
            self._track(sending, 0, None)

    def _send_control(self, kind: Kind, payload: bytes = b"") -> PendingSend:
        sending = PendingSend(CONTROL | kind, [self._ffi.from_buffer(payload[:CONTROL_SIZE])])
        return self._outbox.send(sending, self._on_sent)

    def _send_controls(self, kinds: Sequence[Kind], payload: bytes = b"") -> list[PendingSend]:
        return [self._send_control(kind, payload) for kind in kinds[: self._endpoint.lanes]]

    def _on_sent(self, sending: PendingSend, error: int | None) -> None:
        """Count a message as sent. If there was an error, record that the peer is gone."""
        if error is not None:
            self._lose_by(error)
            return
        self.written += sending.size
        self._happened |= sending.tag != CONTROL | Kind.CREDIT

    def _has_room(self, size: int) -> bool:
        return self._credit.has_room(size) and len(self._under_way) < _MAX_UNDER_WAY

    def _complete(self, request: PendingSend) -> bool | None:
        return request.has_ended or None

    def _taken_all(self) -> bool:
        return self._credit.all_consumed or len(self._byes) == self._endpoint.lanes

    def _send_abort(self, reason: str) -> bool:
        if self._handshake.address is None:
            return False  # the client has not joined, so its endpoint is not known yet
        self._send_control(Kind.ABORT, encode_reason(reason, CONTROL_SIZE))
        return True

    # Receiving

    def _consumed(self, size: int) -> None:
        if not self._accepted:
            self._credit.consume(size)
            self._report_if_due()

    def _report_if_due(self) -> None:
        if (
            self._credit.should_report
            and not self._closed
            and not self._peer_gone
            and self._handshake.address is not None
        ):
            self._report_consumed()

    def _report_consumed(self) -> None:
        self._send_control(Kind.CREDIT, self._credit.report())

    def _receive_untagged(self, memory: Any) -> None:
        def on_done(completion: Completion) -> None:
            if completion.error:
                self._lose_by(completion.error)
                return
            if completion.flags & c.RECV:
                self._arrive(Incoming(None, bytes(self._ffi.buffer(completion.pointer, completion.length))))
            if completion.last:
                self._receive_untagged(memory)

        self._endpoint.receive_untagged(memory, on_done)

    def _break_off(self, error: RemoteProtocolError) -> None:
        """Record a violation of the protocol by the peer, unless there was one before."""
        if self._failure is None:
            self._failure = error

    def _receive_control(self, memory: Any) -> None:
        """Receive control messages into `memory`, one after the other, while the endpoint is open."""
        self._endpoint.receive_tagged(memory, CONTROL, KIND_MASK, self._on_control(memory, again=True))

    def _on_control(self, memory: Any, again: bool) -> Done:
        """Return the callback for a control message in `memory`. If `again`, it also receives the next one."""

        def on_done(completion: Completion) -> None:
            if completion.error:
                self._lose_by(completion.error)
                return
            data = bytes(self._ffi.buffer(memory, completion.length))
            if again:
                self._receive_control(memory)
            self._control_arrived(completion.tag, data)

        return on_done

    def _control_arrived(self, tag: int, data: bytes) -> None:
        """Handle a control message of the peer."""
        self._liveness.heard = True
        kind = tag & KIND_MASK
        if kind == Kind.CREDIT and len(data) == CONSUMED.size:
            more = self._credit.receive_report(data)
            if more is None:
                self._failure = RemoteProtocolError(f"{self.peer} reported that it received more bytes than were sent")
            elif more:
                self._happened = True
            return
        self._happened = True
        # Each kind below is accepted once. Otherwise a peer could look alive by repeating it.
        if self._handshake.receive(kind, data):
            if (
                self._accepted and not self._credit.has_arrived
            ):  # after the first message, the server has read `takes_runs`
                self.takes_runs = self._handshake.takes_runs
            return
        if kind == Kind.ABORT and self._reason is None:
            self._give_up(decode_reason(data))
        elif kind in BYES and kind not in self._byes:
            self._byes.add(kind)
            if len(self._byes) == self._endpoint.lanes:
                if not self._closed and not self._peer_gone and self._handshake.address is not None:
                    self._send_controls(BYES)
                self._lose()
        else:
            self._failure = RemoteProtocolError(
                f"{self.peer} sent the invalid control message {data[:20]!r} of kind {kind}"
            )

    def _waiting(self) -> bool:
        return bool(self._receiving) or self._peek() is not None

    def _peek(self) -> PeekedMessage | None:
        """Return the next message of the protocol that has arrived and is not claimed, or None.

        Control messages before it are received here, because the receives posted for them would not get them.
        """
        for _ in range(_MAX_PEEKS):  # limited, because each peek lets more messages arrive
            message = self._endpoint.peek()
            if message is None or not is_control(message.tag):
                self._control_waiting = 0 if message is None else self._control_waiting
                return message
            self._control_waiting += 1
            if self._control_waiting > _MAX_CONTROL_WAITING:
                self._break_off(
                    RemoteProtocolError(f"{self.peer} sent {self._control_waiting} control messages in a row")
                )
            if message.length <= CONTROL_SIZE:
                memory = self._ffi.new(f"char[{CONTROL_SIZE}]")
                self._endpoint.claim(memory, self._on_control(memory, again=False))
            else:
                self._endpoint.discard()
                self._break_off(
                    RemoteProtocolError(
                        f"{self.peer} sent a control message of {message.length} bytes; the limit is {CONTROL_SIZE}"
                    )
                )
        return None

    def _take(self, allocate: Allocate, most: int) -> bool:
        only_small = self._only_small(allocate)
        for _ in range(_MAX_PEEKS):
            if self._receiving_bytes + self._arrived_bytes > most or self._failure is not None:
                break
            if (message := self._peek()) is None:
                if self._accepted:  # only a client that never stops sending delays this
                    self._credit.consume_all()
                    self._report_if_due()
                break
            if message.length > self._endpoint.eager_limit and (only_small or not self._connected()):
                return not only_small or bool(self._receiving)
            try:
                if message.tag != LARGE:
                    memory = self._allocate(message.tag, message.length, allocate)
                elif message.length <= self._max_untagged:
                    memory = bytearray(message.length)
                else:
                    raise RemoteProtocolError(
                        f"the peer sent an untagged message of {message.length} bytes; "
                        f"at most {self._max_untagged} are taken"
                    )
            except BaseException:
                self._endpoint.discard()
                raise
            self._claim(message.tag, memory)
        return bool(self._receiving)

    def _connected(self) -> bool:
        """Return whether a message can be fetched from the peer: libfabric crashes if the peer is gone.

        The only test is to send something, which libfabric accepts at once if there is a connection.
        """
        if self._peer_gone or self._outbox.first:
            return False
        self._send_control(Kind.CREDIT, self._credit.last_report())
        if self._outbox.first and not self._under_way:
            self._lose()
        return not self._outbox.first and not self._peer_gone

    def _claim(self, tag: int, memory: Buffer) -> None:
        size = len(memory)

        def on_done(completion: Completion) -> None:
            self._receiving -= 1
            self._receiving_bytes -= size
            if completion.error:
                self._failure = ConnectionClosed(f"{self.peer} closed the connection in the middle of a message")
                self._lose_by(completion.error)
            elif tag == LARGE:
                self._arrive(Incoming(None, bytes(memory)))
            else:
                self._arrive(Incoming(tag, memory))

        self._receiving += 1
        self._receiving_bytes += size
        view = self._ffi.from_buffer(memory, require_writable=True) if size else self._ffi.new("char[1]")
        self._endpoint.claim(view, on_done)

    def _arrive(self, incoming: Incoming) -> None:
        self._happened = self._liveness.heard = True
        super()._arrive(incoming)
        if not self._credit.arrive(len(incoming.data)) and self._failure is None:
            self._failure = RemoteProtocolError(f"{self.peer} sent more bytes than this side allowed")

    # The endpoint

    def _progress(self) -> bool:
        self._outbox.advance(self._on_sent)
        for _ in range(_MAX_ROUNDS):
            if not self._endpoint.progress():
                break
        if self._woken_at == self._endpoint.ended_count:
            self._liveness.heard = True  # part of a large message arrived, which delays the heartbeats behind it
        self._woken_at = None
        if self._asleep and self._endpoint.peeked is None and self._endpoint.peek() is not None:
            self._happened = True  # wakes the sleeping thread, since libfabric does not for a message that was peeked
        happened, self._happened = self._happened, False  # also set by callbacks, and by peeks of other methods
        return happened

    def _arm(self) -> bool:
        # Only a peek finds a message that has arrived. Libfabric wakes this side only for messages it has not read yet.
        message, endpoint = self._endpoint.peeked, self._endpoint
        if endpoint.peek() is not message or endpoint.ended_count != self._ended_before:
            self._ended_before = endpoint.ended_count
            self._lock.notify_all()
            return False
        return endpoint.arm()

    def _sleep(self, seconds: float) -> None:
        ended_count = self._endpoint.ended_count
        retries = self._retries_read or (self._outbox.first is not None and self._handshake.address is not None)
        woken = self._endpoint.sleep(self._waker, min(seconds, _RETRY_DELAY) if retries else seconds)
        self._woken_at = ended_count if woken and self._receiving else None

    def _send_heartbeat(self) -> None:
        """Send a heartbeat, and check that the peer has sent one.

        This also enforces the limit of bytes kept for a client that keeps sending while the server is not receiving,
        because libfabric receives some of them whenever it works.
        """
        if not self._lock.acquire(timeout=_LOCK_TIMEOUT):
            return  # the connection is in use, and the heartbeats of other connections must not be delayed
        try:
            if self._closed or self._is_over:
                return
            for _ in range(_MAX_PEEKS):  # messages that the peer sent before its heartbeat arrive first
                if self._has(lambda: self._liveness.heard):
                    break
                self._endpoint.progress()
            self._woken_at = None  # this thread, not libfabric, woke the sleeping thread
            self._advance()
            self._has(lambda: False)
            missed = self._liveness.miss()
            if missed or self._liveness.refuses(self._refused()):
                _log.info("peer lost, no heartbeat: peer=%s", self.peer)
                self._lose()
            elif self._handshake.address is not None and not self._outbox.first:
                self._report_consumed()
        except RemoteProtocolError as error:
            self._failure = error
        finally:
            if self._asleep and self._is_over:
                self._waker.set()
            self._woken_at = None
            self._lock.release()

    def _refused(self) -> PendingSend | None:
        """Return the message that libfabric does not accept although it is idle and accepted earlier ones, or None."""
        idle = not self._under_way and not self._receiving
        return self._outbox.first if idle and self._credit.is_used else None

    def _lose_by(self, error: int) -> None:
        """Record that the peer is gone, because an operation failed with `error`."""
        if not self._peer_gone:
            _log.debug("connection failed: connection=%r error=%s", self, self._endpoint.ofi.explain(error))
            self._lose()

    def _lose(self) -> None:
        self._happened = True
        self._outbox.clear()
        super()._lose()

    def _release(self, state: ConnectionState) -> None:
        heartbeat_of(os.getpid()).remove(self._send_heartbeat)
        super()._release(state)

    def _release_medium(self) -> None:
        try:
            if self._handshake.address is not None and not self._peer_gone and self._failure is None:
                self._say_goodbye()
        finally:
            self._outbox.clear()
            self._endpoint.close()

    def _say_goodbye(self) -> None:
        """Send BYE and wait for the answer. Closing with unread data could discard the messages sent last."""
        self._send_controls(BYES)
        end = time.monotonic() + _LAST_TIMEOUT
        with suppress(TransportError):
            while not self._peer_gone and time.monotonic() < end:
                if self._peek() is not None:
                    self._endpoint.discard()
                elif not self._progress() and self._endpoint.arm():
                    self._endpoint.sleep(self._waker, _RETRY_DELAY)
