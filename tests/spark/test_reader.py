from __future__ import annotations

import gc
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.errors import PySparkException

import dissociated as dis
from dissociated.catalog.database import Database
from dissociated.catalog.service import CatalogService
from dissociated.client.partitions import slices
from dissociated.client.request import ReadRequest
from dissociated.control.commit import StagedSegment
from dissociated.errors import CatalogError, DissociatedError, OptionError, SourceError
from dissociated.node.node import Node
from dissociated.spark import publish, read
from dissociated.spark.columns import spark_schema
from dissociated.spark.layouts import stream_layout
from dissociated.spark.reader import DatasetReader
from dissociated.spark.request import DatasetRequest
from dissociated.spark.types import arrow_schema
from dissociated.store.store import Store
from support.arrow_cases import ARRAYS, ROWS
from support.certificates import Certificates
from support.helpers import commit_of, connections_left, wait_until
from support.processes import free_port
from support.secret_sources import ERRORS, REFERENCE, SECRETS, SOURCES

from .test_columns import NAMES, values, with_nulls
from .test_datasource import NATIVE, plain

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

EACH = 5_000
TABLE = pa.Table.from_batches(
    [
        pa.record_batch(
            {
                "n": range(first, first + EACH),
                "wide": [f"{n:0100}" for n in range(first, first + EACH)],
                "half": pa.array([n / 2 if n % 3 else None for n in range(first, first + EACH)]),
            }
        )
        for first in range(0, 4 * EACH, EACH)
    ]
)


@pytest.fixture
def server() -> Iterator[dis.Server]:
    """Yield a server with all transports, and check that every reader has disconnected at the end."""
    with dis.Server(["shm:", "tcp://127.0.0.1:0"]) as server:
        yield server
        wait_until(lambda: connections_left(server) == 0, "all have left")
        assert server.status().leases == 0


def numbers(df: DataFrame) -> list[int]:
    return [int(row[0]) for row in df.select("n").collect()]


@pytest.mark.parametrize("transport", [None, "shm", "tcp", "grpc"])
def test_a_dataset_is_read_whole_and_in_order_in_slices(
    spark: SparkSession, server: dis.Server, transport: str | None
) -> None:
    server.publish("data", TABLE)
    options: dict[str, Any] = {} if transport is None else {"transport": transport}
    df = read(spark, "data", server.catalog_uri, partitions=3, **options)
    assert df.rdd.getNumPartitions() == 3
    assert df.toArrow() == TABLE


def test_spark_finds_the_source_by_itself_and_sql_does(spark: SparkSession, server: dis.Server) -> None:
    server.publish("data", TABLE)
    df = spark.read.format("dissociated").option("catalog", server.catalog_uri).load("data")
    assert df.rdd.getNumPartitions() == 1  # the dataset is small
    assert df.schema.simpleString() == "struct<n:bigint,wide:string,half:double>"
    view = f"CREATE TEMPORARY VIEW seen USING dissociated OPTIONS (catalog '{server.catalog_uri}', path 'data')"
    spark.sql(view)
    try:
        assert spark.sql("SELECT sum(n), count(half) FROM seen WHERE n % 2 = 0").first() == (99_990_000, 6_666)
    finally:
        spark.catalog.dropTempView("seen")


@pytest.mark.usefixtures("plans")
def test_what_spark_wrote_it_reads_with_all_native_types(
    spark: SparkSession, server: dis.Server, use_jvm: Callable[[bool], None]
) -> None:
    present = [f"{value} AS {name}" for name, value in NATIVE.items()]
    nullable = [f"IF(id % 3 = 1, NULL, {value}) AS {name}_or_null" for name, value in NATIVE.items()]
    df = spark.range(0, 20, numPartitions=2).selectExpr(*present, *nullable)
    publish(df, "types", server.catalog_uri)
    written = [plain(row) for row in df.collect()]
    for transport, jvm in (("shm", True), ("tcp", True), ("shm", False)):
        use_jvm(jvm)
        there = read(spark, "types", server.catalog_uri, partitions=2, transport=transport)
        assert there.schema == df.schema
        assert [plain(row) for row in there.collect()] == written


