"""What a server holds under a name: a stream of IPC messages that can be sent, once or again and again.

A static dataset keeps its messages, so they are numbered and encoded once. A live one opens its source for each
client.
"""

from __future__ import annotations

import os
import secrets
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

import pyarrow as pa

from dissociated.errors import DissociatedError, FormatError, OptionError, SourceError
from dissociated.ipc.batches import BatchReader
from dissociated.ipc.columns import only, selected, sliced
from dissociated.ipc.options import WriteOptions, given
from dissociated.ipc.split import Pair, SplitMessage, Splitter, Validated, batches, split
from dissociated.memory.region import MAX_REGIONS, Region
from dissociated.memory.shared import Backing
from dissociated.message import Buffer, Message, too_long
from dissociated.protocol.bodies import encode_addresses
from dissociated.protocol.events import Streams
from dissociated.protocol.header import Header, HeaderType
from dissociated.protocol.projection import Chosen, Projection
from dissociated.protocol.selection import Selection
from dissociated.protocol.sender import Body, encode_message
from dissociated.protocol.tags import BodyKind
from dissociated.store.segment import Segment
from dissociated.transport.base import Connection

#: How many messages are encoded and sent at once.
_GROUP = 512
#: Static datasets of up to this many messages keep them encoded for each kind of connection that asked.
_MAX_CACHED = 1 << 16
#: Of how many selections of columns a static dataset keeps the messages.
_MAX_SELECTIONS = 16

#: Anything `publish` takes; see `dataset`.
Source: TypeAlias = Any
OpenReader: TypeAlias = Callable[[], pa.RecordBatchReader]
#: The same, of some of the columns, by their position.
OpenColumns: TypeAlias = Callable[[Sequence[int]], pa.RecordBatchReader]


def check_name(name: object) -> None:
    """Raise OptionError for what cannot be the name of a dataset."""
    if not isinstance(name, str) or not name:
        raise OptionError(f"the name of a dataset is a text that is not empty, not {name!r}")
    if "\0" in name or any("\ud800" <= character <= "\udfff" for character in name):
        raise OptionError(f"{name!r} cannot be the name of a dataset: it has what no other program could write")


