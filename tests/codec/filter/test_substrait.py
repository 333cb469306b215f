"""Encoded filters: they pass the same rows, leave out no batch with such a row, and are safe for any bytes."""

from __future__ import annotations

import math
import random
from contextlib import suppress
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.substrait as substrait
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dissociated.codec.batches import BatchReader
from dissociated.codec.columns import filter_batches
from dissociated.codec.filter import protobuf, statistics
from dissociated.codec.filter.pruning import may_pass, whole_batches
from dissociated.codec.filter.row_filter import RowFilter
from dissociated.codec.filter.statistics import Bounds, Statistics, StatisticsCollector, read_statistics
from dissociated.codec.filter.substrait import encode_filter, parse_filter
from dissociated.codec.split import batches as batches_of
from dissociated.errors import ColumnNotFound, FormatError, OptionError
from dissociated.format.encapsulated import end_of_stream
from support.helpers import case

#: A pool that knows its largest size. It lives as long as memory that it has allocated.
COUNTING_POOL = pa.proxy_memory_pool(pa.default_memory_pool())
NAN, INF = math.nan, math.inf
MOMENT = datetime(2024, 2, 29, 12)
VALUES: dict[str, tuple[pa.DataType, list[Any]]] = {
    "flag": (pa.bool_(), [True, False]),
    "small": (pa.int8(), [-128, -1, 0, 1, 127]),
    "number": (pa.int64(), [-(2**63), -1, 0, 1, 2**53 + 1, 2**63 - 1]),
    "unsigned": (pa.uint32(), [0, 1, 2**32 - 1]),
    "single": (pa.float32(), [NAN, -INF, -0.0, 0.0, 0.5, INF]),
    "double": (pa.float64(), [NAN, -INF, -0.0, 0.0, 0.1, 0.5, INF]),
    "decimal": (pa.decimal128(9, 2), [Decimal("-1.50"), Decimal("0.00"), Decimal("1.25")]),
    "text": (pa.string(), ["", "a", "b", "ä"]),
    "bytes": (pa.binary(), [b"", b"a", b"\xff"]),
    "day": (pa.date32(), [date(1969, 12, 31), date(2024, 2, 29)]),
    "clock": (pa.time64("us"), [time(0), time(23, 59)]),
    "local": (pa.timestamp("us"), [MOMENT, MOMENT.replace(year=1960)]),
    "zone": (pa.timestamp("us", "Europe/Berlin"), [MOMENT.replace(tzinfo=UTC), MOMENT.replace(year=1960, tzinfo=UTC)]),
}
SCHEMA = pa.schema([(name, type_) for name, (type_, _) in VALUES.items()])
SIZE = 20_000  # rows of a batch that has statistics
#: The number of the field `referred_expr` of Substrait's message ExtendedExpression.
REFERRED_EXPRESSIONS = 3
COMPARE = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__")


def leaf(name: str, how: str, value: Any) -> pc.Expression:
    if how == "in":
        return pc.field(name).isin(pa.array([value, VALUES[name][1][0]], VALUES[name][0]))
    if how == "in, or null":  # in DuckDB's encoding
        found = pc.field(name).isin(pa.array([value, VALUES[name][1][0]], VALUES[name][0]))
        return pc.if_else(pc.field(name).is_valid(), found, pa.scalar(None, pa.bool_()))
    if how in COMPARE:
        return getattr(pc.field(name), how)(pa.scalar(value, VALUES[name][0]))
    return {"null": pc.field(name).is_null(), "valid": pc.field(name).is_valid(), "known": pc.is_valid(pc.field(name))}[
        how
    ]


leaves = st.sampled_from([*VALUES]).flatmap(
    lambda name: st.builds(
        leaf,
        st.just(name),
        st.sampled_from([*COMPARE, *COMPARE, "in", "in, or null", "null", "valid", "known"]),
        st.sampled_from([*VALUES[name][1], None]),
    )
)
expressions = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(lambda a, b: a & b, inner, inner),
        st.builds(lambda a, b: a | b, inner, inner),
        st.builds(lambda a: ~a, inner),
    ),
    max_leaves=6,
)


