"""Batches of tensors from PyTorch's own DataLoader."""

from __future__ import annotations

import copy
import gc
import pickle
import struct
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.errors import OptionError, SourceError
from dissociated.torch import loader
from support.helpers import case, wait_until

ROWS = 1000
COLUMNS: dict[str, Any] = {"columns": ["n", "x"], "batch_size": 32, "shuffle": True, "buffer_size": 100}


torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'dissociated[torch]'")


@pytest.fixture(scope="module")
def server() -> Iterator[dis.Server]:
    table = pa.table({"n": range(ROWS), "x": [n / 2 for n in range(ROWS)], "s": map(str, range(ROWS))})
    with dis.Server(["shm:", "tcp://127.0.0.1:0"]) as made:
        made.publish("data", pa.Table.from_batches(table.to_batches(max_chunksize=70)))
        yield made


def rows(batches: Any, stop: int | None = None) -> list[list[int]]:
    """Return the rows of each batch, of at most `stop` batches."""
    found: list[list[int]] = []
    for batch in batches:
        assert torch.equal(batch["x"], batch["n"] / 2)
        found.append(batch["n"].tolist())
        if len(found) == stop:
            break
    return found


def flat(batches: list[list[int]]) -> list[int]:
    return [row for batch in batches for row in batch]


