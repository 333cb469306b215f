from __future__ import annotations

import re
from datetime import timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql.types import StructType

from dissociated.errors import ColumnNotFound, OptionError, SourceError
from dissociated.spark.columns import ColumnConverter, field_places, spark_schema
from support.arrow_cases import ARRAYS, batches

#: Spark's name of each type in DDL, or None if Spark has no such type.
NAMES: dict[str, str | None] = {
    "null": "void",
    "bool": "boolean",
    "int8": "tinyint",
    "int16": "smallint",
    "int32": "int",
    "int64": "bigint",
    "uint8": "smallint",
    "uint16": "int",
    "uint32": "bigint",
    "uint64": "decimal(20,0)",
    "float16": "float",
    "float32": "float",
    "float64": "double",
    "decimal32": "decimal(9,2)",
    "decimal64": "decimal(18,4)",
    "decimal128": "decimal(38,10)",
    "decimal256": None,
    "date32": "date",
    "date64": "date",
    "time32[s]": "time(6)",
    "time32[ms]": "time(6)",
    "time64[us]": "time(6)",
    "time64[ns]": "time(6)",
    "timestamp[s]": "timestamp_ntz",
    "timestamp[ms]": "timestamp_ntz",
    "timestamp[us, UTC]": "timestamp",
    "timestamp[ns, zone]": "timestamp",
    "timestamp[us, offset]": "timestamp",
    "duration[s]": "interval day to second",
    "duration[ms]": "interval day to second",
    "duration[us]": "interval day to second",
    "duration[ns]": "interval day to second",
    "interval": None,
    "string": "string",
    "large_string": "string",
    "string_view": "string",
    "binary": "binary",
    "large_binary": "binary",
    "binary_view": "binary",
    "fixed_size_binary": "binary",
    "fixed_size_binary of 0": "binary",
    "list": "array<int>",
    "large_list": "array<string>",
    "list_view": "array<bigint>",
    "large_list_view": "array<tinyint>",
    "fixed_size_list": "array<float>",
    "struct": "struct<a:tinyint,b:string>",
    "struct without fields": "struct<>",
    "map": "map<string,int>",
    "map with sorted keys": "map<tinyint,string>",
    "uuid": "binary",
    "json": "string",
    "deep": "array<struct<m:map<string,array<string>>,v:string>>",
    "dictionary of strings": "string",
    "dictionary, ordered": "string",
    "dictionary of int64, 64-bit indices": "bigint",
    "dictionary of views": "string",
    "dictionary, empty": "string",
    "dictionary within a list": "array<string>",
    "dictionary within a struct": "struct<a:string,b:string>",
    "dictionary of a dictionary": "struct<d:string,n:bigint>",
    "runs of strings": "string",
    "runs, 16-bit": "bigint",
    "runs, 64-bit": "float",
    "dense union": None,
    "sparse union": None,
    "union within a struct": None,
    "extension": "double",
    "extension of a dictionary": "string",
    "bool8": "tinyint",
    "tensors": "array<int>",
}
FINER = ["timestamp[ns, zone]", "duration[ns]", "time64[ns]"]


def values(array: pa.Array) -> list[Any]:
    """Return the values of an array of any type, extension types included, cut to microseconds."""
    if isinstance(array.type, pa.BaseExtensionType):
        array = array.storage
    if pa.types.is_dictionary(array.type) and array.type.value_type == pa.string_view():
        array = array.cast(pa.dictionary(pa.int32(), pa.string()))
    if pa.types.is_timestamp(array.type) and array.type.unit == "s":
        return array.cast(pa.int64()).to_pylist()  # these timestamps lie beyond the last year of Python
    if getattr(array.type, "unit", None) != "ns":
        return array.to_pylist()
    if pa.types.is_duration(array.type):
        numbers = array.cast(pa.int64()).to_pylist()
        return [None if one is None else timedelta(microseconds=int(Decimal(one) / 1000)) for one in numbers]
    if pa.types.is_timestamp(array.type):
        return [one and one.floor("us").to_pydatetime() for one in array.to_pylist()]
    return array.to_pylist()