@pytest.mark.usefixtures("plans")
def test_every_arrow_type_that_spark_has(spark: SparkSession, server: dis.Server) -> None:
    arrays = {
        f"{name}, {number}": array
        for name, some in ARRAYS.items()
        if NAMES[name] is not None
        for number, array in enumerate(some)
    }

    def is_direct(array: pa.Array) -> bool:
        schema = pa.schema({"one": array.type})
        return stream_layout(schema, arrow_schema(spark_schema(schema))) is not None

    direct = {name: array for name, array in arrays.items() if is_direct(array)}
    assert len(direct) > 60  # Spark's JVM reads these types from their server by itself
    server.publish("types", pa.table(arrays))
    server.publish("direct", pa.table(direct))
    tables = [
        read(spark, what, server.catalog_uri, nanoseconds="truncate", transport=transport).toArrow()
        for what, transport in (("types", "shm"), ("types", "tcp"), ("direct", "tcp"))
    ]
    assert [table.num_rows for table in tables] == [ROWS] * 3
    for name, column in ((name, table[name].combine_chunks()) for table in tables for name in table.column_names):
        array = arrays[name]
        if name.startswith("timestamp[s]"):
            column = column.cast(pa.timestamp("s"))
        instants = pa.types.is_timestamp(column.type) and column.type.tz is not None
        assert values(column.cast(pa.timestamp("us", "UTC")) if instants else column) == values(array), name


@pytest.mark.usefixtures("plans")
def test_nulls_of_what_has_none_by_its_schema_are_told_and_may_be_allowed(
    spark: SparkSession, server: dis.Server
) -> None:
    """Spark does not check for nulls: it reads the values below them."""
    forbidden, sound = with_nulls()
    server.publish("forbidden", pa.Table.from_batches([forbidden]))
    server.publish("sound", pa.Table.from_batches([sound]))
    for transport, names in (("shm", forbidden.schema.names), ("tcp", ["number"])):
        df = read(spark, "forbidden", server.catalog_uri, transport=transport)
        for name in names:
            with pytest.raises(PySparkException, match=f"column '{name}' has nulls, and its schema says that"):
                df.select(name).collect()
    reader = spark.read.format("dissociated").option("catalog", server.catalog_uri)
    assert reader.schema("number bigint, key bigint").load("forbidden").collect() == [(1, 5), (None, None), (3, 6)]
    found = read(spark, "sound", server.catalog_uri).collect()
    assert [row.asDict(recursive=True) for row in found] == sound.to_pylist(maps_as_pydicts="strict")


def test_a_type_that_spark_lacks_is_told_with_its_column(spark: SparkSession, server: dis.Server) -> None:
    server.publish("odd", pa.table({"n": [1] * ROWS, "span": ARRAYS["interval"][0]}))
    with pytest.raises(PySparkException, match=r"column 'span' has the type month_day_nano_interval.*option columns"):
        read(spark, "odd", server.catalog_uri)
    assert read(spark, "odd", server.catalog_uri, columns=["n"]).count() == ROWS


def test_a_value_that_spark_cannot_hold_is_told_with_its_column(spark: SparkSession, server: dis.Server) -> None:
    server.publish("fine", pa.table({"at": pa.array([1001], pa.timestamp("ns"))}))
    with pytest.raises(PySparkException, match=r"column 'at' of the type timestamp.*'nanoseconds', 'truncate'"):
        read(spark, "fine", server.catalog_uri).collect()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_bodies_of_other_columns_and_slices_do_not_move(
    spark: SparkSession, server: dis.Server, transport: str
) -> None:
    server.publish("data", TABLE)
    by_option = read(spark, "data", server.catalog_uri, columns=["n"], transport=transport, partitions=4)
    reader = spark.read.format("dissociated").option("catalog", server.catalog_uri).schema("n bigint")
    by_schema = reader.options(transport=transport, partitions=4).load("data")
    for df in (by_option, by_schema):
        before = server.status().totals.bytes
        assert numbers(df) == [*range(4 * EACH)]
        wait_until(lambda: connections_left(server) == 0, "all have left")
        assert server.status().totals.bytes - before == 8 * 4 * EACH  # once, although there are four tasks


