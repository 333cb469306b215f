"""Writes that only Spark's JVM does. The other tests write in the JVM too, and show that it writes the same values."""

from __future__ import annotations

import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as types
import pytest

import dissociated as dis
from dissociated.node.node import Node
from dissociated.spark import publish, read
from dissociated.store.segment import Segment
from dissociated.store.store import Store
from spark.test_datasource import NATIVE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.usefixtures("plans")

VALUES = {
    **NATIVE,
    "few digits": "CAST(500 - id AS DECIMAL(9, 4)) / 7",
    "many digits": "CAST(500 - id AS DECIMAL(38, 0)) * 1000000000000000000000000000000000",
    "special": "element_at(array(DOUBLE('NaN'), DOUBLE('-Infinity'), -0D, id / 3D), 1 + CAST(id % 4 AS INT))",
    "empty": "repeat(concat('ä', id), CAST(id % 3 AS INT))",
}


@pytest.fixture
def node(memory: Path) -> Iterator[Node]:
    with Node(Store(memory / "store", limit=1 << 30), ["shm:", "tcp://127.0.0.1:0"]) as node:
        yield node


def write(df: DataFrame, name: str, uri: str, **options: str) -> None:
    df.write.format("dissociated").option("catalog", uri).options(**options).mode("overwrite").save(name)


def nested(flat: pa.Table) -> pa.Table:
    """Return the nullable columns within arrays, structs and maps, some of which are empty or null."""
    columns = dict(zip(flat.column_names, (column.chunk(0) for column in flat.columns), strict=True))
    null = pa.array([n % 5 == 0 for n in range(len(flat))])
    ends = pa.array([0, *accumulate(n % 3 for n in range(len(flat)))], pa.int32())
    lists = [pa.ListArray.from_arrays(ends, column, mask=null) for column in columns.values()]
    structs = pa.StructArray.from_arrays([*columns.values()], [*columns], mask=null)
    keys = pa.array([f"k{n}" for n in range(len(flat))])
    return pa.table(
        {"lists": pa.StructArray.from_arrays(lists, [*columns]), "map": pa.MapArray.from_arrays(ends, keys, structs)}
    )


def test_every_type_keeps_its_values_at_every_depth(spark: SparkSession, node: Node) -> None:
    written = [f"IF(id % 3 = 1, NULL, {value}) AS `{name}`" for name, value in VALUES.items()]
    with dis.connect(node.uri) as client:
        write(spark.range(0, 120, numPartitions=1).selectExpr(*written), "flat", node.uri)
        before = nested(client.read("flat").read_all())
        client.put("before", before)
        for transport in ("shm", "tcp"):
            write(read(spark, "before", node.uri, transport=transport), "after", node.uri)
            after = client.read("after").read_all()
            after.validate(full=True)
            for name in before.column_names:
                # NaN equals itself, and -0 differs from 0
                assert str(after[name].to_pylist()) == str(before[name].to_pylist()), name


def test_a_segment_has_batches_of_some_size_and_their_statistics(spark: SparkSession, node: Node) -> None:
    nullable = [f"IF(id % 3 = 1 OR n >= 30000, NULL, {value}) AS `{name}`" for name, value in VALUES.items()]
    df = spark.range(0, 45_000, numPartitions=1).selectExpr("id AS n", "id % 100 AS id")
    write(df.selectExpr("n", "repeat('0123456789', 30) AS wide", *nullable), "data", node.uri)
    (path,) = node.store.directory.glob("segments/*/*.arrows")
    assert Segment.open(path).statistics is not None
    content = path.read_bytes()
    batches: list[pa.RecordBatch] = [*pa.ipc.open_stream(content)]
    assert len(batches) == 4
    assert batches[3]["n"][0].as_py() > 30_000
    assert content[-8:] == b"DISSTATS"
    size = int.from_bytes(content[-16:-8], "little")
    statistics = pa.ipc.open_stream(io.BytesIO(content[-16 - size : -16])).read_all()
    assert statistics["num_rows"].to_pylist() == [batch.num_rows for batch in batches]
    for number, field in enumerate(batches[0].schema):
        if types.is_nested(field.type) or types.is_null(field.type):
            continue
        for at, batch in enumerate(batches):
            column = batch.column(number)
            told = [statistics[f"{number}.{what}"][at] for what in ("null_count", "min", "max")]
            assert told[0].as_py() == column.null_count, field
            # The statistics leave out bounds that equal the ones of the batch before.
            alike = at in (1, 2) and field.name in ("flag", "money", "text", "raw", "many digits", "empty")
            if field.name in ("wide", "special") or alike:  # the values are long, or include NaNs
                assert (told[1].is_valid, told[2].is_valid) == (False, False)
            else:
                sorted_ = column.take(pc.sort_indices(column)).drop_null()
                wanted = (sorted_[0], sorted_[-1]) if len(sorted_) else (pa.scalar(None, field.type),) * 2
                assert (told[1], told[2]) == wanted, field


def test_text_is_compared_with_bytes_that_are_no_utf_8(spark: SparkSession, node: Node) -> None:
    write(spark.sql("SELECT 'b😀' AS text"), "text", node.uri)
    assert read(spark, "text", node.uri).where("text < CAST(X'62FF' AS STRING)").count() == 1


def test_large_rows_make_small_batches(spark: SparkSession, node: Node) -> None:
    write(spark.range(0, 300_000, numPartitions=1), "small", node.uri)
    df = spark.range(0, 30, numPartitions=1).selectExpr("id", "repeat('0123456789', 300000) AS text")
    write(df, "large", node.uri)
    with dis.connect(node.uri) as client:
        assert [batch.num_rows for batch in client.read("small")] == [1 << 18, 300_000 - (1 << 18)]
        batches = [*client.read("large")]
    assert [batch.num_rows for batch in batches] == [2] * 15
    assert all(text == "0123456789" * 300_000 for batch in batches for text in batch["text"].to_pylist())


def test_it_writes_from_any_thread(spark: SparkSession, node: Node) -> None:
    with ThreadPoolExecutor(1) as threads:
        threads.submit(write, spark.range(10), "one", node.uri).result()
        threads.submit(publish, spark.range(10), "two", node.uri).result()
    with dis.connect(node.uri) as client:
        assert [client.describe(name).rows for name in ("one", "two")] == [10, 10]