def tables(seed: int) -> list[pa.RecordBatch]:
    """Return a few batches of few rows, so that bounds are narrow. Hypothesis would take long to draw them."""
    chance = random.Random(seed)

    def batch(rows: int) -> pa.RecordBatch:
        columns = [
            pa.array([chance.choice((*values, None)) for _ in range(rows)], type_) for type_, values in VALUES.values()
        ]
        return pa.record_batch(columns, schema=SCHEMA)

    return [batch(chance.randrange(4)) for _ in range(chance.randint(1, 4))]


def everything(batches: list[pa.RecordBatch]) -> Statistics:
    """Return statistics of all columns as they are read behind a segment, also for types that Python does not write."""
    collector = StatisticsCollector(SCHEMA)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "LEAST_ROWS", 1)
        for batch in batches:
            collector.add(batch)
    sizes = [batch.num_rows for batch in batches]
    known = collector.statistics() or Statistics.unknown(sizes)
    for number, name in enumerate(SCHEMA.names):
        if name in ("flag", "decimal", "text", "bytes"):
            found = [pc.min_max(batch.column(number)) for batch in batches]
            least, most = ([one[what].as_py() for one in found] for what in ("min", "max"))
            nulls = pa.array([batch.column(number).null_count for batch in batches], pa.int64())
            type_ = SCHEMA.field(number).type
            known.bounds[number] = Bounds(nulls, pa.array(least, type_), pa.array(most, type_))
    read = read_statistics(end_of_stream() + known.encode(), 0, SCHEMA, sizes)
    assert read is not None
    assert read.bounds.keys() == known.bounds.keys()
    return read


@given(expressions, st.integers(0, 2**32).map(tables))
def test_what_travels_means_the_same_and_leaves_out_no_batch_that_has_a_row(
    expression: pc.Expression, batches: list[pa.RecordBatch]
) -> None:
    rows = RowFilter.bind(expression, SCHEMA)
    encoded = encode_filter(rows, SCHEMA)
    has_set = "is_in" in str(expression)
    if encoded is None:
        assert has_set or any(value in str(expression) for value in ("null", "true", "false"))
        return
    received = parse_filter(encoded)
    there, columns = received.bind(SCHEMA)
    known = everything(batches)
    bounds = {at: known.bounds[column] for at, column in enumerate(columns) if column in known.bounds}
    passing = may_pass(received.tree, known.num_rows, bounds).to_pylist()
    whole = whole_batches(received.tree, known, columns)
    for batch, may, is_whole in zip(batches, passing, whole, strict=True):
        mask = rows.mask(batch)
        passes = there.at_columns(columns).mask(batch)
        assert passes.fill_null(False).equals(mask.fill_null(False)) if has_set else passes.equals(mask)
        assert may or not mask.true_count
        assert not is_whole or mask.true_count == batch.num_rows
        assert may is False or batch.num_rows


@pytest.mark.parametrize("type_", [pa.large_string(), pa.large_binary(), pa.uint8(), pa.date64()])
def test_a_null_travels_to_a_column_of_its_type(type_: pa.DataType) -> None:
    schema = pa.schema([("c", type_), ("flag", pa.bool_())])
    for expression in (
        pc.field("c") == pa.scalar(None, type_),
        (pc.field("c") < pa.scalar(None, type_)) | pc.field("flag"),
    ):
        encoded = encode_filter(RowFilter.bind(expression, schema), schema)
        assert encoded is not None
        rows, columns = parse_filter(encoded).bind(schema)
        batch = pa.record_batch([pa.nulls(2, type_), pa.array([True, False])], schema=schema)
        assert rows.at_columns(columns).mask(batch).to_pylist() in ([None, None], [True, None])


