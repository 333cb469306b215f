"""Conditions on the command line: they mean the same to DuckDB."""

from __future__ import annotations

from datetime import date, datetime
from decimal import Decimal

import duckdb
import pyarrow as pa
import pytest

from dissociated.cli.condition import parse_condition
from dissociated.errors import ColumnNotFound, OptionError

TABLE = pa.table(
    {
        "row": range(6),
        "n": pa.array([1, 2, None, 4, 5, -6], pa.int32()),
        "f": [0.5, 1.5, float("nan"), None, float("inf"), -2.0],
        "s": ["a", "b'c", "axe", None, "", 'x"a'],
        "l": pa.array(["a", "b", None, "d", "e", "f"], pa.large_string()),
        "d": [date(2024, 1, day) if day != 3 else None for day in range(1, 7)],
        "t": [datetime(2024, 1, 1, hour) for hour in range(6)],
        "b": [True, False, None, True, False, True],
        "price": pa.array(
            [Decimal(one) for one in ("1.10", "2.20", "3.30", "4.40", "5.50", "6.60")], pa.decimal128(9, 2)
        ),
        "odd name": [1, 2, 3, 1, 2, 3],
        "st": [{"x": one} for one in range(6)],
        "true": [1, 2, None, 1, 2, 3],
        "false": [True, True, None, False, False, True],
    }
)
MEANT = [
    *(
        "n > 2",
        "2 < n",
        "-5 >= n",
        "n = 4 or s = 'a'",
        "n <> 4",
        "n != 4 AND f < 2",
        "not n > 2",
        "NOT (n > 2 or s is null)",
    ),
    *("n > 1 and n < 5 or s = ''", "n > 1 and (n < 5 or s = '')", "not not b = true", "not n = 1 and s is not null"),
    *("s in ('a', 'b''c')", "s not in ('a')", "n in (1, 2, 99)", "n between 2 and 4", "n not between 2 and 4"),
    *(
        "s like 'a%'",
        "s like '%a'",
        "s like '%x%'",
        "s not like 'a%'",
        "s like 'axe'",
        "s = 'x\"a'",
        "l = 'b'",
        "l like 'd%'",
    ),
    *(
        "f > 1",
        "f >= 0.5",
        "f = 1.5",
        "d = '2024-01-02'",
        "d < '2024-01-04'",
        "t >= '2024-01-01T03:00:00'",
        "b = false",
    ),
    *("price = 1.10", "price > 3.3", '"odd name" = 1', "st.x > 3", '"st"."x" <= 1', "(((n = 1)))", "f < 1e3", "n > +1"),
    *('"true" = 1', '"true" is null', '"false" = true', "TRUE = b", "b = False", "not true = b"),
]


def test_a_condition_means_what_it_means_in_sql() -> None:
    connection = duckdb.connect()
    connection.register("rows_of_it", TABLE)
    for written in MEANT:
        passed = TABLE.filter(parse_condition(written, TABLE.schema))["row"].to_pylist()
        meant = connection.execute(f'SELECT "row" FROM rows_of_it WHERE {written} ORDER BY "row"').fetchall()
        assert passed == [row for (row,) in meant], written


@pytest.mark.parametrize(
    ("written", "why"),
    [
        ("", "at its end: expected the name of a column"),
        ("n >", "at its end: expected a value: a number, a 'text', true or false"),
        ("n > 1 2", "at '2': expected the end"),
        ("n = null", r"at 'null'.*\(write is null\)"),
        ("n > 1 and", "at its end: expected the name of a column"),
        ("(n > 1", r"at its end: expected '\)'"),
        ("n = 'a", 'at "\'a": expected a closing quote'),
        ("n ; drop", "at '; drop': expected a name, a value or a comparison"),
        ("n = s", "at 's': expected a value"),
        ('s = "a"', "at '\"a\"': expected a value"),
        ('b = "true"', "at '\"true\"': expected a value"),
        ("n not > 1", "expected in, between or like"),
        ("n in ()", "a value"),
        ("s like 'a_c'", "use 'x%', '%x' or '%x%'"),
        ("s = 1", "column 's' is string, so the condition '=' 1 could select other rows"),
        ("n = 12abc", "at '12abc': expected a name, a value or a comparison"),
        ("abs(n) = 1", r"at '\(n\) = 1'"),
        ("not " * 60 + "b = true", "nested deeper than 50 levels"),
    ],
)
def test_an_invalid_condition_is_refused(written: str, why: str) -> None:
    with pytest.raises(OptionError, match=why):
        parse_condition(written, TABLE.schema)


def test_a_column_that_is_not_there_is_named() -> None:
    with pytest.raises(ColumnNotFound, match=r"column 'nn' to filter by \(did you mean 'n'\?\); there are row, n, f"):
        parse_condition("nn > 1", TABLE.schema)
