"""Which columns and batches of a stream are wanted: an identifier that says so besides the ticket.

The specification leaves what want_data carries to whoever serves. A plain ticket requests a whole stream; this
requests some of its top-level columns, or of its record batches, from a server whose URIs say `select=1`:

    8 bytes  "DISSCOL" and 1, the version
    4 bytes  length of the ticket, little-endian
    the ticket
    JSON     {"columns": [names]} or {"fields": [indices]}; and, or only, {"batches": [first, stop]}, {"rows": ROWS}

ROWS is for servers whose URIs say `filter=1`, too. It is {"filter": F, "limit": N, "exact": true}: those rows for
which the filter F is true, an expression of Substrait in base64, and of these the first N; both may be left out.
Columns that F looks at need not be among those that are wanted. With "exact": false, which has no limit, batches
without any such row may be left out, and the others come whole. Where a server does not filter so, its reason begins
with `REFUSED`.

A server that has not got one of them answers with the whole schema, and then gives the reason.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dissociated.base import strict_json
from dissociated.errors import ColumnNotFound, OptionError, RemoteProtocolError

#: How every identifier with a selection begins, and no ticket.
SELECTION_MAGIC = b"DISSCOL\x01"
#: The parameter by which a URI says that its server takes selections.
SELECT_PARAMETER = ("select", "1")
#: The parameter by which a URI says that its server chooses rows, too.
FILTER_PARAMETER = ("filter", "1")
#: How a server's reason begins that does not choose rows as it was asked to: the client then does.
REFUSED = "this server does not filter so"
#: How long an identifier may be, in bytes.
MAX_IDENTIFIER = 1 << 16

#: The largest number that a request may have; no stream has so many rows or batches.
_MAX_NUMBER = (1 << 63) - 1

_length = struct.Struct("<I")


@dataclass(frozen=True)
class RowSelection:
    """The rows for which the filter is true, in Substrait, and of these so many. None: all.

    Where it is not `exact`, whole batches, all that have such rows among them.
    """

    filter: bytes | None = None
    limit: int | None = None
    exact: bool = True

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        plain: dict[str, Any] = {"exact": self.exact}
        if self.filter is not None:
            plain["filter"] = base64.b64encode(self.filter).decode()
        return plain if self.limit is None else plain | {"limit": min(self.limit, _MAX_NUMBER)}

    @classmethod
    def parse(cls, plain: Any) -> RowSelection:
        """The opposite. Raises ValueError."""
        if not isinstance(plain, dict) or not plain.keys() <= {"filter", "limit", "exact"}:
            raise ValueError
        filter_, limit, exact = plain.get("filter"), plain.get("limit"), plain.get("exact")
        if not isinstance(exact, bool) or not isinstance(filter_, str | None):
            raise ValueError
        if limit is not None and (type(limit) is not int or limit < 0 or not exact):
            raise ValueError
        return cls(None if filter_ is None else base64.b64decode(filter_, validate=True), limit, exact)


@dataclass(frozen=True)
class Selection:
    """Some top-level columns, by name or by position, or all where both are None. Their order is that of the schema.

    Of the record batches those from the first number of `batches` up to the second, or all.
    """

    columns: tuple[str, ...] | None = None
    fields: tuple[int, ...] | None = None
    batches: tuple[int, int] | None = None
    rows: RowSelection | None = None

    def indices(self, names: Sequence[str]) -> list[int]:
        """Where they stand in a schema with these names, ascending. Columns that share a name come together.

        Raises ColumnNotFound, or OptionError for a position that is not there.
        """
        if self.columns is None:
            fields = set(range(len(names)) if self.fields is None else self.fields)
            for field in fields:
                if field >= len(names):
                    raise OptionError(f"there is no field {field} to include: the schema has {len(names)}")
            return sorted(fields)
        wanted = set(self.columns)
        for column in self.columns:
            if column not in names:
                raise ColumnNotFound(f"there is no column {column!r}; there are {', '.join(names)}")
        return [index for index, name in enumerate(names) if name in wanted]

    def identifier(self, ticket: bytes) -> bytes:
        """The identifier that requests them of the stream `ticket`; the ticket alone where that would be too long."""
        wanted = {kind: value for kind, value in vars(self).items() if value is not None}
        if self.batches is not None:
            wanted["batches"] = [min(number, _MAX_NUMBER) for number in self.batches]
        if self.rows is not None:
            wanted["rows"] = self.rows.plain()
        encoded = SELECTION_MAGIC + _length.pack(len(ticket)) + ticket + json.dumps(wanted).encode()
        return encoded if len(encoded) <= MAX_IDENTIFIER else ticket


def parse_identifier(identifier: bytes) -> tuple[bytes, Selection | None]:
    """The ticket, and what of its stream is wanted; None for all.

    Raises RemoteProtocolError where it begins like a selection and is none.
    """
    if not identifier.startswith(SELECTION_MAGIC):
        return identifier, None
    try:
        ticket_at = len(SELECTION_MAGIC) + _length.size
        ticket_end = ticket_at + _length.unpack_from(identifier, len(SELECTION_MAGIC))[0]
        wanted = strict_json.loads(identifier[ticket_end:])
        if not isinstance(wanted, dict):
            raise _unreadable()
        rows = RowSelection.parse(wanted.pop("rows")) if "rows" in wanted else None
    except (struct.error, ValueError):
        raise _unreadable() from None
    if not all(_readable(kind, items) for kind, items in wanted.items()):
        raise _unreadable()
    if not (wanted or rows) or wanted.keys() >= {"columns", "fields"}:
        raise _unreadable()
    chosen = Selection(**{kind: tuple(items) for kind, items in wanted.items()}, rows=rows)
    return identifier[ticket_at:ticket_end], chosen


def _readable(kind: str, items: Any) -> bool:
    type_ = {"columns": str, "fields": int, "batches": int}.get(kind)
    if type_ is None or not isinstance(items, list) or any(type(item) is not type_ for item in items):
        return False
    if kind == "batches" and not (len(items) == 2 and items[0] <= items[1]):
        return False
    return kind == "columns" or all(item >= 0 for item in items)


def _unreadable() -> RemoteProtocolError:
    return RemoteProtocolError("the client sent a request for some columns or batches that cannot be read")
