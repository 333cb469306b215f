"""Sending through live memory to one client, from a source that is read for this client or once for all clients."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

from dissociated.base.buffers import Buffer, metadata_too_long
from dissociated.codec.split import SplitMessage
from dissociated.datasets.broadcast import BroadcastDataset
from dissociated.datasets.consumer import Consumer, Encodings
from dissociated.datasets.live_message import MAX_SEND_BYTES, MAX_SEND_MESSAGES, SMALL_BODY, LiveMessage, all_addresses
from dissociated.datasets.source_errors import source_errors
from dissociated.datasets.streamed import StreamedDataset
from dissociated.errors import ConnectionClosed, DeadlineExceeded, DissociatedError, SourceError
from dissociated.format.message import buffer_extents
from dissociated.format.missed import MAX_NOTE_SIZE
from dissociated.memory.live import LiveMemory, LiveRegion
from dissociated.protocol.message import Message, Run
from dissociated.protocol.sender import Body
from dissociated.protocol.wire import BodyKind, Streams, encode_addresses, leased_addresses
from dissociated.server.coalescer import COALESCE_INTERVAL, MIN_BURST, Coalescer
from dissociated.server.pending_error import PendingError
from dissociated.server.sending import ClientRequest, Sending

_MAX_WAIT = 3600.0  # seconds; this long only because new messages and frees wake the thread that waits
_MIN_UNREAD_WAIT, _MAX_UNREAD_WAIT = 0.001, 0.016  # seconds between looks at whether the client has read everything
_FREES_INTERVAL = 0.002  # seconds between two looks for frees, unless the source waits for memory
_MAX_AT_ONCE = 1 << 16  # bytes outside of shared memory that are sent without waiting: a socket's buffer takes these
_ROOM_TIMEOUT = 1.0  # seconds that a client has to free memory before bodies are sent inline


class _LiveMemorySending(Sending):
    """The sending of messages that are made one after another. Memory that the client frees is used for later ones."""

    def __init__(self, client: ClientRequest, name: str) -> None:
        super().__init__(client)
        self._name = name
        self._mapped = self._by_address and self._connection.shares_memory
        self._max_metadata = self._limits.max_metadata
        self._shared: set[int] = set()  # base addresses of the regions that were shared with the client

    def _admit(self) -> None:
        if self._mapped:
            self._admission.admit_stream(self._name)

    def _encode_together(self, items: Sequence[LiveMessage], body: Callable[[LiveMessage], Body | None]) -> Any:
        """Encode all of `items` to be sent in one call, with alike neighbours combined into runs.

        Args:
            items: The messages to send.
            body: Called for each message outside a run; it returns the body to send, or None for no body.

        Returns:
            The messages, as `Connection.prepare` returns them.
        """
        messages: list[Message | Run] = []
        for header, neighbours in groupby(items, _run_key):
            grouped = [*neighbours]
            if header is not None:
                bodies = [part for item in grouped for part in item.bodies]
                if self._connection.takes_runs and len(bodies) >= self._connection.min_run:
                    self._check(header)
                    messages.append(self._sender.send_alike(header, bodies))
                    continue
                grouped = [message for item in grouped for message in item.each()]
            for item in grouped:
                messages += self._encode_message(item.header, body(item))
        return self._connection.prepare(messages)

    def _send_encoded(self, encoded: Any, nbytes: int) -> None:
        """Send encoded messages whose bodies have `nbytes` bytes in all."""
        with self._stats.sending(self._connection, nbytes):
            self._connection.send(encoded, self._limits.stall_timeout)

    def _encode_message(self, header: bytes, body: Body | None) -> list[Message]:
        """Encode the next message. Its metadata is checked here, since the messages of a stream are unknown before."""
        self._check(header)
        return self._sender.send(header, body)

    def _check(self, header: bytes) -> None:
        why = metadata_too_long(repr(self._name), len(header), self._max_metadata)
        if why is not None:
            raise SourceError(why)

    def _share(self, region: LiveRegion) -> None:
        """Share `region` with the client, unless it was shared before."""
        if region.base not in self._shared:
            self._shared.add(region.base)
            memory, timeout = self._connection.memory, self._limits.stall_timeout
            memory.share(region.descriptor, region.base, region.size, region.backing, timeout)

    def _lease(self, extents: Sequence[tuple[int, int]]) -> None:
        """Record that the client holds a lease of each address of the next message from now on."""
        self._hold({self._sender.sequence: leased_addresses(extents)}, len(extents))


class StreamedSending(_LiveMemorySending):
    """The sending of messages that are made for one client alone, through live memory of that client."""

    def __init__(self, client: ClientRequest, dataset: StreamedDataset) -> None:
        super().__init__(client, dataset.name)
        self._dataset = dataset
        self._memory = LiveMemory(dataset.name, self._limits.live_limit)
        self._out_of_room = False  # whether the memory was full and no free has arrived since
        self._cut_off = False  # whether the client was cut off
        self._coalescer: Coalescer | None = None  # while messages are sent

    def send(self) -> None:
        self._admit()
        inline_limit = SMALL_BODY if self._limits.inline_limit is None else self._limits.inline_limit
        gathers = self._streams is Streams.BOTH and self._connection.takes_runs
        with Coalescer(self._send_coalesced) as coalescer:
            self._coalescer = coalescer
            for message in self._messages():
                length = message.parsed.body_length
                by_address = self._mapped and not self._half_closed and length > inline_limit
                if gathers and message.body is not None and length <= SMALL_BODY and not by_address:
                    coalescer.add(message)
                    continue
                coalescer.flush()
                body = None
                if message.body is not None and self._streams & Streams.BODIES:
                    region = self._region_for(length) if by_address else None
                    body = (
                        Body(BodyKind.PACKED, message.body)
                        if region is None
                        else self._write_body(region, message, message.body)
                    )
                with self._stats.sending(self._connection, 0 if body is None else length):
                    self._connection.send(self._encode_message(message.header, body), self._limits.stall_timeout)
                self._stats.messages += 1
                self._take_frees()
                self._admission.check_open()

    @property
    def holds_live_memory(self) -> bool:
        return bool(len(self._ledger))

    @property
    def kept_bytes(self) -> int | None:
        return self._memory.unfreed if self._cut_off else None

    def cut_off(self) -> None:
        self._cut_off = True

    def close(self, disconnected: bool) -> None:
        super().close(disconnected)
        self._memory.close()
        self._coalescer = None

    def is_client_gone(self) -> bool:
        if self._coalescer is not None:
            try:
                self._coalescer.flush()  # until the next message, no other thread uses the connection
            except ConnectionClosed:
                return True
        return super().is_client_gone()

    def _on_freed(self, addresses: Collection[int]) -> None:
        self._memory.free(addresses)
        self._out_of_room = False

    def _messages(self) -> Iterator[SplitMessage]:
        with source_errors(self._name):
            yield from self._dataset.messages()

    def _send_coalesced(self, items: Sequence[LiveMessage]) -> None:
        self._send_encoded(self._encode_together(items, _packed), sum([item.nbytes for item in items]))
        self._stats.messages += sum([item.messages for item in items])
        self._take_frees()
        self._admission.check_open()

    def _region_for(self, length: int) -> LiveRegion | None:
        """Return the live region for a body of `length` bytes, or None if the body must be sent inline.

        If the memory is full, wait up to `_ROOM_TIMEOUT` for frees. A client that holds every body until the stream
        ends would otherwise wait for the server, and the server for the client. After a timeout, bodies are sent inline
        until the next free arrives, and only the client's own memory limits them.
        """
        region = self._memory.region(length)
        if region is None:
            return None
        while not self._memory.has_room(length):
            if self._out_of_room:
                return None
            try:
                incoming = self._receive(_ROOM_TIMEOUT)
            except DeadlineExceeded:
                self._out_of_room = True
                return None
            if incoming is None:
                self._client_ended()
                return None
            self._receive_free(incoming)
        self._share(region)
        return region

    def _write_body(self, region: LiveRegion, message: SplitMessage, parts: Sequence[Buffer]) -> Body:
        offsets, lengths = buffer_extents(message.header, message.parsed)
        placed = region.place(parts, message.parsed.body_length, zip(offsets, lengths, strict=True))
        self._lease(placed)
        return _address_body(placed)


class _Encoding(NamedTuple):
    """Messages that are encoded to be sent in one call, to one client or to several."""

    #: The result of `Connection.prepare`.
    encoded: Any
    #: The messages. This object keeps them alive, so that no other object gets the identity of one.
    items: Sequence[LiveMessage]
    #: The number of sequence numbers that the encoding takes.
    sequences: int
    #: The number of messages before columns were selected.
    messages: int
    #: The total length of the bodies, in bytes.
    nbytes: int
    #: The regions that must be shared with the client before.
    regions: Sequence[LiveRegion]
    #: The addresses that are leased to the client, by the number of the message.
    leased: Mapping[int, Sequence[int]]
    #: The number of (address, length) pairs in the bodies, pairs of empty buffers included.
    pairs: int
    #: The addresses of bodies that the client is not sent.
    unsent: Collection[int]


class BroadcastSending(_LiveMemorySending):
    """The sending of a broadcast: messages that several clients share, and memory that they lease together.

    While the connection's thread waits, the pump's thread may send: see `Consumer`. The two take turns by a lock.
    """

    def __init__(self, client: ClientRequest, dataset: BroadcastDataset) -> None:
        super().__init__(client, dataset.name)
        self._dataset = dataset
        self._fanout = dataset.fanout
        self._consumer: Consumer | None = None
        if dataset.notes_missed:
            self._max_metadata += MAX_NOTE_SIZE  # clients accept this, too
        self._noted = 0  # number of missed batches of which the client knows
        # All that the encoding of messages depends on, apart from the messages, their place, and `_half_closed`.
        self._kind = dataset, self._connection.encoding, self._mapped, self._limits.inline_limit, self._max_metadata
        self._turn = threading.Lock()  # held while a thread sends; the connection's thread releases it to wait
        self._error = PendingError()  # of a send in the pump's thread, or of frees that came during a send

    def send(self) -> None:
        if self._streams is not Streams.BOTH:
            raise SourceError(
                f"each connection has its own place in the live stream {self._name!r}: request all of it over one"
            )
        self._admit()
        # A client that maps no memory can only be late in taking bytes off the connection, so it is cut off by
        # interrupting the connection. A client that maps memory is woken, and told the reason.
        on_cut_off = self._connection.wake if self._mapped else self._connection.interrupt
        is_delivered = self._connection.sends_at_once and not self._dataset.live.linger
        deliver = self._deliver if is_delivered else None
        self._turn.acquire()
        self._consumer = consumer = self._fanout.join(self._connection.wake, on_cut_off, deliver)
        self._connection.take_while_sending(self._take_frees_early)
        try:
            self._send_to(consumer)
        finally:
            self._connection.take_while_sending(None)
            self._error.set(None)  # it would keep itself and the messages alive

    def _send_to(self, consumer: Consumer) -> None:
        """Send `consumer` its messages until the end of the stream."""
        live = self._dataset.live
        pause_until = 0.0  # by time.monotonic
        unread_wait = _MIN_UNREAD_WAIT
        while True:
            self._finish_delivery()
            if consumer.finished:
                return
            self._take_frees()
            if live.policy != "block" and not consumer.cut_off and self._connection.unread:
                # Sent messages can no longer be dropped, and would be old by the time the client reads them.
                self._connection.wait(unread_wait)
                unread_wait = min(2 * unread_wait, _MAX_UNREAD_WAIT)
                continue
            unread_wait = _MIN_UNREAD_WAIT
            if (pause := pause_until - time.monotonic()) > 0:
                time.sleep(pause)
            items = self._take(consumer)
            if not items:
                self._turn.release()
                try:
                    if len(self._ledger) and not self._fanout.waits_for_room:
                        self._connection.pause(_FREES_INTERVAL)  # several frees cost little more than one
                    self._connection.wait(_MAX_WAIT)
                finally:
                    self._turn.acquire()
                continue
            count, nbytes = self._send_items(consumer, items)
            # If several messages came during the last send, more will probably come, and together they cost less.
            interval = live.linger or (COALESCE_INTERVAL if count > MIN_BURST else 0.0)
            is_small = count < MAX_SEND_MESSAGES and nbytes <= SMALL_BODY
            pause_until = time.monotonic() + interval if interval and is_small else 0.0

    def _take(self, consumer: Consumer) -> list[LiveMessage]:
        """Take the messages to send next."""
        # Bodies that are sent by address do not count, unless the policy may still drop waiting messages.
        by_address = self._mapped and not self._half_closed and not self._limits.inline_limit
        maps = by_address and self._dataset.live.policy == "block"
        return self._fanout.take(consumer, MAX_SEND_MESSAGES, MAX_SEND_BYTES, maps)

    def _deliver(self, encodings: Encodings) -> None:
        """Send waiting messages in the pump's thread if that needs no waiting, or wake the connection's thread."""
        if not self._turn.acquire(blocking=False):
            self._connection.wake()
            return
        try:
            is_done = self._send_at_once(encodings)
        except BaseException as error:
            self._error.set(error)
            is_done = False
        finally:
            self._turn.release()
        if not is_done:
            self._connection.wake()

    def _send_at_once(self, encodings: Encodings) -> bool:
        """Send the waiting messages without waiting. Return False if something remains for the connection's thread."""
        consumer, connection = self._consumer, self._connection
        assert consumer is not None
        if self._error or connection.backlog or consumer.queued > _MAX_AT_ONCE:
            return False
        if any(map(self._may_wait, consumer.waiting)):
            return False
        if self._dataset.live.policy != "block" and connection.unread:
            return False
        self._send_items(consumer, self._take(consumer), encodings)
        consumer.idle = not consumer.waiting
        return consumer.idle and not connection.backlog

    def _may_wait(self, item: LiveMessage) -> bool:
        """Return whether sending `item` may have to wait: a region must be shared before, or a large body is sent."""
        region = item.region
        return region is not None and (region.base not in self._shared or not self._goes_by_address(item))

    def _take_frees_early(self) -> None:
        """Take frees while a send waits, since the source may wait for them. After an error, no message follows."""
        if not self._error:
            try:
                self._take_frees()
            except DissociatedError as error:
                self._error.set(error)  # raised after the send, so that the client can be told

    def _finish_delivery(self) -> None:
        """Do the rest of a send in the pump's thread: raise its error, or send what the connection did not take."""
        while True:
            self._error.raise_once()
            if not (self._connection.sends_at_once and self._connection.backlog):
                return
            self._connection.send((), self._limits.stall_timeout)

    @property
    def joined(self) -> bool:
        return self._consumer is not None

    @property
    def holds_live_memory(self) -> bool:
        return self._consumer is not None and bool(len(self._ledger))

    @property
    def kept_bytes(self) -> int | None:
        return None if self._consumer is None else self._fanout.kept_bytes(self._consumer)

    @property
    def missed(self) -> int:
        return 0 if self._consumer is None else self._consumer.missed

    def drain(self, timeout: float) -> None:
        if self._consumer is not None:
            self._fanout.stop(self._consumer)
        super().drain(timeout)

    def cut_off(self) -> None:
        if self._consumer is not None:
            self._fanout.detach(self._consumer)

    def close(self, disconnected: bool) -> None:
        super().close(disconnected)
        if self._consumer is not None:
            self._fanout.leave(self._consumer, disconnected)

    def _on_freed(self, addresses: Collection[int]) -> None:
        if self._consumer is not None:
            self._fanout.free(self._consumer, addresses)

    def _send_items(
        self, consumer: Consumer, items: Sequence[LiveMessage], encodings: Encodings | None = None
    ) -> tuple[int, int]:
        """Send all of `items` in one call.

        Args:
            consumer: The consumer.
            items: The messages to send.
            encodings: See `Consumer`. The messages are then sent without waiting.

        Returns:
            The number of messages and the total bytes of their bodies.
        """
        written = self._connection.written
        unsent: Collection[int] | None = None  # addresses that the client is not sent; None for all
        try:
            encoding = self._encode_once(consumer, items, encodings)
            for region in encoding.regions:
                self._share(region)
            if encoding.leased:
                self._hold(encoding.leased, encoding.pairs)
            unsent = encoding.unsent
            if encodings is None:
                self._send_encoded(encoding.encoded, encoding.nbytes)
            else:
                self._connection.send_at_once(encoding.encoded)
                self._stats.add_sent(self._connection, encoding.nbytes)
            self._stats.messages += encoding.messages
            return encoding.messages, encoding.nbytes
        except ConnectionClosed:
            if unsent is not None and self._connection.written == written:
                self._ledger.withdraw(encoding.leased)  # no byte was sent, so the client will never free these
                unsent = None
            raise
        finally:
            freed = all_addresses(items) if unsent is None else unsent
            if freed:
                self._fanout.free(consumer, freed)

    def _encode_once(self, consumer: Consumer, items: Sequence[LiveMessage], encodings: Encodings | None) -> _Encoding:
        """Encode `items` at this place of the stream, or return their encoding if another client was sent the same."""
        if encodings is None or consumer.missed_before != self._noted:
            return self._encode(consumer, items)
        key = self._kind, self._half_closed, self._sender.sequence, *map(id, items)
        encoding: _Encoding | None = encodings.get(key)
        if encoding is None:
            encodings[key] = encoding = self._encode(consumer, items)
        else:
            self._sender.record_sent(self._sender.sequence, encoding.sequences)
        return encoding

    def _encode(self, consumer: Consumer, items: Sequence[LiveMessage]) -> _Encoding:
        first = self._sender.sequence
        projected = [item for item in map(self._dataset.project, items) if item is not None]
        noted = self._note_missed(consumer, projected)
        by_address = [item for item in noted if self._goes_by_address(item)]
        leased: dict[int, Sequence[int]] = {}
        encoded = self._encode_together(noted, partial(self._body, leased))
        return _Encoding(
            encoded,
            items,
            self._sender.sequence - first,
            sum([item.messages for item in items]),
            sum([item.nbytes for item in noted]),
            [item.region for item in by_address if item.region is not None],
            leased,
            sum([len(item.extents) for item in by_address]),
            all_addresses(items).difference(*leased.values()),
        )

    def _note_missed(self, consumer: Consumer, items: Sequence[LiveMessage]) -> Sequence[LiveMessage]:
        """Note in the first batch of `items` that the client missed batches, if it missed any since the last note."""
        if consumer.missed_before == self._noted:
            return items
        for at, item in enumerate(items):
            if item.droppable:
                self._noted = consumer.missed_before
                return [*items[:at], *item.noting_missed(self._noted), *items[at + 1 :]]
        return items

    def _goes_by_address(self, item: LiveMessage) -> bool:
        """Return whether the client is sent the addresses of this body. Otherwise it is sent the body itself."""
        is_mapped = item.region is not None and self._mapped and not self._half_closed
        return is_mapped and item.parsed.body_length > (self._limits.inline_limit or 0)

    def _body(self, leased: dict[int, Sequence[int]], item: LiveMessage) -> Body | None:
        """Return the body to send for `item`, the next message, and add its addresses to `leased` if it has any."""
        if item.body is None:
            return None
        if self._goes_by_address(item):
            leased[self._sender.sequence] = leased_addresses(item.extents)
            return _address_body(item.extents)
        # The region's memory is freed right after sending, and then reused. The body can be sent without a copy only if
        # it lies in no region, or if the connection no longer needs it when the send has returned. To a client that
        # maps memory, bytes of a send that was woken may still be queued.
        if item.region is None or (self._connection.copies and not self._mapped):
            return Body(BodyKind.PACKED, item.body)
        return Body(BodyKind.PACKED, [*map(bytes, item.body)])


def _address_body(extents: Sequence[tuple[int, int]]) -> Body:
    return Body(BodyKind.ADDRESSES, (encode_addresses(extents),))


def _run_key(item: LiveMessage) -> bytes | None:
    """Return the key by which messages are grouped into a run, or None for a message that belongs to no run."""
    return None if item.repeats is None else item.header


def _packed(item: LiveMessage) -> Body | None:
    return None if item.body is None else Body(BodyKind.PACKED, item.body)
