"""Arrow's integration JSON: the content of a golden file, described without the IPC format.

The format is "JSON test data format" of Arrow's page "Integration Testing". This module packs every buffer from the
numbers and texts in the JSON, and builds every type from its description. libarrow holds the result, but reads none of
the JSON.
"""

from __future__ import annotations

import ctypes
import gzip
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

Json = Mapping[str, Any]

_UNITS = {"SECOND": "s", "MILLISECOND": "ms", "MICROSECOND": "us", "NANOSECOND": "ns"}
_FLOATS = {
    "HALF": (pa.float16(), np.float16),
    "SINGLE": (pa.float32(), np.float32),
    "DOUBLE": (pa.float64(), np.float64),
}
_DECIMALS = {32: pa.decimal32, 64: pa.decimal64, 128: pa.decimal128, 256: pa.decimal256}
_LISTS = {"list": pa.list_, "largelist": pa.large_list, "listview": pa.list_view, "largelistview": pa.large_list_view}
_PLAIN = {
    "null": pa.null(),
    "bool": pa.bool_(),
    "utf8": pa.string(),
    "largeutf8": pa.large_string(),
    "utf8view": pa.string_view(),
    "binary": pa.binary(),
    "largebinary": pa.large_binary(),
    "binaryview": pa.binary_view(),
}
#: The members of an interval by its unit.
_INTERVALS = {
    "DAY_TIME": np.dtype([("days", np.int32), ("milliseconds", np.int32)]),
    "MONTH_DAY_NANO": np.dtype([("months", np.int32), ("days", np.int32), ("nanoseconds", np.int64)]),
}


class Description(NamedTuple):
    """The schema and the batches of a golden file."""

    schema: pa.Schema
    batches: list[pa.RecordBatch]


def read_description(path: Path) -> Description:
    """Return the description in a .json.gz file."""
    with gzip.open(path) as file:
        return describe(json.load(file))


def describe(whole: Json) -> Description:
    """Return the schema and the batches of this JSON. Raise KeyError or ValueError if it is invalid."""
    fields = whole["schema"]["fields"]
    dictionaries = _Dictionaries(fields, whole.get("dictionaries", ()))
    schema = pa.schema([_field(one) for one in fields], metadata=_metadata(whole["schema"]))
    return Description(schema, [_batch(schema, fields, one, dictionaries) for one in whole["batches"]])


def _batch(schema: pa.Schema, fields: Sequence[Json], described: Json, dictionaries: _Dictionaries) -> pa.RecordBatch:
    columns = [_array(*pair, dictionaries) for pair in zip(fields, described["columns"], strict=True)]
    if any(len(column) != described["count"] for column in columns):
        raise ValueError(f"a batch of {described['count']} rows has columns of {[len(column) for column in columns]}")
    rows = pa.array([{}] * described["count"], pa.struct([]))
    if columns:
        rows = pa.StructArray.from_arrays(columns, [str(number) for number in range(len(columns))])
    # The import assigns the final types: no integer stands for an interval any more.
    batch = pa.record_batch(_Exported(schema.__arrow_c_schema__(), rows.__arrow_c_array__()[1]))
    batch.validate()
    return batch


# Types


def _metadata(described: Json) -> pa.KeyValueMetadata | None:
    pairs = [(pair["key"], pair["value"]) for pair in described.get("metadata") or ()]
    return pa.KeyValueMetadata(pairs) if pairs else None


def _field(described: Json) -> pa.Field:
    type_ = _value_type(described)
    if encoding := described.get("dictionary"):
        type_ = pa.dictionary(_type(encoding["indexType"], ()), type_, encoding["isOrdered"])
    return pa.field(described["name"], type_, described["nullable"], _metadata(described))


def _value_type(described: Json) -> pa.DataType:
    """Return the type of a field, or of its values if the field has a dictionary."""
    return _type(described["type"], [_field(child) for child in described["children"]])


