"""Static datasets, whose batches never change."""

from __future__ import annotations

import threading
from abc import abstractmethod
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeVar, overload

import pyarrow as pa

from dissociated.base.buffers import Buffer
from dissociated.codec.batches import BatchReader
from dissociated.codec.columns import pick_batches, select_columns, select_fields
from dissociated.codec.filter.statistics import Statistics
from dissociated.codec.schemas import schema_difference
from dissociated.codec.split import BatchAndMetadata
from dissociated.datasets.base import Dataset
from dissociated.datasets.source_errors import source_errors
from dissociated.datasets.static_message import MappedMessages, StaticMessage
from dissociated.errors import FormatError, SourceError
from dissociated.format.encapsulated import END_OF_STREAM, encapsulate
from dissociated.format.message import HeaderType, is_compressed
from dissociated.format.projection import ProjectedMessage, Projection
from dissociated.memory.region import MAX_REGIONS, Region
from dissociated.protocol.request import Selection
from dissociated.store.segment import Segment

if TYPE_CHECKING:
    from dissociated.codec.filter.substrait import FilterNode

T = TypeVar("T")

#: Largest number of column selections for which a static dataset keeps the encoded messages.
_MAX_SELECTIONS = 16


class StaticDataset(Dataset):
    """A dataset of messages that never change, whose bodies may lie in segments of shared memory."""

    def __init__(self, name: str, schema: pa.Schema) -> None:
        super().__init__(name, schema)
        self._lock = threading.Lock()
        self._encoded: dict[Hashable, Any] = {}
        self._selected: OrderedDict[tuple[int, ...], StaticDataset] = OrderedDict()
        self._dropped = False

    def regions(self) -> Sequence[Region]:
        segments = [mapped.segment for mapped in self.mapped()]
        for segment in segments:
            segment.wait(segment.region.base + segment.region.size)
        return [segment.region for segment in segments]

    @abstractmethod
    def packed(self) -> Sequence[StaticMessage]:
        """Return the messages, to be sent with inline bodies."""

    @abstractmethod
    def mapped(self) -> Iterable[MappedMessages]:
        """Return the messages, grouped by the segment that holds their bodies, in order.

        A segment may still be written; wait for its bodies before sending them.
        """

    @property
    def packed_size(self) -> int:
        return sum(message.parsed.body_length for message in self.packed())

    def copied(self, message: StaticMessage, max_length: int) -> StaticMessage:
        """Return `message` with copies of those parts of its body that lie in a file which a user may modify.

        Check afterwards that the file is unmodified.

        Args:
            message: A message of this dataset.
            max_length: The largest part to copy, in bytes.

        Raises:
            SourceError: The file was shortened.
        """
        return message

    def read(self, columns: Sequence[int] | None, numbers: Sequence[int] | None) -> pa.RecordBatchReader:
        """Open a reader over some columns and batches.

        Args:
            columns: Ascending positions of columns; None for all.
            numbers: Ascending numbers of batches; None for all. Numbers beyond the last batch are ignored.
        """
        reader = self.open_reader() if numbers is None else pick_batches(self.open_reader(), numbers)
        return reader if columns is None else select_columns(reader, columns)

    def small_stream(self, limit: int) -> bytes | None:
        """Return the messages as an IPC stream.

        Returns:
            The stream; None if it would be longer than `limit` bytes, or has tensors or compressed bodies.
        """
        pieces: list[Buffer] = []
        remaining = limit - len(END_OF_STREAM)
        for message in self.packed():
            head = encapsulate(message.header)
            remaining -= len(head) + message.parsed.body_length
            if remaining < 0 or message.parsed.is_tensor or is_compressed(message.header):
                return None
            pieces += (head, *(self.copied(message, limit).packed or ()))
        return b"".join((*pieces, END_OF_STREAM))

    def encoded(self, key: Hashable, encode: Callable[[], T]) -> T:
        """Return the result of `encode` for `key`, which is computed once and kept as long as the dataset."""
        with self._lock:
            if key not in self._encoded:
                self._encoded[key] = encode()
            encoded: T = self._encoded[key]
            return encoded

    def _select(self, indices: tuple[int, ...]) -> Dataset:
        with self._lock:
            columns = self._selected.pop(indices, None) or StaticColumns(self, indices)
            if not self._dropped:
                self._selected[indices] = columns
            if len(self._selected) > _MAX_SELECTIONS:
                self._selected.popitem(last=False)
            return columns

    def slice_batches(self, first: int, stop: int) -> StaticDataset:
        return _StaticBatches(self, range(first, stop))

    def statistics(self, columns: Sequence[int]) -> Statistics | None:
        """Return the statistics of the batches, for at least these columns, or None if there are none."""
        return None

    def passing_batches(self, filter_: FilterNode, columns: Sequence[int]) -> Sequence[bool] | None:
        # Imported on first use, since pyarrow.compute loads slowly.
        from dissociated.codec.filter.pruning import passing_batches

        bounds = self.statistics(columns)
        return None if bounds is None else passing_batches(filter_, bounds, columns)

    def pick_batches(self, numbers: Sequence[int]) -> StaticDataset:
        return _StaticBatches(self, numbers)

    def drop(self) -> None:
        # The selections refer back to this dataset. Without this, memory would be freed only by the garbage collector.
        with self._lock:
            self._dropped = True
            self._selected.clear()


