"""Micro-batches into and out of datasets: rows exactly once, even if any process fails or is killed in between."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows
from pyspark.sql.types import LongType, StructField, StructType

import dissociated as dis
from dissociated.catalog.database import PREPARE_TIMEOUT, Database
from dissociated.catalog.service import CatalogService
from dissociated.control.commit import Commit
from dissociated.errors import CatalogError, OptionError
from dissociated.node.node import Node
from dissociated.spark.catalog_config import CatalogConfig
from dissociated.spark.request import DatasetRequest
from dissociated.spark.streaming import DatasetStreamReader, RowsPartition, StreamOptions
from dissociated.store.eviction import Policy
from dissociated.store.store import Store
from dissociated.uri import Uri
from support.helpers import connections_left, wait_until
from support.injection import clock_step
from support.processes import HEARTBEAT, Process, Start, free_port

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

SCHEMA = StructType([StructField("id", LongType())])
ALL = ReadAllAvailable()


@pytest.fixture
def node(memory: Path) -> Iterator[Node]:
    with Node(Store(memory / "store"), ["shm:"]) as node:
        yield node


def put(uri: str, name: str, numbers: range, mode: str = "append") -> None:
    with dis.connect(uri) as client:
        client.put(name, pa.table({"id": pa.array(numbers, pa.int64())}).to_reader(), mode=mode)


def numbers(uri: str, name: str) -> list[int]:
    with dis.connect(uri) as client:
        found: list[int] = client.read(name).read_all()["id"].to_pylist()
    return found


def version(uri: str, name: str) -> int:
    with dis.connect(uri) as client:
        return client.describe(name).version


def staged(store: Path) -> list[str]:
    return sorted(os.listdir(store / "staging"))


def stream(spark: SparkSession, uri: str, name: str, **options: Any) -> DataFrame:
    return spark.readStream.format("dissociated").options(catalog=uri, **options).load(name)


def started(df: DataFrame, uri: str, name: str, checkpoint: Path, mode: str = "append") -> StreamingQuery:
    """Start a query that writes all rows available now to the dataset `name`."""
    return (
        df.writeStream.format("dissociated")
        .options(catalog=uri, checkpointLocation=str(checkpoint))
        .outputMode(mode)
        .trigger(availableNow=True)
        .start(name)
    )


def run(df: DataFrame, uri: str, name: str, checkpoint: Path, mode: str = "append") -> list[int]:
    """Run a query until it ends, and return the number of rows in each batch."""
    query = started(df, uri, name, checkpoint, mode)
    assert query.awaitTermination(200)
    return [progress["numInputRows"] for progress in query.recentProgress if progress["numInputRows"]]


# Whole queries


@pytest.mark.usefixtures("plans")
def test_what_is_appended_to_one_dataset_is_appended_to_the_other(
    spark: SparkSession, node: Node, tmp_path: Path
) -> None:
    put(node.uri, "in", range(25_000))
    doubled = stream(spark, node.uri, "in", rowsPerPartition=10_000).selectExpr("2 * id AS id")
    assert run(doubled, node.uri, "out", tmp_path / "check") == [25_000]
    put(node.uri, "in", range(25_000, 25_010))
    assert run(doubled, node.uri, "out", tmp_path / "check") == [10]
    assert numbers(node.uri, "out") == [2 * n for n in range(25_010)]
    assert run(doubled, node.uri, "out", tmp_path / "check") == []
    assert staged(node.store.directory) == []
    wait_until(lambda: leases(node) == 0, "neither the driver nor a task holds anything")
    assert connections_left(node.server) == 0


def test_a_batch_has_at_most_as_many_rows_as_the_option_says(spark: SparkSession, node: Node, tmp_path: Path) -> None:
    put(node.uri, "in", range(7))
    put(node.uri, "in", range(7, 10))
    limited = stream(spark, node.uri, "in", maxRowsPerTrigger=4)
    assert run(limited, node.uri, "out", tmp_path / "check") == [4, 4, 2]
    assert numbers(node.uri, "out") == [*range(10)]


def test_complete_mode_replaces_the_dataset_with_each_batch(spark: SparkSession, node: Node, tmp_path: Path) -> None:
    for last in (3, 5):
        put(node.uri, "in", range(last))
        counted = stream(spark, node.uri, "in").groupBy("id").count()
        run(counted, node.uri, "out", tmp_path / "check", "complete")
    with dis.connect(node.uri) as client:
        table = client.read("out").read_all().sort_by("id")
    assert table["id"].to_pylist() == [0, 1, 2, 3, 4]
    assert table["count"].to_pylist() == [2, 2, 2, 1, 1]


def test_update_mode_is_refused(spark: SparkSession, node: Node, tmp_path: Path) -> None:
    put(node.uri, "in", range(3))
    counted = stream(spark, node.uri, "in").groupBy("id").count()
    with pytest.raises(PySparkException, match="does not support Update mode"):
        run(counted, node.uri, "out", tmp_path / "check", "update")


def test_a_dataset_that_was_replaced_ends_the_query(spark: SparkSession, node: Node, tmp_path: Path) -> None:
    put(node.uri, "in", range(3))
    run(stream(spark, node.uri, "in"), node.uri, "out", tmp_path / "check")
    put(node.uri, "in", range(10, 20), mode="overwrite")
    with pytest.raises(StreamingQueryException, match=r"'in' was replaced after this query had read 3 rows"):
        run(stream(spark, node.uri, "in"), node.uri, "out", tmp_path / "check")
    assert numbers(node.uri, "out") == [0, 1, 2]


def test_parts_on_a_node_of_a_catalog_are_read_over_tcp(spark: SparkSession, start: Start, tmp_path: Path) -> None:
    catalog = start("catalog", "--db", tmp_path / "db", "--listen", "grpc://127.0.0.1:0")
    start("node", "--store", tmp_path / "store", "--catalog", catalog.uri, "--listen", "tcp://127.0.0.1:0")
    check = tmp_path / "check"
    for first in (0, 10):
        put(catalog.uri, "in", range(first, first + 10))
        assert run(stream(spark, catalog.uri, "in", maxRowsPerTrigger=7), catalog.uri, "out", check) == [7, 3]
    with dis.connect(catalog.uri) as client:
        assert [endpoint.rows for endpoint in client.describe("out").endpoints] == [7, 3] * 2
    assert numbers(catalog.uri, "out") == [*range(20)]


# Failures and killed processes


def wait_for(store: Path, suffix: str) -> list[str]:
    """Wait until the store has staged segments with this suffix, and return the names of all staged segments."""
    wait_until(lambda: any(name.endswith(suffix) for name in staged(store)), f"{suffix} in {store}", patience=180.0)
    return staged(store)


@pytest.fixture
def outer(tmp_path: Path, start: Start) -> Process:
    listen = f"grpc://127.0.0.1:{free_port()}"
    return start("catalog", "--db", tmp_path / "db", "--listen", listen)


def test_a_catalog_killed_before_the_commit_and_started_again(
    spark: SparkSession, start: Start, outer: Process, memory: Path, tmp_path: Path
) -> None:
    store, gate = memory / "store", tmp_path / "gate"
    os.mkfifo(gate)

    def gated(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches
        gate.read_text()  # blocks until the gate is opened for writing

    start("node", "--store", store, "--catalog", outer.uri, "--heartbeat", HEARTBEAT)
    put(outer.uri, "in", range(50_000))
    df = stream(spark, outer.uri, "in").mapInArrow(gated, "id long")
    query = started(df, outer.uri, "out", tmp_path / "check")
    try:
        wait_for(store, ".part")
        outer.kill()
        gate.open("w").close()
        wait_for(store, ".arrows")
        start("catalog", "--db", tmp_path / "db", "--listen", outer.uri)
        assert query.awaitTermination(200)
    finally:
        query.stop()
    assert numbers(outer.uri, "out") == [*range(50_000)]
    wait_until(lambda: staged(store) == [], "nothing is staged")


def test_a_batch_that_was_committed_unknown_to_spark_is_not_written_again(
    spark: SparkSession, node: Node, tmp_path: Path
) -> None:
    put(node.uri, "in", range(300_000))
    run(stream(spark, node.uri, "in"), node.uri, "out", tmp_path / "check")
    before = version(node.uri, "out")
    for name in ("0", ".0.crc"):  # simulates a driver that was killed before it wrote these files
        (tmp_path / "check" / "commits" / name).unlink()
    assert run(stream(spark, node.uri, "in"), node.uri, "out", tmp_path / "check") == [300_000]
    assert version(node.uri, "out") == before
    assert numbers(node.uri, "out") == [*range(300_000)]


def test_a_commit_that_is_refused_leaves_nothing_and_can_be_made_good(
    spark: SparkSession, node: Node, tmp_path: Path
) -> None:
    put(node.uri, "in", range(10))
    with dis.connect(node.uri) as client:
        client.put("out", pa.table({"other": [1]}).to_reader())
        with pytest.raises(StreamingQueryException, match="cannot be appended to 'out'"):
            run(stream(spark, node.uri, "in"), node.uri, "out", tmp_path / "check")
        assert staged(node.store.directory) == []
        client.drop("out")
    run(stream(spark, node.uri, "in"), node.uri, "out", tmp_path / "check")
    assert numbers(node.uri, "out") == [*range(10)]


def test_a_batch_whose_commit_failed_is_committed_when_the_query_starts_again_later(
    spark: SparkSession, memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node has given up the part of the first attempt. The key of the batch is the same each time."""
    publish = Database.publish

    def refuse(self: Database, commit: Commit, *arguments: Any, **options: Any) -> int:
        if commit.name == "out":
            raise CatalogError("the disk is full")
        return publish(self, commit, *arguments, **options)

    database = Database(clock=lambda: time.time())  # `clock_step` steps it
    with (
        closing(CatalogService("grpc://127.0.0.1:0", database=database)) as catalog,
        Node(Store(memory / "store"), ["shm:"], catalog=catalog.uri, heartbeat_interval=600.0) as node,
    ):
        put(catalog.uri, "in", range(3))
        df = stream(spark, catalog.uri, "in")
        monkeypatch.setattr(Database, "publish", refuse)
        with pytest.raises(StreamingQueryException, match="the disk is full"):
            run(df, catalog.uri, "out", tmp_path / "check")
        monkeypatch.undo()
        with clock_step(PREPARE_TIMEOUT + 1):
            node.service.catalog.reconcile()
            assert node.store.prepared() == []
        assert run(df, catalog.uri, "out", tmp_path / "check") == [3]
        assert numbers(catalog.uri, "out") == [0, 1, 2]


