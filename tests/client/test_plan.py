"""Plans of reads: for every server, its part of a request and then the residual of the client are the whole request.

`pytest tests/client/test_plan.py --hypothesis-profile thorough` tries ten times as many requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from dissociated.client.plan import CONNECT_TIMEOUT, Capabilities, PartPlan, Route, Step, parts_to_read, plan, plan_part
from dissociated.client.request import Filtering, ReadRequest
from dissociated.codec.options import ReadOptions
from dissociated.control.dataset_info import DatasetInfo
from dissociated.control.locations import Endpoint
from dissociated.errors import CatalogError, ColumnNotFound, OptionError, RemoteProtocolError
from dissociated.memory.device.registry import open_device
from dissociated.protocol.request import MAX_IDENTIFIER, Request
from dissociated.uri import DEVICE, Uri

SCHEMA = pa.schema(
    [("a", pa.int64()), ("twice", pa.int8()), ("b", pa.string()), ("c", pa.float64()), ("twice", pa.int8())],
    {"kept": "as it was"},
)
a, b, c = map(pc.field, "abc")


class Condition(NamedTuple):
    """A filter of users, and the same as an expression of pyarrow."""

    filter: Any
    expression: pc.Expression


CONDITIONS = [
    Condition(expression, expression)
    for expression in (
        a > 2,
        a.is_null(),
        (a < 1) | (b == "x"),
        ~(c > 0.5) & b.is_valid(),
        a.isin([0, 3]),
        pc.scalar(False),
        a.cast(pa.float64()) > c,  # which is not sent to servers
    )
] + [Condition(("a", ">=", 2), a >= 2), Condition([[("a", "<", 1)], [("b", "is null")]], (a < 1) | b.is_null())]

batches = st.lists(
    st.lists(
        st.tuples(
            st.none() | st.integers(0, 4),
            st.integers(0, 9),
            st.sampled_from(["x", "y", None]),
            st.sampled_from([None, 0.0, 0.5, 1.0]),
            st.integers(0, 9),
        ),
        min_size=1,
        max_size=5,
    ).map(
        lambda rows: pa.record_batch(
            [pa.array([row[at] for row in rows], field.type) for at, field in enumerate(SCHEMA)], schema=SCHEMA
        )
    ),
    max_size=4,
).map(lambda found: [*found, found[0][:0]] if len(found) == 3 else found)
columns = st.none() | st.lists(st.sampled_from(["a", "b", "c", "twice"]), unique=True, max_size=4)
fields: st.SearchStrategy[list[int]] = st.just([]) | st.lists(st.integers(0, len(SCHEMA) - 1), unique=True, max_size=4)
limits = st.none() | st.integers(0, 12)
tickets = st.sampled_from([b"t", b"t" * (MAX_IDENTIFIER - 60), b"t" * (MAX_IDENTIFIER - 250)])
routes = st.builds(
    Route,
    st.sampled_from([(), (Uri.parse("tcp://h:1?want_data=1"),), (Uri.parse("shm:///p?want_data=1"),)]),
    st.builds(
        lambda selects, filters, shares: Capabilities(selects, selects and filters, shares),
        st.booleans(),
        st.booleans(),
        st.booleans(),
    ),
)


@dataclass
class Server:
    """A server of one part, by operations on tables."""

    batches: Sequence[pa.RecordBatch]
    filter: pc.Expression | None
    refuses: bool
    prunes: bool

    def answer(self, identifier: bytes, server: Capabilities) -> tuple[pa.Schema, list[pa.RecordBatch]] | None:
        """Return the stream for a request; None if the server refuses it."""
        asked = Request.parse(identifier)
        selection = asked.selection
        assert {*asked.ticket} == {*b"t"}
        if selection is None:
            return SCHEMA, [*self.batches]
        assert server.selects, "a server that selects nothing gets the ticket alone"
        sent = [*self.batches]
        if selection.batches is not None:
            sent = sent[slice(*selection.batches)]
        if selection.rows is not None:
            assert server.filters, "a server that does not filter is not asked to"
            if self.refuses:
                return None
            if not selection.rows.exact:
                assert self.filter is not None
                sent = [batch for batch in sent if not self.prunes or batch.filter(self.filter).num_rows]
            elif selection.rows.filter is not None:
                assert self.filter is not None
                sent = [batch.filter(self.filter) for batch in sent]
            if selection.rows.limit is not None:
                sent = pa.Table.from_batches(sent, SCHEMA)[: selection.rows.limit].to_batches()
        chosen = positions(selection.columns, selection.fields)
        return pa.schema([SCHEMA.field(at) for at in chosen]), [batch.select(chosen) for batch in sent]

    def read(self, part: PartPlan, step: Step) -> list[pa.RecordBatch]:
        """Return the batches that the client has in the end."""
        answer = self.answer(step.identifier, step.route.server)
        if answer is None:
            event("refused")
            step = part.without_filter(step)
            answer = self.answer(step.identifier, step.route.server)
            assert answer is not None, "no filter is left to refuse"
        schema, sent = answer
        decoded = step.residual.positions(schema.names)
        if decoded is not None:
            schema, sent = pa.schema([schema.field(at) for at in decoded]), [batch.select(decoded) for batch in sent]
        return [*step.residual.apply(pa.RecordBatchReader.from_batches(schema, sent))]


def positions(names: Sequence[str] | None, numbers: Sequence[int] | None) -> list[int]:
    if names is not None:
        return [at for at, name in enumerate(SCHEMA.names) if name in names]
    return sorted(range(len(SCHEMA)) if numbers is None else numbers)


def rows_of(found: Sequence[pa.RecordBatch]) -> list[tuple[Any, ...]]:
    """Return the values, row by row; batches without columns still have rows."""
    return [tuple(column[row].as_py() for column in batch.columns) for batch in found for row in range(batch.num_rows)]


def expected_rows(
    given: Sequence[pa.RecordBatch],
    rows: range | None,
    condition: Condition | None,
    limit: int | None,
    chosen: list[int],
) -> list[tuple[Any, ...]]:
    """Return the rows of the request, by operations on the whole table."""
    table = pa.Table.from_batches(given, SCHEMA)
    if rows is not None:
        table = table[rows.start : rows.stop]
    if condition is not None:
        table = table.filter(condition.expression)
    if limit is not None:
        table = table[:limit]
    return [tuple(row[at] for at in chosen) for row in rows_of(table.to_batches())]


@given(
    st.lists(batches, min_size=1, max_size=3),
    columns,
    st.none() | st.sampled_from(CONDITIONS),
    limits,
    st.none() | st.tuples(st.integers(0, 12), st.integers(0, 12)),
    tickets,
    st.lists(routes, min_size=1, max_size=3),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_all_parts_together_give_exactly_the_request(
    parts: list[list[pa.RecordBatch]],
    names: list[str] | None,
    condition: Condition | None,
    limit: int | None,
    some: tuple[int, int] | None,
    ticket: bytes,
    ways: list[Route],
    counted: bool,
    refuses: bool,
    prunes: bool,
) -> None:
    rows = None if some is None else range(some[0], some[0] + some[1])
    request = ReadRequest(columns=names, filter=condition and condition.filter, limit=limit, rows=rows)
    known = [sum(batch.num_rows for batch in part) if counted or rows is not None else None for part in parts]
    endpoints = tuple(Endpoint(ticket, (str(at),), rows=known[at]) for at in range(len(parts)))
    info = DatasetInfo("d", SCHEMA, None, None, endpoints)
    to_read = parts_to_read(request, info)
    planned = plan(request, info, to_read, [ways] * len(to_read))
    chosen = positions(names, None)
    if not planned.parts:
        assert planned.schema == pa.schema([SCHEMA.field(at) for at in chosen], SCHEMA.metadata)
    for way in range(len(ways)):
        read: list[pa.RecordBatch] = []
        for part in planned.parts:
            server = Server(parts[int(part.endpoint.locations[0])], condition and condition.expression, refuses, prunes)
            counting = part.counting()
            if counting is not None:
                event("counted")
                part = part.within([batch.num_rows for batch in server.read(counting, counting.steps[way])])
            read += server.read(part, part.steps[way])
        found = rows_of(read)
        found = found if planned.limit is None else found[: planned.limit]
        assert found == expected_rows([one for part in parts for one in part], rows, condition, limit, chosen)


@given(
    batches,
    columns,
    fields,
    st.none() | st.sampled_from(CONDITIONS),
    limits,
    st.none() | st.tuples(st.integers(0, 4), st.integers(0, 4)),
    st.booleans(),
    st.floats(0, 1),
    tickets,
    routes,
    st.booleans(),
    st.booleans(),
)
def test_one_part_gives_exactly_the_request(
    part: list[pa.RecordBatch],
    names: list[str] | None,
    numbers: list[int],
    condition: Condition | None,
    limit: int | None,
    some: tuple[int, int] | None,
    described: bool,
    share: float,
    ticket: bytes,
    way: Route,
    refuses: bool,
    prunes: bool,
) -> None:
    numbers = [] if names is not None else numbers
    within = None if some is None else (some[0], some[0] + some[1])
    given = part if within is None else part[slice(*within)]
    total = sum(batch.num_rows for batch in given)
    rows = range(round(share * total), total) if share < 0.5 else None
    request = ReadRequest(
        columns=names,
        options=ReadOptions(included_fields=numbers),
        filter=condition and condition.filter,
        limit=limit,
        batches=within,
        rows=rows,
    )
    planned = plan_part(request, SCHEMA if described else None, Endpoint(ticket, ()), [way])
    server = Server(part, condition and condition.expression, refuses, prunes)
    found = server.read(planned, planned.steps[0])
    chosen = positions(names, numbers or None)
    assert rows_of(found) == expected_rows(given, rows, condition, limit, chosen)
    assert all(batch.schema.names == [SCHEMA.names[at] for at in chosen] for batch in found)


@given(batches, st.sampled_from(CONDITIONS), st.sampled_from([*Filtering]), routes, st.booleans(), st.booleans())
def test_filtering_that_is_not_exact_leaves_out_no_row_that_passes(
    part: list[pa.RecordBatch],
    condition: Condition,
    filtering: Filtering,
    way: Route,
    refuses: bool,
    prunes: bool,
) -> None:
    request = ReadRequest(filter=condition.filter, filtering=filtering)
    planned = plan_part(request, SCHEMA, Endpoint(b"t", ()), [way])
    found = Server(part, condition.expression, refuses, prunes).read(planned, planned.steps[0])
    passing = pa.Table.from_batches(found, SCHEMA).filter(condition.expression)
    assert rows_of(passing.to_batches()) == expected_rows(part, None, condition, None, positions(None, None))
    if filtering is Filtering.BY_STATISTICS:
        assert {batch.num_rows for batch in found} <= {batch.num_rows for batch in part}, "batches stay whole"


def test_a_plan_for_impossible_requests_is_refused() -> None:
    info = DatasetInfo("d", SCHEMA, None, None, (Endpoint(b"t", ()), Endpoint(b"t", (), rows=1)))
    flight = Route((), Capabilities())

    def refused(request: ReadRequest, info: DatasetInfo) -> None:
        parts = parts_to_read(request, info)
        plan(request, info, parts, [[flight]] * len(parts))

    with pytest.raises(ColumnNotFound):
        refused(ReadRequest(filter=pc.field("none") > 1), info)
    with pytest.raises(OptionError):
        refused(ReadRequest(filter=a + 1), info)
    with pytest.raises(CatalogError, match="how many rows"):
        refused(ReadRequest(rows=range(3)), info)
    with pytest.raises(ColumnNotFound):
        refused(ReadRequest(columns=["none"]), info)
    with pytest.raises(ColumnNotFound):
        refused(ReadRequest(columns=["none"]), replace(info, endpoints=()))


def test_a_stream_with_other_columns_than_its_dataset_is_refused() -> None:
    step = plan_part(ReadRequest(filter=a > 1, columns=["b"]), SCHEMA, Endpoint(b"t", ()), [Route((), Capabilities())])
    with pytest.raises(RemoteProtocolError, match="other columns"):
        step.steps[0].residual.apply(pa.table({"b": ["x"]}).to_reader())


def test_only_the_last_route_to_this_host_may_take_the_whole_timeout() -> None:
    """A route to addresses on a device is no route to this host, whether or not its server has answered lately."""
    device = open_device("test:0")
    to_host = Route.of([Uri.parse("tcp://127.0.0.1:1?want_data=1")])
    for is_unresponsive in (False, True):
        on_device = Route.of([Uri.parse(f"shm:///s?want_data=1&{DEVICE}={device.identity}")], is_unresponsive)
        part = plan_part(ReadRequest(device=device), SCHEMA, Endpoint(b"t", ()), [on_device, to_host])
        assert [step.connect_timeout for step in part.steps] == [None]
        assert [step.connect_timeout for step in part.in_place] == ([] if is_unresponsive else [CONNECT_TIMEOUT])
        assert [step.connect_timeout for step in part.in_place_last] == ([CONNECT_TIMEOUT] if is_unresponsive else [])
    alone = plan_part(ReadRequest(device=device), SCHEMA, Endpoint(b"t", ()), [on_device])
    assert [step.connect_timeout for step in alone.in_place] == [None]
