"""Datasets whose batches stay as they are."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from dissociated.codec.batches import BatchReader
from dissociated.codec.columns import pick_batches, select_columns, select_fields
from dissociated.codec.difference import schema_difference
from dissociated.codec.options import WriteOptions
from dissociated.codec.split import BatchAndMetadata, OnceValidator, batches, split
from dissociated.codec.statistics import Collector, Statistics
from dissociated.datasets.base import Dataset
from dissociated.datasets.sendable import S, SendVisitor, SharedSegment, StaticMessage, T
from dissociated.datasets.source_errors import source_errors
from dissociated.errors import FormatError, SourceError
from dissociated.format.message import HeaderType
from dissociated.format.projection import ProjectedMessage, Projection
from dissociated.memory.region import MAX_REGIONS, Region
from dissociated.protocol.request import Selection
from dissociated.store.segment import Segment

if TYPE_CHECKING:
    from dissociated.codec.substrait import FilterNode

#: Of how many selections of columns a static dataset keeps the messages.
_MAX_SELECTIONS = 16


class StaticDataset(Dataset):
    """Messages that stay, and the segments in shared memory that their bodies lie in."""

    def __init__(self, name: str, schema: pa.Schema) -> None:
        super().__init__(name, schema)
        self._lock = threading.Lock()
        self._encoded: dict[Hashable, Any] = {}
        self._selected: OrderedDict[tuple[int, ...], StaticDataset] = OrderedDict()
        self._dropped = False

    def accept(self, visitor: SendVisitor[S]) -> S:
        return visitor.static(self)

    def regions(self) -> Sequence[Region]:
        return [segment.region for segment in self.mapped()[1]]

    @abstractmethod
    def packed(self) -> Sequence[StaticMessage]:
        """The messages, to be sent with their bodies inline."""

    @abstractmethod
    def mapped(self) -> tuple[Sequence[StaticMessage], Sequence[SharedSegment]]:
        """The messages, to be sent as addresses into these segments."""

    @property
    def packed_size(self) -> int:
        return sum(message.parsed.body_length for message in self.packed())

    def encoded(self, key: Hashable, encode: Callable[[], T]) -> T:
        """What `encode` made for `key`, now or before. It stays as long as the dataset."""
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

    def _slice(self, first: int, stop: int) -> StaticDataset:
        return _StaticBatches(self, range(first, stop))

    def statistics(self, columns: Sequence[int]) -> Statistics | None:
        """What is known of the values in its batches, of these columns at least."""
        return None

    def passing_batches(self, filter_: FilterNode, columns: Sequence[int]) -> Sequence[bool] | None:
        from dissociated.codec.pruning import may_pass  # on first use: pyarrow.compute takes long to import

        known = self.statistics(columns)
        if known is None:
            return None
        bounds = {at: known.bounds[column] for at, column in enumerate(columns) if column in known.bounds}
        passing: Sequence[bool] = may_pass(filter_, known.num_rows, bounds).to_pylist()
        return passing

    def pick_batches(self, numbers: Sequence[int]) -> StaticDataset:
        return _StaticBatches(self, numbers)

    def drop(self) -> None:
        with self._lock:  # they refer back, and memory shall not wait for the collector
            self._dropped = True
            self._selected.clear()


class StaticColumns(StaticDataset):
    """Some columns of a static dataset: its metadata encoded anew, its bodies chosen from where they lie."""

    def __init__(self, whole: StaticDataset, indices: tuple[int, ...]) -> None:
        super().__init__(whole.name, select_fields(whole.schema, indices))
        self.rows = whole.rows
        self._whole = whole
        self._indices = indices
        self._projecting = threading.Lock()
        self._projected: dict[bool, list[StaticMessage]] = {}  # from what is packed, and from what is mapped

    def open_reader(self) -> pa.RecordBatchReader:
        return select_columns(self._whole.open_reader(), self._indices)

    def packed(self) -> Sequence[StaticMessage]:
        return self._choose(False, self._whole.packed())

    def mapped(self) -> tuple[Sequence[StaticMessage], Sequence[SharedSegment]]:
        messages, segments = self._whole.mapped()
        return self._choose(True, messages), segments

    def _choose(self, mapped: bool, messages: Sequence[StaticMessage]) -> Sequence[StaticMessage]:
        with self._projecting:
            if mapped not in self._projected:
                try:
                    projection = Projection(messages[0].header, self._indices)
                    projected = [messages[0]._replace(header=projection.header)]
                    for message in messages[1:]:
                        chosen = projection.project(message.header, message.parsed)
                        if chosen is not None:
                            projected.append(_project_message(message, chosen))
                except FormatError as error:
                    raise SourceError(f"{self.name!r} holds what no columns can be chosen of: {error}") from None
                self._projected[mapped] = projected
            return self._projected[mapped]


class _StaticBatches(StaticDataset):
    """Some batches of a static dataset, and all dictionaries that come before the last of them."""

    def __init__(self, whole: StaticDataset, numbers: Sequence[int]) -> None:
        super().__init__(whole.name, whole.schema)
        self._whole = whole
        self._numbers = numbers  # ascending

    def open_reader(self) -> pa.RecordBatchReader:
        return pick_batches(self._whole.open_reader(), self._numbers)

    def packed(self) -> Sequence[StaticMessage]:
        return self._slice_messages(self._whole.packed())

    def mapped(self) -> tuple[Sequence[StaticMessage], Sequence[SharedSegment]]:
        messages, segments = self._whole.mapped()
        return self._slice_messages(messages), segments

    def _slice_messages(self, messages: Sequence[StaticMessage]) -> Sequence[StaticMessage]:
        numbers = self._numbers if isinstance(self._numbers, range) else {*self._numbers}
        stop = self._numbers[-1] + 1 if self._numbers else 0
        sliced = [messages[0]]  # the schema
        number = 0
        for message in messages[1:]:
            if number == stop:
                break
            is_batch = message.parsed.type is HeaderType.RECORD_BATCH
            if not is_batch or number in numbers:
                sliced.append(message)
            number += is_batch
        return sliced


def _project_message(message: StaticMessage, chosen: ProjectedMessage) -> StaticMessage:
    """The parts of `message` that are `chosen`."""
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


class TableDataset(StaticDataset):
    """A Table. It is sent from where it lies; the first client that can map memory gets it copied there, once."""

    def __init__(self, name: str, table: pa.Table, options: WriteOptions | None = None) -> None:
        super().__init__(name, table.schema)
        self.rows = table.num_rows
        # What `nbytes` of pyarrow counts exactly: but it crashes on a union without rows.
        has_union = any(_has_union(field.type) for field in table.schema)
        self.nbytes = table.get_total_buffer_size() if has_union else table.nbytes
        self._table = table
        self._options = options
        self._packed: list[StaticMessage] | None = None
        self._segments: SegmentsDataset | None = None
        self._copying = threading.Lock()  # not the other one: clients that need no copy shall not wait for it
        self._validated = OnceValidator()
        self._looking = threading.Lock()
        self._statistics: dict[int, Statistics | None] = {}

    def open_reader(self) -> pa.RecordBatchReader:
        return BatchReader(self.schema, self._validated.check(self.schema, batches(self._table.to_reader())))

    def statistics(self, columns: Sequence[int]) -> Statistics | None:
        """Looked at when they are asked for, once for each column."""
        with self._looking:
            for column in columns:
                if column not in self._statistics:
                    collector = Collector(self.schema, [column])
                    for batch in self._table.to_reader():
                        collector.add(batch)
                    self._statistics[column] = collector.statistics()
            known = [one for column in columns if (one := self._statistics[column]) is not None]
        if not known:
            return None
        return Statistics(known[0].num_rows, {column: one for some in known for column, one in some.bounds.items()})

    def packed(self) -> Sequence[StaticMessage]:
        with self._lock:
            if self._packed is None:
                self._packed = [StaticMessage(*m) for m in split(self._table.to_reader(), self._options)]
            return self._packed

    def mapped(self) -> tuple[Sequence[StaticMessage], Sequence[SharedSegment]]:
        with self._copying:
            if self._segments is None:
                segment = Segment.in_memory(self.name, self._table.to_reader(), self._options)
                self._segments = SegmentsDataset(self.name, [segment])
            return self._segments.mapped()


def _has_union(type_: pa.DataType) -> bool:
    if isinstance(type_, pa.BaseExtensionType):
        return _has_union(type_.storage_type)
    if pa.types.is_dictionary(type_):
        return _has_union(type_.value_type)
    return pa.types.is_union(type_) or any(_has_union(type_.field(index).type) for index in range(type_.num_fields))


class SegmentsDataset(StaticDataset):
    """Segments, one after the other.

    Raises SourceError where their schemas differ, or there are too many.
    """

    def __init__(self, name: str, segments: Sequence[Segment]) -> None:
        if len(segments) > MAX_REGIONS:
            raise SourceError(
                f"{name!r} would have {len(segments)} segments; at most {MAX_REGIONS} can be shared: "
                "write it in fewer, from Spark after df.coalesce(...)"
            )
        self.segments = segments
        first = segments[0]
        for other in segments[1:]:
            if other.messages[0].header != first.messages[0].header:
                raise SourceError(
                    f"all of {name!r} must have one schema, and in what is added "
                    f"{schema_difference(first.schema, other.schema)}"
                )
        super().__init__(name, first.schema)
        self.rows = sum(segment.rows for segment in segments)
        self.nbytes = sum(segment.nbytes for segment in segments)
        self._messages = [
            StaticMessage(
                message.header,
                message.parsed,
                (segment.body(message),) if message.parsed.has_body else None,
                segment.addresses(message) if message.parsed.has_body else None,
                index,
            )
            for index, segment in enumerate(segments)
            for message in segment.messages
            if message.parsed.has_body or (index == 0 and message is segment.messages[0])  # one schema, the first
        ]

    def open_reader(self) -> pa.RecordBatchReader:
        return BatchReader(self.schema, self._batches())

    def _batches(self) -> Iterator[BatchAndMetadata]:
        with source_errors(self.name):
            for segment in self.segments:
                yield from segment.batches()

    def check_metadata(self, limit: int) -> None:
        for segment in self.segments:
            segment.check_metadata(limit)

    def packed(self) -> Sequence[StaticMessage]:
        return self._messages

    def mapped(self) -> tuple[Sequence[StaticMessage], Sequence[Segment]]:
        return self._messages, self.segments

    def appendable(self) -> Sequence[Segment]:
        return self.segments

    def statistics(self, columns: Sequence[int]) -> Statistics | None:
        known = [segment.statistics or Statistics.unknown(segment.batch_rows) for segment in self.segments]
        return Statistics.concatenate(known) if any(one.bounds for one in known) else None

    def open(self) -> SegmentsDataset:
        return self


class StoredDataset(Dataset):
    """What lies in a store. `open_segments` opens it, for each reader or for several; nobody else holds it open.

    `schema`, `rows` and `nbytes` are what it was when it was committed, and what it still must be.
    """

    def __init__(
        self, name: str, schema: pa.Schema, rows: int, nbytes: int, open_segments: Callable[[], SegmentsDataset]
    ) -> None:
        super().__init__(name, schema)
        self.rows = rows
        self.nbytes = nbytes
        self._open = open_segments
        self._lock = threading.Lock()
        self._exposed: SegmentsDataset | None = None
        self._dropped = False

    def open(self) -> SegmentsDataset:
        exposed = self._exposed  # what a client was told of its memory is true of this one alone
        if exposed is not None:
            return exposed
        opened = self._open()
        # By names, since an extension type may have been registered since the schema was read.
        if (opened.rows, opened.nbytes, opened.schema.names) != (self.rows, self.nbytes, self.schema.names):
            raise SourceError(f"{self.name!r} is not what was committed: its segments have been changed since")
        return opened

    def open_exposed(self) -> SegmentsDataset:
        opened = self.open()  # without the lock, since a store that removes this calls `drop`
        with self._lock:
            if self._exposed is None and not self._dropped:
                self._exposed = opened
            return self._exposed or opened

    def accept(self, visitor: SendVisitor[S]) -> S:
        return self.open().accept(visitor)

    def appendable(self) -> Sequence[Segment]:
        return self.open().segments

    def reopen(self) -> None:
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
