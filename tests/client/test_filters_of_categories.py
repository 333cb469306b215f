"""Filters on dictionary columns, such as a Categorical of pandas, and on dates that cannot be read."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, date, datetime
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import dissociated as dis
from dissociated.cli.condition import parse_condition
from dissociated.client.lazy import implied_conditions
from dissociated.errors import OptionError
from support.helpers import case

FRAME = pd.DataFrame(
    {
        "status": pd.Categorical(["paid", "open", None, "paid", "lost"]),
        "stars": pd.Categorical([3, 1, 2, 1, None]),
        "row": range(5),
    }
)


@pytest.fixture(scope="module")
def client() -> Iterator[dis.Client]:
    days = pa.table(
        {
            "day": [date(2024, 1, 31)],
            "time": [datetime(2024, 1, 31)],
            "zoned": [datetime(2024, 1, 31, tzinfo=UTC)],
        }
    )
    with dis.Server(["shm:", "tcp://127.0.0.1:0"]) as server, dis.connect(server.catalog_uri) as client:
        server.publish("orders", FRAME)
        server.publish("days", days)
        yield client


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
@pytest.mark.parametrize(
    ("condition", "rows"),
    [
        ("status = 'paid'", [0, 3]),
        ("status != 'paid'", [1, 4]),
        ("status in ('paid', 'lost')", [0, 3, 4]),
        ("status like 'p%'", [0, 3]),
        ("status is null", [2]),
        ("not status = 'paid'", [1, 4]),
        ("stars > 1", [0, 2]),
        ("stars between 1 and 2 and status = 'open'", [1]),
    ],
)
def test_categories_compare_as_their_values(
    client: dis.Client, transport: str, condition: str, rows: list[int]
) -> None:
    handle = client.dataset("orders", transport=transport)
    chosen = handle.to_table(columns=["row"], filter=parse_condition(condition, handle.schema))
    assert chosen["row"].to_pylist() == rows


@pytest.mark.parametrize("filter", [("status", "=", "paid"), pc.field("status") == "paid"], ids=["list", "expression"])
def test_python_filters_categories(client: dis.Client, filter: Any) -> None:
    table = client.read("orders", filter=filter).read_all()
    assert table["row"].to_pylist() == [0, 3]
    assert table["status"].to_pylist() == ["paid", "paid"]


@pytest.mark.parametrize(
    ("condition", "form"),
    [
        ("day > '31.1.2024'", "2026-11-24"),
        ("time > 'January'", "2026-11-24T10:30:00"),
        ("zoned > '2024-01-31'", "2026-11-24T10:30:00+01:00"),
        ("time > '2024-01-31T00:00:00Z'", "2026-11-24T10:30:00"),
    ],
)
def test_the_expected_form_of_a_date_is_told(client: dis.Client, condition: str, form: str) -> None:
    column, _, value = condition.split(" ", 2)
    schema = client.describe("days").schema
    with pytest.raises(OptionError, match=f"column '{column}' is .*, and {value} cannot be one") as told:
        parse_condition(condition, schema)
    assert str(told.value).endswith(f"'{form}'")
    parse_condition(f"{column} > '{form}'", schema)


def test_polars_orders_an_enum_by_its_categories(client: dis.Client) -> None:
    sizes = pl.DataFrame({"size": pl.Series(["small", "large"] * 2, dtype=pl.Enum(["small", "large"])), "n": range(4)})
    table = sizes.to_arrow()
    client.put("sizes", table)
    size = pl.col("size")
    for larger in (
        size > "small",
        pl.lit("small") < size,
        size >= "large",
        size.is_between(pl.lit("large"), pl.lit("large")),
    ):
        with case(str(larger)):
            assert implied_conditions(larger & (pl.col("n") > 1), table.schema) == [("n", ">", 1)]
            assert client.dataset("sizes").scan().filter(larger).collect()["n"].to_list() == [1, 3]
    assert implied_conditions(size == "large", table.schema) == [("size", "=", "large")]