def test_which_sets_of_values_travel() -> None:
    def travels(expression: pc.Expression) -> bool:
        return encode_filter(RowFilter.bind(expression, SCHEMA), SCHEMA) is not None

    number, text = pc.field("number"), pc.field("text")
    some = number.isin(list(range(400)))
    assert all(map(travels, (some, some & (text > "a"), some | text.isin(["a", "b) ("]))))
    assert travels(pc.field("unsigned").isin(pa.array([1, 2**32 - 1], pa.uint32())))
    assert travels(some & (pc.field("double") > 0.5) & text.is_valid() | pc.field("double").is_nan())
    others = (~some, pc.equal(some, pc.scalar(False)), some.is_null(), number.isin([1, None]))
    assert not any(map(travels, (*others, number.isin(list(range(600))), pc.field("double").isin([0.5]))))
    assert not travels(pc.field("unsigned").isin([1]))  # libarrow makes int64 of it
    with pytest.raises(FormatError, match="a set test whose arguments"):
        parse_filter(bytes.fromhex("1a040a024200"))


def test_moments_of_other_units_and_zones() -> None:
    """Filter timestamps of other units. pyarrow writes all as microseconds, with wrong values if they do not fit."""

    def moment(value: int) -> pa.Scalar:
        return pa.array([value]).view(type_)[0]

    t = pc.field("t")
    for type_ in (pa.timestamp("s"), pa.timestamp("s", "UTC"), pa.timestamp("ms", "Europe/Berlin")):
        schema = pa.schema([("t", type_)])
        for far in (2**62 + 5, -(2**62), 2**63 - 1):
            for expression in (t > moment(far), t == moment(far), t.isin(pa.array([far]).view(type_))):
                assert encode_filter(RowFilter.bind(expression, schema), schema) is None
        collector = StatisticsCollector(schema)
        for first in (0, SIZE):
            collector.add(pa.record_batch([pa.array(range(first, first + SIZE)).view(type_)], schema=schema))
        known = collector.statistics()
        assert known is not None
        encoded = encode_filter(RowFilter.bind(t > moment(SIZE), schema), schema)
        assert encoded is not None
        assert may_pass(parse_filter(encoded).tree, known.num_rows, known.bounds).to_pylist() == [False, True]


def test_a_set_that_is_printed_within_a_letter() -> None:
    texts = ["\N{SNOWMAN}" * length for length in range(1, 60)]
    table = pa.table({"text": [*texts, "a"], "n": range(60)})
    expression = pc.field("text").isin(texts)
    with pytest.raises(UnicodeDecodeError):
        str(expression)
    for wanted in (expression, ("text", "in", texts)):
        rows = RowFilter.bind(wanted, table.schema)
        assert encode_filter(rows, table.schema) is None
        assert rows.mask(table.to_batches()[0].select([*rows.columns])).true_count == 59
    with pytest.raises(ColumnNotFound):
        RowFilter.bind(expression, pa.schema([("n", pa.int64())]))


def test_batches_are_left_out_or_pass_as_a_whole() -> None:
    """Decide about batches by their bounds, which the test above does not notice."""
    batches = [
        pa.record_batch({"n": pa.array(range(first, first + SIZE), pa.int64())}) for first in (0, SIZE, 2 * SIZE)
    ]
    batches.append(pa.record_batch({"n": pa.nulls(SIZE, pa.int64())}))
    collector = StatisticsCollector(batches[0].schema)
    for batch in batches:
        collector.add(batch)
    known = collector.statistics()
    assert known is not None
    n = pc.field("n")
    for expression, expected, whole in (
        (n < SIZE, [0], [0]),
        (n <= SIZE, [0, 1], [0]),
        (n >= 3 * SIZE - 1, [2], []),
        (n > SIZE - 1, [1, 2], [1, 2]),
        ((n == 5) | (n == 2 * SIZE), [0, 2], []),
        ((n < 0) | (n < 2 * SIZE), [0, 1], [0, 1]),
        ((n > 5) & (n < 7), [0], []),
        ((n >= SIZE) & n.is_valid(), [1, 2], [1, 2]),
        (n.is_null(), [3], [3]),
        (~n.is_null(), [0, 1, 2], [0, 1, 2]),
        (n.is_valid(), [0, 1, 2], [0, 1, 2]),
        (n != 10**12, [0, 1, 2], [0, 1, 2]),
        (n != 5, [0, 1, 2], [1, 2]),
        (n > pa.scalar(None, pa.int64()), [], []),
    ):
        encoded = encode_filter(RowFilter.bind(expression, batches[0].schema), batches[0].schema)
        assert encoded is not None, expression
        tree = parse_filter(encoded).tree
        assert [number for number, passes in enumerate(whole_batches(tree, known, [0])) if passes] == whole, expression
        passing = may_pass(tree, known.num_rows, known.bounds).to_pylist()
        if expected:
            assert [number for number, may in enumerate(passing) if may] == expected, expression


