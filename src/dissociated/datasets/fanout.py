"""The fan-out of a live stream: its source is read once, and its messages are sent to all consumers.

A thread called the pump reads the source. It writes each body into shared memory once, and gives the same messages to
every consumer. Each consumer has its own position in the stream and its own leases. The memory of a body is used again
when the last consumer that was given the body has freed it.

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
from collections import deque
from collections.abc import Callable, Collection, Hashable
from typing import Any, TypeAlias

import pyarrow as pa

from dissociated.codec.options import WriteOptions
from dissociated.codec.split import SplitMessage, Splitter, split
from dissociated.datasets.live import Live
from dissociated.datasets.live_message import QUEUED_OVERHEAD, SMALL_BODY, LiveMessage
from dissociated.datasets.source_errors import source_errors
from dissociated.errors import DissociatedError, SourceError, log_level, log_message
from dissociated.format.layout import dictionary_of
from dissociated.format.message import HeaderType, buffer_extents
from dissociated.memory.live import LiveMemory

_log = logging.getLogger(__name__)

#: Number of small messages for which the room is checked at once when they follow one another.
_ROOM_BATCH = 16
#: Factor by which the time of the last delivery shrinks with each message that was not delivered by the pump.
_FORGETTING = 0.9


#: Encoded messages, by everything that they depend on.
Encodings: TypeAlias = dict[Hashable, Any]
Deliver: TypeAlias = Callable[[Encodings], None]


class Consumer:
    """A consumer of a fan-out, with its position in the stream and the memory that it holds. Call `leave` after use.

    The pump's thread calls `wake` when a message or the end of the stream arrives for a consumer that found nothing to
    take, and `on_cut_off` when the consumer is cut off. If the source leaves the time, the pump calls `deliver` in
    place of `wake`: it may take and send messages in the pump's thread, without waiting. Its argument has the encodings
    of messages that earlier consumers were sent in the same turn.
    """

    def __init__(
        self, fanout: Fanout, wake: Callable[[], None], on_cut_off: Callable[[], None], deliver: Deliver | None
    ) -> None:
        self._fanout = fanout
        self.wake = wake
        self.on_cut_off = on_cut_off
        self.deliver = deliver  # None: `wake` is called
        self.waiting: deque[LiveMessage] = deque()  # messages that the consumer has not taken yet
        self.queued = 0  # bytes of the waiting messages outside of shared memory
        self.droppable = 0  # number of waiting items that may be dropped
        self.missed = 0  # number of batches that were dropped
        self.missed_before = 0  # how many of them came before the last messages that were taken
        self.idle = False  # whether the last `take` found no message
        self.addresses: set[int] = set()  # addresses that the consumer holds, in waiting and in taken messages
        self.stopped = False  # whether the consumer receives nothing more at its own request
        self.cut_off = False  # whether it was cut off: it receives nothing more, and its memory does not count
        self.reason: str | None = None  # the error that ended its stream
        self.reference: str | None = None  # the name of that error in the log
        self.complete = False  # whether the stream has ended regularly and its last message was enqueued
        self.last_progress = time.monotonic()  # the time at which it last took or freed something

    @property
    def finished(self) -> bool:
        """Whether the consumer has taken all messages up to the regular end of the stream."""
        return self.complete and not self.waiting

    def enqueue(self, item: LiveMessage) -> None:
        """Append `item` to the waiting messages. Call it with the fan-out's `changed` held.

        The caller wakes the consumers in the fan-out's `waking` once it holds `changed` no more.
        """
        self.waiting.append(item)
        self.queued += item.queued * item.messages
        self.droppable += item.droppable
        if self.idle:
            self.idle = False
            self._fanout.waking.append(self)

    def take(self, count: int = 1, nbytes: int = 0, maps: bool = False) -> list[LiveMessage]:
        """Take the next messages.

        Args:
            count: the largest number of messages; an item of alike messages is not split.
            nbytes: the largest number of bytes of bodies, unless it is a single item.
            maps: whether the consumer maps bodies in shared memory, so that their bytes do not count.

        Returns:
            The messages, in order; empty if none are waiting now.

        Raises:
            SourceError: if the stream has ended with an error.
        """
        messages: list[LiveMessage] = []
        waiting = self.waiting
        with self._fanout.changed:
            while waiting and count > 0:
                item = waiting[0]
                size = 0 if maps and item.region is not None else item.nbytes
                if messages and size > nbytes:
                    break
                messages.append(waiting.popleft())
                count -= item.messages
                nbytes -= size
                self.queued -= item.queued * item.messages
                self.droppable -= item.droppable
            if messages:
                self.missed_before = self.missed  # the oldest messages are dropped, so all came before these
                self.last_progress = time.monotonic()
                self._fanout.on_taken()
            elif self.reason is not None:
                raise _stream_error(self.reason, self.reference)
            self.idle = not messages
        return messages

    def drop_oldest(self) -> set[int]:
        """Drop the oldest waiting item that is droppable. Call it with the fan-out's `changed` held.

        Dictionaries that waited before it go to the front of the queue, each once, with its deltas.

        Returns:
            The addresses that the consumer does not need any more.
        """
        popped: list[LiveMessage] = []
        while not (popped and popped[-1].droppable):
            popped.append(self.waiting.popleft())
        self.droppable -= 1
        self.missed += popped[-1].messages
        remaining: list[LiveMessage] = []
        dictionaries: dict[int, list[LiveMessage]] = {}
        for item in popped[:-1]:
            if item.parsed.type is HeaderType.DICTIONARY_BATCH:
                _add_dictionary(dictionaries, item)
            else:
                remaining.append(item)
        remaining += [item for items in dictionaries.values() for item in items]
        self.waiting.extendleft(reversed(remaining))
        self.queued += _queued_bytes(remaining) - _queued_bytes(popped)
        return _addresses(popped) - _addresses(remaining)

    def free(self, addresses: Collection[int]) -> None:
        """Free `addresses`, which the consumer does not need any more. Unknown addresses are ignored."""
        if addresses:
            with self._fanout.changed:
                self.last_progress = time.monotonic()
                self._fanout.free(self, self.addresses.intersection(addresses))

    def stop(self) -> None:
        """Give the consumer nothing more. Memory that it was sent stays leased."""
        with self._fanout.changed:
            self.stopped = True
            self._fanout.forget(self)

    def detach(self) -> None:
        """Cut the consumer off. Memory that it was sent stays until it is freed, but no longer counts for the limit."""
        with self._fanout.changed:
            self._fanout.detach(self)

    def leave(self, disconnected: bool = True) -> None:
        """Remove the consumer, whose connection has ended.

        Args:
            disconnected: whether the client is known to be gone, so that its memory can be released. Otherwise the
                memory that it may still map is not reused.
        """
        with self._fanout.changed:
            if not disconnected:
                self._fanout.detach(self)
                self.addresses.clear()
            self._fanout.leave(self)

    @property
    def kept_bytes(self) -> int | None:
        """The bytes that the consumer still holds after it was cut off. None if it was not cut off."""
        with self._fanout.changed:
            return self._fanout.size_of(self) if self.cut_off else None


class Fanout:
    """The fan-out of one reader to all consumers: see the module. Close it after use.

    Error messages call the stream `name`. At most `limit` bytes of it are held in shared memory.
    """

    def __init__(
        self, name: str, reader: pa.RecordBatchReader, live: Live, limit: int, options: WriteOptions | None = None
    ) -> None:
        self.name = name
        self._reader: pa.RecordBatchReader | None = reader
        self._live = live
        self._options = options
        self._schema = Splitter(reader.schema, options).schema_message
        self.schema_header = self._schema.header
        self._dictionaries: dict[int, list[LiveMessage]] = {}  # the current dictionary of each id, and its deltas
        self._memory = LiveMemory(name, limit)
        self._consumers: list[Consumer] = []
        self.waking: list[Consumer] = []  # consumers that the pump wakes next
        self._pump: threading.Thread | None = None  # the thread that reads, once it was started
        self._delivery_time = 0.0  # seconds of processor time for which the pump has last delivered a message
        # The text of the error that ended the stream. The error itself would keep alive, through its traceback, all
        # objects of the functions that it passed.
        self._reason: str | None = None
        self._reference: str | None = None  # the name of that error in the log
        self.has_ended = False  # whether the stream has ended
        self._busy = False  # whether the pump is writing to the memory
        self._full = False  # whether the pump waits for room
        self._last: LiveMessage | None = None  # the newest message, until any consumer has taken it
        self._last_receivers: list[Consumer] = []
        self._room_for = 0  # number of alike messages that may follow the newest one before room is checked again
        #: Guards the state of all consumers. It is notified when a consumer joins, takes, frees or leaves.
        self.changed = threading.Condition()

    # Consumers

    def join(
        self,
        wake: Callable[[], None],
        on_cut_off: Callable[[], None] | None = None,
        deliver: Deliver | None = None,
    ) -> Consumer:
        """Add a consumer. The pump starts when the required number of consumers has joined.

        Args:
            wake: see `Consumer`.
            on_cut_off: see `Consumer`. Default: `wake`.
            deliver: see `Consumer`. Default: `wake` is called.

        Raises:
            SourceError: if the stream has ended, or has begun and refuses late consumers.
        """
        with self.changed:
            if self.has_ended:
                raise _stream_error(self._reason or f"the live stream {self.name!r} has ended", self._reference)
            if self._pump is not None and self._live.late == "refuse":
                raise SourceError(
                    f'the live stream {self.name!r} has begun, and refuses late readers (Live(late="refuse"))'
                )
            consumer = Consumer(self, wake, on_cut_off or wake, deliver)
            for item in (
                LiveMessage.inline(self._schema),
                *(message for messages in self._dictionaries.values() for message in messages),
            ):
                consumer.enqueue(item)
            self._consumers.append(consumer)
            self._last = None
            if self._pump is None and len(self._consumers) >= self._live.consumers:
                self._pump = threading.Thread(target=self._run, name=f"live {self.name}", daemon=True)
                self._pump.start()
            self.changed.notify_all()
            return consumer

    def leave(self, consumer: Consumer) -> None:
        """Remove `consumer`, and release everything that it holds. Call it with `changed` held."""
        if consumer in self._consumers:
            self._consumers.remove(consumer)
        consumer.deliver = None  # it may refer to an owner of the consumer
        self.forget(consumer)
        self._last_receivers = []  # they refer to this object
        self.free(consumer, set(consumer.addresses))
        if not self._consumers:
            self._memory.trim()
        self._release_unused()

    def free(self, consumer: Consumer, addresses: set[int]) -> None:
        """Release `addresses`, which `consumer` held. Call it with `changed` held."""
        consumer.addresses -= addresses
        self._memory.free(addresses, consumer.cut_off)
        self.changed.notify_all()

    def forget(self, consumer: Consumer) -> None:
        """Discard the messages that `consumer` has not taken yet. Call it with `changed` held."""
        unsent = _addresses(consumer.waiting)
        self._last = None
        consumer.waiting.clear()
        consumer.queued = consumer.droppable = 0
        self.free(consumer, unsent)

    def on_taken(self) -> None:
        """Record that a consumer has taken messages. Call it with `changed` held."""
        self._last = None
        if self._full:
            self.changed.notify_all()

    def detach(self, consumer: Consumer) -> None:
        """Cut `consumer` off, and exempt its memory from the limit. Call it with `changed` held."""
        self.forget(consumer)
        if not consumer.cut_off:
            consumer.cut_off = True
            self._memory.exempt(consumer.addresses)
            self.changed.notify_all()

    def size_of(self, consumer: Consumer) -> int:
        """Return the bytes that `consumer` holds, alone or shared with others. Call it with `changed` held."""
        return self._memory.size_of(consumer.addresses) + consumer.queued

    @property
    def _active_consumers(self) -> list[Consumer]:
        return [consumer for consumer in self._consumers if not (consumer.cut_off or consumer.stopped)]

    # The pump

    def _run(self) -> None:
        reader, self._reader = self._reader, None
        reason = reference = None
        try:
            with source_errors(self.name):
                messages = split(reader, self._options)
                del reader
                next(messages)  # the schema, which consumers received when they joined
                requested = time.monotonic()
                for message in messages:
                    leisure = time.monotonic() - requested
                    goes_on = self._publish(message)
                    self._wake_consumers(leisure)
                    if not goes_on:
                        break
                    requested = time.monotonic()
        except DissociatedError as error:
            reason, reference = error.peer_reason or str(error), error.reference
            _log.log(log_level(error), "live stream failed: dataset=%r error=%s", self.name, log_message(error))
        except BaseException:
            reason = f"the live stream {self.name!r} failed: see the log of the server"
            _log.exception("live stream failed, internal error: dataset=%r", self.name)
        finally:
            messages = None  # type: ignore[assignment]  # releases the source
            with self.changed:
                self._busy = False
                self._end(reason, reference)
                self._release_unused()

    def _wake_consumers(self, leisure: float) -> None:
        """Have the newest message sent to consumers that wait for it. The source has taken `leisure` seconds for it.

        If sending takes less time than that, this thread sends: handing over to a thread for each consumer costs more.
        Otherwise the threads of the consumers send, several messages at a time. Processor time is compared, since this
        thread may be suspended. Do not call this while `changed` is held, which a consumer needs as soon as it wakes.
        """
        if not self.waking:
            return
        waking, self.waking = self.waking, []
        if leisure < self._delivery_time:
            self._delivery_time *= _FORGETTING  # so that a single slow delivery does not decide for ever
            for consumer in waking:
                consumer.wake()
            return
        began = time.thread_time()
        encodings: Encodings = {}
        for consumer in waking:
            deliver = consumer.deliver  # copied, because another thread may reset it
            if deliver is None:
                consumer.wake()
            else:
                deliver(encodings)
        self._delivery_time = time.thread_time() - began

    def _publish(self, message: SplitMessage) -> bool:
        """Give the next message to every consumer. Return whether the stream goes on."""
        length = message.parsed.body_length
        if length <= SMALL_BODY:
            with self.changed:
                if self._follows(message):
                    return True
                if not self._wait_for_consumers():
                    return False
                self._wait_for_room(len(message.header) + length + QUEUED_OVERHEAD)
                self._hand_out(message, LiveMessage.inline(message))
                return not self.has_ended
        with self.changed:
            if not self._wait_for_consumers():
                return False
            region = self._memory.region(length)
            if region is None:
                raise SourceError(
                    f"the source of {self.name!r} gave a batch of {length} bytes, which exceeds the largest region"
                )
            self._wait_for_room(length)
            self._busy = True
            at = region.reserve(length)
        # Written without holding `changed`, which would delay consumers. Nobody else uses the reserved pages.
        region.write(message.body or (), at)
        with self.changed:
            self._busy = False
            if self.has_ended:
                self._release_unused()
                return False
            extents = zip(*buffer_extents(message.header, message.parsed), strict=True)
            body = region.body(at, length)
            leased = region.lease(at, length, extents, len(self._active_consumers))
            queued = len(message.header) + QUEUED_OVERHEAD
            self._hand_out(message, LiveMessage(message.header, message.parsed, (body,), queued, region, leased))
            if not self._consumers:  # the last one left during the write, and `leave` could not trim this region
                self._memory.trim()
            return True

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
            _add_dictionary(self._dictionaries, LiveMessage.inline(message))
        self._last, self._last_receivers, self._room_for = item, self._active_consumers, 0
        addresses = item.addresses
        for consumer in self._last_receivers:
            while self._live.policy == "latest" and item.droppable and consumer.droppable:
                self._drop_oldest(consumer)
            consumer.addresses |= addresses
            consumer.enqueue(item)
        if self._live.policy == "latest":
            self._last = None  # a message that is appended to another could not be dropped alone

    def _wait_for_consumers(self) -> bool:
        """Wait until there is an active consumer. Call it with `changed` held.

        Returns:
            False if the stream has ended, or no consumer is left and none may join.
        """
        while not self.has_ended:
            for consumer in self._consumers:
                if not (consumer.cut_off or consumer.stopped):
                    return True
            if self._live.late == "refuse":
                return False
            self.changed.wait()
        return False

    def _wait_for_room(self, length: int) -> None:
        """Wait for room for `length` bytes, or for the end of the stream. Call it with `changed` held.

        Whenever `stall_timeout` passes, the stalled consumer that holds the most memory is cut off.
        """
        if self._live.policy != "block":
            while not self._has_room(length):
                # Each queue is an end of the same stream, so the longest begins with the oldest batch.
                consumer = max(self._active_consumers, key=lambda candidate: candidate.droppable, default=None)
                if consumer is None or not consumer.droppable:
                    break
                self._drop_oldest(consumer)
        if self._has_room(length):
            return
        patience = self._live.stall_timeout
        since = time.monotonic()
        self._full = True
        while not self.has_ended and not self._has_room(length):
            if self.changed.wait(max(0.0, since + patience - time.monotonic())):
                continue
            stalled = [
                consumer
                for consumer in self._consumers
                if not consumer.cut_off and consumer.last_progress < since and self.size_of(consumer)
            ]
            if stalled:
                self._cut_off(max(stalled, key=self.size_of))
            since = time.monotonic()
        self._full = False

    def _drop_oldest(self, consumer: Consumer) -> None:
        self._last = None
        self.free(consumer, consumer.drop_oldest())

    def _has_room(self, length: int) -> bool:
        """Return whether `length` more bytes may be held.

        Consumers share their waiting messages, so only the longest queue counts.
        """
        queued = 0
        for consumer in self._consumers:
            queued = max(queued, consumer.queued)
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

    def _end(self, reason: str | None, reference: str | None = None) -> None:
        """End the stream. Consumers can still take their waiting messages. Call it with `changed` held."""
        if self.has_ended:
            return
        self.has_ended, self._reason, self._reference = True, reason, reference
        self._last = None
        self._memory.retire()
        self._dictionaries.clear()
        for consumer in self._active_consumers:
            consumer.complete, consumer.reason, consumer.reference = reason is None, reason, reference
            consumer.wake()
        self.changed.notify_all()

    def _release_unused(self) -> None:
        if self.has_ended and not self._consumers and not self._busy:
            self._memory.close()

    def drop(self) -> None:
        """End the stream. Consumers can still take their waiting messages, and then receive an error.

        The pump ends only when the source gives its next batch, since reading cannot be interrupted.
        """
        with self.changed:
            self._end(f"the live stream {self.name!r} was dropped by whoever published it")
            if self._pump is None:
                self._reader = None
            self._release_unused()

    def close(self) -> None:
        """End the stream because the server closes. Memory that consumers have mapped stays readable."""
        with self.changed:
            for consumer in self._consumers:
                consumer.addresses.clear()  # so that no memory is released when they leave
            self.drop()

    def join_pump(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for the pump to end. It may be blocked in the source for longer."""
        if self._pump is not None:
            self._pump.join(timeout)


def _queued_bytes(items: Collection[LiveMessage]) -> int:
    return sum([item.queued * item.messages for item in items])


def _addresses(items: Collection[LiveMessage]) -> set[int]:
    return {address for item in items for address in item.addresses}


def _add_dictionary(dictionaries: dict[int, list[LiveMessage]], item: LiveMessage) -> None:
    """Add a dictionary, or a delta of one, to the current dictionaries by their ids."""
    id_, is_delta = dictionary_of(item.header)
    dictionaries[id_] = [*(dictionaries.get(id_, []) if is_delta else []), item]


def _stream_error(reason: str, reference: str | None) -> SourceError:
    error = SourceError(reason)
    error.reference = reference
    return error
