"""Each filter passes the rows that pass in Spark, which evaluates the same in SQL."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringContains,
    StringEndsWith,
    StringStartsWith,
)

import dissociated as dis
from dissociated.spark import read
from dissociated.spark.filters import passing, supported

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas:FutureWarning")

NAN, INF = float("nan"), float("inf")
INSTANT = datetime(2024, 2, 29, 12, tzinfo=UTC)
LOCAL = datetime(2024, 2, 29, 12)
VALUES: dict[str, tuple[pa.DataType, list[Any]]] = {
    "flag": (pa.bool_(), [True, False, None]),
    "n": (pa.int32(), [-5, 0, 7, None, 2**31 - 1]),
    "f": (pa.float64(), [NAN, None, 0.0, -0.0, 1.5, -INF, INF, NAN]),
    "g": (pa.float32(), [NAN, None, 0.1, -0.0, 1.5, -INF, INF]),
    "d": (pa.decimal128(9, 2), [Decimal("1.50"), Decimal("-3"), None, Decimal("0")]),
    "s": (pa.string(), ["", "a", "B", "ab", "ä", "zab", "😀", None, "a%b"]),
    "b": (pa.binary(), [b"", b"a", b"\xff", None, b"\x80\x00"]),
    "day": (pa.date32(), [date(2024, 2, 29), date(1969, 12, 31), None]),
    "at": (pa.timestamp("us", "UTC"), [INSTANT, INSTANT.replace(year=1960), None]),
    "local": (pa.timestamp("us"), [LOCAL, LOCAL.replace(year=1960), None]),
    "inner": (
        pa.struct([("x", pa.int64()), ("f", pa.float64())]),
        [{"x": 1, "f": NAN}, {"x": None, "f": 2.0}, None, {"x": 5, "f": None}],
    ),
}
ROWS = 72
TABLE = pa.table(
    {
        "id": range(ROWS),
        **{
            name: pa.array([some[row % len(some)] for row in range(ROWS)], type_)
            for name, (type_, some) in VALUES.items()
        },
    }
)


def path(name: str) -> tuple[str, ...]:
    return tuple(name.split("."))


def compared(name: str, value: Any, sql: str) -> dict[str, Filter]:
    """Every comparison of a column with a literal, and its opposite, by how it is written in SQL."""
    to = path(name)
    filters: dict[str, Filter] = {
        f"{name} = {sql}": EqualTo(to, value),
        f"{name} <=> {sql}": EqualNullSafe(to, value),
        f"{name} > {sql}": GreaterThan(to, value),
        f"{name} >= {sql}": GreaterThanOrEqual(to, value),
        f"{name} < {sql}": LessThan(to, value),
        f"{name} <= {sql}": LessThanOrEqual(to, value),
    }
    return filters


def every() -> dict[str, Filter]:
    filters = {
        **compared("n", 0, "0"),
        **compared("n", 7, "7"),
        **compared("n", None, "CAST(NULL AS INT)"),
        **compared("f", 1.5, "1.5D"),
        **compared("f", 0.0, "0D"),
        **compared("f", NAN, "double('NaN')"),
        **compared("f", INF, "double('Infinity')"),
        **compared("f", None, "CAST(NULL AS DOUBLE)"),
        **compared("g", 1.5, "1.5F"),
        **compared("g", NAN, "float('NaN')"),
        **compared("d", Decimal("1.5"), "1.50BD"),
        **compared("s", "ab", "'ab'"),
        **compared("s", "ä", "'ä'"),
        **compared("b", b"\x80", "X'80'"),
        **compared("day", date(1970, 1, 1), "DATE'1970-01-01'"),
        **compared("at", INSTANT, "TIMESTAMP'2024-02-29 12:00:00Z'"),
        **compared("local", LOCAL, "TIMESTAMP_NTZ'2024-02-29 12:00:00'"),
        **compared("inner.x", 1, "1L"),
        **compared("inner.f", NAN, "double('NaN')"),
        "flag": EqualTo(("flag",), True),
        "flag = false": EqualTo(("flag",), False),
        "n IN (0, 7)": In(("n",), (0, 7)),
        "n IN (0, NULL)": In(("n",), (0, None)),
        "f IN (1.5D, double('NaN'))": In(("f",), (1.5, NAN)),
        "f IN (0D, NULL)": In(("f",), (0.0, None)),
        "s IN ('a', 'zab')": In(("s",), ("a", "zab")),
        "day IN (DATE'1969-12-31')": In(("day",), (date(1969, 12, 31),)),
        "d IN (1.5BD, -3BD)": In(("d",), (Decimal("1.5"), Decimal("-3"))),
        "s LIKE 'a%'": StringStartsWith(("s",), "a"),
        "s LIKE '%b'": StringEndsWith(("s",), "b"),
        "s LIKE '%ab%'": StringContains(("s",), "ab"),
        r"s LIKE '%\\%%'": StringContains(("s",), "%"),
    }
    for name in (*VALUES, "inner.x"):
        filters[f"{name} IS NULL"] = IsNull(path(name))
        filters[f"{name} IS NOT NULL"] = IsNotNull(path(name))
    return {**filters, **{f"NOT ({sql})": Not(filter) for sql, filter in filters.items()}}


def test_the_same_rows_pass_as_in_spark(spark: SparkSession) -> None:
    filters = every()
    df = spark.createDataFrame(TABLE)
    decided = df.selectExpr(*(f"({sql}) IS TRUE AS `{number}`" for number, sql in enumerate(filters))).toArrow()
    (batch,) = TABLE.combine_chunks().to_batches()
    for (sql, filter), column in zip(filters.items(), decided.columns, strict=True):
        assert supported(filter, TABLE.schema), sql
        expected = [row for row, passes in enumerate(column.to_pylist()) if passes]
        assert passing(batch, [filter])["id"].to_pylist() == expected, sql
    assert 0 < len(passing(batch, [filters["n > 0"], filters["f > 0D"]])) < ROWS


@pytest.mark.parametrize(
    "filter",
    [
        EqualTo(("n",), 2**40),
        EqualTo(("n",), 1.5),
        EqualTo(("n",), True),
        EqualTo(("f",), 1),
        EqualTo(("g",), 0.1),  # what a float would make of it is another number
        EqualTo(("d",), Decimal("0.001")),
        EqualTo(("day",), LOCAL),
        EqualTo(("at",), LOCAL),
        EqualTo(("local",), INSTANT),
        EqualTo(("inner",), {"x": 1}),
        EqualTo(("inner", "y"), 1),
        EqualTo(("no such",), 1),
        In(("n",), (1, "a")),
        StringStartsWith(("b",), "a"),
        Not(EqualTo(("s",), 1)),
        Filter(),
    ],
    ids=repr,
)
def test_what_is_not_certain_is_left_to_spark(filter: Filter) -> None:
    assert not supported(filter, TABLE.schema)


def filtered_by_spark(df: DataFrame) -> bool:
    return "Filter (" in df._jdf.queryExecution().executedPlan().toString()  # type: ignore[operator]


def test_spark_hands_its_filters_over(spark: SparkSession) -> None:
    with dis.Server(["shm:"]) as server:
        server.publish("data", TABLE)
        pushed = read(spark, "data", server.catalog_uri)
        itself = read(spark, "data", server.catalog_uri, pushdown=False)
        for sql, whole in (
            ("f >= 1.5D AND n IN (0, 7) AND s > 'a'", True),
            ("NOT (inner.x = 1) AND g = float(0.1)", True),
            ("at > TIMESTAMP'2000-01-01 00:00:00Z' AND local IS NOT NULL AND day = DATE'2024-02-29'", True),
            ("d <= 1.5BD AND id % 2 = 0", False),
            ("flag OR n > 0", False),
        ):
            assert filtered_by_spark(pushed.where(sql)) is not whole, sql
            assert filtered_by_spark(itself.where(sql))
            rows = [row.id for row in pushed.where(sql).collect()]
            assert rows == [row.id for row in itself.where(sql).collect()]
            assert 0 < len(rows) < ROWS


def test_without_the_setting_spark_says_its_name(spark: SparkSession) -> None:
    setting = "spark.sql.python.filterPushdown.enabled"
    with dis.Server(["shm:"]) as server:
        server.publish("data", TABLE)
        spark.conf.set(setting, "false")
        try:
            assert read(spark, "data", server.catalog_uri).where("n = 0").count() == 15
            with pytest.raises(Exception, match=setting):
                read(spark, "data", server.catalog_uri, pushdown=True).where("n = 0").count()
        finally:
            spark.conf.set(setting, "true")
