"""The fan-out of a live stream: its messages are written to memory once, and given to all consumers.

The pump publishes the messages of the source. The fan-out writes each body into shared memory once, and gives the same
messages to every consumer. Each consumer has its own position in the stream and its own leases. The memory of a body is
used again when the last consumer that was given the body has freed it.

The pump waits for the slowest consumer while `limit` bytes are held. If consumers neither take nor free anything for
`stall_timeout` seconds, the consumer among them that holds the most memory is cut off: its stream ends with an error.
Memory that was sent to it stays unchanged until it frees the memory or disconnects, and no longer counts against the
limit.

With the policies "drop_oldest" and "latest", batches that consumers have not taken yet are dropped, so that the pump
waits only for memory that consumers hold. Schema and dictionaries stay, except dictionaries that were replaced since.

A consumer that joins late receives the schema and the current dictionaries, and then the next messages.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence

from dissociated.codec.split import LargeBatch, SplitMessage
from dissociated.datasets.consumer import Consumer, Deliver, add_dictionary
from dissociated.datasets.live import Live
from dissociated.datasets.live_message import QUEUED_OVERHEAD, SMALL_BODY, LiveMessage
from dissociated.errors import SourceError, TransportError
from dissociated.format.message import HeaderType, buffer_extents
from dissociated.memory.live import LiveMemory
from dissociated.transport.base import check_timeout

_log = logging.getLogger(__name__)

#: Number of small messages for which the room is checked at once when they follow one another.
_ROOM_BATCH = 16


class Fanout:
    """The distribution of one stream to all consumers: see the module. Close it after use.

    Error messages call the stream `name`. `begin` is called once, when the required number of consumers has joined:
    from then on, one thread calls `publish` and, last, `end`. If `begin` raises TransportError, it is called again when
    another consumer joins. At most `limit` bytes are held in shared memory.
    """

    def __init__(
        self, name: str, schema: SplitMessage, live: Live, limit: int, begin: Callable[[Fanout], None]
    ) -> None:
        self.name = name
        self._live = live
        self._schema = schema
        self._begin: Callable[[Fanout], None] | None = begin  # None once it was called
        self._dictionaries: dict[int, list[LiveMessage]] = {}  # the current dictionary of each id, and its deltas
        self._memory = LiveMemory(name, limit)
        self._consumers: list[Consumer] = []
        self._active: Sequence[Consumer] = ()  # the consumers that receive further messages
        self._waking: list[Consumer] = []  # consumers that waited for the newest message
        # The text of the error that ended the stream. The error itself would keep alive, through its traceback, all
        # objects of the functions that it passed.
        self._reason: str | None = None
        self._reference: str | None = None  # the name of that error in the log
        self.has_ended = False  # whether the stream has ended
        self._busy = False  # whether `publish` is writing to the memory
        self.waits_for_room = False  # whether `publish` waits for consumers to take or free something
        self._last: LiveMessage | None = None  # the newest message, until any consumer has taken it
        self._last_receivers: Sequence[Consumer] = ()
        self._room_for = 0  # number of alike messages that may follow the newest one before room is checked again
        self._lock = threading.RLock()  # guards the state of all consumers
        # Notified when a consumer joins, and when one takes or frees something, or leaves, while `publish` waits.
        self._changed = threading.Condition(self._lock)

    # Consumers

    def join(
        self,
        wake: Callable[[], None],
        on_cut_off: Callable[[], None] | None = None,
        deliver: Deliver | None = None,
    ) -> Consumer:
        """Add a consumer. The stream begins when the required number of consumers has joined. Call `leave` after use.

        Args:
            wake: See `Consumer`. It is also called at the end of the stream.
            on_cut_off: See `Consumer`. Default: `wake`.
            deliver: See `Consumer`. Default: `wake` is called.

        Raises:
            SourceError: The stream has ended, or has begun and refuses late consumers.
            TransportError: The stream cannot begin now. The next consumer may be able to begin it.
        """
        with self._lock:
            if self.has_ended:
                raise _stream_error(self._reason or f"the live stream {self.name!r} has ended", self._reference)
            if self._begin is None and self._live.late == "refuse":
                raise SourceError(
                    f'the live stream {self.name!r} has begun, and refuses late readers (Live(late="refuse"))'
                )
            consumer = Consumer(wake, on_cut_off or wake, deliver)
            consumer.enqueue(LiveMessage.inline(self._schema))
            for message in [message for messages in self._dictionaries.values() for message in messages]:
                consumer.enqueue(message)
            self._consumers.append(consumer)
            self._note_active()
            self._last = None
            if self._begin is not None and len(self._consumers) >= self._live.consumers:
                begin, self._begin = self._begin, None
                try:
                    begin(self)
                except BaseException as error:
                    self._consumers.remove(consumer)
                    self._note_active()
                    if isinstance(error, TransportError):
                        self._begin = begin  # for the next consumer
                    raise
            self._changed.notify_all()
            return consumer

    def take(self, consumer: Consumer, count: int = 1, nbytes: int = 0, maps: bool = False) -> list[LiveMessage]:
        """Take the next messages of `consumer`.

        Args:
            consumer: The consumer.
            count: The largest number of messages; an item of alike messages is not split.
            nbytes: The largest number of bytes of bodies, unless it is a single item.
            maps: Whether the consumer maps bodies in shared memory, so that their bytes do not count.

        Returns:
            The messages, in order; empty if none are waiting now.

        Raises:
            SourceError: The stream has ended with an error.
        """
        with self._lock:
            messages = consumer.take(count, nbytes, maps)
            if messages:
                self._last = None
                if self.waits_for_room:
                    self._changed.notify_all()
            elif consumer.reason is not None:
                raise _stream_error(consumer.reason, consumer.reference)
            return messages

    def free(self, consumer: Consumer, addresses: Collection[int]) -> None:
        """Free `addresses`, which `consumer` does not need any more. Unknown addresses are ignored."""
        if addresses:
            with self._lock:
                consumer.last_progress = time.monotonic()
                self._free(consumer, consumer.addresses.intersection(addresses))

    def stop(self, consumer: Consumer) -> None:
        """Give `consumer` nothing more. Memory that it was sent stays leased."""
        with self._lock:
            consumer.stopped = True
            self._note_active()
            self._discard_waiting(consumer)

    def detach(self, consumer: Consumer) -> None:
        """Cut `consumer` off. Memory that it was sent stays until it is freed, but no longer counts for the limit."""
        with self._lock:
            self._discard_waiting(consumer)
            if not consumer.cut_off:
                consumer.cut_off = True
                self._note_active()
                self._memory.exempt(consumer.addresses)
                self._changed.notify_all()

    def leave(self, consumer: Consumer, disconnected: bool = True) -> None:
        """Remove `consumer`, whose connection has ended, and release everything that it holds.

        Args:
            consumer: The consumer.
            disconnected: Whether the client is known to be gone, so that its memory can be released. Otherwise the
                memory that it may still map is not reused.
        """
        with self._lock:
            if not disconnected:
                self.detach(consumer)
                consumer.addresses.clear()
            if consumer in self._consumers:
                self._consumers.remove(consumer)
                self._note_active()
            consumer.deliver = None  # it may refer to an owner of the consumer
            self._discard_waiting(consumer)
            self._last_receivers = ()
            self._free(consumer, set(consumer.addresses))
            if not self._consumers:
                self._memory.trim()
            self._release_unused()

    def kept_bytes(self, consumer: Consumer) -> int | None:
        """Return the bytes that `consumer` still holds after it was cut off. None if it was not cut off."""
        with self._lock:
            return self._size_of(consumer) if consumer.cut_off else None

    def _free(self, consumer: Consumer, addresses: set[int]) -> None:
        """Release `addresses`, which `consumer` held. Call it with the lock held."""
        consumer.addresses -= addresses
        self._memory.free(addresses, consumer.cut_off)
        if self.waits_for_room:
            self._changed.notify_all()

    def _discard_waiting(self, consumer: Consumer) -> None:
        """Discard the messages that `consumer` has not taken yet. Call it with the lock held."""
        self._last = None
        self._free(consumer, consumer.discard_waiting())

    def _size_of(self, consumer: Consumer) -> int:
        """Return the bytes that `consumer` holds, alone or shared with others. Call it with the lock held."""
        return self._memory.size_of(consumer.addresses) + consumer.queued

    def _note_active(self) -> None:
        """Record which consumers are active. Call it with the lock held, after every change of that."""
        self._active = [consumer for consumer in self._consumers if consumer.active]

    # Messages

    def publish(self, message: SplitMessage | LargeBatch) -> bool:
        """Give the next message to every consumer, once there is room. Return whether the stream goes on.

        Afterwards, `take_waking` returns the consumers that wait for the message.
        """
        if isinstance(message, LargeBatch):
            length = message.size
        else:
            length = message.parsed.body_length
            if length <= SMALL_BODY:
                return self._publish_small(message)
        with self._lock:
            if not self._wait_for_consumers():
                return False
            region = self._memory.region(length)
            if region is None:
                raise SourceError(
                    f"the source of {self.name!r} gave a batch of {length} bytes, which exceeds the largest region"
                )
            if not self._wait_for_room(length):  # then the region may be closed
                return False
            self._busy = True
            at = region.reserve(length)
        # Written without the lock, which would delay consumers. Nobody else uses the reserved pages.
        begin = 0
        if isinstance(message, LargeBatch):
            message, begin = message.encode(region.memory(at, length))
        else:
            region.write(message.body or (), at)
        with self._lock:
            self._busy = False
            if self.has_ended:
                self._release_unused()
                return False
            header, parsed, _ = message
            extents = zip(*buffer_extents(header, parsed), strict=True)
            leased, addresses = region.lease(at, length, extents, len(self._active), begin)
            body = region.body(at + begin, parsed.body_length)
            queued = len(header) + QUEUED_OVERHEAD
            item = LiveMessage(header, parsed, (body,), queued, region, leased, addresses=addresses)
            self._hand_out(message, item)
            if not self._consumers:  # the last one left during the write, and `leave` could not trim this region
                self._memory.trim()
            return True

    def _publish_small(self, message: SplitMessage) -> bool:
        with self._lock:
            if self._follows(message):
                return True
            if not self._wait_for_consumers():
                return False
            self._wait_for_room(len(message.header) + message.parsed.body_length + QUEUED_OVERHEAD)
            self._hand_out(message, LiveMessage.inline(message))
            return not self.has_ended

    def take_waking(self) -> list[Consumer]:
        """Return the consumers that wait for the message that was published last, once."""
        waking, self._waking = self._waking, []
        return waking

    def _follows(self, message: SplitMessage) -> bool:
        """Append the message to the newest one, if the two are alike, no consumer has taken that, and there is room.

        Returns:
            Whether the message was appended.
        """
        last = self._last
        if last is None:
            return False
        if not self._room_for:
            if not self._has_room(_ROOM_BATCH * last.queued):
                return False
            self._room_for = _ROOM_BATCH
        if not last.append_alike(message):
            return False
        self._room_for -= 1
        for consumer in self._last_receivers:
            consumer.queued += last.queued
        return True

    def _hand_out(self, message: SplitMessage, item: LiveMessage) -> None:
        if self.has_ended:
            return
        if message.parsed.type is HeaderType.DICTIONARY_BATCH:
            add_dictionary(self._dictionaries, LiveMessage.inline(message))
        self._last, self._last_receivers, self._room_for = item, self._active, 0
        for consumer in self._last_receivers:
            while self._live.policy == "latest" and item.droppable and consumer.droppable:
                self._drop_oldest(consumer)
            consumer.addresses.update(item.addresses)
            if consumer.enqueue(item):
                self._waking.append(consumer)
        if self._live.policy == "latest":
            self._last = None  # a message that is appended to another could not be dropped alone

    def _wait_for_consumers(self) -> bool:
        """Wait until there is an active consumer. Call it with the lock held.

        Returns:
            False if the stream has ended, or no consumer is left and none may join.
        """
        while not self.has_ended:
            if self._active:
                return True
            if self._live.late == "refuse":
                return False
            self._changed.wait()
        return False

    def _wait_for_room(self, length: int) -> bool:
        """Wait for room for `length` bytes, or for the end of the stream. Call it with the lock held.

        Whenever `stall_timeout` passes, the stalled consumer that holds the most memory is cut off.

        Returns:
            False if the stream has ended.
        """
        if self._live.policy != "block":
            while not self._has_room(length):
                # Each queue is an end of the same stream, so the longest begins with the oldest batch.
                consumer = max(self._active, key=lambda candidate: candidate.droppable, default=None)
                if consumer is None or not consumer.droppable:
                    break
                self._drop_oldest(consumer)
        if self._has_room(length):
            return True
        patience = check_timeout(self._live.stall_timeout)  # which may be infinite
        since = time.monotonic()
        self.waits_for_room = True
        for consumer in self._active:
            consumer.wake()  # it may have frees that it has not taken yet
        while not self.has_ended and not self._has_room(length):
            if self._changed.wait(max(0.0, since + patience - time.monotonic())):
                continue
            stalled = [
                consumer
                for consumer in self._consumers
                if not consumer.cut_off and consumer.last_progress < since and self._size_of(consumer)
            ]
            if stalled:
                self._cut_off(max(stalled, key=self._size_of))
            since = time.monotonic()
        self.waits_for_room = False
        return not self.has_ended

    def _drop_oldest(self, consumer: Consumer) -> None:
        self._last = None
        self._free(consumer, consumer.drop_oldest())

    def _has_room(self, length: int) -> bool:
        """Return whether `length` more bytes may be held.

        Consumers share their waiting messages, so only the longest queue counts.
        """
        queued = 0
        for consumer in self._consumers:
            if consumer.queued > queued:
                queued = consumer.queued
        return self._memory.has_room(length, other_bytes=queued)

    def _cut_off(self, consumer: Consumer) -> None:
        _log.warning("consumer cut off, it neither took nor freed data in time: dataset=%r", self.name)
        self.detach(consumer)
        consumer.reason = (
            f"this reader of the live stream {self.name!r} held up the others for {self._live.stall_timeout:g} s: "
            "it was cut off. To keep more than the server's live_limit, read over tcp, or with bodies packed"
        )
        consumer.on_cut_off()

    # Ending

    def end(self, reason: str | None, reference: str | None) -> None:
        """End the stream after the last `publish`, which may have failed for a `reason`, with its name in the log.

        Consumers can still take their waiting messages.
        """
        with self._lock:
            self._busy = False
            self._end(reason, reference)
            self._release_unused()

    def _end(self, reason: str | None, reference: str | None = None) -> None:
        """End the stream. Consumers can still take their waiting messages. Call it with the lock held."""
        if self.has_ended:
            return
        self.has_ended, self._reason, self._reference = True, reason, reference
        self._last = None
        self._memory.retire()
        self._dictionaries.clear()
        for consumer in self._active:
            consumer.complete, consumer.reason, consumer.reference = reason is None, reason, reference
            consumer.wake()
        self._changed.notify_all()

    def _release_unused(self) -> None:
        if self.has_ended and not self._consumers and not self._busy:
            self._memory.close()

    def drop(self) -> None:
        """End the stream. Consumers can still take their waiting messages, and then receive an error."""
        with self._lock:
            self._end(f"the live stream {self.name!r} was dropped by whoever published it")
            self._release_unused()

    def close(self) -> None:
        """End the stream because the server closes. Memory that consumers have mapped stays readable."""
        with self._lock:
            for consumer in self._consumers:
                consumer.addresses.clear()  # so that no memory is released when they leave
            self._end(f"the server of the live stream {self.name!r} is closing")
            self._release_unused()


def _stream_error(reason: str, reference: str | None) -> SourceError:
    error = SourceError(reason)
    error.reference = reference
    return error
