from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dissociated.errors import ColumnNotFound, OptionError, RemoteProtocolError
from dissociated.protocol.request import (
    MAX_IDENTIFIER,
    REQUEST_MAGIC,
    Request,
    RowSelection,
    Selection,
    with_members,
)
from dissociated.protocol.wire import Streams

NAMES = ["a", "b", "a", "ü"]


@pytest.mark.parametrize(
    ("selection", "indices"),
    [
        (Selection(columns=("ü", "b")), [1, 3]),
        (Selection(columns=("a",)), [0, 2]),
        (Selection(columns=()), []),
        (Selection(fields=(3, 0, 3)), [0, 3]),
        (Selection(batches=(0, 1)), [0, 1, 2, 3]),
    ],
)
def test_columns_are_found_in_the_order_of_the_schema(selection: Selection, indices: list[int]) -> None:
    assert selection.indices(NAMES) == indices


def test_an_error_names_the_missing_and_the_existing_columns() -> None:
    with pytest.raises(ColumnNotFound, match="there is no column 'x'; there are a, b, a, ü"):
        Selection(columns=("a", "x")).indices(NAMES)
    with pytest.raises(OptionError, match="field 4 does not exist: the schema has 4"):
        Selection(fields=(0, 4)).indices(NAMES)


GOLDEN = [
    (b"abc", None, b"abc"),
    (b"", None, b""),
    (b"abc", Selection(columns=("n",)), b'DISSREQ\x01\x03\x00\x00\x00abc{"columns": ["n"]}'),
    (b"", Selection(columns=()), b'DISSREQ\x01\x00\x00\x00\x00{"columns": []}'),
    (b"\0", Selection(fields=(0, 2)), b'DISSREQ\x01\x01\x00\x00\x00\x00{"fields": [0, 2]}'),
    (b"a", Selection(batches=(0, 9)), b'DISSREQ\x01\x01\x00\x00\x00a{"batches": [0, 9]}'),
    (
        b"a",
        Selection(("n",), rows=RowSelection(b"\1", 5)),
        b'DISSREQ\x01\x01\x00\x00\x00a{"columns": ["n"], "rows": {"exact": true, "filter": "AQ==", "limit": 5}}',
    ),
    (
        b"a",
        Selection(rows=RowSelection(b"", exact=False)),
        b'DISSREQ\x01\x01\x00\x00\x00a{"rows": {"exact": false, "filter": ""}}',
    ),
    (b"a", Selection(("n",), batches=(3, 3)), b'DISSREQ\x01\x01\x00\x00\x00a{"columns": ["n"], "batches": [3, 3]}'),
]


@pytest.mark.parametrize(("ticket", "selection", "identifier"), GOLDEN)
def test_golden(ticket: bytes, selection: Selection | None, identifier: bytes) -> None:
    assert Request.parse(identifier) == Request(ticket, selection)
    if selection is not None:
        assert selection.identifier(ticket) == identifier


#: No server takes a ticket that begins like a structured request.
TICKETS = st.binary(max_size=100).filter(lambda ticket: not ticket.startswith(REQUEST_MAGIC))


@given(TICKETS, st.lists(st.text(), max_size=20))
def test_round_trip(ticket: bytes, columns: list[str]) -> None:
    selection = Selection(columns=tuple(columns))
    assert Request.parse(selection.identifier(ticket)) == Request(ticket, selection)


def test_more_columns_than_an_identifier_holds_are_not_asked_for() -> None:
    assert Selection(columns=("x" * MAX_IDENTIFIER,)).identifier(b"ticket") == b"ticket"


HEAD = b"DISSREQ\x01\x01\x00\x00\x00t"


@pytest.mark.parametrize(
    "rest",
    [
        b"",
        b"null",
        b"[]",
        b'{"streams": "both"}',
        b'{"streams": null}',
        b'{"streams": ["metadata"]}',
        b'{"keep": 1}',
        b'{"ahead": null}',
        b'{"part": 1}',
        b'{"rows": null}',
        b'{"other": 1}',
        b'{"columns": "n"}',
        b'{"columns": [1]}',
        b'{"columns": null}',
        b'{"fields": [-1]}',
        b'{"fields": [true]}',
        b'{"fields": [0.5]}',
        b'{"rows": [0]}',
        b'{"columns": [], "fields": []}',
        b'{"columns": [], "rows": [0, 1]}',
        b'{"rows": {"exact": 1}}',
        b'{"rows": {"exact": true, "limit": -1}}',
        b'{"rows": {"exact": true, "limit": true}}',
        b'{"rows": {"exact": false, "limit": 1}}',
        b'{"rows": {"exact": true, "filter": "?"}}',
        b'{"rows": {"exact": true, "other": 1}}',
        b'{"batches": [1]}',
        b'{"batches": [2, 1]}',
        b'{"batches": [-1, 1]}',
        b'{"batches": [0, 1.5]}',
        b'{"batches": [0, 9223372036854775808]}',
        b'{"batches": [0, 1e999]}',
        b'{"fields": [18446744073709551616]}',
        b'{"rows": {"exact": true, "limit": 9223372036854775808}}',
        rb'{"columns": ["\ud800"]}',
        b'{"columns": ["\xff"]}',
        b"[" * 50_000,
    ],
)
def test_an_invalid_selection_is_refused(rest: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="structured request that cannot be read"):
        Request.parse(HEAD + rest)


def test_other_members_stand_beside_a_selection() -> None:
    assert Request.parse(HEAD + b"{}") == Request(b"t")
    asked = HEAD + b'{"columns": ["n"], "streams": "metadata", "keep": true}'
    assert Request.parse(asked) == Request(b"t", Selection(("n",)), Streams.METADATA, keep=True)
    assert Request.parse(HEAD + b'{"streams": "bodies", "keep": false}') == Request(b"t", streams=Streams.BODIES)
    assert Request.parse(HEAD + b'{"ahead": true, "part": "p"}') == Request(b"t", reads_others_first=True, part="p")
    assert with_members(b"t", keep=True) == HEAD + b'{"keep": true}'
    assert with_members(HEAD + b'{"columns": ["n"]}', keep=True) == HEAD + b'{"columns": ["n"], "keep": true}'
    assert with_members(bytes(MAX_IDENTIFIER), keep=True) == bytes(MAX_IDENTIFIER)
    named = with_members(b"t", part="p")
    assert Request.parse(Selection(("n",)).identifier(named)) == Request(b"t", Selection(("n",)), part="p")
    assert Selection(("n" * MAX_IDENTIFIER,)).identifier(named) == named


def test_numbers_beyond_every_stream_ask_for_all_of_it() -> None:
    asked = Selection(batches=(0, 2**70), rows=RowSelection(limit=2**70))
    assert Request.parse(asked.identifier(b"t")) == Request(
        b"t",
        Selection(batches=(0, 2**63 - 1), rows=RowSelection(limit=2**63 - 1)),
    )


@given(st.integers(0, len(HEAD) - 1), st.binary(max_size=20))
def test_what_is_cut_off_is_refused_or_a_ticket(cut: int, rest: bytes) -> None:
    identifier = HEAD[:cut] + rest
    try:
        request = Request.parse(identifier)
    except RemoteProtocolError:
        return
    assert request == Request(identifier) or identifier.startswith(HEAD[:8])
