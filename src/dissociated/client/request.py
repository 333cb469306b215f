"""What is read, how, and within which limits: one value from the public functions down to the connection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from dissociated.base.buffers import MAX_BODY, MAX_METADATA
from dissociated.codec.options import ReadOptions
from dissociated.errors import OptionError
from dissociated.memory.device.base import Device
from dissociated.memory.region import AddressSpace
from dissociated.protocol.request import RowSelection, Selection
from dissociated.transport.base import check_timeout

#: Seconds that a server may be silent.
TIMEOUT = 60.0


@dataclass(frozen=True, kw_only=True)
class ReadRequest:
    """The parameters of a read. `open_stream` says what each of them means.

    `rows` are counted from the first of the `batches`, `filter` chooses among them, and `limit` counts what passes.
    Where that need not be `exact`, rows that do not pass are left out only as far as that costs nothing here.
    `schema` is that of the whole dataset, where it is known. `rows_at_server` is what a server is asked to choose.
    `device` is where batches are to lie, if not in memory of this process; bodies that come compressed for it are
    decompressed here first, or, without `decompress`, refused. `keep_files` keeps open what is mapped, so that it can
    be mapped once more, and `spaces` is told of the address spaces that bodies may lie in.
    Raises OptionError for values that make no sense, LocalProtocolError for such a timeout.
    """

    columns: Sequence[str] | None = None
    batches: tuple[int, int] | None = None
    rows: range | None = None
    filter: Any = None
    exact: bool = True
    limit: int | None = None
    schema: pa.Schema | None = None
    rows_at_server: RowSelection | None = None
    options: ReadOptions = field(default_factory=ReadOptions)
    timeout: float = TIMEOUT
    max_body: int = MAX_BODY
    max_metadata: int = MAX_METADATA
    allow_rma: bool = False
    device: Device | None = None
    decompress: bool = True
    keep_files: bool = False
    spaces: list[AddressSpace] | None = None

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
        check_decompress(self.decompress, self.device)

    @property
    def chooses_rows(self) -> bool:
        """Whether rows are to be chosen by what they hold, or only the first of them."""
        return self.filter is not None or self.limit is not None

    @property
    def selection(self) -> Selection | None:
        """What a server is asked for: columns by name, by position, or all, and batches; None for everything."""
        fields = tuple(self.options.included_fields) or None
        if self.columns is None and fields is None and self.batches is None and self.rows_at_server is None:
            return None
        columns = None if self.columns is None else tuple(self.columns)
        return Selection(columns, fields, self.batches, self.rows_at_server)

    def without_columns(self) -> ReadRequest:
        """The same for all batches, of which only the metadata moves: they say how many rows there are."""
        options = replace(self.options, included_fields=())
        return replace(
            self, columns=(), batches=None, rows=None, filter=None, limit=None, rows_at_server=None, options=options
        )


def check_decompress(decompress: object, device: Device | None) -> None:
    """Raise OptionError for what `decompress` cannot be."""
    if not isinstance(decompress, bool) or (not decompress and device is None):
        raise OptionError(f"decompress is True, or False with a device, not {decompress!r}")
