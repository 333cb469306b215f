"""A live stream that is read once, for all of its consumers.

One thread, the pump, reads the source. It writes each body into shared memory once, and hands every consumer the same
messages. Each has its own place in the stream and its own leases; a body's memory goes back to the system when the last
consumer that was given it has freed it.

The pump waits for the slowest consumer while `limit` bytes are held, but not for one that neither takes nor frees
anything for `stall_timeout`: of these, the one that holds most is cut off. Its stream ends with the reason. What has
been sent to it stays as it is until it frees that or goes, beyond the limit.

A consumer that joins late gets the schema and the dictionaries as they are, and then what comes next.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection

import pyarrow as pa

from dissociated.codec.options import WriteOptions
from dissociated.codec.split import SplitMessage, Splitter, split
from dissociated.datasets.live import Live
from dissociated.datasets.live_message import QUEUED_OVERHEAD, SMALL_BODY, LiveMessage
from dissociated.datasets.source_errors import source_errors
from dissociated.errors import DissociatedError, SourceError, log_level, log_message, peer_message
from dissociated.format.layout import dictionary_of
from dissociated.format.message import HeaderType, buffer_extents
from dissociated.memory.live import LiveMemory

_log = logging.getLogger(__name__)

#: For so many small messages that follow one another room is made at once.
_ROOM_BATCH = 16


class Consumer:
    """One of the consumers of a fanout: its place in the stream, and what it holds. `leave` gives that back.

    `wake` is called, from the pump's thread, when there is something to take after there was nothing, or there will be
    nothing more; `on_cut_off` when it is cut off.
    """

    def __init__(self, fanout: Fanout, wake: Callable[[], None], on_cut_off: Callable[[], None]) -> None:
        self._fanout = fanout
        self.wake = wake
        self.on_cut_off = on_cut_off
        self.waiting: deque[LiveMessage] = deque()  # what it has not taken yet
        self.queued = 0  # bytes that these take outside of shared memory
        self.idle = False  # whether it found nothing to take
        self.held: set[int] = set()  # the addresses that it was given, waiting or sent
        self.stopped = False  # whether it wants nothing more
        self.cut_off = False  # whether it gets nothing more, and what it holds does not count
        self.reason: str | None = None  # why there will be no more, if that is an error
        self.ended = False  # whether all there is was given to it, to the regular end
        self.last_progress = time.monotonic()  # when it last took or freed something

    @property
    def finished(self) -> bool:
        """Whether it has taken everything there was, to the regular end."""
        return self.ended and not self.waiting

    def enqueue(self, item: LiveMessage) -> None:
        """Let it take `item` after all others. Call it with the fanout's `changed` held."""
        self.waiting.append(item)
        self.queued += item.queued * item.messages
        if self.idle:
            self.idle = False
            self.wake()

    def take(self, count: int = 1, nbytes: int = 0) -> list[LiveMessage]:
        """The next messages, up to `count` of them, and up to `nbytes` bytes of bodies where there are several.

        Empty where there are none now. Raises SourceError, which says why, where there will be no more.
        """
        taken: list[LiveMessage] = []
        waiting = self.waiting
        with self._fanout.changed:
            while waiting and count > 0 and (not taken or waiting[0].nbytes <= nbytes):
                item = waiting.popleft()
                taken.append(item)
                count -= item.messages
                nbytes -= item.nbytes
                self.queued -= item.queued * item.messages
            if taken:
                self.last_progress = time.monotonic()
                self._fanout.on_taken()
            elif self.reason is not None:
                raise SourceError(self.reason)
            self.idle = not taken
        return taken

    def free(self, addresses: Collection[int]) -> None:
        """It does not need these addresses any more."""
        if addresses:
            with self._fanout.changed:
                self.last_progress = time.monotonic()
                self._fanout.free(self, self.held.intersection(addresses))

    def stop(self) -> None:
        """It takes nothing more, and goes on holding what it was sent."""
        with self._fanout.changed:
            self.stopped = True
            self._fanout.forget(self)

    def detach(self) -> None:
        """It gets nothing more. What it was sent stays until it frees that, and does not count against the limit."""
        with self._fanout.changed:
            self._fanout.detach(self)

    def leave(self, disconnected: bool = True) -> None:
        """Its connection is over. If it is `disconnected`, what it holds is given back; else that is not used again."""
        with self._fanout.changed:
            if not disconnected:
                self._fanout.detach(self)
                self.held.clear()
            self._fanout.leave(self)

    @property
    def kept_bytes(self) -> int | None:
        """How much it holds, in bytes, if it was cut off; else None."""
        with self._fanout.changed:
            return self._fanout.size_of(self) if self.cut_off else None