def test_columns_come_in_the_order_in_which_they_are_asked_for(spark: SparkSession, server: dis.Server) -> None:
    server.publish("data", pa.table({"a, b": [1], "c": ["x"], "d": [2.5]}))
    assert read(spark, "data", server.catalog_uri, columns=["d", "a, b"]).collect() == [(2.5, 1)]
    reader = spark.read.format("dissociated").option("catalog", server.catalog_uri)
    assert reader.option("columns", "d, c").load("data").collect() == [(2.5, "x")]
    assert reader.option("columns", "d, c").schema("d double, c string").load("data").collect() == [(2.5, "x")]
    with pytest.raises(PySparkException, match="not both"):
        reader.schema("c string").load("data").collect()


@pytest.mark.parametrize(
    ("ddl", "message"),
    [
        ("n int", "column 'n' is bigint, not int"),
        ("m bigint", "there is no column 'm'; there are n, wide, half"),
        ("half double not null", "column 'half' is double, not double without nulls"),
    ],
)
def test_a_schema_that_does_not_fit_is_told_before_any_task(
    spark: SparkSession, server: dis.Server, ddl: str, message: str
) -> None:
    server.publish("data", TABLE)
    with pytest.raises(PySparkException, match=message):
        spark.read.format("dissociated").option("catalog", server.catalog_uri).schema(ddl).load("data").collect()
    assert server.status().totals.streams == 0


@pytest.mark.usefixtures("plans")
def test_limit_stops_early_and_releases(spark: SparkSession, server: dis.Server) -> None:
    server.publish("data", pa.Table.from_batches(TABLE.to_batches() * 50))
    for transport in ("shm", "tcp"):
        df = read(spark, "data", server.catalog_uri, transport=transport)
        assert [row.n for row in df.limit(3).collect()] == [0, 1, 2]
        wait_until(lambda: connections_left(server) == 0, "the task has left")
        assert server.status().leases == 0


@pytest.mark.usefixtures("plans")
def test_a_task_that_fails_releases(spark: SparkSession, server: dis.Server) -> None:
    server.publish("data", TABLE)
    df = read(spark, "data", server.catalog_uri, partitions=2)
    with pytest.raises(PySparkException, match="boom"):
        df.selectExpr("IF(n = 15000, raise_error('boom'), n) AS n").collect()
    wait_until(lambda: connections_left(server) == 0, "the tasks have left")


def test_a_query_reads_the_version_that_was_planned(spark: SparkSession, tmp_path: Path) -> None:
    """Spark plans a DataFrame when its first query is planned, and never again."""
    with Node(Store(tmp_path / "store"), ["shm:"]) as node, dis.connect(node.uri) as client:
        publish(spark.range(0, 100, numPartitions=2), "data", node.uri)
        df = read(spark, "data", node.uri, partitions=4)
        assert df.rdd.getNumPartitions() == 4
        version = client.describe("data").version
        publish(spark.range(1000, 1010, numPartitions=1), "data", node.uri)
        assert [row.id for row in df.collect()] == [*range(100)]
        assert [row.id for row in read(spark, "data", node.uri, partitions=4).collect()] == [*range(1000, 1010)]
        assert [row.id for row in df.collect()] == [*range(100)]
        pinned = read(spark, "data", node.uri, version=version)
        assert [row.id for row in pinned.collect()] == [*range(100)]
        client.drop("data")
        with pytest.raises(
            PySparkException, match=r"was replaced or dropped after this DataFrame was planned: load it again"
        ):
            df.collect()