def refused() -> dict[str, bytes]:
    """Return filters that pyarrow would evaluate, and bytes that are no filter."""
    schema = pa.schema([("n", pa.int64()), ("s", pa.string())])
    n = pc.field("n")
    some = {
        "arithmetic": n + 1 > 5,
        "text": pc.starts_with(pc.field("s"), pattern="a"),
        "choice": pc.if_else(n > 1, True, False),
    }
    made = {name: bytes(substrait.serialize_expressions([one], ["x"], schema)) for name, one in some.items()}
    encoded = encode_filter(RowFilter.bind(~(n > 1), schema), schema)
    assert encoded is not None
    made["deep"] = nested(encoded, 40)
    made["two"] = bytes(substrait.serialize_expressions([n > 1, n > 2], ["x", "y"], schema))
    return {**made, "none": b"", "noise": b"\xff" * 100, "large": bytes(1 << 15)}


def nested(encoded: bytes, depth: int) -> bytes:
    """Return the negated filter `encoded` within `depth` more negations."""
    fields = [*protobuf.fields(encoded)]
    expression = bytes(next(value for one, value in fields if one == REFERRED_EXPRESSIONS))
    ((_, root),) = [one for one in protobuf.fields(expression) if one[0] == 1]
    ((_, call),) = protobuf.fields(root)
    denial = b"".join(protobuf.encode_field(one, bytes(value)) for one, value in protobuf.fields(call) if one == 3)
    anchor = bytes([1 << 3, protobuf.number([*protobuf.fields(call)], 1)])
    inner = bytes(root)
    for _ in range(depth):
        inner = protobuf.encode_field(3, anchor + denial + protobuf.encode_field(4, protobuf.encode_field(3, inner)))
    rest = b"".join(protobuf.encode_field(one, bytes(value)) for one, value in fields if one != REFERRED_EXPRESSIONS)
    return rest + protobuf.encode_field(
        REFERRED_EXPRESSIONS, protobuf.encode_field(1, inner) + protobuf.encode_field(3, b"x")
    )


@pytest.mark.parametrize("what", ["arithmetic", "text", "choice", "deep", "two", "none", "noise", "large"])
def test_other_expressions_are_refused(what: str) -> None:
    with pytest.raises(FormatError):
        parse_filter(refused()[what])


def test_denials_are_counted_as_libarrow_does() -> None:
    schema = pa.schema([("n", pa.int64())])
    encoded = encode_filter(RowFilter.bind(~(pc.field("n") > 1), schema), schema)
    assert encoded is not None
    rows, _ = parse_filter(nested(encoded, 11)).bind(schema)
    assert rows.mask(pa.record_batch({"n": [1, 2, None]})).to_pylist() == [False, True, None]


def test_what_substrait_would_change_does_not_travel() -> None:
    """Evaluate such filters in the client: Substrait turns `is_in` into comparisons, which differ for nulls and NaN."""
    number, double = pc.field("number"), pc.field("double")
    for expression in (number.isin([1, None]), ~number.isin([1]), double.is_null(nan_is_null=True), number > 0.5):
        assert encode_filter(RowFilter.bind(expression, SCHEMA), SCHEMA) is None


