"""A version that a handle keeps mapped: every read selects the same rows as before, and the memory is given back."""

from __future__ import annotations

import datetime
import gc
import os
import pickle
from collections.abc import Callable, Iterator
from decimal import Decimal
from itertools import cycle
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pytest
from polars.testing import assert_frame_equal

import dissociated as dis
from dissociated.client.dataset import DatasetHandle
from dissociated.client.mapped import MappedVersion
from dissociated.client.version_reader import VersionReader
from dissociated.errors import ColumnNotFound, DatasetNotFound, OptionError, StoreError
from dissociated.node.node import Node
from dissociated.store.store import Store
from support.arrow_cases import ARRAYS
from support.arrow_cases import ROWS as ROWS_OF_TYPES
from support.helpers import case, clients_end, wait_until

ROWS, BATCH = 3_000, 500
NAN = float("nan")
UTC = datetime.UTC


def _values() -> pa.Table:
    """Return columns of many types. `n` is sorted, so that statistics tell batches apart; each other has nulls."""
    n = np.arange(ROWS)
    mask = n % 7 == 3
    floats = np.where(n % 11 == 5, NAN, (n % 100) / 4 - 5)
    return pa.table(
        {
            "n": n,
            "i": pa.array((n * 37) % 500 - 250, pa.int16(), mask=mask),
            "u": pa.array((n * 37) % 500, pa.uint64(), mask=mask),
            "f": pa.array(floats, pa.float64(), mask=mask),
            "r": pa.array(floats.astype(np.float32), pa.float32(), mask=mask),
            "d": pa.array([None if one % 5 == 0 else Decimal(int(one) % 300 - 50).scaleb(-2) for one in n]).cast(
                pa.decimal128(15, 2)
            ),
            "s": pa.array([None if one % 6 == 0 else f"text {one % 50:02}" for one in n]),
            "v": pa.array([f"view {one % 50:02}" for one in n], pa.string_view()),
            "b": pa.array(n % 3 == 0, mask=mask),
            "day": pa.array(n % 900, pa.int32(), mask=mask).cast(pa.date32()),
            "t": pa.array(n * 1_000, pa.timestamp("us"), mask=mask),
            "z": pa.array(n, pa.timestamp("s", "Europe/Berlin"), mask=mask),
            "e": pa.array([f"kind {one % 4}" for one in n], mask=mask).dictionary_encode(),
            "l": pa.array([[int(one)] * (one % 3) for one in n]),
        }
    )


TABLE = pa.Table.from_batches(_values().to_batches(max_chunksize=BATCH))
PLAIN = TABLE.drop_columns(["v"])  # DuckDB passes no filter to a dataset with views


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    store = Store(tmp_path_factory.mktemp("mapped") / "store")
    with Node(store, ["shm:", "tcp://127.0.0.1:0"]) as made, dis.connect(made.uri) as client:
        client.put("data", TABLE)
        client.put("plain", PLAIN)
        yield made


@pytest.fixture(scope="module")
def client(node: Node) -> Iterator[dis.Client]:
    with dis.connect(node.uri) as made:
        yield made


def mapped(client: dis.Client, name: str) -> DatasetHandle:
    """Return a handle that has mapped its version."""
    handle = client.dataset(name)
    assert handle.mapped_nbytes == 0
    handle.to_reader().close()
    assert handle.mapped_nbytes > 0
    return handle


def shown(table: pa.Table) -> dict[str, str]:
    """Return the columns as text, in which NaN equals itself."""
    made = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        try:
            made[name] = repr(column.to_pylist())
        except (OverflowError, ValueError):  # days outside the range of Python
            made[name] = column.combine_chunks().to_string(window=100)
    return made


