"""Data that can be appended to a dataset, and its conversion to the dataset's schema."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql.types import StructType

import dissociated as dis
from dissociated.control.commit import Commit
from dissociated.errors import DissociatedError, SourceError
from dissociated.spark import publish, read
from dissociated.spark.catalog_config import CatalogConfig
from dissociated.spark.fitting import Fitting
from dissociated.spark.target import WriteTarget
from dissociated.spark.types import arrow_schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.usefixtures("spark")  # which knows types by name

#: Type of the dataset, type and values of the appended data, and the values that are then read.
WIDENED: list[tuple[pa.DataType, str, list[Any], list[Any]]] = [
    (pa.int64(), "int", [-(2**31), None], [-(2**31), None]),
    (pa.float64(), "int", [2**31 - 1], [2.0**31 - 1]),
    (pa.float64(), "float", [0.5], [0.5]),
    (pa.decimal128(12, 2), "int", [-(2**31)], [Decimal("-2147483648.00")]),
    (pa.decimal128(12, 3), "decimal(10,2)", [Decimal("99999999.99")], [Decimal("99999999.990")]),
    (pa.list_(pa.field("element", pa.int64())), "array<smallint>", [[1, None], None], [[1, None], None]),
    (pa.string(), "void", [None], [None]),
]
LOSES = [
    (pa.int32(), "bigint"),
    (pa.float64(), "bigint"),
    (pa.float32(), "int"),
    (pa.int64(), "string"),
    (pa.decimal128(10, 2), "decimal(10,3)"),
    (pa.decimal128(20, 2), "bigint"),
    (pa.timestamp("us"), "timestamp"),
    (pa.struct([("a", pa.int32()), ("b", pa.int32())]), "struct<b:int,a:int>"),
    (pa.list_(pa.int32()), "map<int,int>"),
    (pa.uint8(), "smallint"),
    (pa.binary(), "string"),
    (pa.int32(), "interval year to month"),
    (pa.int64(), "interval year"),
    (pa.struct([("of", pa.list_(pa.int32()))]), "struct<of: array<interval month>>"),
]


def ddl(text: str) -> Any:
    return StructType.fromDDL(text)


def fitting(catalog: str, frame: str, merge: bool = False) -> Fitting:
    return Fitting.of(
        arrow_schema(ddl(frame)), WriteTarget(CatalogConfig(catalog), Commit("data", mode="append"), merge)
    )


def test_numbers_are_widened_where_it_is_asked_for(catalog: str, client: dis.Client) -> None:
    for there, frame, values, expected in WIDENED:
        schema = pa.schema([pa.field("x", there, metadata={"k": "v"})], metadata={"of": "all"})
        client.put("data", schema.empty_table())
        with pytest.raises(SourceError, match=r"column 'x' is .*let .option\(\"mergeSchema\", \"true\"\) widen it"):
            fitting(catalog, f"x {frame}")
        (array,) = (pa.array(values, field.type) for field in arrow_schema(ddl(f"x {frame}")))
        made = fitting(catalog, f"x {frame}", merge=True).conform(pa.record_batch([array], ["x"]))
        made.validate(full=True)
        assert made.schema.equals(schema, check_metadata=True)
        assert made["x"].to_pylist() == expected


def test_the_same_values_in_another_layout_are_taken(catalog: str, client: dis.Client) -> None:
    for there, frame, values in (
        (pa.large_string(), "string", ["a", None]),
        (pa.binary_view(), "binary", [b"a", None]),
        (pa.string(), "varchar(3)", ["a", None]),
        (pa.list_(pa.string()), "array<string collate UTF8_LCASE>", [["a", None], None]),
        (pa.timestamp("us", "Asia/Tokyo"), "timestamp", [None]),
    ):
        client.put("data", pa.schema({"x": there}).empty_table())
        (field,) = arrow_schema(ddl(f"x {frame}"))
        made = fitting(catalog, f"x {frame}").conform(pa.record_batch([pa.array(values, field.type)], ["x"]))
        assert (made["x"].type, made["x"].to_pylist()) == (there, values)


def test_what_would_lose_something_is_refused_by_column_and_type(catalog: str, client: dis.Client) -> None:
    for there, frame in LOSES:
        client.put("data", pa.schema({"x": there}).empty_table())
        with pytest.raises(SourceError, match=r"cannot be appended to 'data': column 'x' is .*, not .*: cast it$"):
            fitting(catalog, f"x {frame}", merge=True)


def test_columns_go_by_their_names(catalog: str, client: dis.Client) -> None:
    client.put("data", pa.table({"a": [1], "b": ["x"]}))
    batch = pa.record_batch({"b": ["y"], "a": [2]})
    assert fitting(catalog, "b string, a bigint").conform(batch).to_pylist() == [{"a": 2, "b": "y"}]
    with pytest.raises(SourceError, match=r"no column 'b': add it, or let .*mergeSchema.* fill it with nulls"):
        fitting(catalog, "a bigint")
    made = fitting(catalog, "a bigint", merge=True).conform(pa.record_batch({"a": [2]}))
    assert made.to_pylist() == [{"a": 2, "b": None}]
    with pytest.raises(SourceError, match=r"the dataset has no column 'c', and its columns stay as they are"):
        fitting(catalog, "a bigint, b string, c int", merge=True)
    with pytest.raises(SourceError, match=r"more than one column 'a'.*rename it"):
        fitting(catalog, "a bigint, a string")


def test_nulls_go_where_they_may(catalog: str, client: dis.Client) -> None:
    strict = pa.struct([pa.field("y", pa.int32(), nullable=False)])
    schema = pa.schema([pa.field("x", pa.list_(pa.field("element", strict)))])
    client.put("data", schema.empty_table())
    fits = fitting(catalog, "x array<struct<y:int>>")
    here = arrow_schema(ddl("x array<struct<y:int>>"))
    taken = [[{"y": 1}, None], None, []]
    made = fits.conform(pa.RecordBatch.from_pylist([{"x": one} for one in taken], here))
    made.validate(full=True)
    assert (made.schema, made["x"].to_pylist()) == (schema, taken)
    (list_type,) = here.types
    below = pa.array([{"y": None}], list_type.value_type)
    hidden = pa.ListArray.from_arrays([0, 1, 1], below, type=list_type, mask=pa.array([True, False]))
    for batch in (pa.record_batch([hidden], schema=here), made.slice(1)):
        assert fits.conform(batch)["x"].to_pylist() == batch["x"].to_pylist()
    with pytest.raises(SourceError, match=r"column 'x.element.y' is null in a row that is written to 'data'"):
        fits.conform(pa.RecordBatch.from_pylist([{"x": [{"y": 1}, {"y": None}]}], here))

    client.put("data", pa.schema({"x": pa.map_("str", pa.field("value", "i4", nullable=False))}).empty_table())
    fits, here = fitting(catalog, "x map<string,int>"), arrow_schema(ddl("x map<string,int>"))
    batch = pa.RecordBatch.from_pylist([{"x": {"k": None}}, {"x": {"k": 1}}, {"x": None}], here)
    assert fits.conform(batch.slice(1))["x"].to_pylist() == [[("k", 1)], None]
    with pytest.raises(SourceError, match=r"column 'x.value' is null in a row"):
        fits.conform(batch)


def by_source(df: DataFrame, name: str, catalog: str, mode: str = "overwrite", **options: str) -> None:
    df.write.format("dissociated").option("catalog", catalog).options(**options).mode(mode).save(name)


@pytest.mark.parametrize("write", [by_source, publish], ids=["source", "publish"])
def test_a_difference_of_nullability_is_taken_both_ways(
    spark: SparkSession, catalog: str, client: dis.Client, write: Callable[..., None]
) -> None:
    nullable = spark.createDataFrame([(7,), (8,)], "id bigint")
    write(spark.range(2), "data", catalog)
    write(nullable, "data", catalog, mode="append")
    assert client.read("data").read_all()["id"].to_pylist() == [0, 1, 7, 8]
    with pytest.raises((PySparkException, DissociatedError), match="column 'id' is null in a row that is written"):
        write(spark.createDataFrame([(None,)], "id bigint"), "data", catalog, mode="append")
    write(nullable, "more", catalog)
    write(spark.range(2), "more", catalog, mode="append")
    assert [row.id for row in read(spark, "more", catalog).collect()] == [7, 8, 0, 1]