def test_a_dataframe_reads_its_version_or_none_after_a_restart(spark: SparkSession, tmp_path: Path) -> None:
    """Another store gives the version number to another version; its own store never reuses the number."""
    uri = f"grpc://127.0.0.1:{free_port()}"

    def node(store: str) -> Node:
        return Node(Store(tmp_path / store), ["shm:"], flight=uri)

    with node("store"):
        publish(spark.range(0, 10, numPartitions=1), "data", uri)
        publish(spark.range(0, 100, numPartitions=2), "data", uri)
        df = read(spark, "data", uri, partitions=2)
        assert [row.id for row in df.collect()] == [*range(100)]
    with node("store"):
        assert [row.id for row in df.collect()] == [*range(100)]
    with node("another store"), dis.connect(uri) as client:
        for first in (1000, 2000):
            publish(spark.range(first, first + 100, numPartitions=2), "data", uri)
        assert client["data"].version == 2
        with pytest.raises(PySparkException, match="version 2 of 'data' is gone"):
            df.collect()
    with node("store"), dis.connect(uri) as client:
        publish(spark.range(3000, 3100, numPartitions=2), "data", uri)
        assert client["data"].version == 3
        with pytest.raises(PySparkException, match="version 2 of 'data' is gone"):
            df.collect()
        assert [row.id for row in read(spark, "data", uri).collect()] == [*range(3000, 3100)]


def test_what_is_being_read_may_be_replaced(spark: SparkSession, server: dis.Server, tmp_path: Path) -> None:
    """The server keeps no replaced version, but a read that has begun continues."""
    server.publish("data", TABLE)
    begun, replaced = tmp_path / "begun", tmp_path / "replaced"

    def wait(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            begun.touch()
            while not replaced.exists():  # the test's own timeout is the deadline
                time.sleep(0.01)
            yield batch

    def replace() -> None:
        wait_until(begun.exists, "somebody reads")
        server.drop("data")
        server.publish("data", pa.table({"n": [7]}))
        replaced.touch()

    df = read(spark, "data", server.catalog_uri, columns=["n"]).mapInArrow(wait, "n bigint")
    with ThreadPoolExecutor(1) as other:
        done = other.submit(replace)
        assert numbers(df) == [*range(4 * EACH)]
        done.result()


def test_columns_that_changed_since_are_told(spark: SparkSession, server: dis.Server) -> None:
    server.publish("data", pa.table({"n": [1]}))
    df = read(spark, "data", server.catalog_uri)
    server.drop("data")
    server.publish("data", pa.table({"n": ["a"]}))
    with pytest.raises(PySparkException, match=r"column 'n' is string, not bigint.*load it again"):
        df.collect()


def test_tensors_are_refused(spark: SparkSession, server: dis.Server) -> None:
    server.publish("weights", pa.Tensor.from_numpy(pa.array([1.0, 2.0]).to_numpy()))
    with pytest.raises(PySparkException, match=r"'weights' holds tensors.*read_tensors"):
        read(spark, "weights", server.catalog_uri)


def test_a_reader_that_can_be_read_once_is_read_by_one_task(spark: SparkSession, server: dis.Server) -> None:
    server.publish("once", TABLE.to_reader())
    df = read(spark, "once", server.catalog_uri, partitions=4)
    assert df.toArrow() == TABLE


def test_a_second_attempt_never_gets_the_rest_of_what_is_read_once(spark: SparkSession, server: dis.Server) -> None:
    def batches() -> Iterator[pa.RecordBatch]:
        yield from TABLE.to_batches()

    def reader() -> pa.RecordBatchReader:
        return pa.RecordBatchReader.from_batches(TABLE.schema, batches())

    server.publish("live", reader(), live=dis.Live())
    server.publish("each", reader)
    for transport in ("shm", "tcp", "grpc"):
        server.publish("once", reader())

        def attempt(name: str, transport: str = transport) -> Generator[pa.RecordBatch, None, None]:
            """Read as a Python task does, and as the sidecar does for a task in the JVM."""
            request = DatasetRequest.parse({"catalog": server.catalog_uri, "path": name, "transport": transport})
            dataset = DatasetReader(request, request.schema())
            (partition,) = dataset.partitions()
            return dataset.batches(partition, EACH)

        for _ in range(2):
            with closing(attempt("live")) as live, pytest.raises(SourceError, match=r"'live' .* publish a callable"):
                next(live)
            assert sum(batch.num_rows for batch in attempt("each")) == TABLE.num_rows
        with closing(attempt("once")) as once:
            assert next(once).num_rows == EACH
        with closing(attempt("once")) as once, pytest.raises(DissociatedError, match="can be read once and was read"):
            next(once)
        with pytest.raises(PySparkException, match=r"'live' .* publish a callable"):
            read(spark, "live", server.catalog_uri, transport=transport).collect()


def test_no_rows_are_a_dataframe_too(spark: SparkSession, server: dis.Server) -> None:
    server.publish("nothing", TABLE.schema.empty_table())
    df = read(spark, "nothing", server.catalog_uri, partitions=4)
    assert df.collect() == []
    assert df.schema.fieldNames() == TABLE.schema.names


def test_one_large_batch_is_cut_within(spark: SparkSession, server: dis.Server) -> None:
    server.publish("data", TABLE.combine_chunks())
    df = read(spark, "data", server.catalog_uri, partitions=3)
    assert df.rdd.getNumPartitions() == 3
    assert df.toArrow() == TABLE


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"catalog": "grpc://127.0.0.1:1"}, r"name of the dataset is missing: .*\.load"),
        ({"catalog": "grpc://127.0.0.1:1", "path": "x"}, "127.0.0.1:1"),
    ],
)
def test_wrong_options_are_told(spark: SparkSession, options: dict[str, str], message: str) -> None:
    with pytest.raises(PySparkException, match=message):
        spark.read.format("dissociated").options(**options).load()


