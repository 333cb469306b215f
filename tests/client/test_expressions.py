"""Columns that are computed from expressions: the values of pyarrow's own scanner, and no batch more than is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pytest

import dissociated as dis
from dissociated.client.dataset import DatasetHandle
from dissociated.errors import ColumnNotFound, OptionError, StoreError
from support.arrow_cases import ARRAYS
from support.helpers import case, connections_left, wait_until

NUMBERS = pa.schema([pa.field("n", pa.int64(), nullable=False, metadata={"unit": "m"})], {"made": "here"})
BATCHES = 1_000  # of a source that is too long to be read to its end
n = pc.field("n")


@pytest.fixture(scope="module")
def server() -> Iterator[dis.Server]:
    with dis.Server(["shm:", "tcp://127.0.0.1:0"]) as server:
        yield server
        wait_until(lambda: connections_left(server) == 0, "all have left")
        assert server.status().leases == 0


@pytest.fixture(scope="module")
def client(server: dis.Server) -> Iterator[dis.Client]:
    with dis.connect(server.catalog_uri) as client:
        yield client


@pytest.fixture(params=["shm", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Source:
    """A long source, which counts the batches that it has given."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> pa.RecordBatchReader:
        return pa.RecordBatchReader.from_batches(NUMBERS, self._batches())

    def _batches(self) -> Iterator[pa.RecordBatch]:
        batch = pa.record_batch([np.arange(10_000)], schema=NUMBERS)
        while self.count < BATCHES:
            self.count += 1
            yield batch


def computed(table: pa.Table, columns: dict[str, pc.Expression]) -> pa.Table:
    """Return the columns as pyarrow's own scanner computes them."""
    return ds.Scanner.from_batches(table.to_batches(), schema=table.schema, columns=columns).to_table()


def same(read: pa.Table, expected: pa.Table) -> None:
    read.validate(full=True)
    assert read.schema.equals(expected.schema, check_metadata=True)
    assert read.num_rows == expected.num_rows
    for name in expected.column_names:
        # NaN does not equal itself, and pyarrow does not compare dictionaries that differ.
        assert read[name].equals(expected[name]) or [*map(repr, read[name])] == [*map(repr, expected[name])]


def test_columns_of_every_type(server: dis.Server, client: dis.Client, transport: str) -> None:
    columns = {name: first for name, (first, *_) in ARRAYS.items()}
    table = pa.table(columns)
    server.publish("typed", pa.Table.from_batches([*table[:2].to_batches(), *table[2:].to_batches()], table.schema))
    expressions = {f"{name} again": pc.field(name) for name in columns}
    expressions |= {f"{name} is null": pc.field(name).is_null() for name in columns}
    scanner = client.dataset("typed", transport=transport).scanner(expressions)
    expected = computed(table, expressions)
    assert scanner.projected_schema.equals(expected.schema, check_metadata=True)
    same(scanner.to_table(), expected)


