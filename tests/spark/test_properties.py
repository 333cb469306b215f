"""Random types at every depth, with random values and nulls: Spark reads back the values that it wrote."""

from __future__ import annotations

import datetime as dt
import math
import struct
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DayTimeIntervalType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from dissociated.node.node import Node
from dissociated.spark import publish, read
from dissociated.store.store import Store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

COLUMNS, ROWS = 10, 40
DAY = dt.timedelta(days=1)


def decimals(precision: int, scale: int) -> st.SearchStrategy[Decimal]:
    most = 10**precision - 1
    return st.integers(-most, most).map(lambda number: Decimal((number < 0, tuple(map(int, str(abs(number)))), -scale)))


#: Types without children, and their values.
FLAT: list[tuple[DataType, st.SearchStrategy[Any]]] = [
    (BooleanType(), st.booleans()),
    *[
        (type_, st.integers(-(1 << bits), (1 << bits) - 1))
        for type_, bits in (
            (ByteType(), 7),
            (ShortType(), 15),
            (IntegerType(), 31),
            (LongType(), 63),
        )
    ],
    (FloatType(), st.floats(width=32)),
    (DoubleType(), st.floats()),
    *[
        (DecimalType(precision, scale), decimals(precision, scale))
        for precision, scale in ((1, 0), (9, 2), (18, 18), (19, 0), (38, 10))
    ],
    (StringType(), st.text(st.characters(exclude_categories=["Cs"]), max_size=12)),
    (BinaryType(), st.binary(max_size=12).map(bytearray)),
    (DateType(), st.dates()),
    (TimestampType(), st.datetimes(dt.datetime(1900, 1, 1), dt.datetime(2200, 1, 1))),
    (TimestampNTZType(), st.datetimes()),
    (DayTimeIntervalType(), st.timedeltas(-100_000 * DAY, 100_000 * DAY)),
]
#: The flat types that can be keys of a map, also in Python.
KEYS = [one for one in FLAT if isinstance(one[0], (IntegerType, StringType, DateType, DecimalType))]


@st.composite
def typed(draw: st.DrawFn, depth: int) -> tuple[DataType, st.SearchStrategy[Any]]:
    """Draw a type with at most `depth` levels of nesting, and its values."""
    kind = draw(st.sampled_from(["flat", "flat", "array", "struct", "map"])) if depth else "flat"
    if kind == "flat":
        return draw(st.sampled_from(FLAT))
    below, values = draw(typed(depth - 1))
    null = draw(st.booleans())
    inside = st.none() | values if null else values
    if kind == "array":
        return ArrayType(below, null), st.lists(inside, max_size=3)
    if kind == "map":
        key, keys = draw(st.sampled_from(KEYS))
        return MapType(key, below, null), st.dictionaries(keys, inside, max_size=3)
    other, others = draw(typed(depth - 1))
    fields = [StructField("a", below, null), StructField("b", other)]
    return StructType(fields), st.tuples(inside, st.none() | others)


@st.composite
def frames(draw: st.DrawFn) -> tuple[StructType, list[tuple[Any, ...]]]:
    """Draw a schema and rows."""
    columns = [draw(typed(2)) for _ in range(COLUMNS)]
    nullable = [draw(st.booleans()) for _ in columns]
    schema = StructType([StructField(f"c{at}", type_, nullable[at]) for at, (type_, _) in enumerate(columns)])
    values = [st.none() | some if null else some for (_, some), null in zip(columns, nullable, strict=True)]
    return schema, draw(st.lists(st.tuples(*values), min_size=1, max_size=ROWS))


def same(one: Any, other: Any) -> bool:
    """Return whether both values are identical: NaN equals itself, and -0 differs from 0."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other) or (math.isnan(one) and math.isnan(other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    where: Path = tmp_path_factory.mktemp("store")
    with Node(Store(where), ["shm:", "tcp://127.0.0.1:0"], retain=0) as node:
        yield node


@pytest.mark.usefixtures("plans")
@settings(max_examples=6, phases=[Phase.explicit, Phase.reuse, Phase.generate], suppress_health_check=list(HealthCheck))
@given(frames())
def test_whatever_spark_holds_comes_back(
    spark: SparkSession, node: Node, frame: tuple[StructType, list[tuple[Any, ...]]]
) -> None:
    schema, rows = frame
    df = spark.createDataFrame(rows, schema, verifySchema=False).coalesce(1)
    expected = df.collect()
    publish(df, "data", node.uri)
    for transport in ("shm", "tcp"):
        back = read(spark, "data", node.uri, transport=transport)
        assert [field.dataType for field in back.schema] == [field.dataType for field in schema]
        found = back.collect()
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert same(one, other), (transport, schema.simpleString(), one, other)