def test_every_type_is_here() -> None:
    assert NAMES.keys() == ARRAYS.keys()


@pytest.mark.parametrize("name", [name for name, ddl in NAMES.items() if ddl is not None])
def test_every_type_keeps_its_values(name: str) -> None:
    for batch in batches(ARRAYS[name]):
        schema = spark_schema(batch.schema)
        assert {field.dataType.simpleString() for field in schema} == {NAMES[name]}
        taken = ColumnConverter(batch.schema, schema, "truncate").convert(batch)
        taken.validate(full=True)
        for here, there in zip(batch.columns, taken.columns, strict=True):
            if name == "timestamp[s]":
                there = there.cast(pa.timestamp("s"))
            assert values(there) == values(here)


@pytest.mark.parametrize("name", [name for name, ddl in NAMES.items() if ddl is None])
def test_a_type_that_spark_lacks_names_its_column(name: str) -> None:
    schema = pa.schema({"fine": pa.int32(), "odd": ARRAYS[name][0].type})
    with pytest.raises(SourceError, match=r"column 'odd' has the type .*Spark has none for .*leave the column out"):
        spark_schema(schema)
    assert spark_schema(schema, ["fine"]).fieldNames() == ["fine"]


@pytest.mark.parametrize("name", FINER)
def test_nanoseconds_are_refused_unless_they_are_to_be_cut_off(name: str) -> None:
    batch = pa.record_batch([ARRAYS[name][0]], ["fine"])
    columns = ColumnConverter(batch.schema, spark_schema(batch.schema))
    with pytest.raises(SourceError, match=r"column 'fine' of the type .*lose data.*\.option\('nanoseconds', 'truncat"):
        columns.convert(batch)
    whole = pa.record_batch([pa.array([5_000, None], batch["fine"].type)], ["fine"])
    assert columns.convert(whole)["fine"].cast(pa.int64()).to_pylist() in ([5, None], [5_000, None])


def test_nanoseconds_are_refused_within_lists_too() -> None:
    batch = pa.record_batch({"fine": pa.array([[1000], [1001]], pa.list_(pa.time64("ns")))})
    with pytest.raises(SourceError, match=r"column 'fine' .*lose data"):
        ColumnConverter(batch.schema, spark_schema(batch.schema)).convert(batch)
    taken = ColumnConverter(batch.schema, spark_schema(batch.schema), "truncate").convert(batch)
    assert taken["fine"].flatten().cast(pa.int64()).to_pylist() == [1000, 1000]


def test_nanoseconds_are_cut_off_in_the_hour_that_clocks_show_twice() -> None:
    # 02:30 on 2020-10-25 in Berlin: once in summer time, and once more an hour later
    half_past_two = 1_603_585_800_000_000_000
    instants = [half_past_two + 1, half_past_two + 3_600_000_000_001, None]
    batch = pa.record_batch({"at": pa.array(instants, pa.timestamp("ns", "Europe/Berlin"))})
    taken = ColumnConverter(batch.schema, spark_schema(batch.schema), "truncate").convert(batch)
    assert taken["at"].cast(pa.int64()).to_pylist() == [
        half_past_two // 1000,
        half_past_two // 1000 + 3_600_000_000,
        None,
    ]


def test_instants_before_1970_are_cut_off_downwards() -> None:
    batch = pa.record_batch({"at": pa.array([-1, -1000, -1001], pa.timestamp("ns"))})
    taken = ColumnConverter(batch.schema, spark_schema(batch.schema), "truncate").convert(batch)
    assert taken["at"].cast(pa.int64()).to_pylist() == [-1, -1, -2]


def test_a_value_that_overflows_names_its_column() -> None:
    batch = pa.record_batch({"at": pa.array([2**62], pa.timestamp("s"))})
    with pytest.raises(SourceError, match=r"column 'at' of the type timestamp\[s\] has a value that Spark cannot hold"):
        ColumnConverter(batch.schema, spark_schema(batch.schema)).convert(batch)


