"""Filters of rows: their identity."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from dissociated.codec.filter.row_filter import filter_identity

SCHEMA = pa.schema({"n": pa.int64(), "s": pa.string()})


def test_only_equal_filters_have_one_identity() -> None:
    numbers, others = [*range(100)], [*range(50), 999, *range(51, 100)]
    assert str(pc.field("n").isin(numbers)) == str(pc.field("n").isin(others))
    texts = ["ä" * 50 + str(n) for n in range(3)]
    filters = [
        pc.field("n").isin(numbers), pc.field("n").isin(others), pc.field("s").isin(texts),
        ("n", "=", 1), ("n", "=", 2), [("n", "=", 1), ("s", "=", "x")],
    ]  # fmt: skip
    assert len({filter_identity(one, SCHEMA) for one in filters}) == len(filters)
    assert filter_identity(pc.field("n").isin([*range(100)]), SCHEMA) == filter_identity(filters[0], SCHEMA)
    assert filter_identity(("n", "=", 1), SCHEMA) == filter_identity([("n", "=", 1)], SCHEMA)
