"""Messages in shared memory, segment by segment, and the copy of a Table that has them there."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from functools import cached_property, partial
from itertools import islice

import pyarrow as pa

from dissociated.codec.options import WriteOptions
from dissociated.codec.split import Splitter
from dissociated.datasets.sendable import MappedMessages, StaticMessage
from dissociated.errors import DissociatedError
from dissociated.format.layout import layout_of
from dissociated.store.segment import MemfdSink, Segment, SegmentWriter

_log = logging.getLogger(__name__)

#: A copy has segments of about so many bytes, and about so many of them at most. To open one takes a client 0.2 to
#: 0.5 ms beside what its batches take: with more of them everybody would pay for the first reader.
_SEGMENT_BYTES, _MAX_SEGMENTS = 1 << 28, 64
#: The first one is smaller, so that the first reader has something soon.
_FIRST_BYTES = 1 << 26


def mapped_messages(segment: Segment, number: int) -> MappedMessages:
    """The messages of a segment, which is that number of its dataset. Only the first one's schema is among them."""
    messages = [
        StaticMessage(
            message.header,
            message.parsed,
            (segment.body(message),) if message.parsed.has_body else None,
            segment.addresses(message) if message.parsed.has_body else None,
            number,
        )
        for message in segment.messages
        if message.parsed.has_body or (number == 0 and message is segment.messages[0])
    ]
    return MappedMessages(segment, messages)


class _Stopped(Exception):
    """Nobody needs what the thread was copying."""


class SharedCopy:
    """The rows of a Table in segments, each of which is sealed before anybody gets it. Iterating waits for them.

    Whoever needs a segment that is not there yet makes it, or waits for who does. So a thread may go ahead (`start`),
    and nobody depends on it. Where a segment cannot be made, whoever made it gets the error, and the next one tries
    again. Safe to use from many threads.
    """

    def __init__(self, name: str, table: pa.Table, nbytes: int, options: WriteOptions | None) -> None:
        """`nbytes` are those of the table."""
        self._name = name
        self._table = table
        self._options = options
        self._size = max(_SEGMENT_BYTES, nbytes // _MAX_SEGMENTS)
        self._changed = threading.Condition()
        self._made: list[MappedMessages] = []
        self._rows = self._batches = 0  # that are in these
        self._rest: Iterator[pa.RecordBatch] | None = None  # None where it has to be begun anew
        self._complete = False
        self._making = False
        self._stopped = False
        self._thread: threading.Thread | None = None

    def __iter__(self) -> Iterator[MappedMessages]:
        """Raises what writing a segment raises."""
        return self._segments(ahead=False)

    def start(self) -> None:
        """Make all segments in a thread, until `stop`."""
        if not self._complete:
            self._thread = threading.Thread(target=self._run, name=f"copy {self._name}", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Nobody new will need them. Who is iterating gets all."""
        self._stopped = True

    def join(self, timeout: float) -> None:
        """Wait up to so many seconds for the thread, which was stopped."""
        if self._thread is not None:
            self._thread.join(timeout)

    @cached_property
    def _is_cut(self) -> bool:
        """Whether there may be several segments.

        Each has all dictionaries that it needs, but who is sent bodies inline gets them once. Both must count the same
        messages, so what has dictionaries is in one.
        """
        layout = layout_of(Splitter(self._table.schema, self._options).schema_message.header)
        return layout is not None and not layout.values

    def _run(self) -> None:
        try:
            for _ in self._segments(ahead=True):
                pass
        except _Stopped:
            pass
        except DissociatedError as error:
            _log.warning(
                "copying %r into shared memory: %s; it is tried again for who asks for it", self._name, str(error)
            )

    def _segments(self, ahead: bool) -> Iterator[MappedMessages]:
        number = 0
        while (segment := self._segment(number, ahead)) is not None:
            yield segment
            number += 1

    def _segment(self, number: int, ahead: bool) -> MappedMessages | None:
        """This one; None where there are not so many."""
        with self._changed:
            while number == len(self._made) and self._making:
                self._changed.wait()
            if number < len(self._made):
                return self._made[number]
            if self._complete:
                return None
            self._making = True
        try:
            return self._make(ahead)
        finally:
            with self._changed:
                self._making = False
                self._changed.notify_all()

    def _make(self, ahead: bool) -> MappedMessages:
        made: list[Segment] = []
        size = self._size if self._made else _FIRST_BYTES
        rest, self._rest = self._rest or islice(self._table.to_reader(), self._batches, None), None
        sink = partial(MemfdSink, self._name, made.append)
        with SegmentWriter(sink, self._table.schema, self._options, statistics=False) as writer:
            for batch in rest:
                if ahead and self._stopped:
                    raise _Stopped
                writer.write_batch(batch)
                if writer.nbytes >= size and self._is_cut:
                    break
        found = mapped_messages(made[0], len(self._made))
        self._made.append(found)
        self._rows += writer.rows
        self._batches += writer.stats.num_record_batches
        self._rest = rest
        self._complete = self._rows == self._table.num_rows
        return found
