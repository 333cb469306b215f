"""Streams of every shape: empty, long, large, sliced, and with metadata."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest

import dissociated as dis
from support.arrow_cases import ARRAYS, ROWS
from support.helpers import Serve, connections_left
from support.machine import media

from .conftest import MEDIA, Route

#: Small batches, enough for runs, and too many to be in flight all at once.
COUNT = 700

NUMBERS = pa.schema([("n", pa.int64()), ("s", pa.string())])


def stream(schema: pa.Schema, batches: list[pa.RecordBatch]) -> pa.RecordBatchReader:
    return pa.RecordBatchReader.from_batches(schema, batches)


def numbers(*ranges: range) -> list[pa.RecordBatch]:
    return [pa.record_batch([pa.array(some, pa.int64()), [str(n) for n in some]], schema=NUMBERS) for some in ranges]


def test_a_dataset_over_every_other_medium(rest: Route) -> None:
    sent = pa.Table.from_batches(numbers(range(3), range(3, 100_000), range(0)))
    rest.publish(sent)
    assert rest.open().read_all() == sent
    assert rest.connections == 0


def test_batches_without_rows(route: Route) -> None:
    sent = [*numbers(range(0), range(3), range(0), range(0), range(3, 5)), *numbers(range(0))]
    schema, arrived = route.read(lambda: stream(NUMBERS, sent))
    assert schema.equals(NUMBERS)
    assert [batch.num_rows for batch in arrived] == [0, 3, 0, 0, 2, 0]
    assert arrived == sent


def test_rows_without_columns(route: Route) -> None:
    sent = [batch.select([]) for batch in numbers(range(3), range(0), range(1000))]
    schema, arrived = route.read(lambda: stream(pa.schema([]), sent))
    assert schema.equals(pa.schema([]))
    assert [batch.num_rows for batch in arrived] == [3, 0, 1000]


def test_only_nulls(quick: Route) -> None:
    sent = pa.table({name: pa.nulls(ROWS, arrays[0].type) for name, arrays in ARRAYS.items() if len(arrays) > 1})
    _, arrived = quick.read(sent)
    assert pa.Table.from_batches(arrived) == sent
    assert {column.null_count for column in arrived[0].columns} == {ROWS}


def test_slices(quick: Route) -> None:
    """Slice tables within and across chunks, at every offset within a byte."""
    whole = pa.table({"b": [None, True, False] * 50, "s": [None, "", "words"] * 50, "l": [[1], [], None] * 50})
    chunked = pa.concat_tables([whole.slice(0, 70), whole.slice(70, 13), whole.slice(83)])
    for offset in range(9):
        for sent in (whole.slice(offset, 101), chunked.slice(60 + offset, 30)):
            _, arrived = quick.read(sent)
            assert pa.Table.from_batches(arrived) == sent


@cache
def small_batches() -> list[pa.RecordBatch]:
    return numbers(*(range(start, start + 3) for start in range(COUNT)))


def test_many_small_batches(route: Route) -> None:
    sent = small_batches()
    table = pa.Table.from_batches(sent)
    sources = (table, lambda: stream(NUMBERS, sent))
    alone = route.way.arrangement == "one"
    for source in sources if route.is_quick and alone else sources[alone:][:1]:
        _, arrived = route.read(source)
        assert len(arrived) == COUNT
        assert pa.Table.from_batches(arrived) == table


@pytest.mark.parametrize("medium", media(["ucx", "ucx, none", "fabric"]))
def test_runs_of_several_megabytes_and_odd_batches_between_them(serve: Serve, medium: str) -> None:
    """Send runs that the medium fetches, and small messages that overtake them, also to peers that accept no runs."""
    lengths = [*[1000] * 300, 7, *[1000] * 100, *[3] * 40, 999]
    ends = np.cumsum([0, *lengths]).tolist()
    whole = pa.record_batch({name: np.arange(ends[-1]) + index for index, name in enumerate("abcd")})
    words = pa.DictionaryArray.from_arrays(np.zeros(ends[-1], np.int8), pa.array(["x" * 20_000]))
    whole = whole.append_column("w", words)
    sent = [whole.slice(begin, end - begin) for begin, end in pairwise(ends)]
    server = serve(MEDIA[medium])
    server.publish("data", pa.Table.from_batches(sent))
    (uri,) = server.locations("data")
    for one in (uri, uri.replace("&runs=1", ""), uri):
        assert [*dis.open_stream(one, server.ticket("data"))] == sent
    assert connections_left(server) == 0


def test_a_batch_of_64_mb(direct: Route) -> None:
    values = np.arange(7 << 20)
    sent = pa.record_batch({"n": values, "b": values.view(np.uint8)[: 7 << 20]})
    assert sent.nbytes == 63 << 20
    for source in (sent, lambda: sent) if direct.is_quick else (sent,):
        _, arrived = direct.read(source)
        assert arrived == [sent]


def test_no_batches_but_a_schema_with_much_to_say(route: Route) -> None:
    schema = pa.schema(
        [
            pa.field("n", pa.int64(), nullable=False, metadata={"unit": "m", "": ""}),
            pa.field("t", pa.struct([pa.field("u", pa.int8(), metadata={b"\xff": b"\0"})])),
        ],
        metadata={"origin": "ünïcödé", "pandas": "{}" * 10_000},
    )
    for source in (schema.empty_table(), lambda: stream(schema, [])) if route.is_quick else (schema.empty_table(),):
        found, arrived = route.read(source)
        assert found.equals(schema, check_metadata=True)
        assert found.field("n").nullable is False
        assert arrived == []
