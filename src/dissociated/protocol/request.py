"""Structured requests: an identifier with the ticket, the streams, and a selection of columns, batches or rows.

The specification leaves the content of want_data to the server. A plain ticket requests a whole stream. Servers whose
URIs have `request=1` also accept this identifier:

    8 bytes  "DISSREQ" and 1, the version
    4 bytes  length of the ticket, little-endian
    the ticket
    JSON     one object with any of {"keep": true}, {"ahead": true}, {"part": id}, {"streams": "metadata" or "bodies"},
             {"columns": [names]} or {"fields": [indices]}, {"batches": [first, stop]}, {"rows": ROWS},
             {"frees": "messages"}, {"traceparent": W3C trace context}

With "keep", the server waits for another request on the connection after the stream. Clients that do not know requests
often read until the server closes the connection.

With "ahead", the client reads other streams first. So the server lets it take no bytes for as long as it may hold
memory in silence.

"part" is the id of the part in the catalog's answer. It differs for each publication, even if they have the same
ticket.

ROWS needs a server whose URI also has `filter=1`. It is {"filter": F, "limit": N, "exact": true}. It selects the rows
for which the filter F, a Substrait expression in base64, is true, and of these the first N. Both F and N may be left
out. The columns that F uses need not be among the selected ones. With "exact": false, which allows no limit, the server
may leave out batches without a matching row, and sends the others whole. A server that cannot apply the filter
refuses with `FilterRefused`.

If a selected column or field does not exist, the server answers with the whole schema, and then gives the reason.

"frees" needs a server whose URI has `frees=messages`. The client then frees the numbers of messages in place of
addresses.

"traceparent" needs a server whose URI has `trace=1`.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dissociated.base import strict_json
from dissociated.base.display import missing_column
from dissociated.base.tracing import TRACEPARENT, is_traceparent
from dissociated.errors import ColumnNotFound, OptionError, RemoteProtocolError
from dissociated.protocol.wire import Streams
from dissociated.uri import Uri

#: First bytes of every structured request. No ticket begins with them.
REQUEST_MAGIC = b"DISSREQ\x01"
#: URI parameter of servers that support structured requests.
REQUEST_PARAMETER = ("request", "1")
#: URI parameter of servers that support selections of rows in them, too.
FILTER_PARAMETER = ("filter", "1")
#: URI parameter of servers whose clients may free messages by number, and the member of a request that says so.
FREES_PARAMETER = ("frees", "messages")
#: URI parameter of servers that support trace contexts in them, too.
TRACE_PARAMETER = ("trace", "1")
#: URI parameter of live streams whose batches may have a note of missed batches.
MISSED_PARAMETER = ("missed", "1")
#: Largest size of an identifier, in bytes.
MAX_IDENTIFIER = 1 << 16

#: Largest number in a request. No stream has as many rows or batches.
_MAX_NUMBER = (1 << 63) - 1

#: The values of the member "streams".
_STREAMS = {"metadata": Streams.METADATA, "bodies": Streams.BODIES}

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
                raise ColumnNotFound(missing_column(column, names))
        return [index for index, name in enumerate(names) if name in selected]

    def identifier(self, whole: bytes) -> bytes:
        """Return the identifier that requests this selection of the stream that `whole`, such as a ticket, requests.

        If the identifier would exceed MAX_IDENTIFIER, `whole` is returned.
        """
        parameters = {kind: value for kind, value in vars(self).items() if value is not None}
        if self.batches is not None:
            parameters["batches"] = [min(number, _MAX_NUMBER) for number in self.batches]
        if self.rows is not None:
            parameters["rows"] = self.rows.plain()
        return with_members(whole, **parameters)


@dataclass(frozen=True)
class Request:
    """The content of a want_data message.

    Attributes:
        ticket: The ticket.
        selection: The selected part of the stream; None for all.
        streams: The requested streams; None for those of the want_data tag.
        keep: Whether another request may follow on the connection.
        reads_others_first: Whether the client may take nothing for a long time, because it reads other streams first.
        part: The id of the requested publication; None for the current one with this ticket.
        frees_messages: Whether the client frees messages by number, and not their addresses.
        traceparent: The trace context of the client, if it has sent a valid one.
    """

    ticket: bytes
    selection: Selection | None = None
    streams: Streams | None = None
    keep: bool = False
    reads_others_first: bool = False
    part: str | None = None
    frees_messages: bool = False
    traceparent: str | None = None

    @classmethod
    def parse(cls, identifier: bytes) -> Request:
        """Parse the identifier of a want_data message.

        Raises:
            RemoteProtocolError: The identifier begins like a structured request, but cannot be read.
        """
        if not identifier.startswith(REQUEST_MAGIC):
            return cls(identifier)
        ticket, members = _split(identifier)
        traceparent, keep = members.pop(TRACEPARENT, None), members.pop("keep", False)
        reads_others_first, part = members.pop("ahead", False), members.pop("part", None)
        frees_messages = "frees" in members
        if members.pop(*FREES_PARAMETER) != FREES_PARAMETER[1]:
            raise _unreadable()
        try:
            rows = RowSelection.parse(members.pop("rows")) if "rows" in members else None
            streams = _STREAMS[members.pop("streams")] if "streams" in members else None
        except (KeyError, TypeError, ValueError):
            raise _unreadable() from None
        if not all(_readable(kind, items) for kind, items in members.items()):
            raise _unreadable()
        if not (isinstance(keep, bool) and isinstance(reads_others_first, bool) and isinstance(part, str | None)):
            raise _unreadable()
        if members.keys() >= {"columns", "fields"}:
            raise _unreadable()
        selection = Selection(**{kind: tuple(items) for kind, items in members.items()}, rows=rows)
        return cls(
            ticket,
            None if selection == Selection() else selection,
            streams,
            keep,
            reads_others_first,
            part,
            frees_messages,
            traceparent if is_traceparent(traceparent) else None,
        )


def with_members(identifier: bytes, **members: Any) -> bytes:
    """Return `identifier` with these members added; unchanged if it would exceed MAX_IDENTIFIER."""
    ticket, present = _split(identifier) if identifier.startswith(REQUEST_MAGIC) else (identifier, {})
    joined = _join(ticket, present | members)
    return joined if len(joined) <= MAX_IDENTIFIER else identifier


def _join(ticket: bytes, parameters: dict[str, Any]) -> bytes:
    return REQUEST_MAGIC + _length.pack(len(ticket)) + ticket + json.dumps(parameters).encode()


def _split(identifier: bytes) -> tuple[bytes, dict[str, Any]]:
    """Return the ticket and the members of a structured request."""
    ticket_at = len(REQUEST_MAGIC) + _length.size
    try:
        ticket_end = ticket_at + _length.unpack_from(identifier, len(REQUEST_MAGIC))[0]
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
    return RemoteProtocolError("the client sent a structured request that cannot be read", rule="request-members")
