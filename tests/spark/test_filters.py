"""Filter conditions: each is true, false or null exactly when Spark's own evaluation in SQL says so."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException

import dissociated as dis
from dissociated.codec.filter.conditions import Conditions
from dissociated.codec.filter.row_filter import RowFilter
from dissociated.errors import OptionError
from dissociated.spark import read
from dissociated.spark.filters import parse_filters

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

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


def every() -> dict[str, list[Any]]:
    """Return conditions by their SQL text."""
    literals = [
        ("n", 0, "0"),
        ("n", 7, "7"),
        ("n", 3.5, "3.5BD"),
        ("n", 3.5, "3.5D"),
        ("n", 7.0, "7.0D"),
        ("n", 2**40, "1099511627776L"),
        ("n", -(2.0**40) - 0.5, "-1099511627776.5BD"),
        ("n", None, "CAST(NULL AS INT)"),
        ("f", 1.5, "1.5D"),
        ("f", 0, "0D"),
        ("f", NAN, "double('NaN')"),
        ("f", INF, "double('Infinity')"),
        ("f", None, "CAST(NULL AS DOUBLE)"),
        ("g", 1.5, "1.5F"),
        ("g", 0.1, "0.1D"),
        ("g", 0.1, "0.1BD"),
        ("g", NAN, "float('NaN')"),
        ("d", Decimal("1.5"), "1.50BD"),
        ("d", 1.5, "1.50BD"),
        ("d", Decimal("1.505"), "1.505BD"),
        ("d", -3.001, "-3.001BD"),
        ("d", "123456789.5", "123456789.5BD"),
        ("s", "ab", "'ab'"),
        ("s", "ä", "'ä'"),
        ("day", date(1970, 1, 1), "DATE'1970-01-01'"),
        ("at", INSTANT, "TIMESTAMP'2024-02-29 12:00:00Z'"),
        ("local", LOCAL, "TIMESTAMP_NTZ'2024-02-29 12:00:00'"),
        ("inner.x", 1, "1L"),
        ("inner.f", NAN, "double('NaN')"),
        ("flag", True, "true"),
    ]
    conditions: dict[str, list[Any]] = {
        f"{name} {operator} {sql}": [name.split("."), operator, value]
        for name, value, sql in literals
        for operator in ("=", "!=", ">", ">=", "<", "<=")
        if name != "flag" or operator == "="
    }
    listed = [
        ("n", [0, 7], "0, 7"),
        ("n", [0, None], "0, NULL"),
        ("n", [*range(20), 3.5, 2**40], f"{str([*range(20)])[1:-1]}, 3.5BD, 1099511627776L"),
        ("f", [1.5, NAN], "1.5D, double('NaN')"),
        ("f", [0.0, None], "0D, NULL"),
        ("s", ["a", "zab"], "'a', 'zab'"),
        ("day", [date(1969, 12, 31)], "DATE'1969-12-31'"),
        ("d", [Decimal("1.5"), -3, 0.001], "1.5BD, -3BD, 0.001BD"),
    ]
    for name, values, sql in listed:
        conditions[f"{name} IN ({sql})"] = [name, "in", values]
        conditions[f"{name} NOT IN ({sql})"] = [name, "not in", values]
    for name in (*VALUES, "inner.x"):
        conditions[f"{name} IS NULL"] = [name.split("."), "is null"]
        conditions[f"{name} IS NOT NULL"] = [name.split("."), "is not null"]
    return {
        **conditions,
        "s LIKE 'a%'": ["s", "starts with", "a"],
        "s LIKE '%b'": ["s", "ends with", "b"],
        "s LIKE '%ab%'": ["s", "contains", "ab"],
        r"s LIKE '%\\%%'": ["s", "contains", "%"],
    }


def parsed(plain: Any) -> Conditions:
    return parse_filters(json.dumps(plain, default=str))


def test_the_same_rows_pass_as_in_spark(spark: SparkSession) -> None:
    every_condition = every()
    df = spark.createDataFrame(TABLE)
    decided = df.selectExpr(*(f"({sql}) AS `{number}`" for number, sql in enumerate(every_condition))).toArrow()
    (batch,) = TABLE.combine_chunks().to_batches()
    everything = tuple(range(batch.num_columns))
    for (sql, condition), column in zip(every_condition.items(), decided.columns, strict=True):
        rows = RowFilter(parsed([condition]).expression(batch.schema), everything)
        assert rows.mask(batch).to_pylist() == column.to_pylist(), sql


def test_all_of_one_list_must_be_true() -> None:
    (batch,) = TABLE.combine_chunks().to_batches()
    both = parsed([["n", "=", 0], ["s", "=", "a"]])
    assert batch.filter(RowFilter.bind(both, batch.schema).mask(batch))["id"].to_pylist() == [1, 46]
    either = parsed([[["n", "=", 0], ["s", "=", "a"]], [["id", "<", 2]], [["n", "=", None]]])
    assert batch.filter(RowFilter.bind(either, batch.schema).mask(batch))["id"].to_pylist() == [0, 1, 46]
    assert either.columns == ["n", "s", "id"]


@pytest.mark.parametrize(
    "condition",
    [
        ["n", "=", 2.0**60],
        ["n", "=", NAN],
        ["n", "=", True],
        ["n", "=", "1"],
        ["d", "=", "0." + 38 * "1"],  # Spark has no decimals that hold both
        ["d", "=", "much"],
        ["day", "=", "yesterday"],
        ["at", "=", LOCAL],
        ["local", "=", INSTANT],
        ["b", "=", "a"],
        ["inner", "=", 1],
        [["inner", "y"], "=", 1],
        ["n", "in", [1, "a"]],
        ["b", "starts with", "a"],
        ["s", "contains", 7],
    ],
    ids=repr,
)
def test_what_is_not_certain_is_refused_with_the_column(condition: list[Any]) -> None:
    filters = parsed([condition])
    with pytest.raises(OptionError, match=f"column '{filters.columns[0]}.* (than you mean|cannot be one): write"):
        RowFilter.bind(filters, TABLE.schema)


@pytest.mark.parametrize(
    "plain",
    [
        "n > 0",
        [],
        {},
        [[]],
        ["n", "=", 0],
        [["n", "~", 0]],
        [["n", "="]],
        [["n", "is null", 0]],
        [["n", "in", 0]],
        [[7, "=", 0]],
        [[[], "=", 0]],
        [[["n", "=", 0]], ["n", "=", 0]],
    ],
    ids=repr,
)
def test_an_invalid_filter_is_refused(plain: Any) -> None:
    with pytest.raises(OptionError, match=r"filter|is not a condition: give a column"):
        parsed(plain)


def test_filters_apply_where_rows_are_read(spark: SparkSession) -> None:
    with dis.Server(["shm:", "tcp://127.0.0.1:0"]) as server:
        server.publish("data", TABLE)
        conditions = [("n", ">=", 0), (["inner", "f"], "=", NAN), ("at", ">", INSTANT.replace(year=2000))]
        df = read(spark, "data", server.catalog_uri, columns=["s", "id"], filters=conditions, transport="tcp")
        assert df.schema.fieldNames() == ["s", "id"]
        sql = "n >= 0 AND inner.f = double('NaN') AND at > TIMESTAMP'2000-01-01 00:00:00Z'"
        expected = spark.createDataFrame(TABLE).where(sql).select("s", "id").collect()
        assert df.collect() == expected
        assert 0 < len(expected) < ROWS
        assert df.where("id > 20").count() == sum(row.id > 20 for row in expected)
        wanted = TABLE.select(["s", "id", "n", "inner", "at"])
        assert server.status().totals.bytes < 3 * (wanted.nbytes + 64 * 20)  # no other column was requested


@pytest.mark.parametrize(
    ("condition", "message"),
    [(("x", "=", 1), "there is no column 'x'"), (("n", "=", "one"), "column 'n' is int32")],
)
def test_a_filter_that_does_not_fit_is_told_before_any_task(
    spark: SparkSession, condition: tuple[Any, ...], message: str
) -> None:
    with dis.Server(["shm:"]) as server:
        server.publish("data", TABLE)
        with pytest.raises(PySparkException, match=message):
            read(spark, "data", server.catalog_uri, filters=[condition]).collect()
        assert server.status().totals.streams == 0
