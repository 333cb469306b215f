"""A stream that a client has requested: record batches, or tensors."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from functools import partial

from dissociated.base.buffers import Buffer
from dissociated.base.exit import section
from dissociated.client.device import DeviceReceiver, place_on_device
from dissociated.client.session import ClientSession, Deliveries
from dissociated.codec.batches import RaisingAgain
from dissociated.codec.device import DeviceMessage, DeviceReader, Mover, join_on_device
from dissociated.codec.inplace import InPlace, StreamPlace, Tail
from dissociated.codec.join import Messages, join
from dissociated.codec.options import ReadOptions
from dissociated.codec.reader import StreamReader
from dissociated.codec.runs import join_deliveries
from dissociated.codec.tensor import Tensor, join_tensor
from dissociated.errors import FormatError, RemoteProtocolError, WrongKind
from dissociated.format.layout import is_little_endian
from dissociated.memory.device.base import Device
from dissociated.memory.device.segment import open_region
from dissociated.memory.remote import Span
from dissociated.protocol.delivery import Delivered, Delivery

#: Most messages, or runs of messages, that are examined before a dataset in shared memory is opened.
_MAX_EXAMINED = 1 << 16
#: Seconds after which the rest of a stream in shared memory is compared, even if its first batches were not read yet:
#: the server waits for that.
_PATIENCE = 30.0


class ClientStream:
    """The stream of a session. It is read once, as batches or as tensors, or closed."""

    def __init__(self, session: ClientSession) -> None:
        """Wait for the first message. Errors are those of `ClientSession.deliveries`."""
        self._session = session
        self._bodies = session.bodies
        self._remaining = session.deliveries()
        try:
            (first,) = next(self._remaining).expand()  # a stream never begins with a run
        except BaseException:
            self.close()
            raise
        #: The flatbuffer of the first message: the schema, or a tensor.
        self.header = first.header
        self.is_tensors = first.parsed.is_tensor
        self._examined: deque[Delivered] = deque([first])

    def batches(self, options: ReadOptions) -> StreamReader:
        """Return a reader, which ends the stream when it is exhausted or dropped.

        Errors are those of `join_deliveries`. Bodies are mapped, fetched, or used as they were sent. If a dataset lies
        in shared memory exactly as in an IPC stream, libarrow reads it there directly.
        """
        reader = self._in_place(options) if self._bodies.address_space.static else None
        if reader is not None:
            return reader
        return self._join(options)

    def _join(self, options: ReadOptions) -> StreamReader:
        session = self._session
        return join_deliveries(self._deliveries(), self._attach, options, session.max_body, session.takes_missed)

    def map_on_device(self, device: Device, spans: Sequence[Span]) -> DeviceReader:
        """Return a reader of batches in the server's memory on a device. It ends the stream like that of `batches`.

        The spans are opened now. The server keeps them from its acceptance of the request until the connection ends.

        Raises:
            DeviceError: The spans cannot be opened.
        """
        for span in spans:
            self._bodies.address_space.add(open_region(device, span))
        return join_on_device(device, self._mapped_messages(device))

    def receive_on_device(self, device: Device, options: ReadOptions) -> DeviceReader | None:
        """Return a reader of batches whose bodies the connection receives into memory of a device.

        Messages that need decoding are received in this process.

        Returns:
            The reader, or None if the connection cannot do that.

        Raises:
            DeviceError: The device fails.
        """
        if not is_little_endian(self.header) or sys.byteorder != "little" or not self._session.receive_onto(device):
            return None
        receiver = DeviceReceiver(self._one_by_one(), self._bodies, device)

        def decode_remaining(begin: Messages) -> StreamReader | None:
            remaining = receiver.remaining_messages(begin)
            return None if remaining is None else join(remaining, options, max_body=self._session.max_body)

        return join_on_device(device, receiver.messages(), options, decode_remaining)

    def _one_by_one(self) -> Generator[Delivery, None, None]:
        with closing(self._deliveries()) as deliveries:
            for item in deliveries:
                yield from item.expand()

    def _mapped_messages(self, device: Device) -> Generator[DeviceMessage, None, None]:
        with closing(self._one_by_one()) as deliveries, closing(Mover(device)) as mover:
            for delivery in deliveries:
                yield place_on_device(delivery, self._bodies, mover)

    def tensors(self) -> TensorReader:
        """Return a reader of tensors, which ends the stream when it is exhausted, closed or dropped.

        Raises:
            WrongKind: The stream has record batches.
        """
        return TensorReader(self._tensors())

    def _tensors(self) -> Generator[Tensor, None, None]:
        with closing(self._deliveries()) as deliveries:
            for item in deliveries:
                yield from map(self._tensor, item.expand())

    def close(self) -> None:
        """End the stream. Data that was read stays valid."""
        try:
            self._remaining.close()
        finally:  # also after Ctrl-C: unread messages would otherwise keep the connection
            self._session.settle()

    def _in_place(self, options: ReadOptions) -> StreamReader | None:
        """Return a reader over a static dataset in shared memory if it lies there in place; else None.

        Of a long stream, only the beginning is compared now. Only metadata and addresses arrive.
        """
        in_place = InPlace(self.header, self._bodies.address_space)
        for item in self._remaining:
            self._examined.append(item)
            if len(self._examined) > _MAX_EXAMINED or not self._accepts(in_place, item):
                return None
            if in_place.can_begin:
                schema = self._examined.popleft()
                self._examined.clear()  # the reader has the leases of these batches
                self._examined.append(schema)
                tail = Tail(partial(self._compare, in_place, options), self._is_waiting, self._session.stop, self.close)
                return in_place.reader(self._bodies.leases.lease, options, tail)
        return in_place.reader(self._bodies.leases.lease, options)

    def _accepts(self, in_place: InPlace, item: Delivered) -> bool:
        """Return whether the next messages lie in place. The server learns of a rule that it broke."""
        try:
            return item.accept(in_place)
        except RemoteProtocolError as error:
            self._session.blame(error)
            raise

    def _compare(self, in_place: InPlace, options: ReadOptions, at: int) -> StreamPlace | StreamReader:
        """Compare the rest of a stream whose beginning lies in place. See `Tail`. An error ends the stream."""
        try:
            for item in self._remaining:
                self._examined.append(item)
                if len(self._examined) > _MAX_EXAMINED or not self._accepts(in_place, item):
                    return self._join(options)
        except BaseException:
            self.close()  # nobody reads the examined messages, so their addresses never come back
            raise
        self._examined.clear()
        return in_place.place(self._bodies.leases.lease, at)

    def _is_waiting(self) -> bool:
        return self._session.idle_time > _PATIENCE

    @section
    def _deliveries(self) -> Deliveries:
        """Yield the messages that were examined, and then the rest. Close the stream at the end."""
        with closing(self):
            while self._examined:
                yield self._examined.popleft()
            yield from self._remaining

    def _attach(self, delivery: Delivery) -> tuple[bytes, Buffer | None]:
        try:
            return self._bodies.attach(delivery)
        except RemoteProtocolError as error:
            self._session.blame(error)
            raise

    def _tensor(self, delivery: Delivery) -> Tensor:
        if not delivery.parsed.is_tensor:
            raise WrongKind("this stream holds record batches: read it with open_stream, or by name with read")
        try:
            return join_tensor(delivery.header, self._bodies.buffers(delivery))
        except FormatError as error:
            why = str(error)  # not the error itself, whose traceback would keep leased memory
        raise RemoteProtocolError(f"the peer sent a tensor that cannot be read: {why}")


class TensorReader(Iterator[Tensor]):
    """The tensors of a stream. The stream ends when the reader is exhausted, closed or dropped."""

    def __init__(self, tensors: Generator[Tensor, None, None]) -> None:
        self._next = [next(tensors)]  # start the generator, so that closing it ends the stream
        self._remaining = RaisingAgain(tensors)

    def __next__(self) -> Tensor:
        return self._next.pop() if self._next else next(self._remaining)

    def close(self) -> None:
        """Stop reading. Tensors that were read stay valid."""
        self._next.clear()
        self._remaining.close()