def test_expressions_of_many_kinds(server: dis.Server, client: dis.Client, transport: str) -> None:
    rows = 70_000
    inner = pa.StructArray.from_arrays([pa.array(range(rows)), pa.array([None, "x"] * (rows // 2))], ["i", "t"])
    schema = pa.schema([*NUMBERS, pa.field("s", pa.struct([("in", inner.type)])), ("b", pa.bool_())], NUMBERS.metadata)
    nested = pa.StructArray.from_arrays([inner], ["in"], mask=pa.array([False] * 9 + [True] + [False] * (rows - 10)))
    flags = pa.array([True, None, False, True] * (rows // 4))
    table = pa.Table.from_arrays([pa.array(range(rows)), nested, flags], schema=schema)
    server.publish("kinds", pa.Table.from_batches([*table[:50_001].to_batches(), *table[50_001:].to_batches()]))
    handle = client.dataset("kinds", transport=transport)
    for columns in (
        {"n": n, "b": pc.field("b")},
        {"sum": n + 1, "nested": pc.field("s", "in", "t"), "by position": pc.field(0)},
        {"text": pc.scalar("a"), "null": pc.scalar(None), "typed": pc.scalar(pa.scalar(5, pa.int8())), "n": n},
        {"literal alone": pc.scalar(1.5)},
        {"cast": n.cast("string"), "choice": pc.if_else(pc.field("b"), n, pc.negate(n)), "in": n.isin([1, 69_999])},
        {"struct": pc.make_struct(n, pc.field("b"), field_names=["x", "y"])},
        {},
    ):
        with case(str(columns)):
            same(handle.to_table(columns), computed(table, columns))
            same(handle.to_table(columns, n > 49_000, limit=2_000), computed(table[49_001:51_001], columns))


def test_dictionaries_that_change_and_empty_streams(server: dis.Server, client: dis.Client, transport: str) -> None:
    words: list[list[str | None]] = [["a", "b", None, "a"], ["c", "c"], [], ["b", "a"]]
    batches = [pa.record_batch({"d": pa.array(each, pa.string()).dictionary_encode()}) for each in words]
    text = pc.field("d").cast("string")
    columns = {"again": pc.field("d"), "text": text, "length": pc.utf8_length(text)}
    for count in (4, 0):
        made = pa.Table.from_batches(batches[:count], batches[0].schema)
        server.publish("words", lambda made=made: pa.RecordBatchReader.from_batches(made.schema, made.to_batches()))
        with case(count):
            same(client.dataset("words", transport=transport).to_table(columns), computed(made, columns))


def _close(reader: pa.RecordBatchReader) -> None:
    reader.close()
    with pytest.raises(StoreError, match="closed before its end"):
        reader.read_next_batch()


@pytest.mark.parametrize("leave", [lambda reader: None, _close], ids=["dropped", "closed"])
def test_a_reader_that_ends_early_reads_no_more(
    server: dis.Server, client: dis.Client, transport: str, leave: Callable[[pa.RecordBatchReader], None]
) -> None:
    ways: dict[str, Callable[[DatasetHandle], pa.RecordBatchReader]] = {
        "to_reader": lambda handle: handle.to_reader({"m": n + 1}),
        "C stream": lambda handle: pa.RecordBatchReader.from_stream(handle.scanner({"m": n + 1})),
    }
    for name, way in ways.items():
        source = Source()
        server.publish("long", source)
        with case(name):
            reader = way(client.dataset("long", transport=transport))
            assert reader.read_next_batch()["m"][0].as_py() == 1
            if name == "to_reader":
                leave(reader)
            del reader
            wait_until(lambda: server.status().leases == 0, "the memory is given back")
            assert source.count < BATCHES / 2


def test_a_published_scanner_reads_only_for_its_clients(server: dis.Server, client: dis.Client) -> None:
    source = Source()
    server.publish("inner", source)
    server.publish("outer", client["inner"].scanner({"m": n * 2}))
    assert source.count < BATCHES / 2
    reader = client.read("outer")
    assert reader.schema == pa.schema([("m", pa.int64())])
    assert [batch["m"][1].as_py() for batch in islice(reader, 2)] == [2, 2]
    reader.close()
    del reader
    wait_until(lambda: connections_left(server) == 0, "all have left")
    assert source.count < BATCHES / 2


def test_errors_are_those_of_this_library(server: dis.Server, client: dis.Client, transport: str) -> None:
    server.publish("zero", pa.table({"n": [1, 2, 3], "z": [1, 0, 1], "s": ["a", "b", "c"]}))
    handle = client.dataset("zero", transport=transport)
    reader = handle.to_reader({"m": pc.divide(n, pc.field("z"))})
    assert reader.schema == pa.schema([("m", pa.int64())])
    for _ in range(2):
        with pytest.raises(OptionError, match="cannot be computed: divide by zero"):
            reader.read_next_batch()
    with pytest.raises(OptionError, match=r"cannot be computed: .* no kernel"):
        handle.to_reader({"m": n + pc.field("s")})
    with pytest.raises(OptionError, match=r"cannot be computed: .* non-scalar"):
        handle.to_table({"m": pc.sum(n)})
    with pytest.raises(ColumnNotFound, match="'__filename'; there are n, z, s"):
        handle.scanner({"m": pc.field("__filename")}).projected_schema  # noqa: B018
    wrong: list[dict[Any, Any]] = [{"m": "n"}, {"m": None}, {3: n}]
    for columns in wrong:
        with pytest.raises(OptionError, match="columns are expressions of pyarrow by name"):
            handle.to_table(columns)


def test_names_that_others_share(server: dis.Server, client: dis.Client, transport: str) -> None:
    names = ["n", "x", "x", "__filename"]
    server.publish("names", pa.table([[1, 2], [3, 4], [5, 6], ["a", "b"]], names=names))
    handle = client.dataset("names", transport=transport)
    columns = {"m": n + 1, "second": pc.field(2), "file": pc.field("__filename")}
    assert handle.to_table(columns).to_pydict() == {"m": [2, 3], "second": [5, 6], "file": ["a", "b"]}
    with pytest.raises(OptionError, match="Multiple matches"):
        handle.to_table({"m": pc.field("x")})


def test_batches_keep_their_size_and_metadata(server: dis.Server, client: dis.Client, transport: str) -> None:
    metadata = pa.KeyValueMetadata({"k": "1"})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, NUMBERS) as writer:
        for length in (3, 0, 5):
            writer.write_batch(pa.record_batch([np.arange(length)], schema=NUMBERS), custom_metadata=metadata)
    server.publish("sized", lambda: pa.ipc.open_stream(sink.getvalue()))
    expected: dict[int | None, list[int]] = {None: [3, 0, 5], 2: [2, 1, 2, 2, 1]}
    for size, rows in expected.items():
        reader = client.dataset("sized", transport=transport).to_reader({"m": n + 1}, batch_size=size)
        read = [reader.read_next_batch_with_custom_metadata() for _ in rows]
        assert [found.num_rows for found, _ in read] == rows
        assert all(found == metadata for _, found in read)
