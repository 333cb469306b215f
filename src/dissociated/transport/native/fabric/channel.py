"""Channels of libfabric. Tags do not name the sender, so each channel has one or two endpoints of its own."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from dissociated.base.buffers import Buffer
from dissociated.errors import ConnectionClosed, RemoteProtocolError, TransportError
from dissociated.memory.remote import Span
from dissociated.protocol.close_reason import decode_reason, encode_reason, reason_error
from dissociated.protocol.message import Incoming, Message
from dissociated.transport.base import Allocate
from dissociated.transport.native.channel import Channel, Traffic, WaitFor
from dissociated.transport.native.fabric import libfabric as c
from dissociated.transport.native.fabric.endpoint import MAX_SMALL_UNTAGGED, ConnectionEndpoint, PeekedMessage
from dissociated.transport.native.fabric.libfabric import QUEUE
from dissociated.transport.native.fabric.memory import RMA_KEY, Completion, Done
from dissociated.transport.native.fabric.messages import (
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
    FabricMessage,
    Handshake,
    Kind,
    Liveness,
    Outbox,
    PendingSend,
    is_control,
)

_log = logging.getLogger(__name__)

_MAX_UNDER_WAY = QUEUE // 2  # messages in flight; leaves room in the queue for heartbeats
_RETRY_DELAY = 0.002  # seconds between two attempts while libfabric accepts no operation
_LAST_TIMEOUT = 0.25  # seconds for the BYE messages of both sides
_MAX_PEEKS = 256  # messages that are received before another thread gets its turn
_MAX_CONTROL_WAITING = 128  # control messages that may wait in a row; libfabric would keep many more
_MAX_ROUNDS = 16  # reads of the completion queue in one step of progress


class ListenerAddress(NamedTuple):
    """The address to which a client sends its first message."""

    name: bytes  #: of the listener's endpoint
    host: str  #: the IP address


class FabricChannel(Channel):
    """An end of a connection over libfabric. Owns its endpoint, unless the constructor raises.

    Args:
        endpoint: The endpoint of this end.
        peer: The name of the peer, for messages.
        heartbeat: The seconds between two heartbeats.
        takes_runs: On the client's side, whether the client takes runs.
        listener: On the client's side, the address of the server's listener.
        client: On the server's side, the name of the endpoint of the client that will join.
    """

    ports_advice = (
        "libfabric uses further ports for data: set FI_TCP_PORT_LOW_RANGE and FI_TCP_PORT_HIGH_RANGE for the server, "
        "and open these ports of its host"
    )

    def __init__(
        self,
        endpoint: ConnectionEndpoint,
        peer: str,
        heartbeat: float,
        takes_runs: bool = False,
        listener: ListenerAddress | None = None,
        client: bytes | None = None,
    ) -> None:
        super().__init__(Traffic(peer, client is not None, takes_runs))
        self.heartbeat = heartbeat
        self._endpoint = endpoint
        self.ffi = endpoint.ofi.ffi
        self._listener = listener
        self._handshake = Handshake(endpoint, peer, client)
        self._outbox = Outbox(endpoint, self._handshake)
        self._retries_read = False  # whether a read must be tried again
        self._receiving = self._receiving_bytes = 0  # messages that are being received, and their bytes
        self._happened = False  # whether anything other than heartbeats happened
        self._ended_before = 0  # the number of ended operations when a thread last tried to sleep
        self._credit = Credit(self.traffic.accepted)
        self._control_waiting = 0  # control messages in a row for which no receive was posted
        self._byes: set[int] = set()  # the kinds of BYE messages that the peer has sent
        self._liveness = Liveness()
        #: The number of ended operations when libfabric woke this side while a message was being received, or None.
        self._woken_at: int | None = None
        self._is_closing = False

    def open(self) -> None:
        for _ in range(CONTROL_BUFFERS):
            self._receive_control(self.ffi.new(f"char[{CONTROL_SIZE}]"))
        for _ in range(2):
            size = MAX_SMALL_UNTAGGED * (2 if self.traffic.accepted else 16)
            self._receive_untagged(self.ffi.new(f"char[{size}]"))

    def connect(self, wait_for: WaitFor) -> None:
        """Exchange endpoint names with the server, and join the endpoint that it opens for this client.

        Args:
            wait_for: Waits. It raises DeadlineExceeded if the server does not answer in time.

        Raises:
            TransportError: The connection fails, or the server has another version of the exchange.
            RemoteError: The server rejects the client.
            RemoteProtocolError: The server violates the protocol.
        """
        traffic, handshake, listener = self.traffic, self._handshake, self._listener
        assert listener is not None
        handshake.address = self._endpoint.insert(listener.name)
        self._send_control(Kind.HELLO, handshake.hello)
        wait_for(lambda: handshake.welcome is not None or traffic.reason is not None)
        if traffic.reason is not None:
            raise reason_error(traffic.reason, traffic.peer)
        if handshake.welcome is None:
            raise ConnectionClosed(f"connecting to {traffic.peer}: the peer closed the connection")
        handshake.take_name(listener.host)
        joining = self._send_controls(JOINS, TAKES_RUNS if traffic.takes_runs else b"")
        wait_for(lambda: all(sending.has_ended for sending in joining) or traffic.reason is not None)
        traffic.check()

    # Sending

    @property
    def encoding(self) -> Hashable:
        return FabricMessage, self._endpoint.max_message, self._endpoint.max_untagged

    def encode(self, message: Message) -> FabricMessage:
        return self._outbox.encode(message)

    def has_room(self, size: int) -> bool:
        return self._credit.has_room(size) and len(self.traffic.under_way) < _MAX_UNDER_WAY

    def send(self, message: FabricMessage) -> None:
        self._credit.send(message.size)
        sending = self._outbox.send_message(message, self._on_sent)
        if not sending.has_ended:
            self.traffic.track(sending, 0, None)

    def complete(self, request: PendingSend) -> bool | None:
        return request.has_ended or None

    def peer_has_all(self, all_sent: bool) -> bool:
        return self._credit.all_consumed or len(self._byes) == self._endpoint.lanes

    def send_abort(self, reason: str) -> bool:
        if self._handshake.address is None:
            return False  # the client has not joined, so its endpoint is not known yet
        self._send_control(Kind.ABORT, encode_reason(reason, CONTROL_SIZE))
        return True

    def _send_control(self, kind: Kind, payload: bytes = b"") -> PendingSend:
        sending = PendingSend(CONTROL | kind, [self.ffi.from_buffer(payload[:CONTROL_SIZE])])
        return self._outbox.send(sending, self._on_sent)

    def _send_controls(self, kinds: Sequence[Kind], payload: bytes = b"") -> list[PendingSend]:
        return [self._send_control(kind, payload) for kind in kinds[: self._endpoint.lanes]]

    def _on_sent(self, sending: PendingSend, error: int | None) -> None:
        """Count a message as sent. If there was an error, record that the peer is gone."""
        if error is not None:
            self._lose_by(error)
            return
        self.traffic.written += sending.size
        self._happened |= sending.tag != CONTROL | Kind.CREDIT

    # Memory

    def read(self, span: Span, address: int, length: int, into: Any, at: int) -> bool:
        self._retries_read = False
        if self.traffic.peer_gone:
            return True  # the caller raises ConnectionClosed
        virtual, key = RMA_KEY.unpack(span.key)
        reading = PendingSend(None, ())

        def on_done(completion: Completion) -> None:
            reading.has_ended = self._happened = self._liveness.heard = True
            if completion.error:
                self._lose_by(completion.error)

        source = self._handshake.address
        assert source is not None
        where = address if virtual else address - span.base
        if self._endpoint.read(source, where, key, into, at, length, on_done):
            self.traffic.track(reading, 0, into)
        else:
            self._retries_read = True
        return not self._retries_read

    # Receiving

    def consume(self, size: int) -> None:
        if not self.traffic.accepted:
            self._credit.consume(size)
            self._report_if_due()

    @property
    def _can_tell(self) -> bool:
        """Whether a control message can be sent to the peer."""
        return not self._is_closing and not self.traffic.peer_gone and self._handshake.address is not None

    def _report_if_due(self) -> None:
        if self._credit.should_report and self._can_tell:
            self._report_consumed()

    def _report_consumed(self) -> None:
        self._send_control(Kind.CREDIT, self._credit.report())

    def _receive_untagged(self, memory: Any) -> None:
        def on_done(completion: Completion) -> None:
            if completion.error:
                self._lose_by(completion.error)
                return
            if completion.flags & c.RECV:
                self._arrive(Incoming(None, bytes(self.ffi.buffer(completion.pointer, completion.length))))
            if completion.last:
                self._receive_untagged(memory)

        self._endpoint.receive_untagged(memory, on_done)

    def _receive_control(self, memory: Any) -> None:
        """Receive control messages into `memory`, one after the other, while the endpoint is open."""
        self._endpoint.receive_tagged(memory, CONTROL, KIND_MASK, self._on_control(memory, again=True))

    def _on_control(self, memory: Any, again: bool) -> Done:
        """Return the callback for a control message in `memory`. If `again`, it also receives the next one."""

        def on_done(completion: Completion) -> None:
            if completion.error:
                self._lose_by(completion.error)
                return
            data = bytes(self.ffi.buffer(memory, completion.length))
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
                self._break_off("reported that it received more bytes than were sent")
            elif more:
                self._happened = True
            return
        self._happened = True
        # Each kind below is accepted once. Otherwise a peer could look alive by repeating it.
        if self._handshake.receive(kind, data):
            if self.traffic.accepted:
                self.traffic.connected = self._handshake.address is not None
                if not self._credit.has_arrived:  # after the first message, the server has read `takes_runs`
                    self.traffic.takes_runs = self._handshake.takes_runs
            return
        if kind == Kind.ABORT and self.traffic.reason is None:
            self.traffic.give_up(decode_reason(data))
        elif kind in BYES and kind not in self._byes:
            self._byes.add(kind)
            if len(self._byes) == self._endpoint.lanes:
                if self._can_tell:
                    self._send_controls(BYES)
                self._lose()
        else:
            self._break_off(f"sent the invalid control message {data[:20]!r} of kind {kind}")

    def _break_off(self, violation: str) -> None:
        """Record a violation of the protocol by the peer, unless there was one before."""
        self.traffic.fail(RemoteProtocolError(f"{self.traffic.peer} {violation}"))

    def holds_message(self) -> bool:
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
                self._break_off(f"sent {self._control_waiting} control messages in a row")
            if message.length <= CONTROL_SIZE:
                memory = self.ffi.new(f"char[{CONTROL_SIZE}]")
                self._endpoint.claim(memory, self._on_control(memory, again=False))
            else:
                self._endpoint.discard()
                self._break_off(f"sent a control message of {message.length} bytes; the limit is {CONTROL_SIZE}")
        return None

    def receive(self, allocate: Allocate, most: int) -> bool:
        traffic = self.traffic
        only_small = traffic.takes_only_small(allocate)
        for _ in range(_MAX_PEEKS):
            if self._receiving_bytes + traffic.arrived_bytes > most or traffic.failure is not None:
                break
            if (message := self._peek()) is None:
                if traffic.accepted:  # only a client that never stops sending delays this
                    self._credit.consume_all()
                    self._report_if_due()
                break
            if message.length > self._endpoint.eager_limit and (only_small or not self._can_fetch()):
                return not only_small or bool(self._receiving)
            try:
                if message.tag != LARGE:
                    memory = traffic.allocate(message.tag, message.length, allocate)
                elif message.length <= traffic.max_untagged:
                    memory = bytearray(message.length)
                else:
                    raise RemoteProtocolError(
                        f"the peer sent an untagged message of {message.length} bytes; "
                        f"at most {traffic.max_untagged} are accepted"
                    )
            except BaseException:
                self._endpoint.discard()
                raise
            self._claim(message.tag, memory)
        return bool(self._receiving)

    def _can_fetch(self) -> bool:
        """Return whether a message can be fetched from the peer: libfabric crashes if the peer is gone.

        The only test is to send something, which libfabric accepts at once if there is a connection.
        """
        if self.traffic.peer_gone or self._outbox.first:
            return False
        self._send_control(Kind.CREDIT, self._credit.last_report())
        if self._outbox.first and not self._is_sending:
            self._lose()
        return not self._outbox.first and not self.traffic.peer_gone

    def _claim(self, tag: int, memory: Buffer) -> None:
        size = len(memory)

        def on_done(completion: Completion) -> None:
            self._receiving -= 1
            self._receiving_bytes -= size
            if completion.error:
                peer = self.traffic.peer
                self.traffic.fail(ConnectionClosed(f"{peer} closed the connection in the middle of a message"))
                self._lose_by(completion.error)
            elif tag == LARGE:
                self._arrive(Incoming(None, bytes(memory)))
            else:
                self._arrive(Incoming(tag, memory))

        self._receiving += 1
        self._receiving_bytes += size
        view = self.ffi.from_buffer(memory, require_writable=True) if size else self.ffi.new("char[1]")
        self._endpoint.claim(view, on_done)

    def _arrive(self, incoming: Incoming) -> None:
        self._happened = self._liveness.heard = True
        self.traffic.arrive(incoming)
        if not self._credit.arrive(len(incoming.data)):
            self._break_off("sent more bytes than this side allowed")

    # The endpoint

    def progress(self) -> bool:
        self._outbox.advance(self._on_sent)
        for _ in range(_MAX_ROUNDS):
            if not self._endpoint.progress():
                break
        if self._woken_at == self._endpoint.ended_count:
            self._liveness.heard = True  # part of a large message arrived, which delays the heartbeats behind it
        self._woken_at = None
        if self.traffic.monitor.asleep and self._endpoint.peeked is None and self._endpoint.peek() is not None:
            self._happened = True  # wakes the sleeping thread, since libfabric does not for a message that was peeked
        happened, self._happened = self._happened, False  # also set by callbacks, and by peeks of other methods
        return happened

    def arm(self) -> bool:
        # Only a peek finds a message that has arrived. Libfabric wakes this side only for messages it has not read yet.
        message, endpoint = self._endpoint.peeked, self._endpoint
        if endpoint.peek() is not message or endpoint.ended_count != self._ended_before:
            self._ended_before = endpoint.ended_count
            return False
        return endpoint.arm()

    def sleep(self, seconds: float) -> None:
        ended_count = self._endpoint.ended_count
        retries = self._retries_read or (self._outbox.first is not None and self._handshake.address is not None)
        woken = self._wait(min(seconds, _RETRY_DELAY) if retries else seconds)
        self._woken_at = ended_count if woken and self._receiving else None

    def _wait(self, seconds: float) -> bool:
        """Sleep until libfabric has work to do or the waker is set. Return whether libfabric has work to do."""
        return self.traffic.monitor.waker.sleep(self._endpoint.wakes, seconds)

    def beat(self, keep_arrived: Callable[[], None]) -> None:
        """Send a heartbeat, and check that the peer has sent one.

        This also enforces the limit of bytes kept for a client that keeps sending while the server is not receiving,
        because libfabric receives some of them whenever it works.
        """
        try:
            for _ in range(_MAX_PEEKS):  # messages that the peer sent before its heartbeat arrive first
                if self._liveness.heard:
                    break
                keep_arrived()
                self._endpoint.progress()
            self._woken_at = None  # this thread, not libfabric, woke the sleeping thread
            if self.progress():
                self.traffic.monitor.wake()
            keep_arrived()
            missed = self._liveness.miss()
            if missed or self._liveness.refuses(self._refused()):
                _log.info("peer lost, no heartbeat: peer=%s", self.traffic.peer)
                self._lose()
            elif self._handshake.address is not None and not self._outbox.first:
                self._report_consumed()
        finally:
            self._woken_at = None

    @property
    def _is_sending(self) -> bool:
        """Return whether libfabric has accepted a message that it has not sent yet."""
        return not all(sending.request.has_ended for sending in self.traffic.under_way)

    def _refused(self) -> PendingSend | None:
        """Return the message that libfabric does not accept although it is idle and accepted earlier ones, or None."""
        idle = not self._receiving and not self._is_sending
        return self._outbox.first if idle and self._credit.is_used else None

    def _lose_by(self, error: int) -> None:
        """Record that the peer is gone, because an operation failed with `error`."""
        if not self.traffic.peer_gone:
            explanation = self._endpoint.ofi.explain(error)
            _log.debug("connection failed: peer=%s error=%s", self.traffic.peer, explanation)
            self._lose()

    def _lose(self) -> None:
        self._happened = True
        self._outbox.clear()
        self.traffic.lose()

    # Closing

    def close(self) -> None:
        self._is_closing = True
        try:
            if self._handshake.address is not None and not self.traffic.peer_gone and self.traffic.failure is None:
                self._say_goodbye()
        finally:
            self._outbox.clear()
            self._endpoint.close()

    def _say_goodbye(self) -> None:
        """Send BYE and wait for the answer. Closing with unread data could discard the messages sent last."""
        self._send_controls(BYES)
        end = time.monotonic() + _LAST_TIMEOUT
        with suppress(TransportError):
            while not self.traffic.peer_gone and time.monotonic() < end:
                if self._peek() is not None:
                    self._endpoint.discard()
                elif not self.progress() and self._endpoint.arm():
                    self._wait(_RETRY_DELAY)
