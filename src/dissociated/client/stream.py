"""A stream that a client has requested: the messages that arrive, and the memory that goes back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TypeAlias, TypeVar

import pyarrow as pa

from dissociated.buffers import Buffer
from dissociated.client.arrivals import arrivals
from dissociated.client.leases import Leases
from dissociated.codec.attach import attach
from dissociated.codec.join import Messages
from dissociated.errors import DissociatedError, RemoteProtocolError, TransportError
from dissociated.format.message import Header, buffer_extents
from dissociated.memory.remote import pieces
from dissociated.protocol.bodies import AddressList
from dissociated.protocol.events import Delivery
from dissociated.protocol.message import Incoming, Run
from dissociated.protocol.receiver import Receiver
from dissociated.protocol.run import Batches, PackedBatches
from dissociated.transport.base import Connection

_log = logging.getLogger(__name__)


Deliveries: TypeAlias = Generator[Delivery | Batches, None, None]
D = TypeVar("D", bound=Delivery | Batches)
T = TypeVar("T")


class Stream:
    """Owns the connections of a stream that was requested over them, and the leases that come with it.

    Whatever `deliveries` gives and holds addresses must go through `attached` or `hold`, once.
    """

    def __init__(
        self,
        connections: Sequence[Connection],
        free_data: int | None,
        timeout: float,
        max_body: int,
        max_metadata: int,
        pool: pa.MemoryPool | None = None,
    ) -> None:
        self._connections = connections
        self._bodies = connections[-1]
        self.space = self._bodies.space
        self._timeout = timeout
        self._max_body = max_body
        self._pool = pool
        self._receiver = Receiver.taking(max_metadata, max_body)
        self._leases = Leases(connections[-1], free_data, timeout)

    def deliveries(self) -> Deliveries:
        """Every message in order. Ends the stream when it is exhausted or closed."""
        receiver, leases = self._receiver, self._leases
        stopped = True
        try:
            with arrivals(self._connections, self._allocate, self._timeout) as receive:
                while not receiver.complete:
                    if (delivery := receiver.next()) is not None:
                        yield self._delivered(delivery)
                        continue
                    incoming = receive(receiver.needs_body)
                    if incoming is None:
                        receiver.disconnected()
                    elif isinstance(incoming, Run):
                        batches = receiver.receive_run(incoming)
                        if batches is not None:
                            yield self._delivered(batches)
                            continue
                        for message in incoming.expand():
                            _receive(receiver, message)
                            if (delivery := receiver.next()) is not None:
                                yield self._delivered(delivery)
                    else:
                        _receive(receiver, incoming)
            stopped = False
        except DissociatedError:
            receiver.fail()
            raise
        finally:
            for connection in self._connections[:-1]:
                connection.close()
            if stopped and self.space.live and len(self._connections) == 1:
                self._discard(self._connections[0])
            leases.finish(stopped)

    def _delivered(self, item: D) -> D:
        """Take note of what `item` leases. Raises RemoteProtocolError where a body is larger than is taken."""
        self._check_size(item.largest_body)
        self._leases.expect(item.lease_count)
        return item

    def _check_size(self, length: int) -> None:
        if length > self._max_body:
            raise RemoteProtocolError(f"a body has {length} bytes; at most {self._max_body} are taken (max_body)")

    def attached(self, deliveries: Iterable[Delivery | Batches]) -> Messages:
        """The same messages, with their bodies where libarrow shall find them. Runs without leases stay together."""
        with self._ending(deliveries):
            for item in deliveries:
                if isinstance(item, PackedBatches):
                    yield item
                else:
                    yield from map(self._attach, _each(item))

    def each(self, deliveries: Iterable[Delivery | Batches], make: Callable[[Delivery], T]) -> Generator[T, None, None]:
        """What `make` makes of each message; it must attach or hold what the message leases."""
        with self._ending(deliveries):
            for item in deliveries:
                yield from map(make, _each(item))

    @contextmanager
    def _ending(self, deliveries: Iterable[Delivery | Batches]) -> Iterator[None]:
        """The stream ends with whoever goes through it."""
        try:
            yield
        finally:
            if isinstance(deliveries, Generator):
                deliveries.close()
            self.settle()

    def _discard(self, connection: Connection) -> None:
        """Stop receiving, and give back what is on its way: the server waits for it, for the sake of others."""
        connection.stop_receiving()
        with suppress(DissociatedError):
            while (incoming := connection.receive(self._timeout, self._allocate)) is not None:
                for message in incoming.expand() if isinstance(incoming, Run) else (incoming,):
                    _receive(self._receiver, message)
                while (delivery := self._receiver.next()) is not None:
                    self._leases.expect(delivery.lease_count)
                    if isinstance(delivery.body, AddressList):
                        self._leases.give_back(delivery.body.leased)

    def settle(self) -> None:
        """What was delivered and is not attached or held by now never will be."""
        self._leases.settle()

    def hold(self, memory: pa.Buffer, addresses: Sequence[int]) -> pa.Buffer:
        """Mapped memory as a buffer, at whose end `addresses`, which were delivered, go back."""
        return self._leases.lease(memory, addresses)

    def _attach(self, delivery: Delivery) -> tuple[Buffer, Buffer | None]:
        if self._bodies.fetches and isinstance(delivery.body, AddressList) and delivery.body.leased:
            return delivery.header, self._fetch(delivery.header, delivery.parsed, delivery.body)
        return attach(delivery, self.space, self._leases, self._allocate_packed)

    def buffers(self, delivery: Delivery) -> list[pa.Buffer]:
        """The buffers of a message that came by address, each by itself, where they lie."""
        body = delivery.body
        assert isinstance(body, AddressList)
        if not body.leased:
            return [pa.py_buffer(b"")] * len(body.lengths)
        if self._bodies.fetches:
            packed = self._fetch(delivery.header, delivery.parsed, body)
            wanted = zip(*buffer_extents(delivery.header, delivery.parsed), strict=True)
            return [packed.slice(at, length) for at, length in wanted]
        located = self.space.locate(body.addresses, body.lengths)
        whole = self.hold(located.memory, body.leased)
        return [whole.slice(offset, length) for offset, length in zip(located.offsets, body.lengths, strict=True)]

    def _fetch(self, header: bytes, parsed: Header, body: AddressList) -> pa.Buffer:
        """The body, fetched from where it lies, which is then given back."""
        wanted, lengths = buffer_extents(header, parsed)
        for at, length in zip(wanted, lengths, strict=True):
            if length and not 0 <= at <= parsed.body_length - length:
                raise RemoteProtocolError(f"a buffer at {at} of {length} bytes leaves its body")
        packed = self._allocate_packed(parsed.body_length)
        self._bodies.fetch(pieces(body.addresses, body.lengths, wanted), packed, self._timeout)
        self._leases.give_back(body.leased)
        return packed

    def _allocate(self, tag: int | None, length: int) -> Buffer:
        if tag is not None:  # the framing caps the length of a run
            announced = self._receiver.announced_length(tag)
            if announced is not None and announced != length:
                raise RemoteProtocolError(f"a body has {length} bytes; its metadata announced {announced}")
            self._check_size(length)
        return self._allocate_packed(length)

    def _allocate_packed(self, length: int) -> pa.Buffer:
        try:
            return pa.allocate_buffer(length, self._pool)
        except MemoryError:
            raise TransportError(
                f"there is no memory for a body of {length} bytes: read fewer columns, or over shm"
            ) from None


def _each(item: Delivery | Batches) -> Iterable[Delivery]:
    return (item,) if isinstance(item, Delivery) else item.expand()


def _receive(receiver: Receiver, incoming: Incoming) -> None:
    if incoming.tag is None:
        receiver.receive_metadata(incoming.data)
    else:
        receiver.receive_body(incoming.tag, incoming.data)
