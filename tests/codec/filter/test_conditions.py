"""Conditions on columns for which Spark has no equivalent. `tests/spark/test_filters.py` compares with Spark."""

from __future__ import annotations

import operator
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest

from dissociated.codec.filter.row_filter import RowFilter

COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "in": operator.eq,
    "not in": operator.ne,
}
NANOSECONDS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}


@pytest.mark.parametrize("zone", [None, "Europe/Berlin"])
@pytest.mark.parametrize("unit", NANOSECONDS)
def test_times_are_compared_as_they_are_in_whatever_unit(unit: str, zone: str | None) -> None:
    epoch = datetime(1970, 1, 1, tzinfo=UTC if zone else None)
    nanoseconds = [-1_500_000_001, -1_500_000_000, -1_000_000_000, -1, 0, 1, 1_000, 1_500_000, 2_000_000_000]
    ticks = [-2, -1, 0, 1, 2, 1_500, 1_500_000, 2_000_000_000]
    batch = pa.record_batch({"t": pa.array([*ticks, None], pa.timestamp(unit, zone))})
    for value in nanoseconds:
        moment: Any = pd.Timestamp(value, tz="UTC" if zone else None)
        moments = [moment]
        if not value % 1_000:
            moments.append(epoch + timedelta(microseconds=value // 1_000))
        if not value % 1_000 or unit == "ns":  # Spark drops digits below a microsecond.
            moments.append(moment.isoformat())
        for written in moments:
            for name, compare in COMPARISONS.items():
                expected = [compare(tick * NANOSECONDS[unit], value) for tick in ticks]
                for others in ([], [written] * 20) if "in" in name else ([],):
                    condition = ["t", name, [written, *others] if "in" in name else written]
                    passes = RowFilter.bind(condition, batch.schema).mask(batch).to_pylist()
                    assert passes == [*expected, None], condition