def _type(type_: Json, children: Sequence[pa.Field]) -> pa.DataType:
    match type_["name"]:
        case name if name in _PLAIN:
            return _PLAIN[name]
        case "int" | "floatingpoint" | "decimal" | "fixedsizebinary" as name:
            return _number(name, type_)
        case "date":
            return {"DAY": pa.date32(), "MILLISECOND": pa.date64()}[type_["unit"]]
        case "time":
            return {32: pa.time32, 64: pa.time64}[type_["bitWidth"]](_UNITS[type_["unit"]])
        case "timestamp":
            return pa.timestamp(_UNITS[type_["unit"]], type_.get("timezone") or None)
        case "duration":
            return pa.duration(_UNITS[type_["unit"]])
        case "interval":
            return _interval(type_["unit"])
        case name if name in _LISTS:
            return _LISTS[name](*children)
        case "fixedsizelist":
            return pa.list_(*children, type_["listSize"])
        case "struct":
            return pa.struct(children)
        case "map":
            key, value = children[0].type
            # libarrow always uses these names, and ignores the names in the file
            return pa.map_(key.with_name("key"), value.with_name("value"), type_["keysSorted"])
        case "union":
            return pa.union(children, type_["mode"].lower(), type_["typeIds"])
        case "runendencoded":
            run_ends, values = children
            return pa.run_end_encoded(run_ends.type, values.type)
        case name:
            raise ValueError(f"unknown type {name!r}")


def _number(name: str, type_: Json) -> pa.DataType:
    match name:
        case "int":
            return pa.from_numpy_dtype(_integer(type_))
        case "floatingpoint":
            return _FLOATS[type_["precision"]][0]
        case "decimal":
            return _DECIMALS[type_.get("bitWidth", 128)](type_["precision"], type_["scale"])
    return pa.binary(type_["byteWidth"])


def _integer(type_: Json) -> np.dtype:
    return np.dtype(f"{'i' if type_['isSigned'] else 'u'}{type_['bitWidth'] // 8}")


def _interval(unit: str) -> pa.DataType:
    """Return an interval type. pyarrow can make one of the three; the others are imported by the C data interface."""
    if unit == "MONTH_DAY_NANO":
        return pa.month_day_nano_interval()
    schema = _CSchema(format={"YEAR_MONTH": b"tiM", "DAY_TIME": b"tiD"}[unit], release=_released)
    return pa.field(_Exported(_new_capsule(ctypes.addressof(schema), b"arrow_schema", None))).type


class _Exported:
    """A schema, and an array, in capsules of the C data interface, as pyarrow imports them."""

    def __init__(self, schema: object, array: object = None) -> None:
        self._schema, self._array = schema, array

    def __arrow_c_schema__(self) -> object:
        return self._schema

    def __arrow_c_array__(self, requested_schema: object = None) -> tuple[object, object]:
        return self._schema, self._array


_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
_Release = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _CSchema(ctypes.Structure):
    """`struct ArrowSchema` of "The Arrow C data interface"."""

    _fields_ = [
        ("format", ctypes.c_char_p),
        ("name", ctypes.c_char_p),
        ("metadata", ctypes.c_char_p),
        ("flags", ctypes.c_int64),
        ("n_children", ctypes.c_int64),
        ("children", ctypes.c_void_p),
        ("dictionary", ctypes.c_void_p),
        ("release", _Release),
        ("private_data", ctypes.c_void_p),
    ]


@_Release  # type: ignore[untyped-decorator]  # ctypes does not say
def _released(address: int) -> None:
    _CSchema.from_address(address).release = _Release()


# Values


class _Dictionaries:
    """The values of each dictionary, built on first use, because they may refer to other dictionaries."""

    def __init__(self, fields: Iterable[Json], batches: Iterable[Json]) -> None:
        self._fields = {field["dictionary"]["id"]: field for field in _below(fields) if field.get("dictionary")}
        self._batches = {batch["id"]: batch["data"] for batch in batches}
        self._made: dict[int, pa.Array] = {}

    def __getitem__(self, number: int) -> pa.Array:
        if number not in self._made:
            (column,) = self._batches[number]["columns"]
            self._made[number] = _plain_array(self._fields[number], column, self)
        return self._made[number]


def _below(fields: Iterable[Json]) -> Iterator[Json]:
    for field in fields:
        yield field
        yield from _below(field["children"])


def _array(field: Json, column: Json, dictionaries: _Dictionaries) -> pa.Array:
    encoding = field.get("dictionary")
    if not encoding:
        return _plain_array(field, column, dictionaries)
    indices = [_validity(column), _fixed(encoding["indexType"], column["DATA"])]
    dictionary = dictionaries[encoding["id"]]
    return pa.DictionaryArray.from_buffers(_field(_stand_in(field)).type, column["count"], indices, dictionary)


def _plain_array(field: Json, column: Json, dictionaries: _Dictionaries) -> pa.Array:
    children = [_array(*pair, dictionaries) for pair in zip(field["children"], column.get("children", ()), strict=True)]
    buffers = _buffers(field["type"], column)
    return pa.Array.from_buffers(_value_type(_stand_in(field)), column["count"], buffers, children=children)