@pytest.mark.parametrize("seed", range(3))
def test_damaged_filters_harm_nobody(seed: int) -> None:
    chance = random.Random(seed)
    expression = (pc.field("number") > 5) & ((pc.field("text") == "a") | ~(pc.field("double") <= 0.5))
    encoded = encode_filter(RowFilter.bind(expression, SCHEMA), SCHEMA)
    assert encoded is not None
    (batch,) = SCHEMA.empty_table().to_batches() or [pa.RecordBatch.from_pylist([], SCHEMA)]
    read = 0
    for _ in range(700):
        damaged = bytearray(encoded)
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(damaged))
            damaged[at] = chance.choice((0, 1, 0x7F, 0x80, 0xFF, damaged[at] ^ 1 << chance.randrange(8)))
        if chance.random() < 0.2:
            del damaged[chance.randrange(len(damaged)) :]
        try:
            rows, columns = parse_filter(bytes(damaged)).bind(SCHEMA)
        except FormatError:
            continue
        with suppress(OptionError):
            rows.at_columns(columns).mask(batch)
        read += 1
    assert read < 700


def test_a_filter_that_passes_nothing_still_yields_signs_of_life() -> None:
    """Yield batches without rows while a filter passes nothing for long. By default none are yielded."""
    batches = [pa.record_batch({"n": [1]})] * 3
    for alive, count in ((0.0, 3), (1e9, 0)):
        reader = pa.RecordBatchReader.from_batches(batches[0].schema, batches)
        nothing = RowFilter.bind(("n", ">", 5), batches[0].schema)
        assert [one.num_rows for one in filter_batches(reader, nothing.mask, [0], keepalive=alive)] == [0] * count


def test_many_batches_at_hand_are_filtered_like_each_alone() -> None:
    large = {42: 65_536, 44: 65_530, 900: 1, 901: 65_537}  # up to 65,536 rows are filtered together
    pairs = []
    for number in range(1_100):
        rows = large.get(number, number % 4)
        first = max(0, rows - 3)  # rows, of which only `scalar(True)` lets any pass
        kinds = pa.array([0] * first + [0, 1, None], pa.int8())
        columns = {
            "n": pa.array([1_000] * first + [number, None, number + 1]),
            "kind": pa.DictionaryArray.from_arrays(kinds, ["a", "bc"[number % 2]]),
            "day": pa.array([1] * first + [1, None, 3], pa.int32()).cast(pa.date32()),
            "view": pa.array(["x"] * first + [f"text {number}", "x", None], pa.string_view()),
        }
        batch = pa.record_batch(columns)[:rows]
        pairs.append((batch, pa.KeyValueMetadata({"number": str(number)}) if number % 5 == 0 else None))
    schema = pairs[0][0].schema
    for condition in (
        ("n", "<", 700),
        ("kind", "in", ["c"]),
        [("day", "is null"), ("n", "is null")],
        pc.field("view").is_null(),
        pc.scalar(True),
        pc.scalar(False),
    ):
        with case(condition):
            mask_of = RowFilter.bind(condition, schema).mask
            alone, together = (
                [
                    *batches_of(
                        filter_batches(BatchReader(schema, iter(pairs)), mask_of, [0, 3, 1], never_blocks=never_blocks)
                    )
                ]
                for never_blocks in (False, True)
            )
            assert alone == together


def test_batches_at_hand_are_not_copied_without_limit() -> None:
    """Filter batches that are too large for one array of their rows, and batches that are too large for the memory."""
    struct = pa.record_batch({"n": range(1_000), "s": [{"a": "x" * 40_000}] * 1_000})
    text = pa.record_batch({"n": range(100), "s": ["y" * 20_000] * 100})
    usual = pa.default_memory_pool()
    pa.set_memory_pool(COUNTING_POOL)
    try:
        for batch, count, condition in (
            (struct, 66, ("s", "is null")),
            (text, 40, ("s", "=", "y")),
            (text[:3], 1_000, ("s", "=", "y")),
        ):
            rows = RowFilter.bind(condition, batch.schema)
            reader = BatchReader(batch.schema, iter([(batch, None)] * count))
            assert [*filter_batches(reader, rows.mask, [0], never_blocks=True)] == []
    finally:
        pa.set_memory_pool(usual)
    assert 0 < COUNTING_POOL.max_memory() < 12 << 20