# Single calls of the source


@pytest.fixture
def reader(node: Node) -> Iterator[DatasetStreamReader]:
    reader = reading(node)
    yield reader
    reader.stop()


def reading(node: Node, **options: str) -> DatasetStreamReader:
    return DatasetStreamReader(DatasetRequest(CatalogConfig(node.uri), "in"), SCHEMA, StreamOptions.parse(options))


def leases(node: Node) -> int:
    return sum(dataset.leases for dataset in node.server.status().datasets)


def rows(reader: DatasetStreamReader, start: dict[str, Any], end: dict[str, Any]) -> list[int]:
    partitions = reader.partitions(start, end)
    return [n for one in partitions for batch in reader.read(one) for n in batch["id"].to_pylist()]


def test_memory_is_held_until_the_batch_is_committed_and_no_longer(node: Node, reader: DatasetStreamReader) -> None:
    put(node.uri, "in", range(10))
    start = reader.initialOffset()
    middle = reader.latestOffset(start, ReadMaxRows(4))
    assert rows(reader, start, middle) == [0, 1, 2, 3]
    wait_until(lambda: leases(node) == 1, "the driver holds the batch")
    end = reader.latestOffset(middle, ALL)
    assert rows(reader, middle, end) == [4, 5, 6, 7, 8, 9]
    reader.commit(middle)
    wait_until(lambda: leases(node) == 1, "the driver holds the second batch")
    reader.commit(end)
    wait_until(lambda: leases(node) == 0, "the driver holds nothing")
    assert connections_left(node.server) == 0


