"""Channels of UCX. UCX tags do not name the sender, so each channel has a worker of its own."""

from __future__ import annotations

import os
import time
from array import array
from collections import deque
from collections.abc import Hashable
from typing import Any, NamedTuple

import pyarrow as pa

from dissociated.base.buffers import Buffer
from dissociated.errors import (
    ConnectionClosed,
    DissociatedError,
    RemoteProtocolError,
    TransportError,
)
from dissociated.memory.device.base import Device, DeviceBuffer
from dissociated.memory.remote import Span
from dissociated.protocol.close_reason import encode_reason
from dissociated.protocol.message import Incoming, Message
from dissociated.transport.base import OVERHEAD, Allocate
from dissociated.transport.native.channel import MAX_IN_FLIGHT, Channel, Traffic, WaitFor
from dissociated.transport.native.library import view_of
from dissociated.transport.native.ucx import libucp as c
from dissociated.transport.native.ucx.closing import ClosingConnection, closing_connections
from dissociated.transport.native.ucx.endpoint import ABORT, METADATA, UcxEndpoint, params
from dissociated.transport.native.ucx.libucp import Ucp
from dissociated.transport.native.ucx.worker import Worker

_MAX_REASON = 1 << 12  # bytes of the reason of an abort
#: Size in bytes up to which a message is received while this side is not receiving. Larger messages wait, because UCX
#: does not tell which of them it would have to fetch. It sends about 300 kB unasked over tcp, and 5 kB over shared
#: memory.
_SMALL = 1 << 13
#: Size in bytes up to which a body is always copied into one piece, because UCX writes only single pieces directly into
#: the receiver's memory. Above it, the copy of the server takes as long as the copy of the receiver.
_GATHER = 1 << 22
_DEVICE_MEMORY = "DISSOCIATED_UCX_DEVICE_MEMORY"
_ENDPOINT_CLOSE_TIMEOUT = 0.1  # seconds for an endpoint to close
_COPY_LIMIT = 1 << 12  # size in bytes of a message up to which its parts are joined


class _ProbedMessage(NamedTuple):
    """A message that UCX holds and that this side must receive. `tag` is None for metadata."""

    handle: Any
    tag: int | None
    length: int


class _Receiving(NamedTuple):
    """A message that is being received into `data`. `tag` is None for metadata.

    `request` is NULL if the message is complete and only waits for the messages before it.
    """

    request: Any
    tag: int | None
    data: Buffer


class UcxMessage(NamedTuple):
    """An encoded message: `length` bytes at `pointer`, or `length` pieces if `pieces`. `owner` owns that memory."""

    tag: int | None
    size: int
    pointer: Any
    length: int
    pieces: bool
    owner: Any


def encode(u: Ucp, message: Message) -> UcxMessage:
    """Encode `message` for UCX: in its parts, unless it is small enough to join them."""
    parts: list[Buffer] = [part for part in message.parts if len(part)]
    size = sum(map(len, parts))
    if len(parts) > 1 and size > _COPY_LIMIT:
        pieces = array("Q")
        views = []
        for part in parts:
            view = view_of(u.ffi, part)
            views.append(view)
            pieces.extend((u.address(view), len(view)))
        return UcxMessage(message.tag, size, u.ffi.from_buffer(pieces), len(parts), True, views)
    data = parts[0] if len(parts) == 1 else b"".join(parts)
    return UcxMessage(message.tag, size, view_of(u.ffi, data), size, False, None)


def gather(u: Ucp, message: UcxMessage) -> UcxMessage:
    """Copy `message` into one piece. UCX writes single pieces, and no others, directly into the receiver's memory."""
    pointer, at = u.ffi.from_buffer(pa.allocate_buffer(message.size)), 0
    for piece in message.owner:
        u.ffi.memmove(pointer + at, piece, len(piece))
        at += len(piece)
    return UcxMessage(message.tag, message.size, pointer, message.size, False, None)