@pytest.mark.parametrize(
    ("type_", "ddl", "value"),
    [
        (pa.decimal128(5, -2), "decimal(7,0)", Decimal("12300")),
        (pa.decimal128(3, 5), "decimal(5,5)", Decimal("0.00123")),
        (pa.decimal256(38, 38), "decimal(38,38)", Decimal("1e-38")),
    ],
)
def test_decimals_of_any_scale(type_: pa.DataType, ddl: str, value: Decimal) -> None:
    written = pa.array([value, None], type_ if type_.scale <= type_.precision else pa.decimal128(5, type_.scale))
    batch = pa.record_batch([written.view(type_)], ["d"])
    schema = spark_schema(batch.schema)
    assert schema.simpleString() == f"struct<d:{ddl}>"
    assert ColumnConverter(batch.schema, schema).convert(batch)["d"].to_pylist() == [value, None]


def test_types_of_spark_are_not_copied() -> None:
    batch = pa.record_batch(
        {
            "n": pa.array([1, None, 3]),
            "text": pa.array(["a", None, "c"]),
            "items": pa.array([[1], None, []], pa.list_(pa.int64())),
            "at": pa.array([1, 2, 3], pa.timestamp("us", "Asia/Tokyo")),
        }
    )
    taken = ColumnConverter(batch.schema, spark_schema(batch.schema)).convert(batch)
    for name in batch.schema.names:
        here, there = ([one and one.address for one in array.buffers()] for array in (batch[name], taken[name]))
        assert here == there


def test_lists_and_maps_of_slices_with_nulls_in_between() -> None:
    lists = pa.array([[1], None, [2, None, 3], [], [4]], pa.large_list(pa.uint8()))
    maps = pa.array([[(1, 2)], None, [(3, None), (4, 5)], [], [(6, 7)]], pa.map_(pa.uint8(), pa.uint8()))
    batch = pa.record_batch({"l": lists, "m": maps, "s": pa.StructArray.from_arrays([lists, maps], ["l", "m"])})
    columns = ColumnConverter(batch.schema, spark_schema(batch.schema))
    for at in range(6):
        some = batch.slice(at, 3)
        taken = columns.convert(some)
        taken.validate(full=True)
        assert taken.to_pylist() == some.to_pylist()


def with_nulls() -> tuple[pa.RecordBatch, pa.RecordBatch]:
    """Return a batch whose columns have nulls that the schema forbids, and one whose nulls lie below another null."""
    null, number = np.array([False, True, False]), pa.field("v", pa.int64(), nullable=False)
    numbers = pa.array(np.array([1, 7777, 3]), mask=null)
    keys = pa.array(np.array([0, 3, 1], np.int32), mask=null)
    words, above, maps = pa.array(["x", "y", "z"]), pa.array(null), pa.map_(pa.string(), number)
    structs = pa.StructArray.from_arrays([numbers], fields=[number])
    forbidden = {
        "number": numbers,
        "key": pa.DictionaryArray.from_arrays(keys, pa.array([5, 6]), safe=False),
        "field": structs,
        "element": pa.ListArray.from_arrays([0, 1, 1, 3], numbers, pa.list_(number)),
        "item": pa.MapArray.from_arrays([0, 1, 1, 3], words, numbers, maps),
        "deep": pa.ListArray.from_arrays([0, 1, 1, 3], structs, pa.list_(pa.field("s", structs.type, nullable=False))),
    }
    sound = {
        "field": pa.StructArray.from_arrays([numbers], fields=[number], mask=above),
        "element": pa.ListArray.from_arrays([0, 1, 2, 3], numbers, pa.list_(number), mask=above),
        "item": pa.MapArray.from_arrays([0, 1, 2, 3], words, numbers, type=maps, mask=above),
    }
    fields = [pa.field(name, array.type, name not in ("number", "key")) for name, array in forbidden.items()]
    return pa.record_batch([*forbidden.values()], schema=pa.schema(fields)), pa.record_batch(sound)


