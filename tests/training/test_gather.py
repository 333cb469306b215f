"""Rows of record batches whose arrays lie at any address, in any order."""

from __future__ import annotations

import mmap
import time
from decimal import Decimal
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dissociated.training.columns import ArrayColumns
from dissociated.training.gather import Gatherer

LENGTHS = [5, 1, 7]
ROWS = np.array([12, 0, 5, 4, 6, 11, 0])


def shifted(array: pa.Array, by: int) -> pa.Array:
    """Return the array with its values `by` bytes after an aligned address."""
    values = array.buffers()[1]
    memory = pa.allocate_buffer(values.size + by)
    np.frombuffer(memory, np.uint8)[by:] = np.frombuffer(values, np.uint8)
    return pa.Array.from_buffers(array.type, len(array), [None, memory.slice(by)])


@pytest.mark.parametrize("shift", [0, 4, 1])
@pytest.mark.parametrize("matrices", [{}, {"matrix": ["n", "x"]}])
def test_numbers_are_gathered_from_any_address(shift: int, matrices: dict[str, list[str]]) -> None:
    numbers = range(sum(LENGTHS))
    n = pa.array([3 * number for number in numbers], pa.int64())
    x = pa.array([5 * number for number in numbers], pa.int64())
    money = pa.array([Decimal(number) / 4 for number in numbers], pa.decimal128(9, 2))
    table = pa.record_batch({"n": n, "x": x, "money": money})
    batches, start = [], 0
    for length in LENGTHS:
        part = table.slice(start, length)
        # Columns of one batch are moved, so that their neighbours are not.
        for at, name in enumerate(["n", "x"]):
            moved = shifted(pa.concat_arrays([part[name]]), shift if start == 5 else 0)
            part = part.set_column(at, name, moved)
        batches.append(part)
        start += length
    batch = Gatherer(batches, ArrayColumns(table.schema, matrices=matrices)).take(ROWS)
    found = {"n": batch["matrix"][:, 0], "x": batch["matrix"][:, 1]} if matrices else batch
    assert found["n"].tolist() == [3 * row for row in ROWS]
    assert found["x"].tolist() == [5 * row for row in ROWS]
    assert batch["money"].tolist() == [25 * row for row in ROWS]


def test_columns_with_nulls_are_gathered_together_whatever_bit_their_validity_begins_with() -> None:
    types = {"a": pa.int32(), "b": pa.float64(), "c": pa.int32(), "d": pa.float64()}
    types |= dict.fromkeys("efgh", pa.bool_())
    values: dict[str, list[Any]] = {
        name: [None if (row + at) % 3 == 0 else row + at for row in range(15)] for at, name in enumerate(types)
    }
    values["e"], values["f"] = ([None if row % by == 0 else row % 2 == 0 for row in range(15)] for by in (4, 3))
    values["g"], values["h"] = ([row % by == 0 for row in range(15)] for by in (2, 3))
    table = pa.record_batch({name: pa.array(values[name], type_) for name, type_ in types.items()})
    fill = {"a": 100, "b": 0.5, "c": -7, "d": 0.25, "e": True, "f": False}
    columns = ArrayColumns(table.schema, matrices={"matrix": [*types]}, fill=fill, mask=["a"])
    batches = [table.slice(2, 3), table.slice(5, 1), table.slice(6, 9)]  # only one begins with a byte's first bit
    batches[2] = pa.RecordBatch.from_arrays(
        [pa.concat_arrays([column]) for column in batches[2].columns], table.schema.names
    )
    batch = Gatherer(batches, columns).take(ROWS)
    expected = [
        [fill[name] if values[name][row + 2] is None else values[name][row + 2] for name in types] for row in ROWS
    ]
    assert batch["matrix"].tolist() == expected
    assert batch["a_mask"].tolist() == [values["a"][row + 2] is not None for row in ROWS]


def test_the_copies_of_unaligned_columns_are_kept_for_a_matrix() -> None:
    """If they were freed, the rows would be read from memory that other arrays use by now."""
    rows = 200_000
    names = [*"abcd"]
    arrays = [shifted(pa.array(np.arange(rows) * factor), 1) for factor in range(1, 5)]
    batch = pa.RecordBatch.from_arrays(arrays, names)
    gatherer = Gatherer([batch], ArrayColumns(batch.schema, matrices={"matrix": names}))
    others = [np.full(rows, -1) for _ in range(2 * len(names))]
    positions = np.arange(0, rows, 1000)
    assert (gatherer.take(positions)["matrix"] == np.outer(positions, range(1, 5))).all()
    del others