class Dataset(ABC):
    """A stream under a name. `rows` and `nbytes` (of the bodies) are None where they are not known."""

    rows: int | None = None
    nbytes: int | None = None
    #: Whether one server can give metadata of it over one connection, and bodies over another.
    divisible = True

    def __init__(self, name: str, schema: pa.Schema) -> None:
        self.name = name
        self.schema = schema
        self._readers = 0
        self._counting = threading.Lock()
        #: The identifier that want_data carries: unguessable, and of this publication alone.
        self.ticket: bytes = secrets.token_bytes(16)

    def opened(self) -> Dataset:
        """What is sent, which stays as it is for as long as you hold it. Raises SourceError and DatasetNotFound."""
        return self

    def exposed(self) -> Dataset:
        """The same, where clients fetch from its memory: that stays where it is until this is dropped."""
        return self.opened()

    @property
    def readers(self) -> int:
        """How many connections are sent it, or hold leases of it."""
        return self._readers

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Count a reader for as long as it lasts."""
        with self._counting:
            self._readers += 1
        try:
            yield
        finally:
            with self._counting:
                self._readers -= 1

    def check_metadata(self, limit: int) -> None:
        """Raise SourceError or StoreError where the metadata of a message that is known has more than `limit` bytes."""
        why = too_long(repr(self.name), len(Splitter(self.schema).schema_message.header), limit)
        if why is not None:
            raise SourceError(why)

    @abstractmethod
    def open_reader(self) -> pa.RecordBatchReader:
        """A reader over the dataset in this process. Raises SourceError where there is none to be had any more."""

    def drop(self) -> None:  # noqa: B027  # only what runs by itself has something to end
        """It is not published any more. Streams of it go on, but for one that is live."""

    def close(self) -> None:
        """The server is closing."""
        self.drop()

    def select(self, selection: Selection) -> Dataset:
        """The same with these columns and batches alone. Raises ColumnNotFound and OptionError."""
        indices = selection.indices(self.schema.names)
        chosen = self if len(indices) == len(self.schema) else self._select(tuple(indices))
        return chosen if selection.batches is None else chosen._slice(*selection.batches)

    @abstractmethod
    def _select(self, indices: tuple[int, ...]) -> Dataset:
        """The same with the columns at these positions, which are there and ascend."""

    def _slice(self, first: int, stop: int) -> Dataset:
        """The same with the record batches from number `first` up to `stop`, as far as they are there."""
        raise OptionError(f"the batches of {self.name!r} have no numbers: it is read once for all")


class StreamedDataset(Dataset):
    """A dataset whose messages are made for each client, and written with `options`."""

    options: WriteOptions | None = None

    @abstractmethod
    def messages(self) -> Iterator[SplitMessage]:
        """The messages of one reading, bodies packed."""

    def _slice(self, first: int, stop: int) -> Dataset:
        return _LiveBatches(self, first, stop)


class LiveDataset(StreamedDataset):
    """A source that is opened for each client, or a reader that can be read once.

    Where `open_columns` is given, it reads some of the columns without the others.
    """

    def __init__(
        self,
        name: str,
        open_reader: OpenReader,
        options: WriteOptions | None = None,
        one_shot: bool = False,
        open_columns: OpenColumns | None = None,
    ) -> None:
        first = open_reader()
        super().__init__(name, first.schema)
        self._first = first if one_shot else None
        self._open_reader = open_reader
        self._one_shot = one_shot
        self.divisible = not one_shot
        self._lock = threading.Lock()
        self.options = options
        self.open_columns = open_columns

    def open_reader(self) -> pa.RecordBatchReader:
        if self._one_shot:
            with self._lock:
                reader, self._first = self._first, None
            if reader is not None:
                return reader
            raise SourceError(
                f"{self.name!r} was published from a reader, which can be read once, and has been: "
                "publish a Table, a file, or a callable that gives a new reader each time"
            )
        reader = self._open_reader()
        if not reader.schema.equals(self.schema):
            raise SourceError(f"the source of {self.name!r} now has another schema than when it was published")
        return reader

    def messages(self) -> Iterator[SplitMessage]:
        return split(self.open_reader(), self.options)

    def _select(self, indices: tuple[int, ...]) -> Dataset:
        return _LiveColumns(self, indices)


class _LiveColumns(StreamedDataset):
    """Some columns of a live dataset. The others are left out before anything is encoded."""

    def __init__(self, whole: LiveDataset, indices: tuple[int, ...]) -> None:
        super().__init__(whole.name, only(whole.schema, indices))
        self.options = whole.options
        self._whole = whole
        self._indices = indices

    def open_reader(self) -> pa.RecordBatchReader:
        if self._whole.open_columns is not None:
            return self._whole.open_columns(self._indices)
        return selected(self._whole.open_reader(), self._indices)

    def messages(self) -> Iterator[SplitMessage]:
        return split(self.open_reader(), self._whole.options)

    def _select(self, indices: tuple[int, ...]) -> Dataset:
        return _LiveColumns(self._whole, tuple(self._indices[index] for index in indices))


class _LiveBatches(StreamedDataset):
    """Some batches of a live dataset. Those before them are read, though not encoded."""

    def __init__(self, whole: StreamedDataset, first: int, stop: int) -> None:
        super().__init__(whole.name, whole.schema)
        self.options = whole.options
        self._whole = whole
        self._place = first, stop

    def open_reader(self) -> pa.RecordBatchReader:
        return sliced(self._whole.open_reader(), *self._place)

    def messages(self) -> Iterator[SplitMessage]:
        return split(self.open_reader(), self.options)

    def _select(self, indices: tuple[int, ...]) -> Dataset:
        return self._whole._select(indices)._slice(*self._place)


class StaticMessage(NamedTuple):
    """A message that stays: its body packed, and the extents of its buffers in shared memory, if it lies there.

    `segment` numbers the segment that it lies in.
    """

    header: bytes
    parsed: Header
    packed: Sequence[Buffer] | None
    extents: Sequence[tuple[int, int]] | None = None
    segment: int = 0


class Group(NamedTuple):
    """Messages ready to be sent on one kind of connection, and the addresses that they lease."""

    prepared: Any
    messages: int
    leased: Sequence[int]
    nbytes: int  # of the bodies


class Shared(Protocol):
    """Memory that peers can map. The descriptor is read-only."""

    descriptor: int
    region: Region
    backing: Backing


class StaticDataset(Dataset):
    """Messages that stay, and the segments in shared memory that their bodies lie in."""

    def __init__(self, name: str, schema: pa.Schema) -> None:
        super().__init__(name, schema)
        self._lock = threading.Lock()
        self._cached: dict[tuple[type[Connection], Streams, bool, int], list[Group]] = {}
        self._selected: OrderedDict[tuple[int, ...], StaticDataset] = OrderedDict()
        self._dropped = False

    @abstractmethod
    def packed(self) -> Sequence[StaticMessage]:
        """The messages, to be sent with their bodies inline."""

    @abstractmethod
    def mapped(self) -> tuple[Sequence[StaticMessage], Sequence[Shared]]:
        """The messages, to be sent as addresses into these segments."""

    @property
    def packed_size(self) -> int:
        """Bytes of all bodies, as they are sent inline."""
        return sum(message.parsed.body_length for message in self.packed())

    def groups(self, connection: Connection, streams: Streams, mapped: bool, inline_limit: int) -> Iterable[Group]:
        """The whole stream but its end, encoded for `connection`.

        Bodies travel by address if `mapped`, but for those of at most `inline_limit` bytes.
        """
        messages = self.mapped()[0] if mapped else self.packed()
        if len(messages) > _MAX_CACHED:
            return _encode(messages, connection, streams, mapped, inline_limit)
        key = type(connection), streams, mapped, inline_limit
        with self._lock:
            if key not in self._cached:
                self._cached[key] = list(_encode(messages, connection, streams, mapped, inline_limit))
            return self._cached[key]

    def _select(self, indices: tuple[int, ...]) -> Dataset:
        with self._lock:
            found = self._selected.pop(indices, None) or StaticColumns(self, indices)
            if not self._dropped:
                self._selected[indices] = found
            if len(self._selected) > _MAX_SELECTIONS:
                self._selected.popitem(last=False)
            return found

    def _slice(self, first: int, stop: int) -> Dataset:
        return _StaticBatches(self, first, stop)

    def drop(self) -> None:
        with self._lock:  # they refer back, and memory shall not wait for the collector
            self._dropped = True
            self._selected.clear()


class StaticColumns(StaticDataset):
    """Some columns of a static dataset: its metadata encoded anew, its bodies chosen from where they lie."""

    def __init__(self, whole: StaticDataset, indices: tuple[int, ...]) -> None:
        super().__init__(whole.name, only(whole.schema, indices))
        self.rows = whole.rows
        self._whole = whole
        self._indices = indices
        self._choosing = threading.Lock()
        self._chosen: dict[bool, list[StaticMessage]] = {}  # from what is packed, and from what is mapped

    def open_reader(self) -> pa.RecordBatchReader:
        return selected(self._whole.open_reader(), self._indices)

    def packed(self) -> Sequence[StaticMessage]:
        return self._choose(False, self._whole.packed())

    def mapped(self) -> tuple[Sequence[StaticMessage], Sequence[Shared]]:
        messages, segments = self._whole.mapped()
        return self._choose(True, messages), segments

    def _choose(self, mapped: bool, messages: Sequence[StaticMessage]) -> Sequence[StaticMessage]:
        with self._choosing:
            if mapped not in self._chosen:
                try:
                    projection = Projection(messages[0].header, self._indices)
                    some = [messages[0]._replace(header=projection.header)]
                    for message in messages[1:]:
                        chosen = projection.choose(message.header, message.parsed)
                        if chosen is not None:
                            some.append(_chosen(message, chosen))
                except FormatError as error:
                    raise SourceError(f"{self.name!r} holds what no columns can be chosen of: {error}") from None
                self._chosen[mapped] = some
            return self._chosen[mapped]


class _StaticBatches(StaticDataset):
    """Some batches of a static dataset, and all dictionaries that come before the last of them."""

    def __init__(self, whole: StaticDataset, first: int, stop: int) -> None:
        super().__init__(whole.name, whole.schema)
        self._whole = whole
        self._place = first, stop

    def open_reader(self) -> pa.RecordBatchReader:
        return sliced(self._whole.open_reader(), *self._place)

    def packed(self) -> Sequence[StaticMessage]:
        return self._between(self._whole.packed())

    def mapped(self) -> tuple[Sequence[StaticMessage], Sequence[Shared]]:
        messages, segments = self._whole.mapped()
        return self._between(messages), segments

    def _between(self, messages: Sequence[StaticMessage]) -> Sequence[StaticMessage]:
        first, stop = self._place
        some = [messages[0]]  # the schema
        number = 0
        for message in messages[1:]:
            if number == stop:
                break
            is_batch = message.parsed.type is HeaderType.RECORD_BATCH
            if number >= first or not is_batch:
                some.append(message)
            number += is_batch
        return some


def _chosen(message: StaticMessage, chosen: Chosen) -> StaticMessage:
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


def _encode(
    messages: Sequence[StaticMessage], connection: Connection, streams: Streams, mapped: bool, inline_limit: int
) -> Iterator[Group]:
    first = 0
    while first < len(messages):
        outgoing: list[Message] = []
        leased: list[int] = []
        # A group ends where a segment does, so that what it holds lies in one piece.
        some = [m for m in messages[first : first + _GROUP] if m.segment == messages[first].segment]
        for sequence, message in enumerate(some, first):
            body = None
            if mapped and message.extents is not None and message.parsed.body_length > inline_limit:
                body = Body(BodyKind.ADDRESSES, (encode_addresses(message.extents),))
                leased += (address for address, length in message.extents if length)
            elif message.packed is not None:
                body = Body(BodyKind.PACKED, message.packed)
            outgoing += encode_message(sequence, message.header, body, streams)
        bodies = bool(streams & Streams.BODIES)
        nbytes = sum(message.parsed.body_length for message in some) if bodies else 0
        yield Group(connection.prepare(outgoing), len(some), leased if bodies else (), nbytes)
        first += len(some)


class TableDataset(StaticDataset):
    """A Table. It is sent from where it lies; the first client that can map memory gets it copied there, once."""

    def __init__(self, name: str, table: pa.Table, options: WriteOptions | None = None) -> None:
        super().__init__(name, table.schema)
        self.rows = table.num_rows
        # What `nbytes` of pyarrow counts exactly: but it crashes on a union without rows.
        crashes = any(_has_union(field.type) for field in table.schema)
        self.nbytes = table.get_total_buffer_size() if crashes else table.nbytes
        self._table = table
        self._options = options
        self._packed: list[StaticMessage] | None = None
        self._segments: SegmentsDataset | None = None
        self._copying = threading.Lock()  # not the other one: clients that need no copy shall not wait for it
        self._validated = Validated()

    def open_reader(self) -> pa.RecordBatchReader:
        return BatchReader(self.schema, self._validated.check(self.schema, batches(self._table.to_reader())))

    def packed(self) -> Sequence[StaticMessage]:
        with self._lock:
            if self._packed is None:
                self._packed = [StaticMessage(*m) for m in split(self._table.to_reader(), self._options)]
            return self._packed

    def mapped(self) -> tuple[Sequence[StaticMessage], Sequence[Shared]]:
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
                    f"the segments of {name!r} do not have one schema: {other.name} differs from {first.name}"
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

    def _batches(self) -> Iterator[Pair]:
        with source_blamed(self.name):
            for segment in self.segments:
                yield from segment.batches()

    def check_metadata(self, limit: int) -> None:
        for segment in self.segments:
            segment.check_metadata(limit)

    def packed(self) -> Sequence[StaticMessage]:
        return self._messages

    def mapped(self) -> tuple[Sequence[StaticMessage], Sequence[Segment]]:
        return self._messages, self.segments

    def opened(self) -> SegmentsDataset:
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

    def opened(self) -> SegmentsDataset:
        kept = self._exposed  # what a client was told of its memory is true of this one alone
        if kept is not None:
            return kept
        found = self._open()
        # By names, since an extension type may have been registered since the schema was read.
        if (found.rows, found.nbytes, found.schema.names) != (self.rows, self.nbytes, self.schema.names):
            raise SourceError(f"{self.name!r} is not what was committed: its segments have been changed since")
        return found

    def exposed(self) -> SegmentsDataset:
        found = self.opened()  # without the lock, since a store that removes this calls `drop`
        with self._lock:
            if self._exposed is None and not self._dropped:
                self._exposed = found
            return self._exposed or found

    def moved(self) -> None:
        """It lies elsewhere now: whoever reads it goes on, and the next opens it there."""
        with self._lock:
            self._exposed = None

    def open_reader(self) -> pa.RecordBatchReader:
        return self.opened().open_reader()

    def select(self, selection: Selection) -> Dataset:
        return self.opened().select(selection)

    def _select(self, indices: tuple[int, ...]) -> Dataset:
        return self.opened()._select(indices)

    def drop(self) -> None:
        with self._lock:
            self._dropped = True
            self._exposed = None


def dataset(name: str, source: Source, options: WriteOptions | None = None) -> Dataset:
    """A dataset of whatever `source` is.

    A Table or a RecordBatch is held. A path to an Arrow IPC stream or file is mapped and served from where it
    lies; one to a Parquet file is read anew by each client. A RecordBatchReader can be read by one client, once.
    A callable is called once to learn the schema and again for each client; it gives a reader, or anything with
    `__arrow_c_stream__`, and the same stream each time. Anything else with `__arrow_c_stream__` (a
    DataFrame of Polars or pandas, a relation of DuckDB) is asked for a new stream each time. A Tensor, a sparse one,
    or a list of them is held, and read with `read_tensors` or `open_tensors`.

    Raises SourceError for what is none of these, and FormatError for a schema deeper than `options` allow.
    """
    if options is not None:
        given(options, WriteOptions)
    made = _dataset(name, source, options)
    if options is not None:
        options.check_depth(made.schema)
    return made


def _dataset(name: str, source: Source, options: WriteOptions | None) -> Dataset:
    if isinstance(source, pa.RecordBatch):
        source = pa.Table.from_batches([source])
    if isinstance(source, pa.Table):
        return TableDataset(name, source, options)
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        if not path.is_file():
            raise SourceError(f"cannot publish {path}: there is no such file")
        if _is_parquet(path):
            return _parquet(name, path, options)
        if options is not None:
            raise SourceError(
                f"cannot publish {path} with options: an Arrow IPC file is served as it is. Publish a callable that "
                "opens it, whose batches are then written anew"
            )
        return SegmentsDataset(name, [Segment.open(path)])
    if isinstance(source, pa.RecordBatchReader):
        return LiveDataset(name, lambda: source, options, one_shot=True)
    from dissociated.tensor_dataset import TensorDataset, tensors_in

    if (tensors := tensors_in(source)) is not None:
        return TensorDataset(name, tensors, options)
    return LiveDataset(name, lambda: open_source(name, source), options)


@contextmanager
def source_blamed(name: str) -> Iterator[None]:
    """Turn whatever the source of `name` raises into a SourceError, whose reason a client can be told."""
    try:
        yield
    except FormatError as error:
        raise SourceError(f"the source of {name!r} failed: {error}") from error
    except DissociatedError:
        raise
    except Exception as error:  # it is the publisher's code: anything may come out of it
        kind = type(error).__name__
        failed = SourceError(f"the source of {name!r} failed: {kind}: {error}")
        if not isinstance(error, pa.ArrowException):
            failed.told = f"the source of {name!r} failed ({kind}): the log of its server says more"
        raise failed from error


def open_source(name: str, source: Source) -> pa.RecordBatchReader:
    """A reader over `source`, or over what it gives if it is a callable. Raises SourceError."""
    with source_blamed(name):
        return _reader(source() if callable(source) else source)


def _reader(source: Source) -> pa.RecordBatchReader:
    if isinstance(source, pa.RecordBatchReader):
        return source
    if hasattr(source, "__arrow_c_stream__"):
        return pa.RecordBatchReader.from_stream(source)
    raise SourceError(
        f"cannot publish a {type(source).__name__}: give a Table, a RecordBatchReader, an object with "
        "__arrow_c_stream__, a callable that returns one of these, the path of an Arrow IPC or Parquet file, "
        "or one or more tensors"
    )


def confined(whole: Dataset, columns: Sequence[str]) -> Dataset:
    """These columns of `whole`, for one reading, in memory that holds no others. Raises ColumnNotFound.

    `select` spares bytes, and lets clients map segments and regions that hold the other columns too.
    """
    reader = whole.select(Selection(tuple(columns))).open_reader()
    return LiveDataset(whole.name, lambda: reader, one_shot=True)


def _is_parquet(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4) == b"PAR1"
    except OSError as error:
        raise SourceError(f"cannot read {path}: {error.strerror}") from error


def _parquet(name: str, path: Path, options: WriteOptions | None) -> Dataset:
    import pyarrow.parquet

    def open_reader() -> pa.RecordBatchReader:
        file = pyarrow.parquet.ParquetFile(path, memory_map=True)
        return pa.RecordBatchReader.from_batches(file.schema_arrow, file.iter_batches())

    def open_columns(indices: Sequence[int]) -> pa.RecordBatchReader:
        file = pyarrow.parquet.ParquetFile(path, memory_map=True)
        names = file.schema_arrow.names
        if len(set(names)) < len(names) or any("." in name for name in names):
            return selected(open_reader(), indices)  # names stand for paths too, so these would be ambiguous
        schema = only(file.schema_arrow, indices)
        return pa.RecordBatchReader.from_batches(schema, file.iter_batches(columns=schema.names))

    try:
        made = LiveDataset(name, open_reader, options, open_columns=open_columns)
        made.rows = pyarrow.parquet.read_metadata(path).num_rows
    except (OSError, pa.ArrowInvalid) as error:
        raise SourceError(f"cannot read {path}: {error}") from error
    return made
