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
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import pyarrow as pa

from dissociated.buffers import Buffer
from dissociated.codec.columns import only, selected
from dissociated.codec.join import Messages, join
from dissociated.codec.options import WriteOptions, given
from dissociated.codec.split import SplitMessage, Splitter, split
from dissociated.datasets.base import Dataset, Source
from dissociated.datasets.blame import source_blamed
from dissociated.datasets.sources import open_source
from dissociated.errors import DissociatedError, OptionError, SourceError, told
from dissociated.format.layout import dictionary_of
from dissociated.format.message import Header, HeaderType, buffer_extents
from dissociated.format.projection import Projection
from dissociated.memory.live import LiveMemory, LiveRegion

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Live:
    """How clients share a stream that is read once. Raises OptionError for values that make no sense."""

    #: What becomes of clients that come when it has begun: they "join" where it is, or are told to go: "refuse".
    late: Literal["join", "refuse"] = "join"
    #: How many clients must be there before it begins.
    consumers: int = 1
    #: Seconds for which a client that neither takes nor frees anything may hold up all others.
    stall_timeout: float = 10.0

    def __post_init__(self) -> None:
        if self.late not in ("join", "refuse"):
            raise OptionError(f'late is "join" or "refuse", not {self.late!r}')
        if self.consumers < 1:
            raise OptionError(f"a live stream begins with one consumer or more, not {self.consumers}")
        if not self.stall_timeout > 0:
            raise OptionError(f"stall_timeout is a positive number of seconds, not {self.stall_timeout}")


#: Bodies of up to this many bytes travel inline: to share one costs more than to copy it, and takes whole pages.
SMALL = 1 << 14
#: Bytes that keeping a message takes beside its own.
_OVERHEAD = 256
#: So many messages go together at most, and so many bytes where there is more than one.
AT_ONCE = 1 << 13
BYTES_AT_ONCE = 1 << 20
#: Messages that are alike but for their bodies wait together if they have at most so many bytes.
_MAX_ALIKE = 1 << 11
#: For so many of them room is made at once.
_ROOM = 16


class Part(NamedTuple):
    """A message for consumers: its body in parts, and the extents of its buffers in `region`, if it lies there.

    Of a small one, `more` are the bodies of those that follow it and are alike but for that.
    """

    header: bytes
    parsed: Header
    body: Sequence[Buffer] | None
    queued: int = 0  # bytes that each takes, outside of shared memory, while it waits
    region: LiveRegion | None = None
    extents: Sequence[tuple[int, int]] = ()
    more: list[bytes] | None = None

    @classmethod
    def inline(cls, message: SplitMessage) -> Part:
        """The message with its body in memory of its own."""
        header, parsed, body = message
        size = len(header) + parsed.body_length
        parts = None if body is None else (b"".join(body),) if body else ()
        may_be_followed = parts and parsed.type is HeaderType.RECORD_BATCH and size <= _MAX_ALIKE
        return cls(header, parsed, parts, size + _OVERHEAD, more=[] if may_be_followed else None)

    def follow(self, message: SplitMessage) -> bool:
        """Take `message` for the next, if it is alike."""
        more = self.more
        if more is None or message.header != self.header:
            return False
        if len(more) >= AT_ONCE - 1 or (len(more) + 2) * self.queued > BYTES_AT_ONCE:
            return False
        more.append(b"".join(message.body or ()))
        return True

    @property
    def messages(self) -> int:
        """How many these are."""
        return 1 + len(self.more) if self.more else 1

    @property
    def nbytes(self) -> int:
        """Bytes of their bodies."""
        return self.messages * self.parsed.body_length

    @property
    def bodies(self) -> list[Buffer]:
        """Those of messages that are alike, each in one piece."""
        return [*(self.body or ()), *(self.more or ())]

    def each(self) -> Iterable[Part]:
        """The messages one by one."""
        return [self._replace(body=(body,), more=None) for body in self.bodies] if self.more else (self,)

    @property
    def addresses(self) -> set[int]:
        """What whoever is given this holds."""
        return {address for address, length in self.extents if length} if self.extents else set()