def _stand_in(field: Json) -> Json:
    """Return a field with integers instead of intervals of which pyarrow has no arrays."""
    type_ = field["type"]
    if type_["name"] == "interval" and type_["unit"] != "MONTH_DAY_NANO":
        type_ = {"name": "int", "bitWidth": {"YEAR_MONTH": 32, "DAY_TIME": 64}[type_["unit"]], "isSigned": True}
    return {**field, "type": type_, "children": [_stand_in(child) for child in field["children"]]}


def _buffers(type_: Json, column: Json) -> list[pa.Buffer | None]:
    name = type_["name"]
    match name:
        case "null" | "runendencoded":
            return [None]
        case "union":
            if not all(column.get("VALIDITY", ())):
                raise ValueError("a union has nulls of its own, which no union has since version 5 of the metadata")
            offsets = [_packed(column["OFFSET"], "i4")] if type_["mode"] == "DENSE" else []
            return [None, _packed(column["TYPE_ID"], "i1"), *offsets]
    return [_validity(column), *_contents(name, type_, column)]


def _contents(name: str, type_: Json, column: Json) -> list[pa.Buffer]:
    """Return the buffers after the validity."""
    width = "i8" if name.startswith("large") else "i4"
    match name.removeprefix("large"):
        case "struct" | "fixedsizelist":
            return []
        case "list" | "map":
            return [_offsets(column, width)]
        case "listview":
            return [_packed(column["OFFSET"], width), _packed(column["SIZE"], width)]
        case "utf8" | "binary" as plain:
            return [_offsets(column, width), pa.py_buffer(b"".join(_bytes(plain, one) for one in column["DATA"]))]
        case "utf8view" | "binaryview" as plain:
            views = b"".join(_view(plain, one) for one in column["VIEWS"])
            return [pa.py_buffer(views), *(pa.py_buffer(bytes.fromhex(one)) for one in column["VARIADIC_DATA_BUFFERS"])]
        case _:
            return [_fixed(type_, column["DATA"])]


def _fixed(type_: Json, data: Sequence[Any]) -> pa.Buffer:
    """Return a buffer of values of fixed width."""
    match type_["name"]:
        case "bool":
            return _bits(data)
        case "int":
            return _packed(data, _integer(type_))
        case "floatingpoint":
            return pa.py_buffer(np.array(data, _FLOATS[type_["precision"]][1]))
        case "fixedsizebinary":
            return pa.py_buffer(bytes.fromhex("".join(data)))
        case "decimal":
            size = type_.get("bitWidth", 128) // 8
            return pa.py_buffer(b"".join(int(one).to_bytes(size, "little", signed=True) for one in data))
        case "interval" if type_["unit"] in _INTERVALS:
            members = _INTERVALS[type_["unit"]]
            assert members.fields is not None
            return pa.py_buffer(np.array([tuple(one[key] for key in members.fields) for one in data], members))
        case "interval":
            return _packed(data, "i4")
        case "date":
            return _packed(data, {"DAY": "i4", "MILLISECOND": "i8"}[type_["unit"]])
        case "time":
            return _packed(data, {32: "i4", 64: "i8"}[type_["bitWidth"]])
        case "timestamp" | "duration":
            return _packed(data, "i8")
        case name:
            raise ValueError(f"unknown type {name!r}")


def _validity(column: Json) -> pa.Buffer:
    return _bits(column["VALIDITY"])


def _bits(values: Sequence[int]) -> pa.Buffer:
    return pa.py_buffer(np.packbits(np.array(values, np.bool_), bitorder="little"))


def _packed(integers: Sequence[int | str], dtype: Any) -> pa.Buffer:
    return pa.py_buffer(np.array([int(one) for one in integers], dtype))


def _offsets(column: Json, width: str) -> pa.Buffer:
    return _packed(column["OFFSET"] or [0], width)


def _bytes(name: str, value: str) -> bytes:
    return value.encode() if name.startswith("utf8") else bytes.fromhex(value)


def _view(name: str, view: Json) -> bytes:
    size = view["SIZE"].to_bytes(4, "little")
    if "INLINED" in view:
        return size + _bytes(name, view["INLINED"]).ljust(12, b"\0")
    place = view["BUFFER_INDEX"].to_bytes(4, "little") + view["OFFSET"].to_bytes(4, "little")
    return size + bytes.fromhex(view["PREFIX_HEX"]) + place
