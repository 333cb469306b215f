"""Positions of the messages of an Arrow IPC stream or file, found without touching a body.

The footer of a file lists them. A stream is walked from message to message. Most streams have many messages of equal
size and layout in a row; such a run is checked as a whole with NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from dissociated.base.buffers import Buffer
from dissociated.errors import FormatError
from dissociated.format.encapsulated import (
    END_OF_STREAM,
    FOOTER_TAIL,
    Encapsulated,
    end_of_stream,
    first_message_at,
    footer_at,
    message_at,
)
from dissociated.format.footer import parse_footer, schema_message
from dissociated.format.message import HeaderType, parse_header, varying_ranges

#: Number of messages that are compared at once: at first, and at most.
_MIN_LOOKAHEAD, _MAX_LOOKAHEAD = 16, 1 << 13


class Entry(NamedTuple):
    """A message: its position, the length of its metadata (prefix and padding included), and of its body, in bytes."""

    type: HeaderType
    offset: int
    metadata_length: int
    body_length: int


class Index:
    """The messages of an IPC stream or file in `memory`, in the order in which a reader needs them.

    For a stream, that is the order of position. For a file, it is the schema, then all dictionaries, then the record
    batches, as the footer lists them. If a file does not begin with its schema, as files of Polars 2, the schema is
    read from the footer.

    Raises:
        FormatError: `memory` is neither a stream nor a file, or is cut off.
    """

    def __init__(self, memory: Buffer) -> None:
        self._memory = memoryview(memory)
        start = first_message_at(self._memory)
        self.is_file = start > 0
        self._end = footer_at(self._memory) if self.is_file else len(self._memory)
        #: Whether there is an end-of-stream marker, or a footer. A writer that was interrupted leaves neither.
        self.is_ended = self.is_file
        #: Bytes after the end-of-stream marker. In a file, the bytes between the last message and the footer.
        self.trailing_bytes = self._memory[len(self._memory) :]
        #: For each message: its type, its position, and the lengths of its metadata and body, in bytes.
        self.types: np.ndarray
        self.offsets: np.ndarray
        self.metadata_lengths: np.ndarray
        self.body_lengths: np.ndarray
        #: Runs of messages that have the same size and layout: the number of the first, and how many there are.
        self.runs: list[tuple[int, int]] = []
        self.types, self.offsets, self.metadata_lengths, self.body_lengths = (
            self._read_footer(start) if self.is_file else self._walk_stream()
        )

    def __len__(self) -> int:
        return len(self.offsets)

    def __getitem__(self, index: int) -> Entry:
        return Entry(
            HeaderType(self.types[index]),
            int(self.offsets[index]),
            int(self.metadata_lengths[index]),
            int(self.body_lengths[index]),
        )

    def __iter__(self) -> Iterator[Entry]:
        return (self[index] for index in range(len(self)))

    @property
    def body_size(self) -> int:
        """Return the size of all bodies together, in bytes."""
        return int(self.body_lengths.sum())

    def message(self, index: int, read: Callable[[int, int], bytes] | None = None) -> Encapsulated:
        """Read a message.

        Args:
            index: The number of the message.
            read: Reads bytes, given their position and their number. By default they are read in the memory.

        Returns:
            The flatbuffer of the message, parsed, and the position of its body.

        Raises:
            FormatError: The message is damaged, or differs from its entry in the footer.
        """
        entry = self[index]
        if entry.offset == self._end:
            footer = bytes(self._footer()) if read is None else read(entry.offset, entry.metadata_length)
            header = schema_message(footer)
            return Encapsulated(header, parse_header(header), self._end + entry.metadata_length)
        if read is None:
            encapsulated = message_at(self._memory, entry.offset, self._end)
        else:
            metadata = memoryview(read(entry.offset, entry.metadata_length))
            encapsulated = message_at(metadata, 0, self._end - entry.offset)
            if encapsulated is not None:
                encapsulated = encapsulated._replace(body_at=entry.offset + encapsulated.body_at)
        if (
            encapsulated is None
            or encapsulated.parsed.type is not entry.type
            or encapsulated.body_at != entry.offset + entry.metadata_length
            or encapsulated.parsed.body_length != entry.body_length
        ):
            raise FormatError(f"the footer of the Arrow IPC file disagrees with the message at byte {entry.offset}")
        return encapsulated

    def integers(self, run: tuple[int, int], at: int, width: int) -> np.ndarray:
        """Read `width` integers of 64 bits of each message of a run, from the position `at` in its flatbuffer on.

        Returns:
            An array with a row for each message.

        Raises:
            FormatError: The first message is damaged.
        """
        number, count = run
        first = self.message(number)
        size = int(self.metadata_lengths[number] + self.body_lengths[number])
        start = first.body_at - len(first.header) + at
        whole = np.frombuffer(self._memory, np.uint8, (count - 1) * size + 8 * width, start)
        return np.ascontiguousarray(np.lib.stride_tricks.as_strided(whole, (count, 8 * width), (size, 1))).view("<i8")

    def _read_footer(self, start: int) -> tuple[np.ndarray, ...]:
        """Return the schema and the messages that the footer lists."""
        footer = parse_footer(self._footer())
        schema = self._schema_entry(start)
        blocks = np.concatenate([footer.dictionaries, footer.record_batches])
        ends = blocks["offset"] + blocks["metadata_length"] + blocks["body_length"]
        if len(blocks) and (blocks["offset"].min() < start or ends.max() > self._end):
            raise FormatError("the Arrow IPC file has a footer that lists messages outside it")
        self.trailing_bytes = self._memory[ends.max() if len(blocks) else start : self._end]
        kinds = [HeaderType.DICTIONARY_BATCH] * len(footer.dictionaries)
        kinds += [HeaderType.RECORD_BATCH] * len(footer.record_batches)
        self.runs = [(number, 1) for number in range(1 + len(kinds))]
        return (
            np.array([schema.type, *kinds], np.uint8),
            np.concatenate([[schema.offset], blocks["offset"]]),
            np.concatenate([[schema.metadata_length], blocks["metadata_length"]]),
            np.concatenate([[schema.body_length], blocks["body_length"]]),
        )

    def _schema_entry(self, start: int) -> Entry:
        """Return the schema of a file: its first message, or else the schema in its footer."""
        with suppress(FormatError):
            encapsulated = message_at(self._memory, start, self._end)
            if encapsulated is not None and encapsulated.parsed.type is HeaderType.SCHEMA:
                return Entry(HeaderType.SCHEMA, start, encapsulated.body_at - start, 0)
        return Entry(HeaderType.SCHEMA, self._end, len(self._footer()), 0)

    def _footer(self) -> memoryview:
        return self._memory[self._end : len(self._memory) - FOOTER_TAIL]

    def _walk_stream(self) -> tuple[np.ndarray, ...]:
        """Return the messages of a stream, up to its end."""
        entries: list[Entry] = []
        at = number = 0
        lookahead = _MIN_LOOKAHEAD
        while at < self._end and (encapsulated := message_at(self._memory, at, self._end)) is not None:
            entry = Entry(encapsulated.parsed.type, at, encapsulated.body_at - at, encapsulated.parsed.body_length)
            size = entry.metadata_length + entry.body_length
            count = 1
            if entries and entries[-1][2:] == entry[2:]:
                count = self._count_alike(encapsulated, at, size, lookahead)
                lookahead = min(2 * lookahead, _MAX_LOOKAHEAD) if count == lookahead else _MIN_LOOKAHEAD
            self.runs.append((number, count))
            number += count
            entries.append(entry)
            at += count * size
        self._set_end(at)
        repeats = [count for _, count in self.runs]
        types, offsets, metadata_lengths, body_lengths = (
            np.repeat(np.array([entry[field] for entry in entries], np.int64), repeats) for field in range(4)
        )
        within = np.arange(len(offsets)) - np.repeat(np.cumsum(repeats) - repeats, repeats)
        return types, offsets + within * (metadata_lengths + body_lengths), metadata_lengths, body_lengths

    def _set_end(self, at: int) -> None:
        """Set `is_ended` and `trailing_bytes` for a stream whose end lies at this position."""
        tail = self._memory[at : at + len(END_OF_STREAM)]
        if bytes(tail) == END_OF_STREAM:
            self.is_ended = True
            self.trailing_bytes = self._memory[at + len(END_OF_STREAM) :]
        else:  # The legacy marker, 4 zero bytes, counts at the very end only: a preallocated file has more zeros.
            self.is_ended = bytes(tail) == end_of_stream(legacy=True)

    def _count_alike(self, first: Encapsulated, at: int, size: int, limit: int) -> int:
        """Return the number of consecutive messages of one size and layout, from `first` on, up to `limit`."""
        spans = varying_ranges(first.header, first.parsed)
        count = min((self._end - at) // size, limit)
        if not spans or count < 2:
            return 1
        head = first.body_at - at
        fixed = np.ones(head, bool)
        for begin, end in spans:
            if begin != first.parsed.body_length_at:
                fixed[head - len(first.header) + begin : head - len(first.header) + end] = False
        whole = np.frombuffer(self._memory, np.uint8, (count - 1) * size + head, at)
        heads = np.lib.stride_tricks.as_strided(whole, (count, head), (size, 1))[:, fixed]
        same = (heads == heads[0]).all(axis=1)
        return count if same.all() else int(same.argmin())
