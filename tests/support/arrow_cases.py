"""Arrow arrays of every type and shape, with and without nulls, for round-trip tests."""

from __future__ import annotations

import io
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

ROWS = 19  # not a multiple of 8, so that bitmaps end within a byte


class Celsius(pa.ExtensionType):  # type: ignore[misc]  # pyarrow has no types
    """An extension type that libarrow does not know by itself."""

    def __init__(self) -> None:
        super().__init__(pa.float64(), "dissociated.tests.celsius")

    def __arrow_ext_serialize__(self) -> bytes:
        return b"scale=C"

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type: pa.DataType, serialized: bytes) -> Celsius:
        assert serialized == b"scale=C"
        return cls()


def _values(*some: object) -> list[object]:
    """Return ROWS values, cycling through `some`."""
    return [some[index % len(some)] for index in range(ROWS)]


_TEXTS = _values("", "a", "dissociated", "ünïcödé, 漢字 and more than twelve bytes", "12 bytes ok!", "x" * 300)
_BYTES = _values(b"", b"\0", b"\xff\xfe", b"more than twelve bytes, not UTF-8: \x80", b"y" * 300)
_MOMENT = datetime(2024, 2, 29, 23, 59, 59, 999_000)

#: The type and ROWS values of each case. No value is null.
PLAIN: dict[str, tuple[pa.DataType, list[object]]] = {
    "bool": (pa.bool_(), _values(True, False, False, True, True)),
    "int8": (pa.int8(), _values(-128, 0, 127)),
    "int16": (pa.int16(), _values(-(2**15), 0, 2**15 - 1)),
    "int32": (pa.int32(), _values(-(2**31), 0, 2**31 - 1)),
    "int64": (pa.int64(), _values(-(2**63), 0, 2**63 - 1)),
    "uint8": (pa.uint8(), _values(0, 255)),
    "uint16": (pa.uint16(), _values(0, 2**16 - 1)),
    "uint32": (pa.uint32(), _values(0, 2**32 - 1)),
    "uint64": (pa.uint64(), _values(0, 2**64 - 1)),
    "float16": (pa.float16(), _values(*np.array([0.5, -65504.0, 6e-8], np.float16))),
    "float32": (pa.float32(), _values(0.25, -3.4e38, float("inf"))),
    "float64": (pa.float64(), _values(0.1, -1.7e308, float("-inf"), 5e-324)),
    "decimal32": (pa.decimal32(9, 2), _values(Decimal("1234567.89"), Decimal("-0.01"))),
    "decimal64": (pa.decimal64(18, 4), _values(Decimal("12345678901234.5678"), Decimal("-0.0001"))),
    "decimal128": (pa.decimal128(38, 10), _values(Decimal(10**37).scaleb(-10), Decimal("-1e-10"))),
    "decimal256": (pa.decimal256(76, 0), _values(Decimal(10**75), Decimal(-1))),
    "date32": (pa.date32(), _values(date(1, 1, 1), date(1970, 1, 1), date(9999, 12, 31))),
    "date64": (pa.date64(), _values(date(1969, 12, 31), date(2024, 2, 29))),
    "time32[s]": (pa.time32("s"), _values(time(0), time(23, 59, 59))),
    "time32[ms]": (pa.time32("ms"), _values(time(0), time(23, 59, 59, 999_000))),
    "time64[us]": (pa.time64("us"), _values(time(0), time(23, 59, 59, 999_999))),
    "time64[ns]": (pa.time64("ns"), _values(0, 86_399_999_999_999)),
    "timestamp[s]": (pa.timestamp("s"), _values(-1, 0, 2**40)),
    "timestamp[ms]": (pa.timestamp("ms"), _values(_MOMENT)),
    "timestamp[us, UTC]": (pa.timestamp("us", "UTC"), _values(_MOMENT)),
    "timestamp[ns, zone]": (pa.timestamp("ns", "America/New_York"), _values(-1, 2**62)),
    "timestamp[us, offset]": (pa.timestamp("us", "+05:45"), _values(_MOMENT)),
    "duration[s]": (pa.duration("s"), _values(timedelta(days=-1), timedelta(0))),
    "duration[ms]": (pa.duration("ms"), _values(timedelta(milliseconds=1))),
    "duration[us]": (pa.duration("us"), _values(timedelta(microseconds=1))),
    "duration[ns]": (pa.duration("ns"), _values(-1, 2**62)),
    "interval": (pa.month_day_nano_interval(), _values(pa.MonthDayNano([1, -2, 3]), pa.MonthDayNano([0, 0, 0]))),
    "string": (pa.string(), _TEXTS),
    "large_string": (pa.large_string(), _TEXTS),
    "string_view": (pa.string_view(), _TEXTS),
    "binary": (pa.binary(), _BYTES),
    "large_binary": (pa.large_binary(), _BYTES),
    "binary_view": (pa.binary_view(), _BYTES),
    "fixed_size_binary": (pa.binary(3), _values(b"abc", b"\0\0\0", b"\xff\xff\xff")),
    "fixed_size_binary of 0": (pa.binary(0), _values(b"")),
    "list": (pa.list_(pa.int32()), _values([], [1], [2, None, 3])),
    "large_list": (pa.large_list(pa.string()), _values([], ["a"], ["b", None, "ccc"])),
    "list_view": (pa.list_view(pa.int64()), _values([], [1], [2, None, 3])),
    "large_list_view": (pa.large_list_view(pa.int8()), _values([], [1], [2, None, 3])),
    "fixed_size_list": (pa.list_(pa.float32(), 3), _values([1.0, 2.0, 3.0], [None, 0.0, -1.0])),
    "struct": (
        pa.struct([("a", pa.int8()), pa.field("b", pa.string(), metadata={"unit": "m"})]),
        _values({"a": 1, "b": "x"}, {"a": None, "b": None}),
    ),
    "struct without fields": (pa.struct([]), _values({})),
    "map": (pa.map_(pa.string(), pa.int32()), _values([], [("k", 1)], [("k", None), ("l", 2)])),
    "map with sorted keys": (pa.map_(pa.int8(), pa.string(), keys_sorted=True), _values([(1, "a"), (2, "b")])),
    "uuid": (pa.uuid(), _values(bytes(range(16)), bytes(16))),
    "json": (pa.json_(), _values("{}", "[1, 2]")),
    "deep": (
        pa.list_(pa.struct([("m", pa.map_(pa.string(), pa.list_(pa.large_string()))), ("v", pa.string_view())])),
        _values([], [{"m": [("k", ["a", None]), ("l", [])], "v": "a view of more than twelve bytes"}, None]),
    ),
}


