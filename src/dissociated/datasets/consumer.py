"""A consumer of a live stream: the messages that it has not taken yet, and the memory that it holds."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Hashable
from typing import Any, TypeAlias

from dissociated.datasets.live_message import LiveMessage, all_addresses
from dissociated.format.layout import dictionary_of
from dissociated.format.message import HeaderType

#: Encoded messages, by everything that they depend on.
Encodings: TypeAlias = dict[Hashable, Any]
Deliver: TypeAlias = Callable[[Encodings], None]


class Consumer:
    """A consumer of a fan-out, with its position in the stream and the memory that it holds.

    The fan-out guards it: call the methods with the fan-out locked.

    The pump's thread calls `wake` when a message arrives for a consumer that found nothing to take, and `on_cut_off` is
    called when the consumer is cut off. If the source leaves the time, the pump calls `deliver` in place of `wake`: it
    may take and send messages in the pump's thread, without waiting. Its argument has the encodings of messages that
    earlier consumers were sent in the same turn.
    """

    def __init__(self, wake: Callable[[], None], on_cut_off: Callable[[], None], deliver: Deliver | None) -> None:
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
    def active(self) -> bool:
        """Whether the consumer receives further messages."""
        return not (self.cut_off or self.stopped)

    @property
    def finished(self) -> bool:
        """Whether the consumer has taken all messages up to the regular end of the stream."""
        return self.complete and not self.waiting

    def enqueue(self, item: LiveMessage) -> bool:
        """Append `item` to the waiting messages. Return whether the consumer waits for it and must be woken."""
        self.waiting.append(item)
        self.queued += item.queued * item.messages
        self.droppable += item.droppable
        was_idle, self.idle = self.idle, False
        return was_idle

    def take(self, count: int, nbytes: int, maps: bool) -> list[LiveMessage]:
        """Take the next messages: see `Fanout.take`."""
        messages: list[LiveMessage] = []
        waiting = self.waiting
        while waiting and count > 0:
            item = waiting[0]
            number = item.messages
            size = 0 if maps and item.region is not None else number * item.parsed.body_length
            if messages and size > nbytes:
                break
            messages.append(waiting.popleft())
            count -= number
            nbytes -= size
            self.queued -= item.queued * number
            self.droppable -= item.droppable
        self.idle = not messages
        if messages:
            self.missed_before = self.missed  # the oldest messages are dropped, so all came before these
            self.last_progress = time.monotonic()
        return messages

    def drop_oldest(self) -> set[int]:
        """Drop the oldest waiting item that is droppable.

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
                add_dictionary(dictionaries, item)
            else:
                remaining.append(item)
        remaining += [item for items in dictionaries.values() for item in items]
        self.waiting.extendleft(reversed(remaining))
        self.queued += _queued_bytes(remaining) - _queued_bytes(popped)
        return all_addresses(popped) - all_addresses(remaining)

    def discard_waiting(self) -> set[int]:
        """Discard the waiting messages. Return the addresses that the consumer does not need any more."""
        unsent = all_addresses(self.waiting)
        self.waiting.clear()
        self.queued = self.droppable = 0
        return unsent


def add_dictionary(dictionaries: dict[int, list[LiveMessage]], item: LiveMessage) -> None:
    """Add a dictionary, or a delta of one, to the current dictionaries by their ids."""
    id_, is_delta = dictionary_of(item.header)
    dictionaries[id_] = [*(dictionaries.get(id_, []) if is_delta else []), item]


def _queued_bytes(items: Collection[LiveMessage]) -> int:
    return sum([item.queued * item.messages for item in items])
