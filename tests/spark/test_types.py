from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import (
    ArrayType,
    CalendarIntervalType,
    DayTimeIntervalType,
    IntegerType,
    NullType,
    StructType,
)

from dissociated.errors import SourceError
from dissociated.spark.types import arrow_schema, conform, function_schema, kept_type


@pytest.mark.usefixtures("spark")  # which knows types by name
def test_instants_are_in_utc_at_every_depth() -> None:
    wanted: Any = StructType.fromDDL("a timestamp not null, b array<timestamp>, c timestamp_ntz")
    schema = arrow_schema(wanted)
    instant = pa.timestamp("us", "UTC")
    assert schema == pa.schema(
        [
            pa.field("a", instant, nullable=False),
            pa.field("b", pa.list_(pa.field("element", instant))),
            pa.field("c", pa.timestamp("us")),
        ]
    )


@pytest.mark.usefixtures("spark")  # which knows types by name
def test_a_type_that_arrow_lacks_names_its_column() -> None:
    schema = StructType().add("fine", IntegerType()).add("span", CalendarIntervalType())
    with pytest.raises(SourceError, match=r"column 'span'.*interval.*cast it, or drop"):
        arrow_schema(schema)
    with pytest.raises(SourceError, match=r"column 'none' has the type void.*cast it, or drop"):
        arrow_schema(StructType().add("none", NullType(), nullable=False))
    of_the_jvm: Any = StructType.fromDDL("fine int, age struct<months: interval year to month>")
    with pytest.raises(SourceError, match=r"column 'age'.*interval year to month.*cast it, or drop"):
        function_schema(of_the_jvm)


@pytest.mark.usefixtures("spark")  # which knows types by name
def test_a_type_that_only_spark_has_is_kept_beside_the_type_that_carries_it() -> None:
    wanted: Any = StructType.fromDDL("c char(5), v array<varchar(3)>, age struct<months: interval year to month>")
    wanted.add("none", ArrayType(NullType(), containsNull=False))  # the type of `array()`
    schema = arrow_schema(wanted)
    assert schema.types == [
        pa.string(),
        pa.list_(pa.field("element", pa.string())),
        pa.struct({"months": pa.int32()}),
        pa.list_(pa.field("element", pa.null())),
    ]
    assert [kept_type(field) for field in schema] == [field.dataType for field in wanted]


@pytest.mark.usefixtures("spark")  # which knows types by name
def test_what_is_no_type_is_ignored_and_no_class_is_loaded() -> None:
    wanted: Any = StructType.fromDDL("age interval day not null, names map<string, string collate UTF8_LCASE>")
    schema = arrow_schema(wanted)
    assert [kept_type(field) for field in schema] == [field.dataType for field in wanted]
    (key,) = schema.field("age").metadata
    told = json.loads(schema.field("age").metadata[key])
    of_a_class = {"type": "udt", "class": None, "pyClass": "os.path", "sqlType": told["type"], "serializedClass": ""}
    for type_ in (
        of_a_class,
        "interval hour",
        "string",
        "no type",
        7,
        {"type": "array"},
        None,
    ):
        text = json.dumps({**told, "type": type_}).replace("udt", "\\u0075dt")
        kept = kept_type(schema.field("age").with_metadata({key: text}))
        assert kept is None or kept == DayTimeIntervalType(1, 1), type_
    for text in ("", "{", "[]", "7", '"udt"', "[" * 100_000):
        assert kept_type(schema.field("age").with_metadata({key: text})) is None


@pytest.mark.usefixtures("spark")  # which knows types by name
def test_a_class_is_kept_if_it_is_sparks_own(caplog: pytest.LogCaptureFixture) -> None:
    from pyspark.ml.linalg import MatrixUDT, VectorUDT

    class TheirUDT(VectorUDT): ...

    wanted = StructType().add("v", VectorUDT()).add("m", ArrayType(MatrixUDT()))
    assert [kept_type(field) for field in arrow_schema(wanted)] == [field.dataType for field in wanted]
    assert not caplog.records
    assert kept_type(arrow_schema(StructType().add("theirs", TheirUDT())).field("theirs")) is None
    assert "column of a user-defined type is read as its storage type: column='theirs' type=struct" in caplog.text
    (field,) = arrow_schema(StructType().add("v", VectorUDT()))
    ((key, told),) = field.metadata.items()
    for own in (b"pyspark.ml.linalg.VectorUDT", b"org.apache.spark.ml.linalg.VectorUDT"):
        for other in (b"spark.ml.linalg.VectorUDT", b"os.VectorUDT", b"pyspark.mllib.linalg.VectorUDT"):
            assert told.count(own) == 1
            assert kept_type(field.with_metadata({key: told.replace(own, other)})) is None


def test_conforming_copies_nothing_where_only_labels_differ() -> None:
    here = pa.schema([pa.field("at", pa.timestamp("us", "America/New_York"), metadata={"k": "v"})])
    there = pa.schema([pa.field("at", pa.timestamp("us", "UTC"))])
    batch = pa.record_batch([pa.array([1, None, 3], here.field("at").type)], schema=here)
    conformed = conform(batch, there)
    assert conformed.schema.equals(there, check_metadata=True)
    assert [buffer.address for buffer in conformed["at"].buffers()] == [
        buffer.address for buffer in batch["at"].buffers()
    ]


def test_conforming_takes_null_structs_whose_fields_are_not_nullable() -> None:
    inner = pa.field("at", pa.timestamp("us", "UTC"), nullable=False)
    there = pa.schema({"s": pa.struct([inner])})
    here = pa.schema({"s": pa.struct([inner.with_type(pa.timestamp("us", "Asia/Tokyo"))])})
    at = pa.array([7, None], pa.timestamp("us", "Asia/Tokyo"))
    fields = list(here.field("s").type)
    structs = pa.StructArray.from_arrays([at], fields=fields, mask=pa.array([False, True]))
    conformed = conform(pa.record_batch([structs], schema=here), there)
    conformed.validate(full=True)
    assert conformed.schema == there
    assert [row and row["at"].timestamp() for row in conformed["s"].to_pylist()] == [7e-6, None]


def test_conforming_brings_large_types_back() -> None:
    batch = pa.record_batch({"text": pa.array(["a", None], pa.large_string())})
    assert conform(batch, pa.schema({"text": pa.string()}))["text"].to_pylist() == ["a", None]
