"""The parameters of a read in one value, which is passed from the public functions down to the connection."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import accumulate
from typing import Any, Self

from dissociated.base.buffers import MAX_BODY, MAX_METADATA
from dissociated.client.idle import IdleConnections
from dissociated.codec.options import ReadOptions, check_options
from dissociated.control.locations import MAX_EMBEDDED
from dissociated.errors import OptionError
from dissociated.memory.device.base import Device
from dissociated.memory.region import AddressSpace
from dissociated.protocol.request import Selection
from dissociated.transport.base import check_timeout

#: Seconds that a server may be silent.
TIMEOUT = 60.0
#: Parts of a dataset that are opened at once.
MAX_PARALLEL = 16
_DEFAULT_OPTIONS = check_options(None, ReadOptions)


class Filtering(Enum):
    """How far a read leaves out rows that do not pass its filter."""

    #: All such rows are left out.
    EXACT = "exact"
    #: If bodies are sent, the server leaves out all such rows. If memory is shared, this is the same as BY_STATISTICS.
    #: This process filters nothing.
    AT_SERVER = "at server"
    #: The server leaves out only batches in which no row passes, as far as its statistics show.
    BY_STATISTICS = "by statistics"


@dataclass(frozen=True, kw_only=True)
class ReadRequest:
    """The parameters of a read. `open_stream` describes most of them.

    Attributes:
        transport: Scheme of the locations to read from. None: the nearest location that can be reached.
        rows: Positions of rows, counted from the first row of `batches`. `filter` applies to these rows, and `limit` to
            the rows that pass the filter.
        filtering: How far rows that do not pass the filter are left out.
        device: Device for the batches; None for memory of this process.
        decompress: Whether compressed bodies for a device are decompressed in this process. If False, they are refused.
        keep_files: Keep mapped files open, so that they can be mapped again.
        spaces: A list to which the address space of each connection is added. Bodies may lie in these spaces.
        idle: Keeps connections for the next requests. None: each stream has a connection of its own.
        max_parallel: Largest number of parts of a dataset that are opened at once.
        reads_others_first: Whether other parts of the dataset are read first.
        traceparent: Trace context that servers get, if they trace.

    Raises:
        OptionError: A value is invalid.
        LocalProtocolError: The timeout is invalid.
    """

    transport: str | None = None
    columns: Sequence[str] | None = None
    batches: tuple[int, int] | None = None
    rows: range | None = None
    filter: Any = None
    filtering: Filtering = Filtering.EXACT
    limit: int | None = None
    options: ReadOptions = _DEFAULT_OPTIONS
    timeout: float = TIMEOUT
    max_body: int = MAX_BODY
    max_metadata: int = MAX_METADATA
    allow_rma: bool = False
    device: Device | None = None
    decompress: bool = True
    keep_files: bool = False
    spaces: list[AddressSpace] | None = None
    max_parallel: int = MAX_PARALLEL
    reads_others_first: bool = False
    idle: IdleConnections | None = field(default=None, compare=False)
    traceparent: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "timeout", check_timeout(self.timeout))
        if isinstance(self.columns, str):
            raise OptionError(f"columns is a list of names: [{self.columns!r}]")
        if self.rows is not None and not isinstance(self.rows, range):
            raise OptionError(
                f"rows is a range of positions, as range(100, 200), not {self.rows!r}; limit=100 gives the first"
            )
        if self.columns is not None and self.options.included_fields:
            raise OptionError("give columns or included_fields, not both")
        if self.batches is not None and not 0 <= self.batches[0] <= self.batches[1]:
            raise OptionError(f"batches are a first number and the one after the last, not {self.batches}")
        if self.rows is not None and (self.rows.step != 1 or self.rows.start < 0):
            raise OptionError(f"rows is a range of positions that follow each other, not {self.rows}")
        if self.limit is not None and (not isinstance(self.limit, int) or self.limit < 0):
            raise OptionError(f"limit is a number of rows, not {self.limit!r}")
        if type(self.max_parallel) is not int or self.max_parallel < 1:
            raise OptionError(f"max_parallel is a number of parts, 1 or more, not {self.max_parallel!r}")
        check_decompress(self.decompress, self.device)

    def updated(self, **values: Any) -> Self:
        """Return this request with these values: the same object if it has all of them already."""
        changes = {name: value for name, value in values.items() if value is not getattr(self, name)}
        return replace(self, **changes) if changes else self

    @property
    def selects_rows(self) -> bool:
        """Return whether a filter or a limit selects rows."""
        return self.filter is not None or self.limit is not None

    @property
    def embed(self) -> int:
        """Return the size in bytes up to which all rows of a dataset may come with its description.

        It is 0 if the caller chose a transport, a device or a memory pool, or limits messages to less than
        MAX_EMBEDDED.
        """
        is_free = self.transport is None and self.device is None and self.options.memory_pool is None
        return MAX_EMBEDDED if is_free and min(self.max_body, self.max_metadata) >= MAX_EMBEDDED else 0

    @property
    def columns_selected(self) -> Selection | None:
        """Return the selection of columns; None for all columns."""
        fields = tuple(self.options.included_fields) or None
        columns = None if self.columns is None else tuple(self.columns)
        return None if columns is None and fields is None else Selection(columns, fields)

    def without_columns(self) -> ReadRequest:
        """Return a request of all batches without columns. Only metadata is sent, which has the number of rows."""
        options = replace(self.options, included_fields=())
        return replace(self, columns=(), batches=None, rows=None, filter=None, limit=None, options=options)

    def within(self, batch_rows: Sequence[int]) -> ReadRequest:
        """Return a request of the same `rows` that is limited to the batches that contain these rows.

        A request without `rows`, or with `batches` of its own, is returned unchanged.

        Args:
            batch_rows: Number of rows of each batch.
        """
        rows = self.rows
        if rows is None or self.batches is not None:
            return self
        ends = [0, *accumulate(batch_rows)]
        first, stop = bisect_right(ends, rows.start) - 1, bisect_right(ends, rows.stop - 1)
        return replace(self, batches=(first, stop), rows=range(rows.start - ends[first], rows.stop - ends[first]))


def check_decompress(decompress: object, device: Device | None) -> None:
    """Raise OptionError if `decompress` is invalid."""
    if not isinstance(decompress, bool) or (not decompress and device is None):
        raise OptionError(f"decompress is True, or False with a device, not {decompress!r}")
