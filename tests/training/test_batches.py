"""Batches for training as NumPy arrays, over shared memory and over a network."""

from __future__ import annotations

import ctypes
import gc
import json
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import date, datetime
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import dissociated as dis
from dissociated.catalog.service import CatalogService
from dissociated.errors import ColumnNotFound, DatasetNotFound, OptionError, ReadOnce, SourceError, WrongKind
from dissociated.node.node import Node
from dissociated.store.store import Store
from dissociated.torch import loader
from dissociated.training import Batches
from support.helpers import case, wait_until

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
    for name, other in (("seed", made(seed=1)), ("filter", made(filter=[("n", ">", 1)]))):
        with pytest.raises(OptionError, match=f"the state has {name} .*would not be the same rows"):
            other.load_state_dict(state)
    with pytest.raises(OptionError, match="is missing"):
        second.load_state_dict({"epoch": 1})
    for wrong in ({"epoch": -1}, {"progress": [[1, 1]]}, {"progress": [[1, 0, 3]]}, {"progress": 3}):
        with pytest.raises(OptionError, match="invalid position"):
            second.load_state_dict({**state, **wrong})


def test_a_loaded_position_stays_if_the_next_batch_cannot_be_read(server: dis.Server, client: dis.Client) -> None:
    is_away = False

    def source() -> pa.Table:
        if is_away:
            raise ConnectionError
        return TABLE

    server.publish("away", source)
    options: dict[str, Any] = {"columns": ["n", "x"], "batch_size": 48}
    interrupted = Batches(client["away"], **options)
    for _ in zip(range(5), interrupted, strict=False):
        state = interrupted.state_dict()
    resumed = Batches(client["away"], **options)
    resumed.load_state_dict(state)
    is_away = True
    for _ in range(2):
        with pytest.raises(SourceError):
            next(iter(resumed))
    assert resumed.state_dict() == state
    is_away = False
    resumed.set_epoch(0)
    assert rows(resumed) == [*range(5 * 48, ROWS)]
    assert rows(resumed) == [*range(ROWS)]


def test_a_state_of_other_rows_is_refused_though_the_filters_have_one_text(client: dis.Client) -> None:
    """The text of an expression leaves out the middle of a long set."""

    def made(values: list[int]) -> Batches:
        return Batches(client.dataset("data"), columns=["n"], batch_size=5, filter=pc.field("n").isin(values))

    values = [*range(100)]
    state = json.loads(json.dumps(made(values).state_dict()))
    made(values).load_state_dict(state)
    others = [*range(50), 100, *range(51, 100)]
    with pytest.raises(OptionError, match=r"the state has filter .* would not be the same rows"):
        made(others).load_state_dict(state)


def test_a_state_of_columns_whose_batches_are_combined_otherwise_is_refused(
    server: dis.Server, client: dis.Client
) -> None:
    """Small record batches are combined by the width of their columns, here into as many blocks of other lengths."""
    lengths = [1, 1, 1, 1, *[3] * 255]
    count = sum(lengths)
    # Empty structs take no memory, but count as 32 bytes each: three rows, or two with the other columns, are 1 MiB.
    wide = pa.FixedSizeListArray.from_arrays(pa.Array.from_buffers(pa.struct([]), count * 10922, [None]), 10922)
    table = pa.table({"n": range(count), "wide": wide, **{name: np.zeros(count) for name in "abc"}})
    ends = np.cumsum(lengths).tolist()
    server.publish(
        "wide rows", pa.concat_tables(table.slice(end - by, by) for end, by in zip(ends, lengths, strict=True))
    )

    def made(*more: str) -> Batches:
        return Batches(client["wide rows"], columns=["n", "wide", *more], as_arrow=["wide"], batch_size=1, **order)

    orders: list[dict[str, Any]] = [{"shuffle": "window", "buffer_size": size} for size in (0, 100)]
    for order in (*orders, {}):
        with case(order):
            state = json.loads(json.dumps(made().state_dict()))
            made("a").load_state_dict(state)
            if order:
                with pytest.raises(OptionError, match=r"the state has blocks .* would not be the same rows"):
                    made(*"abc").load_state_dict(state)
            else:
                made(*"abc").load_state_dict(state)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_an_epoch_is_finished_by_another_number_of_ranks(client: dis.Client, transport: str) -> None:
    def ranks(count: int) -> list[Batches]:
        handle = client.dataset("data", transport=transport)
        options: dict[str, Any] = {"columns": ["n", "x"], "batch_size": 48, "shuffle": shuffle}
        return [Batches(handle, rank=rank, world_size=count, **options) for rank in range(count)]

    for shuffle in (False, "window", "global") if transport == "shm" else (False, "window"):
        state, seen = None, []
        for count in (2, 3, 1):
            for rank in ranks(count):
                if state is not None:
                    rank.load_state_dict(json.loads(json.dumps(state)))
                for number, batch in enumerate(rank, 1):
                    seen += batch["n"].tolist()
                    if number == 3 and count > 1:
                        break
            state = rank.state_dict()
        assert sorted(seen) == [*range(ROWS)], shuffle
        assert state is not None
        assert state["epoch"] == 1