def test_a_mapped_version_needs_neither_catalog_nor_server(tmp_path: Path) -> None:
    with Node(Store(tmp_path / "store"), ["shm:"]) as node, dis.connect(node.uri) as client:
        client.put("data", PLAIN)
        handle = mapped(client, "data")
        client.put("data", PLAIN[:10])
        assert shown(client.dataset("data").to_table()) == shown(PLAIN[:10])
        client.drop("data")
    assert shown(handle.to_table()) == shown(PLAIN)
    assert handle.to_table(["s", "n"], pc.field("n") == 1234)["n"].to_pylist() == [1234]
    assert handle.head(3, ["n"])["n"].to_pylist() == [0, 1, 2]
    assert handle.count_rows(("n", "<", 17)) == 17
    assert duckdb.execute("SELECT sum(n) FROM handle WHERE n > 2990").fetchall() == [(sum(range(2991, 3000)),)]
    assert handle.scan().filter(pl.col("n") == 7).select("n").collect()["n"].to_list() == [7]
    copy = pickle.loads(pickle.dumps(handle))
    assert copy.mapped_nbytes == 0  # another process maps for itself
    handle.close()
    for gone in (handle, copy):
        with pytest.raises(dis.DissociatedError):
            gone.to_table()


def test_a_read_that_close_overtakes_keeps_nothing_mapped(
    node: Node, client: dis.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.put("overtaken", PLAIN)
    handle = client.dataset("overtaken")
    read = MappedVersion.read

    def overtaken(*arguments: Any) -> MappedVersion | None:
        mapped = read(*arguments)
        handle.close()
        return mapped

    with monkeypatch.context() as patch:
        patch.setattr(MappedVersion, "read", overtaken)
        assert shown(handle.to_table()) == shown(PLAIN)
    assert handle.mapped_nbytes == 0
    for _ in range(5):
        assert handle.head(1, filter=("n", "=", 7))["n"].to_pylist() == [7]
        assert handle.mapped_nbytes > 0
        handle.close()


def test_memory_is_given_back(node: Node, client: dis.Client) -> None:
    def held() -> tuple[int, int]:
        """Return how many mappings of the store this process has, and how many descriptors."""
        maps = Path("/proc/self/maps").read_text().count(str(node.store.directory))
        return maps, len(os.listdir("/proc/self/fd"))

    def close(handle: DatasetHandle) -> None:
        handle.close()
        assert handle.mapped_nbytes == 0

    def leave(handle: DatasetHandle) -> None:
        with handle:
            assert handle.to_table(["n"])["n"] == TABLE["n"]

    def query(handle: DatasetHandle) -> None:
        assert len(handle.scan().filter(pl.col("s") == "text 07").collect()) > 0
        with duckdb.connect() as database:
            database.register("handle", handle)
            assert database.execute("SELECT count(*) FROM handle WHERE i > 0").fetchall()[0][0] > 0
        handle.close()

    ways: dict[str, Callable[[DatasetHandle], None]] = {
        "closed": close,
        "left": leave,
        "collected": lambda handle: None,
        "queried": query,
        "exported": lambda handle: handle.close() if len(pa.table(handle)) else None,
        "read": lambda handle: handle.close() if len(handle.to_reader(batch_size=7).read_all()) else None,
        "limited": lambda handle: handle.close() if len(handle.head(3)) else None,
    }
    query(mapped(client, "plain"))  # the engines keep some descriptors for themselves
    gc.collect()  # expected errors of other tests hold their handles
    clients_end()
    before = held()

    def is_given_back() -> bool:
        # A connection of earlier reads may have been open when `before` was counted.
        return held()[0] == before[0] and held()[1] <= before[1]

    for name, give_back in ways.items():
        with case(name):
            handle = mapped(client, "plain")
            assert held()[0] > before[0]
            give_back(handle)
            del handle
            wait_until(is_given_back, "the memory and the descriptors are given back")
    handle = mapped(client, "data")
    array = handle.to_table(["n"])["n"].chunk(0)
    handle.close()
    assert held()[0] > before[0]
    assert array.to_pylist() == [*range(BATCH)]  # an array keeps the memory
    assert handle.to_table(["n"])["n"] == TABLE["n"]  # a later read maps it again
    handle.close()
    del array
    wait_until(is_given_back, "the memory and the descriptors are given back")


def test_filters_of_pyarrow_select_the_rows_that_pyarrow_selects(client: dis.Client) -> None:
    handle = mapped(client, "data")
    texts = TABLE.set_column(7, "v", TABLE["v"].cast(pa.string()))  # libarrow takes no rows of views
    f, i, d, s, n = map(pc.field, ("f", "i", "d", "s", "n"))
    literals: dict[str, list[Any]] = {
        "n": [0, 1234, -1, ROWS, 2**40],
        "i": [-250, 0, 249],
        "u": [0, 499],
        "f": [0.0, -0.0, NAN, -5.0, float("inf")],
        "r": [0.0, NAN, 1.25],
        "d": [Decimal("0.00"), Decimal("-0.50"), Decimal("2.49")],
        "s": ["", "text 07", "text 49"],
        "v": ["view 00", "view 49"],
        "day": [datetime.date(1970, 1, 1), datetime.date(1971, 7, 1)],
        "t": [datetime.datetime(1970, 1, 1, 0, 0, 1)],
        "z": [pa.scalar(1500, pa.timestamp("s", "Europe/Berlin")), pa.scalar(1500, pa.timestamp("s", "UTC"))],
    }
    filters = [
        compare(pc.field(name), value)
        for name, values in literals.items()
        for value in values
        for compare in (pc.equal, pc.not_equal, pc.less, pc.less_equal, pc.greater, pc.greater_equal)
    ]
    filters += [check(pc.field(name)) for name in TABLE.column_names for check in (pc.is_null, pc.is_valid)]
    filters += [f.is_nan(), ~f.is_nan(), ~(i > 3), (i > 3) | (s == "text 07"), (i > 3) & ~(d < Decimal("1.00"))]
    filters += [n.isin([5, 2999]), s.isin(["text 07", None]), pc.field("b"), ~pc.field("b"), pc.scalar(True)]
    filters += [pc.starts_with(s, "text 1"), n + 1 > 2990, f * 2 > 3, (n == 5) | (n == 2995), pc.field("e") == "kind 1"]
    for number, expression in enumerate(filters):
        with case(str(expression)):
            try:
                passes = _mask(expression)
            except pa.ArrowException:
                continue
            expected = texts.take(pc.indices_nonzero(passes.combine_chunks().fill_null(False)))
            # libarrow's scanner cannot filter views. Of the six comparisons with a value, each gets both columns.
            chosen = ["v" if (number + number // 6) % 2 else "s", "n"]
            read = handle.to_table(chosen, expression)
            assert read.schema == TABLE.select(chosen).schema
            assert read["n"] == expected["n"]
            if not number % 20:
                assert shown(handle.to_table(filter=expression)) == shown(expected)
                plain = PLAIN.schema.names
                assert shown(handle.to_table(plain, expression)) == shown(expected.select(plain))
            if number % 3:
                assert handle.head(3, ["n"], expression)["n"].to_pylist() == expected["n"][:3].to_pylist()
            else:
                assert handle.count_rows(expression) == len(expected)


def _mask(expression: pc.Expression) -> pa.ChunkedArray:
    """Compute an expression for each row, by pyarrow's own scanner."""
    return ds.dataset(TABLE).to_table(columns={"p": expression})["p"]


def test_queries_of_duckdb_have_the_answers_that_it_has_over_a_table(client: dis.Client) -> None:
    database = duckdb.connect()
    database.register("handle", mapped(client, "plain"))
    database.register("expected", PLAIN)
    for condition in (
        *("n = 1234", "n < 10 OR n > 2990", "n IN (1, 2, 2999)", "n BETWEEN 499 AND 501", "n <> 5", "NOT (i > 3)"),
        *("f > 3", "f = 'NaN'::DOUBLE", "f >= 'NaN'::DOUBLE", "f < 'NaN'::DOUBLE", "f IS NULL", "f <> 0", "f = -0.0"),
        *("r >= 1.25", "r = 'NaN'::FLOAT", "d = 1.25", "d < 0", "d > 2.485", "d IS NOT NULL AND d <= 0.5"),
        *("s = 'text 07'", "s LIKE 'text 1%'", "s IN ('text 01', 'text 02')", "s IS NULL OR i = 0", "s > 'text 4'"),
        *("b", "NOT b", "day >= DATE '1972-01-01'", "t < TIMESTAMP '1970-01-01 00:00:01'"),
        *("z = TIMESTAMPTZ '1970-01-01 00:25:00+00'", "z > TIMESTAMPTZ '1970-01-01 01:25:00+01'", "e = 'kind 1'"),
        *("u >= 499", "i % 7 = 2 AND n > 2000", "l = [7]", "false"),
    ):
        with case(condition):
            sql = f"SELECT * EXCLUDE (z) FROM {{}} WHERE {condition} ORDER BY n"
            answers = [repr(database.execute(sql.format(name)).fetchall()) for name in ("handle", "expected")]
            assert answers[0] == answers[1]


def test_polars_selects_the_rows_that_it_selects_from_a_frame(client: dis.Client) -> None:
    handle = mapped(client, "data")
    frame = pl.DataFrame(TABLE)
    n, i, f, r, d, s, v, day, t, z = map(pl.col, ("n", "i", "f", "r", "d", "s", "v", "day", "t", "z"))
    moment = pl.lit(datetime.datetime(1970, 1, 1, 0, 25, tzinfo=UTC))
    moment = moment.dt.convert_time_zone("Europe/Berlin").dt.cast_time_unit("ms")
    choices = ["s", "n"], ["z", "l", "e"], TABLE.column_names
    predicates = (
        *(n == 1234, (n < 10) | (n > 2990), n.is_in([1, 2, 2999]), n.is_between(499, 501), n != 5, ~(i > 3)),
        *(f > 3, f == NAN, f >= NAN, f < NAN, f.is_null(), f.is_nan(), f == -0.0, r >= 1.25, r == NAN),
        *(d == Decimal("1.25"), d < 0, d.is_not_null() & (d <= Decimal("0.5")), s == "text 07", v == "view 07"),
        *(s.str.starts_with("text 1"), s.is_in(["text 01"]), s.is_null() | (i == 0), pl.col("b"), pl.lit(False)),
        *(day >= datetime.date(1972, 1, 1), t < datetime.datetime(1970, 1, 1, 0, 0, 1)),
        z == moment,
        z > moment,
    )
    for predicate, columns in zip(predicates, cycle(choices), strict=False):
        with case((str(predicate), columns)):
            expected = frame.lazy().filter(predicate).select(columns).collect()
            for _ in range(2):  # the second time, the columns have been converted
                assert handle.scan().filter(predicate).select(columns).collect().equals(expected)
            assert handle.scan().filter(predicate).select(columns).head(2).collect().equals(expected.head(2))
    assert handle.scan().select(pl.len()).collect().item() == ROWS
    assert handle.scan().collect().equals(frame)
    assert handle.scan().head(7).collect().equals(frame.head(7))


def test_polars_scans_mapped_columns_without_python(client: dis.Client) -> None:
    handle, frame = mapped(client, "data"), pl.DataFrame(TABLE).lazy()
    queries: dict[str, Callable[[pl.LazyFrame], pl.LazyFrame]] = {
        "rows after a limit": lambda lazy: lazy.head(600).filter(pl.col("n") > 590),
        "a slice": lambda lazy: lazy.select("s", "n").slice(490, 20),
        "the end": lambda lazy: lazy.tail(3),
        "no batch": lambda lazy: lazy.filter(pl.col("n") > 5 * ROWS).select("s", "day"),
        "two filters": lambda lazy: lazy.filter(pl.col("n") > 2_900).filter(pl.col("s") == "text 07").select("f"),
        "numbered rows": lambda lazy: lazy.with_row_index().filter(pl.col("n") == 2_999),
        "a join": lambda lazy: lazy.filter(pl.col("n") < 3).select("n").join(lazy.select("n", "s"), on="n"),
    }
    for name, query in queries.items():
        with case(name):
            lazy = query(handle.scan())
            assert "PYTHON SCAN" not in lazy.explain()
            for engine in ("streaming", "in-memory"):
                assert_frame_equal(
                    lazy.collect(engine=engine), query(frame).collect(), check_row_order=name != "a join"
                )


def test_every_type_is_selected_as_it_is(client: dis.Client, node: Node) -> None:
    columns = {name: first for name, (first, *_) in ARRAYS.items()}
    table = pa.table({**columns, "number": pa.array(range(ROWS_OF_TYPES), pa.int64())})
    table = pa.Table.from_batches([*table[:2].to_batches(), *table[2:].to_batches()], table.schema)
    client.put("typed", table)
    with client.dataset("typed") as handle:
        for name in columns:
            for _ in range(2):
                with case(name):
                    read = handle.to_table(["number", name])
                    assert read.schema == table.select(["number", name]).schema
                    assert read["number"] == table["number"]
                    chosen = handle.to_table([name], pc.field("number") >= 2)
                    chosen.validate(full=True)
                    assert shown(chosen) == shown(table[2:].select([name]))


def test_a_point_query_needs_one_batch(client: dis.Client) -> None:
    version = VersionReader(client, client.describe("plain"), None).map(client.defaults)
    assert version is not None
    for filter_, numbers in (
        (pc.field("n") == 1234, [2]),
        (("n", "in", [0, 2999]), [0, 5]),
        ([("n", ">", 2600), ("i", ">", 0)], [5]),
        (pc.field("n") < 0, []),
        (pc.field("s") == "AAA", [1, 2, 3, 4, 5]),
        (pc.field("i") == 0, range(6)),
    ):
        assert [*version.passing_numbers(filter_)] == [*numbers]


def test_batches_that_pass_as_a_whole_are_not_copied(client: dis.Client) -> None:
    handle = mapped(client, "data")
    places = [chunk.buffers()[1].address for chunk in handle.to_table(["n"])["n"].chunks]
    n, i = pc.field("n"), pc.field("i")
    for filter_, whole in (
        (n >= 1000, [2, 3, 4, 5]),
        (n.is_valid(), range(6)),
        (n.is_valid() & (n < 2500), range(5)),
        ((n > 2400) | (n < 700), [0, 5]),
        (n != 1100, [0, 1, 3, 4, 5]),
        (i.is_valid(), []),
    ):
        with case(str(filter_)):
            chunks = handle.to_table(["n"], filter_)["n"].chunks
            assert [place for chunk in chunks if (place := chunk.buffers()[1].address) in places] == [
                places[number] for number in whole
            ]


@pytest.mark.parametrize("rows", [10, 100_000], ids=["few rows", "many rows"])
def test_a_single_batch_is_filtered(client: dis.Client, rows: int) -> None:
    numbers = np.arange(rows)
    table = pa.table(
        {"n": numbers, "i": pa.array(numbers % 5, mask=numbers % 7 == 3), "s": [f"{n:06}" for n in numbers]}
    )
    client.put("single", table)
    n, i = pc.field("n"), pc.field("i")
    with mapped(client, "single") as handle:
        for filter_ in (
            n > 6,
            n < 0,
            n.is_valid(),
            n >= 0,
            (n >= 0) & (i == 2),
            i.is_null(),
            ~(i > 2),
            pc.scalar(True),
        ):
            with case(str(filter_)):
                assert handle.to_table(filter=filter_) == table.filter(filter_)
                assert handle.to_table(["s"], filter_) == table.filter(filter_).select(["s"])
                assert handle.count_rows(filter_) == len(table.filter(filter_))
                assert handle.head(3, filter=filter_) == table.filter(filter_)[:3]
        with pytest.raises(OptionError, match="cannot be applied"):
            handle.to_table(["s"], pc.divide(n, n - 7) > 1)


@pytest.mark.parametrize("begun", [False, True])
def test_a_closed_reader_has_no_more_rows(client: dis.Client, begun: bool) -> None:
    handle = mapped(client, "data")
    for filter_ in (None, pc.field("n") * 3 > 1):
        for read in ("read_all", "read_next_batch"):
            with case(f"{read} after {filter_}"):
                reader = handle.to_reader(["n"], filter_)
                if begun:
                    assert reader.read_next_batch().num_rows > 0
                reader.close()
                with pytest.raises(StoreError, match="closed before its end"):
                    getattr(reader, read)()


def test_columns_that_have_names_of_the_scanner(client: dis.Client) -> None:
    names = ["__filename", "__fragment_index", "__batch_index", "__last_in_fragment"]
    table = pa.table({"n": range(100), **{name: [f"{name} {n}" for n in range(100)] for name in names}})
    client.put("scanned", pa.Table.from_batches(table.to_batches(max_chunksize=30)))
    with mapped(client, "scanned") as handle:
        for filter_ in (pc.field("n") * 3 < 150, pc.field("__filename") < "__filename 5"):
            expected = table.filter(filter_)
            assert handle.to_table(filter=filter_) == expected
            for name in names:
                assert handle.to_table([name], filter_) == expected.select([name])
            assert duckdb.execute("SELECT count(__batch_index) FROM handle WHERE n < 50").fetchall() == [(50,)]


def test_a_filter_that_fails_says_so(client: dis.Client) -> None:
    handle = mapped(client, "data")
    fails = pc.divide(pc.field("n"), pc.field("n") - 7) > 1
    ways: list[Callable[[], Any]] = [
        lambda: handle.to_table(["n"], fails),
        lambda: [*handle.to_batches(["n"], fails)],
        lambda: handle.to_table(["v"], fails),
        lambda: handle.head(20, ["n"], fails),
    ]
    for way in ways:
        with pytest.raises(OptionError, match="cannot be applied"):
            way()
    with pytest.raises(ColumnNotFound):
        handle.to_table(["absent"])
    with pytest.raises(ColumnNotFound):
        handle.to_table(filter=pc.field("absent") == 1)
    with pytest.raises(OptionError):
        handle.to_table(filter=pc.field("n") + 1)


def test_what_does_not_lie_in_shared_memory_is_not_kept(tmp_path: Path) -> None:
    small = PLAIN.select(["n", "s"])
    with dis.Server(["shm:", "tcp://127.0.0.1:0"]) as server, dis.connect(server.catalog_uri) as client:
        server.publish("live", small.to_reader(), live=dis.Live())
        server.publish("callable", lambda: small.to_reader())
        server.publish("compressed", small, options=dis.WriteOptions(codec="zstd"))
        server.publish("plain", small)
        for name, transport in (("live", "shm"), ("callable", "shm"), ("compressed", "shm"), ("plain", "tcp")):
            with case(name):
                handle = client.dataset(name, transport=transport)
                assert handle.to_table(filter=pc.field("n") > 5) == small[6:]
                assert handle.mapped_nbytes == 0
                if name != "live":
                    assert handle.to_table() == small
        streams = {dataset.name: dataset.streams for dataset in client.status().datasets}
        assert streams["compressed"] == 4  # each read requests a stream to map, and then the stream that it returns
        server.drop("plain")
        with pytest.raises(DatasetNotFound):
            handle.to_table()
