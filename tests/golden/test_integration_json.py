"""The reader of descriptions: types that are rare in golden files, and detection of every kind of difference."""

from __future__ import annotations

import copy
from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from .integration_json import describe

Change = Callable[[dict[str, Any]], None]


def field(name: str, type_: dict[str, Any], *children: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"name": name, "type": type_, "nullable": True, "children": list(children), **more}


def one_column(described: dict[str, Any], column: dict[str, Any]) -> pa.Array:
    whole = {
        "schema": {"fields": [described]},
        "batches": [{"count": column["count"], "columns": [{"name": described["name"], **column}]}],
    }
    (batch,) = describe(whole).batches
    batch.validate(full=True)
    return batch.column(0)


INT = {"name": "int", "bitWidth": 32, "isSigned": True}
SHORT = {"name": "int", "bitWidth": 16, "isSigned": True}
LONG_VIEW = {"SIZE": 13, "PREFIX_HEX": "61206D6F", "BUFFER_INDEX": 1, "OFFSET": 2}
DATA = ["FF", "2020" + b"a more or les".hex()]
INTS = {"name": "item", "count": 4, "VALIDITY": [1, 1, 0, 1], "DATA": [1, 2, 3, 4]}

CASES = {
    "string view": (
        field("v", {"name": "utf8view"}),
        {
            "count": 3,
            "VALIDITY": [1, 0, 1],
            "VIEWS": [{"SIZE": 2, "INLINED": "hi"}, {"SIZE": 0, "INLINED": ""}, LONG_VIEW],
            "VARIADIC_DATA_BUFFERS": DATA,
        },
        pa.array(["hi", None, "a more or les"], pa.string_view()),
    ),
    "binary view": (
        field("v", {"name": "binaryview"}),
        {
            "count": 2,
            "VALIDITY": [1, 1],
            "VIEWS": [{"SIZE": 2, "INLINED": "00FF"}, LONG_VIEW],
            "VARIADIC_DATA_BUFFERS": DATA,
        },
        pa.array([b"\0\xff", b"a more or les"], pa.binary_view()),
    ),
    "list view": (
        field("l", {"name": "listview"}, field("item", INT)),
        {"count": 3, "VALIDITY": [1, 0, 1], "OFFSET": [2, 0, 0], "SIZE": [2, 0, 3], "children": [INTS]},
        pa.array([[None, 4], None, [1, 2, None]], pa.list_view(pa.int32())),
    ),
    "large list view": (
        field("l", {"name": "largelistview"}, field("item", INT)),
        {"count": 1, "VALIDITY": [1], "OFFSET": ["1"], "SIZE": ["2"], "children": [INTS]},
        pa.array([[2, None]], pa.large_list_view(pa.int32())),
    ),
    "runs": (
        field("r", {"name": "runendencoded"}, field("run_ends", SHORT, nullable=False), field("values", INT)),
        {
            "count": 5,
            "children": [
                {"name": "run_ends", "count": 3, "VALIDITY": [1, 1, 1], "DATA": [2, 3, 5]},
                {"name": "values", "count": 3, "VALIDITY": [1, 0, 1], "DATA": [7, 0, 8]},
            ],
        },
        pa.RunEndEncodedArray.from_arrays(pa.array([2, 3, 5], pa.int16()), pa.array([7, None, 8], pa.int32())),
    ),
    "interval of three": (
        field("i", {"name": "interval", "unit": "MONTH_DAY_NANO"}),
        {
            "count": 2,
            "VALIDITY": [1, 0],
            "DATA": [{"months": -1, "days": 2, "nanoseconds": 3}, {"months": 0, "days": 0, "nanoseconds": 0}],
        },
        pa.array([pa.MonthDayNano([-1, 2, 3]), None], pa.month_day_nano_interval()),
    ),
    "half floats": (
        field("f", {"name": "floatingpoint", "precision": "HALF"}),
        {"count": 2, "VALIDITY": [1, 1], "DATA": [1.5, -2]},
        pa.array(np.array([1.5, -2], np.float16)),
    ),
    "decimals of 32 bits": (
        field("d", {"name": "decimal", "precision": 5, "scale": 2, "bitWidth": 32}),
        {"count": 2, "VALIDITY": [1, 1], "DATA": ["-123", "99999"]},
        pa.array([Decimal("-1.23"), Decimal("999.99")], pa.decimal32(5, 2)),
    ),
    "decimals of 64 bits": (
        field("d", {"name": "decimal", "precision": 18, "scale": 0, "bitWidth": 64}),
        {"count": 1, "VALIDITY": [1], "DATA": ["-999999999999999999"]},
        pa.array([Decimal("-999999999999999999")], pa.decimal64(18, 0)),
    ),
    "durations": (
        field("d", {"name": "duration", "unit": "MILLISECOND"}),
        {"count": 2, "VALIDITY": [1, 0], "DATA": ["1500", "1"]},
        pa.array([timedelta(seconds=1.5), None], pa.duration("ms")),
    ),
    "list": (
        field("l", {"name": "list"}, field("item", INT)),
        {"count": 2, "VALIDITY": [1, 0], "OFFSET": [0, 4, 4], "children": [INTS]},
        pa.array([[1, 2, None, 4], None], pa.list_(pa.int32())),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_description_becomes_what_it_describes(name: str) -> None:
    described, column, expected = CASES[name]
    found = one_column(described, column)
    assert found.type == expected.type
    assert found == expected


@pytest.mark.parametrize(
    ("unit", "data", "values"),
    [
        ("YEAR_MONTH", [-5, 7], [-5, 7]),
        ("DAY_TIME", [{"days": 1, "milliseconds": 2}, {"days": -1, "milliseconds": 0}], [(2 << 32) + 1, 0xFFFFFFFF]),
    ],
)
def test_intervals_that_pyarrow_has_no_arrays_of(unit: str, data: list[Any], values: list[int]) -> None:
    """The intervals are within a list, so no code has to create an array of them."""
    item = {"name": "item", "count": 2, "VALIDITY": [1, 1], "DATA": data}
    column = {"count": 1, "VALIDITY": [1], "OFFSET": [0, 2], "children": [item]}
    found = one_column(field("l", {"name": "list"}, field("item", {"name": "interval", "unit": unit})), column)
    *_, buffer = found.buffers()
    assert str(found.type.value_type) == {"YEAR_MONTH": "month_interval", "DAY_TIME": "day_time_interval"}[unit]
    assert np.frombuffer(buffer, np.int32 if unit == "YEAR_MONTH" else np.int64).tolist() == values


WHOLE: dict[str, Any] = {
    "schema": {
        "fields": [
            field("n", INT, metadata=[{"key": "a", "value": "b"}]),
            field("d", {"name": "utf8"}, dictionary={"id": 3, "indexType": SHORT, "isOrdered": False}),
        ],
        "metadata": [{"key": "c", "value": "d"}],
    },
    "dictionaries": [
        {
            "id": 3,
            "data": {
                "count": 2,
                "columns": [{"name": "x", "count": 2, "VALIDITY": [1, 1], "OFFSET": [0, 1, 3], "DATA": ["p", "qq"]}],
            },
        }
    ],
    "batches": [
        {
            "count": 2,
            "columns": [
                {"name": "n", "count": 2, "VALIDITY": [1, 0], "DATA": [1, 2]},
                {"name": "d", "count": 2, "VALIDITY": [1, 1], "DATA": [1, 0]},
            ],
        }
    ],
}

SCHEMA_CHANGES: dict[str, Change] = {
    "name": lambda whole: whole["schema"]["fields"][0].update(name="m"),
    "nullability": lambda whole: whole["schema"]["fields"][0].update(nullable=False),
    "metadata of a field": lambda whole: whole["schema"]["fields"][0]["metadata"][0].update(value="B"),
    "metadata": lambda whole: whole["schema"].update(metadata=None),
    "type": lambda whole: whole["schema"]["fields"][0]["type"].update(isSigned=False),
    "type of indices": lambda whole: whole["schema"]["fields"][1]["dictionary"]["indexType"].update(bitWidth=8),
    "order": lambda whole: whole["schema"]["fields"][1]["dictionary"].update(isOrdered=True),
}
VALUE_CHANGES: dict[str, Change] = {
    "value": lambda whole: whole["batches"][0]["columns"][0].update(DATA=[9, 2]),
    "null": lambda whole: whole["batches"][0]["columns"][0].update(VALIDITY=[0, 0]),
    "index": lambda whole: whole["batches"][0]["columns"][1].update(DATA=[1, 1]),
    "dictionary": lambda whole: whole["dictionaries"][0]["data"]["columns"][0].update(DATA=["p", "qr"]),
}


def changed(change: Change) -> Any:
    other = copy.deepcopy(WHOLE)
    change(other)
    return describe(other)


def test_a_whole_description() -> None:
    schema, (batch,) = describe(WHOLE)
    assert schema.metadata == {b"c": b"d"}
    assert schema.field("n").metadata == {b"a": b"b"}
    assert batch.to_pydict() == {"n": [1, None], "d": ["qq", "p"]}


@pytest.mark.parametrize("change", SCHEMA_CHANGES)
def test_another_schema_is_another(change: str) -> None:
    assert not changed(SCHEMA_CHANGES[change]).schema.equals(describe(WHOLE).schema, check_metadata=True)


@pytest.mark.parametrize("change", VALUE_CHANGES)
def test_other_values_are_others(change: str) -> None:
    assert not changed(VALUE_CHANGES[change]).batches[0].equals(describe(WHOLE).batches[0])


def test_what_a_null_hides_does_not_matter() -> None:
    hidden = changed(lambda whole: whole["batches"][0]["columns"][0].update(DATA=[1, 77]))
    assert hidden.batches[0].equals(describe(WHOLE).batches[0])


def test_columns_are_as_long_as_their_batch() -> None:
    with pytest.raises(ValueError, match="a batch of 3 rows"):
        changed(lambda whole: whole["batches"][0].update(count=3))