def test_sorted_rows_that_are_mapped_are_shuffled_as_a_whole(server: dis.Server, client: dis.Client) -> None:
    rows_, piece = 1 << 16, 1 << 10
    table = pa.table({"n": range(rows_)})
    server.publish("sorted", pa.Table.from_batches(table.to_batches(max_chunksize=piece)))
    options: dict[str, Any] = {"batch_size": 256, "shuffle": True, "seed": 3}
    drawn = {}
    cases: list[tuple[str, dict[str, Any]]] = [("shm", {}), ("tcp", {}), ("tcp", {"buffer_size": piece})]
    for transport, more in cases:
        batches = Batches(client.dataset("sorted", transport=transport), **options, **more)
        arrays = [batch["n"] for batch in batches]
        assert sorted(np.concatenate(arrays).tolist()) == [*range(rows_)]
        drawn[transport, *more] = np.mean([len(np.unique(array // piece)) for array in arrays])
        if transport == "shm":
            assert abs(np.corrcoef(np.arange(rows_), np.concatenate(arrays))[0, 1]) < 0.02
    assert drawn["shm",] > 60  # of 64 record batches, of which a batch of 256 random rows has 62.9 on average
    assert drawn["tcp",] > 60  # the window holds the whole dataset
    assert drawn["tcp", "buffer_size"] < 3


def test_a_global_shuffle_is_of_mapped_data_and_of_a_process_alone(
    client: dis.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def order(**options: Any) -> Any:
        return Batches(client["data"], columns=["n"], **options).state_dict()["shuffle"]

    assert order(shuffle=True) == "global"
    assert order(shuffle=True, buffer_size=9) == order(shuffle="window") == "window"
    # Other ranks may be unable to map the data, and all of them need the same order.
    for part in ({"rank": 0, "world_size": 2}, {"rank": 0, "world_size": 1}):
        assert order(shuffle=True, **part) == "window"
        assert order(shuffle="global", **part) == "global"
    launched = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    assert order(shuffle=True) == order(shuffle=True, rank=0, world_size=2) == "window"
    with pytest.raises(OptionError, match=r"^shuffle='global' reads single rows, .* or use shuffle='window'$"):
        Batches(client.dataset("data", transport="tcp"), columns=["n"], shuffle="global")
    for wrong in ({"shuffle": "all"}, {"shuffle": "global", "buffer_size": 3}):
        with pytest.raises(OptionError, match="shuffle"):
            order(**wrong)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_default_window_holds_less_of_long_values(server: dis.Server, client: dis.Client, transport: str) -> None:
    size, rows_ = 1 << 14, 50
    numbers = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(1024 * rows_)), 1024)
    columns = {
        "n": range(rows_),
        "numbers": numbers,
        "text": ["x" * size] * rows_,
        "lists": [[0] * (size // 8)] * rows_,
    }
    server.publish("long", pa.table(columns))

    def window(*names: str) -> int:
        handle = client.dataset("long", transport=transport)
        state = Batches(handle, columns=names, as_arrow=[*{*names} & {"text"}], shuffle="window").state_dict()
        return int(state["window"])

    assert window("n") == 1 << 16
    assert window("n", "numbers") == (1 << 28) // (8 + 8192)
    for names, least, most in (
        (["text", "lists"], 2 * size, 2.1 * size),
        (["n", "text", "lists"], 2 * size, 2.1 * size),
    ):
        with case(names):
            assert (1 << 28) / most <= window(*names) <= (1 << 28) / least
    for names in (["text"], ["n", "lists"]):  # the catalog knows the size of all columns only
        assert window(*names) == 1 << 16
    handle = client.dataset("long", transport=transport)
    short = Batches(handle, columns=["n"], codes=["text"], shuffle="window")  # codes are numbers
    assert short.state_dict()["window"] == 1 << 16
    coded = Batches(handle, columns=["lists"], codes=["text"], shuffle="window").state_dict()
    assert (1 << 28) / (2.1 * size) <= coded["window"] <= (1 << 28) / size


@pytest.mark.parametrize("part", [{"world_size": 2}, {"world_size": 1}])
def test_ranks_have_one_order_though_only_one_of_them_maps_the_data(
    client: dis.Client, part: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):  # the launcher has started all ranks on this host
        monkeypatch.setenv(name, "2")

    def ranks(shuffle: bool | str) -> list[list[int]]:
        options: dict[str, Any] = {"columns": ["n", "x"], "batch_size": 64, "shuffle": shuffle, **part}
        handles = [client.dataset("data", transport=transport) for transport in ("shm", "tcp")]
        numbers = [rank % part["world_size"] for rank in range(2)]
        return [rows(Batches(handle, rank=number, **options)) for number, handle in zip(numbers, handles, strict=True)]

    first, second = ranks(True)
    if part["world_size"] == 1:  # processes that need the same rows, such as those of tensor parallelism
        assert first == second
    else:
        assert sorted([*first, *second]) == [*range(ROWS)]
    with pytest.raises(OptionError, match="reads single rows"):
        ranks("global")


@pytest.mark.parametrize("shuffle", [False, "window", "global"])
def test_batches_that_were_pickled_go_on(client: dis.Client, shuffle: bool | str) -> None:
    batches = Batches(client["data"], columns=["n", "x"], batch_size=64, shuffle=shuffle)
    whole = rows(batches)
    batches.set_epoch(0)
    for number, _ in enumerate(batches):
        if number == 4:
            break
    copied = pickle.loads(pickle.dumps(batches))
    copied.load_state_dict(batches.state_dict())
    assert rows(copied) == whole[5 * 64 :]


def test_a_process_that_cannot_map_the_data_is_told_which_option_needs_it(memory: Path) -> None:
    store, tcp = memory / "store", ["tcp://127.0.0.1:0"]
    with closing(CatalogService("grpc://127.0.0.1:0")) as catalog:
        with Node(Store(store), ["shm:"], catalog=catalog.uri), dis.connect(catalog.uri) as client:
            client.put("data", TABLE)
            advice: dict[str, Any] = {"use shuffle='window'": {"shuffle": True}, "leave out weights=": {"weights": "n"}}
            saved = {text: pickle.dumps(Batches(client["data"], columns=["n"], **advice[text])) for text in advice}
        with Node(Store(store), tcp, catalog=catalog.uri):  # the data is in its files, but not over shared memory
            for text, pickled in saved.items():
                refused = f"^'data' was mapped .* cannot be mapped in this process: {text}$"
                with pytest.raises(OptionError, match=refused):
                    next(iter(pickle.loads(pickled)))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_only_rows_that_pass_the_filter_come(client: dis.Client, transport: str) -> None:
    handle = client.dataset("data", transport=transport)
    passing = [row for row in range(ROWS) if row % 3 == 0 and row > 330]
    modulo = pc.subtract(pc.field("n"), pc.multiply(pc.divide(pc.field("n"), 3), 3))
    for shuffle in (False, True, "window"):
        for condition in ((modulo == 0) & (pc.field("n") > 330), (modulo == 0) & (pc.field("s").cast("int64") > 330)):
            options: dict[str, Any] = {"columns": ["x"], "batch_size": 20, "filter": condition, "shuffle": shuffle}
            ranks = [Batches(handle, rank=rank, world_size=2, **options) for rank in range(2)]
            assert [*map(len, ranks)] == [6, 6]
            found = [int(2 * x) for rank in ranks for batch in rank for x in batch["x"].tolist()]
            assert (sorted(found) if shuffle else found) == passing
    assert [*Batches(handle, columns=["x"], filter=[("n", ">", ROWS)], shuffle=True)] == []
    with pytest.raises(ColumnNotFound, match="no"):
        Batches(handle, columns=["x"], filter=[("no", ">", 1)])


def test_rows_come_in_proportion_to_their_weights(server: dis.Server, client: dis.Client) -> None:
    labels = ["rare" if row % 100 == 0 else "common" for row in range(ROWS)]
    table = pa.table({"n": range(ROWS), "label": labels, "weight": [float(row % 2) for row in range(ROWS)]})
    encoded = table.set_column(1, "label", table["label"].dictionary_encode())
    for name, each in (("weighted", table), ("weighted codes", encoded)):
        server.publish(name, pa.Table.from_batches(each.to_batches(max_chunksize=70)))
        handle = client[name]
        weights = {"label": {"rare": 99, "common": 1}}
        batches = Batches(handle, columns=["n"], weights=weights)
        drawn = np.concatenate([batch["n"] for batch in batches])
        assert len(drawn) == ROWS
        assert np.sum(drawn % 100 == 0) == 500
        assert len({*drawn.tolist()} & {*range(0, ROWS, 100)}) == 10
        odd = np.concatenate([batch["n"] for batch in Batches(handle, columns=["n"], weights="weight")])
        assert np.unique(odd, return_counts=True)[1].tolist() == [2] * 500
        assert (odd % 2 == 1).all()
        some = Batches(handle, columns=["n"], weights=weights, filter=[("n", "<", 10)])
        assert sum(row == 0 for batch in some for row in batch["n"].tolist()) == 9
        with pytest.raises(OptionError, match="no weight for the value 'common' of column 'label'"):
            Batches(handle, columns=["n"], weights={"label": {"rare": 1}})
        with pytest.raises(OptionError, match="must be 0 or more"):
            Batches(handle, columns=["n"], weights={"label": {"rare": -1, "common": 1}})
        with pytest.raises(ColumnNotFound, match="no"):
            Batches(handle, columns=["n"], weights="no")
    with pytest.raises(OptionError, match=r"^weights= reads single rows, .* or leave out weights=$"):
        Batches(client.dataset("weighted", transport="tcp"), columns=["n"], weights="weight")


def test_only_weights_of_rows_that_pass_the_filter_count(server: dis.Server, client: dis.Client) -> None:
    labels = ["a", "b", None, "c"]
    columns = {
        "n": range(4),
        "label": labels,
        "weight": [1, 3, None, -1],
        "price": [Decimal(1), Decimal(3), None, None],
    }
    table = pa.table(columns).append_column("code", pa.array(labels).dictionary_encode())
    server.publish("holes of weights", table.append_column("view", pa.array(labels, pa.string_view())))
    handle = client["holes of weights"]
    passing: dict[str, Any] = {"columns": ["n"], "filter": [("n", "<", 2)]}
    classes = {"a": 1, "b": 3}
    for weights in ("weight", "price", {"label": classes}, {"code": classes}, {"view": classes}):
        with case(str(weights)):
            drawn = [
                row
                for epoch in range(2)
                for batch in Batches(handle, weights=weights, **passing)
                for row in batch["n"].tolist()
            ]
            assert {*drawn} <= {0, 1}
            assert len(drawn) == 4
    for name in ("label", "code", "view"):
        with case(name), pytest.raises(OptionError, match=f"no weight for the value None of column '{name}'"):
            Batches(handle, columns=["n"], weights={name: {**classes, "c": 1}})
        with_null = Batches(handle, columns=["n"], weights={name: {"a": 0, "b": 0, None: 1, "c": 0}})
        assert [batch["n"].tolist() for batch in with_null] == [[2, 2, 2, 2]]
    with pytest.raises(OptionError, match="'weight' has nulls, which are no weights"):
        Batches(handle, columns=["n"], weights="weight")
    with pytest.raises(WrongKind, match="'label' is string, and weights are numbers"):
        Batches(handle, columns=["n"], weights="label")
    with pytest.raises(OptionError, match=r"no string as column 'label': \[1\]"):
        Batches(handle, columns=["n"], weights={"label": {1: 1}})


def test_a_dataset_without_rows_is_mapped(server: dis.Server, client: dis.Client) -> None:
    server.publish("no rows", pa.table({"n": pa.array([], pa.int64()), "s": pa.array([], pa.string())}))
    none: list[dict[str, Any]] = [{}, {"features": ["n"]}, {"mask": ["n"]}, {"codes": ["n"]}]
    for options in (*none, {"weights": "n"}, {"weights": {"s": {"a": 1}}}, {"filter": [("n", ">", 1)]}):
        for transport in ("shm", "tcp"):
            handle = client.dataset("no rows", transport=transport)
            with case(f"{options}, {transport}"):
                assert [*Batches(handle, columns=["n"], shuffle="global", **options)] == []


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


def test_results_of_calculations_keep_no_memory_of_the_server(server: dis.Server, client: dis.Client) -> None:
    server.publish("calculated", TABLE.select(["n"]), wait=True)

    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("/memfd:dissociated:calculated")

    (batch,) = Batches(client.dataset("calculated", transport="shm"), batch_size=ROWS)
    assert mapped() > 1
    results = [batch["n"].sum(), batch["n"].mean(), batch["n"] * 2, batch["n"].reshape(2, -1).max(axis=0)]
    assert [type(result) for result in results] == [np.int64, np.float64, np.ndarray, np.ndarray]
    squeezed = np.squeeze(batch["n"].reshape(1, -1))
    assert type(squeezed) is type(batch["n"])
    assert np.from_dlpack(squeezed).tolist() == [*range(ROWS)]
    copies = [batch["n"].copy(), batch["n"].astype(np.int32), batch["n"][[*range(ROWS)]], batch["n"][batch["n"] >= 0]]
    copies += [copies[0][:], pickle.loads(pickle.dumps(batch["n"])), batch["n"].take(range(ROWS))]
    del batch, squeezed
    wait_until(lambda: mapped() == 1, "only the server maps it, which is in this process")
    assert [results[0], results[1]] == [499500, 499.5]
    assert results[2].tolist() == [*range(0, 2 * ROWS, 2)]
    assert results[3].tolist() == [*range(500, ROWS)]
    assert [copied.tolist() for copied in copies] == [[*range(ROWS)]] * len(copies)


class Exported(ctypes.Structure):
    """The beginning of a `DLManagedTensorVersioned`, as DLPack 1.0 defines it."""

    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("data", ctypes.c_void_p),
    ]


def test_memory_is_released_with_the_last_reference(server: dis.Server, client: dis.Client) -> None:
    """Mappings and leases do not wait for the garbage collector, even if an epoch was not read to its end."""
    server.publish("released", TABLE.select(["n", "x"]), wait=True)
    handle = client.dataset("released", transport="shm")

    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("/memfd:dissociated:released")

    def is_leased() -> bool:
        return any(consumer.dataset == "released" for consumer in server.status().consumers)

    assert client.read("released", transport="shm").read_all().num_rows == ROWS
    gc.collect()
    gc.disable()
    try:
        wait_until(lambda: mapped() == 1, "only the server maps it, which is in this process")
        orders: list[dict[str, Any]] = [{"filter": ("n", ">", 500)}, {"weights": "n"}]
        for options in [{"shuffle": shuffle} for shuffle in (False, "window", "global")] + orders:
            with case(options):
                batches = Batches(handle, batch_size=100, **options)
                read = sum(len(batch["n"]) for batch in batches)
                epoch = iter(batches)
                next(epoch)
                assert mapped() > 1
                del batches, epoch
                wait_until(lambda: mapped() == 1 and not is_leased(), "the memory is released")
                assert read == (ROWS - 501 if "filter" in options else ROWS)
    finally:
        gc.enable()


def test_a_consumer_of_dlpack_that_writes_all_the_same_harms_nobody(client: dis.Client) -> None:
    """Such a consumer ignores that the array is read-only, as PyTorch does."""
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    handle = client.dataset("data", transport="shm")
    array = next(iter(Batches(handle, columns=["n"], batch_size=300)))["n"][10:]
    capsules = []
    for exporting, first in ((array[::-1], 299), (array, 10)):
        for value in (7, 8):
            capsules.append(exporting.__dlpack__(max_version=(1, 0)))
            exported = Exported.from_address(pointer(capsules[-1], b"dltensor_versioned"))
            assert exported.flags & 1, "read-only"
            assert ctypes.c_int64.from_address(exported.data).value == first
            ctypes.c_int64.from_address(exported.data).value = value
    assert array.tolist() == [*range(10, 300)]
    with pytest.raises(ValueError, match="read-only"):
        np.from_dlpack(array)[0] = 1
    with pytest.raises(BufferError):
        array.__dlpack__()  # without a version, DLPack cannot say that it is read-only
    assert client.read("data", transport="shm").read_all()["n"].to_pylist() == [*range(ROWS)]


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
    with pytest.raises(WrongKind, match=r"'s' is string.*codes=.*as_arrow"):
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


def published(server: dis.Server, name: str, table: pa.Table) -> None:
    server.publish(name, pa.Table.from_batches(table.to_batches(max_chunksize=70)))


WAYS: list[tuple[str, bool | str]] = [
    ("shm", False),
    ("shm", "window"),
    ("shm", "global"),
    ("tcp", False),
    ("tcp", True),
]


@pytest.mark.parametrize(("transport", "shuffle"), WAYS)
def test_features_are_one_matrix(server: dis.Server, client: dis.Client, transport: str, shuffle: bool | str) -> None:
    numbers = np.arange(300)
    columns = {f"f{at}": (numbers + 1000 * at).astype(np.float32) for at in range(5)}
    flags = pa.array(numbers % 2 == 0)
    nulls = pa.array([None if n % 7 == 0 else n for n in range(300)], pa.int16())
    published(server, "features", pa.table({**columns, "n": numbers, "flag": flags, "nulls": nulls}))
    matrices = {"same": [*columns], "mixed": ["f0", "nulls", "flag", "n", "f1"], "one": ["f4"]}
    options: dict[str, Any] = {"shuffle": shuffle, "batch_size": 64, "fill": {"nulls": -1}, "seed": 3}
    handle = client.dataset("features", transport=transport)
    seen = []
    for batch in Batches(handle, columns=[], features=matrices, mask=["nulls"], **options):
        assert {*batch} == {"same", "mixed", "one", "nulls_mask"}
        assert batch["same"].dtype == batch["one"].dtype == np.float32
        assert batch["mixed"].dtype == np.float64
        rows_ = batch["mixed"][:, 3].astype(int)
        assert np.array_equal(batch["same"], rows_[:, None] + 1000 * np.arange(5))
        assert np.array_equal(batch["one"], rows_[:, None] + 4000)
        expected = [[n, -1 if n % 7 == 0 else n, n % 2 == 0, n, n + 1000] for n in rows_.tolist()]
        assert np.array_equal(batch["mixed"], expected)
        assert np.array_equal(batch["nulls_mask"], rows_ % 7 != 0)
        seen += rows_.tolist()
    assert sorted(seen) == [*range(300)]
    batches = Batches(handle, columns=["n"], features=[*columns], batch_size=300, shuffle=shuffle)
    (batch,) = batches
    assert np.array_equal(batch["features"], batch["n"][:, None] + 1000 * np.arange(5))
    with pytest.raises(OptionError, match=r"'nulls' has nulls.*fill="):
        [*Batches(handle, columns=[], features=["f0", "nulls"], shuffle=shuffle)]


@pytest.mark.parametrize(("transport", "shuffle"), WAYS)
def test_no_number_of_a_matrix_is_rounded(
    server: dis.Server, client: dis.Client, transport: str, shuffle: bool | str
) -> None:
    limit = 2**53
    wide: dict[str, pa.Array] = {
        "i": pa.array([-limit, None, limit + 1], pa.int64()),
        "u": pa.array([0, limit, limit + 1], pa.uint64()),
        "t": pa.array([0, 1, -limit - 1], pa.timestamp("us")),
        "d": pa.array([Decimal(1), Decimal(-limit), Decimal(limit + 1)], pa.decimal128(18, 0)),
    }
    published(server, "wide", pa.table({**wide, "f": [0.5, 1.5, 2.5], "n": range(3)}))
    options: dict[str, Any] = {"columns": [], "shuffle": shuffle, "batch_size": 2}
    handle = client.dataset("wide", transport=transport)
    fitting = {"i": [-limit, 7], "u": [0, limit], "t": [0, 1], "d": [-limit, 1]}
    for name, values in fitting.items():
        with case(name):
            made: dict[str, Any] = {**options, "features": ["f", name], "fill": {"i": 7} if name == "i" else {}}
            with pytest.raises(OptionError, match=f"column '{name}' of features= has -?{limit + 1}, which .* rounds"):
                [*Batches(handle, **made)]
            (batch,) = Batches(handle, filter=[("n", "<", 2)], **made)
            assert sorted(batch["features"][:, 1].tolist()) == values
    options |= {"fill": {"i": 7}, "batch_size": 3}
    (whole,) = Batches(handle, features=["i", "t", "d"], **options)
    assert sorted(whole["features"].tolist()) == [[-limit, 0, 1], [7, 1, -limit], [limit + 1, -limit - 1, limit + 1]]


@pytest.mark.parametrize(("transport", "shuffle"), WAYS)
def test_nulls_are_replaced(server: dis.Server, client: dis.Client, transport: str, shuffle: bool | str) -> None:
    values: dict[str, list[Any]] = {
        "i": [None if n % 3 == 0 else n for n in range(200)],
        "f": [None if n % 5 == 0 else n / 2 for n in range(200)],
        "b": [None if n % 4 == 0 else n % 8 < 4 for n in range(200)],
        "d": [None if n % 6 == 0 else date(1970, 1, 1 + n % 28) for n in range(200)],
    }
    published(server, "holes", pa.table({**values, "n": range(200)}).slice(3))
    handle = client.dataset("holes", transport=transport)
    fill = {"f": -2.5, "b": True, "d": date(1970, 1, 31)}
    found: list[tuple[Any, ...]] = []
    for batch in Batches(handle, batch_size=32, fill=fill, mask=["i", "b"], shuffle=shuffle):
        found += zip(*(batch[name].tolist() for name in ("n", "i", "i_mask", "f", "b", "b_mask", "d")), strict=True)
    expected = [
        (
            n,
            n if n % 3 else 0,
            n % 3 != 0,
            n / 2 if n % 5 else -2.5,
            n % 8 < 4 if n % 4 else True,
            n % 4 != 0,
            n % 28 if n % 6 else 30,
        )
        for n in range(3, 200)
    ]
    assert (sorted(found) if shuffle else found) == expected
    with pytest.raises(OptionError, match="fill= has 'x', which is no int64 as column 'i'"):
        [*Batches(handle, columns=["i"], fill={"i": "x"}, shuffle=shuffle)]


@pytest.mark.parametrize(("transport", "shuffle"), WAYS)
def test_nulls_of_each_type_are_replaced(
    server: dis.Server, client: dis.Client, transport: str, shuffle: bool | str
) -> None:
    tensor = pa.fixed_shape_tensor(pa.int16(), [2, 1])
    lists = pa.array([[1, 2], None, [5, 6]], pa.list_(pa.int16(), 2))
    columns: dict[str, tuple[pa.Array, Any, list[Any]]] = {  # with a replacement, and the values with the default
        "flag": (pa.array([True, None, False]), True, [True, False, False]),
        "list": (lists, [7, 8], [[1, 2], [0, 0], [5, 6]]),
        "flags": (pa.array([[True], None, [True]], pa.list_(pa.bool_(), 1)), [True], [[True], [False], [True]]),
        "tensor": (pa.ExtensionArray.from_storage(tensor, lists), [7, 8], [[[1], [2]], [[0], [0]], [[5], [6]]]),
        "small": (pa.array([Decimal(1), None, Decimal(3)], pa.decimal32(5, 1)), Decimal("0.2"), [10, 0, 30]),
        "mid": (pa.array([Decimal(1), None, Decimal(3)], pa.decimal64(12, 1)), Decimal("0.2"), [10, 0, 30]),
        "half": (pa.array([1.5, None, 2.5], pa.float16()), 0.5, [1.5, 0, 2.5]),
        "time": (pa.array([1, None, 3], pa.timestamp("ms")), datetime(1970, 1, 1, 0, 0, 2), [1, 0, 3]),
    }
    replaced = {"flag": True, "list": [7, 8], "flags": [True], "tensor": [[7], [8]], "small": 2, "mid": 2}
    replaced |= {"half": 0.5, "time": 2000}
    table = pa.table({**{name: array for name, (array, _, _) in columns.items()}, "row": range(3)})
    server.publish("all nulls", pa.Table.from_batches(table.to_batches(max_chunksize=2)))
    handle = client.dataset("all nulls", transport=transport)
    for name, (array, replacement, zeroed) in columns.items():
        kind = next(iter(Batches(handle, columns=[name], filter=[("row", "=", 0)])))[name].dtype
        expected = [zeroed[0], replaced[name], zeroed[2]]
        for fill, values in (({name: replacement}, expected), ({}, zeroed)):
            with case(f"{array.type}, filled with {fill}"):
                made = Batches(handle, columns=["row", name], fill=fill, mask=[name], shuffle=shuffle, batch_size=1)
                batches = sorted(made, key=lambda batch: int(batch["row"][0]))
                assert [batch[name][0].tolist() for batch in batches] == values
                assert {batch[name].dtype for batch in batches} == {kind}
                assert [batch[f"{name}_mask"].tolist() for batch in batches] == [[True], [False], [True]]


@pytest.mark.parametrize(("transport", "shuffle"), WAYS)
def test_codes_and_lists(server: dis.Server, client: dis.Client, transport: str, shuffle: bool | str) -> None:
    words = [None if n % 11 == 0 else f"w{n % 5}" for n in range(200)]
    lists = [[*range(n % 4)] for n in range(200)]
    arrays = {"n": range(200), "word": words, "encoded": pa.array(words).dictionary_encode(), "list": lists}
    table = pa.table({**arrays, "floats": pa.array(lists, pa.large_list(pa.float32()))})
    pieces = [table.slice(100), table.slice(0, 100)]  # whose dictionaries have other orders
    recoded = [piece.set_column(2, "encoded", piece["word"].combine_chunks().dictionary_encode()) for piece in pieces]
    server.publish("words", pa.concat_tables(recoded))
    batches = Batches(
        client.dataset("words", transport=transport), codes=["word", "encoded"], batch_size=48, shuffle=shuffle
    )
    seen = []
    for batch in batches:
        for name in ("word", "encoded"):
            assert batch[name].dtype == np.int32
            values = [None if code < 0 else batches.dictionaries[name][code].as_py() for code in batch[name].tolist()]
            assert values == [words[row] for row in batch["n"].tolist()]
        for name in ("list", "floats"):
            values_, offsets = batch[name]
            parts = [values_[start:stop].tolist() for start, stop in pairwise(offsets.tolist())]
            assert parts == [lists[row] for row in batch["n"].tolist()]
        seen += batch["n"].tolist()
    assert sorted(seen) == [*range(200)]
    assert sorted(batches.dictionaries["word"].to_pylist()) == ["w0", "w1", "w2", "w3", "w4"]


@pytest.mark.parametrize(("transport", "shuffle"), WAYS)
def test_codes_of_strings_that_pyarrow_cannot_join(
    server: dis.Server, client: dis.Client, transport: str, shuffle: bool | str
) -> None:
    words = [[f"{part} {n}" for n in range(100)] for part in ("a", "b")]  # together, more than int8 can number
    indices = pa.array(range(100), pa.int8())
    holes = [pa.array([None, *part[1:]]) for part in words]
    columns: dict[str, tuple[list[pa.Array], list[str | None]]] = {
        "view": ([pa.array(part, pa.string_view()) for part in words], [*words[0], *words[1]]),
        "null": (
            [pa.DictionaryArray.from_arrays(indices, part) for part in holes],
            [None, *words[0][1:], None, *words[1][1:]],
        ),
        "wide": ([pa.DictionaryArray.from_arrays(indices, part) for part in words], [*words[0], *words[1]]),
    }
    for name, (arrays, values) in columns.items():
        tables = [pa.table({"n": range(100 * at, 100 * at + 100), name: array}) for at, array in enumerate(arrays)]
        server.publish(f"not joined {name}", pa.concat_tables(tables))
        handle = client.dataset(f"not joined {name}", transport=transport)
        with case(name):
            batches = Batches(handle, codes=[name], batch_size=64, shuffle=shuffle)
            found: dict[int, str | None] = {}
            for batch in batches:
                names = [*batches.dictionaries[name].to_pylist(), None]  # -1 is null
                found |= zip(batch["n"].tolist(), (names[code] for code in batch[name].tolist()), strict=True)
            assert [found[row] for row in range(200)] == values
            if shuffle or name != "view":
                with pytest.raises(OptionError, match=f"pyarrow cannot put rows of column '{name}' together"):
                    [*Batches(handle, as_arrow=[name], batch_size=200, shuffle=shuffle)]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_filter_keeps_rows_of_columns_that_pyarrow_cannot_take(
    server: dis.Server, client: dis.Client, transport: str
) -> None:
    words = [None if n % 5 == 2 else f"a word of number {n}" for n in range(60)]
    views = pa.array(words, pa.string_view())
    columns = {
        "view": views,
        "bytes": pa.array([word and word.encode() for word in words], pa.binary_view()),
        "runs": pa.RunEndEncodedArray.from_arrays(pa.array([7, 20, 60], pa.int32()), pa.array(["a", None, "b"])),
        "view runs": pa.RunEndEncodedArray.from_arrays(pa.array([4, 30, 60], pa.int16()), views[:3]),
    }
    table = pa.table({"n": range(60), **columns})
    server.publish("not taken", pa.concat_tables([table[:50], table[50:]]))
    options: dict[str, Any] = {"filter": pc.field("n").isin([3, 4, 5, 9, 49, 50, 58]), "batch_size": 60}
    handle = client.dataset("not taken", transport=transport)
    (batch,) = Batches(handle, as_arrow=[*columns], **options)
    assert batch["n"].tolist() == [3, 4, 5, 9, 49, 50, 58]
    for name, column in columns.items():
        with case(name):
            batch[name].validate(full=True)
            assert batch[name].type == column.type
            assert batch[name].to_pylist() == [column[n].as_py() for n in batch["n"].tolist()]
    for shuffle in (False, "window"):
        coded = Batches(handle, columns=["n"], codes=["view", "bytes"], shuffle=shuffle, **options)
        (batch,) = coded
        for name in ("view", "bytes"):
            values = [*coded.dictionaries[name].to_pylist(), None]  # -1 is null
            assert [values[code] for code in batch[name].tolist()] == [columns[name][n].as_py() for n in batch["n"]]


def test_filtered_strings_in_views_keep_one_buffer_of_text(server: dis.Server, client: dis.Client) -> None:
    words = [f"a word of number {n}" for n in range(2000)]
    views = pa.array(words, pa.string_view())
    server.publish("many views", pa.table({"n": range(2000), "view": views}))
    server.publish("views in structs", pa.table({"n": range(2000), "s": pa.StructArray.from_arrays([views], ["s"])}))
    even = pc.bit_wise_and(pc.field("n"), 1) == 0
    (batch,) = Batches(client["many views"], as_arrow=["view"], filter=even, batch_size=2000)
    assert batch["view"].to_pylist() == words[::2]
    assert len(pickle.dumps(batch["view"])) < 100_000  # 16 and about 20 bytes a row
    with pytest.raises(OptionError, match="pyarrow cannot put rows of column 's' together"):
        [*Batches(client["views in structs"], as_arrow=["s"], filter=even)]


def test_codes_of_types_without_distinct_values_are_refused(server: dis.Server, client: dis.Client) -> None:
    union = pa.UnionArray.from_sparse(pa.array([0, 1], pa.int8()), [pa.array([1, 2]), pa.array(["a", "b"])])
    type_ = pa.fixed_shape_tensor(pa.int64(), [2, 1], permutation=[1, 0])
    tensors = pa.ExtensionArray.from_storage(type_, pa.array([[1, 2], [3, 4]], pa.list_(pa.int64(), 2)))
    for name, column in {"union": union, "tensors": tensors}.items():
        server.publish(name, pa.table({"c": column}))
        with case(name), pytest.raises(WrongKind, match=r"'c' of codes= is .* pyarrow cannot find"):
            Batches(client[name], codes=["c"])


def test_options_of_columns_that_contradict_are_refused(server: dis.Server, client: dis.Client) -> None:
    columns = {"n": [1, 2], "s": ["a", "b"], "l": [[1], None], "m": [[["x"]], []], "n_mask": [3, 4]}
    published(server, "mixed", pa.table(columns))
    wrongs: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"columns": "n"}, OptionError, "columns is a list of names"),
        ({"features": "n"}, OptionError, "features is a list of names"),
        ({"codes": "s"}, OptionError, "codes is a list of names"),
        ({"features": {"x": "n"}}, OptionError, r"features\['x'\] is a list of names: \['n'\]"),
        ({"columns": ["n"], "features": ["no"]}, ColumnNotFound, "no"),
        ({"columns": ["n"], "fill": {"no": 1}}, ColumnNotFound, "there is no column 'no' for fill"),
        ({"columns": ["n"], "codes": ["no"]}, ColumnNotFound, "no"),
        ({"columns": [], "features": ["n", "s"]}, WrongKind, "'s' is string"),
        ({"columns": ["m"]}, WrongKind, r"'m' is list.*codes="),
        ({"columns": [], "codes": ["m"]}, WrongKind, "'m' of codes= is list.* pyarrow cannot find"),
        ({"columns": [], "codes": ["s"], "fill": {"s": 1}}, OptionError, "its nulls are not replaced"),
        ({"columns": ["n", "s"], "features": {"s": ["n"]}, "codes": ["s"]}, OptionError, "both called 's'"),
        ({"columns": ["n", "n_mask"], "mask": ["n"]}, OptionError, "a column and the mask of column 'n'"),
        ({"columns": ["n"], "features": {"n_mask": ["n"]}, "mask": ["n"]}, OptionError, "a matrix and the mask"),
    ]
    for options, kind, message in wrongs:
        with pytest.raises(kind, match=message):
            Batches(client["mixed"], **options)
    (packed,) = Batches(client["mixed"], columns=["n"], features=["n_mask"], mask=["n"])  # which has no such column
    assert packed["n_mask"].tolist() == [True, True]
    with pytest.raises(OptionError, match="'l' has lists that are null"):
        [*Batches(client["mixed"], columns=["l"])]


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


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_source_that_changes_is_refused_though_its_batches_have_equal_lengths(
    server: dis.Server, client: dis.Client, transport: str
) -> None:
    numbers = [1, 2, 3]
    server.publish("edited", lambda: pa.table({"n": numbers, "m": [7, 8, 9]}))
    handle = client.dataset("edited", transport=transport)
    options: list[dict[str, Any]] = [{"columns": ["m"], "filter": ("n", "<", 3)}, {"columns": [], "codes": ["n"]}]
    for each in options:
        with case(each):
            numbers[:] = 1, 2, 3
            batches = Batches(handle, **each)
            assert [len(column) for batch in batches for column in batch.values()] == [2 if "filter" in each else 3]
            numbers[:] = 4, 2, 1
            with pytest.raises(SourceError, match="other batches each time"):
                next(iter(batches))


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
def test_a_stream_that_can_be_read_once_is_refused_and_keeps_its_rows(
    server: dis.Server, client: dis.Client, transport: str
) -> None:
    options: list[dict[str, Any]] = [{}, {"filter": ("n", ">", 1)}, {"codes": ["n"]}]
    for name, live in (("once", None), ("live", dis.Live())):
        for each in options:
            with case((name, each)):
                server.publish(name, TABLE.select(["n"]).to_reader(), live=live)
                with pytest.raises(ReadOnce, match=f"'{name}' is a stream that can be read only once, .* into a node"):
                    Batches(client.dataset(name, transport=transport), **each)
                assert client.read(name).read_all()["n"].to_pylist() == [*range(ROWS)]


def test_without_pytorch_it_says_what_to_install(client: dis.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # how Python marks a module that is not installed
    with pytest.raises(OptionError, match=r"pip install 'dissociated\[torch\]'"):
        loader(client["data"])