class _Selected(StaticDataset):
    """A part of a static dataset, whose messages are those of the whole or lie in their bodies."""

    def __init__(self, whole: StaticDataset, schema: pa.Schema) -> None:
        super().__init__(whole.name, schema)
        self._whole = whole

    @property
    def is_modifiable(self) -> bool:
        return self._whole.is_modifiable

    def check_unchanged(self) -> None:
        self._whole.check_unchanged()

    def copied(self, message: StaticMessage, max_length: int) -> StaticMessage:
        return self._whole.copied(message, max_length)


class StaticColumns(_Selected):
    """Some columns of a static dataset. The metadata is encoded anew; the bodies are not copied."""

    def __init__(self, whole: StaticDataset, indices: tuple[int, ...]) -> None:
        super().__init__(whole, select_fields(whole.schema, indices))
        self.rows = whole.rows
        self._indices = indices
        self._projecting = threading.Lock()
        self._projection: Projection | None = None
        #: The projected messages of each segment, by its number, and of the packed messages, by None.
        self._projected: dict[int | None, list[StaticMessage]] = {}

    def open_reader(self) -> pa.RecordBatchReader:
        return self._whole.read(self._indices, None)

    def read(self, columns: Sequence[int] | None, numbers: Sequence[int] | None) -> pa.RecordBatchReader:
        return super().read(columns, numbers) if columns is not None else self._whole.read(self._indices, numbers)

    def packed(self) -> Sequence[StaticMessage]:
        return self._choose(None, self._whole.packed())

    def mapped(self) -> Iterator[MappedMessages]:
        for number, (segment, messages) in enumerate(self._whole.mapped()):
            yield MappedMessages(segment, self._choose(number, messages))

    def _choose(self, segment: int | None, messages: Sequence[StaticMessage]) -> Sequence[StaticMessage]:
        with self._projecting:
            if segment not in self._projected:
                try:
                    projected = [*self._project(messages)]
                    self.check_unchanged()  # before they are kept
                    self._projected[segment] = projected
                except FormatError as error:
                    raise SourceError(f"columns of {self.name!r} cannot be selected: {error}") from None
            return self._projected[segment]

    def _project(self, messages: Sequence[StaticMessage]) -> Iterator[StaticMessage]:
        if messages and messages[0].parsed.type is HeaderType.SCHEMA:
            self._projection = Projection(messages[0].header, self._indices)
        assert self._projection is not None  # the schema comes first
        return project_messages(messages, self._projection)


def project_messages(messages: Sequence[StaticMessage], projection: Projection) -> Iterator[StaticMessage]:
    """Yield the projection of each message that has one. Raise FormatError if a message does not fit the schema."""
    for message in messages:
        if message.parsed.type is HeaderType.SCHEMA:
            yield message._replace(header=projection.header)
            continue
        chosen = projection.project(message.header, message.parsed)
        if chosen is not None:
            yield _project_message(message, chosen)