class Consumer:
    """One of the consumers of a broadcast: its place in the stream, and what it holds. `leave` gives that back.

    `wake` is called, from the pump's thread, when there is something to take after there was nothing, or there will be
    nothing more; `cut` when it is cut off.
    """

    def __init__(self, broadcast: Broadcast, wake: Callable[[], None], cut: Callable[[], None]) -> None:
        self._broadcast = broadcast
        self.wake = wake
        self.cut = cut
        self.waiting: deque[Part] = deque()
        self.queued = 0  # bytes that these take outside of shared memory
        self.idle = False  # whether it found nothing to take
        self.held: set[int] = set()  # what it was given, waiting or sent
        self.stopped = False  # whether it wants nothing more
        self.kept = False  # whether it is cut off, so that what it holds does not count
        self.reason: str | None = None  # why there will be no more
        self.ended = False  # nothing more comes
        self.moved = time.monotonic()  # when it last took or freed something

    @property
    def over(self) -> bool:
        """Whether it has taken everything there was, to the regular end."""
        return self.ended and not self.waiting

    def give(self, part: Part) -> None:
        """Let it take `part` after all others. Call it with the broadcast's `changed` held."""
        self.waiting.append(part)
        self.queued += part.queued * part.messages
        if self.idle:
            self.idle = False
            self.wake()

    def take(self, count: int = 1, nbytes: int = 0) -> list[Part]:
        """The next messages, until these are `count`, or have bodies of `nbytes` together.

        None where there are none now. Raises SourceError: why there will be no more.
        """
        taken: list[Part] = []
        waiting = self.waiting
        with self._broadcast.changed:
            while waiting and count > 0 and (not taken or waiting[0].nbytes <= nbytes):
                part = waiting.popleft()
                taken.append(part)
                count -= part.messages
                nbytes -= part.nbytes
                self.queued -= part.queued * part.messages
            if taken:
                self.moved = time.monotonic()
                self._broadcast.taken()
            elif self.reason is not None:
                raise SourceError(self.reason)
            self.idle = not taken
        return taken

    def free(self, addresses: Collection[int]) -> None:
        """It does not need these any more."""
        if addresses:
            with self._broadcast.changed:
                self.moved = time.monotonic()
                self._broadcast.give_back(self, self.held.intersection(addresses))

    def stop(self) -> None:
        """It takes nothing more, and goes on holding what it was sent."""
        with self._broadcast.changed:
            self.stopped = True
            self._broadcast.forget(self)

    def set_aside(self) -> None:
        """It gets nothing more. What it was sent stays until it frees that, and does not count against the limit."""
        with self._broadcast.changed:
            self._broadcast.set_aside(self)

    def leave(self, gone: bool = True) -> None:
        """Its connection is over. If it is `gone`, everything it holds is given back; else that is not used again."""
        with self._broadcast.changed:
            if not gone:
                self._broadcast.set_aside(self)
                self.held.clear()
            self._broadcast.leave(self)

    @property
    def kept_bytes(self) -> int | None:
        """How much it holds, in bytes, if it was cut off; else None."""
        with self._broadcast.changed:
            return self._broadcast.size_of(self) if self.kept else None


