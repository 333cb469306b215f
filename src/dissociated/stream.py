"""A stream that a client has requested: the messages that arrive, and the memory that goes back."""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias, TypeVar

import pyarrow as pa

from dissociated.errors import DissociatedError, RemoteProtocolError, TransportError
from dissociated.fork import belongs, disown
from dissociated.ipc.attach import attach
from dissociated.ipc.join import Messages
from dissociated.memory.leases import KEPT, Returns, leased_buffer
from dissociated.memory.remote import pieces
from dissociated.message import Buffer, Incoming, Message, Run
from dissociated.once import once
from dissociated.protocol.bodies import AddressList, encode_free
from dissociated.protocol.events import Delivery
from dissociated.protocol.header import Header, buffer_extents
from dissociated.protocol.receiver import Receiver
from dissociated.protocol.run import Batches, PackedBatches
from dissociated.transport.base import Allocate, Connection
from dissociated.transport.mailbox import Mailbox

_log = logging.getLogger(__name__)

_MAX_AHEAD = 1 << 26  # bytes that one of two connections may be ahead of the other
_ENDING = 5.0  # seconds that threads may take to end with the interpreter
_FREE_AT_ONCE = 1 << 12  # addresses in one free_data message

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
        self._leases = _Leases(connections[-1], free_data, timeout)

    def deliveries(self) -> Deliveries:
        """Every message in order. Ends the stream when it is exhausted or closed."""
        receiver, leases = self._receiver, self._leases
        stopped = True
        try:
            with _arrivals(self._connections, self._allocate, self._timeout) as receive:
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


#: Receives from the stream of bodies, or of metadata; None at the end of its connection.
_ReceiveFrom: TypeAlias = Callable[[bool], Incoming | Run | None]


@contextmanager
def _arrivals(connections: Sequence[Connection], allocate: Allocate, timeout: float) -> Iterator[_ReceiveFrom]:
    """A function that receives from one connection, or from two, each of which then has a thread of its own."""
    if len(connections) == 1:
        (connection,) = connections
        yield lambda bodies: connection.receive(timeout, allocate)
        return
    pumps: list[_Pump] = []

    def astray(error: DissociatedError) -> None:
        for pump in pumps:  # whichever of them is waited for
            pump.arrived.close(error)

    for bodies, connection in enumerate(connections):
        pumps.append(_Pump(connection, bool(bodies), allocate, timeout, astray))
    try:
        yield lambda bodies: pumps[bodies].arrived.get(timeout)
    finally:
        for pump in pumps:
            pump.stop()
        for pump in pumps:
            pump.join()


class _Helper(threading.Thread):
    """A thread of a stream. It is stopped, and waited for, before the interpreter goes.

    A daemon thread that comes back from the system then is ended wherever it is. Within libarrow, where the last
    reference to a region unmaps it, that would bring down the process.
    """

    def __init__(self, owner: _Pump | _Leases, run: Callable[..., None], arguments: tuple[Any, ...], name: str) -> None:
        super().__init__(target=run, args=arguments, name=name, daemon=True)
        self._owner = weakref.ref(owner)
        _end_at_exit()

    def stop(self) -> None:
        owner = self._owner()
        if owner is not None:
            owner.stop()


@once
def _end_at_exit() -> None:
    atexit.register(_end_helpers)


def _end_helpers() -> None:
    helpers = [thread for thread in threading.enumerate() if isinstance(thread, _Helper)]
    for helper in helpers:
        helper.stop()
    end = time.monotonic() + _ENDING
    for helper in helpers:
        helper.join(max(0.0, end - time.monotonic()))