def test_a_batch_is_read_by_another_route_if_the_shared_memory_server_is_gone() -> None:
    with dis.Server(["shm:", "tcp:"]) as server, socket.socket(socket.AF_UNIX) as deaf:
        put(server.catalog_uri, "in", range(3))
        path = Uri.parse(server.locations("in")[0]).path
        os.unlink(path)
        deaf.bind(path)  # It does not listen, so connections are refused.
        os.chmod(path, 0o600)
        request = DatasetRequest(CatalogConfig(server.catalog_uri), "in")
        reader = DatasetStreamReader(request, SCHEMA, StreamOptions(ALL))
        start = reader.initialOffset()
        assert rows(reader, start, reader.latestOffset(start, ALL)) == [0, 1, 2]
        reader.stop()


def test_a_store_that_evicts_keeps_what_an_uncommitted_batch_reads(memory: Path) -> None:
    numbers = range(100_000)
    with Node(Store(memory / "small", limit=2 << 20, policy=Policy.EVICT), ["shm:"]) as node:

        def names() -> list[str]:
            return [version.name for version in node.store.versions()]

        reader = reading(node)
        put(node.uri, "in", numbers)
        start = reader.initialOffset()
        end = reader.latestOffset(start, ALL)
        partitions = reader.partitions(start, end)
        put(node.uri, "a", numbers)
        put(node.uri, "b", numbers)
        assert names() == ["in", "b"]  # although it was the oldest
        (partition,) = partitions
        assert sum(batch.num_rows for batch in reader.read(partition)) == 100_000
        reader.commit(end)
        assert connections_left(node.server) == 0
        put(node.uri, "c", numbers)
        assert names() == ["b", "c"]
        reader.stop()