def test_no_task_waits_for_a_part_that_is_set_aside(memory: Path) -> None:
    """A wait of a day would exceed the time of the test."""

    def start_node() -> Node:
        return Node(Store(memory / "store"), ["shm:"], database=str(memory / "catalog.db"))

    with start_node() as node, dis.connect(node.uri) as client:
        client.put("d", TABLE)
        (stored,) = node.store.versions()
    (memory / "store" / "segments" / stored.id / "manifest.json").write_bytes(b"")
    with start_node() as node, dis.connect(node.uri) as client:
        request = DatasetRequest.parse({"catalog": node.uri, "path": "d", "wait": "86400"})
        info = request.describe(client)
        (endpoint,) = info.endpoints
        with pytest.raises(CatalogError, match="a part of 'd' is set aside on"):
            request.open(client, info, endpoint, ReadRequest())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"columns": ""}, "option columns is a list of names"),
        ({"columns": "a,,b"}, "option columns is a list of names"),
        ({"columns": '["a"'}, "is not valid JSON"),
        ({"columns": "[1]"}, "option columns is a list of names"),
        ({"partitions": "0"}, "option partitions is a number from 1 on, not '0'"),
        ({"version": "latest"}, "option version is a number from 0 on, not 'latest'"),
        ({"filters": "n > 7"}, r'option filters is not JSON: .* \[\["dep_delay", ">", 60\]\]'),
        ({"column": "n"}, "there is no option 'column'; there are path, catalog, token_file, tls_roots, wait, columns"),
    ],
)
def test_options_that_make_no_sense_are_told(options: dict[str, str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        DatasetRequest.parse({"catalog": "grpc://127.0.0.1:1", "path": "x", **options})


def test_a_dataset_or_a_transport_that_is_not_there_is_told(spark: SparkSession, server: dis.Server) -> None:
    with pytest.raises(PySparkException, match="nothing"):
        read(spark, "nothing", server.catalog_uri)
    with pytest.raises(OptionError, match=r"columns is a list of names: \['dest'\]"):
        read(spark, "nothing", server.catalog_uri, columns="dest")
    server.publish("data", TABLE)
    with pytest.raises(PySparkException, match="cannot be reached from here by ucx: it is offered by"):
        read(spark, "data", server.catalog_uri, transport="ucx").collect()


def test_a_guarded_catalog(spark: SparkSession, certified: Certificates, tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("sesame\n")
    listen = ["shm:", "tls://127.0.0.1:0"]
    with dis.Server(listen, catalog="grpc+tls://127.0.0.1:0", authorize=["sesame"], **certified.options) as server:
        server.publish("data", TABLE)
        with pytest.raises(PySparkException, match="requires a token"):
            read(spark, "data", server.catalog_uri, tls_roots=certified.roots)
        for transport in ("shm", "tls"):
            options = {"tls_roots": certified.roots, "token_file": str(token_file), "transport": transport}
            assert read(spark, "data", server.catalog_uri, partitions=2, **options).toArrow() == TABLE


def test_a_dataset_of_parts_on_two_nodes_has_a_partition_for_each(spark: SparkSession, tmp_path: Path) -> None:
    catalog = CatalogService("grpc://127.0.0.1:0", database=Database(str(tmp_path / "db")), retain=60.0)
    listen = ["shm:", "tcp://127.0.0.1:0"]
    try:
        with (
            Node(Store(tmp_path / "a"), listen, catalog=catalog.uri) as a,
            Node(Store(tmp_path / "b"), listen, catalog=catalog.uri) as b,
            dis.connect(catalog.uri) as client,
        ):
            parts = []
            for node, some in ((a, TABLE[:EACH]), (b, TABLE[EACH:])):
                with node.store.writer("part", TABLE.schema) as writer:
                    for batch in some.to_batches():
                        writer.write(batch)
                parts.append(StagedSegment("part", node.store.id))
            client.commit(commit_of("data", parts, TABLE.schema))
            for partitions, found in ((1, 2), (4, 4)):
                df = read(spark, "data", catalog.uri, partitions=partitions, wait=0)
                assert df.rdd.getNumPartitions() == found
                assert df.toArrow() == TABLE
            b.close()
            with pytest.raises(PySparkException, match="and no node there is alive"):
                df.collect()
    finally:
        catalog.close()
        gc.collect()


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 40), st.booleans())
def test_slices_have_every_row_once(sizes: list[int], count: int, whole: bool) -> None:
    made = slices(sizes, count, whole)
    assert len(made) <= count
    batches = [[(number, row) for row in range(size)] for number, size in enumerate(sizes)]
    found = []
    for first, stop, skip, length in made:
        within = [row for batch in batches[first:stop] for row in batch]
        assert 0 <= skip < sizes[first]
        assert length > 0
        assert not (whole and skip) or sizes[first] > 2 * (sum(sizes) // count)
        assert len(within) - skip - length < sizes[stop - 1]  # no batch more than needed
        found += within[skip : skip + length]
    assert found == [row for batch in batches for row in batch]


@pytest.mark.parametrize(
    ("sizes", "count", "expected"),
    [
        ([10] * 4, 2, [(0, 2, 0, 20), (2, 4, 0, 20)]),
        ([10] * 5, 3, [(0, 2, 0, 20), (2, 3, 0, 10), (3, 5, 0, 20)]),
        ([30, 10], 2, [(0, 1, 0, 20), (0, 2, 20, 20)]),
        ([9, 11, 10, 10], 4, [(0, 1, 0, 9), (1, 2, 0, 11), (2, 3, 0, 10), (3, 4, 0, 10)]),
        ([100], 3, [(0, 1, 0, 33), (0, 1, 33, 33), (0, 1, 66, 34)]),
        ([0, 0], 3, []),
    ],
)
def test_cuts_lie_between_batches_where_that_is_near(
    sizes: list[int], count: int, expected: list[tuple[int, ...]]
) -> None:
    assert slices(sizes, count) == expected


@pytest.mark.parametrize(("transport", "in_jvm"), [("shm", True), ("tcp", True), ("grpc", True), ("tcp", False)])
def test_the_text_of_a_source_s_exception_does_not_reach_a_query(
    spark: SparkSession,
    server: dis.Server,
    use_jvm: Callable[[bool], None],
    transport: str,
    in_jvm: bool,
) -> None:
    """Neither the driver nor a task gets the text. Both say how to find it in the log of the server."""
    use_jvm(in_jvm)
    for source in ("after a batch", "through the C interface"):
        server.publish("data", SOURCES[source](ERRORS["ValueError"]))
        df = read(spark, "data", server.catalog_uri, transport=transport)
        with pytest.raises(PySparkException) as caught:
            df.collect()
        seen = str(caught.value)
        assert REFERENCE.search(seen)
        assert not [secret for secret in SECRETS if secret in seen]