def test_nulls_of_what_has_none_by_its_schema_name_their_column() -> None:
    forbidden, sound = with_nulls()
    for name in forbidden.schema.names:
        one = forbidden.select([name])
        columns = ColumnConverter(one.schema, spark_schema(one.schema))
        with pytest.raises(SourceError, match=f"column '{name}' has nulls, and its schema says that it has none"):
            columns.convert(one)
        assert columns.convert(one.slice(0, 1)).num_rows == 1
    columns = ColumnConverter(sound.schema, spark_schema(sound.schema))
    for some in (sound, sound.slice(1), sound.slice(0, 2)):
        assert columns.convert(some).to_pylist() == some.to_pylist()


@pytest.mark.usefixtures("spark")  # which parses DDL
def test_columns_come_in_the_order_in_which_they_are_wanted() -> None:
    batch = pa.record_batch({"a": [1], "b": ["x"], "c": [2.0]})
    wanted: Any = StructType.fromDDL("c double, a bigint")
    taken = ColumnConverter(batch.schema, wanted).convert(batch)
    assert taken.to_pydict() == {"c": [2.0], "a": [1]}
    assert taken.schema.names == ["c", "a"]


@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize(
    ("ddl", "message"),
    [
        ("n int", "column 'n' is bigint, not int: read it as it is and cast it in Spark; or load it again"),
        ("n bigint not null", "column 'n' is bigint, not bigint without nulls"),
        ("items array<int>", "column 'items' is array<bigint>, not array<int>"),
        ("at timestamp_ntz", "column 'at' is timestamp, not timestamp_ntz"),
    ],
)
def test_another_type_than_there_is_names_its_column(ddl: str, message: str) -> None:
    schema = pa.schema({"n": pa.int64(), "items": pa.list_(pa.int64()), "at": pa.timestamp("us", "UTC")})
    wanted: Any = StructType.fromDDL(ddl)
    with pytest.raises(SourceError, match=re.escape(message)):
        ColumnConverter(schema, wanted)


@pytest.mark.usefixtures("spark")  # which parses DDL
def test_what_never_is_null_may_be_read_as_if_it_could_be() -> None:
    schema = pa.schema(
        [
            pa.field("n", pa.int32(), nullable=False),
            pa.field("l", pa.list_(pa.field("item", pa.int32(), nullable=False)), nullable=False),
        ]
    )
    batch = pa.record_batch([pa.array([1], pa.int32()), pa.array([[2]], schema.field("l").type)], schema=schema)
    assert spark_schema(schema).fields[0].nullable is False
    wanted: Any = StructType.fromDDL("n int, l array<int>")
    taken = ColumnConverter(schema, wanted).convert(batch)
    assert taken.to_pylist() == [{"n": 1, "l": [2]}]
    assert taken.schema.field("l").type.value_field.nullable


def test_columns_that_are_not_there_or_there_twice_are_named() -> None:
    schema = pa.schema([("a", pa.int32()), ("b", pa.int32()), ("b", pa.int64())])
    with pytest.raises(ColumnNotFound, match="no column 'x'; there are a, b, b"):
        spark_schema(schema, ["x"])
    with pytest.raises(SourceError, match="more than one column 'b'"):
        spark_schema(schema)
    with pytest.raises(SourceError, match="more than one column 'a'"):
        spark_schema(schema, ["a", "a"])
    assert spark_schema(schema, ["a"]).simpleString() == "struct<a:int>"


def test_fields_that_a_struct_lacks_are_named() -> None:
    struct = pa.struct({"a": pa.int32(), "b": pa.int32()})
    assert [*field_places(struct, pa.struct({"b": pa.int32(), "a": pa.int32()}))] == [1, 0]
    with pytest.raises(ColumnNotFound, match="no field 'c'; there are a, b"):
        field_places(struct, pa.struct({"a": pa.int32(), "c": pa.int32()}))


def test_only_two_things_can_become_of_nanoseconds() -> None:
    with pytest.raises(OptionError, match="refuse or truncate, not 'round'"):
        ColumnConverter(pa.schema([]), StructType([]), "round")