class Broadcast(Dataset):
    """A source that is read once, by all clients together: see the module.

    `limit` is how many bytes of it may be held in shared memory. Close it after use.
    """

    divisible = False  # each connection has its own place in the stream

    def __init__(self, name: str, source: Source, live: Live, limit: int, options: WriteOptions | None = None) -> None:
        if not isinstance(live, Live):
            raise OptionError(f"live is a dissociated.Live, not {live!r}")
        given(options, WriteOptions)
        self._reader: pa.RecordBatchReader | None = open_source(name, source)
        super().__init__(name, self._reader.schema)
        self._live = live
        self._options = options
        self._schema = Splitter(self.schema, options).schema_message
        self.schema_header = self._schema.header
        self._dictionaries: dict[int, list[Part]] = {}  # as they are: each with the deltas since
        self._memory = LiveMemory(name, limit)
        self._consumers: list[Consumer] = []
        #: The thread that reads, once it has begun.
        self.pump: threading.Thread | None = None
        # Not the error itself: its traceback would keep what its receiver holds.
        self._reason: str | None = None  # why there is nothing more, if that is not the source's end
        self._over = False  # nothing more will come
        self._busy = False  # the pump is using the memory
        self._full = False  # the pump waits for room
        self._last: Part | None = None  # what consumers were given last, while all of them have still to take it
        self._have_last: list[Consumer] = []
        self._room_for = 0  # messages that may follow it before it is asked again whether there is room
        #: Held by whoever looks at or changes what consumers have; notified when one comes, frees or goes.
        self.changed = threading.Condition()

    # Consumers

    def join(self, wake: Callable[[], None], cut: Callable[[], None] | None = None) -> Consumer:
        """Become a consumer. Raises SourceError where there is nothing more to be had, or not for who comes late."""
        with self.changed:
            if self._over:
                raise SourceError(self._reason or f"the live stream {self.name!r} has ended")
            if self.pump is not None and self._live.late == "refuse":
                raise SourceError(f"the live stream {self.name!r} has begun, and takes nobody who comes later")
            consumer = Consumer(self, wake, cut or wake)
            for part in (Part.inline(self._schema), *(one for some in self._dictionaries.values() for one in some)):
                consumer.give(part)
            self._consumers.append(consumer)
            self._last = None
            if self.pump is None and len(self._consumers) >= self._live.consumers:
                self.pump = threading.Thread(target=self._run, name=f"live {self.name}", daemon=True)
                self.pump.start()
            self.changed.notify_all()
            return consumer

    def leave(self, consumer: Consumer) -> None:
        """Give back everything that `consumer` holds. It takes nothing any more. Call it with `changed` held."""
        if consumer in self._consumers:
            self._consumers.remove(consumer)
        self.forget(consumer)
        self.give_back(consumer, set(consumer.held))
        self._clean()

    def give_back(self, consumer: Consumer, addresses: set[int]) -> None:
        """`consumer` does not hold these any more. Call it with `changed` held."""
        consumer.held -= addresses
        self._memory.free(addresses, consumer.kept)
        self.changed.notify_all()

    def choose(self, part: Part) -> Part | None:
        """What consumers get of a message: all of it."""
        return part

    def open_reader(self) -> pa.RecordBatchReader:
        woken = threading.Event()
        return join(_messages(self.join(woken.set), woken))

    def forget(self, consumer: Consumer) -> None:
        """`consumer` does not get what it has not taken yet. Call it with `changed` held."""
        unsent = {address for part in consumer.waiting for address in part.addresses}
        self._last = None
        consumer.waiting.clear()
        consumer.queued = 0
        self.give_back(consumer, unsent)

    def taken(self) -> None:
        """A consumer has taken something. Call it with `changed` held."""
        self._last = None
        if self._full:
            self.changed.notify_all()

    def set_aside(self, consumer: Consumer) -> None:
        """`consumer` gets nothing more, and what it holds counts no more. Call it with `changed` held."""
        self.forget(consumer)
        if not consumer.kept:
            consumer.kept = True
            self._memory.keep(consumer.held)
            self.changed.notify_all()

    def size_of(self, consumer: Consumer) -> int:
        """How much memory it holds, in bytes, alone or with others. Call it with `changed` held."""
        return self._memory.size_of(consumer.held) + consumer.queued

    def _select(self, indices: tuple[int, ...]) -> Dataset:
        return BroadcastColumns(self, indices)

    @property
    def _taking(self) -> list[Consumer]:
        return [consumer for consumer in self._consumers if not (consumer.kept or consumer.stopped)]

    # The pump

    def _run(self) -> None:
        reader, self._reader = self._reader, None
        reason: str | None = None
        try:
            with source_blamed(self.name):
                messages = split(reader, self._options)
                del reader
                next(messages)  # the schema, which consumers have
                for message in messages:
                    if not self._publish(message):
                        break
        except DissociatedError as error:
            reason = told(error)
            _log.info("%r: %s", self.name, error)
        except BaseException:
            reason = f"the live stream {self.name!r} failed for a reason that the server's log tells"
            _log.exception("%r: a live stream failed for a reason of ours", self.name)
        finally:
            messages = None  # type: ignore[assignment]  # with it goes the source
            with self.changed:
                self._busy = False
                self._end(reason)
                self._clean()

    def _publish(self, message: SplitMessage) -> bool:
        """Give the next message to every consumer. Whether there is somebody to take more."""
        length = message.parsed.body_length
        if length <= SMALL:
            with self.changed:
                if self._follows(message):
                    return True
                if self._wait_for_consumers():
                    self._wait_for_room(len(message.header) + length + _OVERHEAD)
                    self._hand_out(message, Part.inline(message))
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
                self._clean()
                return False
            extents = zip(*buffer_extents(message.header, message.parsed), strict=True)
            body = region.body(region.offset, length)
            placed = region.hold(length, extents, len(self._taking))
            queued = len(message.header) + _OVERHEAD
            self._hand_out(message, Part(message.header, message.parsed, (body,), queued, region, placed))
            return True

    def _follows(self, message: SplitMessage) -> bool:
        """Put it to what consumers were given last, if that is alike and they have it, and there is room for it."""
        last = self._last
        if last is None:
            return False
        if not self._room_for:
            if not self._has_room(_ROOM * last.queued):
                return False
            self._room_for = _ROOM
        if not last.follow(message):
            return False
        self._room_for -= 1
        for consumer in self._have_last:
            consumer.queued += last.queued
        return True

    def _hand_out(self, message: SplitMessage, part: Part) -> None:
        if self._over:
            return
        if message.parsed.type is HeaderType.DICTIONARY_BATCH:
            id_, is_delta = dictionary_of(message.header)
            before = self._dictionaries.get(id_, []) if is_delta else []
            self._dictionaries[id_] = [*before, Part.inline(message)]
        self._last, self._have_last, self._room_for = part, self._taking, 0
        addresses = part.addresses
        for consumer in self._have_last:
            consumer.held |= addresses
            consumer.give(part)

    def _wait_for_consumers(self) -> bool:
        """Whether there is somebody to give messages to, before the stream is over. Call it with `changed` held."""
        while not self._over:
            for one in self._consumers:
                if not (one.kept or one.stopped):
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
            stalled = [one for one in self._consumers if not one.kept and one.moved < since and self.size_of(one)]
            if stalled:
                self._cut_off(max(stalled, key=self.size_of))
            since = time.monotonic()
        self._full = False

    def _has_room(self, length: int) -> bool:
        """Whether `length` bytes more may be held. What waits is the same for all, so it counts once."""
        queued = 0
        for one in self._consumers:
            queued = max(queued, one.queued)
        return self._memory.has_room(length, beside=queued)

    def _cut_off(self, consumer: Consumer) -> None:
        _log.warning("%r: a consumer neither took nor freed anything in time, and is cut off", self.name)
        self.set_aside(consumer)
        consumer.reason = (
            f"this reader of the live stream {self.name!r} held up the others for {self._live.stall_timeout:g} s: "
            "it was cut off. To keep more than the server's live_limit, read over tcp, or with bodies packed"
        )
        consumer.cut()

    # The end

    def _end(self, reason: str | None) -> None:
        """Nothing more comes; consumers still take what they have been given. Call it with `changed` held."""
        if self._over:
            return
        self._over, self._reason = True, reason
        self._last = None
        self._dictionaries.clear()
        for consumer in self._taking:
            consumer.ended, consumer.reason = reason is None, reason
            consumer.wake()
        self.changed.notify_all()

    def _clean(self) -> None:
        if self._over and not self._consumers and not self._busy:
            self._memory.close()

    def drop(self) -> None:
        """End the stream: consumers take what they have been given, and then get to know why there is no more.

        The pump ends with the source's next batch: it cannot be called back from there.
        """
        with self.changed:
            self._end(f"the live stream {self.name!r} was dropped by whoever published it")
            if self.pump is None:
                self._reader = None
            self._clean()

    def close(self) -> None:
        """The same before consumers are sent away: what they have mapped stays readable."""
        with self.changed:
            for consumer in self._consumers:
                consumer.held.clear()  # so nothing more is punched out
            self.drop()