def test_a_batch_is_the_same_however_often_it_is_read_and_whatever_was_appended(
    node: Node, reader: DatasetStreamReader
) -> None:
    put(node.uri, "in", range(6))
    start = reader.latestOffset(reader.initialOffset(), ReadMaxRows(2))
    end = reader.latestOffset(start, ALL)
    for more in range(2):
        assert rows(reader, start, end) == [2, 3, 4, 5]
        put(node.uri, "in", range(90, 91 + more))
    assert rows(reading(node), start, end) == [2, 3, 4, 5]  # with the reader of another process


def test_a_limit_of_bytes_gives_some_rows_at_least(node: Node, reader: DatasetStreamReader) -> None:
    put(node.uri, "in", range(8_000))
    start = reader.initialOffset()
    assert reader.latestOffset(start, ReadMaxBytes(16_000))["rows"] == 2_000
    assert reader.latestOffset(start, ReadMaxBytes(1))["rows"] == 1


def test_available_now_reads_nothing_that_comes_later(node: Node, reader: DatasetStreamReader) -> None:
    put(node.uri, "in", range(5))
    start = reader.initialOffset()
    reader.prepareForTriggerAvailableNow()
    put(node.uri, "in", range(5))
    end = reader.latestOffset(start, ALL)
    assert end["rows"] == 5
    assert reader.latestOffset(end, ALL) == end


def test_a_query_may_begin_before_its_dataset(node: Node, reader: DatasetStreamReader) -> None:
    start = reader.initialOffset()
    assert reader.latestOffset(start, ALL) == start
    put(node.uri, "in", range(0))
    assert reader.latestOffset(start, ALL) == start
    put(node.uri, "in", range(3))
    assert rows(reader, start, reader.latestOffset(start, ALL)) == [0, 1, 2]


def test_latest_begins_with_what_is_appended_from_now_on(node: Node) -> None:
    put(node.uri, "in", range(3))
    reader = reading(node, startingOffsets="latest")
    start = reader.initialOffset()
    put(node.uri, "in", range(3, 5))
    assert rows(reader, start, reader.latestOffset(start, ALL)) == [3, 4]
    reader.stop()


@pytest.mark.parametrize("mode", ["drop", "overwrite"])
def test_what_is_gone_is_told_to_the_driver_and_to_tasks(node: Node, reader: DatasetStreamReader, mode: str) -> None:
    put(node.uri, "in", range(3))
    start = reader.initialOffset()
    end = reader.latestOffset(start, ALL)
    (partition,) = reader.partitions(start, end)
    with dis.connect(node.uri) as client:
        client.drop("in")
    if mode == "overwrite":
        put(node.uri, "in", range(100))
    with pytest.raises(CatalogError, match="start the query with another checkpoint"):
        reader.latestOffset(end, ALL)
    with pytest.raises(CatalogError):
        next(reader.read(partition))


def test_a_source_of_unknown_length_is_refused(server: dis.Server) -> None:
    server.publish("in", lambda: pa.table({"id": [1]}).to_reader())
    reader = DatasetStreamReader(DatasetRequest(CatalogConfig(server.catalog_uri), "in"), SCHEMA, StreamOptions(ALL))
    with pytest.raises(CatalogError, match="does not say how many rows"):
        reader.latestOffset(reader.initialOffset(), ALL)
    reader.stop()


def test_partitions_have_as_many_rows_as_the_option_says(node: Node) -> None:
    put(node.uri, "in", range(25))
    reader = reading(node, rowsPerPartition="10")
    start = reader.initialOffset()
    end = reader.latestOffset(start, ALL)
    began = end["began"]
    assert reader.partitions(start, end) == [
        RowsPartition(began, 0, 10),
        RowsPartition(began, 10, 20),
        RowsPartition(began, 20, 25),
    ]
    assert reader.partitions(end, end) == []
    reader.stop()


@pytest.mark.parametrize(
    "options",
    [
        {"maxRowsPerTrigger": "0"},
        {"maxBytesPerTrigger": "many"},
        {"rowsPerPartition": "-1"},
        {"startingOffsets": "3"},
        {"filters": '["id", ">", 3]'},
        {"version": "3"},
        {"maxRowsPerTrigger": "1", "maxBytesPerTrigger": "1"},
    ],
    ids=str,
)
def test_wrong_options_are_told(options: dict[str, str]) -> None:
    with pytest.raises(OptionError):
        StreamOptions.parse(options)