class Fanout:
    """Reads `reader` once, for all consumers together: see the module. `name` is what they are told.

    `limit` is how many bytes of it may be held in shared memory. Close it after use.
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
        self._dictionaries: dict[int, list[LiveMessage]] = {}  # as they are: each with the deltas since
        self._memory = LiveMemory(name, limit)
        self._consumers: list[Consumer] = []
        self._pump: threading.Thread | None = None  # which reads, once it has begun
        # Not the error itself: its traceback would keep what its receiver holds.
        self._reason: str | None = None  # why there is nothing more, if that is not the source's end
        self._over = False  # nothing more will come
        self._busy = False  # the pump is using the memory
        self._full = False  # the pump waits for room
        self._last: LiveMessage | None = None  # what consumers were given last, while all of them have still to take it
        self._last_receivers: list[Consumer] = []
        self._room_for = 0  # messages that may follow it before it is asked again whether there is room
        #: Held by whoever looks at or changes what consumers have; notified when one comes, frees or goes.
        self.changed = threading.Condition()

    # Consumers

    def join(self, wake: Callable[[], None], on_cut_off: Callable[[], None] | None = None) -> Consumer:
        """Become a consumer. Raises SourceError where there is nothing more to be had, or not for who comes late."""
        with self.changed:
            if self._over:
                raise SourceError(self._reason or f"the live stream {self.name!r} has ended")
            if self._pump is not None and self._live.late == "refuse":
                raise SourceError(f"the live stream {self.name!r} has begun, and takes nobody who comes later")
            consumer = Consumer(self, wake, on_cut_off or wake)
            for item in (
                LiveMessage.inline(self._schema),
                *(one for items in self._dictionaries.values() for one in items),
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
        """Give back everything that `consumer` holds. It takes nothing any more. Call it with `changed` held."""
        if consumer in self._consumers:
            self._consumers.remove(consumer)
        self.forget(consumer)
        self.free(consumer, set(consumer.held))
        self._release_unused()

    def free(self, consumer: Consumer, addresses: set[int]) -> None:
        """`consumer` does not hold these any more. Call it with `changed` held."""
        consumer.held -= addresses
        self._memory.free(addresses, consumer.cut_off)
        self.changed.notify_all()

    def forget(self, consumer: Consumer) -> None:
        """`consumer` does not get what it has not taken yet. Call it with `changed` held."""
        unsent = {address for item in consumer.waiting for address in item.addresses}
        self._last = None
        consumer.waiting.clear()
        consumer.queued = 0
        self.free(consumer, unsent)

    def on_taken(self) -> None:
        """A consumer has taken something. Call it with `changed` held."""
        self._last = None
        if self._full:
            self.changed.notify_all()

    def detach(self, consumer: Consumer) -> None:
        """`consumer` gets nothing more, and what it holds counts no more. Call it with `changed` held."""
        self.forget(consumer)
        if not consumer.cut_off:
            consumer.cut_off = True
            self._memory.exempt(consumer.held)
            self.changed.notify_all()

    def size_of(self, consumer: Consumer) -> int:
        """How much memory it holds, in bytes, alone or with others. Call it with `changed` held."""
        return self._memory.size_of(consumer.held) + consumer.queued

    @property
    def _active_consumers(self) -> list[Consumer]:
        return [consumer for consumer in self._consumers if not (consumer.cut_off or consumer.stopped)]

    # The pump

    def _run(self) -> None:
        reader, self._reader = self._reader, None
        reason: str | None = None
        try:
            with source_errors(self.name):
                messages = split(reader, self._options)
                del reader
                next(messages)  # the schema, which consumers have
                for message in messages:
                    if not self._publish(message):
                        break
        except DissociatedError as error:
            reason = peer_message(error)
            _log.log(log_level(error), "%r: %s", self.name, log_message(error))
        except BaseException:
            reason = f"the live stream {self.name!r} failed for a reason that the server's log tells"
            _log.exception("%r: a live stream failed for a reason of ours", self.name)
        finally:
            messages = None  # type: ignore[assignment]  # with it goes the source
            with self.changed:
                self._busy = False
                self._end(reason)
                self._release_unused()

    def _publish(self, message: SplitMessage) -> bool:
        """Give the next message to every consumer. Whether there is somebody to take more."""
        length = message.parsed.body_length
        if length <= SMALL_BODY:
            with self.changed:
                if self._follows(message):
                    return True
                if not self._wait_for_consumers():
                    return False
                self._wait_for_room(len(message.header) + length + QUEUED_OVERHEAD)
                self._hand_out(message, LiveMessage.inline(message))
                return not self._over
        with self.changed:
            if not self._wait_for_consumers():
                return False
            region = self._memory.region(length)
            if region is None:
                raise SourceError(f"the source of {self.name!r} gave a batch of {length} bytes, which no region takes")
            self._wait_for_room(length)
            self._busy = True
        region.write(message.body or ())  # without holding up consumers meanwhile: only the pump writes
        with self.changed:
            self._busy = False
            if self._over:
                self._release_unused()
                return False
            extents = zip(*buffer_extents(message.header, message.parsed), strict=True)
            body = region.body(region.offset, length)
            leased = region.lease(length, extents, len(self._active_consumers))
            queued = len(message.header) + QUEUED_OVERHEAD
            self._hand_out(message, LiveMessage(message.header, message.parsed, (body,), queued, region, leased))
            return True

    def _follows(self, message: SplitMessage) -> bool:
        """Append the message to what consumers were given last, if it is alike, not taken yet, and there is room."""
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
        if self._over:
            return
        if message.parsed.type is HeaderType.DICTIONARY_BATCH:
            id_, is_delta = dictionary_of(message.header)
            earlier = self._dictionaries.get(id_, []) if is_delta else []
            self._dictionaries[id_] = [*earlier, LiveMessage.inline(message)]
        self._last, self._last_receivers, self._room_for = item, self._active_consumers, 0
        addresses = item.addresses
        for consumer in self._last_receivers:
            consumer.held |= addresses
            consumer.enqueue(item)

    def _wait_for_consumers(self) -> bool:
        """Whether there is somebody to give messages to, before the stream is over. Call it with `changed` held."""
        while not self._over:
            for one in self._consumers:
                if not (one.cut_off or one.stopped):
                    return True
            if self._live.late == "refuse":
                return False
            self.changed.wait()
        return False

    def _wait_for_room(self, length: int) -> None:
        """Wait for room, or the end of the stream. Cuts off those who hold it up. Call it with `changed` held."""
        if self._has_room(length):
            return
        patience = self._live.stall_timeout
        since = time.monotonic()
        self._full = True
        while not self._over and not self._has_room(length):
            if self.changed.wait(max(0.0, since + patience - time.monotonic())):
                continue
            stalled = [
                one for one in self._consumers if not one.cut_off and one.last_progress < since and self.size_of(one)
            ]
            if stalled:
                self._cut_off(max(stalled, key=self.size_of))
            since = time.monotonic()
        self._full = False

    def _has_room(self, length: int) -> bool:
        """Whether `length` bytes more may be held. What waits is the same for all, so it counts once."""
        queued = 0
        for one in self._consumers:
            queued = max(queued, one.queued)
        return self._memory.has_room(length, other_bytes=queued)

    def _cut_off(self, consumer: Consumer) -> None:
        _log.warning("%r: a consumer neither took nor freed anything in time, and is cut off", self.name)
        self.detach(consumer)
        consumer.reason = (
            f"this reader of the live stream {self.name!r} held up the others for {self._live.stall_timeout:g} s: "
            "it was cut off. To keep more than the server's live_limit, read over tcp, or with bodies packed"
        )
        consumer.on_cut_off()

    # The end

    def _end(self, reason: str | None) -> None:
        """Nothing more comes; consumers still take what they have been given. Call it with `changed` held."""
        if self._over:
            return
        self._over, self._reason = True, reason
        self._last = None
        self._dictionaries.clear()
        for consumer in self._active_consumers:
            consumer.ended, consumer.reason = reason is None, reason
            consumer.wake()
        self.changed.notify_all()

    def _release_unused(self) -> None:
        if self._over and not self._consumers and not self._busy:
            self._memory.close()

    def drop(self) -> None:
        """End the stream: consumers take what they have been given, and then get to know why there is no more.

        The pump ends with the source's next batch: it cannot be called back from there.
        """
        with self.changed:
            self._end(f"the live stream {self.name!r} was dropped by whoever published it")
            if self._pump is None:
                self._reader = None
            self._release_unused()

    def close(self) -> None:
        """The same before consumers are sent away: what they have mapped stays readable."""
        with self.changed:
            for consumer in self._consumers:
                consumer.held.clear()  # so nothing more is punched out
            self.drop()

    def join_pump(self, timeout: float) -> None:
        """Wait for the pump to end: for up to `timeout` seconds, since nobody can hurry its source."""
        if self._pump is not None:
            self._pump.join(timeout)
