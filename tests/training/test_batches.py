"""Batches for training as NumPy arrays, over shared memory and over a network."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from datetime import date, datetime
from decimal import Decimal
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.errors import ColumnNotFound, DatasetNotFound, OptionError, SourceError, WrongKind
from dissociated.torch import loader
from dissociated.training import Batches

ROWS = 1000
#: Published in record batches of different sizes, some of which are small and adjacent.
TABLE = pa.table({"n": range(ROWS), "x": [n / 2 for n in range(ROWS)], "s": [str(n) for n in range(ROWS)]})
PIECES = [0, 300, 310, 315, 700, 701, 702, ROWS]


@pytest.fixture(scope="module")
def server() -> Iterator[dis.Server]:
    with dis.Server(["shm:", "tcp://127.0.0.1:0"]) as made:
        made.publish("data", pa.concat_tables(TABLE.slice(begin, end - begin) for begin, end in pairwise(PIECES)))
        yield made


def rows(batches: Batches) -> list[int]:
    """Return the row numbers of an epoch."""
    found = []
    for batch in batches:
        assert np.array_equal(batch["x"], batch["n"] / 2)
        found += batch["n"].tolist()
    return found


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_ranks_have_every_row_once_in_an_order_of_each_epoch(client: dis.Client, transport: str) -> None:
    handle = client.dataset("data", transport=transport)
    assert rows(Batches(handle, columns=["x", "n"], batch_size=64)) == [*range(ROWS)]
    for shuffling in ({"buffer_size": 0}, {"buffer_size": 200}, {}):
        options: dict[str, Any] = {"columns": ["n", "x"], "batch_size": 64, "shuffle": True, "seed": 7, **shuffling}
        ranks = [Batches(handle, rank=rank, world_size=3, **options) for rank in range(3)]
        epochs = [[rows(rank) for rank in ranks] for _ in range(2)]
        for epoch in epochs:
            assert sorted(row for rank in epoch for row in rank) == [*range(ROWS)]
            assert [*map(len, epoch)] == [333, 333, 334]
        assert epochs[0] != epochs[1]
        again = Batches(handle, rank=1, world_size=3, **options)
        again.set_epoch(1)
        assert rows(again) == epochs[1][1]


def test_a_run_goes_on_where_another_was_interrupted(client: dis.Client) -> None:
    def made(**options: Any) -> Batches:
        return Batches(client["data"], columns=["n", "x"], batch_size=48, shuffle=True, buffer_size=100, **options)

    first = made()
    rows(first)
    expected = []
    for number, batch in enumerate(first):
        if number == 4:
            state = json.loads(json.dumps(first.state_dict()))
        if number > 4:
            expected += batch["n"].tolist()
    second = made()
    second.load_state_dict(state)
    assert second.state_dict() == state
    second.set_epoch(1)  # the state's own epoch, with which a loop over epochs begins
    assert rows(second) == expected
    assert rows(second) == rows(first)  # later epochs are equal, too
    third = made()
    third.load_state_dict(state)
    third.set_epoch(2)
    assert len(rows(third)) == ROWS
    for other in (made(seed=1), made(rank=0, world_size=2)):
        with pytest.raises(OptionError, match="would not be the same rows"):
            other.load_state_dict(state)
    with pytest.raises(OptionError, match="is missing"):
        second.load_state_dict({"epoch": 1})


def test_arrays_lie_in_the_servers_memory_unless_they_may_be_written_to(client: dis.Client) -> None:
    handle = client.dataset("data", transport="shm")
    for shuffle in (False, True):
        for batch in Batches(handle, columns=["n"], batch_size=300, shuffle=shuffle):
            with pytest.raises(ValueError, match="read-only"):
                batch["n"] += 1
    first = next(iter(Batches(handle, columns=["n"], batch_size=300)))["n"]
    assert not first.flags.owndata
    assert np.from_dlpack(first).tolist() == [*range(300)]
    for _ in range(2):
        for batch in Batches(handle, columns=["n", "x"], batch_size=300, writable=True):
            assert np.array_equal(batch["x"], batch["n"] / 2)
            batch["n"] += 1


TYPES: dict[str, tuple[pa.Array, list[Any]]] = {
    "bool": (pa.array([True, False, True]), [True, False, True]),
    "half": (pa.array(np.array([1, 2, 3], np.float16)), [1, 2, 3]),
    "uint64": (pa.array([1, 2, 1 << 63], pa.uint64()), [1, 2, 1 << 63]),
    "date": (pa.array([date(1970, 1, 5), date(1969, 12, 31), date(1970, 1, 1)]), [4, -1, 0]),
    "time": (pa.array([datetime(1970, 1, 1, 0, 0, n) for n in range(3)], pa.timestamp("ms")), [0, 1000, 2000]),
    "price": (pa.array([Decimal("1.25"), Decimal("-3.10"), Decimal("7.00")], pa.decimal128(15, 2)), [125, -310, 700]),
    "pair": (pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int16(), 2)), [[1, 2], [3, 4], [5, 6]]),
    "matrix": (
        pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(12, dtype=np.float32).reshape(3, 2, 2)),
        np.arange(12).reshape(3, 2, 2).tolist(),
    ),
}


def test_what_is_made_of_each_type(server: dis.Server, client: dis.Client) -> None:
    table = pa.table({name: array for name, (array, _) in TYPES.items()})
    server.publish("types", pa.concat_tables([table.slice(1), table]))
    for size, shuffle in ((2, False), (4, False), (5, True)):
        found: dict[str, list[Any]] = {name: [] for name in TYPES}
        batches = Batches(client["types"], batch_size=size, shuffle=shuffle)
        for batch in batches:
            for name, array in batch.items():
                found[name] += array.tolist()
        for name, (_, values) in TYPES.items():
            expected = [*values[1:], *values]
            assert (sorted(found[name]) == sorted(expected)) if shuffle else (found[name] == expected), name


def test_what_is_no_number_is_refused_or_comes_as_it_is(server: dis.Server, client: dis.Client) -> None:
    handle = client["data"]
    with pytest.raises(WrongKind, match=r"'s' is string.*as_arrow"):
        Batches(handle)
    for shuffle in (False, True):
        seen = [batch["s"] for batch in Batches(handle, batch_size=400, shuffle=shuffle, as_arrow=["s"])]
        assert all(isinstance(one, pa.Array) for one in seen)
        assert {value for one in seen for value in one.to_pylist()} == {*map(str, range(ROWS))}
    server.publish("nulls", pa.table({"n": [1, None, 3], "pairs": [[1, 2], [3, None], [5, 6]]}))
    with pytest.raises(OptionError, match="'n' has nulls"):
        [*Batches(client["nulls"], columns=["n"])]
    assert [batch["n"].to_pylist() for batch in Batches(client["nulls"], columns=["n"], as_arrow=["n"])] == [
        [1, None, 3]
    ]
    pairs = pa.array([[1, 2], [3, None]], pa.list_(pa.int64(), 2))
    server.publish("nested nulls", pa.table({"pairs": pairs}))
    with pytest.raises(OptionError, match="'pairs' has nulls"):
        [*Batches(client["nested nulls"])]
    server.publish("tensor", pa.Tensor.from_numpy(np.arange(4)))
    with pytest.raises(WrongKind, match="read_tensors"):
        Batches(client["tensor"])
    for wrong in (
        {"batch_size": 0},
        {"seed": -1},
        {"buffer_size": -1},
        {"rank": 2, "world_size": 2},
        {"as_arrow": "s"},
    ):
        with pytest.raises(OptionError):
            Batches(handle, columns=["n", "s"], **wrong)
    unknowns: list[dict[str, Any]] = [{"columns": ["no"]}, {"as_arrow": ["no"]}]
    for unknown in unknowns:
        with pytest.raises(ColumnNotFound, match="no"):
            Batches(handle, **unknown)


def changing() -> Callable[[], pa.Table]:
    """Return a source whose rows differ each time."""
    times = iter(range(100))
    return lambda: pa.table({"n": range(3 + next(times))})


def test_only_rows_of_the_version_of_the_handle_are_given(server: dis.Server, client: dis.Client) -> None:
    server.publish("changing", changing())
    with pytest.raises(SourceError, match="other batches each time"):
        [*Batches(client["changing"])]
    server.publish("replaced", pa.table({"n": [1, 2]}))
    batches = Batches(client.dataset("replaced", transport="tcp"))
    held = Batches(client.dataset("replaced", transport="shm"))
    assert [batch["n"].tolist() for batch in batches] == [[1, 2]]
    server.publish("replaced", pa.table({"n": [3, 4]}))
    with pytest.raises(DatasetNotFound, match="'replaced' is gone"):
        next(iter(batches))
    assert [batch["n"].tolist() for batch in held] == [[1, 2]]  # mapped, so still readable


def test_without_pytorch_it_says_what_to_install(client: dis.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # how Python marks a module that is not installed
    with pytest.raises(OptionError, match=r"pip install 'dissociated\[torch\]'"):
        loader(client["data"])
