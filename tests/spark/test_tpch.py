"""The 22 queries of TPC-H in three engines over datasets: the answers are those of DuckDB over Parquet.

Spark takes a second of processor time for a query, and gets every third, beginning at a random one. With
DISSOCIATED_EVERY_CALL in the environment, it gets all.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterator
from decimal import Decimal
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from benchmarks.tpch_queries import QUERIES
from examples.tpch.data import TABLES, generate, generator

import dissociated as dis
from dissociated.spark import read
from support.helpers import case

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

duckdb = pytest.importorskip("duckdb", reason="the demo's packages are not installed")
pl = pytest.importorskip("polars", reason="the demo's packages are not installed")


def cells(answer: pa.Table) -> Iterator[Any]:
    return chain.from_iterable(column.to_pylist() for column in answer.columns)


def is_alike(found: object, expected: object) -> bool:
    """Compare two values. Spark rounds quotients of decimals to six digits."""
    if isinstance(expected, float | Decimal):
        return isinstance(found, int | float | Decimal) and math.isclose(found, expected, rel_tol=1e-9, abs_tol=1e-6)
    return found == expected


def check(answer: pa.Table, expected: pa.Table) -> None:
    assert answer.num_rows == expected.num_rows
    assert all(map(is_alike, cells(answer), cells(expected)))


@pytest.fixture(scope="module")
def parquet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if generator() is None:
        pytest.skip("tpchgen-cli is not installed")
    directory = tmp_path_factory.mktemp("tpch")
    generate(0.01, directory, parts=1)
    return directory


def test_answers_are_those_over_parquet(spark: SparkSession, client: dis.Client, catalog: str, parquet: Path) -> None:
    with duckdb.connect() as database:
        for name in TABLES:
            table = pq.read_table(parquet / name)
            types = [pa.string() if field.type == pa.string_view() else field.type for field in table.schema]
            client.put(name, table.cast(pa.schema(zip(table.schema.names, types, strict=True))))
            read(spark, name, catalog).createOrReplaceTempView(name)
            database.execute(f"CREATE VIEW {name} AS SELECT * FROM read_parquet('{parquet}/{name}/*.parquet')")
        context = pl.SQLContext({name: client.scan(name) for name in TABLES})
        step = 1 if os.environ.get("DISSOCIATED_EVERY_CALL") else 3
        first = random.randrange(step)
        for number, (query, sql) in enumerate(QUERIES.items()):
            expected = database.sql(sql).to_arrow_table()
            with case(f"{query} in DuckDB"):
                check(client.sql(sql), expected)
            with case(f"{query} in Polars"):
                check(context.execute(sql).collect().to_arrow(), expected)
            if number % step == first:
                with case(f"{query} in Spark"):
                    check(spark.sql(sql).toArrow(), expected)
    for name in TABLES:
        spark.catalog.dropTempView(name)