class UcxChannel(Channel):
    """A channel with one endpoint and a worker of its own."""

    ports_advice = (
        "UCX uses further ports for data: set UCX_TCP_PORT_RANGE for the server and for its clients, and open these "
        "ports of their hosts"
    )

    def __init__(
        self,
        worker: Worker,
        description: Any,
        peer: str,
        err_mode_none: bool,
        accepted: bool,
        takes_runs: bool,
        knows_abort: bool = False,
    ) -> None:
        """Take ownership of `worker`, which is destroyed if this raises.

        Args:
            worker: The worker of the channel.
            description: The UCX parameters of the endpoint.
            peer: The name of the peer, for messages.
            err_mode_none: Whether UCX's error mode is "none", in which the two processes share memory.
            accepted: Whether this is the server's side.
            takes_runs: Whether the client takes runs.
            knows_abort: Whether the peer understands the active message with the reason of an abort.

        Raises:
            TransportError: No descriptor can be opened.
        """
        try:
            super().__init__(Traffic(peer, accepted, takes_runs))
        except BaseException:
            worker.destroy()
            raise
        self._worker = worker
        self._description = description
        self._ucp = u = worker.ucp
        self.ffi, self._lib = u.ffi, u.lib
        self._knows_abort = knows_abort
        self._plain, self._pieces, _, self._am, self._am_pieces = params()
        self._receiving: deque[_Receiving] = deque()
        self._receiving_bytes = 0
        self._incomplete: list[Buffer] = []  # memory of failed receives, which UCX may still write to
        self._onto: Any = None  # the request parameters for receiving into device memory
        #: Messages that were probed and not fetched. In UCX they would hide later messages.
        self._deferred_messages: deque[_ProbedMessage] = deque()
        self._info = u.ffi.new("ucp_tag_recv_info_t *")
        self._status = c.OK
        self._is_closing = False
        self._endpoint = UcxEndpoint(worker, err_mode_none)

    def open(self) -> None:
        self._endpoint.open(self._description, self, self.traffic.peer)
        self.traffic.connected = self.traffic.accepted

    def connect(self, wait_for: WaitFor) -> None:
        traffic = self.traffic
        request = self._lib.ucp_ep_flush_nbx(self._endpoint.handle, self._plain)
        if request and self._ucp.status(request) == c.INPROGRESS:
            traffic.track(request, 0, None)
        wait_for(lambda: not traffic.under_way)
        if traffic.peer_gone:
            mode = "none" if self._endpoint.err_mode_none else "peer"
            raise TransportError(
                f"connecting to {traffic.peer} failed: {self._ucp.explain(self._status)}: check that the server "
                f"runs, has UCX {self._ucp.version} as well, and takes err_mode={mode}, and that its ports for "
                "data are open on both hosts (UCX_TCP_PORT_RANGE)"
            )

    # Sending

    @property
    def encoding(self) -> Hashable:
        return UcxMessage

    def encode(self, message: Message) -> UcxMessage:
        return encode(self._ucp, message)

    def has_room(self, size: int) -> bool:
        return not self.traffic.under_way or self.traffic.in_flight + size <= MAX_IN_FLIGHT

    def send(self, message: UcxMessage) -> None:
        if message.pieces and (self._endpoint.err_mode_none or message.size <= _GATHER):
            message = gather(self._ucp, message)
        tag, size, pointer, length, pieces, _ = message
        if tag is None:
            request = self._endpoint.send_active(METADATA, pointer, length, self._am_pieces if pieces else self._am)
        else:
            param = self._pieces if pieces else self._plain
            request = self._lib.ucp_tag_send_nbx(self._endpoint.handle, pointer, length, tag, param)
        self._track_send(request, size, message)

    def _track_send(self, request: Any, size: int, owner: Any) -> None:
        if request:
            status = self._ucp.status(request)
            if status < 0:
                self.lose_by(status)
                self.traffic.check()
            self.traffic.track(request, size, owner)
        else:
            self.traffic.written += size

    def complete(self, request: Any) -> bool | None:
        status = self._lib.ucp_request_check_status(request)
        if status == c.INPROGRESS:
            return None
        self._lib.ucp_request_free(request)
        if status < 0:
            self.lose_by(status)
        return bool(status == c.OK)

    def send_abort(self, reason: str) -> bool:
        if not self._knows_abort:
            return False
        data = encode_reason(reason, _MAX_REASON)
        pointer = self.ffi.from_buffer(data)
        try:
            self._track_send(self._endpoint.send_active(ABORT, pointer, len(data), self._am), len(data), pointer)
        except DissociatedError:
            return False
        return True

    # Receiving

    def receive_onto(self, device: Device) -> bool:
        number = self._worker.context.memory_types.get(device.type)
        # In error mode none, UCX copies on one host in pieces of 8 KB and waits for each. In every mode, UCX ends the
        # process if one of its copies to a device fails, for example after a lost context, so users have to opt in.
        if number is None or self._endpoint.err_mode_none or os.environ.get(_DEVICE_MEMORY) != "y":
            return False
        self._onto = self.ffi.new("ucp_request_param_t *")
        self._onto.op_attr_mask, self._onto.memory_type = c.OP_MEMORY_TYPE, number
        return True

    def receive_metadata(self, data: Any, length: int, attributes: int) -> int:
        """Handle metadata that has arrived as a whole, or was announced. UCX calls this.

        Returns:
            OK, or INPROGRESS if the data is still to be fetched.
        """
        traffic = self.traffic
        if self._is_closing:
            return c.OK
        if length > traffic.max_untagged:
            traffic.fail(
                RemoteProtocolError(
                    f"the peer sent an untagged message of {length} bytes; at most {traffic.max_untagged} are accepted"
                )
            )
            return c.OK
        if attributes & c.AM_RECV_RNDV:
            self._defer(_ProbedMessage(data, None, length))
            return c.INPROGRESS
        # Whether UCX lets us keep the memory after this call depends on how it arrived. Copying is right in both cases.
        traffic.arrive(Incoming(None, bytes(self.ffi.buffer(data, length))))
        return c.OK

    def holds_message(self) -> bool:
        return bool(self._deferred_messages or self._receiving) or bool(
            self._lib.ucp_tag_probe_nb(self._worker.handle, 0, 0, 0, self._info)
        )

    def receive(self, allocate: Allocate, most: int) -> bool:
        traffic = self.traffic
        only_small = traffic.takes_only_small(allocate)
        while traffic.arrived_bytes <= most:
            message = self._find(not only_small and self._receiving_bytes + traffic.arrived_bytes <= most)
            if message is None:
                break
            self._claim(message, allocate)
        return self._pass_on()

    def _find(self, fetching: bool) -> _ProbedMessage | None:
        """Return the next message that UCX holds, or None. Unless `fetching`, large messages are put off."""
        if fetching and self._deferred_messages:
            message = self._deferred_messages.popleft()
            self.traffic.deferred_bytes -= OVERHEAD + message.length
            return message
        while handle := self._lib.ucp_tag_probe_nb(self._worker.handle, 0, 0, 1, self._info):
            message = _ProbedMessage(handle, self._info.sender_tag, self._info.length)
            if fetching or message.length <= _SMALL:
                return message
            self._defer(message)
        return None

    def _defer(self, message: _ProbedMessage) -> None:
        self._deferred_messages.append(message)
        self.traffic.deferred_bytes += OVERHEAD + message.length

    def _claim(self, message: _ProbedMessage, allocate: Allocate) -> None:
        u, worker = self._ucp, self._worker.handle
        handle, tag, length = message
        if tag is None:
            memory: Buffer = bytearray(length)
            view = u.ffi.from_buffer(memory)
            request = self._lib.ucp_am_recv_data_nbx(worker, handle, view, length, self._plain)
        else:
            try:
                memory = self.traffic.allocate(tag, length, allocate)
            except BaseException:
                # UCX has handed the message to this side, which must receive it, even into no memory.
                refused = self._lib.ucp_tag_msg_recv_nbx(worker, u.ffi.NULL, 0, handle, self._plain)
                if u.status(refused) == c.INPROGRESS:
                    self.traffic.track(refused, 0, None)
                raise
            param = self._plain
            if isinstance(memory, DeviceBuffer):
                view, param = u.ffi.cast("void *", memory.address), self._onto
            else:
                view = u.ffi.from_buffer(memory, require_writable=True) if length else u.ffi.NULL
            request = self._lib.ucp_tag_msg_recv_nbx(worker, view, length, handle, param)
        self._receive_into(request, tag, memory)

    def _pass_on(self) -> bool:
        """Pass on the messages that are complete. Return whether some are still being received."""
        while self._receiving:
            request, tag, memory = self._receiving[0]
            status = self._lib.ucp_request_check_status(request) if request else c.OK
            if status == c.INPROGRESS:
                return True
            if request:
                self._lib.ucp_request_free(request)
            self._receiving.popleft()
            self._receiving_bytes -= len(memory)
            # If the peer has closed meanwhile, its memory may have been reused before it was read.
            is_reset = self._endpoint.err_mode_none and self.traffic.peer_gone
            self._received(c.CONNECTION_RESET if is_reset else status, tag, memory)
        return False

    def _receive_into(self, request: Any, tag: int | None, memory: Buffer) -> None:
        status = self._ucp.status(request)
        # A run that is complete at once waits for the messages before it, so that the order is kept.
        if status == c.INPROGRESS or (status == c.OK and self._receiving and self.traffic.is_run(tag)):
            self._receiving.append(_Receiving(request, tag, memory))
            self._receiving_bytes += len(memory)
        else:
            self._received(status, tag, memory)

    def _received(self, status: int, tag: int | None, memory: Buffer) -> None:
        if status == c.OK:
            self.traffic.arrive(Incoming(tag, bytes(memory) if tag is None else memory))
        else:
            self._incomplete.append(memory)
            peer = self.traffic.peer
            self.traffic.fail(ConnectionClosed(f"{peer}: the peer closed the connection in the middle of a message"))
            self.lose_by(status)

    # One-sided reads

    def read(self, span: Span, address: int, length: int, into: Any, at: int) -> bool:
        key = self._endpoint.key(span, self.traffic.peer)
        request = self._lib.ucp_get_nbx(self._endpoint.handle, into + at, length, address, key, self._plain)
        self._track_send(request, length, into)
        return True

    # The worker

    def progress(self) -> bool:
        return self._worker.progress()

    def arm(self) -> bool:
        return self._worker.arm()

    def sleep(self, seconds: float) -> None:
        self.traffic.monitor.waker.sleep((self._worker.descriptor,), seconds)

    def lose_by(self, status: int) -> None:
        """Record that the endpoint has failed with `status`. Also called by UCX."""
        if not self.traffic.peer_gone:
            self._status = status
            self.traffic.lose()

    def callback_failed(self, error: BaseException) -> None:
        """Record an exception in a callback from UCX, whose message is lost."""
        self._worker.failure = error
        self.traffic.fail(ConnectionClosed(f"this side lost what {self.traffic.peer} sent: {type(error).__name__}"))

    # Closing

    def close(self) -> None:
        self._is_closing = True
        endpoint = self._endpoint
        if endpoint.handle is None or not self.traffic.connected:
            endpoint.destroy()  # at once, because UCX 1.22 would continue to connect or to disconnect, and crash
            return
        try:
            if not endpoint.err_mode_none:
                self._let_arrive()
        finally:  # memory that UCX or the peer still reads needs an owner, even after an exception in a callback
            self._close_endpoint()

    def _close_endpoint(self) -> None:
        """Close the endpoint, wait for a moment until that is complete, and give its memory back."""
        endpoint, is_closed = self._endpoint, False
        end = time.monotonic() + _ENDPOINT_CLOSE_TIMEOUT
        try:
            if not (self.traffic.peer_gone and endpoint.err_mode_none):
                endpoint.begin_close(sending.request for sending in self.traffic.under_way)
            while not (is_closed := endpoint.advance_closing() and not self._devices()) and time.monotonic() < end:
                self.sleep(_ENDPOINT_CLOSE_TIMEOUT / 20)
        finally:
            self._give_back(is_closed)

    def _give_back(self, is_closed: bool) -> None:
        """Destroy the endpoint, or pass it to the thread that does so once its memory is not in use any more.

        Args:
            is_closed: Whether the close is known to be complete.
        """
        endpoint, traffic, devices = self._endpoint, self.traffic, self._devices()
        if is_closed or not (endpoint.is_busy or self._is_shared() or devices):
            endpoint.destroy()
        else:
            memory = [*traffic.under_way, *traffic.retained, *self._receiving, *self._incomplete]
            closing_connections().add(ClosingConnection(traffic.peer, endpoint, memory, devices))
        self._receiving.clear()
        self._incomplete.clear()

    def _let_arrive(self) -> None:
        """Wait for a moment until messages that are being received are complete.

        They cannot be waited for after the close: UCX drops fragmented messages without notice, and
        `UcxEndpoint.begin_close` would have to wait for a rendezvous.
        """
        check, end = self._lib.ucp_request_check_status, time.monotonic() + _ENDPOINT_CLOSE_TIMEOUT
        requests = [receiving.request for receiving in self._receiving if receiving.request]
        while (
            not self.traffic.peer_gone
            and any(check(request) == c.INPROGRESS for request in requests)
            and time.monotonic() < end
        ):
            if not self._worker.progress() and self._worker.arm():
                self.sleep(_ENDPOINT_CLOSE_TIMEOUT / 20)

    def _devices(self) -> set[Device]:
        """Return the devices to which UCX may still be copying."""
        check = self._lib.ucp_request_check_status
        receives = [receive for receive in self._receiving if isinstance(receive.data, DeviceBuffer)]
        return {receive.data.device for receive in receives if check(receive.request) == c.INPROGRESS}

    def _is_shared(self) -> bool:
        """Return whether the peer may still read memory of this process, or this process memory of the peer."""
        traffic = self.traffic
        own = bool(self._receiving or traffic.retained) or any(message.size for message in traffic.under_way)
        return self._endpoint.err_mode_none and (traffic.peer_gone or own)