def _plain(type_: pa.DataType, values: list[object]) -> tuple[pa.Array, pa.Array]:
    """Return an array of `values`, and a copy in which two of three values are null."""
    storage = type_.storage_type if isinstance(type_, pa.BaseExtensionType) else type_
    holes = [value if index % 3 == 1 else None for index, value in enumerate(values)]
    arrays = pa.array(values, storage), pa.array(holes, storage)
    if storage is type_:
        return arrays
    return tuple(pa.ExtensionArray.from_storage(type_, array) for array in arrays)


def _dictionary(values: pa.Array, indices: pa.DataType, ordered: bool = False) -> tuple[pa.Array, pa.Array]:
    keys = [index % len(values) for index in range(ROWS)]
    holes = [key if index % 4 else None for index, key in enumerate(keys)]
    return tuple(
        pa.DictionaryArray.from_arrays(pa.array(some, indices), values, ordered=ordered) for some in (keys, holes)
    )


def _runs(values: list[object], run_ends: pa.DataType, type_: pa.DataType) -> pa.Array:
    return pa.RunEndEncodedArray.from_arrays(pa.array([3, 4, 11, ROWS], run_ends), pa.array(values, type_))


def _dense_union() -> pa.Array:
    kinds = pa.array([index % 2 * 5 for index in range(ROWS)], pa.int8())
    offsets = pa.array([index // 2 for index in range(ROWS)], pa.int32())
    children = [pa.array(range(ROWS)), pa.array(_TEXTS)]
    return pa.UnionArray.from_dense(kinds, offsets, children, ["n", "s"], [0, 5])


def _sparse_union() -> pa.Array:
    kinds = pa.array([index % 3 for index in range(ROWS)], pa.int8())
    children = [pa.array(_values(1, None)), pa.array(_TEXTS), pa.array(_values([True, None], []))]
    return pa.UnionArray.from_sparse(kinds, children, ["n", "s", "l"])


def _special() -> dict[str, list[pa.Array]]:
    words = pa.array(["alpha", "beta", "gamma"])
    nested, nested_holes = _dictionary(words, pa.int8())
    pairs = pa.StructArray.from_arrays([nested[:3], pa.array([1, None, 3])], ["d", "n"])
    cubes = pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(ROWS * 6, dtype=np.int32).reshape(ROWS, 2, 3))
    return {
        "null": [pa.nulls(ROWS)],
        "dictionary of strings": [*_dictionary(words, pa.int8())],
        "dictionary, ordered": [*_dictionary(words, pa.uint16(), ordered=True)],
        "dictionary of int64, 64-bit indices": [*_dictionary(pa.array([2**40, None, -1]), pa.int64())],
        "dictionary of views": [
            *_dictionary(pa.array(["a", "longer than twelve bytes"], pa.string_view()), pa.int32())
        ],
        "dictionary, empty": [pa.DictionaryArray.from_arrays(pa.nulls(ROWS, pa.int8()), pa.array([], pa.string()))],
        "dictionary within a list": [
            pa.FixedSizeListArray.from_arrays(nested_holes[:18], 2).take(pa.array(_values(0, 8)))
        ],
        "dictionary within a struct": [pa.StructArray.from_arrays([nested, nested_holes], ["a", "b"])],
        "dictionary of a dictionary": [*_dictionary(pairs, pa.int32())],
        "runs of strings": [_runs(["a", None, "b", ""], pa.int32(), pa.string())],
        "runs, 16-bit": [_runs([1, 2, None, 4], pa.int16(), pa.int64())],
        "runs, 64-bit": [_runs([1.5, None, None, 4.0], pa.int64(), pa.float32())],
        "dense union": [_dense_union()],
        "sparse union": [_sparse_union()],
        "union within a struct": [pa.StructArray.from_arrays([_dense_union(), _sparse_union()], ["d", "s"])],
        "extension": [*_plain(Celsius(), _values(21.5, -273.15))],
        "extension of a dictionary": [
            pa.ExtensionArray.from_storage(pa.opaque(nested.type, "words", "tests"), array)
            for array in (nested, nested_holes)
        ],
        "bool8": [*_plain(pa.bool8(), _values(0, 1))],
        "tensors": [cubes],
    }


def _all() -> dict[str, list[pa.Array]]:
    return {**{name: [*_plain(*case)] for name, case in PLAIN.items()}, **_special()}


#: Arrays of ROWS rows by the name of their type: without nulls, and then with nulls if the type allows them.
ARRAYS: dict[str, list[pa.Array]] = _all()


def table_of(rows: int) -> pa.Table:
    """Return a table of three batches, each with `rows` rows of integers and of strings with nulls."""
    names = [None if n % 7 == 0 else f"name {n}" for n in range(3 * rows)]
    whole = pa.table({"n": pa.array(range(3 * rows), pa.int64()), "name": names})
    return pa.Table.from_batches(whole.to_batches(max_chunksize=rows))


def dictionary_batch(*words: str) -> pa.RecordBatch:
    """Return a batch with one dictionary-encoded column of `words`."""
    return pa.record_batch({"d": pa.array(words).dictionary_encode()})


def batches(arrays: list[pa.Array]) -> list[pa.RecordBatch]:
    """Return batches of `arrays`: whole, empty, a slice that starts and ends within a byte, and one row."""
    names = ["full", "holes"][: len(arrays)]
    whole = pa.record_batch(arrays, names)
    return [whole, whole.slice(0, 0), whole.slice(5, 9), whole.slice(ROWS - 1)]


def stream_of(array: pa.Array) -> bytes:
    """Return an IPC stream of one batch with `array`."""
    sink = io.BytesIO()
    batch = pa.record_batch({"x": array})
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue()


def corrupt_parquet(path: Path) -> Path:
    """Return a Parquet file with a readable footer and an unreadable last row group."""
    pq.write_table(pa.table({"n": range(1000)}), path, row_group_size=250, compression="none", use_dictionary=False)
    content = bytearray(path.read_bytes())
    start = pq.read_metadata(path).row_group(3).column(0).data_page_offset
    content[start : start + 64] = b"\xff" * 64
    path.write_bytes(content)
    return path
