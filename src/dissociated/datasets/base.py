"""What a server holds under a name: a stream of IPC messages that can be sent, once or again and again.

A static dataset keeps its messages, so they are numbered and encoded once. A live one opens its source for each
client.
"""

from __future__ import annotations

import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import pyarrow as pa

from dissociated.base.buffers import metadata_too_long
from dissociated.codec.split import Splitter
from dissociated.errors import OptionError, SourceError
from dissociated.memory.device.segment import DeviceSegment
from dissociated.memory.region import Region
from dissociated.protocol.request import Selection
from dissociated.store.segment import Segment

if TYPE_CHECKING:
    from dissociated.codec.substrait import FilterNode

#: Anything `publish` takes; see `make_dataset`.
Source: TypeAlias = Any
OpenReader: TypeAlias = Callable[[], pa.RecordBatchReader]
#: The same, of some of the columns, by their position, as far as the source still has so many.
OpenColumns: TypeAlias = Callable[[Sequence[int]], pa.RecordBatchReader]


def check_name(name: object) -> None:
    """Raise OptionError for what cannot be the name of a dataset."""
    if not isinstance(name, str) or not name:
        raise OptionError(f"the name of a dataset is a text that is not empty, not {name!r}")
    if not is_plain_text(name):
        raise OptionError(f"{name!r} cannot be the name of a dataset: it has what no other program could write")


def is_plain_text(value: object) -> bool:
    """Whether it is a text that other programs can write, too: without halves of characters, and without a NUL."""
    return isinstance(value, str) and not any(one == "\0" or "\ud800" <= one <= "\udfff" for one in value)


class Dataset(ABC):
    """A stream under a name."""

    #: How many rows it has; None where that is not known.
    rows: int | None = None
    #: Bytes of its bodies; None where they are not known.
    nbytes: int | None = None
    #: Whether one server can give metadata of it over one connection, and bodies over another.
    splits_streams = True
    #: Whether every reading gives the same batches. Else its source is opened anew, and may give others, or none.
    repeatable = True
    #: Whether it lies in a store, which counts what it takes for as long as somebody has it mapped.
    stored = False
    #: Whether one client can be sent some of its rows alone.
    filterable = True

    def __init__(self, name: str, schema: pa.Schema) -> None:
        self.name = name
        self.schema = schema
        self._readers = 0
        self._counting = threading.Lock()
        #: The identifier that want_data carries: unguessable, and of this publication alone.
        self.ticket: bytes = secrets.token_bytes(16)

    def open(self) -> Dataset:
        """The dataset to send: it stays as it is for as long as you hold it. Raises SourceError and DatasetNotFound."""
        return self

    def open_exposed(self) -> Dataset:
        """See `open`; for clients that fetch from its memory.

        That stays where it is until its segments are closed, or this is dropped.
        """
        return self.open()

    @property
    def device_segment(self) -> DeviceSegment | None:
        """The memory that it lies in on a device; None where it does not lie on one."""
        return None

    def regions(self) -> Sequence[Region]:
        """The regions that its bodies lie in, if these stay where they are. Raises StoreError."""
        return ()

    def appendable(self) -> Sequence[Segment]:
        """Its segments, for others to be appended. Raises SourceError where it was not written in segments."""
        raise SourceError(f"{self.name!r} was not written in segments, so nothing can be appended to it")

    def check_unchanged(self) -> None:
        """Raise SourceError where it lies in somebody else's file, and that has been written to."""

    def prepare_sharing(self, wait: bool) -> None:
        """Copy to shared memory what clients will map: in the background, or with `wait` before this returns.

        With `wait` it raises StoreError and SourceError.
        """

    @property
    def packed_size(self) -> int | None:
        """Bytes of all bodies, as they are sent inline; None where they are not known before they are read."""
        return None

    @property
    def min_packed_size(self) -> int | None:
        """Bytes that all bodies have at least, as far as that is known before they are read."""
        return self.packed_size

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
        why = metadata_too_long(repr(self.name), len(Splitter(self.schema).schema_message.header), limit)
        if why is not None:
            raise SourceError(why)

    @abstractmethod
    def open_reader(self) -> pa.RecordBatchReader:
        """A reader over the dataset in this process. Raises SourceError where there is none to be had any more."""

    @property
    def exposed(self) -> bool:
        """Whether it holds segments open that lie in a store, since `open_exposed` was asked for them."""
        return False

    def close_segments(self) -> None:
        """Hold no segments open that lie in a store. Whoever reads them goes on; the next reading opens them anew."""

    def drop(self) -> None:
        """It is not published any more. Streams of it go on, unless it is read once for all clients: that one ends."""

    def close(self) -> None:
        """The server is closing."""
        self.drop()

    def wait_closed(self, timeout: float) -> None:
        """Wait, once it is closed, for up to `timeout` seconds until nothing of it runs any more."""

    def select(self, selection: Selection) -> Dataset:
        """A dataset of these columns and batches alone. Raises ColumnNotFound and OptionError."""
        indices = selection.indices(self.schema.names)
        chosen = self.select_positions(indices)
        return chosen if selection.batches is None else chosen.slice_batches(*selection.batches)

    def select_positions(self, indices: Sequence[int]) -> Dataset:
        """A dataset of the columns at these positions, which ascend; this one if they are all."""
        return self if len(indices) == len(self.schema) else self._select(tuple(indices))

    def passing_batches(self, filter_: FilterNode, columns: Sequence[int]) -> Sequence[bool] | None:
        """For each batch, whether one of its rows may pass a filter; None where nothing is known of any.

        The filter numbers the columns that are at these positions here.
        """
        return None

    def pick_batches(self, numbers: Sequence[int]) -> Dataset:
        """A dataset of the batches of these numbers alone, which ascend. Raises OptionError where none have numbers."""
        raise OptionError(f"the batches of {self.name!r} cannot be picked")

    @abstractmethod
    def _select(self, indices: tuple[int, ...]) -> Dataset:
        """A dataset of the columns at these positions, which are there, ascend, and are not all."""

    def slice_batches(self, first: int, stop: int) -> Dataset:
        """A dataset of the record batches from number `first` up to `stop`, as far as they are there.

        Raises OptionError for a stream that is read once for all clients.
        """
        raise OptionError(f"the batches of {self.name!r} have no numbers: it is read once for all")