class BroadcastColumns(Dataset):
    """Some columns of a broadcast: consumers are sent those of each message, and free the others at once."""

    def __init__(self, whole: Broadcast, indices: tuple[int, ...]) -> None:
        super().__init__(whole.name, only(whole.schema, indices))
        self._indices = indices
        self._whole = whole
        self._projection = Projection(whole.schema_header, indices)
        self.join = whole.join

    def choose(self, part: Part) -> Part | None:
        """What consumers get of a message."""
        if part.body is None:
            return part._replace(header=self._projection.header)
        chosen = self._projection.choose(part.header, part.parsed)
        if chosen is None or chosen.header is part.header:
            return chosen and part
        if part.more is not None:
            first, *more = [b"".join(chosen.body((one,))) for one in part.bodies]
            return Part(chosen.header, chosen.parsed, (first,), more=more)
        extents = [part.extents[index] for index in chosen.indices] if part.extents else []
        return Part(chosen.header, chosen.parsed, chosen.body(part.body), 0, part.region, extents)

    def open_reader(self) -> pa.RecordBatchReader:
        return selected(self._whole.open_reader(), self._indices)

    def _select(self, indices: tuple[int, ...]) -> Dataset:
        return BroadcastColumns(self._whole, tuple(self._indices[index] for index in indices))


def _messages(consumer: Consumer, woken: threading.Event) -> Messages:
    """What libarrow joins, in this process."""
    try:
        while not consumer.over:
            parts = consumer.take()
            if not parts:
                woken.wait()
                woken.clear()
            for part in [one for some in parts for one in some.each()]:
                body = None if part.body is None else b"".join(part.body)
                consumer.free(part.addresses)
                yield part.header, body
    finally:
        consumer.leave()