def private_memory(file: str) -> list[range]:
    """Return the private, writable mappings of a file in this process."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if file in line]
    ends = [line[0].split("-") for line in lines if line[1] == "rw-p"]
    return [range(int(start, 16), int(end, 16)) for start, end in ends]


def in_place(tensor: Any, file: str = "/memfd:dissociated:") -> bool:
    return any(tensor.data_ptr() in memory for memory in private_memory(file))


def test_tensors_lie_in_shared_memory_and_what_is_written_to_one_nobody_else_sees(client: dis.Client) -> None:
    handle = client.dataset("data", transport="shm")
    first, second = (iter(loader(handle, columns=["n", "x"], batch_size=30)) for _ in range(2))
    kept = []
    for batch, beside in zip(first, second, strict=True):
        assert torch.equal(batch["x"], batch["n"] / 2)
        batch["x"].add_(1)
        batch["n"].zero_()
        assert torch.equal(beside["x"], beside["n"] / 2)
        kept.append((batch, beside["n"][0].item()))
    assert kept.pop(0)[1] == 0
    assert in_place(kept[0][0]["x"])
    assert in_place(kept[1][0]["n"]) is False, "it is of two record batches"
    assert client.read("data", transport="shm").read_all()["n"].to_pylist() == [*range(ROWS)]
    del first, second, beside
    for number, (batch, row) in enumerate(kept, 1):
        assert row == number * 30
        assert not batch["n"].any()
        assert torch.equal(batch["x"], torch.arange(row, row + len(batch["x"])) / 2 + 1)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_tensors_may_be_written_to_and_the_data_stays_as_it_is(
    client: dis.Client, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dissociated.memory.private.MAX_CLAIMED", 1)  # so that each tensor takes a mapping
    handle = client.dataset("data", transport=transport)
    cases: list[tuple[dict[str, Any], bool]] = [
        ({}, True),
        ({"shuffle": True, "buffer_size": 0}, True),
        ({"shuffle": True}, False),
        ({"writable": True}, False),
    ]
    for options, is_in_place in cases:
        with case(options):
            batches = loader(handle, columns=["n", "x"], batch_size=20, **options)
            kept = []  # more than the permitted number of mappings
            for _ in range(2):
                for batch in batches:
                    assert torch.equal(batch["x"], batch["n"] / 2)
                    batch["x"].copy_(batch["n"]).add_(1)
                    kept.append(batch)
            assert all(torch.equal(batch["x"], batch["n"] + 1) for batch in kept)
            assert any(in_place(batch["n"]) for batch in kept) is (is_in_place and transport == "shm")
    texts = loader(client["data"], as_arrow=["s"], num_workers=1)
    assert [one for batch in texts for one in batch["s"].to_pylist()] == [*map(str, range(ROWS))]


def test_columns_that_share_bytes_are_tensors_that_do_not(
    server: dis.Server, client: dis.Client, tmp_path: Path
) -> None:
    """A segment defines the position of each buffer, and may give the same position twice."""
    sink = pa.BufferOutputStream()
    table = pa.table({"n": range(ROWS), "same": range(ROWS)})
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    apart, together = struct.pack("<qq", 8 * ROWS, 8 * ROWS), struct.pack("<qq", 0, 8 * ROWS)
    stream = sink.getvalue().to_pybytes()
    (tmp_path / "shared.arrows").write_bytes(together.join(stream.rsplit(apart, 1)))
    server.publish("shared", tmp_path / "shared.arrows")
    batches = [*loader(client.dataset("shared", transport="shm"), batch_size=100)]
    assert in_place(batches[0]["n"], "shared.arrows")
    for batch in batches:
        batch["n"].zero_()
    assert [row for batch in batches for row in batch["same"].tolist()] == [*range(ROWS)]


def test_the_memory_is_the_servers_until_the_last_tensor_is_gone(server: dis.Server, client: dis.Client) -> None:
    server.publish("dropped", pa.table({"n": range(ROWS), "same": [7] * ROWS}))

    def held() -> bool:
        return any(consumer.dataset == "dropped" for consumer in server.status().consumers)

    gc.collect()
    gc.disable()
    try:
        batches = loader(client.dataset("dropped", transport="shm"), batch_size=ROWS)
        (batch,) = batches
        tensor = batch["n"]
        del batches, batch
        server.drop("dropped")
        assert held()
        assert tensor.tolist() == [*range(ROWS)]
        assert in_place(tensor)
        del tensor
        wait_until(lambda: not held(), "the memory is given back")
        assert not private_memory("/memfd:dissociated:dropped")
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_dataset_that_was_pickled_has_the_rank_of_the_process_that_reads(
    client: dis.Client, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """A driver sends its dataset to the ranks. It has no rank of its own, and knows none of theirs."""
    from torch.utils.data import DataLoader

    from dissociated.torch import IterableDataset

    pickled = pickle.dumps(IterableDataset(client["data"], columns=["n", "x"], batch_size=32))
    found: list[int] = []
    for rank in range(2):
        for name, value in (("RANK", str(rank)), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1")):
            monkeypatch.setenv(name, value)
        dataset = pickle.loads(pickled)
        found += flat(rows(DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context=method)))
    assert sorted(found) == [*range(ROWS)]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_workers_and_ranks_have_every_row_once_and_go_on_exactly(client: dis.Client, transport: str) -> None:
    options: dict[str, Any] = {**COLUMNS, "num_workers": 2, "multiprocessing_context": "fork"}
    handle = client.dataset("data", transport=transport)
    ranks = [loader(handle, rank=rank, world_size=2, **options) for rank in range(2)]
    assert sorted(row for rank in ranks for row in flat(rows(rank))) == [*range(ROWS)]
    assert len(ranks[0]) == len(ranks[1])
    first = loader(handle, persistent_workers=True, **options)
    epochs = [rows(first), rows(first)]
    assert [len(epoch) for epoch in epochs] == [len(first)] * 2
    assert [sorted(flat(epoch)) for epoch in epochs] == [[*range(ROWS)]] * 2
    assert epochs[0] != epochs[1]
    interrupted = loader(handle, **options)
    interrupted.set_epoch(1)
    assert rows(interrupted, 7) == epochs[1][:7]
    resumed = loader(handle, **options)
    resumed.load_state_dict(interrupted.state_dict())
    assert rows(resumed) == epochs[1][7:]
    # The rest of the epoch is divided anew among other numbers of ranks and workers, also in persistent workers.
    left = sorted(flat(epochs[1][7:]))
    for count, more in ((1, {"num_workers": 0, "multiprocessing_context": None}), (2, {"persistent_workers": True})):
        others = [loader(handle, rank=rank, world_size=count, **{**options, **more}) for rank in range(count)]
        for _ in range(2):
            for other in others:
                other.load_state_dict(interrupted.state_dict())
            assert sorted(row for other in others for row in flat(rows(other))) == left


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_persistent_workers_of_a_copy_read_the_epoch_of_that_copy(client: dis.Client) -> None:
    """A driver sends its loader to the ranks."""
    from torch.utils.data import DataLoader

    from dissociated.torch import IterableDataset

    workers: dict[str, Any] = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "fork"}
    whole = loader(client["data"], **COLUMNS)
    epochs = [rows(whole) for _ in range(4)]
    whole.set_epoch(1)
    rows(whole, 4)
    pickled = pickle.dumps(loader(client["data"], **COLUMNS, **workers))
    resumed, other = pickle.loads(pickled), pickle.loads(pickled)
    resumed.load_state_dict(whole.state_dict())
    found = [(rows(resumed), rows(other)) for _ in range(3)]
    assert found == [(epochs[1][4:], epochs[0]), (epochs[2], epochs[1]), (epochs[3], epochs[2])]
    dataset = pickle.loads(pickle.dumps(IterableDataset(client["data"], **COLUMNS)))
    own = DataLoader(dataset, batch_size=None, **workers)
    assert rows(own) == rows(own) == epochs[0]
    dataset.set_epoch(2)
    assert rows(own) == epochs[2]


def test_a_position_that_was_set_stays_until_a_batch_was_read(server: dis.Server, client: dis.Client) -> None:
    from dissociated.torch import IterableDataset

    is_away = False

    def source() -> pa.Table:
        if is_away:
            raise ConnectionError
        return pa.table({"n": range(ROWS), "x": [n / 2 for n in range(ROWS)]})

    server.publish("away", source)
    for make in (loader, IterableDataset):
        with case(make.__name__):
            is_away = False
            interrupted, resumed = (make(client["away"], **COLUMNS) for _ in range(2))
            interrupted.set_epoch(3)
            assert [interrupted.state_dict()[name] for name in ("epoch", "progress")] == [3, [[1, 1, 0]]]
            rows(interrupted, 5)
            state = interrupted.state_dict()
            resumed.load_state_dict(state)
            is_away = True
            for _ in range(2):
                with pytest.raises(SourceError):
                    rows(resumed)
            assert resumed.state_dict() == state
            is_away = False
            interrupted.set_epoch(3)
            assert rows(resumed) == rows(interrupted)[5:]


def test_a_copy_has_an_epoch_and_a_state_of_its_own(client: dis.Client) -> None:
    from dissociated.torch import IterableDataset

    original = IterableDataset(client["data"], **COLUMNS)
    epochs = [rows(original)]
    copied = copy.copy(original)
    original.set_epoch(1)
    epochs.append(rows(original))
    assert rows(copied) == epochs[0], "a copy has an epoch of its own"
    rows(original, 5)
    state = original.state_dict()
    copied.set_epoch(1)
    copied.load_state_dict(state)
    assert copied.state_dict() == state
    assert rows(copied) == epochs[1][5:]
    assert rows(copied) == epochs[1]
    copied.load_state_dict(copied.state_dict())
    iter(copied)  # as torchdata does with a state after the last batch
    assert rows(copied) == epochs[1]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_persistent_workers_that_cannot_know_the_epoch_say_so(client: dis.Client) -> None:
    from torch.utils.data import ChainDataset, DataLoader
    from torch.utils.data import IterableDataset as TorchIterableDataset

    from dissociated.torch import IterableDataset

    class Unpickling(TorchIterableDataset):  # type: ignore[misc]  # where PyTorch is not installed
        def __init__(self, dataset: Any) -> None:
            self.pickled = pickle.dumps(dataset)
            self.dataset: Any = None

        def __iter__(self) -> Iterator[Any]:
            self.dataset = self.dataset or pickle.loads(self.pickled)
            yield from self.dataset

    def read(dataset: Any) -> Any:
        return DataLoader(
            dataset, batch_size=None, num_workers=1, persistent_workers=True, multiprocessing_context="fork"
        )

    def refused(batches: Any, message: str) -> None:
        with pytest.raises(OptionError, match=message) as error:
            rows(batches)
        traceback.clear_frames(error.tb)
        del batches, error  # Otherwise they refer to each other, and the garbage collector ends the workers slowly.

    stored, shuffled = (IterableDataset(client["data"], **{**COLUMNS, "shuffle": order}) for order in (False, True))
    for dataset in (stored, loader(client["data"], **{**COLUMNS, "shuffle": False}).dataset, shuffled):
        batches = read(Unpickling(dataset))
        assert sorted(flat(rows(batches))) == [*range(ROWS)]
        if dataset is stored:
            assert flat(rows(batches)) == [*range(ROWS)]
            continue
        refused(batches, "does not know the next epoch")
    batches = read(ChainDataset([shuffled, stored]))
    rows(batches, 1)
    stored.set_epoch(1)
    assert flat(rows(batches))[ROWS:] == [*range(ROWS)]
    batches = read(ChainDataset([stored, shuffled]))
    rows(batches, 1)
    shuffled.set_epoch(1)
    refused(batches, "not know which epoch to read: call set_epoch")


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_that_are_no_forks_read_by_themselves(client: dis.Client, method: str) -> None:
    batches = loader(client["data"], num_workers=1, multiprocessing_context=method, **COLUMNS)
    assert sorted(flat(rows(batches))) == [*range(ROWS)]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated", "ignore:This process .* is multi-threaded")
def test_a_stateful_loader_goes_on_exactly(client: dis.Client) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
    from dissociated.torch import IterableDataset

    for workers in (0, 2):

        def made(workers: int = workers) -> Any:
            dataset = IterableDataset(client["data"], **COLUMNS)
            dataset.set_epoch(3)
            context = {"multiprocessing_context": "fork"} if workers else {}
            return stateful.StatefulDataLoader(dataset, batch_size=None, num_workers=workers, **context)

        whole = rows(made())
        assert sorted(flat(whole)) == [*range(ROWS)]
        interrupted = made()
        assert rows(interrupted, 5) == whole[:5]
        resumed = made()
        resumed.load_state_dict(interrupted.state_dict())
        assert rows(resumed) == whole[5:]


def test_ranks_are_those_of_torch_distributed(client: dis.Client, tmp_path: Any) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        assert len(flat(rows(loader(client["data"], **COLUMNS)))) == ROWS
    finally:
        torch.distributed.destroy_process_group()
    wrongs: list[tuple[dict[str, Any], str]] = [
        ({"rank": 0}, "give rank and world_size"),
        ({"rank": 1, "world_size": 1}, "rank is a number"),
        ({"sampler": []}, "sampler is not for this loader"),
        ({"colums": ["n"]}, r"there is no option 'colums' \(did you mean 'columns'\?\); there are as_arrow, "),
        ({"workers": 2}, r"there is no option 'workers' \(did you mean 'num_workers'\?\)"),
        ({"zzz": 2}, "there is no option 'zzz'; there are as_arrow, "),
    ]
    for wrong, message in wrongs:
        with pytest.raises(OptionError, match=message):
            loader(client["data"], **COLUMNS, **wrong)
