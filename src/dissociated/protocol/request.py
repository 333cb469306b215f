"""Requests for a part of a stream: an identifier that holds the ticket and selects columns, batches or rows.

The specification leaves the content of want_data to the server. A plain ticket requests a whole stream. This identifier
requests some of its top-level columns or record batches, from servers whose URIs have `select=1`:

    8 bytes  "DISSCOL" and 1, the version
    4 bytes  length of the ticket, little-endian
    the ticket
    JSON     one object with any of {"columns": [names]} or {"fields": [indices]}, {"batches": [first, stop]},
             and {"rows": ROWS}

ROWS needs a server whose URI also has `filter=1`. It is {"filter": F, "limit": N, "exact": true}. It selects the rows
for which the filter F, a Substrait expression in base64, is true, and of these the first N. Both F and N may be left
out. The columns that F uses need not be among the selected ones. With "exact": false, which allows no limit, the server
may leave out batches without a matching row, and sends the others whole. A server that cannot apply the filter
refuses with `FilterRefused`.

If a selected column or field does not exist, the server answers with the whole schema, and then gives the reason.

Servers whose URI has `trace=1` also accept {"traceparent": W3C trace context}, alone or with a selection.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dissociated.base import strict_json
from dissociated.base.tracing import TRACEPARENT, is_traceparent
from dissociated.errors import ColumnNotFound, OptionError, RemoteProtocolError
from dissociated.uri import Uri

#: Bit of a `want_data` value that asks the server to wait for another request on the connection. Servers that announce
#: `SELECT_PARAMETER` know it. Other clients often read until the server closes the connection.
KEEP_CONNECTION = 16

#: First bytes of every identifier with a selection. No ticket begins with them.
SELECTION_MAGIC = b"DISSCOL\x01"
#: URI parameter of servers that support selections of columns and batches.
SELECT_PARAMETER = ("select", "1")
#: URI parameter of servers that support selections of rows, too.
FILTER_PARAMETER = ("filter", "1")
#: URI parameter of servers that support trace contexts in identifiers, too.
TRACE_PARAMETER = ("trace", "1")
#: URI parameter with the tag of messages of eight zero bytes, by which a client that reads nothing says that it is
#: there. The server then counts its `stall_timeout` from the beginning again.
ALIVE_PARAMETER = "alive"
#: Largest size of an identifier, in bytes.
MAX_IDENTIFIER = 1 << 16

#: Largest number in a request. No stream has as many rows or batches.
_MAX_NUMBER = (1 << 63) - 1

_length = struct.Struct("<I")


def announces(uri: Uri, parameter: tuple[str, str]) -> bool:
    """Return whether a server announces one of the parameters above in its URI."""
    name, value = parameter
    return uri.parameters.get(name) == value


@dataclass(frozen=True)
class RowSelection:
    """A selection of rows: the first `limit` rows for which `filter` (Substrait) is true. None means no restriction.

    If it is not `exact`, it selects whole batches, among them all batches that have matching rows.
    """

    filter: bytes | None = None
    limit: int | None = None
    exact: bool = True

    def plain(self) -> dict[str, Any]:
        """Return the selection as a JSON object."""
        plain: dict[str, Any] = {"exact": self.exact}
        if self.filter is not None:
            plain["filter"] = base64.b64encode(self.filter).decode()
        return plain if self.limit is None else plain | {"limit": min(self.limit, _MAX_NUMBER)}

    @classmethod
    def parse(cls, plain: Any) -> RowSelection:
        """Parse the JSON object that `plain` returns.

        Raises:
            ValueError: The object is not a row selection.
        """
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
    """A selection from a stream: top-level columns, record batches and rows.

    Attributes:
        columns: Names of columns. If `columns` and `fields` are None, all columns are selected. The order is always
            that of the schema.
        fields: Positions of columns.
        batches: Number of the first record batch, and the number after the last; None for all.
        rows: Selection of rows; None for all.
    """

    columns: tuple[str, ...] | None = None
    fields: tuple[int, ...] | None = None
    batches: tuple[int, int] | None = None
    rows: RowSelection | None = None

    def indices(self, names: Sequence[str]) -> list[int]:
        """Return the positions of the selected columns in a schema with these names, in ascending order.

        A name that several columns share selects all of them.

        Raises:
            ColumnNotFound: A name does not exist.
            OptionError: A position does not exist.
        """
        if self.columns is None:
            fields = set(range(len(names)) if self.fields is None else self.fields)
            for field in fields:
                if field >= len(names):
                    raise OptionError(f"field {field} does not exist: the schema has {len(names)} fields")
            return sorted(fields)
        selected = set(self.columns)
        for column in self.columns:
            if column not in names:
                raise ColumnNotFound(f"there is no column {column!r}; there are {', '.join(names)}")
        return [index for index, name in enumerate(names) if name in selected]

    def identifier(self, ticket: bytes) -> bytes:
        """Return the identifier that requests this selection from the stream `ticket`.

        If the identifier would exceed MAX_IDENTIFIER, the ticket alone is returned, which requests the whole stream.
        """
        parameters = {kind: value for kind, value in vars(self).items() if value is not None}
        if self.batches is not None:
            parameters["batches"] = [min(number, _MAX_NUMBER) for number in self.batches]
        if self.rows is not None:
            parameters["rows"] = self.rows.plain()
        encoded = _join(ticket, parameters)
        return encoded if len(encoded) <= MAX_IDENTIFIER else ticket


def parse_identifier(identifier: bytes) -> tuple[bytes, Selection | None]:
    """Parse the identifier of a want_data message.

    Returns:
        The ticket and the selection, which is None for a plain ticket.

    Raises:
        RemoteProtocolError: The identifier begins like a selection, but cannot be read.
    """
    if not identifier.startswith(SELECTION_MAGIC):
        return identifier, None
    ticket, parameters = _split(identifier)
    is_traced = TRACEPARENT in parameters
    parameters.pop(TRACEPARENT, None)
    if is_traced and not parameters:
        return ticket, None
    try:
        rows = RowSelection.parse(parameters.pop("rows")) if "rows" in parameters else None
    except ValueError:
        raise _unreadable() from None
    if not all(_readable(kind, items) for kind, items in parameters.items()):
        raise _unreadable()
    if not (parameters or rows) or parameters.keys() >= {"columns", "fields"}:
        raise _unreadable()
    selection = Selection(**{kind: tuple(items) for kind, items in parameters.items()}, rows=rows)
    return ticket, selection


def with_traceparent(identifier: bytes, traceparent: str) -> bytes:
    """Return `identifier` with the trace context of its sender; unchanged if it would exceed MAX_IDENTIFIER."""
    ticket, parameters = _split(identifier) if identifier.startswith(SELECTION_MAGIC) else (identifier, {})
    traced = _join(ticket, {**parameters, TRACEPARENT: traceparent})
    return traced if len(traced) <= MAX_IDENTIFIER else identifier


def traceparent_of(identifier: bytes) -> str | None:
    """Return the trace context in an identifier that `parse_identifier` accepts; None if it has no valid one."""
    if not identifier.startswith(SELECTION_MAGIC):
        return None
    value = _split(identifier)[1].get(TRACEPARENT)
    return value if is_traceparent(value) else None


def _join(ticket: bytes, parameters: dict[str, Any]) -> bytes:
    return SELECTION_MAGIC + _length.pack(len(ticket)) + ticket + json.dumps(parameters).encode()


def _split(identifier: bytes) -> tuple[bytes, dict[str, Any]]:
    """Return the ticket and the parameters of an identifier with a selection."""
    ticket_at = len(SELECTION_MAGIC) + _length.size
    try:
        ticket_end = ticket_at + _length.unpack_from(identifier, len(SELECTION_MAGIC))[0]
        parameters = strict_json.loads(identifier[ticket_end:])
    except (struct.error, ValueError):
        raise _unreadable() from None
    if not isinstance(parameters, dict):
        raise _unreadable()
    return identifier[ticket_at:ticket_end], parameters


def _readable(kind: str, items: Any) -> bool:
    type_ = {"columns": str, "fields": int, "batches": int}.get(kind)
    if type_ is None or not isinstance(items, list) or any(type(item) is not type_ for item in items):
        return False
    if kind == "batches" and not (len(items) == 2 and items[0] <= items[1]):
        return False
    return kind == "columns" or all(item >= 0 for item in items)


def _unreadable() -> RemoteProtocolError:
    return RemoteProtocolError(
        "the client sent a request for columns, batches or rows that cannot be read", rule="selection"
    )