class _StaticBatches(_Selected):
    """Some batches of a static dataset, with all dictionaries that precede the last of these batches."""

    def __init__(self, whole: StaticDataset, numbers: Sequence[int]) -> None:
        super().__init__(whole, whole.schema)
        self._ascending = numbers
        self._numbers = numbers if isinstance(numbers, range) else {*numbers}
        self._stop = numbers[-1] + 1 if numbers else 0

    def open_reader(self) -> pa.RecordBatchReader:
        return self._whole.read(None, self._ascending)

    def packed(self) -> Sequence[StaticMessage]:
        return self._pick(self._whole.packed(), 0)[0]

    def mapped(self) -> Iterator[MappedMessages]:
        number = 0
        for segment, messages in self._whole.mapped():
            picked, number = self._pick(messages, number)
            if picked:
                yield MappedMessages(segment, picked)
            if number >= self._stop:
                break

    def _pick(self, messages: Sequence[StaticMessage], number: int) -> tuple[Sequence[StaticMessage], int]:
        """Return the selected messages, and the number of the batch that follows them.

        Args:
            messages: Consecutive messages.
            number: The number of the first batch among them.
        """
        picked = []
        for index, type_ in enumerate(_types(messages)):
            is_batch = type_ == HeaderType.RECORD_BATCH
            if number == self._stop and type_ != HeaderType.SCHEMA:
                break
            if not is_batch or number in self._numbers:
                picked.append(messages[index])
            number += is_batch
        return picked, number


def _project_message(message: StaticMessage, chosen: ProjectedMessage) -> StaticMessage:
    """Return the projection `chosen` of `message`, with its buffers in place."""
    if chosen.header is message.header:
        return message
    packed = chosen.body(message.packed or ())
    extents = None
    if message.extents is not None:
        extents = [message.extents[index] for index in chosen.indices]
    return message._replace(
        header=chosen.header,
        parsed=chosen.parsed,
        packed=packed,
        extents=extents,
    )


class SegmentsDataset(StaticDataset):
    """A sequence of segments.

    Raises SourceError if the schemas of the segments differ, or there are more than MAX_REGIONS segments.
    """

    def __init__(self, name: str, segments: Sequence[Segment]) -> None:
        if len(segments) > MAX_REGIONS:
            raise SourceError(
                f"{name!r} would have {len(segments)} segments; at most {MAX_REGIONS} can be shared: write fewer "
                "segments, from Spark after df.coalesce(...)"
            )
        self.segments = segments
        first = segments[0]
        for segment in segments[1:]:
            if segment.message(0).header != first.message(0).header:
                raise SourceError(
                    f"the segments of {name!r} must have one schema, and in the added ones "
                    f"{schema_difference(first.schema, segment.schema)}"
                )
        super().__init__(name, first.schema)
        self.rows = sum(segment.rows for segment in segments)
        self.nbytes = sum(segment.nbytes for segment in segments)
        for segment in segments:
            segment.check_buffers()
        parts = [*enumerate(segments)]
        self._mapped = [MappedMessages(segment, _SegmentMessages([(number, segment)])) for number, segment in parts]
        self._messages = _SegmentMessages(parts)

    def open_reader(self) -> pa.RecordBatchReader:
        return BatchReader(self.schema, self._batches())

    def _batches(self) -> Iterator[BatchAndMetadata]:
        with source_errors(self.name):
            for segment in self.segments:
                yield from segment.batches()

    def read(self, columns: Sequence[int] | None, numbers: Sequence[int] | None) -> pa.RecordBatchReader:
        if not self.is_modifiable:
            return super().read(columns, numbers)
        chosen = range(len(self.schema)) if columns is None else columns
        return BatchReader(select_fields(self.schema, chosen), self._some_batches(chosen, numbers))

    def _some_batches(self, columns: Sequence[int], numbers: Sequence[int] | None) -> Iterator[BatchAndMetadata]:
        first = 0
        with source_errors(self.name):
            for segment in self.segments:
                part = None
                if numbers is not None:
                    stop = first + segment.batch_count
                    part = [n - first for n in numbers[bisect_left(numbers, first) : bisect_left(numbers, stop)]]
                    first = stop
                yield from segment.some_batches(columns, part)

    def check_metadata(self, limit: int) -> None:
        for segment in self.segments:
            segment.check_metadata(limit)

    @property
    def is_modifiable(self) -> bool:
        return any(segment.is_modifiable for segment in self.segments)

    def check_unchanged(self) -> None:
        for segment in self.segments:
            segment.check_unchanged()

    def copied(self, message: StaticMessage, max_length: int) -> StaticMessage:
        segment = self.segments[message.segment]
        if message.packed is None or not segment.is_modifiable:
            return message
        return message._replace(packed=segment.copy_parts(message.packed, max_length))

    def packed(self) -> Sequence[StaticMessage]:
        return self._messages

    @property
    def packed_size(self) -> int:
        return sum(segment.nbytes for segment in self.segments)

    def mapped(self) -> Sequence[MappedMessages]:
        return self._mapped

    def appendable(self) -> Sequence[Segment]:
        return self.segments

    def statistics(self, columns: Sequence[int]) -> Statistics | None:
        parts = [segment.statistics or Statistics.unknown(segment.batch_rows) for segment in self.segments]
        return Statistics.concatenate(parts) if any(part.bounds for part in parts) else None

    def open(self) -> SegmentsDataset:
        return self


