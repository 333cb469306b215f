"""Statistics behind a segment: their bounds hold for any values, and damaged statistics are ignored."""

from __future__ import annotations

import math
import random
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from dissociated.codec.filter import statistics
from dissociated.codec.filter.statistics import Statistics, StatisticsCollector, read_statistics
from dissociated.errors import StoreFull
from dissociated.store.segment import Segment, SegmentWriter
from support.arrow_cases import ARRAYS
from support.arrow_cases import ROWS as ARROW_ROWS

ROWS = 20_000
NAN, INF = math.nan, math.inf


def written(path: Path, batches: list[pa.RecordBatch]) -> Segment:
    with SegmentWriter(path, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return Segment.open(path)


def repeated(values: list[Any], type_: pa.DataType) -> pa.Array:
    return pa.array([values[row % len(values)] for row in range(ROWS)], type_)


COLUMNS: dict[str, tuple[pa.Array, Any, Any]] = {
    "int8": (repeated([-3, 7], pa.int8()), -3, 7),
    "uint64": (repeated([2**64 - 1, 5], pa.uint64()), 5, 2**64 - 1),
    "int64": (repeated([-(2**63), 2**63 - 1], pa.int64()), -(2**63), 2**63 - 1),
    "float32": (repeated([-0.0, 1.5], pa.float32()), 0.0, 1.5),
    "infinite": (repeated([-INF, INF], pa.float64()), -INF, INF),
    "nan": (repeated([1.0, NAN], pa.float64()), None, None),
    "date32": (repeated([-1, 20_000], pa.int32()).view(pa.date32()), None, None),
    "zone": (repeated([-1, 2**40], pa.int64()).view(pa.timestamp("ns", "Europe/Berlin")), None, None),
    "duration": (repeated([-1, 3], pa.int64()).view(pa.duration("us")), None, None),
    "sliced": (pa.array(range(3 * ROWS), pa.int32())[ROWS : 2 * ROWS], ROWS, 2 * ROWS - 1),
}


def test_what_is_known_of_each_batch(tmp_path: Path) -> None:
    batch = pa.record_batch({name: column for name, (column, _, _) in COLUMNS.items()})
    segment = written(tmp_path / "s", [batch, batch[:5], batch[:0], batch])
    found = segment.statistics
    assert found is not None
    assert found.num_rows.to_pylist() == [ROWS, 5, 0, ROWS]
    for number, (name, (column, least, most)) in enumerate(COLUMNS.items()):
        bounds = found.bounds.get(number)
        if name == "nan":
            assert bounds is None
            continue
        assert bounds is not None
        assert bounds.min.type == bounds.max.type == column.type, name
        assert bounds.null_count.to_pylist() == [0, 0, 0, 0]
        if least is not None:
            assert (bounds.min.to_pylist(), bounds.max.to_pylist()) == (
                [least, None, None, least],
                [most, None, None, most],
            )
        assert bounds.min.is_null().to_pylist() == [False, True, True, False], name  # small batches have no bounds
    with pa.ipc.open_stream(tmp_path / "s") as reader:  # any Arrow reader stops before the statistics
        assert reader.read_all().num_rows == 2 * ROWS + 5


def test_bounds_hold_for_every_type(tmp_path: Path) -> None:
    """Compare the bounds also for columns with nulls, whose slots may contain anything."""
    looked_at: set[str] = set()
    for number, (name, arrays) in enumerate(ARRAYS.items()):
        for array in arrays:
            if not len(array) or pa.types.is_nested(array.type):
                continue
            if pa.types.is_dictionary(array.type) or isinstance(array.type, pa.BaseExtensionType):
                continue
            batch = pa.record_batch({"values": pa.concat_arrays([array] * (ROWS // ARROW_ROWS))})
            found = written(tmp_path / f"{number}-{len(looked_at)}-{id(array)}", [batch]).statistics
            if found is None:
                continue
            looked_at.add(name)
            (bounds,) = found.bounds.values()
            values = batch.column(0)
            assert bounds.null_count[0].as_py() == values.null_count, name
            inside = pc.and_(pc.less_equal(bounds.min[0], values), pc.less_equal(values, bounds.max[0]))
            assert pc.all(inside).as_py() in (True, None), name
    assert {"int8", "uint64", "float32", "date32", "time32[s]", "duration[us]"} <= looked_at


def stream(tail: bytes) -> tuple[bytes, int]:
    """Return an IPC stream of a batch of 20,000 rows followed by `tail`, and the end of its last message."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, BATCH.schema) as writer:
        writer.write_batch(BATCH)
    content = sink.getvalue().to_pybytes()
    return content + tail, len(content) - 8


BATCH = pa.record_batch({"n": pa.array(range(ROWS), pa.int64()), "x": np.linspace(0, 1, ROWS)})


def good() -> Statistics:
    collector = StatisticsCollector(BATCH.schema)
    collector.add(BATCH)
    found = collector.statistics()
    assert found is not None
    return found


def test_statistics_that_do_not_fit_are_ignored() -> None:
    content, end = stream(good().encode())
    assert read_statistics(content, end, BATCH.schema, [ROWS]) == good()
    for schema, rows in (
        (BATCH.schema, [ROWS + 1]),
        (BATCH.schema, [ROWS, 0]),
        (pa.schema([("n", pa.int32())]), [ROWS]),
    ):
        assert read_statistics(content, end, schema, rows) is None
    assert read_statistics(content, end - 8, BATCH.schema, [ROWS]) is None
    assert read_statistics(content[:end] + bytes(8) + content[end + 8 :], end, BATCH.schema, [ROWS]) is None
    sink = pa.BufferOutputStream()
    named = pa.record_batch({"num_rows": [ROWS], "0.null_count": [0], "0.min": [0], "0.max": [ROWS]})
    with pa.ipc.new_stream(sink, named.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_batch(named)
    compressed = sink.getvalue().to_pybytes()
    content, end = stream(compressed + len(compressed).to_bytes(8, "little") + statistics.STATISTICS_MAGIC)
    assert read_statistics(content, end, BATCH.schema, [ROWS]) is None


@pytest.mark.parametrize("seed", range(4))
def test_damaged_bytes_harm_nobody(seed: int) -> None:
    """Read damaged statistics as arrays of the right types and lengths, or as nothing."""
    chance = random.Random(seed)
    encoded = good().encode()
    for _ in range(500):
        damaged = bytearray(encoded)
        for _ in range(chance.randint(1, 8)):
            damaged[chance.randrange(len(damaged))] = chance.choice((0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)))
        if chance.random() < 0.3:
            del damaged[chance.randrange(len(damaged)) :]
        content, end = stream(bytes(damaged))
        found = read_statistics(content, end, BATCH.schema, [ROWS])
        for column, bounds in (found.bounds if found else {}).items():
            for one in (bounds.min, bounds.max):
                assert (one.type, len(one)) == (BATCH.schema.field(column).type, 1)
                one.to_pylist()


def test_a_segment_without_room_for_them_is_written_without(tmp_path: Path) -> None:
    for directory in ("staging", "trash"):
        (tmp_path / directory).mkdir()
    sizes = []

    def reserve(_: str, size: int, wish: int) -> int:
        sizes.append(size)
        if size > limit:
            raise StoreFull("there is no room")
        return size

    for limit, there in ((10**9, True), (0, False)):
        limit = limit or sizes[-1] - 1
        path = tmp_path / "staging" / str(there)
        with SegmentWriter(path, BATCH.schema, reserve=reserve) as writer:
            writer.write_batch(BATCH)
        segment = Segment.open(path)
        assert (segment.statistics is not None) is there
        assert [batch for batch, _ in segment.batches()] == [BATCH]


def test_a_thorough_look_takes_text_and_decimals_and_leaves_out_nulls() -> None:
    columns: dict[str, tuple[list[Any], pa.DataType, Any, Any]] = {
        "text": (["b", None, "aé"], pa.string(), "aé", "b"),
        "bytes": ([b"\xff", b"", None], pa.binary(), b"", b"\xff"),
        "long": (["x" * 300, "a"], pa.string(), None, None),
        "short": ([Decimal("1.50"), None, Decimal("-3")], pa.decimal128(18, 2), Decimal("-3.00"), Decimal("1.50")),
        "digits": ([Decimal(10**37), Decimal(-(10**37))], pa.decimal128(38), Decimal(-(10**37)), Decimal(10**37)),
        "flag": ([True, None], pa.bool_(), True, True),
        "number": ([None, 7, 9], pa.int64(), 7, 9),
        "nan": ([None, NAN, 9.0], pa.float64(), None, None),
        "null": ([None], pa.int32(), None, None),
    }
    batch = pa.record_batch({name: repeated(values, type_) for name, (values, type_, _, _) in columns.items()})
    collector = StatisticsCollector(batch.schema, thorough=True)
    for some in (batch[:6], batch, batch):
        collector.add(some)
    found = collector.statistics()
    assert found is not None
    for number, (name, (_, type_, least, most)) in enumerate(columns.items()):
        bounds = found.bounds[number]
        assert bounds.null_count.to_pylist() == [some.column(number).null_count for some in (batch[:6], batch, batch)]
        assert (bounds.min.type, bounds.min[0].as_py(), bounds.max[0].as_py()) == (type_, least, most), name
        # A string column of several values is compared once. Later batches that begin alike have no bounds.
        again = None if name in ("text", "bytes", "digits") else least
        assert [bounds.min[at].as_py() for at in (1, 2)] == [again] * 2, name


def test_decimals_with_more_digits_than_their_type_are_left_out_by_no_filter() -> None:
    words = pa.array([(5).to_bytes(16, "little"), (5 + (1 << 64)).to_bytes(16, "little")], pa.binary(16))
    batch = pa.record_batch({"d": words.view(pa.decimal128(18))})
    collector = StatisticsCollector(batch.schema, thorough=True)
    collector.add(batch)
    found = collector.statistics()
    assert found is None or found.bounds[0].max.to_pylist() == [None]


def test_a_column_of_one_value_for_many_batches_is_known_in_each() -> None:
    collector = StatisticsCollector(pa.schema({"sorted": pa.string()}), thorough=True)
    for value in ["a"] * 20 + ["b"] * 20:
        collector.add(pa.record_batch({"sorted": [value] * 5_000}))
    found = collector.statistics()
    assert found is not None
    assert found.bounds[0].max.to_pylist() == ["a"] * 20 + ["b"] * 20