@pytest.mark.parametrize("permutation", [None, [0, 2, 1], [1, 2, 0], [2, 0, 1], [2, 1, 0]])
@pytest.mark.parametrize("shift", [0, 4, 1])
def test_tensors_are_gathered_in_their_logical_order(permutation: list[int] | None, shift: int) -> None:
    shape, rows = [2, 3, 4], sum(LENGTHS)
    type_ = pa.fixed_shape_tensor(pa.int64(), shape, permutation=permutation)
    batches, first = [], 0
    for length in LENGTHS:
        values = shifted(pa.array(range(24 * first, 24 * (first + length)), pa.int64()), shift if first == 5 else 0)
        storage = pa.FixedSizeListArray.from_arrays(values, 24)
        batches.append(pa.record_batch({"t": pa.ExtensionArray.from_storage(type_, storage)}))
        first += length
    columns = ArrayColumns(batches[0].schema)
    order = permutation or [0, 1, 2]
    logical = [shape[axis] for axis in order]
    # Dimension `n` of the logical tensor is dimension `permutation[n]` of that in memory.
    expected = np.empty((rows, *logical), np.int64)
    for row, *index in np.ndindex(rows, *logical):
        at = dict(zip(order, index, strict=True))
        expected[row, *index] = 24 * row + 12 * at[0] + 4 * at[1] + at[2]
    assert np.array_equal(columns.join(batches)["t"], expected)
    assert np.array_equal(Gatherer(batches, columns).take(ROWS)["t"], expected[ROWS])


def test_lists_of_decimals_and_of_other_lists_are_gathered() -> None:
    pairs = [[Decimal(row), Decimal(-row) / 4] for row in range(sum(LENGTHS))]
    grids = [[[row, 1, 2], [3, 4, -row]] for row in range(sum(LENGTHS))]
    types = {"pairs": pa.list_(pa.decimal128(9, 2), 2), "grids": pa.list_(pa.list_(pa.int16(), 3), 2)}
    table = pa.record_batch({"pairs": pa.array(pairs, types["pairs"]), "grids": pa.array(grids, types["grids"])})
    batches = [table.slice(0, 5), table.slice(5, 1), table.slice(6)]
    batch = Gatherer(batches, ArrayColumns(table.schema)).take(ROWS)
    assert batch["pairs"].tolist() == [[100 * row, -25 * row] for row in ROWS]
    assert batch["grids"].tolist() == [grids[row] for row in ROWS]


def test_rows_of_strings_and_lists_are_gathered_from_small_and_large_batches() -> None:
    count = 50_000
    texts = [None if row % 7 == 3 else f"{row % 999} " * (1 + row % 3) for row in range(count)]
    lists = [None if row % 5 == 2 else [str(row)] * (row % 4) for row in range(count)]
    ends = [0, 5, 6, count - 1001, count - 1000, count]
    arrays: dict[str, list[pa.Array]] = {"text": [], "list": [], "word": [], "words": []}
    for start, stop in pairwise(ends):
        text = pa.array(texts[start:stop])
        word = text.dictionary_encode()  # in another order in each batch
        arrays["text"].append(text)
        arrays["list"].append(pa.array(lists[start:stop], pa.list_(pa.string())))
        arrays["word"].append(pa.DictionaryArray.from_arrays(word.indices, word.dictionary, ordered=True))
        arrays["words"].append(pa.ListArray.from_arrays(pa.array([0, *range(1, len(word) + 1)], pa.int32()), word))
    batches = [pa.record_batch(dict(zip(arrays, row, strict=True))) for row in zip(*arrays.values(), strict=True)]
    schema = batches[0].schema
    gatherer = Gatherer(batches, ArrayColumns(schema, as_arrow=schema.names))
    last, middle = count - 1, count - 1001
    for rows in ([last, 0, 6, middle, middle + 1, 5, 3, 6, last, 3], [middle - 1, 6, middle], [5], []):
        batch = gatherer.take(np.array(rows, np.int64))
        words = [[text] for text in texts]
        for name, values in (("text", texts), ("list", lists), ("word", texts), ("words", words)):
            batch[name].validate(full=True)
            assert batch[name].type == schema.field(name).type
            assert batch[name].to_pylist() == [values[row] for row in rows]


def test_rows_of_a_dictionary_are_gathered_without_a_look_at_its_values() -> None:
    numbers = pa.array(np.arange(100, dtype=np.int32), mask=np.arange(100) == 5)
    words = pa.array([f"{number:40000}" for number in range(100)])
    batch = pa.record_batch({"n": numbers, "word": pa.DictionaryArray.from_arrays(numbers, words)})
    rows = np.arange(0, 10_000, 99)

    def seconds(name: str) -> float:
        gatherer = Gatherer([batch.select([name])] * 100, ArrayColumns(pa.schema([batch.field(name)]), [name]))
        times = []
        for _ in range(5):
            start = time.thread_time()
            gatherer.take(rows)
            times.append(time.thread_time() - start)
        return min(times)

    assert seconds("word") < 5 * seconds("n")


def test_rows_of_more_text_than_one_array_can_hold_are_gathered() -> None:
    rows, size = 1200, 1_200_000_000
    zeros = pa.py_buffer(mmap.mmap(-1, size))  # takes no memory until it is read
    offsets = pa.array(np.arange(rows + 1, dtype=np.int32) * (size // rows))
    text = pa.Array.from_buffers(pa.binary(), rows, [None, offsets.buffers()[1], zeros])
    batch = pa.record_batch({"text": text})
    gatherer = Gatherer([batch, batch], ArrayColumns(batch.schema, as_arrow=["text"]))
    assert [len(value) for value in gatherer.take(np.array([2 * rows - 1, 0]))["text"].to_pylist()] == [10**6] * 2