class _SegmentMessages(Sequence[StaticMessage]):
    """The messages of numbered segments of a dataset, which are read when they are needed.

    Of the schemas, only that of segment 0 is among them. Slices are lists.
    """

    def __init__(self, segments: Sequence[tuple[int, Segment]]) -> None:
        self._segments = segments
        # The schema is the first message of each segment, and there is no other.
        self._starts = [0, *accumulate(len(segment.index) - bool(number) for number, segment in segments)]

    def __len__(self) -> int:
        return self._starts[-1]

    def types(self) -> Iterator[int]:
        """Yield the type of each message, without reading it."""
        for number, segment in self._segments:
            yield from segment.index.types[bool(number) :].tolist()

    @overload
    def __getitem__(self, index: int) -> StaticMessage: ...
    @overload
    def __getitem__(self, index: slice) -> list[StaticMessage]: ...
    def __getitem__(self, index: int | slice) -> StaticMessage | list[StaticMessage]:
        chosen = range(len(self))[index]
        return self._message(chosen) if isinstance(chosen, int) else [*map(self._message, chosen)]

    def _message(self, index: int) -> StaticMessage:
        part = bisect_right(self._starts, index) - 1
        number, segment = self._segments[part]
        message = segment.message(index - self._starts[part] + bool(number))
        if not message.parsed.has_body:
            return StaticMessage(message.header, message.parsed, None, None, number)
        return StaticMessage(
            message.header, message.parsed, (segment.body(message),), segment.addresses(message), number
        )


def _types(messages: Sequence[StaticMessage]) -> Iterator[int]:
    if isinstance(messages, _SegmentMessages):
        return messages.types()
    return (message.parsed.type for message in messages)


class StoredDataset(Dataset):
    """A dataset in a store.

    `open_segments` opens the segments when a reader needs them, since the dataset does not hold them open. `schema`,
    `rows` and `nbytes` are the values at the commit, which the opened segments must still have.
    """

    stored = True

    def __init__(
        self,
        name: str,
        schema: pa.Schema,
        rows: int | None,
        nbytes: int | None,
        open_segments: Callable[[], SegmentsDataset],
    ) -> None:
        super().__init__(name, schema)
        self.rows = rows
        self.nbytes = nbytes
        self._open = open_segments
        self._lock = threading.Lock()
        self._exposed: SegmentsDataset | None = None
        self._dropped = False

    def open(self) -> SegmentsDataset:
        exposed = self._exposed  # addresses that clients were told are valid in these segments alone
        if exposed is not None:
            return exposed
        opened = self._open()
        # Only the names are compared, since the types differ if an extension type was registered meanwhile.
        if (opened.rows, opened.nbytes, opened.schema.names) != (self.rows, self.nbytes, self.schema.names):
            raise SourceError(f"the segments of {self.name!r} were modified after the commit: publish the dataset anew")
        return opened

    def open_exposed(self) -> SegmentsDataset:
        opened = self.open()  # without the lock, since a store that removes this dataset meanwhile calls `drop`
        with self._lock:
            if self._exposed is None and not self._dropped:
                self._exposed = opened
            return self._exposed or opened

    def appendable(self) -> Sequence[Segment]:
        return self.open().segments

    @property
    def exposed(self) -> bool:
        return self._exposed is not None

    def close_segments(self) -> None:
        with self._lock:
            self._exposed = None

    def open_reader(self) -> pa.RecordBatchReader:
        return self.open().open_reader()

    def select(self, selection: Selection) -> Dataset:
        return self.open().select(selection)

    def _select(self, indices: tuple[int, ...]) -> Dataset:
        return self.open()._select(indices)

    def drop(self) -> None:
        with self._lock:
            self._dropped = True
            self._exposed = None
