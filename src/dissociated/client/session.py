"""A request to a server: its connections, the messages that arrive, and the leases."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from typing import TypeAlias

from dissociated.base.buffers import Buffer
from dissociated.base.exit import hold_at_exit, section, stop_at_exit
from dissociated.base.fork import ProcessBound
from dissociated.client.arrivals import receiving
from dissociated.client.bodies import Bodies
from dissociated.client.device import is_movable
from dissociated.client.leases import ClientLeases
from dissociated.client.request import ReadRequest
from dissociated.errors import ConnectionClosed, DeviceError, DissociatedError, RemoteProtocolError, TransportError
from dissociated.format.message import is_compressed
from dissociated.memory.device.base import Device
from dissociated.protocol.close_reason import close_reason
from dissociated.protocol.delivery import Delivered
from dissociated.protocol.receiver import Receiver
from dissociated.transport.base import Connection

_LONG_PAUSE = 1.0  # seconds without receiving, after which a server may have cut this client off

Deliveries: TypeAlias = Generator[Delivered, None, None]


class ClientSession(ProcessBound):
    """The owner of the connections of a requested stream, and of the stream's leases.

    All addresses in `deliveries` must be passed to `bodies`, once.
    """

    def __init__(
        self,
        connections: Sequence[Connection],
        free_data: int | None,
        request: ReadRequest,
        on_freed: Callable[[Connection], None] | None = None,
        takes_missed: bool = False,
        frees_messages: bool = False,
    ) -> None:
        """Own `connections`, and give back the only one by `on_freed` after a whole stream, if that is possible.

        `takes_missed` says whether batches may have notes of missed batches, which readers remove. `frees_messages`
        says whether the server expects frees of messages by number.
        """
        self._connections = connections
        self._timeout = request.timeout
        self.max_body = request.max_body
        self.takes_missed = takes_missed
        self._decompress = request.decompress
        self._receiver = Receiver.with_limits(request.max_metadata, request.max_body, frees_messages)
        self._is_over = False
        self._reason: str | None = None  # to tell the server that it broke a rule
        self._leases = ClientLeases(connections[-1], free_data, request.timeout, on_freed)
        self.bodies = Bodies(connections[-1], self._leases, request)
        self._received = time.monotonic()  # when a message last arrived
        self.bind_to_process()
        stop_at_exit(self)

    def stop(self) -> None:
        """Make a receiving thread return. Called at the exit of the interpreter."""
        if self._is_over:  # the connection may carry another stream
            return
        for connection in self._connections:
            connection.interrupt(sending=False)

    @property
    def idle_time(self) -> float:
        """Return the number of seconds since a message arrived."""
        return time.monotonic() - self._received

    @section
    def deliveries(self) -> Deliveries:
        """Yield every message in order. The stream ends when this generator is exhausted or closed."""
        receiver = self._receiver
        stopped = True
        pause, self._received = 0.0, time.monotonic()
        try:
            if self._connections[-1].shares_memory:
                # While the server prepares its answer. If that fails, the first leases of the answer try again.
                with suppress(TransportError):
                    self._leases.start()
            with receiving(self._connections, self._allocate, self._timeout) as receive:
                while True:
                    while (item := receiver.next_together()) is not None:
                        yield self._account(item)
                    if receiver.complete:
                        break
                    self.check_process()
                    pause = max(pause, time.monotonic() - self._received)
                    arrived = receive(receiver.needs_body)
                    self._received = time.monotonic()
                    hold_at_exit()
                    if arrived is None:
                        receiver.disconnected()
                    else:
                        receiver.receive(arrived)
            stopped = False
        except DissociatedError as error:
            receiver.fail()
            self.blame(error)
            if pause > _LONG_PAUSE:
                why = (
                    f"{error}. This process had received nothing for {pause:.0f} s before, and a server cuts off a "
                    "client that stalls for its stall_timeout: read faster, or raise the timeout of the server"
                )
                if isinstance(error, ConnectionClosed):
                    raise ConnectionClosed(why) from None
                if isinstance(error, RemoteProtocolError) and error.rule == "stream-whole":  # closed between messages
                    raise RemoteProtocolError(why, error.rule) from None
            raise
        finally:
            hold_at_exit()
            self._end(stopped)

    def _end(self, stopped: bool) -> None:
        if self.is_inherited:
            return
        self._is_over = True
        try:
            for connection in self._connections[:-1]:
                connection.close(self._reason)
            if stopped and self.bodies.address_space.has_live_memory and len(self._connections) == 1:
                self._discard(self._connections[0])
        finally:  # also after Ctrl-C, because this ends the thread that frees leases
            self._leases.finish(stopped, self._reason)

    def receive_onto(self, device: Device) -> bool:
        """Receive bodies that need no decoding into memory of this device, until `bodies` changes that.

        Returns:
            False if the connection cannot do that.
        """
        connection = self._connections[-1]
        if connection.supports_rma or not connection.receive_onto(device):
            return False
        self.bodies.receive_onto(device)
        return True

    def blame(self, error: DissociatedError) -> None:
        """Tell the server of `error` when the stream ends, if it is a rule that the server broke."""
        if isinstance(error, RemoteProtocolError) and self._reason is None:
            self._reason = close_reason(error)

    def settle(self) -> None:
        """Record that addresses that were delivered and not passed to `bodies` by now never will be."""
        self._leases.settle()

    def _account(self, item: Delivered) -> Delivered:
        """Record the leases of `item`.

        Raise RemoteProtocolError for a body that is too large, DeviceError for one that is refused.
        """
        self.check_process()
        self._check_size(item.largest_body)
        if not self._decompress and any(is_compressed(message.header) for message in item.expand()):
            raise DeviceError(
                "a body is compressed, which decompress=False refuses: leave that option out to have bodies "
                "decompressed on the host, or publish the dataset without a codec"
            )
        self._leases.expect(item.lease_count)
        return item

    def _check_size(self, length: int) -> None:
        if length > self.max_body:
            raise RemoteProtocolError(
                f"a body has {length} bytes; at most {self.max_body} are accepted (max_body)", rule="frame-length"
            )

    def _allocate(self, tag: int | None, length: int) -> Buffer:
        if tag is not None:  # the framing caps the length of a run
            announced = self._receiver.announced_length(tag)
            if announced is not None and announced != length:
                raise RemoteProtocolError(
                    f"a body has {length} bytes; its metadata announced {announced}", rule="body-length"
                )
            self._check_size(length)
            if self.bodies.wants_device(length):
                return self._allocate_on_device(tag, length) or self.bodies.allocate(length)
        return self.bodies.allocate(length)

    def _allocate_on_device(self, tag: int, length: int) -> Buffer | None:
        announcement = self._receiver.announced(tag)
        return None if announcement is None or not is_movable(*announcement) else self.bodies.allocate_on_device(length)

    def _discard(self, connection: Connection) -> None:
        """Stop receiving, and free the messages in transit: other clients may wait for their memory."""
        connection.interrupt(sending=False)
        with suppress(DissociatedError):
            while (arrived := connection.receive(self._timeout, self._allocate)) is not None:
                self._receiver.receive(arrived)
                while (delivery := self._receiver.next()) is not None:
                    self._leases.expect(delivery.lease_count)
                    self._leases.free(delivery.leased)