class _Pump:
    """A thread that receives from one of two connections, so that neither can hold up the other."""

    def __init__(
        self,
        connection: Connection,
        bodies: bool,
        allocate: Allocate,
        timeout: float,
        astray: Callable[[DissociatedError], None],
    ) -> None:
        """`astray` is told where what arrives belongs to the other connection."""
        self.arrived: Mailbox[Incoming] = Mailbox(_MAX_AHEAD)
        self._connection = connection
        self._bodies = bodies
        self._astray = astray
        self._thread = _Helper(self, self._run, (allocate, timeout), "receive")
        self._thread.start()
        belongs(self)

    def _run(self, allocate: Allocate, timeout: float) -> None:
        try:
            while (incoming := self._connection.receive(timeout, allocate)) is not None:
                for one in incoming.expand() if isinstance(incoming, Run) else (incoming,):
                    self._check(one)
                    self.arrived.put(one, len(one.data), None)
            self.arrived.close()
        except DissociatedError as error:
            self.arrived.close(error)
        except BaseException as error:
            self.arrived.close(TransportError(f"receiving failed: {type(error).__name__}: {error}"))
            raise

    def _check(self, one: Incoming) -> None:
        if self._bodies is (one.tag is not None):
            return
        sent, asked = ("metadata", "bodies") if self._bodies else ("a body", "metadata")
        error = RemoteProtocolError(
            f"the server sent {sent} over the connection for {asked}: of two URIs the first is that of the metadata, "
            "and the second that of the bodies"
        )
        self._astray(error)
        raise error

    def forked(self) -> None:
        disown(self)

    def stop(self) -> None:
        """Make the thread end."""
        self.arrived.close()
        self._connection.stop_receiving()

    def join(self) -> None:
        if self._thread is not threading.current_thread():  # as where the reader is collected in that thread
            self._thread.join()


class _Leases:
    """What this client holds of one server, and the thread that gives it back. Closes the connection at the end.

    Not before: to disconnect is to give everything back, and what is mapped may change then.
    """

    def __init__(self, connection: Connection, free_data: int | None, timeout: float) -> None:
        self._connection = connection
        self._free_data = free_data
        self._timeout = timeout
        self._returns = Returns(connection)
        self._leased = 0  # addresses that will come through `lease` or `give_back`
        self._attached = 0  # those that have come
        self._finished = False
        self._stopped = False
        self._thread: threading.Thread | None = None
        belongs(self)

    def forked(self) -> None:
        disown(self)

    def expect(self, count: int) -> None:
        """So many addresses have been delivered. Each will come through `lease` or `give_back`, once."""
        self._leased += count
        if count and self._thread is None:
            self._thread = _Helper(self, self._run, (), "give back")
            self._thread.start()

    def lease(self, memory: pa.Buffer, addresses: Sequence[int]) -> pa.Buffer:
        """The memory as a buffer that gives `addresses` back when it is no longer used."""
        self._attached += len(addresses)
        self._returns = self._returns.current()
        return leased_buffer(memory, addresses, self._returns)

    def give_back(self, addresses: Sequence[int]) -> None:
        """These addresses are not needed."""
        self._attached += len(addresses)
        self._returns.put(addresses)

    def settle(self) -> None:
        """No more addresses will come through `lease` or `give_back`, although some were expected."""
        if self._leased != self._attached:
            self._leased = self._attached
            self._returns.wake()

    def finish(self, stopped: bool) -> None:
        """No more addresses will come; `stopped` if the server does not know that yet."""
        if stopped:
            self._connection.stop_receiving()
        self._finished = True
        if self._thread is None:
            self._connection.close()
        else:
            self._returns.wake()

    def stop(self) -> None:
        """Make the thread end, whatever is still held: the process ends, and with it the connection."""
        self._stopped = True
        if not self._connection.shares_memory:
            self._connection.interrupt()
        self._returns.wake()

    def _run(self) -> None:
        returned = 0
        forked = False
        listening = self._free_data is not None
        while not (self._stopped or (self._finished and returned == self._leased)):
            addresses = self._returns.take(_FREE_AT_ONCE)
            returned += len(addresses)
            if KEPT in addresses:
                forked, addresses = True, [address for address in addresses if address != KEPT]
            try:
                for first in range(0, len(addresses) if listening else 0, _FREE_AT_ONCE):
                    body = encode_free(addresses[first : first + _FREE_AT_ONCE])
                    self._connection.send([Message(self._free_data, (body,))], self._timeout)
            except DissociatedError as error:
                # A server that is gone has nothing to take back; what is mapped stays readable without it.
                _log.debug("%r: %s", self._connection, error)
                listening = False
        if self._stopped and self._connection.shares_memory:
            _left_open.append(self._connection)  # what is held until the very end stays as it is until then
        elif forked:
            self._connection.leave()
        else:
            self._connection.close()


_left_open: list[Connection] = []
