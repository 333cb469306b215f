"""The base class of datasets. A dataset is a stream of IPC messages that a server sends to clients under a name.

A static dataset keeps its messages, so they are numbered and encoded once. A streamed dataset opens its source for each
client, and a broadcast reads its source once for all clients.
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
from dissociated.codec.reader import check_field_names
from dissociated.codec.split import Splitter
from dissociated.errors import OptionError, ReadOnce, SourceError
from dissociated.memory.device.segment import DeviceSegment
from dissociated.memory.region import Region
from dissociated.protocol.request import Selection
from dissociated.store.segment import Segment

if TYPE_CHECKING:
    from dissociated.codec.filter.substrait import FilterNode

#: Any source that `publish` accepts; see `make_dataset`.
Source: TypeAlias = Any
#: A function that opens a reader of all columns.
OpenReader: TypeAlias = Callable[[], pa.RecordBatchReader]
#: A function that opens a reader of the columns at the given positions. It skips positions that no longer exist.
OpenColumns: TypeAlias = Callable[[Sequence[int]], pa.RecordBatchReader]
#: Tells whether the client of a stream has disconnected.
IsGone: TypeAlias = Callable[[], bool]


class Dataset(ABC):
    """A named stream of record batches or tensors."""

    #: Number of rows; None if unknown.
    rows: int | None = None
    #: Total bytes of all bodies; None if unknown.
    nbytes: int | None = None
    #: Whether metadata and bodies can be sent over separate connections.
    splits_streams = True
    #: Whether batches may have a note that their client missed batches before: see `format/missed.py`.
    notes_missed = False
    #: Whether every reading gives the same batches. Otherwise the source is opened anew for each reading, and may give
    #: different batches or none.
    repeatable = True
    #: Whether the dataset lies in a store. The store itself counts the memory of segments that are still mapped.
    stored = False
    #: Whether a client can be sent a subset of the rows.
    filterable = True
    #: Whether the dataset is a stream of which nobody can read more. It is not listed, and a request gets the reason.
    exhausted = False
    #: Whether batches that a reading leaves out are lost, because the source can be read only once.
    loses_batches = False

    def __init__(self, name: str, schema: pa.Schema) -> None:
        """Raise SourceError if the name of a column is not UTF-8, which no client could read."""
        try:
            check_field_names(schema)
        except UnicodeDecodeError as error:
            raise SourceError(f"cannot publish {name!r}: the name of a column is not UTF-8 ({error})") from None
        self.name = name
        self.schema = schema
        #: The number of connections that receive this dataset or hold leases of it.
        self.readers = 0
        self._counting = threading.Lock()
        #: The identifier that `want_data` carries. It cannot be guessed, and belongs to this publication alone.
        self.ticket: bytes = secrets.token_bytes(16)

    def open(self) -> Dataset:
        """Return the dataset to send, which does not change for as long as the caller holds it.

        Raises:
            SourceError: The source cannot be read.
            DatasetNotFound: The dataset was deleted meanwhile.
        """
        return self

    def open_exposed(self) -> Dataset:
        """Return the dataset to send to clients that fetch from its memory by address. See `open` for errors.

        The memory keeps its addresses until `close_segments` or `drop` is called.
        """
        return self.open()

    @property
    def device_segment(self) -> DeviceSegment | None:
        """The device memory that the bodies lie in; None if the dataset is not on a device."""
        return None

    def regions(self) -> Sequence[Region]:
        """Return the regions that the bodies lie in, or none if the bodies have no fixed addresses.

        Raises:
            StoreError: A segment cannot be written.
        """
        return ()

    def appendable(self) -> Sequence[Segment]:
        """Return the segments, to which others can be appended. Raise SourceError if the dataset has no segments."""
        raise SourceError(f"{self.name!r} was not written in segments, so no rows can be appended")

    @property
    def is_modifiable(self) -> bool:
        """Whether the data lie in a user's file, which the user may modify. See `check_unchanged`."""
        return False

    def check_unchanged(self) -> None:
        """Raise SourceError if the dataset lies in a user's file that was modified since it was published."""

    def prepare_sharing(self, wait: bool) -> None:
        """Copy the bodies to shared memory for clients that map it.

        Args:
            wait: Copy before this returns, and raise errors. Otherwise, copy in the background.

        Raises:
            StoreError: `wait` is true, and there is no room for the copy.
            SourceError: `wait` is true, and the source cannot be read.
        """

    @property
    def packed_size(self) -> int | None:
        """The bytes of all bodies when they are sent inline; None if only reading them would tell."""
        return None

    @property
    def min_packed_size(self) -> int | None:
        """A lower bound of `packed_size` that is known without reading the bodies; None if there is none."""
        return self.packed_size

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Count a reader while the context is open."""
        with self._counting:
            self.readers += 1
        try:
            yield
        finally:
            with self._counting:
                self.readers -= 1

    def check_metadata(self, limit: int) -> None:
        """Check the length of the metadata of all messages that are known before reading.

        Raises:
            SourceError: The metadata of a message is longer than `limit` bytes.
            StoreError: The metadata of a message in a segment is longer.
        """
        why = metadata_too_long(repr(self.name), len(Splitter(self.schema).schema_message.header), limit)
        if why is not None:
            raise SourceError(why)

    @abstractmethod
    def open_reader(self) -> pa.RecordBatchReader:
        """Open a reader over the dataset in this process. Raise SourceError if it cannot be read, or not once more."""

    def open_reader_for(self, is_gone: IsGone) -> pa.RecordBatchReader:
        """Open a reader for a client. While it waits for other clients, it looks whether its own `is_gone`."""
        return self.open_reader()

    @property
    def exposed(self) -> bool:
        """Whether the dataset holds segments of a store open, because `open_exposed` was called."""
        return False

    def close_segments(self) -> None:
        """Close segments of a store that the dataset holds open. Readers go on; the next reading opens them anew."""

    def drop(self) -> None:
        """End the publication, once clients can no longer find the dataset. Streams go on, but a broadcast ends."""

    def close(self) -> None:
        """Release the dataset because its server closes."""
        self.drop()

    def wait_closed(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for threads of the dataset to end. Call it after `close`."""

    def select(self, selection: Selection) -> Dataset:
        """Return a dataset of the selected columns and batches alone.

        Raises:
            ColumnNotFound: A selected column does not exist.
            OptionError: Batches are selected and the batches of this dataset have no numbers.
        """
        indices = selection.indices(self.schema.names)
        chosen = self.select_positions(indices)
        return chosen if selection.batches is None else chosen.slice_batches(*selection.batches)

    def select_positions(self, indices: Sequence[int]) -> Dataset:
        """Return a dataset of the columns at `indices`, which must ascend. If these are all columns, return `self`."""
        return self if len(indices) == len(self.schema) else self._select(tuple(indices))

    def passing_batches(self, filter_: FilterNode, columns: Sequence[int]) -> Sequence[bool] | None:
        """Return, for each batch, whether any of its rows may pass a filter.

        Args:
            filter_: The filter. It refers to columns by their index in `columns`.
            columns: Positions of these columns in this dataset.

        Returns:
            A flag for each batch; None if no statistics are known for any batch.
        """
        return None

    def pick_batches(self, numbers: Sequence[int]) -> Dataset:
        """Return a dataset of the batches with these `numbers` alone, which must ascend.

        Raises:
            OptionError: The batches of this dataset have no numbers.
        """
        raise OptionError(f"the batches of {self.name!r} cannot be selected by number")

    @abstractmethod
    def _select(self, indices: tuple[int, ...]) -> Dataset:
        """Return a dataset of the columns at `indices`. These exist, ascend, and are not all columns."""

    def slice_batches(self, first: int, stop: int) -> Dataset:
        """Return a dataset of the record batches from number `first` up to, but not including, `stop`.

        Numbers beyond the last batch are ignored.

        Raises:
            ReadOnce: The dataset is a stream that is read once for all clients; or one that can be read only once, and
                these are not all of its batches.
        """
        raise ReadOnce(
            f"the batches of {self.name!r} have no numbers, because all clients share one stream: request all of the "
            "stream"
        )
